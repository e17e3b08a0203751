//! The cache as a [`Sink`]: pieces go through the engine as a server's KV would.
//!
//! A piece is laid into a small paged KV of its own (one block, which holds a chunk) and stored
//! from there; several are under way at once, and the engine's staging makes the import wait. With
//! `verify` each piece is loaded back as soon as it is stored and compared byte for byte, also
//! where the cache had it already.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use forebay::config::{Admission, OnOpenFailure, Settings};
use forebay::device::{HostDevice, HostMemory, PagedKv};
use forebay::engine::{Backpressure, Engine, LoadRequest, Prompt, Store, StoreRequest};
use forebay::geometry::{DType, Geometry};
use forebay::key::{ChunkKey, Extra};
use forebay::paged::{KvLayout, KvShape, Packing, PagedLayout};
use forebay::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use super::dump::DumpInfo;
use super::piece::Piece;
use super::sink::{Imported, Scope, Sink};

/// Pieces that are being stored at once.
const UNDER_WAY: usize = 8;
/// How long closing may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where the model's shape comes from.
#[derive(Clone, Debug)]
pub(super) enum Model {
    /// Known beforehand; dumps must fit it.
    Known(Box<Geometry>),
    /// The first dump's shape under this name.
    Named(String),
}

impl Model {
    /// The shape, where it is known before any dump.
    pub(super) fn geometry(&self) -> Option<&Geometry> {
        match self {
            Self::Known(geometry) => Some(geometry),
            Self::Named(_) => None,
        }
    }
}

/// A cache under import.
pub(super) struct CacheSink {
    settings: Settings,
    model: Model,
    verify: bool,
    engine: OnceLock<Engine>,
    /// Held while it is opened; why it does not open.
    opening: Mutex<Option<Error>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    free: Vec<KvMemory>,
    under_way: VecDeque<UnderWay>,
    done: Imported,
    /// Keys of the chunks stored.
    stored: Vec<ChunkKey>,
}

/// Paged KV for one piece.
struct KvMemory {
    kv: Arc<PagedKv>,
    memories: Vec<Arc<HostMemory>>,
}

struct UnderWay {
    store: Store,
    place: KvMemory,
    prompt: Prompt,
    piece: Piece,
}

impl CacheSink {
    /// A cache as `settings` say; it is opened when the first dump is known.
    pub(super) fn new(mut settings: Settings, model: Model, verify: bool) -> Self {
        settings.on_open_failure = OnOpenFailure::Fail;
        // An import stores everything, whatever the server's admission is.
        (settings.admission, settings.write_budget_dwpd) = (Admission::All, None);
        let (engine, opening, state) = (OnceLock::new(), Mutex::default(), Mutex::default());
        Self { settings, model, verify, engine, opening, state }
    }

    /// The engine, opened for the shape of `dump` where nothing else says one.
    fn engine_for(&self, dump: &DumpInfo) -> Result<&Engine> {
        let mut refusal = self.opening.lock();
        if let Some(engine) = self.engine.get() {
            return Ok(engine);
        }
        let refused = || Err(Error::new(ErrorKind::Closed, "the cache does not open"));
        if refusal.is_some() {
            return refused();
        }
        let geometry = match &self.model {
            Model::Known(geometry) => (**geometry).clone(),
            Model::Named(name) => {
                let layers = dump.layers.iter().map(|l| l.spec.clone()).collect();
                Geometry::new(name, DType::named(&dump.dtype)?, layers, self.settings.chunk_size)?
            }
        };
        dump.check(&geometry)?;
        match Engine::open(&self.settings, geometry, HostDevice::new(0)?) {
            Ok(engine) => Ok(self.engine.get_or_init(|| engine)),
            Err(e) => {
                *refusal = Some(e);
                refused()
            }
        }
    }

    fn opened(&self) -> Result<&Engine> {
        self.engine.get().ok_or_else(|| Error::new(ErrorKind::Internal, "a piece of a dump that was never asked for"))
    }

    /// Waits for the oldest store, compares it where that is wanted, and frees its memory.
    fn retire(&self, engine: &Engine, state: &mut State) -> Result<()> {
        let Some(UnderWay { store, place, prompt, piece }) = state.under_way.pop_front() else { return Ok(()) };
        let result = store.wait();
        state.done.stored_chunks += result.stored as u64;
        state.done.stored_bytes += result.bytes;
        if result.sheds.is_empty() {
            state.stored.extend(keys(&prompt, &piece.tokens));
        }
        for (cause, chunks) in &result.sheds {
            state.done.shed_chunks += *chunks as u64;
            *state.done.sheds.entry(cause.as_str()).or_default() += *chunks as u64;
        }
        if self.verify && result.sheds.is_empty() {
            place.fill(|_, bytes| vec![0xa5; bytes])?;
            let mut request = LoadRequest::new(&prompt, &place.kv, slots(&piece.tokens));
            request.layerwise = Some(false);
            let loaded = engine.load(request)?.wait();
            if loaded.tokens < piece.tokens.end {
                state.done.lost_chunks += 1;
            } else {
                state.done.verified_bytes += piece.bytes();
                state.done.wrong_bytes += place.wrong(&piece)?;
            }
        }
        state.free.push(place);
        Ok(())
    }
}

/// The mapping of a prompt of which only `tokens` lie in memory, from slot 0 on.
fn slots(tokens: &Range<usize>) -> Vec<i64> {
    let skipped = std::iter::repeat_n(-1, tokens.start);
    skipped.chain((0..tokens.len()).map(|slot| slot as i64)).collect()
}

