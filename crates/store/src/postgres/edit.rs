//! Agents and schedules that come and go through the API, and what the engine asks for to start their runs.

use std::collections::HashMap;
use std::sync::Arc;

use belfry_core::definition::{FORMAT, Unreadable, read_stored};
use belfry_core::{AgentDefinition, AgentId, RunId, ScheduleId};
use belfry_time::Timestamp;
use tokio_postgres::Row;
use uuid::Uuid;

use super::connection::{Fault, Tx};
use super::plan::cold_of;
use super::rows::get;
use super::source::{self, Known, Spec};
use super::{Cold, Postgres, finish};
use crate::shapes::{Applied, NEWER_VERSION};
use crate::views::*;

impl Postgres {
    /// `spec` is the agent with this one schedule; its own definition is not looked at.
    pub(super) async fn put_by_api(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        spec: &Spec<'_>,
        expect: &Expect,
    ) -> Result<Put, Fault> {
        source::lock_names(tx).await?;
        let sql = "select id from agents where name = $1 and retired_at is null";
        let found = tx.query(sql, &[&spec.name]).await?;
        let Some(row) = found.first() else { return Ok(Put::NoAgent) };
        let agent: AgentId = get(row, "id")?;
        let known = source::known_schedules(tx, None, std::slice::from_ref(spec)).await?;
        let found = known.values().next().filter(|found| !found.is_retired);
        if found.is_none_or(|found| found.source == API) && !is_expected(expect, found) {
            return Ok(Put::Differs);
        }
        let put = source::put_schedules(tx, now, API, &known, &[(agent, spec)]).await?.pop();
        self.move_edited(tx).await?;
        put.ok_or_else(|| crate::Error::unexpected("nothing was put").into())
    }

    pub(super) async fn remove_by_api(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        id: ScheduleId,
        expect: &Expect,
    ) -> Result<Removed, Fault> {
        source::lock_names(tx).await?;
        let sql = "select id, source, revision, definition, format, false as is_retired from schedules \
                   where id = $1 and retired_at is null";
        let found = tx.query(sql, &[&id]).await?;
        let Some(found) = found.first().map(Known::read).transpose()? else { return Ok(Removed::NotFound) };
        if found.source != API {
            return Ok(Removed::OwnedBy(found.source));
        }
        if !is_expected(expect, Some(&found)) {
            return Ok(Removed::Differs);
        }
        let mut applied = Applied::default();
        self.retire(tx, now, &[id], &mut applied).await?;
        self.move_edited(tx).await?;
        Ok(Removed::Gone { ended: applied.ended })
    }

    pub(super) async fn put_agent_by_api(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        spec: &Spec<'_>,
        whole: bool,
        expect: &Expect<AgentDefinition>,
    ) -> Result<PutAgent, Fault> {
        source::lock_names(tx).await?;
        let sql =
            "select source, edition, definition, format from agents where name = $1 and retired_at is null";
        let found = tx.query(sql, &[&spec.name]).await?;
        let before = match found.first() {
            None => None,
            Some(row) => {
                let source: String = get(row, "source")?;
                if source != API {
                    return Ok(PutAgent::OwnedBy(source));
                }
                Some((get::<i64>(row, "edition")?, finish::read_agent(row)?))
            }
        };
        if matches!(before, Some((_, Err(Unreadable::Newer { .. })))) {
            return Ok(PutAgent::OwnedBy(NEWER_VERSION.to_owned()));
        }
        let is_expected = match &before {
            None => expect.holds(None),
            Some((edition, Ok(before))) => expect.holds(Some((*edition, before))),
            Some((_, Err(_))) => *expect == Expect::Any,
        };
        if !is_expected {
            return Ok(PutAgent::Differs);
        }
        let before = before.map(|(_, before)| before);
        let mut is_changed = before.as_ref().is_some_and(|before| before.as_ref() != Ok(spec.definition));
        let specs = std::slice::from_ref(spec);
        let agents = self.put_agents(tx, now, API, specs).await?;
        let id = *agents.get(spec.name).ok_or_else(|| crate::Error::unexpected("an agent without an id"))?;
        let known = source::known_schedules(tx, None, specs).await?;
        is_changed |=
            source::put_schedules(tx, now, API, &known, &[(id, spec)]).await?.iter().any(Put::is_news);
        let mut applied = Applied::default();
        if whole {
            let sql = "select id, name from schedules \
                       where agent_id = $1 and source = $2 and retired_at is null order by id";
            let mut gone: Vec<ScheduleId> = Vec::new();
            for row in tx.query(sql, &[&id, &API]).await? {
                if !spec.has(get(&row, "name")?) {
                    gone.push(get(&row, "id")?);
                }
            }
            self.retire(tx, now, &gone, &mut applied).await?;
            is_changed |= !gone.is_empty();
        }
        self.move_edited(tx).await?;
        self.set_caps(tx, specs, &agents).await?;
        Ok(PutAgent::of(before.is_some(), is_changed, applied.ended))
    }

