use super::*;

#[test]
fn presets_have_the_published_sizes() {
    let g = Geometry::preset("llama-3.1-8b").unwrap();
    assert_eq!((g.layers.len(), g.extent_bytes(0, 256), g.chunk_bytes(256)), (32, 1 << 20, 32 << 20));
    let g = Geometry::preset("deepseek-v3").unwrap();
    assert_eq!((g.layers.len(), g.extent_bytes(0, 256)), (61, 288 << 10));
    assert_eq!(Geometry::preset("llama-3.1-70b-tp8").unwrap().extent_bytes(0, 256), 128 << 10);
    for name in PRESETS {
        Geometry::preset(name).unwrap();
    }
    assert_eq!(Geometry::preset("gpt-2").unwrap_err().kind(), ErrorKind::InvalidInput);
}

#[test]
fn the_fingerprint_changes_with_everything_that_changes_the_bytes() {
    let base = Geometry::preset("tiny").unwrap();
    let mut seen = vec![base.fingerprint()];
    let tp = Shard { tp: (1, 2), ..Shard::default() };
    let mut dtype = base.clone();
    dtype.dtype = DType::named("float16").unwrap();
    let mut layers = base.layers.to_vec();
    layers[0].planes.truncate(1);
    for other in [
        dtype,
        base.clone().with_chunk_tokens(32).unwrap(),
        base.clone().with_shard(tp).unwrap(),
        base.clone().with_identity("model_revision", "a"),
        base.clone().with_identity("model_revision", "b"),
        Geometry { layers: layers.into(), ..base.clone() },
    ] {
        let f = other.fingerprint();
        assert!(!seen.contains(&f), "{other:?}");
        seen.push(f);
    }
    let rank0 = base.clone().with_shard(Shard { tp: (0, 2), ..Shard::default() }).unwrap();
    let rank1 = base.with_shard(tp).unwrap();
    assert_eq!(rank0.fingerprint(), rank1.fingerprint(), "ranks of one model share the namespace");
    assert_ne!(rank0.shard_dir_name(), rank1.shard_dir_name());
    let staged = |block: u32| {
        let shard = Shard { pp: (0, 2), ..Shard::default() };
        let dtype = DType { name: "x".into(), bytes: 1 };
        let opaque = Geometry::new("m", dtype, vec![LayerSpec::opaque(block, block * 100)], 256).unwrap();
        opaque.with_shard(shard).unwrap().fingerprint()
    };
    assert_ne!(staged(16), staged(32), "equal slots, of blocks whose bytes may lie in another order");
}

#[test]
fn replicated_kv_is_stored_once_for_all_tensor_parallel_ranks() {
    let g = Geometry::preset("deepseek-v3").unwrap();
    let on = |rank| g.clone().with_shard(Shard { tp: (rank, 8), ..Shard::default() }).unwrap();
    assert_eq!(on(0).shard_dir_name(), on(7).shard_dir_name());
    assert_eq!(on(3).fingerprint(), g.fingerprint());
}

#[test]
fn mixed_planes_and_opaque_blocks_have_their_sizes() {
    let mixed = LayerSpec::mla(&[576, 132]);
    assert_eq!(mixed.extent_bytes(256), 256 * 708);
    let opaque = LayerSpec::opaque(16, 5000);
    assert_eq!(opaque.extent_bytes(17), 10_000);
    let dtype = DType { name: "x".into(), bytes: 1 };
    assert!(Geometry::new("m", dtype.clone(), vec![opaque], 256).is_ok());
    for bad in [vec![], vec![LayerSpec::opaque(3, 8)], vec![LayerSpec::mla(&[0])], vec![LayerSpec::mla(&[u32::MAX])]] {
        assert!(Geometry::new("m", dtype.clone(), bad, 256).is_err());
    }
}
