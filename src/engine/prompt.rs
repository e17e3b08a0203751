//! A prompt and its keys, hashed once however often it is looked up, loaded and stored.
//!
//! A server that names its pages itself has no tokens to hash: such a prompt consists of full
//! chunks, one for each name, and its keys lie in a space of their own.

use std::sync::Arc;

use crate::key::{self, Chain, ChunkKey, Extra};

/// Token ids with what else decides their KV, and the keys of their chunks. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Prompt(Arc<PromptInner>);

#[derive(Clone, Debug)]
struct PromptInner {
    /// Empty where the chunks have names in place of tokens.
    tokens: Vec<u32>,
    len: usize,
    extra: Extra,
    chain: Chain,
    tenant: u64,
}

impl Prompt {
    /// Hashes `tokens` in chunks of `chunk_tokens`.
    #[must_use]
    pub fn new(tokens: &[u32], chunk_tokens: u32, extra: &Extra) -> Self {
        Self(Arc::new(PromptInner {
            tokens: tokens.to_vec(),
            len: tokens.len(),
            extra: extra.clone(),
            chain: Chain::new(tokens, chunk_tokens, extra),
            tenant: key::tenant(extra.cache_salt.as_deref()),
        }))
    }

    /// A prompt of full chunks that have `names` in place of tokens, in the order of the prefix. A
    /// name has to identify all that its chunk's KV depends on, above all the prefix before it. No
    /// prompt of tokens has the same keys.
    #[must_use]
    pub fn from_keys(names: &[impl AsRef<[u8]>], chunk_tokens: u32) -> Self {
        Self(Arc::new(PromptInner {
            tokens: Vec::new(),
            len: names.len().saturating_mul(chunk_tokens as usize),
            extra: Extra::default(),
            chain: Chain::named(names, chunk_tokens),
            tenant: key::tenant(None),
        }))
    }

    /// The same prompt with more tokens at its end; only new chunks are hashed. A prompt of names
    /// stays as it is.
    #[must_use]
    pub fn extended(&self, more: &[u32]) -> Self {
        if self.0.len != self.0.tokens.len() {
            return self.clone();
        }
        let mut inner = PromptInner::clone(&self.0);
        inner.tokens.extend_from_slice(more);
        inner.len = inner.tokens.len();
        inner.chain.extend(&inner.tokens, &inner.extra);
        Self(Arc::new(inner))
    }

    /// Its token ids; empty where its chunks have names.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.0.tokens
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there is no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Keys of its full chunks.
    #[must_use]
    pub fn keys(&self) -> &[ChunkKey] {
        self.0.chain.keys()
    }

    /// Tokens of a full chunk; at least 1.
    #[must_use]
    pub fn chunk_tokens(&self) -> usize {
        self.0.chain.chunk_tokens().max(1) as usize
    }

    /// Hash of its cache salt; 0 without one.
    #[must_use]
    pub fn tenant(&self) -> u64 {
        self.0.tenant
    }

    /// The key that chunk `i` is chained to.
    #[must_use]
    pub fn parent_of(&self, i: usize) -> ChunkKey {
        self.0.chain.parent_of(i)
    }

    /// The key of the partial chunk of `len` tokens in the place of chunk `i`; `None` where the
    /// prompt has no such tokens.
    #[must_use]
    pub fn partial_key(&self, i: usize, len: usize) -> Option<ChunkKey> {
        self.0.chain.partial_key_at(i, &self.0.tokens, len, &self.0.extra)
    }
}
