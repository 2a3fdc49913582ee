//! What people and programs are shown: the JSON of the HTTP API and of `-o json`, made from what a store keeps.
//!
//! Instants are RFC 3339, durations end in `_ms`, lists are [`List`]. Nothing is decided here.

pub use crate::about::About;
pub use crate::api_nodes::{Heartbeat, HeartbeatStatus, Node, NodeStatus, Snapshot};
pub use crate::api_sessions::{Lane, Session};

use belfry_core::check::Status;
use belfry_core::definition::When;
use belfry_core::plan::Standing;
use belfry_core::work::Action;
use belfry_core::{AgentDefinition, NodeId, RunId, RunState, ScheduleDefinition, Token, Trigger};
use belfry_store::{AgentRecord, BreakerEntry, BreakerRecord, Deferred, RunRecord, ScheduleRecord};
use belfry_time::{SignedDuration, Tick, Timestamp, Timing};
use serde::{Deserialize, Serialize};

pub use crate::why::Decision;

/// Part of a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct List<T> {
    /// In order.
    pub items: Vec<T>,
    /// Where the rest begins, if there may be more.
    pub next: Option<String>,
}

impl<T> List<T> {
    /// A list that is complete.
    pub fn whole(items: Vec<T>) -> List<T> {
        List { items, next: None }
    }
}

/// A schedule as it stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Schedule {
    /// Whose.
    pub agent: String,
    /// Its name under the agent.
    pub schedule: String,
    /// `every`, `cron`, `at`, `after`, `webhook`, `chat`.
    pub kind: String,
    /// What was written: `5m`, `0 9 * * 1-5`; none for webhook and chat.
    pub expression: Option<String>,
    /// The same in plain English.
    pub words: String,
    /// An IANA name.
    pub timezone: String,
    /// `active`, `paused`, `invalid`, `exhausted`.
    pub status: ScheduleStatus,
    /// Why it is paused, invalid or exhausted, or waits.
    pub reason: Option<String>,
    /// Since when it stands so.
    pub status_since: Timestamp,
    /// When its pause ends by itself.
    pub paused_until: Option<Timestamp>,
    /// When it goes on, where its last tick lies ahead of a clock that was set back.
    pub clock_back: Option<Timestamp>,
    /// Its next tick; none while nothing arms it, or while it waits for its run to end.
    pub next: Option<NextTick>,
    /// The run that ended last.
    pub last: Option<Last>,
    /// The last tick that made a run or was skipped.
    pub last_fired_at: Option<Timestamp>,
    /// When a run of it succeeded last.
    pub last_success_at: Option<Timestamp>,
    /// Which.
    pub last_success_run: Option<RunId>,
    /// What went wrong last; cleared by success.
    pub last_error: Option<String>,
    /// When the earliest of its runs that failed and wait may start again.
    pub next_retry_at: Option<Timestamp>,
    /// What is used of its agent's failure budget.
    pub budget: Option<Budget>,
    /// Its runs that are running.
    pub running: u32,
    /// Its runs that wait.
    pub pending: u32,
    /// Runs in a row that ended alike: successes above zero, failures below.
    pub streak: i64,
    /// The pool its runs take a slot from.
    pub lane: String,
    /// Where it came from: `files`, `api`.
    pub origin: String,
    /// Grows with each edit of its timing.
    pub revision: i64,
}

/// Where a schedule stands as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ScheduleStatus {
    /// It ticks, or runs on request.
    Active,
    /// A person or its file paused it.
    Paused,
    /// Its definition is wrong.
    Invalid,
    /// It has fired for the last time.
    Exhausted,
}

impl ScheduleStatus {
    /// As it stands in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            ScheduleStatus::Active => "active",
            ScheduleStatus::Paused => "paused",
            ScheduleStatus::Invalid => "invalid",
            ScheduleStatus::Exhausted => "exhausted",
        }
    }
}

/// A tick to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NextTick {
    /// The nominal instant.
    pub tick_at: Timestamp,
    /// With jitter.
    pub due_at: Timestamp,
}

impl From<Tick> for NextTick {
    fn from(tick: Tick) -> NextTick {
        NextTick { tick_at: tick.tick_at, due_at: tick.due_at }
    }
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Last {
    /// Which.
    pub run_id: RunId,
    /// How.
    pub state: RunState,
    /// Its tick.
    pub tick_at: Option<Timestamp>,
    /// When.
    pub finished_at: Timestamp,
}

/// What is used of a failure budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Budget {
    /// The first failure since the last clear.
    pub period_start: Timestamp,
    /// Failed attempts since then.
    pub failures: u32,
    /// How many there may be.
    pub max: u32,
    /// When the period ends.
    pub resets_at: Timestamp,
}

