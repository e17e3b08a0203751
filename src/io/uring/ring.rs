//! One ring and the kernel's interface to it.
//!
//! Invariants: every call comes from the thread that made the ring; at most as many blocks as were
//! agreed when it was made are in the kernel, so completions never overflow; features that the
//! kernel lacks are left out and noted, except timed waits and lasting polls, which are required.
#![expect(unsafe_code, reason = "submission entries carry raw addresses; the job table keeps what they name alive")]

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, cqueue, opcode, squeue, types};

use super::tables::{FileSlot, FileTable, Window, Windows};
use crate::error::{Error, ErrorKind, Result};
use crate::io::jobs::IoPiece;
use crate::io::{MemRegion, Notes, Op, QueueSpec};

/// Completion of the bell's poll; block completions carry their slot.
pub(super) const BELL: u64 = u64::MAX;
/// Completion of a cancellation.
pub(super) const CANCEL: u64 = u64::MAX - 1;

const FILE_SLOTS: usize = 64;
/// The block layer merges neighbouring blocks of one submission, unless it has at most this many
/// entries.
const UNMERGED: usize = 2;
/// Blocks of at least this size are not to be merged: a drive writes two of 1 MiB side by side
/// faster than one of 2 MiB.
const LARGE_BYTES: usize = 256 << 10;

/// What waiting for completions found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Waited {
    /// Look at the completions; there may be none.
    Look,
    /// The ring is broken.
    Broken(i32),
}

pub(super) struct Ring {
    uring: IoUring,
    bell: RawFd,
    files: FileTable,
    windows: Windows,
    regions: Vec<Arc<dyn MemRegion>>,
    notes: Notes,
}

impl Ring {
    /// A ring for `depth` blocks at once whose bell is `bell`.
    pub(super) fn new(spec: &QueueSpec, depth: usize, bell: RawFd) -> Result<Self> {
        let uring = build(depth, &spec.notes)?;
        if !uring.params().is_feature_ext_arg() || !uring.params().is_feature_nodrop() {
            return Err(Error::new(ErrorKind::Unsupported, "io_uring of this kernel has no timed waits (before 5.11)"));
        }
        // There is no flag for polls that stay armed; these came with the same kernel. Without them
        // the bell would complete again and again, and the owner never sleep.
        if !uring.params().is_feature_resource_tagging() {
            let why = "io_uring of this kernel has no multishot polls (before 5.13)";
            return Err(Error::new(ErrorKind::Unsupported, why));
        }
        let regions = spec.options.regions.clone();
        let mut ring = Self {
            uring,
            bell,
            files: FileTable::new(FILE_SLOTS),
            windows: Windows::new(regions.iter().map(|r| &**r)),
            regions,
            notes: spec.notes.clone(),
        };
        if let Err(e) = ring.uring.submitter().register_files_sparse(FILE_SLOTS as u32) {
            ring.files.disable();
            ring.notes.add(format!("files are not registered: {e}"));
        }
        // The table also has room for regions that are added later.
        let windows = ring.windows.capacity();
        if let Err(e) = ring.uring.submitter().register_buffers_sparse(windows as u32) {
            ring.windows.disable();
            ring.notes.add(format!("buffers are not registered: {e}"));
        }
        ring.arm_bell();
        Ok(ring)
    }

    /// Adds memory that blocks may lie in, to be registered when first used. The ring keeps it.
    pub(super) fn add_region(&mut self, region: Arc<dyn MemRegion>) {
        if self.windows.add(&*region) {
            self.regions.push(region);
        }
    }

    /// Lets the bell wake the ring. Must be repeated after a completion of it that no other will
    /// follow.
    pub(super) fn arm_bell(&mut self) {
        let e = opcode::PollAdd::new(types::Fd(self.bell), libc::POLLIN as u32).multi(true).build();
        self.push(e.user_data(BELL));
    }

