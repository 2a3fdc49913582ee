//! Rows as values, and the numbers that stand for words.

use belfry_core::breaker::{State, TransitionReason};
use belfry_core::check::Status;
use belfry_core::{AgentId, Epoch, NodeId, Reason, RunId, RunState, ScheduleId, SkipRange, Token, Trigger};
use belfry_time::Timestamp;
use tokio_postgres::Row;
use tokio_postgres::types::{self, FromSql, Type};
use uuid::Uuid;

use super::connection::Fault;
use crate::Error;
use crate::sessions::{read_given, read_trigger};
use crate::shapes::*;
use crate::unknown::{self, Number};

/// The state of a live run that is running; 0 is ready, 1 parked.
const RUNNING: i16 = 2;

/// The columns of a live run, from `live l join queues q`.
macro_rules! live_columns {
    () => {
        "l.id, l.state, l.rank, l.not_before, l.schedule_id, l.tick_at, l.agent_id, l.command, \
         l.node_id, l.epoch, l.attempt, l.max_attempts, l.cancel_reason, l.trigger, l.session, l.trace_id, \
         l.created_at, l.started_at, l.exit_code, l.error, l.due_at, q.lane, l.rescue, \
         l.suspicions"
    };
}
pub(super) use live_columns;

/// A run that has not ended.
#[derive(Debug, Clone)]
pub(super) struct Live {
    pub(super) id: RunId,
    pub(super) state: i16,
    pub(super) not_before: Timestamp,
    pub(super) due_at: Timestamp,
    pub(super) schedule: ScheduleId,
    pub(super) tick_at: Option<Timestamp>,
    pub(super) agent: AgentId,
    pub(super) command: String,
    pub(super) node: Option<NodeId>,
    pub(super) epoch: Epoch,
    pub(super) attempt: i64,
    pub(super) max_attempts: i64,
    pub(super) cancel: Option<Reason>,
    pub(super) trigger: Trigger,
    pub(super) session: Option<String>,
    pub(super) trace_id: Option<Uuid>,
    pub(super) created_at: Timestamp,
    pub(super) started_at: Option<Timestamp>,
    pub(super) exit_code: Option<i32>,
    pub(super) error: Option<String>,
    pub(super) lane: String,
    pub(super) rescue: Option<i64>,
    pub(super) suspicions: u32,
}

impl Live {
    pub(super) fn read(row: &Row) -> Result<Live, Fault> {
        Ok(Live {
            id: RunId(get(row, "id")?),
            state: get(row, "state")?,
            not_before: get(row, "not_before")?,
            due_at: get(row, "due_at")?,
            schedule: get(row, "schedule_id")?,
            tick_at: get(row, "tick_at")?,
            agent: get(row, "agent_id")?,
            command: get(row, "command")?,
            node: get::<Option<Uuid>>(row, "node_id")?.map(NodeId),
            epoch: get(row, "epoch")?,
            attempt: get(row, "attempt")?,
            max_attempts: get(row, "max_attempts")?,
            cancel: get::<Option<i16>>(row, "cancel_reason")?.map(unknown::cancel_reason),
            trigger: read_trigger(get(row, "trigger")?).0,
            session: get(row, "session")?,
            trace_id: get(row, "trace_id")?,
            created_at: get(row, "created_at")?,
            started_at: get(row, "started_at")?,
            exit_code: get(row, "exit_code")?,
            error: get(row, "error")?,
            lane: get(row, "lane")?,
            rescue: get(row, "rescue")?,
            suspicions: u32::try_from(get::<i16>(row, "suspicions")?).unwrap_or(0),
        })
    }

    pub(super) fn is_running(&self) -> bool {
        self.state == RUNNING
    }

    /// As a record, with the names that its row has as well.
    pub(super) fn record(row: &Row) -> Result<RunRecord, Fault> {
        let live = Live::read(row)?;
        let (_, payload, unreadable) =
            read_given(get(row, "trigger")?, get::<&str>(row, "payload")?.as_bytes());
        let record = RunRecord {
            id: live.id,
            agent: live.agent,
            agent_name: get(row, "agent_name")?,
            schedule: live.schedule,
            name: get(row, "name")?,
            state: if live.is_running() { RunState::Running } else { RunState::Pending },
            command: live.command,
            trigger: live.trigger,
            tick_at: live.tick_at,
            due_at: live.due_at,
            not_before: live.not_before,
            reason: None,
            lane: live.lane,
            attempt: small(live.attempt),
            max_attempts: small(live.max_attempts),
            epoch: live.epoch,
            node: live.node,
            exit_code: live.exit_code,
            error: live.error,
            summary: None,
            usage: None,
            session: live.session,
            prompt: get(row, "prompt")?,
            payload,
            trace_id: live.trace_id,
            created_at: live.created_at,
            started_at: live.started_at,
            finished_at: None,
        };
        Ok(record.noting(unreadable))
    }
}

