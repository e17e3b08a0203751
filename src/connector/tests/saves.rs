//! Stores, and the ends of requests.

use super::*;

#[test]
fn whole_chunks_are_stored_as_their_last_token_is_computed() {
    let mut s = side(0);
    s.on_new_request("a", 100);
    assert_eq!(saved(&s.first("a", (0, 40))), [(0, 32)]);
    assert_eq!(saved(&s.next("a", (40, 47), (&[50], 0))), []);
    let meta = s.next("a", (47, 48), (&[51], 0));
    assert_eq!(saved(&meta), [(32, 48)]);
    assert_eq!(meta.saves[0].spans, [BlockSpan { first: 8, ids: vec![9, 10, 50, 51] }]);
    assert_eq!((meta.saves[0].prompt.start, meta.saves[0].prompt.tokens.len()), (32, 16));
    assert_eq!(saved(&s.next("a", (48, 100), (&blocks(13), 0))), [(48, 96)]);
    assert_eq!(saved(&s.next("a", (100, 120), (&blocks(5), 120))), [], "generated tokens are not asked for");
}

#[test]
fn what_is_stored_already_is_skipped_but_not_because_the_server_has_it() {
    let mut s = side(40);
    s.on_new_request("a", 100);
    assert_eq!(saved(&s.first("a", (0, 100))), [(32, 96)]);
    s.lookup.say(Some(0));
    s.on_new_request("b", 100);
    assert_eq!(s.get_num_new_matched_tokens("b", 64), Some(0));
    assert_eq!(saved(&s.first("b", (64, 100))), [(0, 96)], "chunk 0 was evicted while the server kept the prefix");
    s.lookup.say(Some(100));
    s.on_new_request("c", 100);
    assert_eq!(saved(&s.first("c", (0, 100))), []);
}

#[test]
fn generated_tokens_are_stored_once_their_ids_are_final() {
    let mut s = side_with(0, |o| o.save_decode_cache = true);
    s.on_new_request("a", 20);
    assert_eq!(saved(&s.first_in("a", (0, 20), vec![blocks(30)])), [(0, 16)]);
    assert_eq!(saved(&s.next("a", (20, 32), (&[], 31))), [], "the last id is a placeholder");
    let meta = s.next("a", (32, 33), (&[], 33));
    assert_eq!(saved(&meta), [(16, 32)]);
    assert_eq!(meta.saves[0].prompt.tokens, (16..32).collect::<Vec<u32>>());
    assert_eq!(saved(&s.next("a", (33, 64), (&[], 33))), [], "unverified drafts");
    assert_eq!(saved(&s.next("a", (40, 50), (&[], 60))), [(32, 48)]);
}

#[test]
fn the_end_of_a_prompt_is_stored_where_the_settings_say_so_in_whole_blocks() {
    let mut s = side_with(0, |o| o.save_unfull_chunk = true);
    s.on_new_request("a", 43);
    assert_eq!(saved(&s.first_in("a", (0, 42), vec![blocks(30)])), [(0, 32)]);
    assert_eq!(saved(&s.next("a", (42, 43), (&[], 0))), [(32, 40)]);
    assert_eq!(saved(&s.next("a", (43, 44), (&[], 0))), [], "once");
    s.on_new_request("b", 35);
    assert_eq!(saved(&s.first("b", (0, 35))), [(0, 32)], "3 tokens fill no block");
    s.lookup.say(Some(40));
    s.on_new_request("c", 43);
    assert_eq!(saved(&s.first("c", (0, 43))), [], "it is there");
}

