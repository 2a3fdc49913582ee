//! Lists, and records as they are listed.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use belfry_core::breaker::Breaker;
use belfry_core::budget::Budget;
use belfry_core::definition::{When, read_stored};
use belfry_core::{RunId, RunState, ScheduleDefinition, ScheduleId};
use rusqlite::{Row, params};

use super::plan::{open_skip_of, token_of};
use super::source::{from_json, status_of};
use super::{
    Done, Verb, bytes, instant, json, lossy, maybe_id, maybe_instant, maybe_number, micros, node_id, number,
    run_id, text,
};
use crate::sessions::read_given;
use crate::shapes::*;
use crate::unknown;
use crate::views::*;

/// Ended runs with their names.
pub(super) const ENDED: &str = "select h.*, s.name, a.name as agent_name
    from history h join schedules s on s.id = h.schedule_id join agents a on a.id = h.agent_id";

/// Ended runs as lists show them: without prompts and payloads, which may be long.
pub(super) fn ended_list(which: &str) -> String {
    format!(
        "select h.*, null as prompt, null as payload, s.name, a.name as agent_name
         from (select id, agent_id, schedule_id, command, trigger, tick_at, not_before, due_at, attempt, max_attempts, epoch, node_id,
                      exit_code, error, session, trace_id, created_at, started_at, state, reason, summary, usage, finished_at, lane
               from history where length(id) = 16 and {which}) h
           join schedules s on s.id = h.schedule_id join agents a on a.id = h.agent_id"
    )
}

/// Live runs with the columns of ended ones.
pub(super) fn live_query(condition: &str) -> String {
    live_with("l.prompt, l.payload", condition)
}

/// Live runs as lists show them.
pub(super) fn live_list(condition: &str) -> String {
    live_with("null as prompt, null as payload", condition)
}

fn live_with(given: &str, condition: &str) -> String {
    let columns = "l.id, l.agent_id, l.schedule_id, l.command, l.trigger, l.tick_at, l.not_before, l.due_at, l.attempt, l.max_attempts,
                   l.epoch, l.node_id, l.exit_code, l.error, l.session, l.trace_id, l.created_at, l.started_at";
    format!(
        "select {columns}, {given}, case l.state when 2 then 1 else 0 end as state, null as reason, null as summary, null as usage,
                null as finished_at, q.lane, s.name, a.name as agent_name
         from live l join queues q on q.id = l.queue_id join schedules s on s.id = l.schedule_id join agents a on a.id = l.agent_id
         where length(l.id) = 16 and {condition}"
    )
}

/// A row of live or ended runs as a record.
pub(super) fn record(row: &Row<'_>) -> rusqlite::Result<RunRecord> {
    let not_before = instant(row, "not_before")?;
    let payload = row.get_ref("payload")?.as_bytes_or_null()?.unwrap_or(b"{}");
    let (trigger, payload, mut unreadable) = read_given(number(row, "trigger")?, payload);
    let (state, reason) =
        unknown::ending(number(row, "state")?, maybe_number(row, "reason")?, &mut unreadable);
    let record = RunRecord {
        id: run_id(row.get("id")?),
        agent: row.get("agent_id")?,
        agent_name: text(row, "agent_name")?,
        schedule: row.get("schedule_id")?,
        name: text(row, "name")?,
        command: lossy(row, "command")?.unwrap_or_default(),
        trigger,
        tick_at: maybe_instant(row, "tick_at")?,
        due_at: maybe_instant(row, "due_at")?.unwrap_or(not_before),
        not_before,
        state,
        reason,
        lane: text(row, "lane")?,
        attempt: number(row, "attempt")?,
        max_attempts: number(row, "max_attempts")?,
        epoch: number(row, "epoch")?,
        node: maybe_id(row, "node_id")?.map(node_id),
        exit_code: maybe_number(row, "exit_code")?,
        error: lossy(row, "error")?,
        session: lossy(row, "session")?,
        summary: lossy(row, "summary")?,
        usage: unknown::usage(lossy(row, "usage")?),
        prompt: lossy(row, "prompt")?,
        payload,
        trace_id: maybe_id(row, "trace_id")?.map(uuid::Uuid::from_bytes),
        created_at: instant(row, "created_at")?,
        started_at: maybe_instant(row, "started_at")?,
        finished_at: maybe_instant(row, "finished_at")?,
    };
    Ok(record.noting(unreadable))
}

