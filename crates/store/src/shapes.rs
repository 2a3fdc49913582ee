//! What goes into the verbs of a store and what comes out.

use std::sync::Arc;

use belfry_core::breaker::{Breaker, Transition};
use belfry_core::budget::Budget;
use belfry_core::check::Status;
use belfry_core::definition::Scope;
use belfry_core::edit;
use belfry_core::gate;
pub use belfry_core::gate::Gates;
use belfry_core::input::StoredPayload;
use belfry_core::overlap::{Overlap, turns};
use belfry_core::plan::{Next, Standing};
use belfry_core::rescue::Rescues;
use belfry_core::retry::Verdict;
use belfry_core::session::RunUsage;
pub use belfry_core::trigger::{Defined, Given, Key, NewRun};
use belfry_core::{
    AgentDefinition, AgentId, Epoch, Facts, NodeId, Plan, Reason, RunId, RunState, Schedule,
    ScheduleDefinition, ScheduleId, SkipRange, Token, TokenKind, Trigger,
};
use belfry_time::{Timestamp, Timing};
use serde_json::Value;
use uuid::Uuid;

pub use belfry_core::AgentSpec;

use crate::views::Put;

/// What applying a source changed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Applied {
    /// Schedules that are new.
    pub added: u32,
    /// Schedules whose definition changed.
    pub changed: u32,
    /// Schedules that left the source.
    pub retired: u32,
    /// Agents that were there and have different keys of their own now.
    pub agents: u32,
    /// Pending runs that ended because their agent or schedule left, sorted.
    pub ended: Vec<RunId>,
    /// Schedules that were left alone, because one of that name was made through the API.
    pub foreign: u32,
    /// Schedules, new or changed, that never run: their one instant had passed.
    pub expired: u32,
}

impl Applied {
    /// What was added, changed and retired, in words.
    pub fn words(&self) -> String {
        let Applied { added, changed, retired, agents, .. } = self;
        let agents = match agents {
            0 => String::new(),
            1 => "; 1 agent changed".to_owned(),
            agents => format!("; {agents} agents changed"),
        };
        format!("{added} added, {changed} changed, {retired} retired{agents}")
    }

    /// Counts a schedule that was put.
    pub(crate) fn count(&mut self, put: &Put) {
        match put {
            Put::Added(_) => self.added += 1,
            Put::Changed(_) => self.changed += 1,
            Put::OwnedBy(_) => self.foreign += 1,
            Put::Unchanged(_) | Put::Spent | Put::NoAgent | Put::Differs => {}
        }
    }
}

/// A schedule whose token is due, with all that deciding about it needs.
#[derive(Debug, Clone)]
pub struct Due {
    /// Which.
    pub schedule: ScheduleId,
    /// Whose.
    pub agent: AgentId,
    /// `agent/schedule`.
    pub name: Arc<str>,
    /// What it is, or why it cannot be read.
    pub compiled: Result<Arc<Schedule>, Arc<str>>,
    /// What its agent is.
    pub agent_definition: Arc<AgentDefinition>,
    /// Changes with everything that could change the decision; committing compares it.
    pub version: i64,
    /// Its own state.
    pub standing: Standing,
    /// Live runs in its overlap scope.
    pub live: u32,
    /// Those of them that are pending.
    pub pending: u32,
    /// The breaker of its agent and command.
    pub breaker: Breaker,
    /// What is used of its agent's failure budget.
    pub budget: Option<Budget>,
    /// When the last of its runs that have ended was started, or ended where it never started. Only told where schedules
    /// share an overlap scope.
    pub last_start: Option<Timestamp>,
}

/// A place in the order in which schedules are due.
pub type Mark = (Timestamp, ScheduleId);

impl Due {
    /// Its place in the order.
    pub fn mark(&self) -> Mark {
        (self.standing.token.due_at, self.schedule)
    }

