//! The least that any rank has of a prompt. Ranks whose cache lies on this machine are *seen*:
//! their tables are looked up here. The others are asked.
//!
//! Which ranks are seen follows from their [`WorkerIdentity`]; one whose cache cannot be opened
//! here is asked until it can. A question goes out with the next
//! step, and only for a prompt of which the seen ranks have something; its answers come back with
//! that step's output. So a request waits for a step or two, and never for longer than the
//! patience: then the lookup fails, and nothing counts as stored.
//!
//! Invariants: only live requests take memory, a few words each and for each rank that is asked,
//! and for a while the loads that failed because a drive does not answer.
//! All answers are dropped when a rank says that it has started anew. No call waits, except that
//! [`reported`](PrefixLookup::reported) opens a worker's cache when its identity is new.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::lookup::{Fetches, PendingQuestion, Pins, PrefixLookup, least, remote, remote_gone, uploaded};
use super::meta::WorkerMeta;
use super::worker_identity::WorkerIdentity;
use crate::config::{CacheIdentity, OnOpenFailure, Settings};
use crate::engine::{Engine, Prompt, RemoteStats};
use crate::error::{Error, ErrorKind, Result};
use crate::geometry::Geometry;
use crate::key::ChunkKey;

/// Answers older than this are asked for again; until the new ones come, they count.
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
    /// `None` where its identity describes impossible KV.
    shard: Option<CacheShard>,
    /// Its cache lies on this machine, in the directories of the settings.
    is_near: bool,
}

/// A request that the workers were asked about.
#[derive(Debug)]
struct AskedRequest {
    number: u64,
    tokens: usize,
    since: Instant,
    /// Not all ranks have answered.
    is_open: bool,
    answers: BTreeMap<u32, usize>,
    /// The least of the answers, and when the last of them came; of the question before, while this
    /// one is open.
    least: Option<(usize, Instant)>,
}

/// The lookup of a server's scheduler.
#[derive(Debug)]
pub struct RanksLookup {
    settings: Settings,
    patience: Duration,
    workers: u32,
    ranks: BTreeMap<u32, KnownRank>,
    /// Caches that are open here, or that are tried again until they are. Two of one shard only
    /// where the caller has opened them.
    tables: Vec<(CacheShard, Arc<Engine>)>,
    /// Chunks that a worker could not read, as a drive does not answer, and until when nobody is
    /// offered them.
    unread: HashMap<ChunkKey, Instant>,
    pins: Pins,
    fetches: Fetches,
    /// Since when lookups miss a rank that has not said who it is.
    missing_since: Option<Instant>,
    is_silent_said: bool,
    requests: HashMap<String, AskedRequest>,
    /// Requests that were looked up: the first time counts as a use, and not each time that a
    /// server asks again.
    looked_up: HashSet<String>,
    /// Open questions, by number.
    open: HashMap<u64, String>,
    /// Requests to ask about with the next steps.
    queue: VecDeque<String>,
    /// Number of the last question.
    next: u64,
}

impl RanksLookup {
    /// For so many workers; caches that `settings` name on this machine are looked into. A request
    /// waits for answers no longer than `patience`.
    #[must_use]
    pub fn new(settings: &Settings, workers: usize, patience: Duration) -> Self {
        Self {
            // Only looked up: nothing is loaded here, so no memory tier is needed. What cannot be
            // opened is tried again.
            settings: Settings { local_cpu: false, on_open_failure: OnOpenFailure::Disable, ..settings.clone() },
            patience,
            workers: u32::try_from(workers).unwrap_or(u32::MAX),
            ranks: BTreeMap::new(),
            tables: Vec::new(),
            unread: HashMap::new(),
            pins: Pins::default(),
            fetches: Fetches::default(),
            missing_since: None,
            is_silent_said: false,
            requests: HashMap::new(),
            looked_up: HashSet::new(),
            open: HashMap::new(),
            queue: VecDeque::new(),
            next: 0,
        }
    }

