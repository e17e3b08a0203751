//! What goes: keys that are removed, chunks and segments that are given up, what lies below floors; and the room that comes of it.
//!
//! All of it ends in the same way: a slot's header is made unreadable ([`Lane::erase`](super::lane::Lane::erase)), and its entry
//! leaves the table.

mod evict;
mod floors;
mod maintenance;
mod moves;
mod orphans;
mod pressure;
mod quota;
mod remove;
mod segment;
mod space;

pub(super) use maintenance::{Maintenance, at_rest, helpers, run};
pub(super) use orphans::delete;
