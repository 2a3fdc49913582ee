//! Agents and schedules that come and go through the API, and what the engine asks for to start their runs.

use std::sync::Arc;

use belfry_core::definition::{Unreadable, read_stored};
use belfry_core::{AgentDefinition, AgentId, Reason, ScheduleDefinition, ScheduleId};
use belfry_time::Timestamp;
use rusqlite::{Row, params};

use super::{Done, Verb, json, maybe_id, maybe_instant, micros, number, run_id, text};
use crate::shapes::{AgentSpec, NEWER_VERSION};
use crate::views::*;

/// A schedule as an edit finds it.
struct Found {
    source: String,
    revision: i64,
    definition: String,
    format: i32,
}

fn standing(row: &Row<'_>) -> rusqlite::Result<Found> {
    Ok(Found {
        source: text(row, 0)?,
        revision: row.get(1)?,
        definition: json(row, 2)?,
        format: number(row, 3)?,
    })
}

fn is_expected(expect: &Expect, found: Option<&Found>) -> Done<bool> {
    let Some(found) = found else { return Ok(expect.holds(None)) };
    if *expect == Expect::Any {
        return Ok(true);
    }
    // One that cannot be read is none that anybody has seen.
    Ok(read_stored(found.format, &found.definition)
        .is_ok_and(|definition| expect.holds(Some((found.revision, &definition)))))
}

/// An agent as it stands.
struct KnownAgent {
    id: AgentId,
    source: String,
    revision: i64,
    definition: Result<AgentDefinition, Unreadable>,
}

impl KnownAgent {
    /// Whether it is what is expected. One that cannot be read is none that anybody has seen.
    fn is_expected(&self, expect: &Expect<AgentDefinition>) -> bool {
        match &self.definition {
            Ok(definition) => expect.holds(Some((self.revision, definition))),
            Err(_) => *expect == Expect::Any,
        }
    }
}

