//! Chunk keys: a BLAKE3 chain over token ids and all else that decides what their KV is.
//!
//! `key(i) = BLAKE3 keyed with key(i-1) over the token ids of chunk i`, so that equal keys mean
//! equal prefixes. The chain starts at a root made of the LoRA identity and the cache salt; a chunk
//! that overlaps multimodal placeholders first mixes in their content hashes and places. The
//! geometry is not in the key: it names the namespace the key lives in, and the keys of one prompt
//! are the same on every rank. A server that hashes prefixes itself may name its chunks instead
//! ([`Chain::named`]); such keys and those of objects lie in spaces of their own. Keys must stay
//! stable across restarts, processes and machines.

use std::fmt;

/// Key of a chunk or object: 32 bytes of BLAKE3.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkKey(pub [u8; 32]);

impl ChunkKey {
    /// The key as 64 hexadecimal digits.
    #[must_use]
    pub fn to_hex(&self) -> String {
        blake3::Hash::from_bytes(self.0).to_hex().to_string()
    }

    /// A key from 64 hexadecimal digits.
    #[must_use]
    pub fn from_hex(hex: &str) -> Option<Self> {
        blake3::Hash::from_hex(hex).ok().map(|h| Self(*h.as_bytes()))
    }
}

impl fmt::Debug for ChunkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_hex().get(..16).unwrap_or_default())
    }
}

/// A multimodal item of a prompt: the tokens `offset..offset + len` are placeholders for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MmItem {
    /// Digest of the item's content.
    pub hash: Vec<u8>,
    /// First placeholder token, counted from the start of the prompt.
    pub offset: u32,
    /// Number of placeholder tokens.
    pub len: u32,
}

/// Identity of a LoRA adapter. Never its load-order id, which another process may give to another
/// adapter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoraId {
    /// Name under which the server serves it.
    pub name: String,
    /// Path it was loaded from.
    pub path: String,
    /// Digest of its weights, where known.
    pub digest: String,
}

/// What besides the token ids decides the KV of a prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extra {
    /// Multimodal items, in the order of their offsets.
    pub multimodal: Vec<MmItem>,
    /// LoRA adapter in use.
    pub lora: Option<LoraId>,
    /// Cache salt: prompts with different salts never share KV.
    pub cache_salt: Option<String>,
}

impl Extra {
    /// Extra keys of a prompt with only a cache salt.
    #[must_use]
    pub fn salted(salt: &str) -> Self {
        Self { cache_salt: Some(salt.to_owned()), ..Self::default() }
    }
}

/// The tenant number of a cache salt: its hash; 0 stands for prompts without a salt.
#[must_use]
pub fn tenant(salt: Option<&str>) -> u64 {
    let Some(salt) = salt else { return 0 };
    let hash = blake3::derive_key("forebay 1 tenant", salt.as_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(hash.first_chunk::<8>().unwrap_or(&[0; 8]));
    u64::from_le_bytes(first).max(1)
}

/// The key under which an object with the given name is stored.
#[must_use]
pub fn object_key(name: &[u8]) -> ChunkKey {
    ChunkKey(blake3::derive_key("forebay 1 object", name))
}

/// The key of part `part` of an object that is stored in several parts.
#[must_use]
pub fn object_part_key(object: &ChunkKey, part: u32) -> ChunkKey {
    ChunkKey(*blake3::keyed_hash(&object.0, &part.to_le_bytes()).as_bytes())
}

/// The key of a chunk that a server names itself, in place of tokens: in a key space that no chain
/// over tokens meets.
#[must_use]
pub fn named_chunk_key(name: &[u8]) -> ChunkKey {
    ChunkKey(blake3::derive_key("forebay 1 named chunk", name))
}

/// The keys of a prompt's full chunks, and what is needed to go on from them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    root: ChunkKey,
    keys: Vec<ChunkKey>,
    chunk_tokens: u32,
}

impl Chain {
    /// Hashes the full chunks of `tokens`; a remainder shorter than a chunk has its keys from
    /// [`Chain::partial_key_at`].
    ///
    /// A chunk size of 0 gives no keys.
    #[must_use]
    pub fn new(tokens: &[u32], chunk_tokens: u32, extra: &Extra) -> Self {
        let mut chain = Self { root: root(extra), keys: Vec::new(), chunk_tokens };
        chain.extend(tokens, extra);
        chain
    }

