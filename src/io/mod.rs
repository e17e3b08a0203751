//! The `io` room.

mod buffer;

pub use buffer::{Buf, IoBuf, MemRegion, Place};
