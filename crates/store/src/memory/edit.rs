//! Agents and schedules that come and go through the API, and what the engine asks for to start their runs.

use std::sync::Arc;

use belfry_core::{AgentDefinition, ScheduleDefinition, ScheduleId};
use belfry_time::Timestamp;

use super::State;
use crate::shapes::*;
use crate::views::*;

impl State {
    pub(super) fn put_by_api(
        &mut self,
        now: Timestamp,
        agent: &str,
        name: &str,
        definition: &ScheduleDefinition,
        expect: &Expect,
    ) -> Put {
        let known = self.agents.iter().find(|(_, known)| known.retired_at.is_none() && known.name == agent);
        let Some((id, _)) = known else { return Put::NoAgent };
        let name = format!("{agent}/{name}");
        let found = self.schedules.values().find(|row| row.retired_at.is_none() && row.record.name == name);
        let is_ours = found.is_none_or(|row| row.record.source == API);
        if is_ours && !expect.holds(found.map(|row| (row.record.revision, &row.record.definition))) {
            return Put::Differs;
        }
        let put = self.put_schedule(now, API, *id, &name, definition);
        self.move_edited();
        put
    }

    pub(super) fn remove_by_api(&mut self, now: Timestamp, id: ScheduleId, expect: &Expect) -> Removed {
        let Some(row) = self.schedules.get(&id).filter(|row| row.retired_at.is_none()) else {
            return Removed::NotFound;
        };
        if row.record.source != API {
            return Removed::OwnedBy(row.record.source.clone());
        }
        if !expect.holds(Some((row.record.revision, &row.record.definition))) {
            return Removed::Differs;
        }
        let ended = self.retire(now, id);
        self.move_edited();
        Removed::Gone { ended }
    }

    pub(super) fn put_agent_by_api(
        &mut self,
        now: Timestamp,
        spec: &AgentSpec,
        whole: bool,
        expect: &Expect<AgentDefinition>,
    ) -> PutAgent {
        let known = self.agents.values().find(|agent| agent.retired_at.is_none() && agent.name == spec.name);
        if let Some(agent) = known.filter(|agent| agent.source != API) {
            return PutAgent::OwnedBy(agent.source.clone());
        }
        if !expect.holds(known.map(|agent| (agent.revision, &*agent.definition))) {
            return PutAgent::Differs;
        }
        let before = known.map(|agent| agent.definition.clone());
        let mut is_changed = before.as_ref().is_some_and(|before| **before != spec.definition);
        let id = self.put_agent(now, API, spec);
        let mut kept = Vec::new();
        for (name, definition) in &spec.schedules {
            let name = format!("{}/{name}", spec.name);
            is_changed |= self.put_schedule(now, API, id, &name, definition).is_news();
            kept.push(name);
        }
        let own = self.schedules.values().filter(|row| row.retired_at.is_none() && row.record.agent == id);
        let mut ended = Vec::new();
        let gone = own.filter(|row| whole && row.record.source == API && !kept.contains(&row.record.name));
        for schedule in gone.map(|row| row.record.id).collect::<Vec<_>>() {
            ended.extend(self.retire(now, schedule));
            is_changed = true;
        }
        self.move_edited();
        ended.sort_unstable();
        PutAgent::of(before.is_some(), is_changed, ended)
    }

    pub(super) fn remove_agent_by_api(
        &mut self,
        now: Timestamp,
        name: &str,
        expect: &Expect<AgentDefinition>,
    ) -> Removed {
        let known =
            self.agents.iter_mut().find(|(_, agent)| agent.retired_at.is_none() && agent.name == name);
        let Some((id, agent)) = known else { return Removed::NotFound };
        if agent.source != API {
            return Removed::OwnedBy(agent.source.clone());
        }
        if !expect.holds(Some((agent.revision, &*agent.definition))) {
            return Removed::Differs;
        }
        agent.retired_at = Some(now);
        let (id, mut ended) = (*id, Vec::new());
        let own = self.schedules.values().filter(|row| row.retired_at.is_none() && row.record.agent == id);
        for schedule in own.map(|row| row.record.id).collect::<Vec<_>>() {
            ended.extend(self.retire(now, schedule));
        }
        self.move_edited();
        ended.sort_unstable();
        Removed::Gone { ended }
    }

    pub(super) fn definitions(&self, id: ScheduleId) -> Option<Definitions> {
        let row = self.schedules.get(&id)?;
        let agent = self.agents.get(&row.record.agent)?;
        Some(Definitions {
            schedule: id,
            agent: row.record.agent,
            name: Arc::from(row.record.name.as_str()),
            agent_name: Arc::from(agent.name.as_str()),
            agent_revision: agent.revision,
            agent_definition: agent.definition.clone(),
            compiled: row.compiled.clone(),
            uncompiled: row.compiled.is_err().then(|| Arc::new(row.record.definition.clone())),
            origin: row.record.origin,
            cursor_at: row.record.cursor_at,
            waits_for: row.record.waits_for,
            last_success_at: row.record.last_success.map(|(at, _)| at),
            unreadable: None,
        })
    }
}
