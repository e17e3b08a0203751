//! What the demo works on: a small model, KV in shuffled blocks, and bytes that anybody can tell
//! from a chunk's key.
//!
//! Invariant: every stored byte is a function of chunk key, layer and offset, so that a later
//! process verifies what an earlier one stored without any help.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use forebay::config::{Capacity, EvictionPolicy, MinFree, OnOpenFailure, Settings};
use forebay::device::{HostDevice, HostMemory, PagedKv};
use forebay::engine::{Engine, Prompt};
use forebay::geometry::{DType, Geometry, LayerKind, LayerSpec};
use forebay::key::ChunkKey;
use forebay::paged::{KvLayout, KvShape, Packing, PagedLayout};
use forebay::{Error, ErrorKind, Result};

use crate::random::{Rng, bfloat16s, mix};
use crate::replay::Request;

/// Tokens of a chunk: the trace's blocks, so that one hash id is one chunk.
pub(super) const CHUNK_TOKENS: usize = 512;
/// Tokens of a block of the paged KV.
const BLOCK_TOKENS: usize = 16;
/// Layers of the demo's model.
pub(super) const LAYERS: usize = 16;
/// Bytes of K, and of V, of one token in one layer.
const ROW_BYTES: usize = 32;
/// Token ids are below this, as in a real vocabulary.
const VOCABULARY: u64 = 128_000;
/// Staging of loads: small, so that layers arrive one after another although the demo's extents are
/// small.
const STAGING_BYTES: usize = 2 << 20;

/// A model with the layers of a real one and heads small enough for a demo: 1 KiB per token.
pub(super) fn geometry() -> Result<Geometry> {
    let layer = LayerSpec::kv(LayerKind::Full, 1, ROW_BYTES as u32);
    Geometry::new("forebay-demo", DType::named("bfloat16")?, vec![layer; LAYERS], CHUNK_TOKENS as u32)
}

/// Opens the cache in `dir`.
pub(super) fn open_engine(dir: &Path, (capacity_bytes, policy): (u64, EvictionPolicy)) -> Result<Engine> {
    let mut settings = Settings::at(dir);
    settings.chunk_size = CHUNK_TOKENS as u32;
    settings.capacity = Capacity::Bytes(capacity_bytes);
    settings.min_free = MinFree::Bytes(64 << 20);
    settings.eviction_policy = policy;
    settings.use_layerwise = true.into();
    settings.staging = STAGING_BYTES;
    settings.store_staging = 64 << 20;
    settings.hugepages = false;
    settings.on_open_failure = OnOpenFailure::Fail;
    Engine::open(&settings, geometry()?, HostDevice::new(0)?)
}

/// The token ids of a request's full blocks: a function of the trace's hash ids, equal where they
/// are equal.
pub(super) fn token_ids(request: &Request) -> Vec<u32> {
    let full = request.blocks().filter(|(_, tokens)| *tokens == CHUNK_TOKENS as u64);
    let of_block = |(id, tokens): (u64, u64)| (0..tokens).map(move |i| (mix(mix(id) ^ i) % VOCABULARY) as u32);
    full.flat_map(of_block).collect()
}

/// Writes the bytes that layer `layer` of chunk `key` holds.
pub(super) fn pattern(key: &ChunkKey, layer: usize, out: &mut [u8]) {
    let first = key.0.first_chunk::<8>().copied().unwrap_or_default();
    let mut rng = Rng::new(u64::from_le_bytes(first) ^ mix(layer as u64 + 1));
    for word in out.chunks_mut(8) {
        let values = bfloat16s(rng.next_u64()).to_le_bytes();
        word.iter_mut().zip(values).for_each(|(to, from)| *to = from);
    }
}

/// The paged KV of a pretended server.
pub(super) struct Paged {
    /// As the engine sees it.
    pub(super) kv: Arc<PagedKv>,
    memories: Vec<Arc<HostMemory>>,
    blocks: Vec<u32>,
    rng: Rng,
}

