//! The remote tier: chunks in an object store below the drives, where other machines find them.
//!
//! One object is one chunk: the bytes of its slot from the header on, with the same CRCs, under
//! `PREFIX/NAMESPACE/SHARD/TENANT/KEY`. Chunks are uploaded in the background after they were
//! published on a drive, each once. A fetch brings the chunks of a prompt back to a drive by
//! ordinary puts; loads only ever read drives and memory.
//!
//! Invariants:
//! - No load and no lookup waits for the store. A fetch, an upload or a deletion that the store
//!   does not answer ends at its time-out, and a store that keeps failing is left alone for a
//!   while.
//! - Nothing fetched is published before its header fits what was asked for and every extent has
//!   its CRC.
//! - Memory and queues are bounded; what does not fit is shed and counted. Only what has timed out
//!   stays with its drive beside the bound: were it counted, one drive that hangs would end the
//!   fetches to all others. A drive that has as much as the bound gets nothing more.
//! - Every failure is a miss, or a chunk that is not uploaded; a removal that does not reach the
//!   store says so.
//!
//! Everything runs on a few threads of its own. This module knows no devices, no paged memory and
//! no tokens.
//!
//! Files: `bucket.rs` (requests to the store), `breaker.rs` (when a failing store is left alone),
//! `known.rs` (answers kept for a while), `object.rs` (what is in an object), `upload.rs`,
//! `fetch.rs`, `restore.rs` (fetches all that is there, without a prompt), `transfer.rs` (the log's
//! queues, and bounds on memory), `stats.rs`, `store.rs` (for tools).

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use object_store::path::Path;
use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

mod breaker;
mod bucket;
mod fetch;
mod known;
mod object;
mod restore;
mod stats;
mod store;
mod transfer;
mod upload;

pub use fetch::Fetch;
pub use object::Wanted;
pub use stats::RemoteStats;
pub use store::{RemoteObject, RemoteStore, RemoteTrial};

use crate::config::{Mode, Settings};
use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::SlotLayout;
use crate::geometry::Geometry;
use crate::key::ChunkKey;
use crate::log::Log;
use crate::tier::MemoryTier;
use bucket::RemoteBucket;
use known::{KnownObjects, RemotePresence};
use stats::{Counters, RemoteCause};
use transfer::{Bound, SparePieces};
use upload::Uploads;

/// Threads that send and receive, and check what has been fetched.
const THREADS: usize = 2;
/// Threads for what blocks: CRCs of uploads, and blocking calls of the crate `object_store`.
const BLOCKING_THREADS: usize = 4;
/// How long a shard counts as described: a bucket's lifecycle rule may delete the description.
const DESCRIBED_FOR: Duration = Duration::from_secs(3600);

/// What the tier is opened with.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// The address of the store.
    pub url: String,
    /// Variables in which credentials and endpoints are looked for.
    pub env: Vec<(String, String)>,
    /// How long one request may take, with its tries.
    pub timeout: Duration,
    /// Bytes of memory for chunks on their way: half for uploads, half for fetches.
    pub staging: u64,
    /// Whether to upload.
    pub mode: Mode,
}

impl RemoteOptions {
    /// What the settings say, with the variables of the process; `None` where they name no store.
    #[must_use]
    pub fn of_settings(settings: &Settings) -> Option<Self> {
        Some(Self {
            url: settings.remote_url.clone()?,
            env: std::env::vars_os()
                .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
                .collect(),
            timeout: Duration::from_millis(settings.remote_timeout_ms),
            staging: settings.remote_staging as u64,
            mode: settings.mode,
        })
    }
}

/// A removal waits for uploads as long as for so many requests.
const SETTLING: u32 = 20;

/// What the tasks share.
struct Shared {
    bucket: RemoteBucket,
    namespace: String,
    shard: String,
    /// The geometry as JSON; `None` where the tier was opened without it.
    geometry: Option<Vec<u8>>,
    /// When the geometry was put last.
    described: Mutex<Option<Instant>>,
    known: KnownObjects,
    counters: Counters,
    uploads: Uploads,
    upload_staging: Bound,
    fetch_staging: Bound,
    /// Memory within the bound `fetch_staging` that is not in use.
    spare_pieces: SparePieces,
}

impl Shared {
    /// Namespace and shard.
    fn place(&self) -> String {
        format!("{}/{}", self.namespace, self.shard)
    }

    fn name_of(&self, key: &ChunkKey, tenant: u64) -> Path {
        self.bucket.name([&*self.namespace, &*self.shard, &format!("{tenant:016x}"), &key.to_hex()])
    }

    /// Puts the geometry beside the chunks, for tools. Where that fails it is tried again with the
    /// next upload.
    async fn describe(&self) {
        let Some(geometry) = &self.geometry else { return };
        {
            let mut described = self.described.lock();
            if described.is_some_and(|at| at.elapsed() < DESCRIBED_FOR) {
                return;
            }
            *described = Some(Instant::now());
        }
        let name = describing(&self.bucket, &self.namespace, &self.shard);
        // Anew, so that a rule that deletes by age does not take it before the chunks.
        if self.bucket.put(&name, vec![geometry.clone().into()], true).await.is_err() {
            *self.described.lock() = None;
        }
    }
}

