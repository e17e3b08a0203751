//! Giving up single chunks: what must hold of them while it happens, after a crash and for ranks.

use super::support::*;
use crate::log::{Log, LogOptions, PutSpec};
use std::path::Path;
use std::sync::Arc;

const CAPACITY: u64 = 16 << 20;
const CHAIN: u64 = 8;

fn thin(dir: &Path) -> LogOptions {
    let policy = "prefix".to_owned();
    LogOptions { capacity_bytes: CAPACITY, segment_bytes: Some(512 << 10), policy, ..options(dir) }
}

/// Chains of eight chunks: keys 0 to 7, 8 to 15 and so on.
fn chained(n: u64) -> PutSpec {
    let root = n / CHAIN * CHAIN;
    let parent = if n == root { crate::key::ChunkKey([0; 32]) } else { key(n - 1) };
    PutSpec { root: Some(key(root)), ..PutSpec::chunk(key(n), parent, CHUNK_TOKENS, (n - root) as u32) }
}

fn fill(log: &Log, keys: impl Iterator<Item = u64>) {
    for n in keys {
        assert!(store_spec(log, chained(n), n, 0).unwrap(), "key {n}");
        assert!(log.stats().disk_bytes <= CAPACITY, "beyond the capacity after key {n}");
    }
}

fn held(log: &Log, keys: std::ops::Range<u64>) -> Vec<u64> {
    keys.filter(|n| has(log, *n)).collect()
}

fn all_load(log: &Log, keys: &[u64]) {
    for n in keys {
        let layers = load_key(log, &key(*n)).unwrap_or_else(|e| panic!("key {n}: {e}"));
        for (layer, bytes) in layers.iter().enumerate() {
            assert_eq!(*bytes, payload(*n, 0, layer, bytes.len()), "key {n}");
        }
    }
}

#[test]
fn single_chunks_go_their_space_is_used_again_and_none_comes_back() {
    let dir = temp();
    let log = Log::open(thin(dir.path())).unwrap();
    let used: Vec<_> = (0..4).map(key).collect();
    for chain in 0..400 {
        fill(&log, chain * CHAIN..(chain + 1) * CHAIN);
        assert_eq!(log.lookup(&used), 4, "in use after chain {chain}");
    }
    let stats = log.stats();
    assert!(stats.evicted > 500 && stats.moved == 0, "{stats:?}");
    let there = held(&log, 0..400 * CHAIN);
    assert!(there.len() as u64 * SLOT_BYTES > CAPACITY * 4 / 10, "{} chunks are held", there.len());
    assert_eq!(there[..4], [0, 1, 2, 3]);
    all_load(&log, &there);
    log.flush().unwrap();
    let log = crash(log);
    assert_eq!(held(&log, 0..400 * CHAIN), there, "after a crash");
    all_load(&log, &there);
    fill(&log, 2000 * CHAIN..2040 * CHAIN);
    let log = reopen(log);
    all_load(&log, &held(&log, 0..2040 * CHAIN));
}

#[test]
fn a_leased_segment_keeps_its_bytes() {
    let dir = temp();
    let log = Log::open(thin(dir.path())).unwrap();
    fill(&log, 0..30);
    log.seal(soon()).unwrap();
    let leased = log.locate(&key(13), PIN).unwrap();
    assert!(leased.is_leased());
    fill(&log, 1000..4000);
    assert!(!has(&log, 13), "given up: nobody finds it any more");
    let header = read_header(&log, &leased);
    assert!(log.check_header(&leased, &header).is_ok(), "but who has a lease can still read it");
    drop(leased);
    fill(&log, 4000..4400);
}

#[test]
fn logs_that_are_asked_the_same_hold_the_same_whenever_their_writes_end() {
    let dirs = [temp(), temp()];
    let logs: Vec<Arc<Log>> = dirs.iter().map(|d| Log::open(thin(d.path())).unwrap()).collect();
    for chain in 0..400u64 {
        // As ranks do: what one of them misses all are told to store.
        let again = chain % 7 * CHAIN;
        if logs.iter().map(|log| log.lookup(&[key(again)])).min() == Some(0) && again < chain * CHAIN {
            for log in &logs {
                store_spec(log, chained(again), again, 0).unwrap();
            }
        }
        let mut late = Vec::new();
        for n in chain * CHAIN..(chain + 1) * CHAIN {
            assert!(store_spec(&logs[0], chained(n), n, 0).unwrap());
            late.extend(begin(&logs[1], chained(n)).unwrap().map(|put| (n, put)));
        }
        // The second log's puts end in the opposite order.
        while let Some((n, put)) = late.pop() {
            let crcs = write_extents(&logs[1], &put, n, 0).unwrap();
            commit(put, &crcs).unwrap();
        }
    }
    let both: Vec<Vec<u64>> = logs.iter().map(|log| policy_holds(log, 0..400 * CHAIN)).collect();
    assert!(both[0].len() > 100, "{}", both[0].len());
    assert_eq!(both[0], both[1]);
}

/// What the policy says is held; on the drive there may for a while be more.
fn policy_holds(log: &Log, keys: std::ops::Range<u64>) -> Vec<u64> {
    let lane = log.volumes[0].own().unwrap();
    let state = lane.state().unwrap();
    let chain = state.chain.as_ref().unwrap();
    keys.filter(|n| chain.holds(crate::index::tag_of(&key(*n)))).collect()
}

fn read_header(log: &Log, chunk: &crate::log::Chunk) -> Vec<u8> {
    assert!(log.drive(chunk.drive).is_some());
    let mut bytes = crate::io::AlignedBuf::zeroed(chunk.layout.header_bytes as usize).unwrap();
    chunk.file.read_at(&mut bytes, chunk.header_offset()).unwrap();
    bytes.to_vec()
}
