//! Which path an accelerator's memory gets, and the reason that is given where it is not the best
//! one: a test for each cause, by its text.
#![expect(clippy::unwrap_used, reason = "tests")]

mod io_world;

use std::path::Path;

use forebay::io::{CufileChoice, DeviceSide, Drive, EngineChoice, IoOptions, IoPath, open_drive};
use forebay::{ErrorKind, Result};
use io_world::child::{self, Child};
use io_world::{
    Heap, TestMover, device, direct_file, filled, on_drive, options, pattern, peek, read_ok, side, write_ok,
};
use standin_cufile::{Fault, LIBRARY, Op as Call, Standin, VARIABLE};

const MIB: usize = 1 << 20;

#[test]
fn trial_program() {
    child::trial_program();
}

fn open_in(dir: Option<&Path>, cufile: CufileChoice) -> Result<Drive> {
    let mover = TestMover::new();
    let side = DeviceSide { cufile, regions: vec![Heap::new(MIB) as _], ..side(&mover, MIB) };
    open_drive(&IoOptions { trial_dir: dir.map(Into::into), ..options(EngineChoice::Auto, side) })
}

/// Opens a drive with `auto`; gives the path of the accelerator's bytes, and the reason why it is
/// not the path `of`.
fn found(of: IoPath) -> (IoPath, String) {
    let dir = on_drive();
    let drive = open_in(Some(dir.path()), CufileChoice::Auto).unwrap();
    // Whatever the path, bytes are written and read back.
    let file = direct_file(&dir, "f");
    write_ok(&drive, &file, 0, filled(8192, 1));
    assert!(peek(&read_ok(&drive, &file, 0, device(8192))) == pattern(8192, 1));
    assert!(dir.path().read_dir().unwrap().count() == 1, "the trial leaves nothing behind");
    let device = drive.report.device.unwrap();
    let reasons = device.reasons();
    assert!(reasons.iter().filter(|(p, _)| *p == of).count() <= 1);
    (device.active(), reasons.into_iter().find(|(p, _)| *p == of).map(|(_, why)| why).unwrap_or_default())
}

/// cuFile is not used, and every path of it says why in these words; insisting on it is an error
/// that says the same.
fn assert_refused(words: &[&str]) {
    for path in [IoPath::CufileGds, IoPath::CufileP2p, IoPath::CufileCompat] {
        let (active, why) = found(path);
        assert_eq!(active, IoPath::Bounce);
        assert!(words.iter().all(|w| why.contains(w)), "{path}: {why}");
    }
    let dir = on_drive();
    let e = open_in(Some(dir.path()), CufileChoice::Force).unwrap_err();
    assert!(e.kind() == ErrorKind::Unsupported && words.iter().all(|w| e.to_string().contains(w)), "{e}");
}

macro_rules! refused {
    ($($test:ident: $setting:literal => $($word:literal),+;)*) => {
        $(#[test] fn $test() {
            Child::new(stringify!($test), LIBRARY).env(VARIABLE, $setting).run(|| assert_refused(&[$($word),+]));
        })*
    };
}

refused! {
    no_gpu: "driver_open=5011;cu_err=100" => "no usable GPU", "5011", "CUDA driver error 100", "nvidia-smi";
    no_libcuda: "driver_open=5033" => "libcuda", "CU_FILE_NVFS_SETUP_ERROR (5033)", "modprobe";
    nvidia_fs_not_loaded: "driver_open=5002" => "nvidia-fs is not loaded", "(5002)", "modprobe";
    nvidia_fs_of_another_version: "driver_open=5004" => "does not fit the library", "VERSION_MISMATCH";
    platform: "driver_open=5007" => "does not support this machine or GPU", "5007";
    no_udev_record: "handle_register=5027" => "no udev record", "/run/udev/data", "mount /run/udev read-only", "5027";
    no_permission: "handle_register=5025" => "not permitted", "/dev/nvidia-fs", "5025";
    no_direct_io: "handle_register=5020" => "O_DIRECT is refused", "ext4 or xfs";
    file_system: "handle_register=5008" => "does not support the file system", "forebay probe --gpu";
    pinning: "buf_register=5036" => "could not be pinned", "gpu_staging", "BAR1";
    crash: "crash=driver_open" => "crashed", "signal 6", "--cufile-trial";
    wrong_bytes: "flip=1" => "other bytes than it had written";
    errno_of_permission: "write=-1;errno=13" => "not permitted", "cuFileWrite: Permission denied";
    errno_of_a_full_drive: "write=-1;errno=28" => "no room", "cuFileWrite: No space left on device", "free some space";
    unknown_error: "read=-5999" => "does not work here", "cuFile error 5999", "cuFileRead";
}

