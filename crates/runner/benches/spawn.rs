//! What it costs to run `true`: by hand, through the runner, and through the runner with a keeper. And what it costs to look
//! for processes. Timings are printed, not judged.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use belfry_core::definition::{AgentDefinition, Options, ScheduleDefinition, When};
use belfry_core::input::StoredPayload;
use belfry_core::model::{NodeId, RunId, Trigger};
use belfry_core::work::{Action, Work};
use belfry_runner::{Attempt, KeeperHandle, KeeperOptions, Runner, RunnerOptions, cancellation, keeper};
use tokio::sync::mpsc;
use uuid::Uuid;

fn main() -> ExitCode {
    if let Some(code) = keeper::main_if_asked() {
        return code;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(measure());
    ExitCode::SUCCESS
}

async fn measure() {
    let dir = tempfile::tempdir().unwrap();
    let options =
        |keeper| RunnerOptions { keeper, state_dir: dir.path().to_owned(), ..RunnerOptions::default() };
    let plain = Runner::new(options(None));
    let kept = Runner::new(options(Some(KeeperHandle::spawn(KeeperOptions::default()).await.unwrap())));
    for _ in 0..3 {
        let by_hand = each(200, async || {
            tokio::process::Command::new("/bin/true").process_group(0).status().await.unwrap();
        });
        show("by hand", by_hand.await);
        show("runner", each(200, async || run(&plain).await).await);
        show("runner with keeper", each(200, async || run(&kept).await).await);
    }
}

async fn each(times: usize, f: impl AsyncFn()) -> Vec<Duration> {
    let mut all = Vec::with_capacity(times);
    for _ in 0..times {
        let started_at = Instant::now();
        f().await;
        all.push(started_at.elapsed());
    }
    all.sort();
    all
}

fn show(what: &str, all: Vec<Duration>) {
    println!("{what:20} median {:?}, 95 % {:?}", all[all.len() / 2], all[all.len() * 95 / 100]);
}

async fn run(runner: &Runner) {
    let work = Work { action: Action::Run(vec!["/bin/true".into()]), ..Work::default() };
    let schedule = ScheduleDefinition { when: When::Every("1h".into()), options: Options::default() };
    let attempt = Attempt {
        run: RunId(Uuid::now_v7()),
        epoch: 1,
        attempt: 1,
        node: NodeId(Uuid::nil()),
        agent: "a".into(),
        schedule: "s".into(),
        command: "poll".into(),
        tick_at: None,
        session: None,
        last_success_at: None,
        prompt: Some("Go.".into()),
        payload: StoredPayload::new(Trigger::Manual, "{}"),
        trace_id: Uuid::nil(),
        agent_definition: Arc::new(AgentDefinition { work, ..AgentDefinition::default() }),
        schedule_definition: Arc::new(schedule),
    };
    let (_cancel, receiver) = cancellation();
    let (sender, _output) = mpsc::channel(1);
    let report = runner.run(attempt, receiver, sender).await;
    assert_eq!(report.exit_code, Some(0), "{report:?}");
}
