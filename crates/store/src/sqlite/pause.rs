//! Pausing and resuming, by hand and by the clock.

use belfry_core::check::Status;
use belfry_core::edit::{self, Change, Found, Resume};
use belfry_core::{ScheduleDefinition, ScheduleId};
use belfry_time::Timestamp;
use rusqlite::params;

use super::plan::{open_skip_of, token_of};
use super::source::{from_json, status_of};
use super::{Compiled, Done, Verb, instant, json, maybe_id, maybe_instant, micros, text};
use crate::memory::compiled;
use crate::shapes::*;

impl Verb<'_> {
    pub(super) fn pause(
        &self,
        now: Timestamp,
        id: ScheduleId,
        reason: Option<&str>,
        until: Option<Timestamp>,
    ) -> Done<bool> {
        let Some((_, schedule)) = self.definition_of(id)? else { return Ok(false) };
        let Some(found) = self.found(id)? else { return Ok(false) };
        let paused = Status::Paused { reason: reason.map(str::to_owned), until };
        let Some(change) = edit::pause(&found, compiled(&schedule), paused, now) else { return Ok(false) };
        self.write(id, &change)?;
        Ok(true)
    }

    pub(super) fn resume(&self, now: Timestamp, id: ScheduleId, how: Resume) -> Done<Option<u64>> {
        let Some((definition, schedule)) = self.definition_of(id)? else { return Ok(None) };
        let Some(found) = self.found(id)? else { return Ok(None) };
        let change = edit::resume(&found, &definition, compiled(&schedule), how, now);
        let Some(change) = change else { return Ok(None) };
        self.write(id, &change)?;
        Ok(Some(change.skipped()))
    }

    /// The end of a pause has come: as if it had been resumed at that instant.
    pub(super) fn commit_resume(&self, commit: &Commit) -> Done<Committed> {
        let id = commit.schedule;
        let Some((definition, schedule)) = self.definition_of(id)? else { return Ok(Committed::Lost) };
        let Some(found) = self.found(id)? else { return Ok(Committed::Lost) };
        // The run that it waited for has ended meanwhile, and with that there may be ticks in the pause.
        if found.waits != commit.waits {
            self.put_back(commit)?;
            return Ok(Committed::Lost);
        }
        self.add_skips(id, &commit.closed)?;
        let found = Found { origin: commit.origin.or(found.origin), ..found };
        let (planned, until) = (commit.next.token(), commit.token.due_at);
        let change = edit::pause_ended(&found, &definition, compiled(&schedule), planned, until);
        self.write(id, &change)?;
        Ok(Committed::Held)
    }

    /// What a schedule is that is not retired.
    fn definition_of(&self, id: ScheduleId) -> Done<Option<(ScheduleDefinition, Compiled)>> {
        let Some((name, text)) = self.text_of(id)? else { return Ok(None) };
        Ok(Some((from_json(&text)?, self.compile(id, &name, &text))))
    }

    /// The same where it may be unreadable.
    pub(super) fn compiled_of(&self, id: ScheduleId) -> Done<Option<Compiled>> {
        let text = self.text_of(id)?;
        Ok(text.map(|(name, text)| self.compile(id, &name, &text)))
    }

    fn text_of(&self, id: ScheduleId) -> Done<Option<(String, String)>> {
        self.row("select name, definition from schedules where id = ? and retired_at is null", [id], |row| {
            Ok((text(row, 0)?, json(row, 1)?))
        })
    }

    /// A schedule as an edit finds it.
    pub(super) fn found(&self, id: ScheduleId) -> Done<Option<Found>> {
        self.row(
            "select st.*, t.kind, t.tick_at, t.due_at, d.tick_at as deferred_tick_at from schedule_state st
             left join timers t on t.schedule_id = st.schedule_id left join deferred d on d.schedule_id = st.schedule_id
             where st.schedule_id = ?",
            [id],
            |row| {
                let is_armed = row.get::<_, Option<i64>>("due_at")?.is_some();
                Ok(Found {
                    status: status_of(row)?,
                    since: instant(row, "status_since")?,
                    timer: if is_armed { Some(token_of(row)?) } else { None },
                    deferred: maybe_instant(row, "deferred_tick_at")?,
                    waits: maybe_id(row, "waits_for")?.is_some(),
                    origin: maybe_instant(row, "origin")?,
                    open_skip: open_skip_of(row)?,
                    cursor_at: maybe_instant(row, "cursor_at")?,
                    planned_at: maybe_instant(row, "planned_at")?,
                })
            },
        )
    }

    /// Writes what an edit has decided, but for a new revision.
    pub(super) fn write(&self, id: ScheduleId, change: &Change) -> Done<()> {
        self.add_skips(id, &change.closed)?;
        self.set_status(id, &change.status, change.since)?;
        self.execute(
            "update schedule_state set origin = ?1, cursor_at = ?2, planned_at = ?3,
                 waits_for = case when ?4 then waits_for end, skip_reason = null where schedule_id = ?5",
            params![
                change.origin.map(micros),
                change.cursor_at.map(micros),
                change.planned_at.map(micros),
                change.waits,
                id
            ],
        )?;
        self.end_deferral(id)?;
        self.set_token(id, change.timer)
    }
}
