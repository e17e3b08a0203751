//! The program's parsers of files from outside, for the fuzz targets in `fuzz/` only.

use std::path::Path;

use crate::{bench, replay, warm};

/// Reads the bytes of a request trace.
pub fn trace(bytes: &[u8]) {
    if let Ok(requests) = replay::parse_trace(bytes, Path::new("trace.jsonl")) {
        for request in &requests {
            let tokens: u64 = request.blocks().map(|(_, tokens)| tokens).sum();
            assert_eq!(tokens, request.input_length, "a request's blocks are not its tokens");
        }
    }
}

/// Reads the text of a job file.
pub fn job_file(text: &str) {
    let _ = bench::jobfile::parse(text, &[]);
}

/// Reads a file of a KV dump as `warm import` does, except for the tensors' data.
pub fn safetensors_import(path: &Path) {
    for shape in [
        warm::KvShape::Auto,
        warm::KvShape::KvFirst,
        warm::KvShape::KvSecond,
        warm::KvShape::KvLast,
        warm::KvShape::Mla,
    ] {
        if let Ok(dump) = warm::DumpInfo::open(path, shape) {
            assert_eq!(dump.bytes(), dump.range_bytes(dump.tokens.len()));
        }
    }
}
