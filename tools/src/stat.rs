//! `forebay stat`: how full a cache is, and with what, read beside servers without taking a lock
//! that could disturb them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use comfy_table::{Table, presets};
use forebay::Result;
use forebay::format::VERSION;
use forebay::format::budget::BudgetPage;
use forebay::log::fsck::{LaneDir, RawLane, disk_bytes, live};
use serde_json::{Value, json};

use crate::fsck::budget_report;
use crate::ls::{hex, now_s, shards};
use crate::out::{self, Context, Outcome};
use crate::remote::{self, RemoteShard};
use crate::size::{parse_bytes, show_bytes};

/// Options of `forebay stat`.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct StatArgs {
    /// The cache directories, one per drive.
    #[arg(required = true, value_name = "DIR")]
    directories: Vec<PathBuf>,
    /// The servers' capacity setting, to show what is left of it; a cache directory does not record
    /// it. Each of several directories has an equal share of it.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    capacity: Option<u64>,
    /// The servers' `min_free`, to show what is left above it.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    min_free: Option<u64>,
    /// Show what this remote store (a `remote_url`) holds too, with the credentials of the
    /// environment.
    #[arg(long, value_name = "URL")]
    remote: Option<String>,
}

const AFTER_HELP: &str = "\
A server's stores of the last moments may be missing. Ages are those of the oldest and newest chunk that is served.

Space is taken in whole segments before it is filled: `reserved` is what of them holds no chunk yet, and counts against the capacity \
(docs/configuration.md, Capacity, and what a small cache takes). What is in a server's memory tier, its metrics tell. Exit status 3: a lane, or one of several directories, cannot be read, or the cache does not open.

Examples:
  forebay stat /mnt/nvme/forebay
  forebay stat /mnt/nvme0/forebay /mnt/nvme1/forebay --capacity 2t --min-free 100g --json
  forebay stat /mnt/nvme/forebay --remote s3://kv-cache/llama";

/// Runs the command.
pub(crate) fn run(args: &StatArgs, context: &Context) -> Result<Outcome> {
    let mut drives = Vec::new();
    let mut complete = true;
    for directory in &args.directories {
        let drive = match drive(args, directory) {
            // A drive that is gone hides no other.
            Err(e) if args.directories.len() > 1 => {
                out::tell(&format!("passed over: {e}"));
                complete = false;
                drives.push(json!({"directory": directory.display().to_string(), "error": e.to_string()}));
                continue;
            }
            drive => drive?,
        };
        complete &= drive["unreadable_lanes"].as_array().is_none_or(Vec::is_empty) && drive["budget_damage"].is_null();
        drives.push(drive);
    }
    let remote = remote::list(args.remote.as_deref(), context)?;
    if context.json {
        let mut all = json!({"format_version": VERSION, "drives": drives});
        if let Some(url) = &args.remote {
            all["remote"] = json!({"url": url, "shards": remote.iter().map(remote_shard).collect::<Vec<_>>()});
        }
        out::print_json(&all)?;
    } else {
        for drive in drives.iter().filter(|drive| drive["error"].is_null()) {
            show(drive)?;
        }
        if let Some(url) = &args.remote {
            show_remote(url, &remote)?;
        }
    }
    Ok(if complete { Outcome::Done } else { Outcome::Problem })
}

