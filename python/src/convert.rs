//! Plain values from Python: settings, geometry, tokens, slot mappings, masks, what else is in a
//! key, streams.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay::config::{Loader, Settings};
use forebay::device::{FloatKind, RopeTable, Stream};
use forebay::engine::SlotMapping;
use forebay::geometry::{DType, Geometry, LayerKind, LayerSpec, MAX_LAYERS, PlaneSpec, Shard, opaque_multiple};
use forebay::key::{Extra, LoraId, MmItem};
use forebay::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyInt, PyList, PyString};
use serde_json::{Map, Value};

use crate::buffer::describe;
use crate::error::{IntoPy, invalid, to_py};
use crate::ints::{bools, ints};

/// Settings from a dict, a settings file's path, or (`None`) file and environment alone.
pub(crate) fn settings(config: Option<&Bound<'_, PyAny>>) -> PyResult<Settings> {
    settings_of(Loader::process().code_name("code"), config)
}

/// The same for an object store, which LMCache's own server opens.
pub(crate) fn store_settings(config: Option<&Bound<'_, PyAny>>) -> PyResult<Settings> {
    settings_of(Loader::process().without_lmcache().code_name("code"), config)
}

fn settings_of(mut loader: Loader, config: Option<&Bound<'_, PyAny>>) -> PyResult<Settings> {
    if let Some(config) = config {
        if config.is_instance_of::<PyString>() || config.hasattr("__fspath__")? {
            loader = loader.file(config.extract::<std::path::PathBuf>()?);
        } else {
            loader = loader.map(json_map(config)?);
        }
    }
    let (settings, warnings) = loader.load().py()?;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    Ok(settings)
}

/// The settings in effect, as a dict of plain values by their own names: what `config` gives (a
/// dict, or a settings file's path), the environment, and the settings file. Errors call the place
/// of the dict's keys `name`.
#[pyfunction]
#[pyo3(name = "settings", signature = (config=None, *, name="code"))]
pub(crate) fn resolved<'py>(
    py: Python<'py>,
    config: Option<&Bound<'py, PyAny>>,
    name: &str,
) -> PyResult<Bound<'py, PyAny>> {
    let text = Value::Object(settings_of(Loader::process().code_name(name), config)?.to_map()).to_string();
    py.import("json")?.call_method1("loads", (text,))
}

fn json_map(config: &Bound<'_, PyAny>) -> PyResult<Map<String, Value>> {
    let py = config.py();
    let arguments = PyDict::new(py);
    arguments.set_item("default", py.import("os")?.getattr("fspath")?)?;
    let bad = |what: String| {
        let e = Error::new(ErrorKind::Config, format!("the config {what}"));
        to_py(&e.advice("give a dict of settings; docs/configuration.md lists them"))
    };
    let text: String = py
        .import("json")?
        .call_method("dumps", (config,), Some(&arguments))
        .map_err(|e| bad(format!("is not plain data: {e}")))?
        .extract()?;
    match serde_json::from_str(&text) {
        Ok(Value::Object(map)) => Ok(map),
        _ => Err(bad(format!("is a {}", config.get_type().name()?))),
    }
}

/// What a chunk of KV is made of, and which shard of which model it belongs to.
#[pyclass(frozen, name = "Geometry", module = "forebay")]
pub(crate) struct PyGeometry(pub(crate) Geometry);

/// What layers have where their own spec does not say.
struct Defaults {
    heads: u32,
    head_bytes: u32,
    planes: usize,
}

