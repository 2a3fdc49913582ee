//! The end of an attempt, and all that hangs on it: history, the schedule's last result and next token, breaker, budget,
//! and the release of what waits behind a gate. Every verb that takes runs away comes through [`Postgres::settle`].

use std::collections::{BTreeSet, HashMap, HashSet};

use belfry_core::breaker::{Breaker, Transition};
use belfry_core::budget::{self, Budget};
use belfry_core::retry::Verdict;
use belfry_core::{AgentDefinition, AgentId, Reason, RunId, RunState, ScheduleId, Token};
use belfry_time::Timestamp;
use uuid::Uuid;

use super::connection::{Fault, Tx};
use super::rows::{self, Live, get, live_columns, small};
use super::{Postgres, set_tokens};
use crate::Error;
use crate::sabotage::Sabotage;
use crate::shapes::*;

/// A run that stops running or waiting.
pub(super) struct Change {
    pub(super) live: Live,
    /// Whether its attempt failed: it counts against the budget.
    pub(super) failed: bool,
    pub(super) then: Then,
}

/// What becomes of it.
pub(super) enum Then {
    End { state: RunState, reason: Option<Reason>, summary: Option<String>, arm: Option<Token> },
    Return { not_before: Timestamp, counted: bool },
}

impl Change {
    pub(super) fn end(live: Live, state: RunState, reason: Option<Reason>) -> Change {
        Change { live, failed: false, then: Then::End { state, reason, summary: None, arm: None } }
    }

    pub(super) fn back(live: Live, not_before: Timestamp, counted: bool) -> Change {
        Change { live, failed: false, then: Then::Return { not_before, counted } }
    }
}

/// Breakers and budgets of agents whose rows are locked.
#[derive(Default)]
pub(super) struct Books {
    agents: HashMap<AgentId, AgentDefinition>,
    breakers: HashMap<(AgentId, String), Breaker>,
    budgets: HashMap<AgentId, Budget>,
    touched_breakers: HashSet<(AgentId, String)>,
    touched_budgets: HashSet<AgentId>,
    log: Vec<(AgentId, String, Transition)>,
}

impl Books {
    /// Locks the agents of runs that have a breaker or a budget, and opens their books.
    pub(super) async fn of_runs(tx: &mut Tx<'_>, runs: &[Uuid]) -> Result<Books, Fault> {
        let sql = "select a.id, a.definition from agents a \
                   where a.id = any(array(select distinct agent_id from live where id = any($1))) \
                   and (a.policies or exists (select 1 from budgets b where b.agent_id = a.id)) \
                   order by a.id for no key update of a";
        let agents = tx.query(sql, &[&runs]).await?;
        Books::open(tx, agents).await
    }

    /// Locks agents and opens their books.
    pub(super) async fn of_agents(tx: &mut Tx<'_>, agents: &[AgentId]) -> Result<Books, Fault> {
        let sql = "select id, definition from agents where id = any($1) order by id for no key update";
        let agents = tx.query(sql, &[&agents]).await?;
        Books::open(tx, agents).await
    }

    async fn open(tx: &mut Tx<'_>, agents: Vec<tokio_postgres::Row>) -> Result<Books, Fault> {
        let mut books = Books::default();
        for row in &agents {
            books.agents.insert(get(row, "id")?, definition(row)?);
        }
        if books.agents.is_empty() {
            return Ok(books);
        }
        let ids: Vec<AgentId> = books.agents.keys().copied().collect();
        for row in tx.query("select * from breakers where agent_id = any($1)", &[&ids]).await? {
            let place = (get(&row, "agent_id")?, get(&row, "command")?);
            books.breakers.insert(place, breaker(&row)?);
        }
        for row in tx.query("select * from budgets where agent_id = any($1)", &[&ids]).await? {
            books.budgets.insert(get(&row, "agent_id")?, budget(&row)?);
        }
        Ok(books)
    }

