//! The page that all lanes of a shard share: sequences, lane generation, and floors.
//!
//! A sequence is `mount_generation << 40 | n` and unique over the lanes of a shard. The page is
//! volatile: after a boot it is made anew, and whoever opens a lane raises it, under a lock that
//! the log holds, to what recovery found.

use std::fs::File;
use std::sync::atomic::Ordering;

use super::header::{BootId, FileKind, HEADER_WORDS, Header, Holder, W_OWN, read_only};
use super::mapping::{Access, Mapping};
use crate::error::{Error, ErrorKind, Result};

pub(super) const W_SEQ: usize = W_OWN;
/// Readers poll this and the words after it, so they lie on another cache line than the sequence
/// counter, which every store writes.
const W_LANES: usize = W_OWN + 8;
/// Nothing with a sequence up to and with this one is served.
const W_FLOOR: usize = W_LANES + 1;
/// One more than the highest place of a tenant's floor ever used.
pub(super) const W_TENANTS_HIGH: usize = W_FLOOR + 1;
/// Generation of the floors, raised with every change.
pub(super) const W_FLOORS_GENERATION: usize = W_FLOOR + 2;
/// Places of tenants' floors: tenant and sequence; a place whose sequence is 0 is free.
const TENANTS: usize = 1024;
pub(super) const W_TENANTS: usize = HEADER_WORDS;
const TOTAL_WORDS: usize = W_TENANTS + 2 * TENANTS;

/// A shard's shared counters.
#[derive(Debug)]
pub struct SharedShard {
    pub(super) map: Mapping,
}

impl SharedShard {
    /// Bytes of a shard file.
    pub const FILE_BYTES: u64 = TOTAL_WORDS as u64 * 8;

    /// Makes the page in `file`, which is at least [`FILE_BYTES`](Self::FILE_BYTES) long. The log
    /// holds the shard's lock.
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
            Header { kind: FileKind::Shard, boot, generation: 0, total_words: TOTAL_WORDS as u64, params: [0; 4] };
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
            return Err(Error::new(ErrorKind::Io, "the shard's shared page can no longer be read"));
        }
        Ok(seq)
    }

    /// Whether a page of the file could no longer be read: since then this process sees no other's
    /// stores, and the others see none of its own.
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

    /// The floor of everything: nothing with a sequence up to and with this one may be served.
    #[must_use]
    pub fn floor(&self) -> u64 {
        self.map.load_acquire(W_FLOOR)
    }

    /// The floor of a tenant; 0 without one.
    #[must_use]
    pub fn tenant_floor(&self, tenant: u64) -> u64 {
        let used = self.tenants_used();
        // The floor is read before and after: the place may go to another tenant meanwhile, but
        // then with another floor, as each is a sequence of its own; or it is raised.
        let floor = |at: usize| loop {
            let before = self.tenant_word(at);
            let is_its = before > 0 && self.map.load_acquire(W_TENANTS + 2 * at) == tenant;
            if self.tenant_word(at) == before {
                return is_its.then_some(before);
            }
        };
        (0..used).filter_map(floor).max().unwrap_or(0)
    }

    /// Whether any tenant has a floor, or had one.
    #[must_use]
    pub fn has_tenant_floors(&self) -> bool {
        self.tenants_used() > 0
    }

    /// Tenants that have a floor.
    #[must_use]
    pub fn tenants(&self) -> usize {
        (0..self.tenants_used()).filter(|at| self.tenant_word(*at) > 0).count()
    }

    /// The highest of their floors; 0 without one.
    #[must_use]
    pub fn highest_tenant_floor(&self) -> u64 {
        (0..self.tenants_used()).map(|at| self.tenant_word(at)).max().unwrap_or(0)
    }

    /// Whether what was stored with this sequence, by this tenant if it has one, lies above all
    /// floors.
    #[must_use]
    pub fn is_above_floor(&self, tenant: Option<u64>, seq: u64) -> bool {
        let is_below = |tenant| seq <= self.tenant_floor(tenant);
        seq > self.floor() && !(self.has_tenant_floors() && tenant.is_some_and(is_below))
    }

    /// Makes the floors those given: of everything, and of tenants, at most as many as there are
    /// places for. The caller holds the shard's lock. Floors that stay do not move, so that
    /// nobody misses one for a moment. Nothing happens on a read-only mapping.
    pub fn set_floors(&self, generation: u64, everything: u64, floors: &[(u64, u64)]) {
        self.raise(W_FLOOR, everything);
        let mut new: Vec<(u64, u64)> = floors.to_vec();
        let mut free = Vec::new();
        for at in 0..TENANTS {
            let tenant = self.map.load_acquire(W_TENANTS + 2 * at);
            match new.iter().position(|(t, _)| *t == tenant).filter(|_| self.tenant_word(at) > 0) {
                Some(i) => self.raise(W_TENANTS + 2 * at + 1, new.swap_remove(i).1),
                None => free.push(at),
            }
        }
        for (i, at) in free.into_iter().enumerate() {
            let (tenant, seq) = new.get(i).copied().unwrap_or((0, 0));
            let (Some(its), Some(floor)) = (self.map.word(W_TENANTS + 2 * at), self.map.word(W_TENANTS + 2 * at + 1))
            else {
                return;
            };
            // No floor is there while the place goes from one tenant to another.
            floor.store(0, Ordering::SeqCst);
            its.store(tenant, Ordering::SeqCst);
            floor.store(seq, Ordering::SeqCst);
            if seq > 0 {
                self.raise(W_TENANTS_HIGH, at as u64 + 1);
            }
        }
        self.raise(W_FLOORS_GENERATION, generation);
    }

    /// The generation that [`set_floors`](Self::set_floors) was given last: it rises with every
    /// change.
    #[must_use]
    pub fn floors_generation(&self) -> u64 {
        self.map.load_acquire(W_FLOORS_GENERATION)
    }

    fn tenants_used(&self) -> usize {
        TENANTS.min(usize::try_from(self.map.load_acquire(W_TENANTS_HIGH)).unwrap_or(TENANTS))
    }

    fn tenant_word(&self, at: usize) -> u64 {
        self.map.load_acquire(W_TENANTS + 2 * at + 1)
    }

    fn raise(&self, word: usize, value: u64) {
        if let Some(word) = self.map.word(word) {
            word.fetch_max(value, Ordering::SeqCst);
        }
    }
}
