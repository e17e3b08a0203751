//! The codec's kernels (on the CPU) against the host's codec: the same bytes.

use super::{like_kv, noise};
use crate::device::cuda::coded::{LaunchCoded, scratch_bytes};
use crate::device::host::{decode_exp4, encode_exp4};
use crate::format::exp4::{CodedShape, SEGMENT_VALUES};

/// Extents with room for their values and their coded bytes, both aligned.
struct Extents {
    shapes: Vec<CodedShape>,
    raw: Vec<Vec<u128>>,
    coded: Vec<Vec<u128>>,
}

fn words_of(bytes: &[u8], room: usize) -> Vec<u128> {
    let mut padded = bytes.to_vec();
    padded.resize(room, 0xa5);
    padded.as_chunks().0.iter().map(|w| u128::from_ne_bytes(*w)).collect()
}

fn bytes_of(words: &[u128]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

impl Extents {
    fn of(raw: &[Vec<u8>], coded: &[Vec<u8>]) -> Self {
        let shapes: Vec<_> = raw.iter().map(|r| CodedShape::of(r.len()).unwrap()).collect();
        let raw = raw.iter().zip(&shapes).map(|(r, s)| words_of(r, scratch_bytes(*s))).collect();
        let coded = coded.iter().zip(&shapes).map(|(c, s)| words_of(c, s.coded_bytes())).collect();
        Self { shapes, raw, coded }
    }

    fn launch(&mut self, encode: bool, ctas: u32) -> Vec<u32> {
        let mut tiles = 0;
        let mut blob = Vec::new();
        for ((shape, raw), coded) in self.shapes.iter().zip(&mut self.raw).zip(&mut self.coded) {
            let one = LaunchCoded {
                coded: coded.as_mut_ptr() as u64,
                raw: raw.as_mut_ptr() as u64,
                values: shape.values() as u32,
                bytes: shape.coded_bytes() as u32,
                first_tile: tiles,
                unused: 0,
            };
            one.encode(&mut blob, 0);
            tiles += shape.segments() as u32;
        }
        let count = self.shapes.len() as u32;
        let kernels: &[_] =
            if encode { &[c"forebay_encode_exp4", c"forebay_list_exp4"] } else { &[c"forebay_decode_exp4"] };
        let (blob, mut fits) = (words_of(&blob, blob.len()), vec![7; self.shapes.len()]);
        let args = (blob.as_ptr() as u64, count, tiles, fits.as_mut_ptr() as u64);
        for name in kernels {
            // SAFETY: the descriptors name memory of this value, of the shapes' lengths.
            unsafe { standin_kernels::launch(name, ctas, args) }.unwrap();
        }
        fits
    }
}

/// Lengths at which blocks and segments end, and contents from those that fit to those that do not.
fn extents() -> Vec<Vec<u8>> {
    let segment = SEGMENT_VALUES;
    let lengths = [1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1000, segment - 1, segment, segment + 1, 3 * segment + 777];
    let mut all = Vec::new();
    for (i, values) in lengths.into_iter().enumerate() {
        let noise = noise(i as u64 + 1, 2 * values);
        all.push(like_kv(&noise));
        // Fewer exponents than there are codes, the highest or the lowest among them.
        let of = |e: u16| noise.as_chunks::<2>().0.iter().map(move |v| u16::from_le_bytes(*v) & 0x807f | e << 7);
        all.extend([0, 3, 255].map(|e| of(e).flat_map(u16::to_le_bytes).collect::<Vec<u8>>()));
        // One value in 13 has other exponents, none of which the sample sees: the best dictionary
        // is needed.
        let second = noise.as_chunks::<2>().0.iter().enumerate().map(|(at, v)| {
            let v = u16::from_le_bytes(*v);
            let exponent = if at % 13 == 5 { 40 + (v >> 9 & 7) } else { 100 + (v >> 9 & 7) };
            (v & 0x807f | exponent << 7).to_le_bytes()
        });
        all.push(second.flatten().collect());
        all.push(noise);
    }
    all
}

#[test]
fn kernels_code_what_the_host_codes_and_report_misfits() {
    let raw = extents();
    let expected: Vec<_> = raw.iter().map(|r| encode_exp4(r)).collect();
    assert!(expected.iter().any(Option::is_none) && expected.iter().filter(|e| e.is_some()).count() > 60);
    for ctas in [1, 3, 200] {
        let mut extents = Extents::of(&raw, &vec![Vec::new(); raw.len()]);
        let fits = extents.launch(true, ctas);
        for (i, (coded, expected)) in extents.coded.iter().zip(&expected).enumerate() {
            assert_eq!(fits[i], u32::from(expected.is_some()), "extent {i} of {} bytes", raw[i].len());
            assert!(expected.as_ref().is_none_or(|e| *e == bytes_of(coded)), "extent {i} of {} bytes", raw[i].len());
        }
    }
}

#[test]
fn kernels_decode_what_the_host_codes() {
    let (raw, coded): (Vec<_>, Vec<_>) =
        extents().into_iter().filter_map(|r| Some((r.clone(), encode_exp4(&r)?))).unzip();
    for ctas in [1, 3, 200] {
        let cleared: Vec<_> = raw.iter().map(|r| vec![0xee; r.len()]).collect();
        let mut extents = Extents::of(&cleared, &coded);
        extents.launch(false, ctas);
        for (i, (got, raw)) in extents.raw.iter().zip(&raw).enumerate() {
            assert!(bytes_of(got)[..raw.len()] == raw[..], "extent {i} of {} bytes", raw.len());
        }
    }
}

#[test]
fn kernels_decode_damaged_bytes_to_what_the_host_makes_of_them() {
    for (i, raw) in extents().into_iter().enumerate() {
        let Some(mut coded) = encode_exp4(&raw) else { continue };
        let shape = CodedShape::of(raw.len()).unwrap();
        // Counts, codes and a dictionary. Not the escapes themselves: of two at one place either
        // may count.
        let at = [shape.tail_at() + 16, shape.tail_at() + 20 * (shape.segments() - 1) + 17, 5, shape.tail_at() + 3];
        coded[at[i % at.len()]] ^= 0x55;
        let mut extents = Extents::of(&[vec![0xee; raw.len()]], &[coded.clone()]);
        extents.launch(false, 2);
        let expected = decode_exp4(&coded, raw.len()).unwrap();
        let got = bytes_of(&extents.raw[0])[..raw.len()].to_vec();
        let differing = got.chunks(2).zip(expected.chunks(2)).filter(|(a, b)| a != b).count();
        assert!(differing <= usize::from(i % at.len() < 2), "extent {i}: {differing} values differ");
    }
}
