//! SIGINT, SIGTERM and SIGHUP set a flag that long work checks from time to time, so that it ends
//! in order: prints what it has measured, removes what it has made.
//!
//! A second signal ends the process at once, for somebody who does not want to wait for that. A
//! process that another one of this program has started ends with that one.

use std::io::Read as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use forebay::{Error, ErrorKind, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use crate::out;

/// The signal that came, 0 for none; empty before [`listen`].
static CAME: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

/// From now on these signals do not end the process by themselves.
pub(crate) fn listen() -> Result<()> {
    let came = Arc::new(AtomicUsize::new(0));
    if CAME.set(Arc::clone(&came)).is_err() {
        return Ok(());
    }
    let again = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // Under nohup it is meant to go on.
        if signal == SIGHUP && is_ignored(signal) {
            continue;
        }
        // Handlers run in this order: the first signal must find `again` unset. The end of a
        // terminal may send SIGHUP twice, and nobody waits there.
        let twice = match signal {
            SIGHUP => Ok(()),
            _ => flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&again)).map(drop),
        };
        twice
            .and_then(|()| flag::register(signal, Arc::clone(&again)))
            .and_then(|_| flag::register_usize(signal, Arc::clone(&came), signal as usize))
            .map_err(|e| Error::io("cannot listen to signals", e))?;
    }
    Ok(())
}

/// Whether whoever started this process has it ignore `signal`.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// The signal that asked for the end.
pub(crate) fn signal() -> Option<u8> {
    let came = CAME.get().map_or(0, |came| came.load(Ordering::Relaxed));
    u8::try_from(came).ok().filter(|signal| *signal > 0)
}

/// Whether the work is to end.
pub(crate) fn asked() -> bool {
    signal().is_some()
}

/// An error where the work is to end; [`is_end`] recognises it.
pub(crate) fn check() -> Result<()> {
    if asked() { Err(Error::new(ErrorKind::Cancelled, "interrupted")) } else { Ok(()) }
}

/// Whether `error` comes from the end that was asked for.
pub(crate) fn is_end(error: &Error) -> bool {
    asked() && error.kind() == ErrorKind::Cancelled
}

/// From now on this process ends with its parent, however that ends, because its standard input is
/// closed then. `clean_up` comes before.
pub(crate) fn with_parent(clean_up: impl FnOnce() + Send + 'static) -> Result<()> {
    let watch = move || {
        let mut nothing = [0; 1];
        while std::io::stdin().read(&mut nothing).is_ok_and(|n| n > 0) {}
        clean_up();
        std::process::exit(i32::from(out::EXIT_FAILED));
    };
    let thread = std::thread::Builder::new().name("parent-watch".to_owned()).spawn(watch);
    thread.map(drop).map_err(|e| Error::io("cannot start a thread", e))
}
