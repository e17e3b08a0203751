//! A job with every option filled in and checked.

use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay::geometry::PRESETS;
use forebay::{Error, ErrorKind, Result};

use super::options::{Coding, IoEngine, JobOptions, KvOptions, Layout, Rw};
use super::raw::directory_of;
use crate::cli::word;
use crate::report::logs::LogNames;

const HOST: &str = "host";
/// Tokens of the prompts that `lookup` asks for.
const LOOKUP_TOKENS: u64 = 131_072;
/// Largest number of operations in flight that a worker may ask for.
const MAX_IODEPTH: usize = 4096;
/// Largest number of workers.
const MAX_NUMJOBS: usize = 256;
/// Longest prompt, whose tokens and KV lie in memory.
const MAX_TOKENS: u64 = 1 << 24;
/// Most chunks of an index.
const MAX_CHUNKS: u64 = 1 << 32;
/// Largest operation.
const MAX_BS: u64 = 1 << 30;

/// A job ready to run.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// Name; also part of its files' names.
    pub(crate) name: String,
    /// Workload.
    pub(crate) rw: Rw,
    /// I/O engine.
    pub(crate) ioengine: IoEngine,
    /// Where the memory lies: `host`, or a GPU as `cuda:N`.
    pub(crate) device: String,
    /// Bytes per operation.
    pub(crate) bs: u64,
    /// Operations in flight per worker.
    pub(crate) iodepth: usize,
    /// Workers.
    pub(crate) numjobs: usize,
    /// Bytes of each worker's file, or of KV; `None` where another option decides.
    pub(crate) size: Option<u64>,
    /// Reads among mixed operations, in percent.
    pub(crate) rwmixread: u8,
    /// Seed of random offsets and contents.
    pub(crate) randseed: u64,
    /// Longest time to run.
    pub(crate) runtime: Option<Duration>,
    /// Run for the whole runtime.
    pub(crate) time_based: bool,
    /// Wait for the jobs before this one.
    pub(crate) stonewall: bool,
    /// `O_DIRECT`.
    pub(crate) direct: bool,
    /// Directory of files or of the cache.
    pub(crate) directory: PathBuf,
    /// File that all workers share.
    pub(crate) filename: Option<PathBuf>,
    /// Flush at the end.
    pub(crate) end_fsync: bool,
    /// Remove the files afterwards.
    pub(crate) unlink: bool,
    /// Files of values over time.
    pub(crate) logs: LogNames,
    /// Options of the engine's jobs.
    pub(crate) kv: KvJob,
}

/// The engine's part of a job.
#[derive(Clone, Debug)]
pub(crate) struct KvJob {
    /// Model preset.
    pub(crate) model: String,
    /// Tokens of a prompt; `None` where `size` decides.
    pub(crate) tokens: Option<u64>,
    /// Tokens of a paged block.
    pub(crate) block_size: u32,
    /// Layout of the paged KV; `None`: what the model's layers need.
    pub(crate) layout: Option<Layout>,
    /// Simulated attention per layer.
    pub(crate) compute: Duration,
    /// Thread blocks of the reshape kernels at most; `None`: the settings' default.
    pub(crate) kernel_ctas: Option<u32>,
    /// Leave the cache behind.
    pub(crate) keep: bool,
    /// Bytes that the cache may take; `None`: as many as the job needs.
    pub(crate) capacity: Option<u64>,
    /// Bytes of chunks kept in host memory; 0 for none.
    pub(crate) local_cpu: u64,
    /// Codec of the KV on the drive.
    pub(crate) codec: Coding,
    /// Compare every loaded byte.
    pub(crate) verify: bool,
    /// Entries beside the prompt's own.
    pub(crate) entries: u64,
    /// Chunks in a cache that is reopened.
    pub(crate) chunks: u64,
    /// One in so many of them is removed before that; 0 for none.
    pub(crate) one_gone_of: u64,
}

fn invalid(name: &str, why: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("job {name:?}: {why}"))
}

