//! A geometry as JSON, for tools that know a cache but not the model that filled it.
//!
//! A geometry gives the names of its namespace and shard. A description that lies in their
//! directories is checked against those names, so it need not be trusted.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{DType, Geometry, LayerSpec, Shard};
use crate::error::{Error, ErrorKind, Result};

#[derive(Serialize, Deserialize)]
struct GeometryFile {
    model: String,
    dtype: DType,
    layers: Vec<LayerSpec>,
    chunk_tokens: u32,
    shard: Shard,
    identity: BTreeMap<String, String>,
}

impl Geometry {
    /// The geometry as JSON.
    pub(crate) fn to_json(&self) -> Vec<u8> {
        let description = GeometryFile {
            model: self.model.clone(),
            dtype: self.dtype.clone(),
            layers: self.layers.to_vec(),
            chunk_tokens: self.chunk_tokens,
            shard: self.shard,
            identity: self.identity.clone(),
        };
        serde_json::to_vec(&description).unwrap_or_default()
    }

    /// The geometry that `json` describes, where it is that of this namespace and shard.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] where it is not.
    pub(crate) fn from_json(json: &[u8], (namespace, shard): (&str, &str)) -> Result<Self> {
        let corrupt = || Error::new(ErrorKind::Corrupt, "the description of the model does not fit its namespace");
        let d: GeometryFile = serde_json::from_slice(json).map_err(|e| corrupt().source(e))?;
        let geometry = Self {
            model: d.model,
            dtype: d.dtype,
            layers: d.layers.into(),
            chunk_tokens: d.chunk_tokens,
            shard: d.shard,
            identity: d.identity,
        };
        geometry.validate().map_err(|e| corrupt().source(e))?;
        let is_its = geometry.fingerprint().dir_name() == namespace && geometry.shard_dir_name() == shard;
        if is_its { Ok(geometry) } else { Err(corrupt()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{LayerKind, PRESETS};

    #[test]
    fn every_geometry_comes_back_and_no_other_one_is_taken_for_it() {
        let mut all: Vec<Geometry> = PRESETS.iter().map(|p| Geometry::preset(p).unwrap()).collect();
        let layers = vec![LayerSpec::opaque(16, 4096), LayerSpec::kv(LayerKind::Sliding { window: 128 }, 2, 64)];
        let shard = Shard { tp: (1, 2), pp: (0, 3), ..Shard::default() };
        let odd = Geometry::new("a/b \"c\"", DType::named("fp8").unwrap(), layers, 64).unwrap();
        all.push(odd.with_shard(shard).unwrap().with_identity("rope", "é"));
        for g in &all {
            let (namespace, shard) = (g.fingerprint().dir_name(), g.shard_dir_name());
            assert_eq!(Geometry::from_json(&g.to_json(), (&namespace, &shard)).unwrap(), *g);
            let other = g.clone().with_identity("weights", "others").to_json();
            for wrong in [&other[..], b"", b"{}", &g.to_json()[1..]] {
                let e = Geometry::from_json(wrong, (&namespace, &shard)).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Corrupt);
            }
            assert!(Geometry::from_json(&g.to_json(), (&namespace, "pp0of9-tp0of1-cp0of1")).is_err());
        }
    }
}
