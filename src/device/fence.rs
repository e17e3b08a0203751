//! Points in the work of an accelerator's streams, and the names of streams that belong to the caller.
//!
//! A [`Fence`] keeps what it stands for: whoever waits for one waits for the work it was made at, however late.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A stream of the caller (such as PyTorch's current one), by its driver handle, which must be live while it is used; never freed
/// here. 0 is the default stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Stream(pub u64);

/// What a device makes fences of.
pub trait Point: Send + Sync + 'static {
    /// Whether the work before the point is over. Does not block.
    fn has_passed(&self) -> bool;

    /// The device's own type.
    fn as_any(&self) -> &dyn Any;
}

/// A point in a stream's work that other streams can be made to wait for.
#[derive(Clone)]
pub struct Fence(Arc<dyn Point>);

impl Fence {
    /// The fence at `point`.
    #[must_use]
    pub fn new(point: Arc<dyn Point>) -> Self {
        Self(point)
    }

    /// Whether the work before it is over. Does not block.
    #[must_use]
    pub fn has_passed(&self) -> bool {
        self.0.has_passed()
    }

    /// The device's own type.
    #[must_use]
    pub fn point(&self) -> &dyn Any {
        self.0.as_any()
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fence(passed: {})", self.has_passed())
    }
}
