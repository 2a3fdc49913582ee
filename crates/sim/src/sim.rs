//! The simulation: one queue of what happens next, in true time, and everything that takes part.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use belfry::testing::carry_out;
use belfry::testing::{Driver, Effect, Input, Options, Phase, Sight};
use belfry::{NodeId, RunId, SignedDuration, Time, Timestamp};
use belfry_core::retry::Outcome;
use belfry_core::{Epoch, Reason};
use belfry_runner::{Attempt, ProcessState, Report as Ended, Stop};
use belfry_store::{Node, NodeProcess, Snapshot, Store, Watch};
use parking_lot::Mutex;
use uuid::Uuid;

use crate::account::Ledger;
use crate::beside::{Beside, Other};
use crate::draw::{self, Habit, Params};
use crate::node::{Life, Process, SimNode};
use crate::random::Random;
use crate::slow::Slow;
use crate::world::{HOUR, MINUTE, Micros, NodeClock, SECOND, World};

/// Something that happens at an instant.
pub(crate) enum What {
    /// A call to the store goes on.
    Poll(u64),
    /// A node has waited long enough.
    Wake(usize),
    /// Something reaches a node.
    Give { place: usize, lives: u64, input: Box<Input> },
    /// A process ends.
    Exit { pid: u64, ending: u64 },
    /// The keeper of a node looks at the lease.
    Keeper { place: usize, lives: u64, until: Micros },
    /// A node starts.
    Start(usize),
    /// A frozen node goes on.
    Thaw { place: usize, lives: u64 },
    /// Somebody does something.
    Verb,
    /// Somebody does something to a schedule that is in a state which does not last.
    VerbTo(String),
    /// Something goes wrong.
    Fault,
    /// The store's clock is stepped back.
    ClockBack,
    /// A node is killed, while a process of it runs.
    Crash(usize),
    /// Somebody lets all nodes take work again.
    Undrain,
}

/// What happens at an instant. Of several at the same instant the one that was asked for first happens first.
struct Event {
    at: Micros,
    number: u64,
    what: What,
}

impl Ord for Event {
    fn cmp(&self, other: &Event) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Event) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Event {
    fn eq(&self, other: &Event) -> bool {
        self.number == other.number
    }
}

impl Eq for Event {}

/// A life has some hundred thousand events.
const EVENTS_MAX: u64 = 4_000_000;

type Call = Pin<Box<dyn Future<Output = Input> + Send>>;

/// Which processes live, and which had which id.
#[derive(Default)]
struct Alive {
    /// The current life of each node whose process lives.
    lives: HashMap<usize, u64>,
    /// The process that had an id.
    of: HashMap<NodeId, (usize, u64)>,
}

impl Alive {
    fn is_gone(&self, node: NodeId) -> bool {
        self.of.get(&node).is_none_or(|(place, lives)| self.lives.get(place) != Some(lives))
    }
}

struct Task {
    place: usize,
    lives: u64,
    call: Call,
}

/// How a life went.
#[derive(Debug, Clone)]
pub struct Report {
    /// What was drawn.
    pub params: Params,
    /// What broke, if anything.
    pub broken: Option<String>,
    /// A hash over everything that happened: equal for equal seeds.
    pub trace: u64,
    /// The last lines of what happened.
    pub lines: Vec<String>,
    /// Ticks whose result was checked.
    pub ticks: u64,
    /// Attempts that were started.
    pub attempts: u64,
    /// Everything that happened.
    pub events: u64,
    /// How often each verb met a schedule in each state.
    pub met: BTreeMap<(&'static str, &'static str), u64>,
}

/// One life.
pub struct Sim {
    pub(crate) params: Params,
    pub(crate) world: Arc<World>,
    pub(crate) store: Arc<Beside>,
    pub(crate) random: Random,
    queue: BinaryHeap<Event>,
    number: u64,
    tasks: BTreeMap<u64, Task>,
    /// Answers that took no time, for nodes in their lives.
    answers: VecDeque<(usize, u64, Input)>,
    /// Hints of the store that were passed on.
    hints: u64,
    pub(crate) nodes: Vec<SimNode>,
    alive: Arc<Mutex<Alive>>,
    pub(crate) processes: BTreeMap<u64, Process>,
    pub(crate) habits: BTreeMap<String, Habit>,
    pub(crate) ledger: Ledger,
    pub(crate) is_healed: bool,
    /// When a frozen node last went on.
    pub(crate) thawed_at: Micros,
    ids: Arc<AtomicU64>,
    trace: DefaultHasher,
    lines: VecDeque<String>,
    lines_max: usize,
    pub(crate) broken: Option<String>,
    attempts: u64,
    events: u64,
    pub(crate) met: BTreeMap<(&'static str, &'static str), u64>,
}

