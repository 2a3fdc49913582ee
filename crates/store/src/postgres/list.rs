//! Lists, and records as they are listed.

use std::collections::BTreeMap;

use belfry_core::breaker::Breaker;
use belfry_core::budget::Budget;
use belfry_core::definition::{When, read_stored};
use belfry_core::{AgentDefinition, RunId, RunState, ScheduleDefinition};
use belfry_time::Timestamp;
use tokio_postgres::Row;
use uuid::Uuid;

use super::connection::{Fault, Tx};
use super::rows::{self, Live, get, small};
use super::{books, finish};
use crate::shapes::*;
use crate::unknown;
use crate::views::*;

/// Live runs with their names.
macro_rules! live_query {
    () => {
        crate::postgres::list::live_with!("l.prompt, l.payload")
    };
}
pub(super) use live_query;

/// Live runs as lists show them: without prompts and payloads, which may be long.
macro_rules! live_list {
    () => {
        crate::postgres::list::live_with!("null::text as prompt, '{}'::text as payload")
    };
}
pub(super) use live_list;

macro_rules! live_with {
    ($given:literal) => {
        concat!(
            "select ",
            crate::postgres::rows::live_columns!(),
            ", ",
            $given,
            ", c.name, a.name as agent_name from live l join queues q on q.id = l.queue_id \
             join schedules c on c.id = l.schedule_id join agents a on a.id = l.agent_id"
        )
    };
}
pub(super) use live_with;

/// Ended runs of a table with their names.
macro_rules! ended_query {
    ($from:literal) => {
        crate::postgres::list::ended_with!("h.prompt, h.payload", $from)
    };
}
pub(super) use ended_query;

/// Ended runs of a table as lists show them.
macro_rules! ended_list {
    ($from:literal) => {
        crate::postgres::list::ended_with!("null::text as prompt, '{}'::text as payload", $from)
    };
}
pub(super) use ended_list;

macro_rules! ended_with {
    ($given:literal, $from:literal) => {
        concat!(
            "select h.id, h.schedule_id, h.agent_id, h.command, h.trigger, h.tick_at, h.not_before, h.due_at, h.state, h.reason, \
             h.lane, h.attempt, h.max_attempts, h.epoch, h.node_id, h.exit_code, h.error, h.summary, h.usage, h.session, h.trace_id, \
             h.created_at, h.started_at, h.finished_at, ",
            $given,
            ", coalesce((select c.name from schedules c where c.id = h.schedule_id), '') as name, \
             coalesce((select a.name from agents a where a.id = h.agent_id), '') as agent_name from ",
            $from,
            " h"
        )
    };
}
pub(super) use ended_with;

/// The chains of the schedules in `$1`, each down to `$2` runs.
macro_rules! chain {
    () => {
        "with recursive chain (id, prev_run, depth) as ( \
             select h.id, h.prev_run, 1::bigint from schedule_state s cross join lateral \
             (values (s.last_failed), (s.last_other)) as t (run) join history h on h.id = t.run \
             where s.schedule_id = any($1) \
             union all \
             select h.id, h.prev_run, c.depth + 1 from chain c join history h on h.id = c.prev_run \
             where c.depth < $2::bigint \
         ) "
    };
}
pub(super) use chain;

/// Schedules with all that a record says.
macro_rules! schedules {
    () => {
        "select c.id, c.agent_id, c.name, c.definition, greatest(c.format, a.format) as format, c.revision, c.source, s.*, \
         t.kind, t.tick_at as token_tick_at, t.due_at, d.lane as deferred_lane, d.tick_at as deferred_tick_at, \
         d.since as deferred_since, a.name as agent_name, b.period_start, b.failures, \
         l.running, l.pending, l.live_tick, l.retry_at, \
         (select k.to_at from skips k where k.schedule_id = c.id order by k.from_at desc, k.id desc limit 1) as skipped_tick \
         from schedules c join schedule_state s on s.schedule_id = c.id join agents a on a.id = c.agent_id \
         left join timers t on t.schedule_id = c.id left join deferred d on d.schedule_id = c.id left join budgets b on b.agent_id = c.agent_id \
         cross join lateral (select count(*) filter (where l.state = 2) as running, \
             count(*) filter (where l.state <> 2) as pending, max(l.tick_at) as live_tick, \
             min(l.not_before) filter (where l.state <> 2 and l.attempt > 0) as retry_at \
             from live l where l.schedule_id = c.id) l"
    };
}