impl Budget {
    fn of(used: belfry_core::budget::Budget, agent: &AgentDefinition, now: Timestamp) -> Option<Budget> {
        let policy = agent.budget.filter(|policy| belfry_core::budget::lasts(&used, policy, now))?;
        let resets_at = belfry_core::budget::end(&used, &policy);
        Some(Budget { period_start: used.period_start, failures: used.failures, max: policy.max, resets_at })
    }
}

impl Schedule {
    /// A schedule of an agent, at an instant.
    pub fn of(record: &ScheduleRecord, agent: &AgentDefinition, now: Timestamp) -> Schedule {
        let definition = &record.definition;
        let clock_back = crate::clock_back(record, now);
        let never_fired = crate::standing::never_fired_words(record);
        let (status, reason, paused_until) = match &record.status {
            Status::Active => {
                let reason = clock_back
                    .map(|at| format!("waiting(clock_back): the clock was set back, it goes on at {at}"));
                (ScheduleStatus::Active, reason.or(record.deferred.as_ref().map(lane_full)), None)
            }
            Status::Paused { reason, until } => (ScheduleStatus::Paused, reason.clone(), *until),
            Status::Disabled => (ScheduleStatus::Paused, Some("enabled is false".into()), None),
            Status::Invalid { reason } => (ScheduleStatus::Invalid, Some(reason.clone()), None),
            Status::Exhausted => (ScheduleStatus::Exhausted, never_fired, None),
        };
        let (kind, expression) = kind_of(definition);
        Schedule {
            agent: record.agent_name.clone(),
            schedule: schedule_name(&record.name).to_owned(),
            kind: kind.into(),
            expression,
            words: words_of(&record.name, definition),
            timezone: definition.options.timezone.clone().unwrap_or_else(|| "UTC".into()),
            status,
            reason,
            status_since: record.status_since,
            paused_until,
            clock_back,
            next: upcoming(record, 1).first().copied().map(NextTick::from),
            last: record.last.map(|last| Last {
                run_id: last.run,
                state: last.state,
                tick_at: last.tick_at,
                finished_at: last.finished_at,
            }),
            last_fired_at: record.last_fired_at,
            last_success_at: record.last_success.map(|(at, _)| at),
            last_success_run: record.last_success.map(|(_, run)| run),
            last_error: record.last_error.clone(),
            next_retry_at: record.next_retry_at,
            budget: record.budget.and_then(|used| Budget::of(used, agent, now)),
            running: record.running,
            pending: record.pending,
            streak: record.streak,
            lane: definition.lane(agent).to_owned(),
            origin: record.source.clone(),
            revision: record.revision,
        }
    }

    /// `agent/schedule`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.agent, self.schedule)
    }
}

/// Why a one-shot never runs.
pub(crate) const EXPIRED: &str = "its time had passed when it was first seen";

/// Why a schedule does not run whose tick is due.
fn lane_full(deferred: &Deferred) -> String {
    format!("the lane {} is full, deferred since {}", deferred.lane, deferred.since)
}

/// The next ticks of a schedule as the planner will find them, at most `count`. None where nothing arms it, or where the
/// next one counts from the end of a run that lives. Where ticks count from the ends of runs, those behind the first are the
/// earliest that are possible.
pub fn upcoming(record: &ScheduleRecord, count: usize) -> Vec<Tick> {
    let deferred = record.deferred.as_ref().map(|it| Token::deferred(it.tick_at, it.since));
    let Some(token) = record.token.or(deferred) else { return Vec::new() };
    let Ok(Some(timing)) = record.definition.timing(&record.name) else { return Vec::new() };
    let standing = Standing {
        token,
        origin: record.origin,
        open_skip: None,
        cursor_at: record.cursor_at,
        waits: record.waits_for.is_some(),
    };
    belfry_core::plan::upcoming(&timing, &standing).take(count).collect()
}

/// A schedule's timing with its first tick, where that is known; none where it does not tick or cannot be read.
pub fn timing_of(record: &ScheduleRecord) -> Option<Timing> {
    let timing = record.definition.timing(&record.name).ok().flatten()?;
    Some(match record.origin {
        Some(origin) => timing.with_origin(origin),
        None => timing,
    })
}

