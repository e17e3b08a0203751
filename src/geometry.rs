//! What one chunk of KV is: its layers, their planes, and which shard of the model it belongs to.
//!
//! The geometry decides every size and offset of a slot before anything is read, and its
//! [`Fingerprint`] names the namespace: the same bytes read under another geometry would be wrong
//! KV with a valid CRC, so nothing that changes the meaning of the bytes may be missing from it.
//! This module knows no files, keys or devices. Beside this file: `presets` (well-known models) and
//! `description` (a geometry as JSON).
//!
//! Inside an extent (one layer of one chunk) bytes are ordered `[plane][token][head][head_bytes]`,
//! whatever the server's own layout is; an *opaque* layer is `[block][block_bytes]` and only the
//! server knows what is in it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};

mod description;
mod presets;

pub use presets::PRESETS;

/// Element type of the KV cache: a name, and the bytes of one element. The name enters the
/// fingerprint, and the codec codes only types that it names as bfloat16.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DType {
    /// Name as the server writes it, for example `bfloat16` or `fp8_e4m3`.
    pub name: String,
    /// Bytes of one element.
    pub bytes: u32,
}

impl DType {
    /// An element type from its name, with the size of the well-known ones.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where the name is not known; build the struct by hand then.
    pub fn named(name: &str) -> Result<Self> {
        let bytes = match name {
            "bfloat16" | "bf16" | "float16" | "fp16" | "half" | "auto" => 2,
            "float32" | "fp32" | "float" => 4,
            "fp8" | "fp8_e4m3" | "fp8_e5m2" | "float8_e4m3fn" | "float8_e5m2" | "int8" | "uint8" => 1,
            _ => {
                return Err(Error::new(ErrorKind::InvalidInput, format!("unknown KV dtype {name:?}")).advice(
                    "use bfloat16, float16, float32, fp8_e4m3, fp8_e5m2, int8, or give the bytes per element",
                ));
            }
        };
        Ok(Self { name: name.to_owned(), bytes })
    }
}

/// The least common multiple of these lengths of blocks, without zeros; at least 1.
#[must_use]
pub fn block_multiple(block_tokens: &[u32]) -> u32 {
    let gcd = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let all = block_tokens.iter().filter(|b| **b > 0).map(|b| u64::from(*b));
    let lcm = all.fold(1u64, |lcm, b| (lcm / gcd(lcm, b)).saturating_mul(b));
    u32::try_from(lcm).unwrap_or(u32::MAX)
}

/// The least number of tokens that is whole blocks of every opaque layer; at least 1.
#[must_use]
pub fn opaque_multiple(layers: &[LayerSpec]) -> u32 {
    block_multiple(&layers.iter().filter_map(opaque_block).collect::<Vec<_>>())
}

/// Tokens of a block of an opaque layer.
fn opaque_block(layer: &LayerSpec) -> Option<u32> {
    match layer.kind {
        LayerKind::Opaque { block_tokens, .. } => Some(block_tokens),
        _ => None,
    }
}

/// One plane of a layer: K, V, the compressed MLA row, an indexer row, or quantisation scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PlaneSpec {
    /// KV heads on this shard.
    pub heads: u32,
    /// Bytes of one head of one token.
    pub head_bytes: u32,
}

impl PlaneSpec {
    /// Bytes of one token in this plane.
    #[must_use]
    pub const fn token_bytes(self) -> usize {
        self.heads as usize * self.head_bytes as usize
    }
}

/// How a layer attends and what its cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LayerKind {
    /// Full attention, K and V.
    Full,
    /// Sliding-window attention over the given number of tokens.
    Sliding {
        /// Window in tokens.
        window: u32,
    },
    /// Multi-head latent attention: one compressed row per token, the same on every tensor-parallel
    /// rank.
    Mla,
    /// Blocks of bytes that only the server understands.
    Opaque {
        /// Tokens of one block.
        block_tokens: u32,
        /// Bytes of one block of this layer.
        block_bytes: u32,
    },
}

