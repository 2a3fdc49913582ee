//! What this version cannot read.

use std::sync::Arc;

use belfry_core::definition::{FORMAT, Unreadable, read_stored};
use belfry_core::{AgentDefinition, AgentId, ScheduleDefinition, ScheduleId};
use rusqlite::{Row, RowIndex, params};

use super::source::to_json;
use super::{Done, Verb, json, number, text};
use crate::error::Error;
use crate::unknown::Number;
use crate::unread::{UNREAD_MAX, UNREADABLE_ROWS_MAX};
use crate::views::UnreadableSchedule;

/// Waiting runs that no claim can start: see [`own_id`] and [`counter`].
const UNCLAIMABLE: &str =
    "(length(id) <> 16 or epoch not between -2147483648 and 2147483646 or attempt > 4294967294)";

/// The id of a run that is to be claimed. One of a wrong length fails the claim, and [`Verb::set_aside`] follows.
pub(super) fn own_id(row: &Row<'_>, column: impl RowIndex) -> rusqlite::Result<[u8; 16]> {
    let wrong = || rusqlite::Error::InvalidColumnName("an id of a wrong length".into());
    row.get_ref(column)?.as_blob()?.try_into().map_err(|_| wrong())
}

/// A stored number that a claim adds one to. One that leaves no room for that fails the claim, and [`Verb::set_aside`]
/// follows.
pub(super) fn counter<T: Number + Into<i64>>(row: &Row<'_>, column: impl RowIndex) -> rusqlite::Result<T> {
    let stored: i64 = row.get(column)?;
    let (least, most): (i64, i64) = (T::nearest(i64::MIN).into(), T::nearest(i64::MAX).into());
    // A number of attempts below zero is none.
    match stored < most && (stored >= least || least == 0) {
        true => Ok(T::nearest(stored)),
        false => Err(rusqlite::Error::IntegralValueOutOfRange(0, stored)),
    }
}

impl Verb<'_> {
    /// The ids of schedules that are left alone, as a JSON array.
    pub(super) fn unread_ids(&self) -> Done<String> {
        to_json(&self.shared.unread.ids())
    }

    /// Parks waiting runs that no claim can start, at no gate, and names them. Every other run can be claimed then: what
    /// waited behind them is let through. A claim makes those ready that came back or that a gate held, and takes that back
    /// when it fails: they are among these.
    pub(super) fn set_aside(&self) -> Done<Vec<String>> {
        let these = format!("(state in (0, 3) or parked_on is not null) and {UNCLAIMABLE}");
        let gates = self.rows(
            format!(
                "select gate from (select agent_gate as gate from live where {these}
                   union select turn_gate from live where {these} union select alone_gate from live where {these})
                 where gate is not null"
            ),
            [],
            |row| row.get::<_, i64>(0),
        )?;
        let named = self.rows(
            format!(
                "update live set state = 1, parked_on = null, turn_gate = null, alone_gate = null where {these} returning id"
            ),
            [],
            |row| {
                let id = row.get_ref(0)?.as_blob()?;
                let hex = || id.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
                Ok(uuid::Uuid::from_slice(id).map_or_else(|_| hex(), |id| id.to_string()))
            },
        )?;
        for gate in gates {
            self.release(gate)?;
        }
        Ok(named)
    }

    /// What an agent is, now, or why that cannot be read.
    pub(super) fn read_agent(&self, id: AgentId) -> Done<Option<Result<AgentDefinition, Unreadable>>> {
        Ok(self.stored_agent(id)?.map(|(format, text)| read_stored(format, &text)))
    }

    /// An agent as it is stored: format and text.
    pub(super) fn stored_agent(&self, id: AgentId) -> Done<Option<(i32, String)>> {
        self.row("select format, definition from agents where id = ?", [id], |row| {
            Ok((number(row, 0)?, json(row, 1)?))
        })
    }

    /// What an agent is, now.
    pub(super) fn agent_definition(&self, id: AgentId) -> Done<Option<AgentDefinition>> {
        let read = self.read_agent(id)?.transpose();
        read.map_err(|error| Error::unexpected(format!("an agent: {error}")))
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
                .replace("IS_U32", "between 0 and 4294967295")
                .replace("UNCLAIMABLE", UNCLAIMABLE)
                .replace("RUN_ID", UUID_TEXT);
            found.extend(self.rows(format!("{sql} limit {UNREADABLE_ROWS_MAX}"), [], |row| text(row, 0))?);
        }
        for (kind, sql) in NAMES {
            let names = self.rows(format!("{sql} limit 1000"), [], |row| {
                Ok(String::from_utf8(row.get_ref(0)?.as_bytes()?.to_vec()).err())
            })?;
            let wrong = names.into_iter().flatten().take(UNREADABLE_ROWS_MAX as usize);
            let told = |name: std::string::FromUtf8Error| {
                format!(
                    "{kind} {}: its name is not UTF-8; lists leave it out",
                    name.into_bytes().escape_ascii()
                )
            };
            found.extend(wrong.map(told));
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
                let (format, definition) = (number(row, 2)?, json(row, 3)?);
                let (agent_format, agent) = (number(row, 4)?, json(row, 5)?);
                let why = read_stored::<ScheduleDefinition>(format, &definition)
                    .err()
                    .or_else(|| read_stored::<AgentDefinition>(agent_format, &agent).err());
                Ok((row.get::<_, ScheduleId>(0)?, text(row, 1)?, why))
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

/// The id of a row as text.
const UUID_TEXT: &str = "case length(id) when 16 then lower(substr(hex(id), 1, 8) || '-' || substr(hex(id), 9, 4) || '-'
    || substr(hex(id), 13, 4) || '-' || substr(hex(id), 17, 4) || '-' || substr(hex(id), 21)) else lower(hex(substr(id, 1, 16))) end";

