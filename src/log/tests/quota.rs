//! Quotas of tenants: the bound, and that only the tenant's own chunks are evicted for it.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use super::support::*;
use crate::error::ErrorKind;
use crate::format::record::KeyKind;
use crate::geometry::Shard;
use crate::log::{Log, LogOptions, PutOutcome, PutSpec, Refusal};

const QUOTA: u64 = 2 << 20;
const OURS: u64 = 77;
const THEIRS: u64 = 78;

fn limited(dir: &Path, policy: crate::index::Reclaim) -> LogOptions {
    LogOptions { tenant_bytes: Some(QUOTA), policy, ..options(dir) }
}

fn of_tenant(n: u64, tenant: u64) -> PutSpec {
    PutSpec { tenant, ..spec(n) }
}

/// Bytes that the chunks of each tenant take.
fn taken(log: &Log) -> HashMap<u64, u64> {
    let mut taken = HashMap::new();
    log.for_each(|info| *taken.entry(info.tenant).or_default() += info.slot_bytes);
    taken
}

fn fill(log: &Log, keys: std::ops::Range<u64>, tenant: u64) {
    for n in keys.clone() {
        let begun = std::time::Instant::now();
        let stored = store_spec(log, of_tenant(n, tenant), n, 0).unwrap();
        assert!(stored, "key {n} after {:?}: {:?}", begun.elapsed(), log.stats());
        let is_looked_at = tenant != 0 && (n % 8 == 0 || n + 1 == keys.end);
        let taken = if is_looked_at { taken(log).get(&tenant).copied().unwrap_or(0) } else { 0 };
        assert!(taken <= QUOTA, "tenant {tenant} takes {taken} after key {n}");
    }
}

fn held(log: &Log, keys: std::ops::Range<u64>) -> Vec<u64> {
    keys.filter(|n| has(log, *n)).collect()
}

/// The keys that are held when the maintenance thread has nothing more to evict.
fn settled(log: &Log, keys: std::ops::Range<u64>) -> Vec<u64> {
    at_rest(log);
    held(log, keys)
}

/// Loads chunks that were held a moment ago; how many were evicted since.
fn all_load(log: &Log, keys: &[u64]) -> usize {
    let is_gone = |n: &&u64| match load_key(log, &key(**n)) {
        Ok(layers) => {
            layers.iter().enumerate().for_each(|(i, b)| assert_eq!(*b, payload(**n, 0, i, b.len()), "key {n}"));
            false
        }
        Err(e) if e.kind() == ErrorKind::NotFound => true,
        Err(e) => panic!("key {n}: {e}"),
    };
    keys.iter().filter(is_gone).count()
}

#[test]
fn a_tenant_stays_within_its_quota_and_gives_up_its_own_least_recently_used() {
    for policy in [crate::index::Reclaim::Prefix, crate::index::Reclaim::Lru, crate::index::Reclaim::Fifo] {
        let dir = temp();
        let log = Log::open(limited(dir.path(), policy)).unwrap();
        fill(&log, 5000..5100, THEIRS);
        fill(&log, 6000..6400, 0);
        let mut again = 0;
        for from in (0..1000).step_by(20) {
            fill(&log, from..from + 20, OURS);
            let used: Vec<_> = (0..4).map(key).collect();
            // On a busy machine the maintenance thread may see a use late; then a server stores the
            // chunk again.
            for n in (0..4).skip(log.lookup(&used)) {
                again += u64::from(store_spec(&log, of_tenant(n, OURS), n, 0).unwrap());
            }
        }
        assert!(again < 20, "{policy:?}: {again} chunks went that were in use in each of 50 rounds");
        let stats = log.stats();
        assert!(stats.quota_evicted >= 1000 - QUOTA / SLOT_BYTES, "{policy:?}: {stats:?}");
        log.flush().unwrap();
        let ours = settled(&log, 0..1000);
        assert!(ours.len() as u64 * SLOT_BYTES > QUOTA * 8 / 10, "{policy:?}: only {} chunks are left", ours.len());
        assert!((990..1000).all(|n| ours.contains(&n)), "{policy:?}: the newest went");
        assert_eq!(held(&log, 5000..5100).len() + held(&log, 6000..6400).len(), 500, "{policy:?}: others paid for it");
        // The maintenance thread may just have evicted more, which a crash may bring back. Nothing
        // else may be lost.
        let ours: Vec<u64> = ours.into_iter().filter(|n| has(&log, *n)).collect();
        let log = crash(log);
        let after = held(&log, 0..1000);
        // What is evicted meanwhile, to make room for the tenant's next puts, is counted.
        let lost: Vec<&u64> = ours.iter().filter(|n| !after.contains(n)).collect();
        let gone = lost.len() + all_load(&log, &after);
        assert!(gone as u64 <= log.stats().quota_evicted, "{policy:?}: {gone}, {lost:?}, {:?}", log.stats());
        assert_eq!(all_load(&log, &held(&log, 5000..6400)), 0, "{policy:?}: others paid for it");
        fill(&log, 1000..1100, OURS);
    }
}

