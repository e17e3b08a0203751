//! `forebay fsck`: checks of a cache's files, also beside servers; damage gives exit status 3. Only
//! `rebuild` and `repair` write, and only to lanes that no server uses.

mod repair;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use forebay::log::fsck::{LaneDir, RawLane, RebuildOptions, budget_damage, deep, lanes, rebuild, rebuild_bytes};
use forebay::{Error, ErrorKind, Result};
use serde_json::{Value, json};

use crate::ls::{Shard, hex, now_s, shards};
use crate::out::{self, Context, Outcome};
use crate::progress::{self, Unit};

/// What to check.
#[derive(Debug, Subcommand)]
pub(crate) enum FsckCommand {
    /// Check the structures of every lane's index.
    #[command(
        after_help = "Examples:\n  forebay fsck check /mnt/nvme/forebay\n  forebay fsck check /mnt/nvme/forebay --json"
    )]
    Check(CacheArgs),
    /// Also read every slot that is served and check every CRC.
    #[command(after_help = "Examples:\n  forebay fsck deep /mnt/nvme/forebay")]
    Deep(CacheArgs),
    /// Print every record of the indexes, one JSON object a line.
    #[command(after_help = "Examples:\n  forebay fsck dump /mnt/nvme/forebay | head")]
    Dump(CacheArgs),
    /// Rebuild the index of damaged lanes from their slots and what is left of the old index.
    #[command(after_help = REBUILD_HELP)]
    Rebuild(RebuildArgs),
    /// Drop chunks whose bytes are damaged and lanes without data, and rewrite a damaged BUDGET
    /// file.
    Repair(repair::RepairArgs),
}

const REBUILD_HELP: &str = "\
Every byte of data.kv is read and checked. What is intact is found again, what was removed stays so, damaged \
slots are left out; `fsck repair` is for those where the index is intact. Servers that use the lane must be stopped.

Examples:
  forebay fsck rebuild /mnt/nvme/forebay --dry-run
  forebay fsck rebuild /mnt/nvme/forebay";

/// Options of `forebay fsck rebuild`.
#[derive(Debug, Args)]
pub(crate) struct RebuildArgs {
    #[command(flatten)]
    place: CacheArgs,
    /// Only this lane, as `fsck check` names it: NAMESPACE/SHARD/laneN.
    #[arg(long, value_name = "LANE")]
    lane: Option<String>,
    /// Also lanes whose index is intact.
    #[arg(long)]
    all: bool,
    /// Say what would be restored, and write nothing.
    #[arg(long)]
    dry_run: bool,
    /// Do not keep the old index as index.kv.bak.
    #[arg(long)]
    no_backup: bool,
}

/// Where to look.
#[derive(Debug, Args)]
pub(crate) struct CacheArgs {
    /// The cache directory.
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
}

/// Runs the command.
pub(crate) fn run(command: &FsckCommand, context: &Context) -> Result<Outcome> {
    match command {
        FsckCommand::Check(place) => check(place, context),
        FsckCommand::Deep(place) => check_deep(place, context),
        FsckCommand::Dump(place) => dump(place),
        FsckCommand::Rebuild(args) => make_anew(args, context),
        FsckCommand::Repair(args) => repair::run(args, context),
    }
}

fn name(files: &LaneDir) -> String {
    format!("{}/{}/{}", files.namespace, files.shard, files.name)
}

/// What helps where the system refuses to read, and says no more.
const NO_ACCESS: &str = "run this as the servers' user; if that is no help, see what the kernel log says of the drive";

/// The command that helps a lane of which `what` is wrong, as it can be pasted.
fn remedy(directory: &Path, files: &LaneDir, what: &str) -> String {
    let directory = quoted(directory);
    if files.is_lost() {
        return format!("forebay fsck repair {directory}");
    }
    if files.floors_are_damaged() {
        return format!("forebay purge {directory} --namespace {}", files.namespace);
    }
    match RawLane::read(files) {
        // A lane of another version, or one that cannot be read, cannot be rebuilt.
        Err(e) if !matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) => {
            e.advice_text().map_or(NO_ACCESS, |_| what).to_owned()
        }
        _ => format!("forebay fsck rebuild {directory}"),
    }
}

