//! `forebay stat`, `purge`, `fsck rebuild` and `fsck repair` over caches of a real log, beside its
//! server and after it.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use common::{folder, forebay};
use forebay::config::{Capacity, MinFree, Settings};
use forebay::format::crc;
use forebay::geometry::{DType, Geometry, LayerKind, LayerSpec};
use forebay::io::{self, AlignedBuf, EngineChoice, IoOptions, Request};
use forebay::key::{self, ChunkKey};
use forebay::log::fsck::{RawLane, deep, lanes};
use forebay::log::{Log, LogOptions, PutOutcome, PutSpec};
use forebay::objects::{ObjectMemory, ObjectOptions, ObjectPut, ObjectStore, PutOptions};

fn open(dir: &Path) -> Arc<Log> {
    open_within(dir, 64 << 20)
}

fn open_within(dir: &Path, capacity_bytes: u64) -> Arc<Log> {
    let layers = vec![LayerSpec::kv(LayerKind::Full, 1, 64); 2];
    let geometry = Arc::new(Geometry::new("small", DType::named("bf16").unwrap(), layers, 16).unwrap());
    Log::open(LogOptions {
        capacity_bytes,
        segment_bytes: Some(128 << 10),
        io: IoOptions { engine: EngineChoice::Threads, numjobs: 1, ..IoOptions::default() },
        ..LogOptions::new(dir, geometry)
    })
    .unwrap()
}

fn name(n: u32) -> ChunkKey {
    key::object_key(&n.to_le_bytes())
}

/// Stores chunk `n`, all its bytes `n`, for a tenant.
fn store(log: &Log, n: u32, salt: Option<&str>) {
    let spec = PutSpec { tenant: key::tenant(salt), ..PutSpec::chunk(name(n), name(n + 1000), 16, 0) };
    let PutOutcome::Started(put) = log.begin_put_within(spec, Duration::from_secs(120)).unwrap() else { panic!() };
    let mut crcs = Vec::new();
    for e in put.layout().extents.iter() {
        let mut buf = AlignedBuf::zeroed(e.padded_len as usize).unwrap();
        buf[..e.len as usize].fill(n as u8);
        crcs.push(crc(&buf[..e.len as usize]));
        let request = Request::write(Arc::clone(put.file()), put.slot_offset() + e.offset, buf.into(), drop);
        io::wait(&*log.drive(put.drive()).unwrap().write, request).result.unwrap();
    }
    let (tx, rx) = std::sync::mpsc::channel();
    put.commit(&crcs, Box::new(move |r| tx.send(r).unwrap()));
    rx.recv_timeout(Duration::from_secs(120)).unwrap().unwrap();
}

fn stored(log: &Log) -> Vec<u32> {
    (0..20).filter(|n| log.contains(&name(*n))).collect()
}

/// Twenty chunks, every second one of the tenant `acme`.
fn filled(dir: &Path) -> Arc<Log> {
    let log = open(dir);
    (0..20).for_each(|n| store(&log, n, (n % 2 == 1).then_some("acme")));
    log.flush().unwrap();
    log
}

fn lane(dir: &Path) -> PathBuf {
    let mut open = vec![dir.to_path_buf()];
    while let Some(dir) = open.pop() {
        if dir.ends_with("lane0") {
            return dir;
        }
        open.extend(std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()));
    }
    panic!("no lane");
}

