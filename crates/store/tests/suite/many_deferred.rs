//! Many clients at once on a lane that is limited in what may wait.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use belfry_core::definition::{AnchorName, Options, When};
use belfry_core::edit::Resume;
use belfry_core::{Reason, TokenKind};
use belfry_store::*;
use belfry_time::Timestamp;

use super::Random;
use super::deferring::{deferred, lane};
use super::world::*;

/// So many may wait, at most.
const MOST: u32 = 4;

/// Many planners, claimers and others at once on a lane with a limit that changes: never more wait than may, and when they
/// have gone nobody is forgotten.
pub async fn many<S: Store>(store: Arc<S>, seed: u64, duration: Duration) {
    let slot =
        || schedule(When::Every("100ms".into()), Options { anchor: AnchorName::Slot, ..Options::default() });
    let names: Vec<String> = (0..40).map(|n| format!("s{n}")).collect();
    let schedules: Vec<_> = names.iter().map(|name| (name.as_str(), slot())).collect();
    store.apply(clock(), "files", "digest", &[agent("a", unlimited(), &schedules)]).await.unwrap();
    store.set_lane(clock(), "cron", lane(Some(MOST))).await.unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let runs = Arc::new(AtomicU64::new(0));
    let clients: Vec<_> = (0..8_u64)
        .map(|n| {
            let random = Random(seed.wrapping_add(n * 7919));
            tokio::spawn(client(store.clone(), n, random, over.clone(), runs.clone()))
        })
        .collect();
    let end = Instant::now() + duration;
    while Instant::now() < end {
        let waiting = store.counts().await.unwrap().pending;
        assert!(waiting <= u64::from(MOST), "{waiting} wait");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    over.store(true, Ordering::SeqCst);
    for client in clients {
        client.await.unwrap();
    }
    assert!(runs.load(Ordering::SeqCst) > 50, "{runs:?}");
    let mut world = World::new(&*store);
    world.assert_whole().await;
    // Whoever was deferred still comes to his turn.
    world.ids_from(99 << 40);
    world.now = clock();
    let node = world.join(99).await;
    let waited: Vec<String> = deferred(&world).await.into_iter().map(|(name, _)| name).collect();
    let mut ran = HashSet::new();
    for _ in 0..1000 {
        let due: Vec<Due> = store.due(world.now, None, 100).await.unwrap();
        let due = due.iter().filter(|due| due.standing.token.kind == TokenKind::Deferred);
        let commits: Vec<Commit> = due.map(|due| world.decide(due)).collect();
        store.commit(world.now, &commits).await.unwrap();
        for claimed in world.claim(node, 1).await {
            ran.insert(claimed.schedule);
            world.complete(&claimed).await;
        }
        if deferred(&world).await.is_empty() && store.counts().await.unwrap().pending == 0 {
            break;
        }
    }
    for name in waited {
        assert!(ran.contains(&world.schedule(&name).await.id), "{name} never ran");
    }
    world.assert_whole().await;
}

/// Planners that plan what is due at once, each a part of it: together they let no more wait than may.
pub async fn bursts<S: Store>(store: Arc<S>) {
    let names: Vec<String> = (0..24).map(|n| format!("s{n}")).collect();
    let schedules: Vec<_> = names.iter().map(|name| (name.as_str(), cron("* * * * *"))).collect();
    let mut world = World::new(&*store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    world.plan_all().await;
    for round in 0..20 {
        store.set_lane(world.now, "cron", lane(Some(MOST))).await.unwrap();
        world.advance(60_000);
        let due = store.due(world.now, None, 100).await.unwrap();
        assert_eq!(due.len(), 24, "round {round}");
        let commits: Vec<Commit> = due.iter().map(|due| world.decide(due)).collect();
        let planners: Vec<_> = commits
            .chunks(6)
            .map(|part| {
                let (store, part, now) = (store.clone(), part.to_vec(), world.now);
                tokio::spawn(async move { store.commit(now, &part).await.unwrap() })
            })
            .collect();
        let mut held = 0;
        for planner in planners {
            let answers = planner.await.unwrap();
            assert!(!answers.contains(&Committed::Lost), "{answers:?}");
            held += answers.iter().filter(|answer| **answer == Committed::Held).count();
        }
        assert_eq!(held, MOST as usize, "round {round}");
        world.assert_whole().await;
        store.set_lane(world.now, "cron", None).await.unwrap();
        assert_eq!(world.plan_all().await, 24 - held);
        let claimed = world.claim(node, 30).await;
        assert_eq!(claimed.len(), 24);
        for claimed in claimed {
            world.complete(&claimed).await;
        }
    }
}

fn clock() -> Timestamp {
    Timestamp::from_millisecond(Timestamp::now().as_millisecond()).unwrap()
}

async fn client<S: Store>(
    store: Arc<S>,
    n: u64,
    mut random: Random,
    over: Arc<AtomicBool>,
    runs: Arc<AtomicU64>,
) {
    let mut world = World::new(&*store);
    world.ids_from(u128::from(n + 1) << 40);
    world.now = clock();
    let node = world.join(u128::from(n)).await;
    while !over.load(Ordering::SeqCst) {
        world.now = clock();
        match (n, random.below(20)) {
            (0..=3, _) => {
                let due = store.due(world.now, None, 1 + random.below(20) as u32).await.unwrap();
                let commits: Vec<Commit> = due.iter().map(|due| world.decide(due)).collect();
                store.commit(world.now, &commits).await.unwrap();
            }
            (4, 0) => {
                let less = [None, Some(1), Some(2), Some(MOST)][random.below(4)];
                let most = less.or(Some(MOST - 1));
                store.set_lane(world.now, "cron", lane(most)).await.unwrap();
            }
            (4, 1) => {
                let name = format!("a/s{}", random.below(40));
                let id = world.schedule(&name).await.id;
                store.pause(world.now, id, None, None).await.unwrap();
                store.resume(world.now, id, Resume::Skip).await.unwrap();
            }
            (4, 2..=6) => {
                for run in store.live_runs().await.unwrap().iter().take(2) {
                    store.cancel(world.now, run.id, Reason::Requested).await.unwrap();
                }
            }
            (4, 7) => drop(store.clear_lane(world.now, "cron").await.unwrap()),
            _ => {
                for claimed in world.claim(node, 1 + random.below(3) as u32).await {
                    runs.fetch_add(1, Ordering::SeqCst);
                    world.complete(&claimed).await;
                }
            }
        }
        tokio::task::yield_now().await;
    }
}
