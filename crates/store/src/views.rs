//! What goes into the verbs that people and the engine read and edit with, and what comes out.

use std::sync::Arc;

use belfry_core::breaker::Breaker;
use belfry_core::budget::Budget;
use belfry_core::check::Status;
use belfry_core::{
    AgentDefinition, AgentId, Epoch, RunId, RunState, Schedule, ScheduleDefinition, ScheduleId, SkipRange,
    SkipReason, edit,
};
use belfry_time::{SignedDuration, Timestamp};
use uuid::Uuid;

use crate::memory::Compiled;
use crate::shapes::{RunRecord, ScheduleRecord};

/// The source of what was made through the API or the command line. Files never touch it, nor it what files own.
pub const API: &str = "api";

/// What it takes to start a run of a schedule, and to arm the schedule at its end.
#[derive(Debug, Clone)]
pub struct Definitions {
    /// Which.
    pub schedule: ScheduleId,
    /// Whose.
    pub agent: AgentId,
    /// `agent/schedule`.
    pub name: Arc<str>,
    /// The agent's name.
    pub agent_name: Arc<str>,
    /// Changes with each edit of the agent.
    pub agent_revision: i64,
    /// What the agent is, now.
    pub agent_definition: Arc<AgentDefinition>,
    /// What the schedule is, or why it cannot be read.
    pub compiled: Result<Arc<Schedule>, Arc<str>>,
    /// Its definition, where that can be read but does not compile.
    pub uncompiled: Option<Arc<ScheduleDefinition>>,
    /// Its first tick.
    pub origin: Option<Timestamp>,
    /// No tick at or before this instant is armed.
    pub cursor_at: Option<Timestamp>,
    /// The run whose end arms it.
    pub waits_for: Option<RunId>,
    /// When its last run that completed ended.
    pub last_success_at: Option<Timestamp>,
    /// Why this version cannot read the schedule or its agent; then `agent_definition` and `compiled` say nothing.
    pub unreadable: Option<Arc<str>>,
}

impl Definitions {
    /// The schedule's definition, also of one that does not compile: its runs that wait are started all the same.
    pub fn definition(&self) -> Option<&Arc<ScheduleDefinition>> {
        match &self.compiled {
            Ok(schedule) => Some(&schedule.definition),
            Err(_) => self.uncompiled.as_ref(),
        }
    }
}

/// A schedule that this version cannot read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnreadableSchedule {
    /// Which.
    pub schedule: ScheduleId,
    /// `agent/schedule`.
    pub name: String,
    /// Why, for people.
    pub why: Arc<str>,
}

/// What became of a schedule that was put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Put {
    /// It is new.
    Added(ScheduleId),
    /// Its definition changed.
    Changed(ScheduleId),
    /// It was so already.
    Unchanged(ScheduleId),
    /// It was removed after its run, as its definition asks, and that definition is the same.
    Spent,
    /// There is no such agent.
    NoAgent,
    /// It belongs to this source, which alone may change it.
    OwnedBy(String),
    /// It is not what was expected, and stays as it is.
    Differs,
}

/// What a schedule or an agent must be for an edit to be made: what the edit was decided on.
#[derive(Debug, Clone, PartialEq)]
pub enum Expect<D = ScheduleDefinition> {
    /// Anything, or nothing.
    Any,
    /// There is none of its name.
    Absent,
    /// It is this.
    Same {
        /// In this revision.
        revision: i64,
        /// With this definition.
        definition: Box<D>,
    },
}

impl Expect {
    /// That a schedule is as it was read.
    pub fn same(record: &ScheduleRecord) -> Expect {
        Expect::Same { revision: record.revision, definition: Box::new(record.definition.clone()) }
    }
}

impl Expect<AgentDefinition> {
    /// That an agent is as it was read.
    pub fn same_agent(record: &AgentRecord) -> Expect<AgentDefinition> {
        Expect::Same { revision: record.revision, definition: Box::new(record.definition.clone()) }
    }
}

impl<D: PartialEq> Expect<D> {
    /// Whether it is so, given what there is.
    pub(crate) fn holds(&self, found: Option<(i64, &D)>) -> bool {
        match (self, found) {
            (Expect::Any, _) | (Expect::Absent, None) => true,
            (Expect::Same { revision, definition }, Some((found_revision, found))) => {
                *revision == found_revision && **definition == *found
            }
            _ => false,
        }
    }
}

