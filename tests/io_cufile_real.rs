//! NVIDIA's own libcufile (1.16 or later, which needs no GPU) under cuFile's queue, on host memory
//! that stands for a GPU's. The library comes from its Python wheel by `make unit`; without it
//! these tests say so and pass.
#![expect(clippy::unwrap_used, reason = "tests")]

mod io_world;

use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Instant;

use cufile_sys::{CuFile, Version};
use forebay::ErrorKind;
use forebay::io::{
    Completion, CufileChoice, DeviceSide, DirectFile, Drive, EngineChoice, IO_ALIGN, IoOptions, IoPath, Request,
    open_drive, wait,
};
use io_world::child::{self, Child};
use io_world::{
    Heap, LONG, TestMover, device, direct_file, filled, nobody, on_drive, options, pattern, peek, read_ok, side,
    write_ok,
};

const MIB: usize = 1 << 20;
const OLDEST: Version = Version { major: 1, minor: 16 };

#[test]
fn trial_program() {
    child::trial_program();
}

/// The library to test with.
fn library() -> Option<PathBuf> {
    let path = PathBuf::from(std::env::var_os(cufile_sys::PATH_VARIABLE).filter(|p| !p.is_empty())?);
    let version = CuFile::open_at(&path).ok()?.version().ok()?;
    (version >= OLDEST).then_some(path)
}

/// A child with the library and a udev record of every block device.
fn child(test: &'static str) -> Option<Child> {
    let Some(library) = library() else {
        eprintln!("skipped: FOREBAY_CUFILE_PATH names no libcufile of 1.16 or later (make cufile)");
        return None;
    };
    let child = Child::new(test, library.to_str().unwrap());
    let record = child.scratch().join("udev");
    std::fs::write(&record, "E:DEVTYPE=disk\nE:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\nE:ID_FS_UUID=1-2\n").unwrap();
    Some(child.env("FOREBAY_INTERPOSE_UDEV", record))
}

fn open(cufile: CufileChoice) -> (Drive, Arc<TestMover>, tempfile::TempDir) {
    let (mover, dir) = (TestMover::new(), on_drive());
    let side = DeviceSide { cufile, regions: vec![Heap::new(20 * MIB) as _], ..side(&mover, MIB) };
    let trial_dir = Some(dir.path().to_path_buf());
    let drive = open_drive(&IoOptions { trial_dir, ..options(EngineChoice::Auto, side) }).unwrap();
    (drive, mover, dir)
}

fn forced() -> (Drive, Arc<TestMover>, tempfile::TempDir) {
    let opened = open(CufileChoice::Force);
    assert_eq!(opened.0.report.device.as_ref().unwrap().active(), IoPath::CufileCompat, "{:?}", opened.0.report);
    opened
}

#[test]
fn bytes_are_the_same_and_the_files_end_is_found() {
    let Some(child) = child("bytes_are_the_same_and_the_files_end_is_found") else { return };
    child.run(|| {
        let (drive, mover, dir) = forced();
        let version = drive.report.notes.list().iter().any(|n| n.starts_with("libcufile 1."));
        assert!(version, "{:?}", drive.report.notes);
        let file = direct_file(&dir, "f");
        let mut offset = 0;
        for pages in [1usize, 15, 17, 255, 1100] {
            let len = pages * IO_ALIGN;
            write_ok(&drive, &file, offset, filled(len, offset + 1));
            wait(&*drive.write, Request::flush(Arc::clone(&file), nobody)).result.unwrap();
            assert!(peek(&read_ok(&drive, &file, offset, device(len))) == pattern(len, offset + 1), "{pages} pages");
            offset += len as u64;
        }
        assert_eq!(mover.control.copies.load(Ordering::SeqCst), 0, "nothing went another way");
        let beyond = Request::read(Arc::clone(&file), offset - 4096, device(8192), nobody);
        assert_eq!(wait(&*drive.read, beyond).result.unwrap_err().kind(), ErrorKind::ShortIo);
        assert_eq!(drive.report.device.as_ref().unwrap().active(), IoPath::CufileCompat);
    });
}

#[test]
fn hundreds_at_once_all_end_right_and_it_closes() {
    let Some(child) = child("hundreds_at_once_all_end_right_and_it_closes") else { return };
    child.run(|| {
        let (drive, _mover, dir) = forced();
        let files = [direct_file(&dir, "f"), direct_file(&dir, "g")];
        let len = 5 * IO_ALIGN;
        let (tx, rx) = channel();
        for i in 0..200u64 {
            let tx = tx.clone();
            let done = move |c: Completion| _ = tx.send(c.result.is_ok());
            let file = Arc::clone(&files[(i % 2) as usize]);
            drive.write.submit(Request::write(file, i * len as u64, filled(len, i + 1), done)).unwrap();
        }
        assert!((0..200).all(|_| rx.recv_timeout(LONG).unwrap()));
        for i in (0..200u64).rev() {
            let tx = tx.clone();
            let done = move |c: Completion| {
                _ = tx.send(c.result.is_ok() && peek(&c.buf.unwrap()) == pattern(len, i + 1));
            };
            let file = Arc::clone(&files[(i % 2) as usize]);
            drive.read.submit(Request::read(file, i * len as u64, device(len), done)).unwrap();
        }
        assert!((0..200).all(|_| rx.recv_timeout(LONG).unwrap()));
        drop(files);
        drive.read.close(Instant::now() + LONG).unwrap();
        drive.write.close(Instant::now() + LONG).unwrap();
    });
}

