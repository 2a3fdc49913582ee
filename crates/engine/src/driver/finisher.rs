//! The end of attempts: judged, stored, told.

use belfry_core::breaker::{State, TransitionReason};
use belfry_core::budget::exhausted_until;

use super::*;

impl Driver {
    pub(super) fn ended(&mut self, now: Now, run: RunId, epoch: Epoch, report: Report) {
        let Some(task) = self.tasks.get_mut(&run).filter(|task| task.epoch == epoch) else { return };
        task.ended = true;
        self.claim_wanted |= self.is_full;
        if matches!(task.rescue, Rescue::Starting { suspect: true } | Rescue::Watched { .. }) {
            self.suspects_from = now.mono + watched_for(self.options.lease);
        }
        let retry = &task.definitions.agent_definition.retry;
        let verdict = verdict(report.outcome, run, task.attempt, task.max_attempts, retry, now.wall);
        let finish = Finish {
            run,
            epoch,
            verdict,
            failed: matches!(report.outcome, Outcome::Failed { .. }),
            exit_code: report.exit_code,
            error: report.error,
            summary: report.summary,
            usage: report.usage,
            arm: task.arm(now.wall),
        };
        let took = now.mono.saturating_sub(task.started);
        let returned = if report.outcome == Outcome::NotStarted { "not_started" } else { "shutdown" };
        self.endings.push_back(Ending { finish, took, returned });
    }

    pub(super) fn finish_maybe(&mut self, now: Now) {
        while self.refused_ends.front().is_some_and(|(at, _)| *at <= now.mono) {
            self.endings.extend(self.refused_ends.pop_front().map(|(_, ending)| ending));
        }
        if self.finisher.is_due(now) && !self.endings.is_empty() {
            self.finisher.busy = true;
            let count = self.endings.len().min(FINISH_MAX);
            self.finishing = self.endings.drain(..count).collect();
            let finishes = self.finishing.iter().map(|ending| ending.finish.clone()).collect();
            self.ask(Ask::Finish(Arc::new(finishes)));
        }
    }

    pub(super) fn finished(&mut self, now: Now, written: Written<Finish, Finished>) {
        self.finisher.rest(now, now.mono);
        let mut endings = std::mem::take(&mut self.finishing);
        for (place, finish) in written.changed {
            endings[place].finish = finish;
        }
        let refused = written.error.as_ref().filter(|error| error.is_of_part()).cloned();
        let answer = written.error.filter(|error| !error.is_of_part()).map_or(Ok(()), Err);
        if self.written(now, Call::Ends, answer).is_none() {
            self.finisher.at = now.mono + self.backoff(Call::Ends);
        }
        self.claim_wanted |= written.answers.iter().any(Option::is_some);
        // An end is repeated until it is answered; one that is refused in every form, or locked, only now and then.
        let mut again = VecDeque::new();
        for (ending, finished) in endings.into_iter().zip(written.answers) {
            let finished = match (finished, &refused) {
                (Some(finished), _) => finished,
                (None, Some(error)) => {
                    self.set_aside(now, ending, error);
                    continue;
                }
                (None, None) => {
                    again.push_back(ending);
                    continue;
                }
            };
            let Finish { run, epoch, .. } = ending.finish;
            if let Verdict::Wait { at } = ending.finish.verdict {
                self.wake_for(now, at);
            }
            // A repeat of an end whose first answer was lost must not touch the attempt that was claimed since.
            let is_ours = self.tasks.get(&run).is_some_and(|task| task.epoch == epoch);
            let Some(task) = is_ours.then(|| self.tasks.remove(&run)).flatten() else { continue };
            // The end of a run may have armed its schedule.
            match ending.finish.arm {
                Some(token) if !self.planner.busy => {
                    self.next_due = Some(self.next_due.map_or(token.due_at, |at| at.min(token.due_at)));
                }
                None if !task.waits() => {}
                // What the planner is about to learn may be older than this.
                Some(_) | None => self.planner.wake(now),
            }
            self.read_breaker_maybe(now, ending.finish.run, &task, finished);
            self.read_budget_maybe(now, &task, &ending.finish, finished);
            self.note_end(now, &task, ending, finished);
        }
        again.append(&mut self.endings);
        self.endings = again;
    }

