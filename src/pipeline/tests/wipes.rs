//! What does not verify is overwritten with zeros in the server's memory, in whatever order header
//! and layers come and however the load ends.

use std::time::Duration;

use super::disk::Fate;
use super::world::{Kv, LAYERS, TOKENS, World};
use crate::error::ErrorKind;
use crate::pipeline::{Load, LoadTimeout};

const T: usize = TOKENS as usize;
/// Memories of a layer: one for keys, one for values.
const MEMORIES: usize = 2;

/// Waits until the device has nothing to do: only reads that are held have staging.
fn wait_scattered(w: &World) {
    while w.pipeline().load_pool().taken() > w.disk.held().len() {
        std::thread::yield_now();
    }
}

fn is_zero(to: &Kv, chunk: usize, layers: std::ops::Range<usize>) -> bool {
    let at = layers.start * MEMORIES..layers.end * MEMORIES;
    to.chunk_bytes(chunk)[at].iter().flatten().all(|b| *b == 0)
}

fn begin(w: &World, layerwise: bool, to: &Kv, slots: &[std::sync::Arc<super::disk::Slot>]) -> Load {
    if layerwise { w.load(to, slots) } else { w.whole_load(to, slots) }
}

#[test]
fn layers_are_wiped_whose_header_cannot_be_read_or_is_damaged() {
    for (layerwise, unreadable) in [(true, true), (true, false), (false, true), (false, false)] {
        let w = World::new(8, 4);
        let (slots, _) = w.stored(1);
        w.disk.pause();
        let to = w.kv(1).filled(9);
        let load = begin(&w, layerwise, &to, &slots);
        w.disk.wait_held(LAYERS);
        (1..LAYERS).rev().for_each(|at| w.disk.end_one(at));
        wait_scattered(&w);
        if unreadable {
            w.disk.fate(slots[0].slot, Fate::Fail(ErrorKind::Io));
        } else {
            w.disk.flip(slots[0].slot, u64::from(slots[0].layout.header_offset) + 100);
        }
        w.disk.end_one(0);
        assert_eq!(load.wait().tokens, 0);
        assert!(is_zero(&to, 0, 1..LAYERS), "layerwise {layerwise}, unreadable {unreadable}");
        w.assert_staging_free();
    }
}

#[test]
fn layers_are_wiped_of_a_chunk_that_lost_its_prefix_before_its_header_came() {
    let w = World::new(16, 4);
    let (slots, _) = w.stored(2);
    w.disk.flip(slots[0].slot, slots[0].layout.extents[0].offset);
    w.disk.pause();
    let to = w.kv(2).filled(9);
    let load = w.load(&to, &slots);
    w.disk.wait_held(2 * LAYERS);
    // Reads are held layer by layer, in each layer those of both chunks.
    (1..LAYERS).rev().for_each(|layer| w.disk.end_one(2 * layer + 1));
    wait_scattered(&w);
    w.disk.end_one(0);
    assert_eq!(load.wait().tokens, 0);
    assert!(is_zero(&to, 0, 0..1) && is_zero(&to, 1, 1..LAYERS));
    w.disk.run();
    w.assert_staging_free();
}

#[test]
fn a_layer_is_wiped_when_another_cannot_be_read_before_the_header_came() {
    let w = World::new(8, 4);
    let (slots, _) = w.stored(1);
    w.disk.pause();
    let to = w.kv(1).filled(9);
    let load = w.load(&to, &slots);
    w.disk.wait_held(LAYERS);
    w.disk.end_one(2);
    wait_scattered(&w);
    w.disk.fate(slots[0].slot, Fate::Fail(ErrorKind::Io));
    w.disk.end_one(1);
    assert_eq!(load.wait().tokens, 0);
    assert!(is_zero(&to, 0, 2..3));
    w.disk.run();
    w.assert_staging_free();
}

#[test]
fn wiping_waits_for_a_slot_of_staging_and_the_load_for_that() {
    let w = World::new(1, 4);
    let (slots, from) = w.stored(2);
    w.disk.flip(slots[0].slot, slots[0].layout.extents[0].offset);
    w.disk.pause();
    let (to, other) = (w.kv(1).filled(9), w.kv(1));
    let (load, holder) = (w.load(&to, &slots[..1]), w.load(&other, &slots[1..]));
    w.disk.wait_held(1);
    w.disk.end_one(0);
    // The slot that this read gives back goes to the other load's read before the CRC is compared.
    w.disk.wait_held(1);
    assert_eq!(load.wait_for(Duration::from_millis(5)), None);
    w.disk.run();
    assert_eq!(load.wait().tokens, 0);
    assert!(is_zero(&to, 0, 0..1));
    assert_eq!(holder.wait().tokens, T);
    assert!(other.chunk_bytes(0) == from.chunk_bytes(1));
    w.assert_staging_free();
}

#[test]
fn a_load_whose_wiping_finds_no_staging_is_over_at_its_deadline() {
    let w = World::new(1, 4);
    let (slots, _) = w.stored(2);
    w.disk.flip(slots[0].slot, slots[0].layout.extents[0].offset);
    w.disk.pause();
    let (to, other) = (w.kv(1).filled(9), w.kv(1));
    let mut spec = w.load_spec(&to, &slots[..1]);
    spec.timeout = Some(LoadTimeout::Total(Duration::from_millis(200)));
    let (load, _holder) = (w.pipeline().load(spec).unwrap(), w.load(&other, &slots[1..]));
    w.disk.wait_held(1);
    w.disk.end_one(0);
    w.disk.wait_held(1);
    let result = load.wait();
    assert_eq!((result.tokens, w.pipeline().load_pool().taken()), (0, 1), "{result:?}");
    w.disk.run();
    w.assert_staging_free();
}
