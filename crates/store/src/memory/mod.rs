//! A store in memory: the specification of the other two, simple enough to be obviously right. One lock, plain maps,
//! no parking: a claim looks at every run that waits.

mod claim;
mod defer;
mod edit;
mod finish;
mod hook;
mod lane;
mod list;
mod node;
mod output;
mod pause;
mod plan;
mod read;
mod session;
mod source;
mod token;
mod watch;
mod why;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use belfry_core::breaker::Admits;
use belfry_core::budget::Budget;
use belfry_core::check::Status;
use belfry_core::edit::Resume;
use belfry_core::ending::Waiting;
use belfry_core::text::clean;
use belfry_core::{
    AgentDefinition, AgentId, Epoch, NodeId, Reason, RunId, RunState, Schedule, ScheduleDefinition,
    ScheduleId, SkipRange, Token,
};
use belfry_time::Timestamp;
use parking_lot::Mutex;

use crate::clock::LastClaim;
use crate::hint::{self, Hint};
use crate::sabotage::Switch;
use crate::sessions::*;
use crate::shapes::*;
use crate::storable::{all_storable, check_name, check_names, storable};
use crate::store::{Answer, Store, wakes};
use crate::views::*;

/// A store that is gone with its process.
#[derive(Default)]
pub struct Memory {
    state: Mutex<State>,
    doors: Mutex<token::Doors>,
    snapshots: Mutex<watch::Snapshots>,
    hint: Hint,
    /// Breaks it on purpose.
    pub sabotage: Switch,
}

#[derive(Clone, Default)]
struct State {
    sources: BTreeMap<String, String>,
    /// Schedules of files that went with their run, as their definitions ask, by source and name.
    spent: BTreeMap<(String, String), ScheduleDefinition>,
    agents: BTreeMap<AgentId, Agent>,
    /// Agents whose definitions the verb at work has changed.
    edited: BTreeSet<AgentId>,
    schedules: BTreeMap<ScheduleId, ScheduleRow>,
    live: BTreeMap<RunId, Live>,
    last_claim: LastClaim,
    ended: BTreeMap<RunId, RunRecord>,
    /// Their places among those of their schedule that failed, or did not.
    places: BTreeMap<RunId, i64>,
    /// Runs in the order in which they ended, each with its schedule.
    ended_order: Vec<(ScheduleId, RunId)>,
    skips: BTreeMap<ScheduleId, Vec<SkipRange>>,
    /// What schedules were, by the instants of their edits.
    revisions: BTreeMap<ScheduleId, Vec<(i64, Timestamp, ScheduleDefinition)>>,
    nodes: BTreeMap<NodeId, Node>,
    /// Numbers of their last renewals.
    renewals: BTreeMap<NodeId, i64>,
    breakers: BTreeMap<(AgentId, String), BreakerRecord>,
    budgets: BTreeMap<AgentId, Budget>,
    sessions: BTreeMap<i64, session::SessionRow>,
    lanes: BTreeMap<String, lane::LaneRow>,
    deferred: BTreeMap<ScheduleId, Deferred>,
    keys: BTreeMap<(ScheduleId, String), (RunId, Key)>,
    output: BTreeMap<(RunId, u64), OutputChunk>,
    /// The last number given out, for ids and versions.
    last_number: i64,
}

#[derive(Clone)]
struct Agent {
    name: String,
    source: String,
    revision: i64,
    definition: Arc<AgentDefinition>,
    retired_at: Option<Timestamp>,
}

#[derive(Clone)]
struct ScheduleRow {
    record: ScheduleRecord,
    compiled: Compiled,
    version: i64,
    /// The last tick whose run has ended.
    fired_at: Option<Timestamp>,
    /// How many of its runs have failed, and have ended otherwise.
    ended: [i64; 2],
    retired_at: Option<Timestamp>,
}

#[derive(Clone)]
struct Live {
    new: NewRun,
    created_at: Timestamp,
    running: Option<NodeId>,
    not_before: Timestamp,
    /// When `not_before` was set, if that was after it was made.
    put_off_at: Option<Timestamp>,
    attempt: u32,
    epoch: Epoch,
    started_at: Option<Timestamp>,
    cancel: Option<Reason>,
    exit_code: Option<i32>,
    error: Option<String>,
    session: Option<InSession>,
    /// It came back from a dead node: 0 while it waits, else the number of its claim.
    rescue: Option<i64>,
    /// How often it was the suspect when its node died.
    suspicions: u32,
}

