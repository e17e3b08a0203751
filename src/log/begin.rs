//! Beginning a put: is the key there already, which drive takes it, and where on it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Log;
use super::chain;
use super::put::{Held, Put, PutOutcome, Refusal, Reservation};
use super::quota;
use super::spec::PutSpec;
use super::state::{Need, NoPlace};
use super::volume::Volume;
use super::{options::Placement, stats::Count};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::layout::SlotLayout;
use crate::key::ChunkKey;

impl Log {
    /// Takes a slot for a chunk or object. Never waits: where no segment is ready, as for the very first put, it is refused with
    /// `NoSpace`, and the keeper makes one ready.
    ///
    /// # Errors
    /// `NoSpace` and `Busy`: shed, try later or never. `InvalidInput` for a slot that fits no segment. `Unsupported` in
    /// read-only mode. `Closed`, `Forked`.
    pub fn begin_put(&self, spec: PutSpec) -> Result<PutOutcome> {
        self.begin(spec, None)
    }

    /// Like [`begin_put`](Self::begin_put), but waits up to `wait` for reclaim to make room. For tools and background work.
    ///
    /// # Errors
    /// As [`begin_put`](Self::begin_put).
    pub fn begin_put_within(&self, spec: PutSpec, wait: Duration) -> Result<PutOutcome> {
        self.begin(spec, Some(Instant::now() + wait))
    }

    /// Bytes of the largest slot that fits a segment on every drive.
    #[must_use]
    pub fn max_slot_bytes(&self) -> u64 {
        self.volumes.iter().filter_map(|v| v.own()).map(|l| l.max_slot_bytes()).min().unwrap_or(0)
    }

    fn begin(&self, mut spec: PutSpec, deadline: Option<Instant>) -> Result<PutOutcome> {
        let sheds = &self.ctx.sheds;
        self.ctx.check_writable().inspect_err(|e| {
            if e.kind() == ErrorKind::Unsupported {
                sheds.read_only.add(1);
            }
        })?;
        let layout = match &spec.layout {
            Some(layout) => layout.clone(),
            None => {
                spec.length = self.ctx.options.geometry.chunk_bytes(spec.tokens as usize) as u64;
                self.chunk_layout(spec.tokens)
            }
        };
        self.check_spec(&spec, &layout)?;
        if spec.expiry_s == 0
            && let Some(ttl) = self.ctx.options.ttl
        {
            spec.expiry_s = u32::try_from(self.ctx.now_s().saturating_add(ttl.as_secs().max(1))).unwrap_or(u32::MAX);
        }
        if !spec.overwrite && self.contains(&spec.key) || !self.in_flight.begin(&spec.key, !spec.overwrite) {
            self.ctx.counters.already_there.add(1);
            if let Some(lane) = self.volumes.iter().find(|v| v.has_version(&spec.key)).and_then(|v| v.own()) {
                chain::note_put(&lane, &spec, layout.slot_bytes);
            }
            return Ok(PutOutcome::AlreadyThere);
        }
        let volume = self.choose(&spec).inspect_err(|_| self.in_flight.end(&spec.key))?;
        let claim = match quota::claim(volume, &spec, layout.slot_bytes, deadline) {
            Ok(claim) => claim,
            Err(refusal) => {
                self.in_flight.end(&spec.key);
                sheds.quota.add(1);
                return Ok(PutOutcome::NotAdmitted(refusal));
            }
        };
        if !volume.wear.admits(layout.slot_bytes, volume.written()) {
            self.in_flight.end(&spec.key);
            sheds.budget.add(1);
            self.ctx.counters.budget_refused_bytes.add(layout.slot_bytes);
            return Ok(PutOutcome::NotAdmitted(Refusal::Budget));
        }
        let outcome = self.reserve(volume, &spec, &layout, deadline).inspect_err(|_| {
            volume.wear.refund(layout.slot_bytes);
            self.in_flight.end(&spec.key);
        });
        let (volume, mut reservation, sequence) = outcome?;
        reservation.claim = claim;
        self.ctx.counters.puts.add(1);
        let health = Arc::clone(&volume.health);
        let spec = Box::new(spec);
        Ok(PutOutcome::Started(Put { spec, layout, drive: volume.number, sequence, health, reservation }))
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
        let refused = |shed: &Count, e: Error| {
            shed.add(1);
            Err(e)
        };
        if let Some(volume) = spec.drive.and_then(|n| self.volumes.get(n)) {
            if volume.takes_puts() {
                return Ok(volume);
            }
            let e = Error::new(ErrorKind::Busy, "the drive that was asked for takes no puts").at(&volume.root);
            return refused(&self.ctx.sheds.drive, e);
        }
        let there = |key: &ChunkKey| self.volumes.iter().find(|v| v.find_even_if_going(key).is_some());
        // A key lies on one drive only, so that sequences, which are a drive's own, decide between its versions.
        if spec.overwrite
            && let Some(volume) = there(&spec.key)
        {
            if volume.takes_puts() {
                return Ok(volume);
            }
            let e = Error::new(ErrorKind::Busy, "the drive that holds the key takes no puts").at(&volume.root);
            return refused(&self.ctx.sheds.drive, e);
        }
        let chosen = match (self.volumes.as_slice(), self.ctx.options.placement, spec.root) {
            ([only], ..) => Some(only).filter(|v| v.takes_puts()),
            (_, Placement::Stripe, _) => self.by_hash(&spec.key),
            (_, Placement::Chain, Some(root)) => {
                let near = spec.near.and_then(|n| self.volumes.get(n)).filter(|v| v.takes_puts());
                near.or_else(|| self.by_hash(&root))
            }
            (_, Placement::Chain, None) => {
                there(&spec.parent).filter(|v| v.takes_puts()).or_else(|| self.by_hash(&spec.key))
            }
        };
        match chosen {
            Some(volume) => Ok(volume),
            None => refused(&self.ctx.sheds.drive, Error::new(ErrorKind::Busy, "no drive takes puts")),
        }
    }