#[test]
fn stat_tells_of_a_cache_in_use() {
    let dir = folder();
    let log = filled(dir.path());
    log.remove(&[name(3)]).unwrap();
    let all = ["stat", ".", "--json", "--capacity", "64m", "--min-free", "1m"];
    let json = forebay(dir.path(), &all).expect(0).json();
    let drive = &json["drives"][0];
    assert_eq!(json["format_version"], 3);
    let disk = drive["disk_bytes"].as_u64().unwrap();
    assert_eq!(drive["capacity_left_bytes"].as_u64().unwrap() + disk, 64 << 20);
    assert!(drive["free_above_floor_bytes"].as_u64() < drive["free_bytes"].as_u64());
    let gone = forebay(dir.path(), &["stat", "gone", ".", "--json"]).expect(3).json();
    assert!(gone["drives"][0]["error"].is_string() && gone["drives"][1]["disk_bytes"].is_u64(), "{gone}");
    let two = forebay(dir.path(), &["stat", ".", ".", "--json", "--capacity", "64MiB"]).expect(0).json();
    assert_eq!(two["drives"][1]["capacity_bytes"], 32 << 20, "drives share it");
    let shard = &drive["namespaces"][0]["shards"][0];
    assert_eq!((&shard["chunks"], &shard["model"]), (&19.into(), &"small".into()));
    assert_eq!(shard["live_bytes"], 19 * 4096);
    let lane = &shard["lanes"][0];
    assert_eq!(lane["pid"], std::process::id());
    assert_eq!((&lane["in_use"], &lane["gone"]), (&true.into(), &1.into()));
    assert!(lane["segments"]["open"].as_u64().unwrap() + lane["segments"]["sealed"].as_u64().unwrap() >= 2);
    assert!(shard["oldest_s"].as_u64().unwrap() >= shard["newest_s"].as_u64().unwrap());
    assert_eq!(lane["leased_segments"], 0);
    let chunk = log.locate(&name(5), Duration::from_secs(60)).unwrap();
    assert!(chunk.is_leased());
    let json = forebay(dir.path(), &["stat", ".", "--json"]).expect(0).json();
    assert_eq!(json["drives"][0]["namespaces"][0]["shards"][0]["lanes"][0]["leased_segments"], 1);
    drop(chunk);
    let text = forebay(dir.path(), &["stat", "."]).expect(0).stdout;
    assert!(text.contains("format version 3") && text.contains("lane0"), "{text}");
    let rows = forebay(dir.path(), &["ls", ".", "--age", "--json"]).expect(0).json();
    assert!(rows.as_array().unwrap().iter().all(|r| r["age_s"].as_u64().unwrap() < 1000), "{rows}");
    assert_eq!(stored(&log).len(), 19);
}

fn objects(dir: &Path, namespace: &str) -> ObjectStore {
    let mut settings = Settings::at(dir);
    settings.capacity = Capacity::Bytes(1 << 30);
    settings.min_free = MinFree::Bytes(0);
    settings.allow_any_filesystem = true;
    let options = ObjectOptions { segment_bytes: Some(32 << 20), ..ObjectOptions::new(&settings, namespace) };
    ObjectStore::open_with(options).unwrap()
}

#[test]
fn engines_and_object_stores_share_a_cache_and_are_told_apart_by_name() {
    let dir = folder();
    let log = open_within(dir.path(), 1 << 30);
    store(&log, 7, None);
    let stores = ["lmcache/llama", "sglang/llama"].map(|name| objects(dir.path(), name));
    for (store, value) in stores.iter().zip([b"one".to_vec(), b"other".to_vec()]) {
        let value = ObjectMemory::from_vec(value).unwrap();
        let id = store.submit_put(vec![ObjectPut { key: b"k".to_vec(), value }], PutOptions::default()).unwrap();
        assert!(store.wait(id, Duration::from_secs(120)).unwrap().all_ok());
        store.flush().unwrap();
    }
    log.flush().unwrap();
    let lengths = |store: &ObjectStore| store.list(b"", 9, None).unwrap();
    assert_eq!(stores.each_ref().map(lengths), [vec![(b"k".to_vec(), 3)], vec![(b"k".to_vec(), 5)]]);
    let rows = forebay(dir.path(), &["ls", ".", "--namespaces", "--json"]).expect(0).json();
    let mut models: Vec<_> = rows.as_array().unwrap().iter().map(|r| r["model"].as_str().unwrap()).collect();
    models.sort_unstable();
    assert_eq!(models, ["lmcache/llama", "sglang/llama", "small"]);
    let stat = forebay(dir.path(), &["stat", "."]).expect(0).stdout;
    assert!(models.iter().all(|model| stat.contains(model)), "{stat}");
    forebay(dir.path(), &["purge", ".", "--namespace", "llama", "--yes"]).expect(1);
    let done = forebay(dir.path(), &["purge", ".", "--namespace", "lmcache/llama", "--yes", "--json"]).expect(0).json();
    assert_eq!(done["shards"].as_array().unwrap().len(), 1, "{done}");
    assert_eq!(stores.each_ref().map(|store| lengths(store).len()), [0, 1]);
    assert_eq!(stored(&log), [7]);
}

