//! The way of one attempt, from plan to report.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use belfry_core::model::Reason;
use belfry_core::retry::Outcome;
use belfry_core::work::Work;
use nix::sys::signal::Signal;
use tokio::process::Child;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::{Instant, timeout};

use crate::attempt::{Attempt, CancelReceiver, Chunk, Report, Stop};
use crate::cgroup;
use crate::ending::{self, Ending, Members};
use crate::environment::Variables;
use crate::error::{Error, HANGS};
use crate::files::{Found, one_line};
use crate::keeper::KeeperHandle;
use crate::output::{self, Pump};
use crate::plan::{self, Plan};
use crate::processes::{ChildRecord, Family, Scope, signal_group};
use crate::spawn::{self, Started};

/// How long pipes may stay open after the process group is gone, before we look who holds them.
const DRAIN: Duration = Duration::from_millis(200);
/// What those who hold them are given between TERM and KILL, at most.
const HOLDER_GRACE: Duration = Duration::from_secs(1);

/// How long an attempt waits before it asks again for what the system is short of: at first, and at most.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(50);
const SHORTAGE_PAUSE_MAX: Duration = Duration::from_secs(1);
/// A shortage that lasts longer fails the attempt, with its reason.
const SHORTAGE_MAX: Duration = Duration::from_secs(300);

/// A start that takes longer is told of.
const START_LONG: Duration = Duration::from_secs(2);
/// One that takes longer has failed.
const START_MAX: Duration = Duration::from_secs(30);

/// How many attempts are given their prompts and payloads at the same time.
const TURNS: usize = 4;

/// How a node runs attempts.
#[derive(Debug, Clone, Default)]
pub struct RunnerOptions {
    /// The process that ends children if this one no longer can. Without it a killed node leaves its children
    /// behind, and children can reach the terminal of this process as `/dev/tty`.
    pub keeper: Option<KeeperHandle>,
    /// Where attempts have their private directories; made where it does not exist. Must be given.
    pub state_dir: PathBuf,
    /// The main configuration file, absolute: children get it as `BELFRY_CONFIG`, so that a `belfry` they call finds this node.
    pub config: Option<PathBuf>,
    /// Below which control group each child gets its own, see [`crate::delegated_cgroup`]. Needs a keeper.
    pub cgroup: Option<PathBuf>,
}

/// Starts attempts and sees them through to their end. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Runner {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    options: RunnerOptions,
    /// The node's environment, as it was when the runner was made.
    environment: Variables,
    /// For what takes much memory while an attempt starts.
    turns: Arc<Semaphore>,
}

/// How far the start of an attempt has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// It has not started, because the system is short of something: what, in words. It is tried again and again.
    Waits(String),
    /// Its program is being executed.
    Started,
}

/// What an attempt's main process came to.
enum End {
    NotStarted(Error),
    Exited(ExitStatus),
    LeaseLost,
    Stopped(Stop),
    TimedOut,
}

impl Runner {
    /// A runner whose children get their variables from this process's environment.
    pub fn new(options: RunnerOptions) -> Runner {
        Runner::with_environment(options, std::env::vars_os())
    }

    /// A runner whose children get their variables from elsewhere.
    pub fn with_environment<I, K, V>(mut options: RunnerOptions, environment: I) -> Runner
    where
        I: IntoIterator<Item = (K, V)>,
        K: Into<std::ffi::OsString>,
        V: Into<std::ffi::OsString>,
    {
        // Children have other directories than we do.
        if let Ok(absolute) = std::path::absolute(&options.state_dir) {
            options.state_dir = absolute;
        }
        let environment = environment.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        let turns = Arc::new(Semaphore::new(TURNS));
        Runner { inner: Arc::new(Inner { options, environment, turns }) }
    }

    /// Runs an attempt to its end. It returns when none of its process group lives and all its output that is kept has
    /// been taken, or nobody takes it: `output` must be received from, or dropped. If the future is dropped, the
    /// group is killed.
    pub async fn run(&self, attempt: Attempt, cancel: CancelReceiver, output: mpsc::Sender<Chunk>) -> Report {
        self.run_and_tell(attempt, cancel, output, |_| ()).await
    }