/// An id that begins with an instant, as ids of runs do.
pub(crate) fn id(ids: &AtomicU64, at: Timestamp) -> Uuid {
    let number = ids.fetch_add(1, Relaxed);
    let ms = u128::from(at.as_millisecond().max(0).unsigned_abs());
    Uuid::from_u128(ms << 80 | 7 << 76 | 2 << 62 | u128::from(number))
}

impl Sim {
    /// Lives a seed. With `lines` so many of the last lines of what happened are kept.
    pub fn run(seed: u64, lines: usize) -> Report {
        Sim::run_beside(seed, lines, None)
    }

    /// Lives a seed, and asks another store, which is empty, the same as the one in memory: every answer must be equal.
    pub fn run_beside(seed: u64, lines: usize, other: Option<Other>) -> Report {
        let mut random = Random(seed);
        let params = Params::draw(seed, &mut random);
        let mut sim = Sim::new(params, random, lines, other);
        sim.live();
        sim.report()
    }

    fn new(params: Params, mut random: Random, lines_max: usize, other: Option<Other>) -> Sim {
        let world = Arc::new(World::new(params.start, random.fork(), params.lease()));
        world.faults(|faults| {
            faults.cut_until = vec![0; params.nodes];
            faults.fails_permille = params.fails_permille;
            faults.loses_permille = params.loses_permille;
        });
        let store = Arc::new(Beside::new(other));
        let nodes = (0..params.nodes)
            .map(|node| SimNode {
                lives: 0,
                life: Life::Down,
                driver: None,
                clock: Arc::new(NodeClock::new(&world, params.is_shared)),
                store: Arc::new(Slow {
                    node,
                    world: world.clone(),
                    store: store.clone(),
                    has_clock: params.is_shared,
                }),
                started_at: 0,
                inbox: VecDeque::new(),
                stalled: Vec::new(),
                wakes_at: None,
                is_hinted: false,
                freezes: None,
                keeper_until: 0,
            })
            .collect();
        let agents = draw::agents(&mut random);
        let foreign = draw::foreign(&mut random);
        let habits = agents.iter().map(|agent| (agent.name.clone(), Habit::draw(&mut random))).collect();
        Sim {
            world,
            store,
            queue: BinaryHeap::new(),
            number: 0,
            tasks: BTreeMap::new(),
            answers: VecDeque::new(),
            hints: 0,
            nodes,
            alive: Arc::default(),
            processes: BTreeMap::new(),
            habits,
            ledger: Ledger::new(agents, foreign),
            is_healed: false,
            thawed_at: 0,
            ids: Arc::new(AtomicU64::new(1)),
            trace: DefaultHasher::new(),
            lines: VecDeque::new(),
            lines_max,
            broken: None,
            attempts: 0,
            events: 0,
            met: BTreeMap::new(),
            random,
            params,
        }
    }

    fn live(&mut self) {
        self.apply_foreign();
        self.apply_files();
        for place in 0..self.nodes.len() {
            let at = self.random.below(20 * SECOND);
            self.at(at, What::Start(place));
        }
        self.next_verb();
        self.next_fault();
        let span = self.params.span;
        self.run_until(span);
        self.heal();
        self.run_until(span + self.healing());
        self.settle();
        self.run_until(span + 2 * self.healing());
        self.check_end();
    }

    /// Time for everything to run that could not.
    fn healing(&self) -> Micros {
        12 * self.params.lease() + 6 * HOUR
    }

    fn report(self) -> Report {
        Report {
            params: self.params,
            broken: self.broken,
            trace: self.trace.finish(),
            lines: self.lines.into(),
            ticks: self.ledger.ticks,
            attempts: self.attempts,
            events: self.events,
            met: self.met,
        }
    }