#[test]
fn purge_asks_tells_and_removes_beside_a_server() {
    let dir = folder();
    let log = filled(dir.path());
    let dry = forebay(dir.path(), &["purge", ".", "--tenant", "acme", "--dry-run", "--json"]).expect(0).json();
    assert_eq!((&dry["shards"][0]["chunks"], &dry["dry_run"]), (&10.into(), &true.into()));
    assert_eq!(stored(&log).len(), 20);
    forebay(dir.path(), &["purge", ".", "--all"]).expect(2);
    forebay(dir.path(), &["purge", "."]).expect(2);
    forebay(dir.path(), &["purge", ".", "--all", "--tenant", "acme", "--yes"]).expect(2);
    assert_eq!(stored(&log).len(), 20, "nobody confirmed");
    let rows = forebay(dir.path(), &["ls", ".", "--json"]).expect(0).json();
    let tenant =
        rows.as_array().unwrap().iter().map(|r| r["tenant"].as_str().unwrap()).find(|t| *t != "0000000000000000");
    let done = forebay(dir.path(), &["purge", ".", "--tenant-id", tenant.unwrap(), "--yes", "--json"]).expect(0).json();
    assert_eq!((&done["shards"][0]["chunks_removed"], &done["shards"][0]["lanes_in_use"]), (&10.into(), &1.into()));
    let even: Vec<u32> = (0..20).step_by(2).collect();
    assert_eq!(stored(&log), even);
    log.abandon();
    drop(log);
    let log = open(dir.path());
    assert_eq!(stored(&log), even, "after a crash");
    let ns = rows[0]["namespace"].as_str().unwrap();
    forebay(dir.path(), &["purge", ".", "--namespace", &"0".repeat(32), "--yes"]).expect(1);
    forebay(dir.path(), &["purge", ".", "--namespace", ns, "--force"]).expect(0);
    assert_eq!(stored(&log), [0u32; 0]);
    store(&log, 4, None);
    assert_eq!(stored(&log), [4]);
    log.abandon();
    drop(log);
    let done = forebay(dir.path(), &["purge", ".", "--all", "--yes", "--json"]).expect(0).json();
    assert!(done["shards"][0]["freed_bytes"].as_u64().unwrap() > 100 << 10, "{done}");
    assert_eq!(forebay(dir.path(), &["purge", ".", "--all", "--yes"]).expect(0).stdout, "nothing to remove\n");
    assert_eq!(stored(&open(dir.path())), [0u32; 0]);
}

#[test]
fn purge_of_a_tenant_holds_for_what_a_damaged_index_had() {
    for whole in [false, true] {
        let dir = folder();
        let log = filled(dir.path());
        log.close(std::time::Instant::now() + Duration::from_secs(120)).unwrap();
        drop(log);
        let index = File::options().write(true).open(lane(dir.path()).join("index.kv")).unwrap();
        // The superblocks, or only what comes after them: journal and regions.
        let from = if whole { 0 } else { 8192 };
        let length = index.metadata().unwrap().len();
        (from..length).step_by(4096).for_each(|at| index.write_all_at(&[0x5a; 4096], at).unwrap());
        let done = forebay(dir.path(), &["purge", ".", "--tenant", "acme", "--yes"]);
        assert_eq!(done.expect(if whole { 3 } else { 0 }).stdout.matches(": removed").count(), 1);
        forebay(dir.path(), &["fsck", "rebuild", "."]).expect(0);
        let even: Vec<u32> = (0..20).step_by(2).collect();
        assert_eq!(stored(&open(dir.path())), even, "whole: {whole}");
    }
}

#[test]
fn purge_of_a_model_holds_for_a_lane_that_cannot_be_read() {
    for is_described in [true, false] {
        let dir = folder();
        close(filled(dir.path()));
        let index = File::options().write(true).open(lane(dir.path()).join("index.kv")).unwrap();
        let length = index.metadata().unwrap().len();
        (0..length).step_by(4096).for_each(|at| index.write_all_at(&[0x5a; 4096], at).unwrap());
        if !is_described {
            std::fs::remove_file(lane(dir.path()).with_file_name("geometry.json")).unwrap();
        }
        let done = forebay(dir.path(), &["purge", ".", "--namespace", "small", "--yes"]).expect(if is_described {
            0
        } else {
            3
        });
        assert_eq!(done.stderr.contains("its model is not known"), !is_described, "{}", done.stderr);
        forebay(dir.path(), &["fsck", "rebuild", "."]).expect(0);
        assert_eq!(stored(&open(dir.path())).len(), if is_described { 0 } else { 20 });
    }
}