/// The object with the geometry of a shard. It lies beside the shard's chunks, not among them, and
/// so stays when they are removed.
fn describing(bucket: &RemoteBucket, namespace: &str, shard: &str) -> Path {
    bucket.name([namespace, &*format!("{shard}.json")])
}

/// The remote tier of one cache.
pub struct Remote {
    shared: Arc<Shared>,
    runtime: Handle,
    mode: Mode,
    /// Of one request.
    timeout: Duration,
    thread: Mutex<Option<(oneshot::Sender<()>, JoinHandle<()>)>>,
}

impl Remote {
    /// The tier for chunks of `geometry`. Starts a thread, and asks the store nothing yet.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for an address or variables that lead to no store; what the operating
    /// system says of the thread.
    pub fn open(options: &RemoteOptions, geometry: &Geometry) -> Result<Arc<Self>> {
        let place = (geometry.fingerprint().dir_name(), geometry.shard_dir_name());
        let chunk_bytes = SlotLayout::of_chunk(geometry, geometry.chunk_tokens).slot_bytes;
        if options.staging < 2 * chunk_bytes {
            let remote_staging = options.staging;
            tracing::warn!(
                remote_staging,
                chunk_bytes,
                "remote_staging is less than two chunks: it is exceeded; raise it"
            );
        }
        Self::start(options, place, Some(geometry.to_json()))
    }

    /// As [`Remote::open`], for a namespace and a shard by name.
    ///
    /// # Errors
    /// As [`Remote::open`].
    pub fn of(options: &RemoteOptions, place: (String, String)) -> Result<Arc<Self>> {
        Self::start(options, place, None)
    }

    fn start(
        options: &RemoteOptions,
        (namespace, shard): (String, String),
        geometry: Option<Vec<u8>>,
    ) -> Result<Arc<Self>> {
        let half = options.staging / 2;
        let shared = Arc::new(Shared {
            bucket: RemoteBucket::open(&options.url, &options.env, options.timeout)?,
            namespace,
            shard,
            geometry,
            described: Mutex::new(None),
            known: KnownObjects::default(),
            counters: Counters::default(),
            uploads: Uploads::default(),
            upload_staging: Bound::new(half),
            fetch_staging: Bound::new(half),
            spare_pieces: SparePieces::default(),
        });
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .enable_all()
            .max_blocking_threads(BLOCKING_THREADS)
            .thread_name("forebay-remote")
            .build()
            .map_err(|e| Error::io("cannot start the remote tier", e))?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let uploads = upload::run(Arc::clone(&shared));
        let run = move || {
            runtime.spawn(uploads);
            drop(runtime.block_on(stopped));
            // Does not wait for blocking calls, such as one to a name server that does not answer.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("forebay-remote".to_owned()).spawn(run);
        let thread = thread.map_err(|e| Error::io("cannot start a thread of the remote tier", e))?;
        let thread = Mutex::new(Some((stop, thread)));
        Ok(Arc::new(Self { shared, runtime: handle, mode: options.mode, timeout: options.timeout, thread }))
    }

    /// A chunk has been published on a drive: queues its upload, if there is room in the queue.
    pub fn published(&self, log: &Arc<Log>, key: ChunkKey) {
        if self.mode == Mode::Rw
            && let Err(cause) = self.shared.uploads.push(log, key)
        {
            self.shared.counters.not_uploaded.add(cause, 1);
        }
    }

    /// Queues the upload of a chunk of a drive; whether there was room in the queue.
    pub fn upload(&self, log: &Arc<Log>, key: ChunkKey) -> bool {
        self.shared.uploads.push(log, key).is_ok()
    }

    /// Starts to bring `wanted` to a drive, and into `memory`, in order and until the first that
    /// the store does not have. Ends by `deadline`.
    #[must_use]
    pub fn fetch(
        &self,
        log: Arc<Log>,
        memory: Option<Arc<MemoryTier>>,
        wanted: Vec<Wanted>,
        deadline: Instant,
    ) -> Fetch {
        if wanted.is_empty() || self.thread.lock().is_none() {
            return Fetch::nothing();
        }
        let to = fetch::Destination { log, memory, evicts: true };
        fetch::start(&self.shared, &self.runtime, to, fetch::FetchOrder::Prompt(wanted), deadline)
    }

    /// Starts to bring all of `objects` that no drive has to a drive, the beginnings of prompts
    /// first, up to `most` bytes. A chunk that does not come is passed over, and counted.
    #[must_use]
    pub fn restore(&self, log: Arc<Log>, objects: Vec<RemoteObject>, most: u64, deadline: Instant) -> Fetch {
        if self.thread.lock().is_none() {
            return Fetch::nothing();
        }
        let to = fetch::Destination { log, memory: None, evicts: false };
        fetch::start(&self.shared, &self.runtime, to, fetch::FetchOrder::Listed(objects, most), deadline)
    }

    /// Deletes the objects of `keys` and of `others`, which have left the drives. Only those of
    /// `keys` are listed by [`take_changes`](Self::take_changes). Waits for uploads of theirs that
    /// are under way.
    ///
    /// # Errors
    /// Where the store did not answer, or refuses: some of them may still be there, or come.
    pub fn remove(&self, keys: &[ChunkKey], others: &[ChunkKey], tenant: u64) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let (keys, others) = (keys.to_vec(), others.to_vec());
        let all: HashSet<ChunkKey> = keys.iter().chain(&others).copied().collect();
        let have_ended = self.shared.uploads.settle(|key, _| all.contains(key), self.settled_by());
        self.delete(have_ended, async move {
            let names = keys.iter().chain(&others).map(|key| shared.name_of(key, tenant)).collect();
            shared.bucket.delete(names).await?;
            keys.iter().for_each(|key| shared.known.set(key, RemotePresence::Absent));
            Ok(())
        })
    }