fn drive(args: &StatArgs, directory: &std::path::Path) -> Result<Value> {
    let (found, unreadable) = shards(directory)?;
    let (total, free) = forebay::io::file_system_bytes(directory)?;
    let budget = std::fs::read(directory.join("BUDGET")).ok().and_then(|bytes| BudgetPage::decode(&bytes).ok());
    let budget_damage = budget_report(directory)?.map(|(what, remedy)| json!({"what": what, "remedy": remedy}));
    let disk_bytes = disk_bytes(directory)?;
    // As the servers divide it.
    let capacity = args.capacity.map(|bytes| bytes / args.directories.len().max(1) as u64);
    let of_lanes: u64 = found.iter().flat_map(|(_, raw)| raw).map(|l| l.counts.disk_bytes).sum();
    let reserved: u64 = found.iter().flat_map(|(_, raw)| raw).map(reserved_bytes).sum();
    let mut namespaces: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for (files, raw) in &found {
        let Some(first) = files.first() else { continue };
        namespaces.entry(first.namespace.clone()).or_default().push(shard(files, raw));
    }
    let namespaces: Vec<Value> =
        namespaces.into_iter().map(|(name, shards)| json!({"namespace": name, "shards": shards})).collect();
    Ok(json!({"directory": directory.display().to_string(), "drive_id": budget.as_ref().map(|b| hex(&b.drive)),
        "budget_damage": budget_damage, "disk_bytes": disk_bytes,
        "reserved_bytes": reserved, "tables_bytes": disk_bytes.saturating_sub(of_lanes),
        "capacity_bytes": capacity, "capacity_left_bytes": capacity.map(|c| c.saturating_sub(disk_bytes)),
        "file_system_bytes": total, "free_bytes": free, "min_free_bytes": args.min_free,
        "free_above_floor_bytes": args.min_free.map(|floor| free.saturating_sub(floor)),
        "namespaces": namespaces, "unreadable_lanes": unreadable}))
}

fn remote_shard(shard: &RemoteShard) -> Value {
    json!({"namespace": shard.namespace, "shard": shard.shard, "model": shard.model,
        "chunks": shard.objects.len(), "bytes": shard.bytes()})
}

fn show_remote(url: &str, shards: &[RemoteShard]) -> Result<()> {
    let bytes: u64 = shards.iter().map(RemoteShard::bytes).sum();
    out::print(&format!("\n{url}: {} in the remote store\n", show_bytes(bytes as f64)))?;
    for shard in shards {
        let RemoteShard { namespace, shard: name, model, objects } = shard;
        let model = model.as_deref().unwrap_or("-");
        let (chunks, bytes) = (objects.len(), show_bytes(shard.bytes() as f64));
        out::print(&format!("{namespace}/{name}  {model}: {chunks} chunks, {bytes}\n"))?;
    }
    Ok(())
}

/// Bytes of data.kv that hold no chunk: the room in segments that stores fill next.
pub(crate) fn reserved_bytes(lane: &RawLane) -> u64 {
    lane.counts.data_disk_bytes.saturating_sub(lane.counts.slot_bytes)
}

fn shard(files: &[LaneDir], raw: &[RawLane]) -> Value {
    let now = now_s();
    let served = live(raw, now);
    let age = |created_ms: u64| now.saturating_sub(created_ms / 1000);
    let mut lanes = Vec::new();
    let (mut disk, mut chunks, mut objects, mut bytes) = (0, 0, 0, 0);
    let (mut oldest, mut newest): (Option<u64>, Option<u64>) = (None, None);
    for (i, (f, lane)) in files.iter().zip(raw).enumerate() {
        let here = || served.iter().filter(|(n, _)| *n == i).map(|(_, r)| r);
        let of_objects = here().filter(|r| r.tokens == 0).count() as u64;
        let of_chunks = here().count() as u64 - of_objects;
        let live_bytes: u64 = here().map(|r| r.length).sum();
        let first = here().min_by_key(|r| r.sequence).and_then(|r| f.born(lane, r));
        let last = here().max_by_key(|r| r.sequence).and_then(|r| f.born(lane, r));
        let shared = f.shared().filter(|_| lane.in_use);
        let pid = shared.map(|s| s.writer_pid).or_else(|| f.lock_pid().filter(|_| lane.in_use));
        let c = lane.counts;
        let segments = match shared {
            Some(s) => json!({"open": s.open, "sealed": s.sealed, "condemned": s.condemned, "free": c.free}),
            None => json!({"open": c.open, "sealed": c.sealed, "condemned": 0, "free": c.free}),
        };
        lanes.push(json!({"lane": f.name, "in_use": lane.in_use, "pid": pid, "chunks": of_chunks,
            "objects": of_objects, "live_bytes": live_bytes, "gone": c.gone,
            "disk_bytes": c.disk_bytes, "slot_bytes": c.slot_bytes, "reserved_bytes": reserved_bytes(lane),
            "index_bytes": c.disk_bytes.saturating_sub(c.data_disk_bytes), "segment_bytes": lane.superblock.segment_bytes, "segments": segments,
            "leased_segments": shared.map(|s| s.leased), "damage": lane.damage.len(),
            "oldest_s": first.map(|b| age(b.created_ms)), "newest_s": last.map(|b| age(b.created_ms))}));
        disk += c.disk_bytes;
        chunks += of_chunks;
        objects += of_objects;
        bytes += live_bytes;
        oldest = oldest.max(first.map(|b| age(b.created_ms)));
        newest = [newest, last.map(|b| age(b.created_ms))].into_iter().flatten().min();
    }
    let name = files.first().map(|f| f.shard.as_str());
    let model = raw.first().map(|l| l.superblock.model.as_str());
    json!({"shard": name, "model": model, "chunks": chunks, "objects": objects, "live_bytes": bytes,
        "disk_bytes": disk, "oldest_s": oldest, "newest_s": newest, "lanes": lanes})
}

