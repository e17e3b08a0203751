//! `forebay ls`: what a cache serves, read from its indexes without a geometry, also beside
//! servers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use forebay::Result;
use forebay::key::ChunkKey;
use forebay::log::fsck::{LaneDir, RawLane, lanes, live};
use forebay::remote::RemoteObject;
use serde_json::{Value, json};

use crate::out::{self, Context, Outcome};
use crate::remote;
use crate::size::show_bytes;

/// Options of `forebay ls`.
#[derive(Debug, Args)]
#[command(
    after_help = "A server's stores of the last moments may be missing.\n\nExamples:\n  forebay ls /mnt/nvme/forebay\n  forebay ls /mnt/nvme/forebay --namespaces --json\n  forebay ls /mnt/nvme/forebay --remote s3://kv-cache/llama"
)]
pub(crate) struct LsArgs {
    /// The cache directory.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// One line per namespace and shard instead of one per chunk.
    #[arg(long)]
    namespaces: bool,
    /// Also tell how old each chunk is, in seconds; reads the header of every chunk.
    #[arg(long, conflicts_with = "namespaces")]
    age: bool,
    /// List what this remote store (a `remote_url`) has too, and tell of each chunk where it is;
    /// with the credentials of the environment.
    #[arg(long, value_name = "URL", conflicts_with = "namespaces")]
    remote: Option<String>,
}

/// The lanes of one shard, with what their indexes say.
pub(crate) type Shard = (Vec<LaneDir>, Vec<RawLane>);

/// The readable lanes of each shard, and what is wrong with the others.
pub(crate) fn shards(directory: &Path) -> Result<(Vec<Shard>, Vec<String>)> {
    let mut found: Vec<Shard> = Vec::new();
    let mut unreadable = Vec::new();
    for files in lanes(directory)? {
        let raw = match RawLane::read(&files) {
            Ok(raw) => raw,
            // Damaged, or not to be read: that keeps no other lane back.
            Err(e) => {
                unreadable.push(format!("{}: {e}", files.path().display()));
                continue;
            }
        };
        let same =
            |s: &&mut Shard| s.0.first().is_some_and(|f| (&f.namespace, &f.shard) == (&files.namespace, &files.shard));
        match found.iter_mut().find(same) {
            Some(shard) => {
                shard.0.push(files);
                shard.1.push(raw);
            }
            None => found.push((vec![files], vec![raw])),
        }
    }
    Ok((found, unreadable))
}

/// Chunks of the remote store that were not met on the drive yet, by shard.
struct RemoteChunks(BTreeMap<(String, String), BTreeMap<ChunkKey, RemoteObject>>);

impl RemoteChunks {
    fn list(args: &LsArgs, context: &Context) -> Result<Self> {
        let by_key = |objects: Vec<RemoteObject>| objects.into_iter().map(|object| (object.key, object)).collect();
        let shards = remote::list(args.remote.as_deref(), context)?.into_iter();
        Ok(Self(shards.map(|s| ((s.namespace, s.shard), by_key(s.objects))).collect()))
    }

    fn take(&mut self, (namespace, shard): (&str, &str), key: ChunkKey) -> bool {
        let shard = self.0.get_mut(&(namespace.to_owned(), shard.to_owned()));
        shard.is_some_and(|objects| objects.remove(&key).is_some())
    }

    /// Rows of the chunks that are not on the drive. They have no tokens, depth and expiry: only a
    /// chunk's header says those.
    fn rest(self) -> impl Iterator<Item = Value> {
        self.0.into_iter().flat_map(|((namespace, shard), objects)| {
            objects.into_values().map(move |object| {
                let RemoteObject { key, tenant, bytes } = object;
                json!({"namespace": namespace, "shard": shard, "key": hex(&key.0),
                    "tenant": format!("{tenant:016x}"), "bytes": bytes, "tier": "remote"})
            })
        })
    }
}

