//! Sessions: their messages, their lines, their stops.

use belfry_core::session::{self, Change, Place, Policy, Session, Stage, Took, Usage};
use belfry_core::{Reason, RunId, RunState, ScheduleId};
use belfry_time::Timestamp;
use rusqlite::{Row, params};

use super::source::status_of;
use super::{Done, Verb, bytes, instant, json, maybe_instant, maybe_number, micros, number, run_id, text};
use crate::sessions::*;
use crate::shapes::*;
use crate::views::Page;

/// A session, with its number and with how many may be running at once by its schedule.
struct Kept {
    id: i64,
    session: Session,
    at_once: u32,
}

impl Kept {
    fn policy(&self) -> Policy {
        Policy { max_concurrent: self.at_once, ..Policy::default() }
    }
}

impl Verb<'_> {
    pub(super) fn send(&self, now: Timestamp, new: &NewMessage) -> Done<Sent> {
        let schedule = new.run.schedule;
        let status = self.row(
            "select st.* from schedules s join schedule_state st on st.schedule_id = s.id where s.id = ? and s.retired_at is null",
            [schedule],
            status_of,
        )?;
        let Some(status) = status else { return Ok(Sent::NotFound) };
        if let Some(first) = self.first_with(now, schedule, new.key.as_ref())? {
            return Ok(match first {
                (run, true) => Sent::Repeat(run),
                (run, false) => Sent::KeyReused(run),
            });
        }
        if status != belfry_core::check::Status::Active {
            return Ok(Sent::Disabled);
        }
        let at_once = new.policy.max_concurrent;
        let kept = self.kept(now, schedule, &new.session, at_once)?;
        self.execute(
            "update sessions set at_once = ?, used_at = ? where id = ?",
            params![at_once, micros(now), kept.id],
        )?;
        let line = self.line(kept.id)?;
        let (took, change) = session::send(&kept.session, &line, &new.policy, &new.in_line(), now);
        let generation = kept.session.generation;
        let (run, sent) = match took {
            Took::Full => return Ok(Sent::Full),
            Took::Joined { run, seq, not_before, alone } => {
                let (ended, told) = self.change(now, kept.id, change)?;
                self.join_run(now, run, seq, not_before, new)?;
                self.execute(
                    "update session_runs set alone = ? where run_id = ?",
                    params![alone, bytes(run)],
                )?;
                (run, Sent::Taken { run, seq, generation, joined: true, ended, told })
            }
            Took::Opened { seq, not_before, alone } => {
                let (ended, told) = self.change(now, kept.id, change)?;
                self.open_run(now, kept.id, new, seq, not_before, alone)?;
                (new.run.id, Sent::Taken { run: new.run.id, seq, generation, joined: false, ended, told })
            }
            Took::Stale { seq } => {
                self.change(now, kept.id, change)?;
                self.open_run(now, kept.id, new, seq, now, false)?;
                self.end(now, new.run.id, RunState::Cancelled, Reason::Stale)?;
                (new.run.id, Sent::Stale { run: new.run.id, generation })
            }
        };
        if let Some(key) = &new.key {
            self.take_key(schedule, key, run)?;
        }
        Ok(sent)
    }

    fn join_run(
        &self,
        now: Timestamp,
        run: RunId,
        seq: i64,
        not_before: Timestamp,
        new: &NewMessage,
    ) -> Done<()> {
        let payload = self.row("select payload from live where id = ?", [bytes(run)], |row| text(row, 0))?;
        let mut payload = payload.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
        add_message(&mut payload, now, seq, new);
        self.execute(
            "update live set due_at = ?1, not_before = ?1, put_off_at = ?2, payload = ?3 where id = ?4",
            params![micros(not_before), micros(now), payload.to_string(), bytes(run)],
        )
        .map(drop)
    }

    fn open_run(
        &self,
        now: Timestamp,
        id: i64,
        new: &NewMessage,
        seq: i64,
        not_before: Timestamp,
        alone: bool,
    ) -> Done<()> {
        let payload = first_payload(now, seq, new);
        let run = NewRun { not_before, payload, ..new.run.clone() };
        self.insert_run(now, &run)?;
        // It has no turn until it is given one.
        self.execute(
            "update live set state = 1, session = ? where id = ?",
            params![new.session, bytes(run.id)],
        )?;
        self.execute(
            "insert into session_runs (run_id, session_id, seq, alone) values (?, ?, ?, ?)",
            params![bytes(run.id), id, seq, alone],
        )
        .map(drop)
    }

    pub(super) fn session(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        key: &str,
        verb: SessionVerb,
    ) -> Done<Option<SessionDone>> {
        let found = self.row(
            "select name, definition from schedules where id = ? and retired_at is null",
            [schedule],
            |row| Ok((text(row, 0)?, json(row, 1)?)),
        )?;
        let Some((name, definition)) = found else { return Ok(None) };
        let chat = self.compile(schedule, &name, &definition).ok().and_then(|schedule| schedule.chat);
        let kept = self.kept(now, schedule, key, chat.unwrap_or_default().max_concurrent)?;
        let line = self.line(kept.id)?;
        let change = match verb {
            SessionVerb::Stop => session::stop(&kept.session, &line, &kept.policy()).1,
            SessionVerb::StopAll => session::stop_all(&kept.session, &line, now),
            SessionVerb::Reset => session::reset(&kept.session, &line),
            SessionVerb::Use(usage) => session::used(&kept.session, usage),
        };
        let generation = change.session.generation;
        let (ended, told) = self.change(now, kept.id, change)?;
        if verb == SessionVerb::Reset {
            // What runs is none of its business any more.
            self.execute("delete from session_runs where session_id = ?", [kept.id])?;
        }
        Ok(Some(SessionDone { generation, ended, told }))
    }

    fn kept(&self, now: Timestamp, schedule: ScheduleId, key: &str, at_once: u32) -> Done<Kept> {
        let new = Session::default();
        self.execute(
            "insert into sessions (schedule_id, key, generation, last_seq, cutoff_seq, at_once, used_at) values (?, ?, ?, ?, ?, ?, ?)
             on conflict do nothing",
            params![schedule, key, new.generation, new.last_seq, new.cutoff_seq, at_once, micros(now)],
        )?;
        let kept = self.row(
            "select * from sessions where schedule_id = ? and key = ?",
            params![schedule, key],
            |row| {
                Ok(Kept { id: row.get("id")?, session: session_row(row)?, at_once: number(row, "at_once")? })
            },
        )?;
        kept.ok_or_else(|| crate::Error::unexpected("a session that was just made is gone"))
    }

    /// The live runs of a session's present generation, in order.
    fn line(&self, id: i64) -> Done<Vec<Place>> {
        self.rows(
            "select r.run_id, r.seq, r.alone, l.state, l.parked_on, l.cancel_reason, l.epoch, l.not_before, l.created_at,
                    octet_length(l.payload) as bytes
             from session_runs r join live l on l.id = r.run_id where r.session_id = ? order by r.seq",
            [id],
            |row| {
                let (state, parked): (i64, Option<i64>) = (row.get("state")?, row.get("parked_on")?);
                let stage = match (state, row.get::<_, Option<i64>>("cancel_reason")?) {
                    (2, Some(_)) => Stage::Ending,
                    (2, None) => Stage::Running,
                    _ if row.get::<_, i64>("epoch")? > 0 => Stage::Retrying,
                    _ => Stage::Waiting,
                };
                Ok(Place {
                    run: run_id(row.get("run_id")?),
                    seq: row.get("seq")?,
                    stage,
                    opened_at: instant(row, "created_at")?,
                    not_before: instant(row, "not_before")?,
                    alone: row.get("alone")?,
                    bytes: row.get::<_, i64>("bytes")?.unsigned_abs(),
                    turn: state != 1 || parked.is_some(),
                })
            },
        )
    }

    /// Carries out a change; gives who has ended, and who is told to.
    fn change(&self, now: Timestamp, id: i64, change: Change) -> Done<(Vec<RunId>, Vec<RunId>)> {
        let session = &change.session;
        let (tokens, window) = session
            .usage
            .map_or((None, None), |usage| (Some(usage.tokens as i64), Some(usage.context_window as i64)));
        self.execute(
            "update sessions set generation = ?, last_seq = ?, cutoff_seq = ?, cutoff_at = ?, max_concurrent = ?, tokens = ?,
                    context_window = ? where id = ?",
            params![
                session.generation,
                session.last_seq,
                session.cutoff_seq,
                session.cutoff_at.map(micros),
                session.max_concurrent,
                tokens,
                window,
                id
            ],
        )?;
        for (run, reason) in &change.cancel {
            self.execute(
                "update live set cancel_reason = ? where id = ? and cancel_reason is null",
                params![reason.code(), bytes(*run)],
            )?;
        }
        for (run, reason) in &change.end {
            self.end(now, *run, RunState::Cancelled, *reason)?;
        }
        self.moved.borrow_mut().insert(id);
        let runs = |runs: Vec<(RunId, Reason)>| runs.into_iter().map(|(run, _)| run).collect();
        Ok((runs(change.end), runs(change.cancel)))
    }

    /// Gives turns to whom they have come, in all sessions whose line this verb has changed.
    pub(super) fn settle_moved(&self) -> Done<()> {
        for id in self.moved.take() {
            let kept = self.row("select * from sessions where id = ?", [id], |row| {
                Ok(Kept { id, session: session_row(row)?, at_once: number(row, "at_once")? })
            })?;
            let Some(kept) = kept else { continue };
            for (run, turn) in session::moved(&kept.session, &self.line(id)?, &kept.policy()) {
                if !turn {
                    // Others may take its place at a gate.
                    let gate = self.row("select agent_gate from live where id = ?", [bytes(run)], |row| {
                        row.get::<_, Option<i64>>(0)
                    })?;
                    self.freed.borrow_mut().extend(gate.flatten());
                }
                self.execute(
                    "update live set state = ?, parked_on = null where id = ? and state <> 2",
                    params![if turn { 3 } else { 1 }, bytes(run)],
                )?;
            }
        }
        Ok(())
    }

    /// The session that a run is in the line of.
    pub(super) fn session_of(&self, run: RunId) -> Done<Option<i64>> {
        self.row("select session_id from session_runs where run_id = ?", [bytes(run)], |row| row.get(0))
    }

    /// Takes down what an attempt reports, unless its session is another by now.
    pub(super) fn take_usage(&self, run: RunId, usage: Option<Usage>) -> Done<()> {
        let Some(usage) = usage else { return Ok(()) };
        self.execute(
            "update sessions set tokens = ?, context_window = ? where id = (select session_id from session_runs where run_id = ?)",
            params![usage.tokens as i64, usage.context_window as i64, bytes(run)],
        )
        .map(drop)
    }

    pub(super) fn list_sessions(
        &self,
        filter: &SessionFilter,
        after: Option<i64>,
        limit: u32,
    ) -> Done<Page<SessionRecord, i64>> {
        let items = self.rows(
            "select x.*, s.name,
                    (select count(*) from live l where l.schedule_id = x.schedule_id and l.session = x.key and l.state = 2) as active,
                    (select count(*) from live l where l.schedule_id = x.schedule_id and l.session = x.key and l.state <> 2) as queued
             from sessions x join schedules s on s.id = x.schedule_id join agents a on a.id = s.agent_id
             where x.id > ?1 and (?2 is null or a.name = ?2) and (?3 is null or s.name = ?3) and (?4 is null or x.key = ?4)
             order by x.id limit ?5",
            params![after.unwrap_or(i64::MIN), filter.agent, filter.schedule, filter.key, limit],
            |row| {
                Ok(SessionRecord {
                    id: row.get("id")?,
                    schedule: row.get("schedule_id")?,
                    name: text(row, "name")?,
                    key: text(row, "key")?,
                    session: session_row(row)?,
                    active: number(row, "active")?,
                    queued: number(row, "queued")?,
                    used_at: instant(row, "used_at")?,
                })
            },
        )?;
        let next = items.last().filter(|_| items.len() == limit as usize).map(|last| last.id);
        Ok(Page { items, next })
    }
}

fn session_row(row: &Row<'_>) -> rusqlite::Result<Session> {
    let tokens: Option<i64> = row.get("tokens")?;
    let window: Option<i64> = row.get("context_window")?;
    Ok(Session {
        generation: row.get("generation")?,
        last_seq: row.get("last_seq")?,
        cutoff_seq: row.get("cutoff_seq")?,
        cutoff_at: maybe_instant(row, "cutoff_at")?,
        max_concurrent: maybe_number(row, "max_concurrent")?,
        usage: tokens.zip(window).map(|(tokens, window)| Usage {
            tokens: tokens.unsigned_abs(),
            context_window: window.unsigned_abs(),
        }),
    })
}
