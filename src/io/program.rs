//! How this process starts the `forebay` program, where it is not that program itself: within an
//! interpreter `current_exe` names the interpreter.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

static SAID: OnceLock<Program> = OnceLock::new();

/// A way to start a program: its file and what comes before all other arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The file to execute.
    pub path: PathBuf,
    /// The first arguments.
    pub args: Vec<OsString>,
}

impl From<PathBuf> for Program {
    fn from(path: PathBuf) -> Self {
        Self { path, args: Vec::new() }
    }
}

impl Program {
    /// The program with its first arguments.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.args(&self.args);
        command
    }

    /// The `forebay` program as a process that runs it starts it again: as [`set_program`] said,
    /// else this process's file.
    ///
    /// # Errors
    /// Where the system does not tell that file.
    pub fn this() -> std::io::Result<Self> {
        said().map_or_else(|| std::env::current_exe().map(Self::from), |said| Ok(said.clone()))
    }
}

/// Says how the `forebay` program is started from this process. The first call counts.
pub fn set_program(program: Program) {
    let _ = SAID.set(program);
}

/// What [`set_program`] was given.
pub(super) fn said() -> Option<&'static Program> {
    SAID.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_first_starts_the_program_again() {
        let python = Program { path: "/usr/bin/env".into(), args: vec!["printf".into(), "%s".into()] };
        set_program(python.clone());
        set_program(PathBuf::from("/other").into());
        assert_eq!(Program::this().unwrap(), python);
        let output = Program::this().unwrap().command().arg("probe").output().unwrap();
        assert_eq!(output.stdout, b"probe");
    }
}
