//! The working part of the demo, in processes of their own: one that serves the trace and is
//! killed, one that opens what it left and checks it.

use std::path::Path;
use std::time::{Duration, Instant};

use forebay::config::EvictionPolicy;
use forebay::engine::{Backpressure, Engine, EngineStats, LoadRequest, LoadTicket, Prompt, StoreRequest};
use forebay::key::Extra;
use forebay::{Error, ErrorKind, Result};
use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};

use super::drive::Gauge;
use super::world::{CHUNK_TOKENS, LAYERS, Paged, open_engine, token_ids};
use crate::replay::Request;

/// The lease of a hit.
const LEASE_MS: u64 = 30_000;
/// Loads of at least this many chunks are timed a second time, with computing.
const OVERLAP_CHUNKS: usize = 4;
/// What the reopened cache loads of what survived, in bytes at most.
const CHECK_BYTES: u64 = 512 << 20;
/// Reclaim comes to rest in this time.
const REST: Duration = Duration::from_secs(30);

/// What the trace met, and what was moved and compared.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Served {
    /// Requests served.
    pub(super) requests: usize,
    /// Tokens that they asked for.
    pub(super) asked_tokens: u64,
    /// Tokens of them found as a usable prefix.
    pub(super) hit_tokens: u64,
    /// Loads timed without computing.
    pub(super) loads: usize,
    /// Bytes of these loads.
    pub(super) loaded_bytes: u64,
    /// Seconds that these loads took.
    pub(super) load_s: f64,
    /// Bytes of those of them that were long enough to keep the drive busy.
    pub(super) long_bytes: u64,
    /// Seconds that these took.
    pub(super) long_s: f64,
    /// Bytes stored.
    pub(super) stored_bytes: u64,
    /// Seconds that stores took.
    pub(super) store_s: f64,
    /// Loads timed with computing.
    pub(super) overlapped_loads: usize,
    /// What such loads take at best: the longer of load and compute, and one layer of the shorter.
    pub(super) overlap_best_s: f64,
    /// What they took.
    pub(super) overlap_wall_s: f64,
    /// Bytes compared after loads.
    pub(super) verified_bytes: u64,
    /// Bytes of them that differed.
    pub(super) wrong_bytes: u64,
    /// Tokens that the lookup found and the load did not bring.
    pub(super) lost_tokens: u64,
    /// Chunks that could not be stored.
    pub(super) shed_chunks: u64,
    /// Chunks evicted to make room.
    pub(super) evicted_chunks: u64,
    /// Chunks in the cache at the end.
    pub(super) held_chunks: u64,
    /// Chunks stored.
    pub(super) stored_chunks: u64,
    /// Bytes written to the drive per byte stored.
    pub(super) write_amplification: f64,
    /// Tokens of the requests served that the cache holds at the end.
    pub(super) held_tokens: u64,
}

/// What is there after the kill.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Survived {
    /// Milliseconds from opening to the first answer.
    pub(super) reopen_ms: f64,
    /// Tokens of the same requests that the reopened cache holds.
    pub(super) held_tokens: u64,
    /// Bytes loaded from it and compared.
    pub(super) verified_bytes: u64,
    /// Bytes of them that differed.
    pub(super) wrong_bytes: u64,
    /// Tokens that the lookup found and the load did not bring.
    pub(super) lost_tokens: u64,
}

/// How the demo is run.
pub(super) struct Work<'a> {
    pub(super) dir: &'a Path,
    pub(super) capacity_bytes: u64,
    pub(super) policy: EvictionPolicy,
    pub(super) requests: &'a [Request],
    pub(super) time_limit: Duration,
}

/// What one load did.
struct Loaded {
    tokens: usize,
    wall: Duration,
    computing: Duration,
    ticket: LoadTicket,
}

/// An engine with a pretended server on top.
struct Server {
    engine: Engine,
    paged: Paged,
    overlap: bool,
    served: Served,
}

impl Work<'_> {
    fn server(&self, overlap: bool) -> Result<Server> {
        let longest = self.requests.iter().map(|r| r.input_length as usize).max().unwrap_or(0);
        let engine = open_engine(self.dir, (self.capacity_bytes, self.policy))?;
        let paged = Paged::new(longest)?;
        Ok(Server { engine, paged, overlap, served: Served::default() })
    }

    /// Serves the trace and flushes. The engine is returned open: it is to be killed so.
    pub(super) fn serve(&self, gauge: &mut Gauge, bar: &ProgressBar) -> Result<(Served, Engine)> {
        let mut server = self.server(true)?;
        let started = Instant::now();
        for request in self.requests {
            if started.elapsed() >= self.time_limit {
                break;
            }
            gauge.read_now_and_then()?;
            server.serve(request)?;
            bar.inc(1);
        }
        server.engine.flush()?;
        let stats = at_rest(&server.engine)?;
        let mut served = server.served;
        for request in self.requests.iter().take(served.requests) {
            let prompt = server.engine.prompt(&token_ids(request), &Extra::default());
            served.held_tokens += server.engine.lookup(&prompt, 0)?.matched_tokens as u64;
        }
        served.write_amplification = stats.write_amplification();
        served.stored_chunks = stats.stored_chunks;
        served.evicted_chunks = stats.log.evicted;
        served.held_chunks = stats.log.chunks;
        Ok((served, server.engine))
    }

    /// Opens what a killed process left; looks up the first `served` requests again and loads some.
    pub(super) fn check(&self, served: usize, bar: &ProgressBar) -> Result<Survived> {
        let started = Instant::now();
        let mut server = self.server(false)?;
        let mut survived = Survived::default();
        let prompts = self.requests.iter().take(served).map(token_ids);
        let prompts: Vec<Prompt> = prompts.map(|t| server.engine.prompt(&t, &Extra::default())).collect();
        for (i, prompt) in prompts.iter().enumerate() {
            survived.held_tokens += server.engine.lookup(prompt, 0)?.matched_tokens as u64;
            if i == 0 {
                survived.reopen_ms = started.elapsed().as_secs_f64() * 1e3;
            }
        }
        for prompt in prompts.iter().rev() {
            bar.inc(1);
            if server.served.verified_bytes < CHECK_BYTES {
                let slots = server.paged.shuffle(prompt.len());
                server.load(prompt, &slots)?;
            }
        }
        survived.verified_bytes = server.served.verified_bytes;
        survived.wrong_bytes = server.served.wrong_bytes;
        survived.lost_tokens = server.served.lost_tokens;
        server.engine.close(Instant::now() + Duration::from_secs(10))?;
        Ok(survived)
    }
}

