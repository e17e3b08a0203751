//! The thread that removes: a removal waits for the drive, which workers must not.
//!
//! Invariants: a deletion is answered with yes only after it is durable; after the deadline of a
//! close nothing more is begun, as each removal may take as long as the drive is waited for; nobody
//! waits for one after the other to time out, nor for one that the drive never ends.

use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use parking_lot::Mutex;

use super::batch::{KeyResult, ObjectCause, Ticket};
use super::get::{Presence, presence};
use super::names::{Version, is_name};
use crate::error::{self, Error, ErrorKind};
use crate::key::{ChunkKey, object_key};
use crate::log::{Log, Opening};

/// How often it is looked whether the thread has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// What goes on when what is left of an object is removed, or could not be.
type Mended = Box<dyn FnOnce(Result<(), ObjectCause>) + Send>;

enum Message {
    Delete(Vec<(Vec<u8>, Ticket)>),
    Clean(Vec<ChunkKey>),
    Mend(ChunkKey, Mended),
}

/// The way to the thread.
pub(super) struct RemovalThread {
    /// Takes each message with the time of its sending.
    send: Mutex<Option<Sender<(Instant, Message)>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// When nothing more is begun.
    until: Arc<OnceLock<Instant>>,
}

impl RemovalThread {
    pub(super) fn start(opening: Arc<Opening>) -> error::Result<Self> {
        let (send, receive) = crossbeam_channel::unbounded();
        let until = Arc::new(OnceLock::new());
        let end = Arc::clone(&until);
        let run = move || run(&opening, &receive, &end);
        let spawned = std::thread::Builder::new().name("fb-object-rm".to_owned()).spawn(run);
        let thread = spawned.map_err(|e| Error::io("cannot start a thread of the object store", e))?;
        Ok(Self { send: Mutex::new(Some(send)), thread: Mutex::new(Some(thread)), until })
    }

    fn send(&self, message: Message) {
        let send = self.send.lock().clone();
        let refused = match send {
            Some(send) => send.send((Instant::now(), message)).err().map(|e| e.0.1),
            None => Some(message),
        };
        refused.into_iter().for_each(|message| message.refuse(ObjectCause::Closed));
    }

    /// Begins nothing more from `deadline` on; the first call counts.
    pub(super) fn end_by(&self, deadline: Instant) {
        let _ = self.until.set(deadline);
    }

    pub(super) fn delete(&self, names: Vec<(Vec<u8>, Ticket)>) {
        self.send(Message::Delete(names));
    }

    /// Removes parts that no head names; what cannot be removed goes with its segment.
    pub(super) fn clean(&self, keys: Vec<ChunkKey>) {
        self.send(Message::Clean(keys));
    }

    /// Removes what is left of an object that has lost parts, if it has, then runs `then` with how
    /// that went.
    pub(super) fn mend(&self, key: ChunkKey, then: Mended) {
        self.send(Message::Mend(key, then));
    }

    /// Ends the thread after what has been sent, and waits for that until `until`.
    ///
    /// # Errors
    /// `TimedOut`: a drive may keep a system call from ever ending, and then the thread.
    pub(super) fn stop(&self, until: Instant) -> error::Result<()> {
        drop(self.send.lock().take());
        let mut thread = self.thread.lock();
        while thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            if Instant::now() >= until {
                return Err(Error::new(ErrorKind::TimedOut, "a drive keeps a removal of objects from ending"));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        drop(thread.take().map(JoinHandle::join));
        Ok(())
    }
}

impl Message {
    fn refuse(self, cause: ObjectCause) {
        match self {
            Self::Delete(names) => names.into_iter().for_each(|(_, ticket)| ticket.no(cause)),
            Self::Mend(_, then) => then(Err(cause)),
            Self::Clean(_) => {}
        }
    }
}

fn run(opening: &Opening, receive: &Receiver<(Instant, Message)>, until: &OnceLock<Instant>) {
    // When a removal has last timed out.
    let mut late: Option<Instant> = None;
    while let Ok((sent, message)) = receive.recv() {
        if until.get().is_some_and(|until| *until <= Instant::now()) {
            message.refuse(ObjectCause::Closed);
            continue;
        }
        if late.is_some_and(|late| sent < late) {
            // It has waited for the drive with that removal, and would only wait once more.
            message.refuse(ObjectCause::TimedOut);
            continue;
        }
        let open = opening.log();
        let log = open.as_ref();
        let end = match message {
            Message::Delete(names) => delete(log, names),
            Message::Clean(keys) => clean(log, &keys),
            Message::Mend(key, then) => {
                let end = log.map_or(Err(ObjectCause::Closed), |log| mend(log, key));
                then(end);
                end
            }
        };
        if end == Err(ObjectCause::TimedOut) {
            late = Some(Instant::now());
        }
    }
}

fn mend(log: &Arc<Log>, key: ChunkKey) -> Result<(), ObjectCause> {
    // Looked up again: this may come after the mending of another put of the key, which has stored
    // it anew.
    let Presence::Broken(version) = presence(log, &key) else { return Ok(()) };
    let mut keys = version.keys();
    keys.insert(0, key);
    log.remove(&keys).map(drop).map_err(|e| {
        tracing::warn!(error = %e, "what is left of an object that lost a part could not be removed");
        ObjectCause::of_transfer(&e)
    })
}

fn clean(log: Option<&Arc<Log>>, keys: &[ChunkKey]) -> Result<(), ObjectCause> {
    let Some(log) = log else { return Err(ObjectCause::Closed) };
    log.remove(keys).map(drop).map_err(|e| {
        tracing::debug!(error = %e, "parts of an unfinished object stay until their segment is reclaimed");
        ObjectCause::of_transfer(&e)
    })
}

fn delete(log: Option<&Arc<Log>>, names: Vec<(Vec<u8>, Ticket)>) -> Result<(), ObjectCause> {
    let Some(log) = log else {
        names.into_iter().for_each(|(_, ticket)| ticket.no(ObjectCause::Closed));
        return Err(ObjectCause::Closed);
    };
    let (mut keys, mut tickets) = (Vec::new(), Vec::new());
    let mut parts = Vec::new();
    for (name, ticket) in names {
        if !is_name(&name) {
            ticket.no(ObjectCause::BadKey);
            continue;
        }
        let key = object_key(&name);
        parts.extend(
            log.peek(&key).and_then(|info| Version::of_info(&key, &info)).map(|v| v.keys()).unwrap_or_default(),
        );
        keys.push(key);
        tickets.push(ticket);
    }
    // Heads first: a get in between finds no object rather than half of one.
    let heads = keys.len();
    keys.extend(parts);
    match log.remove(&keys) {
        Ok(there) => {
            for (ticket, there) in tickets.into_iter().zip(there.into_iter().take(heads)) {
                if there { ticket.answer(KeyResult::yes(0)) } else { ticket.no(ObjectCause::NotFound) }
            }
            Ok(())
        }
        Err(e) => {
            tracing::warn!(error = %e, "objects could not be removed");
            let cause = ObjectCause::of_transfer(&e);
            tickets.into_iter().for_each(|ticket| ticket.no(cause));
            Err(cause)
        }
    }
}
