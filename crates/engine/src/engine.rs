//! The engine as its users see it: built, started, asked, stopped.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use belfry_core::check::Check;
use belfry_core::definition::handler_label;
use belfry_core::input::StoredPayload;
use belfry_core::session::Usage;
use belfry_core::{AgentDefinition, AgentSpec, NodeId, RunId, Schedule, ScheduleId, Trigger};
use belfry_runner::{Attempt, KeeperHandle, Runner, RunnerOptions};
use belfry_store::{
    AnyStore, Applied, Defined, Enqueue, Enqueued, Expect, Given, Key, NewRun, Node, PutAgent, Removed,
    RunRecord, ScheduleRecord, Store,
};
use belfry_time::{SignedDuration, Timestamp};
use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use uuid::{ContextV7, Uuid};

use crate::clock::Clock;
use crate::driver::{Driver, GUEST, Input, Options, Phase};
use crate::error::Error;
use crate::event::{Event, Level, Name};
use crate::handler::{Context, Handler, HandlerError};
use crate::node::{host, own_process};
use crate::relay::{Relay, Teller};
use crate::session::{Made, UsageOf, refuse_message_keys, to_known_lane};
use crate::shell::{Calls, ContextOf, MESSAGES_MAX, Message, OnTrigger, Shell, View};

/// Events that a slow listener may be behind before it loses some.
const EVENTS_MAX: usize = 4096;

/// Where an engine is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It does nothing.
    Stopped,
    /// It plans and runs.
    Running,
    /// It lets what runs end, takes no new work, and stays up: see [`Engine::drain`].
    Draining,
    /// It lets what runs end.
    Stopping,
}

/// What an engine has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// When it was started.
    pub started_at: Option<Timestamp>,
    /// How often it has looked for due schedules.
    pub checks: u64,
    /// How many attempts it has started.
    pub triggers: u64,
    /// When it looked last.
    pub last_check_at: Option<Timestamp>,
}

/// How to stop.
#[derive(Debug, Clone, Copy)]
pub struct StopOptions {
    /// Whether what runs may end by itself.
    pub wait: bool,
    /// For how long.
    pub timeout: Duration,
}

impl Default for StopOptions {
    fn default() -> StopOptions {
        StopOptions { wait: true, timeout: Duration::from_secs(30) }
    }
}

/// A run that is asked for by hand.
#[derive(Debug, Clone, Default)]
pub struct RunRequest {
    /// Instead of the schedule's. Used as it is: it is no template.
    pub prompt: Option<String>,
    /// Over the schedule's, key by key.
    pub payload: Map<String, Value>,
    /// Makes a repeat answer with the first run.
    pub key: Option<String>,
    /// Its trace, where the caller has one.
    pub trace_id: Option<Uuid>,
}

/// Puts an engine together.
#[derive(Default)]
pub struct Builder {
    store: Option<Arc<AnyStore>>,
    clock: Option<Clock>,
    source: Option<String>,
    agents: Vec<AgentSpec>,
    handlers: HashMap<String, Handler>,
    on_trigger: Option<OnTrigger>,
    usage_of: Option<UsageOf>,
    context_of: Option<ContextOf>,
    options: Options,
    keeper: Option<KeeperHandle>,
    state_dir: Option<PathBuf>,
    config: Option<PathBuf>,
}

impl Builder {
    /// Where everything is kept; in memory where nothing is said.
    pub fn store(mut self, store: impl Into<Arc<AnyStore>>) -> Builder {
        self.store = Some(store.into());
        self
    }

    /// The clock; the host's where nothing is said, or that of a store that has one.
    pub fn clock(mut self, clock: impl Into<Clock>) -> Builder {
        self.clock = Some(clock.into());
        self
    }

    /// The name under which the agents are kept in the store. Programs that share a store and have different agents need
    /// different names: what a name no longer has is retired. Without one it is `engine:` and the program's file name.
    pub fn source(mut self, name: impl Into<String>) -> Builder {
        self.source = Some(name.into());
        self
    }

    /// The agents to begin with.
    pub fn agents(mut self, agents: impl IntoIterator<Item = AgentSpec>) -> Builder {
        self.agents.extend(agents);
        self
    }

