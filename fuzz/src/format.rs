//! Pages of a lane's files. The CRC that guards a page would turn nearly every input away at the
//! door, so an input is tried twice: as it is, and with its magic and its CRCs set right, as a page
//! of an attacker or of a faulty writer might be.

use forebay::format::floors::{FLOORS_BYTES, Floors, MOST_TENANTS};
use forebay::format::journal::{self, RECORDS_PER_PAGE};
use forebay::format::record::{RECORD_BYTES, Record};
use forebay::format::sealed::{self, GONE_PER_PAGE, GonePage, RegionHeader};
use forebay::format::slot::SlotHeader;
use forebay::format::superblock::Superblock;
use forebay::format::{PAGE_BYTES, layout::SlotLayout};
use forebay::geometry::Geometry;

/// Bytes of a journal page before its records.
const PAGE_HEADER_BYTES: usize = 64;

/// `input` as a page, or as whole pages where it is longer.
fn pages(input: &[u8]) -> Vec<u8> {
    let mut page = input.to_vec();
    page.resize(input.len().next_multiple_of(PAGE_BYTES).max(PAGE_BYTES), 0);
    page
}

/// Sets the CRC of `bytes`, which lies at `at` within them.
fn sign(bytes: &mut [u8], at: usize) {
    if let Some(hole) = bytes.get_mut(at..at + 4) {
        hole.fill(0);
        let crc = crc32fast::hash(bytes);
        bytes.iter_mut().skip(at).zip(crc.to_le_bytes()).for_each(|(to, from)| *to = from);
    }
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes.iter_mut().skip(at).zip(value).for_each(|(to, from)| *to = *from);
}

/// Makes the records of `body` intact.
fn sign_records(body: &mut [u8]) {
    for record in body.chunks_exact_mut(RECORD_BYTES) {
        let (crc, rest) = record.split_at_mut(4);
        crc.copy_from_slice(&crc32fast::hash(rest).to_le_bytes());
    }
}

/// A record that was read is written as one that reads the same.
fn same_records(records: &[Record]) {
    for record in records {
        assert_eq!(Record::decode(&record.encode()).ok().as_ref(), Some(record));
    }
}

pub(crate) fn superblock(input: &[u8]) {
    let mut page = pages(input);
    for signed in [false, true] {
        if signed {
            put(&mut page, 0, b"FBSUPER1");
            if let Some(first) = page.get_mut(..PAGE_BYTES) {
                sign(first, 8);
            }
        }
        if let Ok(read) = Superblock::decode(&page) {
            // Texts are for people: what is no UTF-8 is replaced, and cut where that makes it
            // longer.
            let plain = Superblock { model: String::new(), shard: String::new(), ..read.clone() };
            assert_eq!(Superblock::decode(&plain.encode()).ok().as_ref(), Some(&plain));
            assert!(read.regions_offset >= read.ring_offset, "tables lie behind the ring");
            let _ = read.access();
        }
        let (a, b) = page.split_at(PAGE_BYTES.min(page.len()));
        let _ = Superblock::newest(a, b);
        let _ = Superblock::newest(b, a);
    }
}

pub(crate) fn journal(input: &[u8]) {
    let mut page = pages(input);
    page.truncate(PAGE_BYTES);
    for signed in [false, true] {
        if signed {
            put(&mut page, 0, b"FBJRNL01");
            let (header, body) = page.split_at_mut(PAGE_HEADER_BYTES);
            sign(header, 36);
            sign_records(body);
        }
        if let Ok(read) = journal::decode(&page) {
            assert!(read.records.len() + read.damaged as usize <= RECORDS_PER_PAGE);
            same_records(&read.records);
            let again = journal::decode(&journal::encode(read.number, &read.lane, &read.records));
            assert_eq!(again.map(|p| (p.number, p.lane, p.records)).ok(), Some((read.number, read.lane, read.records)));
        }
    }
}

