//! Agents and schedules, as sources have them.

use std::collections::{BTreeMap, HashSet};

use belfry_core::check::Status;
use belfry_core::definition::{Budget, FORMAT, ScheduleDefinition, When, read_stored};
use belfry_core::edit::{self, NeverFired};
use belfry_core::gate::turn;
use belfry_core::{AgentId, Reason, RunId, RunState, ScheduleId, SkipRange, Token, ending};
use belfry_time::Timestamp;
use rusqlite::params;

use super::{Done, Verb, json, maybe_instant, micros, number, run_id, text as text_of};
use crate::error::Error;
use crate::memory;
use crate::shapes::*;
use crate::views::*;

/// Kinds of gates, as stored.
pub(super) const GATE_AGENT: i64 = 0;
pub(super) const GATE_TURN: i64 = 1;
pub(super) const GATE_COMMAND: i64 = 2;
pub(super) const GATE_WHOLE: i64 = 3;

/// Codes of what a schedule's status can be, where others ask for them.
pub(super) const STATUS_ACTIVE: i64 = 0;
pub(super) const STATUS_EXHAUSTED: i64 = 4;

/// A schedule by its name, of which a run lives. It is not found by its agent, which may have many schedules.
const RETIRED_WITH_RUNS: &str = "select id from schedules s where name = ? and +agent_id = ? and format <= ?
    and exists (select 1 from live l where l.schedule_id = s.id)";