#[test]
fn files_without_a_name_are_served_all_the_same() {
    let Some(child) = child("files_without_a_name_are_served_all_the_same") else { return };
    child.run(|| {
        let (drive, mover, dir) = forced();
        let unlinked = Arc::new(DirectFile::temporary_in(dir.path()).unwrap());
        let mut unnamed = std::fs::File::options();
        let unnamed = unnamed.read(true).write(true).custom_flags(libc::O_TMPFILE).open(dir.path()).unwrap();
        let unnamed = Arc::new(DirectFile::from_file(unnamed, "unnamed"));
        for file in [unlinked, unnamed] {
            let copies = mover.control.copies.load(Ordering::SeqCst);
            for i in 0..5 {
                write_ok(&drive, &file, 0, filled(IO_ALIGN, i));
                assert!(peek(&read_ok(&drive, &file, 0, device(IO_ALIGN))) == pattern(IO_ALIGN, i));
            }
            // cuFile takes a file that never had a name, by its second descriptor, but not one that
            // lost its name.
            let copied = mover.control.copies.load(Ordering::SeqCst) - copies;
            assert!(copied == 10 || file.path().ends_with("unnamed"), "{file:?}: {copied}");
        }
        assert_eq!(drive.report.device.unwrap().active(), IoPath::CufileCompat, "no fault of the path");
    });
}

#[test]
fn memory_of_the_cuda_device_is_registered_and_served() {
    let Some(child) = child("memory_of_the_cuda_device_is_registered_and_served") else { return };
    child.env(child::WITH_CUDA, "1").env("LD_LIBRARY_PATH", standin_cuda::DIR).run(|| {
        let ((device, pool), dir) = (child::gpu_staging("cuda:0", 20), on_drive());
        let regions = vec![pool.region()];
        let side =
            DeviceSide { mover: device.mover().unwrap(), regions, cufile: CufileChoice::Force, pinned_bytes: MIB };
        let trial_dir = Some(dir.path().to_path_buf());
        let drive = open_drive(&IoOptions { trial_dir, ..options(EngineChoice::Auto, side) }).unwrap();
        assert_eq!(drive.report.device.as_ref().unwrap().active(), IoPath::CufileCompat);
        let notes = drive.report.notes.list();
        assert!(!notes.iter().any(|n| n.contains("ends at")), "all of it is registered: {notes:?}");
        let file = direct_file(&dir, "f");
        for i in 0..20 {
            let mut host = forebay::io::AlignedBuf::zeroed(MIB).unwrap();
            host.copy_from_slice(&pattern(MIB, i + 1));
            write_ok(&drive, &file, i << 20, host.into());
        }
        let slots: Vec<_> = (0..20).map(|i| read_ok(&drive, &file, i << 20, pool.try_take().unwrap())).collect();
        for (i, slot) in slots.into_iter().enumerate() {
            // The stand-in's device memory is the host's, so it can be looked at.
            assert!(peek(&slot) == pattern(MIB, i as u64 + 1), "{i}");
            write_ok(&drive, &file, (20 + i as u64) << 20, slot);
        }
        let back = read_ok(&drive, &file, 39 << 20, forebay::io::AlignedBuf::zeroed(MIB).unwrap().into());
        assert!(back.as_slice() == pattern(MIB, 20));
        drive.read.close(Instant::now() + LONG).unwrap();
        drive.write.close(Instant::now() + LONG).unwrap();
        assert_eq!(drive.report.device.as_ref().unwrap().active(), IoPath::CufileCompat);
    });
}

#[test]
fn without_a_udev_record_the_reason_is_that() {
    let Some(child) = child("without_a_udev_record_the_reason_is_that") else { return };
    child.env("FOREBAY_INTERPOSE_UDEV", "/no/such/record").run(|| {
        let (drive, _mover, _dir) = open(CufileChoice::Auto);
        let device = drive.report.device.unwrap();
        assert_eq!(device.active(), IoPath::Bounce);
        assert!(device.reasons().iter().all(|(_, why)| why.contains("udev") && why.contains("5027")), "{device:?}");
    });
}

#[test]
fn compatibility_mode_is_told_and_left_alone() {
    let Some(child) = child("compatibility_mode_is_told_and_left_alone") else { return };
    child.run(|| {
        let (drive, _mover, dir) = open(CufileChoice::Auto);
        let device = drive.report.device.as_ref().unwrap();
        assert_eq!(device.active(), IoPath::Bounce);
        assert!(device.reasons().iter().any(|(p, why)| *p == IoPath::CufileCompat && why.contains("slower")));
        assert_eq!(dir.path().read_dir().unwrap().count(), 0, "neither the trial's file nor a log is left");
        assert!(!std::path::Path::new("cufile.log").exists());
    });
}
