//! The golden fixture of format version 1: a small cache as this version first wrote it. Today's code must open a copy, serve
//! exactly the bytes that were stored, and find every field where docs/format.md puts it.
//!
//! `tests/fixtures/format-v1/cache.txt` is the cache: one line per page that is not all zero (`PATH OFFSET HEX`, trailing zeros
//! left out), and one per file with its length (`PATH length BYTES`). It was written by the ignored test [`generate`], and must
//! never be written again for the same format version: a change of format needs a new version, and a fixture of its own.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::format::crc;
use forebay::format::record::KeyKind;
use forebay::geometry::{DType, Geometry, LayerKind, LayerSpec};
use forebay::io::{self, AlignedBuf, EngineChoice, IoOptions, Request};
use forebay::key::ChunkKey;
use forebay::log::fsck::{RawLane, RebuildOptions, lanes, rebuild};
use forebay::log::{Clock, Log, LogOptions, Member, Mode, PutOutcome, PutSpec, SystemClock, pack};

const BORN_MS: u64 = 1_760_000_000_000;
const EXPIRY_S: u32 = 4_102_444_800;
const TENANT: u64 = 0x1122_3344_5566_7788;
const PAGE: usize = 4096;
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/format-v1/cache.txt");

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
        segment_bytes: Some(64 << 10),
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

/// Payload of a version of a key in a layer: a counter from a start of its own.
fn payload(n: u8, version: u8, layer: usize, len: usize) -> Vec<u8> {
    let start = u32::from(n) * 31 + u32::from(version) * 7 + layer as u32 * 101;
    (0..len as u32).map(|i| (start + i * 3 + i / 256) as u8).collect()
}