impl Verb<'_> {
    pub(super) fn apply(
        &self,
        now: Timestamp,
        source: &str,
        digest: &str,
        agents: &[AgentSpec],
    ) -> Done<Applied> {
        let mut applied = Applied::default();
        for spec in agents {
            let agent = self.put_agent(now, source, spec)?;
            applied.agents += u32::from(self.edited.borrow().contains(&agent));
            for (name, definition) in &spec.schedules {
                let name = format!("{}/{name}", spec.name);
                let put = self.put_schedule(now, source, agent, &name, definition)?;
                applied.count(&put);
                if let (Put::Added(id) | Put::Changed(id), When::At(_)) = (put, &definition.when) {
                    applied.expired += u32::from(self.is_expired(id)?);
                }
            }
        }
        self.retire_missing(now, source, agents, &mut applied)?;
        self.execute(
            "insert into sources (name, digest, applied_at) values (?, ?, ?)
             on conflict (name) do update set digest = excluded.digest, applied_at = excluded.applied_at",
            params![source, digest, micros(now)],
        )?;
        Ok(applied)
    }

    pub(super) fn put_agent(&self, now: Timestamp, source: &str, spec: &AgentSpec) -> Done<AgentId> {
        let definition = to_json(&spec.definition)?;
        let breaker = spec.definition.breaker.as_ref().map(to_json).transpose()?;
        let budget = spec.definition.budget.as_ref().map(to_json).transpose()?;
        let format = spec.definition.format();
        let known = self.row(
            "select id, format from agents where name = ? and retired_at is null",
            [&spec.name],
            |row| Ok((row.get(0)?, number::<i32>(row, 1)?)),
        )?;
        let known = match known {
            None => self.bring_agent_back(&spec.name)?.map(|id| (id, FORMAT)),
            known => known,
        };
        let id = match known {
            // A newer version wrote it, and knows better what it is.
            Some((id, known)) if known > FORMAT => return Ok(id),
            Some((id, _)) => {
                let old_budget = self.policies(id)?.1;
                self.policies.borrow_mut().remove(&id);
                let is_same = self.row(
                    "select 1 from agents where id = ? and definition = ?",
                    params![id, definition],
                    |_| Ok(()),
                )?;
                if is_same.is_none() {
                    self.touch_all(id)?;
                    self.edited.borrow_mut().insert(id);
                }
                self.execute(
                    "update agents set source = ?1, revision = revision + (definition <> ?2), definition = ?2, breaker = ?3,
                         budget = ?4, format = ?5 where id = ?6",
                    params![source, definition, breaker, budget, format, id],
                )?;
                if breaker.is_none() {
                    self.clear_breakers(now, id)?;
                }
                self.redefine_budget(now, id, old_budget, spec.definition.budget)?;
                id
            }
            None => {
                self.execute(
                    "insert into agents (name, source, revision, definition, breaker, budget, format) values (?, ?, 1, ?, ?, ?, ?)",
                    params![spec.name, source, definition, breaker, budget, format],
                )?;
                self.connection.last_insert_rowid()
            }
        };
        self.execute(
            "insert into gates (kind, key, cap) values (?, ?, ?) on conflict (kind, key) do update set cap = excluded.cap",
            params![GATE_AGENT, id.to_string(), spec.definition.max_concurrent],
        )?;
        // A limit that was raised lets waiting runs through.
        let gate = self.row(
            "select id from gates where kind = ? and key = ?",
            params![GATE_AGENT, id.to_string()],
            |row| row.get(0),
        )?;
        if let Some(gate) = gate {
            self.release(gate)?;
        }
        Ok(id)
    }

    /// Brings an agent back that was retired while a run of it lived, if that still does.
    fn bring_agent_back(&self, name: &str) -> Done<Option<AgentId>> {
        self.row(
            "update agents set retired_at = null where id = (select max(a.id) from schedules s
                 join agents a on a.id = s.agent_id where s.name > ?1 || '/' and s.name < ?1 || '0' and a.name = ?1
                 and a.retired_at is not null and a.format <= ?2 and exists (select 1 from live l where l.schedule_id = s.id))
             returning id",
            params![name, FORMAT],
            |row| row.get(0),
        )
    }

    fn redefine_budget(
        &self,
        now: Timestamp,
        agent: AgentId,
        old: Option<Budget>,
        new: Option<Budget>,
    ) -> Done<()> {
        if old == new {
            return Ok(());
        }
        let used = self.budget_of(agent)?;
        let (left, waiting) = ending::redefine(used, old.as_ref(), new.as_ref(), now);
        if left != used {
            self.set_budget(agent, left)?;
        }
        self.move_waiting(now, agent, waiting)
    }

    /// Makes a schedule what it is in a source. What the API owns is the API's alone; sources of files take over from
    /// each other.
    pub(super) fn put_schedule(
        &self,
        now: Timestamp,
        source: &str,
        agent: AgentId,
        name: &str,
        definition: &ScheduleDefinition,
    ) -> Done<Put> {
        let text = to_json(definition)?;
        let known = self.row(
            "select id, definition, source, format from schedules where name = ? and retired_at is null",
            [name],
            |row| Ok((row.get::<_, ScheduleId>(0)?, json(row, 1)?, text_of(row, 2)?, number::<i32>(row, 3)?)),
        )?;
        let format = definition.format();
        let Some((id, old_text, owner, old_format)) = known else {
            if self.is_spent(source, name, definition)? {
                return Ok(Put::Spent);
            }
            if let Some(id) = self.retired_with_runs(agent, name)? {
                self.edited.borrow_mut().insert(agent);
                self.restore(now, source, id, name, definition)?;
                return Ok(Put::Added(id));
            }
            let planned_before = self.row(
                "select max(st.planned_at) as at from schedules s
                 join schedule_state st on st.schedule_id = s.id where s.name = ?",
                [name],
                |row| maybe_instant(row, "at"),
            )?;
            self.execute(
                "insert into schedules (agent_id, name, source, revision, definition, format) values (?, ?, ?, 1, ?, ?)",
                params![agent, name, source, text, format],
            )?;
            let id = self.connection.last_insert_rowid();
            // What an earlier schedule of this name has taken is not taken again.
            self.execute(
                "update idempotency set schedule_id = ?1 \
                 where schedule_id in (select id from schedules where name = ?2 and id <> ?1)",
                params![id, name],
            )?;
            self.add_revision(now, id, 1, &text, format)?;
            let compiled = self.compile(id, name, &text);
            let change = edit::add(definition, memory::compiled(&compiled), planned_before.flatten(), now);
            self.execute(
                "insert into schedule_state (schedule_id, status, status_since, delete_after_run) values (?, 0, ?, ?)",
                params![id, micros(now), definition.options.delete_after_run],
            )?;
            self.write(id, &change)?;
            if turn(&definition.options).is_some() {
                self.edited.borrow_mut().insert(agent);
            }
            return Ok(Put::Added(id));
        };
        if old_format > FORMAT {
            return Ok(Put::OwnedBy(NEWER_VERSION.to_owned()));
        }
        if owner != source {
            if [owner.as_str(), source].contains(&API) {
                return Ok(Put::OwnedBy(owner));
            }
            self.execute("update schedules set source = ? where id = ?", params![source, id])?;
        }
        // One that cannot be read is replaced as a whole.
        let old: Option<ScheduleDefinition> = read_stored(old_format, &old_text).ok();
        if old.as_ref() == Some(definition) {
            return Ok(Put::Unchanged(id));
        }
        let old_compiled = self.compile(id, name, &old_text);
        self.touch(id)?;
        self.edited.borrow_mut().insert(agent);
        self.execute(
            "update schedules set definition = ?, format = ? where id = ?",
            params![text, format, id],
        )?;
        self.execute(
            "update schedule_state set delete_after_run = ? where schedule_id = ?",
            params![definition.options.delete_after_run, id],
        )?;
        let compiled = self.compile(id, name, &text);
        let Some(found) = self.found(id)? else { return Ok(Put::Changed(id)) };
        let new = (definition, memory::compiled(&compiled));
        if edit::redefines(&found.status, old.as_ref(), new.0, new.1) {
            let change = edit::define(&found, (old.as_ref(), memory::compiled(&old_compiled)), new, now);
            // What is closed belongs to the revision before.
            self.write(id, &change)?;
            if change.new_revision {
                self.start_revision(now, id, &text, format)?;
            }
        }
        Ok(Put::Changed(id))
    }

    /// A schedule of this name that was retired while a run of it lived, which still does.
    fn retired_with_runs(&self, agent: AgentId, name: &str) -> Done<Option<ScheduleId>> {
        self.row(RETIRED_WITH_RUNS, params![name, agent, FORMAT], |row| row.get(0))
    }

    fn restore(
        &self,
        now: Timestamp,
        source: &str,
        id: ScheduleId,
        name: &str,
        definition: &ScheduleDefinition,
    ) -> Done<()> {
        let (text, format) = (to_json(definition)?, definition.format());
        self.execute(
            "update schedules set retired_at = null, source = ?, definition = ?, format = ? where id = ?",
            params![source, text, format, id],
        )?;
        self.execute(
            "update schedule_state set delete_after_run = ? where schedule_id = ?",
            params![definition.options.delete_after_run, id],
        )?;
        let compiled = self.compile(id, name, &text);
        if let Some(found) = self.found(id)? {
            self.write(id, &edit::restore(&found, definition, memory::compiled(&compiled), now))?;
        }
        self.start_revision(now, id, &text, format)
    }

    /// Plans that were made on the schedule's timer do not hold.
    pub(super) fn touch(&self, id: ScheduleId) -> Done<()> {
        self.execute("update timers set version = random() where schedule_id = ?", [id]).map(drop)
    }

    /// Plans that were made with the agent's old definition do not hold: they have its limits, labels and lane.
    pub(super) fn touch_all(&self, agent: AgentId) -> Done<()> {
        self.execute(
            "update timers set version = random() where schedule_id in (select id from schedules where agent_id = ?)",
            [agent],
        )
        .map(drop)
    }

    fn start_revision(&self, now: Timestamp, id: ScheduleId, text: &str, format: i32) -> Done<()> {
        let revision = self.row(
            "update schedules set revision = revision + 1 where id = ? returning revision",
            [id],
            |row| row.get(0),
        )?;
        self.add_revision(now, id, revision.unwrap_or(1), text, format)
    }

    /// Whether a schedule of files went with its run, as its definition asks, and is still the same there.
    fn is_spent(&self, source: &str, name: &str, definition: &ScheduleDefinition) -> Done<bool> {
        let place = params![source, name];
        let spent =
            self.row("select definition, format from spent where source = ? and name = ?", place, |row| {
                Ok((json(row, 0)?, number::<i32>(row, 1)?))
            })?;
        let Some((text, format)) = spent else { return Ok(false) };
        if read_stored(format, &text).is_ok_and(|spent: ScheduleDefinition| spent == *definition) {
            return Ok(true);
        }
        self.execute("delete from spent where source = ? and name = ?", place)?;
        Ok(false)
    }

    /// Schedules of a source that went with their run.
    pub(super) fn spent(&self, source: &str) -> Done<BTreeMap<String, ScheduleDefinition>> {
        let sql = "select name, definition, format from spent where source = ?";
        let spent = self.rows(sql, [source], |row| {
            Ok((super::text(row, "name")?, json(row, 1)?, number::<i32>(row, 2)?))
        })?;
        let read =
            |(name, text, format): (String, String, i32)| Some((name, read_stored(format, &text).ok()?));
        Ok(spent.into_iter().filter_map(read).collect())
    }

    fn is_expired(&self, id: ScheduleId) -> Done<bool> {
        let (Some(found), Some(Ok(schedule))) = (self.found(id)?, self.compiled_of(id)?) else {
            return Ok(false);
        };
        Ok(edit::never_fired(&schedule, &found) == Some(NeverFired::TimePassed))
    }

    fn add_revision(
        &self,
        now: Timestamp,
        id: ScheduleId,
        revision: i64,
        text: &str,
        format: i32,
    ) -> Done<()> {
        self.execute(
            "insert into schedule_revisions (schedule_id, revision, from_at, definition, format) values (?, ?, ?, ?, ?)",
            params![id, revision, micros(now), text, format],
        )?;
        if revision > edit::REVISIONS_KEPT {
            let sql = "delete from schedule_revisions where schedule_id = ? and revision <= ?";
            self.execute(sql, params![id, revision - edit::REVISIONS_KEPT])?;
        }
        Ok(())
    }

    fn retire_missing(
        &self,
        now: Timestamp,
        source: &str,
        agents: &[AgentSpec],
        applied: &mut Applied,
    ) -> Done<()> {
        let kept_agents: HashSet<&str> = agents.iter().map(|spec| spec.name.as_str()).collect();
        let kept: HashSet<String> = agents
            .iter()
            .flat_map(|spec| spec.schedules.iter().map(|(name, _)| format!("{}/{name}", spec.name)))
            .collect();
        let known_agents = self.rows(
            "select id, name from agents where source = ? and retired_at is null",
            [source],
            |row| Ok((row.get::<_, AgentId>(0)?, text_of(row, 1)?)),
        )?;
        for (id, _) in known_agents.iter().filter(|(_, name)| !kept_agents.contains(name.as_str())) {
            self.execute("update agents set retired_at = ? where id = ?", params![micros(now), id])?;
        }
        // One that is there again, whoever made it, has not gone with its run.
        let spent = self.rows(
            "select name, exists (select 1 from schedules c where c.name = spent.name and c.retired_at is null)
             from spent where source = ?",
            [source],
            |row| Ok((text_of(row, 0)?, row.get::<_, bool>(1)?)),
        )?;
        for (name, _) in spent.iter().filter(|(name, is_there)| *is_there || !kept.contains(name)) {
            self.execute("delete from spent where source = ? and name = ?", params![source, name])?;
        }
        // Whatever made a schedule, it goes with its agent.
        let known = self.rows(
            "select s.id, s.name, a.retired_at is not null from schedules s join agents a on a.id = s.agent_id
             where s.retired_at is null and (s.source = ? or a.retired_at is not null) order by s.id",
            [source],
            |row| Ok((row.get::<_, ScheduleId>(0)?, text_of(row, 1)?, row.get::<_, bool>(2)?)),
        )?;
        for (id, _, orphan) in known.iter().filter(|(_, name, orphan)| *orphan || !kept.contains(name)) {
            applied.retired += 1;
            let reason = if *orphan { Reason::AgentRemoved } else { Reason::ScheduleRemoved };
            applied.ended.extend(self.retire(now, *id, reason)?);
        }
        applied.ended.sort_unstable();
        Ok(())
    }

    /// Retires a schedule, and gives those of its runs that were waiting and have ended.
    pub(super) fn retire(&self, now: Timestamp, id: ScheduleId, reason: Reason) -> Done<Vec<RunId>> {
        if let Some(compiled) = self.compiled_of(id)?
            && let Some(found) = self.found(id)?
        {
            self.write(id, &edit::remove(&found, memory::compiled(&compiled), now))?;
        }
        self.execute("update schedules set retired_at = ? where id = ?", params![micros(now), id])?;
        self.edited.borrow_mut().extend(self.row(
            "select agent_id from schedules where id = ?",
            [id],
            |row| row.get::<_, AgentId>(0),
        )?);
        let pending =
            self.rows("select id from live where schedule_id = ? and state <> 2 order by id", [id], |row| {
                row.get(0).map(run_id)
            })?;
        for run in &pending {
            self.end(now, *run, RunState::Cancelled, reason)?;
        }
        Ok(pending)
    }

    /// Where a schedule stands, and since when.
    pub(super) fn status(&self, id: ScheduleId) -> Done<Option<(Status, Timestamp)>> {
        self.row("select status, status_reason, status_until, status_since from schedule_state where schedule_id = ?", [id], |row| {
            Ok((status_of(row)?, super::instant(row, "status_since")?))
        })
    }

    pub(super) fn set_status(&self, id: ScheduleId, status: &Status, now: Timestamp) -> Done<()> {
        let (code, reason, until) = match status {
            Status::Active => (STATUS_ACTIVE, None, None),
            Status::Paused { reason, until } => (1, reason.clone(), *until),
            Status::Disabled => (2, None, None),
            Status::Invalid { reason } => (3, Some(reason.clone()), None),
            Status::Exhausted => (STATUS_EXHAUSTED, None, None),
        };
        self.execute(
            "update schedule_state set status = ?, status_reason = ?, status_until = ?, status_since = ? where schedule_id = ?",
            params![code, reason, until.map(micros), micros(now), id],
        )
        .map(drop)
    }

    /// Replaces a schedule's token. Whoever planned on the old one has lost.
    pub(super) fn set_token(&self, id: ScheduleId, token: Option<Token>) -> Done<()> {
        self.execute("delete from timers where schedule_id = ?", [id])?;
        match token {
            Some(token) => self.add_token(id, token),
            None => Ok(()),
        }
    }

    pub(super) fn add_token(&self, id: ScheduleId, token: Token) -> Done<()> {
        self.execute(
            "insert into timers (due_at, schedule_id, kind, tick_at, version) values (?, ?, ?, ?, random())",
            params![micros(token.due_at), id, token.kind.code(), micros(token.tick_at)],
        )
        .map(drop)
    }

    pub(super) fn add_skips(&self, id: ScheduleId, ranges: &[SkipRange]) -> Done<()> {
        for range in ranges {
            self.execute(
                "insert into skips (schedule_id, revision, reason, from_tick, to_tick, count)
                 values (?1, (select revision from schedules where id = ?1), ?2, ?3, ?4, ?5)",
                params![id, range.reason.code(), micros(range.from), micros(range.to), range.count as i64],
            )?;
        }
        Ok(())
    }
}

