//! Threads on which the context is current.

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use super::context::Context;
use crate::error::{Error, ErrorKind, Result};

/// Starts a thread that runs `run` with the context current.
///
/// # Errors
/// What the operating system says of a new thread, and the driver of the context.
pub(super) fn spawn(
    context: &Arc<Context>,
    name: String,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    let context = Arc::clone(context);
    let (tx, rx) = crossbeam_channel::bounded(1);
    let bound = move || {
        let bound = context.bind();
        // `spawn` waits for this.
        let _ = tx.send(bound);
        drop((context, tx));
        if bound.is_ok() {
            run();
        }
    };
    let handle =
        thread::Builder::new().name(name).spawn(bound).map_err(|e| Error::io("cannot start a GPU thread", e))?;
    let answer = rx.recv().map_err(|_| Error::new(ErrorKind::Internal, "a GPU thread panicked"));
    match answer.and_then(|bound| Ok(bound?)) {
        Ok(()) => Ok(handle),
        Err(e) => {
            // The thread ends at once; nothing of it must be left when a GPU is opened again.
            let _ = handle.join();
            Err(e)
        }
    }
}
