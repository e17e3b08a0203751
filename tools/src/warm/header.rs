//! Headers of safetensors files, which are untrusted input.
//!
//! The crate `safetensors` parses and checks the JSON; around it this module bounds what is read,
//! compares the header with the file's real length, and keeps only what a reader of byte ranges
//! needs. No tensor data is touched here.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use forebay::{Error, ErrorKind, Result};
use safetensors::{Dtype, tensor::Metadata};

/// Largest header that is read: a dump of thousands of layers needs less than one MiB.
const MAX_HEADER_BYTES: u64 = 16 << 20;
/// Bytes of the length before the header.
const LENGTH_BYTES: u64 = 8;

/// A tensor's place in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    /// Element type.
    pub(crate) dtype: Dtype,
    /// Dimensions.
    pub(crate) shape: Vec<usize>,
    /// First byte in the file.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) bytes: usize,
}

impl Tensor {
    /// Whole bytes of one element; `None` for types smaller than a byte.
    pub(crate) fn element_bytes(&self) -> Option<usize> {
        let bits = self.dtype.bitsize();
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

/// A safetensors file whose header has been checked against its length.
#[derive(Clone, Debug)]
pub(crate) struct TensorFile {
    /// Where it is.
    pub(crate) path: PathBuf,
    /// Its tensors by name.
    pub(crate) tensors: BTreeMap<String, Tensor>,
    /// Its `__metadata__`.
    pub(crate) metadata: BTreeMap<String, String>,
}

/// Refuses what is no regular file within a folder of dumps: a link leads to what may be somebody
/// else's, and opening a FIFO waits for its writer.
///
/// # Errors
/// `InvalidInput`; what the system says.
pub(crate) fn check_regular(path: &Path) -> Result<()> {
    let meta = path.symlink_metadata().map_err(|e| Error::io("cannot look at the dump", e).at(path))?;
    if meta.is_file() { Ok(()) } else { Err(Error::new(ErrorKind::InvalidInput, "not a regular file").at(path)) }
}

/// Reads and checks the header of `path`.
///
/// # Errors
/// `InvalidInput` saying what is wrong with the file, and what opening and reading it reports.
pub(crate) fn read(path: &Path) -> Result<TensorFile> {
    let bad = |why: String| Error::new(ErrorKind::InvalidInput, why).at(path);
    let mut file = File::open(path).map_err(|e| Error::io("cannot open the dump", e).at(path))?;
    let meta = file.metadata().map_err(|e| Error::io("cannot look at the dump", e).at(path))?;
    if !meta.is_file() {
        return Err(bad("not a regular file".to_owned()));
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut length).map_err(|_| bad("no safetensors file: shorter than 8 bytes".to_owned()))?;
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > MAX_HEADER_BYTES {
        return Err(bad(format!("header of {header_bytes} bytes is larger than the {MAX_HEADER_BYTES} that are read")));
    }
    let data_start = LENGTH_BYTES + header_bytes;
    if data_start > meta.len() {
        return Err(bad(format!("truncated: the header ends at byte {data_start}, the file at {}", meta.len())));
    }
    let mut header = vec![0; header_bytes as usize];
    file.read_exact(&mut header).map_err(|e| Error::io("cannot read the header", e).at(path))?;
    let parsed: Metadata = serde_json::from_slice(&header).map_err(|e| bad(format!("bad safetensors header: {e}")))?;
    let end = data_start.saturating_add(parsed.data_len() as u64);
    if end != meta.len() {
        let what = if end > meta.len() { "truncated" } else { "trailing bytes" };
        return Err(bad(format!("{what}: the header's tensors end at byte {end}, the file at {}", meta.len())));
    }
    let tensors = parsed
        .tensors()
        .into_iter()
        .map(|(name, info)| {
            let (start, end) = info.data_offsets;
            let tensor = Tensor {
                dtype: info.dtype,
                shape: info.shape.clone(),
                offset: data_start + start as u64,
                bytes: end - start,
            };
            (name, tensor)
        })
        .collect();
    let metadata = parsed.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
    Ok(TensorFile { path: path.to_path_buf(), tensors, metadata })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(bytes: &[u8]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.safetensors");
        std::fs::write(&path, bytes).unwrap();
        match read(&path) {
            Ok(f) => panic!("{f:?} was accepted"),
            Err(e) => e.to_string(),
        }
    }

    fn with_header(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said() {
        let good = r#"{"a":{"dtype":"F16","shape":[4],"data_offsets":[0,8]}}"#;
        let cases: [(Vec<u8>, &str); 8] = [
            (vec![1, 2, 3], "shorter than 8 bytes"),
            (u64::MAX.to_le_bytes().to_vec(), "is larger than"),
            (100u64.to_le_bytes().to_vec(), "truncated: the header ends at byte 108"),
            (with_header("{not json", 0), "bad safetensors header"),
            (with_header(good, 7), "truncated: the header's tensors end"),
            (with_header(good, 9), "trailing bytes"),
            (with_header(r#"{"a":{"dtype":"F16","shape":[5],"data_offsets":[0,8]}}"#, 8), "invalid shape"),
            (
                with_header(
                    &format!(r#"{{"a":{{"dtype":"F16","shape":[{0},{0}],"data_offsets":[0,8]}}}}"#, usize::MAX),
                    8,
                ),
                "overflow",
            ),
        ];
        for (bytes, want) in cases {
            let got = message(&bytes);
            assert!(got.contains(want), "{got:?} lacks {want:?}");
        }
    }
}
