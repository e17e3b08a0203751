//! The superblock of a lane: two pages, A and B, of which the one with the higher generation
//! counts. Each is flushed before the other may be written again.

use super::{FeatureAccess, PAGE_BYTES, VERSION, access, corrupt, crc_with_hole, le};
use crate::error::{Error, ErrorKind, Result};

const MAGIC: &[u8; 8] = b"FBSUPER1";
const CRC_AT: usize = 8;

/// Bytes kept for each of the superblock's texts.
pub const TEXT_BYTES: usize = 128;

/// A lane's superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Feature words: compatible, read-compatible, incompatible.
    pub features: [u32; 3],
    /// Counter that tells the newer of A and B.
    pub generation: u64,
    /// Generation of the mount that wrote it; the upper bits of its sequences.
    pub mount_generation: u64,
    /// Identity of the lane.
    pub lane: [u8; 16],
    /// Identity of the drive it lies on.
    pub drive: [u8; 16],
    /// Fingerprint of the namespace.
    pub fingerprint: [u8; 32],
    /// Digest of the layer specs.
    pub layers_digest: [u8; 32],
    /// Bytes of a segment, a multiple of 64 KiB.
    pub segment_bytes: u64,
    /// Bytes of a region of the sealed table.
    pub region_bytes: u64,
    /// Offset of the journal ring in index.kv.
    pub ring_offset: u64,
    /// Pages of the journal ring.
    pub ring_pages: u32,
    /// Tokens of a full chunk.
    pub chunk_tokens: u32,
    /// Offset of the sealed table in index.kv; it is last, so that it can grow with the capacity.
    pub regions_offset: u64,
    /// Unix milliseconds at which the lane was made.
    pub created_ms: u64,
    /// Model name, for people.
    pub model: String,
    /// Shard directory name, for people.
    pub shard: String,
}

