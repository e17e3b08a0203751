//! Request traces in Mooncake's format: one JSON object per line.
//!
//! `hash_ids` name the prompt's blocks of 512 tokens by their whole prefix: equal ids mean equal
//! prefixes. The last block may be partial; its tokens follow from `input_length`. A line that
//! breaks these rules is an error with its number.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use forebay::{Error, ErrorKind, Result};
use serde::Deserialize;

use super::policy::Block;

/// Tokens of one hashed block.
pub(crate) const BLOCK_TOKENS: u64 = 512;
/// Longest line that is read, in bytes: a prompt of some fifty million tokens.
const MAX_LINE_BYTES: usize = 1 << 20;

/// One request of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Request {
    /// Arrival in milliseconds since the start of the trace.
    pub(crate) timestamp: u64,
    /// Tokens of the prompt.
    pub(crate) input_length: u64,
    /// Tokens that were generated.
    pub(crate) output_length: u64,
    /// Prefix hashes of the prompt's blocks, in order.
    pub(crate) hash_ids: Vec<u64>,
}

impl Request {
    /// The prompt's blocks with their tokens.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.hash_ids.iter().enumerate().map(|(i, &id)| {
            let start = i as u64 * BLOCK_TOKENS;
            (id, self.input_length.saturating_sub(start).min(BLOCK_TOKENS))
        })
    }

    /// The same as policies see them.
    pub(super) fn chain(&self) -> Vec<Block> {
        let mut parent = 0;
        let block = |(depth, (id, tokens))| Block {
            id,
            tokens,
            depth: depth as u32,
            parent: std::mem::replace(&mut parent, id),
        };
        self.blocks().enumerate().map(block).collect()
    }

    fn validate(&self) -> std::result::Result<(), String> {
        let blocks = self.input_length.div_ceil(BLOCK_TOKENS);
        if self.input_length == 0 {
            return Err("input_length is 0".to_owned());
        }
        if blocks != self.hash_ids.len() as u64 {
            return Err(format!(
                "input_length {} makes {blocks} blocks of {BLOCK_TOKENS} tokens, but there are {} hash_ids",
                self.input_length,
                self.hash_ids.len()
            ));
        }
        Ok(())
    }
}

/// Reads a whole trace; empty lines are skipped.
pub(crate) fn read_trace(path: &Path) -> Result<Vec<Request>> {
    let file = File::open(path).map_err(|e| Error::io("cannot open the trace", e).at(path))?;
    parse_trace(BufReader::new(file), path)
}

/// As [`read_trace`], from anything that has lines; errors name it `path`.
pub(crate) fn parse_trace(mut reader: impl BufRead, path: &Path) -> Result<Vec<Request>> {
    let mut requests = Vec::new();
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let mut limited = std::io::Read::take(&mut reader, MAX_LINE_BYTES as u64 + 1);
        let read = limited.read_until(b'\n', &mut line).map_err(|e| Error::io("cannot read the trace", e).at(path))?;
        if read == 0 {
            break;
        }
        if read > MAX_LINE_BYTES {
            return Err(bad_line(path, number, &format!("longer than {MAX_LINE_BYTES} bytes")));
        }
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let request: Request = serde_json::from_slice(&line).map_err(|e| bad_line(path, number, &e.to_string()))?;
        request.validate().map_err(|why| bad_line(path, number, &why))?;
        requests.push(request);
    }
    if requests.is_empty() {
        return Err(Error::new(ErrorKind::InvalidInput, "the trace holds no request").at(path).advice(A_LINE));
    }
    Ok(requests)
}

fn bad_line(path: &Path, number: usize, why: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("trace line {number}: {why}")).at(path).advice(A_LINE)
}

/// What a trace is made of.
const A_LINE: &str = "each line is {\"timestamp\": ms, \"input_length\": tokens, \"output_length\": tokens, \"hash_ids\": [one per 512 tokens]}";

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<Request>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace.jsonl");
        std::fs::write(&path, text).unwrap();
        read_trace(&path)
    }

    #[test]
    fn the_last_block_counts_the_tokens_it_has() {
        let r = read("{\"timestamp\":0,\"input_length\":1030,\"output_length\":5,\"hash_ids\":[7,8,9]}\n\n").unwrap();
        assert_eq!(r[0].blocks().collect::<Vec<_>>(), [(7, 512), (8, 512), (9, 6)]);
    }

    #[test]
    fn a_malformed_line_is_named_by_its_number() {
        let good = "{\"timestamp\":0,\"input_length\":5,\"output_length\":5,\"hash_ids\":[7]}\n";
        for bad in [
            "{\"timestamp\":0",
            "[]",
            "{\"timestamp\":0,\"input_length\":5,\"output_length\":5,\"hash_ids\":[1,2]}",
            "{\"timestamp\":0,\"input_length\":0,\"output_length\":5,\"hash_ids\":[]}",
            "{\"timestamp\":0,\"input_length\":-5,\"output_length\":5,\"hash_ids\":[1]}",
        ] {
            let e = read(&format!("{good}{bad}\n{good}")).unwrap_err().to_string();
            assert!(e.starts_with("trace line 2: "), "{e}");
        }
        assert!(read("\n").unwrap_err().to_string().contains("no request"));
    }
}
