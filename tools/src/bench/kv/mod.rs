//! The engine's modes of `bench`: load, store, layerload, layerstore, lookup, reopen.
//!
//! `session` opens a cache and makes prompts and paged KV, `pattern` their bytes; `whole`,
//! `layers`, `lookup` and `reopen` run the modes; `fill` writes index entries whose payload is
//! holes. Memory is laid out and made resident before a clock starts.

mod fill;
mod layers;
mod lookup;
mod pattern;
mod reopen;
mod session;
mod whole;

use std::time::{Duration, Instant};

use forebay::{Error, ErrorKind, Result};

use super::job::Job;
use super::options::Rw;
use crate::out::Context;
use crate::report::JobResult;
use crate::stop;

pub(crate) use reopen::is_child;

/// Runs one of the engine's modes.
pub(crate) fn run(job: &Job, context: &Context) -> Result<JobResult> {
    match job.rw {
        Rw::Load => whole::load(job, context),
        Rw::Store => whole::store(job, context),
        Rw::Layerload => layers::load(job, context),
        Rw::Layerstore => layers::store(job, context),
        Rw::Lookup => lookup::run(job, context),
        _ => reopen::run(job, context),
    }
}

/// Whether a job that started at `start` has run for its time, or is to end.
fn is_over(job: &Job, start: Instant) -> bool {
    stop::asked() || job.runtime.is_some_and(|limit| start.elapsed() >= limit)
}

/// The error of a job of stores whose prompts were all in the cache already.
fn nothing_new(job: &Job) -> Error {
    Error::new(
        ErrorKind::InvalidInput,
        format!("job {:?}: all of it was stored already, nothing was measured", job.name),
    )
    .at(&job.directory)
    .advice(match job.rw {
        Rw::Store => {
            "give another --directory, leave --keep out, or add --time_based --runtime N to go on with other content"
        }
        _ => "give another --directory, or leave --keep out",
    })
}

/// What to know where a job of stores met prompts that were stored.
fn passed_over(stored: u64) -> Option<String> {
    (stored > 0)
        .then(|| format!("{stored} prompts were stored already: they were passed over, and no figure counts them"))
}

/// Time in milliseconds.
fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The middle of `values`; 0 without any.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    let upper = values.get(half).copied().unwrap_or(0.0);
    if values.len().is_multiple_of(2) {
        (values.get(half.wrapping_sub(1)).copied().unwrap_or(0.0) + upper) / 2.0
    } else {
        upper
    }
}

/// The value that 99 % of `values` stay within; 0 without any.
fn p99(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get((values.len() * 99).div_ceil(100).saturating_sub(1)).copied().unwrap_or(0.0)
}