impl Superblock {
    /// The page's bytes. Texts are cut to [`TEXT_BYTES`].
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut b = vec![0; PAGE_BYTES];
        le::put_bytes(&mut b, 0, MAGIC);
        le::put_u32(&mut b, 12, VERSION);
        for (i, word) in self.features.iter().enumerate() {
            le::put_u32(&mut b, 16 + i * 4, *word);
        }
        le::put_u32(&mut b, 28, self.chunk_tokens);
        le::put_u64(&mut b, 32, self.generation);
        le::put_u64(&mut b, 40, self.mount_generation);
        le::put_bytes(&mut b, 48, &self.lane);
        le::put_bytes(&mut b, 64, &self.drive);
        le::put_bytes(&mut b, 80, &self.fingerprint);
        le::put_bytes(&mut b, 112, &self.layers_digest);
        le::put_u64(&mut b, 144, self.segment_bytes);
        le::put_u64(&mut b, 152, self.region_bytes);
        le::put_u64(&mut b, 160, self.ring_offset);
        le::put_u32(&mut b, 168, self.ring_pages);
        le::put_u64(&mut b, 176, self.regions_offset);
        le::put_u64(&mut b, 184, self.created_ms);
        put_text(&mut b, 192, &self.model);
        put_text(&mut b, 192 + TEXT_BYTES, &self.shard);
        let sum = crc_with_hole(&b, CRC_AT);
        le::put_u32(&mut b, CRC_AT, sum);
        b
    }

    /// Reads one of the two pages.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] where it is not an intact superblock; [`ErrorKind::Incompatible`]
    /// where its version or features are not known here. A newer version is refused before the CRC
    /// is checked, whose place it may have changed.
    pub fn decode(b: &[u8]) -> Result<Self> {
        let b = b.get(..PAGE_BYTES).ok_or_else(|| corrupt("the superblock is cut short"))?;
        if !b.starts_with(MAGIC) {
            return Err(corrupt("not a Forebay superblock"));
        }
        let version = le::get_u32(b, 12);
        let sum_is_right = has_right_sum(b);
        let features = [le::get_u32(b, 16), le::get_u32(b, 20), le::get_u32(b, 24)];
        if version > VERSION || (sum_is_right && access(features[1], features[2]) == FeatureAccess::Refuse) {
            return Err(Error::new(
                ErrorKind::Incompatible,
                format!("format version {version}, or a feature in use, is newer than this program's"),
            )
            .advice("update forebay, choose another cache_dir, or set on_incompatible: recreate to lose this cache"));
        }
        if version < VERSION && sum_is_right {
            return Err(Error::new(
                ErrorKind::Incompatible,
                format!("format version {version} is older than this program's, which is {VERSION}"),
            )
            .advice(
                "delete the old cache with `forebay purge CACHE_DIR --all`, choose another cache_dir, or set on_incompatible: recreate",
            ));
        }
        if !sum_is_right || version != VERSION {
            return Err(corrupt("a superblock fails its CRC"));
        }
        let s = Self {
            features,
            chunk_tokens: le::get_u32(b, 28),
            generation: le::get_u64(b, 32),
            mount_generation: le::get_u64(b, 40),
            lane: le::get_bytes(b, 48),
            drive: le::get_bytes(b, 64),
            fingerprint: le::get_bytes(b, 80),
            layers_digest: le::get_bytes(b, 112),
            segment_bytes: le::get_u64(b, 144),
            region_bytes: le::get_u64(b, 152),
            ring_offset: le::get_u64(b, 160),
            ring_pages: le::get_u32(b, 168),
            regions_offset: le::get_u64(b, 176),
            created_ms: le::get_u64(b, 184),
            model: get_text(b, 192),
            shard: get_text(b, 192 + TEXT_BYTES),
        };
        s.validate()?;
        Ok(s)
    }

    /// Of the two pages the newer intact one.
    ///
    /// # Errors
    /// As [`Superblock::decode`] where neither is intact. [`ErrorKind::Incompatible`] of either
    /// page comes first, also where the other one is intact.
    pub fn newest(a: &[u8], b: &[u8]) -> Result<Self> {
        match (Self::decode(a), Self::decode(b)) {
            (Ok(a), Ok(b)) => Ok(if a.generation >= b.generation { a } else { b }),
            // Also where damage has made its version a newer one.
            (Ok(s), Err(_)) if !has_right_sum(b) => Ok(s),
            (Err(_), Ok(s)) if !has_right_sum(a) => Ok(s),
            (Err(e), _) | (_, Err(e)) if e.kind() == ErrorKind::Incompatible => Err(e),
            (Ok(s), Err(_)) | (Err(_), Ok(s)) => Ok(s),
            (Err(e), Err(_)) => Err(e),
        }
    }

    /// How this version may use the lane.
    #[must_use]
    pub fn access(&self) -> FeatureAccess {
        access(self.features[1], self.features[2])
    }

    fn validate(&self) -> Result<()> {
        let page = PAGE_BYTES as u64;
        let pages = |v: u64| v != 0 && v.is_multiple_of(page);
        let ring_end = u64::from(self.ring_pages).checked_mul(page).and_then(|n| n.checked_add(self.ring_offset));
        let sound = pages(self.segment_bytes)
            && self.segment_bytes <= 1 << 40
            && pages(self.region_bytes)
            && self.region_bytes >= 2 * page
            && self.region_bytes <= 1 << 32
            && pages(self.ring_offset)
            && self.ring_offset >= 2 * page
            && self.ring_pages > 0
            && pages(self.regions_offset)
            && ring_end.is_some_and(|end| end <= self.regions_offset)
            && self.regions_offset <= 1 << 40;
        if sound { Ok(()) } else { Err(corrupt("a superblock's sizes contradict each other")) }
    }
}

fn has_right_sum(b: &[u8]) -> bool {
    b.get(..PAGE_BYTES).is_some_and(|b| le::get_u32(b, CRC_AT) == crc_with_hole(b, CRC_AT))
}

fn put_text(b: &mut [u8], at: usize, text: &str) {
    let mut len = text.len().min(TEXT_BYTES);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    le::put_bytes(b, at, text.get(..len).unwrap_or_default().as_bytes());
}

fn get_text(b: &[u8], at: usize) -> String {
    let text: [u8; TEXT_BYTES] = le::get_bytes(b, at);
    let end = text.iter().position(|&c| c == 0).unwrap_or(TEXT_BYTES);
    String::from_utf8_lossy(text.get(..end).unwrap_or_default()).into_owned()
}