    /// The live runs that its overlap policy looks at.
    pub fn overlap(&self) -> Option<Overlap<'_>> {
        let options = self.compiled.as_ref().ok()?.options();
        Some(Overlap::of(options, self.agent, self.schedule))
    }

    /// Puts schedules that are due in one pass into the order in which they are offered.
    pub fn take_turns(due: Vec<Due>) -> Vec<Due> {
        let unread = |due: &Due| Overlap {
            scope: Scope::Schedule,
            agent: due.agent,
            schedule: due.schedule,
            command: "",
        };
        let keys: Vec<_> =
            due.iter().map(|due| (due.overlap().unwrap_or(unread(due)), due.last_start)).collect();
        let order = turns(&keys);
        let mut due: Vec<Option<Due>> = due.into_iter().map(Some).collect();
        order.into_iter().filter_map(|place| due[place].take()).collect()
    }

    /// The facts as the planner takes them.
    pub fn facts(&self, now: Timestamp) -> Facts {
        let facts = Facts::of(&self.agent_definition, [], self.breaker, self.budget, now);
        Facts { live: self.live, pending: self.pending, ..facts }
    }

    /// What to commit for a plan. `id` makes the ids of its runs.
    pub fn commit(&self, schedule: &Schedule, plan: Plan, mut id: impl FnMut() -> RunId) -> Commit {
        let defined = Defined::new(self.agent, self.schedule, schedule, &self.agent_definition);
        let runs: Vec<NewRun> =
            plan.runs.iter().map(|planned| NewRun::of_tick(defined, id(), planned)).collect();
        let next = match plan.next {
            Next::Token(token) => Arm::Token(token),
            Next::Wait => runs.last().map_or(Arm::Exhausted, |run| Arm::Wait(run.id)),
            Next::Exhausted | Next::Expired => Arm::Exhausted,
        };
        Commit {
            schedule: self.schedule,
            agent: self.agent,
            version: self.version,
            token: self.standing.token,
            scope: schedule.options().overlap,
            command: schedule.options().command.clone(),
            live: self.live,
            cancel_live: plan.cancel_live,
            closed: plan.closed,
            open_skip: plan.open_skip,
            open_skip_before: self.standing.open_skip,
            origin: plan.origin,
            cursor_at: plan.cursor_at,
            planned_at: plan.cursor_at,
            planned_to: self.planned_to(schedule.timing.as_ref()),
            waits: self.standing.waits,
            runs,
            next,
            invalid: None,
        }
    }

    /// The instant before the tick of its token, where that stands for one.
    fn planned_to(&self, timing: Option<&Timing>) -> Option<Timestamp> {
        let token = self.standing.token;
        match token.is_of_tick() {
            true => Some(edit::before(timing, token.tick_at)),
            false => self.standing.cursor_at,
        }
    }

    /// What to commit for a schedule that cannot be read: it is unarmed, and says why.
    pub fn invalid(&self, reason: &str) -> Commit {
        Commit {
            schedule: self.schedule,
            agent: self.agent,
            version: self.version,
            token: self.standing.token,
            scope: Scope::Schedule,
            command: String::new(),
            live: self.live,
            cancel_live: false,
            closed: Vec::new(),
            open_skip: self.standing.open_skip,
            open_skip_before: self.standing.open_skip,
            origin: None,
            cursor_at: self.planned_to(None),
            planned_at: self.planned_to(None).filter(|_| self.standing.token.is_of_tick()),
            planned_to: None,
            waits: self.standing.waits,
            runs: Vec::new(),
            next: Arm::Exhausted,
            invalid: Some(reason.to_owned()),
        }
    }
}

/// A planned schedule, to be committed if its token is still there.
#[derive(Debug, Clone, PartialEq)]
pub struct Commit {
    /// Which.
    pub schedule: ScheduleId,
    /// Whose.
    pub agent: AgentId,
    /// What the decision was taken on.
    pub version: i64,
    /// The token that is consumed.
    pub token: Token,
    /// Which live runs the decision looked at.
    pub scope: Scope,
    /// The schedule's command, for that scope.
    pub command: String,
    /// How many lived then.
    pub live: u32,
    /// Whether they are to be cancelled.
    pub cancel_live: bool,
    /// Ranges of skips and misses that are complete.
    pub closed: Vec<SkipRange>,
    /// The skips that are still being counted.
    pub open_skip: Option<SkipRange>,
    /// Those that were being counted before.
    pub open_skip_before: Option<SkipRange>,
    /// The first tick, if it was found.
    pub origin: Option<Timestamp>,
    /// The last tick that is planned, where no token remembers it.
    pub cursor_at: Option<Timestamp>,
    /// The same for [`belfry_core::edit::Found::planned_at`].
    pub planned_at: Option<Timestamp>,
    /// The instant before the first tick of the plan: the last that is planned where the plan cannot be stored.
    pub planned_to: Option<Timestamp>,
    /// Whether the schedule waited for the end of a run.
    pub waits: bool,
    /// Runs to make.
    pub runs: Vec<NewRun>,
    /// What arms the schedule next.
    pub next: Arm,
    /// The schedule cannot be read, for this reason.
    pub invalid: Option<String>,
}