/// A path as a shell takes it.
pub(crate) fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+,:@%=".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

/// What is wrong with the BUDGET file, and what helps.
pub(crate) fn budget_report(directory: &Path) -> Result<Option<(String, String)>> {
    Ok(budget_damage(directory)?.map(|e| match e.kind() {
        ErrorKind::Incompatible => (e.to_string(), "update forebay".to_owned()),
        _ => (e.to_string(), format!("forebay fsck repair {}", quoted(directory))),
    }))
}

fn check(place: &CacheArgs, context: &Context) -> Result<Outcome> {
    let mut reports = Vec::new();
    let budget = budget_report(&place.directory)?;
    let mut clean = budget.is_none();
    for files in lanes(&place.directory)? {
        let report = match RawLane::read(&files) {
            Ok(lane) => {
                clean &= lane.damage.is_empty();
                let c = lane.counts;
                let help = lane.damage.first().map(|d| remedy(&place.directory, &files, &d.what));
                let damage: Vec<Value> =
                    lane.damage.iter().map(|d| json!({"file": d.file, "offset": d.offset, "what": d.what})).collect();
                json!({"lane": name(&files), "model": lane.superblock.model, "in_use": lane.in_use, "puts": c.puts,
                    "gone": c.gone, "sealed": c.sealed, "free": c.free, "open": c.open,
                    "journal_pages": c.journal_pages, "disk_bytes": c.disk_bytes, "damage": damage, "remedy": help})
            }
            Err(e) => {
                clean = false;
                let what = if files.is_lost() { "its data.kv is gone".to_owned() } else { e.to_string() };
                let help = remedy(&place.directory, &files, &what);
                json!({"lane": name(&files), "in_use": files.in_use(), "damage": [{"what": what}], "remedy": help})
            }
        };
        reports.push(report);
    }
    if context.json {
        let budget = budget.map(|(what, remedy)| json!({"what": what, "remedy": remedy}));
        out::print_json(&json!({"clean": clean, "budget_damage": budget, "lanes": reports}))?;
    } else {
        if let Some((what, remedy)) = &budget {
            out::print(&format!("damaged: {what}; the cache does not open\n  remedy: {remedy}\n"))?;
        }
        for r in &reports {
            let in_use = if r["in_use"] == true { ", in use by a server" } else { "" };
            let lane = r["lane"].as_str().unwrap_or_default();
            let holds = match (&r["puts"], &r["sealed"]) {
                (Value::Null, _) | (_, Value::Null) => "cannot be read".to_owned(),
                (puts, sealed) => format!("{puts} puts, {sealed} sealed segments"),
            };
            out::print(&format!("{lane}: {holds}{in_use}\n"))?;
            for d in r["damage"].as_array().into_iter().flatten() {
                let what = d["what"].as_str().unwrap_or_default();
                let place = d["file"].as_str().map_or_else(String::new, |file| format!("{file} at {}: ", d["offset"]));
                out::print(&format!("  damaged: {place}{what}\n"))?;
            }
            // Of a lane of another version the damage is the remedy as well.
            if let Some(remedy) = r["remedy"].as_str().filter(|help| Some(*help) != r["damage"][0]["what"].as_str()) {
                out::print(&format!("  remedy: {remedy}\n"))?;
            }
        }
    }
    Ok(if clean { Outcome::Done } else { Outcome::Problem })
}

/// What reading every slot of a cache has found.
#[derive(Default)]
struct DeepReport {
    slots: u64,
    bytes: u64,
    absent: usize,
    index_damage: usize,
    bad: Vec<Value>,
    /// Lanes and shards that could not be read, and why.
    unreadable: Vec<String>,
}

