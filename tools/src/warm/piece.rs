//! A run of tokens of a dump over all its layers: what is read, and how the bytes become extents.

use std::ops::Range;
use std::sync::Arc;

use forebay::{Error, ErrorKind, Result};

use super::dump::{DumpInfo, Layer, Split};

/// Some tokens of a dump with their KV, ready to be stored.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    /// The dump.
    pub(crate) dump: Arc<DumpInfo>,
    /// Which of its tokens.
    pub(crate) tokens: Range<usize>,
    /// Per layer: its extent, `[plane][token][head][head_bytes]` without padding.
    pub(crate) layers: Vec<Vec<u8>>,
}

impl Piece {
    /// Bytes of KV.
    pub(crate) fn bytes(&self) -> u64 {
        self.layers.iter().map(|l| l.len() as u64).sum()
    }
}

/// One read of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Read {
    /// Which of the dump's files.
    pub(crate) file: usize,
    /// First byte.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: usize,
}

/// The reads that `tokens` of `dump` need, layer by layer.
pub(crate) fn reads(dump: &DumpInfo, tokens: &Range<usize>) -> Vec<Vec<Read>> {
    let layer = |l: &Layer| {
        l.streams
            .iter()
            .map(|s| Read {
                file: s.file,
                offset: s.offset + (tokens.start * s.row_bytes) as u64,
                len: tokens.len() * s.row_bytes,
            })
            .collect()
    };
    dump.layers.iter().map(layer).collect()
}

/// The extent of `layer` from what its reads gave.
///
/// # Errors
/// `Internal` where the reads are not those of [`reads`].
pub(crate) fn assemble(layer: &Layer, mut data: Vec<Vec<u8>>, tokens: usize) -> Result<Vec<u8>> {
    let extent = match (layer.split, data.len()) {
        (Split::Planes, 1) => data.pop().unwrap_or_default(),
        (Split::Planes, _) => data.concat(),
        (Split::Halves { groups }, 1) => halves(&data.pop().unwrap_or_default(), tokens * groups),
        (Split::Halves { .. }, _) => Vec::new(),
    };
    if extent.len() == layer.spec.extent_bytes(tokens) {
        Ok(extent)
    } else {
        Err(Error::new(ErrorKind::Internal, "a dump's reads do not add up to its layer"))
    }
}

/// Takes `groups` pairs of halves apart: all first halves, then all second ones.
fn halves(data: &[u8], groups: usize) -> Vec<u8> {
    let half = data.len() / groups.max(1) / 2;
    let mut out = Vec::with_capacity(data.len());
    if half > 0 {
        for second in [0, 1] {
            data.chunks_exact(half).skip(second).step_by(2).for_each(|h| out.extend_from_slice(h));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay::geometry::{LayerKind, LayerSpec};

    #[test]
    fn interleaved_k_and_v_come_apart() {
        // Two tokens of two heads with one byte each: rows [k0 k1 v0 v1] by token, [k0 v0 k1 v1] by
        // head.
        let spec = LayerSpec::kv(LayerKind::Full, 2, 1);
        let want = [10, 11, 20, 21, 12, 13, 22, 23];
        for (groups, row) in [(1, [10, 11, 12, 13, 20, 21, 22, 23]), (2, [10, 12, 11, 13, 20, 22, 21, 23])] {
            let layer = Layer { spec: spec.clone(), streams: Vec::new(), split: Split::Halves { groups } };
            assert_eq!(assemble(&layer, vec![row.to_vec()], 2).unwrap(), want, "{groups}");
        }
        let layer = Layer { spec, streams: Vec::new(), split: Split::Planes };
        assert!(assemble(&layer, vec![vec![0; 3]], 2).is_err());
    }
}
