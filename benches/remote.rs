//! The remote tier beside bare ranged reads of the same objects, over a real S3 server in this
//! process: reads whose bytes are dropped, and reads that do with them what a fetch does too. And
//! loads from the drive while the server hangs, beside loads while it does not. The drive is
//! measured too, by writes of as many bytes from memory: no fetch can be faster than those. The
//! processor time of each is printed, with that of the server, which is always the same.
//!
//! `cargo bench -p forebay --bench remote -- DIR [CHUNKS [GBITS]]`: DIR is a directory on a drive,
//! CHUNKS how many chunks of 32 MiB are moved in each run, GBITS the rate of the network between
//! (in Gbit/s; none: the memory of this machine). Runs alternate; the median of the pairs counts.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement")]

#[path = "../tests/remote_world/mod.rs"]
mod remote_world;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay::config::{Capacity, MinFree, Settings};
use forebay::device::{HostDevice, PagedKv};
use forebay::engine::{Backpressure, Engine, EngineOptions, LoadRequest, Prompt, StoreRequest};
use forebay::geometry::Geometry;
use forebay::io::AlignedBuf;
use forebay::key::Extra;
use forebay::paged::{KvLayout, KvShape, Packing, PagedLayout};
use futures_util::{StreamExt, TryStreamExt};
use object_store::aws::AmazonS3Builder;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use remote_world::{BUCKET, Server, Spoil};

/// The tier's own numbers: bytes of a request, and chunks that are fetched at once.
const PART_BYTES: u64 = 8 << 20;
const AT_ONCE: usize = 4;
const ALL: [Then; 3] = [Then::Dropped, Then::Kept, Then::Written];
const RUNS: usize = 15;
const LOADS: usize = 15;
const LONG: Duration = Duration::from_secs(120);

/// Seconds of `run`.
fn seconds(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}

/// Processor seconds of this process so far, in steps of 10 ms, with threads that have ended.
fn processor() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields = stat.rsplit(')').next().unwrap().split_whitespace();
    fields.skip(11).take(2).map(|ticks| ticks.parse::<f64>().unwrap() / 100.0).sum()
}

/// What was measured: seconds of each run, and processor seconds of all.
#[derive(Default)]
struct Runs {
    seconds: Vec<f64>,
    processor: f64,
}

impl Runs {
    fn add(&mut self, run: impl FnOnce()) {
        let before = processor();
        self.seconds.push(seconds(run));
        self.processor += processor() - before;
    }

    fn say(&self, what: &str, bytes: u64, fetch: &Self) {
        let mib = bytes as f64 / f64::from(1 << 20);
        let ratios = self.seconds.iter().zip(&fetch.seconds).map(|(this, fetch)| this / fetch).collect();
        println!(
            "{what:<28} {:>5.0} MiB/s, {:>4.0} us of a processor per MiB; a fetch has {:.3} times that rate",
            mib / median(self.seconds.clone()),
            self.processor * 1e6 / mib / self.seconds.len() as f64,
            median(ratios),
        );
    }
}

/// Writes a file that is there anew, without the page cache, in parts as a fetch does.
fn write_alone(file: &File, part: &AlignedBuf, bytes: u64) {
    let next = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE * 4 {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed) * PART_BYTES;
                    if at >= bytes {
                        return;
                    }
                    file.write_all_at(part, at).unwrap();
                }
            });
        }
    });
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// A cache in `dir` with the store of `server`.
fn open(dir: &Path, server: &Server) -> Engine {
    let mut settings = Settings::at(dir);
    settings.capacity = Capacity::Bytes(4 << 30);
    settings.min_free = MinFree::Bytes(0);
    settings.allow_any_filesystem = true;
    settings.remote_url = Some(format!("s3://{BUCKET}/bench"));
    let geometry = Geometry::preset("llama-3.1-8b").unwrap();
    let device = HostDevice::new(0).unwrap();
    let mut options = EngineOptions::new(&settings, geometry, device);
    options.remote_env = Some(server.env());
    Engine::open_with(options).unwrap()
}