    /// What an agent does, as a Rust function. Of the nodes of a store only those with this function claim runs of the agent.
    pub fn handler<F, R>(mut self, agent: impl Into<String>, function: F) -> Builder
    where
        F: Fn(Context) -> R + Send + Sync + 'static,
        R: Future<Output = Result<(), HandlerError>> + Send + 'static,
    {
        self.handlers.insert(agent.into(), Handler::new(function));
        self
    }

    /// Is told of every attempt just before it starts.
    pub fn on_trigger(mut self, tell: impl Fn(&Attempt) + Send + Sync + 'static) -> Builder {
        self.on_trigger = Some(Arc::new(tell));
        self
    }

    /// Says how much of its context window a session, `agent/schedule:key`, has used: asked before each message and at each
    /// end of a run. From 60 % on a session runs one at a time.
    pub fn usage(mut self, tell: impl Fn(&str) -> Option<Usage> + Send + Sync + 'static) -> Builder {
        self.usage_of = Some(Arc::new(tell));
        self
    }

    /// Says what else is worth knowing of this node; asked at each heartbeat, and kept with the machine's numbers.
    pub fn context(mut self, tell: impl Fn() -> Map<String, Value> + Send + Sync + 'static) -> Builder {
        self.context_of = Some(Arc::new(tell));
        self
    }

    /// A lane with so many slots on this node.
    pub fn lane(mut self, name: impl Into<String>, slots: u32) -> Builder {
        self.options.lanes.insert(name.into(), slots);
        self
    }

    /// How the node works.
    pub fn options(mut self, options: Options) -> Builder {
        self.options = options;
        self
    }

    /// The process that ends this one's children should it be killed.
    pub fn keeper(mut self, keeper: KeeperHandle) -> Builder {
        self.keeper = Some(keeper);
        self
    }

    /// Where attempts have their private files.
    pub fn state_dir(mut self, folder: impl Into<PathBuf>) -> Builder {
        self.state_dir = Some(folder.into());
        self
    }

    /// The configuration file that children get as `BELFRY_CONFIG`, so that a `belfry` they call finds this node.
    pub fn config(mut self, file: impl Into<PathBuf>) -> Builder {
        self.config = Some(file.into());
        self
    }

    /// The engine, not yet started.
    pub fn build(mut self) -> Engine {
        self.options.labels.extend(self.handlers.keys().map(|agent| handler_label(agent)));
        self.options.labels.sort();
        let store =
            self.store.unwrap_or_else(|| Arc::new(AnyStore::Memory(belfry_store::memory::Memory::new())));
        let view = View {
            phase: Phase::Stopped,
            draining: false,
            counters: crate::driver::Counters::default(),
            running: HashMap::new(),
            overrun: 0,
            node: NodeId(Uuid::nil()),
            store_is_well: true,
            delayed: Default::default(),
        };
        let (events, first_events) = broadcast::channel(EVENTS_MAX);
        Engine {
            inner: Arc::new(Inner {
                store,
                clock: Mutex::new(self.clock),
                source: self.source.unwrap_or_else(own_source),
                agents: Mutex::new(self.agents),
                handlers: Arc::new(self.handlers),
                on_trigger: self.on_trigger,
                usage_of: self.usage_of,
                context_of: self.context_of,
                options: self.options,
                keeper: self.keeper,
                state_dir: self.state_dir.unwrap_or_else(|| std::env::temp_dir().join("belfry")),
                config: self.config,
                events,
                first_events: Mutex::new(Some(first_events)),
                view: watch::Sender::new(view),
                calls: Calls::default(),
                started: Mutex::new(None),
                relay: Mutex::new(None),
                teller: Teller::new(),
                starting: tokio::sync::Mutex::new(()),
                leaving: tokio::sync::Mutex::new(()),
            }),
        }
    }
}

