//! The layout of a paged KV cache: for every layer and plane, where a block, a token and a head
//! start.
//!
//! Every layout is checked when it is made: the strides of a plane never let two of its elements
//! share a byte. [`PagedLayout::memory_bytes`] is the exact reach into each memory, which
//! `device::PagedKv` compares with the memories' lengths.

use crate::error::{Error, ErrorKind, Result};
use crate::geometry::{LayerKind, LayerSpec, PlaneSpec};

/// Order of the dimensions inside one block of one plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvLayout {
    /// `[block_tokens][heads][head_bytes]`.
    Nhd,
    /// `[heads][block_tokens][head_bytes]`.
    Hnd,
    /// `[block_tokens][row]`: planes of one head each.
    Mla,
    /// Bytes that only the server understands; blocks move whole.
    Opaque,
}

/// How the planes of one layer (K and V; an MLA row and its indexer row) lie beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Packing {
    /// Each plane in a memory of its own: `[blocks]…` per plane.
    Split,
    /// One memory, plane by plane: `[2][blocks]…`.
    Outer,
    /// One memory, planes inside the block: `[blocks][2]…`.
    Inner,
    /// One memory, planes side by side in the row of one head: `[blocks]…[k bytes + v bytes]`; an
    /// MLA row of 576 + 132.
    Row,
}

/// Shape of a server's paged KV cache that all its layers share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Order inside a block; layers of an opaque kind are opaque in every layout.
    pub layout: KvLayout,
    /// How planes lie beside each other.
    pub packing: Packing,
    /// Tokens of one block.
    pub block_tokens: u32,
    /// Blocks in the cache.
    pub num_blocks: u32,
}

/// One plane of one layer: the address arithmetic of its bytes, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneView {
    /// Which of the cache's memories.
    pub memory: usize,
    /// Offset of block 0, token 0, head 0.
    pub offset: usize,
    /// From one block to the next.
    pub block_stride: usize,
    /// From one token of a block to the next; unused in opaque layers.
    pub token_stride: usize,
    /// From one head of a token to the next; unused in opaque layers.
    pub head_stride: usize,
}

/// One layer: its planes in the order of its spec (opaque layers have one), and the shape of its
/// blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerView {
    /// Planes; one for an opaque layer.
    pub planes: Vec<PlaneView>,
    /// Tokens of one block.
    pub block_tokens: u32,
    /// Blocks of the layer.
    pub num_blocks: u32,
}

/// A checked layout of all layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagedLayout {
    specs: Vec<LayerSpec>,
    layers: Vec<LayerView>,
    memory_bytes: Vec<usize>,
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("paged KV: {what}"))
}

impl PagedLayout {
    /// A layout from views made by hand, for example from the strides of a server's tensors.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where layers or planes do not match the specs, a dimension is
    /// zero, an offset overflows, two elements of a plane share bytes, or two planes start at the
    /// same byte.
    pub fn custom(specs: &[LayerSpec], layers: Vec<LayerView>) -> Result<Self> {
        if specs.len() != layers.len() || specs.is_empty() {
            return Err(invalid(format!("{} layer views for {} layers", layers.len(), specs.len())));
        }
        let mut memory_bytes = Vec::new();
        let mut starts = std::collections::HashSet::new();
        for (l, (spec, view)) in specs.iter().zip(&layers).enumerate() {
            if view.block_tokens == 0 || view.num_blocks == 0 {
                return Err(invalid(format!("layer {l}: {} blocks of {} tokens", view.num_blocks, view.block_tokens)));
            }
            let opaque = matches!(spec.kind, LayerKind::Opaque { .. });
            let strided_tokens = if opaque { 1 } else { view.block_tokens };
            for (p, (plane, dims)) in view.planes.iter().zip(plane_dims(l, spec, view)?).enumerate() {
                let end = reach(plane, view, dims, strided_tokens)
                    .map_err(|what| invalid(format!("layer {l}, plane {p}: {what}")))?;
                if !starts.insert((plane.memory, plane.offset)) {
                    return Err(invalid(format!("layer {l}, plane {p} starts where another plane starts")));
                }
                if plane.memory >= MAX_MEMORIES {
                    return Err(invalid(format!("layer {l}, plane {p}: memory {} of {MAX_MEMORIES}", plane.memory)));
                }
                if memory_bytes.len() <= plane.memory {
                    memory_bytes.resize(plane.memory + 1, 0);
                }
                if let Some(bytes) = memory_bytes.get_mut(plane.memory) {
                    *bytes = end.max(*bytes);
                }
            }
        }
        Ok(Self { specs: specs.to_vec(), layers, memory_bytes })
    }

