//! The engine's own log under replay, with holes for payload: slots are taken, headers written,
//! segments sealed and reclaimed as in service, but no KV is written.
//!
//! A slot stands for a block of the trace and is small whatever the model; capacity scales with it,
//! so that the log holds as many tokens as were asked for, in segments of as many slots as with the
//! model's bytes. The payload is a hole, and the CRCs in the headers are those of zeros, so that
//! reclaim can move what it keeps.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::device::{HugePages, StagingOptions};
use forebay::format::crc;
use forebay::format::layout::{Extent, SlotLayout};
use forebay::geometry::{DType, Geometry, LayerSpec};
use forebay::index::{AdmissionPolicy, Reclaim};
use forebay::key::ChunkKey;
use forebay::log::{Log, LogOptions, Put, PutOutcome, PutSpec, StoreCandidate};
use forebay::tier::{FrameId, MemoryTier, PutId, Rank};
use forebay::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use super::chunks::Offer;
use super::{BLOCK_TOKENS, PolicyKind, ReplayCache, Request, Totals};
use crate::cli::word;
use crate::scratch::Scratch;

/// The bytes that stand for one token are a multiple of this; with one, a block is a page.
const TOKEN_BYTES: u64 = 8;
/// Most pages of a block.
const MOST_PAGES: u64 = 127;
/// Largest segment that the log makes by itself, in bytes of the model.
const SEGMENT_BYTES: u64 = 1 << 30;
/// Least slots of a segment, and least segments: with fewer, none may become free in time.
const LEAST_SLOTS: u64 = 4;
const LEAST_SEGMENTS: u64 = 8;
/// Tokens below which a log cannot work.
pub(super) const LEAST_TOKENS: u64 = LEAST_SEGMENTS * LEAST_SLOTS * BLOCK_TOKENS;
/// Bytes that stand for a block in the memory tier.
const FRAME_BYTES: usize = 4096;
/// How long a put waits for reclaim.
const ROOM_PATIENCE: Duration = Duration::from_secs(5);

/// A log in a temporary directory.
pub(super) struct RealCache {
    log: Arc<Log>,
    options: LogOptions,
    /// Requests between two restarts, and those since the last.
    restarts: (Option<usize>, usize),
    /// Counters of the logs before the last restart: bytes that reclaim moved, and bytes written of
    /// the journal and of the policy's state.
    earlier: (u64, u64),
    offer: Offer,
    admitted_tokens: u64,
    model_bytes_per_token: u64,
    slot_bytes: u64,
    /// The engine's memory tier, and the tokens that were found in it.
    memory: Option<Arc<MemoryTier>>,
    memory_tokens: u64,
    _dir: Scratch,
}

/// The engine's policy of that name.
fn reclaim_of(policy: PolicyKind) -> Result<Reclaim> {
    Ok(match policy {
        PolicyKind::Lru => Reclaim::Lru,
        PolicyKind::Fifo => Reclaim::Fifo,
        PolicyKind::Prefix => Reclaim::Prefix,
        other => {
            return Err(Error::new(ErrorKind::Config, format!("the engine has no policy {:?}", word(other)))
                .advice("use prefix, lru or fifo, or --engine sim"));
        }
    })
}