/// A scheduler inside this process. Cheap to clone.
///
/// ```
/// # async fn example() -> Result<(), belfry::Error> {
/// use belfry::{AgentBuilder, Engine, When};
///
/// let engine = Engine::builder()
///     .agents([AgentBuilder::new("greeter").schedule("hello", When::Every("1s".into())).build()])
///     .handler("greeter", |run| async move {
///         run.log(format!("hello from {}", run.schedule())).await;
///         Ok(())
///     })
///     .build();
/// engine.start().await?;
/// engine.stop(belfry::StopOptions::default()).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    store: Arc<AnyStore>,
    clock: Mutex<Option<Clock>>,
    source: String,
    agents: Mutex<Vec<AgentSpec>>,
    handlers: Arc<HashMap<String, Handler>>,
    on_trigger: Option<OnTrigger>,
    usage_of: Option<UsageOf>,
    context_of: Option<ContextOf>,
    options: Options,
    keeper: Option<KeeperHandle>,
    state_dir: PathBuf,
    config: Option<PathBuf>,
    events: broadcast::Sender<Arc<Event>>,
    /// What is told before the first start, for other nodes.
    first_events: Mutex<Option<broadcast::Receiver<Arc<Event>>>>,
    view: watch::Sender<View>,
    calls: Calls,
    started: Mutex<Option<Started>>,
    relay: Mutex<Option<Relay>>,
    teller: Teller,
    starting: tokio::sync::Mutex<()>,
    leaving: tokio::sync::Mutex<()>,
}

#[derive(Clone)]
struct Started {
    at: Timestamp,
    messages: mpsc::Sender<Message>,
}

impl Engine {
    /// Puts an engine together.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Joins as a node, applies the agents, and begins to plan and run.
    pub async fn start(&self) -> Result<(), Error> {
        let inner = &self.inner;
        // Of two who start it at once the second finds it running.
        let _turn = inner.starting.lock().await;
        if self.status() != Status::Stopped {
            return Err(Error::Status { status: "running already" });
        }
        let clock = self.clock_of_store().await?;
        let agents = inner.agents.lock().clone();
        if !agents.is_empty() {
            self.set_agents(agents).await?;
        }
        // The lease counts from before it was asked for.
        let now = clock.now();
        let node = self.join(now.wall).await?;
        let (send, messages) = mpsc::channel(MESSAGES_MAX);
        let driver = Driver::new(inner.options.clone(), node.id, now, node.lease_until, Box::new(new_id));
        let started = Started { at: now.wall, messages: send.clone() };
        *inner.started.lock() = Some(started);
        inner.view.send_modify(|view| {
            view.phase = Phase::Running;
            view.draining = false;
            view.node = node.id;
            view.overrun = 0;
        });
        let events = inner.first_events.lock().take().unwrap_or_else(|| inner.events.subscribe());
        if inner.store.is_shared() {
            let view = inner.view.subscribe();
            let relay = Relay::start(inner.store.clone(), inner.teller.clone(), events, view);
            *inner.relay.lock() = Some(relay);
        }
        let event = Event::new(now.wall, Level::Info, Name::NodeStarted);
        self.tell(Event { node: Some(node.id), ..event });
        let runner = Runner::new(RunnerOptions {
            keeper: inner.keeper.clone(),
            state_dir: inner.state_dir.clone(),
            config: inner.config.clone(),
            cgroup: inner.keeper.as_ref().and_then(|_| belfry_runner::delegated_cgroup()),
        });
        let shell = Shell {
            store: inner.store.clone(),
            clock,
            driver,
            runner,
            keeper: inner.keeper.clone(),
            keeper_starts: inner.keeper.as_ref().map_or(0, KeeperHandle::starts),
            handlers: inner.handlers.clone(),
            on_trigger: inner.on_trigger.clone(),
            usage_of: inner.usage_of.clone(),
            context_of: inner.context_of.clone(),
            ticks: Arc::default(),
            state_dir: inner.state_dir.clone(),
            template: node,
            lease: inner.options.lease,
            messages,
            send: send.clone(),
            events: inner.events.clone(),
            view: inner.view.clone(),
            calls: inner.calls.clone(),
            attempts: HashMap::new(),
            waiting: Vec::new(),
        };
        tokio::spawn(shell.run());
        tokio::spawn(pass_hints(inner.store.clone(), send));
        Ok(())
    }

    /// What time it is by the store's clock, where it has one; [`Engine::now`] knows it from then on.
    pub async fn store_now(&self) -> Result<Timestamp, Error> {
        Ok(self.clock_of_store().await?.now().wall)
    }

    pub(crate) fn options(&self) -> &Options {
        &self.inner.options
    }

    pub(crate) fn usage_of(&self, session: &str) -> Option<Usage> {
        self.inner.usage_of.as_ref().and_then(|tell| tell(session))
    }