fn prompt(engine: &Engine, chunks: usize, seed: u32) -> Prompt {
    let tokens: Vec<u32> = (0..chunks as u32 * engine.geometry().chunk_tokens).map(|n| n ^ seed << 20).collect();
    engine.prompt(&tokens, &Extra::default())
}

fn slots(prompt: &Prompt) -> Vec<i64> {
    (0..prompt.len() as i64).collect()
}

/// Memory of `chunks` blocks with noise in it.
fn paged(geometry: &Geometry, chunks: usize) -> Arc<PagedKv> {
    let block_tokens = geometry.chunk_tokens;
    let shape = KvShape { layout: KvLayout::Nhd, packing: Packing::Split, block_tokens, num_blocks: chunks as u32 };
    let layout = PagedLayout::per_layer(&geometry.layers, shape).unwrap();
    let sizes = layout.memory_bytes().to_vec();
    let (kv, memories) = PagedKv::alloc_zeroed(layout).unwrap();
    for (memory, size) in memories.iter().zip(sizes) {
        let noise = (0..size / 8).flat_map(|n| (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        memory.write(0, &noise.collect::<Vec<u8>>()).unwrap();
    }
    kv
}

/// What is done with a range that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It is dropped.
    Dropped,
    /// Its CRC is taken, on another thread, and it is kept until all are read.
    Kept,
    /// As kept, and it is written to a file on the drive by the same thread.
    Written,
}

/// A range, at an offset of a file.
fn used(part: Bytes, then: Then, (file, at): (Arc<File>, u64)) -> Bytes {
    if then != Then::Dropped {
        std::hint::black_box(crc32fast::hash(&part));
    }
    if then == Then::Written {
        file.write_all_at(&part, at).unwrap();
    }
    part
}

/// The bare reads: every object in ranges, several at once.
async fn read(store: &dyn ObjectStore, objects: &[ObjectMeta], (then, dir): (Then, &Path)) -> u64 {
    let file = Arc::new(tempfile::tempfile_in(dir).unwrap());
    let parts = |(n, object): (usize, ObjectMeta)| {
        let (first, file) = (n as u64 * object.size, Arc::clone(&file));
        let starts = (0..object.size).step_by(PART_BYTES as usize);
        let ranges: Vec<_> = starts.map(|at| at..(at + PART_BYTES).min(object.size)).collect();
        async move {
            let reads = ranges.into_iter().map(async |range| {
                let at = first + range.start;
                let part = store.get_range(&object.location, range).await.unwrap();
                let file = Arc::clone(&file);
                let use_it = move || used(part, then, (file, at));
                if then == Then::Dropped { use_it() } else { tokio::task::spawn_blocking(use_it).await.unwrap() }
            });
            futures_util::future::join_all(reads).await
        }
    };
    let all = futures_util::stream::iter(objects.iter().cloned().enumerate()).map(parts).buffered(AT_ONCE);
    let mut kept = Vec::new();
    let count = |bytes: u64, parts: Vec<Bytes>| bytes + parts.iter().map(|part| part.len() as u64).sum::<u64>();
    let mut all = std::pin::pin!(all);
    let mut bytes = 0;
    while let Some(parts) = all.next().await {
        if then == Then::Kept {
            kept.extend_from_slice(&parts);
        }
        bytes = count(bytes, parts);
    }
    bytes
}

fn main() {
    let mut args = std::env::args().skip(1).filter(|a| !a.starts_with("--"));
    let Some(dir) = args.next() else {
        println!("remote: give a directory on the drive to be measured");
        return;
    };
    let chunks = args.next().map_or(8, |n| n.parse::<usize>().unwrap());
    let gbits = args.next().map(|n| n.parse::<f64>().unwrap());
    let dir = Path::new(&dir);
    let folder = || tempfile::tempdir_in(dir).unwrap();
    let (root, home) = (folder(), folder());
    let server = Server::start(root.path());
    let one = open(home.path(), &server);
    let p = prompt(&one, chunks, 0);
    let kv = paged(one.geometry(), chunks);
    let mut request = StoreRequest::new(&p, &kv, slots(&p));
    request.backpressure = Backpressure::Wait;
    let store = one.store(request).unwrap();
    store.all_layers();
    assert_eq!(store.wait().stored, chunks);
    assert!(one.wait_uploaded(Instant::now() + LONG).unwrap());

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let env = server.env().into_iter().filter_map(|(name, value)| Some((name.to_lowercase().parse().ok()?, value)));
    let bare = env.fold(AmazonS3Builder::new(), |builder, (key, value)| builder.with_config(key, value));
    let bare = bare.with_bucket_name(BUCKET).build().unwrap();
    let objects: Vec<ObjectMeta> = runtime.block_on(bare.list(None).try_collect()).unwrap();
    let objects: Vec<_> = objects.into_iter().filter(|object| !object.location.as_ref().ends_with(".json")).collect();
    let bytes: u64 = objects.iter().map(|object| object.size).sum();
    let path = home.path().join("written");
    let file =
        OpenOptions::new().write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
    let mut part = AlignedBuf::zeroed(PART_BYTES as usize).unwrap();
    // Some drives do not write pages that are all zeros.
    part.chunks_exact_mut(8).enumerate().for_each(|(n, to)| {
        to.copy_from_slice(&(n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    });
    write_alone(&file, &part, bytes);
    let mib_per_s = |seconds: f64| bytes as f64 / f64::from(1 << 20) / seconds;
    // From memory: reading its files would limit the server.
    server.remember();
    gbits.into_iter().for_each(|gbits| server.limit(gbits * 1e9 / 8.0));
    let home = folder();
    let two = open(home.path(), &server);
    let mut reads: Vec<Runs> = ALL.iter().map(|_| Runs::default()).collect();
    let (mut fetches, mut writes) = (Runs::default(), Runs::default());
    for run in 0..=RUNS {
        two.log().unwrap().clear().unwrap();
        let bare = |then| assert_eq!(runtime.block_on(read(&bare, &objects, (then, dir))), bytes);
        let fetch = || {
            let fetch = two.fetch(&p, Instant::now() + LONG).unwrap();
            assert!(fetch.wait(Instant::now() + LONG));
            assert_eq!((fetch.chunks(), fetch.stopped()), (chunks, None));
        };
        ALL.iter().zip(&mut reads).for_each(|(then, of)| of.add(|| bare(*then)));
        writes.add(|| write_alone(&file, &part, bytes));
        fetches.add(fetch);
        if run == 0 {
            // That was to warm up.
            reads.iter_mut().chain([&mut writes, &mut fetches]).for_each(|of| *of = Runs::default());
        }
    }
    fetches.say("fetched to a drive", bytes, &fetches);
    writes.say("the drive alone, written", bytes, &fetches);
    for (then, of) in ALL.iter().zip(&reads) {
        of.say(&format!("bare ranged reads, {}", format!("{then:?}").to_lowercase()), bytes, &fetches);
    }

    let load = || {
        seconds(|| {
            let loaded = one.load(LoadRequest::new(&p, &kv, slots(&p))).unwrap().wait();
            assert_eq!(loaded.tokens, p.len());
        })
    };
    load();
    let hangs = Arc::new(AtomicBool::new(false));
    let now = Arc::clone(&hangs);
    server.spoil(move |_, _| if now.load(Ordering::SeqCst) { Spoil::Stall } else { Spoil::No });
    let (mut well, mut hung, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for seed in 1..=LOADS as u32 {
        hangs.store(false, Ordering::SeqCst);
        let of_well = load();
        hangs.store(true, Ordering::SeqCst);
        let waits = one.fetch(&prompt(&one, chunks, seed), Instant::now() + LONG).unwrap();
        let of_hung = load();
        drop(waits);
        well.push(mib_per_s(of_well));
        hung.push(mib_per_s(of_hung));
        ratios.push(of_hung / of_well);
    }
    println!("loads from the drive: {:.0} MiB/s", median(well));
    println!("while the store hangs: {:.0} MiB/s, a load takes {:.3} times as long", median(hung), median(ratios));
}
