//! The golden fixture of format version 3: a small cache as this version first wrote it. Today's
//! code must open a copy, serve exactly the bytes that were stored, and find every field where
//! docs/format.md puts it. A cache of version 1 or 2 is refused, with advice that helps.
//!
//! `tests/fixtures/format-v3/cache.txt` is the cache: one line per page that is not all zero (`PATH
//! OFFSET HEX`, trailing zeros left out), and one per file with its length (`PATH length BYTES`).
//! It was written by the ignored test [`generate`], and must never be written again for the same
//! format version: a change of format needs a new version, and a fixture of its own.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::format::crc;
use forebay::format::record::KeyKind;
use forebay::format::slot::TLV_OBJECT_NAME;
use forebay::geometry::{DType, Geometry, LayerKind, LayerSpec};
use forebay::io::{self, AlignedBuf, EngineChoice, IoOptions, Request};
use forebay::key::ChunkKey;
use forebay::log::fsck::{RawLane, RebuildOptions, lanes, rebuild};
use forebay::log::purge::{What, purge};
use forebay::log::{Clock, Log, LogOptions, Mode, OnIncompatible, PutOutcome, PutSpec, SystemClock};
use forebay::{ErrorKind, Result};

const BORN_MS: u64 = 1_760_000_000_000;
const EXPIRY_S: u32 = 4_102_444_800;
const TENANT: u64 = 0x1122_3344_5566_7788;
/// A tenant that is removed.
const GONE: u64 = 0x99aa_bbcc_ddee_ff00;
const PAGE: usize = 4096;
const SEGMENT: u64 = 64 << 10;
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/format-v3/cache.txt");
const VERSION_1: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/format-v1/cache.txt");

struct Then;

impl Clock for Then {
    fn unix_ms(&self) -> u64 {
        BORN_MS
    }
    fn boot_ns(&self) -> u64 {
        SystemClock.boot_ns()
    }
}

