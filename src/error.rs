//! The one error type of the public API: what went wrong, where, and what the operator can do.
//!
//! Modules below the engine use the same type, so that a path and an offset learnt deep down reach
//! the log line unchanged. A *miss* (corrupt extent, reclaimed slot, time-out of one request) is
//! not an error of the engine: it is counted and reported in the result of a load. This type must
//! not be used for control flow on the hot path.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

/// A result with Forebay's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of failure this is; stable, for programs to match on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting is missing, malformed or contradicts another.
    Config,
    /// An argument of an API call is out of range or of the wrong shape.
    InvalidInput,
    /// The machine, kernel or file system cannot do what was asked.
    Unsupported,
    /// The operating system refused access.
    Permission,
    /// A file, namespace or key is not there.
    NotFound,
    /// Another process holds the lock.
    Locked,
    /// A file was written by an incompatible version or for another geometry.
    Incompatible,
    /// Bytes on disk fail their check.
    Corrupt,
    /// The operating system reported an I/O error.
    Io,
    /// A transfer moved fewer bytes than asked.
    ShortIo,
    /// A deadline passed.
    TimedOut,
    /// Drive, capacity or `min_free` leave no room.
    NoSpace,
    /// A bounded queue or pool is full; the work was not taken.
    Busy,
    /// The caller cancelled the operation.
    Cancelled,
    /// The engine or handle has been closed.
    Closed,
    /// The process was forked after the engine was opened.
    Forked,
    /// An invariant of Forebay itself does not hold.
    Internal,
}

impl ErrorKind {
    /// The kind in the words of metrics labels and JSON output.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::InvalidInput => "invalid_input",
            Self::Unsupported => "unsupported",
            Self::Permission => "permission",
            Self::NotFound => "not_found",
            Self::Locked => "locked",
            Self::Incompatible => "incompatible",
            Self::Corrupt => "corrupt",
            Self::Io => "io",
            Self::ShortIo => "short_io",
            Self::TimedOut => "timed_out",
            Self::NoSpace => "no_space",
            Self::Busy => "busy",
            Self::Cancelled => "cancelled",
            Self::Closed => "closed",
            Self::Forked => "forked",
            Self::Internal => "internal",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An error with its kind, context, place on disk, advice and cause.
///
/// ```
/// use forebay::{Error, ErrorKind};
/// let e = Error::new(ErrorKind::Config, "chunk_size is 0").advice("set chunk_size to a multiple of the block size");
/// assert_eq!(e.to_string(), "chunk_size is 0; set chunk_size to a multiple of the block size");
/// ```
#[derive(Debug)]
pub struct Error(Box<ErrorInner>);

#[derive(Debug)]
struct ErrorInner {
    kind: ErrorKind,
    message: Cow<'static, str>,
    path: Option<PathBuf>,
    offset: Option<u64>,
    advice: Option<Cow<'static, str>>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind` described by `message`.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(ErrorInner {
            kind,
            message: message.into(),
            path: None,
            offset: None,
            advice: None,
            source: None,
        }))
    }

    /// An operating-system error met while doing `what`; the kind follows from the `errno`.
    #[must_use]
    pub fn io(what: impl Into<Cow<'static, str>>, source: std::io::Error) -> Self {
        Self::new(kind_of_io(&source), what).source(source)
    }

    /// Adds the path concerned.
    #[must_use]
    pub fn at(mut self, path: impl AsRef<Path>) -> Self {
        self.0.path = Some(path.as_ref().to_path_buf());
        self
    }

    /// Adds the byte offset concerned.
    #[must_use]
    pub fn offset(mut self, offset: u64) -> Self {
        self.0.offset = Some(offset);
        self
    }

    /// Adds what the operator can do about it.
    #[must_use]
    pub fn advice(mut self, advice: impl Into<Cow<'static, str>>) -> Self {
        self.0.advice = Some(advice.into());
        self
    }

    /// Adds the cause.
    #[must_use]
    pub fn source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// The kind of failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The path concerned, where there is one.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.0.path.as_deref()
    }

    /// What the operator can do about it, where something is known.
    #[must_use]
    pub fn advice_text(&self) -> Option<&str> {
        self.0.advice.as_deref()
    }
}

fn kind_of_io(e: &std::io::Error) -> ErrorKind {
    use std::io::ErrorKind as Io;
    match (e.kind(), e.raw_os_error()) {
        (_, Some(libc::EDQUOT | libc::ENOSPC)) | (Io::StorageFull | Io::QuotaExceeded, _) => ErrorKind::NoSpace,
        (Io::PermissionDenied | Io::ReadOnlyFilesystem, _) => ErrorKind::Permission,
        (Io::NotFound, _) => ErrorKind::NotFound,
        (Io::TimedOut, _) => ErrorKind::TimedOut,
        (Io::UnexpectedEof | Io::WriteZero, _) => ErrorKind::ShortIo,
        (Io::Unsupported, _) | (_, Some(libc::EOPNOTSUPP)) => ErrorKind::Unsupported,
        _ => ErrorKind::Io,
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let e = &*self.0;
        f.write_str(&e.message)?;
        if let Some(path) = &e.path {
            write!(f, ": {}", path.display())?;
        }
        if let Some(offset) = e.offset {
            write!(f, " at byte {offset}")?;
        }
        if let Some(source) = &e.source {
            write!(f, ": {source}")?;
        }
        if let Some(advice) = &e.advice {
            write!(f, "; {advice}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|s| s as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_names_place_cause_and_advice() {
        let e = Error::io("cannot open the lane", std::io::Error::from_raw_os_error(libc::EACCES))
            .at("cache/LOCK")
            .offset(4096)
            .advice("give the server's user write access");
        let text = e.to_string();
        assert_eq!(e.kind(), ErrorKind::Permission);
        for part in ["cannot open the lane: cache/LOCK at byte 4096", "ermission denied", "; give the server's user"] {
            assert!(text.contains(part), "{text:?} lacks {part:?}");
        }
    }

    #[test]
    fn a_full_drive_is_no_space_and_not_io() {
        for errno in [libc::ENOSPC, libc::EDQUOT] {
            assert_eq!(Error::io("write", std::io::Error::from_raw_os_error(errno)).kind(), ErrorKind::NoSpace);
        }
    }
}
