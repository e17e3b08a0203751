//! Making index.kv anew: from the slots in data.kv, and from whatever is left of the old index.
//!
//! Within a segment the highest epoch counts that its region, a record of the ring or a slot names.
//! Every intact slot of that epoch counts, but where the index is whole only those that it names:
//! the others were never published, and zeros are written over their headers. For the new index has
//! their segments as sealed, and where a sealed segment's region is damaged, an opening serves
//! every slot that it can read there.
//!
//! * this file: the steps, and a superblock where both are lost;
//! * `slots`: finds slots by their headers; `old`: reads what is left of the old index;
//! * `merge`: decides what counts.

mod merge;
mod old;
mod slots;

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, fchown};
use std::path::Path;

use self::merge::{Merged, merge};
use self::old::OldIndex;
use self::slots::FoundSlot;
use super::deep::BadSlot;
use super::places::LaneDir;
use crate::config::dir::CacheFileOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::format::budget::BudgetPage;
use crate::format::layout::COARSE_BYTES;
use crate::format::record::KeyKind;
use crate::format::superblock::Superblock;
use crate::format::{PAGE_BYTES, sealed};
use crate::log::base::paths::{BUDGET, DATA, INDEX, INDEX_BACKUP, INDEX_NEW, TABLE_SHM};
use crate::log::base::{image, paths, sizes};

/// How to rebuild.
#[derive(Clone, Copy, Debug)]
pub struct RebuildOptions {
    /// Only report what would be restored.
    pub dry_run: bool,
    /// Keep the old index as `index.kv.bak`.
    pub backup: bool,
}

/// What was restored.
#[derive(Clone, Debug, Default)]
pub struct Rebuilt {
    /// Chunks and objects whose every byte was checked.
    pub chunks: u64,
    /// Their payload bytes.
    pub bytes: u64,
    /// Segments that hold something.
    pub segments: u64,
    /// Records of the old index that still counted.
    pub old_records: u64,
    /// Whether the superblock had to be derived.
    pub derived: bool,
    /// Slots that were left out.
    pub left_out: Vec<BadSlot>,
}

/// Most bytes that [`rebuild`] reports to `progress` in all.
#[must_use]
pub fn rebuild_bytes(files: &LaneDir) -> u64 {
    let data = files.dir.open_file_in(DATA, &CacheFileOptions::default());
    data.and_then(|f| f.metadata().map_err(|e| Error::io("cannot look at a file", e))).map_or(0, |m| 2 * m.len())
}

/// Makes the index of a lane anew. `sibling` is the superblock of another lane of the same shard,
/// if there is one: where this lane's own is lost, geometry and segment size are taken from it;
/// without it they are derived from the slots and the directory's name.
///
/// # Errors
/// `Locked` where a process writes the lane; `Incompatible` for one of another version; `Corrupt`
/// where neither index nor data name the lane; those of reading and writing.
pub fn rebuild(
    files: &LaneDir,
    sibling: Option<&Superblock>,
    options: RebuildOptions,
    progress: &dyn Fn(u64),
) -> Result<Rebuilt> {
    let _lock = files.lock()?.ok_or_else(|| {
        Error::new(ErrorKind::Locked, "a process writes this lane")
            .at(files.path())
            .advice("stop the servers that use the cache; a lane that is served needs no rebuild")
    })?;
    let data = files.dir.open_file_in(DATA, &CacheFileOptions::default())?;
    let len = data.metadata().map_err(|e| Error::io("cannot look at a file", e).at(files.file(DATA)))?.len();
    let old = read_old(files)?;
    let slots = slots::find(&data, len, progress)?;
    let derived = old.superblock.is_none();
    let mut superblock = match &old.superblock {
        Some(superblock) => superblock.clone(),
        None => derive(files, &old, &slots, sibling, len)?,
    };
    let merged = merge(&superblock, &data, len, old, slots, progress)?;
    fit(&mut superblock, &merged, derived);
    let mut rebuilt = Rebuilt { derived, old_records: merged.old_records, ..Rebuilt::default() };
    for segment in merged.segments.iter().filter(|s| !s.records.is_empty()) {
        rebuilt.segments += 1;
        rebuilt.chunks += segment.records.len() as u64;
        rebuilt.bytes += segment.records.iter().map(|r| r.length).sum::<u64>();
    }
    if !options.dry_run {
        put_in_place(files, &data, &superblock, &merged, options.backup)?;
    }
    rebuilt.left_out = merged.left_out;
    Ok(rebuilt)
}