/// What to do with the pieces of an extent.
enum Move<'a> {
    Write(&'a [u8]),
    Read(&'a mut [u8]),
}

impl Paged {
    /// Room for prompts of `tokens` tokens.
    pub(super) fn new(tokens: usize) -> Result<Self> {
        let blocks = tokens.div_ceil(BLOCK_TOKENS).max(1) as u32;
        let shape = KvShape {
            layout: KvLayout::Nhd,
            packing: Packing::Split,
            block_tokens: BLOCK_TOKENS as u32,
            num_blocks: blocks,
        };
        let (kv, memories) = PagedKv::alloc_zeroed(PagedLayout::per_layer(&geometry()?.layers, shape)?)?;
        Ok(Self { kv, memories, blocks: (0..blocks).collect(), rng: Rng::new(1) })
    }

    /// Deals the blocks anew, as a server that has run for long does, and returns the slots of the
    /// first `tokens` tokens.
    pub(super) fn shuffle(&mut self, tokens: usize) -> Vec<i64> {
        self.rng.shuffle(&mut self.blocks);
        let slot = |block: u32, i: usize| i64::from(block) * BLOCK_TOKENS as i64 + i as i64;
        self.blocks.iter().flat_map(|&b| (0..BLOCK_TOKENS).map(move |i| slot(b, i))).take(tokens).collect()
    }

    /// Visits the contiguous pieces of `layer` of the prompt's chunk `chunk`.
    fn each(&self, chunk: usize, layer: usize, mut what: Move<'_>) -> Result<()> {
        let short = || Error::new(ErrorKind::Internal, "the demo's KV is smaller than its prompt");
        let view = self.kv.layout().layer(layer).ok_or_else(short)?;
        let per_chunk = CHUNK_TOKENS / BLOCK_TOKENS;
        let blocks = self.blocks.get(chunk * per_chunk..(chunk + 1) * per_chunk).ok_or_else(short)?;
        let piece = BLOCK_TOKENS * ROW_BYTES;
        for (p, plane) in view.planes.iter().enumerate() {
            let memory = self.memories.get(plane.memory).ok_or_else(short)?;
            for (b, &block) in blocks.iter().enumerate() {
                let at = plane.offset + block as usize * plane.block_stride;
                let from = (p * per_chunk + b) * piece;
                match &mut what {
                    Move::Write(bytes) => memory.write(at, bytes.get(from..from + piece).ok_or_else(short)?)?,
                    Move::Read(bytes) => memory.read(at, bytes.get_mut(from..from + piece).ok_or_else(short)?)?,
                }
            }
        }
        Ok(())
    }

    /// "Computes" chunks of a prompt: writes the bytes that belong there.
    pub(super) fn compute(&self, prompt: &Prompt, chunks: Range<usize>) -> Result<()> {
        let mut extent = vec![0; extent_bytes()];
        for i in chunks {
            let Some(key) = prompt.keys().get(i) else { break };
            for layer in 0..LAYERS {
                pattern(key, layer, &mut extent);
                self.each(i, layer, Move::Write(&extent))?;
            }
        }
        Ok(())
    }

    /// Overwrites chunks, so that bytes left from before cannot pass for loaded ones.
    pub(super) fn poison(&self, chunks: Range<usize>) -> Result<()> {
        let extent = vec![0xa5; extent_bytes()];
        for i in chunks {
            (0..LAYERS).try_for_each(|layer| self.each(i, layer, Move::Write(&extent)))?;
        }
        Ok(())
    }

    /// Compares chunks with the bytes that belong there: bytes compared, bytes that differ.
    pub(super) fn verify(&self, prompt: &Prompt, chunks: Range<usize>) -> Result<(u64, u64)> {
        let (mut want, mut have) = (vec![0; extent_bytes()], vec![0; extent_bytes()]);
        let (mut bytes, mut wrong) = (0, 0);
        for i in chunks {
            let Some(key) = prompt.keys().get(i) else { break };
            for layer in 0..LAYERS {
                pattern(key, layer, &mut want);
                self.each(i, layer, Move::Read(&mut have))?;
                bytes += want.len() as u64;
                if want != have {
                    wrong += want.iter().zip(&have).filter(|(a, b)| a != b).count() as u64;
                }
            }
        }
        Ok((bytes, wrong))
    }
}

/// Bytes of one layer of a chunk.
const fn extent_bytes() -> usize {
    2 * CHUNK_TOKENS * ROW_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay::key::Extra;

    fn request(ids: &[u64], input_length: u64) -> Request {
        Request { timestamp: 0, input_length, output_length: 0, hash_ids: ids.to_vec() }
    }

    #[test]
    fn equal_hash_ids_give_equal_tokens_and_a_partial_block_none() {
        let a = token_ids(&request(&[1, 2, 3], 1030));
        let b = token_ids(&request(&[1, 2, 4], 1536));
        assert_eq!((a.len(), b.len()), (1024, 1536));
        assert_eq!(a, b[..1024]);
        assert_ne!(a[..512], a[512..]);
    }

    #[test]
    fn one_changed_byte_is_counted_wherever_its_block_lies() {
        let mut paged = Paged::new(1024).unwrap();
        let prompt = Prompt::new(&[7; 1024], CHUNK_TOKENS as u32, &Extra::default());
        let slots = paged.shuffle(1024);
        assert_eq!(slots.len(), 1024);
        assert_ne!(slots[..16], (0..16).collect::<Vec<i64>>());
        paged.compute(&prompt, 0..2).unwrap();
        assert_eq!(paged.verify(&prompt, 0..2).unwrap(), (2 * 16 * extent_bytes() as u64, 0));
        let mut byte = [0];
        paged.memories[5].read(777, &mut byte).unwrap();
        paged.memories[5].write(777, &[byte[0] ^ 1]).unwrap();
        assert_eq!(paged.verify(&prompt, 0..2).unwrap().1, 1);
        paged.poison(0..1).unwrap();
        assert!(paged.verify(&prompt, 0..1).unwrap().1 > extent_bytes() as u64);
    }
}
