use proptest::prelude::*;

use super::budget::BudgetPage;
use super::floors::Floors;
use super::layout::{COARSE_BYTES, SlotLayout};
use super::record::{KeyKind, Record, RecordKind};
use super::sealed::{
    GONE_PER_PAGE, GonePage, RegionHeader, RegionLayout, RegionState, decode_records, encode_region, region_bytes,
};
use super::slot::{SlotHeader, TLV_OBJECT_NAME};
use super::superblock::Superblock;
use super::*;
use crate::geometry::Geometry;
use crate::key::ChunkKey;

fn record(n: u64) -> Record {
    Record {
        parent: ChunkKey([3; 32]),
        sequence: n,
        segment: 4,
        epoch: 5,
        page: 6,
        pages: 7,
        header_crc: 8,
        tokens: 256,
        tenant: 9,
        depth: 10,
        hotness: 11,
        expiry_s: 12,
        length: 13,
        group: 15,
        ..Record::new(RecordKind::Put, KeyKind::Chain, ChunkKey([2; 32]))
    }
}

fn superblock(generation: u64) -> Superblock {
    Superblock {
        features: [0; 3],
        generation,
        mount_generation: 2,
        lane: [3; 16],
        drive: [4; 16],
        fingerprint: [5; 32],
        layers_digest: [6; 32],
        segment_bytes: 1 << 26,
        region_bytes: 8192,
        ring_offset: 8192,
        ring_pages: 16,
        chunk_tokens: 256,
        regions_offset: 8192 + 16 * 4096,
        created_ms: 7,
        model: "m".into(),
        shard: "s".into(),
    }
}

fn header(layout: &SlotLayout) -> SlotHeader {
    let crcs: Vec<u32> = (0..layout.extents.len() as u32).collect();
    SlotHeader {
        parent: ChunkKey([1; 32]),
        tokens: 16,
        sequence: 77,
        pages: layout.pages(),
        layers: SlotHeader::layer_table(layout, &crcs),
        tlvs: vec![(TLV_OBJECT_NAME, vec![1; 64]), (99, vec![2; 3])],
        ..SlotHeader::new(KeyKind::Chain, ChunkKey([9; 32]))
    }
}

#[test]
fn structures_come_back_as_they_were_written() {
    assert_eq!(Record::decode(&record(1).encode()).unwrap(), record(1));
    let records: Vec<_> = (0..journal::RECORDS_PER_PAGE as u64).map(record).collect();
    let page = journal::decode(&journal::encode(8, &[7; 16], &records)).unwrap();
    assert_eq!((page.number, page.lane, page.records, page.damaged), (8, [7; 16], records.clone(), 0));
    assert_eq!(Superblock::decode(&superblock(1).encode()).unwrap(), superblock(1));
    let region = RegionHeader {
        lane: [1; 16],
        segment: 4,
        epoch: 5,
        state: RegionState::Sealed,
        count: records.len() as u32,
        min_sequence: 4,
        max_sequence: 5,
        sealed_ms: 6,
        records_sum: 0,
    };
    let bytes = encode_region(&region, 2, &records);
    let read = RegionHeader::decode(&bytes).unwrap().unwrap();
    assert_eq!(RegionHeader { records_sum: 0, ..read }, region);
    assert_eq!(decode_records(&bytes[3 * PAGE_BYTES..], &read), (records.clone(), 0));
    // As the use before has left them.
    let before =
        RegionHeader::decode(&encode_region(&RegionHeader { epoch: 6, ..region }, 2, &records)).unwrap().unwrap();
    assert_eq!(decode_records(&bytes[3 * PAGE_BYTES..], &before), (vec![], before.count));
    // Sealed again without the first record, and torn.
    let fewer = RegionHeader { count: read.count - 1, ..read };
    let again = RegionHeader::decode(&encode_region(&fewer, 2, &records[1..])).unwrap().unwrap();
    assert_eq!(decode_records(&bytes[3 * PAGE_BYTES..], &again), (records[..records.len() - 1].to_vec(), 1));
    assert!(bytes[PAGE_BYTES..3 * PAGE_BYTES].chunks(PAGE_BYTES).all(|page| GonePage::decode(page).is_none()));
    let slots: Vec<u32> = (0..GONE_PER_PAGE as u32).map(|n| n * 3).collect();
    let gone = GonePage { lane: [1; 16], segment: 2, epoch: 3, settled: 3, slots };
    assert_eq!(GonePage::decode(&gone.encode()), Some(gone.clone()));
    assert_eq!(gone.encode().len(), PAGE_BYTES);
    assert_eq!(RegionHeader::decode(&[0; PAGE_BYTES]).unwrap(), None, "never written");
    let layout = SlotLayout::of_chunk(&Geometry::preset("tiny").unwrap(), 16);
    let (bytes, sum) = header(&layout).encode(&layout).unwrap();
    let (back, sum_back) = SlotHeader::decode(&bytes).unwrap();
    assert_eq!((&back, sum_back), (&header(&layout), sum));
    assert!(back.fits(&layout) && back.tlv(99) == Some(&[2; 3][..]));
    let budget = BudgetPage { drive: [1; 16], created_ms: 2 };
    assert_eq!(BudgetPage::decode(&budget.encode()).unwrap(), budget);
}

