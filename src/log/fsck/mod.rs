//! Looking into a cache directory without opening it: which lanes there are, what their files hold,
//! what is damaged.
//!
//! What only looks writes nothing, needs no geometry and leaves no lock held, and so works beside
//! servers and on read-only mounts. What a server has stored in the last moments may be missing
//! from the reports; reports say whether a lane was in use. [`rebuild`], [`repair`] and
//! [`remove_lost`] write, and need lanes that no process writes; [`repair_budget`] takes the lock
//! of `BUDGET`.
//!
//! * `places`: finds the lanes below a cache directory; `raw`: reads a lane's index;
//! * `look`: what running processes share, and what headers say; `deep`: checks every CRC;
//! * `repair`: drops bad slots; `lost`: lanes without data, a damaged `BUDGET`;
//! * `rebuild`: makes an index anew.

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