/// Schedules with all that a record says.
const SCHEDULES: &str = "select s.id, s.agent_id, s.name, s.definition, max(s.format, a.format) as format, s.revision, s.source, st.*, t.kind, t.tick_at, t.due_at,
        d.lane as deferred_lane, d.tick_at as deferred_tick_at, d.since as deferred_since, a.name as agent_name, b.period_start, b.failures,
        (select count(*) from live l where l.schedule_id = s.id and l.state = 2) as running,
        (select count(*) from live l where l.schedule_id = s.id and l.state <> 2) as pending,
        (select max(l.tick_at) from live l where l.schedule_id = s.id) as live_tick,
        (select min(l.not_before) from live l where l.schedule_id = s.id and l.state <> 2 and l.attempt > 0) as retry_at,
        (select k.to_tick from skips k where k.schedule_id = s.id order by k.from_tick desc, k.number desc limit 1) as skipped_tick
    from schedules s join schedule_state st on st.schedule_id = s.id join agents a on a.id = s.agent_id
        left join timers t on t.schedule_id = s.id left join deferred d on d.schedule_id = s.id
        left join budgets b on b.agent_id = s.agent_id";

/// A row of schedules as a record, whose definition is still text.
fn schedule_record(row: &Row<'_>) -> rusqlite::Result<(ScheduleRecord, i32, String)> {
    let last = match maybe_id(row, "last_run")? {
        Some(run) => Some(LastRun {
            run: run_id(run),
            state: maybe_number(row, "last_state")?
                .and_then(RunState::from_code)
                .unwrap_or(RunState::Completed),
            tick_at: maybe_instant(row, "last_tick_at")?,
            finished_at: maybe_instant(row, "last_finished_at")?.unwrap_or(unknown::EARLIEST),
        }),
        None => None,
    };
    let success_run = maybe_id(row, "last_success_run")?.map(run_id);
    let armed = row.get::<_, Option<i64>>("due_at")?.is_some();
    let open_skip = open_skip_of(row)?;
    let ticks = [
        maybe_instant(row, "fired_at")?,
        maybe_instant(row, "live_tick")?,
        maybe_instant(row, "skipped_tick")?,
        open_skip.map(|open| open.to),
    ];
    let record = ScheduleRecord {
        id: row.get("id")?,
        agent: row.get("agent_id")?,
        agent_name: text(row, "agent_name")?,
        name: text(row, "name")?,
        definition: ScheduleDefinition::new(When::After(String::new())),
        revision: row.get("revision")?,
        source: text(row, "source")?,
        status: status_of(row)?,
        status_since: instant(row, "status_since")?,
        token: if armed { Some(token_of(row)?) } else { None },
        waits_for: maybe_id(row, "waits_for")?.map(run_id),
        deferred: match lossy(row, "deferred_lane")? {
            Some(lane) => Some(Deferred {
                lane,
                tick_at: instant(row, "deferred_tick_at")?,
                since: instant(row, "deferred_since")?,
            }),
            None => None,
        },
        origin: maybe_instant(row, "origin")?,
        open_skip,
        cursor_at: maybe_instant(row, "cursor_at")?,
        planned_at: maybe_instant(row, "planned_at")?,
        last,
        last_success: maybe_instant(row, "last_success_at")?.zip(success_run),
        last_error: lossy(row, "last_error")?,
        streak: row.get("streak")?,
        last_fired_at: ticks.into_iter().flatten().max(),
        running: number(row, "running")?,
        pending: number(row, "pending")?,
        next_retry_at: maybe_instant(row, "retry_at")?,
        budget: budget_of(row)?,
        unreadable: None,
    };
    Ok((record, number(row, "format")?, json(row, "definition")?))
}

fn budget_of(row: &Row<'_>) -> rusqlite::Result<Option<Budget>> {
    let period_start = maybe_instant(row, "period_start")?;
    let failures: Option<i64> = row.get("failures")?;
    Ok(period_start
        .zip(failures)
        .and_then(|(period_start, failures)| unknown::budget(period_start, failures)))
}

fn with_definition((record, format, text): (ScheduleRecord, i32, String)) -> ScheduleRecord {
    match read_stored(format, &text) {
        Ok(definition) => ScheduleRecord { definition, ..record },
        Err(why) => record.unreadable(&why),
    }
}

