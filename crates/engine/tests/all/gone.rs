//! A node whose process is gone: its runs are rescued at once, after what it left on this system has ended.
//!
//! The node is a process of its own, this test program started again. It has no keeper, as if that was killed with it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use belfry::{AgentBuilder, AnyStore, Engine, Options, RunRequest, StopOptions, When};
use belfry_core::work::{Action, Work};

use crate::support::pg;

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
    asking.run_now("a/s", RunRequest::default()).await.unwrap();
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
