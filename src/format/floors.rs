//! The file `FLOORS` of a shard: the floor of everything and those of tenants.
//!
//! The file holds two copies, one after the other; each is flushed before the other is written, so
//! that one of them is always intact.

use super::{PAGE_BYTES, VERSION, corrupt, crc_with_hole, le};
use crate::error::{Error, ErrorKind, Result};

const MAGIC: &[u8; 8] = b"FBFLOOR1";
const CRC_AT: usize = 8;
const TENANTS_AT: usize = 64;

/// Bytes of one copy.
pub const FLOORS_BYTES: usize = 4 * PAGE_BYTES;
/// Tenants that can have a floor at the same time.
pub const MOST_TENANTS: usize = (FLOORS_BYTES - TENANTS_AT) / 16;

/// Floors: nothing with a sequence up to and with a floor is served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Floors {
    /// Counts the changes; the copy with the higher one is the newer.
    pub generation: u64,
    /// The floor of everything.
    pub everything: u64,
    /// Floors of tenants (hash of the cache salt, sequence), each tenant once.
    pub tenants: Vec<(u64, u64)>,
}

impl Floors {
    /// One copy's bytes; tenants beyond [`MOST_TENANTS`] are not taken.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut b = vec![0; FLOORS_BYTES];
        le::put_bytes(&mut b, 0, MAGIC);
        le::put_u32(&mut b, 12, VERSION);
        le::put_u64(&mut b, 16, self.generation);
        le::put_u64(&mut b, 24, self.everything);
        le::put_u32(&mut b, 32, self.tenants.len().min(MOST_TENANTS) as u32);
        for (i, (tenant, sequence)) in self.tenants.iter().take(MOST_TENANTS).enumerate() {
            le::put_u64(&mut b, TENANTS_AT + i * 16, *tenant);
            le::put_u64(&mut b, TENANTS_AT + i * 16 + 8, *sequence);
        }
        let sum = crc_with_hole(&b, CRC_AT);
        le::put_u32(&mut b, CRC_AT, sum);
        b
    }

    /// Reads one copy.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] or, for a newer version, [`ErrorKind::Incompatible`]. The CRC comes
    /// first: of two copies one may be damaged, in its version too.
    pub fn decode(b: &[u8]) -> Result<Self> {
        let b = b.get(..FLOORS_BYTES).ok_or_else(|| corrupt("FLOORS is cut short"))?;
        if !b.starts_with(MAGIC) {
            return Err(corrupt("FLOORS is not Forebay's"));
        }
        if le::get_u32(b, CRC_AT) != crc_with_hole(b, CRC_AT) {
            return Err(corrupt("FLOORS fails its CRC"));
        }
        if le::get_u32(b, 12) > VERSION {
            return Err(Error::new(ErrorKind::Incompatible, "FLOORS was written by a newer version: update forebay"));
        }
        let count = (le::get_u32(b, 32) as usize).min(MOST_TENANTS);
        let tenant = |i: usize| (le::get_u64(b, TENANTS_AT + i * 16), le::get_u64(b, TENANTS_AT + i * 16 + 8));
        Ok(Self {
            generation: le::get_u64(b, 16),
            everything: le::get_u64(b, 24),
            tenants: (0..count).map(tenant).collect(),
        })
    }

    /// Of the two copies the newer intact one.
    ///
    /// # Errors
    /// As [`decode`](Self::decode) where neither is intact. [`ErrorKind::Incompatible`] of either
    /// copy comes first, also where the other one is intact.
    pub fn newest(a: &[u8], b: &[u8]) -> Result<Self> {
        match (Self::decode(a), Self::decode(b)) {
            (Ok(a), Ok(b)) => Ok(if a.generation >= b.generation { a } else { b }),
            (Err(e), _) | (_, Err(e)) if e.kind() == ErrorKind::Incompatible => Err(e),
            (Ok(floors), Err(_)) | (Err(_), Ok(floors)) => Ok(floors),
            (Err(e), Err(_)) => Err(e),
        }
    }

    /// Raises the floor of a tenant; `false` where there is no place for one more.
    pub fn raise_tenant(&mut self, tenant: u64, sequence: u64) -> bool {
        if let Some(floor) = self.tenants.iter_mut().find(|(t, _)| *t == tenant) {
            floor.1 = floor.1.max(sequence);
            return true;
        }
        if self.tenants.len() >= MOST_TENANTS {
            return false;
        }
        self.tenants.push((tenant, sequence));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newer_copy_counts_and_a_damaged_one_is_passed_over() {
        let old = Floors { generation: 4, everything: 7, tenants: vec![(1, 2)] };
        let new = Floors { generation: 5, everything: 9, tenants: vec![(1, 2), (3, 8)] };
        let (a, b) = (old.encode(), new.encode());
        assert_eq!(Floors::newest(&a, &b).unwrap(), new);
        let bits = (0..FLOORS_BYTES * 8).step_by(61).chain(12 * 8..16 * 8);
        for bit in bits {
            let mut torn = b.clone();
            torn[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Floors::newest(&torn, &a).unwrap(), old, "bit {bit}");
            assert!(Floors::newest(&torn, &torn).is_err());
        }
    }

    #[test]
    fn a_tenant_has_one_floor_and_there_is_room_for_so_many() {
        let mut floors = Floors::default();
        for tenant in 0..MOST_TENANTS as u64 {
            assert!(floors.raise_tenant(tenant, 5) && floors.raise_tenant(tenant, 3));
        }
        assert!(!floors.raise_tenant(u64::MAX, 1) && floors.tenants.iter().all(|(_, floor)| *floor == 5));
        assert_eq!(Floors::decode(&floors.encode()).unwrap(), floors);
    }
}
