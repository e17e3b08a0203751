//! Files for raw jobs: real data, no holes.
//!
//! A file that is to be read and is missing, too short or sparse is written in full with
//! incompressible data; reading holes would measure nothing. A file that is only written is
//! reserved (fallocate), as fio does.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use forebay::io::{AlignedBuf, DirectFile, FileOptions, IO_ALIGN};
use forebay::{Error, ErrorKind, Result};
use indicatif::ProgressBar;

use crate::bench::job::Job;
use crate::out::{self, Context};
use crate::progress::{self, Unit};
use crate::random::Rng;
use crate::scratch::outside_caches;
use crate::stop;

/// Bytes per write while a file is laid out.
const STEP_BYTES: usize = 4 << 20;

/// Makes the files of `job` and returns the bytes that each worker covers.
///
/// # Errors
/// `InvalidInput` where no size is known, and what creating and writing files reports.
pub(crate) fn prepare(job: &Job, context: &Context) -> Result<u64> {
    let files: BTreeSet<PathBuf> = (0..job.numjobs).map(|i| job.file_of(i)).collect();
    let mut smallest = u64::MAX;
    for path in &files {
        let size = match job.size {
            Some(size) => size,
            None => existing_size(job, path)?,
        };
        make(job, context, path, size)?;
        smallest = smallest.min(size);
    }
    Ok(smallest - smallest % job.bs)
}

/// Removes the files of `job`, unless another job has removed one that they share. The figures are
/// good whether or not that works.
pub(crate) fn remove(job: &Job) {
    let files: BTreeSet<PathBuf> = (0..job.numjobs).map(|i| job.file_of(i)).collect();
    for path in files {
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                out::tell(&format!("warning: {}", Error::io("cannot remove the file", e).at(&path)));
            }
            _ => {}
        }
    }
}

/// The directory of a file, for the trial of an I/O path.
pub(crate) fn directory_of(path: &Path) -> Option<PathBuf> {
    path.parent().map(|p| if p.as_os_str().is_empty() { PathBuf::from(".") } else { p.to_path_buf() })
}

fn existing_size(job: &Job, path: &Path) -> Result<u64> {
    let length = std::fs::metadata(path).map(|m| m.len()).unwrap_or(0);
    if length < job.bs {
        return Err(Error::new(ErrorKind::InvalidInput, format!("job {:?}: no size", job.name))
            .at(path)
            .advice("add --size, or name an existing file with --filename"));
    }
    Ok(length)
}

fn make(job: &Job, context: &Context, path: &Path, size: u64) -> Result<()> {
    if let Ok(meta) = std::fs::metadata(path)
        && !meta.is_file()
    {
        return Err(Error::new(ErrorKind::InvalidInput, "only regular files are benchmarked").at(path));
    }
    let laid_out = job.rw.reads() && is_laid_out(path, size);
    if job.rw.writes() || !laid_out {
        directory_of(path).map_or(Ok(()), |dir| outside_caches(&dir))?;
    }
    if !job.rw.reads() {
        let before = std::fs::metadata(path).map(|m| m.len()).ok();
        let file = DirectFile::open(path, FileOptions::create())?;
        return reserve(&file, size).or_else(|e| undo(path, &file, before).and(Err(e)));
    }
    if laid_out {
        return Ok(());
    }
    // A file that is not bench's own may be somebody's data.
    if job.filename.is_some() && std::fs::metadata(path).is_ok_and(|meta| meta.len() > 0) {
        return Err(Error::new(ErrorKind::InvalidInput, "the file is too short, or has parts that were never written")
            .at(path)
            .advice("remove it, or name another file: reads of such parts do not reach the drive, and bench does not overwrite a file that it was given"));
    }
    let before = std::fs::metadata(path).map(|m| m.len()).ok();
    let file = DirectFile::open(path, FileOptions::create())?;
    reserve(&file, size).or_else(|e| undo(path, &file, before).and(Err(e)))?;
    let bar = progress::bar(context, format!("laying out {}", path.display()), size, Unit::Bytes);
    let mut written = 0;
    let filled = fill(&file, size, (job.randseed, &mut written), &bar);
    bar.finish_and_clear();
    if filled.is_err() {
        // What was not written yet is reserved: the next run must not take it for laid out.
        let undone = match before {
            None => std::fs::remove_file(path).map_err(|e| Error::io("cannot remove the file", e).at(path)),
            Some(length) => file.set_len(if length < size { length } else { written }),
        };
        return filled.and(undone);
    }
    file.sync_data()
}

/// Gives back what a reservation that failed has taken: the file system keeps it.
fn undo(path: &Path, file: &DirectFile, before: Option<u64>) -> Result<()> {
    match before {
        None => std::fs::remove_file(path).map_err(|e| Error::io("cannot remove the file", e).at(path)),
        Some(length) => file.set_len(length),
    }
}

/// Whether a file has data in all of its first `size` bytes. What is only reserved, as by a write
/// that ended early, counts as a hole: a read of it does not reach the drive.
fn is_laid_out(path: &Path, size: u64) -> bool {
    let Ok(file) = std::fs::File::open(path) else { return false };
    let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(0)).or_else(|e| match e {
        // A file system without holes.
        rustix::io::Errno::INVAL => file.metadata().map(|meta| meta.len()).map_err(|_| e),
        _ => Err(e),
    });
    hole.is_ok_and(|hole| hole >= size)
}

fn reserve(file: &DirectFile, size: u64) -> Result<()> {
    match file.allocate(0, size) {
        Err(e) if e.kind() == ErrorKind::Unsupported => file.set_len(file.len()?.max(size)),
        other => other,
    }
}

/// Fills with random data, of which no two pages are alike: every page starts with its own number.
/// `offset` is how far that has come.
fn fill(file: &DirectFile, size: u64, (seed, offset): (u64, &mut u64), bar: &ProgressBar) -> Result<()> {
    let mut buffer = AlignedBuf::zeroed(STEP_BYTES)?;
    Rng::new(seed).fill(&mut buffer);
    let padded = size.next_multiple_of(IO_ALIGN as u64);
    while *offset < padded {
        stop::check()?;
        let step = (padded - *offset).min(STEP_BYTES as u64);
        for (i, page) in buffer.chunks_mut(IO_ALIGN).enumerate() {
            let number = *offset / IO_ALIGN as u64 + i as u64;
            if let Some(head) = page.first_chunk_mut() {
                *head = number.to_le_bytes();
            }
        }
        file.write_at(buffer.get(..step as usize).unwrap_or_default(), *offset)?;
        *offset += step;
        bar.inc(step);
    }
    if padded != size {
        file.set_len(size)?;
    }
    Ok(())
}
