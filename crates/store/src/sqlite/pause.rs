//! Pausing and resuming, by hand and by the clock.

use belfry_core::check::Status;
use belfry_core::{ScheduleDefinition, ScheduleId, SkipRange, Token};
use belfry_time::Timestamp;
use rusqlite::params;

use super::source::from_json;
use super::{Compiled, Done, Verb, micros};
use crate::memory::{resumed, standing_of};
use crate::shapes::*;

impl Verb<'_> {
    pub(super) fn pause(
        &self,
        now: Timestamp,
        id: ScheduleId,
        reason: Option<&str>,
        until: Option<Timestamp>,
    ) -> Done<bool> {
        let paused = Status::Paused { reason: reason.map(str::to_owned), until };
        let since = match self.status(id)? {
            Some((Status::Active, _)) => now,
            Some((status @ Status::Paused { .. }, since)) if status != paused => since,
            _ => return Ok(false),
        };
        let Some((_, compiled)) = self.definition_of(id)? else { return Ok(false) };
        self.close_open_skip(id)?;
        self.give_up_deferral(now, id, &compiled)?;
        self.set_status(id, &paused, since)?;
        self.set_token(id, until.map(|until| Token::resume(since, until)))?;
        Ok(true)
    }

    pub(super) fn resume(
        &self,
        now: Timestamp,
        id: ScheduleId,
        catch_up: bool,
        skipped: Option<SkipRange>,
    ) -> Done<bool> {
        let Some((Status::Paused { .. }, since)) = self.status(id)? else { return Ok(false) };
        let Some((definition, compiled)) = self.definition_of(id)? else { return Ok(false) };
        let (status, token) =
            standing_of(&definition, &compiled, Token::next(if catch_up { since } else { now }));
        if let Some(range) = skipped.filter(|_| !catch_up) {
            self.add_skips(id, &[range])?;
        }
        self.set_status(id, &status, now)?;
        let waits = self.waits(id)?;
        self.set_token(id, token.filter(|_| !waits))?;
        Ok(true)
    }

    /// The end of a pause has come: as if it had been resumed at that instant.
    pub(super) fn commit_resume(&self, commit: &Commit) -> Done<Committed> {
        let id = commit.schedule;
        let Some((definition, compiled)) = self.definition_of(id)? else { return Ok(Committed::Lost) };
        self.add_skips(id, &commit.closed)?;
        self.execute(
            "update schedule_state set origin = coalesce(?, origin) where schedule_id = ?",
            params![commit.origin.map(micros), id],
        )?;
        let (status, token) = resumed(&definition, &compiled, commit);
        self.set_status(id, &status, commit.token.due_at)?;
        let waits = self.waits(id)?;
        self.set_token(id, token.filter(|_| !waits))?;
        Ok(Committed::Held)
    }

    /// What a schedule is that is not retired.
    pub(super) fn definition_of(&self, id: ScheduleId) -> Done<Option<(ScheduleDefinition, Compiled)>> {
        let known = self.row(
            "select name, definition from schedules where id = ? and retired_at is null",
            [id],
            |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)),
        )?;
        let Some((name, text)) = known else { return Ok(None) };
        Ok(Some((from_json(&text)?, self.compile(id, &name, &text))))
    }
}
