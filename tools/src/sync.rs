//! `forebay sync`: copies what a cache has to a remote store, or what the store has to a drive,
//! ahead of time and beside servers.
//!
//! The work is that of the remote tier: uploads read the drive again and check it, and put what the
//! store does not have; what is brought is checked before it is written. So either way may end at
//! any point, and goes on from there when it is run again. The geometry is that of the description
//! in the cache or in the store.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use forebay::config::{Admission, Mode, Settings};
use forebay::format::PAGE_BYTES;
use forebay::format::record::{KeyKind, Record};
use forebay::geometry::Geometry;
use forebay::io::file_system_bytes;
use forebay::key::ChunkKey;
use forebay::log::fsck::{LaneDir, live};
use forebay::log::{Log, LogOptions, geometry_of};
use forebay::remote::{Remote, RemoteObject, RemoteOptions, RemoteStats, RemoteStore};
use forebay::{Error, ErrorKind, Result};
use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::json;

use crate::ls::{now_s, shards};
use crate::out::{self, Context, Outcome};
use crate::progress::{self, Unit};
use crate::size::{parse_bytes, show_bytes};
use crate::stat::reserved_bytes;
use crate::stop;

/// How often progress is looked at.
const TICK: Duration = Duration::from_millis(100);
/// How long the store may fail without a break.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long all may take: as good as without end.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
/// How long closing may take.
const CLOSE: Duration = Duration::from_secs(30);
/// One in so many bytes is left to the log: it needs space beside its slots.
const BESIDE: u64 = 10;

/// Which way.
#[derive(Debug, Subcommand)]
pub(crate) enum SyncCommand {
    /// Upload the chunks of a cache that the store does not have.
    Up(SyncArgs),
    /// Bring the chunks of the store that the cache does not have, the beginnings of prompts first,
    /// as far as the capacity reaches.
    Down(SyncArgs),
}

/// Options of both.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct SyncArgs {
    /// The cache directories, one per drive; else those of the settings.
    #[arg(value_name = "DIR")]
    directories: Vec<PathBuf>,
    /// The remote store, as the setting `remote_url`; else that of the settings.
    #[arg(long, value_name = "URL")]
    remote: Option<String>,
    /// Settings file of the server, for its capacity above all; variables of the environment
    /// (FOREBAY_*) count as well.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Only this namespace, as `ls --namespaces` shows it, or this model's name.
    #[arg(long, value_name = "NS")]
    namespace: Option<String>,
    /// Move at most so many bytes for each shard.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    limit: Option<u64>,
}

const AFTER_HELP: &str = "\
Run it as the servers' user, also beside servers; with the credentials of the environment, as a server has them (docs/tiers.md). \
It may be interrupted and run again: nothing is moved twice. Every byte is checked before it is uploaded, and before it is written \
to a drive. `remote_staging` bounds its memory. What a server has stored in the last moments, and objects, are not uploaded. \
Before a machine has started a server since its boot, stop `sync up` before you remove anything: it would not notice.

An error of one shard does not keep the others back; it decides the exit status. Exit status 3: some chunks could not \
be moved, or a part of the cache could not be read; the causes are those of forebay_remote_missed_chunks_total and \
forebay_remote_shed_chunks_total.

Examples:
  forebay sync up /mnt/nvme/forebay --remote s3://kv-cache/llama
  forebay sync down /mnt/nvme/forebay --remote s3://kv-cache/llama --config forebay.yaml
  forebay sync down --config forebay.yaml --namespace my-org/my-model --limit 200g --json";

/// What became of one shard.
#[derive(Debug, Default, Serialize)]
struct ShardReport {
    namespace: String,
    shard: String,
    model: String,
    /// Chunks there were at the beginning, where they come from.
    chunks: u64,
    /// Of these, chunks that were where they were to go.
    present: u64,
    /// Chunks moved, and bytes of their slots.
    moved: u64,
    moved_bytes: u64,
    /// Chunks that did not fit the limit or the capacity, or that were not reached.
    left: u64,
    /// Why chunks were left over, where that was for want of room.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_room: Option<String>,
    /// Chunks that left the drive before their turn.
    gone: u64,
    /// Chunks that could not be moved, by cause.
    failed: BTreeMap<String, u64>,
    /// What ended the work on this shard.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// The store has failed for too long.
    #[serde(skip)]
    store_failed: bool,
}