impl Commit {
    /// The live runs that the decision looked at.
    pub(crate) fn overlap(&self) -> Overlap<'_> {
        Overlap { scope: self.scope, agent: self.agent, schedule: self.schedule, command: &self.command }
    }

    /// The lane that its runs wait in, where it makes some.
    pub(crate) fn lane(&self) -> Option<&str> {
        self.runs.first().map(|run| run.lane.as_str())
    }

    /// What to commit instead where the plan cannot be stored: its schedule is unarmed, and says why.
    pub(crate) fn made_invalid(&self, reason: &str) -> Commit {
        Commit {
            scope: Scope::Schedule,
            cancel_live: false,
            closed: Vec::new(),
            open_skip: self.open_skip_before,
            origin: None,
            cursor_at: self.planned_to,
            planned_at: self.planned_to.filter(|_| self.token.is_of_tick()),
            runs: Vec::new(),
            next: Arm::Exhausted,
            invalid: Some(reason.to_owned()),
            ..self.clone()
        }
    }

    /// Whether its tick was deferred before.
    pub(crate) fn was_deferred(&self) -> bool {
        self.token.kind == TokenKind::Deferred
    }

    /// What is kept of it where its lane is full. It waits since it was deferred first.
    pub(crate) fn deferred(&self, lane: &str, now: Timestamp) -> Deferred {
        let since = if self.was_deferred() { self.token.due_at } else { now };
        Deferred { lane: lane.to_owned(), tick_at: self.token.tick_at, since }
    }
}

/// What became of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Committed {
    /// It holds.
    Held,
    /// Somebody else was faster: nothing of it was done.
    Lost,
    /// Its lane is full: nothing of it was done, and the schedule waits until there is room.
    Deferred,
}

/// What arms a schedule next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arm {
    /// A new token.
    Token(Token),
    /// The end of this run.
    Wait(RunId),
    /// Nothing: it has fired for the last time.
    Exhausted,
}

impl Arm {
    /// The new token, where there is one.
    pub fn token(&self) -> Option<Token> {
        match self {
            Arm::Token(token) => Some(*token),
            Arm::Wait(_) | Arm::Exhausted => None,
        }
    }
}

/// A run that is asked for from outside a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Enqueue {
    /// The run.
    pub run: NewRun,
    /// Makes a repeat answer with the first run.
    pub key: Option<Key>,
}

/// What became of a request for a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enqueued {
    /// It was made.
    Made,
    /// It was made before: with the same key, or for the same tick, and then it lives.
    Repeat(RunId),
    /// The key was used with another body.
    KeyReused(RunId),
    /// There is no such schedule.
    NotFound,
}

/// Who claims, and how much.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Who.
    pub node: NodeId,
    /// Free slots by lane.
    pub lanes: Vec<(String, u32)>,
    /// How many runs of all lanes together, dealt out to the lanes in turn.
    pub total: u32,
    /// Labels of the node, sorted.
    pub labels: Vec<String>,
    /// Only this run, whatever its lane, for a node that is there for nothing else. It passes those that wait before it,
    /// but no limit: where a gate is full it stays as it is.
    pub only: Option<RunId>,
    /// Which rescued run may be among them: none while the node has a rescued run that has not started yet, or a
    /// suspect that has neither ended nor outlived a renewal. A run claimed by `only` is alone anyway.
    pub rescues: Rescues,
}

/// A run that is now running under the claiming node.
#[derive(Debug, Clone, PartialEq)]
pub struct Claimed {
    /// Which.
    pub run: RunId,
    /// Fences every later write.
    pub epoch: Epoch,
    /// From 1.
    pub attempt: u32,
    /// The last one.
    pub max_attempts: u32,
    /// Whose.
    pub agent: AgentId,
    /// Of which schedule.
    pub schedule: ScheduleId,
    /// Which command.
    pub command: String,
    /// What made it.
    pub trigger: Trigger,
    /// The tick that made it.
    pub tick_at: Option<Timestamp>,
    /// Its lane.
    pub lane: String,
    /// The prompt that came with it, never a template.
    pub prompt: Option<String>,
    /// The payload that came with it.
    pub payload: StoredPayload,
    /// Its trace.
    pub trace_id: Option<Uuid>,
    /// What of it cannot be read, other than its payload: then it must not be started.
    pub unreadable: Option<String>,
    /// It came back from a node that died.
    pub rescued: bool,
    /// It came back from a node that died, and may have killed it: see [`belfry_core::rescue`].
    pub suspect: bool,
}

