//! An accelerator for tests of the I/O room. Its memory is heap memory that claims to lie on device
//! 0. Its copies run on one thread, like a stream, and can be held, failed and counted.
#![allow(dead_code, unreachable_pub, unused_macros, reason = "each test program uses its part")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]
#![expect(unsafe_code, reason = "memory known by its address")]

pub mod child;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use forebay::io::{
    AlignedBuf, Buf, Completion, Copying, CufileChoice, DeviceSide, DirectFile, Drive, EngineChoice, FileOptions,
    IoBuf, IoOptions, MemRegion, MemorySpace, Mover, Request, open_drive, wait,
};
use forebay::{Error, ErrorKind};

pub const LONG: Duration = Duration::from_secs(120);
pub const DEVICE: MemorySpace = MemorySpace::Device(0);

/// Each test on both backends.
macro_rules! both {
    ($($test:ident),* $(,)?) => {
        mod uring {
            $(#[test] fn $test() { super::$test(super::EngineChoice::Uring) })*
        }
        mod threads {
            $(#[test] fn $test() { super::$test(super::EngineChoice::Threads) })*
        }
    };
}

/// A file whose reads hang until something is written to the other end.
pub fn hanging() -> (Arc<DirectFile>, File) {
    let (r, w) = std::io::pipe().unwrap();
    (Arc::new(DirectFile::from_file(OwnedFd::from(r).into(), "pipe")), OwnedFd::from(w).into())
}

/// Host memory.
pub fn zeros(len: usize) -> Buf {
    AlignedBuf::zeroed(len).unwrap().into()
}

/// A region of heap memory.
pub struct Heap(AlignedBuf, u64);

impl Heap {
    pub fn new(bytes: usize) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1 << 40);
        Arc::new(Self(AlignedBuf::zeroed(bytes).unwrap(), NEXT.fetch_add(1, Ordering::Relaxed)))
    }
}

// SAFETY: one allocation that lives as long as the value; the ids count up.
unsafe impl MemRegion for Heap {
    fn id(&self) -> u64 {
        self.1
    }
    fn as_mut_ptr(&self) -> *mut u8 {
        IoBuf::as_mut_ptr(&self.0)
    }
    fn len(&self) -> usize {
        self.0.len()
    }
}

/// Device memory: a part of a region that says where it is and counts its drops.
pub struct DeviceMemory {
    pub region: Arc<Heap>,
    pub offset: usize,
    pub bytes: usize,
    pub drops: Arc<AtomicUsize>,
}

// SAFETY: tests give each part of a region to one buffer at a time.
unsafe impl IoBuf for DeviceMemory {
    fn as_mut_ptr(&self) -> *mut u8 {
        MemRegion::as_mut_ptr(&*self.region).wrapping_add(self.offset)
    }
    fn len(&self) -> usize {
        self.bytes
    }
    fn place(&self) -> MemorySpace {
        DEVICE
    }
    fn region(&self) -> Option<(u64, usize)> {
        Some((self.region.id(), self.offset))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::SeqCst);
    }
}

/// A buffer of device memory of its own.
pub fn device(bytes: usize) -> Buf {
    watched(bytes).0
}

/// The same, with the number of times it was dropped.
pub fn watched(bytes: usize) -> (Buf, Arc<AtomicUsize>) {
    let drops = Arc::new(AtomicUsize::new(0));
    let memory = DeviceMemory { region: Heap::new(bytes), offset: 0, bytes, drops: Arc::clone(&drops) };
    (Buf::new(memory), drops)
}

pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed | 1;
    let mut out = Vec::with_capacity(len);
    while out.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        out.extend_from_slice(&x.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// The bytes of device memory.
pub fn peek(buf: &Buf) -> &[u8] {
    // SAFETY: it is heap memory, and we hold its only owner.
    unsafe { std::slice::from_raw_parts(buf.as_mut_ptr(), buf.len()) }
}

pub fn filled(len: usize, seed: u64) -> Buf {
    let buf = device(len);
    // SAFETY: as in `peek`.
    unsafe { std::slice::from_raw_parts_mut(buf.as_mut_ptr(), len) }.copy_from_slice(&pattern(len, seed));
    buf
}

/// Controls and counts the accelerator's copies.
#[derive(Default)]
pub struct Control {
    held: Mutex<bool>,
    changed: Condvar,
    /// Copies that have begun; where copies are held, one more than have ended.
    pub begun: AtomicU64,
    pub copies: AtomicU64,
    /// The copy with this number (from 1) fails.
    pub fail: AtomicU64,
    pub pinned_limit: AtomicUsize,
    pub bound: AtomicUsize,
    /// Spare memory asked for, and whether there is any.
    pub spares: AtomicUsize,
    pub lends: AtomicBool,
    /// Requests for spare memory wait.
    spare_held: Mutex<bool>,
    spare_changed: Condvar,
}

impl Control {
    pub fn hold(&self, held: bool) {
        *self.held.lock().unwrap() = held;
        self.changed.notify_all();
    }

    pub fn hold_spare(&self, held: bool) {
        *self.spare_held.lock().unwrap() = held;
        self.spare_changed.notify_all();
    }
}

pub struct TestMover {
    work: Mutex<Sender<(Copying, bool)>>,
    pub control: Arc<Control>,
}

impl TestMover {
    pub fn new() -> Arc<Self> {
        let (work, queue) = channel();
        let control = Arc::new(Control::default());
        let theirs = Arc::clone(&control);
        std::thread::spawn(move || Self::copy(&queue, &theirs));
        Arc::new(Self { work: Mutex::new(work), control })
    }

    fn copy(queue: &Receiver<(Copying, bool)>, control: &Control) {
        for (c, to_device) in queue {
            control.begun.fetch_add(1, Ordering::SeqCst);
            drop(control.changed.wait_while(control.held.lock().unwrap(), |held| *held).unwrap());
            let n = control.copies.fetch_add(1, Ordering::SeqCst) + 1;
            if control.fail.load(Ordering::SeqCst) == n {
                (c.done)(Err(Error::new(ErrorKind::Io, "the copy engine failed")));
                continue;
            }
            let (device, host) = (c.device as *mut u8, c.host);
            let (from, to) = if to_device { (host, device) } else { (device, host) };
            // SAFETY: the contract of `Mover`: both are ours until `done`.
            unsafe { std::ptr::copy_nonoverlapping(from, to, c.len) };
            (c.done)(Ok(()));
        }
    }
}

impl Mover for TestMover {
    fn place(&self) -> MemorySpace {
        DEVICE
    }
    // SAFETY: the contract of the trait, passed on to the thread that copies.
    unsafe fn to_device(&self, copying: Copying) {
        self.work.lock().unwrap().send((copying, true)).unwrap();
    }
    // SAFETY: as above.
    unsafe fn to_host(&self, copying: Copying) {
        self.work.lock().unwrap().send((copying, false)).unwrap();
    }
    fn pinned(&self, bytes: usize) -> forebay::Result<Arc<dyn MemRegion>> {
        let limit = self.control.pinned_limit.load(Ordering::SeqCst);
        if limit > 0 && bytes > limit {
            return Err(Error::new(ErrorKind::Busy, "no pinned memory left"));
        }
        Ok(Heap::new(bytes))
    }
    fn spare(&self, bytes: usize) -> forebay::Result<Buf> {
        let control = &self.control;
        control.spares.fetch_add(1, Ordering::SeqCst);
        drop(control.spare_changed.wait_while(control.spare_held.lock().unwrap(), |held| *held).unwrap());
        if !self.control.lends.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Busy, "no device memory left"));
        }
        Ok(device(bytes))
    }
    fn bind_thread(&self) -> forebay::Result<()> {
        self.control.bound.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

pub fn side(mover: &Arc<TestMover>, pinned_bytes: usize) -> DeviceSide {
    let mover = Arc::clone(mover) as Arc<dyn Mover>;
    DeviceSide { mover, regions: Vec::new(), cufile: CufileChoice::Never, pinned_bytes }
}

pub fn options(engine: EngineChoice, side: DeviceSide) -> IoOptions {
    let device = Some(side);
    IoOptions { engine, block_bytes: 64 << 10, iodepth: 8, numjobs: 3, device, ..IoOptions::default() }
}

/// A drive whose device bytes go through `pinned_bytes` of pinned memory.
pub fn bounce(engine: EngineChoice, pinned_bytes: usize) -> (Drive, Arc<TestMover>) {
    let mover = TestMover::new();
    let drive = open_drive(&options(engine, side(&mover, pinned_bytes))).unwrap();
    (drive, mover)
}

pub fn on_drive() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub fn direct_file(dir: &tempfile::TempDir, name: &str) -> Arc<DirectFile> {
    let file = DirectFile::open(dir.path().join(name), FileOptions::create()).unwrap();
    assert!(file.is_direct());
    Arc::new(file)
}

pub fn nobody(_: Completion) {}

pub fn told() -> (impl FnOnce(Completion) + Send + 'static, Receiver<Completion>) {
    let (tx, rx) = channel();
    (move |c| drop(tx.send(c)), rx)
}

pub fn write_ok(drive: &Drive, file: &Arc<DirectFile>, offset: u64, buf: Buf) -> Buf {
    let c = wait(&*drive.write, Request::write(Arc::clone(file), offset, buf, nobody));
    c.result.unwrap();
    c.buf.unwrap()
}

pub fn read_ok(drive: &Drive, file: &Arc<DirectFile>, offset: u64, buf: Buf) -> Buf {
    let c = wait(&*drive.read, Request::read(Arc::clone(file), offset, buf, nobody));
    c.result.unwrap();
    c.buf.unwrap()
}

pub fn until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !is() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::yield_now();
    }
}
