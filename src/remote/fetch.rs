//! From the remote store to a drive, and into memory where there is a memory tier: the chunks of a
//! prompt in order, as ordinary puts.
//!
//! A put begins before its object is read, so that it ends like any other where the chunk, its
//! tenant or everything is removed meanwhile. Its parts are written as they come, and it is
//! published once all of them have proved right.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::try_join_all;
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::bucket::PART_BYTES;
use super::known::RemotePresence;
use super::object::{self, PieceCrcs, Wanted};
use super::stats::RemoteCause;
use super::store::RemoteObject;
use super::transfer::{Room, Submitted};
use super::{Shared, restore, transfer};
use crate::error::{Error, ErrorKind};
use crate::format::layout::{SlotCodec, SlotLayout};
use crate::format::slot::SlotHeader;
use crate::io::{Buf, Done};
use crate::log::{Log, Put, PutOutcome, PutSpec, Refusal, SlotWriter};
use crate::tier::{Filling, FrameId, MemoryTier, PutId, Rank};

/// Chunks of one prompt that are fetched at once.
pub(super) const AT_ONCE: usize = 4;
/// Bytes of which the CRC is taken at once, while the processor's cache still has them.
const CHECKED_AT_ONCE: usize = 256 << 10;
/// Bytes that are written at once, while the rest of a part is still coming.
const WRITTEN_AT_ONCE: usize = 2 << 20;
/// The pause after which a put is tried again that found no room, or its key being stored by
/// another.
const TRY_AGAIN: Duration = Duration::from_millis(5);
/// How long a put that finds no room is tried again: what fills the drive may be another model's.
const ROOM_PATIENCE: Duration = Duration::from_secs(10);
/// The same for its tenant's quota. What the tenant can give up goes at once; while this waits, it
/// keeps memory from the fetches of others, and fetching counts as slow for them.
const QUOTA_PATIENCE: Duration = Duration::from_secs(1);

/// A fetch under way. Dropping it cancels it; what it has brought stays.
#[derive(Debug)]
pub struct Fetch {
    state: Arc<FetchState>,
    task: Option<AbortHandle>,
}

#[derive(Debug, Default)]
pub(super) struct FetchState {
    progress: Mutex<FetchProgress>,
    over: Condvar,
}

#[derive(Debug, Default)]
struct FetchProgress {
    chunks: usize,
    stopped: Option<RemoteCause>,
    over: bool,
    times: Option<Range<Instant>>,
}

impl Fetch {
    /// A fetch that has nothing to do.
    #[must_use]
    pub fn nothing() -> Self {
        let state = FetchState::default();
        state.progress.lock().over = true;
        Self { state: Arc::new(state), task: None }
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.state.progress.lock().over
    }

    /// Chunks that it has brought to a drive so far.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.state.progress.lock().chunks
    }

    /// Why it ended before the end of the prompt, in the words of the metric
    /// `forebay_remote_missed_chunks_total`.
    #[must_use]
    pub fn stopped(&self) -> Option<&'static str> {
        self.state.progress.lock().stopped.map(RemoteCause::as_str)
    }

    /// Chunks that it has brought, when it began and when it ended: for measuring how fast the
    /// store is. Where none came before the deadline, one counts as if it had come then; `None`
    /// where none came for another reason.
    #[must_use]
    pub fn measured(&self) -> Option<(usize, Range<Instant>)> {
        let progress = self.state.progress.lock();
        let chunks = progress.chunks.max(usize::from(progress.stopped == Some(RemoteCause::TimedOut)));
        Some((chunks, progress.times.clone().filter(|_| chunks > 0)?))
    }

    /// Waits until it has ended, at most until `deadline`; whether it has.
    pub fn wait(&self, deadline: Instant) -> bool {
        let mut progress = self.state.progress.lock();
        while !progress.over {
            if self.state.over.wait_until(&mut progress, deadline).timed_out() {
                break;
            }
        }
        progress.over
    }

    /// Ends it. A chunk that is just being published may still come.
    pub fn cancel(&self) {
        self.task.iter().for_each(AbortHandle::abort);
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// Marks a fetch as over when it is dropped: its task may have been aborted.
struct Running {
    state: Arc<FetchState>,
    shared: Arc<Shared>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut progress = self.state.progress.lock();
        if !progress.over {
            (progress.stopped, progress.over) = (Some(RemoteCause::Cancelled), true);
            self.shared.counters.not_fetched.add(RemoteCause::Cancelled, 1);
        }
        self.state.over.notify_all();
    }
}