#[test]
fn a_quota_that_is_lowered_is_kept_from_the_next_opening_on() {
    let dir = temp();
    let log = Log::open(limited(dir.path(), crate::index::Reclaim::Prefix)).unwrap();
    fill(&log, 0..170, OURS);
    log.close(soon()).unwrap();
    drop(log);
    let log =
        Log::open(LogOptions { tenant_bytes: Some(QUOTA / 4), ..limited(dir.path(), crate::index::Reclaim::Prefix) })
            .unwrap();
    assert!(store_spec(&log, of_tenant(900, OURS), 900, 0).unwrap(), "room is made for it");
    let taken = taken(&log)[&OURS];
    assert!(taken <= QUOTA / 4, "{taken}");
    let gone = all_load(&log, &held(&log, 0..1000));
    assert!(gone as u64 <= log.stats().quota_evicted, "{gone}, {:?}", log.stats());
}

#[test]
fn what_cannot_go_is_not_made_room_for() {
    let dir = temp();
    let with = LogOptions { segment_bytes: Some(4 << 20), ..limited(dir.path(), crate::index::Reclaim::Prefix) };
    let log = Log::open(with).unwrap();
    // All of it lies in the open segment, from which nothing can be evicted.
    let fits = QUOTA / SLOT_BYTES;
    fill(&log, 0..fits, OURS);
    assert!(matches!(log.begin_put(of_tenant(fits, OURS)).unwrap(), PutOutcome::NotAdmitted(Refusal::Quota, _)));
    assert!(matches!(log.begin_put(of_tenant(3, OURS)).unwrap(), PutOutcome::AlreadyThere), "what is there is found");
    fill(&log, 1000..1010, THEIRS);
    let mut object = of_tenant(2000, OURS);
    object.key_kind = KeyKind::Object;
    assert!(matches!(log.begin_put(object).unwrap(), PutOutcome::Started(_)), "objects are a tenant of their own");
    // The segment is closed and sealed for it; then what lies in it can be given up.
    let until = soon();
    while !store_spec(&log, of_tenant(fits, OURS), fits, 0).unwrap() {
        assert!(std::time::Instant::now() < until, "a tenant that fills no segment stores nothing any more");
        std::thread::yield_now();
    }
    // The maintenance thread may still be making room.
    let chunks = taken(&log)[&OURS] / SLOT_BYTES;
    let removed = log.remove_tenant(OURS).unwrap();
    assert!(removed <= chunks && removed + 8 > chunks, "{removed} of {chunks}");
    assert!(!taken(&log).contains_key(&OURS));
    fill(&log, 3000..3000 + fits, OURS);
}

