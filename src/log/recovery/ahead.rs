//! Reading ahead: threads read and check pieces of a file, while the caller takes their results.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::io::AlignedBuf;

/// Bytes read at once.
pub(super) const READ_BYTES: usize = 1 << 20;
/// Threads that read a large file. With direct I/O a single one would leave the drive idle while it
/// checks.
const READERS: usize = 3;
/// Results that wait to be taken.
const AHEAD: usize = 4 * READERS;

/// Takes the result of a reader.
pub(super) type Give<'a, T> = &'a mut dyn FnMut(T) -> Result<()>;

/// Reads the piece with this number into a buffer, checks it, and gives its results.
pub(super) type ReadPiece<'a, T> = dyn Fn(usize, &mut AlignedBuf, Give<'_, T>) -> Result<()> + Sync + 'a;

/// Calls `read` once for each of `count` pieces of a file that have `bytes` bytes in all, with a
/// buffer to read into, and gives `sink` the results, in no order.
///
/// # Errors
/// Those of `read` and `sink`.
pub(super) fn read_pieces<T: Send>(
    count: usize,
    bytes: usize,
    read: &ReadPiece<'_, T>,
    sink: Give<'_, T>,
) -> Result<()> {
    // Not worth threads.
    if bytes <= READ_BYTES {
        let mut buf = AlignedBuf::zeroed(bytes.max(PAGE_BYTES))?;
        return (0..count).try_for_each(|piece| read(piece, &mut buf, sink));
    }
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let (tx, rx) = crossbeam_channel::bounded(AHEAD);
        let readers: Vec<_> = (0..READERS.min(count))
            .map(|_| {
                let (tx, next) = (tx.clone(), &next);
                let work = move || {
                    let mut buf = AlignedBuf::zeroed(READ_BYTES)?;
                    // Fails only after `sink` has failed, whose error is the one returned.
                    let refused = || Error::new(ErrorKind::Internal, "not taken");
                    let mut give = |made| tx.send(made).map_err(|_| refused());
                    loop {
                        let piece = next.fetch_add(1, Ordering::Relaxed);
                        if piece >= count {
                            return Ok(());
                        }
                        read(piece, &mut buf, &mut give)?;
                    }
                };
                let thread = std::thread::Builder::new().name("fb-recover".to_owned()).spawn_scoped(scope, work);
                thread.map_err(|e| Error::io("cannot start a thread that reads the index", e))
            })
            .collect::<Result<_>>()?;
        drop(tx);
        let outcome = rx.iter().try_for_each(sink);
        // The readers stop when their results are not taken any more.
        drop(rx);
        readers.into_iter().fold(outcome, |outcome, reader| {
            let panicked = || Err(Error::new(ErrorKind::Internal, "a thread that reads the index panicked"));
            outcome.and(reader.join().unwrap_or_else(|_| panicked()))
        })
    })
}