    pub(crate) fn new_id(&self) -> Uuid {
        id(&self.ids, self.world.wall())
    }

    /// Something must hold, and does not.
    pub(crate) fn breaks(&mut self, what: impl Into<String>) {
        if self.broken.is_none() {
            let what = what.into();
            self.say(|| format!("BROKEN: {what}"));
            self.broken = Some(what);
        }
    }

    /// Keeps a line of what happened.
    pub(crate) fn say(&mut self, line: impl FnOnce() -> String) {
        if self.lines_max > 0 {
            let line = format!("{} {}", self.world.wall(), line());
            self.lines.push_back(line);
            if self.lines.len() > self.lines_max {
                self.lines.pop_front();
            }
        }
    }

    fn mark(&mut self, what: impl Hash) {
        (self.world.now(), what).hash(&mut self.trace);
    }

    pub(crate) fn at(&mut self, at: Micros, what: What) {
        self.number += 1;
        self.queue.push(Event { at, number: self.number, what });
    }

    pub(crate) fn soon(&mut self, within: Micros, what: What) {
        let at = self.world.now() + self.random.below(within) + 1;
        self.at(at, what);
    }

    fn run_until(&mut self, until: Micros) {
        while self.broken.is_none()
            && let Some((at, what)) = self.next_event(until)
        {
            self.world.set_now(at);
            self.events += 1;
            if self.events > EVENTS_MAX {
                self.breaks(format!("more than {EVENTS_MAX} events: something asks again and again"));
            }
            self.happen(what);
            while let Some((place, lives, input)) = self.answers.pop_front() {
                if self.is_life(place, lives) {
                    self.give(place, input);
                }
            }
            let hints = self.store.memory.hints();
            if hints != self.hints {
                self.hints = hints;
                self.hint();
            }
            if let Some(what) = self.store.differs().or_else(|| self.world.take_breach()) {
                self.breaks(what);
            }
        }
        self.world.set_now(until.max(self.world.now()));
    }

    /// What happens next, if that is not after `until`.
    fn next_event(&mut self, until: Micros) -> Option<(Micros, What)> {
        let queued = self.queue.peek().map(|event| (event.at, event.number));
        let wakes = self.nodes.iter().enumerate();
        let wake = wakes.filter_map(|(place, node)| Some((node.wakes_at?, place))).min();
        match wake {
            Some(((at, number), place)) if queued.is_none_or(|queued| (at, number) < queued) => {
                if at > until {
                    return None;
                }
                self.nodes[place].wakes_at = None;
                Some((at, What::Wake(place)))
            }
            _ if queued.is_some_and(|(at, _)| at <= until) => {
                self.queue.pop().map(|event| (event.at, event.what))
            }
            _ => None,
        }
    }

    fn happen(&mut self, what: What) {
        match what {
            What::Poll(task) => self.poll(task),
            What::Wake(place) => self.give(place, Input::Woken),
            What::Give { place, lives, input } => {
                if self.is_life(place, lives) {
                    if matches!(*input, Input::Hint) {
                        self.nodes[place].is_hinted = false;
                    }
                    self.give(place, *input);
                }
            }
            What::Exit { pid, ending } => self.exit(pid, ending),
            What::Keeper { place, lives, until } => {
                if self.nodes[place].lives == lives && self.nodes[place].keeper_until == until {
                    self.kill_children(place, lives, 0);
                }
            }
            What::Start(place) => self.start_node(place),
            What::Thaw { place, lives } => self.thaw(place, lives),
            // What was to come is left out once everything has healed.
            What::Verb | What::VerbTo(_) | What::Fault | What::ClockBack | What::Crash(_)
                if self.is_healed => {}
            What::Verb => {
                self.do_something();
                self.next_verb();
            }
            What::VerbTo(name) => self.do_something_to(name),
            What::Undrain => self.undrain(),
            What::Crash(place) => {
                if self.nodes[place].life != Life::Down {
                    self.crash(place, false);
                    self.soon(MINUTE, What::Start(place));
                }
            }
            What::ClockBack => {
                let by = self.random.between(2 * MINUTE, 4 * HOUR);
                self.step_clock(-(by as i64));
            }
            What::Fault => {
                self.go_wrong();
                self.next_fault();
            }
        }
    }

