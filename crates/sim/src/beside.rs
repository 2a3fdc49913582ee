//! The store in memory, and beside it another store that is asked the same: their answers must be equal.
//!
//! Instants and ids of runs and nodes are given by the caller. What stores number by themselves (agents, schedules, sessions,
//! versions) is translated on the way to the other store, and left out where answers are compared.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::path::PathBuf;

use belfry::{AgentDefinition, AgentSpec, NodeId, Resume, RunId, ScheduleDefinition, Timestamp};
use belfry_core::breaker::Admits;
use belfry_core::{AgentId, Epoch, Reason, RunState, ScheduleId, SkipRange};
use belfry_store::memory::Memory;
use belfry_store::postgres::Postgres;
use belfry_store::sqlite::Sqlite;
use belfry_store::*;
use parking_lot::Mutex;
use tokio::runtime::Runtime;

/// How often the other store is asked again while it is away.
const ASKED_AGAIN_MAX: usize = 5;

/// The store in memory, and perhaps another one beside it.
#[derive(Default)]
pub struct Beside {
    /// The store that decides.
    pub memory: Memory,
    other: Option<Other>,
    /// Runs that came back from a dead node or ended with it, with the epochs of their attempts there.
    rescued: Mutex<Vec<(RunId, Epoch)>>,
}

/// A store that is asked what the one in memory is asked.
pub struct Other {
    store: AnyStore,
    runtime: Runtime,
    /// Removed in the end.
    folder: Option<PathBuf>,
    ids: Mutex<Ids>,
    /// How often each read was asked that nodes repeat.
    repeats: Mutex<BTreeMap<&'static str, u64>>,
    /// The first answer that was not equal.
    differs: Mutex<Option<String>>,
}

/// The other store's numbers by those of the store in memory.
#[derive(Default)]
struct Ids {
    schedules: HashMap<ScheduleId, ScheduleId>,
    agents: HashMap<AgentId, AgentId>,
    /// By schedule and version.
    versions: HashMap<(ScheduleId, i64), i64>,
}

impl Other {
    /// A new SQLite file in a folder of its own, in memory if the system has a file system there.
    pub fn sqlite(seed: u64) -> Result<Other, Error> {
        let shared = PathBuf::from("/dev/shm");
        let place = if shared.is_dir() { shared } else { std::env::temp_dir() };
        let folder = place.join(format!("belfry-sim-{}-{seed}", std::process::id()));
        let unavailable = |error: std::io::Error| Error::Unavailable {
            detail: format!("{}: {error}", folder.display()),
            ambiguous: false,
        };
        std::fs::create_dir_all(&folder).map_err(unavailable)?;
        let runtime = runtime().map_err(unavailable)?;
        let store = Sqlite::serve(&folder.join("store.db"))?;
        Ok(Other::new(AnyStore::Sqlite(store), runtime, Some(folder)))
    }

    /// An empty PostgreSQL database.
    pub fn postgres(url: &str) -> Result<Other, Error> {
        let unavailable =
            |error: std::io::Error| Error::Unavailable { detail: error.to_string(), ambiguous: false };
        let runtime = runtime().map_err(unavailable)?;
        let store = runtime.block_on(Postgres::open(url))?;
        Ok(Other::new(AnyStore::Postgres(store), runtime, None))
    }

    fn new(store: AnyStore, runtime: Runtime, folder: Option<PathBuf>) -> Other {
        Other {
            store,
            runtime,
            folder,
            ids: Mutex::default(),
            repeats: Mutex::default(),
            differs: Mutex::default(),
        }
    }

    /// Asks the other store, again if it was away for a moment: a server ends the transaction of a client that a busy machine
    /// keeps from going on. What was refused for its content is not asked again.
    fn ask<T, F: Future<Output = Result<T, Error>>>(&self, call: impl Fn() -> F) -> Result<T, Error> {
        let mut answer = self.runtime.block_on(call());
        for _ in 0..ASKED_AGAIN_MAX {
            if answer.is_ok() || answer.as_ref().is_err_and(Error::is_of_content) {
                break;
            }
            answer = self.runtime.block_on(call());
        }
        answer
    }