    /// Reads again what somebody else in this transaction may have written.
    pub(super) async fn reopen(&mut self, tx: &mut Tx<'_>) -> Result<(), Fault> {
        let agents: Vec<AgentId> = self.agents.keys().copied().collect();
        *self = Books::of_agents(tx, &agents).await?;
        Ok(())
    }

    fn spend(&mut self, now: Timestamp, agent: AgentId) {
        if let Some(policy) = self.agents.get(&agent).and_then(|definition| definition.budget) {
            let used = budget::after_failure(self.budgets.get(&agent).copied(), &policy, now);
            self.budgets.insert(agent, used);
            self.touched_budgets.insert(agent);
        }
    }

    fn ended(&mut self, now: Timestamp, live: &Live, state: RunState) {
        if let Some(policy) = self.agents.get(&live.agent).and_then(|definition| definition.breaker) {
            let place = (live.agent, live.command.clone());
            let before = self.breakers.get(&place).copied().unwrap_or_default();
            self.turn(place, before.ended(&policy, live.id, state, now), before);
        }
        if state == RunState::Completed && self.budgets.remove(&live.agent).is_some() {
            self.touched_budgets.insert(live.agent);
        }
    }

    fn turn(&mut self, place: (AgentId, String), next: (Breaker, Option<Transition>), before: Breaker) {
        let (next, transition) = next;
        self.log.extend(transition.map(|transition| (place.0, place.1.clone(), transition)));
        if next != before {
            self.breakers.insert(place.clone(), next);
            self.touched_breakers.insert(place);
        }
    }

    /// Moves a breaker to half open for the probe that a plan makes; `false` if somebody else has the probe.
    pub(super) fn take_probe(&mut self, now: Timestamp, commit: &Commit) -> bool {
        let Some(run) = commit.runs.iter().find(|run| run.probe) else { return true };
        let Some(policy) = self.agents.get(&commit.agent).and_then(|definition| definition.breaker) else {
            return true;
        };
        let place = (commit.agent, run.command.clone());
        let before = self.breakers.get(&place).copied().unwrap_or_default();
        if before.admits(&policy, now) != belfry_core::breaker::Admits::Probe {
            return false;
        }
        self.turn(place, before.probing(run.id, now), before);
        true
    }

    /// Writes what has changed.
    pub(super) async fn close(&mut self, tx: &mut Tx<'_>) -> Result<(), Fault> {
        for (agent, command) in self.touched_breakers.drain() {
            let next = self.breakers.get(&(agent, command.clone())).copied().unwrap_or_default();
            write_breaker(tx, agent, &command, &next).await?;
        }
        for (agent, command, transition) in self.log.drain(..) {
            write_transition(tx, agent, &command, &transition).await?;
        }
        for agent in self.touched_budgets.drain() {
            match self.budgets.get(&agent) {
                None => tx.execute("delete from budgets where agent_id = $1", &[&agent]).await?,
                Some(budget) => {
                    let sql = "insert into budgets (agent_id, period_start, failures) values ($1, $2, $3) \
                               on conflict (agent_id) do update set period_start = excluded.period_start, \
                               failures = excluded.failures";
                    tx.execute(sql, &[&agent, &budget.period_start, &i64::from(budget.failures)]).await?
                }
            };
        }
        Ok(())
    }
}

/// Locks running runs, after the agents that keep books on them, and reads them in the order of their ids.
pub(super) async fn lock_running(tx: &mut Tx<'_>, runs: &[Uuid]) -> Result<(Books, Vec<Live>), Fault> {
    let books = Books::of_runs(tx, runs).await?;
    let sql = concat!(
        "select ",
        live_columns!(),
        " from live l join queues q on q.id = l.queue_id where l.id = any($1) and l.state + 0 = 2 \
          order by l.id for update of l"
    );
    let found = tx.query(sql, &[&runs]).await?;
    Ok((books, found.iter().map(Live::read).collect::<Result<_, Fault>>()?))
}

