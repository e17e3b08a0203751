//! Leases: what any process takes on a segment so that its chunks stay until they are loaded.
//!
//! A record is four words: owner, target (segment and epoch), expiry, start time and PID namespace
//! of the holder. The owner word is the record's state: 0 is free, the top bit a claim in progress,
//! anything else a lease. A taker claims a free record, fills it, and publishes it by exchanging
//! the owner word; a lease is ended by an exchange too. So a holder whose lease expired and whose
//! record another lease has got does not end that one. A claim that is more than ten seconds old is
//! taken to be that of a dead process; should that process only have slept, the lease that got the
//! record meanwhile may be lost, which costs a miss and never a wrong byte, because loads verify.
//!
//! The argument (Dekker's, all accesses sequentially consistent): a taker publishes its record,
//! then reads the segment's state; the writer stores `Condemned`, then reads the records. Whichever
//! comes second sees the other: either the taker withdraws, or the writer refrains.
//!
//! A process needs one record per segment however many chunks it leases: it counts its guards
//! itself; a removal takes a record of its own. A lease that must last longer takes a new record,
//! for one and a half times the time asked for, so that a stream of leases does not take a new
//! record at every call.

use std::sync::atomic::Ordering;

use super::header::Holder;
use super::lane::{MappedLane, SharedLane, W_RECORDS_HIGH};
use super::sync::AtomicU64;

/// How long a [`HoldGuard`] protects at most.
const HOLD_NS: u64 = 3_600 * 1_000_000_000;
const CLAIMING: u64 = 1 << 63;
const PID_MASK: u64 = 0xffff_ffff;
const STALE_CLAIM_MS: u64 = 10_000;
const CLAIM_TIME_MASK: u64 = (1 << 31) - 1;
const RETRIES: usize = 8;

const OWNER: usize = 0;
const TARGET: usize = 1;
const EXPIRY: usize = 2;
const IDENT: usize = 3;

/// Clock and liveness, as the caller knows them.
#[derive(Clone, Copy)]
pub struct LeaseEnv<'a> {
    /// Now, in nanoseconds of the boot clock (`CLOCK_BOOTTIME`).
    pub now_ns: u64,
    /// Whether a process lives; must say so of those of other PID namespaces, which cannot be
    /// asked.
    pub alive: &'a dyn Fn(&Holder) -> bool,
}

/// Why a lease was refused; the chunk may still be read, at the risk of a miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseRefused {
    /// The segment is not in this use any more, or about to be reclaimed.
    Gone,
    /// As many segments are leased as the lane allows.
    Share,
    /// Every record is in use.
    Full,
    /// The lane is mapped read-only.
    ReadOnly,
}

/// This process's record for one use of a segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeaseRecord {
    record: usize,
    owner: u64,
    expiry_ns: u64,
    guards: usize,
}

/// A lease; dropping it ends it.
#[derive(Debug)]
pub struct LeaseGuard {
    lane: SharedLane,
    segment: u32,
    epoch: u32,
    expiry_ns: u64,
}

impl LeaseGuard {
    /// The segment it protects.
    #[must_use]
    pub fn segment(&self) -> u32 {
        self.segment
    }

    /// The use of the segment it protects.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Until when it protects, in nanoseconds of the boot clock; not earlier than asked for.
    #[must_use]
    pub fn expiry_ns(&self) -> u64 {
        self.expiry_ns
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        let inner = &self.lane.inner;
        // In a forked child the lock may never be free, and the lease is its parent's.
        if inner.process != std::process::id() {
            return;
        }
        let mut held = inner.held.lock();
        let Some(mine) = held.get_mut(&(self.segment, self.epoch)) else { return };
        mine.guards = mine.guards.saturating_sub(1);
        if mine.guards == 0 {
            inner.end(mine.record, mine.owner);
            held.remove(&(self.segment, self.epoch));
        }
    }
}

/// A lease that ends when this is dropped: a removal takes one until its write has ended.
#[derive(Debug)]
pub struct HoldGuard {
    lane: SharedLane,
    record: usize,
    owner: u64,
}

impl Drop for HoldGuard {
    fn drop(&mut self) {
        // A forked child only drops its copy.
        if self.lane.inner.process == std::process::id() {
            self.lane.inner.end(self.record, self.owner);
        }
    }
}

