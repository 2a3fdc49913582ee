//! Pausing and resuming, by hand and by the clock.

use belfry_core::check::Status;
use belfry_core::{ScheduleId, SkipRange, Token};
use belfry_time::Timestamp;

use super::State;
use super::source::standing_of;
use crate::shapes::*;

impl State {
    pub(super) fn pause(
        &mut self,
        now: Timestamp,
        id: ScheduleId,
        reason: Option<&str>,
        until: Option<Timestamp>,
    ) -> bool {
        let Some(row) = self.schedules.get_mut(&id).filter(|row| !row.retired) else { return false };
        let paused = Status::Paused { reason: reason.map(str::to_owned), until };
        let since = match &row.record.status {
            Status::Active => now,
            Status::Paused { .. } if row.record.status != paused => row.record.status_since,
            _ => return false,
        };
        let compiled = row.compiled.clone();
        self.close_open_skip(now, id, &compiled);
        self.set_status(id, paused, since);
        self.set_token(id, until.map(|until| Token::resume(since, until)));
        true
    }

    pub(super) fn resume(
        &mut self,
        now: Timestamp,
        id: ScheduleId,
        catch_up: bool,
        skipped: Option<SkipRange>,
    ) -> bool {
        let Some(row) = self.schedules.get(&id).filter(|row| !row.retired) else { return false };
        if !matches!(row.record.status, Status::Paused { .. }) {
            return false;
        }
        let since = row.record.status_since;
        let waits = row.record.waits_for.is_some();
        let (status, token) = standing_of(
            &row.record.definition,
            &row.compiled,
            Token::next(if catch_up { since } else { now }),
        );
        self.skips.entry(id).or_default().extend(skipped.filter(|_| !catch_up));
        self.set_status(id, status, now);
        self.set_token(id, token.filter(|_| !waits));
        true
    }

    /// The end of a pause has come: as if it had been resumed at that instant.
    pub(super) fn commit_resume(&mut self, commit: &Commit) -> Committed {
        let id = commit.schedule;
        let until = commit.token.due_at;
        self.skips.entry(id).or_default().extend(&commit.closed);
        let Some(row) = self.schedules.get_mut(&id) else { return Committed::Lost };
        row.record.origin = commit.origin.or(row.record.origin);
        let waits = row.record.waits_for.is_some();
        let (status, token) = resumed(&row.record.definition, &row.compiled, commit);
        self.set_status(id, status, until);
        self.set_token(id, token.filter(|_| !waits));
        Committed::Held
    }
}

/// Where a schedule stands after the end of a pause, and its token.
pub(crate) fn resumed(
    definition: &belfry_core::ScheduleDefinition,
    compiled: &Result<std::sync::Arc<belfry_core::Schedule>, std::sync::Arc<str>>,
    commit: &Commit,
) -> (Status, Option<Token>) {
    let (status, armed) = standing_of(definition, compiled, commit.token);
    match (armed, commit.next) {
        (Some(_), Arm::Token(token)) => (status, Some(token)),
        (Some(_), Arm::Wait(_) | Arm::Exhausted) => (Status::Exhausted, None),
        (None, _) => (status, None),
    }
}
