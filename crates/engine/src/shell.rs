//! The shell around the driver: it brings the time, does what the driver asks for, and carries the answers back in.
//!
//! Every effect that waits runs as a task of its own and comes back as one input, so that the loop itself never waits for
//! anything but the next input and the next moment.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use belfry_core::retry::Outcome;
use belfry_core::work::Action;
use belfry_core::{Epoch, NodeId, Reason, RunId};
use belfry_runner::{Attempt, CancelSender, Chunk, Report, Runner, cancellation};
use belfry_store::{
    AnyStore, Claim, Claimed, Definitions, Error, Node, OutputChunk, Snapshot, Store, Stream, Watch,
    commit_apart, finish_apart,
};
use belfry_time::Timestamp;
use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use crate::clock::Clock;
use crate::driver::{Beat, Driver, Effect, Input, Phase};
use crate::event::Event;
use crate::handler::Handler;
use crate::machine::{Machine, Ticks};
use crate::session::UsageOf;

/// Answers and ends that wait to be taken in: one for each effect under way.
pub(crate) const MESSAGES_MAX: usize = 4096;
/// Chunks of one attempt that wait to be stored; a child that writes faster waits.
const CHUNKS_MAX: usize = 16;
/// What is collected of an attempt's output before it is stored.
const CHUNK_BYTES: usize = 64 << 10;
const FLUSH_EVERY: Duration = Duration::from_millis(500);
const LEFTOVER_GRACE: Duration = Duration::from_secs(2);
const TEND_EVERY: Duration = Duration::from_secs(3);
/// Snapshots and nodes that are pruned at once.
const BEATS_BATCH: u32 = 500;

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
    pub attempts: HashMap<RunId, CancelSender>,
    pub waiting: Vec<(bool, oneshot::Sender<()>)>,
}

