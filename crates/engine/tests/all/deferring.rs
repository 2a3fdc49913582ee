//! A lane that holds one and lets two wait, on every store: the ticks of the others wait for it.

use std::time::Duration;

use crate::support::{Does, World, at, on_each, stop};
use belfry::{AgentBuilder, Decision, Engine, Options, RunState, ScheduleOptions, When};
use belfry_core::definition::AnchorName;
use belfry_core::{SkipReason, TokenKind};
use belfry_store::{LaneSettings, Store};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const NAMES: [&str; 6] = ["a/s0", "a/s1", "a/s2", "a/s3", "a/s4", "a/s5"];

/// Six schedules, each ten minutes, a second apart.
async fn engine_of(world: &World) -> Engine {
    let settings = LaneSettings { slots: 1, limit: None, queue_limit: Some(2) };
    world.store.set_lane(world.clock.now().wall, "narrow", Some(settings)).await.unwrap();
    let mut agent = AgentBuilder::new("a").define(|agent| {
        agent.lane = "narrow".into();
        agent.max_concurrent = None;
    });
    for n in 0..6 {
        let options = ScheduleOptions {
            anchor: AnchorName::Slot,
            phase: Some(format!("{n}s")),
            ..ScheduleOptions::default()
        };
        agent = agent.schedule_with(format!("s{n}"), When::Every("10m".into()), options);
    }
    let mut options = Options::default();
    options.lanes.insert("narrow".into(), 1);
    world.engine_with(&[agent.build()], options).await
}

async fn waiting(world: &World) -> usize {
    world.store.live_runs().await.unwrap().iter().filter(|run| run.state == RunState::Pending).count()
}

/// Waits for something that is told to happen without any time that passes.
async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !holds().await {
            tokio::task::yield_now().await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(20), wait).await.is_ok(), "{what}");
}

#[tokio::test]
async fn a_full_lane_defers_ticks_and_nobody_starves() {
    on_each(async |world: World| {
        world.clock.advance(30 * SECOND);
        NAMES.iter().for_each(|name| world.tell(name, Does::Wait));
        let engine = engine_of(&world).await;
        world.clock.advance(9 * MINUTE + 29 * SECOND);
        for _ in 0..7 {
            world.pass(&engine, SECOND, SECOND).await;
            assert!(waiting(&world).await <= 2);
        }
        let record = async |name: &str| world.store.schedule(name).await.unwrap().unwrap();
        for (n, name) in NAMES.iter().enumerate() {
            assert_eq!(record(name).await.deferred.is_some(), n > 2, "{name}");
        }
        // The next ticks come while all of them wait.
        world.pass(&engine, 10 * MINUTE, 30 * SECOND).await;
        let started = || world.seen.lock().len();
        assert_eq!((started(), waiting(&world).await), (1, 2));
        let why = belfry::testing::why(&world.store, "a/s4", engine.now()).await.unwrap();
        assert_eq!((why.decision, why.reason.as_deref()), (Decision::Waiting, Some("lane_full")));
        let words = "It does not run now: the lane narrow has 2 runs waiting, its queue_limit; \
                     deferred since 2026-03-02 12:10:04 UTC.";
        assert_eq!(why.words, words);
        let of = async |instant: &str| {
            let why = belfry::testing::why_at(&world.store, "a/s4", at(instant), engine.now()).await.unwrap();
            (why.decision, why.reason.unwrap())
        };
        assert_eq!(of("2026-03-02T12:10:04Z").await, (Decision::Waiting, "lane_full".into()));
        assert_eq!(of("2026-03-02T12:20:04Z").await, (Decision::Skipped, "queue_full".into()));
        // One after the other ends, and each makes room for the next.
        for nth in 2..=6 {
            until("the one before has started", async || started() == nth - 1).await;
            // Whoever was let in is there before the next one ends.
            until("all that have room wait", async || waiting(&world).await == (6 - (nth - 1)).min(2)).await;
            world.let_go.notify_one();
            until("the next one starts", async || started() == nth).await;
            assert!(waiting(&world).await <= 2);
        }
        let starts: Vec<_> = world.seen.lock().iter().map(|seen| (seen.name.clone(), seen.tick_at)).collect();
        let ticks = (0..6).map(|n| Some(at(&format!("2026-03-02T12:10:0{n}Z"))));
        let expected: Vec<_> = NAMES.iter().map(|name| (*name).to_owned()).zip(ticks).collect();
        assert_eq!(starts, expected, "in the order of their ticks");
        for (n, name) in NAMES.iter().enumerate() {
            let record = record(name).await;
            let reason = if n > 2 { SkipReason::QueueFull } else { SkipReason::AlreadyRunning };
            let open = record.open_skip.unwrap();
            assert_eq!((open.reason, open.count), (reason, 1), "{name}");
            assert_eq!((record.deferred, record.token.unwrap().kind), (None, TokenKind::Tick), "{name}");
        }
        NAMES.iter().for_each(|name| world.tell(name, Does::Succeed));
        world.let_go.notify_waiters();
        engine.quiet().await;
        assert!(world.runs().await.iter().all(|run| run.state == RunState::Completed));
        assert!(world.store.integrity().await.unwrap().is_empty());
        // With room for all nothing is deferred.
        world.pass(&engine, 11 * MINUTE, SECOND).await;
        assert_eq!(started(), 12);
        stop(&engine).await;
    })
    .await;
}
