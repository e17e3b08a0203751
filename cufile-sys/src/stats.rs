//! cuFile's statistics: what the `cuFileGetStatsL*` calls write, and how to read it.
//!
//! The structures grew in 1.19: levels 1, 2 and 3 are 512, 1024 and 5000 bytes before it and 624,
//! 1136 and 5112 from it, with the new counters in the middle of levels 2 and 3. So the calls take
//! a [`Buffer`] larger than any of them, whose contents are read by the version of the library. The
//! structures here are those of 1.19; with an older library the new counters are zero.
#![expect(unsafe_code, reason = "plain integers are read out of a buffer that C filled")]

use std::mem::{offset_of, size_of};

use crate::Version;

/// A number of requests.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpCounter {
    /// Succeeded.
    pub ok: u64,
    /// Failed.
    pub err: u64,
}

/// `CUfileStatsLevel1_t`: counters of the process.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Level1 {
    /// Read requests.
    pub read_ops: OpCounter,
    /// Write requests.
    pub write_ops: OpCounter,
    /// Handle register requests.
    pub hdl_register_ops: OpCounter,
    /// Handle deregister requests.
    pub hdl_deregister_ops: OpCounter,
    /// Buffer register requests.
    pub buf_register_ops: OpCounter,
    /// Buffer deregister requests.
    pub buf_deregister_ops: OpCounter,
    /// Read, bytes.
    pub read_bytes: u64,
    /// Write, bytes.
    pub write_bytes: u64,
    /// Read bandwidth, bytes per second.
    pub read_bw_bytes_per_sec: u64,
    /// Write bandwidth, bytes per second.
    pub write_bw_bytes_per_sec: u64,
    /// Read latency mean, microseconds.
    pub read_lat_avg_us: u64,
    /// Write latency mean, microseconds.
    pub write_lat_avg_us: u64,
    /// Read, requests per second.
    pub read_ops_per_sec: u64,
    /// Write, requests per second.
    pub write_ops_per_sec: u64,
    /// Read latency sum, microseconds.
    pub read_lat_sum_us: u64,
    /// Write latency sum, microseconds.
    pub write_lat_sum_us: u64,
    /// Batch submit requests.
    pub batch_submit_ops: OpCounter,
    /// Batch complete requests.
    pub batch_complete_ops: OpCounter,
    /// Batch setup requests.
    pub batch_setup_ops: OpCounter,
    /// Batch cancel requests.
    pub batch_cancel_ops: OpCounter,
    /// Batch destroy requests.
    pub batch_destroy_ops: OpCounter,
    /// Batch enqueued requests.
    pub batch_enqueued_ops: OpCounter,
    /// Batch posix enqueued requests.
    pub batch_posix_enqueued_ops: OpCounter,
    /// Batch processed requests.
    pub batch_processed_ops: OpCounter,
    /// Batch posix processed requests.
    pub batch_posix_processed_ops: OpCounter,
    /// Batch nvidia-fs submit requests.
    pub batch_nvfs_submit_ops: OpCounter,
    /// Batch peer-to-peer submit requests.
    pub batch_p2p_submit_ops: OpCounter,
    /// Batch libaio submit requests.
    pub batch_aio_submit_ops: OpCounter,
    /// Batch io_uring submit requests.
    pub batch_iouring_submit_ops: OpCounter,
    /// Batch mixed submit requests.
    pub batch_mixed_io_submit_ops: OpCounter,
    /// Batch total submit requests.
    pub batch_total_submit_ops: OpCounter,
    /// Batch read, bytes.
    pub batch_read_bytes: u64,
    /// Batch write, bytes.
    pub batch_write_bytes: u64,
    /// Batch read bandwidth, bytes.
    pub batch_read_bw_bytes: u64,
    /// Batch write bandwidth, bytes.
    pub batch_write_bw_bytes: u64,
    /// Batch submit latency mean, microseconds.
    pub batch_submit_lat_avg_us: u64,
    /// Batch completion latency mean, microseconds.
    pub batch_completion_lat_avg_us: u64,
    /// Batch submit, requests per second.
    pub batch_submit_ops_per_sec: u64,
    /// Batch complete, requests per second.
    pub batch_complete_ops_per_sec: u64,
    /// Batch submit latency sum, microseconds.
    pub batch_submit_lat_sum_us: u64,
    /// Batch completion latency sum, microseconds.
    pub batch_completion_lat_sum_us: u64,
    /// Last batch read, bytes.
    pub last_batch_read_bytes: u64,
    /// Last batch write, bytes.
    pub last_batch_write_bytes: u64,
    /// Readv requests.
    pub readv_ops: OpCounter,
    /// Writev requests.
    pub writev_ops: OpCounter,
    /// Readv, bytes.
    pub readv_bytes: u64,
    /// Writev, bytes.
    pub writev_bytes: u64,
    /// Readv bandwidth, bytes per second.
    pub readv_bw_bytes_per_sec: u64,
    /// Writev bandwidth, bytes per second.
    pub writev_bw_bytes_per_sec: u64,
    /// Readv latency mean, microseconds.
    pub readv_lat_avg_us: u64,
    /// Writev latency mean, microseconds.
    pub writev_lat_avg_us: u64,
    /// Readv, requests per second.
    pub readv_ops_per_sec: u64,
    /// Writev, requests per second.
    pub writev_ops_per_sec: u64,
    /// Readv latency sum, microseconds.
    pub readv_lat_sum_us: u64,
    /// Writev latency sum, microseconds.
    pub writev_lat_sum_us: u64,
}

