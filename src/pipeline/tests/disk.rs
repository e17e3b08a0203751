//! A disk in memory: slots of bytes, and transfers that end when and how the test says.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::SlotLayout;
use crate::format::record::KeyKind;
use crate::format::slot::SlotHeader;
use crate::io::{Buf, Completion, DirectFile, Done, FileOptions, Op, Rejected, Request};
use crate::key::ChunkKey;
use crate::pipeline::{ChunkSink, ChunkSource, MissCause};
use crate::tier::{FrameId, PutId};

/// How a transfer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Good,
    Fail(ErrorKind),
    /// Reported as timed out; the disk keeps the buffer until [`Disk::let_go`], which also ends
    /// this fate.
    Hang,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) slot: usize,
    pub(super) offset: u64,
    pub(super) write: bool,
}

type CommitDone = Box<dyn FnOnce(Result<bool>) + Send>;

struct Pending {
    seen: Seen,
    request: Request,
}

#[derive(Default)]
struct Inside {
    slots: Vec<Vec<u8>>,
    queue: VecDeque<Pending>,
    /// Transfers end by themselves.
    running: bool,
    fates: HashMap<usize, Fate>,
    busy: usize,
    /// A slot of which every transfer is refused as busy.
    busy_slot: Option<usize>,
    refused: Vec<Seen>,
    /// Every transfer is refused with this error.
    broken: Option<ErrorKind>,
    /// Writes that failed, and those that were given up before they were taken.
    failed: Vec<(usize, ErrorKind)>,
    log: Vec<Seen>,
    hanging: Vec<Buf>,
    bad: Vec<(usize, MissCause)>,
    committed: Vec<usize>,
    commits: Option<Vec<CommitDone>>,
    /// Another process has stored what is committed.
    late: bool,
    stop: bool,
}

/// The disk. Two threads end transfers while it runs; paused, the test ends them one by one.
#[derive(Default)]
pub(super) struct Disk {
    inside: Mutex<Inside>,
    changed: Condvar,
}

impl Disk {
    pub(super) fn new() -> Arc<Self> {
        let disk = Arc::new(Self::default());
        disk.inside.lock().running = true;
        for _ in 0..2 {
            let disk = Arc::clone(&disk);
            std::thread::spawn(move || disk.work());
        }
        disk
    }

    fn work(&self) {
        let mut inside = self.inside.lock();
        while !inside.stop {
            if inside.running
                && let Some(next) = inside.queue.pop_front()
            {
                drop(inside);
                self.end(next);
                inside = self.inside.lock();
            } else {
                self.changed.wait(&mut inside);
            }
        }
    }

    pub(super) fn stop(&self) {
        self.run();
        self.let_go();
        self.inside.lock().stop = true;
        self.changed.notify_all();
    }

    pub(super) fn pause(&self) {
        self.inside.lock().running = false;
    }

    pub(super) fn run(&self) {
        self.inside.lock().running = true;
        self.changed.notify_all();
    }

    /// Waits until `n` transfers are held.
    pub(super) fn wait_held(&self, n: usize) {
        let mut inside = self.inside.lock();
        while inside.queue.len() < n {
            self.changed.wait(&mut inside);
        }
    }

    pub(super) fn held(&self) -> Vec<Seen> {
        self.inside.lock().queue.iter().map(|p| p.seen).collect()
    }

    /// Ends the held transfer that `choose` picks by its place.
    pub(super) fn end_one(&self, at: usize) {
        let next = self.inside.lock().queue.remove(at).expect("a held transfer");
        self.end(next);
    }

    /// What happens to all transfers of a slot from now on.
    pub(super) fn fate(&self, slot: usize, fate: Fate) {
        self.inside.lock().fates.insert(slot, fate);
    }

    /// Refuses the next `n` transfers as busy.
    pub(super) fn busy(&self, n: usize) {
        self.inside.lock().busy = n;
    }

    /// Refuses every transfer of a slot as busy.
    pub(super) fn refuse(&self, slot: usize) {
        self.inside.lock().busy_slot = Some(slot);
    }

