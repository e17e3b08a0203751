//! The `io` room.
