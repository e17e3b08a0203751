//! A child process that works on a log and prints each step, and the model of what its steps allow
//! a load to give, however the child ended.

#![allow(clippy::panic, reason = "a wrong answer fails the test")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forebay::ErrorKind;
use forebay::log::{Log, LogOptions};

use super::{Rng, get, key, put, put_of};

/// Keys whose steps are all printed. As many more are stored beside them, whose bytes alone are
/// checked.
pub const KEYS: u64 = 40;

/// Tenants, the first of which is none; a key's is its number modulo this.
const TENANTS: u64 = 4;

/// Steps that a child does after it has learned that its file system is gone.
const STEPS_AFTER: u32 = 40;

/// A cache that never has to evict a chunk that is checked: one that is missing was lost.
pub fn options(dir: &Path) -> LogOptions {
    LogOptions { capacity_bytes: 64 << 20, reclaim_write_budget: 1.0, ..super::options(dir) }
}

/// Microseconds, the same in all processes.
pub fn now_us() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros()
}

pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n@ {} {line}", now_us()).unwrap();
    out.flush().unwrap();
}

/// Stores, removes keys, tenants and everything, and flushes. Every step is printed before it
/// begins and when it has returned.
pub struct Work<'a> {
    pub log: &'a Log,
    pub seed: u64,
    /// Set once the file system is gone, which ends the work some steps later. Without it every
    /// error fails the test.
    pub gone: Option<&'a AtomicBool>,
}

impl Work<'_> {
    /// Works until the end, or for ever.
    pub fn run(&self) {
        std::thread::scope(|s| {
            s.spawn(|| self.store_beside());
            self.steps();
        });
    }

    fn is_gone(&self) -> bool {
        self.gone.is_some_and(|gone| gone.load(Ordering::SeqCst))
    }

    fn tell(&self, outcome: forebay::Result<bool>, done: &str) {
        match outcome {
            Ok(true) => say(done),
            Ok(false) => say(&format!("kept-{done}")),
            Err(e) if self.gone.is_some() => say(&format!("erred-{done} {}", e.kind())),
            Err(e) => panic!("{done}: {e}"),
        }
    }

    /// Stores keys of its own, so that hardly a moment is without a store; only their bytes are
    /// checked.
    fn store_beside(&self) {
        let mut after = 0;
        for step in 1u64.. {
            after += u32::from(self.is_gone());
            if after > STEPS_AFTER {
                return;
            }
            if step % KEYS == 1 {
                let all: Vec<_> = (KEYS..2 * KEYS).map(|k| key(k as u32)).collect();
                self.tell(self.log.remove(&all).map(|_| true), "removed-beside");
            }
            say("storing-beside");
            match put(self.log, key((KEYS + step % KEYS) as u32), self.seed << 32 | step) {
                // Everything was cleared meanwhile.
                Err(e) if e.kind() == ErrorKind::Cancelled => say("refused-beside"),
                outcome => self.tell(outcome, "stored-beside"),
            }
        }
    }

    fn steps(&self) {
        let mut rng = Rng(self.seed);
        let mut after = 0;
        for step in 1u64.. {
            let (version, gone) = (self.seed << 32 | step, self.is_gone());
            after += u32::from(gone);
            if after > STEPS_AFTER {
                return;
            }
            let k = rng.below(KEYS);
            match rng.below(100) {
                0 => {
                    say("clearing");
                    self.tell(self.log.clear().map(|()| true), "cleared");
                }
                1..=3 => {
                    let tenant = 1 + k % (TENANTS - 1);
                    say(&format!("removing-tenant {tenant}"));
                    self.tell(self.log.remove_tenant(tenant).map(|_| true), &format!("removed-tenant {tenant}"));
                }
                4..=20 => {
                    say(&format!("removing {k}"));
                    self.tell(self.log.remove(&[key(k as u32)]).map(|_| true), &format!("removed {k}"));
                }
                21..=30 => self.tell(self.log.flush().map(|()| true), if gone { "gone-flushed" } else { "flushed" }),
                31..=50 if gone => _ = get(self.log, &key(k as u32)),
                _ => {
                    say(&format!("putting {k} {version}"));
                    self.tell(put_of(self.log, key(k as u32), (version, k % TENANTS)), &format!("put {k} {version}"));
                }
            }
        }
    }
}

/// A child process that prints its steps.
pub struct Teller {
    process: Child,
    lines: Receiver<(u128, String)>,
    reader: Option<JoinHandle<()>>,
}

