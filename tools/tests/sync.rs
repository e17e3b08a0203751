//! `forebay sync`, and what other commands say of a remote store: over a real S3 server.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;
#[path = "../../tests/remote_world/mod.rs"]
mod remote_world;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{Run, folder, forebay, forebay_with};
use remote_world::{BUCKET, Server, Spoil};
use serde_json::Value;

const REMOTE: &str = "s3://kv-cache/some/model";

/// A folder with a cache `a`, and a server beside it.
struct World {
    dir: tempfile::TempDir,
    root: tempfile::TempDir,
    server: Server,
}

impl World {
    fn new() -> Self {
        let (dir, root) = (folder(), folder());
        let server = Server::start(root.path());
        let world = Self { dir, root, server };
        for cache in ["a", "b"] {
            std::fs::create_dir(world.dir.path().join(cache)).unwrap();
        }
        world.run("bench --rw store --model tiny --size 4m --bs 64k --keep --directory a --quiet").expect(0);
        world
    }

    fn env(&self) -> Vec<(String, String)> {
        let mut env = self.server.env();
        env.extend([("FOREBAY_MIN_FREE", "0"), ("FOREBAY_CAPACITY", "256MiB")].map(|(k, v)| (k.into(), v.into())));
        env
    }

    fn run(&self, words: &str) -> Run {
        let (words, env) = (words.split_whitespace().collect::<Vec<_>>(), self.env());
        let env: Vec<(&str, &str)> = env.iter().map(|(k, v)| (&**k, &**v)).collect();
        forebay_with(self.dir.path(), &words, &env)
    }

    /// The one shard that `sync` reports.
    fn sync(&self, words: &str, code: i32) -> Value {
        let all = self.run(&format!("sync {words} --remote {REMOTE} --json")).expect(code).json();
        assert_eq!(all["shards"].as_array().unwrap().len(), 1, "{all}");
        all["shards"][0].clone()
    }

    fn chunks(&self, cache: &str) -> BTreeSet<String> {
        let list = self.run(&format!("ls {cache} --json")).expect(0).json();
        let what = |row: &Value| ["key", "tokens", "depth", "tenant", "bytes"].map(|f| row[f].to_string()).join(" ");
        list.as_array().unwrap().iter().map(what).collect()
    }
}

/// The files of all objects.
fn objects(root: &Path) -> Vec<PathBuf> {
    let (mut open, mut found) = (vec![root.join(BUCKET)], Vec::new());
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { open.push(path) } else { found.push(path) }
        }
    }
    found
}

fn counts(report: &Value) -> [u64; 4] {
    ["chunks", "present", "moved", "left"].map(|field| report[field].as_u64().unwrap())
}

#[test]
fn a_cache_goes_to_the_store_and_from_there_to_another_drive_each_chunk_once() {
    let w = World::new();
    let chunks = w.chunks("a");
    let n = chunks.len() as u64;
    assert!(n > 20, "{n}");
    let up = w.sync("up a --limit 600k", 0);
    let [all, present, first, left] = counts(&up);
    assert!(all == n && present == 0 && first > 0 && first + left == n, "{up}");
    assert!(up["moved_bytes"].as_u64().unwrap() <= 600 << 10, "{up}");
    // The next run goes on behind what the store has.
    let [_, present, second, _] = counts(&w.sync("up a --limit 600k", 0));
    assert!(present == first && second > 0, "{present} {second}");
    assert_eq!(counts(&w.sync("up a", 0)), [n, first + second, n - first - second, 0]);
    assert_eq!(counts(&w.sync("up a", 0)), [n, n, 0, 0]);
    assert!(w.server.puts().iter().all(|puts| *puts == 1), "{:?}", w.server.puts());

    let part = w.sync("down b --limit 600k", 0);
    let [all, present, first, left] = counts(&part);
    assert!(all == n && present == 0 && first > 0 && first + left == n, "{part}");
    assert_eq!(counts(&w.sync("down b", 0)), [n, first, n - first, 0]);
    assert_eq!(counts(&w.sync("down b", 0)), [n, n, 0, 0]);
    assert_eq!(w.chunks("b"), chunks);
    w.run("fsck deep b").expect(0);

    // The commands that look know the store.
    let stat = w.run(&format!("stat b --remote {REMOTE} --json")).expect(0).json();
    assert_eq!(stat["remote"]["shards"][0]["chunks"], n);
    assert_eq!(stat["remote"]["shards"][0]["model"], "tiny");
    w.run("purge b --all --yes").expect(0);
    let rows = w.run(&format!("ls b --remote {REMOTE} --json")).expect(0).json();
    assert!(rows.as_array().unwrap().iter().all(|row| row["tier"] == "remote"), "{rows}");
    assert_eq!(rows.as_array().unwrap().len() as u64, n);
    let rows = w.run(&format!("ls a --remote {REMOTE}")).expect(0).stdout;
    assert_eq!(rows.matches("drive, remote").count() as u64, n, "{rows}");
}