/// The old index, or, where that is missing, what an earlier rebuild that was cut off had made of
/// the new one: whoever has opened the lane since has removed that. A backup is older: what was
/// stored since is not in it.
fn read_old(files: &LaneDir) -> Result<OldIndex> {
    for name in [INDEX, INDEX_NEW] {
        match files.dir.open_file_in(name, &CacheFileOptions::default()) {
            Ok(file) => {
                let len =
                    file.metadata().map_err(|e| Error::io("cannot look at a file", e).at(files.file(name)))?.len();
                return OldIndex::read(&file, len).map_err(|e| e.at(files.file(name)));
            }
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    Ok(OldIndex::default())
}

fn most_named<K: Copy + Ord + std::hash::Hash>(votes: impl Iterator<Item = (K, u64)>) -> Option<K> {
    let mut all: HashMap<K, u64> = HashMap::new();
    for (key, weight) in votes {
        *all.entry(key).or_default() += weight;
    }
    all.into_iter().max_by_key(|(key, weight)| (*weight, *key)).map(|(key, _)| key)
}

/// A superblock for a lane that has lost both copies.
fn derive(
    files: &LaneDir,
    old: &OldIndex,
    slots: &[FoundSlot],
    sibling: Option<&Superblock>,
    len: u64,
) -> Result<Superblock> {
    let lost = |what: &'static str| Error::new(ErrorKind::Corrupt, what).at(files.path());
    let lanes = slots.iter().map(|s| (s.header.lane, 1)).chain(old.lanes.iter().map(|(lane, n)| (*lane, *n)));
    let lane = most_named(lanes).ok_or_else(|| lost("neither index.kv nor data.kv holds anything of a lane"))?;
    let spans = slots.iter().filter(|s| s.header.lane == lane && s.header.segment > 0).map(|s| {
        let segment = u64::from(s.header.segment);
        (s.base / segment, u64::from(s.base.is_multiple_of(segment)))
    });
    // Where only the first segment is in use, the length of data.kv does as the size of a segment.
    let least = slots.iter().map(|s| s.start + s.bytes()).max().unwrap_or(0).next_multiple_of(COARSE_BYTES as u64);
    let of_sibling = sibling.map(|s| s.segment_bytes).filter(|bytes| *bytes >= least);
    let whole = len.next_multiple_of(COARSE_BYTES as u64).max(COARSE_BYTES as u64);
    let segment_bytes = most_named(spans.filter(|(_, good)| *good > 0)).or(of_sibling).unwrap_or(whole);
    let tokens = slots.iter().filter(|s| s.header.key_kind == KeyKind::Chain).map(|s| s.header.tokens).max();
    let fingerprint = match sibling {
        Some(s) => s.fingerprint,
        None => known_half(&files.namespace).ok_or_else(|| lost("the namespace's name is no fingerprint"))?,
    };
    let drive = files.path().ancestors().nth(3).map(|root| root.join(BUDGET));
    let drive = drive.and_then(|path| BudgetPage::decode(&paths::read_small(&path).ok()?).ok());
    Ok(Superblock {
        features: [0; 3],
        generation: 0,
        mount_generation: 0,
        lane,
        drive: drive.map(|b| b.drive).unwrap_or_default(),
        fingerprint,
        layers_digest: sibling.map(|s| s.layers_digest).unwrap_or_default(),
        segment_bytes,
        // Set by `fit`.
        region_bytes: 0,
        ring_offset: 2 * PAGE_BYTES as u64,
        ring_pages: 1,
        chunk_tokens: sibling.map_or(tokens.unwrap_or(0), |s| s.chunk_tokens),
        regions_offset: 3 * PAGE_BYTES as u64,
        created_ms: slots.iter().map(|s| s.header.created_ms).min().unwrap_or(0),
        model: sibling.map(|s| s.model.clone()).unwrap_or_default(),
        shard: files.shard.clone(),
    })
}

/// The first half of a fingerprint, which names the namespace's directory; the rest is zero.
fn known_half(namespace: &str) -> Option<[u8; 32]> {
    let mut fingerprint = [0; 32];
    for (i, byte) in fingerprint.iter_mut().take(16).enumerate() {
        *byte = u8::from_str_radix(namespace.get(2 * i..2 * i + 2)?, 16).ok()?;
    }
    Some(fingerprint)
}

/// Sets sizes that have room for the merged records, and generations above the old ones.
fn fit(superblock: &mut Superblock, merged: &Merged, derived: bool) {
    let most = merged.segments.iter().map(|s| s.records.len()).max().unwrap_or(0);
    if derived {
        let sizes = sizes::Sizes::of_segments(superblock.segment_bytes, most as u64);
        superblock.region_bytes = sizes.region_bytes;
        superblock.ring_pages = sizes.ring_pages;
        superblock.regions_offset = sizes.regions_offset;
    }
    superblock.region_bytes = superblock.region_bytes.max(sealed::region_bytes(most) as u64);
    superblock.generation = (superblock.generation | 1) + 1;
    superblock.mount_generation = superblock.mount_generation.max(merged.max_sequence >> 40);
}

fn put_in_place(files: &LaneDir, data: &File, superblock: &Superblock, merged: &Merged, backup: bool) -> Result<()> {
    let dir = &files.dir;
    blank(files, &merged.unnamed)?;
    remove(files, INDEX_NEW)?;
    let create = CacheFileOptions { write: true, create: Some(0o600), exclusive: true, ..CacheFileOptions::default() };
    let new = dir.open_file_in(INDEX_NEW, &create)?;
    like(&new, data, &files.file(INDEX_NEW))?;
    image::write_index(&new, superblock, &merged.segments).inspect_err(|_| drop(remove(files, INDEX_NEW)))?;
    if backup {
        match dir.rename_in(INDEX, INDEX_BACKUP) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    dir.rename_in(INDEX_NEW, INDEX)?;
    // It was made from the old index.
    remove(files, TABLE_SHM)?;
    dir.sync()
}

/// Writes zeros over the slot headers at these offsets in data.kv, and flushes it: also where there
/// are none, for the writer may have died before it flushed zeros, holes or a length of its own,
/// and the new index does not name them.
fn blank(files: &LaneDir, headers: &[u64]) -> Result<()> {
    let data = files.dir.open_file_in(DATA, &CacheFileOptions { write: true, ..CacheFileOptions::default() })?;
    let zeros = [0; PAGE_BYTES];
    let done = headers.iter().try_for_each(|at| data.write_all_at(&zeros, *at)).and_then(|()| data.sync_data());
    done.map_err(|e| Error::io("cannot make slots unreadable that were never published", e).at(files.file(DATA)))
}

/// Gives a file the owner and permissions of another one, so that the server can open it.
fn like(file: &File, model: &File, path: &Path) -> Result<()> {
    let failed = |e| Error::io("cannot give the new index to the server's user", e).at(path);
    let wanted = model.metadata().map_err(failed)?;
    let is = file.metadata().map_err(failed)?;
    if (is.uid(), is.gid()) != (wanted.uid(), wanted.gid()) {
        fchown(file, Some(wanted.uid()), Some(wanted.gid())).map_err(failed)?;
    }
    file.set_permissions(std::fs::Permissions::from_mode(wanted.mode() & 0o777)).map_err(failed)
}

fn remove(files: &LaneDir, name: &str) -> Result<()> {
    match files.dir.remove_file_in(name) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        outcome => outcome,
    }
}
