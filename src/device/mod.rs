//! The `device` room.
