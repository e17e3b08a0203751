//! The remote tier and what others change in it: what they have removed is reported and uploaded
//! anew, and a prompt's partial end is among what is uploaded, fetched and removed.
#![expect(clippy::unwrap_used, reason = "tests")]

mod engine_world;
#[path = "remote_world/machine.rs"]
mod machine;
mod remote_world;

use std::sync::Arc;

use engine_world::{CHUNK, Shape, assert_same, load, prompt, slots, store};
use forebay::config::Codec;
use forebay::connector::{PrefixLookup, RanksLookup, WorkerMeta};
use forebay::engine::Engine;
use forebay::geometry::{LayerKind, LayerSpec};
use hyper::Method;
use machine::{Fetched, Machine, N, fetch, later, remote};
use remote_world::Server;

#[test]
fn what_another_process_removed_is_told_also_where_it_was_missing_before_and_is_uploaded_anew() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let (a, b) = (Machine::new(&server), Machine::new(&server));
    let one = a.open();
    let mut lookup = RanksLookup::over(vec![Arc::new(b.open())]);
    assert!(one.take_remote_changes(9).is_empty() && lookup.remote_gone().is_empty(), "from now on");
    let p = prompt(&one, N, 1);
    let first = p.keys()[0];
    let misses = |lookup: &mut RanksLookup, req: &str| {
        while lookup.stored_tokens(req, &p).unwrap().is_none() {
            std::thread::yield_now();
        }
        lookup.remote_gone()
    };
    assert_eq!(misses(&mut lookup, "before"), [first]);
    assert_eq!(misses(&mut lookup, "soon after"), [], "not asked again");
    a.upload(&one, 1);
    let uploaded = |engine: &Engine| {
        let changes = engine.take_remote_changes(9).into_iter();
        changes.map(|(key, is_there)| (key.0, is_there)).collect::<Vec<_>>()
    };
    let report = WorkerMeta { remote: uploaded(&one), ..WorkerMeta::default() };
    assert_eq!(report.remote.len(), 3);
    lookup.reported(&report);
    a.open().clear().unwrap();
    assert_eq!(misses(&mut lookup, "again"), [first]);
    // The process that uploaded it does not believe that it is still there.
    a.upload(&one, 1);
    let changes = uploaded(&one);
    for (key, _) in report.remote {
        let of = changes.iter().filter(|(changed, _)| *changed == key).map(|(_, is_there)| *is_there);
        assert_eq!(of.collect::<Vec<_>>(), [false, true]);
    }
    assert_eq!(server.puts().iter().max(), Some(&2));
}

#[test]
fn a_partial_last_chunk_is_uploaded_and_found_by_the_same_prompt() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let (mut a, mut b) = (Machine::new(&server), Machine::new(&server));
    (a.world.settings.save_unfull_chunk, b.world.settings.save_unfull_chunk) = (true, true);
    let (one, two) = (a.open(), b.open());
    let n = N + CHUNK / 2;
    let (p, kv) = (prompt(&one, n, 1), a.world.kv().like_kv(1));
    assert_eq!(store(&one, &p, &kv, slots(n, 1)).stored, 4);
    assert!(one.wait_uploaded(later()).unwrap());
    assert_eq!(remote(&one).uploaded, 4);
    assert_eq!(fetch(&two, &p), Fetched { chunks: 4, stopped: None });
    let to = b.world.kv();
    assert_eq!(load(&two, &p, &to, slots(n, 2)).tokens, n);
    assert_same("with its end", (&kv, &slots(n, 1)), (&to, &slots(n, 2)));
    assert_eq!(fetch(&two, &p), Fetched { chunks: 0, stopped: None }, "a drive has all of it");
    // A server's partial chunks end with its blocks.
    let mut lookup = RanksLookup::over(vec![Arc::new(b.open())]);
    lookup.ends_at_multiples_of(CHUNK / 4);
    two.log().unwrap().clear().unwrap();
    let longer = prompt(&two, n + CHUNK / 4 - 1, 1);
    let found = loop {
        if let Some(tokens) = lookup.stored_tokens("r", &longer).unwrap() {
            break tokens;
        }
        std::thread::yield_now();
    };
    assert_eq!(found, n);
    // Another end is another chunk, and one that nobody has asked for is not looked for.
    assert_eq!(fetch(&two, &prompt(&two, n - 1, 1)), Fetched { chunks: 0, stopped: Some("absent") });
    b.world.settings.save_unfull_chunk = false;
    let heads = server.requests(&Method::HEAD);
    let without = b.open();
    assert_eq!(fetch(&without, &prompt(&without, n - 1, 1)), Fetched { chunks: 0, stopped: None });
    assert_eq!(server.requests(&Method::HEAD), heads);
    // What is removed is removed with its end.
    let before = objects(root.path());
    one.remove(&p).unwrap();
    assert_eq!(before - objects(root.path()), 4, "three whole chunks and the end");
    two.log().unwrap().clear().unwrap();
    assert_eq!(fetch(&two, &prompt(&two, n, 1)).chunks, 0);
}

/// Files that are objects, below the server's directory.
fn objects(dir: &std::path::Path) -> usize {
    let below = |entry: std::fs::DirEntry| match entry.path() {
        path if path.is_dir() => objects(&path),
        // The server's own.
        path => usize::from(!path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'))),
    };
    std::fs::read_dir(dir).unwrap().map(|entry| below(entry.unwrap())).sum()
}

#[test]
fn a_chunk_of_several_pieces_comes_whole_to_the_drive_and_into_memory() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let shape = Shape { name: "long", specs: vec![LayerSpec::kv(LayerKind::Full, 8, 1024); 10], ..Shape::plain() };
    let mut a = Machine::with(shape.clone(), &server);
    a.world.settings.codec = Codec::None;
    let one = a.open();
    let (p, kv) = a.upload(&one, 1);
    for memory in [false, true] {
        let mut b = Machine::with(shape.clone(), &server);
        (b.world.settings.local_cpu, b.world.settings.max_local_cpu_size) = (memory, 32 << 20);
        b.world.settings.codec = Codec::None;
        let two = b.open();
        assert_eq!(fetch(&two, &p), Fetched { chunks: 3, stopped: None });
        assert!(remote(&two).fetched_bytes > 3 * (2 << 20), "more than is written at once");
        assert_eq!(b.check(&two, &p, &kv), N);
        assert_eq!(two.stats().unwrap().memory.hits, if memory { 3 } else { 0 });
        let log = two.log().unwrap();
        assert!(p.keys().iter().all(|key| log.contains(key)));
        drop((log, two));
        // From the drive, without what memory had.
        b.world.settings.local_cpu = false;
        assert_eq!(b.check(&b.open(), &p, &kv), N);
    }
}
