//! The remote tier over a real S3 server: what one cache has stored another one finds, each object
//! is uploaded once, what is removed does not come back, and no fault of the store or of the
//! network gives a wrong byte or holds anybody up.
#![expect(clippy::unwrap_used, reason = "tests")]

mod engine_world;
#[path = "remote_world/machine.rs"]
mod machine;
mod remote_world;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use engine_world::{CHUNK, Shape, TestClock, World, assert_same, load, matched, prompt, slots, store, tokens};
use forebay::config::{Capacity, Codec, DriveSettings};
use forebay::connector::{PrefixLookup, RanksLookup};
use forebay::device::PagedKv;
use forebay::engine::{Engine, Prompt, StoreRequest};
use forebay::format::layout::{SlotCodec, SlotLayout};
use forebay::geometry::{LayerKind, LayerSpec};
use forebay::io::Fault;
use forebay::key::Extra;
use forebay::paged::{KvLayout, KvShape, Packing, PagedLayout};
use forebay::remote::{Remote, RemoteObject, RemoteOptions, RemoteStore};
use hyper::Method;
use machine::{Fetched, Machine, N, fetch, later, remote, wait};
use remote_world::{BUCKET, Server, Spoil};

#[test]
fn what_one_cache_stores_another_finds_and_each_object_is_uploaded_once() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    for shape in Shape::all() {
        let (a, b) = (Machine::with(shape.clone(), &server), Machine::with(shape.clone(), &server));
        let one = a.open();
        let (p, kv) = a.upload(&one, 1);
        let stats = remote(&one);
        assert_eq!((stats.uploaded, stats.present, stats.queued, stats.failing), (3, 0, 0, false), "{}", shape.name);
        let layout = SlotLayout::of_coded_chunk(&shape.geometry(), CHUNK as u32, SlotCodec::Exp4);
        let object = layout.slot_bytes - u64::from(layout.header_offset);
        assert_eq!(stats.uploaded_bytes, 3 * object, "{}", shape.name);
        drop(one);
        // After a restart, and from a second process, nothing is uploaded again.
        let (one, other) = (a.open(), a.open());
        for engine in [&one, &other] {
            engine.log().unwrap().remove(p.keys()).unwrap();
            assert_eq!(store(engine, &p, &kv, slots(N, 1)).stored, 3, "{}", shape.name);
            assert!(engine.wait_uploaded(later()).unwrap());
            assert_eq!((remote(engine).uploaded, remote(engine).present), (0, 3), "{}", shape.name);
        }
        let two = b.open();
        assert_eq!(matched(&two, &p), 0);
        let got = fetch(&two, &p);
        assert_eq!((got.chunks, got.stopped), (3, None), "{}", shape.name);
        assert_eq!(matched(&two, &p), N, "{}", shape.name);
        assert_eq!(b.check(&two, &p, &kv), N);
        assert_eq!(remote(&two).uploaded, 0, "what comes from there is not sent back");
        assert_eq!(fetch(&two, &p), Fetched { chunks: 0, stopped: None }, "nothing is missing any more");
    }
    assert!(server.puts().iter().all(|n| *n == 1), "an object was sent twice: {:?}", server.puts());
}

#[test]
fn a_prompt_that_is_fetched_stays_on_one_drive() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let (a, mut b) = (Machine::new(&server), Machine::new(&server));
    let one = a.open();
    let prompts: Vec<_> = (1..5).map(|n| a.upload(&one, n).0).collect();
    let other = tempfile::tempdir().unwrap();
    b.world.settings.drives = [b.world.dir.path(), other.path()].map(DriveSettings::new).to_vec();
    let two = b.open();
    for p in &prompts {
        assert_eq!(fetch(&two, p), Fetched { chunks: 3, stopped: None });
        let drives: std::collections::BTreeSet<usize> =
            p.keys().iter().map(|key| two.log().unwrap().peek(key).unwrap().drive).collect();
        assert_eq!(drives.len(), 1, "one dead drive costs its share of the prompts");
    }
}

#[test]
fn a_store_without_conditional_puts_gets_each_chunk_too() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    server.spoil(|_, _| Spoil::NoConditions);
    let (a, b) = (Machine::new(&server), Machine::new(&server));
    let (one, two) = (a.open(), b.open());
    let (p, kv) = a.upload(&one, 1);
    assert_eq!((remote(&one).uploaded, remote(&one).failing), (3, false));
    assert_eq!(fetch(&two, &p), Fetched { chunks: 3, stopped: None });
    assert_eq!(b.check(&two, &p, &kv), N);
    let puts = server.requests(&Method::PUT);
    a.upload(&one, 2);
    assert_eq!(server.requests(&Method::PUT), puts + 3, "it is not asked again");
}

