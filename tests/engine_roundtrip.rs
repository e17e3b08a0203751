//! What is stored comes back, byte for byte, through every layout, in part and in whole, from this
//! process and the next.
#![expect(clippy::unwrap_used, reason = "tests")]

mod engine_world;

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine_world::{BLOCK, CHUNK, Shape, TestClock, World, assert_same, load, matched, prompt, slots, store, tokens};
use forebay::config::{Capacity, Mode, Placement};
use forebay::engine::{LoadRequest, MissCause, Prompt, ShedCause, SlotMapping, StoreRequest};
use forebay::key::Extra;

const LONG: Duration = Duration::from_secs(20);

#[test]
fn every_layout_comes_back_byte_for_byte_also_after_reopening() {
    for shape in Shape::all() {
        let name = shape.name;
        let w = World::new(shape.clone());
        let engine = w.open();
        let n = 3 * CHUNK + 7;
        let p = prompt(&engine, n, 1);
        let (from, to) = (slots(n, 1), slots(n, 2));
        let a = w.kv().filled(3);
        assert_eq!(matched(&engine, &p), 0);
        let result = store(&engine, &p, &a, from.clone());
        assert_eq!((result.stored, result.tokens), (4, n), "{name}: {result:?}");
        assert_eq!(matched(&engine, &p), n, "{name}");
        let b = w.kv();
        let result = load(&engine, &p, &b, to.clone());
        assert_eq!((result.tokens, &result.failed_blocks[..], &result.misses[..]), (n, &[][..], &[][..]), "{name}");
        assert_same(name, (&a, &from), (&b, &to));
        if !shape.is_opaque() {
            let unmapped = (0..engine_world::BLOCKS * BLOCK).filter(|s| !to.contains(&(*s as i64)));
            for slot in unmapped {
                assert!((0..b.layers()).all(|l| b.slot(l, slot).iter().all(|&x| x == 0)), "{name}: slot {slot}");
            }
        }
        engine.close(Instant::now() + LONG).unwrap();
        drop(engine);
        let engine = w.open();
        assert_eq!(matched(&engine, &p), n, "{name}, reopened");
        let c = w.kv();
        assert_eq!(load(&engine, &p, &c, to.clone()).tokens, n, "{name}, reopened");
        assert_same(name, (&a, &from), (&c, &to));
    }
}

#[test]
fn groups_may_have_slot_mappings_of_their_own() {
    let shape = Shape::all().into_iter().find(|s| s.name == "groups").unwrap();
    let w = World::new(shape);
    let engine = w.open();
    let n = 2 * CHUNK;
    let p = prompt(&engine, n, 1);
    let a = w.kv().filled(9);
    let mapping = |x: &[i64], y: &[i64]| SlotMapping::per_group(vec![x.into(), y.into()]);
    let (from, to) = ([slots(n, 1), slots(n, 4)], [slots(n, 2), slots(n, 6)]);
    assert_eq!(store(&engine, &p, &a, mapping(&from[0], &from[1])).stored, 2);
    let b = w.kv();
    // The sliding group has left the first chunk behind: nothing of it is wanted there.
    let mut short = to[1].clone();
    short[..CHUNK].fill(-1);
    assert_eq!(load(&engine, &p, &b, mapping(&to[0], &short)).tokens, n);
    for layer in 0..4 {
        let group = layer % 2;
        for t in (if group == 1 { CHUNK } else { 0 })..n {
            assert_eq!(a.slot(layer, from[group][t] as usize), b.slot(layer, to[group][t] as usize));
        }
    }
    let none = SlotMapping::per_group(Vec::new());
    assert!(engine.load(LoadRequest::new(&p, &b.kv, none)).is_err());
}

