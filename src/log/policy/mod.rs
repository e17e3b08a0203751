//! The events of the policy for chains, and its file. The policy itself is in `index/policy/`.
//!
//! Invariant: nothing depends on the file; without it the policy starts anew.
//!
//! * `events`: uses and puts, in the order of the calls; loading the policy;
//! * `file`: what the policy has learned, kept over a restart.

mod events;
mod file;

pub(super) use events::{
    expect, forget, is_chosen, load, note_begun, note_brought, note_dropped, note_moved, note_published, note_touches,
    note_used,
};
pub(super) use file::PolicyFile;