    /// Queues one block; it goes to the kernel with the next `submit` or `wait`, if not at once.
    /// True where its file is newly registered.
    pub(super) fn push_piece(&mut self, piece: &IoPiece, slot: u64) -> bool {
        let window = self.window(piece);
        let (fixed, fresh) = self.file(piece);
        self.push(entry(piece, fixed, window).user_data(slot));
        if piece.span.len >= LARGE_BYTES && self.uring.submission().len() >= UNMERGED {
            // If the ring is broken, the next wait reports it.
            let _ = self.submit();
        }
        fresh
    }

    /// Asks the kernel to cancel the block in `slot`. The block completes in any case.
    pub(super) fn push_cancel(&mut self, slot: u64) {
        self.push(opcode::AsyncCancel::new(slot).build().user_data(CANCEL));
    }

    fn push(&mut self, entry: squeue::Entry) {
        // SAFETY: file and memory that the entry names stay valid until its completion: blocks
        // through the job table, which keeps both until `span_ended`, and the bell through the
        // queue that owns it and this ring.
        while unsafe { self.uring.submission().push(&entry) }.is_err() {
            if let Waited::Broken(_) = self.submit() {
                return;
            }
        }
    }

    fn file(&mut self, piece: &IoPiece) -> (Option<u32>, bool) {
        match self.files.find(piece.file_id) {
            FileSlot::At(i) => (Some(i), false),
            FileSlot::New(i) => {
                // Queued entries may name this index for the file that was there. The kernel may
                // take only some of them, as where it has no memory: the next block of this file
                // tries again.
                let _ = self.submit();
                if !self.uring.submission().is_empty() {
                    self.files.forget(piece.file_id);
                    return (None, false);
                }
                match self.uring.submitter().register_files_update(i, &[piece.fd]) {
                    Ok(_) => (Some(i), true),
                    Err(e) => {
                        self.files.disable();
                        // The kernel's table would keep the files open that are in it.
                        let _ = self.uring.submitter().unregister_files();
                        self.notes.add(format!("files are no longer registered: {e}"));
                        (None, false)
                    }
                }
            }
            FileSlot::None => (None, false),
        }
    }

    /// Clears a closed file's place in the kernel's table, which else would keep the file open.
    pub(super) fn forget_file(&mut self, file_id: u64) {
        if let Some(i) = self.files.forget(file_id) {
            let _ = self.uring.submitter().register_files_update(i, &[-1]);
        }
    }

    fn window(&mut self, piece: &IoPiece) -> Option<u16> {
        let (id, at) = piece.region?;
        match self.windows.find(id, at, piece.span.len) {
            Window::At(i) => Some(i),
            Window::None => None,
            Window::New { index, offset, len } => {
                let region = self.regions.iter().find(|r| r.id() == id)?;
                let iov_base = region.as_mut_ptr().wrapping_add(offset).cast();
                // Registering faults in memory that was never touched: milliseconds for a window,
                // or tens of them in a virtual machine. The drive works on the queued blocks
                // meanwhile.
                let _ = self.submit();
                let iov = libc::iovec { iov_base, iov_len: len };
                // SAFETY: the window lies in a region that `self.regions` keeps mapped for as long
                // as the ring lives.
                match unsafe { self.uring.submitter().register_buffers_update(index.into(), &[iov], None) } {
                    Ok(()) => Some(index),
                    Err(e) => {
                        self.windows.failed(index);
                        self.windows.freeze();
                        let mib = self.windows.registered_bytes() >> 20;
                        let advice = match e.raw_os_error() {
                            Some(libc::ENOMEM) => "; raise RLIMIT_MEMLOCK (ulimit -l)",
                            Some(libc::EOPNOTSUPP) => "; memory that maps a file cannot be registered",
                            _ => "",
                        };
                        self.notes.add(format!("registered buffers end at {mib} MiB ({e}{advice})"));
                        None
                    }
                }
            }
        }
    }

    /// Hands the queued entries to the kernel.
    pub(super) fn submit(&mut self) -> Waited {
        if self.uring.submission().is_empty() {
            return Waited::Look;
        }
        look_at(self.uring.submit())
    }