#[test]
fn a_tenant_at_its_quota_gives_up_its_own_for_a_prompt_and_does_not_end_a_restore() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    // Chunks of half a MiB: two prompts of twenty do not fit into the least quota.
    const CHUNKS: usize = 20;
    let machine = || Machine::with(Shape::all().into_iter().find(|shape| shape.name == "large").unwrap(), &server);
    let (a, mut b, mut c) = (machine(), machine(), machine());
    b.world.settings.tenant_quota = Some(Capacity::Bytes(16 << 20));
    c.world.settings.tenant_quota = Some(Capacity::Bytes(16 << 20));
    let (one, two, three) = (a.open(), b.open(), c.open());
    let (of_nobody, _) = a.upload(&one, 1);
    let (extra, n, kv) = (Extra::salted("acme"), CHUNKS * CHUNK, a.world.kv().filled(1));
    let salted = |engine: &Engine, seed| engine.prompt(&tokens(n, seed), &extra);
    for seed in [2, 3] {
        assert_eq!(store(&one, &salted(&one, seed), &kv, slots(n, 1)).stored, CHUNKS);
    }
    assert!(one.wait_uploaded(later()).unwrap());
    assert_eq!(store(&two, &salted(&two, 4), &kv, slots(n, 1)).stored, CHUNKS);
    assert!(two.wait_uploaded(later()).unwrap());
    assert_eq!(fetch(&two, &salted(&two, 2)), Fetched { chunks: CHUNKS, stopped: None });

    let options = RemoteOptions { env: server.env(), ..RemoteOptions::of_settings(&a.world.settings).unwrap() };
    let store = RemoteStore::open(&options).unwrap();
    let (namespace, shard) = store.shards().unwrap().pop().unwrap();
    let objects = store.objects(&namespace, &shard).unwrap();
    let into = Remote::open(&options, three.geometry()).unwrap();
    let brought = wait(&into.restore(three.log().unwrap(), objects, u64::MAX, later()));
    assert_eq!((brought.stopped, matched(&three, &of_nobody)), (None, N));
    let of_acme = brought.chunks - N / CHUNK;
    // What the maintenance thread gives up meanwhile, to keep a part free, makes room for others.
    assert!((CHUNKS..2 * CHUNKS).contains(&of_acme), "{of_acme} chunks of half a MiB, of 16 MiB");
    assert_eq!(into.stats().missed("quota"), (3 * CHUNKS - of_acme) as u64);
}

#[test]
fn what_lies_there_is_described_and_can_be_brought_without_its_prompts() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    for shape in Shape::all() {
        let (a, b) = (Machine::with(shape.clone(), &server), Machine::with(shape.clone(), &server));
        let (one, two) = (a.open(), b.open());
        let (p, kv) = a.upload(&one, 1);
        let options = RemoteOptions { env: server.env(), ..RemoteOptions::of_settings(&a.world.settings).unwrap() };
        let store = RemoteStore::open(&options).unwrap();
        let (namespace, shard) = store.shards().unwrap().pop().unwrap();
        assert_eq!(store.geometry(&namespace, &shard).unwrap(), *one.geometry(), "{}", shape.name);
        let objects = store.objects(&namespace, &shard).unwrap();
        assert_eq!(objects.len(), 3);
        let heads = server.requests(&Method::HEAD);
        // Room for two chunks gives the first two of the prompt.
        let into = Remote::open(&options, one.geometry()).unwrap();
        let empty = vec![RemoteObject { bytes: 0, ..objects[0] }];
        let gets = server.requests(&Method::GET);
        assert_eq!(wait(&into.restore(two.log().unwrap(), empty, u64::MAX, later())).chunks, 0);
        assert_eq!(server.requests(&Method::GET), gets, "its length says that it is damaged");
        let two_of_three = objects[0].bytes * 5 / 2;
        let brought = wait(&into.restore(two.log().unwrap(), objects.clone(), two_of_three, later()));
        assert_eq!(brought, Fetched { chunks: 2, stopped: None });
        assert_eq!(matched(&two, &p), 2 * CHUNK, "{}", shape.name);
        let brought = wait(&into.restore(two.log().unwrap(), objects.clone(), u64::MAX, later()));
        assert_eq!(brought, Fetched { chunks: 1, stopped: None });
        assert_eq!(b.check(&two, &p, &kv), N, "{}", shape.name);
        assert_eq!(server.requests(&Method::HEAD), heads, "a list says what is there");
        one.clear().unwrap();
        assert_eq!(store.objects(&namespace, &shard).unwrap(), []);
        assert!(store.geometry(&namespace, &shard).is_ok(), "what chunks are is no chunk");
    }
}

#[test]
fn a_fetch_fills_memory_too_and_ends_at_the_first_chunk_that_is_not_there() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let (a, mut b) = (Machine::new(&server), Machine::new(&server));
    b.world.settings.local_cpu = true;
    b.world.settings.max_local_cpu_size = 8 << 20;
    let (one, two) = (a.open(), b.open());
    let (p, kv) = a.upload(&one, 1);
    let longer = engine_world::prompt(&two, N + 2 * CHUNK, 1);
    assert_eq!(longer.keys()[..3], *p.keys());
    let got = fetch(&two, &longer);
    assert_eq!((got.chunks, got.stopped), (3, Some("absent")));
    let before = two.stats().unwrap().read_bytes;
    assert_eq!(b.check(&two, &p, &kv), N);
    let stats = two.stats().unwrap();
    assert_eq!((stats.memory.hits, stats.memory.damaged, stats.read_bytes), (3, 0, before));
    // What is not there is not asked for again at once.
    let heads = server.requests(&Method::HEAD);
    assert_eq!(fetch(&two, &longer).stopped, Some("absent"));
    assert_eq!(server.requests(&Method::HEAD), heads);
    assert_eq!(remote(&two).missed("absent"), 2);
}

#[test]
fn a_chunk_begins_to_come_when_a_part_of_the_one_before_is_written() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    // Chunks of 16 MiB come in two parts.
    let shape = Shape { specs: vec![LayerSpec::kv(LayerKind::Full, 128, 1024); 4], ..Shape::plain() };
    let large = |mut machine: Machine| {
        let s = &mut machine.world.settings;
        (s.codec, s.capacity, s.remote_timeout_ms) = (Codec::None, Capacity::Bytes(256 << 20), 60_000);
        (s.staging, s.store_staging) = (32 << 20, 32 << 20);
        // Half of it is for fetches: one chunk, and not quite a second one.
        s.remote_staging = 52 << 20;
        machine
    };
    let (a, b) = (large(Machine::with(shape.clone(), &server)), large(Machine::with(shape, &server)));
    let (one, two) = (a.open(), b.open());
    let p = prompt(&one, 2 * CHUNK, 1);
    let dims = KvShape { layout: KvLayout::Nhd, packing: Packing::Split, block_tokens: CHUNK as u32, num_blocks: 2 };
    let (kv, _) = PagedKv::alloc_zeroed(PagedLayout::per_layer(&a.world.shape.specs, dims).unwrap()).unwrap();
    let stored = one.store(StoreRequest::new(&p, &kv, (0..2 * CHUNK as i64).collect::<Vec<_>>())).unwrap();
    stored.all_layers();
    assert_eq!(stored.wait().stored, 2);
    assert!(one.wait_uploaded(later()).unwrap());
    let reads = AtomicU64::new(0);
    server.spoil(move |method, _| match method {
        &Method::GET if reads.fetch_add(1, Ordering::Relaxed) == 1 => Spoil::Stall,
        _ => Spoil::No,
    });
    let coming = two.fetch(&p, later()).unwrap();
    let begun = Instant::now();
    while server.requests(&Method::GET) < 4 {
        assert!(begun.elapsed() < Duration::from_secs(20), "the second chunk waits for the whole of the first one");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(coming.chunks(), 0, "a part of the first one does not come");
}

