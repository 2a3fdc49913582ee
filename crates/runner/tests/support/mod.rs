//! A test binary that can also be a keeper and a trampoline, and what its tests need.
#![allow(dead_code)]

use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use belfry_core::definition::{AgentDefinition, Options, ScheduleDefinition, When};
use belfry_core::input::StoredPayload;
use belfry_core::model::{NodeId, RunId, Trigger};
use belfry_core::work::{Action, Work};
use belfry_runner::{
    Attempt, CancelSender, Chunk, KeeperHandle, KeeperOptions, Report, Runner, RunnerOptions, Stop, Stream,
    cancellation, close_inherited_descriptors, keeper,
};
use tokio::sync::mpsc;
use uuid::Uuid;

/// How long anything in these tests may take; far more than it does.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// A test by name.
pub type Test = (&'static str, fn());

/// Lists async tests that take a [`Rig`]; each runs without and with a keeper.
#[macro_export]
macro_rules! both_ways {
    ($($name:ident),* $(,)?) => {
        vec![$(
            (concat!("directly::", stringify!($name)), (|| support::run(false, $name)) as fn()),
            (concat!("kept::", stringify!($name)), (|| support::run(true, $name)) as fn()),
        )*]
    };
}

/// Lists async tests that take nothing.
#[macro_export]
macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        vec![$((stringify!($name), (|| support::block_on($name())) as fn())),*]
    };
}

/// Is keeper or trampoline if asked to; otherwise runs the tests whose names contain an argument, as libtest would.
pub fn main(tests: Vec<Test>) -> ExitCode {
    if let Some(code) = keeper::main_if_asked() {
        return code;
    }
    close_inherited_descriptors();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let filters: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    if arguments.iter().any(|argument| argument == "--list") {
        tests.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let chosen: Vec<Test> = tests
        .into_iter()
        .filter(|(name, _)| filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str())))
        .collect();
    let next = AtomicUsize::new(0);
    let failed = AtomicUsize::new(0);
    // They mostly wait for processes.
    let threads = std::env::var("RUST_TEST_THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or(6);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((name, test)) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let started_at = Instant::now();
                    let passed = std::panic::catch_unwind(AssertUnwindSafe(test)).is_ok();
                    failed.fetch_add(usize::from(!passed), Ordering::Relaxed);
                    let word = if passed { "ok" } else { "FAILED" };
                    println!("test {name} ... {word} ({} ms)", started_at.elapsed().as_millis());
                }
            });
        }
    });
    let failed = failed.load(Ordering::Relaxed);
    println!("\n{} tests, {failed} failed", chosen.len());
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

pub fn block_on<F: Future<Output = ()>>(test: F) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        tokio::time::timeout(DEADLINE, test).await.expect("the test did not end");
    });
}

pub fn run<F, T>(kept: bool, test: T)
where
    F: Future<Output = ()>,
    T: FnOnce(Rig) -> F,
{
    block_on(async { test(Rig::new(kept).await).await });
}

/// A runner with a directory of its own.
pub struct Rig {
    pub runner: Runner,
    pub keeper: Option<KeeperHandle>,
    pub dir: tempfile::TempDir,
    pub node: NodeId,
}

impl Rig {
    pub async fn new(kept: bool) -> Rig {
        let keeper = match kept {
            true => Some(KeeperHandle::spawn(KeeperOptions::default()).await.unwrap()),
            false => None,
        };
        Rig::with_keeper(keeper)
    }

    pub fn with_keeper(keeper: Option<KeeperHandle>) -> Rig {
        let dir = tempfile::tempdir().unwrap();
        let options = RunnerOptions {
            keeper: keeper.clone(),
            state_dir: dir.path().join("state"),
            ..RunnerOptions::default()
        };
        let environment = [
            ("PATH", std::env::var("PATH").unwrap_or_default()),
            ("HOME", "/".to_owned()),
            ("LC_ALL", "C".to_owned()),
            ("BELFRY_STORE", "postgres://user:pass@host/db".to_owned()),
            ("NODE_SECRET", "never seen".to_owned()),
            ("API_TOKEN", "hunter2-secret".to_owned()),
        ];
        let runner = Runner::with_environment(options, environment);
        Rig { runner, keeper, dir, node: NodeId(Uuid::now_v7()) }
    }

