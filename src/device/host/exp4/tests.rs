use proptest::prelude::*;

use super::kernels::CodecKernels;
use super::*;
use crate::format::exp4::{Dictionary, ENTRIES, decode_blocks, encode_blocks};

/// Miri takes a second for some ten thousand bytes.
const SEGMENTS: usize = if cfg!(miri) { 1 } else { 3 };

fn bytes(values: impl IntoIterator<Item = u16>) -> Vec<u8> {
    values.into_iter().flat_map(u16::to_le_bytes).collect()
}

/// Numbers that look random, the same for the same seed.
fn random(mut seed: u64) -> impl FnMut() -> u64 {
    move || {
        seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// A value as KV has it: its exponent is geometrically distributed below 128.
fn like_kv(random: u64) -> u16 {
    let below = (random >> 16 | 1 << 30).trailing_zeros() as u16;
    (random as u16 & 0x807f) | (127 - below.min(100)) << 7
}

fn like_kv_bytes(values: usize, seed: u64) -> Vec<u8> {
    let mut random = random(seed);
    bytes(std::iter::repeat_with(|| like_kv(random())).take(values))
}

/// Codes with each kernel, which must agree, and decodes with each.
fn assert_kernels_agree(raw: &[u8], dictionary: &Dictionary) {
    let (blocks_len, mut expected_escapes) = (raw.len() / BLOCK_RAW_BYTES * BLOCK_BYTES, Vec::new());
    let mut expected = vec![0xa5; blocks_len];
    encode_blocks(raw, dictionary, &mut expected, &mut expected_escapes);
    let mut decoded = vec![0; raw.len()];
    decode_blocks(&expected, dictionary, &mut decoded);
    patch(expected_escapes.iter().copied(), 0, &mut decoded);
    assert!(decoded == raw, "the portable kernel");
    for kernels in CodecKernels::all() {
        let (mut blocks, mut escapes) = (vec![0x5a; blocks_len], Vec::new());
        (kernels.encode)(raw, dictionary, &mut blocks, &mut escapes);
        assert!(blocks == expected && escapes == expected_escapes, "{} codes otherwise", kernels.name);
        let mut decoded = vec![0x3c; raw.len()];
        (kernels.decode)(&blocks, dictionary, &mut decoded);
        patch(escapes.into_iter(), 0, &mut decoded);
        assert!(decoded == raw, "{} decodes otherwise", kernels.name);
    }
}

#[test]
fn every_pattern_of_sixteen_bits_comes_back_in_every_kernel() {
    let all = bytes(0..=u16::MAX);
    let step = if cfg!(miri) { 120 } else { 37 };
    for segment in all.chunks(SEGMENT_RAW_BYTES).step_by(if cfg!(miri) { 4 } else { 1 }) {
        for first in (0..=255 - 15u8).step_by(step) {
            assert_kernels_agree(segment, &std::array::from_fn(|i| first + i as u8));
            // Exponents that are not consecutive.
            assert_kernels_agree(segment, &std::array::from_fn(|i| first.wrapping_add(i as u8 * 16 + 1)));
        }
    }
}

#[test]
fn an_escape_at_every_place_comes_back() {
    let (places, step) = (if cfg!(miri) { 300 } else { 2 * SEGMENT_VALUES }, if cfg!(miri) { 41 } else { 1 });
    let kv = like_kv_bytes(2 * SEGMENT_VALUES + 77, 1);
    let most = encode_exp4(&kv).expect("this fits").len();
    let shape = CodedShape::of(kv.len()).unwrap();
    assert_eq!(most, shape.coded_bytes());
    for place in (0..places).step_by(step * 97).chain(places - 2..places) {
        let mut raw = kv.clone();
        // NaN with a payload, infinity, a denormal, the least exponent, minus zero.
        for (i, odd) in [0x7fa5u16, 0xff80, 0x0001, 0x00ff, 0x8000].into_iter().enumerate() {
            raw[2 * (place + i)..][..2].copy_from_slice(&odd.to_le_bytes());
        }
        let coded = encode_exp4(&raw).expect("five escapes fit");
        assert!(decode_exp4(&coded, raw.len()).unwrap() == raw, "place {place}");
    }
}

#[test]
fn an_extent_with_one_escape_too_many_does_not_fit() {
    let values = SEGMENT_VALUES + 1000;
    let shape = CodedShape::of(2 * values).unwrap();
    let with = |escapes: usize| {
        let mut values = vec![0x3f80u16; values];
        // In the last segment, which then has two exponents.
        values[SEGMENT_VALUES..].iter_mut().take(escapes).for_each(|v| *v = 0x0080);
        bytes(values)
    };
    // Two exponents of the sixteen that a dictionary has: nothing escapes.
    assert!(encode_exp4(&with(900)).is_some());
    let many = |escapes: usize| {
        let mut random = random(3);
        // Sixteen exponents that fill the dictionary, and values with other ones.
        let mut values: Vec<u16> = (0..values as u16).map(|i| (100 + i % 16) << 7).collect();
        values.iter_mut().take(escapes).for_each(|v| *v = ((random() % 16) as u16 * 4 + 130) << 7);
        bytes(values)
    };
    let room = shape.room();
    let coded = encode_exp4(&many(room)).expect("so many fit");
    assert!(decode_exp4(&coded, 2 * values).unwrap() == many(room));
    assert!(encode_exp4(&many(room + 1)).is_none());
    let mut random = random(9);
    let noise = bytes(std::iter::repeat_with(|| random() as u16).take(values));
    assert!(encode_exp4(&noise).is_none(), "random bytes do not fit");
}

#[test]
fn zeros_are_zeros_in_coded_form_too() {
    let shape = CodedShape::of(2 * (SEGMENT_VALUES + 5)).unwrap();
    let raw = decode_exp4(&vec![0; shape.coded_bytes()], 2 * shape.values()).unwrap();
    assert!(raw.len() == 2 * shape.values() && raw.iter().all(|b| *b == 0));
    assert!(decode_exp4(&encode_exp4(&raw).unwrap(), raw.len()).unwrap() == raw);
}

#[test]
fn the_crc_is_that_of_all_coded_bytes_however_they_are_walked() {
    let raw = like_kv_bytes(2 * SEGMENT_VALUES + 333, 5);
    let shape = CodedShape::of(raw.len()).unwrap();
    for tile in [raw.len(), 4096, 5000, SEGMENT_RAW_BYTES, 40_000] {
        let (mut coded, mut crc) = (vec![0x77; shape.coded_bytes()], Hasher::new());
        let mut writer = CodedWriter::new(shape, &mut coded);
        for piece in raw.chunks(tile) {
            writer.tile(piece.len()).copy_from_slice(piece);
            assert!(writer.filled(&mut crc));
        }
        assert!(writer.finish(&mut crc));
        assert_eq!(crc.finalize(), crate::format::crc(&coded), "written in tiles of {tile}");
        let (mut reader, mut crc) = (CodedReader::new(shape, &coded), Hasher::new());
        for at in (0..raw.len()).step_by(tile) {
            let end = (at + tile).min(raw.len());
            assert!(reader.tile(at..end, &mut crc) == &raw[at..end], "tiles of {tile}");
        }
        reader.finish(&mut crc);
        assert_eq!(crc.finalize(), crate::format::crc(&coded), "read in tiles of {tile}");
    }
}

#[test]
fn likely_dictionaries_cover_what_is_like_kv_and_best_ones_lose_to_none() {
    let raw = like_kv_bytes(SEGMENT_VALUES, 11);
    let escapes = |dictionary: &Dictionary| {
        let (mut blocks, mut escapes) = (vec![0; SEGMENT_BYTES], Vec::new());
        encode_blocks(&raw, dictionary, &mut blocks, &mut escapes);
        escapes.len()
    };
    let (likely, best) = (escapes(&likely_dictionary(&raw)), escapes(&best_dictionary(&raw)));
    assert!(best <= likely && likely <= 8, "{best} and {likely} escapes");
    let all: std::collections::BTreeSet<u8> = likely_dictionary(&raw).into_iter().collect();
    assert_eq!(all.len(), ENTRIES, "no two are the same");
    for raw in [bytes([]), bytes([0xffff; 300]), bytes([0; 300])] {
        for dictionary in [likely_dictionary(&raw), best_dictionary(&raw)] {
            let all: std::collections::BTreeSet<u8> = dictionary.into_iter().collect();
            assert_eq!(all.len(), ENTRIES);
        }
    }
}

/// Values of a few kinds: like KV, any at all, and of some exponents only.
fn any_values() -> impl Strategy<Value = Vec<u16>> {
    let kind = (0..3u8, any::<u64>(), 1..=BLOCK_VALUES * if cfg!(miri) { 2 } else { 300 }, 0..200usize);
    kind.prop_map(|(kind, seed, count, odd)| {
        let mut random = random(seed);
        let mut values: Vec<u16> = std::iter::repeat_with(|| match kind {
            0 => like_kv(random()),
            1 => random() as u16,
            _ => (random() as u16 & 0x807f) | ((seed % 240) as u16 + (random() % 14) as u16) << 7,
        })
        .take(count)
        .collect();
        for _ in 0..odd {
            let at = random() as usize % count;
            values[at] = random() as u16;
        }
        values
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 128 }))]

    #[test]
    fn whatever_fits_comes_back(values in any_values()) {
        let raw = bytes(values);
        if let Some(coded) = encode_exp4(&raw) {
            prop_assert!(decode_exp4(&coded, raw.len()).unwrap() == raw);
        }
    }

    #[test]
    fn any_bytes_are_decoded_to_as_many_values_and_the_same_by_tiles(
        seed in any::<u64>(), values in 1..SEGMENTS * SEGMENT_VALUES, short in 0..300usize,
    ) {
        let shape = CodedShape::of(2 * values).unwrap();
        let mut random = random(seed);
        let len = shape.coded_bytes() - short.saturating_sub(200);
        let coded: Vec<u8> = std::iter::repeat_with(|| (random() % 5 * 51) as u8).take(len).collect();
        let whole = decode_exp4(&coded, 2 * values).unwrap();
        prop_assert_eq!(whole.len(), 2 * values);
        let mut reader = CodedReader::new(shape, &coded);
        for at in (0..whole.len()).step_by(6000) {
            let range = at..(at + 6000).min(whole.len());
            prop_assert!(reader.decode(range.clone()) == &whole[range]);
        }
    }
}

