//! Lookups, answers, allocations.

use std::time::Duration;

use super::*;
use crate::geometry::{DType, Geometry, LayerSpec};

#[test]
fn the_last_token_is_left_to_compute_and_loads_are_whole_blocks_of_every_group() {
    let mut s = side(1000);
    s.on_new_request("a", 64);
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(60));
    s.on_new_request("b", 65);
    assert_eq!(s.get_num_new_matched_tokens("b", 0), Some(64));
    s.on_new_request("c", 4);
    assert_eq!(s.get_num_new_matched_tokens("c", 0), Some(0));
    let mut s = side_with(1000, |o| (o.block_tokens, o.chunk_tokens) = (vec![4, 6], 48));
    s.on_new_request("a", 64);
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(60), "whole blocks of 4 and of 6");
    assert_eq!(s.get_num_new_matched_tokens("a", 48), Some(12));
    s.on_new_request("b", 60);
    assert_eq!(s.get_num_new_matched_tokens("b", 48), Some(0));
}

#[test]
fn an_answer_is_repeatable_and_holds_nothing() {
    let mut s = side(48);
    s.on_new_request("a", 100);
    for _ in 0..1000 {
        assert_eq!(s.get_num_new_matched_tokens("a", 16), Some(32));
    }
    assert!(s.lookup.asked() < 100, "{} lookups", s.lookup.asked());
    assert!(s.idle().is_empty(), "an answer alone loads nothing");
    assert!(!s.s.request_finished("a", None));
    assert_eq!((s.stats().requests, s.stats().loads), (0, 0));
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(0), "it is gone");
}

#[test]
fn a_load_goes_to_the_workers_once_with_its_blocks_and_tokens() {
    let mut s = side(40);
    s.on_new_request("a", 100);
    assert_eq!(s.s.get_num_new_matched_tokens("a", 8), Matched { tokens: Some(32), asynchronous: true });
    s.update_state_after_alloc("a", 12, 32);
    let meta = s.idle();
    assert_eq!(loaded(&meta), [(8, 40)]);
    let load = &meta.loads[0];
    assert_eq!(load.spans, [BlockSpan { first: 2, ids: (3..=10).collect() }]);
    assert_eq!((load.prompt.start, load.prompt.tokens.len()), (0, 48), "to the end of the chunk that it ends in");
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(0), "nothing more while it is under way");
    s.update_state_after_alloc("a", 12, 0);
    assert!(s.idle().is_empty());
    s.received("a");
    let meta = s.first("a", (40, 100));
    assert_eq!(saved(&meta), [(32, 96)], "from the chunk on that was not whole");
    assert_eq!((meta.saves[0].prompt.start, meta.saves[0].prompt.tokens.len()), (48, 48));
}

#[test]
fn dropped_and_wrong_allocations_load_nothing() {
    let mut s = side(48);
    s.on_new_request("a", 100);
    s.get_num_new_matched_tokens("a", 0);
    s.update_state_after_alloc("a", 12, 0);
    assert!(s.s.update_state_after_alloc("a", &[blocks(12)], 16).is_err(), "the answer was dropped");
    s.get_num_new_matched_tokens("a", 0);
    assert!(s.s.update_state_after_alloc("a", &[blocks(12)], 52).is_err(), "more than was offered");
    s.get_num_new_matched_tokens("a", 0);
    assert!(s.s.update_state_after_alloc("a", &[blocks(11)], 48).is_err(), "too few blocks");
    s.get_num_new_matched_tokens("a", 0);
    s.preempt("a");
    assert!(s.s.update_state_after_alloc("a", &[blocks(12)], 48).is_err(), "preempted between answer and allocation");
    assert!(s.idle().is_empty());
    s.s.update_state_after_alloc("unknown", &[], 5).unwrap();
}