#[test]
fn a_pipeline_stage_may_have_no_layer_of_a_group() {
    let mut shape = Shape::all().into_iter().find(|s| s.name == "groups").unwrap();
    shape.specs.iter_mut().filter(|spec| spec.group == 1).for_each(|spec| spec.group = 2);
    let w = World::new(shape);
    let engine = w.open();
    let (n, kv, copy) = (2 * CHUNK, w.kv().filled(9), w.kv());
    let p = prompt(&engine, n, 1);
    let mapping = |groups: [usize; 3]| SlotMapping::per_group(groups.map(|seed| slots(n, seed).into()).to_vec());
    assert_eq!(store(&engine, &p, &kv, mapping([1, 2, 4])).stored, 2);
    assert_eq!(load(&engine, &p, &copy, mapping([5, 6, 7])).tokens, n);
    let of_group = [(slots(n, 1), slots(n, 5)), (slots(n, 4), slots(n, 7))];
    for (layer, (from, to)) in (0..4).map(|layer| (layer, &of_group[layer % 2])) {
        for (from, to) in from.iter().zip(to) {
            assert_eq!(kv.slot(layer, *from as usize), copy.slot(layer, *to as usize), "layer {layer}");
        }
    }
}

#[test]
fn a_longer_prompt_finds_the_prefix_and_the_longest_partial_chunk() {
    let w = World::plain();
    let engine = w.open();
    let a = w.kv().filled(1);
    let all = tokens(100, 5);
    let of = |n: usize| engine.prompt(&all[..n], &Extra::default());
    for n in [2 * CHUNK + 3, 2 * CHUNK + 9] {
        assert_eq!(store(&engine, &of(n), &a, slots(n, 1)).stored + 2, if n == 2 * CHUNK + 3 { 5 } else { 3 });
    }
    for (asked, found) in
        [(100, 2 * CHUNK + 9), (2 * CHUNK + 8, 2 * CHUNK + 3), (2 * CHUNK + 2, 2 * CHUNK), (CHUNK + 5, CHUNK)]
    {
        assert_eq!(matched(&engine, &of(asked)), found, "asked for {asked}");
    }
    let b = w.kv();
    let (from, to) = (slots(100, 1), slots(100, 2));
    let result = load(&engine, &of(100), &b, to.clone());
    let n = 2 * CHUNK + 9;
    assert_eq!((result.tokens, result.missed(MissCause::NotFound)), (n, (100 - n).div_ceil(CHUNK)));
    assert_same("prefix", (&a, &from[..n]), (&b, &to[..n]));
    assert!(to[n..].iter().all(|&s| result.failed_blocks.contains(&(s as u32 / BLOCK as u32))));
    let other = engine.prompt(&tokens(100, 6), &Extra::default());
    assert_eq!(matched(&engine, &other), 0);
    // A full chunk in the place of the partial ones counts for more.
    assert_eq!(store(&engine, &of(100), &a, from).stored, 100usize.div_ceil(CHUNK) - 2);
    assert_eq!(matched(&engine, &of(100)), 100);
    assert!(engine.contains(&of(100)).unwrap() && !engine.contains(&other).unwrap());
}

#[test]
fn prompts_of_many_lengths_below_a_chunk_are_all_found() {
    let w = World::new(Shape::all().remove(0));
    let engine = w.open();
    let a = w.kv().filled(4);
    // The index lists eight lengths of each parent.
    let prompts: Vec<Prompt> = (1..CHUNK).map(|n| prompt(&engine, n, 100 + n as u32)).collect();
    assert!(prompts.len() > 10);
    for p in &prompts {
        assert_eq!(store(&engine, p, &a, slots(p.len(), 1)).stored, 1);
    }
    for p in &prompts {
        let b = w.kv();
        assert_eq!(matched(&engine, p), p.len());
        assert_eq!(load(&engine, p, &b, slots(p.len(), 2)).tokens, p.len());
        assert_same("partial", (&a, &slots(p.len(), 1)), (&b, &slots(p.len(), 2)));
    }
}

