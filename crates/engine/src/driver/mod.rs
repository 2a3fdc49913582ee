//! The hall: every loop of a node, and every timer of every loop, as one synchronous step.
//!
//! An input comes in through [`Driver::step`], effects go out, and their answers come back in as inputs. The order of a step:
//! take the input in, then let each loop ask for what it wants: finish, renew, cancel, plan, claim, reap, prune. Nothing is
//! awaited here, no clock is read and nothing is drawn by lot: whoever calls brings the time, and makes the ids.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use belfry_core::breaker::Transition;
use belfry_core::budget::Budget;
use belfry_core::definition::Budget as BudgetPolicy;
use belfry_core::plan::{Next, Spread, Standing, plan, spread_catch_up};
use belfry_core::rescue::{Rescues, steady_after, watched_for};
use belfry_core::retry::{Outcome, Verdict, verdict};
use belfry_core::{AgentId, Epoch, Facts, NodeId, Reason, RunId, RunState, ScheduleId, Token};
use belfry_runner::{Attempt, Report, Stop};
use belfry_store::{
    Claim, Claimed, Commit, Committed, Definitions, Due, Error, Finish, Finished, LaneRecord, Mark, Marks,
    Node, Pruned, Renewed, Rescued, Retention, RunRecord, UnreadableSchedule, Written,
};
use belfry_time::{SignedDuration, Timestamp};
use uuid::Uuid;

use crate::event::{Event, Level, Name};

mod beater;
mod dispatcher;
mod finisher;
mod health;
mod lanes;
mod lease;
mod options;
mod others;
mod planner;
mod stopping;

pub use beater::Beat;
use health::{Call, Health};
use lanes::Limits;
pub use options::{GUEST, Keep, Options, default_lanes};
pub use others::Sight;

/// What time it is, twice: decisions look at the wall, waiting at the watch that only goes forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// By the store's clock.
    pub wall: Timestamp,
    /// Since some fixed moment.
    pub mono: Duration,
}

impl Now {
    /// Wall-clock time less monotonic time: it changes only when the wall clock is set, or drifts.
    fn offset(self) -> SignedDuration {
        let mono = SignedDuration::try_from(self.mono).unwrap_or(SignedDuration::MAX);
        self.wall.duration_since(Timestamp::UNIX_EPOCH).saturating_sub(mono)
    }
}

