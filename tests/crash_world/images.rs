//! What a crash leaves, judged: opened by the real recovery, loaded by the real checks, and worked
//! on until it crashes again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay::error::ErrorKind;
use forebay::format::record::Record;
use forebay::log::{LogStats, fsck};
use parking_lot::Mutex;

use super::disk::{Content, Files, Loss, Observer, SimDisk};
use super::loads::Loaded;
use super::model::{Put, State};
use super::rng::Rng;
use super::steps::telling;
use super::world::{FAILED, Process, Start, World};
use super::{Config, FLUSHES_FAIL_FROM, key};

/// How much is looked at.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Images of each state of the disk.
    pub images: u64,
    /// One in so many images is worked on and crashes again.
    pub chain_one_in: u64,
    /// One in so many writes while an image is opened is a crash too.
    pub nested_one_in: u64,
    /// Crashes in a row.
    pub depth: usize,
    /// One in so many images is also read by fsck.
    pub fsck_one_in: u64,
    /// One in so many images has a bit turned.
    pub rot_one_in: u64,
    /// One in so many images of a workload is also made anew from its data.
    pub rebuild_one_in: u64,
    /// Two more images of each state, in which one file is ahead of the other by all that was not
    /// flushed.
    pub apart: bool,
}

impl Default for Effort {
    fn default() -> Self {
        Self {
            images: 2,
            chain_one_in: 20,
            nested_one_in: 6,
            depth: 6,
            fsck_one_in: 40,
            rot_one_in: 25,
            rebuild_one_in: 10,
            apart: false,
        }
    }
}

/// Where images are opened, and what was counted.
#[derive(Default)]
pub struct Judge {
    pub effort: Effort,
    base: PathBuf,
    pub images: AtomicU64,
    pub demanded: AtomicU64,
    pub served: AtomicU64,
    pub missed: AtomicU64,
    pub bad: AtomicU64,
    pub kills: AtomicU64,
    pub amid: AtomicU64,
    pub fscks: AtomicU64,
    pub sealed: AtomicU64,
    pub reclaimed: AtomicU64,
    pub moved: AtomicU64,
    pub hole_evicted: AtomicU64,
    pub quota: AtomicU64,
    pub adopted: AtomicU64,
    pub rotten: AtomicU64,
    /// Keys that a rebuild without an index gave and the log served, and those that only the
    /// rebuild gave, as it may.
    pub rebuilt: AtomicU64,
    pub rebuilt_only: AtomicU64,
    /// Loads of a key that the index had and the data had not.
    pub promised: AtomicU64,
    pub deepest: AtomicU64,
}

impl Judge {
    pub fn new(effort: Effort, base: &Path) -> Arc<Self> {
        Arc::new(Self { effort, base: base.to_path_buf(), ..Self::default() })
    }

    fn counters(&self) -> [&AtomicU64; 18] {
        let log = [&self.sealed, &self.reclaimed, &self.moved, &self.hole_evicted, &self.quota, &self.adopted];
        let [sealed, reclaimed, moved, hole_evicted, quota, adopted] = log;
        let (images, served, missed, bad) = (&self.images, &self.served, &self.missed, &self.bad);
        [
            images,
            served,
            missed,
            bad,
            &self.kills,
            &self.amid,
            &self.demanded,
            &self.fscks,
            &self.rotten,
            &self.rebuilt,
            &self.rebuilt_only,
            &self.promised,
            sealed,
            reclaimed,
            moved,
            hole_evicted,
            quota,
            adopted,
        ]
    }

    /// Adds what a log of a workload has done.
    pub fn note(&self, stats: &LogStats) {
        let of = [
            (&self.sealed, stats.sealed),
            (&self.reclaimed, stats.reclaimed),
            (&self.moved, stats.moved),
            (&self.hole_evicted, stats.hole_evicted),
            (&self.quota, stats.quota_evicted),
            (&self.adopted, stats.adopted_lanes),
        ];
        for (counter, n) in of {
            counter.fetch_add(n, Ordering::Relaxed);
        }
    }