#[test]
fn what_is_removed_does_not_come_back() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let a = Machine::new(&server);
    let engine = a.open();
    let salted = |salt: &str| {
        let extra = Extra { cache_salt: Some(salt.into()), ..Extra::default() };
        engine.prompt(&tokens(N, 5), &extra)
    };
    for what in ["remove", "tenant", "clear"] {
        let (p, other) = (salted("t"), salted("other"));
        let kv = a.world.kv().filled(1);
        for p in [&p, &other] {
            assert_eq!(store(&engine, p, &kv, slots(N, 1)).stored, 3, "{what}");
        }
        assert!(engine.wait_uploaded(later()).unwrap());
        match what {
            "remove" => drop(engine.remove(&p).unwrap()),
            "tenant" => drop(engine.remove_tenant("t").unwrap()),
            _ => engine.clear().unwrap(),
        }
        let elsewhere = Machine::new(&server);
        for engine in [&engine, &elsewhere.open()] {
            assert_eq!(fetch(engine, &p).chunks, 0, "{what}");
            assert_eq!(matched(engine, &p), 0, "{what}");
        }
        let left = if what == "clear" { 0 } else { 3 };
        assert_eq!(fetch(&elsewhere.open(), &other).chunks, left, "{what}");
        engine.clear().unwrap();
    }
    // A removal that does not reach the store says so, and is complete once it is run again.
    let (p, _) = a.upload(&engine, 9);
    server.spoil(|method, _| if *method == Method::POST { Spoil::Status(500) } else { Spoil::No });
    let e = engine.remove(&p).unwrap_err();
    assert!(e.to_string().contains("the remote store has not deleted everything (io)"), "{e}");
    assert_eq!(matched(&engine, &p), 0);
    server.spoil(|_, _| Spoil::No);
    engine.remove(&p).unwrap();
    assert_eq!(fetch(&engine, &p).chunks, 0);
}

#[test]
fn a_drive_that_fails_does_not_keep_the_store_from_deleting() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    for what in ["remove", "tenant", "clear"] {
        let a = Machine::new(&server);
        let engine = a.open();
        let extra = Extra { cache_salt: Some(what.into()), ..Extra::default() };
        let p = engine.prompt(&tokens(N, 5), &extra);
        assert_eq!(store(&engine, &p, &a.world.kv().filled(1), slots(N, 1)).stored, 3, "{what}");
        assert!(engine.wait_uploaded(later()).unwrap());
        let there = a.world.dir.path().join(engine.geometry().fingerprint().dir_name());
        std::fs::rename(there, a.world.dir.path().join("gone")).unwrap();
        let outcome = match what {
            "remove" => engine.remove(&p).map(drop),
            "tenant" => engine.remove_tenant(what).map(drop),
            _ => engine.clear(),
        };
        assert_eq!(outcome.unwrap_err().kind(), forebay::ErrorKind::NotFound, "{what}");
        assert_eq!(fetch(&Machine::new(&server).open(), &p).chunks, 0, "{what}");
    }
}

#[test]
fn an_expired_chunk_and_one_of_another_namespace_are_not_served() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let (a, mut b) = (Machine::new(&server), Machine::new(&server));
    let clock = TestClock::new();
    b.world.clock = Some(Arc::clone(&clock) as _);
    let (one, two) = (a.open(), b.open());
    let (p, kv) = (prompt(&one, N, 1), a.world.kv().filled(1));
    let mut request = StoreRequest::new(&p, &kv.kv, slots(N, 1));
    request.ttl = Some(Duration::from_secs(60));
    let stored = one.store(request).unwrap();
    stored.all_layers();
    assert_eq!(stored.wait().stored, 3);
    assert!(one.wait_uploaded(later()).unwrap());
    assert_eq!(fetch(&two, &p).chunks, 3);
    clock.advance_s(61);
    assert_eq!(matched(&two, &p), 0, "it expires here as it does there");
    assert_eq!(fetch(&two, &p).stopped, Some("expired"));
    let requests = server.requests(&Method::GET);
    assert_eq!(fetch(&two, &p).stopped, Some("absent"), "it is not read again");
    assert_eq!(server.requests(&Method::GET), requests);
    // The same bytes under the name of another model.
    let mut c = Machine::new(&server);
    c.world.settings.fingerprint = Some("other weights".into());
    let three = c.open();
    let of =
        |engine: &Engine| root.path().join(BUCKET).join("some/nhd").join(engine.geometry().fingerprint().dir_name());
    std::fs::rename(of(&one), of(&three)).unwrap();
    assert_eq!(fetch(&three, &p).stopped, Some("corrupt"));
    assert_eq!(matched(&three, &p), 0);
}

