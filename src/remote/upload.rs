//! From a drive to the remote store: chunks that were just published wait in a bounded queue, are
//! read again, checked and put, if the store does not have them.
//!
//! Reading gives way to loads. A chunk that has left its drive before it is read is not uploaded;
//! one that leaves it while it is put is deleted from the store, since it may have been removed: a
//! removal waits for the uploads that are under way. Of a drive that does not answer for a while
//! nothing is found; its chunks wait.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::path::Path;
use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

use super::Shared;
use super::known::RemotePresence;
use super::object;
use super::stats::RemoteCause;
use super::transfer::{self, Room};
use crate::error::ErrorKind;
use crate::format::layout::SlotCodec;
use crate::format::slot::SlotHeader;
use crate::io::Request;
use crate::key::ChunkKey;
use crate::log::{Bad, Chunk, Log};

/// Chunks that wait at most.
const MOST_WAITING: usize = 1 << 14;
/// Bytes of one read. A load may have to wait for one.
const READ_BYTES: u64 = 1 << 20;
/// How long one read waits for loads to be over.
const GIVES_WAY: Duration = Duration::from_millis(10);
/// How long a chunk is kept on its drive for its upload, beside the time for the put.
const LEASE: Duration = Duration::from_secs(60);
/// How often the upload of a chunk is tried.
const TRIES: u32 = 3;
/// How often the store is asked to delete an object whose chunk was removed meanwhile: for ten
/// minutes and more where it fails altogether, as it is asked less and less often then.
const DELETIONS: u32 = 20;
/// The pause after which a store that fails is asked again.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// How often it is looked whether a drive answers again, and how long an upload waits for one
/// before it takes its chunk for removed.
const DRIVE_AGAIN: Duration = Duration::from_secs(1);
const DRIVE_PATIENCE: Duration = Duration::from_secs(60);

/// A chunk that waits.
struct WaitingUpload {
    log: Weak<Log>,
    key: ChunkKey,
    tries: u32,
    /// Its tenant, once a put has failed: the store may have the object all the same.
    doubtful: Option<u64>,
    /// Since when its drive does not answer.
    paused: Option<Instant>,
}

/// An upload under way.
struct Underway {
    number: u64,
    key: ChunkKey,
    /// It may have found its chunk on the drive.
    has_begun: bool,
    /// Its chunk's, once that is known.
    tenant: Option<u64>,
}

/// The chunks that wait.
#[derive(Default)]
struct WaitingUploads {
    chunks: VecDeque<WaitingUpload>,
    /// Chunks that a drive which does not answer kept from being found or read, and when it was
    /// last looked whether it does.
    parked: Vec<WaitingUpload>,
    looked: Option<Instant>,
    active: Vec<Underway>,
    /// The number of the next one.
    next: u64,
    /// Nothing comes into the queue any more.
    is_closed: bool,
}

impl WaitingUploads {
    fn len(&self) -> usize {
        self.chunks.len() + self.parked.len()
    }

    /// Gives parked chunks their turn: those whose drives answer again, or have not for too long.
    /// The logs that were asked, to be given up without the lock: where this is the last user of
    /// one, that closes it.
    fn look_again(&mut self) -> Vec<Arc<Log>> {
        if self.parked.is_empty() || self.looked.is_some_and(|looked| looked.elapsed() < DRIVE_AGAIN) {
            return Vec::new();
        }
        self.looked = Some(Instant::now());
        let mut asked = Vec::new();
        let (parked, again): (Vec<_>, Vec<_>) = std::mem::take(&mut self.parked).into_iter().partition(|chunk| {
            let Some(log) = chunk.log.upgrade() else { return false };
            let is_paused = log.is_paused();
            asked.push(log);
            is_paused && chunk.paused.is_some_and(|since| since.elapsed() < DRIVE_PATIENCE)
        });
        self.parked = parked;
        self.chunks.extend(again);
        asked
    }
}

/// The queue of uploads.
#[derive(Default)]
pub(super) struct Uploads {
    waiting: Mutex<WaitingUploads>,
    more: Notify,
    less: Condvar,
}

impl Uploads {
    /// Chunks that wait.
    pub(super) fn len(&self) -> usize {
        self.waiting.lock().len()
    }

    /// Takes a chunk, or says why not.
    pub(super) fn push(&self, log: &Arc<Log>, key: ChunkKey) -> Result<(), RemoteCause> {
        self.take(WaitingUpload { log: Arc::downgrade(log), key, tries: 0, doubtful: None, paused: None })
    }

