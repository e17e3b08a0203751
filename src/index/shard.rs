//! The one page that all lanes of a shard share: sequences, lane generation, and what has been cleared.
//!
//! A sequence is `mount_generation << 40 | n` and unique over the lanes of a shard. The page is volatile: after a boot it is
//! made anew, and whoever opens a lane raises it, under a lock that the log holds, to what recovery found.

use std::fs::File;
use std::sync::atomic::Ordering;

use super::header::{BootId, FileKind, HEADER_WORDS, Header, Holder, W_OWN, read_only};
use super::mapping::{Access, Mapping};
use crate::error::{Error, ErrorKind, Result};

const W_SEQ: usize = W_OWN;
/// Apart from the sequence counter, which every store writes: readers poll these.
const W_LANES: usize = W_OWN + 8;
const W_CLEARED: usize = W_LANES + 1;
/// Up to which sequence a clear is on a drive.
const W_CLEARED_DURABLY: usize = W_CLEARED + 1;

/// A shard's shared counters.
#[derive(Debug)]
pub struct Shard {
    map: Mapping,
}

impl Shard {
    /// Bytes of a shard file.
    pub const FILE_BYTES: u64 = HEADER_WORDS as u64 * 8;

    /// Makes the page in `file`, which is at least [`FILE_BYTES`](Self::FILE_BYTES) long. The log holds the shard's lock.
    ///
    /// # Errors
    /// `InvalidInput` if the file is too small, and what mapping it gives.
    pub fn create(file: &File, boot: BootId, maker: Holder) -> Result<Self> {
        Self::make(Mapping::file(file, Access::ReadWrite)?, boot, maker)
    }

    /// Makes it in memory of this process.
    ///
    /// # Errors
    /// What mapping it gives.
    pub fn anonymous(boot: BootId, maker: Holder) -> Result<Self> {
        Self::make(Mapping::anonymous(Self::FILE_BYTES)?, boot, maker)
    }

    fn make(map: Mapping, boot: BootId, maker: Holder) -> Result<Self> {
        let header =
            Header { kind: FileKind::Shard, boot, generation: 0, total_words: HEADER_WORDS as u64, params: [0; 4] };
        header.publish(&map, maker)?;
        Ok(Self { map })
    }

    /// Attaches to a page made during this boot.
    ///
    /// # Errors
    /// `Corrupt` if the file is no finished shard page, `Incompatible` for another version or boot.
    pub fn attach(file: &File, boot: BootId, access: Access) -> Result<Self> {
        let map = Mapping::file(file, access)?;
        Header::read(&map, FileKind::Shard, boot)?;
        Ok(Self { map })
    }

    /// Takes a sequence that nobody else gets.
    ///
    /// # Errors
    /// `Permission` on a read-only mapping, `Io` on one that [is lost](Self::is_lost).
    pub fn next_seq(&self) -> Result<u64> {
        let seq = self.map.word(W_SEQ).map(|w| w.fetch_add(1, Ordering::SeqCst) + 1).ok_or_else(read_only)?;
        if self.is_lost() {
            return Err(Error::new(ErrorKind::Io, "the page of the shard's sequences is out of reach"));
        }
        Ok(seq)
    }

    /// Whether the file's pages could not be had any more: this process sees no others' stores, and they none of its own.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.map.is_lost()
    }

    /// The sequence taken last.
    #[must_use]
    pub fn last_seq(&self) -> u64 {
        self.map.load_acquire(W_SEQ)
    }

    /// Makes all sequences from now on greater than `seq`: the greatest that recovery found, or
    /// `mount_generation << 40` at a mount. Nothing happens on a read-only mapping.
    pub fn raise_to(&self, seq: u64) {
        self.raise(W_SEQ, seq);
    }

    /// Changes whenever a lane appears or disappears: readers then look for lanes at once.
    #[must_use]
    pub fn lane_generation(&self) -> u64 {
        self.map.load_acquire(W_LANES)
    }

    /// Announces that a lane appeared or disappeared. Nothing happens on a read-only mapping.
    pub fn bump_lanes(&self) {
        if let Some(word) = self.map.word(W_LANES) {
            word.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Nothing with a sequence up to and with this one may be served.
    #[must_use]
    pub fn cleared_up_to(&self) -> u64 {
        self.map.load_acquire(W_CLEARED)
    }

    /// Forbids serving anything with a sequence up to and with `seq`. Nothing happens on a read-only mapping.
    pub fn clear_up_to(&self, seq: u64) {
        self.raise(W_CLEARED, seq);
    }

    /// As [`cleared_up_to`](Self::cleared_up_to), of clears that no crash undoes.
    #[must_use]
    pub fn cleared_durably(&self) -> u64 {
        self.map.load_acquire(W_CLEARED_DURABLY)
    }

    /// A clear up to `seq` is durable, and hides what it is to hide.
    pub fn clear_durably_up_to(&self, seq: u64) {
        self.raise(W_CLEARED, seq);
        self.raise(W_CLEARED_DURABLY, seq);
    }

    fn raise(&self, word: usize, value: u64) {
        if let Some(word) = self.map.word(word) {
            word.fetch_max(value, Ordering::SeqCst);
        }
    }
}
