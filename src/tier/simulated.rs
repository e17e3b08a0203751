//! Processes that share frames, in one thread: a seed decides what happens next. The owner runs the
//! real code, from a message on. The others are simulated, and do whatever a process may do: they
//! ask, fill, read, give up and die, and each message takes as long as the seed wants.
//!
//! Checked after each step: a process that may read a frame finds all bytes of the chunk that it
//! asked for; a frame that is being filled is given to no other process.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use super::frames::Frames;
use super::message::{Answer, Ask, UsedAt, VERSION};
use super::owner::{Owner, Peer};
use super::{FrameId, PutId, Rank};
use crate::device::{Frame, FrameFill, HugePages, RegionOptions, SharedRegion, StagingOptions};
use crate::io::Buf;
use crate::key::ChunkKey;

const FRAME: usize = 4096;
const FRAMES: usize = 4;
const PROCESSES: usize = 3;
const KEYS: u64 = 3;
const STEPS: usize = 1500;
/// Pieces in which a frame is filled.
const PIECES: usize = 2;

/// What a test run has come across, to show that it has tested something.
#[derive(Debug, Default)]
struct SimulatedRun {
    reads: u64,
    fills: u64,
    deaths: u64,
    owners: u64,
    reads_beyond_an_owner: u64,
}

/// Bytes that differ between chunks and between places.
fn bytes_of(id: &FrameId) -> Vec<u8> {
    let mut x = (u64::from(id.key.0[0]) << 32 | id.put.sequence).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x.to_le_bytes()
    };
    (0..FRAME / 8).flat_map(next).collect()
}

/// A use of a frame by a process that is not the owner.
struct Use {
    lease: u32,
    id: FrameId,
    memory: Buf,
    /// Pieces that are filled; `None` where the frame is read.
    filled: Option<usize>,
    /// The owner of the frame.
    owner: u64,
}

impl Use {
    fn is_right(&self) -> bool {
        self.filled.is_some() || self.memory.as_slice() == bytes_of(&self.id)
    }

    fn fill(&mut self) {
        if let Some(piece) = self.filled.as_mut().filter(|piece| **piece < PIECES) {
            let range = *piece * FRAME / PIECES..(*piece + 1) * FRAME / PIECES;
            self.memory.as_mut_slice()[range.clone()].copy_from_slice(&bytes_of(&self.id)[range]);
            *piece += 1;
        }
    }
}

/// A connection to the owner, as both sides see it.
struct Connection {
    peer: Peer,
    region: Arc<SharedRegion>,
    asks: VecDeque<Ask>,
    answers: VecDeque<Answer>,
    /// The process has died: after its messages the connection ends. The drive may write what the
    /// process was filling until the owner sees that.
    late: Option<Vec<Use>>,
}

#[derive(Default)]
struct Process {
    connection: Option<Connection>,
    /// The chunk for which it waits for an answer, and whether it will fill the frame.
    waits: Option<(FrameId, bool)>,
    uses: Vec<Use>,
    turn: u64,
}

/// What the owner itself does with its frames.
#[derive(Default)]
struct OwnUses {
    reads: Vec<(FrameId, Frame)>,
    fills: Vec<(FrameId, FrameFill)>,
}

struct World<'a> {
    dir: &'a Path,
    random: u64,
    owner: Option<Owner>,
    number: u64,
    own: OwnUses,
    /// Owners that were closed and not killed: their process still uses the frames that it holds.
    retired: Vec<(Arc<Frames>, OwnUses)>,
    processes: Vec<Process>,
    /// Connections of processes that are gone.
    dying: Vec<Connection>,
    sequences: [u64; KEYS as usize],
    seen: SimulatedRun,
}