/// A thousand million values: four fifths of them like KV with odd ones among them, one fifth
/// random. To be run with `--ignored` and optimised (`make codec-proof`).
#[test]
#[ignore = "takes minutes; make codec-proof runs it"]
fn a_thousand_million_values_come_back() {
    let (mut fitting, mut values) = (0u64, 0u64);
    for round in 0u64.. {
        let mut random = random(round);
        let count = 4 * SEGMENT_VALUES + (round % 1000) as usize;
        let mut raw: Vec<u16> = std::iter::repeat_with(|| like_kv(random())).take(count).collect();
        for _ in 0..round % 90 {
            let at = random() as usize % count;
            raw[at] = random() as u16;
        }
        let raw = bytes(raw);
        if let Some(coded) = encode_exp4(&raw) {
            assert!(decode_exp4(&coded, raw.len()).unwrap() == raw, "round {round}");
            fitting += count as u64;
        }
        let noise = bytes(std::iter::repeat_with(|| random() as u16).take(SEGMENT_VALUES));
        let dictionary = best_dictionary(&noise);
        assert_kernels_agree(&noise, &dictionary);
        values += (count + SEGMENT_VALUES) as u64;
        if values > 1_000_000_000 {
            break;
        }
    }
    assert!(fitting > 700_000_000, "only {fitting} values fitted");
    println!("{values} values, {fitting} of them in {:?}", CodecKernels::best().name);
}
