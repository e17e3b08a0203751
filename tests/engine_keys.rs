//! Prompts whose chunks the server names itself: found, loaded layer by layer and removed like
//! those of tokens, and never mixed up with them.
#![expect(clippy::unwrap_used, reason = "tests")]

mod engine_world;

use std::time::{Duration, Instant};

use engine_world::{CHUNK, World, assert_same, load, matched, prompt, slots, store};
use forebay::engine::{Engine, LoadRequest, Prompt};
use forebay::key::{Extra, named_chunk_key, object_key};

const LONG: Duration = Duration::from_secs(20);

fn pages(engine: &Engine, names: &[&str]) -> Prompt {
    engine.prompt_from_keys(names)
}

#[test]
fn named_chunks_come_back_byte_for_byte_in_any_combination_and_after_reopening() {
    let w = World::plain();
    let engine = w.open();
    let p = pages(&engine, &["a", "b", "c"]);
    assert_eq!((p.len(), p.keys().len(), p.is_empty()), (3 * CHUNK, 3, false));
    let (from, to) = (slots(3 * CHUNK, 1), slots(3 * CHUNK, 2));
    let a = w.kv().filled(3);
    assert_eq!(store(&engine, &p, &a, from.clone()).stored, 3);
    engine.close(Instant::now() + LONG).unwrap();
    drop(engine);

    let engine = w.open();
    assert_eq!(
        matched(&engine, &pages(&engine, &["a", "b", "c", "d"])),
        3 * CHUNK,
        "up to the first that is not stored"
    );
    assert_eq!(matched(&engine, &pages(&engine, &["d", "a"])), 0);
    // The names alone say which chunk it is, not what stands before it.
    let b = w.kv();
    let back = load(&engine, &pages(&engine, &["c", "a"]), &b, to[..2 * CHUNK].to_vec());
    assert_eq!(back.tokens, 2 * CHUNK);
    let swapped = [&from[2 * CHUNK..], &from[..CHUNK]].concat();
    assert_same("swapped", (&a, &swapped), (&b, &to[..2 * CHUNK]));
}

#[test]
fn layers_of_named_chunks_are_given_in_order_and_a_removed_chunk_is_a_miss() {
    let w = World::plain();
    let engine = w.open();
    let p = pages(&engine, &["a", "b"]);
    let (from, to) = (slots(2 * CHUNK, 1), slots(2 * CHUNK, 2));
    let (a, b) = (w.kv().filled(5), w.kv());
    assert_eq!(store(&engine, &p, &a, from).stored, 2);
    let mut request = LoadRequest::new(&p, &b.kv, to);
    request.layerwise = Some(true);
    let load_ = engine.load(request).unwrap();
    for layer in 0..load_.layers() {
        assert_eq!(load_.wait_layer(layer).unwrap().tokens, 2 * CHUNK);
    }
    assert_eq!(load_.wait().tokens, 2 * CHUNK);
    assert_eq!(engine.remove(&pages(&engine, &["b"])).unwrap(), 1);
    assert!(engine.contains(&pages(&engine, &["a"])).unwrap());
    assert_eq!(matched(&engine, &p), CHUNK);
}

#[test]
fn names_never_meet_tokens_or_objects() {
    let w = World::plain();
    let engine = w.open();
    let tokens = prompt(&engine, 2 * CHUNK, 1);
    let a = w.kv().filled(7);
    assert_eq!(store(&engine, &tokens, &a, slots(2 * CHUNK, 1)).stored, 2);
    // Even a name that is a chunk's key: names are hashed again.
    let raw: Vec<[u8; 32]> = tokens.keys().iter().map(|key| key.0).collect();
    assert_eq!(matched(&engine, &engine.prompt_from_keys(&raw)), 0);
    assert_ne!(named_chunk_key(b"a"), object_key(b"a"));
    assert_ne!(named_chunk_key(b"").0, Prompt::new(&[], 1, &Extra::default()).parent_of(0).0);
}

#[test]
fn a_prompt_of_names_has_no_tokens_to_go_on_from_and_no_part_of_a_chunk() {
    let w = World::plain();
    let engine = w.open();
    let p = pages(&engine, &["a"]);
    assert_eq!(p.extended(&[1; CHUNK]).keys(), p.keys());
    assert!(p.tokens().is_empty());
    assert_eq!((p.partial_key(0, 1), p.partial_key(1, 1)), (None, None));
    // A chunk whose slots are not all given is not stored: there is no part of it that could be.
    let a = w.kv().filled(1);
    assert_eq!(store(&engine, &p, &a, slots(CHUNK - 1, 1)).stored, 0);
    assert_eq!(matched(&engine, &p), 0);
    assert!(engine.prompt_from_keys(&[""; 0]).is_empty());
}
