//! The engine's modes of `bench`: load, store, layerload, layerstore, lookup, reopen.

use forebay::{Error, ErrorKind, Result};

use super::job::Job;
use crate::out::Context;
use crate::report::JobResult;

/// Runs one of the engine's modes.
pub(crate) fn run(job: &Job, _: &Context) -> Result<JobResult> {
    Err(Error::new(ErrorKind::Unsupported, format!("--rw {} is not in this build", job.rw.word()))
        .advice("use a raw mode: read, write, randread, randwrite, rw, randrw"))
}
