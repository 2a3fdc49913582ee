//! Heartbeats and snapshots.

use std::time::Duration;

use crate::support::{Does, World, on_each, start, stop};
use belfry::api::{HeartbeatStatus, Node, NodeStatus, Run};
use belfry::{AgentBuilder, AnyStore, Engine, Options, SnapshotFilter, When, chat};
use belfry_store::{Snapshot, Store};

const MINUTE: Duration = Duration::from_secs(60);

/// The last of so many snapshots, once they are there.
async fn taken(engine: &Engine, count: usize) -> Snapshot {
    let look = async {
        loop {
            let found = engine.snapshots(&SnapshotFilter::default(), None, 100).await.unwrap().items;
            assert!(found.len() <= count, "{found:?}");
            if found.len() == count {
                return found.into_iter().next().unwrap().1;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), look).await.unwrap()
}

#[tokio::test]
async fn a_node_says_each_minute_that_it_lives_and_what_it_does() {
    on_each(async |world: World| {
        world.tell("a/s", Does::Wait);
        world.tell("a/talk", Does::Wait);
        let agents = [AgentBuilder::new("a")
            .schedule("s", When::Every("1h".into()))
            .schedule("talk", chat(serde_json::json!({"debounce": "0s"})))
            .define(|agent| agent.max_concurrent = None)
            .build()];
        let engine = world.engine(&agents).await;
        let first = taken(&engine, 1).await;
        assert_eq!((first.node, first.at, &first.host), (engine.node(), start(), &belfry::host()));
        assert_eq!((first.cpu_percent, first.sessions), (None, 0), "there is nothing before the first");
        if cfg!(target_os = "linux") {
            let (total, used) = (first.memory_total.unwrap(), first.memory_used.unwrap());
            assert!(0 < used && used < total, "{first:?}");
            assert!(first.load.unwrap().iter().all(|load| *load >= 0.0));
        }
        engine.send("a/talk:ada", "hello", belfry::SendOptions::default()).await.unwrap();
        engine.idle().await;
        assert_eq!(engine.running_total(), 2);
        world.pass(&engine, MINUTE, MINUTE).await;
        let second = taken(&engine, 2).await;
        assert_eq!(second.at, world.clock.now().wall);
        assert_eq!((second.lanes.values().sum::<u32>(), second.sessions), (2, 1), "{second:?}");
        let live = world.store.live_runs().await.unwrap();
        let mut runs: Vec<_> = live.iter().map(|run| run.id).collect();
        runs.sort();
        assert_eq!(second.runs, runs);

        // Its runs live as it does, and nobody is heard of that says nothing.
        let (nodes, now, silence_max) =
            (world.store.nodes().await.unwrap(), second.at, Options::default().silence_max());
        assert_eq!(nodes[0].last_seen_at, second.at);
        let status = |at| {
            let run = Run::of(&live[0]).seen_by(&nodes, at, silence_max).heartbeat.unwrap();
            assert_eq!(run.at, second.at);
            (Node::of(&nodes[0], &live, at, silence_max).status, run.status)
        };
        assert_eq!(status(now + 2 * MINUTE), (NodeStatus::Busy, HeartbeatStatus::Alive));
        let late = now + 3 * MINUTE;
        assert_eq!(status(late), (NodeStatus::Dead, HeartbeatStatus::Dead), "two were missed");
        world.let_go.notify_waiters();
        stop(&engine).await;
        let ended = world.runs().await.remove(0);
        assert_eq!(Run::of(&ended).seen_by(&nodes, now, silence_max).heartbeat, None);
    })
    .await;
}

#[tokio::test]
async fn a_program_adds_what_it_wants_to_say() {
    let engine = Engine::builder()
        .context(|| serde_json::json!({"rack": 7}).as_object().unwrap().clone())
        .options(Options { heartbeat: Duration::from_millis(100), ..Options::default() })
        .build();
    engine.start().await.unwrap();
    let second = loop {
        let found = engine.snapshots(&SnapshotFilter::default(), None, 1).await.unwrap();
        if found.next.is_some() {
            break found.items.into_iter().next().unwrap().1;
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(second.context["rack"], 7);
    assert_eq!(second.cpu_percent.is_some(), cfg!(target_os = "linux"), "{second:?}");
    assert!(second.cpu_percent.is_none_or(|percent| (0.0..=100.0).contains(&percent)));
    assert!(matches!(**engine.store(), AnyStore::Memory(_)));
    stop(&engine).await;
}
