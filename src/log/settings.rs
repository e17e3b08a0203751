//! From settings to the options of a log, for everything that opens one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::base::budget::allocated_below;
use super::base::options::{DriveOptions, LogOptions};
use super::base::sizes::Sizes;
use crate::config::dir::{CacheDir, DirOptions, MountTable};
use crate::config::{self, Capacity, EvictionPolicy, IoEngine, Mode, Settings, Warning, WarningKind};
use crate::error::Result;
use crate::geometry::Geometry;
use crate::index::{AdmissionPolicy, Reclaim};
use crate::io::{EngineChoice, IoOptions, file_system_bytes};

/// Warnings that were logged already, by cache directory and advice: a process may open a directory
/// many times, and the rest of a text may have figures that change.
static TOLD: Mutex<BTreeSet<(PathBuf, String)>> = Mutex::new(BTreeSet::new());

/// Logs a warning about a directory once in a process.
fn tell_once(dir: &Path, warning: &Warning) -> bool {
    let is_new = TOLD.lock().insert((dir.to_path_buf(), warning.advice.clone()));
    if is_new {
        tracing::warn!("{warning}");
    }
    is_new
}

impl LogOptions {
    /// Options as the settings say, after a check of the cache directories. The caller adds the
    /// codec, which depends on where KV lies, and staging regions and limit of the queues.
    ///
    /// # Errors
    /// `Config` where no drive is set; what is wrong with a cache directory.
    pub fn of_settings(settings: &Settings, geometry: Arc<Geometry>) -> Result<Self> {
        let drives = settings.require_drives()?;
        let (mounts, checks) = (MountTable::read(), DirOptions::from(settings));
        let mut each = Vec::with_capacity(drives.len());
        for drive in drives {
            for warning in CacheDir::open(&drive.path, &checks, &mounts)?.warnings {
                tell_once(&drive.path, &warning);
            }
            let (size, _) = file_system_bytes(&drive.path)?;
            each.push(DriveOptions {
                capacity_bytes: Some(settings.drive_capacity_bytes(size)),
                min_free_bytes: Some(settings.min_free_bytes(size)),
                tenant_bytes: settings.drive_tenant_bytes(size),
                drive_bytes: settings.drive_bytes,
                drain: drive.drain,
            });
        }
        let policy = match settings.eviction_policy {
            EvictionPolicy::Fifo => Reclaim::Fifo,
            EvictionPolicy::Lru => Reclaim::Lru,
            EvictionPolicy::Prefix => Reclaim::Prefix,
        };
        let options = Self {
            dirs: drives.iter().map(|d| d.path.clone()).collect(),
            mode: settings.mode,
            capacity_is_share: matches!(settings.capacity, Capacity::Percent(_)),
            drives: each,
            policy,
            admission: match settings.admission {
                config::Admission::All => AdmissionPolicy::All,
                config::Admission::SecondTouch => AdmissionPolicy::SecondTouch,
                config::Admission::Adaptive => AdmissionPolicy::Adaptive { loss: settings.admission_loss },
            },
            write_budget_dwpd: settings.write_budget_dwpd,
            ttl: settings.ttl,
            on_incompatible: settings.on_incompatible,
            placement: settings.placement,
            lease_share: settings.lease_share,
            reclaim_write_budget: settings.reclaim_write_budget,
            io: io_options(settings),
            io_timeout: settings.io_timeout(),
            ..Self::new(Path::new(""), geometry)
        };
        for (dir, drive) in options.dirs.iter().zip(&options.drives).filter(|_| settings.mode == Mode::Rw) {
            let segment_bytes = Sizes::plan(&options, drive.capacity_bytes.unwrap_or(0)).map_or(0, |s| s.segment_bytes);
            if let Some(warning) = no_room(settings, dir, file_system_bytes(dir)?, segment_bytes) {
                tell_once(dir, &warning);
            }
        }
        Ok(options)
    }
}

/// A warning where the free space is too little for a segment, so that nothing can be stored.
fn no_room(settings: &Settings, dir: &Path, (size, free): (u64, u64), segment_bytes: u64) -> Option<Warning> {
    let used = allocated_below(dir).unwrap_or(0);
    let room = settings.room_bytes(size, free, used);
    room.is_none_or(|room| room < segment_bytes).then(|| Warning {
        kind: WarningKind::NoRoom,
        key: "cache_dir".into(),
        origin: None,
        message: format!(
            "nothing can be stored in {}: of its file system's {size} bytes {free} are free, and min_free keeps {} free",
            dir.display(),
            settings.min_free_bytes(size)
        ),
        advice: "free space on the drive, or lower min_free".into(),
    })
}

/// Reads pile up in a drive for about this time at most: that saturates a drive of any speed, and
/// more would only add latency.
const READ_LATENCY: Duration = Duration::from_millis(4);

fn io_options(settings: &Settings) -> IoOptions {
    IoOptions {
        engine: match settings.io_engine {
            IoEngine::Auto => EngineChoice::Auto,
            IoEngine::Uring => EngineChoice::Uring,
            IoEngine::Threads => EngineChoice::Threads,
        },
        iodepth: settings.max_concurrent_ops,
        read_latency: Some(READ_LATENCY),
        block_bytes: settings.block_size,
        numjobs: settings.max_concurrent_ops.min(16),
        ..IoOptions::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::MinFree;

    #[test]
    fn of_each_directory_a_warning_is_told_once() {
        let tell = |dir: &str, free: u64, advice: &str| {
            let (kind, message) = (WarningKind::NoRoom, format!("{free} bytes are free"));
            let (key, advice) = ("cache_dir".into(), advice.into());
            tell_once(Path::new(dir), &Warning { kind, key, origin: None, message, advice })
        };
        assert!(tell("/told/once", 1, "free space") && tell("/told/too", 1, "free space"));
        assert!(!tell("/told/once", 2, "free space"), "only its figures differ");
        assert!(tell("/told/once", 2, "mount it otherwise"));
    }

    #[test]
    fn a_drive_without_room_is_told_of_while_what_is_stored_there_takes_less_than_a_cache() {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = Settings { min_free: MinFree::Bytes(1 << 30), ..Settings::default() };
        let warning = |settings: &Settings, free| no_room(settings, dir.path(), (100 << 30, free), 16 << 20);
        assert!(warning(&settings, 2 << 30).is_none());
        assert!(no_room(&settings, dir.path(), (100 << 30, 2 << 30), 1 << 31).is_some(), "a segment does not fit");
        let told = warning(&settings, (1 << 30) + 4096).unwrap();
        assert_eq!(told.kind, WarningKind::NoRoom);
        assert!(told.to_string().contains("1073745920 are free, and min_free keeps 1073741824"), "{told}");
        std::fs::write(dir.path().join("data.kv"), vec![1; 16 << 20]).unwrap();
        assert!(warning(&settings, 1 << 30).is_none(), "chunks can take the place of others");
        settings.min_free = MinFree::Bytes(0);
        assert!(warning(&settings, 16 << 20).is_none());
    }
}
