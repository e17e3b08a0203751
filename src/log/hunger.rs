//! Sharing a full drive: a process whose lanes hold next to nothing, and that finds no room, says so; those that hold a lot give
//! some back.
//!
//! The cry is a small file beside the lanes, rewritten while the hunger lasts. Nothing depends on it being heard.

use std::fs;
use std::io::Write;
use std::time::{Duration, SystemTime};

use super::grant;
use super::paths;
use super::reclaim;
use super::thin;
use super::volume::Volume;
use crate::error::Error;

const NAME: &str = "HUNGRY";
/// A cry older than this is over.
const LASTS: Duration = Duration::from_secs(5);
/// Who holds no more than this many segments gives nothing.
const MODEST: usize = 4;

/// Segments that this process's lanes hold.
fn holds(volume: &Volume) -> usize {
    let in_use = |lane: &std::sync::Arc<super::Lane>| {
        lane.state().map_or(0, |s| s.segments.iter().filter(|s| s.phase != super::state::Phase::Absent).count())
    };
    volume.lanes().held().map(in_use).sum()
}

/// Tells the others that no room can be had.
pub(super) fn cry(volume: &Volume) {
    if holds(volume) >= MODEST {
        return;
    }
    // The time of the write is the message; the text is for people.
    let written = paths::open_small(&volume.root.join(NAME), true)
        .and_then(|mut file| writeln!(file, "{:>10}", std::process::id()).map_err(|e| Error::io("cannot write", e)));
    if let Err(e) = written {
        tracing::debug!(error = %e, "nobody can be told that room is needed");
    }
}

/// Gives one segment back if somebody cries and this process has plenty.
pub(super) fn feed(volume: &Volume) {
    let path = volume.root.join(NAME);
    let Ok(cried) = fs::metadata(&path).and_then(|m| m.modified()) else { return };
    let is_recent = SystemTime::now().duration_since(cried).is_ok_and(|age| age < LASTS);
    if !is_recent || holds(volume) <= MODEST {
        return;
    }
    // The segment that was ready stays so: otherwise this process would take the room again at once.
    if !thin::make_room(volume) && reclaim::reclaim_one(volume) {
        grant::give_back_ready(volume);
    }
    drop(fs::remove_file(&path));
}