/// What comes into the hall.
#[derive(Debug)]
pub enum Input {
    /// Time has passed.
    Woken,
    /// There may be new or changed work.
    Hint,
    /// Answer to [`Ask::Due`]; `next` where nothing is due.
    Due {
        /// The instant that it was read for.
        at: Timestamp,
        /// What is due.
        due: Result<Vec<Due>, Error>,
        /// When something is due next.
        next: Option<Timestamp>,
    },
    /// Answer to [`Ask::Commit`].
    Committed {
        /// What became of the plans.
        written: Written<Commit, Committed>,
        /// Waiting runs that have ended for those that take their place.
        replaced: Box<[RunRecord]>,
        /// What is due behind them, if that was asked for and could be read, and the instant that it was read for.
        ahead: Option<(Timestamp, Vec<Due>)>,
    },
    /// Answer to [`Ask::Claim`].
    Claimed {
        /// What was claimed.
        claimed: Result<Vec<(Claimed, Option<Definitions>)>, Error>,
        /// Those of them that their breakers do not let through now.
        held: Vec<RunId>,
        /// When something else may start, as far as that was asked for.
        next: Option<Timestamp>,
    },
    /// Answer to [`Ask::Lanes`].
    Lanes {
        /// What lanes may hold.
        lanes: Result<Vec<LaneRecord>, Error>,
        /// The lanes of the runs of this node.
        own: Vec<(RunId, String)>,
        /// Schedules that this version cannot read.
        unreadable: Result<Vec<UnreadableSchedule>, Error>,
    },
    /// Answer to [`Ask::UnreadableRows`].
    UnreadableRows(Result<Vec<String>, Error>),
    /// The program or handler of an attempt has started, where that was asked for.
    Started {
        /// Of which run.
        run: RunId,
        /// Under which claim.
        epoch: Epoch,
    },
    /// An attempt has ended.
    Ended {
        /// Of which run.
        run: RunId,
        /// Under which claim.
        epoch: Epoch,
        /// How.
        report: Report,
    },
    /// Answer to [`Ask::Finish`].
    Finished(Written<Finish, Finished>),
    /// Answer to [`Ask::Renew`].
    Renewed {
        /// When it was asked for, by the watch.
        asked: Duration,
        /// The answer.
        renewed: Result<Renewed, Error>,
        /// Whether the store is held by this process alone, see [`belfry_store::Store::is_held`].
        is_held: bool,
    },
    /// Answer to [`Effect::Join`].
    Joined {
        /// When it was asked for, in monotonic time.
        asked: Duration,
        /// The answer.
        joined: Result<(), Error>,
    },
    /// Answer to [`Ask::GiveBack`].
    GivenBack {
        /// Each with what became of it.
        given_back: Result<Vec<(RunId, RunState)>, Error>,
        /// These runs, as far as they could be read.
        runs: Vec<RunRecord>,
    },
    /// Answer to [`Ask::Marks`].
    Marks(Result<Marks, Error>),
    /// It is marked in the store to take no new work, or to take it again.
    Drain(bool),
    /// Answer to [`Effect::ReadNodes`]: each node with what is seen of its process from here.
    Nodes(Result<Vec<(Node, Sight)>, Error>),
    /// Answer to [`Effect::Fence`].
    Fenced {
        /// Who.
        node: NodeId,
        /// The answer.
        rescued: Result<Option<Rescued>, Error>,
        /// The runs that were rescued, as far as they could be read.
        runs: Vec<RunRecord>,
    },
    /// Answer to [`Ask::Breaker`].
    Breaker {
        /// What was asked.
        of: Box<BreakerOf>,
        /// How it came to stand as it does.
        history: Result<Vec<Transition>, Error>,
    },
    /// Answer to [`Ask::Budget`].
    Budget {
        /// The agent.
        agent: Arc<str>,
        /// Its policy.
        policy: BudgetPolicy,
        /// What is used of the budget.
        used: Result<Option<Budget>, Error>,
    },
    /// Answer to [`Effect::Beat`].
    Beaten(Result<bool, Error>),
    /// Answer to [`Ask::Prune`].
    Pruned(Result<Pruned, Error>),
    /// Stop: plan and claim no more, let what runs end within `timeout`, then end it. Said again: at once.
    Stop {
        /// How long.
        timeout: Duration,
    },
}

/// What the driver asks of the store. [`carry_out`](crate::carry_out) does it and makes the input that answers it.
#[derive(Debug)]
pub enum Ask {
    /// Read due schedules.
    Due {
        /// At most so many.
        limit: u32,
    },
    /// Commit plans.
    Commit {
        /// The plans.
        commits: Arc<Vec<Commit>>,
        /// The instant that they were made for.
        at: Timestamp,
        /// Read meanwhile what is due behind a mark, at most so many.
        ahead: Option<(Mark, u32)>,
    },
    /// Claim runs, and read their definitions.
    Claim(Claim),
    /// Read the settings of lanes, and which schedules this version cannot read.
    Lanes(NodeId),
    /// Read which rows cannot be read in part.
    UnreadableRows,
    /// Store the ends of attempts.
    Finish(Arc<Vec<Finish>>),
    /// Extend the lease.
    Renew {
        /// Of this node.
        node: NodeId,
        /// Until then.
        until: Timestamp,
    },
    /// Read which runs to cancel, and whether to drain.
    Marks(NodeId),
    /// Give runs back that were claimed for this node and never started.
    GiveBack(NodeId, Vec<(RunId, Epoch)>),
    /// Read a breaker that a run may have changed.
    Breaker(Box<BreakerOf>),
    /// Read what is used of a failure budget.
    Budget {
        /// A schedule of the agent, `agent/schedule`.
        schedule: Arc<str>,
        /// The agent.
        agent: Arc<str>,
        /// Its policy.
        policy: BudgetPolicy,
    },
    /// Remove what is older than its retention.
    Prune {
        /// Of what has to do with runs.
        retention: Retention,
        /// Snapshots that were taken before this.
        snapshots_before: Option<Timestamp>,
        /// Nodes that are gone and were not heard of since.
        nodes_before: Option<Timestamp>,
    },
}