#[test]
fn the_same_chunks_are_loaded_once_and_nobody_waits_for_ever() {
    let mut s = side_with(48, |o| o.load_timeout_ms = 60_000);
    s.on_new_request("a", 100);
    s.on_new_request("b", 90);
    s.get_num_new_matched_tokens("a", 0);
    s.update_state_after_alloc("a", 12, 48);
    assert_eq!(s.get_num_new_matched_tokens("b", 0), None, "also before the step");
    s.idle();
    assert_eq!(s.s.get_num_new_matched_tokens("b", 0), Matched { tokens: None, asynchronous: true });
    assert_eq!(s.get_num_new_matched_tokens("b", 48), Some(0));
    s.received("a");
    assert_eq!(s.get_num_new_matched_tokens("b", 16), Some(32), "the load is over");
    assert!(s.stats().joined > 1);

    // Nobody waits for longer than a load may take.
    let mut s = side_with(48, |o| o.load_timeout_ms = 30);
    s.on_new_request("b", 90);
    s.on_new_request("c", 100);
    s.get_num_new_matched_tokens("c", 0);
    s.update_state_after_alloc("c", 12, 48);
    let begun = std::time::Instant::now();
    while s.get_num_new_matched_tokens("b", 0).is_none() {
        assert!(begun.elapsed().as_secs() < 60, "waits for ever");
        std::thread::yield_now();
    }
}

#[test]
fn an_aborted_load_frees_those_that_wait_for_it() {
    let mut s = side(48);
    s.on_new_request("a", 100);
    s.on_new_request("b", 100);
    s.get_num_new_matched_tokens("a", 0);
    s.update_state_after_alloc("a", 12, 48);
    s.idle();
    assert_eq!(s.get_num_new_matched_tokens("b", 0), None);
    assert!(s.s.request_finished("a", None), "blocks stay until the load is reported as over");
    assert_eq!(s.get_num_new_matched_tokens("b", 0), Some(48));
    assert!(s.idle().held.is_empty(), "it is reported as received, not as sent");
    s.s.build_connector_meta(&StepInput { finished: vec!["a"], ..StepInput::default() }, &mut |_, _, _| None);
    s.received("a");
}

#[test]
fn a_request_whose_load_failed_is_never_offered_one_again_and_stores_anew() {
    let mut s = side(48);
    s.on_new_request("a", 100);
    s.get_num_new_matched_tokens("a", 0);
    s.update_state_after_alloc("a", 12, 48);
    s.idle();
    s.failed("a");
    s.failed("a");
    assert_eq!(s.stats().failed_loads, 1);
    assert_eq!(s.get_num_new_matched_tokens("a", 16), Some(0));
    s.lookup.say(Some(0));
    let meta = s.first("a", (16, 100));
    assert_eq!(saved(&meta), [(0, 96)]);
    assert_eq!(meta.saves[0].epoch, 1);
    s.preempt("a");
    s.lookup.say(Some(96));
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(0), "not after preemption either");
}

#[test]
fn roles_and_flags_say_who_loads_and_who_stores() {
    let run = |role, skip_save, skip_load| {
        let mut s = side_with(48, |o| o.role = role);
        let extra = Extra::default();
        s.s.on_new_request(AddRequest { skip_save, skip_load, ..AddRequest::new("a", &tokens(100), &extra) });
        (s.get_num_new_matched_tokens("a", 0), saved(&s.first("a", (0, 100))).len())
    };
    assert_eq!(run(Role::Both, false, false), (Some(48), 1));
    assert_eq!(run(Role::Producer, false, false), (Some(0), 1));
    assert_eq!(run(Role::Consumer, false, false), (Some(48), 0));
    assert_eq!(run(Role::Both, true, false), (Some(48), 0));
    assert_eq!(run(Role::Both, false, true), (Some(0), 1));
    for role in [Role::Both, Role::Producer, Role::Consumer] {
        assert_eq!(role.as_str().parse::<Role>().unwrap(), role);
    }
    assert_eq!("both".parse::<Role>().unwrap_err().kind(), ErrorKind::Config);
}

#[test]
fn lookups_that_do_not_know_or_fail_are_no_hits() {
    let mut s = side(48);
    s.on_new_request("a", 100);
    s.lookup.say(None);
    assert_eq!(s.get_num_new_matched_tokens("a", 0), None);
    s.lookup.say(Some(usize::MAX));
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(0));
    assert_eq!(s.stats().lookup_errors, 1);
}

#[test]
fn loads_that_are_not_worth_it_are_not_offered() {
    let mut s = side_with(48, |o| o.min_load_tokens = 33);
    s.on_new_request("a", 100);
    assert_eq!((s.get_num_new_matched_tokens("a", 0), s.get_num_new_matched_tokens("a", 16)), (Some(48), Some(0)));
    let mut s = side_with(48, |o| o.recompute_tokens_per_s = Some(1000.0));
    let report = |tokens| WorkerMeta { loaded_tokens: tokens, load_s: 1.0, ..WorkerMeta::default() };
    s.on_new_request("a", 100);
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(48), "nothing measured yet");
    s.s.update_connector_output(&StepOutput { workers: vec![report(500)], ..StepOutput::default() });
    let offered = (0..32).filter(|_| s.get_num_new_matched_tokens("a", 0) == Some(48)).count();
    assert_eq!(offered, 2, "one of 16, to measure again");
    (0..40).for_each(|_| {
        s.s.update_connector_output(&StepOutput { workers: vec![report(5000)], ..StepOutput::default() });
    });
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(48));
}

