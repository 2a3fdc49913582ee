//! The engine with Rust handlers and a clock that is moved by hand.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use belfry::{
    AgentBuilder, Engine, ManualClock, Options, RunRequest, ScheduleOptions, Status, StopOptions, Timestamp,
    When,
};
use belfry_core::definition::{CatchUp, IfRunning};
use parking_lot::Mutex;

type Log = Arc<Mutex<Vec<(String, Option<Timestamp>)>>>;

fn start() -> Timestamp {
    "2026-03-02T12:00:00Z".parse().unwrap()
}

/// Waiting is not what is tried here: a node that is never renewed late, whatever the clock does.
fn options() -> Options {
    Options { lease: Duration::from_secs(86_400 * 365), ..Options::default() }
}

fn engine(clock: &ManualClock, agents: Vec<belfry::AgentSpec>) -> (Engine, Log) {
    let log = Log::default();
    let mut builder = Engine::builder().clock(clock.clone()).options(options());
    for agent in &agents {
        let log = log.clone();
        builder = builder.handler(agent.name.clone(), move |run| {
            let log = log.clone();
            async move {
                log.lock().push((format!("{}/{}", run.agent(), run.schedule()), run.tick_at()));
                Ok(())
            }
        });
    }
    (builder.agents(agents).build(), log)
}

#[tokio::test]
async fn an_interval_fires_at_once_and_then_after_each_end() {
    let clock = ManualClock::new(start());
    let agent = AgentBuilder::new("a").schedule("s", When::Every("5m".into())).build();
    let (engine, log) = engine(&clock, vec![agent]);
    engine.start().await.unwrap();
    assert_eq!(engine.status(), Status::Running);
    engine.quiet().await;
    assert_eq!(log.lock().len(), 1);
    for expected in 2..=4 {
        clock.advance(Duration::from_secs(299));
        engine.quiet().await;
        assert_eq!(log.lock().len(), expected - 1);
        clock.advance(Duration::from_secs(1));
        engine.quiet().await;
        assert_eq!(log.lock().len(), expected);
    }
    assert_eq!(engine.state().triggers, 4);
    engine.stop(StopOptions::default()).await.unwrap();
    assert_eq!(engine.status(), Status::Stopped);
}

#[tokio::test]
async fn three_days_of_downtime_follow_the_catch_up_policy() {
    let schedules = [("skip", CatchUp::Skip), ("once", CatchUp::RunOnce), ("all", CatchUp::RunAll)];
    let mut agent = AgentBuilder::new("a");
    for (name, catch_up) in schedules {
        let options = ScheduleOptions {
            catch_up: Some(catch_up),
            if_running: IfRunning::Allow,
            ..ScheduleOptions::default()
        };
        agent = agent.schedule_with(name, When::Cron("*/5 * * * *".into()), options);
    }
    let clock = ManualClock::new(start());
    let (engine, log) = engine(&clock, vec![agent.build()]);
    engine.start().await.unwrap();
    engine.quiet().await;
    clock.advance(Duration::from_secs(3 * 86_400 + 30));
    // Catch-up runs are spread over half a minute.
    engine.quiet().await;
    for _ in 0..31 {
        clock.advance(Duration::from_secs(1));
        engine.quiet().await;
    }
    let of = |name: &str| {
        log.lock()
            .iter()
            .filter(|(each, _)| each == &format!("a/{name}"))
            .map(|(_, tick)| tick.unwrap())
            .collect::<Vec<_>>()
    };
    let newest: Timestamp = "2026-03-05T12:00:00Z".parse().unwrap();
    // The newest tick is half a minute old: that is not late.
    assert_eq!(of("skip"), [newest]);
    let once = of("once");
    assert_eq!(once.len(), 2, "{once:?}");
    let all = of("all");
    assert_eq!(all.len(), 101);
    assert!(all.contains(&newest));
    engine.stop(StopOptions::default()).await.unwrap();
}

#[tokio::test]
async fn a_manual_run_moves_no_schedule() {
    let clock = ManualClock::new(start());
    let agent = AgentBuilder::new("a").schedule("s", When::Cron("0 0 * * *".into())).build();
    let (engine, log) = engine(&clock, vec![agent]);
    engine.start().await.unwrap();
    engine.quiet().await;
    let before = engine.schedule_state("a/s").await.unwrap().token;
    let run = engine.run_now("a/s", RunRequest::default()).await.unwrap();
    engine.quiet().await;
    assert_eq!(log.lock().len(), 1);
    assert_eq!(engine.run(run).await.unwrap().unwrap().state, belfry::RunState::Completed);
    assert_eq!(engine.schedule_state("a/s").await.unwrap().token, before);
    engine.stop(StopOptions::default()).await.unwrap();
}

#[tokio::test]
async fn a_guest_runs_its_run_and_nothing_else() {
    let clock = ManualClock::new(start());
    let agent = AgentBuilder::new("a").schedule("s", When::Every("5m".into())).build();
    let store = Arc::new(belfry::AnyStore::Memory(belfry_store::memory::Memory::new()));
    let builder = || Engine::builder().store(store.clone()).clock(clock.clone());
    let asking = builder().build();
    asking.set_agents(vec![agent]).await.unwrap();
    let other = asking.run_now("a/s", RunRequest::default()).await.unwrap();
    let wanted = asking.run_now("a/s", RunRequest::default()).await.unwrap();
    let log = Log::default();
    let kept = log.clone();
    let guest = builder()
        .options(Options { only: Some(wanted), ..options() })
        .handler("a", move |run| {
            let log = kept.clone();
            async move {
                log.lock().push((run.run().to_string(), run.tick_at()));
                Ok(())
            }
        })
        .build();
    guest.start().await.unwrap();
    let mut looked = 0;
    while guest.run(wanted).await.unwrap().unwrap().state.is_live() {
        guest.hint().await;
        looked += 1;
        assert!(looked < 1_000_000, "it does not run");
    }
    guest.stop(StopOptions::default()).await.unwrap();
    assert_eq!(*log.lock(), [(wanted.to_string(), None)]);
    assert!(guest.run(other).await.unwrap().unwrap().state.is_live(), "it is for others");
    assert!(guest.schedule_state("a/s").await.unwrap().last_fired_at.is_none(), "and so are the ticks");
}