    /// Number of the drive that holds `key`, or else would take a put of it that names no root and no parent; `None` where
    /// no drive takes puts.
    #[must_use]
    pub fn home(&self, key: &ChunkKey) -> Option<usize> {
        let holds = self.volumes.iter().find(|v| v.find(key).is_some());
        holds.or_else(|| self.by_hash(key)).map(|v| v.number)
    }

    /// Of the drives that take puts, the one with the greatest hash together with the key: adding or losing a drive moves no
    /// more keys than it must, and the order of the list does not matter.
    fn by_hash(&self, key: &ChunkKey) -> Option<&Arc<Volume>> {
        self.volumes.iter().filter(|v| v.takes_puts()).max_by_key(|v| {
            let mut hasher = blake3::Hasher::new();
            hasher.update(&v.id).update(&key.0);
            *hasher.finalize().as_bytes()
        })
    }

    fn reserve<'a>(
        &self,
        volume: &'a Volume,
        spec: &PutSpec,
        layout: &SlotLayout,
        deadline: Option<Instant>,
    ) -> Result<(&'a Volume, Reservation, u64)> {
        let lane = volume.own().ok_or_else(|| Error::new(ErrorKind::Closed, "the drive is closed").at(&volume.root))?;
        chain::note_put(&lane, spec, layout.slot_bytes);
        let records = spec.members.len().max(1);
        let need = Need { pages: layout.pages(), align: layout.align / PAGE_BYTES as u32, records, control: false };
        if records > lane.region_records() / 2 {
            return Err(Error::new(ErrorKind::InvalidInput, format!("a pack of {records} objects")));
        }
        let place = match deadline {
            Some(deadline) => super::remove::wait_for_place(volume, &lane, need, deadline),
            None => self.place_now(volume, &lane, need),
        };
        let place = place.inspect_err(|_| self.ctx.sheds.no_space.add(1))?;
        let sequence = volume.shard.next_seq();
        let in_flight = Arc::clone(&self.in_flight);
        let held = Held::new(&lane, place, records);
        let lanes = volume.lanes();
        let reservation = Reservation { lane, place, held, key: spec.key, in_flight, lanes, claim: None, ended: false };
        match sequence {
            Ok(sequence) => Ok((volume, reservation, sequence)),
            Err(e) => {
                // The caller ends the key; the reservation must not do so too.
                self.in_flight.begin(&spec.key, false);
                Err(e)
            }
        }
    }

    /// A place, if a segment with room is ready: making one ready is the keeper's work.
    fn place_now(&self, volume: &Volume, lane: &super::Lane, need: Need) -> Result<super::state::Place> {
        let shared = lane.shared();
        let mut state = lane.state()?;
        let outcome = state.place(need, shared.as_ref());
        let wake = state.wants_segment() || state.wants_reserve();
        drop(state);
        if wake {
            volume.wake_keeper();
        }
        match outcome {
            Ok(place) => Ok(place),
            Err(NoPlace::NotReady) => {
                lane.work.notify_one();
                Err(Error::new(ErrorKind::NoSpace, "no free segment is ready").at(&lane.dir))
            }
            Err(NoPlace::Broken) => {
                Err(Error::new(ErrorKind::Busy, "the lane takes nothing after write errors").at(&lane.dir))
            }
        }
    }
}
