//! The stand-in's controls on a real GPU, as far as a driver offers the means.
//!
//! Nothing here may wait for a stream that a test holds: copies go through a stream of their own
//! that no default stream blocks, and a held stream polls a word of pinned memory, so that streams
//! can be let go in any order. The context is retained for good, as the words must outlive every
//! stream that polls them.
#![expect(unsafe_code, reason = "calls into a shared library")]
#![expect(clippy::expect_used, reason = "a helper of tests fails by panicking")]

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::Standin;

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;
/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
const PORTABLE_AND_MAPPED: c_uint = 3;
/// `CU_STREAM_WAIT_VALUE_GEQ`.
const AT_LEAST: c_uint = 0;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_int = 2;
/// Holds that a process can make.
const WORDS: usize = 4096;

/// This process's context, stream and pinned words on the GPU.
#[derive(Debug)]
struct Own {
    context: u64,
    stream: u64,
    /// Pinned words, one for each hold, as the host and as the GPU see them.
    words: usize,
    device_words: u64,
}

macro_rules! ok {
    ($lib:expr, $name:literal, $($arg:expr => $ty:ty),*) => {{
        let f: unsafe extern "C" fn($($ty),*) -> c_int = $lib.function($name);
        // SAFETY: the types are those of the driver's function; pointers are to live values of the
        // callers here.
        assert_eq!(unsafe { f($($arg),*) }, 0, $name);
    }};
}

impl Own {
    fn new(lib: &Standin) -> Self {
        let (mut device, mut context, mut stream) = (0, 0u64, 0u64);
        ok!(lib, "cuCtxGetDevice", &raw mut device => *mut c_int);
        ok!(lib, "cuDevicePrimaryCtxRetain", &raw mut context => *mut u64, device => c_int);
        ok!(lib, "cuStreamCreate", &raw mut stream => *mut u64, NON_BLOCKING => c_uint);
        let (mut words, mut device_words) = (std::ptr::null_mut::<c_void>(), 0u64);
        let bytes = WORDS * size_of::<u32>();
        ok!(lib, "cuMemHostAlloc", &raw mut words => *mut *mut c_void, bytes => usize, PORTABLE_AND_MAPPED => c_uint);
        ok!(lib, "cuMemHostGetDevicePointer_v2", &raw mut device_words => *mut u64, words => *mut c_void, 0 => c_uint);
        Self { context, stream, words: words.expose_provenance(), device_words }
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        assert!(at < WORDS, "no more than {WORDS} holds");
        let word = std::ptr::with_exposed_provenance_mut::<u32>(self.words).wrapping_add(at);
        // SAFETY: inside the pinned memory, which is never freed, and which the host only touches
        // through these.
        unsafe { AtomicU32::from_ptr(word) }
    }
}

/// A function in a held stream waits until this is open.
#[derive(Debug, Default)]
struct Door {
    open: Mutex<bool>,
    opened: Condvar,
}

/// What keeps a stream from going on.
#[derive(Debug)]
enum Hold {
    /// It polls this word until it is 1.
    Word(usize),
    /// A function in it waits. The driver may run such functions one after another: these streams
    /// must be let go in the order in which they were held.
    Function(Arc<Door>),
}

/// Streams that are held.
#[derive(Debug, Default)]
struct Held {
    streams: HashMap<u64, Hold>,
    words: usize,
}

/// The controls' state.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    own: OnceLock<Own>,
    held: Mutex<Held>,
}

unsafe extern "C" fn wait_at_door(door: *mut c_void) {
    // SAFETY: a reference that `hold_by_function` gave to the stream, taken back here.
    let door = unsafe { Arc::from_raw(door.cast::<Door>()) };
    let mut open = door.open.lock().unwrap_or_else(PoisonError::into_inner);
    while !*open {
        open = door.opened.wait(open).unwrap_or_else(PoisonError::into_inner);
    }
}

fn hold_by_function(lib: &Standin, stream: u64) -> Arc<Door> {
    type Function = unsafe extern "C" fn(*mut c_void);
    let door = Arc::new(Door::default());
    let given = Arc::into_raw(Arc::clone(&door)).cast_mut().cast::<c_void>();
    ok!(lib, "cuLaunchHostFunc", stream => u64, wait_at_door => Function, given => *mut c_void);
    door
}

impl Holds {
    fn own(&self, lib: &Standin) -> &Own {
        self.own.get_or_init(|| Own::new(lib))
    }

    pub(crate) fn set(&self, lib: &Standin, stream: u64, on: bool) {
        let own = self.own(lib);
        let mut held = self.held.lock().expect("no test panicked here");
        match held.streams.remove(&stream) {
            Some(Hold::Word(at)) => own.word(at).store(1, Ordering::SeqCst),
            Some(Hold::Function(door)) => {
                *door.open.lock().unwrap_or_else(PoisonError::into_inner) = true;
                door.opened.notify_all();
            }
            None => {}
        }
        if !on {
            return;
        }
        assert_ne!(stream, u64::MAX, "a real GPU's side streams cannot be held together");
        type Wait = unsafe extern "C" fn(u64, u64, u32, c_uint) -> c_int;
        let hold = match lib.optional::<Wait>("cuStreamWaitValue32_v2") {
            Some(wait) => {
                let at = held.words;
                held.words += 1;
                own.word(at).store(0, Ordering::SeqCst);
                let address = own.device_words + (at * size_of::<u32>()) as u64;
                // SAFETY: the types of the driver's function; the word is never freed.
                assert_eq!(unsafe { wait(stream, address, 1, AT_LEAST) }, 0, "cuStreamWaitValue32");
                Hold::Word(at)
            }
            None => Hold::Function(hold_by_function(lib, stream)),
        };
        held.streams.insert(stream, hold);
    }

    /// Runs `copy` with a stream that waits for no other, and waits for its end.
    fn copy(&self, lib: &Standin, copy: impl FnOnce(u64)) {
        let own = self.own(lib);
        let (mut popped, mut mode) = (0u64, RELAXED);
        // A capture of global mode forbids all threads to wait for streams, but those that say so.
        ok!(lib, "cuThreadExchangeStreamCaptureMode", &raw mut mode => *mut c_int);
        ok!(lib, "cuCtxPushCurrent_v2", own.context => u64);
        copy(own.stream);
        ok!(lib, "cuStreamSynchronize", own.stream => u64);
        ok!(lib, "cuCtxPopCurrent_v2", &raw mut popped => *mut u64);
        ok!(lib, "cuThreadExchangeStreamCaptureMode", &raw mut mode => *mut c_int);
    }

    pub(crate) fn peek(&self, lib: &Standin, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0u8; len];
        let to = bytes.as_mut_ptr().cast::<c_void>();
        // The buffer is as long as the copy, and outlives it.
        self.copy(lib, |stream| {
            ok!(lib, "cuMemcpyDtoHAsync_v2", to => *mut c_void, address => u64, len => usize, stream => u64);
        });
        bytes
    }

    pub(crate) fn poke(&self, lib: &Standin, address: u64, bytes: &[u8]) {
        let from = bytes.as_ptr().cast::<c_void>();
        self.copy(lib, |stream| {
            ok!(lib, "cuMemcpyHtoDAsync_v2", address => u64, from => *const c_void, bytes.len() => usize, stream => u64);
        });
    }
}

/// Gives streams that are not held the time to do what they can.
pub(crate) fn settle(_: &Standin) {
    std::thread::sleep(Duration::from_millis(50));
}
