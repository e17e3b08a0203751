//! The structures of `cufile.h`. Their sizes and offsets are asserted when this is compiled and
//! stand in [`LAYOUTS`] for the test that compares them with NVIDIA's header. They are the same in
//! 1.0 to 1.20, except for the statistics ([`crate::stats`]).

use std::ffi::{c_char, c_int, c_long, c_uint, c_void};

use crate::{CuFileError, Version, stats};

/// `CUfileHandle_t`: a registered file.
pub type Handle = *mut c_void;
/// `CUfileBatchHandle_t`: a batch.
pub type BatchHandle = *mut c_void;
/// `CUstream`, of the CUDA driver.
pub type Stream = *mut c_void;
/// `CUfileDriverStatusFlags_t`: one of `CU_FILE_*_SUPPORTED`, a number and not a mask.
pub type DriverStatusFlag = c_uint;
/// `CUfileP2PFlags_t`: a mask of `CU_FILE_P2P_FLAG_*`.
pub type P2pFlags = c_int;
/// `CUFileSizeTConfigParameter_t`.
pub type SizeTParameter = c_int;
/// `CUFileBoolConfigParameter_t`.
pub type BoolParameter = c_int;
/// `CUFileStringConfigParameter_t`.
pub type StringParameter = c_int;

/// `CUfileDescr_t`: the file to register.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Descr {
    /// One of `CU_FILE_HANDLE_TYPE_*`; says which member of `handle` counts.
    pub type_: c_int,
    /// The file.
    pub handle: DescrHandle,
    /// Calls of a user-space file system, null for a file descriptor.
    pub fs_ops: *const FsOps,
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
        Self { type_: crate::constants::CU_FILE_HANDLE_TYPE_OPAQUE_FD, handle, fs_ops: std::ptr::null() }
    }
}

/// `cufileRDMAInfo_t`: what a user-space file system needs to know of the memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RdmaInfo {
    /// Version of this structure.
    pub version: c_int,
    /// Length of `desc_str` in bytes.
    pub desc_len: c_int,
    /// The description.
    pub desc_str: *const c_char,
}

/// `CUfileFSOps_t`: the calls of a user-space file system. The socket addresses are `struct
/// sockaddr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct FsOps {
    /// Name of the file system.
    pub fs_type: Option<unsafe extern "C" fn(handle: *const c_void) -> *const c_char>,
    /// Lists the addresses of the RDMA devices; returns how many.
    pub get_rdma_device_list: Option<unsafe extern "C" fn(handle: *const c_void, addresses: *mut *mut c_void) -> c_int>,
    /// Priority of one of them for a range of a file.
    pub get_rdma_device_priority:
        Option<unsafe extern "C" fn(*const c_void, *mut c_char, usize, i64, address: *const c_void) -> c_int>,
    /// Reads; returns bytes or a negative error.
    pub read: Option<unsafe extern "C" fn(*const c_void, *mut c_char, usize, i64, *const RdmaInfo) -> isize>,
    /// Writes; returns bytes or a negative error.
    pub write: Option<unsafe extern "C" fn(*const c_void, *const c_char, usize, i64, *const RdmaInfo) -> isize>,
}

/// The part of [`DrvProps`] that nvidia-fs tells.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NvfsProps {
    /// Version of nvidia-fs.
    pub major_version: c_uint,
    /// Version of nvidia-fs.
    pub minor_version: c_uint,
    /// Requests up to this many KiB are polled for.
    pub poll_thresh_size: usize,
    /// Largest request that is not split, KiB.
    pub max_direct_io_size: usize,
    /// Bits `CU_FILE_*_SUPPORTED`.
    pub dstatusflags: c_uint,
    /// Bits `CU_FILE_USE_POLL_MODE`, `CU_FILE_ALLOW_COMPAT_MODE`, ….
    pub dcontrolflags: c_uint,
}

