//! A limit over all lanes of a node.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::support::{Does, World, on_each, stop};
use belfry::{AgentBuilder, AgentSpec, Options, When};

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
