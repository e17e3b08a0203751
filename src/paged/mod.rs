//! Where the tokens of a chunk lie in a server's paged KV cache: layouts and slot mappings, as
//! arithmetic.
//!
//! [`PagedLayout`] says at which byte of which memory a (layer, plane, block, token, head) starts;
//! a plan of a chunk says which tokens of a chunk go to which slots of the server. Both are checked
//! when they are built: every byte a layout can reach lies in its memory and no two elements of a
//! plane overlap, every slot of a plan lies in a block that exists. Who moves bytes may then rely
//! on that without checking again.
//!
//! This room touches no memory and knows no device, file or key.

mod layout;
mod plan;

pub use layout::{KvLayout, KvShape, LayerView, Packing, PagedLayout, PlaneView};
internals!(use plan::{BlockUse, ChunkPlan, TokenRun});
