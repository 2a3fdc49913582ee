//! What the store refuses to keep, and whether it takes writes at all.

use belfry_core::{RunId, ScheduleId};
use belfry_time::Timestamp;
use uuid::Uuid;

use super::connection::{Fault, Tx};
use super::rows::get;
use crate::error::Error;
use crate::views::{REFUSAL_LASTS, Refusal, RefusedPart};

pub(super) async fn note(
    tx: &mut Tx<'_>,
    now: Timestamp,
    part: RefusedPart,
    reason: &str,
) -> Result<(), Fault> {
    // A plan has the nil id in the place of a run.
    let (schedule, run) = match part {
        RefusedPart::Plan(schedule) | RefusedPart::LockedPlan(schedule) => (schedule, Uuid::nil()),
        RefusedPart::End(run) => {
            let found = tx.query("select schedule_id from live where id = $1", &[&run.0]).await?;
            let Some(row) = found.first() else { return Ok(()) };
            (get(row, "schedule_id")?, run.0)
        }
    };
    let fresh = now.saturating_sub(REFUSAL_LASTS).unwrap_or(now);
    tx.execute("delete from refusals where last_at < $1", &[&fresh]).await?;
    let sql = "insert into refusals (schedule_id, run_id, since, last_at, reason) values ($1, $2, $3, $3, $4) \
               on conflict (schedule_id, run_id) do update set last_at = excluded.last_at, reason = excluded.reason";
    tx.execute(sql, &[&schedule, &run, &now, &reason]).await?;
    Ok(())
}

/// Plans of these schedules were stored.
pub(super) async fn forget(tx: &mut Tx<'_>, schedules: &[ScheduleId]) -> Result<(), Fault> {
    let sql = "delete from refusals where schedule_id = any($1) and run_id = $2";
    tx.execute(sql, &[&schedules, &Uuid::nil()]).await?;
    Ok(())
}

/// Those that still hold: the timer of the plan has not moved, the run lives.
pub(super) async fn list(tx: &mut Tx<'_>) -> Result<Vec<Refusal>, Fault> {
    let sql = "select f.schedule_id, f.run_id, f.since, f.reason, c.name from refusals f \
               join schedules c on c.id = f.schedule_id \
               where exists (select 1 from live l where l.id = f.run_id and l.state = 2) \
                  or f.run_id = '00000000-0000-0000-0000-000000000000' and c.retired_at is null \
                     and exists (select 1 from timers t where t.schedule_id = f.schedule_id and t.due_at <= f.last_at) \
               order by f.since, f.schedule_id limit 1000";
    let refusal = |row: &tokio_postgres::Row| -> Result<Refusal, Fault> {
        let run: Uuid = get(row, "run_id")?;
        Ok(Refusal {
            schedule: get(row, "schedule_id")?,
            name: get(row, "name")?,
            run: (!run.is_nil()).then_some(RunId(run)),
            since: get(row, "since")?,
            reason: get(row, "reason")?,
        })
    };
    tx.query(sql, &[]).await?.iter().map(refusal).collect()
}

/// The tables, without the one that is written to as a trial and those that no crash keeps.
macro_rules! tables {
    () => {
        "sources, agents, schedules, spent, schedule_revisions, schedule_state, timers, queues, gates, scopes, live, \
         history, output, skips, nodes, breakers, breaker_log, budgets, idempotency, sessions, session_runs, lanes, \
         deferred, tokens, audit, snapshots, refusals"
    };
}

/// Writes a row, and looks whether the tables are there, may be written to, and are held by nobody as a whole.
pub(super) async fn probe(tx: &mut Tx<'_>) -> Result<(), Fault> {
    let sql = "select name from unnest(string_to_array($1, ', ')) as t (name) where to_regclass(name) is null \
               or not has_table_privilege(name, 'insert') or not has_table_privilege(name, 'update') \
               or not has_table_privilege(name, 'select') limit 1";
    if let Some(row) = tx.query(sql, &[&tables!()]).await?.first() {
        let detail = format!("the table {} is gone, or must not be written to", get::<&str>(row, "name")?);
        return Err(Error::Unavailable { detail, ambiguous: false }.into());
    }
    // Taken for a moment only, and by any number at once.
    tx.execute(concat!("lock table ", tables!(), " in row exclusive mode"), &[]).await?;
    let sql = "insert into probes (id, at) values (1, now()) on conflict (id) do update set at = excluded.at";
    tx.execute(sql, &[]).await?;
    Ok(())
}