impl Teller {
    /// Starts a test of this binary as a child, and waits until its log is open.
    pub fn start(test: &str, role: &str) -> Self {
        let mut process = super::child(test, role).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(process.stdout.take().unwrap());
        let (tx, lines) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            for line in out.lines().map_while(std::result::Result::ok) {
                if let Some((at_us, line)) = line.strip_prefix("@ ").and_then(|line| line.split_once(' ')) {
                    drop(tx.send((at_us.parse().unwrap(), line.to_owned())));
                }
            }
        });
        assert_eq!(lines.recv_timeout(Duration::from_secs(60)).unwrap().1, "open", "{role}");
        Self { process, lines, reader: Some(reader) }
    }

    /// Sends the child a line.
    pub fn order(&mut self, order: &str) {
        writeln!(self.process.stdin.as_ref().unwrap(), "{order}").unwrap();
    }

    /// Takes in what the child prints until then. Returns whether the child still lives.
    pub fn listen(&self, until: Instant, model: &mut Model) -> bool {
        loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((at_us, line)) => model.told(at_us, &line),
                Err(e) => return e == RecvTimeoutError::Timeout,
            }
        }
    }

    /// Takes in what the child prints until `wanted` comes. The child must not end before, nor any
    /// call take too long.
    pub fn await_line(&mut self, wanted: &str, model: &mut Model) -> Result<(), String> {
        let mut last = String::new();
        loop {
            match self.lines.recv_timeout(Duration::from_secs(120)) {
                Ok((_, line)) if line == wanted => return Ok(()),
                Ok((at_us, line)) => {
                    model.told(at_us, &line);
                    last = line;
                }
                Err(RecvTimeoutError::Timeout) => return Err(format!("a call has not returned; told last: {last}")),
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.process.wait().unwrap();
                    return Err(format!("the process ended by itself: {status}; told last: {last}"));
                }
            }
        }
    }

    /// Kills the child, unless it has ended, and takes in what it had printed.
    pub fn end(mut self, model: &mut Model) -> ExitStatus {
        self.process.kill().unwrap();
        let status = self.process.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
        self.lines.iter().for_each(|(at_us, line)| model.told(at_us, &line));
        status
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What a load may give, by what the child has printed.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// Of each key the versions that are allowed now, oldest first; 0 is a miss.
    pub may: BTreeMap<u64, Vec<u64>>,
    /// Steps that ended with an error.
    pub erred: u64,
    /// The last key that was printed as stored, where keys are only counted.
    pub stored: u32,
    storing: bool,
    storing_beside: bool,
    /// What was printed since the last check, and when.
    trace: Vec<(u128, String)>,
}

impl Model {
    fn all(&mut self, f: impl Fn(&mut Vec<u64>)) {
        (0..KEYS).for_each(|k| f(self.allowed(k)));
    }

    fn of_tenant(&mut self, tenant: u64, f: impl Fn(&mut Vec<u64>)) {
        (0..KEYS).filter(|k| k % TENANTS == tenant).for_each(|k| f(self.allowed(k)));
    }

    /// Whether a store was under way.
    pub fn is_amid_a_store(&self) -> bool {
        self.storing || self.storing_beside
    }

    /// Whether a load of some key must give something.
    pub fn is_any_durable(&self) -> bool {
        self.may.values().any(|may| !may.contains(&0))
    }

    /// The steps since the last check that may have changed key `k`, in the order of their times.
    pub fn trace_of(&self, k: u64) -> String {
        let concerns = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            let (what, of) =
                (words.first().copied().unwrap_or_default(), words.get(1).and_then(|w| w.parse::<u64>().ok()));
            match of {
                Some(of) if what.contains("tenant") => of == k % TENANTS,
                Some(of) => of == k,
                None => !what.ends_with("-beside"),
            }
        };
        let mut steps: Vec<&(u128, String)> = self.trace.iter().filter(|(_, line)| concerns(line)).collect();
        steps.sort();
        steps.iter().map(|(at_us, line)| format!("\n{at_us} {line}")).collect()
    }

    /// What was done to the child.
    pub fn note(&mut self, what: &str) {
        self.trace.push((now_us(), what.to_owned()));
    }

    pub fn told(&mut self, at_us: u128, line: &str) {
        self.trace.push((at_us, line.to_owned()));
        let mut words = line.split(' ');
        let what = words.next().unwrap();
        self.erred += u64::from(what.starts_with("erred-"));
        if what.ends_with("-beside") {
            self.storing_beside = what == "storing-beside";
            return;
        }
        let mut number = || words.next().and_then(|w| w.parse().ok()).unwrap_or(0);
        let (k, version) = (number(), number());
        self.storing = what == "putting";
        match what {
            "putting" => self.allowed(k).push(version),
            "kept-put" => self.allowed(k).retain(|v| *v != version),
            "removing" => self.allowed(k).push(0),
            "removed" => *self.allowed(k) = vec![0],
            "removing-tenant" => self.of_tenant(k, |may| may.push(0)),
            "removed-tenant" => self.of_tenant(k, |may| *may = vec![0]),
            "clearing" => self.all(|may| may.push(0)),
            "cleared" => self.all(|may| *may = vec![0]),
            // Everything that had returned is durable: the last that was told of each key. A step
            // that ended with an error may have had its effect or not, so that nothing is known of
            // what came before it.
            "flushed" if self.erred == 0 => self.all(|may| drop(may.drain(..may.len() - 1))),
            "stored" => self.stored = k as u32,
            "gone-flushed" => panic!("a flush ended well although the file system had been shut down before"),
            _ => {}
        }
    }

    /// The versions that a load of `k` may give.
    pub fn allowed(&mut self, k: u64) -> &mut Vec<u64> {
        self.may.entry(k).or_insert_with(|| vec![0])
    }

    /// Loads every key: each must give what it may, and nothing else from then on. Returns what
    /// every key gave, 0 for a miss; also those that were stored beside.
    pub fn verify(&mut self, log: &Log, whence: &str) -> Vec<u64> {
        let found: Vec<u64> = (0..2 * KEYS).map(|k| get(log, &key(k as u32)).unwrap_or(0)).collect();
        for (k, version) in (0..KEYS).zip(&found) {
            let may = self.allowed(k);
            assert!(may.contains(version), "{whence}, key {k}: {version:#x} is served, allowed are {may:x?}");
            *may = vec![*version];
        }
        self.trace.clear();
        self.erred = 0;
        found
    }
}
