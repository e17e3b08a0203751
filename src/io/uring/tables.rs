//! Which files and which memory are registered with a ring, as plain bookkeeping.
//!
//! Files: a small table that replaces the least recently used. Memory: each region is cut into
//! windows that are registered when first used, so that memory nobody reads into is neither pinned
//! nor touched. Invariant: an index that was given out names the file or window that the kernel has
//! there. For a new one the caller makes the system call at once, and reports its failure here.

use std::collections::HashMap;

use crate::io::MemRegion;

/// Smallest window of registered memory, and the unit of larger ones.
const WINDOW_BYTES: usize = 16 << 20;
/// Most windows of the regions that a ring is made with.
const MAX_WINDOWS: usize = 4096;
/// Windows for regions that are added later. The kernel takes 16384 buffers in all.
const SPARE_WINDOWS: usize = 4096;
/// The kernel registers at most this much at once.
const MAX_WINDOW_BYTES: usize = 1 << 30;

/// The registered files of a ring.
#[derive(Debug)]
pub(super) struct FileTable {
    /// Id of the file and when it was last used, by `clock`.
    slots: Vec<Option<(u64, u64)>>,
    by_id: HashMap<u64, usize>,
    clock: u64,
}

/// Where a file stands in the table.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FileSlot {
    /// Registered at this index.
    At(u32),
    /// To be registered at this index, in place of what is there.
    New(u32),
    /// The ring has no table.
    None,
}

impl FileTable {
    pub(super) fn new(capacity: usize) -> Self {
        Self { slots: vec![None; capacity], by_id: HashMap::new(), clock: 0 }
    }

    /// The file's index. A new file counts as registered from here on.
    pub(super) fn find(&mut self, file_id: u64) -> FileSlot {
        self.clock += 1;
        if let Some(&at) = self.by_id.get(&file_id) {
            self.slots[at] = Some((file_id, self.clock));
            return FileSlot::At(at as u32);
        }
        let oldest = self.slots.iter().enumerate().min_by_key(|(_, s)| s.map_or(0, |(_, used)| used));
        let Some((at, old)) = oldest else { return FileSlot::None };
        if let Some((id, _)) = *old {
            self.by_id.remove(&id);
        }
        self.slots[at] = Some((file_id, self.clock));
        self.by_id.insert(file_id, at);
        FileSlot::New(at as u32)
    }

    /// Takes the file out; gives the index to be cleared.
    pub(super) fn forget(&mut self, file_id: u64) -> Option<u32> {
        let at = self.by_id.remove(&file_id)?;
        self.slots[at] = None;
        Some(at as u32)
    }

    /// Empties the table for good: files are used unregistered from here on.
    pub(super) fn disable(&mut self) {
        self.slots.clear();
        self.by_id.clear();
    }
}

/// The windows of registered memory of a ring.
#[derive(Debug, Default)]
pub(super) struct Windows {
    regions: HashMap<u64, RegisteredRegion>,
    total: usize,
    disabled: bool,
    frozen: bool,
}

#[derive(Debug)]
struct RegisteredRegion {
    len: usize,
    window_bytes: usize,
    first: usize,
    registered: Vec<bool>,
}

/// How a transfer reaches its memory.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Window {
    /// Registered at this index.
    At(u16),
    /// To be registered at this index: offset in the region and length in bytes.
    New { index: u16, offset: usize, len: usize },
    /// Not in one window.
    None,
}

