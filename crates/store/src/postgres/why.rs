//! What became of ticks, and what schedules were.

use belfry_core::definition::read_stored;
use belfry_core::{ScheduleDefinition, ScheduleId, SkipRange};
use belfry_time::Timestamp;
use tokio_postgres::Row;

use super::connection::{Fault, Tx};
use super::list::{ended_query, live_query};
use super::pause::found;
use super::plan::cold_of;
use super::rows::{self, Live, get};
use crate::Error;
use crate::unknown;
use crate::views::*;

/// A schedule, and those of its name that were removed before it was made.
macro_rules! lives {
    () => {
        "select id from schedules where id <= $1 and name = (select name from schedules where id = $1)"
    };
}

fn range(row: &Row) -> Result<SkipRange, Fault> {
    Ok(SkipRange {
        reason: unknown::skip_reason(get(row, "reason")?),
        from: get(row, "from_at")?,
        to: get(row, "to_at")?,
        count: get::<i64>(row, "count")?.unsigned_abs(),
    })
}

pub(super) async fn skips(
    tx: &mut Tx<'_>,
    id: ScheduleId,
    after: Option<Timestamp>,
    limit: u32,
) -> Result<Vec<SkipRange>, Fault> {
    let sql = concat!(
        "select reason, from_at, to_at, count from skips where schedule_id in (",
        lives!(),
        ") and from_at > coalesce($2::timestamptz, '-infinity') order by from_at, id limit $3"
    );
    tx.query(sql, &[&id, &after, &i64::from(limit)]).await?.iter().map(range).collect()
}

/// The last first.
async fn lives(tx: &mut Tx<'_>, id: ScheduleId) -> Result<Vec<ScheduleId>, Fault> {
    let sql = concat!(lives!(), " order by id desc");
    tx.query(sql, &[&id]).await?.iter().map(|row| get(row, "id")).collect()
}

pub(super) async fn tick(tx: &mut Tx<'_>, id: ScheduleId, tick_at: Timestamp) -> Result<TickFate, Fault> {
    for id in lives(tx, id).await? {
        if let Some(fate) = result(tx, id, tick_at).await? {
            return Ok(fate);
        }
    }
    let sql = "select s.*, t.kind, t.tick_at as token_tick_at, t.due_at, c.name, c.definition, c.format \
               from schedule_state s join schedules c on c.id = s.schedule_id \
               left join timers t on t.schedule_id = s.schedule_id where s.schedule_id = $1 and not s.retired";
    let rows = tx.query(sql, &[&id]).await?;
    let Some(row) = rows.first() else { return Ok(TickFate::Unknown) };
    let cold = cold_of(get(row, "name")?, get(row, "format")?, get(row, "definition")?);
    Ok(TickFate::of_state(&found(row, rows::token(row)?)?, &cold.compiled, tick_at))
}

/// The run or the complete range of a tick. A run may end between two looks, but never come back: what lives is looked at
/// first.
async fn result(tx: &mut Tx<'_>, id: ScheduleId, tick_at: Timestamp) -> Result<Option<TickFate>, Fault> {
    let sql = concat!(live_query!(), " where l.schedule_id = $1 and l.tick_at = $2");
    if let Some(row) = tx.query(sql, &[&id, &tick_at]).await?.first() {
        return Ok(Some(TickFate::Run(Box::new(Live::record(row)?))));
    }
    // Along the chains, which are in the order of ends: a run that ended a day before the tick was not made by it, unless the
    // clock was set back further. A tick that was filled in later may have several: the last one made.
    let sql = concat!(
        "with recursive chain (id, prev_run, tick_at, finished_at) as ( \
             select h.id, h.prev_run, h.tick_at, h.finished_at from schedule_state s cross join lateral \
             (values (s.last_failed), (s.last_other)) as t (run) join history h on h.id = t.run \
             where s.schedule_id = $1 \
             union \
             select h.id, h.prev_run, h.tick_at, h.finished_at from chain c join history h on h.id = c.prev_run \
             where h.schedule_id = $1 and c.finished_at >= $2::timestamptz - interval '1 day' \
         ) ",
        ended_query!("history"),
        " where h.id = (select id from chain where tick_at = $2 order by id desc limit 1)"
    );
    if let Some(row) = tx.query(sql, &[&id, &tick_at]).await?.first() {
        return Ok(Some(TickFate::Run(Box::new(rows::ended(row)?))));
    }
    let sql = "select * from (select * from skips where schedule_id = $1 and from_at <= $2 \
               order by from_at desc, id desc limit $3) k where to_at >= $2 order by from_at desc, id desc limit 1";
    let skipped = tx.query(sql, &[&id, &tick_at, &RANGES_MAX]).await?;
    skipped.first().map(|row| Ok(TickFate::Skipped(range(row)?))).transpose()
}

pub(super) async fn revision_at(
    tx: &mut Tx<'_>,
    id: ScheduleId,
    at: Timestamp,
) -> Result<Option<(i64, ScheduleDefinition)>, Fault> {
    let sql = "select revision, definition, format from schedule_revisions \
               where schedule_id = $1 and from_at <= $2 order by revision desc limit 1";
    let found = tx.query(sql, &[&id, &at]).await?;
    let revision = |row: &Row| {
        let definition = read_stored(get(row, "format")?, get(row, "definition")?);
        Ok((
            get(row, "revision")?,
            definition.map_err(|why| Error::unexpected(format!("a schedule: {why}")))?,
        ))
    };
    found.first().map(revision).transpose()
}
