//! The settings that a server would get, for commands that work on its cache.

use std::path::{Path, PathBuf};

use forebay::config::{Capacity, DriveSettings, Loader, Mode, Settings};
use forebay::{Error, Result};

/// What errors call the place of a remote store that the command line names.
pub(crate) const REMOTE: &str = "the option --remote";

/// Reads the environment and a settings file; `remote` outranks their `remote_url`.
pub(crate) fn loader(config: Option<&Path>, remote: Option<&str>) -> Loader {
    let loader = config.into_iter().fold(Loader::process(), |loader, file| loader.file(file));
    remote.into_iter().fold(loader.code_name(REMOTE), |loader, url| loader.set("remote_url", url))
}

/// The settings, whose warnings are logged; `mode` outranks theirs. `directories`, if any, are the
/// cache in the place of theirs.
pub(crate) fn load(
    (config, remote): (Option<&Path>, Option<&str>),
    directories: &[PathBuf],
    mode: Option<Mode>,
) -> Result<Settings> {
    let (mut settings, warnings) = loader(config, remote).load()?;
    warnings.iter().for_each(|w| tracing::warn!("{w}"));
    settings.mode = mode.unwrap_or(settings.mode);
    if !directories.is_empty() {
        choose(&mut settings, directories)?;
        settings.validate()?;
    }
    Ok(settings)
}

/// Takes `directories` as the drives. One that the settings have too drains as they say, and has
/// the share of the capacity that servers give it.
fn choose(settings: &mut Settings, directories: &[PathBuf]) -> Result<()> {
    let real = |dir: &Path| dir.canonicalize().or_else(|_| std::path::absolute(dir));
    let (all, chosen) = (settings.drives.len(), directories.len() as u64);
    let theirs = std::mem::take(&mut settings.drives);
    let mut is_part = false;
    for dir in directories {
        let dir = real(dir).map_err(|e| Error::io("no such path", e).at(dir))?;
        let known = theirs.iter().find(|drive| real(&drive.path).is_ok_and(|path| path == dir));
        is_part |= known.is_some();
        settings.drives.push(known.cloned().unwrap_or_else(|| DriveSettings::new(dir)));
    }
    let share = |capacity| match capacity {
        Capacity::Bytes(bytes) if is_part => Capacity::Bytes((bytes / all as u64).saturating_mul(chosen)),
        other => other,
    };
    settings.tenant_quota = settings.tenant_quota.map(share);
    settings.capacity = share(settings.capacity);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_the_settings_have_keeps_its_share_and_drains_as_they_say() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let [a, b, c] = ["a", "b", "c"].map(at);
        let drains = serde_json::json!({"path": b, "drain": true});
        let config = serde_json::json!({"drives": [a, drains, c], "capacity": "90MiB", "tenant_quota": "60MiB"});
        std::fs::write(at("forebay.json"), config.to_string()).unwrap();
        let load = |directories: &[PathBuf]| super::load((Some(&at("forebay.json")), None), directories, None);
        let shares = |s: &Settings| (s.drive_capacity_bytes(0) >> 20, s.drive_tenant_bytes(0).map(|b| b >> 20));
        let drains = |s: &Settings| s.drives.iter().map(|drive| drive.drain).collect::<Vec<_>>();
        std::fs::create_dir(&a).unwrap();
        std::fs::create_dir(&b).unwrap();
        for (chosen, share, draining) in [
            (vec![], (30, Some(20)), vec![false, true, false]),
            (vec![c.clone()], (30, Some(20)), vec![false]),
            (vec![at("a/../b"), a.clone()], (30, Some(20)), vec![true, false]),
            (vec![a.clone(), at("d")], (30, Some(20)), vec![false, false]),
            (vec![at("d")], (90, Some(60)), vec![false]),
        ] {
            let settings = load(&chosen).unwrap();
            assert_eq!((shares(&settings), drains(&settings)), (share, draining), "{chosen:?}");
        }
        for (wrong, why) in [(vec![a.clone(), a.clone()], "lie in each other"), (vec![b], "every drive drains")] {
            assert!(load(&wrong).unwrap_err().to_string().contains(why), "{wrong:?}");
        }
    }
}
