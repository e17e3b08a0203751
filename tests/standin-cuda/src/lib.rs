//! Tests only: a `libcuda.so.1` whose device memory is host memory and whose streams are threads.
//!
//! [`load`] puts it where `dlopen("libcuda.so.1")` of this process finds it; programs find it by
//! `LD_LIBRARY_PATH` = [`DIR`]. Tests hold streams, inject errors and read counters through
//! [`Standin`], and play the server through [`Server`].
//!
//! Where [`ON_GPU`] is set, the machine's own driver is loaded instead, so that tests of what a GPU
//! does run on one: streams are held by words that they poll, memory is peeked at by copies, and
//! what only the stand-in knows is not asked.
#![expect(unsafe_code, reason = "calls into a shared library")]
#![expect(clippy::expect_used, clippy::panic, reason = "a helper of tests fails by panicking")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

mod real;
mod server;

pub use server::{Event, Memory, Server, Stream};

/// The folder that holds `libcuda.so.1`.
pub const DIR: &str = env!("STANDIN_CUDA_DIR");

/// A folder with a `libcuda.so.1` that has no functions.
pub const EMPTY_DIR: &str = concat!(env!("STANDIN_CUDA_DIR"), "/empty");

/// The variable that asks for the machine's own driver.
pub const ON_GPU: &str = "FOREBAY_TEST_GPU";

/// The loaded library.
#[derive(Debug)]
pub struct Standin {
    handle: *mut c_void,
    real: Option<real::Holds>,
}

// SAFETY: the handle is only passed to dlsym, which any thread may call.
unsafe impl Send for Standin {}
// SAFETY: as for Send.
unsafe impl Sync for Standin {}

fn open(path: &str) -> *mut c_void {
    let path = CString::new(path).expect("a path");
    // SAFETY: the path ends in a zero; the library's initialisers only make its own state.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if handle.is_null() {
        // SAFETY: after a failed dlopen, dlerror gives a string.
        panic!("{path:?}: {:?}", unsafe { CStr::from_ptr(libc::dlerror()) });
    }
    handle
}

/// Loads the stand-in; must come before anything else looks for CUDA.
pub fn load() -> &'static Standin {
    static LOADED: OnceLock<Standin> = OnceLock::new();
    LOADED.get_or_init(|| {
        if std::env::var_os(ON_GPU).is_some() {
            return Standin { handle: open("libcuda.so.1"), real: Some(real::Holds::default()) };
        }
        let handle = open(&format!("{DIR}/libcuda.so.1"));
        open(&format!("{DIR}/libcuda.so"));
        Standin { handle, real: None }
    })
}

impl Standin {
    /// The function `name` as a pointer of type `F`, which the caller knows to be right.
    pub(crate) fn function<F: Copy>(&self, name: &str) -> F {
        self.optional(name).unwrap_or_else(|| panic!("the library has no {name}"))
    }

    /// As [`Standin::function`], where the library has it.
    pub(crate) fn optional<F: Copy>(&self, name: &str) -> Option<F> {
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
        let c_name = CString::new(name).expect("a name");
        // SAFETY: a live handle and a string that ends in a zero.
        let symbol = unsafe { libc::dlsym(self.handle, c_name.as_ptr()) };
        // SAFETY: the sizes are equal, and the caller names the type that the C++ source has.
        (!symbol.is_null()).then(|| unsafe { std::mem::transmute_copy::<*mut c_void, F>(&symbol) })
    }

    /// A counter (`launches`, `copies`, `live_events` …), or the calls of a function by its name; 0
    /// on a real GPU.
    #[must_use]
    pub fn get(&self, key: &str) -> u64 {
        if self.is_real() {
            return 0;
        }
        let key = CString::new(key).expect("a key");
        let get: unsafe extern "C" fn(*const c_char) -> u64 = self.function("standin_get");
        // SAFETY: the string outlives the call.
        unsafe { get(key.as_ptr()) }
    }

    /// Whether this is a real driver.
    #[must_use]
    pub fn is_real(&self) -> bool {
        self.real.is_some()
    }

    /// Says whether the calls of this thread are the server's; a real driver does not ask.
    pub(crate) fn set_server(&self, on: bool) {
        if self.is_real() {
            return;
        }
        let server: unsafe extern "C" fn(c_int) = self.function("standin_server");
        // SAFETY: sets a variable of this thread.
        unsafe { server(c_int::from(on)) }
    }

    fn set(&self, key: &str, a: u64, b: u64) {
        if self.is_real() {
            return;
        }
        let key = CString::new(key).expect("a key");
        let set: unsafe extern "C" fn(*const c_char, u64, u64) = self.function("standin_set");
        // SAFETY: the string outlives the call.
        unsafe { set(key.as_ptr(), a, b) }
    }

    /// Bytes of memory of a GPU.
    pub fn set_memory(&self, ordinal: u64, bytes: u64) {
        self.set("memory", ordinal, bytes);
    }

    /// Sets counters of what happened to 0; those of what is live and of functions' calls stay.
    pub fn clear_counters(&self) {
        self.set("counter", 0, 0);
    }

    /// Lets every operation of a stream take up to `max_us` microseconds longer, by chance.
    pub fn set_delays(&self, seed: u64, max_us: u64) {
        self.set("delays", seed, max_us);
    }

    /// Refuses to register host memory.
    pub fn refuse_register(&self, refuse: bool) {
        self.set("refuse_register", u64::from(refuse), 0);
    }

