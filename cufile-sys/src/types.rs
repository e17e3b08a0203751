//! The structures of `cufile.h`. Their sizes and offsets are asserted when this is compiled and
//! stand in [`LAYOUTS`] for the test that compares them with NVIDIA's header. They are the same in
//! 1.0 to 1.20; for the statistics see [`crate::stats`].

use std::ffi::{c_int, c_void};

use crate::{CuFileError, Version, stats};

/// `CUfileHandle_t`: a registered file.
pub type Handle = *mut c_void;

/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`: a [`Descr`] holds a file descriptor.
pub const HANDLE_TYPE_OPAQUE_FD: c_int = 1;

/// `CUfileDescr_t`: the file to register.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Descr {
    /// [`HANDLE_TYPE_OPAQUE_FD`]; says which member of `handle` counts.
    pub type_: c_int,
    /// The file.
    pub handle: DescrHandle,
    /// Calls of a user-space file system, null for a file descriptor.
    pub fs_ops: *const c_void,
}

/// The file of a [`Descr`].
#[repr(C)]
#[derive(Clone, Copy)]
pub union DescrHandle {
    /// A file descriptor.
    pub fd: c_int,
    /// The name by which a user-space file system knows its file.
    pub handle: *mut c_void,
}

impl Descr {
    /// Describes an open file descriptor.
    #[must_use]
    pub const fn of_fd(fd: c_int) -> Self {
        let mut handle = DescrHandle { handle: std::ptr::null_mut() };
        handle.fd = fd;
        Self { type_: HANDLE_TYPE_OPAQUE_FD, handle, fs_ops: std::ptr::null() }
    }
}

/// How a structure lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The type in C.
    pub name: &'static str,
    /// Its bytes.
    pub size: usize,
    /// Its fields in C, and where each starts.
    pub fields: &'static [(&'static str, usize)],
    /// The version that has it first, in this layout.
    pub since: Version,
}

macro_rules! layouts {
    ($($rust:ty as $c:literal, $major:literal . $minor:literal, $size:literal { $($field:ident = $c_field:literal @ $at:literal,)* })*) => {
        $(const _: () = {
            assert!(size_of::<$rust>() == $size, $c);
            $(assert!(std::mem::offset_of!($rust, $field) == $at, concat!($c, ": ", $c_field));)*
        };)*

        /// Every structure that crosses the interface, but the statistics as a whole.
        pub const LAYOUTS: &[Layout] = &[
            $(Layout {
                name: $c,
                size: $size,
                fields: &[$(($c_field, $at)),*],
                since: Version { major: $major, minor: $minor },
            },)*
        ];
    };
}

layouts! {
    CuFileError as "CUfileError_t", 1 . 0, 8 { err = "err" @ 0, cu_err = "cu_err" @ 4, }
    Descr as "CUfileDescr_t", 1 . 0, 24 { type_ = "type" @ 0, handle = "handle" @ 8, fs_ops = "fs_ops" @ 16, }
    stats::GpuStats as "CUfilePerGpuStats_t", 1 . 15, 248 {
        n_p2p_reads = "n_p2p_reads" @ 56, n_nvfs_reads = "n_nvfs_reads" @ 64, n_posix_reads = "n_posix_reads" @ 72,
        n_p2p_writes = "n_p2p_writes" @ 160, n_nvfs_writes = "n_nvfs_writes" @ 168,
        n_posix_writes = "n_posix_writes" @ 176,
    }
}
