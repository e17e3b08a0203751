//! Names of directories and files below a cache directory, and how they are made.
//!
//! Nothing below the cache directory itself is reached through a symlink: directories are checked
//! when they are entered, files are opened with `O_NOFOLLOW`.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, ErrorKind, Result};
use crate::io::{DirectFile, FileOptions};

pub(in crate::log) const BUDGET: &str = "BUDGET";
pub(in crate::log) const SHARD_LOCK: &str = "SHARD";
pub(in crate::log) const SHARD_SHM: &str = "shard.shm";
/// The floors of the shard: sequences up to which nothing is served.
pub(in crate::log) const FLOORS: &str = "FLOORS";
/// What a chunk of the shard is; the second name is that of a new file before its rename.
pub(in crate::log) const GEOMETRY: &str = "geometry.json";
pub(in crate::log) const GEOMETRY_NEW: &str = "geometry.json.new";
pub(in crate::log) const LANE_LOCK: &str = "LOCK";
/// What processes share of a lane; the second name is that of a new file before its rename.
pub(in crate::log) const LANE_SHM: &str = "lane.shm";
pub(in crate::log) const LANE_SHM_NEW: &str = "lane.shm.new";
pub(in crate::log) const TABLE_SHM: &str = "table.shm";
pub(in crate::log) const TABLE_SHM_NEW: &str = "table.shm.new";
pub(in crate::log) const INDEX: &str = "index.kv";
pub(in crate::log) const DATA: &str = "data.kv";
/// What the policy has learned; likewise.
pub(in crate::log) const POLICY: &str = "policy.state";
pub(in crate::log) const POLICY_NEW: &str = "policy.state.new";
/// The old index that `fsck rebuild` keeps, and the new one before its rename.
pub(in crate::log) const INDEX_BACKUP: &str = "index.kv.bak";
pub(in crate::log) const INDEX_NEW: &str = "index.kv.new";

/// The files of a lane directory; its lock comes last, for those who delete them in this order.
pub(in crate::log) const LANE_FILES: [&str; 11] = [
    TABLE_SHM,
    TABLE_SHM_NEW,
    LANE_SHM,
    LANE_SHM_NEW,
    DATA,
    INDEX,
    INDEX_BACKUP,
    INDEX_NEW,
    POLICY,
    POLICY_NEW,
    LANE_LOCK,
];

const LANE_PREFIX: &str = "lane";

/// More than any small file has.
const MOST_SMALL: u64 = 16 << 20;

/// Permission bits of directories: their owner alone, as with the files.
pub(in crate::log) const DIR_MODE: u32 = 0o700;

/// Name of lane `number`'s directory.
pub(in crate::log) fn lane_dir(number: u32) -> String {
    format!("{LANE_PREFIX}{number}")
}

/// Numbers and paths of the lanes in a shard directory, in order.
///
/// # Errors
/// Those of listing the directory; one that is missing has no lanes.
pub(in crate::log) fn lanes(shard_dir: &Path) -> Result<Vec<(u32, PathBuf)>> {
    let mut found: Vec<(u32, PathBuf)> = subdirs(shard_dir)?
        .into_iter()
        .filter_map(|(name, path)| Some((name.strip_prefix(LANE_PREFIX)?.parse().ok()?, path)))
        .collect();
    found.sort_unstable();
    Ok(found)
}

/// Names and paths of the real directories (no symlinks) in `dir`; none where it is missing.
pub(in crate::log) fn subdirs(dir: &Path) -> Result<Vec<(String, PathBuf)>> {
    let failed = |e| Error::io("cannot list a directory of the cache", e).at(dir);
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        r => r.map_err(failed)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        if entry.file_type().is_ok_and(|t| t.is_dir())
            && let Ok(name) = entry.file_name().into_string()
        {
            found.push((name, entry.path()));
        }
    }
    Ok(found)
}

/// Whether something has that name, if only a symlink that leads nowhere; `true` also where that
/// cannot be found out.
pub(in crate::log) fn is_there(path: &Path) -> bool {
    crate::io::file_len(path).is_some()
        || !fs::symlink_metadata(path).is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound)
}

