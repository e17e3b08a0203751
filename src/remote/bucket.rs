//! The requests to the remote store: each has a time-out and a few tries, and its end tells the
//! breaker whether the store is worth asking.
//!
//! The crate `object_store` speaks the protocols, takes credentials from the environment, from the
//! files that it names and from the instance's role, and tries again with growing, random pauses.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, TryFutureExt, TryStreamExt};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{BackoffConfig, ClientOptions, Error as StoreError, GetOptions, GetRange, ObjectStore};
use object_store::{ObjectStoreExt, ObjectStoreScheme, PutMode, PutOptions, PutPayload, RetryConfig};
use tokio::sync::Semaphore;
use url::Url;

use super::breaker::Breaker;
use super::stats::RemoteCause;
use super::store::refusal;
use crate::error::{Error, ErrorKind, Result};

/// Bytes that one request asks for, and that one time-out is for.
pub(super) const PART_BYTES: u64 = 8 << 20;
/// Tries after the first one.
const RETRIES: usize = 2;
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
const LONGEST_BACKOFF: Duration = Duration::from_secs(1);
const CONNECT: Duration = Duration::from_secs(5);
/// Requests under way at once: each has a connection of its own.
const AT_ONCE: usize = 64;
/// A put that has left its file alone for so long was cut off.
const WRITING: Duration = Duration::from_secs(600);
/// Looking for what was cut off may take as long as so many requests.
const CUT_OFF: u32 = 20;
/// Objects that are listed before they are deleted.
const DELETED_AT_ONCE: usize = 1000;

/// A place in a remote store.
#[derive(Debug)]
pub(super) struct RemoteBucket {
    store: Box<dyn ObjectStore>,
    prefix: Path,
    /// Where the store is a directory: this one must be there. It is not made, so that a share that
    /// is not mounted does not fill the file system below it.
    root: Option<PathBuf>,
    breaker: Breaker,
    timeout: Duration,
    /// It has refused a conditional put as not implemented, or is a directory: there a conditional
    /// put is a hard link, which many network file systems refuse.
    is_unconditional: AtomicBool,
    /// It was logged that there is no bucket.
    has_said_missing: AtomicBool,
    /// Requests that may be under way at once.
    places: Semaphore,
}

/// What a request gives, or why it gives nothing.
type Answer<T> = std::result::Result<T, RemoteCause>;

impl RemoteBucket {
    /// The store at `url`; no request is made. `env`: the variables that credentials and endpoints
    /// are looked for in.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for an address that leads nowhere, and settings in the environment
    /// that contradict each other.
    pub(super) fn open(url: &str, env: &[(String, String)], timeout: Duration) -> Result<Self> {
        let bad = |e: Box<dyn std::error::Error + Send + Sync>| {
            Error::new(ErrorKind::Config, "remote_url does not lead to a store")
                .source(e)
                .advice("write s3://BUCKET/PREFIX, gs://…, az://…, https://… or file:///…, and check the credentials' variables")
        };
        let url = Url::parse(url).map_err(|e| bad(e.into()))?;
        let (scheme, prefix) = ObjectStoreScheme::parse(&url).map_err(|e| bad(e.into()))?;
        let store = build(&url, &scheme, env, timeout).map_err(|e| bad(e.into()))?;
        let is_unconditional = AtomicBool::new(scheme == ObjectStoreScheme::Local);
        let root = url.to_file_path().ok().filter(|_| scheme == ObjectStoreScheme::Local);
        let (breaker, places) = (Breaker::default(), Semaphore::new(AT_ONCE));
        let has_said_missing = AtomicBool::new(false);
        Ok(Self { store, prefix, root, breaker, timeout, is_unconditional, has_said_missing, places })
    }

    /// The store itself, for requests that go past the breaker.
    pub(super) fn store(&self) -> &dyn ObjectStore {
        &*self.store
    }

    /// Whether the store is not being left alone.
    pub(super) fn is_up(&self) -> bool {
        self.breaker.is_closed()
    }

