//! What this version cannot read.

use std::sync::Arc;

use belfry_core::definition::{FORMAT, Unreadable, read_stored};
use belfry_core::{AgentDefinition, AgentId, ScheduleDefinition, ScheduleId};
use rusqlite::params;

use super::source::to_json;
use super::{Done, Verb};
use crate::error::Error;
use crate::unread::UNREAD_MAX;
use crate::views::UnreadableSchedule;

impl Verb<'_> {
    /// The ids of schedules that are left alone, as a JSON array.
    pub(super) fn unread_ids(&self) -> Done<String> {
        to_json(&self.shared.unread.ids())
    }

    /// What an agent is, now, or why that cannot be read.
    pub(super) fn read_agent(&self, id: AgentId) -> Done<Option<Result<AgentDefinition, Unreadable>>> {
        let found = self.row("select format, definition from agents where id = ?", [id], |row| {
            Ok((row.get(0)?, row.get::<_, String>(1)?))
        })?;
        Ok(found.map(|(format, text)| read_stored(format, &text)))
    }

    /// What an agent is, now.
    pub(super) fn agent_definition(&self, id: AgentId) -> Done<Option<AgentDefinition>> {
        let read = self.read_agent(id)?.transpose();
        read.map_err(|error| Error::unexpected(format!("an agent {error}")))
    }

    /// Why a schedule cannot be read, apart from its agent.
    pub(super) fn why_unreadable(
        &self,
        id: ScheduleId,
        name: &str,
        format: i32,
        text: &str,
    ) -> Option<Unreadable> {
        if format <= FORMAT && self.compile(id, name, text).is_ok() {
            return None;
        }
        read_stored::<ScheduleDefinition>(format, text).err()
    }

    pub(super) fn find_unreadable(&self) -> Done<Vec<UnreadableSchedule>> {
        let found = self.rows(
            "select s.id, s.name, s.format, s.definition, a.format, a.definition
             from schedules s join agents a on a.id = s.agent_id where s.retired_at is null and s.id in (
                 select id from schedules where format > 1 and format > ?1
                 union select c.id from agents g join schedules c on c.agent_id = g.id where g.format > 1 and g.format > ?1
                 union select value from json_each(?2)) order by s.id limit ?3",
            params![FORMAT, self.unread_ids()?, UNREAD_MAX as i64],
            |row| {
                let (format, text) = (row.get(2)?, row.get_ref(3)?.as_str()?);
                let (agent_format, agent_text) = (row.get(4)?, row.get_ref(5)?.as_str()?);
                let why = read_stored::<ScheduleDefinition>(format, text)
                    .err()
                    .or_else(|| read_stored::<AgentDefinition>(agent_format, agent_text).err());
                Ok((row.get::<_, ScheduleId>(0)?, row.get::<_, String>(1)?, why))
            },
        )?;
        let unreadable: Vec<UnreadableSchedule> = found
            .into_iter()
            .filter_map(|(schedule, name, why)| {
                Some(UnreadableSchedule { schedule, name, why: Arc::from(why?.to_string()) })
            })
            .collect();
        self.shared.unread.set(unreadable.iter().map(|found| (found.schedule, found.why.clone())));
        Ok(unreadable)
    }
}