#[test]
fn what_is_removed_while_its_upload_fails_does_not_come_back() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let a = Machine::new(&server);
    let one = a.open();
    // The first deletions of what was put all the same fail too.
    let failures = Arc::new(AtomicU64::new(0));
    let left = Arc::clone(&failures);
    let fails = move || left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
    server.spoil(move |method, _| match *method {
        Method::PUT => Spoil::Unheard,
        Method::POST if fails() => Spoil::Status(500),
        _ => Spoil::No,
    });
    let (p, kv) = (prompt(&one, N, 1), a.world.kv().filled(1));
    assert_eq!(store(&one, &p, &kv, slots(N, 1)).stored, 3);
    while server.requests(&Method::PUT) < 3 {
        std::thread::yield_now();
    }
    std::thread::scope(|scope| {
        let removing = scope.spawn(|| one.remove(&p));
        while matched(&one, &p) > 0 {
            std::thread::yield_now();
        }
        assert!(server.puts().is_empty() && !removing.is_finished(), "the store gets them after the drives' removal");
        failures.store(2, Ordering::SeqCst);
        server.let_go();
        removing.join().unwrap().unwrap();
    });
    assert_eq!((server.puts().len(), remote(&one).uploaded), (3, 0));
    let elsewhere = Machine::new(&server);
    assert_eq!(fetch(&elsewhere.open(), &p), Fetched { chunks: 0, stopped: Some("absent") });
}

#[test]
fn a_put_whose_answer_is_lost_counts_as_an_upload() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    server.let_go();
    let (a, mut unheard) = (Machine::new(&server), 3);
    server.spoil(move |method, _| {
        if *method != Method::PUT || unheard == 0 {
            return Spoil::No;
        }
        unheard -= 1;
        Spoil::Unheard
    });
    let one = a.open();
    a.upload(&one, 1);
    assert!(server.puts().iter().all(|puts| *puts == 1), "{:?}", server.puts());
    let stats = remote(&one);
    assert_eq!((stats.uploaded, stats.present), (3, 0));
    let bytes: u64 = object_files(root.path()).iter().map(|file| file.metadata().unwrap().len()).sum();
    assert!(stats.uploaded_bytes > bytes / 2, "{} of {bytes}", stats.uploaded_bytes);
}

#[test]
fn an_object_that_has_expired_is_replaced_once_its_chunk_is_stored_anew() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let (mut a, mut b, mut c) = (Machine::new(&server), Machine::new(&server), Machine::new(&server));
    let clock = TestClock::new();
    for machine in [&mut a, &mut b, &mut c] {
        machine.world.clock = Some(Arc::clone(&clock) as _);
    }
    let (one, two, three) = (a.open(), b.open(), c.open());
    let (p, kv) = (prompt(&one, N, 1), a.world.kv().filled(1));
    let store_for_a_minute = || {
        let mut request = StoreRequest::new(&p, &kv.kv, slots(N, 1));
        request.ttl = Some(Duration::from_secs(60));
        let stored = one.store(request).unwrap();
        stored.all_layers();
        assert_eq!(stored.wait().stored, 3);
        assert!(one.wait_uploaded(later()).unwrap());
        let stats = remote(&one);
        (stats.uploaded, stats.present)
    };
    assert_eq!(store_for_a_minute(), (3, 0));
    clock.advance_s(61);
    assert_eq!(fetch(&two, &p).stopped, Some("expired"));
    // Nor does a restore bring it, or count it against the room that others have.
    let q = prompt(&one, CHUNK, 2);
    assert_eq!(store(&one, &q, &kv, slots(CHUNK, 1)).stored, 1);
    assert!(one.wait_uploaded(later()).unwrap());
    let options = RemoteOptions { env: server.env(), ..RemoteOptions::of_settings(&a.world.settings).unwrap() };
    let (from, into) = (RemoteStore::open(&options).unwrap(), Remote::open(&options, two.geometry()).unwrap());
    let (namespace, shard) = from.shards().unwrap().pop().unwrap();
    let mut objects = from.objects(&namespace, &shard).unwrap();
    objects.sort_unstable_by_key(|object| q.keys().contains(&object.key));
    assert_eq!(objects.len(), 4);
    let one_chunk = objects[3].bytes;
    assert_eq!(wait(&into.restore(two.log().unwrap(), objects, one_chunk, later())).chunks, 1);
    assert_eq!(b.check(&two, &q, &kv), CHUNK);
    assert_eq!(store_for_a_minute(), (7, 0));
    assert_eq!(fetch(&three, &p), Fetched { chunks: 3, stopped: None });
    assert_eq!(c.check(&three, &p, &kv), N);
    // One that somebody can still use stays as it is.
    one.log().unwrap().remove(p.keys()).unwrap();
    clock.advance_s(30);
    assert_eq!(store_for_a_minute(), (7, 3));
    // But not for a chunk that stays.
    one.log().unwrap().remove(p.keys()).unwrap();
    assert_eq!(store(&one, &p, &kv, slots(N, 1)).stored, 3);
    assert!(one.wait_uploaded(later()).unwrap());
    assert_eq!((remote(&one).uploaded, remote(&one).present), (10, 3));
}