    pub(super) async fn remove_agent_by_api(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        name: &str,
        expect: &Expect<AgentDefinition>,
    ) -> Result<Removed, Fault> {
        source::lock_names(tx).await?;
        let sql = "select id, source, edition, definition, format from agents where name = $1 and retired_at is null";
        let found = tx.query(sql, &[&name]).await?;
        let Some(row) = found.first() else { return Ok(Removed::NotFound) };
        let (id, source): (AgentId, String) = (get(row, "id")?, get(row, "source")?);
        if source != API {
            return Ok(Removed::OwnedBy(source));
        }
        // One that cannot be read is none that anybody has seen.
        let is_expected = match finish::read_agent(row)? {
            Ok(definition) => expect.holds(Some((get(row, "edition")?, &definition))),
            Err(_) => *expect == Expect::Any,
        };
        if !is_expected {
            return Ok(Removed::Differs);
        }
        tx.execute("update agents set retired_at = $2 where id = $1", &[&id, &now]).await?;
        let sql = "select id from schedules where agent_id = $1 and retired_at is null order by id";
        let gone = tx.query(sql, &[&id]).await?;
        let gone: Vec<ScheduleId> = gone.iter().map(|row| get(row, "id")).collect::<Result<_, Fault>>()?;
        let mut applied = Applied::default();
        self.retire(tx, now, &gone, &mut applied).await?;
        self.move_edited(tx).await?;
        Ok(Removed::Gone { ended: applied.ended })
    }

    /// One statement, and one more for what is not in the cache.
    /// Ids of schedules by their names. Somebody asks for them: what is kept of definitions that this version cannot read, as an
    /// edit by hand leaves them, is read anew.
    pub(super) async fn ids_of(
        &self,
        tx: &mut Tx<'_>,
        names: &[&str],
    ) -> Result<Vec<Option<ScheduleId>>, Fault> {
        let sql = "select c.name, c.id, s.edition, a.id as agent_id, a.edition as agent_edition, \
                   greatest(c.format, a.format) as format from schedules c join schedule_state s on s.schedule_id = c.id \
                   join agents a on a.id = c.agent_id where c.name = any($1) and c.retired_at is null";
        let rows = tx.query(sql, &[&names]).await?;
        let mut known: HashMap<&str, ScheduleId> = HashMap::with_capacity(rows.len());
        for row in &rows {
            let schedule: ScheduleId = get(row, "id")?;
            if get::<i32>(row, "format")? > FORMAT {
                let mut cache = self.cache.lock();
                cache.schedules.forget(&(schedule, get(row, "edition")?));
                cache.agents.forget(&(get(row, "agent_id")?, get(row, "agent_edition")?));
            }
            known.insert(get(row, "name")?, schedule);
        }
        Ok(names.iter().map(|name| known.get(name).copied()).collect())
    }

