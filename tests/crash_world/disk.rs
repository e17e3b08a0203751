//! A disk in memory that remembers what was flushed, so that it can say what a power cut may leave.
//!
//! Of every file it keeps the durable content and, in order, what was done since the last flush of
//! that file. An image takes the durable content and any part of the rest: whole operations may be
//! missing, writes may be torn at 512 bytes. A flush that fails may lose writes at once. Names are
//! durable when made; of the removed ones the last may come back until something is made.
//!
//! It has the lanes' files and the shard's FLOORS. Directories, locks and shared memory stay with
//! the kernel.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use forebay::error::{Error, ErrorKind, Result};
use forebay::io::{Disk, DiskFile, FileOptions};
use parking_lot::Mutex;

use super::rng::Rng;

const PAGE: usize = 4096;
const SECTOR: usize = 512;
const FLOORS: &str = "FLOORS";

thread_local! {
    static LOSES: Cell<Option<u64>> = const { Cell::new(None) };
}

/// The next flush by this thread fails, and the drive drops some of the writes that it had taken
/// since the last good one.
pub fn lose_at_next_flush(seed: u64) {
    LOSES.set(Some(seed));
}

type Page = Arc<[u8; PAGE]>;

/// What a file holds: a page that is `None` is a hole.
#[derive(Clone, Default)]
pub struct Content {
    pub len: u64,
    pages: Vec<Option<Page>>,
}

impl Content {
    fn read(&self, buf: &mut [u8], offset: u64) -> bool {
        if offset + buf.len() as u64 > self.len {
            return false;
        }
        let mut at = offset as usize;
        let mut rest = buf;
        while !rest.is_empty() {
            let within = at % PAGE;
            let n = rest.len().min(PAGE - within);
            let (to, after) = rest.split_at_mut(n);
            match self.pages.get(at / PAGE).and_then(Option::as_ref) {
                Some(page) => to.copy_from_slice(&page[within..within + n]),
                None => to.fill(0),
            }
            (at, rest) = (at + n, after);
        }
        true
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.len = self.len.max(offset + bytes.len() as u64);
        let (mut at, mut rest) = (offset as usize, bytes);
        while !rest.is_empty() {
            let within = at % PAGE;
            let n = rest.len().min(PAGE - within);
            let page = Arc::make_mut(self.page(at / PAGE));
            page[within..within + n].copy_from_slice(&rest[..n]);
            (at, rest) = (at + n, &rest[n..]);
        }
    }

    fn page(&mut self, n: usize) -> &mut Page {
        if self.pages.len() <= n {
            self.pages.resize(n + 1, None);
        }
        self.pages[n].get_or_insert_with(|| Arc::new([0; PAGE]))
    }

    fn allocate(&mut self, offset: u64, len: u64) {
        self.len = self.len.max(offset + len);
        for n in offset as usize / PAGE..(offset + len).div_ceil(PAGE as u64) as usize {
            self.page(n);
        }
    }

    fn punch(&mut self, offset: u64, len: u64) {
        for n in offset as usize / PAGE..((offset + len) as usize / PAGE).min(self.pages.len()) {
            self.pages[n] = None;
        }
    }

    /// Pages that are not holes, with their offsets.
    pub fn data(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let pages = self.pages.iter().enumerate();
        pages.filter_map(|(n, page)| page.as_ref().map(|p| ((n * PAGE) as u64, &p[..])))
    }

    fn set_len(&mut self, len: u64) {
        self.len = len;
        self.pages.truncate(len.div_ceil(PAGE as u64) as usize);
    }

    fn allocated(&self) -> u64 {
        self.pages.iter().flatten().count() as u64 * PAGE as u64
    }