#[test]
fn loads_that_are_measured_to_be_slower_than_computing_are_not_offered() {
    let mut s = side(48);
    s.lookup.say(Some(0));
    let mut step = |name: &str, load_s: f64| {
        s.lookup.say(Some(0));
        s.on_new_request(name, 100);
        let new = vec![NewRequest { req_id: name, blocks: vec![blocks(25)], num_computed: 0, num_scheduled: 100 }];
        let input = StepInput { new, num_scheduled: 100, ..StepInput::default() };
        let meta = s.s.build_connector_meta(&input, &mut |_, _, _| None);
        let report = WorkerMeta { loaded_step: meta.step, loaded_tokens: 1, load_s, ..WorkerMeta::default() };
        s.s.update_connector_output(&StepOutput { workers: vec![report], ..StepOutput::default() });
        s.s.request_finished(name, None);
        s.lookup.say(Some(48));
        s.on_new_request(&format!("{name} again"), 100);
        s.get_num_new_matched_tokens(&format!("{name} again"), 0)
    };
    // A token an hour: any machine computes faster.
    let offered: Vec<_> = (0..32).map(|n| step(&n.to_string(), 3600.0)).collect();
    assert!(offered[..14].iter().all(|tokens| *tokens == Some(48)), "not measured often enough: {offered:?}");
    assert_eq!(offered[14..].iter().filter(|tokens| **tokens == Some(48)).count(), 1, "one of 16: {offered:?}");
    let fast: Vec<_> = (0..8).map(|n| step(&format!("fast {n}"), 1e-12)).collect();
    assert_eq!(fast[7], Some(48), "{fast:?}");
}

#[test]
fn a_load_from_the_memory_of_all_ranks_is_decided_by_the_rate_of_memory() {
    let mut s = side_with(48, |o| (o.recompute_tokens_per_s, o.workers) = (Some(1000.0), 2));
    let say = |s: &mut Side, report| {
        s.s.update_connector_output(&StepOutput { workers: vec![report], ..StepOutput::default() });
    };
    let slow = WorkerMeta { loaded_tokens: 500, load_s: 1.0, ..WorkerMeta::default() };
    say(&mut s, WorkerMeta { memory_tokens: 5000, memory_s: 1.0, ..slow });
    s.on_new_request("a", 100);
    let offered = |s: &mut Side| (0..32).filter(|_| s.get_num_new_matched_tokens("a", 0) == Some(48)).count();
    assert_eq!(offered(&mut s), 2, "from drives, one of 16");
    let keys = Prompt::new(&tokens(100), CHUNK as u32, &Extra::default()).keys().to_vec();
    let memory = |rank, chunks: std::ops::Range<usize>, there| {
        let memory = keys[chunks].iter().map(|key| (key.0, there)).collect();
        WorkerMeta { rank, memory, ..WorkerMeta::default() }
    };
    say(&mut s, memory(0, 0..4, true));
    say(&mut s, memory(1, 0..1, true));
    assert_eq!(offered(&mut s), 2, "a rank reads two chunks");
    say(&mut s, memory(1, 1..3, true));
    assert_eq!(offered(&mut s), 32);
    assert_eq!(s.get_num_new_matched_tokens("a", 16), Some(32));
    say(&mut s, memory(0, 1..3, false));
    assert_eq!(offered(&mut s), 2, "two chunks have left it");
    say(&mut s, memory(0, 1..3, true));
    let anew = Some(WorkerIdentity::of(
        &Geometry::new("m", DType::named("uint8").unwrap(), vec![LayerSpec::opaque(4, 64)], CHUNK as u32).unwrap(),
        None,
    ));
    say(&mut s, WorkerMeta { identity: anew, ..memory(1, 0..1, true) });
    assert_eq!(offered(&mut s), 2, "a worker that started anew has what it says since");
}