/// Makes the directory `name` in `parent` where it is missing.
///
/// # Errors
/// `InvalidInput` where a symlink or a file has the name; what the operating system says.
pub(in crate::log) fn make_dir(parent: &Path, name: &str) -> Result<PathBuf> {
    let path = parent.join(name);
    match DirBuilder::new().mode(DIR_MODE).create(&path) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(Error::io("cannot make a directory of the cache", e)
                .at(&path)
                .advice("give the server's user write access to cache_dir, or choose another one"));
        }
        Ok(()) => sync_dir(parent)?,
        Err(_) => {}
    }
    let meta =
        fs::symlink_metadata(&path).map_err(|e| Error::io("cannot enter a directory of the cache", e).at(&path))?;
    if meta.is_dir() {
        return Ok(path);
    }
    Err(Error::new(ErrorKind::InvalidInput, "a symlink or file stands where the cache has a directory")
        .at(&path)
        .advice("remove it"))
}

/// Makes the names in a directory durable.
pub(in crate::log) fn sync_dir(dir: &Path) -> Result<()> {
    // The second call for the reason that `DirectFile::check_flushed` has.
    let synced = File::open(dir).and_then(|d| d.sync_all().and_then(|()| d.metadata()).map(drop));
    synced.map_err(|e| Error::io("cannot flush a directory of the cache", e).at(dir))
}

/// Opens a small file for reading and writing; with `create` a missing one is made, with mode 0600.
pub(in crate::log) fn open_small(path: &Path, create: bool) -> Result<File> {
    let mut options = File::options();
    let file = open_regular(options.read(true).write(true).create(create).truncate(false).mode(0o600), path);
    file.map_err(|e| Error::io("cannot open a file of the cache", e).at(path))
}

/// Opens a small file for reading.
pub(in crate::log) fn open_to_read(path: &Path) -> std::io::Result<File> {
    open_regular(File::options().read(true), path)
}

/// The bytes of a small file.
pub(in crate::log) fn read_small(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_to_read(path)?.take(MOST_SMALL).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens what is neither a symlink nor a FIFO, which would keep a reader waiting for ever.
fn open_regular(options: &mut OpenOptions, path: &Path) -> std::io::Result<File> {
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is not a regular file"))
}

/// A new file of `bytes` reserved bytes under a temporary name in `dir`, to be renamed with
/// [`put_in_place`]; for shared memory, where a hole would raise `SIGBUS` on a full file system.
pub(in crate::log) fn new_shared(dir: &Path, name: &str, bytes: u64) -> Result<File> {
    let path = temporary(dir, name);
    match fs::remove_file(&path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::io("cannot remove a left-over file", e).at(&path));
        }
        _ => {}
    }
    let file = DirectFile::open(&path, FileOptions { create_new: true, ..FileOptions::create().buffered() })?;
    if let Err(e) = file.allocate(0, bytes) {
        drop(fs::remove_file(&path));
        return Err(e);
    }
    use std::os::fd::AsFd;
    let fd = file.as_fd().try_clone_to_owned().map_err(|e| Error::io("cannot duplicate a descriptor", e).at(&path))?;
    Ok(File::from(fd))
}

/// As [`new_shared`], in the place of a file that is of no use to anybody any more: on a full file
/// system that one goes first, so that what the lane holds is served.
pub(in crate::log) fn replacing_dead(dir: &Path, name: &str, bytes: u64) -> Result<File> {
    match new_shared(dir, name, bytes) {
        Err(e) if e.kind() == ErrorKind::NoSpace && fs::remove_file(dir.join(name)).is_ok() => {
            new_shared(dir, name, bytes)
        }
        outcome => outcome,
    }
}

/// Gives a file made by [`new_shared`] its name.
pub(in crate::log) fn put_in_place(dir: &Path, name: &str) -> Result<()> {
    let (from, to) = (temporary(dir, name), dir.join(name));
    fs::rename(&from, &to).map_err(|e| Error::io("cannot put a file in place", e).at(&to))
}

fn temporary(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.new"))
}

/// Sixteen random bytes.
///
/// # Errors
/// `Io` where the machine has no source of randomness.
pub(in crate::log) fn random_id() -> Result<[u8; 16]> {
    let mut id = [0; 16];
    let source = "/dev/urandom";
    let read = File::open(source).and_then(|mut f| f.read_exact(&mut id));
    read.map_err(|e| Error::io("cannot read random bytes", e).at(source))?;
    Ok(id)
}

/// An id in hexadecimal.
pub(in crate::log) fn hex(id: &[u8; 16]) -> String {
    id.iter().map(|b| format!("{b:02x}")).collect()
}
