//! Lookup, leases, and the check of headers.

mod affinity;
mod chunk;
mod locate;

pub use chunk::{Bad, Chunk};
