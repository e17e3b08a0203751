//! Extents that are coded: an input is tried as one, whatever its bytes, and as values to be coded.

use forebay::device::{decode_exp4, encode_exp4};
use forebay::format::exp4::CodedShape;

/// Values of an extent at most, or of three segments' worth of them.
const MOST_VALUES: usize = 4200;

pub(crate) fn coded_extent(input: &[u8]) {
    let Some((&[low, high], rest)) = input.split_first_chunk() else { return };
    // The highest bit asks for an extent of several segments, which repeats what is there.
    let times = if high & 0x80 == 0 { 1 } else { 9 };
    let values = (usize::from(u16::from_le_bytes([low, high & 0x7f])) % MOST_VALUES + 1) * times;
    let Some(shape) = CodedShape::of(2 * values) else { return };
    let coded: Vec<u8> = rest.iter().copied().chain([0]).cycle().take(shape.coded_bytes()).collect();
    let decoded = decode_exp4(&coded, 2 * values).unwrap_or_default();
    assert_eq!(decoded.len(), 2 * values, "any bytes are as many values");
    comes_back(&decoded);
    comes_back(rest.get(..rest.len() & !1).unwrap_or_default());
}

/// What can be coded is decoded to what it was.
fn comes_back(raw: &[u8]) {
    if let Some(coded) = encode_exp4(raw) {
        assert!(decode_exp4(&coded, raw.len()).as_deref() == Some(raw), "{} bytes differ", raw.len());
    }
}
