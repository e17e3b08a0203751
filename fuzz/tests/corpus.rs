//! Every target over its committed corpus, and over inputs made from it by a seed: seconds of what
//! `make fuzz` does for hours. `FOREBAY_FUZZ_RUNS` and `FOREBAY_FUZZ_SEED` choose how many and
//! which, `FOREBAY_FUZZ_TARGET` one target.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use forebay_fuzz::{TARGETS, Target};

/// Inputs per target that are made where nothing else is asked for.
const RUNS: u64 = 3_000;
/// Longest input that is made, in bytes.
const MAX_BYTES: usize = 3 * 4096;

fn asked(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(otherwise)
}

/// A stream of numbers that a seed fixes (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

fn corpus(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let files = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("no corpus in {}: {e}", folder.display()));
    let mut inputs: Vec<_> =
        files.map(|f| f.unwrap().path()).map(|path| (path.clone(), std::fs::read(path).unwrap())).collect();
    inputs.sort();
    inputs
}

/// Whether libFuzzer found it, which names what it keeps by its digest; the others are whole and
/// come from `examples/seeds.rs`.
fn is_found(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.len() == 40 && name.bytes().all(|b| b.is_ascii_hexdigit())
}

/// One input from another one: a few small changes, as libFuzzer makes them.
fn changed(from: &[u8], other: &[u8], numbers: &mut Numbers) -> Vec<u8> {
    let mut input = from.to_vec();
    for _ in 0..=numbers.below(6) {
        let at = numbers.below(input.len() + 1);
        match numbers.below(6) {
            0 => input.iter_mut().skip(at).take(1).for_each(|b| *b ^= 1 << numbers.below(8)),
            1 => input.insert(at, numbers.next() as u8),
            2 => drop(input.drain(at..(at + numbers.below(16)).min(input.len()))),
            3 => {
                let value = [0, 1, 0x7F, 0xFF, u64::from(u32::MAX), u64::MAX, 1 << 31, 1 << 63][numbers.below(8)];
                let bytes = value.to_le_bytes();
                let wide = [1, 2, 4, 8][numbers.below(4)];
                input.iter_mut().skip(at).zip(&bytes[..wide]).for_each(|(to, from)| *to = *from);
            }
            4 => {
                let start = numbers.below(other.len() + 1);
                let stop = (start + numbers.below(64)).min(other.len());
                input.splice(at..at, other[start..stop].iter().copied());
            }
            _ => {
                let copied = input.clone();
                let start = numbers.below(copied.len() + 1);
                let stop = (start + numbers.below(32)).min(copied.len());
                input.splice(at..at, copied[start..stop].iter().copied());
            }
        }
    }
    input.truncate(MAX_BYTES);
    input
}

fn tried(name: &str, target: Target, input: &[u8], which: &str) {
    if catch_unwind(AssertUnwindSafe(|| target(input))).is_err() {
        let saved = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{name}"));
        std::fs::write(&saved, input).unwrap();
        panic!("{name} fails with {which}; the input is saved: `cargo fuzz run {name} {}`", saved.display());
    }
}

#[test]
fn targets_hold_over_their_corpus_and_what_is_made_from_it() {
    let (runs, seed) = (asked("FOREBAY_FUZZ_RUNS", RUNS), asked("FOREBAY_FUZZ_SEED", 1));
    let only = std::env::var("FOREBAY_FUZZ_TARGET").ok();
    for (name, target) in TARGETS.iter().filter(|(name, _)| only.as_deref().is_none_or(|only| only == *name)) {
        let inputs = corpus(name);
        assert!(!inputs.is_empty(), "the corpus of {name} is empty");
        for (path, input) in &inputs {
            tried(name, *target, input, &path.display().to_string());
        }
        let mut numbers = Numbers(seed);
        let whole: Vec<_> = inputs.iter().filter(|(path, _)| !is_found(path)).collect();
        assert!(!whole.is_empty(), "the corpus of {name} has nothing that is whole");
        for run in 0..runs {
            let any = |numbers: &mut Numbers| &inputs[numbers.below(inputs.len())].1;
            // Most of what was found is damaged already, and a change of it shows less than one of
            // what is whole.
            let from = match numbers.below(2) {
                0 => &whole[numbers.below(whole.len())].1,
                _ => any(&mut numbers),
            };
            let other = any(&mut numbers);
            let input = changed(from, other, &mut numbers);
            tried(name, *target, &input, &format!("run {run} of FOREBAY_FUZZ_SEED={seed}"));
        }
        println!("{name}: {} files, {runs} inputs made of them with seed {seed}", inputs.len());
    }
}