#[test]
fn an_upload_cut_short_is_not_served_and_a_damaged_object_is_replaced() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let (a, b) = (Machine::new(&server), Machine::new(&server));
    let (one, two) = (a.open(), b.open());
    server.spoil(|method, _| if *method == Method::PUT { Spoil::CutRequest } else { Spoil::No });
    let (p, kv) = (prompt(&one, N, 1), a.world.kv().filled(1));
    assert_eq!(store(&one, &p, &kv, slots(N, 1)).stored, 3);
    while server.requests(&Method::PUT) < 3 {
        std::thread::yield_now();
    }
    assert_eq!(fetch(&two, &p).chunks, 0);
    server.spoil(|_, _| Spoil::No);
    one.close(later()).unwrap();
    assert!(server.puts().iter().all(|n| *n == 1));
    // An object that is damaged where it lies is found out, and replaced by who has the chunk.
    let one = a.open();
    let object = object_files(root.path()).pop();
    let (p, kv) = if object.is_some() { (p, kv) } else { a.upload(&one, 1) };
    for file in object_files(root.path()) {
        // In the first layer, coded or not.
        engine_world::flip(&file, 6_000);
    }
    let c = Machine::new(&server);
    let three = c.open();
    assert_eq!(fetch(&three, &p).stopped, Some("corrupt"));
    assert_eq!(matched(&three, &p), 0);
    // A chunk that the fetch still brings is not stored beside it.
    while matched(&three, &p) < N {
        store(&three, &p, &kv, slots(N, 1));
    }
    assert!(three.wait_uploaded(later()).unwrap());
    assert!(remote(&three).uploaded >= 1);
}

#[test]
fn an_object_of_a_wrong_length_or_with_a_damaged_header_is_replaced_by_who_stores_its_chunk() {
    let cut_short = |file: &std::path::Path| {
        std::fs::File::options().write(true).open(file).unwrap().set_len(5000).unwrap();
    };
    let damaged = |file: &std::path::Path| engine_world::flip(file, 100);
    for spoil in [&cut_short as &dyn Fn(&std::path::Path), &damaged] {
        let root = tempfile::tempdir().unwrap();
        let server = Server::start(root.path());
        let (a, b) = (Machine::new(&server), Machine::new(&server));
        a.upload(&a.open(), 1);
        let objects: Vec<_> = object_files(root.path());
        objects.iter().for_each(|object| spoil(object));
        let two = b.open();
        let (p, kv) = b.upload(&two, 1);
        assert_eq!((objects.len(), remote(&two).uploaded, remote(&two).present), (3, 3, 0));
        let c = Machine::new(&server);
        let three = c.open();
        assert_eq!(fetch(&three, &p), Fetched { chunks: 3, stopped: None });
        assert_eq!(c.check(&three, &p, &kv), N);
    }
}

#[test]
fn an_object_that_others_have_replaced_by_one_with_another_codec_is_soon_fetched() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let large = || Shape::all().into_iter().find(|shape| shape.name == "large").unwrap();
    let [a, b, mut c] = [0; 3].map(|_| Machine::with(large(), &server));
    c.world.settings.codec = Codec::None;
    let (one, two, three) = (a.open(), b.open(), c.open());
    let (p, _) = a.upload(&one, 1);
    assert_eq!(fetch(&two, &p), Fetched { chunks: 3, stopped: None });
    one.clear().unwrap();
    two.log().unwrap().remove(p.keys()).unwrap();
    let (_, kv) = c.upload(&three, 1);
    // What is known of each of the three turns out to be old.
    let stopped: Vec<_> = (0..4).map(|_| fetch(&two, &p).stopped).collect();
    assert_eq!((stopped[0], stopped[3]), (Some("corrupt"), None), "{stopped:?}");
    assert_eq!(b.check(&two, &p, &kv), N);
}

/// Whether it is left alone before, by a load, or the uploads are the first to read from it.
#[test]
fn uploads_wait_for_a_drive_that_does_not_answer_and_go_on_when_it_does() {
    for is_known in [true, false] {
        let root = tempfile::tempdir().unwrap();
        let server = Server::start(root.path());
        let hangs = Arc::new(AtomicBool::new(false));
        let of_drive = Arc::clone(&hangs);
        let mut a = Machine::new(&server);
        let options = RemoteOptions { env: server.env(), ..RemoteOptions::of_settings(&a.world.settings).unwrap() };
        a.world.settings.remote_url = None;
        a.world.settings.io_timeout_ms = 1000;
        a.world = a.world.with_read_faults(move |_, _| of_drive.load(Ordering::SeqCst).then_some(Fault::Hang));
        let one = a.open();
        let (p, kv, log) = (prompt(&one, N, 1), a.world.kv().filled(1), one.log().unwrap());
        assert_eq!(store(&one, &p, &kv, slots(N, 1)).stored, 3);
        hangs.store(true, Ordering::SeqCst);
        let remote = Remote::open(&options, one.geometry()).unwrap();
        if is_known {
            while log.answers() {
                load(&one, &p, &a.world.kv(), slots(N, 1));
            }
            // The drive is left alone for a while yet.
            hangs.store(false, Ordering::SeqCst);
        }
        assert!(p.keys().iter().all(|key| remote.upload(&log, *key)));
        if !is_known {
            // Each has a read that times out.
            std::thread::sleep(Duration::from_millis(1500));
            hangs.store(false, Ordering::SeqCst);
        }
        assert!(remote.wait_uploaded(later()));
        assert_eq!(remote.stats().uploaded, 3, "{:?}", remote.stats().not_uploaded);
    }
}

#[test]
fn a_bucket_that_is_not_there_takes_nothing() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    server.spoil(|method, _| if *method == Method::PUT { Spoil::Status(404) } else { Spoil::No });
    let a = Machine::new(&server);
    let engine = a.open();
    store(&engine, &prompt(&engine, N, 1), &a.world.kv().filled(1), slots(N, 1));
    assert!(engine.wait_uploaded(later()).unwrap());
    let stats = remote(&engine);
    assert_eq!(stats.uploaded, 0);
    assert!(stats.not_uploaded.contains(&("refused", 3)), "{stats:?}");
}

