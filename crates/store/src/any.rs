//! Any of the three rooms behind one type, chosen by an address at run time.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::time::Duration;

use belfry_core::breaker::Admits;
use belfry_core::edit::Resume;
use belfry_core::{
    AgentDefinition, AgentId, Epoch, NodeId, Reason, RunId, RunState, ScheduleDefinition, ScheduleId,
    SkipRange,
};
use belfry_time::Timestamp;
use uuid::Uuid;

use crate::error::Error;
use crate::memory::Memory;
use crate::postgres::Postgres;
use crate::sessions::*;
use crate::shapes::*;
use crate::sqlite::Sqlite;
use crate::store::{Answer, Store};
use crate::views::*;

/// A store whose kind is known only at run time.
pub enum AnyStore {
    /// In memory; gone with the process.
    Memory(Memory),
    /// In one file.
    Sqlite(Sqlite),
    /// In a PostgreSQL database.
    Postgres(Postgres),
}

impl AnyStore {
    /// Opens the store at an address: `memory`, `sqlite:PATH` or `postgres://…`. With `serve` a file is locked for the one
    /// server that it may have.
    pub async fn open(address: &str, serve: bool) -> Result<AnyStore, Error> {
        if address == "memory" {
            return Ok(AnyStore::Memory(Memory::new()));
        }
        if let Some(path) = address.strip_prefix("sqlite:").filter(|path| !path.contains("://")) {
            let path = Path::new(path);
            let store = if serve { Sqlite::serve(path)? } else { Sqlite::open(path)? };
            return Ok(AnyStore::Sqlite(store));
        }
        if address.starts_with("postgres://") || address.starts_with("postgresql://") {
            return Ok(AnyStore::Postgres(Postgres::open(address).await?));
        }
        // What follows may be a password.
        let beginning = address.split([':', '=', '@', '/']).next().unwrap_or_default();
        let beginning = beginning.chars().take(20).collect();
        Err(Error::Address { beginning })
    }
}

impl AnyStore {
    /// Says of running runs whose end the store refuses that it does.
    async fn with_refused_ends(&self, mut runs: Vec<RunRecord>) -> Answer<Vec<RunRecord>> {
        if runs.iter().any(|run| run.state == RunState::Running) {
            for refusal in self.refusals().await? {
                let run =
                    runs.iter_mut().find(|run| refusal.run == Some(run.id) && run.state == RunState::Running);
                run.into_iter().for_each(|run| run.error = Some(refusal.words()));
            }
        }
        Ok(runs)
    }

    /// Says of schedules whose plans the store refuses that it does.
    async fn with_refused_plans(&self, mut schedules: Vec<ScheduleRecord>) -> Answer<Vec<ScheduleRecord>> {
        // Only a schedule with a timer can be planned.
        if schedules.iter().any(|schedule| schedule.token.is_some()) {
            for refusal in self.refusals().await?.into_iter().filter(|refusal| refusal.run.is_none()) {
                let schedule = schedules.iter_mut().find(|schedule| schedule.id == refusal.schedule);
                schedule.into_iter().for_each(|schedule| schedule.last_error = Some(refusal.words()));
            }
        }
        Ok(schedules)
    }

    /// Whether nodes on several machines may share it.
    pub fn is_shared(&self) -> bool {
        matches!(self, AnyStore::Postgres(_))
    }

    /// Makes the store unavailable to all other processes, as an outage does: an SQLite file is locked for so long, the
    /// connections of others to a PostgreSQL database are ended. For a store that exists to be tested.
    pub async fn disturb(&self, time: Duration) -> Answer<()> {
        match self {
            AnyStore::Memory(_) => Ok(()),
            AnyStore::Sqlite(store) => store.disturb(time).await,
            AnyStore::Postgres(store) => store.disturb().await,
        }
    }

    /// Leaves a mark that somebody listens to what others tell, for the next few seconds.
    pub async fn listen(&self, listener: Uuid) -> Answer<()> {
        match self {
            AnyStore::Memory(_) | AnyStore::Sqlite(_) => Ok(()),
            AnyStore::Postgres(store) => store.listen(listener).await,
        }
    }

    /// Since when somebody else listens.
    pub async fn listens(&self, teller: Uuid) -> Answer<Option<Timestamp>> {
        match self {
            AnyStore::Memory(_) | AnyStore::Sqlite(_) => Ok(None),
            AnyStore::Postgres(store) => store.listens(teller).await,
        }
    }

    /// Tells those who listen elsewhere what happened. It is kept for a few seconds, and not beyond a crash of the database.
    pub async fn tell(&self, telling: &Telling) -> Answer<()> {
        match self {
            AnyStore::Memory(_) | AnyStore::Sqlite(_) => Ok(()),
            AnyStore::Postgres(store) => store.tell_others(telling).await,
        }
    }

