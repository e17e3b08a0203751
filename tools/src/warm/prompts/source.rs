//! Prompts from JSON lines or from a request trace.
//!
//! A line holds one prompt in the words of an OpenAI-compatible server: `prompt` (a text or token
//! ids), `text`, `prompt_token_ids` or `messages`, and optionally `cache_salt`, `model` (a `LoRA`
//! name) and what else makes the server compute another prompt. A file is read to its end before
//! the first request is sent, so that a broken line is reported before hours of work and not after
//! them.

use std::fs::File;
use std::io::{BufRead, BufReader, Read as _};
use std::path::Path;

use forebay::{Error, ErrorKind, Result};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::replay::trace::{BLOCK_TOKENS, Request};

/// Longest line that is read, in bytes.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// Fields of a request that change its prompt's tokens or their KV; they are sent as they stand.
const SENT_ON: [&str; 12] = [
    "add_generation_prompt",
    "add_special_tokens",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "mm_processor_kwargs",
    "reasoning_effort",
    "tool_choice",
    "tools",
    "truncate_prompt_tokens",
];

/// What a prompt is made of.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Content {
    /// Text that the server tokenizes.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
    /// Chat messages, put together by the server's template.
    Messages(Vec<Value>),
}

/// One prompt to warm.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Prompt {
    /// Line of the file it comes from, counted from 1.
    pub(crate) line: usize,
    /// What it is made of.
    pub(crate) content: Content,
    /// Those of [`SENT_ON`] that the line has.
    pub(crate) fields: Map<String, Value>,
    /// Model or `LoRA` adapter, where the line names one.
    pub(crate) model: Option<String>,
}

#[derive(Deserialize)]
struct Line {
    prompt: Option<Value>,
    text: Option<String>,
    prompt_token_ids: Option<Vec<u32>>,
    messages: Option<Vec<Value>>,
    model: Option<String>,
    #[serde(flatten)]
    fields: Map<String, Value>,
}

impl Prompt {
    fn parse(text: &str, line: usize) -> std::result::Result<Self, String> {
        let parsed: Line = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let prompt = match parsed.prompt {
            None => None,
            Some(Value::String(text)) => Some(Content::Text(text)),
            Some(ids @ Value::Array(_)) => {
                Some(Content::Tokens(serde_json::from_value(ids).map_err(|e| format!("prompt: {e}"))?))
            }
            Some(_) => return Err("prompt is neither a text nor a list of token ids".to_owned()),
        };
        let given = [
            prompt,
            parsed.text.map(Content::Text),
            parsed.prompt_token_ids.map(Content::Tokens),
            parsed.messages.map(Content::Messages),
        ];
        let mut given = given.into_iter().flatten();
        let (Some(content), None) = (given.next(), given.next()) else {
            return Err("needs exactly one of prompt, text, prompt_token_ids, messages".to_owned());
        };
        let empty = match &content {
            Content::Text(text) => text.is_empty(),
            Content::Tokens(ids) => ids.is_empty(),
            Content::Messages(messages) => messages.is_empty(),
        };
        if empty {
            return Err("the prompt is empty".to_owned());
        }
        let mut fields = parsed.fields;
        fields.retain(|name, value| SENT_ON.contains(&name.as_str()) && !value.is_null());
        // The journal knows a prompt by its request, in whatever order the line has its fields.
        fields.sort_keys();
        if fields.get("cache_salt").is_some_and(|salt| !salt.is_string()) {
            return Err("cache_salt is not a text".to_owned());
        }
        Ok(Self { line, content, fields, model: parsed.model })
    }

    /// Tokens, where they are known without the server's tokenizer.
    pub(crate) fn tokens(&self) -> Option<usize> {
        match &self.content {
            Content::Tokens(ids) => Some(ids.len()),
            Content::Text(_) | Content::Messages(_) => None,
        }
    }