#[test]
fn purge_deletes_in_the_remote_store_too_where_it_is_named() {
    let dir = folder();
    let log = filled(dir.path());
    let rows = forebay(dir.path(), &["ls", ".", "--json"]).expect(0).json();
    let text = |key: &str, row: usize| rows[row][key].as_str().unwrap().to_owned();
    let tenant = (0..20).map(|row| text("tenant", row)).find(|t| *t != "0000000000000000").unwrap();
    let store = dir.path().join("store/kv");
    let object = |namespace: &str, tenant: &str| {
        let place = store.join(namespace).join(log.geometry().shard_dir_name()).join(tenant);
        std::fs::create_dir_all(&place).unwrap();
        let name = place.join("ab".repeat(32));
        std::fs::write(&name, "KV").unwrap();
        name
    };
    let namespace = text("namespace", 0);
    let (own, all, other) =
        (object(&namespace, &tenant), object(&namespace, "0000000000000000"), object(&"0".repeat(32), &tenant));
    let url = format!("file://{}", store.display());
    forebay(dir.path(), &["purge", ".", "--tenant-id", &tenant, "--yes", "--remote", &url]).expect(0);
    assert_eq!([&own, &all, &other].map(|f| f.exists()), [false, true, true]);
    forebay(dir.path(), &["purge", ".", "--all", "--yes", "--remote", "redis://h"]).expect(2);
    // Where the tenant has nothing on the drive any more.
    let late = object(&namespace, &tenant);
    let notes = late.with_file_name("notes.txt");
    std::fs::write(&notes, "somebody's").unwrap();
    forebay(dir.path(), &["purge", ".", "--tenant-id", &tenant, "--yes", "--remote", &url]).expect(0);
    assert!(!late.exists() && notes.exists(), "chunks alone are deleted");
    forebay(dir.path(), &["purge", ".", "--all", "--yes", "--remote", &url]).expect(0);
    assert_eq!([&own, &all, &other].map(|f| f.exists()), [false, false, true]);
    // What another cache has in the same store goes where it is named.
    let of_other = ["purge", ".", "--namespace", &"0".repeat(32), "--yes", "--remote", &url];
    forebay(dir.path(), &of_other).expect(0);
    assert!(!other.exists());
}

#[test]
fn rebuild_restores_what_is_intact_once_the_server_is_gone() {
    let dir = folder();
    let log = filled(dir.path());
    log.remove(&[name(2)]).unwrap();
    let index = lane(dir.path()).join("index.kv");
    forebay(dir.path(), &["fsck", "rebuild", "."]).expect(0);
    let refused = forebay(dir.path(), &["fsck", "rebuild", ".", "--all"]).expect(1).stderr;
    assert!(refused.contains("a process writes this lane"), "{refused}");
    log.abandon();
    drop(log);
    std::fs::write(&index, vec![0; 1 << 20]).unwrap();
    forebay(dir.path(), &["fsck", "check", "."]).expect(3);
    let dry = forebay(dir.path(), &["fsck", "rebuild", ".", "--dry-run", "--json"]).expect(0).json();
    assert_eq!((&dry["lanes"][0]["chunks"], &dry["lanes"][0]["superblock_derived"]), (&19.into(), &true.into()));
    forebay(dir.path(), &["fsck", "check", "."]).expect(3);
    forebay(dir.path(), &["fsck", "rebuild", "."]).expect(0);
    assert!(index.with_extension("kv.bak").exists());
    forebay(dir.path(), &["fsck", "deep", "."]).expect(0);
    let log = open(dir.path());
    assert_eq!(stored(&log), (0..20).filter(|n| *n != 2).collect::<Vec<_>>());
    log.close(std::time::Instant::now() + Duration::from_secs(120)).unwrap();
    drop(log);
    forebay(dir.path(), &["fsck", "check", "."]).expect(0);
    forebay(dir.path(), &["fsck", "rebuild", ".", "--lane", "a/b/lane0"]).expect(1);
}

/// A lane before the others, of which nothing can be made: its files hold nothing of a lane.
fn hopeless_lane(dir: &Path) {
    let hopeless = dir.join("0".repeat(32)).join("s0").join("lane0");
    std::fs::create_dir_all(&hopeless).unwrap();
    for file in ["index.kv", "data.kv"] {
        std::fs::write(hopeless.join(file), vec![0; 1 << 20]).unwrap();
    }
}

