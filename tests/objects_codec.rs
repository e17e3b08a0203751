//! Objects of bfloat16 numbers, which are coded: they come back as they were put, take less space,
//! and a flipped bit in any of them is a miss.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod objects_world;

use std::os::unix::fs::FileExt;

use forebay::config::{Codec, Settings};
use forebay::device::HostMemory;
use forebay::key::object_key;
use forebay::log::fsck::{RawLane, deep, lanes};
use forebay::objects::{
    KeyResult, ObjectCause, ObjectGet, ObjectMemory, ObjectOptions, ObjectPut, ObjectStore, PutOptions,
};
use objects_world::*;

const MIB: usize = 1 << 20;
const BF16: PutOptions = PutOptions { ttl: None, bfloat16: true };
/// Around the length of an extent, of a part, and where coding saves nothing.
const SIZES: [usize; 11] =
    [2, 4096, 16_384, 100_000, MIB - 2, MIB, MIB + 2, 3 * MIB + 5000, 16 * MIB, 16 * MIB + 2, 1_000_001];

fn with_codec(dir: &std::path::Path, codec: Codec) -> Settings {
    let mut settings = settings(dir);
    settings.codec = codec;
    settings
}

fn open_with(dir: &std::path::Path, codec: Codec) -> ObjectStore {
    ObjectStore::open_with(options(&with_codec(dir, codec))).unwrap()
}

/// Numbers like those of KV: few exponents, and all mantissas. Every page differs.
fn numbers(key: &str, len: usize) -> Vec<u8> {
    let number = |(n, pair): (usize, &[u8])| {
        let exponent = 118 + u16::from((pair[1] ^ n as u8) % 11);
        (u16::from(pair[0] & 0x80) << 8 | exponent << 7 | u16::from(pair[0] & 0x7f)).to_le_bytes()
    };
    let page: Vec<u8> = value(key, 7, 4096).chunks(2).enumerate().flat_map(number).collect();
    let mut bytes = page.repeat(len.div_ceil(4096));
    for (n, page) in bytes.chunks_mut(4096).enumerate() {
        // Changes mantissas only.
        page[0] ^= (n & 0x7f) as u8;
        page[2] ^= (n >> 7 & 0x7f) as u8;
    }
    bytes.truncate(len);
    bytes
}

fn put_bytes(store: &ObjectStore, key: &str, bytes: Vec<u8>) -> KeyResult {
    let item = ObjectPut { key: key.into(), value: ObjectMemory::from_vec(bytes).unwrap() };
    let id = store.submit_put(vec![item], BF16).unwrap();
    store.wait(id, LONG).unwrap().results[0]
}

fn live_bytes(store: &ObjectStore) -> u64 {
    store.log().unwrap().stats().live_bytes
}

fn misfits(store: &ObjectStore) -> u64 {
    store.log().unwrap().stats().codec_misfits
}

fn check_sizes(store: &ObjectStore) {
    for size in SIZES {
        let key = format!("size {size}");
        let got = get_one(store, &key, size);
        assert!(got == Ok(numbers(&key, size)), "{size} bytes: {:?}", got.map(|b| b.len()));
    }
}

#[test]
fn every_size_comes_back_also_after_restarts_and_with_the_other_setting() {
    let dir = dir();
    let store = open_with(dir.path(), Codec::Exp4);
    for size in SIZES {
        let key = format!("size {size}");
        let result = put_bytes(&store, &key, numbers(&key, size));
        assert!(result.ok && result.len == size as u64, "{size}: {result:?}");
    }
    assert_eq!(misfits(&store), 0);
    check_sizes(&store);
    let raw: usize = SIZES.iter().sum();
    assert!(live_bytes(&store) < raw as u64 * 77 / 100, "{} of {raw}", live_bytes(&store));
    assert_eq!(
        store.list(b"size 16777", 9, None).unwrap().iter().map(|(_, len)| *len).max(),
        Some(16 * MIB as u64 + 2)
    );
    close(&store);
    let store = open_with(dir.path(), Codec::None);
    check_sizes(&store);
    assert!(put_bytes(&store, "raw", numbers("raw", 3 * MIB)).ok);
    store.flush().unwrap();
    kill(store);
    let store = open_with(dir.path(), Codec::Auto);
    check_sizes(&store);
    assert!(get_one(&store, "raw", 3 * MIB) == Ok(numbers("raw", 3 * MIB)));
    assert_eq!(store.stats().unwrap().gets.no, []);
}

#[test]
fn only_what_is_told_to_be_bfloat16_is_coded() {
    let dir = dir();
    let store = open_with(dir.path(), Codec::Exp4);
    let (first, second) = (numbers("a", 4 * MIB), numbers("b", 4 * MIB));
    let item = ObjectPut { key: b"a".to_vec(), value: ObjectMemory::from_vec(first).unwrap() };
    assert!(put(&store, vec![item]).all_ok());
    let untold = live_bytes(&store);
    assert!(untold >= 4 * MIB as u64);
    assert!(put_bytes(&store, "b", second).ok);
    assert!((live_bytes(&store) - untold) * 100 < untold * 77);
}

