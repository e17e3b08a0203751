//! What is not stored: what the policy refuses, and what the write budget does not allow.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::support::*;
use crate::index::AdmissionPolicy;
use crate::key::ChunkKey;
use crate::log::{Clock, DriveOptions, Log, LogOptions, PutOutcome, Refusal, StoreCandidate, SystemClock};

const HOUR_NS: u64 = 3_600_000_000_000;

/// A boot clock that the test sets.
struct Boot(AtomicU64);

impl Clock for Boot {
    fn unix_ms(&self) -> u64 {
        SystemClock.unix_ms()
    }

    fn boot_ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

fn run(keys: std::ops::Range<u64>) -> Vec<StoreCandidate> {
    let candidate = |n: u64| StoreCandidate {
        key: key(n),
        parent: key(n.wrapping_sub(1)),
        tokens: CHUNK_TOKENS,
        depth: 0,
        generated: None,
    };
    keys.map(candidate).collect()
}

#[test]
fn the_policy_is_asked_by_admit_alone_and_what_it_refuses_is_counted() {
    let dir = temp();
    let log = Log::open(LogOptions { admission: AdmissionPolicy::SecondTouch, ..options(dir.path()) }).unwrap();
    assert_eq!(log.admit(&run(10..14)), 0);
    assert_eq!(log.admit(&run(10..16)), 4);
    let stats = log.stats();
    assert_eq!(stats.admission_names, 6);
    assert_eq!(stats.policy_refused_bytes, 6 * geometry().chunk_bytes(CHUNK_TOKENS as usize) as u64);
    assert!(store(&log, 15), "who must store does not ask");
    let log = reopen(log);
    assert_eq!(log.admit(&run(10..14)), 0, "a restart forgets the names");
    assert!(has(&log, 15));
}

#[test]
fn without_a_policy_everything_is_admitted_and_nothing_remembered() {
    let dir = temp();
    let log = open(dir.path());
    assert_eq!(log.admit(&run(0..1000)), 1000);
    log.note_used(&[key(1)]);
    assert_eq!((log.stats().admission_names, log.stats().policy_refused_bytes), (0, 0));
}

#[test]
fn what_loads_use_counts_for_the_policy() {
    for uses in [0, 2] {
        let dir = temp();
        let admission = AdmissionPolicy::Adaptive { loss: 1.0 };
        let log = Log::open(LogOptions { admission, ..options(dir.path()) }).unwrap();
        let mut refused = 0;
        for n in 0..2000 {
            let one = [StoreCandidate { parent: ChunkKey([0; 32]), ..run(n..n + 1)[0] }];
            refused += 1 - log.admit(&one);
            // Every fourth chunk is used again. If most were, nothing would be refused.
            (0..uses).filter(|_| n.is_multiple_of(4)).for_each(|_| log.note_used(&[key(n)]));
        }
        assert_eq!(refused > 1000, uses > 0, "without hits there is nothing to lose a share of: {refused}");
    }
}

#[test]
fn puts_beyond_the_write_budget_wait_for_the_clock_and_nothing_else_does() {
    let dir = temp();
    let clock = Arc::new(Boot(AtomicU64::new(HOUR_NS)));
    // A hundred slots in an hour.
    let drives = vec![DriveOptions { drive_bytes: Some(24 * 100 * SLOT_BYTES), ..DriveOptions::default() }];
    let clock_too: Arc<dyn Clock> = Arc::clone(&clock) as _;
    let with = LogOptions { write_budget_dwpd: Some(1.0), drives, clock: clock_too, ..options(dir.path()) };
    let log = Log::open(with).unwrap();
    let stored = (0..1000).take_while(|n| store(&log, *n)).count() as u64;
    assert!((20..=100).contains(&stored), "the journal has its share: {stored}");
    assert!(matches!(log.begin_put(spec(5000)).unwrap(), PutOutcome::NotAdmitted(Refusal::Budget, _)));
    let stats = log.stats();
    assert_eq!(stats.budget_refused_bytes, 2 * SLOT_BYTES);
    let wear = stats.drives[0].wear;
    assert!(wear.written_bytes >= stored * SLOT_BYTES && wear.dwpd_life > 1.0, "{wear:?}");
    assert!((0..stored).all(|n| has(&log, n)), "reads go on");
    assert!(matches!(log.begin_put(spec(0)).unwrap(), PutOutcome::AlreadyThere));
    clock.0.store(2 * HOUR_NS, Ordering::Relaxed);
    let more = (2000..3000).take_while(|n| store(&log, *n)).count() as u64;
    assert!((20..=100).contains(&more), "{more}");
    // After a longer time there is room in the budget again.
    clock.0.store(30 * HOUR_NS, Ordering::Relaxed);
    assert!(log.begin_put_within(spec(4000), PATIENCE).is_ok());
}