fn options(dir: &Path) -> LogOptions {
    let layers = vec![LayerSpec::kv(LayerKind::Full, 1, 64); 2];
    let geometry = Geometry::new("golden", DType::named("bf16").unwrap(), layers, 16).unwrap();
    LogOptions {
        capacity_bytes: 8 << 20,
        segment_bytes: Some(SEGMENT),
        io: IoOptions { engine: EngineChoice::Threads, numjobs: 1, ..IoOptions::default() },
        clock: Arc::new(Then),
        ..LogOptions::new(dir, Arc::new(geometry))
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Keys are plain, so that they are recognised in a dump.
fn key(n: u8) -> ChunkKey {
    let mut bytes = [n; 32];
    bytes[31] = 0xee;
    ChunkKey(bytes)
}

/// Payload of a key in a layer: a counter from a start of its own.
fn payload(n: u8, layer: usize, len: usize) -> Vec<u8> {
    let start = u32::from(n) * 31 + layer as u32 * 101;
    (0..len as u32).map(|i| (start + i * 3 + i / 256) as u8).collect()
}

fn chunk(n: u8) -> PutSpec {
    PutSpec::chunk(key(n), key(n.wrapping_sub(1)), 16, u32::from(n))
}

fn store_chunk(log: &Log, spec: PutSpec) {
    let n = spec.key.0[0];
    store(log, spec, |layer, len| payload(n, layer, len));
}

fn store(log: &Log, spec: PutSpec, bytes: impl Fn(usize, usize) -> Vec<u8>) {
    let PutOutcome::Started(put) = log.begin_put_within(spec, Duration::from_secs(10)).unwrap() else { panic!() };
    let mut crcs = Vec::new();
    for (layer, e) in put.layout().extents.iter().enumerate() {
        let bytes = bytes(layer, e.len as usize);
        let mut buf = AlignedBuf::zeroed(e.padded_len as usize).unwrap();
        buf[..bytes.len()].copy_from_slice(&bytes);
        crcs.push(crc(&bytes));
        let request = Request::write(Arc::clone(put.file()), put.slot_offset() + e.offset, buf.into(), drop);
        io::wait(&*log.drive(put.drive()).unwrap().write, request).result.unwrap();
    }
    let (tx, rx) = std::sync::mpsc::channel();
    put.commit(&crcs, Box::new(move |r| tx.send(r).unwrap()));
    rx.recv_timeout(Duration::from_secs(20)).unwrap().unwrap();
}

/// What the fixture holds, in the order in which it was stored. Sequences count from 1, and floors
/// take one too.
fn fill(log: &Log) {
    store_chunk(log, chunk(7));
    log.clear().unwrap();
    let first = PutSpec {
        tenant: TENANT,
        start_position: 4096,
        expiry_s: EXPIRY_S,
        group: 3,
        // Unknown to the reader, which skips it.
        tlvs: vec![(1, (100..116u32).flat_map(u32::to_le_bytes).collect())],
        ..chunk(1)
    };
    store_chunk(log, first);
    for n in [2, 3, 4] {
        store_chunk(log, chunk(n));
    }
    log.seal(soon()).unwrap();
    for n in [4, 3] {
        assert_eq!(log.remove(&[key(n)]).unwrap(), [true], "from a sealed segment: listed there");
    }
    store_chunk(log, PutSpec { tokens: 5, ..chunk(5) });
    store_chunk(log, PutSpec { tenant: GONE, ..chunk(6) });
    store_chunk(log, chunk(8));
    let object = PutSpec {
        tlvs: vec![(TLV_OBJECT_NAME, b"an object".to_vec())],
        ..PutSpec::object(key(0xa0), 1128, KeyKind::Object)
    };
    store(log, object, |_, len| payload(0xa0, 0, len));
    log.flush().unwrap();
    assert_eq!(log.remove(&[key(8)]).unwrap(), [true], "from an open one: a record");
    assert_eq!(log.remove_tenant(GONE).unwrap(), 1);
    log.flush().unwrap();
}

fn read(log: &Log, chunk: &forebay::log::Chunk, offset: u64, len: usize) -> Vec<u8> {
    let buf = AlignedBuf::zeroed(len.next_multiple_of(PAGE)).unwrap();
    let c = io::wait(&*log.drive(0).unwrap().read, Request::read(Arc::clone(&chunk.file), offset, buf.into(), drop));
    c.result.unwrap();
    c.buf.unwrap().as_slice()[..len].to_vec()
}

/// The layers of a chunk, or the one object.
fn load(log: &Log, key: &ChunkKey) -> Option<Vec<Vec<u8>>> {
    let chunk = log.locate(key, Duration::from_secs(10))?;
    let bytes = read(log, &chunk, chunk.header_offset(), chunk.layout.header_bytes as usize);
    let header = log.check_header(&chunk, &bytes).unwrap();
    let layer = |e: &forebay::format::slot::LayerEntry| {
        let bytes = read(log, &chunk, chunk.slot_offset + e.offset, e.len as usize);
        assert_eq!(crc(&bytes), e.crc);
        bytes
    };
    let layers: Vec<Vec<u8>> = header.layers.iter().map(layer).collect();
    Some(layers)
}

fn assert_golden(log: &Log) {
    let full = |n| Some((0..2).map(|layer| payload(n, layer, 2048)).collect::<Vec<_>>());
    for n in [1, 2] {
        assert_eq!(load(log, &key(n)), full(n));
    }
    assert_eq!(load(log, &key(5)), Some((0..2).map(|layer| payload(5, layer, 640)).collect()), "partial");
    assert_eq!(log.lookup_partials(&key(4)), [5]);
    assert_eq!(load(log, &key(0xa0)), Some(vec![payload(0xa0, 0, 1128)]), "object");
    for (n, why) in [(3, "removed"), (4, "removed"), (8, "removed"), (7, "cleared"), (6, "its tenant was removed")] {
        assert!(!log.contains(&key(n)) && load(log, &key(n)).is_none(), "{n}: {why}");
    }
}

/// Files that are part of the format, by their path below the cache directory.
fn format_files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(folder) = open.pop() {
        for path in fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == "kv")
                || ["BUDGET", "FLOORS"].iter().any(|n| path.ends_with(n))
            {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Writes the fixture anew: `cargo test --test format_v3 -- --ignored generate`.
#[test]
#[ignore = "writes the fixture"]
fn generate() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // Without threads nobody gives the removed tenant's space back, and its floor stays.
    let log = Log::open(LogOptions { foreground: true, ..options(dir.path()) }).unwrap();
    fill(&log);
    assert_golden(&log);
    log.abandon();
    let mut text = String::new();
    for path in format_files(dir.path()) {
        let bytes = fs::read(&path).unwrap();
        let name = path.strip_prefix(dir.path()).unwrap().display().to_string();
        text += &format!("{name} length {}\n", bytes.len());
        for (i, page) in bytes.chunks(PAGE).enumerate() {
            let end = page.iter().rposition(|b| *b != 0).map_or(0, |at| at + 1);
            if end > 0 {
                let hex: String = page[..end].iter().map(|b| format!("{b:02x}")).collect();
                text += &format!("{name} {} {hex}\n", i * PAGE);
            }
        }
    }
    fs::write(FIXTURE, text).unwrap();
}

/// A copy of a fixture; its files by their names.
fn unpack(fixture: &str, dir: &Path) -> BTreeMap<String, PathBuf> {
    let mut files = BTreeMap::new();
    for line in fs::read_to_string(fixture).unwrap().lines() {
        let [name, at, what] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let path = dir.join(name);
        if at == "length" {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            File::create(&path).unwrap().set_len(what.parse().unwrap()).unwrap();
            files.insert(path.file_name().unwrap().to_str().unwrap().to_owned(), path);
        } else {
            let bytes: Vec<u8> =
                (0..what.len()).step_by(2).map(|i| u8::from_str_radix(&what[i..i + 2], 16).unwrap()).collect();
            File::options().write(true).open(path).unwrap().write_all_at(&bytes, at.parse().unwrap()).unwrap();
        }
    }
    files
}

#[test]
fn todays_code_serves_what_version_2_stored() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    unpack(FIXTURE, dir.path());
    assert_golden(&Log::open(LogOptions { mode: Mode::Ro, ..options(dir.path()) }).unwrap());
    for _ in 0..2 {
        let log = Log::open(options(dir.path())).unwrap();
        assert_golden(&log);
        log.close(soon()).unwrap();
    }
}

#[test]
fn todays_code_restores_version_2_from_its_slots() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let files = unpack(FIXTURE, dir.path());
    fs::remove_file(&files["index.kv"]).unwrap();
    let lane = lanes(dir.path()).unwrap().pop().unwrap();
    let rebuilt = rebuild(&lane, None, RebuildOptions { dry_run: false, backup: true }, &|_| ()).unwrap();
    // Three in the first segment, of which one lies below the floor of everything; two chunks and
    // an object in the second.
    assert_eq!((rebuilt.chunks, rebuilt.left_out.len()), (6, 0), "{rebuilt:?}");
    assert_golden(&Log::open(options(dir.path())).unwrap());
}

