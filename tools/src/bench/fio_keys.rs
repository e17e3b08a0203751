//! Keys of fio's job files that this program does not have, and what becomes of each.
//!
//! A key that does not change what is measured is ignored, with a warning where somebody might wait
//! for its effect. Every other key is refused by name: figures that look like fio's and were
//! measured in another way are worse than none. A key with the value that fio has for it anyway
//! asks for nothing, and passes.

/// What becomes of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// This program does that anyway.
    Implied,
    /// It changes what is logged or shown, not what is measured.
    Ignored,
    /// It changes what is measured, or is not known; what to do instead.
    Refused(&'static str),
}

/// What this program does anyway, with the value that says so; with another one they are ignored.
const IMPLIED: [(&str, &str); 4] =
    [("group_reporting", "1"), ("thread", "1"), ("randrepeat", "1"), ("clat_percentiles", "1")];

/// Keys that say what fio logs and shows, and how it keeps its own records.
const IGNORED: [&str; 57] = [
    "allow_mounted_write",
    "allrandrepeat",
    "block_error_percentiles",
    "bwavgtime",
    "clocksource",
    "continue_on_error",
    "create_fsync",
    "create_on_open",
    "create_serialize",
    "description",
    "disable_bw",
    "disable_bw_measurement",
    "disable_clat",
    "disable_lat",
    "disable_slat",
    "disk_util",
    "error_dump",
    "fixedbufs",
    "gtod_cpu",
    "gtod_reduce",
    "iomem",
    "iomem_align",
    "iopsavgtime",
    "lat_percentiles",
    "log_alternate_epoch",
    "log_alternate_epoch_clock_id",
    "log_avg_msec",
    "log_compression",
    "log_entries",
    "log_hist_coarseness",
    "log_hist_msec",
    "log_max_value",
    "log_offset",
    "log_prio",
    "log_store_compressed",
    "log_unix_epoch",
    "mem",
    "mem_align",
    "new_group",
    "norandommap",
    "per_job_logs",
    "percentile_list",
    "random_generator",
    "refill_buffers",
    "registerfiles",
    "scramble_buffers",
    "significant_figures",
    "slat_percentiles",
    "softrandommap",
    "stats",
    "unified_rw_reporting",
    "unique_filename",
    "unit_base",
    "use_os_rand",
    "userspace_reap",
    "write_hist_log",
    "write_iolog",
];

