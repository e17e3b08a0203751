//! The messages between scheduler and workers, and their bytes: a version byte, then postcard. Any
//! bytes can be read: damaged ones are an error, never a panic. Plain data: `scheduler/` and
//! `worker/` say what it means.

use serde::{Deserialize, Serialize};

use super::worker_identity::WorkerIdentity;
use crate::error::{Error, ErrorKind, Result};
use crate::key::{Extra, LoraId, MmItem};

/// First byte of every message; scheduler and workers come from one release.
const VERSION: u8 = 10;

/// Tokens of a request that the workers do not know yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptPart {
    /// Tokens that they know already; 0 begins the prompt anew.
    pub start: usize,
    /// The tokens after them.
    pub tokens: Vec<u32>,
    /// What else the keys are made of; of use where `start` is 0.
    pub(super) extra: WireExtra,
}

/// A part of a request's block table in one KV cache group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockSpan {
    /// Place of the first block in the table.
    pub first: usize,
    /// Ids from there on.
    pub ids: Vec<u32>,
}

/// A load that the workers start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadOrder {
    /// The request.
    pub req_id: String,
    /// Its tokens, as far as the load needs them and they were not sent before.
    pub prompt: PromptPart,
    /// Tokens from the start that the server has; nothing below is written.
    pub computed: usize,
    /// Tokens from the start that are there once the load is over.
    pub stop: usize,
    /// Where they go, one span per KV cache group.
    pub spans: Vec<BlockSpan>,
    /// How often loads of the request have failed before.
    pub epoch: u32,
    /// The request is not scheduled before the load is reported as over; otherwise it runs in the
    /// same step.
    pub asynchronous: bool,
}

/// A store that the workers start when the step is computed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveOrder {
    /// The request.
    pub req_id: String,
    /// Its tokens up to `stop`, as far as they were not sent before.
    pub prompt: PromptPart,
    /// First token to store; starts a chunk.
    pub start: usize,
    /// End of the tokens to store; inside a chunk only where a partial chunk is stored.
    pub stop: usize,
    /// Where they lie, one span per KV cache group.
    pub spans: Vec<BlockSpan>,
    /// As in [`LoadOrder`]: a store that was ordered before a load failed is dropped.
    pub epoch: u32,
    /// Tokens that were generated for the request in all, where it has ended.
    pub generated: Option<u32>,
}

/// A question to the workers whose caches the scheduler cannot see: how much of a request is stored
/// there?
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// Its number, which the answers repeat.
    pub number: u64,
    /// The request.
    pub req_id: String,
    /// Its tokens, as far as the question goes and they were not sent before.
    pub prompt: PromptPart,
}

/// What the workers read ahead for a request that waits: what they have stored of these tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefetchOrder {
    /// The request.
    pub req_id: String,
    /// Its tokens, as far as they are needed and were not sent before.
    pub prompt: PromptPart,
    /// First token that is wanted.
    pub start: usize,
    /// End of the tokens that are wanted.
    pub stop: usize,
}

/// What the workers do in one step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepMeta {
    /// Number of the step, from 1.
    pub step: u64,
    /// Loads.
    pub loads: Vec<LoadOrder>,
    /// Stores.
    pub saves: Vec<SaveOrder>,
    /// Requests whose blocks may be reused in this step: their gathers are over or given up before
    /// it runs.
    pub preempted: Vec<String>,
    /// Finished requests that keep their blocks until they are reported as sent.
    pub held: Vec<String>,
    /// Requests in `held` whose gathers are given up.
    pub give_up: Vec<String>,
    /// Questions; handled before the loads. Every worker learns their tokens, also one that is not
    /// asked.
    pub questions: Vec<Question>,
    /// The ranks that answer them.
    pub asked: Vec<u32>,
    /// The ranks whose [`WorkerIdentity`] has arrived; they stop sending it.
    pub acknowledged: Vec<u32>,
    /// The ranks that store nothing, because an earlier one stores the same KV in the same place;
    /// `None` where nothing has changed.
    pub silent: Option<Vec<u32>>,
    /// Prefetches; handled after the loads.
    pub prefetches: Vec<PrefetchOrder>,
    /// Requests whose prefetch is not needed any more.
    pub unwanted: Vec<String>,
}

impl StepMeta {
    /// Whether the workers have nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.loads.is_empty()
            && self.saves.is_empty()
            && self.preempted.is_empty()
            && self.held.is_empty()
            && self.give_up.is_empty()
            && self.questions.is_empty()
            && self.acknowledged.is_empty()
            && self.silent.is_none()
            && self.prefetches.is_empty()
            && self.unwanted.is_empty()
    }

    /// Bytes of it; none where there is nothing to do.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] where it cannot be written.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        if self.is_empty() { Ok(Vec::new()) } else { write(self) }
    }

    /// Reads it back; no bytes are a step without work.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for bytes that are no step, or of another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        if bytes.is_empty() { Ok(Self::default()) } else { read(bytes, "a step of the connector") }
    }
}

