//! Processes over one simulated disk: opened, closed, killed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay::Result;
use forebay::io::{Mount, mount};
use forebay::log::{Chunk, Log, LogOptions};
use parking_lot::Mutex;

use super::disk::{Files, Mounted, SimDisk};
use super::images::Judge;
use super::loads::Loaded;
use super::model::Model;
use super::puts::Begun;
use super::queue::SimQueue;
use super::threads::Spread;
use super::{Config, SimClock};

/// Set by the first failure, so that nothing is judged while its panic unwinds.
pub static FAILED: AtomicBool = AtomicBool::new(false);

/// A chunk that is leased.
pub struct Held {
    pub chunk: Chunk,
    pub key: u64,
    pub until_ms: u64,
}

/// An open log, as if it were a process of its own.
pub struct Process {
    pub number: u64,
    pub log: Arc<Log>,
    pub read: Arc<SimQueue>,
    pub write: Arc<SimQueue>,
    pub begun: Mutex<Vec<Begun>>,
    pub held: Mutex<Vec<Held>>,
    /// Puts whose end is not known yet.
    pub ends: Mutex<Vec<(u64, crossbeam_channel::Receiver<bool>)>>,
}

/// A disk and its processes.
pub struct World {
    pub config: Config,
    pub dir: PathBuf,
    pub disk: Arc<SimDisk>,
    pub clock: Arc<SimClock>,
    pub model: Mutex<Model>,
    pub processes: Mutex<Vec<Arc<Process>>>,
    pub judge: Arc<Judge>,
    /// How this world came about.
    pub story: String,
    pub depth: usize,
    /// What the disk held when this world began.
    pub began: Files,
    /// Steps that one process did amid a call of another.
    pub amid: AtomicU64,
    next_process: AtomicU64,
    _mount: Mount,
}

/// What a world begins with.
pub struct Start {
    pub files: Files,
    pub model: Model,
    pub now_ms: u64,
    pub story: String,
    pub depth: usize,
}

impl Start {
    pub fn new(story: String) -> Self {
        Self { files: Files::default(), model: Model::default(), now_ms: 1_000_000_000, story, depth: 0 }
    }
}

impl World {
    pub fn new(config: &Config, dir: &Path, judge: &Arc<Judge>, start: Start) -> Arc<Self> {
        let disk = SimDisk::new(dir, start.files.clone());
        if start.depth == 0 {
            disk.set_space(config.space);
        }
        disk.set_holes(config.holes);
        if super::steps::telling() {
            disk.tell(&start.story);
        }
        let mounted = mount(dir, Arc::new(Mounted(Arc::clone(&disk))));
        Arc::new(Self {
            config: config.clone(),
            dir: dir.to_path_buf(),
            disk,
            clock: Arc::new(SimClock(AtomicU64::new(start.now_ms))),
            model: Mutex::new(start.model),
            processes: Mutex::default(),
            judge: Arc::clone(judge),
            story: start.story,
            depth: start.depth,
            began: start.files,
            amid: AtomicU64::new(0),
            next_process: AtomicU64::new(1),
            _mount: mounted,
        })
    }

    pub fn now_s(&self) -> u64 {
        self.clock.ms() / 1000
    }

    fn options(&self, read: &Arc<SimQueue>, write: &Arc<SimQueue>) -> LogOptions {
        let c = &self.config;
        // Of an image one thread asks what is in it.
        let has_threads = c.threads > 0 && self.depth == 0;
        let drive = match has_threads {
            true => SimQueue::drive(Spread::over(read, c.seed), Spread::over(write, c.seed + 1)),
            false => SimQueue::drive(Arc::clone(read) as _, Arc::clone(write) as _),
        };
        // Segments, their regions, the rings, the shared files, and once the room that is kept for
        // a larger table.
        let per_lane = u64::from(c.ring_pages) * 4096 + (390 << 10);
        let region = 20 << 10;
        LogOptions {
            capacity_bytes: c.segments * (c.segment_bytes + region) + c.writers as u64 * per_lane + (200 << 10),
            segment_bytes: Some(c.segment_bytes),
            tenant_bytes: c.tenant_bytes,
            policy: c.policy,
            reclaim_write_budget: c.reclaim_write_budget,
            io_timeout: Duration::from_secs(1 << 20),
            drive_factory: Some(Arc::new(move |_, _, _| Ok(drive.clone()))),
            clock: Arc::clone(&self.clock) as _,
            ring_pages: Some(c.ring_pages),
            foreground: !has_threads,
            scan_interval: Duration::from_millis(100),
            ..LogOptions::new(&self.dir, c.geometry())
        }
    }

    /// The number of one more process, which runs from now on.
    pub fn enter_another(&self) -> u64 {
        let number = self.next_process.fetch_add(1, Ordering::Relaxed);
        self.disk.enter(number);
        number
    }