    async fn clock_of_store(&self) -> Result<Clock, Error> {
        let known = self.inner.clock.lock().clone();
        let clock = match known {
            Some(clock) => clock,
            None => self.inner.store.clock().await?.map_or_else(Clock::system, Clock::of_store),
        };
        *self.inner.clock.lock() = Some(clock.clone());
        Ok(clock)
    }

    async fn join(&self, now: Timestamp) -> Result<Node, Error> {
        let lease = SignedDuration::try_from(self.inner.options.lease).unwrap_or(SignedDuration::MAX);
        let mut labels = self.inner.options.labels.clone();
        labels.extend(self.inner.options.only.map(|_| GUEST.to_owned()));
        labels.sort();
        let node = Node {
            id: NodeId(new_id(now)),
            host: host(),
            pid: std::process::id(),
            labels,
            started_at: now,
            lease_until: now.saturating_add(lease).unwrap_or(Timestamp::MAX),
            fenced: false,
            draining: false,
            last_seen_at: now,
            max_concurrent: self.inner.options.max_concurrent,
            process: own_process(&self.inner.state_dir, self.inner.options.lease),
        };
        let asked_at = std::time::Instant::now();
        self.inner.store.join(&node).await?;
        if let Some(keeper) = &self.inner.keeper {
            keeper.renew(asked_at, self.inner.options.lease);
        }
        Ok(node)
    }

    /// Stops: no more is planned or claimed, and what runs may end within the time. What has not ended by then is ended, and
    /// goes back to pending; that is an error, which says how many.
    pub async fn stop(&self, options: StopOptions) -> Result<(), Error> {
        let Some(started) = self.inner.started.lock().clone() else { return Ok(()) };
        let timeout = if options.wait { options.timeout } else { Duration::ZERO };
        // An engine that has stopped by itself takes nothing in.
        let _ = started.messages.send(Message::Input(Input::Stop { timeout })).await;
        self.stopped().await;
        let (overrun, node) = {
            let view = self.inner.view.borrow();
            (view.overrun, view.node)
        };
        // Of several who stop it one takes the node out, and all hear how it ended once that is done.
        let _turn = self.inner.leaving.lock().await;
        let is_ours = |known: &Started| known.messages.same_channel(&started.messages);
        if self.inner.started.lock().take_if(|known| is_ours(known)).is_some() {
            self.leave(node).await;
            let relay = self.inner.relay.lock().take();
            if let Some(relay) = relay {
                relay.end().await;
            }
        }
        match overrun {
            0 => Ok(()),
            running if options.wait => Err(Error::Shutdown { timed_out: true, running }),
            _ => Ok(()),
        }
    }

    /// Waits until the engine has stopped.
    pub async fn stopped(&self) {
        let mut view = self.inner.view.subscribe();
        let _ = view.wait_for(|view| view.phase == Phase::Stopped).await;
    }

    /// Takes a node out that has nothing running any more. Where that fails, others find it by its lease.
    async fn leave(&self, node: NodeId) {
        let folder = self.inner.state_dir.clone();
        // What a child has moved or left behind of its private directory, and what could not be removed in time.
        let removing = move || belfry_runner::end_leftovers(&folder, node, Duration::ZERO);
        let _ = tokio::task::spawn_blocking(removing).await;
        let now = self.now();
        let store = &self.inner.store;
        if let Ok(nodes) = store.nodes().await
            && let Some(lease) = nodes.iter().find(|each| each.id == node).map(|each| each.lease_until)
        {
            let _ = store.fence(now, node, lease).await;
        }
        let event = Event::new(now, Level::Info, Name::NodeStopped);
        self.tell(Event { node: Some(node), ..event });
    }

    /// Where it is in its life.
    pub fn status(&self) -> Status {
        let view = self.inner.view.borrow();
        match view.phase {
            Phase::Stopped => Status::Stopped,
            Phase::Running if view.draining => Status::Draining,
            Phase::Running => Status::Running,
            Phase::Draining { .. } | Phase::Ending { .. } => Status::Stopping,
        }
    }

    /// What it has done so far.
    pub fn state(&self) -> State {
        let counters = self.inner.view.borrow().counters;
        State {
            started_at: self.inner.started.lock().as_ref().map(|started| started.at),
            checks: counters.checks,
            triggers: counters.triggers,
            last_check_at: counters.last_check_at,
        }
    }

