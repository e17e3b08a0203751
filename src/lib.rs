//! Forebay keeps the KV cache of an LLM server on local NVMe and brings it back layer by layer,
//! faster than it can be recomputed.
//!
//! The way the data takes, room by room, is in `ARCHITECTURE.md`; the bytes on disk are in
//! `docs/format.md`.

pub mod config;
pub mod connector;
pub mod device;
pub mod engine;
pub mod error;
pub mod format;
pub mod geometry;
pub mod index;
pub mod io;
pub mod key;
pub mod log;
pub mod metrics;
pub mod objects;
pub mod paged;
pub mod pipeline;

pub use error::{Error, ErrorKind, Result};

/// Compiles README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExample;