/// Names that are not plain ASCII, by kind.
const NAMES: [(&str, &str); 2] = [
    ("schedule", "select name from schedules where retired_at is null and name glob '*[^ -~]*'"),
    ("agent", "select name from agents where retired_at is null and name glob '*[^ -~]*'"),
];

/// Rows of which a part counts as something else: each query gives a sentence for each row.
const UNREADABLE_ROWS: &[&str] = &[
    "select 'run ' || RUN_ID || ': its stored id, epoch or attempt is out of range; it is never started. '
        || '`belfry cancel` ends it, if its id has 16 bytes' from live where UNCLAIMABLE",
    "select 'run ' || RUN_ID || ': its stored node or trace id has a wrong length; it counts as missing' from live
     where length(coalesce(node_id, zeroblob(16))) <> 16 or length(coalesce(trace_id, zeroblob(16))) <> 16",
    "select 'run ' || RUN_ID || ': an id of it has a wrong length; the run is left out, or that id counts as missing'
     from (select id, node_id, trace_id, previous from history order by id desc limit 1000)
     where length(id) <> 16 or length(coalesce(node_id, zeroblob(16))) <> 16
        or length(coalesce(trace_id, zeroblob(16))) <> 16 or length(coalesce(previous, zeroblob(16))) <> 16",
    "select 'schedule ' || s.name || ': the stored id of a run of it has a wrong length; it counts as missing'
     from schedule_state st join schedules s on s.id = st.schedule_id where s.retired_at is null
        and (length(coalesce(st.waits_for, zeroblob(16))) <> 16 or length(coalesce(st.last_run, zeroblob(16))) <> 16
            or length(coalesce(st.last_success_run, zeroblob(16))) <> 16
            or length(coalesce(st.last_failed, zeroblob(16))) <> 16 or length(coalesce(st.last_other, zeroblob(16))) <> 16)",
    "select 'a timer of schedule ' || schedule_id || ', which does not exist: nothing is planned for it' from timers
     where schedule_id not in (select id from schedules) or schedule_id not in (select schedule_id from schedule_state)",
    "select 'schedule ' || name || ': its agent ' || agent_id || ' does not exist; nothing is planned for it, and lists leave it out'
     from schedules where retired_at is null and agent_id not in (select id from agents)",
    "select 'node ' || RUN_ID || ': its id has a wrong length; lists leave it out' from nodes
     where not fenced and length(id) <> 16",
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
