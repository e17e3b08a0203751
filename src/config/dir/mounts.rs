//! Which file system a directory lies on, from the text of `/proc/self/mountinfo`.
//!
//! Parsing never fails: lines that it does not understand are skipped, so that a new kernel's
//! fields lead to a warning at most.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// What a kind of file system means for a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FsKind {
    /// On a drive of this machine.
    Local,
    /// In memory.
    Memory,
    /// The layers of a container.
    Overlay,
    /// On another machine.
    Network,
    /// Served by a process (FUSE), by the hypervisor or by the sandbox.
    Fuse,
    /// The mount table does not know it.
    Unknown,
}

impl FsKind {
    /// The kind of the file system that the kernel calls `fs_type`.
    #[must_use]
    pub fn of(fs_type: &str) -> Self {
        match fs_type {
            "tmpfs" | "ramfs" | "devtmpfs" | "hugetlbfs" => Self::Memory,
            "overlay" | "overlayfs" | "aufs" => Self::Overlay,
            "nfs" | "nfs4" | "cifs" | "smb3" | "smbfs" | "ceph" | "lustre" | "glusterfs" | "gpfs" | "beegfs"
            | "wekafs" | "ocfs2" | "gfs2" | "afs" | "orangefs" | "pvfs2" => Self::Network,
            "fuse" | "fuseblk" | "virtiofs" | "9p" | "vboxsf" => Self::Fuse,
            "fuse.glusterfs" | "fuse.ceph" | "fuse.ceph-fuse" | "fuse.sshfs" | "fuse.s3fs" | "fuse.gcsfuse"
            | "fuse.juicefs" | "fuse.rclone" | "fuse.mount-s3" | "fuse.goofys" | "fuse.blobfuse2" => Self::Network,
            other if other.starts_with("fuse.") => Self::Fuse,
            _ => Self::Local,
        }
    }

    /// What is wrong with it and what to do, where something is.
    pub(super) const fn concern(self) -> Option<(&'static str, &'static str)> {
        Some(match self {
            Self::Local => return None,
            Self::Memory => (
                "that is memory, so the cache takes RAM and is lost at a reboot",
                "point cache_dir at a file system on an NVMe drive",
            ),
            Self::Overlay => (
                "that is a container's own layer, so the cache is slow and dies with the container",
                "mount a volume on an NVMe drive into the container and point cache_dir at it",
            ),
            Self::Network => (
                "leases, locks and the shared table hold on one machine only, and remote storage is slower than recomputing",
                "point cache_dir at a local NVMe drive; allow_any_filesystem: true if one machine alone uses it",
            ),
            Self::Fuse => (
                "each request passes through another program, and direct I/O may be refused",
                "point cache_dir at a file system on an NVMe drive; `forebay probe` shows what this one gives",
            ),
            Self::Unknown => (
                "/proc/self/mountinfo does not say what it lies on",
                "check that /proc is mounted and that cache_dir is on a local NVMe drive",
            ),
        })
    }
}

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountPoint {
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// The file system's type, as the kernel names it.
    pub fs_type: String,
    /// The device or server it comes from.
    pub source: String,
    /// Device number `major:minor`, the name below `/sys/dev/block`.
    pub device: String,
    /// The mount or its file system is read-only.
    pub read_only: bool,
    /// Freed space is discarded on the drive at once, before the file system goes on.
    pub discards: bool,
}

/// The mounts that this process sees, in the order in which they were made.
#[derive(Clone, Debug, Default)]
pub struct MountTable(Vec<MountPoint>);

impl MountTable {
    /// The mounts of this process; none where /proc is not there.
    #[must_use]
    pub fn read() -> Self {
        std::fs::read("/proc/self/mountinfo").map_or_else(|_| Self::default(), |bytes| Self::parse(&bytes))
    }

    /// Reads the text of `/proc/self/mountinfo`.
    #[must_use]
    pub fn parse(text: &[u8]) -> Self {
        Self(text.split(|byte| *byte == b'\n').filter_map(parse_line).collect())
    }

    /// The mount that holds `path`, which must be free of symlinks.
    #[must_use]
    pub fn of(&self, path: &Path) -> Option<&MountPoint> {
        // Of two mounts on one directory the later one hides the earlier; max_by_key gives the last
        // maximum.
        let holding = self.0.iter().filter(|mount| path.starts_with(&mount.mount_point));
        holding.max_by_key(|mount| mount.mount_point.components().count())
    }
}

