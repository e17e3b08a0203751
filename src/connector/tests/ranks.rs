//! Ranks whose cache the scheduler cannot see: their answers count until they start anew, and no
//! request waits for ever.

use std::time::Duration;

use super::*;
use crate::config::Settings;
use crate::geometry::{DType, Geometry, LayerSpec, Shard};

/// A scheduler side of two workers that are elsewhere.
struct Far {
    side: Side,
}

fn geometry(tp: u16) -> Geometry {
    let made =
        Geometry::new("m", DType::named("uint8").unwrap(), vec![LayerSpec::opaque(4, 64)], CHUNK as u32).unwrap();
    made.with_shard(Shard { tp: (tp, 2), ..Shard::default() }).unwrap()
}

fn report(rank: u32) -> WorkerMeta {
    WorkerMeta { rank, ..WorkerMeta::default() }
}

impl Far {
    fn new(patience_ms: u64) -> Self {
        Self::with(&Settings::default(), patience_ms)
    }

    fn with(settings: &Settings, patience_ms: u64) -> Self {
        let o = ConnectorOptions { workers: 2, ..options() };
        let lookup = RanksLookup::new(settings, 2, Duration::from_millis(patience_ms));
        Self { side: Side { s: Scheduler::new(o, Box::new(lookup)).unwrap(), lookup: TestLookup::default() } }
    }

    /// Both workers have said who they are.
    fn met(patience_ms: u64) -> Self {
        Self::new(patience_ms).meet()
    }

    fn meet(mut self) -> Self {
        self.identity(0);
        self.identity(1);
        self
    }

    fn identity(&mut self, rank: u32) {
        self.say(WorkerMeta { identity: Some(WorkerIdentity::of(&geometry(rank as u16), None)), ..report(rank) });
    }

    fn say(&mut self, report: WorkerMeta) {
        self.side.s.update_connector_output(&StepOutput { workers: vec![report], ..StepOutput::default() });
    }

    fn answer(&mut self, rank: u32, number: u64, tokens: u64) {
        self.say(WorkerMeta { answers: vec![(number, tokens)], ..report(rank) });
    }

    /// The number of the one question of the next step.
    fn question(&mut self) -> u64 {
        let meta = self.side.idle();
        assert_eq!((meta.questions.len(), meta.asked.as_slice()), (1, [0, 1].as_slice()));
        meta.questions[0].number
    }
}

#[test]
fn while_a_ranks_cache_is_not_open_no_rank_is_asked_and_no_request_waits() {
    let mut far = Far::met(60_000);
    let mut down = WorkerIdentity::of(&geometry(1), None);
    down.is_up = false;
    far.say(WorkerMeta { identity: Some(down), ..report(1) });
    far.side.add_promised("a", usize::MAX);
    assert_eq!(far.side.get_num_new_matched_tokens("a", 0), Some(0));
    assert!(far.side.idle().questions.is_empty());
    far.identity(1);
    assert_eq!(far.side.get_num_new_matched_tokens("a", 0), None, "it has been opened");
    far.question();
}

#[test]
fn the_least_that_any_rank_says_is_offered_once_all_have_said_it() {
    let mut far = Far::met(60_000);
    far.side.on_new_request("a", 100);
    assert_eq!(far.side.get_num_new_matched_tokens("a", 0), None);
    let number = far.question();
    assert!(far.side.idle().questions.is_empty(), "asked once");
    far.answer(1, number, 64);
    assert_eq!(far.side.get_num_new_matched_tokens("a", 0), None);
    far.answer(0, number, 32);
    assert_eq!(far.side.get_num_new_matched_tokens("a", 0), Some(32));
    assert_eq!((far.side.stats().unseen_ranks, far.side.stats().questions, far.side.stats().asking), (2, 1, 2));
    // No claim goes beyond what was asked, and answers to nothing change nothing.
    far.side.on_new_request("b", 50);
    assert_eq!(far.side.get_num_new_matched_tokens("b", 0), None);
    let number = far.question();
    far.answer(0, number + 1, 48);
    far.answer(7, number, 0);
    far.answer(0, number, u64::MAX);
    far.answer(1, number, u64::MAX);
    assert_eq!(far.side.get_num_new_matched_tokens("b", 0), Some(48), "the last token is computed");
}

#[test]
fn what_a_rank_said_before_it_started_anew_counts_no_more() {
    let mut far = Far::met(60_000);
    far.side.on_new_request("a", 100);
    far.side.get_num_new_matched_tokens("a", 0);
    let old = far.question();
    far.answer(0, old, 64);
    far.identity(1);
    far.answer(1, old, 64);
    assert_eq!(far.side.get_num_new_matched_tokens("a", 0), None, "of another process");
    let new = far.question();
    far.answer(0, new, 64);
    far.answer(1, new, 16);
    assert_eq!(far.side.get_num_new_matched_tokens("a", 0), Some(16));
    // The same process says it again until it is acknowledged: nothing is forgotten.
    let same = WorkerMeta { identity: Some(WorkerIdentity::of(&geometry(1), None)), ..report(1) };
    far.say(same.clone());
    far.side.on_new_request("b", 100);
    far.side.get_num_new_matched_tokens("b", 0);
    let number = far.question();
    far.say(same);
    far.answer(0, number, 80);
    far.answer(1, number, 80);
    assert_eq!(far.side.get_num_new_matched_tokens("b", 0), Some(80));
}

