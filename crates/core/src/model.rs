//! The words of the house as types: ids, states, reasons, tokens.

use std::fmt;

use belfry_time::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A run. Version 7, so that ids sort by time of creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(transparent)]
pub struct RunId(pub Uuid);

/// One Belfry process; random for each start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(transparent)]
pub struct NodeId(pub Uuid);

/// An agent, as its store numbers it.
pub type AgentId = i64;
/// A schedule, as its store numbers it.
pub type ScheduleId = i64;
/// Grows by one with each claim of a run, and fences every later write.
pub type Epoch = i32;

impl RunId {
    /// The trace of the run: what came from outside, else its own id, which is as good a name.
    pub fn trace(self, from_outside: Option<Uuid>) -> Uuid {
        from_outside.unwrap_or(self.0)
    }

    /// When it was made, to the millisecond: an id of version 7 begins with that.
    pub fn made_at(self) -> Timestamp {
        let ms = i64::try_from(self.0.as_u128() >> 80).unwrap_or(i64::MAX);
        Timestamp::from_millisecond(ms).unwrap_or(Timestamp::MAX)
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Defines an enum whose variants have stable names and small numbers, for JSON and for storage.
macro_rules! named {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $number:literal $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$doc])* #[serde(rename = $text)] $variant = $number,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: &'static [$name] = &[$($name::$variant,)*];

            /// The stable name.
            pub fn as_str(self) -> &'static str {
                match self { $($name::$variant => $text,)* }
            }

            /// The number in storage.
            pub fn code(self) -> i16 {
                self as i16
            }

            /// From the number in storage.
            pub fn from_code(code: i16) -> Option<$name> {
                match code { $($number => Some($name::$variant),)* _ => None }
            }
        }

        #[cfg(feature = "openapi")]
        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                let names = $name::ALL.iter().map(|one| one.as_str());
                let text = utoipa::openapi::schema::Type::String;
                utoipa::openapi::ObjectBuilder::new().schema_type(text).enum_values(Some(names)).into()
            }
        }

        #[cfg(feature = "openapi")]
        impl utoipa::ToSchema for $name {}

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

named! {
    /// Where a run is in its life.
    RunState {
        /// Waits: for its time, for a limit, for a node, for the next attempt.
        Pending = 0 "pending",
        /// An attempt has started.
        Running = 1 "running",
        /// The last attempt succeeded.
        Completed = 2 "completed",
        /// The last attempt failed and no other follows.
        Failed = 3 "failed",
        /// Ended on request.
        Cancelled = 4 "cancelled",
    }
}

named! {
    /// What made a run.
    Trigger {
        /// A tick, on time.
        Schedule = 0 "schedule",
        /// A tick that was missed.
        CatchUp = 1 "catch_up",
        /// A person.
        Manual = 2 "manual",
        /// A request from outside.
        Webhook = 3 "webhook",
        /// A chat message.
        Message = 4 "message",
        /// A range of past ticks.
        Backfill = 5 "backfill",
    }
}

named! {
    /// Why a tick made no run. The first failing check names it.
    SkipReason {
        /// Paused, or `enabled: false`.
        Disabled = 0 "disabled",
        /// The definition is wrong.
        Invalid = 1 "invalid",
        /// A one-shot that has fired.
        Exhausted = 2 "exhausted",
        /// A day on which it must not run.
        OutsideDay = 3 "outside_day",
        /// A time at which it must not run.
        OutsideWindow = 4 "outside_window",
        /// The breaker is open.
        CircuitOpen = 5 "circuit_open",
        /// The failure budget is used up.
        BudgetExhausted = 6 "budget_exhausted",
        /// The spend limit is used up.
        SpendExhausted = 7 "spend_exhausted",
        /// A run lives, and `if_running` is `skip`.
        AlreadyRunning = 8 "already_running",
        /// `max_pending` runs wait already, or it came while one before it waited for its lane.
        QueueFull = 9 "queue_full",
        /// The work source had nothing.
        NoWork = 10 "no_work",
        /// Missed in downtime, `catch_up: skip`.
        MissedSkip = 20 "missed_skip",
        /// Missed in downtime, one run stands for all: `catch_up: run_once`.
        MissedRunOnce = 21 "missed_run_once",
        /// Missed in downtime, more than `catch_up_limit`: `catch_up: run_all`.
        MissedRunAll = 22 "missed_run_all",
        /// Overdue when an edit gave the schedule another timing, or removed it.
        Edited = 23 "edited",
    }
}

impl SkipReason {
    /// Whether the tick was missed by a catch-up policy rather than skipped by a check.
    pub fn is_missed(self) -> bool {
        self.code() >= 20
    }
}