/// A breaker that a run may have changed: by its end, or as a probe.
#[derive(Debug)]
pub struct BreakerOf {
    /// Of this agent.
    pub agent: AgentId,
    /// The agent's name.
    pub name: Arc<str>,
    /// Of this command.
    pub command: String,
    /// The run.
    pub run: RunId,
    /// The trace of the run.
    pub trace: String,
    /// Whether the run was made as a probe; else it has ended.
    pub is_probe: bool,
}

/// What the driver asks its surroundings to do.
#[derive(Debug)]
pub enum Effect {
    /// Ask the store.
    Ask(Ask),
    /// Start an attempt.
    Start {
        /// The attempt.
        attempt: Box<Attempt>,
        /// Whether to send [`Input::Started`].
        tell: bool,
    },
    /// End an attempt.
    Stop {
        /// Of which run.
        run: RunId,
        /// Under which claim.
        epoch: Epoch,
        /// Why.
        stop: Stop,
    },
    /// Tell the keeper that the lease is good from this monotonic time on.
    TellKeeper {
        /// When the lease was asked for.
        asked: Duration,
    },
    /// Join anew under another id.
    Join {
        /// The id.
        node: NodeId,
        /// The id that it had.
        left: NodeId,
        /// The first lease.
        until: Timestamp,
        /// Whether it takes no new work.
        draining: bool,
    },
    /// Read the nodes, and look at their processes.
    ReadNodes,
    /// End what a gone node has left on this host, then fence it.
    Fence {
        /// Who.
        node: NodeId,
        /// The lease it was seen with.
        lease: Timestamp,
        /// Where the records of its children are, if it ran on this system.
        state_dir: Option<String>,
        /// Whether its lease has lapsed. Otherwise it is fenced only if all that it left has ended.
        is_lapsed: bool,
    },
    /// Say that this node lives, and what it and its machine do.
    Beat(Beat),
    /// Tell what happened.
    Note(Box<Event>),
    /// All has ended.
    Stopped {
        /// What was still running when the time was up.
        overrun: usize,
    },
}

/// One loop: an effect of it is under way, or it may ask again from some moment on.
#[derive(Debug, Clone, Copy, Default)]
struct Loop {
    busy: bool,
    at: Duration,
    /// Something came up while it was busy: what it is about to learn may be old.
    again: bool,
}

impl Loop {
    /// Idle until an instant.
    fn from(at: Duration) -> Loop {
        Loop { busy: false, at, again: false }
    }

    /// It should ask now; where it is busy, as soon as it is not.
    fn wake(&mut self, now: Now) {
        self.again |= self.busy;
        self.at = now.mono;
    }

    /// An answer has come; it asks again at an instant, or now where something came up meanwhile.
    fn rest(&mut self, now: Now, until: Duration) {
        *self = Loop::from(if self.again { now.mono } else { until });
    }

    fn is_due(&self, now: Now) -> bool {
        !self.busy && self.at <= now.mono
    }
}

/// Whether a run that came back from a dead node holds back the next such run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rescue {
    /// It does not.
    Over,
    /// Its program or handler has not started here yet.
    Starting {
        /// It may have killed a node.
        suspect: bool,
    },
    /// A suspect that has started then: it is watched until the lease is renewed.
    Watched {
        /// When it had started.
        since: Duration,
    },
}

/// A run of ours.
#[derive(Debug)]
struct Task {
    epoch: Epoch,
    attempt: u32,
    max_attempts: u32,
    lane: String,
    session: Option<String>,
    tick_at: Option<Timestamp>,
    started: Duration,
    definitions: Definitions,
    command: String,
    trace: Uuid,
    rescue: Rescue,
    stopping: bool,
    ended: bool,
}