#[test]
fn a_folder_that_nobody_has_described_is_passed_over() {
    let w = World::new();
    let n = w.chunks("a").len() as u64;
    assert_eq!(counts(&w.sync("up a", 0)), [n, 0, n, 0]);
    let like_ours = format!("{:032x}", 7);
    for other in ["another", &like_ours] {
        let other = w.root.path().join(BUCKET).join("some/model").join(other).join("program");
        std::fs::create_dir_all(&other).unwrap();
        std::fs::write(other.join("file"), "not ours").unwrap();
    }
    let down = w.run(&format!("sync down b --remote {REMOTE} --json")).expect(0);
    assert!(down.stderr.contains(&format!("passed over {like_ours}/program")), "{}", down.stderr);
    assert_eq!(counts(&down.json()["shards"][0]), [n, 0, n, 0]);
}

#[test]
fn a_description_that_was_deleted_comes_back_with_the_next_sync_up() {
    let w = World::new();
    let n = w.chunks("a").len() as u64;
    w.sync("up a", 0);
    let description = |w: &World| objects(w.root.path()).into_iter().find(|path| path.extension().is_some());
    std::fs::remove_file(description(&w).unwrap()).unwrap();
    let down = w.run(&format!("sync down b --remote {REMOTE}")).expect(3);
    assert!(down.stderr.contains("and so does `forebay sync up`"), "{}", down.stderr);
    assert_eq!(counts(&w.sync("up a", 0)), [n, n, 0, 0]);
    assert_eq!(counts(&w.sync("down b", 0)), [n, 0, n, 0]);
}

#[test]
fn a_shard_whose_description_is_lost_does_not_keep_the_others_back() {
    let w = World::new();
    w.run("bench --rw store --model tiny --layout opaque --size 2m --bs 64k --keep --directory a --quiet").expect(0);
    let namespaces = w.run("ls a --namespaces --json").expect(0).json();
    assert_eq!(namespaces.as_array().unwrap().len(), 2, "{namespaces}");
    let (lost, kept) = (&namespaces[0], &namespaces[1]);
    let place = ["namespace", "shard"].map(|field| lost[field].as_str().unwrap().to_owned()).join("/");
    std::fs::remove_file(w.dir.path().join("a").join(&place).join("geometry.json")).unwrap();
    let up = w.run(&format!("sync up a --remote {REMOTE} --json")).expect(3);
    assert!(up.stderr.contains(&format!("passed over {place}")), "{}", up.stderr);
    let shards = up.json()["shards"].clone();
    assert_eq!((shards.as_array().unwrap().len(), &shards[0]["moved"]), (1, &kept["chunks"]), "{shards}");
}

#[test]
fn a_drive_that_is_gone_does_not_keep_the_others_back() {
    let w = World::new();
    let chunks = w.chunks("a").len();
    std::fs::remove_dir(w.dir.path().join("b")).unwrap();
    let up = w.run(&format!("sync up b a --remote {REMOTE} --json")).expect(3);
    assert!(up.stderr.contains("passed over"), "{}", up.stderr);
    assert_eq!(up.json()["shards"][0]["moved"], chunks);
    w.run(&format!("sync up b --remote {REMOTE}")).expect(1);
}

#[test]
fn a_shard_that_fails_does_not_keep_the_others_back_and_is_told() {
    let w = World::new();
    w.run("bench --rw store --model tiny --layout opaque --size 2m --bs 64k --keep --directory a --quiet").expect(0);
    w.run(&format!("sync up a --remote {REMOTE}")).expect(0);
    let namespaces = w.run("ls a --namespaces --json").expect(0).json();
    let place = ["namespace", "shard"].map(|f| namespaces[0][f].as_str().unwrap().to_owned());
    std::fs::create_dir(w.dir.path().join("b").join(&place[0])).unwrap();
    std::fs::write(w.dir.path().join("b").join(place.join("/")), "in the way").unwrap();
    let down = w.run(&format!("sync down b --remote {REMOTE} --json")).expect(2);
    let shards = down.json()["shards"].clone();
    let says = shards[0]["error"].as_str().unwrap();
    assert!(says.ends_with("remove it") && down.stderr.contains(says), "{}", down.stderr);
    let [failed, other] = [0, 1].map(|n| ["left", "moved"].map(|field| shards[n][field] == shards[n]["chunks"]));
    assert!(failed == [true, false] && other == [false, true] && shards[1]["error"].is_null(), "{shards}");
}