/// `CUfileStatsLevel2_t`: also how large the requests were.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Level2 {
    /// The counters.
    pub basic: Level1,
    /// Reads by size, a class per power of two KiB.
    pub read_size_kb_hist: [u64; 32],
    /// Writes by size, a class per power of two KiB.
    pub write_size_kb_hist: [u64; 32],
}

/// `CUfilePerGpuStats_t`: counters of a GPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuStats {
    /// The GPU's identifier.
    pub uuid: [u8; crate::constants::CUFILE_GPU_UUID_LEN as usize],
    /// Read, bytes.
    pub read_bytes: u64,
    /// Read bandwidth, bytes per second.
    pub read_bw_bytes_per_sec: u64,
    /// Read utilization.
    pub read_utilization: u64,
    /// Read duration, microseconds.
    pub read_duration_us: u64,
    /// Number of total reads.
    pub n_total_reads: u64,
    /// Number of peer-to-peer reads.
    pub n_p2p_reads: u64,
    /// Number of nvidia-fs reads.
    pub n_nvfs_reads: u64,
    /// Number of posix reads.
    pub n_posix_reads: u64,
    /// Number of unaligned reads.
    pub n_unaligned_reads: u64,
    /// Number of dynamically routed reads.
    pub n_dr_reads: u64,
    /// Number of sparse regions.
    pub n_sparse_regions: u64,
    /// Number of inline regions.
    pub n_inline_regions: u64,
    /// Number of reads failed.
    pub n_reads_err: u64,
    /// Writes, bytes.
    pub writes_bytes: u64,
    /// Write bandwidth, bytes per second.
    pub write_bw_bytes_per_sec: u64,
    /// Write utilization.
    pub write_utilization: u64,
    /// Write duration, microseconds.
    pub write_duration_us: u64,
    /// Number of total writes.
    pub n_total_writes: u64,
    /// Number of peer-to-peer writes.
    pub n_p2p_writes: u64,
    /// Number of nvidia-fs writes.
    pub n_nvfs_writes: u64,
    /// Number of posix writes.
    pub n_posix_writes: u64,
    /// Number of unaligned writes.
    pub n_unaligned_writes: u64,
    /// Number of dynamically routed writes.
    pub n_dr_writes: u64,
    /// Number of writes failed.
    pub n_writes_err: u64,
    /// Number of mappings.
    pub n_mmap: u64,
    /// Number of mappings that succeeded.
    pub n_mmap_ok: u64,
    /// Number of mappings that failed.
    pub n_mmap_err: u64,
    /// Number of mappings undone.
    pub n_mmap_free: u64,
    /// Registered, bytes.
    pub reg_bytes: u64,
}

/// `CUfileStatsLevel3_t`: also what each GPU did.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Level3 {
    /// The counters and sizes.
    pub detailed: Level2,
    /// How many of `per_gpu_stats` count.
    pub num_gpus: u32,
    /// The GPUs.
    pub per_gpu_stats: [GpuStats; 16],
}

