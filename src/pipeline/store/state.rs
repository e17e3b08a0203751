//! The bookkeeping of one store, without threads, devices or clocks: which layers are computed,
//! gathered, written, and which chunks are committed or shed.
//!
//! Invariants:
//! - A chunk is *over* when it is committed, shed, or found to be stored already.
//! - A layer counts as gathered when every extent of it was gathered or belongs to a chunk that is
//!   over, and no gather of such a chunk is under way any more: then the server may change its
//!   blocks.
//! - When a chunk is shed, chunks after it whose slots are not open yet are shed too: without their
//!   prefix they are of no use.
//! - A chunk is committed once, when all its extents were written in full.
//! - A chunk that does not fit its codec is begun again without, unless the caller has been told
//!   that some layers are gathered: it may have changed them since. Gathers of the first attempt
//!   count like those of a chunk that is over.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::task::Waker;

use super::{StoreChunk, StorePlan, StoreResult};
use crate::device::{Fence, Part, add_fence};
use crate::format::layout::SlotLayout;
use crate::io::Buf;
use crate::paged::ChunkPlans;
use crate::pipeline::cause::ShedCause;
use crate::pipeline::groups::{GroupSpan, group_end};
use crate::pipeline::order::LayerOrder;
use crate::pipeline::seam::{BeginPut, Begun, ChunkSink};
use crate::tier::Filling;

/// A gather and the write that follows it.
#[derive(Clone, Debug)]
pub(super) struct StoreStep {
    pub(super) chunk: usize,
    /// That of the chunk when the step was made. If the chunk has another by now, the step is void.
    attempt: u32,
    pub(super) layers: Range<usize>,
    pub(super) span: GroupSpan,
    /// The drive that it is written to.
    pub(super) drive: usize,
}

/// What the store thread can do next.
pub(super) enum NextStep {
    /// Open the slot of a chunk.
    Begin(usize, BeginPut),
    /// Gather and write; into the chunk's frame, where it has one.
    Gather(StoreStep, Option<Buf>),
    /// Nothing until something changes.
    Nothing,
}

enum StorePhase {
    Waiting(BeginPut),
    Opening,
    Open(Arc<dyn ChunkSink>),
    Committing,
    Over,
}

struct StoreChunkState {
    layout: SlotLayout,
    tokens: u32,
    plans: ChunkPlans,
    phase: StorePhase,
    /// How often it was begun again.
    attempt: u32,
    /// Layers before it have been given to a gather.
    next: usize,
    gathered: Vec<bool>,
    /// Layers whose gather has not been submitted.
    awaited: Vec<bool>,
    /// Gathers that have not ended.
    gathering: usize,
    /// Gathers that the device has and has not submitted.
    queued: usize,
    /// Layers written.
    written: usize,
    crcs: Vec<u32>,
    /// Its frame in the memory tier, where it gets one.
    frame: Option<Filling>,
    /// Layers that were gathered into the frame.
    framed: usize,
}

pub(super) struct StoreState {
    /// How many chunks it has at most, until [`StoreState::plan`] says which.
    unplanned: Option<usize>,
    chunks: Vec<StoreChunkState>,
    /// Layers that the caller has said to be computed.
    announced: Vec<bool>,
    /// Per layer: fences of the caller's streams behind which it is computed.
    computed: Vec<Vec<Fence>>,
    /// Gathers that are to be submitted, and where those submitted end.
    order: LayerOrder,
    /// Of all chunks: gathers that the device has and has not submitted.
    queued: usize,
    /// The caller has been told that layers before it are gathered, or that their gathers are
    /// submitted.
    given_back: usize,
    /// Layers before it are all computed.
    ready: usize,
    /// Why the chunks without a slot found no room the last time.
    refused: ShedCause,
    /// Layers before it are gathered without waiting for larger groups.
    forced: usize,
    /// Per layer: extents that were not gathered, of chunks that are not over.
    left: Vec<usize>,
    /// Gathers that have not ended, of chunks that are over and of attempts that were given up.
    busy_over: usize,
    /// Chunks that are not over.
    living: usize,
    /// The chunk that the search for the next step begins with.
    cursor: usize,
    /// Bytes that one step moves at most, if it is more than one layer.
    group_bytes: usize,
    /// Payload bytes that were not gathered yet.
    ungathered: u64,
    /// Frames that are not needed any more. They are dropped without the lock, as another process
    /// that owns them is told so.
    unused: Vec<Filling>,
    result: StoreResult,
    pub(super) finished: bool,
    pub(super) waker: Option<Waker>,
}

