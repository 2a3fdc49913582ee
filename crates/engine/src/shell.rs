//! The shell around the driver: it brings the time, does what the driver asks for, and carries the answers back in.
//!
//! Every effect that waits runs as a task of its own and comes back as one input, so that the loop itself never waits for
//! anything but the next input and the next moment.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use belfry_core::retry::Outcome;
use belfry_core::work::Action;
use belfry_core::{Epoch, NodeId, Reason, RunId};
use belfry_runner::{
    Attempt, CancelReceiver, CancelSender, Chunk, ProcessState, Progress, Report, Runner, Stop, cancellation,
};
use belfry_store::{AnyStore, Node, Snapshot, Store, Stream, Watch};
use belfry_time::Timestamp;
use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use uuid::Uuid;

use crate::carry::{carry_out, fence};
use crate::clock::Clock;
use crate::driver::{Beat, Driver, Effect, Input, Phase, Sight};
use crate::event::{Event, Level, Name};
use crate::handler::Handler;
use crate::machine::{Machine, Ticks};
use crate::output::Output;
use crate::session::UsageOf;

/// Answers and ends that wait to be taken in: one for each effect under way.
pub(crate) const MESSAGES_MAX: usize = 4096;
/// Chunks of one attempt that wait to be stored; a child that writes faster waits.
const CHUNKS_MAX: usize = 16;
/// For how long output is tried to be stored after the end of its attempt, and where the node stops meanwhile.
const OUTPUT_AFTER_END: Duration = Duration::from_secs(60);
const OUTPUT_AT_STOP: Duration = Duration::from_secs(2);
const LEFTOVER_GRACE: Duration = Duration::from_secs(2);
const TEND_EVERY: Duration = Duration::from_secs(3);

/// What the engine shows of itself to whoever asks.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub phase: Phase,
    pub draining: bool,
    pub counters: crate::driver::Counters,
    pub running: HashMap<String, usize>,
    pub overrun: usize,
    pub node: NodeId,
    pub store_is_well: bool,
    /// The attempts here whose program has not started because the system is short of something: of what, in words.
    pub delayed: BTreeMap<RunId, String>,
}

/// The calls to the store that have not been answered, each with when it began.
#[derive(Clone, Default)]
pub(crate) struct Calls(Arc<Mutex<(u64, BTreeMap<u64, Instant>)>>);

impl Calls {
    fn begin(&self) -> Call {
        let (last, open) = &mut *self.0.lock();
        *last += 1;
        open.insert(*last, Instant::now());
        Call { calls: self.clone(), number: *last }
    }

    /// For how long the oldest of them has waited.
    pub(crate) fn longest(&self) -> Option<Duration> {
        self.0.lock().1.values().min().map(Instant::elapsed)
    }
}

/// One of them, until it is dropped.
struct Call {
    calls: Calls,
    number: u64,
}

impl Drop for Call {
    fn drop(&mut self) {
        self.calls.0.lock().1.remove(&self.number);
    }
}

/// What reaches the shell.
pub(crate) enum Message {
    /// For the driver.
    Input(Input),
    /// Somebody wants to know when there is nothing to do before time passes: also nothing that runs, or apart from that.
    Quiet {
        /// Also nothing that runs.
        all: bool,
        /// Told then.
        tell: oneshot::Sender<()>,
    },
}

pub(crate) type OnTrigger = Arc<dyn Fn(&Attempt) + Send + Sync>;
/// What a program says of itself at each heartbeat.
pub(crate) type ContextOf = Arc<dyn Fn() -> Map<String, Value> + Send + Sync>;