/// Runs the command.
pub(crate) fn run(command: &SyncCommand, context: &Context) -> Result<Outcome> {
    let (up, args) = match command {
        SyncCommand::Up(args) => (true, args),
        SyncCommand::Down(args) => (false, args),
    };
    let started = Instant::now();
    let settings = settings(args, up)?;
    let options = RemoteOptions::of_settings(&settings).ok_or_else(|| {
        Error::new(ErrorKind::InvalidInput, "no remote store is named")
            .advice("name it with --remote, or its settings with --config")
    })?;
    let store = RemoteStore::open(&options)?;
    stop::listen()?;
    let mut sync = Sync { settings, options, context };
    let mut reports = Reports::default();
    let is_whole;
    if up {
        let (jobs, all) = sync.local_shards(args)?;
        is_whole = all;
        for job in &jobs {
            reports.add(job, |report| sync.up(job, report));
        }
    } else {
        let (jobs, all) = sync.remote_shards(args, &store)?;
        is_whole = all;
        let missing = sync.missing(&jobs);
        let mut rest: u64 = missing.iter().sum();
        for (job, bytes) in jobs.iter().zip(missing) {
            reports.add(job, |report| sync.down(job, bytes as f64 / rest.max(1) as f64, report));
            rest -= bytes;
        }
    }
    let Reports { all: reports, error } = reports;
    if reports.is_empty() && args.namespace.is_some() && is_whole && !stop::asked() {
        return Err(Error::new(ErrorKind::NotFound, "there is no such namespace")
            .advice("see `forebay ls DIR --namespaces`, and `forebay stat DIR --remote URL`"));
    }
    let elapsed_s = started.elapsed().as_secs_f64();
    if context.json {
        let direction = if up { "up" } else { "down" };
        out::print_json(
            &json!({"direction": direction, "interrupted": stop::asked(), "shards": reports, "elapsed_s": elapsed_s}),
        )?;
    } else {
        out::print(&text(&reports, up, elapsed_s))?;
    }
    if let Some(error) = error {
        return Err(error);
    }
    Ok(match stop::signal() {
        Some(signal) => Outcome::Interrupted(signal),
        None if !is_whole || reports.iter().any(|r| !r.failed.is_empty()) => Outcome::Problem,
        None => Outcome::Done,
    })
}

/// The server's settings, but for what decides what is stored: everything that was asked for is.
fn settings(args: &SyncArgs, up: bool) -> Result<Settings> {
    let mode = if up { Mode::Ro } else { Mode::Rw };
    let named = (args.config.as_deref(), args.remote.as_deref());
    let mut settings = crate::settings::load(named, &args.directories, Some(mode))?;
    settings.require_drives()?;
    (settings.admission, settings.write_budget_dwpd) = (Admission::All, None);
    Ok(settings)
}

/// A chunk on a drive and its bytes there.
type LocalChunk = (ChunkKey, u64);

/// A shard and what of it is to be moved.
struct Job<T> {
    namespace: String,
    shard: String,
    geometry: Geometry,
    /// Chunks that there are.
    chunks: u64,
    /// Those that are to be moved.
    items: Vec<T>,
    /// Bytes of them that are moved at most.
    limit: u64,
}

impl<T> Job<T> {
    fn report(&self) -> ShardReport {
        let (namespace, shard) = (self.namespace.clone(), self.shard.clone());
        let (model, chunks) = (self.geometry.model.clone(), self.chunks);
        ShardReport { namespace, shard, model, chunks, left: chunks, ..ShardReport::default() }
    }
}

/// What became of the shards so far.
#[derive(Default)]
struct Reports {
    all: Vec<ShardReport>,
    /// The first error.
    error: Option<Error>,
}