/// Where fetched chunks go.
#[derive(Clone)]
pub(super) struct Destination {
    pub(super) log: Arc<Log>,
    pub(super) memory: Option<Arc<MemoryTier>>,
    /// Whether a tenant at its quota gives up chunks for those that come.
    pub(super) evicts: bool,
}

/// What is to be brought.
pub(super) enum FetchOrder {
    /// The chunks of a prompt, in order, until the first that does not come.
    Prompt(Vec<Wanted>),
    /// Objects that were listed, up to so many bytes.
    Listed(Vec<RemoteObject>, u64),
}

/// Starts to fetch.
pub(super) fn start(
    shared: &Arc<Shared>,
    runtime: &tokio::runtime::Handle,
    to: Destination,
    order: FetchOrder,
    deadline: Instant,
) -> Fetch {
    let started = Instant::now();
    let state = Arc::new(FetchState::default());
    let running = Running { state: Arc::clone(&state), shared: Arc::clone(shared) };
    let task = runtime.spawn(async move {
        let Running { state, shared } = &running;
        let all = async {
            match order {
                FetchOrder::Prompt(wanted) => run(shared, &to, wanted, state).await,
                FetchOrder::Listed(objects, most) => restore::run(shared, &to, objects, most, state).await,
            }
        };
        let stopped = tokio::time::timeout_at(deadline.into(), all).await.unwrap_or(Some(RemoteCause::TimedOut));
        if let Some(cause) = stopped {
            shared.counters.not_fetched.add(cause, 1);
        }
        let mut progress = state.progress.lock();
        (progress.stopped, progress.over, progress.times) = (stopped, true, Some(started..Instant::now()));
    });
    Fetch { state, task: Some(task.abort_handle()) }
}

/// Fetches the chunks of a prompt; why it stopped before the end, if it did.
async fn run(shared: &Arc<Shared>, to: &Destination, wanted: Vec<Wanted>, state: &FetchState) -> Option<RemoteCause> {
    // The store has nothing of most prompts: ask for the first chunk alone, before several at once.
    let first = wanted.first()?.clone();
    let turn = to.memory.as_ref().map_or(0, |memory| memory.turn());
    if let Err(cause) = find(shared, to, &first).await {
        return Some(cause);
    }
    // Several puts begin before their parents are there: placement does not find these on any
    // drive.
    let (root, preferred_drive) = (Some(first.key), to.log.preferred_drive(&first.parent));
    let spec = |wanted: &Wanted| PutSpec { root, preferred_drive, ..put_spec(to, wanted) };
    let mut chunks = futures_util::stream::iter(wanted)
        .map(|wanted| async move { bring(shared, to, &wanted, spec(&wanted), turn).await })
        .buffered(AT_ONCE);
    while let Some(end) = chunks.next().await {
        match end {
            Ok(bytes) => count(shared, state, bytes),
            Err(cause) => return Some(cause),
        }
    }
    None
}

/// Counts a chunk that has come, with its bytes; 0 where a drive had it already, which counts
/// nothing.
pub(super) fn count(shared: &Shared, state: &FetchState, bytes: u64) {
    if bytes > 0 {
        shared.counters.fetched.fetch_add(1, Ordering::Relaxed);
        shared.counters.fetched_bytes.fetch_add(bytes, Ordering::Relaxed);
        state.progress.lock().chunks += 1;
    }
}

/// The codec with which the store has a chunk, which its length tells; `None` where a drive has it.
async fn find(shared: &Shared, to: &Destination, wanted: &Wanted) -> Result<Option<SlotCodec>, RemoteCause> {
    let key = &wanted.key;
    match shared.known.get(key) {
        _ if to.log.contains(key) => return Ok(None),
        Some(RemotePresence::There(codec)) => return Ok(Some(codec)),
        Some(RemotePresence::Absent) => return Err(RemoteCause::Absent),
        Some(RemotePresence::Damaged) => return Err(RemoteCause::Corrupt),
        None => {}
    }
    ask(shared, to, wanted).await.map(Some)
}