pub(crate) struct Shell {
    pub store: Arc<AnyStore>,
    pub clock: Clock,
    pub driver: Driver,
    pub runner: Runner,
    pub keeper: Option<belfry_runner::KeeperHandle>,
    /// How many keepers had been started when that was looked at last.
    pub keeper_starts: u64,
    pub handlers: Arc<HashMap<String, Handler>>,
    pub on_trigger: Option<OnTrigger>,
    pub usage_of: Option<UsageOf>,
    pub context_of: Option<ContextOf>,
    /// What the processors had done at the last heartbeat.
    pub ticks: Arc<Mutex<Option<Ticks>>>,
    pub state_dir: PathBuf,
    pub template: Node,
    pub lease: Duration,
    pub messages: mpsc::Receiver<Message>,
    pub send: mpsc::Sender<Message>,
    pub events: broadcast::Sender<Arc<Event>>,
    pub view: watch::Sender<View>,
    pub calls: Calls,
    /// How to end each attempt under way.
    pub attempts: HashMap<(RunId, Epoch), CancelSender>,
    pub waiting: Vec<(bool, oneshot::Sender<()>)>,
}

impl Shell {
    pub(crate) async fn run(mut self) {
        let tending = tend(self.store.clone());
        let mut input = Input::Woken;
        loop {
            if let Input::Ended { run, epoch, .. } = &input {
                self.attempts.remove(&(*run, *epoch));
            }
            let effects = self.driver.step(self.clock.now(), input);
            // Who is told that it takes work again may bring some at once.
            let draining = self.driver.is_draining();
            self.view.send_if_modified(|view| std::mem::replace(&mut view.draining, draining) != draining);
            for effect in effects {
                self.perform(effect);
            }
            self.look_at_keeper();
            self.show();
            if self.driver.phase() == Phase::Stopped {
                tending.abort();
                return;
            }
            let wait = self.driver.wait(self.clock.now());
            let message = tokio::select! {
                biased;
                message = self.messages.recv() => message,
                () = self.clock.sleep(wait) => None,
            };
            input = match message {
                Some(Message::Input(input)) => input,
                Some(Message::Quiet { all, tell }) => {
                    self.waiting.push((all, tell));
                    Input::Woken
                }
                None => Input::Woken,
            };
        }
    }

    /// Tells of a keeper that was replaced.
    fn look_at_keeper(&mut self) {
        let Some(keeper) = &self.keeper else { return };
        let starts = keeper.starts();
        let before = std::mem::replace(&mut self.keeper_starts, starts);
        if starts > before {
            let event = Event::new(self.clock.now().wall, Level::Warn, Name::KeeperRestarted);
            let detail = format!("the keeper was gone; process {} is the new one", keeper.pid().unwrap_or(0));
            let node = Some(self.driver.node());
            // Nobody may be listening.
            let _ = self.events.send(Arc::new(Event { node, detail: Some(detail), ..event }));
        }
    }

    fn show(&mut self) {
        let now = self.clock.now();
        let (idle, quiet) = (self.driver.is_idle(now), self.driver.is_quiet(now));
        if idle && self.messages.is_empty() {
            for (_, tell) in self.waiting.extract_if(.., |(all, _)| quiet || !*all) {
                // Whoever no longer waits does not need to know.
                let _ = tell.send(());
            }
        }
        self.view.send_modify(|view| {
            view.phase = self.driver.phase();
            view.counters = self.driver.counters();
            view.node = self.driver.node();
            view.store_is_well = self.driver.store_is_well();
            view.running.clear();
            for agent in self.driver.running() {
                *view.running.entry(agent.to_owned()).or_default() += 1;
            }
        });
    }

    /// Does what waits as a task whose answer comes back as an input.
    fn answer(&self, work: impl Future<Output = Input> + Send + 'static) {
        let send = self.send.clone();
        tokio::spawn(async move {
            let input = work.await;
            // Once the engine has stopped nobody needs the answer.
            let _ = send.send(Message::Input(input)).await;
        });
    }

