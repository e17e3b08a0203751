use std::any::Any;
use std::sync::mpsc;

use super::*;
use crate::device::{Gate, HostMemory, HugePages, Launched, PagedKv, Part, Point};
use crate::format::layout::SlotCodec;
use crate::geometry::{LayerKind, LayerSpec};
use crate::paged::{ChunkPlan, KvLayout, KvShape, Packing, PagedLayout};

const TOKENS: usize = 64;
/// Miri takes a second for some ten thousand bytes.
const HEAD_BYTES: u32 = if cfg!(miri) { 8 } else { 64 };
const TOKEN_BYTES: usize = 4 * HEAD_BYTES as usize;

struct Rig {
    blocks: u32,
    device: Arc<HostDevice>,
    kv: Arc<PagedKv>,
    memories: Vec<Arc<HostMemory>>,
    pool: Arc<StagingPool>,
}

fn rig(workers: usize) -> Rig {
    rig_for(workers, 1)
}

/// A rig with slots for so many jobs at once: no two may write the same.
fn rig_for(workers: usize, jobs: usize) -> Rig {
    let blocks = (4 * jobs) as u32;
    let shape = KvShape { layout: KvLayout::Nhd, packing: Packing::Inner, block_tokens: 16, num_blocks: blocks };
    let layout = PagedLayout::per_layer(&[LayerSpec::kv(LayerKind::Full, 2, HEAD_BYTES)], shape).unwrap();
    let (kv, memories) = PagedKv::alloc_zeroed(layout).unwrap();
    let options = StagingOptions { bytes: 1 << 20, slot_bytes: 32 << 10, hugepages: HugePages::Off, numa: None };
    let device = HostDevice::new(workers).unwrap();
    Rig { blocks, device, kv, memories, pool: StagingPool::new(&options).unwrap() }
}

impl Rig {
    fn part(&self) -> Part {
        self.nth_part(0)
    }

    fn nth_part(&self, n: usize) -> Part {
        let slots: Vec<i64> = (n * TOKENS..(n + 1) * TOKENS).map(|slot| slot as i64).collect();
        let plan = Arc::new(ChunkPlan::new(&slots, None, 16, self.blocks).unwrap());
        Part { layer: 0, staging_offset: 0, tokens: TOKENS, padded_len: 0, codec: SlotCodec::None, plan }
    }

    fn scatter_with(&self, gate: &Arc<Gate>, done: impl FnOnce(Result<CopyOutcome>) + Send + 'static) {
        self.scatter_nth(0, gate, done);
    }

    fn scatter_nth(&self, n: usize, gate: &Arc<Gate>, done: impl FnOnce(Result<CopyOutcome>) + Send + 'static) {
        let mut staging = self.pool.try_take().unwrap();
        staging.as_mut_slice().fill(7);
        let job = self.job(KvDirection::IntoKv, staging, vec![self.nth_part(n)], done);
        self.device.copy(CopyJob { gate: Arc::clone(gate), ..job });
    }

    fn gather_with(&self, parts: Vec<Part>, done: impl FnOnce(Result<CopyOutcome>) + Send + 'static) {
        let staging = self.pool.try_take().unwrap();
        self.device.copy(self.job(KvDirection::OutOfKv, staging, parts, done));
    }

    fn job(
        &self,
        direction: KvDirection,
        staging: Buf,
        parts: Vec<Part>,
        done: impl FnOnce(Result<CopyOutcome>) + Send + 'static,
    ) -> CopyJob {
        CopyJob::new(direction, Arc::clone(&self.kv), staging, parts, |staging, outcome| {
            drop(staging);
            done(outcome);
        })
    }

    fn written(&self) -> bool {
        let mut bytes = vec![0; self.blocks as usize * 16 * TOKEN_BYTES];
        self.memories[0].read(0, &mut bytes).unwrap();
        bytes.contains(&7)
    }
}

#[test]
fn a_closed_gate_skips_the_job_and_gives_the_staging_back() {
    let rig = rig(1);
    let gate = Arc::new(Gate::new());
    gate.close();
    let (tx, rx) = mpsc::channel();
    rig.scatter_with(&gate, move |outcome| tx.send(outcome.unwrap()).unwrap());
    assert_eq!(rx.recv().unwrap(), CopyOutcome::skipped());
    rig.device.close();
    assert!(!rig.written());
    assert_eq!(rig.pool.taken(), 0);
}

#[test]
fn a_done_callback_may_close_its_own_gate() {
    let rig = rig(1);
    let gate = Arc::new(Gate::new());
    let (tx, rx) = mpsc::channel();
    let inner = Arc::clone(&gate);
    rig.scatter_with(&gate, move |s| {
        inner.close();
        tx.send(s.unwrap().skipped).unwrap();
    });
    assert!(!rx.recv().unwrap());
    assert!(rig.written() && gate.is_closed());
}

/// A point that has passed.
struct Passed;