impl StoreState {
    /// A store of at most so many chunks, until [`StoreState::plan`] says which.
    pub(super) fn new(at_most: usize, layers: usize, group_bytes: usize) -> Self {
        Self {
            unplanned: Some(at_most),
            chunks: Vec::new(),
            announced: vec![false; layers],
            computed: vec![Vec::new(); layers],
            order: LayerOrder::new(vec![0; layers]),
            queued: 0,
            given_back: 0,
            ready: 0,
            refused: ShedCause::NoSpace,
            forced: 0,
            left: vec![0; layers],
            busy_over: 0,
            living: 0,
            cursor: 0,
            group_bytes,
            ungathered: 0,
            unused: Vec::new(),
            result: StoreResult::default(),
            finished: false,
            waker: None,
        }
    }

    /// The chunks are found. Does nothing where the store was given up before.
    pub(super) fn plan(&mut self, plan: StorePlan) {
        if self.unplanned.take().is_none() {
            return;
        }
        let layers = self.announced.len();
        self.result.already_there += plan.already_there;
        plan.shed.iter().for_each(|&(cause, chunks)| self.result.count_shed(cause, chunks));
        self.living = plan.chunks.len();
        self.chunks = plan.chunks.into_iter().map(|c| StoreChunkState::new(c, layers)).collect();
        self.order = LayerOrder::new(vec![self.living; layers]);
        self.left = vec![self.living; layers];
        self.ungathered = self.chunks.iter().map(StoreChunkState::ungathered_bytes).sum();
        self.update_finished();
    }

    /// Layer `layer` is computed, on an accelerator at `fence`; `false` where there is no such
    /// layer.
    pub(super) fn announce(&mut self, layer: usize, fence: Option<Fence>) -> bool {
        let Some(a) = self.announced.get_mut(layer) else { return false };
        *a = true;
        self.computed_at(layer, fence);
        while self.announced.get(self.ready) == Some(&true) {
            self.ready += 1;
        }
        true
    }

    fn computed_at(&mut self, layer: usize, fence: Option<Fence>) {
        if let (Some(fences), Some(fence)) = (self.computed.get_mut(layer), fence) {
            add_fence(fences, fence);
        }
    }

    /// As [`StoreState::announce`], for all layers that were not announced.
    pub(super) fn announce_all(&mut self, fence: Option<&Fence>) {
        for layer in 0..self.announced.len() {
            if self.announced.get(layer) == Some(&false) {
                self.computed_at(layer, fence.cloned());
            }
        }
        self.announced.fill(true);
        self.ready = self.announced.len();
    }

    pub(super) fn is_ready(&self, layer: usize) -> bool {
        layer < self.ready
    }

    /// From now on layers up to `layer` are gathered without waiting for larger groups. Returns
    /// whether that changes anything: where all layers are computed, groups do not wait to grow.
    pub(super) fn force(&mut self, layer: usize) -> bool {
        let is_later = self.forced <= layer && self.ready < self.announced.len();
        self.forced = self.forced.max(layer + 1);
        is_later
    }

    /// Whether the caller's blocks of all layers up to `layer` are no longer read.
    pub(super) fn is_gathered(&mut self, layer: usize) -> bool {
        let is_gathered =
            self.unplanned.is_none() && self.busy_over == 0 && self.left.iter().take(layer + 1).all(|&n| n == 0);
        self.give_back(is_gathered, layer)
    }

    /// Notes, where `is_given`, that the caller learns that it may change layers up to `layer`.
    fn give_back(&mut self, is_given: bool, layer: usize) -> bool {
        if is_given {
            self.given_back = self.given_back.max(layer + 1);
        }
        is_given
    }

    /// As [`StoreState::is_gathered`], for all layers.
    pub(super) fn is_gathered_all(&self) -> bool {
        self.unplanned.is_none() && self.busy_over == 0 && self.left.iter().all(|&n| n == 0)
    }