#[test]
fn puts_that_are_under_way_count_and_those_that_end_badly_do_not() {
    let dir = temp();
    let log = Log::open(limited(dir.path(), crate::index::Reclaim::Prefix)).unwrap();
    let fits = QUOTA / SLOT_BYTES;
    let mut begun = Vec::new();
    for n in 0..fits {
        begun.extend(begin(&log, of_tenant(n, OURS)).unwrap());
    }
    assert_eq!(begun.len() as u64, fits);
    assert!(matches!(log.begin_put(of_tenant(fits, OURS)).unwrap(), PutOutcome::NotAdmitted(Refusal::Quota, _)));
    drop(begun);
    fill(&log, 0..fits, OURS);
}

#[test]
fn processes_on_one_cache_see_what_the_others_store() {
    let dir = temp();
    let logs = [
        Log::open(limited(dir.path(), crate::index::Reclaim::Prefix)).unwrap(),
        Log::open(limited(dir.path(), crate::index::Reclaim::Prefix)).unwrap(),
    ];
    for n in 0..400 {
        for (i, log) in logs.iter().enumerate() {
            let n = n + 1000 * i as u64;
            // It may have to wait, where the other process takes all of the quota: that one evicts
            // chunks after its next count.
            let mut tries = 0;
            while !store_spec(log, of_tenant(n, OURS), n, 0).unwrap() {
                tries += 1;
                assert!(tries < 20, "key {n} finds no room");
            }
        }
    }
    logs.iter().for_each(|log| log.flush().unwrap());
    // Until both have counted once more and evicted the excess.
    let deadline = soon();
    while taken(&logs[0])[&OURS] > QUOTA {
        assert!(std::time::Instant::now() < deadline, "{:?}", taken(&logs[0]));
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    // They may still be giving up some.
    let loads = |n: &u64| load_key(&logs[1], &key(*n)).is_ok_and(|l| l[0] == payload(*n, 0, 0, l[0].len()));
    let there: Vec<u64> = held(&logs[0], 0..1400).into_iter().filter(loads).collect();
    assert!(there.iter().any(|n| *n < 400) && there.iter().any(|n| *n >= 1000), "{there:?}");
    assert!(there.len() as u64 * SLOT_BYTES > QUOTA / 4, "{there:?}");
}

#[test]
fn what_a_process_stored_that_died_makes_room_too() {
    let dir = temp();
    let scanning = || {
        let every = std::time::Duration::from_millis(20);
        Log::open(LogOptions { scan_interval: every, ..limited(dir.path(), crate::index::Reclaim::Lru) }).unwrap()
    };
    let older = scanning();
    fill(&older, 0..QUOTA / SLOT_BYTES, OURS);
    older.seal(soon()).unwrap();
    let log = scanning();
    older.abandon();
    drop(older);
    let deadline = soon();
    while log.stats().adopted_lanes == 0 {
        assert!(std::time::Instant::now() < deadline, "the lane is not adopted");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    // They fill less than a segment, so none of them can go for the next ones.
    fill(&log, 1000..1020, OURS);
    assert_eq!(held(&log, 1000..1020).len(), 20);
}

#[test]
fn ranks_in_one_directory_share_a_quota() {
    let dir = temp();
    let rank = |n| {
        let shard = Shard { tp: (n, 2), ..Shard::default() };
        let geometry = Arc::new((*geometry()).clone().with_shard(shard).unwrap());
        Log::open(LogOptions { geometry, ..limited(dir.path(), crate::index::Reclaim::Prefix) }).unwrap()
    };
    // The first one alone has all of it, until the other comes.
    let ranks = [rank(0), rank(1)];
    let limits = || ranks.each_ref().map(|log| log.volumes[0].quota.as_ref().unwrap().limit());
    let by = soon();
    while limits() != [QUOTA / 2; 2] {
        assert!(std::time::Instant::now() < by, "{:?}", limits());
        std::thread::yield_now();
    }
    for log in &ranks {
        fill(log, 0..200, OURS);
        assert!(taken(log)[&OURS] <= QUOTA / 2);
    }
}
