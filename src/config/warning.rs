//! Warnings from loading settings and checking directories, which stop nothing.
//!
//! A warning names its key and where it was set, and never shows a value: a remote address may hold
//! a password.

use std::fmt;
use std::path::PathBuf;

use super::dir::FsKind;

/// Where a setting came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A settings file.
    File(PathBuf),
    /// An environment variable, by name.
    Env(String),
    /// The calling program, which may say under which name its user knows these settings.
    Code(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "in {}", path.display()),
            Self::Env(name) => write!(f, "in the environment variable {name}"),
            Self::Code(name) => write!(f, "set in {name}"),
        }
    }
}

/// A feature that settings may name and that has no effect: not yet, or because it is off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Feature {
    /// RDMA.
    Rdma,
    /// Reuse of chunks at other positions.
    Blending,
    /// A tier in host memory above the drives.
    HostTier,
}

impl Feature {
    /// The feature in words.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Rdma => "RDMA",
            Self::Blending => "blending",
            Self::HostTier => "the memory tier",
        }
    }
}

/// What a warning is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WarningKind {
    /// The setting is understood but its feature does nothing.
    NotActive(Feature),
    /// The key is not a setting; it was ignored.
    UnknownKey,
    /// A cache directory lies on a file system of this kind.
    FileSystem(FsKind),
    /// A cache directory lets others write.
    Permissions,
    /// Huge pages are asked for, and the machine has none of either sort.
    NoHugePages,
    /// A drive has no room for a cache that leaves `min_free` free.
    NoRoom,
}

/// One finding, with advice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// What it is about.
    pub kind: WarningKind,
    /// The key, as the user wrote it; `cache_dir` for directories.
    pub key: String,
    /// Where the key was set, where that is known.
    pub origin: Option<Origin>,
    /// What was found.
    pub message: String,
    /// What to do about it, empty where nothing needs to be done.
    pub advice: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.key)?;
        if let Some(origin) = &self.origin {
            write!(f, " ({origin})")?;
        }
        write!(f, ": {}", self.message)?;
        if self.advice.is_empty() { Ok(()) } else { write!(f, "; {}", self.advice) }
    }
}
