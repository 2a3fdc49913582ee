//! Pausing and resuming, by hand and by the clock.

use std::collections::HashMap;

use belfry_core::check::Status;
use belfry_core::edit::{self, Change, Found, Resume};
use belfry_core::{ScheduleDefinition, ScheduleId, Token};
use belfry_time::Timestamp;
use uuid::Uuid;

use super::connection::{Fault, Tx};
use super::plan::{schedule_definition, take_token};
use super::rows::{self, get, status_columns};
use super::{clear_tokens, insert_skips, set_token};
use crate::Error;
use crate::memory::{Compiled, compile, compiled};
use crate::shapes::*;

pub(super) async fn pause(
    tx: &mut Tx<'_>,
    now: Timestamp,
    id: ScheduleId,
    reason: Option<&str>,
    until: Option<Timestamp>,
) -> Result<bool, Fault> {
    let paused = Status::Paused { reason: reason.map(str::to_owned), until };
    let Some((found, _, schedule)) = look(tx, id).await? else { return Ok(false) };
    let pause = |found: &Found| edit::pause(found, compiled(&schedule), paused.clone(), now);
    if pause(&found).is_none() {
        return Ok(false);
    }
    let change = take(tx, id).await?.and_then(|found| pause(&found)).ok_or(Fault::Again)?;
    write(tx, id, &change).await?;
    Ok(true)
}

pub(super) async fn resume(
    tx: &mut Tx<'_>,
    now: Timestamp,
    id: ScheduleId,
    how: Resume,
) -> Result<Option<u64>, Fault> {
    let Some((found, definition, schedule)) = look(tx, id).await? else { return Ok(None) };
    let resume = |found: &Found| edit::resume(found, &definition, compiled(&schedule), how, now);
    if resume(&found).is_none() {
        return Ok(None);
    }
    let change = take(tx, id).await?.and_then(|found| resume(&found)).ok_or(Fault::Again)?;
    write(tx, id, &change).await?;
    Ok(Some(change.skipped()))
}

/// The end of a pause has come: as if it had been resumed at that instant.
pub(super) async fn commit_resume(tx: &mut Tx<'_>, commit: &Commit) -> Result<Committed, Fault> {
    let id = commit.schedule;
    if !take_token(tx, commit).await? {
        return Ok(Committed::Lost);
    }
    // Its timer is ours, and with that its status.
    let sql = "select * from schedule_state where schedule_id = $1 and status = 1 and not retired for no key update";
    let rows = tx.query(sql, &[&id]).await?;
    let found = found(rows.first().ok_or(Fault::Again)?, None)?;
    // The run that it waited for has ended meanwhile, and with that there may be ticks in the pause.
    if found.waits != commit.waits {
        return Ok(Committed::Lost);
    }
    let (definition, schedule) = definition_of(tx, id).await?;
    let closed: Vec<_> = commit.closed.iter().map(|range| (id, *range)).collect();
    insert_skips(tx, &closed).await?;
    let found = Found { origin: commit.origin.or(found.origin), ..found };
    let (planned, until) = (commit.next.token(), commit.token.due_at);
    let change = edit::pause_ended(&found, &definition, compiled(&schedule), planned, until);
    write(tx, id, &change).await?;
    Ok(Committed::Held)
}

/// A schedule that is not retired as an edit would find it, and what it is, without locking anything.
async fn look(
    tx: &mut Tx<'_>,
    id: ScheduleId,
) -> Result<Option<(Found, ScheduleDefinition, Compiled)>, Fault> {
    let sql = "select s.*, t.kind, t.tick_at as token_tick_at, t.due_at, d.tick_at as deferred_tick_at \
               from schedule_state s left join timers t on t.schedule_id = s.schedule_id \
               left join deferred d on d.schedule_id = s.schedule_id where s.schedule_id = $1 and not s.retired";
    let rows = tx.query(sql, &[&id]).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    let found = Found { deferred: get(row, "deferred_tick_at")?, ..found(row, rows::token(row)?)? };
    let (definition, compiled) = definition_of(tx, id).await?;
    Ok(Some((found, definition, compiled)))
}