    /// The chain of chunks that a server names itself, in the order of `names`. Each name has to
    /// depend on the chunk's whole prefix, as a key over tokens does.
    #[must_use]
    pub fn named(names: &[impl AsRef<[u8]>], chunk_tokens: u32) -> Self {
        let keys = names.iter().map(|name| named_chunk_key(name.as_ref())).collect();
        Self { root: named_chunk_key(&[]), keys, chunk_tokens }
    }

    /// Goes on with a prompt that has grown: `tokens` are all its tokens; chunks already hashed are
    /// not hashed again.
    pub fn extend(&mut self, tokens: &[u32], extra: &Extra) {
        let step = self.chunk_tokens as usize;
        if step == 0 {
            return;
        }
        let mut bytes = Vec::with_capacity(step * 4);
        self.keys.reserve((tokens.len() / step).saturating_sub(self.keys.len()));
        for (i, chunk) in tokens.chunks_exact(step).enumerate().skip(self.keys.len()) {
            let key = link(&self.parent_of(i), chunk, i * step, &extra.multimodal, &mut bytes);
            self.keys.push(key);
        }
    }

    /// Keys of the full chunks, in order.
    #[must_use]
    pub fn keys(&self) -> &[ChunkKey] {
        &self.keys
    }

    /// Tokens of a full chunk.
    #[must_use]
    pub fn chunk_tokens(&self) -> u32 {
        self.chunk_tokens
    }

    /// The key that chunk `i` is chained to: the chunk before it, or the root.
    #[must_use]
    pub fn parent_of(&self, i: usize) -> ChunkKey {
        i.checked_sub(1).and_then(|p| self.keys.get(p)).copied().unwrap_or(self.root)
    }

    /// The key of a partial chunk that holds the first `len` tokens in the place of full chunk
    /// `chunk`, or after the last one: another prompt may have ended there. `None` where `tokens`
    /// (all tokens of the prompt) has fewer, `len` is 0 or a whole chunk, or `chunk` is beyond the
    /// full chunks' end.
    #[must_use]
    pub fn partial_key_at(&self, chunk: usize, tokens: &[u32], len: usize, extra: &Extra) -> Option<ChunkKey> {
        let start = chunk.checked_mul(self.chunk_tokens as usize)?;
        if len == 0 || len >= self.chunk_tokens as usize || chunk > self.keys.len() {
            return None;
        }
        let part = tokens.get(start..start.checked_add(len)?)?;
        let mut bytes = Vec::with_capacity(len * 4);
        Some(link(&self.parent_of(chunk), part, start, &extra.multimodal, &mut bytes))
    }
}

fn root(extra: &Extra) -> ChunkKey {
    let mut h = blake3::Hasher::new_derive_key("forebay 1 chain root");
    let mut field = |present: bool, value: &str| {
        h.update(&[u8::from(present)]).update(&(value.len() as u64).to_le_bytes()).update(value.as_bytes());
    };
    field(extra.cache_salt.is_some(), extra.cache_salt.as_deref().unwrap_or_default());
    let none = LoraId::default();
    let lora = extra.lora.as_ref().unwrap_or(&none);
    for part in [&lora.name, &lora.path, &lora.digest] {
        field(extra.lora.is_some(), part);
    }
    ChunkKey(*h.finalize().as_bytes())
}