/// An option that has no effect in this mode, in words.
fn misplaced(rw: Rw, options: &JobOptions) -> Option<String> {
    let only = |name: &str, of: &str| Some(format!("{name} is for {of}, and rw={} is none of them", word(rw)));
    if rw.is_raw() {
        let of = "the engine's modes";
        let (verify, keep) = (options.kv.verify.filter(|v| *v), options.kv.keep.filter(|k| *k));
        return match (KvOptions { verify, keep, ..options.kv.clone() }) {
            KvOptions { verify: Some(_), .. } => only("verify", of),
            given if given != KvOptions::default() => {
                only("what is said of the engine (model, tokens, capacity …)", of)
            }
            _ => None,
        };
    }
    match options {
        JobOptions { direct: Some(false), .. } => only("direct=0", "plain files"),
        JobOptions { end_fsync: Some(true), .. } => only("end_fsync", "plain files"),
        JobOptions { unlink: Some(true), .. } => only("unlink", "plain files"),
        JobOptions { rwmixread: Some(_), .. } => only("rwmixread", "plain files"),
        JobOptions { filename: Some(_), .. } => only("filename", "plain files"),
        JobOptions { numjobs: Some(2..), .. } if !matches!(rw, Rw::Load | Rw::Store) => {
            only("numjobs", "plain files, load and store")
        }
        _ => misplaced_in_mode(rw, options),
    }
}

/// As [`misplaced`], of options that only some of the engine's modes have.
fn misplaced_in_mode(rw: Rw, options: &JobOptions) -> Option<String> {
    let kv = &options.kv;
    let index = if rw.is_index() { misplaced_in_index(options) } else { None };
    let given = [
        ("tokens", kv.tokens.is_some(), rw != Rw::Reopen),
        ("entries", kv.entries.is_some(), rw == Rw::Lookup),
        ("chunks", kv.chunks.is_some(), rw == Rw::Reopen),
        ("one_gone_of", kv.one_gone_of.is_some(), rw == Rw::Reopen),
        ("compute_us", kv.compute_us.is_some(), matches!(rw, Rw::Layerload | Rw::Layerstore)),
        ("verify", kv.verify == Some(true), matches!(rw, Rw::Load | Rw::Layerload)),
    ];
    let own = given.into_iter().find(|(_, is_given, has)| *is_given && !has).map(|(name, ..)| name);
    Some(format!("{} would change nothing with rw={}", index.or(own)?, word(rw)))
}

/// The first given option that the modes which move no KV do not have.
fn misplaced_in_index(options: &JobOptions) -> Option<&'static str> {
    let given = [
        ("bs", options.bs.is_some()),
        ("iodepth", options.iodepth.is_some()),
        ("size", options.size.is_some()),
        ("ioengine", options.ioengine.is_some()),
        ("device", options.device.is_some()),
        ("kernel_ctas", options.kv.kernel_ctas.is_some()),
        ("model", options.kv.model.is_some()),
        ("block_size", options.kv.block_size.is_some()),
        ("layout", options.kv.layout.is_some()),
        ("codec", options.kv.codec.is_some_and(|codec| codec != Coding::None)),
        ("local_cpu", options.kv.local_cpu.is_some_and(|bytes| bytes > 0)),
    ];
    given.into_iter().find(|(_, is_given)| *is_given).map(|(name, _)| name)
}

impl Job {
    /// Fills in defaults and checks; `default_name` is the section's name or `forebay`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] naming the job and the option.
    pub(crate) fn new(options: JobOptions, default_name: &str) -> Result<Self> {
        let name = options.name.clone().unwrap_or_else(|| default_name.to_owned());
        let rw = options.rw.ok_or_else(|| {
            invalid(&name, "no workload").advice("add --rw read|write|randread|randwrite|rw|randrw or an engine mode")
        })?;
        if let Some(why) = misplaced(rw, &options) {
            return Err(invalid(&name, why).advice("leave it out of this job: it would change nothing there"));
        }
        let kv = options.kv;
        let log = |prefix: Option<String>| prefix.map(|p| if p.is_empty() { name.clone() } else { p });
        let (bw, iops, lat) = (options.write_bw_log, options.write_iops_log, options.write_lat_log);
        let logs = LogNames { bw: log(bw), iops: log(iops), lat: log(lat) };
        let job = Self {
            logs,
            rw,
            ioengine: options.ioengine.unwrap_or(IoEngine::Auto),
            device: options.device.unwrap_or_else(|| HOST.to_owned()),
            bs: options.bs.unwrap_or(if rw.is_raw() { 4096 } else { 1 << 20 }),
            iodepth: options.iodepth.unwrap_or(if rw.is_raw() { 1 } else { 32 }),
            numjobs: options.numjobs.unwrap_or(if matches!(rw, Rw::Load | Rw::Store) { 2 } else { 1 }),
            size: options.size,
            rwmixread: options.rwmixread.unwrap_or(50),
            randseed: options.randseed.unwrap_or(0x466f_7265_6261_7921),
            runtime: options.runtime.filter(|t| !t.is_zero()),
            time_based: options.time_based.unwrap_or(false),
            stonewall: options.stonewall.unwrap_or(false),
            direct: options.direct.unwrap_or(true),
            directory: options.directory.unwrap_or_else(|| PathBuf::from(".")),
            filename: options.filename,
            end_fsync: options.end_fsync.unwrap_or(false),
            unlink: options.unlink.unwrap_or(false),
            kv: KvJob {
                model: kv.model.unwrap_or_else(|| "llama-3.1-8b".to_owned()),
                tokens: kv.tokens,
                block_size: kv.block_size.unwrap_or(16),
                layout: kv.layout,
                compute: Duration::from_micros(kv.compute_us.unwrap_or(0)),
                kernel_ctas: kv.kernel_ctas,
                keep: kv.keep.unwrap_or(false),
                capacity: kv.capacity,
                local_cpu: kv.local_cpu.unwrap_or(0),
                codec: kv.codec.unwrap_or_default(),
                verify: kv.verify.unwrap_or(false),
                entries: kv.entries.unwrap_or(1_000_000),
                chunks: kv.chunks.unwrap_or(1_000_000),
                one_gone_of: kv.one_gone_of.unwrap_or(0),
            },
            name,
        };
        job.validate()?;
        Ok(job)
    }