/// Waits until reclaim has made the room that the last stores need, and returns the counters.
/// Chunks that it evicted only after the held tokens were counted would look lost.
fn at_rest(engine: &Engine) -> Result<EngineStats> {
    let log = engine.log().ok_or_else(|| Error::new(ErrorKind::Closed, "the cache is not open"))?;
    log.at_rest(Instant::now() + REST)?;
    engine.stats()
}

impl Server {
    /// Serves one request: its prefix from the cache, the rest computed and stored.
    fn serve(&mut self, request: &Request) -> Result<()> {
        let prompt = self.engine.prompt(&token_ids(request), &Extra::default());
        let slots = self.paged.shuffle(prompt.len());
        let (found, ticket) = self.load(&prompt, &slots)?;
        self.served.requests += 1;
        self.served.asked_tokens += request.input_length;
        self.served.hit_tokens += found as u64;
        let chunks = found / CHUNK_TOKENS..prompt.keys().len();
        if chunks.is_empty() {
            return Ok(());
        }
        self.paged.compute(&prompt, chunks)?;
        let started = Instant::now();
        let mut request = StoreRequest::new(&prompt, &self.paged.kv, slots);
        request.backpressure = Backpressure::Wait;
        request.depends_on = ticket.into_iter().collect();
        let store = self.engine.store(request)?;
        (0..LAYERS).try_for_each(|layer| store.layer(layer))?;
        let result = store.wait();
        self.served.store_s += started.elapsed().as_secs_f64();
        self.served.stored_bytes += result.bytes;
        self.served.shed_chunks += result.sheds.iter().map(|(_, n)| *n as u64).sum::<u64>();
        Ok(())
    }

    /// Loads and compares what the cache has of `prompt`; returns the tokens loaded.
    fn load(&mut self, prompt: &Prompt, slots: &[i64]) -> Result<(usize, Option<LoadTicket>)> {
        let hit = self.engine.lookup(prompt, LEASE_MS)?;
        if hit.matched_tokens == 0 {
            return Ok((0, None));
        }
        let alone = self.load_once(prompt, (slots, hit.matched_tokens), Duration::ZERO)?;
        let mut tokens = alone.tokens;
        let bytes = (tokens / CHUNK_TOKENS * self.engine.geometry().chunk_bytes(CHUNK_TOKENS)) as u64;
        self.served.loads += 1;
        self.served.loaded_bytes += bytes;
        self.served.load_s += alone.wall.as_secs_f64();
        if tokens >= OVERLAP_CHUNKS * CHUNK_TOKENS && self.overlap {
            self.served.long_bytes += bytes;
            self.served.long_s += alone.wall.as_secs_f64();
            // Attention that takes as long as the load is the hardest case to overlap.
            let both = self.load_once(prompt, (slots, tokens), alone.wall / LAYERS as u32)?;
            tokens = tokens.min(both.tokens);
            let (load, computing) = (alone.wall.as_secs_f64(), both.computing.as_secs_f64());
            self.served.overlapped_loads += 1;
            self.served.overlap_best_s += load.max(computing) + load.min(computing) / LAYERS as f64;
            self.served.overlap_wall_s += both.wall.as_secs_f64();
        }
        Ok((tokens, Some(alone.ticket)))
    }

    /// One layer-wise load into poisoned blocks, with a pause after each layer, and the comparison
    /// of all its bytes.
    fn load_once(&mut self, prompt: &Prompt, (slots, wanted): (&[i64], usize), compute: Duration) -> Result<Loaded> {
        self.paged.poison(0..wanted / CHUNK_TOKENS)?;
        let mapped = slots.get(..wanted).ok_or_else(|| Error::new(ErrorKind::Internal, "more found than asked"))?;
        let request = LoadRequest::new(prompt, &self.paged.kv, mapped.to_vec());
        let started = Instant::now();
        let load = self.engine.load(request)?;
        let mut computing = Duration::ZERO;
        for layer in 0..load.layers() {
            load.wait_layer(layer)?;
            if !compute.is_zero() {
                let ready = Instant::now();
                std::thread::sleep(compute);
                computing += ready.elapsed();
            }
        }
        let result = load.wait();
        let wall = started.elapsed();
        let (bytes, wrong) = self.paged.verify(prompt, 0..result.tokens / CHUNK_TOKENS)?;
        self.served.verified_bytes += bytes;
        self.served.wrong_bytes += wrong;
        self.served.lost_tokens += (wanted - result.tokens) as u64;
        Ok(Loaded { tokens: result.tokens, wall, computing, ticket: load.ticket() })
    }
}