/// One layer's share of a chunk.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayerSpec {
    /// Kind of the layer.
    pub kind: LayerKind,
    /// Planes, in the order in which they lie in the extent; empty for opaque layers.
    pub planes: Vec<PlaneSpec>,
    /// KV cache group of the server that the layer belongs to (0 where there is only one).
    pub group: u16,
}

impl LayerSpec {
    /// A layer of separate K and V planes.
    #[must_use]
    pub fn kv(kind: LayerKind, heads: u32, head_bytes: u32) -> Self {
        let plane = PlaneSpec { heads, head_bytes };
        Self { kind, planes: vec![plane, plane], group: 0 }
    }

    /// A layer of planes with one head each, of the given bytes per token (MLA; 576+132 with an
    /// indexer).
    #[must_use]
    pub fn mla(rows: &[u32]) -> Self {
        let planes = rows.iter().map(|&head_bytes| PlaneSpec { heads: 1, head_bytes }).collect();
        Self { kind: LayerKind::Mla, planes, group: 0 }
    }

    /// A layer of opaque blocks.
    #[must_use]
    pub fn opaque(block_tokens: u32, block_bytes: u32) -> Self {
        Self { kind: LayerKind::Opaque { block_tokens, block_bytes }, planes: Vec::new(), group: 0 }
    }

    /// Bytes of an extent that holds `tokens` tokens of this layer, unpadded.
    #[must_use]
    pub fn extent_bytes(&self, tokens: usize) -> usize {
        match self.kind {
            LayerKind::Opaque { block_tokens, block_bytes } => {
                tokens.div_ceil(block_tokens as usize) * block_bytes as usize
            }
            _ => tokens * self.planes.iter().map(|p| p.token_bytes()).sum::<usize>(),
        }
    }
}

/// Coordinates of a shard: `(rank, size)` per kind of parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shard {
    /// Tensor parallel.
    pub tp: (u16, u16),
    /// Pipeline parallel.
    pub pp: (u16, u16),
    /// Context parallel.
    pub cp: (u16, u16),
}

impl Default for Shard {
    fn default() -> Self {
        Self { tp: (0, 1), pp: (0, 1), cp: (0, 1) }
    }
}

/// Digest over all that gives the stored bytes their meaning. It names the namespace, and with it a
/// directory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// The name of the namespace directory: the first 16 bytes in hexadecimal.
    #[must_use]
    pub fn dir_name(&self) -> String {
        self.0.iter().take(16).map(|b| format!("{b:02x}")).collect()
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.dir_name())
    }
}

/// The geometry of a chunk; cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Model name, for people; enters the fingerprint.
    pub model: String,
    /// Element type.
    pub dtype: DType,
    /// Layers in the order in which they are computed.
    pub layers: Arc<[LayerSpec]>,
    /// Tokens of a full chunk.
    pub chunk_tokens: u32,
    /// Which shard of the model this is.
    pub shard: Shard,
    /// What else decides the meaning of the bytes: model revision or weights digest, quantisation,
    /// scale digest, RoPE parameters; for opaque layers also layout, attention backend and
    /// engine version.
    pub identity: BTreeMap<String, String>,
}

/// Largest number of layers a slot can describe.
pub const MAX_LAYERS: usize = 4096;
/// Largest number of tokens in a chunk.
pub const MAX_CHUNK_TOKENS: u32 = 1 << 16;
/// Largest extent in bytes.
pub const MAX_EXTENT_BYTES: usize = 1 << 30;

impl Geometry {
    /// A geometry of `layers` with the given chunk size, unsharded.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where a size is zero or beyond its limit, or a chunk is not
    /// whole opaque blocks.
    pub fn new(model: &str, dtype: DType, layers: Vec<LayerSpec>, chunk_tokens: u32) -> Result<Self> {
        let g = Self {
            model: model.to_owned(),
            dtype,
            layers: layers.into(),
            chunk_tokens,
            shard: Shard::default(),
            identity: BTreeMap::new(),
        };
        g.validate()?;
        Ok(g)
    }

