//! Options of one benchmark job, in fio's vocabulary: the same list serves the command line and job
//! files.
//!
//! Everything is optional here; [`super::job::Job`] has the defaults filled in and checked.
//! Underscores and hyphens are both accepted where fio and clap differ.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::size::{parse_fio_bytes, parse_time, parse_tokens};

/// What a job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rw {
    /// Sequential reads of a file.
    Read,
    /// Sequential writes.
    Write,
    /// Random reads.
    Randread,
    /// Random writes.
    Randwrite,
    /// Sequential reads and writes mixed.
    #[value(name = "rw", alias = "readwrite")]
    ReadWrite,
    /// Random reads and writes mixed.
    Randrw,
    /// Loads of whole prompts through the engine.
    Load,
    /// Stores of whole prompts through the engine.
    Store,
    /// Loads layer by layer beside simulated attention; each prompt without it, then with it.
    Layerload,
    /// Stores layer by layer beside simulated attention; each prompt without it, then another with
    /// it.
    Layerstore,
    /// Lookups of a prompt among many entries.
    Lookup,
    /// Reopening a cache after kill -9.
    Reopen,
}

impl Rw {
    /// Whether the job moves blocks of plain files, without the engine.
    pub(crate) fn is_raw(self) -> bool {
        matches!(self, Self::Read | Self::Write | Self::Randread | Self::Randwrite | Self::ReadWrite | Self::Randrw)
    }

    /// Whether the job moves no KV either: its chunks are a page, in a log of their own.
    pub(crate) fn is_index(self) -> bool {
        matches!(self, Self::Lookup | Self::Reopen)
    }

    /// Whether a raw job reads at all.
    pub(crate) fn reads(self) -> bool {
        matches!(self, Self::Read | Self::Randread | Self::ReadWrite | Self::Randrw)
    }

    /// Whether a raw job writes at all.
    pub(crate) fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Randwrite | Self::ReadWrite | Self::Randrw)
    }

    /// Whether offsets are random.
    pub(crate) fn is_random(self) -> bool {
        matches!(self, Self::Randread | Self::Randwrite | Self::Randrw)
    }
}

/// I/O engine; fio's names for the same thing are understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum IoEngine {
    /// The best path that this machine allows.
    #[value(alias = "libaio")]
    Auto,
    /// GPUDirect Storage through libcufile.
    #[value(alias = "libcufile")]
    Cufile,
    /// `io_uring`.
    #[value(aliases = ["io_uring", "io-uring"])]
    Uring,
    /// A pool of threads with pread and pwrite.
    #[value(alias = "posixaio")]
    Threads,
    /// The same with one operation at a time, as fio's synchronous engines.
    #[value(hide = true, aliases = ["sync", "vsync", "pvsync", "pvsync2"])]
    Psync,
}

/// Codec of the KV on the drive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Coding {
    /// None.
    #[default]
    None,
    /// bfloat16 without loss in three quarters of its bytes.
    Exp4,
}

/// Layout of the paged KV that the engine's jobs load into and store from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Layout {
    /// Tokens, then heads: `[block][token][head][dim]`.
    Nhd,
    /// Heads, then tokens: `[block][head][token][dim]`.
    Hnd,
    /// One compressed row per token.
    Mla,
    /// Blocks that only the server understands.
    Opaque,
}

/// fio's booleans: `0`, `1`, and the words.
fn parse_bool(text: &str) -> Result<bool, String> {
    match text.trim() {
        "1" | "true" | "yes" | "on" => Ok(true),
        "0" | "false" | "no" | "off" => Ok(false),
        other => Err(format!("{other:?} is neither 0 nor 1")),
    }
}

