//! Paged KV from the server's tensors: which dimension is what is worked out from the shapes and
//! the geometry.
//!
//! A shape is compared with every layout it could have; exactly one must fit, or the caller names
//! it. The strides are the tensor's own, so views and cross-layer blocks work as they are. Nothing
//! is copied or read.

use std::sync::Arc;

use forebay::device::{KvMemory, PagedKv};
use forebay::geometry::{Geometry, LayerKind, LayerSpec};
use forebay::paged::{LayerView, PagedLayout, PlaneView};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::buffer::{Described, describe};
use crate::convert::PyGeometry;
use crate::error::{IntoPy, invalid, to_py};

/// What is known of a layout besides shapes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hints {
    /// `NHD`, `HND`, `MLA`, `opaque`, or a letter for each dimension.
    pub(crate) layout: Option<String>,
    /// Tokens of one block.
    pub(crate) block_tokens: Option<u32>,
}

/// Paged KV over `kv_layers`: a `PagedKv`, or one tensor (or one per plane) for each layer.
pub(crate) fn paged_kv(geometry: &Geometry, kv_layers: &Bound<'_, PyAny>, hints: &Hints) -> PyResult<Arc<PagedKv>> {
    if let Ok(made) = kv_layers.cast::<PyPagedKv>() {
        return Ok(Arc::clone(&made.get().0));
    }
    let items: Vec<Bound<'_, PyAny>> = match kv_layers.cast::<PyDict>() {
        Ok(named) => named.values().iter().collect(),
        Err(_) => kv_layers.try_iter()?.collect::<PyResult<_>>()?,
    };
    if items.len() != geometry.layers.len() {
        let (given, wanted) = (items.len(), geometry.layers.len());
        let e = invalid(format!("{given} KV layers for a geometry of {wanted}"));
        return Err(to_py(&e.advice("give one tensor, or one per plane, for each layer in order")));
    }
    let mut memories: Vec<Arc<dyn KvMemory>> = Vec::new();
    let mut views = Vec::with_capacity(items.len());
    for (i, (item, spec)) in items.iter().zip(geometry.layers.iter()).enumerate() {
        let parts = parts_of(item)?;
        let view = view_of(spec, &parts, (memories.len(), hints)).map_err(|what| {
            let names = "layout=\"NHD\", \"HND\", \"MLA\" or \"opaque\", or a letter for each dimension such as \"PBTHD\" \
                         (P planes, B blocks, T tokens, H heads, D head, R planes in one row)";
            to_py(&invalid(format!("KV layer {i}: {what}")).advice(format!("check the geometry, or say {names}")))
        })?;
        for part in &parts {
            if part.readonly {
                return Err(to_py(&invalid(format!("KV layer {i}: its memory is read-only"))));
            }
            memories.push(part.memory()?);
        }
        views.push(view);
    }
    let layout = PagedLayout::custom(&geometry.layers, views).py()?;
    PagedKv::over(memories, layout).py()
}

/// One tensor, or several: a list, or a tuple that is not a raw description.
fn parts_of(item: &Bound<'_, PyAny>) -> PyResult<Vec<Described>> {
    let described = match item.cast::<PyTuple>() {
        Ok(tuple) => tuple.len() == 5 && tuple.get_item(0)?.extract::<usize>().is_ok(),
        Err(_) => !item.is_instance_of::<pyo3::types::PyList>(),
    };
    if described {
        return Ok(vec![describe(item)?]);
    }
    item.try_iter()?.map(|part| describe(&part?)).collect()
}

/// The dimensions of the layouts that are tried. `E` is heads and head in one.
const BOTH: &[&str] = &["PBTHD", "PBHTD", "BPTHD", "BPHTD", "BTHR", "BHTR"];
const ONE: &[&str] = &["BTHD", "BHTD", "BTE", "BHD"];
const MLA_ROW: &[&str] = &["BTR", "BTHR", "BR"];
const MLA_PART: &[&str] = &["BTD", "BTHD", "BD"];

