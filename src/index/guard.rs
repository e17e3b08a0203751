//! What keeps a process alive when a page of shared memory can no longer be read.
//!
//! The shared files lie on the cache's file system. XFS raises `SIGBUS` at a store into a page it
//! has written out once it has shut itself down, as it does when its drive dies, and every file
//! system does at an access to a page that it can no longer read, or that lies behind the end of a
//! file that was cut. Without a handler this ends the server, which lost a cache only.
//!
//! The handler puts this process's own copy of the file in the place of the mapping: stores then
//! stay in this process. The mapping says that it is [lost](Guard::is_lost) from then on, and the
//! log uses nothing of that drive any more. A page that cannot be read even so becomes zeros, which
//! are misses everywhere in this module.
//!
//! Signals about any other memory go to whom they went to before. The handler only loads and stores
//! atomics and calls `mmap`.

#![expect(unsafe_code, reason = "a signal handler, and mappings exchanged under those who use them")]

use std::cell::UnsafeCell;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Mappings that are guarded at once; any more are not.
const SLOTS: usize = 1024;

const FREE: u32 = 0;
const CLAIMED: u32 = 1;
const SHARED: u32 = 2;
/// The handler is at work.
const CHANGING: u32 = 3;
const LOST: u32 = 4;

struct GuardSlot {
    state: AtomicU32,
    start: AtomicUsize,
    bytes: AtomicUsize,
    descriptor: AtomicI32,
    writable: AtomicBool,
    /// The page of the last fault after the mapping was lost.
    last: AtomicUsize,
}

static ALL: [GuardSlot; SLOTS] = [const {
    GuardSlot {
        state: AtomicU32::new(FREE),
        start: AtomicUsize::new(0),
        bytes: AtomicUsize::new(0),
        descriptor: AtomicI32::new(-1),
        writable: AtomicBool::new(false),
        last: AtomicUsize::new(0),
    }
}; SLOTS];

/// Mappings lost so far in this process.
static LOSSES: AtomicU64 = AtomicU64::new(0);

struct Before(UnsafeCell<MaybeUninit<libc::sigaction>>);
// SAFETY: written once, by `sigaction` itself while it installs the handler that reads it.
unsafe impl Sync for Before {}
static BEFORE: Before = Before(UnsafeCell::new(MaybeUninit::zeroed()));
static INSTALL: Once = Once::new();
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(4096);

/// How many shared mappings this process has lost. While it is 0, no mapping has to be asked.
pub(crate) fn losses() -> u64 {
    LOSSES.load(Ordering::Relaxed)
}

/// Guards a mapping for as long as it lives.
#[derive(Debug)]
pub(super) struct Guard {
    slot: usize,
    /// What the handler maps.
    _file: File,
}

