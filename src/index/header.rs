//! The first page of every shared file: who made it, for what, and how long its sections are.
//!
//! The fixed words carry a check word, and the magic is stored last: a file that is still being
//! made, is left over from another boot, or holds anything else, is refused. Mutable words (writer,
//! moved mark, counters) follow from word 16.

use std::sync::atomic::Ordering;

use super::mapping::Mapping;
use crate::error::{Error, ErrorKind, Result};

/// Words of the header page.
pub(super) const HEADER_WORDS: usize = 512;

/// Version of the shared layouts.
const VERSION: u64 = 4;

const W_MAGIC: usize = 0;
const W_VERSION: usize = 1;
const W_BOOT: usize = 2;
const W_GENERATION: usize = 4;
const W_TOTAL: usize = 5;
const W_PARAMS: usize = 6;
const W_CHECK: usize = 10;
const W_PID: usize = 16;
const W_IDENT: usize = 17;
/// Non-zero once another file has taken this one's place.
pub(super) const W_MOVED: usize = 18;
/// First word free for the kind of file; these never share a cache line with the fixed words.
pub(super) const W_OWN: usize = 24;

/// Which of the shared files a header belongs to; the value is its magic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum FileKind {
    Table = u64::from_le_bytes(*b"FBYTABLE"),
    Lane = u64::from_le_bytes(*b"FBYLANE\0"),
    Shard = u64::from_le_bytes(*b"FBYSHARD"),
}

/// Identity of one boot of the machine, from `/proc/sys/kernel/random/boot_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BootId(pub [u64; 2]);

impl BootId {
    /// Parses the text of the boot id file, a UUID.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
        if digits.len() != 32 {
            return None;
        }
        let value = u128::from_str_radix(&digits, 16).ok()?;
        Some(Self([(value >> 64) as u64, value as u64]))
    }
}

/// A process, distinguished from later ones with the same number, and from those of other PID
/// namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Holder {
    /// Process id within its namespace.
    pub pid: u32,
    /// Start time in clock ticks since boot, 40 bits kept.
    pub start_ticks: u64,
    /// Low 24 bits of the inode number of its PID namespace. Whether a process of another namespace
    /// lives cannot be known: a liveness check must say that it does.
    pub pid_ns: u32,
}

impl Holder {
    /// From the text of `/proc/<pid>/stat` and the target of the link `/proc/<pid>/ns/pid`.
    #[must_use]
    pub fn parse(proc_stat: &str, pid_ns_link: &str) -> Option<Self> {
        let pid = proc_stat.split_whitespace().next()?.parse().ok()?;
        // The command name may hold spaces and parentheses; the fields after the last parenthesis
        // do not.
        let rest = proc_stat.rsplit_once(')')?.1;
        let start: u64 = rest.split_whitespace().nth(19)?.parse().ok()?;
        let ns: u64 = pid_ns_link.split_once('[')?.1.trim_end().strip_suffix(']')?.parse().ok()?;
        Some(Self { pid, start_ticks: start & ((1 << 40) - 1), pid_ns: (ns & 0xff_ffff) as u32 })
    }

    pub(super) fn ident(&self) -> u64 {
        self.start_ticks << 24 | u64::from(self.pid_ns & 0xff_ffff)
    }

    pub(super) fn of_words(pid: u32, ident: u64) -> Self {
        Self { pid, start_ticks: ident >> 24, pid_ns: (ident & 0xff_ffff) as u32 }
    }
}

/// The fixed part of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: FileKind,
    pub(super) boot: BootId,
    pub(super) generation: u64,
    /// Words the file must have.
    pub(super) total_words: u64,
    /// Sizes of the sections; their meaning is the kind's.
    pub(super) params: [u64; 4],
}

impl Header {
    fn words(&self) -> [u64; W_CHECK] {
        let [b0, b1] = self.boot.0;
        let [p0, p1, p2, p3] = self.params;
        [self.kind as u64, VERSION, b0, b1, self.generation, self.total_words, p0, p1, p2, p3]
    }

    fn check(&self) -> u64 {
        self.words()
            .into_iter()
            .fold(0x5ee1_9a7e_0f0e_ba71, |h: u64, w| (h ^ w).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
    }

    /// Clears what the file held and publishes this header; the magic comes last.
    pub(super) fn publish(&self, map: &Mapping, writer: Holder) -> Result<()> {
        let too_small = || Error::new(ErrorKind::InvalidInput, "the shared file is smaller than its contents");
        if (map.words() as u64) < self.total_words {
            return Err(too_small());
        }
        let store = |i: usize, value: u64, order| {
            map.word(i)
                .map(|w| w.store(value, order))
                .ok_or_else(|| Error::new(ErrorKind::Permission, "read-only mapping"))
        };
        if (0..HEADER_WORDS).any(|i| map.load(i) != 0) {
            store(W_MAGIC, 0, Ordering::SeqCst)?;
            // The header page goes last, so that a crash in between leaves a file that is cleared
            // again.
            for i in (HEADER_WORDS..map.words()).chain(0..HEADER_WORDS) {
                store(i, 0, Ordering::Relaxed)?;
            }
        }
        for (i, value) in self.words().into_iter().enumerate().skip(1) {
            store(i, value, Ordering::Relaxed)?;
        }
        store(W_CHECK, self.check(), Ordering::Relaxed)?;
        set_writer(map, writer);
        store(W_MAGIC, self.kind as u64, Ordering::Release)
    }

    /// Reads and checks a header.
    ///
    /// # Errors
    /// `Corrupt` for anything that is no finished header of this kind; `Incompatible` for another
    /// version or boot.
    pub(super) fn read(map: &Mapping, kind: FileKind, boot: BootId) -> Result<Self> {
        let corrupt = |what: &'static str| Error::new(ErrorKind::Corrupt, what);
        if map.load_acquire(W_MAGIC) != kind as u64 {
            return Err(corrupt("not a shared file of this kind, or not finished"));
        }
        if map.load(W_VERSION) != VERSION {
            return Err(Error::new(ErrorKind::Incompatible, "shared file of another version")
                .advice("stop the other version's processes on this cache directory"));
        }
        let header = Self {
            kind,
            boot: BootId([map.load(W_BOOT), map.load(W_BOOT + 1)]),
            generation: map.load(W_GENERATION),
            total_words: map.load(W_TOTAL),
            params: std::array::from_fn(|i| map.load(W_PARAMS + i)),
        };
        if map.load(W_CHECK) != header.check() {
            return Err(corrupt("the shared file's header fails its check"));
        }
        if header.total_words > map.words() as u64 {
            return Err(corrupt("the shared file is shorter than its header says"));
        }
        if header.boot != boot {
            return Err(Error::new(ErrorKind::Incompatible, "shared file of another boot of the machine"));
        }
        Ok(header)
    }
}

/// Records the writer of the file.
pub(super) fn set_writer(map: &Mapping, writer: Holder) {
    for (i, value) in [(W_PID, u64::from(writer.pid)), (W_IDENT, writer.ident())] {
        if let Some(word) = map.word(i) {
            word.store(value, Ordering::Relaxed);
        }
    }
}

/// The writer of the file.
pub(super) fn writer(map: &Mapping) -> Holder {
    Holder::of_words(map.load(W_PID) as u32, map.load(W_IDENT))
}

/// The refusal of a store through a read-only mapping, or by a process that is not the writer.
pub(super) fn read_only() -> Error {
    Error::new(ErrorKind::Permission, "this process may only read the shared file")
}
