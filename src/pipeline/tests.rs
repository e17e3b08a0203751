//! The pipeline over a disk in memory whose every transfer the test can hold, fail, damage or let
//! hang.

mod disk;
mod loads;
mod memory;
mod ordered;
mod prefetches;
mod stores;
mod wipes;
mod world;