#[test]
fn of_a_load_that_does_not_pay_as_a_whole_the_beginning_that_pays_is_offered() {
    let mut s = side_with(96, |o| (o.recompute_tokens_per_s, o.join_loads) = (Some(1000.0), false));
    let keys = Prompt::new(&tokens(100), CHUNK as u32, &Extra::default()).keys().to_vec();
    let rates =
        WorkerMeta { loaded_tokens: 100, load_s: 1.0, memory_tokens: 5000, memory_s: 1.0, ..WorkerMeta::default() };
    let memory = [0, 1, 3].map(|at: usize| (keys[at].0, true)).to_vec();
    s.s.update_connector_output(&StepOutput { workers: vec![WorkerMeta { memory, ..rates }], ..StepOutput::default() });
    s.on_new_request("a", 100);
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(32), "two chunks, and not the one after the gap");
    s.update_state_after_alloc("a", 25, 32);
    assert_eq!(loaded(&s.idle()), [(0, 32)]);
    s.received("a");
    let meta = s.first("a", (32, 100));
    assert_eq!(saved(&meta), [], "what is computed anew is there, and not stored again");
    s.on_new_request("b", 100);
    assert_eq!(s.get_num_new_matched_tokens("b", 20), Some(12), "beyond what the server has");
    assert_eq!((s.stats().cut_short, s.stats().slower_than_computing), (2, 0));
    assert_eq!(s.get_num_new_matched_tokens("b", 32), Some(0), "what is left begins on a drive");
    assert_eq!((s.stats().cut_short, s.stats().slower_than_computing), (2, 1));
    s.on_new_request("c", 100);
    let offered: Vec<_> = (0..32).map(|_| s.get_num_new_matched_tokens("c", 0)).collect();
    assert_eq!(offered.iter().filter(|tokens| **tokens == Some(96)).count(), 2, "one of 16, to measure again");
    assert_eq!(offered.iter().filter(|tokens| **tokens == Some(32)).count(), 30);
}

#[test]
fn layerwise_loads_run_within_their_step() {
    let mut s = side_with(48, |o| o.layerwise = true);
    s.on_new_request("a", 100);
    assert_eq!(s.s.get_num_new_matched_tokens("a", 0), Matched { tokens: Some(48), asynchronous: false });
    s.update_state_after_alloc("a", 25, 48);
    let meta = s.first("a", (48, 100));
    assert!(!meta.loads[0].asynchronous);
    assert_eq!(saved(&meta), [(48, 96)]);
    assert_eq!(s.get_num_new_matched_tokens("b", 0), Some(0), "unknown, and nothing of the load is left to wait for");
    let mut s = side_with(48, |o| (o.layerwise, o.workers) = (true, 2));
    s.on_new_request("a", 100);
    s.get_num_new_matched_tokens("a", 0);
    s.update_state_after_alloc("a", 25, 48);
    assert_eq!(saved(&s.first("a", (48, 100))), [], "another worker's part may fail");
    assert!(s.s.looks_at(8, 1) && s.s.looks_at(24, 1), "what was put off is looked at again, wherever it is");
    assert_eq!(saved(&s.next("a", (100, 101), (&[99], 0))), [], "a server that runs ahead does not know yet");
    s.loaded(0, 1);
    assert_eq!((s.s.verified_step(), saved(&s.next("a", (101, 102), (&[], 0)))), (0, vec![]), "one of two workers");
    s.loaded(1, 1);
    assert_eq!((s.s.verified_step(), saved(&s.next("a", (102, 103), (&[], 0)))), (1, vec![(48, 96)]));
}

#[test]
fn what_was_computed_from_a_load_that_is_not_verified_is_not_stored_at_the_end() {
    for verified in [true, false] {
        let mut s =
            side_with(48, |o| (o.layerwise, o.store_when, o.max_held_blocks) = (true, StoreWhen::Finished, 1000));
        s.on_new_request("a", 100);
        s.get_num_new_matched_tokens("a", 0);
        s.update_state_after_alloc("a", 25, 48);
        s.first("a", (48, 100));
        if verified {
            s.loaded(0, 1);
        }
        s.s.request_finished("a", None);
        assert_eq!(saved(&s.idle()).len(), usize::from(verified));
    }
}