#[test]
fn a_store_that_refuses_the_credentials_is_told_from_one_that_fails() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    // S3 answers so where a token has expired.
    server.spoil(|method, _| if *method == Method::HEAD { Spoil::Status(400) } else { Spoil::No });
    let a = Machine::new(&server);
    let engine = a.open();
    store(&engine, &prompt(&engine, N, 1), &a.world.kv().filled(1), slots(N, 1));
    assert!(engine.wait_uploaded(later()).unwrap());
    let stats = remote(&engine);
    assert!(stats.not_uploaded.contains(&("refused", 3)), "{stats:?}");
    server.spoil(|method, _| if *method == Method::GET { Spoil::Status(403) } else { Spoil::No });
    let e = engine.clear().unwrap_err().to_string();
    assert!(e.contains("(refused)") && e.contains("when these credentials may list and delete"), "{e}");
}

/// S3 answers so while a deletion of the object is under way.
#[test]
fn a_conflict_is_no_object() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let conflicts = std::sync::atomic::AtomicUsize::new(0);
    server.spoil(move |method, _| {
        let first = || conflicts.fetch_add(1, std::sync::atomic::Ordering::SeqCst) < 2;
        if *method == Method::PUT && first() { Spoil::Status(409) } else { Spoil::No }
    });
    let (a, b) = (Machine::new(&server), Machine::new(&server));
    let one = a.open();
    let (p, kv) = a.upload(&one, 1);
    assert_eq!((remote(&one).uploaded, remote(&one).present), (3, 0));
    let two = b.open();
    assert_eq!(fetch(&two, &p), Fetched { chunks: 3, stopped: None });
    assert_eq!(b.check(&two, &p, &kv), N);
}

fn object_files(root: &std::path::Path) -> Vec<std::path::PathBuf> {
    let (mut open, mut found) = (vec![root.to_owned()], Vec::new());
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_none() {
                found.push(path);
            }
        }
    }
    found
}

#[test]
fn no_fault_gives_a_wrong_byte_or_outlasts_its_deadline() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let a = Machine::new(&server);
    let one = a.open();
    let (p, kv) = a.upload(&one, 1);
    let faults = [
        (Spoil::Status(500), "io"),
        (Spoil::WrongByte, "corrupt"),
        (Spoil::WrongBytes, "corrupt"),
        (Spoil::Cut, "io"),
        (Spoil::Short, "io"),
        (Spoil::Stall, "timed_out"),
        (Spoil::StallWithin, "timed_out"),
        (Spoil::SlowLoris, "timed_out"),
        (Spoil::Close, "io"),
    ];
    for (fault, cause) in faults {
        let mut b = Machine::new(&server);
        b.world.settings.remote_timeout_ms = if cause == "timed_out" { 200 } else { 20_000 };
        let two = b.open();
        server.spoil(move |method, _| if *method == Method::GET { fault } else { Spoil::No });
        let got = fetch(&two, &p);
        assert_eq!((got.chunks, got.stopped), (0, Some(cause)), "{fault:?}: {got:?}");
        assert_eq!(matched(&two, &p), 0, "{fault:?}");
        server.spoil(|_, _| Spoil::No);
        // A new process asks again; what was taken for damaged is not.
        two.close(later()).unwrap();
        b.world.settings.remote_timeout_ms = 20_000;
        let two = b.open();
        assert_eq!(fetch(&two, &p).chunks, 3, "{fault:?}");
        assert_eq!(b.check(&two, &p, &kv), N, "{fault:?}");
    }
}

#[test]
fn while_the_store_hangs_loads_and_stores_go_on_and_it_is_soon_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let mut a = Machine::new(&server);
    a.world.settings.remote_timeout_ms = 1000;
    let engine = a.open();
    server.spoil(|_, _| Spoil::Stall);
    let mut stored = Vec::new();
    for seed in 0..4 {
        let (p, kv) = (prompt(&engine, N, seed), a.world.kv().filled(seed));
        assert_eq!(store(&engine, &p, &kv, slots(N, 1)).stored, 3);
        assert_eq!(a.check(&engine, &p, &kv), N);
        stored.push((p, kv));
    }
    let unknown = prompt(&engine, N, 99);
    while !remote(&engine).failing {
        assert_eq!(fetch(&engine, &unknown).chunks, 0);
    }
    assert_eq!(fetch(&engine, &unknown).stopped, Some("circuit_open"));
    stored.iter().for_each(|(p, kv)| assert_eq!(a.check(&engine, p, kv), N));
    // It comes back by itself, and so does what waited.
    server.spoil(|_, _| Spoil::No);
    assert!(engine.wait_uploaded(later()).unwrap());
    assert!(!remote(&engine).failing);
    // Each upload had a second, which is little on a busy machine.
    drop(engine);
    a.world.settings.remote_timeout_ms = 20_000;
    let engine = a.open();
    let (p, kv) = (prompt(&engine, N, 9), a.world.kv().filled(9));
    assert_eq!(store(&engine, &p, &kv, slots(N, 1)).stored, 3);
    assert!(engine.wait_uploaded(later()).unwrap() && remote(&engine).uploaded >= 3);
}

#[test]
fn a_killed_server_is_a_miss_and_its_successor_is_used() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let (a, b) = (Machine::new(&server), Machine::new(&server));
    let one = a.open();
    let (p, kv) = a.upload(&one, 1);
    let address = server.address;
    let two = b.open();
    drop(server);
    assert_eq!(fetch(&two, &p).stopped, Some("io"));
    let _server = Server::again(root.path(), address);
    assert_eq!(fetch(&two, &p).chunks, 3);
    assert_eq!(b.check(&two, &p, &kv), N);
}

