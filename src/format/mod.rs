//! The `format` room.
