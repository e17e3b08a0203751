//! Whether a drive is to be used: after errors in a row it is left alone for a while, then tried
//! again. Each drive has one of these for its puts and one for its reads.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::error::{ErrorKind, Result};

/// Errors in a row after which a drive is left alone.
const LIMIT: u32 = 4;
/// Errors further apart than this, and than four pauses, are not in a row, even if no success was
/// reported between them. A load is given up after two time-outs, and a pause lasts one.
const ROW: Duration = Duration::from_secs(120);

/// One drive's health.
#[derive(Debug)]
pub(in crate::log) struct DriveHealth {
    state: Mutex<HealthState>,
    pause: Duration,
}

#[derive(Debug, Default)]
struct HealthState {
    errors: u32,
    last: Option<Instant>,
    alone_until: Option<Instant>,
}

impl DriveHealth {
    pub(in crate::log) fn new(pause: Duration) -> Self {
        Self { state: Mutex::default(), pause }
    }

    pub(in crate::log) fn note(&self, result: &Result<()>) {
        match result {
            Ok(()) => {
                let mut state = self.state.lock();
                if state.errors > 0 {
                    *state = HealthState::default();
                }
            }
            Err(e) => self.note_error(e.kind()),
        }
    }

    /// Counts an error if it is one of the drive's.
    pub(in crate::log) fn note_error(&self, kind: ErrorKind) {
        if !matches!(kind, ErrorKind::Io | ErrorKind::ShortIo | ErrorKind::TimedOut) {
            return;
        }
        let (now, mut state) = (Instant::now(), self.state.lock());
        let begins = state.last.is_none_or(|last| now.duration_since(last) > ROW.max(self.pause * 4));
        state.errors = if begins { 1 } else { state.errors.saturating_add(1) };
        state.last = Some(now);
        if state.errors >= LIMIT {
            state.alone_until = Some(now + self.pause);
        }
    }

    /// Whether it may be used. Once the pause is over, one more error in the row begins another.
    pub(in crate::log) fn is_good(&self) -> bool {
        self.state.lock().alone_until.is_none_or(|until| Instant::now() >= until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_drive_pauses_after_errors_in_a_row_and_comes_back() {
        let health = DriveHealth::new(Duration::from_secs(3600));
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
        let health = DriveHealth::new(Duration::ZERO);
        for _ in 0..LIMIT {
            health.note(&io());
        }
        assert!(health.is_good(), "the pause is over");
    }
}