#[pymethods]
impl PyGeometry {
    /// A geometry; `layer_specs` describes layers that are not all alike, `fingerprint` and
    /// `identity` whatever else gives the bytes their meaning.
    #[new]
    #[pyo3(signature = (model, layers=None, kv_heads=1, head_size=0, dtype="bfloat16", planes=2, fingerprint="",
        layer_specs=None, tp=(0, 1), pp=(0, 1), cp=(0, 1), identity=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python constructor")]
    fn new(
        model: &str,
        layers: Option<usize>,
        kv_heads: u32,
        head_size: u32,
        dtype: &str,
        planes: usize,
        fingerprint: &str,
        layer_specs: Option<Vec<Bound<'_, PyDict>>>,
        tp: (u16, u16),
        pp: (u16, u16),
        cp: (u16, u16),
        identity: Option<BTreeMap<String, String>>,
    ) -> PyResult<Self> {
        at_most("layers", layers.unwrap_or(0), MAX_LAYERS)?;
        at_most("planes", planes, MOST_PLANES)?;
        let dtype = DType::named(dtype.strip_prefix("torch.").unwrap_or(dtype)).py()?;
        let defaults = Defaults { heads: kv_heads, head_bytes: head_size.saturating_mul(dtype.bytes), planes };
        let specs = match layer_specs {
            Some(specs) => specs.iter().map(|spec| layer_spec(spec, &defaults)).collect::<PyResult<Vec<_>>>()?,
            None => vec![defaults.layer(LayerKind::Full); layers.unwrap_or(0)],
        };
        if layers.is_some_and(|n| n != specs.len()) {
            let (given, n) = (specs.len(), layers.unwrap_or(0));
            return Err(to_py(&invalid(format!("{given} layer_specs for layers={n}"))));
        }
        let chunk = 256u32.next_multiple_of(opaque_multiple(&specs));
        let geometry = Geometry::new(model, dtype, specs, chunk).py()?;
        named(geometry, Shard { tp, pp, cp }, fingerprint, identity)
    }

    /// The shapes of a well-known model, such as `llama-3.1-8b`. Which rank and which weights these
    /// are, `tp`, `pp`, `cp`, `fingerprint` and `identity` say.
    #[staticmethod]
    #[pyo3(signature = (name, *, tp=(0, 1), pp=(0, 1), cp=(0, 1), fingerprint="", identity=None))]
    fn preset(
        name: &str,
        tp: (u16, u16),
        pp: (u16, u16),
        cp: (u16, u16),
        fingerprint: &str,
        identity: Option<BTreeMap<String, String>>,
    ) -> PyResult<Self> {
        named(Geometry::preset(name).py()?, Shard { tp, pp, cp }, fingerprint, identity)
    }

    /// Model name.
    #[getter]
    fn model(&self) -> &str {
        &self.0.model
    }

    /// Number of layers.
    #[getter]
    fn layers(&self) -> usize {
        self.0.layers.len()
    }

    /// Payload bytes of one chunk of `tokens` tokens.
    fn chunk_bytes(&self, tokens: usize) -> usize {
        self.0.chunk_bytes(tokens)
    }

    /// The name of the namespace that it makes with the chunk size it has now.
    #[getter]
    fn namespace(&self) -> String {
        self.0.fingerprint().dir_name()
    }

    fn __repr__(&self) -> String {
        format!("Geometry({:?}, {} layers, {:?})", self.0.model, self.0.layers.len(), self.0.dtype.name)
    }
}

/// Most planes of a layer: they are listed one by one.
const MOST_PLANES: usize = 4096;

/// An error where there are more than `most` of something that is to be listed one by one.
fn at_most(what: &str, n: usize, most: usize) -> PyResult<()> {
    if n > most {
        return Err(to_py(&invalid(format!("{n} {what}")).advice(format!("give {most} at most"))));
    }
    Ok(())
}

/// The geometry with its rank and with what else gives the bytes their meaning.
fn named(
    geometry: Geometry,
    shard: Shard,
    fingerprint: &str,
    identity: Option<BTreeMap<String, String>>,
) -> PyResult<PyGeometry> {
    let mut geometry = geometry.with_shard(shard).py()?;
    if !fingerprint.is_empty() {
        geometry = geometry.with_identity("fingerprint", fingerprint);
    }
    for (name, value) in identity.unwrap_or_default() {
        geometry = geometry.with_identity(&name, &value);
    }
    Ok(PyGeometry(geometry))
}

impl Defaults {
    fn layer(&self, kind: LayerKind) -> LayerSpec {
        let plane = PlaneSpec { heads: self.heads, head_bytes: self.head_bytes };
        LayerSpec { kind, planes: vec![plane; self.planes], group: 0 }
    }
}

