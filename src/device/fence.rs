//! Points in the work of an accelerator's streams, and the names of streams that belong to the
//! caller.
//!
//! A [`Fence`] keeps its point alive, so it can be waited for at any time.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Time between two checks of a point whose device cannot wait for it.
const POLL: Duration = Duration::from_micros(20);

/// A stream of the caller (such as PyTorch's current one), by its driver handle, which must be live
/// while it is used; never freed here. 0 is the default stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Stream(pub u64);

/// A point in a stream's work, as a device implements it.
pub trait Point: Send + Sync + 'static {
    /// Whether the work before the point is over. Does not block.
    fn has_passed(&self) -> bool;

    /// Whether waiting for this point includes waiting for `other`: it is the same point, or an
    /// earlier one of the same stream.
    fn covers(&self, _other: &dyn Point) -> bool {
        false
    }

    /// Blocks the host until the work before the point is over.
    fn wait(&self) {
        while !self.has_passed() {
            std::thread::sleep(POLL);
        }
    }

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

    /// Blocks the host until the work before it is over.
    pub fn wait(&self) {
        self.0.wait();
    }

    /// The device's own type.
    #[must_use]
    pub fn point(&self) -> &dyn Any {
        self.0.as_any()
    }
}

/// Adds `fence` to `fences`, unless one of them covers it already, and removes those that it
/// covers.
pub fn add_fence(fences: &mut Vec<Fence>, fence: Fence) {
    if fences.iter().any(|f| f.0.covers(&*fence.0)) {
        return;
    }
    fences.retain(|f| !fence.0.covers(&*f.0));
    fences.push(fence);
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fence(passed: {})", self.has_passed())
    }
}