/// A finish that waits to be stored, with what its event will say.
#[derive(Debug)]
struct Ending {
    finish: Finish,
    took: Duration,
    /// Why the run goes back uncounted, where it does.
    returned: &'static str,
}

/// Plans that are being committed, with the names of their schedules.
type Committing = (Arc<Vec<Commit>>, Vec<Arc<str>>);

/// Where a node is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It works.
    Running,
    /// It lets what runs end, until then.
    Draining {
        /// When it ends what runs.
        until: Duration,
    },
    /// It has told what runs to end.
    Ending {
        /// How much was running when the time was up.
        overrun: usize,
        /// Until when the ends of attempts are tried to be stored.
        give_up: Duration,
    },
    /// All has ended.
    Stopped,
}

/// What a node has done so far.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counters {
    /// How often due schedules were looked for.
    pub checks: u64,
    /// When, last.
    pub last_check_at: Option<Timestamp>,
    /// Attempts started.
    pub triggers: u64,
}

/// Every loop of a node.
pub struct Driver {
    options: Options,
    node: NodeId,
    phase: Phase,
    /// It is marked to take no new work; it stays up.
    draining: bool,
    /// The id under which it has joined last.
    joined_as: NodeId,
    /// Makes ids: of runs, and of this node should it be fenced.
    new_id: Box<dyn FnMut(Timestamp) -> Uuid + Send>,
    planner: Loop,
    next_due: Option<Timestamp>,
    committing: Option<Committing>,
    /// Batches of this pass of which something was written.
    ahead: u32,
    dispatcher: Loop,
    claim_wanted: bool,
    /// What was asked for last was asked for as a node that is fenced since: it is not ours.
    is_claim_old: bool,
    /// There was no free slot when it last wanted to claim.
    is_full: bool,
    /// How many claims were answered, and which of them was the last with a run of a lane.
    claims: u64,
    last_claims: BTreeMap<String, u64>,
    lanes: Loop,
    /// Slots by lane: what the options say, and what was said since. Those of a lane that was removed stay for the runs that
    /// wait there.
    slots: BTreeMap<String, u32>,
    /// Lanes among these that were removed: no run is made there.
    removed_lanes: BTreeSet<String>,
    /// Lanes among these that nobody made, and in which runs were left: no run is made there.
    stray_lanes: BTreeSet<String>,
    /// Limits of lanes, once they were read.
    limits: Option<Limits>,
    /// Schedules that this version cannot read, as far as that was told.
    unreadable: HashSet<ScheduleId>,
    /// Rows of which a part cannot be read, as far as that was told, and when they are looked for next.
    unreadable_rows: (HashSet<String>, Duration),
    /// When runs may start that wait for their time, as far as this node knows: at most [`LATER_MAX`].
    later: BTreeSet<Timestamp>,
    tasks: BTreeMap<RunId, Task>,
    finisher: Loop,
    endings: VecDeque<Ending>,
    finishing: Vec<Ending>,
    /// Ends that the store refused in every form or that were locked, each with when it is tried again, the next first.
    refused_ends: VecDeque<(Duration, Ending)>,
    renewer: Loop,
    lease_until: Timestamp,
    lease_good: Duration,
    strays: BTreeSet<(RunId, Epoch)>,
    /// False after it was fenced, until it has joined under another id: then the renewer asks to join.
    is_joined: bool,
    /// Calls of [`Ask::GiveBack`] that are under way.
    giving_back: u32,
    marker: Loop,
    /// It was told to drain, or not to, while its marks were being read.
    drain_told: bool,
    beater: Loop,
    reaper: Loop,
    observed: HashMap<NodeId, (Timestamp, Duration)>,
    /// Nodes that were gone at the first look and are not fenced yet; none before that look. Nothing is claimed meanwhile: runs
    /// of theirs have their places before those that wait.
    unfenced: Option<BTreeSet<NodeId>>,
    /// The last claim left rescued runs out, because a renewal was near: after that it is asked again.
    claims_after_renewal: bool,
    /// From when on this node has lived for long enough to start suspects.
    steady_at: Duration,
    /// When the last attempt was started here.
    last_start: Option<Duration>,
    /// From when on the next suspect may start: others have a turn between two of them.
    suspects_from: Duration,
    /// A suspect was given back because another attempt had just been started: nothing starts before the suspect.
    suspect_waits: bool,
    pruner: Loop,
    /// Where looking for runs beyond their number goes on.
    prune_after: Option<RunId>,
    /// Of breakers, by agent and command: when they were seen closed.
    breakers: HashMap<(Arc<str>, String), Timestamp>,
    /// Agents whose failure budget was told to be used up, with the beginning of the period.
    exhausted: HashMap<Arc<str>, Timestamp>,
    /// Wall-clock time less monotonic time, at the last step.
    clock_offset: SignedDuration,
    health: Health,
    counters: Counters,
    effects: Vec<Effect>,
}

