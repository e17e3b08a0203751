//! Puts and gets of objects: throughput and processor time, through staging, straight from and into
//! registered memory, and coded. Every byte is checked by the store. Beside them files of the same
//! values, written and read without the page cache and unchecked. Each run has a new folder, and
//! begins when the drive has done all earlier work; each store has put a few other values before.
//!
//! `cargo bench -p forebay --bench objects -- DIR [MIB]`: DIR is a directory on the drive to be
//! measured, MIB how much is moved in each run. The runs of one size alternate; the median of seven
//! counts. The last column is the rate beside the files' of the same round.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement")]

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use forebay::config::{Capacity, Codec, MinFree, Settings};
use forebay::device::HostMemory;
use forebay::io::AlignedBuf;
use forebay::objects::{ObjectGet, ObjectMemory, ObjectPut, ObjectStore, PutOptions};

const LONG: Duration = Duration::from_secs(120);
const RUNS: usize = 7;
const WAYS: [&str; 3] = ["staged", "direct", "coded"];
const FILES: &str = "files";
/// Files that are written or read at once.
const AT_ONCE: usize = 8;
/// Values that a store puts first.
const OTHERS: usize = 8;
/// How long a drive may go on working after a sync.
const REST: Duration = Duration::from_millis(300);

/// Processor seconds of this process, in steps of 10 ms.
fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // The name, in brackets, may hold anything; after it user and system time are fields 12 and 13.
    let (_, rest) = stat.rsplit_once(')').unwrap();
    rest.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<f64>().unwrap() / 100.0).sum()
}

/// GiB a second, and processor seconds a GiB.
fn measure(bytes: usize, run: impl FnOnce()) -> (f64, f64) {
    let (cpu, start) = (cpu_s(), Instant::now());
    run();
    let gib = bytes as f64 / f64::from(1 << 30);
    (gib / start.elapsed().as_secs_f64(), (cpu_s() - cpu) / gib)
}

fn median(all: impl Iterator<Item = f64>) -> f64 {
    let mut all: Vec<f64> = all.collect();
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Waits until the drive is done with what was written and freed in `dir`.
fn settle(dir: &Path) {
    rustix::fs::syncfs(std::fs::File::open(dir).unwrap()).unwrap();
    std::thread::sleep(REST);
}

/// Each value to or from a file of its own, as large as it is.
fn files(dir: &Path, (values, size): (&mut [u8], usize), writes: bool) {
    let next = Mutex::new(values.chunks_exact_mut(size).enumerate());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let Some((n, value)) = next.lock().unwrap().next() else { return };
                    let mut options = OpenOptions::new();
                    options.read(!writes).write(writes).create(writes).truncate(writes).custom_flags(libc::O_DIRECT);
                    let file = options.open(dir.join(n.to_string())).unwrap();
                    if writes { file.write_all_at(value, 0).unwrap() } else { file.read_exact_at(value, 0).unwrap() }
                }
            });
        }
    });
}

fn main() {
    let mut args = std::env::args().skip(1).filter(|a| !a.starts_with("--"));
    let Some(dir) = args.next() else {
        println!("objects: give a directory on the drive to be measured");
        return;
    };
    let total = args.next().map_or(512, |mib| mib.parse::<usize>().unwrap()) << 20;
    let dir = tempfile::tempdir_in(dir).unwrap();
    let arena = HostMemory::alloc_zeroed(total).unwrap();
    // bfloat16 numbers of eight exponents.
    let number = |n: u64| {
        let noise = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        ((noise as u16) & 0x807f | (120 + (noise >> 16 & 7) as u16) << 7).to_le_bytes()
    };
    let numbers: Vec<u8> = (0..total as u64 / 2).flat_map(number).collect();
    arena.write(0, &numbers).unwrap();
    let mut values = AlignedBuf::zeroed(total).unwrap();
    values.copy_from_slice(&numbers);
    drop(numbers);
    let open = |folder: &Path, way: &str| {
        let mut settings = Settings::at(folder);
        settings.capacity = Capacity::Bytes(4 * total as u64);
        settings.min_free = MinFree::Bytes(0);
        settings.allow_any_filesystem = true;
        settings.codec = Codec::Exp4;
        let store = ObjectStore::open(&settings, way).unwrap();
        if way == "direct" {
            store.register_memory(&arena).unwrap();
        }
        store
    };
    println!("{:>10} {:>4} {:>8} {:>8} {:>12} {:>8}", "size", "op", "way", "GiB/s", "CPU s/GiB", "x files");
    for size in [32 << 20, 2 << 20, 256 << 10] {
        let memory = |n: usize| ObjectMemory::new(&arena, n * size, size).unwrap();
        let mut all: [[Vec<(f64, f64)>; WAYS.len() + 1]; 2] = Default::default();
        for _ in 0..RUNS {
            for (at, way) in WAYS.iter().enumerate() {
                let folder = tempfile::tempdir_in(&dir).unwrap();
                let store = open(folder.path(), way);
                let put = |kind: &str, count: usize| {
                    let object = |n| ObjectPut { key: format!("{kind} {n}").into_bytes(), value: memory(n) };
                    let options = PutOptions { bfloat16: *way == "coded", ..PutOptions::default() };
                    let id = store.submit_put((0..count).map(object).collect(), options).unwrap();
                    assert!(store.wait(id, LONG).unwrap().all_ok());
                };
                put("other", OTHERS);
                settle(dir.path());
                all[0][at].push(measure(total, || put("value", total / size)));
                settle(dir.path());
                let get = |n| ObjectGet { key: format!("value {n}").into_bytes(), target: memory(n) };
                let gets = (0..total / size).map(get).collect();
                all[1][at].push(measure(total, || {
                    let id = store.submit_get(gets).unwrap();
                    assert!(store.wait(id, LONG).unwrap().all_ok());
                }));
            }
            let folder = tempfile::tempdir_in(&dir).unwrap();
            for (op, of) in all.iter_mut().enumerate() {
                settle(dir.path());
                of[WAYS.len()].push(measure(total, || files(folder.path(), (&mut values, size), op == 0)));
            }
        }
        for (op, ways) in ["put", "get"].iter().zip(all) {
            for (way, runs) in WAYS.iter().chain([&FILES]).zip(&ways) {
                let (rate, cpu) = (median(runs.iter().map(|run| run.0)), median(runs.iter().map(|run| run.1)));
                let beside = median(runs.iter().zip(&ways[WAYS.len()]).map(|(run, files)| run.0 / files.0));
                println!("{:>6} KiB {op:>4} {way:>8} {rate:>8.2} {cpu:>12.3} {beside:>8.2}", size >> 10);
            }
        }
    }
}
