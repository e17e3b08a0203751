//! Rotary re-rotation of keys in paged KV: what a chunk that is reused at other positions needs.
//!
//! A [`RopeShift`] is checked against the paged KV once; the host's loops here and the kernel in
//! `kernels/rope.cu` then do the same arithmetic, bit for bit. The angle comes from the server's
//! own cosines and sines; a scale in them (YaRN) cancels.
//!
//! Must not: touch keys of tokens that the plan does not map, or read beyond the table.
#![expect(unsafe_code, reason = "turns keys in the caller's paged KV")]

use std::ptr::copy_nonoverlapping;
use std::sync::Arc;

use super::floats::FloatKind;
use super::{KvMemory, PagedKv};
use crate::error::{Error, ErrorKind, Result};
use crate::io::MemorySpace;
use crate::paged::{ChunkPlan, PlaneView};

/// Which elements of a head are turned together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Element `i` of the first half of the rotary part with element `i` of the second half.
    Neox,
    /// Neighbours.
    GptJ,
}

/// A server's table `[positions][rotary_dim]`: per position the cosines of all pairs, then their
/// sines.
pub struct RopeTable {
    memory: Arc<dyn KvMemory>,
    offset: usize,
    positions: usize,
    rotary_dim: usize,
    kind: FloatKind,
}

/// Turns the keys of one layer's plane, for the tokens of one chunk, from their old positions to
/// new ones.
#[derive(Clone)]
pub struct RopeShift {
    /// Layer, an index into the paged KV's layers.
    pub layer: usize,
    /// Plane of the layer that holds keys.
    pub plane: usize,
    /// Slots of the chunk's tokens; no slot twice.
    pub plan: Arc<ChunkPlan>,
    /// Position of each token of the plan for which its keys are rotated now.
    pub old_positions: Arc<[i64]>,
    /// Position of each token for which they shall be.
    pub new_positions: Arc<[i64]>,
    /// Which elements are turned together.
    pub style: RopeStyle,
    /// Element type of the keys.
    pub kind: FloatKind,
    /// Cosines and sines.
    pub table: Arc<RopeTable>,
}

/// A shift whose every address has been checked.
pub(super) struct Rows<'a> {
    pub(super) shift: &'a RopeShift,
    /// Address of block 0, token 0, head 0.
    pub(super) base: *mut u8,
    /// Address of the table.
    pub(super) table: *mut u8,
    pub(super) view: PlaneView,
    pub(super) heads: usize,
    /// Pairs of one head.
    pub(super) half: usize,
}

/// An element type that the compiler knows.
trait Element {
    const KIND: FloatKind;
}

struct F32;
struct F16;
struct Bf16;

impl Element for F32 {
    const KIND: FloatKind = FloatKind::F32;
}

impl Element for F16 {
    const KIND: FloatKind = FloatKind::F16;
}

impl Element for Bf16 {
    const KIND: FloatKind = FloatKind::Bf16;
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("rotary shift: {what}"))
}

/// The turn from one position to another, for one pair: cosine and sine from (cosine, sine) of
/// either.
fn turn((c0, s0): (f32, f32), (c1, s1): (f32, f32)) -> (f32, f32) {
    let norm = c0 * c0 + s0 * s0;
    ((c0 * c1 + s0 * s1) / norm, (c0 * s1 - s0 * c1) / norm)
}

impl RopeTable {
    /// A table of `positions` rows of `rotary_dim` elements from `offset` bytes into `memory`,
    /// which must lie where the keys do.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where the rows are not inside the memory or not aligned to their
    /// elements, or where `rotary_dim` is odd or zero.
    pub fn new(
        memory: Arc<dyn KvMemory>,
        offset: usize,
        positions: usize,
        rotary_dim: usize,
        kind: FloatKind,
    ) -> Result<Arc<Self>> {
        let bytes = positions.checked_mul(rotary_dim).and_then(|n| n.checked_mul(kind.bytes()));
        if bytes.and_then(|b| b.checked_add(offset)).is_none_or(|end| end > memory.len()) {
            return Err(invalid(format!(
                "a table of {positions} x {rotary_dim} {kind:?} at {offset} in a memory of {} bytes",
                memory.len()
            )));
        }
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
            return Err(invalid(format!("a table of {rotary_dim} elements a row, which are not pairs")));
        }
        if !(memory.as_mut_ptr() as usize + offset).is_multiple_of(kind.bytes()) {
            return Err(invalid(format!("a table of {kind:?} that is not aligned to its elements")));
        }
        Ok(Arc::new(Self { memory, offset, positions, rotary_dim, kind }))
    }

    /// Element type.
    pub(super) fn kind(&self) -> FloatKind {
        self.kind
    }
}

