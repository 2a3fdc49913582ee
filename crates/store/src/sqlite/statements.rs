//! Statements that stay prepared for as long as their connection lives.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::rc::Rc;

use rusqlite::{Connection, PrepFlags, Statement};

/// The prepared statements of a connection, found by where their text stands in the program: the texts are few and
/// fixed, and hashing a long one for each row costs as much as a small statement does.
#[derive(Default)]
pub(super) struct Statements<'a> {
    known: RefCell<HashMap<(usize, usize), Kept<'a>, BuildHasherDefault<ByAddress>>>,
}

type Kept<'a> = Rc<RefCell<Statement<'a>>>;

impl<'a> Statements<'a> {
    pub(super) fn with<T>(
        &self,
        connection: &'a Connection,
        sql: Cow<'static, str>,
        run: impl FnOnce(&mut Statement<'a>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<T> {
        let sql = match sql {
            Cow::Borrowed(sql) => sql,
            // Put together for the occasion.
            Cow::Owned(sql) => return run(&mut *connection.prepare_cached(&sql)?),
        };
        let place = (sql.as_ptr() as usize, sql.len());
        let known = self.known.borrow().get(&place).cloned();
        let statement = match known {
            Some(statement) => statement,
            None => {
                // Kept out of the connection's small pool of memory, which is for statements at work: without it each of
                // their steps asks the system for memory.
                let statement = connection.prepare_with_flags(sql, PrepFlags::SQLITE_PREPARE_PERSISTENT)?;
                let kept = Rc::new(RefCell::new(statement));
                self.known.borrow_mut().insert(place, kept.clone());
                kept
            }
        };
        match statement.try_borrow_mut() {
            Ok(mut statement) => run(&mut statement),
            // At work further up.
            Err(_) => run(&mut *connection.prepare_cached(sql)?),
        }
    }
}

/// Spreads addresses, which nobody chooses to do harm.
#[derive(Default)]
struct ByAddress(u64);

impl Hasher for ByAddress {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_usize(usize::from(*byte)));
    }

    fn write_usize(&mut self, number: usize) {
        self.0 = (self.0 ^ number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
}