    /// From now on refuses every transfer with an error of this kind.
    pub(super) fn break_off(&self, kind: ErrorKind) {
        self.inside.lock().broken = Some(kind);
    }

    /// The writes of a slot that failed, and those that were given up before they were taken.
    pub(super) fn failed(&self, slot: usize) -> Vec<ErrorKind> {
        self.inside.lock().failed.iter().filter(|(of, _)| *of == slot).map(|(_, kind)| *kind).collect()
    }

    /// From now on commits do not end before [`Disk::end_commits`].
    pub(super) fn hold_commits(&self) {
        self.inside.lock().commits = Some(Vec::new());
    }

    /// Ends the commits that are held, well.
    pub(super) fn end_commits(&self) {
        let held = self.inside.lock().commits.take().unwrap_or_default();
        held.into_iter().for_each(|done| done(Ok(true)));
    }

    /// How many commits are held.
    pub(super) fn held_commits(&self) -> usize {
        self.inside.lock().commits.as_ref().map_or(0, Vec::len)
    }

    /// The transfers that were refused as busy.
    pub(super) fn refused(&self) -> Vec<Seen> {
        self.inside.lock().refused.clone()
    }

    /// From now on another process has stored a chunk before it is committed.
    pub(super) fn be_late(&self) {
        self.inside.lock().late = true;
    }

    pub(super) fn let_go(&self) {
        let hanging = {
            let mut inside = self.inside.lock();
            inside.fates.clear();
            std::mem::take(&mut inside.hanging)
        };
        drop(hanging);
    }

    /// How many transfers hang.
    pub(super) fn hanging(&self) -> usize {
        self.inside.lock().hanging.len()
    }

    /// Waits until `n` transfers hang.
    pub(super) fn wait_hanging(&self, n: usize) {
        let mut inside = self.inside.lock();
        while inside.hanging.len() < n {
            self.changed.wait(&mut inside);
        }
    }

    pub(super) fn flip(&self, slot: usize, byte: u64) {
        self.inside.lock().slots[slot][byte as usize] ^= 4;
    }

    pub(super) fn bytes_of(&self, slot: usize) -> Vec<u8> {
        self.inside.lock().slots[slot].clone()
    }

    pub(super) fn log(&self) -> Vec<Seen> {
        self.inside.lock().log.clone()
    }

    pub(super) fn bad(&self) -> Vec<(usize, MissCause)> {
        self.inside.lock().bad.clone()
    }

    pub(super) fn committed(&self) -> Vec<usize> {
        self.inside.lock().committed.clone()
    }

    pub(super) fn add_slot(&self, bytes: u64) -> usize {
        let mut inside = self.inside.lock();
        inside.slots.push(vec![0xA5; bytes as usize]);
        inside.slots.len() - 1
    }

    fn end(&self, pending: Pending) {
        let Pending { seen: Seen { slot, offset, write }, request } = pending;
        let Request { buf, buf_offset, len, done, .. } = request;
        let mut buf = buf.unwrap();
        let now = Instant::now();
        let done = |result, buf| done(Completion { result, buf, submitted: now, finished: now });
        let mut inside = self.inside.lock();
        let fate = inside.fates.get(&slot).copied().unwrap_or(Fate::Good);
        if fate == Fate::Hang {
            inside.hanging.push(buf);
            self.changed.notify_all();
            drop(inside);
            return done(Err(Error::new(ErrorKind::TimedOut, "injected")), None);
        }
        let at = offset as usize;
        let bytes = &mut inside.slots[slot][at..at + len];
        if write {
            bytes.copy_from_slice(&buf.as_slice()[buf_offset..buf_offset + len]);
        } else {
            buf.as_mut_slice()[buf_offset..buf_offset + len].copy_from_slice(bytes);
        }
        drop(inside);
        let result = match fate {
            Fate::Fail(kind) => Err(Error::new(kind, "injected")),
            _ => Ok(()),
        };
        done(result, Some(buf));
    }

