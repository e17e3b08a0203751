//! Where the tokens of a chunk lie in a server's paged KV cache: layouts and slot mappings, as
//! arithmetic.
//!
//! Both are checked when they are built: no two elements of a plane overlap, and every slot of a
//! plan lies in a block that exists. That memories are as long as a layout reaches is checked by
//! `device::PagedKv`, which holds them. Copies rely on these checks.
//!
//! The files:
//! - `layout`: a [`PagedLayout`] says at which byte of which memory a (layer, plane, block, token,
//!   head) starts.
//! - `plan`: a `ChunkPlan` says which tokens of a chunk go to which slots of the server.
//!
//! This module touches no memory and knows no device, file or key.

mod layout;
mod plan;

pub use layout::{KvLayout, KvShape, LayerView, Packing, PagedLayout, PlaneView};
internals!(use plan::{BlockUse, ChunkPlan, ChunkPlans, TokenRun});