fn schedule_record(row: &Row) -> Result<ScheduleRecord, Fault> {
    let last = match get::<Option<Uuid>>(row, "last_run")? {
        None => None,
        Some(run) => Some(LastRun {
            run: RunId(run),
            state: get::<Option<i16>>(row, "last_state")?
                .and_then(RunState::from_code)
                .unwrap_or(RunState::Completed),
            tick_at: get(row, "last_tick_at")?,
            finished_at: get::<Option<Timestamp>>(row, "last_finished_at")?.unwrap_or(unknown::EARLIEST),
        }),
    };
    let success: Option<Timestamp> = get(row, "last_success_at")?;
    let open_skip = rows::open_skip(row)?;
    let ticks: [Option<Timestamp>; 4] = [
        get(row, "fired_at")?,
        get(row, "live_tick")?,
        get(row, "skipped_tick")?,
        open_skip.map(|open| open.to),
    ];
    let (definition, unreadable) = match read_stored(get(row, "format")?, get(row, "definition")?) {
        Ok(definition) => (definition, None),
        Err(why) => (ScheduleDefinition::new(When::After(String::new())), Some(why)),
    };
    let record = ScheduleRecord {
        id: get(row, "id")?,
        agent: get(row, "agent_id")?,
        agent_name: get(row, "agent_name")?,
        name: get(row, "name")?,
        definition,
        revision: get(row, "revision")?,
        source: get(row, "source")?,
        status: rows::status(row)?,
        status_since: get(row, "status_since")?,
        token: rows::token(row)?,
        waits_for: get::<Option<Uuid>>(row, "waits_for")?.map(RunId),
        deferred: match get(row, "deferred_lane")? {
            Some(lane) => Some(Deferred {
                lane,
                tick_at: get(row, "deferred_tick_at")?,
                since: get(row, "deferred_since")?,
            }),
            None => None,
        },
        origin: get(row, "origin")?,
        open_skip,
        cursor_at: get(row, "cursor_at")?,
        planned_at: get(row, "planned_at")?,
        last,
        last_success: success.zip(get::<Option<Uuid>>(row, "last_success_run")?.map(RunId)),
        last_error: get(row, "last_error")?,
        streak: get(row, "streak")?,
        last_fired_at: ticks.into_iter().flatten().max(),
        running: small(get(row, "running")?),
        pending: small(get(row, "pending")?),
        next_retry_at: get(row, "retry_at")?,
        budget: budget(row)?,
        unreadable: None,
    };
    Ok(match unreadable {
        Some(why) => record.unreadable(&why),
        None => record,
    })
}

fn budget(row: &Row) -> Result<Option<Budget>, Fault> {
    match get::<Option<Timestamp>>(row, "period_start")? {
        Some(_) => books::budget(row),
        None => Ok(None),
    }
}

pub(super) async fn schedule(tx: &mut Tx<'_>, name: &str) -> Result<Option<ScheduleRecord>, Fault> {
    let sql = concat!(schedules!(), " where c.name = $1 and c.retired_at is null");
    let found = tx.query(sql, &[&name]).await?.first().map(schedule_record).transpose()?;
    Ok(with_agents(tx, found.into_iter().collect()).await?.pop())
}

/// Marks the schedules of agents that cannot be read: they cannot be read either.
async fn with_agents(tx: &mut Tx<'_>, records: Vec<ScheduleRecord>) -> Result<Vec<ScheduleRecord>, Fault> {
    let mut ids: Vec<i64> = records.iter().map(|record| record.agent).collect();
    ids.sort_unstable();
    ids.dedup();
    let found = tx.query("select id, format, definition from agents where id = any($1)", &[&ids]).await?;
    let mut unread = BTreeMap::new();
    for row in &found {
        if let Err(why) = finish::read_agent(row)? {
            unread.insert(get::<i64>(row, "id")?, why);
        }
    }
    let marked = records.into_iter().map(|record| match unread.get(&record.agent) {
        Some(why) => record.unreadable(why),
        None => record,
    });
    Ok(marked.collect())
}

