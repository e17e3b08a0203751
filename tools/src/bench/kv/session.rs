//! What a job of the engine works with: an open cache, prompts, and paged KV with a shuffled block
//! table.
//!
//! Without `--keep` the cache lies in a temporary folder of the job's directory, so nothing else is
//! ever removed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::config::{Capacity, Codec, Cufile, IoEngine as Engines, MinFree, OnOpenFailure, Settings};
use forebay::device::{Device, HostMemory, PagedKv, open_device};
use forebay::engine::{Engine, Prompt};
use forebay::geometry::{Geometry, LayerSpec};
use forebay::key::Extra;
use forebay::paged::{KvLayout, KvShape, Packing, PagedLayout};
use forebay::{Error, ErrorKind, Result};

use super::pattern::Kv;
use crate::bench::job::Job;
use crate::bench::options::{Coding, IoEngine, Layout};
use crate::random::Rng;
use crate::scratch::{Scratch, outside_caches};
use crate::size::show_bytes;

const DEFAULT_TOKENS: u64 = 8192;
/// Copy threads on the host at most.
const COPY_THREADS: usize = 4;
const CLOSE: Duration = Duration::from_secs(60);

/// A cache directory that goes away if it is the job's own.
pub(super) struct CacheDir {
    pub(super) dir: std::path::PathBuf,
    _temporary: Option<Scratch>,
}

impl CacheDir {
    /// The job's directory where it is kept, else a folder in it.
    pub(super) fn of(job: &Job) -> Result<Self> {
        let make = |e| {
            let advice = "make the directories above it: a path that is wrong, or not mounted, is not made";
            Error::io("cannot make the cache's directory", e).at(&job.directory).advice(advice)
        };
        let directory = std::path::absolute(&job.directory).map_err(make)?;
        if !directory.is_dir() {
            std::fs::create_dir(&directory).map_err(make)?;
        }
        if job.kv.keep {
            // One that an earlier job has left may be used again.
            directory.parent().map_or(Ok(()), outside_caches)?;
            return Ok(Self { dir: directory, _temporary: None });
        }
        let temporary = Scratch::new(&directory, "forebay-bench-")?;
        Ok(Self { dir: temporary.path().to_owned(), _temporary: Some(temporary) })
    }

    /// Bytes that the cache may take: what the user says, else room for what the job stores beside
    /// everything that is there, so that a small job evicts nothing of a cache that a larger
    /// one left.
    pub(super) fn capacity(&self, job: &Job, stores: u64) -> Result<u64> {
        match job.kv.capacity {
            Some(bytes) => Ok(bytes),
            None => Ok(forebay::log::allocated_below(&self.dir)?.saturating_add(stores)),
        }
    }
}

/// An open engine with the job's prompts.
pub(super) struct Session {
    /// The engine.
    pub(super) engine: Engine,
    device: Arc<dyn Device>,
    /// Number of prompts.
    pub(super) prompts: usize,
    /// Tokens of each.
    pub(super) tokens: usize,
    /// Payload bytes of each.
    pub(super) prompt_bytes: u64,
    layout: PagedLayout,
    block_tokens: u32,
    num_blocks: u32,
    _place: CacheDir,
}

