//! How many reads may be in the kernel at once: enough to keep the drive busy, and no more.
//!
//! A drive serves all reads that it has side by side, so each read beyond what saturates it delays
//! the reads before it: the first layer of a load would arrive together with the last. The window
//! grows while reads come back within the wanted latency and shrinks while they do not; by Little's
//! law it settles where the drive is saturated at that latency. Invariant: it stays between the
//! floor (4 MiB and 4 blocks, so that no drive idles) and the depth. Nothing here waits or reads a
//! clock.

use std::time::Duration;

/// Bytes that may always be in the kernel.
const FLOOR_BYTES: usize = 4 << 20;
/// The newest latency weighs 1/8.
const WEIGHT_SHIFT: u32 = 3;
/// Blocks that may always be in the kernel, whatever their size.
const FLOOR_BLOCKS: usize = 4;

/// The depth that a read queue allows itself.
#[derive(Debug)]
pub(super) struct ReadWindow {
    wanted_ns: Option<u64>,
    floor: usize,
    depth: usize,
    allowed: usize,
    average_ns: u64,
    /// Reads that must end before the window may change again: as many as it allows, so that the
    /// effect of a change is measured before the next.
    hold: usize,
}

impl ReadWindow {
    /// A window of up to `depth` blocks of at most `block_bytes`; without a wanted latency it is
    /// always `depth`.
    pub(super) fn new(depth: usize, block_bytes: usize, wanted: Option<Duration>) -> Self {
        let depth = depth.max(1);
        let floor = (FLOOR_BYTES / block_bytes.max(1)).max(FLOOR_BLOCKS).min(depth);
        let wanted_ns = wanted.map(|w| w.as_nanos() as u64);
        let allowed = if wanted_ns.is_some() { (2 * floor).min(depth) } else { depth };
        Self { wanted_ns, floor, depth, allowed, average_ns: 0, hold: allowed }
    }

    /// Reads that may be in the kernel.
    pub(super) fn allowed(&self) -> usize {
        self.allowed
    }

    /// One read ended after `latency_ns`; `full` says that only the window kept more reads from
    /// starting.
    pub(super) fn read_ended(&mut self, latency_ns: u64, full: bool) {
        let Some(wanted) = self.wanted_ns else { return };
        let old = self.average_ns;
        self.average_ns =
            if old == 0 { latency_ns } else { old - (old >> WEIGHT_SHIFT) + (latency_ns >> WEIGHT_SHIFT) };
        if self.hold > 0 {
            self.hold -= 1;
            return;
        }
        if self.average_ns > wanted {
            self.allowed = (self.allowed - (self.allowed / 8).max(1)).max(self.floor);
        } else if full {
            self.allowed = (self.allowed + 1).min(self.depth);
        }
        self.hold = self.allowed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: Option<Duration> = Some(Duration::from_millis(6));

    /// A drive that moves `rate` blocks per ms and never answers below `least` ms.
    fn settle(window: &mut ReadWindow, rate: f64, least: f64) -> usize {
        for _ in 0..20_000 {
            let latency = (window.allowed() as f64 / rate).max(least);
            window.read_ended((latency * 1e6) as u64, true);
        }
        window.allowed()
    }

    #[test]
    fn without_a_wanted_latency_it_is_the_depth() {
        let mut window = ReadWindow::new(32, 1 << 20, None);
        assert_eq!(settle(&mut window, 0.001, 1.0), 32);
    }

    #[test]
    fn it_settles_where_the_drive_is_saturated() {
        let mut window = ReadWindow::new(64, 1 << 20, WANTED);
        let blocks = settle(&mut window, 2.0, 0.1);
        assert!((10..=13).contains(&blocks), "{blocks}");
    }

    #[test]
    fn a_quick_drive_gets_the_whole_depth_and_a_slow_one_the_floor() {
        assert_eq!(settle(&mut ReadWindow::new(64, 1 << 20, WANTED), 100.0, 0.1), 64);
        assert_eq!(settle(&mut ReadWindow::new(64, 1 << 20, WANTED), 0.1, 20.0), 4);
        assert_eq!(settle(&mut ReadWindow::new(2, 1 << 20, WANTED), 0.1, 20.0), 2, "never above the depth");
    }

    #[test]
    fn it_recovers_and_does_not_grow_unused() {
        let mut window = ReadWindow::new(64, 1 << 20, WANTED);
        settle(&mut window, 0.1, 20.0);
        for _ in 0..1000 {
            window.read_ended(100_000, false);
        }
        assert_eq!(window.allowed(), 4);
        assert_eq!(settle(&mut window, 100.0, 0.1), 64);
    }
}
