//! Which prompts are done, in a file, so that an interrupted run goes on where it stopped.
//!
//! One digest per line, appended and synced after each answer. A last line that a crash cut short
//! names no prompt, so that prompt is sent again; a file that holds anything else is refused,
//! because it is somebody else's.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use forebay::{Error, ErrorKind, Result};
use parking_lot::Mutex;

const DIGEST_DIGITS: usize = 32;

/// The prompts that are done.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    done: HashSet<String>,
    file: Option<(PathBuf, Mutex<File>)>,
}

impl Journal {
    /// A journal in `path`; to be written to, it is made where it is missing.
    pub(crate) fn open(path: &Path, writes: bool) -> Result<Self> {
        let failed = |e| Error::io("cannot open the journal", e).at(path);
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(failed(e)),
        };
        let (whole, cut) = text.rsplit_once('\n').unwrap_or(("", &text));
        let is_digest = |l: &str| l.len() == DIGEST_DIGITS && l.bytes().all(|b| b.is_ascii_hexdigit());
        let known =
            whole.lines().all(is_digest) && cut.bytes().all(|b| b.is_ascii_hexdigit()) && cut.len() <= DIGEST_DIGITS;
        if !known {
            return Err(Error::new(ErrorKind::InvalidInput, "this is no journal of warmed prompts")
                .at(path)
                .advice("name a new file with --journal"));
        }
        let done = whole.lines().map(str::to_owned).collect();
        if !writes {
            return Ok(Self { done, file: None });
        }
        let mut file = OpenOptions::new().create(true).append(true).open(path).map_err(failed)?;
        if !cut.is_empty() {
            // Otherwise the next digest would be appended to the cut one.
            file.set_len((text.len() - cut.len()) as u64).and_then(|()| file.flush()).map_err(failed)?;
        }
        Ok(Self { done, file: Some((path.to_owned(), Mutex::new(file))) })
    }

    /// Whether an earlier run has done the prompt of this digest.
    pub(crate) fn contains(&self, digest: &str) -> bool {
        self.done.contains(digest)
    }

    /// Notes that a prompt is done.
    pub(crate) fn add(&self, digest: &str) -> Result<()> {
        let Some((path, file)) = &self.file else { return Ok(()) };
        let mut file = file.lock();
        file.write_all(format!("{digest}\n").as_bytes())
            .and_then(|()| file.sync_data())
            .map_err(|e| Error::io("cannot write the journal", e).at(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_added_is_known_to_the_next_run_even_after_a_cut_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        let (a, b) = ("a".repeat(32), "b".repeat(32));
        Journal::open(&path, true).unwrap().add(&a).unwrap();
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(&b.as_bytes()[..20]).unwrap();
        let journal = Journal::open(&path, true).unwrap();
        assert!(journal.contains(&a) && !journal.contains(&b));
        journal.add(&b).unwrap();
        let journal = Journal::open(&path, true).unwrap();
        assert!(journal.contains(&a) && journal.contains(&b));
    }

    #[test]
    fn a_file_of_something_else_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notes");
        std::fs::write(&path, "dear diary\n").unwrap();
        assert!(Journal::open(&path, true).unwrap_err().to_string().contains("no journal"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "dear diary\n");
    }
}