    /// Whether the store takes writes: every kind of write that has failed has succeeded since.
    pub fn store_is_well(&self) -> bool {
        self.inner.view.borrow().store_is_well
    }

    /// For how long the oldest call to the store waits that has not been answered.
    pub fn longest_call(&self) -> Option<Duration> {
        self.inner.calls.longest()
    }

    /// How many attempts here wait for their program to start, because the system is short of something.
    pub fn delayed_total(&self) -> usize {
        self.inner.view.borrow().delayed.len()
    }

    /// What an attempt of this run waits for before its program can start here, in words.
    pub fn delayed(&self, run: RunId) -> Option<String> {
        self.inner.view.borrow().delayed.get(&run).cloned()
    }

    /// How many attempts of an agent run here.
    pub fn running(&self, agent: &str) -> usize {
        self.inner.view.borrow().running.get(agent).copied().unwrap_or(0)
    }

    /// How many attempts run here.
    pub fn running_total(&self) -> usize {
        self.inner.view.borrow().running.values().sum()
    }

    /// By which it is known among those who tell each other what happens.
    pub fn teller(&self) -> Uuid {
        self.inner.teller.id
    }

    /// What happens here from now on.
    pub fn events(&self) -> broadcast::Receiver<Arc<Event>> {
        self.inner.events.subscribe()
    }

    /// The store.
    pub fn store(&self) -> &Arc<AnyStore> {
        &self.inner.store
    }

    /// What time it is, by the engine's clock.
    pub fn now(&self) -> Timestamp {
        let clock = self.inner.clock.lock();
        clock.as_ref().map_or_else(Timestamp::now, |clock| clock.now().wall)
    }

    /// Makes the agents what they are here; also while it runs. Schedules whose timing stays go on as if nothing had happened.
    pub async fn set_agents(&self, agents: Vec<AgentSpec>) -> Result<Applied, Error> {
        let agents: Vec<AgentSpec> = agents.iter().map(checked).collect::<Result<_, _>>()?;
        let clock = self.clock_of_store().await?;
        let (source, now) = (&self.inner.source, clock.now().wall);
        let applied = self.inner.store.apply(now, source, "", &agents).await?;
        if applied.agents > 0 {
            self.tell_cleared_breakers(now, &agents).await;
        }
        *self.inner.agents.lock() = agents;
        self.tell_ends(&applied.ended).await;
        self.hint().await;
        Ok(applied)
    }

    /// Makes a source's agents what they are here; also while it runs. A source that has not changed is left as it is.
    pub async fn apply(&self, source: &str, digest: &str, agents: &[AgentSpec]) -> Result<Applied, Error> {
        let agents: &[AgentSpec] = &agents.iter().map(checked).collect::<Result<Vec<_>, _>>()?;
        let clock = self.clock_of_store().await?;
        if self.inner.store.source_digest(source).await?.as_deref() == Some(digest) {
            return Ok(Applied::default());
        }
        let now = clock.now().wall;
        let applied = self.inner.store.apply(now, source, digest, agents).await?;
        if applied.agents > 0 {
            self.tell_cleared_breakers(now, agents).await;
        }
        let event = Event::new(clock.now().wall, Level::Info, Name::ConfigLoaded);
        self.tell(Event { detail: Some(applied.words()), ..event });
        self.tell_ends(&applied.ended).await;
        if applied.expired > 0 {
            self.tell_expired(clock.now().wall, agents).await?;
        }
        self.hint().await;
        Ok(applied)
    }

    /// Tells of breakers that an edit at this instant has closed, because their agents have no policy for them any more. What
    /// cannot be read is not told: the edit is made.
    async fn tell_cleared_breakers(&self, at: Timestamp, agents: &[AgentSpec]) {
        let without: HashSet<&str> = agents
            .iter()
            .filter(|spec| spec.definition.breaker.is_none())
            .map(|spec| spec.name.as_str())
            .collect();
        let Ok(entries) = self.inner.store.breakers().await else { return };
        for entry in entries.iter().filter(|entry| without.contains(entry.agent_name.as_str())) {
            let Ok(record) = self.inner.store.breaker(entry.agent, &entry.command).await else { continue };
            if let Some(change) = record.history.last().filter(|change| change.at == at) {
                self.tell(Event::breaker(&entry.agent_name, &entry.command, change));
            }
        }
    }

