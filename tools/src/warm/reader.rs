//! Reads dumps with many reads in flight and bounded memory, and hands the pieces over in order.
//!
//! A thread of its own runs the reads: on tokio-uring where the kernel allows it, else on a pool of
//! threads. Pieces of a dump arrive in the order of their tokens and dumps in the order given, so
//! that a chunk's parents are stored before it. Invariant: the bytes being read stay within the
//! budget (one piece is always allowed); a dump that fails is reported once and none of its pieces
//! follows.

mod backend;

use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded};
use forebay::{Error, Result};

use super::dump::{DumpInfo, KvShape};
use super::piece::Piece;
use super::sink::{Scope, Sink};
use backend::{Backend, Task, Threads, Uring};

/// How dumps are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadOptions {
    /// Pieces in flight.
    pub(crate) jobs: usize,
    /// Bytes in flight.
    pub(crate) budget_bytes: u64,
    /// How K and V share vLLM's tensors.
    pub(crate) shape: KvShape,
    /// Never use `io_uring`.
    pub(crate) threads_only: bool,
}

/// What the reader reports, in order.
#[derive(Debug)]
pub(crate) enum Event {
    /// The dump's pieces follow; so many of its tokens are already in the cache.
    Begin {
        /// The dump.
        dump: Arc<DumpInfo>,
        /// Tokens that the cache has, where one was looked into.
        present: Option<usize>,
    },
    /// Some of its tokens.
    Piece(Piece),
    /// The dump cannot be read (further).
    Failed {
        /// Where it is.
        path: PathBuf,
        /// Why.
        error: Error,
    },
}

/// A running reader; iterate over its events.
pub(crate) struct Reader {
    events: Receiver<Event>,
    thread: Option<JoinHandle<()>>,
    backend: &'static str,
}

impl Reader {
    /// Starts to read `paths`; `sink` says what is needed of each.
    ///
    /// # Errors
    /// What starting a thread reports.
    pub(crate) fn start(paths: Vec<PathBuf>, sink: Arc<dyn Sink>, options: ReadOptions) -> Result<Self> {
        let (send, events) = bounded(1);
        let (ready, started) = bounded(1);
        let thread = std::thread::Builder::new()
            .name("warm-read".to_owned())
            .spawn(move || {
                let uring = if options.threads_only { None } else { Uring::open() };
                let run = Run { options, sink: &*sink, events: &send };
                match uring {
                    Some(uring) => {
                        let _ = ready.send(Uring::NAME);
                        run.all(uring, paths);
                    }
                    None => {
                        let _ = ready.send(Threads::NAME);
                        run.all(Threads::open(options.jobs), paths);
                    }
                }
            })
            .map_err(|e| Error::io("cannot start a reading thread", e))?;
        let backend = started.recv().unwrap_or(Threads::NAME);
        Ok(Self { events, thread: Some(thread), backend })
    }

    /// What reads: `tokio-uring` or `threads`.
    pub(crate) fn backend(&self) -> &'static str {
        self.backend
    }
}

impl Iterator for &Reader {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.events.recv().ok()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // The thread ends at its next event once nobody listens.
        let (_, nobody) = bounded(0);
        self.events = nobody;
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// The listener is gone.
struct Gone;

struct Run<'a> {
    options: ReadOptions,
    sink: &'a dyn Sink,
    events: &'a Sender<Event>,
}

/// What is handed over in order: an event, or a piece that is being read.
enum Slot<H> {
    Event(Event),
    Reading { handle: H, task: Arc<Task>, bytes: u64 },
}

struct Queue<B: Backend> {
    slots: VecDeque<Slot<B::Handle>>,
    reading: usize,
    bytes: u64,
    failed: Option<PathBuf>,
}