fn kind_of(definition: &ScheduleDefinition) -> (&'static str, Option<String>) {
    match &definition.when {
        When::Every(text) => ("every", Some(text.clone())),
        When::Cron(text) => ("cron", Some(text.clone())),
        When::At(text) => ("at", Some(text.clone())),
        When::After(text) => ("after", Some(text.clone())),
        When::Webhook(_) => ("webhook", None),
        When::Chat(_) => ("chat", None),
    }
}

fn words_of(name: &str, definition: &ScheduleDefinition) -> String {
    match (definition.timing(name), &definition.when) {
        (Ok(Some(timing)), _) => timing.describe(),
        (Ok(None), When::Chat(_)) => "on each message".into(),
        (Ok(None), _) => "on each request".into(),
        (Err(_), _) => "never: it cannot be read".into(),
    }
}

/// The part of `agent/schedule` behind the agent.
fn schedule_name(name: &str) -> &str {
    name.split_once('/').map_or(name, |(_, schedule)| schedule)
}

fn later(at: Timestamp, ms: u64) -> Timestamp {
    let time = SignedDuration::from_millis(i64::try_from(ms).unwrap_or(i64::MAX));
    at.saturating_add(time).unwrap_or(Timestamp::MAX)
}

/// A run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Run {
    /// Which.
    pub id: RunId,
    /// Whose.
    pub agent: String,
    /// Of which schedule.
    pub schedule: String,
    /// Which command.
    pub command: String,
    /// What made it.
    pub trigger: Trigger,
    /// The tick that made it.
    pub tick_at: Option<Timestamp>,
    /// When its first attempt was to start.
    pub due_at: Timestamp,
    /// When its next attempt may start, or the last one might.
    pub not_before: Timestamp,
    /// Where it is.
    pub state: RunState,
    /// Why it ended so.
    pub reason: Option<String>,
    /// Its lane.
    pub lane: String,
    /// Its session.
    pub session: Option<String>,
    /// How often it was started.
    pub attempt: u32,
    /// How often it may be.
    pub max_attempts: u32,
    /// Where it runs or ran.
    pub node: Option<NodeId>,
    /// The process's exit code.
    pub exit_code: Option<i32>,
    /// What went wrong last.
    pub error: Option<String>,
    /// What it reported.
    pub summary: Option<String>,
    /// What its last attempt says that it used: `tokens`, `context_window`, `cost_usd`.
    pub usage: Option<serde_json::Value>,
    /// Its trace: that of who asked for it, or its own.
    pub trace_id: String,
    /// When it was made.
    pub created_at: Timestamp,
    /// When its last attempt started.
    pub started_at: Option<Timestamp>,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
    /// How long its last attempt took; unknown if the clock was set back meanwhile.
    pub took_ms: Option<u64>,
    /// While it runs: when its node was heard of last.
    pub heartbeat: Option<Heartbeat>,
}

impl Run {
    /// A run from a store.
    pub fn of(record: &RunRecord) -> Run {
        let took = record.started_at.zip(record.finished_at);
        let took = took.and_then(|(from, to)| u64::try_from(to.duration_since(from).as_millis()).ok());
        Run {
            id: record.id,
            agent: record.agent_name.clone(),
            schedule: schedule_name(&record.name).to_owned(),
            command: record.command.clone(),
            trigger: record.trigger,
            tick_at: record.tick_at,
            due_at: record.due_at,
            not_before: record.not_before,
            state: record.state,
            reason: record.reason.map(|reason| reason.as_str().to_owned()),
            lane: record.lane.clone(),
            session: record.session().map(str::to_owned),
            attempt: record.attempt,
            max_attempts: record.max_attempts,
            node: record.node,
            exit_code: record.exit_code,
            error: record.error.clone(),
            summary: record.summary.clone(),
            usage: record.usage.and_then(|usage| serde_json::to_value(usage).ok()),
            trace_id: record.id.trace(record.trace_id).simple().to_string(),
            created_at: record.created_at,
            started_at: record.started_at,
            finished_at: record.finished_at,
            took_ms: took,
            heartbeat: None,
        }
    }

    /// `agent/schedule`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.agent, self.schedule)
    }
}

