//! Reading, and removing what is old.

use belfry_core::breaker::Transition;
use belfry_core::{AgentId, RunId, ScheduleId, SkipRange, Token, TokenKind};
use belfry_time::Timestamp;
use uuid::Uuid;

use super::connection::{Fault, Tx};
use super::plan::schedule_definition;
use super::rows::{self, Live, get, live_columns, small};
use super::{Postgres, books, set_tokens};
use crate::sabotage::Sabotage;
use crate::shapes::*;

pub(super) async fn run(tx: &mut Tx<'_>, run: RunId) -> Result<Option<RunRecord>, Fault> {
    let sql = concat!(
        "select ",
        live_columns!(),
        " from live l join queues q on q.id = l.queue_id where l.id = $1"
    );
    // It may end between the two looks, but never come back.
    if let Some(row) = tx.query(sql, &[&run.0]).await?.first() {
        return Ok(Some(Live::read(row)?.record()));
    }
    tx.query("select * from history where id = $1", &[&run.0]).await?.first().map(rows::ended).transpose()
}

pub(super) async fn live_runs(tx: &mut Tx<'_>) -> Result<Vec<RunRecord>, Fault> {
    let sql = concat!(
        "select ",
        live_columns!(),
        " from live l join queues q on q.id = l.queue_id order by l.rank, l.not_before, l.id"
    );
    let found = tx.query(sql, &[]).await?;
    found.iter().map(|row| Ok(Live::read(row)?.record())).collect()
}

/// Walks the two chains of a schedule's runs from their heads, as far as history goes back.
pub(super) async fn ended_runs(
    tx: &mut Tx<'_>,
    schedule: ScheduleId,
    limit: u32,
) -> Result<Vec<RunRecord>, Fault> {
    let sql = "with recursive heads as ( \
                   select h.run from schedule_state s cross join lateral \
                   (values (s.last_failed), (s.last_other)) as h (run) where s.schedule_id = $1 \
               ), chain (id, prev_run, depth) as ( \
                   select h.id, h.prev_run, 1::bigint from heads join history h on h.id = heads.run \
                   union all \
                   select h.id, h.prev_run, c.depth + 1 from chain c join history h on h.id = c.prev_run \
                   where c.depth < $2::bigint \
               ) select h.* from chain c join history h on h.id = c.id order by h.seq desc limit $2::bigint";
    let found = tx.query(sql, &[&schedule, &i64::from(limit)]).await?;
    found.iter().map(rows::ended).collect()
}

pub(super) async fn schedule(tx: &mut Tx<'_>, name: &str) -> Result<Option<ScheduleRecord>, Fault> {
    let sql = "select c.id, c.agent_id, c.name, c.definition, c.revision, c.source, s.*, \
               t.kind, t.tick_at as token_tick_at, t.due_at \
               from schedules c join schedule_state s on s.schedule_id = c.id \
               left join timers t on t.schedule_id = c.id where c.name = $1 and c.retired_at is null";
    let found = tx.query(sql, &[&name]).await?;
    let Some(row) = found.first() else { return Ok(None) };
    let last_run: Option<Uuid> = get(row, "last_run")?;
    let last = match last_run {
        None => None,
        Some(run) => Some(LastRun {
            run: RunId(run),
            state: rows::run_state(get(row, "last_state")?)?,
            tick_at: get(row, "last_tick_at")?,
            finished_at: get(row, "last_finished_at")?,
        }),
    };
    let success: Option<Timestamp> = get(row, "last_success_at")?;
    Ok(Some(ScheduleRecord {
        id: get(row, "id")?,
        agent: get(row, "agent_id")?,
        name: get(row, "name")?,
        definition: schedule_definition(get(row, "definition")?)?,
        revision: get(row, "revision")?,
        source: get(row, "source")?,
        status: rows::status(row)?,
        status_since: get(row, "status_since")?,
        token: rows::token(row)?,
        waits_for: get::<Option<Uuid>>(row, "waits_for")?.map(RunId),
        origin: get(row, "origin")?,
        open_skip: rows::open_skip(row)?,
        last,
        last_success: success.zip(get::<Option<Uuid>>(row, "last_success_run")?.map(RunId)),
        last_error: get(row, "last_error")?,
        streak: get(row, "streak")?,
    }))
}

