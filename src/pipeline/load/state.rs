//! The bookkeeping of one load, without threads, devices or clocks: which extents are asked for,
//! which have verified, which layers are ready, what failed.
//!
//! Invariants:
//! - A layer is ready when all layers before it are, every extent of it has verified or belongs to
//!   a failed chunk, no worker writes to a failed chunk's blocks any more, and what did not verify
//!   there is overwritten with zeros ("wiped"): the server may use failed blocks as soon as they
//!   are reported. On an accelerator a layer is ready when its scatters have been submitted to the
//!   device; they are verified before the load finishes, and a chunk of which a layer that was
//!   ready does not verify has failed, also where that layer came from the memory tier.
//! - Chunks fail from some chunk to the end of the prefix, never in the middle.
//! - Where a load does not go layer by layer, a damaged chunk is set aside and the others are still
//!   read: so one load finds all that is damaged, and what is computed instead can be stored again.
//!   The prefix ends before the first damaged chunk, once all others have verified; until then no
//!   more layers become ready.
//! - A CRC that comes before the header is kept, and compared when the header has come.
//! - Chunks that were in the memory tier when the load began have a cursor of their own. Where a
//!   layer of one turns out damaged before it was ready, that layer and those not yet scattered are
//!   read from the drive, with the chunk's header.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use super::{LayerReady, LoadChunk, LoadResult, LoadSpec};
use crate::device::Fence;
use crate::format::layout::SlotLayout;
use crate::io::Buf;
use crate::pipeline::cause::MissCause;
use crate::pipeline::groups::GroupSpan;
use crate::pipeline::order::LayerOrder;
use crate::tier::{Filling, Hit};

/// Chunks that a load reads together where it does not go layer by layer: few, so that the head of
/// the prefix is complete early, but enough to spread reads over the drive.
const WHOLE_BATCH: usize = 8;

/// Scatters from the memory tier that a load has under way at most, so that its reads, and other
/// loads, get their turn on the workers. On an accelerator: slots of staging for them.
pub(super) const MEMORY_AHEAD: usize = 8;

/// Where a chunk of a load lies beside the drive.
#[derive(Default)]
pub(super) enum ChunkMemory {
    /// Nowhere.
    #[default]
    Not,
    /// In the memory tier.
    Hit(Hit),
    /// It was, and some of it was damaged. What came of it before is still judged by its CRCs.
    Damaged(Arc<Hit>),
    /// It has a frame, into which it is read.
    Filling(Filling),
}

impl ChunkMemory {
    fn hit(&self) -> Option<&Hit> {
        match self {
            Self::Hit(hit) => Some(hit),
            Self::Damaged(hit) => Some(hit),
            Self::Not | Self::Filling(_) => None,
        }
    }
}

/// What the owner of the frames is to be told, without the load's lock, as it may be another
/// process.
pub(super) enum FrameNews {
    /// The frame has the whole chunk, whose extents have these CRCs.
    Full(Filling, Vec<u32>),
    /// It is damaged.
    Bad(Arc<Hit>),
}

impl FrameNews {
    pub(super) fn tell(self) {
        match self {
            Self::Full(filling, crcs) => filling.publish(&crcs),
            Self::Bad(hit) => hit.report_bad(),
        }
    }
}

/// One read, and what is to be done with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReadStep {
    pub(super) chunk: usize,
    /// Layers that are read; of these, the ones that the caller wants are scattered.
    pub(super) layers: Range<usize>,
    /// The header is read with them.
    pub(super) header: bool,
    /// The bytes lie in a frame already: nothing is read.
    pub(super) in_memory: bool,
    /// They are read into the chunk's frame.
    pub(super) framed: bool,
    pub(super) span: GroupSpan,
}

struct LoadChunkState {
    covers: usize,
    layout: SlotLayout,
    /// Layers that the caller wants.
    wanted: Vec<bool>,
    /// Of the wanted layers, those that have not verified.
    missing: Vec<bool>,
    missing_count: usize,
    /// Of the wanted layers, those whose scatter has not been submitted to the device.
    awaited: Vec<bool>,
    /// CRCs from the header.
    expected: Option<Vec<u32>>,
    /// Layer and CRC of extents that came before the header.
    early: Vec<(usize, u32)>,
    /// Scatters that the device has and has not ended.
    scattering: usize,
    /// The server's blocks that it goes to.
    blocks: Vec<u32>,
    /// Why it was set aside, if it was.
    damage: Option<MissCause>,
    /// It has been reported as bad, or is being reported.
    is_reported: bool,
    memory: ChunkMemory,
    /// It was in the memory tier when the load began.
    from_memory: bool,
    /// Layers that were read into the frame and whose CRCs have come.
    framed: usize,
    /// Layers that came from the memory tier damaged and that no read has replaced yet.
    dirty: Vec<usize>,
}

