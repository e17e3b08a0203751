//! How much of a prompt is stored, as the scheduler asks it. Replaceable where the scheduler cannot see every rank's cache.

use std::sync::Arc;

use crate::engine::{Engine, Prompt};
use crate::error::Result;

/// Says how much of a prompt can be loaded on every rank.
pub trait Lookup: Send {
    /// Tokens from the start of `prompt` that are stored on every rank; `None` where that is not known yet: ask again at the
    /// next step. It must return within microseconds and keep nothing for the caller.
    ///
    /// # Errors
    /// Whatever keeps it from answering; the scheduler takes it as nothing stored, and counts it.
    fn stored_tokens(&self, prompt: &Prompt) -> Result<Option<usize>>;
}

/// The caches of the ranks on this machine.
#[derive(Debug)]
pub struct EngineLookup {
    engines: Vec<Arc<Engine>>,
}

impl EngineLookup {
    /// Asks one engine per rank.
    #[must_use]
    pub fn new(engines: Vec<Arc<Engine>>) -> Self {
        Self { engines }
    }
}

impl Lookup for EngineLookup {
    fn stored_tokens(&self, prompt: &Prompt) -> Result<Option<usize>> {
        let mut least = None;
        for engine in &self.engines {
            let found = engine.lookup(prompt, 0)?.matched_tokens;
            least = Some(least.map_or(found, |l: usize| l.min(found)));
            if found == 0 {
                break;
            }
        }
        Ok(Some(least.unwrap_or(0)))
    }
}