/// Locks waiting runs: their agents, schedules and gates first, so that no claim can hold what we wait for.
pub(super) async fn lock_waiting(tx: &mut Tx<'_>, runs: &[Uuid]) -> Result<(Books, Vec<Live>), Fault> {
    let books = Books::of_runs(tx, runs).await?;
    let sql = "select schedule_id, agent_gate, turn_gate from live where id = any($1) and state <> 2";
    let (mut schedules, mut gates) = (BTreeSet::new(), BTreeSet::new());
    for row in tx.query(sql, &[&runs]).await? {
        schedules.insert(get::<i64>(&row, "schedule_id")?);
        gates.extend(get::<Option<i64>>(&row, "agent_gate")?);
        gates.extend(get::<Option<i64>>(&row, "turn_gate")?);
    }
    let schedules: Vec<i64> = schedules.into_iter().collect();
    let sql =
        "select 1 from schedule_state where schedule_id = any($1) order by schedule_id for no key update";
    tx.query(sql, &[&schedules]).await?;
    lock_gates(tx, &gates.into_iter().collect::<Vec<_>>()).await?;
    let sql = concat!(
        "select ",
        live_columns!(),
        " from live l join queues q on q.id = l.queue_id where l.id = any($1) and l.state <> 2 \
          order by l.id for update of l"
    );
    let found = tx.query(sql, &[&runs]).await?;
    Ok((books, found.iter().map(Live::read).collect::<Result<_, Fault>>()?))
}

async fn lock_gates(tx: &mut Tx<'_>, gates: &[i64]) -> Result<(), Fault> {
    if !gates.is_empty() {
        let sql = "select id from gates where id = any($1) order by id for no key update";
        tx.query(sql, &[&gates]).await?;
    }
    Ok(())
}

/// Un-parks, at each gate and for each queue, as many runs as the gate has room for. By queue, because who serves one
/// may not be able to serve another.
pub(super) const RELEASE: &str = "update live set state = 0, parked_on = null where state + 0 = 1 and id = any(array( \
    select w.id from ( \
        select g.id, coalesce(g.cap, 2147483647) \
            - (select count(*) from live r where r.state = 2 and r.agent_gate = g.id) \
            - (select count(*) from live r where r.state = 2 and r.turn_gate = g.id) as room \
        from gates g where g.id = any($1) \
        and exists (select 1 from live p where p.state = 1 and p.parked_on = g.id) \
    ) f cross join (select id from queues where gated) q cross join lateral ( \
        select p.id from live p where p.state = 1 and p.parked_on = f.id and p.queue_id = q.id \
        order by p.rank, p.not_before, p.id limit greatest(f.room, 0) \
    ) w))";

impl Postgres {
    pub(super) async fn finish_in(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        finishes: &[Finish],
    ) -> Result<Vec<Finished>, Fault> {
        let ids: Vec<Uuid> = finishes.iter().map(|finish| finish.run.0).collect();
        let blind = self.sabotage.is(Sabotage::FinishWithoutEpoch);
        let (books, mut found) = lock_running(tx, &ids).await?;
        if blind {
            found.extend(lock_waiting(tx, &ids).await?.1);
        }
        let mut found: HashMap<RunId, Live> = found.into_iter().map(|live| (live.id, live)).collect();
        let mut changes = Vec::new();
        let mut answers = Vec::with_capacity(finishes.len());
        for finish in finishes {
            let is_ours = |live: &Live| blind || live.epoch == finish.epoch;
            let ours = found.get(&finish.run).is_some_and(is_ours);
            let Some(mut live) = ours.then(|| found.remove(&finish.run)).flatten() else {
                answers.push(Finished::Stale);
                continue;
            };
            live.exit_code = finish.exit_code;
            live.error.clone_from(&finish.error);
            // Whoever is to be cancelled does not wait for another attempt.
            let verdict = match (finish.verdict, live.cancel) {
                (Verdict::Retry { .. } | Verdict::Return, Some(reason)) => {
                    Verdict::End { state: RunState::Cancelled, reason: Some(reason) }
                }
                (verdict, _) => verdict,
            };
            let (then, answer) = match verdict {
                Verdict::End { state, reason } => {
                    let summary = finish.summary.clone();
                    (Then::End { state, reason, summary, arm: finish.arm }, Finished::Ended(state))
                }
                Verdict::Retry { at } => (Then::Return { not_before: at, counted: true }, Finished::Pending),
                Verdict::Return => (Then::Return { not_before: now, counted: false }, Finished::Pending),
            };
            answers.push(answer);
            changes.push(Change { live, failed: finish.failed, then });
        }
        self.settle(tx, now, books, changes).await?;
        Ok(answers)
    }

