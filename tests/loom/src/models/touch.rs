//! The touch ring: the writer gets what readers report at most once, and nothing that nobody
//! reported.

use loom::thread;

use super::*;

#[test]
fn no_touch_is_told_twice_or_made_up() {
    explore(3, &["all", "some"], |tally| {
        let writer = lane(1, 1, 4);
        let readers = [attached(&writer, 2), attached(&writer, 3)];
        let mut cursor = writer.touch_cursor();
        let mut told = Vec::new();
        let threads: Vec<_> = readers
            .into_iter()
            .zip([1, 2])
            .map(|(reader, n)| thread::spawn(move || reader.touch([key(n, 0)].iter())))
            .collect();
        let mut lost = writer.drain_touches(&mut cursor, |tag| told.push(tag));
        threads.into_iter().for_each(|t| t.join().unwrap());
        lost += writer.drain_touches(&mut cursor, |tag| told.push(tag));
        assert_eq!(lost, 0, "there is room for four");
        told.sort_unstable();
        assert!([&[1, 2][..], &[1], &[2], &[]].contains(&&told[..]), "{told:?}");
        // A touch whose reader had taken a place, but not stored yet when the writer passed, may
        // come a lap later, once.
        tally.add(if told.len() == 2 { "all" } else { "some" });
        let rest = 2 - told.len();
        writer.touch([key(8, 0), key(9, 0)].iter());
        writer.touch([key(8, 0), key(9, 0)].iter());
        let mut more = Vec::new();
        writer.drain_touches(&mut cursor, |tag| more.push(tag));
        assert!(
            more.iter().filter(|tag| **tag < 8 && told.contains(tag)).count() == 0 && rest <= 2,
            "{told:?} {more:?}"
        );
    });
}

/// A writer that comes late, in a ring of two: what it gets and what is lost are together at most
/// what was reported.
#[test]
fn what_was_overwritten_is_counted_as_lost() {
    explore(3, &["lost", "nothing lost"], |tally| {
        let writer = lane(1, 1, 2);
        let reader = attached(&writer, 2);
        let mut cursor = writer.touch_cursor();
        let t = thread::spawn(move || {
            reader.touch([key(1, 0), key(2, 0)].iter());
            reader.touch([key(3, 0)].iter());
        });
        let mut told = Vec::new();
        let mut lost = writer.drain_touches(&mut cursor, |tag| told.push(tag));
        t.join().unwrap();
        lost += writer.drain_touches(&mut cursor, |tag| told.push(tag));
        tally.add(if lost > 0 { "lost" } else { "nothing lost" });
        assert!(told.len() as u64 + lost <= 3, "{told:?} and {lost} lost");
        assert!(told.iter().all(|tag| (1..=3).contains(tag)), "{told:?}");
        let mut once = told.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), told.len(), "told twice: {told:?}");
    });
}