/// What a worker tells the scheduler after a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerMeta {
    /// Which worker.
    pub rank: u32,
    /// The gathers of all steps up to this one are over or given up.
    pub gathered_step: u64,
    /// The loads that ran within all steps up to this one are over.
    pub loaded_step: u64,
    /// Requests whose load failed since the last report.
    pub failed: Vec<String>,
    /// Of loads that failed because a drive does not answer, the key of the first chunk that did
    /// not come.
    pub unread: Vec<[u8; 32]>,
    /// Keys of chunks stored since the last report, where KV events are on.
    pub stored: Vec<[u8; 32]>,
    /// Tokens loaded from drives since the last report; of a load to which a drive brought none in
    /// time, a chunk's.
    pub loaded_tokens: u64,
    /// Seconds in which such loads were under way; those of several at once count once.
    pub load_s: f64,
    /// Tokens that these loads found in memory.
    pub beside_tokens: u64,
    /// Tokens of loads that found everything in memory, since the last report.
    pub memory_tokens: u64,
    /// As `load_s`, of such loads.
    pub memory_s: f64,
    /// Keys of chunks that have come into this worker's memory tier (`true`) or left it, as far as
    /// one report takes them.
    pub memory: Vec<([u8; 32], bool)>,
    /// Keys of chunks that were dropped for room here since the last report, as far as one report
    /// takes them.
    pub evicted: Vec<[u8; 32]>,
    /// Keys of chunks that the remote tier has got from here (`true`) or does not have any more, in
    /// order, as far as one report takes them.
    pub remote: Vec<([u8; 32], bool)>,
    /// Numbers of questions, and the tokens that are stored here of each, since the last report.
    pub answers: Vec<(u64, u64)>,
    /// Who this is, until the scheduler has acknowledged it.
    pub identity: Option<WorkerIdentity>,
}

impl WorkerMeta {
    /// Bytes of it.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] where it cannot be written.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        write(self)
    }

    /// Reads it back.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for bytes that are no report, or of another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let report: Self = read(bytes, "a worker's report")?;
        // Rates are computed from these, and loads are refused by them.
        match [report.load_s, report.memory_s].into_iter().find(|seconds| !seconds.is_finite() || *seconds < 0.0) {
            None => Ok(report),
            Some(wrong) => {
                Err(Error::new(ErrorKind::InvalidInput, format!("a worker reports {wrong} seconds of loading")))
            }
        }
    }
}

fn write<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    postcard::to_extend(value, vec![VERSION])
        .map_err(|e| Error::new(ErrorKind::Internal, "a message of the connector cannot be written").source(e))
}

fn read<'a, T: Deserialize<'a>>(bytes: &'a [u8], what: &str) -> Result<T> {
    let refuse = |why: String| Error::new(ErrorKind::InvalidInput, format!("these bytes are not {what}: {why}"));
    let (version, rest) = bytes.split_first().ok_or_else(|| refuse("there are none".to_owned()))?;
    if *version != VERSION {
        return Err(refuse(format!("version {version}, not {VERSION}"))
            .advice("run the same release of Forebay in the scheduler and in all workers"));
    }
    let (value, left) = postcard::take_from_bytes(rest).map_err(|e| refuse(e.to_string()))?;
    if left.is_empty() { Ok(value) } else { Err(refuse(format!("{} bytes too many", left.len()))) }
}

/// [`Extra`] in messages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WireExtra {
    multimodal: Vec<(Vec<u8>, u32, u32)>,
    lora: Option<(String, String, String)>,
    cache_salt: Option<String>,
}

impl From<&Extra> for WireExtra {
    fn from(extra: &Extra) -> Self {
        Self {
            multimodal: extra.multimodal.iter().map(|m| (m.hash.clone(), m.offset, m.len)).collect(),
            lora: extra.lora.as_ref().map(|l| (l.name.clone(), l.path.clone(), l.digest.clone())),
            cache_salt: extra.cache_salt.clone(),
        }
    }
}

impl From<&WireExtra> for Extra {
    fn from(wire: &WireExtra) -> Self {
        let item =
            |(hash, offset, len): &(Vec<u8>, u32, u32)| MmItem { hash: hash.clone(), offset: *offset, len: *len };
        Self {
            multimodal: wire.multimodal.iter().map(item).collect(),
            lora: wire.lora.as_ref().map(|(name, path, digest)| LoraId {
                name: name.clone(),
                path: path.clone(),
                digest: digest.clone(),
            }),
            cache_salt: wire.cache_salt.clone(),
        }
    }
}