/// Bytes of a structure, read as docs/format.md says.
struct Bytes(Vec<u8>);

impl Bytes {
    fn at(file: &Path, offset: u64, len: usize) -> Self {
        let mut bytes = vec![0; len];
        File::open(file).unwrap().read_exact_at(&mut bytes, offset).unwrap();
        Self(bytes)
    }
    fn number(&self, at: usize, len: usize) -> u64 {
        self.0[at..at + len].iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))
    }
    fn slice(&self, at: usize, len: usize) -> &[u8] {
        &self.0[at..at + len]
    }
    /// Checks numbers: offset, size, value.
    fn expect(&self, what: &str, fields: &[(usize, usize, u64)]) {
        for (at, len, value) in fields {
            assert_eq!(self.number(*at, *len), *value, "{what}: field at {at}");
        }
    }
    /// Checks a CRC at `at` over `len` bytes, with its own four taken as zero.
    fn expect_crc(&self, what: &str, at: usize, len: usize) {
        let mut bytes = self.0[..len].to_vec();
        bytes[at..at + 4].fill(0);
        assert_eq!(u64::from(crc32fast::hash(&bytes)), self.number(at, 4), "{what}: CRC");
    }
}

#[test]
fn every_field_lies_where_the_documentation_says() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let files = unpack(FIXTURE, dir.path());
    let (index, data) = (&files["index.kv"], &files["data.kv"]);
    let budget = Bytes::at(&files["BUDGET"], 0, PAGE);
    assert_eq!(budget.slice(0, 8), b"FBBUDGT1");
    budget.expect_crc("BUDGET", 8, PAGE);
    budget.expect("BUDGET", &[(12, 4, 3), (32, 8, BORN_MS), (40, 4, 0)]);

    let sb = Bytes::at(index, PAGE as u64, PAGE);
    assert_eq!(sb.slice(0, 8), b"FBSUPER1");
    sb.expect_crc("superblock", 8, PAGE);
    sb.expect("superblock", &[(12, 4, 3), (16, 4, 0), (20, 4, 0), (24, 4, 0), (28, 4, 16), (32, 8, 1), (40, 8, 1)]);
    sb.expect("superblock", &[(144, 8, SEGMENT), (160, 8, 8192), (168, 4, 128), (176, 8, REGIONS), (184, 8, BORN_MS)]);
    assert_eq!(sb.slice(64, 16), budget.slice(16, 16), "drive id");
    let geometry = options(dir.path()).geometry;
    assert_eq!((sb.slice(80, 32), sb.slice(192, 7)), (geometry.fingerprint().0.as_slice(), b"golden\0".as_slice()));
    assert_eq!(sb.slice(112, 32), geometry.layers_digest());
    assert_eq!(sb.slice(320, 19), b"pp0of1-tp0of1-cp0of");
    let lane = sb.slice(48, 16);
    // One page, one of the list, and as many records as fit in what is left.
    assert!(sb.number(152, 8) >= 3 * PAGE as u64 && sb.number(152, 8).is_multiple_of(PAGE as u64));

    floors(&files["FLOORS"]);
    let slot = first_slot(data, lane);
    sealed_segment(index, data, (lane, &slot));
    open_segment(index, data, lane, sb.number(152, 8));
}

