//! `forebay fsck repair`: drops damaged chunks and lanes without data, and rewrites a damaged
//! BUDGET file, so that the cache opens and stores again.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use forebay::log::fsck::{
    BadSlot, LaneDir, RawLane, budget_damage, disk_bytes, lanes, remove_lost, repair, repair_budget,
};
use forebay::{Error, ErrorKind, Result};
use serde_json::{Value, json};

use super::{CacheArgs, name, remedy};
use crate::ls::{hex, now_s};
use crate::out::{self, Context, Outcome};
use crate::progress::{self, Unit};
use crate::size::show_bytes;

/// Options of `forebay fsck repair`.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct RepairArgs {
    #[command(flatten)]
    place: CacheArgs,
    /// Say what would be dropped, and write nothing. Exit status 3 where there is something.
    #[arg(long)]
    dry_run: bool,
}

const AFTER_HELP: &str = "\
Every slot is read and checked, as `fsck deep` does. Chunks whose bytes are not those that were stored are dropped for good, and are stored \
again when they are computed or imported again. Lanes that have lost their data.kv are removed, and a damaged BUDGET file is written \
anew. A damaged index is left for `fsck rebuild`, and reported.

Servers that use the cache must be stopped: only the process that writes a lane may change it. A server that runs drops a bad chunk \
itself when a load meets it.

Exit status 0: all is good now; 3: something is left to do, which is named.

Examples:
  forebay fsck repair /mnt/nvme/forebay --dry-run
  forebay fsck repair /mnt/nvme/forebay";

/// What was done, or would be.
#[derive(Default)]
struct Report {
    budget: bool,
    lost: Vec<Value>,
    dropped: Vec<Value>,
    dropped_bytes: u64,
    absent: u64,
    slots: u64,
    good_bytes: u64,
    /// What is left to do, and how.
    left: Vec<Value>,
}

/// Runs the command.
pub(crate) fn run(args: &RepairArgs, context: &Context) -> Result<Outcome> {
    let directory = &args.place.directory;
    let all = lanes(directory)?;
    if let Some(used) = all.iter().find(|l| !args.dry_run && l.in_use()) {
        return Err(Error::new(ErrorKind::Locked, "a process writes this lane")
            .at(used.path())
            .advice("stop the servers that use the cache, and repair it then"));
    }
    let mut report = Report::default();
    budget(args, &all, &mut report)?;
    let mut shards: Vec<Vec<LaneDir>> = Vec::new();
    for files in all {
        if files.is_lost() {
            match if args.dry_run { disk_bytes(files.path()) } else { remove_lost(&files) } {
                Ok(bytes) => report.lost.push(json!({"lane": name(&files), "disk_bytes": bytes})),
                Err(e) => report.leave(&files, &e),
            }
            continue;
        }
        let damage = match RawLane::read(&files) {
            Ok(raw) => raw.damage.first().map(|d| d.what.clone()),
            Err(e) => Some(e.to_string()),
        };
        if let Some(what) = damage {
            let remedy = remedy(directory, &files, &what);
            report.left.push(json!({"lane": name(&files), "what": what, "remedy": remedy}));
            continue;
        }
        let same = |s: &&mut Vec<LaneDir>| {
            s.first().is_some_and(|f| (&f.namespace, &f.shard) == (&files.namespace, &files.shard))
        };
        match shards.iter_mut().find(same) {
            Some(shard) => shard.push(files),
            None => shards.push(vec![files]),
        }
    }
    for files in &shards {
        // The others are repaired all the same.
        if let (Err(e), Some(first)) = (slots(args, context, files, &mut report), files.first()) {
            report.leave(first, &e);
        }
    }
    show(args, context, &report)
}

impl Report {
    /// A lane, or its shard, that could not be repaired.
    fn leave(&mut self, files: &LaneDir, error: &Error) {
        let what = error.to_string();
        self.left.push(json!({"lane": name(files), "what": what, "remedy": what}));
    }
}