    /// Whether every gather of the layers up to `layer` has been submitted to the device, is over,
    /// or was given up.
    pub(super) fn is_submitted(&mut self, layer: usize) -> bool {
        let is_submitted = self.unplanned.is_none() && self.queued == 0 && self.order.is_complete(layer);
        self.give_back(is_submitted, layer)
    }

    /// Where the gathers of the layers up to `layer` end on the device.
    pub(super) fn fences(&self, layer: usize) -> Vec<Fence> {
        let mut fences = Vec::new();
        (0..=layer).flat_map(|l| self.order.fences(l)).for_each(|fence| add_fence(&mut fences, fence));
        fences
    }

    /// What to do next; a begun or gathered step is counted as under way. Where there is no room
    /// for further slots, or no staging for a drive that an open one waits for, the other open ones
    /// go on.
    pub(super) fn next(&mut self, has_room: bool, starved: &[usize]) -> NextStep {
        if self.finished || self.ready == 0 {
            return NextStep::Nothing;
        }
        let may_begin = has_room && (starved.is_empty() || !self.wanting().any(|drive| starved.contains(&drive)));
        for i in 0..self.chunks.len() {
            let at = (self.cursor + i) % self.chunks.len();
            let (ready, forced, group_bytes) = (self.ready, self.forced, self.group_bytes);
            let all = ready == self.announced.len();
            let Some(chunk) = self.chunks.get_mut(at) else { continue };
            if may_begin && let StorePhase::Waiting(_) = chunk.phase {
                self.cursor = at;
                if let StorePhase::Waiting(begin) = std::mem::replace(&mut chunk.phase, StorePhase::Opening) {
                    return NextStep::Begin(at, begin);
                }
            }
            if matches!(&chunk.phase, StorePhase::Open(sink) if starved.contains(&sink.drive())) {
                continue;
            }
            let Some(step) = chunk.step(at, ready, forced, group_bytes) else { continue };
            // Once all layers are computed, chunk after chunk, the head of the prefix first. Before
            // that the chunks take turns, so that they go layer by layer.
            self.cursor = if all { at } else { at + 1 };
            let frame = chunk.frame.as_ref().and_then(|frame| frame.part(step.span.frame_range()));
            return NextStep::Gather(step, frame);
        }
        NextStep::Nothing
    }

    /// The drives of gathers that could be submitted if there were staging for them.
    pub(super) fn wanting(&self) -> impl Iterator<Item = usize> {
        self.waiting().map(|sink| sink.drive())
    }

    /// The slot of such a gather, on one of `drives`.
    pub(super) fn waiting_sink(&self, drives: &BTreeSet<usize>) -> Option<Arc<dyn ChunkSink>> {
        self.waiting().find(|sink| drives.contains(&sink.drive())).cloned()
    }

    fn waiting(&self) -> impl Iterator<Item = &Arc<dyn ChunkSink>> {
        let (ready, forced, group_bytes) = (self.ready, self.forced, self.group_bytes);
        let all = self.chunks.iter().enumerate().filter(|_| !self.finished);
        all.filter_map(move |(i, chunk)| match &chunk.phase {
            StorePhase::Open(sink) if chunk.peek(i, ready, forced, group_bytes).is_some() => Some(sink),
            _ => None,
        })
    }

    /// Takes back a gather that could not be submitted.
    pub(super) fn ungather(&mut self, step: &StoreStep) {
        match self.chunks.get_mut(step.chunk) {
            Some(chunk) if chunk.attempt == step.attempt => {
                chunk.next = step.layers.start;
                chunk.gathering -= 1;
                // It was given up meanwhile, and counted this gather as one to be waited for.
                self.busy_over -= usize::from(!matches!(chunk.phase, StorePhase::Open(_)));
            }
            _ => self.busy_over -= 1,
        }
        self.cursor = step.chunk;
    }