/// `CUfileDrvProps_t`: how the driver is set.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrvProps {
    /// The part of nvidia-fs.
    pub nvfs: NvfsProps,
    /// Bits `CU_FILE_BATCH_IO_SUPPORTED`, `CU_FILE_P2P_SUPPORTED`, ….
    pub fflags: c_uint,
    /// Bound of the bounce buffers of one GPU, KiB.
    pub max_device_cache_size: c_uint,
    /// One bounce buffer, KiB.
    pub per_buffer_cache_size: c_uint,
    /// Bound of the memory pinned on one GPU, KiB.
    pub max_device_pinned_mem_size: c_uint,
    /// Largest batch, requests.
    pub max_batch_io_size: c_uint,
    /// Time-out of a batch, milliseconds.
    pub max_batch_io_timeout_msecs: c_uint,
}

/// `CUfileIOParams_t`: one request of a batch. The header's union has one member; its fields stand
/// here flat.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IoParams {
    /// `CUFILE_BATCH`.
    pub mode: c_int,
    /// Start of the buffer.
    pub dev_ptr_base: *mut c_void,
    /// Where in the file, bytes.
    pub file_offset: i64,
    /// Where in the buffer, bytes; ignored for host memory.
    pub dev_ptr_offset: i64,
    /// Bytes.
    pub size: usize,
    /// The file.
    pub fh: Handle,
    /// `CUFILE_READ` or `CUFILE_WRITE`.
    pub opcode: c_int,
    /// Comes back in [`IoEvents::cookie`].
    pub cookie: *mut c_void,
}

/// `CUfileIOEvents_t`: what became of a request of a batch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IoEvents {
    /// [`IoParams::cookie`].
    pub cookie: *mut c_void,
    /// A mask of `CUFILE_COMPLETE`, `CUFILE_FAILED`, …; complete does not mean that every byte
    /// came.
    pub status: c_int,
    /// Bytes, or a negative error.
    pub ret: usize,
}

/// `CUfileIOVec_t`: a piece of memory of a vectored request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IoVec {
    /// Its start.
    pub base: *mut c_void,
    /// Its bytes.
    pub len: usize,
}