    fn perform(&mut self, effect: Effect) {
        let (store, now) = (self.store.clone(), self.clock.now());
        match effect {
            Effect::Ask(ask) => {
                let (clock, call) = (self.clock.clone(), self.calls.begin());
                self.answer(async move {
                    let answer = carry_out(&*store, &clock, ask).await;
                    drop(call);
                    answer
                });
            }
            Effect::Start { attempt, tell } => self.start(*attempt, tell),
            Effect::Stop { run, epoch, stop } => {
                if let Some(cancel) = self.attempts.get(&(run, epoch)) {
                    cancel.send_replace(Some(stop));
                }
            }
            Effect::Join { node, left, until, draining } => {
                let node = Node {
                    id: node,
                    lease_until: until,
                    started_at: now.wall,
                    last_seen_at: now.wall,
                    draining,
                    ..self.template.clone()
                };
                self.answer(async move {
                    Input::Joined { asked: now.mono, joined: store.join(&node, Some(left)).await }
                });
            }
            Effect::TellKeeper { asked } => {
                if let Some(keeper) = &self.keeper {
                    // Less by the time that has passed since.
                    keeper.renew(Instant::now(), self.lease.saturating_sub(now.mono.saturating_sub(asked)));
                }
            }
            Effect::ReadNodes => {
                let (host, here) = (self.template.host.clone(), Arc::new(self.template.process.clone()));
                self.answer(async move {
                    let nodes = store.nodes().await;
                    let serving = match &*store {
                        AnyStore::Sqlite(file) if !file.is_held() => file.served_by(),
                        _ => None,
                    };
                    let is_file = matches!(*store, AnyStore::Sqlite(_));
                    let look = |node: Node| {
                        let is_same_host = is_file && node.host == host;
                        let sight = Sight {
                            here: here.clone(),
                            is_same_host,
                            process: ProcessState::of(node.pid),
                            // A process that is not known may be this one.
                            serves_file: is_same_host
                                && serving.is_some_and(|by| by.pid.is_none_or(|pid| pid == node.pid)),
                        };
                        (node, sight)
                    };
                    Input::Nodes(nodes.map(|nodes| nodes.into_iter().map(look).collect()))
                });
            }
            Effect::Fence { node, lease, state_dir, is_lapsed } => {
                self.fence(node, lease, state_dir, is_lapsed);
            }
            Effect::Beat(beat) => self.beat(beat),
            Effect::Note(event) => {
                // Nobody may be listening.
                let _ = self.events.send(Arc::new(*event));
            }
            Effect::Stopped { overrun } => self.view.send_modify(|view| view.overrun = overrun),
        }
    }

    /// Starts an attempt; with `tell` the driver is told when its program or handler has started.
    fn start(&mut self, attempt: Attempt, tell: bool) {
        if let Some(on_trigger) = &self.on_trigger {
            // Whoever is told may fail; the engine goes on.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| on_trigger(&attempt)));
        }
        let (cancel, cancelled) = cancellation();
        self.attempts.insert((attempt.run, attempt.epoch), cancel);
        let (run, epoch, number) = (attempt.run, attempt.epoch, attempt.attempt);
        let usage_of = self.usage_of.clone();
        let session =
            attempt.session.as_ref().map(|key| format!("{}/{}:{key}", attempt.agent, attempt.schedule));
        let (chunks, output) = mpsc::channel(CHUNKS_MAX);
        let (store, runner) = (self.store.clone(), self.runner.clone());
        let mut send = tell.then(|| self.send.clone());
        let mut started = move || {
            if let Some(send) = send.take() {
                // A task of its own, because the attempt does not wait for the driver.
                tokio::spawn(async move { send.send(Message::Input(Input::Started { run, epoch })).await });
            }
        };
        let delay = Delay::new(self, &attempt);
        let handler = match attempt.work().action_of(&attempt.command) {
            Action::Handler => Some(self.handlers.get(&*attempt.agent).cloned()),
            Action::Run(_) | Action::Shell(_) => None,
        };
        self.answer(async move {
            let keep = tokio::spawn(keep_output(store, run, epoch, number, output, cancelled.clone()));
            let mut report = match handler {
                Some(Some(handler)) => handler.run(attempt, cancelled, chunks, started).await,
                Some(None) => no_handler(&attempt),
                None => {
                    let tell = |progress| match progress {
                        // A rescued run that waits has not killed this node, and holds back no other.
                        Progress::Waits(why) => {
                            delay.begin(why);
                            started();
                        }
                        Progress::Started => {
                            delay.end();
                            started();
                        }
                    };
                    runner.run_and_tell(attempt, cancelled, chunks, tell).await
                }
            };
            drop(delay);
            if let Some((tell, session)) = usage_of.zip(session)
                && let Some(usage) = tell(&session)
            {
                let known = report.usage.get_or_insert_default();
                (known.tokens, known.context_window) = (Some(usage.tokens), Some(usage.context_window));
            }
            // What the attempt wrote is there before its end is.
            if let Ok(unstored @ 1..) = keep.await {
                let words = format!("{unstored} bytes of its output could not be stored");
                let text = if report.error.is_some() { &mut report.error } else { &mut report.summary };
                *text = Some(text.take().map_or(words.clone(), |text| format!("{text} ({words})")));
            }
            Input::Ended { run, epoch, report }
        });
    }

