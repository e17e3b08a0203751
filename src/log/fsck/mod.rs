//! Looking into a cache directory without opening it: which lanes there are, what their files hold,
//! what is damaged.
//!
//! But for [`rebuild`] and [`repair`], which need lanes to themselves, it only reads, needs no
//! geometry and leaves no lock held, and so works beside servers and on read-only mounts. What a
//! server has stored in the last moments may be missing from the reports; reports say whether
//! a lane was in use.

mod deep;
mod look;
mod lost;
mod places;
mod raw;
mod rebuild;
mod repair;

pub use deep::{BadSlot, Deep, deep};
pub use look::{Born, LaneActivity, disk_bytes};
pub use lost::{budget_damage, remove_lost, repair_budget};
pub use places::{LaneDir, lanes};
pub use raw::{Counts, Damage, Kept, RawLane, listed, live};
pub use rebuild::{RebuildOptions, Rebuilt, rebuild, rebuild_bytes};
pub use repair::{Repaired, repair};
