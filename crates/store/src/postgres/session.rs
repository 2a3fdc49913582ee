//! Sessions: their messages, their lines, their stops.
//!
//! Whoever changes a session or takes a run out of its line holds the session's row, and takes it before any other lock.
//! Claims do not: what is claimed meanwhile is seen by the state of its run, and the decision is taken again.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use belfry_core::ending::Then;
use belfry_core::session::{self, Change as Moves, Place, Policy, Session, Stage, Took, Usage};
use belfry_core::{Reason, RunId, ScheduleId, Trigger};
use belfry_time::Timestamp;
use tokio_postgres::Row;
use uuid::Uuid;

use super::Postgres;
use super::connection::{Fault, Param, Tx};
use super::enqueue::{Places, insert_runs};
use super::finish::{lock_gates, mark};
use super::rows::{self, Live, get, small};
use crate::Error;
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
    fn read(row: &Row) -> Result<Kept, Fault> {
        Ok(Kept { id: get(row, "id")?, session: session_of(row)?, at_once: small(get(row, "at_once")?) })
    }

    fn policy(&self) -> Policy {
        Policy { max_concurrent: self.at_once, ..Policy::default() }
    }
}

/// Locks the sessions that runs are in the line of.
pub(super) async fn lock_sessions(tx: &mut Tx<'_>, runs: &[Uuid]) -> Result<(), Fault> {
    let sql = "select 1 from sessions where id = any(array(select distinct session_id from session_runs \
               where run_id = any($1))) order by id for no key update";
    tx.query(sql, &[&runs]).await?;
    Ok(())
}

/// The sessions that runs are in the line of; asked for only where there are messages among them.
pub(super) async fn lines_of(tx: &mut Tx<'_>, runs: &[Live]) -> Result<HashMap<RunId, i64>, Fault> {
    let runs = runs.iter().filter(|live| live.trigger == Trigger::Message).map(|live| live.id.0);
    let runs: Vec<Uuid> = runs.collect();
    if runs.is_empty() {
        return Ok(HashMap::new());
    }
    let sql = "select run_id, session_id from session_runs where run_id = any($1)";
    let found = tx.query(sql, &[&runs]).await?;
    found.iter().map(|row| Ok((RunId(get(row, "run_id")?), get(row, "session_id")?))).collect()
}

/// Why a run must not wait for another attempt: it is to be cancelled, or its session is another by now.
pub(super) fn left_behind(live: &Live, lines: &HashMap<RunId, i64>) -> Option<Reason> {
    let gone = live.trigger == Trigger::Message && !lines.contains_key(&live.id);
    live.cancel.or(gone.then_some(Reason::Stale))
}

impl Postgres {
    pub(super) async fn send_in(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        new: &NewMessage,
        places: &Places,
    ) -> Result<Sent, Fault> {
        tx.passes_locks();
        let schedule = new.run.schedule;
        let sql = "select status from schedule_state where schedule_id = $1 and not retired";
        let found = tx.query(sql, &[&schedule]).await?;
        let Some(row) = found.first() else { return Ok(Sent::NotFound) };
        let status: i16 = get(row, "status")?;
        if let Some(key) = &new.key
            && let Some((run, same)) = first_with(tx, now, schedule, key).await?
        {
            return Ok(if same { Sent::Repeat(run) } else { Sent::KeyReused(run) });
        }
        if status != 0 {
            return Ok(Sent::Disabled);
        }
        let at_once = i64::from(new.policy.max_concurrent);
        let kept = kept(tx, now, schedule, &new.session, at_once).await?;
        let sql = "update sessions set at_once = $2, used_at = $3 where id = $1";
        tx.execute(sql, &[&kept.id, &at_once, &now]).await?;
        let line = line(tx, kept.id).await?;
        let (took, moves) = session::send(&kept.session, &line, &new.policy, &new.in_line(), now);
        let generation = kept.session.generation;
        let (run, sent) = match took {
            Took::Full => return Ok(Sent::Full),
            Took::Joined { run, seq, not_before, alone } => {
                let (ended, told) = self.carry_out(tx, now, kept.id, moves).await?;
                join_run(tx, now, run, (seq, not_before), new).await?;
                let sql = "update session_runs set alone = $2 where run_id = $1 and alone <> $2";
                tx.execute(sql, &[&run.0, &alone]).await?;
                (run, Sent::Taken { run, seq, generation, joined: true, ended, told })
            }
            Took::Opened { seq, not_before, alone } => {
                let (ended, told) = self.carry_out(tx, now, kept.id, moves).await?;
                open_run(tx, now, kept.id, (new, places), (seq, not_before, alone)).await?;
                (new.run.id, Sent::Taken { run: new.run.id, seq, generation, joined: false, ended, told })
            }
            Took::Stale { seq } => {
                self.carry_out(tx, now, kept.id, moves).await?;
                open_run(tx, now, kept.id, (new, places), (seq, now, false)).await?;
                self.end_waiting(tx, now, &[new.run.id.0], Reason::Stale).await?;
                (new.run.id, Sent::Stale { run: new.run.id, generation })
            }
        };
        if let Some(key) = &new.key {
            take_key(tx, now, schedule, key, run).await?;
        }
        self.settle_lines(tx, &[kept.id]).await?;
        Ok(sent)
    }