/// Where the regions begin: behind two superblocks and the ring.
const REGIONS: u64 = (2 + 128) * PAGE as u64;

/// `clear` took the sequence 2, the removal of the tenant 11.
fn floors(file: &Path) {
    assert_eq!(fs::metadata(file).unwrap().len(), 32 << 10);
    for copy in [0, 16 << 10] {
        let floors = Bytes::at(file, copy, 16 << 10);
        assert_eq!(floors.slice(0, 8), b"FBFLOOR1");
        floors.expect_crc("FLOORS", 8, 16 << 10);
        floors.expect("FLOORS", &[(12, 4, 3), (16, 8, 2), (24, 8, 1 << 40 | 2), (32, 4, 1)]);
        floors.expect("its tenant", &[(64, 8, GONE), (72, 8, 1 << 40 | 11), (80, 8, 0)]);
    }
}

/// The slot of the chunk with all fields, the second of its segment.
fn first_slot(data: &Path, lane: &[u8]) -> Bytes {
    let slot = Bytes::at(data, 3 * PAGE as u64, 3 * PAGE);
    assert_eq!(slot.slice(0, 8), b"FBSLOT01");
    slot.expect_crc("slot header", 12, PAGE);
    slot.expect("slot header", &[(8, 4, 4096), (16, 4, 0), (20, 4, 0), (24, 4, 0), (28, 4, 2), (32, 2, 1), (34, 2, 3)]);
    slot.expect("slot header", &[(36, 4, 2), (104, 8, TENANT), (112, 4, 16), (116, 4, 1), (120, 8, 4096), (128, 4, 0)]);
    slot.expect("slot header", &[(132, 2, 0), (134, 2, 1), (136, 4, 2), (144, 8, 4096), (152, 8, BORN_MS)]);
    slot.expect("slot header", &[(160, 8, u64::from(EXPIRY_S)), (168, 8, 0), (192, 8, 1 << 40 | 3), (200, 4, 0)]);
    slot.expect("slot header", &[(204, 4, 1), (208, 4, 3), (212, 4, 3), (232, 4, 512 + 32), (236, 4, 8 + 64)]);
    assert_eq!((slot.slice(40, 32), slot.slice(72, 32)), (key(1).0.as_slice(), key(0).0.as_slice()));
    assert_eq!(slot.slice(216, 16), lane);
    for layer in 0..2 {
        let (at, bytes) = (512 + 16 * layer, payload(1, layer, 2048));
        let offset = PAGE as u64 * (layer as u64 + 1);
        slot.expect("layer table", &[(at, 8, offset), (at + 8, 4, 2048), (at + 12, 4, crc32fast::hash(&bytes).into())]);
        assert_eq!(slot.slice(offset as usize, 2048), bytes);
        assert!(slot.slice(offset as usize + 2048, 2048).iter().all(|b| *b == 0), "padding");
    }
    slot.expect("TLV", &[(544, 2, 1), (546, 2, 0), (548, 4, 64), (552, 4, 100), (552 + 60, 4, 115)]);
    slot
}