/// How an attempt ended, and what becomes of its run.
#[derive(Debug, Clone, PartialEq)]
pub struct Finish {
    /// Which.
    pub run: RunId,
    /// Under which claim.
    pub epoch: Epoch,
    /// What becomes of it.
    pub verdict: Verdict,
    /// Whether the attempt failed: it counts against the budget.
    pub failed: bool,
    /// The process's exit code.
    pub exit_code: Option<i32>,
    /// What went wrong.
    pub error: Option<String>,
    /// What it reported.
    pub summary: Option<String>,
    /// What it used; also how much of its session's context window is used.
    pub usage: Option<RunUsage>,
    /// The token of its schedule, should that wait for this run; without it the planner looks at once.
    pub arm: Option<Token>,
}

/// What became of a finish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// The run has ended.
    Ended(RunState),
    /// It waits for its next attempt.
    Pending,
    /// The claim is no longer ours, and nothing was changed: end the attempt.
    Stale,
}

/// What became of a request to cancel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cancelled {
    /// It was pending, and has ended.
    Ended,
    /// It is running: its node has been told and will end it.
    Told(NodeId),
    /// It had ended before, like this.
    Before(RunState),
    /// There is no such run.
    NotFound,
}

/// A node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Random for each start.
    pub id: NodeId,
    /// Where.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// Its labels, sorted.
    pub labels: Vec<String>,
    /// When it started.
    pub started_at: Timestamp,
    /// Until when its claims hold.
    pub lease_until: Timestamp,
    /// Its claims no longer hold.
    pub fenced: bool,
    /// It is to take no new work.
    pub draining: bool,
    /// When it was heard of last.
    pub last_seen_at: Timestamp,
    /// How many runs it runs at once at most, in all lanes together.
    pub max_concurrent: Option<u32>,
    /// By which its process is found.
    pub process: NodeProcess,
}

/// The process of a node: enough to tell on the same system whether it still runs, and where it keeps what its children left.
/// Empty and zero where the system does not say.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeProcess {
    /// Which boot of the system it belongs to.
    pub boot_id: String,
    /// In which pid namespace its pid means something.
    pub pid_ns: String,
    /// When it started, in clock ticks since boot.
    pub start_time: u64,
    /// The folder with the records of its children.
    pub state_dir: String,
    /// The version of Belfry that it runs.
    pub version: String,
    /// How long its leases are.
    pub lease_ms: u64,
}

impl NodeProcess {
    /// Whether two processes see each other's pids: the same boot and the same pid namespace.
    pub fn is_beside(&self, other: &NodeProcess) -> bool {
        !self.boot_id.is_empty() && self.boot_id == other.boot_id && self.pid_ns == other.pid_ns
    }
}

impl Node {
    /// Whether it takes runs that need these labels.
    pub fn serves(&self, needs: &[String]) -> bool {
        !self.fenced && !self.draining && gate::serves(&self.labels, needs)
    }

    /// Whether its claims hold at an instant.
    pub fn is_alive(&self, now: Timestamp) -> bool {
        !self.fenced && self.lease_until > now
    }
}

/// What others want of a node: little enough to be asked each second.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Marks {
    /// Runs of its own that are to be ended.
    pub cancels: Vec<(RunId, Epoch, Reason)>,
    /// Whether it is to take no new work; none where nobody knows it.
    pub draining: Option<bool>,
}

/// What became of a node that was to drain, or to work again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drained {
    /// It is marked so.
    Marked {
        /// Whether it was not before.
        is_news: bool,
    },
    /// Its lease has lapsed: nobody would read the mark.
    Dead,
    /// There is none such.
    NotFound,
}

/// What a node learns when it renews its lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Renewed {
    /// Its claims hold.
    Held {
        /// Runs of its own that are to be ended.
        cancels: Vec<(RunId, Epoch, Reason)>,
        /// All runs that are running under it; `None` where they could not be read.
        live: Option<Vec<(RunId, Epoch)>>,
    },
    /// They no longer hold: end everything.
    Fenced,
}

