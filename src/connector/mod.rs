//! The connector: what a serving engine's scheduler and workers tell Forebay, and what Forebay
//! answers, as two state machines.
//!
//! A [`Scheduler`] lives where requests are scheduled: it says how much of a prompt can be loaded,
//! and turns each step into a [`StepMeta`]. A [`Worker`] lives where the KV is: it starts the loads
//! and stores of a `StepMeta` and says when they are over, in a [`WorkerMeta`]. The serving engine
//! carries both as opaque bytes, so that the two may live in different processes.
//!
//! Invariants:
//! - A load leaves the prompt's last token to be computed, covers whole blocks of every KV cache
//!   group, and never writes what the server has computed. After a failed load a request is never
//!   offered one again.
//! - Only tokens that are computed at the end of the step, and whose ids are final, are stored;
//!   nothing of a step whose load failed is.
//! - Blocks of a finished request come free when the gathers of its stores are over or given up,
//!   not before.
//! - An answer of [`Scheduler::get_num_new_matched_tokens`] holds nothing but leases that expire:
//!   it may be dropped.
//!
//! The files:
//! - `scheduler/`, `worker/`: the two state machines.
//! - `meta`, `worker_identity`: the messages between them.
//! - `options`: what both are made with.
//! - `lookup`: how much of a prompt is stored, in open caches.
//! - `ranks`: the same for caches that the workers have: looked up or asked.
//! - `fetch_rate`: how fast fetches from the remote tier come.
//! - `busy`: time in which at least one of several transfers ran.
//!
//! This module knows no Python and no server's types, and does no I/O of its own; it must not block
//! a step on a drive. The exception is [`RanksLookup`]: it opens a worker's cache when that worker
//! first says who it is.

mod busy;
mod counts;
mod fetch_rate;
mod lookup;
mod meta;
mod options;
mod ranks;
mod scheduler;
mod worker;
mod worker_identity;

pub use counts::Counter;
pub use lookup::{PendingQuestion, PrefixLookup};
pub use meta::{BlockSpan, LoadOrder, PrefetchOrder, PromptPart, Question, SaveOrder, StepMeta, WorkerMeta};
pub use options::{ConnectorOptions, Role, windowed_chunk_tokens};
pub use ranks::RanksLookup;
pub use scheduler::{
    AddRequest, CachedRequest, KvEvents, Matched, NewRequest, RequestChunk, Scheduler, SchedulerStats, StepInput,
    StepOutput, TokensOf,
};
pub use worker::{Finished, Worker, WorkerStats};
pub use worker_identity::WorkerIdentity;

#[cfg(test)]
mod tests;