    /// Hands the queued entries to the kernel and sleeps until a completion comes, at most for
    /// `limit`.
    pub(super) fn wait(&mut self, limit: Option<Duration>) -> Waited {
        let Some(limit) = limit else { return look_at(self.uring.submit_and_wait(1)) };
        let ts = types::Timespec::from(limit);
        look_at(self.uring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&ts)))
    }

    /// Takes all completions: slot or mark, result, whether more will follow for the same entry.
    pub(super) fn take_completions(&mut self, into: &mut Vec<(u64, i32, bool)>) {
        into.extend(self.uring.completion().map(|c| (c.user_data(), c.result(), cqueue::more(c.flags()))));
    }
}

fn look_at(r: std::io::Result<usize>) -> Waited {
    match r.map_err(|e| e.raw_os_error().unwrap_or(libc::EIO)) {
        // EBUSY and EAGAIN: the owner takes the completions that wait, and tries again.
        Ok(_) | Err(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => Waited::Look,
        Err(errno) => Waited::Broken(errno),
    }
}

fn entry(piece: &IoPiece, file: Option<u32>, window: Option<u16>) -> squeue::Entry {
    let len = piece.span.len as u32;
    // A macro, since the trait that both kinds of descriptor implement is private to the crate.
    macro_rules! on {
        ($make:expr) => {
            match file {
                Some(i) => $make(types::Fixed(i)),
                None => $make(types::Fd(piece.fd)),
            }
        };
    }
    match (piece.op, window) {
        (Op::Read, Some(i)) => on!(|f| opcode::ReadFixed::new(f, piece.ptr, len, i).offset(piece.offset).build()),
        (Op::Read, None) => on!(|f| opcode::Read::new(f, piece.ptr, len).offset(piece.offset).build()),
        (Op::Write, Some(i)) => on!(|f| opcode::WriteFixed::new(f, piece.ptr, len, i).offset(piece.offset).build()),
        (Op::Write, None) => on!(|f| opcode::Write::new(f, piece.ptr, len).offset(piece.offset).build()),
        (Op::Flush, _) => on!(|f| opcode::Fsync::new(f).flags(types::FsyncFlags::DATASYNC).build()),
    }
}

/// When the kernel runs the code that posts completions, cheapest first.
#[derive(Clone, Copy)]
enum TaskWork {
    Deferred,
    Cooperative,
    Interrupting,
}

/// The ring with the cheapest completion handling that the kernel knows.
fn build(depth: usize, notes: &Notes) -> Result<IoUring> {
    // Two more than blocks, for the bell and a cancellation; `push` submits when the queue is full.
    let entries = (depth as u32 + 2).next_power_of_two();
    let mut last = libc::EINVAL;
    for way in [TaskWork::Deferred, TaskWork::Cooperative, TaskWork::Interrupting] {
        let mut builder = IoUring::builder();
        builder.dontfork().setup_clamp().setup_cqsize(entries * 4);
        let note = match way {
            TaskWork::Deferred => {
                builder.setup_single_issuer().setup_defer_taskrun();
                None
            }
            TaskWork::Cooperative => {
                builder.setup_coop_taskrun();
                Some("deferred task work is not supported (before 6.1)")
            }
            TaskWork::Interrupting => Some("task work interrupts (before 5.19)"),
        };
        match builder.build(entries) {
            Ok(uring) => {
                note.into_iter().for_each(|n| notes.add(n.to_owned()));
                return Ok(uring);
            }
            Err(e) => last = e.raw_os_error().unwrap_or(libc::EIO),
        }
        if last != libc::EINVAL {
            break;
        }
    }
    Err(refusal(last))
}

fn refusal(errno: i32) -> Error {
    let source = std::io::Error::from_raw_os_error(errno);
    let advice = match errno {
        libc::EPERM | libc::EACCES => {
            "a seccomp profile (Docker's and Kubernetes' default) or kernel.io_uring_disabled forbids it: allow io_uring"
        }
        libc::ENOSYS => "the kernel is built without it, or a sandbox hides it",
        libc::ENOMEM => "raise RLIMIT_MEMLOCK (ulimit -l)",
        _ => "see the kernel log",
    };
    Error::new(ErrorKind::Unsupported, "io_uring cannot be set up").source(source).advice(advice)
}
