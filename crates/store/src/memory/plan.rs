//! Planning: what is due, and committing what was decided. Also runs that are asked for from outside a plan.

use std::sync::Arc;

use belfry_core::breaker::{Breaker, Transition};
use belfry_core::broken::{self, Broken};
use belfry_core::check::Status;
use belfry_core::definition::Scope;
use belfry_core::overlap::Overlap;
use belfry_core::plan::Standing;
use belfry_core::{AgentId, Reason, RunId, RunState, ScheduleId, TokenKind};
use belfry_time::Timestamp;

use super::{Live, State};
use crate::error::Error;
use crate::sabotage::{Sabotage, Switch};
use crate::shapes::*;
use crate::store::Answer;

impl State {
    pub(super) fn due(&self, now: Timestamp, after: Option<Mark>, limit: u32) -> Vec<Due> {
        let mut due: Vec<_> = self
            .schedules
            .values()
            .filter(|row| {
                let is_behind = |due_at| after.is_none_or(|mark| (due_at, row.record.id) > mark);
                row.record.token.is_some_and(|token| token.due_at <= now && is_behind(token.due_at))
            })
            .collect();
        due.sort_by_key(|row| (row.record.token.map(|token| token.due_at), row.record.id));
        due.into_iter().take(limit as usize).filter_map(|row| self.due_of(row.record.id)).collect()
    }

    fn due_of(&self, id: ScheduleId) -> Option<Due> {
        let row = self.schedules.get(&id)?;
        let record = &row.record;
        let agent = self.agents.get(&record.agent)?;
        let options = &record.definition.options;
        let overlap = Overlap::of(options, record.agent, id);
        let in_scope: Vec<&Live> = self.in_scope(overlap).map(|(_, live)| live).collect();
        Some(Due {
            schedule: id,
            agent: record.agent,
            name: Arc::from(record.name.as_str()),
            compiled: row.compiled.clone(),
            agent_definition: agent.definition.clone(),
            version: row.version,
            standing: Standing {
                token: record.token?,
                origin: record.origin,
                open_skip: record.open_skip,
                cursor_at: record.cursor_at,
                waits: record.waits_for.is_some(),
            },
            live: in_scope.len() as u32,
            pending: in_scope.iter().filter(|live| live.is_queued()).count() as u32,
            breaker: self.breaker_of(record.agent, &options.command).breaker,
            budget: self.budgets.get(&record.agent).copied(),
            last_start: if options.overlap == Scope::Schedule { None } else { self.last_start(row) },
        })
    }

    /// Live runs that an overlap policy looks at.
    pub(super) fn in_scope(&self, overlap: Overlap<'_>) -> impl Iterator<Item = (RunId, &Live)> {
        let is_looked_at = move |live: &Live| {
            overlap.includes(live.new.agent, live.new.schedule, &live.new.command, live.new.trigger)
        };
        self.live.iter().map(|(run, live)| (*run, live)).filter(move |(_, live)| is_looked_at(live))
    }

    /// See [`Due::last_start`].
    fn last_start(&self, row: &super::ScheduleRow) -> Option<Timestamp> {
        let last = self.ended.get(&row.record.last.as_ref()?.run)?;
        last.started_at.or(last.finished_at)
    }

    /// The state before plans of which one may be refused.
    pub(super) fn may_refuse(&self, commits: &[Commit]) -> Option<State> {
        let is_current = |commit: &&Commit| {
            self.schedules.get(&commit.schedule).is_some_and(|row| row.version == commit.version)
        };
        let is_refused = |commit: &Commit| self.check_ticks(commit).is_err();
        commits.iter().filter(is_current).any(is_refused).then(|| self.clone())
    }

    /// The tripwire: a tick has one live run, and an id one run.
    fn check_ticks(&self, commit: &Commit) -> Answer<()> {
        let lives = |run: &NewRun| {
            self.live.values().any(|live| {
                let is_same = live.new.schedule == run.schedule && live.new.tick_at == run.tick_at;
                is_same && (live.running.is_some() || !commit.cancel_live)
            })
        };
        let is_taken = |run: &NewRun| self.live.contains_key(&run.id) || self.ended.contains_key(&run.id);
        match commit.runs.iter().find(|run| is_taken(run) || lives(run)) {
            Some(run) => Err(Error::Refused {
                detail: format!("run {}: there is a run with that id, or a live one of its tick", run.id),
            }),
            None => Ok(()),
        }
    }

