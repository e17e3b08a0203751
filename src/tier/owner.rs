//! The process that has the frames: it holds the directory's lock, and lends frames to the others.
//!
//! Invariants:
//! - A frame that another process fills or reads is not given to a third: this process keeps a
//!   [`FrameFill`] or a [`Frame`] of it until it is given back or the other process is gone.
//! - The frames end with this process. The next owner makes new ones.
//! - No message of another process makes this one wait or panic. A process that sends an invalid
//!   message, or that cannot be sent one, gets no further answers. It may live on and use its
//!   frames: they come back when it closes its end of the connection.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::frames::Frames;
use super::message::{self, Answer, Ask, MOST_BYTES, MOST_IDS, UsedAt, VERSION};
use super::{FrameId, Rank, steps};
use crate::device::{Frame, FrameFill};
use crate::error::{Error, Result};
use crate::io::EventFd;
use crate::key::ChunkKey;

const LOCK: &str = "memory.lock";
const SOCKET: &str = "memory.sock";
/// Processes that use the frames at most.
const MOST_PEERS: usize = 256;
/// Messages of one process that are answered before others get their turn.
const IN_A_ROW: usize = 64;
/// The pause after which a connection is tried again that could not be accepted.
const AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// A socket for datagrams in order, which learns when the other side is gone.
pub(super) fn socket() -> std::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Calls `with` with the address of the directory's socket, which is short however long the
/// directory's name is.
pub(super) fn at_socket<T>(
    dir: &Path,
    with: impl FnOnce(&SocketAddrUnix) -> rustix::io::Result<T>,
) -> std::io::Result<T> {
    let opened = rustix::fs::open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}/{SOCKET}", opened.as_raw_fd()))?;
    Ok(with(&address)?)
}

/// The lock and the socket of a directory.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) frames: Arc<Frames>,
    lock: File,
    listener: OwnedFd,
    socket: PathBuf,
}

/// A process that uses the frames.
pub(super) struct Peer {
    socket: OwnedFd,
    is_welcome: bool,
    /// Whether its messages are ignored from now on.
    is_over: bool,
    leases: BTreeMap<u32, Lease>,
    next: u32,
    /// The number of its current load or store by its own count, and by ours.
    turn: Option<(u64, u64)>,
}

enum Lease {
    Reads { frame: Frame },
    Fills(FrameFill, FrameId),
}

impl Owner {
    /// Takes the lock of a directory and makes the frames; `None` where another process has it.
    ///
    /// # Errors
    /// What the operating system says of the files, and of the memory.
    pub(super) fn new(dir: &Path, make: impl FnOnce() -> Result<Arc<Frames>>) -> Result<Option<Self>> {
        let path = dir.join(LOCK);
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let lock =
            options.open(&path).map_err(|e| Error::io("cannot open the lock of the memory tier", e).at(&path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(e)) => return Err(Error::io("cannot lock the memory tier", e).at(&path)),
        }
        steps::step();
        let socket = dir.join(SOCKET);
        // An owner that died has left it.
        drop(std::fs::remove_file(&socket));
        let listener =
            Self::listen(dir).map_err(|e| Error::io("cannot make the socket of the memory tier", e).at(&socket))?;
        steps::step();
        Ok(Some(Self { frames: make()?, lock, listener, socket }))
    }

    fn listen(dir: &Path) -> std::io::Result<OwnedFd> {
        let listener = socket()?;
        // The file that `bind` makes gets this mode.
        rustix::fs::fchmod(&listener, Mode::RUSR | Mode::WUSR)?;
        at_socket(dir, |address| rustix::net::bind(&listener, address))?;
        rustix::net::listen(&listener, 64)?;
        rustix::io::ioctl_fionbio(&listener, true)?;
        Ok(listener)
    }

