//! The `log` room.