    /// The result of opening a chunk's slot, and the chunk's frame; `false` where opening must be
    /// tried again.
    pub(super) fn begun(&mut self, chunk: usize, begun: Begun, frame: Option<Filling>) -> bool {
        match begun {
            Begun::NotYet(why, begin) => {
                if let Some(c) = self.chunks.get_mut(chunk).filter(|c| matches!(c.phase, StorePhase::Opening)) {
                    c.phase = StorePhase::Waiting(begin);
                    self.refused = why;
                    return false;
                }
            }
            Begun::Open(sink) => match self.chunks.get_mut(chunk).filter(|c| matches!(c.phase, StorePhase::Opening)) {
                Some(c) => {
                    c.layout = sink.layout().clone();
                    c.phase = StorePhase::Open(sink);
                    c.frame = frame;
                }
                None => self.unused.extend(frame),
            },
            Begun::AlreadyThere => {
                if self.is_living(chunk) {
                    self.result.already_there += 1;
                    self.over(chunk);
                }
            }
            Begun::Shed(cause) => self.shed(chunk, cause),
        }
        true
    }

    /// The gather of `step` is about to be given to the device: its parts, and the fences that it
    /// has to wait for. `None` where its chunk has been begun again.
    pub(super) fn submit(&mut self, step: &StoreStep) -> Option<(Vec<Part>, Vec<Fence>)> {
        let Some(chunk) = self.chunks.get_mut(step.chunk).filter(|c| c.attempt == step.attempt) else {
            self.busy_over -= 1;
            return None;
        };
        chunk.queued += 1;
        self.queued += 1;
        let mut after = Vec::new();
        let computed = self.computed.get(step.layers.clone()).unwrap_or_default();
        computed.iter().flatten().for_each(|fence| add_fence(&mut after, fence.clone()));
        Some((self.parts(step), after))
    }

    /// The gather of `step` has been submitted to the device and ends at `fence`.
    pub(super) fn submitted(&mut self, step: &StoreStep, fence: &Fence) {
        step.layers.clone().for_each(|layer| self.order.ends_at(layer, fence));
        self.unqueue(step);
    }

    /// The gather of `step` does not wait in the device's queue any more.
    fn unqueue(&mut self, step: &StoreStep) {
        let Some(chunk) = self.chunks.get_mut(step.chunk).filter(|c| c.attempt == step.attempt) else { return };
        let Some(awaited) = chunk.awaited.get_mut(step.layers.clone()).filter(|a| a.contains(&true)) else { return };
        chunk.queued -= 1;
        self.queued -= 1;
        if matches!(chunk.phase, StorePhase::Over) {
            return awaited.fill(false);
        }
        for (layer, awaited) in step.layers.clone().zip(awaited) {
            *awaited = false;
            self.order.came(layer);
        }
    }

    fn parts(&self, step: &StoreStep) -> Vec<Part> {
        let Some(chunk) = self.chunks.get(step.chunk) else { return Vec::new() };
        let part = |layer: usize| {
            let extent = chunk.layout.extents.get(layer)?;
            Some(Part {
                layer,
                staging_offset: step.span.staging_offset(extent.offset),
                tokens: chunk.tokens as usize,
                padded_len: extent.padded_len as usize,
                codec: extent.codec,
                plan: Arc::clone(chunk.plans.of(layer)?),
            })
        };
        step.layers.clone().filter_map(part).collect()
    }

    /// The layers of `step` lie in `staging`; they are counted where that is the chunk's frame.
    pub(super) fn gathered_into(&mut self, step: &StoreStep, staging: &Buf) {
        if let Some(chunk) = self.chunks.get_mut(step.chunk)
            && chunk.frame.as_ref().is_some_and(|frame| frame.holds(staging))
        {
            chunk.framed += step.layers.len();
        }
    }

    /// A gather has ended. Returns the sink to write to, where it went well and the chunk is not
    /// over.
    pub(super) fn gathered(&mut self, step: &StoreStep, crcs: Result<&[u32], ShedCause>) -> Option<Arc<dyn ChunkSink>> {
        self.unqueue(step);
        let chunk = self.chunks.get_mut(step.chunk)?;
        if chunk.attempt != step.attempt {
            self.busy_over -= 1;
            return None;
        }
        chunk.gathering -= 1;
        let StorePhase::Open(sink) = &chunk.phase else {
            self.busy_over -= 1;
            return None;
        };
        let sink = Arc::clone(sink);
        let crcs = match crcs {
            Ok(crcs) if crcs.len() == step.layers.len() => crcs,
            Ok(_) => return self.shed_for(step.chunk, ShedCause::Internal),
            Err(cause) => return self.shed_for(step.chunk, cause),
        };
        for (layer, &crc) in step.layers.clone().zip(crcs) {
            if let (Some(to), Some(done)) = (chunk.crcs.get_mut(layer), chunk.gathered.get_mut(layer)) {
                *to = crc;
                *done = true;
                self.ungathered -= chunk.layout.extents.get(layer).map_or(0, |e| u64::from(e.payload));
            }
            if let Some(left) = self.left.get_mut(layer) {
                *left -= 1;
            }
        }
        Some(sink)
    }