#[test]
fn a_lane_that_cannot_be_rebuilt_does_not_keep_others_from_it() {
    let dir = folder();
    close(filled(dir.path()));
    let index = lane(dir.path()).join("index.kv");
    std::fs::write(index, vec![0; 1 << 20]).unwrap();
    hopeless_lane(dir.path());
    let run = forebay(dir.path(), &["fsck", "rebuild", ".", "--json"]).expect(1);
    let json = run.json();
    assert_eq!((&json["lanes"][0]["chunks"], &json["failed"][0]["lane"].as_str().unwrap()[..4]), (&20.into(), "0000"));
    assert_eq!(stored(&open(dir.path())).len(), 20);
}

#[test]
fn a_lane_that_cannot_be_read_does_not_keep_others_from_being_listed_checked_and_removed() {
    let dir = folder();
    close(filled(dir.path()));
    let good = lane(dir.path());
    let namespace = good.ancestors().nth(2).unwrap().file_name().unwrap().to_str().unwrap();
    hopeless_lane(dir.path());
    let index = dir.path().join("0".repeat(32)).join("s0/lane0/index.kv");
    std::fs::remove_file(&index).unwrap();
    std::fs::create_dir(&index).unwrap();
    let rows = forebay(dir.path(), &["ls", ".", "--json"]).expect(3).json();
    assert_eq!(rows.as_array().unwrap().len(), 20);
    for words in ["stat .", "fsck check .", "fsck deep .", "fsck repair . --dry-run"] {
        let run = forebay(dir.path(), &words.split(' ').collect::<Vec<_>>()).expect(3);
        assert!(run.stdout.contains("something else lies where the cache has a file"), "{words}: {}", run.stdout);
        assert!(!run.stdout.contains("fsck rebuild"), "{words}: {}", run.stdout);
    }
    forebay(dir.path(), &["purge", ".", "--namespace", namespace, "--yes"]).expect(0);
    assert!(!good.exists());
}

/// The user that a process without rights over others' files runs as.
const NOBODY: u32 = 65_534;

#[test]
fn what_may_not_be_read_is_not_taken_for_an_empty_cache() {
    let dir = folder();
    close(filled(dir.path()));
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let namespace = lane(dir.path()).parent().unwrap().parent().unwrap().to_owned();
    let is_root = std::fs::metadata("/proc/self").unwrap().uid() == 0;
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["purge", ".", "--all", "--yes"]).current_dir(dir.path());
    if is_root {
        command.uid(NOBODY);
    } else {
        std::fs::set_permissions(&namespace, Permissions::from_mode(0o000)).unwrap();
    }
    let run = command.output();
    std::fs::set_permissions(&namespace, Permissions::from_mode(0o700)).unwrap();
    match run {
        Err(e) if is_root => eprintln!("not tested: another user may not reach the program: {e}"),
        run => {
            let told = String::from_utf8_lossy(&run.unwrap().stderr).into_owned();
            assert!(told.contains("ermission") && told.contains("as the servers' user"), "{told}");
        }
    }
    assert_eq!(stored(&open(dir.path())).len(), 20);
}

/// The cache of format version 1 that the library's tests keep: `PATH length BYTES` and `PATH
/// OFFSET HEX` (tests/format_v3.rs).
fn version_1(dir: &Path) {
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/format-v1/cache.txt");
    for line in std::fs::read_to_string(text).unwrap().lines() {
        let [name, at, what] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let path = dir.join(name);
        if at == "length" {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            File::create(&path).unwrap().set_len(what.parse().unwrap()).unwrap();
        } else {
            let byte = |i| u8::from_str_radix(&what[i..i + 2], 16).unwrap();
            let bytes: Vec<u8> = (0..what.len()).step_by(2).map(byte).collect();
            File::options().write(true).open(path).unwrap().write_all_at(&bytes, at.parse().unwrap()).unwrap();
        }
    }
}

#[test]
fn a_cache_of_version_1_goes_by_the_command_that_the_refusal_names() {
    let dir = folder();
    version_1(dir.path());
    let check = forebay(dir.path(), &["fsck", "check", "."]).expect(3);
    let told = format!("{}{}", check.stdout, check.stderr);
    assert!(told.contains("`forebay purge CACHE_DIR --all`"), "{told}");
    forebay(dir.path(), &["fsck", "rebuild", ".", "--all"]).expect(1);
    let dry = forebay(dir.path(), &["purge", ".", "--all", "--dry-run"]).expect(0).stdout;
    assert!(dry.contains("1 lanes"), "{dry}");
    // Somebody at a terminal is asked; here nobody is.
    forebay(dir.path(), &["purge", ".", "--all"]).expect(2);
    let done = forebay(dir.path(), &["purge", ".", "--all", "--yes", "--json"]).expect(0).json();
    assert_eq!(
        (&done["shards"][0]["lanes_deleted"], &done["shards"][0]["unreadable"]),
        (&1.into(), &serde_json::json!([]))
    );
    let log = open(dir.path());
    store(&log, 4, None);
    assert_eq!(stored(&log), [4]);
}

