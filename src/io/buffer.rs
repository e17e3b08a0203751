//! Memory that I/O reads and writes (local stand-in until the io room's own file is merged).
#![expect(unsafe_code, reason = "raw addresses of pinned buffers")]

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Host memory.
    Host,
    /// Memory of the accelerator with this ordinal.
    Device(u32),
}

/// Memory that I/O may read and write.
///
/// # Safety
/// Unique owner; address and length stay the same until drop.
pub unsafe trait IoBuf: Send + 'static {
    /// Address.
    fn as_mut_ptr(&self) -> *mut u8;
    /// Bytes.
    fn len(&self) -> usize;
    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Where it lies.
    fn place(&self) -> Place;
    /// Region id and offset in it.
    fn region(&self) -> Option<(u64, usize)>;
}

/// A unique owner of memory.
pub struct Buf(Box<dyn IoBuf>);

impl Buf {
    /// Wraps a buffer.
    pub fn new(buf: impl IoBuf) -> Self {
        Self(Box::new(buf))
    }
    /// Bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }
    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    /// Address.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.0.as_mut_ptr()
    }
    /// Place.
    pub fn place(&self) -> Place {
        self.0.place()
    }
    /// Region.
    pub fn region(&self) -> Option<(u64, usize)> {
        self.0.region()
    }
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: unique owner of initialised memory, per the contract of `IoBuf`.
        unsafe { std::slice::from_raw_parts(self.0.as_mut_ptr(), self.0.len()) }
    }
    /// The bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: unique owner of initialised memory, per the contract of `IoBuf`.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr(), self.0.len()) }
    }
}

/// A region of memory that queues may register.
///
/// # Safety
/// Address and length stay the same until drop.
pub unsafe trait MemRegion: Send + Sync + 'static {
    /// Id.
    fn id(&self) -> u64;
    /// Address.
    fn as_mut_ptr(&self) -> *mut u8;
    /// Bytes.
    fn len(&self) -> usize;
    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
