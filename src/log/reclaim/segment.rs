//! Reclaim of a segment, so that its space can be used again.
//!
//! The order is the protocol, each step a function of its own:
//! 1. *copy* what the policy wants to keep, with its sequence, to the open segment, while all of it
//!    is still served; the copies have no headers yet, so that a removal need not know of them;
//! 2. *condemn*: nothing in the segment is served any more, and no lease is given; a segment with a
//!    lease is left alone. Lookups and leases go by the same state, so that a lookup finds nothing
//!    that a load would not;
//! 3. *complete* the copies with their headers, if their keys were not removed; flush; *publish*
//!    them; flush their records before the originals go;
//! 4. *free*: the region says so, durably: a crash must not bring back the place of what was moved;
//! 5. *erase*: the segment becomes a hole; its entries leave the table.
//!
//! A segment that cannot be freed stays condemned, and is tried again. A removal of keys waits for
//! it: it may hold a slot that no entry names.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use super::moves;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::record::Record;
use crate::format::sealed::{RegionHeader, RegionState};
use crate::index::{self, ChunkSummary, Reclaim, SegmentState, SegmentSummary, Survey, SurveyOptions};
use crate::log::drive::Volume;
use crate::log::lane::{Lane, LaneRole, LaneState, Segment, SegmentPhase, aligned, partial_length};
use crate::log::{journal, policy};

/// Share of the live bytes that counts as hot, in percent.
const HOT_PERCENT: u8 = 30;
/// With this many condemned segments a lane reclaims no others: a drive that refuses writes must
/// not cost chunks that it can still read.
const MOST_STUCK: usize = 4;
/// With so many segments that cannot be reclaimed in time the others are left for another round.
const MOST_LATE: u32 = 4;
/// Entries looked at for a survey; larger tables are sampled.
const SURVEY_ENTRIES: u64 = 50_000;

/// A segment being reclaimed.
pub(super) struct Victim {
    pub(super) lane: Arc<Lane>,
    pub(super) segment: u32,
    pub(super) epoch: u32,
    /// Chunks used at this tick or later are hot.
    hot_since: u32,
}

impl Victim {
    fn of(lane: &Arc<Lane>, segment: u32, hot_since: u32) -> Option<Self> {
        let epoch = lane.state().ok()?.segments.get(segment)?.epoch();
        Some(Self { lane: Arc::clone(lane), segment, epoch, hot_since })
    }
}

/// What becomes of a victim's records.
#[derive(Default)]
struct Plan {
    /// Slots worth writing again, the most wanted first.
    keep: Vec<Record>,
    /// Puts that the table still names, and that are not written again.
    drop: Vec<Record>,
}

/// Reclaims the first segment, in the order of the policy, that is not leased; whether there was
/// one.
pub(super) fn reclaim_one(volume: &Volume) -> bool {
    reclaim_first(volume, |_| true)
}

/// As [`reclaim_one`], of the lane that this process appends to.
pub(super) fn reclaim_own(volume: &Volume) -> bool {
    reclaim_first(volume, |lane| lane.role == LaneRole::Own)
}

fn reclaim_first(volume: &Volume, of: impl Fn(&Lane) -> bool) -> bool {
    let (mut refused, mut late) = (HashSet::new(), 0);
    while let Some(victim) = choose(volume, &refused, &of) {
        match reclaim(volume, &victim) {
            Ok(true) => return true,
            Ok(false) => {}
            Err(e) => {
                tracing::debug!(segment = victim.segment, "not reclaimed");
                volume.ctx.tell("a segment cannot be reclaimed", &victim.lane.dir, &e);
                late += u32::from(e.kind() == ErrorKind::TimedOut);
                // A drive that does not answer may take as long over each of the others.
                if volume.ctx.is_closed() || late == MOST_LATE {
                    return false;
                }
            }
        }
        refused.insert((victim.lane.number, victim.segment));
    }
    false
}

/// Reclaims the empty segments of the held lanes with this role; how many were tried.
pub(super) fn reclaim_dead(volume: &Volume, role: LaneRole) -> usize {
    let mut count = 0;
    for lane in volume.lanes().held().filter(|l| l.role == role) {
        for victim in dead_segments(lane).into_iter().filter_map(|segment| Victim::of(lane, segment, 0)) {
            if volume.ctx.is_closed() {
                return count;
            }
            if let Err(e) = reclaim(volume, &victim) {
                tracing::debug!(lane = %lane.dir.display(), error = %e, "an empty segment was not reclaimed");
                continue;
            }
            count += 1;
        }
    }
    count
}