pub(super) struct LoadState {
    chunks: Vec<LoadChunkState>,
    /// Per layer: extents that have not verified, of chunks that have neither failed nor been set
    /// aside.
    remaining: Vec<usize>,
    /// Scatters that are to be submitted, and where those submitted end.
    order: LayerOrder,
    /// A layer is ready when its scatters are submitted, and not only when they have verified.
    by_order: bool,
    /// Layers before it are ready.
    ready: usize,
    /// Chunks from here on have failed.
    first_failed: usize,
    /// Damaged chunks are set aside until all others have verified.
    judges_all: bool,
    /// The first chunk that was set aside.
    first_damaged: Option<usize>,
    /// Scatters of failed chunks that may still write.
    busy_failed: usize,
    /// Chunks that are being reported as bad.
    reporting: usize,
    /// A chunk was reported as bad.
    reported: bool,
    /// Chunks and layers in the caller's memory that do not verify, or that no header will come
    /// for, and whose wiping has not been asked for yet.
    wipes: Vec<(usize, Vec<usize>)>,
    /// How many these are and those whose wiping is under way.
    wiping: usize,
    /// What was not told yet of frames, and how much of it and of what is being told there is: the
    /// load finishes after that.
    news: Vec<FrameNews>,
    telling: usize,
    /// No worker can write to the caller's memory any more.
    pub(super) sealed: bool,
    pub(super) cancelled: bool,
    groups: Vec<Range<usize>>,
    /// Chunks that are read together, group by group.
    batch: usize,
    /// How many reads, of all groups of all chunks, have been passed: see [`LoadState::place_of`].
    cursor: usize,
    /// Reads that go first: those that could not be submitted, and those of chunks that the memory
    /// tier does not have any more or has damaged.
    again: VecDeque<ReadStep>,
    /// Chunks that were in the memory tier when the load began.
    in_memory: usize,
    /// As `cursor`, for the chunks in the memory tier.
    memory_cursor: usize,
    /// Scatters from the memory tier that are under way, and that may be.
    from_memory: usize,
    memory_ahead: usize,
    /// All that the caller asked for is among the chunks.
    complete: bool,
    result: LoadResult,
    pub(super) finished: bool,
    /// How long it took, once it has finished.
    pub(super) took: Option<Duration>,
    /// Of who waits for the next layer.
    pub(super) waker: Option<Waker>,
    /// Of who waits for the result.
    pub(super) end_waker: Option<Waker>,
    /// Next layer that the stream gives.
    pub(super) given: usize,
}

impl LoadState {
    /// The state of a load that reads `groups`; `by_order` where the server's memory is an
    /// accelerator's. `memory` has for each chunk where it lies beside the drive, and how many
    /// scatters from there may be under way.
    pub(super) fn new(
        spec: &LoadSpec,
        groups: Vec<Range<usize>>,
        by_order: bool,
        memory: Vec<ChunkMemory>,
        memory_ahead: usize,
    ) -> Self {
        let chunks = &spec.chunks;
        let layers = spec.kv.layout().num_layers();
        let mut result = LoadResult {
            tokens: spec.base_tokens + chunks.iter().map(|c| c.covers).sum::<usize>(),
            ..LoadResult::default()
        };
        if let Some(absent) = &spec.absent {
            result.count_miss(absent.cause, absent.chunks);
            result.failed_blocks.extend_from_slice(&absent.blocks);
        }
        let memory = memory.into_iter().chain(std::iter::repeat_with(ChunkMemory::default));
        let chunks: Vec<_> = chunks.iter().zip(memory).map(|(c, m)| LoadChunkState::new(c, layers, m)).collect();
        let mut state = Self {
            remaining: vec![0; layers],
            order: LayerOrder::new(Vec::new()),
            by_order,
            ready: 0,
            first_failed: chunks.len(),
            in_memory: chunks.iter().filter(|c| c.from_memory).count(),
            memory_cursor: 0,
            memory_ahead,
            from_memory: 0,
            judges_all: !spec.layerwise,
            first_damaged: None,
            busy_failed: 0,
            reporting: 0,
            reported: false,
            wipes: Vec::new(),
            wiping: 0,
            news: Vec::new(),
            telling: 0,
            sealed: false,
            cancelled: false,
            groups,
            batch: if spec.layerwise { chunks.len() } else { WHOLE_BATCH }.max(1),
            chunks,
            cursor: 0,
            again: VecDeque::new(),
            complete: spec.absent.is_none(),
            result,
            finished: false,
            took: None,
            waker: None,
            end_waker: None,
            given: 0,
        };
        for chunk in &state.chunks {
            for (left, &missing) in state.remaining.iter_mut().zip(&chunk.missing) {
                *left += usize::from(missing);
            }
        }
        state.order = LayerOrder::new(state.remaining.clone());
        state.publish();
        state.took = state.finished.then_some(Duration::ZERO);
        state
    }

