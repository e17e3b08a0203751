//! Reading every slot that is served and checking every CRC in it, past the page cache.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::places::LaneDir;
use super::raw::{RawLane, listed};
use crate::config::dir::CacheFileOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::layout::COARSE_BYTES;
use crate::format::record::Record;
use crate::format::slot::{LayerEntry, MAX_HEADER_BYTES, SlotHeader};
use crate::io::{self, AlignedBuf, Buf, DirectFile, Drive, IoOptions, Request};
use crate::key::ChunkKey;
use crate::log::base::paths::DATA;

/// Slots read at the same time.
const READERS: usize = 8;
/// Bytes of one read.
const PIECE_BYTES: u64 = 4 << 20;
/// How long one read may take.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A slot that would not be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadSlot {
    /// The lane: its place in the list that was checked.
    pub lane: usize,
    /// The key it is stored under.
    pub key: ChunkKey,
    /// Start of the slot in data.kv, in bytes.
    pub offset: u64,
    /// What is wrong with it.
    pub what: String,
    /// Whether a read timed out: the bytes may be right.
    pub late: bool,
}

/// What a deep check found.
#[derive(Clone, Debug, Default)]
pub struct Deep {
    /// Slots checked.
    pub slots: u64,
    /// Payload bytes checked.
    pub bytes: u64,
    /// Slots without a header: they were given up, or never reached the drive, and the index does
    /// not say so.
    pub gone: Vec<BadSlot>,
    /// Slots with a header that would not be served.
    pub bad: Vec<BadSlot>,
}

/// Checks every slot that the lanes of one shard list. `progress` gets the slot bytes done, from
/// several threads.
///
/// # Errors
/// Where files or queues cannot be opened; a slot that cannot be read is reported as bad.
pub fn deep(files: &[LaneDir], lanes: &[RawLane], now_s: u64, progress: &(dyn Fn(u64) + Sync)) -> Result<Deep> {
    let mut deep = check(files, lanes, &listed(lanes, now_s), progress)?;
    still_there(files, lanes, now_s, &mut deep)?;
    Ok(deep)
}

/// The same for these records, each with its lane's place in the list, of lanes that no process
/// changes meanwhile.
pub(super) fn check(
    files: &[LaneDir],
    lanes: &[RawLane],
    records: &[(usize, Record)],
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Deep> {
    let drive = io::open_drive(&IoOptions::default())?;
    let disk = DeepReads(drive);
    let data: Vec<Arc<DirectFile>> = files.iter().map(|f| open_data(f).map(Arc::new)).collect::<Result<_>>()?;
    let next = AtomicUsize::new(0);
    let result = Mutex::new(Deep::default());
    let work = || {
        while let Some((lane, record)) = records.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (Some(raw), Some(file)) = (lanes.get(*lane), data.get(*lane)) else { continue };
            let checked = SlotCheck { disk: &disk, file, raw, record }.check();
            progress(u64::from(record.pages) * PAGE_BYTES as u64);
            let slot = |e: &Error| BadSlot {
                lane: *lane,
                key: record.key,
                offset: raw.slot_offset(record),
                what: e.to_string(),
                late: e.kind() == ErrorKind::TimedOut,
            };
            let mut result = result.lock();
            match checked {
                Ok(bytes) => (result.slots, result.bytes) = (result.slots + 1, result.bytes + bytes),
                Err(e) if e.kind() == ErrorKind::NotFound => result.gone.push(slot(&e)),
                Err(e) => {
                    result.slots += 1;
                    result.bad.push(slot(&e));
                }
            }
        }
    };
    std::thread::scope(|scope| {
        // Where the system gives no more threads, there are fewer readers.
        let reader = || std::thread::Builder::new().name("fb-deep".to_owned());
        (1..READERS.min(records.len())).for_each(|_| drop(reader().spawn_scoped(scope, work)));
        work();
    });
    let mut deep = result.into_inner();
    deep.bad.sort_unstable_by_key(|bad| (bad.lane, bad.offset));
    deep.gone.sort_unstable_by_key(|gone| (gone.lane, gone.offset));
    Ok(deep)
}

