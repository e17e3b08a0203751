//! The golden fixtures of the codec `exp4`: an extent as it was first coded, and the header of the
//! slot that it lies in. Today's code must read them, and so must a decoder that is written here
//! from docs/format.md alone.
//!
//! `tests/fixtures/exp4/extent.txt` has a line for every 192 bytes of the coded extent, in
//! hexadecimal, behind the number of times that they follow each other; `header.txt` the bytes of
//! the header without the zeros at its end. They were written by the ignored test [`generate`], and
//! must never be written again.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::fs;

use forebay::device::{decode_exp4, encode_exp4};
use forebay::format::PAGE_BYTES;
use forebay::format::crc;
use forebay::format::exp4::CodedShape;
use forebay::format::layout::{SlotCodec, SlotLayout};
use forebay::format::record::KeyKind;
use forebay::format::slot::SlotHeader;
use forebay::geometry::{DType, Geometry, LayerSpec};
use forebay::key::ChunkKey;

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/exp4/extent.txt");
const HEADER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/exp4/header.txt");
const LINE: usize = 192;
/// Two segments, the second of a block and a part of one.
const VALUES: usize = 128 * 128 + 128 + 30;

/// The values that were coded: twelve exponents, with others here and there.
fn values() -> Vec<u16> {
    let plain = |i: usize| {
        let i = i % 128;
        ((i as u16).wrapping_mul(517) & 0x807f) | (116 + (i as u16 * 5) % 12) << 7
    };
    let mut values: Vec<u16> = (0..VALUES).map(plain).collect();
    // A quiet and a signalling NaN with payloads, infinity, denormals, both zeros, the largest
    // value.
    let odd = [0x7fc1, 0xff85, 0x7f80, 0x0001, 0x807f, 0x0000, 0x8000, 0x7f7f];
    for (n, value) in odd.into_iter().enumerate() {
        values[n * 17] = value;
        values[VALUES - 1 - n] = value;
    }
    values[128 * 128 - 1] = 0xff81;
    values
}

