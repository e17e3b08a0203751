use super::*;

fn shape(layout: KvLayout, packing: Packing) -> KvShape {
    KvShape { layout, packing, block_tokens: 4, num_blocks: 3 }
}

fn kv() -> LayerSpec {
    LayerSpec::kv(LayerKind::Full, 2, 10)
}

fn strides(l: &PagedLayout, layer: usize, plane: usize) -> (usize, usize, usize, usize, usize) {
    let p = l.layer(layer).unwrap().planes[plane];
    (p.memory, p.offset, p.block_stride, p.token_stride, p.head_stride)
}

#[test]
fn dense_layouts_have_the_strides_of_their_dimensions() {
    let two = [kv(), kv()];
    let l = PagedLayout::per_layer(&two, shape(KvLayout::Nhd, Packing::Split)).unwrap();
    assert_eq!(strides(&l, 1, 1), (3, 0, 80, 20, 10));
    assert_eq!(l.memory_bytes(), [240; 4]);
    let l = PagedLayout::per_layer(&two, shape(KvLayout::Hnd, Packing::Outer)).unwrap();
    assert_eq!(strides(&l, 1, 1), (1, 240, 80, 10, 40));
    assert_eq!(l.memory_bytes(), [480; 2]);
    let l = PagedLayout::per_layer(&two, shape(KvLayout::Nhd, Packing::Inner)).unwrap();
    assert_eq!(strides(&l, 0, 1), (0, 80, 160, 20, 10));
    assert_eq!(l.memory_bytes(), [480; 2]);
}

#[test]
fn a_block_of_all_layers_holds_heads_with_k_and_v_halves() {
    let l = PagedLayout::cross_layer(&[kv(), kv(), kv()], shape(KvLayout::Hnd, Packing::Row)).unwrap();
    assert_eq!(strides(&l, 2, 1), (0, 2 * 160 + 10, 480, 20, 80));
    assert_eq!(l.memory_bytes(), [3 * 480]);
    assert!(PagedLayout::cross_layer(&[kv()], shape(KvLayout::Nhd, Packing::Split)).is_err());
}

#[test]
fn mla_rows_lie_apart_or_in_one_row() {
    let spec = [LayerSpec::mla(&[576, 132])];
    let l = PagedLayout::per_layer(&spec, shape(KvLayout::Mla, Packing::Split)).unwrap();
    assert_eq!(l.memory_bytes(), [576 * 12, 132 * 12]);
    let l = PagedLayout::per_layer(&spec, shape(KvLayout::Mla, Packing::Row)).unwrap();
    assert_eq!(strides(&l, 0, 1), (0, 576, 708 * 4, 708, 708));
    assert_eq!(l.memory_bytes(), [708 * 12]);
    assert!(PagedLayout::per_layer(&[kv()], shape(KvLayout::Mla, Packing::Split)).is_err());
}

#[test]
fn opaque_blocks_need_the_blocks_of_their_spec() {
    let l = PagedLayout::per_layer(&[LayerSpec::opaque(4, 33)], shape(KvLayout::Opaque, Packing::Split)).unwrap();
    assert_eq!(l.memory_bytes(), [99]);
    assert!(PagedLayout::per_layer(&[LayerSpec::opaque(8, 33)], shape(KvLayout::Opaque, Packing::Split)).is_err());
    assert!(PagedLayout::per_layer(&[kv()], shape(KvLayout::Opaque, Packing::Split)).is_err());
}

#[test]
fn elements_that_would_share_bytes_are_refused() {
    let ok = PagedLayout::per_layer(&[kv()], shape(KvLayout::Nhd, Packing::Split)).unwrap();
    let break_it = |change: fn(&mut LayerView)| {
        let mut view = ok.layer(0).unwrap().clone();
        change(&mut view);
        PagedLayout::custom(&[kv()], vec![view]).unwrap_err().to_string()
    };
    assert!(break_it(|v| v.planes[0].token_stride = 19).contains("token stride of 19"));
    assert!(break_it(|v| v.planes[1].block_stride = 0).contains("plane 1: block stride of 0"));
    assert!(break_it(|v| v.planes[1].memory = 0).contains("starts where"));
    assert!(break_it(|v| v.planes[0].block_stride = usize::MAX).contains("overflow"));
    assert!(break_it(|v| v.planes[0].offset = usize::MAX - 8).contains("overflow"));
    assert!(break_it(|v| v.planes.truncate(1)).contains("1 plane views for 2"));
    assert!(break_it(|v| v.num_blocks = 0).contains("0 blocks"));
}