    pub(super) async fn cancel_in(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        run: RunId,
        reason: Reason,
    ) -> Result<Cancelled, Fault> {
        if let Some(node) = mark(tx, &[run.0], reason).await?.pop() {
            return Ok(Cancelled::Told(node));
        }
        if self.end_waiting(tx, now, &[run.0], reason).await? > 0 {
            return Ok(Cancelled::Ended);
        }
        let before = tx.query("select state from history where id = $1", &[&run.0]).await?;
        if let Some(row) = before.first() {
            return Ok(Cancelled::Before(rows::run_state(get(row, "state")?)?));
        }
        // It was claimed or ended between two of our looks.
        match tx.query("select 1 from live where id = $1", &[&run.0]).await?.is_empty() {
            true => Ok(Cancelled::NotFound),
            false => Err(Fault::Again),
        }
    }

    /// Ends those of the given runs that wait, and says how many did.
    pub(super) async fn end_waiting(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        runs: &[Uuid],
        reason: Reason,
    ) -> Result<u32, Fault> {
        let (books, found) = lock_waiting(tx, runs).await?;
        let ended = found.len() as u32;
        let end = |live| Change::end(live, RunState::Cancelled, Some(reason));
        self.settle(tx, now, books, found.into_iter().map(end).collect()).await?;
        Ok(ended)
    }

    /// Writes what becomes of runs that are locked, and releases what waits behind their gates.
    pub(super) async fn settle(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        mut books: Books,
        changes: Vec<Change>,
    ) -> Result<(), Fault> {
        if changes.is_empty() {
            return Ok(());
        }
        let gates: BTreeSet<i64> = changes.iter().flat_map(|change| change.live.gates()).collect();
        let mut schedules = Schedules::lock(tx, &changes).await?;
        let (mut history, mut returns) = (Vec::new(), Vec::new());
        for change in changes {
            let Change { live, failed, then } = change;
            if failed {
                books.spend(now, live.agent);
            }
            match then {
                Then::Return { not_before, counted } => returns.push((live, not_before, counted)),
                Then::End { state, reason, summary, arm } => {
                    books.ended(now, &live, state);
                    let (prev_run, ordinal) = schedules.ended(now, &live, state, reason, arm);
                    history.push(Past { live, state, reason, summary, prev_run, ordinal });
                }
            }
        }
        schedules.write(tx, now).await?;
        books.close(tx).await?;
        write_history(tx, now, &history).await?;
        write_returns(tx, &returns).await?;
        self.release(tx, &gates.into_iter().collect::<Vec<_>>()).await
    }

    /// Locks gates, and un-parks what they have room for. The second statement sees all that ended before the lock.
    pub(super) async fn release(&self, tx: &mut Tx<'_>, gates: &[i64]) -> Result<(), Fault> {
        if gates.is_empty() {
            return Ok(());
        }
        if self.sabotage.is(Sabotage::ReleaseOutsideLock) {
            let elsewhere = self.pool.connect().await?;
            elsewhere.execute(RELEASE, &[&gates]).await?;
            return Ok(());
        }
        lock_gates(tx, gates).await?;
        tx.execute(RELEASE, &[&gates]).await?;
        Ok(())
    }
}

