//! Sets the cfg by which the index room takes its atomics and its memory from here.

fn main() {
    println!("cargo::rustc-cfg=forebay_loom");
    println!("cargo::rerun-if-changed=build.rs");
}