    /// Characters of text, roles and templates not counted.
    pub(crate) fn characters(&self) -> usize {
        match &self.content {
            Content::Text(text) => text.chars().count(),
            Content::Tokens(_) => 0,
            Content::Messages(messages) => {
                messages.iter().filter_map(|m| m.get("content")?.as_str()).map(|t| t.chars().count()).sum()
            }
        }
    }

    /// The path and the body of a request that makes the server compute the prompt and one token.
    pub(crate) fn request(&self, default_model: &str) -> (&'static str, Value) {
        let mut body = Map::new();
        body.insert("model".to_owned(), json!(self.model.as_deref().unwrap_or(default_model)));
        body.insert("max_tokens".to_owned(), json!(1));
        body.insert("temperature".to_owned(), json!(0));
        body.extend(self.fields.clone());
        let (path, field, value) = match &self.content {
            Content::Text(text) => ("/v1/completions", "prompt", json!(text)),
            Content::Tokens(ids) => ("/v1/completions", "prompt", json!(ids)),
            Content::Messages(messages) => ("/v1/chat/completions", "messages", json!(messages)),
        };
        body.insert(field.to_owned(), value);
        (path, Value::Object(body))
    }

    /// What tells this prompt from all others: 32 hexadecimal digits, the same in every run.
    pub(crate) fn digest(&self) -> String {
        let (path, body) = self.request("");
        let hash = blake3::derive_key("forebay 1 warmed prompt", format!("{path} {body}").as_bytes());
        hash.iter().take(16).map(|b| format!("{b:02x}")).collect()
    }
}

/// Reads a file of JSON lines; empty lines are skipped.
pub(crate) fn read_prompts(path: &Path) -> Result<Vec<Prompt>> {
    let file = File::open(path).map_err(|e| Error::io("cannot open the prompts", e).at(path))?;
    let mut reader = BufReader::new(file);
    let mut prompts = Vec::new();
    let mut text = String::new();
    for line in 1.. {
        text.clear();
        let bytes = (&mut reader)
            .take(MAX_LINE_BYTES)
            .read_line(&mut text)
            .map_err(|e| Error::io(format!("cannot read line {line} of the prompts"), e).at(path))?;
        if bytes == 0 {
            break;
        }
        if bytes as u64 == MAX_LINE_BYTES {
            return Err(wrong_line(path, line, &format!("longer than {MAX_LINE_BYTES} bytes")));
        }
        if text.trim().is_empty() {
            continue;
        }
        prompts.push(Prompt::parse(&text, line).map_err(|what| wrong_line(path, line, &what))?);
    }
    Ok(prompts)
}

fn wrong_line(path: &Path, line: usize, what: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("line {line}: {what}"))
        .at(path)
        .advice("a line is one JSON object, for example {\"prompt\": \"You are …\"} or {\"messages\": [{\"role\": \"system\", \"content\": \"…\"}]}")
}

/// Prompts with the lengths and the shared prefixes of a trace's requests. Traces hold no text: the
/// token ids are made from the blocks' ids, below `vocab_size`.
pub(crate) fn of_trace(requests: &[Request], vocab_size: u32) -> Vec<Prompt> {
    let range = u64::from(vocab_size.saturating_sub(FIRST_TOKEN).max(1));
    let tokens = |id: u64, count: u64| {
        let mut state = id.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        (0..count.min(BLOCK_TOKENS)).map(move |_| {
            // Xorshift64: any spread over the vocabulary will do.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            FIRST_TOKEN + (state % range) as u32
        })
    };
    requests
        .iter()
        .enumerate()
        .map(|(i, request)| Prompt {
            line: i + 1,
            content: Content::Tokens(request.blocks().flat_map(|(id, count)| tokens(id, count)).collect()),
            fields: Map::new(),
            model: None,
        })
        .collect()
}