/// Sealed segments that hold nothing any more.
pub(super) fn dead_segments(lane: &Lane) -> Vec<u32> {
    let (Some(shared), Ok(state)) = (lane.shared(), lane.state()) else { return Vec::new() };
    let is_empty = |number| shared.segment(number).is_some_and(|view| view.live_chunks == 0);
    let dead = state.segments.iter().filter(|(number, segment)| segment.is_at_rest() && is_empty(*number));
    dead.map(|(number, _)| number).collect()
}

/// Reclaims the segments in which everything has expired, before their room is needed.
pub(super) fn reclaim_expired(volume: &Volume) {
    for lane in volume.lanes().held() {
        for segment in expired_segments(lane) {
            let Some(victim) = Victim::of(lane, segment, 0).filter(|_| !volume.ctx.is_closed()) else { continue };
            if let Err(e) = reclaim(volume, &victim) {
                tracing::debug!(lane = %lane.dir.display(), error = %e, "an expired segment was not reclaimed");
            }
        }
    }
}

/// Sealed segments in which everything has expired.
fn expired_segments(lane: &Lane) -> Vec<u32> {
    let now_s = lane.ctx.now_s();
    let Ok(state) = lane.state() else { return Vec::new() };
    let over = state.segments.iter().filter(|(_, s)| s.is_at_rest() && s.has_expired(now_s));
    over.map(|(number, _)| number).collect()
}

/// The next victim among the sealed segments of the lanes that this process holds and `of` names.
fn choose(volume: &Volume, refused: &HashSet<(u32, u32)>, of: impl Fn(&Lane) -> bool) -> Option<Victim> {
    let policy = policy_of(volume);
    let mut best: Option<(index::EvictionRank, Victim)> = None;
    volume.own().iter().for_each(|own| own.want_seal());
    // While holes fail on a file system that takes them, chunks would go and give no room.
    let gives_room = |lane: &&Arc<Lane>| !lane.has_no_holes() || lane.never_has_holes();
    for lane in volume.lanes().held().filter(gives_room).filter(|lane| of(lane)) {
        let sample_every = (lane.table().len() / SURVEY_ENTRIES).max(1) as usize;
        let (mut sealed, hot_since) = survey(lane, refused, sample_every).ok()?;
        if lane.role == LaneRole::Adopted && lane.never_has_holes() {
            // Only the last segment's space can be given back: the file is cut off before it.
            let last = lane.state().ok()?.segments.iter().filter(|(_, s)| s.is_in_use()).last().map(|(n, _)| n);
            sealed.retain(|s| Some(s.segment) == last);
        }
        // An empty segment goes first: nothing is lost with it. A sample may overlook a chunk; the
        // counts in shared memory do not.
        let live = |s: &SegmentSummary| lane.shared().and_then(|l| l.segment(s.segment)).map_or(1, |v| v.live_chunks);
        let expired = expired_segments(lane);
        let is_dead = |s: &&SegmentSummary| s.live_chunks == 0 && (live(s) == 0 || expired.contains(&s.segment));
        let empty = sealed.iter().find(is_dead).map(|s| s.segment);
        let Some(segment) = empty.or_else(|| policy.victim(&sealed)) else { continue };
        let rank = match sealed.iter().find(|s| s.segment == segment) {
            Some(summary) if summary.live_chunks > 0 => policy.rank(summary),
            _ => index::EvictionRank(0, 0),
        };
        if best.as_ref().is_none_or(|(least, _)| rank < *least) {
            best = Victim::of(lane, segment, hot_since).map(|victim| (rank, victim)).or(best);
        }
    }
    best.map(|(_, victim)| victim)
}

/// The policy for whole segments. The policy for chains knows only the chunks of the own lane:
/// where there are other lanes, objects only, or no holes, segments go in the order of use.
fn policy_of(volume: &Volume) -> Reclaim {
    let thins = |lane: &Arc<Lane>| {
        let holds = |s: &LaneState| s.usage.chain().is_some_and(|c| c.held_bytes() > 0) && !lane.has_no_holes();
        lane.role == LaneRole::Own && lane.state().is_ok_and(|s| holds(&s))
    };
    let is_for_chains = volume.own().is_some_and(|own| policy::is_chosen(&own));
    if is_for_chains && !volume.lanes().held().all(thins) { Reclaim::Lru } else { volume.ctx.options.policy }
}

