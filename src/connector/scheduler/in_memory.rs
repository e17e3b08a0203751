//! What the workers have in their memory, as they say: how fast a load is depends on it.
//!
//! Invariants: it only predicts. What is loaded is what a drive has, wherever it comes from. What is
//! kept is bounded: about what the workers have in memory.

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

    /// Where the tokens `start..stop` of a prompt come from. Every rank loads its part of a chunk: it
    /// is as slow as the slowest.
    pub(super) fn parts(&self, prompt: &Prompt, (start, stop): (usize, usize)) -> LoadParts {
        let (chunk, all) = (prompt.chunk_tokens().max(1), stop.saturating_sub(start));
        let has = |key: &ChunkKey| !self.0.is_empty() && self.0.values().all(|chunks| chunks.contains(key));
        let of_chunk = |at: usize| stop.min((at + 1) * chunk) - start.max(at * chunk);
        let chunks = start / chunk..stop.div_ceil(chunk);
        let memory = chunks.filter(|at| prompt.keys().get(*at).is_some_and(has)).map(of_chunk).sum::<usize>();
        LoadParts { memory, drives: all.saturating_sub(memory) }
    }
}

impl std::ops::AddAssign for LoadParts {
    fn add_assign(&mut self, other: Self) {
        self.memory += other.memory;
        self.drives += other.drives;
    }
}