    /// The read of one group of one chunk, with the header if `header` and the group is the first;
    /// `None` where nothing of it is wanted.
    fn step(&self, chunk: usize, group: usize, header: bool) -> Option<ReadStep> {
        let state = self.chunks.get(chunk).filter(|c| c.missing_count > 0)?;
        let layers = self.groups.get(group)?.clone();
        let header = header && group == 0;
        let needed = |l: &usize| state.wanted.get(*l).copied().unwrap_or(false);
        let layers = match (layers.clone().find(needed), layers.clone().rfind(needed)) {
            // One read has no gaps: it goes from the header to the last wanted layer.
            (Some(_), Some(last)) if header => layers.start..last + 1,
            (Some(first), Some(last)) => first..last + 1,
            _ if header => layers.start..layers.start,
            _ => return None,
        };
        ReadStep::new(state, chunk, layers, header)
    }

    /// Chunk and group of the `at`th read: batch after batch of chunks, in a batch group after
    /// group.
    fn place_of(&self, at: usize) -> (usize, usize) {
        let full = (self.batch * self.groups.len()).max(1);
        let (first, at) = (at / full * self.batch, at % full);
        let width = self.batch.min(self.chunks.len() - first).max(1);
        (first + at % width, at / width)
    }

    /// The next read; `None` where there is none now.
    pub(super) fn next_step(&mut self) -> Option<ReadStep> {
        if self.finished {
            return None;
        }
        while let Some(step) = self.again.pop_front() {
            if self.is_alive(step.chunk) {
                return Some(step);
            }
        }
        while self.has_steps() {
            let (chunk, group) = self.place_of(self.cursor);
            self.cursor += 1;
            if self.is_alive(chunk)
                && self.chunks.get(chunk).is_some_and(|c| !c.from_memory)
                && let Some(step) = self.step(chunk, group, true)
            {
                return Some(step);
            }
        }
        None
    }

    /// Of the chunks that something is wanted of, how many were in the memory tier when the load
    /// began, and how many there are.
    pub(super) fn memory_hits(&self) -> (usize, usize) {
        let wanted = || self.chunks.iter().filter(|c| c.wanted.iter().any(|wanted| *wanted));
        (wanted().filter(|c| c.from_memory).count(), wanted().count())
    }

    /// Whether chunks were in the memory tier when the load began.
    pub(super) fn has_hits(&self) -> bool {
        self.in_memory > 0
    }

    /// The next scatter from the memory tier, with its bytes; `None` where there is none now. Steps
    /// of chunks that the tier does not have any more become reads on the way.
    pub(super) fn next_in_memory(&mut self) -> Option<(ReadStep, Buf)> {
        while !self.finished
            && self.from_memory < self.memory_ahead
            && self.in_memory > 0
            && self.memory_cursor < self.groups.len() * self.chunks.len()
        {
            let (chunk, group) = self.place_of(self.memory_cursor);
            self.memory_cursor += 1;
            let step = self.step(chunk, group, false).filter(|_| self.is_alive(chunk));
            let Some((step, state)) = step.zip(self.chunks.get(chunk).filter(|c| c.from_memory)) else { continue };
            match &state.memory {
                ChunkMemory::Hit(hit) => {
                    if let Some(view) = hit.view(step.span.frame_range()) {
                        self.from_memory += 1;
                        return Some((ReadStep { in_memory: true, ..step }, view));
                    }
                    self.not_in_memory(chunk, Vec::new());
                    self.again.push_back(step);
                }
                _ => self.again.push_back(step),
            }
        }
        None
    }

    /// A scatter from the memory tier has ended, or was not begun.
    pub(super) fn end_in_memory(&mut self) {
        self.from_memory -= 1;
    }

