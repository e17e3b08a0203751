//! A real file system in a file, on a loop device, that can be shut down under whoever uses it.
//! Needs root.
#![expect(unsafe_code, reason = "a file system is shut down by an ioctl")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// XFS_IOC_GOINGDOWN and EXT4_IOC_SHUTDOWN: `_IOR('X', 125, __u32)`.
const SHUTDOWN: libc::c_ulong = (2 << 30) | (4 << 16) | ((b'X' as libc::c_ulong) << 8) | 125;
/// XFS takes no less than 300 MB.
const IMAGE_BYTES: u64 = 320 << 20;

/// How a file system is shut down: the kernel's flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// Everything is written first.
    All = 0,
    /// The journal is written, what was not on the drive is lost.
    Journal = 1,
    /// Nothing is written.
    Nothing = 2,
}

/// A file system on a loop device, unmounted in the end.
pub struct LoopDisk {
    image: PathBuf,
    place: PathBuf,
}

fn run(program: &str, args: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(args).output().map_err(|e| format!("{program}: {e}"))?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(format!("{program} {}: {said}", args.join(" "))) }
}

impl LoopDisk {
    /// Makes and mounts one below `dir`; the reason where this machine cannot.
    pub fn make(kind: &str, dir: &Path) -> Result<Self, String> {
        let disk = Self { image: dir.join("image"), place: dir.join("mount") };
        std::fs::create_dir(&disk.place).unwrap();
        File::create(&disk.image).unwrap().set_len(IMAGE_BYTES).unwrap();
        run(&format!("mkfs.{kind}"), &["-q", disk.image.to_str().unwrap()])?;
        disk.mount()?;
        Ok(disk)
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.place
    }

    pub fn mount(&self) -> Result<(), String> {
        run("mount", &["-o", "loop", self.image.to_str().unwrap(), self.place.to_str().unwrap()])
    }

    /// Unmounts it. What a process that was killed had open, the kernel may close a little later.
    pub fn unmount(&self) -> Result<(), String> {
        let mut outcome = Ok(());
        for _ in 0..1000 {
            outcome = run("umount", &[self.place.to_str().unwrap()]);
            if outcome.is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        outcome
    }

    /// Ends it, as it ends itself when its drive dies: no call succeeds any more until it is
    /// mounted again.
    pub fn shut_down(&self, flush: Flush) {
        let dir = File::open(&self.place).unwrap();
        let flags = flush as u32;
        // SAFETY: the descriptor is open, and the ioctl reads one u32, which outlives the call.
        let outcome = unsafe { libc::ioctl(dir.as_raw_fd(), SHUTDOWN, &raw const flags) };
        assert_eq!(outcome, 0, "{}", std::io::Error::last_os_error());
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        let _ = run("umount", &["-l", self.place.to_str().unwrap_or_default()]);
    }
}