    /// A layout with memories per layer, in layer order: one for each layer, or one for each plane
    /// with [`Packing::Split`] (K of layer 0, V of layer 0, K of layer 1 …). The first plane of
    /// each memory starts at its first byte.
    ///
    /// # Errors
    /// As [`PagedLayout::custom`], and where the shape does not suit a spec.
    pub fn per_layer(specs: &[LayerSpec], shape: KvShape) -> Result<Self> {
        let mut memory = 0;
        let mut layers = Vec::with_capacity(specs.len());
        for (l, spec) in specs.iter().enumerate() {
            let view = layer_view(spec, shape, (memory, 0)).map_err(|what| invalid(format!("layer {l}: {what}")))?;
            memory = view.planes.iter().map(|p| p.memory + 1).max().unwrap_or(memory + 1);
            layers.push(view);
        }
        Self::custom(specs, layers)
    }

    /// A layout of one memory in which a block holds all layers: `[blocks][layers]…`. With
    /// [`KvLayout::Hnd`] and [`Packing::Row`] a block is
    /// `[layers][heads][block_tokens][k bytes + v bytes]`.
    ///
    /// # Errors
    /// As [`PagedLayout::custom`], and for packings that do not keep the planes of a block
    /// together.
    pub fn cross_layer(specs: &[LayerSpec], shape: KvShape) -> Result<Self> {
        let apart = matches!(shape.packing, Packing::Split | Packing::Outer);
        if apart && specs.iter().any(|s| s.planes.len() > 1) {
            return Err(invalid(format!("a block of all layers cannot have {:?} planes", shape.packing)));
        }
        let mut layers = Vec::with_capacity(specs.len());
        let mut block_stride = 0usize;
        for (l, spec) in specs.iter().enumerate() {
            let view =
                layer_view(spec, shape, (0, block_stride)).map_err(|what| invalid(format!("layer {l}: {what}")))?;
            let bytes = view.planes.iter().map(|p| p.block_stride).max().unwrap_or(0);
            block_stride = block_stride.checked_add(bytes).ok_or_else(|| invalid("a block overflows".to_owned()))?;
            layers.push(view);
        }
        for plane in layers.iter_mut().flat_map(|l| &mut l.planes) {
            plane.block_stride = block_stride;
        }
        Self::custom(specs, layers)
    }

    /// The spec of layer `layer` that the layout was checked against.
    #[must_use]
    pub fn spec(&self, layer: usize) -> Option<&LayerSpec> {
        self.specs.get(layer)
    }

    /// The view of layer `layer`.
    #[must_use]
    pub fn layer(&self, layer: usize) -> Option<&LayerView> {
        self.layers.get(layer)
    }

    /// Number of layers.
    #[must_use]
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Bytes that each memory must have at least.
    #[must_use]
    pub fn memory_bytes(&self) -> &[usize] {
        &self.memory_bytes
    }
}

/// Most memories of a layout: more than any server has tensors.
const MAX_MEMORIES: usize = 1 << 16;

/// Heads and bytes of an element of each plane; an opaque block counts as one element.
fn plane_dims(l: usize, spec: &LayerSpec, view: &LayerView) -> Result<Vec<PlaneSpec>> {
    let dims = match spec.kind {
        LayerKind::Opaque { block_tokens, block_bytes } => {
            if block_tokens != view.block_tokens {
                return Err(invalid(format!(
                    "layer {l}: opaque blocks of {block_tokens} tokens in a cache of {}-token blocks",
                    view.block_tokens
                )));
            }
            vec![PlaneSpec { heads: 1, head_bytes: block_bytes }]
        }
        _ => spec.planes.clone(),
    };
    if dims.len() != view.planes.len() {
        return Err(invalid(format!("layer {l}: {} plane views for {} planes", view.planes.len(), dims.len())));
    }
    if dims.is_empty() || dims.iter().any(|d| d.token_bytes() == 0) {
        return Err(invalid(format!("layer {l}: a plane of no bytes")));
    }
    Ok(dims)
}

