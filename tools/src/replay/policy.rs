//! What a simulated cache gives up when it is full.
//!
//! A policy ranks *segments* (with a granularity of one block, each block is its own segment) and
//! may ask that single blocks of a reclaimed segment be written again. It sees ids, sizes and times
//! only; time is the number of touches, never a clock.

use std::collections::{BTreeMap, HashMap};

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

impl PolicyKind {
    /// The name as users give it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Fifo => "fifo",
            Self::S3Fifo => "s3fifo",
            Self::TwoQ => "2q",
            Self::Arc => "arc",
            Self::Gdsf => "gdsf",
            Self::Lirs => "lirs",
            Self::Sieve => "sieve",
            Self::Prefix => "prefix",
            Self::Optimum => "optimum",
        }
    }

    /// A fresh policy for segments; `None` where there is none of that name.
    pub(crate) fn for_segments(self) -> Option<Box<dyn Policy>> {
        match self {
            Self::Lru => Some(Box::new(Ordered::new(true))),
            Self::Fifo => Some(Box::new(Ordered::new(false))),
            _ => None,
        }
    }
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

/// The decision what to give up.
pub(crate) trait Policy {
    /// A segment has been opened; its blocks follow with [`Policy::touch`].
    fn opened(&mut self, segment: u64);
    /// `block`, which lies in `segment`, has been stored or found.
    fn touch(&mut self, segment: u64, block: &Block);
    /// Takes the segment to reclaim next out of the policy. `open` is the segment that blocks are
    /// appended to: it is reclaimed only where there is no other.
    fn victim(&mut self, open: Option<u64>) -> Option<u64>;
}

/// Segments in the order of their opening (fifo) or their last touch (lru).
#[derive(Debug)]
struct Ordered {
    by_use: bool,
    clock: u64,
    order: BTreeMap<u64, u64>,
    place: HashMap<u64, u64>,
}

impl Ordered {
    fn new(by_use: bool) -> Self {
        Self { by_use, clock: 0, order: BTreeMap::new(), place: HashMap::new() }
    }

    fn renew(&mut self, segment: u64) {
        self.clock += 1;
        if let Some(old) = self.place.insert(segment, self.clock) {
            self.order.remove(&old);
        }
        self.order.insert(self.clock, segment);
    }
}

impl Policy for Ordered {
    fn opened(&mut self, segment: u64) {
        self.renew(segment);
    }

    fn touch(&mut self, segment: u64, _: &Block) {
        if self.by_use {
            self.renew(segment);
        }
    }

    fn victim(&mut self, open: Option<u64>) -> Option<u64> {
        let (&at, &segment) =
            self.order.iter().find(|&(_, &s)| Some(s) != open).or_else(|| self.order.iter().next())?;
        self.order.remove(&at);
        self.place.remove(&segment);
        Some(segment)
    }
}