/// `36 35 98:0 /root /mount/point rw,noatime master:1 - ext4 /dev/sda1 rw,errors=continue`
fn parse_line(line: &[u8]) -> Option<MountPoint> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').filter(|field| !field.is_empty()).collect();
    let dash = fields.iter().position(|field| *field == b"-")?;
    let text = |i: usize| Some(String::from_utf8_lossy(&unescape(fields.get(i)?)).into_owned());
    let says = |i: usize, what: &[u8]| fields.get(i).is_some_and(|o| o.split(|b| *b == b',').any(|o| o == what));
    Some(MountPoint {
        mount_point: PathBuf::from(OsString::from_vec(unescape(fields.get(4)?))),
        fs_type: text(dash + 1)?,
        source: text(dash + 2)?,
        device: text(2)?,
        read_only: says(5, b"ro") || says(dash + 3, b"ro"),
        discards: says(dash + 3, b"discard") || says(dash + 3, b"discard=sync"),
    })
}

/// In names, blanks and backslashes are written as a backslash and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let code = tail.get(..3).filter(|_| first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                rest = tail.get(3..).unwrap_or_default();
            }
            None => {
                out.push(first);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,errors=remount-ro
40 27 259:1 / /mnt/nvme rw,noatime shared:9 master:2 - xfs /dev/nvme0n1 rw,nodiscard,discard=async
41 40 0:50 / /mnt/nvme/ram rw - tmpfs tmpfs rw,size=1024k
42 27 0:51 / /mnt/my\\040drive\\134x ro,relatime - btrfs /dev/sdb rw,discard=sync
43 27 0:52 / /mnt/share rw - nfs4 server:/export rw,vers=4.2
44 43 0:53 / /mnt/share rw - ext4 /dev/sdc ro
broken line
45 27 0:54 /
";

    fn mount(path: &str) -> MountPoint {
        MountTable::parse(TEXT.as_bytes()).of(Path::new(path)).cloned().unwrap()
    }

    #[test]
    fn the_deepest_mount_holds_a_path_and_a_later_one_hides_an_earlier() {
        assert_eq!(mount("/home/x").fs_type, "ext4");
        assert_eq!(mount("/mnt/nvme/cache").source, "/dev/nvme0n1");
        assert_eq!(mount("/mnt/nvme/cache").device, "259:1");
        assert_eq!(mount("/mnt/nvme/ram/a/b").fs_type, "tmpfs");
        assert_eq!(mount("/mnt/nvme2").mount_point, Path::new("/"), "a name is no prefix of a longer name");
        assert_eq!(mount("/mnt/share/x").fs_type, "ext4");
        assert!(MountTable::default().of(Path::new("/")).is_none());
    }

    #[test]
    fn read_only_is_seen_in_the_mount_and_in_the_file_system() {
        assert!(mount("/mnt/my drive\\x/c").read_only);
        assert!(mount("/mnt/share").read_only);
        assert!(!mount("/").read_only, "errors=remount-ro is not ro");
    }

    #[test]
    fn a_file_system_that_trims_at_once_is_seen() {
        assert!(mount("/mnt/my drive\\x/c").discards);
        assert!(!mount("/mnt/nvme/cache").discards && !mount("/").discards);
    }

    #[test]
    fn kinds_follow_the_kernels_names() {
        for (name, kind) in [
            ("ext4", FsKind::Local),
            ("xfs", FsKind::Local),
            ("zfs", FsKind::Local),
            ("tmpfs", FsKind::Memory),
            ("overlay", FsKind::Overlay),
            ("nfs", FsKind::Network),
            ("nfs4", FsKind::Network),
            ("cifs", FsKind::Network),
            ("fuse.juicefs", FsKind::Network),
            ("fuse.ceph-fuse", FsKind::Network),
            ("fuse.mergerfs", FsKind::Fuse),
            ("virtiofs", FsKind::Fuse),
        ] {
            assert_eq!(FsKind::of(name), kind, "{name}");
        }
    }

    #[test]
    fn any_bytes_give_a_table() {
        for text in [&b"\\"[..], b"\\04", b"a b c d \\777 e - f", b" - ", b"\xff\xfe - \xff", b"1 2 3 4 5 6 -"] {
            let _ = MountTable::parse(text).of(Path::new("/x"));
        }
        assert_eq!(unescape(b"a\\040b\\9\\"), b"a b\\9\\");
    }
}