/// As [`find`], whatever is known.
async fn ask(shared: &Shared, to: &Destination, wanted: &Wanted) -> Result<SlotCodec, RemoteCause> {
    let key = &wanted.key;
    let answer = shared.bucket.head(&shared.name_of(key, wanted.tenant)).await;
    match answer {
        Ok(size) => {
            let codec = object::codec_of(&to.log, wanted.tokens, size);
            shared.known.set(key, codec.map_or(RemotePresence::Damaged, RemotePresence::There));
            codec.ok_or(RemoteCause::Corrupt)
        }
        Err(cause) => {
            if cause == RemoteCause::Absent {
                shared.known.set(key, RemotePresence::Absent);
            }
            Err(cause)
        }
    }
}

/// The put of a chunk.
pub(super) fn put_spec(to: &Destination, wanted: &Wanted) -> PutSpec {
    let start_position = u64::from(wanted.depth) * u64::from(to.log.geometry().chunk_tokens);
    let spec = PutSpec::chunk(wanted.key, wanted.parent, wanted.tokens, wanted.depth);
    PutSpec { tenant: wanted.tenant, start_position, ..spec }
}

/// Brings one chunk; bytes of its slot, 0 where a drive has it already.
pub(super) async fn bring(
    shared: &Shared,
    to: &Destination,
    wanted: &Wanted,
    spec: PutSpec,
    turn: u64,
) -> Result<u64, RemoteCause> {
    let (mut room, mut full_since, mut spec) = (None, None, Box::new(spec));
    loop {
        if to.log.contains(&wanted.key) {
            return Ok(0);
        }
        let Some(codec) = find(shared, to, wanted).await? else { return Ok(0) };
        let layout = to.log.chunk_layout(wanted.tokens, codec);
        spec.codec = codec;
        let room = match &room {
            Some(room) => room,
            None => room.insert(Arc::new(shared.fetch_staging.take(layout.slot_bytes).await?)),
        };
        match to.log.begin_put(spec.clone()) {
            Ok(PutOutcome::Started(put)) => {
                if hangs(shared, &put) {
                    put.fail(&Error::new(ErrorKind::TimedOut, "writes to the drive hang"));
                    return Err(RemoteCause::Drive);
                }
                let end = fill(shared, to, room, wanted, &layout, turn, put).await;
                match end {
                    Err(RemoteCause::Absent | RemoteCause::Expired) => {
                        shared.known.set(&wanted.key, RemotePresence::Absent);
                    }
                    // It may be another object than what is known of it says, stored since.
                    Err(RemoteCause::Corrupt) if ask(shared, to, wanted).await == Ok(codec) => {
                        shared.known.set(&wanted.key, RemotePresence::Damaged);
                    }
                    _ => {}
                }
                return end.map(|is_kept| if is_kept { layout.slot_bytes } else { 0 });
            }
            // Another fetch or a store is storing it.
            Ok(PutOutcome::AlreadyThere) => tokio::time::sleep(TRY_AGAIN).await,
            Ok(PutOutcome::NotAdmitted(Refusal::Quota, _)) if !to.evicts => return Err(RemoteCause::Quota),
            // Room is being made.
            Ok(not @ (PutOutcome::NoRoom(_) | PutOutcome::Leaving(_) | PutOutcome::NotAdmitted(Refusal::Quota, _))) => {
                let (patience, cause) = match not {
                    PutOutcome::NotAdmitted(..) => (QUOTA_PATIENCE, RemoteCause::Quota),
                    _ => (ROOM_PATIENCE, RemoteCause::NoSpace),
                };
                if full_since.get_or_insert_with(Instant::now).elapsed() >= patience {
                    return Err(cause);
                }
                tokio::time::sleep(TRY_AGAIN).await;
            }
            Ok(PutOutcome::NotAdmitted(Refusal::Budget, _)) => return Err(RemoteCause::NoSpace),
            Err(e) if e.kind() == ErrorKind::Busy => return Err(RemoteCause::NoSpace),
            Err(e) if e.kind() == ErrorKind::Closed => return Err(RemoteCause::Closed),
            Err(_) => return Err(RemoteCause::Drive),
        }
    }
}