fn survey(lane: &Lane, refused: &HashSet<(u32, u32)>, sample_every: usize) -> Result<(Vec<SegmentSummary>, u32)> {
    let state = lane.state()?;
    let table = lane.table();
    let options = SurveyOptions {
        segments: state.segments.len() as u32,
        hot_percent: HOT_PERCENT,
        sample_every,
        offset: state.usage.tick() as usize,
        now_s: lane.ctx.now_s(),
    };
    let survey = Survey::take(&table, state.usage.recency(), &options);
    let summary = |(number, segment): (u32, &Segment)| {
        // A late write of a put must not land in another use of the segment.
        if !segment.is_at_rest() || refused.contains(&(lane.number, number)) {
            return None;
        }
        let found = survey.segments.binary_search_by_key(&number, |s| s.segment).ok();
        let found = found.and_then(|i| survey.segments.get(i)).copied().unwrap_or_default();
        Some(SegmentSummary { segment: number, first_seq: segment.sequences().0, ..found })
    };
    let sealed = state.segments.iter().filter_map(summary).collect();
    Ok((sealed, survey.hot_since))
}

/// Reclaims one segment; `false` where that cannot be done now, for a lease for example.
fn reclaim(volume: &Volume, victim: &Victim) -> Result<bool> {
    let lane = &victim.lane;
    let stuck = lane.state()?.segments.condemned();
    let is_leased = || lane.is_leased(victim.segment, victim.epoch);
    if stuck >= MOST_STUCK || is_leased() || lane.is_writing(victim.segment) {
        return Ok(false);
    }
    let own = volume.own().ok_or_else(|| Error::new(ErrorKind::Closed, "the drive is closed"))?;
    let records = journal::known_records(lane, (victim.segment, victim.epoch))?;
    let mut plan = plan(volume, victim, &records)?;
    let mut copies = copy(volume, &own, victim, &mut plan)?;
    // A removal of this process either waits until the entries are gone, or comes before the
    // segment is condemned.
    let _one = lane.erasing.lock();
    // Looked at once more, because lookups miss what is condemned even if that is taken back at
    // once for a lease.
    if is_leased() || lane.is_writing(victim.segment) || !condemn(volume, victim)? {
        return Ok(false);
    }
    // Copies get headers only now: of two slots of which an entry names one, the original lies in a
    // condemned segment, and removals, also of other processes, wait for that.
    let dropped = &mut plan.drop;
    let completed = moves::complete(&own, lane, &mut copies, dropped);
    let has_moved = !copies.is_empty();
    let published = completed.and_then(|()| moves::publish_copies(volume, &own, lane, copies, dropped));
    let now_s = volume.ctx.now_s();
    // A key that the own lane has too was not moved, and is not lost.
    let is_elsewhere = |r: &Record| lane.number != own.number && own.get(&r.key).is_some();
    let is_live = |r: &&Record| r.expiry_s == 0 || u64::from(r.expiry_s) > now_s;
    // Its copy there may not be durable yet.
    let has_moved = has_moved || plan.drop.iter().any(is_elsewhere);
    let given_up = || plan.drop.iter().filter(|r: &&Record| !is_elsewhere(r));
    volume.ctx.counters.evicted.add(given_up().filter(is_live).count() as u64);
    volume.ctx.evicted.push(given_up());
    published?;
    finish(volume, victim, &records, has_moved).map(|()| true)
}

/// Frees a condemned segment. Where that fails it stays condemned, with slots that may be readable,
/// and is tried again at the next scan or removal.
fn finish(volume: &Volume, victim: &Victim, records: &[Record], has_moved: bool) -> Result<()> {
    let lane = &victim.lane;
    if let Some(own) = volume.own().filter(|_| has_moved) {
        journal::flush_urgently(&own, Instant::now() + volume.ctx.options.io_timeout * 2)?;
    }
    write_free(lane, victim).or_else(|_| write_free(lane, victim))?;
    let is_given_back = erase(lane, victim)?;
    forget(lane, victim, records)?;
    hand_over(volume, victim, is_given_back)
}