    /// The part of the chunk's frame that `step` reads into; `None` where the chunk has no frame
    /// that is being filled.
    pub(super) fn frame_part(&self, step: &mut ReadStep) -> Option<Buf> {
        let part = match &self.chunks.get(step.chunk)?.memory {
            ChunkMemory::Filling(fill) if !step.layers.is_empty() => fill.part(step.span.frame_range()),
            _ => None,
        };
        step.framed = part.is_some();
        part
    }

    /// The CRCs of so many more layers in the chunk's frame have come; once all layers have
    /// verified, the chunk is to be published in the memory tier.
    pub(super) fn framed(&mut self, chunk: usize, layers: usize) {
        let Some(state) = self.chunks.get_mut(chunk) else { return };
        state.framed += layers;
        if state.missing_count > 0 || state.framed != state.wanted.len() {
            return;
        }
        let Some(crcs) = &state.expected else { return };
        match std::mem::take(&mut state.memory) {
            ChunkMemory::Filling(filling) => {
                self.news.push(FrameNews::Full(filling, crcs.clone()));
                self.telling += 1;
            }
            before => state.memory = before,
        }
    }

    /// Takes what is to be told of frames; the caller calls [`LoadState::told`] when that is done.
    pub(super) fn take_news(&mut self) -> Vec<FrameNews> {
        std::mem::take(&mut self.news)
    }

    /// So much of [`LoadState::take_news`] is told.
    pub(super) fn told(&mut self, count: usize) {
        self.telling -= count;
    }

    /// Layers of a chunk came from the memory tier and have these CRCs. Damaged ones are read from
    /// the drive, or wiped where the chunk has failed, or fails because they were ready.
    pub(super) fn came_from_memory(&mut self, chunk: usize, extents: impl Iterator<Item = (usize, u32)>) {
        let alive = self.is_alive(chunk);
        let mut bad = Vec::new();
        for (layer, crc) in extents {
            let Some(state) = self.chunks.get(chunk) else { return };
            match state.memory.hit() {
                Some(hit) if hit.crc(layer) == Some(crc) => {
                    hit.loaded(state.layout.extents.get(layer).map_or(0, |e| u64::from(e.payload)));
                    self.verified_layer(chunk, layer, alive);
                }
                _ => bad.push(layer),
            }
        }
        if bad.is_empty() {
            return;
        }
        if !alive {
            return self.wipe(chunk, bad);
        }
        if self.by_order && bad.iter().any(|layer| *layer < self.ready) {
            return self.used_damaged(chunk, bad);
        }
        if let Some(state) = self.chunks.get_mut(chunk) {
            for &layer in &bad {
                if let Some(awaited) = state.awaited.get_mut(layer).filter(|awaited| !**awaited) {
                    *awaited = true;
                    self.order.comes_again(layer);
                }
            }
        }
        self.not_in_memory(chunk, bad);
    }

    /// Layers of a chunk came from the memory tier damaged, and the caller's stream may have used
    /// them: what was computed from them is wrong. The chunk on the drive is good; only the frame
    /// goes.
    fn used_damaged(&mut self, chunk: usize, layers: Vec<usize>) {
        self.drop_frame(chunk);
        self.wipe(chunk, layers);
        self.fail(chunk, MissCause::Corrupt);
    }

    /// No more of a chunk is taken from the memory tier; its `dirty` layers are read from the
    /// drive.
    fn not_in_memory(&mut self, chunk: usize, dirty: Vec<usize>) {
        let is_new = self.drop_frame(chunk);
        let Some(state) = self.chunks.get_mut(chunk) else { return };
        if is_new {
            self.again.extend(ReadStep::new(state, chunk, 0..0, true));
        }
        for &layer in &dirty {
            self.again.extend(ReadStep::new(state, chunk, layer..layer + 1, false));
        }
        state.dirty.extend(dirty);
    }

    /// The frame of a chunk is damaged; whether that is new.
    fn drop_frame(&mut self, chunk: usize) -> bool {
        let Some(state) = self.chunks.get_mut(chunk) else { return false };
        let before = std::mem::take(&mut state.memory);
        let is_new = matches!(before, ChunkMemory::Hit(_));
        state.memory = match before {
            ChunkMemory::Hit(hit) => {
                let hit = Arc::new(hit);
                self.news.push(FrameNews::Bad(Arc::clone(&hit)));
                self.telling += 1;
                ChunkMemory::Damaged(hit)
            }
            before => before,
        };
        is_new
    }

