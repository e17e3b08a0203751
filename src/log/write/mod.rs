//! A slot from allocation to publication.

mod admit;
mod begin;
mod publish;
mod put;
mod slot_writer;

pub use admit::Candidate;
pub use put::{Put, PutDone, PutOutcome, Refusal};
pub use slot_writer::SlotWriter;
