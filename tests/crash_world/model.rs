//! What may be served: the oracle.
//!
//! Every put has one fate. It may be served from when it is committed until a removal or a floor
//! that reaches it has returned, and never again after that; once flushed it must be served for as
//! long as the log had not given it up.

use std::collections::BTreeMap;
use std::fmt;

/// How far a put has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its header is not written yet.
    Begun,
    /// Its header was handed to the drive.
    Committed,
    /// It ended well.
    Stored,
    /// And what it wrote is durable.
    Flushed,
    /// It ended badly, or its process died before a flush: it may be found again, or not.
    Unsure,
}

/// One put.
#[derive(Clone, Copy)]
pub struct Put {
    pub id: u64,
    pub key: u64,
    /// The log's number of it.
    pub sequence: u64,
    /// Process that stores it.
    pub owner: u64,
    /// Lane in which it was found.
    pub lane: Option<[u8; 16]>,
    pub tenant: u64,
    pub state: State,
    /// Unix seconds; 0 for never.
    pub expiry_s: u32,
    /// A removal or floor that reaches it has begun, it was given up, or it was reported bad:
    /// nobody needs to serve it.
    pub going: bool,
    /// The removal or floor has returned: nobody may.
    pub gone: bool,
    /// It was never published, and its header may be on the drive all the same, until its segment
    /// is sealed or its lane opened anew: no index names it, and no removal knows of it.
    pub stray: bool,
}

impl fmt::Debug for Put {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, sequence, owner, state, expiry_s, going, gone, .. } = self;
        write!(
            f,
            "put {id}, sequence {sequence:x}, of process {owner}, {state:?}, expires {expiry_s}, going {going}, gone {gone}"
        )
    }
}

/// A removal or floor that has begun, and the puts that it reaches.
#[must_use]
pub struct Going {
    id: u64,
    puts: Vec<u64>,
}

/// What removals and floors are of.
#[derive(Clone, Debug)]
enum Reach {
    Keys(Vec<u64>),
    Tenant(u64),
    All,
}

impl Reach {
    fn has(&self, put: &Put) -> bool {
        match self {
            Self::Keys(keys) => keys.contains(&put.key),
            Self::Tenant(tenant) => put.tenant == *tenant,
            Self::All => true,
        }
    }
}

/// What is known of all keys.
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub puts: BTreeMap<u64, Put>,
    pub last_id: u64,
    /// Who has stored something in a lane.
    owners: BTreeMap<[u8; 16], u64>,
    /// Removals that are under way, by their ids, and the puts that each may reach although they
    /// begin after it.
    under_way: BTreeMap<u64, Reach>,
    /// Keys that an image must serve, as of the last crash; while no log is open.
    pub must: Vec<u64>,
    /// Bits were flipped: what is there may be lost.
    pub rotten: bool,
}

impl Model {
    pub fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    pub fn begin(&mut self, put: Put) {
        // A removal that is under way may find this one too.
        let going = self.under_way.values().any(|reach| reach.has(&put));
        self.puts.insert(put.id, Put { going, ..put });
    }

    pub fn becomes(&mut self, id: u64, state: State) {
        if let Some(put) = self.puts.get_mut(&id) {
            (put.state, put.stray) = (state, state == State::Unsure);
        }
    }

    /// A log that has recovered serves it, so it is durable. Where that is a stray header, which a
    /// damaged index brings back after a removal, an index names it from now on: the next removal
    /// must reach it.
    pub fn recovered(&mut self, id: u64) {
        self.becomes(id, State::Flushed);
        self.puts.entry(id).and_modify(|put| put.gone = false);
    }

    /// Notes the lanes in which living processes have a put, and returns whether there are any.
    /// Where there are none, it was evicted or removed.
    pub fn sees(&mut self, id: u64, lanes: &[[u8; 16]]) -> bool {
        let Some(put) = self.puts.get_mut(&id) else { return false };
        match (lanes.first(), put.lane) {
            (None, _) => put.going = true,
            (Some(lane), None) => {
                put.lane = Some(*lane);
                self.owners.insert(*lane, put.owner);
            }
            // A copy in another lane, which is not there for good before that lane has been
            // flushed.
            (Some(lane), Some(its)) if !lanes.contains(&its) => {
                (put.lane, put.state) = (Some(*lane), State::Stored);
                put.owner = self.owners.get(lane).copied().unwrap_or(0);
            }
            _ => {}
        }
        !put.going
    }

