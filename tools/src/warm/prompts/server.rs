//! An OpenAI-compatible server: what it serves, and one-token requests to it.
//!
//! A request that the server cannot take now (408, 429, 502 to 504, a connection that breaks) is
//! tried again with growing pauses; what it refuses for good is the prompt's failure, with the
//! server's own words.

use std::time::Duration;

use forebay::{Error, ErrorKind, Result};
use serde::Deserialize;
use serde_json::Value;

use super::source::Prompt;

/// Most bytes of an answer that are read.
const MAX_ANSWER_BYTES: u64 = 16 << 20;
/// The first pause before a request is tried again; each is twice as long as the one before, up to
/// the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How long a connection may take that is then tried again.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A server to send prompts to.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    agent: ureq::Agent,
    base: String,
    api_key: Option<String>,
    retries: u32,
}

/// How the server counted a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: u64,
    /// Tokens that the server had already; `None` where it does not say.
    pub(crate) cached_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct Answer {
    usage: Option<AnswerUsage>,
}

#[derive(Deserialize)]
struct AnswerUsage {
    prompt_tokens: u64,
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

/// Why a request did not succeed.
enum Failed {
    /// Another try may succeed.
    ForNow(String),
    /// Another try will fail too.
    ForGood(String),
    /// It was sent, and no answer came in time.
    Late(String),
}

impl Server {
    /// A server at `base`, for example `http://localhost:8000`; a `/v1` at its end is allowed.
    pub(crate) fn new(base: &str, api_key: Option<String>, (timeout, retries): (Duration, u32)) -> Result<Self> {
        let base = base.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        if !base.starts_with("http://") && !base.starts_with("https://") {
            return Err(Error::new(ErrorKind::InvalidInput, format!("{base:?} is no address of a server"))
                .advice("write it as http://localhost:8000"));
        }
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(timeout))
            .timeout_connect(Some(timeout.min(CONNECT_TIMEOUT)))
            .http_status_as_error(false);
        Ok(Self { agent: config.build().into(), base, api_key, retries })
    }

    /// The name of the first model it serves.
    pub(crate) fn model(&self) -> Result<String> {
        let answer = self.call("/v1/models", None).map_err(|e| match e {
            Failed::ForNow(what) | Failed::ForGood(what) | Failed::Late(what) => {
                Error::new(ErrorKind::Io, format!("the server at {} does not answer: {what}", self.base))
                    .advice("start it, or name the right one with --server (and --api-key where it wants one)")
            }
        })?;
        let models: Models = serde_json::from_slice(&answer).map_err(|e| {
            Error::new(
                ErrorKind::Io,
                format!("{}/v1/models is not an OpenAI-compatible server's answer: {e}", self.base),
            )
            .advice("check the address in --server")
        })?;
        models.data.into_iter().next().map(|m| m.id).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("the server at {} serves no model", self.base))
                .advice("name it with --model")
        })
    }

    /// Whether it answers at all, if only that it wants a key.
    pub(crate) fn is_up(&self) -> bool {
        !matches!(self.call("/v1/models", None), Err(Failed::ForNow(_) | Failed::Late(_)))
    }

    /// Makes the server compute `prompt`; the error is for the report.
    pub(crate) fn warm(&self, prompt: &Prompt, model: &str) -> std::result::Result<Usage, String> {
        let (path, body) = prompt.request(model);
        let mut pause = FIRST_PAUSE;
        let mut tries = 0;
        loop {
            match self.call(path, Some(&body)) {
                Ok(answer) => {
                    let answer: Answer = serde_json::from_slice(&answer).map_err(|e| format!("not understood: {e}"))?;
                    let usage = answer.usage.ok_or("the answer has no usage")?;
                    let cached_tokens = usage.prompt_tokens_details.and_then(|d| d.cached_tokens);
                    return Ok(Usage { prompt_tokens: usage.prompt_tokens, cached_tokens });
                }
                // Sent again, it would be computed a second time beside the first.
                Err(Failed::ForGood(what) | Failed::Late(what)) => return Err(what),
                Err(Failed::ForNow(what)) if tries >= self.retries => return Err(what),
                Err(Failed::ForNow(what)) => {
                    tracing::info!(line = prompt.line, what, "tried again");
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    tries += 1;
                }
            }
        }
    }

    fn call(&self, path: &str, body: Option<&Value>) -> std::result::Result<Vec<u8>, Failed> {
        let url = format!("{}{path}", self.base);
        let key = self.api_key.as_ref().map(|key| format!("Bearer {key}"));
        let answer = match body {
            None => {
                let mut request = self.agent.get(&url);
                if let Some(key) = &key {
                    request = request.header("Authorization", key);
                }
                request.call()
            }
            Some(body) => {
                let mut request = self.agent.post(&url);
                if let Some(key) = &key {
                    request = request.header("Authorization", key);
                }
                request.send_json(body)
            }
        };
        let failed = |e: ureq::Error| match e {
            ureq::Error::Timeout(ureq::Timeout::Resolve | ureq::Timeout::Connect) => Failed::ForNow(e.to_string()),
            ureq::Error::Timeout(_) => Failed::Late(e.to_string()),
            _ => Failed::ForNow(e.to_string()),
        };
        let mut answer = answer.map_err(failed)?;
        let bytes = answer.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_to_vec().map_err(failed)?;
        let status = answer.status().as_u16();
        if (200..300).contains(&status) {
            return Ok(bytes);
        }
        let words: String = String::from_utf8_lossy(&bytes).chars().take(300).collect();
        let what = format!("HTTP {status}: {}", words.trim());
        Err(if matches!(status, 408 | 429 | 502..=504) { Failed::ForNow(what) } else { Failed::ForGood(what) })
    }
}