const SPEC_KEYS: [&str; 8] =
    ["kind", "window", "heads", "head_bytes", "planes", "group", "block_tokens", "block_bytes"];

fn layer_spec(spec: &Bound<'_, PyDict>, defaults: &Defaults) -> PyResult<LayerSpec> {
    for key in spec.keys() {
        let key: String = key.extract()?;
        if !SPEC_KEYS.contains(&key.as_str()) {
            let e = invalid(format!("layer_specs: {key:?} is unknown"));
            return Err(to_py(&e.advice(format!("use {}", SPEC_KEYS.join(", ")))));
        }
    }
    let number = |name: &str| -> PyResult<Option<u32>> { spec.get_item(name)?.map(|v| v.extract()).transpose() };
    let needed = |name: &str| {
        number(name)?.ok_or_else(|| to_py(&invalid(format!("layer_specs: a layer of this kind needs {name:?}"))))
    };
    let kind: String = spec.get_item("kind")?.map_or(Ok("full".to_owned()), |k| k.extract())?;
    let kind = match kind.as_str() {
        "full" => LayerKind::Full,
        "sliding" => LayerKind::Sliding { window: needed("window")? },
        "mla" => LayerKind::Mla,
        "opaque" => LayerKind::Opaque { block_tokens: needed("block_tokens")?, block_bytes: needed("block_bytes")? },
        other => {
            let e = invalid(format!("layer_specs: kind {other:?} is unknown"));
            return Err(to_py(&e.advice("use full, sliding, mla or opaque")));
        }
    };
    let mla = kind == LayerKind::Mla;
    let heads = number("heads")?.unwrap_or(if mla { 1 } else { defaults.heads });
    let head_bytes = number("head_bytes")?.unwrap_or(defaults.head_bytes);
    let planes = match spec.get_item("planes")? {
        _ if matches!(kind, LayerKind::Opaque { .. }) => Vec::new(),
        None => vec![PlaneSpec { heads, head_bytes }; if mla { 1 } else { defaults.planes }],
        Some(n) if n.is_instance_of::<PyInt>() => {
            let n = n.extract()?;
            at_most("planes", n, MOST_PLANES)?;
            vec![PlaneSpec { heads, head_bytes }; n]
        }
        // Bytes of a head, for planes that differ in it: a row of 576 beside one of 132.
        Some(each) => {
            each.extract::<Vec<u32>>()?.into_iter().map(|head_bytes| PlaneSpec { heads, head_bytes }).collect()
        }
    };
    let group = number("group")?.unwrap_or(0);
    Ok(LayerSpec { kind, planes, group: u16::try_from(group).map_err(|e| to_py(&invalid(e.to_string())))? })
}

/// Token ids.
pub(crate) fn tokens(object: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let wide = ints(object)?;
    let bad = |t: i64| to_py(&invalid(format!("{t} is no token id")).advice("token ids are 0 to 2^32 - 1"));
    wide.into_iter().map(|t| u32::try_from(t).map_err(|_| bad(t))).collect()
}

/// One slot mapping, or a list of one for each group; with the mask, where there is one.
pub(crate) fn slots(object: &Bound<'_, PyAny>, mask: Option<&Bound<'_, PyAny>>) -> PyResult<SlotMapping> {
    let grouped = match object.cast::<PyList>() {
        // A tensor of one element can be taken for a number.
        Ok(list) if !list.is_empty() => {
            let first = list.get_item(0)?;
            first.len().is_ok() || first.extract::<i64>().is_err()
        }
        _ => false,
    };
    let slots = if grouped {
        let groups = object.try_iter()?.map(|group| Ok(Arc::from(ints(&group?)?)));
        SlotMapping::per_group(groups.collect::<PyResult<_>>()?)
    } else {
        SlotMapping::new(ints(object)?)
    };
    let Some(mask) = mask else { return Ok(slots) };
    let mask = bools(mask)?;
    if mask.len() < slots.len() {
        let (have, want) = (mask.len(), slots.len());
        return Err(to_py(&invalid(format!("a mask of {have} tokens for a slot mapping of {want}"))));
    }
    Ok(slots.masked(mask))
}