#[test]
fn a_load_writes_nothing_outside_its_mask_and_its_tokens() {
    let w = World::plain();
    let engine = w.open();
    let n = 3 * CHUNK;
    let p = prompt(&engine, n, 1);
    let (a, from, to) = (w.kv().filled(2), slots(n, 1), slots(n, 2));
    assert_eq!(store(&engine, &p, &a, from.clone()).stored, 3);
    let b = w.kv();
    let mut mask = vec![true; n];
    mask[..CHUNK].fill(false);
    mask[20] = false;
    let mut skip = to.clone();
    skip[30] = -1;
    let mut request = LoadRequest::new(&p, &b.kv, SlotMapping::new(skip).masked(mask.clone()));
    request.tokens = Some(n - 1);
    let result = engine.load(request).unwrap().wait();
    assert_eq!(result.tokens, n - 1);
    for t in 0..n {
        let written = t >= CHUNK && t != 20 && t != 30 && t != n - 1;
        for layer in 0..a.layers() {
            let (x, y) = (a.slot(layer, from[t] as usize), b.slot(layer, to[t] as usize));
            assert!(if written { x == y } else { y.iter().all(|&v| v == 0) }, "token {t}");
        }
    }
    assert_eq!(w.open().stats().unwrap().loads, 0, "another engine counts for itself");
}

#[test]
fn layers_are_stored_and_loaded_one_by_one() {
    let w = World::plain();
    let engine = w.open();
    let n = 5 * CHUNK;
    let p = prompt(&engine, n, 1);
    let (a, from, to) = (w.kv().filled(2), slots(n, 1), slots(n, 2));
    let before = w.kv().filled(2);
    let store = engine.store(StoreRequest::new(&p, &a.kv, from.clone())).unwrap();
    for layer in 0..a.layers() {
        store.layer(layer).unwrap();
        store.wait_gathered(layer).unwrap();
    }
    a.overwrite(0xDD);
    assert_eq!(store.wait().stored, 5);
    let b = w.kv();
    let load = engine.load(LoadRequest::new(&p, &b.kv, to.clone())).unwrap();
    for layer in 0..load.layers() {
        assert_eq!(load.wait_layer(layer).unwrap().tokens, n);
        for t in 0..n {
            assert_eq!(before.slot(layer, from[t] as usize), b.slot(layer, to[t] as usize));
        }
    }
    let stats = engine.stats().unwrap();
    assert_eq!((stats.loads, stats.loaded_tokens, stats.stored_chunks), (1, n as u64, 5));
    assert_eq!(stats.active_loads + stats.active_stores, 0);
}

#[test]
fn salts_are_kept_apart_and_removed_apart() {
    let w = World::plain();
    let engine = w.open();
    let t = tokens(2 * CHUNK, 1);
    let (a, map) = (w.kv().filled(1), slots(2 * CHUNK, 1));
    let salted = |s: &str| Prompt::new(&t, CHUNK as u32, &Extra::salted(s));
    for p in [salted("x"), salted("y"), engine.prompt(&t, &Extra::default())] {
        assert_eq!(store(&engine, &p, &a, map.clone()).stored, 2);
    }
    assert_eq!(engine.remove_tenant("x").unwrap(), 2);
    assert_eq!((matched(&engine, &salted("x")), matched(&engine, &salted("y"))), (0, 2 * CHUNK));
    assert_eq!(engine.remove(&salted("y")).unwrap(), 2);
    assert_eq!(matched(&engine, &salted("y")), 0);
    let plain = engine.prompt(&t, &Extra::default());
    assert_eq!(matched(&engine, &plain), 2 * CHUNK);
    engine.clear().unwrap();
    assert_eq!(matched(&engine, &plain), 0);
    assert_eq!(store(&engine, &plain, &a, map).stored, 2, "what was removed can be stored again");
    drop(engine);
    let engine = w.open();
    assert_eq!((matched(&engine, &plain), matched(&engine, &salted("y"))), (2 * CHUNK, 0));
}

#[test]
fn removing_a_prompt_removes_its_partial_chunks_too() {
    let w = World::plain();
    let engine = w.open();
    let p = prompt(&engine, CHUNK + 5, 1);
    assert_eq!(store(&engine, &p, &w.kv().filled(1), slots(CHUNK + 5, 1)).stored, 2);
    assert_eq!(engine.remove(&p).unwrap(), 2);
    assert_eq!(matched(&engine, &p), 0);
}

