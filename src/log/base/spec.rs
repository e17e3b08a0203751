//! What is to be stored: a chunk of KV, an object or a part of one.

use crate::format::layout::{SlotCodec, SlotLayout};
use crate::format::record::KeyKind;
use crate::key::ChunkKey;

/// Bytes that the header of an object's slot keeps for its TLVs, its name above all; the header is
/// then one page.
pub const OBJECT_TLV_BYTES: usize = 2048;

/// What to store and what to say about it. [`PutSpec::chunk`] and [`PutSpec::object`] fill in the
/// usual.
#[derive(Clone, Debug)]
pub struct PutSpec {
    /// The key.
    pub key: ChunkKey,
    /// The key it is chained to; zero where there is none.
    pub parent: ChunkKey,
    /// The first chunk of the run that is stored at once, which chooses the drive; `None` for the
    /// parent's drive, or by the key.
    pub root: Option<ChunkKey>,
    /// Number of the drive to prefer to what `root` chooses, while it takes puts:
    /// [`crate::log::Log::preferred_drive`].
    pub preferred_drive: Option<usize>,
    /// Tokens of the chunk; 0 for objects.
    pub tokens: u32,
    /// Chunks before it in its chain.
    pub depth: u32,
    /// Position of its first token in the prompt it was computed in.
    pub start_position: u64,
    /// Hash of the cache salt; 0 without one.
    pub tenant: u64,
    /// Unix seconds after which it is not served; 0 for the log's own time to live.
    pub expiry_s: u32,
    /// What the key names.
    pub key_kind: KeyKind,
    /// KV cache group of the server.
    pub group: u16,
    /// Further fields of the header: type and bytes. What does not fit the layout's header fails
    /// the commit.
    pub tlvs: Vec<(u16, Vec<u8>)>,
    /// Codec of the slot.
    pub codec: SlotCodec,
    /// Layout of an object's slot; `None` for that of a chunk of `tokens` tokens.
    pub layout: Option<SlotLayout>,
    /// Payload bytes of an object; ignored for chunks.
    pub length: u64,
}

impl PutSpec {
    /// A chunk of `tokens` tokens, `depth` chunks down its chain.
    #[must_use]
    pub fn chunk(key: ChunkKey, parent: ChunkKey, tokens: u32, depth: u32) -> Self {
        Self {
            key,
            parent,
            root: None,
            preferred_drive: None,
            tokens,
            depth,
            start_position: 0,
            tenant: 0,
            expiry_s: 0,
            key_kind: KeyKind::Chain,
            group: 0,
            tlvs: Vec::new(),
            codec: SlotCodec::None,
            layout: None,
            length: 0,
        }
    }

    /// An object of `length` bytes, or a part of one (`key_kind`), in a slot of its own.
    #[must_use]
    pub fn object(key: ChunkKey, length: u64, key_kind: KeyKind) -> Self {
        Self {
            key_kind,
            layout: Some(SlotLayout::of_bytes(length as usize, OBJECT_TLV_BYTES)),
            length,
            ..Self::chunk(key, ChunkKey([0; 32]), 0, 0)
        }
    }

    /// The same with another codec.
    #[must_use]
    pub fn with_codec(mut self, codec: SlotCodec) -> Self {
        self.codec = codec;
        if self.layout.is_some() {
            let length = self.length as usize;
            self.layout = Some(match codec {
                SlotCodec::None => SlotLayout::of_bytes(length, OBJECT_TLV_BYTES),
                SlotCodec::Exp4 => SlotLayout::of_coded_bytes(length, OBJECT_TLV_BYTES),
            });
        }
        self
    }
}
