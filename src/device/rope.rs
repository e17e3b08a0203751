//! Rotary re-rotation of keys in paged KV: what a chunk that is reused at other positions needs.
//!
//! A [`RopeShift`] is checked against the paged KV once; the host's loops here and the kernel in
//! `kernels/rope.cu` then do the same arithmetic, bit for bit. The angle comes from the server's
//! own cosines and sines; a scale in them (YaRN) cancels.
//!
//! Must not: touch keys of tokens that the plan does not map, or read beyond the table.
#![expect(unsafe_code, reason = "turns keys in the caller's paged KV")]

use std::ops::Range;
use std::slice::{from_raw_parts, from_raw_parts_mut};
use std::sync::Arc;

use super::floats::FloatKind;
use super::{KvMemory, PagedKv};
use crate::error::{Error, ErrorKind, Result};
use crate::io::MemorySpace;
use crate::paged::{ChunkPlan, PlaneView};

/// Which elements of a head are rotated as a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Element `i` of the first half of the rotary part with element `i` of the second half.
    Neox,
    /// Elements `2 i` and `2 i + 1`.
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

/// Rotates the keys of one layer's plane, for the tokens of one chunk, from their old positions to
/// new ones.
#[derive(Clone)]
pub struct RopeShift {
    /// Layer, an index into the paged KV's layers.
    pub layer: usize,
    /// Plane of the layer that holds keys.
    pub plane: usize,
    /// Slots of the chunk's tokens; no slot twice.
    pub plan: Arc<ChunkPlan>,
    /// For each token of the plan the position for which its keys are rotated now.
    pub old_positions: Arc<[i64]>,
    /// For each token the position for which its keys shall be rotated.
    pub new_positions: Arc<[i64]>,
    /// Which elements of a head are rotated as a pair.
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

/// Tokens whose turns are computed at a time. Turns are the same in all layers, and stay in the
/// core's cache while one layer after another is turned.
const WINDOW_TOKENS: usize = 256;

/// Cosines and sines by which the keys of a window of tokens are turned, for each pair; the same in
/// all heads and layers.
struct PairTurns {
    half: usize,
    /// First token of the window.
    first: usize,
    /// Rows of the table, cosines and then sines: for a token's old position and its new one.
    rows: [Vec<f32>; 2],
    /// For each token those of all pairs.
    cosines: Vec<f32>,
    sines: Vec<f32>,
}

impl PairTurns {
    fn new(half: usize) -> Self {
        let zeros = |count| vec![0.0; count];
        let (rows, all) = ([zeros(2 * half), zeros(2 * half)], WINDOW_TOKENS * half);
        Self { half, first: 0, rows, cosines: zeros(all), sines: zeros(all) }
    }

    /// Computes the turns of a window.
    ///
    /// # Safety
    /// The table must lie in host memory.
    unsafe fn make(&mut self, of: &Rows<'_>, window: Range<usize>) {
        self.first = window.start;
        for (token, _) in mapped(of.shift, window) {
            let [old, new] = of.shift.positions(token);
            if old == new {
                continue;
            }
            for (row, position) in self.rows.iter_mut().zip([old, new]) {
                // SAFETY: positions were checked against the table, which the shift keeps; the
                // caller promises that it lies in host memory.
                unsafe { of.read_row(position, row) };
            }
            let [(c0, s0), (c1, s1)] = self.rows.each_ref().map(|row| row.split_at(self.half));
            let at = (token - self.first) * self.half;
            let to = self.cosines.iter_mut().zip(&mut self.sines).skip(at);
            for (((&c0, &s0), (&c1, &s1)), (cosine, sine)) in c0.iter().zip(s0).zip(c1.iter().zip(s1)).zip(to) {
                let norm = c0 * c0 + s0 * s0;
                (*cosine, *sine) = ((c0 * c1 + s0 * s1) / norm, (c0 * s1 - s0 * c1) / norm);
            }
        }
    }

