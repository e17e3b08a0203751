//! The pipeline on a device that submits its work first and does it later, as an accelerator does;
//! here both happen when the test says so.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::disk::{Fate, Slot};
use super::memory::{bring_damaged, tier_of, wait_used};
use super::world::{Kv, LAYERS, TOKENS, World};
use crate::device::{
    CopyJob, Device, Fence, HostDevice, KvMemory, PagedKv, Point, RopeShift, StagingOptions, StagingPool, Stream,
};
use crate::error::{ErrorKind, Result};
use crate::io::MemorySpace;
use crate::pipeline::{Load, LoadResult, MissCause, StoreResult};
use crate::tier::MemoryTier;

const T: usize = TOKENS as usize;
const STREAM: Stream = Stream(77);

/// A point with a number; a later one covers an earlier one.
struct Mark {
    number: usize,
    passed: AtomicBool,
}

impl Point for Mark {
    fn has_passed(&self) -> bool {
        self.passed.load(Ordering::SeqCst)
    }

    fn covers(&self, other: &dyn Point) -> bool {
        other.as_any().downcast_ref::<Self>().is_some_and(|o| o.number <= self.number)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn number(fence: &Fence) -> usize {
    fence.point().downcast_ref::<Mark>().unwrap().number
}

/// A device whose jobs wait until the test submits them, and then until it runs them.
struct Later {
    host: Arc<HostDevice>,
    queued: Mutex<Vec<CopyJob>>,
    running: Mutex<Vec<(Arc<Mark>, CopyJob)>>,
    changed: Condvar,
    marks: AtomicUsize,
    /// Numbers of the marks that streams were made to wait for, call by call.
    waits: Mutex<Vec<Vec<usize>>>,
    /// Numbers of the marks that jobs had to wait for, job by job.
    afters: Mutex<Vec<Vec<usize>>>,
    capturing: AtomicBool,
}

impl Later {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            host: HostDevice::new(1).unwrap(),
            queued: Mutex::default(),
            running: Mutex::default(),
            changed: Condvar::new(),
            marks: AtomicUsize::new(0),
            waits: Mutex::default(),
            afters: Mutex::default(),
            capturing: AtomicBool::new(false),
        })
    }

    fn mark(&self) -> Arc<Mark> {
        let number = self.marks.fetch_add(1, Ordering::SeqCst);
        Arc::new(Mark { number, passed: AtomicBool::new(false) })
    }

    /// Waits for `n` jobs and submits them; the numbers of their marks.
    fn submit(&self, n: usize) -> Vec<usize> {
        let mut numbers = Vec::new();
        while numbers.len() < n {
            let mut queued = self.queued.lock();
            while queued.is_empty() {
                self.changed.wait(&mut queued);
            }
            let mut job = queued.remove(0);
            drop(queued);
            let mark = self.mark();
            numbers.push(mark.number);
            let launched = job.launched.take();
            self.afters.lock().push(job.after.iter().map(number).collect());
            self.running.lock().push((Arc::clone(&mark), job));
            if let Some(launched) = launched {
                launched(Fence::new(mark));
            }
        }
        numbers
    }

    /// Submits what there is.
    fn submit_queued(&self) {
        let there = self.queued.lock().len();
        self.submit(there);
    }

    /// Waits for `n` jobs and puts them in the order of their layers: reads may end in any order.
    fn sort(&self, n: usize) {
        let mut queued = self.queued.lock();
        while queued.len() < n {
            self.changed.wait(&mut queued);
        }
        queued.sort_by_key(|job| job.parts.iter().map(|p| p.layer).max());
    }

    /// Does what was submitted.
    fn run(&self) {
        for (mark, job) in std::mem::take(&mut *self.running.lock()) {
            let (done, (tx, rx)) = (job.done, mpsc::channel());
            let then = move |staging, outcome| {
                done(staging, outcome);
                tx.send(()).unwrap();
            };
            self.host.copy(CopyJob { done: Box::new(then), ..job });
            rx.recv().unwrap();
            mark.passed.store(true, Ordering::SeqCst);
        }
    }
}

impl Device for Later {
    fn place(&self) -> MemorySpace {
        MemorySpace::Device(0)
    }

    fn copy(&self, job: CopyJob) {
        self.queued.lock().push(job);
        self.changed.notify_all();
    }

    fn turn_keys(&self, _: &PagedKv, _: &[RopeShift], _: &[Fence]) -> Result<()> {
        unreachable!("the pipeline turns no keys")
    }

    fn alloc_kv(&self, len: usize) -> Result<Arc<dyn KvMemory>> {
        self.host.alloc_kv(len)
    }

