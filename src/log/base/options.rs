//! What a log is opened with.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::clock::{Clock, SystemClock};
pub use crate::config::{Mode, OnIncompatible, Placement};
use crate::error::Result;
use crate::format::layout::SlotCodec;
use crate::geometry::Geometry;
use crate::index::{AdmissionPolicy, Reclaim};
use crate::io::{self, IoOptions};

/// Makes the queues of a drive: its number, its directory, the settings. Tests put faulty queues in
/// here.
pub type DriveFactory = Arc<dyn Fn(usize, &Path, &IoOptions) -> Result<io::Drive> + Send + Sync>;

/// What holds for one drive only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct DriveOptions {
    /// Most bytes on this drive; `None` for [`LogOptions::capacity_bytes`].
    pub capacity_bytes: Option<u64>,
    /// Least bytes to leave free on its file system; `None` for [`LogOptions::min_free_bytes`].
    pub min_free_bytes: Option<u64>,
    /// Its size in bytes, for drive writes per day; `None` for that of its file system.
    pub drive_bytes: Option<u64>,
    /// Most bytes of one tenant's chunks on this drive; `None` for [`LogOptions::tenant_bytes`].
    pub tenant_bytes: Option<u64>,
    /// It takes no new chunks, and reclaim writes none again; what it holds is served.
    pub drain: bool,
}

/// Says whether loads are under way.
pub type IsLoading = Arc<dyn Fn() -> bool + Send + Sync>;

/// Settings of a log.
#[derive(Clone)]
pub struct LogOptions {
    /// Cache directories, one per drive; their order does not matter.
    pub dirs: Vec<PathBuf>,
    /// What is different for some of the drives, in the order of `dirs`; may be shorter.
    pub drives: Vec<DriveOptions>,
    /// What a chunk is.
    pub geometry: Arc<Geometry>,
    /// How chunks are coded that are stored from now on; what is stored keeps its codec.
    pub codec: SlotCodec,
    /// Whether to write.
    pub mode: Mode,
    /// Most bytes on each drive, over all lanes and namespaces below its cache directory.
    pub capacity_bytes: u64,
    /// That is a share of the file system: where it holds nothing, the drive may not be mounted
    /// yet.
    pub capacity_is_share: bool,
    /// Least bytes to leave free on each drive's file system.
    pub min_free_bytes: u64,
    /// Most bytes that the chunks of one tenant, which is a cache salt, may take on each drive;
    /// `None` for no limit.
    pub tenant_bytes: Option<u64>,
    /// Bytes of a segment, rounded up to 64 KiB, at least one chunk; `None` for 1/64 of the
    /// capacity, at most 1 GiB, but at least four chunks or 1/8 of the capacity, whichever is less.
    /// Counts when a lane is made.
    pub segment_bytes: Option<u64>,
    /// Bytes of a usual slot where that is less than a full chunk's: so many more may come into a
    /// segment, one by one.
    pub usual_slot_bytes: Option<u64>,
    /// What goes first when room is needed.
    pub policy: Reclaim,
    /// Which chunks of prompts are stored ([`crate::log::Log::admit`]).
    pub admission: AdmissionPolicy,
    /// Times its own size that this process may write each drive in a day; `None` for no limit.
    pub write_budget_dwpd: Option<f64>,
    /// How long a chunk is served unless its put says otherwise; `None` for ever.
    pub ttl: Option<Duration>,
    /// What to do with lanes that cannot be used.
    pub on_incompatible: OnIncompatible,
    /// How chunks are spread over drives.
    pub placement: Placement,
    /// Share of the segments that may be leased at once, 0 to 1.
    pub lease_share: f64,
    /// Bytes that reclaim may write again for each byte it frees, 0 to 1.
    pub reclaim_write_budget: f64,
    /// How often to look for lanes that lost their writer, and to sweep.
    pub scan_interval: Duration,
    /// Settings of the I/O queues.
    pub io: IoOptions,
    /// How long one transfer may take.
    pub io_timeout: Duration,
    /// Makes the drives' queues; `None` for [`io::open_drive`].
    pub drive_factory: Option<DriveFactory>,
    /// Whether loads are under way, for work that should wait for a pause; `None` to judge by the
    /// reads in flight.
    pub is_loading: Option<IsLoading>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Pages of a new lane's journal ring; `None` for what suits capacity and segment. For tests,
    /// which fill it.
    #[doc(hidden)]
    pub ring_pages: Option<u32>,
    /// Start no threads: journal and maintenance do their work in [`crate::log::Log::turn`] and
    /// where a call would wait for them. For tests that decide the order of everything.
    #[doc(hidden)]
    pub foreground: bool,
}

impl LogOptions {
    /// What holds for drive `number`.
    pub(in crate::log) fn drive(&self, number: usize) -> DriveOptions {
        self.drives.get(number).copied().unwrap_or_default()
    }

    /// Settings for one drive at `dir`: read and write, 64 GiB. The other values are not always the
    /// documented defaults of a server, which [`of_settings`](Self::of_settings) takes.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>, geometry: Arc<Geometry>) -> Self {
        Self {
            dirs: vec![dir.into()],
            drives: Vec::new(),
            geometry,
            codec: SlotCodec::None,
            mode: Mode::default(),
            capacity_bytes: 64 << 30,
            capacity_is_share: false,
            min_free_bytes: 0,
            tenant_bytes: None,
            segment_bytes: None,
            usual_slot_bytes: None,
            policy: Reclaim::default(),
            admission: AdmissionPolicy::All,
            write_budget_dwpd: None,
            ttl: None,
            on_incompatible: OnIncompatible::default(),
            placement: Placement::default(),
            lease_share: 0.25,
            reclaim_write_budget: 0.25,
            scan_interval: Duration::from_secs(1),
            io: IoOptions::default(),
            io_timeout: Duration::from_secs(30),
            drive_factory: None,
            is_loading: None,
            clock: Arc::new(SystemClock),
            ring_pages: None,
            foreground: false,
        }
    }
}

impl fmt::Debug for LogOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogOptions")
            .field("dirs", &self.dirs)
            .field("mode", &self.mode)
            .field("capacity_bytes", &self.capacity_bytes)
            .field("segment_bytes", &self.segment_bytes)
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}