/// Ids below are usually special tokens.
const FIRST_TOKEN: u32 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Prompt {
        Prompt::parse(text, 1).unwrap()
    }

    #[test]
    fn every_form_becomes_the_request_that_the_server_knows() {
        let (path, body) = parsed(r#"{"prompt": "Hi", "cache_salt": "s"}"#).request("m");
        assert_eq!(path, "/v1/completions");
        assert_eq!(body, json!({"model": "m", "max_tokens": 1, "temperature": 0, "cache_salt": "s", "prompt": "Hi"}));
        let ids = json!([1, 2]);
        assert_eq!(parsed(r#"{"prompt": [1, 2]}"#).request("m").1["prompt"], ids);
        assert_eq!(parsed(r#"{"prompt_token_ids": [1, 2], "model": "lora"}"#).request("m").1["prompt"], ids);
        assert_eq!(parsed(r#"{"text": "x"}"#).request("m").1["prompt"], "x");
        let (path, body) = parsed(r#"{"messages": [{"role": "user", "content": "x"}]}"#).request("m");
        assert_eq!((path, &body["messages"][0]["role"]), ("/v1/chat/completions", &json!("user")));
    }

    #[test]
    fn a_logged_request_keeps_what_makes_its_prompt() {
        let message = r#""messages": [{"role": "user", "content": "x"}]"#;
        let line = format!(
            r#"{{{message}, "tools": [{{"type": "function"}}], "chat_template_kwargs": {{"enable_thinking": false}},
                "documents": null, "temperature": 0.7, "max_tokens": 500, "stream": true, "n": 4, "id": 7}}"#
        );
        let (_, body) = parsed(&line).request("m");
        assert_eq!(
            body,
            json!({"model": "m", "max_tokens": 1, "temperature": 0, "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function"}], "chat_template_kwargs": {"enable_thinking": false}})
        );
        assert_ne!(parsed(&line).digest(), parsed(&format!("{{{message}}}")).digest());
    }

    #[test]
    fn a_wrong_line_is_named_with_its_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.jsonl");
        for wrong in [
            "{",
            "{}",
            r#"{"prompt": 3}"#,
            r#"{"prompt": "a", "text": "b"}"#,
            r#"{"prompt": ""}"#,
            r#"{"prompt": [-1]}"#,
            r#"{"prompt": "a", "cache_salt": 3}"#,
        ] {
            std::fs::write(&path, format!("{{\"prompt\": \"a\"}}\n\n{wrong}\n")).unwrap();
            let e = read_prompts(&path).unwrap_err();
            assert!(e.kind() == ErrorKind::InvalidInput && e.to_string().contains("line 3"), "{wrong}: {e}");
        }
        std::fs::write(&path, "\n{\"prompt\": \"a\"}\n").unwrap();
        assert_eq!(read_prompts(&path).unwrap().len(), 1);
    }

    #[test]
    fn digests_tell_prompts_apart_and_stay_the_same() {
        let all =
            [r#"{"prompt": "a"}"#, r#"{"prompt": "b"}"#, r#"{"prompt": "a", "cache_salt": "s"}"#, r#"{"prompt": [1]}"#];
        let digests: Vec<String> = all.iter().map(|t| parsed(t).digest()).collect();
        assert!((1..all.len()).all(|i| !digests[..i].contains(&digests[i])));
        assert_eq!(digests[0], parsed(r#"{"text": "a"}"#).digest(), "two ways to say the same");
    }

    #[test]
    fn a_traces_prompts_share_prefixes_as_its_blocks_do() {
        let request = |input_length, hash_ids: &[u64]| Request {
            timestamp: 0,
            input_length,
            output_length: 1,
            hash_ids: hash_ids.to_vec(),
        };
        let prompts = of_trace(&[request(1000, &[7, 8]), request(600, &[7, 9])], 512);
        let ids = |i: usize| match &prompts[i].content {
            Content::Tokens(ids) => ids.clone(),
            _ => unreachable!(),
        };
        assert_eq!((ids(0).len(), ids(1).len()), (1000, 600));
        assert_eq!(ids(0)[..512], ids(1)[..512]);
        assert_ne!(ids(0)[512..600], ids(1)[512..600]);
        assert!(ids(0).iter().all(|t| (16..512).contains(t)));
    }
}