    fn staging_pool(&self, options: &StagingOptions) -> Result<Arc<StagingPool>> {
        self.host.staging_pool(options)
    }

    fn fence(&self, _: Stream) -> Result<Option<Fence>> {
        Ok((!self.capturing.load(Ordering::SeqCst)).then(|| Fence::new(self.mark())))
    }

    fn is_capturing(&self, _: Stream) -> Result<bool> {
        Ok(self.capturing.load(Ordering::SeqCst))
    }

    fn wait(&self, stream: Stream, fences: &[Fence]) -> Result<()> {
        assert_eq!(stream, STREAM);
        self.waits.lock().push(fences.iter().map(number).collect());
        Ok(())
    }

    fn close(&self) {}
}

/// A world on such a device, whose load groups are one layer of one chunk.
fn world() -> (Arc<Later>, World) {
    let device = Later::new();
    let w = World::on(Arc::clone(&device) as _, 64, 64, |_| {});
    (device, w)
}

#[test]
fn a_layer_is_ready_when_it_is_submitted_and_the_load_is_over_when_it_has_verified() {
    let (device, w) = world();
    let (slots, from) = stored(&device, &w, 3);
    let to = w.kv(3);
    let mut spec = w.load_spec(&to, &slots);
    spec.after = device.fence(STREAM).unwrap().into_iter().collect();
    let after: Vec<usize> = spec.after.iter().map(number).collect();
    device.afters.lock().clear();
    let load = w.pipeline().load(spec).unwrap();
    device.sort(3 * LAYERS);
    for layer in 0..LAYERS {
        let submitted = device.submit(3);
        assert_eq!(load.wait_layer_on(layer, STREAM).unwrap().tokens, 3 * T);
        let last = *submitted.iter().max().unwrap();
        assert_eq!(device.waits.lock().last().unwrap(), &[last], "the last of the layer's scatters covers the others");
    }
    assert!(!load.is_finished() && to.bytes().iter().flatten().all(|&b| b == 0), "nothing ran yet");
    assert!(device.afters.lock().iter().all(|a| *a == after), "every scatter waits for the caller's stream");
    assert_eq!(load.ticket().verified(), None);
    device.run();
    assert_eq!(load.wait_layer_landed(LAYERS - 1).unwrap().layer, LAYERS - 1);
    assert_eq!(load.wait().tokens, 3 * T);
    assert!(to.bytes() == from.bytes());
    assert_eq!(load.ticket().verified(), Some(true));
    w.assert_staging_free();
}

#[test]
fn a_layer_with_one_scatter_not_submitted_is_not_ready() {
    let (device, w) = world();
    let (slots, _) = stored(&device, &w, 3);
    let load = w.load(&w.kv(3), &slots);
    device.sort(3 * LAYERS);
    device.submit(2);
    let waiting = std::thread::spawn(move || {
        let ready = load.wait_layer_on(0, STREAM).unwrap();
        (load, ready)
    });
    for _ in 0..1000 {
        std::thread::yield_now();
    }
    assert!(!waiting.is_finished() && device.waits.lock().is_empty());
    let third = device.submit(1);
    let (load, ready) = waiting.join().unwrap();
    assert_eq!((ready.layer, device.waits.lock().last().unwrap()), (0, &third));
    device.submit(9);
    device.run();
    assert_eq!(load.wait().tokens, 3 * T);
}

#[test]
fn damage_is_told_after_the_layer_was_ready_and_before_the_load_is_over() {
    for layerwise in [true, false] {
        let (device, w) = world();
        let (slots, _) = stored(&device, &w, 3);
        w.disk.flip(slots[1].slot, slots[1].layout.extents[LAYERS - 1].offset + 5);
        let to = w.kv(3);
        let load = if layerwise { w.load(&to, &slots) } else { w.whole_load(&to, &slots) };
        device.submit(3 * LAYERS);
        let ready = load.wait_layer_on(LAYERS - 1, STREAM).unwrap();
        assert_eq!(ready.tokens, 3 * T, "nobody can know yet");
        let store = {
            let other = w.slots(1);
            let mut spec = w.store_spec(&to, &other);
            spec.depends_on = vec![load.ticket()];
            w.store(spec)
        };
        store.all_layers_on(STREAM).unwrap();
        device.submit(LAYERS);
        device.run();
        // The layer that does not verify is overwritten before the load finishes.
        assert!(load.wait_for(Duration::from_millis(1)).is_none());
        // So are layers of the next chunk that came before its header: none will verify any more.
        let result = end(&device, &load);
        assert_eq!((result.tokens, result.missed(MissCause::Corrupt)), (T, 1));
        assert_eq!(result.failed_blocks, (4..12).collect::<Vec<u32>>());
        let stored = store.wait();
        assert_eq!((stored.stored, stored.sheds.len()), (0, 1), "nothing computed from it is stored");
    }
}

