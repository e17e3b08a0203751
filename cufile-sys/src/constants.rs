//! The constants of `cufile.h`, with the version that brought each.
//!
//! Plain integers, never Rust enums: a library newer than this file may hand out values it does not
//! know. [`CONSTANTS`] lists them for the test that compares them with NVIDIA's header; the errors
//! stand in [`crate::name_of`].

use std::ffi::{c_int, c_uint};

use crate::Version;

/// A constant of `cufile.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Constant {
    /// The name in C.
    pub name: &'static str,
    /// Its value.
    pub value: i64,
    /// The version that has it first, as far as that is known; 1.0 where it is not.
    pub since: Version,
}

macro_rules! constants {
    ($($group:literal : $type:ty, $major:literal . $minor:literal { $($name:ident = $value:expr,)* })*) => {
        $($(
            #[doc = concat!($group, ": `", stringify!($name), "`.")]
            pub const $name: $type = $value;
        )*)*

        /// Every constant of this module.
        pub const CONSTANTS: &[Constant] = &[
            $($(Constant {
                name: stringify!($name),
                value: $value as i64,
                since: Version { major: $major, minor: $minor },
            },)*)*
        ];
    };
}

constants! {
    "What cuFile serves, a bit of `DrvProps::dstatusflags`": c_uint, 1 . 0 {
        CU_FILE_LUSTRE_SUPPORTED = 0,
        CU_FILE_WEKAFS_SUPPORTED = 1,
        CU_FILE_NFS_SUPPORTED = 2,
        CU_FILE_GPFS_SUPPORTED = 3,
        CU_FILE_NVME_SUPPORTED = 4,
        CU_FILE_NVMEOF_SUPPORTED = 5,
        CU_FILE_SCSI_SUPPORTED = 6,
        CU_FILE_SCALEFLUX_CSD_SUPPORTED = 7,
        CU_FILE_NVMESH_SUPPORTED = 8,
        CU_FILE_BEEGFS_SUPPORTED = 9,
    }
    "What cuFile serves, a bit of `DrvProps::dstatusflags`": c_uint, 1 . 13 {
        CU_FILE_NVME_P2P_SUPPORTED = 11,
    }
    "What cuFile serves, a bit of `DrvProps::dstatusflags`": c_uint, 1 . 14 {
        CU_FILE_SCATEFS_SUPPORTED = 12,
    }
    "What cuFile serves, a bit of `DrvProps::dstatusflags`": c_uint, 1 . 16 {
        CU_FILE_VIRTIOFS_SUPPORTED = 13,
    }
    "What cuFile serves, a bit of `DrvProps::dstatusflags`": c_uint, 1 . 19 {
        CU_FILE_PANFS_SUPPORTED = 14,
    }
    "How the driver is set, a bit of `DrvProps::dcontrolflags`": c_uint, 1 . 0 {
        CU_FILE_USE_POLL_MODE = 0,
        CU_FILE_ALLOW_COMPAT_MODE = 1,
    }
    "How the driver is set, a bit of `DrvProps::dcontrolflags`": c_uint, 1 . 17 {
        CU_FILE_POSIX_IO_MODE = 2,
        CU_FILE_FALLBACK_IO_MODE = 4,
    }
    "How the driver is set, a bit of `DrvProps::dcontrolflags`": c_uint, 1 . 19 {
        CU_FILE_VANILLA_POSIX_IO_MODE = 2,
    }
    "A feature, a bit of `DrvProps::fflags`": c_uint, 1 . 0 {
        CU_FILE_DYN_ROUTING_SUPPORTED = 0,
        CU_FILE_BATCH_IO_SUPPORTED = 1,
        CU_FILE_STREAMS_SUPPORTED = 2,
        CU_FILE_PARALLEL_IO_SUPPORTED = 3,
    }
    "A feature, a bit of `DrvProps::fflags`": c_uint, 1 . 16 {
        CU_FILE_P2P_SUPPORTED = 4,
    }
    "A way from drive to GPU, by number": c_int, 1 . 16 {
        CUFILE_P2PDMA = 0,
        CUFILE_NVFS = 1,
        CUFILE_DMABUF = 2,
        CUFILE_C2C = 3,
        CUFILE_NVIDIA_PEERMEM = 4,
    }
    "A way from drive to GPU, as a mask for the P2P calls": c_int, 1 . 16 {
        CU_FILE_P2P_FLAG_PCI_P2PDMA = 1,
        CU_FILE_P2P_FLAG_NVFS = 2,
        CU_FILE_P2P_FLAG_DMABUF = 4,
        CU_FILE_P2P_FLAG_C2C = 8,
    }
    "Direction of a batched request": c_int, 1 . 2 {
        CUFILE_READ = 0,
        CUFILE_WRITE = 1,
    }
    "Mode of a batched request": c_int, 1 . 2 {
        CUFILE_BATCH = 1,
    }
    "State of a batched request, a mask": c_int, 1 . 2 {
        CUFILE_WAITING = 0x01,
        CUFILE_PENDING = 0x02,
        CUFILE_INVALID = 0x04,
        CUFILE_CANCELED = 0x08,
        CUFILE_COMPLETE = 0x10,
        CUFILE_TIMEOUT = 0x20,
        CUFILE_FAILED = 0x40,
    }
    "Flag of an RDMA registration": c_int, 1 . 0 {
        CU_FILE_RDMA_REGISTER = 1,
        CU_FILE_RDMA_RELAXED_ORDERING = 2,
    }
    "Result of a user-space file system": c_int, 1 . 19 {
        CU_FILE_RDMA_ERR_BASE = 6000,
        CU_FILE_RDMA_SUCCESS = 0,
        CU_FILE_RDMA_RESET_TOKEN = 6001,
        CU_FILE_RDMA_RESET_TOKEN_FAILED = 6002,
    }
    "What a descriptor holds": c_int, 1 . 0 {
        CU_FILE_HANDLE_TYPE_OPAQUE_FD = 1,
        CU_FILE_HANDLE_TYPE_OPAQUE_WIN32 = 2,
        CU_FILE_HANDLE_TYPE_USERSPACE_FS = 3,
    }
    "What stays the same for a registered stream, a mask": c_uint, 1 . 7 {
        CU_FILE_STREAM_FIXED_BUF_OFFSET = 1,
        CU_FILE_STREAM_FIXED_FILE_OFFSET = 2,
        CU_FILE_STREAM_FIXED_FILE_SIZE = 4,
        CU_FILE_STREAM_PAGE_ALIGNED_INPUTS = 8,
    }
    "A setting that is a number": c_int, 1 . 14 {
        CUFILE_PARAM_PROFILE_STATS = 0,
        CUFILE_PARAM_EXECUTION_MAX_IO_QUEUE_DEPTH = 1,
        CUFILE_PARAM_EXECUTION_MAX_IO_THREADS = 2,
        CUFILE_PARAM_EXECUTION_MIN_IO_THRESHOLD_SIZE_KB = 3,
        CUFILE_PARAM_EXECUTION_MAX_REQUEST_PARALLELISM = 4,
        CUFILE_PARAM_PROPERTIES_MAX_DIRECT_IO_SIZE_KB = 5,
        CUFILE_PARAM_PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB = 6,
        CUFILE_PARAM_PROPERTIES_PER_BUFFER_CACHE_SIZE_KB = 7,
        CUFILE_PARAM_PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB = 8,
        CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE = 9,
        CUFILE_PARAM_POLLTHRESHOLD_SIZE_KB = 10,
        CUFILE_PARAM_PROPERTIES_BATCH_IO_TIMEOUT_MS = 11,
    }
    "A setting that is on or off": c_int, 1 . 14 {
        CUFILE_PARAM_PROPERTIES_USE_POLL_MODE = 0,
        CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE = 1,
        CUFILE_PARAM_FORCE_COMPAT_MODE = 2,
        CUFILE_PARAM_FS_MISC_API_CHECK_AGGRESSIVE = 3,
        CUFILE_PARAM_EXECUTION_PARALLEL_IO = 4,
        CUFILE_PARAM_PROFILE_NVTX = 5,
        CUFILE_PARAM_PROPERTIES_ALLOW_SYSTEM_MEMORY = 6,
        CUFILE_PARAM_USE_PCIP2PDMA = 7,
        CUFILE_PARAM_PREFER_IO_URING = 8,
        CUFILE_PARAM_FORCE_ODIRECT_MODE = 9,
        CUFILE_PARAM_SKIP_TOPOLOGY_DETECTION = 10,
        CUFILE_PARAM_STREAM_MEMOPS_BYPASS = 11,
    }
    "A setting that is on or off": c_int, 1 . 19 {
        CUFILE_PARAM_PROPERTIES_POSIX_IO_MODE = 12,
        CUFILE_PARAM_GDS_FALLBACK_IO = 13,
    }
    "A setting that is text": c_int, 1 . 14 {
        CUFILE_PARAM_LOGGING_LEVEL = 0,
        CUFILE_PARAM_ENV_LOGFILE_PATH = 1,
        CUFILE_PARAM_LOG_DIR = 2,
    }
    "A setting that is text": c_int, 1 . 19 {
        CUFILE_PARAM_RDMA_TRANSPORT = 3,
    }
    "A setting that is a list of numbers": c_int, 1 . 15 {
        CUFILE_PARAM_POSIX_POOL_SLAB_SIZE_KB = 0,
        CUFILE_PARAM_POSIX_POOL_SLAB_COUNT = 1,
    }
    "A setting that is a list of numbers": c_int, 1 . 17 {
        CUFILE_PARAM_GPU_BOUNCE_BUFFER_SLAB_SIZE_KB = 2,
        CUFILE_PARAM_GPU_BOUNCE_BUFFER_SLAB_COUNT = 3,
    }
    "Bytes of a GPU's identifier": c_uint, 1 . 15 {
        CUFILE_GPU_UUID_LEN = 16,
    }
}