    /// The place of `parts` below the prefix.
    pub(super) fn name<'a>(&self, parts: impl IntoIterator<Item = &'a str>) -> Path {
        parts.into_iter().fold(self.prefix.clone(), |path, part| path.join(part))
    }

    /// The length of an object; [`RemoteCause::Absent`] where there is none.
    pub(super) async fn head(&self, name: &Path) -> Answer<u64> {
        let meta = self.ask(self.timeout, self.store.head(name)).await?;
        Ok(meta.size)
    }

    /// Reads `range` of an object that has `size` bytes, and gives the bytes to `take` in order.
    pub(super) async fn get(
        &self,
        name: &Path,
        range: Range<u64>,
        size: u64,
        mut take: impl FnMut(&[u8]) + Send,
    ) -> Answer<()> {
        let options = GetOptions { range: Some(GetRange::Bounded(range.clone())), ..GetOptions::default() };
        let read = async {
            let answer = self.store.get_opts(name, options).await?;
            if answer.meta.size != size || answer.range != range {
                return Ok(Err(RemoteCause::Corrupt));
            }
            let mut left = range.end - range.start;
            let mut stream = answer.into_stream();
            while let Some(bytes) = stream.try_next().await? {
                let Some(rest) = left.checked_sub(bytes.len() as u64) else { return Ok(Err(RemoteCause::Corrupt)) };
                left = rest;
                self.breaker.heard();
                take(&bytes);
            }
            Ok(if left == 0 { Ok(()) } else { Err(RemoteCause::Io) })
        };
        self.ask(self.timeout, read).await?
    }

    /// How long a put of so many bytes may take.
    pub(super) fn put_limit(&self, bytes: u64) -> Duration {
        let parts = u32::try_from(bytes / PART_BYTES).unwrap_or(u32::MAX);
        self.timeout.saturating_mul(parts.saturating_add(1))
    }

    /// Puts an object. Without `replace` an object that is there stays.
    pub(super) async fn put(&self, name: &Path, object: Vec<Bytes>, replace: bool) -> Answer<()> {
        let payload: PutPayload = object.into_iter().collect();
        let limit = self.put_limit(payload.content_length() as u64);
        let put = |mode| {
            let options = PutOptions { mode, ..PutOptions::default() };
            self.ask(limit, self.store.put_opts(name, payload.clone(), options)).map_err(|cause| match cause {
                RemoteCause::Absent => self.no_bucket(),
                cause => cause,
            })
        };
        if !replace && !self.is_unconditional.load(Ordering::Relaxed) {
            match put(PutMode::Create).await {
                Ok(_) => return Ok(()),
                // S3 says the same where a deletion of the object is under way.
                Err(RemoteCause::Present) => {
                    return match self.head(name).await {
                        Err(RemoteCause::Absent) => Err(RemoteCause::Io),
                        found => found.map(drop),
                    };
                }
                // A store without conditional puts: the second to put writes the same once more.
                Err(RemoteCause::Unsupported) => self.is_unconditional.store(true, Ordering::Relaxed),
                Err(cause) => return Err(cause),
            }
        }
        put(PutMode::Overwrite).await.map(drop)
    }

    /// A put found no bucket.
    fn no_bucket(&self) -> RemoteCause {
        if !self.has_said_missing.swap(true, Ordering::Relaxed) {
            tracing::warn!("the remote store has no such bucket, nothing is uploaded: make it, or correct remote_url");
        }
        RemoteCause::Refused
    }

    /// Whether the directory that is the store is there.
    pub(super) async fn check_root(&self) -> object_store::Result<()> {
        let Some(root) = self.root.clone() else { return Ok(()) };
        let shown = root.display().to_string();
        if tokio::task::spawn_blocking(move || root.is_dir()).await.unwrap_or_default() {
            return Ok(());
        }
        let why = format!("{shown} is no directory: make it, with mode 0700, in the file system that is to be mounted");
        Err(StoreError::Generic { store: "remote_url", source: why.into() })
    }

    /// Deletes objects; one that is not there counts as deleted. Stores that delete one by one may
    /// take long: the time-out is for each answer.
    pub(super) async fn delete(&self, names: Vec<Path>) -> Answer<()> {
        let mut ends = self.store.delete_stream(futures_util::stream::iter(names).map(Ok).boxed());
        loop {
            match self.ask(self.timeout, ends.try_next()).await {
                Ok(Some(_)) | Err(RemoteCause::Absent) => {}
                Ok(None) => return Ok(()),
                Err(cause) => return Err(cause),
            }
        }
    }

    /// Deletes the objects below `prefix` whose names are `wanted`.
    pub(super) async fn delete_below(&self, prefix: &Path, wanted: fn(&Path) -> bool) -> Answer<()> {
        let mut all = self.store.list(Some(prefix)).map_ok(|meta| meta.location).try_chunks(DELETED_AT_ONCE);
        loop {
            let next = async { all.next().await.transpose().map_err(|e| e.1) };
            match self.ask(self.timeout, next).await? {
                Some(some) => self.delete(some.into_iter().filter(wanted).collect()).await?,
                None => break,
            }
        }
        self.delete_cut_off(prefix, wanted).await;
        Ok(())
    }

    /// Deletes what puts into a directory have left that were cut off: files that no list names,
    /// and that are never served.
    async fn delete_cut_off(&self, prefix: &Path, wanted: fn(&Path) -> bool) {
        let Some(root) = &self.root else { return };
        let below = prefix.prefix_match(&self.prefix).into_iter().flatten();
        let dir = below.fold(root.clone(), |dir, part| dir.join(part.as_ref()));
        let work = tokio::task::spawn_blocking(move || remove_cut_off(&dir, wanted));
        let why = match tokio::time::timeout(self.timeout * CUT_OFF, work).await {
            Ok(Ok(Ok(()))) => return,
            Ok(Ok(Err(e))) => e.to_string(),
            Ok(Err(e)) => e.to_string(),
            Err(_) => "it takes long".to_owned(),
        };
        tracing::warn!(error = why, "files of uploads that were cut off may be left in the remote directory");
    }

    /// Makes a request, within `limit`, where the store is worth asking.
    async fn ask<T>(&self, limit: Duration, request: impl Future<Output = object_store::Result<T>>) -> Answer<T> {
        if !self.breaker.is_closed() && self.places.available_permits() == 0 {
            return Err(RemoteCause::CircuitOpen);
        }
        // Before the breaker's time begins: that others take all places is not the store's fault.
        let Ok(_place) = tokio::time::timeout(limit, self.places.acquire()).await else {
            return Err(RemoteCause::TimedOut);
        };
        let admitted = self.breaker.admit().ok_or(RemoteCause::CircuitOpen)?;
        let request = async {
            self.check_root().await?;
            request.await
        };
        let Ok(answer) = tokio::time::timeout(limit, request).await else {
            admitted.failed(&"it did not answer in time");
            return Err(RemoteCause::TimedOut);
        };
        let cause = match answer {
            Ok(value) => {
                admitted.worked();
                return Ok(value);
            }
            Err(StoreError::NotFound { .. }) => RemoteCause::Absent,
            Err(StoreError::AlreadyExists { .. } | StoreError::Precondition { .. }) => RemoteCause::Present,
            Err(StoreError::NotImplemented { .. } | StoreError::NotSupported { .. }) => RemoteCause::Unsupported,
            // The crate has this status in its text alone.
            Err(e) if e.to_string().contains("501 Not Implemented") => RemoteCause::Unsupported,
            Err(e) => {
                admitted.failed(&e);
                return Err(if refusal(&e).is_some() { RemoteCause::Refused } else { RemoteCause::Io });
            }
        };
        admitted.worked();
        Err(cause)
    }
}