    /// The chunk of `step` does not fit its codec. It is prepared to be opened again without one,
    /// unless the caller may have changed layers already. Returns the sink: call its `misfit` and
    /// give the answer to [`Self::begun_again`]. `None` for a gather of an attempt that is over. To
    /// be called before [`Self::gathered`].
    pub(super) fn misfit(&mut self, step: &StoreStep) -> Option<Arc<dyn ChunkSink>> {
        let chunk = self.chunks.get_mut(step.chunk).filter(|c| c.attempt == step.attempt)?;
        let StorePhase::Open(sink) = &chunk.phase else { return None };
        let sink = Arc::clone(sink);
        if self.given_back > 0 {
            return Some(sink);
        }
        chunk.phase = StorePhase::Opening;
        self.busy_over += chunk.gathering;
        self.queued -= chunk.queued;
        self.ungathered -= chunk.ungathered_bytes();
        for (layer, done) in chunk.gathered.iter_mut().enumerate() {
            if let Some(left) = self.left.get_mut(layer).filter(|_| *done) {
                *left += 1;
            }
            *done = false;
        }
        for (layer, awaited) in chunk.awaited.iter_mut().enumerate() {
            if !*awaited {
                self.order.comes_again(layer);
            }
            *awaited = true;
        }
        (chunk.next, chunk.gathering, chunk.queued, chunk.written) = (0, 0, 0, 0);
        self.unused.extend(chunk.frame.take());
        chunk.framed = 0;
        chunk.attempt += 1;
        self.ungathered += chunk.ungathered_bytes();
        Some(sink)
    }

    /// The answer of the sink of [`Self::misfit`]: the chunk is opened with `begin`, or shed where
    /// there is none.
    pub(super) fn begun_again(&mut self, step: &StoreStep, begin: Option<BeginPut>) {
        let chunk = self.chunks.get_mut(step.chunk).filter(|c| c.attempt == step.attempt + 1);
        let Some(chunk) = chunk.filter(|c| matches!(c.phase, StorePhase::Opening)) else { return };
        match begin {
            Some(begin) => chunk.phase = StorePhase::Waiting(begin),
            None => self.shed(step.chunk, ShedCause::Codec),
        }
    }

    fn shed_for(&mut self, chunk: usize, cause: ShedCause) -> Option<Arc<dyn ChunkSink>> {
        self.shed(chunk, cause);
        None
    }

    /// A write of the step's extents went well.
    pub(super) fn written(&mut self, step: &StoreStep) {
        if let Some(chunk) = self.chunks.get_mut(step.chunk).filter(|c| c.attempt == step.attempt) {
            chunk.written += step.layers.len();
        }
    }

    /// Whether the writes of a step are wanted: its chunk has not been shed or begun again since.
    pub(super) fn is_open(&self, step: &StoreStep) -> bool {
        let of = self.chunks.get(step.chunk).filter(|c| c.attempt == step.attempt);
        of.is_some_and(|c| matches!(c.phase, StorePhase::Open(_)))
    }

    /// A write of the step's extents failed.
    pub(super) fn not_written(&mut self, step: &StoreStep, cause: ShedCause) {
        if self.chunks.get(step.chunk).is_some_and(|c| c.attempt == step.attempt) {
            self.shed(step.chunk, cause);
        }
    }

    /// Takes the chunks that can be committed now, with their CRCs.
    pub(super) fn take_complete(&mut self) -> Vec<(usize, Arc<dyn ChunkSink>, Vec<u32>)> {
        let mut complete = Vec::new();
        for (i, chunk) in self.chunks.iter_mut().enumerate() {
            if chunk.written < chunk.crcs.len() || !matches!(chunk.phase, StorePhase::Open(_)) {
                continue;
            }
            if let StorePhase::Open(sink) = std::mem::replace(&mut chunk.phase, StorePhase::Committing) {
                let is_framed = chunk.frame.is_some();
                let crcs = if is_framed { chunk.crcs.clone() } else { std::mem::take(&mut chunk.crcs) };
                complete.push((i, sink, crcs));
            }
        }
        complete
    }

