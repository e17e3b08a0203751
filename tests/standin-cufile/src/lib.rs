//! A libcufile for tests, and what lets NVIDIA's own run where the machine lacks what it looks for.
//!
//! [`LIBRARY`] moves bytes with `pread` and `pwrite` and fails as [`Standin`] tells it; in other
//! processes, as the environment variable [`VARIABLE`] tells it from the start
//! (`driver_open=5011;way=nvfs;hang=driver_open;…`). [`INTERPOSER`] is for `LD_PRELOAD`. Never part
//! of a release build.
#![expect(unsafe_code, reason = "calls into a C library")]
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use libloading::{Library, Symbol};

/// The stand-in's file.
pub const LIBRARY: &str = concat!(env!("OUT_DIR"), "/libcufile.so.0");
/// Shows `/proc/modules` and a udev record to a library that is loaded with it:
/// `FOREBAY_INTERPOSE_MODULES` and `FOREBAY_INTERPOSE_UDEV` name the files to show instead.
pub const INTERPOSER: &str = concat!(env!("OUT_DIR"), "/libinterpose.so");
/// What holds from the first call on.
pub const VARIABLE: &str = "FOREBAY_STANDIN_CUFILE";

/// A call that can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named as in cufile.h")]
pub enum Op {
    Read,
    Write,
    HandleRegister,
    HandleDeregister,
    BufRegister,
    BufDeregister,
    DriverOpen,
}

/// How it goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Returns this: -(5000+n) for reads and writes, 5000+n for the rest.
    Return(i64),
    /// Returns -1 with this `errno`.
    Errno(i32),
    /// Moves and reports so many bytes less.
    Short(i64),
    /// Waits for [`Standin::release`], then does what it should.
    Hang,
    /// Reports so many bytes more than it moved.
    Long(i64),
}

/// Commands to the stand-in that this process has loaded, and keeps.
#[derive(Debug)]
pub struct Standin(&'static Library);

impl Standin {
    /// The stand-in as it is loaded here, or to be loaded.
    #[must_use]
    pub fn here() -> Self {
        // SAFETY: our own library; its initialisers only make its own state.
        Self(Box::leak(Box::new(unsafe { Library::new(LIBRARY) }.unwrap())))
    }

    /// `count` calls of `op`, from number `after` on (0 is the next call), go wrong.
    pub fn fault(&self, op: Op, after: i64, count: i64, fault: Fault) {
        let (kind, value) = match fault {
            Fault::Return(value) => (0, value),
            Fault::Errno(errno) => (1, errno.into()),
            Fault::Short(bytes) => (2, bytes),
            Fault::Hang => (3, 0),
            Fault::Long(bytes) => (4, bytes),
        };
        // SAFETY: the function's type in the source next to this file.
        unsafe {
            let f: Symbol<'_, unsafe extern "C" fn(i32, i64, i64, i32, i64)> = self.0.get(b"standin_fault").unwrap();
            f(op as i32, after, count, kind, value);
        }
    }

    /// From now on nothing goes wrong.
    pub fn clear(&self) {
        self.call("standin_clear");
    }

    /// Lets every call that hangs go on.
    pub fn release(&self) {
        self.call("standin_release");
    }

    /// Waits until so many calls hang.
    pub fn wait_hanging(&self, calls: i64) {
        // SAFETY: as in `fault`.
        unsafe {
            let f: Symbol<'_, unsafe extern "C" fn(i64)> = self.0.get(b"standin_wait_hanging").unwrap();
            f(calls);
        }
    }

    /// Calls of `op` so far.
    #[must_use]
    pub fn count(&self, op: Op) -> i64 {
        // SAFETY: as in `fault`.
        unsafe {
            let f: Symbol<'_, unsafe extern "C" fn(i32) -> i64> = self.0.get(b"standin_count").unwrap();
            f(op as i32)
        }
    }

    /// Files registered now.
    #[must_use]
    pub fn handles(&self) -> i64 {
        self.ask("standin_handles")
    }

    /// Pieces of memory registered now.
    #[must_use]
    pub fn buffers(&self) -> i64 {
        self.ask("standin_buffers")
    }

    /// Calls that would be mistakes with NVIDIA's library: a handle that is not registered or whose
    /// descriptor was closed, memory beyond its registration.
    #[must_use]
    pub fn misuse(&self) -> i64 {
        self.ask("standin_misuse")
    }

    fn call(&self, name: &str) {
        // SAFETY: as in `fault`.
        unsafe {
            let f: Symbol<'_, unsafe extern "C" fn()> = self.0.get(name.as_bytes()).unwrap();
            f();
        }
    }

    fn ask(&self, name: &str) -> i64 {
        // SAFETY: as in `fault`.
        unsafe {
            let f: Symbol<'_, unsafe extern "C" fn() -> i64> = self.0.get(name.as_bytes()).unwrap();
            f()
        }
    }
}