/// Removes the files `KEY#NUMBER` below a directory: those of puts that were cut off, once they are
/// so old that no put is still writing them.
fn remove_cut_off(dir: &std::path::Path, wanted: fn(&Path) -> bool) -> std::io::Result<()> {
    use std::io::ErrorKind::NotFound;
    let entries = match std::fs::read_dir(dir) {
        Err(e) if e.kind() == NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            remove_cut_off(&path, wanted)?;
        }
        let Some((whole, number)) = path.to_str().and_then(|path| path.rsplit_once('#')) else { continue };
        let is_cut_off = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) && wanted(&Path::from(whole));
        let is_old =
            |meta: std::fs::Metadata| meta.modified().is_ok_and(|t| t.elapsed().is_ok_and(|age| age >= WRITING));
        if is_cut_off && path.metadata().is_ok_and(is_old) {
            // Another machine may be removing the same.
            std::fs::remove_file(&path).or_else(|e| if e.kind() == NotFound { Ok(()) } else { Err(e) })?;
        }
    }
    Ok(())
}

/// The store that a scheme names.
fn build(
    url: &Url,
    scheme: &ObjectStoreScheme,
    env: &[(String, String)],
    timeout: Duration,
) -> object_store::Result<Box<dyn ObjectStore>> {
    // The TLS provider, unless the process has installed another one.
    drop(rustls::crypto::ring::default_provider().install_default());
    let retry = RetryConfig {
        backoff: BackoffConfig { init_backoff: FIRST_BACKOFF, max_backoff: LONGEST_BACKOFF, base: 2.0 },
        max_retries: RETRIES,
        retry_timeout: timeout,
    };
    // `ask` bounds the time of a request with all its tries, so the client need not.
    let client = ClientOptions::new().with_timeout_disabled().with_connect_timeout(timeout.min(CONNECT));
    // A variable whose name in lower case is that of a builder's setting sets it.
    macro_rules! with_env {
        ($builder:expr, $prefix:literal) => {{
            let own = env.iter().filter(|(name, _)| name.starts_with($prefix));
            own.fold($builder.with_client_options(client).with_retry(retry), |builder, (name, value)| {
                match name.to_ascii_lowercase().parse() {
                    Ok(key) => builder.with_config(key, value),
                    Err(_) => builder,
                }
            })
        }};
    }
    Ok(match scheme {
        ObjectStoreScheme::Local => Box::new(LocalFileSystem::new()),
        ObjectStoreScheme::AmazonS3 => {
            Box::new(with_env!(AmazonS3Builder::new(), "AWS_").with_url(url.as_str()).build()?)
        }
        ObjectStoreScheme::GoogleCloudStorage => {
            Box::new(with_env!(GoogleCloudStorageBuilder::new(), "GOOGLE_").with_url(url.as_str()).build()?)
        }
        ObjectStoreScheme::MicrosoftAzure => {
            Box::new(with_env!(MicrosoftAzureBuilder::new(), "AZURE_").with_url(url.as_str()).build()?)
        }
        ObjectStoreScheme::Http => {
            let host = url.as_str().get(..url.as_str().len() - url.path().len()).unwrap_or_default();
            Box::new(HttpBuilder::new().with_client_options(client).with_retry(retry).with_url(host).build()?)
        }
        other => {
            let source = format!("{other:?} is no store of ours").into();
            return Err(StoreError::Generic { store: "remote_url", source });
        }
    })
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;
    use object_store::throttle::{ThrottleConfig, ThrottledStore};

    use super::*;

    #[test]
    fn deletions_one_by_one_may_take_longer_than_one_request() {
        let each = Duration::from_millis(10);
        let config = ThrottleConfig { wait_delete_per_call: each, ..ThrottleConfig::default() };
        let bucket = RemoteBucket {
            store: Box::new(ThrottledStore::new(InMemory::new(), config)),
            prefix: Path::default(),
            root: None,
            breaker: Breaker::default(),
            timeout: 30 * each,
            is_unconditional: AtomicBool::new(false),
            has_said_missing: AtomicBool::new(false),
            places: Semaphore::new(AT_ONCE),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            for n in 0..60 {
                assert_eq!(bucket.put(&bucket.name(["all", &n.to_string()]), Vec::new(), false).await, Ok(()));
            }
            assert_eq!(bucket.delete_below(&bucket.name(["all"]), |name| !name.as_ref().ends_with("/7")).await, Ok(()));
            assert_eq!(bucket.head(&bucket.name(["all", "59"])).await, Err(RemoteCause::Absent));
            assert_eq!(bucket.head(&bucket.name(["all", "7"])).await, Ok(0), "what is not ours stays");
        });
    }
}