fn close(log: Arc<Log>) {
    log.close(std::time::Instant::now() + Duration::from_secs(120)).unwrap();
}

/// Overwrites the slots of chunks with bytes that are nobody's: from `from` on within each, as many
/// as `bytes`.
fn damage(dir: &Path, chunks: &[u32], (from, bytes): (u64, usize)) {
    let dump = forebay(dir, &["fsck", "dump", "."]).expect(0).stdout;
    let data = File::options().write(true).open(lane(dir).join("data.kv")).unwrap();
    for n in chunks {
        let key: String = name(*n).0.iter().map(|b| format!("{b:02x}")).collect();
        let line = dump.lines().find(|line| line.contains(&format!("\"key\":\"{key}\""))).unwrap();
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        let at = record["segment"].as_u64().unwrap() * (128 << 10) + record["page"].as_u64().unwrap() * 4096;
        data.write_all_at(&vec![0xa5; bytes], at + from).unwrap();
    }
}

#[test]
fn repair_drops_what_deep_finds_bad_and_it_is_stored_again() {
    let dir = folder();
    let log = filled(dir.path());
    let refused = forebay(dir.path(), &["fsck", "repair", "."]).expect(1).stderr;
    assert!(refused.contains("a process writes this lane") && refused.contains("stop the servers"), "{refused}");
    forebay(dir.path(), &["fsck", "repair", ".", "--dry-run"]).expect(0);
    close(log);
    let lanes = forebay(dir.path(), &["fsck", "check", ".", "--json"]).expect(0).json();
    assert!(lanes["lanes"][0]["sealed"].as_u64() > Some(0) && lanes["lanes"][0]["open"] == 1, "{lanes}");
    // Of sealed segments and of what is in the journal only: payload, and one with its header.
    damage(dir.path(), &[1, 19], (8192, 100));
    damage(dir.path(), &[8], (0, 8192));
    let deep = forebay(dir.path(), &["fsck", "deep", "."]).expect(3).stdout;
    assert!(deep.contains("2 bad") && deep.contains("1 absent") && deep.contains("forebay fsck repair ."), "{deep}");
    let dry = forebay(dir.path(), &["fsck", "repair", ".", "--dry-run", "--json"]).expect(3).json();
    assert_eq!((&dry["dropped_chunks"], &dry["absent"], &dry["clean"]), (&2.into(), &1.into(), &false.into()));
    forebay(dir.path(), &["fsck", "deep", "."]).expect(3);
    let done = forebay(dir.path(), &["fsck", "repair", ".", "--json"]).expect(0).json();
    assert_eq!((&done["dropped_chunks"], &done["dropped_bytes"]), (&2.into(), &(2 * 4096).into()), "{done}");
    assert_eq!((&done["absent"], &done["clean"], &done["slots"]), (&1.into(), &true.into(), &20.into()), "{done}");
    let deep = forebay(dir.path(), &["fsck", "deep", ".", "--json"]).expect(0).json();
    assert_eq!((&deep["slots"], &deep["absent"]), (&17.into(), &0.into()), "{deep}");
    forebay(dir.path(), &["fsck", "check", "."]).expect(0);
    let again = forebay(dir.path(), &["fsck", "repair", "."]).expect(0).stdout;
    assert_eq!(again, "17 slots checked; 0 chunks, 0 bytes dropped\n");
    let log = open(dir.path());
    assert_eq!(stored(&log), (0..20).filter(|n| ![1, 8, 19].contains(n)).collect::<Vec<_>>());
    [1, 8, 19].into_iter().for_each(|n| store(&log, n, None));
    assert_eq!(stored(&log).len(), 20);
    close(log);
    let deep = forebay(dir.path(), &["fsck", "deep", ".", "--json"]).expect(0).json();
    assert_eq!(deep["slots"], 20);
}

