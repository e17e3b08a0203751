//! From settings to the options of a log, for everything that opens one.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::base::options::{DriveOptions, LogOptions};
use crate::config::dir::{CacheDir, DirOptions, MountTable};
use crate::config::{self, EvictionPolicy, IoEngine, Settings, Warning};
use crate::error::Result;
use crate::geometry::Geometry;
use crate::index::{AdmissionPolicy, Reclaim};
use crate::io::{EngineChoice, IoOptions, file_system_bytes};

/// Warnings about cache directories that were logged already: a process may open a directory many
/// times.
static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Logs a warning, which names its directory, once in a process.
fn tell_once(warning: &Warning) -> bool {
    let is_new = TOLD.lock().insert(warning.to_string());
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
                tell_once(&warning);
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
        Ok(Self {
            dirs: drives.iter().map(|d| d.path.clone()).collect(),
            mode: settings.mode,
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
            commit_interval: settings.commit_interval(),
            lease_share: settings.lease_share,
            reclaim_write_budget: settings.reclaim_write_budget,
            io: io_options(settings),
            io_timeout: settings.io_timeout(),
            ..Self::new(Path::new(""), geometry)
        })
    }
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
    use crate::config::WarningKind;

    #[test]
    fn of_each_directory_a_warning_is_told_once() {
        let warning = |dir: &str| Warning {
            kind: WarningKind::Permissions,
            key: "cache_dir".into(),
            origin: None,
            message: format!("{dir} lies on a file system mounted with discard"),
            advice: String::new(),
        };
        assert!(tell_once(&warning("/told/once")) && tell_once(&warning("/told/too")));
        assert!(!tell_once(&warning("/told/once")));
    }
}
