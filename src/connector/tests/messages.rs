//! Messages and options.

use super::*;
use crate::connector::options::effective_chunk_tokens;
use crate::geometry::block_multiple;
use crate::key::{LoraId, MmItem};

#[test]
fn messages_come_back_as_they_were() {
    let extra = Extra {
        multimodal: vec![MmItem { hash: vec![1, 2], offset: 3, len: 4 }],
        lora: Some(LoraId { name: "n".into(), path: "p".into(), digest: "d".into() }),
        cache_salt: Some("salt".into()),
    };
    let mut s = side(32);
    s.s.on_new_request(AddRequest::new("a", &tokens(100), &extra));
    s.get_num_new_matched_tokens("a", 0);
    s.update_state_after_alloc("a", 25, 32);
    let meta = s.first("a", (32, 100));
    assert_eq!((meta.loads.len(), meta.saves.len()), (1, 1));
    assert_eq!(Extra::from(&meta.loads[0].prompt.extra), extra);
    let bytes = meta.to_bytes().unwrap();
    assert_eq!(StepMeta::from_bytes(&bytes).unwrap(), meta);
    let report = WorkerMeta { rank: 3, gathered_step: 9, failed: vec!["a".into()], ..WorkerMeta::default() };
    assert_eq!(WorkerMeta::from_bytes(&report.to_bytes().unwrap()).unwrap(), report);
    for cut in 1..bytes.len() {
        assert_eq!(StepMeta::from_bytes(&bytes[..cut]).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x81;
        let _ = StepMeta::from_bytes(&damaged);
        let _ = WorkerMeta::from_bytes(&damaged);
    }
    let e = StepMeta::from_bytes(&[99, 0]).unwrap_err();
    assert!(e.to_string().contains("version 99"), "{e}");
}

#[test]
fn a_step_without_work_is_no_bytes() {
    let mut s = side(0);
    assert_eq!(s.idle().to_bytes().unwrap(), Vec::<u8>::new());
    assert!(StepMeta::from_bytes(&[]).unwrap().is_empty());
    assert!(WorkerMeta::from_bytes(&[]).is_err());
}

#[test]
fn chunks_are_rounded_up_to_whole_blocks_of_every_group() {
    assert_eq!(effective_chunk_tokens(256, &[128]), 256);
    assert_eq!(effective_chunk_tokens(100, &[16]), 112);
    assert_eq!(effective_chunk_tokens(100, &[16, 24]), 144);
    assert_eq!(effective_chunk_tokens(0, &[]), 1);
    assert_eq!(block_multiple(&[u32::MAX, u32::MAX - 1]), u32::MAX);
    let wrong = |change: fn(&mut ConnectorOptions)| {
        let mut o = options();
        change(&mut o);
        o.validate().unwrap_err().to_string()
    };
    assert!(wrong(|o| o.chunk_tokens = 18).contains("set chunk_size to 20"));
    assert!(wrong(|o| o.block_tokens = vec![]).contains("blocks of []"));
    assert!(wrong(|o| o.workers = 0).contains("0 workers"));
    let finished = wrong(|o| (o.store_when, o.windows) = (StoreWhen::Finished, vec![Some(64)]));
    assert!(finished.contains("sliding window") && finished.contains("use store_when: computed"), "{finished}");
    assert!(wrong(|o| o.writers = 0).contains("none of whose workers stores"));
}

#[test]
fn chunks_are_no_longer_than_what_a_window_keeps() {
    assert_eq!(windowed_chunk_tokens(256, &[16, 16], &[None, None]), 256);
    assert_eq!(windowed_chunk_tokens(256, &[16, 16], &[None, Some(1024)]), 256);
    assert_eq!(windowed_chunk_tokens(256, &[16, 16], &[None, Some(128)]), 128);
    assert_eq!(windowed_chunk_tokens(250, &[16, 16], &[Some(100), None]), 112, "115 tokens are kept at least");
    assert_eq!(windowed_chunk_tokens(256, &[128, 128], &[None, Some(64)]), 128, "one block is always whole");
    assert_eq!(windowed_chunk_tokens(8, &[16, 16], &[None, Some(1)]), 16);
    assert_eq!(windowed_chunk_tokens(256, &[u32::MAX], &[Some(u32::MAX)]), u32::MAX);
}

/// Whatever steps a server computes a prompt in, no chunk of that size is left out because blocks
/// were gone.
#[test]
fn no_chunk_is_lost_to_a_window_however_a_prompt_is_cut() {
    for (block, window) in [(4usize, 16u32), (4, 13), (4, 3), (8, 12), (2, 7), (16, 5)] {
        let size = windowed_chunk_tokens(64, &[block as u32], &[Some(window)]);
        for step in 1..50 {
            let mut s = side_with(0, |o| {
                (o.chunk_tokens, o.block_tokens, o.windows) = (size, vec![block as u32], vec![Some(window)]);
            });
            s.on_new_request("a", 200);
            let mut found = saved(&s.first_in("a", (0, step), vec![blocks(200)]));
            for from in (step..200).step_by(step) {
                found.extend(saved(&s.next("a", (from, (from + step).min(200)), (&[], 0))));
            }
            let ends: Vec<usize> = found.iter().map(|(_, stop)| *stop).collect();
            let starts: Vec<usize> = found.iter().map(|(start, _)| *start).collect();
            assert_eq!(starts[0], 0);
            assert_eq!(starts[1..], ends[..ends.len() - 1], "{block} {window} {step}: a gap");
            assert_eq!(s.stats().skipped_window_tokens, 0);
        }
    }
}
