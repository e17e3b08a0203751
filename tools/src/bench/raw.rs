//! placeholder

use forebay::{Error, ErrorKind, Result};

use super::job::Job;
use crate::out::Context;
use crate::report::JobResult;

pub(crate) fn prepare(_: &Job, _: &Context) -> Result<()> {
    Ok(())
}
pub(crate) fn run(_: &Job, _: &Context) -> Result<JobResult> {
    Err(Error::new(ErrorKind::Unsupported, "raw"))
}
