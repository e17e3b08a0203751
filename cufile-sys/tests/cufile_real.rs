//! Opens a real libcufile where `FOREBAY_CUFILE_PATH` names one (`make cufile` fetches NVIDIA's
//! wheel); else checks how a missing one is reported.

use std::path::{Path, PathBuf};

use cufile_sys::sys::FUNCTIONS;
use cufile_sys::{CuFile, PATH_VARIABLE, Version};

fn real() -> Option<PathBuf> {
    std::env::var_os(PATH_VARIABLE).filter(|p| !p.is_empty()).map(PathBuf::from)
}

/// The version in the name of the wheel's `dist-info` folder, which lies above the library.
fn wheel_version(library: &Path) -> Option<Version> {
    let part = |text: Option<&str>| text?.parse().ok();
    library.ancestors().flat_map(|dir| std::fs::read_dir(dir).into_iter().flatten().flatten()).find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let version = name.strip_prefix("nvidia_cufile")?.strip_suffix(".dist-info")?.rsplit('-').next()?;
        let mut parts = version.split('.');
        Some(Version { major: part(parts.next())?, minor: part(parts.next())? })
    })
}

#[test]
fn the_real_library_tells_the_version_of_its_wheel_or_is_missed_with_every_name_tried() {
    let Some(path) = real() else {
        let missed = CuFile::open_at("/nonexistent/libcufile.so.0").unwrap_err();
        assert_eq!(missed.tried.len(), 1);
        let text = missed.to_string();
        assert!(text.contains("/nonexistent/libcufile.so.0") && text.contains(PATH_VARIABLE), "{text}");
        match CuFile::open() {
            Ok(found) => assert!(found.version().unwrap() >= Version { major: 1, minor: 8 }, "{found:?}"),
            Err(e) => assert!(["libcufile.so.0", "libcufile.so:"].iter().all(|n| e.to_string().contains(n)), "{e}"),
        }
        return;
    };
    let library = CuFile::open().unwrap();
    assert_eq!(library.path(), path);
    let version = library.version().unwrap();
    match wheel_version(&path) {
        Some(of_wheel) => assert_eq!(version, of_wheel),
        None => assert!(version >= Version { major: 1, minor: 8 }, "{version}"),
    }
    let expected: Vec<_> = FUNCTIONS.iter().filter(|f| f.since <= version).map(|f| f.name).collect();
    assert_eq!(library.symbols().present(), expected);
    assert!(!Path::new("cufile.log").exists(), "opening must not start the library's logger");
}