    fn compare<T: Words>(&self, verb: &str, ours: &Result<T, Error>, theirs: &Result<T, Error>) {
        let words = |answer: &Result<T, Error>| match answer {
            Ok(answer) => answer.words(),
            Err(error) => format!("an error of content: {}", error.is_of_content()),
        };
        let mut differs = self.differs.lock();
        if differs.is_none() {
            let detail = |answer: &Result<T, Error>| {
                answer.as_ref().err().map_or_else(String::new, |error| format!(" ({error})"))
            };
            let (our_detail, their_detail) = (detail(ours), detail(theirs));
            let (ours, theirs) = (words(ours), words(theirs));
            if ours != theirs {
                *differs = Some(format!(
                    "{verb}: the stores differ\n  memory {ours}{our_detail}\n  other  {theirs}{their_detail}"
                ));
            }
        }
    }

    /// Whether a read that nodes repeat is compared this time: the first, and then one of so many.
    fn is_turn(&self, verb: &'static str, of: u64) -> bool {
        let mut repeats = self.repeats.lock();
        let count = repeats.entry(verb).or_default();
        *count += 1;
        *count % of == 1
    }

    /// Learns the other store's numbers of all agents and schedules.
    fn learn(&self, memory: &Memory) {
        let all = ScheduleFilter::default();
        let mut ids = self.ids.lock();
        let ours = now(memory.schedules(&all, None, u32::MAX));
        let theirs = self.runtime.block_on(self.store.schedules(&all, None, 1_000_000));
        for (ours, theirs) in ours.into_iter().zip(theirs) {
            let theirs: HashMap<&str, &ScheduleRecord> =
                theirs.items.iter().map(|record| (record.name.as_str(), record)).collect();
            for record in &ours.items {
                if let Some(other) = theirs.get(record.name.as_str()) {
                    ids.schedules.insert(record.id, other.id);
                    ids.agents.insert(record.agent, other.agent);
                }
            }
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            // The folder is in a place for temporary files.
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

fn runtime() -> std::io::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()
}

/// The answer of the store in memory, which never waits.
fn now<T>(call: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let mut call = std::pin::pin!(call);
    match call.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop())) {
        std::task::Poll::Ready(answer) => answer,
        std::task::Poll::Pending => {
            Err(Error::Unavailable { detail: "the store in memory waits".into(), ambiguous: false })
        }
    }
}

impl Ids {
    fn schedule(&self, schedule: ScheduleId) -> ScheduleId {
        self.schedules.get(&schedule).copied().unwrap_or(schedule)
    }

    fn agent(&self, agent: AgentId) -> AgentId {
        self.agents.get(&agent).copied().unwrap_or(agent)
    }

    fn run(&self, run: &NewRun) -> NewRun {
        NewRun { agent: self.agent(run.agent), schedule: self.schedule(run.schedule), ..run.clone() }
    }

    fn commits(&self, commits: &[Commit]) -> Vec<Commit> {
        let there = |commit: &Commit| Commit {
            schedule: self.schedule(commit.schedule),
            agent: self.agent(commit.agent),
            version: self.versions.get(&(commit.schedule, commit.version)).copied().unwrap_or(i64::MIN),
            runs: commit.runs.iter().map(|run| self.run(run)).collect(),
            ..commit.clone()
        };
        commits.iter().map(there).collect()
    }

    fn requests(&self, requests: &[Enqueue]) -> Vec<Enqueue> {
        let there = |request: &Enqueue| Enqueue { run: self.run(&request.run), ..request.clone() };
        requests.iter().map(there).collect()
    }

    fn breakers(&self, breakers: &[(AgentId, String)]) -> Vec<(AgentId, String)> {
        breakers.iter().map(|(agent, command)| (self.agent(*agent), command.clone())).collect()
    }

    fn schedules(&self, schedules: &[ScheduleId]) -> Vec<ScheduleId> {
        schedules.iter().map(|schedule| self.schedule(*schedule)).collect()
    }
}

impl Beside {
    /// The store in memory with another one beside it.
    pub fn new(other: Option<Other>) -> Beside {
        Beside { other, ..Beside::default() }
    }

    /// Runs that were rescued since the last call, with the epochs of their attempts on the dead node.
    pub fn take_rescued(&self) -> Vec<(RunId, Epoch)> {
        std::mem::take(&mut self.rescued.lock())
    }

