//! A run that kills every node that starts it: it is given up, and takes no other run with it. And nodes that are killed
//! for another reason, again and again: no run is given up for that.
//!
//! Each node is a process of its own, this test program started again; the test starts another when one dies.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use belfry::{AgentBuilder, AnyStore, Engine, Options, RunId, RunRequest, When};
use belfry_core::rescue::SUSPECT_ERROR;
use belfry_core::{Reason, RunState};

use crate::support::pg;

/// The store that a node of this test works on.
const STORE: &str = "BELFRY_TEST_DEADLY_STORE";
/// Where the deadly run aborts the process: in its `handler`, a moment `later` there, or before, while the attempt is
/// prepared (`trigger`); or `nowhere`.
const PLACE: &str = "BELFRY_TEST_DEADLY_PLACE";
const DEADLY: &str = "abort";
const INNOCENT: usize = 50;

async fn open(url: &str, serve: bool) -> AnyStore {
    match url.starts_with("sqlite:") {
        true => AnyStore::open(url, serve).await.unwrap(),
        false => AnyStore::Postgres(belfry_store::postgres::Postgres::open(url).await.unwrap()),
    }
}

/// A node that works until it dies.
async fn work(url: &str) {
    let store = Arc::new(open(url, true).await);
    let place = std::env::var(PLACE).unwrap();
    let (dies_early, dies_later, dies_never) = (place == "trigger", place == "later", place == "nowhere");
    let engine = Engine::builder()
        .store(store)
        .options(Options {
            lease: if dies_later || dies_never { LONG_LEASE } else { LEASE },
            ..Options::default()
        })
        .on_trigger(move |attempt| {
            if dies_early && attempt.prompt.as_deref() == Some(DEADLY) {
                std::process::abort();
            }
        })
        .handler("a", move |run| async move {
            if run.prompt() == DEADLY && !dies_never {
                if dies_later {
                    tokio::time::sleep(Duration::from_millis(60)).await;
                }
                std::process::abort();
            }
            tokio::time::sleep(Duration::from_millis(if dies_later || dies_never { 100 } else { 20 })).await;
            Ok(())
        })
        .build();
    engine.start().await.unwrap();
    engine.stopped().await;
}

/// Short, so that a death is noticed soon.
const LEASE: Duration = Duration::from_secs(4);
/// On SQLite a death is noticed by the process; no renewal falls between the start of the deadly run and its abort.
const LONG_LEASE: Duration = Duration::from_secs(600);

struct Nodes {
    url: String,
    place: &'static str,
    /// The test of this program that becomes a node.
    test: &'static str,
    children: Vec<Child>,
    deaths: usize,
}

impl Nodes {
    fn new(url: &str, place: &'static str, test: &'static str) -> Nodes {
        Nodes { url: url.to_owned(), place, test, children: Vec::new(), deaths: 0 }
    }

