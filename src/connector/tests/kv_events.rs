//! KV events of chunks.

use super::*;

fn chunks(of: &[RequestChunk]) -> Vec<(usize, usize)> {
    of.iter().map(|c| (c.start, c.tokens)).collect()
}

fn commit(s: &mut Side, rank: u32, stored: &[RequestChunk]) {
    let report = WorkerMeta { rank, stored: keys(stored), ..WorkerMeta::default() };
    s.s.update_connector_output(&StepOutput { workers: vec![report], ..StepOutput::default() });
}

fn keys(of: &[RequestChunk]) -> Vec<[u8; 32]> {
    of.iter().map(|c| c.key).collect()
}

#[test]
fn a_chunk_counts_as_stored_when_every_worker_has_committed_it() {
    let mut s = side_with(0, |o| (o.events, o.workers) = (true, 2));
    s.on_new_request("a", 100);
    s.first("a", (0, 40));
    let events = s.s.take_events();
    assert_eq!((chunks(&events.ordered), events.stored.len()), (vec![(0, 16), (16, 16)], 0));
    assert_eq!(events.ordered[0].req_id, "a");
    commit(&mut s, 0, &events.ordered);
    commit(&mut s, 0, &events.ordered);
    assert_eq!(s.s.take_events(), KvEvents::default(), "one worker twice is not two");
    s.s.request_finished("a", None);
    commit(&mut s, 1, &events.ordered[1..]);
    assert_eq!(s.s.take_events().stored, keys(&events.ordered[1..]));
    commit(&mut s, 1, &events.ordered);
    assert_eq!(s.s.take_events().stored, keys(&events.ordered[..1]), "each once");
}

#[test]
fn lookups_tell_what_is_there_already_and_what_is_gone() {
    let mut s = side_with(48, |o| o.events = true);
    s.on_new_request("a", 100);
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(48));
    let events = s.s.take_events();
    assert_eq!((chunks(&events.found), events.missing.len()), (vec![(0, 16), (16, 16), (32, 16)], 0));
    s.on_new_request("b", 100);
    assert_eq!(s.get_num_new_matched_tokens("b", 0), Some(48));
    assert_eq!(s.s.take_events(), KvEvents::default(), "there were events for these before");
    s.lookup.say(Some(16));
    s.on_new_request("c", 100);
    assert_eq!(s.get_num_new_matched_tokens("c", 0), Some(16));
    let events = s.s.take_events();
    assert_eq!((chunks(&events.missing), events.missing[0].req_id.as_str()), (vec![(16, 16)], "c"));
    s.on_new_request("d", 100);
    s.get_num_new_matched_tokens("d", 0);
    assert_eq!(s.s.take_events(), KvEvents::default(), "only once");
    s.lookup.say(Some(usize::MAX));
    s.on_new_request("e", 100);
    assert_eq!(s.get_num_new_matched_tokens("e", 0), Some(0));
    assert_eq!(s.s.take_events(), KvEvents::default(), "a lookup that fails says nothing");
}

#[test]
fn a_chunk_that_cannot_be_loaded_is_missing_at_once_and_ordered_again_when_it_is_stored_anew() {
    let mut s = side_with(48, |o| o.events = true);
    s.on_new_request("a", 100);
    s.get_num_new_matched_tokens("a", 0);
    s.update_state_after_alloc("a", 12, 48);
    s.idle();
    let found = s.s.take_events().found;
    s.lookup.say(Some(32));
    s.failed("a");
    let missing = s.s.take_events().missing;
    assert_eq!(missing, found[2..]);
    s.first("a", (0, 48));
    let events = s.s.take_events();
    assert_eq!(events.ordered, missing);
    commit(&mut s, 0, &missing);
    assert_eq!(s.s.take_events().stored, keys(&missing));
}

fn say(s: &mut Side, report: WorkerMeta) {
    s.s.update_connector_output(&StepOutput { workers: vec![report], ..StepOutput::default() });
}

fn uploads(rank: u32, remote: Vec<([u8; 32], bool)>) -> WorkerMeta {
    WorkerMeta { rank, remote, ..WorkerMeta::default() }
}

#[test]
fn a_chunk_is_in_the_remote_tier_when_every_worker_has_uploaded_it_and_until_one_has_not() {
    let mut s = side_with(0, |o| (o.events, o.workers) = (true, 2));
    s.on_new_request("a", 100);
    s.first("a", (0, 40));
    let ordered = s.s.take_events().ordered;
    let [one, two] = [ordered[0].key, ordered[1].key];
    // Uploads that are reported before the store.
    say(&mut s, uploads(0, vec![(one, true), (two, true)]));
    say(&mut s, uploads(1, vec![(one, true)]));
    assert_eq!(s.s.take_events(), KvEvents::default(), "nobody knows yet that they are stored");
    commit(&mut s, 0, &ordered);
    commit(&mut s, 1, &ordered);
    let events = s.s.take_events();
    assert_eq!((events.stored, events.remote), (keys(&ordered), vec![(one, true)]));
    say(&mut s, uploads(1, vec![(two, true), (one, true)]));
    assert_eq!(s.s.take_events().remote, [(two, true)], "each once");
    let gone = WorkerMeta { evicted: vec![one, two], ..uploads(0, vec![(two, false), ([9; 32], false)]) };
    say(&mut s, gone);
    let events = s.s.take_events();
    assert_eq!((events.evicted, events.remote), (vec![one, two], vec![(two, false)]));
    say(&mut s, uploads(1, vec![(one, false), (one, false)]));
    assert_eq!(s.s.take_events().remote, [(one, false)], "also when no drive has it any more");
}

