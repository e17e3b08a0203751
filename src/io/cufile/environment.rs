//! What libcufile reads from the environment, set before it is loaded unless the user has set it: a
//! configuration file with values for Forebay, and a log file outside the working directory.
#![expect(unsafe_code, reason = "the environment can only be set unsafely, and C reads it")]

use std::fs::{DirBuilder, File};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// Names libcufile's configuration file.
pub(super) const JSON_VARIABLE: &str = "CUFILE_ENV_PATH_JSON";
/// Names libcufile's log file.
pub(super) const LOG_VARIABLE: &str = "CUFILE_LOGFILE_PATH";

/// Requests of up to 16 MiB in one piece, room for them in every pool, and peer-to-peer where the
/// kernel has it.
const JSON: &str = r#"{
    "logging": { "level": "ERROR" },
    "properties": {
        "allow_compat_mode": true,
        "use_pci_p2pdma": true,
        "max_direct_io_size_kb": 16384,
        "max_device_cache_size_kb": 2097152,
        "per_buffer_cache_size_kb": 16384,
        "posix_pool_slab_size_kb": [4, 1024, 16384],
        "posix_pool_slab_count": [128, 64, 32],
        "io_batchsize": 128
    }
}
"#;

static SET: Once = Once::new();
static OUR_JSON: AtomicBool = AtomicBool::new(false);
static OUR_LOG: AtomicBool = AtomicBool::new(false);

/// Sets the variables that the user has not set; once per process. Gives the directory of the files
/// that they name, where this call made it.
pub(super) fn prepare() -> Option<PathBuf> {
    let mut made = None;
    SET.call_once(|| {
        let is_set = |name| std::env::var_os(name).is_some_and(|v| !v.is_empty());
        let (json, log) = (!is_set(JSON_VARIABLE), !is_set(LOG_VARIABLE));
        if !json && !log {
            return;
        }
        let dir = match private_dir(&std::env::temp_dir()) {
            Ok(dir) => dir,
            Err(e) => {
                tracing::warn!(error = %e, "no directory for cuFile's settings and log: it uses its own");
                return;
            }
        };
        if json && write_json(&dir.join("cufile.json")).is_ok() {
            set(JSON_VARIABLE, &dir.join("cufile.json"));
            OUR_JSON.store(true, Ordering::Release);
        }
        if log {
            set(LOG_VARIABLE, &dir.join("cufile.log"));
            OUR_LOG.store(true, Ordering::Release);
        }
        made = Some(dir);
    });
    made
}

/// The variables that Forebay has set and not the user; programs that it starts must not inherit
/// them.
pub(super) fn ours() -> impl Iterator<Item = &'static str> {
    let json = OUR_JSON.load(Ordering::Acquire).then_some(JSON_VARIABLE);
    let log = OUR_LOG.load(Ordering::Acquire).then_some(LOG_VARIABLE);
    [json, log].into_iter().flatten()
}

fn set(name: &str, path: &Path) {
    // SAFETY: Rust's own accesses to the environment exclude each other. C code that reads it at
    // this very moment in another thread would be at fault, as with any program that sets a
    // variable; this runs at most twice in a process, while a drive is being opened, before the one
    // library that we set it for is loaded.
    unsafe { std::env::set_var(name, path) };
}

/// A new directory in `base` that nobody else can write to. Its number is the time: a container
/// that is started again and again has the same process numbers, and what was left before stays.
fn private_dir(base: &Path) -> std::io::Result<PathBuf> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    let mut last = None;
    for n in now..now + 100 {
        let dir = base.join(format!("forebay-cufile-{}-{n}", std::process::id()));
        match DirBuilder::new().mode(0o700).create(&dir) {
            Ok(()) => return Ok(dir),
            Err(e) => last = Some(e),
        }
    }
    Err(last.unwrap_or_else(|| std::io::ErrorKind::AlreadyExists.into()))
}

fn write_json(path: &Path) -> std::io::Result<()> {
    File::options().write(true).create_new(true).mode(0o600).open(path)?.write_all(JSON.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_that_were_left_before_do_not_stand_in_the_way() {
        let base = tempfile::tempdir().unwrap();
        for n in 0..100 {
            std::fs::create_dir(base.path().join(format!("forebay-cufile-{}-{n}", std::process::id()))).unwrap();
        }
        assert!(private_dir(base.path()).unwrap().is_dir());
    }

    #[test]
    fn the_settings_are_json_with_the_values_that_were_tried() {
        let json: serde_json::Value = serde_json::from_str(JSON).unwrap();
        assert_eq!(json["properties"]["max_direct_io_size_kb"], 16384);
        assert_eq!(json["properties"]["allow_compat_mode"], true);
    }
}