    /// The first answer that was not equal, once.
    pub fn differs(&self) -> Option<String> {
        self.other.as_ref()?.differs.lock().take()
    }

    /// Compares everything there is to see.
    pub fn compare_all(&self, at: Timestamp) {
        let Some(other) = &self.other else { return };
        let ids = other.ids.lock();
        macro_rules! compare {
            ($verb:ident($($ours:expr),*), $($theirs:expr),*) => {{
                let ours = now(self.memory.$verb($($ours),*));
                let theirs = other.runtime.block_on(other.store.$verb($($theirs),*));
                other.compare(stringify!($verb), &ours, &theirs);
                ours
            }};
            ($verb:ident($($ours:expr),*)) => { compare!($verb($($ours),*), $($ours),*) };
        }
        let _ = compare!(counts());
        let _ = compare!(next_due());
        let _ = compare!(live_runs());
        let _ = compare!(nodes());
        let _ = compare!(lanes(at));
        let _ = compare!(agents());
        let _ = compare!(breakers());
        let _ = compare!(sessions(&SessionFilter::default(), None, 1000));
        let all = ScheduleFilter::default();
        let schedules = compare!(schedules(&all, None, 1000));
        for record in schedules.into_iter().flat_map(|page| page.items) {
            let there = ids.schedule(record.id);
            let _ = compare!(skips(record.id, None, 1000), there, None, 1000);
            let _ = compare!(ended_runs(record.id, 20), there, 20);
            let command = &record.definition.options.command;
            let _ = compare!(breaker(record.agent, command), ids.agent(record.agent), command);
        }
    }
}

macro_rules! both {
    ($ids:ident; $($verb:ident($($name:ident: $type:ty),*) -> $answer:ty $(, $given:ident = $there:expr)*;)*) => {
        $(async fn $verb(&self, $($name: $type),*) -> Result<$answer, Error> {
            let answer = self.memory.$verb($($name),*).await;
            if let Some(other) = &self.other {
                let guard = other.ids.lock();
                let $ids = &*guard;
                $(let $given = $there;)*
                let theirs = other.ask(|| other.store.$verb($($name),*));
                let _ = $ids;
                drop(guard);
                other.compare(stringify!($verb), &answer, &theirs);
            }
            answer
        })*
    };
}

/// Reads that nodes repeat: the other store is asked one time of so many.
macro_rules! seldom {
    ($ids:ident; $($of:literal $verb:ident($($name:ident: $type:ty),*) -> $answer:ty $(, $given:ident = $there:expr)*;)*) => {
        $(async fn $verb(&self, $($name: $type),*) -> Result<$answer, Error> {
            let answer = self.memory.$verb($($name),*).await;
            if let Some(other) = self.other.as_ref().filter(|other| other.is_turn(stringify!($verb), $of)) {
                let guard = other.ids.lock();
                let $ids = &*guard;
                $(let $given = $there;)*
                let theirs = other.ask(|| other.store.$verb($($name),*));
                let _ = $ids;
                drop(guard);
                other.compare(stringify!($verb), &answer, &theirs);
            }
            answer
        })*
    };
}

/// Only the store in memory is asked.
macro_rules! alone {
    ($($verb:ident($($name:ident: $type:ty),*) -> $answer:ty;)*) => {
        $(async fn $verb(&self, $($name: $type),*) -> Result<$answer, Error> {
            self.memory.$verb($($name),*).await
        })*
    };
}

impl Store for Beside {
    async fn apply(
        &self,
        now: Timestamp,
        source: &str,
        digest: &str,
        agents: &[AgentSpec],
    ) -> Result<Applied, Error> {
        let answer = self.memory.apply(now, source, digest, agents).await;
        if let Some(other) = &self.other {
            let theirs = other.ask(|| other.store.apply(now, source, digest, agents));
            other.compare("apply", &answer, &theirs);
            other.learn(&self.memory);
        }
        answer
    }

