//! Sessions: their messages, their lines, their stops.

use belfry_core::broken::{self, Broken};
use belfry_core::session::{self, Change, Place, Policy, Session, Stage, Took};
use belfry_core::{Reason, RunId, RunState, ScheduleId};
use belfry_time::Timestamp;

use super::{InSession, Live, State};
use crate::sessions::*;
use crate::shapes::*;
use crate::views::Page;

/// A session, with how many of its runs may be running at once by its schedule.
#[derive(Clone)]
pub(super) struct SessionRow {
    pub(super) schedule: ScheduleId,
    pub(super) key: String,
    pub(super) session: Session,
    pub(super) at_once: u32,
    pub(super) used_at: Timestamp,
}

impl SessionRow {
    pub(super) fn policy(&self) -> Policy {
        Policy { max_concurrent: self.at_once, ..Policy::default() }
    }
}

impl State {
    pub(super) fn send(&mut self, now: Timestamp, new: &NewMessage) -> Sent {
        let schedule = new.run.schedule;
        let Some(row) = self.schedules.get(&schedule).filter(|row| row.retired_at.is_none()) else {
            return Sent::NotFound;
        };
        if let Some(key) = &new.key {
            match self.keys.get(&(schedule, key.key.clone())) {
                Some((run, first)) if first.expires_at > now && first.body_hash == key.body_hash => {
                    return Sent::Repeat(*run);
                }
                Some((run, first)) if first.expires_at > now => return Sent::KeyReused(*run),
                _ => {}
            }
        }
        if row.record.status != belfry_core::check::Status::Active {
            return Sent::Disabled;
        }
        let id = self.session_of(now, schedule, &new.session, new.policy.max_concurrent);
        let Some(row) = self.sessions.get_mut(&id) else { return Sent::NotFound };
        row.at_once = new.policy.max_concurrent;
        row.used_at = now;
        let before = row.session;
        let (took, change) = session::send(&before, &self.line(id), &new.policy, &new.in_line(), now);
        let generation = before.generation;
        let (run, sent) = match took {
            Took::Full => return Sent::Full,
            Took::Joined { run, seq, not_before, alone } => {
                let (ended, told) = self.change(now, id, change);
                if let Some(live) = self.live.get_mut(&run) {
                    live.session = live.session.map(|own| InSession { alone, ..own });
                    (live.not_before, live.new.not_before) = (not_before, not_before);
                    live.put_off_at = Some(now);
                    add_message(&mut live.new.payload, now, seq, new);
                }
                (run, Sent::Taken { run, seq, generation, joined: true, ended, told })
            }
            Took::Opened { seq, not_before, alone } => {
                let run = new.run.id;
                let (ended, told) = self.change(now, id, change);
                self.open(now, id, new, seq, not_before, alone);
                (run, Sent::Taken { run, seq, generation, joined: false, ended, told })
            }
            Took::Stale { seq } => {
                let run = new.run.id;
                self.change(now, id, change);
                self.open(now, id, new, seq, now, false);
                self.end_now(now, run, RunState::Cancelled, Some(Reason::Stale));
                (run, Sent::Stale { run, generation })
            }
        };
        if let Some(key) = &new.key {
            self.keys.insert((schedule, key.key.clone()), (run, key.clone()));
        }
        sent
    }

    fn open(
        &mut self,
        now: Timestamp,
        id: i64,
        new: &NewMessage,
        seq: i64,
        not_before: Timestamp,
        alone: bool,
    ) {
        let payload = first_payload(now, seq, new);
        let run = NewRun { not_before, payload, ..new.run.clone() };
        self.insert_run(now, &run);
        let generation = self.sessions.get(&id).map_or(0, |row| row.session.generation);
        if let Some(live) = self.live.get_mut(&run.id) {
            live.session = Some(InSession { id, seq, generation, alone });
        }
    }

    pub(super) fn session(
        &mut self,
        now: Timestamp,
        schedule: ScheduleId,
        key: &str,
        verb: SessionVerb,
    ) -> Option<SessionDone> {
        let row = self.schedules.get(&schedule).filter(|row| row.retired_at.is_none())?;
        let at_once = row.compiled.as_ref().ok().and_then(|schedule| schedule.chat).unwrap_or_default();
        let id = self.session_of(now, schedule, key, at_once.max_concurrent);
        let row = self.sessions.get_mut(&id)?;
        let (before, policy) = (row.session, row.policy());
        let line = self.line(id);
        let change = match verb {
            SessionVerb::Stop => session::stop(&before, &line, &policy).1,
            SessionVerb::StopAll => session::stop_all(&before, &line, now),
            SessionVerb::Reset => session::reset(&before, &line),
            SessionVerb::Use(usage) => session::used(&before, usage),
        };
        let (ended, told) = self.change(now, id, change);
        let generation = self.sessions.get(&id)?.session.generation;
        Some(SessionDone { generation, ended, told })
    }

