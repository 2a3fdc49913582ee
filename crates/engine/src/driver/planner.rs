//! What is due, and what becomes of it.

use belfry_core::TokenKind;
use belfry_core::broken::{self, Broken};

use super::*;

impl Driver {
    pub(super) fn plan_maybe(&mut self, now: Now) {
        // While the store does not answer, `at` alone says when to ask again.
        let due = self.health.is_well() && self.next_due.is_some_and(|at| at <= now.wall);
        if !self.planner.busy && (due || self.planner.at <= now.mono) {
            self.planner.busy = true;
            self.next_due = None;
            self.counters.checks += 1;
            self.counters.last_check_at = Some(now.wall);
            self.ahead = 0;
            self.ask(Ask::Due { limit: self.options.batch });
        }
    }

    pub(super) fn due(
        &mut self,
        now: Now,
        at: Timestamp,
        due: Result<Vec<Due>, Error>,
        next: Option<Timestamp>,
    ) {
        self.planner.rest(now, now.mono + self.poll_interval());
        let Some(due) = self.read(now, Call::Plans, due) else {
            self.planner.at = now.mono + self.backoff(Call::Plans);
            return;
        };
        if due.is_empty() {
            self.nothing_left(&[Call::Plans]);
        }
        self.next_due = next;
        self.plan_batch(now, at, due);
    }

    /// How long a node waits for a hint before it looks by itself.
    pub(super) fn poll_interval(&self) -> Duration {
        if broken::is(Broken::HintsAreAll) { Duration::MAX / 4 } else { self.options.poll_interval }
    }

    /// What was read as due at an instant is planned and stored by that instant, whatever the clock says meanwhile.
    fn plan_batch(&mut self, now: Now, at: Timestamp, due: Vec<Due>) {
        if due.is_empty() {
            return;
        }
        let at = if broken::is(Broken::PlansWithEarlierClock) { now.wall } else { at };
        // A full batch: there is more.
        let last = due.last().filter(|_| due.len() >= self.options.batch as usize && self.ahead < AHEAD_MAX);
        let ahead = last.map(|last| (last.mark(), self.options.batch));
        let due = Due::take_turns(due);
        let commits = Arc::new(self.decide(at, &due));
        self.committing = Some((commits.clone(), due.into_iter().map(|due| due.name).collect()));
        self.planner.busy = true;
        self.ask(Ask::Commit { commits, at, ahead });
    }

    /// Plans what is due.
    pub(super) fn decide(&mut self, now: Timestamp, due: &[Due]) -> Vec<Commit> {
        let mut plans: Vec<_> = due
            .iter()
            .map(|due| {
                due.compiled.as_ref().map(|schedule| plan(schedule, &due.standing, &due.facts(now), now))
            })
            .collect();
        let mut named: Vec<_> = due
            .iter()
            .zip(&mut plans)
            .filter_map(|(due, plan)| Some((&*due.name, &**due.compiled.as_ref().ok()?, plan.as_mut().ok()?)))
            .collect();
        spread_catch_up(&mut named, self.options.spread, now);
        let new_id = &mut self.new_id;
        let mut commits: Vec<Commit> = due
            .iter()
            .zip(plans)
            .map(|(due, plan)| match (&due.compiled, plan) {
                (Ok(schedule), Ok(plan)) => due.commit(schedule, plan, || RunId(new_id(now))),
                (Err(reason), _) | (_, Err(reason)) => due.invalid(reason),
            })
            .collect();
        for run in commits.iter_mut().flat_map(|commit| &mut commit.runs) {
            self.to_known_lane(run);
        }
        commits
    }