#[test]
fn removing_a_prompt_removes_partial_chunks_that_the_list_leaves_out() {
    let w = World::plain();
    let engine = w.open();
    let (a, map) = (w.kv().filled(1), slots(CHUNK, 1));
    // Prompts of every length, all after the same root: the list of lengths there has no room for
    // the short ones.
    let short = prompt(&engine, 3, 3);
    for len in (1..CHUNK).rev() {
        let p = prompt(&engine, len, len as u32);
        assert_eq!(store(&engine, &p, &a, map[..len].to_vec()).stored, 1);
    }
    assert_eq!(
        matched(&engine, &prompt(&engine, 4, 3)),
        0,
        "the list leaves it out, and longer prompts do not find it"
    );
    assert_eq!(matched(&engine, &short), 3, "who asks for all of it does");
    assert_eq!(engine.remove(&short).unwrap(), 1, "it is removed all the same");
    let key = short.partial_key(0, 3).unwrap();
    assert!(!engine.log().unwrap().contains(&key), "it would be found again once the list has room");
}

#[test]
fn what_has_expired_is_a_miss() {
    let mut w = World::plain();
    let clock = TestClock::new();
    w.clock = Some(Arc::clone(&clock) as _);
    w.settings.ttl = Some(Duration::from_secs(100));
    let engine = w.open();
    let (usual, longer) = (prompt(&engine, CHUNK, 1), prompt(&engine, CHUNK, 2));
    let a = w.kv().filled(1);
    assert_eq!(store(&engine, &usual, &a, slots(CHUNK, 1)).stored, 1);
    let mut request = StoreRequest::new(&longer, &a.kv, slots(CHUNK, 1));
    request.ttl = Some(Duration::from_secs(1000));
    let s = engine.store(request).unwrap();
    s.all_layers();
    assert_eq!(s.wait().stored, 1);
    clock.advance_s(99);
    assert_eq!((matched(&engine, &usual), matched(&engine, &longer)), (CHUNK, CHUNK));
    clock.advance_s(2);
    assert_eq!((matched(&engine, &usual), matched(&engine, &longer)), (0, CHUNK));
    let b = w.kv();
    assert_eq!(load(&engine, &usual, &b, slots(CHUNK, 1)).missed(MissCause::NotFound), 1);
}

#[test]
fn a_read_only_engine_loads_and_does_not_store() {
    let mut w = World::plain();
    let engine = w.open();
    let p = prompt(&engine, 2 * CHUNK, 1);
    let (a, map) = (w.kv().filled(1), slots(2 * CHUNK, 1));
    assert_eq!(store(&engine, &p, &a, map.clone()).stored, 2);
    engine.flush().unwrap();
    drop(engine);
    w.settings.mode = Mode::Ro;
    let engine = w.open();
    let b = w.kv();
    assert_eq!(load(&engine, &p, &b, map.clone()).tokens, 2 * CHUNK);
    assert_same("read-only", (&a, &map), (&b, &map));
    let other = prompt(&engine, 2 * CHUNK, 2);
    let result = store(&engine, &other, &a, map);
    assert_eq!((result.stored, result.sheds.len()), (0, 1));
}

#[test]
fn the_settings_decide_what_is_stored_and_how_loads_return() {
    let mut w = World::plain();
    w.settings.save_unfull_chunk = false;
    w.settings.save_decode_cache = false;
    w.settings.enable_async_loading = false;
    w.settings.use_layerwise = false.into();
    let engine = w.open();
    let n = 3 * CHUNK + 5;
    let p = prompt(&engine, n, 1);
    let (a, map) = (w.kv().filled(1), slots(n, 1));
    let mut request = StoreRequest::new(&p, &a.kv, map.clone());
    request.prompt_tokens = Some(2 * CHUNK + 1);
    let s = engine.store(request).unwrap();
    s.all_layers();
    assert_eq!(s.wait().stored, 2, "neither the generated tokens nor the rest of the prompt");
    let b = w.kv();
    let l = engine.load(LoadRequest::new(&p, &b.kv, map[..2 * CHUNK].to_vec())).unwrap();
    assert!(l.is_finished(), "a load returns when it is done");
    assert_eq!(l.wait().tokens, 2 * CHUNK);
    drop(engine);
    w.settings.save_decode_cache = true;
    w.settings.save_unfull_chunk = true;
    let engine = w.open();
    let mut request = StoreRequest::new(&p, &a.kv, map);
    request.prompt_tokens = Some(2 * CHUNK + 1);
    let s = engine.store(request).unwrap();
    s.all_layers();
    let result = s.wait();
    assert_eq!((result.stored, result.already_there), (2, 2), "{result:?}");
}

