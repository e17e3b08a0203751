//! The events of the policy for chains, and its file.

mod events;
mod file;

pub(super) use events::{
    expect, forget, is_chosen, load, note_begun, note_brought, note_dropped, note_moved, note_published, note_touches,
    note_used,
};
pub(super) use file::PolicyFile;
