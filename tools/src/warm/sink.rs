//! Where imported KV goes.

use std::ops::Range;

use forebay::Result;
use forebay::geometry::Geometry;

use super::dump::DumpInfo;
use super::piece::Piece;

/// A cache that takes pieces of dumps. The reading thread asks [`Sink::missing`] while the main thread stores.
pub(crate) trait Sink: Send + Sync {
    /// Tokens of a chunk: pieces end at its multiples.
    fn chunk_tokens(&self) -> usize;

    /// The tokens of `dump` that the cache lacks, cut at chunks; this is what makes an import resumable.
    ///
    /// # Errors
    /// `Incompatible` where the dump is not of the cache's model.
    fn missing(&self, dump: &DumpInfo) -> Result<Vec<Range<usize>>>;

    /// Stores a piece; those of one dump come in order. Storing what is already there is no error.
    fn store(&self, piece: Piece) -> Result<()>;

    /// Makes everything durable and, where that was asked for, compares it. Returns the bytes that differ.
    fn finish(&self) -> Result<u64>;
}

/// Wants everything and stores nothing: `--dry-run`.
#[derive(Debug)]
pub(crate) struct DryRun {
    /// What dumps are checked against.
    pub(crate) geometry: Option<Geometry>,
    /// Tokens of a chunk.
    pub(crate) chunk_tokens: usize,
    /// Read every byte instead of the headers only.
    pub(crate) read: bool,
}

impl Sink for DryRun {
    fn chunk_tokens(&self) -> usize {
        self.chunk_tokens
    }

    fn missing(&self, dump: &DumpInfo) -> Result<Vec<Range<usize>>> {
        if let Some(geometry) = &self.geometry {
            dump.check(geometry)?;
        }
        Ok(if self.read { std::iter::once(0..dump.tokens.len()).collect() } else { Vec::new() })
    }

    fn store(&self, _: Piece) -> Result<()> {
        Ok(())
    }

    fn finish(&self) -> Result<u64> {
        Ok(0)
    }
}