    /// All bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len as usize];
        assert!(self.read(&mut bytes, 0));
        bytes
    }

    /// Flips a bit, of a byte that is not zero where it finds one. Returns whether there was a
    /// page.
    pub fn flip(&mut self, rng: &mut Rng) -> bool {
        let full: Vec<usize> = (0..self.pages.len()).filter(|n| self.pages[*n].is_some()).collect();
        let mut place = None;
        for _ in 0..200 {
            let Some(n) = full.get(rng.below(full.len().max(1) as u64) as usize) else { return false };
            let byte = rng.below(PAGE as u64) as usize;
            place = Some((*n, byte));
            if self.pages[*n].as_ref().is_some_and(|page| page[byte] != 0) {
                break;
            }
        }
        let Some((n, byte)) = place else { return false };
        Arc::make_mut(self.page(n))[byte] ^= 1 << rng.below(8);
        true
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Write(at, bytes) => self.write(*at, bytes),
            Op::Len(len) => self.set_len(*len),
            Op::Allocate(at, len) => self.allocate(*at, *len),
            Op::Punch(at, len) => self.punch(*at, *len),
        }
    }

    /// Applies the sectors of a write, or the pages of a hole, that `keep` says.
    fn apply_torn(&mut self, op: &Op, mut keep: impl FnMut(u64) -> bool) {
        if let Op::Punch(at, len) = op {
            for n in (0..len / PAGE as u64).filter(|n| keep(*n)) {
                self.punch(at + n * PAGE as u64, PAGE as u64);
            }
            return;
        }
        let Op::Write(at, bytes) = op else { return self.apply(op) };
        for (i, sector) in bytes.chunks(SECTOR).enumerate() {
            if keep(i as u64) {
                self.write(at + (i * SECTOR) as u64, sector);
            }
        }
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Write(at, bytes) => write!(f, "writes {} pages at {}", bytes.len() / PAGE, *at as usize / PAGE),
            Self::Len(len) => write!(f, "sets the length {len}"),
            Self::Allocate(at, len) => write!(f, "reserves {len} bytes at {at}"),
            Self::Punch(at, len) => write!(f, "punches {} pages at {}", *len as usize / PAGE, *at as usize / PAGE),
        }
    }
}

#[derive(Clone)]
enum Op {
    Write(u64, Arc<[u8]>),
    Len(u64),
    Allocate(u64, u64),
    Punch(u64, u64),
}

impl Op {
    /// In how many parts it may reach the drive.
    fn parts(&self) -> u64 {
        match self {
            Self::Write(_, bytes) => bytes.len().div_ceil(SECTOR) as u64,
            Self::Punch(_, len) => len / PAGE as u64,
            Self::Len(_) | Self::Allocate(..) => 1,
        }
    }
}

#[derive(Clone, Default)]
struct Inode {
    durable: Content,
    since: Vec<Op>,
    now: Content,
}

/// All files of a disk.
#[derive(Clone, Default)]
pub struct Files {
    names: BTreeMap<PathBuf, usize>,
    inodes: Vec<Arc<Inode>>,
    /// Removed names that a power cut may bring back.
    removed: Vec<(PathBuf, usize)>,
}

/// What a crash leaves of what was not flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// All of it stays, as when only the process dies.
    Nothing,
    /// None of it.
    All,
    /// What was done last is missing, from some operation on.
    Tail,
    /// Any operations are missing.
    Some,
    /// Any operations are missing, others are torn at 512 bytes.
    Torn,
    /// Any operations are missing, of others only the start or the end is there.
    Cut,
    /// None of it but what was done to files of this name.
    AllBut(&'static str),
}