    /// Over caches that the caller has opened, one per rank. No worker is asked.
    #[must_use]
    pub fn over(engines: Vec<Arc<Engine>>) -> Self {
        let settings = engines.first().map(|engine| engine.settings().clone()).unwrap_or_default();
        let patience = Duration::from_millis(settings.load_timeout_ms);
        let tables = engines.into_iter().map(|engine| (CacheShard::of(engine.geometry()), engine)).collect();
        Self { tables, is_silent_said: true, ..Self::new(&settings, 0, patience) }
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
        if let Ok(geometry) = geometry
            && is_near
        {
            self.open(geometry);
        }
        self.ranks.insert(number, KnownRank { identity: identity.clone(), shard, is_near });
        let is_seen = self.ranks.get(&number).is_some_and(|rank| self.is_seen(rank));
        tracing::info!(rank = number, is_seen, "a worker's identity is known");
        let near: Vec<&CacheShard> =
            self.ranks.values().filter(|r| r.is_near).filter_map(|r| r.shard.as_ref()).collect();
        self.tables.retain(|(shard, _)| near.contains(&shard));
        // Earlier answers may be those of the process that this one replaces.
        self.requests.clear();
        self.open.clear();
        self.queue.clear();
        self.is_silent_said = false;
        if self.ranks.len() as u64 == u64::from(self.workers) {
            self.missing_since = None;
        }
    }

    /// Opens the cache of `geometry` here, unless it is open or being tried.
    fn open(&mut self, geometry: Geometry) {
        let shard = CacheShard::of(&geometry);
        if self.tables.iter().any(|(open, _)| *open == shard) {
            return;
        }
        match Engine::open_host(&self.settings, geometry) {
            Ok(engine) => {
                if let Some(why) = engine.why_disabled() {
                    tracing::warn!(why, "a rank's cache cannot be looked into yet; the rank is asked");
                }
                self.tables.push((shard, Arc::new(engine)));
            }
            Err(e) => tracing::warn!(error = %e, "a rank's cache cannot be looked into; the rank is asked"),
        }
    }

    /// Whether the rank's cache is open here.
    fn is_seen(&self, rank: &KnownRank) -> bool {
        let is_its = |shard: &CacheShard| rank.is_near && rank.shard.as_ref() == Some(shard);
        self.tables.iter().any(|(shard, engine)| is_its(shard) && engine.is_up())
    }

    /// Tokens of a prompt before the first chunk that a worker could not read lately.
    fn readable(&self, prompt: &Prompt) -> usize {
        let now = Instant::now();
        let is_unread = |key: &ChunkKey| self.unread.get(key).is_some_and(|until| now < *until);
        let first = if self.unread.is_empty() { None } else { prompt.keys().iter().position(is_unread) };
        first.map_or(prompt.len(), |at| at * prompt.chunk_tokens())
    }

    /// `None` until the patience is over, then an error: what is stored is not known, and no event
    /// may say that it is gone.
    fn waits_since(&self, since: Instant) -> Result<Option<usize>> {
        if since.elapsed() < self.patience {
            return Ok(None);
        }
        Err(Error::new(ErrorKind::TimedOut, "a rank has not said in time what it stores")
            .advice("see whether all workers run; a request waits for `load_timeout_ms`"))
    }

    /// Queues a question about a request for the next step.
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
        let unseen = self.asked();
        let of = self.open.get(&number).and_then(|req_id| self.requests.get_mut(req_id));
        let Some(asked) = of.filter(|asked| asked.number == number) else { return };
        asked.answers.insert(rank, usize::try_from(tokens).unwrap_or(usize::MAX));
        let answers = &asked.answers;
        if let Some(least) = unseen.iter().map(|rank| answers.get(rank).copied()).min().flatten() {
            asked.least = Some((least.min(asked.tokens), Instant::now()));
            asked.is_open = false;
            self.open.remove(&number);
        }
    }
}

/// The caches that are open.
fn engines(tables: &[(CacheShard, Arc<Engine>)]) -> impl Iterator<Item = &Engine> + Clone {
    tables.iter().map(|(_, engine)| engine.as_ref()).filter(|engine| engine.is_up())
}

