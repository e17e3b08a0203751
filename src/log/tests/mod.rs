//! Tests of the log, one behaviour each: most through its public API, some with a look at its
//! state.

mod fsck;
mod support;

mod admit;
mod basics;
mod beside;
mod damage;
mod evicted;
mod faults;
mod floors;
mod flushes;
mod handed_over;
mod holes;
mod lanes;
mod late;
mod learned;
mod leases;
mod moves;
mod once;
mod processes;
mod purge;
mod quota;
mod rebuild;
mod reclaim;
mod removed;
mod room;
mod twice;