    async fn due(&self, now: Timestamp, after: Option<Mark>, limit: u32) -> Result<Vec<Due>, Error> {
        let answer = self.memory.due(now, after, limit).await;
        let is_empty = answer.as_ref().is_ok_and(Vec::is_empty);
        if let Some(other) = self.other.as_ref().filter(|other| !is_empty || other.is_turn("due", 32)) {
            let mut ids = other.ids.lock();
            let after = after.map(|(at, schedule)| (at, ids.schedule(schedule)));
            let theirs = other.ask(|| other.store.due(now, after, limit));
            other.compare("due", &answer, &theirs);
            for (ours, theirs) in answer.iter().flatten().zip(theirs.iter().flatten()) {
                ids.versions.insert((ours.schedule, ours.version), theirs.version);
            }
        }
        answer
    }

    /// Lanes that nobody made are not compared: a store tells of them at once, or only when a run there is ready.
    async fn lane_settings(&self) -> Result<Vec<LaneRecord>, Error> {
        let answer = self.memory.lane_settings().await;
        if let Some(other) = self.other.as_ref().filter(|other| other.is_turn("lane_settings", 32)) {
            let made = |lanes: Vec<LaneRecord>| -> Vec<LaneRecord> {
                lanes.into_iter().filter(|lane| lane.settings().is_some()).collect()
            };
            let theirs = other.runtime.block_on(other.store.lane_settings()).map(made);
            other.compare("lane_settings", &answer.clone().map(made), &theirs);
        }
        answer
    }

    /// Also claims that start nothing: by their instants stores notice a clock that is set back.
    async fn claim(&self, now: Timestamp, claim: &Claim) -> Result<Vec<Claimed>, Error> {
        let answer = self.memory.claim(now, claim).await;
        if let Some(other) = &self.other {
            let theirs = other.ask(|| other.store.claim(now, claim));
            other.compare("claim", &answer, &theirs);
        }
        answer
    }

    async fn fence(
        &self,
        now: Timestamp,
        node: NodeId,
        lease_seen: Timestamp,
    ) -> Result<Option<Rescued>, Error> {
        let answer = self.memory.fence(now, node, lease_seen).await;
        if let Ok(Some(rescued)) = &answer {
            let runs = rescued.pending.iter().chain(rescued.ended.iter().map(|(run, _)| run));
            for run in runs {
                let record = self.memory.run(*run).await;
                self.rescued.lock().extend(record.into_iter().flatten().map(|record| (*run, record.epoch)));
            }
        }
        if let Some(other) = &self.other {
            let theirs = other.ask(|| other.store.fence(now, node, lease_seen));
            other.compare("fence", &answer, &theirs);
        }
        answer
    }

    async fn changed(&self) {
        std::future::pending().await
    }

    both! { ids;
        source_digest(source: &str) -> Option<String>;
        spent(source: &str) -> BTreeMap<String, ScheduleDefinition>;
        pause(now: Timestamp, schedule: ScheduleId, reason: Option<&str>, until: Option<Timestamp>) -> bool,
            schedule = ids.schedule(schedule);
        resume(now: Timestamp, schedule: ScheduleId, how: Resume) -> Option<u64>, schedule = ids.schedule(schedule);
        commit(now: Timestamp, commits: &[Commit]) -> Vec<Committed>, commits = &ids.commits(commits);
        enqueue_many(now: Timestamp, requests: &[Enqueue]) -> Vec<Enqueued>, requests = &ids.requests(requests);
        send(now: Timestamp, message: &NewMessage) -> Sent,
            message = &NewMessage { run: ids.run(&message.run), ..message.clone() };
        session(now: Timestamp, schedule: ScheduleId, key: &str, verb: SessionVerb) -> Option<SessionDone>,
            schedule = ids.schedule(schedule);
        put_lanes(now: Timestamp, lanes: &[(String, LaneSettings)]) -> ();
        set_lane(now: Timestamp, lane: &str, settings: Option<LaneSettings>) -> ();
        lanes(now: Timestamp) -> Vec<LaneRecord>;
        clear_lane(now: Timestamp, lane: &str) -> Vec<RunId>;
        finish(now: Timestamp, finishes: &[Finish]) -> Vec<Finished>;
        cancel(now: Timestamp, run: RunId, reason: Reason) -> Cancelled;
        give_back(now: Timestamp, node: NodeId, runs: &[(RunId, Epoch)]) -> Vec<(RunId, RunState)>;
        append_output(run: RunId, epoch: Epoch, chunks: &[OutputChunk]) -> bool;
        output(run: RunId, after: Option<u64>, limit_bytes: u32) -> Vec<OutputChunk>;
        join(node: &Node, left: Option<NodeId>) -> ();
        renew(node: NodeId, lease_until: Timestamp) -> Renewed;
        drain(now: Timestamp, node: NodeId, draining: bool) -> Drained;
        pass_breaker(now: Timestamp, agent: AgentId, command: &str, run: RunId) -> Admits, agent = ids.agent(agent);
        reset_breaker(now: Timestamp, agent: AgentId, command: &str) -> bool, agent = ids.agent(agent);
        reset_budget(now: Timestamp, agent: AgentId) -> bool, agent = ids.agent(agent);
        prune(now: Timestamp, retention: &Retention) -> Pruned;
        run(run: RunId) -> Option<RunRecord>;
        live_runs() -> Vec<RunRecord>;
        schedule(name: &str) -> Option<ScheduleRecord>;
        integrity() -> Vec<String>;
    }

