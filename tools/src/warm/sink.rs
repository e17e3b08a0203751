//! Where imported KV goes.

use std::collections::BTreeMap;
use std::ops::Range;

use forebay::Result;
use forebay::geometry::Geometry;
use serde::Serialize;

use super::dump::DumpInfo;
use super::piece::Piece;

/// What became of the pieces.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Imported {
    /// Chunks stored.
    pub(crate) stored_chunks: u64,
    /// Bytes of them.
    pub(crate) stored_bytes: u64,
    /// Chunks that the cache did not take.
    pub(crate) shed_chunks: u64,
    /// Why, each cause with its chunks.
    pub(crate) sheds: BTreeMap<&'static str, u64>,
    /// Chunks stored, or found there and verified, that were evicted before the end.
    pub(crate) evicted_chunks: u64,
    /// Bytes loaded back and compared.
    pub(crate) verified_bytes: u64,
    /// Bytes of them that differ.
    pub(crate) wrong_bytes: u64,
    /// Chunks that could not be loaded back.
    pub(crate) lost_chunks: u64,
}

/// A cache that takes pieces of dumps. The reading thread asks [`Sink::missing`] while the main
/// thread stores.
pub(crate) trait Sink: Send + Sync {
    /// Tokens of a chunk: pieces end at its multiples.
    fn chunk_tokens(&self) -> usize;

    /// The tokens of `dump` that the cache lacks, cut at chunks; this is what makes an import
    /// resumable.
    ///
    /// # Errors
    /// `Incompatible` where the dump is not of the cache's model.
    fn missing(&self, dump: &DumpInfo) -> Result<Vec<Range<usize>>>;

    /// What is read of each dump.
    fn scope(&self) -> Scope {
        Scope::Missing
    }

    /// Whether [`Sink::missing`] has looked into a cache.
    fn has_cache(&self) -> bool {
        true
    }

    /// Stores a piece; those of one dump come in order. Storing what is already there is no error.
    fn store(&self, piece: Piece) -> Result<()>;

    /// Ends all stores and makes them durable. Where comparing was asked for, it is done then.
    ///
    /// # Errors
    /// Why the cache did not open; what storing reports.
    fn finish(&self) -> Result<Imported>;
}

/// What is read of a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// What the cache lacks.
    Missing,
    /// Every byte.
    All,
    /// The headers only.
    Headers,
}

/// Looks and stores nothing: `--dry-run`.
pub(crate) struct DryRun {
    /// The cache that an import would fill, where there is one; it is only looked into.
    pub(crate) cache: Option<Box<dyn Sink>>,
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
        let all = || Ok(std::iter::once(0..dump.tokens.len()).collect());
        self.cache.as_ref().map_or_else(all, |cache| cache.missing(dump))
    }

    fn scope(&self) -> Scope {
        if self.read { Scope::All } else { Scope::Headers }
    }

    fn has_cache(&self) -> bool {
        self.cache.is_some()
    }

    fn store(&self, _: Piece) -> Result<()> {
        Ok(())
    }

    fn finish(&self) -> Result<Imported> {
        self.cache.as_ref().map_or(Ok(Imported::default()), |cache| cache.finish())
    }
}