/// Marks running runs for their nodes, and says which nodes these are.
pub(super) async fn mark(
    tx: &mut Tx<'_>,
    runs: &[Uuid],
    reason: Reason,
) -> Result<Vec<belfry_core::NodeId>, Fault> {
    let sql = "update live set cancel_reason = coalesce(cancel_reason, $2) \
               where id = any($1) and state + 0 = 2 returning node_id";
    let told = tx.query(sql, &[&runs, &reason.code()]).await?;
    told.iter().map(|row| Ok(belfry_core::NodeId(get(row, "node_id")?))).collect()
}

/// The states of schedules whose runs end.
struct Schedules {
    rows: HashMap<ScheduleId, ScheduleState>,
    tokens: Vec<(ScheduleId, Token)>,
    retired: Vec<ScheduleId>,
}

#[derive(Clone)]
struct ScheduleState {
    retired: bool,
    delete_after_run: bool,
    status: i16,
    waits_for: Option<Uuid>,
    last: Option<(Uuid, i16, Option<Timestamp>)>,
    last_success: Option<(Timestamp, Uuid)>,
    last_error: Option<String>,
    streak: i64,
    last_failed: Option<Uuid>,
    last_other: Option<Uuid>,
    fired_at: Option<Timestamp>,
    ended_failed: i64,
    ended_other: i64,
}

impl Schedules {
    async fn lock(tx: &mut Tx<'_>, changes: &[Change]) -> Result<Schedules, Fault> {
        let ending = changes.iter().filter(|change| matches!(change.then, Then::End { .. }));
        let ids: BTreeSet<ScheduleId> = ending.map(|change| change.live.schedule).collect();
        let mut rows = HashMap::new();
        if !ids.is_empty() {
            let ids: Vec<ScheduleId> = ids.into_iter().collect();
            let sql = "select * from schedule_state where schedule_id = any($1) \
                       order by schedule_id for no key update";
            for row in tx.query(sql, &[&ids]).await? {
                let success: Option<Timestamp> = get(&row, "last_success_at")?;
                let state = ScheduleState {
                    retired: get(&row, "retired")?,
                    delete_after_run: get(&row, "delete_after_run")?,
                    status: get(&row, "status")?,
                    waits_for: get(&row, "waits_for")?,
                    last: None,
                    last_success: success.zip(get(&row, "last_success_run")?),
                    last_error: get(&row, "last_error")?,
                    streak: get(&row, "streak")?,
                    last_failed: get(&row, "last_failed")?,
                    last_other: get(&row, "last_other")?,
                    fired_at: get(&row, "fired_at")?,
                    ended_failed: get(&row, "ended_failed")?,
                    ended_other: get(&row, "ended_other")?,
                };
                rows.insert(get(&row, "schedule_id")?, state);
            }
        }
        Ok(Schedules { rows, tokens: Vec::new(), retired: Vec::new() })
    }

    /// Takes the end of a run into its schedule's state, and gives the run before it in its chain, and its place there.
    fn ended(
        &mut self,
        now: Timestamp,
        live: &Live,
        state: RunState,
        reason: Option<Reason>,
        arm: Option<Token>,
    ) -> (Option<Uuid>, i64) {
        let Some(row) = self.rows.get_mut(&live.schedule) else { return (None, 0) };
        row.last = Some((live.id.0, state.code(), live.tick_at));
        row.fired_at = row.fired_at.max(live.tick_at);
        match state {
            RunState::Completed => {
                row.last_success = Some((now, live.id.0));
                row.last_error = None;
                row.streak = row.streak.max(0) + 1;
            }
            RunState::Failed => {
                let words = || reason.map_or("failed", Reason::as_str).to_owned();
                row.last_error = Some(live.error.clone().unwrap_or_else(words));
                row.streak = row.streak.min(0) - 1;
            }
            RunState::Cancelled | RunState::Pending | RunState::Running => {}
        }
        if row.waits_for == Some(live.id.0) {
            row.waits_for = None;
            if row.status == 0 && !row.retired {
                self.tokens.push((live.schedule, arm.unwrap_or(Token::next(now))));
            }
        } else if row.status == 4 && row.delete_after_run && !row.retired && live.tick_at.is_some() {
            // A one-shot that asked for it goes with the run of its tick.
            row.retired = true;
            self.retired.push(live.schedule);
        }
        let (head, ended) = match state {
            RunState::Failed => (&mut row.last_failed, &mut row.ended_failed),
            _ => (&mut row.last_other, &mut row.ended_other),
        };
        *ended += 1;
        (head.replace(live.id.0), *ended)
    }

