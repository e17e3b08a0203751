//! What is found at opening: lanes made, recovered, attached to.

mod ahead;
mod enter;
mod open;
pub mod reader;
mod regions;
pub mod scan;

pub(super) use enter::Summary;
pub(super) use open::{LaneCandidate, LaneFiles, Surroundings, remove_file, try_lock, write_superblock};
