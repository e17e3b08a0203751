//! The CPU a load cannot do without: `crc32fast` over every extent and a copy of the same bytes
//! into paged blocks, each in a loop of its own. `benches/speed.py` compares the engine's CPU with
//! fio's plus this. Prints JSON.
//!
//! `memory_bytes_per_s` is what hits of the memory tier are compared with: the CRC of each extent
//! and then its copy, out of memory larger than the caches, in as many threads as copy for the
//! engine.

use std::hint::black_box;
use std::time::Instant;

use forebay::geometry::Geometry;

const BLOCK_TOKENS: usize = 16;
const ROUNDS: usize = 400;
/// Passes over the memory of each thread.
const MEMORY_ROUNDS: usize = 10;

fn main() {
    let mut args = std::env::args().skip_while(|a| a != "--model").skip(1);
    let model = args.next().unwrap_or_else(|| "llama-3.1-8b".to_owned());
    let Ok(geometry) = Geometry::preset(&model) else {
        println!("{{\"error\": \"unknown model {model}\"}}");
        return;
    };
    let extent = geometry.extent_bytes(0, geometry.chunk_tokens as usize);
    let run = extent / (geometry.chunk_tokens as usize / BLOCK_TOKENS) / geometry.layers[0].planes.len();
    // Far larger than any cache, as the server's KV is.
    let copies = (256 << 20) / extent;
    let source: Vec<u8> = (0..extent * 8).map(|i| ((i * 31) >> 3) as u8).collect();
    let mut blocks = vec![1u8; copies * extent];
    let bytes = (ROUNDS * extent) as f64;
    let start = Instant::now();
    for i in 0..ROUNDS {
        let at = i % 8 * extent;
        black_box(crc32fast::hash(black_box(&source[at..at + extent])));
    }
    let crc = start.elapsed().as_secs_f64() / bytes;
    let start = Instant::now();
    for i in 0..ROUNDS {
        let (from, to) = (i % 8 * extent, i % copies * extent);
        // Blocks in a shuffled order, as a server's allocator leaves them.
        let runs = extent / run;
        for r in 0..runs {
            let place = to + r * 7919 % runs * run;
            blocks[place..place + run].copy_from_slice(&source[from + r * run..from + (r + 1) * run]);
        }
        black_box(&mut blocks);
    }
    let copy = start.elapsed().as_secs_f64() / bytes;
    let memory = memory_bytes_per_s(extent, run);
    println!("{{\"crc_s_per_byte\": {crc:e}, \"copy_s_per_byte\": {copy:e}, \"memory_bytes_per_s\": {memory:e}}}");
}

/// CRC and copy of extents that no cache holds, in all threads together.
fn memory_bytes_per_s(extent: usize, run: usize) -> f64 {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(4);
    let copies = (512 << 20) / extent;
    let mut work: Vec<(Vec<u8>, Vec<u8>)> =
        (0..threads).map(|_| (vec![3u8; copies * extent], vec![1u8; copies * extent])).collect();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (source, blocks) in &mut work {
            scope.spawn(move || {
                for i in 0..copies * MEMORY_ROUNDS {
                    let at = i % copies * extent;
                    let from = &source[at..at + extent];
                    black_box(crc32fast::hash(black_box(from)));
                    let runs = extent / run;
                    for r in 0..runs {
                        let place = at + r * 7919 % runs * run;
                        blocks[place..place + run].copy_from_slice(&from[r * run..(r + 1) * run]);
                    }
                    black_box(&mut *blocks);
                }
            });
        }
    });
    (threads * copies * MEMORY_ROUNDS * extent) as f64 / start.elapsed().as_secs_f64()
}
