//! The engine as its users see it: built, started, asked, stopped.

use std::collections::HashMap;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use belfry_core::check::Check;
use belfry_core::definition::handler_label;
use belfry_core::input::StoredPayload;
use belfry_core::session::Usage;
use belfry_core::{AgentSpec, NodeId, RunId, Trigger};
use belfry_runner::{Attempt, KeeperHandle, Runner, RunnerOptions};
use belfry_store::{AnyStore, Node, Reader, ScheduleRecord, Store, Telling};
use belfry_time::{SignedDuration, Timestamp};
use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use uuid::Uuid;

use crate::clock::Clock;
use crate::driver::{Driver, GUEST, Input, Options, Phase};
use crate::error::Error;
use crate::event::{Event, Level, Name};
use crate::handler::{Context, Handler, HandlerError};
use crate::ids::new_id;
use crate::node::{host, own_process};
use crate::relay::{Relay, Teller};
use crate::requests::Requests;
use crate::session::UsageOf;
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
                reader: Reader::of(&store),
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
                requests: Requests::default(),
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
    reader: Reader,
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
    requests: Requests,
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
        let now = self.clock_of_store().await?.now().wall;
        // Stores keep microseconds.
        Ok(Timestamp::from_microsecond(now.as_microsecond()).unwrap_or(now))
    }

    pub(crate) fn options(&self) -> &Options {
        &self.inner.options
    }

    /// Requests for runs that wait to be made.
    pub(crate) fn requests(&self) -> &Requests {
        &self.inner.requests
    }

    /// The name under which the agents of this program are kept.
    pub(crate) fn source(&self) -> &str {
        &self.inner.source
    }

    /// The agents of this program, for the next start.
    pub(crate) fn keep_agents(&self, agents: Vec<AgentSpec>) {
        *self.inner.agents.lock() = agents;
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
        self.inner.store.join(&node, None).await?;
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

    /// Leaves a mark for other nodes that somebody listens here, for the next few seconds.
    pub async fn listen(&self) -> Result<(), Error> {
        Ok(self.inner.store.listen(self.inner.teller.id).await?)
    }

    /// How far other nodes have come with telling what happens there.
    pub async fn told_so_far(&self) -> Result<Vec<(Uuid, i64)>, Error> {
        Ok(self.inner.store.told_so_far(self.inner.teller.id).await?)
    }

    /// What other nodes have told behind what was heard of each, in the order in which each told it.
    pub async fn told(&self, heard: &[(Uuid, i64)]) -> Result<Vec<Telling>, Error> {
        Ok(self.inner.store.told(self.inner.teller.id, heard).await?)
    }

    /// What happens here from now on.
    pub fn events(&self) -> broadcast::Receiver<Arc<Event>> {
        self.inner.events.subscribe()
    }

    /// Reads the store. It is changed by the methods of this engine alone.
    pub fn reads(&self) -> &Reader {
        &self.inner.reader
    }

    /// The store, which only the methods of this engine change.
    #[cfg(not(feature = "testing"))]
    pub(crate) fn store(&self) -> &Arc<AnyStore> {
        &self.inner.store
    }

    /// The store.
    #[cfg(feature = "testing")]
    pub fn store(&self) -> &Arc<AnyStore> {
        &self.inner.store
    }

    /// What time it is, by the engine's clock.
    pub fn now(&self) -> Timestamp {
        let clock = self.inner.clock.lock();
        clock.as_ref().map_or_else(Timestamp::now, |clock| clock.now().wall)
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
}

/// The source of agents that a program has without a name.
fn own_source() -> String {
    let program = std::env::current_exe().ok();
    let name = program.as_ref().and_then(|path| path.file_name()).unwrap_or_default();
    format!("engine:{}", name.to_string_lossy())
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