/// More instants than this are not remembered; the poll finds the rest.
const LATER_MAX: usize = 4096;
/// So many batches of due schedules are planned in one pass, each read behind the one before; then from the front again,
/// where something may have come up. Batches of which nothing could be written do not count.
const AHEAD_MAX: u32 = 20;
/// Ends that are stored at once.
const FINISH_MAX: usize = 1000;
/// How often an end that the store refuses is tried again.
const REFUSED_EVERY: Duration = Duration::from_secs(30);
/// How often an end is tried again whose rows another transaction holds.
const LOCKED_EVERY: Duration = Duration::from_secs(3);
/// Runs that are claimed at once in one lane.
const CLAIM_MAX: u32 = 1000;
/// Things that are pruned at once.
const PRUNE_BATCH: u32 = 500;
/// How long a node that stops waits for a store that does not answer: asked once, and asked again.
const GIVE_UP: Duration = Duration::from_secs(10);
const GIVE_UP_SOON: Duration = Duration::from_millis(500);
/// How much longer for one that has not said that it cannot.
const SILENT: Duration = Duration::from_secs(3);
/// A change of wall-clock against monotonic time that is told: more than they drift apart between two steps.
const CLOCK_STEP: SignedDuration = SignedDuration::from_secs(10);
/// Where nothing runs and a hint has come.
const MARKS_SOON: Duration = Duration::from_millis(500);

impl Driver {
    /// A node that has joined with a lease until `lease_until`, which it asked for at `now`.
    pub fn new(
        options: Options,
        node: NodeId,
        now: Now,
        lease_until: Timestamp,
        new_id: Box<dyn FnMut(Timestamp) -> Uuid + Send>,
    ) -> Driver {
        let lease = options.lease;
        Driver {
            node,
            phase: Phase::Running,
            draining: false,
            joined_as: node,
            new_id,
            planner: Loop::from(now.mono),
            next_due: None,
            committing: None,
            ahead: 0,
            dispatcher: Loop::from(now.mono),
            claim_wanted: true,
            is_claim_old: false,
            is_full: false,
            claims: 0,
            last_claims: BTreeMap::new(),
            lanes: Loop::from(now.mono),
            slots: options
                .lanes
                .iter()
                .chain(&options.file_lanes)
                .chain(&options.own_lanes)
                .map(|(lane, slots)| (lane.clone(), *slots))
                .collect(),
            removed_lanes: BTreeSet::new(),
            stray_lanes: BTreeSet::new(),
            limits: None,
            unreadable: HashSet::new(),
            unreadable_rows: (HashSet::new(), now.mono),
            later: BTreeSet::new(),
            tasks: BTreeMap::new(),
            finisher: Loop::default(),
            endings: VecDeque::new(),
            finishing: Vec::new(),
            refused_ends: VecDeque::new(),
            renewer: Loop::from(now.mono + lease / 3),
            lease_until,
            lease_good: now.mono + lease,
            strays: BTreeSet::new(),
            is_joined: true,
            giving_back: 0,
            marker: Loop::from(now.mono + options.marks_every),
            drain_told: false,
            beater: Loop::from(now.mono),
            reaper: Loop::from(now.mono),
            observed: HashMap::new(),
            unfenced: None,
            claims_after_renewal: false,
            steady_at: now.mono + steady_after(lease),
            last_start: None,
            suspects_from: now.mono,
            suspect_waits: false,
            pruner: Loop::from(now.mono + options.prune_every),
            prune_after: None,
            exhausted: HashMap::new(),
            breakers: HashMap::new(),
            clock_offset: now.offset(),
            health: Health::default(),
            counters: Counters::default(),
            effects: Vec::new(),
            options,
        }
    }