    /// Lends frames until `is_over` is true; `bell` wakes it to look.
    pub(super) fn serve(&self, bell: &EventFd, is_over: impl Fn() -> bool) {
        let mut peers: Vec<Peer> = Vec::new();
        let mut buf = vec![0; MOST_BYTES];
        let mut refused = None;
        while !is_over() {
            let ready: Vec<bool> = {
                let sockets = peers.iter().map(|peer| PollFd::new(&peer.socket, PollFlags::IN));
                // A connection that cannot be accepted would end each wait at once.
                let accepts = if refused.is_none() { PollFlags::IN } else { PollFlags::empty() };
                let mut polled = vec![PollFd::new(bell, PollFlags::IN), PollFd::new(&self.listener, accepts)];
                polled.extend(sockets);
                if let Err(e) = steps::poll(&mut polled, refused.and(Some(&AGAIN)))
                    && e != Errno::INTR
                {
                    tracing::error!(error = %e, "the memory tier does not lend frames any more");
                    // What is lent must be kept, below.
                    break;
                }
                polled.iter().map(|fd| !fd.revents().is_empty()).collect()
            };
            bell.clear();
            let mut ready = ready.into_iter().skip(1);
            let is_new = ready.next().unwrap_or(false);
            let mut stays = Vec::with_capacity(peers.len() + 1);
            for (mut peer, is_ready) in peers.into_iter().zip(ready) {
                if !is_ready || self.attend(&mut peer, &mut buf) {
                    stays.push(peer);
                } else {
                    self.part(peer);
                }
            }
            peers = stays;
            let tries = is_new || refused.is_some();
            match tries.then(|| rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK))
            {
                // One too many is closed at once.
                Some(Ok(socket)) if peers.len() < MOST_PEERS => peers.push(Peer::new(socket)),
                Some(Err(e)) if !matches!(e, Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {
                    if refused.replace(e) != Some(e) {
                        tracing::warn!(error = %e, "the memory tier cannot lend frames to one more process; where it has too many files open, raise its limit (LimitNOFILE, ulimit -n)");
                    }
                    continue;
                }
                _ => {}
            }
            refused = None;
        }
        self.end(peers);
    }

    /// Ends lending. The others may use the frames that they have until they learn of it, so these
    /// are never used again.
    pub(super) fn end(&self, peers: impl IntoIterator<Item = Peer>) {
        peers.into_iter().flat_map(|peer| peer.leases.into_values()).for_each(|lease| match lease {
            Lease::Reads { frame } => self.frames.keep(frame),
            Lease::Fills(fill, _) => self.frames.keep(fill),
        });
    }

    /// Answers the messages of a process; `false` where it is gone.
    fn attend(&self, peer: &mut Peer, buf: &mut [u8]) -> bool {
        for _ in 0..IN_A_ROW {
            let ask = match message::receive::<Ask>(&peer.socket, buf, RecvFlags::DONTWAIT) {
                Ok(Some((ask, _))) => ask,
                Ok(None) => return false,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return true,
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return false,
                Err(_) if peer.is_over => continue,
                Err(e) => {
                    tracing::warn!(error = %e, "a process that uses the memory tier sent an invalid message");
                    return peer.end();
                }
            };
            if peer.is_over {
                continue;
            }
            let Some(answer) = self.answer(peer, ask) else { return peer.end() };
            let file = match &answer {
                Some(Answer::Welcome { .. }) => self.frames.region().map(|region| region.file()),
                _ => None,
            };
            if let Some(answer) = answer
                && message::send(&peer.socket, &answer, file).is_err()
            {
                return peer.end();
            }
        }
        true
    }

