//! Token ids of a dump: a tensor of integers, or a JSON sidecar.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use forebay::{Error, ErrorKind, Result};
use safetensors::Dtype;
use serde::Deserialize;

use super::header::{self, Tensor, TensorFile};

/// Longest prompt that is read.
pub(crate) const MAX_TOKENS: usize = 1 << 24;
/// Largest JSON sidecar: every token with a dozen characters.
const MAX_JSON_BYTES: u64 = MAX_TOKENS as u64 * 12;
/// Name of the tensor with the token ids.
pub(crate) const TENSOR: &str = "token_ids";

/// The token ids in the tensor `token_ids` of `file`.
///
/// # Errors
/// `InvalidInput` where it is missing, of the wrong type or shape, or holds an id below 0 or beyond
/// 32 bits.
pub(crate) fn from_tensor(file: &TensorFile) -> Result<Vec<u32>> {
    let bad = |why: String| Error::new(ErrorKind::InvalidInput, why).at(&file.path);
    let tensor = file.tensors.get(TENSOR).ok_or_else(|| {
        bad(format!("no tensor {TENSOR:?}")).advice("a dump needs its token ids: I64 or I32, one per token")
    })?;
    let count = match tensor.shape.as_slice() {
        [n] | [1, n] => *n,
        other => return Err(bad(format!("{TENSOR} has shape {other:?}, not [tokens]"))),
    };
    if count == 0 || count > MAX_TOKENS {
        return Err(bad(format!("{TENSOR} has {count} tokens, not 1 to {MAX_TOKENS}")));
    }
    let width = match tensor.dtype {
        Dtype::I64 | Dtype::U64 => 8,
        Dtype::I32 | Dtype::U32 => 4,
        other => return Err(bad(format!("{TENSOR} has type {other:?}, not I64 or I32"))),
    };
    let data = read_tensor(file, tensor)?;
    data.chunks_exact(width)
        .enumerate()
        .map(|(i, bytes)| token(bytes, tensor.dtype).ok_or_else(|| bad(format!("{TENSOR}[{i}] is not a token id"))))
        .collect()
}

fn token(bytes: &[u8], dtype: Dtype) -> Option<u32> {
    let wide = match dtype {
        Dtype::I64 => i64::from_le_bytes(bytes.try_into().ok()?),
        Dtype::U64 => u64::from_le_bytes(bytes.try_into().ok()?).try_into().ok()?,
        Dtype::I32 => i32::from_le_bytes(bytes.try_into().ok()?).into(),
        _ => u32::from_le_bytes(bytes.try_into().ok()?).into(),
    };
    u32::try_from(wide).ok()
}

fn read_tensor(file: &TensorFile, tensor: &Tensor) -> Result<Vec<u8>> {
    let io = |e| Error::io("cannot read the token ids", e).at(&file.path).offset(tensor.offset);
    let mut data = vec![0; tensor.bytes];
    File::open(&file.path).and_then(|f| f.read_exact_at(&mut data, tensor.offset)).map_err(io)?;
    Ok(data)
}

/// The token ids in a sidecar beside a dump's files: `token_ids.safetensors` or `token_ids.json`.
///
/// # Errors
/// `InvalidInput` where there is none or it is malformed.
pub(crate) fn from_sidecar(folder: &Path) -> Result<Vec<u32>> {
    let tensors = folder.join("token_ids.safetensors");
    if tensors.exists() {
        header::check_regular(&tensors)?;
        return from_tensor(&header::read(&tensors)?);
    }
    let json = folder.join("token_ids.json");
    if json.exists() {
        return from_json(&json);
    }
    Err(Error::new(ErrorKind::InvalidInput, "no token ids beside the layers' files")
        .at(folder)
        .advice("this form does not hold them: add token_ids.safetensors or token_ids.json to the folder"))
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Json {
    List(Vec<u32>),
    Named { token_ids: Vec<u32> },
}

fn from_json(path: &Path) -> Result<Vec<u32>> {
    let bad = |why: String| Error::new(ErrorKind::InvalidInput, why).at(path);
    header::check_regular(path)?;
    let file = File::open(path).map_err(|e| Error::io("cannot open the token ids", e).at(path))?;
    let mut text = Vec::new();
    file.take(MAX_JSON_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(|e| Error::io("cannot read the token ids", e).at(path))?;
    if text.len() as u64 > MAX_JSON_BYTES {
        return Err(bad(format!("larger than {MAX_JSON_BYTES} bytes")));
    }
    let tokens = match serde_json::from_slice(&text) {
        Ok(Json::List(tokens) | Json::Named { token_ids: tokens }) => tokens,
        Err(_) => return Err(bad("neither [ids] nor {\"token_ids\": [ids]} with ids of 32 bits".to_owned())),
    };
    if tokens.is_empty() || tokens.len() > MAX_TOKENS {
        return Err(bad(format!("{} tokens, not 1 to {MAX_TOKENS}", tokens.len())));
    }
    Ok(tokens)
}