#[test]
fn extents_start_on_64_kib_only_where_that_is_cheap() {
    let llama = Geometry::preset("llama-3.1-8b").unwrap();
    let big = SlotLayout::of_chunk(&llama, 256);
    assert_eq!((big.align as usize, big.header_offset, big.header_bytes), (COARSE_BYTES, (60 << 10), 4096));
    assert_eq!(big.slot_bytes, (32 << 20) + (64 << 10));
    let mla = SlotLayout::of_chunk(&Geometry::preset("deepseek-v3").unwrap(), 256);
    assert_eq!((mla.align as usize, mla.header_offset, mla.extents[0].offset), (PAGE_BYTES, 0, 4096));
    for tokens in 1..256 {
        let part = SlotLayout::of_chunk(&llama, tokens);
        assert!(part.extents.windows(2).all(|w| w[0].offset + u64::from(w[0].padded_len) == w[1].offset));
        assert!(part.slot_bytes.is_multiple_of(u64::from(part.align)) && part.slot_bytes <= big.slot_bytes);
    }
}

#[test]
fn the_newer_superblock_counts_and_a_damaged_one_is_passed_over() {
    let (a, b) = (superblock(4).encode(), superblock(5).encode());
    assert_eq!(Superblock::newest(&a, &b).unwrap().generation, 5);
    let mut torn = b.clone();
    torn[500] ^= 1;
    assert_eq!(Superblock::newest(&a, &torn).unwrap().generation, 4);
    for bit in 0..32 {
        let mut torn = b.clone();
        torn[12 + bit / 8] ^= 1 << (bit % 8);
        assert_eq!(Superblock::newest(&a, &torn).unwrap().generation, 4, "bit {bit} of the version");
    }
    assert_eq!(Superblock::newest(&torn, &torn).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(Superblock::newest(&[], &[]).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn a_newer_version_or_unknown_feature_is_refused_and_not_called_damage() {
    let mut future = superblock(1).encode();
    le::put_u32(&mut future, 12, VERSION + 1);
    // Whose sum may lie elsewhere.
    assert_eq!(Superblock::newest(&future, &future).unwrap_err().kind(), ErrorKind::Incompatible);
    let sum = crc_with_hole(&future, 8);
    le::put_u32(&mut future, 8, sum);
    assert_eq!(Superblock::newest(&future, &superblock(9).encode()).unwrap_err().kind(), ErrorKind::Incompatible);
    let odd = Superblock { features: [0, 0, 1], ..superblock(1) };
    assert_eq!(Superblock::decode(&odd.encode()).unwrap_err().kind(), ErrorKind::Incompatible);
    let ro = Superblock { features: [1, 1, 0], ..superblock(1) };
    assert_eq!(Superblock::decode(&ro.encode()).unwrap().access(), FeatureAccess::ReadOnly);
}

/// Checks that the parts of a region of `bytes` bytes, made for `records` records, fit into it.
fn assert_parts_fit(records: usize, bytes: usize) {
    let layout = RegionLayout::of(bytes as u64);
    assert!(layout.records >= records, "{layout:?} of {bytes} for {records}");
    let of_records = (layout.records * record::RECORD_BYTES).next_multiple_of(PAGE_BYTES);
    assert!(layout.records_at() + of_records <= bytes, "{layout:?}: the records reach beyond {bytes}");
    assert_eq!(layout.records_at(), (1 + layout.gone_pages) * PAGE_BYTES, "the list ends where the records begin");
    // Every slot of the segment can be listed: there are no more of them than records.
    assert!(layout.gone_pages * GONE_PER_PAGE >= layout.records);
    assert!(layout.gone_pages.saturating_sub(1) * GONE_PER_PAGE < layout.records.max(1), "no page too many");
    // No room is left for another record together with what it may take of the list.
    assert!(region_bytes(layout.records + 2 * PAGE_BYTES / record::RECORD_BYTES + 1) > bytes, "{layout:?} of {bytes}");
}

#[test]
fn the_parts_of_a_region_never_overlap_at_the_bounds() {
    for pages in 1..4 {
        for records in pages * GONE_PER_PAGE - 70..pages * GONE_PER_PAGE + 70 {
            assert_parts_fit(records, region_bytes(records));
        }
    }
    assert_eq!(RegionLayout::of(0).records, 0);
    assert_eq!(RegionLayout::of(2 * PAGE_BYTES as u64).records, 0, "a list of one page, and nothing to be listed");
}

#[test]
fn an_older_version_is_refused_with_what_to_do_about_it_and_damage_is_not_called_so() {
    let mut old = superblock(1).encode();
    le::put_u32(&mut old, 12, VERSION - 1);
    assert_eq!(Superblock::decode(&old).unwrap_err().kind(), ErrorKind::Corrupt, "a flipped bit of the version");
    let sum = crc_with_hole(&old, 8);
    le::put_u32(&mut old, 8, sum);
    let e = Superblock::newest(&old, &[0; PAGE_BYTES]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Incompatible);
    assert!(e.advice_text().is_some_and(|advice| advice.contains("forebay purge")), "{e}");
}

proptest! {
    #[test]
    fn a_region_made_for_records_holds_them_and_its_parts_never_overlap(records in 0usize..200_000, more in 0usize..9000) {
        assert_parts_fit(records, region_bytes(records));
        // Of a size that no number of records gives.
        let bytes = region_bytes(records) + more * PAGE_BYTES;
        assert_parts_fit(records, bytes);
    }

    #[test]
    fn any_flipped_bit_is_noticed(bit in 0usize..4096 * 8, small in 0..record::RECORD_BYTES * 8) {
        let flip = |bytes: &[u8], bit: usize| { let mut b = bytes.to_vec(); b[bit / 8] ^= 1 << (bit % 8); b };
        prop_assert!(Record::decode(&flip(&record(1).encode(), small)).is_err());
        prop_assert!(Superblock::decode(&flip(&superblock(1).encode(), bit)).is_err());
        let layout = SlotLayout::of_chunk(&Geometry::preset("tiny").unwrap(), 16);
        let (bytes, _) = header(&layout).encode(&layout).unwrap();
        prop_assert!(SlotHeader::decode(&flip(&bytes, bit % (bytes.len() * 8))).is_err());
        let gone = GonePage { lane: [1; 16], segment: 2, epoch: 3, settled: 1, slots: vec![4, 5] };
        prop_assert!(GonePage::decode(&flip(&gone.encode(), bit)).is_none());
        let page = journal::encode(1, &[7; 16], &[record(1), record(2)]);
        let intact = journal::decode(&page).unwrap().records;
        if let Ok(p) = journal::decode(&flip(&page, bit)) {
            prop_assert!(p.records.iter().all(|r| intact.contains(r)));
        }
    }

    #[test]
    fn decoders_are_total(bytes in proptest::collection::vec(any::<u8>(), 0..9000), keep_magic in any::<bool>()) {
        let mut bytes = bytes;
        for magic in [&b"FBSLOT01"[..], b"FBSUPER1", b"FBJRNL01", b"FBSEAL01", b"FBBUDGT1", b"FBGONE01", b"FBFLOOR1"] {
            if keep_magic && bytes.len() >= 8 { bytes[..8].copy_from_slice(magic); }
            let _ = (SlotHeader::decode(&bytes), Superblock::decode(&bytes), journal::decode(&bytes));
            let _ = (RegionHeader::decode(&bytes), BudgetPage::decode(&bytes), Record::decode(&bytes));
            let any = RegionHeader { lane: [0; 16], segment: 2, epoch: 3, state: RegionState::Sealed, count: u32::MAX, min_sequence: 0, max_sequence: 0, sealed_ms: 0, records_sum: 0 };
            let _ = (decode_records(&bytes, &any), GonePage::decode(&bytes), Floors::decode(&bytes));
        }
    }
}
