//! The end of an attempt, and all that hangs on it.

use belfry_core::check::Status;
use belfry_core::retry::Verdict;
use belfry_core::{AgentId, Epoch, Reason, RunId, RunState, ScheduleId, Token, budget};
use belfry_time::Timestamp;
use rusqlite::params;

use super::source::{from_json, status_of};
use super::{Done, Verb, bytes, instant, maybe_instant, micros, run_id};
use crate::sabotage::Sabotage;
use crate::shapes::*;

/// What an attempt left behind.
#[derive(Default)]
pub(super) struct Result<'a> {
    exit_code: Option<i32>,
    error: Option<&'a str>,
    summary: Option<&'a str>,
    /// The token of its schedule, should that wait for this run.
    arm: Option<Token>,
}

impl Verb<'_> {
    pub(super) fn finish(&self, now: Timestamp, finish: &Finish) -> Done<Finished> {
        let live = self.row(
            "select state, epoch, cancel_reason, agent_id from live where id = ?",
            [bytes(finish.run)],
            |row| {
                let ours = row.get::<_, i64>(0)? == 2 && row.get::<_, Epoch>(1)? == finish.epoch;
                Ok((
                    ours,
                    row.get::<_, Option<i16>>(2)?.and_then(Reason::from_code),
                    row.get::<_, AgentId>(3)?,
                ))
            },
        )?;
        let Some((ours, cancel, agent)) = live else { return Ok(Finished::Stale) };
        if !ours && !self.shared.sabotage.is(Sabotage::FinishWithoutEpoch) {
            return Ok(Finished::Stale);
        }
        if finish.failed {
            self.spend_budget(now, agent)?;
        }
        // Whoever is to be cancelled does not wait for another attempt.
        let verdict = match (finish.verdict, cancel) {
            (Verdict::Retry { .. } | Verdict::Return, Some(reason)) => {
                Verdict::End { state: RunState::Cancelled, reason: Some(reason) }
            }
            (verdict, _) => verdict,
        };
        match verdict {
            Verdict::End { state, reason } => {
                let result = Result {
                    exit_code: finish.exit_code,
                    error: finish.error.as_deref(),
                    summary: finish.summary.as_deref(),
                    arm: finish.arm,
                };
                self.end_with(now, finish.run, state, reason, &result)?;
                Ok(Finished::Ended(state))
            }
            Verdict::Retry { .. } | Verdict::Return => {
                let result = params![finish.exit_code, finish.error, bytes(finish.run)];
                self.execute("update live set exit_code = ?, error = ? where id = ?", result)?;
                match verdict {
                    Verdict::Retry { at } => self.back_to_pending(finish.run, at, true),
                    _ => self.back_to_pending(finish.run, now, false),
                }
            }
        }
    }

    fn spend_budget(&self, now: Timestamp, agent: AgentId) -> Done<()> {
        let policy = self
            .row("select budget from agents where id = ?", [agent], |row| row.get::<_, Option<String>>(0))?
            .flatten();
        let Some(policy) = policy else { return Ok(()) };
        let used = budget::after_failure(self.budget_of(agent)?, &from_json(&policy)?, now);
        self.execute(
            "insert into budgets (agent_id, period_start, failures) values (?, ?, ?)
             on conflict (agent_id) do update set period_start = excluded.period_start, failures = excluded.failures",
            params![agent, micros(used.period_start), used.failures],
        )
        .map(drop)
    }

    /// Waits for its next attempt; `counted` says whether this one counts.
    pub(super) fn back_to_pending(&self, run: RunId, not_before: Timestamp, counted: bool) -> Done<Finished> {
        let gates = self.row(
            "update live set state = 0, node_id = null, not_before = ?, attempt = attempt - ? where id = ? returning agent_gate, turn_gate",
            params![micros(not_before), i64::from(!counted), bytes(run)],
            |row| Ok([row.get::<_, Option<i64>>(0)?, row.get(1)?]),
        )?;
        self.freed.borrow_mut().extend(gates.into_iter().flatten().flatten());
        Ok(Finished::Pending)
    }

    /// Ends a live run that no attempt reports on.
    pub(super) fn end(&self, now: Timestamp, run: RunId, state: RunState, reason: Reason) -> Done<()> {
        // What its last attempt left behind stays.
        let left = self.row("select exit_code, error from live where id = ?", [bytes(run)], |row| {
            Ok((row.get::<_, Option<i32>>(0)?, row.get::<_, Option<String>>(1)?))
        })?;
        let (exit_code, error) = left.unwrap_or_default();
        self.end_with(
            now,
            run,
            state,
            Some(reason),
            &Result { exit_code, error: error.as_deref(), ..Result::default() },
        )
    }

    /// Ends a live run: history, the schedule's last result and next token, breaker, budget, waiting runs.
    fn end_with(
        &self,
        now: Timestamp,
        run: RunId,
        state: RunState,
        reason: Option<Reason>,
        result: &Result<'_>,
    ) -> Done<()> {
        let insert = if state == RunState::Failed { INSERT_FAILED } else { INSERT_OTHER };
        self.execute(
            insert,
            params![
                state.code(),
                reason.map(Reason::code),
                result.exit_code,
                result.error,
                result.summary,
                micros(now),
                bytes(run)
            ],
        )?;
        let number = self.connection.last_insert_rowid();
        let ended = self.row(
            "delete from live where id = ? returning agent_id, schedule_id, command, tick_at, agent_gate, turn_gate",
            [bytes(run)],
            |row| {
                self.freed.borrow_mut().extend([row.get::<_, Option<i64>>(4)?, row.get(5)?].into_iter().flatten());
                Ok((row.get::<_, AgentId>(0)?, row.get::<_, ScheduleId>(1)?, row.get::<_, String>(2)?, row.get::<_, Option<i64>>(3)?))
            },
        )?;
        let Some((agent, schedule, command, tick_at)) = ended else { return Ok(()) };
        self.end_of_schedule(now, run, schedule, tick_at, state, reason, number, result)?;
        let policies =
            self.row("select breaker, budget is not null from agents where id = ?", [agent], |row| {
                Ok((row.get::<_, Option<String>>(0)?, row.get::<_, bool>(1)?))
            })?;
        let Some((breaker_policy, has_budget)) = policies else { return Ok(()) };
        if let Some(policy) = breaker_policy {
            let breaker = self.breaker_of(agent, &command)?;
            let (next, transition) = breaker.ended(&from_json(&policy)?, run, state, now);
            if next != breaker {
                self.put_breaker(agent, &command, &next, transition)?;
            }
        }
        if has_budget && state == RunState::Completed {
            self.execute("delete from budgets where agent_id = ?", [agent])?;
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "one caller, and every part of an end is its own")]
    fn end_of_schedule(
        &self,
        now: Timestamp,
        run: RunId,
        schedule: ScheduleId,
        tick_at: Option<i64>,
        state: RunState,
        reason: Option<Reason>,
        number: i64,
        result: &Result<'_>,
    ) -> Done<()> {
        let error = (state == RunState::Failed)
            .then(|| result.error.unwrap_or_else(|| reason.map_or("failed", Reason::as_str)));
        let update = match state {
            RunState::Completed => END_COMPLETED,
            RunState::Failed => END_FAILED,
            RunState::Cancelled | RunState::Pending | RunState::Running => END_CANCELLED,
        };
        let standing = self.row(
            update,
            params![bytes(run), state.code(), tick_at, micros(now), number, error, schedule],
            |row| {
                let awaited = row.get::<_, Option<[u8; 16]>>("waits_for")?.map(run_id);
                Ok((status_of(row)?, awaited, row.get::<_, bool>("delete_after_run")?))
            },
        )?;
        match standing {
            Some((status, Some(awaited), _)) if awaited == run => {
                self.execute("update schedule_state set waits_for = null where schedule_id = ?", [schedule])?;
                if status == Status::Active {
                    self.set_token(schedule, Some(result.arm.unwrap_or(Token::next(now))))?;
                }
            }
            // A one-shot that asked for it goes with its run.
            Some((Status::Exhausted, None, true)) => {
                self.execute(
                    "update schedules set retired_at = ? where id = ? and retired_at is null",
                    params![micros(now), schedule],
                )?;
            }
            _ => {}
        }
        Ok(())
    }
}