impl Files {
    /// Paths of the files, relative to the mount.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.names.keys().map(PathBuf::as_path)
    }

    /// What a file holds now.
    pub fn content(&self, path: &Path) -> Option<&Content> {
        Some(&self.inodes[*self.names.get(path)?].now)
    }

    /// Flips a bit of some file.
    pub fn flip(&mut self, rng: &mut Rng) -> bool {
        // Most of the time in an index: every load checks the data anyway.
        let of_index = !rng.one_in(4);
        let wanted = |path: &Path| path.ends_with("index.kv") == of_index;
        let all: Vec<usize> = self.names.iter().filter(|(path, _)| wanted(path)).map(|(_, n)| *n).collect();
        let Some(n) = all.get(rng.below(all.len().max(1) as u64) as usize) else { return false };
        let inode = Arc::make_mut(&mut self.inodes[*n]);
        let flipped = inode.now.flip(rng);
        inode.durable = inode.now.clone();
        flipped
    }

    /// What a crash leaves: everything in it is durable.
    pub fn after_crash(&self, loss: Loss, rng: &mut Rng) -> Self {
        let mut image = Self { names: self.names.clone(), ..Self::default() };
        if loss != Loss::Nothing {
            // File systems keep the order of what happens to names.
            let kept = rng.below(self.removed.len() as u64 + 1) as usize;
            for (path, inode) in self.removed.iter().skip(kept) {
                image.names.entry(path.clone()).or_insert(*inode);
            }
        }
        let total: u64 = self.inodes.iter().map(|i| i.since.len() as u64).sum();
        let (keep_of_8, tail) = (rng.below(8), rng.below(total.max(1)) + 1);
        let mut number = 0;
        let is_called =
            |at: usize, name: &str| self.names.iter().any(|(path, inode)| *inode == at && path.ends_with(name));
        for (at, inode) in self.inodes.iter().enumerate() {
            let content = match loss {
                Loss::Nothing => inode.now.clone(),
                Loss::AllBut(name) if is_called(at, name) => inode.now.clone(),
                _ if inode.since.is_empty() => inode.durable.clone(),
                _ => {
                    let mut content = inode.durable.clone();
                    for op in &inode.since {
                        number += 1;
                        match loss {
                            Loss::Tail if number + tail <= total => content.apply(op),
                            Loss::Some if rng.below(8) < keep_of_8 => content.apply(op),
                            Loss::Torn | Loss::Cut if rng.below(8) < keep_of_8 => content.apply(op),
                            Loss::Torn if rng.below(2) == 0 => content.apply_torn(op, |_| rng.below(2) == 0),
                            Loss::Cut if rng.below(2) == 0 => {
                                let (at, starts) = (rng.below(op.parts() + 1), rng.below(2) == 0);
                                content.apply_torn(op, |part| (part < at) == starts);
                            }
                            _ => {}
                        }
                    }
                    content
                }
            };
            image.inodes.push(Arc::new(Inode { durable: content.clone(), since: Vec::new(), now: content }));
        }
        image
    }
}

/// Called after every operation that changed something.
pub trait Observer: Send + Sync {
    /// The disk is in a new state.
    fn boundary(&self, disk: &SimDisk);
}

/// A disk, mounted at a directory.
pub struct SimDisk {
    root: PathBuf,
    files: Mutex<Files>,
    observer: Mutex<Option<Arc<dyn Observer>>>,
    /// Number of the process whose calls are running; files that it opens are its own.
    current: AtomicU64,
    dead: Mutex<Vec<u64>>,
    /// Bytes that all files together may take.
    space: AtomicU64,
    holes: AtomicBool,
    /// Every operation is printed, under this name.
    told_as: OnceLock<String>,
    /// How often, of 1000 times, a write or flush of FLOORS fails.
    floor_faults: Mutex<(u64, Rng)>,
    operations: AtomicU64,
    /// The operation up to which a flush that failed is new.
    failed_until: AtomicU64,
}

impl SimDisk {
    pub fn new(root: &Path, files: Files) -> Arc<Self> {
        Arc::new(Self {
            root: root.to_path_buf(),
            files: Mutex::new(files),
            observer: Mutex::new(None),
            current: AtomicU64::new(0),
            dead: Mutex::default(),
            space: AtomicU64::new(u64::MAX),
            holes: AtomicBool::new(true),
            told_as: OnceLock::new(),
            floor_faults: Mutex::new((0, Rng(0))),
            operations: AtomicU64::new(0),
            failed_until: AtomicU64::new(0),
        })
    }

    pub fn observe(&self, observer: Option<Arc<dyn Observer>>) {
        *self.observer.lock() = observer;
    }

    pub fn files(&self) -> Files {
        self.files.lock().clone()
    }

    /// What opens files from now on is process `n`.
    pub fn enter(&self, process: u64) {
        self.current.store(process, Ordering::Relaxed);
    }

    pub fn current(&self) -> u64 {
        self.current.load(Ordering::Relaxed)
    }

    /// Nothing that process `n` does reaches the disk from now on.
    pub fn kill(&self, process: u64) {
        self.dead.lock().push(process);
    }

