//! A KV dump: its token ids and, for every layer, where its bytes lie and how they turn into an
//! extent.
//!
//! Two forms are read (docs/warm.md): one file per prompt with named tensors, and the folder per
//! prompt that vLLM's example connector writes. Both become a [`DumpInfo`]; nothing here reads KV
//! data. Invariant: every byte range that a [`Stream`] can name lies inside its tensor, because
//! shapes were checked against the header and the header against the file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use forebay::geometry::{Geometry, LayerKind, LayerSpec, MAX_LAYERS, PlaneSpec};
use forebay::{Error, ErrorKind, Result};
use safetensors::Dtype;

use super::header::{self, Tensor, TensorFile};
use super::tokens;

/// How K and V share a `kv_cache` tensor of vLLM's example connector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum KvShape {
    /// Decide by the shape and the number of tokens.
    #[default]
    Auto,
    /// `[2, tokens, heads, dim]` or `[2, tokens, heads * dim]`.
    KvFirst,
    /// `[tokens, 2, heads, dim]`.
    KvSecond,
    /// `[tokens, heads, 2 * dim]`, K and V side by side in each head.
    KvLast,
    /// `[tokens, row]`.
    Mla,
}

/// A contiguous run of rows, one per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stream {
    /// Which of the dump's files.
    pub(crate) file: usize,
    /// First byte of token 0.
    pub(crate) offset: u64,
    /// Bytes of one token.
    pub(crate) row_bytes: usize,
}

/// How a layer's streams become `[plane][token][head][head_bytes]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Split {
    /// Each stream is a plane.
    Planes,
    /// The one stream's rows consist of this many groups, each first K's half, then V's.
    Halves {
        /// Groups in a row: 1 for `[tokens, 2, …]`, the heads for `[tokens, heads, 2 * dim]`.
        groups: usize,
    },
}

/// One layer of a dump.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layer {
    /// What an extent of it holds.
    pub(crate) spec: LayerSpec,
    /// Where its bytes lie.
    pub(crate) streams: Vec<Stream>,
    /// How they are ordered.
    pub(crate) split: Split,
}

/// What a dump holds.
#[derive(Clone, Debug)]
pub(crate) struct DumpInfo {
    /// The file or folder.
    pub(crate) path: PathBuf,
    /// Form, for people.
    pub(crate) form: &'static str,
    /// Token ids.
    pub(crate) tokens: Vec<u32>,
    /// Element type, in the words of the geometry.
    pub(crate) dtype: String,
    /// Layers in order.
    pub(crate) layers: Vec<Layer>,
    /// Files that the streams point into.
    pub(crate) files: Vec<PathBuf>,
    /// Metadata of the (first) file: `cache_salt`, `kv_dtype` and whatever else the writer said.
    pub(crate) metadata: BTreeMap<String, String>,
}

fn bad(path: &Path, why: String) -> Error {
    Error::new(ErrorKind::InvalidInput, why).at(path)
}

impl DumpInfo {
    /// Reads the headers and token ids of the dump at `path`: a `.safetensors` file or a folder of
    /// layer files.
    ///
    /// # Errors
    /// `InvalidInput` naming the file and the tensor that does not fit.
    pub(crate) fn open(path: &Path, shape: KvShape) -> Result<Self> {
        if path.is_dir() { folder(path, shape) } else { single_file(path) }
    }

    /// Bytes of KV.
    pub(crate) fn bytes(&self) -> u64 {
        self.range_bytes(self.tokens.len())
    }

    /// Bytes of KV of `tokens` tokens over all layers.
    pub(crate) fn range_bytes(&self, tokens: usize) -> u64 {
        self.layers.iter().map(|l| l.spec.extent_bytes(tokens) as u64).sum()
    }

    /// Whether the dump's layers are those of `geometry`.
    ///
    /// # Errors
    /// `Incompatible` naming the first difference.
    pub(crate) fn check(&self, geometry: &Geometry) -> Result<()> {
        let differs = |what: String| {
            Err(Error::new(ErrorKind::Incompatible, format!("not KV of {}: {what}", geometry.model)).at(&self.path))
        };
        if self.layers.len() != geometry.layers.len() {
            return differs(format!("{} layers instead of {}", self.layers.len(), geometry.layers.len()));
        }
        if self.dtype != geometry.dtype.name {
            return differs(format!("type {} instead of {}", self.dtype, geometry.dtype.name));
        }
        for (i, (mine, theirs)) in self.layers.iter().zip(geometry.layers.iter()).enumerate() {
            let rows = |planes: &[PlaneSpec]| planes.iter().map(|p| p.token_bytes()).collect::<Vec<_>>();
            let (a, b) = (rows(&mine.spec.planes), rows(&theirs.planes));
            if a != b {
                return differs(format!("layer {i} has planes of {a:?} bytes per token instead of {b:?}"));
            }
        }
        Ok(())
    }
}

