//! What all parts of an open log share: settings, clock, counters, and who this process is.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::admission::Admit;
use super::codec::CodecChoice;
use super::eviction_feed::EvictionFeed;
use super::in_flight::InFlight;
use super::options::{LogOptions, Mode};
use super::spec::OBJECT_TLV_BYTES;
use super::stats::LogCounters;
use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::{SlotCodec, SlotLayout};
use crate::index::{BootId, Entry, EntryKind, Holder, LeaseEnv};

/// Least time between two warnings about the same.
const TELL_EVERY_NS: u64 = 60_000_000_000;

/// Shared by a log, its drives, lanes and threads.
#[derive(Debug)]
pub(in crate::log) struct Ctx {
    pub(in crate::log) options: LogOptions,
    pub(in crate::log) counters: LogCounters,
    pub(in crate::log) evicted: EvictionFeed,
    pub(in crate::log) admit: Admit,
    pub(in crate::log) codec: CodecChoice,
    pub(in crate::log) in_flight: Arc<InFlight>,
    pub(in crate::log) boot: BootId,
    pub(in crate::log) me: Holder,
    /// When it was last warned of something, and of which place.
    told_ns: Mutex<BTreeMap<(&'static str, PathBuf), u64>>,
    full_layout: SlotLayout,
    full_coded: SlotLayout,
    pid: u32,
    closed: AtomicBool,
}

impl Ctx {
    pub(in crate::log) fn new(options: LogOptions) -> Result<Self> {
        Ok(Self {
            admit: Admit::new(&options),
            codec: CodecChoice::new(options.codec),
            full_layout: SlotLayout::of_chunk(&options.geometry, options.geometry.chunk_tokens),
            full_coded: SlotLayout::of_coded_chunk(&options.geometry, options.geometry.chunk_tokens, SlotCodec::Exp4),
            options,
            counters: LogCounters::default(),
            evicted: EvictionFeed::default(),
            in_flight: Arc::default(),
            told_ns: Mutex::default(),
            boot: boot_id()?,
            me: holder("self")?,
            pid: std::process::id(),
            closed: AtomicBool::new(false),
        })
    }

    /// Whether calls may go on.
    pub(in crate::log) fn check(&self) -> Result<()> {
        if std::process::id() != self.pid {
            return Err(Error::new(ErrorKind::Forked, "the process was forked after the cache was opened")
                .advice("open the cache after forking (spawn, do not fork)"));
        }
        if self.is_closed() {
            return Err(Error::new(ErrorKind::Closed, "the cache is closed"));
        }
        Ok(())
    }

    /// As [`check`](Self::check), for calls that write.
    pub(in crate::log) fn check_writable(&self) -> Result<()> {
        self.check()?;
        if self.options.mode == Mode::Ro {
            return Err(Error::new(ErrorKind::Unsupported, "the cache is open read-only"));
        }
        Ok(())
    }

    pub(in crate::log) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Marks it closed; whether it was open.
    pub(in crate::log) fn close(&self) -> bool {
        !self.closed.swap(true, Ordering::AcqRel)
    }

    /// Logs a failure that may come again and again: a warning at first, and then once a minute for
    /// each place.
    pub(in crate::log) fn tell(&self, what: &'static str, at: &Path, e: &Error) {
        if self.may_warn(what, at) {
            tracing::warn!(at = %at.display(), error = %e, "{what}");
        } else {
            tracing::debug!(at = %at.display(), error = %e, "{what}");
        }
    }

    /// Whether the last warning about the same, for which this answer counts as one, is a minute
    /// old.
    pub(in crate::log) fn may_warn(&self, what: &'static str, at: &Path) -> bool {
        let now_ns = self.options.clock.boot_ns();
        let mut told_ns = self.told_ns.lock();
        let last = told_ns.entry((what, at.to_path_buf())).or_default();
        let is_due = *last == 0 || now_ns.saturating_sub(*last) >= TELL_EVERY_NS;
        if is_due {
            *last = now_ns.max(1);
        }
        is_due
    }

    /// Where header and extents of an entry's slot lie.
    pub(in crate::log) fn layout_of(&self, entry: &Entry) -> SlotLayout {
        if entry.kind == EntryKind::Object {
            let plain = SlotLayout::of_bytes(entry.length as usize, OBJECT_TLV_BYTES);
            return if plain.pages() == entry.pages {
                plain
            } else {
                SlotLayout::of_coded_bytes(entry.length as usize, OBJECT_TLV_BYTES)
            };
        }
        // A coded slot is shorter than that of the same chunk without a codec.
        let coded = self.chunk_layout(entry.tokens, SlotCodec::Exp4);
        if coded.pages() == entry.pages { coded } else { self.chunk_layout(entry.tokens, SlotCodec::None) }
    }