/// Bytes of the three levels in a version of the library.
#[must_use]
pub const fn sizes(version: Version) -> [usize; 3] {
    let cut = size_of::<Level1>() - level1_bytes(version);
    [size_of::<Level1>() - cut, size_of::<Level2>() - cut, size_of::<Level3>() - cut]
}

const fn level1_bytes(version: Version) -> usize {
    if version.major > 1 || version.minor >= 19 { size_of::<Level1>() } else { offset_of!(Level1, readv_ops) }
}

/// [`Buffer`] as `cuFileGetStatsL1` takes it.
pub type Level1Out = Buffer;
/// [`Buffer`] as `cuFileGetStatsL2` takes it.
pub type Level2Out = Buffer;
/// [`Buffer`] as `cuFileGetStatsL3` takes it.
pub type Level3Out = Buffer;

/// Room for the statistics of any version, with some to spare for those to come; zero at first.
#[repr(C, align(16))]
#[derive(Clone)]
pub struct Buffer {
    bytes: [u8; 8192],
}

const _: () = assert!(size_of::<Buffer>() >= size_of::<Level3>() + 1024, "must outgrow every version's structures");

impl Default for Buffer {
    fn default() -> Self {
        Self { bytes: [0; 8192] }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").finish_non_exhaustive()
    }
}

impl Buffer {
    /// What any of the three calls wrote, in a library of this version.
    #[must_use]
    pub fn level1(&self, version: Version) -> Level1 {
        self.level3(version).detailed.basic
    }

    /// What `cuFileGetStatsL2` or `cuFileGetStatsL3` wrote, in a library of this version.
    #[must_use]
    pub fn level2(&self, version: Version) -> Level2 {
        self.level3(version).detailed
    }

    /// What `cuFileGetStatsL3` wrote, in a library of this version.
    #[must_use]
    pub fn level3(&self, version: Version) -> Level3 {
        let have = level1_bytes(version);
        let mut whole = Self::default();
        let tail = size_of::<Level3>() - size_of::<Level1>();
        whole.bytes[..have].copy_from_slice(&self.bytes[..have]);
        whole.bytes[size_of::<Level1>()..][..tail].copy_from_slice(&self.bytes[have..][..tail]);
        // SAFETY: the buffer is larger than the structure and initialised; every field is an
        // integer or an array of them.
        unsafe { whole.bytes.as_ptr().cast::<Level3>().read_unaligned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Version = Version { major: 1, minor: 18 };
    const NEW: Version = Version { major: 1, minor: 19 };

    /// A buffer in which every 8 bytes hold their index.
    fn numbered() -> Buffer {
        let mut buffer = Buffer::default();
        for (at, word) in buffer.bytes.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&(at as u64).to_le_bytes());
        }
        buffer
    }

    #[test]
    fn sizes_are_those_of_the_version() {
        assert_eq!(sizes(OLD), [512, 1024, 5000]);
        assert_eq!(sizes(NEW), [624, 1136, 5112]);
        assert_eq!(sizes(Version { major: 2, minor: 0 }), sizes(NEW));
    }

    #[test]
    fn an_old_library_has_no_vectored_counters_and_the_rest_where_it_wrote_it() {
        let read = numbered().level3(OLD);
        assert_eq!(read.detailed.basic.last_batch_write_bytes, 63);
        assert_eq!((read.detailed.basic.readv_ops, read.detailed.basic.writev_lat_sum_us), (OpCounter::default(), 0));
        assert_eq!((read.detailed.read_size_kb_hist[0], read.detailed.write_size_kb_hist[31]), (64, 127));
        assert_eq!(
            (read.num_gpus, read.per_gpu_stats[0].read_bytes, read.per_gpu_stats[15].reg_bytes),
            (128, 131, 624)
        );
    }

    #[test]
    fn a_new_library_has_everything_in_its_place() {
        let read = numbered().level3(NEW);
        assert_eq!((read.detailed.basic.readv_ops.ok, read.detailed.basic.writev_lat_sum_us), (64, 77));
        assert_eq!(
            (read.detailed.read_size_kb_hist[0], read.num_gpus, read.per_gpu_stats[15].reg_bytes),
            (78, 142, 638)
        );
        assert_eq!(numbered().level2(NEW), read.detailed);
        assert_eq!(numbered().level1(NEW), read.detailed.basic);
    }
}