/// The geometry's word for an element type.
fn dtype_name(file: &TensorFile, tensor: &Tensor) -> Result<String> {
    let name = match tensor.dtype {
        Dtype::BF16 => "bfloat16",
        Dtype::F16 => "float16",
        Dtype::F32 => "float32",
        Dtype::F8_E4M3 => "fp8_e4m3",
        Dtype::F8_E5M2 => "fp8_e5m2",
        Dtype::I8 => "int8",
        Dtype::U8 => "uint8",
        other => return Err(bad(&file.path, format!("KV of type {other:?} is not supported"))),
    };
    // Servers keep fp8 caches in byte tensors and know the real type elsewhere.
    match file.metadata.get("kv_dtype") {
        Some(real) if matches!(tensor.dtype, Dtype::U8 | Dtype::I8) => Ok(real.clone()),
        _ => Ok(name.to_owned()),
    }
}

fn plane(heads: usize, head_bytes: usize) -> Option<PlaneSpec> {
    let plane = PlaneSpec { heads: u32::try_from(heads).ok()?, head_bytes: u32::try_from(head_bytes).ok()? };
    (heads > 0 && head_bytes > 0).then_some(plane)
}

/// One file per prompt: `token_ids`, and per layer `layers.N.k` with `layers.N.v`, or
/// `layers.N.kv`.
fn single_file(path: &Path) -> Result<DumpInfo> {
    let file = header::read(path)?;
    let tokens = tokens::from_tensor(&file)?;
    let mut by_layer: BTreeMap<usize, BTreeMap<&str, &Tensor>> = BTreeMap::new();
    for (name, tensor) in file.tensors.iter().filter(|(n, _)| *n != tokens::TENSOR) {
        let (layer, part) = layer_and_part(name).ok_or_else(|| {
            bad(path, format!("unknown tensor {name:?}"))
                .advice("a dump holds token_ids and layers.N.k with layers.N.v, or layers.N.kv, and nothing else")
        })?;
        by_layer.entry(layer).or_default().insert(part, tensor);
    }
    let mut builder = Builder::new(path, &tokens);
    for (index, parts) in by_layer {
        let name = format!("layers.{index}");
        let layer = match (parts.get("k"), parts.get("v"), parts.get("kv"), parts.get("index")) {
            (Some(k), Some(v), None, None) => builder.k_and_v(&file, &name, k, v)?,
            (None, None, Some(kv), None) if kv.shape.len() == 4 => {
                builder.kv_cache(&file, &format!("{name}.kv"), kv, KvShape::KvFirst)?
            }
            (None, None, Some(kv), index) => builder.mla(&file, &name, kv, index.copied())?,
            _ => {
                return Err(bad(
                    path,
                    format!("{name} has {:?}, not k and v, or kv", parts.keys().collect::<Vec<_>>()),
                ));
            }
        };
        builder.push(index, layer)?;
    }
    builder.finish("file", tokens.clone(), vec![path.to_path_buf()], file.metadata.clone())
}

fn layer_and_part(name: &str) -> Option<(usize, &str)> {
    let (index, part) = name.strip_prefix("layers.")?.split_once('.')?;
    let part = matches!(part, "k" | "v" | "kv" | "index").then_some(part)?;
    Some((index.parse().ok()?, part))
}

/// One folder per prompt with a file per layer: what vLLM's example connector writes.
fn folder(path: &Path, shape: KvShape) -> Result<DumpInfo> {
    let tokens = tokens::from_sidecar(path)?;
    let mut builder = Builder::new(path, &tokens);
    let mut files = Vec::new();
    let mut metadata = BTreeMap::new();
    for (index, layer_file) in layer_files(path)? {
        let file = header::read(&layer_file)?;
        let tensor = match (file.tensors.get("kv_cache"), file.tensors.len()) {
            (Some(tensor), 1) => tensor,
            _ => {
                let names: Vec<_> = file.tensors.keys().collect();
                return Err(bad(&layer_file, format!("holds {names:?}, not the one tensor \"kv_cache\"")));
            }
        };
        builder.file = files.len();
        let layer = builder.kv_cache(&file, "kv_cache", tensor, shape)?;
        builder.push(index, layer)?;
        if files.is_empty() {
            metadata.clone_from(&file.metadata);
        }
        files.push(layer_file);
    }
    builder.finish("vllm-example", tokens.clone(), files, metadata)
}

