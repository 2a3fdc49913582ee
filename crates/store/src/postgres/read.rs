//! Reading, and removing what is old.

use std::collections::HashMap;

use belfry_core::breaker::Transition;
use belfry_core::{AgentId, RunId, ScheduleId, Token, TokenKind};
use belfry_time::Timestamp;
use uuid::Uuid;

use super::connection::{Fault, Param, Tx};
use super::defer::look_again;
use super::list::{chain, ended_list, ended_query, live_list, live_query};
use super::rows::{self, Live, get, small};
use super::{Postgres, books, set_tokens};
use crate::sabotage::Sabotage;
use crate::shapes::*;
use crate::stats::Stats;

pub(super) async fn clock(tx: &mut Tx<'_>) -> Result<Timestamp, Fault> {
    let rows = tx.query("select clock_timestamp() as now", &[]).await?;
    rows.first().map_or(Ok(Timestamp::UNIX_EPOCH), |row| get(row, "now"))
}

pub(super) async fn stats(tx: &mut Tx<'_>) -> Result<Stats, Fault> {
    let sql = "select (select max(version) from belfry.migrations) as version, pg_database_size(current_database()) as bytes";
    let rows = tx.query(sql, &[]).await?;
    let Some(row) = rows.first() else { return Ok(Stats::default()) };
    let bytes: i64 = get(row, "bytes")?;
    Ok(Stats { schema_version: get(row, "version")?, bytes: u64::try_from(bytes).ok(), log_bytes: None })
}

pub(super) async fn disturb(tx: &mut Tx<'_>) -> Result<(), Fault> {
    let sql = "select count(pg_terminate_backend(pid)) from pg_stat_activity
               where datname = current_database() and pid <> pg_backend_pid()";
    tx.query(sql, &[]).await.map(drop)
}

pub(super) async fn run(tx: &mut Tx<'_>, run: RunId) -> Result<Option<RunRecord>, Fault> {
    let sql = concat!(live_query!(), " where l.id = $1");
    // It may end between the two looks, but never come back.
    if let Some(row) = tx.query(sql, &[&run.0]).await?.first() {
        return Ok(Some(Live::record(row)?));
    }
    let sql = concat!(ended_query!("history"), " where h.id = $1");
    tx.query(sql, &[&run.0]).await?.first().map(rows::ended).transpose()
}

/// Those of these runs that are there, in the order asked for, as lists show them.
pub(super) async fn runs_by_id(tx: &mut Tx<'_>, runs: &[RunId]) -> Result<Vec<RunRecord>, Fault> {
    let ids: Vec<Uuid> = runs.iter().map(|run| run.0).collect();
    let live = tx.query(concat!(live_list!(), " where l.id = any($1)"), &[&ids]).await?;
    // It may end between the two looks, but never come back.
    let ended = match live.len() < runs.len() {
        true => tx.query(concat!(ended_list!("history"), " where h.id = any($1)"), &[&ids]).await?,
        false => Vec::new(),
    };
    let records = live.iter().map(Live::record).chain(ended.iter().map(rows::ended));
    let mut found: HashMap<RunId, RunRecord> = HashMap::new();
    for record in records {
        let record = record?;
        found.insert(record.id, record);
    }
    Ok(runs.iter().filter_map(|run| found.remove(run)).collect())
}

pub(super) async fn live_runs(tx: &mut Tx<'_>) -> Result<Vec<RunRecord>, Fault> {
    let sql = concat!(live_list!(), " order by l.rank, l.due_at, l.id");
    tx.query(sql, &[]).await?.iter().map(Live::record).collect()
}

/// Walks the two chains of a schedule's runs from their heads, as far as history goes back.
pub(super) async fn ended_runs(
    tx: &mut Tx<'_>,
    schedule: ScheduleId,
    limit: u32,
) -> Result<Vec<RunRecord>, Fault> {
    let sql = concat!(
        chain!(),
        ended_query!("chain n join history"),
        " on h.id = n.id order by h.seq desc limit $2::bigint"
    );
    let found = tx.query(sql, &[&vec![schedule], &i64::from(limit)]).await?;
    found.iter().map(rows::ended).collect()
}

