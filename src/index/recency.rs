//! When each entry was used last, and what that says about segments.
//!
//! Kept by the lane's writer in its own memory, 5 bytes per slot, and not in the shared pages: a
//! lookup must not dirty pages that the kernel would then write to the drive. Time is a logical
//! tick that the caller passes.

use super::policy::SegmentSummary;
use super::table::Table;

/// Bytes of a page, in which slots are measured.
const PAGE_BYTES: u64 = 4096;

/// Ticks and use counts by slot number.
#[derive(Clone, Debug, Default)]
pub struct Recency {
    ticks: Vec<u32>,
    uses: Vec<u8>,
}

impl Recency {
    /// For a table with this many [slots](Table::slots).
    #[must_use]
    pub fn new(slots: usize) -> Self {
        Self { ticks: vec![0; slots], uses: vec![0; slots] }
    }

    /// The entry in `slot` was used last at `tick`, and so many times.
    pub fn set(&mut self, slot: u32, tick: u32, uses: u8) {
        let slot = slot as usize;
        if let (Some(t), Some(u)) = (self.ticks.get_mut(slot), self.uses.get_mut(slot)) {
            *t = tick;
            *u = uses;
        }
    }

    /// The entry in `slot` was used.
    pub fn touch(&mut self, slot: u32, tick: u32) {
        let (last, uses) = self.get(slot);
        self.set(slot, tick.max(last), uses.saturating_add(1));
    }

    /// The slot is empty again.
    pub fn forget(&mut self, slot: u32) {
        self.set(slot, 0, 0);
    }

    /// Last tick and number of uses since the insert, at most 255.
    #[must_use]
    pub fn get(&self, slot: u32) -> (u32, u8) {
        let slot = slot as usize;
        (self.ticks.get(slot).copied().unwrap_or(0), self.uses.get(slot).copied().unwrap_or(0))
    }

    /// Takes over what `old` knows about its slot `from` as this slot `to`: what
    /// [`Table::grow_into`] reports.
    pub fn carry(&mut self, old: &Self, from: u32, to: u32) {
        let (tick, uses) = old.get(from);
        self.set(to, tick, uses);
    }
}

/// How to survey a table.
#[derive(Clone, Copy, Debug)]
pub struct SurveyOptions {
    /// Segments of the lane.
    pub segments: u32,
    /// Share of the live bytes, in percent, that counts as hot: those used last.
    pub hot_percent: u8,
    /// Look at one bucket in this many, and estimate; 1 is exact.
    pub sample_every: usize,
    /// The bucket to begin with, below `sample_every`. Vary it, so that all are seen in time.
    pub offset: usize,
    /// Unix seconds: what has expired by then does not count.
    pub now_s: u64,
}

/// What the entries say about their segments.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// One summary per segment that has entries, by segment number. `first_seq` is the least
    /// sequence seen: a caller that knows the exact one puts it in.
    pub segments: Vec<SegmentSummary>,
    /// Entries used at this tick or later are hot.
    pub hot_since: u32,
}

impl Survey {
    /// Looks through a table.
    #[must_use]
    pub fn take(table: &Table, recency: &Recency, options: &SurveyOptions) -> Self {
        let every = options.sample_every.max(1);
        // Tick, pages and segment of each entry seen.
        let mut seen: Vec<(u32, u32, u32)> = Vec::new();
        let mut segments: Vec<SegmentSummary> = Vec::new();
        table.for_each_sample(every, options.offset % every, |slot, entry| {
            let expired = entry.expiry_s != 0 && u64::from(entry.expiry_s) <= options.now_s;
            if entry.segment >= options.segments || entry.pages == 0 || expired {
                return;
            }
            let at = entry.segment as usize;
            if at >= segments.len() {
                segments.resize(at + 1, SegmentSummary { first_seq: u64::MAX, ..SegmentSummary::default() });
            }
            if let Some(summary) = segments.get_mut(at) {
                let tick = recency.get(slot).0;
                summary.segment = entry.segment;
                summary.first_seq = summary.first_seq.min(entry.seq);
                summary.last_touch = summary.last_touch.max(tick);
                summary.live_bytes += u64::from(entry.pages) * PAGE_BYTES * every as u64;
                summary.live_chunks += every as u64;
                seen.push((tick, entry.pages, entry.segment));
            }
        });
        let hot_since = hot_since(&mut seen, options.hot_percent);
        for (_, pages, segment) in seen.iter().take_while(|(tick, ..)| *tick >= hot_since) {
            if let Some(summary) = segments.get_mut(*segment as usize) {
                summary.hot_bytes += u64::from(*pages) * PAGE_BYTES * every as u64;
            }
        }
        segments.retain(|s| s.live_chunks > 0);
        Self { segments, hot_since }
    }
}

/// Sorts by tick, the latest first, and says since when entries are hot.
fn hot_since(seen: &mut [(u32, u32, u32)], hot_percent: u8) -> u32 {
    let total: u64 = seen.iter().map(|(_, pages, _)| u64::from(*pages)).sum();
    seen.sort_unstable_by_key(|(tick, ..)| std::cmp::Reverse(*tick));
    let mut hot = 0;
    for (tick, pages, _) in seen.iter() {
        hot += u64::from(*pages);
        if hot * 100 > total * u64::from(hot_percent) {
            return tick.saturating_add(1);
        }
    }
    0
}
