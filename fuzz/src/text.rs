//! Files and messages that people or other programs write.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;

use forebay::config::Loader;
use forebay::connector::{StepMeta, WorkerMeta};
use rustix::fs::{MemfdFlags, memfd_create};

/// Calls `then` with the path of a file that holds `input`.
fn with_file(input: &[u8], then: impl FnOnce(PathBuf)) {
    let Ok(memory) = memfd_create("forebay-fuzz", MemfdFlags::CLOEXEC) else { return };
    let mut file = File::from(memory);
    if file.write_all(input).is_ok() {
        then(PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())));
    }
}

pub(crate) fn config(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    for name in ["forebay.yaml", "forebay.json"] {
        let text = text.to_owned();
        let loaded = Loader::bare().files(move |_| Ok(text.clone())).file(name).load();
        match loaded {
            Ok((settings, warnings)) => {
                assert!(settings.chunk_size > 0, "a chunk of no tokens was taken");
                warnings.iter().for_each(|w| assert!(!w.to_string().is_empty()));
            }
            Err(e) => assert!(!e.to_string().is_empty()),
        }
    }
    // One line each: variables of the environment.
    let lines = text.lines().filter_map(|line| line.split_once('='));
    let _ = Loader::bare().env(lines.map(|(k, v)| (format!("FOREBAY_{k}"), v.to_owned()))).load();
}

pub(crate) fn safetensors_import(input: &[u8]) {
    // Most inputs would have a length that does not fit; the second time it does.
    let header = input.split(|b| *b == 0).next().unwrap_or_default();
    let mut fitting = (header.len() as u64).to_le_bytes().to_vec();
    fitting.extend_from_slice(header);
    fitting.resize(fitting.len() + input.len().saturating_sub(header.len()), 0);
    for bytes in [input, &fitting] {
        with_file(bytes, |path| forebay_tools::fuzzing::safetensors_import(&path));
    }
}

pub(crate) fn trace(input: &[u8]) {
    forebay_tools::fuzzing::trace(input);
}

pub(crate) fn job_file(input: &[u8]) {
    if let Ok(text) = std::str::from_utf8(input) {
        forebay_tools::fuzzing::job_file(text);
    }
}

pub(crate) fn connector_meta(input: &[u8]) {
    if let Ok(step) = StepMeta::from_bytes(input) {
        // A step in which there is nothing to do is sent as no bytes at all.
        let bytes = step.to_bytes().unwrap_or_default();
        if !bytes.is_empty() {
            assert_eq!(StepMeta::from_bytes(&bytes).ok().as_ref(), Some(&step));
        }
    }
    if let Ok(report) = WorkerMeta::from_bytes(input) {
        let again = report.to_bytes().and_then(|bytes| WorkerMeta::from_bytes(&bytes));
        assert_eq!(again.ok().as_ref(), Some(&report));
    }
}