    /// Adds what the machine does to what the node says, and keeps it.
    fn beat(&self, beat: Beat) {
        let (store, host) = (self.store.clone(), self.template.host.clone());
        let (context_of, ticks) = (self.context_of.clone(), self.ticks.clone());
        self.answer(async move {
            let machine = Machine::read().await;
            let before = std::mem::replace(&mut *ticks.lock(), machine.ticks);
            let snapshot = Snapshot {
                node: beat.node,
                at: beat.at,
                host,
                cpu_percent: machine.cpu_percent(before),
                memory_total: machine.memory_total,
                memory_used: machine.memory_used,
                load: machine.load,
                lanes: beat.lanes,
                runs: beat.runs,
                sessions: beat.sessions,
                tmux: machine.tmux,
                context: context_of.map(|tell| tell()).unwrap_or_default(),
            };
            Input::Beaten(store.beat(&snapshot).await)
        });
    }

    /// Ends what a node has left on this system, then fences it.
    fn fence(&self, node: NodeId, lease: Timestamp, state_dir: Option<String>, is_lapsed: bool) {
        let (store, clock) = (self.store.clone(), self.clock.clone());
        let mut folders = vec![self.state_dir.clone()];
        folders.extend(state_dir.filter(|folder| !folder.is_empty()).map(PathBuf::from));
        folders.dedup();
        self.answer(async move {
            // Nothing of the old attempts may live when the new ones start.
            let left = tokio::task::spawn_blocking(move || {
                folders
                    .iter()
                    .all(|folder| belfry_runner::end_leftovers(folder, node, LEFTOVER_GRACE).is_ok())
            });
            let all_ended = left.await.unwrap_or(false);
            // A folder that cannot be read may name children that live: its keeper ends them before the lease lapses.
            match all_ended || is_lapsed {
                true => fence(&*store, clock.now().wall, node, lease).await,
                false => Input::Fenced { node, rescued: Ok(None), runs: Vec::new() },
            }
        });
    }
}

/// Tends the store, in real time and apart from all else: nothing waits for it.
fn tend(store: Arc<AnyStore>) -> tokio::task::AbortHandle {
    let tending = tokio::spawn(async move {
        loop {
            tokio::time::sleep(TEND_EVERY).await;
            // A store that does not answer is heard of elsewhere; one that was not tended is slower.
            let _ = store.tend().await;
        }
    });
    tending.abort_handle()
}

fn no_handler(attempt: &Attempt) -> Report {
    Report {
        outcome: Outcome::Failed { reason: Reason::SpawnFailed, retryable: false },
        exit_code: None,
        error: Some(format!("no handler is registered for agent {}", attempt.agent)),
        summary: None,
        usage: None,
    }
}

/// Tells of an attempt whose program cannot start for now. It is shown until it starts or ends.
struct Delay {
    clock: Clock,
    events: broadcast::Sender<Arc<Event>>,
    view: watch::Sender<View>,
    agent: Arc<str>,
    schedule: Arc<str>,
    session: Option<String>,
    tick_at: Option<Timestamp>,
    run: RunId,
    attempt: u32,
    node: NodeId,
    trace: Uuid,
}

impl Delay {
    fn new(shell: &Shell, attempt: &Attempt) -> Delay {
        Delay {
            clock: shell.clock.clone(),
            events: shell.events.clone(),
            view: shell.view.clone(),
            agent: attempt.agent.clone(),
            schedule: attempt.schedule.clone(),
            session: attempt.session.clone(),
            tick_at: attempt.tick_at,
            run: attempt.run,
            attempt: attempt.attempt,
            node: attempt.node,
            trace: attempt.trace_id,
        }
    }

