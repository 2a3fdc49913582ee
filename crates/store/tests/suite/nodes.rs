//! Sentences about what a node asks for beside its work: hints, cancel marks, what is left of processes.

use std::time::Duration;

use belfry_core::{AgentDefinition, Reason};
use belfry_store::*;
use belfry_time::SignedDuration;
use tokio::time::timeout;

use super::world::*;

/// All of them, each on a store of its own.
pub async fn all<S: Store>(fresh: impl AsyncFn() -> S) {
    whoever_waits_hears_of_work(&fresh().await).await;
    a_node_reads_its_cancel_marks(&fresh().await).await;
    a_rescued_run_has_its_trace(&fresh().await).await;
}

/// Takes all hints that are there.
pub async fn drain(store: &impl Store) {
    while timeout(Duration::from_millis(100), store.changed()).await.is_ok() {}
}

/// Whether there is a hint.
pub async fn hears(store: &impl Store) -> bool {
    timeout(Duration::from_secs(10), store.changed()).await.is_ok()
}

async fn whoever_waits_hears_of_work(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", AgentDefinition::default(), &[("s", every("1h"))])]).await;
    assert!(hears(store).await, "of a schedule");
    drain(store).await;
    assert_eq!(world.plan_all().await, 1);
    assert!(hears(store).await, "of a run that was planned");
    drain(store).await;
    let claimed = world.claim(node, 1).await.remove(0);
    let (run, _) = world.enqueue("a/s", None).await;
    assert!(hears(store).await, "of a run that was asked for, also where it was made before anybody waited");
    drain(store).await;
    store.cancel(world.now, run, Reason::Requested).await.unwrap();
    assert!(hears(store).await, "of a cancel");
    drain(store).await;
    world.complete(&claimed).await;
    assert!(hears(store).await, "of the end of a run, which arms its schedule");
    let id = world.schedule("a/s").await.id;
    for _ in 0..2 {
        drain(store).await;
        store.pause(world.now, id, None, None).await.unwrap();
        store.resume(world.now, id, false, None).await.unwrap();
        assert!(hears(store).await, "of a resume");
    }
    drain(store).await;
    assert_eq!(world.complete(&claimed).await, Finished::Stale);
    let nothing = timeout(Duration::from_millis(100), store.changed()).await;
    assert!(nothing.is_err(), "and of nothing else");
}

async fn a_node_reads_its_cancel_marks(store: &impl Store) {
    let mut world = World::new(store);
    let (node, other) = (world.join(1).await, world.join(2).await);
    world.apply(&[agent("a", unlimited(), &[("s1", every("1h")), ("s2", every("1h"))])]).await;
    world.plan_all().await;
    let (mine, theirs) = (world.claim(node, 1).await.remove(0), world.claim(other, 1).await.remove(0));
    assert!(store.cancel_marks(node).await.unwrap().is_empty());
    store.cancel(world.now, mine.run, Reason::Stopped).await.unwrap();
    store.cancel(world.now, mine.run, Reason::Requested).await.unwrap();
    let marks = [(mine.run, mine.epoch, Reason::Stopped)];
    assert_eq!(store.cancel_marks(node).await.unwrap(), marks, "with the first reason");
    let Renewed::Held { cancels, .. } =
        store.renew(node, world.now + SignedDuration::from_secs(30)).await.unwrap()
    else {
        panic!("it was not fenced")
    };
    assert_eq!(cancels, marks);
    assert!(store.cancel_marks(other).await.unwrap().is_empty());
    world.complete(&theirs).await;
    world.finish(&mine, belfry_core::retry::Outcome::Cancelled(Reason::Stopped)).await;
    assert!(store.cancel_marks(node).await.unwrap().is_empty(), "the mark goes with the run");
}

async fn a_rescued_run_has_its_trace(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", every("1h"))])]).await;
    let record = world.schedule("a/s").await;
    let compiled = record.definition.compile("a/s").unwrap();
    let trace = uuid::Uuid::from_u128(77);
    let mut ids = Vec::new();
    for trace_id in [Some(trace), None] {
        let id = world.run_id();
        let definition = AgentDefinition::default();
        let run = NewRun::of(id, record.agent, record.id, &compiled, &definition, world.now);
        store.enqueue(world.now, &Enqueue { run: NewRun { trace_id, ..run }, key: None }).await.unwrap();
        ids.push(id);
    }
    assert!(world.claim(node, 5).await.iter().any(|claimed| claimed.run == ids[0]));
    let lease = store.nodes().await.unwrap()[0].lease_until;
    let rescued = store.fence(world.now, node, lease).await.unwrap().unwrap();
    assert_eq!((rescued.pending.first(), rescued.traces), (Some(&ids[0]), vec![(ids[0], trace)]));
}
