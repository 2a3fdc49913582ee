//! The hall: every loop of a node, and every timer of every loop, as one synchronous step.
//!
//! An input comes in through [`Driver::step`], effects go out, and their answers come back in as inputs. The order of a step:
//! take the input in, then let each loop ask for what it wants: finish, renew, cancel, plan, claim, reap, prune. Nothing is
//! awaited here, no clock is read and nothing is drawn by lot: whoever calls brings the time, and makes the ids.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use belfry_core::plan::{Next, Spread, Standing, plan, spread_catch_up};
use belfry_core::retry::{Outcome, Verdict, verdict};
use belfry_core::{Epoch, Facts, NodeId, Reason, RunId, RunState, Token};
use belfry_runner::{Attempt, Report, Stop};
use belfry_store::{
    Claim, Claimed, Commit, Definitions, Due, Error, Finish, Finished, Node, Pruned, Renewed, Rescued,
    Retention,
};
use belfry_time::{SignedDuration, Timestamp};
use uuid::Uuid;

use crate::event::{Event, Level, Name};

/// What time it is, twice: decisions look at the wall, waiting at the watch that only goes forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// By the store's clock.
    pub wall: Timestamp,
    /// Since some fixed moment.
    pub mono: Duration,
}

/// How a node works.
#[derive(Debug, Clone)]
pub struct Options {
    /// Slots by lane. Runs of a lane that is not among them go to `main`.
    pub lanes: BTreeMap<String, u32>,
    /// Runs at once over all lanes.
    pub max_concurrent: Option<u32>,
    /// Labels of this node.
    pub labels: Vec<String>,
    /// How often the clock is looked at, at least.
    pub check_interval: Duration,
    /// How often the store is asked although no hint came.
    pub poll_interval: Duration,
    /// How long claims hold without renewal.
    pub lease: Duration,
    /// How often gone nodes are looked for.
    pub orphan_check: Duration,
    /// How catch-up runs are spread.
    pub spread: Spread,
    /// How long ended things are kept.
    pub keep: Keep,
    /// Due schedules that are planned at once.
    pub batch: u32,
    /// Plans, claims and looks after others; a short-lived node does none of that but what it is told.
    pub serves: bool,
    /// A guest: a node that is there for this run alone. It plans nothing and claims nothing else, but it does look for
    /// nodes that are gone: they may hold the limit that its run waits at.
    pub only: Option<RunId>,
}

/// The label by which a guest is known among the nodes. No agent can need it: it is no name.
pub const GUEST: &str = "(guest)";

/// How long ended things are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keep {
    /// Runs.
    pub runs: Option<Duration>,
    /// Failed runs.
    pub failures: Option<Duration>,
    /// Of a schedule's runs that failed so many, and as many of the others.
    pub runs_per_schedule: Option<u32>,
    /// What runs have written.
    pub output: Option<Duration>,
    /// Skips and misses.
    pub skips: Option<Duration>,
}

impl Default for Options {
    fn default() -> Options {
        let day = Duration::from_secs(86_400);
        Options {
            lanes: default_lanes(),
            max_concurrent: None,
            labels: Vec::new(),
            check_interval: Duration::from_secs(1),
            poll_interval: Duration::from_secs(1),
            lease: Duration::from_secs(30),
            orphan_check: Duration::from_secs(10),
            spread: Spread::default(),
            keep: Keep {
                runs: Some(30 * day),
                failures: Some(90 * day),
                runs_per_schedule: Some(200),
                output: Some(7 * day),
                skips: Some(30 * day),
            },
            batch: 1000,
            serves: true,
            only: None,
        }
    }
}

/// The lanes that are always there, with their slots.
pub fn default_lanes() -> BTreeMap<String, u32> {
    [("main", 30), ("subagent", 50), ("team", 100), ("cron", 30)]
        .into_iter()
        .map(|(lane, slots)| (lane.into(), slots))
        .collect()
}

/// What comes into the hall.
#[derive(Debug)]
pub enum Input {
    /// Time has passed.
    Woken,
    /// There may be new or changed work.
    Hint,
    /// Answer to [`Effect::ReadDue`]; `next` where nothing is due.
    Due {
        /// What is due.
        due: Result<Vec<Due>, Error>,
        /// When something is due next.
        next: Option<Timestamp>,
    },
    /// Answer to [`Effect::Commit`].
    Committed(Result<Vec<bool>, Error>),
    /// Answer to [`Effect::Claim`].
    Claimed(Result<Vec<(Claimed, Option<Definitions>)>, Error>),
    /// An attempt has ended.
    Ended {
        /// Of which run.
        run: RunId,
        /// Under which claim.
        epoch: Epoch,
        /// How.
        report: Report,
    },
    /// Answer to [`Effect::Finish`].
    Finished(Result<Vec<Finished>, Error>),
    /// Answer to [`Effect::Renew`].
    Renewed {
        /// When it was asked for, by the watch.
        asked: Duration,
        /// The answer.
        renewed: Result<Renewed, Error>,
    },
    /// Answer to [`Effect::ReadCancels`].
    Cancels(Result<Vec<(RunId, Epoch, Reason)>, Error>),
    /// Answer to [`Effect::ReadNodes`]. A node is `gone` where its process surely is.
    Nodes(Result<Vec<(Node, bool)>, Error>),
    /// Answer to [`Effect::Fence`].
    Fenced {
        /// Who.
        node: NodeId,
        /// The answer.
        rescued: Result<Option<Rescued>, Error>,
    },
    /// Answer to [`Effect::Prune`].
    Pruned(Result<Pruned, Error>),
    /// Stop: plan and claim no more, let what runs end within `timeout`, then end it. Said again: at once.
    Stop {
        /// How long.
        timeout: Duration,
    },
}

