//! From settings to the options of a log: what everything that opens one has in common.

use std::path::Path;
use std::sync::Arc;

use super::options::{LogOptions, Mode, OnIncompatible, Placement};
use crate::config::dir::{CacheDir, DirOptions, MountTable};
use crate::config::{self, EvictionPolicy, IoEngine, Settings};
use crate::error::Result;
use crate::geometry::Geometry;
use crate::io::{EngineChoice, IoOptions, file_system_bytes};

impl LogOptions {
    /// Options as the settings say, after a check of the cache directories. Staging regions, and with them the limit of the
    /// queues, are for the caller to add.
    ///
    /// # Errors
    /// `Config` where no drive is set; what is wrong with a cache directory.
    pub fn of_settings(settings: &Settings, geometry: Arc<Geometry>) -> Result<Self> {
        let drives = settings.require_drives()?;
        let (mounts, checks) = (MountTable::read(), DirOptions::from(settings));
        let (mut capacity_bytes, mut min_free_bytes) = (u64::MAX, 0);
        for drive in drives {
            for warning in CacheDir::open(&drive.path, &checks, &mounts)?.warnings {
                tracing::warn!("{warning}");
            }
            let (size, _) = file_system_bytes(&drive.path)?;
            capacity_bytes = capacity_bytes.min(settings.drive_capacity_bytes(size));
            min_free_bytes = min_free_bytes.max(settings.min_free_bytes(size));
        }
        let policy = match settings.eviction_policy {
            EvictionPolicy::Fifo => "fifo",
            EvictionPolicy::Lru => "lru",
        };
        Ok(Self {
            dirs: drives.iter().map(|d| d.path.clone()).collect(),
            mode: match settings.mode {
                config::Mode::Rw => Mode::ReadWrite,
                config::Mode::Ro => Mode::ReadOnly,
            },
            capacity_bytes,
            min_free_bytes,
            policy: policy.to_owned(),
            ttl: settings.ttl,
            on_incompatible: match settings.on_incompatible {
                config::OnIncompatible::Refuse => OnIncompatible::Refuse,
                config::OnIncompatible::Recreate => OnIncompatible::Recreate,
            },
            dir_mode: settings.dir_mode,
            placement: match settings.placement {
                config::Placement::Chain => Placement::Chain,
                config::Placement::Stripe => Placement::Stripe,
            },
            commit_interval: settings.commit_interval(),
            lease_share: settings.lease_share,
            reclaim_write_budget: settings.reclaim_write_budget,
            io: io_options(settings),
            io_timeout: settings.io_timeout(),
            ..Self::new(Path::new(""), geometry)
        })
    }
}

fn io_options(settings: &Settings) -> IoOptions {
    IoOptions {
        engine: match settings.io_engine {
            IoEngine::Auto => EngineChoice::Auto,
            IoEngine::Uring => EngineChoice::Uring,
            IoEngine::Threads => EngineChoice::Threads,
        },
        iodepth: settings.max_concurrent_ops,
        block_bytes: settings.block_size,
        numjobs: settings.max_concurrent_ops.min(16),
        ..IoOptions::default()
    }
}
