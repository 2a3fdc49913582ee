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
    ) -> Put {
        let known = self.agents.iter().find(|(_, known)| !known.retired && known.name == agent);
        let Some((id, _)) = known else { return Put::NoAgent };
        self.put_schedule(now, API, *id, &format!("{agent}/{name}"), definition)
    }

    pub(super) fn remove_by_api(&mut self, now: Timestamp, id: ScheduleId) -> Removed {
        let Some(row) = self.schedules.get(&id).filter(|row| !row.retired) else { return Removed::NotFound };
        if row.record.source != API {
            return Removed::OwnedBy(row.record.source.clone());
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