pub(super) fn status_of(row: &rusqlite::Row<'_>) -> rusqlite::Result<Status> {
    let reason = super::lossy(row, "status_reason")?;
    Ok(match row.get::<_, i64>("status")? {
        1 => Status::Paused { reason, until: super::maybe_instant(row, "status_until")? },
        2 => Status::Disabled,
        3 => Status::Invalid { reason: reason.unwrap_or_default() },
        STATUS_ACTIVE => Status::Active,
        STATUS_EXHAUSTED => Status::Exhausted,
        other => crate::unknown::status(other),
    })
}

pub(super) fn to_json(value: &impl serde::Serialize) -> Done<String> {
    serde_json::to_string(value).map_err(|error| Error::unexpected(error.to_string()))
}

pub(super) fn from_json<T: serde::de::DeserializeOwned>(text: &str) -> Done<T> {
    serde_json::from_str(text).map_err(|error| Error::unexpected(format!("{error} in {text}")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// It is asked for each schedule of a file: by its agent, a file cost the square of its length.
    #[test]
    fn a_schedule_that_is_put_back_is_found_by_its_name() {
        let connection = rusqlite::Connection::open_in_memory().unwrap();
        connection.execute_batch(include_str!("migrations/0001_initial.sql")).unwrap();
        let mut explained = connection.prepare(&format!("explain query plan {RETIRED_WITH_RUNS}")).unwrap();
        let plan = explained.query_map(params!["a/s", 1, 1], |row| row.get::<_, String>(3)).unwrap();
        let plan: Vec<String> = plan.map(|line| line.unwrap()).collect();
        assert!(plan[0].contains("schedules_every_name (name=?)"), "{plan:?}");
    }
}
