//! Why the engine could not do what it was asked.

/// Why the engine could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An interval cannot be read.
    #[error("{source}")]
    Interval {
        /// What was given.
        input: String,
        /// What is wrong with it.
        #[source]
        source: belfry_time::Error,
    },
    /// A cron expression cannot be read.
    #[error("{source}")]
    Cron {
        /// What was given.
        expr: String,
        /// The part that is wrong, as it was written.
        field: String,
        /// What is wrong with it.
        #[source]
        source: belfry_time::Error,
    },
    /// A run could not be made.
    #[error("cannot run {agent}/{schedule}: {detail}")]
    Trigger {
        /// Whose.
        agent: String,
        /// Which schedule.
        schedule: String,
        /// Why not.
        detail: String,
    },
    /// The engine did not stop in time, or not everything had ended by itself.
    #[error("{running} still running when the time was up{}", ended_words(*timed_out, *running))]
    Shutdown {
        /// Whether the time was up.
        timed_out: bool,
        /// How many were running then.
        running: usize,
    },
    /// Too many runs of the session wait, and its schedule refuses new ones.
    #[error("the queue of session {session} is full: {}, and `drop: new` refuses more", waiting_words(*cap))]
    QueueFull {
        /// Which session.
        session: String,
        /// How many may wait.
        cap: u32,
    },
    /// The run was dropped from its session's queue for a newer one.
    #[error("run {run} was dropped: newer messages have filled the queue of its session")]
    QueueDropped {
        /// Which run.
        run: belfry_core::RunId,
    },
    /// The message is older than a stop or a reset of its session.
    #[error(
        "the message is stale: session {session} was stopped or reset after it was sent (generation {generation} now)"
    )]
    Stale {
        /// Which session.
        session: String,
        /// The generation of the session.
        generation: i64,
        /// The run that was made for it, and has ended.
        run: belfry_core::RunId,
    },
    /// The run ended because its lane was cleared.
    #[error("run {run} was cancelled: its lane was cleared")]
    LaneCleared {
        /// Which run.
        run: belfry_core::RunId,
    },
    /// The engine drains or stops, and takes no new work.
    #[error("this node is draining and takes no new work; send it again when it is back, or to another node")]
    Draining,
    /// The target is not, or not only, one chat schedule.
    #[error("{detail}")]
    NoChat {
        /// What was asked for.
        name: String,
        /// What is wrong with it, and the way out.
        detail: String,
    },
    /// Nobody has sent a message to the session, so that there is nothing to stop or to reset.
    #[error("nobody has spoken to the session {session}")]
    NoSession {
        /// `agent/schedule:key`.
        session: String,
    },
    /// The payload of a message, or of a run of a chat, has a key that Belfry writes.
    #[error("{}", belfry_core::session::message_key_words(key))]
    ReservedKey {
        /// The key.
        key: &'static str,
    },
    /// The node cannot be told anything: its lease has lapsed.
    #[error("node {node} is dead: its lease has lapsed, and its runs go to others")]
    NodeDead {
        /// Which.
        node: belfry_core::NodeId,
    },
    /// There is no such node.
    #[error("there is no node {node}")]
    NoNode {
        /// What was asked for.
        node: belfry_core::NodeId,
    },
    /// This version cannot read the definition of the schedule or of its agent.
    #[error("{name}: {why}")]
    Unreadable {
        /// What was asked for.
        name: String,
        /// Why it cannot be read.
        why: String,
    },
    /// There is no such schedule.
    #[error("there is no schedule {name}")]
    NotFound {
        /// What was asked for.
        name: String,
    },
    /// There is no such run.
    #[error("there is no run {run}, or it is no longer kept")]
    NoRun {
        /// What was asked for.
        run: belfry_core::RunId,
    },
    /// There is no such agent.
    #[error("there is no agent {name}")]
    NoAgent {
        /// What was asked for.
        name: String,
    },
    /// No such breaker has counted or changed.
    #[error("no breaker of {agent}/{command} has counted a failure")]
    NoBreaker {
        /// Of which agent.
        agent: String,
        /// Of which command.
        command: String,
    },
    /// The run cannot be repeated: it has not ended.
    #[error("run {run} is {state} and has not ended")]
    NotEnded {
        /// Which.
        run: belfry_core::RunId,
        /// What it is.
        state: belfry_core::RunState,
    },
    /// The run cannot be cancelled: it has ended otherwise.
    #[error("run {run} has ended already: it is {state}")]
    EndedBefore {
        /// Which.
        run: belfry_core::RunId,
        /// What it is.
        state: belfry_core::RunState,
    },
    /// What came with the run cannot be read, so that it cannot be repeated.
    #[error("the payload of run {run} cannot be read: nobody knows what to run again")]
    NoPayload {
        /// Which.
        run: belfry_core::RunId,
    },
    /// The rules of the schedule allow no run now.
    #[error("{name} makes no run now: {}", crate::skip_words(*reason))]
    Skipped {
        /// Which schedule.
        name: String,
        /// The first check that failed.
        reason: belfry_core::SkipReason,
    },
    /// The schedule cannot be paused.
    #[error("{name} cannot be paused: {why}")]
    NotPaused {
        /// Which.
        name: String,
        /// Why not.
        why: &'static str,
    },
    /// An instant that must lie in the future lies in the past.
    #[error("{detail}")]
    Past {
        /// Which part of the request.
        field: &'static str,
        /// What is wrong with it.
        detail: String,
    },
    /// A part of the request is outside of its bounds.
    #[error("{detail}")]
    Argument {
        /// Which part.
        field: &'static str,
        /// What is wrong with it, and what is allowed.
        detail: String,
    },
    /// An idempotency key was used for something else.
    #[error("the key was used for run {run} of {name}, with another prompt or payload")]
    KeyReused {
        /// Of which schedule.
        name: String,
        /// What it was used for.
        run: belfry_core::RunId,
    },
    /// The engine is not in a state for that.
    #[error("the engine is {status}")]
    Status {
        /// What it is.
        status: &'static str,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] belfry_store::Error),
    /// Ticks of the past cannot be made up for.
    #[error("{detail}")]
    Backfill {
        /// Why not.
        detail: String,
    },
    /// A template of an agent cannot be parsed.
    #[error("agent {agent}: {source}")]
    Template {
        /// Which agent.
        agent: String,
        /// Which template, and what is wrong with it.
        source: belfry_core::template::Refused,
    },
    /// A prompt cannot be filled in.
    #[error("the prompt of {name}: {detail}")]
    Prompt {
        /// Of which schedule.
        name: String,
        /// What is wrong with it.
        detail: String,
    },
}