#[test]
fn what_a_drive_did_not_read_in_time_is_not_offered_for_as_long_as_io_may_take() {
    let keys = Prompt::new(&tokens(100), CHUNK as u32, &Extra::default()).keys().to_vec();
    for (io_timeout_ms, offered) in [(3_600_000, 32), (0, 64)] {
        let mut far = Far::with(&Settings { io_timeout_ms, ..Settings::default() }, 3_600_000).meet();
        far.say(WorkerMeta { unread: vec![keys[2].0], ..report(1) });
        for (req_id, len, found) in [("a", 100, offered), ("b", 40, 36)] {
            far.side.on_new_request(req_id, len);
            assert_eq!(far.side.get_num_new_matched_tokens(req_id, 0), None);
            let number = far.question();
            far.answer(0, number, 64);
            far.answer(1, number, 64);
            assert_eq!(far.side.get_num_new_matched_tokens(req_id, 0), Some(found));
        }
    }
}

#[test]
fn nobody_waits_longer_than_the_patience() {
    // Ranks that never say who they are, and ranks that never answer.
    for mut far in [Far::new(0), Far::met(0)] {
        far.side.on_new_request("a", 100);
        let mut answers = Vec::new();
        for _ in 0..3 {
            answers.push(far.side.get_num_new_matched_tokens("a", 0));
            far.side.idle();
        }
        assert_eq!(answers.last(), Some(&Some(0)), "{answers:?}");
        assert!(far.side.stats().lookup_errors > 0, "giving up is no answer");
    }
}

#[test]
fn a_step_asks_for_so_many_tokens_and_ended_requests_for_none() {
    let mut far = Far::met(60_000);
    let long = 40_000;
    for req_id in ["a", "b", "c", "d"] {
        far.side.on_new_request(req_id, long);
        assert_eq!(far.side.get_num_new_matched_tokens(req_id, 0), None);
    }
    far.side.s.request_finished("a", None);
    let steps: Vec<Vec<String>> =
        (0..3).map(|_| far.side.idle().questions.into_iter().map(|q| q.req_id).collect()).collect();
    assert_eq!(steps, [vec!["b", "c"], vec!["d"], Vec::<&str>::new()]);
}

#[test]
fn workers_stop_saying_who_they_are_and_one_of_a_shard_in_a_place_stores() {
    let mut far = Far::new(60_000);
    let place = Settings::at(std::env::temp_dir()).cache_identity();
    assert!(place.is_some());
    let mla = Geometry { shard: Shard::default(), ..geometry(0) };
    far.say(WorkerMeta { identity: Some(WorkerIdentity::of(&mla, place)), ..report(0) });
    let meta = far.side.idle();
    assert_eq!((meta.acknowledged, meta.silent), (vec![0], None), "not before all are known");
    far.say(WorkerMeta { identity: Some(WorkerIdentity::of(&mla, place)), ..report(1) });
    let meta = far.side.idle();
    assert_eq!((meta.acknowledged, meta.silent), (vec![1], Some(vec![1])));
    assert!(far.side.idle().is_empty(), "said once");
    // On another machine the same KV is stored there too.
    far.say(WorkerMeta { identity: Some(WorkerIdentity::of(&mla, None)), ..report(1) });
    assert_eq!(far.side.idle().silent, Some(Vec::new()));
}

#[test]
fn descriptions_of_kv_that_cannot_be_are_no_hits_and_no_panic() {
    let mut far = Far::new(60_000);
    let text = serde_json::to_string(&WorkerIdentity::of(&geometry(0), None)).unwrap();
    for (from, to) in [("\"chunk_tokens\":16", "\"chunk_tokens\":0"), ("\"tp\":[0,2]", "\"tp\":[2,2]")] {
        assert!(text.contains(from), "{text}");
        let identity: WorkerIdentity = serde_json::from_str(&text.replace(from, to)).unwrap();
        assert!(identity.geometry().is_err());
        far.say(WorkerMeta { identity: Some(identity), ..report(0) });
        far.say(WorkerMeta { identity: Some(WorkerIdentity::of(&geometry(1), None)), ..report(9) });
    }
    far.identity(1);
    far.side.on_new_request("a", 100);
    assert_eq!(far.side.get_num_new_matched_tokens("a", 0), None);
    let number = far.question();
    far.answer(0, number, 0);
    far.answer(1, number, 64);
    assert_eq!(far.side.get_num_new_matched_tokens("a", 0), Some(0));
}
