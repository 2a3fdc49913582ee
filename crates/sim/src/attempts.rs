//! What must hold when an attempt starts, and when it ends.

use belfry::{RunState, SignedDuration, Timestamp};
use belfry_core::Trigger;
use belfry_core::breaker::{self, Admits, State};
use belfry_core::budget;
use belfry_core::definition::{IfRunning, Scope};
use belfry_core::retry::Outcome;
use belfry_store::{RunRecord, ScheduleFilter, ScheduleRecord, Store};

use crate::draw::Params;
use crate::node::Process;
use crate::sim::{Sim, signed};
use crate::world::{MINUTE, Micros};

/// What was on its way to the store when its clock was stepped has reached it by then.
const NOTICED_WITHIN: Micros = 10 * MINUTE;
/// How long runs that were caught up wait at most, and more than clocks of several nodes differ.
const SPREAD_MAX: Micros = 2 * MINUTE;
/// A claim, and its answer, take no longer on their way.
const ON_ITS_WAY: Micros = 5 * MINUTE;
/// The longest delay of a retry that is drawn, with a quarter more.
const RETRY_MAX: Micros = 75 * MINUTE;

impl Sim {
    /// What must hold when a process starts.
    pub(crate) fn check_start(&mut self, process: &Process) {
        if let Some(other) = self.processes.values().find(|other| other.run == process.run) {
            let words = format!(
                "two attempts of {} at once: #{} on node {} beside #{} on node {}",
                process.run, process.epoch, process.place, other.epoch, other.place
            );
            return self.breaks(words);
        }
        if let Some(record) = self.record(&process.name) {
            self.check_turn(process, &record);
            self.check_order(process, &record);
            self.check_catch_up(process, &record);
            self.check_breaker(process, &record);
        }
        self.check_limit(process);
        self.check_node(process);
        self.check_labels(process);
        self.check_lane(process);
        self.check_session(process);
        self.check_clock();
    }

    /// A missed tick that waited starts only while its window is open, but for what has changed while its claim was on its way.
    fn check_catch_up(&mut self, process: &Process, record: &ScheduleRecord) {
        let run = self.now(self.store.memory.run(process.run));
        let Some(run) = run.filter(|run| run.trigger == Trigger::CatchUp && run.attempt == 1) else { return };
        let (now, before) = (self.world.wall(), self.world.wall() - signed(ON_ITS_WAY));
        // Its node may not have noticed yet that the clock was set back: it claimed by the later one.
        let instants = [Some(now), Some(before), run.started_at];
        if !instants.into_iter().flatten().any(|at| self.ledger.allows(&process.name, at)) {
            let options = &record.definition.options;
            let words = format!(
                "{} {} starts while its window is closed: {:?} {:?} not on {:?}, {:?}",
                process.name,
                process.run,
                record.definition.when,
                options.only_between,
                options.not_on,
                options.timezone
            );
            self.breaks(words);
        }
    }

    /// What a tick or a webhook made starts only if its breaker lets it through, but for what has changed while its claim was on
    /// its way.
    fn check_breaker(&mut self, process: &Process, record: &ScheduleRecord) {
        let run = self.now(self.store.memory.run(process.run));
        if run.is_none_or(|run| !breaker::is_gated(run.trigger, run.attempt)) {
            return;
        }
        let (now, before) = (self.world.wall(), self.world.wall() - signed(ON_ITS_WAY));
        let agents = self.now(self.store.memory.agents());
        let agent = agents.iter().find(|agent| agent.id == record.agent);
        let Some(policy) = agent.and_then(|agent| agent.definition.breaker) else { return };
        let breaker = self.now(self.store.memory.breaker(record.agent, &process.command)).breaker;
        let is_open = breaker.state == State::Open && breaker.opened_at.is_some_and(|at| at < before);
        if is_open && breaker.admits_waiting(&policy, process.run, now, |_| true) == Admits::No {
            self.breaks(format!("{} {} starts while its breaker is open", process.name, process.run));
        }
    }

