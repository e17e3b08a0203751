//! What the engine asks of the remote tier.

use std::time::Instant;

use super::{Engine, EngineInner, Prompt};
use crate::config::Mode;
use crate::error::Result;
use crate::key::ChunkKey;
use crate::remote::{Fetch, Wanted};

impl Engine {
    /// Starts to bring the chunks of `prompt` that no drive here has from the remote tier to a
    /// drive, and into the memory tier where there is one: in order, until the first that is not
    /// there, and no longer than until `deadline`. With the setting `save_unfull_chunk` the
    /// prompt's partial last chunk is one of them, where one of just its length was uploaded.
    /// Returns at once; lookups find what has come. Without a remote tier, in a cache that is read
    /// only, and where nothing is missing, it is over at once.
    ///
    /// # Errors
    /// As [`Engine::lookup`].
    pub fn fetch(&self, prompt: &Prompt, deadline: Instant) -> Result<Fetch> {
        self.fetch_upto(prompt, prompt.len(), deadline)
    }

    /// As [`Engine::fetch`], of a prompt's first `tokens`: a partial chunk ends there.
    pub(crate) fn fetch_upto(&self, prompt: &Prompt, tokens: usize, deadline: Instant) -> Result<Fetch> {
        let inner = self.check()?;
        inner.check_prompt(prompt)?;
        let remote = inner.remote.as_ref().filter(|_| inner.options.settings.mode == Mode::Rw);
        let (Some(remote), Some(log)) = (remote, inner.log()) else { return Ok(Fetch::nothing()) };
        let chunk = inner.geometry.chunk_tokens;
        let (full, rest) = (tokens / chunk.max(1) as usize, tokens % chunk.max(1) as usize);
        let there = prompt.keys().iter().take(full).take_while(|key| log.contains(key)).count();
        let wanted = |at: usize, key, tokens| Wanted {
            key,
            parent: prompt.parent_of(at),
            tokens,
            depth: at as u32,
            tenant: prompt.tenant(),
        };
        let chunks = prompt.keys().iter().enumerate().take(full).skip(there).map(|(at, &key)| wanted(at, key, chunk));
        let has_partial = rest > 0 && inner.options.settings.save_unfull_chunk;
        let partial = has_partial.then(|| prompt.partial_key(full, rest)).flatten().filter(|key| !log.contains(key));
        let wanted = chunks.chain(partial.map(|key| wanted(full, key, rest as u32))).collect();
        Ok(remote.fetch(log, inner.pipeline.memory().cloned(), wanted, deadline))
    }

    /// Up to `most` chunks that the remote tier has got (`true`) or does not have any more, in the
    /// order in which this process has learned of it, since the first call; a bounded number of
    /// them waits to be taken.
    #[must_use]
    pub fn take_remote_changes(&self, most: usize) -> Vec<(ChunkKey, bool)> {
        self.check().ok().and_then(|inner| Some(inner.remote.as_ref()?.take_changes(most))).unwrap_or_default()
    }

    /// Other processes have uploaded these chunks: a fetch that has not found them a moment ago
    /// looks for them again.
    pub fn uploaded_by_others(&self, keys: &[ChunkKey]) {
        self.check().ok().and_then(|inner| inner.remote.as_ref()).iter().for_each(|remote| remote.put_by_others(keys));
    }

    /// Whether there is a remote tier to fetch from.
    #[must_use]
    pub fn has_remote(&self) -> bool {
        self.inner.remote.is_some()
    }

    /// Waits until what was stored so far is uploaded, or was shed; whether it was by `deadline`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Forked`].
    pub fn wait_uploaded(&self, deadline: Instant) -> Result<bool> {
        Ok(self.check()?.remote.as_ref().is_none_or(|remote| remote.wait_uploaded(deadline)))
    }
}

impl EngineInner {
    /// Ends the remote tier; waits for uploads for at most half of the time until `deadline`.
    pub(super) fn close_remote(&self, deadline: Instant) {
        let Some(remote) = &self.remote else { return };
        let now = Instant::now();
        remote.wait_uploaded(now + deadline.saturating_duration_since(now) / 2);
        remote.close();
    }
}