impl Renewed {
    /// The lease is renewed, and what runs under it could not be read.
    pub(crate) const HELD: Renewed = Renewed::Held { cancels: Vec::new(), live: None };
}

/// What became of the runs of a node that is gone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rescued {
    /// Back to pending; each has used up an attempt.
    pub pending: Vec<RunId>,
    /// Ended, because it was the last attempt, or because they were to be cancelled.
    pub ended: Vec<(RunId, RunState)>,
    /// Runs of which one may have killed the node.
    pub suspects: Vec<RunId>,
}

/// A run, live or ended.
#[derive(Debug, Clone, PartialEq)]
pub struct RunRecord {
    /// Which.
    pub id: RunId,
    /// Whose.
    pub agent: AgentId,
    /// The agent's name, also where it is gone.
    pub agent_name: String,
    /// Of which schedule.
    pub schedule: ScheduleId,
    /// `agent/schedule`, also where it is gone.
    pub name: String,
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
    pub reason: Option<Reason>,
    /// Its lane.
    pub lane: String,
    /// How often it was started.
    pub attempt: u32,
    /// How often it may be.
    pub max_attempts: u32,
    /// Grows with each claim.
    pub epoch: Epoch,
    /// Where it runs.
    pub node: Option<NodeId>,
    /// The process's exit code.
    pub exit_code: Option<i32>,
    /// What went wrong last.
    pub error: Option<String>,
    /// What it reported.
    pub summary: Option<String>,
    /// What its last attempt used.
    pub usage: Option<RunUsage>,
    /// The key of its session, if it is of one.
    pub session: Option<String>,
    /// The prompt that came with it. Lists leave it out.
    pub prompt: Option<String>,
    /// The payload that came with it; null where it cannot be read. Lists leave it out: there it is empty.
    pub payload: Value,
    /// Its trace.
    pub trace_id: Option<Uuid>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When its last attempt started.
    pub started_at: Option<Timestamp>,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
}

impl RunRecord {
    /// Whether no node can start it: its stored epoch or attempt leaves no room for one more.
    pub fn is_unstartable(&self) -> bool {
        self.state == RunState::Pending
            && (self.epoch == Epoch::MIN || self.epoch == Epoch::MAX || self.attempt == u32::MAX)
    }

    /// The record with what of it cannot be read, where nothing else went wrong.
    pub(crate) fn noting(mut self, unreadable: Option<String>) -> RunRecord {
        self.error = self.error.or(unreadable);
        self
    }
}

/// A schedule as it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct ScheduleRecord {
    /// Which.
    pub id: ScheduleId,
    /// Whose.
    pub agent: AgentId,
    /// The agent's name.
    pub agent_name: String,
    /// `agent/schedule`.
    pub name: String,
    /// What it is.
    pub definition: ScheduleDefinition,
    /// Grows with each edit of its timing.
    pub revision: i64,
    /// Where it came from.
    pub source: String,
    /// Where it stands.
    pub status: Status,
    /// Since when.
    pub status_since: Timestamp,
    /// Its place in the due index.
    pub token: Option<Token>,
    /// The run whose end arms it.
    pub waits_for: Option<RunId>,
    /// The lane that has no room for its tick, or has had none until a moment ago.
    pub deferred: Option<Deferred>,
    /// Its first tick.
    pub origin: Option<Timestamp>,
    /// The skips that are still being counted.
    pub open_skip: Option<SkipRange>,
    /// No tick at or before this instant is armed: see [`belfry_core::edit::Found::cursor_at`].
    pub cursor_at: Option<Timestamp>,
    /// The last tick that has a result: see [`belfry_core::edit::Found::planned_at`].
    pub planned_at: Option<Timestamp>,
    /// How its last run ended.
    pub last: Option<LastRun>,
    /// When a run of it succeeded last, and which.
    pub last_success: Option<(Timestamp, RunId)>,
    /// What went wrong last; cleared by success.
    pub last_error: Option<String>,
    /// Runs in a row that ended alike: successes above zero, failures below.
    pub streak: i64,
    /// The last tick that made a run or was skipped.
    pub last_fired_at: Option<Timestamp>,
    /// Its runs that are running.
    pub running: u32,
    /// Its runs that wait.
    pub pending: u32,
    /// When the earliest of its runs that failed and wait may start again.
    pub next_retry_at: Option<Timestamp>,
    /// What is used of its agent's failure budget.
    pub budget: Option<Budget>,
    /// Why this version cannot read it or its agent; then `definition` says nothing.
    pub unreadable: Option<String>,
}

