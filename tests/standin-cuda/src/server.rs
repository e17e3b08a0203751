//! The part of a serving stack: memory, streams and events of its own, on a GPU's primary context.
#![expect(unsafe_code, reason = "calls into a shared library")]

use std::ffi::{c_int, c_void};

use crate::{Standin, load};

/// A server's process on one GPU; makes the primary context current on the calling thread.
#[derive(Debug)]
pub struct Server {
    lib: &'static Standin,
    ordinal: i32,
    context: u64,
}

macro_rules! cuda {
    ($lib:expr, $name:literal, $($arg:expr => $ty:ty),*) => {{
        let f: unsafe extern "C" fn($($ty),*) -> c_int = $lib.function($name);
        $lib.set_server(true);
        // SAFETY: the types are those of the function; pointers are to live values of the callers
        // here.
        let code = unsafe { f($($arg),*) };
        $lib.set_server(false);
        code
    }};
}

macro_rules! ok {
    ($lib:expr, $name:literal, $($arg:expr => $ty:ty),*) => {
        assert_eq!(cuda!($lib, $name, $($arg => $ty),*), 0, $name)
    };
}

impl Server {
    /// On GPU `ordinal`.
    #[must_use]
    pub fn new(ordinal: i32) -> Self {
        let lib = load();
        let mut context = 0u64;
        ok!(lib, "cuInit", 0 => u32);
        ok!(lib, "cuDevicePrimaryCtxRetain", &raw mut context => *mut u64, ordinal => c_int);
        let server = Self { lib, ordinal, context };
        server.bind();
        server
    }

    /// Makes the context current on this thread.
    pub fn bind(&self) {
        ok!(self.lib, "cuCtxSetCurrent", self.context => u64);
    }

    /// Memory of `len` bytes.
    #[must_use]
    pub fn alloc(&self, len: usize) -> Memory {
        self.bind();
        let mut address = 0u64;
        ok!(self.lib, "cuMemAlloc_v2", &raw mut address => *mut u64, len => usize);
        Memory { lib: self.lib, address, len }
    }

    /// A stream; `side` streams do not wait for the default stream.
    #[must_use]
    pub fn stream(&self, side: bool) -> Stream {
        self.bind();
        let mut handle = 0u64;
        ok!(self.lib, "cuStreamCreateWithPriority", &raw mut handle => *mut u64, u32::from(side) => u32, -1 => c_int);
        Stream { lib: self.lib, handle, owned: true }
    }

    /// The default stream.
    #[must_use]
    pub fn default_stream(&self) -> Stream {
        self.bind();
        Stream { lib: self.lib, handle: 0, owned: false }
    }

    /// An event.
    #[must_use]
    pub fn event(&self) -> Event {
        self.bind();
        let mut handle = 0u64;
        ok!(self.lib, "cuEventCreate", &raw mut handle => *mut u64, 0 => u32);
        Event { lib: self.lib, handle }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        ok!(self.lib, "cuDevicePrimaryCtxRelease_v2", self.ordinal => c_int);
    }
}

/// Device memory; freed when dropped.
#[derive(Debug)]
pub struct Memory {
    lib: &'static Standin,
    address: u64,
    len: usize,
}

impl Memory {
    /// Address on the GPU.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What the memory holds at this moment, past all streams.
    #[must_use]
    pub fn peek(&self) -> Vec<u8> {
        self.lib.peek(self.address, self.len)
    }

    /// Sets the bytes at this moment, past all streams.
    pub fn poke(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        self.lib.poke(self.address + offset as u64, bytes);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // What this server still has in its streams is no wait of the engine's.
        self.lib.settle();
        ok!(self.lib, "cuMemFree_v2", self.address => u64);
    }
}

/// A stream.
#[derive(Debug)]
pub struct Stream {
    lib: &'static Standin,
    handle: u64,
    owned: bool,
}

impl Stream {
    /// The driver's handle.
    #[must_use]
    pub fn handle(&self) -> u64 {
        self.handle
    }

    /// Sets bytes of the memory in the order of the stream.
    pub fn fill(&self, memory: &Memory, value: u8) {
        ok!(self.lib, "cuMemsetD8Async", memory.address => u64, value => u8, memory.len => usize, self.handle => u64);
    }

    /// Copies one memory to another in the order of the stream.
    pub fn copy(&self, from: &Memory, to: &Memory) {
        let len = from.len.min(to.len);
        ok!(self.lib, "cuMemcpyDtoDAsync_v2", to.address => u64, from.address => u64, len => usize, self.handle => u64);
    }

    /// As [`Stream::fill`], for memory known by its address.
    pub fn fill_at(&self, address: u64, value: u8, len: usize) {
        ok!(self.lib, "cuMemsetD8Async", address => u64, value => u8, len => usize, self.handle => u64);
    }

    /// As [`Stream::copy`], for memory known by its address.
    pub fn copy_at(&self, from: u64, to: u64, len: usize) {
        ok!(self.lib, "cuMemcpyDtoDAsync_v2", to => u64, from => u64, len => usize, self.handle => u64);
    }

    /// Waits for what was submitted; the code where it fails.
    pub fn synchronize(&self) -> i32 {
        cuda!(self.lib, "cuStreamSynchronize", self.handle => u64)
    }

    /// Begins a capture of mode global (0), thread-local (1) or relaxed (2).
    pub fn begin_capture(&self, mode: i32) {
        ok!(self.lib, "cuStreamBeginCapture_v2", self.handle => u64, mode => c_int);
    }

    /// Ends a capture; the code where it is not valid.
    pub fn end_capture(&self) -> i32 {
        let mut graph = std::ptr::null_mut::<c_void>();
        cuda!(self.lib, "cuStreamEndCapture", self.handle => u64, &raw mut graph => *mut *mut c_void)
    }

    /// Stops the stream before its next operation.
    pub fn hold(&self) {
        self.lib.hold(self.handle);
    }

    /// Lets it go on.
    pub fn release(&self) {
        self.lib.release(self.handle);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned {
            ok!(self.lib, "cuStreamDestroy_v2", self.handle => u64);
        }
    }
}

/// An event.
#[derive(Debug)]
pub struct Event {
    lib: &'static Standin,
    handle: u64,
}

impl Event {
    /// Records it in a stream.
    pub fn record(&self, stream: &Stream) {
        ok!(self.lib, "cuEventRecord", self.handle => u64, stream.handle => u64);
    }

    /// Makes a stream wait for the latest record; the code where it fails.
    pub fn wait(&self, stream: &Stream) -> i32 {
        cuda!(self.lib, "cuStreamWaitEvent", stream.handle => u64, self.handle => u64, 0 => u32)
    }

    /// Whether the work before the latest record is over (0), or not (600).
    #[must_use]
    pub fn query(&self) -> i32 {
        cuda!(self.lib, "cuEventQuery", self.handle => u64)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        ok!(self.lib, "cuEventDestroy_v2", self.handle => u64);
    }
}