    pub(super) fn commit(&mut self, now: Timestamp, commit: &Commit, sabotage: &Switch) -> Answer<Committed> {
        let id = commit.schedule;
        let Some(row) = self.schedules.get(&id) else { return Ok(Committed::Lost) };
        let unchanged = row.version == commit.version && row.record.token == Some(commit.token);
        let is_unchecked = sabotage.is(Sabotage::NoTokenCheck) || broken::is(Broken::PlannedTwice);
        if !unchanged && !is_unchecked {
            return Ok(Committed::Lost);
        }
        if commit.token.kind == TokenKind::Resume && commit.invalid.is_none() {
            return Ok(self.commit_resume(now, commit));
        }
        if let Some(lane) = self.full_lane(commit) {
            self.defer(now, commit, lane);
            return Ok(Committed::Deferred);
        }
        let in_scope: Vec<RunId> = self.in_scope(commit.overlap()).map(|(run, _)| run).collect();
        // Only a scope beyond the schedule can have grown without touching its token.
        if commit.scope != Scope::Schedule && in_scope.len() as u32 > commit.live {
            return Ok(Committed::Lost);
        }
        if !self.take_probe(now, commit) {
            return Ok(Committed::Lost);
        }
        self.check_ticks(commit)?;
        if commit.cancel_live {
            for run in in_scope {
                self.cancel(now, run, Reason::Overlap);
            }
        }
        self.skips.entry(id).or_default().extend(&commit.closed);
        for run in &commit.runs {
            self.insert_run(now, run);
        }
        let Some(row) = self.schedules.get_mut(&id) else { return Ok(Committed::Lost) };
        row.record.open_skip = commit.open_skip;
        row.record.origin = commit.origin.or(row.record.origin);
        row.record.cursor_at = commit.cursor_at.or(row.record.cursor_at);
        row.record.planned_at = commit.planned_at.or(row.record.planned_at);
        let (token, waits_for) = match commit.next {
            Arm::Token(token) => (Some(token), None),
            Arm::Wait(run) => (None, Some(run)),
            Arm::Exhausted => (None, None),
        };
        row.record.waits_for = waits_for;
        if let Some(reason) = &commit.invalid {
            self.set_status(id, Status::Invalid { reason: reason.clone() }, now);
        } else if commit.next == Arm::Exhausted {
            self.set_status(id, Status::Exhausted, now);
        }
        self.set_token(id, token);
        Ok(Committed::Held)
    }

    /// Moves a breaker to half open for the probe that a plan makes; `false` if somebody else has the probe.
    fn take_probe(&mut self, now: Timestamp, commit: &Commit) -> bool {
        let Some(run) = commit.runs.iter().find(|run| run.probe) else { return true };
        let Some(policy) = self.agents.get(&commit.agent).and_then(|agent| agent.definition.breaker) else {
            return true;
        };
        let breaker = self.breaker_of(commit.agent, &run.command).breaker;
        if breaker.admits(&policy, now) != belfry_core::breaker::Admits::Probe {
            return false;
        }
        self.put_breaker(commit.agent, &run.command, breaker.probing(run.id, now));
        true
    }

    /// The breaker of an agent's command, as it counts now.
    pub(super) fn breaker_of(&self, agent: AgentId, command: &str) -> BreakerRecord {
        let found = self.breakers.get(&(agent, command.to_owned())).cloned().unwrap_or_default();
        let breaker = found.breaker.with_probe_if(|run| self.live.contains_key(&run));
        BreakerRecord { breaker, ..found }
    }

    pub(super) fn put_breaker(
        &mut self,
        agent: AgentId,
        command: &str,
        (next, transition): (Breaker, Option<Transition>),
    ) {
        let record = self.breakers.entry((agent, command.to_owned())).or_default();
        record.breaker = next;
        record.remember(transition);
    }

    pub(super) fn insert_run(&mut self, now: Timestamp, new: &NewRun) {
        let live = Live {
            new: new.clone(),
            created_at: now,
            running: None,
            not_before: new.not_before,
            put_off_at: None,
            attempt: 0,
            epoch: 0,
            started_at: None,
            cancel: None,
            exit_code: None,
            error: None,
            session: None,
            rescue: None,
            suspicions: 0,
        };
        self.live.insert(new.id, live);
    }

    pub(super) fn enqueue(&mut self, now: Timestamp, request: &Enqueue) -> Enqueued {
        let schedule = request.run.schedule;
        if self.schedules.get(&schedule).is_none_or(|row| row.retired_at.is_some()) {
            return Enqueued::NotFound;
        }
        let is_same = |live: &Live| live.new.schedule == schedule && live.new.tick_at == request.run.tick_at;
        if request.run.tick_at.is_some()
            && let Some((run, _)) = self.live.iter().find(|(_, live)| is_same(live))
        {
            return Enqueued::Repeat(*run);
        }
        if let Some(key) = &request.key {
            let place = (schedule, key.key.clone());
            match self.keys.get(&place) {
                Some((run, first)) if first.expires_at > now => {
                    return if first.body_hash == key.body_hash {
                        Enqueued::Repeat(*run)
                    } else {
                        Enqueued::KeyReused(*run)
                    };
                }
                _ => drop(self.keys.insert(place, (request.run.id, key.clone()))),
            }
        }
        self.insert_run(now, &request.run);
        // A plan that did not know of this run is not committed.
        self.touch(schedule);
        Enqueued::Made
    }

    pub(super) fn cancel(&mut self, now: Timestamp, run: RunId, reason: Reason) -> Cancelled {
        if let Some(ended) = self.ended.get(&run) {
            return Cancelled::Before(ended.state);
        }
        let Some(live) = self.live.get_mut(&run) else { return Cancelled::NotFound };
        if let Some(node) = live.running {
            live.cancel.get_or_insert(reason);
            return Cancelled::Told(node);
        }
        if !broken::is(Broken::CancelLost) {
            self.end_now(now, run, RunState::Cancelled, Some(reason));
        }
        Cancelled::Ended
    }
}