    /// Warns of one-shots whose time had passed when they were first seen.
    async fn tell_expired(&self, now: Timestamp, agents: &[AgentSpec]) -> Result<(), Error> {
        let named = agents.iter().flat_map(|agent| agent.schedules.iter().map(move |one| (agent, one)));
        for (agent, (name, definition)) in named {
            let name = format!("{}/{name}", agent.name);
            let Some(detail) = crate::past_words(&name, definition, now) else { continue };
            let record = self.inner.store.schedule(&name).await?;
            if record.is_some_and(|record| crate::is_expired(&record)) {
                let event = Event::new(now, Level::Warn, Name::TickSkipped).of(&name);
                let reason = Some(belfry_core::SkipReason::Exhausted.as_str().to_owned());
                self.tell(Event { reason, detail: Some(detail), ..event });
            }
        }
        Ok(())
    }

    /// Makes an agent that no file owns what it is here, or makes it new, with its schedules; with `whole` those of it that are
    /// not here go, apart from what another source owns. Nothing is done where it is not what is expected.
    pub async fn put_agent(
        &self,
        agent: &AgentSpec,
        whole: bool,
        expect: &Expect<AgentDefinition>,
    ) -> Result<PutAgent, Error> {
        let agent = &checked(agent)?;
        let now = self.store_now().await?;
        let put = self.inner.store.put_agent(now, agent, whole, expect).await?;
        if let PutAgent::Changed { ended } = &put {
            self.tell_cleared_breakers(now, std::slice::from_ref(agent)).await;
            self.tell_ends(ended).await;
        }
        self.hint().await;
        Ok(put)
    }

    /// Removes an agent that no file owns, with its schedules. Their runs that wait end cancelled, those that run go on. Nothing
    /// is done where it is not what is expected.
    pub async fn remove_agent(
        &self,
        agent: &str,
        expect: &Expect<AgentDefinition>,
    ) -> Result<Removed, Error> {
        let removed = self.inner.store.remove_agent(self.store_now().await?, agent, expect).await?;
        self.removed(&removed).await;
        Ok(removed)
    }

    /// Removes a schedule that no file owns. Its runs that wait end cancelled, those that run go on. Nothing is done where it
    /// is not what is expected.
    pub async fn remove_schedule(&self, schedule: ScheduleId, expect: &Expect) -> Result<Removed, Error> {
        let removed = self.inner.store.remove_schedule(self.store_now().await?, schedule, expect).await?;
        self.removed(&removed).await;
        Ok(removed)
    }

    async fn removed(&self, removed: &Removed) {
        if let Removed::Gone { ended } = removed {
            self.tell_ends(ended).await;
        }
        self.hint().await;
    }

    /// Tells listeners what happened outside the engine.
    pub fn tell(&self, event: Event) {
        // Nobody may be listening.
        let _ = self.inner.events.send(Arc::new(event));
    }

    /// Lets the engine look at once whether there is something to do.
    pub async fn hint(&self) {
        self.message(Message::Input(Input::Hint)).await;
    }

    /// Reaches the driver, where there is one.
    pub(crate) async fn message(&self, message: Message) {
        let started = self.inner.started.lock().clone();
        if let Some(started) = started {
            let _ = started.messages.send(message).await;
        }
    }

    pub(crate) fn view(&self) -> &watch::Sender<View> {
        &self.inner.view
    }

    /// Waits until nothing runs and there is nothing to do before time passes: for tests with a clock that is moved by hand.
    pub async fn quiet(&self) {
        self.wait_for_quiet(true).await;
    }

    /// Waits until there is nothing to do before time passes or an attempt ends.
    pub async fn idle(&self) {
        self.wait_for_quiet(false).await;
    }

    async fn wait_for_quiet(&self, all: bool) {
        self.hint().await;
        let Some(started) = self.inner.started.lock().clone() else { return };
        let (tell, quiet) = oneshot::channel();
        if started.messages.send(Message::Quiet { all, tell }).await.is_ok() {
            // An engine that has stopped is quiet, too.
            let _ = quiet.await;
        }
    }

    /// A schedule as it stands.
    pub async fn schedule_state(&self, name: &str) -> Result<ScheduleRecord, Error> {
        self.inner.store.schedule(name).await?.ok_or_else(|| Error::NotFound { name: name.to_owned() })
    }

