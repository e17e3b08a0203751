//! What tools ask of the remote store, one request after another: what it holds, and whether it
//! works. No load depends on this.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::TryStreamExt;
use object_store::client::{HttpError, HttpErrorKind};
use object_store::path::Path;
use object_store::{Error as StoreError, ObjectStoreExt};
use tokio::runtime::{Builder, Runtime};

use super::bucket::{PART_BYTES, RemoteBucket};
use super::{RemoteOptions, describing};
use crate::error::{Error, ErrorKind, Result};
use crate::geometry::Geometry;
use crate::key::ChunkKey;

/// Small reads that the round trip is the median of.
const SMALL_READS: usize = 5;
/// Bytes of a small read.
const SMALL_BYTES: u64 = 64 << 10;
/// The address at which cloud machines ask for the credentials of their role.
const INSTANCE: &str = "169.254.169.254";

/// An object of the store: a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteObject {
    /// The chunk's key.
    pub key: ChunkKey,
    /// Hash of the cache salt.
    pub tenant: u64,
    /// Bytes.
    pub bytes: u64,
}

/// What came of trying the store.
#[derive(Debug, Default)]
pub struct RemoteTrial {
    /// The median time of a small ranged read.
    pub round_trip: Option<Duration>,
    /// Bytes per second of one upload and one ranged read of 8 MiB.
    pub write_and_read: Option<(f64, f64)>,
    /// What does not work, by the request.
    pub faults: Vec<(&'static str, Error)>,
}

/// A remote store.
pub struct RemoteStore {
    bucket: RemoteBucket,
    timeout: Duration,
    /// There until it is dropped.
    runtime: Option<Runtime>,
}

impl RemoteStore {
    /// The store that the options name; it is asked nothing yet, but for whether it is there where
    /// it is a directory: one that is not would look like an empty store.
    ///
    /// # Errors
    /// As [`Remote::open`](super::Remote::open); `NotFound` for a directory that is not there.
    pub fn open(options: &RemoteOptions) -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().max_blocking_threads(1).build();
        let store = Self {
            bucket: RemoteBucket::open(&options.url, &options.env, options.timeout)?,
            timeout: options.timeout,
            runtime: Some(runtime.map_err(|e| Error::io("cannot talk to the remote store", e))?),
        };
        store.ask("list", store.bucket.check_root())?;
        Ok(store)
    }

    /// The shards that have chunks there: namespace and shard.
    ///
    /// # Errors
    /// What the store answers, each with advice.
    pub fn shards(&self) -> Result<Vec<(String, String)>> {
        let mut found = BTreeSet::new();
        // Other folders may be unreadable, such as lost+found.
        for namespace in self.folders(&self.bucket.name([]))?.into_iter().filter(|name| is_namespace(name)) {
            for shard in self.folders(&self.bucket.name([&*namespace]))? {
                found.insert((namespace.clone(), shard));
            }
        }
        Ok(found.into_iter().collect())
    }

    fn folders(&self, of: &Path) -> Result<Vec<String>> {
        let list = self.ask("list", self.bucket.store().list_with_delimiter(Some(of)))?;
        Ok(list.common_prefixes.iter().filter_map(|p| Some(p.filename()?.to_owned())).collect())
    }

    /// The chunks of a shard, in the order of their names.
    ///
    /// # Errors
    /// What the store answers, each with advice.
    pub fn objects(&self, namespace: &str, shard: &str) -> Result<Vec<RemoteObject>> {
        let prefix = self.bucket.name([namespace, shard]);
        let mut all = self.bucket.store().list(Some(&prefix));
        let mut found = Vec::new();
        while let Some(meta) = self.ask("list", all.try_next())? {
            found.extend(object_of(&meta.location, meta.size));
        }
        Ok(found)
    }

    /// The geometry of a shard's chunks.
    ///
    /// # Errors
    /// `NotFound` where no server has described it; `Corrupt`; what the store answers.
    pub fn geometry(&self, namespace: &str, shard: &str) -> Result<Geometry> {
        let name = describing(&self.bucket, namespace, shard);
        let get = async { self.bucket.store().get(&name).await?.bytes().await };
        let json = self.ask("get", get).map_err(|e| match e.kind() {
            ErrorKind::NotFound => Error::new(ErrorKind::NotFound, format!("{name} is not in the remote store"))
                .advice("a server that uploads to it writes it, and so does `forebay sync up`"),
            _ => e,
        })?;
        Geometry::from_json(&json, (namespace, shard))
    }

    /// Tries what a server needs: to put, to read a range, to list and to delete, with an object of
    /// 8 MiB that is not left behind; to list alone where it may not `write`.
    #[must_use]
    pub fn trial(&self, write: bool) -> RemoteTrial {
        let mut trial = RemoteTrial::default();
        if let Err(e) = self.folders(&self.bucket.name([])) {
            trial.faults.push(("list", e));
        }
        if write && trial.faults.is_empty() {
            let name = self.bucket.name([&*format!("forebay-probe-{:016x}", nonce())]);
            if let Err(fault) = self.try_object(&name, &mut trial) {
                trial.faults.push(fault);
            }
        }
        trial
    }