    pub(super) async fn definitions_in(
        &self,
        tx: &mut Tx<'_>,
        ids: &[ScheduleId],
    ) -> Result<Vec<Option<Definitions>>, Fault> {
        let sql = "select s.schedule_id, s.agent_id, s.edition, s.origin, s.cursor_at, s.waits_for, s.last_success_at, a.name as agent_name, \
                   a.edition as agent_edition from schedule_state s join agents a on a.id = s.agent_id \
                   where s.schedule_id = any($1)";
        let rows = tx.query(sql, &[&ids]).await?;
        let mut known: HashMap<ScheduleId, Read> = HashMap::new();
        let mut missing = Vec::new();
        for row in &rows {
            let (schedule, agent): (ScheduleId, AgentId) = (get(row, "schedule_id")?, get(row, "agent_id")?);
            let (edition, agent_edition): (i64, i64) = (get(row, "edition")?, get(row, "agent_edition")?);
            let cache = self.cache.lock();
            let cold = cache.schedules.get(&(schedule, edition));
            let agent = cache.agents.get(&(agent, agent_edition));
            match (cold, agent) {
                (Some(cold), Some(agent)) => {
                    let unreadable = cold.unreadable.as_ref().map(|why| self.unread.add(schedule, why));
                    known.insert(schedule, (cold.clone(), agent.clone(), unreadable));
                }
                _ => missing.push(schedule),
            }
        }
        if !missing.is_empty() {
            self.read_definitions(tx, &missing, &mut known).await?;
        }
        let mut found: HashMap<ScheduleId, Definitions> = HashMap::new();
        for row in &rows {
            let id: ScheduleId = get(row, "schedule_id")?;
            if let Some(read) = known.get(&id) {
                found.insert(id, definitions(row, read)?);
            }
        }
        Ok(ids.iter().map(|id| found.get(id).cloned()).collect())
    }

    async fn read_definitions(
        &self,
        tx: &mut Tx<'_>,
        ids: &[ScheduleId],
        known: &mut HashMap<ScheduleId, Read>,
    ) -> Result<(), Fault> {
        let sql = "select c.id as schedule_id, s.edition as schedule_edition, c.name, c.definition as schedule_text, \
                   c.format as schedule_format, a.id, a.edition, a.format, a.definition from schedules c join schedule_state s on s.schedule_id = c.id \
                   join agents a on a.id = c.agent_id where c.id = any($1)";
        for row in tx.query(sql, &[&ids]).await? {
            let schedule: ScheduleId = get(&row, "schedule_id")?;
            let (format, text): (_, &str) = (get(&row, "schedule_format")?, get(&row, "schedule_text")?);
            let cold = Arc::new(cold_of(get(&row, "name")?, format, text));
            let agent = finish::read_agent(&row)?;
            if let Some(why) = cold.unreadable.as_ref().or(agent.as_ref().err()) {
                let why = self.unread.add(schedule, why);
                known.insert(schedule, (cold, Arc::default(), Some(why)));
                continue;
            }
            let agent = Arc::new(agent.unwrap_or_default());
            let agent_text: &str = get(&row, "definition")?;
            let mut cache = self.cache.lock();
            cache.schedules.insert((schedule, get(&row, "schedule_edition")?), cold.clone(), text.len());
            cache.agents.insert((get(&row, "id")?, get(&row, "edition")?), agent.clone(), agent_text.len());
            known.insert(schedule, (cold, agent, None));
        }
        Ok(())
    }
}

/// A definition that cannot be read is none that anybody has seen.
fn is_expected(expect: &Expect, found: Option<&Known>) -> bool {
    match found {
        None => expect.holds(None),
        Some(_) if *expect == Expect::Any => true,
        Some(found) => read_stored(found.format, &found.text)
            .is_ok_and(|definition| expect.holds(Some((found.revision, &definition)))),
    }
}

/// What was read of a schedule, and of its agent, and why one of them could not be.
type Read = (Arc<Cold>, Arc<AgentDefinition>, Option<Arc<str>>);

fn definitions(row: &Row, (cold, agent, unreadable): &Read) -> Result<Definitions, Fault> {
    Ok(Definitions {
        schedule: get(row, "schedule_id")?,
        agent: get(row, "agent_id")?,
        name: cold.name.clone(),
        agent_name: Arc::from(get::<&str>(row, "agent_name")?),
        agent_revision: get(row, "agent_edition")?,
        agent_definition: agent.clone(),
        compiled: cold.compiled.clone(),
        uncompiled: cold.uncompiled.clone(),
        origin: get(row, "origin")?,
        cursor_at: get(row, "cursor_at")?,
        waits_for: get::<Option<Uuid>>(row, "waits_for")?.map(RunId),
        last_success_at: get(row, "last_success_at")?,
        unreadable: unreadable.clone(),
    })
}
