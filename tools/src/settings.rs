//! The settings that a server would get, for commands that work on its cache.

use std::path::{Path, PathBuf};

use forebay::config::{DriveSettings, Loader, Settings};
use forebay::{Error, Result};

/// Reads the environment and a settings file; `remote` outranks their `remote_url`.
pub(crate) fn loader(config: Option<&Path>, remote: Option<&str>) -> Loader {
    let loader = config.into_iter().fold(Loader::process(), |loader, file| loader.file(file));
    remote.into_iter().fold(loader, |loader, url| loader.set("remote_url", url))
}

/// The settings, whose warnings are logged; `directories`, if any, are the cache in the place of
/// theirs.
pub(crate) fn load(config: Option<&Path>, remote: Option<&str>, directories: &[PathBuf]) -> Result<Settings> {
    let (mut settings, warnings) = loader(config, remote).load()?;
    warnings.iter().for_each(|w| tracing::warn!("{w}"));
    if !directories.is_empty() {
        let absolute = |dir: &PathBuf| std::path::absolute(dir).map_err(|e| Error::io("no such path", e).at(dir));
        settings.drives = directories.iter().map(|dir| absolute(dir).map(DriveSettings::new)).collect::<Result<_>>()?;
    }
    Ok(settings)
}