    /// As [`Runner::run`]. Tells once that the attempt waits, if it does so for more than a moment, and once that its
    /// program is being executed, never if it could not be.
    pub async fn run_and_tell(
        &self,
        attempt: Attempt,
        mut cancel: CancelReceiver,
        output: mpsc::Sender<Chunk>,
        mut tell: impl FnMut(Progress) + Send,
    ) -> Report {
        if let Some(stop) = *cancel.borrow() {
            return ended(outcome_of(stop));
        }
        let attempt = Arc::new(attempt);
        let (mut pause, give_up_at) = (SHORTAGE_PAUSE, Instant::now() + SHORTAGE_MAX);
        let mut is_told = false;
        loop {
            let mut start = pin!(self.inner.clone().start_apart(attempt.clone()));
            let hangs_at = Instant::now() + START_MAX;
            let started = loop {
                tokio::select! {
                    biased;
                    started = &mut start => break started,
                    // It may be about to start, and is then ended as one that has started.
                    stop = stopped(&mut cancel) => match timeout(START_LONG, &mut start).await {
                        Ok(started) => break started,
                        Err(_) => return ended(outcome_of(stop)),
                    },
                    () = tokio::time::sleep(START_LONG), if !is_told => {
                        is_told = true;
                        tell(Progress::Waits(HANGS.into()));
                    }
                    () = tokio::time::sleep_until(hangs_at) => return not_started(&Error::Hangs),
                }
            };
            match started {
                Ok((plan, child, guard)) => {
                    let agent = attempt.agent_definition.clone();
                    // With its prompt and payload, which the program has: they may be large, and it may run for long.
                    drop(attempt);
                    return see_through(plan, child, guard, &agent.work, &mut cancel, output, tell).await;
                }
                // The attempt is not to blame, and waits until others have ended.
                Err(error) if error.is_shortage() && Instant::now() < give_up_at => {
                    if pause == SHORTAGE_PAUSE_MAX && !std::mem::replace(&mut is_told, true) {
                        tell(Progress::Waits(error.chain()));
                    }
                }
                Err(error) => return not_started(&error),
            }
            tokio::select! {
                stop = stopped(&mut cancel) => return ended(outcome_of(stop)),
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(SHORTAGE_PAUSE_MAX),
            }
        }
    }
}

type Began = Result<(Box<Plan>, Started, Guard), Error>;

impl Inner {
    /// Starts an attempt in a thread of its own: it may wait for a file system that does not answer, and then it is in nobody's
    /// way, also not when this process ends. If nobody waits any longer, nothing is executed, or it is killed.
    async fn start_apart(self: Arc<Self>, attempt: Arc<Attempt>) -> Began {
        // A closed semaphore has no turns, and nobody closes this one.
        let turn = self.turns.clone().acquire_owned().await.ok();
        let (send, began) = oneshot::channel();
        let runtime = tokio::runtime::Handle::current();
        let thread = std::thread::Builder::new().name("belfry-start".into());
        let spawned = thread.spawn(move || {
            let _runtime = runtime.enter();
            let began = self.start(&attempt, turn, &send);
            let _ = send.send(began);
        });
        if let Err(source) = spawned {
            return Err(Error::Shortage { program: "a thread".into(), source });
        }
        let broken = |_| Error::Action("its start has panicked".into());
        began.await.map_err(broken).flatten()
    }

    /// Only what takes much memory needs its turn.
    fn start(
        &self,
        attempt: &Attempt,
        turn: Option<OwnedSemaphorePermit>,
        waiting: &oneshot::Sender<Began>,
    ) -> Began {
        let RunnerOptions { keeper, cgroup, .. } = &self.options;
        let texts = plan::render(attempt, &self.environment)?;
        drop(turn);
        let plan = Box::new(plan::plan(attempt, texts, &self.options)?);
        if waiting.is_closed() {
            return Err(Error::Refused);
        }
        let started = spawn::start(&plan, keeper.as_ref(), cgroup.as_deref())?;
        let guard = Guard { record: started.record.clone(), keeper: keeper.clone(), gone: false };
        plan.files.write_record(&started.record).map_err(|error| match started.control {
            Some(_) => error,
            // Without a trampoline the program was executed already: a shortage must not execute it again unseen.
            None => Error::Spawn { program: plan::show(&plan.name), message: error.chain(), retryable: true },
        })?;
        Ok((plan, started, guard))
    }
}