/// Options of a job as given; `None` where they were not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct JobOptions {
    /// Workload: raw I/O as in fio, or the engine.
    #[arg(long, alias = "readwrite", value_enum, value_name = "MODE", help_heading = "Workload")]
    pub(crate) rw: Option<Rw>,
    /// Name of the job.
    #[arg(long, help_heading = "Workload")]
    pub(crate) name: Option<String>,
    /// I/O engine; fio's `io_uring`, `psync` and relatives mean ours.
    #[arg(long, value_enum, value_name = "NAME", help_heading = "Workload")]
    pub(crate) ioengine: Option<IoEngine>,
    /// Where the memory lies that bytes are moved to and from: host, or a GPU as cuda:N. With a
    /// GPU, ioengine cufile means cuFile in any mode (gdsio's GPU_DIRECT), uring and threads
    /// mean pinned host memory and a copy (CPU_GPU), auto the best.
    #[arg(long, value_name = "host|cuda:N", help_heading = "Workload")]
    pub(crate) device: Option<String>,
    /// Bytes per operation [default: 4k as in fio; the engine's own for its jobs].
    #[arg(long, alias = "blocksize", value_parser = parse_fio_bytes, value_name = "SIZE", help_heading = "Workload")]
    pub(crate) bs: Option<u64>,
    /// Operations kept in flight by each worker.
    #[arg(long, value_name = "N", help_heading = "Workload")]
    pub(crate) iodepth: Option<usize>,
    /// Workers that run the same job at once.
    #[arg(long, value_name = "N", help_heading = "Workload")]
    pub(crate) numjobs: Option<usize>,
    /// Bytes of each worker's file; for the engine's jobs, bytes of KV.
    #[arg(long, value_parser = parse_fio_bytes, value_name = "SIZE", help_heading = "Workload")]
    pub(crate) size: Option<u64>,
    /// Reads among mixed operations, in percent.
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=100), value_name = "PERCENT", help_heading = "Workload")]
    pub(crate) rwmixread: Option<u8>,
    /// Seed of random offsets and contents.
    #[arg(long, value_name = "N", help_heading = "Workload")]
    pub(crate) randseed: Option<u64>,

    /// Longest time to run, in seconds unless a unit follows.
    #[arg(long, value_parser = parse_time, value_name = "TIME", help_heading = "Time")]
    pub(crate) runtime: Option<Duration>,
    /// Run for the whole runtime, starting over where the file ends.
    #[arg(long = "time_based", alias = "time-based", value_parser = parse_bool, num_args = 0..=1, require_equals = true,
          default_missing_value = "1", value_name = "0|1", help_heading = "Time")]
    pub(crate) time_based: Option<bool>,
    /// Wait for the jobs before this one in the job file.
    #[arg(long, alias = "wait_for_previous", value_parser = parse_bool, num_args = 0..=1, require_equals = true,
          default_missing_value = "1", value_name = "0|1", help_heading = "Time")]
    pub(crate) stonewall: Option<bool>,

    /// `O_DIRECT` (1, the default) or the page cache (0).
    #[arg(long, value_parser = parse_bool, value_name = "0|1", help_heading = "Files")]
    pub(crate) direct: Option<bool>,
    /// Directory of the files, or of the job's own cache; none in a server's cache.
    #[arg(long, value_name = "DIR", help_heading = "Files")]
    pub(crate) directory: Option<PathBuf>,
    /// File that all workers share, instead of one each in the directory.
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    pub(crate) filename: Option<PathBuf>,
    /// Flush when the writes are done; the flush counts as run time.
    #[arg(long = "end_fsync", alias = "end-fsync", value_parser = parse_bool, num_args = 0..=1, require_equals = true,
          default_missing_value = "1", value_name = "0|1", help_heading = "Files")]
    pub(crate) end_fsync: Option<bool>,
    /// Remove the files afterwards.
    #[arg(long, value_parser = parse_bool, num_args = 0..=1, require_equals = true, default_missing_value = "1",
          value_name = "0|1", help_heading = "Files")]
    pub(crate) unlink: Option<bool>,

    /// Write bandwidth over time to NAME_bw.N.log, in fio's format; N is the job's number. Each
    /// line is a mean over 100 ms. The name is the job's where none is given.
    #[arg(long = "write_bw_log", alias = "write-bw-log", num_args = 0..=1, require_equals = true,
          default_missing_value = "", value_name = "NAME", help_heading = "Output")]
    pub(crate) write_bw_log: Option<String>,
    /// Write operations per second over time to NAME_iops.N.log.
    #[arg(long = "write_iops_log", alias = "write-iops-log", num_args = 0..=1, require_equals = true,
          default_missing_value = "", value_name = "NAME", help_heading = "Output")]
    pub(crate) write_iops_log: Option<String>,
    /// Write latencies over time to NAME_lat.N.log, NAME_slat.N.log and NAME_clat.N.log.
    #[arg(long = "write_lat_log", alias = "write-lat-log", num_args = 0..=1, require_equals = true,
          default_missing_value = "", value_name = "NAME", help_heading = "Output")]
    pub(crate) write_lat_log: Option<String>,

    #[command(flatten)]
    pub(crate) kv: KvOptions,
}

