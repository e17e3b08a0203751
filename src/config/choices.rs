//! The types of settings that are a choice, a size or a percentage, and of one drive.
//!
//! Words in files are lower case; they are read without regard to case. Nothing here touches the
//! file system.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use super::value::{self, Loose};

/// The kind of storage behind the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// Local NVMe, with GPUDirect Storage where the machine has it.
    #[default]
    Gds,
}

/// The I/O path that is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum IoEngine {
    /// The best path that a probe finds.
    #[default]
    Auto,
    /// io_uring, or an error where the kernel refuses it.
    #[serde(alias = "io_uring")]
    Uring,
    /// A pool of threads that use pread and pwrite.
    Threads,
}

/// Whether GPUDirect Storage (cuFile) moves the bytes of KV in GPU memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Cufile {
    /// Where it reaches the GPU without the host's memory.
    #[default]
    Auto,
    /// In any mode, or an error.
    Force,
    /// Not at all.
    Never,
}

/// How KV is coded on the drives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Codec {
    /// `Exp4` where it makes loads faster: for KV in host memory, on a processor with AVX2.
    /// Otherwise `None`.
    #[default]
    Auto,
    /// Not at all.
    None,
    /// bfloat16 without loss in three quarters of its bytes; other types as they are.
    Exp4,
}

/// How chunks are spread over several drives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Chunks that are stored together lie on one drive, and a conversation's next turn beside the
    /// last: a dead drive costs its share of the prefixes.
    #[default]
    Chain,
    /// The chunks of a chain take turns: one load is as fast as all drives together.
    Stripe,
}

/// When a server's connector stores the KV that a request computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StoreWhen {
    /// In the step that computes it.
    #[default]
    Computed,
    /// When the request has ended: admission then knows all new chunks of the request, and how many
    /// tokens were generated.
    Finished,
}

/// Whether loads read layer by layer, and stores take layers as they are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layerwise {
    /// Chunk by chunk.
    #[default]
    Off,
    /// Layer by layer; a server that cannot do that refuses to start.
    On,
    /// Layer by layer where the server can do that.
    Auto,
}

impl Layerwise {
    /// Whether loads and stores go layer by layer where the server can do that.
    #[must_use]
    pub const fn is_on(self) -> bool {
        !matches!(self, Self::Off)
    }
}

impl From<bool> for Layerwise {
    fn from(is_on: bool) -> Self {
        if is_on { Self::On } else { Self::Off }
    }
}

impl Serialize for Layerwise {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if *self == Self::Auto { serializer.serialize_str("auto") } else { serializer.serialize_bool(self.is_on()) }
    }
}

impl Loose for Layerwise {
    fn loose(value: &Value) -> Result<Self, String> {
        match value {
            Value::String(text) if text.trim().eq_ignore_ascii_case("auto") => Ok(Self::Auto),
            other => bool::loose(other).map(Self::from).map_err(|why| format!("{why}, or auto")),
        }
    }
}

/// What the server gets when the cache cannot be opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnOpenFailure {
    /// Every lookup misses, a metric says so, and opening is tried again.
    #[default]
    Disable,
    /// The error.
    Fail,
}

/// What happens to a cache that an incompatible version has written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnIncompatible {
    /// It is left alone and opening fails.
    #[default]
    Refuse,
    /// It is emptied and written anew.
    Recreate,
}

/// Whether this process may change the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Reads and writes.
    #[default]
    Rw,
    /// Reads only; works on a read-only mount.
    Ro,
}

/// What is evicted first when space is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum EvictionPolicy {
    /// Single chunks, the ends of chains first, by how soon chunks of their kind came back before.
    #[default]
    Prefix,
    /// The segment whose chunks have not been used for the longest time.
    Lru,
    /// The segment written first.
    Fifo,
}

/// Which chunks are stored at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Admission {
    /// All.
    #[default]
    All,
    /// Those that are offered for the second time.
    SecondTouch,
    /// All but those of kinds that seldom come back.
    Adaptive,
}

/// The NUMA node of staging memory and workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numa {
    /// The node that the first drive is attached to, on machines with several nodes.
    #[default]
    Auto,
    /// No binding.
    Off,
    /// This node.
    Node(u32),
}

impl Serialize for Numa {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => s.serialize_str("auto"),
            Self::Off => s.serialize_str("off"),
            Self::Node(node) => s.serialize_u32(*node),
        }
    }
}

impl Loose for Numa {
    fn loose(value: &Value) -> Result<Self, String> {
        match value.as_str().map(str::to_ascii_lowercase).as_deref() {
            Some("auto") => Ok(Self::Auto),
            Some("off" | "none") => Ok(Self::Off),
            _ if *value == Value::Bool(false) => Ok(Self::Off),
            _ => u32::loose(value).map(Self::Node).map_err(|_| {
                format!("{} is not a NUMA node; use auto, off or the number of a node", value::show(value))
            }),
        }
    }
}

/// Bytes the cache, or a part of it, may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Capacity {
    /// In all, shared equally by the drives.
    Bytes(u64),
    /// Percent: of each drive's file system, or for a tenant's quota, of the capacity.
    Percent(f64),
}

impl Serialize for Capacity {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Bytes(bytes) => s.serialize_str(&value::show_size(*bytes)),
            Self::Percent(percent) => s.serialize_str(&format!("{percent}%")),
        }
    }
}

impl Loose for Capacity {
    fn loose(value: &Value) -> Result<Self, String> {
        match value::percent(value)? {
            Some(percent) => Ok(Self::Percent(percent)),
            None => value::size_of(value).map(Self::Bytes),
        }
    }
}

/// Bytes that stay free on a file system.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MinFree {
    /// 5 % of the file system or 10 GiB, whichever is less.
    Auto,
    /// This many bytes.
    Bytes(u64),
    /// Percent of the file system.
    Percent(f64),
}

impl Serialize for MinFree {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => s.serialize_str("auto"),
            Self::Bytes(bytes) => s.serialize_str(&value::show_size(*bytes)),
            Self::Percent(percent) => s.serialize_str(&format!("{percent}%")),
        }
    }
}

impl Loose for MinFree {
    fn loose(value: &Value) -> Result<Self, String> {
        if value.as_str().is_some_and(|word| word.eq_ignore_ascii_case("auto")) {
            return Ok(Self::Auto);
        }
        match value::percent(value)? {
            Some(percent) => Ok(Self::Percent(percent)),
            None => value::size_of(value).map(Self::Bytes),
        }
    }
}

/// One drive of the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveSettings {
    /// Its cache directory.
    pub path: PathBuf,
    /// Nothing new is stored there; what it holds is served until it is evicted.
    #[serde(default, deserialize_with = "value::loose")]
    pub drain: bool,
}

impl DriveSettings {
    /// A drive in full use.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), drain: false }
    }
}

impl Loose for Vec<DriveSettings> {
    fn loose(value: &Value) -> Result<Self, String> {
        match value {
            Value::String(paths) => {
                Ok(paths.split(',').map(|path| DriveSettings::new(Path::new(path.trim()))).collect())
            }
            Value::Array(items) => items.iter().map(drive).collect(),
            other => drive(other).map(|drive| vec![drive]),
        }
    }
}

fn drive(value: &Value) -> Result<DriveSettings, String> {
    match value {
        Value::String(path) => Ok(DriveSettings::new(Path::new(path))),
        Value::Object(_) => {
            DriveSettings::deserialize(value).map_err(|e| format!("a drive is a path or {{path, drain}}: {e}"))
        }
        other => Err(format!("{} is not a directory; write a path, or a list of paths", value::show(other))),
    }
}