#[test]
fn what_does_not_fit_is_stored_as_it_is_wherever_it_lies() {
    let dir = dir();
    let store = open_with(dir.path(), Codec::Exp4);
    // One extent of five is noise, in every place; the codec pauses after the first.
    for place in 0..5 {
        let key = format!("noise at {place}");
        let mut bytes = numbers(&key, 5 * MIB);
        bytes[place * MIB..(place + 1) * MIB].copy_from_slice(&value("noise", place as u64, MIB));
        let store = ObjectStore::open_with(ObjectOptions {
            namespace: key.clone(),
            ..options(&with_codec(dir.path(), Codec::Exp4))
        })
        .unwrap();
        assert!(put_bytes(&store, &key, bytes.clone()).ok, "{key}");
        assert_eq!(misfits(&store), 1, "{key}");
        assert!(get_one(&store, &key, 5 * MIB) == Ok(bytes), "{key}");
        assert!(live_bytes(&store) >= 5 * MIB as u64);
        close(&store);
    }
    // All of it is noise, in parts that find it out at the same time.
    let bytes = value("noise", 1, 40 * MIB);
    assert!(put_bytes(&store, "large", bytes.clone()).ok);
    assert!(misfits(&store) >= 1);
    assert!(get_one(&store, "large", 40 * MIB) == Ok(bytes));
    assert_eq!((store.stats().unwrap().puts.no, store.stats().unwrap().gets.no), (vec![], vec![]));
}

#[test]
fn memory_in_many_pieces_of_odd_lengths_and_registered_memory_do_the_same() {
    let dir = dir();
    let store = open_with(dir.path(), Codec::Exp4);
    let bytes = numbers("pieces", 3 * MIB + 300);
    let cut = |bytes: &[u8]| {
        let lengths = [1, 70_001, 3, MIB, 65_537].into_iter().cycle();
        let (mut rest, mut pieces) = (bytes, Vec::new());
        for len in lengths {
            let (piece, after) = rest.split_at(len.min(rest.len()));
            pieces.push(ObjectMemory::from_vec(piece.to_vec()).unwrap());
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        ObjectMemory::of_pieces(pieces)
    };
    let id = store.submit_put(vec![ObjectPut { key: b"pieces".to_vec(), value: cut(&bytes) }], BF16).unwrap();
    assert!(store.wait(id, LONG).unwrap().all_ok());
    let target = cut(&vec![0xee; bytes.len()]);
    let id = store.submit_get(vec![ObjectGet { key: b"pieces".to_vec(), target: target.clone() }]).unwrap();
    assert!(store.wait(id, LONG).unwrap().all_ok());
    assert!(target.to_vec().unwrap() == bytes);
    let memory = HostMemory::from_vec(vec![0; 8 * MIB]).unwrap();
    store.register_memory(&memory).unwrap();
    let target = ObjectMemory::new(&memory, 4096, bytes.len()).unwrap();
    let id = store.submit_get(vec![ObjectGet { key: b"pieces".to_vec(), target: target.clone() }]).unwrap();
    assert!(store.wait(id, LONG).unwrap().all_ok());
    assert!(target.to_vec().unwrap() == bytes);
    let id = store.submit_put(vec![ObjectPut { key: b"registered".to_vec(), value: target }], BF16).unwrap();
    assert!(store.wait(id, LONG).unwrap().all_ok());
    assert!(get_one(&store, "registered", bytes.len()) == Ok(bytes));
}

#[test]
fn fsck_finds_nothing_wrong_and_a_lost_index_is_made_anew() {
    let dir = dir();
    let store = open_with(dir.path(), Codec::Exp4);
    for size in SIZES {
        let key = format!("size {size}");
        assert!(put_bytes(&store, &key, numbers(&key, size)).ok);
    }
    close(&store);
    drop(store);
    let found = lanes(dir.path()).unwrap();
    let raw: Vec<RawLane> = found.iter().map(|f| RawLane::read(f).unwrap()).collect();
    let looked = deep(&found, &raw, 0, &|_| {}).unwrap();
    assert!(looked.bad.is_empty() && looked.slots > SIZES.len() as u64, "{looked:?}");
    rebuild_index(dir.path());
    check_sizes(&open_with(dir.path(), Codec::None));
}

#[test]
fn what_reclaim_moves_is_still_whole() {
    let put_one = |store: &ObjectStore, key: &str, len| put_bytes(store, key, numbers(key, len)).ok;
    check_moves(dir().path(), Codec::Exp4, |n| 30_000 + n * 300, put_one, numbers);
}

#[test]
fn a_flipped_bit_anywhere_in_a_coded_slot_is_a_miss() {
    const OBJECTS: usize = 120;
    let dir = dir();
    let store = open_with(dir.path(), Codec::Exp4);
    let [names, values]: [Vec<_>; 2] = [
        (0..OBJECTS).map(|n| format!("turned {n}").into_bytes()).collect(),
        (0..OBJECTS).map(|n| numbers(&n.to_string(), 2 * MIB + 8000)).collect(),
    ];
    for (name, value) in names.iter().zip(&values) {
        assert!(put_bytes(&store, std::str::from_utf8(name).unwrap(), value.clone()).ok);
    }
    let log = store.log().unwrap();
    let [file] = files(dir.path(), "data.kv").try_into().unwrap();
    let opened = std::fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
    for (n, (name, value)) in names.iter().zip(&values).enumerate() {
        let chunk = log.locate(&object_key(name), LONG).unwrap();
        // Header, both whole extents and the short one. In the header what is not used counts too.
        assert_eq!(chunk.layout.extents.len(), 3);
        let bytes = chunk.layout.slot_bytes - u64::from(chunk.layout.header_offset);
        let at = chunk.header_offset() + (bytes * n as u64 / OBJECTS as u64 / 4096 * 4096 + n as u64 * 523 % 4096);
        let mut byte = [0];
        opened.read_exact_at(&mut byte, at).unwrap();
        opened.write_all_at(&[byte[0] ^ 1 << (n % 8)], at).unwrap();
        let got = get_one(&store, std::str::from_utf8(name).unwrap(), value.len());
        assert!(got == Err(ObjectCause::Corrupt), "{n}: {:?}", got.map(|got| got == *value));
    }
}
