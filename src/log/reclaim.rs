//! Giving up a segment so that its space can be used again.
//!
//! The order is the protocol, each step a function of its own:
//! 1. *move* what the policy wants to keep, with its sequence, to the open segment, while all of it is still served; the copies are
//!    flushed before anything speaks of them;
//! 2. *condemn*: what is left is served no more, and nobody gets a lease; a segment with a lease is left alone. Lookups and loads
//!    look at the same mark, so that a lookup finds nothing that a load would not;
//! 3. *carry on* tombstones and clears that older recoverable records still need, and write new ones for keys whose newest version
//!    goes while an older one could still be recovered;
//! 4. *flush* what was written, and whatever else was stored and is not durable yet;
//! 5. *free*: the region says so, durably;
//! 6. *forget*: only now the entries leave the table, because other lanes take an entry's absence for its being unrecoverable;
//! 7. the segment may be overwritten, or its space given back.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use super::chain;
use super::grant;
use super::journal;
use super::lane::{Lane, Role};
use super::moves;
use super::put::aligned;
use super::remove::{self, CONTROL_RECORDS};
use super::seal;
use super::state::{Phase, Segment, State};
use super::volume::Volume;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::layout::SlotLayout;
use crate::format::record::{KeyKind, Record, RecordKind};
use crate::format::sealed::{self, RegionHeader};
use crate::format::slot::SlotHeader;
use crate::index::{
    self, ChunkSummary, Entry, EntryKind, ReclaimContext, SegmentState, SegmentSummary, Survey, SurveyOptions,
};
use crate::key::ChunkKey;

/// Share of the live bytes that counts as hot, in percent.
const HOT_PERCENT: u8 = 30;
/// Segments that could not be freed, at which a lane tries no others: a drive that refuses writes must not cost what it can still read.
const MOST_STUCK: usize = 4;
/// Entries looked at for a survey; larger tables are sampled.
const SURVEY_ENTRIES: u64 = 50_000;

/// A segment being reclaimed.
pub(super) struct Victim {
    pub(super) lane: Arc<Lane>,
    pub(super) segment: u32,
    pub(super) epoch: u32,
    context: ReclaimContext,
    /// It is given up to tidy up: the tombstones that it needs may take only a part of the open segment.
    tidy: bool,
}

/// What becomes of a victim's records.
#[derive(Default)]
struct Plan {
    /// Slots worth writing again, the most wanted first: the records of each.
    keep: Vec<Vec<Record>>,
    /// Puts that are current and go.
    drop: Vec<Record>,
    /// Puts that something hides that no record says yet: they must go on hiding what is older than they.
    hidden: Vec<Record>,
    /// Tombstones and clears.
    hiding: Vec<Record>,
}

/// Reclaims the segment that the policy gives up first and that nobody leases; whether there was one.
pub(super) fn reclaim_one(volume: &Volume) -> bool {
    let mut refused = HashSet::new();
    while let Some(victim) = choose(volume, &refused) {
        match reclaim(volume, &victim) {
            Ok(true) => return true,
            Ok(false) => {}
            Err(e) => {
                tracing::warn!(lane = %victim.lane.dir.display(), segment = victim.segment, error = %e, "not reclaimed");
                if volume.ctx.is_closed() {
                    return false;
                }
            }
        }
        refused.insert((victim.lane.number, victim.segment));
    }
    false
}

/// Reclaims what holds nothing any more in the held lanes of a role: adopted ones can be removed then. How many segments were
/// tried.
pub(super) fn reclaim_dead(volume: &Volume, role: Role) -> usize {
    let mut count = 0;
    for lane in volume.lanes().held().filter(|l| l.role == role) {
        let Ok((sealed, context)) = survey(lane, &HashSet::new(), 1) else { continue };
        for dead in sealed.iter().filter(|s| s.live_chunks == 0) {
            let Ok(epoch) = lane.state().map(|mut s| s.segment(dead.segment).map_or(0, |s| s.epoch)) else { continue };
            let victim =
                Victim { lane: Arc::clone(lane), segment: dead.segment, epoch, context, tidy: role == Role::Own };
            if let Err(e) = reclaim(volume, &victim) {
                tracing::debug!(lane = %lane.dir.display(), error = %e, "an empty segment was not reclaimed");
                break;
            }
            count += 1;
        }
    }
    count
}