    /// Nothing that was due before the clock was stepped back waits for that clock. Stores notice it by their claims.
    fn check_clock(&mut self) {
        // A node that was frozen meanwhile plans what it has read before.
        let since = self.world.behind_since().map(|since| since.max(self.thawed_at));
        if since.is_none_or(|since| self.world.now() < since + NOTICED_WITHIN) {
            return;
        }
        let wall = self.world.wall();
        let soon = wall + signed(SPREAD_MAX);
        for record in self.ledger.names().iter().filter_map(|name| self.record(name)).collect::<Vec<_>>() {
            if record.deferred.is_some_and(|deferred| deferred.since > wall) {
                return self.breaks(format!("{} is deferred until the clock shows that again", record.name));
            }
        }
        let waits = |run: &RunRecord| run.state == RunState::Pending && run.created_at > soon;
        let latest = |run: &RunRecord| match run.attempt {
            0 => tick_of(run).map(|_| soon),
            _ => Some(soon + signed(RETRY_MAX)),
        };
        let agents = self.now(self.store.memory.agents());
        // What a budget holds waits for its end, also if it was used up by the later clock: then no longer than it was to wait.
        let is_held = |run: &RunRecord| {
            let agent = agents.iter().find(|agent| agent.id == run.agent);
            agent.is_some_and(|agent| {
                agent.definition.budget.as_ref().is_some_and(|policy| {
                    let period = SignedDuration::from_millis(policy.period_ms as i64);
                    budget::exhausted_until(agent.budget, policy, wall).is_some()
                        || run.not_before <= soon + period + signed(RETRY_MAX)
                })
            })
        };
        // One that waits for its window was put off until that opens, by whatever clock.
        let has_window = |run: &RunRecord| {
            run.trigger == Trigger::CatchUp && run.attempt == 0 && self.ledger.has_window(&run.name)
        };
        let live = self.now(self.store.memory.live_runs());
        let is_late =
            |run: &&RunRecord| waits(run) && latest(run).is_some_and(|latest| run.not_before > latest);
        if let Some(run) = live.iter().filter(is_late).find(|run| !is_held(run) && !has_window(run)) {
            let words = format!("{} {} waits until {} by a later clock", run.name, run.id, run.not_before);
            self.breaks(words);
        }
    }

    /// No schedule is deferred while its lane has room for its tick.
    pub(crate) fn check_deferred(&mut self) {
        let memory = &self.store.memory;
        let all = self.now(memory.schedules(&ScheduleFilter::default(), None, u32::MAX)).items;
        if all.iter().all(|record| record.deferred.is_none()) {
            return;
        }
        let (agents, nodes) = (self.now(memory.agents()), self.now(memory.nodes()));
        let mut live = self.now(memory.live_runs());
        live.retain(|run| run.state == RunState::Pending);
        let needs = |run: &RunRecord| {
            agents.iter().find(|agent| agent.id == run.agent).map(|it| &it.definition.needs)
        };
        let is_served = |run: &RunRecord| {
            needs(run).is_none_or(|needs| {
                needs.is_empty()
                    || nodes.iter().any(|node| needs.iter().all(|label| node.labels.contains(label)))
            })
        };
        let may_wait_long = |run: &RunRecord| {
            let has_delay = run.trigger == Trigger::Manual && run.due_at > run.created_at;
            run.not_before > run.due_at || has_delay || !is_served(run)
        };
        let in_turn = |run: &RunRecord| {
            all.iter().any(|record| {
                let policy = record.definition.options.if_running;
                record.id == run.schedule && matches!(policy, IfRunning::Queue | IfRunning::Cancel)
            })
        };
        let is_before = |other: &RunRecord, run: &RunRecord| {
            let is_known = self.ledger.has_priority(other.id) && self.ledger.has_priority(run.id);
            // Messages wait in their sessions.
            let is_in_line = other.schedule == run.schedule && other.trigger != Trigger::Message;
            is_in_line && is_known && (other.due_at, other.id) < (run.due_at, run.id)
        };
        let is_behind = |run: &RunRecord| {
            in_turn(run) && live.iter().any(|other| may_wait_long(other) && is_before(other, run))
        };
        for lane in self.now(memory.lanes(self.world.wall())) {
            let Some(limit) = lane.settings().and_then(|settings| settings.queue_limit) else { continue };
            let deferred = all
                .iter()
                .filter(|record| record.deferred.as_ref().is_some_and(|deferred| deferred.lane == lane.name));
            let Some(waiting) = deferred.clone().find(|record| record.token.is_none()) else { continue };
            let to_come = deferred.filter(|record| record.token.is_some()).count();
            let own = live.iter().filter(|run| run.lane == lane.name && run.trigger != Trigger::Message);
            let queued = own.filter(|run| !may_wait_long(run) && !is_behind(run)).count();
            if queued + to_come < limit as usize {
                let words = format!(
                    "{} is deferred, and only {queued} runs and {to_come} ticks take places of the {limit} in {}",
                    waiting.name, lane.name
                );
                return self.breaks(words);
            }
        }
    }

