//! Page after page of a list, and when to stop: a server that is none, or is broken, may never come to an end.

use crate::failure::Failure;

/// Pages in a row without an item. A store looks at thousands of runs for each, so this is enough for 50 million.
const EMPTY_MAX: usize = 10_000;
/// Bytes of one list in all: more than twice a million schedules.
const BYTES_MAX: usize = 2 << 30;

/// How far a list was read.
#[derive(Debug, Default)]
pub struct Pages {
    cursor: Option<String>,
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
    ) -> Result<Option<&str>, Failure> {
        self.bytes = self.bytes.saturating_add(bytes);
        self.empty = if items == 0 { self.empty + 1 } else { 0 };
        let endless = |why: String| {
            let way_out = "use a server of this version, or ask for less";
            Err(Failure::Unreachable(format!("the server's list does not end: {why}; {way_out}")))
        };
        match &next {
            Some(cursor) if next == self.cursor => {
                endless(format!("the cursor {cursor:?} leads to a page with the same cursor"))
            }
            Some(cursor) if self.empty >= EMPTY_MAX => {
                endless(format!("{EMPTY_MAX} empty pages in a row, the last with the cursor {cursor:?}"))
            }
            Some(cursor) if self.bytes > BYTES_MAX => {
                endless(format!("more than {} GiB, and then the cursor {cursor:?}", BYTES_MAX >> 30))
            }
            _ => {
                self.cursor = next;
                Ok(self.cursor.as_deref())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(result: Result<Option<&str>, Failure>) -> String {
        match result {
            Err(Failure::Unreachable(words)) => words,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_list_ends_without_a_cursor() {
        let mut pages = Pages::default();
        assert_eq!(pages.next(1000, 1 << 20, Some("a".into())).unwrap(), Some("a"));
        assert_eq!(pages.next(0, 20, Some("b".into())).unwrap(), Some("b"), "nothing fits the filter there");
        assert_eq!(pages.next(5, 20, None).unwrap(), None);
    }

    #[test]
    fn a_list_that_does_not_end_is_left() {
        let mut same = Pages::default();
        same.next(5, 20, Some("x".into())).unwrap();
        let said = words(same.next(5, 20, Some("x".into())));
        assert!(said.contains("the cursor \"x\" leads to a page with the same cursor"), "{said}");

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
    }
}
