//! The end of an attempt, and all that hangs on it.

use belfry_core::broken::{self, Broken};
use belfry_core::budget::Budget;
use belfry_core::check::Status;
use belfry_core::ending::{self, Books, Ended, Then, Waiting};
use belfry_core::retry::Verdict;
use belfry_core::session::RunUsage;
use belfry_core::{AgentId, Reason, RunId, RunState, Token};
use belfry_time::Timestamp;

use super::State;
use crate::sabotage::{Sabotage, Switch};
use crate::shapes::*;
use crate::views::API;

impl State {
    pub(super) fn finish(&mut self, now: Timestamp, finish: &Finish, sabotage: &Switch) -> Finished {
        let Some(live) = self.live.get_mut(&finish.run) else { return Finished::Stale };
        let ours = live.running.is_some() && live.epoch == finish.epoch;
        let is_unchecked =
            sabotage.is(Sabotage::FinishWithoutEpoch) || broken::is(Broken::FinishWithoutEpoch);
        if !ours && !is_unchecked {
            return Finished::Stale;
        }
        live.exit_code = finish.exit_code;
        live.error.clone_from(&finish.error);
        let own = live.session;
        self.take_usage(own, finish.usage.and_then(RunUsage::of_session));
        match self.settle(now, finish.run, finish.verdict, finish.failed) {
            Some(Then::End { state, reason }) => {
                self.end(now, finish.run, state, reason, finish.summary.clone(), finish.arm);
                if let Some(record) = self.ended.get_mut(&finish.run) {
                    record.usage = finish.usage;
                }
                Finished::Ended(state)
            }
            Some(Then::Back { at, counted }) => self.back_to_pending(now, finish.run, at, counted),
            None => Finished::Stale,
        }
    }

    /// Decides about the end of a live run's attempt, and keeps the books of its agent.
    pub(super) fn settle(
        &mut self,
        now: Timestamp,
        run: RunId,
        verdict: Verdict,
        failed: bool,
    ) -> Option<Then> {
        let live = self.live.get(&run)?;
        let (agent, command) = (live.new.agent, live.new.command.clone());
        let ended = Ended {
            run,
            trigger: live.new.trigger,
            attempt: live.attempt,
            verdict,
            failed,
            left_behind: self.left_behind(live),
        };
        let definition = self.agents.get(&agent).map(|agent| agent.definition.clone()).unwrap_or_default();
        let books = Books {
            breaker: definition.breaker.map(|policy| (policy, self.breaker_of(agent, &command).breaker)),
            budget: definition.budget.map(|policy| (policy, self.budgets.get(&agent).copied())),
        };
        let ending = ending::decide(&ended, &books, now);
        if let Some(breaker) = ending.breaker {
            self.put_breaker(agent, &command, breaker);
        }
        if let Some(used) = ending.budget {
            self.set_budget(agent, used);
        }
        self.move_waiting(now, agent, ending.waiting);
        Some(ending.then)
    }

    pub(super) fn set_budget(&mut self, agent: AgentId, used: Option<Budget>) {
        match used {
            Some(used) => drop(self.budgets.insert(agent, used)),
            None => drop(self.budgets.remove(&agent)),
        }
    }

    /// Holds or frees the runs of an agent that wait, as its budget does.
    pub(super) fn move_waiting(&mut self, now: Timestamp, agent: AgentId, waiting: Waiting) {
        let runs = self.live.values_mut().filter(|live| live.new.agent == agent && live.running.is_none());
        match waiting {
            Waiting::Stay => {}
            Waiting::Hold(until) => {
                for live in runs.filter(|live| ending::holds(live.new.trigger, live.attempt)) {
                    live.put_off(now, ending::held_at(live.not_before, until, now));
                }
                // Plans that were made before do not hold.
                let own = self.schedules.iter().filter(|(_, row)| row.record.agent == agent);
                for schedule in own.map(|(schedule, _)| *schedule).collect::<Vec<_>>() {
                    self.touch(schedule);
                }
            }
            Waiting::Free => runs.for_each(|live| {
                live.put_off(now, live.not_before.min(now.max(live.new.not_before)));
            }),
        }
    }

    /// Waits for its next attempt; `counted` says whether this one counts.
    pub(super) fn back_to_pending(
        &mut self,
        now: Timestamp,
        run: RunId,
        not_before: Timestamp,
        counted: bool,
    ) -> Finished {
        if let Some(live) = self.live.get_mut(&run) {
            live.running = None;
            let (not_before, said_at) = ending::back_at(live.new.not_before, not_before, now);
            (live.not_before, live.put_off_at) = (not_before, Some(said_at));
            live.attempt -= u32::from(!counted);
            // An edit may have lowered it while the attempt ran.
            live.new.max_attempts = live.new.max_attempts.max(live.attempt + 1);
            // An attempt that counts has left its node alive; one that does not count may never have started.
            live.rescue = live.rescue.filter(|_| !counted).map(|_| 0);
        }
        Finished::Pending
    }

    /// Ends a live run that no attempt reports on.
    pub(super) fn end_now(&mut self, now: Timestamp, run: RunId, state: RunState, reason: Option<Reason>) {
        self.settle(now, run, Verdict::End { state, reason }, false);
        self.end(now, run, state, reason, None, None);
    }

    /// Takes a live run to history, and tells its schedule: its last result and next token.
    fn end(
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
        self.ended_order.push((record.schedule, run));
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
            if broken::is(Broken::EndArmsNothing) {
                return;
            }
            if record.status == Status::Active && row.retired_at.is_none() {
                self.set_token(run.schedule, Some(arm.unwrap_or(Token::next(now))));
            } else {
                // Its clock starts here, in a pause that lasts.
                record.cursor_at = record.cursor_at.max(Some(now));
            }
            return;
        }
        // A one-shot that asked for it goes with the run of its tick.
        let fired = record.status == Status::Exhausted && run.tick_at.is_some() && row.retired_at.is_none();
        if fired && record.definition.options.delete_after_run {
            row.retired_at = Some(now);
            if record.source != API {
                let place = (record.source.clone(), record.name.clone());
                self.spent.insert(place, record.definition.clone());
            }
        }
    }
}
