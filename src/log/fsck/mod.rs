//! Looking into a cache directory without opening it: which lanes there are, what their files hold, what is damaged; and
//! making a lane's index anew from its data.
//!
//! Everything but `rebuild` only reads, needs no geometry and no lock, and so works beside servers and on read-only mounts.
//! What a server has stored in the last moments may then be missing from what is told here, and what it has just reused may
//! look damaged; reports say whether a lane was in use.

mod deep;
mod places;
mod raw;

pub use deep::{BadSlot, Deep, deep};
pub use places::{LaneFiles, lanes};
pub use raw::{Counts, Damage, Kept, RawLane, live};