/// Reclaims the segments of which everything has expired, without waiting until their room is needed.
pub(super) fn reclaim_expired(volume: &Volume) {
    for lane in volume.lanes().held() {
        for segment in expired_segments(lane) {
            let Ok(epoch) = lane.state().map(|mut s| s.segment(segment).map_or(0, |s| s.epoch)) else { continue };
            let victim =
                Victim { lane: Arc::clone(lane), segment, epoch, context: ReclaimContext::default(), tidy: false };
            if let Err(e) = reclaim(volume, &victim) {
                tracing::debug!(lane = %lane.dir.display(), error = %e, "an expired segment was not reclaimed");
                return;
            }
        }
    }
}

/// Sealed segments of which everything has expired.
fn expired_segments(lane: &Lane) -> Vec<u32> {
    let now_s = lane.ctx.now_s();
    let Ok(state) = lane.state() else { return Vec::new() };
    let segments = (0u32..).zip(&state.segments);
    let over = segments.filter(|(_, s)| s.phase == Phase::Sealed && s.pending == 0 && s.has_expired(now_s));
    over.map(|(number, _)| number).collect()
}

/// The next victim among the sealed segments of all lanes that this process holds.
fn choose(volume: &Volume, refused: &HashSet<(u32, u32)>) -> Option<Victim> {
    let policy = policy_of(volume)?;
    let mut best: Option<(index::Rank, Victim)> = None;
    for lane in volume.lanes().held() {
        let sample_every = (lane.table().len() / SURVEY_ENTRIES).max(1) as usize;
        let (sealed, context) = survey(lane, refused, sample_every).ok()?;
        // What holds nothing goes first: nothing is lost with it. A sample may overlook a chunk; the shared counts do not.
        let live = |s: &SegmentSummary| lane.shared().and_then(|l| l.segment(s.segment)).map_or(1, |v| v.live_chunks);
        let expired = expired_segments(lane);
        let is_dead = |s: &&SegmentSummary| s.live_chunks == 0 && (live(s) == 0 || expired.contains(&s.segment));
        let empty = sealed.iter().find(is_dead).map(|s| s.segment);
        let Some(segment) = empty.or_else(|| index::victim(&*policy, &sealed, &context)) else { continue };
        let rank = match sealed.iter().find(|s| s.segment == segment) {
            Some(summary) if summary.live_chunks > 0 => policy.rank(summary, &context),
            _ => index::Rank(0, 0),
        };
        let Ok(epoch) = lane.state().map(|mut s| s.segment(segment).map_or(0, |s| s.epoch)) else { continue };
        if best.as_ref().is_none_or(|(least, _)| rank < *least) {
            best = Some((rank, Victim { lane: Arc::clone(lane), segment, epoch, context, tidy: false }));
        }
    }
    best.map(|(_, victim)| victim)
}

/// The policy for whole segments. That for chains looks after the chunks of one lane; where there are others, objects, or no holes,
/// the order is that of use.
fn policy_of(volume: &Volume) -> Option<Box<dyn index::Policy>> {
    let thins = |lane: &Arc<Lane>| {
        let holds = |s: &State| s.chain.as_ref().is_some_and(|c| c.held_bytes() > 0) && !s.no_holes;
        lane.role == Role::Own && lane.state().is_ok_and(|s| holds(&s))
    };
    let is_for_chains = volume.own().is_some_and(|own| chain::is_chosen(&own));
    let name = if is_for_chains && !volume.lanes().held().all(thins) { "lru" } else { &volume.ctx.options.policy };
    index::by_name(name)
}

fn survey(
    lane: &Lane,
    refused: &HashSet<(u32, u32)>,
    sample_every: usize,
) -> Result<(Vec<SegmentSummary>, ReclaimContext)> {
    let state = lane.state()?;
    let table = lane.table();
    let options = SurveyOptions {
        segments: state.segments.len() as u32,
        hot_percent: HOT_PERCENT,
        sample_every,
        offset: state.tick as usize,
        now_s: lane.ctx.now_s(),
    };
    let survey = Survey::take(&table, &state.recency, &options);
    let summary = |(number, segment): (usize, &Segment)| {
        let number = number as u32;
        // What a put still writes, late as it may be, must not land in another use of the segment.
        if segment.phase != Phase::Sealed || segment.pending > 0 || refused.contains(&(lane.number, number)) {
            return None;
        }
        let found = survey.segments.binary_search_by_key(&number, |s| s.segment).ok();
        let found = found.and_then(|i| survey.segments.get(i)).copied().unwrap_or_default();
        Some(SegmentSummary { segment: number, first_seq: segment.min_seq, ..found })
    };
    let sealed = state.segments.iter().enumerate().filter_map(summary).collect();
    Ok((sealed, ReclaimContext { now: state.tick, hot_since: survey.hot_since }))
}