    /// Lets the `nth` call (from 1) from now on fail with `code`: of the function `name`, or of any
    /// where it is empty.
    pub fn inject(&self, name: &str, nth: u64, code: i32) {
        let name = CString::new(name).expect("a name");
        let inject: unsafe extern "C" fn(*const c_char, u64, c_int) = self.function("standin_inject");
        // SAFETY: the string outlives the call.
        unsafe { inject(name.as_ptr(), nth, code) }
    }

    /// The function that the injected error has hit, if it has.
    #[must_use]
    pub fn hit(&self) -> Option<String> {
        let mut name = [0u8; 64];
        let hit: unsafe extern "C" fn(*mut c_char, usize) = self.function("standin_hit");
        // SAFETY: the buffer has the length given, and is ended with a zero.
        unsafe { hit(name.as_mut_ptr().cast(), name.len()) };
        let name = CStr::from_bytes_until_nul(&name).expect("ends in a zero").to_string_lossy().into_owned();
        Some(name).filter(|n| !n.is_empty())
    }

    /// Heals the contexts that an error has made useless.
    pub fn heal(&self) {
        self.set("heal", 0, 0);
    }

    fn hold_handle(&self, stream: u64, on: bool) {
        if let Some(holds) = &self.real {
            return holds.set(self, stream, on);
        }
        let hold: unsafe extern "C" fn(u64, c_int) -> c_int = self.function("standin_hold");
        // SAFETY: an unknown handle is an error code.
        assert_eq!(unsafe { hold(stream, c_int::from(on)) }, 0, "no stream {stream:#x}");
    }

    /// Stops a stream before its next operation.
    pub fn hold(&self, stream: u64) {
        self.hold_handle(stream, true);
    }

    /// Lets a stream go on.
    pub fn release(&self, stream: u64) {
        self.hold_handle(stream, false);
    }

    /// Stops (or lets go on) every stream that does not block the default stream, also those made
    /// later.
    pub fn hold_side_streams(&self, on: bool) {
        self.hold_handle(u64::MAX, on);
    }

    /// Waits until every stream has done all that it can do without those that are held.
    pub fn settle(&self) {
        if self.is_real() {
            return real::settle(self);
        }
        let settle: unsafe extern "C" fn() = self.function("standin_settle");
        // SAFETY: takes no arguments.
        unsafe { settle() }
    }

    /// Handle, flags and priority of the streams that are there.
    #[must_use]
    pub fn streams(&self) -> Vec<(u64, i32, i32)> {
        let (mut handles, mut flags, mut priorities) = ([0u64; 64], [0i32; 64], [0i32; 64]);
        let list: unsafe extern "C" fn(*mut u64, *mut c_int, *mut c_int, u64) -> u64 = self.function("standin_streams");
        // SAFETY: three arrays of the length given.
        let n = unsafe { list(handles.as_mut_ptr(), flags.as_mut_ptr(), priorities.as_mut_ptr(), 64) } as usize;
        (0..n).map(|i| (handles[i], flags[i], priorities[i])).collect()
    }

    fn is_device(&self, address: u64, len: usize) -> bool {
        let is_device: unsafe extern "C" fn(u64, usize) -> c_int = self.function("standin_is_device");
        // SAFETY: only looks into the table.
        unsafe { is_device(address, len) != 0 }
    }

    /// What device memory holds at this moment, past all streams.
    #[must_use]
    pub fn peek(&self, address: u64, len: usize) -> Vec<u8> {
        if let Some(real) = &self.real {
            return real.peek(self, address, len);
        }
        assert!(len == 0 || self.is_device(address, len), "{len} bytes at {address:#x} are not device memory");
        let mut bytes = vec![0u8; len];
        // SAFETY: inside an allocation. A test may race with a stream's writes: the answer is
        // bytes.
        unsafe { libc::memcpy(bytes.as_mut_ptr().cast(), address as *const c_void, len) };
        bytes
    }

    /// Sets device memory at this moment, past all streams.
    pub fn poke(&self, address: u64, bytes: &[u8]) {
        if let Some(real) = &self.real {
            return real.poke(self, address, bytes);
        }
        assert!(bytes.is_empty() || self.is_device(address, bytes.len()), "not device memory: {address:#x}");
        // SAFETY: inside an allocation, which no reference covers.
        unsafe { libc::memcpy(address as *mut c_void, bytes.as_ptr().cast(), bytes.len()) };
    }

    /// Stops counting what is still there: after an error of a call that gives back.
    pub fn forget_leaks(&self) {
        self.settle();
        self.set("forget", 0, 0);
    }

    /// Asserts that nothing made through the driver is left, and that nobody waited for a whole
    /// context.
    pub fn assert_clean(&self) {
        if self.is_real() {
            return;
        }
        for key in ["live_allocations", "live_events", "live_streams", "live_registered", "live_modules", "retained"] {
            assert_eq!(self.get(key), 0, "{key}");
        }
        self.assert_never_waited();
    }

    /// Asserts that nobody waited for a whole context, reset one, or freed memory in use.
    pub fn assert_never_waited(&self) {
        if self.is_real() {
            return;
        }
        for key in ["context_syncs", "context_resets", "frees_that_wait", "waits_for_nothing"] {
            assert_eq!(self.get(key), 0, "{key}");
        }
    }
}
