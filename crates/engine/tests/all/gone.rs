//! A node whose process is gone: its runs are rescued at once, after what it left on this system has ended.
//!
//! The node is a process of its own, this test program started again. It has no keeper, as if that was killed with it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use belfry::testing::{Ask, Driver, Effect, Input, Now, Sight};
use belfry::{AgentBuilder, AnyStore, Engine, Options, RunRequest, StopOptions, When};
use belfry_core::work::{Action, Work};
use belfry_store::Node;

use crate::support::{pg, start};

/// The store that a node of this test works on.
const STORE: &str = "BELFRY_TEST_GONE_STORE";
const FOLDER: &str = "BELFRY_TEST_GONE_FOLDER";
/// Far longer than the test: nothing here is found by the end of a lease.
const LEASE: Duration = Duration::from_secs(3_600);
const DEADLINE: Duration = Duration::from_secs(60);

async fn open(url: &str, serve: bool) -> Arc<AnyStore> {
    Arc::new(match url.starts_with("sqlite:") {
        true => AnyStore::open(url, serve).await.unwrap(),
        false => AnyStore::Postgres(belfry_store::postgres::Postgres::open(url).await.unwrap()),
    })
}

async fn node(url: &str, state_dir: &Path) -> Engine {
    let options = Options { lease: LEASE, ..Options::default() };
    let engine = Engine::builder().store(open(url, true).await).options(options).state_dir(state_dir).build();
    engine.start().await.unwrap();
    engine
}