/// Takes out bad slots that the lanes list no more: a server may have reused them while they were
/// read, which is no damage.
fn still_there(files: &[LaneDir], lanes: &[RawLane], now_s: u64, deep: &mut Deep) -> Result<()> {
    if deep.bad.is_empty() || !lanes.iter().any(|l| l.in_use) {
        return Ok(());
    }
    let (mut places, mut again) = (Vec::new(), Vec::new());
    for (place, files) in files.iter().enumerate() {
        match RawLane::read(files) {
            Ok(lane) => {
                places.push(place);
                again.push(lane);
            }
            // The lane was deleted meanwhile: it lists nothing any more.
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    let place = |(i, r): &(usize, Record)| Some((*places.get(*i)?, r.key, again.get(*i)?.slot_offset(r)));
    let listed: std::collections::HashSet<(usize, ChunkKey, u64)> =
        listed(&again, now_s).iter().filter_map(place).collect();
    deep.bad.retain(|bad| listed.contains(&(bad.lane, bad.key, bad.offset)));
    Ok(())
}

fn open_data(files: &LaneDir) -> Result<DirectFile> {
    let direct = CacheFileOptions { flags: libc::O_DIRECT, ..CacheFileOptions::default() };
    let opened = files.dir.open_file_in(DATA, &direct);
    // File systems that refuse O_DIRECT are read through the page cache.
    let file = opened.or_else(|_| files.dir.open_file_in(DATA, &CacheFileOptions::default()))?;
    Ok(DirectFile::from_file(file, files.file(DATA)))
}

struct DeepReads(Drive);

impl DeepReads {
    /// Reads `len` bytes, rounded up to pages.
    fn read(&self, file: &Arc<DirectFile>, offset: u64, len: usize) -> Result<Buf> {
        let buf = Buf::new(AlignedBuf::zeroed(len.next_multiple_of(PAGE_BYTES).max(PAGE_BYTES))?);
        let request = Request::read(Arc::clone(file), offset, buf, |_| ()).timeout(TIMEOUT);
        let done = io::wait(&*self.0.read, request);
        done.result?;
        done.buf.ok_or_else(|| Error::new(ErrorKind::Internal, "a read gave no buffer back"))
    }
}

struct SlotCheck<'a> {
    disk: &'a DeepReads,
    file: &'a Arc<DirectFile>,
    raw: &'a RawLane,
    record: &'a Record,
}

fn bad<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::new(ErrorKind::Corrupt, what.into()))
}

impl SlotCheck<'_> {
    /// Checks the slot; gives its payload bytes.
    fn check(&self) -> Result<u64> {
        let (header, crc) = self.header()?;
        let r = self.record;
        if crc != r.header_crc {
            return bad("the header is not the one in the index");
        }
        if (header.segment, header.epoch, header.page, header.sequence) != (r.segment, r.epoch, r.page, r.sequence)
            || header.lane != self.raw.superblock.lane
            || header.pages != r.pages
        {
            return bad("the header belongs to another place or version");
        }
        if header.key != r.key {
            return bad("the header names another key");
        }
        for (n, layer) in header.layers.iter().enumerate().filter(|(_, l)| l.len > 0) {
            if self.crc_of(layer)? != layer.crc {
                return bad(format!("extent {n} fails its CRC"));
            }
        }
        Ok(header.layers.iter().map(|l| u64::from(l.len)).sum())
    }

    /// Finds and reads the header. It lies behind a gap of less than 64 KiB, whose length follows
    /// from the geometry, which is not known here.
    fn header(&self) -> Result<(SlotHeader, u32)> {
        let slot_bytes = self.record.pages as usize * PAGE_BYTES;
        let start = self.raw.slot_offset(self.record);
        if start + slot_bytes as u64 > self.file.len()? {
            // As recovery judges it, even where only padding is missing.
            return bad("data.kv ends before the slot does");
        }
        let first = self.disk.read(self.file, start, slot_bytes.min(COARSE_BYTES))?;
        let headed = |page: &[u8]| page.starts_with(SlotHeader::MAGIC);
        let Some(gap) = first.as_slice().chunks(PAGE_BYTES).position(headed).map(|n| n * PAGE_BYTES) else {
            return Err(Error::new(ErrorKind::NotFound, "there is no header"));
        };
        if let Ok(found) = SlotHeader::decode(first.as_slice().get(gap..).unwrap_or_default()) {
            return Ok(found);
        }
        let len = MAX_HEADER_BYTES.min(slot_bytes - gap);
        SlotHeader::decode(self.disk.read(self.file, start + gap as u64, len)?.as_slice())
    }

    fn crc_of(&self, layer: &LayerEntry) -> Result<u32> {
        let slot_bytes = u64::from(self.record.pages) * PAGE_BYTES as u64;
        let end = layer.offset.checked_add(u64::from(layer.len)).filter(|end| *end <= slot_bytes);
        if end.is_none() || !layer.offset.is_multiple_of(PAGE_BYTES as u64) {
            return bad("an extent lies outside its slot");
        }
        let start = self.raw.slot_offset(self.record) + layer.offset;
        let mut hasher = crc32fast::Hasher::new();
        let mut at = 0;
        while at < u64::from(layer.len) {
            let len = (u64::from(layer.len) - at).min(PIECE_BYTES);
            let piece = self.disk.read(self.file, start + at, len as usize)?;
            hasher.update(piece.as_slice().get(..len as usize).unwrap_or_default());
            at += len;
        }
        Ok(hasher.finalize())
    }
}
