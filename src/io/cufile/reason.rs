//! Why cuFile is not used: one cause each, in plain language, with what to do about it.
//!
//! To add a cause, add a row to the table below and use it where it is found. No text has a number
//! alone, since its reader may not know `cufile.h`.

use std::fmt;

use cufile_sys::{CuFileError, TransferError};
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind};

macro_rules! causes {
    ($($(#[$doc:meta])* $name:ident = $key:literal: $what:literal, $advice:literal;)*) => {
        /// What keeps cuFile from being used.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[non_exhaustive]
        pub enum CufileCause {
            $($(#[$doc])* $name,)*
        }

        impl CufileCause {
            /// Every cause.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The name in JSON.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $key,)* }
            }

            const fn words(self) -> (&'static str, &'static str) {
                match self { $(Self::$name => ($what, $advice),)* }
            }
        }
    };
}

causes! {
    /// The settings say `never`.
    Never = "never": "the settings choose `cufile: never`", "";
    /// The queues were opened without a directory to try cuFile in.
    NoDirectory = "no_directory": "there is no directory on the drive in which to try it: with `mode: ro` nothing is written", "";
    /// The `forebay` program, which tries cuFile, is not there.
    NoProgram = "no_program": "the `forebay` program, in which cuFile is tried first so that its driver can hang or crash \
        without harm, was not found", "install it next to this program or on PATH, or set FOREBAY_PROGRAM to it";
    /// No libcufile.
    NoLibrary = "no_library": "libcufile was not found", "install the GDS packages of the CUDA toolkit (gds-tools, libcufile) or \
        `pip install nvidia-cufile`, or set FOREBAY_CUFILE_PATH to the file";
    /// The library lacks functions.
    BadLibrary = "bad_library": "the library lacks functions of cuFile", "set FOREBAY_CUFILE_PATH to NVIDIA's libcufile";
    /// No `/proc/modules`.
    NoModules = "no_modules": "/proc/modules cannot be read, and cuFile's driver would wait for it for ever", "use a kernel with \
        loadable modules and a container that shows /proc/modules";
    /// The directory lies in memory.
    Tmpfs = "tmpfs": "the directory lies on tmpfs, which has no drive below it", "put the cache on ext4 or xfs on an NVMe drive";
    /// The directory lies on an overlay.
    Overlay = "overlay": "the directory lies on overlayfs (a container's own layer)", "mount a directory of an ext4 or xfs file \
        system on an NVMe drive into the container";
    /// A file system that cuFile does not know.
    Filesystem = "filesystem": "cuFile does not support the file system or drive here", "use ext4 (data=ordered) or xfs on a local \
        NVMe drive; `forebay probe --gpu N` shows what this one is";
    /// No record of the block device.
    NoUdev = "no_udev": "cuFile found no udev record of the block device (/run/udev/data/bMAJOR:MINOR with ID_FS_USAGE)",
        "run udevd on the host; in a container mount /run/udev read-only";
    /// No GPU, no CUDA driver.
    NoGpu = "no_gpu": "the CUDA driver has no usable GPU here", "check nvidia-smi, and that the container gets the GPU and \
        libcuda (--gpus, NVIDIA_DRIVER_CAPABILITIES=compute,utility); in compute mode EXCLUSIVE_PROCESS the program that tries \
        cuFile gets no context beside this one's: nvidia-smi -c DEFAULT";
    /// nvidia-fs could not be set up.
    NvfsSetup = "nvfs_setup": "cuFile could not set itself up: nvidia-fs or libcuda is missing", "modprobe nvidia-fs, and check \
        that libcuda.so.1 is installed";
    /// nvidia-fs is not loaded or does not fit.
    NoNvidiaFs = "no_nvidia_fs": "the kernel module nvidia-fs is not loaded or does not fit the library", "install nvidia-fs \
        (nvidia-gds) of the driver's version and modprobe it, or use P2P: open kernel modules, CUDA 13, kernel 6.2";
    /// The machine or GPU is not supported.
    Platform = "platform": "cuFile does not support this machine or GPU", "see the list of supported platforms in NVIDIA's GDS \
        documentation";
    /// Not allowed.
    Permission = "permission": "cuFile is not permitted here", "give the process access to /dev/nvidia*, /dev/nvidia-fs* and the \
        cache directory";
    /// No direct I/O.
    NoDirectIo = "no_direct_io": "O_DIRECT is refused here, without which cuFile has no direct path", "use ext4 or xfs";
    /// The drive is full.
    NoSpace = "no_space": "the drive has no room for the file of 1 MiB with which cuFile is tried", "free some space, and open the \
        cache again; with `cufile: auto` it opens all the same, without cuFile";
    /// The GPU's memory could not be pinned.
    Pinning = "pinning": "the GPU's memory could not be pinned for the drive", "lower `gpu_staging`, or enlarge BAR1 (resizable \
        BAR, IOMMU off or in passthrough)";
    /// It hung.
    TimedOut = "timed_out": "opening cuFile's driver took too long", "see dmesg, and run `forebay probe`";
    /// It crashed.
    Crashed = "crashed": "the program that tried cuFile crashed or gave no answer", "run `forebay probe --cufile-trial DIR` to see \
        its last words";
    /// It works, but not directly.
    CompatOnly = "compat_only": "cuFile works here only through the host's memory (compatibility mode), which is slower than \
        Forebay's own path", "`forebay probe --gpu N` lists what each direct path needs; `cufile: force` uses it all the same";
    /// It works, and does not say how.
    NoStatistics = "no_statistics": "this libcufile is too old to say which way its bytes go", "install 1.15 (CUDA 13) or later; \
        `cufile: force` uses it all the same";
    /// It moved other bytes.
    WrongBytes = "wrong_bytes": "cuFile read other bytes than it had written", "do not use it on this machine; report it with the \
        library's version";
    /// It failed while running.
    Failed = "failed": "cuFile failed while it was in use", "see the log; the queues stay on the path below until they are opened again";
    /// A call of it hung.
    Hung = "hung": "a call of cuFile did not come back in time", "see dmesg; the queues stay on the path below until they are opened \
        again";
    /// Any other error.
    Other = "other": "cuFile does not work here", "look the error up in NVIDIA's GDS troubleshooting guide";
}

impl CufileCause {
    /// The cause of an error of cuFile (5001 and up).
    pub(super) const fn of_error(err: i32) -> Self {
        match err {
            5002..=5005 | 5010 | 5048 => Self::NoNvidiaFs,
            5007 | 5009 => Self::Platform,
            5008 | 5018 | 5029 | 5034 => Self::Filesystem,
            5011 | 5047 => Self::NoGpu,
            5019 | 5020 => Self::NoDirectIo,
            5025 => Self::Permission,
            5027 => Self::NoUdev,
            5033 => Self::NvfsSetup,
            5036 => Self::Pinning,
            _ => Self::Other,
        }
    }
}

/// A cause and what was seen of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CufileReason {
    /// The cause.
    pub cause: CufileCause,
    /// What was seen: an error's name and the step it came from; may be empty.
    pub detail: String,
}

impl CufileReason {
    pub(super) fn new(cause: CufileCause, detail: impl Into<String>) -> Self {
        Self { cause, detail: detail.into() }
    }

    pub(super) fn plain(cause: CufileCause) -> Self {
        Self::new(cause, "")
    }

    /// What a failed call says.
    pub(super) fn of_call(call: &str, e: CuFileError) -> Self {
        Self::new(CufileCause::of_error(e.err), format!("{call}: {e}"))
    }

    pub(super) fn of_transfer(call: &str, e: &TransferError) -> Self {
        let cause = match e {
            TransferError::CuFile(err) => CufileCause::of_error(*err),
            TransferError::System(e) => match e.raw_os_error() {
                Some(libc::EACCES | libc::EPERM) => CufileCause::Permission,
                Some(libc::ENOSPC | libc::EDQUOT) => CufileCause::NoSpace,
                _ => CufileCause::Other,
            },
        };
        Self::new(cause, format!("{call}: {e}"))
    }

    /// As an error that keeps the queues from opening.
    pub(super) fn into_error(self) -> Error {
        let (what, advice) = self.cause.words();
        let message = if self.detail.is_empty() { what.to_owned() } else { format!("{what} ({})", self.detail) };
        Error::new(ErrorKind::Unsupported, message).advice(advice)
    }
}

impl fmt::Display for CufileReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, advice) = self.cause.words();
        f.write_str(what)?;
        if !self.detail.is_empty() {
            write!(f, " ({})", self.detail)?;
        }
        if advice.is_empty() { Ok(()) } else { write!(f, "; {advice}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_has_words_and_a_name_of_its_own() {
        let mut names: Vec<_> = CufileCause::ALL.iter().map(|c| c.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), CufileCause::ALL.len());
        for cause in CufileCause::ALL {
            let json = serde_json::to_string(cause).unwrap();
            assert_eq!(json, format!("{:?}", cause.as_str()), "JSON and name agree");
            let text = CufileReason::new(*cause, "seen").to_string();
            assert!(text.contains("(seen)") && !text.contains("  "), "{text}");
        }
    }

    #[test]
    fn errors_lead_to_causes_that_say_what_to_do() {
        for (err, cause, word) in [
            (5002, CufileCause::NoNvidiaFs, "modprobe"),
            (5004, CufileCause::NoNvidiaFs, "nvidia-fs"),
            (5011, CufileCause::NoGpu, "nvidia-smi"),
            (5019, CufileCause::NoDirectIo, "O_DIRECT"),
            (5025, CufileCause::Permission, "/dev/nvidia"),
            (5027, CufileCause::NoUdev, "/run/udev"),
            (5033, CufileCause::NvfsSetup, "libcuda"),
            (5036, CufileCause::Pinning, "gpu_staging"),
            (5008, CufileCause::Filesystem, "ext4"),
            (5007, CufileCause::Platform, "support"),
            (5999, CufileCause::Other, "5999"),
        ] {
            let reason = CufileReason::of_call("cuFileDriverOpen", CuFileError { err, cu_err: 100 });
            assert_eq!(reason.cause, cause, "{err}");
            let text = reason.to_string();
            assert!(text.contains(word) && text.contains(&err.to_string()), "{text}");
        }
        assert!(CufileReason::of_call("x", CuFileError { err: 5011, cu_err: 100 }).detail.contains("driver error 100"));
    }

    #[test]
    fn as_an_error_it_keeps_its_advice() {
        let e = CufileReason::plain(CufileCause::NoUdev).into_error();
        assert_eq!((e.kind(), e.to_string().contains("mount /run/udev")), (ErrorKind::Unsupported, true));
    }
}
