//! The I/O room where the system is hostile: io_uring refused, no memory to lock, a forked child.
//! Each case that changes the process for good runs in a child of this test binary.
#![expect(clippy::unwrap_used, reason = "tests")]
#![expect(unsafe_code, reason = "seccomp, capabilities, rlimits and fork have no safe wrapper")]

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::ErrorKind;
use forebay::io::{
    AlignedBuf, Buf, Completion, DirectFile, Drive, EngineChoice, FileOptions, IO_ALIGN, IoBuf, IoOptions, IoPath,
    MemRegion, MemorySpace, Request, open_drive, wait,
};

const CHILD: &str = "FOREBAY_TEST_CHILD";

fn nobody(_: Completion) {}

/// Runs `body` in a fresh process of this binary that runs the test `name` only.
fn in_child(name: &str, body: fn()) {
    if std::env::var(CHILD).as_deref() == Ok(name) {
        body();
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let out = child.args([name, "--exact", "--test-threads=1", "--nocapture"]).env(CHILD, name).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success() && text.contains("1 passed"), "{text}");
}

fn round_trip(drive: &Drive, buf: Buf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = Arc::new(DirectFile::open(dir.path().join("f"), FileOptions::create()).unwrap());
    let mut buf = buf;
    for (i, b) in buf.as_mut_slice().iter_mut().enumerate() {
        *b = (i / IO_ALIGN) as u8;
    }
    let mut buf = wait(&*drive.write, Request::write(Arc::clone(&file), 0, buf, nobody)).buf.unwrap();
    buf.as_mut_slice().fill(0xff);
    let c = wait(&*drive.read, Request::read(file, 0, buf, nobody));
    c.result.unwrap();
    let buf = c.buf.unwrap();
    assert!(buf.as_slice().iter().enumerate().all(|(i, b)| *b == (i / IO_ALIGN) as u8));
}

fn pages(n: usize) -> Buf {
    AlignedBuf::zeroed(n * IO_ALIGN).unwrap().into()
}

/// Lets every system call pass but `nr`, which fails with `errno`.
fn refuse_syscall(nr: libc::c_long, errno: i32) {
    let op = |code: u32, k: u32, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, nr as u32, 0, 1),
        op(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno as u32, 0, 0),
        op(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the filter lives over the call; it is installed for this thread and those that it
    // starts.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter), 0);
    }
}

fn falls_back(nr: libc::c_long, errno: i32, because: &str) {
    assert_eq!(open_drive(&IoOptions::default()).unwrap().report.active, IoPath::IoUring, "before the filter");
    refuse_syscall(nr, errno);
    let drive = open_drive(&IoOptions::default()).unwrap();
    assert_eq!(drive.report.active, IoPath::Threads);
    let why = &drive.report.reasons.iter().find(|(path, _)| *path == IoPath::IoUring).unwrap().1;
    assert!(why.contains(because), "{why}");
    round_trip(&drive, pages(300));
    let insisting = IoOptions { engine: EngineChoice::Uring, ..IoOptions::default() };
    assert!(open_drive(&insisting).is_err());
}

#[test]
fn a_sandbox_that_forbids_io_uring_gets_threads_and_the_reason() {
    in_child("a_sandbox_that_forbids_io_uring_gets_threads_and_the_reason", || {
        falls_back(libc::SYS_io_uring_setup, libc::EPERM, "seccomp");
    });
}

#[test]
fn a_kernel_without_io_uring_gets_threads_and_the_reason() {
    in_child("a_kernel_without_io_uring_gets_threads_and_the_reason", || {
        falls_back(libc::SYS_io_uring_setup, libc::ENOSYS, "sandbox hides it");
    });
}

#[test]
fn a_sandbox_that_lets_a_ring_be_made_but_not_used_gets_threads() {
    in_child("a_sandbox_that_lets_a_ring_be_made_but_not_used_gets_threads", || {
        falls_back(libc::SYS_io_uring_enter, libc::EPERM, "Operation not permitted");
    });
}