    fn start(&mut self) {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("deaths::{}", self.test), "--nocapture"])
            .env(STORE, &self.url)
            .env(PLACE, self.place)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        self.children.push(child);
    }

    /// Starts another node for each that has died.
    fn replace_the_dead(&mut self) {
        let before = self.children.len();
        self.children.retain_mut(|child| child.try_wait().unwrap().is_none());
        for _ in self.children.len()..before {
            self.deaths += 1;
            self.start();
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Who makes runs and looks at them, the runs that harm nobody, and the deadly one.
async fn make_runs(url: &str) -> (Engine, Vec<RunId>, RunId) {
    let store = Arc::new(open(url, false).await);
    let asking = Engine::builder().store(store).build();
    let agent = AgentBuilder::new("a")
        .schedule("s", When::Cron("0 0 1 1 *".into()))
        .define(|agent| {
            agent.max_concurrent = None;
            agent.retry.max = 20;
        })
        .build();
    asking.set_agents(vec![agent]).await.unwrap();
    let mut innocent = Vec::new();
    let mut deadly = None;
    for n in 0..=INNOCENT {
        let prompt = (n == INNOCENT / 2).then(|| DEADLY.to_owned());
        let is_deadly = prompt.is_some();
        let run = asking.trigger("a/s", RunRequest { prompt, ..RunRequest::default() }).await.unwrap().run;
        if is_deadly { deadly = Some(run) } else { innocent.push(run) }
    }
    (asking, innocent, deadly.unwrap())
}

/// Makes the runs, lets nodes work until all have ended, and gives the number of nodes that died.
async fn deaths(url: &str, mut nodes: Nodes, at_once: usize) -> usize {
    let (asking, innocent, deadly) = make_runs(url).await;
    for _ in 0..at_once {
        nodes.start();
    }
    let live = async |run: RunId| asking.run(run).await.unwrap().unwrap().state.is_live();
    let all_ended = async {
        for run in innocent.iter().chain([&deadly]) {
            while live(*run).await {
                nodes.replace_the_dead();
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(120), all_ended).await.expect("all runs end");
    nodes.replace_the_dead();
    let ended = asking.run(deadly).await.unwrap().unwrap();
    assert_eq!((ended.state, ended.reason), (RunState::Failed, Some(Reason::Orphaned)));
    assert_eq!(ended.error.as_deref(), Some(SUSPECT_ERROR));
    for run in innocent {
        let ended = asking.run(run).await.unwrap().unwrap();
        assert_eq!(ended.state, RunState::Completed, "{ended:?}");
    }
    nodes.deaths
}

async fn on_sqlite(place: &'static str, test: &'static str) {
    if let Ok(url) = std::env::var(STORE) {
        return work(&url).await;
    }
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}/belfry.db", folder.path().display());
    let nodes = Nodes::new(&url, place, test);
    let died = deaths(&url, nodes, 1).await;
    assert!(died <= 3, "{died} nodes died");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_aborts_its_node_is_given_up_on_sqlite() {
    on_sqlite("handler", "a_handler_that_aborts_its_node_is_given_up_on_sqlite").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_aborts_its_node_before_it_starts_is_given_up_on_sqlite() {
    on_sqlite("trigger", "a_run_that_aborts_its_node_before_it_starts_is_given_up_on_sqlite").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_aborts_its_node_a_moment_later_is_given_up_on_sqlite() {
    on_sqlite("later", "a_handler_that_aborts_its_node_a_moment_later_is_given_up_on_sqlite").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_aborts_its_node_is_given_up_on_four_nodes() {
    if let Ok(url) = std::env::var(STORE) {
        return work(&url).await;
    }
    let Some(url) = pg::fresh_database() else { return };
    let nodes = Nodes::new(&url, "handler", "a_handler_that_aborts_its_node_is_given_up_on_four_nodes");
    let died = deaths(&url, nodes, 4).await;
    assert!(died <= 3, "{died} nodes died");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_of_nodes_that_are_killed_again_and_again_are_not_given_up() {
    if let Ok(url) = std::env::var(STORE) {
        return work(&url).await;
    }
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}/belfry.db", folder.path().display());
    let test = "runs_of_nodes_that_are_killed_again_and_again_are_not_given_up";
    let mut nodes = Nodes::new(&url, "nowhere", test);
    let (asking, innocent, harmless) = make_runs(&url).await;
    let mut runs: Vec<RunId> = innocent.into_iter().chain([harmless]).collect();
    let state = async |run: RunId| asking.run(run).await.unwrap().unwrap().state;
    let until = async |run: RunId, is_wanted: &dyn Fn(RunState) -> bool| {
        let wanted = async {
            while !is_wanted(state(run).await) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), wanted).await.expect("runs start and end");
    };
    // Each node is killed as soon as it runs something: what the one before left behind, or what is new.
    let mut dead = Vec::new();
    for _ in 0..5 {
        runs.push(asking.trigger("a/s", RunRequest::default()).await.unwrap().run);
        nodes.start();
        let started = async {
            loop {
                for run in &runs {
                    let run = asking.run(*run).await.unwrap().unwrap();
                    // What a dead node ran counts as running until the next node has fenced it.
                    if run.state == RunState::Running && !dead.contains(&run.node) {
                        return run.node;
                    }
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        dead.push(tokio::time::timeout(Duration::from_secs(60), started).await.expect("a run starts"));
        let mut child = nodes.children.pop().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }
    nodes.start();
    for run in runs {
        until(run, &|state| !state.is_live()).await;
        assert_eq!(state(run).await, RunState::Completed);
    }
}