    fn session_of(&mut self, now: Timestamp, schedule: ScheduleId, key: &str, at_once: u32) -> i64 {
        let known = self.sessions.iter().find(|(_, row)| row.schedule == schedule && row.key == key);
        if let Some((id, _)) = known {
            return *id;
        }
        let (id, session) = (self.number(), Session::default());
        let row = SessionRow { schedule, key: key.to_owned(), session, at_once, used_at: now };
        self.sessions.insert(id, row);
        id
    }

    /// Carries out a change; gives who has ended, and who is told to.
    fn change(&mut self, now: Timestamp, id: i64, change: Change) -> (Vec<RunId>, Vec<RunId>) {
        if let Some(row) = self.sessions.get_mut(&id) {
            row.session = change.session;
        }
        for (run, reason) in &change.cancel {
            if let Some(live) = self.live.get_mut(run) {
                live.cancel.get_or_insert(*reason);
            }
        }
        for (run, reason) in &change.end {
            self.end_now(now, *run, RunState::Cancelled, Some(*reason));
        }
        let runs = |runs: Vec<(RunId, Reason)>| runs.into_iter().map(|(run, _)| run).collect();
        (runs(change.end), runs(change.cancel))
    }

    /// The live runs of a session's present generation, in order.
    fn line(&self, id: i64) -> Vec<Place> {
        let generation = self.sessions.get(&id).map_or(0, |row| row.session.generation);
        let place = |(run, live): (&RunId, &Live)| {
            let own = live.session.filter(|own| own.id == id && own.generation == generation)?;
            let stage = match (live.running, live.cancel) {
                (Some(_), Some(_)) => Stage::Ending,
                (Some(_), None) => Stage::Running,
                (None, _) if live.epoch > 0 => Stage::Retrying,
                (None, _) => Stage::Waiting,
            };
            Some(Place {
                run: *run,
                seq: own.seq,
                stage,
                opened_at: live.created_at,
                not_before: live.not_before,
                alone: own.alone,
                bytes: live.new.payload.to_string().len() as u64,
                turn: false,
            })
        };
        let mut line: Vec<Place> = self.live.iter().filter_map(place).collect();
        line.sort_by_key(|place| place.seq);
        line
    }

    /// Whether a run has its turn in its session, if it is of one.
    pub(super) fn has_turn(&self, run: RunId, live: &Live) -> bool {
        let Some((own, row)) = live.session.and_then(|own| Some((own, self.sessions.get(&own.id)?))) else {
            return true;
        };
        if broken::is(Broken::SessionTwoAtOnce) {
            return true;
        }
        let line = self.line(own.id);
        let turns = session::turns(&row.session, &line, &row.policy());
        line.iter().zip(turns).any(|(place, turn)| place.run == run && turn)
    }

    /// Why a run must not wait for another attempt: it is to be cancelled, or its session is another by now.
    pub(super) fn left_behind(&self, live: &Live) -> Option<Reason> {
        let old = |own: InSession| {
            self.sessions.get(&own.id).is_none_or(|row| row.session.generation != own.generation)
        };
        live.cancel.or_else(|| live.session.filter(|own| old(*own)).map(|_| Reason::Stale))
    }

    /// Takes down what an attempt reports, unless its session is another by now.
    pub(super) fn take_usage(&mut self, own: Option<InSession>, usage: Option<session::Usage>) {
        if let Some((own, usage)) = own.zip(usage)
            && let Some(row) = self.sessions.get_mut(&own.id)
            && row.session.generation == own.generation
        {
            row.session.usage = Some(usage);
        }
    }

    pub(super) fn prune_sessions(&mut self, retention: &Retention) -> u32 {
        let old =
            self.sessions.iter().filter(|(_, row)| row.used_at < retention.runs_before).map(|(id, _)| *id);
        // Also what a reset has left alone is of its session while it lives.
        let lives = |id: &i64| self.live.values().any(|live| live.session.is_some_and(|own| own.id == *id));
        let old: Vec<i64> = old.filter(|id| !lives(id)).take(retention.batch as usize).collect();
        self.sessions.retain(|id, _| !old.contains(id));
        old.len() as u32
    }

    pub(super) fn list_sessions(
        &self,
        filter: &SessionFilter,
        after: Option<i64>,
        limit: u32,
    ) -> Page<SessionRecord, i64> {
        let record = |(id, row): (&i64, &SessionRow)| {
            let own = |live: &&Live| live.session.is_some_and(|own| own.id == *id);
            let own = self.live.values().filter(own);
            let active = own.clone().filter(|live| live.running.is_some()).count();
            SessionRecord {
                id: *id,
                schedule: row.schedule,
                name: self.schedules.get(&row.schedule).map_or(String::new(), |row| row.record.name.clone()),
                key: row.key.clone(),
                session: row.session,
                active: active as u32,
                queued: (own.count() - active) as u32,
                used_at: row.used_at,
            }
        };
        let sessions = self.sessions.iter().filter(|(id, _)| after.is_none_or(|after| **id > after));
        let items: Vec<SessionRecord> =
            sessions.map(record).filter(|record| filter.takes(record)).take(limit as usize).collect();
        let next = items.last().filter(|_| items.len() == limit as usize).map(|last| last.id);
        Page { items, next }
    }
}
