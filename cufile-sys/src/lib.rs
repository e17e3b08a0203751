//! Raw bindings to NVIDIA's libcufile (GPUDirect Storage), opened at run time: builds and runs
//! without CUDA.
//!
//! [`CuFile::open`] finds the library, [`sys`] has the C functions that Forebay calls, [`types`]
//! and [`stats`] their arguments, [`CuFileError`] and [`transferred`] their results, as they are in
//! 1.0 to 1.20. Invariants: a missing library, a missing function or an unknown error number is a
//! value, never a panic; nothing of NVIDIA's is vendored; opening calls nothing in the library but
//! its own initialisers, so no driver is started and no configuration read.
//!
//! libcufile reads `CUFILE_ENV_PATH_JSON` and `CUFILE_LOGFILE_PATH` from the environment; set them
//! before opening, or it writes `cufile.log` into the working directory once its driver is opened.
#![expect(unsafe_code, reason = "loading a C library and calling into it")]

mod error;
pub mod stats;
pub mod sys;
pub mod types;

use std::ffi::{OsString, c_int};
use std::fmt;
use std::path::{Path, PathBuf};

use libloading::Library;

pub use error::{CuFileError, TransferError, name_of, transferred};

/// Names the library file to use; then no other is tried. Empty counts as not set.
pub const PATH_VARIABLE: &str = "FOREBAY_CUFILE_PATH";

/// Names tried through the loader's search path. The Python wheels ship only the first; CUDA
/// toolkits all of them.
const NAMES: [&str; 3] = ["libcufile.so.0", "libcufile.so", "libcufile.so.1"];

/// Directories of CUDA toolkits that are not on the loader's search path.
const TOOLKIT_DIRS: [&str; 3] =
    ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib", "/usr/local/cuda/targets/sbsa-linux/lib"];

/// Where the library may lie under its full name (`libcufile.so.1.11.1`) only, as in images without
/// the links.
const VERSIONED_DIRS: [&str; 4] =
    ["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"];

/// An opened libcufile. Stays in memory until the process ends: the library's own threads may
/// outlive any handle.
pub struct CuFile {
    symbols: sys::Symbols,
    path: PathBuf,
}

impl CuFile {
    /// Opens the library that `FOREBAY_CUFILE_PATH` names, else the first that is found.
    ///
    /// # Errors
    /// [`OpenError`] with every name that was tried and why it failed.
    pub fn open() -> Result<Self, OpenError> {
        match std::env::var_os(PATH_VARIABLE).filter(|p| !p.is_empty()) {
            Some(path) => Self::open_one_of(std::iter::once(path)),
            None => Self::open_one_of(Self::candidates()),
        }
    }

    /// Opens the library at `path`.
    ///
    /// # Errors
    /// [`OpenError`] with the reason.
    pub fn open_at(path: impl AsRef<Path>) -> Result<Self, OpenError> {
        Self::open_one_of(std::iter::once(path.as_ref().into()))
    }

    /// Names and paths to try where `FOREBAY_CUFILE_PATH` is not set, in order.
    fn candidates() -> impl Iterator<Item = OsString> {
        let names = NAMES.iter().map(OsString::from);
        let toolkits =
            TOOLKIT_DIRS.iter().flat_map(|dir| NAMES.iter().map(move |name| Path::new(dir).join(name).into()));
        names.chain(toolkits).chain(VERSIONED_DIRS.iter().flat_map(|dir| versioned(Path::new(dir))))
    }

    fn open_one_of(candidates: impl Iterator<Item = OsString>) -> Result<Self, OpenError> {
        let mut tried = Vec::new();
        for candidate in candidates {
            // SAFETY: runs the initialisers of a file with this name. The operator answers for its
            // being NVIDIA's library, as for every shared library on the search path.
            match unsafe { Library::new(&candidate) } {
                Ok(library) => {
                    // SAFETY: as above; the library is never closed.
                    let symbols = unsafe { sys::Symbols::load(&library) };
                    std::mem::forget(library);
                    return Ok(Self { symbols, path: candidate.into() });
                }
                Err(e) => tried.push((PathBuf::from(candidate), e.to_string())),
            }
        }
        Err(OpenError { tried })
    }

