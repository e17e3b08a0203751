//! Writes that the drive has not ended.
//!
//! A write that timed out may still be done later, over what was written to its place since: in
//! index.kv a region that says "sealed" over one that says "free", in data.kv the zeros over a
//! removed slot's header over that of a new slot. So nothing is written to a place of index.kv
//! before every earlier write to it has really ended, and no segment is used anew before every
//! write of zeros to it has.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::{Error, ErrorKind, Result};

/// The places of one file that are being written to.
#[derive(Debug, Default)]
pub(in crate::log) struct PendingWrites(Mutex<Vec<Range<u64>>>);

/// A claim on a place. The buffer of the write carries it ([`Buf::with`](crate::io::Buf::with)), so
/// that it ends with the write.
#[derive(Debug)]
pub(in crate::log) struct WriteClaim {
    all: Arc<PendingWrites>,
    place: Range<u64>,
}

impl PendingWrites {
    /// Claims a place.
    ///
    /// # Errors
    /// `Busy` while an earlier write to any of it has not ended.
    pub(in crate::log) fn claim(self: &Arc<Self>, place: Range<u64>) -> Result<Arc<WriteClaim>> {
        let all = self.0.lock();
        if all.iter().any(|other| overlap(other, &place)) {
            return Err(Error::new(
                ErrorKind::Busy,
                "a write to the same place timed out, and the drive has not ended it",
            ));
        }
        drop(all);
        Ok(self.note(place))
    }

    /// Notes a write to a place, also where an earlier one has not ended.
    pub(in crate::log) fn note(self: &Arc<Self>, place: Range<u64>) -> Arc<WriteClaim> {
        self.0.lock().push(place.clone());
        Arc::new(WriteClaim { all: Arc::clone(self), place })
    }

    /// Whether a write to any of the place has not ended.
    pub(in crate::log) fn is_claimed(&self, place: &Range<u64>) -> bool {
        self.0.lock().iter().any(|other| overlap(other, place))
    }
}

impl Drop for WriteClaim {
    fn drop(&mut self) {
        let mut all = self.all.0.lock();
        if let Some(at) = all.iter().position(|other| *other == self.place) {
            all.swap_remove(at);
        }
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_free_again_when_its_write_has_ended() {
        let all = Arc::new(PendingWrites::default());
        let first = all.claim(0..8192).unwrap();
        let second = all.claim(8192..12288).unwrap();
        assert_eq!(all.claim(4096..4100).unwrap_err().kind(), ErrorKind::Busy);
        assert!(all.is_claimed(&(8000..9000)) && !all.is_claimed(&(12288..20000)));
        drop(first);
        let again = all.claim(0..8192).unwrap();
        let late = [all.note(0..8192), all.note(0..8192)];
        drop((second, again));
        assert!(all.is_claimed(&(0..1)));
        drop(late);
        assert!(!all.is_claimed(&(0..u64::MAX)));
    }
}