    fn submit(&self, slot: usize, request: Request) -> Result<(), Rejected> {
        let mut inside = self.inside.lock();
        let seen = Seen { slot, offset: request.offset, write: request.op == Op::Write };
        if let Some(kind) = inside.broken {
            return Err(Rejected { request: Box::new(request), error: Error::new(kind, "injected") });
        }
        if inside.busy > 0 || inside.busy_slot == Some(slot) {
            inside.busy = inside.busy.saturating_sub(1);
            inside.refused.push(seen);
            return Err(Rejected { request: Box::new(request), error: Error::new(ErrorKind::Busy, "injected") });
        }
        inside.log.push(seen);
        inside.queue.push_back(Pending { seen, request });
        self.changed.notify_all();
        Ok(())
    }
}

/// What requests to the disk name as their file; nothing of it is touched.
fn no_file() -> Arc<DirectFile> {
    static FILE: OnceLock<Arc<DirectFile>> = OnceLock::new();
    let open = || {
        DirectFile::open(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"), FileOptions::read_only().buffered())
            .unwrap()
    };
    Arc::clone(FILE.get_or_init(|| Arc::new(open())))
}

/// One slot of the disk, to read or to write.
pub(super) struct Slot {
    pub(super) disk: Arc<Disk>,
    pub(super) slot: usize,
    pub(super) key: ChunkKey,
    pub(super) layout: SlotLayout,
    pub(super) drive: usize,
}

impl ChunkSource for Slot {
    fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    fn request(&self, offset: u64, buf: Buf, done: Done) -> Request {
        Request::read(no_file(), offset, buf, done)
    }

    fn drive(&self) -> usize {
        self.drive
    }

    fn submit(&self, request: Request) -> Result<(), Rejected> {
        self.disk.submit(self.slot, request)
    }

    fn check_header(&self, bytes: &[u8]) -> Result<Vec<u32>> {
        let (header, _) = SlotHeader::decode(bytes)?;
        if header.key != self.key || !header.fits(&self.layout) {
            return Err(Error::new(ErrorKind::Corrupt, "another chunk's header"));
        }
        Ok(header.layers.iter().map(|l| l.crc).collect())
    }

    fn frame_id(&self) -> Option<FrameId> {
        Some(FrameId { key: self.key, put: PutId { drive: 0, sequence: 1 } })
    }

    fn report_bad(&self, cause: MissCause) -> MissCause {
        self.disk.inside.lock().bad.push((self.slot, cause));
        cause
    }
}

impl ChunkSink for Slot {
    fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    fn request(&self, offset: u64, buf: Buf, done: Done) -> Request {
        let (disk, slot) = (Arc::clone(&self.disk), self.slot);
        let ended = move |completion: Completion| {
            if let Err(e) = &completion.result {
                disk.inside.lock().failed.push((slot, e.kind()));
            }
            done(completion);
        };
        Request::write(no_file(), offset, buf, ended)
    }

    fn drive(&self) -> usize {
        self.drive
    }

    fn submit(&self, request: Request) -> Result<(), Rejected> {
        self.disk.submit(self.slot, request)
    }

    fn frame_id(&self) -> Option<FrameId> {
        Some(FrameId { key: self.key, put: PutId { drive: 0, sequence: 1 } })
    }

    fn fail(&self, why: &Error) {
        self.disk.inside.lock().failed.push((self.slot, why.kind()));
    }

    fn commit(&self, crcs: Vec<u32>, done: CommitDone) {
        let header = SlotHeader {
            layers: SlotHeader::layer_table(&self.layout, &crcs),
            ..SlotHeader::new(KeyKind::Chain, self.key)
        };
        let (bytes, _) = header.encode(&self.layout).unwrap();
        let mut inside = self.disk.inside.lock();
        if inside.late {
            drop(inside);
            return done(Ok(false));
        }
        let at = self.layout.header_offset as usize;
        inside.slots[self.slot][at..at + bytes.len()].copy_from_slice(&bytes);
        inside.committed.push(self.slot);
        if let Some(held) = &mut inside.commits {
            return held.push(done);
        }
        drop(inside);
        done(Ok(true));
    }
}
