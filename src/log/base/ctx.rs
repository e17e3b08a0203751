//! What all parts of an open log share: settings, clock, counters, and who this process is.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

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
    /// When a bad chunk was last logged; 0 where none was.
    pub(in crate::log) bad_told_ns: AtomicU64,
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
            bad_told_ns: AtomicU64::new(0),
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
