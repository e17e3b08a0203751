//! Puts: of chunks and of objects.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay::format::crc;
use forebay::format::record::KeyKind;
use forebay::io::{self, AlignedBuf, Buf, Request};
use forebay::log::{self, PutOutcome, PutSpec, Turn};

use super::model::{Put, State};
use super::rng::Rng;
use super::world::{Process, World};
use super::{CHUNK_TOKENS, Config, key, value};

const SOON: Duration = Duration::from_secs(5);
/// How long a put waits for room where threads make some.
const A_WHILE: Duration = Duration::from_millis(20);

/// A put that is on its way, with its number and the bytes of its extents.
pub struct Begun {
    put: log::Put,
    id: u64,
    extents: Vec<Vec<u8>>,
}

/// What is to be put.
struct Parcel {
    spec: PutSpec,
    id: u64,
    extents: Vec<Vec<u8>>,
}

/// Tokens of a key's chunk: some are partial.
fn tokens(key: u64) -> u32 {
    if key % 5 == 4 { CHUNK_TOKENS / 2 } else { CHUNK_TOKENS }
}

/// Bytes of a key's object.
fn object_bytes(key: u64) -> usize {
    500 + 300 * (key % 7) as usize
}

impl Config {
    /// Whether a key is that of an object, not of a chunk.
    pub fn is_object(&self, key: u64) -> bool {
        self.objects && key.is_multiple_of(3)
    }
}

impl World {
    fn chunk(&self, k: u64) -> Parcel {
        let id = self.model.lock().next_id();
        let spec = PutSpec {
            tenant: self.config.tenant(k),
            ..PutSpec::chunk(key(k), key(k.wrapping_sub(1)), tokens(k), k as u32)
        };
        let geometry = self.config.geometry();
        let layout = forebay::format::layout::SlotLayout::of_chunk(&geometry, spec.tokens);
        let extents = layout.extents.iter().enumerate().map(|(layer, e)| value(k, id, layer, e.len as usize)).collect();
        Parcel { spec, id, extents }
    }

    fn object(&self, k: u64) -> Parcel {
        let id = self.model.lock().next_id();
        let bytes = value(k, id, 0, object_bytes(k));
        let spec = PutSpec::object(key(k), bytes.len() as u64, KeyKind::Object);
        Parcel { spec, id, extents: vec![bytes] }
    }

    /// Whether the log of this process has a key that has not expired.
    pub fn is_there(&self, process: &Process, k: u64) -> bool {
        let found = self.run(process, |log| log.peek(&key(k)));
        found.is_some_and(|info| info.expiry_s == 0 || u64::from(info.expiry_s) > self.now_s())
    }

    /// Whether this process stores a key, or has tried to.
    fn is_under_way(&self, process: &Process, k: u64) -> bool {
        self.model.lock().of_key(k).iter().any(|p| p.owner == process.number && p.state != State::Flushed)
    }

    fn start(&self, process: &Process, k: u64, rng: &mut Rng) -> Option<Begun> {
        let Parcel { mut spec, id, extents } = if self.config.is_object(k) { self.object(k) } else { self.chunk(k) };
        if rng.one_in(8) {
            spec.expiry_s = (self.now_s() + 1 + rng.below(40)) as u32;
        }
        let (expiry_s, tenant) = (spec.expiry_s, spec.tenant);
        let (before, amid, patient) = (self.disk.operations(), self.amid.load(Ordering::Relaxed), rng.one_in(2));
        let there = self.is_there(process, k);
        let outcome = self.run(process, |log| match patient {
            true => log.begin_put_within(spec, if self.config.threads == 0 { SOON } else { A_WHILE }),
            false => log.begin_put(spec),
        });
        let stores = match &outcome {
            Ok(PutOutcome::Started(_)) => true,
            Ok(PutOutcome::AlreadyThere) => false,
            _ => {
                self.turn(process, Turn::Maintain);
                return None;
            }
        };
        self.tell(|| format!("  put {id} of {k}, there {there}, stores {stores}"));
        // What another process or thread did meanwhile may have changed that.
        if self.config.threads == 0 && amid == self.amid.load(Ordering::Relaxed) {
            match (stores, there) {
                (true, true) => self.fail_at(k, "it is stored although it is there"),
                (false, false) if !self.is_under_way(process, k) => self.fail_at(k, "it is not stored, and not there"),
                _ => {}
            }
            if !stores && self.disk.operations() != before {
                self.fail_at(k, "a put of what is there has written something");
            }
        }
        let Ok(PutOutcome::Started(put)) = outcome else { return None };
        self.tell(|| format!("  sequence {:x}", put.sequence()));
        let (sequence, owner, state) = (put.sequence(), process.number, State::Begun);
        let (going, gone, stray) = (false, false, false);
        self.model.lock().begin(Put {
            id,
            key: k,
            sequence,
            owner,
            lane: None,
            tenant,
            state,
            expiry_s,
            going,
            gone,
            stray,
        });
        Some(Begun { put, id, extents })
    }