impl RopeShift {
    /// Checks the shift against the paged KV.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a layer, plane or plan that does not suit the paged KV, for
    /// other than one old and one new position per token, for a position of a mapped token
    /// beyond the table, and for a table that is wider than a head or lies elsewhere than the
    /// keys.
    pub(super) fn rows<'a>(&'a self, kv: &PagedKv) -> Result<Rows<'a>> {
        let bad = |what: String| invalid(format!("layer {}: {what}", self.layer));
        let (Some(spec), Some(view)) = (kv.layout().spec(self.layer), kv.layout().layer(self.layer)) else {
            return Err(bad(format!("the paged KV has {} layers", kv.layout().num_layers())));
        };
        let (Some(dims), Some(plane)) = (spec.planes.get(self.plane), view.planes.get(self.plane)) else {
            return Err(bad(format!("no plane {} of keys in a layer of kind {:?}", self.plane, spec.kind)));
        };
        if self.plan.block_tokens() != view.block_tokens || self.plan.num_blocks() > view.num_blocks {
            return Err(bad("a plan for other blocks than the layer has".to_owned()));
        }
        let (element, table) = (self.kind.bytes(), &*self.table);
        let strides = [plane.block_stride, plane.token_stride, plane.head_stride, dims.head_bytes as usize];
        let memory = kv.memories().get(plane.memory).ok_or_else(|| bad("a memory is missing".to_owned()))?;
        let base = memory.as_mut_ptr().wrapping_add(plane.offset);
        if table.rotary_dim > dims.head_bytes as usize / element
            || strides.iter().any(|s| !s.is_multiple_of(element))
            || !(base as usize).is_multiple_of(element)
        {
            return Err(bad(format!(
                "{} rotary elements of {:?} in heads of {} bytes with strides {strides:?}",
                table.rotary_dim, self.kind, dims.head_bytes
            )));
        }
        if table.memory.place() != kv.place() {
            return Err(bad(format!("a table in {:?} for keys in {:?}", table.memory.place(), kv.place())));
        }
        self.check_positions().map_err(bad)?;
        let table_ptr = table.memory.as_mut_ptr().wrapping_add(table.offset);
        Ok(Rows {
            shift: self,
            base,
            table: table_ptr,
            view: *plane,
            heads: dims.heads as usize,
            half: table.rotary_dim / 2,
        })
    }

    fn check_positions(&self) -> Result<(), String> {
        for positions in [&self.old_positions, &self.new_positions] {
            if positions.len() != self.plan.chunk_tokens() {
                return Err(format!("{} positions for {} tokens", positions.len(), self.plan.chunk_tokens()));
            }
            let mapped = self.plan.runs().iter().flat_map(|r| r.token..r.token + r.len);
            for (token, position) in mapped.filter_map(|t| Some((t, *positions.get(t as usize)?))) {
                if usize::try_from(position).ok().is_none_or(|p| p >= self.table.positions) {
                    return Err(format!(
                        "position {position} of token {token} is not among the {} of the table",
                        self.table.positions
                    ));
                }
            }
        }
        Ok(())
    }
}