#[test]
fn what_a_fetch_does_not_find_is_taken_back_before_events_of_later_uploads() {
    let mut s = side_with(32, |o| o.events = true);
    s.on_new_request("a", 100);
    assert_eq!(s.get_num_new_matched_tokens("a", 0), Some(32));
    let key = s.s.take_events().found[0].key;
    let there = || uploads(0, vec![(key, true)]);
    s.lookup.miss_remote(key);
    say(&mut s, there());
    assert_eq!(s.s.take_events().remote, [(key, true)], "it was missed before");
    s.lookup.miss_remote(key);
    assert_eq!(s.s.take_events().remote, [(key, false)]);
    say(&mut s, there());
    assert_eq!(s.s.take_events().remote, [(key, true)]);
}

#[test]
fn after_others_removed_it_a_chunk_is_uploaded_again_when_every_worker_has_uploaded_it_anew() {
    let mut s = side_with(32, |o| (o.events, o.workers) = (true, 2));
    s.on_new_request("a", 100);
    s.get_num_new_matched_tokens("a", 0);
    let key = s.s.take_events().found[0].key;
    say(&mut s, uploads(0, vec![(key, true)]));
    say(&mut s, uploads(1, vec![(key, true)]));
    assert_eq!(s.s.take_events().remote, [(key, true)]);
    let anew = || vec![(key, false), (key, true)];
    say(&mut s, uploads(0, anew()));
    assert_eq!(s.s.take_events().remote, [(key, false)]);
    say(&mut s, uploads(1, anew()));
    assert_eq!(s.s.take_events().remote, [(key, true)], "the other one's new upload counts");
    s.lookup.miss_remote(key);
    say(&mut s, uploads(0, anew()));
    say(&mut s, uploads(0, anew()));
    assert_eq!(s.s.take_events().remote, [(key, false)], "one worker twice is not two");
}

#[test]
fn nothing_is_remembered_where_nobody_asks() {
    let mut s = side(32);
    s.on_new_request("a", 100);
    s.get_num_new_matched_tokens("a", 0);
    s.first("a", (0, 100));
    s.failed("a");
    assert_eq!(s.s.take_events(), KvEvents::default());
}

#[test]
fn what_a_worker_has_evicted_is_taken_back_once_if_there_was_an_event_for_it() {
    let mut s = side_with(32, |o| (o.events, o.workers) = (true, 2));
    s.on_new_request("a", 100);
    s.get_num_new_matched_tokens("a", 0);
    let found = s.s.take_events().found;
    let gone = |keys: &[[u8; 32]]| WorkerMeta { rank: 1, evicted: keys.to_vec(), ..WorkerMeta::default() };
    let report = gone(&[found[1].key, [9; 32]]);
    s.s.update_connector_output(&StepOutput { workers: vec![report.clone(), report], ..StepOutput::default() });
    assert_eq!(s.s.take_events(), KvEvents { evicted: vec![found[1].key], ..KvEvents::default() });
    // Found again, it gets another event.
    s.on_new_request("b", 100);
    s.get_num_new_matched_tokens("b", 0);
    assert_eq!(keys(&s.s.take_events().found), [found[1].key]);
}

#[test]
fn what_the_server_could_not_take_back_is_missing_at_the_next_lookup_unless_it_is_back() {
    let mut s = side_with(32, |o| o.events = true);
    s.on_new_request("a", 100);
    s.get_num_new_matched_tokens("a", 0);
    let key = s.s.take_events().found[1].key;
    let evicted = || WorkerMeta { evicted: vec![key], ..uploads(0, vec![(key, false)]) };
    let all_gone = |s: &mut Side| {
        say(s, uploads(0, vec![(key, true)]));
        say(s, evicted());
        let events = s.s.take_events();
        assert_eq!((events.evicted, events.remote), (vec![key], vec![(key, true), (key, false)]));
        s.s.not_taken_back([(key, false), (key, true)]);
    };
    let look_up = |s: &mut Side, req_id: &str, found| {
        s.lookup.say(Some(found));
        s.on_new_request(req_id, 100);
        s.get_num_new_matched_tokens(req_id, 0);
        s.s.take_events()
    };
    all_gone(&mut s);
    let events = look_up(&mut s, "b", 16);
    assert_eq!((keys(&events.missing), events.missing_remote), (vec![key], events.missing));
    assert_eq!(look_up(&mut s, "c", 16), KvEvents::default(), "only once");
    assert_eq!(keys(&look_up(&mut s, "d", 32).found), [key]);
    all_gone(&mut s);
    let found = look_up(&mut s, "e", 32).found;
    assert_eq!(keys(&found), [key], "it is back");
    say(&mut s, uploads(0, vec![(key, true)]));
    say(&mut s, WorkerMeta { evicted: vec![key], ..WorkerMeta::default() });
    assert_eq!(s.s.take_events(), KvEvents { evicted: vec![key], remote: vec![(key, true)], ..KvEvents::default() });
    assert_eq!(look_up(&mut s, "f", 16), KvEvents::default(), "the server took back the second event");
}
