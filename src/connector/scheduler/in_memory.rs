//! Which chunks the workers have in their memory tiers, by their reports: how fast a load is
//! depends on it.
//!
//! Invariants: this only predicts times. What can be loaded is what is on the drives, wherever it
//! is read from. It is bounded: by what the workers have in memory, and by [`MOST`].

use std::collections::{BTreeMap, HashSet};

use super::super::meta::WorkerMeta;
use crate::engine::Prompt;
use crate::key::ChunkKey;

/// Chunks of one worker at most. All are forgotten of a worker that reports more.
const MOST: usize = 1 << 20;

/// Tokens of a load, by where they are read from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LoadParts {
    pub(super) memory: usize,
    pub(super) drives: usize,
}

/// Chunks in memory, of each rank that has reported any change.
#[derive(Debug, Default)]
pub(super) struct InMemory(BTreeMap<u32, HashSet<ChunkKey>>);

impl InMemory {
    /// A worker's report.
    pub(super) fn reported(&mut self, report: &WorkerMeta) {
        if report.identity.is_some() {
            // The worker may have started anew, with an empty memory.
            self.0.remove(&report.rank);
        }
        if report.memory.is_empty() {
            return;
        }
        let chunks = self.0.entry(report.rank).or_default();
        for (key, is_there) in &report.memory {
            if *is_there {
                chunks.insert(ChunkKey(*key))
            } else {
                chunks.remove(&ChunkKey(*key))
            };
        }
        if chunks.len() > MOST {
            chunks.clear();
        }
    }

    /// Where the tokens `start..stop` of a prompt come from, in order; adjacent chunks from one
    /// place make one run. A chunk counts as in memory only where every rank has it there: a load
    /// is as slow as its slowest rank.
    pub(super) fn runs(&self, prompt: &Prompt, (start, stop): (usize, usize)) -> Vec<LoadParts> {
        let chunk = prompt.chunk_tokens();
        let has = |key: &ChunkKey| !self.0.is_empty() && self.0.values().all(|chunks| chunks.contains(key));
        let mut runs: Vec<LoadParts> = Vec::new();
        for at in start / chunk..stop.div_ceil(chunk) {
            let tokens = stop.min((at + 1) * chunk).saturating_sub(start.max(at * chunk));
            let is_in_memory = prompt.keys().get(at).is_some_and(has);
            let (memory, drives) = if is_in_memory { (tokens, 0) } else { (0, tokens) };
            let next = LoadParts { memory, drives };
            match runs.last_mut() {
                Some(last) if (last.memory > 0) == (next.memory > 0) => *last += next,
                _ => runs.push(next),
            }
        }
        runs
    }

    /// The sum of [`runs`](Self::runs).
    pub(super) fn parts(&self, prompt: &Prompt, range: (usize, usize)) -> LoadParts {
        let mut parts = LoadParts::default();
        self.runs(prompt, range).into_iter().for_each(|run| parts += run);
        parts
    }
}

impl LoadParts {
    pub(super) fn tokens(&self) -> usize {
        self.memory + self.drives
    }
}

impl std::ops::AddAssign for LoadParts {
    fn add_assign(&mut self, other: Self) {
        self.memory += other.memory;
        self.drives += other.drives;
    }
}