/// Whether the drive of a put has as much memory with it as fetches may use: nothing more is
/// fetched to it then.
fn hangs(shared: &Shared, put: &Put) -> bool {
    let hanging = put.queue().stats().counts().quarantined as u64;
    hanging * WRITTEN_AT_ONCE as u64 >= shared.fetch_staging.bytes()
}

/// Reads a chunk's object into its slot; `false` where another process has stored it meanwhile.
async fn fill(
    shared: &Shared,
    to: &Destination,
    room: &Arc<Room>,
    wanted: &Wanted,
    layout: &SlotLayout,
    turn: u64,
    put: Put,
) -> Result<bool, RemoteCause> {
    let id = FrameId { key: wanted.key, put: PutId { drive: to.log.drive_id(put.drive()), sequence: put.sequence() } };
    let rank = Rank { turn, depth: Reverse(wanted.depth) };
    let frame = to.memory.as_ref().and_then(|memory| memory.reserve(id, layout.slot_bytes, rank));
    let slot = SlotWriter::new(put);
    let chunk = ComingChunk { shared, to, room, frame: frame.as_ref(), slot: &slot, layout };
    let parts = object::cuts(layout, PART_BYTES).map(|cut| part(chunk, wanted, cut));
    let (headers, crcs): (Vec<_>, Vec<_>) = try_join_all(parts).await?.into_iter().unzip();
    let header = headers.into_iter().flatten().next().ok_or(RemoteCause::Corrupt)?;
    if !object::verify(crcs, &header.layers) {
        return Err(RemoteCause::Corrupt);
    }
    slot.expire_by(u32::try_from(header.expiry_s).unwrap_or(u32::MAX));
    let crcs: Vec<u32> = header.layers.iter().map(|layer| layer.crc).collect();
    let (told, end) = oneshot::channel();
    slot.commit(&crcs, Box::new(move |result| drop(told.send(result))));
    match end.await.map_err(|_| RemoteCause::Closed)? {
        // What is in the frame has no slot.
        Ok(false) => return Ok(false),
        Ok(true) => {}
        Err(e) if e.kind() == ErrorKind::Cancelled => return Err(RemoteCause::Cancelled),
        Err(_) => return Err(RemoteCause::Drive),
    }
    frame.iter().for_each(|frame| frame.publish(&crcs));
    Ok(true)
}

/// A chunk whose object is being fetched, and where its bytes go.
#[derive(Clone, Copy)]
struct ComingChunk<'a> {
    shared: &'a Shared,
    to: &'a Destination,
    /// The chunk's share of the bound on memory. Each part gives back its own when it is written,
    /// all of it goes when the last write has ended or timed out.
    room: &'a Arc<Room>,
    frame: Option<&'a Filling>,
    slot: &'a SlotWriter,
    layout: &'a SlotLayout,
}

/// Reads a part of an object, takes its CRCs and writes it to the slot. Gives the CRCs, and from
/// the first part the header, checked.
async fn part(
    chunk: ComingChunk<'_>,
    wanted: &Wanted,
    (at, len): (u64, usize),
) -> Result<(Option<SlotHeader>, PieceCrcs), RemoteCause> {
    let ComingChunk { shared, to, layout, .. } = chunk;
    let name = shared.name_of(&wanted.key, wanted.tenant);
    let header_at = u64::from(layout.header_offset);
    // The header comes with the first part.
    let mut header = vec![0; if at == object::data_offset(layout) { layout.header_bytes as usize } else { 0 }];
    let from = at - header.len() as u64 - header_at;
    let range = from..at - header_at + len as u64;
    let mut writer = PartWriter::new(chunk, at..at + len as u64);
    let mut taken = 0;
    let take = |bytes: &[u8]| {
        let (first, rest) = bytes.split_at(bytes.len().min(header.len().saturating_sub(taken)));
        copy_to(&mut header, taken, first);
        taken += bytes.len();
        writer.take(rest);
    };
    shared.bucket.get(&name, range, object::object_bytes(layout), take).await?;
    let options = to.log.options();
    let check = |bytes: &[u8]| object::check_header(bytes, wanted, &shared.place(), layout, options.clock.unix_s());
    let header = if header.is_empty() { None } else { Some(check(&header)?) };
    let crcs = writer.end().await?;
    chunk.room.free(len as u64);
    Ok((header, crcs))
}