#[test]
fn a_lane_that_goes_during_a_deep_check_lists_nothing_and_the_others_keep_what_is_bad() {
    let dir = folder();
    // Two servers, a lane each.
    let logs = [filled(dir.path()), open(dir.path())];
    store(&logs[1], 30, None);
    logs[1].flush().unwrap();
    let files = lanes(dir.path()).unwrap();
    let raw: Vec<RawLane> = files.iter().map(|f| RawLane::read(f).unwrap()).collect();
    for (files, raw) in files.iter().zip(&raw) {
        let data = File::options().write(true).open(files.path().join("data.kv")).unwrap();
        data.write_all_at(&[0xa5; 100], raw.slot_offset(&raw.records[0]) + 8192).unwrap();
    }
    let bad = deep(&files, &raw, 0, &|_| ()).unwrap().bad;
    assert_eq!(bad.iter().map(|b| b.lane).collect::<Vec<_>>(), [0, 1], "{bad:?}");
    // As a server deletes it, while another thread of the check reads.
    let bad = deep(&files, &raw, 0, &|_| drop(std::fs::remove_dir_all(files[0].path()))).unwrap().bad;
    assert_eq!(bad.iter().map(|b| (b.lane, b.key)).collect::<Vec<_>>(), [(1, name(30))], "{bad:?}");
}

#[test]
fn what_was_repaired_stays_gone_when_the_index_is_made_anew_from_the_slots() {
    let dir = folder();
    close(filled(dir.path()));
    // The header is as it was: a rebuild would look at the slot.
    damage(dir.path(), &[3, 4, 5], (8192, 4096));
    forebay(dir.path(), &["fsck", "repair", ".", "-q"]).expect(0);
    std::fs::remove_file(lane(dir.path()).join("index.kv")).unwrap();
    let built = forebay(dir.path(), &["fsck", "rebuild", ".", "--json"]).expect(0).json();
    assert_eq!((&built["lanes"][0]["chunks"], &built["lanes"][0]["left_out"]), (&17.into(), &serde_json::json!([])));
    assert!(!stored(&open(dir.path())).contains(&4));
}

#[test]
fn a_lane_whose_data_is_gone_goes_by_the_command_that_check_names() {
    let dir = folder();
    close(filled(dir.path()));
    let lane = lane(dir.path());
    std::fs::remove_file(lane.join("data.kv")).unwrap();
    let check = forebay(dir.path(), &["fsck", "check", "."]).expect(3).stdout;
    assert!(check.contains("data.kv is gone") && check.contains("remedy: forebay fsck repair .\n"), "{check}");
    let rebuild = forebay(dir.path(), &["fsck", "rebuild", "."]).expect(3).stdout;
    assert!(rebuild.contains("forebay fsck repair ."), "{rebuild}");
    let dry = forebay(dir.path(), &["fsck", "repair", ".", "--dry-run"]).expect(3).stdout;
    assert!(dry.contains("would be removed") && lane.exists(), "{dry}");
    let done = forebay(dir.path(), &["fsck", "repair", "."]).expect(0).stdout;
    assert!(done.contains("lane0: its data.kv is gone; removed"), "{done}");
    assert!(!lane.exists());
    forebay(dir.path(), &["fsck", "check", "."]).expect(0);
    let log = open(dir.path());
    store(&log, 4, None);
    assert_eq!(stored(&log), [4]);
}

#[test]
fn rebuild_names_the_remedy_where_floors_are_damaged_which_it_cannot_help() {
    let dir = folder();
    close(filled(dir.path()));
    let lane = lane(dir.path());
    std::fs::write(lane.with_file_name("FLOORS"), vec![0x5a; 32 << 10]).unwrap();
    let namespace = lane.ancestors().nth(2).unwrap().file_name().unwrap().to_str().unwrap();
    let remedy = format!("remedy: forebay purge . --namespace {namespace}\n");
    let check = forebay(dir.path(), &["fsck", "check", "."]).expect(3).stdout;
    assert!(check.contains(&remedy), "{check}");
    for more in [&[][..], &["--dry-run"], &["--all"]] {
        let rebuild = [&["fsck", "rebuild", "."], more].concat();
        let told = forebay(dir.path(), &rebuild).expect(3).stdout;
        assert!(told.contains(&remedy) && told.contains("FLOORS"), "{told}");
        assert!(!told.contains("no index is damaged") && !told.contains("restored"), "{told}");
        let json = forebay(dir.path(), &[&rebuild[..], &["--json"]].concat()).expect(3).json();
        assert_eq!((&json["clean"], &json["lanes"]), (&false.into(), &serde_json::json!([])), "{json}");
        let unserved = &json["damaged_floors"][0];
        assert!(unserved["lane"].as_str().unwrap().ends_with("/lane0"), "{json}");
        assert!(remedy.contains(unserved["remedy"].as_str().unwrap()), "{json}");
    }
    forebay(dir.path(), &["purge", ".", "--namespace", namespace, "--yes"]).expect(0);
    forebay(dir.path(), &["fsck", "rebuild", "."]).expect(0);
    forebay(dir.path(), &["fsck", "check", "."]).expect(0);
}