#[test]
fn pinned_chunks_are_told_and_a_second_engine_shares_the_cache() {
    let w = World::plain();
    let (one, two) = (w.open(), w.open());
    let p = prompt(&one, 2 * CHUNK, 1);
    let (a, map) = (w.kv().filled(1), slots(2 * CHUNK, 1));
    assert_eq!(store(&one, &p, &a, map.clone()).stored, 2);
    let pinned = two.lookup(&p, 1000).unwrap();
    assert_eq!((pinned.matched_tokens, pinned.full_chunks, pinned.pinned_chunks()), (2 * CHUNK, 2, 2));
    let b = w.kv();
    assert_eq!(load(&two, &p, &b, map.clone()).tokens, 2 * CHUNK);
    assert_same("shared", (&a, &map), (&b, &map));
    let result = store(&two, &p, &a, map);
    assert_eq!((result.stored, result.already_there), (0, 2));
}

#[test]
fn a_cache_of_two_drives_serves_in_either_placement_and_order() {
    for placement in [Placement::Chain, Placement::Stripe] {
        let mut w = World::plain();
        w.settings.placement = placement;
        w.settings.capacity = Capacity::Bytes(128 << 20);
        w.settings.drives = ["a", "b"].iter().map(|d| forebay::config::DriveSettings::new(w.path().join(d))).collect();
        let engine = w.open();
        let n = 6 * CHUNK;
        let (a, from, to) = (w.kv().filled(1), slots(n, 1), slots(n, 2));
        let prompts: Vec<_> = (0..4).map(|i| prompt(&engine, n, i)).collect();
        for p in &prompts {
            assert_eq!(store(&engine, p, &a, from.clone()).stored, 6, "{placement:?}");
        }
        let stats = engine.stats().unwrap();
        assert_eq!((stats.paths.len(), stats.log.drives.len()), (2, 2));
        if placement == Placement::Stripe {
            assert!(stats.log.drives.iter().all(|d| d.chunks > 0), "{:?}", stats.log.drives);
        }
        drop(engine);
        w.settings.drives.reverse();
        let engine = w.open();
        for p in &prompts {
            let b = w.kv();
            assert_eq!(load(&engine, p, &b, to.clone()).tokens, n, "{placement:?}, reordered");
            assert_same("drives", (&a, &from), (&b, &to));
        }
    }
}

#[test]
fn opaque_blocks_that_are_mapped_in_part_are_neither_stored_nor_loaded() {
    let w = World::new(Shape::all().into_iter().find(Shape::is_opaque).unwrap());
    let engine = w.open();
    let n = 2 * CHUNK;
    let p = prompt(&engine, n, 1);
    let (a, map) = (w.kv().filled(1), slots(n, 1));
    let mut shuffled = map.clone();
    shuffled.swap(CHUNK, CHUNK + 1);
    let result = store(&engine, &p, &a, shuffled);
    assert_eq!((result.stored, result.shed(ShedCause::Unmapped)), (1, 1), "{result:?}");
    assert_eq!(store(&engine, &p, &a, map.clone()).stored, 1);
    let b = w.kv();
    let mut holed = map.clone();
    holed[CHUNK + 5] = -1;
    let result = load(&engine, &p, &b, holed);
    assert_eq!((result.tokens, result.missed(MissCause::Unmapped)), (CHUNK, 1), "{result:?}");
    let block = (map[CHUNK + 4] as usize / BLOCK) as u32;
    assert!(result.failed_blocks.contains(&block));
    assert!(b.slot(0, map[CHUNK + 4] as usize).iter().all(|&x| x == 0), "a block in part is left alone");
}
