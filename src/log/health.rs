//! Whether a drive takes puts: after errors in a row it is left alone for a while, then tried again.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::error::{ErrorKind, Result};

/// Errors in a row after which a drive takes no puts.
const LIMIT: u32 = 4;

/// One drive's health.
#[derive(Debug)]
pub(super) struct Health {
    state: Mutex<(u32, Option<Instant>)>,
    pause: Duration,
}

impl Health {
    pub(super) fn new(pause: Duration) -> Self {
        Self { state: Mutex::new((0, None)), pause }
    }

    pub(super) fn note(&self, result: &Result<()>) {
        match result {
            Ok(()) => *self.state.lock() = (0, None),
            Err(e) => self.note_error(e.kind()),
        }
    }

    /// Counts an error if it is one of the drive's.
    pub(super) fn note_error(&self, kind: ErrorKind) {
        if !matches!(kind, ErrorKind::Io | ErrorKind::ShortIo | ErrorKind::TimedOut) {
            return;
        }
        let mut state = self.state.lock();
        state.0 = state.0.saturating_add(1);
        if state.0 >= LIMIT {
            state.1 = Some(Instant::now() + self.pause);
        }
    }

    /// Whether it takes puts. Once the pause is over, the next error begins another one.
    pub(super) fn is_good(&self) -> bool {
        self.state.lock().1.is_none_or(|until| Instant::now() >= until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_drive_pauses_after_errors_in_a_row_and_comes_back() {
        let health = Health::new(Duration::from_secs(3600));
        let io = || Err(Error::new(ErrorKind::Io, "broken"));
        for _ in 0..LIMIT - 1 {
            health.note(&io());
        }
        health.note(&Ok(()));
        health.note(&io());
        assert!(health.is_good(), "not in a row");
        for _ in 0..LIMIT {
            health.note_error(ErrorKind::NoSpace);
        }
        assert!(health.is_good(), "a full drive is not broken");
        for _ in 0..LIMIT {
            health.note(&io());
        }
        assert!(!health.is_good());
        let health = Health::new(Duration::ZERO);
        for _ in 0..LIMIT {
            health.note(&io());
        }
        assert!(health.is_good(), "the pause is over");
    }
}