    /// All schedules as they stand, in the order of their names.
    pub async fn schedule_states(&self) -> Result<Vec<ScheduleRecord>, Error> {
        let (mut all, mut after) = (Vec::new(), None::<String>);
        loop {
            let page = self.inner.store.schedules(&Default::default(), after.as_deref(), 1000).await?;
            all.extend(page.items);
            match page.next {
                Some(next) => after = Some(next),
                None => return Ok(all),
            }
        }
    }

    /// Whether a schedule would run now: every check with its words.
    pub async fn check(&self, name: &str) -> Result<Vec<Check>, Error> {
        crate::why::checks(&self.inner.store, name, self.now()).await
    }

    /// The prompt that a run of a schedule would get now, with everything filled in.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let agent = belfry::AgentBuilder::new("greeter")
    ///     .schedule("hello", belfry::every("1h")?)
    ///     .define(|agent| agent.work.prompt = Some("Greet {{ payload.name }}.".into()))
    ///     .build();
    /// let engine = belfry::Engine::builder().build();
    /// engine.set_agents(vec![agent]).await?;
    /// let payload = serde_json::json!({"name": "Ada"});
    /// assert_eq!(engine.build_prompt("greeter/hello", payload).await?, "Greet Ada.");
    /// # Ok::<_, belfry::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn build_prompt(&self, name: &str, payload: Value) -> Result<String, Error> {
        let not_found = || Error::NotFound { name: name.to_owned() };
        let record = self.schedule_state(name).await?;
        let definitions = self.inner.store.definitions(&[record.id]).await?;
        let definitions = definitions.into_iter().next().flatten().ok_or_else(not_found)?;
        let (agent, schedule) = name.split_once('/').unwrap_or((name, ""));
        let now = self.now();
        let attempt = Attempt {
            run: RunId(Uuid::nil()),
            epoch: 1,
            attempt: 1,
            node: NodeId(Uuid::nil()),
            agent: agent.into(),
            schedule: schedule.into(),
            command: record.definition.options.command.clone(),
            tick_at: Some(now),
            session: None,
            last_success_at: definitions.last_success_at,
            prompt: None,
            payload: StoredPayload::new(Trigger::Manual, payload.to_string()),
            trace_id: Uuid::nil(),
            agent_definition: definitions.agent_definition.clone(),
            schedule_definition: Arc::new(record.definition),
        };
        belfry_runner::build_input(&attempt)
            .map(|(prompt, _)| prompt)
            .map_err(|error| Error::Prompt { name: name.to_owned(), detail: error.chain() })
    }

    /// A run.
    pub async fn run(&self, run: RunId) -> Result<Option<RunRecord>, Error> {
        Ok(self.inner.store.run(run).await?)
    }

    /// Makes a run of a schedule now, beside its ticks. It counts for limits and moves no schedule.
    pub async fn run_now(&self, name: &str, request: RunRequest) -> Result<RunId, Error> {
        self.refuse_while_draining()?;
        let clock = self.clock_of_store().await?;
        let trace_id = request.trace_id;
        let (store, options) = (&self.inner.store, &self.inner.options);
        let made = request_run(store, options, clock.now().wall, name, request).await?;
        if made.is_new {
            self.tell_created(name, Made::by(Trigger::Manual, made.run, trace_id));
        }
        self.hint().await;
        Ok(made.run)
    }
}

/// The source of agents that a program has without a name.
fn own_source() -> String {
    let program = std::env::current_exe().ok();
    let name = program.as_ref().and_then(|path| path.file_name()).unwrap_or_default();
    format!("engine:{}", name.to_string_lossy())
}

/// An agent as it is stored: if it is a handler, it needs a node that has it. Refuses one with a template that cannot be parsed;
/// a schedule with such a prompt becomes invalid, and says why.
fn checked(agent: &AgentSpec) -> Result<AgentSpec, Error> {
    let checked = agent.definition.work.check_templates();
    checked.map_err(|source| Error::Template { agent: agent.name.clone(), source })?;
    let mut agent = agent.clone();
    agent.need_handler();
    Ok(agent)
}