    async fn write(self, tx: &mut Tx<'_>, now: Timestamp) -> Result<(), Fault> {
        let changed: Vec<_> = self.rows.iter().filter_map(|(id, row)| Some((*id, row, row.last?))).collect();
        if !changed.is_empty() {
            let ids: Vec<_> = changed.iter().map(|(id, ..)| *id).collect();
            let retired: Vec<_> = changed.iter().map(|(_, row, _)| row.retired).collect();
            let waits_for: Vec<_> = changed.iter().map(|(_, row, _)| row.waits_for).collect();
            let last_run: Vec<_> = changed.iter().map(|(.., last)| last.0).collect();
            let last_state: Vec<_> = changed.iter().map(|(.., last)| last.1).collect();
            let last_tick: Vec<_> = changed.iter().map(|(.., last)| last.2).collect();
            let success = |row: &ScheduleState| row.last_success.unzip();
            let success_at: Vec<_> = changed.iter().map(|(_, row, _)| success(row).0).collect();
            let success_run: Vec<_> = changed.iter().map(|(_, row, _)| success(row).1).collect();
            let errors: Vec<_> = changed.iter().map(|(_, row, _)| row.last_error.as_deref()).collect();
            let streaks: Vec<_> = changed.iter().map(|(_, row, _)| row.streak).collect();
            let last_failed: Vec<_> = changed.iter().map(|(_, row, _)| row.last_failed).collect();
            let last_other: Vec<_> = changed.iter().map(|(_, row, _)| row.last_other).collect();
            let fired_at: Vec<_> = changed.iter().map(|(_, row, _)| row.fired_at).collect();
            let ended_failed: Vec<_> = changed.iter().map(|(_, row, _)| row.ended_failed).collect();
            let ended_other: Vec<_> = changed.iter().map(|(_, row, _)| row.ended_other).collect();
            // The rows are there and locked: this is an update without a join, which could go wrong by the square.
            let sql = "insert into schedule_state (agent_id, edition, status, status_since, last_finished_at, \
                       schedule_id, retired, waits_for, last_run, last_state, last_tick_at, last_success_at, \
                       last_success_run, last_error, streak, last_failed, last_other, fired_at, \
                       ended_failed, ended_other) \
                       select 0, 0, 0, $1::timestamptz, $1::timestamptz, u.* from unnest($2::bigint[], \
                       $3::boolean[], $4::uuid[], $5::uuid[], $6::smallint[], $7::timestamptz[], \
                       $8::timestamptz[], $9::uuid[], $10::text[], $11::bigint[], $12::uuid[], $13::uuid[], \
                       $14::timestamptz[], $15::bigint[], $16::bigint[]) as u \
                       on conflict (schedule_id) do update set retired = excluded.retired, \
                       waits_for = excluded.waits_for, last_finished_at = excluded.last_finished_at, \
                       last_run = excluded.last_run, last_state = excluded.last_state, \
                       last_tick_at = excluded.last_tick_at, \
                       fired_at = excluded.fired_at, \
                       ended_failed = excluded.ended_failed, ended_other = excluded.ended_other, last_success_at = excluded.last_success_at, \
                       last_success_run = excluded.last_success_run, last_error = excluded.last_error, \
                       streak = excluded.streak, last_failed = excluded.last_failed, \
                       last_other = excluded.last_other";
            tx.execute(
                sql,
                &[
                    &now,
                    &ids,
                    &retired,
                    &waits_for,
                    &last_run,
                    &last_state,
                    &last_tick,
                    &success_at,
                    &success_run,
                    &errors,
                    &streaks,
                    &last_failed,
                    &last_other,
                    &fired_at,
                    &ended_failed,
                    &ended_other,
                ],
            )
            .await?;
        }
        if !self.retired.is_empty() {
            let sql = "update schedules set retired_at = $2 where id = any($1)";
            tx.execute(sql, &[&self.retired, &now]).await?;
        }
        set_tokens(tx, &self.tokens).await
    }
}

