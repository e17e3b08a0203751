//! The engine's own log under replay, with holes for payload: slots are taken, headers written, segments sealed and reclaimed
//! as in service, but no KV is written.
//!
//! A slot stands for a block of the trace and is small whatever the model; capacity scales with it, so that the log holds as
//! many tokens as were asked for. Nothing is ever loaded: the CRCs in the headers are those of no payload.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::format::layout::SlotLayout;
use forebay::geometry::{DType, Geometry, LayerSpec};
use forebay::key::ChunkKey;
use forebay::log::{Log, LogOptions, PutOutcome, PutSpec};
use forebay::{Error, ErrorKind, Result};

use super::{BLOCK_TOKENS, PolicyKind, ReplayCache, Request, Totals};
use crate::scratch::Scratch;

/// Bytes that stand for one token.
const TOKEN_BYTES: u32 = 8;
/// How long a put waits for reclaim.
const ROOM_PATIENCE: Duration = Duration::from_secs(5);

/// A log in a temporary directory.
pub(super) struct RealCache {
    log: Arc<Log>,
    admitted_tokens: u64,
    model_bytes_per_token: u64,
    _dir: Scratch,
}

impl RealCache {
    /// An empty log below `directory` for `capacity_tokens` tokens; writes are weighed by the model's bytes per token.
    pub(super) fn open(
        directory: &Path,
        policy: PolicyKind,
        capacity_tokens: u64,
        model_bytes_per_token: u64,
    ) -> Result<Self> {
        let layers = vec![LayerSpec::mla(&[TOKEN_BYTES])];
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
        options.policy = policy.name().to_owned();
        // A chunk is moved only if its payload is right, and there is none.
        options.reclaim_write_budget = 0.0;
        let log = Log::open(options)?;
        Ok(Self { log, admitted_tokens: 0, model_bytes_per_token: model_bytes_per_token.max(1), _dir: dir })
    }
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

impl ReplayCache for RealCache {
    fn request(&mut self, request: &Request) -> Result<u64> {
        let blocks: Vec<(u64, u64)> = request.blocks().collect();
        let keys: Vec<ChunkKey> = blocks.iter().map(|&(id, _)| key(id)).collect();
        let found = self.log.lookup(&keys);
        let (tx, rx) = crossbeam_channel::unbounded();
        for (i, &key) in keys.iter().enumerate().skip(found) {
            let parent = i.checked_sub(1).and_then(|p| keys.get(p)).copied().unwrap_or(ChunkKey([0; 32]));
            let tokens = blocks.get(i).map_or(0, |b| b.1);
            let mut spec = PutSpec::chunk(key, parent, BLOCK_TOKENS as u32, i as u32);
            spec.root = keys.first().copied();
            if let PutOutcome::Started(put) = self.log.begin_put_within(spec, ROOM_PATIENCE)? {
                let tx = tx.clone();
                put.commit(&[0], Box::new(move |result| drop(tx.send(result.map(|()| tokens)))));
            }
        }
        drop(tx);
        for result in rx {
            self.admitted_tokens += result?;
        }
        Ok(blocks.iter().take(found).map(|b| b.1).sum())
    }

    fn totals(&self) -> Totals {
        let stats = self.log.stats();
        let extra = (stats.moved_bytes + stats.journal_bytes_written) / self.model_bytes_per_token;
        Totals { admitted_tokens: self.admitted_tokens, written_tokens: self.admitted_tokens + extra }
    }
}

impl Drop for RealCache {
    fn drop(&mut self) {
        // The directory goes next, whatever the log could not finish.
        let _ = self.log.close(Instant::now() + Duration::from_secs(5));
    }
}
