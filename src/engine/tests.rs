//! What needs a look inside the engine; everything else is tested from outside in
//! `tests/engine_*.rs`.

use std::sync::Arc;

use super::plan::Planner;
use super::{Engine, LoadRequest, Prompt, SlotMapping, StoreRequest};
use crate::config::Settings;
use crate::device::{HostDevice, PagedKv};
use crate::error::ErrorKind;
use crate::geometry::{Geometry, LayerSpec};
use crate::key::Extra;
use crate::paged::{KvLayout, KvShape, Packing, PagedLayout};
use crate::process::ForkGuard;

fn kv(geometry: &Geometry) -> Arc<PagedKv> {
    let shape = KvShape { layout: KvLayout::Nhd, packing: Packing::Split, block_tokens: 4, num_blocks: 16 };
    PagedKv::alloc_zeroed(PagedLayout::per_layer(&geometry.layers, shape).unwrap()).unwrap().0
}

fn tiny() -> Geometry {
    Geometry::preset("tiny").unwrap()
}

#[test]
fn a_forked_child_gets_errors_and_drops_nothing() {
    let mut settings = Settings::at("/no/such/place/at/all");
    (settings.chunk_size, settings.hugepages) = (16, false);
    let device = HostDevice::new(1).unwrap();
    let mut engine = Engine::open(&settings, tiny(), device).unwrap();
    // The thread that tries to open the cache again holds a weak reference until it ends.
    engine.inner.opening.stop_trying();
    while Arc::get_mut(&mut engine.inner).is_none() {
        std::thread::yield_now();
    }
    Arc::get_mut(&mut engine.inner).unwrap().forks = ForkGuard::of_another_process();
    let kv = kv(engine.geometry());
    let prompt = engine.prompt(&[1; 32], &Extra::default());
    let kinds = [
        engine.lookup(&prompt, 0).unwrap_err().kind(),
        engine.load(LoadRequest::new(&prompt, &kv, vec![0; 32])).unwrap_err().kind(),
        engine.store(StoreRequest::new(&prompt, &kv, vec![0; 32])).unwrap_err().kind(),
        engine.contains(&prompt).unwrap_err().kind(),
        engine.remove(&prompt).unwrap_err().kind(),
        engine.flush().unwrap_err().kind(),
        engine.stats().unwrap_err().kind(),
        engine.close(std::time::Instant::now()).unwrap_err().kind(),
    ];
    assert_eq!(kinds, [ErrorKind::Forked; 8]);
    assert!(!engine.is_up() && engine.log().is_none());
    let inner = Arc::downgrade(&engine.inner);
    drop(engine);
    let inner = inner.upgrade().expect("the child must not take the parent's engine apart");
    inner.pipeline.close(std::time::Instant::now());
}

#[test]
fn plans_are_made_per_group_and_block_size_and_skip_what_is_beyond_the_mapping() {
    let mut layers = tiny().layers.to_vec();
    layers[1].group = 7;
    layers[3].group = 7;
    let geometry = Geometry::new("m", tiny().dtype, layers, 16).unwrap();
    let kv = kv(&geometry);
    let slots: Vec<i64> = (0..20).collect();
    let one = SlotMapping::new(slots.clone());
    let planner = Planner::new(&geometry, &kv, &one, 19).unwrap();
    assert_eq!(planner.layer_classes[..], [0, 0, 0, 0]);
    let two = SlotMapping::per_group(vec![slots.clone().into(), slots.iter().map(|s| s + 32).collect()]);
    let planner = Planner::new(&geometry, &kv, &two, 19).unwrap();
    assert_eq!(planner.layer_classes[..], [0, 1, 0, 1]);
    let plans = planner.plans(16..32).unwrap();
    let sizes = |layer| plans.of(layer).map(|p| (p.tokens(), p.chunk_tokens()));
    assert_eq!([sizes(0), sizes(1)], [Some((3, 16)); 2]);
    assert_eq!(plans.block_ids(), [4, 12]);
    let masked = one.masked(vec![false; 20]);
    assert!(Planner::new(&geometry, &kv, &masked, 19).unwrap().plans(0..16).unwrap().is_empty());
}

#[test]
fn memory_that_is_not_the_geometrys_is_refused() {
    let mut layers = tiny().layers.to_vec();
    layers[2] = LayerSpec::mla(&[64]);
    let other = Geometry::new("m", tiny().dtype, layers, 16).unwrap();
    let mapping = SlotMapping::new(vec![0; 16]);
    let e = Planner::new(&other, &kv(&tiny()), &mapping, 16).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::InvalidInput);
    assert!(e.to_string().contains("layer 2"), "{e}");
}

#[test]
fn a_growing_prompt_hashes_only_what_is_new() {
    let all: Vec<u32> = (0..100).collect();
    let extra = Extra::salted("s");
    let short = Prompt::new(&all[..33], 16, &extra);
    let long = short.extended(&all[33..]);
    assert_eq!(long.keys(), Prompt::new(&all, 16, &extra).keys());
    assert_eq!((short.len(), short.keys().len(), long.len()), (33, 2, 100));
    assert_ne!(long.tenant(), 0);
    assert_eq!(short.partial_key(2, 1), long.partial_key(2, 1));
    assert_eq!((short.partial_key(2, 2), short.partial_key(9, 1)), (None, None));
}