    fn take(&self, chunk: WaitingUpload) -> Result<(), RemoteCause> {
        let mut waiting = self.waiting.lock();
        if waiting.is_closed {
            return Err(RemoteCause::Closed);
        }
        if waiting.len() >= MOST_WAITING {
            return Err(RemoteCause::QueueFull);
        }
        waiting.chunks.push_back(chunk);
        drop(waiting);
        self.more.notify_one();
        Ok(())
    }

    /// Waits until everything is uploaded or shed; whether it was by `deadline`.
    pub(super) fn wait(&self, deadline: Instant) -> bool {
        let mut waiting = self.waiting.lock();
        while waiting.len() > 0 || !waiting.active.is_empty() {
            if self.less.wait_until(&mut waiting, deadline).timed_out() {
                return false;
            }
        }
        true
    }

    /// Waits until the uploads that have begun by now have ended, of those whose keys and tenants,
    /// where these are known, `which` names; whether they had by `deadline`.
    pub(super) fn settle(&self, which: impl Fn(&ChunkKey, Option<u64>) -> bool, deadline: Instant) -> bool {
        let mut waiting = self.waiting.lock();
        let next = waiting.next;
        while waiting.active.iter().any(|u| u.number < next && u.has_begun && which(&u.key, u.tenant)) {
            if self.less.wait_until(&mut waiting, deadline).timed_out() {
                return false;
            }
        }
        true
    }

    /// Empties the queue, and closes it; how many chunks waited.
    pub(super) fn close(&self) -> usize {
        let mut waiting = self.waiting.lock();
        waiting.is_closed = true;
        let waited = waiting.len();
        let gone = (std::mem::take(&mut waiting.chunks), std::mem::take(&mut waiting.parked));
        drop(waiting);
        drop(gone);
        self.less.notify_all();
        waited
    }

    /// The next chunk, and the number of its upload.
    async fn next(&self) -> (WaitingUpload, u64) {
        loop {
            let more = self.more.notified();
            let asked = self.waiting.lock().look_again();
            drop(asked);
            let has_parked = {
                let mut waiting = self.waiting.lock();
                if let Some(next) = waiting.chunks.pop_front() {
                    let number = waiting.next;
                    waiting.next += 1;
                    waiting.active.push(Underway { number, key: next.key, has_begun: false, tenant: None });
                    return (next, number);
                }
                !waiting.parked.is_empty()
            };
            if has_parked {
                drop(tokio::time::timeout(DRIVE_AGAIN, more).await);
            } else {
                more.await;
            }
        }
    }

    /// Takes a chunk back: to be tried again, or where it `is_parked`, when its drive answers.
    /// Whether the queue is open.
    fn again(&self, chunk: WaitingUpload, is_parked: bool) -> bool {
        let mut waiting = self.waiting.lock();
        if waiting.is_closed {
            return false;
        }
        if is_parked {
            waiting.parked.push(chunk)
        } else {
            waiting.chunks.push_front(chunk)
        }
        drop(waiting);
        self.more.notify_one();
        true
    }

    fn ended(&self, number: u64) {
        self.waiting.lock().active.retain(|upload| upload.number != number);
        self.less.notify_all();
    }

    /// An upload looks for its chunk, or has found it: a removal from here on waits for it.
    fn begun(&self, number: u64, tenant: Option<u64>) {
        let mut waiting = self.waiting.lock();
        if let Some(upload) = waiting.active.iter_mut().find(|upload| upload.number == number) {
            (upload.has_begun, upload.tenant) = (true, tenant);
        }
        drop(waiting);
        self.less.notify_all();
    }
}

/// An upload under way, until dropped.
struct ActiveUpload {
    shared: Arc<Shared>,
    number: u64,
    /// What became of it is counted. Otherwise the tier was closed meanwhile.
    is_counted: bool,
}

impl Drop for ActiveUpload {
    fn drop(&mut self) {
        if !self.is_counted {
            self.shared.counters.not_uploaded.add(RemoteCause::Closed, 1);
        }
        self.shared.uploads.ended(self.number);
    }
}

