//! Beginning a put: whether the key is stored already, which drive takes it, and where on it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::put::{Put, PutOutcome, Refusal};
use super::reservation::Reservation;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::layout::SlotLayout;
use crate::format::record::KeyKind;
use crate::key::ChunkKey;
use crate::log::base::in_flight::KeyClaim;
use crate::log::base::options::Placement;
use crate::log::base::spec::PutSpec;
use crate::log::drive::{QuotaClaim, Volume, Waiting};
use crate::log::lane::{HeldSlot, Lane, LaneState, Need, SlotPlace, quota_tenant};
use crate::log::{Log, policy};

/// Pause between two looks for room within a quota.
const LOOK_AT_QUOTA: Duration = Duration::from_millis(1);

impl Log {
    /// Takes a slot for a chunk or object. Never waits: where no segment is ready, as for the very
    /// first put, there is [no room](PutOutcome::NoRoom), and the maintenance thread makes one
    /// ready.
    ///
    /// # Errors
    /// `Busy` where no drive accepts puts now. `InvalidInput` for a slot that fits no segment.
    /// `Unsupported` in read-only mode. `Closed`, `Forked`.
    pub fn begin_put(&self, spec: impl Into<Box<PutSpec>>) -> Result<PutOutcome> {
        self.begin(spec.into(), None)
    }

    /// Like [`begin_put`](Self::begin_put), but waits up to `wait` for reclaim to make room. For
    /// tools and background work.
    ///
    /// # Errors
    /// As [`begin_put`](Self::begin_put); `NoSpace` where no room became free in time.
    pub fn begin_put_within(&self, spec: impl Into<Box<PutSpec>>, wait: Duration) -> Result<PutOutcome> {
        self.begin(spec.into(), Some(Instant::now() + wait))
    }

    /// The number of the drive that would take this put now; 0 where none takes any.
    #[must_use]
    pub fn drive_for(&self, spec: &PutSpec) -> usize {
        self.choose(spec).map_or(0, |volume| volume.number)
    }

    /// Bytes of the largest slot that fits a segment on every drive.
    #[must_use]
    pub fn max_slot_bytes(&self) -> u64 {
        self.volumes.iter().filter_map(|v| v.own()).map(|l| l.segment_bytes()).min().unwrap_or(0)
    }

    fn begin(&self, mut spec: Box<PutSpec>, deadline: Option<Instant>) -> Result<PutOutcome> {
        self.ctx.check_writable()?;
        let layout = match &spec.layout {
            Some(layout) => layout.clone(),
            None => {
                spec.length = self.ctx.options.geometry.chunk_bytes(spec.tokens as usize) as u64;
                self.chunk_layout(spec.tokens, spec.codec)
            }
        };
        self.check_spec(&spec, &layout)?;
        if spec.expiry_s == 0
            && let Some(ttl) = self.ctx.options.ttl
        {
            spec.expiry_s = self.ctx.options.clock.expiry_s(ttl);
        }
        let Some(claim) = self.claim(&spec.key) else {
            let holds = |v: &&Arc<Volume>| v.lanes().all.iter().any(|l| l.get(&spec.key).is_some());
            if let Some(lane) = self.volumes.iter().find(holds).and_then(|v| v.own()) {
                policy::note_begun(&lane, &spec, layout.slot_bytes);
            }
            return Ok(PutOutcome::AlreadyThere);
        };
        let volume = self.choose(&spec)?;
        let quota = match claim_quota(volume, &spec, layout.slot_bytes, deadline) {
            Ok(claim) => claim,
            Err(refusal) => return Ok(PutOutcome::NotAdmitted(refusal, spec)),
        };
        if !volume.wear.admits(layout.slot_bytes, volume.written()) {
            self.ctx.counters.budget_refused_bytes.add(layout.slot_bytes);
            return Ok(PutOutcome::NotAdmitted(Refusal::Budget, spec));
        }
        let reserved = self.reserve(volume, &spec, &layout, deadline);
        if !matches!(reserved, Ok(Some(_))) {
            volume.wear.refund(layout.slot_bytes);
        }
        let Some((lane, place, sequence)) = reserved? else {
            let leaves = volume.own().is_some_and(|lane| is_leaving(volume, &lane, &spec.key));
            return Ok(if leaves { PutOutcome::Leaving(spec) } else { PutOutcome::NoRoom(spec) });
        };
        self.ctx.counters.puts.add(1);
        let held = HeldSlot::new(&lane, place, sequence);
        let (lanes, shard) = (volume.lanes(), Arc::clone(&volume.shard));
        let reservation = Reservation { lane, place, held, claim, lanes, shard, _quota: quota, ended: false };
        let health = Arc::clone(&volume.health);
        Ok(PutOutcome::Started(Put { spec, layout, drive: volume.number, sequence, health, reservation }))
    }

    /// Claims the key; `None` where it is stored, or being stored.
    fn claim(&self, key: &ChunkKey) -> Option<KeyClaim> {
        // Claimed before the look: otherwise another put could publish the key in between.
        let claim = KeyClaim::take(&self.ctx.in_flight, key).filter(|_| !self.contains(key));
        self.ctx.counters.already_there.add(u64::from(claim.is_none()));
        claim
    }

    fn check_spec(&self, spec: &PutSpec, layout: &SlotLayout) -> Result<()> {
        let bad = |what: String| Err(Error::new(ErrorKind::InvalidInput, what));
        if spec.layout.is_none() && (spec.tokens == 0 || spec.tokens > self.ctx.options.geometry.chunk_tokens) {
            return bad(format!("a chunk of {} tokens", spec.tokens));
        }
        if layout.slot_bytes > self.max_slot_bytes() {
            return bad(format!("a slot of {} bytes fits no segment", layout.slot_bytes));
        }
        if spec.length >> 40 != 0 || spec.depth >> 24 != 0 {
            return bad("a put beyond the index's ranges".to_owned());
        }
        Ok(())
    }