impl DeepReport {
    /// Reads all slots of a shard.
    fn add(&mut self, (files, raw): Shard, context: &Context) {
        self.index_damage += raw.iter().map(|l| l.damage.len()).sum::<usize>();
        let total: u64 = raw.iter().map(|l| l.counts.file_bytes[1]).sum();
        let bar = progress::bar(context, "checking", total, Unit::Bytes);
        let checked = deep(&files, &raw, now_s(), &|n| bar.inc(n));
        bar.finish_and_clear();
        let checked = match checked {
            Ok(checked) => checked,
            // A server may have deleted a lane meanwhile. What the others have is told all the
            // same: reading it may have taken hours.
            Err(e) => {
                let shard = files.first().map(|f| format!("{}/{}", f.namespace, f.shard)).unwrap_or_default();
                self.unreadable.push(format!("{shard}: {e}"));
                return;
            }
        };
        self.slots += checked.slots;
        self.bytes += checked.bytes;
        self.absent += checked.gone.len();
        for b in checked.bad {
            let lane = files.get(b.lane).map(name);
            self.bad.push(json!({"lane": lane, "key": hex(&b.key.0), "offset": b.offset, "what": b.what}));
        }
    }
}

fn check_deep(place: &CacheArgs, context: &Context) -> Result<Outcome> {
    let (found, unreadable) = shards(&place.directory)?;
    let mut report = DeepReport { unreadable, ..DeepReport::default() };
    found.into_iter().for_each(|shard| report.add(shard, context));
    let DeepReport { slots, bytes, absent, index_damage, bad, unreadable } = report;
    let budget = budget_report(&place.directory)?;
    let clean = bad.is_empty() && index_damage == 0 && unreadable.is_empty() && budget.is_none();
    if context.json {
        let budget = budget.map(|(what, remedy)| json!({"what": what, "remedy": remedy}));
        out::print_json(&json!({"clean": clean, "slots": slots, "bytes": bytes, "absent": absent, "bad": bad,
            "index_damage": index_damage, "unreadable_lanes": unreadable, "budget_damage": budget}))?;
    } else {
        if let Some((what, _)) = &budget {
            out::print(&format!("damaged: {what}; the cache does not open\n"))?;
        }
        for b in &bad {
            out::print(&format!("bad: {} in {} at {}: {}\n", b["key"], b["lane"], b["offset"], b["what"]))?;
        }
        for lane in &unreadable {
            out::print(&format!("unreadable: {lane}\n"))?;
        }
        let count = bad.len();
        out::print(&format!(
            "{slots} slots, {bytes} bytes, {absent} absent, {count} bad, {index_damage} index damages\n"
        ))?;
        let directory = quoted(&place.directory);
        if index_damage > 0 || !unreadable.is_empty() {
            out::print(&format!("what helps the index: forebay fsck check {directory}\n"))?;
        }
        if !bad.is_empty() || budget.is_some() {
            out::print(&format!("remedy: forebay fsck repair {directory}\n"))?;
        }
    }
    Ok(if clean { Outcome::Done } else { Outcome::Problem })
}

fn dump(place: &CacheArgs) -> Result<Outcome> {
    let (found, unreadable) = shards(&place.directory)?;
    for (files, raw) in &found {
        for (f, lane) in files.iter().zip(raw) {
            for r in &lane.records {
                let line = json!({"lane": name(f), "kind": format!("{:?}", r.kind), "key_kind": format!("{:?}", r.key_kind),
                    "key": hex(&r.key.0), "parent": hex(&r.parent.0), "sequence": r.sequence, "segment": r.segment,
                    "epoch": r.epoch, "page": r.page, "pages": r.pages, "tokens": r.tokens, "depth": r.depth,
                    "tenant": format!("{:016x}", r.tenant), "expiry_s": r.expiry_s, "length": r.length});
                out::print(&format!("{line}\n"))?;
            }
        }
    }
    let damaged: usize = found.iter().flat_map(|(_, raw)| raw).map(|l| l.damage.len()).sum();
    if damaged > 0 {
        out::tell(&format!("{damaged} places of the index are damaged, and what they held is not in this list"));
    }
    unreadable.iter().for_each(|problem| out::tell(&format!("passed over {problem}")));
    if damaged > 0 || !unreadable.is_empty() {
        out::tell(&format!("what helps: forebay fsck check {}", quoted(&place.directory)));
        return Ok(Outcome::Problem);
    }
    Ok(Outcome::Done)
}