    /// How far others have come with telling.
    pub async fn told_so_far(&self, listener: Uuid) -> Answer<Vec<(Uuid, i64)>> {
        match self {
            AnyStore::Memory(_) | AnyStore::Sqlite(_) => Ok(Vec::new()),
            AnyStore::Postgres(store) => store.told_so_far(listener).await,
        }
    }

    /// What others have told behind what was heard of each, in the order in which each told it.
    pub async fn told(&self, listener: Uuid, heard: &[(Uuid, i64)]) -> Answer<Vec<Telling>> {
        match self {
            AnyStore::Memory(_) | AnyStore::Sqlite(_) => Ok(Vec::new()),
            AnyStore::Postgres(store) => store.told(listener, heard).await,
        }
    }

    /// Removes what was told some seconds ago.
    pub async fn prune_told(&self) -> Answer<()> {
        match self {
            AnyStore::Memory(_) | AnyStore::Sqlite(_) => Ok(()),
            AnyStore::Postgres(store) => store.prune_told().await,
        }
    }

    /// What a store needs done every few seconds while it is worked on, so that it stays as fast as it is.
    pub async fn tend(&self) -> Answer<()> {
        match self {
            AnyStore::Memory(_) | AnyStore::Sqlite(_) => Ok(()),
            AnyStore::Postgres(store) => store.tend().await,
        }
    }
}

macro_rules! each {
    ($any:expr, $store:ident => $call:expr) => {
        match $any {
            AnyStore::Memory($store) => $call,
            AnyStore::Sqlite($store) => $call,
            AnyStore::Postgres($store) => $call,
        }
    };
}
pub(crate) use each;

impl Store for AnyStore {
    async fn clock(&self) -> Answer<Option<Timestamp>> {
        each!(self, store => store.clock().await)
    }

    async fn apply(
        &self,
        now: Timestamp,
        source: &str,
        digest: &str,
        agents: &[AgentSpec],
    ) -> Answer<Applied> {
        each!(self, store => store.apply(now, source, digest, agents).await)
    }

    async fn source_digest(&self, source: &str) -> Answer<Option<String>> {
        each!(self, store => store.source_digest(source).await)
    }

    async fn spent(&self, source: &str) -> Answer<BTreeMap<String, ScheduleDefinition>> {
        each!(self, store => store.spent(source).await)
    }

    async fn put_schedule(
        &self,
        now: Timestamp,
        agent: &str,
        name: &str,
        definition: &ScheduleDefinition,
        expect: &Expect,
    ) -> Answer<Put> {
        each!(self, store => store.put_schedule(now, agent, name, definition, expect).await)
    }

    async fn remove_schedule(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        expect: &Expect,
    ) -> Answer<Removed> {
        each!(self, store => store.remove_schedule(now, schedule, expect).await)
    }

    async fn put_agent(
        &self,
        now: Timestamp,
        agent: &AgentSpec,
        whole: bool,
        expect: &Expect<AgentDefinition>,
    ) -> Answer<PutAgent> {
        each!(self, store => store.put_agent(now, agent, whole, expect).await)
    }

    async fn remove_agent(
        &self,
        now: Timestamp,
        agent: &str,
        expect: &Expect<AgentDefinition>,
    ) -> Answer<Removed> {
        each!(self, store => store.remove_agent(now, agent, expect).await)
    }

    async fn schedule_ids(&self, names: &[&str]) -> Answer<Vec<Option<ScheduleId>>> {
        each!(self, store => store.schedule_ids(names).await)
    }

    async fn definitions(&self, schedules: &[ScheduleId]) -> Answer<Vec<Option<Definitions>>> {
        each!(self, store => store.definitions(schedules).await)
    }

    async fn unreadable(&self) -> Answer<Vec<UnreadableSchedule>> {
        each!(self, store => store.unreadable().await)
    }

    async fn pause(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        reason: Option<&str>,
        until: Option<Timestamp>,
    ) -> Answer<bool> {
        each!(self, store => store.pause(now, schedule, reason, until).await)
    }

    async fn resume(&self, now: Timestamp, schedule: ScheduleId, how: Resume) -> Answer<Option<u64>> {
        each!(self, store => store.resume(now, schedule, how).await)
    }

    async fn due(&self, now: Timestamp, after: Option<Mark>, limit: u32) -> Answer<Vec<Due>> {
        each!(self, store => store.due(now, after, limit).await)
    }

    async fn next_due(&self) -> Answer<Option<Timestamp>> {
        each!(self, store => store.next_due().await)
    }