impl Reports {
    /// Works on a shard, unless somebody has asked to stop or the store has failed for too long. An
    /// error keeps no other shard back.
    fn add<T>(&mut self, job: &Job<T>, work: impl FnOnce(&mut ShardReport) -> Result<()>) {
        let mut report = job.report();
        let is_over = stop::asked() || self.all.iter().any(|r| r.store_failed);
        if !is_over && let Err(error) = work(&mut report) {
            report.error = Some(error.to_string());
            self.error.get_or_insert(error);
        }
        self.all.push(report);
    }
}

/// What all shards have in common.
struct Sync<'a> {
    settings: Settings,
    options: RemoteOptions,
    context: &'a Context,
}

impl Sync<'_> {
    /// The shards of the drives, with the chunks of prompts that they hold; whether these are all.
    fn local_shards(&mut self, args: &SyncArgs) -> Result<(Vec<Job<LocalChunk>>, bool)> {
        let mut by_place: BTreeMap<(String, String), HashMap<ChunkKey, (u32, u64)>> = BTreeMap::new();
        let mut geometries: HashMap<(String, String), Result<Geometry>> = HashMap::new();
        let (mut is_whole, mut unread) = (true, Vec::new());
        for drive in std::mem::take(&mut self.settings.drives) {
            let (found, unreadable) = match shards(&drive.path) {
                Ok(found) => found,
                // The other drives' chunks can be uploaded all the same.
                Err(e) => {
                    unread.push(e);
                    continue;
                }
            };
            unreadable.iter().for_each(|problem| out::tell(&format!("passed over {problem}")));
            is_whole &= unreadable.is_empty();
            for (files, raw) in &found {
                let Some(first) = files.first() else { continue };
                let place = (first.namespace.clone(), first.shard.clone());
                let is_chunk = |r: &Record| r.key_kind == KeyKind::Chain && r.tokens > 0;
                let records = live(raw, now_s()).into_iter().map(|(_, r)| r).filter(is_chunk);
                let slots = records.map(|r| (r.key, (r.depth, u64::from(r.pages) * PAGE_BYTES as u64)));
                let slots: Vec<_> = slots.collect();
                if slots.is_empty() {
                    continue;
                }
                if !matches!(geometries.get(&place), Some(Ok(_))) {
                    geometries.insert(place.clone(), geometry_of(&drive.path, &place.0, &place.1));
                }
                by_place.entry(place).or_default().extend(slots);
            }
            self.settings.drives.push(drive);
        }
        is_whole &= unread.is_empty();
        let last = if self.settings.drives.is_empty() { unread.pop() } else { None };
        unread.iter().for_each(|e| out::tell(&format!("passed over {e}")));
        if let Some(e) = last {
            return Err(e);
        }
        let mut jobs = Vec::new();
        for ((namespace, shard), slots) in by_place {
            let geometry = match geometries.remove(&(namespace.clone(), shard.clone())) {
                Some(Ok(geometry)) => geometry,
                Some(Err(e)) => {
                    out::tell(&format!("passed over {namespace}/{shard}: {e}"));
                    is_whole = false;
                    continue;
                }
                None => continue,
            };
            if !is_meant(args, &namespace, &geometry) {
                continue;
            }
            let mut slots: Vec<_> = slots.into_iter().map(|(key, (depth, bytes))| (depth, key.0, key, bytes)).collect();
            slots.sort_unstable_by_key(|(depth, key, ..)| (*depth, *key));
            let (chunks, limit) = (slots.len() as u64, args.limit.unwrap_or(u64::MAX));
            let items = slots.into_iter().map(|(_, _, key, bytes)| (key, bytes)).collect();
            jobs.push(Job { namespace, shard, geometry, chunks, items, limit });
        }
        Ok((jobs, is_whole))
    }

    /// The shards of the store, with what it has of them; whether none that has chunks was passed
    /// over.
    fn remote_shards(&self, args: &SyncArgs, store: &RemoteStore) -> Result<(Vec<Job<RemoteObject>>, bool)> {
        let (mut jobs, mut is_whole) = (Vec::new(), true);
        for (namespace, shard) in store.shards()? {
            let geometry = match store.geometry(&namespace, &shard) {
                // Another program's folder, or a server ended before it had described its first
                // chunk. The others can be brought all the same.
                Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => {
                    out::tell(&format!("passed over {namespace}/{shard}: {e}"));
                    let is_meant = args.namespace.as_ref().is_none_or(|wanted| *wanted == namespace);
                    is_whole &= !is_meant || store.objects(&namespace, &shard)?.is_empty();
                    continue;
                }
                geometry => geometry?,
            };
            if !is_meant(args, &namespace, &geometry) {
                continue;
            }
            let items = store.objects(&namespace, &shard)?;
            let (chunks, limit) = (items.len() as u64, args.limit.unwrap_or(u64::MAX));
            jobs.push(Job { namespace, shard, geometry, chunks, items, limit });
        }
        Ok((jobs, is_whole))
    }

    /// Bytes of each job that are to be brought: what a drive has needs no room.
    fn missing(&self, jobs: &[Job<RemoteObject>]) -> Vec<u64> {
        let mut there: HashMap<(String, String), HashSet<ChunkKey>> = HashMap::new();
        for drive in &self.settings.drives {
            // There may be no cache yet.
            let Ok((found, _)) = shards(&drive.path) else { continue };
            for (files, raw) in &found {
                let Some(first) = files.first() else { continue };
                let keys = live(raw, now_s()).into_iter().map(|(_, r)| r.key);
                there.entry((first.namespace.clone(), first.shard.clone())).or_default().extend(keys);
            }
        }
        let missing = |job: &Job<RemoteObject>| {
            let there = there.get(&(job.namespace.clone(), job.shard.clone()));
            let is_there = |object: &&RemoteObject| there.is_some_and(|there| there.contains(&object.key));
            let bytes: u64 = job.items.iter().filter(|object| !is_there(object)).map(|object| object.bytes).sum();
            bytes.min(job.limit)
        };
        jobs.iter().map(missing).collect()
    }

    fn up(&self, job: &Job<LocalChunk>, report: &mut ShardReport) -> Result<()> {
        let log = Log::open(LogOptions::of_settings(&self.settings, Arc::new(job.geometry.clone()))?)?;
        let remote = Remote::open(&self.options, &job.geometry)?;
        let mut watch = Watch::new(self.context, "upload", job);
        let mut waiting = job.items.iter().peekable();
        // Which of those on their way the store has already is not known yet: until then each
        // counts, as the longest of all.
        let (longest, mut submitted) = (job.items.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0), 0);
        let mut outcome = Ok(());
        while outcome.is_ok() && !stop::asked() {
            let stats = remote.stats();
            let reached = stats.uploaded + stats.present + stats.not_uploaded.iter().map(|(_, n)| *n).sum::<u64>();
            let fits = |submitted: u64, bytes: u64| {
                let on_their_way = submitted.saturating_sub(reached).saturating_mul(longest);
                stats.uploaded_bytes.saturating_add(on_their_way).saturating_add(bytes) <= job.limit
            };
            let mut is_full = false;
            while let Some(&&(key, bytes)) = waiting.peek() {
                is_full = !fits(submitted, bytes);
                if is_full || !remote.upload(&log, key) {
                    break;
                }
                (submitted, _) = (submitted + 1, waiting.next());
            }
            let is_over = submitted <= reached && is_full || waiting.peek().is_none();
            if remote.wait_uploaded(Instant::now() + TICK) && is_over {
                break;
            }
            let stats = remote.stats();
            outcome = watch.see(&stats, stats.uploaded + stats.present);
            report.store_failed = outcome.is_err();
        }
        remote.close();
        let stats = remote.stats();
        watch.bar.finish_and_clear();
        (report.moved, report.moved_bytes, report.present) = (stats.uploaded, stats.uploaded_bytes, stats.present);
        report.gone = stats.shed("gone");
        report.fail(&stats.not_uploaded);
        let reached = report.moved + report.present + report.gone + report.failed_chunks();
        report.left = report.chunks.saturating_sub(reached);
        outcome.and(log.close(Instant::now() + CLOSE))
    }

    /// Brings a shard, which gets `share` of the room: a prompt is of use as far as all ranks of a
    /// model have it.
    fn down(&self, job: &Job<RemoteObject>, share: f64, report: &mut ShardReport) -> Result<()> {
        let log = Log::open(LogOptions::of_settings(&self.settings, Arc::new(job.geometry.clone()))?)?;
        let remote = Remote::open(&self.options, &job.geometry)?;
        let mut watch = Watch::new(self.context, "bring", job);
        let there = || job.items.iter().filter(|object| log.contains(&object.key)).count() as u64;
        report.present = there();
        report.left = report.chunks.saturating_sub(report.present);
        let absent = job.items.iter().filter(|object| !log.contains(&object.key));
        let wanted = absent.map(|object| object.bytes).sum::<u64>().min(job.limit);
        let (room, bound) = self.room(job, &log)?;
        let room = (room as f64 * share) as u64;
        let most = job.limit.min(room);
        let fetch = remote.restore(Arc::clone(&log), job.items.clone(), most, Instant::now() + LONGEST);
        let mut outcome = Ok(());
        while outcome.is_ok() && !stop::asked() && !fetch.wait(Instant::now() + TICK) {
            let stats = remote.stats();
            outcome = watch.see(&stats, report.present + stats.fetched);
            report.store_failed = outcome.is_err();
        }
        fetch.cancel();
        remote.close();
        watch.bar.finish_and_clear();
        let stats = remote.stats();
        (report.moved, report.moved_bytes) = (stats.fetched, stats.fetched_bytes);
        report.fail(&stats.not_fetched);
        report.left = report.chunks.saturating_sub(there() + report.failed_chunks());
        if room >= wanted && stats.not_fetched.iter().any(|(cause, n)| *cause == "no_space" && *n > 0) {
            // The cache takes less than its capacity says, or others fill it.
            report.failed.insert("no_space".to_owned(), std::mem::take(&mut report.left));
        }
        report.no_room = bound.filter(|_| room < wanted && report.left > 0);
        outcome.and(log.flush()).and(log.close(Instant::now() + CLOSE))
    }

    /// Bytes that chunks may still fill without driving out others. Prompts are spread evenly over
    /// the drives that take any, so the fullest of these decides; also what bounds it there.
    fn room(&self, job: &Job<RemoteObject>, log: &Log) -> Result<(u64, Option<String>)> {
        let mut rooms = Vec::new();
        for (drive, stats) in self.settings.drives.iter().zip(log.stats().drives) {
            if !stats.healthy || stats.draining {
                continue;
            }
            let (size, free) = file_system_bytes(&drive.path)?;
            let (lanes, _) = shards(&drive.path)?;
            let is_own = |files: &LaneDir| (&files.namespace, &files.shard) == (&job.namespace, &job.shard);
            let own = lanes.iter().filter(|(files, _)| files.first().is_some_and(is_own));
            let spare: u64 = own.flat_map(|(_, raw)| raw).map(reserved_bytes).sum();
            let capacity = self.settings.drive_capacity_bytes(size);
            let of_capacity = capacity.saturating_sub(stats.disk_bytes.saturating_sub(spare));
            let of_drive = free.saturating_add(spare).saturating_sub(self.settings.min_free_bytes(size));
            let (room, bound) = room_of(capacity, of_capacity, of_drive);
            rooms.push((room, format!("no room: {}: {bound}", drive.path.display())));
        }
        let drives = rooms.len() as u64;
        let fullest = rooms.into_iter().min();
        Ok(fullest.map_or((0, None), |(room, bound)| (room.saturating_mul(drives), Some(bound))))
    }
}

