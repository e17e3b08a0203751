use std::os::unix::fs::symlink;

use super::*;

fn options(mode: Mode) -> DirOptions {
    DirOptions { mode, allow_any_filesystem: false }
}

/// A table that puts everything below `dir` on one file system.
fn on(fs_type: &str, flags: &str, dir: &Path) -> MountTable {
    with(fs_type, (flags, "rw"), dir)
}

/// The same, with the file system's own options.
fn with(fs_type: &str, (flags, super_options): (&str, &str), dir: &Path) -> MountTable {
    let dir = dir.canonicalize().unwrap();
    MountTable::parse(format!("9 1 8:1 / {} {flags} - {fs_type} source {super_options}\n", dir.display()).as_bytes())
}

fn temp() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn mode_of(path: &Path) -> u32 {
    path.metadata().unwrap().mode() & 0o7777
}

#[test]
fn a_missing_cache_directory_is_made_for_its_owner_alone() {
    let top = temp();
    let path = top.path().join("cache");
    let opened = CacheDir::open(&path, &options(Mode::Rw), &on("ext4", "rw", top.path())).unwrap();
    assert_eq!(mode_of(&path), 0o700);
    assert_eq!(opened.kind, FsKind::Local);
    assert!(opened.warnings.is_empty(), "{:?}", opened.warnings);
    assert_eq!(opened.root.names().unwrap(), Vec::<String>::new(), "probing leaves nothing behind");
}

#[test]
fn what_cannot_hold_a_cache_is_told_with_a_remedy() {
    let top = temp();
    std::fs::write(top.path().join("file"), b"x").unwrap();
    symlink(top.path().join("nowhere"), top.path().join("dangling")).unwrap();
    let cases = [
        ("gone/cache", Mode::Rw, ErrorKind::NotFound, "check that the drive is mounted"),
        ("gone", Mode::Ro, ErrorKind::NotFound, "set mode: rw to start a cache"),
        ("file", Mode::Rw, ErrorKind::Config, "not a directory"),
        ("dangling", Mode::Rw, ErrorKind::NotFound, "symlink to nothing"),
    ];
    for (name, mode, kind, part) in cases {
        let e = CacheDir::open(&top.path().join(name), &options(mode), &MountTable::default()).unwrap_err();
        assert_eq!(e.kind(), kind, "{e}");
        assert!(e.to_string().contains(part), "{e}");
        assert!(e.advice_text().is_some(), "{e}");
    }
}

#[test]
fn refused_access_is_told_as_a_permission() {
    // The kernel lets nobody make files here, not even root.
    let path = Path::new("/sys/kernel");
    let e = CacheDir::open(path, &options(Mode::Rw), &MountTable::default()).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Permission | ErrorKind::Config), "{e}");
    let e = unusable(path, io::Error::from_raw_os_error(libc::EACCES));
    assert_eq!(e.kind(), ErrorKind::Permission);
    assert!(e.to_string().contains("give the server's user"), "{e}");
}

#[test]
fn a_read_only_mount_names_mode_ro_and_works_with_it() {
    let top = temp();
    let mounts = on("ext4", "ro,relatime", top.path());
    for path in [top.path().to_path_buf(), top.path().join("new")] {
        let e = CacheDir::open(&path, &options(Mode::Rw), &mounts).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Config);
        assert!(e.to_string().contains("mode: ro"), "{e}");
    }
    assert!(CacheDir::open(top.path(), &options(Mode::Ro), &mounts).is_ok());
}

#[test]
fn each_kind_of_file_system_has_its_own_answer() {
    let top = temp();
    let cases = [
        ("tmpfs", FsKind::Memory, "that is memory"),
        ("overlay", FsKind::Overlay, "mount a volume"),
        ("fuse.mergerfs", FsKind::Fuse, "another program"),
    ];
    for (fs_type, kind, part) in cases {
        let opened = CacheDir::open(top.path(), &options(Mode::Rw), &on(fs_type, "rw", top.path())).unwrap();
        assert_eq!(opened.kind, kind);
        let [warning] = &opened.warnings[..] else { panic!("{fs_type}: {:?}", opened.warnings) };
        assert_eq!(warning.kind, WarningKind::FileSystem(kind));
        let text = warning.to_string();
        assert!(text.contains(part) && text.contains(fs_type), "{text}");
    }
    let unknown = CacheDir::open(top.path(), &options(Mode::Rw), &MountTable::default()).unwrap();
    assert_eq!(unknown.kind, FsKind::Unknown);
    assert_eq!(unknown.warnings.len(), 1);
}

#[test]
fn a_file_system_that_trims_at_once_is_warned_of_where_the_cache_is_written() {
    let top = temp();
    let mounts = with("ext4", ("rw", "rw,discard"), top.path());
    let warned = CacheDir::open(top.path(), &options(Mode::Rw), &mounts).unwrap().warnings;
    let [warning] = &warned[..] else { panic!("{warned:?}") };
    let text = warning.to_string();
    assert!(
        text.contains("discard") && text.contains("fstrim.timer") && text.contains("eviction_policy: lru"),
        "{text}"
    );
    assert!(CacheDir::open(top.path(), &options(Mode::Ro), &mounts).unwrap().warnings.is_empty());
}

