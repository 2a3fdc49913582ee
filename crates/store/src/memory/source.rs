//! Agents and schedules, as sources have them.

use std::sync::Arc;

use belfry_core::broken::{self, Broken};
use belfry_core::edit::{self, NeverFired};
use belfry_core::ending;
use belfry_core::gate::{Place, turn};
use belfry_core::{AgentId, Reason, RunId, RunState, ScheduleDefinition, ScheduleId, Trigger};
use belfry_time::Timestamp;

use super::{Agent, Compiled, ScheduleRow, State, compile};
use crate::shapes::*;
use crate::views::*;

impl State {
    pub(super) fn apply(
        &mut self,
        now: Timestamp,
        source: &str,
        digest: &str,
        agents: &[AgentSpec],
    ) -> Applied {
        let mut applied = Applied::default();
        for spec in agents {
            let agent = self.put_agent(now, source, spec);
            applied.agents += u32::from(self.edited.contains(&agent));
            for (name, definition) in &spec.schedules {
                let name = format!("{}/{name}", spec.name);
                let put = self.put_schedule(now, source, agent, &name, definition);
                applied.count(&put);
                if let Put::Added(id) | Put::Changed(id) = put {
                    applied.expired += u32::from(self.is_expired(id));
                }
            }
        }
        self.retire_missing(now, source, agents, &mut applied);
        self.spent.retain(|(from, name), _| from != source || is_named(agents, name));
        self.sources.insert(source.into(), digest.into());
        self.move_edited();
        applied
    }

    pub(super) fn put_agent(&mut self, now: Timestamp, source: &str, spec: &AgentSpec) -> AgentId {
        let lives = |id: AgentId| self.live.values().any(|live| live.new.agent == id);
        let known = self
            .agents
            .iter_mut()
            .find(|(id, agent)| agent.name == spec.name && (agent.retired_at.is_none() || lives(**id)));
        if let Some((id, agent)) = known {
            agent.retired_at = None;
            let (id, is_changed) = (*id, *agent.definition != spec.definition);
            let old_budget = agent.definition.budget;
            agent.revision += i64::from(is_changed);
            agent.definition = Arc::new(spec.definition.clone());
            agent.source = source.into();
            if spec.definition.breaker.is_none() {
                self.clear_breakers(now, id);
            }
            let (old, new) = (old_budget.as_ref(), spec.definition.budget.as_ref());
            let (used, waiting) = ending::redefine(self.budgets.get(&id).copied(), old, new, now);
            self.set_budget(id, used);
            self.move_waiting(now, id, waiting);
            if is_changed {
                self.edited.insert(id);
                let own = self.schedules.iter().filter(|(_, row)| row.record.agent == id);
                for schedule in own.map(|(schedule, _)| *schedule).collect::<Vec<_>>() {
                    self.touch(schedule);
                }
            }
            return id;
        }
        let id = self.number();
        let definition = Arc::new(spec.definition.clone());
        let (name, source) = (spec.name.clone(), source.into());
        self.agents.insert(id, Agent { name, source, revision: 1, definition, retired_at: None });
        id
    }

    /// Closes the breakers of an agent that has no policy for them any more.
    fn clear_breakers(&mut self, now: Timestamp, id: AgentId) {
        let own = self.breakers.keys().filter(|(agent, _)| *agent == id);
        for (agent, command) in own.cloned().collect::<Vec<_>>() {
            let breaker = self.breaker_of(agent, &command).breaker;
            self.put_breaker(agent, &command, breaker.reset(now));
        }
    }