    /// All frames, once the load has finished: to be dropped outside of its lock, as another
    /// process that owns them is told so.
    pub(super) fn take_frames(&mut self) -> impl Sized + use<> {
        let chunks = if self.finished { &mut *self.chunks } else { &mut [] };
        chunks.iter_mut().map(|chunk| std::mem::take(&mut chunk.memory)).collect::<Vec<_>>()
    }

    /// Whether a chunk has neither failed nor been set aside.
    fn is_alive(&self, chunk: usize) -> bool {
        chunk < self.first_failed && self.chunks.get(chunk).is_some_and(|c| c.damage.is_none())
    }

    /// Takes a read back that could not be submitted.
    pub(super) fn unread(&mut self, step: ReadStep) {
        self.again.push_front(step);
    }

    /// Whether there may be reads that were not submitted yet.
    pub(super) fn has_steps(&self) -> bool {
        !self.finished && (!self.again.is_empty() || self.cursor < self.groups.len() * self.chunks.len())
    }

    /// Whether the layers of `step` may be scattered; counts the scatter.
    pub(super) fn begin_scatter(&mut self, step: &ReadStep) -> bool {
        if self.finished || self.cancelled || !self.is_alive(step.chunk) {
            return false;
        }
        if let Some(chunk) = self.chunks.get_mut(step.chunk) {
            chunk.scattering += 1;
            // This scatter replaces them, or wipes them where it does not verify.
            chunk.dirty.retain(|layer| !step.layers.contains(layer));
        }
        true
    }

    /// A scatter that [`LoadState::begin_scatter`] counted has ended: it does not write any more.
    pub(super) fn end_scatter(&mut self, step: &ReadStep) {
        if let Some(chunk) = self.chunks.get_mut(step.chunk) {
            chunk.scattering -= 1;
        }
        if step.chunk >= self.first_failed {
            self.busy_failed -= 1;
        }
    }

    /// The scatter of `layers` of a chunk has been submitted to the device, or is over; it ends at
    /// `fence`, where there is one.
    pub(super) fn submitted(&mut self, chunk: usize, layers: &[usize], fence: Option<&Fence>) {
        let alive = self.is_alive(chunk);
        let Some(state) = self.chunks.get_mut(chunk) else { return };
        for &layer in layers {
            if let Some(fence) = fence {
                self.order.ends_at(layer, fence);
            }
            if let Some(awaited) = state.awaited.get_mut(layer).filter(|a| **a) {
                *awaited = false;
                if alive {
                    self.order.came(layer);
                }
            }
        }
    }

    /// Where the scatters of `layer` end on the device.
    pub(super) fn fences(&self, layer: usize) -> Vec<Fence> {
        self.order.fences(layer)
    }

    /// The layers of `step` that are scattered.
    pub(super) fn wanted(&self, step: &ReadStep) -> Vec<usize> {
        let Some(chunk) = self.chunks.get(step.chunk) else { return Vec::new() };
        step.layers.clone().filter(|&l| chunk.wanted.get(l).copied().unwrap_or(false)).collect()
    }

    /// The header of `chunk` has these CRCs; `false` where an extent that came earlier has another.
    pub(super) fn header_came(&mut self, chunk: usize, crcs: Vec<u32>) -> bool {
        let Some(state) = self.chunks.get_mut(chunk) else { return true };
        state.expected = Some(crcs);
        let early = std::mem::take(&mut state.early);
        // Not `all`, which stops at the first wrong one: every wrong extent must be wiped.
        early.into_iter().filter(|(layer, crc)| !self.extent_came(chunk, *layer, *crc)).count() == 0
    }

    /// An extent was scattered and has this CRC; `false` where the header says another.
    pub(super) fn extent_came(&mut self, chunk: usize, layer: usize, crc: u32) -> bool {
        let alive = self.is_alive(chunk);
        let Some(state) = self.chunks.get_mut(chunk) else { return true };
        let Some(expected) = &state.expected else {
            if alive {
                state.early.push((layer, crc));
            } else {
                // No header will come any more.
                self.wipe(chunk, vec![layer]);
            }
            return true;
        };
        if expected.get(layer) != Some(&crc) {
            self.wipe(chunk, vec![layer]);
            return false;
        }
        self.verified_layer(chunk, layer, alive);
        true
    }