/// One step of the chain. Token input has a length divisible by 4, multimodal input never has, so
/// the two cannot collide.
fn link(parent: &ChunkKey, tokens: &[u32], start: usize, items: &[MmItem], bytes: &mut Vec<u8>) -> ChunkKey {
    let mut key = parent.0;
    let end = start + tokens.len();
    for item in items {
        let (from, to) = (item.offset as usize, item.offset as usize + item.len as usize);
        if from < end && start < to {
            bytes.clear();
            bytes.extend_from_slice(&(from as i64 - start as i64).to_le_bytes());
            bytes.extend_from_slice(&item.len.to_le_bytes());
            bytes.extend_from_slice(&(item.hash.len() as u64).to_le_bytes());
            bytes.extend_from_slice(&item.hash);
            let odd = 4 - bytes.len() % 4 + 1;
            bytes.resize(bytes.len() + odd, 0);
            key = *blake3::keyed_hash(&key, bytes).as_bytes();
        }
    }
    bytes.resize(tokens.len() * 4, 0);
    for (to, token) in bytes.chunks_exact_mut(4).zip(tokens) {
        to.copy_from_slice(&token.to_le_bytes());
    }
    ChunkKey(*blake3::keyed_hash(&key, bytes).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(tokens: &[u32], extra: &Extra) -> Vec<ChunkKey> {
        Chain::new(tokens, 4, extra).keys().to_vec()
    }

    #[test]
    fn equal_prefixes_have_equal_keys_and_a_change_shows_in_all_later_ones() {
        let a: Vec<u32> = (0..20).collect();
        let mut b = a.clone();
        b[9] = 99;
        let (ka, kb) = (chain(&a, &Extra::default()), chain(&b, &Extra::default()));
        assert_eq!(ka[..2], kb[..2]);
        assert!(ka[2..].iter().zip(&kb[2..]).all(|(x, y)| x != y));
    }

    #[test]
    fn salt_lora_and_multimodal_content_separate_keys() {
        let tokens: Vec<u32> = (0..12).collect();
        let item = |hash: &str, offset| MmItem { hash: hash.into(), offset, len: 3 };
        let with = |items| Extra { multimodal: items, ..Extra::default() };
        let lora = |digest: &str| Extra {
            lora: Some(LoraId { name: "a".into(), path: "p".into(), digest: digest.into() }),
            ..Extra::default()
        };
        let all = [
            Extra::default(),
            Extra::salted(""),
            Extra::salted("s"),
            lora("1"),
            lora("2"),
            with(vec![item("x", 5)]),
            with(vec![item("y", 5)]),
            with(vec![item("x", 6)]),
        ];
        let last: Vec<_> = all.iter().map(|e| chain(&tokens, e)[2]).collect();
        for (i, a) in last.iter().enumerate() {
            assert!(!last[..i].contains(a), "extra {i} shares a key with an earlier one");
        }
        let first = |e: &Extra| chain(&tokens, e)[0];
        assert_eq!(first(&all[5]), first(&all[0]), "an image behind a chunk does not change its key");
    }

    #[test]
    fn partial_keys_depend_on_their_tokens_and_length() {
        let tokens: Vec<u32> = (0..11).collect();
        let e = Extra::default();
        let c = Chain::new(&tokens, 4, &e);
        let p: Vec<_> = (1..=3).map(|n| c.partial_key_at(c.keys().len(), &tokens, n, &e).unwrap()).collect();
        assert!(p[0] != p[1] && p[1] != p[2]);
        assert_eq!(c.partial_key_at(2, &tokens, 0, &e), None);
        assert_eq!(c.partial_key_at(2, &tokens, 4, &e), None);
        assert_eq!(c.partial_key_at(2, &tokens[..9], 2, &e), None, "not that many tokens");
    }

    #[test]
    fn extending_gives_the_same_chain_as_hashing_at_once() {
        let tokens: Vec<u32> = (0..40).collect();
        let e = Extra { multimodal: vec![MmItem { hash: vec![7], offset: 17, len: 2 }], ..Extra::default() };
        let mut grown = Chain::new(&tokens[..13], 4, &e);
        grown.extend(&tokens, &e);
        assert_eq!(grown, Chain::new(&tokens, 4, &e));
    }

    #[test]
    fn keys_are_stable_across_versions() {
        let k = chain(&[1, 2, 3, 4], &Extra::default());
        assert_eq!(k[0].to_hex(), STABLE, "changing this loses every user's cache: bump the format version");
        assert_eq!(ChunkKey::from_hex(STABLE), Some(k[0]));
    }

    const STABLE: &str = "cfa1c4e7bedd28e31ae1f1bdb4719f3dc65ced05305bf94b1ec38fbe8c7b27eb";
}
