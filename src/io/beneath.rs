//! Opening and making things below a directory without following a symlink on the way.
//!
//! Invariant: every step goes from an open directory to one component of the path with
//! `O_NOFOLLOW`, so that somebody who exchanges a component for a symlink in between gains nothing.
//! The root itself is the operator's choice and may be a symlink.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path};

use rustix::fs::{Mode, OFlags, mkdirat, openat};
use rustix::io::{Errno, retry_on_intr};

use super::file::{FileOptions, symlink_error};
use crate::error::{Error, ErrorKind, Result};

/// Makes the directory `relative` below `root`, and those missing between them, each with
/// permission bits `mode`; directories that are there stay as they are.
///
/// # Errors
/// `InvalidInput` where `relative` is absolute or goes up, or a component is a symlink or no
/// directory; `Permission`, `NoSpace` or `Io` as the operating system says.
pub fn create_dirs_beneath(root: impl AsRef<Path>, relative: impl AsRef<Path>, mode: u32) -> Result<()> {
    let root = root.as_ref();
    let mut dir = open_root(root)?;
    let mut path = root.to_path_buf();
    for name in names(relative.as_ref())? {
        path.push(OsStr::from_bytes(name.as_bytes()));
        match mkdirat(&dir, &name, Mode::from_raw_mode(mode)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(Error::io("cannot make the directory", e.into()).at(&path)),
        }
        dir = step(&dir, &name).map_err(|e| step_error(e).at(&path))?;
    }
    Ok(())
}

/// The open directory that holds the last component of `relative`, and that component.
pub(super) fn parent(root: &Path, relative: &Path) -> Result<(File, CString)> {
    let mut names = names(relative)?;
    let last = names.pop().ok_or_else(|| outside(relative))?;
    let mut dir = open_root(root)?;
    for name in names {
        dir = step(&dir, &name).map_err(|e| step_error(e).at(root.join(relative)))?;
    }
    Ok((dir, last))
}

/// Opens the file `name` in `dir`; a symlink gives `ELOOP`.
pub(super) fn open_in(dir: &File, name: &CString, options: FileOptions, flags: OFlags) -> io::Result<File> {
    let mut flags = flags | OFlags::NOFOLLOW;
    flags |= if options.write { OFlags::RDWR } else { OFlags::RDONLY };
    flags.set(OFlags::CREATE, options.create | options.create_new);
    flags.set(OFlags::EXCL, options.create_new);
    open_at(dir, name, flags, options.mode)
}

fn names(relative: &Path) -> Result<Vec<CString>> {
    let mut out = Vec::new();
    for component in relative.components() {
        match component {
            Component::Normal(name) => out.push(CString::new(name.as_bytes()).map_err(|_| outside(relative))?),
            Component::CurDir => {}
            _ => return Err(outside(relative)),
        }
    }
    Ok(out)
}

fn outside(relative: &Path) -> Error {
    Error::new(ErrorKind::InvalidInput, "the path does not name something below the cache directory").at(relative)
}

fn open_root(root: &Path) -> Result<File> {
    let opened = File::options().read(true).custom_flags(libc::O_DIRECTORY).open(root);
    opened.map_err(|e| Error::io("cannot open the directory", e).at(root))
}

fn step(dir: &File, name: &CString) -> io::Result<File> {
    open_at(dir, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW, 0)
}

fn open_at(dir: &File, name: &CString, flags: OFlags, mode: u32) -> io::Result<File> {
    let open = || openat(dir, name, flags | OFlags::CLOEXEC, Mode::from_raw_mode(mode));
    Ok(File::from(retry_on_intr(open)?))
}

/// With `O_DIRECTORY` and `O_NOFOLLOW` a symlink gives `ENOTDIR`, as a file does.
fn step_error(e: io::Error) -> Error {
    match e.raw_os_error() {
        Some(libc::ELOOP | libc::ENOTDIR) => symlink_error(),
        _ => Error::io("cannot open the directory", e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::DirectFile;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn directories_and_files_are_made_below_the_root_and_private() {
        let root = tempfile::tempdir().unwrap();
        create_dirs_beneath(root.path(), "a/./b", 0o700).unwrap();
        create_dirs_beneath(root.path(), "a/b/c", 0o700).unwrap();
        let file = DirectFile::open_beneath(root.path(), "a/b/c/data.kv", FileOptions::create()).unwrap();
        assert_eq!(file.path(), root.path().join("a/b/c/data.kv"));
        for (path, mode) in [("a", 0o700), ("a/b/c", 0o700), ("a/b/c/data.kv", 0o600)] {
            assert_eq!(root.path().join(path).metadata().unwrap().permissions().mode() & 0o777, mode, "{path}");
        }
        let again = FileOptions { create_new: true, ..FileOptions::create() };
        assert!(DirectFile::open_beneath(root.path(), "a/b/c/data.kv", again).is_err());
        DirectFile::open_beneath(root.path(), "a/b/c/data.kv", FileOptions::read_only()).unwrap();
    }

    #[test]
    fn no_component_is_followed_out_of_the_root() {
        let (root, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(elsewhere.path().join("f"), b"secret").unwrap();
        symlink(elsewhere.path(), root.path().join("dir")).unwrap();
        symlink(elsewhere.path().join("f"), root.path().join("f")).unwrap();
        let inside = |relative| DirectFile::open_beneath(root.path(), relative, FileOptions::create()).unwrap_err();
        for relative in ["dir/f", "dir/new", "f", "../f", "/etc/hostname", "", "."] {
            assert_eq!(inside(relative).kind(), ErrorKind::InvalidInput, "{relative}");
        }
        for relative in ["dir", "dir/sub", "../x"] {
            let e = create_dirs_beneath(root.path(), relative, 0o700).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidInput, "{relative}");
        }
        assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_root_reached_through_a_symlink_is_the_operators_choice() {
        let real = tempfile::tempdir().unwrap();
        let link = real.path().join("link");
        std::fs::create_dir(real.path().join("cache")).unwrap();
        symlink(real.path().join("cache"), &link).unwrap();
        DirectFile::open_beneath(&link, "f", FileOptions::create()).unwrap();
        assert_eq!(inside_kind(&link), ErrorKind::NotFound);
    }

    fn inside_kind(root: &Path) -> ErrorKind {
        DirectFile::open_beneath(root, "missing/f", FileOptions::create()).unwrap_err().kind()
    }
}