/// The first segment: its region with the list of what is gone, and a hole where that was.
fn sealed_segment(index: &Path, data: &Path, (lane, slot): (&[u8], &Bytes)) {
    let region = Bytes::at(index, REGIONS, 2 * PAGE + 128 * 5);
    assert_eq!((region.slice(0, 8), region.slice(16, 16)), (b"FBSEAL01".as_slice(), lane));
    region.expect_crc("region", 8, PAGE);
    region.expect("region", &[(12, 4, 1), (32, 4, 0), (36, 4, 1), (40, 4, 5), (48, 8, 1 << 40 | 1)]);
    let crcs: u64 = (0..5).map(|n| Bytes(region.slice(2 * PAGE + n * 128, 4).to_vec()).number(0, 4)).sum();
    region.expect("region", &[(56, 8, 1 << 40 | 6), (64, 8, BORN_MS), (72, 8, crcs)]);

    let list = Bytes(region.slice(PAGE, PAGE).to_vec());
    assert_eq!((list.slice(0, 8), list.slice(16, 16)), (b"FBGONE01".as_slice(), lane));
    list.expect_crc("list", 8, PAGE);
    // Both were unreadable durably when they were listed.
    list.expect("list", &[(12, 4, 2), (32, 4, 0), (36, 4, 1), (40, 4, 2), (64, 4, 12), (68, 4, 9), (72, 4, 0)]);
    for page in [9, 12] {
        let gone = Bytes::at(data, page * PAGE as u64, PAGE);
        assert!(gone.0.iter().all(|b| *b == 0), "a removed chunk's header");
    }

    let record = Bytes(region.slice(2 * PAGE + 128, 128).to_vec());
    assert_eq!(u64::from(crc32fast::hash(record.slice(4, 124))), record.number(0, 4), "record: CRC");
    assert_eq!((record.slice(8, 32), record.slice(40, 32)), (key(1).0.as_slice(), key(0).0.as_slice()));
    record.expect("record", &[(4, 1, 1), (5, 1, 1), (6, 2, 3), (72, 8, 1 << 40 | 3), (80, 8, TENANT), (88, 4, 0)]);
    record.expect("record", &[(92, 4, 1), (96, 4, 3), (100, 4, 3), (104, 4, slot.number(12, 4)), (108, 3, 16)]);
    // Not used between store and seal; depth 1.
    record.expect("record", &[(111, 1, 0), (112, 4, u64::from(EXPIRY_S)), (116, 5, 4096), (121, 3, 1), (124, 4, 0)]);
}

