//! The chunks of a prefetch: each is looked up when it is about to be read, so that chunks that
//! wait hold no lease.

use std::ops::Range;
use std::sync::Arc;

use super::adapter::LogSource;
use super::calls::{LOAD_LEASE, longest_partial};
use super::{Engine, Prompt};
use crate::error::Result;
use crate::log::Opening;
use crate::pipeline::{ChunkSource, Prefetch};

impl Engine {
    /// Reads what the drives have of the tokens in `tokens`, and memory has not, into the memory
    /// tier, so that a load to come finds it there. No memory of the server's is needed. Returns at
    /// once; reading gives way to loads, and what is read stays in memory as long as the answer
    /// lives. Without a memory tier the answer says so.
    ///
    /// # Errors
    /// As [`Engine::lookup`].
    pub fn prefetch(&self, prompt: &Prompt, tokens: Range<usize>) -> Result<Prefetch> {
        let inner = self.check()?;
        inner.check_prompt(prompt)?;
        let stop = tokens.end.min(prompt.len());
        let mut chunks = StoredChunks {
            opening: Arc::clone(&inner.opening),
            prompt: prompt.clone(),
            first: tokens.start / prompt.chunk_tokens(),
            stop: if tokens.start < stop { stop } else { 0 },
            last: None,
        };
        Ok(inner.pipeline.prefetch(Box::new(move |at| chunks.find(at))))
    }
}

/// The chunks of a prompt that are stored: full ones, and the longest partial chunk after them.
struct StoredChunks {
    opening: Arc<Opening>,
    prompt: Prompt,
    first: usize,
    /// Tokens from here on are not asked for.
    stop: usize,
    /// The place of the partial chunk, once it was found.
    last: Option<usize>,
}

impl StoredChunks {
    fn find(&mut self, at: usize) -> Option<Arc<dyn ChunkSource>> {
        let at = self.first + at;
        if self.last.is_some_and(|last| at > last) || at * self.prompt.chunk_tokens() >= self.stop {
            return None;
        }
        let log = self.opening.log()?;
        if let Some(chunk) = self.prompt.keys().get(at).and_then(|key| log.locate(key, LOAD_LEASE)) {
            return Some(Arc::new(LogSource { log, chunk }));
        }
        let (_, key) = longest_partial(&log, &self.prompt, at)?;
        let chunk = log.locate(&key, LOAD_LEASE)?;
        self.last = Some(at);
        Some(Arc::new(LogSource { log, chunk }))
    }
}