fn make_anew(args: &RebuildArgs, context: &Context) -> Result<Outcome> {
    let all = lanes(&args.place.directory)?;
    let read: Vec<Result<RawLane>> = all.iter().map(RawLane::read).collect();
    if let Some(wanted) = args.lane.as_ref().filter(|wanted| all.iter().all(|l| name(l) != **wanted)) {
        return Err(Error::new(ErrorKind::NotFound, format!("there is no lane {wanted}"))
            .at(&args.place.directory)
            .advice("see `forebay fsck check`"));
    }
    let options = RebuildOptions { dry_run: args.dry_run, backup: !args.no_backup };
    let mut report = RebuildReport::default();
    let mut first_error = None;
    for (files, raw) in all.iter().zip(&read) {
        if args.lane.as_ref().is_some_and(|wanted| name(files) != *wanted) {
            continue;
        }
        if files.is_lost() {
            // There is nothing that an index could be made from.
            report.lost.push(name(files));
            continue;
        }
        if files.floors_are_damaged() {
            // A new index does not help: no lane of the shard is served.
            report.unserved.push((name(files), remedy(&args.place.directory, files, "")));
            continue;
        }
        let damaged = !raw.as_ref().is_ok_and(|l| l.damage.is_empty());
        if !(damaged || args.all || args.lane.is_some()) {
            continue;
        }
        let same = |l: &LaneDir| (&l.namespace, &l.shard) == (&files.namespace, &files.shard);
        let siblings = all.iter().zip(&read).filter(|(l, _)| same(l) && l.name != files.name);
        let sibling = siblings.filter_map(|(_, raw)| raw.as_ref().ok()).map(|l| &l.superblock).next();
        let bar = progress::bar(context, format!("rebuilding {}", files.name), rebuild_bytes(files), Unit::Bytes);
        let done = rebuild(files, sibling, options, &|n| bar.inc(n));
        bar.finish_and_clear();
        let done = match done {
            Ok(done) => done,
            // The others are rebuilt all the same.
            Err(e) => {
                report.failed.push((name(files), e.to_string()));
                first_error.get_or_insert(e);
                continue;
            }
        };
        let left_out: Vec<Value> =
            done.left_out.iter().map(|b| json!({"key": hex(&b.key.0), "offset": b.offset, "what": b.what})).collect();
        report.left_out |= !left_out.is_empty();
        report.lanes.push(json!({"lane": name(files), "chunks": done.chunks, "bytes": done.bytes,
            "segments": done.segments,
            "old_records": done.old_records, "superblock_derived": done.derived, "left_out": left_out}));
    }
    report.show(args, context)?;
    let outcome = if report.is_clean() { Outcome::Done } else { Outcome::Problem };
    first_error.map_or(Ok(outcome), Err)
}

/// What was rebuilt, and what could not be.
#[derive(Default)]
struct RebuildReport {
    lanes: Vec<Value>,
    /// Whether something of these lanes was left out.
    left_out: bool,
    /// Lanes without data.kv.
    lost: Vec<String>,
    /// Lanes of shards whose floors are damaged, and what helps.
    unserved: Vec<(String, String)>,
    failed: Vec<(String, String)>,
}

impl RebuildReport {
    fn is_clean(&self) -> bool {
        !self.left_out && self.lost.is_empty() && self.unserved.is_empty() && self.failed.is_empty()
    }