    /// Cosines and sines of one token.
    #[inline(always)]
    fn of(&self, token: usize) -> (&[f32], &[f32]) {
        let at = (token - self.first) * self.half;
        let of_token = at..at + self.half;
        (self.cosines.get(of_token.clone()).unwrap_or_default(), self.sines.get(of_token).unwrap_or_default())
    }
}

/// The tokens in a window that have a slot, with their slots.
#[inline(always)]
fn mapped(shift: &RopeShift, window: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    let runs = shift.plan.runs();
    let first = runs.partition_point(|run| (run.token + run.len) as usize <= window.start);
    let runs = runs.get(first..).unwrap_or_default().iter();
    let tokens = runs.flat_map(|run| (run.token as usize..).zip(run.slot..run.slot + u64::from(run.len)));
    tokens.skip_while(move |(token, _)| *token < window.start).take_while(move |(token, _)| *token < window.end)
}

/// Pairs that are loaded, turned and stored together: the compiler does not know that the halves do
/// not overlap, so it makes no vectors of a loop over single pairs.
const LANES: usize = 16;

/// Turns the pairs of the elements of two halves.
#[inline(always)]
fn turn_halves<E: Element>(first: &mut [E::Bytes], second: &mut [E::Bytes], (cosines, sines): (&[f32], &[f32])) {
    let ((first, first_rest), (second, second_rest)) =
        (first.as_chunks_mut::<LANES>(), second.as_chunks_mut::<LANES>());
    let ((cosines, cosines_rest), (sines, sines_rest)) = (cosines.as_chunks::<LANES>(), sines.as_chunks::<LANES>());
    for ((first, second), (&cosines, &sines)) in first.iter_mut().zip(second).zip(cosines.iter().zip(sines)) {
        let (x, y) = (first.map(E::load), second.map(E::load));
        let parts = || x.into_iter().zip(y).zip(cosines.into_iter().zip(sines));
        for (to, ((x, y), by)) in first.iter_mut().zip(parts()) {
            *to = E::store(turned(x, y, by).0);
        }
        for (to, ((x, y), by)) in second.iter_mut().zip(parts()) {
            *to = E::store(turned(x, y, by).1);
        }
    }
    let rest = first_rest.iter_mut().zip(second_rest).zip(cosines_rest.iter().zip(sines_rest));
    rest.for_each(|((first, second), (&cosine, &sine))| turn_pair::<E>(first, second, (cosine, sine)));
}

/// Turns pairs of neighbouring elements.
#[inline(always)]
fn turn_neighbours<E: Element>(pairs: &mut [[E::Bytes; 2]], (cosines, sines): (&[f32], &[f32])) {
    let pairs = pairs.iter_mut().zip(cosines.iter().zip(sines));
    pairs.for_each(|([first, second], (&cosine, &sine))| turn_pair::<E>(first, second, (cosine, sine)));
}

/// A pair, turned.
#[inline(always)]
fn turned(x: f32, y: f32, (cosine, sine): (f32, f32)) -> (f32, f32) {
    (x * cosine - y * sine, y * cosine + x * sine)
}

/// Turns one pair.
#[inline(always)]
fn turn_pair<E: Element>(first: &mut E::Bytes, second: &mut E::Bytes, by: (f32, f32)) {
    let (x, y) = turned(E::load(*first), E::load(*second), by);
    (*first, *second) = (E::store(x), E::store(y));
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

    /// Old and new position of a token.
    #[inline(always)]
    fn positions(&self, token: usize) -> [usize; 2] {
        [&self.old_positions, &self.new_positions].map(|of| of.get(token).map_or(0, |p| *p as usize))
    }

    /// Whether `other` turns each token by the same angles. Their layers may differ.
    fn turns_like(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.plan, &other.plan)
            && Arc::ptr_eq(&self.old_positions, &other.old_positions)
            && Arc::ptr_eq(&self.new_positions, &other.new_positions)
            && Arc::ptr_eq(&self.table, &other.table)
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
    /// Turns the keys of a window of tokens on the calling thread.
    ///
    /// # Safety
    /// Keys must lie in host memory, and nobody else may use them meanwhile; `turns` are those of
    /// this window.
    unsafe fn turn(&self, turns: &PairTurns, window: Range<usize>) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.shift.kind {
                FloatKind::F32 => self.turn_by_processor::<F32>(turns, window),
                FloatKind::F16 => self.turn_by_processor::<F16>(turns, window),
                FloatKind::Bf16 => self.turn_by_processor::<Bf16>(turns, window),
            }
        }
    }

    /// [`Self::turn`] with the widest vectors that the processor has; all give the same bits.
    ///
    /// # Safety
    /// As of [`Self::turn`]; the keys are of type `E`.
    unsafe fn turn_by_processor<E: Element>(&self, turns: &PairTurns, window: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") {
            // SAFETY: the processor has it; the rest is the caller's promise.
            return unsafe { self.turn_with_avx512::<E>(turns, window) };
        }
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has it; the rest is the caller's promise.
            return unsafe { self.turn_with_avx2::<E>(turns, window) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.turn_elements::<E>(turns, window) }
    }

    /// # Safety
    /// As [`Self::turn_elements`], on a processor with these.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn turn_with_avx512<E: Element>(&self, turns: &PairTurns, window: Range<usize>) {
        // SAFETY: the caller's promise.
        unsafe { self.turn_elements::<E>(turns, window) }
    }

    /// # Safety
    /// As [`Self::turn_elements`], on a processor with AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn turn_with_avx2<E: Element>(&self, turns: &PairTurns, window: Range<usize>) {
        // SAFETY: the caller's promise.
        unsafe { self.turn_elements::<E>(turns, window) }
    }

    /// # Safety
    /// As of [`Self::turn`]; the keys are of type `E`.
    #[inline(always)]
    unsafe fn turn_elements<E: Element>(&self, turns: &PairTurns, window: Range<usize>) {
        let (shift, half) = (self.shift, self.half);
        let block_tokens = u64::from(shift.plan.block_tokens());
        for (token, slot) in mapped(shift, window) {
            let [old, new] = shift.positions(token);
            if old == new {
                continue;
            }
            let place = (slot / block_tokens) as usize * self.view.block_stride
                + (slot % block_tokens) as usize * self.view.token_stride;
            for head in 0..self.heads {
                let key = self.base.wrapping_add(place + head * self.view.head_stride);
                // SAFETY: `rows` checked that the slot lies in a block of the layout and the pairs
                // in the head; the caller promises that nobody else uses it. The halves do not
                // overlap, and bytes have no alignment.
                unsafe {
                    match shift.style {
                        RopeStyle::Neox => {
                            let first = key.cast::<E::Bytes>();
                            let (first, second) =
                                (from_raw_parts_mut(first, half), from_raw_parts_mut(first.wrapping_add(half), half));
                            turn_halves::<E>(first, second, turns.of(token));
                        }
                        RopeStyle::GptJ => {
                            let pairs = from_raw_parts_mut(key.cast::<[E::Bytes; 2]>(), half);
                            turn_neighbours::<E>(pairs, turns.of(token));
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
/// As many elements of type `E` as `to` has must be readable from `base` on.
#[inline(always)]
unsafe fn read_elements<E: Element>(base: *const u8, to: &mut [f32]) {
    // SAFETY: the caller's promise; bytes have no alignment.
    let elements = unsafe { from_raw_parts(base.cast::<E::Bytes>(), to.len()) };
    to.iter_mut().zip(elements).for_each(|(to, bytes)| *to = E::load(*bytes));
}

/// Turns the keys of all these shifts on the calling thread; all are checked before the first is
/// turned.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] where a shift does not suit the paged KV (the message says how), or
/// that lies in device memory.
pub(super) fn turn_on_host(kv: &PagedKv, shifts: &[RopeShift]) -> Result<()> {
    let rows = shifts.iter().map(|shift| shift.rows(kv)).collect::<Result<Vec<_>>>()?;
    if kv.place() != MemorySpace::Host {
        return Err(invalid(format!("the host device cannot turn keys in {:?}", kv.place())));
    }
    for alike in rows.chunk_by(|a, b| a.shift.turns_like(b.shift)) {
        let Some(first) = alike.first() else { continue };
        let (tokens, mut turns) = (first.shift.plan.chunk_tokens(), PairTurns::new(first.half));
        for start in (0..tokens).step_by(WINDOW_TOKENS) {
            let window = start..(start + WINDOW_TOKENS).min(tokens);
            // SAFETY: keys and table lie in host memory, as `rows` checked; the caller lets nobody
            // else use the slots meanwhile, as for scatters.
            unsafe {
                turns.make(first, window.clone());
                alike.iter().for_each(|rows| rows.turn(&turns, window.clone()));
            }
        }
    }
    Ok(())
}