pub(super) async fn schedules(
    tx: &mut Tx<'_>,
    filter: &ScheduleFilter,
    after: Option<&str>,
    limit: u32,
) -> Result<Page<ScheduleRecord, String>, Fault> {
    // All names of an agent lie between it with a slash and it with what follows the slash.
    let (from, to) = match &filter.agent {
        Some(agent) => (format!("{agent}/"), Some(format!("{agent}0"))),
        None => (String::new(), None),
    };
    let from = after.map_or(from.clone(), |after| from.max(after.to_owned()));
    let sql = concat!(
        schedules!(),
        " where c.retired_at is null and c.name > $1 and ($2::text is null or c.name < $2) \
         and ($3::bigint >> s.status::integer) & 1 = 1 and ($4::text is null or c.source = $4) \
         order by c.name limit $5"
    );
    let found = tx.query(sql, &[&from, &to, &filter.mask(), &filter.source, &i64::from(limit)]).await?;
    let items: Vec<ScheduleRecord> = found.iter().map(schedule_record).collect::<Result<_, Fault>>()?;
    let items = with_agents(tx, items).await?;
    let is_full = items.len() == limit as usize;
    let next = items.last().filter(|_| is_full).map(|last| last.name.clone());
    Ok(Page { items, next })
}

pub(super) async fn runs(
    tx: &mut Tx<'_>,
    filter: &RunFilter,
    after: Option<RunId>,
    limit: u32,
) -> Result<Page<RunRecord, RunId>, Fault> {
    let before = after.map_or(Uuid::max(), |after| after.0);
    let (mask, many, most) = (filter.mask(), i64::from(limit), RUNS_SCANNED_MAX);
    let (agent, lane, since, session) = (&filter.agent, &filter.lane, &filter.since, &filter.session);
    if let Some(session) = session {
        return runs_of_session(tx, filter, session, before, limit).await;
    }
    if let Some(schedule) = &filter.schedule {
        return runs_of(tx, filter, schedule, before, limit).await;
    }
    let (mut live, mut ended) = ((Vec::new(), None), (Vec::new(), None));
    // The live ones first: who ends between the two looks is seen twice, and never missed.
    if filter.wants_live() {
        let sql = concat!(
            live_list!(),
            " where l.id = any(array(select id from live where id < $1 order by id desc limit $7)) \
             and ($2::text is null or a.name = $2) and ($3::text is null or q.lane = $3) \
             and ($4::timestamptz is null or l.created_at >= $4) \
             and ($5::bigint >> (case l.state when 2 then 1 else 0 end)) & 1 = 1 order by l.id desc limit $6"
        );
        let found = tx.query(sql, &[&before, agent, lane, since, &mask, &many, &most]).await?;
        let sql = "select id, created_at from live where id < $1 order by id desc limit 1 offset $2";
        let last = tx.query(sql, &[&before, &(most - 1)]).await?;
        live = (found.iter().map(Live::record).collect::<Result<_, Fault>>()?, scanned(&last)?);
    }
    if filter.wants_ended() {
        let sql = concat!(
            ended_list!("(select * from history where id < $1 order by id desc limit $7)"),
            " where ($2::text is null or h.agent_id = any(array(select id from agents where name = $2))) \
             and ($3::text is null or h.lane = $3) and ($4::timestamptz is null or h.created_at >= $4) \
             and ($5::bigint >> h.state::integer) & 1 = 1 order by h.id desc limit $6"
        );
        let found = tx.query(sql, &[&before, agent, lane, since, &mask, &many, &most]).await?;
        let sql = "select id, created_at from history where id < $1 order by id desc limit 1 offset $2";
        let last = tx.query(sql, &[&before, &(most - 1)]).await?;
        ended = (found.iter().map(rows::ended).collect::<Result<_, Fault>>()?, scanned(&last)?);
    }
    Ok(Page::of_runs(filter, live, ended, limit))
}

fn scanned(last: &[Row]) -> Result<Scanned, Fault> {
    last.first().map(|row| Ok((RunId(get(row, "id")?), get(row, "created_at")?))).transpose()
}