    fn is_life(&self, place: usize, lives: u64) -> bool {
        self.nodes[place].lives == lives && self.nodes[place].life != Life::Down
    }

    fn next_verb(&mut self) {
        let per_day = self.params.verbs_per_day;
        if per_day > 0 && !self.is_healed {
            self.soon(2 * 24 * HOUR / per_day, What::Verb);
        }
    }

    /// In so many of a thousand cases, somebody soon does something to this schedule.
    pub(crate) fn verb_maybe(&mut self, permille: u64, name: &str, within: Micros) {
        if self.params.verbs_per_day > 0 && !self.is_healed && self.random.permille(permille) {
            self.soon(within, What::VerbTo(name.to_owned()));
        }
    }

    fn next_fault(&mut self) {
        let per_day = self.params.faults_per_day;
        if per_day > 0 && !self.is_healed {
            self.soon(2 * 24 * HOUR / per_day, What::Fault);
        }
    }

    /// Every node may hear that there is something new; hints may be lost.
    pub(crate) fn hint(&mut self) {
        for place in 0..self.nodes.len() {
            let node = &mut self.nodes[place];
            let loses = self.params.loses_hints_permille;
            if node.life == Life::Down || node.is_hinted || self.random.permille(loses) {
                continue;
            }
            node.is_hinted = true;
            let lives = node.lives;
            let late = if self.random.permille(20) { 30 * SECOND } else { SECOND / 2 };
            self.soon(late, What::Give { place, lives, input: Box::new(Input::Hint) });
        }
    }

    // Nodes.

    fn start_node(&mut self, place: usize) {
        if self.nodes[place].life != Life::Down {
            return;
        }
        if self.world.fault(place, true) != crate::world::Fault::None {
            return self.soon(10 * MINUTE, What::Start(place));
        }
        let clock = Arc::new(NodeClock::new(&self.world, self.params.is_shared));
        let now = clock.now();
        let id = NodeId(self.new_id());
        let node = self.node_row(place, id, now.wall, now.wall + signed(self.params.lease()), false);
        let lease_until = node.lease_until;
        self.now(self.store.clone().join(&node, None));
        let ids = self.ids.clone();
        let new_id = Box::new(move |at| self::id(&ids, at));
        let options = Options { labels: Params::labels(place), ..self.params.options.clone() };
        let driver = Driver::new(options, id, now, lease_until, new_id);
        let at = self.world.now();
        let sim_node = &mut self.nodes[place];
        sim_node.lives += 1;
        sim_node.life = Life::Up;
        sim_node.driver = Some(driver);
        sim_node.clock = clock;
        sim_node.started_at = at;
        sim_node.inbox.clear();
        sim_node.stalled.clear();
        sim_node.is_hinted = false;
        let lives = sim_node.lives;
        let mut alive = self.alive.lock();
        alive.lives.insert(place, lives);
        alive.of.insert(id, (place, lives));
        drop(alive);
        self.say(|| format!("node {place} starts as {id}"));
        self.tell_keeper(place, Duration::ZERO);
        self.give(place, Input::Woken);
    }

    /// The process of a node. Nodes of a shared store have a host each.
    fn process_of(&self, place: usize) -> NodeProcess {
        let host = if self.params.is_shared { place } else { 0 };
        NodeProcess {
            boot_id: format!("boot of host {host}"),
            pid_ns: "pid:[1]".into(),
            start_time: self.nodes[place].lives,
            state_dir: "/state".into(),
            version: "sim".into(),
            lease_ms: self.params.options.lease.as_millis() as u64,
        }
    }

    fn node_row(
        &self,
        place: usize,
        id: NodeId,
        now: Timestamp,
        lease_until: Timestamp,
        draining: bool,
    ) -> Node {
        Node {
            id,
            host: "host".into(),
            pid: 1,
            labels: Params::labels(place),
            started_at: now,
            lease_until,
            fenced: false,
            draining,
            last_seen_at: now,
            max_concurrent: None,
            process: self.process_of(place),
        }
    }