    pub(super) fn committed(
        &mut self,
        now: Now,
        written: Written<Commit, Committed>,
        ahead: Option<(Timestamp, Vec<Due>)>,
    ) {
        // Look again: there may be more.
        self.planner.rest(now, now.mono);
        let Some((mut commits, names)) = self.committing.take() else { return };
        // What is refused in every form, or locked, is left alone by the store for a while; all else was written.
        let refused = written.error.as_ref().filter(|error| error.is_of_part()).cloned();
        let answer = written.error.filter(|error| !error.is_of_part()).map_or(Ok(()), Err);
        let is_whole = self.written(now, Call::Plans, answer).is_some();
        let is_lost = written.answers.iter().all(|answer| *answer == Some(Committed::Lost));
        // Timers that somebody else holds are passed by, however many they are.
        self.ahead += u32::from(!is_lost);
        if !is_whole {
            // What was not written is read again.
            self.planner.at = now.mono + self.backoff(Call::Plans);
        } else if let Some((at, due)) = ahead
            && !due.is_empty()
            && self.phase == Phase::Running
            && !self.draining
        {
            self.plan_batch(now, at, due);
        } else if is_lost {
            // Others plan the same: let them.
            self.planner.at = now.mono + Duration::from_millis(5);
        }
        if !written.changed.is_empty() {
            let commits = Arc::make_mut(&mut commits);
            written.changed.into_iter().for_each(|(place, commit)| commits[place] = commit);
        }
        if let Some(error) = refused {
            let places = written.answers.iter().zip(&names).filter(|(answer, _)| answer.is_none());
            for (_, name) in places {
                let event = Event::new(now.wall, Level::Error, Name::WriteRefused).of(name);
                self.note_refused(event, &error);
            }
        }
        let deferred = commits
            .iter()
            .zip(&names)
            .zip(&written.answers)
            .filter(|(_, answer)| **answer == Some(Committed::Deferred));
        for ((commit, name), _) in deferred {
            // Whether it is armed again and meets a full lane again is a detail.
            let level = if commit.token.kind == TokenKind::Deferred { Level::Debug } else { Level::Info };
            let event = Event::new(now.wall, level, Name::TickDeferred).of(name);
            let lane = commit.runs.first().map(|run| format!("lane {} is full", run.lane));
            self.note(Event {
                tick_at: Some(commit.token.tick_at),
                reason: Some("lane_full".into()),
                detail: lane,
                ..event
            });
        }
        let held = commits
            .iter()
            .zip(&names)
            .zip(&written.answers)
            .filter(|(_, answer)| **answer == Some(Committed::Held));
        for ((commit, name), _) in held {
            self.note_plan(now.wall, commit, name);
            self.read_probed(commit, name);
            if commit.cancel_live {
                self.marker.wake(now);
            }
            for run in &commit.runs {
                self.wake_for(now, run.not_before);
            }
        }
    }

    /// A probe has made a breaker half-open.
    fn read_probed(&mut self, commit: &Commit, name: &str) {
        for run in commit.runs.iter().filter(|run| run.probe) {
            let agent = name.split_once('/').map_or(name, |(agent, _)| agent);
            self.ask(Ask::Breaker(Box::new(BreakerOf {
                agent: run.agent,
                name: Arc::from(agent),
                command: run.command.clone(),
                run: run.id,
                trace: run.id.trace(run.trace_id).simple().to_string(),
                is_probe: true,
            })));
        }
    }

    pub(super) fn note_plan(&mut self, now: Timestamp, commit: &Commit, name: &str) {
        if let Some(reason) = &commit.invalid {
            let event = Event::new(now, Level::Warn, Name::TickSkipped).of(name);
            self.note(Event { reason: Some("invalid".into()), detail: Some(reason.clone()), ..event });
        }
        for range in &commit.closed {
            if range.reason.is_missed() {
                let event = Event::new(now, Level::Warn, Name::TickMissed).of(name);
                self.note(Event {
                    reason: Some(range.reason.as_str().into()),
                    tick_at: Some(range.to),
                    count: Some(range.count),
                    ..event
                });
            }
        }
        if let Some(open) = commit.open_skip
            && open.to >= commit.token.tick_at
        {
            let level = if open.count == 1 { Level::Info } else { Level::Debug };
            let is_missed = open.reason.is_missed();
            let event = if is_missed { Name::TickMissed } else { Name::TickSkipped };
            let event = Event::new(now, level, event).of(name);
            self.note(Event {
                reason: Some(open.reason.as_str().into()),
                tick_at: Some(open.to),
                count: Some(open.count),
                ..event
            });
        }
        for run in &commit.runs {
            let event = Event::new(now, Level::Debug, Name::TickPlanned).of(name);
            let trace = run.id.trace(run.trace_id).simple().to_string();
            self.note(Event { tick_at: run.tick_at, run_id: Some(run.id), trace_id: Some(trace), ..event });
        }
    }
}
