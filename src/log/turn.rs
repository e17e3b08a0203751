//! A log without threads: what journal and keeper would do by themselves is done when it is asked for.
//!
//! For tests that decide the order of everything. Invariant: a turn does what the thread would do, by the same functions; it never
//! waits for anything but a queue.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::Log;
use super::{chain, journal, keeper::Keeper, quota};

/// Whose work is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The journal's: full pages, seals.
    Journal,
    /// The same, with the commit interval over: partial pages too.
    Commit,
    /// The keeper's between its scans: touches, segments made ready.
    Keeper,
    /// The keeper's scan: lanes adopted, sweeps, what has expired.
    Scan,
}

impl Log {
    /// Does work that is due.
    #[doc(hidden)]
    pub fn turn(&self, turn: Turn) {
        if self.ctx.check().is_err() {
            return;
        }
        let mut keepers = self.keepers.lock();
        keepers.resize_with(self.volumes.len(), Keeper::default);
        for (volume, keeper) in self.volumes.iter().zip(keepers.iter_mut()) {
            let Some(lane) = volume.own() else { continue };
            match turn {
                Turn::Journal | Turn::Commit => drop(journal::turn(&lane, turn == Turn::Commit)),
                Turn::Keeper => keeper.look(volume, &AtomicBool::new(false)),
                Turn::Scan => keeper.scan(volume),
            }
        }
    }

    /// Begins what runs beside the calls: the policy, and the threads of a log that has any.
    pub(super) fn start_threads(&self) -> crate::Result<()> {
        for volume in &self.volumes {
            let Some(lane) = volume.own() else { continue };
            chain::begin(volume, &lane);
            quota::count(volume);
            if self.ctx.options.foreground {
                continue;
            }
            self.spawn("fb-journal", move || journal::run(&lane))?;
            let (volume, stop) = (Arc::clone(volume), Arc::clone(&self.stop));
            self.spawn("fb-keeper", move || super::keeper::run(&volume, &stop))?;
        }
        Ok(())
    }
}