    /// Adds what another has counted.
    pub fn add(&self, other: &Self) {
        for (mine, others) in self.counters().into_iter().zip(other.counters()) {
            mine.fetch_add(others.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.deepest.fetch_max(other.deepest.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    fn dir(&self, depth: usize) -> PathBuf {
        self.base.join(format!("depth{depth}"))
    }
}

/// Crashes the disk at its states.
pub struct Watcher {
    world: std::sync::Weak<World>,
    one_in: u64,
    state: Mutex<Watch>,
}

struct Watch {
    rng: Rng,
    boundary: u64,
    /// At which state the running process dies.
    kill_at: Option<u64>,
    killed: Option<Killed>,
    /// A process does something amid another's call.
    is_amid: bool,
}

/// A process that died within a call.
pub struct Killed {
    pub process: u64,
    pub shared: Vec<(PathBuf, Vec<u8>)>,
}

impl Watcher {
    /// Watches the world from now on; of `one_in` states one is looked at.
    pub fn on(world: &Arc<World>, one_in: u64) -> Arc<Self> {
        let rng = Rng::of(world.config.seed, 1000 + hash(&world.story));
        let state = Mutex::new(Watch { rng, boundary: 0, kill_at: None, killed: None, is_amid: false });
        let watcher = Arc::new(Self { world: Arc::downgrade(world), one_in, state });
        world.disk.observe(Some(Arc::clone(&watcher) as _));
        watcher
    }

    /// The process that runs then dies after so many more writes.
    pub fn kill_after(&self, writes: u64) {
        let mut state = self.state.lock();
        state.kill_at = Some(state.boundary + writes);
    }

    pub fn take_killed(&self) -> Option<Killed> {
        let mut state = self.state.lock();
        state.kill_at = None;
        state.killed.take()
    }
}

impl Observer for Watcher {
    fn boundary(&self, disk: &SimDisk) {
        let Some(world) = self.world.upgrade() else { return };
        if FAILED.load(Ordering::Relaxed) {
            return;
        }
        let (boundary, mut rng, dies, is_amid) = {
            let mut state = self.state.lock();
            state.boundary += 1;
            let seed = state.rng.next();
            (state.boundary, Rng(seed), state.kill_at == Some(state.boundary), state.is_amid)
        };
        if rng.one_in(self.one_in) {
            world.crash_here(boundary, &mut rng);
        }
        // A process that died during another's call would put shared memory back to before what the
        // other does after that moment.
        if is_amid || world.depth > 0 {
            return;
        }
        if world.config.writers > 1 && !dies && rng.one_in(4) {
            self.state.lock().is_amid = true;
            world.step_amid(&mut rng);
            self.state.lock().is_amid = false;
        }
        if dies && !disk.is_dead(disk.current()) {
            let (shared, must) = (world.shared_memory(), world.must_of(world.present()));
            world.model.lock().must = must;
            disk.kill(disk.current());
            self.state.lock().killed = Some(Killed { process: disk.current(), shared });
        }
    }
}

fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

impl World {
    /// Ends the run with what a human needs to replay it.
    pub fn fail(&self, why: &str) -> ! {
        FAILED.store(true, Ordering::Relaxed);
        panic!(
            "{why}\n  seed {}: {}\n  {:?}\n  replay: FOREBAY_CRASH_SEED={} cargo test -p forebay --test proof_crash one_seed -- --nocapture",
            self.config.seed, self.story, self.config, self.config.seed
        );
    }

    /// As [`fail`](Self::fail), for a key.
    pub fn fail_at(&self, k: u64, why: &str) -> ! {
        FAILED.store(true, Ordering::Relaxed);
        let puts = self.model.lock().of_key(k);
        let now = self.tell_of(&self.disk.files(), k);
        let began = self.tell_of(&self.began, k);
        self.fail(&format!("key {k}: {why}\n  puts {puts:#?}\n  the disk at first:{began}\n  and now:{now}"));
    }

    /// Whether faults other than crashes have been injected.
    pub fn faulty(&self) -> bool {
        self.model.lock().rotten
    }

    /// The puts that living processes have in their indexes; `None` where nobody lives. What was
    /// stored and is not there has been given up, also where an index that somebody makes anew
    /// lists it again.
    pub fn present(&self) -> Option<Vec<u64>> {
        let mut alive = self.processes.lock().clone();
        alive.retain(|p| !self.disk.is_dead(p.number));
        if alive.is_empty() {
            return None;
        }
        let lanes = |p: &Put| -> Vec<[u8; 16]> {
            let found = alive.iter().filter_map(|process| process.log.peek(&key(p.key)));
            found.filter(|info| info.sequence == p.sequence).map(|info| info.lane).collect()
        };
        let has_ended = |p: &&Put| !p.going && matches!(p.state, State::Stored | State::Flushed);
        let puts: Vec<Put> = self.model.lock().puts.values().filter(has_ended).copied().collect();
        let found: Vec<(u64, Vec<[u8; 16]>)> = puts.iter().map(|p| (p.id, lanes(p))).collect();
        let mut model = self.model.lock();
        let mut there = Vec::new();
        for (id, lanes) in found {
            if model.sees(id, &lanes) {
                there.push(id);
            }
        }
        Some(there)
    }

    /// Keys that an image of now must serve, where these puts are present.
    pub fn must_of(&self, present: Option<Vec<u64>>) -> Vec<u64> {
        let (model, now_s) = (self.model.lock(), self.now_s());
        let Some(present) = present else { return model.must.clone() };
        let puts = present.iter().filter_map(|id| model.puts.get(id));
        let lasts = |p: &&Put| p.expiry_s == 0 || u64::from(p.expiry_s) > now_s;
        puts.filter(|p| p.state == State::Flushed && !p.going).filter(lasts).map(|p| p.key).collect()
    }

    /// Prints what the indexes say of the key in `FOREBAY_CRASH_KEY`, while a seed is replayed.
    fn tell_key(&self) {
        static KEY: std::sync::OnceLock<Option<u64>> = std::sync::OnceLock::new();
        let wanted = || std::env::var("FOREBAY_CRASH_KEY").ok().and_then(|k| k.parse().ok());
        let Some(k) = KEY.get_or_init(wanted).filter(|_| telling()) else { return };
        for process in self.processes.lock().iter() {
            let info = process.log.peek(&key(k));
            let told =
                info.map(|i| format!("sequence {:x} in segment {} of lane {:x?}", i.sequence, i.segment, &i.lane[..2]));
            println!("{}   key {k} for process {}: {told:?}", self.story, process.number);
        }
    }

    /// What image `n` of a state loses.
    pub fn loss(&self, n: u64, rng: &mut Rng) -> Loss {
        match (n, rng.below(6)) {
            (0, 0) => Loss::All,
            (1, 0) => Loss::Nothing,
            (_, 0) => Loss::Tail,
            (_, 1) => Loss::Some,
            (_, 2) => Loss::AllBut(["index.kv", "data.kv", "FLOORS"][rng.below(3) as usize]),
            _ if self.config.seed >= FLUSHES_FAIL_FROM && rng.one_in(2) => Loss::Cut,
            _ => Loss::Torn,
        }
    }

    /// Judges images of the disk as it is.
    pub fn crash_here(&self, boundary: u64, rng: &mut Rng) {
        let current = self.disk.current();
        self.tell_key();
        let must = self.must_of(self.present());
        let files = self.disk.files();
        let images = match self.depth {
            0 if self.config.faults.flush > 0 && self.disk.has_just_failed() => 3 * self.judge.effort.images,
            0 => self.judge.effort.images,
            _ => 1,
        };
        let apart: &[&str] = if self.judge.effort.apart { &["index.kv", "data.kv"] } else { &[] };
        let losses = (0..images).map(|n| (n, None)).chain(apart.iter().map(|name| (0, Some(Loss::AllBut(name)))));
        for (n, loss) in losses {
            let loss = loss.unwrap_or_else(|| self.loss(n, rng));
            let mut image = Rng(rng.next());
            let story = format!("{} > state {boundary}, {loss:?}", self.story);
            let mut model = self.model.lock().clone();
            model.must.clone_from(&must);
            model.ended(None);
            let (now_ms, depth) = (self.clock.ms(), self.depth + 1);
            let start = Start { files: files.after_crash(loss, &mut image), model, now_ms, story, depth };
            judge(&self.config, &self.judge, start, &mut image);
        }
        self.disk.enter(current);
    }
}

/// Makes a directory look as after a power cut: lanes, but no shared memory.
fn prepare(dir: &Path, start: &Start) {
    std::fs::create_dir_all(dir).unwrap();
    let mut open = vec![dir.to_path_buf()];
    let mut lanes = Vec::new();
    while let Some(at) = open.pop() {
        for entry in std::fs::read_dir(&at).unwrap().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            if entry.file_type().unwrap().is_dir() {
                if name.to_string_lossy().starts_with("lane") {
                    lanes.push(path.clone());
                }
                open.push(path);
            } else if name != "BUDGET" && name != "LOCK" && name != "SHARD" {
                std::fs::remove_file(path).unwrap();
            }
        }
    }
    let wanted: Vec<PathBuf> = start.files.paths().filter_map(|p| Some(dir.join(p.parent()?))).collect();
    for lane in lanes.iter().filter(|l| !wanted.contains(l)) {
        std::fs::remove_dir_all(lane).unwrap();
    }
    for lane in &wanted {
        std::fs::create_dir_all(lane).unwrap();
    }
}

/// Opens an image, reads everything, perhaps goes on with it.
pub fn judge(config: &Config, judge: &Arc<Judge>, start: Start, rng: &mut Rng) {
    let dir = judge.dir(start.depth);
    prepare(&dir, &start);
    judge.images.fetch_add(1, Ordering::Relaxed);
    judge.deepest.fetch_max(start.depth as u64, Ordering::Relaxed);
    let deeper = start.depth < judge.effort.depth;
    // Deeper crashes are rarer, so that one seed does not branch without end.
    let goes_on = deeper && rng.one_in(judge.effort.chain_one_in * if start.depth > 1 { 2 } else { 1 });
    let mut start = start;
    if rng.one_in(judge.effort.rot_one_in) {
        start.model.rotten = true;
        start.story += ", a bit turned";
        start.files.flip(rng);
        judge.rotten.fetch_add(1, Ordering::Relaxed);
    }
    let read_by_fsck = rng.one_in(judge.effort.fsck_one_in).then(|| judge.read_by_fsck(config, &start)).flatten();
    let is_rebuilt = start.depth == 1 && rng.one_in(judge.effort.rebuild_one_in);
    let world = World::new(config, &dir, judge, start);
    let watcher = goes_on.then(|| Watcher::on(&world, judge.effort.nested_one_in));
    let process = match world.open() {
        Ok(process) => process,
        // A superblock that lost a bit can look like one of a newer version.
        Err(e) if matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Incompatible) && world.faulty() => return,
        Err(e) => world.fail(&format!("what a crash left cannot be opened: {e}")),
    };
    let served = world.check_all(&process);
    if let Some(by_fsck) = read_by_fsck {
        judge.fscks.fetch_add(1, Ordering::Relaxed);
        if by_fsck != served {
            let differs = |k: &u64| by_fsck.contains(k) != served.contains(k);
            let first = (0..config.keys).find(differs).unwrap_or(0);
            world.fail_at(first, &format!("fsck finds keys {by_fsck:?}, the log serves {served:?}"));
        }
    }
    if is_rebuilt {
        world.check_rebuilt(&served);
    }
    if watcher.is_some() {
        let steps = 3 + rng.below(12);
        for _ in 0..steps {
            world.step(&process, rng);
        }
    }
    world.end();
}

/// Files of a simulated disk, as the kernel's below a directory, for as long as this lives.
pub struct Laid {
    pub dir: PathBuf,
}

impl Laid {
    /// Those of `files` whose path is wanted. No disk may be mounted at `dir`.
    pub fn out(dir: PathBuf, files: &Files, wanted: impl Fn(&Path) -> bool) -> Self {
        drop(std::fs::remove_dir_all(&dir));
        for path in files.paths().filter(|path| wanted(path)) {
            let content = files.content(path).unwrap();
            std::fs::create_dir_all(dir.join(path).parent().unwrap()).unwrap();
            write_sparse(&dir.join(path), content);
        }
        Self { dir }
    }

    pub fn lanes(&self) -> Vec<fsck::LaneDir> {
        fsck::lanes(&self.dir).unwrap_or_default()
    }
}

impl Drop for Laid {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.dir));
    }
}