impl Point for Passed {
    fn has_passed(&self) -> bool {
        true
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[test]
fn when_done_is_called_the_job_holds_nothing_of_the_callers() {
    let rig = rig(1);
    let (tx, rx) = mpsc::channel();
    for direction in [KvDirection::IntoKv, KvDirection::OutOfKv] {
        let (point, token) = (Arc::new(Passed), Arc::new(()));
        let (fence_left, callback_left) = (Arc::downgrade(&point), Arc::downgrade(&token));
        let tx = tx.clone();
        let left = move || tx.send((fence_left.strong_count(), callback_left.strong_count())).unwrap();
        let job = rig.job(direction, rig.pool.try_take().unwrap(), vec![rig.part()], move |_| left());
        let (after, launched): (_, Launched) = (vec![Fence::new(point)], Box::new(move |_| drop(token)));
        rig.device.copy(CopyJob { after, launched: Some(launched), ..job });
        assert_eq!(rx.recv().unwrap(), (0, 0));
    }
}

#[test]
fn after_close_of_the_gate_no_byte_is_written_whatever_is_queued() {
    let rig = rig_for(2, 4);
    for round in 0..if cfg!(miri) { 4 } else { 50 } {
        let gate = Arc::new(Gate::new());
        let (tx, rx) = mpsc::channel();
        for n in 0..4 {
            let tx = tx.clone();
            rig.scatter_nth(n, &gate, move |s| tx.send(s.unwrap().skipped).unwrap());
        }
        for _ in 0..round * 20 {
            std::hint::spin_loop();
        }
        gate.close();
        rig.memories[0].write(0, &vec![1; 16 * 16 * TOKEN_BYTES]).unwrap();
        drop(tx);
        assert_eq!(rx.iter().count(), 4);
        assert!(!rig.written(), "round {round}");
    }
}

#[test]
fn a_panic_in_a_callback_or_a_job_costs_nobody_the_worker() {
    let rig = rig(1);
    let gate = Arc::new(Gate::new());
    rig.scatter_with(&gate, |_| panic!("on purpose"));
    let (tx, rx) = mpsc::channel();
    rig.scatter_with(&gate, move |s| tx.send(s.unwrap().crcs.len()).unwrap());
    assert_eq!(rx.recv().unwrap(), 1);
    assert_eq!(guarded(|| panic!("on purpose")).unwrap_err().kind(), ErrorKind::Internal);
}

#[test]
fn a_job_that_does_not_fit_is_refused_with_its_layer() {
    let rig = rig(1);
    let plan = |slots: &[i64], bt, nb| Arc::new(ChunkPlan::new(slots, None, bt, nb).unwrap());
    let ok = rig.part();
    let bad = [
        Part { layer: 1, ..ok.clone() },
        Part { staging_offset: (32 << 10) - TOKENS * TOKEN_BYTES + 1, ..ok.clone() },
        Part { staging_offset: usize::MAX, ..ok.clone() },
        Part { padded_len: (32 << 10) + 1, ..ok.clone() },
        Part { tokens: TOKENS - 1, ..ok.clone() },
        Part { tokens: usize::MAX, ..ok.clone() },
        Part { plan: plan(&[0], 8, 4), ..ok.clone() },
        Part { plan: plan(&[64], 16, 5), ..ok.clone() },
    ];
    for part in bad {
        let what = format!("{part:?}");
        let (tx, rx) = mpsc::channel();
        rig.gather_with(vec![ok.clone(), part], move |outcome| tx.send(outcome).unwrap());
        let error = rx.recv().unwrap().err().unwrap_or_else(|| panic!("{what} was taken"));
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{what}");
    }
}

#[test]
fn loads_go_before_stores_but_stores_get_their_turn() {
    let rig = rig(1);
    let gate = Arc::new(Gate::new());
    let (order, seen) = mpsc::channel();
    let (release, held) = mpsc::channel::<()>();
    let (begin, begun) = mpsc::channel();
    rig.scatter_with(&gate, move |_| {
        begin.send(()).unwrap();
        held.recv().unwrap();
    });
    begun.recv().unwrap();
    let stores = order.clone();
    rig.gather_with(vec![rig.part()], move |_| stores.send("store").unwrap());
    for _ in 0..10 {
        let loads = order.clone();
        rig.scatter_with(&gate, move |_| loads.send("load").unwrap());
    }
    drop(order);
    release.send(()).unwrap();
    let order: Vec<_> = seen.iter().collect();
    assert_eq!(order.iter().position(|o| *o == "store"), Some(GATHER_TURN as usize - 1), "{order:?}");
}

#[test]
fn closing_finishes_what_is_queued_and_refuses_what_comes_later() {
    let rig = rig_for(2, 20);
    let gate = Arc::new(Gate::new());
    let (tx, rx) = mpsc::channel();
    for n in 0..20 {
        let tx = tx.clone();
        rig.scatter_nth(n, &gate, move |s| tx.send(s.is_ok()).unwrap());
    }
    rig.device.close();
    assert_eq!(rx.try_iter().filter(|ok| *ok).count(), 20);
    let (tx, rx) = mpsc::channel();
    rig.scatter_with(&gate, move |s| tx.send(s.unwrap_err().kind()).unwrap());
    assert_eq!(rx.recv().unwrap(), ErrorKind::Closed);
    assert_eq!(rig.pool.taken(), 0);
}

#[test]
fn the_last_handle_may_be_dropped_in_a_callback() {
    let rig = rig(1);
    let (tx, rx) = mpsc::channel();
    let (release, held) = mpsc::channel::<()>();
    let last = Arc::clone(&rig.device);
    rig.scatter_with(&Arc::new(Gate::new()), move |_| {
        held.recv().unwrap();
        drop(last);
        tx.send(()).unwrap();
    });
    drop(rig);
    release.send(()).unwrap();
    rx.recv().unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "Miri does not fork")]
#[expect(unsafe_code, reason = "forks")]
fn a_forked_child_that_drops_the_last_handle_waits_for_no_thread() {
    let device = HostDevice::new(2).unwrap();
    // SAFETY: the child only runs the code below and leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(device)));
        // SAFETY: ends the child without running anything of the test harness.
        unsafe { libc::_exit(i32::from(dropped.is_err())) };
    }
    let mut status = -1;
    // SAFETY: `status` is a valid place.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "the child waited for a thread that it does not have");
}
