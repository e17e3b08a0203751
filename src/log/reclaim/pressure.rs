//! Space pressure between processes: one whose lanes hold next to nothing, and that finds no room,
//! requests space; one that holds many gives a segment back.
//!
//! A request is the small file `WANTED` in the cache directory, rewritten while the pressure lasts.
//! Nothing depends on it being read.

use std::fs;
use std::io::Write;
use std::time::{Duration, SystemTime};

use super::{evict, segment};
use crate::error::Error;
use crate::log::base::paths;
use crate::log::drive::Volume;

const NAME: &str = "WANTED";
/// A request older than this does not count.
const LASTS: Duration = Duration::from_secs(5);
/// A process with no more segments than this gives none back; one with fewer may ask for some.
const MODEST: usize = 4;

/// Segments that this process's lanes hold.
fn holds(volume: &Volume) -> usize {
    volume.lanes().held().map(|lane| lane.state().map_or(0, |s| s.segments.in_use())).sum()
}

/// Asks the other processes for space.
pub(super) fn request_space(volume: &Volume) {
    if holds(volume) >= MODEST {
        return;
    }
    // Only the time of the write counts; the text is for people.
    let written = paths::open_small(&volume.root.join(NAME), true)
        .and_then(|mut file| writeln!(file, "{:>10}", std::process::id()).map_err(|e| Error::io("cannot write", e)));
    if let Err(e) = written {
        tracing::debug!(error = %e, "cannot ask other processes for space");
    }
}

/// Grants a request for space: gives one segment back if this process has plenty.
pub(super) fn grant_space(volume: &Volume) {
    let path = volume.root.join(NAME);
    let Ok(written) = fs::metadata(&path).and_then(|m| m.modified()) else { return };
    let is_recent = SystemTime::now().duration_since(written).is_ok_and(|age| age < LASTS);
    // Without holes a reclaimed segment keeps its space: its chunks would go, and nobody gain.
    let gives_nothing = volume.own().is_none_or(|own| own.has_no_holes());
    if !is_recent || gives_nothing || holds(volume) <= MODEST {
        return;
    }
    // A reclaimed segment has no space any more. The one that is ready is kept: without it this
    // process would take the room again at once.
    let _ = evict::make_room(volume) || segment::reclaim_one(volume);
    drop(fs::remove_file(&path));
}