impl Verb<'_> {
    pub(super) fn put_by_api(
        &self,
        now: Timestamp,
        agent: &str,
        name: &str,
        definition: &ScheduleDefinition,
        expect: &Expect,
    ) -> Done<Put> {
        let known =
            self.row("select id from agents where name = ? and retired_at is null", [agent], |row| {
                row.get(0)
            })?;
        let Some(id) = known else { return Ok(Put::NoAgent) };
        let name = format!("{agent}/{name}");
        let found = self.row(
            "select source, revision, definition, format from schedules where name = ? and retired_at is null",
            [&name],
            standing,
        )?;
        let is_ours = found.as_ref().is_none_or(|found| found.source == API);
        if is_ours && !is_expected(expect, found.as_ref())? {
            return Ok(Put::Differs);
        }
        self.put_schedule(now, API, id, &name, definition)
    }

    pub(super) fn remove_by_api(&self, now: Timestamp, id: ScheduleId, expect: &Expect) -> Done<Removed> {
        let found = self.row(
            "select source, revision, definition, format from schedules where id = ? and retired_at is null",
            [id],
            standing,
        )?;
        match found {
            None => Ok(Removed::NotFound),
            Some(found) if found.source != API => Ok(Removed::OwnedBy(found.source)),
            Some(found) if !is_expected(expect, Some(&found))? => Ok(Removed::Differs),
            Some(_) => Ok(Removed::Gone { ended: self.retire(now, id, Reason::ScheduleRemoved)? }),
        }
    }

    pub(super) fn put_agent_by_api(
        &self,
        now: Timestamp,
        spec: &AgentSpec,
        whole: bool,
        expect: &Expect<AgentDefinition>,
    ) -> Done<PutAgent> {
        let known = self.agent_named(&spec.name)?;
        if let Some(known) = known.as_ref().filter(|known| known.source != API) {
            return Ok(PutAgent::OwnedBy(known.source.clone()));
        }
        if matches!(&known, Some(KnownAgent { definition: Err(Unreadable::Newer { .. }), .. })) {
            return Ok(PutAgent::OwnedBy(NEWER_VERSION.to_owned()));
        }
        if !known.as_ref().map_or_else(|| expect.holds(None), |known| known.is_expected(expect)) {
            return Ok(PutAgent::Differs);
        }
        let before = known.map(|known| known.definition);
        let mut is_changed = before.as_ref().is_some_and(|before| before.as_ref() != Ok(&spec.definition));
        let id = self.put_agent(now, API, spec)?;
        let mut kept = Vec::new();
        for (name, definition) in &spec.schedules {
            let name = format!("{}/{name}", spec.name);
            is_changed |= self.put_schedule(now, API, id, &name, definition)?.is_news();
            kept.push(name);
        }
        let (own, mut ended) = (self.own_schedules(id, Some(API))?, Vec::new());
        for (schedule, _) in own.iter().filter(|(_, name)| whole && !kept.contains(name)) {
            ended.extend(self.retire(now, *schedule, Reason::ScheduleRemoved)?);
            is_changed = true;
        }
        ended.sort_unstable();
        Ok(PutAgent::of(before.is_some(), is_changed, ended))
    }

    /// An agent as it stands, by its name.
    fn agent_named(&self, name: &str) -> Done<Option<KnownAgent>> {
        let found = self.row(
            "select id, source, revision, definition, format from agents where name = ? and retired_at is null",
            [name],
            |row| {
                let read = read_stored(number(row, 4)?, &json(row, 3)?);
                Ok((row.get(0)?, text(row, 1)?, row.get::<_, i64>(2)?, read))
            },
        )?;
        Ok(found.map(|(id, source, revision, definition)| KnownAgent { id, source, revision, definition }))
    }

    pub(super) fn remove_agent_by_api(
        &self,
        now: Timestamp,
        name: &str,
        expect: &Expect<AgentDefinition>,
    ) -> Done<Removed> {
        let Some(known) = self.agent_named(name)? else { return Ok(Removed::NotFound) };
        if known.source != API {
            return Ok(Removed::OwnedBy(known.source));
        }
        if !known.is_expected(expect) {
            return Ok(Removed::Differs);
        }
        let id = known.id;
        self.execute("update agents set retired_at = ? where id = ?", params![micros(now), id])?;
        let mut ended = Vec::new();
        for (schedule, _) in self.own_schedules(id, None)? {
            ended.extend(self.retire(now, schedule, Reason::AgentRemoved)?);
        }
        ended.sort_unstable();
        Ok(Removed::Gone { ended })
    }

    /// Schedules of an agent, of any source or of one.
    fn own_schedules(&self, agent: AgentId, source: Option<&str>) -> Done<Vec<(ScheduleId, String)>> {
        self.rows(
            "select id, name from schedules where agent_id = ?1 and retired_at is null and coalesce(source = ?2, 1) order by id",
            params![agent, source],
            |row| Ok((row.get(0)?, text(row, 1)?)),
        )
    }

    pub(super) fn definitions(&self, id: ScheduleId) -> Done<Option<Definitions>> {
        struct Known {
            name: String,
            definition: String,
            format: i32,
            agent: AgentId,
            agent_name: String,
            agent_revision: i64,
            origin: Option<Timestamp>,
            cursor_at: Option<Timestamp>,
            waits_for: Option<[u8; 16]>,
            last_success_at: Option<Timestamp>,
        }
        let row = self.row(
            "select s.name, s.definition, s.agent_id, a.name as agent_name, a.revision, st.origin, st.waits_for,
                    s.format, st.last_success_at, st.cursor_at
             from schedules s join agents a on a.id = s.agent_id join schedule_state st on st.schedule_id = s.id
             where s.id = ?",
            [id],
            |row| {
                Ok(Known {
                    name: text(row, 0)?,
                    definition: json(row, 1)?,
                    agent: row.get(2)?,
                    agent_name: text(row, 3)?,
                    agent_revision: row.get(4)?,
                    origin: maybe_instant(row, "origin")?,
                    cursor_at: maybe_instant(row, "cursor_at")?,
                    waits_for: maybe_id(row, 6)?,
                    format: number(row, 7)?,
                    last_success_at: maybe_instant(row, "last_success_at")?,
                })
            },
        )?;
        let Some(row) = row else { return Ok(None) };
        let compiled = self.compile(id, &row.name, &row.definition);
        let uncompiled = compiled.is_err().then(|| serde_json::from_str(&row.definition).ok().map(Arc::new));
        let agent = self.known_agent(row.agent, row.agent_revision)?;
        let unreadable = self.why_unreadable(id, &row.name, row.format, &row.definition);
        let unreadable = unreadable.or_else(|| agent.as_ref().err().cloned());
        Ok(Some(Definitions {
            schedule: id,
            agent: row.agent,
            agent_definition: agent.unwrap_or_default(),
            unreadable: unreadable.map(|why| self.shared.unread.add(id, &why)),
            agent_revision: row.agent_revision,
            agent_name: Arc::from(row.agent_name),
            compiled,
            uncompiled: uncompiled.flatten(),
            name: Arc::from(row.name),
            origin: row.origin,
            cursor_at: row.cursor_at,
            waits_for: row.waits_for.map(run_id),
            last_success_at: row.last_success_at,
        }))
    }

    /// What an agent is, read once for each revision.
    fn known_agent(&self, id: AgentId, revision: i64) -> Done<Result<Arc<AgentDefinition>, Unreadable>> {
        if let Some(definition) = self.shared.agents.lock().get(&(id, revision)) {
            return Ok(Ok(definition.clone()));
        }
        let (definition, bytes) = match self.stored_agent(id)? {
            None => (Arc::<AgentDefinition>::default(), 0),
            Some((format, text)) => match read_stored(format, &text) {
                Ok(definition) => (Arc::new(definition), text.len()),
                Err(why) => return Ok(Err(why)),
            },
        };
        self.shared.agents.lock().insert((id, revision), definition.clone(), bytes);
        Ok(Ok(definition))
    }
}