    /// Opens one more log.
    pub fn open(&self) -> Result<Arc<Process>> {
        let number = self.enter_another();
        let seed = self.config.seed ^ number << 40;
        let (read, write) = (SimQueue::new(seed), SimQueue::new(seed + 1));
        self.disk.fail_floors(0, seed);
        self.tell(|| format!("process {number} opens"));
        let log = Log::open(self.options(&read, &write))?;
        self.tell(|| format!("process {number} has opened, sees {} lanes", log.stats().lanes));
        let (begun, held, ends) = (Mutex::default(), Mutex::default(), Mutex::default());
        let process = Arc::new(Process { number, log, read, write, begun, held, ends });
        self.processes.lock().push(Arc::clone(&process));
        if self.depth == 0 {
            let must = std::mem::take(&mut self.model.lock().must);
            if self.processes.lock().len() == 1 {
                let there = must.iter().filter(|k| matches!(self.load_at_last(&process, **k), Loaded::Put(_)));
                self.demand(&must, &there.copied().collect::<Vec<_>>());
            }
            self.disk.fail_floors(self.config.faults.eio * 10, seed);
            process.read.set_faults(self.config.faults);
            process.write.set_faults(self.config.faults);
        }
        Ok(process)
    }

    /// Runs `f` as the process.
    pub fn run<T>(&self, process: &Process, f: impl FnOnce(&Log) -> T) -> T {
        self.disk.enter(process.number);
        f(&process.log)
    }

    /// Ends all writes of a process that are under way, as a queue does sooner or later.
    pub fn settle(&self, process: &Process) {
        self.disk.enter(process.number);
        process.write.defer(false);
        while process.write.run_one(0) {}
    }

    /// Stops a process as it should be stopped.
    pub fn close(&self, process: &Arc<Process>) {
        self.settle(process);
        process.begun.lock().clear();
        process.held.lock().clear();
        let there = self.present();
        let closed = process.log.close(Instant::now() + Duration::from_secs(5));
        if closed.is_ok() && !self.disk.is_dead(process.number) {
            self.model.lock().flushed(process.number, None);
        }
        // Whoever opens it next has to find what there was.
        let must = self.must_of(there);
        let mut model = self.model.lock();
        model.must = must;
        model.ended(Some(process.number));
        drop(model);
        self.forget(process);
    }

    /// Takes away a process whose writes the disk has stopped taking. The caller must then put
    /// shared memory back to that moment.
    pub fn bury(&self, process: &Arc<Process>) {
        self.tell(|| format!("process {} is dead", process.number));
        process.write.forget();
        process.read.forget();
        process.begun.lock().clear();
        process.held.lock().clear();
        process.log.abandon();
        self.forget(process);
    }

    fn forget(&self, process: &Arc<Process>) {
        if self.depth == 0 {
            self.judge.note(&process.log.stats());
        }
        self.processes.lock().retain(|p| p.number != process.number);
    }

    /// The kernel's files of the cache: locks and shared memory.
    fn kernels_files(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut open = vec![self.dir.clone()];
        while let Some(dir) = open.pop() {
            for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
                let is_dir = entry.file_type().is_ok_and(|t| t.is_dir());
                if is_dir { &mut open } else { &mut found }.push(entry.path());
            }
        }
        found
    }

    /// The files of shared memory, as they are now.
    pub fn shared_memory(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let mut all = self.kernels_files();
        all.retain(|path| path.extension().is_some_and(|e| e == "shm"));
        all.into_iter().filter_map(|path| std::fs::read(&path).ok().map(|bytes| (path, bytes))).collect()
    }

    /// Whether somebody is amid something for which others would wait: has a lock other than a
    /// lane's.
    pub fn is_locked(&self) -> bool {
        let may_wait = |path: &&PathBuf| path.extension().is_none() && !path.ends_with("LOCK");
        let is_taken = |path: &PathBuf| std::fs::File::open(path).is_ok_and(|file| file.try_lock().is_err());
        self.kernels_files().iter().filter(may_wait).any(is_taken)
    }

    /// The names of the namespace and the shard, once there is one.
    pub fn shard(&self) -> Option<(String, String)> {
        let lane = self.disk.files().paths().next()?.to_path_buf();
        let mut names = lane.components().map(|c| c.as_os_str().to_string_lossy().into_owned());
        Some((names.next()?, names.next()?))
    }

    /// All processes die at once; nothing that they do from here on reaches disk or shared memory
    /// that anybody reads.
    pub fn end(&self) {
        self.disk.observe(None);
        let all: Vec<Arc<Process>> = self.processes.lock().clone();
        for process in all {
            self.disk.kill(process.number);
            self.bury(&process);
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.end();
    }
}

/// Puts shared memory back to what it was.
pub fn put_back(shared: &[(PathBuf, Vec<u8>)]) {
    for (path, bytes) in shared {
        restore(path, bytes);
    }
}

/// Puts a file's bytes back without changing its length: somebody may have it mapped.
fn restore(path: &Path, bytes: &[u8]) {
    use std::os::unix::fs::FileExt;
    let Ok(file) = std::fs::File::options().write(true).open(path) else { return };
    if file.metadata().is_ok_and(|m| m.len() == bytes.len() as u64) {
        file.write_all_at(bytes, 0).unwrap();
    }
}