    fn validate(&self) -> Result<()> {
        let bad = |why: String| Err(invalid(&self.name, why));
        if self.name.is_empty() || self.name.contains(['/', '\0']) {
            return bad("the name must be a file name".to_owned());
        }
        if self.bs == 0 || self.bs > MAX_BS {
            return bad(format!("bs must be 1 to {MAX_BS} bytes"));
        }
        if self.iodepth == 0 || self.iodepth > MAX_IODEPTH {
            return bad(format!("iodepth must be 1 to {MAX_IODEPTH}"));
        }
        if self.numjobs == 0 || self.numjobs > MAX_NUMJOBS {
            return bad(format!("numjobs must be 1 to {MAX_NUMJOBS}"));
        }
        if self.kv.chunks == 0 {
            return bad("chunks must be at least 1".to_owned());
        }
        if self.time_based && self.runtime.is_none() {
            return bad("time_based needs a runtime".to_owned());
        }
        if self.runtime.is_some() && !self.rw.is_raw() && !matches!(self.rw, Rw::Load | Rw::Store) {
            return Err(invalid(
                &self.name,
                format!("rw={} does its work once, whatever time that takes", word(self.rw)),
            )
            .advice("leave runtime and time_based out; --tokens, --chunks or --entries say how much work that is"));
        }
        for (option, count, most) in [
            ("tokens", self.kv.tokens.unwrap_or(0), MAX_TOKENS),
            ("entries", self.kv.entries, MAX_CHUNKS),
            ("chunks", self.kv.chunks, MAX_CHUNKS),
        ] {
            if count > most {
                return bad(format!("{option} must be at most {most}"));
            }
        }
        if self.kv.block_size == 0 {
            return bad("block-size must be at least one token".to_owned());
        }
        if !PRESETS.contains(&self.kv.model.as_str()) {
            return bad(format!("unknown model {:?}, use one of {}", self.kv.model, PRESETS.join(", ")));
        }
        if self.ioengine == IoEngine::Cufile && self.is_on_host() {
            return Err(invalid(&self.name, "ioengine cufile moves bytes to and from a GPU").advice(
                "add --device cuda:0, or use --ioengine auto, uring or threads; `forebay probe` shows the paths",
            ));
        }
        if self.rw.is_raw() {
            self.validate_raw()?;
        }
        Ok(())
    }

    fn validate_raw(&self) -> Result<()> {
        if self.direct && !self.bs.is_multiple_of(512) {
            return Err(invalid(&self.name, "bs must be a multiple of 512 bytes with direct=1"));
        }
        if let Some(size) = self.size.filter(|&s| s < self.bs) {
            return Err(invalid(&self.name, format!("size {size} is smaller than bs {}", self.bs)));
        }
        if self.ioengine == IoEngine::Psync && self.iodepth > 1 {
            return Err(invalid(
                &self.name,
                format!("fio's synchronous engines have one operation in flight, not iodepth {}", self.iodepth),
            )
            .advice("use ioengine threads for that many in flight, or leave iodepth out"));
        }
        if self.filename.as_ref().is_some_and(|file| file.as_os_str().as_encoded_bytes().contains(&b':')) {
            return Err(invalid(&self.name, "filename is one file, and fio separates several by a colon")
                .advice("use directory with numjobs for a file each, or a section for each file"));
        }
        Ok(())
    }

