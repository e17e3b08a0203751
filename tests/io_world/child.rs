//! Scenarios that need an environment or a library of their own run in a child process: this test
//! program again, with one test.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use std::sync::Arc;

use forebay::config::Settings;
use forebay::device::{Device, HugePages, StagingOptions, StagingPool, open_device};
use forebay::io::{AlignedBuf, TrialMemory, cufile_trial};

const CHILD: &str = "FOREBAY_TEST_CHILD";
const TRIAL: &str = "FOREBAY_TEST_TRIAL_DIR";
const TRIAL_GPU: &str = "FOREBAY_TEST_TRIAL_GPU";
/// Set where trials are to use the memory of the GPU that they are told.
pub const WITH_CUDA: &str = "FOREBAY_TEST_WITH_CUDA";

/// Runs a cuFile trial where the test program was started for one (`--cufile-trial`): with host
/// memory, or with a GPU's where [`WITH_CUDA`] is set.
pub fn trial_program() {
    let Some(dir) = std::env::var_os(TRIAL) else { return };
    let memory = match std::env::var(TRIAL_GPU).ok().filter(|_| std::env::var_os(WITH_CUDA).is_some()) {
        None => TrialMemory { buf: AlignedBuf::zeroed(1 << 20).unwrap().into(), mover: None },
        Some(gpu) => {
            let (device, pool) = gpu_staging(&format!("cuda:{gpu}"), 1);
            TrialMemory { buf: pool.try_take().unwrap(), mover: device.mover() }
        }
    };
    let report = cufile_trial(Path::new(&dir), memory);
    println!("\n{}", report.to_line().unwrap());
}

/// A device, and staging of `slots` MiB-sized slots in its memory.
pub fn gpu_staging(name: &str, slots: usize) -> (Arc<dyn Device>, Arc<StagingPool>) {
    let device = open_device(name, &Settings::default()).unwrap();
    let options =
        StagingOptions { bytes: slots << 20, slot_bytes: 1 << 20, hugepages: HugePages::default(), numa: None };
    let pool = device.staging_pool(&options).unwrap();
    (device, pool)
}

/// A child process that is to be started.
pub struct Child {
    scratch: tempfile::TempDir,
    command: Command,
    test: &'static str,
}

impl Child {
    /// A child that runs `test` of this program, sees `/proc/modules` and loads `library` as
    /// libcufile.
    pub fn new(test: &'static str, library: &str) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([test, "--exact", "--nocapture"]).env(CHILD, test);
        let program = Self::program(scratch.path());
        let modules = scratch.path().join("modules");
        std::fs::write(&modules, "nvidia_fs 323584 0 - Live 0x0000000000000000\n").unwrap();
        command.env("LD_PRELOAD", standin_cufile::INTERPOSER).env("FOREBAY_INTERPOSE_MODULES", modules);
        command.env("FOREBAY_PROGRAM", program).env("FOREBAY_CUFILE_PATH", library).env("TMPDIR", scratch.path());
        command.env_remove("CUFILE_ENV_PATH_JSON").env_remove("CUFILE_LOGFILE_PATH");
        Self { scratch, command, test }
    }

    /// A child that sees this machine as it is, with its own libraries.
    pub fn unaided(test: &'static str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([test, "--exact", "--nocapture"]).env(CHILD, test);
        Self { scratch: tempfile::tempdir().unwrap(), command, test }
    }

    pub fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    pub fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// A program that answers as `forebay` does, by this test program.
    fn program(dir: &Path) -> PathBuf {
        let (path, exe) = (dir.join("forebay"), std::env::current_exe().unwrap());
        let text = format!(
            "#!/bin/sh\n[ \"$1 $2 $3\" = 'probe --json --cufile-trial' ] || exit 2\n\
             {TRIAL}=\"$4\" {TRIAL_GPU}=\"$6\" {CHILD}=trial_program exec '{}' trial_program --exact --nocapture\n",
            exe.display()
        );
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Runs `body` in the child, or (in the parent) the child and waits for it to succeed.
    pub fn run(mut self, body: impl FnOnce()) {
        if is_child(self.test) {
            return body();
        }
        let output = self.command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("1 passed"), "{} in a child: {text}", self.test);
        text.lines().filter(|line| line.starts_with("CUFILE ")).for_each(|line| println!("{line}"));
    }
}

/// Whether this process is the child that runs `test`.
pub fn is_child(test: &str) -> bool {
    std::env::var(CHILD).is_ok_and(|t| t == test)
}