    /// Writes extents; whether that went well. A request may wait in the queue, but for a log with
    /// threads.
    fn write_extents(&self, process: &Process, begun: &Begun, count: usize) -> bool {
        let put = &begun.put;
        let hold = put.hold();
        let good = Arc::new(AtomicBool::new(true));
        let (tx, rx) = crossbeam_channel::unbounded();
        for (bytes, e) in begun.extents.iter().zip(put.layout().extents.iter()).take(count) {
            let mut buf = AlignedBuf::zeroed(e.padded_len as usize).unwrap();
            buf[..bytes.len()].copy_from_slice(bytes);
            let (told, ends) = (Arc::clone(&good), tx.clone());
            let done = move |c: io::Completion| {
                if c.result.is_err() {
                    told.store(false, Ordering::Relaxed);
                }
                drop(ends);
            };
            let buf = hold.on(Buf::new(buf));
            let request = Request::write(Arc::clone(put.file()), put.slot_offset() + e.offset, buf, done);
            let submitted = self.run(process, |log| log.drive(0).unwrap().write.submit(request));
            if submitted.is_err() {
                return false;
            }
        }
        drop::<crossbeam_channel::Sender<()>>(tx);
        if self.config.threads > 0 {
            let _ = rx.recv();
        }
        good.load(Ordering::Relaxed)
    }

    fn commit(&self, process: &Process, begun: Begun) {
        let crcs: Vec<u32> = begun.extents.iter().map(|bytes| crc(bytes)).collect();
        self.model.lock().becomes(begun.id, State::Committed);
        let (tx, rx) = crossbeam_channel::unbounded();
        process.ends.lock().push((begun.id, rx));
        self.run(process, |_| begun.put.commit(&crcs, Box::new(move |r| _ = tx.send(r.is_ok()))));
        self.note_ends(process);
    }

    /// Enters into the model which puts have ended well.
    pub fn note_ends(&self, process: &Process) {
        // A call of a process that has died meanwhile goes on here, and nowhere else.
        if self.disk.is_dead(process.number) {
            return;
        }
        let mut model = self.model.lock();
        process.ends.lock().retain(|(id, rx)| {
            let state = match rx.try_recv() {
                Ok(true) => State::Stored,
                Ok(false) | Err(crossbeam_channel::TryRecvError::Disconnected) => State::Unsure,
                Err(crossbeam_channel::TryRecvError::Empty) => return true,
            };
            model.becomes(*id, state);
            false
        });
    }

    pub fn store(&self, process: &Process, k: u64, rng: &mut Rng) {
        // What is there is not stored again: another key is, or this one after a removal.
        let keys = self.config.keys;
        let mut k = k;
        match rng.below(4) {
            0 if self.is_there(process, k) => self.remove_keys(process, &[k]),
            1 | 2 => k = (k..k + keys).map(|k| k % keys).find(|k| !self.is_there(process, *k)).unwrap_or(k),
            _ => {}
        }
        let Some(begun) = self.start(process, k, rng) else { return };
        if self.write_extents(process, &begun, usize::MAX) {
            self.commit(process, begun);
        } else {
            self.drop_put(begun);
        }
        // A put wakes maintenance.
        if rng.one_in(2) {
            self.turn(process, Turn::Maintain);
        }
    }

    /// Begins a put whose header, perhaps, is written later, or which is dropped half-way.
    pub fn begin(&self, process: &Process, k: u64, rng: &mut Rng) {
        let Some(begun) = self.start(process, k, rng) else { return };
        let count = if rng.one_in(4) { 1 } else { usize::MAX };
        if !self.write_extents(process, &begun, count) || count == 1 {
            self.drop_put(begun);
        } else if rng.one_in(3) {
            process.begun.lock().push(begun);
        } else {
            process.write.defer(true);
            self.commit(process, begun);
            process.write.defer(false);
        }
    }

    /// A put that ends without a commit.
    fn drop_put(&self, begun: Begun) {
        self.model.lock().puts.remove(&begun.id);
    }

    /// Lets something that is under way go on.
    pub fn go_on(&self, process: &Process, rng: &mut Rng) {
        self.disk.enter(process.number);
        if rng.one_in(3) {
            process.write.end_late();
        }
        if rng.one_in(2) && process.write.run_one(rng.next()) {
            return self.note_ends(process);
        }
        let begun = process.begun.lock().pop();
        if let Some(begun) = begun {
            self.commit(process, begun);
        }
    }
}