#[test]
fn a_damaged_index_is_left_for_rebuild_and_said_so() {
    let dir = folder();
    close(filled(dir.path()));
    std::fs::write(lane(dir.path()).join("index.kv"), vec![0; 1 << 20]).unwrap();
    for arguments in [["fsck", "check", "."], ["fsck", "repair", "."]] {
        let told = forebay(dir.path(), &arguments).expect(3).stdout;
        assert!(told.contains("forebay fsck rebuild ."), "{told}");
    }
    let dump = forebay(dir.path(), &["fsck", "dump", "."]).expect(3);
    assert!(dump.stdout.is_empty() && dump.stderr.contains("forebay fsck check ."), "{}", dump.stderr);
    forebay(dir.path(), &["fsck", "rebuild", "."]).expect(0);
    forebay(dir.path(), &["fsck", "repair", "."]).expect(0);
    assert_eq!(stored(&open(dir.path())).len(), 20);
}

#[test]
fn a_zeroed_budget_is_named_and_written_anew() {
    let dir = folder();
    close(filled(dir.path()));
    let path = dir.path().join("BUDGET");
    let before = std::fs::read(&path).unwrap();
    let capacity = ["stat", ".", "--json"];
    assert!(forebay(dir.path(), &capacity).expect(0).json()["drives"][0]["budget_damage"].is_null());
    std::fs::write(&path, vec![0; 4096]).unwrap();
    for command in [&["fsck", "check", "."][..], &["fsck", "deep", "."], &["stat", "."]] {
        let told = forebay(dir.path(), command).expect(3).stdout;
        assert!(told.contains("BUDGET") && told.contains("remedy: forebay fsck repair ."), "{told}");
    }
    assert!(!forebay(dir.path(), &capacity).expect(3).json()["drives"][0]["budget_damage"].is_null());
    forebay(dir.path(), &["fsck", "repair", ".", "--dry-run"]).expect(3);
    assert!(std::fs::read(&path).unwrap().iter().all(|b| *b == 0));
    let done = forebay(dir.path(), &["fsck", "repair", "."]).expect(0).stdout;
    assert!(done.contains("BUDGET: damaged; written anew"), "{done}");
    // It names the drive as its lanes do.
    assert_eq!(std::fs::read(&path).unwrap()[16..32], before[16..32]);
    forebay(dir.path(), &["fsck", "check", "."]).expect(0);
    forebay(dir.path(), &["stat", "."]).expect(0);
    assert_eq!(stored(&open(dir.path())).len(), 20);
}

#[test]
fn a_budget_that_may_be_somebody_elses_is_left_alone() {
    let dir = folder();
    std::fs::write(dir.path().join("BUDGET"), b"income, expenses").unwrap();
    let refused = forebay(dir.path(), &["fsck", "repair", "."]).expect(1).stderr;
    assert!(refused.contains("remove the BUDGET file"), "{refused}");
    assert_eq!(std::fs::read(dir.path().join("BUDGET")).unwrap(), b"income, expenses");
}

#[test]
fn stat_tells_what_is_reserved_and_what_is_filled() {
    let dir = folder();
    let log = filled(dir.path());
    let json = forebay(dir.path(), &["stat", ".", "--json"]).expect(0).json();
    let drive = &json["drives"][0];
    let lane = &drive["namespaces"][0]["shards"][0]["lanes"][0];
    let of = |value: &serde_json::Value| value.as_u64().unwrap();
    assert!(of(&lane["reserved_bytes"]) > 0 && of(&lane["slot_bytes"]) >= 20 * 4096, "{lane}");
    let parts = of(&lane["slot_bytes"]) + of(&lane["reserved_bytes"]) + of(&lane["index_bytes"]);
    assert_eq!(parts, of(&lane["disk_bytes"]));
    assert_eq!(parts + of(&drive["tables_bytes"]), of(&drive["disk_bytes"]));
    let text = forebay(dir.path(), &["stat", "."]).expect(0).stdout;
    assert!(text.contains("reserved for stores to come"), "{text}");
    drop(log);
}
