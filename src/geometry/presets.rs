//! Geometries of well-known models, for the tools: shapes from the models' published configuration
//! files.

use super::{DType, Geometry, LayerKind, LayerSpec};
use crate::error::{Error, ErrorKind, Result};

/// Names that [`Geometry::preset`] knows.
pub const PRESETS: [&str; 6] =
    ["llama-3.1-8b", "llama-3.1-70b-tp8", "qwen3-32b", "deepseek-v3", "gemma-3-like", "tiny"];

impl Geometry {
    /// A well-known model's geometry in bf16 with chunks of 256 tokens (16 for `tiny`): its shapes
    /// alone. Which rank and which weights these are, [`Geometry::with_shard`] and
    /// [`Geometry::with_identity`] say.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where the name is not in [`PRESETS`].
    pub fn preset(name: &str) -> Result<Self> {
        let full = |n: usize, heads, dim: u32| vec![LayerSpec::kv(LayerKind::Full, heads, dim * 2); n];
        let (layers, chunk_tokens) = match name {
            // 32 layers, 8 KV heads of 128: 1 MiB per layer and chunk, 32 MiB per chunk.
            "llama-3.1-8b" => (full(32, 8, 128), 256),
            // 80 layers, 8 KV heads of 128 over 8 ranks: 128 KiB per layer and chunk.
            "llama-3.1-70b-tp8" => (full(80, 1, 128), 256),
            "qwen3-32b" => (full(64, 8, 128), 256),
            // 61 MLA layers of 512 + 64 elements per token: 288 KiB per layer and chunk.
            "deepseek-v3" => (vec![LayerSpec::mla(&[576 * 2]); 61], 256),
            // Five sliding layers (window 1024) to every full one.
            "gemma-3-like" => (gemma_layers(), 256),
            "tiny" => (full(4, 2, 32), 16),
            _ => {
                return Err(Error::new(ErrorKind::InvalidInput, format!("unknown model preset {name:?}"))
                    .advice(format!("use one of {}", PRESETS.join(", "))));
            }
        };
        let dtype = DType { name: "bfloat16".to_owned(), bytes: 2 };
        Self::new(name, dtype, layers, chunk_tokens)
    }
}

fn gemma_layers() -> Vec<LayerSpec> {
    (0..48)
        .map(|i| {
            let sliding = i % 6 != 5;
            let kind = if sliding { LayerKind::Sliding { window: 1024 } } else { LayerKind::Full };
            LayerSpec { group: u16::from(sliding), ..LayerSpec::kv(kind, 8, 256 * 2) }
        })
        .collect()
}
