use std::cmp::Reverse;
use std::fs::File;
use std::time::Duration;

use rustix::net::RecvFlags;

use super::message::{Answer, Ask, MOST_BYTES};
use super::owner::socket;
use super::ranked::MOST_CHANGES;
use super::*;
use crate::device::{HugePages, RegionOptions, SharedRegion};
use crate::io::{MemRegion, PinNotes};

pub(super) mod turns;
mod world;

const FRAME: usize = 8192;

fn tier(frames: usize) -> Arc<MemoryTier> {
    let options = StagingOptions { bytes: frames * FRAME, slot_bytes: FRAME, hugepages: HugePages::Off, numa: None };
    MemoryTier::new(&options).unwrap()
}

fn frames(tier: &MemoryTier) -> Arc<Frames> {
    let Place::Own(frames) = tier.share.place() else { panic!("no frames of its own") };
    frames
}

fn put(sequence: u64) -> PutId {
    PutId { drive: 0, sequence }
}

fn id(key: u8) -> FrameId {
    FrameId { key: ChunkKey([key; 32]), put: put(1) }
}

fn rank(turn: u64, depth: u32) -> Rank {
    Rank { turn, depth: Reverse(depth) }
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// Fills a frame with a chunk, each byte of which is the first of its key.
fn fill(tier: &Arc<MemoryTier>, id: FrameId, rank: Rank) -> bool {
    let Some(filling) = tier.reserve(id, FRAME as u64, rank) else { return false };
    filling.part(0..FRAME).unwrap().as_mut_slice().fill(id.key.0[0]);
    filling.publish(&[7, 8]);
    true
}

fn there(tier: &Arc<MemoryTier>, keys: &[u8]) -> Vec<u8> {
    let ids = frames(tier).ids();
    keys.iter().copied().filter(|key| ids.contains(&id(*key))).collect()
}

#[test]
fn what_was_used_last_stays_and_heads_stay_longest() {
    let tier = tier(3);
    for key in 1..=3 {
        assert!(fill(&tier, id(key), rank(1, u32::from(key))));
    }
    assert!(tier.get(id(3), rank(2, 0), Instant::now()).is_some(), "nobody is waited for");
    assert!(fill(&tier, id(4), rank(3, 0)));
    assert_eq!(there(&tier, &[1, 2, 3, 4]), [1, 3, 4], "of 1 and 2 the deeper one went");
    assert!(fill(&tier, id(5), rank(3, 0)));
    assert_eq!(there(&tier, &[1, 3, 4, 5]), [3, 4, 5]);
    let stats = tier.stats();
    assert_eq!((stats.hits, stats.misses, stats.filled, stats.evicted), (1, 0, 5, 2));
    assert_eq!((stats.bytes, stats.used_bytes), (3 * FRAME as u64, 3 * FRAME as u64));
}

#[test]
fn what_has_come_and_gone_is_told_once_and_first_what_is_there() {
    let tier = tier(2);
    assert!(fill(&tier, id(1), rank(1, 0)) && fill(&tier, id(2), rank(2, 0)) && fill(&tier, id(3), rank(3, 0)));
    let told = |most| {
        let mut told: Vec<_> = tier.take_changes(most).into_iter().map(|(key, there)| (key.0[0], there)).collect();
        told.sort_unstable();
        told
    };
    assert_eq!(told(9), [(2, true), (3, true)]);
    assert!(fill(&tier, id(4), rank(4, 0)));
    assert!(fill(&tier, FrameId { put: put(2), ..id(4) }, rank(5, 0)));
    let both = [told(1), told(9)].concat();
    assert!(both.len() == 3 && [(2, false), (3, false), (4, true)].iter().all(|change| both.contains(change)));
    tier.retain(|_| false);
    assert_eq!((told(9), told(9)), (vec![(4, false)], Vec::new()), "once");
}

#[test]
#[cfg_attr(miri, ignore = "too many for Miri")]
fn more_changes_than_are_kept_leave_nobody_wrong() {
    let tier = tier(1);
    assert!(fill(&tier, id(1), rank(1, 0)));
    assert_eq!(tier.take_changes(9), [(id(1).key, true)]);
    let nth = |n: usize| {
        let mut key = [9; 32];
        key[..8].copy_from_slice(&n.to_le_bytes());
        FrameId { key: ChunkKey(key), put: put(1) }
    };
    for n in 0..=MOST_CHANGES / 2 {
        tier.reserve(nth(n), FRAME as u64, rank(2, 0)).unwrap().publish(&[]);
    }
    let mut told = tier.take_changes(usize::MAX);
    told.sort_unstable_by_key(|(_, there)| *there);
    assert_eq!(told, [(id(1).key, false), (nth(MOST_CHANGES / 2).key, true)]);
}

#[test]
fn a_frame_in_use_is_not_given_to_another_chunk() {
    let tier = tier(2);
    assert!(fill(&tier, id(1), rank(1, 0)) && fill(&tier, id(2), rank(2, 0)));
    let hit = tier.get(id(1), rank(0, 0), later()).unwrap();
    assert!(fill(&tier, id(3), rank(3, 0)), "the other one goes, though it was used later");
    assert_eq!(there(&tier, &[1, 2, 3]), [1, 3]);
    let view = hit.view(0..FRAME).unwrap();
    drop(hit);
    let filling = tier.reserve(id(4), FRAME as u64, rank(4, 0)).unwrap();
    assert!(tier.reserve(id(5), FRAME as u64, rank(5, 0)).is_none(), "one is read, one is filled");
    assert!(view.as_slice().iter().all(|b| *b == 1));
    drop((view, filling));
    assert!(fill(&tier, id(5), rank(5, 0)));
}

#[test]
fn another_put_of_a_chunk_is_another_chunk() {
    let tier = tier(2);
    assert!(fill(&tier, id(1), rank(1, 0)));
    let newer = FrameId { put: put(2), ..id(1) };
    assert!(tier.get(newer, rank(2, 0), later()).is_none(), "it was removed and stored again");
    assert!(tier.get(id(1), rank(2, 0), later()).is_none(), "the old one is of no use any more");
    assert!(fill(&tier, newer, rank(3, 0)) && fill(&tier, id(1), rank(4, 0)));
    assert!(tier.get(newer, rank(5, 0), later()).is_some(), "a store that ends late changes nothing");
    assert_eq!(frames(&tier).free(), 1);
    let elsewhere = FrameId { put: PutId { drive: 1, sequence: 1 }, ..id(1) };
    assert!(
        fill(&tier, elsewhere, rank(6, 0)) && tier.get(elsewhere, rank(7, 0), later()).is_some(),
        "another drive counts anew"
    );
    assert!(tier.get(newer, rank(8, 0), later()).is_none() && frames(&tier).free() == 2);
}

#[test]
fn what_is_damaged_or_gone_from_the_drive_is_dropped_once() {
    let tier = tier(2);
    assert!(fill(&tier, id(1), rank(1, 0)) && fill(&tier, id(2), rank(1, 1)));
    let hit = tier.get(id(1), rank(2, 0), later()).unwrap();
    assert_eq!((hit.crc(0), hit.crc(1), hit.crc(2)), (Some(7), Some(8), None));
    hit.report_bad();
    hit.report_bad();
    assert_eq!((tier.stats().damaged, frames(&tier).free()), (1, 0));
    drop(hit);
    assert_eq!(frames(&tier).free(), 1);
    tier.retain(|id| id.key.0[0] != 2);
    assert_eq!((there(&tier, &[1, 2]), frames(&tier).free()), (Vec::new(), 2));
}

#[test]
fn chunks_that_do_not_fit_or_would_waste_a_frame_stay_out() {
    let tier = tier(1);
    for (bytes, fits) in [(FRAME + 1, false), (FRAME, true), (FRAME / 2 + 1, true), (FRAME / 2, false), (0, false)] {
        assert_eq!(tier.reserve(id(1), bytes as u64, rank(1, 0)).is_some(), fits, "{bytes}");
    }
    let filling = tier.reserve(id(1), FRAME as u64, rank(1, 0)).unwrap();
    let part = filling.part(0..1).unwrap();
    filling.publish(&[]);
    assert_eq!(tier.stats().filled, 0, "somebody still writes it");
    drop((part, filling));
    assert_eq!(frames(&tier).free(), 1);
}

/// A process with frames in a directory, and the connection of another one.
fn owner_and_link(dir: &Path) -> (Arc<MemoryTier>, Arc<FrameLink>) {
    owner_and_pinning_link(dir, None, false)
}

fn owner_and_pinning_link(dir: &Path, mover: Option<Arc<dyn Mover>>, pins: bool) -> (Arc<MemoryTier>, Arc<FrameLink>) {
    let options = StagingOptions { bytes: 2 * FRAME, slot_bytes: FRAME, hugepages: HugePages::Off, numa: None };
    let owner = MemoryTier::shared(&options, mover).unwrap();
    owner.share_in(dir).unwrap();
    let bell = Arc::new(crate::io::EventFd::new().unwrap());
    (owner, FrameLink::new(dir, &Frames::shareable(&options).unwrap(), pins, &bell).unwrap())
}

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memfd")]
fn all_of_the_memory_is_pinned_until_nobody_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let notes = Arc::new(PinNotes::default());
    let (owner, link) = owner_and_pinning_link(dir.path(), Some(Arc::clone(&notes) as _), false);
    assert!(fill(&owner, id(1), rank(1, 0)));
    let start = frames(&owner).region().unwrap().as_mut_ptr() as usize;
    while notes.pinned().is_empty() {
        std::thread::yield_now();
    }
    assert_eq!(notes.pinned(), [(start, 2 * FRAME)]);
    let view = owner.get(id(1), rank(2, 0), later()).unwrap().view(0..FRAME).unwrap();
    owner.close();
    drop((owner, link));
    assert_eq!(notes.pinned().len(), 1, "somebody may still copy from it");
    drop(view);
    assert_eq!(notes.pinned().len(), 0);
}

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memfd")]
fn pinned_frames_that_a_dead_process_was_filling_are_left_out() {
    for (mover, pins) in [(Some(Arc::new(PinNotes::default()) as _), false), (None, true)] {
        let dir = tempfile::tempdir().unwrap();
        let (owner, link) = owner_and_pinning_link(dir.path(), mover, pins);
        let (filling, _) = link.reserve(&id(2), rank(1, 0)).unwrap();
        assert!(fill(&owner, id(1), rank(1, 0)));
        let (frame, ..) = link.find(&id(1), rank(1, 0), true).unwrap();
        rustix::net::shutdown(link.socket(), rustix::net::Shutdown::Both).unwrap();
        // The one that was read comes back, in the place of chunk 1; the other one does not.
        let again = loop {
            match owner.reserve(id(3), FRAME as u64, rank(3, 0)) {
                Some(again) => break again,
                None => std::thread::yield_now(),
            }
        };
        assert!(owner.reserve(id(4), FRAME as u64, rank(4, 0)).is_none());
        drop((again, frame, filling));
        assert_eq!(frames(&owner).free(), 1);
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri starts no processes")]
fn an_owner_that_may_open_no_file_waits_and_answers_the_others() {
    const NAME: &str = "tier::tests::an_owner_that_may_open_no_file_waits_and_answers_the_others";
    const CHILD: &str = "FOREBAY_TEST_CHILD";
    if std::env::var_os(CHILD).is_none() {
        let run = format!("ulimit -n 64 && exec \"$0\" {NAME} --exact --test-threads=1 --nocapture");
        let mut child = std::process::Command::new("sh");
        let out = child.args(["-c", &run]).arg(std::env::current_exe().unwrap()).env(CHILD, NAME).output().unwrap();
        let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        assert!(out.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (owner, link) = owner_and_link(dir.path());
    assert!(fill(&owner, id(1), rank(1, 0)));
    let late = socket().unwrap();
    let address = rustix::net::SocketAddrUnix::new(dir.path().join("memory.sock")).unwrap();
    let files: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
    rustix::net::connect(&late, &address).unwrap();
    let used = || rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let (before, since) = (used(), std::time::Instant::now());
    std::thread::sleep(std::time::Duration::from_secs(1));
    let (after, waited) = (used(), since.elapsed().as_nanos());
    let took = (after.tv_sec - before.tv_sec) as u128 * 1_000_000_000 + after.tv_nsec as u128 - before.tv_nsec as u128;
    assert!(took < waited / 10, "{took} ns of {waited}");
    assert!(link.find(&id(1), rank(1, 0), true).is_some());
    drop(files);
    let hello = message::Ask::Hello { version: message::VERSION, frame_bytes: FRAME as u64, pins: false };
    message::send(&late, &hello, None).unwrap();
    let mut buf = vec![0; message::MOST_BYTES];
    let answer = message::receive(&late, &mut buf, rustix::net::RecvFlags::empty()).unwrap();
    assert!(matches!(answer, Some((message::Answer::Welcome { frames: 2 }, Some(_)))), "{answer:?}");
}

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memfd")]
fn what_another_process_has_in_its_frames_is_told_and_goes_with_that_process() {
    let dir = tempfile::tempdir().unwrap();
    let options = StagingOptions { bytes: 3 * FRAME, slot_bytes: FRAME, hugepages: HugePages::Off, numa: None };
    let open = || {
        let tier = MemoryTier::shared(&options, None).unwrap();
        tier.share_in(dir.path()).unwrap();
        tier
    };
    let owner = open();
    assert!(fill(&owner, id(1), rank(1, 0)));
    let user = open();
    assert!(user.stats().is_attached);
    let mut told = std::collections::BTreeMap::new();
    let mut wait_for = |user: &MemoryTier, keys: &[u8]| {
        let begun = std::time::Instant::now();
        while told.iter().filter(|(_, there)| **there).map(|(key, _)| *key).ne(keys.iter().copied()) {
            assert!(begun.elapsed().as_secs() < 120, "{told:?} instead of {keys:?}");
            let changes = user.take_changes(1);
            assert!(changes.len() <= 1);
            told.extend(changes.into_iter().map(|(key, there)| (key.0[0], there)));
            std::thread::yield_now();
        }
    };
    wait_for(&user, &[1]);
    assert!(fill(&owner, id(2), rank(2, 0)) && fill(&user, id(3), rank(3, 0)));
    wait_for(&user, &[1, 2, 3]);
    // The owner counts the other's turns from 0.
    assert!(fill(&owner, id(4), rank(4, 0)));
    wait_for(&user, &[1, 2, 4]);
    owner.retain(|id| id.key.0[0] != 1);
    wait_for(&user, &[2, 4]);
    owner.close();
    while user.stats().is_attached || user.frames() == 0 {
        std::thread::yield_now();
    }
    wait_for(&user, &[]);
    assert!(fill(&user, id(2), rank(5, 0)));
    wait_for(&user, &[2]);
}

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memfd")]
fn who_becomes_the_owner_goes_on_with_its_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let options = StagingOptions { bytes: 2 * FRAME, slot_bytes: FRAME, hugepages: HugePages::Off, numa: None };
    let [owner, user] = [0; 2].map(|_| {
        let tier = MemoryTier::shared(&options, None).unwrap();
        tier.share_in(dir.path()).unwrap();
        tier
    });
    let last = (0..9).map(|_| user.turn()).max().unwrap();
    owner.close();
    while !matches!(user.share.place(), Place::Own(_)) {
        std::thread::yield_now();
    }
    assert!(user.turn() > last, "what has an older number would stay for long");
}

/// In place of a process with frames in a directory: one that takes so long for each answer about a
/// chunk, and has none. Gives the number of these answers.
pub(crate) fn slow_owner(dir: &Path, takes: Duration) -> Arc<AtomicU64> {
    let lock = File::create(dir.join("memory.lock")).unwrap();
    lock.lock().unwrap();
    let listener = socket().unwrap();
    owner::at_socket(dir, |address| rustix::net::bind(&listener, address)).unwrap();
    rustix::net::listen(&listener, 8).unwrap();
    let answers = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&answers);
    std::thread::spawn(move || {
        let (_lock, mut buf) = (lock, vec![0; MOST_BYTES]);
        while let Ok(user) = rustix::net::accept(&listener) {
            while let Ok(Some((ask, _))) = message::receive(&user, &mut buf, RecvFlags::empty()) {
                let sent = match ask {
                    Ask::Hello { frame_bytes, .. } => {
                        let wishes = RegionOptions { hugepages: HugePages::Off, numa: None };
                        let region = SharedRegion::new(frame_bytes as usize, &wishes).unwrap();
                        message::send(&user, &Answer::Welcome { frames: 1 }, Some(region.file()))
                    }
                    Ask::Find { .. } | Ask::Reserve { .. } => {
                        counted.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(takes);
                        message::send(&user, &Answer::Nothing, None)
                    }
                    _ => Ok(()),
                };
                // The user may not have waited.
                drop(sent);
            }
        }
    });
    answers
}

#[test]
fn who_asks_too_late_for_changes_lists_all_and_loses_none() {
    let owner = tier(2);
    let frames = frames(&owner);
    let mut heard = heard::Heard::default();
    let told = |heard: &mut heard::Heard| {
        let mut told: Vec<_> = heard.take(9).into_iter().map(|(key, there)| (key.0[0], there)).collect();
        told.sort_unstable();
        told
    };
    assert!(fill(&owner, id(1), rank(1, 0)));
    assert_eq!(frames.changes_from(Some(0), 9), (Some(vec![]), 0), "nobody had asked");
    assert_eq!(frames.changes_from(None, 9), (None, 0));
    assert_eq!(frames.changes_from(Some(1), 9), (None, 0), "a number of another owner's");
    assert!(fill(&owner, id(2), rank(2, 0)) && fill(&owner, id(3), rank(3, 0)));
    let all = frames.ids().iter().map(|id| id.key).collect();
    heard.listed(&all, 0);
    assert_eq!(told(&mut heard), [(2, true), (3, true)]);
    let (some, next) = frames.changes_from(heard.next(), 2);
    assert_eq!((some.as_ref().unwrap().len(), next), (2, 2));
    heard.changed(&some.unwrap(), next);
    let (some, next) = frames.changes_from(heard.next(), 2);
    assert_eq!((some.as_ref().unwrap().len(), next), (1, 3));
    heard.changed(&some.unwrap(), next);
    assert!(told(&mut heard).into_iter().all(|(key, there)| there == (key > 1)), "they were in the list already");
    heard.all_gone();
    assert_eq!((told(&mut heard), heard.next()), (vec![(2, false), (3, false)], None));
}

/// Waits until the owner has heard of it: it answers on a thread of its own.
fn wait_free(owner: &MemoryTier, free: usize) {
    while frames(owner).free() != free {
        std::thread::yield_now();
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memfd")]
fn a_frame_that_another_process_uses_is_not_given_away_until_it_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let (owner, link) = owner_and_link(dir.path());
    assert!(fill(&owner, id(1), rank(1, 0)));
    let (frame, crcs, _) = link.find(&id(1), rank(1, 0), true).unwrap();
    assert_eq!(*crcs, [7, 8]);
    let (filling, _) = link.reserve(&id(2), rank(1, 0)).unwrap();
    filling.part(0..FRAME).unwrap().as_mut_slice().fill(9);
    assert!(owner.reserve(id(3), FRAME as u64, rank(3, 0)).is_none(), "one is read, one is filled");
    assert!(frame.view(0..FRAME).unwrap().as_slice().iter().all(|b| *b == 1));
    // Ends the connection, as the kernel does when the process is killed.
    rustix::net::shutdown(link.socket(), rustix::net::Shutdown::Both).unwrap();
    wait_free(&owner, 1);
    let taken = owner.reserve(id(3), FRAME as u64, rank(3, 0)).unwrap();
    assert!(taken.part(0..FRAME).unwrap().as_slice().iter().all(|b| *b == 0), "what it was filling is other memory");
    assert!(link.find(&id(1), rank(1, 0), true).is_none(), "nothing is asked of who is gone");
}

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memfd")]
fn many_frames_that_are_given_back_at_once_do_not_end_the_connection() {
    const MANY: usize = 1000;
    let dir = tempfile::tempdir().unwrap();
    let options = StagingOptions { bytes: MANY * FRAME, slot_bytes: FRAME, hugepages: HugePages::Off, numa: None };
    let owner = MemoryTier::shared(&options, None).unwrap();
    owner.share_in(dir.path()).unwrap();
    let bell = Arc::new(crate::io::EventFd::new().unwrap());
    let link = FrameLink::new(dir.path(), &Frames::shareable(&options).unwrap(), false, &bell).unwrap();
    for _ in 0..5 {
        let all: Vec<_> = (0..MANY).map(|_| link.reserve(&id(1), rank(1, 0)).unwrap()).collect();
        drop(all);
        assert!(!link.is_over(), "the socket takes fewer messages than these at once");
        wait_free(&owner, MANY);
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memfd")]
fn who_is_not_talked_to_any_more_keeps_its_frames_until_it_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let (owner, link) = owner_and_link(dir.path());
    assert!(fill(&owner, id(1), rank(1, 0)));
    let (frame, ..) = link.find(&id(1), rank(1, 0), true).unwrap();
    let (filling, _) = link.reserve(&id(2), rank(1, 0)).unwrap();
    message::send(link.socket(), &[255u8; 30], None).unwrap();
    assert!(link.find(&id(1), rank(1, 0), true).is_none() && link.is_over(), "it hears of that");
    assert!(owner.reserve(id(3), FRAME as u64, rank(3, 0)).is_none());
    filling.part(0..FRAME).unwrap().as_mut_slice().fill(9);
    assert!(frame.view(0..FRAME).unwrap().as_slice().iter().all(|b| *b == 1));
    drop((frame, filling, link));
    wait_free(&owner, 1);
    assert!(owner.reserve(id(3), FRAME as u64, rank(3, 0)).is_some());
}

#[test]
#[cfg_attr(miri, ignore = "Miri knows no memfd")]
fn nonsense_closes_a_connection_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let (owner, link) = owner_and_link(dir.path());
    let connect = || {
        let socket = owner::socket().unwrap();
        owner::at_socket(dir.path(), |address| rustix::net::connect(&socket, address)).unwrap();
        socket
    };
    let closes = |socket| {
        let mut polled = [rustix::event::PollFd::new(&socket, rustix::event::PollFlags::RDHUP)];
        rustix::event::poll(&mut polled, None).unwrap();
    };
    let socket = connect();
    message::send(&socket, &[255u8; 30], None).unwrap();
    closes(socket);
    let socket = connect();
    message::send(&socket, &message::Ask::Release { lease: 0 }, None).unwrap();
    closes(socket);
    // Leases that nobody has, and ids that are not there.
    link.forget(&[id(9)]);
    let (filling, lease) = link.reserve(&id(1), rank(1, 0)).unwrap();
    assert!(filling.finish().is_some() && link.publish(lease, rank(1, 0), false, &[1]));
    assert!(link.find(&id(1), rank(1, 0), true).is_some());
    assert!(!link.publish(lease, rank(1, 0), false, &[1]) || link.find(&id(1), rank(1, 0), true).is_none());
    drop(link);
    wait_free(&owner, 1);
    assert!(owner.get(id(1), rank(2, 0), later()).is_some());
    let other = StagingOptions { bytes: 4 * FRAME, slot_bytes: 2 * FRAME, hugepages: HugePages::Off, numa: None };
    let bell = Arc::new(crate::io::EventFd::new().unwrap());
    let refused = FrameLink::new(dir.path(), &other, false, &bell).unwrap_err();
    assert_eq!(refused.kind(), crate::error::ErrorKind::Unsupported);
}