/// Reclaims one segment; false if somebody leases it.
fn reclaim(volume: &Volume, victim: &Victim) -> Result<bool> {
    let stuck = victim.lane.state()?.segments.iter().filter(|s| s.phase == Phase::Condemned).count();
    if stuck >= MOST_STUCK || is_leased(volume, victim) || is_afloat(victim) {
        return Ok(false);
    }
    let records = seal::known_records(&victim.lane, (victim.segment, victim.epoch))?;
    let mut plan = plan(volume, victim, &records)?;
    let moved = keep(volume, victim, &mut plan)?;
    // Looked at once more, because lookups miss what is condemned even if that is taken back at once for a lease.
    if is_leased(volume, victim) || !condemn(volume, victim)? {
        return Ok(false);
    }
    if let Err(e) = empty(volume, victim, (plan, moved)) {
        pardon(victim)?;
        return Err(e);
    }
    // A write that failed may have reached the drive: a crash could free the segment. It stays condemned, because nothing in it is
    // durable any more, until the next opening finds out.
    write_free(&victim.lane, victim).or_else(|_| write_free(&victim.lane, victim))?;
    let again = |e: Error| if e.kind() == ErrorKind::TimedOut { Err(e) } else { mark_free(&victim.lane, victim) };
    if let Err(e) = mark_free(&victim.lane, victim).or_else(again) {
        // Only a rebuild that has lost the index would have needed it. Late, it must not land in a later use of the segment.
        if e.kind() == ErrorKind::TimedOut
            && let Some(segment) = victim.lane.state()?.segment(victim.segment)
        {
            segment.retired = true;
        }
        tracing::debug!(lane = %victim.lane.dir.display(), error = %e, "a free segment was not marked");
    }
    forget(&victim.lane, victim, &records)?;
    hand_over(volume, victim)?;
    Ok(true)
}

/// Whether a write of its region timed out and may still be done, over what says that the segment is free.
fn is_afloat(victim: &Victim) -> bool {
    let region = victim.lane.region_offset(victim.segment);
    victim.lane.afloat.is_claimed(&(region..region + victim.lane.superblock.region_bytes))
}

/// Whether it would be condemned in vain.
fn is_leased(volume: &Volume, victim: &Victim) -> bool {
    let shared = victim.lane.shared();
    shared.is_some_and(|s| volume.ctx.with_lease_env(|env| s.is_leased(victim.segment, victim.epoch, env)))
}

/// Nobody finds anything in it or gets a lease on it from here on, unless somebody has one.
fn condemn(volume: &Volume, victim: &Victim) -> Result<bool> {
    let mut state = victim.lane.state()?;
    let Some(segment) = state.segment(victim.segment) else { return Ok(false) };
    if segment.phase != Phase::Sealed || segment.epoch != victim.epoch {
        return Ok(false);
    }
    if let Some(shared) = victim.lane.shared() {
        match volume.ctx.with_lease_env(|env| shared.try_condemn(victim.segment, env)) {
            // Beyond the shared file's range nobody can have a lease.
            Ok(()) | Err(index::CondemnRefused::Invalid) => {}
            Err(_) => return Ok(false),
        }
    }
    segment.phase = Phase::Condemned;
    Ok(true)
}

/// It could not be reclaimed and stays as it was. What was moved or carried on meanwhile lies in two places, which is harmless.
fn pardon(victim: &Victim) -> Result<()> {
    if let Some(segment) = victim.lane.state()?.segment(victim.segment) {
        segment.phase = Phase::Sealed;
    }
    if let Some(shared) = victim.lane.shared() {
        drop(shared.set_segment(victim.segment, SegmentState::Sealed, victim.epoch));
    }
    Ok(())
}