#[test]
fn a_network_file_system_is_refused_unless_it_is_allowed() {
    let top = temp();
    for fs_type in ["nfs4", "cifs", "lustre"] {
        let mounts = on(fs_type, "rw", top.path());
        let e = CacheDir::open(top.path(), &options(Mode::Rw), &mounts).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        assert!(e.to_string().contains(fs_type) && e.to_string().contains("allow_any_filesystem"), "{e}");
        let allowed = DirOptions { allow_any_filesystem: true, ..options(Mode::Rw) };
        let opened = CacheDir::open(top.path(), &allowed, &mounts).unwrap();
        assert_eq!(opened.warnings[0].kind, WarningKind::FileSystem(FsKind::Network));
    }
}

#[test]
fn a_directory_that_everybody_may_write_gives_a_warning() {
    let top = temp();
    std::fs::set_permissions(top.path(), Permissions::from_mode(0o777)).unwrap();
    let opened = CacheDir::open(top.path(), &options(Mode::Rw), &on("xfs", "rw", top.path())).unwrap();
    assert_eq!(opened.warnings[0].kind, WarningKind::Permissions);
    assert!(opened.warnings[0].to_string().contains("chmod 0700"), "{}", opened.warnings[0]);
}

#[test]
fn the_way_to_the_cache_may_be_a_symlink_but_nothing_inside_it() {
    let top = temp();
    let (cache, outside) = (top.path().join("cache"), top.path().join("outside"));
    std::fs::create_dir(&cache).unwrap();
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("secret"), b"secret").unwrap();
    symlink(&cache, top.path().join("link")).unwrap();
    symlink(&outside, cache.join("ns")).unwrap();
    symlink(outside.join("secret"), cache.join("index.kv")).unwrap();
    symlink(outside.join("made"), cache.join("data.kv")).unwrap();

    let root = CacheDir::open(&top.path().join("link"), &options(Mode::Rw), &MountTable::default()).unwrap().root;
    let create = CacheFileOptions { write: true, create: Some(0o600), ..CacheFileOptions::default() };
    let errors = [
        root.open_dir_in("ns").map(drop).unwrap_err(),
        root.open_file_in("index.kv", &CacheFileOptions::default()).map(drop).unwrap_err(),
        root.open_file_in("index.kv", &create).map(drop).unwrap_err(),
        root.open_file_in("data.kv", &create).map(drop).unwrap_err(),
    ];
    for e in errors {
        assert_eq!(e.kind(), ErrorKind::Config, "{e}");
        assert!(e.to_string().contains("a symlink lies where"), "{e}");
    }
    assert!(!outside.join("made").exists());
    root.remove_file_in("ns").unwrap();
    assert!(outside.join("secret").exists(), "the link goes, its target stays");
}

#[test]
fn exchanging_a_parent_for_a_symlink_leads_nowhere_else() {
    let top = temp();
    let (cache, outside) = (top.path().join("cache"), top.path().join("outside"));
    std::fs::create_dir_all(outside.join("ns")).unwrap();
    let root = CacheDir::open(&cache, &options(Mode::Rw), &MountTable::default()).unwrap().root;
    std::fs::create_dir(cache.join("ns")).unwrap();
    let ns = root.open_dir_in("ns").unwrap();
    std::fs::rename(&cache, top.path().join("moved")).unwrap();
    symlink(&outside, &cache).unwrap();
    let create = CacheFileOptions { write: true, create: Some(0o600), ..CacheFileOptions::default() };
    ns.open_file_in("LOCK", &create).unwrap();
    assert!(top.path().join("moved/ns/LOCK").exists());
    assert!(!outside.join("ns/LOCK").exists());
}

#[test]
fn only_single_names_and_regular_files_are_opened() {
    let top = temp();
    let root = Dir::open_root(top.path()).unwrap();
    for name in ["", ".", "..", "a/b", "/etc/passwd", "../x", "a\0b"] {
        let e = root.open_file_in(name, &CacheFileOptions::default()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidInput, "{name:?}");
    }
    std::fs::create_dir(top.path().join("d")).unwrap();
    assert_eq!(root.open_file_in("d", &CacheFileOptions::default()).unwrap_err().kind(), ErrorKind::Config);
    assert_eq!(root.open_file_in("gone", &CacheFileOptions::default()).unwrap_err().kind(), ErrorKind::NotFound);
    std::fs::write(top.path().join("f"), b"x").unwrap();
    assert_eq!(root.open_dir_in("f").unwrap_err().kind(), ErrorKind::Config);
    let exclusive = CacheFileOptions { write: true, create: Some(0o600), exclusive: true, flags: 0 };
    assert!(root.open_file_in("f", &exclusive).is_err());
    let status = std::process::Command::new("mkfifo").arg(top.path().join("pipe")).status();
    if status.is_ok_and(|status| status.success()) {
        let e = root.open_file_in("pipe", &CacheFileOptions::default()).unwrap_err();
        assert!(e.to_string().contains("a FIFO, socket or device lies where"), "{e}");
    }
}

#[test]
fn names_are_listed_renamed_and_removed() {
    let top = temp();
    let root = Dir::open_root(top.path()).unwrap();
    let create = CacheFileOptions { write: true, create: Some(0o600), ..CacheFileOptions::default() };
    for name in ["b", "a"] {
        root.open_file_in(name, &create).unwrap();
    }
    std::fs::create_dir(top.path().join("c")).unwrap();
    root.rename_in("b", "d").unwrap();
    root.sync().unwrap();
    assert_eq!(root.names().unwrap(), ["a", "c", "d"]);
    root.remove_file_in("a").unwrap();
    assert_eq!(root.names().unwrap(), ["c", "d"]);
}
