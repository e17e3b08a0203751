//! What the workers have in their memory, as they say: how fast a load is depends on it.
//!
//! Invariants: it only predicts. What is loaded is what a drive has, wherever it comes from. What
//! is kept is bounded: about what the workers have in memory.

use std::collections::{BTreeMap, HashSet};

use super::super::meta::WorkerMeta;
use crate::engine::Prompt;
use crate::key::ChunkKey;

/// Chunks of one worker at most; one that seems to have more is not believed.
const MOST: usize = 1 << 20;

/// Tokens of a load, by where they come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LoadParts {
    pub(super) memory: usize,
    pub(super) drives: usize,
}

/// Chunks in memory, by rank: of each that has said something.
#[derive(Debug, Default)]
pub(super) struct InMemory(BTreeMap<u32, HashSet<ChunkKey>>);

impl InMemory {
    /// A worker's report.
    pub(super) fn reported(&mut self, report: &WorkerMeta) {
        if report.identity.is_some() {
            // It may have started anew, with an empty memory.
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

    /// Where the tokens `start..stop` of a prompt come from, in order: those of chunks after each
    /// other in one place together. Every rank loads its part of a chunk: it is as slow as the
    /// slowest.
    pub(super) fn runs(&self, prompt: &Prompt, (start, stop): (usize, usize)) -> Vec<LoadParts> {
        let chunk = prompt.chunk_tokens().max(1);
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

    /// As [`runs`](Self::runs), all of them together.
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