    /// The same geometry on another shard. With pipeline stages the namespace does not say which
    /// layers each stage has: give them in a part of the [identity](Self::with_identity), or a
    /// stage of as many other layers finds this one's KV.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where a rank is not below its size.
    pub fn with_shard(mut self, shard: Shard) -> Result<Self> {
        self.shard = shard;
        self.validate()?;
        Ok(self)
    }

    /// The same geometry with one more part of its identity, for example `("model_revision",
    /// "5f0b02c")`.
    #[must_use]
    pub fn with_identity(mut self, name: &str, value: &str) -> Self {
        self.identity.insert(name.to_owned(), value.to_owned());
        self
    }

    /// The same geometry with the setting `fingerprint` as a part of its identity, where it is set.
    #[must_use]
    pub(crate) fn with_fingerprint(self, own: Option<&str>) -> Self {
        match own {
            None | Some("") => self,
            Some(own) => self.with_identity("settings", own),
        }
    }

    /// The same geometry with another chunk size.
    ///
    /// # Errors
    /// As [`Geometry::new`].
    pub fn with_chunk_tokens(mut self, chunk_tokens: u32) -> Result<Self> {
        self.chunk_tokens = chunk_tokens;
        self.validate()?;
        Ok(self)
    }

    fn validate(&self) -> Result<()> {
        let bad =
            |what: String| Err(Error::new(ErrorKind::InvalidInput, format!("geometry of {}: {what}", self.model)));
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            return bad(format!("{} layers, need 1 to {MAX_LAYERS}", self.layers.len()));
        }
        if self.chunk_tokens == 0 || self.chunk_tokens > MAX_CHUNK_TOKENS {
            return bad(format!("{} tokens in a chunk, need 1 to {MAX_CHUNK_TOKENS}", self.chunk_tokens));
        }
        for (name, (rank, size)) in [("tp", self.shard.tp), ("pp", self.shard.pp), ("cp", self.shard.cp)] {
            if rank >= size {
                return bad(format!("{name} rank {rank} is not below its size {size}"));
            }
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let opaque = matches!(layer.kind, LayerKind::Opaque { .. });
            if let LayerKind::Opaque { block_tokens, block_bytes } = layer.kind
                && (block_tokens == 0 || block_bytes == 0 || !self.chunk_tokens.is_multiple_of(block_tokens))
            {
                return bad(format!(
                    "layer {i}: opaque blocks of {block_tokens} tokens and {block_bytes} bytes do not divide a chunk of {} tokens",
                    self.chunk_tokens
                ));
            }
            if opaque != layer.planes.is_empty() || layer.planes.iter().any(|p| p.token_bytes() == 0) {
                return bad(format!(
                    "layer {i}: needs planes of at least one byte per token, or an opaque kind without planes"
                ));
            }
            let tokens = self.chunk_tokens as usize;
            let bytes = match layer.kind {
                LayerKind::Opaque { block_tokens, block_bytes } => {
                    Some(tokens.div_ceil(block_tokens as usize).saturating_mul(block_bytes as usize))
                }
                _ => layer
                    .planes
                    .iter()
                    .try_fold(0usize, |sum, p| sum.checked_add(p.token_bytes()))
                    .and_then(|b| b.checked_mul(tokens)),
            };
            if bytes.is_none_or(|b| b > MAX_EXTENT_BYTES) {
                return bad(format!("layer {i}: an extent would exceed {MAX_EXTENT_BYTES} bytes"));
            }
        }
        Ok(())
    }

    /// Whether every rank of a tensor-parallel group holds the same bytes (all layers are MLA), so
    /// that one copy serves all of them.
    #[must_use]
    pub fn replicated_over_tp(&self) -> bool {
        self.layers.iter().all(|l| l.kind == LayerKind::Mla)
    }

    /// Name of the shard directory, such as `pp0of1-tp2of8-cp0of1`; the tensor-parallel part is
    /// `tp0of1` where KV is replicated.
    #[must_use]
    pub fn shard_dir_name(&self) -> String {
        let Shard { tp, pp, cp } = self.shard;
        let tp = if self.replicated_over_tp() { (0, 1) } else { tp };
        format!("pp{}of{}-tp{}of{}-cp{}of{}", pp.0, pp.1, tp.0, tp.1, cp.0, cp.1)
    }

    /// Bytes of layer `layer` in a chunk of `tokens` tokens, unpadded; 0 where there is no such
    /// layer.
    #[must_use]
    pub fn extent_bytes(&self, layer: usize, tokens: usize) -> usize {
        self.layers.get(layer).map_or(0, |l| l.extent_bytes(tokens))
    }

    /// Payload bytes of a chunk of `tokens` tokens over all layers.
    #[must_use]
    pub fn chunk_bytes(&self, tokens: usize) -> usize {
        self.layers.iter().map(|l| l.extent_bytes(tokens)).sum()
    }

    /// The namespace: BLAKE3 over a canonical rendering of the geometry. Left out are the ranks,
    /// since the shards of one model lie beside each other in one namespace; the tensor-parallel
    /// size where KV is replicated; and with pipeline parallelism the layers, which differ between
    /// its stages.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        let mut h = blake3::Hasher::new_derive_key("forebay 1 namespace fingerprint");
        let mut field = |name: &str, value: &[u8]| {
            h.update(&(name.len() as u32).to_le_bytes()).update(name.as_bytes());
            h.update(&(value.len() as u64).to_le_bytes()).update(value);
        };
        field("format", &1u32.to_le_bytes());
        field("model", self.model.as_bytes());
        field("dtype", self.dtype.name.as_bytes());
        field("dtype_bytes", &self.dtype.bytes.to_le_bytes());
        field("chunk_tokens", &self.chunk_tokens.to_le_bytes());
        let tp = if self.replicated_over_tp() { 1 } else { self.shard.tp.1 };
        for (name, size) in [("tp", tp), ("pp", self.shard.pp.1), ("cp", self.shard.cp.1)] {
            field(name, &size.to_le_bytes());
        }
        if self.shard.pp.1 == 1 {
            // With pipeline parallelism each stage has other layers. They have their own shard
            // directory, and each lane's superblock has the digest of its layers.
            field("layers", &self.layers_digest());
        } else {
            // The remote tier has no superblocks: there the sizes of slots tell layers apart, and
            // those do not depend on how many tokens a block has.
            let different: BTreeSet<u32> = self.layers.iter().filter_map(opaque_block).collect();
            different.iter().for_each(|tokens| field("block_tokens", &tokens.to_le_bytes()));
        }
        for (name, value) in &self.identity {
            field(name, value.as_bytes());
        }
        Fingerprint(*h.finalize().as_bytes())
    }

    /// Digest of the layer specs of this shard; in every lane's superblock.
    #[must_use]
    pub fn layers_digest(&self) -> [u8; 32] {
        let mut h = blake3::Hasher::new_derive_key("forebay 1 layer specs");
        for layer in self.layers.iter() {
            let (tag, a, b) = match layer.kind {
                LayerKind::Full => (0u32, 0, 0),
                LayerKind::Sliding { window } => (1, window, 0),
                LayerKind::Mla => (2, 0, 0),
                LayerKind::Opaque { block_tokens, block_bytes } => (3, block_tokens, block_bytes),
            };
            for v in [tag, a, b, u32::from(layer.group), layer.planes.len() as u32] {
                h.update(&v.to_le_bytes());
            }
            for p in &layer.planes {
                h.update(&p.heads.to_le_bytes()).update(&p.head_bytes.to_le_bytes());
            }
        }
        *h.finalize().as_bytes()
    }
}

#[cfg(test)]
mod tests;