    /// One step: takes an input in, and says what is to be done.
    pub fn step(&mut self, now: Now, input: Input) -> Vec<Effect> {
        self.look_at_clock(now);
        self.take_in(now, input);
        self.tell_health(now);
        self.finish_maybe(now);
        self.renew_maybe(now);
        let serves = self.options.serves && self.options.only.is_none();
        if self.phase == Phase::Running && serves {
            self.lanes_maybe(now);
            if !self.draining {
                self.plan_maybe(now);
                self.claim_maybe(now);
            }
            self.reap_maybe(now);
            self.prune_maybe(now);
        } else if self.phase == Phase::Running && self.options.only.is_some() {
            self.claim_maybe(now);
            self.reap_maybe(now);
        }
        self.marks_maybe(now);
        self.beat_maybe(now);
        self.stop_maybe(now);
        std::mem::take(&mut self.effects)
    }

    /// How long the caller may wait for an input before it wakes the driver.
    pub fn wait(&self, now: Now) -> Duration {
        if self.phase == Phase::Stopped {
            return self.options.check_interval;
        }
        let until = |at: Duration| at.saturating_sub(now.mono);
        let mut wait = self.options.check_interval;
        let mut at_most = |time: Duration| wait = wait.min(time);
        let is_guest = self.phase == Phase::Running && self.options.only.is_some();
        let serves = self.phase == Phase::Running && self.options.serves && !is_guest;
        let works = serves && !self.draining;
        for (each, wanted) in [
            (self.planner, works),
            (self.dispatcher, works || is_guest),
            (self.lanes, serves),
            (self.reaper, serves || is_guest),
            (self.pruner, serves),
            (self.renewer, true),
            (self.finisher, !self.endings.is_empty()),
            (self.marker, true),
            (self.beater, true),
        ] {
            if wanted && !each.busy {
                at_most(until(each.at));
            }
        }
        let from_wall =
            |at: Timestamp| Duration::try_from(at.duration_since(now.wall)).unwrap_or(Duration::ZERO);
        let answers = self.health.is_well();
        if works && answers && !self.planner.busy {
            self.next_due.into_iter().for_each(|at| at_most(from_wall(at)));
        }
        if (works || is_guest) && answers && !self.dispatcher.busy {
            self.later.first().into_iter().for_each(|at| at_most(from_wall(*at)));
        }
        self.refused_ends.front().into_iter().for_each(|(at, _)| at_most(until(*at)));
        match self.phase {
            Phase::Draining { until: at } => at_most(until(at)),
            // Whoever still runs is waited for, however long it takes.
            Phase::Ending { give_up, .. } if self.under_way() == 0 => {
                at_most(until(if now.mono < give_up { give_up } else { give_up + SILENT }));
            }
            _ => {}
        }
        wait
    }

    /// Where the node is in its life.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether it is marked to take no new work. One that stops takes none either.
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// Whether no outage of the store was told whose end was not: every kind of call has succeeded since it failed last.
    pub fn store_is_well(&self) -> bool {
        !self.health.is_away()
    }

    /// What it has done so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Who it is now.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// Attempts under way, by agent.
    pub fn running(&self) -> impl Iterator<Item = &str> {
        self.tasks.values().filter(|task| !task.ended).map(|task| &*task.definitions.agent_name)
    }