/// Frees the segments of a lane that could not be freed before. The caller holds the lane's
/// `erasing` lock.
///
/// # Errors
/// Where one still cannot be freed.
pub(super) fn finish_condemned(volume: &Volume, lane: &Arc<Lane>) -> Result<()> {
    let condemned: Vec<u32> = {
        let state = lane.state()?;
        state.segments.iter().filter(|(_, s)| s.phase() == SegmentPhase::Condemned).map(|(n, _)| n).collect()
    };
    for victim in condemned.into_iter().filter_map(|n| Victim::of(lane, n, 0)) {
        if lane.is_writing(victim.segment) {
            return Err(Error::new(ErrorKind::Busy, "a write to a segment has not ended").at(&lane.dir));
        }
        let records = journal::known_records(lane, (victim.segment, victim.epoch))?;
        finish(volume, &victim, &records, true)?;
    }
    Ok(())
}

/// Condemns a segment: nothing in it is found or leased from here on. `false` where it is leased,
/// or not sealed and at rest.
fn condemn(volume: &Volume, victim: &Victim) -> Result<bool> {
    let mut state = victim.lane.state()?;
    if !state.segments.is_at_rest(victim.segment, victim.epoch) {
        return Ok(false);
    }
    if let Some(shared) = victim.lane.shared() {
        match volume.ctx.with_lease_env(|env| shared.try_condemn(victim.segment, env)) {
            // Beyond the shared file's range nobody can have a lease.
            Ok(()) | Err(index::CondemnRefused::Invalid) => {}
            Err(_) => return Ok(false),
        }
    }
    Ok(state.segments.condemn(victim.segment, victim.epoch))
}

/// Writes the slots of `plan.keep` again, except on a drive that is being drained; those that are
/// not copied go to `plan.drop`.
///
/// # Errors
/// Where the drive is bad, or a second one is not read or written in time: it would be the same
/// with all of them, and what lies on it may be read again when it is back.
fn copy(volume: &Volume, own: &Arc<Lane>, victim: &Victim, plan: &mut Plan) -> Result<Vec<moves::Copy>> {
    if volume.is_draining() {
        plan.drop.append(&mut plan.keep);
    }
    let (mut copies, mut is_late) = (Vec::new(), false);
    for record in std::mem::take(&mut plan.keep) {
        match moves::copy_slot(volume, own, &victim.lane, &record) {
            Ok(Some(copy)) => copies.push(copy),
            Ok(None) => plan.drop.push(record),
            Err(e) if e.kind() == ErrorKind::TimedOut && is_late => return Err(e),
            Err(e) if matches!(e.kind(), ErrorKind::Io | ErrorKind::TimedOut) && !volume.is_healthy() => return Err(e),
            Err(e) => {
                is_late |= e.kind() == ErrorKind::TimedOut;
                tracing::debug!(error = %e, "a chunk worth keeping was not moved");
                plan.drop.push(record);
            }
        }
    }
    Ok(copies)
}

fn plan(volume: &Volume, victim: &Victim, records: &[Record]) -> Result<Plan> {
    let lane = &victim.lane;
    let table = lane.table();
    let mut plan = Plan::default();
    let mut slots: Vec<(ChunkSummary, Record)> = Vec::new();
    for record in records {
        let Some((entry, slot)) = table.get_slot(&record.key) else { continue };
        if (entry.seq, entry.segment, entry.epoch) != (record.sequence, victim.segment, victim.epoch) {
            continue;
        }
        if record.length == 0 || !volume.shows(&entry) {
            plan.drop.push(*record);
            continue;
        }
        let (last_touch, uses) = lane.state()?.usage.recency().get(slot);
        let summary = ChunkSummary {
            tag: 0,
            seq: record.sequence,
            last_touch,
            uses,
            depth: record.depth,
            bytes: u64::from(record.pages) * PAGE_BYTES as u64,
        };
        slots.push((summary, *record));
    }
    slots.sort_unstable_by_key(|(_, record)| record.page);
    let summaries: Vec<ChunkSummary> = slots.iter().map(|(summary, _)| *summary).collect();
    let policy = policy_of(volume);
    let budget_bytes = write_budget(volume, lane, policy);
    let wanted = policy.plan_keep(&summaries, budget_bytes, victim.hot_since);
    let mut slots: Vec<Option<Record>> = slots.into_iter().map(|(_, record)| Some(record)).collect();
    plan.keep = wanted.into_iter().filter_map(|i| slots.get_mut(i).and_then(Option::take)).collect();
    plan.drop.extend(slots.into_iter().flatten());
    Ok(plan)
}

