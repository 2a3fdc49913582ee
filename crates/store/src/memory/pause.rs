//! Pausing and resuming, by hand and by the clock.

use belfry_core::check::Status;
use belfry_core::edit::{self, Resume};
use belfry_core::{ScheduleDefinition, ScheduleId};
use belfry_time::Timestamp;

use super::{State, compiled};
use crate::shapes::*;

impl State {
    pub(super) fn pause(
        &mut self,
        now: Timestamp,
        id: ScheduleId,
        reason: Option<&str>,
        until: Option<Timestamp>,
    ) -> bool {
        let Some((found, _, schedule)) = self.found(id) else { return false };
        let paused = Status::Paused { reason: reason.map(str::to_owned), until };
        let change = edit::pause(&found, compiled(&schedule), paused, now);
        change.map(|change| self.write(now, id, change)).is_some()
    }

    pub(super) fn resume(&mut self, now: Timestamp, id: ScheduleId, how: Resume) -> Option<u64> {
        let (found, definition, schedule) = self.found(id)?;
        let change = edit::resume(&found, &definition, compiled(&schedule), how, now)?;
        let skipped = change.skipped();
        self.write(now, id, change);
        Some(skipped)
    }

    /// The end of a pause has come: as if it had been resumed at that instant.
    pub(super) fn commit_resume(&mut self, now: Timestamp, commit: &Commit) -> Committed {
        let id = commit.schedule;
        let Some((found, definition, schedule)) = self.found(id) else { return Committed::Lost };
        // The run that it waited for has ended meanwhile, and with that there may be ticks in the pause.
        if found.waits != commit.waits {
            return Committed::Lost;
        }
        self.skips.entry(id).or_default().extend(&commit.closed);
        let found = edit::Found { origin: commit.origin.or(found.origin), ..found };
        let (planned, until) = (commit.next.token(), commit.token.due_at);
        let change = edit::pause_ended(&found, &definition, compiled(&schedule), planned, until);
        self.write(now, id, change);
        Committed::Held
    }

    /// A schedule that is not retired, as an edit finds it.
    pub(super) fn found(
        &self,
        id: ScheduleId,
    ) -> Option<(edit::Found, ScheduleDefinition, crate::memory::Compiled)> {
        let row = self.schedules.get(&id).filter(|row| row.retired_at.is_none())?;
        let record = &row.record;
        let found = edit::Found {
            status: record.status.clone(),
            since: record.status_since,
            timer: record.token,
            deferred: self.deferred.get(&id).map(|deferred| deferred.tick_at),
            waits: record.waits_for.is_some(),
            origin: record.origin,
            open_skip: record.open_skip,
            cursor_at: record.cursor_at,
            planned_at: record.planned_at,
        };
        Some((found, record.definition.clone(), row.compiled.clone()))
    }

    /// Writes what an edit has decided.
    pub(super) fn write(&mut self, now: Timestamp, id: ScheduleId, change: edit::Change) {
        self.skips.entry(id).or_default().extend(change.closed);
        let Some(row) = self.schedules.get_mut(&id) else { return };
        let record = &mut row.record;
        record.status = change.status;
        record.status_since = change.since;
        record.waits_for = record.waits_for.filter(|_| change.waits);
        record.origin = change.origin;
        record.cursor_at = change.cursor_at;
        record.planned_at = change.planned_at;
        record.open_skip = None;
        if change.new_revision {
            record.revision += 1;
            self.add_revision(now, id);
        }
        self.set_token(id, change.timer);
    }
}
