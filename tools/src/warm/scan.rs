//! Finds dumps below the paths that a user names.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use forebay::{Error, Result};

use super::dump::layer_files;

/// Folders are searched this deep.
const MAX_DEPTH: usize = 8;

/// All dumps at or below `paths`, each once, in the order of their names. A folder with layer files
/// is one dump; any other `.safetensors` file is one too. Symlinks are followed only where the user
/// names them.
///
/// # Errors
/// What listing folders reports; `NotFound` for a path that is not there.
pub(super) fn find(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut found = BTreeSet::new();
    for path in paths {
        let meta = std::fs::metadata(path).map_err(|e| Error::io("cannot look at the dump", e).at(path))?;
        if meta.is_dir() {
            folder(path, MAX_DEPTH, &mut found)?;
        } else {
            found.insert(path.clone());
        }
    }
    Ok(found.into_iter().collect())
}

fn folder(path: &Path, depth: usize, found: &mut BTreeSet<PathBuf>) -> Result<()> {
    if !layer_files(path)?.is_empty() {
        found.insert(path.to_path_buf());
        return Ok(());
    }
    let io = |e| Error::io("cannot list the folder", e).at(path);
    for entry in std::fs::read_dir(path).map_err(io)? {
        let entry = entry.map_err(io)?;
        let (path, kind) = (entry.path(), entry.file_type().map_err(io)?);
        if kind.is_dir() && depth > 0 {
            folder(&path, depth - 1, found)?;
        } else if kind.is_file() && path.extension().is_some_and(|e| e == "safetensors") {
            found.insert(path);
        }
    }
    Ok(())
}
