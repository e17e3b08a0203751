//! Options that both sides of the connector get once, and the rounding that follows from it. No
//! state.

use std::fmt;
use std::str::FromStr;

use crate::config::{Admission, Settings, StoreWhen};
use crate::error::{Error, ErrorKind, Result};
use crate::geometry::{Geometry, LayerKind, block_multiple};

/// One in this many of the server's blocks may be held for stores of finished requests.
const HELD_SHARE: usize = 20;

/// What a server does with the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// It loads and stores.
    #[default]
    Both,
    /// It stores only.
    Producer,
    /// It loads only.
    Consumer,
}

impl Role {
    /// Whether it loads.
    #[must_use]
    pub const fn loads(self) -> bool {
        matches!(self, Self::Both | Self::Consumer)
    }

    /// Whether it stores.
    #[must_use]
    pub const fn stores(self) -> bool {
        matches!(self, Self::Both | Self::Producer)
    }

    /// The role in the server's words.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Both => "kv_both",
            Self::Producer => "kv_producer",
            Self::Consumer => "kv_consumer",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        [Self::Both, Self::Producer, Self::Consumer].into_iter().find(|r| r.as_str() == name).ok_or_else(|| {
            Error::new(ErrorKind::Config, format!("unknown role {name:?}"))
                .advice("use kv_both, kv_producer or kv_consumer")
        })
    }
}

/// What a [`super::Scheduler`] and its [`super::Worker`]s agree on.
#[derive(Clone, Debug)]
pub struct ConnectorOptions {
    /// What the server does with the cache.
    pub role: Role,
    /// Tokens of a chunk; a multiple of every group's block.
    pub chunk_tokens: u32,
    /// Tokens of a block, per KV cache group of the server.
    pub block_tokens: Vec<u32>,
    /// Sliding window in tokens, per KV cache group; `None` where a group keeps all its blocks.
    /// Missing entries count as `None`.
    pub windows: Vec<Option<u32>>,
    /// Blocks of the server's pool.
    pub num_blocks: usize,
    /// Layers are loaded while the model runs, in the step that needs them; otherwise whole
    /// requests before they are scheduled.
    pub layerwise: bool,
    /// Where loads run within a step: one that is predicted, from the rate that loads are measured
    /// at, to hold the step's requests up for more milliseconds is loaded before its request is
    /// scheduled instead.
    pub max_sync_stall_ms: u64,
    /// Generated tokens are stored too.
    pub save_decode_cache: bool,
    /// The end of a prompt that fills no chunk is stored too, in whole blocks.
    pub save_unfull_chunk: bool,
    /// When what a request computed is stored.
    pub store_when: StoreWhen,
    /// The workers may turn down chunks that are new to them: then nothing is promised to other
    /// servers.
    pub turns_down: bool,
    /// A request whose chunks are being loaded for another one waits for that load instead of
    /// loading them again; of use where the server shares blocks of equal prefixes.
    pub join_loads: bool,
    /// What is stored of requests that wait is read into the workers' memory ahead; of use where
    /// they have a memory tier.
    pub prefetch: bool,
    /// Loads of fewer tokens are not worth it.
    pub min_load_tokens: usize,
    /// Tokens that the server computes per second; where loads are measured to be slower, none is
    /// offered. `None` for what is measured.
    pub recompute_tokens_per_s: Option<f64>,
    /// Milliseconds for each GiB until a load counts as failed, as in
    /// [`LoadTimeout::PerGib`](crate::engine::LoadTimeout); 0 loads nothing.
    pub load_timeout_ms: u64,
    /// Milliseconds that a step waits for gathers which must be over before it ends; what is not
    /// gathered then is given up.
    pub gather_patience_ms: u64,
    /// Blocks of finished requests that may wait for gathers; beyond that, stores are given up.
    pub max_held_blocks: usize,
    /// KV events are collected for [`super::Scheduler::take_events`].
    pub events: bool,
    /// Workers that serve the scheduler.
    pub workers: usize,
    /// How many of them store, until the workers have said where their caches lie: all, or fewer
    /// where some have the same KV, as with MLA. Of use to the scheduler only.
    pub writers: usize,
    /// Which of them this is; of use to a worker only.
    pub rank: u32,
    /// An earlier worker stores the same KV in the same place, so that this one stores nothing
    /// until the scheduler says otherwise; of use to a worker only.
    pub silent: bool,
}

impl ConnectorOptions {
    /// Options that follow from the engine's settings and geometry, for a server with blocks of
    /// `block_tokens` per KV cache group and `num_blocks` of them.
    ///
    /// # Errors
    /// As [`ConnectorOptions::validate`].
    pub fn new(settings: &Settings, geometry: &Geometry, block_tokens: &[u32], num_blocks: usize) -> Result<Self> {
        let mut groups: Vec<u16> = geometry.layers.iter().map(|l| l.group).collect();
        groups.sort_unstable();
        groups.dedup();
        let window_of = |group: &u16| {
            let windows = geometry.layers.iter().filter(|l| l.group == *group).map(|l| match l.kind {
                LayerKind::Sliding { window } => Some(window),
                _ => None,
            });
            windows.min().flatten()
        };
        let windows = groups.iter().map(window_of).collect();
        let options = Self {
            chunk_tokens: geometry.chunk_tokens,
            ..Self::unchecked(settings, block_tokens, num_blocks, windows)
        };
        options.validate()?;
        Ok(options)
    }

