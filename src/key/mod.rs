//! The `key` room.
