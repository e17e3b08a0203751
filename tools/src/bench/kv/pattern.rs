//! The bytes of the benchmark's KV: a pure function of prompt, layer, plane and token, so that
//! another process can check them. They are like those of bfloat16 KV in one thing: nearly all
//! values have one of few exponents.
//!
//! A row is what one token has in one plane, or one block of an opaque layer. Rows go through the
//! paged view, block table and all; layout and block size do not change them.

use std::sync::Arc;

use forebay::Result;
use forebay::device::{HostMemory, PagedKv};
use forebay::geometry::LayerKind;
use forebay::io::MemorySpace;

use crate::random::{STEP, bfloat16s};

/// Bytes that are copied at once between the host's and another memory.
const PIECE: usize = 8 << 20;

/// Sees a row, or a head's part of one: its memory, its offset there, the bytes that belong there.
type Visit<'a> = dyn FnMut(&HostMemory, usize, &[u8]) -> Result<()> + 'a;

/// KV memory with a block table.
pub(super) struct Kv {
    /// As the engine sees it.
    pub(super) paged: Arc<PagedKv>,
    /// The memory where it is the host's, else a copy of it, through which patterns are laid out
    /// and checked.
    memories: Vec<Arc<HostMemory>>,
    /// Slot of each token.
    pub(super) slots: Arc<[i64]>,
    block_tokens: usize,
}

impl Kv {
    /// Joins memory and the mapping of its prompt's tokens.
    pub(super) fn new(
        (paged, memories): (Arc<PagedKv>, Vec<Arc<HostMemory>>),
        slots: Arc<[i64]>,
        block_tokens: u32,
    ) -> Self {
        Self { paged, memories, slots, block_tokens: block_tokens as usize }
    }

    /// Whether the memory that the engine sees is not the host's.
    fn is_apart(&self) -> bool {
        self.paged.place() != MemorySpace::Host
    }

    /// Copies the host's copy into the engine's memory, or back.
    fn exchange(&self, into: bool) -> Result<()> {
        let mut piece = vec![0u8; PIECE];
        for (mine, other) in self.memories.iter().zip(self.paged.memories()) {
            let bytes = memory_len(mine);
            for at in (0..bytes).step_by(PIECE) {
                let part = piece.get_mut(..PIECE.min(bytes - at)).unwrap_or_default();
                if into {
                    mine.read(at, part)?;
                    other.write_at(at, part)?;
                } else {
                    other.read_at(at, part)?;
                    mine.write(at, part)?;
                }
            }
        }
        Ok(())
    }

    /// Makes the memory resident, as a server's is.
    pub(super) fn touch(&self) -> Result<()> {
        let zeros = vec![0u8; 1 << 20];
        for memory in &self.memories {
            let bytes = memory_len(memory);
            let mut at = 0;
            while at < bytes {
                let n = zeros.len().min(bytes - at);
                memory.write(at, zeros.get(..n).unwrap_or_default())?;
                at += n;
            }
        }
        if self.is_apart() { self.exchange(true) } else { Ok(()) }
    }

    /// Lays the pattern of `prompt` out.
    pub(super) fn fill(&self, prompt: u64) -> Result<()> {
        self.for_each_row(self.slots.len(), prompt, &mut |memory, at, row| memory.write(at, row))?;
        if self.is_apart() { self.exchange(true) } else { Ok(()) }
    }

    /// Bytes of the first `tokens` tokens that are not the pattern of `prompt`.
    pub(super) fn wrong_bytes(&self, tokens: usize, prompt: u64) -> Result<u64> {
        if self.is_apart() {
            self.exchange(false)?;
        }
        let (mut wrong, mut found) = (0u64, Vec::new());
        self.for_each_row(tokens, prompt, &mut |memory, at, row| {
            found.resize(row.len(), 0);
            memory.read(at, &mut found)?;
            if found != row {
                wrong += found.iter().zip(row).filter(|(a, b)| a != b).count() as u64;
            }
            Ok(())
        })?;
        Ok(wrong)
    }

    fn for_each_row(&self, tokens: usize, prompt: u64, visit: &mut Visit<'_>) -> Result<()> {
        let layout = self.paged.layout();
        let mut row = Vec::new();
        for l in 0..layout.num_layers() {
            let (Some(spec), Some(view)) = (layout.spec(l), layout.layer(l)) else { continue };
            let opaque = match spec.kind {
                LayerKind::Opaque { block_bytes, .. } => Some(block_bytes as usize),
                _ => None,
            };
            for (p, plane) in view.planes.iter().enumerate() {
                let Some(memory) = self.memories.get(plane.memory) else { continue };
                let dims = spec.planes.get(p).map_or((1, 0), |d| (d.heads as usize, d.head_bytes as usize));
                let (heads, head_bytes) = opaque.map_or(dims, |bytes| (1, bytes));
                // Heads that lie side by side are one piece.
                let dense = heads == 1 || plane.head_stride == head_bytes;
                let piece = if dense { heads * head_bytes } else { head_bytes };
                let step = if opaque.is_some() { self.block_tokens } else { 1 };
                for (token, &slot) in self.slots.iter().enumerate().take(tokens).step_by(step) {
                    fill_row(&mut row, heads * head_bytes, seed(prompt, (l * 8 + p) as u64, token as u64));
                    let slot = slot.max(0) as usize;
                    let at = plane.offset
                        + slot / self.block_tokens * plane.block_stride
                        + slot % self.block_tokens * plane.token_stride;
                    for (head, bytes) in row.chunks(piece.max(1)).enumerate() {
                        visit(memory, at + head * plane.head_stride, bytes)?;
                    }
                }
            }
        }
        Ok(())
    }
}

fn memory_len(memory: &HostMemory) -> usize {
    forebay::device::KvMemory::len(memory)
}

/// Mixes where a row belongs into where its sequence starts.
fn seed(prompt: u64, plane: u64, token: u64) -> u64 {
    let mut x = (prompt.wrapping_add(1)).wrapping_mul(STEP) ^ plane.wrapping_mul(0xd6e8_feb8_6659_fd93) ^ token << 24;
    x = (x ^ x >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ x >> 29
}

fn fill_row(row: &mut Vec<u8>, len: usize, seed: u64) {
    row.resize(len, 0);
    let mut word = seed;
    let mut words = row.chunks_exact_mut(8);
    for bytes in &mut words {
        // One word in 4096 is left as it is, with whatever exponents it has.
        let values = if word >> 52 == 0 { word } else { bfloat16s(word) };
        bytes.copy_from_slice(&values.to_le_bytes());
        word = word.wrapping_add(STEP);
    }
    for (byte, value) in words.into_remainder().iter_mut().zip(word.to_le_bytes()) {
        *byte = value;
    }
}