/// What the outside is asked to do.
#[derive(Debug)]
pub enum Effect {
    /// Read due schedules.
    ReadDue {
        /// At most so many.
        limit: u32,
    },
    /// Commit plans.
    Commit(Arc<Vec<Commit>>),
    /// Claim runs, and read what they are runs of.
    Claim(Claim),
    /// Start an attempt.
    Start(Box<Attempt>),
    /// End an attempt.
    Stop {
        /// Of which run.
        run: RunId,
        /// Why.
        stop: Stop,
    },
    /// Store the ends of attempts.
    Finish(Arc<Vec<Finish>>),
    /// Extend the lease.
    Renew {
        /// Whose.
        node: NodeId,
        /// Until then.
        until: Timestamp,
    },
    /// Join anew under another id.
    Join {
        /// The id.
        node: NodeId,
        /// The first lease.
        until: Timestamp,
    },
    /// Read which of our runs are to be cancelled.
    ReadCancels(NodeId),
    /// Give runs back that were claimed for us and never started.
    GiveBack(NodeId, Vec<(RunId, Epoch)>),
    /// Read the nodes.
    ReadNodes,
    /// End what a gone node has left on this host, then fence it.
    Fence {
        /// Who.
        node: NodeId,
        /// The lease it was seen with.
        lease: Timestamp,
    },
    /// Remove what is older than its retention.
    Prune(Retention),
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

/// A run of ours.
#[derive(Debug)]
struct Task {
    epoch: Epoch,
    attempt: u32,
    max_attempts: u32,
    lane: String,
    tick_at: Option<Timestamp>,
    started: Duration,
    definitions: Definitions,
    trace: Uuid,
    stopping: bool,
    ended: bool,
}

/// A finish that waits to be stored, with what its event will say.
#[derive(Debug)]
struct Ending {
    finish: Finish,
    took: Duration,
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
    /// Makes ids: of runs, and of this node should it be fenced.
    new_id: Box<dyn FnMut(Timestamp) -> Uuid + Send>,
    planner: Loop,
    next_due: Option<Timestamp>,
    committing: Option<Committing>,
    dispatcher: Loop,
    claim_wanted: bool,
    lane_turn: usize,
    /// When runs may start that wait for their time, as far as this node knows: at most [`LATER_MAX`].
    later: BTreeSet<Timestamp>,
    tasks: HashMap<RunId, Task>,
    finisher: Loop,
    endings: VecDeque<Ending>,
    finishing: Vec<Ending>,
    renewer: Loop,
    lease_until: Timestamp,
    lease_good: Duration,
    strays: HashSet<(RunId, Epoch)>,
    canceller: Loop,
    reaper: Loop,
    observed: HashMap<NodeId, (Timestamp, Duration)>,
    pruner: Loop,
    /// Where looking for runs beyond their number goes on.
    prune_after: Option<RunId>,
    failures: u32,
    counters: Counters,
    effects: Vec<Effect>,
}

/// More instants than this are not remembered; the poll finds the rest.
const LATER_MAX: usize = 4096;
/// Ends that are stored at once.
const FINISH_MAX: usize = 1000;
/// Runs that are claimed at once in one lane.
const CLAIM_MAX: u32 = 1000;
/// Things that are pruned at once.
const PRUNE_BATCH: u32 = 500;
const PRUNE_EVERY: Duration = Duration::from_secs(60);
/// How long a node that stops waits for a store that does not answer: asked once, and asked again.
const GIVE_UP: Duration = Duration::from_secs(10);
const GIVE_UP_SOON: Duration = Duration::from_millis(500);
/// How much longer for one that has not said that it cannot.
const SILENT: Duration = Duration::from_secs(3);
const CANCELS_EVERY: Duration = Duration::from_secs(1);

impl Driver {
    /// A node that has joined with a lease until `lease_until`.
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
            new_id,
            planner: Loop::from(now.mono),
            next_due: None,
            committing: None,
            dispatcher: Loop::from(now.mono),
            claim_wanted: true,
            lane_turn: 0,
            later: BTreeSet::new(),
            tasks: HashMap::new(),
            finisher: Loop::default(),
            endings: VecDeque::new(),
            finishing: Vec::new(),
            renewer: Loop::from(now.mono + lease / 3),
            lease_until,
            lease_good: now.mono + lease,
            strays: HashSet::new(),
            canceller: Loop::from(now.mono + CANCELS_EVERY),
            reaper: Loop::from(now.mono),
            observed: HashMap::new(),
            pruner: Loop::from(now.mono + PRUNE_EVERY),
            prune_after: None,
            failures: 0,
            counters: Counters::default(),
            effects: Vec::new(),
            options,
        }
    }

    /// One step: takes an input in, and says what is to be done.
    pub fn step(&mut self, now: Now, input: Input) -> Vec<Effect> {
        self.take_in(now, input);
        self.finish_maybe(now);
        self.renew_maybe(now);
        let serves = self.options.serves && self.options.only.is_none();
        if self.phase == Phase::Running && serves {
            self.plan_maybe(now);
            self.claim_maybe(now);
            self.reap_maybe(now);
            self.prune_maybe(now);
        } else if self.phase == Phase::Running && self.options.only.is_some() {
            self.claim_maybe(now);
            self.reap_maybe(now);
        }
        self.cancels_maybe(now);
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
        for (each, wanted) in [
            (self.planner, serves),
            (self.dispatcher, serves || is_guest),
            (self.reaper, serves || is_guest),
            (self.pruner, serves),
            (self.renewer, true),
            (self.finisher, !self.endings.is_empty()),
            (self.canceller, !self.tasks.is_empty()),
        ] {
            if wanted && !each.busy {
                at_most(until(each.at));
            }
        }
        let from_wall =
            |at: Timestamp| Duration::try_from(at.duration_since(now.wall)).unwrap_or(Duration::ZERO);
        let answers = self.failures == 0;
        if serves && answers && !self.planner.busy {
            self.next_due.into_iter().for_each(|at| at_most(from_wall(at)));
        }
        if (serves || is_guest) && answers && !self.dispatcher.busy {
            self.later.first().into_iter().for_each(|at| at_most(from_wall(*at)));
        }
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

    /// What it has done so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Who it is now.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// The lease it has, as stored.
    pub fn lease_until(&self) -> Timestamp {
        self.lease_until
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
            self.finisher,
            self.renewer,
            self.canceller,
            self.reaper,
            self.pruner,
        ];
        let busy = loops.iter().any(|each| each.busy);
        let due = self.next_due.is_some_and(|at| at <= now.wall)
            || self.later.first().is_some_and(|at| *at <= now.wall);
        let asks = self.phase == Phase::Running && (self.claim_wanted || self.planner.at <= now.mono)
            || !self.tasks.is_empty() && self.canceller.at <= now.mono;
        !busy && !due && !asks && self.endings.is_empty()
    }

    /// Whether nothing runs either.
    pub fn is_quiet(&self, now: Now) -> bool {
        self.is_idle(now) && self.tasks.is_empty()
    }

    /// Starts runs that were claimed for this node from outside the dispatcher.
    pub fn adopt(&mut self, now: Now, claimed: Vec<(Claimed, Option<Definitions>)>) -> Vec<Effect> {
        for (claimed, definitions) in claimed {
            self.start(now, claimed, definitions);
        }
        std::mem::take(&mut self.effects)
    }

    fn take_in(&mut self, now: Now, input: Input) {
        match input {
            Input::Woken => {}
            Input::Hint => {
                self.planner.wake(now);
                self.canceller.wake(now);
                self.claim_wanted = true;
            }
            Input::Due { due, next } => self.due(now, due, next),
            Input::Committed(committed) => self.committed(now, committed),
            Input::Claimed(claimed) => self.claimed(now, claimed),
            Input::Ended { run, epoch, report } => self.ended(now, run, epoch, report),
            Input::Finished(finished) => self.finished(now, finished),
            Input::Renewed { asked, renewed } => self.renewed(now, asked, renewed),
            Input::Cancels(cancels) => {
                self.canceller.rest(now, now.mono + CANCELS_EVERY);
                if let Some(cancels) = self.answered(now, cancels) {
                    cancels.into_iter().for_each(|(run, epoch, reason)| self.cancel(run, epoch, reason));
                }
            }
            Input::Nodes(nodes) => self.nodes(now, nodes),
            Input::Fenced { node, rescued } => self.fenced(now, node, rescued),
            Input::Pruned(pruned) => self.pruned(now, pruned),
            Input::Stop { timeout } => self.stop(now, timeout),
        }
    }

    // The planner.

    fn plan_maybe(&mut self, now: Now) {
        // While the store does not answer, `at` alone says when to ask again.
        let due = self.failures == 0 && self.next_due.is_some_and(|at| at <= now.wall);
        if !self.planner.busy && (due || self.planner.at <= now.mono) {
            self.planner.busy = true;
            self.next_due = None;
            self.counters.checks += 1;
            self.counters.last_check_at = Some(now.wall);
            self.effects.push(Effect::ReadDue { limit: self.options.batch });
        }
    }

    fn due(&mut self, now: Now, due: Result<Vec<Due>, Error>, next: Option<Timestamp>) {
        self.planner.rest(now, now.mono + self.options.poll_interval);
        let Some(due) = self.answered(now, due) else {
            self.planner.at = now.mono + self.backoff();
            return;
        };
        self.next_due = next;
        if due.is_empty() {
            return;
        }
        let commits = self.decide(now.wall, &due);
        let commits = Arc::new(commits);
        self.committing = Some((commits.clone(), due.into_iter().map(|due| due.name).collect()));
        self.planner.busy = true;
        self.effects.push(Effect::Commit(commits));
    }

    /// Plans what is due.
    fn decide(&mut self, now: Timestamp, due: &[Due]) -> Vec<Commit> {
        let mut plans: Vec<_> = due
            .iter()
            .map(|due| {
                due.compiled.as_ref().map(|schedule| plan(schedule, &due.standing, &due.facts(now), now))
            })
            .collect();
        let mut named: Vec<_> = due
            .iter()
            .zip(&mut plans)
            .filter_map(|(due, plan)| Some((&*due.name, plan.as_mut().ok()?)))
            .collect();
        spread_catch_up(&mut named, self.options.spread);
        let new_id = &mut self.new_id;
        let mut commits: Vec<Commit> = due
            .iter()
            .zip(plans)
            .map(|(due, plan)| match (&due.compiled, plan) {
                (Ok(schedule), Ok(plan)) => due.commit(schedule, plan, || RunId(new_id(now))),
                (Err(reason), _) | (_, Err(reason)) => due.invalid(reason),
            })
            .collect();
        for run in commits.iter_mut().flat_map(|commit| &mut commit.runs) {
            self.options.to_known_lane(&mut run.lane);
        }
        commits
    }

    fn committed(&mut self, now: Now, committed: Result<Vec<bool>, Error>) {
        // Look again: there may be more.
        self.planner.rest(now, now.mono);
        let committing = self.committing.take();
        let Some(committed) = self.answered(now, committed) else {
            self.planner.at = now.mono + self.backoff();
            return;
        };
        let Some((commits, names)) = committing else { return };
        if !committed.contains(&true) {
            // Others plan the same: let them.
            self.planner.at = now.mono + Duration::from_millis(5);
        }
        for ((commit, name), _) in commits.iter().zip(&names).zip(&committed).filter(|(_, done)| **done) {
            self.note_plan(now.wall, commit, name);
            if commit.cancel_live {
                self.canceller.wake(now);
            }
            for run in &commit.runs {
                self.wake_for(now, run.not_before);
            }
        }
    }

    fn note_plan(&mut self, now: Timestamp, commit: &Commit, name: &str) {
        if let Some(reason) = &commit.invalid {
            let event = Event::new(now, Level::Warn, Name::TickSkipped).of(name);
            self.note(Event { reason: Some("invalid".into()), detail: Some(reason.clone()), ..event });
        }
        for range in &commit.closed {
            if range.reason.is_missed() {
                let event = Event::new(now, Level::Warn, Name::TickMissed).of(name);
                self.note(Event {
                    reason: Some(range.reason.as_str().into()),
                    tick_at: Some(range.to),
                    count: Some(range.count),
                    ..event
                });
            }
        }
        if let Some(open) = commit.open_skip
            && open.to == commit.token.tick_at
        {
            let level = if open.count == 1 { Level::Info } else { Level::Debug };
            let event = Event::new(now, level, Name::TickSkipped).of(name);
            self.note(Event {
                reason: Some(open.reason.as_str().into()),
                tick_at: Some(open.to),
                count: Some(open.count),
                ..event
            });
        }
        for run in &commit.runs {
            let event = Event::new(now, Level::Debug, Name::TickPlanned).of(name);
            self.note(Event { tick_at: run.tick_at, run_id: Some(run.id), ..event });
        }
    }

    // The dispatcher.

    /// A run may start at an instant: now, or at a moment to wake up for.
    fn wake_for(&mut self, now: Now, not_before: Timestamp) {
        if not_before <= now.wall {
            self.claim_wanted = true;
        } else if self.later.len() < LATER_MAX {
            self.later.insert(not_before);
        }
    }

    fn claim_maybe(&mut self, now: Now) {
        while self.later.first().is_some_and(|at| *at <= now.wall) {
            self.later.pop_first();
            self.claim_wanted = true;
        }
        let wanted = (self.claim_wanted && self.failures == 0) || self.dispatcher.at <= now.mono;
        if !wanted || self.dispatcher.busy {
            return;
        }
        if !self.holds_lease(now) {
            // The answer to a renewal asks again.
            self.dispatcher.at = now.mono + self.options.lease / 10;
            return;
        }
        let only = self.options.only;
        let lanes = if only.is_some() { Vec::new() } else { self.free_slots() };
        let has_room = if only.is_some() { self.tasks.is_empty() } else { !lanes.is_empty() };
        if !has_room {
            // The end of an attempt makes room, and asks again.
            self.dispatcher.at = now.mono + self.options.poll_interval;
            return;
        }
        self.claim_wanted = false;
        self.dispatcher.busy = true;
        self.effects.push(Effect::Claim(Claim {
            node: self.node,
            lanes,
            labels: self.options.labels.clone(),
            only,
        }));
    }

    /// Free slots by lane, in turn, within the limit over all lanes.
    fn free_slots(&mut self) -> Vec<(String, u32)> {
        let mut used: HashMap<&str, u32> = HashMap::new();
        for task in self.tasks.values().filter(|task| !task.ended) {
            *used.entry(&task.lane).or_default() += 1;
        }
        let total: u32 = used.values().sum();
        let mut left = self.options.max_concurrent.map_or(u32::MAX, |max| max.saturating_sub(total));
        let lanes = self.options.lanes.len().max(1);
        self.lane_turn = (self.lane_turn + 1) % lanes;
        let mut free = Vec::with_capacity(lanes);
        for (lane, slots) in self.options.lanes.iter().cycle().skip(self.lane_turn).take(lanes) {
            let taken = used.get(lane.as_str()).copied().unwrap_or(0);
            let slots = slots.saturating_sub(taken).min(CLAIM_MAX).min(left);
            if slots > 0 {
                left = left.saturating_sub(slots);
                free.push((lane.clone(), slots));
            }
        }
        free
    }

    fn claimed(&mut self, now: Now, claimed: Result<Vec<(Claimed, Option<Definitions>)>, Error>) {
        self.dispatcher.rest(now, now.mono + self.options.poll_interval);
        let Some(claimed) = self.answered(now, claimed) else {
            self.dispatcher.at = now.mono + self.backoff();
            self.claim_wanted = true;
            return;
        };
        // Where there was something there may be more.
        self.claim_wanted |= !claimed.is_empty();
        // Nothing starts that would have to be ended at once: the node may have been frozen since it asked.
        if self.phase != Phase::Running || !self.holds_lease(now) {
            let runs = claimed.iter().map(|(claimed, _)| (claimed.run, claimed.epoch)).collect();
            self.effects.push(Effect::GiveBack(self.node, runs));
            return;
        }
        for (claimed, definitions) in claimed {
            self.start(now, claimed, definitions);
        }
    }

    fn start(&mut self, now: Now, claimed: Claimed, definitions: Option<Definitions>) {
        let Some(definitions) = definitions else {
            // Its schedule is unknown: nobody can say what to start.
            self.endings.push_back(Ending {
                finish: Finish {
                    run: claimed.run,
                    epoch: claimed.epoch,
                    verdict: Verdict::End {
                        state: RunState::Cancelled,
                        reason: Some(Reason::ScheduleRemoved),
                    },
                    failed: false,
                    exit_code: None,
                    error: None,
                    summary: None,
                    arm: None,
                },
                took: Duration::ZERO,
            });
            return;
        };
        let trace = claimed.trace_id.unwrap_or(claimed.run.0);
        let (_, schedule) = definitions.name.split_once('/').unwrap_or(("", &definitions.name));
        let attempt = Attempt {
            run: claimed.run,
            epoch: claimed.epoch,
            attempt: claimed.attempt,
            node: self.node,
            agent: definitions.agent_name.clone(),
            schedule: schedule.into(),
            command: claimed.command,
            tick_at: claimed.tick_at,
            prompt: claimed.prompt,
            payload: claimed.payload,
            trace_id: trace,
            work: Arc::new(definitions.agent_definition.work.clone()),
        };
        let lag = claimed.tick_at.map(|tick| now.wall.duration_since(tick).as_millis().max(0) as u64);
        let event = Event::new(now.wall, Level::Info, Name::RunStarted).of(&definitions.name);
        self.note(Event {
            tick_at: claimed.tick_at,
            run_id: Some(claimed.run),
            attempt: Some(claimed.attempt),
            node: Some(self.node),
            trace_id: Some(trace.simple().to_string()),
            reason: Some(claimed.trigger.as_str().into()),
            lag_ms: lag,
            ..event
        });
        self.tasks.insert(
            claimed.run,
            Task {
                epoch: claimed.epoch,
                attempt: claimed.attempt,
                max_attempts: claimed.max_attempts,
                lane: claimed.lane,
                tick_at: claimed.tick_at,
                started: now.mono,
                definitions,
                trace,
                stopping: false,
                ended: false,
            },
        );
        self.counters.triggers += 1;
        self.effects.push(Effect::Start(Box::new(attempt)));
    }

    // The end of attempts.

    fn ended(&mut self, now: Now, run: RunId, epoch: Epoch, report: Report) {
        let Some(task) = self.tasks.get_mut(&run).filter(|task| task.epoch == epoch) else { return };
        task.ended = true;
        let retry = &task.definitions.agent_definition.retry;
        let verdict = verdict(report.outcome, run, task.attempt, task.max_attempts, retry, now.wall);
        let finish = Finish {
            run,
            epoch,
            verdict,
            failed: matches!(report.outcome, Outcome::Failed { .. }),
            exit_code: report.exit_code,
            error: report.error,
            summary: report.summary,
            arm: task.arm(now.wall),
        };
        let took = now.mono.saturating_sub(task.started);
        self.endings.push_back(Ending { finish, took });
    }

    fn finish_maybe(&mut self, now: Now) {
        if self.finisher.is_due(now) && !self.endings.is_empty() {
            self.finisher.busy = true;
            let count = self.endings.len().min(FINISH_MAX);
            self.finishing = self.endings.drain(..count).collect();
            let finishes = self.finishing.iter().map(|ending| ending.finish.clone()).collect();
            self.effects.push(Effect::Finish(Arc::new(finishes)));
        }
    }

    fn finished(&mut self, now: Now, finished: Result<Vec<Finished>, Error>) {
        self.finisher.rest(now, now.mono);
        let endings = std::mem::take(&mut self.finishing);
        let Some(finished) = self.answered(now, finished) else {
            // An end is repeated until it is answered.
            self.finisher.at = now.mono + self.backoff();
            endings.into_iter().rev().for_each(|ending| self.endings.push_front(ending));
            return;
        };
        self.claim_wanted = true;
        for (ending, finished) in endings.into_iter().zip(finished) {
            let Some(task) = self.tasks.remove(&ending.finish.run) else { continue };
            // The end of a run may have armed its schedule.
            match ending.finish.arm {
                Some(token) if !self.planner.busy => {
                    self.next_due = Some(self.next_due.map_or(token.due_at, |at| at.min(token.due_at)));
                }
                None if !task.waits() => {}
                // What the planner is about to learn may be older than this.
                Some(_) | None => self.planner.wake(now),
            }
            self.note_end(now, &task, ending, finished);
        }
    }

    fn note_end(&mut self, now: Now, task: &Task, ending: Ending, finished: Finished) {
        let (name, state, retry_at) = match (finished, ending.finish.verdict) {
            (Finished::Ended(RunState::Cancelled), _) => (Name::RunCancelled, Some("cancelled"), None),
            (Finished::Ended(state), _) => (Name::RunFinished, Some(state.as_str()), None),
            (Finished::Pending, Verdict::Retry { at }) => {
                self.wake_for(now, at);
                (Name::RunRetried, Some("pending"), Some(at))
            }
            (Finished::Pending, _) => (Name::RunRetried, Some("pending"), None),
            (Finished::Stale, _) => (Name::RunRescued, None, None),
        };
        let failed = ending.finish.failed || finished == Finished::Stale;
        let level = if failed { Level::Warn } else { Level::Info };
        let reason = match (finished, ending.finish.verdict) {
            (Finished::Stale, _) => Some("stale"),
            (_, Verdict::End { reason, .. }) => reason.map(Reason::as_str),
            (_, Verdict::Return) => Some("shutdown"),
            (_, Verdict::Retry { .. }) => Some("failed"),
        };
        let event = Event::new(now.wall, level, name).of(&task.definitions.name);
        self.note(Event {
            tick_at: task.tick_at,
            run_id: Some(ending.finish.run),
            attempt: Some(task.attempt),
            node: Some(self.node),
            trace_id: Some(task.trace.simple().to_string()),
            state,
            reason: reason.map(str::to_owned),
            took_ms: Some(ending.took.as_millis() as u64),
            retry_at,
            detail: ending.finish.error.or(ending.finish.summary),
            ..event
        });
    }

    // The lease.

    fn renew_maybe(&mut self, now: Now) {
        if self.phase != Phase::Stopped && self.renewer.is_due(now) {
            self.renewer.busy = true;
            let until = later(now.wall, self.options.lease);
            self.lease_until = self.lease_until.max(until);
            self.effects.push(Effect::Renew { node: self.node, until });
        }
        // Nobody may be running here when others take over.
        if !self.holds_lease(now) {
            self.stop_all(Stop::LeaseLost);
        }
    }

    /// Whether others surely wait for longer than it takes to end what runs here.
    fn holds_lease(&self, now: Now) -> bool {
        now.mono + self.options.lease / 6 < self.lease_good
    }

    fn renewed(&mut self, now: Now, asked: Duration, renewed: Result<Renewed, Error>) {
        self.renewer.rest(now, asked + self.options.lease / 3);
        let Some(renewed) = self.answered(now, renewed) else {
            self.renewer.at = now.mono + self.backoff();
            return;
        };
        match renewed {
            Renewed::Held { cancels, live } => {
                self.lease_good = asked + self.options.lease;
                cancels.into_iter().for_each(|(run, epoch, reason)| self.cancel(run, epoch, reason));
                self.return_strays(live);
            }
            Renewed::Fenced => self.start_over(now),
        }
    }

    /// Runs that are ours by the store and not by us were never started: their claim's answer was lost. Those seen twice go
    /// back; the answer for the others may still be on its way.
    fn return_strays(&mut self, live: Vec<(RunId, Epoch)>) {
        let unknown: HashSet<_> = live
            .into_iter()
            .filter(|(run, epoch)| self.tasks.get(run).is_none_or(|task| task.epoch != *epoch))
            .collect();
        let waiting: HashSet<RunId> =
            self.endings.iter().chain(&self.finishing).map(|ending| ending.finish.run).collect();
        let lost: Vec<_> = unknown
            .iter()
            .filter(|stray| self.strays.contains(*stray) && !waiting.contains(&stray.0))
            .copied()
            .collect();
        self.strays = unknown;
        if !lost.is_empty() && !self.dispatcher.busy {
            self.effects.push(Effect::GiveBack(self.node, lost));
        }
    }

    /// Others have taken our runs: end everything, and begin as another node.
    fn start_over(&mut self, now: Now) {
        let event = Event::new(now.wall, Level::Error, Name::NodeFenced);
        self.note(Event {
            node: Some(self.node),
            detail: Some("the lease was lost; what ran here is ended and runs elsewhere".into()),
            ..event
        });
        self.stop_all(Stop::LeaseLost);
        self.tasks.clear();
        self.endings.clear();
        self.strays.clear();
        self.node = NodeId((self.new_id)(now.wall));
        self.lease_until = later(now.wall, self.options.lease);
        self.lease_good = now.mono + self.options.lease;
        self.effects.push(Effect::Join { node: self.node, until: self.lease_until });
    }

    // Cancelling.

    fn cancels_maybe(&mut self, now: Now) {
        if self.canceller.is_due(now) && !self.tasks.is_empty() {
            self.canceller.busy = true;
            self.effects.push(Effect::ReadCancels(self.node));
        }
    }

    fn cancel(&mut self, run: RunId, epoch: Epoch, reason: Reason) {
        if let Some(task) = self.tasks.get_mut(&run)
            && task.epoch == epoch
            && !task.stopping
            && !task.ended
        {
            task.stopping = true;
            self.effects.push(Effect::Stop { run, stop: Stop::Cancel(reason) });
        }
    }

    fn stop_all(&mut self, stop: Stop) {
        for (run, task) in &mut self.tasks {
            if !task.ended && (!task.stopping || stop.is_at_once()) {
                task.stopping = true;
                self.effects.push(Effect::Stop { run: *run, stop });
            }
        }
    }

    // Others.

    fn reap_maybe(&mut self, now: Now) {
        if self.reaper.is_due(now) {
            self.reaper.busy = true;
            self.effects.push(Effect::ReadNodes);
        }
    }

    fn nodes(&mut self, now: Now, nodes: Result<Vec<(Node, bool)>, Error>) {
        self.reaper = Loop::from(now.mono + self.options.orphan_check.min(self.options.lease / 3));
        let Some(nodes) = self.answered(now, nodes) else { return };
        self.observed.retain(|id, _| nodes.iter().any(|(node, _)| node.id == *id));
        for (node, gone) in nodes.into_iter().filter(|(node, _)| node.id != self.node) {
            let seen = self.observed.entry(node.id).or_insert((node.lease_until, now.mono));
            if seen.0 != node.lease_until {
                *seen = (node.lease_until, now.mono);
            }
            // By the store's clock it lapsed, and by our watch nobody renewed it for as long.
            let lapsed = node.lease_until < now.wall && now.mono >= seen.1 + self.options.lease;
            if gone || lapsed {
                self.effects.push(Effect::Fence { node: node.id, lease: node.lease_until });
            }
        }
    }

    fn fenced(&mut self, now: Now, node: NodeId, rescued: Result<Option<Rescued>, Error>) {
        let Some(rescued) = self.answered(now, rescued) else { return };
        let Some(rescued) = rescued else { return };
        self.observed.remove(&node);
        self.claim_wanted = true;
        self.planner.wake(now);
        let count = rescued.pending.len() + rescued.ended.len();
        let event = Event::new(now.wall, Level::Warn, Name::NodeFenced);
        self.note(Event { node: Some(node), count: Some(count as u64), ..event });
        let ended = rescued.ended.iter().map(|(run, state)| (*run, state.as_str()));
        let pending = rescued.pending.iter().map(|run| (*run, RunState::Pending.as_str()));
        for (run, state) in pending.chain(ended).collect::<Vec<_>>() {
            let event = Event::new(now.wall, Level::Warn, Name::RunRescued);
            self.note(Event { run_id: Some(run), state: Some(state), node: Some(node), ..event });
        }
    }

    fn prune_maybe(&mut self, now: Now) {
        if self.pruner.is_due(now) {
            self.pruner.busy = true;
            let before = |keep: Option<Duration>| keep.map_or(Timestamp::MIN, |keep| earlier(now.wall, keep));
            let keep = self.options.keep;
            self.effects.push(Effect::Prune(Retention {
                runs_before: before(keep.runs),
                failures_before: before(keep.failures),
                runs_per_schedule: keep.runs_per_schedule,
                after: self.prune_after,
                skips_before: before(keep.skips),
                output_before: before(keep.output),
                batch: PRUNE_BATCH,
            }));
        }
    }

    fn pruned(&mut self, now: Now, pruned: Result<Pruned, Error>) {
        self.pruner.rest(now, now.mono + PRUNE_EVERY);
        let Some(pruned) = self.answered(now, pruned) else { return };
        self.prune_after = pruned.next;
        // Where there is more, others go first.
        if pruned.runs + pruned.skips + pruned.keys + pruned.output >= PRUNE_BATCH {
            self.pruner.at = now.mono + Duration::from_millis(50);
        } else if pruned.next.is_some() {
            self.pruner.at = now.mono + Duration::from_millis(500);
        }
    }

    // The end of the node.

    fn stop(&mut self, now: Now, timeout: Duration) {
        self.phase = match self.phase {
            Phase::Running => Phase::Draining { until: now.mono + timeout },
            Phase::Draining { .. } => {
                self.stop_all(Stop::ShutdownNow);
                Phase::Ending { overrun: self.under_way(), give_up: now.mono + GIVE_UP_SOON }
            }
            Phase::Ending { overrun, .. } => {
                self.stop_all(Stop::ShutdownNow);
                Phase::Ending { overrun, give_up: now.mono + GIVE_UP_SOON }
            }
            Phase::Stopped => Phase::Stopped,
        };
    }

    fn under_way(&self) -> usize {
        self.tasks.values().filter(|task| !task.ended).count()
    }

    fn stop_maybe(&mut self, now: Now) {
        let idle = self.tasks.is_empty()
            && self.endings.is_empty()
            && !self.finisher.busy
            && !self.dispatcher.busy
            && !self.planner.busy
            && !self.renewer.busy;
        let overrun = match self.phase {
            Phase::Draining { .. } if idle => 0,
            Phase::Draining { until } if now.mono >= until => {
                self.phase = Phase::Ending { overrun: self.under_way(), give_up: now.mono + GIVE_UP };
                return self.stop_all(Stop::Shutdown);
            }
            Phase::Ending { overrun, .. } if idle => overrun,
            // What still runs is waited for; only then is it the store that takes its time.
            Phase::Ending { overrun, give_up } if self.under_way() > 0 => {
                self.phase = Phase::Ending { overrun, give_up: give_up.max(now.mono + GIVE_UP_SOON) };
                return;
            }
            // Nothing runs any more, and the store does not take in what has ended: whoever finds this node gone does. One
            // that says nothing may only be slow.
            Phase::Ending { overrun, give_up }
                if now.mono >= give_up && (self.failures > 0 || now.mono >= give_up + SILENT) =>
            {
                overrun.max(self.tasks.len()).max(1)
            }
            _ => return,
        };
        self.phase = Phase::Stopped;
        self.effects.push(Effect::Stopped { overrun });
    }

    // The store's health.

    /// An answer, or nothing where the store did not answer; says when that changes.
    fn answered<T>(&mut self, now: Now, answer: Result<T, Error>) -> Option<T> {
        match answer {
            Ok(answer) => {
                if self.failures > 0 {
                    self.failures = 0;
                    self.note(Event::new(now.wall, Level::Info, Name::StoreAvailable));
                }
                Some(answer)
            }
            Err(error) => {
                if self.failures == 0 {
                    let event = Event::new(now.wall, Level::Error, Name::StoreUnavailable);
                    self.note(Event { detail: Some(error.to_string()), ..event });
                }
                self.failures = self.failures.saturating_add(1);
                None
            }
        }
    }

    /// How long to wait before asking again.
    fn backoff(&self) -> Duration {
        Duration::from_millis(100 << self.failures.min(5)).min(self.options.lease / 10)
    }

    fn note(&mut self, event: Event) {
        self.effects.push(Effect::Note(Box::new(event)));
    }
}

