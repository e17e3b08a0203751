//! Runs the program as a user would.

use std::path::Path;
use std::process::{Command, Output};

/// What a run has left.
pub(crate) struct Run {
    /// Exit status.
    pub(crate) code: i32,
    /// Standard output.
    pub(crate) stdout: String,
    /// Standard error.
    pub(crate) stderr: String,
}

impl Run {
    /// Standard output as JSON.
    pub(crate) fn json(&self) -> serde_json::Value {
        match serde_json::from_str(&self.stdout) {
            Ok(value) => value,
            Err(e) => panic!("no JSON ({e}): {}\n{}", self.stdout, self.stderr),
        }
    }

    /// The same run, which must have ended with `code`.
    pub(crate) fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, code, "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }
}

/// Runs `forebay` with `arguments` in `folder`.
pub(crate) fn forebay(folder: &Path, arguments: &[&str]) -> Run {
    forebay_with(folder, arguments, &[])
}

/// The same with more variables in its environment.
pub(crate) fn forebay_with(folder: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Run {
    let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(arguments)
        .current_dir(folder)
        // Tests store on drives that are nearly full, too.
        .env("FOREBAY_MIN_FREE", "0")
        .env_remove("RUST_LOG")
        .env_remove("FOREBAY_LOG")
        .envs(variables.iter().copied())
        .output()
        .expect("the program starts");
    Run {
        code: status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&stdout).into_owned(),
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
    }
}

/// A temporary folder below the build's own, which lies on a real file system.
pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder")
}
