//! `cargo fuzz run coded_extent`: see the library of this package.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| forebay_fuzz::run("coded_extent", input));
