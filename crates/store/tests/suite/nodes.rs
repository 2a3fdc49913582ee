//! Sentences about what a node asks for beside its work: hints, cancel marks, what is left of processes.

use std::collections::BTreeSet;
use std::time::Duration;

use belfry_core::edit::Resume;
use belfry_core::rescue::Rescues;
use belfry_core::{AgentDefinition, NodeId, Reason, RunId, RunState};
use belfry_store::*;
use belfry_time::SignedDuration;
use tokio::time::timeout;

use super::world::*;

/// All of them, each on a store of its own. Boxed where they are deep, for the stack of a test is small.
pub async fn all<S: Store>(fresh: impl AsyncFn() -> S) {
    whoever_waits_hears_of_work(&fresh().await).await;
    a_node_reads_its_cancel_marks(&fresh().await).await;
    a_rescued_run_has_its_trace(&fresh().await).await;
    a_node_reads_that_it_is_to_drain(&fresh().await).await;
    a_node_that_joins_again_keeps_its_mark(&fresh().await).await;
    a_lease_that_is_renewed_by_a_clock_that_was_set_back_ends_by_that_clock(&fresh().await).await;
    Box::pin(rescued_runs_are_claimed_one_at_a_time(&fresh().await)).await;
    Box::pin(a_slot_is_kept_for_a_rescued_run_that_may_start_in_a_moment(&fresh().await)).await;
    Box::pin(a_rescued_run_keeps_its_place_at_a_gate(&fresh().await)).await;
    Box::pin(a_run_that_kills_three_nodes_is_given_up_and_no_other(&fresh().await)).await;
    Box::pin(a_suspect_that_waits_holds_back_those_behind_it_at_its_gate_and_nobody_else(&fresh().await))
        .await;
    Box::pin(nobody_is_suspect_after_a_renewal(&fresh().await)).await;
    Box::pin(a_suspect_that_has_outlived_a_renewal_is_none_any_more(&fresh().await)).await;
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
        store.resume(world.now, id, Resume::Skip).await.unwrap();
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

/// A node was told to take work again, and was fenced before it had read that. It joined as one that drains, for good.
async fn a_node_that_joins_again_keeps_its_mark(store: &impl Store) {
    let world = World::new(store);
    let row = async |node| store.nodes().await.unwrap().into_iter().find(|row| row.id == node).unwrap();
    for (n, was_draining, is_draining) in [(1, true, false), (3, false, true)] {
        let node = world.join(n).await;
        for draining in [was_draining, is_draining] {
            store.drain(world.now, node, draining).await.unwrap();
        }
        let read = row(node).await;
        store.fence(world.now, node, read.lease_until).await.unwrap();
        let again = Node { id: node_id(n + 1), draining: was_draining, ..read };
        store.join(&again, Some(node)).await.unwrap();
        assert_eq!(row(again.id).await.draining, is_draining);
        assert_eq!(store.marks(again.id).await.unwrap().draining, Some(is_draining));
    }
    // It does not know the node that it was: then it says itself whether it drains.
    let node = world.join(5).await;
    let again = Node { id: node_id(6), draining: true, ..row(node).await };
    store.join(&again, Some(node_id(9))).await.unwrap();
    assert!(row(again.id).await.draining);
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
        let run =
            NewRun::by_hand(Defined::new(record.agent, record.id, &compiled, &definition), id, world.now);
        let (prompt, payload) = (Some("given".to_owned()), serde_json::json!({"given": 1}));
        let run = NewRun { trace_id, prompt, payload, ..run };
        store.enqueue(world.now, &Enqueue { run, key: None }).await.unwrap();
        ids.push(id);
    }
    assert!(world.claim(node, 5).await.iter().any(|claimed| claimed.run == ids[0]));
    let lease = store.nodes().await.unwrap()[0].lease_until;
    let rescued = store.fence(world.now, node, lease).await.unwrap().unwrap();
    assert_eq!(rescued.pending.first(), Some(&ids[0]));
    // What tells of them reads them at once.
    let missing = world.run_id();
    let asked = [ids[1], missing, ids[0]];
    let found = store.runs_by_id(&asked).await.unwrap();
    // What came with them may be long, and is left out.
    let is_light = |run: &RunRecord| run.prompt.is_none() && run.payload == serde_json::json!({});
    assert!(found.iter().all(is_light), "{found:?}");
    assert_eq!(store.run(ids[1]).await.unwrap().unwrap().prompt.as_deref(), Some("given"));
    let found: Vec<_> = found.iter().map(|run| (run.id, run.trace_id, run.name.as_str())).collect();
    assert_eq!(found, [(ids[1], None, "a/s"), (ids[0], Some(trace), "a/s")]);
}