#[test]
fn the_counters_decide_and_only_direct_paths_are_taken_by_themselves() {
    Child::new("the_counters_decide_and_only_direct_paths_are_taken_by_themselves", LIBRARY)
        .env(VARIABLE, "way=p2p")
        .run(|| {
            let (active, why) = found(IoPath::CufileGds);
            assert_eq!(active, IoPath::CufileP2p);
            assert!(why.contains("nvidia-fs"), "{why}");
            let dir = on_drive();
            let drive = open_in(Some(dir.path()), CufileChoice::Force).unwrap();
            assert_eq!(drive.report.device.unwrap().active(), IoPath::CufileP2p);
            assert!(drive.report.notes.list().iter().any(|n| n == "libcufile 1.16"), "{:?}", drive.report.notes);
        });
}

#[test]
fn compatibility_mode_is_slower_than_our_own_way_but_can_be_forced() {
    Child::new("compatibility_mode_is_slower_than_our_own_way_but_can_be_forced", LIBRARY)
        .env(VARIABLE, "way=posix")
        .run(|| {
            let (active, why) = found(IoPath::CufileCompat);
            assert_eq!(active, IoPath::Bounce);
            assert!(why.contains("compatibility mode") && why.contains("slower") && why.contains("force"), "{why}");
            assert!(found(IoPath::CufileGds).1.contains("nvidia-fs"));
            assert!(found(IoPath::CufileP2p).1.contains("kernel 6.2"));
            let dir = on_drive();
            let drive = open_in(Some(dir.path()), CufileChoice::Force).unwrap();
            assert_eq!(drive.report.device.unwrap().active(), IoPath::CufileCompat);
        });
}

#[test]
fn a_library_that_does_not_count_is_not_called_compatible() {
    Child::new("a_library_that_does_not_count_is_not_called_compatible", LIBRARY)
        .env(VARIABLE, "way=p2p;version=1140")
        .run(|| {
            for path in [IoPath::CufileGds, IoPath::CufileP2p, IoPath::CufileCompat] {
                let (active, why) = found(path);
                assert_eq!(active, IoPath::Bounce);
                assert!(
                    why.contains("too old to say") && why.contains("libcufile 1.14") && why.contains("1.15"),
                    "{why}"
                );
                assert!(!why.contains("compatibility mode"), "{why}");
            }
            let dir = on_drive();
            assert!(open_in(Some(dir.path()), CufileChoice::Force).is_ok());
        });
}

#[test]
fn never_is_never() {
    Child::new("never_is_never", LIBRARY).env(VARIABLE, "way=nvfs").run(|| {
        let dir = on_drive();
        let drive = open_in(Some(dir.path()), CufileChoice::Never).unwrap();
        let device = drive.report.device.unwrap();
        assert_eq!((device.active(), device.reasons().len()), (IoPath::Bounce, 3));
        assert!(device.reasons()[0].1.contains("never"));
        assert_eq!(Standin::here().count(Call::DriverOpen), 0);
    });
}

#[test]
fn no_library() {
    Child::new("no_library", "/no/such/libcufile.so").run(|| assert_refused(&["libcufile was not found", "/no/such/"]));
}

#[test]
fn another_library() {
    Child::new("another_library", "libc.so.6").run(|| assert_refused(&["lacks functions", "libc.so.6"]));
}

#[test]
fn no_list_of_modules() {
    Child::new("no_list_of_modules", LIBRARY)
        .env("FOREBAY_INTERPOSE_MODULES", "/no/such/file")
        .run(|| assert_refused(&["/proc/modules", "for ever"]));
}

