//! The C interface: one optional function per symbol, as versions of the library differ in what
//! they have.
//!
//! To add a call: the version that brought it, its name and its type, in the table below;
//! `tests/check_abi.rs` compares name, version and type with NVIDIA's headers. Nothing here is safe
//! to call without reading NVIDIA's documentation; `cuFileDriverOpen` in particular never returns
//! where `/proc/modules` is missing.

use std::ffi::{c_char, c_int, c_long, c_uint, c_void};

use libloading::Library;

use crate::Version;
use crate::error::CuFileError;
#[cfg(doc)]
use crate::stats;
use crate::stats::{Level1Out, Level2Out, Level3Out};
use crate::types::{
    BatchHandle, BoolParameter, Descr, DriverStatusFlag, DrvProps, Handle, IoEvents, IoParams, IoVec, P2pFlags,
    SizeTParameter, Stream, StringParameter, Timespec,
};

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
    /// Stops the driver; the old entry, which newer headers replace by the one below.
    1 . 0 driver_close_v1 = "cuFileDriverClose": unsafe extern "C" fn() -> CuFileError;
    /// Stops the driver.
    1 . 4 driver_close = "cuFileDriverClose_v2": unsafe extern "C" fn() -> CuFileError;
    /// How often the driver is open, or a negative error.
    1 . 4 use_count = "cuFileUseCount": unsafe extern "C" fn() -> c_long;
    /// How the driver is set.
    1 . 0 driver_get_properties = "cuFileDriverGetProperties":
        unsafe extern "C" fn(props: *mut DrvProps) -> CuFileError;
    /// Polls for small requests.
    1 . 0 driver_set_poll_mode = "cuFileDriverSetPollMode":
        unsafe extern "C" fn(poll: bool, poll_threshold_kb: usize) -> CuFileError;
    /// Largest request that is not split, KiB.
    1 . 0 driver_set_max_direct_io_size = "cuFileDriverSetMaxDirectIOSize":
        unsafe extern "C" fn(size_kb: usize) -> CuFileError;
    /// Bound of the bounce buffers, KiB.
    1 . 0 driver_set_max_cache_size = "cuFileDriverSetMaxCacheSize":
        unsafe extern "C" fn(size_kb: usize) -> CuFileError;
    /// Bound of the pinned GPU memory, KiB.
    1 . 0 driver_set_max_pinned_mem_size = "cuFileDriverSetMaxPinnedMemSize":
        unsafe extern "C" fn(size_kb: usize) -> CuFileError;
    /// The ways from a kind of drive to the GPU.
    1 . 16 driver_get_p2p_flags = "cuFileDriverGetP2PFlags":
        unsafe extern "C" fn(of: DriverStatusFlag, flags: *mut P2pFlags) -> CuFileError;
    /// Chooses among them.
    1 . 16 driver_set_p2p_flags = "cuFileDriverSetP2PFlags":
        unsafe extern "C" fn(of: DriverStatusFlag, flags: P2pFlags) -> CuFileError;
    /// Writes 1000·major + 10·minor. Needs no driver.
    1 . 8 get_version = "cuFileGetVersion": unsafe extern "C" fn(version: *mut c_int) -> CuFileError;
    /// Writes the PCIe topology to a file.
    1 . 17 export_pcie_topology = "cuFileExportPCIeTopology":
        unsafe extern "C" fn(filename: *const c_char) -> CuFileError;
    /// A GPU's BAR1, KiB.
    1 . 15 get_bar_size_in_kb = "cuFileGetBARSizeInKB":
        unsafe extern "C" fn(gpu: c_int, size_kb: *mut usize) -> CuFileError;
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
    /// Reads into several pieces of memory. The result is for [`crate::transferred`].
    1 . 19 readv = "cuFileReadv":
        unsafe extern "C" fn(
            handle: Handle,
            pieces: *const IoVec,
            count: usize,
            file_offset: i64,
            flags: c_uint,
        ) -> isize;
    /// Writes several pieces of memory. The result is for [`crate::transferred`].
    1 . 19 writev = "cuFileWritev":
        unsafe extern "C" fn(
            handle: Handle,
            pieces: *const IoVec,
            count: usize,
            file_offset: i64,
            flags: c_uint,
        ) -> isize;
    /// Makes a batch.
    1 . 2 batch_io_set_up = "cuFileBatchIOSetUp":
        unsafe extern "C" fn(batch: *mut BatchHandle, requests: c_uint) -> CuFileError;
    /// Starts its requests.
    1 . 2 batch_io_submit = "cuFileBatchIOSubmit":
        unsafe extern "C" fn(batch: BatchHandle, count: c_uint, requests: *mut IoParams, flags: c_uint) -> CuFileError;
    /// Waits for some of them. Complete does not mean that every byte came.
    1 . 2 batch_io_get_status = "cuFileBatchIOGetStatus":
        unsafe extern "C" fn(
            batch: BatchHandle,
            at_least: c_uint,
            count: *mut c_uint,
            events: *mut IoEvents,
            timeout: *mut Timespec,
        ) -> CuFileError;
    /// Cancels the requests that have not started.
    1 . 2 batch_io_cancel = "cuFileBatchIOCancel": unsafe extern "C" fn(batch: BatchHandle) -> CuFileError;
    /// Frees the batch.
    1 . 2 batch_io_destroy = "cuFileBatchIODestroy": unsafe extern "C" fn(batch: BatchHandle);
    /// Reads in the order of a CUDA stream. All that the arguments point to must stay until the
    /// stream has passed the call.
    1 . 7 read_async = "cuFileReadAsync":
        unsafe extern "C" fn(
            handle: Handle,
            base: *mut c_void,
            bytes: *mut usize,
            file_offset: *mut i64,
            base_offset: *mut i64,
            bytes_read: *mut isize,
            stream: Stream,
        ) -> CuFileError;
    /// Writes in the order of a CUDA stream. All that the arguments point to must stay until the
    /// stream has passed the call.
    1 . 7 write_async = "cuFileWriteAsync":
        unsafe extern "C" fn(
            handle: Handle,
            base: *mut c_void,
            bytes: *mut usize,
            file_offset: *mut i64,
            base_offset: *mut i64,
            bytes_written: *mut isize,
            stream: Stream,
        ) -> CuFileError;
    /// Prepares a stream; a mask of `CU_FILE_STREAM_*`.
    1 . 7 stream_register = "cuFileStreamRegister": unsafe extern "C" fn(stream: Stream, flags: c_uint) -> CuFileError;
    /// Undoes it.
    1 . 7 stream_deregister = "cuFileStreamDeregister": unsafe extern "C" fn(stream: Stream) -> CuFileError;
    /// A setting that is a number.
    1 . 14 get_parameter_size_t = "cuFileGetParameterSizeT":
        unsafe extern "C" fn(parameter: SizeTParameter, value: *mut usize) -> CuFileError;
    /// A setting that is on or off.
    1 . 14 get_parameter_bool = "cuFileGetParameterBool":
        unsafe extern "C" fn(parameter: BoolParameter, value: *mut bool) -> CuFileError;
    /// A setting that is text.
    1 . 14 get_parameter_string = "cuFileGetParameterString":
        unsafe extern "C" fn(parameter: StringParameter, text: *mut c_char, bytes: c_int) -> CuFileError;
    /// Bounds of a setting that is a number.
    1 . 15 get_parameter_min_max_value = "cuFileGetParameterMinMaxValue":
        unsafe extern "C" fn(parameter: SizeTParameter, min: *mut usize, max: *mut usize) -> CuFileError;
    /// Sets a number; before the driver is opened.
    1 . 14 set_parameter_size_t = "cuFileSetParameterSizeT":
        unsafe extern "C" fn(parameter: SizeTParameter, value: usize) -> CuFileError;
    /// Sets on or off; before the driver is opened.
    1 . 14 set_parameter_bool = "cuFileSetParameterBool":
        unsafe extern "C" fn(parameter: BoolParameter, value: bool) -> CuFileError;
    /// Sets text; before the driver is opened.
    1 . 14 set_parameter_string = "cuFileSetParameterString":
        unsafe extern "C" fn(parameter: StringParameter, text: *const c_char) -> CuFileError;
    /// Sets the host bounce buffers; before the driver is opened.
    1 . 15 set_parameter_posix_pool_slab_array = "cuFileSetParameterPosixPoolSlabArray":
        unsafe extern "C" fn(sizes_kb: *const usize, counts: *const usize, length: c_int) -> CuFileError;
    /// The host bounce buffers.
    1 . 15 get_parameter_posix_pool_slab_array = "cuFileGetParameterPosixPoolSlabArray":
        unsafe extern "C" fn(sizes_kb: *mut usize, counts: *mut usize, length: c_int) -> CuFileError;
    /// Sets the GPU bounce buffers; before the driver is opened.
    1 . 17 set_parameter_gpu_bounce_buffer_slab_array = "cuFileSetParameterGpuBounceBufferSlabArray":
        unsafe extern "C" fn(sizes_kb: *const usize, counts: *const usize, length: c_int) -> CuFileError;
    /// The GPU bounce buffers.
    1 . 17 get_parameter_gpu_bounce_buffer_slab_array = "cuFileGetParameterGpuBounceBufferSlabArray":
        unsafe extern "C" fn(sizes_kb: *mut usize, counts: *mut usize, length: c_int) -> CuFileError;
    /// How much is counted, 0 to 3.
    1 . 15 set_stats_level = "cuFileSetStatsLevel": unsafe extern "C" fn(level: c_int) -> CuFileError;
    /// How much is counted.
    1 . 15 get_stats_level = "cuFileGetStatsLevel": unsafe extern "C" fn(level: *mut c_int) -> CuFileError;
    /// Starts counting.
    1 . 15 stats_start = "cuFileStatsStart": unsafe extern "C" fn() -> CuFileError;
    /// Stops counting.
    1 . 15 stats_stop = "cuFileStatsStop": unsafe extern "C" fn() -> CuFileError;
    /// Sets the counters to zero.
    1 . 15 stats_reset = "cuFileStatsReset": unsafe extern "C" fn() -> CuFileError;
    /// Counters, to be read with [`stats::Buffer::level1`].
    1 . 15 get_stats_l1 = "cuFileGetStatsL1": unsafe extern "C" fn(stats: *mut Level1Out) -> CuFileError;
    /// Counters and sizes, to be read with [`stats::Buffer::level2`].
    1 . 15 get_stats_l2 = "cuFileGetStatsL2": unsafe extern "C" fn(stats: *mut Level2Out) -> CuFileError;
    /// Counters, sizes and GPUs, to be read with [`stats::Buffer::level3`].
    1 . 15 get_stats_l3 = "cuFileGetStatsL3": unsafe extern "C" fn(stats: *mut Level3Out) -> CuFileError;
}
