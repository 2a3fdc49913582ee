//! What happened, for logs and for whoever listens. The names are stable.

use belfry_core::breaker::{State, Transition};
use belfry_core::session::RunUsage;
use belfry_core::{NodeId, RunId, RunState};
use belfry_store::RunRecord;
use belfry_time::Timestamp;
use serde::Serialize;

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Event {
    /// When, by the store's clock.
    pub timestamp: Timestamp,
    /// How loud it is.
    pub level: Level,
    /// What.
    pub event: Name,
    /// The agent it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// The schedule it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<String>,
    /// The command it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// The session it is about, by its key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// The tick it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tick_at: Option<Timestamp>,
    /// The run it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_id: Option<RunId>,
    /// Which attempt of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// The node it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// The trace of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
    /// The state that was reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<&'static str>,
    /// Why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How many ticks or runs it is about, where that is not one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// How long it took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub took_ms: Option<u64>,
    /// How late it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lag_ms: Option<u64>,
    /// When it is tried again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_at: Option<Timestamp>,
    /// What is said to the session's other end; empty where nothing will come, so that it need not wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outbound: Option<String>,
    /// What the attempt says that it used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<RunUsage>,
    /// More, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// How loud an event is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Something is wrong.
    Error,
    /// Something may be wrong.
    Warn,
    /// A change of state.
    Info,
    /// A detail.
    Debug,
}

/// The stable names of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Name {
    /// A node has joined.
    NodeStarted,
    /// A node has left.
    NodeStopped,
    /// A node takes no new work, or takes it again.
    NodeDraining,
    /// A node was found gone; its runs were rescued.
    NodeFenced,
    /// A node that was taken for gone has joined again, under a new id.
    NodeRejoined,
    /// The keeper of a node was gone, and another was started.
    KeeperRestarted,
    /// The wall clock was set forward or back.
    ClockStepped,
    /// Definitions were read and applied.
    ConfigLoaded,
    /// Definitions were wrong, and changed nothing.
    ConfigRejected,
    /// The files of a node differ from what the cluster runs from, and were not applied.
    ConfigSkew,
    /// A tick made a run.
    TickPlanned,
    /// A tick waits because its lane is full.
    TickDeferred,
    /// A tick made none, for a reason.
    TickSkipped,
    /// Ticks went by in downtime.
    TickMissed,
    /// A run was made.
    RunCreated,
    /// An attempt has started.
    RunStarted,
    /// The program of an attempt has not started, because the system is short of something. It is tried again.
    RunDelayed,
    /// A run has ended.
    RunFinished,
    /// A run waits for its next attempt.
    RunRetried,
    /// A run was cancelled.
    RunCancelled,
    /// A run was taken from a node that is gone.
    RunRescued,
    /// A node gave a run back that it had claimed and not started.
    RunReturned,
    /// A breaker opened, closed, or lets a probe through.
    BreakerChanged,
    /// A failure budget was used up or cleared.
    BudgetChanged,
    /// A lane has other limits.
    LaneChanged,
    /// A session was stopped.
    SessionStopped,
    /// A session was reset.
    SessionReset,
    /// An agent was made, not by a file.
    AgentCreated,
    /// An agent was changed, not by a file.
    AgentUpdated,
    /// An agent was removed, not by a file.
    AgentDeleted,
    /// A schedule was made, not by a file.
    ScheduleCreated,
    /// A schedule was changed, not by a file.
    ScheduleUpdated,
    /// A schedule was removed, not by a file.
    ScheduleDeleted,
    /// A schedule was paused.
    SchedulePaused,
    /// A pause was ended.
    ScheduleResumed,
    /// This version cannot read a schedule or its agent; this node leaves it alone.
    ScheduleUnreadable,
    /// A part of a stored row cannot be read, and counts as something that does no harm.
    RowUnreadable,
    /// The store refuses to keep a plan, an end or another write for what it is; everything else goes on.
    WriteRefused,
    /// The store does not answer; work that runs goes on.
    StoreUnavailable,
    /// It answers again.
    StoreAvailable,
}