    pub(super) async fn session_in(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        schedule: ScheduleId,
        key: &str,
        verb: SessionVerb,
    ) -> Result<Option<SessionDone>, Fault> {
        let sql = "select name, definition from schedules where id = $1 and retired_at is null";
        let found = tx.query(sql, &[&schedule]).await?;
        let Some(row) = found.first() else { return Ok(None) };
        let definition: &str = get(row, "definition")?;
        let definition: belfry_core::ScheduleDefinition = serde_json::from_str(definition)
            .map_err(|error| Error::unexpected(format!("a schedule's definition: {error}")))?;
        let chat = definition.compile(get(row, "name")?).ok().and_then(|schedule| schedule.chat);
        let at_once = i64::from(chat.unwrap_or_default().max_concurrent);
        let kept = kept(tx, now, schedule, key, at_once).await?;
        let line = line(tx, kept.id).await?;
        let moves = match verb {
            SessionVerb::Stop => session::stop(&kept.session, &line, &kept.policy()).1,
            SessionVerb::StopAll => session::stop_all(&kept.session, &line, now),
            SessionVerb::Reset => session::reset(&kept.session, &line),
            SessionVerb::Use(usage) => session::used(&kept.session, usage),
        };
        let generation = moves.session.generation;
        let (ended, told) = self.carry_out(tx, now, kept.id, moves).await?;
        if verb == SessionVerb::Reset {
            // What runs is none of its business any more.
            tx.execute("delete from session_runs where session_id = $1", &[&kept.id]).await?;
        }
        self.settle_lines(tx, &[kept.id]).await?;
        Ok(Some(SessionDone { generation, ended, told }))
    }

    /// Carries out what was decided; gives who has ended, and who is told to. What was claimed since the look is decided
    /// on again.
    async fn carry_out(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        id: i64,
        moves: Moves,
    ) -> Result<(Vec<RunId>, Vec<RunId>), Fault> {
        let session = &moves.session;
        let usage = session.usage.map(|usage| (usage.tokens as i64, usage.context_window as i64));
        let sql = "update sessions set generation = $2, last_seq = $3, cutoff_seq = $4, cutoff_at = $5, \
                   max_concurrent = $6, tokens = $7, context_window = $8 where id = $1";
        let params: &[Param<'_>] = &[
            &id,
            &session.generation,
            &session.last_seq,
            &session.cutoff_seq,
            &session.cutoff_at,
            &session.max_concurrent.map(i64::from),
            &usage.map(|usage| usage.0),
            &usage.map(|usage| usage.1),
        ];
        tx.execute(sql, params).await?;
        for (runs, waiting) in [(&moves.cancel, false), (&moves.end, true)] {
            let Some((_, reason)) = runs.first() else { continue };
            let ids: Vec<Uuid> = runs.iter().map(|(run, _)| run.0).collect();
            let done = match waiting {
                true => self.end_waiting(tx, now, &ids, *reason).await?.len(),
                false => mark(tx, &ids, *reason).await?.len(),
            };
            if done != ids.len() {
                return Err(Fault::Again);
            }
        }
        let runs = |runs: Vec<(RunId, Reason)>| runs.into_iter().map(|(run, _)| run).collect();
        Ok((runs(moves.end), runs(moves.cancel)))
    }