fn candidates<'a>(spec: &LayerSpec, parts: usize, hints: &'a Hints) -> Result<Vec<&'a str>, String> {
    let all = match (spec.kind == LayerKind::Mla, parts == spec.planes.len()) {
        (true, true) if parts > 1 => MLA_PART,
        (true, _) => MLA_ROW,
        (false, true) => ONE,
        (false, false) => BOTH,
    };
    let Some(name) = hints.layout.as_deref() else { return Ok(all.to_vec()) };
    let of = |fits: &dyn Fn(&str) -> bool| all.iter().copied().filter(|c| fits(c)).collect();
    let heads_first = |c: &str| c.find('H') < c.find('T') && c.contains('T') && c.contains('H');
    match name {
        "NHD" | "nhd" => Ok(of(&|c| !heads_first(c))),
        "HND" | "hnd" => Ok(of(&heads_first)),
        "MLA" | "mla" if spec.kind == LayerKind::Mla => Ok(all.to_vec()),
        "MLA" | "mla" => Err(format!("layout {name:?} for a layer that is {:?}", spec.kind)),
        "opaque" => Err(format!("layout \"opaque\" for a layer that is {:?}", spec.kind)),
        letters if letters.chars().all(|c| "PBTHDRE".contains(c)) => Ok(vec![letters]),
        _ => Err(format!("{name:?} is no layout")),
    }
}

fn view_of(spec: &LayerSpec, parts: &[Described], (memory, hints): (usize, &Hints)) -> Result<LayerView, String> {
    let first = parts.first().ok_or("there is no tensor")?;
    if let LayerKind::Opaque { block_tokens, block_bytes } = spec.kind {
        return opaque(first, parts.len(), (memory, block_tokens, block_bytes as usize));
    }
    if parts.len() != 1 && parts.len() != spec.planes.len() {
        return Err(format!("{} tensors for {} planes", parts.len(), spec.planes.len()));
    }
    let shapes: Vec<&[usize]> = parts.iter().map(|p| p.shape.as_slice()).collect();
    let mut found: Vec<(&str, LayerView)> = Vec::new();
    for letters in candidates(spec, parts.len(), hints)? {
        let Some(view) = fit(spec, parts, (letters, memory)) else { continue };
        let fits = hints.block_tokens.is_none_or(|t| t == view.block_tokens);
        if fits && found.iter().all(|(_, v)| *v != view) {
            found.push((letters, view));
        }
    }
    match found.as_slice() {
        [(_, view)] => Ok(view.clone()),
        [] => Err(format!(
            "shape {shapes:?} of {}-byte elements is no paged KV of planes {:?}",
            first.itemsize,
            spec.planes.iter().map(|p| (p.heads, p.head_bytes)).collect::<Vec<_>>()
        )),
        several => {
            let names: Vec<&str> = several.iter().map(|(letters, _)| *letters).collect();
            Err(format!("shape {shapes:?} is ambiguous, it could be {}", names.join(" or ")))
        }
    }
}

fn opaque(
    part: &Described,
    parts: usize,
    (memory, block_tokens, block_bytes): (usize, u32, usize),
) -> Result<LayerView, String> {
    let (Some((&blocks, inner)), 1) = (part.shape.split_first(), parts) else {
        return Err(format!("{parts} tensors of shape {:?} for one of opaque blocks", part.shape));
    };
    let bytes = inner.iter().try_fold(part.itemsize, |all, &n| all.checked_mul(n)).unwrap_or(0);
    if bytes != block_bytes {
        return Err(format!("blocks of {bytes} bytes, the geometry has opaque ones of {block_bytes}"));
    }
    let mut steps: Vec<(usize, usize)> = part.strides.iter().copied().zip(part.shape.iter().copied()).skip(1).collect();
    steps.retain(|&(_, n)| n > 1);
    steps.sort_unstable();
    let mut span = part.itemsize;
    for (stride, n) in steps {
        if stride != span {
            return Err("the bytes of an opaque block do not lie together".to_owned());
        }
        span *= n;
    }
    let block_stride = part.strides.first().copied().unwrap_or(bytes);
    let plane = PlaneView { memory, offset: 0, block_stride, token_stride: 0, head_stride: 0 };
    Ok(LayerView { planes: vec![plane], block_tokens, num_blocks: u32::try_from(blocks).map_err(|e| e.to_string())? })
}

/// Size and stride of the dimension called `letter`; one element where there is none.
fn dimension(part: &Described, letters: &str, letter: char) -> Option<(usize, usize)> {
    match letters.find(letter) {
        Some(at) => Some((*part.shape.get(at)?, *part.strides.get(at)?)),
        None => Some((1, 0)),
    }
}