impl Run<'_> {
    fn all<B: Backend>(&self, mut backend: B, paths: Vec<PathBuf>) {
        let mut queue = Queue::<B> { slots: VecDeque::new(), reading: 0, bytes: 0, failed: None };
        for path in paths {
            if self.dump(&mut backend, &mut queue, path).is_err() {
                break;
            }
        }
        while !queue.slots.is_empty() {
            if self.emit_first(&mut backend, &mut queue).is_err() {
                // Reads that are in flight must end before their buffers and files go.
                while let Some(slot) = queue.slots.pop_front() {
                    if let Slot::Reading { handle, .. } = slot {
                        drop(backend.finish(handle));
                    }
                }
            }
        }
    }

    fn dump<B: Backend>(&self, backend: &mut B, queue: &mut Queue<B>, path: PathBuf) -> Result<(), Gone> {
        let opened = DumpInfo::open(&path, self.options.shape)
            .and_then(|dump| self.sink.missing(&dump).map(|missing| (Arc::new(dump), missing)))
            .and_then(|(dump, missing)| Ok((backend.open(&dump)?, dump, missing)));
        let (files, dump, missing) = match opened {
            Ok(opened) => opened,
            Err(error) => return self.push(backend, queue, Slot::Event(Event::Failed { path, error })),
        };
        let wanted: usize = missing.iter().map(ExactSizeIterator::len).sum();
        let present = self.sink.has_cache().then(|| dump.tokens.len().saturating_sub(wanted));
        let read = match self.sink.scope() {
            Scope::Missing => missing,
            Scope::All => std::iter::once(0..dump.tokens.len()).collect(),
            Scope::Headers => Vec::new(),
        };
        self.push(backend, queue, Slot::Event(Event::Begin { dump: Arc::clone(&dump), present }))?;
        for tokens in read.into_iter().flat_map(|range| cut(range, self.sink.chunk_tokens())) {
            if queue.failed.as_ref() == Some(&path) {
                break;
            }
            let bytes = dump.range_bytes(tokens.len());
            while queue.reading > 0
                && (queue.reading >= self.options.jobs || queue.bytes + bytes > self.options.budget_bytes)
            {
                self.emit_first(backend, queue)?;
            }
            let task = Arc::new(Task { dump: Arc::clone(&dump), tokens });
            let handle = backend.begin(&files, Arc::clone(&task));
            queue.reading += 1;
            queue.bytes += bytes;
            queue.slots.push_back(Slot::Reading { handle, task, bytes });
        }
        Ok(())
    }

    fn push<B: Backend>(&self, backend: &mut B, queue: &mut Queue<B>, slot: Slot<B::Handle>) -> Result<(), Gone> {
        queue.slots.push_back(slot);
        while queue.slots.len() > self.options.jobs.max(1) {
            self.emit_first(backend, queue)?;
        }
        Ok(())
    }

    /// Waits for the oldest slot and hands it over.
    fn emit_first<B: Backend>(&self, backend: &mut B, queue: &mut Queue<B>) -> Result<(), Gone> {
        let event = match queue.slots.pop_front() {
            None => return Ok(()),
            Some(Slot::Event(event)) => event,
            Some(Slot::Reading { handle, task, bytes }) => {
                let result = backend.finish(handle);
                queue.reading -= 1;
                queue.bytes -= bytes;
                let path = &task.dump.path;
                if queue.failed.as_ref() == Some(path) {
                    return Ok(());
                }
                match result {
                    Ok(layers) => {
                        Event::Piece(Piece { dump: Arc::clone(&task.dump), tokens: task.tokens.clone(), layers })
                    }
                    Err(error) => {
                        queue.failed = Some(path.clone());
                        Event::Failed { path: path.clone(), error }
                    }
                }
            }
        };
        self.events.send(event).map_err(|_| Gone)
    }
}

/// Cuts a range of tokens at multiples of `chunk`.
fn cut(range: Range<usize>, chunk: usize) -> impl Iterator<Item = Range<usize>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let end = (at / chunk + 1).saturating_mul(chunk).min(range.end);
        let piece = (at < range.end).then_some(at..end);
        at = end;
        piece
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn ranges_are_cut_at_chunks() {
        let cut = |r, n| super::cut(r, n).collect::<Vec<_>>();
        assert_eq!(cut(0..10, 4), [0..4, 4..8, 8..10]);
        assert_eq!(cut(4..8, 4), vec![4..8]);
        assert!(cut(5..5, 4).is_empty());
    }
}