/// `struct timespec` of 64-bit Linux.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timespec {
    /// Whole seconds.
    pub tv_sec: c_long,
    /// Nanoseconds, below 1 000 000 000.
    pub tv_nsec: c_long,
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
    ($($rust:ty as $c:literal, $major:literal . $minor:literal, $size:literal { $($($field:ident).+ = $c_field:literal @ $at:literal,)* })*) => {
        $(const _: () = {
            assert!(size_of::<$rust>() == $size, $c);
            $(assert!(std::mem::offset_of!($rust, $($field).+) == $at, concat!($c, ": ", $c_field));)*
        };)*

        /// Every structure that crosses the interface.
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
    FsOps as "CUfileFSOps_t", 1 . 0, 40 {
        fs_type = "fs_type" @ 0, get_rdma_device_list = "getRDMADeviceList" @ 8,
        get_rdma_device_priority = "getRDMADevicePriority" @ 16, read = "read" @ 24, write = "write" @ 32,
    }
    RdmaInfo as "cufileRDMAInfo_t", 1 . 0, 16 { version = "version" @ 0, desc_len = "desc_len" @ 4, desc_str = "desc_str" @ 8, }
    DrvProps as "CUfileDrvProps_t", 1 . 0, 56 {
        nvfs.major_version = "nvfs.major_version" @ 0, nvfs.minor_version = "nvfs.minor_version" @ 4,
        nvfs.poll_thresh_size = "nvfs.poll_thresh_size" @ 8, nvfs.max_direct_io_size = "nvfs.max_direct_io_size" @ 16,
        nvfs.dstatusflags = "nvfs.dstatusflags" @ 24, nvfs.dcontrolflags = "nvfs.dcontrolflags" @ 28,
        fflags = "fflags" @ 32, max_device_cache_size = "max_device_cache_size" @ 36,
        per_buffer_cache_size = "per_buffer_cache_size" @ 40, max_device_pinned_mem_size = "max_device_pinned_mem_size" @ 44,
        max_batch_io_size = "max_batch_io_size" @ 48, max_batch_io_timeout_msecs = "max_batch_io_timeout_msecs" @ 52,
    }
    IoParams as "CUfileIOParams_t", 1 . 2, 64 {
        mode = "mode" @ 0, dev_ptr_base = "u.batch.devPtr_base" @ 8, file_offset = "u.batch.file_offset" @ 16,
        dev_ptr_offset = "u.batch.devPtr_offset" @ 24, size = "u.batch.size" @ 32, fh = "fh" @ 40, opcode = "opcode" @ 48,
        cookie = "cookie" @ 56,
    }
    IoEvents as "CUfileIOEvents_t", 1 . 2, 24 { cookie = "cookie" @ 0, status = "status" @ 8, ret = "ret" @ 16, }
    Timespec as "struct timespec", 1 . 2, 16 { tv_sec = "tv_sec" @ 0, tv_nsec = "tv_nsec" @ 8, }
    stats::OpCounter as "CUfileOpCounter_t", 1 . 15, 16 { ok = "ok" @ 0, err = "err" @ 8, }
    stats::GpuStats as "CUfilePerGpuStats_t", 1 . 15, 248 {
        uuid = "uuid" @ 0, read_bytes = "read_bytes" @ 16, read_bw_bytes_per_sec = "read_bw_bytes_per_sec" @ 24,
        read_utilization = "read_utilization" @ 32, read_duration_us = "read_duration_us" @ 40,
        n_total_reads = "n_total_reads" @ 48, n_p2p_reads = "n_p2p_reads" @ 56, n_nvfs_reads = "n_nvfs_reads" @ 64,
        n_posix_reads = "n_posix_reads" @ 72, n_unaligned_reads = "n_unaligned_reads" @ 80,
        n_dr_reads = "n_dr_reads" @ 88, n_sparse_regions = "n_sparse_regions" @ 96,
        n_inline_regions = "n_inline_regions" @ 104, n_reads_err = "n_reads_err" @ 112,
        writes_bytes = "writes_bytes" @ 120, write_bw_bytes_per_sec = "write_bw_bytes_per_sec" @ 128,
        write_utilization = "write_utilization" @ 136, write_duration_us = "write_duration_us" @ 144,
        n_total_writes = "n_total_writes" @ 152, n_p2p_writes = "n_p2p_writes" @ 160,
        n_nvfs_writes = "n_nvfs_writes" @ 168, n_posix_writes = "n_posix_writes" @ 176,
        n_unaligned_writes = "n_unaligned_writes" @ 184, n_dr_writes = "n_dr_writes" @ 192,
        n_writes_err = "n_writes_err" @ 200, n_mmap = "n_mmap" @ 208, n_mmap_ok = "n_mmap_ok" @ 216,
        n_mmap_err = "n_mmap_err" @ 224, n_mmap_free = "n_mmap_free" @ 232, reg_bytes = "reg_bytes" @ 240,
    }
    IoVec as "CUfileIOVec_t", 1 . 19, 16 { base = "base" @ 0, len = "len" @ 8, }
    stats::Level1 as "CUfileStatsLevel1_t", 1 . 19, 624 {
        read_ops = "read_ops" @ 0, write_ops = "write_ops" @ 16, hdl_register_ops = "hdl_register_ops" @ 32,
        hdl_deregister_ops = "hdl_deregister_ops" @ 48, buf_register_ops = "buf_register_ops" @ 64,
        buf_deregister_ops = "buf_deregister_ops" @ 80, read_bytes = "read_bytes" @ 96,
        write_bytes = "write_bytes" @ 104, read_bw_bytes_per_sec = "read_bw_bytes_per_sec" @ 112,
        write_bw_bytes_per_sec = "write_bw_bytes_per_sec" @ 120, read_lat_avg_us = "read_lat_avg_us" @ 128,
        write_lat_avg_us = "write_lat_avg_us" @ 136, read_ops_per_sec = "read_ops_per_sec" @ 144,
        write_ops_per_sec = "write_ops_per_sec" @ 152, read_lat_sum_us = "read_lat_sum_us" @ 160,
        write_lat_sum_us = "write_lat_sum_us" @ 168, batch_submit_ops = "batch_submit_ops" @ 176,
        batch_complete_ops = "batch_complete_ops" @ 192, batch_setup_ops = "batch_setup_ops" @ 208,
        batch_cancel_ops = "batch_cancel_ops" @ 224, batch_destroy_ops = "batch_destroy_ops" @ 240,
        batch_enqueued_ops = "batch_enqueued_ops" @ 256, batch_posix_enqueued_ops = "batch_posix_enqueued_ops" @ 272,
        batch_processed_ops = "batch_processed_ops" @ 288,
        batch_posix_processed_ops = "batch_posix_processed_ops" @ 304,
        batch_nvfs_submit_ops = "batch_nvfs_submit_ops" @ 320, batch_p2p_submit_ops = "batch_p2p_submit_ops" @ 336,
        batch_aio_submit_ops = "batch_aio_submit_ops" @ 352,
        batch_iouring_submit_ops = "batch_iouring_submit_ops" @ 368,
        batch_mixed_io_submit_ops = "batch_mixed_io_submit_ops" @ 384,
        batch_total_submit_ops = "batch_total_submit_ops" @ 400, batch_read_bytes = "batch_read_bytes" @ 416,
        batch_write_bytes = "batch_write_bytes" @ 424, batch_read_bw_bytes = "batch_read_bw_bytes" @ 432,
        batch_write_bw_bytes = "batch_write_bw_bytes" @ 440, batch_submit_lat_avg_us = "batch_submit_lat_avg_us" @ 448,
        batch_completion_lat_avg_us = "batch_completion_lat_avg_us" @ 456,
        batch_submit_ops_per_sec = "batch_submit_ops_per_sec" @ 464,
        batch_complete_ops_per_sec = "batch_complete_ops_per_sec" @ 472,
        batch_submit_lat_sum_us = "batch_submit_lat_sum_us" @ 480,
        batch_completion_lat_sum_us = "batch_completion_lat_sum_us" @ 488,
        last_batch_read_bytes = "last_batch_read_bytes" @ 496, last_batch_write_bytes = "last_batch_write_bytes" @ 504,
        readv_ops = "readv_ops" @ 512, writev_ops = "writev_ops" @ 528, readv_bytes = "readv_bytes" @ 544,
        writev_bytes = "writev_bytes" @ 552, readv_bw_bytes_per_sec = "readv_bw_bytes_per_sec" @ 560,
        writev_bw_bytes_per_sec = "writev_bw_bytes_per_sec" @ 568, readv_lat_avg_us = "readv_lat_avg_us" @ 576,
        writev_lat_avg_us = "writev_lat_avg_us" @ 584, readv_ops_per_sec = "readv_ops_per_sec" @ 592,
        writev_ops_per_sec = "writev_ops_per_sec" @ 600, readv_lat_sum_us = "readv_lat_sum_us" @ 608,
        writev_lat_sum_us = "writev_lat_sum_us" @ 616,
    }
    stats::Level2 as "CUfileStatsLevel2_t", 1 . 19, 1136 {
        basic = "basic" @ 0, read_size_kb_hist = "read_size_kb_hist" @ 624, write_size_kb_hist = "write_size_kb_hist" @ 880,
    }
    stats::Level3 as "CUfileStatsLevel3_t", 1 . 19, 5112 {
        detailed = "detailed" @ 0, num_gpus = "num_gpus" @ 1136, per_gpu_stats = "per_gpu_stats" @ 1144,
    }
}
