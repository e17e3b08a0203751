//! Whether the remote store is worth asking: after several failures in a row it is left alone for a
//! while, longer each time, then one request tries it again.

use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Failures in a row after which it is left alone.
const MOST_FAILURES: u32 = 5;
/// How long it is left alone: the first time, and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// A request that its caller gives up after this long counts as failed, unless anything has come
/// from the store meanwhile: callers may wait for a shorter time than the time-out.
const SLOW: Duration = Duration::from_secs(1);

/// The state of one remote store.
#[derive(Debug, Default)]
pub(super) struct Breaker(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    failures: u32,
    /// Until when it is left alone, and how long that is in all.
    pause: Option<(Instant, Duration)>,
    /// A request is trying whether it works again.
    trying: bool,
    /// When something came from it last.
    heard: Option<Instant>,
}

/// A request that was admitted. Its end decides about the next ones.
#[derive(Debug)]
pub(super) struct Admitted<'a> {
    breaker: &'a Breaker,
    since: Instant,
    /// It tries whether the store works again. Others were admitted before it was left alone.
    is_trial: bool,
    ended: bool,
}

impl Breaker {
    /// Admits one request, where the store is worth asking.
    pub(super) fn admit(&self) -> Option<Admitted<'_>> {
        let mut state = self.0.lock();
        let is_trial = state.pause.is_some();
        if let Some((until, _)) = state.pause {
            if state.trying || Instant::now() < until {
                return None;
            }
            state.trying = true;
        }
        Some(Admitted { breaker: self, since: Instant::now(), is_trial, ended: false })
    }

    /// Notes that bytes have come, of an answer that is not complete.
    pub(super) fn heard(&self) {
        self.0.lock().heard = Some(Instant::now());
    }

    /// Whether all requests are admitted.
    pub(super) fn is_closed(&self) -> bool {
        self.0.lock().pause.is_none()
    }

    fn worked(&self) {
        if self.0.lock().worked() {
            tracing::info!("the remote tier answers again");
        }
    }

    fn failed(&self, is_trial: bool, why: &dyn fmt::Display) {
        let pause = self.0.lock().failed(is_trial);
        if let Some(pause) = pause {
            tracing::warn!(error = %why, pause_s = pause.as_secs_f64(), "the remote tier fails and is left alone for a while");
        }
    }
}

impl State {
    /// Notes an answer; whether the store had been left alone before it.
    fn worked(&mut self) -> bool {
        let was_paused = self.pause.is_some();
        *self = Self { heard: Some(Instant::now()), ..Self::default() };
        was_paused
    }

    /// Notes a failure; where the store is left alone from now on, for how long.
    fn failed(&mut self, is_trial: bool) -> Option<Duration> {
        self.failures += 1;
        let next = match self.pause {
            Some((_, before)) if is_trial => before.saturating_mul(2).min(LONGEST_PAUSE),
            None if self.failures >= MOST_FAILURES => FIRST_PAUSE,
            // Too few failures; or the request was admitted before the pause began.
            _ => return None,
        };
        self.trying = false;
        self.pause = Some((Instant::now() + next, next));
        Some(next)
    }
}

impl Admitted<'_> {
    /// It was answered, even if the answer is that there is no such object.
    pub(super) fn worked(mut self) {
        self.ended = true;
        self.breaker.worked();
    }

    /// It was not answered, or with an error.
    pub(super) fn failed(mut self, why: &dyn fmt::Display) {
        self.ended = true;
        self.breaker.failed(self.is_trial, why);
    }
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let has_heard = self.breaker.0.lock().heard.is_some_and(|at| at > self.since);
        if !has_heard && self.since.elapsed() >= SLOW {
            return self.breaker.failed(self.is_trial, &"it did not answer before its caller gave up");
        }
        if self.is_trial {
            self.breaker.0.lock().trying = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_after_failures_in_a_row_and_an_answer_closes_it() {
        let breaker = Breaker::default();
        for _ in 1..MOST_FAILURES {
            breaker.admit().unwrap().failed(&"test");
        }
        breaker.admit().unwrap().worked();
        for _ in 0..MOST_FAILURES {
            assert!(breaker.is_closed());
            breaker.admit().unwrap().failed(&"test");
        }
        assert!(!breaker.is_closed() && breaker.admit().is_none());
        let past = |state: &mut State| state.pause = state.pause.map(|(_, pause)| (Instant::now(), pause));
        past(&mut breaker.0.lock());
        let trial = breaker.admit().unwrap();
        assert!(breaker.admit().is_none(), "one tries, the others wait for what comes of it");
        drop(trial);
        breaker.admit().unwrap().failed(&"test");
        assert_eq!(breaker.0.lock().pause.map(|(_, pause)| pause), Some(FIRST_PAUSE * 2));
        past(&mut breaker.0.lock());
        breaker.admit().unwrap().worked();
        assert!(breaker.is_closed() && breaker.admit().is_some());
    }

    #[test]
    fn what_is_given_up_counts_as_failed_unless_something_has_come_meanwhile() {
        let breaker = Breaker::default();
        let slow = |breaker: &Breaker, heard: bool| {
            let mut request = breaker.admit().unwrap();
            request.since = Instant::now().checked_sub(SLOW).unwrap();
            if heard {
                breaker.heard();
            }
            drop(request);
        };
        for _ in 0..2 * MOST_FAILURES {
            slow(&breaker, true);
        }
        assert!(breaker.is_closed(), "the store is slow, and works");
        breaker.0.lock().heard = None;
        for _ in 0..MOST_FAILURES {
            assert!(breaker.is_closed());
            slow(&breaker, false);
        }
        assert!(!breaker.is_closed());
    }

    #[test]
    fn what_was_admitted_before_the_pause_is_not_taken_for_the_trial() {
        let breaker = Breaker::default();
        let (one, other) = (breaker.admit().unwrap(), breaker.admit().unwrap());
        for _ in 0..MOST_FAILURES {
            breaker.admit().unwrap().failed(&"test");
        }
        let pause = || breaker.0.lock().pause.map(|(_, pause)| pause);
        breaker.0.lock().pause = Some((Instant::now(), FIRST_PAUSE));
        let trial = breaker.admit().unwrap();
        one.failed(&"test");
        assert_eq!(pause(), Some(FIRST_PAUSE), "it says nothing new");
        drop(other);
        assert!(breaker.admit().is_none(), "the trial goes on");
        trial.failed(&"test");
        assert_eq!(pause(), Some(FIRST_PAUSE * 2));
    }
}
