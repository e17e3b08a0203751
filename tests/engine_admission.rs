//! What is not admitted is skipped, said so, and not waited for; when it comes again it is stored.
#![expect(clippy::unwrap_used, reason = "tests")]

mod engine_world;

use engine_world::{CHUNK, World, load, matched, prompt, slots, store, tokens};
use forebay::config::{Admission, Capacity};
use forebay::engine::{Computed, ShedCause, StoreRequest};
use forebay::key::Extra;

#[test]
fn second_touch_skips_the_first_store_and_takes_the_second() {
    let mut w = World::plain();
    w.settings.admission = Admission::SecondTouch;
    let engine = w.open();
    let n = 3 * CHUNK;
    let (p, kv) = (prompt(&engine, n, 1), w.kv().filled(1));
    let first = store(&engine, &p, &kv, slots(n, 1));
    assert_eq!((first.stored, &first.sheds[..]), (0, &[(ShedCause::Policy, 3)][..]), "{first:?}");
    assert_eq!(matched(&engine, &p), 0);
    let second = store(&engine, &p, &kv, slots(n, 1));
    assert_eq!((second.stored, &second.sheds[..]), (3, &[][..]), "{second:?}");
    assert_eq!(load(&engine, &p, &w.kv(), slots(n, 2)).tokens, n);
    let third = store(&engine, &p, &kv, slots(n, 1));
    assert_eq!((third.stored, third.already_there), (0, 3), "{third:?}");
    let text = engine.metrics_text().unwrap();
    assert!(text.contains("forebay_shed_chunks_total{cause=\"policy\"} 3"), "{text}");
    assert!(text.contains("forebay_admission_names 3"), "{text}");
    let stats = engine.stats().unwrap();
    assert_eq!(stats.shed(ShedCause::Policy), 3);
}

#[test]
fn what_was_generated_reaches_the_policy() {
    let mut w = World::plain();
    (w.settings.admission, w.settings.admission_loss) = (Admission::Adaptive, 0.3);
    let engine = w.open();
    let (kv, target) = (w.kv().filled(1), w.kv());
    let mut stored = [0; 2];
    for round in 0..600u32 {
        for (at, generated) in [1, 500].into_iter().enumerate() {
            let p = prompt(&engine, CHUNK, 10 + 2 * round + at as u32);
            let computed = Some(Computed::Now);
            let request = StoreRequest::new(&p, &kv.kv, slots(CHUNK, 1));
            let result = engine.store(StoreRequest { generated: Some(generated), computed, ..request }).unwrap().wait();
            stored[at] += if round < 400 { 0 } else { result.stored };
            // All prompts of one kind come back, none of the other.
            if generated == 500 {
                assert_eq!(load(&engine, &p, &target, slots(CHUNK, 2)).tokens, result.stored * CHUNK);
            }
        }
    }
    assert_eq!(stored, [0, 200]);
}

#[test]
fn a_prompt_that_is_stored_piece_by_piece_is_one_offer() {
    let mut w = World::plain();
    w.settings.admission = Admission::SecondTouch;
    let engine = w.open();
    let n = 4 * CHUNK;
    let (p, kv) = (prompt(&engine, n, 1), w.kv().filled(1));
    for stored in [0, 1] {
        for piece in 0..4 {
            let mut mapping = slots(n, 1);
            mapping.truncate((piece + 1) * CHUNK);
            mapping.iter_mut().take(piece * CHUNK).for_each(|slot| *slot = -1);
            let result = store(&engine, &p, &kv, mapping);
            assert_eq!(result.stored, stored, "piece {piece}: {result:?}");
        }
    }
    assert_eq!(matched(&engine, &p), n);
}

#[test]
fn beyond_the_write_budget_nothing_is_stored_and_everything_served() {
    let mut w = World::plain();
    (w.settings.write_budget_dwpd, w.settings.drive_bytes) = (Some(0.001), Some(16 << 20));
    let engine = w.open();
    let (p, kv) = (prompt(&engine, CHUNK, 1), w.kv().filled(1));
    let result = store(&engine, &p, &kv, slots(CHUNK, 1));
    assert_eq!((result.stored, &result.sheds[..]), (0, &[(ShedCause::Budget, 1)][..]), "{result:?}");
    engine.close(std::time::Instant::now() + std::time::Duration::from_secs(20)).unwrap();
    w.settings.write_budget_dwpd = None;
    let engine = w.open();
    assert_eq!(store(&engine, &p, &kv, slots(CHUNK, 1)).stored, 1);
    engine.close(std::time::Instant::now() + std::time::Duration::from_secs(20)).unwrap();
    w.settings.write_budget_dwpd = Some(0.001);
    let engine = w.open();
    assert_eq!(load(&engine, &p, &w.kv(), slots(CHUNK, 2)).tokens, CHUNK);
}

#[test]
fn a_tenant_beyond_its_quota_gives_up_its_own_and_another_keeps_all() {
    let mut w = World::plain();
    w.settings.tenant_quota = Some(Capacity::Bytes(16 << 20));
    w.settings.capacity = Capacity::Bytes(512 << 20);
    let engine = w.open();
    let n = 4 * CHUNK;
    let of = |salt: &str, seed: u32| engine.prompt(&tokens(n, seed), &Extra::salted(salt));
    let kv = w.kv().filled(1);
    let keep = of("quiet", 1);
    assert_eq!(store(&engine, &keep, &kv, slots(n, 1)).stored, 4);
    let mut stored = 0;
    for seed in 2..1000 {
        stored += store(&engine, &of("loud", seed), &kv, slots(n, 1)).stored;
        if engine.stats().unwrap().log.quota_evicted > 0 {
            break;
        }
    }
    let stats = engine.stats().unwrap();
    assert!(stored > 0 && stats.log.quota_evicted > 0, "{stats:?}");
    assert_eq!(load(&engine, &keep, &w.kv(), slots(n, 2)).tokens, n);
    assert!(engine.metrics_text().unwrap().contains("forebay_quota_evicted_chunks_total"));
}