impl Put {
    /// Whether something was changed.
    pub fn is_news(&self) -> bool {
        matches!(self, Put::Added(_) | Put::Changed(_))
    }
}

/// What became of an agent that was put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PutAgent {
    /// It is new.
    Added,
    /// It changed, or its schedules did.
    Changed {
        /// Runs of schedules that are gone: they were waiting, and have ended.
        ended: Vec<RunId>,
    },
    /// It was so already.
    Unchanged,
    /// It belongs to this source, which alone may change it.
    OwnedBy(String),
    /// It is not what was expected, and stays.
    Differs,
}

impl PutAgent {
    pub(crate) fn is_news(&self) -> bool {
        matches!(self, PutAgent::Added | PutAgent::Changed { .. })
    }

    /// By whether it was there before, whether anything is different now, and which runs have ended.
    pub(crate) fn of(was_there: bool, is_changed: bool, ended: Vec<RunId>) -> PutAgent {
        match (was_there, is_changed) {
            (false, _) => PutAgent::Added,
            (true, true) => PutAgent::Changed { ended },
            (true, false) => PutAgent::Unchanged,
        }
    }
}

/// What became of a schedule or an agent that was to be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Removed {
    /// It is gone.
    Gone {
        /// Runs of it that were waiting, and have ended.
        ended: Vec<RunId>,
    },
    /// It belongs to this source, which alone may remove it.
    OwnedBy(String),
    /// It is not what was expected, and stays.
    Differs,
    /// There is none such.
    NotFound,
}

/// What a store was to keep and refuses in every form, or cannot write because of locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusedPart {
    /// A plan of this schedule.
    Plan(ScheduleId),
    /// A plan of this schedule. Another transaction holds its rows.
    LockedPlan(ScheduleId),
    /// The end of an attempt of this run.
    End(RunId),
}

/// A plan or an end that the store refuses in every form, or cannot write because of locks. It is tried again every 30
/// seconds, or every few seconds if it is locked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The schedule.
    pub schedule: ScheduleId,
    /// Its name, `agent/schedule`.
    pub name: String,
    /// The run whose end is refused; none if it is a plan.
    pub run: Option<RunId>,
    /// Since when.
    pub since: Timestamp,
    /// What the database said.
    pub reason: String,
}

impl Refusal {
    /// What it means, and what helps.
    pub fn words(&self) -> String {
        let Refusal { since, reason, .. } = self;
        match self.run {
            None => format!(
                "since {since} the store refuses its plans, so no tick of it makes a run: {reason}. It is tried again every \
                 30 s; mend what the database names, or `belfry pause` the schedule"
            ),
            Some(_) => format!(
                "since {since} the store refuses the end of this run, which is over and counts as running: {reason}. It is \
                 tried again every 30 s; mend what the database names"
            ),
        }
    }
}

/// How long a refusal is told of after it was seen last; one that lasts is seen every 30 seconds.
pub(crate) const REFUSAL_LASTS: SignedDuration = SignedDuration::from_mins(10);

/// What a node tells those who listen elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Telling {
    /// Who.
    pub teller: Uuid,
    /// Which of its tellings, from one on.
    pub seq: i64,
    /// Events that were too many since the one before.
    pub lost: u64,
    /// Events, each as JSON.
    pub lines: Vec<String>,
}

/// Where a piece of output came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
    /// Belfry's own words: what was cut, how it ended.
    Note,
}

impl Stream {
    pub(crate) fn code(self) -> i16 {
        match self {
            Stream::Out => 0,
            Stream::Err => 1,
            Stream::Note => 2,
        }
    }

    pub(crate) fn from_code(code: i16) -> Stream {
        match code {
            0 => Stream::Out,
            1 => Stream::Err,
            _ => Stream::Note,
        }
    }
}

/// A piece of a run's output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputChunk {
    /// Its place. Grows over all attempts of a run; those of one claim begin at [`OutputChunk::first_seq`].
    pub seq: u64,
    /// Which attempt wrote it, from 1.
    pub attempt: u32,
    /// Where it came from.
    pub stream: Stream,
    /// What was written.
    pub bytes: Vec<u8>,
}

impl OutputChunk {
    /// The place of the first piece of a claim: after all pieces of the claims before it.
    pub fn first_seq(epoch: Epoch) -> u64 {
        u64::from(epoch.max(0).unsigned_abs()) << 32
    }
}