    fn show(&self, args: &RebuildArgs, context: &Context) -> Result<()> {
        if context.json {
            let failed: Vec<Value> = self.failed.iter().map(|(lane, e)| json!({"lane": lane, "error": e})).collect();
            let unserved: Vec<Value> =
                self.unserved.iter().map(|(lane, help)| json!({"lane": lane, "remedy": help})).collect();
            return out::print_json(&json!({"dry_run": args.dry_run, "clean": self.is_clean(), "lanes": self.lanes,
                "lost_lanes": self.lost, "damaged_floors": unserved, "failed": failed}));
        }
        let verb = if args.dry_run { "would be restored" } else { "restored" };
        for r in &self.lanes {
            let lane = r["lane"].as_str().unwrap_or_default();
            out::print(&format!("{lane}: {} chunks, {} bytes {verb}\n", r["chunks"], r["bytes"]))?;
            for b in r["left_out"].as_array().into_iter().flatten() {
                out::print(&format!("  left out: {} at {}: {}\n", b["key"], b["offset"], b["what"]))?;
            }
        }
        for lane in &self.lost {
            let directory = quoted(&args.place.directory);
            out::print(&format!("{lane}: its data.kv is gone; remedy: forebay fsck repair {directory}\n"))?;
        }
        for (lane, help) in &self.unserved {
            let what = "the file FLOORS of its shard is damaged, which a new index does not help";
            out::print(&format!("{lane}: {what}; remedy: {help}\n"))?;
        }
        for (lane, e) in &self.failed {
            out::print(&format!("{lane}: not rebuilt: {e}\n"))?;
        }
        if self.lanes.is_empty() && self.is_clean() {
            out::print(
                "no index is damaged; --all rebuilds all the same; `forebay fsck repair` drops damaged chunks\n",
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use forebay::config::{Capacity, MinFree, Settings};
    use forebay::objects::{ObjectMemory, ObjectOptions, ObjectPut, ObjectStore, PutOptions};

    use super::*;

    /// A shard with one object.
    fn put_one(dir: &Path, namespace: &str) {
        let mut settings = Settings::at(dir);
        settings.capacity = Capacity::Bytes(1 << 30);
        settings.min_free = MinFree::Bytes(0);
        settings.allow_any_filesystem = true;
        let options = ObjectOptions { segment_bytes: Some(32 << 20), ..ObjectOptions::new(&settings, namespace) };
        let store = ObjectStore::open_with(options).unwrap();
        let value = ObjectMemory::from_vec(b"value".to_vec()).unwrap();
        let put = store.submit_put(vec![ObjectPut { key: b"k".to_vec(), value }], PutOptions::default()).unwrap();
        assert!(store.wait(put, Duration::from_secs(120)).unwrap().all_ok());
        store.flush().unwrap();
    }

    #[test]
    fn a_lane_that_goes_during_a_deep_check_hides_nothing_of_other_shards() {
        let dir = tempfile::tempdir().unwrap();
        ["one", "other"].into_iter().for_each(|namespace| put_one(dir.path(), namespace));
        for gone in [0, 1] {
            let (found, unreadable) = shards(dir.path()).unwrap();
            let lane = found[gone].0[0].path().to_path_buf();
            let shard = format!("{}/{}: ", found[gone].0[0].namespace, found[gone].0[0].shard);
            let away = dir.path().join("away");
            std::fs::rename(lane.join("data.kv"), &away).unwrap();
            let mut report = DeepReport { unreadable, ..DeepReport::default() };
            found.into_iter().for_each(|shard| report.add(shard, &Context { json: true, quiet: true }));
            assert_eq!((report.slots, report.bad.len(), report.unreadable.len()), (1, 0, 1));
            assert!(report.unreadable[0].starts_with(&shard), "{:?}", report.unreadable);
            std::fs::rename(&away, lane.join("data.kv")).unwrap();
        }
    }
}