    /// Puts that a flush by `owner` which begins now makes durable.
    pub fn stored(&self, owner: u64) -> Vec<u64> {
        let stored = self.puts.values().filter(|p| p.owner == owner && p.state == State::Stored);
        stored.map(|p| p.id).collect()
    }

    /// What `owner` has stored is durable; with `only`, of that these puts.
    pub fn flushed(&mut self, owner: u64, only: Option<&[u64]>) {
        for put in self.puts.values_mut().filter(|p| p.owner == owner && p.state == State::Stored) {
            if only.is_none_or(|only| only.contains(&put.id)) {
                put.state = State::Flushed;
            }
        }
    }

    /// `owner` is gone, or all are, without having flushed.
    pub fn ended(&mut self, owner: Option<u64>) {
        if owner.is_none() {
            self.under_way.clear();
        }
        let is_its = |p: &Put| owner.is_none_or(|owner| p.owner == owner);
        self.puts.retain(|_, p| !(is_its(p) && p.state == State::Begun));
        for put in self.puts.values_mut().filter(|p| is_its(p) && p.state != State::Flushed) {
            put.stray |= put.state == State::Committed;
            put.state = State::Unsure;
        }
    }

    fn go(&mut self, reach: Reach, may_come_later: impl Fn(&Put) -> bool) -> Going {
        let reached = self.puts.values_mut().filter(|p| !p.gone && reach.has(p) && !may_come_later(p));
        let puts = reached.map(|put| (put.going = true, put.id).1).collect();
        let id = self.next_id();
        self.under_way.insert(id, reach);
        Going { id, puts }
    }

    /// `by` begins to remove keys. Puts of others that are under way may come after it.
    pub fn removing(&mut self, by: u64, keys: &[u64]) -> Going {
        let is_under_way = |p: &Put| matches!(p.state, State::Begun | State::Committed);
        self.go(Reach::Keys(keys.to_vec()), |p| p.owner != by && is_under_way(p))
    }

    /// A floor of a tenant, or of everything, begins: whatever has a number by now is below it.
    pub fn flooring(&mut self, tenant: Option<u64>) -> Going {
        self.go(tenant.map_or(Reach::All, Reach::Tenant), |_| false)
    }

    /// The removal or floor has returned, if it did well.
    pub fn ends(&mut self, going: &Going, did_well: bool) {
        self.under_way.remove(&going.id);
        for id in going.puts.iter().filter(|_| did_well) {
            self.puts.entry(*id).and_modify(|put| put.gone = true);
        }
    }

    /// The put of a key that the log numbers so.
    pub fn of_sequence(&mut self, key: u64, sequence: u64) -> Option<&mut Put> {
        self.puts.values_mut().find(|p| p.key == key && p.sequence == sequence)
    }

    /// The puts of a key that are gone.
    pub fn gone(&self, key: u64) -> Vec<u64> {
        self.puts.values().filter(|p| p.key == key && p.gone).map(|p| p.id).collect()
    }

    /// Why put `id` of `key` may not be found any more, if it may not.
    pub fn objection(&self, key: u64, id: u64) -> Option<&'static str> {
        match self.puts.get(&id).filter(|p| p.key == key) {
            None => Some("it was never stored"),
            // Where a bit of an index was flipped, slots are found by their headers.
            Some(put) if put.gone && !(self.rotten && put.stray) => Some("it was removed"),
            Some(put) if put.state == State::Begun => Some("its put was not committed"),
            Some(_) => None,
        }
    }

    /// All puts of a key.
    pub fn of_key(&self, key: u64) -> Vec<Put> {
        self.puts.values().filter(|p| p.key == key).copied().collect()
    }
}
