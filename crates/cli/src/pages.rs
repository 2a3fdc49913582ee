//! Page after page of a list, and when to stop: a server that is none, or is broken, may never come to an end.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};

use crate::failure::Failure;

/// Pages in a row without an item. A store looks at thousands of runs for each, so this is enough for 50 million.
const EMPTY_MAX: usize = 10_000;
/// Bytes of one list in all: more than twice a million schedules.
const BYTES_MAX: usize = 2 << 30;
/// Pages of one list in all, so that the hashes of their cursors fit in 20 MiB: 1000 million items.
const PAGES_MAX: usize = 1 << 20;

/// How far a list was read.
#[derive(Debug, Default)]
pub struct Pages {
    /// Hashes of the cursors so far, by `hasher`.
    seen: HashSet<u64>,
    hasher: RandomState,
    bytes: usize,
    empty: usize,
}

impl Pages {
    /// Takes note of a page with so many items, of which so many bytes are kept. Gives the cursor of the next page,
    /// none after the last.
    pub fn next(
        &mut self,
        items: usize,
        bytes: usize,
        next: Option<String>,
    ) -> Result<Option<String>, Failure> {
        self.bytes = self.bytes.saturating_add(bytes);
        self.empty = if items == 0 { self.empty + 1 } else { 0 };
        let Some(cursor) = next else { return Ok(None) };
        let why = if !self.seen.insert(self.hasher.hash_one(&cursor)) {
            format!("the cursor {cursor:?} comes a second time")
        } else if self.empty >= EMPTY_MAX {
            format!("{EMPTY_MAX} empty pages in a row, the last with the cursor {cursor:?}")
        } else if self.bytes > BYTES_MAX {
            format!("more than {} GiB, and then the cursor {cursor:?}", BYTES_MAX >> 30)
        } else if self.seen.len() > PAGES_MAX {
            format!("more than {PAGES_MAX} pages, and then the cursor {cursor:?}")
        } else {
            return Ok(Some(cursor));
        };
        let way_out = "use a server of this version, or ask for less";
        Err(Failure::Unreachable(format!("the server's list does not end: {why}; {way_out}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(result: Result<Option<String>, Failure>) -> String {
        match result {
            Err(Failure::Unreachable(words)) => words,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_list_ends_without_a_cursor() {
        let mut pages = Pages::default();
        assert_eq!(pages.next(1000, 1 << 20, Some("a".into())).unwrap().as_deref(), Some("a"));
        let second = pages.next(0, 20, Some("b".into())).unwrap();
        assert_eq!(second.as_deref(), Some("b"), "nothing fits the filter there");
        assert_eq!(pages.next(5, 20, None).unwrap(), None);
    }

    #[test]
    fn a_list_that_does_not_end_is_left() {
        for cycle in [&["x"][..], &["x", "y"], &["x", "y", "z"]] {
            let mut pages = Pages::default();
            for cursor in cycle {
                pages.next(5, 20, Some((*cursor).into())).unwrap();
            }
            let said = words(pages.next(5, 20, Some("x".into())));
            assert!(said.contains("the cursor \"x\" comes a second time"), "{said}");
        }

        let mut empty = Pages::default();
        for number in 1..EMPTY_MAX {
            empty.next(0, 20, Some(number.to_string())).unwrap();
        }
        let said = words(empty.next(0, 20, Some("y".into())));
        assert!(said.contains("10000 empty pages in a row, the last with the cursor \"y\""), "{said}");

        let mut large = Pages::default();
        large.next(1000, BYTES_MAX, Some("a".into())).unwrap();
        let said = words(large.next(1, 1, Some("b".into())));
        assert!(said.contains("more than 2 GiB, and then the cursor \"b\""), "{said}");

        let mut many = Pages::default();
        for number in 0..PAGES_MAX {
            many.next(1, 1, Some(number.to_string())).unwrap();
        }
        let said = words(many.next(1, 1, Some("z".into())));
        assert!(said.contains("more than 1048576 pages, and then the cursor \"z\""), "{said}");
    }
}
