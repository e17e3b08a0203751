//! What a simulated cache gives up when it is full, by name.
use clap::ValueEnum;

/// Policies by the names users give. The engine's log has prefix, lru and fifo; the others are only
/// simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PolicyKind {
    /// Gives up what was used longest ago.
    Lru,
    /// Gives up what was stored first.
    Fifo,
    /// S3-FIFO.
    #[value(name = "s3fifo")]
    S3Fifo,
    /// 2Q, the full version.
    #[value(name = "2q")]
    TwoQ,
    /// ARC.
    Arc,
    /// GDSF; with equal sizes LFU with dynamic aging.
    Gdsf,
    /// LIRS.
    Lirs,
    /// SIEVE.
    Sieve,
    /// Keeps chunks by what chunks of the same kind did before: a policy for chains, and the one
    /// that a cache uses without settings.
    #[value(alias = "default")]
    Prefix,
    /// The offline optimum: gives up what is used again last.
    Optimum,
}

/// A block as a policy sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// Prefix hash.
    pub(crate) id: u64,
    /// Tokens in it.
    pub(crate) tokens: u64,
    /// Blocks before it in its prompt.
    pub(crate) depth: u32,
    /// Prefix hash of the block before it; anything for the first.
    pub(crate) parent: u64,
}
