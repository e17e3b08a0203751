//! The file `policy.state` of a lane: what the eviction policy has learned, for the next start. A
//! hint: whatever it says, no chunk is served that is not there, and without it the policy begins
//! anew.

use super::{VERSION, corrupt, crc_with_hole, le};
use crate::error::{Error, ErrorKind, Result};

const MAGIC: &[u8; 8] = b"FBPOLCY1";
const CRC_AT: usize = 8;
const PAYLOAD_AT: usize = 48;

/// Bytes of the file with this payload, for the lane of this identity.
#[must_use]
pub fn encode(lane: &[u8; 16], payload: &[u8]) -> Vec<u8> {
    let mut b = vec![0; PAYLOAD_AT];
    le::put_bytes(&mut b, 0, MAGIC);
    le::put_u32(&mut b, 12, VERSION);
    le::put_bytes(&mut b, 16, lane);
    le::put_u64(&mut b, 32, payload.len() as u64);
    b.extend_from_slice(payload);
    let sum = crc_with_hole(&b, CRC_AT);
    le::put_u32(&mut b, CRC_AT, sum);
    b
}

/// The payload, and the lane that it is of.
///
/// # Errors
/// [`ErrorKind::Corrupt`] or, for a newer version, [`ErrorKind::Incompatible`].
pub fn decode(b: &[u8]) -> Result<([u8; 16], &[u8])> {
    let payload = b.get(PAYLOAD_AT..).ok_or_else(|| corrupt("policy.state is cut short"))?;
    if !b.starts_with(MAGIC) {
        return Err(corrupt("policy.state is not Forebay's"));
    }
    if le::get_u32(b, 12) > VERSION {
        return Err(Error::new(ErrorKind::Incompatible, "policy.state was written by a newer version"));
    }
    if le::get_u64(b, 32) != payload.len() as u64 || le::get_u32(b, CRC_AT) != crc_with_hole(b, CRC_AT) {
        return Err(corrupt("policy.state fails its CRC"));
    }
    Ok((le::get_bytes(b, 16), payload))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_comes_back_as_it_was_and_every_damage_is_seen() {
        let bytes = encode(&[7; 16], b"learned");
        assert_eq!(decode(&bytes).unwrap(), ([7; 16], b"learned".as_slice()));
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&damaged).is_err(), "bit {bit}");
        }
        (0..bytes.len()).for_each(|len| assert!(decode(&bytes[..len]).is_err(), "{len} bytes"));
        assert!(decode(&[bytes, vec![0]].concat()).is_err());
    }
}