/// The view of a layer whose tensors have the dimensions `letters`; none where their sizes are not
/// the spec's.
fn fit(spec: &LayerSpec, parts: &[Described], (letters, memory): (&str, usize)) -> Option<LayerView> {
    let mut planes = Vec::with_capacity(spec.planes.len());
    let mut shape: Option<(usize, usize)> = None;
    let row: usize = spec.planes.iter().map(|p| p.head_bytes as usize).sum();
    let mut offset = 0;
    for (p, plane) in spec.planes.iter().enumerate() {
        let (at, part) = if parts.len() == 1 { (0, parts.first()?) } else { (p, parts.get(p)?) };
        if part.shape.len() != letters.len() {
            return None;
        }
        let get = |letter| dimension(part, letters, letter);
        let (heads, head_bytes) = (plane.heads as usize, plane.head_bytes as usize);
        let whole = if letters.contains('R') { row } else { head_bytes };
        let ((blocks, block_stride), (tokens, token_stride)) = (get('B')?, get('T')?);
        let (inner, together) = if letters.contains('E') { ('E', heads) } else { (element_of(letters)?, 1) };
        let (elements, step) = get(inner)?;
        let planes_in = get('P')?;
        let fits = elements.checked_mul(part.itemsize)? == whole * together
            && (elements == 1 || step == part.itemsize)
            && (together > 1 || !letters.contains('E') || heads == 1)
            && (letters.contains('E') || get('H')?.0 == heads)
            && planes_in.0 == if letters.contains('P') { spec.planes.len() } else { 1 };
        let in_one = parts.len() > 1 || spec.planes.len() == 1 || letters.contains('P') || letters.contains('R');
        if !fits || !in_one || *shape.get_or_insert((blocks, tokens)) != (blocks, tokens) {
            return None;
        }
        let head_stride = if letters.contains('E') { head_bytes } else { get('H')?.1 };
        planes.push(PlaneView {
            memory: memory + at,
            offset: if letters.contains('P') { p.checked_mul(planes_in.1)? } else { offset },
            block_stride,
            // One name for what is never stepped over, so that equal layouts compare equal.
            token_stride: if tokens > 1 { token_stride } else { whole * heads },
            head_stride: if heads > 1 { head_stride } else { whole },
        });
        offset += if letters.contains('R') { head_bytes } else { 0 };
    }
    let (blocks, tokens) = shape?;
    Some(LayerView { planes, block_tokens: u32::try_from(tokens).ok()?, num_blocks: u32::try_from(blocks).ok()? })
}

fn element_of(letters: &str) -> Option<char> {
    ['D', 'R'].into_iter().find(|&c| letters.contains(c))
}

/// The server's paged KV memory: its layout is checked once, for use in many calls.
#[pyclass(frozen, name = "PagedKv", module = "forebay")]
pub(crate) struct PyPagedKv(pub(crate) Arc<PagedKv>);

#[pymethods]
impl PyPagedKv {
    /// Paged KV over `kv_layers`, one tensor or one per plane for each of the geometry's layers.
    #[new]
    #[pyo3(signature = (geometry, kv_layers, layout=None, block_tokens=None))]
    fn new(
        geometry: &Bound<'_, PyGeometry>,
        kv_layers: &Bound<'_, PyAny>,
        layout: Option<String>,
        block_tokens: Option<u32>,
    ) -> PyResult<Self> {
        Ok(Self(paged_kv(&geometry.get().0, kv_layers, &Hints { layout, block_tokens })?))
    }

    /// Number of layers.
    #[getter]
    fn layers(&self) -> usize {
        self.0.layout().num_layers()
    }

    /// Tokens of one block, for each layer.
    #[getter]
    fn block_tokens(&self) -> Vec<u32> {
        (0..self.layers()).filter_map(|i| Some(self.0.layout().layer(i)?.block_tokens)).collect()
    }

    /// Blocks, for each layer.
    #[getter]
    fn num_blocks(&self) -> Vec<u32> {
        (0..self.layers()).filter_map(|i| Some(self.0.layout().layer(i)?.num_blocks)).collect()
    }

    /// Where each plane of layer `layer` starts and how it steps: (offset, block, token and head
    /// stride) in bytes.
    fn strides(&self, layer: usize) -> PyResult<Vec<(usize, usize, usize, usize)>> {
        let view = self.0.layout().layer(layer).ok_or_else(|| to_py(&invalid(format!("there is no layer {layer}"))))?;
        Ok(view.planes.iter().map(|p| (p.offset, p.block_stride, p.token_stride, p.head_stride)).collect())
    }

    /// `cpu` or `cuda:N`.
    #[getter]
    fn device(&self) -> String {
        match self.0.place() {
            forebay::device::MemorySpace::Device(n) => format!("cuda:{n}"),
            _ => "cpu".to_owned(),
        }
    }

    fn __repr__<'py>(&self, py: Python<'py>) -> Bound<'py, PyString> {
        PyString::new(py, &format!("{:?}", self.0))
    }
}
