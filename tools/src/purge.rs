//! `forebay purge`: removes what a cache holds, also while servers use it.
//!
//! What would go is counted from the indexes and shown first; the removal itself is the log's
//! (`forebay::log::purge`).

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};

use clap::Args;
use forebay::log::fsck::{LaneDir, RawLane, lanes, live};
use forebay::log::geometry_of;
use forebay::log::purge::{Purged, What, purge};
use forebay::remote::{Remote, RemoteOptions, RemoteStore};
use forebay::{Error, ErrorKind, Result};
use serde_json::{Value, json};

use crate::ls::{now_s, shards};
use crate::out::{self, Context, Outcome};
use crate::size::show_bytes;

/// Options of `forebay purge`.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP, group = clap::ArgGroup::new("what").multiple(false))]
pub(crate) struct PurgeArgs {
    /// The cache directory.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Remove everything; with --namespace, everything in that namespace.
    #[arg(long, group = "what")]
    all: bool,
    /// Remove what was stored with this cache salt.
    #[arg(long, value_name = "SALT", group = "what")]
    tenant: Option<String>,
    /// Remove what was stored with the cache salt of this hash, as `ls` shows it.
    #[arg(long, value_name = "HEX", group = "what", value_parser = parse_tenant)]
    tenant_id: Option<u64>,
    /// Only this namespace, as `ls --namespaces` shows it, or all of this model's name or object
    /// store's namespace. Alone, it means everything in it.
    #[arg(long, value_name = "NS")]
    namespace: Option<String>,
    /// Delete it in this remote store too (a `remote_url`), with the credentials of the
    /// environment.
    #[arg(long, value_name = "URL")]
    remote: Option<String>,
    /// Do not ask.
    #[arg(long, short, visible_alias = "force")]
    yes: bool,
    /// Show what would go, and remove nothing.
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,
}

const AFTER_HELP: &str = "\
What is promised: when the command has returned, no process serves anything that was stored before it began, and nothing of it \
comes back after kill -9, a reboot or `fsck rebuild`. Exceptions: a load that had begun before ends; a read-only process that was \
started before any server since boot does not notice.

What is not: the bytes are not overwritten. Lanes that no server writes are deleted (or, for a tenant, have holes punched where \
its chunks lay): their blocks are free, and the drive may keep their contents until it reuses them. A server that runs gives the \
space back in the background: after --all in whole segments, of a tenant as holes. To be \
sure, stop the servers first, and keep the cache on an encrypted drive.

What a server has uploaded to a remote tier is deleted with --remote URL, and may be fetched again without: that of the \
namespaces in DIR, or of the one given by --namespace. Other machines serve what they have on their drives.

Run it as the servers' user, once for each of their drives: DIR is one cache directory.

Examples:
  forebay purge /mnt/nvme/forebay --all --dry-run
  forebay purge /mnt/nvme/forebay --tenant acme --yes --remote s3://kv-cache/llama
  forebay purge /mnt/nvme/forebay --namespace 5f0c9b4e7a1d2233445566778899aabb";

fn parse_tenant(text: &str) -> std::result::Result<u64, String> {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).map_err(|_| "up to 16 hexadecimal digits".to_owned())
}

/// What would go of one shard.
struct Target {
    namespace: String,
    shard: String,
    model: String,
    lanes: usize,
    in_use: usize,
    chunks: usize,
    bytes: u64,
}

/// Runs the command.
pub(crate) fn run(args: &PurgeArgs, context: &Context) -> Result<Outcome> {
    let what = match (&args.tenant, args.tenant_id) {
        (Some(salt), _) => What::Tenant(forebay::key::tenant(Some(salt))),
        (_, Some(id)) => What::Tenant(id),
        _ => What::All,
    };
    if what == What::All && !args.all && args.namespace.is_none() {
        return Err(Error::new(ErrorKind::InvalidInput, "say what is to go")
            .advice("give --all, --tenant, --tenant-id or --namespace"));
    }
    let remote = args.remote.as_deref().map(crate::remote::settings).transpose()?;
    let remote = remote.and_then(|settings| RemoteOptions::of_settings(&settings));
    let (targets, nameless) = targets(args, (what, remote.as_ref()))?;
    for shard in &nameless {
        out::tell(&format!(
            "{shard} cannot be read, and its model is not known: if it is to go, name the directory with --namespace"
        ));
    }
    if targets.is_empty() {
        if context.json {
            out::print_json(&json!({"dry_run": args.dry_run, "shards": []}))?;
        } else {
            let hint = if remote.is_some() { "; name the --namespace of what only the store has" } else { "" };
            out::print(&format!("nothing to remove{hint}\n"))?;
        }
        return Ok(if nameless.is_empty() { Outcome::Done } else { Outcome::Problem });
    }
    if !context.json {
        for t in &targets {
            let (model, size) = (&t.model, show_bytes(t.bytes as f64));
            let of = format!("{}/{} ({model})", t.namespace, t.shard);
            out::print(&format!("{of}: {} chunks, {size}, {} lanes, {} in use\n", t.chunks, t.lanes, t.in_use))?;
        }
    }
    if !args.dry_run && !args.yes && !asked(context)? {
        return Err(Error::new(ErrorKind::InvalidInput, "nothing was removed").advice("confirm, or give --yes"));
    }
    let mut reports = Vec::new();
    let (mut complete, mut failed) = (nameless.is_empty(), None);
    for t in &targets {
        let mut report = json!({"namespace": t.namespace, "shard": t.shard, "model": t.model, "lanes": t.lanes,
            "lanes_in_use": t.in_use, "chunks": t.chunks, "bytes": t.bytes});
        if !args.dry_run {
            match remove(args, (t, what, remote.as_ref()), (context, &mut report)) {
                Ok(is_whole) => complete &= is_whole,
                // The others are removed all the same.
                Err(e) => {
                    report["error"] = json!(e.to_string());
                    failed = failed.or(Some(e));
                }
            }
        }
        reports.push(report);
    }
    if context.json {
        out::print_json(&json!({"dry_run": args.dry_run, "shards": reports}))?;
    }
    if let Some(e) = failed {
        return Err(e);
    }
    Ok(if complete { Outcome::Done } else { Outcome::Problem })
}

