//! What `fsck rebuild` makes of an image that has lost its indexes, judged by what the log serves with them.
//!
//! Docs/format.md, *What it cannot know*, says what a rebuild may do otherwise: without its record a version that was never flushed may be
//! back, also after a removal, and it or a removal that had not returned may hide what is older.

use std::path::Path;
use std::sync::atomic::Ordering;

use forebay::error::ErrorKind;
use forebay::format::record::{Record, RecordKind};
use forebay::log::fsck::{self, RebuildOptions};

use super::disk::Files;
use super::images::{is_of, raw_lanes, write_sparse};
use super::key;
use super::model::Version;
use super::world::{Process, World};

/// What a rebuild gave.
struct Rebuilt {
    /// Puts that are intact, by lane.
    puts: Vec<(String, Record)>,
    /// All records.
    records: Vec<Record>,
    /// What was done.
    told: String,
}

/// Rebuilds the lanes of `files` from their data alone, in `dir`.
fn rebuild(dir: &Path, files: &Files, now_s: u64) -> Rebuilt {
    drop(std::fs::remove_dir_all(dir));
    for path in files.paths().filter(|path| path.ends_with("data.kv")) {
        let Some(content) = files.content(path).filter(|content| content.len > 0) else { continue };
        std::fs::create_dir_all(dir.join(path).parent().unwrap()).unwrap();
        write_sparse(&dir.join(path), content);
    }
    let mut told = String::new();
    let mut lanes = fsck::lanes(dir).unwrap_or_default();
    lanes.retain(|files| match fsck::rebuild(files, None, RebuildOptions { dry_run: false, backup: false }, &|_| ()) {
        Ok(rebuilt) => {
            told += &format!("\n  {}: {rebuilt:?}", files.name);
            true
        }
        // No slot of the lane has reached the drive.
        Err(e) if e.kind() == ErrorKind::Corrupt => {
            told += &format!("\n  {}: {e}", files.name);
            false
        }
        Err(e) => panic!("{e}"),
    });
    let raw: Vec<fsck::RawLane> = lanes.iter().map(|lane| fsck::RawLane::read(lane).unwrap()).collect();
    assert!(raw.iter().all(|lane| lane.damage.is_empty()), "an index that was just made is damaged");
    let bad = fsck::deep(&lanes, &raw, now_s, &|_| ()).unwrap().bad;
    let live = fsck::live(&raw, now_s).into_iter().map(|(lane, record)| (lanes[lane].name.clone(), record));
    let puts = live.filter(|(_, record)| !bad.iter().any(|b| b.key == record.key)).collect();
    Rebuilt { puts, records: raw.into_iter().flat_map(|lane| lane.records).collect(), told }
}

impl World {
    /// Checks what a rebuild makes of the image with which this world began; `process` has recovered it and served all that it has.
    pub fn check_rebuilt(&self, process: &Process, dir: &Path) {
        let rebuilt = rebuild(dir, &self.began, self.now_s());
        for k in 0..self.config.keys {
            let served = self.run(process, |log| log.peek(&key(k))).map(|chunk| chunk.sequence);
            let put = rebuilt.puts.iter().find(|(_, record)| record.key == key(k));
            let found = put.map(|(_, record)| record.sequence);
            if found == served {
                self.judge.rebuilt.fetch_add(u64::from(found.is_some()), Ordering::Relaxed);
                continue;
            }
            let is_unmarked = put.is_some_and(|(lane, record)| self.is_given_up_unmarked(lane, record));
            if !is_unmarked && let Some(why) = self.objection_to(k, served, found, &rebuilt.records) {
                let of_key: Vec<_> = rebuilt.records.iter().filter(|r| is_of(r, k)).collect();
                let told = &rebuilt.told;
                self.fail_at(
                    k,
                    &format!(
                        "rebuilt without an index: {found:x?}, the log serves {served:x?}: {why}{told}\n{of_key:#?}"
                    ),
                );
            }
            self.tell(|| format!("rebuilt otherwise: key {k} {found:x?}, served {served:x?}"));
            self.judge.rebuilt_otherwise.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether a record lies in a segment that the index says was given up: a write error has kept the mark from the data.
    fn is_given_up_unmarked(&self, lane: &str, record: &Record) -> bool {
        let later =
            |raw: &fsck::RawLane| raw.segments.get(&record.segment).is_some_and(|kept| kept.epoch > record.epoch);
        let is_writing_hard = self.config.faults.eio > 0;
        is_writing_hard && raw_lanes(&self.dir, &self.began).iter().any(|(name, raw)| name == lane && later(raw))
    }

    /// Why a rebuild may not find `found` of a key of which the log serves another version, if it may not.
    fn objection_to(&self, k: u64, served: Option<u64>, found: Option<u64>, records: &[Record]) -> Option<String> {
        let model = self.model.lock();
        let versions = model.keys.get(&k).map(|key| key.versions.clone()).unwrap_or_default();
        let Some(found) = found else {
            // Of a removal or clear that had not returned; what is just being given up has a tombstone of its own number.
            let hides = |r: &Record| match r.kind {
                RecordKind::Put => false,
                RecordKind::Tombstone => is_of(r, k) && Some(r.sequence) >= served,
                RecordKind::Clear => Some(r.sequence) > served,
            };
            let unflushed = |v: &Version| Some(v.sequence) > served && !v.flushed;
            let is_hidden = records.iter().any(hides) || versions.iter().any(unflushed);
            return (!is_hidden).then(|| "it is lost, and nothing hides it".to_owned());
        };
        let Some(version) = versions.iter().find(|v| v.sequence == found) else {
            let was_flushed = !model.unrecorded.contains(&found);
            return was_flushed.then(|| "a newer version was flushed, and this one, flushed too, forgotten".to_owned());
        };
        if !version.committed {
            return Some("its put was not committed".to_owned());
        }
        if !version.flushed {
            return None;
        }
        if version.gone {
            return Some("it was removed".to_owned());
        }
        let newer = versions.iter().any(|v| v.flushed && v.sequence > found);
        (newer && !version.late).then(|| "a newer version was flushed".to_owned())
    }
}