    pub fn is_dead(&self, process: u64) -> bool {
        self.dead.lock().contains(&process)
    }

    pub fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    /// Whether a flush has lost writes within the last operations: what was written again since
    /// may be torn over what the first try left.
    pub fn has_just_failed(&self) -> bool {
        self.operations() < self.failed_until.load(Ordering::Relaxed)
    }

    /// The space of the whole disk, in bytes.
    pub fn set_space(&self, bytes: u64) {
        self.space.store(bytes, Ordering::Relaxed);
    }

    /// Prints every operation, for somebody who replays a seed.
    pub fn tell(&self, story: &str) {
        drop(self.told_as.set(format!("  {story}")));
    }

    /// Whether its file systems have holes.
    pub fn set_holes(&self, on: bool) {
        self.holes.store(on, Ordering::Relaxed);
    }

    /// From now on so many of 1000 writes and flushes of FLOORS fail. They do not pass a queue,
    /// whose faults are set there.
    pub fn fail_floors(&self, share: u64, seed: u64) {
        *self.floor_faults.lock() = (share, Rng::of(seed, 78));
    }

    fn relative(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.root).unwrap_or(path).to_path_buf()
    }

    fn changed(&self, what: impl FnOnce() -> String) {
        let n = self.operations.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(story) = self.told_as.get() {
            println!("{story} [{n}] process {} {}", self.current(), what());
        }
        let observer = self.observer.lock().clone();
        if let Some(observer) = observer {
            observer.boundary(self);
        }
    }
}

fn not_found(path: &Path) -> Error {
    Error::new(ErrorKind::NotFound, "no such file on the simulated disk").at(path)
}

/// A mount point: what the library sees.
pub struct Mounted(pub Arc<SimDisk>);

impl Disk for Mounted {
    fn takes(&self, path: &Path) -> bool {
        path.file_name().is_some_and(|n| n == "index.kv" || n == "data.kv" || n == FLOORS)
    }

    fn open(&self, path: &Path, options: FileOptions) -> Result<Arc<dyn DiskFile>> {
        let disk = &self.0;
        let name = disk.relative(path);
        let mut files = disk.files.lock();
        let (inode, made) = match files.names.get(&name) {
            Some(_) if options.create_new => return Err(Error::new(ErrorKind::InvalidInput, "it exists").at(path)),
            Some(inode) => (*inode, false),
            None if options.create || options.create_new => {
                files.inodes.push(Arc::default());
                let inode = files.inodes.len() - 1;
                files.names.insert(name.clone(), inode);
                // Names that were removed before it stay removed: file systems keep the order.
                files.removed.clear();
                (inode, true)
            }
            None => return Err(not_found(path)),
        };
        drop(files);
        if made {
            disk.changed(|| format!("makes {}", path.display()));
        }
        Ok(Arc::new(SimFile { disk: Arc::clone(disk), process: disk.current(), inode, name }))
    }

    fn remove(&self, path: &Path) -> Result<()> {
        let name = self.0.relative(path);
        {
            let mut files = self.0.files.lock();
            let inode = files.names.remove(&name).ok_or_else(|| not_found(path))?;
            files.removed.push((name, inode));
        }
        self.0.changed(|| format!("removes {}", path.display()));
        Ok(())
    }

    fn len(&self, path: &Path) -> Option<u64> {
        self.0.files.lock().content(&self.0.relative(path)).map(|c| c.len)
    }

    fn used_bytes(&self) -> u64 {
        let files = self.0.files.lock();
        files.names.values().map(|n| files.inodes[*n].now.allocated()).sum()
    }
}

struct SimFile {
    disk: Arc<SimDisk>,
    process: u64,
    inode: usize,
    name: PathBuf,
}

impl SimFile {
    /// The last two parts of the file's path.
    fn place(&self) -> String {
        let parts: Vec<_> = self.name.iter().map(|p| p.to_string_lossy()).collect();
        parts[parts.len().saturating_sub(2)..].join("/")
    }

    fn error(&self, kind: ErrorKind, why: &'static str) -> Error {
        Error::new(kind, why).at(&self.name)
    }