    /// An extent has verified; `alive` where its chunk is.
    fn verified_layer(&mut self, chunk: usize, layer: usize, alive: bool) {
        let Some(state) = self.chunks.get_mut(chunk) else { return };
        if let Some(missing) = state.missing.get_mut(layer).filter(|m| **m) {
            *missing = false;
            state.missing_count -= 1;
            if let Some(left) = self.remaining.get_mut(layer).filter(|_| alive) {
                *left -= 1;
            }
        }
    }

    /// Whether a chunk that turned out bad is still to be reported. If so, no layer becomes ready
    /// until [`LoadState::end_report`]. `None` where it is being reported: that decides about it,
    /// as another report would not find the chunk any more.
    pub(super) fn begin_report(&mut self, chunk: usize) -> Option<bool> {
        if self.finished || !self.is_alive(chunk) {
            return Some(false);
        }
        let of = self.chunks.get_mut(chunk)?;
        if std::mem::replace(&mut of.is_reported, true) {
            return None;
        }
        self.reporting += 1;
        self.reported = true;
        Some(true)
    }

    /// Whether a failed read is to be reported although its load or chunk was given up before it
    /// failed: once for a load.
    pub(super) fn begin_late_report(&mut self, chunk: usize) -> bool {
        (self.finished || !self.is_alive(chunk)) && self.begin_last_report()
    }

    /// Whether a load that is given up is to be reported: nothing of it was before.
    pub(super) fn begin_last_report(&mut self) -> bool {
        !std::mem::replace(&mut self.reported, true)
    }

    pub(super) fn end_report(&mut self, begun: bool) {
        self.reporting -= usize::from(begun);
    }

    /// These layers of a chunk must not stay in the caller's memory as they are: no layer becomes
    /// ready until they are wiped.
    pub(super) fn wipe(&mut self, chunk: usize, layers: Vec<usize>) {
        if !layers.is_empty() {
            self.wiping += 1;
            self.wipes.push((chunk, layers));
        }
    }

    /// Takes the wipes that are to be started; the caller calls [`LoadState::wiped`] for each of
    /// them.
    pub(super) fn take_wipes(&mut self) -> Vec<(usize, Vec<usize>)> {
        std::mem::take(&mut self.wipes)
    }

    /// So many wipes are over, whether they succeeded or not.
    pub(super) fn wiped(&mut self, count: usize) {
        self.wiping -= count;
    }

    pub(super) fn is_wiping(&self) -> bool {
        self.wiping > 0
    }

    pub(super) fn add_bytes(&mut self, bytes: u64) {
        self.result.bytes += bytes;
    }

    /// Fails `chunk` for `cause`, and all after it because their prefix is missing; or sets it
    /// aside, where it is damaged and the others are still to be read. Does nothing where it has
    /// failed before.
    pub(super) fn fail(&mut self, chunk: usize, cause: MissCause) {
        if self.finished || chunk >= self.first_failed {
            return;
        }
        let is_of_chunk =
            matches!(cause, MissCause::Corrupt | MissCause::Io | MissCause::ShortIo | MissCause::NotFound);
        if self.judges_all && is_of_chunk {
            self.set_aside(chunk, cause);
        } else {
            self.fail_from(chunk, cause);
        }
    }

    /// Stops waiting for a damaged chunk.
    fn set_aside(&mut self, chunk: usize, cause: MissCause) {
        let Some(state) = self.chunks.get_mut(chunk).filter(|c| c.damage.is_none()) else { return };
        state.damage = Some(cause);
        self.first_damaged = Some(self.first_damaged.map_or(chunk, |first| first.min(chunk)));
        self.forget(chunk);
    }

    /// Layers do not wait for `chunk` any more. What of it lies in the caller's memory without
    /// having verified is wiped.
    fn forget(&mut self, chunk: usize) {
        let Some(state) = self.chunks.get_mut(chunk) else { return };
        let mut unjudged: Vec<usize> = std::mem::take(&mut state.early).into_iter().map(|(layer, _)| layer).collect();
        unjudged.append(&mut state.dirty);
        self.wipe(chunk, unjudged);
        let Some(state) = self.chunks.get(chunk) else { return };
        for (left, &missing) in self.remaining.iter_mut().zip(&state.missing) {
            *left -= usize::from(missing);
        }
        for (layer, _) in state.awaited.iter().enumerate().filter(|(_, awaited)| **awaited) {
            self.order.came(layer);
        }
    }