/// Two models of 12 MB in the store, in the order of their namespaces.
fn two_models(w: &World) -> [String; 2] {
    for block in [8, 16] {
        let layout = format!("--layout opaque --block-size {block}");
        let store = format!("bench --rw store --model tiny {layout} --size 12m --bs 64k --keep --directory a --quiet");
        w.run(&store).expect(0);
    }
    let namespaces = w.run("ls a --namespaces --json").expect(0).json();
    let of_size = |ns: &&Value| ns["chunks"].as_u64() > Some(700);
    let name = |ns: &Value| ns["namespace"].as_str().unwrap().to_owned();
    let mut large: Vec<String> = namespaces.as_array().unwrap().iter().filter(of_size).map(name).collect();
    large.sort_unstable();
    large.iter().for_each(|ns| drop(w.sync(&format!("up a --namespace {ns}"), 0)));
    large.try_into().unwrap()
}

/// What `sync down` reports with another capacity.
fn down_with(w: &World, capacity: &str, more: &[&str]) -> Value {
    let mut env = w.env();
    env.push(("FOREBAY_CAPACITY".into(), capacity.into()));
    let env: Vec<(&str, &str)> = env.iter().map(|(k, v)| (&**k, &**v)).collect();
    let words = [&["sync", "down", "b", "--remote", REMOTE, "--json"][..], more].concat();
    forebay_with(w.dir.path(), &words, &env).expect(0).json()
}

#[test]
fn what_a_drive_has_takes_no_share_of_the_room() {
    let w = World::new();
    let [absent, present] = two_models(&w);
    // Room for both, but not for what is there twice.
    let first = down_with(&w, "46MiB", &["--namespace", &present]);
    assert_eq!(first["shards"][0]["left"], 0, "{first}");
    let both = down_with(&w, "46MiB", &[]);
    let left: Vec<_> = both["shards"].as_array().unwrap().iter().map(|s| (&s["namespace"], &s["left"])).collect();
    assert!(left.len() == 2 && left.iter().all(|(_, left)| **left == 0), "{absent}: {both}");
}

#[test]
fn models_share_the_room_of_a_drive_and_what_has_come_stays() {
    let w = World::new();
    two_models(&w);
    let down = down_with(&w, "24MiB", &[]);
    let moved: Vec<u64> = down["shards"].as_array().unwrap().iter().map(|s| s["moved"].as_u64().unwrap()).collect();
    let there = w.run("ls b --namespaces --json").expect(0).json();
    let there: Vec<u64> = there.as_array().unwrap().iter().map(|ns| ns["chunks"].as_u64().unwrap()).collect();
    assert!(there == moved && moved.len() == 2 && moved.iter().all(|n| *n > 100), "{there:?}: {down}");
    let why = down["shards"][0]["no_room"].as_str().unwrap();
    assert!(why.starts_with("no room: ") && why.contains("left of the capacity"), "{down}");
}

/// Segments of 64 MiB, of a larger capacity, do not fit 16 MiB.
#[test]
fn a_cache_that_takes_nothing_is_a_problem_and_says_what_to_do() {
    let w = World::new();
    w.run("bench --rw store --model tiny --layout opaque --size 2m --bs 64k --keep --directory a --quiet").expect(0);
    w.run(&format!("sync up a --remote {REMOTE}")).expect(0);
    down_with(&w, "4GiB", &["--limit", "1"]);
    let mut env = w.env();
    env.push(("FOREBAY_CAPACITY".into(), "16MiB".into()));
    let env: Vec<(&str, &str)> = env.iter().map(|(k, v)| (&**k, &**v)).collect();
    let words = ["sync", "down", "b", "--remote", REMOTE, "--json"];
    let down = forebay_with(w.dir.path(), &words, &env).expect(3);
    assert!(down.stderr.contains("made for a larger capacity"), "{}", down.stderr);
    let shard = &down.json()["shards"][0];
    assert_eq!((&shard["failed"]["no_space"], &shard["moved"]), (&shard["chunks"], &Value::from(0)), "{shard}");
}