/// A run from history, with its names.
pub(super) fn ended(row: &Row) -> Result<RunRecord, Fault> {
    let not_before = get(row, "not_before")?;
    let (trigger, payload, mut unreadable) =
        read_given(get(row, "trigger")?, get::<&str>(row, "payload")?.as_bytes());
    let (state, reason) = unknown::ending(get(row, "state")?, get(row, "reason")?, &mut unreadable);
    let record = RunRecord {
        id: RunId(get(row, "id")?),
        agent: get(row, "agent_id")?,
        agent_name: get(row, "agent_name")?,
        schedule: get(row, "schedule_id")?,
        name: get(row, "name")?,
        command: get(row, "command")?,
        trigger,
        tick_at: get(row, "tick_at")?,
        due_at: get::<Option<Timestamp>>(row, "due_at")?.unwrap_or(not_before),
        not_before,
        state,
        reason,
        lane: get(row, "lane")?,
        attempt: small(get(row, "attempt")?),
        max_attempts: small(get(row, "max_attempts")?),
        epoch: get(row, "epoch")?,
        node: get::<Option<Uuid>>(row, "node_id")?.map(NodeId),
        exit_code: get(row, "exit_code")?,
        error: get(row, "error")?,
        summary: get(row, "summary")?,
        usage: unknown::usage(get(row, "usage")?),
        session: get(row, "session")?,
        prompt: get(row, "prompt")?,
        payload,
        trace_id: get(row, "trace_id")?,
        created_at: get(row, "created_at")?,
        started_at: get(row, "started_at")?,
        finished_at: get(row, "finished_at")?,
    };
    Ok(record.noting(unreadable))
}

pub(super) fn node(row: &Row) -> Result<Node, Fault> {
    Ok(Node {
        id: NodeId(get(row, "id")?),
        host: get(row, "host")?,
        pid: small(get(row, "pid")?),
        labels: get(row, "readable_labels")?,
        started_at: get(row, "started_at")?,
        lease_until: get(row, "lease_until")?,
        fenced: get(row, "fenced")?,
        draining: get(row, "draining")?,
        last_seen_at: get(row, "last_seen_at")?,
        max_concurrent: get::<Option<i64>>(row, "max_concurrent")?.map(small),
        process: NodeProcess {
            boot_id: get(row, "boot_id")?,
            pid_ns: get(row, "pid_ns")?,
            start_time: get::<i64>(row, "process_start")?.unsigned_abs(),
            state_dir: get(row, "state_dir")?,
            version: get(row, "version")?,
            lease_ms: get::<i64>(row, "lease_ms")?.unsigned_abs(),
        },
    })
}

/// The token in a row, where there is one.
pub(super) fn token(row: &Row) -> Result<Option<Token>, Fault> {
    let Some(kind) = get::<Option<i16>>(row, "kind")? else { return Ok(None) };
    let (kind, _) = unknown::timer_kind(kind);
    Ok(Some(Token { kind, tick_at: get(row, "token_tick_at")?, due_at: get(row, "due_at")? }))
}

/// The skips that are still being counted, from a row of `schedule_state`.
pub(super) fn open_skip(row: &Row) -> Result<Option<SkipRange>, Fault> {
    let Some(reason) = get::<Option<i16>>(row, "skip_reason")? else { return Ok(None) };
    let span = (get(row, "skip_from")?, get(row, "skip_to")?, get::<Option<i64>>(row, "skip_count")?);
    let (Some(from), Some(to), Some(count)) = span else { return Ok(None) };
    Ok(Some(SkipRange { reason: unknown::skip_reason(reason), from, to, count: Number::nearest(count) }))
}

pub(super) fn status(row: &Row) -> Result<Status, Fault> {
    let reason: Option<String> = get(row, "status_reason")?;
    Ok(match get::<i16>(row, "status")? {
        0 => Status::Active,
        1 => Status::Paused { reason, until: get(row, "status_until")? },
        2 => Status::Disabled,
        3 => Status::Invalid { reason: reason.unwrap_or_default() },
        4 => Status::Exhausted,
        other => unknown::status(other.into()),
    })
}

