//! The end of an attempt, and all that hangs on it.

use std::rc::Rc;

use belfry_core::budget::Budget;
use belfry_core::definition;
use belfry_core::ending::{self, Books, Ended, Then, Waiting};
use belfry_core::retry::Verdict;
use belfry_core::session::RunUsage;
use belfry_core::{AgentId, Epoch, Reason, RunId, RunState, ScheduleId, Token, Trigger};
use belfry_time::Timestamp;
use rusqlite::params;

use super::gate::StoredGates;
use super::source::{STATUS_ACTIVE, STATUS_EXHAUSTED, from_json, to_json};
use super::unread::own_id;
use super::{Done, Verb, bytes, instant, lossy, maybe_id, maybe_number, micros, number, run_id, text};
use crate::sabotage::Sabotage;
use crate::shapes::*;
use crate::unknown;
use crate::views::API;

/// The policies of an agent that ends of its runs look at.
pub(super) type Policies = (Option<definition::Breaker>, Option<definition::Budget>);

/// A live run, as far as ending it needs to know it.
struct Ending {
    run: RunId,
    standing: Standing,
    ours: bool,
    cancel: Option<Reason>,
    agent: AgentId,
    schedule: ScheduleId,
    tick_at: Option<i64>,
    queue: i64,
    trigger: i16,
    gates: StoredGates,
    attempt: u32,
}

/// A schedule, as far as the end of its run needs to know it.
struct Standing {
    status: i64,
    waits_for: Option<RunId>,
    delete_after_run: bool,
    ended: i64,
    ended_failed: i64,
    last_failed: Option<[u8; 16]>,
    last_other: Option<[u8; 16]>,
}

/// The status of a schedule whose row is gone.
const STATUS_GONE: i64 = -1;

/// What an attempt left behind.
struct Result<'a> {
    exit_code: Option<i32>,
    error: Option<&'a str>,
    summary: Option<&'a str>,
    /// The token of its schedule, should that wait for this run.
    arm: Option<Token>,
}

impl Ending {
    fn is_message(&self) -> bool {
        self.trigger == Trigger::Message.code()
    }
}