    /// A run of a schedule that queues or cancels starts only if nothing else of its scope runs.
    fn check_turn(&mut self, process: &Process, record: &ScheduleRecord) {
        let options = &record.definition.options;
        // A run by hand may have another command than its schedule has by now.
        let is_other = process.is_session() || process.command != options.command;
        if is_other || !matches!(options.if_running, IfRunning::Queue | IfRunning::Cancel) {
            return;
        }
        let in_scope = |other: &Process| match options.overlap {
            Scope::Schedule => other.name == process.name,
            Scope::Command => other.agent == process.agent && other.command == process.command,
            Scope::Agent => other.agent == process.agent,
        };
        let edited = self.ledger.edited_at(&process.agent);
        if Some(process.claimed_at) <= edited {
            return;
        }
        // Others may start beside it afterwards, if their own schedules do not queue.
        let is_before = |other: &Process| {
            let is_first = other.claimed_at < process.claimed_at;
            let is_same = other.claimed_at == process.claimed_at && other.schedule == process.schedule;
            (is_first || is_same) && Some(other.claimed_at) > edited
        };
        let other =
            self.processes.values().find(|other| !other.is_session() && in_scope(other) && is_before(other));
        if let Some(other) = other {
            let words = format!(
                "{} {} starts beside {} {}, which is of its scope ({:?}, {:?})",
                process.name, process.run, other.name, other.run, options.if_running, options.overlap
            );
            self.breaks(words);
        }
    }

    /// A run of a schedule that queues or cancels starts after every earlier run of its schedule, and ticks in their order,
    /// unless an edit gave later ones another priority. Messages have the order of their sessions.
    fn check_order(&mut self, process: &Process, record: &ScheduleRecord) {
        let queues = matches!(record.definition.options.if_running, IfRunning::Queue | IfRunning::Cancel);
        // A claim before the last edit was made by other policies.
        let is_settled = Some(process.claimed_at) > self.ledger.edited_at(&process.agent)
            && self.ledger.has_priority(process.run);
        if process.is_session() || !queues || !is_settled {
            return;
        }
        if record.pending == 0 {
            return;
        }
        let live = self.now(self.store.memory.live_runs());
        let Some(own) = live.iter().find(|run| run.id == process.run) else { return };
        let is_earlier = |run: &&RunRecord| {
            run.schedule == own.schedule
                && run.state == RunState::Pending
                && run.trigger != Trigger::Message
                && self.ledger.has_priority(run.id)
                // One that reached the store after the claim, whose answer took its time, is not before it. A run is as old as
                // what its plan was made by, which may have been on its way for long.
                && Some(run.created_at) < own.started_at
                && self.world.planned_at(run.id).is_none_or(|at| at < process.claimed_at)
                && match (tick_of(run), tick_of(own)) {
                    (Some(one), Some(other)) => one < other,
                    _ => (run.due_at, run.id) < (own.due_at, own.id),
                }
        };
        if let Some(earlier) = live.iter().find(is_earlier) {
            let words = format!(
                "{} {} (due {}) starts before {} (due {}, attempt {})",
                process.name, own.id, own.due_at, earlier.id, earlier.due_at, earlier.attempt
            );
            self.breaks(words);
        }
    }

    /// No more runs of an agent than its limit. Lowering the limit ends nothing.
    fn check_limit(&mut self, process: &Process) {
        if process.is_session() {
            return;
        }
        let agent = self.ledger.agents.iter().find(|agent| agent.name == process.agent);
        let Some(max) = agent.and_then(|agent| agent.definition.max_concurrent) else { return };
        let edited = self.ledger.edited_at(&process.agent);
        if Some(process.claimed_at) <= edited {
            return;
        }
        let running = self
            .processes
            .values()
            .filter(|other| other.agent == process.agent && !other.is_session())
            .filter(|other| Some(other.claimed_at) > edited)
            .count();
        if running >= max as usize {
            self.breaks(format!("{} runs of {} beside the limit of {max}", running + 1, process.agent));
        }
    }

    /// No more attempts on a node than it may have.
    fn check_node(&mut self, process: &Process) {
        let Some(max) = self.params.options.max_concurrent else { return };
        let own = |other: &&Process| (other.place, other.lives) == (process.place, process.lives);
        let running = self.processes.values().filter(own).count();
        if running >= max as usize {
            self.breaks(format!("{} attempts on node {}, which may have {max}", running + 1, process.place));
        }
    }