pub(super) async fn skips(tx: &mut Tx<'_>, schedule: ScheduleId) -> Result<Vec<SkipRange>, Fault> {
    let sql = "select reason, from_at, to_at, count from skips where schedule_id = $1 order by id";
    let range = |row: &tokio_postgres::Row| {
        Ok(SkipRange {
            reason: rows::skip_reason(get(row, "reason")?)?,
            from: get(row, "from_at")?,
            to: get(row, "to_at")?,
            count: get::<i64>(row, "count")?.unsigned_abs(),
        })
    };
    tx.query(sql, &[&schedule]).await?.iter().map(range).collect()
}

pub(super) async fn breaker(tx: &mut Tx<'_>, agent: AgentId, command: &str) -> Result<BreakerRecord, Fault> {
    let sql = "select * from breakers where agent_id = $1 and command = $2";
    let found = tx.query(sql, &[&agent, &command]).await?;
    let breaker = found.first().map(books::breaker).transpose()?.unwrap_or_default();
    let sql = "select * from breaker_log where agent_id = $1 and command = $2 order by id";
    let transition = |row: &tokio_postgres::Row| {
        Ok(Transition {
            at: get(row, "at")?,
            from: rows::breaker_state(get(row, "from_state")?)?,
            to: rows::breaker_state(get(row, "to_state")?)?,
            failures: small(get(row, "failures")?),
            reason: rows::transition_reason(get(row, "reason")?)?,
            run: get::<Option<Uuid>>(row, "run_id")?.map(RunId),
        })
    };
    let log = tx.query(sql, &[&agent, &command]).await?;
    Ok(BreakerRecord { breaker, history: log.iter().map(transition).collect::<Result<_, Fault>>()? })
}

pub(super) async fn counts(tx: &mut Tx<'_>) -> Result<Counts, Fault> {
    let sql = "select (select count(*) from live where state <> 2) as pending, \
               (select count(*) from live where state = 2) as running, \
               (select count(*) from history) as ended";
    let found = tx.query(sql, &[]).await?;
    let Some(row) = found.first() else { return Ok(Counts::default()) };
    let number = |column| Ok::<u64, Fault>(get::<i64>(row, column)?.unsigned_abs());
    Ok(Counts { pending: number("pending")?, running: number("running")?, ended: number("ended")? })
}

impl Postgres {
    pub(super) async fn prune_in(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        retention: &Retention,
    ) -> Result<Pruned, Fault> {
        let batch = i64::from(retention.batch);
        let sql = "delete from history where id = any(array( \
                       select o.id from ( \
                           (select id, finished_at, seq from history where not failed and finished_at < $1 \
                            order by finished_at, seq limit $3) \
                           union all \
                           (select id, finished_at, seq from history where failed and finished_at < $2 \
                            order by finished_at, seq limit $3) \
                       ) o order by o.finished_at, o.seq limit $3)) returning schedule_id, tick_at";
        let runs = tx.query(sql, &[&retention.runs_before, &retention.failures_before, &batch]).await?;
        if self.sabotage.is(Sabotage::PruneArms) {
            for row in &runs {
                if let Some(tick_at) = get::<Option<Timestamp>>(row, "tick_at")? {
                    let token = Token { kind: TokenKind::Tick, tick_at, due_at: tick_at };
                    set_tokens(tx, &[(get(row, "schedule_id")?, token)]).await?;
                }
            }
        }
        let sql = "delete from skips where id = any(array( \
                       select id from skips where to_at < $1 order by to_at, id limit $2))";
        let skips = tx.execute(sql, &[&retention.skips_before, &batch]).await?;
        let keys = tx.execute("delete from idempotency where expires_at <= $1", &[&now]).await?;
        Ok(Pruned { runs: runs.len() as u32, skips: skips as u32, keys: keys as u32 })
    }
}

/// Fewer dead rows than this are no hindrance.
const DEAD_MIN: i64 = 1_000;

