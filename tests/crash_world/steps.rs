//! What processes do, step by step, as a seed decides; what is served meanwhile is judged at once.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use forebay::log::purge::{What, purge};
use forebay::log::{Log, Turn};

use super::key;
use super::model::Going;
use super::rng::Rng;
use super::world::{Process, World};

/// The first choice of a step that removes.
const REMOVE: u64 = 63;

/// Whether every step is printed (`FOREBAY_CRASH_TRACE`), for somebody who replays a seed.
pub fn telling() -> bool {
    static TELLING: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *TELLING.get_or_init(|| std::env::var_os("FOREBAY_CRASH_TRACE").is_some())
}

impl World {
    pub fn tell(&self, what: impl FnOnce() -> String) {
        if telling() {
            println!("{} [{}] {}", self.story, self.disk.operations(), what());
        }
    }

    /// One step of one process.
    pub fn step(&self, process: &Arc<Process>, rng: &mut Rng) {
        // Some keys are used more than others.
        let k = rng.below(self.config.keys).min(rng.below(self.config.keys * 2));
        let removes = self.config.remove_one_in;
        let choice = if removes > 0 && rng.one_in(removes) { REMOVE } else { rng.below(100) };
        self.tell(|| format!("process {} key {k}: {choice}", process.number));
        match choice {
            0..=37 => self.store(process, k, rng),
            38..=44 => self.begin(process, k, rng),
            45..=49 => self.go_on(process, rng),
            50..=55 => {
                for _ in 0..3 {
                    self.load(process, k);
                }
            }
            56..=59 => self.hold(process, k),
            60..=62 => self.check_held(process, rng),
            REMOVE..=68 => self.remove(process, k, rng),
            69 => self.floor(process, k, rng),
            70..=76 => self.flush(process),
            77..=84 => self.turn(process, Turn::Commit),
            85..=87 => self.turn(process, Turn::Maintain),
            88 => self.turn(process, Turn::Scan),
            89..=90 => self.seal(process),
            91..=92 => drop(self.clock.0.fetch_add(rng.below(30_000), std::sync::atomic::Ordering::Relaxed)),
            _ => {
                // Uses all over the cache, so that reclaim finds something worth a move wherever it
                // looks.
                for _ in 0..12 {
                    let k = rng.below(self.config.keys);
                    self.run(process, |log| log.lookup(&[key(k)]));
                }
                self.turn(process, Turn::Maintain);
            }
        }
        self.remove_evicted(process, rng);
        self.turn(process, Turn::Journal);
    }

    /// What another process does amid a call of the one that runs.
    pub fn step_amid(&self, rng: &mut Rng) {
        let current = self.disk.current();
        let others = self.processes.lock().clone();
        let Some(process) = others.iter().find(|p| p.number != current && !self.disk.is_dead(p.number)) else { return };
        if self.disk.is_dead(current) || self.is_locked() {
            return;
        }
        self.amid.fetch_add(1, Ordering::Relaxed);
        self.judge.amid.fetch_add(1, Ordering::Relaxed);
        let (k, choice) = (rng.below(self.config.keys), rng.below(10));
        self.tell(|| format!("amid a call of {current} process {} key {k}: {choice}", process.number));
        match choice {
            0..=2 => self.store(process, k, rng),
            3..=5 => self.remove(process, k, rng),
            6 => drop(self.load(process, k)),
            7 => self.flush(process),
            8 => self.turn(process, Turn::Commit),
            _ => self.turn(process, Turn::Maintain),
        }
        self.disk.enter(current);
    }

    /// Removes, now and then, what has just been given up: a crash could still bring it back.
    fn remove_evicted(&self, process: &Process, rng: &mut Rng) {
        let evicted = self.run(process, |log| log.take_evicted(64));
        if evicted.is_empty() || !rng.one_in(3) {
            return;
        }
        let keys: Vec<u64> = (0..self.config.keys).filter(|k| evicted.contains(&key(*k))).collect();
        self.tell(|| format!("process {} removes {keys:?}, which were given up", process.number));
        self.remove_keys(process, &keys);
    }

    fn remove(&self, process: &Process, k: u64, rng: &mut Rng) {
        let some = if rng.one_in(12) { self.config.keys } else { 1 + rng.below(2) };
        let keys: Vec<u64> = (k..k + some).map(|k| k % self.config.keys).collect();
        self.remove_keys(process, &keys);
    }

    pub fn remove_keys(&self, process: &Process, keys: &[u64]) {
        let going = self.model.lock().removing(process.number, keys);
        let names: Vec<_> = keys.iter().map(|k| key(*k)).collect();
        self.drain(process);
        let outcome = self.run(process, |log| log.remove(&names).map(drop));
        self.removed(process.number, (&going, &outcome));
    }

    /// A removal or floor has ended.
    fn removed(&self, by: u64, (going, outcome): (&Going, &forebay::Result<()>)) {
        self.tell(|| format!("  it ends: {outcome:?}"));
        // What a process does after its death does not count.
        self.model.lock().ends(going, outcome.is_ok() && !self.disk.is_dead(by));
    }

    /// A floor of everything or of a tenant, by the process or from outside.
    fn floor(&self, process: &Process, k: u64, rng: &mut Rng) {
        let tenant = Some(self.config.tenant(k)).filter(|tenant| *tenant != 0 && !rng.one_in(4));
        let by_itself = rng.one_in(2) || self.config.threads > 0;
        if tenant.is_none() && rng.one_in(2) {
            return;
        }
        let going = self.model.lock().flooring(tenant);
        self.tell(|| format!("a floor of tenant {tenant:?}, by itself: {by_itself}"));
        if by_itself {
            self.drain(process);
            let outcome =
                self.run(process, |log| tenant.map_or_else(|| log.clear(), |t| log.remove_tenant(t).map(drop)));
            return self.removed(process.number, (&going, &outcome));
        }
        let number = self.enter_another();
        let what = tenant.map_or(What::All, What::Tenant);
        let outcome =
            self.shard().map_or(Ok(()), |(namespace, shard)| purge(&self.dir, &namespace, &shard, what).map(drop));
        self.removed(number, (&going, &outcome));
    }

    /// Ends the writes that wait, without which a flush would wait for ever.
    pub fn drain(&self, process: &Process) {
        self.settle(process);
        self.note_ends(process);
    }

    pub fn flush(&self, process: &Process) {
        self.drain(process);
        let stored = self.model.lock().stored(process.number);
        let flushed = self.run(process, Log::flush).is_ok();
        self.note_flushed(process, flushed, &stored);
    }

    fn seal(&self, process: &Process) {
        if !process.begun.lock().is_empty() {
            return;
        }
        self.drain(process);
        let stored = self.model.lock().stored(process.number);
        let sealed = self.run(process, |log| log.seal(Instant::now())).is_ok();
        self.note_flushed(process, sealed, &stored);
    }

    fn note_flushed(&self, process: &Process, flushed: bool, stored: &[u64]) {
        if flushed && !self.disk.is_dead(process.number) {
            let only = (self.config.threads > 0).then_some(stored);
            self.model.lock().flushed(process.number, only);
        }
    }

    pub fn turn(&self, process: &Process, turn: Turn) {
        if turn == Turn::Scan {
            self.tell(|| format!("process {} scans, sees {} lanes", process.number, process.log.stats().lanes));
        }
        if self.config.threads == 0 {
            self.run(process, |log| log.turn(turn));
        }
        self.note_ends(process);
    }
}