/// A world with a node that claims `runs` runs of an agent without limits, and dies.
async fn after_a_death<S: Store>(store: &S, runs: usize) -> (World<'_, S>, Vec<RunId>) {
    let mut world = World::new(store);
    world.apply(&["a", "b"].map(|name| agent(name, unlimited(), &[("s", every("1h"))]))).await;
    let node = world.join(1).await;
    let mut made = Vec::new();
    for _ in 0..runs {
        made.push(world.enqueue("a/s", None).await.0);
    }
    assert_eq!(world.claim(node, 50).await.len(), runs, "nothing holds back what was not rescued");
    let rescued = die(&mut world, node).await;
    assert_eq!((rescued.pending.as_slice(), rescued.suspects.as_slice()), (made.as_slice(), [].as_slice()));
    (world, made)
}

/// The node's lease lapses, and it is fenced.
async fn die<S: Store>(world: &mut World<'_, S>, node: NodeId) -> Rescued {
    world.advance(31_000);
    let nodes = world.store.nodes().await.unwrap();
    let lease = nodes.iter().find(|known| known.id == node).unwrap().lease_until;
    world.store.fence(world.now, node, lease).await.unwrap().unwrap()
}

async fn a_lease_that_is_renewed_by_a_clock_that_was_set_back_ends_by_that_clock(store: &impl Store) {
    let world = World::new(store);
    let node = world.join(1).await;
    let lease = async || store.nodes().await.unwrap()[0].lease_until;
    let first = lease().await;
    let earlier = first - SignedDuration::from_hours(1);
    assert!(matches!(store.renew(node, earlier).await.unwrap(), Renewed::Held { .. }));
    assert_eq!(lease().await, earlier, "others see that it was renewed");
    assert_eq!(store.fence(world.now, node, first).await.unwrap(), None, "who saw the old lease is late");
}

async fn rescued_runs_are_claimed_one_at_a_time(store: &impl Store) {
    let (mut world, made) = after_a_death(store, 3).await;
    let node = world.join(2).await;
    let (fresh, _) = world.enqueue("b/s", None).await;
    let ids = |claimed: &[Claimed]| claimed.iter().map(|run| (run.run, run.rescued)).collect::<Vec<_>>();
    let first = world.claim(node, 50).await;
    assert_eq!(ids(&first), [(made[0], true), (fresh, false)], "one of them, and what is new");
    assert_eq!(ids(&world.claim_with(node, 50, Rescues::None).await), [], "it has not started");
    let second = world.claim(node, 50).await;
    assert_eq!(ids(&second), [(made[1], true)]);
    let given = [(second[0].run, second[0].epoch)];
    assert_eq!(store.give_back(world.now, node, &given).await.unwrap().len(), 1);
    assert_eq!(ids(&world.claim_with(node, 50, Rescues::None).await), [], "also one that was never started");
    assert_eq!(ids(&world.claim(node, 50).await), [(made[1], true)]);
    assert_eq!(ids(&world.claim_only(node, made[2]).await), [(made[2], true)], "a guest has only one");
    world.fail(&first[0]).await;
    world.advance(60_000);
    assert_eq!(
        ids(&world.claim_with(node, 50, Rescues::None).await),
        [(made[0], false)],
        "not after an attempt"
    );
}

async fn a_slot_is_kept_for_a_rescued_run_that_may_start_in_a_moment(store: &impl Store) {
    let (mut world, made) = after_a_death(store, 2).await;
    let node = world.join(2).await;
    let (fresh, _) = world.enqueue("b/s", None).await;
    let ids = |claimed: &[Claimed]| claimed.iter().map(|run| run.run).collect::<Vec<_>>();
    assert_eq!(ids(&world.claim_with(node, 1, Rescues::Soon).await), [], "the slot is for the older run");
    assert_eq!(ids(&world.claim_with(node, 2, Rescues::Soon).await), [fresh]);
    assert_eq!(ids(&world.claim_with(node, 1, Rescues::Unsuspected).await), [made[0]]);
    world.assert_whole().await;
}

async fn a_rescued_run_keeps_its_place_at_a_gate(store: &impl Store) {
    let mut world = World::new(store);
    let limited = AgentDefinition { max_concurrent: Some(2), ..AgentDefinition::default() };
    world
        .apply(&[agent("a", limited, &[("s", every("1h"))]), agent("b", unlimited(), &[("s", every("1h"))])])
        .await;
    let node = world.join(1).await;
    let made = [world.enqueue("a/s", None).await.0, world.enqueue("a/s", None).await.0];
    assert_eq!(world.claim(node, 50).await.len(), 2);
    die(&mut world, node).await;
    let node = world.join(2).await;
    world.advance(1_000);
    let (younger, _) = world.enqueue("a/s", None).await;
    let (free, _) = world.enqueue("b/s", None).await;
    let ids = |claimed: Vec<Claimed>| claimed.iter().map(|run| run.run).collect::<Vec<_>>();
    assert_eq!(ids(world.claim_with(node, 1, Rescues::None).await), [free], "nobody overtakes at the gate");
    assert_eq!(ids(world.claim(node, 50).await), [made[0]]);
    assert_eq!(ids(world.claim_with(node, 50, Rescues::None).await), []);
    let second = world.claim(node, 50).await;
    assert_eq!(second[0].run, made[1]);
    assert_eq!(ids(world.claim(node, 50).await), [], "two at once");
    world.complete(&second[0]).await;
    assert_eq!(ids(world.claim_with(node, 50, Rescues::None).await), [younger]);
}