impl SharedLane {
    /// Takes a lease on a use of a segment until `expiry_ns` of the boot clock.
    ///
    /// # Errors
    /// Why there is none.
    pub fn lease(
        &self,
        segment: u32,
        epoch: u32,
        expiry_ns: u64,
        env: &LeaseEnv<'_>,
    ) -> Result<LeaseGuard, LeaseRefused> {
        let guard = |expiry_ns| LeaseGuard { lane: self.clone(), segment, epoch, expiry_ns };
        let inner = &self.inner;
        let mut held = inner.held.lock();
        if let Some(mine) = held.get_mut(&(segment, epoch))
            && mine.expiry_ns >= expiry_ns
            && mine.expiry_ns > env.now_ns
        {
            // The record is published and not expired, so the segment cannot have been condemned.
            mine.guards += 1;
            return Ok(guard(mine.expiry_ns));
        }
        let lasting = expiry_ns.saturating_add(expiry_ns.saturating_sub(env.now_ns) / 2);
        let (record, owner) = inner.publish(segment, epoch, lasting, env, true)?;
        let mine = LeaseRecord { record, owner, expiry_ns: lasting, guards: 1 };
        if let Some(old) = held.insert((segment, epoch), mine) {
            inner.end(old.record, old.owner);
            if let Some(mine) = held.get_mut(&(segment, epoch)) {
                mine.guards += old.guards;
            }
        }
        Ok(guard(lasting))
    }

    /// Keeps a use of a segment until the guard goes, without the limit on leased segments: for a
    /// removal, which writes into a lane of another process. After an hour it protects no more: it
    /// may be that of a dead process in another PID namespace.
    ///
    /// # Errors
    /// Why there is none.
    pub fn hold(&self, segment: u32, epoch: u32, env: &LeaseEnv<'_>) -> Result<HoldGuard, LeaseRefused> {
        let (record, owner) = self.inner.publish(segment, epoch, env.now_ns.saturating_add(HOLD_NS), env, false)?;
        Ok(HoldGuard { lane: self.clone(), record, owner })
    }

    /// Frees the records of leases that expired or whose holder died, and of claims whose process
    /// died; returns how many. Such leases protect nothing, swept or not.
    pub fn sweep_leases(&self, env: &LeaseEnv<'_>) -> usize {
        self.inner.sweep(env)
    }

    /// Whether anybody holds a lease on a use of a segment.
    #[must_use]
    pub fn is_leased(&self, segment: u32, epoch: u32, env: &LeaseEnv<'_>) -> bool {
        self.inner.lease_on(segment, epoch, env).is_some()
    }

    /// Segments with a lease that has not expired, whatever use of them it is on.
    #[must_use]
    pub fn leased_segments(&self, now_ns: u64) -> Vec<u32> {
        let leased = self.inner.leased(now_ns).into_iter().map(|(segment, _)| segment);
        leased.filter(|segment| *segment < self.segments()).collect()
    }
}

fn target_of(segment: u32, epoch: u32) -> u64 {
    u64::from(segment) << 32 | u64::from(epoch)
}

impl MappedLane {
    fn record_part(&self, record: usize, part: usize) -> Option<&AtomicU64> {
        self.map.word(self.record_word(record) + part)
    }

    fn record_load(&self, record: usize, part: usize) -> u64 {
        let looked_at = || self.map.load_acquire(self.record_word(record) + part);
        self.record_part(record, part).map_or_else(looked_at, |w| w.load(Ordering::SeqCst))
    }

    fn records_used(&self) -> usize {
        // No lease depends on what a read-only mapping sees.
        let looked_at = || self.map.load_acquire(W_RECORDS_HIGH);
        let high = self.map.word(W_RECORDS_HIGH).map_or_else(looked_at, |w| w.load(Ordering::SeqCst));
        self.records.min(usize::try_from(high).unwrap_or(usize::MAX))
    }

    fn exchange(&self, record: usize, from: u64, to: u64) -> bool {
        self.record_part(record, OWNER)
            .is_some_and(|w| w.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok())
    }

    fn end(&self, record: usize, owner: u64) {
        // It fails where the lease had expired and another process has freed the record.
        let _ = self.exchange(record, owner, 0);
    }

    /// Owner word, target, expiry and holder of a published record.
    fn read(&self, record: usize) -> Option<(u64, u64, u64, Holder)> {
        for _ in 0..RETRIES {
            let owner = self.record_load(record, OWNER);
            if owner == 0 || owner & CLAIMING != 0 {
                return None;
            }
            let target = self.record_load(record, TARGET);
            let expiry = self.record_load(record, EXPIRY);
            let holder = Holder::of_words((owner & PID_MASK) as u32, self.record_load(record, IDENT));
            if self.record_load(record, OWNER) == owner {
                return Some((owner, target, expiry, holder));
            }
        }
        None
    }