    fn try_object(&self, name: &Path, trial: &mut RemoteTrial) -> std::result::Result<(), (&'static str, Error)> {
        let mut bytes = vec![0; PART_BYTES as usize];
        blake3::Hasher::new().update(name.as_ref().as_bytes()).finalize_xof().fill(&mut bytes);
        let bytes = Bytes::from(bytes);
        let store = self.bucket.store();
        let rate = |since: Instant| PART_BYTES as f64 / since.elapsed().as_secs_f64().max(1e-9);
        let since = Instant::now();
        self.ask("put", self.bucket.check_root()).map_err(|e| ("put", e))?;
        self.ask("put", store.put(name, bytes.clone().into())).map_err(|e| {
            // It may have been stored all the same, and only the answer be lost.
            drop(self.ask("delete", store.delete(name)));
            ("put", e)
        })?;
        let written = rate(since);
        let read = self.read(name, &bytes).map_err(|e| ("get", e));
        let deleted = self.ask("delete", store.delete(name)).map_err(|e| ("delete", e));
        let (round_trip, read) = read?;
        (trial.round_trip, trial.write_and_read) = (Some(round_trip), Some((written, read)));
        deleted
    }

    /// The median time of small reads, and the rate of a large one.
    fn read(&self, name: &Path, bytes: &Bytes) -> Result<(Duration, f64)> {
        let range = |from: u64, to: u64| {
            let since = Instant::now();
            let got = self.ask("get", self.bucket.store().get_range(name, from..to))?;
            let took = since.elapsed();
            if bytes.slice(from as usize..to as usize) == got {
                return Ok(took);
            }
            let wrong = "a ranged read gave other bytes than were put";
            Err(Error::new(ErrorKind::Corrupt, wrong).advice("this store, or a proxy before it, cannot be used"))
        };
        let large = range(0, PART_BYTES)?;
        let mut small: Vec<Duration> =
            (0..SMALL_READS as u64).map(|i| range(i * SMALL_BYTES, (i + 1) * SMALL_BYTES)).collect::<Result<_>>()?;
        small.sort_unstable();
        let median = small.get(SMALL_READS / 2).copied().unwrap_or_default();
        Ok((median, PART_BYTES as f64 / large.as_secs_f64().max(1e-9)))
    }

    fn ask<T>(&self, what: &str, request: impl Future<Output = object_store::Result<T>>) -> Result<T> {
        let Some(runtime) = &self.runtime else {
            return Err(Error::new(ErrorKind::Closed, "the remote store is closed"));
        };
        let answer = runtime.block_on(async { tokio::time::timeout(self.timeout, request).await });
        match answer {
            Ok(answer) => answer.map_err(|e| explained(what, e)),
            Err(_) => {
                let text = format!("the remote store did not answer a {what} within {:?}", self.timeout);
                Err(Error::new(ErrorKind::TimedOut, text).advice(
                    "check the network and the store; without credentials in the environment those of an instance's role are waited for; raise remote_timeout_ms for a slow store",
                ))
            }
        }
    }
}