/// Removes from one shard; whether every lane could be read.
fn remove(
    args: &PurgeArgs,
    (t, what, remote): (&Target, What, Option<&RemoteOptions>),
    (context, report): (&Context, &mut Value),
) -> Result<bool> {
    let here = || match purge(&args.directory, &t.namespace, &t.shard, what) {
        // Only the remote store has it, or a server has given up its lanes meanwhile.
        Err(e) if e.kind() == ErrorKind::NotFound && remote.is_some() => Ok(Purged::default()),
        done => done,
    };
    let mut done = here()?;
    if let Some(options) = remote {
        let tenant = match what {
            What::Tenant(tenant) => Some(tenant),
            What::All => None,
        };
        Remote::of(options, (t.namespace.clone(), t.shard.clone()))?.clear(tenant)?;
        // A server may have fetched chunks again before they were deleted in the remote store.
        done.freed_bytes += here()?.freed_bytes;
    }
    for lane in &done.unreadable {
        out::tell(&format!("{}/{}/{lane} cannot be read, and may hold more; see `fsck rebuild`", t.namespace, t.shard));
    }
    if let Some(report) = report.as_object_mut() {
        report.insert("lanes_in_use".into(), json!(done.lanes_in_use));
        report.insert("chunks_removed".into(), json!(done.chunks));
        report.insert("lanes_deleted".into(), json!(done.lanes_deleted));
        report.insert("freed_bytes".into(), json!(done.freed_bytes));
        report.insert("unreadable".into(), json!(done.unreadable));
    }
    if !context.json {
        let freed = show_bytes(done.freed_bytes as f64);
        let rest = if done.lanes_in_use > 0 { "; servers give theirs back later" } else { "" };
        out::print(&format!("{}/{}: removed; {freed} given back{rest}\n", t.namespace, t.shard))?;
    }
    Ok(done.unreadable.is_empty())
}

