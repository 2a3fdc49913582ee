//! Agents and schedules, as sources have them.

use std::collections::HashSet;

use belfry_core::check::Status;
use belfry_core::definition::{FORMAT, ScheduleDefinition, When, read_stored};
use belfry_core::{AgentId, Reason, RunState, ScheduleId, SkipRange, Token, edit};
use belfry_time::Timestamp;
use rusqlite::params;

use super::{Done, Verb, micros, run_id};
use crate::error::Error;
use crate::memory;
use crate::shapes::*;
use crate::views::*;

/// Kinds of gates, as stored.
pub(super) const GATE_AGENT: i64 = 0;
pub(super) const GATE_TURN: i64 = 1;

/// Codes of what a schedule's status can be, where others ask for them.
pub(super) const STATUS_ACTIVE: i64 = 0;
pub(super) const STATUS_EXHAUSTED: i64 = 4;

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
            let agent = self.put_agent(source, spec)?;
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

    pub(super) fn put_agent(&self, source: &str, spec: &AgentSpec) -> Done<AgentId> {
        let definition = to_json(&spec.definition)?;
        let breaker = spec.definition.breaker.as_ref().map(to_json).transpose()?;
        let budget = spec.definition.budget.as_ref().map(to_json).transpose()?;
        let format = spec.definition.format();
        let known = self.row(
            "select id, format from agents where name = ? and retired_at is null",
            [&spec.name],
            |row| Ok((row.get(0)?, row.get::<_, i32>(1)?)),
        )?;
        let id = match known {
            // A newer version wrote it, and knows better what it is.
            Some((id, known)) if known > FORMAT => return Ok(id),
            Some((id, _)) => {
                self.execute(
                    "update agents set source = ?1, revision = revision + (definition <> ?2), definition = ?2, breaker = ?3,
                         budget = ?4, format = ?5 where id = ?6",
                    params![source, definition, breaker, budget, format, id],
                )?;
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
            |row| {
                let text: String = row.get(1)?;
                Ok((row.get::<_, ScheduleId>(0)?, text, row.get::<_, String>(2)?, row.get::<_, i32>(3)?))
            },
        )?;
        let format = definition.format();
        let Some((id, old_text, owner, old_format)) = known else {
            if self.is_spent(source, name, definition)? {
                return Ok(Put::Spent);
            }
            self.execute(
                "insert into schedules (agent_id, name, source, revision, definition, format) values (?, ?, ?, 1, ?, ?)",
                params![agent, name, source, text, format],
            )?;
            let id = self.connection.last_insert_rowid();
            self.add_revision(now, id, 1, &text, format)?;
            let compiled = self.compile(id, name, &text);
            let change = edit::add(definition, memory::compiled(&compiled), now);
            self.execute(
                "insert into schedule_state (schedule_id, status, status_since, delete_after_run) values (?, 0, ?, ?)",
                params![id, micros(now), definition.options.delete_after_run],
            )?;
            self.write(id, &change)?;
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
                Ok((row.get::<_, String>(0)?, row.get::<_, i32>(1)?))
            })?;
        let Some((text, format)) = spent else { return Ok(false) };
        if read_stored(format, &text).is_ok_and(|spent: ScheduleDefinition| spent == *definition) {
            return Ok(true);
        }
        self.execute("delete from spent where source = ? and name = ?", place)?;
        Ok(false)
    }

    fn is_expired(&self, id: ScheduleId) -> Done<bool> {
        let found = self.found(id)?;
        Ok(found.is_some_and(|found| found.status == Status::Exhausted && found.origin.is_none()))
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
        )
        .map(drop)
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
            |row| Ok((row.get::<_, AgentId>(0)?, row.get::<_, String>(1)?)),
        )?;
        for (id, _) in known_agents.iter().filter(|(_, name)| !kept_agents.contains(name.as_str())) {
            self.execute("update agents set retired_at = ? where id = ?", params![micros(now), id])?;
        }
        // One that is there again, whatever made it, has not gone with its run.
        let spent = self.rows(
            "select name, exists (select 1 from schedules c where c.name = spent.name and c.retired_at is null)
             from spent where source = ?",
            [source],
            |row| Ok((row.get::<_, String>(0)?, row.get::<_, bool>(1)?)),
        )?;
        for (name, _) in spent.iter().filter(|(name, is_there)| *is_there || !kept.contains(name)) {
            self.execute("delete from spent where source = ? and name = ?", params![source, name])?;
        }
        // Whatever made a schedule, it goes with its agent.
        let known = self.rows(
            "select s.id, s.name, a.retired_at is not null from schedules s join agents a on a.id = s.agent_id
             where s.retired_at is null and (s.source = ? or a.retired_at is not null) order by s.id",
            [source],
            |row| Ok((row.get::<_, ScheduleId>(0)?, row.get::<_, String>(1)?, row.get::<_, bool>(2)?)),
        )?;
        for (id, _, orphan) in known.iter().filter(|(_, name, orphan)| *orphan || !kept.contains(name)) {
            applied.retired += 1;
            let reason = if *orphan { Reason::AgentRemoved } else { Reason::ScheduleRemoved };
            applied.cancelled += self.retire(now, *id, reason)?;
        }
        Ok(())
    }

    /// Retires a schedule, and says how many of its runs were waiting and have ended.
    pub(super) fn retire(&self, now: Timestamp, id: ScheduleId, reason: Reason) -> Done<u32> {
        if let Some(compiled) = self.compiled_of(id)?
            && let Some(found) = self.found(id)?
        {
            self.add_skips(id, &edit::remove(&found, memory::compiled(&compiled), now))?;
        }
        self.end_deferral(id)?;
        self.set_token(id, None)?;
        self.execute(
            "update schedule_state set waits_for = null, skip_reason = null where schedule_id = ?",
            [id],
        )?;
        self.execute("update schedules set retired_at = ? where id = ?", params![micros(now), id])?;
        let pending =
            self.rows("select id from live where schedule_id = ? and state <> 2 order by id", [id], |row| {
                row.get(0).map(run_id)
            })?;
        for run in &pending {
            self.end(now, *run, RunState::Cancelled, reason)?;
        }
        Ok(pending.len() as u32)
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
    let reason: Option<String> = row.get("status_reason")?;
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
