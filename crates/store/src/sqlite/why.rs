//! What became of ticks, and what schedules were.

use belfry_core::definition::read_stored;
use belfry_core::{ScheduleDefinition, ScheduleId, SkipRange};
use belfry_time::Timestamp;
use rusqlite::{Row, params};

use super::list::{ENDED, live_query, record};
use super::{Done, Verb, instant, json, maybe_id, micros, number};
use crate::error::Error;
use crate::unknown;
use crate::views::*;

/// A schedule, and those of its name that were removed before it was made.
const LIVES: &str =
    "select id from schedules where id <= ?1 and name = (select name from schedules where id = ?1)";

fn range(row: &Row<'_>) -> rusqlite::Result<SkipRange> {
    Ok(SkipRange {
        reason: unknown::skip_reason(number(row, "reason")?),
        from: instant(row, "from_tick")?,
        to: instant(row, "to_tick")?,
        count: number(row, "count")?,
    })
}

impl Verb<'_> {
    pub(super) fn skips(&self, id: ScheduleId, after: Option<Timestamp>, limit: u32) -> Done<Vec<SkipRange>> {
        self.rows(
            format!(
                "select reason, from_tick, to_tick, count from skips where schedule_id in ({LIVES}) and from_tick > ?2
                 order by from_tick, number limit ?3"
            ),
            params![id, after.map_or(i64::MIN, micros), limit],
            range,
        )
    }

    pub(super) fn tick(&self, id: ScheduleId, tick_at: Timestamp) -> Done<TickFate> {
        let lives: Vec<ScheduleId> =
            self.rows(format!("{LIVES} order by id desc"), [id], |row| row.get(0))?;
        for id in lives {
            if let Some(fate) = self.result(id, tick_at)? {
                return Ok(fate);
            }
        }
        let Some(compiled) = self.compiled_of(id)? else { return Ok(TickFate::Unknown) };
        let found = self.found(id)?;
        Ok(found.map_or(TickFate::Unknown, |found| TickFate::of_state(&found, &compiled, tick_at)))
    }

    /// The run or the complete range of a tick.
    fn result(&self, id: ScheduleId, tick_at: Timestamp) -> Done<Option<TickFate>> {
        let at = micros(tick_at);
        let live = self.row(live_query("l.schedule_id = ? and l.tick_at = ?"), params![id, at], record)?;
        if let Some(run) = live {
            return Ok(Some(TickFate::Run(Box::new(run))));
        }
        // Along the chains, which are in the order of ends: a run that ended a day before the tick was not made by it, unless
        // the clock was set back further. A tick that was filled in later may have several: the last one made.
        let ended = self.row(
            "with recursive chain (id, previous, tick_at, finished_at) as (
               select h.id, h.previous, h.tick_at, h.finished_at from schedule_state st join history h on h.id in (st.last_failed, st.last_other)
                 where st.schedule_id = ?1
               union
               select h.id, h.previous, h.tick_at, h.finished_at from chain c join history h on h.id = c.previous
                 where h.schedule_id = ?1 and c.finished_at >= ?2 - 86400000000)
             select id from chain where tick_at = ?2 order by id desc limit 1",
            params![id, at],
            |row| maybe_id(row, 0),
        )?;
        if let Some(Some(run)) = ended
            && let Some(run) = self.row(format!("{ENDED} where h.id = ?"), [run], record)?
        {
            return Ok(Some(TickFate::Run(Box::new(run))));
        }
        let skipped = self.row(
            "select * from (select * from skips where schedule_id = ?1 and from_tick <= ?2 order by from_tick desc, number desc limit ?3)
             where to_tick >= ?2 order by from_tick desc, number desc limit 1",
            params![id, at, RANGES_MAX],
            range,
        )?;
        Ok(skipped.map(TickFate::Skipped))
    }

    pub(super) fn revision_at(
        &self,
        id: ScheduleId,
        at: Timestamp,
    ) -> Done<Option<(i64, ScheduleDefinition)>> {
        let found = self.row(
            "select revision, definition, format from schedule_revisions where schedule_id = ? and from_at <= ? order by revision desc limit 1",
            params![id, micros(at)],
            |row| Ok((row.get(0)?, json(row, 1)?, number(row, 2)?)),
        )?;
        let read = |(revision, text, format): (i64, String, i32)| {
            let definition = read_stored(format, &text);
            Ok((revision, definition.map_err(|why| Error::unexpected(format!("a schedule: {why}")))?))
        };
        found.map(read).transpose()
    }
}