#[test]
fn a_fetch_that_is_cancelled_or_late_ends_and_leaves_nothing_behind() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let (a, b) = (Machine::new(&server), Machine::new(&server));
    let (one, two) = (a.open(), b.open());
    let (p, kv) = a.upload(&one, 1);
    let asked = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&asked);
    server.spoil(move |method, _| {
        if *method != Method::GET {
            return Spoil::No;
        }
        seen.store(true, Ordering::SeqCst);
        Spoil::StallWithin
    });
    let pending = two.fetch(&p, later()).unwrap();
    while !asked.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
    assert!(!pending.is_over());
    pending.cancel();
    assert_eq!(wait(&pending).stopped, Some("cancelled"));
    let late = two.fetch(&p, Instant::now()).unwrap();
    assert_eq!(wait(&late).stopped, Some("timed_out"));
    let stats = two.stats().unwrap().remote;
    assert_eq!((stats.missed("cancelled"), stats.missed("timed_out")), (1, 1));
    server.spoil(|_, _| Spoil::No);
    // The slots of those puts are free again.
    assert_eq!(fetch(&two, &p).chunks, 3);
    assert_eq!(b.check(&two, &p, &kv), N);
}

#[test]
fn what_has_been_uploaded_and_what_is_gone_is_told_to_who_asks() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let (a, b) = (Machine::new(&server), Machine::new(&server));
    let (one, two) = (a.open(), b.open());
    let told = |engine: &Engine| {
        let mut changes = engine.take_remote_changes(9);
        changes.sort_by_key(|(key, _)| key.0);
        changes
    };
    let all = |p: &Prompt, is_there: bool| {
        let mut keys = p.keys().to_vec();
        keys.sort_by_key(|key| key.0);
        keys.into_iter().map(|key| (key, is_there)).collect::<Vec<_>>()
    };
    assert!(told(&one).is_empty() && told(&two).is_empty(), "from now on");
    let (p, _) = a.upload(&one, 1);
    assert_eq!(told(&one), all(&p, true));
    assert!(told(&one).is_empty(), "once");
    assert_eq!((fetch(&two, &p).chunks, told(&two)), (3, all(&p, true)));
    one.remove(&p).unwrap();
    assert_eq!(told(&one), all(&p, false));
    two.log().unwrap().remove(p.keys()).unwrap();
    assert_eq!(fetch(&two, &p).chunks, 0);
    assert!(told(&two).contains(&(p.keys()[0], false)), "a fetch did not find it");
    let (q, _) = a.upload(&one, 2);
    assert_eq!(told(&one), all(&q, true));
    one.clear().unwrap();
    let gone = told(&one);
    assert!(all(&q, false).iter().all(|chunk| gone.contains(chunk)), "{gone:?}");
}

#[test]
fn a_directory_is_a_store_too() {
    let shared = tempfile::tempdir().unwrap();
    let (mut a, mut b, mut early) = (World::plain(), World::plain(), World::plain());
    let directory = shared.path().join("kv");
    for world in [&mut a, &mut b, &mut early] {
        world.settings.remote_url = Some(format!("file://{}", directory.display()));
    }
    // One that is missing is not made: it may lie on a share that is not mounted.
    let engine = early.open();
    let kv = early.kv().filled(1);
    assert_eq!(store(&engine, &prompt(&engine, N, 1), &kv, slots(N, 1)).stored, 3);
    assert!(engine.wait_uploaded(later()).unwrap());
    assert!(!directory.exists());
    std::fs::create_dir(&directory).unwrap();
    let (one, two) = (a.open(), b.open());
    let (p, kv) = (prompt(&one, N, 1), a.kv().filled(1));
    assert_eq!(store(&one, &p, &kv, slots(N, 1)).stored, 3);
    assert!(one.wait_uploaded(later()).unwrap());
    assert_eq!(fetch(&two, &p).chunks, 3);
    let c = b.kv();
    assert_eq!(load(&two, &p, &c, slots(N, 2)).tokens, N);
    assert_same("from a directory", (&kv, &slots(N, 1)), (&c, &slots(N, 2)));
    // What puts have left that a kill cut off is hidden from lists; a younger one may be under way.
    let object = object_files(shared.path()).pop().unwrap();
    let [old, young] =
        ["1", "2"].map(|n| object.with_file_name(format!("{}#{n}", object.file_name().unwrap().display())));
    [&old, &young].into_iter().for_each(|file| std::fs::write(file, "KV").unwrap());
    let an_hour = std::time::Duration::from_secs(3600);
    let file = std::fs::File::options().write(true).open(&old).unwrap();
    file.set_modified(std::time::SystemTime::now() - an_hour).unwrap();
    one.clear().unwrap();
    assert!(!object.exists() && !old.exists() && young.exists());
    two.log().unwrap().clear().unwrap();
    assert_eq!(fetch(&two, &p).chunks, 0);
}

#[test]
fn a_waiting_request_is_fetched_for_once_and_for_as_long_as_loads_may_take() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let (a, mut b) = (Machine::new(&server), Machine::new(&server));
    let one = a.open();
    let (p, kv) = a.upload(&one, 1);
    let two = Arc::new(b.open());
    let mut lookup = RanksLookup::over(vec![Arc::clone(&two)]);
    let mut ask = |req: &str, p: &Prompt| {
        let mut questions = 1;
        loop {
            match lookup.stored_tokens(req, p).unwrap() {
                Some(tokens) => return (tokens, questions),
                None => questions += 1,
            }
            std::thread::yield_now();
        }
    };
    let (tokens, questions) = ask("r1", &p);
    assert!(tokens == N && questions > 1, "{tokens} tokens after {questions} questions");
    assert_eq!(b.check(&two, &p, &kv), N);
    assert_eq!(ask("r2", &p), (N, 1), "what is on a drive is not asked for");
    assert_eq!(ask("r3", &prompt(&two, N, 2)).0, 0);
    let heads = server.requests(&Method::HEAD);
    assert_eq!(ask("r3", &prompt(&two, N, 2)), (0, 1), "a request is fetched for once");
    assert_eq!(server.requests(&Method::HEAD), heads);
    // A store that hangs costs a request no more than `load_timeout_ms`, and the others nothing.
    server.spoil(|_, _| Spoil::Stall);
    b.world.settings.load_timeout_ms = 50;
    drop(two);
    let two = Arc::new(b.open());
    let mut lookup = RanksLookup::over(vec![Arc::clone(&two)]);
    let unknown = prompt(&two, N, 3);
    assert_eq!(lookup.stored_tokens("r4", &unknown).unwrap(), None);
    assert_eq!(lookup.stored_tokens("r5", &p).unwrap(), Some(N));
    while lookup.stored_tokens("r4", &unknown).unwrap().is_none() {
        std::thread::yield_now();
    }
    assert_eq!(remote(&two).missed("timed_out"), 1);
}