    async fn commit(&self, now: Timestamp, commits: &[Commit]) -> Answer<Vec<Committed>> {
        each!(self, store => store.commit(now, commits).await)
    }

    async fn enqueue_many(&self, now: Timestamp, requests: &[Enqueue]) -> Answer<Vec<Enqueued>> {
        each!(self, store => store.enqueue_many(now, requests).await)
    }

    async fn send(&self, now: Timestamp, message: &NewMessage) -> Answer<Sent> {
        each!(self, store => store.send(now, message).await)
    }

    async fn session(
        &self,
        now: Timestamp,
        schedule: ScheduleId,
        key: &str,
        verb: SessionVerb,
    ) -> Answer<Option<SessionDone>> {
        each!(self, store => store.session(now, schedule, key, verb).await)
    }

    async fn sessions(
        &self,
        filter: &SessionFilter,
        after: Option<i64>,
        limit: u32,
    ) -> Answer<Page<SessionRecord, i64>> {
        each!(self, store => store.sessions(filter, after, limit).await)
    }

    async fn put_lanes(&self, now: Timestamp, lanes: &[(String, LaneSettings)]) -> Answer<()> {
        each!(self, store => store.put_lanes(now, lanes).await)
    }

    async fn set_lane(&self, now: Timestamp, lane: &str, settings: Option<LaneSettings>) -> Answer<()> {
        each!(self, store => store.set_lane(now, lane, settings).await)
    }

    async fn lanes(&self, now: Timestamp) -> Answer<Vec<LaneRecord>> {
        each!(self, store => store.lanes(now).await)
    }

    async fn lane_settings(&self) -> Answer<Vec<LaneRecord>> {
        each!(self, store => store.lane_settings().await)
    }

    async fn next_start(&self, now: Timestamp) -> Answer<Option<Timestamp>> {
        each!(self, store => store.next_start(now).await)
    }

    async fn clear_lane(&self, now: Timestamp, lane: &str) -> Answer<Vec<RunId>> {
        each!(self, store => store.clear_lane(now, lane).await)
    }

    async fn claim(&self, now: Timestamp, claim: &Claim) -> Answer<Vec<Claimed>> {
        each!(self, store => store.claim(now, claim).await)
    }

    async fn finish(&self, now: Timestamp, finishes: &[Finish]) -> Answer<Vec<Finished>> {
        each!(self, store => store.finish(now, finishes).await)
    }

    async fn cancel(&self, now: Timestamp, run: RunId, reason: Reason) -> Answer<Cancelled> {
        each!(self, store => store.cancel(now, run, reason).await)
    }

    async fn give_back(
        &self,
        now: Timestamp,
        node: NodeId,
        runs: &[(RunId, Epoch)],
    ) -> Answer<Vec<(RunId, RunState)>> {
        each!(self, store => store.give_back(now, node, runs).await)
    }

    async fn append_output(&self, run: RunId, epoch: Epoch, chunks: &[OutputChunk]) -> Answer<bool> {
        each!(self, store => store.append_output(run, epoch, chunks).await)
    }

    async fn output(&self, run: RunId, after: Option<u64>, limit_bytes: u32) -> Answer<Vec<OutputChunk>> {
        each!(self, store => store.output(run, after, limit_bytes).await)
    }

    fn is_held(&self) -> bool {
        each!(self, store => store.is_held())
    }

    async fn join(&self, node: &Node) -> Answer<()> {
        each!(self, store => store.join(node).await)
    }

    async fn renew(&self, node: NodeId, lease_until: Timestamp) -> Answer<Renewed> {
        each!(self, store => store.renew(node, lease_until).await)
    }

    async fn marks(&self, node: NodeId) -> Answer<Marks> {
        each!(self, store => store.marks(node).await)
    }

    async fn running_lanes(&self, node: NodeId) -> Answer<Vec<(RunId, String)>> {
        each!(self, store => store.running_lanes(node).await)
    }

    async fn drain(&self, now: Timestamp, node: NodeId, draining: bool) -> Answer<Drained> {
        each!(self, store => store.drain(now, node, draining).await)
    }

    async fn nodes(&self) -> Answer<Vec<Node>> {
        each!(self, store => store.nodes().await)
    }

    async fn fence(&self, now: Timestamp, node: NodeId, lease_seen: Timestamp) -> Answer<Option<Rescued>> {
        each!(self, store => store.fence(now, node, lease_seen).await)
    }

    async fn pass_breaker(
        &self,
        now: Timestamp,
        agent: AgentId,
        command: &str,
        run: RunId,
    ) -> Answer<Admits> {
        each!(self, store => store.pass_breaker(now, agent, command, run).await)
    }

