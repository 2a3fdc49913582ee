//! Agents and schedules, as sources have them.

use std::sync::Arc;

use belfry_core::check::Status;
use belfry_core::gate::Place;
use belfry_core::{AgentId, Reason, RunState, ScheduleDefinition, ScheduleId, SkipReason, Token, Trigger};
use belfry_time::Timestamp;

use super::{Agent, ScheduleRow, State, compile, left_out};
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
            let agent = self.put_agent(source, spec);
            for (name, definition) in &spec.schedules {
                match self.put_schedule(now, source, agent, &format!("{}/{name}", spec.name), definition) {
                    Put::Added(_) => applied.added += 1,
                    Put::Changed(_) => applied.changed += 1,
                    Put::OwnedBy(_) => applied.foreign += 1,
                    Put::Unchanged(_) | Put::NoAgent | Put::Differs => {}
                }
            }
        }
        self.retire_missing(now, source, agents, &mut applied);
        self.sources.insert(source.into(), digest.into());
        applied
    }

    pub(super) fn put_agent(&mut self, source: &str, spec: &AgentSpec) -> AgentId {
        let known = self.agents.iter_mut().find(|(_, agent)| !agent.retired && agent.name == spec.name);
        if let Some((id, agent)) = known {
            let (id, is_changed) = (*id, *agent.definition != spec.definition);
            agent.revision += i64::from(is_changed);
            agent.definition = Arc::new(spec.definition.clone());
            agent.source = source.into();
            if is_changed {
                self.move_runs(id);
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
        self.agents.insert(id, Agent { name, source, revision: 1, definition, retired: false });
        id
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
        let compiled = compile(definition, name);
        let known =
            self.schedules.iter().find(|(_, row)| !row.retired && row.record.name == name).map(|(id, _)| *id);
        let Some(id) = known else {
            let id = self.number();
            let (status, token) = standing_of(definition, &compiled, Token::first(now));
            let record = ScheduleRecord {
                id,
                agent,
                agent_name: String::new(),
                name: name.into(),
                definition: definition.clone(),
                revision: 1,
                source: source.into(),
                status,
                status_since: now,
                token,
                waits_for: None,
                deferred: None,
                origin: None,
                open_skip: None,
                last: None,
                last_success: None,
                last_error: None,
                streak: 0,
                last_fired_at: None,
                running: 0,
                pending: 0,
                next_retry_at: None,
                budget: None,
            };
            let row =
                ScheduleRow { record, compiled, version: 0, fired_at: None, ended: [0, 0], retired: false };
            self.schedules.insert(id, row);
            self.add_revision(now, id);
            self.set_token(id, token);
            return Put::Added(id);
        };
        let Some(row) = self.schedules.get_mut(&id) else { return Put::Unchanged(id) };
        if row.record.source != source && [row.record.source.as_str(), source].contains(&API) {
            return Put::OwnedBy(row.record.source.clone());
        }
        row.record.source = source.into();
        if row.record.definition == *definition {
            return Put::Unchanged(id);
        }
        let old = row.record.definition.clone();
        let old_compiled = row.compiled.clone();
        let heals = heals(&row.record.status, &compiled);
        row.record.definition = definition.clone();
        row.compiled = compiled.clone();
        self.touch(id);
        self.move_runs(agent);
        if heals || old.timing_key() != definition.timing_key() {
            self.start_revision(now, id, &old_compiled, definition);
        } else if old.options.enabled != definition.options.enabled {
            self.switch(now, id, definition.options.enabled);
        }
        Put::Changed(id)
    }

    /// Moves the runs of an agent to the lane, labels and gates of its newest definitions. Those that run count there from
    /// now on, and wait there should they come back.
    fn move_runs(&mut self, id: AgentId) {
        let Some(agent) = self.agents.get(&id) else { return };
        for live in self.live.values_mut().filter(|live| live.new.agent == id) {
            let Some(row) = self.schedules.get(&live.new.schedule) else { continue };
            let is_message = live.new.trigger == Trigger::Message;
            let place = Place::of(&agent.definition, &row.record.definition.options, is_message);
            (live.new.gates, live.new.needs) = (place.gates, place.needs);
            if !live.new.own_lane {
                live.new.lane = place.lane;
            }
        }
    }

    /// New timing: no tick before now fires, none fires again.
    fn start_revision(
        &mut self,
        now: Timestamp,
        id: ScheduleId,
        old: &Result<Arc<belfry_core::Schedule>, Arc<str>>,
        definition: &ScheduleDefinition,
    ) {
        self.close_unarmed_span(now, id, old);
        self.close_open_skip(now, id, old);
        let Some(row) = self.schedules.get_mut(&id) else { return };
        row.record.revision += 1;
        row.record.origin = None;
        row.record.waits_for = None;
        self.add_revision(now, id);
        let Some(row) = self.schedules.get_mut(&id) else { return };
        let one_shot = row.compiled.as_ref().is_ok_and(|schedule| schedule.is_one_shot());
        let token = if one_shot { Token::first(now) } else { Token::next(now) };
        let (status, token) = standing_of(definition, &row.compiled, token);
        if let Status::Paused { until, .. } = row.record.status
            && until.is_none_or(|until| until > now)
        {
            // What it has left out so far is recorded: from here on the new timing counts.
            row.record.status_since = now;
            return self.set_token(id, until.map(|until| Token::resume(now, until)));
        }
        self.set_status(id, status, now);
        self.set_token(id, token);
    }

    fn switch(&mut self, now: Timestamp, id: ScheduleId, enabled: bool) {
        let Some(row) = self.schedules.get(&id) else { return };
        let compiled = row.compiled.clone();
        match (&row.record.status, enabled) {
            (Status::Active, false) => {
                self.close_open_skip(now, id, &compiled);
                self.set_status(id, Status::Disabled, now);
                self.set_token(id, None);
            }
            (Status::Disabled, true) => {
                self.close_unarmed_span(now, id, &compiled);
                self.set_status(id, Status::Active, now);
                let waits = self.schedules.get(&id).is_some_and(|row| row.record.waits_for.is_some());
                self.set_token(id, (!waits).then(|| Token::next(now)));
            }
            _ => {}
        }
    }

    /// Records what a disabled or paused span has left out.
    fn close_unarmed_span(
        &mut self,
        now: Timestamp,
        id: ScheduleId,
        compiled: &Result<Arc<belfry_core::Schedule>, Arc<str>>,
    ) {
        let Some(row) = self.schedules.get(&id) else { return };
        if let Some(end) = unarmed_until(&row.record.status, now)
            && let Some(range) = left_out(compiled, SkipReason::Disabled, row.record.status_since, end)
        {
            self.skips.entry(id).or_default().push(range);
        }
    }

    fn retire_missing(&mut self, now: Timestamp, source: &str, agents: &[AgentSpec], applied: &mut Applied) {
        let kept = |name: &str| {
            agents.iter().any(|spec| {
                spec.schedules.iter().any(|(schedule, _)| format!("{}/{schedule}", spec.name) == name)
            })
        };
        for agent in self.agents.values_mut() {
            agent.retired |= agent.source == source && !agents.iter().any(|spec| spec.name == agent.name);
        }
        let gone: Vec<ScheduleId> = self
            .schedules
            .values()
            .filter(|row| !row.retired)
            .filter(|row| {
                let orphan = self.agents.get(&row.record.agent).is_none_or(|agent| agent.retired);
                orphan || (row.record.source == source && !kept(&row.record.name))
            })
            .map(|row| row.record.id)
            .collect();
        for id in gone {
            applied.retired += 1;
            applied.cancelled += self.retire(now, id);
        }
    }

    /// Retires a schedule, and says how many of its runs were waiting and have ended.
    pub(super) fn retire(&mut self, now: Timestamp, id: ScheduleId) -> u32 {
        let Some(row) = self.schedules.get(&id) else { return 0 };
        let compiled = row.compiled.clone();
        self.close_open_skip(now, id, &compiled);
        self.set_token(id, None);
        let Some(row) = self.schedules.get_mut(&id) else { return 0 };
        row.retired = true;
        row.record.waits_for = None;
        let reason = if self.agents.get(&row.record.agent).is_some_and(|agent| agent.retired) {
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
            self.end(now, *run, RunState::Cancelled, Some(reason), None, None);
        }
        pending.len() as u32
    }
}

/// Until when an unarmed span has lasted, if there is one: a pause may have ended before anybody planned its end.
pub(crate) fn unarmed_until(status: &Status, now: Timestamp) -> Option<Timestamp> {
    match status {
        Status::Disabled => Some(now),
        Status::Paused { until, .. } => Some(until.map_or(now, |until| until.min(now))),
        Status::Active | Status::Invalid { .. } | Status::Exhausted => None,
    }
}

/// Whether an edit ends what made a schedule invalid. It then starts a new revision, also where its timing is the same.
pub(crate) fn heals(status: &Status, compiled: &Result<Arc<belfry_core::Schedule>, Arc<str>>) -> bool {
    matches!(status, Status::Invalid { .. }) && compiled.is_ok()
}

/// Where a schedule stands by its definition alone, and whether it is armed.
pub(crate) fn standing_of(
    definition: &ScheduleDefinition,
    compiled: &Result<Arc<belfry_core::Schedule>, Arc<str>>,
    token: Token,
) -> (Status, Option<Token>) {
    match compiled {
        Err(reason) => (Status::Invalid { reason: reason.to_string() }, None),
        Ok(_) if !definition.options.enabled => (Status::Disabled, None),
        Ok(schedule) => (Status::Active, schedule.timing.is_some().then_some(token)),
    }
}
