//! A log without threads, for tests that decide the order of everything: the work of the journal
//! and maintenance threads is done when a test asks for it.
//!
//! Invariant: a turn does what the thread would do, by the same functions. It waits for nothing but
//! I/O.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::{Log, journal, policy, reclaim};

/// Whose work is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The journal's: full pages, seals.
    Journal,
    /// The same, with the commit interval over: partial pages too.
    Commit,
    /// The maintenance between its scans: touches, removals, floors, quotas, segments made ready.
    Maintain,
    /// The scan of the maintenance: lanes are adopted, expired and empty segments reclaimed.
    Scan,
}

impl Log {
    /// Does work that is due.
    #[doc(hidden)]
    pub fn turn(&self, turn: Turn) {
        if self.ctx.check().is_err() {
            return;
        }
        let mut all = self.maintenance.lock();
        all.resize_with(self.volumes.len(), reclaim::Maintenance::default);
        for (volume, maintenance) in self.volumes.iter().zip(all.iter_mut()) {
            let Some(lane) = volume.own() else { continue };
            match turn {
                Turn::Journal | Turn::Commit => drop(journal::turn(&lane, turn == Turn::Commit)),
                Turn::Maintain => maintenance.look(volume, &AtomicBool::new(false)),
                Turn::Scan => maintenance.scan(volume),
            }
        }
    }

    /// Prepares the policies and quotas, and starts the threads; a log without threads loads its
    /// policies at once.
    pub(super) fn start_threads(&self) -> crate::Result<()> {
        for (number, volume) in self.volumes.iter().enumerate() {
            let Some(lane) = volume.own() else { continue };
            policy::expect(&lane);
            if let Some(quota) = &volume.quota {
                quota.count(volume);
            }
            if self.ctx.options.foreground {
                policy::load(&lane, &volume.policy);
                continue;
            }
            self.spawn(number, "fb-journal", move || journal::run(&lane))?;
            let (volume, stop) = (Arc::clone(volume), Arc::clone(&self.stop));
            self.spawn(number, "fb-maintenance", move || reclaim::run(&volume, &stop))?;
        }
        Ok(())
    }
}