    /// A path for the child to leave something at.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn attempt(&self, work: Work) -> Attempt {
        Attempt {
            run: RunId(Uuid::now_v7()),
            epoch: 3,
            attempt: 2,
            node: self.node,
            agent: "reporter".into(),
            schedule: "morning".into(),
            command: "poll".into(),
            tick_at: Some("2026-05-04T09:00:00Z".parse().unwrap()),
            session: None,
            last_success_at: None,
            prompt: Some("Go.".into()),
            payload: payload(serde_json::Value::Null),
            trace_id: Uuid::from_u128(0x1234),
            agent_definition: Arc::new(AgentDefinition { work, ..AgentDefinition::default() }),
            schedule_definition: Arc::new(every_hour()),
        }
    }

    pub fn start(&self, work: Work) -> Live {
        self.start_attempt(self.attempt(work))
    }

    pub fn start_attempt(&self, attempt: Attempt) -> Live {
        let (cancel, receiver) = cancellation();
        let (sender, output) = mpsc::channel(4);
        let runner = self.runner.clone();
        let task = tokio::spawn(async move { runner.run(attempt, receiver, sender).await });
        Live { cancel, output, task, stdout: Vec::new(), stderr: Vec::new(), chunks: 0 }
    }

    pub async fn run(&self, work: Work) -> Done {
        self.start(work).done().await
    }

    pub async fn run_attempt(&self, attempt: Attempt) -> Done {
        self.start_attempt(attempt).done().await
    }
}

/// An attempt that runs.
pub struct Live {
    pub cancel: CancelSender,
    pub output: mpsc::Receiver<Chunk>,
    pub task: tokio::task::JoinHandle<Report>,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub chunks: usize,
}

/// An attempt that has ended.
#[derive(Debug)]
pub struct Done {
    pub report: Report,
    pub stdout: String,
    pub stderr: String,
    pub bytes: Vec<u8>,
    pub chunks: usize,
}

impl Live {
    fn take(&mut self, chunk: Chunk) {
        assert!(chunk.bytes.len() <= 64 << 10);
        self.chunks += 1;
        match chunk.stream {
            Stream::Stdout => self.stdout.extend(chunk.bytes),
            Stream::Stderr => self.stderr.extend(chunk.bytes),
        }
    }

    /// Waits until the output contains this.
    pub async fn says(&mut self, text: &str) {
        while !String::from_utf8_lossy(&self.stdout).contains(text) {
            let chunk = self.output.recv().await;
            let chunk = chunk.unwrap_or_else(|| panic!("ended without saying {text:?}: {:?}", self.stdout));
            self.take(chunk);
        }
    }

    pub fn stop(&self, stop: Stop) {
        self.cancel.send(Some(stop)).unwrap();
    }

    pub async fn done(mut self) -> Done {
        while let Some(chunk) = self.output.recv().await {
            self.take(chunk);
        }
        Done {
            report: self.task.await.unwrap(),
            stdout: String::from_utf8_lossy(&self.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&self.stderr).into_owned(),
            bytes: self.stdout,
            chunks: self.chunks,
        }
    }
}

/// What `sh -c` runs, with a short grace.
pub fn shell(line: &str) -> Work {
    Work { action: Action::Shell(line.to_owned()), grace_ms: 300, ..Work::default() }
}

pub fn argv(argv: &[&str]) -> Work {
    let argv = argv.iter().map(|argument| argument.to_string()).collect();
    Work { action: Action::Run(argv), grace_ms: 300, ..Work::default() }
}

/// Waits until a file has a whole line in it, and gives that.
pub async fn line_in(path: &std::path::Path) -> String {
    let until = Instant::now() + DEADLINE;
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if let Some((line, _)) = text.split_once('\n') {
            return line.to_owned();
        }
        assert!(Instant::now() < until, "{} was never written", path.display());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until a file names a process, and gives that.
pub async fn pid_in(path: &std::path::Path) -> i32 {
    line_in(path).await.trim().parse().unwrap()
}

/// Whether a process runs; a zombie does not.
pub fn lives(pid: i32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    !stat.rsplit_once(')').is_some_and(|(_, rest)| matches!(rest.trim_start().as_bytes()[0], b'Z' | b'X'))
}

/// Waits until a process is gone.
pub async fn is_gone(pid: i32, within: Duration) {
    let until = Instant::now() + within;
    while lives(pid) {
        assert!(Instant::now() < until, "process {pid} still lives after {within:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub fn signal(pid: i32, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
}

/// A payload as it comes with a run.
pub fn payload(value: serde_json::Value) -> StoredPayload {
    StoredPayload::new(Trigger::Manual, value.to_string())
}

/// Gives an attempt the template of its schedule instead of a prompt that came with its run.
pub fn set_template(attempt: &mut Attempt, template: &str) {
    let mut definition = every_hour();
    definition.options.prompt = Some(template.into());
    (attempt.prompt, attempt.schedule_definition) = (None, Arc::new(definition));
}

fn every_hour() -> ScheduleDefinition {
    ScheduleDefinition { when: When::Every("1h".into()), options: Options::default() }
}