    seldom! { ids;
        100 unreadable() -> Vec<UnreadableSchedule>;
        100 unreadable_rows() -> Vec<String>;
        32 next_due() -> Option<Timestamp>;
        32 marks(node: NodeId) -> Marks;
        32 running_lanes(node: NodeId) -> Vec<(RunId, String)>;
        8 nodes() -> Vec<Node>;
        8 breaker(agent: AgentId, command: &str) -> BreakerRecord, agent = ids.agent(agent);
        4 tripped(breakers: &[(AgentId, String)]) -> Vec<bool>, breakers = &ids.breakers(breakers);
        4 definitions(schedules: &[ScheduleId]) -> Vec<Option<Definitions>>, schedules = &ids.schedules(schedules);
    }

    // Reads that nodes do not ask for, and verbs that the simulation does not know; `next_start` may differ, because it
    // leaves out more or fewer of the runs that wait for a gate.
    alone! {
        schedule_ids(names: &[&str]) -> Vec<Option<ScheduleId>>;
        next_start(now: Timestamp) -> Option<Timestamp>;
        put_schedule(now: Timestamp, agent: &str, name: &str, definition: &ScheduleDefinition, expect: &Expect) -> Put;
        remove_schedule(now: Timestamp, schedule: ScheduleId, expect: &Expect) -> Removed;
        put_agent(now: Timestamp, agent: &AgentSpec, whole: bool, expect: &Expect<AgentDefinition>) -> PutAgent;
        remove_agent(now: Timestamp, agent: &str, expect: &Expect<AgentDefinition>) -> Removed;
        sessions(filter: &SessionFilter, after: Option<i64>, limit: u32) -> Page<SessionRecord, i64>;
        ended_runs(schedule: ScheduleId, limit: u32) -> Vec<RunRecord>;
        schedules(filter: &ScheduleFilter, after: Option<&str>, limit: u32) -> Page<ScheduleRecord, String>;
        runs(filter: &RunFilter, after: Option<RunId>, limit: u32) -> Page<RunRecord, RunId>;
        agents() -> Vec<AgentRecord>;
        breakers() -> Vec<BreakerEntry>;
        skips(schedule: ScheduleId, after: Option<Timestamp>, limit: u32) -> Vec<SkipRange>;
        tick(schedule: ScheduleId, tick_at: Timestamp) -> TickFate;
        revision_at(schedule: ScheduleId, at: Timestamp) -> Option<(i64, ScheduleDefinition)>;
        counts() -> Counts;
    }
}

impl Hooks for Beside {
    both! { ids;
        knock(now: Timestamp, knock: &Knock) -> Knocked, knock = &Knock { run: ids.run(&knock.run), ..knock.clone() };
    }
}

impl Watch for Beside {
    both! { ids;
        beat(snapshot: &Snapshot) -> bool;
        prune_beats(snapshots_before: Option<Timestamp>, nodes_before: Option<Timestamp>, batch: u32) -> u32;
    }

    alone! {
        snapshots(filter: &SnapshotFilter, before: Option<i64>, limit: u32) -> Page<SnapshotRow, i64>;
    }
}

/// An answer in words, without the numbers that a store gives out.
trait Words {
    fn words(&self) -> String;
}