/// The keys of the chunks of `tokens`, with which the prompt ends.
fn keys(prompt: &Prompt, tokens: &Range<usize>) -> Vec<ChunkKey> {
    let full = prompt.keys();
    let step = prompt.chunk_tokens();
    let tail = prompt.partial_key(full.len(), tokens.end - full.len() * step);
    full.iter().skip(tokens.start / step).copied().chain(tail).collect()
}

/// What besides the tokens decides the keys.
fn extra(dump: &DumpInfo) -> Extra {
    Extra { cache_salt: dump.metadata.get("cache_salt").cloned(), ..Extra::default() }
}

impl KvMemory {
    fn new(geometry: &Geometry) -> Result<Self> {
        let shape = KvShape {
            layout: KvLayout::Nhd,
            packing: Packing::Split,
            block_tokens: geometry.chunk_tokens,
            num_blocks: 1,
        };
        let (kv, memories) = PagedKv::alloc_zeroed(PagedLayout::per_layer(&geometry.layers, shape)?)?;
        Ok(Self { kv, memories })
    }

    /// Writes every memory with what `bytes` gives for its number and size.
    fn fill(&self, bytes: impl Fn(usize, usize) -> Vec<u8>) -> Result<()> {
        let sizes = self.kv.layout().memory_bytes().iter();
        self.memories.iter().zip(sizes).enumerate().try_for_each(|(i, (m, &size))| m.write(0, &bytes(i, size)))
    }

    /// Visits the planes of `piece`: the memory that each belongs in, and its bytes.
    fn planes<'a>(&'a self, piece: &'a Piece) -> impl Iterator<Item = (&'a Arc<HostMemory>, &'a [u8])> {
        let tokens = piece.tokens.len();
        piece.layers.iter().enumerate().flat_map(move |(l, extent)| {
            let planes = self.kv.spec(l).map(|s| s.planes.as_slice()).unwrap_or_default();
            let views = self.kv.layout().layer(l).map(|v| v.planes.as_slice()).unwrap_or_default();
            let mut rest = extent.as_slice();
            planes.iter().zip(views).filter_map(move |(spec, view)| {
                let (plane, after) = rest.split_at_checked(tokens * spec.token_bytes())?;
                rest = after;
                Some((self.memories.get(view.memory)?, plane))
            })
        })
    }

    fn lay(&self, piece: &Piece) -> Result<()> {
        self.planes(piece).try_for_each(|(memory, plane)| memory.write(0, plane))
    }

    /// Bytes that differ from `piece`.
    fn wrong(&self, piece: &Piece) -> Result<u64> {
        let mut wrong = 0;
        for (memory, plane) in self.planes(piece) {
            let mut have = vec![0; plane.len()];
            memory.read(0, &mut have)?;
            wrong += have.iter().zip(plane).filter(|(a, b)| a != b).count() as u64;
        }
        Ok(wrong)
    }
}

impl Sink for CacheSink {
    fn chunk_tokens(&self) -> usize {
        self.settings.chunk_size as usize
    }

    fn missing(&self, dump: &DumpInfo) -> Result<Vec<Range<usize>>> {
        let engine = self.engine_for(dump)?;
        dump.check(engine.geometry())?;
        let all = dump.tokens.len();
        let closed = || Error::new(ErrorKind::Closed, "the cache has been closed");
        let log = engine.log().ok_or_else(closed)?;
        let prompt = engine.prompt(&dump.tokens, &extra(dump));
        let step = self.chunk_tokens();
        let full = prompt.keys().iter().enumerate().filter(|(_, key)| !log.contains(key));
        let mut missing: Vec<Range<usize>> = full.map(|(i, _)| i * step..(i + 1) * step).collect();
        let tail = prompt.keys().len() * step..all;
        if prompt.partial_key(prompt.keys().len(), tail.len()).is_some_and(|key| !log.contains(&key)) {
            missing.push(tail);
        }
        Ok(missing)
    }

    fn scope(&self) -> Scope {
        if self.verify { Scope::All } else { Scope::Missing }
    }

    fn store(&self, piece: Piece) -> Result<()> {
        let engine = self.opened()?;
        let mut state = self.state.lock();
        if state.under_way.len() >= UNDER_WAY {
            self.retire(engine, &mut state)?;
        }
        let place = match state.free.pop() {
            Some(place) => place,
            None => KvMemory::new(engine.geometry())?,
        };
        place.lay(&piece)?;
        let tokens = piece.dump.tokens.get(..piece.tokens.end).unwrap_or_default();
        let prompt = engine.prompt(tokens, &extra(&piece.dump));
        let mut request = StoreRequest::new(&prompt, &place.kv, slots(&piece.tokens));
        request.backpressure = Backpressure::Wait;
        request.save_unfull = Some(true);
        request.layerwise = Some(false);
        let store = engine.store(request)?;
        store.all_layers();
        state.under_way.push_back(UnderWay { store, place, prompt, piece });
        Ok(())
    }

    fn finish(&self) -> Result<Imported> {
        // That is wrong with no dump.
        if let Some(refusal) = self.opening.lock().take() {
            return Err(refusal);
        }
        let mut state = self.state.lock();
        if let Some(engine) = self.engine.get() {
            while !state.under_way.is_empty() {
                self.retire(engine, &mut state)?;
            }
            engine.flush()?;
            if let Some(log) = engine.log() {
                state.done.evicted_chunks = state.stored.iter().filter(|key| !log.contains(key)).count() as u64;
            }
            engine.close(Instant::now() + PATIENCE)?;
        }
        Ok(std::mem::take(&mut state.done))
    }
}
