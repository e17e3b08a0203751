//! What a connector says of itself to the server's page of metrics.

use std::borrow::Cow;

use crate::engine::{EngineHealth, RemoteStats};

/// A count that only grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// Its name.
    pub name: &'static str,
    /// Its label `cause`, where it has one.
    pub cause: Option<&'static str>,
    /// What was counted.
    pub value: u64,
}

impl Counter {
    pub(super) fn all<const N: usize>(of: [(&'static str, u64); N]) -> impl Iterator<Item = Self> {
        of.into_iter().map(|(name, value)| Self { name, cause: None, value })
    }

    pub(super) fn by_cause(
        name: &'static str,
        causes: impl IntoIterator<Item = (&'static str, u64)>,
    ) -> impl Iterator<Item = Self> {
        causes.into_iter().map(move |(cause, value)| Self { name, cause: Some(cause), value })
    }

    /// Its name in reports: `name`, or `name:cause`.
    #[must_use]
    pub fn key(&self) -> Cow<'static, str> {
        self.cause.map_or(Cow::Borrowed(self.name), |cause| Cow::Owned(format!("{}:{cause}", self.name)))
    }
}

/// As [`WorkerStats::GAUGES`](super::WorkerStats::GAUGES).
pub(super) const GAUGES: [&str; 4] = ["closed", "drives_down", "hung_requests", "remote_failing"];

/// The values of [`GAUGES`].
pub(super) fn gauges(health: &EngineHealth) -> [u64; GAUGES.len()] {
    let flag = |is: bool| u64::from(is);
    [flag(!health.up), health.drives_down as u64, health.hung_requests as u64, flag(health.remote.failing)]
}

/// Adds what another engine has fetched.
pub(super) fn add_fetched(sum: &mut RemoteStats, more: &RemoteStats) {
    sum.failing |= more.failing;
    sum.fetched += more.fetched;
    sum.not_fetched.iter_mut().zip(&more.not_fetched).for_each(|(sum, more)| sum.1 += more.1);
}