    /// The name or path that it was opened by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The C functions.
    #[must_use]
    pub fn symbols(&self) -> &sys::Symbols {
        &self.symbols
    }

    /// The library's version. Needs no driver, no GPU and no CUDA.
    ///
    /// # Errors
    /// [`VersionError::TooOld`] before 1.8, which cannot say; [`VersionError::Failed`] as the
    /// library says.
    pub fn version(&self) -> Result<Version, VersionError> {
        let get_version = self.symbols.get_version.ok_or(VersionError::TooOld)?;
        let mut number: c_int = 0;
        // SAFETY: the function's only argument is a place for an int.
        unsafe { get_version(&raw mut number) }.check().map_err(VersionError::Failed)?;
        Ok(Version::from_number(number))
    }
}

/// The libraries in `dir` that have their full version in the name, newest first.
fn versioned(dir: &Path) -> Vec<OsString> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<(Vec<u32>, OsString)> = entries
        .filter_map(|entry| {
            let name = entry.file_name();
            let parts = name.to_str()?.strip_prefix("libcufile.so.")?.split('.').map(str::parse);
            let version: Vec<u32> = parts.collect::<Result<_, _>>().ok()?;
            (version.len() > 1).then(|| (version, entry.path().into()))
        })
        .collect();
    found.sort_unstable_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, path)| path).collect()
}

impl fmt::Debug for CuFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CuFile").field("path", &self.path).finish_non_exhaustive()
    }
}

/// A version of libcufile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The 1 in 1.16.
    pub major: i32,
    /// The 16 in 1.16.
    pub minor: i32,
}

impl Version {
    /// From the library's number: 1000·major + 10·minor.
    #[must_use]
    pub const fn from_number(number: i32) -> Self {
        Self { major: number / 1000, minor: number % 1000 / 10 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Why the version is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionError {
    /// The library is older than 1.8, which brought the call.
    TooOld,
    /// The call failed.
    Failed(CuFileError),
}

impl fmt::Display for VersionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooOld => f.write_str("libcufile is older than 1.8 and cannot tell its version"),
            Self::Failed(e) => write!(f, "libcufile cannot tell its version: {e}"),
        }
    }
}

impl std::error::Error for VersionError {}

/// No libcufile could be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenError {
    /// Names and paths that were tried, in order, each with the loader's error.
    pub tried: Vec<(PathBuf, String)>,
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("libcufile cannot be opened; tried")?;
        for (i, (name, why)) in self.tried.iter().enumerate() {
            write!(f, "{} {}: {why}", if i == 0 { "" } else { ";" }, name.display())?;
        }
        write!(f, "; install the CUDA toolkit's GDS packages or set {PATH_VARIABLE} to the file")
    }
}

impl std::error::Error for OpenError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_splits_into_major_and_minor() {
        for (number, text) in [(1160, "1.16"), (1080, "1.8"), (1200, "1.20"), (2010, "2.1")] {
            assert_eq!(Version::from_number(number).to_string(), text);
        }
        assert!(Version::from_number(1090) < Version::from_number(1140));
    }

    #[test]
    fn the_wheels_name_is_tried_first_and_every_name_in_every_place() {
        let all: Vec<_> = CuFile::candidates().collect();
        assert_eq!(all.first().map(|n| n.to_string_lossy().into_owned()), Some(NAMES[0].to_owned()));
        assert!(all.len() >= 12, "{all:?}");
    }

    #[test]
    fn full_names_are_found_newest_first() {
        let dir = std::env::temp_dir().join(format!("cufile-sys-names-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for name in
            ["libcufile.so", "libcufile.so.0", "libcufile.so.1.9.1", "libcufile.so.1.16.0", "libcufile.so.1.x", "other"]
        {
            std::fs::write(dir.join(name), "").unwrap();
        }
        let found = versioned(&dir);
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(found, ["libcufile.so.1.16.0", "libcufile.so.1.9.1"].map(|n| OsString::from(dir.join(n))));
        assert!(versioned(&dir).is_empty());
    }

    #[test]
    fn a_library_that_is_not_cufile_opens_without_its_functions() {
        let library = CuFile::open_at("libc.so.6").unwrap();
        assert_eq!(library.version(), Err(VersionError::TooOld));
    }
}