#[test]
fn a_request_waits_for_the_store_no_longer_than_computing_takes_and_loads_what_has_come() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let (a, mut b) = (Machine::new(&server), Machine::new(&server));
    // Nothing else ends a wait.
    (b.world.settings.load_timeout_ms, b.world.settings.remote_timeout_ms) = (3_600_000, 600_000);
    let one = a.open();
    let (p, _) = a.upload(&one, 1);
    let two = Arc::new(b.open());
    let mut lookup = RanksLookup::over(vec![Arc::clone(&two)]);
    let mut ask = |req: &str, p: &Prompt, computing: f64| {
        lookup.computes(Some(computing));
        loop {
            if let Some(tokens) = lookup.stored_tokens(req, p).unwrap() {
                return (tokens, lookup.not_fetched());
            }
            std::thread::yield_now();
        }
    };
    // The first chunk is asked about alone; the others never come.
    let heads = AtomicU64::new(0);
    server.spoil(move |method, _| match *method {
        Method::HEAD if heads.fetch_add(1, Ordering::SeqCst) > 0 => Spoil::Stall,
        _ => Spoil::No,
    });
    let chunk = two.geometry().chunk_tokens as usize;
    assert_eq!(ask("four seconds", &p, N as f64 / 4.0), (chunk, 0), "one chunk in time, the rest is computed");
    assert_eq!(remote(&two).missed("timed_out"), 1);
    // Fetches that are always slower than computing are not begun.
    let mut n = 0;
    let not_fetched = loop {
        n += 1;
        let (tokens, not_fetched) = ask(&format!("no time {n}"), &prompt(&two, N, 10 + n), 1e12);
        assert_eq!(tokens, 0);
        if not_fetched > 0 || n > 100 {
            break not_fetched;
        }
    };
    assert_eq!((not_fetched, n), (1, 15), "after 15 measurements");
}

#[test]
fn the_fetches_of_one_request_on_several_ranks_are_one_measurement() {
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let (a, b) = (Machine::new(&server), Machine::new(&server));
    let engines: Vec<_> = [&a, &b].map(|machine| Arc::new(machine.open())).into();
    let mut lookup = RanksLookup::over(engines.clone());
    lookup.computes(Some(1e12));
    server.spoil(|_, _| Spoil::Stall);
    let mut n = 0;
    while lookup.not_fetched() == 0 && n < 100 {
        n += 1;
        let p = prompt(&engines[0], N, n);
        while lookup.stored_tokens(&format!("r{n}"), &p).unwrap().is_none() {
            std::thread::yield_now();
        }
    }
    assert_eq!(n, 16, "after 15 measurements");
}

/// With `FOREBAY_REMOTE_FAULTS` for as many spoiled requests, `make remote-faults`.
#[test]
fn faults_at_random_give_no_wrong_byte_and_no_fetch_outlasts_its_deadline() {
    let wanted: u64 = std::env::var("FOREBAY_REMOTE_FAULTS").map_or(60, |n| n.parse().unwrap());
    let seed: u64 = std::env::var("FOREBAY_REMOTE_SEED").map_or(7, |n| n.parse().unwrap());
    println!("FOREBAY_REMOTE_SEED={seed}");
    let root = tempfile::tempdir().unwrap();
    let server = Server::start(root.path());
    let spoiled = Arc::new(AtomicU64::new(0));
    let (count, mut state) = (Arc::clone(&spoiled), seed.wrapping_mul(2) + 1);
    server.spoil(move |_, _| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let spoil = Spoil::ALL[(state >> 8) as usize % Spoil::ALL.len()];
        if state % 100 >= 30 || spoil == Spoil::No {
            return Spoil::No;
        }
        count.fetch_add(1, Ordering::SeqCst);
        spoil
    });
    let (mut a, mut b) = (Machine::new(&server), Machine::new(&server));
    for machine in [&mut a, &mut b] {
        machine.world.settings.remote_timeout_ms = 50;
    }
    let (mut rounds, mut loaded) = (0, 0);
    while spoiled.load(Ordering::SeqCst) < wanted {
        rounds += 1;
        // Opened anew, neither remembers what failed nor leaves the store alone.
        let (one, two) = (a.open(), b.open());
        let (p, kv) = (prompt(&one, N, rounds), a.world.kv().filled(rounds));
        assert_eq!(store(&one, &p, &kv, slots(N, 1)).stored, 3);
        one.wait_uploaded(Instant::now() + Duration::from_millis(300)).unwrap();
        wait(&two.fetch(&p, Instant::now() + Duration::from_millis(200)).unwrap());
        loaded += b.check(&two, &p, &kv);
        assert_eq!(a.check(&one, &p, &kv), N, "what is on the drive stays");
    }
    println!("{rounds} rounds, {} requests spoiled, {loaded} tokens loaded elsewhere", spoiled.load(Ordering::SeqCst));
    // How much comes through such faults depends on the machine; without them all does.
    server.spoil(|_, _| Spoil::No);
    for machine in [&mut a, &mut b] {
        machine.world.settings.remote_timeout_ms = 20_000;
    }
    let (one, two) = (a.open(), b.open());
    let (p, kv) = a.upload(&one, rounds + 1);
    assert_eq!(fetch(&two, &p).chunks, 3);
    assert_eq!(b.check(&two, &p, &kv), N);
}