    /// The frame of a chunk that was committed, and the CRCs of its extents, where all of them lie
    /// in it: to be published without the lock, before [`Self::committed`].
    pub(super) fn take_frame(&mut self, chunk: usize) -> Option<(Filling, Vec<u32>)> {
        let c = self.chunks.get_mut(chunk).filter(|c| matches!(c.phase, StorePhase::Committing))?;
        let frame = c.frame.take_if(|_| c.framed == c.crcs.len())?;
        Some((frame, std::mem::take(&mut c.crcs)))
    }

    /// A commit is over; `false` where another process was quicker.
    pub(super) fn committed(&mut self, chunk: usize, result: Result<bool, ShedCause>) {
        if !self.is_living(chunk) {
            return;
        }
        match result {
            Ok(false) => {
                self.result.already_there += 1;
                self.over(chunk);
            }
            Ok(true) => {
                if let Some(c) = self.chunks.get(chunk) {
                    self.result.stored += 1;
                    self.result.tokens += c.tokens as usize;
                    self.result.bytes += c.layout.payload();
                }
                self.over(chunk);
            }
            Err(cause) => self.shed(chunk, cause),
        }
    }

    /// Gives up `chunk`, unless it is over, and the chunks after it whose slots are not open.
    pub(super) fn shed(&mut self, chunk: usize, cause: ShedCause) {
        for at in chunk..self.chunks.len() {
            // A slot that is just being opened is given back when it comes.
            let is_unopened = |phase: &StorePhase| matches!(phase, StorePhase::Waiting(_) | StorePhase::Opening);
            let unopened = self.chunks.get(at).is_some_and(|c| is_unopened(&c.phase));
            if self.is_living(at) && (at == chunk || unopened) {
                self.result.count_shed(cause, 1);
                self.over(at);
            }
        }
    }

    /// Gives up all chunks without a slot, for the cause for which they found no room.
    pub(super) fn shed_unopened(&mut self) {
        if let Some(first) = self.chunks.iter().position(|c| matches!(c.phase, StorePhase::Waiting(_))) {
            self.shed(first, self.refused);
        }
    }

    /// Gives up the chunks that are still to be found.
    fn shed_unplanned(&mut self, cause: ShedCause) {
        if let Some(at_most) = self.unplanned.take() {
            self.result.count_shed(cause, at_most);
            self.update_finished();
        }
    }

    /// Gives up every chunk that still needs the caller's memory.
    pub(super) fn shed_ungathered(&mut self, cause: ShedCause) {
        self.shed_unplanned(cause);
        for at in 0..self.chunks.len() {
            if self.chunks.get(at).is_some_and(|c| c.gathered.iter().any(|g| !g)) {
                self.shed(at, cause);
            }
        }
    }

    /// Gives up every chunk whose commit was not begun.
    pub(super) fn shed_uncommitted(&mut self, cause: ShedCause) {
        self.shed_unplanned(cause);
        for at in 0..self.chunks.len() {
            if self.chunks.get(at).is_some_and(|c| !matches!(c.phase, StorePhase::Committing)) {
                self.shed(at, cause);
            }
        }
    }

    fn is_living(&self, chunk: usize) -> bool {
        self.chunks.get(chunk).is_some_and(|c| !matches!(c.phase, StorePhase::Over))
    }

    /// Nothing more is done for a chunk, and no layer waits for it.
    fn over(&mut self, chunk: usize) {
        let Some(c) = self.chunks.get_mut(chunk) else { return };
        c.phase = StorePhase::Over;
        self.unused.extend(c.frame.take());
        self.busy_over += c.gathering;
        self.ungathered -= c.ungathered_bytes();
        for (left, &done) in self.left.iter_mut().zip(&c.gathered) {
            *left -= usize::from(!done);
        }
        for (layer, _) in c.awaited.iter().enumerate().filter(|(_, awaited)| **awaited) {
            self.order.came(layer);
        }
        c.gathered.fill(true);
        self.living -= 1;
        self.update_finished();
    }

