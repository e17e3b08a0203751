//! Opening lanes: making a new one, recovering one from its index.kv, attaching to one that another
//! process writes.
//!
//! Invariant: a clean stop and a crash are recovered by the same code. Damage is counted, and is
//! never an error but where no superblock is intact.
//!
//! * `open`: opens the files of a lane, recovers or attaches to it, and settles what a crash left;
//! * `reader`, `regions`, `ahead`: read index.kv: the ring, the sealed table, several pieces at
//!   once;
//! * `enter`: enters records into the table and the lane's state;
//! * `scan`: reads slot headers from data.kv, where index.kv is damaged or lost.

mod ahead;
mod enter;
mod open;
pub(super) mod reader;
mod regions;
pub mod scan;

pub(super) use enter::Summary;
pub(super) use open::{LaneCandidate, LaneFiles, Surroundings, remove_file, try_lock, write_superblock};