#[test]
fn the_time_out_of_requests_can_be_set_as_errors_advise() {
    let w = World::new();
    w.server.spoil(|_, _| Spoil::Stall);
    let mut env = w.env();
    env.push(("FOREBAY_REMOTE_TIMEOUT_MS".into(), "100".into()));
    let env: Vec<(&str, &str)> = env.iter().map(|(k, v)| (&**k, &**v)).collect();
    let stat = forebay_with(w.dir.path(), &["stat", "a", "--remote", REMOTE], &env).expect(1).stderr;
    assert!(stat.contains("within 100ms") && stat.contains("raise remote_timeout_ms"), "{stat}");
}

#[test]
fn a_store_that_fails_keeps_no_shard_on_the_drives() {
    let w = World::new();
    w.run("bench --rw store --model tiny --layout opaque --size 2m --bs 64k --keep --directory a --quiet").expect(0);
    w.run(&format!("sync up a --remote {REMOTE}")).expect(0);
    w.server.spoil(|_, _| Spoil::Status(500));
    let purge = w.run(&format!("purge a --all --yes --remote {REMOTE} --json")).expect(1);
    assert!(purge.stderr.contains("has not deleted everything"), "{}", purge.stderr);
    let shards = purge.json()["shards"].clone();
    let failed = shards.as_array().unwrap().iter().filter(|shard| shard["error"].is_string()).count();
    assert_eq!((failed, w.chunks("a").len()), (2, 0), "{shards}");
    // As the error advises: what only the store still has goes with the next one.
    w.run(&format!("purge a --all --yes --remote {REMOTE}")).expect(1);
    let stored = || {
        let stat = w.run(&format!("stat a --remote {REMOTE} --json")).expect(0).json();
        stat["remote"]["shards"].as_array().unwrap().iter().map(|shard| shard["chunks"].as_u64().unwrap()).sum::<u64>()
    };
    w.server.spoil(|_, _| Spoil::No);
    assert!(stored() > 0);
    w.run(&format!("purge a --all --yes --remote {REMOTE}")).expect(0);
    assert_eq!(stored(), 0);
}

#[test]
fn damage_is_not_moved_either_way_and_is_told() {
    let w = World::new();
    let n = w.chunks("a").len() as u64;
    w.sync("up a", 0);
    let objects = objects(w.root.path());
    let object = objects.iter().find(|path| path.extension().is_none()).unwrap();
    let mut bytes = std::fs::read(object).unwrap();
    let last = bytes.len() - 1;
    let middle = last / 2;
    bytes[middle] ^= 1;
    std::fs::write(object, bytes).unwrap();
    let down = w.sync("down b", 3);
    assert_eq!((counts(&down), &down["failed"]), ([n, 0, n - 1, 0], &serde_json::json!({"corrupt": 1})));
    w.run("fsck deep b").expect(0);
    let run = forebay(w.dir.path(), &["sync", "up", "a"]).expect(2);
    assert!(run.stderr.contains("no remote store is named"), "{}", run.stderr);
    let run = w.run("sync up a --config none.yaml").expect(1);
    assert!(run.stderr.contains("correct the path in config_file"), "{}", run.stderr);
    for words in ["sync up a", "ls a"] {
        let run = w.run(&format!("{words} --remote bogus://x")).expect(2);
        assert!(run.stderr.contains("remote_url (set in the option --remote)"), "{}", run.stderr);
    }
    let run = w.run(&format!("sync up a --remote {REMOTE} --namespace other")).expect(1);
    assert!(run.stderr.contains("there is no such namespace"), "{}", run.stderr);
}

#[test]
fn an_interrupted_sync_says_what_it_has_done_and_goes_on_from_there() {
    let w = World::new();
    let n = w.chunks("a").len() as u64;
    let asked = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&asked);
    // The first few objects come through, then the store hangs.
    w.server.spoil(move |method, _| {
        if method == hyper::Method::PUT && seen.fetch_add(1, Ordering::SeqCst) >= 5 { Spoil::Stall } else { Spoil::No }
    });
    let child = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["sync", "up", "a", "--remote", REMOTE, "--json"])
        .current_dir(w.dir.path())
        .envs(w.env())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    while asked.load(Ordering::SeqCst) < 6 {
        std::thread::yield_now();
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["interrupted"], true, "{report}");
    let moved = report["shards"][0]["moved"].as_u64().unwrap();
    assert!(moved <= 5 && report["shards"][0]["left"] == n - moved, "{report}");
    w.server.spoil(|_, _| Spoil::No);
    let [all, present, rest, left] = counts(&w.sync("up a", 0));
    assert!(all == n && present + rest == n && present >= moved && left == 0);
    assert!(w.server.puts().iter().all(|puts| *puts == 1), "{:?}", w.server.puts());
}

