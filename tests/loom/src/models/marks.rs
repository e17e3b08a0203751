//! Marks, which other processes make beside the table's writer.

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

/// The slot is given to a key that begins alike, or to a later entry of the same key, while a mark is on its way.
#[test]
fn a_mark_never_meets_another_entry() {
    for same_key in [false, true] {
        explore(2, &["marked", "too late"], move |tally| {
            let (writer, reader) = table(1, KEY);
            let (a, told) = (key(1, 1), tally.clone());
            let b = if same_key { a } else { key(1, 2) };
            writer.insert(&entry(a, 1)).unwrap();
            let other = shared(&writer);
            race(
                || {
                    assert!(writer.remove_if(&a, 9).unwrap().is_some());
                    assert_eq!(writer.insert(&entry(b, 2)).unwrap().slot, 0, "the slot is used again");
                },
                move || told.add(if other.mark(&a, 1, Mark::Removed).unwrap() { "marked" } else { "too late" }),
            );
            assert_eq!(reader.get(&b), Some(entry(b, 2)), "what came later bears the mark");
        });
    }
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
        } else {
            told.add("told");
        }
    });
}
