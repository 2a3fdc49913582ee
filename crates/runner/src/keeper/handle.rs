//! The node's side of the keeper: starts it, tells it what it must know, and starts another if it dies.

use std::collections::{HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep, timeout};

use super::protocol::{FromKeeper, Margins, ToKeeper, now_ms};
use super::{EXECUTE, HIDDEN, KEEP};
use crate::error::Error;
use crate::processes::ChildRecord;

/// How long a keeper may take to answer before it is replaced.
const ANSWER: Duration = Duration::from_secs(5);
/// For how long after a lease came close to its end we ask the keeper what it has done.
const DOUBT_MS: u64 = 5_000;
/// How long we wait before we start another one: at first, and at most.
const START_AGAIN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// How a keeper is started and when it acts.
#[derive(Debug, Clone)]
pub struct KeeperOptions {
    /// A binary that calls [`super::main_if_asked`] first.
    pub exe: PathBuf,
    /// How long before the end of the lease children are asked to end.
    pub term_before: Duration,
    /// How long before the end of the lease they are made to.
    pub kill_before: Duration,
    /// How long they have between the two when the node is gone.
    pub gone_grace: Duration,
}

impl KeeperOptions {
    /// Margins that suit a lease: a third and a sixth of it, at most 10 s and 5 s.
    pub fn for_lease(lease: Duration) -> KeeperOptions {
        let options = KeeperOptions::default();
        KeeperOptions {
            term_before: options.term_before.min(lease / 3),
            kill_before: options.kill_before.min(lease / 6),
            ..options
        }
    }
}

impl Default for KeeperOptions {
    fn default() -> KeeperOptions {
        // On Linux this is the running binary, even if another one has been installed in its place.
        let own = PathBuf::from("/proc/self/exe");
        KeeperOptions {
            exe: if own.exists() { own } else { std::env::current_exe().unwrap_or_default() },
            term_before: Duration::from_secs(10),
            kill_before: Duration::from_secs(5),
            gone_grace: Duration::from_secs(2),
        }
    }
}

/// A keeper that watches over this node's children. Cheap to clone; when the last clone is dropped the keeper ends what is
/// still registered, and itself.
#[derive(Debug, Clone)]
pub struct KeeperHandle {
    inner: Arc<Inner>,
    _open: Arc<Open>,
}

#[derive(Debug)]
struct Inner {
    options: KeeperOptions,
    state: Mutex<State>,
    changed: Notify,
}

/// What the keeper must know, and what it has not been told yet.
#[derive(Debug, Default)]
struct State {
    live: HashMap<String, (u64, ChildRecord)>,
    lease_until_ms: Option<u64>,
    /// Bounded by what lives: one lease, and at most two messages per child.
    unsaid: VecDeque<ToKeeper>,
    waiting: HashMap<u64, oneshot::Sender<bool>>,
    /// Of those that live, whom a keeper has ended.
    ended: HashSet<String>,
    doubt_until_ms: u64,
    last_number: u64,
    pid: Option<u32>,
    starts: u64,
    replace: bool,
    closed: bool,
}

/// Says when the last handle is gone.
#[derive(Debug)]
struct Open(Arc<Inner>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.state.lock().closed = true;
        self.0.changed.notify_one();
    }
}

impl KeeperHandle {
    /// Starts a keeper and waits until it answers. Needs a tokio runtime, which must outlive the handle's use.
    pub async fn spawn(options: KeeperOptions) -> Result<KeeperHandle, Error> {
        let inner = Arc::new(Inner { options, state: Mutex::default(), changed: Notify::new() });
        let first = inner.start().await?;
        tokio::spawn(inner.clone().keep_keeper(first));
        Ok(KeeperHandle { _open: Arc::new(Open(inner.clone())), inner })
    }