/// The room for chunks where the capacity and the drive leave so many bytes, and what bounds it.
fn room_of(capacity: u64, of_capacity: u64, of_drive: u64) -> (u64, String) {
    let show = |bytes: u64| show_bytes(bytes as f64);
    let (by_capacity, by_drive) = (of_capacity.saturating_sub(capacity / BESIDE), of_drive - of_drive / BESIDE);
    let (left, of, beside) = if by_capacity < by_drive {
        (of_capacity, "left of the capacity", capacity / BESIDE)
    } else {
        (of_drive, "free above min_free", of_drive / BESIDE)
    };
    let bound =
        format!("{} {of}, {} of these kept for the index and open segments", show(left), show(beside.min(left)));
    (by_capacity.min(by_drive), bound)
}

fn is_meant(args: &SyncArgs, namespace: &str, geometry: &Geometry) -> bool {
    args.namespace.as_ref().is_none_or(|wanted| wanted == namespace || *wanted == geometry.model)
}

/// The progress, and how long there was none.
struct Watch {
    bar: ProgressBar,
    failing_since: Option<Instant>,
}

impl Watch {
    fn new<T>(context: &Context, what: &str, job: &Job<T>) -> Self {
        let label = format!("{what} {}", job.geometry.model);
        Self { bar: progress::bar(context, label, job.chunks, Unit::Count), failing_since: None }
    }