impl Windows {
    pub(super) fn new<'a>(regions: impl Iterator<Item = &'a dyn MemRegion> + Clone) -> Self {
        let total_bytes: usize = regions.clone().map(MemRegion::len).sum();
        let mut out = Self::default();
        for r in regions {
            if !out.add_in_windows(r, total_bytes.div_ceil(MAX_WINDOWS / 2)) {
                break;
            }
        }
        out
    }

    /// Adds a region after the ring was made; `false` where there is no room for its windows.
    pub(super) fn add(&mut self, region: &dyn MemRegion) -> bool {
        self.add_in_windows(region, region.len().div_ceil(SPARE_WINDOWS / 4))
    }

    fn add_in_windows(&mut self, region: &dyn MemRegion, least_bytes: usize) -> bool {
        let window_bytes = least_bytes.next_multiple_of(WINDOW_BYTES).max(WINDOW_BYTES);
        let n = region.len().div_ceil(window_bytes);
        if self.frozen || window_bytes > MAX_WINDOW_BYTES || self.total + n > self.capacity() {
            return false;
        }
        let (len, first) = (region.len(), self.total);
        self.regions.insert(region.id(), RegisteredRegion { len, window_bytes, first, registered: vec![false; n] });
        self.total += n;
        true
    }

    /// Entries that the ring's table needs.
    pub(super) fn capacity(&self) -> usize {
        MAX_WINDOWS + SPARE_WINDOWS
    }

    /// The window that holds `len` bytes at `offset` of a region. A new one counts as registered
    /// from here on.
    pub(super) fn find(&mut self, region_id: u64, offset: usize, len: usize) -> Window {
        if self.disabled || len == 0 {
            return Window::None;
        }
        let Some(r) = self.regions.get_mut(&region_id) else { return Window::None };
        let at = offset / r.window_bytes;
        if offset + len > r.len || (offset + len - 1) / r.window_bytes != at {
            return Window::None;
        }
        let index = (r.first + at) as u16;
        match r.registered.get_mut(at) {
            Some(true) => Window::At(index),
            Some(fresh) if !self.frozen => {
                *fresh = true;
                let offset = at * r.window_bytes;
                Window::New { index, offset, len: r.window_bytes.min(r.len - offset) }
            }
            _ => Window::None,
        }
    }

    /// Bytes registered so far; the last window of a region counts as a whole one.
    pub(super) fn registered_bytes(&self) -> usize {
        self.regions.values().map(|r| r.registered.iter().filter(|x| **x).count() * r.window_bytes).sum()
    }

    /// The window could not be registered.
    pub(super) fn failed(&mut self, index: u16) {
        for r in self.regions.values_mut() {
            if let Some(flag) = usize::from(index).checked_sub(r.first).and_then(|i| r.registered.get_mut(i)) {
                *flag = false;
            }
        }
    }

    /// Registers no new windows from here on; registered ones stay in use.
    pub(super) fn freeze(&mut self) {
        self.frozen = true;
        self.regions.retain(|_, r| r.registered.iter().any(|x| *x));
    }

    /// Uses no window from here on.
    pub(super) fn disable(&mut self) {
        self.disabled = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake(u64, usize);

    #[expect(unsafe_code, reason = "a region of no memory: its address is never used")]
    // SAFETY: the tests never reach memory through it.
    unsafe impl MemRegion for Fake {
        fn id(&self) -> u64 {
            self.0
        }
        fn as_mut_ptr(&self) -> *mut u8 {
            std::ptr::null_mut()
        }
        fn len(&self) -> usize {
            self.1
        }
    }

    fn windows(regions: &[Fake]) -> Windows {
        Windows::new(regions.iter().map(|r| r as &dyn MemRegion))
    }

    #[test]
    fn the_least_recently_used_file_makes_room() {
        let mut t = FileTable::new(2);
        assert_eq!((t.find(7), t.find(8), t.find(7)), (FileSlot::New(0), FileSlot::New(1), FileSlot::At(0)));
        assert_eq!((t.find(9), t.find(7), t.find(8)), (FileSlot::New(1), FileSlot::At(0), FileSlot::New(1)));
        assert_eq!((t.forget(7), t.forget(7)), (Some(0), None));
        assert_eq!(t.find(10), FileSlot::New(0), "the free place first");
        t.disable();
        assert_eq!((t.find(10), t.forget(8)), (FileSlot::None, None));
    }

    #[test]
    fn windows_are_registered_once_when_first_used_and_cut_at_the_end() {
        let mut w = windows(&[Fake(1, WINDOW_BYTES + 4096), Fake(2, 4096)]);
        assert_eq!(w.total, 3);
        let new = Window::New { index: 1, offset: WINDOW_BYTES, len: 4096 };
        assert_eq!((w.find(1, WINDOW_BYTES, 4096), w.find(1, WINDOW_BYTES, 4096)), (new, Window::At(1)));
        assert_eq!(w.find(2, 0, 4096), Window::New { index: 2, offset: 0, len: 4096 });
        for (region, offset, len) in [(1, WINDOW_BYTES - 4096, 8192), (1, WINDOW_BYTES, 8192), (3, 0, 1), (2, 0, 0)] {
            assert_eq!(w.find(region, offset, len), Window::None, "{region} {offset} {len}");
        }
    }

    #[test]
    fn after_a_failure_only_windows_registered_before_are_used() {
        let mut w = windows(&[Fake(1, 3 * WINDOW_BYTES)]);
        assert!(matches!(w.find(1, 2 * WINDOW_BYTES, 1), Window::New { index: 2, .. }));
        assert!(matches!(w.find(1, WINDOW_BYTES, 1), Window::New { index: 1, .. }));
        w.failed(1);
        w.freeze();
        assert_eq!(w.registered_bytes(), WINDOW_BYTES);
        let found = [2, 1, 0].map(|at| w.find(1, at * WINDOW_BYTES, 1));
        assert_eq!(found, [Window::At(2), Window::None, Window::None], "also below one that is registered");
    }

    #[test]
    fn regions_that_come_later_have_windows_of_their_own_until_there_is_no_place() {
        let mut w = windows(&[Fake(1, WINDOW_BYTES)]);
        assert!(w.add(&Fake(2, WINDOW_BYTES + 4096)));
        let new = Window::New { index: 2, offset: WINDOW_BYTES, len: 4096 };
        assert_eq!((w.find(2, WINDOW_BYTES, 4096), w.find(2, WINDOW_BYTES, 4096)), (new, Window::At(2)));
        let added = (3..100).take_while(|id| w.add(&Fake(*id, 512 << 30))).count();
        assert!((3..97).contains(&added) && w.total <= w.capacity(), "{added}");
        w.freeze();
        assert!(!w.add(&Fake(200, 4096)));
    }

    #[test]
    fn a_large_region_gets_larger_windows() {
        let mut w = windows(&[Fake(1, 256 << 30)]);
        assert!(w.total <= MAX_WINDOWS, "{}", w.total);
        assert!(matches!(w.find(1, (256 << 30) - 1, 1), Window::New { .. }));
    }
}
