//! Lanes of a node: a limit over all of them, and lanes that are removed.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::support::{Does, World, on_each, stop};
use belfry::{AgentBuilder, AgentSpec, Options, RunRequest, When};
use belfry_store::Store;

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

fn agent(name: &str, lane: &str, schedules: usize, when: &When) -> AgentSpec {
    let mut builder = AgentBuilder::new(name).define(|agent| {
        agent.lane = lane.into();
        agent.max_concurrent = None;
    });
    for n in 0..schedules {
        builder = builder.schedule(format!("s{n}"), when.clone());
    }
    builder.build()
}

/// Two lanes, a limit over all, and a poll that comes too late for anything here.
fn options(max_concurrent: u32) -> Options {
    Options {
        lanes: BTreeMap::from([("one".into(), 4), ("two".into(), 4)]),
        max_concurrent: Some(max_concurrent),
        poll_interval: 24 * HOUR,
        ..Options::default()
    }
}

#[tokio::test]
async fn a_limit_over_all_lanes_delays_no_lane_that_has_room() {
    let when = When::Every("5s".into());
    let agents = [agent("a", "one", 1, &when), agent("b", "two", 1, &when)];
    on_each(async |world: World| {
        for max_concurrent in [4, 2] {
            let engine = world.engine_with(&agents, options(max_concurrent)).await;
            for _ in 0..6 {
                let before = (world.starts("a/s0").len(), world.starts("b/s0").len());
                world.pass(&engine, 5 * SECOND, 5 * SECOND).await;
                let after = (world.starts("a/s0").len(), world.starts("b/s0").len());
                assert_eq!(after, (before.0 + 1, before.1 + 1), "a limit of {max_concurrent}");
            }
            stop(&engine).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_limit_over_all_lanes_lets_them_take_turns() {
    let when = When::Cron("0 13 * * *".into());
    let agents = [agent("a", "one", 4, &when), agent("b", "two", 4, &when)];
    on_each(async |world: World| {
        for name in ["a", "b"] {
            (0..4).for_each(|n| world.tell(&format!("{name}/s{n}"), Does::Wait));
        }
        let engine = world.engine_with(&agents, options(1)).await;
        world.pass(&engine, HOUR, HOUR).await;
        for started in 1..=8 {
            engine.idle().await;
            let seen: Vec<char> =
                world.seen.lock().iter().filter_map(|seen| seen.name.chars().next()).collect();
            assert_eq!(seen.len(), started, "{seen:?}");
            assert!(seen.windows(2).all(|pair| pair[0] != pair[1]), "a lane waits: {seen:?}");
            let mut events = engine.events();
            world.let_go.notify_one();
            while events.recv().await.unwrap().event != belfry::event::Name::RunFinished {}
        }
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_lane_that_leaves_the_files_takes_no_new_run_and_loses_none() {
    let yearly = When::Cron("0 0 1 1 *".into());
    on_each(async |world: World| {
        let slots = belfry_store::LaneSettings { slots: 1, limit: None, queue_limit: None };
        let now = || world.clock.now().wall;
        world.store.put_lanes(now(), &[("night".into(), slots)]).await.unwrap();
        let file_lanes = BTreeMap::from([("night".into(), 1)]);
        let own = Options { file_lanes, ..Options::default() };
        let agents =
            [agent("a", "night", 2, &yearly), agent("b", "night", 1, &When::Cron("* * * * *".into()))];
        ["a/s0", "a/s1"].iter().for_each(|name| world.tell(name, Does::Wait));
        let engine = world.engine_with(&agents, own).await;
        for name in ["a/s0", "a/s1"] {
            engine.trigger(name, RunRequest::default()).await.unwrap();
            world.settle(&engine).await;
        }
        assert_eq!((world.starts("a/s0").len(), world.starts("a/s1").len()), (1, 0), "one slot");
        world.store.put_lanes(now(), &[]).await.unwrap();
        engine.hint().await;
        world.pass(&engine, 90 * SECOND, SECOND).await;
        let lanes: Vec<String> =
            world.runs().await.into_iter().filter(|run| run.name == "b/s0").map(|run| run.lane).collect();
        assert!(!lanes.is_empty() && lanes.iter().all(|lane| lane == "main"), "{lanes:?}");
        world.does.lock().clear();
        world.let_go.notify_waiters();
        world.pass(&engine, 2 * SECOND, SECOND).await;
        assert_eq!(world.starts("a/s1").len(), 1, "what waited there starts");
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_run_that_an_edit_moves_while_it_runs_takes_a_slot_of_its_new_lane() {
    let yearly = When::Cron("0 0 1 1 *".into());
    on_each(async |world: World| {
        ["a/s0", "b/s0", "a/s1"].iter().for_each(|name| world.tell(name, Does::Wait));
        let lanes = BTreeMap::from([("main".into(), 4), ("one".into(), 1), ("two".into(), 1)]);
        let options = Options { lanes, ..Options::default() };
        let agents = |lane: &str| [agent("a", lane, 2, &yearly), agent("b", "one", 1, &yearly)];
        let engine = world.engine_with(&agents("one"), options.clone()).await;
        for name in ["a/s0", "b/s0"] {
            engine.trigger(name, RunRequest::default()).await.unwrap();
            world.settle(&engine).await;
        }
        assert_eq!((world.starts("a/s0").len(), world.starts("b/s0").len()), (1, 0), "one slot");
        world.store.apply(world.clock.now().wall, "code", "edited", &agents("two")).await.unwrap();
        engine.hint().await;
        world.pass(&engine, 2 * SECOND, SECOND).await;
        assert_eq!(world.starts("b/s0").len(), 1, "its old lane has a slot again");
        engine.trigger("a/s1", RunRequest::default()).await.unwrap();
        world.pass(&engine, 2 * SECOND, SECOND).await;
        assert_eq!(world.starts("a/s1").len(), 0, "its new lane has none");
        world.does.lock().clear();
        world.let_go.notify_waiters();
        world.pass(&engine, 2 * SECOND, SECOND).await;
        assert_eq!(world.starts("a/s1").len(), 1);
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn runs_that_an_edit_moves_to_a_lane_that_nobody_made_start() {
    let yearly = When::Cron("0 0 1 1 *".into());
    on_each(async |world: World| {
        ["a/s0", "a/s1"].iter().for_each(|name| world.tell(name, Does::Wait));
        let lanes = BTreeMap::from([("main".into(), 4), ("one".into(), 1)]);
        let options = Options { lanes, ..Options::default() };
        let engine = world.engine_with(&[agent("a", "one", 3, &yearly)], options.clone()).await;
        for name in ["a/s0", "a/s1"] {
            engine.trigger(name, RunRequest::default()).await.unwrap();
            world.settle(&engine).await;
        }
        assert_eq!((world.starts("a/s0").len(), world.starts("a/s1").len()), (1, 0), "one slot");
        // With a slip of the pen, as `check` warns of it.
        let edited = [agent("a", "oen", 3, &yearly)];
        world.store.apply(world.clock.now().wall, "code", "edited", &edited).await.unwrap();
        engine.hint().await;
        world.pass(&engine, 5 * SECOND, SECOND).await;
        assert_eq!(world.starts("a/s1").len(), 1, "what waited is moved there, and starts");
        engine.trigger("a/s2", RunRequest::default()).await.unwrap();
        world.pass(&engine, 2 * SECOND, SECOND).await;
        let runs = world.runs().await;
        let lane = runs.iter().find(|run| run.name == "a/s2").map(|run| run.lane.as_str());
        assert_eq!((world.starts("a/s2").len(), lane), (1, Some("main")), "what is made now goes to main");
        world.does.lock().clear();
        world.let_go.notify_waiters();
        stop(&engine).await;
    })
    .await;
}