/// Makes a file of the kernel's with these bytes and holes.
fn write_sparse(path: &Path, content: &Content) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path).unwrap();
    for (offset, page) in content.data() {
        file.write_all_at(page, offset).unwrap();
    }
    file.set_len(content.len).unwrap();
}

/// The records of slots that a deep check finds intact, and nothing covers.
pub fn intact(files: &[fsck::LaneDir], lanes: &[fsck::RawLane], now_s: u64) -> Vec<Record> {
    let deep = fsck::deep(files, lanes, now_s, &|_| ()).unwrap();
    let is_bad = |lane: usize, r: &Record| {
        let at = lanes[lane].slot_offset(r);
        deep.bad.iter().chain(&deep.gone).any(|b| (b.lane, b.offset, b.key) == (lane, at, r.key))
    };
    fsck::listed(lanes, now_s).into_iter().filter(|(lane, r)| !is_bad(*lane, r)).map(|(_, r)| r).collect()
}

impl Judge {
    /// Where files are laid out that are looked at without a log.
    pub fn aside(&self) -> PathBuf {
        self.base.join("aside")
    }

    /// The keys that a deep check finds intact; none where something is damaged, of which fsck and
    /// recovery may make different things.
    fn read_by_fsck(&self, config: &Config, start: &Start) -> Option<Vec<u64>> {
        let laid = Laid::out(self.aside(), &start.files, |_| true);
        let files = laid.lanes();
        let lanes: Vec<fsck::RawLane> = files.iter().map(|f| fsck::RawLane::read(f).ok()).collect::<Option<_>>()?;
        if lanes.iter().any(|lane| !lane.damage.is_empty()) {
            return None;
        }
        let intact = intact(&files, &lanes, start.now_ms / 1000);
        Some((0..config.keys).filter(|k| intact.iter().any(|r| r.key == key(*k))).collect())
    }
}