/// Takes a schedule that is not retired as an edit finds it: see [`take_all`].
pub(super) async fn take(tx: &mut Tx<'_>, id: ScheduleId) -> Result<Option<Found>, Fault> {
    Ok(take_all(tx, &[id]).await?.remove(&id))
}

/// Takes schedules that are not retired as an edit finds them: their timers and deferred ticks are gone, their states
/// are locked. Timers come first in the order of locks; the end of a run may arm a schedule until its state is ours, and
/// room in a lane until its deferred tick is.
pub(super) async fn take_all(
    tx: &mut Tx<'_>,
    ids: &[ScheduleId],
) -> Result<HashMap<ScheduleId, Found>, Fault> {
    let mut timers = clear_tokens(tx, ids).await?;
    let sql = "select * from schedule_state where schedule_id = any($1) and not retired \
               order by schedule_id for no key update";
    let states = tx.query(sql, &[&ids]).await?;
    let mut deferred = HashMap::new();
    let sql = "delete from deferred where schedule_id = any($1) returning schedule_id, tick_at, lane";
    for row in tx.query(sql, &[&ids]).await? {
        tx.makes_room(get(&row, "lane")?);
        deferred.insert(get::<ScheduleId>(&row, "schedule_id")?, get::<Timestamp>(&row, "tick_at")?);
    }
    timers.extend(clear_tokens(tx, ids).await?);
    let mut all = HashMap::with_capacity(ids.len());
    for row in &states {
        let id: ScheduleId = get(row, "schedule_id")?;
        let found = found(row, timers.remove(&id))?;
        all.insert(id, Found { deferred: deferred.remove(&id), ..found });
    }
    Ok(all)
}

/// A schedule's state as an edit finds it.
pub(super) fn found(row: &tokio_postgres::Row, timer: Option<Token>) -> Result<Found, Fault> {
    Ok(Found {
        status: rows::status(row)?,
        since: get(row, "status_since")?,
        timer,
        deferred: None,
        waits: get::<Option<Uuid>>(row, "waits_for")?.is_some(),
        origin: get(row, "origin")?,
        open_skip: rows::open_skip(row)?,
        cursor_at: get(row, "cursor_at")?,
        planned_at: get(row, "planned_at")?,
    })
}

/// Writes what an edit has decided, but for a new revision.
pub(super) async fn write(tx: &mut Tx<'_>, id: ScheduleId, change: &Change) -> Result<(), Fault> {
    let closed: Vec<_> = change.closed.iter().map(|range| (id, *range)).collect();
    insert_skips(tx, &closed).await?;
    let (code, reason, until) = status_columns(&change.status);
    let sql = "update schedule_state set status = $2, status_reason = $3, status_until = $4, status_since = $5, \
               origin = $6, cursor_at = $7, planned_at = $9, waits_for = case when $8 then waits_for end, \
               skip_reason = null, skip_from = null, skip_to = null, skip_count = null where schedule_id = $1";
    let Change { since, origin, cursor_at, planned_at, waits, .. } = change;
    tx.execute(sql, &[&id, &code, &reason, &until, since, origin, cursor_at, waits, planned_at]).await?;
    set_token(tx, id, change.timer).await
}

async fn definition_of(tx: &mut Tx<'_>, id: ScheduleId) -> Result<(ScheduleDefinition, Compiled), Fault> {
    let found = tx.query("select name, definition from schedules where id = $1", &[&id]).await?;
    let row = found.first().ok_or_else(|| Error::unexpected("a schedule without a definition"))?;
    let definition = schedule_definition(get(row, "definition")?)?;
    let compiled = compile(&definition, get(row, "name")?);
    Ok((definition, compiled))
}