    /// Takes runs that have ended out of their lines, and gives turns to whom they have come.
    pub(super) async fn leave_lines(&self, tx: &mut Tx<'_>, changes: &[(RunId, bool)]) -> Result<(), Fault> {
        if changes.is_empty() {
            return Ok(());
        }
        let runs: Vec<Uuid> = changes.iter().map(|(run, _)| run.0).collect();
        let ended: Vec<Uuid> = changes.iter().filter(|(_, ended)| *ended).map(|(run, _)| run.0).collect();
        let sql = "select distinct session_id from session_runs where run_id = any($1)";
        let found = tx.query(sql, &[&runs]).await?;
        let sessions: BTreeSet<i64> =
            found.iter().map(|row| get(row, "session_id")).collect::<Result<_, Fault>>()?;
        tx.execute("delete from session_runs where run_id = any($1)", &[&ended]).await?;
        self.settle_lines(tx, &sessions.into_iter().collect::<Vec<_>>()).await
    }

    async fn settle_lines(&self, tx: &mut Tx<'_>, sessions: &[i64]) -> Result<(), Fault> {
        let found = tx.query("select * from sessions where id = any($1)", &[&sessions]).await?;
        let (mut go, mut wait) = (Vec::new(), Vec::new());
        for row in &found {
            let kept = Kept::read(row)?;
            let line = line(tx, kept.id).await?;
            for (run, turn) in session::moved(&kept.session, &line, &kept.policy()) {
                if turn { go.push(run.0) } else { wait.push(run.0) }
            }
        }
        if !go.is_empty() {
            let sql = "update live set state = 3 where id = any($1) and state + 0 = 1 and parked_on is null";
            tx.execute(sql, &[&go]).await?;
        }
        if !wait.is_empty() {
            // Others may take their places at a gate.
            let sql = "select distinct agent_gate from live where id = any($1) and agent_gate is not null";
            let gates = tx.query(sql, &[&wait]).await?;
            let gates: Vec<i64> =
                gates.iter().map(|row| get(row, "agent_gate")).collect::<Result<_, Fault>>()?;
            lock_gates(tx, &gates).await?;
            let sql = "update live set state = 1, parked_on = null where id = any($1) and state + 0 <> 2";
            tx.execute(sql, &[&wait]).await?;
            self.release(tx, &gates).await?;
        }
        Ok(())
    }
}

/// Writes the usage that sessions now have, by their ids.
pub(super) async fn take_usage(tx: &mut Tx<'_>, usages: &BTreeMap<i64, Usage>) -> Result<(), Fault> {
    if usages.is_empty() {
        return Ok(());
    }
    let sessions: Vec<i64> = usages.keys().copied().collect();
    let tokens: Vec<i64> = usages.values().map(|usage| usage.tokens as i64).collect();
    let windows: Vec<i64> = usages.values().map(|usage| usage.context_window as i64).collect();
    let sql = "update sessions s set tokens = u.tokens, context_window = u.context_window \
               from unnest($1::bigint[], $2::bigint[], $3::bigint[]) as u (id, tokens, context_window) where s.id = u.id";
    tx.execute(sql, &[&sessions, &tokens, &windows]).await?;
    Ok(())
}

/// Which of the changes are of messages, and whether these end.
pub(super) fn of_messages<'a>(changes: impl Iterator<Item = (&'a Live, &'a Then)>) -> Vec<(RunId, bool)> {
    let messages = changes.filter(|(live, _)| live.trigger == Trigger::Message);
    messages.map(|(live, then)| (live.id, matches!(then, Then::End { .. }))).collect()
}