fn chunk(n: u8) -> PutSpec {
    PutSpec::chunk(key(n), key(n.wrapping_sub(1)), 16, u32::from(n))
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

/// What the fixture holds, in the order in which it was stored.
fn fill(log: &Log) {
    let first = PutSpec {
        tenant: TENANT,
        start_position: 4096,
        expiry_s: EXPIRY_S,
        group: 3,
        token_ids: Some((100..116).collect()),
        ..chunk(1)
    };
    store(log, first, |layer, len| payload(1, 0, layer, len));
    for n in [2, 3, 4] {
        store(log, chunk(n), |layer, len| payload(n, 0, layer, len));
    }
    log.remove(&[key(3)]).unwrap();
    store(log, chunk(3), |layer, len| payload(3, 1, layer, len));
    log.seal(soon()).unwrap();
    log.remove(&[key(4)]).unwrap();
    let partial = PutSpec { tokens: 5, ..chunk(5) };
    store(log, partial, |layer, len| payload(5, 0, layer, len));
    let members = vec![
        Member { key: key(0xa1), sub_offset: 0, length: 100 },
        Member { key: key(0xa2), sub_offset: 128, length: 1000 },
    ];
    store(log, PutSpec::pack(key(0xa0), 1128, members), |_, len| payload(0xa0, 0, 0, len));
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
    if header.key_kind != KeyKind::ObjectPack {
        return Some(layers);
    }
    let member = pack::members(&header).into_iter().find(|m| m.key == *key).unwrap();
    let from = member.sub_offset as usize;
    Some(vec![layers[0][from..from + member.length as usize].to_vec()])
}

fn assert_golden(log: &Log) {
    let full = |n, version| Some((0..2).map(|layer| payload(n, version, layer, 2048)).collect::<Vec<_>>());
    assert_eq!(load(log, &key(1)), full(1, 0));
    assert_eq!(load(log, &key(2)), full(2, 0));
    assert_eq!(load(log, &key(3)), full(3, 1), "overwritten");
    assert_eq!(load(log, &key(4)), None, "removed");
    assert_eq!(load(log, &key(5)), Some((0..2).map(|layer| payload(5, 0, layer, 640)).collect()), "partial");
    assert_eq!(log.lookup_partials(&key(4)), [5]);
    let packed = payload(0xa0, 0, 0, 1128);
    assert_eq!(load(log, &key(0xa1)), Some(vec![packed[..100].to_vec()]));
    assert_eq!(load(log, &key(0xa2)), Some(vec![packed[128..].to_vec()]));
    assert_eq!(load(log, &key(0xa0)), None, "a pack is not an object");
}

/// Files that are part of the format, by their path below the cache directory.
fn format_files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(folder) = open.pop() {
        for path in fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == "kv") || path.ends_with("BUDGET") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Writes the fixture anew: `cargo test --test format_v1 -- --ignored generate`.
#[test]
#[ignore = "writes the fixture"]
fn generate() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let log = Log::open(options(dir.path())).unwrap();
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

/// A copy of the fixture; its files by their names.
fn unpack(dir: &Path) -> BTreeMap<String, PathBuf> {
    let mut files = BTreeMap::new();
    for line in fs::read_to_string(FIXTURE).unwrap().lines() {
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
fn todays_code_serves_what_version_1_stored() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    unpack(dir.path());
    assert_golden(&Log::open(LogOptions { mode: Mode::ReadOnly, ..options(dir.path()) }).unwrap());
    for _ in 0..2 {
        let log = Log::open(options(dir.path())).unwrap();
        assert_golden(&log);
        log.close(soon()).unwrap();
    }
}

#[test]
fn todays_code_restores_version_1_from_its_slots() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let files = unpack(dir.path());
    fs::remove_file(&files["index.kv"]).unwrap();
    let lane = lanes(dir.path()).unwrap().pop().unwrap();
    let rebuilt = rebuild(&lane, None, RebuildOptions { dry_run: false, backup: true }, &|_| ()).unwrap();
    assert_eq!((rebuilt.chunks, rebuilt.tombstones, rebuilt.left_out.len()), (8, 1, 0), "{rebuilt:?}");
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
    let files = unpack(dir.path());
    let (index, data) = (&files["index.kv"], &files["data.kv"]);
    let budget = Bytes::at(&files["BUDGET"], 0, PAGE);
    assert_eq!(budget.slice(0, 8), b"FBBUDGT1");
    budget.expect_crc("BUDGET", 8, PAGE);
    budget.expect("BUDGET", &[(12, 4, 1), (32, 8, BORN_MS), (40, 4, 0)]);

    let sb = Bytes::at(index, PAGE as u64, PAGE);
    assert_eq!(sb.slice(0, 8), b"FBSUPER1");
    sb.expect_crc("superblock", 8, PAGE);
    let regions = (2 + 128) * PAGE as u64;
    sb.expect("superblock", &[(12, 4, 1), (16, 4, 0), (20, 4, 0), (24, 4, 0), (28, 4, 16), (32, 8, 1), (40, 8, 1)]);
    sb.expect("superblock", &[(144, 8, 64 << 10), (160, 8, 8192), (168, 4, 128), (176, 8, regions), (184, 8, BORN_MS)]);
    assert_eq!(sb.slice(64, 16), budget.slice(16, 16), "drive id");
    let fingerprint = options(dir.path()).geometry.fingerprint().0;
    assert_eq!((sb.slice(80, 32), sb.slice(192, 7)), (fingerprint.as_slice(), b"golden\0".as_slice()));
    assert_eq!(sb.slice(320, 19), b"pp0of1-tp0of1-cp0of");
    let lane = sb.slice(48, 16);
    let region_bytes = sb.number(152, 8);

    let slot = Bytes::at(data, 0, 3 * PAGE);
    assert_eq!(slot.slice(0, 8), b"FBSLOT01");
    slot.expect_crc("slot header", 12, PAGE);
    slot.expect("slot header", &[(8, 4, 4096), (16, 4, 0), (20, 4, 0), (24, 4, 0), (28, 4, 1), (32, 2, 1), (34, 2, 3)]);
    slot.expect("slot header", &[(36, 4, 2), (104, 8, TENANT), (112, 4, 16), (116, 4, 1), (120, 8, 4096), (128, 4, 0)]);
    slot.expect("slot header", &[(132, 2, 0), (134, 2, 1), (136, 4, 2), (144, 8, 4096), (152, 8, BORN_MS)]);
    slot.expect("slot header", &[(160, 8, u64::from(EXPIRY_S)), (168, 8, 0), (192, 8, 1 << 40 | 1), (200, 4, 0)]);
    slot.expect("slot header", &[(204, 4, 1), (208, 4, 0), (212, 4, 3), (232, 4, 512 + 32), (236, 4, 8 + 64)]);
    assert_eq!((slot.slice(40, 32), slot.slice(72, 32)), (key(1).0.as_slice(), key(0).0.as_slice()));
    assert_eq!(slot.slice(216, 16), lane);
    for layer in 0..2 {
        let (at, bytes) = (512 + 16 * layer, payload(1, 0, layer, 2048));
        let offset = PAGE as u64 * (layer as u64 + 1);
        slot.expect("layer table", &[(at, 8, offset), (at + 8, 4, 2048), (at + 12, 4, crc32fast::hash(&bytes).into())]);
        assert_eq!(slot.slice(offset as usize, 2048), bytes);
        assert!(slot.slice(offset as usize + 2048, 2048).iter().all(|b| *b == 0), "padding");
    }
    slot.expect("TLV", &[(544, 2, 1), (546, 2, 0), (548, 4, 64), (552, 4, 100), (552 + 60, 4, 115)]);

    let region = Bytes::at(index, regions, PAGE + 192 * 5);
    assert_eq!((region.slice(0, 8), region.slice(16, 16)), (b"FBSEAL01".as_slice(), lane));
    region.expect_crc("region", 8, PAGE);
    region.expect("region", &[(12, 4, 1), (32, 4, 0), (36, 4, 1), (40, 4, 5), (48, 8, 1 << 40 | 1)]);
    region.expect("region", &[(56, 8, 1 << 40 | 5), (64, 8, BORN_MS)]);
    let record = Bytes(region.slice(PAGE, 192).to_vec());
    assert_eq!(u64::from(crc32fast::hash(record.slice(4, 188))), record.number(0, 4), "record: CRC");
    record
        .expect("record", &[(4, 1, 1), (5, 1, 1), (6, 2, 3), (72, 8, 1 << 40 | 1), (80, 4, 0), (84, 4, 1), (88, 4, 0)]);
    record.expect("record", &[(92, 4, 3), (96, 4, slot.number(12, 4)), (100, 4, 16), (104, 8, TENANT), (112, 4, 1)]);
    record.expect("record", &[(120, 8, u64::from(EXPIRY_S)), (128, 8, 4096), (136, 4, 0)]);
    assert_eq!((record.slice(8, 32), record.slice(40, 32)), (key(1).0.as_slice(), key(0).0.as_slice()));

    control_pack_and_journal(index, data, lane, region_bytes);
}

/// The second segment: a control slot, the partial chunk, the pack; their records are in the ring only.
fn control_pack_and_journal(index: &Path, data: &Path, lane: &[u8], region_bytes: u64) {
    let control = Bytes::at(data, 64 << 10, PAGE);
    assert_eq!(control.slice(0, 8), b"FBSLOT01");
    control.expect("control slot", &[(32, 2, 6), (36, 4, 0), (200, 4, 1), (208, 4, 0), (512, 2, 4), (516, 4, 192)]);
    control.expect("its tombstone", &[(520 + 4, 1, 2), (520 + 72, 8, 1 << 40 | 6), (520 + 80, 4, 1)]);
    assert_eq!(control.slice(520 + 8, 32), key(4).0.as_slice());
    let pages = control.number(212, 4);
    let partial = Bytes::at(data, (64 << 10) + pages * PAGE as u64, PAGE);
    partial.expect("partial chunk", &[(112, 4, 5), (144, 8, 1280), (200, 4, 1), (208, 4, pages)]);
    let at = (64 << 10) + (pages + partial.number(212, 4)) * PAGE as u64;
    let packed = Bytes::at(data, at, PAGE);
    packed.expect("pack", &[(32, 2, 5), (36, 4, 1), (144, 8, 1128), (528, 2, 3), (532, 4, 80)]);
    assert_eq!((packed.slice(536, 32), packed.number(568, 4), packed.number(572, 4)), (key(0xa1).0.as_slice(), 0, 100));
    packed.expect("its second member", &[(576 + 32, 4, 128), (576 + 36, 4, 1000)]);

    let mut kinds = Vec::new();
    for place in 0..128 {
        let page = Bytes::at(index, (2 + place) * PAGE as u64, PAGE);
        if page.number(0, 8) == 0 {
            continue;
        }
        assert_eq!((page.slice(0, 8), page.slice(16, 16)), (b"FBJRNL01".as_slice(), lane));
        page.expect("journal page", &[(8, 8, place)]);
        page.expect_crc("journal page", 36, 64);
        for i in 0..page.number(32, 4) as usize {
            kinds.push((page.number(64 + i * 192 + 80, 4), page.number(64 + i * 192 + 4, 1)));
        }
    }
    kinds.retain(|(segment, _)| *segment == 1);
    assert_eq!(kinds, [(1, 2), (1, 1), (1, 1), (1, 1)], "a tombstone, the partial chunk, two packed objects");
    let region = Bytes::at(index, (2 + 128) * PAGE as u64 + region_bytes, 8);
    assert_eq!(region.number(0, 8), 0, "not sealed yet");
}

#[test]
fn what_is_left_of_the_fixture_is_undamaged() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    unpack(dir.path());
    let raw = RawLane::read(&lanes(dir.path()).unwrap()[0]).unwrap();
    assert!(raw.damage.is_empty(), "{:?}", raw.damage);
    assert!(fs::metadata(FIXTURE).unwrap().len() < 1 << 20);
}