    async fn reset_breaker(&self, now: Timestamp, agent: AgentId, command: &str) -> Answer<bool> {
        each!(self, store => store.reset_breaker(now, agent, command).await)
    }

    async fn reset_budget(&self, now: Timestamp, agent: AgentId) -> Answer<bool> {
        each!(self, store => store.reset_budget(now, agent).await)
    }

    async fn prune(&self, now: Timestamp, retention: &Retention) -> Answer<Pruned> {
        each!(self, store => store.prune(now, retention).await)
    }

    async fn run(&self, run: RunId) -> Answer<Option<RunRecord>> {
        let found = each!(self, store => store.run(run).await)?;
        Ok(self.with_refused_ends(found.into_iter().collect()).await?.pop())
    }

    async fn runs_by_id(&self, runs: &[RunId]) -> Answer<Vec<RunRecord>> {
        let found = each!(self, store => store.runs_by_id(runs).await)?;
        self.with_refused_ends(found).await
    }

    async fn live_runs(&self) -> Answer<Vec<RunRecord>> {
        let found = each!(self, store => store.live_runs().await)?;
        self.with_refused_ends(found).await
    }

    async fn ended_runs(&self, schedule: ScheduleId, limit: u32) -> Answer<Vec<RunRecord>> {
        each!(self, store => store.ended_runs(schedule, limit).await)
    }

    async fn schedule(&self, name: &str) -> Answer<Option<ScheduleRecord>> {
        let found = each!(self, store => store.schedule(name).await)?;
        Ok(self.with_refused_plans(found.into_iter().collect()).await?.pop())
    }

    async fn schedules(
        &self,
        filter: &ScheduleFilter,
        after: Option<&str>,
        limit: u32,
    ) -> Answer<Page<ScheduleRecord, String>> {
        let found = each!(self, store => store.schedules(filter, after, limit).await)?;
        Ok(Page { items: self.with_refused_plans(found.items).await?, next: found.next })
    }

    async fn runs(
        &self,
        filter: &RunFilter,
        after: Option<RunId>,
        limit: u32,
    ) -> Answer<Page<RunRecord, RunId>> {
        let found = each!(self, store => store.runs(filter, after, limit).await)?;
        Ok(Page { items: self.with_refused_ends(found.items).await?, next: found.next })
    }

    async fn agents(&self) -> Answer<Vec<AgentRecord>> {
        each!(self, store => store.agents().await)
    }

    async fn breakers(&self) -> Answer<Vec<BreakerEntry>> {
        each!(self, store => store.breakers().await)
    }

    async fn skips(
        &self,
        schedule: ScheduleId,
        after: Option<Timestamp>,
        limit: u32,
    ) -> Answer<Vec<SkipRange>> {
        each!(self, store => store.skips(schedule, after, limit).await)
    }

    async fn tick(&self, schedule: ScheduleId, tick_at: Timestamp) -> Answer<TickFate> {
        each!(self, store => store.tick(schedule, tick_at).await)
    }

    async fn revision_at(
        &self,
        schedule: ScheduleId,
        at: Timestamp,
    ) -> Answer<Option<(i64, ScheduleDefinition)>> {
        each!(self, store => store.revision_at(schedule, at).await)
    }

    async fn breaker(&self, agent: AgentId, command: &str) -> Answer<BreakerRecord> {
        each!(self, store => store.breaker(agent, command).await)
    }

    async fn counts(&self) -> Answer<Counts> {
        each!(self, store => store.counts().await)
    }

    async fn changed(&self) {
        each!(self, store => store.changed().await);
    }

    async fn unreadable_rows(&self) -> Answer<Vec<String>> {
        each!(self, store => store.unreadable_rows().await)
    }

    async fn held_runs(&self, runs: &[RunId]) -> Answer<HashSet<RunId>> {
        each!(self, store => store.held_runs(runs).await)
    }

    async fn held_schedules(&self, schedules: &[ScheduleId]) -> Answer<HashSet<ScheduleId>> {
        each!(self, store => store.held_schedules(schedules).await)
    }

    async fn note_refusal(&self, now: Timestamp, part: RefusedPart, reason: &str) -> Answer<()> {
        each!(self, store => store.note_refusal(now, part, reason).await)
    }

    async fn refusals(&self) -> Answer<Vec<Refusal>> {
        each!(self, store => store.refusals().await)
    }

    async fn probe(&self) -> Answer<()> {
        each!(self, store => store.probe().await)
    }

    async fn integrity(&self) -> Answer<Vec<String>> {
        each!(self, store => store.integrity().await)
    }
}
