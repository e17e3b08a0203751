//! Rotary re-rotation of keys in paged KV: what a chunk that is reused at other positions needs.
//!
//! A [`RopeShift`] is checked against the paged KV once; the host's loops here and the kernel in
//! `kernels/rope.cu` then do the same arithmetic, bit for bit. The angle comes from the server's
//! own cosines and sines; a scale in them (YaRN) cancels.
//!
//! Must not: touch keys of tokens that the plan does not map, or read beyond the table.
#![expect(unsafe_code, reason = "turns keys in the caller's paged KV")]

use std::slice::{from_raw_parts, from_raw_parts_mut};
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

/// PairTurns the keys of one layer's plane, for the tokens of one chunk, from their old positions to
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
    /// The bytes of an element, which need no alignment.
    type Bytes: Copy;

    fn load(bytes: Self::Bytes) -> f32;
    fn store(value: f32) -> Self::Bytes;
}

struct F32;
struct F16;
struct Bf16;

impl Element for F32 {
    type Bytes = [u8; 4];

    fn load(bytes: [u8; 4]) -> f32 {
        f32::from_le_bytes(bytes)
    }

    fn store(value: f32) -> [u8; 4] {
        value.to_le_bytes()
    }
}

impl Element for F16 {
    type Bytes = [u8; 2];

    fn load(bytes: [u8; 2]) -> f32 {
        FloatKind::F16.decode(u32::from(u16::from_le_bytes(bytes)))
    }

    fn store(value: f32) -> [u8; 2] {
        (FloatKind::F16.encode(value) as u16).to_le_bytes()
    }
}

impl Element for Bf16 {
    type Bytes = [u8; 2];

    fn load(bytes: [u8; 2]) -> f32 {
        FloatKind::Bf16.decode(u32::from(u16::from_le_bytes(bytes)))
    }

    fn store(value: f32) -> [u8; 2] {
        (FloatKind::Bf16.encode(value) as u16).to_le_bytes()
    }
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("rotary shift: {what}"))
}

/// The turns of one token, pair by pair, alike in all of its heads.
struct PairTurns {
    /// Cosines, then sines, of its old position and of its new one.
    rows: [Vec<f32>; 2],
    cosines: Vec<f32>,
    sines: Vec<f32>,
}

impl PairTurns {
    fn new(half: usize) -> Self {
        let zeros = |count| vec![0.0; count];
        Self { rows: [zeros(2 * half), zeros(2 * half)], cosines: zeros(half), sines: zeros(half) }
    }

    /// Makes them of the rows.
    #[inline(always)]
    fn make(&mut self) {
        let half = self.cosines.len();
        let [(c0, s0), (c1, s1)] = self.rows.each_ref().map(|row| row.split_at(half));
        let rows = c0.iter().zip(s0).zip(c1.iter().zip(s1));
        for (((&c0, &s0), (&c1, &s1)), (cosine, sine)) in rows.zip(self.cosines.iter_mut().zip(&mut self.sines)) {
            let norm = c0 * c0 + s0 * s0;
            (*cosine, *sine) = ((c0 * c1 + s0 * s1) / norm, (c0 * s1 - s0 * c1) / norm);
        }
    }

    fn of_pairs(&self) -> impl Iterator<Item = (f32, f32)> {
        self.cosines.iter().copied().zip(self.sines.iter().copied())
    }
}