/// A list of what is gone from a segment.
fn gone_page(input: &[u8]) {
    let mut page = input.get(..PAGE_BYTES).unwrap_or_default().to_vec();
    for signed in [false, true] {
        if signed {
            put(&mut page, 0, b"FBGONE01");
            sign(&mut page, 8);
        }
        if let Some(read) = GonePage::decode(&page) {
            assert!(read.slots.len() <= GONE_PER_PAGE);
            assert_eq!(GonePage::decode(&read.encode()).as_ref(), Some(&read));
        }
    }
}

/// Floors of a shard.
fn floors(input: &[u8]) {
    let mut copy = input.to_vec();
    copy.resize(FLOORS_BYTES, 0);
    for signed in [false, true] {
        if signed {
            put(&mut copy, 0, b"FBFLOOR1");
            sign(&mut copy, 8);
        }
        if let Ok(read) = Floors::decode(&copy) {
            assert!(read.tenants.len() <= MOST_TENANTS);
            assert_eq!(Floors::decode(&read.encode()).ok().as_ref(), Some(&read));
            assert_eq!(Floors::newest(&copy, &[0; FLOORS_BYTES]).ok(), Some(read));
        }
    }
}

pub(crate) fn sealed_table(input: &[u8]) {
    let mut region = pages(input);
    gone_page(&region);
    floors(&region);
    for signed in [false, true] {
        let (first, body) = region.split_at_mut(PAGE_BYTES);
        if signed {
            put(first, 0, b"FBSEAL01");
            sign(first, 8);
            sign_records(body);
        }
        let Ok(Some(header)) = RegionHeader::decode(first) else { continue };
        assert_eq!(RegionHeader::decode(&header.encode()).ok().flatten().as_ref(), Some(&header));
        let (records, damaged) = sealed::decode_records(body, &header);
        let missing = u64::from(header.count) - records.len() as u64;
        assert!(u64::from(damaged) == missing || (missing, damaged) == (0, 1));
        same_records(&records);
        let whole = RegionHeader { count: records.len() as u32, ..header };
        let again = sealed::encode_region(&whole, 0, &records);
        let (first, body) = again.split_at(PAGE_BYTES);
        let read = RegionHeader::decode(first).ok().flatten();
        let same = read.map(|read| RegionHeader { records_sum: header.records_sum, ..read });
        assert_eq!(same.as_ref(), Some(&whole));
        assert_eq!(read.map(|read| sealed::decode_records(body, &read)), Some((records, 0)));
    }
}

pub(crate) fn slot_header(input: &[u8]) {
    let mut bytes = pages(input);
    let layout = Geometry::preset("tiny").map(|geometry| SlotLayout::of_chunk(&geometry, geometry.chunk_tokens));
    for signed in [false, true] {
        if signed {
            put(&mut bytes, 0, b"FBSLOT01");
            let pages = (input.get(8).copied().unwrap_or(1) as usize % (bytes.len() / PAGE_BYTES)).max(1);
            put(&mut bytes, 8, &((pages * PAGE_BYTES) as u32).to_le_bytes());
            if let Some(header) = bytes.get_mut(..pages * PAGE_BYTES) {
                sign(header, 12);
            }
        }
        let Ok((header, crc)) = SlotHeader::decode(&bytes) else { continue };
        let held: usize = header.tlvs.iter().map(|(_, value)| value.len() + 8).sum();
        assert!(held + header.layers.len() * 16 <= bytes.len(), "more than the header holds");
        if let Ok(layout) = &layout {
            let _ = header.fits(layout);
            // A header that goes where it came from says the same there, unless it has more than
            // fits.
            if let Ok((again, _)) = header.encode(layout) {
                assert_eq!(SlotHeader::decode(&again).map(|(h, _)| h).ok().as_ref(), Some(&header));
            }
        }
        let mut flipped = bytes.clone();
        let at = crc as usize % PAGE_BYTES;
        flipped.iter_mut().skip(at).take(1).for_each(|b| *b ^= 1 << (crc >> 29));
        assert!(SlotHeader::decode(&flipped).is_err(), "a flipped bit at {at} was not noticed");
    }
}