    fn begin(&self, why: String) {
        self.view.send_modify(|view| {
            view.delayed.insert(self.run, why.clone());
        });
        let event = Event::new(self.clock.now().wall, Level::Warn, Name::RunDelayed);
        let event = Event {
            session: self.session.clone(),
            tick_at: self.tick_at,
            run_id: Some(self.run),
            attempt: Some(self.attempt),
            node: Some(self.node),
            trace_id: Some(self.trace.simple().to_string()),
            detail: Some(why),
            ..event.of(&format!("{}/{}", self.agent, self.schedule))
        };
        // Nobody may be listening.
        let _ = self.events.send(Arc::new(event));
    }

    fn end(&self) {
        self.view.send_if_modified(|view| view.delayed.remove(&self.run).is_some());
    }
}

impl Drop for Delay {
    fn drop(&mut self) {
        self.end();
    }
}

/// Stores an attempt's output while it runs, and again where that failed. After the end of the attempt it goes on for a
/// while; gives how many bytes could not be stored.
async fn keep_output(
    store: Arc<AnyStore>,
    run: RunId,
    epoch: Epoch,
    attempt: u32,
    mut pieces: mpsc::Receiver<Chunk>,
    mut stop: CancelReceiver,
) -> u64 {
    let mut output = Output::new(epoch, attempt);
    let (mut is_open, mut is_ending) = (true, false);
    let mut call = None;
    let mut try_at = tokio::time::Instant::now();
    let mut give_up_at = try_at;
    loop {
        if call.is_none() && tokio::time::Instant::now() >= try_at && pieces.is_empty() {
            call = output.batch().map(|batch| {
                let store = store.clone();
                Box::pin(async move { store.append_output(run, epoch, &batch).await })
            });
        }
        if !is_open && call.is_none() && !output.is_waiting() {
            return 0;
        }
        let is_resting = call.is_none() && output.is_waiting();
        let answer = async {
            match &mut call {
                Some(call) => call.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            piece = pieces.recv(), if is_open => match piece {
                Some(piece) => output.push(stream_of(piece.stream), piece.bytes),
                None => {
                    is_open = false;
                    give_up_at = tokio::time::Instant::now() + OUTPUT_AFTER_END;
                }
            },
            answer = answer => {
                call = None;
                try_at = tokio::time::Instant::now() + output.answered(answer);
            }
            () = tokio::time::sleep_until(try_at), if is_resting => {}
            () = tokio::time::sleep_until(give_up_at), if !is_open => return output.unstored(),
            // A node that ends, or whose lease is over, does not wait as long.
            () = until_ending(&mut stop), if !is_open && !is_ending => {
                is_ending = true;
                give_up_at = give_up_at.min(tokio::time::Instant::now() + OUTPUT_AT_STOP);
            }
        }
    }
}

/// Waits until the attempt is ended because its node stops or its lease is over.
async fn until_ending(stop: &mut CancelReceiver) {
    let is_ending = |stop: &Option<Stop>| stop.is_some_and(|stop| !matches!(stop, Stop::Cancel(_)));
    if stop.wait_for(is_ending).await.is_err() {
        std::future::pending().await
    }
}

fn stream_of(stream: belfry_runner::Stream) -> Stream {
    match stream {
        belfry_runner::Stream::Stdout => Stream::Out,
        belfry_runner::Stream::Stderr => Stream::Err,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_call_that_is_not_answered_counts() {
        let calls = Calls::default();
        assert_eq!(calls.longest(), None);
        let first = calls.begin();
        let second = calls.begin();
        // Looked at first: time goes on between the two looks.
        let younger = second.calls.0.lock().1.get(&second.number).map(Instant::elapsed);
        let longest = calls.longest();
        assert!(longest >= younger, "{longest:?} {younger:?}");
        drop(first);
        assert!(calls.longest().is_some());
        drop(second);
        assert_eq!(calls.longest(), None);
    }
}