/// Runs of sessions with one key, in the order of an index of their own.
async fn runs_of_session(
    tx: &mut Tx<'_>,
    filter: &RunFilter,
    session: &str,
    before: Uuid,
    limit: u32,
) -> Result<Page<RunRecord, RunId>, Fault> {
    let (mut live, mut ended) = ((Vec::new(), None), (Vec::new(), None));
    let most = RUNS_SCANNED_MAX;
    if filter.wants_live() {
        let sql = concat!(
            live_list!(),
            " where l.id = any(array(select id from live where session = $1 and id < $2 order by id desc limit $3))"
        );
        let found = tx.query(sql, &[&session, &before, &most]).await?;
        let sql = "select id, created_at from live where session = $1 and id < $2 order by id desc limit 1 offset $3";
        let last = tx.query(sql, &[&session, &before, &(most - 1)]).await?;
        live = (found.iter().map(Live::record).collect::<Result<_, Fault>>()?, scanned(&last)?);
    }
    if filter.wants_ended() {
        let sql =
            ended_list!("(select * from history where session = $1 and id < $2 order by id desc limit $3)");
        let found = tx.query(sql, &[&session, &before, &most]).await?;
        let sql = "select id, created_at from history where session = $1 and id < $2 order by id desc limit 1 offset $3";
        let last = tx.query(sql, &[&session, &before, &(most - 1)]).await?;
        ended = (found.iter().map(rows::ended).collect::<Result<_, Fault>>()?, scanned(&last)?);
    }
    live.0.retain(|run| filter.takes(run));
    ended.0.retain(|run| filter.takes(run));
    Ok(Page::of_runs(filter, live, ended, limit))
}

/// Runs of one schedule: the live ones, and along its chains.
async fn runs_of(
    tx: &mut Tx<'_>,
    filter: &RunFilter,
    schedule: &str,
    before: Uuid,
    limit: u32,
) -> Result<Page<RunRecord, RunId>, Fault> {
    let found = tx.query("select id from schedules where name = $1", &[&schedule]).await?;
    let ids: Vec<i64> = found.iter().map(|row| get(row, "id")).collect::<Result<_, Fault>>()?;
    let sql = concat!(live_list!(), " where l.schedule_id = any($1) and l.id < $2");
    let live = tx.query(sql, &[&ids, &before]).await?;
    let mut live: Vec<RunRecord> = live.iter().map(Live::record).collect::<Result<_, Fault>>()?;
    live.retain(|run| filter.takes(run));
    let sql = concat!(
        // The chain first, as an array: joined with it, all runs would be walked in their order until enough are found.
        chain!(),
        ended_list!("history"),
        " where h.id = any(array(select n.id from chain n where n.id < $3)) and ($4::bigint >> h.state::integer) & 1 = 1 \
         and ($5::text is null or h.lane = $5) and ($6::timestamptz is null or h.created_at >= $6) \
         order by h.id desc limit $7"
    );
    let ended = tx
        .query(
            sql,
            &[&ids, &CHAIN_MAX, &before, &filter.mask(), &filter.lane, &filter.since, &i64::from(limit)],
        )
        .await?;
    let mut ended: Vec<RunRecord> = ended.iter().map(rows::ended).collect::<Result<_, Fault>>()?;
    ended.retain(|run| filter.takes(run));
    Ok(Page::of_runs(filter, (live, None), (ended, None), limit))
}

pub(super) async fn agents(tx: &mut Tx<'_>) -> Result<Vec<AgentRecord>, Fault> {
    let sql = "select a.id, a.name, a.source, a.edition, a.format, a.definition, b.period_start, b.failures \
               from agents a left join budgets b on b.agent_id = a.id \
               where a.retired_at is null order by a.name";
    let record = |row: &Row| {
        let (definition, unreadable) = match finish::read_agent(row)? {
            Ok(definition) => (definition, None),
            Err(why) => (AgentDefinition::default(), Some(why.to_string())),
        };
        Ok(AgentRecord {
            id: get(row, "id")?,
            name: get(row, "name")?,
            source: get(row, "source")?,
            revision: get(row, "edition")?,
            definition,
            unreadable,
            budget: budget(row)?,
        })
    };
    tx.query(sql, &[]).await?.iter().map(record).collect()
}

pub(super) async fn breakers(tx: &mut Tx<'_>) -> Result<Vec<BreakerEntry>, Fault> {
    let sql = "select b.*, a.name as agent_name, exists (select 1 from breaker_log l \
               where l.agent_id = b.agent_id and l.command = b.command) as moved, \
               exists (select 1 from live l where l.id = b.probe) as probe_lives \
               from breakers b join agents a on a.id = b.agent_id \
               where a.retired_at is null order by a.name, b.command";
    let mut entries = Vec::new();
    for row in tx.query(sql, &[]).await? {
        let breaker = books::breaker(&row)?;
        if get::<bool>(&row, "moved")? || breaker != Breaker::default() {
            let (agent, agent_name) = (get(&row, "agent_id")?, get(&row, "agent_name")?);
            entries.push(BreakerEntry { agent, agent_name, command: get(&row, "command")?, breaker });
        }
    }
    Ok(entries)
}
