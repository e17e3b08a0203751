//! The least that all ranks have of a prompt: looked up in the tables of those whose cache lies on
//! this machine, asked of the others.
//!
//! Which is which follows from what each worker says of itself. A question goes out with the next
//! step, and only for a prompt of which the visible ranks have something; its answers come back
//! with that step's output, so that a request waits for a step or two and never for longer than the
//! patience: then nothing counts as stored.
//!
//! Invariants: nothing is kept but for live requests, a few words each and for each rank that is
//! asked; what a rank said is dropped when it says that it has started anew. No call waits, except
//! that [`reported`](PrefixLookup::reported) opens a worker's cache when its identity is new.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::lookup::{Fetches, PendingQuestion, Pins, PrefixLookup, least, remote_gone, uploaded};
use super::meta::WorkerMeta;
use super::worker_identity::WorkerIdentity;
use crate::config::{CacheIdentity, Settings};
use crate::engine::{Engine, Prompt};
use crate::error::Result;
use crate::geometry::Geometry;
use crate::key::ChunkKey;

/// How old an answer may be before it is asked for again; until the new one comes the old one
/// counts.
const FRESH: Duration = Duration::from_secs(1);

/// Which KV a cache holds, and where it lies: the same for workers that can use each other's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct CacheShard(String, String);

impl CacheShard {
    fn of(geometry: &Geometry) -> Self {
        Self(geometry.fingerprint().dir_name(), geometry.shard_dir_name())
    }
}

/// A rank, once its identity is known.
#[derive(Debug)]
struct KnownRank {
    identity: WorkerIdentity,
    shard: Option<CacheShard>,
    is_seen: bool,
}

/// A request that the workers were asked about.
#[derive(Debug)]
struct AskedRequest {
    number: u64,
    tokens: usize,
    since: Instant,
    is_open: bool,
    answers: BTreeMap<u32, usize>,
    /// The least of the answers, and when the last of them came.
    least: Option<(usize, Instant)>,
}

/// The lookup of a server's scheduler.
#[derive(Debug)]
pub struct RanksLookup {
    settings: Settings,
    patience: Duration,
    workers: u32,
    ranks: BTreeMap<u32, KnownRank>,
    tables: BTreeMap<CacheShard, Engine>,
    pins: Pins,
    fetches: Fetches,
    /// Since when lookups miss a rank that has not said who it is.
    missing_since: Option<Instant>,
    is_silent_said: bool,
    requests: HashMap<String, AskedRequest>,
    open: HashMap<u64, String>,
    queue: VecDeque<String>,
    next: u64,
}

impl RanksLookup {
    /// For so many workers; caches that `settings` name on this machine are looked into. A request
    /// waits for answers no longer than `patience`.
    #[must_use]
    pub fn new(settings: &Settings, workers: usize, patience: Duration) -> Self {
        Self {
            // Nothing is loaded here.
            settings: Settings { local_cpu: false, ..settings.clone() },
            patience,
            workers: u32::try_from(workers).unwrap_or(u32::MAX),
            ranks: BTreeMap::new(),
            tables: BTreeMap::new(),
            pins: Pins::default(),
            fetches: Fetches::default(),
            missing_since: None,
            is_silent_said: false,
            requests: HashMap::new(),
            open: HashMap::new(),
            queue: VecDeque::new(),
            next: 0,
        }
    }

    fn identified(&mut self, number: u32, identity: &WorkerIdentity) {
        if number >= self.workers || self.ranks.get(&number).is_some_and(|rank| rank.identity == *identity) {
            return;
        }
        let geometry = identity.geometry().inspect_err(|e| {
            tracing::warn!(error = %e, rank = number, "a worker's identity describes impossible KV; its cache is not looked up here");
        });
        let shard = geometry.as_ref().ok().map(CacheShard::of);
        let is_near = identity.place.is_some() && identity.place == self.settings.cache_identity();
        let is_seen = is_near && geometry.is_ok_and(|geometry| self.sees(geometry));
        tracing::info!(rank = number, is_seen, "a worker's identity is known");
        self.ranks.insert(number, KnownRank { identity: identity.clone(), shard, is_seen });
        let seen: Vec<&CacheShard> =
            self.ranks.values().filter(|r| r.is_seen).filter_map(|r| r.shard.as_ref()).collect();
        self.tables.retain(|shard, _| seen.contains(&shard));
        // What it said before its start is of another process.
        self.requests.clear();
        self.open.clear();
        self.queue.clear();
        self.is_silent_said = false;
        if self.ranks.len() as u64 == u64::from(self.workers) {
            self.missing_since = None;
        }
    }

    /// Whether the cache of `geometry` is open here.
    fn sees(&mut self, geometry: Geometry) -> bool {
        let shard = CacheShard::of(&geometry);
        if self.tables.contains_key(&shard) {
            return true;
        }
        match Engine::open_host(&self.settings, geometry) {
            Ok(engine) if engine.is_up() => {
                self.tables.insert(shard, engine);
                true
            }
            Ok(engine) => {
                tracing::warn!(why = engine.why_disabled(), "a rank's cache cannot be looked into; the rank is asked");
                false
            }
            Err(e) => {
                tracing::warn!(error = %e, "a rank's cache cannot be looked into; the rank is asked");
                false
            }
        }
    }