named! {
    /// Why a run ended as it did, where its state alone does not say.
    Reason {
        /// The process ended with a code that is not ok.
        ExitCode = 0 "exit_code",
        /// It took too long.
        Timeout = 1 "timeout",
        /// It could not be started.
        SpawnFailed = 2 "spawn_failed",
        /// A handler or request reported an error.
        Error = 3 "error",
        /// Its node is gone, and so are its attempts.
        Orphaned = 4 "orphaned",
        /// Its node shut down, and it may not start twice.
        Shutdown = 5 "shutdown",
        /// A template of its definition cannot be filled in: a value is missing, or too large.
        Template = 6 "template",
        /// A person or program asked.
        Requested = 20 "requested",
        /// A newer tick took its place.
        Overlap = 21 "overlap",
        /// Its agent left the files.
        AgentRemoved = 22 "agent_removed",
        /// Its schedule is gone.
        ScheduleRemoved = 23 "schedule_removed",
        /// Its lane was cleared.
        LaneCleared = 24 "lane_cleared",
        /// Its session dropped it for a newer one.
        QueueDropped = 25 "queue_dropped",
        /// Its session was stopped.
        Stopped = 26 "stopped",
        /// Older than a stop of its session.
        Stale = 27 "stale",
        /// A newer message of its session took its place.
        Interrupted = 28 "interrupted",
    }
}

named! {
    /// What a schedule's token in the due index stands for.
    TokenKind {
        /// The next tick.
        Tick = 0 "tick",
        /// The schedule is new at `due_at`: find its first tick.
        First = 1 "first",
        /// The clock starts at `due_at` (end of the awaited run, edit, resume): find the tick after it.
        Next = 2 "next",
        /// A pause that began at `tick_at` ends at `due_at`: record what it left out, and find the tick after it.
        Resume = 3 "resume",
        /// The tick at `tick_at` was deferred at `due_at`, because its lane was full, and has a place there now: plan it as if it
        /// were `due_at`.
        Deferred = 4 "deferred",
    }
}

/// A schedule's place in the due index. A schedule has at most one, and who consumes it plans the tick: that is
/// why no leader is needed, and why pruning history never lets a tick fire again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token {
    /// What it stands for.
    pub kind: TokenKind,
    /// The nominal instant; for `First` and `Next` the same as `due_at`, for `Resume` the begin of the pause.
    pub tick_at: Timestamp,
    /// When the planner looks at it; for `Deferred` since when it waits.
    pub due_at: Timestamp,
}

impl Token {
    /// Whether it stands for a tick that is known.
    pub fn is_of_tick(self) -> bool {
        matches!(self.kind, TokenKind::Tick | TokenKind::Deferred)
    }

    /// A token that asks for the first tick of a schedule seen at `now`.
    pub fn first(now: Timestamp) -> Token {
        Token { kind: TokenKind::First, tick_at: now, due_at: now }
    }

    /// A token that asks for the tick after `now`.
    pub fn next(now: Timestamp) -> Token {
        Token { kind: TokenKind::Next, tick_at: now, due_at: now }
    }

    /// A token that ends a pause.
    pub fn resume(since: Timestamp, until: Timestamp) -> Token {
        Token { kind: TokenKind::Resume, tick_at: since, due_at: until }
    }

    /// A token for a tick that was deferred.
    pub fn deferred(tick_at: Timestamp, since: Timestamp) -> Token {
        Token { kind: TokenKind::Deferred, tick_at, due_at: since }
    }
}

impl From<belfry_time::Tick> for Token {
    fn from(tick: belfry_time::Tick) -> Token {
        Token { kind: TokenKind::Tick, tick_at: tick.tick_at, due_at: tick.due_at }
    }
}

/// Consecutive ticks that made no run for one reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkipRange {
    /// Why.
    pub reason: SkipReason,
    /// The first tick.
    pub from: Timestamp,
    /// The last tick.
    pub to: Timestamp,
    /// How many.
    pub count: u64,
}

impl SkipRange {
    /// One tick.
    pub fn one(reason: SkipReason, tick_at: Timestamp) -> SkipRange {
        SkipRange { reason, from: tick_at, to: tick_at, count: 1 }
    }
}

impl RunState {
    /// Whether it can still change.
    pub fn is_live(self) -> bool {
        matches!(self, RunState::Pending | RunState::Running)
    }

    /// Whether one state may follow another. Terminal states absorb.
    pub fn may_become(self, next: RunState) -> bool {
        use RunState::{Cancelled, Completed, Failed, Pending, Running};
        matches!(
            (self, next),
            (Pending, Running | Cancelled) | (Running, Completed | Failed | Cancelled | Pending)
        )
    }
}
