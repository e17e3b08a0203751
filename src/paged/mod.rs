//! The `paged` room.