pub(super) async fn tend(tx: &mut Tx<'_>) -> Result<(), Fault> {
    let sql = "select relname::text as name from pg_stat_user_tables where schemaname = 'belfry' \
               and relname in ('timers', 'live') and n_dead_tup >= $1";
    for row in tx.query(sql, &[&DEAD_MIN]).await? {
        // The entries in the indexes are what is in the way. What somebody else is at is left to them.
        let sql = match get::<&str>(&row, "name")? {
            "timers" => "vacuum (skip_locked, index_cleanup on, truncate off) timers",
            _ => "vacuum (skip_locked, index_cleanup on, truncate off) live",
        };
        tx.execute(sql, &[]).await?;
    }
    Ok(())
}

/// Promises that rows must keep, each as a query that gives a sentence for every one that is broken.
const PROMISES: &[&str] = &[
    // Lowering a limit stops nobody: those that started before do not count.
    "select format('gate %s lets %s run and %s are running', g.id, g.cap, g.running) from ( \
         select g.id, g.cap, (select count(*) from live r where r.state = 2 and \
             (r.agent_gate = g.id or r.turn_gate = g.id) and (g.cap_at is null or r.started_at > g.cap_at)) as running \
         from gates g where g.cap is not null \
     ) g where g.running > g.cap",
    "select format('run %s is parked behind gate %s, which has room for %s and nobody ready', p.id, g.id, g.room) \
     from ( \
         select g.id, coalesce(g.cap, 2147483647) \
             - (select count(*) from live r where r.state = 2 and r.agent_gate = g.id) \
             - (select count(*) from live r where r.state = 2 and r.turn_gate = g.id) as room from gates g \
     ) g join live p on p.state = 1 and p.parked_on = g.id \
     where g.room > (select count(*) from live w where w.state = 0 and w.queue_id = p.queue_id \
         and (w.agent_gate = g.id or w.turn_gate = g.id))",
    "select format('run %s is parked behind nothing of its own', id) from live \
     where state = 1 and parked_on is distinct from agent_gate and parked_on is distinct from turn_gate",
    "select format('run %s is not parked, but behind gate %s', id, parked_on) from live \
     where state <> 1 and parked_on is not null",
    "select format('run %s is running under no node that may', l.id) from live l \
     where l.state = 2 and not exists (select 1 from nodes n where n.id = l.node_id and not n.fenced)",
    "select format('run %s waits, but under a node', id) from live where state <> 2 and node_id is not null",
    "select format('run %s lives and has ended', l.id) from live l join history h on h.id = l.id",
    "select format('schedule %s has %s tokens', schedule_id, count(*)) from timers \
     group by schedule_id having count(*) > 1",
    "select format('schedule %s waits for run %s, which does not live', schedule_id, waits_for) \
     from schedule_state s where waits_for is not null and not exists (select 1 from live l where l.id = s.waits_for)",
    "select format('schedule %s is armed, but not active', s.schedule_id) from schedule_state s \
     join timers t on t.schedule_id = s.schedule_id where s.retired or s.status <> 0",
    "select format('schedule %s is armed, and waits for a run', s.schedule_id) from schedule_state s \
     join timers t on t.schedule_id = s.schedule_id where s.waits_for is not null",
    "select format('schedule %s has no state', c.id) from schedules c \
     where not exists (select 1 from schedule_state s where s.schedule_id = c.id)",
    "select format('the token of schedule %s belongs to nobody', t.schedule_id) from timers t \
     where not exists (select 1 from schedules c where c.id = t.schedule_id)",
    "select format('run %s has no queue', l.id) from live l where not exists \
     (select 1 from queues q where q.id = l.queue_id and q.gated = (coalesce(l.agent_gate, l.turn_gate) is not null))",
];

pub(super) async fn integrity(tx: &mut Tx<'_>) -> Result<Vec<String>, Fault> {
    let mut broken = Vec::new();
    for promise in PROMISES {
        for row in tx.query(promise, &[]).await? {
            broken.push(row.try_get::<_, String>(0)?);
        }
    }
    Ok(broken)
}