    /// Deletes everything, or everything of one tenant.
    ///
    /// # Errors
    /// As [`Remote::remove`].
    pub fn clear(&self, tenant: Option<u64>) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let is_meant = |its: Option<u64>| tenant.is_none() || its.is_none() || its == tenant;
        let have_ended = self.shared.uploads.settle(|_, its| is_meant(its), self.settled_by());
        self.delete(have_ended, async move {
            let tenant = tenant.map(|tenant| format!("{tenant:016x}"));
            let parts = [Some(&*shared.namespace), Some(&*shared.shard), tenant.as_deref()];
            let prefix = shared.bucket.name(parts.into_iter().flatten());
            shared.bucket.delete_below(&prefix, store::is_chunk).await?;
            // Which objects are the tenant's is not known here, so all answers are forgotten.
            if tenant.is_none() {
                shared.known.all_gone()
            } else {
                shared.known.forget()
            }
            Ok(())
        })
    }

    /// Until when a removal waits for uploads: a put may take several requests' time.
    fn settled_by(&self) -> Instant {
        Instant::now() + self.timeout * SETTLING
    }

    /// Does `work`; `have_ended` where no upload under way can undo it.
    fn delete(
        &self,
        have_ended: bool,
        work: impl Future<Output = std::result::Result<(), RemoteCause>> + Send + 'static,
    ) -> Result<()> {
        let failed = |cause: RemoteCause| {
            let kind = match cause {
                RemoteCause::TimedOut | RemoteCause::CircuitOpen => ErrorKind::TimedOut,
                RemoteCause::Refused => ErrorKind::Permission,
                RemoteCause::Closed => ErrorKind::Closed,
                _ => ErrorKind::Io,
            };
            let when =
                if cause == RemoteCause::Refused { "these credentials may list and delete" } else { "that answers" };
            Error::new(kind, format!("the remote store has not deleted everything ({})", cause.as_str())).advice(
                format!(
                    "the drives no longer have it, but it may come back from the store: run this again when {when}"
                ),
            )
        };
        if self.thread.lock().is_none() {
            return Err(failed(RemoteCause::Closed));
        }
        let (told, end) = std::sync::mpsc::channel();
        self.runtime.spawn(async move { told.send(work.await) });
        let done = end.recv().unwrap_or(Err(RemoteCause::Closed));
        done.and(if have_ended { Ok(()) } else { Err(RemoteCause::TimedOut) }).map_err(failed)
    }

    /// Waits until everything that was published is uploaded or shed; whether it was by `deadline`.
    pub fn wait_uploaded(&self, deadline: Instant) -> bool {
        self.shared.uploads.wait(deadline)
    }

    /// Ends all requests and the threads; what waits to be uploaded is shed.
    pub fn close(&self) {
        let thread = self.thread.lock().take();
        if let Some((stop, thread)) = thread {
            self.shared.counters.not_uploaded.add(RemoteCause::Closed, self.shared.uploads.close() as u64);
            drop(stop);
            drop(thread.join());
        }
    }

    /// Up to `most` chunks that the store has got (`true`) or does not have any more, as far as
    /// this process has learned of it since the first call; a bounded number of them waits to be
    /// taken.
    #[must_use]
    pub fn take_changes(&self, most: usize) -> Vec<(ChunkKey, bool)> {
        self.shared.known.take_changes(most)
    }

    /// Other processes have uploaded these: a fetch that did not find them before asks again.
    pub fn put_by_others(&self, keys: &[ChunkKey]) {
        self.shared.known.put_by_others(keys);
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> RemoteStats {
        self.shared.counters.stats(!self.shared.bucket.is_up(), self.shared.uploads.len())
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Remote({})", self.shared.place())
    }
}