impl Verb<'_> {
    /// Why a run must not wait for another attempt: it is to be cancelled, or its session is another by now.
    fn left_behind(&self, ending: &Ending) -> Done<Option<Reason>> {
        if ending.cancel.is_some() || !ending.is_message() || self.session_of(ending.run)?.is_some() {
            return Ok(ending.cancel);
        }
        Ok(Some(Reason::Stale))
    }

    fn ending(&self, run: RunId, epoch: Option<Epoch>) -> Done<Option<Ending>> {
        self.row(
            "select st.status, st.waits_for, st.delete_after_run, st.ended, st.ended_failed, st.last_failed, st.last_other,
                    l.epoch, l.state, l.cancel_reason, l.agent_id, l.schedule_id, l.tick_at, l.queue_id, l.trigger,
                    l.agent_gate, l.turn_gate, l.command_gate, l.whole_gate, l.alone_gate, l.attempt
             from live l left join schedule_state st on st.schedule_id = l.schedule_id where l.id = ?",
            [bytes(run)],
            |row| {
                // A schedule that is gone has counted none, and waits for none.
                let standing = Standing {
                    status: row.get::<_, Option<i64>>(0)?.unwrap_or(STATUS_GONE),
                    waits_for: maybe_id(row, 1)?.map(run_id),
                    delete_after_run: row.get::<_, Option<bool>>(2)?.unwrap_or(false),
                    ended: row.get::<_, Option<i64>>(3)?.unwrap_or(0),
                    ended_failed: row.get::<_, Option<i64>>(4)?.unwrap_or(0),
                    last_failed: maybe_id(row, 5)?,
                    last_other: maybe_id(row, 6)?,
                };
                Ok(Ending {
                    run,
                    standing,
                    ours: row.get::<_, i64>(8)? == 2 && Some(number(row, 7)?) == epoch,
                    cancel: maybe_number(row, 9)?.map(unknown::cancel_reason),
                    agent: row.get(10)?,
                    schedule: row.get(11)?,
                    tick_at: row.get(12)?,
                    queue: row.get(13)?,
                    trigger: number(row, 14)?,
                    gates: StoredGates::read(row, 15)?,
                    attempt: number(row, 20)?,
                })
            },
        )
    }

    pub(super) fn finish(&self, now: Timestamp, finish: &Finish) -> Done<Finished> {
        let Some(ending) = self.ending(finish.run, Some(finish.epoch))? else { return Ok(Finished::Stale) };
        if !ending.ours && !self.shared.sabotage.is(Sabotage::FinishWithoutEpoch) {
            return Ok(Finished::Stale);
        }
        if ending.is_message() {
            self.take_usage(finish.run, finish.usage.and_then(RunUsage::of_session))?;
        }
        match self.settle(now, &ending, finish.verdict, finish.failed)? {
            Then::End { state, reason } => {
                let result = Result {
                    exit_code: finish.exit_code,
                    error: finish.error.as_deref(),
                    summary: finish.summary.as_deref(),
                    arm: finish.arm,
                };
                self.end_with(now, &ending, state, reason, &result)?;
                if let Some(usage) = &finish.usage {
                    let usage = params![to_json(usage)?, bytes(finish.run)];
                    self.execute("update history set usage = ? where id = ?", usage)?;
                }
                Ok(Finished::Ended(state))
            }
            Then::Back { at, counted } => {
                let result = params![finish.exit_code, finish.error, bytes(finish.run)];
                self.execute("update live set exit_code = ?, error = ? where id = ?", result)?;
                self.back_to_pending(now, finish.run, at, counted)
            }
        }
    }

    /// Decides about the end of a live run's attempt, and keeps the books of its agent.
    fn settle(&self, now: Timestamp, ending: &Ending, verdict: Verdict, failed: bool) -> Done<Then> {
        let agent = ending.agent;
        let ended = Ended {
            run: ending.run,
            trigger: Trigger::from_code(ending.trigger).unwrap_or(Trigger::Manual),
            attempt: ending.attempt,
            verdict,
            failed,
            left_behind: self.left_behind(ending)?,
        };
        let (breaker, budget) = self.policies(agent)?;
        let mut books = Books::default();
        let mut command = String::new();
        if let Some(policy) = breaker {
            let found =
                self.row("select command from live where id = ?", [bytes(ending.run)], |row| text(row, 0))?;
            command = found.unwrap_or_default();
            books.breaker = Some((policy, self.breaker_of(agent, &command)?));
        }
        if let Some(policy) = budget {
            books.budget = Some((policy, self.budget_of(agent)?));
        }
        let decided = ending::decide(&ended, &books, now);
        if let Some((next, transition)) = decided.breaker {
            self.put_breaker(agent, &command, &next, transition)?;
        }
        if let Some(used) = decided.budget {
            self.set_budget(agent, used)?;
        }
        self.move_waiting(now, agent, decided.waiting)?;
        Ok(decided.then)
    }

    pub(super) fn set_budget(&self, agent: AgentId, used: Option<Budget>) -> Done<bool> {
        let written = match used {
            Some(used) => self.execute(
                "insert into budgets (agent_id, period_start, failures) values (?, ?, ?) on conflict (agent_id)
                 do update set period_start = excluded.period_start, failures = excluded.failures",
                params![agent, micros(used.period_start), used.failures],
            )?,
            None => self.execute("delete from budgets where agent_id = ?", [agent])?,
        };
        Ok(written > 0)
    }

    /// Holds or frees the runs of an agent that wait, as its budget does.
    pub(super) fn move_waiting(&self, now: Timestamp, agent: AgentId, waiting: Waiting) -> Done<()> {
        if waiting == Waiting::Stay {
            return Ok(());
        }
        let runs = self.rows(
            "select id, trigger, attempt, due_at, not_before, agent_gate, turn_gate, command_gate, whole_gate, alone_gate
             from live where schedule_id in (select id from schedules where agent_id = ?) and state <> 2 and length(id) = 16",
            [agent],
            |row| {
                let trigger = Trigger::from_code(number(row, 1)?).unwrap_or(Trigger::Manual);
                let times = (unknown::instant(row.get(3)?), unknown::instant(row.get(4)?));
                let id = own_id(row, 0)?;
                Ok((id, ending::holds(trigger, number(row, 2)?), times, StoredGates::read(row, 5)?))
            },
        )?;
        for (id, is_held, (due_at, not_before), gates) in runs {
            let at = match waiting {
                Waiting::Hold(until) if is_held => ending::held_at(not_before, until, now),
                Waiting::Free => not_before.min(now.max(due_at)),
                Waiting::Hold(_) | Waiting::Stay => continue,
            };
            if at == not_before {
                continue;
            }
            self.made_room.set(true);
            // A run without a turn in its session keeps waiting for that.
            self.execute(
                "update live set not_before = ?, put_off_at = max(coalesce(put_off_at, created_at), ?), parked_on = null,
                     state = case when state = 1 and parked_on is null then 1 else 3 end where id = ?",
                params![micros(at), micros(now), id],
            )?;
            self.freed.borrow_mut().extend(gates.all());
        }
        if matches!(waiting, Waiting::Hold(_)) {
            self.touch_all(agent)?;
        }
        Ok(())
    }

    /// Returns a run to where it waits, from its budget's instant on.
    pub(super) fn come_back(&self, now: Timestamp, run: RunId, verdict: Verdict) -> Done<()> {
        let Some(ending) = self.ending(run, None)? else { return Ok(()) };
        if let Then::Back { at, counted } = self.settle(now, &ending, verdict, false)? {
            self.back_to_pending(now, run, at, counted)?;
        }
        Ok(())
    }

    /// Waits for its next attempt; `counted` says whether this one counts.
    fn back_to_pending(
        &self,
        now: Timestamp,
        run: RunId,
        not_before: Timestamp,
        counted: bool,
    ) -> Done<Finished> {
        let sql = "select trigger, due_at, agent_gate, turn_gate, command_gate, whole_gate, alone_gate from live where id = ?";
        let found = self.row(sql, [bytes(run)], |row| {
            Ok((number::<i16>(row, 0)?, instant(row, "due_at")?, StoredGates::read(row, 2)?))
        })?;
        let Some((trigger, due_at, gates)) = found else { return Ok(Finished::Pending) };
        let (not_before, said_at) = ending::back_at(due_at, not_before, now);
        if trigger == Trigger::Message.code() {
            self.moved.borrow_mut().extend(self.session_of(run)?);
        }
        // Those that wait for their turn behind it take no place of their lane's `queue_limit`.
        self.made_room.set(true);
        self.execute(
            // An attempt that counts has left its node alive; one that does not count may never have started. An edit may have
            // lowered `max_attempts` while it ran.
            "update live set state = 3, node_id = null, not_before = ?1, put_off_at = ?4, attempt = attempt - ?2,
                 max_attempts = max(max_attempts, attempt - ?2 + 1), rescue = case when ?2 and rescue is not null then 0 end where id = ?3",
            params![micros(not_before), i64::from(!counted), bytes(run), micros(said_at)],
        )?;
        self.freed.borrow_mut().extend(gates.all());
        Ok(Finished::Pending)
    }

    /// Ends a live run that no attempt reports on; what its last attempt left behind stays.
    pub(super) fn end(&self, now: Timestamp, run: RunId, state: RunState, reason: Reason) -> Done<()> {
        let Some(ending) = self.ending(run, None)? else { return Ok(()) };
        self.made_room.set(true);
        let left = self.row("select exit_code, error from live where id = ?", [bytes(run)], |row| {
            Ok((maybe_number(row, 0)?, lossy(row, 1)?))
        })?;
        let (exit_code, error) = left.unwrap_or_default();
        let result = Result { exit_code, error: error.as_deref(), summary: None, arm: None };
        self.settle(now, &ending, Verdict::End { state, reason: Some(reason) }, false)?;
        self.end_with(now, &ending, state, Some(reason), &result)
    }

    /// Takes a live run to history, and tells its schedule: its last result and next token.
    fn end_with(
        &self,
        now: Timestamp,
        ending: &Ending,
        state: RunState,
        reason: Option<Reason>,
        result: &Result<'_>,
    ) -> Done<()> {
        let (run, standing) = (ending.run, &ending.standing);
        let (previous, before) = match state {
            RunState::Failed => (standing.last_failed, standing.ended_failed),
            _ => (standing.last_other, standing.ended - standing.ended_failed),
        };
        // `or fail` spares a journal of this statement alone: a verb that fails is taken back as a whole.
        let stored = self.execute(
            "insert or fail into history (id, place, ordinal, previous, schedule_id, tick_at, agent_id, command, trigger, lane, not_before, due_at,
                                  state, reason, attempt, max_attempts, epoch, node_id, exit_code, error, summary, session, prompt, payload, trace_id,
                                  created_at, started_at, finished_at)
             select id, ?2, ?3, ?4, schedule_id, tick_at, agent_id, command, trigger, ?5, not_before, nullif(due_at, not_before),
                    ?6, ?7, attempt, max_attempts, epoch, node_id, ?8, ?9, ?10, session, prompt,
                    case payload when '{}' then null else payload end, trace_id, created_at, started_at, ?11
             from live where id = ?1 on conflict (id) do nothing",
            params![
                bytes(run),
                standing.ended.saturating_add(1),
                before.saturating_add(1),
                previous,
                self.lane(ending.queue)?,
                state.code(),
                reason.map(Reason::code),
                result.exit_code,
                result.error,
                result.summary,
                micros(now),
            ],
        )?;
        self.execute("delete from live where id = ?", [bytes(run)])?;
        if ending.is_message() {
            self.moved.borrow_mut().extend(self.session_of(run)?);
            self.execute("delete from session_runs where run_id = ?", [bytes(run)])?;
        }
        self.freed.borrow_mut().extend(ending.gates.all());
        // By damage a run that has ended may live all the same. Its first end holds.
        if stored > 0 {
            self.tell_schedule(now, ending, state, reason, result)?;
        }
        self.go_on(now, ending, result)
    }

    /// The lane of a queue; a queue never changes.
    fn lane(&self, queue: i64) -> Done<Rc<str>> {
        if let Some(lane) = self.lanes.borrow().get(&queue) {
            return Ok(lane.clone());
        }
        let lane =
            self.row("select lane from queues where id = ?", [queue], |row| row.get::<_, Rc<str>>(0))?;
        let lane = lane.unwrap_or_else(|| Rc::from(""));
        self.lanes.borrow_mut().insert(queue, lane.clone());
        Ok(lane)
    }

    /// An agent's policies, read once per verb. One that cannot be read is none.
    pub(super) fn policies(&self, agent: AgentId) -> Done<Policies> {
        if let Some(policies) = self.policies.borrow().get(&agent) {
            return Ok(*policies);
        }
        let found = self.row("select breaker, budget from agents where id = ?", [agent], |row| {
            Ok((lossy(row, 0)?, lossy(row, 1)?))
        })?;
        let (breaker, budget) = found.unwrap_or_default();
        let policies = (
            breaker.and_then(|policy| from_json(&policy).ok()),
            budget.and_then(|policy| from_json(&policy).ok()),
        );
        self.policies.borrow_mut().insert(agent, policies);
        Ok(policies)
    }

    /// Writes how a run has ended into its schedule's state.
    fn tell_schedule(
        &self,
        now: Timestamp,
        ending: &Ending,
        state: RunState,
        reason: Option<Reason>,
        result: &Result<'_>,
    ) -> Done<()> {
        let error = (state == RunState::Failed)
            .then(|| result.error.unwrap_or_else(|| reason.map_or("failed", Reason::as_str)));
        let update = match state {
            RunState::Completed => END_COMPLETED,
            RunState::Failed => END_FAILED,
            RunState::Cancelled | RunState::Pending | RunState::Running => END_CANCELLED,
        };
        self.execute(
            update,
            params![bytes(ending.run), state.code(), ending.tick_at, micros(now), error, ending.schedule],
        )
        .map(drop)
    }

    /// Arms or retires a schedule when a run of it is gone.
    fn go_on(&self, now: Timestamp, ending: &Ending, result: &Result<'_>) -> Done<()> {
        let (run, schedule, standing) = (ending.run, ending.schedule, &ending.standing);
        if standing.waits_for == Some(run) {
            self.execute("update schedule_state set waits_for = null where schedule_id = ?", [schedule])?;
            if standing.status == STATUS_ACTIVE {
                self.set_token(schedule, Some(result.arm.unwrap_or(Token::next(now))))?;
            } else {
                // Its clock starts here, in a pause that lasts.
                self.execute(
                    "update schedule_state set cursor_at = max(coalesce(cursor_at, ?1), ?1) where schedule_id = ?2",
                    params![micros(now), schedule],
                )?;
            }
        } else if standing.status == STATUS_EXHAUSTED && standing.delete_after_run && ending.tick_at.is_some()
        {
            // A one-shot that asked for it goes with the run of its tick. Its file may name it for long.
            self.execute(
                "insert or replace into spent (source, name, definition, format)
                 select source, name, definition, format from schedules
                 where id = ? and source <> ? and retired_at is null",
                params![schedule, API],
            )?;
            self.execute(
                "update schedules set retired_at = ? where id = ? and retired_at is null",
                params![micros(now), schedule],
            )?;
        }
        Ok(())
    }
}

/// What the end of a run writes into its schedule's state.
macro_rules! end_of_schedule {
    ($more:literal) => {
        concat!(
            "update schedule_state set ended = ended + 1, last_run = ?1, last_state = ?2, last_tick_at = ?3,
             fired_at = case when ?3 is null or fired_at > ?3 then fired_at else ?3 end, last_finished_at = ?4, ",
            $more,
            " where schedule_id = ?6"
        )
    };
}
const END_COMPLETED: &str = end_of_schedule!(
    "last_other = ?1, last_success_at = ?4, last_success_run = ?1, last_error = ?5, streak = case when streak > 0 then streak + 1 else 1 end"
);
const END_FAILED: &str = end_of_schedule!(
    "ended_failed = ended_failed + 1, last_failed = ?1, last_error = ?5, streak = case when streak < 0 then streak - 1 else -1 end"
);
const END_CANCELLED: &str = end_of_schedule!("last_other = ?1, last_error = coalesce(?5, last_error)");