    /// Tells the keeper that the lease is good for `lease` from `asked_at` on, the instant before its renewal was sent.
    /// Until the first time there is no lease, and children are ended only if the node goes.
    pub fn renew(&self, asked_at: Instant, lease: Duration) {
        let left = lease.saturating_sub(asked_at.elapsed());
        let until_ms = now_ms().saturating_add(u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
        let mut state = self.inner.state.lock();
        self.inner.doubts(&mut state);
        state.lease_until_ms = Some(until_ms);
        state.unsaid.retain(|message| !matches!(message, ToKeeper::Lease { .. }));
        state.unsaid.push_back(ToKeeper::Lease { until_ms });
        drop(state);
        self.inner.changed.notify_one();
    }

    /// The keeper's process, while there is one.
    pub fn pid(&self) -> Option<u32> {
        self.inner.state.lock().pid
    }

    /// How many keepers have been started so far: more than one if they die.
    pub fn starts(&self) -> u64 {
        self.inner.state.lock().starts
    }

    /// A command that becomes another program once it is told to.
    pub(crate) fn trampoline(&self) -> Command {
        let mut command = Command::new(&self.inner.options.exe);
        command.arg0("belfry").args([HIDDEN, EXECUTE]);
        command
    }

    /// Returns when the keeper knows the child. After an error the child must not be told to go.
    pub(crate) async fn register(&self, record: ChildRecord) -> Result<(), Error> {
        let child_id = record.child_id.clone();
        let answer = self.inner.add(record);
        let mut known = timeout(ANSWER, answer).await;
        if known.is_err() {
            self.inner.replace();
            // A new one is told of every child that lives, and answers for each.
            known = timeout(ANSWER, self.inner.wait_for(&child_id)).await;
        }
        match known {
            Ok(Ok(true)) => Ok(()),
            Ok(Ok(false)) => Err(Error::Refused),
            _ => Err(Error::Keeper("does not answer".into())),
        }
    }

    /// Whether the keeper has ended a child that is still registered, because the lease was about to end.
    pub(crate) async fn has_ended(&self, child_id: &str) -> bool {
        let answer = {
            let mut state = self.inner.state.lock();
            self.inner.doubts(&mut state).then(|| {
                let (number, answer) = state.next_answer();
                state.unsaid.push_back(ToKeeper::Ping { number });
                answer
            })
        };
        if let Some(answer) = answer {
            self.inner.changed.notify_one();
            let _ = timeout(ANSWER, answer).await;
        }
        self.inner.state.lock().ended.contains(child_id)
    }

    /// None of the child's processes lives.
    pub(crate) fn remove(&self, child_id: &str) {
        let mut state = self.inner.state.lock();
        if let Some((number, _)) = state.live.remove(child_id) {
            state.waiting.remove(&number);
            state.ended.remove(child_id);
            state.unsaid.push_back(ToKeeper::Remove { child_id: child_id.to_owned() });
        }
        drop(state);
        self.inner.changed.notify_one();
    }
}

impl State {
    fn next_answer(&mut self) -> (u64, oneshot::Receiver<bool>) {
        let (sender, receiver) = oneshot::channel();
        self.last_number += 1;
        self.waiting.insert(self.last_number, sender);
        (self.last_number, receiver)
    }
}

struct Running {
    child: Child,
    stdin: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Inner {
    fn add(&self, record: ChildRecord) -> oneshot::Receiver<bool> {
        let mut state = self.state.lock();
        let (number, receiver) = state.next_answer();
        state.live.insert(record.child_id.clone(), (number, record.clone()));
        state.unsaid.push_back(ToKeeper::Add { number, record });
        drop(state);
        self.changed.notify_one();
        receiver
    }

    fn wait_for(&self, child_id: &str) -> oneshot::Receiver<bool> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.state.lock();
        if let Some(number) = state.live.get(child_id).map(|(number, _)| *number) {
            state.waiting.insert(number, sender);
        }
        receiver
    }

    /// Whether the keeper may have ended children whose end we do not know it has a hand in.
    fn doubts(&self, state: &mut State) -> bool {
        let now_ms = now_ms();
        let margin_ms = millis(self.options.term_before) + 1_000;
        if state.lease_until_ms.is_some_and(|until_ms| now_ms + margin_ms >= until_ms) {
            state.doubt_until_ms = now_ms + DOUBT_MS;
        }
        now_ms < state.doubt_until_ms
    }