/// A run as history takes it.
struct Past {
    live: Live,
    state: RunState,
    reason: Option<Reason>,
    summary: Option<String>,
    prev_run: Option<Uuid>,
    ordinal: i64,
}

async fn write_history(tx: &mut Tx<'_>, now: Timestamp, past: &[Past]) -> Result<(), Fault> {
    if past.is_empty() {
        return Ok(());
    }
    /// One column of all rows.
    macro_rules! column {
        ($past:ident => $value:expr) => {
            past.iter().map(|$past| $value).collect::<Vec<_>>()
        };
    }
    let ids = column!(p => p.live.id.0);
    let sql = "delete from live where id = any($1)";
    tx.execute(sql, &[&ids]).await?;
    let sql = "insert into history (seq, finished_at, id, failed, prev_run, schedule_id, agent_id, command, trigger, \
               tick_at, not_before, state, reason, lane, attempt, max_attempts, epoch, node_id, exit_code, error, \
               summary, prompt, payload, trace_id, created_at, started_at, due_at, \
               ordinal) \
               select nextval('numbers'), $1::timestamptz, u.* from unnest($2::uuid[], $3::boolean[], $4::uuid[], \
               $5::bigint[], $6::bigint[], $7::text[], $8::smallint[], $9::timestamptz[], $10::timestamptz[], \
               $11::smallint[], $12::smallint[], $13::text[], $14::bigint[], $15::bigint[], $16::integer[], \
               $17::uuid[], $18::integer[], $19::text[], $20::text[], $21::text[], $22::text[], $23::uuid[], \
               $24::timestamptz[], $25::timestamptz[], $26::timestamptz[], \
               $27::bigint[]) as u";
    tx.execute(
        sql,
        &[
            &now,
            &ids,
            &column!(p => p.state == RunState::Failed),
            &column!(p => p.prev_run),
            &column!(p => p.live.schedule),
            &column!(p => p.live.agent),
            &column!(p => p.live.command.as_str()),
            &column!(p => p.live.trigger.code()),
            &column!(p => p.live.tick_at),
            &column!(p => p.live.not_before),
            &column!(p => p.state.code()),
            &column!(p => p.reason.map(Reason::code)),
            &column!(p => p.live.lane.as_str()),
            &column!(p => p.live.attempt),
            &column!(p => p.live.max_attempts),
            &column!(p => p.live.epoch),
            &column!(p => p.live.node.map(|node| node.0)),
            &column!(p => p.live.exit_code),
            &column!(p => p.live.error.as_deref()),
            &column!(p => p.summary.as_deref()),
            &column!(p => p.live.prompt.as_deref()),
            &column!(p => p.live.payload.as_str()),
            &column!(p => p.live.trace_id),
            &column!(p => p.live.created_at),
            &column!(p => p.live.started_at),
            &column!(p => p.live.due_at),
            &column!(p => p.ordinal),
        ],
    )
    .await?;
    Ok(())
}

