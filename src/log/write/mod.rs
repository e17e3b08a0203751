//! Puts: a slot from allocation to publication.
//!
//! Invariants: a key is put once, among all lanes that this process sees; a put is published only
//! after every byte of its slot was written; no call waits but `begin_put_within`, for reclaim.
//!
//! * `admit`: which chunks of a prompt are stored; reports to the eviction policy;
//! * `begin`: begins a put: drive, quota, place;
//! * `reservation`: what a put has taken;
//! * `put`, `publish`: the header's write, and the entry in the table after it;
//! * `slot_writer`: a slot that several threads write in pieces.

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
