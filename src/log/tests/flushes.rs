//! What is durable before anything relies on it: each copy of the floors before the next, and the
//! index of a lane that is adopted.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::support::*;
use crate::error::{Error, ErrorKind, Result};
use crate::format::floors::FLOORS_BYTES;
use crate::io::{self, Disk, DiskFile, Fault, Faulty, FileOptions, Mount, Op, Request, mount};
use crate::log::{Log, LogOptions, Turn};

/// A disk with one file, which records the writes and flushes of it.
struct OneFile {
    name: &'static str,
    bytes: Mutex<Option<Vec<u8>>>,
    done: Mutex<Vec<String>>,
    fails: AtomicBool,
}

struct File(Arc<OneFile>);

struct Mounted(Arc<OneFile>);

fn one_file(dir: &Path, name: &'static str, bytes: Option<Vec<u8>>) -> (Arc<OneFile>, Mount) {
    let (bytes, done, fails) = (Mutex::new(bytes), Mutex::default(), AtomicBool::new(false));
    let file = Arc::new(OneFile { name, bytes, done, fails });
    (Arc::clone(&file), mount(dir, Arc::new(Mounted(file))))
}

impl Disk for Mounted {
    fn takes(&self, path: &Path) -> bool {
        path.ends_with(self.0.name)
    }

    fn open(&self, path: &Path, options: FileOptions) -> Result<Arc<dyn DiskFile>> {
        let mut bytes = self.0.bytes.lock();
        if bytes.is_none() && !options.create {
            return Err(Error::new(ErrorKind::NotFound, "no such file").at(path));
        }
        bytes.get_or_insert_default();
        Ok(Arc::new(File(Arc::clone(&self.0))))
    }

    fn remove(&self, _: &Path) -> Result<()> {
        self.0.bytes.lock().take();
        Ok(())
    }

    fn len(&self, _: &Path) -> Option<u64> {
        self.0.bytes.lock().as_ref().map(|b| b.len() as u64)
    }

    fn used_bytes(&self) -> u64 {
        0
    }
}

impl DiskFile for File {
    fn bytes(&self) -> u64 {
        self.0.bytes.lock().as_ref().map_or(0, |b| b.len() as u64)
    }

    fn allocated_bytes(&self) -> u64 {
        self.bytes()
    }

    fn is_named(&self) -> bool {
        true
    }

    fn set_len(&self, len: u64) -> Result<()> {
        self.0.bytes.lock().get_or_insert_default().resize(len as usize, 0);
        Ok(())
    }

    fn allocate(&self, _: u64, _: u64) -> Result<()> {
        Ok(())
    }

    fn punch_hole(&self, _: u64, _: u64) -> Result<()> {
        Ok(())
    }

    fn sync_data(&self) -> Result<()> {
        self.0.done.lock().push("flush".to_owned());
        Ok(())
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let bytes = self.0.bytes.lock();
        let from = bytes.as_ref().and_then(|b| b.get(offset as usize..)?.get(..buf.len()));
        buf.copy_from_slice(from.ok_or_else(|| Error::new(ErrorKind::ShortIo, "beyond the end"))?);
        Ok(())
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> Result<()> {
        if self.0.fails.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Io, "the drive accepts no stores"));
        }
        let mut bytes = self.0.bytes.lock();
        let bytes = bytes.get_or_insert_default();
        let end = offset as usize + buf.len();
        bytes.resize(bytes.len().max(end), 0);
        bytes[offset as usize..end].copy_from_slice(buf);
        self.0.done.lock().push(format!("write {}", offset / FLOORS_BYTES as u64));
        Ok(())
    }
}