/// What a transition is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Of {
    /// A tick of a schedule.
    Tick,
    /// A run.
    Run,
    /// A breaker.
    Breaker,
    /// A failure budget.
    Budget,
    /// A lane.
    Lane,
    /// A session.
    Session,
    /// A node.
    Node,
}

/// Every transition of ticks, runs, breakers, lanes, sessions and nodes, with the one event that tells it.
pub const TRANSITIONS: &[(Of, &str, Name)] = &[
    (Of::Tick, "skipped", Name::TickSkipped),
    (Of::Tick, "missed", Name::TickMissed),
    (Of::Tick, "deferred", Name::TickDeferred),
    (Of::Run, "made by a tick", Name::TickPlanned),
    (Of::Run, "made otherwise", Name::RunCreated),
    (Of::Run, "an attempt starts", Name::RunStarted),
    (Of::Run, "waits for another attempt", Name::RunRetried),
    (Of::Run, "taken from a node that is gone", Name::RunRescued),
    (Of::Run, "given back, not started", Name::RunReturned),
    (Of::Run, "completed or failed", Name::RunFinished),
    (Of::Run, "cancelled", Name::RunCancelled),
    (Of::Breaker, "opens, half-opens, closes", Name::BreakerChanged),
    (Of::Budget, "used up, or cleared", Name::BudgetChanged),
    (Of::Lane, "other limits, or cleared", Name::LaneChanged),
    (Of::Session, "stopped", Name::SessionStopped),
    (Of::Session, "reset", Name::SessionReset),
    (Of::Node, "joins", Name::NodeStarted),
    (Of::Node, "drains, or works again", Name::NodeDraining),
    (Of::Node, "found gone", Name::NodeFenced),
    (Of::Node, "joins again", Name::NodeRejoined),
    (Of::Node, "keeper replaced", Name::KeeperRestarted),
    (Of::Node, "clock set", Name::ClockStepped),
    (Of::Node, "leaves", Name::NodeStopped),
];

impl Name {
    /// All of them.
    pub const ALL: [Name; 40] = [
        Name::NodeStarted,
        Name::NodeStopped,
        Name::NodeDraining,
        Name::NodeFenced,
        Name::NodeRejoined,
        Name::KeeperRestarted,
        Name::ClockStepped,
        Name::ConfigLoaded,
        Name::ConfigRejected,
        Name::ConfigSkew,
        Name::TickPlanned,
        Name::TickDeferred,
        Name::TickSkipped,
        Name::TickMissed,
        Name::RunCreated,
        Name::RunStarted,
        Name::RunDelayed,
        Name::RunFinished,
        Name::RunRetried,
        Name::RunCancelled,
        Name::RunRescued,
        Name::RunReturned,
        Name::BreakerChanged,
        Name::BudgetChanged,
        Name::LaneChanged,
        Name::SessionStopped,
        Name::SessionReset,
        Name::AgentCreated,
        Name::AgentUpdated,
        Name::AgentDeleted,
        Name::ScheduleCreated,
        Name::ScheduleUpdated,
        Name::ScheduleDeleted,
        Name::SchedulePaused,
        Name::ScheduleResumed,
        Name::ScheduleUnreadable,
        Name::RowUnreadable,
        Name::WriteRefused,
        Name::StoreUnavailable,
        Name::StoreAvailable,
    ];