#[test]
fn no_program() {
    Child::new("no_program", LIBRARY)
        .env("FOREBAY_PROGRAM", "")
        .env("PATH", "/no/such/dir")
        .run(|| assert_refused(&["`forebay` program", "was not found", "FOREBAY_PROGRAM"]));
}

#[test]
fn a_program_of_another_kind() {
    Child::new("a_program_of_another_kind", LIBRARY)
        .env("FOREBAY_PROGRAM", "/bin/false")
        .run(|| assert_refused(&["gave no answer", "exit status: 1"]));
}

#[test]
fn no_directory_to_try_in() {
    Child::new("no_directory_to_try_in", LIBRARY).run(|| {
        let drive = open_in(None, CufileChoice::Auto).unwrap();
        assert!(drive.report.device.unwrap().reasons()[0].1.contains("no directory on the drive"));
    });
}

#[test]
fn a_directory_in_memory() {
    Child::new("a_directory_in_memory", LIBRARY).env(VARIABLE, "way=nvfs").run(|| {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
        let e = open_in(Some(dir.path()), CufileChoice::Force).unwrap_err().to_string();
        assert!(e.contains("tmpfs") && e.contains("ext4 or xfs"), "{e}");
    });
}

#[test]
fn what_the_trial_could_and_this_process_cannot() {
    Child::new("what_the_trial_could_and_this_process_cannot", LIBRARY).env(VARIABLE, "way=nvfs").run(|| {
        Standin::here().fault(Call::DriverOpen, 0, 1, Fault::Return(5034));
        assert!(found(IoPath::CufileGds).1.contains("(5034)"));
        assert_refused(&["(5034)"]);
        assert_eq!(Standin::here().count(Call::DriverOpen), 1, "a driver that did not open is not tried again");
    });
}

#[test]
fn memory_that_cannot_all_be_registered_is_noted_and_used_all_the_same() {
    let test = "memory_that_cannot_all_be_registered_is_noted_and_used_all_the_same";
    Child::new(test, LIBRARY).env(VARIABLE, "way=nvfs").run(|| {
        let dir = on_drive();
        Standin::here().fault(Call::BufRegister, 0, 1, Fault::Return(5036));
        let drive = open_in(Some(dir.path()), CufileChoice::Auto).unwrap();
        assert_eq!(drive.report.device.as_ref().unwrap().active(), IoPath::CufileGds);
        assert!(drive.report.notes.list().iter().any(|n| n.contains("ends at 0 MiB") && n.contains("BAR1")));
        let file = direct_file(&dir, "f");
        write_ok(&drive, &file, 0, filled(8192, 1));
        assert!(peek(&read_ok(&drive, &file, 0, device(8192))) == pattern(8192, 1));
    });
}

#[test]
fn the_users_settings_of_cufile_are_left_alone_and_ours_are_set_otherwise() {
    let test = "the_users_settings_of_cufile_are_left_alone_and_ours_are_set_otherwise";
    let variable = |name| std::env::var(name).unwrap_or_default();
    Child::new(test, LIBRARY).env(VARIABLE, "way=nvfs").env("CUFILE_ENV_PATH_JSON", "/my.json").run(|| {
        found(IoPath::CufileGds);
        assert_eq!(variable("CUFILE_ENV_PATH_JSON"), "/my.json");
        let log = variable("CUFILE_LOGFILE_PATH");
        assert!(log.starts_with(&variable("TMPDIR")) && log.ends_with("cufile.log"), "{log}");
    });
    if child::is_child(test) {
        return;
    }
    let other = "ours_are_set";
    Child::new(other, LIBRARY).env(VARIABLE, "way=nvfs").run(|| {});
}

#[test]
fn ours_are_set() {
    if !child::is_child("ours_are_set") {
        return;
    }
    found(IoPath::CufileGds);
    let json = std::fs::read_to_string(std::env::var("CUFILE_ENV_PATH_JSON").unwrap()).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["properties"]["per_buffer_cache_size_kb"], 16384);
}