    /// Makes a schedule what it is in a source. What the API owns is the API's alone; sources of files take over from
    /// each other.
    pub(super) fn put_schedule(
        &mut self,
        now: Timestamp,
        source: &str,
        agent: AgentId,
        name: &str,
        definition: &ScheduleDefinition,
    ) -> Put {
        let known = self
            .schedules
            .iter()
            .find(|(_, row)| row.retired_at.is_none() && row.record.name == name)
            .map(|(id, _)| *id);
        let place = (source.to_owned(), name.to_owned());
        if known.is_none() && self.spent.get(&place) == Some(definition) {
            return Put::Spent;
        }
        self.spent.remove(&place);
        let Some(id) = known else {
            return match self.retired_with_runs(name) {
                Some(id) => self.restore(now, source, id, definition, compile(definition, name)),
                None => self.add_schedule(now, source, agent, name, definition),
            };
        };
        let Some(row) = self.schedules.get_mut(&id) else { return Put::Unchanged(id) };
        if row.record.source != source && [row.record.source.as_str(), source].contains(&API) {
            return Put::OwnedBy(row.record.source.clone());
        }
        row.record.source = source.into();
        let Some((found, old, old_compiled)) = self.found(id) else { return Put::Unchanged(id) };
        if old == *definition {
            return Put::Unchanged(id);
        }
        let compiled = compile(definition, name);
        if let Some(row) = self.schedules.get_mut(&id) {
            row.record.definition = definition.clone();
            row.compiled = compiled.clone();
        }
        self.touch(id);
        self.edited.insert(agent);
        let new = (definition, super::compiled(&compiled));
        if edit::redefines(&found.status, Some(&old), new.0, new.1) {
            let change = edit::define(&found, (Some(&old), super::compiled(&old_compiled)), new, now);
            self.write(now, id, change);
        }
        Put::Changed(id)
    }

    /// A schedule of this name that was retired while a run of it lived, which still does.
    fn retired_with_runs(&self, name: &str) -> Option<ScheduleId> {
        let lives = |id: ScheduleId| self.live.values().any(|live| live.new.schedule == id);
        let mut named = self.schedules.iter().filter(|(_, row)| row.record.name == name);
        named.find(|(id, _)| lives(**id)).map(|(id, _)| *id)
    }

    fn restore(
        &mut self,
        now: Timestamp,
        source: &str,
        id: ScheduleId,
        definition: &ScheduleDefinition,
        compiled: Compiled,
    ) -> Put {
        if let Some(row) = self.schedules.get_mut(&id) {
            row.retired_at = None;
            row.record.source = source.into();
            row.record.definition = definition.clone();
            row.compiled = compiled.clone();
            self.edited.insert(row.record.agent);
        }
        if let Some((found, ..)) = self.found(id) {
            let change = edit::restore(&found, definition, super::compiled(&compiled), now);
            self.write(now, id, change);
        }
        Put::Added(id)
    }

    /// Moves the runs of agents whose definitions this verb has changed to their new lanes, labels and gates. Those that run
    /// count there from now on, and wait there should they come back.
    pub(super) fn move_edited(&mut self) {
        for agent in std::mem::take(&mut self.edited) {
            self.move_runs(agent);
        }
    }

    fn move_runs(&mut self, id: AgentId) {
        let Some(agent) = self.agents.get(&id) else { return };
        for live in self.live.values_mut().filter(|live| live.new.agent == id) {
            let Some(row) = self.schedules.get(&live.new.schedule) else { continue };
            let is_message = live.new.trigger == Trigger::Message;
            let place = Place::of(&agent.definition, &row.record.definition.options, is_message);
            live.new.max_attempts = place.attempts(live.attempt, live.running.is_some());
            (live.new.gates, live.new.needs) = (place.gates, place.needs);
            if !live.new.own_lane {
                live.new.lane = place.lane;
            }
        }
        // What waits for room in a lane that is no longer its own is planned again at once.
        let is_moved = |row: &ScheduleRow, lane: &str| {
            let is_own = row.record.agent == id && row.record.token.is_none();
            is_own && Place::of(&agent.definition, &row.record.definition.options, false).lane != lane
        };
        let deferred = self.deferred.iter();
        let moved =
            deferred.filter(|(id, it)| self.schedules.get(id).is_some_and(|row| is_moved(row, &it.lane)));
        for (id, deferred) in moved.map(|(id, it)| (*id, it.clone())).collect::<Vec<_>>() {
            self.arm(id, deferred);
        }
    }