/// Keys that change what is measured: the key, the value with which it changes nothing (empty where
/// every value does), and what to do instead.
const REFUSED: [(&str, &str, &str); 52] = [
    ("rate", "0", "remove it: forebay moves bytes as fast as it can"),
    ("rate_min", "0", "remove it: forebay moves bytes as fast as it can"),
    ("rate_iops", "0", "remove it: forebay moves bytes as fast as it can"),
    ("rate_iops_min", "0", "remove it: forebay moves bytes as fast as it can"),
    ("rate_process", "linear", "remove it: forebay moves bytes as fast as it can"),
    ("thinktime", "0", "remove it: forebay does not wait between operations"),
    ("ramp_time", "0", "remove it: all of the run is measured; a longer runtime makes its start count less"),
    ("startdelay", "0", "remove it, or use stonewall to run jobs one after another"),
    ("start_delay", "0", "remove it, or use stonewall to run jobs one after another"),
    ("wait_for", "", "remove it, or use stonewall to run jobs one after another"),
    ("loops", "1", "use time_based with runtime"),
    ("filesize", "", "use size"),
    ("io_size", "", "use size for the file, and time_based with runtime for more than one pass"),
    ("io_limit", "", "use size for the file, and time_based with runtime for more than one pass"),
    ("number_ios", "", "use size"),
    ("fill_device", "0", "use size"),
    ("fill_fs", "0", "use size"),
    ("offset", "0", "remove it: files are used from their start"),
    ("offset_increment", "0", "remove it: each worker has a file of its own"),
    ("nrfiles", "1", "use numjobs: each worker has a file of its own"),
    ("openfiles", "1", "remove it: each worker has one file, which stays open"),
    ("file_service_type", "", "remove it: each worker has one file"),
    ("filename_format", "", "use directory, or filename for a file that all workers share"),
    ("opendir", "", "use filename"),
    ("bssplit", "", "use bs, with a section for each size"),
    ("bsrange", "", "use bs, with a section for each size"),
    ("blocksize_range", "", "use bs, with a section for each size"),
    ("bs_unaligned", "0", "use bs"),
    ("blockalign", "", "use bs: operations are aligned to it"),
    ("ba", "", "use bs: operations are aligned to it"),
    ("iodepth_batch", "1", "use iodepth: the queue is kept full"),
    ("iodepth_batch_submit", "1", "use iodepth: the queue is kept full"),
    ("iodepth_batch_complete", "1", "use iodepth: the queue is kept full"),
    ("iodepth_low", "", "use iodepth: the queue is kept full"),
    ("fsync", "0", "use end_fsync: forebay flushes once, at the end"),
    ("fdatasync", "0", "use end_fsync: forebay flushes once, at the end"),
    ("sync_file_range", "", "use end_fsync: forebay flushes once, at the end"),
    ("sync", "0", "use end_fsync: forebay flushes once, at the end"),
    ("fsync_on_close", "0", "use end_fsync=1"),
    ("buffered", "0", "use direct=0"),
    ("fallocate", "native", "remove it: forebay reserves files before it writes to them"),
    ("invalidate", "1", "remove it: forebay reads what the page cache does not have"),
    ("fadvise_hint", "1", "remove it: forebay leaves the kernel's own read-ahead as it is"),
    ("rwmixwrite", "", "use rwmixread, which is 100 less rwmixwrite"),
    ("random_distribution", "random", "remove it: every block is visited once a pass"),
    ("percentage_random", "100", "use rw=randread, randwrite or randrw for random offsets only"),
    ("zonemode", "none", "remove it: files have no zones"),
    ("kb_base", "1024", "remove it: k, m and g are powers of 1024"),
    ("cpus_allowed", "", "remove it, and run `taskset -c CPUS forebay bench ...`"),
    ("numa_cpu_nodes", "", "remove it, and run `numactl --cpunodebind=N forebay bench ...`"),
    ("gpu_dev_ids", "", "use device=cuda:N"),
    ("cuda_io", "", "use ioengine and device=cuda:N"),
];

/// What to do about a key that none of the lists has.
const REMOVE: &str = "remove it; `forebay bench --help` lists what there is";

/// What becomes of `key` with `value`.
pub(super) fn fate(key: &str, value: &str) -> Fate {
    if let Some((_, does)) = IMPLIED.iter().find(|(name, _)| *name == key) {
        return if value.trim() == *does { Fate::Implied } else { Fate::Ignored };
    }
    if IGNORED.contains(&key) {
        return Fate::Ignored;
    }
    match REFUSED.iter().find(|(name, ..)| *name == key) {
        Some((_, neutral, _)) if !neutral.is_empty() && value.trim() == *neutral => Fate::Implied,
        Some((.., advice)) => Fate::Refused(advice),
        None => Fate::Refused(REMOVE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changes_the_measurement_is_refused_unless_it_asks_for_nothing() {
        let refused =
            ["rate", "ramp_time", "filesize", "bssplit", "nrfiles", "fsync", "loops", "buffered", "no_such_key"];
        for key in refused.into_iter().chain(["invalidate", "fallocate"]) {
            assert!(matches!(fate(key, "7"), Fate::Refused(advice) if !advice.is_empty()), "{key}");
        }
        for (key, value) in
            [("ramp_time", "0"), ("nrfiles", "1"), ("fsync", "0"), ("zonemode", "none"), ("invalidate", "1")]
        {
            assert_eq!(fate(key, value), Fate::Implied, "{key}={value}");
        }
        assert_eq!(fate("gtod_reduce", "1"), Fate::Ignored);
        assert_eq!((fate("group_reporting", "1"), fate("thread", "0")), (Fate::Implied, Fate::Ignored));
    }

    #[test]
    fn no_key_has_two_fates_or_is_an_option_of_ours() {
        use clap::Args as _;
        let command = crate::bench::options::JobOptions::augment_args(clap::Command::new("job"));
        let mut all: Vec<&str> = IMPLIED.into_iter().map(|(key, _)| key).chain(IGNORED).collect();
        all.extend(REFUSED.iter().map(|(key, ..)| *key));
        assert!(all.iter().all(|key| command.get_arguments().all(|a| a.get_long() != Some(key))), "one is ours");
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
