//! Fuzz targets: functions that take any bytes, use them as Forebay uses what it reads from
//! outside, and check what must hold.
//!
//! `cargo fuzz` drives them with libFuzzer (`make fuzz`); `tests/corpus.rs` runs them over the
//! committed corpus and over inputs made from it by a seed. Invariants: a target is a function of
//! its input alone, and panics only where Forebay is wrong.

mod codec;
mod format;
mod policy;
mod shared;
mod text;

/// A target: it panics where something does not hold.
pub type Target = fn(&[u8]);

/// All targets by name; the corpus of each lies in `corpus/` under this name.
pub const TARGETS: &[(&str, Target)] = &[
    ("superblock", format::superblock),
    ("journal", format::journal),
    ("sealed_table", format::sealed_table),
    ("slot_header", format::slot_header),
    ("coded_extent", codec::coded_extent),
    ("policy_state", policy::policy_state),
    ("shared_table", shared::shared_table),
    ("shared_lane", shared::shared_lane),
    ("config", text::config),
    ("safetensors_import", text::safetensors_import),
    ("trace", text::trace),
    ("job_file", text::job_file),
    ("connector_meta", text::connector_meta),
];

/// Runs the target of this name.
///
/// # Panics
/// Where there is no such target, and where it finds something.
pub fn run(name: &str, input: &[u8]) {
    let target = TARGETS.iter().find(|(n, _)| *n == name).map(|(_, target)| target);
    assert!(target.is_some(), "there is no target {name}");
    target.into_iter().for_each(|target| target(input));
}