/// More pieces of output than this are not given at once.
pub(crate) const OUTPUT_CHUNKS_MAX: usize = 1024;

/// Part of a list.
#[derive(Debug, Clone, PartialEq)]
pub struct Page<T, C> {
    /// In order. A page may hold fewer than were asked for, even none, where others follow.
    pub items: Vec<T>,
    /// Where the next page begins, if there may be one.
    pub next: Option<C>,
}

impl<T> Page<(i64, T), i64> {
    /// Of numbered rows that were read one beyond the limit.
    pub(crate) fn of_numbered(mut items: Vec<(i64, T)>, limit: u32) -> Page<(i64, T), i64> {
        let more = items.len() > limit as usize;
        items.truncate(limit as usize);
        let next = items.last().map(|(number, _)| *number).filter(|_| more);
        Page { items, next }
    }
}

impl Page<(i64, String), i64> {
    /// The page without what cannot be read.
    pub(crate) fn read<T: serde::de::DeserializeOwned>(self) -> Page<(i64, T), i64> {
        let read = |(number, text): (i64, String)| Some((number, serde_json::from_str(&text).ok()?));
        Page { items: self.items.into_iter().filter_map(read).collect(), next: self.next }
    }
}

/// Which schedules to list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ScheduleFilter {
    /// Those of this agent.
    pub agent: Option<String>,
    /// Those that stand like one of these; all where it is empty.
    pub status: Vec<StatusKind>,
    /// Those of this source.
    pub source: Option<String>,
}

impl ScheduleFilter {
    pub(crate) fn takes(&self, record: &ScheduleRecord) -> bool {
        let status = StatusKind::of(&record.status);
        self.agent.as_ref().is_none_or(|agent| *agent == record.agent_name)
            && (self.status.is_empty() || self.status.contains(&status))
            && self.source.as_ref().is_none_or(|source| *source == record.source)
    }

    /// The statuses as bits.
    pub(crate) fn mask(&self) -> i64 {
        if self.status.is_empty() {
            -1
        } else {
            self.status.iter().fold(0, |mask, kind| mask | 1 << *kind as i64)
        }
    }
}

/// Where a schedule stands, without the details. The number is that in storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusKind {
    /// It ticks.
    Active = 0,
    /// A person paused it.
    Paused = 1,
    /// `enabled: false`.
    Disabled = 2,
    /// Its definition is wrong.
    Invalid = 3,
    /// It has fired for the last time.
    Exhausted = 4,
}

impl StatusKind {
    /// The kind of a status.
    pub fn of(status: &Status) -> StatusKind {
        match status {
            Status::Active => StatusKind::Active,
            Status::Paused { .. } => StatusKind::Paused,
            Status::Disabled => StatusKind::Disabled,
            Status::Invalid { .. } => StatusKind::Invalid,
            Status::Exhausted => StatusKind::Exhausted,
        }
    }
}

/// Which runs to list. Names are also those of agents and schedules that are gone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RunFilter {
    /// Those of this agent.
    pub agent: Option<String>,
    /// Those of this schedule, `agent/schedule`.
    pub schedule: Option<String>,
    /// Those in one of these states; all where it is empty.
    pub states: Vec<RunState>,
    /// Those in this lane.
    pub lane: Option<String>,
    /// Those of a session with this key.
    pub session: Option<String>,
    /// Those that were made then or later.
    pub since: Option<Timestamp>,
}

/// Rows of live runs and of history that one page of runs looks at.
pub(crate) const RUNS_SCANNED_MAX: i64 = 5_000;
/// Ended runs of one schedule that a list of its runs looks at; more are not kept by default.
pub(crate) const CHAIN_MAX: i64 = 10_000;
/// Ids begin with the clock of whoever made them; clocks differ by less than this.
const CLOCKS_DIFFER_MAX: SignedDuration = SignedDuration::from_hours(1);

impl RunFilter {
    pub(crate) fn takes(&self, run: &RunRecord) -> bool {
        self.agent.as_ref().is_none_or(|agent| *agent == run.agent_name)
            && self.schedule.as_ref().is_none_or(|schedule| *schedule == run.name)
            && (self.states.is_empty() || self.states.contains(&run.state))
            && self.lane.as_ref().is_none_or(|lane| *lane == run.lane)
            && self.session.as_ref().is_none_or(|session| run.session() == Some(session))
            && self.since.is_none_or(|since| run.created_at >= since)
    }