    /// Whether the memory is the host's.
    pub(crate) fn is_on_host(&self) -> bool {
        matches!(self.device.as_str(), HOST | "cpu")
    }

    /// The file of worker `index`.
    pub(crate) fn file_of(&self, index: usize) -> PathBuf {
        match &self.filename {
            Some(f) if f.is_absolute() => f.clone(),
            Some(f) if self.directory == Path::new(".") => f.clone(),
            Some(f) => self.directory.join(f),
            None => self.directory.join(format!("{}.{index}.0", self.name)),
        }
    }

    /// The directory of its files or its cache.
    pub(crate) fn place(&self) -> PathBuf {
        // A file that is named may lie in a folder below the directory, or elsewhere.
        self.filename.as_ref().and_then(|_| directory_of(&self.file_of(0))).unwrap_or_else(|| self.directory.clone())
    }

    /// Tokens of a prompt of `lookup`.
    pub(crate) fn lookup_tokens(&self) -> u64 {
        self.kv.tokens.unwrap_or(LOOKUP_TOKENS)
    }

    /// The workload and what matters most to it, as it stands behind `rw=` in text.
    pub(crate) fn headline(&self) -> String {
        let (rw, engine) = (word(self.rw), word(self.ioengine));
        if self.rw.is_index() {
            return self.sizes_in_index().iter().fold(rw, |line, (name, size)| format!("{line}, {name}={size}"));
        }
        if self.rw.is_raw() {
            format!("{rw}, bs={}, ioengine={engine}, iodepth={}", self.bs, self.iodepth)
        } else {
            format!("{rw}, model={}, ioengine={engine}", self.kv.model)
        }
    }

    /// The options that describe the job, in fio's spelling, for reports.
    pub(crate) fn described(&self) -> Vec<(&'static str, String)> {
        let mut list = vec![("rw", word(self.rw))];
        if self.rw.is_index() {
            list.extend(self.sizes_in_index().into_iter().map(|(name, size)| (name, size.to_string())));
            return list;
        }
        list.extend([
            ("ioengine", word(self.ioengine)),
            ("device", self.device.clone()),
            ("bs", self.bs.to_string()),
            ("iodepth", self.iodepth.to_string()),
            ("numjobs", self.numjobs.to_string()),
            ("direct", u8::from(self.direct).to_string()),
        ]);
        list.extend(self.size.map(|size| ("size", size.to_string())));
        list.extend(self.runtime.map(|t| ("runtime", format!("{}s", t.as_secs_f64()))));
        if self.time_based {
            list.push(("time_based", "1".to_owned()));
        }
        if matches!(self.rw, Rw::ReadWrite | Rw::Randrw) {
            list.push(("rwmixread", self.rwmixread.to_string()));
        }
        if !self.rw.is_raw() {
            list.push(("model", self.kv.model.clone()));
            list.extend(self.kv.tokens.map(|n| ("tokens", n.to_string())));
            list.push(("block_size", self.kv.block_size.to_string()));
            list.extend(self.kv.layout.map(|layout| ("layout", word(layout))));
            if self.kv.local_cpu > 0 {
                list.push(("local_cpu", self.kv.local_cpu.to_string()));
            }
            if self.kv.codec != Coding::None {
                list.push(("codec", word(self.kv.codec)));
            }
            list.push(("compute_us", self.kv.compute.as_micros().to_string()));
        }
        list
    }

    /// The options that say how much work a mode that moves no KV has.
    fn sizes_in_index(&self) -> Vec<(&'static str, u64)> {
        match self.rw {
            Rw::Lookup => vec![("tokens", self.lookup_tokens()), ("entries", self.kv.entries)],
            _ => vec![("chunks", self.kv.chunks), ("one_gone_of", self.kv.one_gone_of)],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_of_a_named_file_is_the_folder_that_it_lies_in() {
        for (directory, filename, place) in [
            (Some("/mnt/d"), Some("sub/x"), "/mnt/d/sub"),
            (Some("/mnt/d"), Some("x"), "/mnt/d"),
            (Some("/mnt/d"), Some("/srv/x"), "/srv"),
            (None, Some("sub/x"), "sub"),
            (None, Some("x"), "."),
            (Some("/mnt/d"), None, "/mnt/d"),
            (None, None, "."),
        ] {
            let options = JobOptions {
                rw: Some(Rw::Read),
                directory: directory.map(PathBuf::from),
                filename: filename.map(PathBuf::from),
                ..JobOptions::default()
            };
            assert_eq!(Job::new(options, "j").unwrap().place(), Path::new(place), "{directory:?} {filename:?}");
        }
    }
}
