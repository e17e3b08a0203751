//! A log that may not be open yet: what cannot be opened is tried again in the background, unless
//! the settings want an error.
//!
//! A cache that cannot be opened must not stop a server: whoever holds an [`Opening`] goes on
//! without a log until there is one.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};

use super::Log;
use crate::config::OnOpenFailure;
use crate::error::{Error, ErrorKind, Result};

/// Opens the log; called again as long as it fails.
pub type OpenLog = Box<dyn Fn() -> Result<Arc<Log>> + Send>;

/// A log that is open, will be, or has been.
#[derive(Default)]
pub struct Opening {
    log: RwLock<Option<Arc<Log>>>,
    why_disabled: Mutex<Option<Error>>,
    closed: AtomicBool,
    stopped: Mutex<bool>,
    changed: Condvar,
}

impl Opening {
    /// Opens the log with `open`. Where that fails it is tried again every `every`, unless
    /// `on_failure` is `Fail`.
    ///
    /// # Errors
    /// That of `open` where `on_failure` is `Fail` or the caller is at fault; what the operating
    /// system says of the thread.
    pub fn start(open: OpenLog, on_failure: OnOpenFailure, every: Duration) -> Result<Arc<Self>> {
        let opening = Arc::new(Self::default());
        match open() {
            Ok(log) => opening.opened(log),
            Err(e) if on_failure == OnOpenFailure::Fail || is_callers_fault(&e) => return Err(e),
            Err(e) => {
                opening.failed(e);
                opening.try_again(open, every)?;
            }
        }
        Ok(opening)
    }

    fn try_again(self: &Arc<Self>, open: OpenLog, every: Duration) -> Result<()> {
        let weak = Arc::downgrade(self);
        let run = move || {
            while let Some(opening) = weak.upgrade() {
                if opening.wait(every) {
                    return;
                }
                match open() {
                    Ok(log) => return opening.opened(log),
                    Err(e) => opening.failed(e),
                }
            }
        };
        let thread = std::thread::Builder::new().name("forebay-reopen".to_owned()).spawn(run);
        thread.map(drop).map_err(|e| Error::io("cannot start the thread that opens the cache", e))
    }

    fn opened(&self, log: Arc<Log>) {
        let mut open = self.log.write();
        if !self.closed.load(Ordering::Acquire) {
            *self.why_disabled.lock() = None;
            *open = Some(log);
            return;
        }
        drop(open);
        if let Err(e) = log.close(Instant::now()) {
            tracing::warn!(error = %e, "a cache that was opened too late was not closed cleanly");
        }
    }

    fn failed(&self, error: Error) {
        tracing::warn!(error = %error, "the cache is disabled: everything misses until it can be opened");
        *self.why_disabled.lock() = Some(error);
    }

    /// Waits for `time`, or until [`stop_trying`](Self::stop_trying); whether that was called.
    fn wait(&self, time: Duration) -> bool {
        let mut stopped = self.stopped.lock();
        let _ = self.changed.wait_while_for(&mut stopped, |stopped| !*stopped, time);
        *stopped
    }

    /// The log, while it is open.
    #[must_use]
    pub fn log(&self) -> Option<Arc<Log>> {
        self.log.read().clone()
    }

    /// Why there is no log yet, in words.
    #[must_use]
    pub fn why_disabled(&self) -> Option<String> {
        self.why_disabled.lock().as_ref().map(ToString::to_string)
    }

    /// Ends the tries in the background.
    pub fn stop_trying(&self) {
        *self.stopped.lock() = true;
        self.changed.notify_all();
    }

    /// Hides the log from now on, and closes it.
    ///
    /// # Errors
    /// As [`Log::close`].
    pub fn close(&self, deadline: Instant) -> Result<()> {
        self.stop_trying();
        let mut open = self.log.write();
        self.closed.store(true, Ordering::Release);
        // Taken out, so that files and mappings are closed with the last user of the log, and the
        // file system can be unmounted.
        let log = open.take();
        drop(open);
        log.map_or(Ok(()), |log| log.close(deadline))
    }
}

/// A wrong call or setting is an error; a broken cache is not. What is wrong with a place on a
/// drive may be put right there, and what the operating system lacks may be there later.
fn is_callers_fault(error: &Error) -> bool {
    match error.kind() {
        ErrorKind::InvalidInput => true,
        ErrorKind::Internal => std::error::Error::source(error).is_none(),
        ErrorKind::Config => error.path().is_none(),
        _ => false,
    }
}

impl fmt::Debug for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opening").field("open", &self.log().is_some()).finish_non_exhaustive()
    }
}