impl RealCache {
    /// An empty log of about `most_bytes` below `directory` for `capacity_tokens` tokens; writes
    /// are weighed by the model's bytes per token.
    pub(super) fn open(
        (directory, most_bytes): (&Path, u64),
        (policy, admission, offer): (PolicyKind, AdmissionPolicy, Offer),
        (capacity_tokens, model_bytes_per_token): (u64, u64),
    ) -> Result<Self> {
        let pages = most_bytes / capacity_tokens.saturating_mul(TOKEN_BYTES).max(1);
        let token_bytes = (pages.clamp(1, MOST_PAGES) * TOKEN_BYTES) as u32;
        let layers = vec![LayerSpec::mla(&[token_bytes])];
        let geometry = Geometry::new("forebay-replay", DType::named("uint8")?, layers, BLOCK_TOKENS as u32)?;
        let slot_bytes = u64::from(SlotLayout::of_chunk(&geometry, BLOCK_TOKENS as u32).pages()) * 4096;
        let capacity_bytes =
            (capacity_tokens / BLOCK_TOKENS).checked_mul(slot_bytes).filter(|_| capacity_tokens != u64::MAX);
        let capacity_bytes = capacity_bytes.ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, "the engine needs a capacity")
                .advice("use --engine sim for `unlimited`")
        })?;
        let dir = Scratch::new(directory, "forebay-replay-")?;
        let mut options = LogOptions::new(dir.path(), Arc::new(geometry));
        options.capacity_bytes = capacity_bytes;
        options.policy = reclaim_of(policy)?;
        options.admission = admission;
        options.segment_bytes = Some(segment_bytes(slot_bytes, (capacity_tokens, model_bytes_per_token)));
        options.reclaim_write_budget = 0.1;
        let log = Log::open(options.clone())?;
        let model_bytes_per_token = model_bytes_per_token.max(1);
        let (restarts, earlier) = ((None, 0), (0, 0));
        Ok(Self {
            log,
            options,
            restarts,
            earlier,
            offer,
            admitted_tokens: 0,
            model_bytes_per_token,
            slot_bytes,
            memory: None,
            memory_tokens: 0,
            _dir: dir,
        })
    }

    /// The same, with the engine's memory tier for so many tokens.
    pub(super) fn with_memory(mut self, tokens: u64) -> Result<Self> {
        let frames = usize::try_from(tokens / BLOCK_TOKENS).unwrap_or(usize::MAX);
        if frames > 0 {
            let bytes = frames.saturating_mul(FRAME_BYTES);
            let options = StagingOptions { bytes, slot_bytes: FRAME_BYTES, hugepages: HugePages::Off, numa: None };
            self.memory = Some(MemoryTier::new(&options)?);
        }
        Ok(self)
    }

    /// What the engine's loads and stores do with the memory tier: the chunks that were `found`,
    /// then those `stored`, each lot in a turn of its own.
    fn use_memory(&mut self, blocks: &Blocks, (found, stored): (usize, &[usize])) {
        let Some(tier) = &self.memory else { return };
        let id = |at: usize| {
            let key = *blocks.keys.get(at)?;
            let there = self.log.peek(&key)?;
            Some(FrameId { key, put: PutId { drive: self.log.drive_id(there.drive), sequence: there.sequence } })
        };
        let (loads, stores) = (tier.turn(), tier.turn());
        let rank = |turn: u64, at: usize| Rank { turn, depth: Reverse(at as u32) };
        let mut missing = Vec::new();
        for at in 0..found {
            let Some(id) = id(at) else { continue };
            match tier.get(id, rank(loads, at), Instant::now()) {
                Some(_) => self.memory_tokens += blocks.tokens.get(at).copied().unwrap_or(0),
                None => missing.push((id, rank(loads, at))),
            }
        }
        let stored = stored.iter().filter_map(|at| Some((id(*at)?, rank(stores, *at))));
        for (id, rank) in missing.into_iter().chain(stored) {
            if let Some(filling) = tier.reserve(id, FRAME_BYTES as u64, rank) {
                filling.publish(&[]);
            }
        }
    }

    /// The same, closed and opened anew after every so many requests.
    pub(super) fn with_restarts(mut self, every: Option<usize>) -> Self {
        self.restarts.0 = every;
        self
    }

    fn restart(&mut self) -> Result<()> {
        self.log.close(Instant::now() + Duration::from_secs(30))?;
        let stats = self.log.stats();
        self.earlier.0 += stats.moved_bytes;
        self.earlier.1 += stats.journal_bytes_written + stats.policy_bytes_written;
        self.log = Log::open(self.options.clone())?;
        self.restarts.1 = 0;
        Ok(())
    }
}

/// The CRC of so many zeros.
fn zero_crc(len: u32) -> u32 {
    static KNOWN: Mutex<BTreeMap<u32, u32>> = Mutex::new(BTreeMap::new());
    *KNOWN.lock().entry(len).or_insert_with(|| crc(&vec![0; len as usize]))
}

/// A segment of as many slots as the log would give it with the model's bytes.
fn segment_bytes(slot_bytes: u64, (capacity_tokens, model_bytes_per_token): (u64, u64)) -> u64 {
    let model_slot = model_bytes_per_token.max(1).saturating_mul(BLOCK_TOKENS);
    let wanted = (capacity_tokens.saturating_mul(model_bytes_per_token) / 64).min(SEGMENT_BYTES);
    let slots =
        (wanted / model_slot).clamp(LEAST_SLOTS, (capacity_tokens / BLOCK_TOKENS / LEAST_SEGMENTS).max(LEAST_SLOTS));
    slots * slot_bytes
}

fn key(id: u64) -> ChunkKey {
    let mut key = [0; 32];
    for (i, part) in key.chunks_mut(8).enumerate() {
        // Keys are taken to be hashes: the index spreads by their bits.
        let x = (id ^ ((i as u64) << 56)).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        part.iter_mut().zip((x ^ (x >> 31)).to_le_bytes()).for_each(|(to, from)| *to = from);
    }
    ChunkKey(key)
}

/// A request's blocks as the log knows them.
pub(super) struct Blocks {
    keys: Vec<ChunkKey>,
    tokens: Vec<u64>,
    /// Tokens that were generated for the prompt, where that is known when they are offered.
    generated: Option<u32>,
}

impl Blocks {
    /// Those of a request's prompt.
    pub(super) fn of(request: &Request, offer: Offer) -> Self {
        let (keys, tokens) = request.blocks().map(|(id, tokens)| (key(id), tokens)).unzip();
        Self { keys, tokens, generated: offer.generated(request) }
    }

    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    pub(super) fn keys(&self) -> &[ChunkKey] {
        &self.keys
    }

    /// Tokens of the first `count` blocks.
    pub(super) fn tokens(&self, count: usize) -> u64 {
        self.tokens.iter().take(count).sum()
    }
}