    /// Whether there is nothing to do before time passes, an attempt ends, or somebody asks.
    pub fn is_idle(&self, now: Now) -> bool {
        let loops = [
            self.planner,
            self.dispatcher,
            self.lanes,
            self.finisher,
            self.renewer,
            self.marker,
            self.reaper,
            self.pruner,
        ];
        let busy = loops.iter().any(|each| each.busy);
        let due = self.next_due.is_some_and(|at| at <= now.wall)
            || self.later.first().is_some_and(|at| *at <= now.wall);
        let wants = self.phase == Phase::Running && (self.claim_wanted || self.planner.at <= now.mono);
        let asks = !self.draining && (due || wants) || self.marker.at <= now.mono;
        !busy && !asks && self.endings.is_empty()
    }

    /// Whether nothing runs either.
    pub fn is_quiet(&self, now: Now) -> bool {
        self.is_idle(now) && self.tasks.is_empty()
    }

    fn take_in(&mut self, now: Now, input: Input) {
        match input {
            Input::Woken => {}
            Input::Hint => {
                self.planner.wake(now);
                self.marks_soon(now);
                self.lanes_soon(now);
                self.claim_wanted = true;
            }
            Input::Due { at, due, next } => self.due(now, at, due, next),
            Input::Committed { written, replaced, ahead } => {
                replaced.iter().for_each(|run| self.note(Event::ended(now.wall, run)));
                self.committed(now, written, ahead);
            }
            Input::Claimed { claimed, held, next } => self.claimed(now, claimed, &held, next),
            Input::Lanes { lanes, own, unreadable } => {
                self.lanes(now, lanes);
                self.moved(own);
                self.unreadable(now, unreadable);
            }
            Input::UnreadableRows(found) => self.unreadable_rows(now, found),
            Input::Started { run, epoch } => self.started(now, run, epoch),
            Input::Ended { run, epoch, report } => self.ended(now, run, epoch, report),
            Input::Finished(written) => self.finished(now, written),
            Input::Renewed { asked, renewed, is_held } => self.renewed(now, asked, renewed, is_held),
            Input::Joined { asked, joined } => self.joined(now, asked, joined),
            Input::GivenBack { given_back, runs } => self.given_back(now, given_back, &runs),
            Input::Marks(marks) => self.marks(now, marks),
            Input::Drain(draining) => {
                // What is being read may be older than the mark.
                self.drain_told = self.marker.busy;
                self.marker.wake(now);
                self.drain(now, draining);
            }
            Input::Nodes(nodes) => self.nodes(now, nodes),
            Input::Fenced { node, rescued, runs } => self.fenced(now, node, rescued, &runs),
            Input::Breaker { of, history } => self.breaker(now, &of, history),
            Input::Budget { agent, policy, used } => self.budget(now, agent, &policy, used),
            Input::Beaten(kept) => self.beaten(now, kept),
            Input::Pruned(pruned) => self.pruned(now, pruned),
            Input::Stop { timeout } => self.stop(now, timeout),
        }
    }

    /// Tells of a wall clock that was set.
    fn look_at_clock(&mut self, now: Now) {
        let before = std::mem::replace(&mut self.clock_offset, now.offset());
        let by = self.clock_offset - before;
        if by.abs() < CLOCK_STEP {
            return;
        }
        let state = if by.is_negative() { "back" } else { "forward" };
        let detail = format!("the clock was set {state} by {} ms", by.abs().as_millis());
        let event = Event::new(now.wall, Level::Warn, Name::ClockStepped);
        self.note(Event { state: Some(state), detail: Some(detail), ..event });
    }

    fn ask(&mut self, ask: Ask) {
        self.effects.push(Effect::Ask(ask));
    }

    fn note(&mut self, event: Event) {
        self.effects.push(Effect::Note(Box::new(event)));
    }
}

fn later(at: Timestamp, by: Duration) -> Timestamp {
    SignedDuration::try_from(by).ok().and_then(|by| at.checked_add(by).ok()).unwrap_or(Timestamp::MAX)
}

/// Nothing in a store is older. PostgreSQL does not know all the instants before it.
const EARLIEST: Timestamp = Timestamp::UNIX_EPOCH;

fn earlier(at: Timestamp, by: Duration) -> Timestamp {
    let earlier = SignedDuration::try_from(by).ok().and_then(|by| at.checked_sub(by).ok());
    earlier.unwrap_or(EARLIEST).max(EARLIEST)
}
