//! A slot from allocation to publication.

mod admit;
mod begin;
mod publish;
mod put;
mod reservation;
mod slot_writer;

pub use admit::StoreCandidate;
pub use put::{Put, PutOutcome, Refusal};
pub use reservation::PutDone;
pub use slot_writer::SlotWriter;
