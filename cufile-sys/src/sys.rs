//! The functions of `cufile.h` that Forebay calls. Each is optional, as versions of the library
//! differ in what they have.
//!
//! To add a call: the version that brought it, its name and its type, in the table below;
//! `tests/check_abi.rs` compares name, version and type with NVIDIA's headers. Nothing here is safe
//! to call without reading NVIDIA's documentation; `cuFileDriverOpen` in particular never returns
//! where `/proc/modules` is missing.

use std::ffi::{c_int, c_void};

use libloading::Library;

use crate::Version;
use crate::error::CuFileError;
use crate::stats::Buffer;
use crate::types::{Descr, Handle};

/// A function of `cufile.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function {
    /// The symbol.
    pub name: &'static str,
    /// Its type as it is written here.
    pub signature: &'static str,
    /// The version that has it first, as far as that is known.
    pub since: Version,
}

macro_rules! symbols {
    ($($(#[$doc:meta])* $major:literal . $minor:literal $field:ident = $name:literal : $type:ty;)*) => {
        /// The functions that the opened library has.
        #[derive(Clone, Copy, Debug)]
        pub struct Symbols {
            $($(#[$doc])* #[doc = concat!("`", $name, "`, since ", $major, ".", $minor, ".")] pub $field: Option<$type>,)*
        }

        /// Every function of this module.
        pub const FUNCTIONS: &[Function] = &[
            $(Function { name: $name, signature: stringify!($type), since: Version { major: $major, minor: $minor } },)*
        ];

        impl Symbols {
            /// Looks every symbol up.
            ///
            /// # Safety
            /// The library must be libcufile, and the result must not be used after it is closed.
            pub(crate) unsafe fn load(library: &Library) -> Self {
                Self {
                    $($field: {
                        // SAFETY: the library is the caller's promise; the type is `cufile.h`'s.
                        unsafe { library.get::<$type>(concat!($name, "\0").as_bytes()) }.ok().map(|s| *s)
                    },)*
                }
            }

            /// The names of those that the library has.
            #[must_use]
            pub fn present(&self) -> Vec<&'static str> {
                let mut names = Vec::new();
                $(if self.$field.is_some() {
                    names.push($name);
                })*
                names
            }
        }
    };
}

symbols! {
    /// Starts the driver. Never returns without `/proc/modules`: check for it, and try the call in
    /// a program of its own first.
    1 . 0 driver_open = "cuFileDriverOpen": unsafe extern "C" fn() -> CuFileError;
    /// Writes 1000·major + 10·minor. Needs no driver.
    1 . 8 get_version = "cuFileGetVersion": unsafe extern "C" fn(version: *mut c_int) -> CuFileError;
    /// Registers an open file. Once per descriptor.
    1 . 0 handle_register = "cuFileHandleRegister":
        unsafe extern "C" fn(handle: *mut Handle, descr: *mut Descr) -> CuFileError;
    /// Undoes it; the descriptor stays open.
    1 . 0 handle_deregister = "cuFileHandleDeregister": unsafe extern "C" fn(handle: Handle);
    /// Registers memory of a GPU (host memory in newer versions). Once per address.
    1 . 0 buf_register = "cuFileBufRegister":
        unsafe extern "C" fn(base: *const c_void, bytes: usize, flags: c_int) -> CuFileError;
    /// Undoes it.
    1 . 0 buf_deregister = "cuFileBufDeregister": unsafe extern "C" fn(base: *const c_void) -> CuFileError;
    /// Reads a file into memory. The result is for [`crate::transferred`].
    1 . 0 read = "cuFileRead":
        unsafe extern "C" fn(
            handle: Handle,
            base: *mut c_void,
            bytes: usize,
            file_offset: i64,
            base_offset: i64,
        ) -> isize;
    /// Writes memory to a file. The result is for [`crate::transferred`].
    1 . 0 write = "cuFileWrite":
        unsafe extern "C" fn(
            handle: Handle,
            base: *const c_void,
            bytes: usize,
            file_offset: i64,
            base_offset: i64,
        ) -> isize;
    /// How much is counted, 0 to 3.
    1 . 15 set_stats_level = "cuFileSetStatsLevel": unsafe extern "C" fn(level: c_int) -> CuFileError;
    /// Starts counting.
    1 . 15 stats_start = "cuFileStatsStart": unsafe extern "C" fn() -> CuFileError;
    /// Counters, to be read with [`Buffer::gpus`].
    1 . 15 get_stats_l3 = "cuFileGetStatsL3": unsafe extern "C" fn(stats: *mut Buffer) -> CuFileError;
}