/// Why a schedule runs or does not, at an instant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Why {
    /// The agent.
    pub agent: String,
    /// Its schedule.
    pub schedule: String,
    /// The instant: the tick, where one was found.
    pub at: Timestamp,
    /// What became of it.
    pub decision: Decision,
    /// The first check that is not ok, or why the tick made no run, or what its run waits for.
    pub reason: Option<String>,
    /// The run it made, or that lives.
    pub run_id: Option<RunId>,
    /// The tick before an instant that is none.
    pub tick_before: Option<Timestamp>,
    /// The tick after it.
    pub tick_after: Option<Timestamp>,
    /// Every check that was taken, in order.
    pub checks: Vec<Check>,
    /// In a sentence or two.
    pub words: String,
}

/// One check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Check {
    /// The reason it would give.
    pub check: String,
    /// Whether it passed.
    pub ok: bool,
    /// In words.
    pub detail: String,
}

impl From<belfry_core::check::Check> for Check {
    fn from(check: belfry_core::check::Check) -> Check {
        Check { check: check.check.into(), ok: check.ok, detail: check.detail }
    }
}

/// The breaker of an agent's command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Breaker {
    /// Whose.
    pub agent: String,
    /// Of which command.
    pub command: String,
    /// Where it stands.
    pub state: belfry_core::breaker::State,
    /// Consecutive failed runs.
    pub failures: u32,
    /// How many open it; none where the agent has no breaker any more.
    pub threshold: Option<u32>,
    /// When it opened last.
    pub opened_at: Option<Timestamp>,
    /// When it lets a probe through.
    pub probe_at: Option<Timestamp>,
    /// How it came there, oldest first.
    pub history: Vec<Transition>,
}

/// A change of a breaker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Transition {
    /// When.
    pub at: Timestamp,
    /// Before.
    pub from: belfry_core::breaker::State,
    /// After.
    pub to: belfry_core::breaker::State,
    /// Consecutive failures at that moment.
    pub failures: u32,
    /// Why.
    pub reason: belfry_core::breaker::TransitionReason,
    /// The run that did it.
    pub run_id: Option<RunId>,
}

impl Breaker {
    /// A breaker of an agent, with its history.
    pub fn of(entry: &BreakerEntry, record: &BreakerRecord, agent: Option<&AgentDefinition>) -> Breaker {
        let policy = agent.and_then(|agent| agent.breaker);
        let breaker = &record.breaker;
        let is_open = breaker.state == belfry_core::breaker::State::Open;
        let opened = breaker.opened_at.filter(|_| is_open);
        Breaker {
            agent: entry.agent_name.clone(),
            command: entry.command.clone(),
            state: breaker.state,
            failures: breaker.failures,
            threshold: policy.map(|policy| policy.threshold),
            opened_at: breaker.opened_at,
            probe_at: opened.zip(policy).map(|(at, policy)| later(at, policy.reset_after_ms)),
            history: record
                .history
                .iter()
                .map(|change| Transition {
                    at: change.at,
                    from: change.from,
                    to: change.to,
                    failures: change.failures,
                    reason: change.reason,
                    run_id: change.run,
                })
                .collect(),
        }
    }
}

/// An agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Agent {
    /// Its name.
    pub agent: String,
    /// What its attempts are: `run`, `shell`, `handler`.
    pub kind: String,
    /// How many of its runs may run at once.
    pub max_concurrent: Option<u32>,
    /// How often an attempt may follow the first.
    pub retries_max: u32,
    /// The pool its runs take a slot from.
    pub lane: String,
    /// Labels that a node must have.
    pub needs: Vec<String>,
    /// What is used of its failure budget.
    pub budget: Option<Budget>,
    /// Where it came from.
    pub origin: String,
    /// Grows with each edit.
    pub revision: i64,
}

impl Agent {
    /// An agent from a store, at an instant.
    pub fn of(record: &AgentRecord, now: Timestamp) -> Agent {
        let definition = &record.definition;
        let kind = match definition.work.action {
            Action::Run(_) => "run",
            Action::Shell(_) => "shell",
            Action::Handler => "handler",
        };
        Agent {
            agent: record.name.clone(),
            kind: kind.into(),
            max_concurrent: definition.max_concurrent,
            retries_max: definition.retry.max,
            lane: definition.lane.clone(),
            needs: definition.needs.clone(),
            budget: record.budget.and_then(|used| Budget::of(used, definition, now)),
            origin: record.source.clone(),
            revision: record.revision,
        }
    }
}