async fn see_through(
    mut plan: Box<Plan>,
    mut started: Started,
    mut guard: Guard,
    work: &Work,
    cancel: &mut CancelReceiver,
    output: mpsc::Sender<Chunk>,
    tell: impl FnMut(Progress) + Send,
) -> Report {
    let child = &mut started.child;
    let pump =
        output::start(child.stdout.take(), child.stderr.take(), &plan.secrets, work.output_bytes, output);
    let members = Members::new(Family::new(started.record.clone()));
    let mut end = wait(&mut plan, &mut started, &guard, work, cancel, tell).await;
    // However it took its end: it was not its own.
    if matches!(end, End::Exited(_)) && guard.lost_its_lease().await {
        end = End::LeaseLost;
    }
    let child = &mut started.child;
    let grace = Duration::from_millis(work.grace_ms);
    let stopped = match end {
        End::Exited(_) | End::LeaseLost | End::NotStarted(_) => None,
        End::TimedOut | End::Stopped(Stop::Cancel(_) | Stop::Shutdown) => Some(Some(grace)),
        End::Stopped(Stop::ShutdownNow | Stop::LeaseLost) => Some(None),
    };
    match stopped {
        Some(grace) => {
            ending::end(child, &members, Ending { scope: Scope::Everyone, grace }, cancel).await;
        }
        None => {
            if members.live(Scope::Group).await {
                let ending = Ending { scope: Scope::Group, grace: Some(grace) };
                ending::end(child, &members, ending, cancel).await;
            }
        }
    }
    let pump = close_pipes(pump, child, &members, grace, cancel).await;
    guard.all_gone();
    let (secrets, found) = collect(plan).await;
    // The kept output is with the engine before it hears of the end.
    let _ = pump.task.await;
    let mut report = report(end, work, found);
    report.error = report.error.map(|text| one_line(&secrets.mask_text(&text)));
    report
}

