//! One request as the scheduler side knows it: its tokens, its blocks, and how far it is computed,
//! stored and sent. Plain state with its small transitions; what follows from them is decided in
//! `loads.rs` and `saves.rs`.

use std::time::{Duration, Instant};

use super::super::meta::{BlockSpan, PromptPart, WireExtra};
use crate::engine::Prompt;
use crate::key::Extra;

/// Where a request is on the way from an answer to loaded blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestLoad {
    /// Nothing is under way.
    Idle,
    /// The server has the answer that so many tokens beyond `computed` can be loaded.
    Answered { computed: usize, tokens: usize },
    /// The server gave blocks; the next step carries the load.
    Ordered { computed: usize, stop: usize },
    /// The load was sent to the workers.
    InFlight { computed: usize, stop: usize },
}

/// One request.
pub(super) struct Tracker {
    /// Its tokens whose ids are final.
    pub(super) prompt: Prompt,
    /// Tokens of the prompt proper.
    pub(super) prompt_tokens: usize,
    extra: Extra,
    pub(super) skip_save: bool,
    /// It is offered no load: the caller does not want one, or one has failed.
    pub(super) skip_load: bool,
    /// Tokens that the workers know.
    sent: usize,
    /// Block ids per KV cache group, from the start of the request.
    pub(super) blocks: Vec<Vec<u32>>,
    /// Tokens from the start that are stored or on their way; `None` until it is looked up.
    pub(super) saved: Option<usize>,
    /// The first token that a store left out, as its blocks had left a sliding window.
    pub(super) hole: Option<usize>,
    /// Tokens from the start that are computed, and stored when the request ends; `None` where
    /// nothing waits for that.
    pub(super) ripe: Option<usize>,
    /// The partial chunk at the prompt's end was ordered to be stored, or waits for the request's
    /// end.
    pub(super) unfull_saved: bool,
    /// The last step that carried a store of it; 0 for none.
    pub(super) last_save: u64,
    /// How much was found stored, and when.
    pub(super) found: Option<(usize, Instant)>,
    /// Tokens that another server says it stores.
    pub(super) promised: usize,
    /// Since when the promised tokens are waited for.
    pub(super) promised_since: Option<Instant>,
    /// Tokens from its start that the server had when it last said so.
    pub(super) has: usize,
    /// Since when it waits for another request's load.
    pub(super) waiting_since: Option<Instant>,
    pub(super) load: RequestLoad,
    /// The load is over before the request is scheduled; otherwise it runs within the request's
    /// first step.
    pub(super) asynchronous: bool,
    /// Loads of it that failed.
    pub(super) epoch: u32,
}

impl Tracker {
    pub(super) fn new(prompt: Prompt, extra: &Extra, skip_save: bool, skip_load: bool) -> Self {
        Self {
            prompt_tokens: prompt.len(),
            prompt,
            extra: extra.clone(),
            skip_save,
            skip_load,
            sent: 0,
            blocks: Vec::new(),
            saved: None,
            hole: None,
            ripe: None,
            unfull_saved: false,
            last_save: 0,
            found: None,
            promised: 0,
            has: 0,
            promised_since: None,
            waiting_since: None,
            load: RequestLoad::Idle,
            asynchronous: true,
            epoch: 0,
        }
    }

    /// Whether the server has neither begun with it nor been told to load it.
    pub(super) fn is_waiting(&self) -> bool {
        self.blocks.is_empty() && matches!(self.load, RequestLoad::Idle | RequestLoad::Answered { .. })
    }

    /// The tokens up to `upto` that the workers do not know yet.
    pub(super) fn part(&mut self, upto: usize) -> PromptPart {
        let start = self.sent;
        let tokens = self.prompt.tokens().get(start..upto.min(self.prompt.len())).unwrap_or_default().to_vec();
        self.sent += tokens.len();
        let extra = if start == 0 { WireExtra::from(&self.extra) } else { WireExtra::default() };
        PromptPart { start, tokens, extra }
    }

    /// The blocks of the tokens in `start..stop`; `None` where a group has not so many.
    pub(super) fn spans(&self, (start, stop): (usize, usize), block_tokens: &[u32]) -> Option<Vec<BlockSpan>> {
        let span = |(group, tokens): (usize, &u32)| {
            let tokens = *tokens as usize;
            let first = start / tokens;
            let ids = self.blocks.get(group)?.get(first..stop.div_ceil(tokens))?;
            Some(BlockSpan { first, ids: ids.to_vec() })
        };
        block_tokens.iter().enumerate().map(span).collect()
    }

    /// Whether another server's store of more than `stop` tokens is still waited for.
    pub(super) fn awaits_more_than(&mut self, stop: usize, multiple: usize, patience: Duration) -> bool {
        let chunk = self.prompt.chunk_tokens();
        let promised = self.promised.min(self.prompt.len().saturating_sub(1)) / chunk * chunk;
        promised / multiple * multiple > stop
            && self.promised_since.get_or_insert_with(Instant::now).elapsed() < patience
    }

    /// Adds blocks at the end of each group's table.
    pub(super) fn append(&mut self, new: &[Vec<u32>]) {
        self.blocks.resize(self.blocks.len().max(new.len()), Vec::new());
        for (table, ids) in self.blocks.iter_mut().zip(new) {
            table.extend_from_slice(ids);
        }
    }

    /// Takes all its blocks away, unless they are those of a load that is ordered and not sent.
    /// What is stored is looked up anew.
    pub(super) fn preempt(&mut self) {
        if !matches!(self.load, RequestLoad::Ordered { .. }) {
            self.blocks.clear();
            self.load = RequestLoad::Idle;
        }
        self.waiting_since = None;
        self.forget_stored();
    }

    /// What is stored is looked up anew.
    pub(super) fn forget_stored(&mut self) {
        (self.saved, self.hole, self.ripe, self.found, self.unfull_saved) = (None, None, None, None, false);
    }

    /// A load failed: there is never another one, and what was computed from it does not count as
    /// stored.
    pub(super) fn load_failed(&mut self) {
        self.skip_load = true;
        self.epoch = self.epoch.saturating_add(1);
        self.forget_stored();
    }

    /// Tokens from the start that need not be looked at again: stored, on their way, or to be
    /// stored at the end.
    pub(super) fn reached(&self) -> Option<usize> {
        self.saved.max(self.ripe)
    }

    /// Number of blocks that it keeps.
    pub(super) fn num_blocks(&self) -> usize {
        self.blocks.iter().map(Vec::len).sum()
    }

    /// All its blocks, in place of those that it had.
    pub(super) fn replace(&mut self, blocks: &[Vec<u32>]) {
        self.blocks = blocks.to_vec();
    }
}
