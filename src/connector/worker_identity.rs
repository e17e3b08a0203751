//! A worker's identity: which shard of the model it has, and where its cache lies. Sent at the
//! start, and again when a cache that could not be opened then has been opened. Plain data.
//!
//! The scheduler learns from it what no configuration tells it: the layers of each pipeline stage,
//! and whose caches lie on its own machine.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};

use serde::{Deserialize, Serialize};

use crate::config::CacheIdentity;
use crate::engine::Engine;
use crate::error::Result;
use crate::geometry::{DType, Geometry, LayerSpec, Shard};

/// Which KV a worker has, and where its cache lies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerIdentity {
    /// A random number of this start of the worker.
    incarnation: u64,
    /// Its cache is open.
    pub(super) is_up: bool,
    /// Where its cache lies; `None` where that is not known.
    pub(super) place: Option<CacheIdentity>,
    model: String,
    dtype: DType,
    layers: Vec<LayerSpec>,
    chunk_tokens: u32,
    shard: Shard,
    identity: BTreeMap<String, String>,
}

impl WorkerIdentity {
    /// Of a worker over this engine.
    #[must_use]
    pub fn new(engine: &Engine) -> Self {
        let is_up = engine.is_up();
        let place = is_up.then(|| engine.settings().cache_identity()).flatten();
        Self { is_up, ..Self::of(engine.geometry(), place) }
    }

    /// Of a worker with this geometry, whose open cache lies in `place`.
    #[must_use]
    pub fn of(geometry: &Geometry, place: Option<CacheIdentity>) -> Self {
        Self {
            incarnation: RandomState::new().hash_one(std::process::id()),
            is_up: true,
            place,
            model: geometry.model.clone(),
            dtype: geometry.dtype.clone(),
            layers: geometry.layers.to_vec(),
            chunk_tokens: geometry.chunk_tokens,
            shard: geometry.shard,
            identity: geometry.identity.clone(),
        }
    }

    /// The worker's geometry.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidInput`] where the identity describes impossible KV.
    pub fn geometry(&self) -> Result<Geometry> {
        let made = Geometry::new(&self.model, self.dtype.clone(), self.layers.clone(), self.chunk_tokens)?;
        let made = made.with_shard(self.shard)?;
        Ok(self.identity.iter().fold(made, |made, (name, value)| made.with_identity(name, value)))
    }
}
