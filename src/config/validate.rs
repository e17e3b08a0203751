//! Ranges of settings, and pairs that contradict each other.
//!
//! Only checks that need nothing but the settings. Those that depend on the geometry (does staging
//! hold an extent?) or on the machine are made where these are known.

use std::path::{Component, Path};
use std::time::Duration;

use super::warning::Origin;
use super::{Capacity, MinFree, Mode, Settings};
use crate::error::{Error, ErrorKind};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Alignment of requests, whatever the drive's own block is.
const PAGE: usize = 4096;
/// In less, a segment would have room for no chunk of any real geometry.
pub(super) const MIN_CAPACITY_BYTES: u64 = 16 << 20;
/// More than a machine has: bytes were written where GiB are meant.
const MAX_MEMORY_BYTES: u64 = 64 << 40;
/// Far more than a digest has.
const MAX_FINGERPRINT_BYTES: usize = 4096;
/// Expiry is kept in 32 bits of Unix seconds.
const MAX_TTL: Duration = Duration::from_secs(20 * 365 * 86_400);

/// A setting that is out of range.
pub(super) struct Invalid {
    pub(super) key: &'static str,
    reason: String,
    advice: String,
}

impl Invalid {
    /// The error, with the key as the user wrote it and the place where it was set.
    pub(super) fn into_error(self, given: Option<(String, Origin)>) -> Error {
        let place = match given {
            Some((written, origin)) => format!("{written} ({origin})"),
            None => self.key.to_owned(),
        };
        Error::new(ErrorKind::Config, format!("{place}: {}", self.reason)).advice(self.advice)
    }
}

type Checked = Result<(), Invalid>;

fn ensure(holds: bool, key: &'static str, reason: impl Into<String>, advice: impl Into<String>) -> Checked {
    if holds { Ok(()) } else { Err(Invalid { key, reason: reason.into(), advice: advice.into() }) }
}

fn between<T: PartialOrd + std::fmt::Display>(key: &'static str, value: &T, low: T, high: T, unit: &str) -> Checked {
    let holds = (&low..=&high).contains(&value);
    ensure(holds, key, format!("{value}{unit} is out of range"), format!("use {low} to {high}{unit}"))
}

pub(super) fn check(s: &Settings) -> Checked {
    drives(s)?;
    memory(s)?;
    disk(s)?;
    between("chunk_size", &s.chunk_size, 1, 65_536, " tokens")?;
    between("max_concurrent_ops", &s.max_concurrent_ops, 1, 4096, "")?;
    between("io_timeout_ms", &s.io_timeout_ms, 10, 3_600_000, " ms")?;
    between("workers", &s.workers, 0, 256, " threads")?;
    between("reclaim_write_budget", &s.reclaim_write_budget, 0.0, 1.0, "")?;
    between("admission_loss", &s.admission_loss, 0.0, 1.0, "")?;
    ensure(
        s.write_budget_dwpd.is_none_or(|dwpd| dwpd > 0.0 && dwpd <= 1000.0),
        "write_budget_dwpd",
        "no drive is written that often a day",
        "use drive writes per day above 0 and up to 1000, or leave it out for no limit",
    )?;
    ensure(
        s.drive_bytes.is_none_or(|bytes| bytes >= MIN_CAPACITY_BYTES),
        "drive_bytes",
        "no drive is that small",
        "use the size of each drive, 16MiB at least, or leave it out for that of its file system",
    )?;
    between("lease_share", &s.lease_share, 0.01, 0.25, "")?;
    serving(s)?;
    remote(s)?;
    if let super::Numa::Node(node) = s.numa {
        between("numa", &node, 0, 1023, "")?;
    }
    Ok(())
}

/// The settings that only serving engines read.
fn serving(s: &Settings) -> Checked {
    between("load_timeout_ms", &s.load_timeout_ms, 0, 3_600_000, " ms")?;
    between("gather_patience_ms", &s.gather_patience_ms, 0, 60_000, " ms")?;
    between("max_sync_stall_ms", &s.max_sync_stall_ms, 0, 60_000, " ms")?;
    ensure(
        s.recompute_tokens_per_s.is_none_or(|rate| rate > 0.0),
        "recompute_tokens_per_s",
        "nothing is computed at that rate",
        "use tokens per second above 0, or leave it out",
    )?;
    ensure(
        s.fingerprint.as_ref().is_none_or(|own| own.len() <= MAX_FINGERPRINT_BYTES),
        "fingerprint",
        format!("more than {MAX_FINGERPRINT_BYTES} bytes are no digest"),
        "use a digest, or a name of your own",
    )?;
    ensure(
        s.blend_special_str.as_deref() != Some(""),
        "blend_special_str",
        "is empty, and separates nothing",
        "use a text that stands between segments, or leave it out",
    )
}