    /// Gives an input to a node: at once, or when it is thawed.
    pub(crate) fn give(&mut self, place: usize, input: Input) {
        let node = &mut self.nodes[place];
        if matches!(node.life, Life::Frozen { .. }) {
            node.inbox.push_back(input);
            return;
        }
        let now = node.clock.now();
        let Some(driver) = &mut node.driver else { return };
        let kind = std::mem::discriminant(&input);
        let effects = driver.step(now, input);
        let (phase, wait) = (driver.phase(), driver.wait(now));
        self.mark((place, kind, effects.len()));
        for effect in effects {
            self.perform(place, effect);
        }
        if phase == Phase::Stopped {
            self.leave(place);
        } else {
            let at = self.world.now() + (wait.as_micros() as Micros).max(1);
            self.number += 1;
            self.nodes[place].wakes_at = Some((at, self.number));
        }
    }

    fn ask(&mut self, place: usize, call: impl Future<Output = Input> + Send + 'static) {
        self.number += 1;
        let task = self.number;
        let lives = self.nodes[place].lives;
        let mut call: Call = Box::pin(call);
        match call.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(input) => self.answers.push_back((place, lives, input)),
            Poll::Pending => {
                for at in self.world.take_wakes() {
                    self.at(at, What::Poll(task));
                }
                self.tasks.insert(task, Task { place, lives, call });
            }
        }
    }

    fn poll(&mut self, number: u64) {
        let Some(Task { place, lives, .. }) = self.tasks.get(&number) else { return };
        let (place, lives) = (*place, *lives);
        if !self.is_life(place, lives) {
            self.tasks.remove(&number);
            return;
        }
        if self.nodes[place].life == (Life::Frozen { calls_land: false }) {
            self.nodes[place].stalled.push(number);
            return;
        }
        let Some(task) = self.tasks.get_mut(&number) else { return };
        let polled = task.call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let wakes = self.world.take_wakes();
        match polled {
            Poll::Ready(input) => {
                self.tasks.remove(&number);
                self.give(place, input);
            }
            Poll::Pending => {
                for at in wakes {
                    self.at(at, What::Poll(number));
                }
            }
        }
    }

    fn perform(&mut self, place: usize, effect: Effect) {
        let node = &self.nodes[place];
        let (store, clock, lives) = (node.store.clone(), node.clock.clone(), node.lives);
        let now = clock.now();
        match effect {
            Effect::Ask(ask) => {
                self.say(|| format!("node {place} asks {}", brief(&ask)));
                let is_claim = matches!(ask, belfry::testing::Ask::Claim(_));
                let freezes = if is_claim { self.nodes[place].freezes.take() } else { None };
                self.ask(place, async move { carry_out(&*store, &*clock, ask).await });
                if let Some(time) = freezes.filter(|_| !self.is_healed) {
                    self.freeze(place, time, false);
                }
            }
            Effect::Start { attempt, tell } => self.start_process(place, &attempt, tell),
            Effect::Stop { run, epoch, stop } => self.stop_process(place, lives, run, epoch, stop),
            Effect::TellKeeper { asked } => self.tell_keeper(place, asked),
            Effect::Join { node, left, until, draining } => {
                self.say(|| format!("node {place} joins again as {node}"));
                self.alive.lock().of.insert(node, (place, lives));
                let node = self.node_row(place, node, now.wall, until, draining);
                self.ask(place, async move {
                    Input::Joined { asked: now.mono, joined: store.join(&node, Some(left)).await }
                });
            }
            Effect::ReadNodes => {
                let (alive, is_shared) = (self.alive.clone(), self.params.is_shared);
                let here = Arc::new(self.process_of(place));
                self.ask(place, async move {
                    let nodes = store.nodes().await.map(|nodes| {
                        let alive = alive.lock();
                        let look = |node: Node| {
                            let process = match alive.is_gone(node.id) {
                                true => ProcessState::Gone,
                                false => {
                                    ProcessState::Found { start_time: node.process.start_time, lives: true }
                                }
                            };
                            let sight = Sight {
                                here: here.clone(),
                                is_same_host: !is_shared,
                                process,
                                serves_file: false,
                            };
                            (node, sight)
                        };
                        nodes.into_iter().map(look).collect()
                    });
                    Input::Nodes(nodes)
                });
            }
            Effect::Fence { node, lease, .. } => {
                self.say(|| format!("node {place} fences {node}"));
                // Nothing of the old attempts may live when the new ones start.
                let left: Vec<u64> = self
                    .processes
                    .iter()
                    .filter(|(_, each)| each.node == node)
                    .map(|(pid, _)| *pid)
                    .collect();
                for pid in left {
                    self.processes.remove(&pid);
                }
                self.ask(place, async move {
                    belfry::testing::fence(&*store, clock.now().wall, node, lease).await
                });
            }
            Effect::Beat(beat) => {
                self.ask(place, async move {
                    let snapshot = Snapshot {
                        node: beat.node,
                        at: beat.at,
                        host: "host".into(),
                        cpu_percent: None,
                        memory_total: None,
                        memory_used: None,
                        load: None,
                        lanes: beat.lanes,
                        runs: beat.runs,
                        sessions: beat.sessions,
                        tmux: None,
                        context: serde_json::Map::new(),
                    };
                    Input::Beaten(store.beat(&snapshot).await)
                });
            }
            Effect::Note(event) => {
                self.mark(event.event.as_str());
                self.say(|| format!("node {place} tells {}", told(&event)));
                // A state that is rare when a clock is stepped by chance.
                let is_deferral = event.event.as_str() == "tick_deferred";
                if is_deferral {
                    self.check_deferred();
                }
                if is_deferral && self.params.steps_clock && self.random.permille(50) {
                    self.soon(MINUTE, What::ClockBack);
                }
            }
            Effect::Stopped { .. } => {}
        }
    }

    /// The process of a node ends; its keeper ends its children, unless it ends with it.
    pub(crate) fn crash(&mut self, place: usize, with_keeper: bool) {
        let lives = self.nodes[place].lives;
        self.say(|| format!("node {place} is killed{}", if with_keeper { " with its keeper" } else { "" }));
        self.go_down(place);
        if !with_keeper {
            self.kill_children(place, lives, 2 * SECOND);
        }
        // A machine that starts again may have another clock.
        let is_last = self.nodes.iter().all(|node| node.life == Life::Down);
        if is_last && self.params.steps_clock && self.random.permille(300) {
            self.soon(SECOND, What::ClockBack);
        }
    }

    fn go_down(&mut self, place: usize) {
        let node = &mut self.nodes[place];
        let lives = node.lives;
        node.life = Life::Down;
        node.driver = None;
        node.wakes_at = None;
        node.inbox.clear();
        node.stalled.clear();
        self.tasks.retain(|_, task| task.place != place || task.lives != lives);
        self.alive.lock().lives.remove(&place);
    }

    /// A node that has stopped leaves, as an engine does that was told to stop.
    fn leave(&mut self, place: usize) {
        let Some(id) = self.nodes[place].driver.as_ref().map(Driver::node) else { return };
        self.say(|| format!("node {place} has stopped"));
        let lives = self.nodes[place].lives;
        self.go_down(place);
        self.kill_children(place, lives, 0);
        let nodes = self.now(self.store.clone().nodes());
        if let Some(lease) = nodes.iter().find(|node| node.id == id).map(|node| node.lease_until) {
            let now = self.world.wall();
            self.now(self.store.clone().fence(now, id, lease));
        }
        let down = self.random.between(SECOND, HOUR);
        self.soon(down, What::Start(place));
    }

    /// The process of a node is stopped for a time, its keeper is not.
    pub(crate) fn freeze(&mut self, place: usize, time: Micros, calls_land: bool) {
        let node = &mut self.nodes[place];
        if node.life != Life::Up {
            return;
        }
        node.life = Life::Frozen { calls_land };
        let lives = node.lives;
        self.say(|| format!("node {place} is frozen for {} s", time / SECOND));
        let at = self.world.now() + time;
        self.at(at, What::Thaw { place, lives });
    }

    fn thaw(&mut self, place: usize, lives: u64) {
        if !self.is_life(place, lives) || self.nodes[place].life == Life::Up {
            return;
        }
        self.nodes[place].life = Life::Up;
        self.thawed_at = self.world.now();
        self.say(|| format!("node {place} goes on"));
        let inputs: Vec<Input> = self.nodes[place].inbox.drain(..).collect();
        let stalled = std::mem::take(&mut self.nodes[place].stalled);
        // A node wakes up before it reads what has come meanwhile, or after.
        if self.random.permille(500) {
            self.give(place, Input::Woken);
        }
        for input in inputs {
            if self.is_life(place, lives) {
                self.give(place, input);
            }
        }
        for task in stalled {
            self.poll(task);
        }
        if self.is_life(place, lives) {
            self.give(place, Input::Woken);
        }
    }

    fn tell_keeper(&mut self, place: usize, asked: Duration) {
        let lease = self.params.lease();
        let node = &mut self.nodes[place];
        let until = node.started_at + asked.as_micros() as Micros + lease;
        node.keeper_until = until;
        let lives = node.lives;
        let at = (until - lease / 12).max(self.world.now());
        self.at(at, What::Keeper { place, lives, until });
    }

    // Processes.

    fn start_process(&mut self, place: usize, attempt: &Attempt, tell: bool) {
        self.attempts += 1;
        let lives = self.nodes[place].lives;
        // A child that took long to start may find that too little of the lease is left.
        let is_slow = !self.is_healed && self.random.permille(10);
        let is_allowed =
            !is_slow && self.world.now() + self.params.lease() / 3 < self.nodes[place].keeper_until;
        let habit = match self.is_healed {
            true => Habit::HEALED,
            false => self.habits.get(&*attempt.agent).cloned().unwrap_or(Habit::HEALED),
        };
        let takes = self.random.between(habit.shortest, habit.longest);
        let outcome = match self.random.permille(habit.fails_permille) {
            true => Outcome::Failed { reason: Reason::ExitCode, retryable: self.random.permille(800) },
            false => Outcome::Completed,
        };
        let record = self.now(self.store.memory.run(attempt.run));
        let process = Process {
            place,
            lives,
            node: attempt.node,
            run: attempt.run,
            epoch: attempt.epoch,
            name: format!("{}/{}", attempt.agent, attempt.schedule),
            agent: attempt.agent.to_string(),
            schedule: record.as_ref().map_or(0, |record| record.schedule),
            command: attempt.command.clone(),
            lane: record.map_or(String::new(), |record| record.lane),
            session: attempt.session.clone(),
            claimed_at: self.world.take_claim(attempt.run, attempt.epoch),
            outcome,
            ending: 0,
            is_stopping: false,
        };
        self.say(|| format!("node {place} starts {} {} #{}", process.name, process.run, process.epoch));
        self.check_start(&process);
        // Rare by chance: most processes run for a second.
        if self.params.steps_clock && !self.is_healed && self.random.permille(2) {
            self.soon(SECOND, What::Crash(place));
        }
        if process.is_session() || self.is_hooked(&process.name) {
            self.verb_maybe(300, &process.name, MINUTE);
        } else if self.random.permille(50) && self.is_half_open(&process.agent, &process.command) {
            self.verb_maybe(500, &process.name, SECOND);
            let neighbour = self.neighbour(&process.agent, &process.command, &process.name);
            self.verb_maybe(500, &neighbour, SECOND);
        }
        self.number += 1;
        let pid = self.number;
        self.processes.insert(pid, process);
        if tell && is_allowed {
            let (run, epoch) = (attempt.run, attempt.epoch);
            self.soon(
                SECOND / 10,
                What::Give { place, lives, input: Box::new(Input::Started { run, epoch }) },
            );
        }
        if is_allowed {
            let at = self.world.now() + takes;
            self.at(at, What::Exit { pid, ending: 0 });
        } else {
            // The keeper refuses the child: it never runs.
            self.end_process(pid, Outcome::NotStarted, SECOND / 100);
        }
    }

    fn stop_process(&mut self, place: usize, lives: u64, run: RunId, epoch: Epoch, stop: Stop) {
        let ours = |each: &Process| {
            each.place == place && each.lives == lives && (each.run, each.epoch) == (run, epoch)
        };
        let Some(pid) = self.processes.iter().find(|(_, each)| ours(each)).map(|(pid, _)| *pid) else {
            return;
        };
        let outcome = match stop {
            Stop::Cancel(reason) => Outcome::Cancelled(reason),
            Stop::Shutdown | Stop::ShutdownNow => Outcome::Shutdown,
            Stop::LeaseLost => Outcome::Failed { reason: Reason::Orphaned, retryable: true },
        };
        // Some programs take long to end.
        let grace = if self.random.permille(300) { MINUTE } else { 5 * SECOND };
        self.end_process(pid, outcome, if stop.is_at_once() { SECOND / 20 } else { grace });
        if let Stop::Cancel(_) = stop {
            let name = self.processes[&pid].name.clone();
            self.verb_maybe(500, &name, SECOND);
        }
    }

    /// Ends a process soon.
    pub(crate) fn end_process(&mut self, pid: u64, outcome: Outcome, within: Micros) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        process.outcome = outcome;
        process.ending += 1;
        process.is_stopping = true;
        let ending = process.ending;
        self.soon(within.max(1), What::Exit { pid, ending });
    }

    fn exit(&mut self, pid: u64, ending: u64) {
        if self.processes.get(&pid).is_none_or(|process| process.ending != ending) {
            return;
        }
        let Some(process) = self.processes.remove(&pid) else { return };
        self.check_exit(&process);
        if matches!(process.outcome, Outcome::Failed { retryable: true, .. }) {
            let is_rare = process.is_session() || self.is_hooked(&process.name);
            self.verb_maybe(if is_rare { 300 } else { 30 }, &process.name, MINUTE);
        }
        self.say(|| {
            format!("{} {} #{} ends: {:?}", process.name, process.run, process.epoch, process.outcome)
        });
        if !self.is_life(process.place, process.lives) {
            return;
        }
        let failed = matches!(process.outcome, Outcome::Failed { .. });
        let report = Ended {
            outcome: process.outcome,
            exit_code: matches!(process.outcome, Outcome::Completed).then_some(0),
            error: failed.then(|| "simulated".to_owned()),
            summary: None,
            usage: None,
        };
        self.give(process.place, Input::Ended { run: process.run, epoch: process.epoch, report });
    }

    /// The keeper of a node ends its children.
    fn kill_children(&mut self, place: usize, lives: u64, within: Micros) {
        let children: Vec<u64> = self
            .processes
            .iter()
            .filter(|(_, each)| each.place == place && each.lives == lives)
            .map(|(pid, _)| *pid)
            .collect();
        let orphaned = Outcome::Failed { reason: Reason::Orphaned, retryable: true };
        for pid in children {
            match within {
                0 => {
                    self.end_process(pid, orphaned, 1);
                    if let Some(process) = self.processes.get(&pid) {
                        let ending = process.ending;
                        self.exit(pid, ending);
                    }
                }
                within => self.end_process(pid, orphaned, within),
            }
        }
    }

    /// The answer of the store to a call that takes no time.
    pub(crate) fn now<T>(&self, call: impl Future<Output = Result<T, belfry_store::Error>>) -> T {
        let mut call = std::pin::pin!(call);
        match call.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(answer)) => answer,
            Poll::Ready(Err(error)) => {
                panic!("seed {}: the store in memory fails: {error}", self.params.seed)
            }
            Poll::Pending => panic!("seed {}: the store in memory waits", self.params.seed),
        }
    }
}

pub(crate) fn signed(time: Micros) -> SignedDuration {
    SignedDuration::from_micros(time as i64)
}

fn brief(ask: &belfry::testing::Ask) -> String {
    let mut text = format!("{ask:?}");
    if let Some((at, _)) = text.char_indices().nth(600) {
        text.truncate(at);
    }
    text
}

fn told(event: &belfry::Event) -> String {
    let name = [event.agent.as_deref(), event.schedule.as_deref()].map(Option::unwrap_or_default).join("/");
    let mut text = format!("{} {name}", event.event.as_str());
    let tick = event.tick_at.map(|tick| format!(" tick {tick}"));
    let run = event.run_id.map(|run| format!(" run {run}"));
    let reason = event.reason.as_ref().map(|reason| format!(" {reason}"));
    let count = event.count.map(|count| format!(" x{count}"));
    for part in [tick, run, reason, count].into_iter().flatten() {
        text.push_str(&part);
    }
    text
}