/// Unix seconds now.
pub(crate) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Runs the command.
pub(crate) fn run(args: &LsArgs, context: &Context) -> Result<Outcome> {
    let (found, unreadable) = shards(&args.directory)?;
    let mut rows = Vec::new();
    let mut remote = RemoteChunks::list(args, context)?;
    for (files, raw) in &found {
        let (Some(f), Some(first)) = (files.first(), raw.first()) else { continue };
        let served = live(raw, now_s());
        if args.namespaces {
            let disk: u64 = raw.iter().map(|l| l.counts.disk_bytes).sum();
            let bytes: u64 = served.iter().map(|(_, r)| r.length).sum();
            rows.push(json!({"namespace": f.namespace, "shard": f.shard, "model": first.superblock.model,
                "lanes": raw.len(), "chunks": served.len(), "bytes": bytes, "disk_bytes": disk}));
            continue;
        }
        for (lane, r) in &served {
            let mut row = json!({"namespace": f.namespace, "shard": f.shard, "key": hex(&r.key.0), "tokens": r.tokens,
                "depth": r.depth, "tenant": format!("{:016x}", r.tenant), "bytes": r.length, "expiry_s": r.expiry_s});
            if args.age {
                let born = files.get(*lane).zip(raw.get(*lane)).and_then(|(f, l)| f.born(l, r));
                row["age_s"] = json!(born.map(|b| now_s().saturating_sub(b.created_ms / 1000)));
            }
            if args.remote.is_some() {
                let is_there_too = remote.take((&f.namespace, &f.shard), r.key);
                row["tier"] = json!(if is_there_too { "drive, remote" } else { "drive" });
            }
            rows.push(row);
        }
    }
    rows.extend(remote.rest());
    for problem in &unreadable {
        out::tell(&format!("passed over {problem}"));
    }
    if context.json {
        out::print_json(&rows)?;
    } else {
        print_rows(args, &rows)?;
    }
    Ok(if unreadable.is_empty() { Outcome::Done } else { Outcome::Problem })
}

/// A heading per shard and a line per chunk, or a line per shard.
fn print_rows(args: &LsArgs, rows: &[Value]) -> Result<()> {
    let text = |row: &Value, field: &str| match &row[field] {
        Value::String(s) => s.clone(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    };
    let bytes = |row: &Value, field: &str| show_bytes(row[field].as_f64().unwrap_or(0.0));
    let mut shard = String::new();
    for row in rows {
        let place = format!("{}/{}", text(row, "namespace"), text(row, "shard"));
        if args.namespaces {
            let (model, lanes, chunks) = (text(row, "model"), text(row, "lanes"), text(row, "chunks"));
            let (live, disk) = (bytes(row, "bytes"), bytes(row, "disk_bytes"));
            out::print(&format!("{place}  {model}: {chunks} chunks, {live}, in {lanes} lanes of {disk}\n"))?;
            continue;
        }
        let further = |age: &str, tier: &str| {
            let age = if args.age { format!("{age:>9}") } else { String::new() };
            if args.remote.is_some() { format!("{age}  {tier}") } else { age }
        };
        if place != shard {
            let gap = if shard.is_empty() { "" } else { "\n" };
            let head = format!(
                "{:<64} {:>6} {:>6} {:>10} {:<16} {:>10}{}",
                "key",
                "tokens",
                "depth",
                "bytes",
                "tenant",
                "expires",
                further("age s", "tier")
            );
            out::print(&format!("{gap}{place}\n{head}\n"))?;
            shard = place;
        }
        let further = further(&text(row, "age_s"), &text(row, "tier"));
        let expires = if row["expiry_s"] == 0 { "never".to_owned() } else { text(row, "expiry_s") };
        let (key, tokens, depth) = (text(row, "key"), text(row, "tokens"), text(row, "depth"));
        let (bytes, tenant) = (bytes(row, "bytes"), text(row, "tenant"));
        out::print(&format!("{key:<64} {tokens:>6} {depth:>6} {bytes:>10} {tenant:<16} {expires:>10}{further}\n"))?;
    }
    Ok(())
}