pub(super) async fn breaker(tx: &mut Tx<'_>, agent: AgentId, command: &str) -> Result<BreakerRecord, Fault> {
    let sql = "select b.*, exists (select 1 from live l where l.id = b.probe) as probe_lives from breakers b \
               where b.agent_id = $1 and b.command = $2";
    let found = tx.query(sql, &[&agent, &command]).await?;
    let breaker = found.first().map(books::breaker).transpose()?.unwrap_or_default();
    let sql = "select * from breaker_log where agent_id = $1 and command = $2 order by id";
    let transition = |row: &tokio_postgres::Row| {
        Ok::<_, Fault>(Transition {
            at: get(row, "at")?,
            from: rows::breaker_state(get(row, "from_state")?)?,
            to: rows::breaker_state(get(row, "to_state")?)?,
            failures: small(get(row, "failures")?),
            reason: rows::transition_reason(get(row, "reason")?)?,
            run: get::<Option<Uuid>>(row, "run_id")?.map(RunId),
        })
    };
    let log = tx.query(sql, &[&agent, &command]).await?;
    // One that cannot be read is left out.
    let history = log.iter().filter_map(|row| transition(row).ok()).collect();
    Ok(BreakerRecord { breaker, history })
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
                       ) o order by o.finished_at, o.seq limit $3)) returning id, schedule_id, tick_at";
        let runs = tx.query(sql, &[&retention.runs_before, &retention.failures_before, &batch]).await?;
        if self.sabotage.is(Sabotage::PruneArms) {
            for row in &runs {
                if let Some(tick_at) = get::<Option<Timestamp>>(row, "tick_at")? {
                    let token = Token { kind: TokenKind::Tick, tick_at, due_at: tick_at };
                    set_tokens(tx, &[(get(row, "schedule_id")?, token)]).await?;
                }
            }
        }
        let old = runs.iter().map(|row| get(row, "id")).collect::<Result<Vec<Uuid>, _>>()?;
        let mut output = forget_output(tx, &old).await?;
        let sql = "delete from skips where id = any(array( \
                       select id from skips where to_at < $1 order by to_at, id limit $2))";
        let skips = tx.execute(sql, &[&retention.skips_before, &batch]).await?;
        let keys = tx.execute("delete from idempotency where expires_at <= $1", &[&now]).await?;
        let (over, next) = prune_by_number(tx, retention, &mut output).await?;
        let sql = "delete from output where ctid = any(array( \
                       select o.ctid from output o where o.run_id < $1 \
                       and not exists (select 1 from live l where l.id = o.run_id) \
                       order by o.run_id, o.seq limit $2))";
        output += tx.execute(sql, &[&Retention::first_id(retention.output_before), &batch]).await?;
        // Should a limit have been set in the very moment in which somebody left the lane.
        look_again(tx).await?;
        // Nobody speaks to one whose lock is ours, and one that is spoken to is left alone.
        let sql = "delete from sessions where id = any(array( \
                       select x.id from sessions x where x.used_at < $1 \
                       and not exists (select 1 from session_runs r where r.session_id = x.id) \
                       and not exists (select 1 from live l where l.schedule_id = x.schedule_id and l.session = x.key) \
                       order by x.id limit $2 for update skip locked))";
        let sessions = tx.execute(sql, &[&retention.runs_before, &batch]).await?;
        let retired = prune_retired(tx, retention).await?;
        let (runs, sessions, skips) = (runs.len() as u32 + over, sessions as u32, skips as u32);
        Ok(Pruned { runs, skips, keys: keys as u32, output: output as u32, sessions, retired, next })
    }
}

