//! Loads, with every check that a load makes, and leases.

use std::sync::Arc;
use std::time::Duration;

use forebay::format::crc;
use forebay::io::{self, AlignedBuf, Buf, Request};
use forebay::log::{Bad, Chunk};

use super::model::State;
use super::queue::Faults;
use super::rng::Rng;
use super::world::{Held, Process, World};
use super::{key, value};

const LEASE_MS: u64 = 20_000;

/// What loading a key gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loaded {
    /// Every byte is that of this put.
    Put(u64),
    /// It is not there.
    Miss,
    /// It is there but was found damaged.
    Bad,
}

/// The number of the put that these bytes begin with.
fn id_of(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(*bytes.first_chunk::<8>().unwrap())
}

impl World {
    fn read(&self, process: &Process, chunk: &Chunk, (offset, len): (u64, usize)) -> Option<Buf> {
        let buf = Buf::new(AlignedBuf::zeroed(len).unwrap());
        let request = Request::read(Arc::clone(&chunk.file), offset, buf, |_| ());
        let done = self.run(process, |log| io::wait(&*log.drive(0).unwrap().read, request));
        done.result.ok().and(done.buf)
    }

    /// Reads a located chunk or object as a load does: every check, then every byte against what
    /// was stored.
    fn read_chunk(&self, process: &Process, k: u64, chunk: &Chunk) -> Option<u64> {
        let parts =
            if self.config.is_object(k) { self.read_object(process, chunk) } else { self.read_layers(process, chunk) };
        let parts = parts?;
        let id = id_of(&parts[0]);
        for (layer, bytes) in parts.iter().enumerate() {
            if id_of(bytes) != id {
                self.fail(&format!("key {k}: layers of two puts passed every check"));
            }
            if *bytes != value(k, id, layer, bytes.len()) {
                self.fail(&format!("key {k}: a wrong byte passed every check"));
            }
        }
        Some(id)
    }

    fn read_layers(&self, process: &Process, chunk: &Chunk) -> Option<Vec<Vec<u8>>> {
        let header = self.read(process, chunk, (chunk.header_offset(), chunk.layout.header_bytes as usize))?;
        let header = process.log.check_header(chunk, header.as_slice()).ok()?;
        let mut layers = Vec::new();
        for (layer, e) in chunk.layout.extents.iter().enumerate() {
            let buf = self.read(process, chunk, (chunk.slot_offset + e.offset, e.padded_len as usize))?;
            let bytes = &buf.as_slice()[..e.len as usize];
            if crc(bytes) != header.layers[layer].crc {
                return None;
            }
            layers.push(bytes.to_vec());
        }
        Some(layers)
    }

    fn read_object(&self, process: &Process, chunk: &Chunk) -> Option<Vec<Vec<u8>>> {
        let slot = self.read(process, chunk, (chunk.slot_offset, chunk.slot_bytes as usize))?;
        let header = process.log.check_header(chunk, slot.as_slice()).ok()?;
        let layer = header.layers.first()?;
        let payload = slot.as_slice().get(layer.offset as usize..)?.get(..layer.len as usize)?;
        if crc(payload) != layer.crc {
            return None;
        }
        Some(vec![payload.to_vec()])
    }

    /// Loads a key; what is served must be allowed.
    pub fn load(&self, process: &Process, k: u64) -> Loaded {
        // Other threads go on while this one reads.
        let (gone, now_s) = (self.model.lock().gone(k), self.now_s());
        let Some(chunk) = self.run(process, |log| log.locate(&key(k), Duration::from_secs(1))) else {
            return Loaded::Miss;
        };
        let Some(id) = self.read_chunk(process, k, &chunk) else {
            if let Some(put) = self.model.lock().of_sequence(k, chunk.sequence) {
                put.going = true;
            }
            self.run(process, |log| log.report_bad(&chunk, Bad::Corrupt));
            return Loaded::Bad;
        };
        let objection = self.model.lock().objection(k, id);
        if let Some(why) = objection.filter(|_| self.config.threads == 0 || gone.contains(&id)) {
            self.fail_at(k, &format!("put {id} is served, but {why}"));
        }
        if chunk.expiry_s != 0 && now_s >= u64::from(chunk.expiry_s) {
            self.fail_at(k, &format!("put {id} is served, but it has expired"));
        }
        Loaded::Put(id)
    }

    /// Leases a chunk for some time.
    pub fn hold(&self, process: &Process, k: u64) {
        let chunk = self.run(process, |log| log.locate(&key(k), Duration::from_millis(LEASE_MS)));
        if let Some(chunk) = chunk.filter(Chunk::is_leased) {
            process.held.lock().push(Held { chunk, key: k, until_ms: self.clock.ms() + LEASE_MS });
        }
    }

    /// What is leased is still what it was, whatever has been reclaimed.
    pub fn check_held(&self, process: &Process, rng: &mut Rng) {
        let held = {
            let mut all = process.held.lock();
            if all.is_empty() {
                return;
            }
            let n = rng.below(all.len() as u64) as usize;
            all.swap_remove(n)
        };
        // A read that the drive fails says nothing of what lies there.
        let quiet = process.held.lock();
        let faults = process.read.set_faults(Faults::default());
        let good = self.read_chunk(process, held.key, &held.chunk).is_some();
        process.read.set_faults(faults);
        drop(quiet);
        // What is not flushed may be gone with the process that stored it, and what is removed is
        // to be.
        let put = self.model.lock().of_sequence(held.key, held.chunk.sequence).copied();
        let is_gone = put.is_none_or(|put| put.going || put.state == State::Unsure);
        if !good && !is_gone && self.clock.ms() < held.until_ms && !self.faulty() {
            self.fail(&format!("key {}: a leased chunk was overwritten", held.key));
        }
    }
}
