//! Loads in the background: the same bytes again and again, at a rate, on a thread of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay::{Error, ErrorKind, Result};

use crate::bench::{Bench, Move};

/// A running feed.
pub(crate) struct Feed {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<f64>>,
}

impl Feed {
    pub(crate) fn start(bench: Bench, bytes_per_s: f64) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let run = move || {
            let (start, mut moved) = (Instant::now(), 0u64);
            while !stopped.load(Ordering::Acquire) {
                bench.run(Move::PinnedToPaged)?;
                moved += bench.bytes();
                if bytes_per_s > 0.0 {
                    let due = Duration::from_secs_f64(moved as f64 / bytes_per_s);
                    std::thread::sleep(due.saturating_sub(start.elapsed()));
                }
            }
            Ok(moved as f64 / start.elapsed().as_secs_f64().max(1e-9))
        };
        let thread = std::thread::Builder::new()
            .name("forebay-feed".to_owned())
            .spawn(run)
            .map_err(|e| Error::io("cannot start the feed", e))?;
        Ok(Self { stop, thread })
    }

    /// Ends it; returns the bytes per second that it moved.
    pub(crate) fn stop(self) -> Result<f64> {
        self.stop.store(true, Ordering::Release);
        self.thread.join().unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "the feed panicked")))
    }
}