/// Takes the bytes of a part as they come, and writes them piece by piece.
struct PartWriter<'a> {
    chunk: ComingChunk<'a>,
    /// The range within the slot that is not written yet: from the start of the piece that is being
    /// filled.
    left: Range<u64>,
    piece: Option<Buf>,
    /// Bytes of this piece that have come, and how many of them have gone into the CRCs.
    filled: usize,
    checked: usize,
    crcs: PieceCrcs,
    writes: Vec<Submitted>,
    failed: Option<RemoteCause>,
}

impl<'a> PartWriter<'a> {
    fn new(chunk: ComingChunk<'a>, left: Range<u64>) -> Self {
        let (writes, crcs) = (Vec::new(), PieceCrcs::new());
        Self { chunk, left, piece: None, filled: 0, checked: 0, crcs, writes, failed: None }
    }

    fn take(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.failed.is_none() {
            match self.take_some(bytes) {
                Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
                Err(cause) => self.failed = Some(cause),
            }
        }
    }

    /// Takes as many bytes as the piece has room for; how many that were.
    fn take_some(&mut self, bytes: &[u8]) -> Result<usize, RemoteCause> {
        let ComingChunk { shared, frame, layout, .. } = self.chunk;
        let at = self.left.start;
        let mut piece = match self.piece.take() {
            Some(piece) => piece,
            None => memory_for(shared, frame, (at, (self.left.end - at).min(WRITTEN_AT_ONCE as u64) as usize))?,
        };
        let some = bytes.get(..piece.len() - self.filled).unwrap_or(bytes);
        if some.is_empty() {
            return Err(RemoteCause::Corrupt);
        }
        copy_to(piece.as_mut_slice(), self.filled, some);
        self.filled += some.len();
        if self.filled >= (self.checked + CHECKED_AT_ONCE).min(piece.len())
            && let Some(unchecked) = piece.as_mut_slice().get_mut(self.checked..self.filled)
        {
            object::check_piece(layout, at + self.checked as u64, unchecked, &mut self.crcs);
            self.checked = self.filled;
        }
        if self.filled < piece.len() {
            self.piece = Some(piece);
        } else {
            self.write(piece)?;
        }
        Ok(some.len())
    }

    fn write(&mut self, piece: Buf) -> Result<(), RemoteCause> {
        let (slot, at) = (self.chunk.slot, self.left.start);
        self.left.start += piece.len() as u64;
        (self.filled, self.checked) = (0, 0);
        let timeout = self.chunk.to.log.options().io_timeout;
        // Also where this fetch is given up before.
        let room = Arc::clone(self.chunk.room);
        let request = |done: Done| {
            slot.request(at, piece, move |completion| {
                drop(room);
                done(completion);
            })
        };
        self.writes.push(transfer::begin(&**slot.queue(), timeout, request));
        Ok(())
    }

    /// Waits until all is written, and gives the CRCs.
    async fn end(self) -> Result<PieceCrcs, RemoteCause> {
        let ComingChunk { shared, frame, slot, .. } = self.chunk;
        if let Some(cause) = self.failed {
            return Err(cause);
        }
        for write in self.writes {
            let written = transfer::end(&**slot.queue(), write).await?;
            written.result.map_err(|_| RemoteCause::Drive)?;
            let spare = written.buf.filter(|piece| frame.is_none_or(|frame| !frame.holds(piece)));
            spare.into_iter().for_each(|piece| shared.spare_pieces.put(piece));
        }
        Ok(self.crcs)
    }
}

fn memory_for(shared: &Shared, frame: Option<&Filling>, (at, len): (u64, usize)) -> Result<Buf, RemoteCause> {
    let at = at as usize;
    frame.and_then(|frame| frame.part(at..at + len)).map_or_else(|| shared.spare_pieces.take(len), Ok)
}

fn copy_to(to: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(to) = to.get_mut(at..at + bytes.len()) {
        to.copy_from_slice(bytes);
    }
}
