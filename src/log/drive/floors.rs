//! Floors, which remove everything or a tenant: the file `FLOORS` of a shard, and its image in the
//! shard's page, from which lookups read it.
//!
//! Invariant: a floor is durable before any process sees it, so that what it hides stays hidden.
//! The file is written under the shard's lock.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::error::{Error, ErrorKind, Result};
use crate::format::floors::{FLOORS_BYTES, Floors, MOST_TENANTS};
use crate::index::SharedShard;
use crate::io::{AlignedBuf, DirectFile, FileOptions};
use crate::log::base::paths;

/// What a floor removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Everything stored so far.
    All,
    /// What was stored with the cache salt of this hash (`key::tenant`).
    Tenant(u64),
}

/// Reads the floors of a shard; none where there is no file.
///
/// # Errors
/// `Corrupt` where both copies are damaged; those of reading.
pub(in crate::log) fn read(shard_dir: &Path) -> Result<Floors> {
    open(shard_dir)?.map_or_else(|| Ok(Floors::default()), |file| decode(&file))
}

/// As [`read`], and makes both copies equal and durable. A call that failed may have written only
/// one, which a power cut may undo or a flipped bit damage. Such a floor must not be relied on:
/// removals leave alone what lies below a floor. The caller holds the shard's lock.
///
/// # Errors
/// As [`read`]; those of writing.
pub(in crate::log) fn read_durably(shard_dir: &Path) -> Result<Floors> {
    let Some(file) = open(shard_dir)? else { return Ok(Floors::default()) };
    flush(&file)?;
    let floors = decode(&file)?;
    if floors != Floors::default() {
        write(shard_dir, &floors)?;
    }
    Ok(floors)
}

fn open(shard_dir: &Path) -> Result<Option<DirectFile>> {
    match DirectFile::open(shard_dir.join(paths::FLOORS), FileOptions::read_only()) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        file => file.map(Some),
    }
}

fn decode(file: &DirectFile) -> Result<Floors> {
    let mut bytes = AlignedBuf::zeroed(2 * FLOORS_BYTES)?;
    let there = file.len()?.min(bytes.len() as u64) as usize / crate::format::PAGE_BYTES * crate::format::PAGE_BYTES;
    if there == 0 {
        // The file was made and never written: no call that raises a floor has returned.
        return Ok(Floors::default());
    }
    file.read_at(bytes.get_mut(..there).unwrap_or_default(), 0)?;
    let (a, b) = bytes.split_at(FLOORS_BYTES);
    if Floors::decode(a).is_err_and(|e| e.kind() == ErrorKind::Corrupt) && b.iter().all(|b| *b == 0) {
        // The first write was cut off: no call has returned.
        return Ok(Floors::default());
    }
    Floors::newest(a, b).map_err(|e| match e.kind() {
        ErrorKind::Corrupt => e.at(file.path()).advice(
            "what was purged or cleared could come back: delete the cache with `forebay purge CACHE_DIR --all`",
        ),
        _ => e.at(file.path()),
    })
}

/// Writes both copies of the floors, the first durably before the second. A copy that already says
/// the same is not written again: it may be the only intact one.
///
/// # Errors
/// Those of reading and writing: then the floors may be the old or the new ones after a crash.
pub(in crate::log) fn write(shard_dir: &Path, floors: &Floors) -> Result<()> {
    let path = shard_dir.join(paths::FLOORS);
    let is_new = !path.exists();
    let file = DirectFile::open(&path, FileOptions::create())?;
    if is_new {
        belong_to_owner(shard_dir, &path)?;
    }
    let mut copy = AlignedBuf::zeroed(FLOORS_BYTES)?;
    copy.copy_from_slice(&floors.encode());
    for offset in [0, FLOORS_BYTES as u64] {
        let mut there = AlignedBuf::zeroed(FLOORS_BYTES)?;
        if file.len()? >= offset + FLOORS_BYTES as u64 {
            file.read_at(&mut there, offset)?;
        }
        if *there == *copy {
            continue;
        }
        file.write_at(&copy, offset)?;
        flush(&file)?;
    }
    paths::sync_dir(shard_dir)
}

/// Gives a file that a tool of another user has made to the owner of the shard, who could not open
/// it otherwise.
fn belong_to_owner(shard_dir: &Path, path: &Path) -> Result<()> {
    let (Ok(wanted), Ok(is)) = (std::fs::metadata(shard_dir), std::fs::metadata(path)) else { return Ok(()) };
    if is.uid() == wanted.uid() {
        return Ok(());
    }
    std::os::unix::fs::chown(path, Some(wanted.uid()), Some(wanted.gid())).map_err(|e| {
        // Left behind, it would keep the server from its cache.
        drop(std::fs::remove_file(path));
        Error::io("cannot give the floors to the server's user", e).at(path).advice("run this as that user")
    })
}

fn flush(file: &DirectFile) -> Result<()> {
    file.sync_data()
}

/// Raises a floor to `sequence`, durably, and then in the page, where there is one. Where no copy
/// of the floors is intact, only a floor of everything can be raised, and replaces them. The caller
/// holds the shard's lock.
///
/// # Errors
/// `Busy` where too many tenants have a floor; those of writing.
pub(in crate::log) fn raise(shard_dir: &Path, page: Option<&SharedShard>, what: What, sequence: u64) -> Result<()> {
    let mut floors = match read_durably(shard_dir) {
        Err(e) if e.kind() == ErrorKind::Corrupt && what == What::All => {
            Floors { generation: page.map_or(0, SharedShard::floors_generation), ..Floors::default() }
        }
        floors => floors?,
    };
    match what {
        What::All => floors.everything = floors.everything.max(sequence),
        What::Tenant(tenant) => {
            if !floors.raise_tenant(tenant, sequence) {
                let why = format!("{MOST_TENANTS} tenants are being removed already");
                return Err(Error::new(ErrorKind::Busy, why).at(shard_dir).advice("try again in a minute"));
            }
        }
    }
    floors.generation += 1;
    write(shard_dir, &floors)?;
    page.into_iter().for_each(|page| show(page, &floors));
    Ok(())
}

/// Drops the floors of tenants. The caller holds the shard's lock, and has seen that the tenants'
/// slots are unreadable durably.
///
/// # Errors
/// Those of reading and writing.
pub(in crate::log) fn drop_tenants(shard_dir: &Path, page: &SharedShard) -> Result<()> {
    let mut floors = read_durably(shard_dir)?;
    floors.tenants.clear();
    floors.generation += 1;
    write(shard_dir, &floors)?;
    show(page, &floors);
    Ok(())
}

/// Shows the floors to all processes.
pub(in crate::log) fn show(page: &SharedShard, floors: &Floors) {
    page.raise_to(floors.everything.max(floors.tenants.iter().map(|(_, seq)| *seq).max().unwrap_or(0)));
    page.set_floors(floors.generation, floors.everything, &floors.tenants);
}