impl World<'_> {
    fn below(&mut self, n: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// A chunk as it is stored now, as it was before, or stored anew.
    fn id(&mut self, is_new: bool) -> FrameId {
        let key = self.below(KEYS);
        let older = u64::from(self.one_in(10));
        let latest = &mut self.sequences[key as usize];
        *latest += u64::from(is_new);
        FrameId { key: ChunkKey([key as u8; 32]), put: PutId { drive: 0, sequence: latest.saturating_sub(older) } }
    }

    fn begin_owner(&mut self) {
        let options =
            StagingOptions { bytes: FRAMES * FRAME, slot_bytes: FRAME, hugepages: HugePages::Off, numa: None };
        let make = || Frames::shared(&options, &Arc::default());
        self.owner = Some(Owner::new(self.dir, make).unwrap().expect("the lock is free"));
        (self.number, self.own) = (self.number + 1, OwnUses::default());
        self.seen.owners += 1;
    }

    /// The process is killed, or leaves in peace and goes on without the others.
    fn end_owner(&mut self) {
        // What it has said may still arrive.
        for who in 0..PROCESSES {
            if self.one_in(2) {
                self.deliver_answer(who);
            }
        }
        let Some(owner) = self.owner.take() else { return };
        let own = std::mem::take(&mut self.own);
        let connections: Vec<_> = self.processes.iter_mut().filter_map(|p| p.connection.take()).collect();
        let connections = connections.into_iter().chain(std::mem::take(&mut self.dying));
        self.processes.iter_mut().for_each(|p| p.waits = None);
        if self.one_in(2) {
            owner.end(connections.map(|c| c.peer));
            self.retired.push((Arc::clone(&owner.frames), own));
        }
    }

    fn connect(&mut self, who: usize) {
        let Some(owner) = &self.owner else { return };
        let socket = File::open("/dev/null").unwrap().into();
        let mut peer = Peer::new(socket);
        let hello = Ask::Hello { version: VERSION, frame_bytes: owner.frames.frame_bytes() as u64, pins: false };
        assert!(matches!(owner.answer(&mut peer, hello), Some(Some(Answer::Welcome { .. }))));
        let file = owner.frames.region().unwrap().file().try_clone_to_owned().unwrap();
        let wishes = RegionOptions { hugepages: HugePages::Off, numa: None };
        let region = SharedRegion::open(file, FRAMES * FRAME, &wishes).unwrap();
        let (asks, answers) = (VecDeque::new(), VecDeque::new());
        self.processes[who].connection = Some(Connection { peer, region, asks, answers, late: None });
    }

    fn ask(&mut self, who: usize) {
        let is_fill = self.one_in(3);
        let is_new = is_fill && self.one_in(8);
        let id = self.id(is_new);
        let process = &mut self.processes[who];
        let Some(connection) = process.connection.as_mut().filter(|_| process.waits.is_none()) else { return };
        process.turn += 1;
        let (place, named) = (UsedAt { turn: process.turn, depth: 0 }, (id.key.0, id.put));
        process.waits = Some((id, is_fill));
        connection.asks.push_back(match is_fill {
            true => Ask::Reserve { id: named, place },
            false => Ask::Find { id: named, place, is_use: true },
        });
    }

    /// The owner takes the next message of a process, or sees that it is gone.
    fn deliver_ask(&mut self, which: usize) {
        let Some(owner) = &self.owner else { return };
        let living = self.processes.iter_mut().filter_map(|p| p.connection.as_mut());
        let has_something = |c: &&mut Connection| c.late.is_some() || !c.asks.is_empty();
        let mut connections: Vec<_> = living.chain(&mut self.dying).filter(has_something).collect();
        let count = connections.len().max(1);
        let Some(connection) = connections.get_mut(which % count) else { return };
        if let Some(ask) = connection.asks.pop_front() {
            let answer = owner.answer(&mut connection.peer, ask).expect("nothing that nobody may say");
            connection.answers.extend(answer);
            return;
        }
        if connection.late.is_some() {
            let at = self.dying.iter().position(|c| c.asks.is_empty()).expect("this one");
            let Connection { peer, region, late, .. } = self.dying.swap_remove(at);
            let offsets: Vec<_> =
                late.iter().flatten().filter(|u| u.filled.is_some()).map(|u| u.memory.as_slice().as_ptr()).collect();
            owner.part(peer);
            // The drive may go on writing: the frame must have other memory by now.
            let frames = (0..FRAMES).map(|n| region.slot(n * FRAME..(n + 1) * FRAME, Box::new(())).unwrap());
            for frame in frames.filter(|f| offsets.contains(&f.as_slice().as_ptr())) {
                assert!(
                    frame.as_slice().iter().all(|b| *b == 0),
                    "memory that a dead process was filling is used again"
                );
            }
        }
    }

    fn deliver_answer(&mut self, who: usize) {
        let process = &mut self.processes[who];
        let Some(connection) = &mut process.connection else { return };
        let Some(answer) = connection.answers.pop_front() else { return };
        let (id, is_fill) = process.waits.take().expect("it has asked");
        if let Answer::Frame { lease, offset, .. } = answer {
            let at = offset as usize;
            let memory = connection.region.slot(at..at + FRAME, Box::new(())).expect("inside the region");
            let filled = is_fill.then_some(0);
            self.seen.reads += u64::from(!is_fill);
            process.uses.push(Use { lease, id, memory, filled, owner: self.number });
        }
    }

    /// A process goes on with a frame, or gives it back.
    fn work(&mut self, who: usize) {
        let (at, gives_up) = (self.below(4) as usize, self.one_in(5));
        let process = &mut self.processes[who];
        let at = at % process.uses.len().max(1);
        let Some(used) = process.uses.get_mut(at) else { return };
        used.fill();
        let is_full = used.filled == Some(PIECES);
        let is_done = used.filled.is_none() && gives_up;
        if !is_full && !is_done && !gives_up {
            return;
        }
        let used = process.uses.swap_remove(at);
        self.seen.reads_beyond_an_owner += u64::from(used.filled.is_none() && used.owner != self.number);
        // An owner that is gone is sent nothing.
        let Some(connection) = process.connection.as_mut().filter(|_| used.owner == self.number) else { return };
        if is_full && !gives_up {
            self.seen.fills += 1;
            let place = UsedAt { turn: process.turn, depth: 1 };
            connection.asks.push_back(Ask::Publish { lease: used.lease, place, is_unused: false, crcs: Vec::new() });
        }
        connection.asks.push_back(Ask::Release { lease: used.lease });
    }

    fn forget(&mut self, who: usize) {
        let id = self.id(false);
        if let Some(connection) = &mut self.processes[who].connection {
            connection.asks.push_back(Ask::Forget { ids: vec![(id.key.0, id.put)] });
        }
    }

    fn kill(&mut self, who: usize) {
        let Process { connection, uses, .. } = std::mem::take(&mut self.processes[who]);
        self.seen.deaths += 1;
        let Some(mut connection) = connection else { return };
        // Its last messages may not have been sent.
        let sent = self.below(connection.asks.len() as u64 + 1) as usize;
        connection.asks.truncate(sent);
        let number = self.number;
        connection.late = Some(uses.into_iter().filter(|u| u.owner == number).collect());
        self.dying.push(connection);
    }

    /// Transfers into memory of the dead go on until the owner has seen that they are gone.
    fn late_write(&mut self) {
        self.dying.iter_mut().filter_map(|c| c.late.as_mut()).flatten().for_each(Use::fill);
    }

    /// The process with the frames uses them too.
    fn own(&mut self, is_retired: bool) {
        let (is_fill, is_new, drops) = (self.one_in(2), self.one_in(8), self.one_in(3));
        let (id, which) = (self.id(is_new && is_fill), self.below(3) as usize);
        let (frames, own) = match (is_retired, &self.owner) {
            (true, _) => match self.retired.get_mut(which) {
                Some((frames, own)) => (Arc::clone(frames), own),
                None => return,
            },
            (false, Some(owner)) => (Arc::clone(&owner.frames), &mut self.own),
            (false, None) => return,
        };
        let rank = Rank { turn: frames.turn(), depth: Reverse(0) };
        if drops {
            own.reads.pop();
            let Some((id, fill)) = own.fills.pop() else { return };
            fill.part(0..FRAME).unwrap().as_mut_slice().copy_from_slice(&bytes_of(&id));
            frames.put(&id, &fill, rank, false, &[]);
        } else if is_fill {
            own.fills.extend(frames.reserve().map(|fill| (id, fill)));
        } else {
            own.reads.extend(frames.find(&id, rank, true).map(|(frame, _)| (id, frame)));
        }
    }

    fn step(&mut self) {
        let who = self.below(PROCESSES as u64) as usize;
        match self.below(40) {
            0..=8 => self.ask(who),
            9..=18 => {
                let which = self.below(16) as usize;
                self.deliver_ask(which);
            }
            19..=25 => self.deliver_answer(who),
            26..=32 => self.work(who),
            33 => self.forget(who),
            34 if self.one_in(6) => self.kill(who),
            35 => self.late_write(),
            36 | 37 => self.own(false),
            38 => self.own(true),
            39 if self.one_in(8) => self.end_owner(),
            _ => {}
        }
        if self.owner.is_none() && self.one_in(3) {
            self.begin_owner();
        }
        if self.processes[who].connection.is_none() && self.one_in(2) {
            self.connect(who);
        }
    }

    fn check(&self) {
        for (who, process) in self.processes.iter().enumerate() {
            for used in &process.uses {
                assert!(used.is_right(), "process {who} does not find {:?}", used.id);
            }
        }
        for own in self.retired.iter().map(|(_, own)| own).chain([&self.own]) {
            for (id, frame) in &own.reads {
                assert!(frame.view(0..FRAME).unwrap().as_slice() == bytes_of(id), "the owner does not find {id:?}");
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memfd")]
fn whoever_may_read_a_frame_finds_its_chunk_whatever_dies_when() {
    let seeds: u64 = std::env::var("FOREBAY_MEMORY_SEEDS").map_or(40, |n| n.parse().unwrap());
    let first: u64 = std::env::var("FOREBAY_MEMORY_SEED").map_or(1, |n| n.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let mut all = SimulatedRun::default();
    for seed in first..first + seeds {
        let mut world = World {
            dir: dir.path(),
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            owner: None,
            number: 0,
            own: OwnUses::default(),
            retired: Vec::new(),
            processes: (0..PROCESSES).map(|_| Process::default()).collect(),
            dying: Vec::new(),
            sequences: [1; KEYS as usize],
            seen: SimulatedRun::default(),
        };
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..STEPS {
                world.step();
                world.check();
            }
        }));
        if let Err(panic) = ran {
            eprintln!("run again with FOREBAY_MEMORY_SEED={seed} FOREBAY_MEMORY_SEEDS=1");
            std::panic::resume_unwind(panic);
        }
        all.reads += world.seen.reads;
        all.fills += world.seen.fills;
        all.deaths += world.seen.deaths;
        all.owners += world.seen.owners;
        all.reads_beyond_an_owner += world.seen.reads_beyond_an_owner;
    }
    eprintln!("{all:?}");
    let least = [all.reads, all.fills, all.deaths, all.owners, all.reads_beyond_an_owner].into_iter().min();
    assert!(least > Some(seeds), "too little has happened: {all:?}");
}