/// What besides tokens decides the KV: `None`, a cache salt, or a dict of `cache_salt`, `lora` and
/// `multimodal`.
pub(crate) fn extra(object: Option<&Bound<'_, PyAny>>) -> PyResult<Extra> {
    let Some(object) = object else { return Ok(Extra::default()) };
    if let Ok(salt) = object.extract::<String>() {
        return Ok(Extra::salted(&salt));
    }
    let mut extra = Extra::default();
    for (key, value) in object.cast::<PyDict>()? {
        match key.extract::<String>()?.as_str() {
            "cache_salt" => extra.cache_salt = value.extract()?,
            "lora" if value.is_none() => {}
            "lora" => extra.lora = Some(lora(&value)?),
            "multimodal" => {
                for item in value.try_iter()? {
                    let (hash, offset, len): (Bound<'_, PyAny>, u32, u32) = item?.extract()?;
                    extra.multimodal.push(MmItem { hash: bytes(&hash)?, offset, len });
                }
            }
            other => {
                let e = invalid(format!("extra: {other:?} is unknown"));
                return Err(to_py(&e.advice("use cache_salt, lora, multimodal")));
            }
        }
    }
    Ok(extra)
}

fn lora(value: &Bound<'_, PyAny>) -> PyResult<LoraId> {
    let value = value.cast::<PyDict>()?;
    let mut id = LoraId::default();
    for (key, text) in value {
        let text: String = text.extract()?;
        match key.extract::<String>()?.as_str() {
            "name" => id.name = text,
            "path" => id.path = text,
            "digest" => id.digest = text,
            other => return Err(to_py(&invalid(format!("extra: lora has no {other:?}")))),
        }
    }
    Ok(id)
}

/// The bytes of a `str` (as UTF-8) or of `bytes`.
pub(crate) fn bytes(object: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    match object.cast::<PyBytes>() {
        Ok(bytes) => Ok(bytes.as_bytes().to_vec()),
        Err(_) => Ok(object.extract::<String>()?.into_bytes()),
    }
}

/// A stream: its handle, or an object that has one (`cuda_stream`).
pub(crate) fn stream(object: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Stream>> {
    let Some(object) = object else { return Ok(None) };
    let handle = if object.hasattr("cuda_stream")? { object.getattr("cuda_stream")? } else { object.clone() };
    Ok(Some(Stream(handle.extract()?)))
}

/// The element type of keys or of a rotary table, by torch's, struct's or the array interface's
/// name.
pub(crate) fn floats(name: &str) -> PyResult<FloatKind> {
    match name.strip_prefix("torch.").unwrap_or(name).trim_start_matches(['<', '=', '@']) {
        "float32" | "f" | "f4" => Ok(FloatKind::F32),
        "bfloat16" => Ok(FloatKind::Bf16),
        "float16" | "e" | "f2" => Ok(FloatKind::F16),
        other => {
            let e = invalid(format!("elements of type {other:?} cannot be rotated"));
            Err(to_py(&e.advice("keys and tables may be float32, bfloat16 or float16")))
        }
    }
}

/// A rotary table `[positions, rotary_dim]`: per position all cosines, then all sines.
pub(crate) fn rope_table(object: &Bound<'_, PyAny>) -> PyResult<Arc<RopeTable>> {
    let table = describe(object)?;
    let (&[positions, rotary_dim], true) = (table.shape.as_slice(), table.is_dense()) else {
        let e = invalid(format!("a rotary table of shape {:?}", table.shape));
        return Err(to_py(&e.advice("give [positions, rotary_dim], its rows one after the other")));
    };
    if table.format.is_empty() {
        let e = invalid("a rotary table of no known element type");
        return Err(to_py(&e.advice("give a tensor or an array of float32, bfloat16 or float16 instead of a tuple")));
    }
    RopeTable::new(table.memory()?, 0, positions, rotary_dim, floats(&table.format)?).py()
}
