//! The end of an attempt, and all that hangs on it.

use belfry_core::check::Status;
use belfry_core::retry::Verdict;
use belfry_core::{AgentId, Epoch, Reason, RunId, RunState, ScheduleId, Token, budget};
use belfry_time::Timestamp;
use rusqlite::params;

use super::source::status_of;
use super::{Done, Verb, bytes, instant, maybe_instant, micros, run_id};
use crate::sabotage::Sabotage;
use crate::shapes::*;

/// What ending a run needs to know of it.
struct Ending {
    seq: i64,
    agent: AgentId,
    schedule: ScheduleId,
    command: String,
    tick_at: Option<Timestamp>,
    error: Option<String>,
    gates: [Option<i64>; 2],
}

impl Verb<'_> {
    pub(super) fn finish(&self, now: Timestamp, finish: &Finish) -> Done<Finished> {
        let live = self.row(
            "select state, epoch, cancel_reason, agent_id, exit_code is not null or error is not null from live where id = ?",
            [bytes(finish.run)],
            |row| {
                let ours = row.get::<_, i64>(0)? == 2 && row.get::<_, Epoch>(1)? == finish.epoch;
                let cancel = row.get::<_, Option<i16>>(2)?.and_then(Reason::from_code);
                Ok((ours, cancel, row.get::<_, AgentId>(3)?, row.get::<_, bool>(4)?))
            },
        )?;
        let Some((ours, cancel, agent, had_result)) = live else { return Ok(Finished::Stale) };
        if !ours && !self.shared.sabotage.is(Sabotage::FinishWithoutEpoch) {
            return Ok(Finished::Stale);
        }
        if had_result || finish.exit_code.is_some() || finish.error.is_some() {
            let result = params![finish.exit_code, finish.error, bytes(finish.run)];
            self.execute("update live set exit_code = ?, error = ? where id = ?", result)?;
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
                self.end(now, finish.run, state, reason, finish.summary.as_deref(), finish.arm)?;
                Ok(Finished::Ended(state))
            }
            Verdict::Retry { at } => self.back_to_pending(finish.run, at, true),
            Verdict::Return => self.back_to_pending(finish.run, now, false),
        }
    }

    fn spend_budget(&self, now: Timestamp, agent: AgentId) -> Done<()> {
        let Some(policy) = self.agent_definition(agent)?.and_then(|agent| agent.budget) else {
            return Ok(());
        };
        let used = budget::after_failure(self.budget_of(agent)?, &policy, now);
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
        self.release_all(gates.unwrap_or_default())?;
        Ok(Finished::Pending)
    }

    fn release_all(&self, gates: [Option<i64>; 2]) -> Done<()> {
        for gate in gates.into_iter().flatten() {
            self.release(gate)?;
        }
        Ok(())
    }

    /// Ends a live run: history, the schedule's last result and next token, breaker, budget, waiting runs.
    pub(super) fn end(
        &self,
        now: Timestamp,
        run: RunId,
        state: RunState,
        reason: Option<Reason>,
        summary: Option<&str>,
        arm: Option<Token>,
    ) -> Done<()> {
        let ending = self.row(
            "select seq, agent_id, schedule_id, command, tick_at, error, agent_gate, turn_gate from live where id = ?",
            [bytes(run)],
            |row| {
                Ok(Ending {
                    seq: row.get(0)?,
                    agent: row.get(1)?,
                    schedule: row.get(2)?,
                    command: row.get(3)?,
                    tick_at: maybe_instant(row, "tick_at")?,
                    error: row.get(5)?,
                    gates: [row.get(6)?, row.get(7)?],
                })
            },
        )?;
        let Some(ending) = ending else { return Ok(()) };
        let chain = if state == RunState::Failed { "last_failed" } else { "last_other" };
        self.execute(
            &format!(
                "insert into history (id, previous, schedule_id, tick_at, agent_id, command, trigger, lane, not_before, state, reason, attempt,
                                      max_attempts, epoch, node_id, exit_code, error, summary, trace_id, created_at, started_at, finished_at)
                 select l.id, (select {chain} from schedule_state where schedule_id = l.schedule_id), l.schedule_id, l.tick_at, l.agent_id,
                        l.command, l.trigger, (select lane from queues where id = l.queue_id), l.not_before, ?, ?, l.attempt, l.max_attempts,
                        l.epoch, l.node_id, l.exit_code, l.error, ?, l.trace_id, l.created_at, l.started_at, ?
                 from live l where seq = ?"
            ),
            params![state.code(), reason.map(Reason::code), summary, micros(now), ending.seq],
        )?;
        let number = self.connection.last_insert_rowid();
        self.execute("delete from live where seq = ?", [ending.seq])?;
        self.end_of_schedule(now, run, &ending, state, reason, number, arm)?;
        if let Some(policy) = self.agent_definition(ending.agent)?.and_then(|agent| agent.breaker) {
            let breaker = self.breaker_of(ending.agent, &ending.command)?;
            let (next, transition) = breaker.ended(&policy, run, state, now);
            if next != breaker {
                self.put_breaker(ending.agent, &ending.command, &next, transition)?;
            }
        }
        if state == RunState::Completed {
            self.execute("delete from budgets where agent_id = ?", [ending.agent])?;
        }
        // Also where it only waited: it may have been the first, and let through.
        self.release_all(ending.gates)
    }

    #[expect(clippy::too_many_arguments, reason = "one caller, and every part of an end is its own")]
    fn end_of_schedule(
        &self,
        now: Timestamp,
        run: RunId,
        ending: &Ending,
        state: RunState,
        reason: Option<Reason>,
        number: i64,
        arm: Option<Token>,
    ) -> Done<()> {
        let (id, tick_at) = (ending.schedule, ending.tick_at.map(micros));
        match state {
            RunState::Completed => self.execute(
                "update schedule_state set last_run = ?1, last_state = ?2, last_tick_at = ?3, last_finished_at = ?4, last_other = ?5,
                        last_success_at = ?4, last_success_run = ?1, last_error = null, streak = max(streak, 0) + 1 where schedule_id = ?6",
                params![bytes(run), state.code(), tick_at, micros(now), number, id],
            )?,
            RunState::Failed => {
                let error = ending.error.clone().unwrap_or_else(|| reason.map_or("failed", Reason::as_str).to_owned());
                self.execute(
                    "update schedule_state set last_run = ?, last_state = ?, last_tick_at = ?, last_finished_at = ?, last_failed = ?,
                            last_error = ?, streak = min(streak, 0) - 1 where schedule_id = ?",
                    params![bytes(run), state.code(), tick_at, micros(now), number, error, id],
                )?
            }
            RunState::Cancelled | RunState::Pending | RunState::Running => self.execute(
                "update schedule_state set last_run = ?, last_state = ?, last_tick_at = ?, last_finished_at = ?, last_other = ? where schedule_id = ?",
                params![bytes(run), state.code(), tick_at, micros(now), number, id],
            )?,
        };
        let standing = self.row(
            "select status, status_reason, status_until, waits_for, delete_after_run from schedule_state where schedule_id = ?",
            [id],
            |row| Ok((status_of(row)?, row.get::<_, Option<[u8; 16]>>("waits_for")?.map(run_id), row.get::<_, bool>("delete_after_run")?)),
        )?;
        match standing {
            Some((status, Some(awaited), _)) if awaited == run => {
                self.execute("update schedule_state set waits_for = null where schedule_id = ?", [id])?;
                if status == Status::Active {
                    self.set_token(id, Some(arm.unwrap_or(Token::next(now))))?;
                }
            }
            // A one-shot that asked for it goes with its run.
            Some((Status::Exhausted, None, true)) => {
                self.execute(
                    "update schedules set retired_at = ? where id = ? and retired_at is null",
                    params![micros(now), id],
                )?;
            }
            _ => {}
        }
        Ok(())
    }
}

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