/// A status as its columns: number, reason, until.
pub(super) fn status_columns(status: &Status) -> (i16, Option<&str>, Option<Timestamp>) {
    match status {
        Status::Active => (0, None, None),
        Status::Paused { reason, until } => (1, reason.as_deref(), *until),
        Status::Disabled => (2, None, None),
        Status::Invalid { reason } => (3, Some(reason), None),
        Status::Exhausted => (4, None, None),
    }
}

pub(super) fn breaker_state(code: i16) -> Result<State, Fault> {
    [State::Closed, State::Open, State::HalfOpen]
        .into_iter()
        .find(|state| breaker_code(*state) == code)
        .ok_or_else(|| not_known("state of a breaker", code))
}

pub(super) fn breaker_code(state: State) -> i16 {
    match state {
        State::Closed => 0,
        State::Open => 1,
        State::HalfOpen => 2,
    }
}

const TRANSITIONS: [TransitionReason; 4] = [
    TransitionReason::FailureThreshold,
    TransitionReason::Success,
    TransitionReason::CooldownElapsed,
    TransitionReason::ManualReset,
];

pub(super) fn transition_reason(code: i16) -> Result<TransitionReason, Fault> {
    let found = usize::try_from(code).ok().and_then(|at| TRANSITIONS.get(at));
    found.copied().ok_or_else(|| not_known("reason of a breaker", code))
}

pub(super) fn transition_code(reason: TransitionReason) -> i16 {
    TRANSITIONS.iter().position(|known| *known == reason).map_or(0, |at| at as i16)
}

pub(super) fn run_state(code: i16) -> Result<RunState, Fault> {
    RunState::from_code(code).ok_or_else(|| not_known("state of a run", code))
}

fn not_known(what: &str, code: i16) -> Fault {
    Error::unexpected(format!("{what} {code} is not known")).into()
}

/// A column by its name.
pub(super) fn get<'a, T: Column<'a>>(row: &'a Row, column: &str) -> Result<T, Fault> {
    Ok(T::read(row.try_get(column)?))
}

/// What a column is read as. An instant that no [`Timestamp`] can hold is read as the nearest one that can.
pub(super) trait Column<'a>: Sized {
    /// What the database gives for it.
    type Stored: FromSql<'a>;

    fn read(stored: Self::Stored) -> Self;
}

macro_rules! as_stored {
    ($($kind:ty),+) => {
        $(impl<'a> Column<'a> for $kind {
            type Stored = $kind;

            fn read(stored: $kind) -> $kind {
                stored
            }
        })+
    };
}
as_stored!(
    bool,
    i16,
    i32,
    i64,
    String,
    Uuid,
    &'a str,
    &'a [u8],
    Vec<u8>,
    Vec<i16>,
    Vec<i32>,
    Vec<i64>,
    Vec<String>
);

impl<'a> Column<'a> for Timestamp {
    type Stored = Instant;

    fn read(stored: Instant) -> Timestamp {
        stored.0
    }
}

impl<'a, T: Column<'a>> Column<'a> for Option<T> {
    type Stored = Option<T::Stored>;

    fn read(stored: Self::Stored) -> Option<T> {
        stored.map(T::read)
    }
}

/// A stored instant, which may be infinite, or of a year that no [`Timestamp`] has.
pub(super) struct Instant(Timestamp);

impl FromSql<'_> for Instant {
    fn from_sql(kind: &Type, raw: &[u8]) -> Result<Instant, Box<dyn std::error::Error + Sync + Send>> {
        /// From 1970 to 2000, where the database begins to count.
        const BEFORE: i64 = 946_684_800_000_000;
        let micros = i64::from_sql(kind, raw)?;
        Ok(Instant(unknown::instant(micros.saturating_add(BEFORE))))
    }

    fn accepts(kind: &Type) -> bool {
        *kind == Type::TIMESTAMPTZ
    }
}

/// An instant as it is stored: before all others is what is stored as minus infinity.
pub(super) fn stored(at: Timestamp) -> types::Timestamp<Timestamp> {
    match at == unknown::EARLIEST {
        true => types::Timestamp::NegInfinity,
        false => types::Timestamp::Value(at),
    }
}

/// A count that was a `u32` when it was written.
pub(super) fn small(number: i64) -> u32 {
    Number::nearest(number)
}

/// A count as the database takes it.
pub(super) fn big(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// A column that often holds nothing: then it is empty, and each place of it is null all the same. To find a place in an array
/// with nulls takes the database as long as there are places before it.
pub(super) fn sparse<T>(column: Vec<Option<T>>) -> Vec<Option<T>> {
    if column.iter().all(Option::is_none) { Vec::new() } else { column }
}