/// A run's place in its session.
#[derive(Debug, Clone, Copy)]
struct InSession {
    id: i64,
    seq: i64,
    generation: i64,
    alone: bool,
}

impl Memory {
    /// An empty store.
    pub fn new() -> Memory {
        Memory::default()
    }

    /// How many hints it has given, for a simulator that passes them on in its own time.
    pub fn hints(&self) -> u64 {
        self.hint.count()
    }
}

impl Memory {
    /// Carries out a verb, and arms those for whom it has made room.
    fn change<T>(&self, verb: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock();
        let done = verb(&mut state);
        if state.arm_deferred() {
            self.hint.give();
        }
        done
    }
}

impl State {
    fn number(&mut self) -> i64 {
        self.last_number += 1;
        self.last_number
    }

    /// Replaces a schedule's token. Whoever planned on the old one has lost, and what was deferred no longer is.
    fn set_token(&mut self, schedule: ScheduleId, token: Option<Token>) {
        self.touch(schedule);
        if let Some(row) = self.schedules.get_mut(&schedule) {
            row.record.token = token;
        }
        self.deferred.remove(&schedule);
    }

    /// Whoever has planned on a schedule's token has lost.
    fn touch(&mut self, schedule: ScheduleId) {
        let version = self.number();
        if let Some(row) = self.schedules.get_mut(&schedule) {
            row.version = version;
        }
    }

    fn set_status(&mut self, schedule: ScheduleId, status: Status, now: Timestamp) {
        if let Some(row) = self.schedules.get_mut(&schedule) {
            row.record.status = status;
            row.record.status_since = now;
        }
    }
}

impl Store for Memory {
    async fn apply(
        &self,
        now: Timestamp,
        source: &str,
        digest: &str,
        agents: &[AgentSpec],
    ) -> Answer<Applied> {
        check_names(agents)?;
        self.hint.after(Ok(self.change(|state| state.apply(now, source, digest, agents))), wakes::apply)
    }

    async fn source_digest(&self, source: &str) -> Answer<Option<String>> {
        Ok(self.state.lock().sources.get(source).cloned())
    }

    async fn spent(&self, source: &str) -> Answer<BTreeMap<String, ScheduleDefinition>> {
        let state = self.state.lock();
        let own = state.spent.iter().filter(|((from, _), _)| from == source);
        Ok(own.map(|((_, name), definition)| (name.clone(), definition.clone())).collect())
    }

    async fn put_schedule(
        &self,
        now: Timestamp,
        agent: &str,
        name: &str,
        definition: &ScheduleDefinition,
        expect: &Expect,
    ) -> Answer<Put> {
        check_name(&format!("agent {agent}: schedule"), name)?;
        let put = self.change(|state| state.put_by_api(now, agent, name, definition, expect));
        self.hint.after(Ok(put), wakes::put_schedule)
    }

    async fn remove_schedule(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        expect: &Expect,
    ) -> Answer<Removed> {
        self.hint.after(
            Ok(self.change(|state| state.remove_by_api(now, schedule, expect))),
            wakes::remove_schedule,
        )
    }

    async fn put_agent(
        &self,
        now: Timestamp,
        agent: &AgentSpec,
        whole: bool,
        expect: &Expect<AgentDefinition>,
    ) -> Answer<PutAgent> {
        check_names(std::slice::from_ref(agent))?;
        let put = self.change(|state| state.put_agent_by_api(now, agent, whole, expect));
        self.hint.after(Ok(put), wakes::put_agent)
    }

    async fn remove_agent(
        &self,
        now: Timestamp,
        agent: &str,
        expect: &Expect<AgentDefinition>,
    ) -> Answer<Removed> {
        self.hint.after(
            Ok(self.change(|state| state.remove_agent_by_api(now, agent, expect))),
            wakes::remove_agent,
        )
    }

    async fn schedule_ids(&self, names: &[&str]) -> Answer<Vec<Option<ScheduleId>>> {
        let state = self.state.lock();
        let is_it = |row: &ScheduleRow, name: &str| row.retired_at.is_none() && row.record.name == name;
        let find = |name: &&str| state.schedules.iter().find(|(_, row)| is_it(row, name)).map(|(id, _)| *id);
        Ok(names.iter().map(find).collect())
    }

    async fn definitions(&self, schedules: &[ScheduleId]) -> Answer<Vec<Option<Definitions>>> {
        let state = self.state.lock();
        Ok(schedules.iter().map(|schedule| state.definitions(*schedule)).collect())
    }

