//! What the queues need of an accelerator: copies between its memory and the host's, where cuFile
//! does not move the bytes directly.
//!
//! This module knows no accelerator. The device module implements [`Mover`]; the modules that open
//! a drive pass it in [`DeviceSide`].
#![expect(unsafe_code, reason = "copies name memory by its address only")]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::buffer::{Buf, MemRegion, MemorySpace};
use crate::error::{Error, ErrorKind, Result};

/// One contiguous copy between host memory and an accelerator's.
pub struct Copying {
    /// Address in the accelerator's memory.
    pub device: u64,
    /// Address in host memory, best inside a region of [`Mover::pinned`].
    pub host: *mut u8,
    /// Bytes.
    pub len: usize,
    /// Called exactly once when neither memory is used by the copy any more, on a thread of the
    /// mover; must be short.
    pub done: Box<dyn FnOnce(Result<()>) + Send>,
}

// SAFETY: the addresses are only passed on; who made the value answers for the memory (contract of
// `Mover`'s methods).
unsafe impl Send for Copying {}

impl fmt::Debug for Copying {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Copying({} bytes between {:p} and device {:#x})", self.len, self.host, self.device)
    }
}

/// Host memory is pinned as long as this lives.
pub type Pin = Box<dyn Any + Send + Sync>;

/// Copies between host memory and one accelerator's. Submitting never blocks; errors come through
/// `done`.
pub trait Mover: Send + Sync + 'static {
    /// The accelerator whose memory it reaches.
    fn place(&self) -> MemorySpace;

    /// Copies from host memory into the accelerator's.
    ///
    /// # Safety
    /// Until `done` is called, `len` bytes at `host` must be readable and `len` bytes at `device`
    /// writable by the accelerator; nobody else may write those at `host` or use those at `device`.
    unsafe fn to_device(&self, copying: Copying);

    /// Copies from the accelerator's memory into the host's.
    ///
    /// # Safety
    /// As [`Mover::to_device`], the other way round.
    unsafe fn to_host(&self, copying: Copying);

    /// Host memory that the accelerator copies from and to at full speed.
    ///
    /// # Errors
    /// What the operating system or the driver says.
    fn pinned(&self, bytes: usize) -> Result<Arc<dyn MemRegion>>;

    /// Makes host memory that is there already as fast as that of [`Mover::pinned`], until the
    /// answer is dropped.
    ///
    /// # Errors
    /// `Unsupported` where this accelerator has no such memory; what the driver says.
    ///
    /// # Safety
    /// `len` bytes at `host`, whole pages, must stay mapped, to the same memory, as long as the
    /// answer lives.
    unsafe fn pin(&self, _host: *mut u8, _len: usize) -> Result<Pin> {
        Err(Error::new(ErrorKind::Unsupported, "this accelerator pins no memory"))
    }

    /// Fresh memory of the accelerator, for a read whose own memory a hung call may still write to.
    ///
    /// # Errors
    /// `Unsupported` where there is none: the read times out. What the driver says.
    fn spare(&self, _bytes: usize) -> Result<Buf> {
        Err(Error::new(ErrorKind::Unsupported, "this accelerator has no spare memory"))
    }

    /// Makes the accelerator usable from the calling thread; for threads that call libraries which
    /// expect that.
    ///
    /// # Errors
    /// What the driver says.
    fn bind_thread(&self) -> Result<()>;
}

/// Copies the first `len` bytes of a buffer to another: one is in host memory, the other one in the
/// accelerator's. `done` gets both when neither is used any more; it is called as that of
/// [`Copying`].
pub fn copy_buf(
    mover: &dyn Mover,
    from: Buf,
    to: Buf,
    len: usize,
    done: impl FnOnce(Result<()>, (Buf, Buf)) + Send + 'static,
) {
    let is_in = from.place() == MemorySpace::Host && to.place() == mover.place();
    let is_out = from.place() == mover.place() && to.place() == MemorySpace::Host;
    if !(is_in || is_out) || len > from.len() || len > to.len() || to.is_shared() {
        let why = format!("no copy of {len} bytes from {from:?} to {to:?}");
        return done(Err(Error::new(ErrorKind::InvalidInput, why)), (from, to));
    }
    let (device, host) = if is_in { (&to, &from) } else { (&from, &to) };
    let (device, host) = (device.as_mut_ptr() as u64, host.as_mut_ptr());
    let copying = Copying { device, host, len, done: Box::new(move |result| done(result, (from, to))) };
    // SAFETY: `len` bytes of each of the buffers, which `done` owns; the one that is written is its
    // alone.
    unsafe { if is_in { mover.to_device(copying) } else { mover.to_host(copying) } }
}

/// Whether and how cuFile is used for an accelerator's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CufileChoice {
    /// Where it moves bytes without the host's memory; otherwise the host's queues and one copy,
    /// which are faster than its compatibility mode.
    #[default]
    Auto,
    /// In any mode, or an error.
    Force,
    /// Not at all.
    Never,
}

/// An accelerator whose memory a drive's queues are to serve besides the host's.
#[derive(Clone)]
pub struct DeviceSide {
    /// Copies, where cuFile does not move the bytes.
    pub mover: Arc<dyn Mover>,
    /// Staging memory in the accelerator, to register with cuFile.
    pub regions: Vec<Arc<dyn MemRegion>>,
    /// Whether cuFile is used.
    pub cufile: CufileChoice,
    /// Bytes of pinned host memory per queue, for `bounce`.
    pub pinned_bytes: usize,
}

/// An accelerator that copies nothing and notes what is pinned for it, for tests.
#[cfg(test)]
#[derive(Default)]
pub(crate) struct PinNotes(Arc<parking_lot::Mutex<Vec<(usize, usize)>>>);

#[cfg(test)]
impl PinNotes {
    /// Address and length of what is pinned now.
    pub(crate) fn pinned(&self) -> Vec<(usize, usize)> {
        self.0.lock().clone()
    }
}

#[cfg(test)]
mod notes {
    use super::*;

    /// Something that was pinned, until it is dropped.
    struct Pinned(Arc<parking_lot::Mutex<Vec<(usize, usize)>>>, usize);

    impl Drop for Pinned {
        fn drop(&mut self) {
            self.0.lock().retain(|(start, _)| *start != self.1);
        }
    }

    impl Mover for PinNotes {
        fn place(&self) -> MemorySpace {
            MemorySpace::Device(0)
        }
        // SAFETY: nothing is copied.
        unsafe fn to_device(&self, copying: Copying) {
            (copying.done)(Ok(()));
        }
        // SAFETY: nothing is copied.
        unsafe fn to_host(&self, copying: Copying) {
            (copying.done)(Ok(()));
        }
        fn pinned(&self, _: usize) -> Result<Arc<dyn MemRegion>> {
            Err(Error::new(ErrorKind::Unsupported, "not asked for"))
        }
        // SAFETY: the memory is not looked at.
        unsafe fn pin(&self, host: *mut u8, len: usize) -> Result<Pin> {
            self.0.lock().push((host as usize, len));
            Ok(Box::new(Pinned(Arc::clone(&self.0), host as usize)))
        }
        fn bind_thread(&self) -> Result<()> {
            Ok(())
        }
    }
}