#[test]
fn preemption_gives_gathers_up_and_a_resumed_request_goes_on_with_its_new_blocks() {
    let mut s = side(0);
    s.on_new_request("a", 100);
    s.first("a", (0, 40));
    s.gathered(1);
    s.next("a", (40, 64), (&blocks(6), 0));
    assert_eq!(s.preempt("a").preempted, ["a"]);
    s.lookup.say(Some(32));
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(32));
    let cached = vec![CachedRequest {
        req_id: "a",
        new_blocks: Some(vec![(100..125).collect()]),
        num_computed: 0,
        num_scheduled: 100,
        resumed: true,
    }];
    s.s.update_state_after_alloc("a", &[(100..125).collect()], 0).unwrap();
    let meta = s.s.build_connector_meta(&StepInput { cached, ..StepInput::default() }, &mut |_, _, _| None);
    assert_eq!(saved(&meta), [(32, 96)]);
    assert_eq!(meta.saves[0].spans[0].ids[0], 108);
    assert_eq!(meta.saves[0].prompt.start, 64, "its tokens are sent once");
    s.gathered(4);
    assert!(s.preempt("a").preempted.is_empty(), "nothing reads its blocks");
}

#[test]
fn blocks_are_held_exactly_while_gathers_may_read_them() {
    let mut s = side(0);
    s.on_new_request("a", 100);
    s.on_new_request("b", 100);
    s.first("a", (0, 40));
    s.gathered(1);
    assert!(!s.s.request_finished("a", None), "gathered");
    s.first("b", (0, 40));
    assert!(s.s.request_finished("b", None));
    assert!(!s.s.request_finished("b", None), "it is known no more");
    assert_eq!((s.stats().held_requests, s.stats().held_blocks), (1, 10));
    let meta = s.idle();
    assert_eq!((meta.held.as_slice(), meta.give_up.len()), (["b".to_owned()].as_slice(), 0));
    assert!(s.idle().held.is_empty(), "only once");
    s.s.update_connector_output(&StepOutput { finished_sending: vec!["b"], ..StepOutput::default() });
    assert_eq!(s.stats().held_blocks, 0);
    s.on_new_request("c", 10);
    s.first("c", (0, 10));
    assert!(!s.s.request_finished("c", None), "nothing of it was stored");
}

#[test]
fn beyond_the_bound_held_requests_are_given_up_but_still_held_until_that_is_done() {
    let mut s = side_with(0, |o| o.max_held_blocks = 25);
    for name in ["a", "b", "c"] {
        s.on_new_request(name, 40);
        s.first(name, (0, 40));
    }
    let ends = |name: &str| (s.s.transferred(name), s.s.request_finished(name, None));
    assert_eq!(["a", "b", "c"].map(ends), [(32, true), (32, true), (0, true)], "what is given up is not promised");
    let meta = s.idle();
    assert_eq!((meta.held.len(), meta.give_up), (3, vec!["c".to_owned()]));
    assert_eq!(s.stats().given_up, 1);
}

fn at_the_end() -> Side {
    side_with(0, |o| o.store_when = StoreWhen::Finished)
}

#[test]
fn what_waits_for_the_end_is_stored_in_the_step_after_it_with_what_was_generated() {
    let mut s = side_with(0, |o| (o.store_when, o.save_unfull_chunk) = (StoreWhen::Finished, true));
    s.on_new_request("a", 43);
    assert_eq!(saved(&s.first("a", (0, 20))), []);
    assert_eq!(saved(&s.next("a", (20, 43), (&blocks(6), 0))), []);
    assert_eq!(saved(&s.next("a", (43, 44), (&[], 0))), []);
    assert_eq!(s.s.transferred("a"), 40);
    assert!(s.s.request_finished("a", Some(7)), "its blocks are kept");
    assert_eq!((s.stats().held_requests, s.stats().held_blocks), (1, 11));
    let meta = s.idle();
    assert_eq!(
        (saved(&meta), meta.saves[0].generated, meta.held.as_slice()),
        (vec![(0, 40)], Some(7), ["a".to_owned()].as_slice())
    );
    assert_eq!(meta.saves[0].spans, [BlockSpan { first: 0, ids: [blocks(5), blocks(5)].concat() }]);
    assert!(s.idle().is_empty(), "once");
    s.lookup.say(Some(40));
    s.on_new_request("b", 43);
    s.first("b", (0, 43));
    assert!(!s.s.request_finished("b", Some(7)), "it is there");
    assert!(s.idle().is_empty());
}