    async fn unreadable(&self) -> Answer<Vec<UnreadableSchedule>> {
        Ok(Vec::new())
    }

    async fn pause(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        reason: Option<&str>,
        until: Option<Timestamp>,
    ) -> Answer<bool> {
        let reason = reason.map(clean);
        let paused = self.change(|state| state.pause(now, schedule, reason.as_deref(), until));
        self.hint.after(Ok(paused), wakes::pause)
    }

    async fn resume(&self, now: Timestamp, schedule: ScheduleId, how: Resume) -> Answer<Option<u64>> {
        let resumed = self.change(|state| state.resume(now, schedule, how));
        self.hint.after(Ok(resumed), wakes::resume)
    }

    async fn due(&self, now: Timestamp, after: Option<Mark>, limit: u32) -> Answer<Vec<Due>> {
        Ok(self.state.lock().due(now, after, limit))
    }

    async fn next_due(&self) -> Answer<Option<Timestamp>> {
        let state = self.state.lock();
        Ok(state.schedules.values().filter_map(|row| row.record.token).map(|token| token.due_at).min())
    }

    async fn commit(&self, now: Timestamp, commits: &[Commit]) -> Answer<Vec<Committed>> {
        let commits = &*all_storable(commits);
        self.state.lock().last_claim.shown(now);
        // What is refused changes nothing, also where other plans came before it.
        let before = self.state.lock().may_refuse(commits);
        let commit = |commit| self.change(|state| state.commit(now, commit, &self.sabotage));
        let committed: Answer<Vec<Committed>> = commits.iter().map(commit).collect();
        let committed = committed.inspect_err(|_| {
            if let Some(before) = before {
                *self.state.lock() = before;
            }
        })?;
        self.hint.after(Ok(committed), |committed| hint::made_runs(commits, committed))
    }

    async fn enqueue_many(&self, now: Timestamp, requests: &[Enqueue]) -> Answer<Vec<Enqueued>> {
        let mut state = self.state.lock();
        state.last_claim.shown(now);
        let answers = requests.iter().map(|request| state.enqueue(now, &storable(request))).collect();
        self.hint.after(Ok(answers), wakes::enqueue_many)
    }

    async fn send(&self, now: Timestamp, message: &NewMessage) -> Answer<Sent> {
        self.state.lock().last_claim.shown(now);
        self.hint.after(Ok(self.change(|state| state.send(now, &storable(message)))), wakes::send)
    }

    async fn session(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        key: &str,
        verb: SessionVerb,
    ) -> Answer<Option<SessionDone>> {
        let done = self.change(|state| state.session(now, schedule, &clean(key), verb));
        self.hint.after(Ok(done), wakes::session)
    }

    async fn sessions(
        &self,
        filter: &SessionFilter,
        after: Option<i64>,
        limit: u32,
    ) -> Answer<Page<SessionRecord, i64>> {
        Ok(self.state.lock().list_sessions(filter, after, limit))
    }

    async fn put_lanes(&self, _now: Timestamp, lanes: &[(String, LaneSettings)]) -> Answer<()> {
        self.change(|state| state.put_lanes(lanes));
        self.hint.after(Ok(()), wakes::put_lanes)
    }

    async fn set_lane(&self, _now: Timestamp, lane: &str, settings: Option<LaneSettings>) -> Answer<()> {
        self.change(|state| state.set_lane(lane, settings));
        self.hint.after(Ok(()), wakes::set_lane)
    }

    async fn lanes(&self, now: Timestamp) -> Answer<Vec<LaneRecord>> {
        Ok(self.state.lock().list_lanes(now))
    }

    async fn lane_settings(&self) -> Answer<Vec<LaneRecord>> {
        let state = self.state.lock();
        let made = state.made_lanes().into_iter().map(|lane| (lane.name.clone(), lane));
        let mut lanes: BTreeMap<String, LaneRecord> = made.collect();
        for live in state.live.values().filter(|live| live.running.is_none()) {
            let name = &live.new.lane;
            lanes.entry(name.clone()).or_insert_with(|| LaneRecord::blank(name));
        }
        Ok(lanes.into_values().collect())
    }

    async fn next_start(&self, now: Timestamp) -> Answer<Option<Timestamp>> {
        let state = self.state.lock();
        let waits = |(run, live): &(&RunId, &Live)| live.running.is_none() && state.has_turn(**run, live);
        let waiting = state.live.iter().filter(waits).map(|(_, live)| live.not_before);
        Ok(waiting.filter(|at| *at > now).min())
    }