impl Error {
    /// The stable name of the kind, for programs: the same in the library and over HTTP.
    pub fn code(&self) -> &'static str {
        match self {
            Error::Interval { .. } => "interval",
            Error::Cron { .. } => "cron",
            Error::Trigger { .. } => "refused",
            Error::KeyReused { .. } => "key_reused",
            Error::Backfill { .. } => "backfill",
            Error::QueueFull { .. } => "queue_full",
            Error::QueueDropped { .. } => "queue_dropped",
            Error::Stale { .. } => "stale",
            Error::LaneCleared { .. } => "lane_cleared",
            Error::Draining => "draining",
            Error::ReservedKey { .. } => "reserved_key",
            Error::NodeDead { .. } => "node_dead",
            Error::NoChat { .. }
            | Error::NotFound { .. }
            | Error::NoRun { .. }
            | Error::NoAgent { .. }
            | Error::NoBreaker { .. }
            | Error::NoNode { .. }
            | Error::NoSession { .. } => "not_found",
            Error::Unreadable { .. } | Error::NoPayload { .. } => "unreadable",
            Error::NotEnded { .. } => "not_ended",
            Error::EndedBefore { .. } => "ended",
            Error::Skipped { reason, .. } => reason.as_str(),
            Error::NotPaused { .. } => "cannot_pause",
            Error::Past { .. } => "past",
            Error::Argument { .. } => "bad_field",
            Error::Shutdown { .. } => "shutdown",
            Error::Status { .. } => "status",
            Error::Store(error) => error.code(),
            Error::Template { .. } => "template",
            Error::Prompt { .. } => "prompt",
        }
    }
}

fn waiting_words(waiting: u32) -> String {
    if waiting == 1 { "1 run waits".into() } else { format!("{waiting} runs wait") }
}

fn ended_words(timed_out: bool, running: usize) -> &'static str {
    match (timed_out, running) {
        (false, _) => "",
        (true, 1) => ", and was ended",
        (true, _) => ", and were ended",
    }
}
