//! Marks, which other processes make beside the table's writer.
//!
//! That a mark never meets a later entry in the same slot is not for loom: it does not know that
//! what the writer stores after an exchange which read its store before is the later of the two,
//! and lets readers see either. A test of the index goes through that with real threads.

use super::*;

#[test]
fn an_entry_gets_one_mark_whoever_makes_it() {
    explore(3, &["leaving", "removed"], |tally| {
        let (writer, reader) = table(1, VERSION);
        let (a, told) = (key(1, 1), tally.clone());
        writer.insert(&entry(a, 1)).unwrap();
        let other = shared(&writer);
        let mine = std::rc::Rc::new(std::cell::Cell::new(false));
        let its = std::rc::Rc::clone(&mine);
        race(
            || mine.set(writer.mark(&a, 1, Mark::Leaving).unwrap()),
            move || {
                if other.mark(&a, 1, Mark::Removed).unwrap() {
                    told.add("removed");
                    assert_eq!(other.get_marked(&a).unwrap().2, Some(Mark::Removed));
                    assert!(other.get(&a).is_none(), "served although it is marked");
                }
                drop(its);
            },
        );
        let (its, _, mark) = reader.get_marked(&a).unwrap();
        assert_eq!(its, entry(a, 1));
        assert_eq!(mark, Some(if mine.get() { Mark::Leaving } else { Mark::Removed }), "one of the two, and told so");
        if mine.get() {
            tally.add("leaving");
        }
    });
}

#[test]
fn a_mark_is_carried_into_a_table_that_grows_or_its_maker_told() {
    explore(2, &["carried", "told"], |tally| {
        let (writer, _) = table(1, VERSION);
        let (larger, grown) = table(2, VERSION);
        let (a, told) = (key(1, 1), tally.clone());
        writer.insert(&entry(a, 1)).unwrap();
        let other = shared(&writer);
        let outcome = std::rc::Rc::new(std::cell::Cell::new(None));
        let its = std::rc::Rc::clone(&outcome);
        race(
            || {
                writer.grow_into(&larger, |_, _| {}).unwrap();
                writer.mark_moved();
                writer.carry_marks(&larger).unwrap();
            },
            move || its.set(Some(other.mark(&a, 1, Mark::Removed).is_ok_and(|marked| marked))),
        );
        if outcome.get() == Some(true) {
            told.add("carried");
            assert_eq!(grown.get_marked(&a).unwrap().2, Some(Mark::Removed), "a mark was lost");
            assert!(grown.has_removals(), "the next table would not get it");
        } else {
            told.add("told");
        }
    });
}