/// Schemes of the remote tier's address that are supported.
const REMOTE_SCHEMES: [&str; 10] = ["s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "https", "file"];

fn remote(s: &Settings) -> Checked {
    if let Some(url) = &s.remote_url {
        // The rest of the address may hold a password.
        let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
        ensure(
            REMOTE_SCHEMES.contains(&scheme),
            "remote_url",
            match scheme {
                "" => "no address: it has no scheme".to_owned(),
                _ => format!("there is no remote tier over {scheme}://"),
            },
            "use an object store: s3://BUCKET/PREFIX, gs://…, az://…, https://… (WebDAV) or file:///DIRECTORY",
        )?;
        let has_password =
            url.split_once("://").is_some_and(|(_, rest)| rest.split('/').next().is_some_and(|h| h.contains('@')));
        ensure(
            !has_password || scheme.starts_with("abfs"),
            "remote_url",
            "the address holds a user or a password",
            "give credentials by the environment, the files that it names, or the instance's role",
        )?;
        // No store is addressed by these parts: what is behind them would be passed over, and
        // chunks go to another place. The value may be a signature, and is not shown.
        ensure(
            !url.contains(['?', '#']),
            "remote_url",
            "the address has a ? or #, and what is behind it would be ignored",
            "end it with the path, and give credentials by the environment; in a name write %3F for ? and %23 for #",
        )?;
    }
    let serde = s.remote_serde.as_deref().unwrap_or("naive");
    ensure(
        serde == "naive",
        "remote_serde",
        format!("{serde:?} is not there: chunks are uploaded as they lie on the drive"),
        "write naive, or leave it out",
    )?;
    between("remote_timeout_ms", &s.remote_timeout_ms, 10, 600_000, " ms")?;
    ensure(
        s.remote_staging >= 16 * MIB,
        "remote_staging",
        format!("{} bytes are too few", s.remote_staging),
        "use at least 16MiB; 256MiB suits most networks",
    )
}

fn drives(s: &Settings) -> Checked {
    for path in s.cache_dirs() {
        ensure(
            path.is_absolute(),
            "drives",
            format!("the cache directory {:?} is not an absolute path", path.display().to_string()),
            "write the whole path, for example /mnt/nvme/forebay",
        )?;
        ensure(
            !path.components().any(|c| matches!(c, Component::ParentDir)),
            "drives",
            format!("the cache directory {} contains ..", path.display()),
            "write the path without ..",
        )?;
        ensure(
            path != Path::new("/"),
            "drives",
            "the cache directory is the root directory",
            "give the cache its own directory",
        )?;
    }
    for (i, path) in s.cache_dirs().enumerate() {
        for other in s.cache_dirs().skip(i + 1) {
            ensure(
                !path.starts_with(other) && !other.starts_with(path),
                "drives",
                format!("the cache directories {} and {} lie in each other", path.display(), other.display()),
                "give each drive its own directory",
            )?;
        }
    }
    let all_drain = !s.drives.is_empty() && s.drives.iter().all(|drive| drive.drain);
    ensure(
        !all_drain || s.mode == Mode::Ro,
        "drives",
        "every drive drains, so nothing could be stored",
        "leave one, or use mode: ro",
    )
}

fn memory(s: &Settings) -> Checked {
    let block = s.block_size;
    ensure(
        block.is_multiple_of(PAGE) && (64 * KIB..=64 * MIB).contains(&block),
        "block_size",
        format!("{block} bytes cannot be a request"),
        "use a multiple of 4096 from 64KiB to 64MiB; 1MiB suits most drives",
    )?;
    for (key, bytes) in [("staging", s.staging), ("store_staging", s.store_staging), ("gpu_staging", s.gpu_staging)] {
        ensure(
            bytes >= MIB,
            key,
            format!("{bytes} bytes hold no extent"),
            "use at least 1MiB; the default (64MiB, gpu_staging 256MiB) suits most models",
        )?;
    }
    ensure(
        s.pinned_staging >= 2 * block && s.pinned_staging <= 16 << 30,
        "pinned_staging",
        format!("{} bytes do not hold two requests of block_size, or are more than 16GiB", s.pinned_staging),
        "use at least twice block_size; 64MiB suits most drives",
    )?;
    ensure(
        s.max_local_cpu_size <= MAX_MEMORY_BYTES,
        "max_local_cpu_size",
        format!("no machine has {}", super::value::show_size(s.max_local_cpu_size)),
        "write GiB, or a number with a unit: a plain number is GiB",
    )
}

fn disk(s: &Settings) -> Checked {
    match s.capacity {
        Capacity::Bytes(bytes) => ensure(
            bytes / s.drives.len().max(1) as u64 >= MIN_CAPACITY_BYTES,
            "capacity",
            format!("{bytes} bytes are too few"),
            "use at least 16MiB for each drive; a size without a unit is in bytes",
        )?,
        Capacity::Percent(percent) => between("capacity", &percent, 1.0, 100.0, "%")?,
    }
    match s.tenant_quota {
        Some(Capacity::Bytes(bytes)) => ensure(
            bytes / s.drives.len().max(1) as u64 >= MIN_CAPACITY_BYTES,
            "tenant_quota",
            format!("{bytes} bytes are too few"),
            "use at least 16MiB for each drive, or leave it out for no limit; a size without a unit is in bytes",
        )?,
        Some(Capacity::Percent(percent)) => between("tenant_quota", &percent, 0.1, 100.0, "%")?,
        None => {}
    }
    if let MinFree::Bytes(bytes) = s.min_free {
        ensure(
            bytes == 0 || bytes >= MIN_CAPACITY_BYTES,
            "min_free",
            format!("{bytes} bytes are too few"),
            "use at least 16MiB, or 0; a size without a unit is in bytes",
        )?;
    }
    if let MinFree::Percent(percent) = s.min_free {
        ensure(percent <= 90.0, "min_free", format!("{percent}% leaves no room"), "use at most 90%")?;
        if let Capacity::Percent(capacity) = s.capacity {
            ensure(
                capacity + percent <= 100.0,
                "min_free",
                format!("{percent}% free and {capacity}% of capacity are more than the file system"),
                "lower one of the two",
            )?;
        }
    }
    if let Some(ttl) = s.ttl {
        ensure(
            ttl <= MAX_TTL,
            "ttl",
            format!("{} s is out of range", ttl.as_secs()),
            "use at most 20 years, or never",
        )?;
        ensure(
            ttl >= Duration::from_secs(1),
            "ttl",
            "less than a second",
            "use whole seconds; leave ttl out for chunks that never expire",
        )?;
    }
    Ok(())
}