/// Does all that comes until the load is over.
fn end(device: &Later, load: &Load) -> LoadResult {
    loop {
        device.submit_queued();
        device.run();
        if let Some(result) = load.wait_for(Duration::from_millis(1)) {
            return result;
        }
    }
}

/// As [`stored`], two chunks, of which the second is in memory with a bit of layer 1 turned.
fn damaged_in_memory() -> (Arc<Later>, World, Arc<MemoryTier>, Vec<Arc<Slot>>, Kv) {
    let (device, tier) = (Later::new(), tier_of(2));
    let of_pipeline = Arc::clone(&tier);
    let w = World::on(Arc::clone(&device) as _, 64, 64, |o| o.memory = Some(of_pipeline));
    let (slots, from) = stored(&device, &w, 2);
    tier.retain(|_| false);
    wait_used(&tier, 0);
    bring_damaged(&w, &tier, &slots[1], &[1]);
    (device, w, tier, slots, from)
}

#[test]
fn what_memory_had_damaged_fails_its_chunk_when_a_stream_may_have_used_it() {
    for layerwise in [true, false] {
        let (device, w, tier, slots, from) = damaged_in_memory();
        let to = w.kv(2);
        let load = if layerwise { w.load(&to, &slots) } else { w.whole_load(&to, &slots) };
        device.submit(2 * LAYERS);
        assert_eq!(load.wait_layer_on(LAYERS - 1, STREAM).unwrap().tokens, 2 * T, "nobody can know yet");
        device.run();
        let result = end(&device, &load);
        assert_eq!((result.tokens, result.missed(MissCause::Corrupt)), (T, 1));
        assert_eq!((load.ticket().verified(), tier.stats().damaged), (Some(false), 1));
        assert_eq!(w.disk.bad(), [], "the chunk on the drive is good");
        assert!(to.chunk_bytes(1)[2..4].iter().flatten().all(|b| *b == 0), "keys and values of layer 1 are wiped");
        let again = if layerwise { w.load(&to, &slots) } else { w.whole_load(&to, &slots) };
        assert_eq!(end(&device, &again).tokens, 2 * T);
        assert!(to.bytes() == from.bytes());
    }
}

#[test]
fn what_memory_had_damaged_is_read_from_the_drive_before_its_layer_is_ready() {
    let (device, w, tier, slots, from) = damaged_in_memory();
    w.disk.pause();
    let to = w.kv(2);
    let load = w.load(&to, &slots);
    // All layers of the second chunk come from memory, before any of the first.
    device.submit(LAYERS);
    device.run();
    // The header is read by itself; of the second chunk one layer is read.
    w.disk.wait_held(1 + LAYERS + 2);
    while let Some(at) = w.disk.held().iter().position(|seen| seen.slot == slots[0].slot) {
        w.disk.end_one(at);
    }
    device.submit(LAYERS);
    load.wait_layer_on(0, STREAM).unwrap();
    let (waiting, submitted) = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| load.wait_layer_on(1, STREAM));
        for _ in 0..1000 {
            std::thread::yield_now();
        }
        assert!(!waiting.is_finished(), "the layer's damaged bytes are all that there is of it");
        w.disk.run();
        let submitted = device.submit(1);
        (waiting.join().unwrap(), submitted)
    });
    assert_eq!((waiting.unwrap().tokens, device.waits.lock().last().unwrap()), (2 * T, &submitted));
    device.run();
    assert_eq!((end(&device, &load).tokens, tier.stats().damaged), (2 * T, 1));
    assert_eq!(load.ticket().verified(), Some(true));
    assert!(to.bytes() == from.bytes());
}

#[test]
fn a_layer_that_lands_when_its_chunk_has_failed_without_a_header_is_wiped() {
    let (device, w) = world();
    let (slots, _) = stored(&device, &w, 1);
    w.disk.pause();
    let to = w.kv(1).filled(9);
    let load = w.load(&to, &slots);
    // The header is read by itself.
    w.disk.wait_held(1 + LAYERS);
    let held = |offset: u64| w.disk.held().iter().position(|seen| seen.offset == offset).unwrap();
    w.disk.end_one(held(slots[0].layout.extents[1].offset));
    device.submit(1);
    w.disk.fate(slots[0].slot, Fate::Fail(ErrorKind::Io));
    w.disk.end_one(held(u64::from(slots[0].layout.header_offset)));
    assert!(load.wait_for(Duration::from_millis(1)).is_none(), "the device is still in its blocks");
    device.run();
    device.submit(1);
    device.run();
    assert_eq!(load.wait().tokens, 0);
    // Keys and values of each layer.
    let bytes = to.chunk_bytes(0);
    assert!(bytes[2..4].iter().flatten().all(|b| *b == 0) && bytes[4..].iter().flatten().any(|b| *b != 0));
    w.disk.run();
}