    /// A node starts only what it has the labels for.
    fn check_labels(&mut self, process: &Process) {
        let agent = self.ledger.agents.iter().find(|agent| agent.name == process.agent);
        let is_settled = Some(process.claimed_at) > self.ledger.edited_at(&process.agent);
        let Some(agent) = agent.filter(|_| is_settled) else { return };
        let labels = Params::labels(process.place);
        if let Some(label) = agent.definition.needs.iter().find(|label| !labels.contains(label)) {
            let words = format!("{} starts on node {}, which lacks {label}", process.name, process.place);
            self.breaks(words);
        }
    }

    /// No more runs in a lane than its limit over all nodes. Lowering the limit ends nothing.
    fn check_lane(&mut self, process: &Process) {
        let Some((changed_at, Some(max))) = self.ledger.lanes.get(process.lane.as_str()).copied() else {
            return;
        };
        let counts = |other: &&Process| {
            let edited = self.ledger.edited_at(&other.agent);
            other.lane == process.lane && other.claimed_at > changed_at && Some(other.claimed_at) > edited
        };
        // It may have been of another lane when it was claimed.
        let edited = self.ledger.edited_at(&process.agent);
        if process.claimed_at <= changed_at || Some(process.claimed_at) <= edited {
            return;
        }
        let running = self.processes.values().filter(counts).count();
        if running >= max as usize {
            self.breaks(format!("{} runs in the lane {}, whose limit is {max}", running + 1, process.lane));
        }
    }

    /// One run of a session at a time. What a reset has left alone goes on beside what came after.
    fn check_session(&mut self, process: &Process) {
        let Some(session) = &process.session else { return };
        let reset = self.ledger.resets.get(&(process.schedule, session.clone())).copied();
        let is_same = |other: &&Process| {
            other.schedule == process.schedule
                && other.session.as_ref() == Some(session)
                && Some(other.claimed_at) > reset
        };
        if let Some(other) = self.processes.values().find(is_same) {
            let words =
                format!("{} {} starts beside {} of the same session", process.name, process.run, other.run);
            self.breaks(words);
        }
    }

    /// What must hold when a process has ended, before its node hears of it: nobody else has ended its run.
    pub(crate) fn check_exit(&mut self, process: &Process) {
        if !matches!(process.outcome, Outcome::NotStarted | Outcome::Shutdown) {
            self.ledger.spend(process.run, process.epoch);
        }
        let Some(run) = self.now(self.store.memory.run(process.run)) else { return };
        if run.epoch == process.epoch && !run.state.is_live() {
            let words =
                format!("{} {} is {:?} while its attempt #{} runs", run.name, run.id, run.state, run.epoch);
            self.breaks(words);
        }
    }

    /// The probe of a breaker lives.
    pub(crate) fn check_breakers(&mut self) {
        for entry in self.now(self.store.memory.breakers()) {
            let Some(probe) = entry.breaker.probe.filter(|_| entry.breaker.state == State::HalfOpen) else {
                continue;
            };
            if self.now(self.store.memory.run(probe)).is_none_or(|run| !run.state.is_live()) {
                let words = format!(
                    "the breaker of {} {} waits for {probe}, which does not live",
                    entry.agent_name, entry.command
                );
                return self.breaks(words);
            }
        }
    }

    /// What runs have used of their attempts, and when those that were caught up could start.
    pub(crate) fn check_runs(&mut self, runs: &[RunRecord]) {
        for (run, epoch) in self.store.take_rescued() {
            self.ledger.spend(run, epoch);
        }
        for run in runs.iter().filter(|run| matches!(run.state, RunState::Completed | RunState::Failed)) {
            let is_shutdown = run.reason == Some(belfry_core::Reason::Shutdown);
            let spent = self.ledger.spent(run.id) + u32::from(is_shutdown);
            if run.attempt != spent {
                let words = format!(
                    "{} {} has used {} attempts, and {spent} of them count",
                    run.name, run.id, run.attempt
                );
                return self.breaks(words);
            }
        }
        // With a clock that was set back, what waits is due earlier: before it was made, by then.
        let caught_up = |run: &&RunRecord| run.trigger == Trigger::CatchUp && run.due_at >= run.created_at;
        for run in runs.iter().filter(caught_up) {
            if !self.ledger.allows(&run.name, run.due_at) {
                let words = format!(
                    "{} {} was caught up for {}, which its window does not allow",
                    run.name, run.id, run.due_at
                );
                return self.breaks(words);
            }
        }
    }
}

/// The tick that a run was planned for.
fn tick_of(run: &RunRecord) -> Option<Timestamp> {
    run.tick_at.filter(|_| matches!(run.trigger, Trigger::Schedule | Trigger::CatchUp))
}
