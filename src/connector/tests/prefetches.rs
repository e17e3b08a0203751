//! For which waiting requests prefetches are ordered, how far, and when the workers drop them.

use super::*;

fn waiting(found: usize) -> Side {
    side_with(found, |o| o.prefetch = true)
}

fn ordered(meta: &StepMeta) -> Vec<(&str, usize, usize)> {
    meta.prefetches.iter().map(|p| (p.req_id.as_str(), p.start, p.stop)).collect()
}

#[test]
fn requests_that_still_wait_after_a_step_are_ordered_once_in_their_order() {
    let mut s = waiting(64);
    s.on_new_request("a", 100);
    s.on_new_request("b", 100);
    s.on_new_request("c", 50);
    // The server has room for the first one and loads it at once.
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(64));
    s.update_state_after_alloc("a", 25, 64);
    let meta = s.idle();
    assert_eq!((loaded(&meta), ordered(&meta)), (vec![(0, 64)], vec![("b", 0, 64), ("c", 0, 48)]));
    // All tokens of the chunk in which the wanted tokens end are sent: its key covers them all.
    assert_eq!(meta.prefetches.iter().map(|p| p.prompt.tokens.len()).collect::<Vec<_>>(), [80, 50]);
    assert!(s.idle().is_empty());
    assert_eq!((s.stats().prefetches, s.stats().prefetch_tokens), (2, 112));
    // What was sent is not sent again.
    s.received("a");
    assert_eq!(s.get_num_new_matched_tokens("b", 0), Some(64));
    s.update_state_after_alloc("b", 25, 64);
    let meta = s.idle();
    assert_eq!((meta.loads[0].prompt.start, meta.loads[0].prompt.tokens.len()), (80, 0));
    assert!(meta.unwanted.is_empty(), "the workers see the load");
}

#[test]
fn nothing_is_read_ahead_that_the_server_has_or_does_not_want() {
    let mut s = waiting(64);
    let (tokens, extra) = (tokens(100), Extra::default());
    let request = |req_id| AddRequest::new(req_id, &tokens, &extra);
    s.s.on_new_request(AddRequest { computed: 32, ..request("part") });
    s.s.on_new_request(AddRequest { computed: 64, ..request("all") });
    s.s.on_new_request(AddRequest { skip_load: true, ..request("skips") });
    s.s.on_new_request(request("asked"));
    assert_eq!(s.get_num_new_matched_tokens("asked", 48), Some(16));
    s.s.on_new_request(request("ended"));
    s.s.request_finished("ended", None);
    assert_eq!(ordered(&s.idle()), [("part", 32, 64), ("asked", 48, 64)]);
    for change in [
        (|o: &mut ConnectorOptions| o.min_load_tokens = 65) as fn(&mut ConnectorOptions),
        |o| o.role = Role::Producer,
        |o| o.prefetch = false,
    ] {
        let mut s = side_with(64, |o| o.prefetch = true);
        let mut o = ConnectorOptions { prefetch: true, ..options() };
        change(&mut o);
        s.s = Scheduler::new(o, Box::new(s.lookup.clone())).unwrap();
        s.on_new_request("a", 100);
        assert!(s.idle().is_empty());
    }
}

#[test]
fn the_workers_are_told_of_a_request_that_begins_without_a_load() {
    let mut s = waiting(64);
    s.on_new_request("a", 100);
    s.on_new_request("b", 100);
    assert_eq!(ordered(&s.idle()).len(), 2);
    s.update_state_after_alloc("a", 25, 0);
    s.s.request_finished("b", None);
    let meta = s.first("a", (0, 100));
    assert_eq!((meta.unwanted, meta.prefetches.len()), (vec!["a".to_owned()], 0), "the end of b they see themselves");
    assert!(s.idle().unwanted.is_empty());
}

#[test]
fn so_many_at_once_and_no_more_tokens_in_a_step_than_questions_have() {
    let mut s = waiting(64);
    for i in 0..40 {
        s.on_new_request(&format!("{i}"), 100);
    }
    assert_eq!(ordered(&s.idle()).len(), 32);
    assert!(s.idle().is_empty());
    s.s.request_finished("5", None);
    s.update_state_after_alloc("6", 25, 0);
    assert_eq!(ordered(&s.idle()), [("32", 0, 64), ("33", 0, 64)]);
    let mut s = waiting(40_000);
    for i in 0..3 {
        s.on_new_request(&format!("{i}"), 40_001);
    }
    assert_eq!((ordered(&s.idle()).len(), ordered(&s.idle()).len()), (2, 1));
}

#[test]
fn where_the_workers_must_be_asked_first_it_waits_for_the_answer() {
    let mut s = waiting(0);
    s.lookup.say(None);
    s.on_new_request("a", 100);
    s.on_new_request("b", 100);
    assert!(s.idle().is_empty() && s.idle().is_empty());
    s.lookup.say(Some(32));
    assert_eq!(ordered(&s.idle()), [("a", 0, 32), ("b", 0, 32)]);
}
