//! Whether this process is the owner of the frames or uses those of the owner, and the thread that
//! decides it.
//!
//! In the owner the thread lends frames. In other processes it waits for the owner's end, and then
//! tries to be the next owner.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use rustix::event::{PollFd, PollFlags};

use super::frames::{FrameCounts, Frames};
use super::heard::Heard;
use super::link::FrameLink;
use super::owner::Owner;
use super::pin::Pinning;
use super::steps;
use crate::device::{StagingOptions, StagingPool};
use crate::error::{Error, ErrorKind, Result};
use crate::io::{EventFd, Mover};
use crate::key::ChunkKey;

/// How often a process without frames tries again.
const AGAIN: rustix::event::Timespec = rustix::event::Timespec { tv_sec: 1, tv_nsec: 0 };
/// How often a process asks the owner which chunks have come and gone, if somebody wants to know.
const HEARD_EVERY: rustix::event::Timespec = rustix::event::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// How often it is tried to connect to the process that has the lock, which may not listen yet, and
/// the pause after each try.
const STARTING: (u32, Duration) = (20, Duration::from_millis(10));

/// Where frames are.
#[derive(Clone, Debug)]
pub(super) enum Place {
    Nowhere,
    Own(Arc<Frames>),
    Other(Arc<FrameLink>),
}

/// What the tier and its thread share.
#[derive(Debug)]
pub(super) struct Share {
    place: RwLock<Place>,
    options: StagingOptions,
    heard: Mutex<Heard>,
    counts: Arc<FrameCounts>,
    bell: Arc<EventFd>,
    is_over: AtomicBool,
    /// Of the accelerator that copies from and to the frames, if there is one.
    mover: Option<MoverOf>,
}

/// A [`Mover`] with a `Debug` of its own.
struct MoverOf(Arc<dyn Mover>);

impl fmt::Debug for MoverOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0.place())
    }
}

/// The thread; ends when this is dropped.
#[derive(Debug)]
pub(super) struct Sharing {
    share: Arc<Share>,
    thread: Option<JoinHandle<()>>,
    pid: u32,
}

/// As [`Place`], with the [`Owner`], which only the thread has.
enum Joined {
    Nothing,
    Owner(Owner),
    User(Arc<FrameLink>),
}

impl Share {
    pub(super) fn new(options: &StagingOptions, place: Place, mover: Option<Arc<dyn Mover>>) -> Result<Arc<Self>> {
        let options = StagingOptions { slot_bytes: StagingPool::rounded(options.slot_bytes)?, ..*options };
        let counts = match &place {
            Place::Own(frames) => Arc::clone(frames.counts()),
            _ => Arc::default(),
        };
        let (bell, is_over) = (Arc::new(EventFd::new()?), AtomicBool::new(false));
        let (heard, mover) = (Mutex::default(), mover.map(MoverOf));
        Ok(Arc::new(Self { place: RwLock::new(place), options, heard, counts, bell, is_over, mover }))
    }

    pub(super) fn place(&self) -> Place {
        self.place.read().clone()
    }

    pub(super) fn frame_bytes(&self) -> usize {
        self.options.slot_bytes
    }

    pub(super) fn counts(&self) -> &FrameCounts {
        &self.counts
    }

    /// Takes up to `most` chunks that have come into the frames (`true`) or left them (`false`), as
    /// far as this process knows.
    pub(super) fn take_changes(&self, most: usize) -> Vec<(ChunkKey, bool)> {
        let mut heard = self.heard.lock();
        if heard.want() {
            self.bell.set();
        }
        // Of another process's frames the thread hears.
        if let Place::Own(frames) = self.place()
            && heard.is_asking()
        {
            match frames.changes_from(heard.next(), usize::MAX) {
                (Some(changes), next) => heard.changed(&changes, next),
                (None, next) => heard.listed(&frames.ids().iter().map(|id| id.key).collect(), next),
            }
        }
        heard.take(most)
    }

    /// Tells the thread to end.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.bell.set();
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Takes the lock of the directory, or connects to the process that has it.
    fn join(&self, dir: &Path) -> Result<Joined> {
        let make = || {
            let frames = Frames::shared(&self.options, &self.counts)?;
            if self.mover.is_some() {
                frames.are_pinned();
            }
            Ok(frames)
        };
        for _ in 0..STARTING.0 {
            match Owner::new(dir, make) {
                Ok(Some(owner)) => return Ok(Joined::Owner(owner)),
                Ok(None) => {}
                // A read-only mount: there may be an owner that lends.
                Err(e) if e.kind() == ErrorKind::Permission => {
                    return FrameLink::new(dir, &self.options, self.mover.is_some(), &self.bell)
                        .map(Joined::User)
                        .map_err(|of_link| if of_link.kind() == ErrorKind::Busy { e } else { of_link });
                }
                Err(e) => return Err(e),
            }
            match FrameLink::new(dir, &self.options, self.mover.is_some(), &self.bell) {
                Ok(link) => return Ok(Joined::User(link)),
                Err(e) if e.kind() == ErrorKind::Busy && !self.is_over() => steps::sleep(STARTING.1),
                Err(e) => return Err(e),
            }
        }
        Err(Error::new(ErrorKind::Busy, "another process has the lock of the memory tier and does not listen"))
    }