#[test]
fn generated_tokens_that_wait_for_the_end_are_stored_too() {
    let mut s = side_with(0, |o| (o.store_when, o.save_decode_cache) = (StoreWhen::Finished, true));
    s.on_new_request("a", 20);
    assert_eq!(saved(&s.first_in("a", (0, 20), vec![blocks(12)])), []);
    assert_eq!(saved(&s.next("a", (20, 33), (&[], 33))), []);
    s.s.request_finished("a", Some(13));
    let meta = s.idle();
    assert_eq!((saved(&meta), meta.saves[0].prompt.tokens.len()), (vec![(0, 32)], 32));
}

#[test]
fn what_a_preemption_takes_waits_no_more_and_a_load_that_failed_begins_anew() {
    let mut s = at_the_end();
    s.on_new_request("a", 40);
    s.first("a", (0, 40));
    assert!(s.preempt("a").preempted.is_empty(), "nothing reads its blocks");
    assert!(!s.s.request_finished("a", None));
    assert!(s.idle().is_empty());
    s.lookup.say(Some(16));
    s.on_new_request("b", 40);
    s.get_num_new_matched_tokens("b", 0);
    s.update_state_after_alloc("b", 10, 16);
    s.first("b", (16, 32));
    s.lookup.say(Some(0));
    s.failed("b");
    assert!(!s.s.request_finished("b", None), "computed from what was not loaded");
    assert!(s.idle().is_empty());
}

#[test]
fn what_would_hold_too_much_at_the_end_is_stored_as_it_is_computed_or_not_at_all() {
    let mut s = side_with(0, |o| (o.store_when, o.max_held_blocks) = (StoreWhen::Finished, 25));
    s.on_new_request("long", 100);
    assert_eq!(saved(&s.first("long", (0, 48))), [], "12 blocks");
    let meta = s.next("long", (48, 64), (&blocks(4), 0));
    assert_eq!((saved(&meta), meta.saves[0].generated), (vec![(0, 64)], None));
    assert_eq!(saved(&s.next("long", (64, 80), (&blocks(4), 0))), [(64, 80)]);
    s.gathered(3);
    assert!(!s.s.request_finished("long", Some(3)));
    s.on_new_request("chatty", 40);
    assert_eq!(saved(&s.first("chatty", (0, 40))), [], "10 blocks");
    let meta = s.next("chatty", (40, 52), (&blocks(3), 0));
    assert_eq!((saved(&meta), meta.saves[0].generated), (vec![(0, 32)], None), "it has grown by what was generated");
    assert_eq!(saved(&s.next("chatty", (52, 64), (&blocks(3), 0))), []);
    s.gathered(6);
    assert!(!s.s.request_finished("chatty", Some(24)));
    for name in ["a", "b", "c"] {
        s.on_new_request(name, 48);
        s.first(name, (0, 48));
    }
    assert_eq!(["a", "b", "c"].map(|name| s.s.request_finished(name, Some(1))), [true, true, false]);
    assert_eq!((s.idle().saves.len(), s.stats().given_up), (2, 1));
}

#[test]
fn stores_that_are_due_do_not_outlive_a_reset() {
    let mut s = at_the_end();
    s.on_new_request("a", 40);
    s.first("a", (0, 40));
    assert!(s.s.request_finished("a", None));
    s.s.reset_cache();
    let meta = s.idle();
    assert_eq!(
        (meta.saves.len(), meta.held.as_slice()),
        (0, ["a".to_owned()].as_slice()),
        "its blocks come free all the same"
    );
}

#[test]
fn every_worker_must_have_gathered() {
    let mut s = side_with(0, |o| o.workers = 2);
    s.on_new_request("a", 40);
    s.first("a", (0, 40));
    s.gathered(1);
    assert!(s.s.request_finished("a", None));
}

#[test]
fn a_request_that_ends_without_a_question_has_its_gathers_given_up_in_that_step() {
    let mut s = side(0);
    s.on_new_request("a", 40);
    s.first("a", (0, 40));
    let meta =
        s.s.build_connector_meta(&StepInput { finished: vec!["a"], ..StepInput::default() }, &mut |_, _, _| None);
    assert_eq!((meta.preempted.as_slice(), meta.held.len()), (["a".to_owned()].as_slice(), 0));
    assert!(!s.s.knows("a"));
}