    fn fail_from(&mut self, chunk: usize, cause: MissCause) {
        let end = std::mem::replace(&mut self.first_failed, chunk);
        // These keep later chunks from coming too, so they are the cause for all of them.
        let whole = matches!(cause, MissCause::Cancelled | MissCause::TimedOut | MissCause::Closed);
        let rest = if whole { cause } else { MissCause::Prefix };
        for at in chunk..end {
            let Some(state) = self.chunks.get(at) else { break };
            self.busy_failed += state.scattering;
            self.result.tokens -= state.covers;
            self.result.failed_blocks.extend_from_slice(&state.blocks);
            self.result.count_miss(state.damage.unwrap_or(if at == chunk { cause } else { rest }), 1);
            if state.damage.is_none() {
                self.forget(at);
            }
        }
    }

    /// Fails every chunk from the first that has not verified completely.
    pub(super) fn fail_unfinished(&mut self, cause: MissCause) {
        let alive = self.chunks.get(..self.first_failed).unwrap_or_default();
        if let Some(chunk) = alive.iter().position(|c| c.missing_count > 0 || c.damage.is_some()) {
            self.fail(chunk, cause);
        }
    }

    /// Ends the load. Where everything is there and only its news are still to be told, it was not
    /// cancelled: stores that depend on it may go on.
    pub(super) fn give_up(&mut self, cause: MissCause) {
        if !self.finished {
            self.cancelled |= cause == MissCause::Cancelled && !self.is_whole();
            self.fail_unfinished(cause);
        }
    }

    /// Whether all layers are ready and have verified.
    fn is_whole(&self) -> bool {
        self.ready == self.remaining.len() && self.remaining.iter().all(|&left| left == 0)
    }

    /// Finds out which layers are ready now and whether the load has finished; `true` where that
    /// has changed and waiting threads must be woken.
    pub(super) fn publish(&mut self) -> bool {
        if self.finished {
            return false;
        }
        if let Some(first) = self.first_damaged.filter(|first| *first < self.first_failed) {
            if self.remaining.iter().any(|&left| left > 0) {
                return false;
            }
            self.fail_from(first, MissCause::Corrupt);
        }
        if self.busy_failed + self.reporting + self.wiping > 0 && !self.sealed {
            return false;
        }
        let before = self.ready;
        let open = |layer| if self.by_order { self.order.pending(layer) } else { self.remaining.get(layer).copied() };
        while open(self.ready) == Some(0) {
            self.ready += 1;
        }
        if self.telling == 0 && self.is_whole() {
            self.finished = true;
            self.result.failed_blocks.sort_unstable();
            self.result.failed_blocks.dedup();
            self.result.cancelled = self.cancelled;
        }
        self.finished || self.ready > before
    }

    /// Layer `layer`, once it is ready.
    pub(super) fn layer(&self, layer: usize) -> Option<LayerReady> {
        (layer < self.ready).then_some(LayerReady { layer, tokens: self.result.tokens })
    }

    pub(super) fn layers(&self) -> usize {
        self.remaining.len()
    }

    pub(super) fn result(&self) -> &LoadResult {
        &self.result
    }

    /// Whether everything that was asked for has verified; `None` while that is not known.
    pub(super) fn verified(&self) -> Option<bool> {
        if self.first_failed < self.chunks.len() || self.first_damaged.is_some() || self.cancelled || !self.complete {
            return Some(false);
        }
        self.finished.then_some(true)
    }
}

impl ReadStep {
    /// A read of layers of a chunk from its drive.
    fn new(state: &LoadChunkState, chunk: usize, layers: Range<usize>, header: bool) -> Option<Self> {
        let span = GroupSpan::of(&state.layout, &layers, header)?;
        Some(Self { chunk, span, layers, header, in_memory: false, framed: false })
    }
}