    fn add_schedule(
        &mut self,
        now: Timestamp,
        source: &str,
        agent: AgentId,
        name: &str,
        definition: &ScheduleDefinition,
    ) -> Put {
        let compiled = compile(definition, name);
        let id = self.number();
        let before = self.schedules.values().filter(|row| row.record.name == name);
        let planned_before = before.filter_map(|row| row.record.planned_at).max();
        let change = edit::add(definition, super::compiled(&compiled), planned_before, now);
        let record = ScheduleRecord {
            id,
            agent,
            agent_name: String::new(),
            name: name.into(),
            definition: definition.clone(),
            revision: 0,
            source: source.into(),
            status: change.status.clone(),
            status_since: now,
            token: None,
            waits_for: None,
            deferred: None,
            origin: None,
            open_skip: None,
            cursor_at: None,
            planned_at: None,
            last: None,
            last_success: None,
            last_error: None,
            streak: 0,
            last_fired_at: None,
            running: 0,
            pending: 0,
            next_retry_at: None,
            budget: None,
            unreadable: None,
        };
        let row =
            ScheduleRow { record, compiled, version: 0, fired_at: None, ended: [0, 0], retired_at: None };
        // What an earlier schedule of this name has taken is not taken again.
        let is_of_name = |(of, _): &(ScheduleId, String)| {
            self.schedules.get(of).is_some_and(|old| *old.record.name == *name)
        };
        let taken: Vec<_> = self.keys.keys().filter(|place| is_of_name(place)).cloned().collect();
        for place in taken {
            if let Some(kept) = self.keys.remove(&place) {
                self.keys.insert((id, place.1), kept);
            }
        }
        self.schedules.insert(id, row);
        self.write(now, id, change);
        if turn(&definition.options).is_some() {
            self.edited.insert(agent);
        }
        Put::Added(id)
    }

    fn is_expired(&self, id: ScheduleId) -> bool {
        let Some((found, _, Ok(schedule))) = self.found(id) else { return false };
        edit::never_fired(&schedule, &found) == Some(NeverFired::TimePassed)
    }

    fn retire_missing(&mut self, now: Timestamp, source: &str, agents: &[AgentSpec], applied: &mut Applied) {
        for agent in self.agents.values_mut() {
            if agent.source == source && !agents.iter().any(|spec| spec.name == agent.name) {
                agent.retired_at.get_or_insert(now);
            }
        }
        let gone: Vec<ScheduleId> = self
            .schedules
            .values()
            .filter(|row| row.retired_at.is_none())
            .filter(|row| {
                let orphan =
                    self.agents.get(&row.record.agent).is_none_or(|agent| agent.retired_at.is_some());
                let is_own = row.record.source == source || broken::is(Broken::ReloadRetiresForeign);
                orphan || (is_own && !is_named(agents, &row.record.name))
            })
            .map(|row| row.record.id)
            .collect();
        for id in gone {
            applied.retired += 1;
            applied.ended.extend(self.retire(now, id));
        }
        applied.ended.sort_unstable();
    }

    /// Retires a schedule, and gives those of its runs that were waiting and have ended.
    pub(super) fn retire(&mut self, now: Timestamp, id: ScheduleId) -> Vec<RunId> {
        let Some((found, _, compiled)) = self.found(id) else { return Vec::new() };
        self.write(now, id, edit::remove(&found, super::compiled(&compiled), now));
        let Some(row) = self.schedules.get_mut(&id) else { return Vec::new() };
        row.retired_at = Some(now);
        self.edited.insert(row.record.agent);
        let reason = if self.agents.get(&row.record.agent).is_some_and(|agent| agent.retired_at.is_some()) {
            Reason::AgentRemoved
        } else {
            Reason::ScheduleRemoved
        };
        let pending: Vec<_> = self
            .live
            .iter()
            .filter(|(_, live)| live.new.schedule == id && live.running.is_none())
            .map(|(run, _)| *run)
            .collect();
        for run in &pending {
            self.end_now(now, *run, RunState::Cancelled, Some(reason));
        }
        pending
    }
}

/// Whether a source names a schedule.
fn is_named(agents: &[AgentSpec], name: &str) -> bool {
    let names = |spec: &AgentSpec| {
        spec.schedules.iter().any(|(schedule, _)| format!("{}/{schedule}", spec.name) == name)
    };
    agents.iter().any(names)
}