#[test]
fn each_copy_of_a_floor_is_durable_before_the_next_and_nobody_sees_one_that_cannot_be_written() {
    let dir = temp();
    let (floors, _mounted) = one_file(dir.path(), "FLOORS", None);
    let still = LogOptions { foreground: true, ..options(dir.path()) };
    let log = Log::open(still).unwrap();
    (0..3).for_each(|n| assert!(store(&log, n)));
    floors.fails.store(true, Ordering::SeqCst);
    assert_eq!(log.clear().unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(log.remove_tenant(7).unwrap_err().kind(), ErrorKind::Io);
    log.turn(Turn::Maintain);
    assert!((0..3).all(|n| has(&log, n)), "hidden by a floor that is not on the drive");
    floors.fails.store(false, Ordering::SeqCst);
    floors.done.lock().clear();
    log.clear().unwrap();
    let both = ["write 0", "flush", "write 1", "flush"];
    assert_eq!(*floors.done.lock(), [&["flush"], both.as_slice()].concat());
    assert!((0..3).all(|n| !has(&log, n)));
    // The only copy that is intact is not written over.
    floors.bytes.lock().as_mut().unwrap()[FLOORS_BYTES..].fill(1);
    floors.done.lock().clear();
    log.clear().unwrap();
    assert_eq!(*floors.done.lock(), [&["flush", "write 1", "flush"], both.as_slice()].concat());
}

#[test]
fn who_opens_brings_both_copies_to_the_newer_floors_and_leaves_alone_the_one_that_has_them() {
    let dir = temp();
    let (floors, _mounted) = one_file(dir.path(), "FLOORS", None);
    let log = open(dir.path());
    (0..3).for_each(|n| assert!(store(&log, n)));
    log.clear().unwrap();
    drop(log);
    for copy in [1, 0] {
        // As a call leaves the copies that failed after the first, or a flipped bit.
        floors.bytes.lock().as_mut().unwrap()[copy * FLOORS_BYTES..(copy + 1) * FLOORS_BYTES].fill(copy as u8);
        reboot(dir.path());
        floors.done.lock().clear();
        let log = open(dir.path());
        assert!((0..3).all(|n| !has(&log, n)));
        assert_eq!(*floors.done.lock(), ["flush".to_owned(), format!("write {copy}"), "flush".to_owned()]);
        let bytes = floors.bytes.lock().clone().unwrap();
        assert_eq!(bytes[..FLOORS_BYTES], bytes[FLOORS_BYTES..]);
    }
}

/// Its writer may have been killed before it had flushed its index.
#[test]
fn the_index_of_a_lane_that_is_adopted_is_flushed_before_it_is_believed() {
    let dir = temp();
    let logs = [open(dir.path()), open(dir.path())];
    logs.iter().zip(0..).for_each(|(log, n)| assert!(store(log, n)));
    for log in logs {
        log.seal(soon()).unwrap();
        log.abandon();
    }
    let adopted = lane_file(dir.path(), "x").parent().unwrap().with_file_name("lane1").join("index.kv");
    let (index, _mounted) = one_file(dir.path(), "lane1/index.kv", Some(std::fs::read(adopted).unwrap()));
    let log = Log::open(LogOptions { foreground: true, ..options(dir.path()) }).unwrap();
    assert!(has(&log, 0) && has(&log, 1) && log.stats().adopted_lanes == 1);
    assert_eq!(*index.done.lock(), ["flush"]);
}

/// Both may have reached the drive, and differ in the uses that the seal has noted between them.
#[test]
fn records_that_were_written_again_after_a_seal_that_failed_count_once() {
    let dir = temp();
    let fails = Arc::new(AtomicBool::new(false));
    let is_failing = Arc::clone(&fails);
    let factory = move |_: usize, _: &Path, options: &io::IoOptions| {
        let mut drive = io::open_drive(options)?;
        let is_failing = Arc::clone(&is_failing);
        let fate = move |_, r: &Request| {
            let is_hit = r.op == Op::Flush && r.file.path().ends_with("index.kv") && is_failing.load(Ordering::SeqCst);
            is_hit.then_some(Fault::Fail)
        };
        drive.write = Arc::new(Faulty::new(drive.write, fate));
        Ok(drive)
    };
    let still = LogOptions { foreground: true, drive_factory: Some(Arc::new(factory)), ..options(dir.path()) };
    let log = Log::open(still).unwrap();
    (0..5).for_each(|n| assert!(store(&log, n)));
    log.flush().unwrap();
    assert_eq!(log.lookup(&[key(1), key(3)]), 2);
    log.turn(Turn::Maintain);
    fails.store(true, Ordering::SeqCst);
    assert!(log.seal(Instant::now() + Duration::from_millis(100)).is_err());
    assert!(log.flush().is_err());
    log.turn(Turn::Commit);
    assert!(log.stats().journal_pages > 1, "they are written again");
    let lane = log.volumes[0].own().unwrap();
    let region = lane.region_offset(0);
    drop(lane);
    log.abandon();
    // Of the seal nothing has reached the drive.
    let index = std::fs::File::options().write(true).open(lane_file(dir.path(), "index.kv")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&index, &[0; 4096], region).unwrap();
    drop(log);
    // The first opening seals what it finds.
    let log = reopen(open(dir.path()));
    assert_eq!(log.stats().recovered_records, 5);
    assert!((0..5).all(|n| has(&log, n)));
}