/// Waits for the first of: the end of the child, a request to end it, the end of its time.
async fn wait(
    plan: &mut Plan,
    started: &mut Started,
    guard: &Guard,
    work: &Work,
    cancel: &mut CancelReceiver,
    mut tell: impl FnMut(Progress) + Send,
) -> End {
    let time = async {
        match work.timeout_ms {
            Some(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
            None => std::future::pending().await,
        }
    };
    let whole = async {
        if let Err(error) = guard.register().await {
            // It has not been told to go, and now never will be.
            started.control = None;
            let _ = started.child.wait().await;
            return End::NotStarted(error);
        }
        if let Err(error) = spawn::go(plan, &mut started.control).await {
            let _ = started.child.wait().await;
            return End::NotStarted(error);
        }
        // As for the prompt and the payload: the program has them.
        (plan.arguments, plan.variables) = (Vec::new(), Variables::default());
        tell(Progress::Started);
        match started.child.wait().await {
            Ok(status) => End::Exited(status),
            Err(error) => End::NotStarted(Error::Action(format!("cannot wait for the process: {error}"))),
        }
    };
    tokio::select! {
        biased;
        end = whole => end,
        stop = stopped(cancel) => End::Stopped(stop),
        () = time => End::TimedOut,
    }
}

async fn stopped(cancel: &mut CancelReceiver) -> Stop {
    match cancel.wait_for(Option::is_some).await.map(|stop| *stop) {
        Ok(Some(stop)) => stop,
        // Whoever could ask is gone; nobody will.
        _ => std::future::pending().await,
    }
}

/// Waits for the end of the pipes. Who left the group and holds one open is ended; if that does not help, they are closed.
async fn close_pipes(
    mut pump: Pump,
    child: &mut Child,
    members: &Members,
    grace: Duration,
    cancel: &mut CancelReceiver,
) -> Pump {
    if timeout(DRAIN, pump.ended.wait_for(|ended| *ended)).await.is_ok() {
        return pump;
    }
    if members.live(Scope::Everyone).await {
        let ending = Ending { scope: Scope::Everyone, grace: Some(grace.min(HOLDER_GRACE)) };
        ending::end(child, members, ending, cancel).await;
        if timeout(DRAIN, pump.ended.wait_for(|ended| *ended)).await.is_ok() {
            return pump;
        }
    }
    pump.close.send_replace(true);
    let _ = pump.ended.wait_for(|ended| *ended).await;
    pump
}

/// Reads the result and removes the private directory.
async fn collect(plan: Box<Plan>) -> (crate::mask::Secrets, Found) {
    let secrets = plan.secrets.clone();
    let found = tokio::task::spawn_blocking(move || plan.files.collect(&plan.secrets)).await;
    (secrets, found.unwrap_or_default())
}

fn report(end: End, work: &Work, found: Found) -> Report {
    let mut report = match end {
        End::NotStarted(error) => return not_started(&error),
        End::Stopped(Stop::LeaseLost) => Report {
            error: Some("ended by the node: its lease was about to end".into()),
            ..ended(outcome_of(Stop::LeaseLost))
        },
        End::Stopped(stop) => ended(outcome_of(stop)),
        End::TimedOut => {
            let ms = i64::try_from(work.timeout_ms.unwrap_or_default()).unwrap_or(i64::MAX);
            let limit = belfry_time::format_duration(belfry_time::SignedDuration::from_millis(ms));
            Report {
                error: Some(format!("took longer than {limit}")),
                ..ended(Outcome::Failed { reason: Reason::Timeout, retryable: true })
            }
        }
        End::LeaseLost => Report {
            error: Some("ended by the keeper: the node's lease was about to end".into()),
            ..ended(Outcome::Failed { reason: Reason::Orphaned, retryable: true })
        },
        End::Exited(status) => judge(status, work),
    };
    report.summary = found.summary;
    report.usage = found.usage;
    report
}

/// What an exit means.
fn judge(status: ExitStatus, work: &Work) -> Report {
    let failed = |retryable| Outcome::Failed { reason: Reason::ExitCode, retryable };
    match (status.code(), status.signal()) {
        (Some(code), _) if work.ok_codes.contains(&code) => {
            Report { exit_code: Some(code), ..ended(Outcome::Completed) }
        }
        (Some(code), _) => Report {
            exit_code: Some(code),
            error: Some(format!("exit code {code}")),
            ..ended(failed(!work.no_retry_codes.contains(&code)))
        },
        (None, signal) => {
            let number = signal.unwrap_or_default();
            let name = Signal::try_from(number).map_or("unknown", Signal::as_str);
            let core = if status.core_dumped() { ", core dumped" } else { "" };
            Report { error: Some(format!("killed by signal {number} ({name}){core}")), ..ended(failed(true)) }
        }
    }
}

fn outcome_of(stop: Stop) -> Outcome {
    match stop {
        Stop::Cancel(reason) => Outcome::Cancelled(reason),
        Stop::Shutdown | Stop::ShutdownNow => Outcome::Shutdown,
        Stop::LeaseLost => Outcome::Failed { reason: Reason::Orphaned, retryable: true },
    }
}

fn ended(outcome: Outcome) -> Report {
    Report { outcome, exit_code: None, error: None, summary: None, usage: None }
}

fn not_started(error: &Error) -> Report {
    let outcome = match error {
        Error::Refused => Outcome::NotStarted,
        _ => Outcome::Failed { reason: error.reason(), retryable: error.is_retryable() },
    };
    Report { error: Some(one_line(&error.chain())), ..ended(outcome) }
}

/// Kills the group if we no longer look after it, because our future was dropped.
struct Guard {
    record: ChildRecord,
    keeper: Option<KeeperHandle>,
    gone: bool,
}

impl Guard {
    async fn register(&self) -> Result<(), Error> {
        match &self.keeper {
            Some(keeper) => keeper.register(self.record.clone()).await,
            None => Ok(()),
        }
    }

    async fn lost_its_lease(&self) -> bool {
        match &self.keeper {
            Some(keeper) => keeper.has_ended(&self.record.child_id).await,
            None => false,
        }
    }

    /// Nothing is left that would have to be ended.
    fn all_gone(&mut self) {
        self.gone = true;
        if let Some(group) = &self.record.cgroup {
            cgroup::remove(group);
        }
        if let Some(keeper) = &self.keeper {
            keeper.remove(&self.record.child_id);
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        signal_group(self.record.pgid, Signal::SIGKILL);
        if let Some(group) = &self.record.cgroup {
            cgroup::kill(group);
        }
        if let Some(keeper) = &self.keeper {
            keeper.remove(&self.record.child_id);
        }
    }
}