/// Answers of puts that were committed: the tokens that can be found now.
pub(super) type Answers = crossbeam_channel::Receiver<Result<u64>>;

impl RealCache {
    /// Blocks that can be found, from the start of the prompt.
    pub(super) fn find(&self, keys: &[ChunkKey]) -> usize {
        self.log.lookup(keys)
    }

    /// Notes that the prompt's blocks before `found` were used. Returns the end of those after it
    /// that are to be stored.
    pub(super) fn wanted(&self, blocks: &Blocks, found: usize) -> usize {
        self.log.note_used(blocks.keys.get(..found).unwrap_or_default());
        let parent = |at: usize| at.checked_sub(1).and_then(|p| blocks.keys.get(p)).copied();
        let candidate = |(at, (key, tokens)): (usize, (&ChunkKey, &u64))| StoreCandidate {
            key: *key,
            parent: parent(at).unwrap_or(ChunkKey([0; 32])),
            tokens: (*tokens).clamp(1, BLOCK_TOKENS) as u32,
            depth: at as u32,
            generated: blocks.generated,
        };
        let all = blocks.keys.iter().zip(&blocks.tokens).enumerate();
        let rest: Vec<StoreCandidate> = all.skip(found).map(candidate).collect();
        let admitted = self.log.admit(&rest);
        self.log.note_brought(rest.get(..admitted).unwrap_or_default());
        found + admitted
    }

    /// A slot for block `at`, with its tokens; `None` where it is stored already, or cannot be.
    pub(super) fn begin(&self, blocks: &Blocks, at: usize) -> Result<Option<(Put, u64)>> {
        let Some(&key) = blocks.keys.get(at) else { return Ok(None) };
        let parent = at.checked_sub(1).and_then(|p| blocks.keys.get(p)).copied().unwrap_or(ChunkKey([0; 32]));
        let tokens = blocks.tokens.get(at).copied().unwrap_or(0);
        let mut spec = PutSpec::chunk(key, parent, tokens.clamp(1, BLOCK_TOKENS) as u32, at as u32);
        spec.root = blocks.keys.first().copied();
        let begun = self.log.begin_put_within(spec, ROOM_PATIENCE).map_err(|e| match e.kind() {
            ErrorKind::NoSpace if e.advice_text().is_none() => {
                e.advice("give more to --capacity-tokens; with --ranks or --behind the longest prompt must fit")
            }
            _ => e,
        });
        Ok(match begun? {
            PutOutcome::Started(put) => Some((put, tokens)),
            PutOutcome::AlreadyThere | PutOutcome::NotAdmitted(..) | PutOutcome::NoRoom(_) | PutOutcome::Leaving(_) => {
                None
            }
        })
    }

    /// Publishes a block; the answer comes over `answers`.
    pub(super) fn commit(put: Put, tokens: u64, answers: &crossbeam_channel::Sender<Result<u64>>) {
        let answers = answers.clone();
        let zeros = |extent: &Extent| zero_crc(extent.len);
        let crcs: Vec<u32> = put.layout().extents.iter().map(zeros).collect();
        put.commit(&crcs, Box::new(move |result| drop(answers.send(result.map(|_| tokens)))));
    }

    /// Waits for the answers, until nobody can send one any more.
    pub(super) fn admit(&mut self, answers: &Answers) -> Result<()> {
        for result in answers {
            self.admitted_tokens += result?;
        }
        Ok(())
    }
}

impl ReplayCache for RealCache {
    fn request(&mut self, request: &Request) -> Result<u64> {
        if self.restarts.0.is_some_and(|every| self.restarts.1 >= every) {
            self.restart()?;
        }
        self.restarts.1 += 1;
        let blocks = Blocks::of(request, self.offer);
        let found = self.find(blocks.keys());
        let (tx, rx) = crossbeam_channel::unbounded();
        let mut stored = Vec::new();
        for at in found..self.wanted(&blocks, found) {
            if let Some((put, tokens)) = self.begin(&blocks, at)? {
                stored.push(at);
                Self::commit(put, tokens, &tx);
            }
        }
        drop(tx);
        self.admit(&rx)?;
        self.use_memory(&blocks, (found, &stored));
        Ok(blocks.tokens(found))
    }

    fn totals(&self) -> Totals {
        let stats = self.log.stats();
        // Moved bytes are those of this log's small slots, each of which stands for a block.
        // Records are as large as in service.
        let (moved, journal) = (
            self.earlier.0 + stats.moved_bytes,
            self.earlier.1 + stats.journal_bytes_written + stats.policy_bytes_written,
        );
        let moved_tokens = moved.saturating_mul(BLOCK_TOKENS) / self.slot_bytes;
        let extra = moved_tokens + journal / self.model_bytes_per_token;
        Totals {
            admitted_tokens: self.admitted_tokens,
            written_tokens: self.admitted_tokens + extra,
            memory_tokens: self.memory_tokens,
            remote_tokens: 0,
        }
    }
}

impl Drop for RealCache {
    fn drop(&mut self) {
        // The directory goes next, whatever the log could not finish.
        let _ = self.log.close(Instant::now() + Duration::from_secs(5));
    }
}