impl Shell {
    pub(crate) async fn run(mut self) {
        let tending = tend(self.store.clone());
        let mut input = Input::Woken;
        loop {
            if let Input::Ended { run, .. } = &input {
                self.attempts.remove(run);
            }
            let effects = self.driver.step(self.clock.now(), input);
            // Who is told that it takes work again may bring some at once.
            let draining = self.driver.is_draining();
            self.view.send_if_modified(|view| std::mem::replace(&mut view.draining, draining) != draining);
            for effect in effects {
                self.perform(effect);
            }
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
            Effect::ReadDue { limit } => {
                let clock = self.clock.clone();
                self.answer(async move {
                    if clock.is_of_store() {
                        match store.clock().await {
                            Ok(at) => at.into_iter().for_each(|at| clock.set(at)),
                            Err(error) => return Input::Due { due: Err(error), next: None },
                        }
                    }
                    let due = store.due(clock.now().wall, None, limit).await;
                    let next = match &due {
                        Ok(due) if due.is_empty() => store.next_due().await.unwrap_or(None),
                        _ => None,
                    };
                    Input::Due { due, next }
                });
            }
            Effect::Commit { commits, ahead } => {
                self.answer(async move {
                    let read = async {
                        let (mark, limit) = ahead?;
                        Some(store.due(now.wall, Some(mark), limit).await)
                    };
                    let (written, ahead) = tokio::join!(commit_apart(&*store, now.wall, &commits), read);
                    Input::Committed { written, ahead }
                });
            }
            Effect::Claim(claim) => {
                self.answer(async move {
                    let claimed = claim_with_definitions(&store, now.wall, &claim).await;
                    let slots: u32 = claim.lanes.iter().map(|(_, slots)| slots).sum();
                    // Where slots are left, it wakes up for whoever may take them; where that cannot be told, it looks again.
                    let next = match &claimed {
                        Ok(claimed) if claim.only.is_none() && claimed.len() < slots as usize => {
                            store.next_start(now.wall).await.unwrap_or(None)
                        }
                        _ => None,
                    };
                    Input::Claimed { claimed, next }
                });
            }
            Effect::ReadLanes => {
                self.answer(async move {
                    let lanes = store.lane_settings().await;
                    Input::Lanes { lanes, unreadable: store.unreadable().await }
                });
            }
            Effect::ReadUnreadableRows => {
                self.answer(async move { Input::UnreadableRows(store.unreadable_rows().await) });
            }
            Effect::Start { attempt, tell } => self.start(*attempt, tell),
            Effect::Stop { run, stop } => {
                if let Some(cancel) = self.attempts.get(&run) {
                    cancel.send_replace(Some(stop));
                }
            }
            Effect::Finish(finishes) => {
                self.answer(async move { Input::Finished(finish_apart(&*store, now.wall, &finishes).await) });
            }
            Effect::Renew { node, until } => self.renew(node, until),
            Effect::Join { node, until, draining } => {
                let node = Node {
                    id: node,
                    lease_until: until,
                    started_at: now.wall,
                    last_seen_at: now.wall,
                    draining,
                    ..self.template.clone()
                };
                self.answer(async move {
                    // Where it cannot join, its first renewal finds out.
                    let _ = store.join(&node).await;
                    Input::Hint
                });
            }
            Effect::ReadMarks(node) => {
                self.answer(async move { Input::Marks(store.marks(node).await) });
            }
            Effect::GiveBack(node, runs) => {
                self.answer(async move {
                    // What is not given back now is seen again at the next renewal.
                    let _ = store.give_back(now.wall, node, &runs).await;
                    Input::Hint
                });
            }
            Effect::ReadNodes => {
                let (template, by_pid) = (self.template.clone(), matches!(*store, AnyStore::Sqlite(_)));
                self.answer(async move {
                    let nodes = store.nodes().await.map(|nodes| {
                        let gone = |node: &Node| by_pid && node.host == template.host && is_gone(node);
                        nodes
                            .into_iter()
                            .map(|node| {
                                let gone = gone(&node);
                                (node, gone)
                            })
                            .collect()
                    });
                    Input::Nodes(nodes)
                });
            }
            Effect::Fence { node, lease } => self.fence(node, lease),
            Effect::ReadBreaker { agent, name, command } => {
                self.answer(async move {
                    let history = store.breaker(agent, &command).await.map(|record| record.history);
                    Input::Breaker { agent: name, command, history }
                });
            }
            Effect::Beat(beat) => self.beat(beat),
            Effect::Prune { retention, snapshots_before, nodes_before } => {
                self.answer(async move {
                    // What is left goes the next time.
                    let _ = store.prune_beats(snapshots_before, nodes_before, BEATS_BATCH).await;
                    Input::Pruned(store.prune(now.wall, &retention).await)
                });
            }
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
        self.attempts.insert(attempt.run, cancel);
        let (run, epoch, number) = (attempt.run, attempt.epoch, attempt.attempt);
        let usage_of = self.usage_of.clone();
        let session =
            attempt.session.as_ref().map(|key| format!("{}/{}:{key}", attempt.agent, attempt.schedule));
        let (chunks, output) = mpsc::channel(CHUNKS_MAX);
        let (store, runner) = (self.store.clone(), self.runner.clone());
        let send = tell.then(|| self.send.clone());
        let started = move || {
            if let Some(send) = send {
                // A task of its own, because the attempt does not wait for the driver.
                tokio::spawn(async move { send.send(Message::Input(Input::Started { run, epoch })).await });
            }
        };
        let handler = match attempt.work.action_of(&attempt.command) {
            Action::Handler => Some(self.handlers.get(&*attempt.agent).cloned()),
            Action::Run(_) | Action::Shell(_) => None,
        };
        self.answer(async move {
            let keep = tokio::spawn(keep_output(store, run, epoch, number, output));
            let mut report = match handler {
                Some(Some(handler)) => handler.run(attempt, cancelled, chunks, started).await,
                Some(None) => no_handler(&attempt),
                None => runner.run_and_tell(attempt, cancelled, chunks, started).await,
            };
            if let Some((tell, session)) = usage_of.zip(session)
                && let Some(usage) = tell(&session)
            {
                let known = report.usage.get_or_insert_default();
                (known.tokens, known.context_window) = (Some(usage.tokens), Some(usage.context_window));
            }
            // What the attempt wrote is there before its end is.
            let _ = keep.await;
            Input::Ended { run, epoch, report }
        });
    }

    fn renew(&self, node: NodeId, until: Timestamp) {
        let (store, clock, keeper, lease) =
            (self.store.clone(), self.clock.clone(), self.keeper.clone(), self.lease);
        self.answer(async move {
            let (asked, asked_at) = (clock.now().mono, std::time::Instant::now());
            let renewed = store.renew(node, until).await;
            if let (Ok(belfry_store::Renewed::Held { .. }), Some(keeper)) = (&renewed, keeper) {
                keeper.renew(asked_at, lease);
            }
            Input::Renewed { asked, renewed }
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

    fn fence(&self, node: NodeId, lease: Timestamp) {
        let (store, clock, state_dir) = (self.store.clone(), self.clock.clone(), self.state_dir.clone());
        self.answer(async move {
            // Nothing of the old attempts may live when the new ones start.
            let left = tokio::task::spawn_blocking(move || {
                belfry_runner::end_leftovers(&state_dir, node, LEFTOVER_GRACE)
            });
            let _ = left.await;
            Input::Fenced { node, rescued: store.fence(clock.now().wall, node, lease).await }
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

/// Claims runs and reads what they are runs of.
pub(crate) async fn claim_with_definitions(
    store: &AnyStore,
    now: Timestamp,
    claim: &Claim,
) -> Result<Vec<(Claimed, Option<Definitions>)>, Error> {
    let claimed = store.claim(now, claim).await?;
    if claimed.is_empty() {
        return Ok(Vec::new());
    }
    let schedules: Vec<_> = claimed.iter().map(|claimed| claimed.schedule).collect();
    // They are ours now: where this fails, the renewal gives them back.
    let definitions = store.definitions(&schedules).await?;
    Ok(claimed.into_iter().zip(definitions).collect())
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

/// Stores an attempt's output while it runs: when there is enough of it, and twice a second.
async fn keep_output(
    store: Arc<AnyStore>,
    run: RunId,
    epoch: Epoch,
    attempt: u32,
    mut output: mpsc::Receiver<Chunk>,
) {
    let mut seq = OutputChunk::first_seq(epoch);
    let mut waiting: Vec<OutputChunk> = Vec::new();
    let mut flush = tokio::time::interval(FLUSH_EVERY);
    flush.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let more = tokio::select! {
            chunk = output.recv() => match chunk {
                Some(chunk) => {
                    add(&mut waiting, &mut seq, attempt, chunk);
                    true
                }
                None => false,
            },
            _ = flush.tick(), if !waiting.is_empty() => true,
        };
        let bytes: usize = waiting.iter().map(|chunk| chunk.bytes.len()).sum();
        let due = !more || bytes >= CHUNK_BYTES || flush.period().is_zero() || output.is_empty() && bytes > 0;
        if due && !waiting.is_empty() {
            // Output is worth less than the work: what cannot be stored is let go of.
            let _ = store.append_output(run, epoch, &waiting).await;
            waiting.clear();
        }
        if !more {
            return;
        }
    }
}

fn add(waiting: &mut Vec<OutputChunk>, seq: &mut u64, attempt: u32, chunk: Chunk) {
    let stream = match chunk.stream {
        belfry_runner::Stream::Stdout => Stream::Out,
        belfry_runner::Stream::Stderr => Stream::Err,
    };
    match waiting.last_mut() {
        Some(last) if last.stream == stream && last.bytes.len() + chunk.bytes.len() <= CHUNK_BYTES => {
            last.bytes.extend(chunk.bytes);
        }
        _ => {
            waiting.push(OutputChunk { seq: *seq, attempt, stream, bytes: chunk.bytes });
            *seq += 1;
        }
    }
}

/// Whether the process of a node on this host is surely gone: nobody has its number, or somebody younger has.
fn is_gone(node: &Node) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{}/stat", node.pid)) else {
        return std::path::Path::new("/proc/self/stat").exists();
    };
    // The name may hold anything; what follows its last parenthesis is numbers. The 22nd is the start, in ticks since boot.
    let started =
        stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(19)?.parse::<i64>().ok());
    let uptime = std::fs::read_to_string("/proc/uptime").ok();
    let uptime = uptime.and_then(|text| text.split('.').next()?.parse::<i64>().ok());
    let (Some(started), Some(uptime)) = (started, uptime) else { return false };
    let age = uptime - started / 100;
    let node_age = Timestamp::now().duration_since(node.started_at).as_secs();
    // A process that is this much younger than its node is another one.
    age + 60 < node_age
}
