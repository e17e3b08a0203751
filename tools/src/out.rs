//! How a subcommand reports: what the user asked for, standard output that survives a closed pipe,
//! exit codes.

use std::io::Write as _;
use std::path::Path;

use forebay::{Error, ErrorKind, Result};
use serde::Serialize;

/// An error stopped the work.
pub(crate) const EXIT_FAILED: u8 = 1;
/// Wrong usage or input (clap exits with the same code).
pub(crate) const EXIT_USAGE: u8 = 2;
/// The work ran to its end and found a problem.
pub(crate) const EXIT_PROBLEM: u8 = 3;

/// Global options that every subcommand honours.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Context {
    /// Print JSON.
    pub(crate) json: bool,
    /// No progress bars.
    pub(crate) quiet: bool,
}

/// How a subcommand that ran to its end came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All is well.
    Done,
    /// A problem was found and has been printed.
    Problem,
    /// This signal ended the work early; what there was has been printed.
    Interrupted(u8),
}

impl Outcome {
    /// The process's exit code.
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Problem => EXIT_PROBLEM,
            // As a shell says of a program that a signal ended.
            Self::Interrupted(signal) => 128 + signal,
        }
    }
}

/// Writes `text` to standard output; a reader that has gone away (`| head`) is no error.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|e| Error::io("cannot write to standard output", e)),
    }
}

/// Writes a line to standard error. Where nobody can read it, the work goes on.
pub(crate) fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "forebay: {text}");
}

/// `value` as indented JSON with a final line break.
pub(crate) fn to_json<T: Serialize>(value: &T) -> Result<String> {
    let mut text = serde_json::to_string_pretty(value)
        .map_err(|e| Error::new(ErrorKind::Internal, "cannot render JSON").source(e))?;
    text.push('\n');
    Ok(text)
}

/// A path in JSON, which has no other bytes than UTF-8's.
pub(crate) fn lossy<S: serde::Serializer>(path: &Path, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

/// Prints `value` as JSON.
pub(crate) fn print_json<T: Serialize>(value: &T) -> Result<()> {
    print(&to_json(value)?)
}