    /// The holder of a live lease on a use of a segment.
    pub(super) fn lease_on(&self, segment: u32, epoch: u32, env: &LeaseEnv<'_>) -> Option<Holder> {
        (0..self.records_used()).find_map(|record| {
            let (owner, target, expiry, holder) = self.read(record)?;
            if target != target_of(segment, epoch) || expiry <= env.now_ns {
                return None;
            }
            if !(env.alive)(&holder) {
                self.end(record, owner);
                return None;
            }
            Some(holder)
        })
    }

    fn sweep(&self, env: &LeaseEnv<'_>) -> usize {
        (0..self.records_used())
            .filter(|record| {
                let owner = self.record_load(*record, OWNER);
                if owner & CLAIMING != 0 {
                    let age = claim_time(env.now_ns).wrapping_sub(owner >> 32) & CLAIM_TIME_MASK;
                    // An age beyond half the range is a claim from a moment after `now` was read.
                    return age > STALE_CLAIM_MS && age < CLAIM_TIME_MASK / 2 && self.exchange(*record, owner, 0);
                }
                self.read(*record).is_some_and(|(owner, _, expiry, holder)| {
                    (expiry <= env.now_ns || !(env.alive)(&holder)) && self.exchange(*record, owner, 0)
                })
            })
            .count()
    }

    /// Segments with an unexpired lease, in order, and for each how many records name it.
    fn leased(&self, now_ns: u64) -> Vec<(u32, usize)> {
        let mut all: Vec<u32> = (0..self.records_used())
            .filter_map(|r| self.read(r))
            .filter(|(_, _, expiry, _)| *expiry > now_ns)
            .map(|(_, target, ..)| (target >> 32) as u32)
            .collect();
        all.sort_unstable();
        all.chunk_by(|a, b| a == b).filter_map(|same| same.first().map(|s| (*s, same.len()))).collect()
    }

    fn over_share(&self, segment: u32, now_ns: u64) -> bool {
        if self.lease_limit >= self.segments as usize {
            return false;
        }
        let leased = self.leased(now_ns);
        // A segment that has a lease beside this one is counted already.
        leased.len() > self.lease_limit && leased.iter().any(|(s, records)| *s == segment && *records == 1)
    }

    fn publish(
        &self,
        segment: u32,
        epoch: u32,
        expiry_ns: u64,
        env: &LeaseEnv<'_>,
        in_share: bool,
    ) -> Result<(usize, u64), LeaseRefused> {
        if !self.map.is_writable() {
            return Err(LeaseRefused::ReadOnly);
        }
        if !self.leasable(segment, epoch) {
            return Err(LeaseRefused::Gone);
        }
        let (record, claim) = self
            .claim(env.now_ns)
            .or_else(|| if self.sweep(env) > 0 { self.claim(env.now_ns) } else { None })
            .ok_or(LeaseRefused::Full)?;
        for (part, value) in [(IDENT, self.holder.ident()), (EXPIRY, expiry_ns), (TARGET, target_of(segment, epoch))] {
            if let Some(word) = self.record_part(record, part) {
                word.store(value, Ordering::Relaxed);
            }
        }
        let nonce = u64::from(self.nonce.fetch_add(1, Ordering::Relaxed) & 0x7fff_ffff);
        // A process id of 0 does not exist, so the word is never 0.
        let owner = nonce << 32 | u64::from(self.holder.pid.max(1));
        if !self.exchange(record, claim, owner) {
            return Err(LeaseRefused::Full);
        }
        // The taker's half of the argument: publish first, look at the state second.
        if !self.leasable(segment, epoch) {
            self.end(record, owner);
            return Err(LeaseRefused::Gone);
        }
        let is_over = in_share && self.over_share(segment, env.now_ns);
        if is_over && (self.sweep(env) == 0 || self.over_share(segment, env.now_ns)) {
            self.end(record, owner);
            return Err(LeaseRefused::Share);
        }
        Ok((record, owner))
    }

    fn claim(&self, now_ns: u64) -> Option<(usize, u64)> {
        let claim = CLAIMING | claim_time(now_ns) << 32 | u64::from(self.holder.pid);
        for record in 0..self.records {
            if self.record_load(record, OWNER) == 0 && self.exchange(record, 0, claim) {
                // Raised before the record is published: a writer that does not look at this record
                // has condemned the segment before, which the taker will see.
                self.map.word(W_RECORDS_HIGH)?.fetch_max(record as u64 + 1, Ordering::SeqCst);
                return Some((record, claim));
            }
        }
        None
    }
}

fn claim_time(now_ns: u64) -> u64 {
    (now_ns / 1_000_000) & CLAIM_TIME_MASK
}

#[cfg(test)]
#[cfg(not(forebay_loom))]
impl MappedLane {
    /// Claims a record, and neither publishes nor frees it, as a process that dies.
    pub(super) fn die_claiming(&self, now_ns: u64) {
        let _ = self.claim(now_ns);
    }
}