/// vLLM's reset preempts running requests between two steps, and a client may go away before the
/// second of them.
#[test]
fn a_request_that_is_preempted_between_steps_and_then_ends_has_its_stores_given_up() {
    let both = || StepInput { preempted: vec!["a"], finished: vec!["a"], ..StepInput::default() };
    let a = ["a".to_owned()];
    let mut s = side(0);
    s.on_new_request("a", 40);
    s.first("a", (0, 40));
    assert!(s.s.request_finished("a", None));
    let meta = s.s.build_connector_meta(&both(), &mut |_, _, _| None);
    assert_eq!((meta.preempted.as_slice(), meta.held.as_slice()), (a.as_slice(), a.as_slice()));
    let mut s = at_the_end();
    s.on_new_request("a", 40);
    s.first("a", (0, 40));
    assert!(s.s.request_finished("a", Some(1)));
    let meta = s.s.build_connector_meta(&both(), &mut |_, _, _| None);
    assert_eq!((saved(&meta), meta.held.as_slice()), (vec![], a.as_slice()), "the blocks are another's by now");
}

#[test]
fn chunks_whose_window_blocks_are_gone_are_not_stored() {
    let window = |o: &mut ConnectorOptions| (o.block_tokens, o.windows) = (vec![4, 4], vec![None, Some(20)]);
    let mut s = side_with(0, window);
    s.on_new_request("a", 100);
    assert_eq!(saved(&s.first_in("a", (0, 50), vec![blocks(25), blocks(25)])), [(0, 48)]);
    let mut s = side_with(0, window);
    s.on_new_request("a", 100);
    let mut tail = blocks(25);
    tail[..9].fill(0);
    assert_eq!(saved(&s.first_in("a", (56, 100), vec![blocks(25), tail])), [(48, 96)], "the null block holds nothing");
    assert_eq!((s.stats().skipped_window_tokens, s.s.transferred("a")), (48, 0));
    let mut s = side_with(0, window);
    s.on_new_request("a", 100);
    let meta = s.first_in("a", (60, 100), vec![blocks(25), blocks(25)]);
    assert_eq!(saved(&meta), [(48, 96)], "what lay before the window may be another's");
    assert_eq!(meta.saves[0].spans.len(), 2);
}

#[test]
fn a_reset_looks_everything_up_anew() {
    let mut s = side(0);
    s.on_new_request("a", 100);
    s.first("a", (0, 40));
    assert!(s.s.reset_cache());
    assert_eq!(saved(&s.next("a", (40, 48), (&blocks(2), 0))), [(0, 48)]);
    s.s.shutdown();
    assert_eq!(s.stats().requests, 0);
}

#[test]
fn a_request_preempted_and_taken_up_again_for_one_step_keeps_its_new_load() {
    let mut s = side(0);
    s.on_new_request("a", 100);
    s.first("a", (0, 40));
    s.lookup.say(Some(32));
    s.s.reset_cache();
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(32));
    s.update_state_after_alloc("a", 8, 32);
    let meta = s.preempt("a");
    assert_eq!((meta.preempted.as_slice(), loaded(&meta)), (["a".to_owned()].as_slice(), vec![(0, 32)]));
}

#[test]
fn requests_that_fill_no_chunk_need_not_be_listed() {
    let s = side(0);
    let chunk = CHUNK;
    for computed in 0..5 * chunk {
        for scheduled in [1, 2, 5, chunk] {
            let fills = computed / chunk != (computed + scheduled) / chunk;
            assert!(!fills || s.s.looks_at(computed, scheduled), "{computed} + {scheduled} fill a chunk");
        }
    }
    let large = side_with(0, |o| o.chunk_tokens = 256).s;
    let looked = (0..256).filter(|&computed| large.looks_at(computed, 1)).count();
    assert_eq!(looked, 17, "the chunk's last token, and those in which a store may be tried again");
    // A step of one token and 15 drafts from 255 on, and another one before the first has ended.
    assert!(large.looks_at(255 + 2 * 16, 16), "the ids of the first step are final now");
    assert!(side_with(0, |o| o.save_unfull_chunk = true).s.looks_at(100, 1), "prompts end anywhere");
}