/// A run of a schedule as it is now, to be enqueued: made by hand, to be started at once; and the schedule. What it lacks or
/// what is different about it, the caller says.
pub async fn prepare(
    store: &impl Store,
    options: &Options,
    now: Timestamp,
    name: &str,
) -> Result<(NewRun, Schedule), Error> {
    let (agent, schedule) = name.split_once('/').unwrap_or((name, ""));
    let refused = |detail: String| Error::Trigger { agent: agent.into(), schedule: schedule.into(), detail };
    let record = store.schedule(name).await?.ok_or_else(|| Error::NotFound { name: name.to_owned() })?;
    crate::refuse_unreadable(&record)?;
    let definitions = store.definitions(&[record.id]).await?;
    let definitions =
        definitions.into_iter().next().flatten().ok_or_else(|| Error::NotFound { name: name.to_owned() })?;
    if let Some(why) = &definitions.unreadable {
        return Err(Error::Unreadable { name: name.to_owned(), why: why.to_string() });
    }
    let compiled = record.definition.compile(name).map_err(&refused)?;
    let defined = Defined::new(record.agent, record.id, &compiled, &definitions.agent_definition);
    let mut run = NewRun::by_hand(defined, new_run_id(now), now);
    to_known_lane(store, options, &mut run).await?;
    Ok((run, compiled))
}

/// An id for a new run, which sorts by the store's clock.
pub fn new_run_id(now: Timestamp) -> RunId {
    RunId(new_id(now))
}

/// Makes a run of a schedule, to be started by whoever claims it.
pub async fn enqueue(
    store: &AnyStore,
    options: &Options,
    now: Timestamp,
    name: &str,
    request: RunRequest,
) -> Result<RunId, Error> {
    Ok(request_run(store, options, now, name, request).await?.run)
}

/// What came of a request for a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Requested {
    /// The run.
    pub run: RunId,
    /// Whether it was made now, and not for an earlier request with the same key.
    pub is_new: bool,
}

/// As [`enqueue`], and says whether the run is new.
pub async fn request_run(
    store: &AnyStore,
    options: &Options,
    now: Timestamp,
    name: &str,
    request: RunRequest,
) -> Result<Requested, Error> {
    let (run, schedule) = prepare(store, options, now, name).await?;
    if schedule.chat.is_some() {
        refuse_message_keys(&request.payload)?;
    }
    let RunRequest { prompt, payload, trace_id, .. } = request;
    let run = run.given(Given { prompt, payload, trace_id });
    let body = serde_json::to_vec(&(&run.prompt, &run.payload)).unwrap_or_default();
    let key = request.key.map(|key| Key::new(key, hash(&body), now));
    let id = run.id;
    match store.enqueue(now, &Enqueue { run, key }).await? {
        Enqueued::Made => Ok(Requested { run: id, is_new: true }),
        Enqueued::Repeat(first) => Ok(Requested { run: first, is_new: false }),
        Enqueued::KeyReused(first) => Err(Error::KeyReused { name: name.to_owned(), run: first }),
        Enqueued::NotFound => Err(Error::NotFound { name: name.to_owned() }),
    }
}

/// Tells bodies apart that carry one key; not meant to withstand an attack.
pub(crate) fn hash(body: &[u8]) -> Vec<u8> {
    let mut hash = [0xcbf2_9ce4_8422_2325_u64, 0x8422_2325_cbf2_9ce4];
    for (n, byte) in body.iter().enumerate() {
        let lane = &mut hash[n % 2];
        *lane = (*lane ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash.iter().flat_map(|half| half.to_be_bytes()).chain((body.len() as u64).to_be_bytes()).collect()
}

/// An id that sorts by the store's clock, and among those of one millisecond in the order of their making.
fn new_id(now: Timestamp) -> Uuid {
    static CONTEXT: LazyLock<Mutex<ContextV7>> = LazyLock::new(|| Mutex::new(ContextV7::new()));
    let millis = u64::try_from(now.as_millisecond()).unwrap_or(0);
    let nanos = (millis % 1000) as u32 * 1_000_000;
    Uuid::new_v7(uuid::Timestamp::from_unix(&*CONTEXT.lock(), millis / 1000, nanos))
}

/// Wakes the engine when the store says that there may be work.
async fn pass_hints(store: Arc<AnyStore>, messages: mpsc::Sender<Message>) {
    loop {
        tokio::select! {
            () = messages.closed() => return,
            () = store.changed() => {
                if messages.send(Message::Input(Input::Hint)).await.is_err() {
                    return;
                }
            }
        }
    }
}