    /// An end that the store refuses in every form, or cannot write because of a lock, must not hold up others.
    fn set_aside(&mut self, now: Now, ending: Ending, error: &Error) {
        let mut event = Event::new(now.wall, Level::Error, Name::WriteRefused);
        if let Some(task) = self.tasks.get(&ending.finish.run) {
            event = event.of(&task.definitions.name);
        }
        self.note_refused(Event { run_id: Some(ending.finish.run), ..event }, error);
        let at = now.mono + if error.is_locked() { LOCKED_EVERY } else { REFUSED_EVERY };
        let place = self.refused_ends.partition_point(|(other, _)| *other <= at);
        self.refused_ends.insert(place, (at, ending));
    }

    /// A failure may open a breaker, and a success may close one. A breaker that was seen closed cannot be closed by a
    /// run that ends within the time for which a breaker stays open.
    fn read_breaker_maybe(&mut self, now: Now, run: RunId, task: &Task, finished: Finished) {
        let Finished::Ended(state) = finished else { return };
        let Some(policy) = &task.definitions.agent_definition.breaker else { return };
        let name = task.definitions.agent_name.clone();
        let key = (name.clone(), task.command.clone());
        let reset_after = Duration::from_millis(policy.reset_after_ms);
        let is_closed = self.breakers.get(&key).is_some_and(|seen| now.wall < later(*seen, reset_after));
        if state == RunState::Failed || !is_closed {
            self.ask(Ask::Breaker(Box::new(BreakerOf {
                agent: task.definitions.agent,
                name,
                command: task.command.clone(),
                run,
                trace: task.trace.simple().to_string(),
                is_probe: false,
            })));
        }
    }

    /// A failure may use up the budget of its agent, and a success clears it.
    fn read_budget_maybe(&mut self, now: Now, task: &Task, finish: &Finish, finished: Finished) {
        let definitions = &task.definitions;
        let Some(policy) = definitions.agent_definition.budget else { return };
        let agent = definitions.agent_name.clone();
        if finish.failed && finished != Finished::Stale {
            let schedule = definitions.name.clone();
            self.ask(Ask::Budget { schedule, agent, policy });
        } else if finished == Finished::Ended(RunState::Completed) && self.exhausted.remove(&agent).is_some()
        {
            let event = Event::new(now.wall, Level::Info, Name::BudgetChanged);
            let (agent, reason) = (Some(agent.to_string()), Some("success".to_owned()));
            self.note(Event { agent, run_id: Some(finish.run), state: Some("cleared"), reason, ..event });
        }
    }

    /// Tells once in a period that a failure budget is used up.
    pub(super) fn budget(
        &mut self,
        now: Now,
        agent: Arc<str>,
        policy: &BudgetPolicy,
        used: Result<Option<Budget>, Error>,
    ) {
        let Some(Some(used)) = self.read(now, Call::Lease, used) else { return };
        let Some(until) = exhausted_until(Some(used), policy, now.wall) else { return };
        if self.exhausted.insert(agent.clone(), used.period_start) == Some(used.period_start) {
            return;
        }
        let event = Event::new(now.wall, Level::Warn, Name::BudgetChanged);
        self.note(Event {
            agent: Some(agent.to_string()),
            state: Some("exhausted"),
            reason: Some("failure_budget".into()),
            count: Some(u64::from(used.failures)),
            retry_at: Some(until),
            ..event
        });
    }