/// Bytes of a victim that may be written again. Where chunks are evicted singly, what the emptiest
/// segment still holds is what was worth keeping for longest: all of the budget that was not used
/// so far may be spent on it.
fn write_budget(volume: &Volume, lane: &Lane, policy: Reclaim) -> u64 {
    let (share, counters) = (volume.ctx.options.reclaim_write_budget, &volume.ctx.counters);
    let of_segment = (lane.segment_bytes() as f64 * share) as u64;
    if policy != Reclaim::Prefix {
        return of_segment;
    }
    let saved = (counters.data_bytes_written.get() as f64 * share) as u64;
    of_segment.max(saved.saturating_sub(counters.moved_bytes.get()).min(lane.segment_bytes()))
}

/// Marks the region free for the next epoch, durably: from here on a recovery does not find the
/// segment's records.
fn write_free(lane: &Lane, victim: &Victim) -> Result<()> {
    let header = RegionHeader {
        lane: *lane.id(),
        segment: victim.segment,
        epoch: victim.epoch.wrapping_add(1),
        state: RegionState::Free,
        count: 0,
        min_sequence: 0,
        max_sequence: 0,
        sealed_ms: lane.ctx.options.clock.unix_ms(),
        records_sum: 0,
    };
    let doubts = lane.state()?.pending.doubts();
    lane.write(&lane.index, lane.region_offset(victim.segment), aligned(&header.encode())?)?;
    lane.flush_index_since(doubts)
}

/// Makes all slots of the segment unreadable; whether its space was given back. Where that fails,
/// the segment stays condemned and keeps its entries, so that removals find them.
fn erase(lane: &Lane, victim: &Victim) -> Result<bool> {
    let outcome = lane.wipe_segment(victim.segment);
    if outcome.as_ref().is_err_and(|e| e.kind() == ErrorKind::TimedOut) {
        // The write may still be done, and must not land in a later use of the segment.
        lane.state()?.segments.give_up(victim.segment);
    }
    outcome
}

/// Takes the segment's entries out of the table.
fn forget(lane: &Lane, victim: &Victim, records: &[Record]) -> Result<()> {
    let shared = lane.shared();
    shared.iter().for_each(|s| s.note_erasure());
    let mut state = lane.state()?;
    let table = lane.table();
    // What recovery did not enter, or a clear took out since, is in no list of partial chunks.
    let floor = state.lists_floor;
    let not_entered: HashSet<u32> = state.segments.gone_at_opening(victim.segment).iter().copied().collect();
    let is_listed = |r: &Record| r.sequence > floor && !not_entered.contains(&r.page);
    for record in records {
        let is_here = |e: &index::Entry| (e.segment, e.epoch, e.seq) == (victim.segment, victim.epoch, record.sequence);
        if table.get_marked(&record.key).is_some_and(|(e, ..)| is_here(&e))
            && state.leave(&table, shared.as_ref(), (&record.key, record.sequence))?.is_some()
        {
            policy::note_dropped(&mut state, &record.key);
        }
        // A partial chunk also leaves the list below the chunk before it.
        if let Some(length) = partial_length(record, state.chunk_tokens()).filter(|_| is_listed(record)) {
            table.drop_partial(&record.parent, length)?;
        }
    }
    Ok(())
}

/// The segment is empty. Without holes it keeps its space, for its next use.
fn hand_over(volume: &Volume, victim: &Victim, is_given_back: bool) -> Result<()> {
    let lane = &victim.lane;
    let mut state = lane.state()?;
    let epoch = state.segments.free(victim.segment);
    // Before the lane's lock is free: a put may open the segment at once, and what it says of it
    // must not be overwritten.
    if let Some(shared) = lane.shared() {
        drop(shared.set_live(victim.segment, 0, 0));
        drop(shared.set_segment(victim.segment, SegmentState::Free, epoch));
    }
    if !is_given_back && lane.role == LaneRole::Own {
        state.segments.keep_space(victim.segment, lane.never_has_holes());
    }
    drop(state);
    volume.ctx.counters.reclaimed.add(1);
    lane.progress.notify_all();
    Ok(())
}
