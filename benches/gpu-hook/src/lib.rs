//! Forebay's device side behind a C interface for `benches/gpu.py`, which times it beside PyTorch's
//! work in one process.
//!
//! A [`Bench`] holds paged KV, staging for all of it, and pinned memory; its functions move
//! everything once and say how long that took. Every function of the interface gives a negative
//! number or null where it failed, and [`fb_error`] says why.
#![expect(unsafe_code, reason = "a C interface")]

mod bench;
mod feed;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

use forebay::format::layout::SlotCodec;
use forebay::{Error, ErrorKind, Result};

pub use bench::{Bench, Kernels, Move};
use feed::Feed;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// A bench and what runs beside it.
pub struct Hook {
    bench: Bench,
    feed: Option<Feed>,
}

/// The value, or `failed` with the error kept for [`fb_error`].
fn or_failed<T>(result: Result<T>, failed: T) -> T {
    result.unwrap_or_else(|e| {
        LAST.with(|last| *last.borrow_mut() = CString::new(e.to_string()).unwrap_or_default());
        failed
    })
}

fn text(given: *const c_char) -> Result<String> {
    if given.is_null() {
        return Err(Error::new(ErrorKind::InvalidInput, "a null string"));
    }
    // SAFETY: not null, and the caller passes a string that ends with 0.
    Ok(unsafe { CStr::from_ptr(given) }.to_string_lossy().into_owned())
}

fn hook<'a>(given: *mut Hook) -> Result<&'a mut Hook> {
    // SAFETY: null, or made by `fb_open`, not yet closed, and used by one thread at a time
    // (contract of the interface).
    unsafe { given.as_mut() }.ok_or_else(|| Error::new(ErrorKind::InvalidInput, "a null bench"))
}

/// Why this thread's last call failed; valid until its next call.
#[unsafe(no_mangle)]
pub extern "C" fn fb_error() -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}

/// Opens `chunks` chunks of `model` on `device` (`host`, `cuda:0`), with kernels of at most
/// `max_ctas` thread blocks (0: no limit), that take checksums or not and code with exp4 or not.
/// Null where that fails.
#[unsafe(no_mangle)]
pub extern "C" fn fb_open(
    device: *const c_char,
    model: *const c_char,
    chunks: u32,
    max_ctas: u32,
    checksums: bool,
    coded: bool,
) -> *mut Hook {
    let open = || {
        let codec = if coded { SlotCodec::Exp4 } else { SlotCodec::None };
        let kernels = Kernels { max_ctas, checksums, codec };
        let bench = Bench::open(&text(device)?, &text(model)?, chunks as usize, kernels)?;
        Ok(Box::into_raw(Box::new(Hook { bench, feed: None })))
    };
    or_failed(open(), std::ptr::null_mut())
}

/// Payload bytes that one call moves.
#[unsafe(no_mangle)]
pub extern "C" fn fb_bytes(given: *mut Hook) -> f64 {
    or_failed(hook(given).map(|h| h.bench.bytes() as f64), -1.0)
}

/// Moves everything once and gives the seconds: 0 scatter with CRC, 1 gather with CRC, 2 pinned
/// memory to staging, 3 staging to pinned memory, 4 pinned memory to paged KV.
#[unsafe(no_mangle)]
pub extern "C" fn fb_move(given: *mut Hook, what: u32) -> f64 {
    let run = || {
        let bench = &hook(given)?.bench;
        Ok(bench.run(Move::of(what)?)?.as_secs_f64())
    };
    or_failed(run(), -1.0)
}

/// Bytes of the paged KV that are not what was moved last from pinned memory; -1 where that cannot
/// be told.
#[unsafe(no_mangle)]
pub extern "C" fn fb_check(given: *mut Hook) -> f64 {
    or_failed(hook(given).and_then(|h| h.bench.wrong_bytes()).map(|n| n as f64), -1.0)
}

/// Starts moving pinned memory to paged KV again and again, at most `bytes_per_s` (0: as fast as it
/// goes), until [`fb_feed_stop`]. 0, or -1 where that fails.
#[unsafe(no_mangle)]
pub extern "C" fn fb_feed_start(given: *mut Hook, bytes_per_s: f64) -> i32 {
    let start = || {
        let h = hook(given)?;
        h.feed = Some(Feed::start(h.bench.share(), bytes_per_s)?);
        Ok(0)
    };
    or_failed(start(), -1)
}

/// Stops the feed; bytes per second that it moved, or -1 where it failed or did not run.
#[unsafe(no_mangle)]
pub extern "C" fn fb_feed_stop(given: *mut Hook) -> f64 {
    let stop = || {
        let feed = hook(given)?.feed.take();
        feed.ok_or_else(|| Error::new(ErrorKind::InvalidInput, "no feed runs"))?.stop()
    };
    or_failed(stop(), -1.0)
}

/// Closes a bench.
///
/// # Safety
/// `given` must be null or come from [`fb_open`], and must not be used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_close(given: *mut Hook) {
    if !given.is_null() {
        // SAFETY: made by `Box::into_raw` in `fb_open`, and not used again.
        drop(unsafe { Box::from_raw(given) });
    }
}