    fn take_role(&self, dir: &Path, said: &mut Option<ErrorKind>) -> Joined {
        let role = self.join(dir).unwrap_or_else(|error| {
            // Logged when the kind of error changes, and not at every try.
            if said.replace(error.kind()) != Some(error.kind()) {
                tracing::warn!(%error, dir = %dir.display(), "the memory tier is off in this process: loads read from the drives");
            }
            Joined::Nothing
        });
        *self.place.write() = match &role {
            Joined::Nothing => Place::Nowhere,
            Joined::Owner(owner) => Place::Own(Arc::clone(&owner.frames)),
            Joined::User(link) => Place::Other(Arc::clone(link)),
        };
        if !matches!(role, Joined::Nothing) {
            *said = None;
            tracing::info!(dir = %dir.display(), is_attached = matches!(role, Joined::User(_)), "the memory tier is there");
        }
        role
    }

    /// Pins the frames, where they are for an accelerator.
    fn pin(&self, role: &Joined) -> Option<Pinning> {
        let MoverOf(mover) = self.mover.as_ref()?;
        let region = match role {
            Joined::Nothing => return None,
            Joined::Owner(owner) => owner.frames.region()?,
            Joined::User(link) => link.region(),
        };
        Pinning::start(region, self.options.slot_bytes, mover)
            .inspect_err(|error| tracing::warn!(%error, "the memory tier is not pinned for the GPU"))
            .ok()
    }

    fn run(&self, dir: &Path, mut role: Joined, mut said: Option<ErrorKind>) {
        let mut pinning = self.pin(&role);
        while !self.is_over() {
            match &role {
                Joined::Owner(owner) => owner.serve(&self.bell, || self.is_over()),
                Joined::User(link) => {
                    // Also while too many changes wait: taking them rings no bell.
                    let is_wanted = self.heard.lock().is_wanted();
                    let other = PollFd::from_borrowed_fd(link.socket(), PollFlags::RDHUP);
                    self.wait(Some(other), is_wanted.then_some(&HEARD_EVERY));
                    if !self.is_over() && !link.is_over() && !is_gone(link) {
                        if self.heard.lock().is_asking() {
                            link.hear(&self.heard);
                        }
                        continue;
                    }
                    link.end();
                }
                Joined::Nothing => self.wait(None, Some(&AGAIN)),
            }
            steps::step();
            *self.place.write() = Place::Nowhere;
            drop(pinning.take());
            self.heard.lock().all_gone();
            drop(std::mem::replace(&mut role, Joined::Nothing));
            if !self.is_over() {
                role = self.take_role(dir, &mut said);
                pinning = self.pin(&role);
            }
        }
        *self.place.write() = Place::Nowhere;
    }

    /// Waits for the bell, or for something to happen to `other`.
    fn wait(&self, other: Option<PollFd<'_>>, timeout: Option<&rustix::event::Timespec>) {
        let mut polled: Vec<_> = [PollFd::new(&*self.bell, PollFlags::IN)].into_iter().chain(other).collect();
        if let Err(error) = steps::poll(&mut polled, timeout) {
            tracing::debug!(%error, "the memory tier's thread could not wait");
        }
        self.bell.clear();
    }
}

fn is_gone(link: &FrameLink) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(link.socket(), PollFlags::RDHUP)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    !matches!(rustix::event::poll(&mut polled, Some(&now)), Ok(0))
}

impl Sharing {
    /// Becomes owner or connects to the owner of a directory, and starts the thread.
    pub(super) fn start(share: &Arc<Share>, dir: &Path) -> Result<Self> {
        let mut said = None;
        let role = share.take_role(dir, &mut said);
        let (of_thread, dir) = (Arc::clone(share), PathBuf::from(dir));
        let thread = steps::spawn("forebay-memory", move || of_thread.run(&dir, role, said))
            .map_err(|e| Error::io("cannot start the thread of the memory tier", e))?;
        Ok(Self { share: Arc::clone(share), thread: Some(thread), pid: std::process::id() })
    }
}

impl Drop for Sharing {
    fn drop(&mut self) {
        // A forked child has no such thread.
        if std::process::id() != self.pid {
            return;
        }
        self.share.end();
        if let Some(thread) = self.thread.take()
            && steps::join(thread).is_err()
        {
            tracing::error!("the thread of the memory tier has panicked");
        }
    }
}