/// Writes again what is worth it, but not on a drive that drains; the rest is dropped. Whether anything was written.
fn keep(volume: &Volume, victim: &Victim, plan: &mut Plan) -> Result<bool> {
    let own = volume.own().ok_or_else(|| Error::new(ErrorKind::Closed, "the drive is closed"))?;
    if volume.is_draining() {
        plan.drop.extend(std::mem::take(&mut plan.keep).into_iter().flatten());
    }
    let mut copies = Vec::new();
    for slot in std::mem::take(&mut plan.keep) {
        match moves::copy_slot(&own, victim, slot.clone()) {
            Ok(Some(copy)) => copies.push(copy),
            Ok(None) => plan.drop.extend(slot),
            Err(e) => {
                tracing::debug!(error = %e, "a chunk worth keeping was not moved");
                plan.drop.extend(slot);
            }
        }
    }
    if copies.is_empty() {
        return Ok(false);
    }
    plan.drop.extend(moves::publish_copies(volume, &own, victim, copies)?);
    Ok(true)
}

/// Carries on what must not be lost, and makes that and what was moved durable.
fn empty(volume: &Volume, victim: &Victim, (plan, mut written): (Plan, bool)) -> Result<()> {
    let own = volume.own().ok_or_else(|| Error::new(ErrorKind::Closed, "the drive is closed"))?;
    let now_s = volume.ctx.now_s();
    let evicted = plan.drop.iter().filter(|r| r.expiry_s == 0 || r.expiry_s > now_s).count() as u64;
    volume.ctx.evicted.push(&plan.drop);
    let carried = carry_on(volume, victim, plan);
    let room = own.state().map(|state| {
        let (pages, records) = (remove::control_pages(carried.len()), carried.len());
        let (certain, of_records) = state.certain_control_room();
        let spares_room = pages <= certain / 2 && records <= of_records / 2;
        state.has_control_room(pages, records) && (!victim.tidy || spares_room)
    })?;
    if !room {
        return Err(Error::new(ErrorKind::NoSpace, "no room for the tombstones that must be carried on").at(&own.dir));
    }
    for records in carried.chunks(CONTROL_RECORDS) {
        remove::write_control(volume, &own, records.to_vec(), Instant::now())?;
        written = true;
    }
    // What goes may be superseded by a version that is not durable yet: were that lost in a crash together with the segment, what
    // both had hidden would come back.
    let state = own.state()?;
    let awaits = state.durable < state.logged;
    drop(state);
    if written || awaits {
        journal::flush_urgently(&own, Instant::now() + volume.ctx.options.io_timeout * 2)?;
    }
    volume.ctx.counters.evicted.add(evicted);
    Ok(())
}

fn plan(volume: &Volume, victim: &Victim, records: &[Record]) -> Result<Plan> {
    let lane = &victim.lane;
    let table = lane.table();
    let mut plan = Plan::default();
    // A pack of objects is one slot with several records.
    let mut slots: BTreeMap<u32, (ChunkSummary, Vec<Record>)> = BTreeMap::new();
    for record in records {
        if record.kind != RecordKind::Put {
            plan.hiding.push(*record);
            continue;
        }
        let Some((entry, slot)) = table.get_slot(&record.key) else {
            plan.hidden.push(*record);
            continue;
        };
        let here = (entry.seq, entry.segment, entry.epoch) == (record.sequence, victim.segment, victim.epoch);
        if !here || !entry.kind.is_served() {
            if remove::is_unwritten(&entry) || here && entry.kind == EntryKind::Going {
                plan.hidden.push(*record);
            }
            continue;
        }
        if record.length == 0 || !volume.is_newest(&record.key, &entry) {
            plan.drop.push(*record);
            continue;
        }
        let (last_touch, uses) = lane.state()?.recency.get(slot);
        let seen = ChunkSummary {
            tag: 0,
            seq: record.sequence,
            last_touch,
            uses,
            depth: record.depth,
            bytes: u64::from(record.pages) * PAGE_BYTES as u64,
        };
        let (summary, all) = slots.entry(record.page).or_insert((seen, Vec::new()));
        summary.last_touch = summary.last_touch.max(last_touch);
        summary.uses = summary.uses.max(uses);
        all.push(*record);
    }
    let summaries: Vec<ChunkSummary> = slots.values().map(|(summary, _)| *summary).collect();
    let policy = policy_of(volume);
    let budget_bytes = write_budget(volume, lane, policy.as_deref());
    let wanted = policy.map(|p| index::plan_keep(&*p, &summaries, budget_bytes, &victim.context)).unwrap_or_default();
    let mut slots: Vec<Vec<Record>> = slots.into_values().map(|(_, records)| records).collect();
    plan.keep = wanted.into_iter().filter_map(|i| slots.get_mut(i).map(std::mem::take)).collect();
    plan.drop.extend(slots.into_iter().flatten());
    Ok(plan)
}