    /// Asks about a request with the next step.
    fn ask(&mut self, req_id: &str, tokens: usize) {
        self.next += 1;
        let (number, since) = (self.next, Instant::now());
        let least = self.requests.get(req_id).and_then(|asked| asked.least);
        let asked = AskedRequest { number, tokens, since, is_open: true, answers: BTreeMap::new(), least };
        if let Some(before) = self.requests.insert(req_id.to_owned(), asked) {
            self.open.remove(&before.number);
        }
        self.open.insert(number, req_id.to_owned());
        self.queue.push_back(req_id.to_owned());
    }

    fn answered(&mut self, rank: u32, (number, tokens): (u64, u64)) {
        let of = self.open.get(&number).and_then(|req_id| self.requests.get_mut(req_id));
        let Some(asked) = of.filter(|asked| asked.number == number) else { return };
        asked.answers.insert(rank, usize::try_from(tokens).unwrap_or(usize::MAX));
        let answers = &asked.answers;
        let unseen = self.ranks.iter().filter(|(_, rank)| !rank.is_seen).map(|(number, _)| number);
        if let Some(least) = unseen.map(|rank| answers.get(rank).copied()).min().flatten() {
            asked.least = Some((least.min(asked.tokens), Instant::now()));
            asked.is_open = false;
            self.open.remove(&number);
        }
    }
}

impl PrefixLookup for RanksLookup {
    fn stored_tokens(&mut self, req_id: &str, prompt: &Prompt) -> Result<Option<usize>> {
        if self.fetches.is_coming(self.tables.values(), (req_id, prompt), self.patience)? {
            return Ok(None);
        }
        let seen = least(self.tables.values(), prompt)?;
        let upto = seen.unwrap_or(prompt.len());
        if upto == 0 {
            return Ok(Some(0));
        }
        if (self.ranks.len() as u64) < u64::from(self.workers) {
            let since = *self.missing_since.get_or_insert_with(Instant::now);
            return Ok((since.elapsed() >= self.patience).then_some(0));
        }
        if self.unseen() == 0 {
            return Ok(Some(upto));
        }
        let Some(asked) = self.requests.get(req_id) else {
            self.ask(req_id, upto);
            return Ok(None);
        };
        let Some((least, at)) = asked.least else {
            return Ok((asked.since.elapsed() >= self.patience).then_some(0));
        };
        if !asked.is_open && (at.elapsed() >= FRESH || asked.tokens < upto) {
            self.ask(req_id, upto);
        }
        Ok(Some(least.min(upto)))
    }

    fn ends_at_multiples_of(&mut self, tokens: usize) {
        self.fetches.multiple = tokens;
    }

    fn computes(&mut self, tokens_per_s: Option<f64>) {
        self.fetches.computes(tokens_per_s);
    }

    fn not_fetched(&self) -> u64 {
        self.fetches.not_fetched()
    }

    fn remote_gone(&mut self) -> Vec<ChunkKey> {
        remote_gone(self.tables.values())
    }

    fn pin(&mut self, req_id: &str, prompt: &Prompt, tokens: usize, patience: Duration) -> Result<usize> {
        self.pins.pin(self.tables.values(), (req_id, prompt, tokens), patience)
    }

    fn unpin(&mut self, req_id: &str) {
        self.pins.unpin(req_id);
    }

    fn reported(&mut self, report: &WorkerMeta) {
        if let Some(identity) = &report.identity {
            self.identified(report.rank, identity);
        }
        for answer in &report.answers {
            self.answered(report.rank, *answer);
        }
        uploaded(self.tables.values(), report);
    }

    fn wanted(&mut self) -> Option<PendingQuestion> {
        while let Some(req_id) = self.queue.pop_front() {
            if let Some(asked) = self.requests.get(&req_id).filter(|asked| asked.is_open) {
                return Some(PendingQuestion { number: asked.number, tokens: asked.tokens, req_id });
            }
        }
        None
    }

    fn asked(&self) -> Vec<u32> {
        self.ranks.iter().filter(|(_, rank)| !rank.is_seen).map(|(number, _)| *number).collect()
    }

    fn silent(&mut self) -> Option<Vec<u32>> {
        if self.is_silent_said || (self.ranks.len() as u64) < u64::from(self.workers) {
            return None;
        }
        self.is_silent_said = true;
        let mut stores: Vec<(CacheIdentity, &CacheShard)> = Vec::new();
        let mut silent = Vec::new();
        for (number, rank) in &self.ranks {
            let (Some(place), Some(shard)) = (rank.identity.place, rank.shard.as_ref()) else { continue };
            if stores.contains(&(place, shard)) {
                silent.push(*number);
            } else {
                stores.push((place, shard));
            }
        }
        Some(silent)
    }

    fn unseen(&self) -> usize {
        self.ranks.values().filter(|rank| !rank.is_seen).count()
    }

    fn forget(&mut self, req_id: &str) {
        self.pins.unpin(req_id);
        self.fetches.forget(req_id);
        if let Some(asked) = self.requests.remove(req_id) {
            self.open.remove(&asked.number);
        }
    }
}
