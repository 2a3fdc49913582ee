//! Pausing and resuming, by hand and by the clock.

use belfry_core::check::Status;
use belfry_core::{ScheduleDefinition, ScheduleId, SkipRange, Token};
use belfry_time::Timestamp;

use super::connection::{Fault, Tx};
use super::defer::give_up;
use super::plan::{schedule_definition, take_token};
use super::rows::{self, get};
use super::source::{Compiled, close_open_skip, lock_state, set_status};
use super::{clear_token, insert_skips, set_token};
use crate::Error;
use crate::memory::{compile, resumed, standing_of};
use crate::shapes::*;

/// Where a schedule stands that is not retired, without locking it.
async fn status_of(tx: &mut Tx<'_>, id: ScheduleId) -> Result<Option<Status>, Fault> {
    let sql = "select * from schedule_state where schedule_id = $1 and not retired";
    tx.query(sql, &[&id]).await?.first().map(rows::status).transpose()
}

pub(super) async fn pause(
    tx: &mut Tx<'_>,
    now: Timestamp,
    id: ScheduleId,
    reason: Option<&str>,
    until: Option<Timestamp>,
) -> Result<bool, Fault> {
    let paused = Status::Paused { reason: reason.map(str::to_owned), until };
    let may = |status: &Status| match status {
        Status::Active => true,
        Status::Paused { .. } => *status != paused,
        _ => false,
    };
    if !status_of(tx, id).await?.is_some_and(|status| may(&status)) {
        return Ok(false);
    }
    // The token first, in the order of locks.
    clear_token(tx, id).await?;
    let locked = lock_state(tx, id).await?.filter(|locked| may(&locked.status));
    let locked = locked.ok_or(Fault::Again)?;
    let since = if locked.status == Status::Active { now } else { locked.since };
    close_open_skip(tx, id, &locked).await?;
    give_up(tx, now, &[id]).await?;
    set_status(tx, id, &paused, since).await?;
    // The end of a run may have armed it before we had its state, or room in its lane.
    set_token(tx, id, until.map(|until| Token::resume(since, until))).await?;
    Ok(true)
}

pub(super) async fn resume(
    tx: &mut Tx<'_>,
    now: Timestamp,
    id: ScheduleId,
    catch_up: bool,
    skipped: Option<SkipRange>,
) -> Result<bool, Fault> {
    let is_paused = |status: &Status| matches!(status, Status::Paused { .. });
    if !status_of(tx, id).await?.is_some_and(|status| is_paused(&status)) {
        return Ok(false);
    }
    // The token that would end the pause, in the order of locks.
    clear_token(tx, id).await?;
    let locked = lock_state(tx, id).await?.filter(|locked| is_paused(&locked.status));
    let locked = locked.ok_or(Fault::Again)?;
    let (definition, compiled) = definition_of(tx, id).await?;
    let from = if catch_up { locked.since } else { now };
    let (status, token) = standing_of(&definition, &compiled, Token::next(from));
    let skipped: Vec<_> = skipped.filter(|_| !catch_up).map(|range| (id, range)).into_iter().collect();
    insert_skips(tx, &skipped).await?;
    set_status(tx, id, &status, now).await?;
    set_token(tx, id, token.filter(|_| !locked.waits)).await?;
    Ok(true)
}

/// The end of a pause has come: as if it had been resumed at that instant.
pub(super) async fn commit_resume(tx: &mut Tx<'_>, commit: &Commit) -> Result<Committed, Fault> {
    let id = commit.schedule;
    if !take_token(tx, commit).await? {
        return Ok(Committed::Lost);
    }
    // Whoever ends a pause has its token.
    let locked = lock_state(tx, id).await?.filter(|locked| matches!(locked.status, Status::Paused { .. }));
    let locked = locked.ok_or(Fault::Again)?;
    let (definition, compiled) = definition_of(tx, id).await?;
    let closed: Vec<_> = commit.closed.iter().map(|range| (id, *range)).collect();
    insert_skips(tx, &closed).await?;
    let sql = "update schedule_state set origin = coalesce($2, origin) where schedule_id = $1";
    tx.execute(sql, &[&id, &commit.origin]).await?;
    let (status, token) = resumed(&definition, &compiled, commit);
    set_status(tx, id, &status, commit.token.due_at).await?;
    set_token(tx, id, token.filter(|_| !locked.waits)).await?;
    Ok(Committed::Held)
}

async fn definition_of(tx: &mut Tx<'_>, id: ScheduleId) -> Result<(ScheduleDefinition, Compiled), Fault> {
    let found = tx.query("select name, definition from schedules where id = $1", &[&id]).await?;
    let row = found.first().ok_or_else(|| Error::unexpected("a schedule without a definition"))?;
    let definition = schedule_definition(get(row, "definition")?)?;
    let compiled = compile(&definition, get(row, "name")?);
    Ok((definition, compiled))
}