/// Removes retired schedules that nothing kept belongs to, then retired agents without schedules. The heads of the two chains
/// of ended runs are the last that pruning takes. Nobody makes a run of what is retired, so that nobody needs its gates, which
/// other nodes may remember.
async fn prune_retired(tx: &mut Tx<'_>, retention: &Retention) -> Result<u32, Fault> {
    let bound: [Param<'_>; 2] = [&retention.retired_before, &i64::from(retention.batch)];
    let sql = "select s.id from schedules s join schedule_state st on st.schedule_id = s.id where s.retired_at < $1 \
               and not exists (select 1 from live l where l.schedule_id = s.id) \
               and not exists (select 1 from history h where h.id in (st.last_failed, st.last_other)) \
               and not exists (select 1 from skips k where k.schedule_id = s.id) \
               and not exists (select 1 from sessions x where x.schedule_id = s.id) \
               order by s.id limit $2 for update of s skip locked";
    let schedules = ids(&tx.query(sql, &bound).await?)?;
    if !schedules.is_empty() {
        for sql in [
            "delete from schedule_state where schedule_id = any($1)",
            "delete from schedule_revisions where schedule_id = any($1)",
            "delete from gates where kind = 1 and key = any($1)",
            "delete from schedules where id = any($1)",
        ] {
            tx.execute(sql, &[&schedules]).await?;
        }
    }
    let sql = "select a.id from agents a where a.retired_at < $1 \
               and not exists (select 1 from schedules s where s.agent_id = a.id) \
               order by a.id limit $2 for update skip locked";
    let agents = ids(&tx.query(sql, &bound).await?)?;
    if !agents.is_empty() {
        for sql in [
            "delete from breakers where agent_id = any($1)",
            "delete from breaker_log where agent_id = any($1)",
            "delete from budgets where agent_id = any($1)",
            "delete from scopes where agent_id = any($1)",
            "delete from gates where kind in (0, 2, 3) and key = any($1)",
            "delete from agents where id = any($1)",
        ] {
            tx.execute(sql, &[&agents]).await?;
        }
    }
    Ok((schedules.len() + agents.len()) as u32)
}

fn ids(rows: &[tokio_postgres::Row]) -> Result<Vec<i64>, Fault> {
    rows.iter().map(|row| get(row, "id")).collect()
}

/// Removes the output of runs that are removed; gives how many chunks that were.
async fn forget_output(tx: &mut Tx<'_>, runs: &[Uuid]) -> Result<u64, Fault> {
    if runs.is_empty() {
        return Ok(0);
    }
    tx.execute("delete from output where run_id = any($1)", &[&runs]).await
}

/// Walks on over a batch of ended runs, and removes those beyond the number that is kept of their schedule's. Adds to `output`
/// how many chunks of output they had.
async fn prune_by_number(
    tx: &mut Tx<'_>,
    retention: &Retention,
    output: &mut u64,
) -> Result<(u32, Option<RunId>), Fault> {
    let Some(keep) = retention.runs_per_schedule.map(i64::from) else { return Ok((0, None)) };
    let (after, batch) = (retention.after.map_or(Uuid::nil(), |after| after.0), i64::from(retention.batch));
    let sql = "select h.id, coalesce(h.ordinal <= case when h.failed then s.ended_failed else s.ended_other end - $3, \
               false) as is_over \
               from (select id, schedule_id, failed, ordinal from history where id > $1 order by id limit $2) h \
               left join schedule_state s on s.schedule_id = h.schedule_id order by h.id";
    let walked = tx.query(sql, &[&after, &batch, &keep]).await?;
    let mut over: Vec<Uuid> = Vec::new();
    for row in &walked {
        if get(row, "is_over")? {
            over.push(get(row, "id")?);
        }
    }
    if !over.is_empty() {
        tx.execute("delete from history where id = any($1)", &[&over]).await?;
        *output += forget_output(tx, &over).await?;
    }
    let next = walked.last().filter(|_| walked.len() as i64 == batch);
    Ok((over.len() as u32, next.map(|row| get(row, "id").map(RunId)).transpose()?))
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
    "select distinct format('run %s has gate %s, which is gone', l.id, g.id) from live l \
     cross join lateral (values (agent_gate), (turn_gate), (command_gate), (whole_gate), (parked_on)) g (id) \
     where g.id is not null and not exists (select 1 from gates where gates.id = g.id)",
    // Lowering a limit stops nobody: those that started before do not count. More than one may run in a scope: it is for
    // itself only that a run waits until none does.
    "select format('gate %s lets %s run and %s are running', g.id, g.cap, g.running) from ( \
         select g.id, g.cap, (select count(*) from live r where r.state = 2 and r.agent_gate = g.id \
             and (g.cap_at is null or r.started_at > g.cap_at)) as running \
         from gates g where g.cap is not null and g.kind = 0 \
     ) g where g.running > g.cap",
    "select format('run %s is parked behind gate %s, which has room for %s and nobody ready', p.id, g.id, g.room) \
     from (select g.id, room_at(g) as room from gates g where g.kind = 0) g join live p on p.state = 1 and p.parked_on = g.id \
     where g.room > (select count(*) from live w where w.state = 0 and w.queue_id = p.queue_id and w.agent_gate = g.id)",
    "select format('run %s is parked at turn %s, which no other run of its schedule has', p.id, g.id) \
     from gates g join live p on p.state = 1 and p.parked_on = g.id and g.kind = 1 \
     where not exists (select 1 from live r where r.turn_gate = g.id and r.id <> p.id \
         and (r.state = 2 or (r.rank, r.due_at, r.id) < (p.rank, p.due_at, p.id)))",
    "select format('run %s is parked at scope %s, where nothing runs and nothing waits to be alone before it', p.id, g.id) \
     from gates g join live p on p.state = 1 and p.parked_on = g.id and g.kind in (2, 3) \
     where not exists (select 1 from live r where r.state = 2 and g.id in (r.command_gate, r.whole_gate)) \
     and not exists (select 1 from live r where r.state <> 2 and r.alone_gate = g.id \
         and (r.rank, r.due_at, r.id) < (p.rank, p.due_at, p.id))",
    "select format('run %s is parked behind nothing of its own', id) from live \
     where state = 1 and (case when parked_on is null then not exists (select 1 from session_runs r where r.run_id = live.id) \
         else not coalesce(parked_on in (agent_gate, turn_gate, command_gate, whole_gate), false) end)",
    "select format('run %s is the first of its line and has no turn', l.id) from ( \
         select distinct on (session_id) session_id, run_id from session_runs order by session_id, seq \
     ) f join live l on l.id = f.run_id where l.state = 1 and l.parked_on is null \
     and not exists (select 1 from session_runs o join live x on x.id = o.run_id \
         where o.session_id = f.session_id and x.state = 2)",
    "select format('run %s has a place in a line and does not live', r.run_id) from session_runs r \
     where not exists (select 1 from live l where l.id = r.run_id)",
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
     join timers t on t.schedule_id = s.schedule_id \
     where s.retired or s.status <> case t.kind when 3 then 1 else 0 end",
    "select format('schedule %s is paused until %s, when nothing resumes it', s.schedule_id, s.status_until) \
     from schedule_state s where not s.retired and s.status = 1 and s.status_until is not null \
     and not exists (select 1 from timers t where t.schedule_id = s.schedule_id and t.due_at = s.status_until)",
    "select format('schedule %s is armed, and waits for a run', s.schedule_id) from schedule_state s \
     join timers t on t.schedule_id = s.schedule_id where s.waits_for is not null and t.kind <> 3",
    "select format('schedule %s is active, and nothing arms it', s.schedule_id) from schedule_state s \
     join schedules c on c.id = s.schedule_id where not s.retired and s.status = 0 and s.waits_for is null \
     and c.definition not like '{\"webhook\"%' and c.definition not like '{\"chat\"%' \
     and not exists (select 1 from timers t where t.schedule_id = s.schedule_id) \
     and not exists (select 1 from deferred d where d.schedule_id = s.schedule_id)",
    "select format('schedule %s is deferred, and waits for something else or is not active', d.schedule_id) \
     from deferred d join schedule_state s on s.schedule_id = d.schedule_id \
     left join timers t on t.schedule_id = d.schedule_id where s.retired or s.status <> 0 \
     or s.waits_for is not null or t.kind is distinct from case when d.armed then 4 end",
    "select format('schedule %s is armed as if it were deferred', t.schedule_id) from timers t \
     where t.kind = 4 and not exists (select 1 from deferred d where d.schedule_id = t.schedule_id)",
    "select format('schedule %s is deferred in the lane %s, which has room', d.schedule_id, d.lane) from deferred d \
     left join gates g on g.kind = 4 and g.key = 0 and g.command = d.lane where not d.armed \
     and (g.queue_limit is null or g.queue_limit > queued_in(d.lane) \
         + (select count(*) from deferred r where r.lane = d.lane and r.armed))",
    "select format('schedule %s has no state', c.id) from schedules c \
     where not exists (select 1 from schedule_state s where s.schedule_id = c.id)",
    "select format('the token of schedule %s belongs to nobody', t.schedule_id) from timers t \
     where not exists (select 1 from schedules c where c.id = t.schedule_id)",
    "select format('run %s has no queue', l.id) from live l where not exists \
     (select 1 from queues q where q.id = l.queue_id and q.gated = (coalesce(l.agent_gate, l.turn_gate, l.command_gate, l.whole_gate) is not null))",
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