    /// The layout of a chunk of `tokens` tokens.
    pub(in crate::log) fn chunk_layout(&self, tokens: u32, codec: SlotCodec) -> SlotLayout {
        if tokens != self.options.geometry.chunk_tokens {
            return SlotLayout::of_coded_chunk(&self.options.geometry, tokens, codec);
        }
        match codec {
            SlotCodec::None => self.full_layout.clone(),
            SlotCodec::Exp4 => self.full_coded.clone(),
        }
    }

    /// Bytes of a full chunk's slot without a codec.
    pub(in crate::log) fn slot_bytes(&self) -> u64 {
        self.full_layout.slot_bytes
    }

    pub(in crate::log) fn now_s(&self) -> u64 {
        self.options.clock.unix_s()
    }

    /// Calls `f` with the clock and the liveness check that leases need.
    pub(in crate::log) fn with_lease_env<R>(&self, f: impl FnOnce(&LeaseEnv<'_>) -> R) -> R {
        let alive = |other: &Holder| self.alive(other);
        f(&LeaseEnv { now_ns: self.options.clock.boot_ns(), alive: &alive })
    }

    /// Whether a process lives; those of other PID namespaces cannot be asked and count as living.
    fn alive(&self, other: &Holder) -> bool {
        if other.pid_ns != self.me.pid_ns {
            return true;
        }
        match fs::read_to_string(format!("/proc/{}/stat", other.pid)) {
            Ok(stat) => Holder::parse(&stat, &ns_link(other.pid_ns)).is_none_or(|h| h.start_ticks == other.start_ticks),
            Err(e) => e.kind() != std::io::ErrorKind::NotFound,
        }
    }
}

fn ns_link(ns: u32) -> String {
    format!("pid:[{ns}]")
}

pub(in crate::log) fn boot_id() -> Result<BootId> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = fs::read_to_string(path).map_err(|e| Error::io("cannot read the boot id", e).at(path))?;
    BootId::parse(&text).ok_or_else(|| Error::new(ErrorKind::Unsupported, "the boot id is not a UUID").at(path))
}

pub(in crate::log) fn holder(pid: &str) -> Result<Holder> {
    let path = format!("/proc/{pid}/stat");
    let stat =
        fs::read_to_string(&path).map_err(|e| Error::io("cannot read this process's /proc entry", e).at(&path))?;
    let link = fs::read_link(format!("/proc/{pid}/ns/pid")).map(|l| l.to_string_lossy().into_owned());
    let link = link.unwrap_or_else(|_| ns_link(0));
    Holder::parse(&stat, &link)
        .ok_or_else(|| Error::new(ErrorKind::Unsupported, "cannot parse this process's /proc entry").at(&path))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::geometry::{DType, Geometry, LayerKind, LayerSpec};
    use crate::log::Clock;

    #[derive(Debug)]
    struct Fake(AtomicU64);

    impl Clock for Fake {
        fn unix_ms(&self) -> u64 {
            0
        }

        fn boot_ns(&self) -> u64 {
            self.0.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn of_what_fails_again_and_again_it_is_warned_once_a_minute() {
        let layers = vec![LayerSpec::kv(LayerKind::Full, 1, 64)];
        let geometry = Geometry::new("small", DType::named("bf16").unwrap(), layers, 16);
        let clock = Arc::new(Fake(AtomicU64::new(5)));
        let options = LogOptions { clock: clock.clone(), ..LogOptions::new("/cache", Arc::new(geometry.unwrap())) };
        let ctx = Ctx::new(options).unwrap();
        let warns = |what, at: &str| ctx.may_warn(what, Path::new(at));
        assert!(warns("it fails", "/a") && warns("it fails", "/b") && warns("it is slow", "/a"));
        clock.0.store(4 + TELL_EVERY_NS, Ordering::Relaxed);
        assert!(!warns("it fails", "/a") && !warns("it is slow", "/a"));
        clock.0.store(5 + TELL_EVERY_NS, Ordering::Relaxed);
        assert!(warns("it fails", "/a") && !warns("it fails", "/a") && warns("it is slow", "/a"));
    }
}