#[test]
fn a_request_that_was_loaded_within_a_step_keeps_its_blocks_for_its_stores() {
    // Workers do not report the end of such a load. A server that waited for that report would not
    // keep the blocks for the stores.
    let mut s = side_with(48, |o| o.layerwise = true);
    s.on_new_request("a", 100);
    s.get_num_new_matched_tokens("a", 0);
    s.update_state_after_alloc("a", 25, 48);
    assert!(!s.s.is_loading("a"));
    assert_eq!(saved(&s.first("a", (48, 100))), [(48, 96)]);
    assert!(!s.s.is_loading("a"));
    assert!(s.s.request_finished("a", None), "its store may not be gathered");
    let mut s = side(48);
    s.on_new_request("a", 100);
    assert_eq!((s.get_num_new_matched_tokens("a", 0), s.s.is_loading("a")), (Some(48), false), "only asked");
    s.update_state_after_alloc("a", 25, 48);
    assert!(s.s.is_loading("a"));
    s.idle();
    assert!(s.s.is_loading("a"), "under way");
    s.received("a");
    assert!(!s.s.is_loading("a") && !s.s.is_loading("unknown"));
}

#[test]
fn loads_that_would_hold_a_step_up_for_too_long_run_before_it() {
    let mut s = side_with(64, |o| (o.layerwise, o.join_loads) = (true, false));
    let ask = |s: &mut Side, name: &str| {
        let matched = s.s.get_num_new_matched_tokens(name, 0);
        s.update_state_after_alloc(name, 25, matched.tokens.unwrap());
        (matched.tokens.unwrap(), matched.asynchronous)
    };
    ["a", "b", "c", "d", "e"].iter().for_each(|name| s.on_new_request(name, 100));
    assert_eq!(ask(&mut s, "a"), (64, false), "nothing measured yet");
    s.idle();
    let report = WorkerMeta { loaded_tokens: 6400, load_s: 1.0, ..WorkerMeta::default() };
    s.s.update_connector_output(&StepOutput { workers: vec![report], ..StepOutput::default() });
    assert_eq!(ask(&mut s, "b"), (64, false), "10 ms");
    assert_eq!(ask(&mut s, "c"), (64, false), "20 ms together");
    assert_eq!(ask(&mut s, "d"), (64, true), "30 ms together");
    let meta = s.idle();
    let loads: Vec<_> = meta.loads.iter().map(|l| (l.req_id.as_str(), l.asynchronous)).collect();
    assert_eq!(loads, [("b", false), ("c", false), ("d", true)]);
    assert_eq!(s.get_num_new_matched_tokens("d", 0), Some(0), "under way");
    assert_eq!(ask(&mut s, "e"), (64, false), "another step");
    s.received("d");
    assert_eq!((s.get_num_new_matched_tokens("d", 0), s.stats().stalling), (Some(64), 1));
}

#[test]
fn what_another_server_has_promised_is_waited_for_and_loaded_when_it_is_there() {
    let mut s = side(0);
    s.add_promised("a", 70);
    assert_eq!(s.get_num_new_matched_tokens("a", 0), None, "the other server's store is under way");
    assert_eq!(s.s.stats().awaited, 1);
    s.lookup.say(Some(96));
    s.s.reset_cache();
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(96), "looked up anew");
    s.add_promised("b", 70);
    assert_eq!(s.get_num_new_matched_tokens("b", 0), Some(96), "nothing to wait for");
    s.add_promised("unpromised", 0);
    s.lookup.say(Some(0));
    assert_eq!(s.get_num_new_matched_tokens("unpromised", 0), Some(0));
}

#[test]
fn a_promise_that_is_not_kept_is_a_miss_after_the_time_for_loads() {
    let mut s = side_with(32, |o| o.load_timeout_ms = 1);
    s.add_promised("a", usize::MAX);
    s.get_num_new_matched_tokens("a", 0);
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(32), "what is there is taken");
}

#[test]
fn without_time_for_loads_nothing_is_offered_or_waited_for() {
    let mut s = side_with(32, |o| o.load_timeout_ms = 0);
    s.add_promised("a", usize::MAX);
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(0));
}

#[test]
fn a_producer_does_not_store_what_it_has_transferred_and_says_how_far_it_is() {
    let mut s = side_with(0, |o| o.role = Role::Producer);
    s.add_promised("a", 40);
    let meta = s.first("a", (0, 100));
    assert_eq!(saved(&meta), [(32, 96)], "whole chunks from the first that was not");
    assert_eq!(s.s.transferred("a"), 96);
    assert_eq!(s.s.transferred("unknown"), 0);
    let mut s = side_with(0, |o| (o.role, o.turns_down) = (Role::Producer, true));
    s.on_new_request("a", 100);
    s.first("a", (0, 100));
    assert_eq!(s.s.transferred("a"), 0, "the workers may store none of it");
}
