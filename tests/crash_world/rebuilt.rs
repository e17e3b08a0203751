//! What `fsck rebuild` makes of an image that has lost its indexes: everything that the log serves
//! with them, and nothing that was removed. What was never flushed may be there or not, as in the
//! log; and of a put that failed, or whose process died in it, the header may be found, also after
//! a removal (docs/format.md).

use std::path::Path;
use std::sync::atomic::Ordering;

use forebay::error::ErrorKind;
use forebay::format::record::Record;
use forebay::log::fsck::{self, RebuildOptions};

use super::images::{Laid, intact};
use super::key;
use super::world::World;

/// The records that are intact where the lanes are made anew, and what was done.
fn rebuild(laid: &Laid, now_s: u64) -> (Vec<Record>, String) {
    let mut told = String::new();
    let mut lanes = laid.lanes();
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
    (intact(&lanes, &raw, now_s), told)
}

impl World {
    /// Checks what a rebuild makes of the image with which this world began; a log has recovered it
    /// and serves these keys.
    pub fn check_rebuilt(&self, served: &[u64]) {
        let has_bytes = |path: &Path| self.began.content(path).is_some_and(|content| content.len > 0);
        let wanted = |path: &Path| !path.ends_with("index.kv") && has_bytes(path);
        let laid = Laid::out(self.judge.aside(), &self.began, wanted);
        let (records, told) = rebuild(&laid, self.now_s());
        for k in 0..self.config.keys {
            let found: Vec<u64> = records.iter().filter(|r| r.key == key(k)).map(|r| r.sequence).collect();
            for sequence in &found {
                let mut model = self.model.lock();
                let (id, stray) = model.of_sequence(k, *sequence).map_or((0, false), |put| (put.id, put.stray));
                let objection = model.objection(k, id).filter(|_| !stray);
                drop(model);
                if let Some(why) = objection {
                    self.fail_at(k, &format!("rebuilt without an index: {sequence:x} is found, but {why}{told}"));
                }
            }
            let is_served = served.contains(&k);
            if is_served && found.is_empty() && !self.faulty() {
                self.fail_at(k, &format!("rebuilt without an index: it is lost{told}"));
            }
            let counter = if is_served { &self.judge.rebuilt } else { &self.judge.rebuilt_only };
            counter.fetch_add(u64::from(!found.is_empty()), Ordering::Relaxed);
        }
    }
}