/// Options of the engine's jobs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Engine")]
pub(crate) struct KvOptions {
    /// Model whose KV is moved.
    #[arg(long, value_name = "PRESET")]
    pub(crate) model: Option<String>,
    /// Tokens of a prompt.
    #[arg(long, value_parser = parse_tokens, value_name = "N")]
    pub(crate) tokens: Option<u64>,
    /// Tokens of a block of the server's paged KV (`--bs` is the size of I/O operations).
    #[arg(long = "block-size", alias = "block_size", value_name = "TOKENS")]
    pub(crate) block_size: Option<u32>,
    /// Layout of the paged KV.
    #[arg(long, value_enum)]
    pub(crate) layout: Option<Layout>,
    /// Simulated attention per layer, in microseconds. With it, `overlap_efficiency` is
    /// (max(load, compute) + min(load, compute) / layers) / wall, where load is the time of the
    /// transfer without attention: 1 is a perfect overlap, and above 1 the transfer beside
    /// attention was faster than the one alone.
    #[arg(long = "compute-us", alias = "compute_us", value_name = "N")]
    pub(crate) compute_us: Option<u64>,
    /// Thread blocks of the reshape kernels at most, on a GPU; 0 for no limit.
    #[arg(long = "kernel-ctas", alias = "kernel_ctas", value_name = "N")]
    pub(crate) kernel_ctas: Option<u32>,
    /// Leave the cache in the directory.
    #[arg(long, value_parser = parse_bool, num_args = 0..=1, require_equals = true, default_missing_value = "1",
          value_name = "0|1")]
    pub(crate) keep: Option<bool>,
    /// Bytes that the cache may take; it evicts where it would need more [default: room for all of
    /// the job beside what the directory holds].
    #[arg(long, value_parser = parse_fio_bytes, value_name = "SIZE")]
    pub(crate) capacity: Option<u64>,
    /// Keep chunks in host memory too, up to so many bytes (the setting `local_cpu`): what the job
    /// lays out or loads is loaded from there. 0 for none [default: 0].
    #[arg(long = "local-cpu", alias = "local_cpu", value_parser = parse_fio_bytes, value_name = "SIZE")]
    pub(crate) local_cpu: Option<u64>,
    /// How KV is coded on the drive (the setting `codec`): none, or exp4 [default: none].
    #[arg(long, value_enum, value_name = "CODEC")]
    pub(crate) codec: Option<Coding>,
    /// Compare every loaded byte with a pattern made from key and position.
    #[arg(long, value_parser = parse_bool, num_args = 0..=1, require_equals = true, default_missing_value = "1",
          value_name = "0|1")]
    pub(crate) verify: Option<bool>,
    /// Entries in the index beside the prompt's own.
    #[arg(long, value_parser = parse_tokens, value_name = "N")]
    pub(crate) entries: Option<u64>,
    /// Chunks in the cache that is reopened.
    #[arg(long, value_parser = parse_tokens, value_name = "N")]
    pub(crate) chunks: Option<u64>,
    /// One of every N chunks of that cache is removed before it is reopened; 0 for none.
    #[arg(long, value_name = "N")]
    pub(crate) one_gone_of: Option<u64>,
}

impl JobOptions {
    /// The given options that take no value, or one behind `=` only: the word after them on a
    /// command line does not belong to them.
    pub(crate) fn switches(&self) -> Vec<&'static str> {
        let all = [
            ("--time_based", self.time_based),
            ("--stonewall", self.stonewall),
            ("--end_fsync", self.end_fsync),
            ("--unlink", self.unlink),
            ("--keep", self.kv.keep),
            ("--verify", self.kv.verify),
        ];
        all.into_iter().filter(|(_, value)| value.is_some()).map(|(name, _)| name).collect()
    }
}
