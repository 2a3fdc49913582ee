//! Sentences about heartbeats and snapshots.

use std::collections::BTreeMap;

use belfry_core::{NodeId, RunId};
use belfry_store::*;
use belfry_time::SignedDuration;
use serde_json::json;

use super::world::*;

/// All of them, each on a store of its own.
pub async fn all<S: Store + Watch>(fresh: impl AsyncFn() -> S) {
    a_heartbeat_is_kept_with_its_node(&fresh().await).await;
    nobody_speaks_for_a_node_that_is_not_there(&fresh().await).await;
    snapshots_are_read_backwards_page_by_page(&fresh().await).await;
    old_snapshots_and_nodes_go_batch_by_batch(&fresh().await).await;
}

pub fn snapshot<S: Store>(world: &World<'_, S>, node: NodeId) -> Snapshot {
    Snapshot {
        node,
        at: world.now,
        host: "here".into(),
        cpu_percent: Some(12.5),
        memory_total: Some(1 << 40),
        memory_used: Some(3),
        load: Some([0.25, 1.5, 20.0]),
        lanes: BTreeMap::from([("cron".into(), 2), ("main".into(), 1)]),
        runs: vec![RunId(uuid::Uuid::from_u128(7))],
        sessions: 1,
        tmux: Some(vec!["it's \"mine\"; drop table nodes".into()]),
        context: json!({"place": "über\u{0}all", "deep": {"er": [1, null]}}).as_object().unwrap().clone(),
    }
}

async fn seen<S: Store>(store: &S, node: NodeId) -> Option<belfry_time::Timestamp> {
    store.nodes().await.unwrap().iter().find(|known| known.id == node).map(|known| known.last_seen_at)
}

async fn list<S: Watch>(store: &S, filter: SnapshotFilter) -> Vec<Snapshot> {
    let found = store.snapshots(&filter, None, 100).await.unwrap();
    found.items.into_iter().map(|(_, snapshot)| snapshot).collect()
}

async fn a_heartbeat_is_kept_with_its_node<S: Store + Watch>(store: &S) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    assert_eq!(seen(store, node).await, Some(world.now), "when it joined");
    world.advance(1_000);
    let first = snapshot(&world, node);
    assert!(store.beat(&first).await.unwrap());
    assert_eq!(seen(store, node).await, Some(world.now));
    let bare = Snapshot { cpu_percent: None, memory_total: None, load: None, tmux: None, ..first.clone() };
    let late = Snapshot { at: world.now - SignedDuration::from_secs(1), ..bare };
    assert!(store.beat(&late).await.unwrap());
    assert_eq!(seen(store, node).await, Some(world.now), "it does not go back");
    assert_eq!(list(store, SnapshotFilter::default()).await, [late, first], "as they were");
    let renewed = store.renew(node, world.now + SignedDuration::from_secs(30)).await.unwrap();
    assert!(matches!(renewed, Renewed::Held { .. }));
    assert_eq!(seen(store, node).await, Some(world.now), "a lease is no heartbeat");
}

async fn nobody_speaks_for_a_node_that_is_not_there<S: Store + Watch>(store: &S) {
    let world = World::new(store);
    assert!(!store.beat(&snapshot(&world, node_id(9))).await.unwrap());
    let node = world.join(1).await;
    let lease = store.nodes().await.unwrap()[0].lease_until;
    store.fence(world.now, node, lease).await.unwrap();
    assert!(!store.beat(&snapshot(&world, node)).await.unwrap());
    assert!(list(store, SnapshotFilter::default()).await.is_empty());
}

async fn snapshots_are_read_backwards_page_by_page<S: Store + Watch>(store: &S) {
    let mut world = World::new(store);
    let nodes = [world.join(1).await, world.join(2).await];
    let mut all = Vec::new();
    for n in 0..10 {
        world.advance(1_000);
        all.push(snapshot(&world, nodes[n % 2]));
        assert!(store.beat(&all[n]).await.unwrap());
    }
    all.reverse();
    let (mut read, mut before) = (Vec::new(), None);
    loop {
        let page = store.snapshots(&SnapshotFilter::default(), before, 4).await.unwrap();
        assert!(page.items.len() == 4 || page.next.is_none());
        read.extend(page.items.into_iter().map(|(_, snapshot)| snapshot));
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    assert_eq!(read, all);
    let of_one = SnapshotFilter { node: Some(nodes[0]), since: None };
    let expected: Vec<_> = all.iter().filter(|snapshot| snapshot.node == nodes[0]).cloned().collect();
    assert_eq!(list(store, of_one).await, expected);
    let lately = SnapshotFilter { node: Some(nodes[1]), since: Some(all[2].at) };
    assert_eq!(list(store, lately).await, [all[0].clone(), all[2].clone()], "then or later");
    let nobody = SnapshotFilter { node: Some(node_id(9)), since: None };
    assert!(list(store, nobody).await.is_empty());
}

async fn old_snapshots_and_nodes_go_batch_by_batch<S: Store + Watch>(store: &S) {
    let mut world = World::new(store);
    let (lives, gone, late) = (world.join(1).await, world.join(2).await, world.join(3).await);
    for _ in 0..5 {
        assert!(store.beat(&snapshot(&world, lives)).await.unwrap());
        world.advance(1_000);
    }
    assert!(store.beat(&snapshot(&world, late)).await.unwrap());
    for node in [gone, late] {
        let nodes = store.nodes().await.unwrap();
        let lease = nodes.iter().find(|known| known.id == node).unwrap().lease_until;
        assert!(store.fence(world.now, node, lease).await.unwrap().is_some());
    }
    assert_eq!(store.prune_beats(None, None, 100).await.unwrap(), 0, "all are kept");
    let third = world.now - SignedDuration::from_secs(2);
    assert_eq!(store.prune_beats(Some(third), None, 2).await.unwrap(), 2);
    assert_eq!(store.prune_beats(Some(third), None, 2).await.unwrap(), 1, "the rest of what is older");
    assert_eq!(list(store, SnapshotFilter::default()).await.len(), 3);
    assert_eq!(store.prune_beats(None, Some(third), 100).await.unwrap(), 1, "one that is gone for so long");
    assert_eq!(store.drain(world.now, gone, true).await.unwrap(), Drained::NotFound);
    assert_eq!(store.drain(world.now, late, true).await.unwrap(), Drained::Dead, "not the other");
    let later = world.now + SignedDuration::from_hours(1000);
    assert_eq!(store.prune_beats(None, Some(later), 100).await.unwrap(), 1);
    assert_eq!(store.nodes().await.unwrap()[0].id, lives, "never one that was not fenced");
}
