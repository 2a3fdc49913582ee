//! Planning: what is due, and committing what was decided. Also runs that are asked for from outside a plan.

use std::collections::HashMap;
use std::sync::Arc;

use belfry_core::breaker::{Admits, Breaker, Transition};
use belfry_core::budget::Budget;
use belfry_core::check::Status;
use belfry_core::definition::{Scope, Unreadable};
use belfry_core::overlap::Overlap;
use belfry_core::plan::Standing;
use belfry_core::{
    AgentDefinition, AgentId, Reason, RunId, RunState, ScheduleId, SkipRange, Token, TokenKind,
};
use belfry_time::Timestamp;
use rusqlite::params;

use super::source::{GATE_AGENT, from_json, to_json};
use super::{
    Done, Verb, bytes, instant, json, maybe_id, maybe_instant, maybe_number, micros, node_id, number, run_id,
    text,
};
use crate::sabotage::Sabotage;
use crate::shapes::*;
use crate::unknown;

/// What an agent is, with what is used of its budget, or why it cannot be read.
type ReadAgent = Result<(Arc<AgentDefinition>, Option<Budget>), Unreadable>;

impl Verb<'_> {
    pub(super) fn due(&self, now: Timestamp, after: Option<Mark>, limit: u32) -> Done<Vec<Due>> {
        struct Row {
            id: ScheduleId,
            agent: AgentId,
            name: String,
            definition: String,
            format: i32,
            version: i64,
            standing: Standing,
            unreadable: Option<String>,
        }
        let after = after.map_or((i64::MIN, i64::MIN), |(due_at, schedule)| (micros(due_at), schedule));
        let rows = self.rows(
            "select t.due_at, t.schedule_id, t.kind, t.tick_at, t.version, s.agent_id, s.name, s.definition, s.format,
                    st.origin, st.cursor_at, st.waits_for is not null as waits, st.skip_reason, st.skip_from, st.skip_to, st.skip_count
             from timers t cross join schedules s on s.id = t.schedule_id cross join schedule_state st on st.schedule_id = t.schedule_id
             where t.due_at <= ? and (t.due_at, t.schedule_id) > (?, ?) and t.schedule_id not in (select value from json_each(?))
             order by t.due_at, t.schedule_id limit ?",
            params![micros(now), after.0, after.1, to_json(&self.shared.unread.not_planned())?, limit],
            |row| {
                let standing = Standing {
                    token: token_of(row)?,
                    origin: maybe_instant(row, "origin")?,
                    open_skip: open_skip_of(row)?,
                    cursor_at: maybe_instant(row, "cursor_at")?,
                    waits: row.get("waits")?,
                };
                Ok(Row {
                    id: row.get("schedule_id")?,
                    agent: row.get("agent_id")?,
                    name: text(row, "name")?,
                    definition: json(row, "definition")?,
                    format: number(row, "format")?,
                    version: row.get("version")?,
                    unreadable: unknown::timer_kind(number(row, "kind")?)
                        .1
                        .or_else(|| unknown::timer_instants(&standing.token)),
                    standing,
                })
            },
        )?;
        let mut agents: HashMap<AgentId, ReadAgent> = HashMap::new();
        let mut due = Vec::with_capacity(rows.len());
        for row in rows {
            let compiled = match row.unreadable {
                None => self.compile(row.id, &row.name, &row.definition),
                Some(words) => Err(Arc::from(words)),
            };
            if let std::collections::hash_map::Entry::Vacant(place) = agents.entry(row.agent) {
                place.insert(
                    match self.read_agent(row.agent)?.unwrap_or_else(|| Ok(AgentDefinition::default())) {
                        Ok(definition) => {
                            let budget =
                                if definition.budget.is_some() { self.budget_of(row.agent)? } else { None };
                            Ok((Arc::new(definition), budget))
                        }
                        Err(why) => Err(why),
                    },
                );
            }
            let unreadable = self.why_unreadable(row.id, &row.name, row.format, &row.definition);
            let (agent_definition, budget) = match (unreadable, &agents[&row.agent]) {
                (None, Ok(agent)) => agent,
                // Another version may be able to read it: it stays as it is.
                (Some(why), _) => {
                    self.shared.unread.add(row.id, &why);
                    continue;
                }
                (None, Err(why)) => {
                    self.shared.unread.add(row.id, why);
                    continue;
                }
            };
            let (mut live, mut pending, mut breaker, mut last_start) = (0, 0, Breaker::default(), None);
            if let Ok(schedule) = &compiled {
                let options = schedule.options();
                (live, pending) = self.count_in_scope(Overlap::of(options, row.agent, row.id))?;
                if options.overlap != Scope::Schedule {
                    last_start = self.last_start(row.id)?;
                }
                if agent_definition.breaker.is_some() {
                    breaker = self.breaker_of(row.agent, &options.command)?;
                }
            }
            due.push(Due {
                schedule: row.id,
                agent: row.agent,
                name: Arc::from(row.name),
                compiled,
                agent_definition: agent_definition.clone(),
                version: row.version,
                standing: row.standing,
                live,
                pending,
                breaker,
                budget: *budget,
                last_start,
            });
        }
        Ok(due)
    }

    /// See [`Due::last_start`].
    fn last_start(&self, schedule: ScheduleId) -> Done<Option<Timestamp>> {
        let sql = "select coalesce(h.started_at, h.finished_at) as last_start from schedule_state st
                   join history h on h.id = st.last_run where st.schedule_id = ?";
        Ok(self.row(sql, [schedule], |row| maybe_instant(row, "last_start"))?.flatten())
    }

    /// Each plan sees the places that those before it have left.
    pub(super) fn commit_and_arm(&self, now: Timestamp, commit: &Commit) -> Done<Committed> {
        let committed = self.commit(now, commit)?;
        self.arm_deferred()?;
        Ok(committed)
    }

    fn commit(&self, now: Timestamp, commit: &Commit) -> Done<Committed> {
        let id = commit.schedule;
        // An instant that is out of range is stored as another than was read.
        let consumed = match unknown::timer_instants(&commit.token) {
            None => self.execute(
                "delete from timers where due_at = ? and schedule_id = ? and version = ?",
                params![micros(commit.token.due_at), id, commit.version],
            )?,
            Some(_) => self.execute(
                "delete from timers where schedule_id = ? and version = ?",
                params![id, commit.version],
            )?,
        };
        let unchecked = self.shared.sabotage.is(Sabotage::NoTokenCheck);
        if consumed == 0 && !unchecked {
            return Ok(Committed::Lost);
        }
        if commit.token.kind == TokenKind::Resume && commit.invalid.is_none() {
            return self.commit_resume(commit);
        }
        if let Some(lane) = self.full_lane(commit)? {
            self.defer(now, commit, lane)?;
            return Ok(Committed::Deferred);
        }
        // Only a scope beyond the schedule can have grown without touching its token.
        let grown = commit.scope != Scope::Schedule && self.count_in_scope(commit.overlap())?.0 > commit.live;
        if grown || !self.take_probe(now, commit)? {
            self.put_back(commit)?;
            return Ok(Committed::Lost);
        }
        if commit.was_deferred() {
            self.end_deferral(id)?;
        }
        if commit.cancel_live {
            for (run, _) in self.runs_in_scope(commit.overlap())? {
                self.cancel(now, run, Reason::Overlap)?;
            }
        }
        self.add_skips(id, &commit.closed)?;
        for run in &commit.runs {
            self.insert_run(now, run)?;
        }
        if commit.open_skip_before.is_some() || commit.open_skip.is_some() {
            let open = commit.open_skip;
            self.execute(
                "update schedule_state set skip_reason = ?, skip_from = ?, skip_to = ?, skip_count = ? where schedule_id = ?",
                params![
                    open.map(|open| open.reason.code()),
                    open.map(|open| micros(open.from)),
                    open.map(|open| micros(open.to)),
                    open.map(|open| open.count as i64),
                    id
                ],
            )?;
        }
        if let Some(origin) = commit.origin {
            self.execute(
                "update schedule_state set origin = ? where schedule_id = ?",
                params![micros(origin), id],
            )?;
        }
        if let Some(cursor_at) = commit.cursor_at {
            self.execute(
                "update schedule_state set cursor_at = ?1, planned_at = coalesce(?2, planned_at) where schedule_id = ?3",
                params![micros(cursor_at), commit.planned_at.map(micros), id],
            )?;
        }
        match commit.next {
            Arm::Token(token) if unchecked => self.set_token(id, Some(token))?,
            Arm::Token(token) => self.add_token(id, token)?,
            Arm::Wait(run) => {
                self.execute(
                    "update schedule_state set waits_for = ? where schedule_id = ?",
                    params![bytes(run), id],
                )?;
            }
            Arm::Exhausted => {
                let status = match &commit.invalid {
                    Some(reason) => Status::Invalid { reason: reason.clone() },
                    None => Status::Exhausted,
                };
                self.set_status(id, &status, now)?;
            }
        }
        Ok(Committed::Held)
    }

    /// Puts the token of a plan back that does not hold: nobody has planned on anything newer.
    pub(super) fn put_back(&self, commit: &Commit) -> Done<()> {
        let token = commit.token;
        let version = commit.version;
        self.execute(
            "insert into timers (due_at, schedule_id, kind, tick_at, version) values (?, ?, ?, ?, ?)",
            params![micros(token.due_at), commit.schedule, token.kind.code(), micros(token.tick_at), version],
        )
        .map(drop)
    }

    /// Moves a breaker to half open for the probe that a plan makes; `false` if somebody else has the probe.
    fn take_probe(&self, now: Timestamp, commit: &Commit) -> Done<bool> {
        let Some(run) = commit.runs.iter().find(|run| run.probe) else { return Ok(true) };
        let Some(policy) = self.agent_definition(commit.agent)?.and_then(|agent| agent.breaker) else {
            return Ok(true);
        };
        let breaker = self.breaker_of(commit.agent, &run.command)?;
        if breaker.admits(&policy, now) != Admits::Probe {
            return Ok(false);
        }
        let (next, transition) = breaker.probing(run.id, now);
        self.put_breaker(commit.agent, &run.command, &next, transition)?;
        Ok(true)
    }

    pub(super) fn breaker_of(&self, agent: AgentId, command: &str) -> Done<Breaker> {
        let text = self.row(
            "select breaker from breakers where agent_id = ? and command = ?",
            params![agent, command],
            |row| text(row, 0),
        )?;
        // One that cannot be read counts from zero; the next end writes it anew.
        let breaker: Breaker = text.and_then(|text| from_json(&text).ok()).unwrap_or_default();
        let Some(probe) = breaker.probe else { return Ok(breaker) };
        let lives = self.row("select 1 from live where id = ?", [bytes(probe)], |_| Ok(()))?.is_some();
        Ok(breaker.with_probe_if(|_| lives))
    }

    /// Closes the breakers of an agent that has no policy for them any more.
    pub(super) fn clear_breakers(&self, now: Timestamp, agent: AgentId) -> Done<()> {
        let own = self.rows("select command from breakers where agent_id = ?", [agent], |row| {
            row.get::<_, String>(0)
        })?;
        for command in own {
            let (next, transition) = self.breaker_of(agent, &command)?.reset(now);
            self.put_breaker(agent, &command, &next, transition)?;
        }
        Ok(())
    }

    pub(super) fn put_breaker(
        &self,
        agent: AgentId,
        command: &str,
        breaker: &Breaker,
        transition: Option<Transition>,
    ) -> Done<()> {
        self.execute(
            "insert into breakers (agent_id, command, breaker) values (?, ?, ?)
             on conflict (agent_id, command) do update set breaker = excluded.breaker",
            params![agent, command, to_json(breaker)?],
        )?;
        if let Some(transition) = transition {
            self.execute(
                "insert into breaker_log (agent_id, command, transition) values (?, ?, ?)",
                params![agent, command, to_json(&transition)?],
            )?;
            self.execute(
                "delete from breaker_log where agent_id = ?1 and command = ?2 and number <=
                   (select number from breaker_log where agent_id = ?1 and command = ?2 order by number desc limit 1 offset ?3)",
                params![agent, command, BREAKER_CHANGES_MAX as i64],
            )?;
        }
        Ok(())
    }

    pub(super) fn budget_of(&self, agent: AgentId) -> Done<Option<Budget>> {
        self.row("select period_start, failures from budgets where agent_id = ?", [agent], |row| {
            Ok(unknown::budget(instant(row, "period_start")?, row.get("failures")?))
        })
        .map(Option::flatten)
    }

    pub(super) fn insert_run(&self, now: Timestamp, new: &NewRun) -> Done<()> {
        let gates = self.gates_of(new.agent, new.schedule, &new.command, new.gates, new.trigger)?;
        let queue = self.queue(&new.lane, &new.needs, gates.is_gated())?;
        self.execute(
            "insert into live (id, state, queue_id, rank, due_at, not_before, schedule_id, tick_at, agent_id, command, trigger,
                               agent_gate, turn_gate, command_gate, whole_gate, alone_gate, own_lane, epoch, attempt, max_attempts,
                               prompt, payload, trace_id, created_at)
             values (?, 0, ?, ?, ?4, ?4, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, ?, ?, ?, ?, ?)",
            params![
                bytes(new.id),
                queue,
                -i64::from(new.priority),
                micros(new.not_before),
                new.schedule,
                new.tick_at.map(micros),
                new.agent,
                new.command,
                new.trigger.code(),
                gates.agent,
                gates.turn,
                gates.command,
                gates.whole,
                gates.alone,
                new.own_lane,
                new.max_attempts,
                new.prompt,
                new.payload.to_string(),
                new.trace_id.map(uuid::Uuid::into_bytes),
                micros(now),
            ],
        )
        .map(drop)
    }

    /// The number of a gate; all but limits are for one at a time.
    pub(super) fn gate(&self, kind: i64, key: &str) -> Done<i64> {
        let find = |verb: &Self| {
            verb.row("select id from gates where kind = ? and key = ?", params![kind, key], |row| row.get(0))
        };
        if let Some(id) = find(self)? {
            return Ok(id);
        }
        self.execute(
            "insert into gates (kind, key, cap) values (?, ?, ?)",
            params![kind, key, (kind != GATE_AGENT).then_some(1)],
        )?;
        Ok(self.connection.last_insert_rowid())
    }

    pub(super) fn queue(&self, lane: &str, needs: &[String], gated: bool) -> Done<i64> {
        let needs = to_json(&needs)?;
        let known = self.row(
            "select id from queues where lane = ? and needs = ? and gated = ?",
            params![lane, needs, gated],
            |row| row.get(0),
        )?;
        if let Some(id) = known {
            return Ok(id);
        }
        self.execute(
            "insert into queues (lane, needs, gated) values (?, ?, ?)",
            params![lane, needs, gated],
        )?;
        Ok(self.connection.last_insert_rowid())
    }

    /// As [`Verb::enqueue`], also for a run with a command that its schedule had before, which may be no scope any more.
    pub(super) fn enqueue_in_scope(&self, now: Timestamp, request: &Enqueue) -> Done<Enqueued> {
        let (answer, run) = (self.enqueue(now, request)?, &request.run);
        if answer == Enqueued::Made && run.wants_command() {
            let sql = "select 1 from scopes where agent_id = ? and command = ?";
            if self.row(sql, params![run.agent, run.command], |_| Ok(()))?.is_none() {
                self.edited.borrow_mut().insert(run.agent);
            }
        }
        Ok(answer)
    }

    pub(super) fn enqueue(&self, now: Timestamp, request: &Enqueue) -> Done<Enqueued> {
        let run = &request.run;
        let known =
            self.row("select 1 from schedules where id = ? and retired_at is null", [run.schedule], |_| {
                Ok(())
            })?;
        if known.is_none() {
            return Ok(Enqueued::NotFound);
        }
        if let Some(tick_at) = run.tick_at
            && let Some(first) = self.row(
                "select id from live where schedule_id = ? and tick_at = ?",
                params![run.schedule, micros(tick_at)],
                |row| row.get(0).map(run_id),
            )?
        {
            return Ok(Enqueued::Repeat(first));
        }
        match self.first_with(now, run.schedule, request.key.as_ref())? {
            Some((first, true)) => return Ok(Enqueued::Repeat(first)),
            Some((first, false)) => return Ok(Enqueued::KeyReused(first)),
            None => {}
        }
        if let Some(key) = &request.key {
            self.take_key(run.schedule, key, run.id)?;
        }
        self.insert_run(now, run)?;
        // A plan that did not know of this run is not committed.
        self.touch(run.schedule)?;
        Ok(Enqueued::Made)
    }

    /// The run that has an idempotency key, and whether it was asked for with the same body.
    pub(super) fn first_with(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        key: Option<&Key>,
    ) -> Done<Option<(RunId, bool)>> {
        let Some(key) = key else { return Ok(None) };
        self.row(
            "select run_id, body_hash from idempotency where schedule_id = ? and key = ? and expires_at > ?",
            params![schedule, key.key, micros(now)],
            |row| Ok((run_id(row.get(0)?), row.get::<_, Vec<u8>>(1)? == key.body_hash)),
        )
    }

    pub(super) fn take_key(&self, schedule: ScheduleId, key: &Key, run: RunId) -> Done<()> {
        self.execute(
            "insert or replace into idempotency (schedule_id, key, body_hash, run_id, expires_at) values (?, ?, ?, ?, ?)",
            params![schedule, key.key, key.body_hash, bytes(run), micros(key.expires_at)],
        )
        .map(drop)
    }

    pub(super) fn cancel(&self, now: Timestamp, run: RunId, reason: Reason) -> Done<Cancelled> {
        // A node that is not there hears nothing: somebody has removed it by hand.
        let live = self.row(
            "select state, (select id from nodes where id = node_id) from live where id = ?",
            [bytes(run)],
            |row| Ok((row.get::<_, i64>(0)?, maybe_id(row, 1)?)),
        )?;
        match live {
            Some((2, Some(node))) => {
                self.execute(
                    "update live set cancel_reason = ? where id = ? and cancel_reason is null",
                    params![reason.code(), bytes(run)],
                )?;
                Ok(Cancelled::Told(node_id(node)))
            }
            Some(_) => {
                self.end(now, run, RunState::Cancelled, reason)?;
                Ok(Cancelled::Ended)
            }
            None => {
                let ended =
                    self.row("select state from history where id = ?", [bytes(run)], |row| number(row, 0))?;
                Ok(ended.and_then(RunState::from_code).map_or(Cancelled::NotFound, Cancelled::Before))
            }
        }
    }
}

pub(super) fn token_of(row: &rusqlite::Row<'_>) -> rusqlite::Result<Token> {
    let (kind, _) = unknown::timer_kind(number(row, "kind")?);
    Ok(Token { kind, tick_at: instant(row, "tick_at")?, due_at: instant(row, "due_at")? })
}

pub(super) fn open_skip_of(row: &rusqlite::Row<'_>) -> rusqlite::Result<Option<SkipRange>> {
    let reason: Option<i16> = maybe_number(row, "skip_reason")?;
    let Some(reason) = reason.map(unknown::skip_reason) else { return Ok(None) };
    let span =
        (maybe_instant(row, "skip_from")?, maybe_instant(row, "skip_to")?, maybe_number(row, "skip_count")?);
    let (Some(from), Some(to), Some(count)) = span else { return Ok(None) };
    Ok(Some(SkipRange { reason, from, to, count }))
}