/// Bytes of a victim that may be written again. Where chunks are given up singly, what the emptiest segment still holds is what has
/// been worth keeping for the longest time: all that has been saved so far may be spent on it.
fn write_budget(volume: &Volume, lane: &Lane, policy: Option<&dyn index::Policy>) -> u64 {
    let (share, counters) = (volume.ctx.options.reclaim_write_budget, &volume.ctx.counters);
    let of_segment = (lane.segment_bytes() as f64 * share) as u64;
    if policy.is_none_or(|p| p.name() != index::Policy::name(&index::Emptiest)) {
        return of_segment;
    }
    let saved = (counters.data_bytes_written.get() as f64 * share) as u64;
    of_segment.max(saved.saturating_sub(counters.moved_bytes.get()).min(lane.segment_bytes()))
}

/// The records that must not be lost with the segment.
fn carry_on(volume: &Volume, victim: &Victim, plan: Plan) -> Vec<Record> {
    let mut carried = Vec::new();
    let mut seen = HashSet::new();
    let cleared = logged_clear(volume);
    for record in plan.hiding {
        let needed = match record.kind {
            RecordKind::Clear => record.sequence >= cleared && clear_is_needed(volume, victim, record.sequence),
            _ => record.sequence > cleared && tombstone_is_needed(volume, victim, &record),
        };
        if needed && seen.insert((record.key, record.sequence)) {
            carried.push(record);
        }
    }
    for record in plan.drop.into_iter().chain(plan.hidden) {
        // A store of an older version that has begun may end after this one has gone.
        let hides = victim.has_older(volume, &record) || volume.is_being_stored(&record.key);
        let orphaned = record.sequence > cleared && hides;
        if orphaned && seen.insert((record.key, record.sequence)) {
            // With the sequence of the version that goes: it hides all older ones and no newer one.
            let hide = Record::new(RecordKind::Tombstone, KeyKind::Chain, record.key);
            carried.push(Record { sequence: record.sequence, tenant: record.tenant, ..hide });
        }
    }
    carried
}

/// Up to which sequence a record of the held lanes says that everything is cleared. The mark that processes share comes before any
/// record does, and is lost with a crash until there is one.
fn logged_clear(volume: &Volume) -> u64 {
    let of = |lane: &Arc<Lane>| lane.state().ok().and_then(|state| state.clear).map_or(0, |(sequence, _)| sequence);
    volume.lanes().held().map(of).max().unwrap_or(0)
}

/// Whether a tombstone is still what hides something.
fn tombstone_is_needed(volume: &Volume, victim: &Victim, record: &Record) -> bool {
    let newest = victim.lane.get(&record.key);
    let superseded = newest.is_some_and(|e| e.seq > record.sequence && !remove::is_unwritten(&e));
    !superseded && (victim.has_older(volume, record) || volume.is_being_stored(&record.key))
}

impl Victim {
    fn has_older(&self, volume: &Volume, record: &Record) -> bool {
        let record = Record { segment: self.segment, epoch: self.epoch, ..*record };
        super::state::entry_of(&record).is_some_and(|entry| has_older(volume, &self.lane, &entry, self.segment))
    }
}

/// Whether a version of the key up to the entry's, which is of the lane `of`, could be recovered from somewhere else; of its own
/// lane the segment `except` does not count. What the versions in another process's table hide is known to that process alone,
/// and a newer one there may not be durable yet: any entry stands for an older version.
pub(super) fn has_older(volume: &Volume, of: &Lane, entry: &Entry, except: u32) -> bool {
    volume.lanes().all.iter().any(|lane| {
        let is_its = lane.number == of.number;
        let except = if is_its { except } else { u32::MAX };
        let shadowed = lane.is_held() && lane.state().is_ok_and(|state| state.has_older(&entry.key, entry.seq, except));
        let in_table = || {
            lane.get(&entry.key).is_some_and(|e| {
                let is_here = is_its && (e.segment, e.epoch) == (entry.segment, entry.epoch);
                !lane.is_held() || e.kind != EntryKind::Tombstone && e.seq <= entry.seq && !is_here
            })
        };
        shadowed || in_table()
    })
}