#[test]
fn a_load_that_waits_for_the_device_alone_is_not_given_up() {
    let device = Later::new();
    let w = World::on(Arc::clone(&device) as _, 64, 64, |o| o.io_timeout = Duration::from_millis(150));
    let (slots, from) = stored(&device, &w, 1);
    let to = w.kv(1);
    let load = w.load(&to, &slots);
    device.sort(LAYERS);
    // Much longer than two time-outs of I/O: the caller's stream may have much to do.
    assert_eq!(load.wait_for(Duration::from_millis(1000)), None);
    assert_eq!(end(&device, &load).tokens, T);
    assert!(to.bytes() == from.bytes());
}

#[test]
fn a_cancelled_load_gives_the_memory_back_only_when_the_device_has_left_it() {
    let (device, w) = world();
    let (slots, _) = stored(&device, &w, 1);
    let to = w.kv(1);
    let load = w.load(&to, &slots);
    device.submit(1);
    let cancelled = load.cancel();
    device.run();
    cancelled.wait();
    let before = to.bytes();
    while !device.queued.lock().is_empty() {
        device.submit_queued();
        device.run();
    }
    assert!(to.bytes() == before, "written after the memory was given back");
    assert!(load.wait().cancelled);
}

#[test]
fn gathers_wait_for_their_layers_and_streams_wait_for_gathers() {
    let (device, w) = world();
    let (slots, from) = (w.slots(2), w.kv(2).filled(3));
    let store = w.store(w.store_spec(&from, &slots));
    for layer in 0..LAYERS {
        store.layer_on(layer, STREAM).unwrap();
        let computed = device.marks.load(Ordering::SeqCst) - 1;
        let submitted = device.submit(2);
        assert_eq!(std::mem::take(&mut *device.afters.lock()), [[computed]; 2]);
        store.wait_gathered_on(layer, STREAM).unwrap();
        assert_eq!(device.waits.lock().last().unwrap(), &[*submitted.iter().max().unwrap()]);
        assert!(!store.gathered(layer), "the host learns it later");
    }
    device.run();
    store.wait_gathered_all().unwrap();
    assert_eq!(store.wait(), StoreResult { stored: 2, tokens: 2 * T, bytes: 2 * 4 * 8192, ..StoreResult::default() });
}

#[test]
fn a_stream_waits_for_no_gather_of_what_was_shed() {
    let (device, w) = world();
    let (slots, from) = (w.slots(1), w.kv(1).filled(3));
    w.disk.fate(slots[0].slot, Fate::Fail(ErrorKind::Io));
    let store = w.store(w.store_spec(&from, &slots));
    store.layer_on(0, STREAM).unwrap();
    device.submit(1);
    device.run();
    assert_eq!(store.wait().stored, 0);
    store.wait_gathered_on(LAYERS - 1, STREAM).unwrap();
}

#[test]
fn hooks_do_nothing_on_a_stream_that_is_being_captured() {
    let (device, w) = world();
    let (slots, from) = (w.slots(1), w.kv(1).filled(3));
    let store = w.store(w.store_spec(&from, &slots));
    device.capturing.store(true, Ordering::SeqCst);
    store.layer_on(0, STREAM).unwrap();
    store.all_layers_on(STREAM).unwrap();
    assert!(store.wait_gathered(0).is_err(), "the layer was not taken for computed");
    device.capturing.store(false, Ordering::SeqCst);
    store.all_layers_on(STREAM).unwrap();
    device.submit(LAYERS);
    device.run();
    assert_eq!(store.wait().stored, 1);
}

/// `chunks` chunks on the disk and the memory they came from.
fn stored(device: &Later, w: &World, chunks: usize) -> (Vec<Arc<Slot>>, Kv) {
    let (slots, kv) = (w.slots(chunks), w.kv(chunks).filled(7));
    let store = w.store(w.store_spec(&kv, &slots));
    store.all_layers();
    device.submit(chunks * LAYERS);
    device.run();
    assert_eq!(store.wait().stored, chunks);
    (slots, kv)
}
