//! Statements that stay prepared for as long as their connection lives.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;

use rusqlite::{Connection, Statement};

/// The prepared statements of a connection, found by where their text stands in the program: the texts are few and
/// fixed, and hashing a long one for each row costs as much as a small statement does.
#[derive(Default)]
pub(super) struct Statements<'a> {
    known: RefCell<HashMap<(usize, usize), Statement<'a>>>,
}

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
        let known = self.known.borrow_mut().remove(&place);
        let mut statement = match known {
            Some(statement) => statement,
            None => connection.prepare(sql)?,
        };
        let answer = run(&mut statement);
        self.known.borrow_mut().insert(place, statement);
        answer
    }
}
