//! What may be served: the oracle.
//!
//! Versions are numbered in the order in which their puts begin, which is that of their sequences. A version may be served
//! unless it is removed, expired, or older than one that was flushed; it must be served if it was flushed and the running log
//! still had it. A put that one process has begun before another process began a newer one, and ends after that was flushed, may
//! come after it, as with removals: the two were under way at once.

use std::collections::{BTreeMap, BTreeSet};

/// One stored version of a key.
#[derive(Clone, Copy, Debug)]
pub struct Version {
    pub id: u64,
    /// The log's number of it.
    pub sequence: u64,
    /// Process that stores it.
    pub owner: u64,
    /// Its header was handed to the drive.
    pub committed: bool,
    /// Its put ended well.
    pub stored: bool,
    pub flushed: bool,
    /// Its put ended badly.
    pub over: bool,
    /// It was under way when another process flushed a newer one: it may come after that.
    pub late: bool,
    /// Unix seconds; 0 for never.
    pub expiry_s: u32,
    /// A removal of it has begun.
    pub going: bool,
    /// And returned: it may not come back.
    pub gone: bool,
}

/// All versions of one key.
#[derive(Clone, Debug, Default)]
pub struct Key {
    pub versions: Vec<Version>,
}

impl Key {
    fn find(&mut self, id: u64) -> Option<&mut Version> {
        self.versions.iter_mut().rev().find(|v| v.id == id)
    }

    /// The newest version that was flushed, or 0.
    fn floor(&self) -> u64 {
        self.versions.iter().rev().find(|v| v.flushed).map_or(0, |v| v.id)
    }
}

/// What is known of all keys.
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub keys: BTreeMap<u64, Key>,
    pub last_id: u64,
    /// Keys that an image must serve, as of the last crash; while no log is open.
    pub must: Vec<u64>,
    /// Bits were turned: what is there may be lost.
    pub rotten: bool,
    /// Sequences of versions that were stored, and not flushed, by processes that were killed. Who comes next may not know of them,
    /// and writes to their place although somebody leases it (docs/format.md, *A writer that is killed*).
    pub lost: BTreeSet<u64>,
    /// Sequences of forgotten versions that were never flushed. Their records may be lost and their slots whole: a rebuild finds those once
    /// nothing newer is left (docs/format.md, *What it cannot know*).
    pub unrecorded: BTreeSet<u64>,
}

impl Model {
    pub fn begin(&mut self, key: u64, owner: u64, (sequence, expiry_s): (u64, u32)) -> u64 {
        self.last_id += 1;
        let id = self.last_id;
        let (committed, stored, flushed, over, late, going, gone) = (false, false, false, false, false, false, false);
        let version = Version { id, sequence, owner, committed, stored, flushed, over, late, expiry_s, going, gone };
        self.keys.entry(key).or_default().versions.push(version);
        id
    }

    pub fn committing(&mut self, key: u64, id: u64) {
        if let Some(v) = self.keys.entry(key).or_default().find(id) {
            v.committed = true;
        }
    }

    pub fn stored(&mut self, key: u64, id: u64) {
        if let Some(v) = self.keys.entry(key).or_default().find(id) {
            v.stored = true;
        }
    }

    /// A put ended badly.
    pub fn over(&mut self, key: u64, id: u64) {
        if let Some(v) = self.keys.entry(key).or_default().find(id) {
            v.over = true;
        }
    }

    /// What `owner` has stored is durable.
    pub fn flushed(&mut self, owner: u64) {
        for key in self.keys.values_mut() {
            for v in &mut key.versions {
                v.flushed |= v.owner == owner && v.stored;
            }
            let floor = key.floor();
            for v in key.versions.iter_mut().filter(|v| v.id < floor && v.owner != owner) {
                v.late |= !v.stored && !v.over;
            }
        }
        self.prune();
    }

    /// `owner` is gone without having flushed, by a kill or because closing failed: what it had not may be found again, or not.
    pub fn unflushed_is_lost(&mut self, owner: u64) {
        for v in self.keys.values_mut().flat_map(|k| &mut k.versions) {
            if v.owner == owner && v.stored && !v.flushed {
                self.lost.insert(v.sequence);
            }
            v.stored &= v.flushed || v.owner != owner;
            v.over |= !v.stored && v.owner == owner;
        }
    }

    /// A log that has just recovered serves this version: it is durable.
    pub fn recovered(&mut self, key: u64, id: u64) {
        if let Some(v) = self.keys.entry(key).or_default().find(id) {
            (v.stored, v.flushed) = (true, true);
            self.lost.remove(&v.sequence);
        }
    }

    /// `by` begins to remove what is stored, and what it stores itself. Puts of others that are under way may come after it.
    pub fn removing(&mut self, by: u64, keys: &[u64]) {
        for key in keys {
            for v in &mut self.keys.entry(*key).or_default().versions {
                v.going |= v.stored || v.flushed || v.owner == by;
            }
        }
    }

    /// The removal has returned.
    pub fn removed(&mut self, keys: &[u64]) {
        for key in keys {
            for v in &mut self.keys.entry(*key).or_default().versions {
                v.gone |= v.going;
            }
        }
    }

    /// The version of a key that the log numbers so.
    pub fn of_sequence(&self, key: u64, sequence: u64) -> Option<&Version> {
        self.keys.get(&key)?.versions.iter().rev().find(|v| v.sequence == sequence)
    }

    /// Why version `id` of `key` may not be served, if it may not; `live` says that nothing has crashed since.
    pub fn objection(&self, key: u64, id: u64, (now_s, live): (u64, bool)) -> Option<String> {
        let k = self.keys.get(&key)?;
        let Some(v) = k.versions.iter().find(|v| v.id == id) else {
            return Some("a version that was never stored, or pruned because newer ones were flushed".to_owned());
        };
        if !v.committed {
            return Some("a version whose put was not committed".to_owned());
        }
        if v.gone {
            return Some("it was removed".to_owned());
        }
        if id < k.floor() && !v.late {
            return Some(format!("version {} was flushed", k.floor()));
        }
        let newest = k.versions.iter().rev().find(|v| v.stored).map_or(0, |v| v.id);
        if live && id < newest && !v.late {
            return Some(format!("version {newest} was stored"));
        }
        if v.expiry_s != 0 && now_s >= u64::from(v.expiry_s) {
            return Some("it has expired".to_owned());
        }
        None
    }

    /// Forgets versions that may not be served anyway.
    fn prune(&mut self) {
        for key in self.keys.values_mut() {
            let floor = key.floor();
            let is_kept = |v: &Version| v.id >= floor || v.late;
            self.unrecorded
                .extend(key.versions.iter().filter(|v| !is_kept(v) && v.committed && !v.flushed).map(|v| v.sequence));
            key.versions.retain(is_kept);
        }
    }
}