/// The second segment: the partial chunk, that of the removed tenant, a removed one, the object.
/// Their records are in the ring only.
fn open_segment(index: &Path, data: &Path, lane: &[u8], region_bytes: u64) {
    let at = |page: u64| Bytes::at(data, SEGMENT + page * PAGE as u64, PAGE);
    at(0).expect("partial chunk", &[(112, 4, 5), (144, 8, 1280), (200, 4, 1), (208, 4, 0), (212, 4, 3)]);
    at(3).expect("the removed tenant's", &[(104, 8, GONE), (192, 8, 1 << 40 | 8), (200, 4, 1), (208, 4, 3)]);
    assert!(at(6).0.iter().all(|b| *b == 0), "the removed chunk's header");
    let object = at(9);
    object.expect("object", &[(32, 2, 3), (36, 4, 1), (144, 8, 1128), (528, 2, 2), (532, 4, 9)]);
    assert_eq!((object.slice(40, 32), object.slice(536, 9)), (key(0xa0).0.as_slice(), b"an object".as_slice()));

    let mut records = Vec::new();
    for place in 0..128 {
        let page = Bytes::at(index, (2 + place) * PAGE as u64, PAGE);
        if page.number(0, 8) == 0 {
            continue;
        }
        assert_eq!((page.slice(0, 8), page.slice(16, 16)), (b"FBJRNL01".as_slice(), lane));
        page.expect("journal page", &[(8, 8, place)]);
        page.expect_crc("journal page", 36, 64);
        for i in 0..page.number(32, 4) as usize {
            let record = Bytes(page.slice(64 + i * 128, 128).to_vec());
            assert_eq!(u64::from(crc32fast::hash(record.slice(4, 124))), record.number(0, 4), "record: CRC");
            records.push(record);
        }
    }
    records.retain(|record| record.number(88, 4) == 1);
    let told: Vec<_> = records.iter().map(|r| (r.number(4, 1), r.number(5, 1), r.number(96, 4), r.0[8])).collect();
    assert_eq!(told[..4], [(1, 1, 0, 5), (1, 1, 3, 6), (1, 1, 6, 8), (1, 3, 9, 0xa0)]);
    assert_eq!(told[4..], [(2, 1, 6, 8)], "the slot of the third is gone");
    records[0].expect("the partial chunk's", &[(72, 8, 1 << 40 | 7), (108, 3, 5), (116, 5, 1280), (121, 3, 5)]);
    records[3].expect("the object's", &[(72, 8, 1 << 40 | 10), (100, 4, 2), (116, 5, 1128), (124, 4, 0)]);
    let region = Bytes::at(index, REGIONS + region_bytes, 8);
    assert_eq!(region.number(0, 8), 0, "not sealed yet");
}

#[test]
fn what_is_left_of_the_fixture_is_undamaged() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    unpack(FIXTURE, dir.path());
    let raw = RawLane::read(&lanes(dir.path()).unwrap()[0]).unwrap();
    assert!(raw.damage.is_empty(), "{:?}", raw.damage);
    assert_eq!((raw.counts.sealed, raw.counts.open, raw.counts.puts, raw.counts.gone), (1, 1, 6, 3));
    assert_eq!((raw.floors.everything, raw.floors.tenants.as_slice()), (1 << 40 | 2, &[(GONE, 1 << 40 | 11)][..]));
    assert!(fs::metadata(FIXTURE).unwrap().len() < 1 << 20);
}

/// A new chunk can be stored and served, and nothing of the old cache is.
fn assert_anew(log: &Log) {
    assert!((1..=8).all(|n| !log.contains(&key(n))));
    store_chunk(log, chunk(1));
    assert_eq!(load(log, &key(1)), Some((0..2).map(|layer| payload(1, layer, 2048)).collect()));
}

#[test]
fn a_cache_of_version_1_is_refused_until_it_is_deleted() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    unpack(VERSION_1, dir.path());
    let refused = |opened: Result<Arc<Log>>| {
        let e = opened.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Incompatible, "{e}");
        let text = e.to_string();
        assert!(
            ["version 1", "`forebay purge", "--all`", "on_incompatible"].iter().all(|w| text.contains(w)),
            "{text}"
        );
    };
    refused(Log::open(options(dir.path())));
    refused(Log::open(LogOptions { mode: Mode::Ro, ..options(dir.path()) }));
    let lane = lanes(dir.path()).unwrap().pop().unwrap();
    assert_eq!(RawLane::read(&lane).unwrap_err().kind(), ErrorKind::Incompatible);
    let error = rebuild(&lane, None, RebuildOptions { dry_run: false, backup: true }, &|_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Incompatible, "{error}");

    let purged = purge(dir.path(), &lane.namespace, &lane.shard, What::All).unwrap();
    assert_eq!((purged.lanes_deleted, purged.lanes_in_use), (1, 0));
    assert!(purged.unreadable.is_empty() && purged.freed_bytes > 0, "{purged:?}");
    assert_anew(&Log::open(options(dir.path())).unwrap());
}

#[test]
fn a_cache_of_version_1_is_made_anew_where_the_settings_say_so() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    unpack(VERSION_1, dir.path());
    let recreate = LogOptions { on_incompatible: OnIncompatible::Recreate, ..options(dir.path()) };
    let log = Log::open(recreate).unwrap();
    assert_anew(&log);
    log.close(soon()).unwrap();
    assert!(Log::open(options(dir.path())).unwrap().contains(&key(1)), "it is of today's version now");
}
