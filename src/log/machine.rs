//! Who and where this process is: what shared files and checks need to know of it, read once at open.

use std::path::Path;

use crate::error::{Error, ErrorKind, Result};
use crate::geometry::Geometry;
use crate::index::{BootId, Holder};

/// Facts about this process and what it may meet.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub(super) boot: BootId,
    pub(super) holder: Holder,
    pub(super) fingerprint: [u8; 32],
    pub(super) layers_digest: [u8; 32],
    pub(super) file_mode: u32,
    pub(super) dir_mode: u32,
    pub(super) direct_flag: i32,
    pub(super) pid: u32,
}

impl Machine {
    pub(super) fn read(geometry: &Geometry, dir_mode: u32) -> Result<Self> {
        let text = |path: &str| std::fs::read_to_string(path).map_err(|e| Error::io("cannot read", e).at(path));
        let unreadable = |path: &str| Error::new(ErrorKind::Unsupported, "unexpected contents").at(path);
        let boot_path = "/proc/sys/kernel/random/boot_id";
        let boot = BootId::parse(&text(boot_path)?).ok_or_else(|| unreadable(boot_path))?;
        let stat_path = "/proc/self/stat";
        let holder = Holder::parse(&text(stat_path)?, &pid_namespace("self")).ok_or_else(|| unreadable(stat_path))?;
        Ok(Self {
            boot,
            holder,
            fingerprint: geometry.fingerprint().0,
            layers_digest: geometry.layers_digest(),
            file_mode: dir_mode & 0o666,
            dir_mode,
            direct_flag: libc::O_DIRECT,
            pid: std::process::id(),
        })
    }

    /// Whether the process that holds a lease lives. One of another PID namespace cannot be asked and counts as alive.
    pub(super) fn alive(&self, holder: &Holder) -> bool {
        if holder.pid_ns != self.holder.pid_ns {
            return true;
        }
        let pid = holder.pid.to_string();
        match std::fs::read_to_string(Path::new("/proc").join(&pid).join("stat")) {
            Ok(stat) => Holder::parse(&stat, &pid_namespace(&pid)).is_none_or(|h| h.start_ticks == holder.start_ticks),
            Err(e) => e.kind() != std::io::ErrorKind::NotFound,
        }
    }

    /// Whether this process is the one that opened the log, and not a forked child.
    pub(super) fn check_not_forked(&self) -> Result<()> {
        if std::process::id() == self.pid {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Forked, "the cache was opened before this process was forked")
            .advice("open the engine in the process that uses it"))
    }
}

fn pid_namespace(pid: &str) -> String {
    let link = std::fs::read_link(Path::new("/proc").join(pid).join("ns/pid"));
    link.map(|l| l.to_string_lossy().into_owned()).unwrap_or_default()
}