/// The pids of the run's attempts so far, once there are so many.
async fn attempts(folder: &Path, wanted: usize) -> Vec<i32> {
    let found = async {
        loop {
            let text = std::fs::read_to_string(folder.join("pids")).unwrap_or_default();
            let pids: Vec<i32> = text.lines().filter_map(|line| line.parse().ok()).collect();
            if pids.len() >= wanted {
                return pids;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(DEADLINE, found).await.expect("the attempt starts")
}

/// Waits until a node has written down which child it has started. Without a program between, the child runs before that.
async fn recorded(state_dir: &Path) {
    let folders = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
    };
    let is_record = |attempt: PathBuf| {
        let text = std::fs::read(attempt.join("child.json")).unwrap_or_default();
        serde_json::from_slice::<serde_json::Value>(&text).is_ok()
    };
    let found = async {
        loop {
            let nodes = folders(&state_dir.join("attempts"));
            if nodes.iter().flat_map(|node| folders(node)).any(is_record) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(DEADLINE, found).await.expect("the child is written down");
}

/// The letter for the state of a process, by the system.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

async fn rescues_at_once(url: &str, test: &str) {
    let folder = tempfile::tempdir().unwrap();
    let asking = Engine::builder().store(open(url, false).await).build();
    let line = format!("echo $$ >> {}/pids; exec sleep 1000", folder.path().display());
    let agent = AgentBuilder::new("a")
        .schedule("s", When::Cron("0 0 1 1 *".into()))
        .define(|agent| agent.work = Work { action: Action::Shell(line), ..Work::default() })
        .build();
    asking.set_agents(vec![agent]).await.unwrap();
    asking.trigger("a/s", RunRequest::default()).await.unwrap();
    let mut first = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("gone::{test}"), "--nocapture"])
        .env(STORE, url)
        .env(FOLDER, folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let child = attempts(folder.path(), 1).await[0] as u32;
    recorded(&folder.path().join("one")).await;
    // It stays a zombie: its parent does not wait for it.
    first.kill().unwrap();
    while state(first.id()) != Some('Z') {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(state(child).is_some_and(|state| state != 'Z'), "the child has outlived its node");
    let second = node(url, &folder.path().join("another")).await;
    attempts(folder.path(), 2).await;
    assert!(state(child).is_none_or(|state| state == 'Z'), "the first attempt lives beside the second");
    let _ = second.stop(StopOptions { wait: false, timeout: Duration::ZERO }).await;
    first.wait().unwrap();
}

async fn is_node() -> bool {
    let (Ok(url), Ok(folder)) = (std::env::var(STORE), std::env::var(FOLDER)) else { return false };
    let engine = node(&url, &Path::new(&folder).join("one")).await;
    engine.stopped().await;
    true
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_process_is_rescued_at_once_on_sqlite() {
    if is_node().await {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}/belfry.db", folder.path().display());
    rescues_at_once(&url, "a_dead_process_is_rescued_at_once_on_sqlite").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_process_is_rescued_at_once_on_postgres() {
    if is_node().await {
        return;
    }
    let Some(url) = pg::fresh_database() else { return };
    rescues_at_once(&url, "a_dead_process_is_rescued_at_once_on_postgres").await;
}

/// Node 7 with a lease that has ended, and its process as node 1 sees it.
fn gone(process: belfry_runner::ProcessState, serves_file: bool) -> (Node, Sight) {
    let of = |start_time| belfry_store::NodeProcess {
        boot_id: "boot".into(),
        pid_ns: "ns".into(),
        start_time,
        state_dir: "/state".into(),
        version: String::new(),
        lease_ms: 30_000,
    };
    let node = Node {
        id: belfry_core::NodeId(uuid::Uuid::from_u128(7)),
        host: "host".into(),
        pid: 1,
        labels: Vec::new(),
        started_at: start(),
        lease_until: start(),
        fenced: false,
        draining: false,
        last_seen_at: start(),
        max_concurrent: None,
        process: of(100),
    };
    (node, Sight { here: Arc::new(of(200)), is_same_host: true, process, serves_file })
}

fn count_fences(effects: &[Effect]) -> usize {
    effects.iter().filter(|effect| matches!(effect, Effect::Fence { .. })).count()
}

#[test]
fn a_node_that_holds_the_lock_of_its_file_keeps_its_runs_however_old_its_lease_is() {
    let at = |seconds| Now {
        wall: start() + belfry::SignedDuration::from_secs(seconds),
        mono: Duration::from_secs(60 + seconds.unsigned_abs()),
    };
    let (lease, new_id) = (at(3600).wall, Box::new(|_| uuid::Uuid::from_u128(9)));
    let node = belfry_core::NodeId(uuid::Uuid::from_u128(1));
    let mut driver = Driver::new(Options::default(), node, at(0), lease, new_id);
    let mut fences_at = |seconds, serves_file| {
        let seen = gone(belfry_runner::ProcessState::Unknown, serves_file);
        count_fences(&driver.step(at(seconds), Input::Nodes(Ok(vec![seen]))))
    };
    // It cannot write to the store, because the disk is full.
    assert_eq!([0, 31, 600].map(|seconds| fences_at(seconds, true)), [0, 0, 0]);
    assert_eq!(fences_at(601, false), 1, "it has let go of the lock");
}

#[test]
fn nothing_is_claimed_before_nodes_that_are_gone_at_the_start_are_fenced() {
    let id = |n| belfry_core::NodeId(uuid::Uuid::from_u128(n));
    let wall = start();
    let now = Now { wall, mono: Duration::from_secs(60) };
    let new_id = Box::new(|_| uuid::Uuid::from_u128(9));
    let mut driver =
        Driver::new(Options::default(), id(1), now, wall + belfry::SignedDuration::from_secs(30), new_id);
    let claims = |effects: &[Effect]| {
        effects.iter().filter(|effect| matches!(effect, Effect::Ask(Ask::Claim(_)))).count()
    };
    let effects = driver.step(now, Input::Woken);
    assert_eq!(claims(&effects), 0, "nobody has looked at other nodes");
    assert!(driver.wait(now) > Duration::ZERO, "it waits for an answer");
    // The store does not answer at first.
    let away = belfry_store::Error::Full { place: "the disk".into() };
    assert_eq!(claims(&driver.step(now, Input::Nodes(Err(away)))), 0);
    let now = Now { mono: now.mono + Duration::from_secs(3), ..now };
    let effects = driver.step(now, Input::Woken);
    assert!(effects.iter().any(|effect| matches!(effect, Effect::ReadNodes)), "{effects:?}");
    let renewed = belfry_store::Renewed::Held { cancels: Vec::new(), live: Some(Vec::new()) };
    driver.step(now, Input::Renewed { asked: now.mono, renewed: Ok(renewed), is_held: false });
    let gone = gone(belfry_runner::ProcessState::Gone, false);
    let effects = driver.step(now, Input::Nodes(Ok(vec![gone])));
    assert_eq!((count_fences(&effects), claims(&effects)), (1, 0));
    driver.step(now, Input::Hint);
    let fenced = Input::Fenced { node: id(7), rescued: Ok(None), runs: Vec::new() };
    assert_eq!(claims(&driver.step(now, fenced)), 1);
}
