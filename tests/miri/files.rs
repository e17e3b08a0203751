//! Shared files under Miri, which cannot map them: all mappings of a file are one anonymous
//! mapping, filled from the file by the first and written back by the last. What is written to the
//! file meanwhile is not seen, unless by [`overwrite`].

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use memmap2::{MmapOptions, MmapRaw};

static FILES: LazyLock<Mutex<HashMap<(u64, u64), Weak<Mapped>>>> = LazyLock::new(Mutex::default);

/// A mapping that may have been made before.
#[derive(Debug)]
pub(super) struct Shared(Arc<Mapped>);

#[derive(Debug)]
struct Mapped {
    map: MmapRaw,
    file: Option<File>,
}

impl Deref for Shared {
    type Target = MmapRaw;

    fn deref(&self) -> &MmapRaw {
        &self.0.map
    }
}

impl From<MmapRaw> for Shared {
    fn from(map: MmapRaw) -> Self {
        Self(Arc::new(Mapped { map, file: None }))
    }
}

fn files() -> MutexGuard<'static, HashMap<(u64, u64), Weak<Mapped>>> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn name_of(file: &File) -> io::Result<(u64, u64)> {
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

impl Mapped {
    /// All bytes.
    ///
    /// # Safety
    /// Nobody may hold a reference into them, or make one, meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the memory is behind a raw mapping")]
    unsafe fn bytes(&self) -> &mut [u8] {
        // SAFETY: the mapping has this length and lives as long as `self`; the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr(), self.map.len()) }
    }

    fn word(&self, i: usize) -> Option<&AtomicU64> {
        if i >= self.map.len() / 8 {
            return None;
        }
        // SAFETY: within the mapping, which starts on a page, lives as long as `self` and is used
        // as atomic words.
        Some(unsafe { &*self.map.as_ptr().cast::<AtomicU64>().add(i) })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Under the lock, under which alone others come to share it.
        let _files = files();
        if let (1, Some(file)) = (Arc::strong_count(&self.0), &self.0.file) {
            // A file that may only be read was not changed through this mapping either, so that an
            // error means nothing. SAFETY: this is the last mapping, and its owner is dropping it.
            let _ = file.write_all_at(unsafe { self.0.bytes() }, 0);
        }
    }
}

/// Maps the first `bytes` bytes of `file`; what may be done with it is for the caller to check.
pub(super) fn map(file: &File, _: super::Access, bytes: usize) -> io::Result<Shared> {
    let mut files = files();
    let name = name_of(file)?;
    if let Some(shared) = files.get(&name).and_then(Weak::upgrade).filter(|m| m.map.len() >= bytes) {
        return Ok(Shared(shared));
    }
    let map = MmapRaw::from(MmapOptions::new().len(bytes).map_anon()?);
    let shared = Arc::new(Mapped { map, file: Some(file.try_clone()?) });
    // SAFETY: nobody else knows of the mapping yet.
    file.read_exact_at(unsafe { shared.bytes() }, 0)?;
    files.insert(name, Arc::downgrade(&shared));
    Ok(Shared(shared))
}

/// Writes into the file, and where it is mapped into the mappings, as one write does where files
/// can be mapped.
#[cfg(test)]
pub(in super::super) fn overwrite(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    file.write_all_at(bytes, at)?;
    if let Some(mapped) = files().get(&name_of(file)?).and_then(Weak::upgrade) {
        for (at, byte) in (at as usize..).zip(bytes) {
            if let Some(word) = mapped.word(at / 8) {
                let shift = at % 8 * 8;
                let rest = word.load(Ordering::Relaxed) & !(0xff << shift);
                word.store(rest | u64::from(*byte) << shift, Ordering::Relaxed);
            }
        }
    }
    Ok(())
}