impl Verb<'_> {
    pub(super) fn schedule(&self, name: &str) -> Done<Option<ScheduleRecord>> {
        let sql = format!("{SCHEDULES} where s.name = ? and s.retired_at is null");
        let found = self.row(sql, [name], schedule_record)?.map(with_definition);
        Ok(self.with_agents(found.into_iter().collect())?.pop())
    }

    /// Marks the schedules of agents that cannot be read: they cannot be read either.
    fn with_agents(&self, records: Vec<ScheduleRecord>) -> Done<Vec<ScheduleRecord>> {
        let mut agents = BTreeMap::new();
        for agent in records.iter().map(|record| record.agent) {
            if let Entry::Vacant(unknown) = agents.entry(agent) {
                unknown.insert(self.read_agent(agent)?.and_then(Result::err));
            }
        }
        let marked = records.into_iter().map(|record| match agents.get(&record.agent) {
            Some(Some(why)) => record.unreadable(why),
            _ => record,
        });
        Ok(marked.collect())
    }

    pub(super) fn list_schedules(
        &self,
        filter: &ScheduleFilter,
        after: Option<&str>,
        limit: u32,
    ) -> Done<Page<ScheduleRecord, String>> {
        // All names of an agent lie between it with a slash and it with what follows the slash.
        let (from, to) = match &filter.agent {
            Some(agent) => (format!("{agent}/"), Some(format!("{agent}0"))),
            None => (String::new(), None),
        };
        let from = after.map_or(from.clone(), |after| from.max(after.to_owned()));
        let mut from = from.into_bytes();
        let sql = format!(
            "{SCHEDULES} where s.retired_at is null and s.name > cast(?1 as text) and (?2 is null or s.name < ?2)
               and (?3 >> st.status) & 1 and (?4 is null or s.source = ?4) order by s.name limit ?5"
        );
        loop {
            let asked = params![from, to, filter.mask(), filter.source, limit];
            let found = self.rows(sql.clone(), asked, |row| {
                Ok((row.get_ref("name")?.as_bytes()?.to_vec(), schedule_record(row)?))
            })?;
            let is_full = found.len() == limit as usize;
            from = found.last().map_or(from, |(name, _)| name.clone());
            // No page could go on after a name that is not UTF-8: such a schedule is left out, and `doctor` names it.
            let named = found.into_iter().filter(|(name, (record, ..))| record.name.as_bytes() == name);
            let items = self.with_agents(named.map(|(_, found)| with_definition(found)).collect())?;
            if items.is_empty() && is_full && limit > 0 {
                continue;
            }
            let next = items.last().filter(|_| is_full).map(|last| last.name.clone());
            return Ok(Page { items, next });
        }
    }

    pub(super) fn list_runs(
        &self,
        filter: &RunFilter,
        after: Option<RunId>,
        limit: u32,
    ) -> Done<Page<RunRecord, RunId>> {
        let before = after.map_or([u8::MAX; 16], bytes);
        if let Some(session) = &filter.session {
            return self.list_runs_of_session(filter, session, before, limit);
        }
        if let Some(schedule) = &filter.schedule {
            return self.list_runs_of(filter, schedule, before, limit);
        }
        let agent = &filter.agent;
        let since = filter.since.map(micros);
        // Of each kind so many rows are looked at, the newest first.
        let scan = |table: &str, sql: String| -> Done<(Vec<RunRecord>, Scanned)> {
            let found = self.rows(
                sql,
                params![before, agent, filter.lane, since, filter.mask(), limit, RUNS_SCANNED_MAX],
                record,
            )?;
            let last = format!(
                "select id, created_at from {table} where length(id) = 16 and id < ? order by id desc limit 1 offset ?"
            );
            let last = self.row(last, params![before, RUNS_SCANNED_MAX - 1], |row| {
                Ok((run_id(row.get(0)?), instant(row, "created_at")?))
            })?;
            Ok((found, last))
        };
        let condition = "l.id in (select id from live where id < ?1 order by id desc limit ?7)
               and (?2 is null or a.name = ?2) and (?3 is null or q.lane = ?3) and (?4 is null or l.created_at >= ?4)
               and (?5 >> (case l.state when 2 then 1 else 0 end)) & 1 order by l.id desc limit ?6";
        let live = if filter.wants_live() { scan("live", live_list(condition))? } else { (Vec::new(), None) };
        let conditions = "(?2 is null or a.name = ?2) and (?3 is null or h.lane = ?3) and (?4 is null or h.created_at >= ?4)
               and (?5 >> h.state) & 1 order by h.id desc limit ?6";
        let ended = if filter.wants_ended() {
            let newest = ended_list("id < ?1 order by id desc limit ?7");
            scan("history", format!("{newest} where {conditions}"))?
        } else {
            (Vec::new(), None)
        };
        Ok(Page::of_runs(filter, live, ended, limit))
    }

    /// Runs of sessions with one key, in the order of an index of their own.
    fn list_runs_of_session(
        &self,
        filter: &RunFilter,
        session: &str,
        before: [u8; 16],
        limit: u32,
    ) -> Done<Page<RunRecord, RunId>> {
        let scan = |table: &str, sql: String| -> Done<(Vec<RunRecord>, Scanned)> {
            let mut found = self.rows(sql, params![session, before, RUNS_SCANNED_MAX], record)?;
            found.retain(|run| filter.takes(run));
            let last = format!(
                "select id, created_at from {table} where session = ? and length(id) = 16 and id < ?
                 order by id desc limit 1 offset ?"
            );
            let last = self.row(last, params![session, before, RUNS_SCANNED_MAX - 1], |row| {
                Ok((run_id(row.get(0)?), instant(row, "created_at")?))
            })?;
            Ok((found, last))
        };
        let newest = "session = ?1 and id < ?2 order by id desc limit ?3";
        let (mut live, mut ended) = ((Vec::new(), None), (Vec::new(), None));
        if filter.wants_live() {
            live = scan("live", live_list(&format!("l.id in (select id from live where {newest})")))?;
        }
        if filter.wants_ended() {
            ended = scan("history", ended_list(newest))?;
        }
        Ok(Page::of_runs(filter, live, ended, limit))
    }

    /// Runs of one schedule: the live ones, and along its chains.
    fn list_runs_of(
        &self,
        filter: &RunFilter,
        schedule: &str,
        before: [u8; 16],
        limit: u32,
    ) -> Done<Page<RunRecord, RunId>> {
        let ids: Vec<ScheduleId> =
            self.rows("select id from schedules where name = ?", [schedule], |row| row.get(0))?;
        let (mut live, mut ended) = (Vec::new(), Vec::new());
        for id in ids {
            live.extend(self.rows(
                live_list("l.schedule_id = ? and l.id < ?"),
                params![id, before],
                record,
            )?);
            ended.extend(self.rows(
                "with recursive chain (id, previous) as (
                   select h.id, h.previous from schedule_state st join history h on h.id in (st.last_failed, st.last_other)
                     where st.schedule_id = ?1
                   union
                   select h.id, h.previous from chain c join history h on h.id = c.previous limit ?3)
                 select id from chain where id < ?2",
                params![id, before, CHAIN_MAX],
                |row| row.get::<_, [u8; 16]>(0),
            )?);
        }
        live.retain(|run| filter.takes(run));
        ended.sort_unstable_by(|a, b| b.cmp(a));
        let mut records = Vec::new();
        for id in ended {
            if records.len() == limit as usize {
                break;
            }
            let found = self.row(ended_list("id = ?"), [id], record)?;
            records.extend(found.filter(|run| filter.takes(run)));
        }
        Ok(Page::of_runs(filter, (live, None), (records, None), limit))
    }

    pub(super) fn list_agents(&self) -> Done<Vec<AgentRecord>> {
        let found = self.rows(
            "select a.*, b.period_start, b.failures from agents a left join budgets b on b.agent_id = a.id
             where a.retired_at is null order by a.name",
            [],
            |row| {
                let record = AgentRecord {
                    id: row.get("id")?,
                    name: text(row, "name")?,
                    source: text(row, "source")?,
                    revision: row.get("revision")?,
                    definition: belfry_core::AgentDefinition::default(),
                    unreadable: None,
                    budget: budget_of(row)?,
                };
                Ok(match read_stored(number(row, "format")?, &json(row, "definition")?) {
                    Ok(definition) => AgentRecord { definition, ..record },
                    Err(why) => AgentRecord { unreadable: Some(why.to_string()), ..record },
                })
            },
        )?;
        Ok(found)
    }

    pub(super) fn list_breakers(&self) -> Done<Vec<BreakerEntry>> {
        let found = self.rows(
            "select b.agent_id, a.name, b.command, b.breaker,
                    exists (select 1 from breaker_log l where l.agent_id = b.agent_id and l.command = b.command) as moved
             from breakers b join agents a on a.id = b.agent_id where a.retired_at is null order by a.name, b.command",
            [],
            |row| {
                let entry = BreakerEntry {
                    agent: row.get(0)?,
                    agent_name: text(row, 1)?,
                    command: text(row, 2)?,
                    breaker: Breaker::default(),
                };
                Ok((entry, text(row, 3)?, row.get::<_, bool>(4)?))
            },
        )?;
        let mut entries = Vec::new();
        for (entry, text, moved) in found {
            let breaker: Breaker = from_json(&text).unwrap_or_default();
            if moved || breaker != Breaker::default() {
                let breaker = self.breaker_of(entry.agent, &entry.command)?;
                entries.push(BreakerEntry { breaker, ..entry });
            }
        }
        Ok(entries)
    }
}
