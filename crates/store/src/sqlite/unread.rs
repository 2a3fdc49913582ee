//! What this version cannot read.

use std::sync::Arc;

use belfry_core::definition::{FORMAT, Unreadable, read_stored};
use belfry_core::{AgentDefinition, AgentId, ScheduleDefinition, ScheduleId};
use rusqlite::params;

use super::source::to_json;
use super::{Done, Verb};
use crate::error::Error;
use crate::unread::{UNREAD_MAX, UNREADABLE_ROWS_MAX};
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

    pub(super) fn unreadable_rows(&self) -> Done<Vec<String>> {
        let mut found = Vec::new();
        for sql in UNREADABLE_ROWS {
            let sql = sql
                .replace("IN_RANGE", "between -62135596800000000 and 253402207200999999")
                .replace("IS_U32", "between 0 and 4294967295");
            found.extend(self.rows(format!("{sql} limit {UNREADABLE_ROWS_MAX}"), [], |row| row.get(0))?);
        }
        Ok(found)
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

/// Rows of which a part counts as something else: each query gives a sentence for each row.
const UNREADABLE_ROWS: &[&str] = &[
    "select 'agent ' || name || ': its stored breaker or budget policy cannot be read; it has none' from agents
     where retired_at is null and (not case when json_valid(coalesce(breaker, '{}')) then json_type(coalesce(breaker, '{}')) = 'object' end is true
        or not case when json_valid(coalesce(budget, '{}')) then json_type(coalesce(budget, '{}')) = 'object' end is true)",
    "select 'agent ' || coalesce(a.name, b.agent_id) || ': its stored failure budget is out of range'
     from budgets b left join agents a on a.id = b.agent_id
     where not (b.period_start IN_RANGE and b.failures IS_U32)",
    "select 'agent ' || coalesce(a.name, b.agent_id) || ': its stored breaker cannot be read; it counts as closed'
     from breakers b left join agents a on a.id = b.agent_id where not json_valid(b.breaker)",
    "select 'schedule ' || s.name || ': an instant of its stored state is out of range'
     from schedule_state st join schedules s on s.id = st.schedule_id where s.retired_at is null
        and not (st.status_since IN_RANGE and coalesce(st.status_until, 0) IN_RANGE and coalesce(st.origin, 0) IN_RANGE
            and coalesce(st.skip_from, 0) IN_RANGE and coalesce(st.skip_to, 0) IN_RANGE
            and coalesce(st.last_tick_at, 0) IN_RANGE and coalesce(st.last_finished_at, 0) IN_RANGE
            and coalesce(st.last_success_at, 0) IN_RANGE)",
    "select 'lane ' || name || ': its stored slots or limits are out of range; the nearest number holds' from lanes
     where not (slots IS_U32 and coalesce(cap, 0) IS_U32 and coalesce(queue_limit, 0) IS_U32)",
    "select 'node ' || lower(hex(id)) || ': its stored labels or instants cannot be read' from nodes where not fenced
        and not (json_valid(labels) and started_at IN_RANGE and lease_until IN_RANGE and last_seen_at IN_RANGE)",
    "select 'snapshot ' || number || ' cannot be read' from (select * from snapshots order by number desc limit 1000)
     where not json_valid(snapshot)",
    "select 'row ' || number || ' of the audit: its instant or status is out of range'
     from (select * from audit order by number desc limit 1000)
     where not (at IN_RANGE and coalesce(status, 0) between 0 and 65535)",
    "select 'token ' || id || ': an instant of it is out of range; one with such an expiry has expired' from tokens
     where not (created_at IN_RANGE and coalesce(expires_at, 0) IN_RANGE and coalesce(revoked_at, 0) IN_RANGE)",
];
