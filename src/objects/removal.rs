//! The thread that removes: a removal waits for the drive, which workers must not.
//!
//! Invariants: a deletion is answered with yes only after it is durable; after the deadline of a
//! close nothing more is begun, as each removal may take as long as the drive is waited for; nobody
//! waits for one after the other to time out, nor for one that the drive never ends, as where the
//! kernel keeps a hole waiting for a read that hangs: workers look whether one takes too long.

use std::sync::atomic::{AtomicBool, Ordering};
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
pub(super) type Mended = Box<dyn FnOnce(Result<(), ObjectCause>) + Send>;

enum Message {
    Delete(Vec<(Vec<u8>, Ticket)>),
    Clean(Vec<ChunkKey>),
    Mend(ChunkKey, Mended),
}

/// Answers for a message, with which keys were there.
type Answer = Box<dyn FnOnce(Result<Vec<bool>, ObjectCause>) + Send>;

/// A removal under way.
struct RemovalUnderway {
    began: Instant,
    /// `None` once it is answered.
    answer: Option<Answer>,
}

/// What the thread does, and what it has to do: each message with the time of its sending.
struct Removals {
    receive: Receiver<(Instant, Message)>,
    current: Mutex<Option<RemovalUnderway>>,
    /// When nothing more is begun.
    until: OnceLock<Instant>,
    /// Somebody will look whether a removal takes too long.
    is_watched: AtomicBool,
}

/// The way to the thread.
pub(super) struct RemovalThread {
    send: Mutex<Option<Sender<(Instant, Message)>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    removals: Arc<Removals>,
}

impl RemovalThread {
    pub(super) fn start(opening: Arc<Opening>) -> error::Result<Self> {
        let (send, receive) = crossbeam_channel::unbounded();
        let (current, until, is_watched) = (Mutex::default(), OnceLock::new(), AtomicBool::new(false));
        let removals = Arc::new(Removals { receive, current, until, is_watched });
        let own = Arc::clone(&removals);
        let run = move || run(&opening, &own);
        let spawned = std::thread::Builder::new().name("fb-object-rm".to_owned()).spawn(run);
        let thread = spawned.map_err(|e| Error::io("cannot start a thread of the object store", e))?;
        Ok(Self { send: Mutex::new(Some(send)), thread: Mutex::new(Some(thread)), removals })
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
        let _ = self.removals.until.set(deadline);
    }

    /// Whether the caller is to [`look`](Self::look) some time: nobody else will.
    pub(super) fn wants_watch(&self) -> bool {
        !self.removals.is_watched.swap(true, Ordering::AcqRel)
    }

    /// Answers for a removal that has taken `most`, and for what waits behind it; whether to look
    /// again some time.
    pub(super) fn look(&self, most: Duration) -> bool {
        let Removals { receive, current, is_watched, .. } = &*self.removals;
        let mut under_way = current.lock();
        let is_late = under_way.as_ref().is_some_and(|removal| removal.began.elapsed() >= most);
        let answer = under_way.as_mut().filter(|_| is_late).and_then(|removal| removal.answer.take());
        let is_busy = under_way.is_some();
        drop(under_way);
        if let Some(answer) = answer {
            tracing::warn!("a drive keeps a removal of objects from ending: what waits for it is answered");
            answer(Err(ObjectCause::TimedOut));
        }
        if is_late {
            receive.try_iter().for_each(|(_, message)| message.refuse(ObjectCause::TimedOut));
        }
        if is_busy || !receive.is_empty() {
            return true;
        }
        is_watched.store(false, Ordering::Release);
        // What was sent just before that saw it watched.
        !receive.is_empty() && self.wants_watch()
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

impl Removals {
    /// Removes keys, and has whoever waits for it answered, here or by whom that takes too long.
    fn remove(&self, log: &Arc<Log>, keys: &[ChunkKey], answer: Answer) -> Result<(), ObjectCause> {
        *self.current.lock() = Some(RemovalUnderway { began: Instant::now(), answer: Some(answer) });
        let removed = log.remove(keys).map_err(|e| {
            tracing::warn!(error = %e, "objects, or what is left of them, could not be removed");
            ObjectCause::of_transfer(&e)
        });
        let end = removed.as_ref().map(drop).map_err(|cause| *cause);
        let under_way = self.current.lock().take();
        if let Some(answer) = under_way.and_then(|removal| removal.answer) {
            answer(removed);
        }
        end
    }
}

fn run(opening: &Opening, removals: &Removals) {
    // When a removal has last timed out.
    let mut late: Option<Instant> = None;
    while let Ok((sent, message)) = removals.receive.recv() {
        if removals.until.get().is_some_and(|until| *until <= Instant::now()) {
            message.refuse(ObjectCause::Closed);
            continue;
        }
        if late.is_some_and(|late| sent < late) {
            // It has waited for the drive with that removal, and would only wait once more.
            message.refuse(ObjectCause::TimedOut);
            continue;
        }
        let Some(log) = opening.log() else {
            message.refuse(ObjectCause::Closed);
            continue;
        };
        let end = match message {
            Message::Delete(names) => delete(removals, &log, names),
            Message::Clean(keys) => removals.remove(&log, &keys, Box::new(drop)),
            Message::Mend(key, then) => mend(removals, &log, key, then),
        };
        if end == Err(ObjectCause::TimedOut) {
            late = Some(Instant::now());
        }
    }
}

fn mend(removals: &Removals, log: &Arc<Log>, key: ChunkKey, then: Mended) -> Result<(), ObjectCause> {
    // Looked up again: this may come after the mending of another put of the key, which has stored
    // it anew.
    let Presence::Broken(version) = presence(log, &key) else {
        then(Ok(()));
        return Ok(());
    };
    let mut keys = version.keys();
    keys.insert(0, key);
    removals.remove(log, &keys, Box::new(move |removed| then(removed.map(drop))))
}

fn delete(removals: &Removals, log: &Arc<Log>, names: Vec<(Vec<u8>, Ticket)>) -> Result<(), ObjectCause> {
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
    keys.extend(parts);
    let answer = move |removed: Result<Vec<bool>, ObjectCause>| match removed {
        // Those of the parts come after them.
        Ok(there) => {
            for (ticket, there) in tickets.into_iter().zip(there) {
                if there { ticket.answer(KeyResult::yes(0)) } else { ticket.no(ObjectCause::NotFound) }
            }
        }
        Err(cause) => tickets.into_iter().for_each(|ticket| ticket.no(cause)),
    };
    removals.remove(log, &keys, Box::new(answer))
}