#[test]
fn a_directory_that_is_not_there_is_no_empty_store() {
    let w = World::new();
    let url = format!("file://{}/away", w.root.path().display());
    for words in ["ls a", "stat a", "sync up a", "sync down b", "purge a --all --yes"] {
        let told = w.run(&format!("{words} --remote {url}")).expect(1).stderr;
        assert!(told.contains("away is no directory") && told.contains("or correct remote_url"), "{words}: {told}");
    }
    assert!(!w.chunks("a").is_empty());
    let (level, found, _) = probed(w.dir.path(), &url, &w.env());
    assert!(level == "warn" && found.contains("away is no directory"), "{level}: {found}");
}

/// Level and remedy of what `probe` finds about the remote store.
fn probed(dir: &Path, url: &str, env: &[(String, String)]) -> (String, String, Value) {
    let env: Vec<(&str, &str)> = env.iter().map(|(k, v)| (&**k, &**v)).collect();
    let json = forebay_with(dir, &["probe", ".", "--remote", url, "--json"], &env).json();
    let finding = json["findings"].as_array().unwrap().iter().find(|f| f["check"] == "remote").unwrap().clone();
    let text = |field: &str| finding[field].as_str().unwrap_or_default().to_owned();
    (text("level"), format!("{} {}", text("found"), text("remedy")), json["remote"].clone())
}

#[test]
fn a_probe_tries_the_store_and_has_a_remedy_for_each_fault() {
    let (dir, root) = (folder(), folder());
    let server = Server::start(root.path());
    let mut env = server.env();
    env.push(("FOREBAY_REMOTE_TIMEOUT_MS".into(), "60000".into()));
    let (level, found, remote) = probed(dir.path(), REMOTE, &env);
    assert_eq!(level, "ok", "{found}");
    for field in ["round_trip_s", "put_bytes_per_s", "get_bytes_per_s"] {
        assert!(remote[field].as_f64().unwrap() > 0.0, "{remote}");
    }
    assert!(objects(root.path()).is_empty(), "nothing is left behind");
    let with = |name: &str, value: &str| {
        let mut env = env.clone();
        env.push((name.into(), value.into()));
        env
    };
    let closed = format!("http://{}", std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
    let cases = [
        (REMOTE, with("AWS_SECRET_ACCESS_KEY", "wrong"), "warn", "give these credentials the right"),
        (REMOTE, with("AWS_ENDPOINT_URL", &closed), "warn", "check the host's name, the port and the network"),
        (REMOTE, with("AWS_ALLOW_HTTP", "false"), "warn", "AWS_ALLOW_HTTP=true"),
        ("file:///", with("FOREBAY_MODE", "ro"), "ok", "nothing was put"),
    ];
    for (url, env, wanted, remedy) in cases {
        let (level, found, _) = probed(dir.path(), url, &env);
        assert!(level == wanted && found.contains(remedy), "{url}: {level}: {found}");
    }
    // The server makes a bucket that is not there; others answer 404.
    for (spoil, remedy) in [
        (Spoil::Status(404), "make the bucket, or correct remote_url"),
        (Spoil::Status(401), "check the credentials in the environment"),
        (Spoil::Status(500), "look at the store's own log"),
        (Spoil::Stall, "did not answer"),
    ] {
        server.spoil(move |_, _| spoil);
        let env = if spoil == Spoil::Stall { with("FOREBAY_REMOTE_TIMEOUT_MS", "2000") } else { env.clone() };
        let (level, found, _) = probed(dir.path(), REMOTE, &env);
        assert!(level == "warn" && found.contains(remedy), "{spoil:?}: {level}: {found}");
    }
    server.spoil(|method, _| if *method == hyper::Method::GET { Spoil::WrongByte } else { Spoil::No });
    let (level, found, _) = probed(dir.path(), REMOTE, &env);
    assert!(level == "warn", "{found}");
    server.let_go();
    server.spoil(|method, _| if *method == hyper::Method::PUT { Spoil::Unheard } else { Spoil::No });
    let (level, found, _) = probed(dir.path(), REMOTE, &env);
    assert!(level == "warn", "{found}");
    assert!(objects(root.path()).is_empty(), "it was put, and the answer lost");
}
