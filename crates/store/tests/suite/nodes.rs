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
    a_node_reads_that_it_is_to_drain(&fresh().await).await;
}

/// Takes all hints that are there.
pub async fn drain_hints(store: &impl Store) {
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
    drain_hints(store).await;
    assert_eq!(world.plan_all().await, 1);
    assert!(hears(store).await, "of a run that was planned");
    drain_hints(store).await;
    let claimed = world.claim(node, 1).await.remove(0);
    let (run, _) = world.enqueue("a/s", None).await;
    assert!(hears(store).await, "of a run that was asked for, also where it was made before anybody waited");
    drain_hints(store).await;
    store.cancel(world.now, run, Reason::Requested).await.unwrap();
    assert!(hears(store).await, "of a cancel");
    drain_hints(store).await;
    world.complete(&claimed).await;
    assert!(hears(store).await, "of the end of a run, which arms its schedule");
    let id = world.schedule("a/s").await.id;
    for _ in 0..2 {
        drain_hints(store).await;
        store.pause(world.now, id, None, None).await.unwrap();
        store.resume(world.now, id, false, None).await.unwrap();
        assert!(hears(store).await, "of a resume");
    }
    drain_hints(store).await;
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
    assert!(store.marks(node).await.unwrap().cancels.is_empty());
    store.cancel(world.now, mine.run, Reason::Stopped).await.unwrap();
    store.cancel(world.now, mine.run, Reason::Requested).await.unwrap();
    let marks = [(mine.run, mine.epoch, Reason::Stopped)];
    assert_eq!(store.marks(node).await.unwrap().cancels, marks, "with the first reason");
    let Renewed::Held { cancels, .. } =
        store.renew(node, world.now + SignedDuration::from_secs(30)).await.unwrap()
    else {
        panic!("it was not fenced")
    };
    assert_eq!(cancels, marks);
    assert!(store.marks(other).await.unwrap().cancels.is_empty());
    world.complete(&theirs).await;
    world.finish(&mine, belfry_core::retry::Outcome::Cancelled(Reason::Stopped)).await;
    assert!(store.marks(node).await.unwrap().cancels.is_empty(), "the mark goes with the run");
}

async fn a_node_reads_that_it_is_to_drain(store: &impl Store) {
    let mut world = World::new(store);
    let (node, other) = (world.join(1).await, world.join(2).await);
    let drain = async |now, node, draining| store.drain(now, node, draining).await.unwrap();
    assert_eq!(drain(world.now, node_id(9), true).await, Drained::NotFound);
    drain_hints(store).await;
    assert_eq!(drain(world.now, node, true).await, Drained::Marked { is_news: true });
    assert!(hears(store).await, "of a mark");
    assert_eq!(drain(world.now, node, true).await, Drained::Marked { is_news: false });
    let is_marked = async |node| store.marks(node).await.unwrap().draining;
    assert_eq!(is_marked(node).await, Some(true));
    assert_eq!(is_marked(other).await, Some(false));
    assert_eq!(is_marked(node_id(9)).await, None, "nobody knows it");
    let marked: Vec<_> = store.nodes().await.unwrap().iter().map(|node| (node.id, node.draining)).collect();
    assert_eq!(marked, [(node, true), (other, false)]);
    let renewed = store.renew(node, world.now + SignedDuration::from_secs(60)).await.unwrap();
    assert!(matches!(renewed, Renewed::Held { .. }), "it keeps its lease");
    assert_eq!(is_marked(node).await, Some(true), "and its mark");
    assert_eq!(drain(world.now, node, false).await, Drained::Marked { is_news: true });
    assert_eq!(is_marked(node).await, Some(false));
    world.advance(30_000);
    assert_eq!(drain(world.now, other, true).await, Drained::Dead, "by its lease");
    let lease = store.nodes().await.unwrap()[0].lease_until;
    store.fence(world.now, node, lease).await.unwrap();
    assert_eq!(drain(world.now, node, true).await, Drained::Dead, "or fenced");
    assert_eq!((is_marked(node).await, is_marked(other).await), (Some(false), Some(false)));
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