/// Back to pending: ready, under no node.
async fn write_returns(tx: &mut Tx<'_>, returns: &[(Live, Timestamp, bool)]) -> Result<(), Fault> {
    if returns.is_empty() {
        return Ok(());
    }
    let ids: Vec<_> = returns.iter().map(|(live, ..)| live.id.0).collect();
    let not_before: Vec<_> = returns.iter().map(|(_, not_before, _)| *not_before).collect();
    let attempts: Vec<_> =
        returns.iter().map(|(live, _, counted)| (live.attempt - i64::from(!counted)).max(0)).collect();
    let exit_codes: Vec<_> = returns.iter().map(|(live, ..)| live.exit_code).collect();
    let errors: Vec<_> = returns.iter().map(|(live, ..)| live.error.as_deref()).collect();
    let sql = "update live set state = 0, node_id = null, parked_on = null, \
               due_at = coalesce(due_at, not_before), not_before = ($2::timestamptz[])[array_position($1::uuid[], id)], \
               attempt = ($3::bigint[])[array_position($1::uuid[], id)], \
               exit_code = ($4::integer[])[array_position($1::uuid[], id)], \
               error = ($5::text[])[array_position($1::uuid[], id)] where id = any($1)";
    tx.execute(sql, &[&ids, &not_before, &attempts, &exit_codes, &errors]).await?;
    Ok(())
}

pub(super) async fn reset_breaker(
    tx: &mut Tx<'_>,
    now: Timestamp,
    agent: AgentId,
    command: &str,
) -> Result<bool, Fault> {
    let mut books = Books::of_agents(tx, &[agent]).await?;
    let place = (agent, command.to_owned());
    let Some(before) = books.breakers.get(&place).copied() else { return Ok(false) };
    let next = before.reset(now);
    let changed = next.1.is_some();
    books.turn(place, next, before);
    books.close(tx).await?;
    Ok(changed)
}

pub(super) async fn reset_budget(tx: &mut Tx<'_>, agent: AgentId) -> Result<bool, Fault> {
    Books::of_agents(tx, &[agent]).await?;
    Ok(tx.execute("delete from budgets where agent_id = $1", &[&agent]).await? > 0)
}

async fn write_breaker(
    tx: &mut Tx<'_>,
    agent: AgentId,
    command: &str,
    breaker: &Breaker,
) -> Result<(), Fault> {
    let sql = "insert into breakers (agent_id, command, state, failures, opened_at, probe) \
               values ($1, $2, $3, $4, $5, $6) on conflict (agent_id, command) do update set \
               state = excluded.state, failures = excluded.failures, opened_at = excluded.opened_at, \
               probe = excluded.probe";
    let state = rows::breaker_code(breaker.state);
    let failures = i64::from(breaker.failures);
    let probe = breaker.probe.map(|run| run.0);
    tx.execute(sql, &[&agent, &command, &state, &failures, &breaker.opened_at, &probe]).await?;
    Ok(())
}

async fn write_transition(
    tx: &mut Tx<'_>,
    agent: AgentId,
    command: &str,
    transition: &Transition,
) -> Result<(), Fault> {
    let sql = "insert into breaker_log (agent_id, command, at, from_state, to_state, failures, reason, run_id) \
               values ($1, $2, $3, $4, $5, $6, $7, $8)";
    tx.execute(
        sql,
        &[
            &agent,
            &command,
            &transition.at,
            &rows::breaker_code(transition.from),
            &rows::breaker_code(transition.to),
            &i64::from(transition.failures),
            &rows::transition_code(transition.reason),
            &transition.run.map(|run| run.0),
        ],
    )
    .await?;
    Ok(())
}

pub(super) fn breaker(row: &tokio_postgres::Row) -> Result<Breaker, Fault> {
    Ok(Breaker {
        state: rows::breaker_state(get(row, "state")?)?,
        failures: small(get(row, "failures")?),
        opened_at: get(row, "opened_at")?,
        probe: get::<Option<Uuid>>(row, "probe")?.map(RunId),
    })
}

pub(super) fn budget(row: &tokio_postgres::Row) -> Result<Budget, Fault> {
    Ok(Budget { period_start: get(row, "period_start")?, failures: small(get(row, "failures")?) })
}

/// An agent's definition.
pub(super) fn definition(row: &tokio_postgres::Row) -> Result<AgentDefinition, Fault> {
    let text: &str = get(row, "definition")?;
    serde_json::from_str(text)
        .map_err(|error| Error::unexpected(format!("an agent's definition: {error}")).into())
}