impl LoadChunkState {
    fn new(chunk: &LoadChunk, layers: usize, memory: ChunkMemory) -> Self {
        let needed = |l: usize| chunk.plans.of(l).is_some_and(|p| !p.is_empty());
        let missing: Vec<bool> = (0..layers).map(needed).collect();
        Self {
            covers: chunk.covers,
            layout: chunk.source.layout().clone(),
            missing_count: missing.iter().filter(|m| **m).count(),
            wanted: missing.clone(),
            awaited: missing.clone(),
            missing,
            expected: None,
            early: Vec::new(),
            scattering: 0,
            blocks: chunk.plans.block_ids(),
            damage: None,
            is_reported: false,
            from_memory: matches!(memory, ChunkMemory::Hit(_)),
            memory,
            framed: 0,
            dirty: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;
    use std::time::Instant;

    use super::*;
    use crate::device::{HugePages, PagedKv, StagingOptions};
    use crate::error::Result;
    use crate::geometry::{DType, Geometry, LayerKind, LayerSpec};
    use crate::io::{Done, Rejected, Request};
    use crate::key::ChunkKey;
    use crate::paged::{ChunkPlan, ChunkPlans, KvLayout, KvShape, Packing, PagedLayout};
    use crate::pipeline::ChunkSource;
    use crate::tier::{FrameId, MemoryTier, PutId, Rank};

    struct Slot(SlotLayout);

    impl ChunkSource for Slot {
        fn layout(&self) -> &SlotLayout {
            &self.0
        }

        fn request(&self, _: u64, _: Buf, _: Done) -> Request {
            unreachable!("nothing is read")
        }

        fn drive(&self) -> usize {
            0
        }

        fn submit(&self, _: Request) -> std::result::Result<(), Rejected> {
            unreachable!("nothing is read")
        }

        fn check_header(&self, _: &[u8]) -> Result<Vec<u32>> {
            unreachable!("nothing is read")
        }

        fn report_bad(&self, cause: MissCause) -> MissCause {
            cause
        }
    }

    /// A load of one chunk of two layers, which lies in memory as `memory` says.
    fn one_chunk(memory: ChunkMemory) -> LoadState {
        let layers = vec![LayerSpec::kv(LayerKind::Full, 1, 64); 2];
        let geometry = Geometry::new("m", DType::named("bf16").unwrap(), layers, 16).unwrap();
        let shape = KvShape { layout: KvLayout::Nhd, packing: Packing::Split, block_tokens: 16, num_blocks: 1 };
        let (kv, _) = PagedKv::alloc_zeroed(PagedLayout::per_layer(&geometry.layers, shape).unwrap()).unwrap();
        let plan = ChunkPlan::new(&(0..16).collect::<Vec<i64>>(), None, 16, 1).unwrap();
        let chunk = LoadChunk {
            source: Arc::new(Slot(SlotLayout::of_chunk(&geometry, 16))),
            tokens: 16,
            covers: 16,
            plans: ChunkPlans::new(vec![Arc::new(plan)], Arc::default()),
        };
        let spec = LoadSpec {
            kv,
            chunks: vec![chunk],
            layerwise: true,
            base_tokens: 0,
            absent: None,
            after: Vec::new(),
            timeout: None,
        };
        LoadState::new(&spec, std::iter::once(0..2).collect(), false, vec![memory], MEMORY_AHEAD)
    }

    #[test]
    fn the_owner_of_frames_is_told_of_them_without_the_lock_and_before_the_load_is_over() {
        let bytes = 64 << 10;
        let options = StagingOptions { bytes, slot_bytes: bytes, hugepages: HugePages::Off, numa: None };
        let tier = MemoryTier::new(&options).unwrap();
        let rank = Rank { turn: 0, depth: Reverse(0) };
        let id = FrameId { key: ChunkKey([1; 32]), put: PutId { drive: 0, sequence: 1 } };
        let mut state = one_chunk(ChunkMemory::Filling(tier.reserve(id, bytes as u64, rank).unwrap()));
        let mut step = state.next_step().unwrap();
        assert!(state.frame_part(&mut step).is_some() && state.begin_scatter(&step));
        assert!(state.header_came(0, vec![1, 2]) && state.extent_came(0, 0, 1) && state.extent_came(0, 1, 2));
        state.framed(0, 2);
        state.end_scatter(&step);
        assert!(state.publish() && state.layer(1).is_some() && !state.finished);
        // The caller has all layers, and drops its load.
        state.give_up(MissCause::Cancelled);
        let news = state.take_news();
        assert!(news.len() == 1 && tier.hold(id, rank).is_none());
        news.into_iter().for_each(FrameNews::tell);
        state.told(1);
        assert!(state.publish() && state.finished);
        assert_eq!(state.verified(), Some(true), "a store may depend on it");
        drop(state.take_frames());

        let mut state = one_chunk(ChunkMemory::Hit(tier.get(id, rank, Instant::now()).unwrap()));
        let (step, frame) = state.next_in_memory().unwrap();
        drop(frame);
        assert!(state.begin_scatter(&step));
        state.came_from_memory(0, [(0, 1), (1, 3)].into_iter());
        state.end_scatter(&step);
        let news = state.take_news();
        assert!(news.len() == 1 && tier.hold(id, rank).is_some());
        news.into_iter().for_each(FrameNews::tell);
        assert!(tier.hold(id, rank).is_none());
    }
}