/// The shards that hold something to be removed, here or in the remote store. Lanes that cannot be
/// read belong to them as well. Also those of which nothing says whether they are of the wanted
/// model.
fn targets(args: &PurgeArgs, (what, remote): (What, Option<&RemoteOptions>)) -> Result<(Vec<Target>, Vec<String>)> {
    let (found, _) = shards(&args.directory)?;
    // The readable lanes of a shard.
    let of_shard = |namespace: &str, shard: &str| {
        let same = |f: &LaneDir| (f.namespace.as_str(), f.shard.as_str()) == (namespace, shard);
        let its = found.iter().find(|(files, _)| files.first().is_some_and(same));
        its.map(|(_, raw)| raw.as_slice()).unwrap_or_default()
    };
    // The shards of a namespace are of one model. Lanes may be unreadable, or rebuilt without a
    // name.
    let of_lanes = |files: &LaneDir| {
        let its = found.iter().filter(|(lanes, _)| lanes.first().is_some_and(|l| l.namespace == files.namespace));
        its.flat_map(|(_, raw)| raw).map(|l| l.superblock.model.clone()).find(|model| !model.is_empty())
    };
    let model_of = |files: &LaneDir| {
        let described = geometry_of(&args.directory, &files.namespace, &files.shard).map(|g| g.model);
        described.ok().or_else(|| of_lanes(files))
    };
    let (mut targets, mut nameless): (Vec<Target>, Vec<String>) = Default::default();
    let all = lanes(&args.directory)?;
    let is_directory = all.iter().any(|files| args.namespace.as_ref() == Some(&files.namespace));
    for files in all {
        let LaneDir { namespace, shard, .. } = &files;
        if let Some(wanted) = &args.namespace
            && wanted != namespace
            && model_of(&files).as_ref() != Some(wanted)
        {
            let place = format!("{namespace}/{shard}");
            if !is_directory && model_of(&files).is_none() && !nameless.contains(&place) {
                nameless.push(place);
            }
            continue;
        }
        let in_use = usize::from(files.in_use());
        if let Some(t) = targets.iter_mut().find(|t| (&t.namespace, &t.shard) == (namespace, shard)) {
            t.lanes += 1;
            t.in_use += in_use;
            continue;
        }
        let (namespace, shard) = (namespace.clone(), shard.clone());
        let mut target = Target { namespace, shard, model: "unknown".into(), lanes: 1, in_use, chunks: 0, bytes: 0 };
        if let Some(model) = model_of(&files) {
            target.model = model;
        }
        let raw = of_shard(&target.namespace, &target.shard);
        let goes = |t: u64| what == What::All || what == What::Tenant(t);
        for (_, record) in live(raw, now_s()).iter().filter(|(_, r)| goes(r.tenant)) {
            target.chunks += 1;
            target.bytes += record.length;
        }
        targets.push(target);
    }
    // A purge whose remote part failed has left the directories of its shards.
    for (namespace, shard) in remote.map_or(Ok(Vec::new()), |_| shard_directories(&args.directory))? {
        let model = geometry_of(&args.directory, &namespace, &shard).map_or_else(|_| "unknown".to_owned(), |g| g.model);
        let is_meant = args.namespace.as_ref().is_none_or(|wanted| *wanted == namespace || *wanted == model);
        if is_meant && !targets.iter().any(|t| (&t.namespace, &t.shard) == (&namespace, &shard)) {
            targets.push(Target { namespace, shard, model, lanes: 0, in_use: 0, chunks: 0, bytes: 0 });
        }
    }
    let store = remote.map(RemoteStore::open).transpose()?;
    // Other caches may use the same store: what only the store has goes where it is named.
    if let Some((store, wanted)) = store.zip(args.namespace.as_ref()) {
        for (namespace, shard) in store.shards()? {
            if targets.iter().any(|t| (&t.namespace, &t.shard) == (&namespace, &shard)) {
                continue;
            }
            let model = store.geometry(&namespace, &shard).map_or_else(|_| "unknown".to_owned(), |g| g.model);
            if *wanted == namespace || *wanted == model {
                targets.push(Target { namespace, shard, model, lanes: 0, in_use: 0, chunks: 0, bytes: 0 });
            }
        }
    }
    if let Some(ns) = args.namespace.as_ref().filter(|_| targets.is_empty() && nameless.is_empty()) {
        return Err(Error::new(ErrorKind::NotFound, format!("there is no namespace {ns}"))
            .at(&args.directory)
            .advice("see `forebay ls DIR --namespaces`"));
    }
    // A tenant's last stores may not be in the index of a server yet; what a damaged index had is
    // not known, and `fsck rebuild` may bring it back; what the tenant has in the remote store is
    // not counted.
    let is_known = |t: &Target| {
        let is_whole = |lane: &&RawLane| lane.damage.is_empty();
        of_shard(&t.namespace, &t.shard).iter().filter(is_whole).count() == t.lanes
    };
    targets.retain(|t| what == What::All || t.chunks > 0 || t.in_use > 0 || remote.is_some() || !is_known(t));
    Ok((targets, nameless))
}

/// The shards that have a directory in the cache, with or without lanes.
fn shard_directories(cache: &Path) -> Result<Vec<(String, String)>> {
    let below = |dir: &Path| -> Result<Vec<String>> {
        let failed = |e| Error::io("cannot list the cache's shards", e).at(dir);
        let all = std::fs::read_dir(dir).and_then(Iterator::collect::<std::io::Result<Vec<_>>>).map_err(failed)?;
        let directories = all.into_iter().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        Ok(directories.filter_map(|entry| entry.file_name().into_string().ok()).collect())
    };
    let is_namespace = |name: &String| name.len() == 32 && name.bytes().all(|b| b.is_ascii_hexdigit());
    let mut found = Vec::new();
    for namespace in below(cache)?.into_iter().filter(is_namespace) {
        found.extend(below(&cache.join(&namespace))?.into_iter().map(|shard| (namespace.clone(), shard)));
    }
    found.sort();
    Ok(found)
}

fn asked(context: &Context) -> Result<bool> {
    if context.json || !std::io::stdin().is_terminal() {
        return Ok(false);
    }
    let failed = |e| Error::io("cannot ask", e);
    let mut stderr = std::io::stderr();
    write!(stderr, "Remove all of this? [y/N] ").and_then(|()| stderr.flush()).map_err(failed)?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).map_err(failed)?;
    Ok(matches!(line.trim(), "y" | "Y" | "yes"))
}