async fn a_run_that_kills_three_nodes_is_given_up_and_no_other(store: &impl Store) {
    let (mut world, made) = after_a_death(store, 3).await;
    let node = world.join(2).await;
    // It kills a moment after its start, when the next has been claimed: nobody can tell which of them it was.
    for _ in 0..3 {
        assert!(!world.claim(node, 50).await[0].suspect);
    }
    let rescued = die(&mut world, node).await;
    assert_eq!((rescued.suspects, rescued.pending.len()), (made.clone(), 3));
    let node = world.join(3).await;
    assert_eq!(world.claim_with(node, 50, Rescues::Unsuspected).await, [], "the node has not lived for long");
    let first = world.claim(node, 50).await.remove(0);
    assert_eq!((first.run, first.suspect), (made[0], true));
    // The first lives on over a renewal; then the one that kills is started.
    store.renew(node, world.now + SignedDuration::from_secs(30)).await.unwrap();
    assert_eq!(world.claim(node, 50).await[0].run, made[1]);
    let rescued = die(&mut world, node).await;
    assert_eq!((rescued.suspects.as_slice(), rescued.ended.len()), ([made[1]].as_slice(), 1));
    let ended = store.run(made[1]).await.unwrap().unwrap();
    assert_eq!((ended.state, ended.reason), (RunState::Failed, Some(Reason::Orphaned)));
    assert_eq!(ended.error.as_deref(), Some(belfry_core::rescue::SUSPECT_ERROR));
    assert!(ended.attempt < ended.max_attempts);
    let node = world.join(4).await;
    let mut others = Vec::new();
    while let [claimed] = world.claim(node, 50).await.as_slice() {
        others.push(claimed.run);
        world.complete(claimed).await;
    }
    others.sort();
    assert_eq!(others, [made[0], made[2]]);
    world.assert_whole().await;
}

async fn a_suspect_that_waits_holds_back_those_behind_it_at_its_gate_and_nobody_else(store: &impl Store) {
    let mut world = World::new(store);
    let limited = AgentDefinition { max_concurrent: Some(2), ..AgentDefinition::default() };
    let [a, b, c] = [("a", &limited), ("b", &limited), ("c", &unlimited())]
        .map(|(name, definition)| agent(name, definition.clone(), &[("s", every("1h"))]));
    world.apply(&[a, b, c]).await;
    let made = [world.enqueue("a/s", None).await.0, world.enqueue("c/s", None).await.0];
    for node in 1..3 {
        let node = world.join(node).await;
        while !world.claim(node, 50).await.is_empty() {}
        die(&mut world, node).await;
    }
    let node = world.join(3).await;
    let (behind, other, free) = (
        world.enqueue("a/s", None).await.0,
        world.enqueue("b/s", None).await.0,
        world.enqueue("c/s", None).await.0,
    );
    let ids = |claimed: Vec<Claimed>| claimed.iter().map(|run| run.run).collect::<BTreeSet<_>>();
    assert_eq!(ids(world.claim_with(node, 50, Rescues::Unsuspected).await), BTreeSet::from([other, free]));
    assert_eq!(ids(world.claim(node, 50).await), BTreeSet::from([made[0], behind]));
    assert_eq!(ids(world.claim(node, 50).await), BTreeSet::from([made[1]]));
    world.assert_whole().await;
}

async fn nobody_is_suspect_after_a_renewal(store: &impl Store) {
    let (mut world, _) = after_a_death(store, 2).await;
    for death in 2..4 {
        let node = world.join(death).await;
        let claimed = world.claim(node, 50).await.remove(0);
        store.renew(node, world.now + SignedDuration::from_secs(30)).await.unwrap();
        let rescued = die(&mut world, node).await;
        assert_eq!(
            (rescued.pending.as_slice(), rescued.suspects.as_slice()),
            ([claimed.run].as_slice(), [].as_slice())
        );
    }
    // A run that has ended has not killed the node.
    let node = world.join(5).await;
    let first = world.claim(node, 50).await.remove(0);
    let last = world.claim(node, 50).await.remove(0);
    world.complete(&last).await;
    assert_eq!(die(&mut world, node).await.suspects, [first.run]);
}

async fn a_suspect_that_has_outlived_a_renewal_is_none_any_more(store: &impl Store) {
    let (mut world, _) = after_a_death(store, 1).await;
    let mut is_suspect = Vec::new();
    for (death, renews) in [(2, false), (3, true), (4, false)] {
        let node = world.join(death).await;
        is_suspect.push(world.claim(node, 50).await[0].suspect);
        if renews {
            store.renew(node, world.now + SignedDuration::from_secs(30)).await.unwrap();
        }
        die(&mut world, node).await;
    }
    assert_eq!(is_suspect, [false, true, false]);
}
