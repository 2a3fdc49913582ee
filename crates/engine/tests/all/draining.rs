//! Nodes that are told to take no new work.

use std::time::Duration;

use crate::support::{Does, World, on_each, start, stop};
use belfry::event::Name;
use belfry::testing::{Ask, Driver, Effect, Input, Now};
use belfry::{
    AgentBuilder, AgentSpec, AnyStore, Error, NodeId, Options, RunRequest, RunState, Status, StopOptions,
    When,
};
use belfry_store::{Marks, Node, Renewed, Store};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

fn agents() -> [AgentSpec; 1] {
    let every = |text: &str| When::Every(text.into());
    [AgentBuilder::new("a").schedule("often", every("1m")).schedule("long", every("1h")).build()]
}

#[tokio::test]
async fn a_node_that_drains_lets_its_work_end_takes_no_more_and_stays_up() {
    on_each(async |world: World| {
        world.tell("a/long", Does::Wait);
        let mut agents = agents();
        agents[0].definition.max_concurrent = None;
        let engine = world.engine(&agents).await;
        let mut events = engine.events();
        let node = engine.node();
        assert_eq!((world.starts("a/often").len(), engine.running_total()), (1, 1));
        assert!(engine.drain(node, true).await.unwrap());
        assert!(!engine.drain(node, true).await.unwrap(), "it does already");
        assert_eq!(engine.status(), Status::Draining);
        let told = loop {
            let event = events.recv().await.unwrap();
            if event.event == Name::NodeDraining {
                break event;
            }
        };
        assert_eq!((told.node, told.state), (Some(node), Some("draining")));
        assert!(world.store.nodes().await.unwrap()[0].draining);
        let refused = engine.trigger("a/often", RunRequest::default()).await;
        assert!(matches!(refused, Err(Error::Draining)), "{refused:?}");
        world.pass(&engine, 5 * MINUTE, MINUTE).await;
        assert_eq!(world.starts("a/often").len(), 1, "nothing new");
        assert_eq!(engine.running_total(), 1, "what runs goes on");
        world.tell("a/long", Does::Succeed);
        world.let_go.notify_waiters();
        engine.quiet().await;
        let ended = world.runs().await.into_iter().find(|run| run.name == "a/long").unwrap();
        assert_eq!(ended.state, RunState::Completed, "and its end is kept");
        assert_eq!(engine.status(), Status::Draining, "it stays");

        assert!(engine.drain(node, false).await.unwrap());
        assert_eq!(engine.status(), Status::Running);
        engine.quiet().await;
        assert_eq!(world.starts("a/often").len(), 2, "it works again, from where time has come to");
        engine.drain(node, true).await.unwrap();
        stop(&engine).await;
        assert_eq!(engine.status(), Status::Stopped, "and ends as usual");
    })
    .await;
}

#[tokio::test]
async fn one_node_drains_another_and_does_its_work() {
    on_each(async |world: World| {
        // A file has one server.
        if matches!(*world.store, AnyStore::Sqlite(_)) {
            return;
        }
        let (first, second) = (world.engine(&agents()).await, world.engine(&agents()).await);
        assert!(second.drain(first.node(), true).await.unwrap());
        first.idle().await;
        world.pass(&first, SECOND, SECOND).await;
        assert_eq!(first.status(), Status::Draining, "it has read the mark within a second");
        assert_eq!(second.status(), Status::Running);
        let before = first.state().triggers;
        for _ in 0..3 {
            world.clock.advance(MINUTE);
            first.idle().await;
            second.quiet().await;
        }
        assert_eq!(first.state().triggers, before);
        assert_eq!(world.starts("a/often").len(), 4, "the other one goes on");
        assert!(second.drain(first.node(), false).await.unwrap());
        first.idle().await;
        world.pass(&first, SECOND, SECOND).await;
        assert_eq!(first.status(), Status::Running);
        stop(&first).await;
        stop(&second).await;
    })
    .await;
}

#[tokio::test]
async fn who_is_not_there_or_dead_cannot_be_drained() {
    on_each(async |world: World| {
        let engine = world.engine(&agents()).await;
        let nobody = NodeId(uuid::Uuid::from_u128(9));
        let refused = engine.drain(nobody, true).await;
        assert!(matches!(refused, Err(Error::NoNode { node }) if node == nobody), "{refused:?}");
        let dead = Node {
            id: nobody,
            host: "elsewhere".into(),
            pid: 1,
            labels: Vec::new(),
            started_at: start(),
            lease_until: start(),
            fenced: false,
            draining: false,
            last_seen_at: start(),
            max_concurrent: None,
            process: Default::default(),
        };
        world.store.join(&dead, None).await.unwrap();
        let refused = engine.drain(nobody, true).await;
        assert!(matches!(refused, Err(Error::NodeDead { node }) if node == nobody), "{refused:?}");
        engine.stop(StopOptions::default()).await.unwrap();
    })
    .await;
}

#[test]
fn a_node_that_drains_asks_for_no_work_and_comes_back_as_one_that_drains() {
    let node = NodeId(uuid::Uuid::from_u128(1));
    let now = Now { wall: start(), mono: MINUTE };
    let lease = start() + belfry::SignedDuration::from_secs(30);
    let mut driver =
        Driver::new(Options::default(), node, now, lease, Box::new(|_| uuid::Uuid::from_u128(2)));
    let asks_for_work = |effects: &[Effect]| {
        effects
            .iter()
            .any(|effect| matches!(effect, Effect::Ask(Ask::Due { .. }) | Effect::Ask(Ask::Claim(_))))
    };
    let effects = driver.step(now, Input::Drain(true));
    assert!(!asks_for_work(&effects), "{effects:?}");
    assert!(effects.iter().any(|effect| matches!(effect, Effect::Ask(Ask::Marks(_)))), "{effects:?}");
    // What was read before the mark was set is old news: something has come up since.
    driver.step(now, Input::Drain(true));
    let old = Marks { draining: Some(false), ..Marks::default() };
    driver.step(now, Input::Marks(Ok(old)));
    assert!(driver.is_draining());
    assert!(driver.wait(now) > Duration::ZERO, "it does not spin");
    let effects =
        driver.step(now, Input::Renewed { asked: MINUTE, renewed: Ok(Renewed::Fenced), is_held: false });
    // What the store was told of the node that it was holds, if that had not been read yet.
    let joins =
        |effect: &Effect| matches!(effect, Effect::Join { draining: true, left, .. } if *left == node);
    assert!(effects.iter().any(joins), "{effects:?}");
    // Nobody knows the new one yet: that says nothing.
    driver.step(now, Input::Marks(Ok(Marks::default())));
    assert!(driver.is_draining());
    let effects = driver.step(now, Input::Drain(false));
    assert!(asks_for_work(&effects), "{effects:?}");
}