fn size(value: &Value) -> String {
    value.as_u64().map_or_else(|| "?".to_owned(), |n| show_bytes(n as f64))
}

fn plain(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn show(drive: &Value) -> Result<()> {
    let mut head = format!("{}: {} on disk", plain(&drive["directory"]), size(&drive["disk_bytes"]));
    if !drive["capacity_bytes"].is_null() {
        head += &format!(" of {}, {} left", size(&drive["capacity_bytes"]), size(&drive["capacity_left_bytes"]));
    }
    head += &format!("; file system {} free of {}", size(&drive["free_bytes"]), size(&drive["file_system_bytes"]));
    if !drive["min_free_bytes"].is_null() {
        head += &format!(", {} above min_free", size(&drive["free_above_floor_bytes"]));
    }
    out::print(&format!("{head}; format version {VERSION}\n"))?;
    if let (Some(what), Some(remedy)) =
        (drive["budget_damage"]["what"].as_str(), drive["budget_damage"]["remedy"].as_str())
    {
        out::print(&format!("damaged: {what}; the cache does not open\n  remedy: {remedy}\n"))?;
    }
    out::print(&parts(drive))?;
    for namespace in drive["namespaces"].as_array().into_iter().flatten() {
        for shard in namespace["shards"].as_array().into_iter().flatten() {
            let (ns, name) = (plain(&namespace["namespace"]), plain(&shard["shard"]));
            out::print(&format!("\n{ns}/{name}  {}\n", plain(&shard["model"])))?;
            out::print(&format!("{}\n", table(shard)))?;
        }
    }
    for lane in drive["unreadable_lanes"].as_array().into_iter().flatten() {
        out::print(&format!("unreadable: {}\n", plain(lane)))?;
    }
    Ok(())
}

/// What the bytes on the drive are: a small cache is mostly what is reserved for stores to come.
fn parts(drive: &Value) -> String {
    let lanes = || {
        let shards = drive["namespaces"].as_array().into_iter().flatten().flat_map(|ns| ns["shards"].as_array());
        shards.flatten().flat_map(|shard| shard["lanes"].as_array()).flatten()
    };
    let sum = |field: &str| show_bytes(lanes().map(|l| l[field].as_u64().unwrap_or(0)).sum::<u64>() as f64);
    format!(
        "of these {} slots of chunks and objects, {} reserved for stores to come, {} index, {} tables\n",
        sum("slot_bytes"),
        size(&drive["reserved_bytes"]),
        sum("index_bytes"),
        size(&drive["tables_bytes"])
    )
}

fn table(shard: &Value) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let head = ["lane", "pid", "chunks", "objects", "live", "on disk", "open", "sealed", "free", "leased", "removals"];
    table.set_header(head.into_iter().chain(["oldest s", "newest s"]));
    for l in shard["lanes"].as_array().into_iter().flatten() {
        let s = &l["segments"];
        table.add_row([
            plain(&l["lane"]),
            plain(&l["pid"]),
            plain(&l["chunks"]),
            plain(&l["objects"]),
            size(&l["live_bytes"]),
            size(&l["disk_bytes"]),
            plain(&s["open"]),
            plain(&s["sealed"]),
            plain(&s["free"]),
            plain(&l["leased_segments"]),
            plain(&l["gone"]),
            plain(&l["oldest_s"]),
            plain(&l["newest_s"]),
        ]);
    }
    table
}
