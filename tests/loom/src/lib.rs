//! The index room, compiled once more with loom's atomics in the place of the standard library's,
//! so that loom goes through the interleavings of its threads and through what the memory model
//! lets their loads see.
//!
//! It is the very code of `src/index`: what differs is `sync` (atomics, locks, waiting) and
//! `memory` (words on the heap, since loom's atomics cannot lie in mapped memory), and the models
//! that take the place of its tests. See docs/reliability.md.

// By their paths and not from the library, which would be built anew after every change of the
// room.
#[path = "../../../src/error.rs"]
pub mod error;
#[path = "../../../src/index/mod.rs"]
pub mod index;
#[path = "../../../src/key/mod.rs"]
pub mod key;
