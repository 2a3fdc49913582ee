//! Agents and schedules, as sources have them.

use std::sync::Arc;

use belfry_core::edit;
use belfry_core::{AgentId, Reason, RunId, RunState, ScheduleDefinition, ScheduleId};
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
            let agent = self.put_agent(source, spec);
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
        applied
    }

    pub(super) fn put_agent(&mut self, source: &str, spec: &AgentSpec) -> AgentId {
        let known = self.agents.iter_mut().find(|(_, agent)| !agent.retired && agent.name == spec.name);
        if let Some((id, agent)) = known {
            agent.revision += i64::from(*agent.definition != spec.definition);
            agent.definition = Arc::new(spec.definition.clone());
            agent.source = source.into();
            return *id;
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
        let place = (source.to_owned(), name.to_owned());
        if known.is_none() && self.spent.get(&place) == Some(definition) {
            return Put::Spent;
        }
        self.spent.remove(&place);
        let Some(id) = known else {
            return self.add_schedule(now, source, agent, name, definition, compiled);
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
        if let Some(row) = self.schedules.get_mut(&id) {
            row.record.definition = definition.clone();
            row.compiled = compiled.clone();
        }
        let new = (definition, super::compiled(&compiled));
        if edit::redefines(&found.status, Some(&old), new.0, new.1) {
            let change = edit::define(&found, (Some(&old), super::compiled(&old_compiled)), new, now);
            self.write(now, id, change);
        }
        Put::Changed(id)
    }

    fn add_schedule(
        &mut self,
        now: Timestamp,
        source: &str,
        agent: AgentId,
        name: &str,
        definition: &ScheduleDefinition,
        compiled: Compiled,
    ) -> Put {
        let id = self.number();
        let change = edit::add(definition, super::compiled(&compiled), now);
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
        let row = ScheduleRow { record, compiled, version: 0, fired_at: None, ended: [0, 0], retired: false };
        self.schedules.insert(id, row);
        self.write(now, id, change);
        Put::Added(id)
    }

    fn is_expired(&self, id: ScheduleId) -> bool {
        let Some((found, _, Ok(schedule))) = self.found(id) else { return false };
        edit::is_expired(&schedule, &found.status, found.origin)
    }

    fn retire_missing(&mut self, now: Timestamp, source: &str, agents: &[AgentSpec], applied: &mut Applied) {
        for agent in self.agents.values_mut() {
            agent.retired |= agent.source == source && !agents.iter().any(|spec| spec.name == agent.name);
        }
        let gone: Vec<ScheduleId> = self
            .schedules
            .values()
            .filter(|row| !row.retired)
            .filter(|row| {
                let orphan = self.agents.get(&row.record.agent).is_none_or(|agent| agent.retired);
                orphan || (row.record.source == source && !is_named(agents, &row.record.name))
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
        self.skips.entry(id).or_default().extend(edit::remove(&found, super::compiled(&compiled), now));
        self.set_token(id, None);
        let Some(row) = self.schedules.get_mut(&id) else { return Vec::new() };
        row.retired = true;
        row.record.waits_for = None;
        row.record.open_skip = None;
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
