//! What the processes that share frames say to each other, one datagram for each message.
//!
//! Decoders accept any bytes and never panic. A datagram longer than [`MOST_BYTES`] is refused.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::PutId;

/// Goes up with every change to the messages.
pub(super) const VERSION: u32 = 4;
/// Bytes of a message at most.
pub(super) const MOST_BYTES: usize = 64 << 10;
/// Ids in one message at most.
pub(super) const MOST_IDS: usize = 1000;

/// Key and put of a chunk.
pub(super) type Id = ([u8; 32], PutId);

/// A load or store of the process that asks, by its own count, and a chunk's place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UsedAt {
    pub(super) turn: u64,
    pub(super) depth: u32,
}

/// To the process that has the frames.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Ask {
    /// The first message; answered by `Welcome` with the memory's descriptor, or by `Refused`.
    Hello { version: u32, frame_bytes: u64, pins: bool },
    /// Answered by `Frame` or `Nothing`.
    Find { id: Id, place: UsedAt, is_use: bool },
    /// Answered by `Frame` or `Nothing`.
    Reserve { id: Id, place: UsedAt },
    /// Answered by `Ids`: the next ones after a key.
    List { after: Option<[u8; 32]> },
    /// A frame that was reserved is full, which ends the lease. No answer.
    Publish { lease: u32, place: UsedAt, is_unused: bool, crcs: Vec<u32> },
    /// Gives a frame back. No answer.
    Release { lease: u32 },
    /// Drops chunks. No answer.
    Forget { ids: Vec<Id> },
    /// Answered by `Changes`: those from a number on.
    Changes { from: Option<u64> },
}

/// From the process that has the frames.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Answer {
    Welcome {
        frames: u64,
    },
    Refused {
        version: u32,
        frame_bytes: u64,
    },
    Nothing,
    Frame {
        lease: u32,
        offset: u64,
        crcs: Vec<u32>,
    },
    Ids {
        ids: Vec<Id>,
    },
    /// `next` is the number of the first change that is not among them. `None` instead of changes
    /// where no number was asked for, or that change is not known any more: the chunks must be
    /// listed.
    Changes {
        next: u64,
        changes: Option<Vec<([u8; 32], bool)>>,
    },
}

/// Sends a message, with a descriptor where there is one. Waits for room as the socket does.
pub(super) fn send(socket: impl AsFd, message: &impl Serialize, file: Option<BorrowedFd<'_>>) -> std::io::Result<()> {
    super::steps::before_send()?;
    let bytes = postcard::to_allocvec(message).map_err(std::io::Error::other)?;
    if bytes.len() > MOST_BYTES {
        return Err(std::io::Error::other("a message that is too long"));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = file.map(|file| [file]);
    if let Some(files) = &files {
        control.push(SendAncillaryMessage::ScmRights(files));
    }
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(&socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
    })?;
    Ok(())
}

/// Receives a message into `buf`; `None` where the other side is gone.
pub(super) fn receive<T: DeserializeOwned>(
    socket: impl AsFd,
    buf: &mut [u8],
    flags: RecvFlags,
) -> std::io::Result<Option<(T, Option<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let came =
        rustix::io::retry_on_intr(|| rustix::net::recvmsg(&socket, &mut [IoSliceMut::new(buf)], &mut control, flags))?;
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    if came.bytes == 0 {
        return Ok(None);
    }
    if came.flags.contains(ReturnFlags::TRUNC) {
        return Err(std::io::Error::other("a message that is too long"));
    }
    let message = postcard::from_bytes(buf.get(..came.bytes).unwrap_or_default()).map_err(std::io::Error::other)?;
    Ok(Some((message, file)))
}