impl Drop for RemoteStore {
    fn drop(&mut self) {
        // Does not wait for blocking calls, such as one to a name server that does not answer.
        self.runtime.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

/// Whether a folder's name is that of a namespace.
fn is_namespace(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Whether this is the name of a chunk's object.
pub(super) fn is_chunk(name: &Path) -> bool {
    object_of(name, 0).is_some()
}

/// The chunk whose object has this name.
fn object_of(name: &Path, bytes: u64) -> Option<RemoteObject> {
    let mut parts: Vec<_> = name.parts().collect();
    let (key, tenant) = (parts.pop()?, parts.pop()?);
    let tenant = u64::from_str_radix(tenant.as_ref(), 16).ok().filter(|_| tenant.as_ref().len() == 16)?;
    Some(RemoteObject { key: ChunkKey::from_hex(key.as_ref())?, tenant, bytes })
}

/// A number that no other trial has.
fn nonce() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::from(std::process::id()) << 32 ^ since.as_nanos() as u64
}

/// What to do where the store refuses these credentials; `None` where it does not.
pub(super) fn refusal(e: &StoreError) -> Option<&'static str> {
    let text = e.to_string();
    let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
    // For a list, for each object of a deletion and for status 400 the crate has status and code in
    // its text alone. An answer to HEAD has no code: S3 sends 400 there for a token that has
    // expired.
    if has(&["RequestTimeTooSkewed"]) {
        return Some("set the clock of this machine");
    }
    let unknown = has(&["ExpiredToken", "InvalidToken", "401 Unauthorized"]) || text.ends_with("400 Bad Request: ");
    if unknown || matches!(e, StoreError::Unauthenticated { .. }) {
        return Some("check the credentials in the environment");
    }
    let forbidden = has(&["AccessDenied", "403 Forbidden"]) || matches!(e, StoreError::PermissionDenied { .. });
    forbidden.then_some(
        "give these credentials the right to get, put, list and delete below the prefix; check the bucket's name and its region",
    )
}

/// What the store's answer means, and what to do about it.
fn explained(what: &str, e: StoreError) -> Error {
    let text = e.to_string();
    let connection = std::iter::successors(Some(&e as &dyn std::error::Error), |e| e.source())
        .find_map(|e| e.downcast_ref::<HttpError>())
        .map(HttpError::kind);
    let absent = "make the bucket, or correct remote_url";
    let elsewhere = ["incorrectly configured region", "AuthorizationHeaderMalformed", "PermanentRedirect"];
    let (kind, advice) = match (refusal(&e), &e, connection) {
        (Some(advice), ..) => (ErrorKind::Permission, advice),
        _ if elsewhere.iter().any(|code| text.contains(code)) => {
            (ErrorKind::Config, "set AWS_REGION to the bucket's region")
        }
        (_, StoreError::NotFound { .. }, _) => (ErrorKind::NotFound, absent),
        (_, StoreError::Generic { store: "remote_url", .. }, _) => {
            (ErrorKind::NotFound, "mount what is to be there, or correct remote_url")
        }
        // For a list the crate has the status in its text alone.
        _ if text.contains("404 Not Found") => (ErrorKind::NotFound, absent),
        _ if text.contains(INSTANCE) => (
            ErrorKind::Permission,
            "there are no credentials in the environment, and the machine has no role: set their variables (docs/tiers.md)",
        ),
        (.., Some(HttpErrorKind::Connect)) => (
            ErrorKind::Io,
            "check the host's name, the port and the network; for another S3 server than Amazon's set AWS_ENDPOINT_URL",
        ),
        (.., Some(HttpErrorKind::Timeout)) => (ErrorKind::TimedOut, "check the network and the store"),
        (.., Some(_)) => (
            ErrorKind::Io,
            "check that this is the store's address, and whether it speaks TLS: where not, AWS_ALLOW_HTTP=true",
        ),
        _ => (ErrorKind::Io, "look at the store's own log"),
    };
    Error::new(kind, format!("a {what} of the remote store failed")).source(e).advice(advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_s3_says_of_clock_and_token_is_no_question_of_rights() {
        for (code, advice) in [("RequestTimeTooSkewed", "the clock"), ("ExpiredToken", "check the credentials")] {
            let source = || format!("403 Forbidden: <Error><Code>{code}</Code></Error>").into();
            let refused = StoreError::PermissionDenied { path: "a".to_owned(), source: source() };
            for e in [refused, StoreError::Generic { store: "S3", source: source() }] {
                let said = explained("put", e).to_string();
                assert!(said.contains(advice) && !said.contains("the right to get"), "{said}");
            }
        }
    }

    #[test]
    fn a_refusal_is_known_by_what_the_crate_says_of_it() {
        let of = |text: &str| refusal(&StoreError::Generic { store: "S3", source: text.to_owned().into() });
        let rights = "the right to get";
        for (text, advice) in [
            ("Error performing list request: Server returned non-2xx status code: 403 Forbidden: ", rights),
            ("DeleteObjects request failed for key a: no (code: AccessDenied)", rights),
            ("Server returned non-2xx status code: 400 Bad Request: <Code>ExpiredToken</Code>", "the credentials"),
            ("Server returned non-2xx status code: 400 Bad Request: ", "the credentials"),
        ] {
            assert!(of(text).is_some_and(|said| said.contains(advice)), "{text}");
        }
        for text in ["400 Bad Request: <Code>RequestTimeout</Code>", "500 Internal Server Error: ", "(code: SlowDown)"]
        {
            assert_eq!(of(text), None, "{text}");
        }
    }

    #[test]
    fn a_bucket_of_another_region_is_a_matter_of_settings() {
        for text in [
            "Received redirect without LOCATION, this normally indicates an incorrectly configured region",
            "400 Bad Request: <Code>AuthorizationHeaderMalformed</Code>",
            "Server returned error response: <Code>PermanentRedirect</Code>",
        ] {
            let e = explained("list", StoreError::Generic { store: "S3", source: text.into() });
            assert_eq!(e.kind(), ErrorKind::Config, "{e}");
            assert!(e.to_string().contains("set AWS_REGION"), "{e}");
        }
    }

    #[test]
    fn only_the_names_of_chunks_are_taken_for_chunks() {
        let key = ChunkKey([0xab; 32]);
        let of = |name: &str| object_of(&Path::from(name), 7);
        let good = format!("a/b/ns/shard/00000000000000ff/{}", key.to_hex());
        assert_eq!(of(&good), Some(RemoteObject { key, tenant: 255, bytes: 7 }));
        assert!(is_namespace("00112233445566778899aabbccddeeff") && !is_namespace("lost+found"));
        for bad in ["", "x", &good[..good.len() - 1], &good.replace("ff/", "f/"), "ns/shard.json"] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }
}