/// PairTurns one pair.
#[inline(always)]
fn turn_pair<E: Element>(first: &mut E::Bytes, second: &mut E::Bytes, (cosine, sine): (f32, f32)) {
    let (x, y) = (E::load(*first), E::load(*second));
    *first = E::store(x * cosine - y * sine);
    *second = E::store(y * cosine + x * sine);
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
    /// PairTurns the keys on the calling thread.
    ///
    /// # Safety
    /// Keys and table must lie in host memory, and nobody else may use the keys meanwhile.
    pub(super) unsafe fn turn_on_host(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.shift.kind {
                FloatKind::F32 => self.turn_by_processor::<F32>(),
                FloatKind::F16 => self.turn_by_processor::<F16>(),
                FloatKind::Bf16 => self.turn_by_processor::<Bf16>(),
            }
        }
    }

    /// With vectors as wide as the processor has; all give the same bits.
    ///
    /// # Safety
    /// As of [`Self::turn_on_host`]; the keys are of type `E`.
    unsafe fn turn_by_processor<E: Element>(&self) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has it; the rest is the caller's promise.
            return unsafe { self.turn_with_avx2::<E>() };
        }
        // SAFETY: the caller's promise.
        unsafe { self.turn_elements::<E>() }
    }

    /// # Safety
    /// As of [`Self::turn_elements`], on a processor with AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn turn_with_avx2<E: Element>(&self) {
        // SAFETY: the caller's promise.
        unsafe { self.turn_elements::<E>() }
    }

    /// # Safety
    /// As of [`Self::turn_on_host`]; the keys are of type `E`.
    #[inline(always)]
    unsafe fn turn_elements<E: Element>(&self) {
        let (shift, half) = (self.shift, self.half);
        let block_tokens = u64::from(shift.plan.block_tokens());
        let mut turns = PairTurns::new(half);
        for run in shift.plan.runs() {
            for (token, slot) in (run.token as usize..).zip(run.slot..run.slot + u64::from(run.len)) {
                let position = |of: &[i64]| of.get(token).map_or(0, |p| *p as usize);
                let positions = [position(&shift.old_positions), position(&shift.new_positions)];
                if positions[0] == positions[1] {
                    continue;
                }
                for (row, position) in turns.rows.iter_mut().zip(positions) {
                    // SAFETY: positions were checked against the table, which the shift holds.
                    unsafe { self.read_row(position, row) };
                }
                turns.make();
                let place = (slot / block_tokens) as usize * self.view.block_stride
                    + (slot % block_tokens) as usize * self.view.token_stride;
                for head in 0..self.heads {
                    let key = self.base.wrapping_add(place + head * self.view.head_stride);
                    // SAFETY: the slot lies in a block of the layout, the pairs in the head: `rows`
                    // compared them; that nobody else uses it is the caller's promise. The halves do
                    // not overlap, and bytes have no alignment.
                    unsafe {
                        match shift.style {
                            RopeStyle::Neox => {
                                let first = key.cast::<E::Bytes>();
                                let (first, second) = (
                                    from_raw_parts_mut(first, half),
                                    from_raw_parts_mut(first.wrapping_add(half), half),
                                );
                                let pairs = first.iter_mut().zip(second).zip(turns.of_pairs());
                                pairs.for_each(|((first, second), by)| turn_pair::<E>(first, second, by));
                            }
                            RopeStyle::GptJ => {
                                let pairs = from_raw_parts_mut(key.cast::<[E::Bytes; 2]>(), half);
                                let pairs = pairs.iter_mut().zip(turns.of_pairs());
                                pairs.for_each(|([first, second], by)| turn_pair::<E>(first, second, by));
                            }
                        }
                    }
                }
            }
        }
    }

    /// Cosines, then sines, of one position.
    ///
    /// # Safety
    /// The position must be in the table, and the table in host memory.
    #[inline(always)]
    unsafe fn read_row(&self, position: usize, row: &mut [f32]) {
        let kind = self.shift.table.kind;
        let base = self.table.wrapping_add(position * row.len() * kind.bytes());
        // SAFETY: the caller's promise.
        unsafe {
            match kind {
                FloatKind::F32 => read_elements::<F32>(base, row),
                FloatKind::F16 => read_elements::<F16>(base, row),
                FloatKind::Bf16 => read_elements::<Bf16>(base, row),
            }
        }
    }
}

/// # Safety
/// So many elements of type `E` must be readable from `base` on.
#[inline(always)]
unsafe fn read_elements<E: Element>(base: *const u8, to: &mut [f32]) {
    // SAFETY: the caller's promise; bytes have no alignment.
    let elements = unsafe { from_raw_parts(base.cast::<E::Bytes>(), to.len()) };
    to.iter_mut().zip(elements).for_each(|(to, bytes)| *to = E::load(*bytes));
}

/// PairTurns keys in host memory, on the calling thread; what a GPU device does by its kernel.
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