/// Uploads what comes into the queue, until its task is ended.
pub(super) async fn run(shared: Arc<Shared>) {
    loop {
        let (chunk, number) = shared.uploads.next().await;
        let active = ActiveUpload { shared: Arc::clone(&shared), number, is_counted: false };
        let Some(log) = chunk.log.upgrade() else { continue };
        let bytes = log.chunk_layout(log.geometry().chunk_tokens, SlotCodec::None).slot_bytes;
        let Ok(room) = shared.upload_staging.take(bytes).await else { return };
        if shared.bucket.is_up() {
            tokio::spawn(one(active, log, chunk, room));
        } else {
            // One at a time tries whether it works again; the others wait.
            one(active, log, chunk, room).await;
            if !shared.bucket.is_up() {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        }
    }
}

async fn one(mut active: ActiveUpload, log: Arc<Log>, mut chunk: WaitingUpload, room: Room) {
    let end = upload(&active.shared, &log, &mut chunk, active.number).await;
    drop(room);
    active.is_counted = true;
    let shared = Arc::clone(&active.shared);
    let counters = &shared.counters;
    let again = |chunk, is_parked| {
        if !shared.uploads.again(chunk, is_parked) {
            counters.not_uploaded.add(RemoteCause::Closed, 1);
        }
    };
    match end {
        Ok(Some(bytes)) => {
            // Who sees the chunk counted sees its bytes too.
            counters.uploaded_bytes.fetch_add(bytes, Ordering::Relaxed);
            counters.uploaded.fetch_add(1, Ordering::Release);
        }
        Ok(None) => drop(counters.present.fetch_add(1, Ordering::Relaxed)),
        Err(RemoteCause::CircuitOpen) => again(chunk, false),
        // Nothing of a drive that does not answer is found.
        Err(RemoteCause::Gone)
            if log.is_paused()
                && log.peek(&chunk.key).is_none()
                && chunk.paused.get_or_insert_with(Instant::now).elapsed() < DRIVE_PATIENCE =>
        {
            again(chunk, true);
        }
        // A read has timed out.
        Err(RemoteCause::Drive) if chunk.paused.is_some_and(|since| since.elapsed() < DRIVE_PATIENCE) => {
            again(chunk, true);
        }
        Err(RemoteCause::Io | RemoteCause::TimedOut) if chunk.tries + 1 < TRIES => {
            chunk.tries += 1;
            again(chunk, false);
        }
        Err(cause) => counters.not_uploaded.add(cause, 1),
    }
}

/// Uploads a chunk; its bytes, or `None` where the store had it before they were sent. Of two
/// servers that send it at once both count it: the answers do not tell whose object it is.
async fn upload(
    shared: &Shared,
    log: &Arc<Log>,
    waiting: &mut WaitingUpload,
    number: u64,
) -> Result<Option<u64>, RemoteCause> {
    let key = &waiting.key;
    let known = shared.known.get(key);
    shared.uploads.begun(number, None);
    let most = log.chunk_layout(log.geometry().chunk_tokens, SlotCodec::None).slot_bytes;
    // As long again where it waits for its turn.
    let lease = LEASE + shared.bucket.put_limit(most) * 2;
    let Some(chunk) = log.hold(key, lease) else {
        // Another drive may rest for longer.
        let is_over = waiting.paused.is_some_and(|since| since.elapsed() >= DRIVE_PATIENCE);
        return Err(match waiting.doubtful {
            Some(tenant) if is_over || !log.is_paused() => gone(shared, log, key, tenant).await,
            _ => RemoteCause::Gone,
        });
    };
    shared.uploads.begun(number, Some(chunk.tenant));
    let name = shared.name_of(key, chunk.tenant);
    let mut replaces = known == Some(RemotePresence::Damaged);
    if !replaces {
        match shared.bucket.head(&name).await {
            Ok(size) => {
                let codec = object::codec_of(log, chunk.tokens, size);
                shared.known.set(key, codec.map_or(RemotePresence::Damaged, RemotePresence::There));
                if codec.is_some() && !is_useless(shared, log, &chunk, &name, size).await? {
                    // A put that was late may have come after a removal, which then found nothing.
                    if waiting.doubtful.is_some() && !is_on_a_drive(log, key).await {
                        return Err(gone(shared, log, key, chunk.tenant).await);
                    }
                    // It may have come without its description, or that was deleted since.
                    shared.describe().await;
                    let sent = waiting.doubtful.map(|_| size);
                    return Ok(sent.filter(|size| *size == object::object_bytes(&chunk.layout)));
                }
                replaces = true;
            }
            // Others have removed it since. That is listed as a change before the upload is.
            Err(RemoteCause::Absent) if known.is_some_and(|known| matches!(known, RemotePresence::There(_))) => {
                shared.known.set(key, RemotePresence::Absent);
            }
            Err(RemoteCause::Absent) => {}
            Err(cause) => return Err(cause),
        }
    }
    let object = match read(shared, log, &chunk, &mut waiting.paused).await {
        Err(RemoteCause::Gone) if waiting.doubtful.is_some() => {
            return Err(gone(shared, log, key, chunk.tenant).await);
        }
        object => object?,
    };
    let bytes = object.iter().map(|part| part.len() as u64).sum();
    let put = shared.bucket.put(&name, object, replaces).await;
    // Also where the put has failed: the store may have the object all the same. What was stored
    // anew meanwhile has the same content and the same name.
    if !is_on_a_drive(log, key).await {
        // Where the deletion fails, the next try finds no chunk, and deletes.
        waiting.doubtful = Some(chunk.tenant);
        return Err(gone(shared, log, key, chunk.tenant).await);
    }
    if matches!(put, Err(RemoteCause::Io | RemoteCause::TimedOut)) {
        waiting.doubtful = Some(chunk.tenant);
    }
    put?;
    shared.known.set(key, RemotePresence::There(chunk.layout.codec()));
    shared.describe().await;
    Ok(Some(bytes))
}

/// Deletes the object of a chunk that has left its drive; why its upload ends.
async fn gone(shared: &Shared, log: &Arc<Log>, key: &ChunkKey, tenant: u64) -> RemoteCause {
    delete(shared, log, key, tenant).await.err().unwrap_or(RemoteCause::Gone)
}

/// Deletes the object of a chunk that has left its drive: a further try of its upload would find no
/// chunk.
async fn delete(shared: &Shared, log: &Arc<Log>, key: &ChunkKey, tenant: u64) -> Result<(), RemoteCause> {
    shared.known.set(key, RemotePresence::Absent);
    let mut asked = 0;
    while let Err(cause) = shared.bucket.delete(vec![shared.name_of(key, tenant)]).await {
        match cause {
            RemoteCause::CircuitOpen => {}
            RemoteCause::Io | RemoteCause::TimedOut if asked + 1 < DELETIONS => asked += 1,
            cause => return Err(cause),
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
    if log.peek(key).is_some() {
        // The upload of that store may have found the object before it was deleted.
        shared.uploads.push(log, *key)?;
    }
    Ok(())
}

/// Whether the object of a chunk is of use to nobody: its header is damaged, it has expired, or it
/// expires though the chunk does not, as that of an earlier store. Objects stay in the store until
/// somebody deletes them.
async fn is_useless(shared: &Shared, log: &Log, chunk: &Chunk, name: &Path, size: u64) -> Result<bool, RemoteCause> {
    let mut header = Vec::new();
    let range = 0..u64::from(chunk.layout.header_bytes).min(size);
    match shared.bucket.get(name, range, size, |some| header.extend_from_slice(some)).await {
        Ok(()) => {}
        Err(RemoteCause::Absent) => return Ok(true),
        Err(cause) => return Err(cause),
    }
    let now_s = log.options().clock.unix_s();
    Ok(match SlotHeader::decode(&header) {
        Ok((header, _)) if header.key != chunk.key || header.tenant != chunk.tenant => true,
        Ok((header, _)) => header.expiry_s != 0 && (chunk.expiry_s == 0 || header.expiry_s <= now_s),
        // A newer version's object stays: two versions would replace each other's for ever.
        Err(e) => e.kind() == ErrorKind::Corrupt,
    })
}

/// Whether a chunk of the key is on a drive.
async fn is_on_a_drive(log: &Log, key: &ChunkKey) -> bool {
    let since = Instant::now();
    while log.peek(key).is_none() {
        if !log.is_paused() || since.elapsed() >= DRIVE_PATIENCE {
            return false;
        }
        tokio::time::sleep(DRIVE_AGAIN).await;
    }
    true
}

/// The object of a chunk, verified.
async fn read(
    shared: &Shared,
    log: &Arc<Log>,
    chunk: &Chunk,
    paused: &mut Option<Instant>,
) -> Result<Vec<Bytes>, RemoteCause> {
    let layout = chunk.layout.clone();
    let header = piece(log, chunk, paused, (u64::from(layout.header_offset), layout.header_bytes as usize)).await?;
    let bad = || {
        // A chunk may have no lease, as in a read-only cache: then its slot may have been erased.
        if log.report_bad(chunk, Bad::Corrupt) { RemoteCause::Corrupt } else { RemoteCause::Gone }
    };
    let header = log.check_header(chunk, header.as_slice()).map_err(|_| bad())?;
    let mut pieces = Vec::new();
    for cut in object::cuts(&layout, READ_BYTES) {
        give_way(log).await;
        pieces.push(piece(log, chunk, paused, cut).await?);
    }
    let (layers, of) = (header.layers.clone(), layout.clone());
    let verified = move || {
        let cuts = object::cuts(&of, READ_BYTES).zip(&mut pieces);
        let mut crcs = object::PieceCrcs::new();
        cuts.for_each(|((at, _), piece)| object::check_piece(&of, at, piece.as_mut_slice(), &mut crcs));
        object::verify([crcs], &layers).then_some(pieces)
    };
    let verified = tokio::task::spawn_blocking(verified).await.map_err(|_| RemoteCause::Closed)?;
    let pieces = verified.ok_or_else(bad)?;
    let header = object::header_for(header, &shared.place(), &layout).map_err(|_| RemoteCause::Unsupported)?;
    let mut object = vec![Bytes::from(header)];
    object.extend(pieces.into_iter().map(object::to_bytes));
    Ok(object)
}

async fn give_way(log: &Log) {
    if let Some(is_loading) = &log.options().is_loading
        && is_loading()
    {
        tokio::time::sleep(GIVES_WAY).await;
    }
}

async fn piece(
    log: &Log,
    chunk: &Chunk,
    paused: &mut Option<Instant>,
    (offset, len): (u64, usize),
) -> Result<crate::io::Buf, RemoteCause> {
    let drive = log.drive(chunk.drive).ok_or(RemoteCause::Closed)?;
    let buf = object::memory(len)?;
    let request = |done| Request::read(Arc::clone(&chunk.file), chunk.slot_offset + offset, buf, done);
    let read = transfer::begin(&*drive.read, log.options().io_timeout, request);
    let completion = transfer::end(&*drive.read, read).await?;
    if let Err(e) = completion.result {
        if e.kind() == ErrorKind::TimedOut {
            log.report_bad(chunk, Bad::TimedOut);
            paused.get_or_insert_with(Instant::now);
        }
        return Err(RemoteCause::Drive);
    }
    completion.buf.ok_or(RemoteCause::Drive)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_comes_into_a_closed_queue_and_only_what_is_under_way_is_waited_for() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let uploads = Uploads::default();
        let chunk =
            |n| WaitingUpload { log: Weak::new(), key: ChunkKey([n; 32]), tries: 0, doubtful: None, paused: None };
        assert!(uploads.again(chunk(1), false) && uploads.again(chunk(2), false) && uploads.again(chunk(3), true));
        uploads.waiting.lock().looked = Some(Instant::now() + LEASE);
        let (under_way, number) = runtime.block_on(uploads.next());
        assert_eq!((under_way.key, uploads.close(), uploads.len()), (ChunkKey([2; 32]), 2, 0));
        assert!(!uploads.wait(Instant::now()), "one is under way");
        assert!(uploads.settle(|_, _| true, Instant::now()), "it has not looked for its chunk yet");
        uploads.begun(number, Some(7));
        assert!(!uploads.settle(|key, tenant| *key == under_way.key && tenant == Some(7), Instant::now()));
        assert!(uploads.settle(|key, _| *key != under_way.key, Instant::now()));
        assert!(!uploads.again(under_way, false), "it would wait for nobody");
        uploads.ended(number);
        assert!(uploads.wait(Instant::now()) && uploads.settle(|_, _| true, Instant::now()) && uploads.len() == 0);
    }

    #[test]
    fn chunks_whose_drive_does_not_answer_count_in_the_queue_and_come_again() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let uploads = Uploads::default();
        let chunk =
            || WaitingUpload { log: Weak::new(), key: ChunkKey([1; 32]), tries: 0, doubtful: None, paused: None };
        assert!(uploads.again(chunk(), true));
        assert!((1..MOST_WAITING).all(|_| uploads.take(chunk()).is_ok()));
        assert_eq!((uploads.take(chunk()), uploads.len()), (Err(RemoteCause::QueueFull), MOST_WAITING));
        // The cache of these is closed, so no drive is waited for.
        for _ in 0..MOST_WAITING {
            runtime.block_on(uploads.next());
        }
        assert_eq!(uploads.len(), 0);
    }
}