    /// Options that follow from the engine's settings for a server whose KV cache groups have
    /// blocks of `block_tokens`, `num_blocks` of them, and these sliding windows.
    ///
    /// # Errors
    /// As [`ConnectorOptions::validate`].
    pub fn of_server(
        settings: &Settings,
        block_tokens: &[u32],
        num_blocks: usize,
        windows: Vec<Option<u32>>,
    ) -> Result<Self> {
        let options = Self::unchecked(settings, block_tokens, num_blocks, windows);
        options.validate()?;
        Ok(options)
    }

    fn unchecked(settings: &Settings, block_tokens: &[u32], num_blocks: usize, windows: Vec<Option<u32>>) -> Self {
        Self {
            role: Role::Both,
            chunk_tokens: windowed_chunk_tokens(settings.chunk_size, block_tokens, &windows),
            block_tokens: block_tokens.to_vec(),
            windows,
            num_blocks,
            layerwise: settings.use_layerwise.is_on(),
            max_sync_stall_ms: settings.max_sync_stall_ms,
            save_decode_cache: settings.save_decode_cache,
            save_unfull_chunk: settings.save_unfull_chunk,
            store_when: settings.store_when,
            turns_down: settings.admission != Admission::All,
            join_loads: true,
            prefetch: settings.prefetch && settings.local_cpu,
            min_load_tokens: settings.min_load_tokens,
            recompute_tokens_per_s: settings.recompute_tokens_per_s,
            load_timeout_ms: settings.load_timeout_ms,
            gather_patience_ms: settings.gather_patience_ms,
            max_held_blocks: settings.max_held_blocks.unwrap_or_else(|| (num_blocks / HELD_SHARE).max(1)),
            events: false,
            workers: 1,
            writers: usize::MAX,
            rank: 0,
            silent: false,
        }
    }

    /// Whether anything is loaded.
    #[must_use]
    pub const fn loads(&self) -> bool {
        self.role.loads() && self.load_timeout_ms > 0
    }

    /// Checks that the numbers fit each other.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for no groups, blocks or chunks of no tokens, chunks that are no
    /// multiple of every group's block, a server without workers, and stores of finished
    /// requests where a sliding window has taken their blocks away.
    pub fn validate(&self) -> Result<()> {
        let wrong = |what: String| Err(Error::new(ErrorKind::Config, what));
        if self.block_tokens.is_empty() || self.block_tokens.contains(&0) {
            return wrong(format!("KV cache groups with blocks of {:?} tokens", self.block_tokens));
        }
        if self.workers == 0 {
            return wrong("a scheduler of 0 workers".to_owned());
        }
        if self.writers == 0 {
            return wrong("a scheduler none of whose workers stores".to_owned());
        }
        if self.store_when == StoreWhen::Finished && self.has_windows() {
            let what = "store_when: finished, and layers with a sliding window, whose blocks are gone when a request has ended";
            return Err(Error::new(ErrorKind::Config, what).advice("use store_when: computed"));
        }
        let rounded = effective_chunk_tokens(self.chunk_tokens, &self.block_tokens);
        if self.chunk_tokens == 0 || rounded != self.chunk_tokens {
            return Err(Error::new(
                ErrorKind::Config,
                format!("chunks of {} tokens over blocks of {:?}", self.chunk_tokens, self.block_tokens),
            )
            .advice(format!("set chunk_size to {rounded}")));
        }
        Ok(())
    }

    /// The number of tokens that loads are rounded down to.
    #[must_use]
    pub fn block_multiple(&self) -> usize {
        block_multiple(&self.block_tokens) as usize
    }

    /// The sliding window of a group.
    pub(super) fn window(&self, group: usize) -> Option<usize> {
        self.windows.get(group).copied().flatten().map(|w| w as usize)
    }

    /// Workers that store.
    pub(super) fn writers(&self) -> usize {
        self.writers.clamp(1, self.workers.max(1))
    }

    /// Whether blocks of running requests come free.
    pub(super) fn has_windows(&self) -> bool {
        self.windows.iter().any(Option::is_some)
    }
}

/// `chunk_tokens` rounded up to a multiple of every group's block.
#[must_use]
pub(super) fn effective_chunk_tokens(chunk_tokens: u32, block_tokens: &[u32]) -> u32 {
    let multiple = block_multiple(block_tokens);
    chunk_tokens.max(1).checked_next_multiple_of(multiple).unwrap_or(multiple)
}

/// The chunk size in effect, which belongs into the geometry, and so into the name of the cache's
/// namespace: a multiple of every group's block, and with sliding windows at most so long that the
/// blocks of a chunk are still the request's when its last token is computed, however the server
/// cuts a prompt into steps. In longer chunks those blocks may be gone by then, and a chunk that
/// cannot be stored ends every later hit.
#[must_use]
pub fn windowed_chunk_tokens(chunk_tokens: u32, block_tokens: &[u32], windows: &[Option<u32>]) -> u32 {
    let multiple = block_multiple(block_tokens);
    // A block goes when the window has left it as a whole.
    let kept = |(block, window): (&u32, &Option<u32>)| window.map(|w| w.saturating_add(*block).saturating_sub(1));
    let longest = block_tokens.iter().zip(windows).filter_map(kept).min().unwrap_or(u32::MAX);
    effective_chunk_tokens(chunk_tokens, block_tokens).min((longest / multiple).max(1).saturating_mul(multiple))
}
