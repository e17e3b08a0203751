//! The engine's log lines for Python's `logging`.
//!
//! A thread of the engine must never wait for the GIL, so it only puts the line into a queue; a
//! thread in Python (`forebay/_logging.py`) takes lines out and hands them to the logger `forebay`.
//! A full queue drops lines and counts them. That thread also frees the objects that threads of the
//! engine have dropped, which must not take the GIL. A forked child, in which that thread is not,
//! says nothing before it opens something itself.
#![expect(unsafe_code, reason = "a pointer to a queue that is never freed; a fork may hold any lock")]

use std::fmt::{self, Write as _};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, Ordering};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

/// Lines that the queue holds at most.
const MOST: usize = 1024;

/// A line of the log.
struct Line {
    level: u8,
    target: String,
    message: String,
}

/// What Python's thread is to do.
enum Task {
    Log(Line),
    /// Takes the GIL, with which PyO3 frees what was dropped without it.
    Release,
    End,
}

struct Queue {
    tx: Sender<Task>,
    rx: Receiver<Task>,
    dropped: AtomicU64,
    /// A `Release` is in the queue, or the queue was full; the thread's next turn does either way.
    releasing: AtomicBool,
    /// Python's number of the lowest level that is wanted.
    least: AtomicU8,
    pid: u32,
}

/// The queue that was made last. One that a fork has left behind is not used again: a thread of the
/// parent may have been inside it.
static QUEUE: AtomicPtr<Queue> = AtomicPtr::new(ptr::null_mut());

/// The queue of this process.
fn queue() -> Option<&'static Queue> {
    // SAFETY: a queue that is here was leaked, so nobody frees it.
    let queue = unsafe { QUEUE.load(Ordering::Acquire).as_ref() }?;
    (queue.pid == std::process::id()).then_some(queue)
}

const fn number(level: &Level) -> u8 {
    match *level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

struct Bridge;

impl<S: Subscriber> Layer<S> for Bridge {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let Some(queue) = queue() else { return };
        let level = number(event.metadata().level());
        if level < queue.least.load(Ordering::Relaxed) {
            return;
        }
        let mut text = Text::default();
        event.record(&mut text);
        // What this crate says goes to a child of the logger `forebay`, too.
        let target = event.metadata().target().replacen("forebay_python", "forebay", 1).replace("::", ".");
        let line = Line { level, target, message: text.message + &text.fields };
        if let Err(TrySendError::Full(_)) = queue.tx.try_send(Task::Log(line)) {
            queue.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            write!(self.fields, " {}={value:?}", field.name())
        };
    }
}

/// Has objects freed that this thread, which is none of Python's, has dropped.
pub(crate) fn release() {
    if let Some(queue) = queue()
        && !queue.releasing.swap(true, Ordering::SeqCst)
    {
        let _ = queue.tx.try_send(Task::Release);
    }
}

/// Has lines go to Python from now on, and its thread started; the level is the logger's as it is
/// now.
pub(crate) fn install(py: Python<'_>) -> PyResult<()> {
    if queue().is_none() {
        let (tx, rx) = bounded(MOST);
        let (least, pid) = (AtomicU8::new(30), std::process::id());
        let (dropped, releasing) = (AtomicU64::new(0), AtomicBool::new(false));
        let made = Box::new(Queue { tx, rx, dropped, releasing, least, pid });
        QUEUE.store(Box::leak(made), Ordering::Release);
        // A program that has set up its own keeps it, and so does a forked child.
        let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry().with(Bridge));
    }
    py.import("forebay._logging")?.call_method0("start")?;
    Ok(())
}

/// The lowest level wanted, in Python's numbers.
#[pyfunction]
pub(crate) fn _log_level(least: u8) {
    if let Some(queue) = queue() {
        queue.least.store(least, Ordering::Relaxed);
    }
}

/// Waits for the next line: (level, target, message); None when it is time to end.
#[pyfunction]
pub(crate) fn _log_next(py: Python<'_>) -> Option<(u8, String, String)> {
    let queue = queue()?;
    let line = loop {
        let task = py.detach(|| {
            let task = queue.rx.recv();
            // Before the GIL is taken: what is dropped from now on asks again.
            queue.releasing.store(false, Ordering::SeqCst);
            task
        });
        match task.ok()? {
            Task::Log(line) => break line,
            Task::Release => {}
            Task::End => return None,
        }
    };
    let dropped = queue.dropped.swap(0, Ordering::Relaxed);
    let more = if dropped > 0 { format!(" ({dropped} lines before this one were dropped)") } else { String::new() };
    Some((line.level, line.target, line.message + &more))
}

/// Asks the thread to end, after the lines that wait.
#[pyfunction]
pub(crate) fn _log_end(py: Python<'_>) {
    if let Some(queue) = queue() {
        py.detach(|| drop(queue.tx.send(Task::End)));
    }
}