impl Session {
    /// Opens the cache for `copies` times the job's prompts.
    pub(super) fn open(job: &Job, copies: u64) -> Result<Self> {
        let geometry = geometry(job)?;
        let chunk = u64::from(geometry.chunk_tokens);
        let token_bytes = (geometry.chunk_bytes(geometry.chunk_tokens as usize) as u64 / chunk).max(1);
        // Every worker gets a prompt of its own, so that no byte is moved twice.
        let fits = job.size.map_or(u64::MAX, |size| size / job.numjobs.max(1) as u64 / token_bytes);
        let tokens = job.kv.tokens.unwrap_or(DEFAULT_TOKENS.min(fits));
        let tokens = (tokens / chunk).max(1) * chunk;
        let prompt_bytes = geometry.chunk_bytes(chunk as usize) as u64 * (tokens / chunk);
        let prompts = (job.size.unwrap_or(prompt_bytes) / prompt_bytes).max(1);
        let need = prompts.saturating_mul(prompt_bytes).saturating_mul(copies);
        let place = CacheDir::of(job)?;
        let slot = geometry.chunk_bytes(chunk as usize) as u64 + (1 << 20);
        let stores = (need + need / 3).saturating_add(slot * 16 + (256 << 20));
        let settings = settings(job, &place, place.capacity(job, stores)?, geometry.chunk_tokens);
        let num_blocks = tokens.div_ceil(u64::from(job.kv.block_size)) as u32;
        let shape = KvShape {
            layout: paged_layout(job, &geometry),
            packing: Packing::Outer,
            block_tokens: job.kv.block_size,
            num_blocks,
        };
        let layout = PagedLayout::per_layer(&geometry.layers, shape)?;
        let device = open_device(&job.device, &settings)?;
        let engine = Engine::open(&settings, geometry, Arc::clone(&device))?;
        if u64::from(engine.geometry().chunk_tokens) != chunk {
            return Err(Error::new(ErrorKind::InvalidInput, "--block-size must divide the model's chunk")
                .advice(format!("chunks have {chunk} tokens")));
        }
        Ok(Self {
            engine,
            device,
            prompts: prompts as usize,
            tokens: tokens as usize,
            prompt_bytes,
            layout,
            block_tokens: job.kv.block_size,
            num_blocks,
            _place: place,
        })
    }

    /// Prompt `n`, hashed.
    pub(super) fn prompt(&self, n: u64) -> Prompt {
        let first = (n as u32).wrapping_mul(0x9e37_79b1);
        let tokens: Vec<u32> = (0..self.tokens as u32).map(|i| first ^ i).collect();
        self.engine.prompt(&tokens, &Extra::default())
    }

    /// Fresh KV memory for one prompt.
    pub(super) fn kv(&self, seed: u64) -> Result<Kv> {
        let mut table: Vec<i64> = (0..i64::from(self.num_blocks)).collect();
        Rng::new(seed).shuffle(&mut table);
        let block = i64::from(self.block_tokens);
        let slots: Vec<i64> = table.iter().flat_map(|b| (0..block).map(move |t| b * block + t)).collect();
        let slots: Arc<[i64]> = slots.into_iter().take(self.tokens).collect();
        Ok(Kv::new(self.memory()?, slots, self.block_tokens))
    }

    /// Paged KV where the device works, and the host's memory or copy of it.
    fn memory(&self) -> Result<(Arc<PagedKv>, Vec<Arc<HostMemory>>)> {
        if self.device.place() == forebay::io::MemorySpace::Host {
            return PagedKv::alloc_zeroed(self.layout.clone());
        }
        let sizes = self.layout.memory_bytes();
        let paged = sizes.iter().map(|&len| self.device.alloc_kv(len)).collect::<Result<Vec<_>>>()?;
        let copies = sizes.iter().map(|&len| HostMemory::alloc_zeroed(len)).collect::<Result<Vec<_>>>()?;
        Ok((PagedKv::over(paged, self.layout.clone())?, copies))
    }

    /// The I/O path in use.
    pub(super) fn path(&self) -> Result<Option<String>> {
        let stats = self.engine.stats()?;
        let (host, device) = (stats.paths.first(), stats.device_paths.first());
        Ok(host.map(|host| match device {
            Some(&"bounce") => format!("bounce over {host}"),
            Some(device) => (*device).to_owned(),
            None => (*host).to_owned(),
        }))
    }

    /// Chunks that loads found in memory, where the job has them kept there.
    pub(super) fn memory_hits(&self, job: &Job) -> Result<Option<u64>> {
        let hits = self.engine.stats()?.memory.hits;
        Ok((job.kv.local_cpu > 0).then_some(hits))
    }

    /// With a codec: the bytes of KV moved so far beside those moved on the drive.
    pub(super) fn coded(&self, job: &Job) -> Result<Option<String>> {
        if job.kv.codec == Coding::None {
            return Ok(None);
        }
        let stats = self.engine.stats()?;
        let line = |what: &str, kv: u64, drive: u64| {
            let (of, on) = (show_bytes(kv as f64), show_bytes(drive as f64));
            format!("{what} {of} of KV as {on} on the drive ({:.3} times)", kv as f64 / drive.max(1) as f64)
        };
        let stored = (stats.stored_bytes > 0).then(|| line("stored", stats.stored_bytes, stats.log.data_bytes_written));
        let loaded = (stats.loaded_bytes > 0).then(|| line("loaded", stats.loaded_bytes, stats.read_bytes));
        Ok(Some([stored, loaded].into_iter().flatten().collect::<Vec<_>>().join(", ")))
    }