fn bytes(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn golden() -> Vec<u8> {
    let mut coded = Vec::new();
    for line in fs::read_to_string(FIXTURE).unwrap().lines() {
        let (count, hex) = line.split_once(' ').unwrap();
        let bytes: Vec<u8> =
            (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect();
        (0..count.parse().unwrap()).for_each(|_| coded.extend_from_slice(&bytes));
    }
    coded
}

/// The decoder of docs/format.md.
fn decode_by_the_page(coded: &[u8], n: usize) -> Vec<u16> {
    let (blocks, mut values) = (n.div_ceil(128), Vec::new());
    let segments = blocks.div_ceil(128);
    let tail = &coded[192 * blocks..];
    for i in 0..n {
        let (block, at, segment) = (&coded[192 * (i / 128)..], i % 128, i / 128 / 128);
        let code = if at < 64 { block[at] & 15 } else { block[at - 64] >> 4 };
        let exponent = tail[20 * segment + code as usize];
        let byte = u16::from(block[64 + at]);
        values.push((byte & 0x80) << 8 | u16::from(exponent) << 7 | byte & 0x7f);
    }
    let mut from = 0;
    for segment in 0..segments {
        let end = u32::from_le_bytes(tail[20 * segment + 16..][..4].try_into().unwrap()) as usize;
        for escape in tail[20 * segments..].chunks(3).take(end).skip(from) {
            let i = 128 * 128 * segment + usize::from(u16::from_le_bytes([escape[0], escape[1]]));
            values[i] = values[i] & 0x807f | u16::from(escape[2]) << 7;
        }
        from = end;
    }
    assert_eq!(coded.len(), (192 * blocks + 20 * segments + 3 * n.div_ceil(1024)).next_multiple_of(4096));
    values
}

#[test]
fn the_golden_extent_is_decoded_by_todays_code_and_by_the_page_that_describes_it() {
    let (coded, values) = (golden(), values());
    assert_eq!(CodedShape::of(2 * VALUES).unwrap().coded_bytes(), coded.len());
    assert!(decode_exp4(&coded, 2 * VALUES).unwrap() == bytes(&values));
    assert!(decode_by_the_page(&coded, VALUES) == values);
    let today = encode_exp4(&bytes(&values)).unwrap();
    assert!(decode_by_the_page(&today, VALUES) == values);
}

/// A chunk of one opaque block with the values of the golden extent.
fn golden_layout() -> SlotLayout {
    let layers = vec![LayerSpec::opaque(16, 2 * VALUES as u32)];
    let geometry = Geometry::new("golden", DType::named("bfloat16").unwrap(), layers, 16).unwrap();
    SlotLayout::of_coded_chunk(&geometry, 16, SlotCodec::Exp4)
}

#[test]
fn the_golden_slot_is_read_by_todays_code_and_by_the_page_that_describes_it() {
    let (text, layout, coded) = (fs::read_to_string(HEADER).unwrap(), golden_layout(), golden());
    let hex = text.trim();
    let mut page: Vec<u8> =
        (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect();
    page.resize(PAGE_BYTES, 0);
    let number = |at: usize, len: usize| page[at..at + len].iter().rfold(0, |n, b| n << 8 | u64::from(*b));
    assert_eq!((&page[..8], number(8, 4), number(36, 4)), (&b"FBSLOT01"[..], PAGE_BYTES as u64, 1));
    // Tokens, codec, checksum, payload bytes before the codec, pages of the slot.
    let fields = [(112, 4), (132, 2), (134, 2), (144, 8), (212, 4)].map(|(at, len)| number(at, len));
    assert_eq!(fields, [16, 1, 1, 2 * VALUES as u64, 8]);
    // The layer: its place behind the header, the length of the coded bytes and their CRC.
    let of_layer = (number(512, 8), number(520, 4), number(524, 4));
    assert_eq!(of_layer, (PAGE_BYTES as u64, coded.len() as u64, u64::from(crc(&coded))));
    let (header, _) = SlotHeader::decode(&page).unwrap();
    assert!(header.fits(&layout) && header.codec == SlotCodec::Exp4);
    assert_eq!(header.layers, SlotHeader::layer_table(&layout, &[crc(&coded)]));
}

#[test]
fn coded_slots_are_shorter_and_their_headers_say_the_codec() {
    let geometry = Geometry::preset("llama-3.1-8b").unwrap();
    let layouts = [SlotCodec::None, SlotCodec::Exp4].map(|codec| SlotLayout::of_coded_chunk(&geometry, 256, codec));
    assert_eq!(layouts.each_ref().map(SlotLayout::payload), [32 << 20; 2]);
    // 3/4 of each extent and a page, and a page for the header.
    assert_eq!(layouts[1].slot_bytes, 32 * ((768 << 10) + 4096) + 4096);
    let crcs = vec![7; 32];
    for layout in &layouts {
        let header = SlotHeader {
            codec: layout.codec(),
            layers: SlotHeader::layer_table(layout, &crcs),
            ..SlotHeader::new(KeyKind::Chain, ChunkKey([1; 32]))
        };
        let (mut page, _) = header.encode(layout).unwrap();
        assert_eq!(u16::from_le_bytes([page[132], page[133]]), layout.codec().to_u16());
        let found = SlotHeader::decode(&page).unwrap().0;
        assert_eq!(layouts.each_ref().map(|other| found.fits(other)), layouts.each_ref().map(|other| other == layout));
        // A codec of a later version.
        page[132] = 9;
        page[12..16].fill(0);
        let crc = crc(&page);
        page[12..16].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(SlotHeader::decode(&page).unwrap_err().kind(), forebay::ErrorKind::Incompatible);
    }
}

#[test]
fn no_slot_is_larger_for_the_codec_and_every_length_tells_it() {
    for name in forebay::geometry::PRESETS {
        let geometry = Geometry::preset(name).unwrap();
        for tokens in 1..=geometry.chunk_tokens {
            let [plain, coded] =
                [SlotCodec::None, SlotCodec::Exp4].map(|c| SlotLayout::of_coded_chunk(&geometry, tokens, c));
            assert!(coded == plain || coded.pages() < plain.pages(), "{name}, {tokens} tokens");
            assert_eq!(coded == plain, coded.codec() == SlotCodec::None);
            assert!(coded.extents.iter().all(|e| (e.offset as usize).is_multiple_of(PAGE_BYTES)));
        }
    }
}

#[test]
fn slots_of_objects_have_an_extent_for_each_mebibyte_and_every_length_tells_the_codec() {
    let coded_bytes = |payload: usize| CodedShape::of(payload).unwrap().coded_bytes() as u32;
    let layout = SlotLayout::of_coded_bytes((3 << 20) + 20_000, 1088);
    let expected: Vec<(u32, u32)> =
        [1 << 20, 1 << 20, 1 << 20, 20_000].map(|payload| (payload as u32, coded_bytes(payload))).to_vec();
    assert_eq!(layout.extents.iter().map(|e| (e.payload, e.len)).collect::<Vec<_>>(), expected);
    // From the page behind the header on, one after the other.
    let places = expected.iter().scan(4096, |at, (_, len)| {
        *at += len;
        Some(u64::from(*at - len))
    });
    assert!(layout.extents.iter().map(|e| e.offset).eq(places));
    assert_eq!(layout.slot_bytes, 4096 + expected.iter().map(|(_, len)| u64::from(*len)).sum::<u64>());
    let lengths = (1..70_000).step_by(7).chain((1..20 << 20).step_by(99_991)).chain([16 << 20, (16 << 20) - 2]);
    for len in lengths {
        let [plain, coded] = [SlotLayout::of_bytes(len, 1088), SlotLayout::of_coded_bytes(len, 1088)];
        assert!(coded == plain || coded.pages() < plain.pages(), "{len} bytes");
        assert_eq!(coded == plain, coded.codec() == SlotCodec::None, "{len} bytes");
        assert_eq!(coded.payload(), len as u64);
        assert!(len % 2 == 0 || coded == plain, "{len} bytes are no 16-bit values");
        assert!(len < 20_000 || len % 2 == 1 || coded != plain, "{len} bytes are worth it");
    }
}

/// Writes the fixtures that are not there.
#[test]
#[ignore = "a fixture is never written again"]
fn generate() {
    if !fs::exists(HEADER).unwrap() {
        let layout = golden_layout();
        let header = SlotHeader {
            codec: layout.codec(),
            tokens: 16,
            depth: 3,
            start_position: 48,
            logical_len: layout.payload(),
            created_ms: 1_760_000_000_000,
            sequence: 5 << 40 | 77,
            segment: 2,
            epoch: 1,
            page: 9,
            pages: layout.pages(),
            lane: [0x1a; 16],
            layers: SlotHeader::layer_table(&layout, &[crc(&golden())]),
            ..SlotHeader::new(KeyKind::Chain, ChunkKey([0xc4; 32]))
        };
        let (page, _) = header.encode(&layout).unwrap();
        let end = page.iter().rposition(|b| *b != 0).unwrap() + 1;
        let hex: String = page[..end].iter().map(|b| format!("{b:02x}")).collect();
        fs::write(HEADER, hex + "\n").unwrap();
    }
    if fs::exists(FIXTURE).unwrap() {
        return;
    }
    let mut lines: Vec<(usize, String)> = Vec::new();
    for line in encode_exp4(&bytes(&values())).unwrap().chunks(LINE) {
        let hex: String = line.iter().map(|b| format!("{b:02x}")).collect();
        match lines.last_mut() {
            Some((count, last)) if *last == hex => *count += 1,
            _ => lines.push((1, hex)),
        }
    }
    let text: String = lines.iter().map(|(count, hex)| format!("{count} {hex}\n")).collect();
    fs::create_dir_all(std::path::Path::new(FIXTURE).parent().unwrap()).unwrap();
    fs::write(FIXTURE, text).unwrap();
}