/// Anonymous memory that queues may register.
struct Region {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: the mapping belongs to the region alone and lives as long as it.
unsafe impl Send for Region {}
// SAFETY: nothing in it changes.
unsafe impl Sync for Region {}

impl Region {
    fn map(len: usize) -> Arc<Self> {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh anonymous mapping.
        let ptr = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
        assert_ne!(ptr, libc::MAP_FAILED);
        Arc::new(Self { ptr: ptr.cast(), len })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length; buffers and queues hold the region while they
        // use it.
        unsafe { libc::munmap(self.ptr.cast(), self.len) };
    }
}

// SAFETY: one mapping for the region's life; the address is unique in the process and serves as the
// id.
unsafe impl MemRegion for Region {
    fn id(&self) -> u64 {
        self.ptr as u64
    }
    fn as_mut_ptr(&self) -> *mut u8 {
        self.ptr
    }
    fn len(&self) -> usize {
        self.len
    }
}

/// A part of a region; the tests hand out each part once.
struct Part(Arc<Region>, usize, usize);

// SAFETY: see `Part`: no other buffer covers the same bytes, and the region outlives it.
unsafe impl IoBuf for Part {
    fn as_mut_ptr(&self) -> *mut u8 {
        self.0.ptr.wrapping_add(self.1)
    }
    fn len(&self) -> usize {
        self.2
    }
    fn place(&self) -> MemorySpace {
        MemorySpace::Host
    }
    fn region(&self) -> Option<(u64, usize)> {
        Some((self.0.id(), self.1))
    }
}

fn status_kib(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn with_region(region: &Arc<Region>) -> IoOptions {
    IoOptions { engine: EngineChoice::Uring, regions: vec![Arc::clone(region) as _], ..IoOptions::default() }
}

#[test]
fn memory_of_a_region_is_registered_window_by_window_when_used() {
    in_child("memory_of_a_region_is_registered_window_by_window_when_used", || {
        let region = Region::map(64 << 20);
        let drive = open_drive(&with_region(&region)).unwrap();
        let untouched = status_kib("VmPin:");
        let window = 16usize << 20;
        // Across the border of the first two windows: the block that crosses it uses no window, the
        // others do.
        round_trip(&drive, Buf::new(Part(Arc::clone(&region), window - (5 << 19), 5 << 20)));
        let pinned = status_kib("VmPin:") - untouched;
        // Both queues pin both windows, and not the other two.
        assert_eq!((pinned, drive.report.notes.list()), (4 * (window as u64 >> 10), vec![]));
    });
}

/// Gives up the right to lock memory beyond the limit, and sets the limit.
fn limit_locked_memory(bytes: u64) {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    let mut header = Header { version: 0x2008_0522, pid: 0 };
    let mut sets = [[0u32; 3]; 2];
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: the structures are those of capget(2) and setrlimit(2).
    unsafe {
        assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit), 0);
        assert_eq!(libc::syscall(libc::SYS_capget, &raw mut header, sets.as_mut_ptr()), 0);
        for set in &mut sets[0][..2] {
            *set &= !(1 << 14);
        }
        assert_eq!(libc::syscall(libc::SYS_capset, &raw mut header, sets.as_ptr()), 0);
    }
}

#[test]
fn without_memory_to_lock_io_goes_on_unregistered_and_the_report_says_so() {
    in_child("without_memory_to_lock_io_goes_on_unregistered_and_the_report_says_so", || {
        limit_locked_memory(1 << 20);
        let region = Region::map(32 << 20);
        let drive = open_drive(&with_region(&region)).unwrap();
        round_trip(&drive, Buf::new(Part(Arc::clone(&region), 0, 4 << 20)));
        round_trip(&drive, Buf::new(Part(Arc::clone(&region), 16 << 20, 4 << 20)));
        let notes = drive.report.notes.list().join("; ");
        assert!(notes.contains("registered buffers end at 0 MiB") && notes.contains("RLIMIT_MEMLOCK"), "{notes}");
    });
}

#[test]
fn a_forked_child_is_refused_and_the_parent_goes_on() {
    in_child("a_forked_child_is_refused_and_the_parent_goes_on", || {
        for engine in [EngineChoice::Uring, EngineChoice::Threads] {
            let drive = open_drive(&IoOptions { engine, ..IoOptions::default() }).unwrap();
            let file = Arc::new(DirectFile::in_memory().unwrap());
            let request = Request::read(file, 0, pages(1), nobody);
            // SAFETY: the child makes a few calls and leaves by `_exit`; an alarm ends it where it
            // would hang.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                // SAFETY: no pointers.
                unsafe { libc::alarm(10) };
                let submitted = drive.read.submit(request).map_err(|r| r.error.kind());
                let closed = drive.read.close(Instant::now() + Duration::from_secs(5)).map_err(|e| e.kind());
                drop(drive);
                let right = submitted == Err(ErrorKind::Forked) && closed == Err(ErrorKind::Forked);
                // SAFETY: ends the child without running what belongs to the parent.
                unsafe { libc::_exit(i32::from(!right)) };
            }
            drop(request);
            let mut status = -1;
            // SAFETY: `status` is a valid place.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            assert_eq!(status, 0, "{engine:?}");
            round_trip(&drive, pages(10));
        }
    });
}