/// A clear is needed while anything that it hides could be recovered; of other processes' lanes that is not known.
fn clear_is_needed(volume: &Volume, victim: &Victim, sequence: u64) -> bool {
    volume.lanes().all.iter().any(|lane| {
        lane.state().map_or(true, |state| {
            state.segments.iter().enumerate().any(|(number, s)| {
                let is_victim = lane.number == victim.lane.number && number as u32 == victim.segment;
                let empty = matches!(s.phase, Phase::Absent | Phase::Ready);
                !is_victim && !empty && (s.min_seq < sequence || s.pending > 0)
            })
        })
    })
}

/// Marks the region free for the next epoch, durably: from here on a recovery does not find the segment's records.
fn write_free(lane: &Lane, victim: &Victim) -> Result<()> {
    let header = RegionHeader {
        lane: *lane.id(),
        segment: victim.segment,
        epoch: victim.epoch.wrapping_add(1),
        state: sealed::SegmentState::Free,
        count: 0,
        min_sequence: 0,
        max_sequence: 0,
        sealed_ms: lane.ctx.options.clock.unix_ms(),
    };
    let index = Arc::clone(&lane.index);
    journal::write(lane, &index, lane.region_offset(victim.segment), aligned(&header.encode())?)?;
    journal::flush_file(lane, &index)
}

/// Says on the segment's last page, which is written last of all, that the slots in it are over: a rebuild that has no index left
/// must not find them, because what had hidden some of them may be dropped from now on.
fn mark_free(lane: &Lane, victim: &Victim) -> Result<()> {
    let layout = SlotLayout::header_only(0);
    let page = (lane.segment_bytes() / PAGE_BYTES as u64) as u32 - layout.pages();
    let header = SlotHeader {
        created_ms: lane.ctx.options.clock.unix_ms(),
        segment: victim.segment,
        epoch: victim.epoch.wrapping_add(1),
        page,
        pages: layout.pages(),
        lane: *lane.id(),
        ..SlotHeader::new(KeyKind::Control, ChunkKey([0; 32]))
    };
    let (bytes, _) = header.encode(&layout)?;
    journal::write(lane, &Arc::clone(&lane.data), lane.slot_offset(victim.segment, page), aligned(&bytes)?)
}

/// Takes the segment's entries out of the table, and forgets its old versions.
fn forget(lane: &Lane, victim: &Victim, records: &[Record]) -> Result<()> {
    let mut state = lane.state()?;
    let (table, shared) = (lane.table(), lane.shared());
    for record in records.iter().filter(|r| r.kind != RecordKind::Clear) {
        state.unshadow(&record.key, victim.segment, record.sequence);
        let Some(entry) = table.get(&record.key) else {
            drop_partial(&state, &table, record)?;
            continue;
        };
        if (entry.segment, entry.epoch, entry.seq) != (victim.segment, victim.epoch, record.sequence) {
            continue;
        }
        if let Some((old, slot)) = table.remove_if(&record.key, record.sequence)? {
            state.gone(shared.as_ref(), &old);
            state.recency.forget(slot);
            drop_partial(&state, &table, record)?;
            chain::note_dropped(&mut state, &record.key);
        }
    }
    if state.clear.is_some_and(|(_, segment)| segment == victim.segment) {
        state.clear = None;
    }
    Ok(())
}

/// The chunk of the record, which may be a partial one, is not listed any more below the chunk before it.
fn drop_partial(state: &State, table: &index::Table, record: &Record) -> Result<()> {
    match super::state::partial_length(record, state.chunk_tokens) {
        Some(length) => table.drop_partial(&record.parent, length).map(drop),
        None => Ok(()),
    }
}

/// The segment is empty: the own lane uses it again, the space of any other is given back.
fn hand_over(volume: &Volume, victim: &Victim) -> Result<()> {
    let lane = &victim.lane;
    let reuse = {
        let mut state = lane.state()?;
        let Some(segment) = state.segment(victim.segment) else { return Ok(()) };
        let (retired, thinned) = (segment.retired, segment.thinned);
        let epoch = victim.epoch.wrapping_add(1);
        *segment = Segment { epoch, retired, ..Segment::absent() };
        if let Some(shared) = lane.shared() {
            drop(shared.set_live(victim.segment, 0, 0));
            drop(shared.set_segment(victim.segment, SegmentState::Free, epoch));
        }
        let reuse = lane.role == Role::Own && !retired && !thinned;
        if reuse {
            grant::make_ready(&mut state, victim.segment);
        }
        reuse
    };
    volume.ctx.counters.reclaimed.add(1);
    lane.progress.notify_all();
    if !reuse {
        grant::punch(lane, victim.segment);
    }
    Ok(())
}
