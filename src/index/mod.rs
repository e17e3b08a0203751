//! The `index` room.