macro_rules! as_it_is {
    ($($type:ty),*) => {
        $(impl Words for $type {
            fn words(&self) -> String {
                format!("{self:?}")
            }
        })*
    };
}

as_it_is!(
    (),
    bool,
    u32,
    (RunId, RunState),
    (RunId, String),
    Admits,
    u64,
    String,
    Timestamp,
    RunId,
    SkipRange,
    BTreeMap<String, ScheduleDefinition>,
    Applied,
    Committed,
    Enqueued,
    Sent,
    SessionDone,
    LaneRecord,
    Finished,
    Cancelled,
    OutputChunk,
    Marks,
    Drained,
    Node,
    Pruned,
    Knocked,
    Counts,
    BreakerRecord
);

impl<T: Words> Words for Option<T> {
    fn words(&self) -> String {
        self.as_ref().map_or("none".into(), Words::words)
    }
}

impl<T: Words> Words for Vec<T> {
    fn words(&self) -> String {
        self.iter().map(Words::words).collect::<Vec<_>>().join("\n         ")
    }
}

impl<T: Words, C> Words for Page<T, C> {
    fn words(&self) -> String {
        self.items.words()
    }
}

fn sorted<T: Clone + Ord + Debug>(list: &[T]) -> String {
    let mut list = list.to_vec();
    list.sort();
    format!("{list:?}")
}

impl Words for Renewed {
    fn words(&self) -> String {
        match self {
            Renewed::Held { cancels, live } => {
                let cancels: Vec<_> =
                    cancels.iter().map(|(run, epoch, why)| (run, epoch, why.as_str())).collect();
                format!("held, cancels {} live {:?}", sorted(&cancels), live.as_deref().map(sorted))
            }
            Renewed::Fenced => "fenced".into(),
        }
    }
}

impl Words for Rescued {
    fn words(&self) -> String {
        let ended: Vec<_> = self.ended.iter().map(|(run, state)| (run, format!("{state:?}"))).collect();
        let (pending, suspects) = (sorted(&self.pending), sorted(&self.suspects));
        format!("pending {pending} ended {} suspects {suspects}", sorted(&ended))
    }
}

impl Words for Due {
    fn words(&self) -> String {
        let Due { name, standing, live, pending, agent_definition, last_start, .. } = self;
        // Without a policy nobody asks what stands there.
        let breaker = agent_definition.breaker.as_ref().map(|_| self.breaker);
        let budget = agent_definition.budget.as_ref().and(self.budget);
        // Nobody asks what lives of a schedule that cannot be read.
        let facts = self.compiled.is_ok().then_some((live, pending, breaker, budget, last_start));
        format!("{name} {standing:?} {facts:?}")
    }
}

impl Words for Definitions {
    fn words(&self) -> String {
        let Definitions { name, agent_name, agent_definition, compiled, .. } = self;
        let Definitions { origin, cursor_at, waits_for, last_success_at, .. } = self;
        format!(
            "{name} {agent_name} {agent_definition:?} {:?} {origin:?} {cursor_at:?} {waits_for:?} {last_success_at:?}",
            compiled.as_ref().map(|schedule| &schedule.definition)
        )
    }
}

impl Words for UnreadableSchedule {
    fn words(&self) -> String {
        format!("{} {}", self.name, self.why)
    }
}

impl Words for Claimed {
    fn words(&self) -> String {
        format!("{:?}", Claimed { agent: 0, schedule: 0, ..self.clone() })
    }
}

impl Words for RunRecord {
    fn words(&self) -> String {
        format!("{:?}", RunRecord { agent: 0, schedule: 0, ..self.clone() })
    }
}

impl Words for ScheduleRecord {
    fn words(&self) -> String {
        format!("{:?}", ScheduleRecord { id: 0, agent: 0, ..self.clone() })
    }
}

impl Words for SessionRecord {
    fn words(&self) -> String {
        format!("{:?}", SessionRecord { id: 0, schedule: 0, ..self.clone() })
    }
}

impl Words for AgentRecord {
    fn words(&self) -> String {
        let AgentRecord { name, source, definition, budget, .. } = self;
        format!("{name} {source} {definition:?} {budget:?}")
    }
}

impl Words for BreakerEntry {
    fn words(&self) -> String {
        format!("{} {} {:?}", self.agent_name, self.command, self.breaker)
    }
}
