//! Live runs that an overlap policy looks at: `core::overlap` as a condition on `live`.

use std::fmt::Write;

use belfry_core::definition::Scope;
use belfry_core::overlap::Overlap;
use belfry_core::{RunId, Trigger};
use rusqlite::ToSql;

use super::{Done, Verb, run_id};

/// [`Overlap::is_queued`]: it is not running, and its trigger is not that of a catch-up.
const QUEUED: &str = "(state <> 2 and trigger <> 1)";

/// The condition with its parameters.
fn condition<'a>(overlap: &'a Overlap<'a>) -> (String, Vec<&'a dyn ToSql>) {
    if overlap.scope == Scope::Schedule {
        return ("schedule_id = ?".into(), vec![&overlap.schedule]);
    }
    let message = Trigger::Message.code();
    let mut condition =
        format!("schedule_id in (select id from schedules where agent_id = ?) and trigger <> {message}");
    let mut parameters: Vec<&dyn ToSql> = vec![&overlap.agent];
    if overlap.scope == Scope::Command {
        let _ = write!(condition, " and command = ?");
        parameters.push(&overlap.command);
    }
    (condition, parameters)
}

impl Verb<'_> {
    /// How many there are, and how many of these `max_pending` counts.
    pub(super) fn count_in_scope(&self, overlap: Overlap<'_>) -> Done<(u32, u32)> {
        let (condition, parameters) = condition(&overlap);
        let sql = format!("select count(*), count(*) filter (where {QUEUED}) from live where {condition}");
        let counts = self.row(sql, &*parameters, |row| Ok((row.get(0)?, row.get(1)?)))?;
        Ok(counts.unwrap_or((0, 0)))
    }

    /// Each of them in the order of their ids, and whether `max_pending` counts it.
    pub(super) fn runs_in_scope(&self, overlap: Overlap<'_>) -> Done<Vec<(RunId, bool)>> {
        let (condition, parameters) = condition(&overlap);
        let sql = format!("select id, {QUEUED} from live where {condition} order by id");
        self.rows(sql, &*parameters, |row| Ok((run_id(row.get(0)?), row.get(1)?)))
    }
}
