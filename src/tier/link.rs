//! A connection to the owner, and its frames.
//!
//! Invariants:
//! - The connection stays open as long as this process uses a frame: when it is closed, the owner
//!   gives the frames to others.
//! - After a failure the owner is asked nothing any more, and no frame is found: it may be gone,
//!   and the next owner has other frames. Frames in use stay, in memory that nobody reuses.
//! - What the owner says is checked: an offset that is no frame's is a miss.

use std::any::Any;
use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::{RecvFlags, sockopt};

use super::heard::Heard;
use super::message::{self, Answer, Ask, MOST_BYTES, MOST_IDS, UsedAt, VERSION};
use super::owner::{at_socket, socket};
use super::{FrameId, Rank, steps};
use crate::device::{Frame, FrameFill, RegionOptions, SharedRegion, StagingOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::io::{Buf, EventFd};
use crate::key::ChunkKey;

/// How long an answer is waited for. Then the owner counts as stopped or gone.
const PATIENCE: Duration = Duration::from_secs(1);
/// The most CRCs that fit in a message.
const MOST_CRCS: usize = 8192;

/// A connection to the process that has the frames, and its memory.
#[derive(Debug)]
pub(super) struct FrameLink {
    socket: OwnedFd,
    answers: Mutex<Vec<u8>>,
    region: Arc<SharedRegion>,
    frame_bytes: usize,
    frames: usize,
    is_over: AtomicBool,
    bell: Arc<EventFd>,
    pid: u32,
}

/// Gives a frame back when the last buffer of it is gone.
struct LentFrame {
    link: Arc<FrameLink>,
    lease: u32,
}

impl FrameLink {
    /// Connects to the process that has the frames of a directory; `pins` where they are to be
    /// pinned for an accelerator.
    ///
    /// # Errors
    /// `Busy` where it does not listen yet; `Unsupported` where its frames are others; what the
    /// operating system says.
    pub(super) fn new(dir: &Path, options: &StagingOptions, pins: bool, bell: &Arc<EventFd>) -> Result<Arc<Self>> {
        let failed = |e: std::io::Error| Error::io("cannot reach the process that has the memory tier's frames", e);
        let socket = socket().map_err(failed)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE)).map_err(|e| failed(e.into()))?;
        // `connect` waits so long where the owner's backlog is full, and a message where the owner
        // has yet to take many others, as when a long load gives its frames back.
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(PATIENCE)).map_err(|e| failed(e.into()))?;
        at_socket(dir, |address| rustix::net::connect(&socket, address)).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => {
                Error::new(ErrorKind::Busy, "the process that has the memory tier's frames does not listen").source(e)
            }
            _ => failed(e),
        })?;
        let frame_bytes = options.slot_bytes;
        let hello = Ask::Hello { version: VERSION, frame_bytes: frame_bytes as u64, pins };
        message::send(&socket, &hello, None).map_err(failed)?;
        let mut answers = vec![0; MOST_BYTES];
        steps::before_answer(&socket).map_err(failed)?;
        let (frames, file) = match message::receive(&socket, &mut answers, RecvFlags::empty()).map_err(failed)? {
            Some((Answer::Welcome { frames }, Some(file))) => (frames, file),
            Some((Answer::Refused { version, frame_bytes: other }, _)) => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "the process that has the memory tier's frames speaks version {version} with frames of \
                         {other} bytes, this one version {VERSION} with {frame_bytes}"
                    ),
                )
                .advice("run the same version with the same codec, hugepages and chunk_size"));
            }
            _ => return Err(Error::new(ErrorKind::Busy, "the process that has the memory tier's frames went away")),
        };
        let frames = usize::try_from(frames).unwrap_or(usize::MAX);
        let len = frames
            .checked_mul(frame_bytes)
            .ok_or_else(|| Error::new(ErrorKind::InvalidInput, format!("the owner has too many frames: {frames}")))?;
        let wishes = RegionOptions { hugepages: options.hugepages, numa: None };
        let region = SharedRegion::open(file, len, &wishes)?;
        let link = Arc::new(Self {
            socket,
            answers: Mutex::new(answers),
            region,
            frame_bytes,
            frames,
            is_over: AtomicBool::new(false),
            bell: Arc::clone(bell),
            pid: std::process::id(),
        });
        steps::connected(&link);
        Ok(link)
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(super) fn count(&self) -> usize {
        self.frames
    }

    pub(super) fn region(&self) -> &Arc<SharedRegion> {
        &self.region
    }

    /// Whether the owner is asked nothing any more.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Asks the owner nothing any more, and wakes the thread of the tier.
    pub(super) fn end(&self) {
        if !self.is_over.swap(true, Ordering::AcqRel) {
            self.bell.set();
        }
    }

    /// The frame of a chunk, its CRCs, and the number of the lease.
    pub(super) fn find(self: &Arc<Self>, id: &FrameId, rank: Rank, is_use: bool) -> Option<(Frame, Arc<[u32]>, u32)> {
        let ask = Ask::Find { id: (id.key.0, id.put), place: place(rank), is_use };
        let Answer::Frame { lease, offset, crcs } = self.ask(&ask)? else { return None };
        let frame = FrameFill::new(self.slot(offset, lease)?)?.finish()?;
        Some((frame, Arc::from(crcs), lease))
    }

    /// A frame to be filled, and the number of the lease.
    pub(super) fn reserve(self: &Arc<Self>, id: &FrameId, rank: Rank) -> Option<(FrameFill, u32)> {
        let ask = Ask::Reserve { id: (id.key.0, id.put), place: place(rank) };
        let Answer::Frame { lease, offset, .. } = self.ask(&ask)? else { return None };
        Some((FrameFill::new(self.slot(offset, lease)?)?, lease))
    }

    /// Says that a reserved frame is full; `false` where that cannot be sent.
    pub(super) fn publish(&self, lease: u32, rank: Rank, is_unused: bool, crcs: &[u32]) -> bool {
        crcs.len() <= MOST_CRCS
            && self.tell(&Ask::Publish { lease, place: place(rank), is_unused, crcs: crcs.to_vec() })
    }

    /// Has the owner drop chunks.
    pub(super) fn forget(&self, ids: &[FrameId]) {
        for ids in ids.chunks(MOST_IDS) {
            self.tell(&Ask::Forget { ids: ids.iter().map(|id| (id.key.0, id.put)).collect() });
        }
    }

    /// Has the owner drop the chunks for which `keep` is false.
    pub(super) fn retain(&self, keep: &dyn Fn(&FrameId) -> bool) {
        self.list(|ids| self.forget(&ids.filter(|id| !keep(id)).collect::<Vec<_>>()));
    }

    /// Asks which chunks are there, and passes them to `each`, up to [`MOST_IDS`] at a time.
    fn list(&self, mut each: impl FnMut(&mut dyn Iterator<Item = FrameId>)) {
        let mut after = None;
        while let Some(Answer::Ids { ids }) = self.ask(&Ask::List { after }) {
            let Some(last) = ids.iter().map(|(key, _)| *key).max().filter(|last| after.is_none_or(|a| *last > a))
            else {
                return;
            };
            after = Some(last);
            each(&mut ids.into_iter().map(|(key, put)| FrameId { key: ChunkKey(key), put }));
        }
    }

    /// Asks which chunks have come and gone since the last time. An answer has up to [`MOST_IDS`]
    /// of them; the others come with the next one.
    pub(super) fn hear(&self, heard: &Mutex<Heard>) {
        let from = heard.lock().next();
        match self.ask(&Ask::Changes { from }) {
            Some(Answer::Changes { next, changes: Some(changes) }) => {
                let changes: Vec<_> = changes.into_iter().map(|(key, is_there)| (ChunkKey(key), is_there)).collect();
                heard.lock().changed(&changes, next);
            }
            Some(Answer::Changes { next, changes: None }) => {
                let mut all = HashSet::new();
                self.list(|ids| all.extend(ids.map(|id| id.key)));
                heard.lock().listed(&all, next);
            }
            _ => {}
        }
    }

    /// The bytes of a frame, which is given back when the last buffer of it is dropped.
    fn slot(self: &Arc<Self>, offset: u64, lease: u32) -> Option<Buf> {
        let keeper: Box<dyn Any + Send + Sync> = Box::new(LentFrame { link: Arc::clone(self), lease });
        let offset = usize::try_from(offset).ok().filter(|offset| offset % self.frame_bytes == 0)?;
        self.region.slot(offset..offset.checked_add(self.frame_bytes)?, keeper)
    }

    fn ask(&self, ask: &Ask) -> Option<Answer> {
        let mut answers = steps::lock(&self.answers);
        if !self.tell(ask) {
            return None;
        }
        let came = steps::before_answer(&self.socket);
        match came.and_then(|()| message::receive(&self.socket, &mut answers, RecvFlags::empty())) {
            Ok(Some((answer, _))) => Some(answer),
            Ok(None) => {
                self.end();
                None
            }
            Err(e) => {
                tracing::warn!(error = %e, "the process that has the memory tier's frames does not answer");
                self.end();
                None
            }
        }
    }

    /// Sends a message; `false` where that fails.
    fn tell(&self, ask: &Ask) -> bool {
        if self.is_over() {
            return false;
        }
        let sent = message::send(&self.socket, ask, None);
        if sent.is_err() {
            self.end();
        }
        sent.is_ok()
    }
}

impl Drop for LentFrame {
    fn drop(&mut self) {
        // A forked child has the connection too, and uses nothing of it.
        if std::process::id() == self.link.pid {
            self.link.tell(&Ask::Release { lease: self.lease });
        }
    }
}

fn place(rank: Rank) -> UsedAt {
    UsedAt { turn: rank.turn, depth: rank.depth.0 }
}
