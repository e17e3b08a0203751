//! A value by which processes can tell whether they use the same cache: the same during one boot of
//! one machine for the same directories, under whatever paths they are mounted there.
//!
//! Reads the boot id and the directories' device and inode numbers; it opens nothing.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use serde::{Deserialize, Serialize};

use super::Settings;

/// A digest over the machine's boot and a cache's directories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CacheIdentity([u8; 32]);

impl Settings {
    /// The identity of the cache's place; `None` without drives, where a directory is not there, or
    /// where the machine's boot has no id.
    #[must_use]
    pub fn cache_identity(&self) -> Option<CacheIdentity> {
        let boot = fs::read("/proc/sys/kernel/random/boot_id").ok()?;
        let mut digest = blake3::Hasher::new_derive_key("forebay 1 place of a cache");
        digest.update(&(boot.len() as u64).to_le_bytes()).update(&boot);
        for dir in self.cache_dirs() {
            let found = fs::metadata(dir).ok()?;
            digest.update(&found.dev().to_le_bytes()).update(&found.ino().to_le_bytes());
        }
        (!self.drives.is_empty()).then(|| CacheIdentity(*digest.finalize().as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_its_directories_and_not_their_names() {
        let at = tempfile::tempdir().unwrap();
        let (one, other, link) = (at.path().join("one"), at.path().join("other"), at.path().join("link"));
        assert_eq!(Settings::at(&one).cache_identity(), None, "no directory, no place");
        assert_eq!(Settings::default().cache_identity(), None);
        fs::create_dir(&one).unwrap();
        fs::create_dir(&other).unwrap();
        std::os::unix::fs::symlink(&one, &link).unwrap();
        let place = Settings::at(&one).cache_identity();
        assert!(place.is_some());
        assert_eq!(place, Settings::at(&link).cache_identity());
        assert_ne!(place, Settings::at(&other).cache_identity());
        let mut both = Settings::at(&one);
        both.drives.extend(Settings::at(&other).drives);
        assert_ne!(place, both.cache_identity());
    }
}
