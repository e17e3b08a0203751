//! Tests of the log through its public API, one behaviour each.

mod fsck;
mod support;

mod basics;
mod lanes;
mod reclaim;