impl World {
    /// What the indexes of some files say of a key, for whoever looks into a failure.
    fn tell_of(&self, files: &Files, k: u64) -> String {
        let mut told = String::new();
        let laid = Laid::out(self.judge.aside(), files, |_| true);
        for lane in laid.lanes() {
            let Ok(raw) = fsck::RawLane::read(&lane) else { continue };
            let mut segments: Vec<_> = raw.segments.iter().collect();
            segments.sort_unstable_by_key(|(n, _)| **n);
            told += &format!("\n  {}: damage {:?}, segments {segments:?}", lane.name, raw.damage);
            for r in raw.records.iter().filter(|r| r.key.0[..16] == key(k).0[..16]) {
                told += &format!(
                    "\n    {:?} {:x} in segment {}.{} page {}",
                    r.kind, r.sequence, r.segment, r.epoch, r.page
                );
            }
        }
        told
    }

    /// Loads every key after a recovery. What it serves is durable from then on.
    pub fn check_all(&self, process: &Process) -> Vec<u64> {
        let must = std::mem::take(&mut self.model.lock().must);
        let mut served = Vec::new();
        for k in 0..self.config.keys {
            let loaded = self.load_at_last(process, k);
            let counter = match loaded {
                Loaded::Put(id) => {
                    self.model.lock().recovered(id);
                    served.push(k);
                    &self.judge.served
                }
                Loaded::Miss => &self.judge.missed,
                Loaded::Bad => &self.judge.bad,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
        self.demand(&must, &served);
        served
    }

    /// Fails where a key that must be served is not.
    pub fn demand(&self, must: &[u64], served: &[u64]) {
        self.judge.demanded.fetch_add(must.len() as u64, Ordering::Relaxed);
        if let Some(k) = must.iter().find(|k| !served.contains(k)).filter(|_| !self.faulty()) {
            self.fail_at(*k, "it was flushed and is lost");
        }
    }

    /// As [`load`](Self::load); a key that is in several places is there if it is in one of them.
    pub fn load_at_last(&self, process: &Process, k: u64) -> Loaded {
        let mut loaded = self.load(process, k);
        for _ in 0..self.config.writers + 1 {
            if loaded != Loaded::Bad {
                break;
            }
            self.judge.promised.fetch_add(1, Ordering::Relaxed);
            loaded = self.load(process, k);
        }
        loaded
    }
}