    /// # Errors
    /// `TimedOut` where the store has failed for too long.
    fn see(&mut self, stats: &RemoteStats, done: u64) -> Result<()> {
        self.bar.set_position(done);
        if !stats.failing {
            self.failing_since = None;
            return Ok(());
        }
        if self.failing_since.get_or_insert_with(Instant::now).elapsed() < PATIENCE {
            return Ok(());
        }
        Err(Error::new(ErrorKind::TimedOut, format!("the remote store has failed for {PATIENCE:?}"))
            .advice("`forebay probe DIR --remote URL` says why; run this again, and it goes on where it ended"))
    }
}

impl ShardReport {
    /// Takes over the counts of chunks that were not moved. That a chunk was not reached, or has
    /// left the drive, is no failure.
    fn fail(&mut self, causes: &[(&'static str, u64)]) {
        let fails = |cause: &str| {
            !matches!(cause, "gone" | "closed" | "cancelled" | "circuit_open" | "no_space" | "quota" | "expired")
        };
        let failed = causes.iter().filter(|(cause, n)| *n > 0 && fails(cause));
        self.failed = failed.map(|(cause, n)| ((*cause).to_owned(), *n)).collect();
    }

    fn failed_chunks(&self) -> u64 {
        self.failed.values().sum()
    }
}

fn text(reports: &[ShardReport], up: bool, elapsed_s: f64) -> String {
    let mut text = String::new();
    let (verb, from, to) =
        if up { ("uploaded", "on the drives", "in the store") } else { ("brought", "in the store", "on the drives") };
    for r in reports {
        if let Some(error) = &r.error {
            let _ = writeln!(text, "{}/{} ({}) failed: {error}", r.namespace, r.shard, r.model);
        }
        let (bytes, rate) = (r.moved_bytes as f64, r.moved_bytes as f64 / elapsed_s.max(1e-9));
        let _ = writeln!(
            text,
            "{}/{} ({}): of {} chunks {from}, {} were {to}, {} {verb} ({} at {}/s), {} left over",
            r.namespace,
            r.shard,
            r.model,
            r.chunks,
            r.present,
            r.moved,
            show_bytes(bytes),
            show_bytes(rate),
            r.left
        );
        if let Some(why) = &r.no_room {
            let _ = writeln!(text, "  {why}");
        }
        for (cause, n) in &r.failed {
            let _ = writeln!(text, "  {n} failed: {cause}");
        }
    }
    if reports.is_empty() { "nothing to move\n".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::room_of;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_bound_that_applies_keeps_its_tenth_and_is_named() {
        // A drive that others have filled beyond what the capacity still allows.
        let (room, bound) = room_of(200 * GIB, 190 * GIB, 20 * GIB);
        assert_eq!(room, 18 * GIB);
        assert!(bound.starts_with("20GiB free above min_free, 2"), "{bound}");
        let (room, bound) = room_of(200 * GIB, 50 * GIB, 400 * GIB);
        assert_eq!(room, 30 * GIB);
        assert!(bound.starts_with("50GiB left of the capacity, 20GiB"), "{bound}");
        assert_eq!(room_of(200 * GIB, 5 * GIB, 400 * GIB).0, 0);
    }
}