/// The end of a run, linked to the one before it of its kind.
macro_rules! insert_history {
    ($chain:literal) => {
        concat!(
            "insert into history (id, previous, schedule_id, tick_at, agent_id, command, trigger, lane, not_before, state, reason, attempt,
                                  max_attempts, epoch, node_id, exit_code, error, summary, trace_id, created_at, started_at, finished_at)
             select l.id, (select ",
            $chain,
            " from schedule_state where schedule_id = l.schedule_id), l.schedule_id, l.tick_at, l.agent_id,
                    l.command, l.trigger, (select lane from queues where id = l.queue_id), l.not_before, ?1, ?2, l.attempt, l.max_attempts,
                    l.epoch, l.node_id, ?3, ?4, ?5, l.trace_id, l.created_at, l.started_at, ?6
             from live l where id = ?7"
        )
    };
}
const INSERT_FAILED: &str = insert_history!("last_failed");
const INSERT_OTHER: &str = insert_history!("last_other");

/// What the end of a run writes into its schedule's state.
macro_rules! end_of_schedule {
    ($more:literal) => {
        concat!(
            "update schedule_state set last_run = ?1, last_state = ?2, last_tick_at = ?3, last_finished_at = ?4, ",
            $more,
            " where schedule_id = ?7 returning status, status_reason, status_until, waits_for, delete_after_run"
        )
    };
}
const END_COMPLETED: &str = end_of_schedule!(
    "last_other = ?5, last_success_at = ?4, last_success_run = ?1, last_error = ?6, streak = max(streak, 0) + 1"
);
const END_FAILED: &str = end_of_schedule!("last_failed = ?5, last_error = ?6, streak = min(streak, 0) - 1");
const END_CANCELLED: &str = end_of_schedule!("last_other = ?5, last_error = coalesce(?6, last_error)");

/// A row of `live` or `history` as a record. Both have the columns of the other, or a constant in their place.
pub(super) fn record(row: &rusqlite::Row<'_>) -> rusqlite::Result<RunRecord> {
    Ok(RunRecord {
        id: run_id(row.get("id")?),
        agent: row.get("agent_id")?,
        schedule: row.get("schedule_id")?,
        command: row.get("command")?,
        trigger: belfry_core::Trigger::from_code(row.get("trigger")?).unwrap_or(belfry_core::Trigger::Manual),
        tick_at: maybe_instant(row, "tick_at")?,
        not_before: instant(row, "not_before")?,
        state: RunState::from_code(row.get("state")?).unwrap_or(RunState::Pending),
        reason: row.get::<_, Option<i16>>("reason")?.and_then(Reason::from_code),
        lane: row.get("lane")?,
        attempt: row.get("attempt")?,
        max_attempts: row.get("max_attempts")?,
        epoch: row.get("epoch")?,
        node: row.get::<_, Option<[u8; 16]>>("node_id")?.map(super::node_id),
        exit_code: row.get("exit_code")?,
        error: row.get("error")?,
        summary: row.get("summary")?,
        created_at: instant(row, "created_at")?,
        started_at: maybe_instant(row, "started_at")?,
        finished_at: maybe_instant(row, "finished_at")?,
    })
}