fn budget(args: &RepairArgs, all: &[LaneDir], report: &mut Report) -> Result<()> {
    let directory: &Path = &args.place.directory;
    if budget_damage(directory)?.is_none() {
        return Ok(());
    }
    report.budget = true;
    if args.dry_run {
        return Ok(());
    }
    let raw: Vec<RawLane> = all.iter().filter_map(|files| RawLane::read(files).ok()).collect();
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64);
    repair_budget(directory, &raw.iter().collect::<Vec<_>>(), now_ms)
}

fn slots(args: &RepairArgs, context: &Context, files: &[LaneDir], report: &mut Report) -> Result<()> {
    let data = |f: &LaneDir| RawLane::read(f).map_or(0, |raw| raw.counts.file_bytes[1]);
    let bar = progress::bar(context, "checking", files.iter().map(data).sum(), Unit::Bytes);
    let done = repair(files, args.dry_run, now_s(), &|n| bar.inc(n));
    bar.finish_and_clear();
    let done = done?;
    let described = |b: &BadSlot| {
        let lane = files.get(b.lane).map(name);
        json!({"lane": lane, "key": hex(&b.key.0), "offset": b.offset, "what": b.what})
    };
    report.dropped.extend(done.dropped.iter().map(described));
    report.dropped_bytes += done.dropped_bytes;
    report.absent += done.absent;
    report.slots += done.slots;
    report.good_bytes += done.good_bytes;
    let late = done.late.iter().map(|b| {
        let mut late = described(b);
        late["remedy"] = json!("see what is wrong with the drive, and repair again");
        late
    });
    report.left.extend(late);
    Ok(())
}

fn show(args: &RepairArgs, context: &Context, report: &Report) -> Result<Outcome> {
    let r = report;
    let found = r.budget || !r.lost.is_empty() || !r.dropped.is_empty();
    let clean = r.left.is_empty() && !(args.dry_run && found);
    let outcome = if clean { Outcome::Done } else { Outcome::Problem };
    if context.json {
        out::print_json(
            &json!({"dry_run": args.dry_run, "clean": clean, "slots": r.slots, "good_bytes": r.good_bytes,
            "dropped_chunks": r.dropped.len(), "dropped_bytes": r.dropped_bytes, "absent": r.absent,
            "dropped": r.dropped, "lanes_removed": r.lost, "budget_rewritten": r.budget, "left": r.left}),
        )?;
        return Ok(outcome);
    }
    let would = if args.dry_run { "would be " } else { "" };
    if r.budget {
        out::print(&format!("BUDGET: damaged; {would}written anew\n"))?;
    }
    for lost in &r.lost {
        let (lane, bytes) = (lost["lane"].as_str().unwrap_or_default(), lost["disk_bytes"].as_f64().unwrap_or(0.0));
        out::print(&format!("{lane}: its data.kv is gone; {would}removed, {} given back\n", show_bytes(bytes)))?;
    }
    let line = |b: &Value| {
        let of = |field: &str| b[field].as_str().unwrap_or_default().to_owned();
        let key = if b["key"].is_null() { String::new() } else { format!("{} at {}: ", of("key"), b["offset"]) };
        format!("{}: {key}{}", of("lane"), of("what"))
    };
    for b in &r.dropped {
        out::print(&format!("{would}dropped: {}\n", line(b)))?;
    }
    for b in &r.left {
        // Of a lane of another version the fault is the remedy as well.
        let remedy = b["remedy"].as_str().filter(|remedy| Some(*remedy) != b["what"].as_str());
        let remedy = remedy.map_or_else(String::new, |remedy| format!("  remedy: {remedy}\n"));
        out::print(&format!("left: {}\n{remedy}", line(b)))?;
    }
    let (chunks, bytes) = (r.dropped.len(), r.dropped_bytes);
    let absent =
        if r.absent > 0 { format!("; {} records of nothing {would}forgotten", r.absent) } else { String::new() };
    out::print(&format!("{} slots checked; {chunks} chunks, {bytes} bytes {would}dropped{absent}\n", r.slots))?;
    Ok(outcome)
}