impl Guard {
    /// Guards the mapping of `file` at `start`; it must be dropped before the mapping is unmapped.
    /// None where `SLOTS` mappings are guarded already, or the file cannot be duplicated.
    pub(super) fn of(file: &File, start: usize, bytes: usize, writable: bool) -> Option<Self> {
        let file = file.try_clone().ok()?;
        INSTALL.call_once(install);
        let claim =
            |s: &GuardSlot| s.state.compare_exchange(FREE, CLAIMED, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let number = ALL.iter().position(claim)?;
        let slot = ALL.get(number)?;
        slot.start.store(start, Ordering::Relaxed);
        slot.bytes.store(bytes, Ordering::Relaxed);
        slot.descriptor.store(file.as_raw_fd(), Ordering::Relaxed);
        slot.writable.store(writable, Ordering::Relaxed);
        slot.last.store(0, Ordering::Relaxed);
        slot.state.store(SHARED, Ordering::Release);
        Some(Self { slot: number, _file: file })
    }

    /// Whether the mapping is lost: processes no longer see each other's stores.
    pub(super) fn is_lost(&self) -> bool {
        ALL.get(self.slot).is_some_and(|slot| slot.state.load(Ordering::Acquire) != SHARED)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(slot) = ALL.get(self.slot) {
            slot.state.store(FREE, Ordering::Release);
        }
    }
}

fn install() {
    // SAFETY: asks for a number.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    PAGE_BYTES.store(usize::try_from(page).unwrap_or(4096), Ordering::Relaxed);
    // SAFETY: all zeros is a valid `sigaction`.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: both structures live through the call; the handler has the signature that SA_SIGINFO
    // asks for, and does only what a handler may. Where this fails, nothing is guarded.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const action, BEFORE.0.get().cast()) };
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a handler a valid `siginfo_t`; for a fault it has an address, for a
    // signal that was sent a sender.
    let (code, address, sender) = unsafe { ((*info).si_code, (*info).si_addr() as usize, (*info).si_pid()) };
    // SAFETY: the thread's own errno, which the interrupted code may be about to read.
    let errno = unsafe { *libc::__errno_location() };
    let ours = code == libc::BUS_ADRERR && exchange(address);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    // SAFETY: asks for a number.
    if ours || code == libc::SI_TKILL && sender == unsafe { libc::getpid() } {
        // A handler that was installed later, such as Python's faulthandler, has reported a fault,
        // put this handler back, and raised the signal again. The fault itself is repeated when
        // this one returns, and is handled then.
        return;
    }
    pass_on(signal, info, context);
}

/// Puts memory of this process where the fault was. False if no guarded mapping is there, or it
/// cannot be replaced.
fn exchange(address: usize) -> bool {
    let within = |slot: &&GuardSlot| {
        let (start, bytes) = (slot.start.load(Ordering::Relaxed), slot.bytes.load(Ordering::Relaxed));
        slot.state.load(Ordering::Acquire) >= SHARED && (start..start.saturating_add(bytes)).contains(&address)
    };
    let Some(slot) = ALL.iter().find(within) else { return false };
    let page_bytes = PAGE_BYTES.load(Ordering::Relaxed);
    let protection = libc::PROT_READ | if slot.writable.load(Ordering::Relaxed) { libc::PROT_WRITE } else { 0 };
    let map = |start: usize, bytes: usize, flags: libc::c_int, descriptor: libc::c_int| {
        let flags = flags | libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        // SAFETY: the range lies within a mapping of ours, which its guard outlives, and which is
        // only used as words that may change at any time; it stays mapped, and as accessible as
        // before.
        unsafe { libc::mmap(start as *mut libc::c_void, bytes, protection, flags, descriptor, 0) != libc::MAP_FAILED }
    };
    if slot.state.compare_exchange(SHARED, CHANGING, Ordering::AcqRel, Ordering::Acquire).is_ok() {
        LOSSES.fetch_add(1, Ordering::Relaxed);
        let bytes = slot.bytes.load(Ordering::Relaxed).next_multiple_of(page_bytes);
        let done = map(slot.start.load(Ordering::Relaxed), bytes, 0, slot.descriptor.load(Ordering::Relaxed));
        slot.state.store(LOST, Ordering::Release);
        if done {
            return true;
        }
    }
    // Another thread may just be exchanging the mapping. A fault at a page may be from before the
    // exchange: the access is tried again. A second one in a row means that the page cannot be read
    // from the file either: it becomes zeros.
    while slot.state.load(Ordering::Acquire) == CHANGING {
        std::hint::spin_loop();
    }
    let page = address - address % page_bytes;
    if slot.last.swap(page, Ordering::AcqRel) != page {
        return true;
    }
    map(page, page_bytes, libc::MAP_ANONYMOUS, -1)
}

/// Hands a signal that is not ours to the handler that was installed before this one.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: written before this handler could run; a copy of plain numbers.
    let before = unsafe { (*BEFORE.0.get()).assume_init() };
    match before.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: as in the handler.
            let code = unsafe { (*info).si_code };
            // SAFETY: restores the default action. A fault is repeated by itself; a signal that was
            // sent (`code <= 0`) is raised again.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                if code <= 0 {
                    libc::raise(signal);
                }
            }
        }
        handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
            type WithInfo = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: whoever installed it said that it takes three arguments.
            let handler: WithInfo = unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: whoever installed it said that it takes one argument.
            let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::sync::atomic::Ordering;

    use super::super::mapping::{Access, Mapping};
    use super::losses;

    const WORDS: usize = 3 * 4096 / 8;

    fn file() -> std::fs::File {
        let file = tempfile::tempfile_in(".").unwrap();
        file.set_len(WORDS as u64 * 8).unwrap();
        file
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files and raises no signals")]
    fn a_mapping_whose_file_was_cut_is_lost_and_the_process_lives() {
        let file = file();
        let (map, other) =
            (Mapping::file(&file, Access::ReadWrite).unwrap(), Mapping::file(&file, Access::ReadOnly).unwrap());
        let word = |i| map.word(i).unwrap();
        word(0).store(7, Ordering::Relaxed);
        word(WORDS - 1).store(9, Ordering::Relaxed);
        assert_eq!((other.load(0), other.load(WORDS - 1), map.is_lost(), other.is_lost()), (7, 9, false, false));
        let before = losses();

        file.set_len(4096).unwrap();
        assert_eq!(map.load(WORDS - 1), 0, "a page that is no longer there is zeros");
        assert!(map.is_lost() && losses() > before);
        assert_eq!(map.load(0), 7, "what can still be read stays");
        word(WORDS - 1).store(11, Ordering::Relaxed);
        word(0).fetch_add(1, Ordering::Relaxed);
        assert_eq!((map.load(0), map.load(WORDS - 1)), (8, 11));
        assert_eq!((other.load(0), other.is_lost()), (7, false), "stores stay in this mapping");
        assert_eq!((other.load(WORDS - 1), other.is_lost()), (0, true), "read-only ones are guarded too");

        drop(map);
        let again = Mapping::file(&file, Access::ReadWrite).unwrap();
        assert_eq!((again.load(0), again.is_lost()), (7, false), "a new mapping begins anew");
    }

    const CHILD: &str = "FOREBAY_GUARD_CHILD";

    /// How a process ends that runs one of these tests as a child.
    fn in_a_process(test: &str) -> std::process::ExitStatus {
        let (_, module) = module_path!().split_once("::").unwrap();
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args([&format!("{module}::{test}"), "--exact", "--nocapture", "--test-threads=1"]);
        command.env(CHILD, "1").output().unwrap().status
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files and raises no signals")]
    fn a_fault_in_memory_of_somebody_else_ends_the_process_as_ever() {
        if std::env::var_os(CHILD).is_none() {
            let status = in_a_process("a_fault_in_memory_of_somebody_else_ends_the_process_as_ever");
            return assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
        }
        let file = file();
        let ours = Mapping::file(&file, Access::ReadWrite).unwrap();
        let theirs = memmap2::MmapOptions::new().len(WORDS * 8).map_raw(&file).unwrap();
        file.set_len(4096).unwrap();
        assert_eq!(ours.load(WORDS - 1), 0);
        // SAFETY: within the mapping; the page is gone, which is what the signal is for.
        let byte = unsafe { theirs.as_ptr().add(8192).read_volatile() };
        panic!("there was a byte: {byte}");
    }

    /// What Python's faulthandler does: puts back the handler before it, and raises the signal
    /// again.
    extern "C" fn like_faulthandler(signal: libc::c_int) {
        // SAFETY: written before this handler was installed.
        unsafe { libc::sigaction(signal, LATER.0.get().cast(), std::ptr::null_mut()) };
        // SAFETY: raises a signal.
        unsafe { libc::raise(signal) };
    }

    static LATER: super::Before = super::Before(std::cell::UnsafeCell::new(std::mem::MaybeUninit::zeroed()));

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files and raises no signals")]
    fn a_handler_that_comes_later_and_raises_the_signal_again_does_no_harm() {
        if std::env::var_os(CHILD).is_none() {
            let status = in_a_process("a_handler_that_comes_later_and_raises_the_signal_again_does_no_harm");
            return assert!(status.success(), "{status}");
        }
        for flags in [libc::SA_NODEFER, 0] {
            let file = file();
            let map = Mapping::file(&file, Access::ReadWrite).unwrap();
            // SAFETY: all zeros is a valid `sigaction`.
            let mut later: libc::sigaction = unsafe { std::mem::zeroed() };
            later.sa_sigaction = like_faulthandler as *const () as usize;
            later.sa_flags = flags | libc::SA_ONSTACK;
            // SAFETY: both structures live through the call.
            unsafe { libc::sigaction(libc::SIGBUS, &raw const later, LATER.0.get().cast()) };
            file.set_len(4096).unwrap();
            assert_eq!(map.load(WORDS - 1), 0);
            assert!(map.is_lost());
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files and raises no signals")]
    fn many_threads_may_lose_a_mapping_at_once() {
        for _ in 0..50 {
            let file = file();
            let map = Mapping::file(&file, Access::ReadWrite).unwrap();
            map.word(5).unwrap().store(3, Ordering::Relaxed);
            file.set_len(4096).unwrap();
            std::thread::scope(|s| {
                for _ in 0..4 {
                    s.spawn(|| (512..WORDS).for_each(|i| _ = map.word(i).unwrap().fetch_add(1, Ordering::Relaxed)));
                }
            });
            assert!(map.is_lost());
            assert_eq!(map.load(5), 3);
        }
    }
}