    /// The drive that takes a put.
    fn choose(&self, spec: &PutSpec) -> Result<&Arc<Volume>> {
        let there = |key: &ChunkKey| self.volumes.iter().find(|v| v.find(key).is_some());
        let chosen = match (self.volumes.as_slice(), self.ctx.options.placement, spec.root) {
            ([only], ..) => Some(only).filter(|v| v.takes_puts()),
            (_, Placement::Stripe, _) => self.by_hash(&spec.key),
            (_, Placement::Chain, Some(root)) => {
                let preferred = spec.preferred_drive.and_then(|n| self.volumes.get(n)).filter(|v| v.takes_puts());
                preferred.or_else(|| self.by_hash(&root))
            }
            (_, Placement::Chain, None) => {
                there(&spec.parent).filter(|v| v.takes_puts()).or_else(|| self.by_hash(&spec.key))
            }
        };
        chosen.ok_or_else(|| Error::new(ErrorKind::Busy, "no drive accepts stores"))
    }

    /// The drive, of those that take puts, whose id hashed together with the key gives the greatest
    /// value: adding or losing a drive moves no more keys than it must, and the order of the list
    /// does not matter.
    fn by_hash(&self, key: &ChunkKey) -> Option<&Arc<Volume>> {
        self.volumes.iter().filter(|v| v.takes_puts()).max_by_key(|v| {
            let mut hasher = blake3::Hasher::new();
            hasher.update(&v.id).update(&key.0);
            *hasher.finalize().as_bytes()
        })
    }

    /// A place in the drive's own lane and the slot's sequence; `None` where there is no room now
    /// and no `deadline` to wait for.
    fn reserve(
        &self,
        volume: &Volume,
        spec: &PutSpec,
        layout: &SlotLayout,
        deadline: Option<Instant>,
    ) -> Result<Option<(Arc<Lane>, SlotPlace, u64)>> {
        let lane = volume.own().ok_or_else(|| Error::new(ErrorKind::Closed, "the drive is closed").at(&volume.root))?;
        policy::note_begun(&lane, spec, layout.slot_bytes);
        let need = Need { pages: layout.pages(), align: layout.align / PAGE_BYTES as u32 };
        let mut waiting = Waiting::new(deadline);
        let mut state = lane.state()?;
        loop {
            check_writable(&lane, &state)?;
            let leaving = is_leaving(volume, &lane, &spec.key);
            let place = if leaving { None } else { take_place(volume, &lane, &mut state, need)? };
            let wake = state.segments.wants_segment() || state.segments.wants_reserve();
            if wake || place.is_none() {
                volume.wake();
            }
            if let Some((place, sequence)) = place {
                drop(state);
                return Ok(Some((lane, place, sequence)));
            }
            lane.work.notify_one();
            match waiting.wait(volume, &lane, state) {
                Ok(Some(again)) => state = again,
                Ok(None) => return Ok(None),
                Err(e) => {
                    let why = "what the key named before could not be made unreadable in time";
                    return Err(if leaving { Error::new(ErrorKind::NoSpace, why).at(&lane.dir) } else { e });
                }
            }
        }
    }
}

/// Whether an earlier slot of a key is still being made unreadable. Until it is, its entry must not
/// be replaced: no other entry names that slot.
fn is_leaving(volume: &Volume, lane: &Lane, key: &ChunkKey) -> bool {
    let found = lane.table().get_marked(key);
    found.is_some_and(|(entry, _, mark)| mark.is_some() || volume.is_tenant_removed(&entry))
}

fn check_writable(lane: &Lane, state: &LaneState) -> Result<()> {
    if state.pending.is_broken() {
        return Err(Error::new(ErrorKind::Busy, "the lane accepts no stores after write errors").at(&lane.dir));
    }
    Ok(())
}

/// Takes a place and a sequence while the lane's lock is held: if no put with a lower sequence than
/// some number is under way now, none will be later.
fn take_place(volume: &Volume, lane: &Lane, state: &mut LaneState, need: Need) -> Result<Option<(SlotPlace, u64)>> {
    let Some(place) = state.segments.place(need, lane.shared().as_ref()) else { return Ok(None) };
    match volume.shard.next_seq() {
        Ok(sequence) => {
            state.puts.begin(sequence);
            state.segments.note_sequence(place, sequence);
            Ok(Some((place, sequence)))
        }
        Err(e) => {
            state.segments.end_put(place);
            Err(e)
        }
    }
}

/// Claims the room of a put within its tenant's quota, waiting for it until `deadline`, if there is
/// one; `None` for a put that counts for no tenant.
fn claim_quota(
    volume: &Volume,
    spec: &PutSpec,
    bytes: u64,
    deadline: Option<Instant>,
) -> std::result::Result<Option<QuotaClaim>, Refusal> {
    let is_object = matches!(spec.key_kind, KeyKind::Object | KeyKind::ObjectPart);
    let (Some(quota), Some(tenant)) = (&volume.quota, quota_tenant(is_object, spec.tenant)) else { return Ok(None) };
    loop {
        let claim = quota.claim(volume, tenant, bytes);
        if claim.is_some() {
            return Ok(claim);
        }
        volume.wake();
        if deadline.is_none_or(|deadline| Instant::now() >= deadline) || bytes > quota.limit() {
            return Err(Refusal::Quota);
        }
        if volume.ctx.options.foreground {
            (volume.helpers.enforce_quota)(volume);
            return quota.claim(volume, tenant, bytes).map(Some).ok_or(Refusal::Quota);
        }
        std::thread::sleep(LOOK_AT_QUOTA);
    }
}
