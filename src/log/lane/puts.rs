//! Puts of a held lane that have begun and not ended, and those that the journal thread must help
//! on. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::io::Request;

/// A put whose record found the table full.
pub(in crate::log) trait Unpublished: Send {
    /// How long ago its caller committed it.
    fn age(&self) -> Duration;

    /// Tries again, as the table has grown.
    fn publish(self: Box<Self>);

    /// Ends the put, as there is no room for it.
    fn shed(self: Box<Self>, why: Error);
}

/// Puts under way.
#[derive(Default)]
pub(in crate::log) struct Puts {
    /// Sequences of slots that may still be written to, with the number of places held for each.
    begun: BTreeMap<u64, u32>,
    /// Commits begun and not ended, by ticket.
    commits: BTreeSet<u64>,
    next_ticket: u64,
    /// Writes that the queue did not take yet, and since when.
    deferred: Vec<(Instant, Request)>,
    unpublished: Vec<Box<dyn Unpublished>>,
}

impl Puts {
    pub(in crate::log) fn begin(&mut self, sequence: u64) {
        *self.begun.entry(sequence).or_default() += 1;
    }

    pub(in crate::log) fn end(&mut self, sequence: u64) {
        if let Some(count) = self.begun.get_mut(&sequence) {
            *count -= 1;
            if *count == 0 {
                self.begun.remove(&sequence);
            }
        }
    }

    /// The least sequence of a slot that may still be written to.
    pub(in crate::log) fn oldest(&self) -> Option<u64> {
        self.begun.first_key_value().map(|(sequence, _)| *sequence)
    }

    /// A put is committed: from now on a flush waits for it.
    pub(in crate::log) fn commit(&mut self) -> u64 {
        self.next_ticket += 1;
        self.commits.insert(self.next_ticket);
        self.next_ticket
    }

    pub(in crate::log) fn committed(&mut self, ticket: u64) {
        self.commits.remove(&ticket);
    }

    /// The commit begun last.
    pub(in crate::log) fn last_ticket(&self) -> u64 {
        self.next_ticket
    }

    /// Whether a commit up to this one has not ended.
    pub(in crate::log) fn is_committing(&self, up_to: u64) -> bool {
        self.commits.first().is_some_and(|ticket| *ticket <= up_to)
    }

    pub(in crate::log) fn defer(&mut self, since: Instant, request: Request) {
        self.deferred.push((since, request));
    }

    pub(in crate::log) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    pub(in crate::log) fn take_deferred(&mut self) -> Vec<(Instant, Request)> {
        std::mem::take(&mut self.deferred)
    }

    pub(in crate::log) fn wait_for_growth(&mut self, put: Box<dyn Unpublished>) {
        self.unpublished.push(put);
    }

    pub(in crate::log) fn has_unpublished(&self) -> bool {
        !self.unpublished.is_empty()
    }

    pub(in crate::log) fn take_unpublished(&mut self) -> Vec<Box<dyn Unpublished>> {
        std::mem::take(&mut self.unpublished)
    }
}

impl fmt::Debug for Puts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Puts").field("begun", &self.begun.len()).field("commits", &self.commits).finish_non_exhaustive()
    }
}
