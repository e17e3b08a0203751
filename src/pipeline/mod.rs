//! The `pipeline` room.
