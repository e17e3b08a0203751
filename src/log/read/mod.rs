//! Lookup, leases, and the check of headers.
//!
//! Invariants: lookups read no chunks from a drive; a lookup promises nothing that a load would not
//! get a lease on; nothing of a chunk is used before its header has been checked against the index.
//!
//! * `locate`: lookups, leases, checks of headers, reports of bad chunks;
//! * `chunk`: what a lookup found;
//! * `affinity`: the drive on which a prompt's next chunks belong.

mod affinity;
mod chunk;
mod locate;

pub use chunk::{Bad, Chunk};