    fn update_finished(&mut self) {
        self.finished = self.living == 0;
    }

    /// What is not needed any more, to be dropped without the lock: frames, and of a store that is
    /// over plans, CRCs, sinks.
    pub(super) fn take_leftovers(&mut self) -> impl Sized + use<> {
        let is_idle = self.finished && self.busy_over == 0 && self.queued == 0;
        let all = is_idle.then(|| (std::mem::take(&mut self.chunks), std::mem::take(&mut self.computed)));
        (std::mem::take(&mut self.unused), all)
    }

    /// Whether nothing is left to do but to wait for commits.
    pub(super) fn only_commits(&self) -> bool {
        self.unplanned.is_none()
            && self.chunks.iter().all(|c| matches!(c.phase, StorePhase::Committing | StorePhase::Over))
    }

    pub(super) fn result(&self) -> &StoreResult {
        &self.result
    }

    /// Payload bytes that were not gathered yet.
    pub(super) fn ungathered_bytes(&self) -> u64 {
        self.ungathered
    }
}

impl StoreChunkState {
    fn new(chunk: StoreChunk, layers: usize) -> Self {
        Self {
            layout: chunk.layout,
            tokens: chunk.tokens,
            plans: chunk.plans,
            phase: StorePhase::Waiting(chunk.begin),
            attempt: 0,
            next: 0,
            gathered: vec![false; layers],
            awaited: vec![true; layers],
            gathering: 0,
            queued: 0,
            written: 0,
            crcs: vec![0; layers],
            frame: None,
            framed: 0,
        }
    }

    fn ungathered_bytes(&self) -> u64 {
        self.layout.extents.iter().zip(&self.gathered).filter(|(_, g)| !**g).map(|(e, _)| u64::from(e.payload)).sum()
    }

    /// The next gather of the chunk; `None` where it has none now, or waits for a larger group.
    fn peek(&self, at: usize, ready: usize, forced: usize, group_bytes: usize) -> Option<StoreStep> {
        let StorePhase::Open(sink) = &self.phase else { return None };
        if self.next >= ready {
            return None;
        }
        let (end, full) = group_end(&self.layout, self.next, ready, group_bytes);
        if !full && forced <= self.next {
            return None;
        }
        let layers = self.next..end;
        let span = GroupSpan::of(&self.layout, &layers, false)?;
        Some(StoreStep { chunk: at, attempt: self.attempt, span, layers, drive: sink.drive() })
    }

