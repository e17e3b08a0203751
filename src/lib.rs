//! Forebay keeps the KV cache of an LLM server on local NVMe and loads it, layer by layer, when a
//! prompt's prefix returns.
//!
//! [`engine::Engine`] stores and loads the chunks of prompts, [`objects::ObjectStore`] stores bytes
//! under any key, and [`connector`] is what a serving engine's scheduler and workers call. The rest
//! is what these take: [`config::Settings`], a [`geometry::Geometry`], [`device::PagedKv`] memory
//! and [`key::Extra`].
//!
//! A prompt of two chunks is stored, found and loaded into other blocks:
//!
//! ```
//! use std::time::{Duration, Instant};
//!
//! use forebay::config::{Capacity, Settings};
//! use forebay::device::{KvMemory, PagedKv};
//! use forebay::engine::{Engine, LoadRequest, StoreRequest};
//! use forebay::geometry::{DType, Geometry, LayerKind, LayerSpec};
//! use forebay::key::Extra;
//! use forebay::paged::{KvLayout, KvShape, Packing, PagedLayout};
//!
//! // A small model: 4 layers of 2 KV heads of 64 values, bfloat16, in chunks of 256 tokens.
//! let layers = vec![LayerSpec::kv(LayerKind::Full, 2, 64); 4];
//! let geometry = Geometry::new("my-model", DType::named("bf16")?, layers, 256)?;
//!
//! // Paged KV as a server has it: 64 blocks of 16 tokens in each layer.
//! let shape = KvShape { layout: KvLayout::Nhd, packing: Packing::Outer, block_tokens: 16, num_blocks: 64 };
//! let (kv, memories) = PagedKv::alloc_zeroed(PagedLayout::per_layer(&geometry.layers, shape)?)?;
//! memories[0].write(0, &[7; 4096])?;
//!
//! # let dir = tempfile::tempdir().unwrap();
//! # let cache_dir = dir.path();
//! let mut settings = Settings::at(cache_dir);
//! settings.capacity = Capacity::Bytes(256 << 20);
//! # settings.allow_any_filesystem = true;
//! # settings.min_free = forebay::config::MinFree::Bytes(0);
//! let engine = Engine::open_host(&settings, geometry)?;
//!
//! // The prompt's 512 tokens lie in the first 32 blocks, and are stored.
//! let tokens: Vec<u32> = (0..512).collect();
//! let prompt = engine.prompt(&tokens, &Extra::default());
//! let slots: Vec<i64> = (0..512).collect();
//! let store = engine.store(StoreRequest::new(&prompt, &kv, slots))?;
//! store.all_layers();
//! assert_eq!(store.wait().stored, 2);
//!
//! // Later they are found, and loaded into the last 32 blocks, one layer after the other.
//! let hit = engine.lookup(&prompt, 512)?;
//! assert_eq!(hit.matched_tokens, 512);
//! let slots: Vec<i64> = (512..1024).collect();
//! let load = engine.load(LoadRequest::new(&prompt, &kv, slots))?;
//! for layer in 0..load.layers() {
//!     assert_eq!(load.wait_layer(layer)?.tokens, 512);
//! }
//! engine.close(Instant::now() + Duration::from_secs(10))?;
//! # Ok::<(), forebay::Error>(())
//! ```
//!
//! CUDA and cuFile are found when the program runs and need no feature: without a GPU the same
//! calls work on host memory, and `cargo build` needs no toolkit. The only feature, `internals`,
//! opens what lies below this API to Forebay's own tools and tests; it promises nothing.
//!
//! The way the data takes, module by module, is in `ARCHITECTURE.md`; the bytes on disk are in
//! `docs/format.md`.

#![cfg_attr(
    not(feature = "internals"),
    allow(unreachable_pub, dead_code, unused_imports, reason = "what only the tools and tests call")
)]

/// Declares a module, or re-exports names, for the crate alone; with the feature `internals` for
/// all.
macro_rules! internals {
    (mod $name:ident) => {
        #[cfg(feature = "internals")]
        pub mod $name;
        #[cfg(not(feature = "internals"))]
        pub(crate) mod $name;
    };
    (use $($names:tt)*) => {
        #[cfg(feature = "internals")]
        pub use $($names)*;
        #[cfg(not(feature = "internals"))]
        pub(crate) use $($names)*;
    };
}

pub mod config;
pub mod connector;
pub mod device;
pub mod engine;
pub mod error;
pub mod geometry;
pub mod key;
pub mod objects;
pub mod paged;
mod process;

internals!(mod format);
internals!(mod index);
internals!(mod io);
internals!(mod log);
internals!(mod metrics);
internals!(mod pipeline);
internals!(mod remote);
internals!(mod tier);

pub use error::{Error, ErrorKind, Result};

/// Compiles README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExample;