/// The layer files of a folder by their layer's number; the sidecar and files without one are left
/// out.
pub(crate) fn layer_files(path: &Path) -> Result<BTreeMap<usize, PathBuf>> {
    let io = |e| Error::io("cannot list the folder", e).at(path);
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(path).map_err(io)? {
        let file = entry.map_err(io)?.path();
        let Some(index) = file.file_name().and_then(|n| n.to_str()).and_then(layer_of_file) else { continue };
        header::check_regular(&file)?;
        if let Some(other) = files.insert(index, file.clone()) {
            return Err(bad(&file, format!("a second file of layer {index}, beside {}", other.display())));
        }
    }
    Ok(files)
}

/// `model.layers.12.self_attn.attn.safetensors` is of layer 12.
fn layer_of_file(name: &str) -> Option<usize> {
    let stem = name.strip_suffix(".safetensors")?;
    let (_, rest) = stem.split_once("layers.")?;
    rest.split('.').next()?.parse().ok()
}

/// Collects layers and checks that they belong together.
struct Builder<'a> {
    path: &'a Path,
    tokens: usize,
    file: usize,
    dtype: Option<String>,
    layers: Vec<Layer>,
}

impl<'a> Builder<'a> {
    fn new(path: &'a Path, tokens: &[u32]) -> Self {
        Self { path, tokens: tokens.len(), file: 0, dtype: None, layers: Vec::new() }
    }

    fn shape_error(&self, file: &TensorFile, name: &str, tensor: &Tensor, want: &str) -> Error {
        bad(&file.path, format!("{name} has shape {:?}, not {want} with {} tokens", tensor.shape, self.tokens))
    }

    fn element(&mut self, file: &TensorFile, tensor: &Tensor) -> Result<usize> {
        let dtype = dtype_name(file, tensor)?;
        match &self.dtype {
            Some(first) if *first != dtype => {
                return Err(bad(&file.path, format!("KV of type {dtype} beside layers of type {first}")));
            }
            _ => self.dtype = Some(dtype),
        }
        tensor.element_bytes().ok_or_else(|| bad(&file.path, "elements smaller than a byte".to_owned()))
    }

    fn stream(&self, tensor: &Tensor, skip_rows: usize, row_bytes: usize) -> Stream {
        Stream { file: self.file, offset: tensor.offset + (skip_rows * row_bytes) as u64, row_bytes }
    }

    /// Separate K and V of `[tokens, heads, dim]`; their head sizes may differ.
    fn k_and_v(&mut self, file: &TensorFile, name: &str, k: &Tensor, v: &Tensor) -> Result<Layer> {
        let mut planes = Vec::new();
        let mut streams = Vec::new();
        for (part, tensor) in [("k", k), ("v", v)] {
            let element = self.element(file, tensor)?;
            let plane = match tensor.shape.as_slice() {
                [n, heads, dim] if *n == self.tokens => plane(*heads, dim * element),
                _ => None,
            };
            let plane = plane
                .ok_or_else(|| self.shape_error(file, &format!("{name}.{part}"), tensor, "[tokens, heads, dim]"))?;
            planes.push(plane);
            streams.push(self.stream(tensor, 0, plane.token_bytes()));
        }
        Ok(Layer { spec: LayerSpec { kind: LayerKind::Full, planes, group: 0 }, streams, split: Split::Planes })
    }

    /// MLA rows of `[tokens, row]`, with an optional second plane of indexer rows.
    fn mla(&mut self, file: &TensorFile, name: &str, kv: &Tensor, index: Option<&Tensor>) -> Result<Layer> {
        self.element(file, kv)?;
        let mut planes = Vec::new();
        let mut streams = Vec::new();
        for (part, tensor) in [("kv", Some(kv)), ("index", index)] {
            let Some(tensor) = tensor else { continue };
            let want = "[tokens, row] or [2, tokens, heads, dim]";
            let plane = match (tensor.shape.as_slice(), tensor.element_bytes()) {
                ([n, row], Some(element)) if *n == self.tokens => plane(1, row * element),
                _ => None,
            };
            let plane = plane.ok_or_else(|| self.shape_error(file, &format!("{name}.{part}"), tensor, want))?;
            planes.push(plane);
            streams.push(self.stream(tensor, 0, plane.token_bytes()));
        }
        Ok(Layer { spec: LayerSpec { kind: LayerKind::Mla, planes, group: 0 }, streams, split: Split::Planes })
    }