    /// The name as it stands in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Name::NodeStarted => "node_started",
            Name::NodeStopped => "node_stopped",
            Name::NodeDraining => "node_draining",
            Name::NodeFenced => "node_fenced",
            Name::NodeRejoined => "node_rejoined",
            Name::KeeperRestarted => "keeper_restarted",
            Name::ClockStepped => "clock_stepped",
            Name::ConfigLoaded => "config_loaded",
            Name::ConfigRejected => "config_rejected",
            Name::ConfigSkew => "config_skew",
            Name::TickPlanned => "tick_planned",
            Name::TickDeferred => "tick_deferred",
            Name::TickSkipped => "tick_skipped",
            Name::TickMissed => "tick_missed",
            Name::RunCreated => "run_created",
            Name::RunStarted => "run_started",
            Name::RunDelayed => "run_delayed",
            Name::RunFinished => "run_finished",
            Name::RunRetried => "run_retried",
            Name::RunCancelled => "run_cancelled",
            Name::RunRescued => "run_rescued",
            Name::RunReturned => "run_returned",
            Name::BreakerChanged => "breaker_changed",
            Name::BudgetChanged => "budget_changed",
            Name::LaneChanged => "lane_changed",
            Name::SessionStopped => "session_stopped",
            Name::SessionReset => "session_reset",
            Name::AgentCreated => "agent_created",
            Name::AgentUpdated => "agent_updated",
            Name::AgentDeleted => "agent_deleted",
            Name::ScheduleCreated => "schedule_created",
            Name::ScheduleUpdated => "schedule_updated",
            Name::ScheduleDeleted => "schedule_deleted",
            Name::SchedulePaused => "schedule_paused",
            Name::ScheduleResumed => "schedule_resumed",
            Name::ScheduleUnreadable => "schedule_unreadable",
            Name::RowUnreadable => "row_unreadable",
            Name::WriteRefused => "write_refused",
            Name::StoreUnavailable => "store_unavailable",
            Name::StoreAvailable => "store_available",
        }
    }
}

impl Event {
    /// An event with nothing but its name.
    pub fn new(timestamp: Timestamp, level: Level, event: Name) -> Event {
        Event {
            timestamp,
            level,
            event,
            agent: None,
            schedule: None,
            command: None,
            session: None,
            tick_at: None,
            run_id: None,
            attempt: None,
            node: None,
            trace_id: None,
            state: None,
            reason: None,
            count: None,
            took_ms: None,
            lag_ms: None,
            retry_at: None,
            outbound: None,
            usage: None,
            detail: None,
        }
    }

    /// As JSON, with the node that tells it where it is about no other.
    pub fn to_json(&self, teller: NodeId) -> String {
        let mut json = serde_json::to_string(self).unwrap_or_default();
        if self.node.is_none() && !teller.0.is_nil() && json.pop() == Some('}') {
            json.push_str(&format!(",\"node\":\"{teller}\"}}"));
        }
        json
    }

    /// About a run as it stands, with all its names.
    pub(crate) fn of_run(self, run: &RunRecord) -> Event {
        Event {
            session: run.session().map(str::to_owned),
            tick_at: run.tick_at,
            run_id: Some(run.id),
            attempt: (run.attempt > 0).then_some(run.attempt),
            node: run.node,
            trace_id: Some(run.id.trace(run.trace_id).simple().to_string()),
            state: Some(run.state.as_str()),
            reason: run.reason.map(|reason| reason.as_str().to_owned()),
            ..self.of(&run.name)
        }
    }

    /// The end of a run that no attempt on this node has ended. The one event of that end.
    pub fn ended(now: Timestamp, run: &RunRecord) -> Event {
        let (level, name) = match run.state {
            RunState::Cancelled => (Level::Info, Name::RunCancelled),
            RunState::Failed => (Level::Warn, Name::RunFinished),
            _ => (Level::Info, Name::RunFinished),
        };
        let event = Event::new(run.finished_at.unwrap_or(now), level, name).of_run(run);
        // Nothing will come: whoever shows that something might can stop.
        let outbound = (name == Name::RunCancelled && event.session.is_some()).then(String::new);
        Event { outbound, detail: run.error.clone(), ..event }
    }

    /// A change of the breaker of an agent's command.
    pub fn breaker(agent: &str, command: &str, change: &Transition) -> Event {
        let level = if change.to == State::Open { Level::Warn } else { Level::Info };
        Event {
            agent: Some(agent.to_owned()),
            command: Some(command.to_owned()),
            run_id: change.run,
            state: Some(change.to.as_str()),
            reason: Some(change.reason.as_str().to_owned()),
            count: Some(u64::from(change.failures)),
            ..Event::new(change.at, level, Name::BreakerChanged)
        }
    }

    /// Of a schedule, given as `agent/schedule`.
    pub(crate) fn of(mut self, name: &str) -> Event {
        let (agent, schedule) = name.split_once('/').unwrap_or((name, ""));
        self.agent = Some(agent.to_owned());
        self.schedule = Some(schedule.to_owned());
        self
    }
}
