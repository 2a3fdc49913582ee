//! Schedules that come and go through the API, and what the engine asks for to start their runs.

use std::sync::Arc;

use belfry_core::{ScheduleDefinition, ScheduleId};
use belfry_time::Timestamp;

use super::State;
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
        let known = self.agents.iter().find(|(_, known)| !known.retired && known.name == agent);
        let Some((id, _)) = known else { return Put::NoAgent };
        let name = format!("{agent}/{name}");
        let found = self.schedules.values().find(|row| !row.retired && row.record.name == name);
        let is_ours = found.is_none_or(|row| row.record.source == API);
        if is_ours && !expect.holds(found.map(|row| (row.record.revision, &row.record.definition))) {
            return Put::Differs;
        }
        self.put_schedule(now, API, *id, &name, definition)
    }

    pub(super) fn remove_by_api(&mut self, now: Timestamp, id: ScheduleId, expect: &Expect) -> Removed {
        let Some(row) = self.schedules.get(&id).filter(|row| !row.retired) else { return Removed::NotFound };
        if row.record.source != API {
            return Removed::OwnedBy(row.record.source.clone());
        }
        if !expect.holds(Some((row.record.revision, &row.record.definition))) {
            return Removed::Differs;
        }
        Removed::Gone { cancelled: self.retire(now, id) }
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
            origin: row.record.origin,
            waits_for: row.record.waits_for,
        })
    }
}