    fn step(&mut self, at: usize, ready: usize, forced: usize, group_bytes: usize) -> Option<StoreStep> {
        let step = self.peek(at, ready, forced, group_bytes)?;
        self.next = step.layers.end;
        self.gathering += 1;
        Some(step)
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;
    use std::time::Instant;

    use super::*;
    use crate::device::{HugePages, StagingOptions};
    use crate::geometry::{DType, Geometry, LayerKind, LayerSpec};
    use crate::io::{Done, Rejected, Request};
    use crate::key::ChunkKey;
    use crate::pipeline::StorePlan;
    use crate::tier::{FrameId, MemoryTier, PutId, Rank};

    struct Slot(SlotLayout);

    impl ChunkSink for Slot {
        fn layout(&self) -> &SlotLayout {
            &self.0
        }

        fn request(&self, _: u64, _: Buf, _: Done) -> Request {
            unreachable!("nothing is written")
        }

        fn drive(&self) -> usize {
            0
        }

        fn submit(&self, _: Request) -> std::result::Result<(), Rejected> {
            unreachable!("nothing is written")
        }

        fn fail(&self, _: &crate::error::Error) {
            unreachable!("nothing is written")
        }

        fn commit(&self, _: Vec<u32>, _: Box<dyn FnOnce(crate::error::Result<bool>) + Send>) {
            unreachable!("nothing is written")
        }
    }

    /// A store of one chunk of two layers, all of which are computed, and its slot.
    fn one_chunk() -> (StoreState, Arc<dyn ChunkSink>) {
        chunks(1)
    }

    /// The same of several chunks.
    fn chunks(count: usize) -> (StoreState, Arc<dyn ChunkSink>) {
        let layers = vec![LayerSpec::kv(LayerKind::Full, 1, 64); 2];
        let geometry = Geometry::new("m", DType::named("bf16").unwrap(), layers, 16).unwrap();
        let layout = SlotLayout::of_chunk(&geometry, 16);
        let sink: Arc<dyn ChunkSink> = Arc::new(Slot(layout.clone()));
        let chunk = |_| {
            let opened = Arc::clone(&sink);
            let begin: BeginPut = Box::new(move || Begun::Open(opened));
            let plans = ChunkPlans::new(Vec::new(), Arc::default());
            StoreChunk { layout: layout.clone(), tokens: 16, plans, begin }
        };
        let mut state = StoreState::new(count, 2, 1 << 20);
        state.plan(StorePlan { chunks: (0..count).map(chunk).collect(), ..StorePlan::default() });
        state.announce_all(None);
        (state, sink)
    }

    #[test]
    fn frames_are_neither_published_nor_given_back_under_the_lock() {
        let bytes = 64 << 10;
        let options = StagingOptions { bytes, slot_bytes: bytes, hugepages: HugePages::Off, numa: None };
        let tier = MemoryTier::new(&options).unwrap();
        let rank = Rank { turn: 0, depth: Reverse(0) };
        let id = FrameId { key: ChunkKey([1; 32]), put: PutId { drive: 0, sequence: 1 } };
        let used = |tier: &MemoryTier| tier.stats().used_bytes > 0;
        for is_late in [true, false] {
            let (mut state, sink) = one_chunk();
            let NextStep::Begin(at, _) = state.next(true, &[]) else { panic!("its slot is to be opened") };
            if is_late {
                state.shed(at, ShedCause::Closed);
            }
            assert!(state.begun(at, Begun::Open(sink), tier.reserve(id, bytes as u64, rank)));
            state.shed(at, ShedCause::Closed);
            assert!(used(&tier));
            drop(state.take_leftovers());
            assert!(!used(&tier));
        }
        let (mut state, sink) = one_chunk();
        let NextStep::Begin(at, _) = state.next(true, &[]) else { panic!("its slot is to be opened") };
        assert!(state.begun(at, Begun::Open(sink), tier.reserve(id, bytes as u64, rank)));
        let NextStep::Gather(step, Some(part)) = state.next(true, &[]) else { panic!("it is to be gathered") };
        state.gathered_into(&step, &part);
        assert!(state.submit(&step).is_some() && state.gathered(&step, Ok(&[1, 2])).is_some());
        drop(part);
        state.written(&step);
        assert_eq!(state.take_complete().len(), 1);
        let (frame, crcs) = state.take_frame(at).unwrap();
        state.committed(at, Ok(true));
        drop(state.take_leftovers());
        assert!(state.finished && tier.get(id, rank, Instant::now()).is_none());
        frame.publish(&crcs);
        assert_eq!(tier.get(id, rank, Instant::now()).unwrap().crc(1), Some(2));
    }

    #[test]
    fn a_chunk_that_fails_takes_the_one_with_it_whose_slot_is_just_being_opened() {
        let (mut state, sink) = chunks(2);
        let NextStep::Begin(first, begin) = state.next(true, &[]) else { panic!("its slot is to be opened") };
        assert!(state.begun(first, begin(), None));
        let second = (0..4).find_map(|_| match state.next(true, &[]) {
            NextStep::Begin(at, _) => Some(at),
            _ => None,
        });
        let second = second.expect("its slot is to be opened");
        state.shed(first, ShedCause::Io);
        assert!(state.begun(second, Begun::Open(sink), None));
        assert_eq!((state.result.stored, &state.result.sheds[..]), (0, &[(ShedCause::Io, 2)][..]));
    }

    #[test]
    fn a_gather_that_finds_no_staging_when_its_chunk_is_given_up_is_not_waited_for() {
        let (mut state, _) = one_chunk();
        let NextStep::Begin(at, begin) = state.next(true, &[]) else { panic!("its slot is to be opened") };
        assert!(state.begun(at, begin(), None));
        let NextStep::Gather(step, _) = state.next(true, &[]) else { panic!("it is to be gathered") };
        state.shed(at, ShedCause::StagingFull);
        assert!(!state.is_gathered_all());
        state.ungather(&step);
        assert!(state.is_gathered_all());
    }
}
