//! The geometry of a shard as a small file beside its lanes, for tools that know the cache but not
//! the model. The log itself does not depend on it.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::paths::{GEOMETRY, GEOMETRY_NEW, read_small};
use crate::error::{Error, ErrorKind, Result};
use crate::geometry::Geometry;

/// Writes the description where it is missing or differs. The caller holds the shard's lock.
pub(in crate::log) fn write(shard_dir: &Path, geometry: &Geometry) -> Result<()> {
    let (path, new) = (shard_dir.join(GEOMETRY), shard_dir.join(GEOMETRY_NEW));
    let json = geometry.to_json();
    if read_small(&path).is_ok_and(|there| there == json) {
        return Ok(());
    }
    let failed = |e| Error::io("cannot describe the cache's model", e).at(&path);
    let mut options = fs::File::options();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options.open(&new).and_then(|mut file| file.write_all(&json)).map_err(failed)?;
    fs::rename(&new, &path).map_err(failed)
}

/// The geometry of a shard of a cache directory, by the names of its namespace and of itself.
///
/// # Errors
/// `NotFound` where no process of this version has written to it yet; `Corrupt` where the
/// description is damaged.
pub fn geometry_of(cache_dir: &Path, namespace: &str, shard: &str) -> Result<Geometry> {
    let path = cache_dir.join(namespace).join(shard).join(GEOMETRY);
    let advice = "a server that opens this cache writes it";
    let read = read_small(&path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::new(ErrorKind::NotFound, "the cache's model is not described").at(&path),
        _ => Error::io("cannot read the description of the cache's model", e).at(&path),
    });
    let found = read.and_then(|json| Geometry::from_json(&json, (namespace, shard)).map_err(|e| e.at(&path)));
    found.map_err(|e| e.advice(advice))
}