    fn replace(&self) {
        self.state.lock().replace = true;
        self.changed.notify_one();
    }

    /// Starts a keeper and tells it all there is to know.
    async fn start(&self) -> Result<Running, Error> {
        let failed = |error: std::io::Error| {
            let exe = self.options.exe.display();
            Error::Keeper(format!("cannot be started as {exe}: {error}"))
        };
        let mut child = Command::new(&self.options.exe)
            .arg0("belfry")
            .args([HIDDEN, KEEP])
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Error::Keeper("has no pipes".into()));
        };
        let pid = child.id();
        let mut running = Running { child, stdin, answers: BufReader::new(stdout).lines() };
        let options = &self.options;
        let hello = ToKeeper::Hello(Margins {
            term_before_ms: millis(options.term_before),
            kill_before_ms: millis(options.kill_before),
            gone_grace_ms: millis(options.gone_grace),
        });
        let hello = async {
            running.say(&hello).await.ok()?;
            running.answers.next_line().await.ok()?
        };
        let answer = timeout(ANSWER, hello).await.ok().flatten();
        if answer.and_then(|line| serde_json::from_str(&line).ok()) != Some(FromKeeper::Ready) {
            let _ = running.child.kill().await;
            let exe = self.options.exe.display();
            return Err(Error::Keeper(format!(
                "does not answer: does {exe} call keeper::main_if_asked first?"
            )));
        }
        let mut state = self.state.lock();
        state.pid = pid;
        state.starts += 1;
        state.replace = false;
        let lease = state.lease_until_ms.map(|until_ms| ToKeeper::Lease { until_ms });
        let children = state
            .live
            .values()
            .map(|(number, record)| ToKeeper::Add { number: *number, record: record.clone() });
        state.unsaid = lease.into_iter().chain(children).collect();
        Ok(running)
    }

    /// Talks to a keeper for as long as it lives, and starts another if it dies before the last handle is gone.
    async fn keep_keeper(self: Arc<Inner>, first: Running) {
        let mut running = first;
        loop {
            let closed = self.talk(&mut running).await;
            if closed {
                // The end of its input tells it to end what is left, and itself.
                drop(running.stdin);
                let _ = running.child.wait().await;
                return;
            }
            // It must be dead before its input ends, or it would take that for our end.
            let _ = running.child.kill().await;
            self.state.lock().pid = None;
            let (mut pause, longest) = START_AGAIN;
            running = loop {
                match self.start().await {
                    Ok(running) => break running,
                    Err(_) if self.state.lock().closed => return,
                    Err(_) => sleep(pause).await,
                }
                pause = (pause * 2).min(longest);
            };
        }
    }

    /// Returns whether the last handle is gone; otherwise the keeper is of no more use.
    async fn talk(&self, running: &mut Running) -> bool {
        loop {
            let message = {
                let mut state = self.state.lock();
                if state.closed {
                    return true;
                }
                if state.replace {
                    return false;
                }
                state.unsaid.pop_front()
            };
            if let Some(message) = message {
                // A keeper that is frozen does not read; what it was not told, the next one will be.
                match timeout(ANSWER, running.say(&message)).await {
                    Ok(Ok(())) => continue,
                    _ => return false,
                }
            }
            tokio::select! {
                line = running.answers.next_line() => match line {
                    Ok(Some(line)) => self.hear(&line),
                    _ => return false,
                },
                () = self.changed.notified() => {}
            }
        }
    }

    fn hear(&self, line: &str) {
        let (number, known) = match serde_json::from_str(line) {
            Ok(FromKeeper::Added { number }) => (number, true),
            Ok(FromKeeper::Refused { number }) => (number, false),
            Ok(FromKeeper::Ending { child_id }) => {
                let mut state = self.state.lock();
                if state.live.contains_key(&child_id) {
                    state.ended.insert(child_id);
                }
                return;
            }
            _ => return,
        };
        if let Some(waiting) = self.state.lock().waiting.remove(&number) {
            let _ = waiting.send(known);
        }
    }
}

impl Running {
    async fn say(&mut self, message: &ToKeeper) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.stdin.write_all(&line).await
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