/// A session, which is made where it is new, and is ours from here on.
async fn kept(
    tx: &mut Tx<'_>,
    now: Timestamp,
    schedule: ScheduleId,
    key: &str,
    at_once: i64,
) -> Result<Kept, Fault> {
    let lock = "select * from sessions where schedule_id = $1 and key = $2 for no key update";
    if let Some(row) = tx.query(lock, &[&schedule, &key]).await?.first() {
        return Kept::read(row);
    }
    let new = Session::default();
    let sql = "insert into sessions (schedule_id, key, generation, last_seq, cutoff_seq, at_once, used_at) \
               values ($1, $2, $3, $4, $5, $6, $7) on conflict do nothing";
    let params: &[Param<'_>] =
        &[&schedule, &key, &new.generation, &new.last_seq, &new.cutoff_seq, &at_once, &now];
    tx.execute(sql, params).await?;
    let found = tx.query(lock, &[&schedule, &key]).await?;
    Kept::read(found.first().ok_or(Fault::Again)?)
}

/// The live runs of a session's present generation, in order.
async fn line(tx: &mut Tx<'_>, id: i64) -> Result<Vec<Place>, Fault> {
    let sql = "select r.run_id, r.seq, r.alone, l.state, l.parked_on, l.cancel_reason, l.epoch, l.not_before, l.created_at, \
               octet_length(l.payload) as bytes \
               from session_runs r join live l on l.id = r.run_id where r.session_id = $1 order by r.seq";
    let found = tx.query(sql, &[&id]).await?;
    let place = |row: &Row| {
        let (state, epoch): (i16, i32) = (get(row, "state")?, get(row, "epoch")?);
        let stage = match (state, get::<Option<i16>>(row, "cancel_reason")?) {
            (2, Some(_)) => Stage::Ending,
            (2, None) => Stage::Running,
            _ if epoch > 0 => Stage::Retrying,
            _ => Stage::Waiting,
        };
        Ok(Place {
            run: RunId(get(row, "run_id")?),
            seq: get(row, "seq")?,
            stage,
            opened_at: get(row, "created_at")?,
            not_before: get(row, "not_before")?,
            alone: get(row, "alone")?,
            bytes: u64::from(get::<i32>(row, "bytes")?.unsigned_abs()),
            turn: state != 1 || get::<Option<i64>>(row, "parked_on")?.is_some(),
        })
    };
    found.iter().map(place).collect()
}

async fn join_run(
    tx: &mut Tx<'_>,
    now: Timestamp,
    run: RunId,
    (seq, not_before): (i64, Timestamp),
    new: &NewMessage,
) -> Result<(), Fault> {
    let sql = "select payload from live where id = $1 and state <> 2 for update";
    let found = tx.query(sql, &[&run.0]).await?;
    let payload: &str = get(found.first().ok_or(Fault::Again)?, "payload")?;
    let mut payload = serde_json::from_str(payload).unwrap_or_default();
    add_message(&mut payload, now, seq, new);
    let sql = "update live set due_at = $2, not_before = $2, put_off_at = $3, payload = $4 where id = $1";
    tx.execute(sql, &[&run.0, &not_before, &now, &payload.to_string()]).await?;
    Ok(())
}

async fn open_run(
    tx: &mut Tx<'_>,
    now: Timestamp,
    id: i64,
    (new, places): (&NewMessage, &Places),
    (seq, not_before, alone): (i64, Timestamp, bool),
) -> Result<(), Fault> {
    // Held, so that nobody retires the schedule before the run is there to be ended with it.
    let sql = "select 1 from schedule_state where schedule_id = $1 and not retired for share";
    if tx.query(sql, &[&new.run.schedule]).await?.is_empty() {
        return Err(Fault::Again);
    }
    let payload = first_payload(now, seq, new);
    let run = NewRun { not_before, payload, ..new.run.clone() };
    insert_runs(tx, now, &[&run], places).await?;
    // It has no turn until it is given one.
    tx.execute("update live set state = 1, session = $2 where id = $1", &[&run.id.0, &new.session]).await?;
    let sql = "insert into session_runs (run_id, session_id, seq, alone) values ($1, $2, $3, $4)";
    tx.execute(sql, &[&run.id.0, &id, &seq, &alone]).await?;
    Ok(())
}

/// The run that has an idempotency key, and whether it was asked for with the same body.
pub(super) async fn first_with(
    tx: &mut Tx<'_>,
    now: Timestamp,
    schedule: ScheduleId,
    key: &Key,
) -> Result<Option<(RunId, bool)>, Fault> {
    let sql =
        "select run_id, body_hash from idempotency where schedule_id = $1 and key = $2 and expires_at > $3";
    let found = tx.query(sql, &[&schedule, &key.key, &now]).await?;
    let Some(row) = found.first() else { return Ok(None) };
    Ok(Some((RunId(get(row, "run_id")?), get::<&[u8]>(row, "body_hash")? == key.body_hash)))
}

/// Stores a key for a run. A key that another transaction has stored meanwhile makes this one start again.
pub(super) async fn take_key(
    tx: &mut Tx<'_>,
    now: Timestamp,
    schedule: ScheduleId,
    key: &Key,
    run: RunId,
) -> Result<(), Fault> {
    let sql = "insert into idempotency (schedule_id, key, body_hash, run_id, expires_at) \
               values ($1, $2, $3, $4, $5) on conflict (schedule_id, key) do update \
               set body_hash = excluded.body_hash, run_id = excluded.run_id, expires_at = excluded.expires_at \
               where idempotency.expires_at <= $6";
    let params: &[Param<'_>] = &[&schedule, &key.key, &key.body_hash, &run.0, &key.expires_at, &now];
    match tx.execute(sql, params).await? {
        // Another session has used it meanwhile.
        0 => Err(Fault::Again),
        _ => Ok(()),
    }
}

pub(super) async fn sessions(
    tx: &mut Tx<'_>,
    filter: &SessionFilter,
    after: Option<i64>,
    limit: u32,
) -> Result<Page<SessionRecord, i64>, Fault> {
    let sql = "select x.*, s.name, \
                   (select count(*) from live l where l.schedule_id = x.schedule_id and l.session = x.key and l.state = 2) as active, \
                   (select count(*) from live l where l.schedule_id = x.schedule_id and l.session = x.key and l.state <> 2) as queued \
               from sessions x join schedules s on s.id = x.schedule_id join agents a on a.id = s.agent_id \
               where x.id > $1 and ($2::text is null or a.name = $2) and ($3::text is null or s.name = $3) \
                   and ($4::text is null or x.key = $4) order by x.id limit $5";
    let (after, limit) = (after.unwrap_or(i64::MIN), i64::from(limit));
    let found = tx.query(sql, &[&after, &filter.agent, &filter.schedule, &filter.key, &limit]).await?;
    let record = |row: &Row| {
        Ok(SessionRecord {
            id: get(row, "id")?,
            schedule: get(row, "schedule_id")?,
            name: get(row, "name")?,
            key: get(row, "key")?,
            session: session_of(row)?,
            active: small(get(row, "active")?),
            queued: small(get(row, "queued")?),
            used_at: get(row, "used_at")?,
        })
    };
    let items: Vec<SessionRecord> = found.iter().map(record).collect::<Result<_, Fault>>()?;
    let next = items.last().filter(|_| items.len() as i64 == limit).map(|last| last.id);
    Ok(Page { items, next })
}

fn session_of(row: &Row) -> Result<Session, Fault> {
    let tokens: Option<i64> = get(row, "tokens")?;
    let window: Option<i64> = get(row, "context_window")?;
    Ok(Session {
        generation: get(row, "generation")?,
        last_seq: get(row, "last_seq")?,
        cutoff_seq: get(row, "cutoff_seq")?,
        cutoff_at: get(row, "cutoff_at")?,
        max_concurrent: get::<Option<i64>>(row, "max_concurrent")?.map(rows::small),
        usage: tokens.zip(window).map(|(tokens, window)| Usage {
            tokens: tokens.unsigned_abs(),
            context_window: window.unsigned_abs(),
        }),
    })
}