impl PrefixLookup for RanksLookup {
    fn stored_tokens(&mut self, req_id: &str, prompt: &Prompt) -> Result<Option<usize>> {
        if self.fetches.is_coming(engines(&self.tables), req_id, prompt, self.patience)? {
            return Ok(None);
        }
        let is_first = !self.tables.is_empty() && self.looked_up.insert(req_id.to_owned());
        let seen = least(engines(&self.tables), prompt, is_first)?;
        // The caller's engines may all be closed.
        let upto = seen.unwrap_or(if self.workers == 0 { 0 } else { prompt.len() }).min(self.readable(prompt));
        if upto == 0 {
            return Ok(Some(0));
        }
        if (self.ranks.len() as u64) < u64::from(self.workers) {
            let since = *self.missing_since.get_or_insert_with(Instant::now);
            return self.waits_since(since);
        }
        if self.unseen() == 0 {
            return Ok(Some(upto));
        }
        let Some(asked) = self.requests.get(req_id) else {
            self.ask(req_id, upto);
            return Ok(None);
        };
        let Some((least, at)) = asked.least else {
            return self.waits_since(asked.since);
        };
        if !asked.is_open && (at.elapsed() >= FRESH || asked.tokens < upto) {
            self.ask(req_id, upto);
        }
        Ok(Some(least.min(upto)))
    }

    fn is_down(&self) -> bool {
        self.ranks.values().any(|rank| !rank.identity.is_up)
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

    fn remote(&self) -> RemoteStats {
        remote(engines(&self.tables))
    }

    fn remote_gone(&mut self) -> Vec<ChunkKey> {
        remote_gone(engines(&self.tables))
    }

    fn pin(&mut self, req_id: &str, prompt: &Prompt, tokens: usize, patience: Duration) -> Result<usize> {
        self.pins.pin(engines(&self.tables), req_id, prompt, tokens, patience)
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
        if !report.unread.is_empty() {
            let now = Instant::now();
            self.unread.retain(|_, until| now < *until);
            let until = now + self.settings.io_timeout();
            self.unread.extend(report.unread.iter().map(|key| (ChunkKey(*key), until)));
        }
        uploaded(engines(&self.tables), report);
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
        self.ranks.iter().filter(|(_, rank)| !self.is_seen(rank)).map(|(number, _)| *number).collect()
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
        self.asked().len()
    }

    fn forget(&mut self, req_id: &str) {
        self.pins.unpin(req_id);
        self.fetches.forget(req_id);
        self.looked_up.remove(req_id);
        if let Some(asked) = self.requests.remove(req_id) {
            self.open.remove(&asked.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::HostDevice;
    use crate::engine::EngineOptions;
    use crate::key::Extra;

    #[test]
    fn a_cache_that_cannot_be_opened_at_first_is_looked_into_once_it_is_open() {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = Settings::at(dir.path());
        (settings.chunk_size, settings.hugepages, settings.on_open_failure) = (16, false, OnOpenFailure::Fail);
        let geometry = Geometry::preset("tiny").unwrap();
        let geometry = Geometry { chunk_tokens: 16, ..geometry };
        let prompt = Prompt::new(&[7; 100], 16, &Extra::default());
        // In the place of a file.
        std::fs::create_dir(dir.path().join("BUDGET")).unwrap();
        let mut lookup = RanksLookup::new(&settings, 1, Duration::from_secs(3600));
        let identity = Some(WorkerIdentity::of(&geometry, settings.cache_identity()));
        lookup.reported(&WorkerMeta { identity, ..WorkerMeta::default() });
        assert_eq!((lookup.asked(), lookup.stored_tokens("a", &prompt).unwrap()), (vec![0], None));
        let [(_, engine)] = &mut *lookup.tables else { panic!("it is not tried again") };
        assert!(!engine.is_up());
        // The same in a place that comes soon, and that is tried more often.
        let missing = dir.path().join("not/there/yet");
        settings.drives[0].path.clone_from(&missing);
        settings.on_open_failure = OnOpenFailure::Disable;
        let mut late = EngineOptions::new(&settings, geometry, HostDevice::new(1).unwrap());
        late.reopen_every = Duration::from_millis(5);
        *engine = Arc::new(Engine::open_with(late).unwrap());
        let engine = Arc::clone(engine);
        assert_eq!(lookup.asked(), [0]);
        std::fs::create_dir_all(missing.parent().unwrap()).unwrap();
        while !engine.is_up() {
            std::thread::yield_now();
        }
        assert_eq!((lookup.asked(), lookup.stored_tokens("a", &prompt).unwrap()), (vec![], Some(0)));
    }
}