    /// Closes the cache, and waits for its end.
    pub(super) fn close(self) -> Result<()> {
        self.engine.close(Instant::now() + CLOSE)
    }
}

fn geometry(job: &Job) -> Result<Geometry> {
    let mut geometry = Geometry::preset(&job.kv.model)?;
    if job.kv.layout == Some(Layout::Opaque) {
        let block = job.kv.block_size;
        let opaque = |l: &LayerSpec| LayerSpec::opaque(block, l.extent_bytes(block as usize) as u32);
        let layers = geometry.layers.iter().map(opaque).collect();
        geometry = Geometry::new(&geometry.model, geometry.dtype.clone(), layers, geometry.chunk_tokens)?;
    }
    Ok(geometry)
}

fn paged_layout(job: &Job, geometry: &Geometry) -> KvLayout {
    match job.kv.layout {
        Some(Layout::Nhd) => KvLayout::Nhd,
        Some(Layout::Hnd) => KvLayout::Hnd,
        Some(Layout::Mla) => KvLayout::Mla,
        Some(Layout::Opaque) => KvLayout::Opaque,
        None if geometry.layers.iter().all(|l| l.planes.iter().all(|p| p.heads == 1)) => KvLayout::Mla,
        None => KvLayout::Nhd,
    }
}

fn settings(job: &Job, place: &CacheDir, capacity: u64, chunk_tokens: u32) -> Settings {
    let mut settings = Settings::at(&place.dir);
    settings.chunk_size = chunk_tokens;
    settings.capacity = Capacity::Bytes(capacity);
    settings.min_free = MinFree::Bytes(0);
    settings.on_open_failure = OnOpenFailure::Fail;
    settings.allow_any_filesystem = true;
    settings.max_concurrent_ops = job.iodepth;
    settings.block_size = (job.bs as usize).next_multiple_of(4096);
    settings.io_engine = match job.ioengine {
        IoEngine::Uring => Engines::Uring,
        IoEngine::Threads | IoEngine::Psync => Engines::Threads,
        IoEngine::Auto | IoEngine::Cufile => Engines::Auto,
    };
    settings.codec = match job.kv.codec {
        Coding::None => Codec::None,
        Coding::Exp4 => Codec::Exp4,
    };
    settings.workers = std::thread::available_parallelism().map_or(1, usize::from).min(COPY_THREADS);
    settings.cufile = match job.ioengine {
        IoEngine::Auto => Cufile::Auto,
        IoEngine::Cufile => Cufile::Force,
        IoEngine::Uring | IoEngine::Threads | IoEngine::Psync => Cufile::Never,
    };
    if job.kv.local_cpu > 0 {
        (settings.local_cpu, settings.max_local_cpu_size) = (true, job.kv.local_cpu);
    }
    if let Some(ctas) = job.kv.kernel_ctas {
        settings.kernel_ctas = ctas;
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::options::{JobOptions, KvOptions, Rw};

    #[test]
    fn a_job_leaves_room_for_what_is_there_unless_told_otherwise() {
        let dir = tempfile::tempdir_in(".").unwrap();
        std::fs::create_dir(dir.path().join("lane")).unwrap();
        std::fs::write(dir.path().join("lane/data"), vec![1; 2 << 20]).unwrap();
        let capacity = |capacity| {
            let kv = KvOptions { keep: Some(true), capacity, ..KvOptions::default() };
            let directory = Some(dir.path().to_owned());
            let job = Job::new(JobOptions { rw: Some(Rw::Load), directory, kv, ..JobOptions::default() }, "j").unwrap();
            CacheDir::of(&job).unwrap().capacity(&job, 1 << 20).unwrap()
        };
        assert!(capacity(None) >= 3 << 20, "{}", capacity(None));
        assert_eq!(capacity(Some(1 << 20)), 1 << 20);
    }
}
