//! Pins the frames for an accelerator, piece by piece on a thread of its own: for a large memory it
//! takes a minute. Copies of frames that are not pinned yet work too, and are slower.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crate::device::SharedRegion;
use crate::error::{Error, Result};
use crate::io::{MemRegion, Mover};

/// Bytes of a piece, about. Closing the tier waits until the current piece is pinned. No copy may
/// cross from one to the next, so pieces consist of whole frames.
const PIECE_BYTES: usize = 1 << 30;

/// The thread that pins; ends when this is dropped.
#[derive(Debug)]
pub(super) struct Pinning {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    pid: u32,
}

impl Pinning {
    /// Pins the frames of `frame_bytes` bytes in `region`, as long as it lives.
    pub(super) fn start(region: &Arc<SharedRegion>, frame_bytes: usize, mover: &Arc<dyn Mover>) -> Result<Self> {
        let is_over = Arc::new(AtomicBool::new(false));
        let (over, region, mover) = (Arc::clone(&is_over), Arc::clone(region), Arc::clone(mover));
        let piece_bytes = (PIECE_BYTES / frame_bytes).max(1) * frame_bytes;
        let pin = move || {
            let pieces = (0..region.len()).step_by(piece_bytes).map(|at| at..region.len().min(at + piece_bytes));
            for piece in pieces.take_while(|_| !over.load(Ordering::Acquire)) {
                if let Err(error) = region.pin(&piece, &*mover) {
                    tracing::warn!(
                        %error, bytes = region.len(), pinned = piece.start,
                        "the memory tier could not be pinned for the GPU; copies from it are slower (raise RLIMIT_MEMLOCK)"
                    );
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("forebay-pin".to_owned())
            .spawn(pin)
            .map_err(|e| Error::io("cannot start the thread that pins the memory tier", e))?;
        Ok(Self { is_over, thread: Some(thread), pid: std::process::id() })
    }
}

impl Drop for Pinning {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        // A forked child has no such thread.
        if std::process::id() == self.pid
            && let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that pins the memory tier has panicked");
        }
    }
}