    async fn clear_lane(&self, now: Timestamp, lane: &str) -> Answer<Vec<RunId>> {
        self.hint.after(Ok(self.change(|state| state.clear_lane(now, lane))), wakes::clear_lane)
    }

    async fn claim(&self, now: Timestamp, claim: &Claim) -> Answer<Vec<Claimed>> {
        Ok(self.change(|state| state.claim(now, claim)))
    }

    async fn finish(&self, now: Timestamp, finishes: &[Finish]) -> Answer<Vec<Finished>> {
        let finishes = &*all_storable(finishes);
        let finished = self.change(|state| {
            state.last_claim.shown(now);
            finishes.iter().map(|finish| state.finish(now, finish, &self.sabotage)).collect()
        });
        self.hint.after(Ok(finished), wakes::finish)
    }

    async fn cancel(&self, now: Timestamp, run: RunId, reason: Reason) -> Answer<Cancelled> {
        self.hint.after(Ok(self.change(|state| state.cancel(now, run, reason))), wakes::cancel)
    }

    async fn give_back(
        &self,
        now: Timestamp,
        node: NodeId,
        runs: &[(RunId, Epoch)],
    ) -> Answer<Vec<(RunId, RunState)>> {
        self.hint.after(Ok(self.change(|state| state.give_back(now, node, runs))), wakes::give_back)
    }

    async fn append_output(&self, run: RunId, epoch: Epoch, chunks: &[OutputChunk]) -> Answer<bool> {
        Ok(self.state.lock().append_output(run, epoch, chunks))
    }

    async fn output(&self, run: RunId, after: Option<u64>, limit_bytes: u32) -> Answer<Vec<OutputChunk>> {
        Ok(self.state.lock().output(run, after, limit_bytes))
    }

    async fn join(&self, node: &Node, left: Option<NodeId>) -> Answer<()> {
        let mut state = self.state.lock();
        let number = state.number();
        state.renewals.insert(node.id, number);
        let left = left.and_then(|left| state.nodes.get(&left));
        let draining = left.map_or(node.draining, |left| left.draining);
        state.nodes.insert(node.id, Node { draining, ..node.clone() });
        Ok(())
    }

    async fn renew(&self, node: NodeId, lease_until: Timestamp) -> Answer<Renewed> {
        Ok(self.state.lock().renew(node, lease_until))
    }

    async fn marks(&self, node: NodeId) -> Answer<Marks> {
        Ok(self.state.lock().marks(node))
    }

    async fn running_lanes(&self, node: NodeId) -> Answer<Vec<(RunId, String)>> {
        let state = self.state.lock();
        let own = state.live.iter().filter(|(_, live)| live.running == Some(node));
        Ok(own.map(|(run, live)| (*run, live.new.lane.clone())).collect())
    }

    async fn drain(&self, now: Timestamp, node: NodeId, draining: bool) -> Answer<Drained> {
        self.hint.after(Ok(self.change(|state| state.drain(now, node, draining))), wakes::drain)
    }

    async fn nodes(&self) -> Answer<Vec<Node>> {
        Ok(self.state.lock().nodes.values().filter(|node| !node.fenced).cloned().collect())
    }

    async fn fence(&self, now: Timestamp, node: NodeId, lease_seen: Timestamp) -> Answer<Option<Rescued>> {
        self.hint.after(Ok(self.change(|state| state.fence(now, node, lease_seen))), wakes::fence)
    }

    async fn pass_breaker(
        &self,
        now: Timestamp,
        agent: AgentId,
        command: &str,
        run: RunId,
    ) -> Answer<Admits> {
        let mut state = self.state.lock();
        let policy = state.agents.get(&agent).and_then(|agent| agent.definition.breaker);
        let Some(policy) = policy else { return Ok(Admits::Yes) };
        let breaker = state.breaker_of(agent, command).breaker;
        let has_started =
            |probe| state.live.get(&probe).is_some_and(|live| live.running.is_some() || live.attempt > 0);
        let admits = breaker.admits_waiting(&policy, run, now, has_started);
        if admits == Admits::Probe {
            state.put_breaker(agent, command, breaker.probing(run, now));
        }
        Ok(admits)
    }

    async fn reset_breaker(&self, now: Timestamp, agent: AgentId, command: &str) -> Answer<bool> {
        let mut state = self.state.lock();
        let Some(record) = state.breakers.get_mut(&(agent, command.to_owned())) else { return Ok(false) };
        let (next, transition) = record.breaker.reset(now);
        record.breaker = next;
        record.remember(transition);
        Ok(transition.is_some())
    }