    /// Whether a change fails now: before it is done, or when it is.
    fn fault(&self) -> (bool, bool) {
        let (share, rng) = &mut *self.disk.floor_faults.lock();
        let hit = *share > 0 && self.name.ends_with(FLOORS) && rng.below(1000) < *share;
        (hit && rng.one_in(2), hit)
    }

    fn change(&self, op: Op) -> Result<()> {
        if self.disk.is_dead(self.process) {
            return Err(self.error(ErrorKind::Io, "the process is dead"));
        }
        let (before, fails) = self.fault();
        if before {
            return Err(self.error(ErrorKind::Io, "injected"));
        }
        {
            let mut files = self.disk.files.lock();
            let inode = Arc::make_mut(&mut files.inodes[self.inode]);
            inode.now.apply(&op);
            inode.since.push(op.clone());
        }
        self.disk.changed(|| format!("{op:?} in {}", self.place()));
        if fails { Err(self.error(ErrorKind::Io, "injected")) } else { Ok(()) }
    }

    /// Drops some of the writes since the last good flush.
    fn lose(&self, seed: u64) {
        self.disk.failed_until.store(self.disk.operations() + 12, Ordering::Relaxed);
        let mut rng = Rng::of(seed, 79);
        {
            let mut files = self.disk.files.lock();
            let inode = Arc::make_mut(&mut files.inodes[self.inode]);
            for op in &mut inode.since {
                // What the file system knows of the file, such as its length, is not the drive's.
                if let Op::Write(at, bytes) = op
                    && rng.one_in(2)
                {
                    *op = Op::Allocate(*at, bytes.len() as u64);
                }
            }
            let mut now = inode.durable.clone();
            inode.since.iter().for_each(|op| now.apply(op));
            inode.now = now;
        }
        self.disk.changed(|| format!("fails to flush {}, and loses writes", self.place()));
    }

    fn inode(&self) -> Arc<Inode> {
        Arc::clone(&self.disk.files.lock().inodes[self.inode])
    }
}

impl DiskFile for SimFile {
    fn bytes(&self) -> u64 {
        self.inode().now.len
    }

    fn allocated_bytes(&self) -> u64 {
        self.inode().now.allocated()
    }

    fn is_named(&self) -> bool {
        self.disk.files.lock().names.get(&self.name) == Some(&self.inode)
    }

    fn set_len(&self, len: u64) -> Result<()> {
        self.change(Op::Len(len))
    }

    fn allocate(&self, offset: u64, len: u64) -> Result<()> {
        let used = Mounted(Arc::clone(&self.disk)).used_bytes();
        if used + len > self.disk.space.load(Ordering::Relaxed) {
            return Err(self.error(ErrorKind::NoSpace, "the simulated disk is full"));
        }
        self.change(Op::Allocate(offset, len))
    }

    fn punch_hole(&self, offset: u64, len: u64) -> Result<()> {
        if !self.disk.holes.load(Ordering::Relaxed) {
            return Err(self.error(ErrorKind::Unsupported, "the simulated disk has no holes"));
        }
        self.change(Op::Punch(offset, len))
    }

    fn sync_data(&self) -> Result<()> {
        let loses = LOSES.take();
        if self.disk.is_dead(self.process) {
            return Err(self.error(ErrorKind::Io, "the process is dead"));
        }
        if let Some(seed) = loses {
            self.lose(seed);
            return Err(self.error(ErrorKind::Io, "injected, with a loss"));
        }
        if self.fault().1 {
            self.lose(self.disk.operations());
            return Err(self.error(ErrorKind::Io, "injected"));
        }
        {
            let mut files = self.disk.files.lock();
            let inode = Arc::make_mut(&mut files.inodes[self.inode]);
            inode.since.clear();
            inode.durable = inode.now.clone();
        }
        self.disk.changed(|| format!("flushes {}", self.place()));
        Ok(())
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        if self.inode().now.read(buf, offset) {
            return Ok(());
        }
        Err(self.error(ErrorKind::ShortIo, "a read beyond the end"))
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> Result<()> {
        self.change(Op::Write(offset, buf.into()))
    }
}
