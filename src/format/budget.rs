//! The page in the file `BUDGET` of a cache directory: the identity of the drive. Segments are
//! granted under the lock of this file.
//!
//! How many are granted is not recorded: the files are counted, so that no number can drift from
//! them.

use super::{PAGE_BYTES, VERSION, corrupt, crc_with_hole, le};
use crate::error::{Error, ErrorKind, Result};

const MAGIC: &[u8; 8] = b"FBBUDGT1";
const CRC_AT: usize = 8;

/// The page at the start of `BUDGET`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetPage {
    /// Identity of the drive, chosen when the directory was first used.
    pub drive: [u8; 16],
    /// Unix milliseconds of that moment.
    pub created_ms: u64,
}

impl BudgetPage {
    /// The page's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut b = vec![0; PAGE_BYTES];
        le::put_bytes(&mut b, 0, MAGIC);
        le::put_u32(&mut b, 12, VERSION);
        le::put_bytes(&mut b, 16, &self.drive);
        le::put_u64(&mut b, 32, self.created_ms);
        let sum = crc_with_hole(&b, CRC_AT);
        le::put_u32(&mut b, CRC_AT, sum);
        b
    }

    /// Reads the page.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] or, for a newer version, [`ErrorKind::Incompatible`].
    pub fn decode(b: &[u8]) -> Result<Self> {
        let b = b.get(..PAGE_BYTES).ok_or_else(|| corrupt("BUDGET is cut short"))?;
        if !b.starts_with(MAGIC) {
            return Err(corrupt("BUDGET is not Forebay's"));
        }
        if le::get_u32(b, 12) > VERSION {
            return Err(
                Error::new(ErrorKind::Incompatible, "BUDGET was written by a newer version").advice("update forebay")
            );
        }
        if le::get_u32(b, CRC_AT) != crc_with_hole(b, CRC_AT) {
            return Err(corrupt("BUDGET fails its CRC"));
        }
        Ok(Self { drive: le::get_bytes(b, 16), created_ms: le::get_u64(b, 32) })
    }
}
