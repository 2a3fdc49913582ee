//! The end of an attempt, and all that hangs on it.

use belfry_core::check::Status;
use belfry_core::retry::Verdict;
use belfry_core::session::RunUsage;
use belfry_core::{Reason, RunId, RunState, Token, budget};
use belfry_time::Timestamp;

use super::State;
use crate::sabotage::{Sabotage, Switch};
use crate::shapes::*;
use crate::views::API;

impl State {
    pub(super) fn finish(&mut self, now: Timestamp, finish: &Finish, sabotage: &Switch) -> Finished {
        let Some(live) = self.live.get_mut(&finish.run) else { return Finished::Stale };
        let ours = live.running.is_some() && live.epoch == finish.epoch;
        if !ours && !sabotage.is(Sabotage::FinishWithoutEpoch) {
            return Finished::Stale;
        }
        live.exit_code = finish.exit_code;
        live.error.clone_from(&finish.error);
        let (agent, own) = (live.new.agent, live.session);
        self.take_usage(own, finish.usage.and_then(RunUsage::of_session));
        let left_behind = self.live.get(&finish.run).and_then(|live| self.left_behind(live));
        if finish.failed {
            self.spend_budget(now, agent);
        }
        // Whoever is to be cancelled does not wait for another attempt.
        let verdict = match (finish.verdict, left_behind) {
            (Verdict::Retry { .. } | Verdict::Return, Some(reason)) => {
                Verdict::End { state: RunState::Cancelled, reason: Some(reason) }
            }
            (verdict, _) => verdict,
        };
        match verdict {
            Verdict::End { state, reason } => {
                self.end(now, finish.run, state, reason, finish.summary.clone(), finish.arm);
                if let Some(record) = self.ended.get_mut(&finish.run) {
                    record.usage = finish.usage;
                }
                Finished::Ended(state)
            }
            Verdict::Retry { at } => self.back_to_pending(finish.run, at, true),
            Verdict::Return => self.back_to_pending(finish.run, now, false),
        }
    }

    fn spend_budget(&mut self, now: Timestamp, agent: belfry_core::AgentId) {
        let policy = self.agents.get(&agent).and_then(|agent| agent.definition.budget);
        if let Some(policy) = policy {
            let used = budget::after_failure(self.budgets.get(&agent).copied(), &policy, now);
            self.budgets.insert(agent, used);
        }
    }

    /// Waits for its next attempt; `counted` says whether this one counts.
    pub(super) fn back_to_pending(&mut self, run: RunId, not_before: Timestamp, counted: bool) -> Finished {
        if let Some(live) = self.live.get_mut(&run) {
            live.running = None;
            live.not_before = not_before;
            live.attempt -= u32::from(!counted);
            // An attempt that counts has left its node alive; one that does not count may never have started.
            live.rescue = live.rescue.filter(|_| !counted).map(|_| 0);
        }
        Finished::Pending
    }

    /// Ends a live run: history, the schedule's last result and next token, breaker, budget.
    pub(super) fn end(
        &mut self,
        now: Timestamp,
        run: RunId,
        state: RunState,
        reason: Option<Reason>,
        summary: Option<String>,
        arm: Option<Token>,
    ) {
        let Some(live) = self.live.remove(&run) else { return };
        let record = RunRecord {
            state,
            reason,
            summary,
            finished_at: Some(now),
            node: live.running,
            ..self.record(run, &live)
        };
        self.end_of_schedule(now, &record, arm);
        let command = (live.new.agent, live.new.command.clone());
        let definition = self.agents.get(&live.new.agent).map(|agent| agent.definition.clone());
        if let Some(policy) = definition.as_ref().and_then(|definition| definition.breaker) {
            let breaker = self.breakers.entry(command).or_default();
            let (next, transition) = breaker.breaker.ended(&policy, run, state, now);
            breaker.breaker = next;
            breaker.history.extend(transition);
        }
        if state == RunState::Completed {
            self.budgets.remove(&live.new.agent);
        }
        self.ended_order.push(run);
        self.ended.insert(run, record);
    }

    fn end_of_schedule(&mut self, now: Timestamp, run: &RunRecord, arm: Option<Token>) {
        let Some(row) = self.schedules.get_mut(&run.schedule) else { return };
        row.fired_at = row.fired_at.max(run.tick_at);
        let ended = &mut row.ended[usize::from(run.state != RunState::Failed)];
        *ended += 1;
        self.places.insert(run.id, *ended);
        let record = &mut row.record;
        record.last = Some(LastRun { run: run.id, state: run.state, tick_at: run.tick_at, finished_at: now });
        match run.state {
            RunState::Completed => {
                record.last_success = Some((now, run.id));
                record.last_error = None;
                record.streak = record.streak.max(0) + 1;
            }
            RunState::Failed => {
                record.last_error = Some(
                    run.error
                        .clone()
                        .unwrap_or_else(|| run.reason.map_or("failed", Reason::as_str).to_owned()),
                );
                record.streak = record.streak.min(0) - 1;
            }
            RunState::Cancelled | RunState::Pending | RunState::Running => {}
        }
        if record.waits_for == Some(run.id) {
            record.waits_for = None;
            if record.status == Status::Active && !row.retired {
                self.set_token(run.schedule, Some(arm.unwrap_or(Token::next(now))));
            } else {
                // Its clock starts here, in a pause that lasts.
                record.cursor_at = record.cursor_at.max(Some(now));
            }
            return;
        }
        // A one-shot that asked for it goes with the run of its tick.
        let fired = record.status == Status::Exhausted && run.tick_at.is_some() && !row.retired;
        if fired && record.definition.options.delete_after_run {
            row.retired = true;
            if record.source != API {
                let place = (record.source.clone(), record.name.clone());
                self.spent.insert(place, record.definition.clone());
            }
        }
    }
}