    /// One tensor that holds K and V in one of vLLM's arrangements.
    fn kv_cache(&mut self, file: &TensorFile, name: &str, tensor: &Tensor, shape: KvShape) -> Result<Layer> {
        let element = self.element(file, tensor)?;
        let shape = match shape {
            KvShape::Auto => self.guess(file, name, tensor)?,
            given => given,
        };
        let n = self.tokens;
        let (found, split) = match (shape, tensor.shape.as_slice()) {
            (KvShape::KvFirst, [2, t, heads, dim]) if *t == n => (plane(*heads, dim * element), Split::Planes),
            (KvShape::KvFirst, [2, t, row]) if *t == n => (plane(1, row * element), Split::Planes),
            (KvShape::KvSecond, [t, 2, heads, dim]) if *t == n => {
                (plane(*heads, dim * element), Split::Halves { groups: 1 })
            }
            (KvShape::KvLast, [t, heads, both]) if *t == n && both.is_multiple_of(2) => {
                (plane(*heads, both / 2 * element), Split::Halves { groups: *heads })
            }
            (KvShape::Mla, [t, _] | [t, 1, _]) if *t == n => {
                let flat = Tensor { shape: vec![n, tensor.bytes / n / element], ..tensor.clone() };
                return self.mla(file, name, &flat, None);
            }
            _ => (None, Split::Planes),
        };
        let plane = found.ok_or_else(|| self.shape_error(file, name, tensor, "an arrangement that is known"))?;
        let streams = match split {
            Split::Planes => {
                vec![self.stream(tensor, 0, plane.token_bytes()), self.stream(tensor, n, plane.token_bytes())]
            }
            Split::Halves { .. } => vec![self.stream(tensor, 0, 2 * plane.token_bytes())],
        };
        Ok(Layer { spec: LayerSpec { kind: LayerKind::Full, planes: vec![plane; 2], group: 0 }, streams, split })
    }

    /// The one arrangement that fits the shape.
    fn guess(&self, file: &TensorFile, name: &str, tensor: &Tensor) -> Result<KvShape> {
        let n = self.tokens;
        let candidates: Vec<KvShape> = match *tensor.shape.as_slice() {
            [t, _] => [(t == n, KvShape::Mla)].to_vec(),
            [a, b, c] => [
                (a == 2 && b == n, KvShape::KvFirst),
                (a == n && c % 2 == 0, KvShape::KvLast),
                // One latent row per token, or the K and V of one head.
                (a == n && b == 1, KvShape::Mla),
            ]
            .to_vec(),
            [a, b, _, _] => [(a == 2 && b == n, KvShape::KvFirst), (a == n && b == 2, KvShape::KvSecond)].to_vec(),
            _ => Vec::new(),
        }
        .into_iter()
        .filter_map(|(fits, shape)| fits.then_some(shape))
        .collect();
        match candidates.as_slice() {
            [one] => Ok(*one),
            [] => Err(self.shape_error(file, name, tensor, "an arrangement that is known")),
            _ => Err(bad(&file.path, format!("{name} of shape {:?} can be read in several ways", tensor.shape))
                .advice("say which with --kv-shape")),
        }
    }

    fn push(&mut self, index: usize, layer: Layer) -> Result<()> {
        if index != self.layers.len() || index >= MAX_LAYERS {
            return Err(bad(self.path, format!("layer {} is missing (the next one is {index})", self.layers.len())));
        }
        self.layers.push(layer);
        Ok(())
    }

    fn finish(
        self,
        form: &'static str,
        tokens: Vec<u32>,
        files: Vec<PathBuf>,
        metadata: BTreeMap<String, String>,
    ) -> Result<DumpInfo> {
        let Some(dtype) = self.dtype else {
            return Err(bad(self.path, "no layer in it".to_owned()));
        };
        Ok(DumpInfo { path: self.path.to_path_buf(), form, tokens, dtype, layers: self.layers, files, metadata })
    }
}
