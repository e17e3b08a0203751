//! The engine's log lines for Python's `logging`.
//!
//! A thread of the engine must never wait for the GIL, so it only puts the line into a queue; a
//! thread in Python (`forebay/_logging.py`) takes lines out and hands them to the logger `forebay`.
//! A full queue drops lines and counts them. A forked child says nothing: that thread is not there.

use std::fmt::{self, Write as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

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

struct Queue {
    tx: Sender<Option<Line>>,
    rx: Receiver<Option<Line>>,
    dropped: AtomicU64,
    /// Python's number of the lowest level that is wanted.
    least: AtomicU8,
    pid: u32,
}

static QUEUE: OnceLock<Queue> = OnceLock::new();

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
        let Some(queue) = QUEUE.get() else { return };
        let level = number(event.metadata().level());
        if level < queue.least.load(Ordering::Relaxed) || std::process::id() != queue.pid {
            return;
        }
        let mut text = Text::default();
        event.record(&mut text);
        let target = event.metadata().target().replace("::", ".");
        let line = Line { level, target, message: text.message + &text.fields };
        if let Err(TrySendError::Full(_)) = queue.tx.try_send(Some(line)) {
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

/// Has lines go to Python from now on, and its thread started; the level is the logger's as it is
/// now.
pub(crate) fn install(py: Python<'_>) -> PyResult<()> {
    if QUEUE.get().is_none() {
        let (tx, rx) = bounded(MOST);
        let (least, pid) = (AtomicU8::new(30), std::process::id());
        let set = QUEUE.set(Queue { tx, rx, dropped: AtomicU64::new(0), least, pid });
        let subscriber = tracing_subscriber::registry().with(Bridge);
        // A program that has set up its own keeps it.
        if set.is_ok() {
            let _ = tracing::subscriber::set_global_default(subscriber);
        }
    }
    py.import("forebay._logging")?.call_method0("start")?;
    Ok(())
}

/// The lowest level wanted, in Python's numbers.
#[pyfunction]
pub(crate) fn _log_level(least: u8) {
    if let Some(queue) = QUEUE.get() {
        queue.least.store(least, Ordering::Relaxed);
    }
}

/// Waits for the next line: (level, target, message); None when it is time to end.
#[pyfunction]
pub(crate) fn _log_next(py: Python<'_>) -> Option<(u8, String, String)> {
    let queue = QUEUE.get()?;
    let line = py.detach(|| queue.rx.recv()).ok()??;
    let dropped = queue.dropped.swap(0, Ordering::Relaxed);
    let more = if dropped > 0 { format!(" ({dropped} lines before this one were dropped)") } else { String::new() };
    Some((line.level, line.target, line.message + &more))
}

/// Asks the thread to end, after the lines that wait.
#[pyfunction]
pub(crate) fn _log_end(py: Python<'_>) {
    if let Some(queue) = QUEUE.get().filter(|q| q.pid == std::process::id()) {
        py.detach(|| drop(queue.tx.send(None)));
    }
}