    async fn reset_budget(&self, now: Timestamp, agent: AgentId) -> Answer<bool> {
        let mut state = self.state.lock();
        let is_used = state.budgets.remove(&agent).is_some();
        if is_used {
            state.move_waiting(now, agent, Waiting::Free);
        }
        drop(state);
        self.hint.after(Ok(is_used), wakes::reset_budget)
    }

    async fn prune(&self, now: Timestamp, retention: &Retention) -> Answer<Pruned> {
        Ok(self.state.lock().prune(now, retention, &self.sabotage))
    }

    async fn run(&self, run: RunId) -> Answer<Option<RunRecord>> {
        Ok(self.state.lock().run(run))
    }

    async fn live_runs(&self) -> Answer<Vec<RunRecord>> {
        Ok(self.state.lock().live_runs())
    }

    async fn ended_runs(&self, schedule: ScheduleId, limit: u32) -> Answer<Vec<RunRecord>> {
        Ok(self.state.lock().ended_runs(schedule, limit))
    }

    async fn schedule(&self, name: &str) -> Answer<Option<ScheduleRecord>> {
        let state = self.state.lock();
        let found = state.schedules.values().find(|row| row.retired_at.is_none() && row.record.name == name);
        Ok(found.map(|row| state.full(row)))
    }

    async fn schedules(
        &self,
        filter: &ScheduleFilter,
        after: Option<&str>,
        limit: u32,
    ) -> Answer<Page<ScheduleRecord, String>> {
        Ok(self.state.lock().list_schedules(filter, after, limit))
    }

    async fn runs(
        &self,
        filter: &RunFilter,
        after: Option<RunId>,
        limit: u32,
    ) -> Answer<Page<RunRecord, RunId>> {
        Ok(self.state.lock().list_runs(filter, after, limit))
    }

    async fn agents(&self) -> Answer<Vec<AgentRecord>> {
        Ok(self.state.lock().list_agents())
    }

    async fn breakers(&self) -> Answer<Vec<BreakerEntry>> {
        Ok(self.state.lock().list_breakers())
    }

    async fn skips(
        &self,
        schedule: ScheduleId,
        after: Option<Timestamp>,
        limit: u32,
    ) -> Answer<Vec<SkipRange>> {
        Ok(self.state.lock().list_skips(schedule, after, limit))
    }

    async fn tick(&self, schedule: ScheduleId, tick_at: Timestamp) -> Answer<TickFate> {
        Ok(self.state.lock().tick(schedule, tick_at))
    }

    async fn revision_at(
        &self,
        schedule: ScheduleId,
        at: Timestamp,
    ) -> Answer<Option<(i64, ScheduleDefinition)>> {
        Ok(self.state.lock().revision_at(schedule, at))
    }

    async fn breaker(&self, agent: AgentId, command: &str) -> Answer<BreakerRecord> {
        Ok(self.state.lock().breaker_of(agent, command))
    }

    async fn tripped(&self, breakers: &[(AgentId, String)]) -> Answer<Vec<bool>> {
        let state = self.state.lock();
        let is_tripped =
            |(agent, command): &(AgentId, String)| !state.breaker_of(*agent, command).breaker.is_closed();
        Ok(breakers.iter().map(is_tripped).collect())
    }

    async fn counts(&self) -> Answer<Counts> {
        let state = self.state.lock();
        let running = state.live.values().filter(|live| live.running.is_some()).count() as u64;
        Ok(Counts { pending: state.live.len() as u64 - running, running, ended: state.ended.len() as u64 })
    }

    async fn changed(&self) {
        self.hint.given().await;
    }

    async fn integrity(&self) -> Answer<Vec<String>> {
        Ok(Vec::new())
    }
}

/// Reads a schedule's definition, keeping why it cannot be read.
pub(crate) fn compile(definition: &ScheduleDefinition, name: &str) -> Compiled {
    definition.compile(name).map(Arc::new).map_err(Arc::from)
}

/// A schedule's definition that can be used, or why it cannot.
pub(crate) type Compiled = Result<Arc<Schedule>, Arc<str>>;

/// The same, as decisions take it.
pub(crate) fn compiled(compiled: &Compiled) -> belfry_core::edit::Compiled<'_> {
    compiled.as_deref().map_err(|why| &**why)
}
