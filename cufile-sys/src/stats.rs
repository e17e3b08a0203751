//! What each GPU did: the end of what `cuFileGetStatsL3` writes.
//!
//! The structure (`CUfileStatsLevel3_t`) grew in 1.19, before the part that is read here. So the
//! call takes a [`Buffer`] larger than any version's, whose contents are read by the version of the
//! library.
#![expect(unsafe_code, reason = "plain integers are read out of a buffer that C filled")]

use crate::Version;

/// `CUfilePerGpuStats_t`: counters of a GPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuStats {
    before: [u64; 7],
    /// Number of peer-to-peer reads.
    pub n_p2p_reads: u64,
    /// Number of nvidia-fs reads.
    pub n_nvfs_reads: u64,
    /// Number of posix reads.
    pub n_posix_reads: u64,
    between: [u64; 10],
    /// Number of peer-to-peer writes.
    pub n_p2p_writes: u64,
    /// Number of nvidia-fs writes.
    pub n_nvfs_writes: u64,
    /// Number of posix writes.
    pub n_posix_writes: u64,
    behind: [u64; 8],
}

/// The end of `CUfileStatsLevel3_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllGpus {
    /// How many of `per_gpu_stats` count.
    pub num_gpus: u32,
    /// The GPUs.
    pub per_gpu_stats: [GpuStats; 16],
}

/// Where [`AllGpus`] begins in a version of the library, in bytes.
#[must_use]
pub const fn gpus_at(version: Version) -> usize {
    if version.major > 1 || version.minor >= 19 { 1136 } else { 1024 }
}

/// Room for the statistics of any version, with some to spare for those to come; zero at first.
#[repr(C, align(16))]
#[derive(Clone)]
pub struct Buffer {
    bytes: [u8; 8192],
}

const _: () = assert!(
    size_of::<Buffer>() >= gpus_at(Version { major: 1, minor: 19 }) + size_of::<AllGpus>() + 1024,
    "must outgrow every version's structure"
);

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
    /// What `cuFileGetStatsL3` wrote of the GPUs, in a library of this version.
    #[must_use]
    pub fn gpus(&self, version: Version) -> AllGpus {
        // SAFETY: the structure ends inside the initialised buffer; every field is an integer or an
        // array of them.
        unsafe { self.bytes.as_ptr().add(gpus_at(version)).cast::<AllGpus>().read_unaligned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_where_the_version_wrote_them() {
        let mut buffer = Buffer::default();
        for (at, word) in buffer.bytes.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&(at as u64).to_le_bytes());
        }
        for (version, first) in [((1, 15), 128), ((1, 18), 128), ((1, 19), 142), ((2, 0), 142)] {
            let read = buffer.gpus(Version { major: version.0, minor: version.1 });
            let last = read.per_gpu_stats[15];
            assert_eq!((u64::from(read.num_gpus), read.per_gpu_stats[0].n_p2p_reads), (first, first + 8));
            assert_eq!((last.n_nvfs_reads, last.n_posix_writes), (first + 474, first + 488));
        }
    }
}