impl Rows<'_> {
    /// Turns the keys on the calling thread.
    ///
    /// # Safety
    /// Keys and table must lie in host memory, and nobody else may use the keys meanwhile.
    pub(super) unsafe fn turn_on_host(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.shift.kind {
                FloatKind::F32 => self.turn_elements::<F32>(),
                FloatKind::F16 => self.turn_elements::<F16>(),
                FloatKind::Bf16 => self.turn_elements::<Bf16>(),
            }
        }
    }

    /// [`Self::turn_on_host`] of one element type: of a size that is not known, every element would
    /// be moved by a call.
    ///
    /// # Safety
    /// As of [`Self::turn_on_host`]; the keys are of type `E`.
    unsafe fn turn_elements<E: Element>(&self) {
        let shift = self.shift;
        let block_tokens = u64::from(shift.plan.block_tokens());
        // The turn of each pair, alike in all heads of a token.
        let mut turns = Vec::with_capacity(self.half);
        for run in shift.plan.runs() {
            for (token, slot) in (run.token as usize..).zip(run.slot..run.slot + u64::from(run.len)) {
                let position = |of: &[i64]| of.get(token).map_or(0, |p| *p as usize);
                let (from, to) = (position(&shift.old_positions), position(&shift.new_positions));
                if from == to {
                    continue;
                }
                turns.clear();
                // SAFETY: positions were checked against the table, which the shift holds.
                turns.extend((0..self.half).map(|pair| unsafe { turn(self.angle(from, pair), self.angle(to, pair)) }));
                let place = (slot / block_tokens) as usize * self.view.block_stride
                    + (slot % block_tokens) as usize * self.view.token_stride;
                for head in 0..self.heads {
                    let key = self.base.wrapping_add(place + head * self.view.head_stride);
                    for (pair, &(cosine, sine)) in turns.iter().enumerate() {
                        let (first, second) = match shift.style {
                            RopeStyle::Neox => (pair, self.half + pair),
                            RopeStyle::GptJ => (2 * pair, 2 * pair + 1),
                        };
                        // SAFETY: the slot lies in a block of the layout, the pair in the head:
                        // `rows` compared them; that nobody else uses it is the caller's promise.
                        unsafe {
                            let (x, y) = (read(key, first, E::KIND), read(key, second, E::KIND));
                            write(key, first, E::KIND, x * cosine - y * sine);
                            write(key, second, E::KIND, y * cosine + x * sine);
                        }
                    }
                }
            }
        }
    }

    /// Cosine and sine of one pair at one position.
    ///
    /// # Safety
    /// The position must be in the table, and the table in host memory.
    unsafe fn angle(&self, position: usize, pair: usize) -> (f32, f32) {
        let (row, kind) = (position * 2 * self.half, self.shift.table.kind);
        // SAFETY: the caller's promise.
        unsafe { (read(self.table, row + pair, kind), read(self.table, row + self.half + pair, kind)) }
    }
}

/// # Safety
/// Element `index` from `base` on must be readable.
#[inline]
unsafe fn read(base: *const u8, index: usize, kind: FloatKind) -> f32 {
    let mut bits = [0; 4];
    // SAFETY: the caller's promise; an element has at most four bytes.
    unsafe { copy_nonoverlapping(base.wrapping_add(index * kind.bytes()), bits.as_mut_ptr(), kind.bytes()) };
    kind.decode(u32::from_le_bytes(bits))
}

/// # Safety
/// Element `index` from `base` on must be writable.
#[inline]
unsafe fn write(base: *mut u8, index: usize, kind: FloatKind, value: f32) {
    let bits = kind.encode(value).to_le_bytes();
    // SAFETY: the caller's promise; an element has at most four bytes.
    unsafe { copy_nonoverlapping(bits.as_ptr(), base.wrapping_add(index * kind.bytes()), kind.bytes()) };
}

/// Turns keys in host memory, on the calling thread; what a GPU device does by its kernel.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] where the shift does not suit the paged KV (the message says how),
/// or lies in device memory.
pub(super) fn shift_on_host(kv: &PagedKv, shift: &RopeShift) -> Result<()> {
    let rows = shift.rows(kv)?;
    if kv.place() != MemorySpace::Host {
        return Err(invalid(format!("the host device cannot turn keys in {:?}", kv.place())));
    }
    // SAFETY: the place is the host, also the table's, which `rows` compared; what others do with
    // the slots meanwhile is excluded by whoever hands out slots, as for scatters.
    unsafe { rows.turn_on_host() };
    Ok(())
}