    /// The states as bits.
    pub(crate) fn mask(&self) -> i64 {
        if self.states.is_empty() {
            -1
        } else {
            self.states.iter().fold(0, |mask, state| mask | 1 << state.code())
        }
    }

    pub(crate) fn wants_live(&self) -> bool {
        self.states.is_empty() || self.states.iter().any(|state| state.is_live())
    }

    pub(crate) fn wants_ended(&self) -> bool {
        self.states.is_empty() || self.states.iter().any(|state| !state.is_live())
    }

    /// Whether all that was made before an instant is out of the question.
    fn ends_at(&self, created_at: Timestamp) -> bool {
        self.since
            .is_some_and(|since| created_at.saturating_add(CLOCKS_DIFFER_MAX).is_ok_and(|at| at < since))
    }
}

/// The last row that was looked at where there may be more: its id, and when it was made.
pub(crate) type Scanned = Option<(RunId, Timestamp)>;

impl Page<RunRecord, RunId> {
    /// Merges what was found among live and ended runs, each looked at down to its last row.
    pub(crate) fn of_runs(
        filter: &RunFilter,
        live: (Vec<RunRecord>, Scanned),
        ended: (Vec<RunRecord>, Scanned),
        limit: u32,
    ) -> Page<RunRecord, RunId> {
        let cutoff = live.1.max(ended.1);
        // A run that ended between the two looks is there twice; the end counts.
        let mut items = ended.0;
        items.extend(live.0);
        items.retain(|run| cutoff.is_none_or(|(cutoff, _)| run.id >= cutoff));
        items.sort_by_key(|run| std::cmp::Reverse(run.id));
        items.dedup_by_key(|run| run.id);
        items.truncate(limit as usize);
        let next = match items.last() {
            Some(last) if items.len() == limit as usize => Some(last.id),
            _ => cutoff.filter(|(_, created_at)| !filter.ends_at(*created_at)).map(|(id, _)| id),
        };
        Page { items, next }
    }
}

/// An agent as it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentRecord {
    /// Which.
    pub id: AgentId,
    /// Its name.
    pub name: String,
    /// Where it came from.
    pub source: String,
    /// Changes with each edit.
    pub revision: i64,
    /// What it is.
    pub definition: AgentDefinition,
    /// Why this version cannot read it; then `definition` says nothing.
    pub unreadable: Option<String>,
    /// What is used of its failure budget.
    pub budget: Option<Budget>,
}

/// A breaker that is not as new.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BreakerEntry {
    /// Whose.
    pub agent: AgentId,
    /// The agent's name.
    pub agent_name: String,
    /// Of which command.
    pub command: String,
    /// Where it stands.
    pub breaker: Breaker,
}

/// What became of a tick, as far as it is still known.
#[derive(Debug, Clone, PartialEq)]
pub enum TickFate {
    /// It made this run.
    Run(Box<RunRecord>),
    /// It was skipped or missed with others, and the range is complete.
    Skipped(SkipRange),
    /// It was skipped with others, and the range is still being counted; also a pause that lasts.
    Open(SkipRange),
    /// Not planned yet, no tick at all, or too long ago.
    Unknown,
}

/// Ranges of skips before an instant that are looked at for it; they hardly ever overlap.
pub(crate) const RANGES_MAX: i64 = 16;

impl TickFate {
    /// What a schedule's own state says of a tick that made no run: is it among those that are still being counted, or in a
    /// span without planning that lasts?
    pub(crate) fn of_state(found: &edit::Found, compiled: &Compiled, tick_at: Timestamp) -> TickFate {
        if let Some(open) = found.open_skip.filter(|open| open.from <= tick_at && tick_at <= open.to) {
            return TickFate::Open(open);
        }
        let span = match (&found.status, compiled) {
            // Ticks of a definition that cannot be used are not known.
            (Status::Invalid { .. }, Err(_)) if found.cursor_at.unwrap_or(found.since) < tick_at => {
                Some(SkipRange { from: found.since, ..SkipRange::one(SkipReason::Invalid, tick_at) })
            }
            _ => edit::unarmed(found, crate::memory::compiled(compiled), tick_at),
        };
        span.filter(|span| tick_at <= span.to).map_or(TickFate::Unknown, TickFate::Open)
    }
}