    /// The answer, if the message has one; `None` in place of that where it breaks the protocol.
    pub(super) fn answer(&self, peer: &mut Peer, ask: Ask) -> Option<Option<Answer>> {
        let frames = &self.frames;
        if let Ask::Hello { version, frame_bytes, pins } = ask {
            let own = frames.frame_bytes() as u64;
            peer.is_welcome = (version, frame_bytes) == (VERSION, own);
            if peer.is_welcome && pins {
                frames.are_pinned();
            }
            return Some(Some(if peer.is_welcome {
                Answer::Welcome { frames: frames.count() as u64 }
            } else {
                Answer::Refused { version: VERSION, frame_bytes: own }
            }));
        }
        if !peer.is_welcome {
            return None;
        }
        Some(match ask {
            Ask::Find { id, place, is_use } => {
                let found = frames.find(&id_of(id), peer.rank(frames, place), is_use);
                Some(found.map_or(Answer::Nothing, |(frame, crcs)| {
                    let offset = frame.offset();
                    peer.lend(offset, Lease::Reads { frame }, crcs.to_vec())
                }))
            }
            Ask::Reserve { id, place } => {
                peer.rank(frames, place);
                Some(frames.reserve().map_or(Answer::Nothing, |fill| {
                    let offset = fill.offset();
                    peer.lend(offset, Lease::Fills(fill, id_of(id)), Vec::new())
                }))
            }
            Ask::Publish { lease, place, is_unused, crcs } => {
                let rank = peer.rank(frames, place);
                match peer.leases.remove(&lease) {
                    Some(Lease::Fills(fill, id)) => drop(frames.put(&id, &fill, rank, is_unused, &crcs)),
                    _ => return None,
                }
                None
            }
            Ask::Release { lease } => {
                // A lease that was published has ended already.
                drop(peer.leases.remove(&lease));
                None
            }
            Ask::List { after } => {
                let mut ids: Vec<_> = frames.ids().into_iter().map(|id| (id.key.0, id.put)).collect();
                ids.retain(|(key, _)| after.is_none_or(|after| *key > after));
                ids.sort_unstable();
                ids.truncate(MOST_IDS);
                Some(Answer::Ids { ids })
            }
            Ask::Forget { ids } => {
                ids.into_iter().for_each(|id| drop(frames.remove(&id_of(id))));
                None
            }
            Ask::Changes { from } => {
                let (changes, next) = frames.changes_from(from, MOST_IDS);
                let changes = changes.map(|some| some.into_iter().map(|(key, is_there)| (key.0, is_there)).collect());
                Some(Answer::Changes { next, changes })
            }
            Ask::Hello { .. } => None,
        })
    }

    /// Takes the frames of a process that is gone back: those that it read are free, and those that
    /// it was filling too, with new memory.
    pub(super) fn part(&self, peer: Peer) {
        for lease in peer.leases.into_values() {
            if let Lease::Fills(fill, _) = lease {
                self.frames.take_back(fill);
            }
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // Removed under the lock: another owner could have made a new one otherwise.
        drop(std::fs::remove_file(&self.socket));
        steps::step();
        drop(self.lock.unlock());
    }
}

impl Peer {
    /// A process that has just connected.
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket, is_welcome: false, is_over: false, leases: BTreeMap::new(), next: 0, turn: None }
    }

    /// Ignores its messages from now on. `true`, for [`Owner::attend`]: it is not gone.
    fn end(&mut self) -> bool {
        self.is_over = true;
        if let Err(error) = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write) {
            tracing::debug!(%error, "a process that uses the memory tier is gone");
        }
        true
    }

    /// The rank of what it uses: each of its loads and stores gets a number here as ours do.
    fn rank(&mut self, frames: &Frames, place: UsedAt) -> Rank {
        let turn = match self.turn {
            Some((theirs, ours)) if theirs == place.turn => ours,
            _ => frames.turn(),
        };
        self.turn = Some((place.turn, turn));
        Rank { turn, depth: std::cmp::Reverse(place.depth) }
    }

    fn lend(&mut self, offset: Option<usize>, lease: Lease, crcs: Vec<u32>) -> Answer {
        let Some(offset) = offset else { return Answer::Nothing };
        while self.leases.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        self.leases.insert(number, lease);
        Answer::Frame { lease: number, offset: offset as u64, crcs }
    }
}

fn id_of((key, put): message::Id) -> FrameId {
    FrameId { key: ChunkKey(key), put }
}