impl ScheduleRecord {
    /// The schedule as an edit finds it.
    pub fn found(&self) -> edit::Found {
        edit::Found {
            status: self.status.clone(),
            since: self.status_since,
            timer: self.token,
            deferred: self.deferred.as_ref().map(|deferred| deferred.tick_at),
            waits: self.waits_for.is_some(),
            origin: self.origin,
            open_skip: self.open_skip,
            cursor_at: self.cursor_at,
            planned_at: self.planned_at,
        }
    }

    /// As this version shows a schedule that it cannot read: invalid, with the reason. What is stored stays as it is.
    pub(crate) fn unreadable(self, why: &belfry_core::definition::Unreadable) -> ScheduleRecord {
        let why = why.to_string();
        let status = Status::Invalid { reason: why.clone() };
        ScheduleRecord { status, token: None, deferred: None, unreadable: Some(why), ..self }
    }
}

/// Owner of a definition that an older version must not change.
pub const NEWER_VERSION: &str = "a newer version of Belfry";

/// A tick that waits for room in its lane. Its schedule has no token, or one of that kind once there is room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deferred {
    /// Where.
    pub lane: String,
    /// The tick.
    pub tick_at: Timestamp,
    /// Since when.
    pub since: Timestamp,
}

impl Deferred {
    /// The token of a schedule that is to be planned now that there is room.
    pub(crate) fn token(&self) -> Token {
        Token::deferred(self.tick_at, self.since)
    }

    /// The oldest goes first.
    pub(crate) fn place(&self, schedule: ScheduleId) -> (Timestamp, Timestamp, ScheduleId) {
        (self.since, self.tick_at, schedule)
    }
}

/// How a run of a schedule ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastRun {
    /// Which.
    pub run: RunId,
    /// How.
    pub state: RunState,
    /// Its tick.
    pub tick_at: Option<Timestamp>,
    /// When.
    pub finished_at: Timestamp,
}

/// A breaker remembers so many of its last changes.
pub(crate) const BREAKER_CHANGES_MAX: usize = 100;

/// A breaker with its last changes, oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BreakerRecord {
    /// Where it stands.
    pub breaker: Breaker,
    /// How it came there.
    pub history: Vec<Transition>,
}

impl BreakerRecord {
    pub(crate) fn remember(&mut self, change: Option<Transition>) {
        self.history.extend(change);
        self.history.drain(..self.history.len().saturating_sub(BREAKER_CHANGES_MAX));
    }
}

/// How many runs there are, by what can still become of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Waiting.
    pub pending: u64,
    /// Running.
    pub running: u64,
    /// Ended, as far as history goes back.
    pub ended: u64,
}

/// How long ended things are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Runs that ended before this go …
    pub runs_before: Timestamp,
    /// … but failed ones only if they ended before this.
    pub failures_before: Timestamp,
    /// Of a schedule's runs that failed only so many are kept, the last ones, and as many of the others, however young.
    pub runs_per_schedule: Option<u32>,
    /// Where looking for runs beyond that number goes on: what the last call gave.
    pub after: Option<RunId>,
    /// Ranges of skips that ended before this go.
    pub skips_before: Timestamp,
    /// Output goes of runs that were made before this, unless they live.
    pub output_before: Timestamp,
    /// A schedule that was retired before this goes, with its revisions and its turn, once no run, skip or session of it is
    /// kept; an agent, with its limit, breakers and budget, once it has no schedules either.
    pub retired_before: Timestamp,
    /// At most so many things go in one call.
    pub batch: u32,
}

impl Retention {
    /// The first id that a run made at or after an instant could have: ids begin with the instant of their making.
    pub(crate) fn first_id(at: Timestamp) -> Uuid {
        Uuid::from_u128(u128::from(at.as_millisecond().max(0).unsigned_abs()) << 80)
    }
}

/// What pruning removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pruned {
    /// Runs.
    pub runs: u32,
    /// Ranges of skips.
    pub skips: u32,
    /// Idempotency keys.
    pub keys: u32,
    /// Pieces of output.
    pub output: u32,
    /// Sessions that nobody has spoken to for as long as runs are kept, and that have no runs.
    pub sessions: u32,
    /// Schedules and agents that were retired.
    pub retired: u32,
    /// Where looking for runs beyond their schedule's number goes on; none starts anew.
    pub next: Option<RunId>,
}
