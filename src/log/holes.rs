//! Which slots of a segment have been given up: those of which the file has nothing left but a hole.
//!
//! The hole is the durable record of it. A slot that was stored has at least its header on the drive, so one that is a hole as a
//! whole was given up, or never reached the drive; one of which a crash has left a part fails its check. Space that is reserved
//! but was never written (gaps, padding, what is left at a segment's end) may look like holes too and says nothing.
//! File systems that tell of no holes have none here: what was given up is then found by its CRC.

use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::format::record::{Record, RecordKind};
use crate::io::DirectFile;

/// What of a segment is data.
#[derive(Debug, Default)]
pub(super) struct Holes {
    base: u64,
    /// Begin and end of what is not a hole, in order; `None` where all of it is data.
    data: Option<Vec<(u64, u64)>>,
}

impl Holes {
    /// Asks the file about the segment of `bytes` bytes at `base`.
    ///
    /// # Errors
    /// Those of asking.
    pub(super) fn of(file: &DirectFile, base: u64, bytes: u64) -> Result<Self> {
        let end = base + bytes;
        let mut data = Vec::new();
        let mut at = base;
        while let Some(from) = file.next_data(at)?.filter(|from| *from < end) {
            let to = file.next_hole(from)?.min(end);
            if from == base && to == end {
                return Ok(Self { base, data: None });
            }
            data.push((from, to));
            // A file that changes meanwhile must not keep us here.
            at = to.max(from + 1);
        }
        Ok(Self { base, data: Some(data) })
    }

    /// Whether the slot of a put is a hole as a whole.
    pub(super) fn has_slot(&self, record: &Record) -> bool {
        let Some(data) = &self.data else { return false };
        if record.kind != RecordKind::Put || record.pages == 0 {
            return false;
        }
        let page = PAGE_BYTES as u64;
        let from = self.base + u64::from(record.page) * page;
        let to = from + u64::from(record.pages) * page;
        let next = data.partition_point(|(_, end)| *end <= from);
        data.get(next).is_none_or(|(begin, _)| *begin >= to)
    }
}