/// The first byte after everything that `plane` can reach. An error where its elements overlap.
fn reach(plane: &PlaneView, view: &LayerView, dims: PlaneSpec, block_tokens: u32) -> Result<usize, String> {
    let mut steps = vec![
        (plane.block_stride, view.num_blocks as usize, "block"),
        (plane.token_stride, block_tokens as usize, "token"),
        (plane.head_stride, dims.heads as usize, "head"),
    ];
    steps.retain(|&(_, count, _)| count > 1);
    steps.sort_unstable();
    let mut span = dims.head_bytes as usize;
    for (stride, count, name) in steps {
        if stride < span {
            return Err(format!("{name} stride of {stride} bytes is less than the {span} bytes it steps over"));
        }
        span = stride
            .checked_mul(count - 1)
            .and_then(|s| s.checked_add(span))
            .ok_or_else(|| format!("{count} {name}s of {stride} bytes overflow"))?;
    }
    plane.offset.checked_add(span).filter(|&e| e <= isize::MAX as usize).ok_or_else(|| "it overflows".to_owned())
}

/// The dense view of one layer that starts at `(memory, offset)`.
fn layer_view(spec: &LayerSpec, shape: KvShape, (memory, offset): (usize, usize)) -> Result<LayerView, String> {
    let KvShape { block_tokens, num_blocks, .. } = shape;
    let overflow = || "a block overflows".to_owned();
    if let LayerKind::Opaque { block_bytes, .. } = spec.kind {
        let block_stride = block_bytes as usize;
        let plane = PlaneView { memory, offset, block_stride, token_stride: 0, head_stride: 0 };
        return Ok(LayerView { planes: vec![plane], block_tokens, num_blocks });
    }
    if shape.layout == KvLayout::Opaque {
        return Err(format!("an opaque layout, but the layer is {:?}", spec.kind));
    }
    if shape.layout == KvLayout::Mla && spec.planes.iter().any(|p| p.heads != 1) {
        return Err("an MLA layout, but a plane has several heads".to_owned());
    }
    let heads = spec.planes.first().map_or(0, |p| p.heads);
    let row = shape.packing == Packing::Row;
    if row && spec.planes.iter().any(|p| p.heads != heads) {
        return Err("planes in one row, but of different numbers of heads".to_owned());
    }
    let row_bytes: usize = spec.planes.iter().map(|p| p.head_bytes as usize).sum();
    let mut planes = Vec::with_capacity(spec.planes.len());
    let mut at = PlaneView { memory, offset, block_stride: 0, token_stride: 0, head_stride: 0 };
    let mut inner_bytes = 0usize;
    for p in &spec.planes {
        let element = if row { row_bytes } else { p.head_bytes as usize };
        (at.token_stride, at.head_stride) = match shape.layout {
            KvLayout::Hnd => (element, element.checked_mul(block_tokens as usize).ok_or_else(overflow)?),
            _ => (element.checked_mul(p.heads as usize).ok_or_else(overflow)?, element),
        };
        at.block_stride = element
            .checked_mul(p.heads as usize)
            .and_then(|b| b.checked_mul(block_tokens as usize))
            .ok_or_else(overflow)?;
        planes.push(at);
        let step = match shape.packing {
            Packing::Split => 0,
            Packing::Outer => at.block_stride.checked_mul(num_blocks as usize).ok_or_else(overflow)?,
            Packing::Inner => at.block_stride,
            Packing::Row => p.head_bytes as usize,
        };
        at.offset = at.offset.checked_add(step).ok_or_else(overflow)?;
        at.memory += usize::from(shape.packing == Packing::Split);
        inner_bytes = inner_bytes.checked_add(at.block_stride).ok_or_else(overflow)?;
    }
    if shape.packing == Packing::Inner {
        planes.iter_mut().for_each(|p| p.block_stride = inner_bytes);
    }
    Ok(LayerView { planes, block_tokens, num_blocks })
}

#[cfg(test)]
mod tests;