impl Task {
    /// Whether its end may arm its schedule.
    fn waits(&self) -> bool {
        self.definitions.compiled.as_ref().is_ok_and(|schedule| schedule.waits_for_runs())
    }

    /// The next token of its schedule, should that wait for this run.
    fn arm(&self, now: Timestamp) -> Option<Token> {
        let schedule = self.definitions.compiled.as_ref().ok()?;
        if !schedule.waits_for_runs() {
            return None;
        }
        let standing = Standing { token: Token::next(now), origin: self.definitions.origin, open_skip: None };
        match plan(schedule, &standing, &Facts::CLEAR, now).next {
            Next::Token(token) => Some(token),
            Next::Wait | Next::Exhausted | Next::Expired => None,
        }
    }
}

impl Options {
    /// Runs of a lane that nobody made go to `main`.
    pub(crate) fn to_known_lane(&self, lane: &mut String) {
        if !self.lanes.contains_key(lane) {
            *lane = "main".into();
        }
    }
}

fn later(at: Timestamp, by: Duration) -> Timestamp {
    SignedDuration::try_from(by).ok().and_then(|by| at.checked_add(by).ok()).unwrap_or(Timestamp::MAX)
}

fn earlier(at: Timestamp, by: Duration) -> Timestamp {
    SignedDuration::try_from(by).ok().and_then(|by| at.checked_sub(by).ok()).unwrap_or(Timestamp::MIN)
}