    /// Tells how a run has changed a breaker. What other runs have done to it, the nodes tell that ended those.
    pub(super) fn breaker(&mut self, now: Now, of: &BreakerOf, history: Result<Vec<Transition>, Error>) {
        let Some(history) = self.read(now, Call::Lease, history) else { return };
        let is_told = |change: &&Transition| {
            change.run == Some(of.run) && (change.reason == TransitionReason::CooldownElapsed) == of.is_probe
        };
        for change in history.iter().filter(is_told) {
            let event = Event::breaker(&of.name, &of.command, change);
            self.note(Event { trace_id: Some(of.trace.clone()), ..event });
        }
        let key = (of.name.clone(), of.command.clone());
        match history.last().is_none_or(|change| change.to == State::Closed) {
            true => self.breakers.insert(key, now.wall),
            false => self.breakers.remove(&key),
        };
    }

    pub(super) fn note_end(&mut self, now: Now, task: &Task, ending: Ending, finished: Finished) {
        // The node that has taken it from this one tells what became of it.
        if finished == Finished::Stale {
            return;
        }
        let (name, state, retry_at) = match (finished, ending.finish.verdict) {
            (Finished::Ended(RunState::Cancelled), _) => (Name::RunCancelled, Some("cancelled"), None),
            (Finished::Ended(state), _) => (Name::RunFinished, Some(state.as_str()), None),
            (Finished::Pending, Verdict::Retry { at }) => {
                self.wake_for(now, at);
                (Name::RunRetried, Some("pending"), Some(at))
            }
            (Finished::Pending, Verdict::Wait { at }) => (Name::RunRetried, Some("pending"), Some(at)),
            (Finished::Pending | Finished::Stale, _) => (Name::RunRetried, Some("pending"), None),
        };
        let level = if ending.finish.failed { Level::Warn } else { Level::Info };
        let reason = match ending.finish.verdict {
            Verdict::End { reason, .. } => reason.map(Reason::as_str),
            Verdict::Return | Verdict::Wait { .. } => Some(ending.returned),
            Verdict::Retry { .. } => Some("failed"),
        };
        let event = Event::new(now.wall, level, name).of(&task.definitions.name);
        self.note(Event {
            tick_at: task.tick_at,
            run_id: Some(ending.finish.run),
            attempt: Some(task.attempt),
            node: Some(self.node),
            trace_id: Some(task.trace.simple().to_string()),
            state,
            reason: reason.map(str::to_owned),
            took_ms: Some(ending.took.as_millis() as u64),
            retry_at,
            // Nothing will come: whoever shows that something might can stop.
            outbound: (name == Name::RunCancelled && task.session.is_some()).then(String::new),
            session: task.session.clone(),
            usage: ending.finish.usage,
            detail: ending.finish.error.or(ending.finish.summary),
            ..event
        });
    }
}

impl Ending {
    /// The end of an attempt that was claimed and cannot be started.
    pub(super) fn unstarted(run: RunId, epoch: Epoch, verdict: Verdict, error: Option<String>) -> Ending {
        let finish = Finish {
            run,
            epoch,
            verdict,
            failed: matches!(verdict, Verdict::End { state: RunState::Failed, .. }),
            exit_code: None,
            error,
            summary: None,
            usage: None,
            arm: None,
        };
        Ending { finish, took: Duration::ZERO, returned: "not_started" }
    }
}

impl Task {
    /// Whether its end may arm its schedule.
    pub(super) fn waits(&self) -> bool {
        self.definitions.compiled.as_ref().is_ok_and(|schedule| schedule.waits_for_runs())
    }

    /// The next token of its schedule, should that wait for this run.
    pub(super) fn arm(&self, now: Timestamp) -> Option<Token> {
        let schedule = self.definitions.compiled.as_ref().ok()?;
        if !schedule.waits_for_runs() {
            return None;
        }
        let origin = self.definitions.origin;
        // A clock that is behind what is planned: the planner finds the next tick.
        if self.definitions.cursor_at.is_some_and(|cursor| now <= cursor) {
            return None;
        }
        let standing = Standing { origin, ..Standing::of(Token::next(now)) };
        match plan(schedule, &standing, &Facts::CLEAR, now).next {
            Next::Token(token) => Some(token),
            Next::Wait | Next::Exhausted | Next::Expired => None,
        }
    }
}
