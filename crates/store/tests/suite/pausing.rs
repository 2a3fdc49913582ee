//! Sentences about pauses that end by themselves.

use belfry_core::check::Status;
use belfry_core::definition::{Options, When};
use belfry_core::edit::Resume;
use belfry_core::{AgentDefinition, SkipRange, SkipReason, Token};
use belfry_store::*;
use belfry_time::SignedDuration;

use super::world::*;

/// All of them, each on a store of its own.
pub async fn all<S: Store>(fresh: impl AsyncFn() -> S) {
    a_pause_ends_at_its_instant(&fresh().await).await;
    a_pause_that_ends_in_downtime_ends_at_its_instant(&fresh().await).await;
    the_last_word_about_a_pause_counts(&fresh().await).await;
    a_pause_outlives_an_edit(&fresh().await).await;
    an_edit_after_the_end_of_a_pause_fires_nothing_before_it(&fresh().await).await;
    the_end_of_a_pause_waits_for_the_run(&fresh().await).await;
    what_never_ticks_is_paused_too(&fresh().await).await;
}

fn disabled(from: i64, to: i64, count: u64) -> SkipRange {
    let minute = |minutes| start() + SignedDuration::from_mins(minutes);
    SkipRange { reason: SkipReason::Disabled, from: minute(from), to: minute(to), count }
}

async fn paused(store: &impl Store, until_ms: i64) -> World<'_, impl Store> {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("s", cron("*/5 * * * *"))])]).await;
    world.plan_all().await;
    let until = world.now + SignedDuration::from_millis(until_ms);
    let id = world.schedule("a/s").await.id;
    assert!(store.pause(world.now, id, Some("maintenance"), Some(until)).await.unwrap());
    assert_eq!(store.next_due().await.unwrap(), Some(until));
    world
}

async fn a_pause_ends_at_its_instant(store: &impl Store) {
    let mut world = paused(store, 754_567).await;
    world.advance(754_566);
    assert_eq!(world.plan_all().await, 0);
    assert!(matches!(world.schedule("a/s").await.status, Status::Paused { .. }), "not a millisecond early");
    world.assert_whole().await;
    world.advance(1);
    assert_eq!(world.plan_all().await, 0);
    let record = world.schedule("a/s").await;
    assert_eq!((&record.status, record.status_since), (&Status::Active, world.now));
    assert_eq!(record.token.unwrap().tick_at, start() + SignedDuration::from_mins(15));
    assert_eq!(store.skips(record.id, None, 1000).await.unwrap(), [disabled(5, 10, 2)]);
    world.advance(15 * 60_000 - 754_567);
    assert_eq!(world.plan_all().await, 1);
    world.assert_whole().await;
}

async fn a_pause_that_ends_in_downtime_ends_at_its_instant(store: &impl Store) {
    let mut world = paused(store, 754_567).await;
    world.advance(21 * 60_000);
    assert_eq!(world.plan_all().await, 1, "the tick of a minute ago is on time");
    let record = world.schedule("a/s").await;
    assert_eq!(record.status, Status::Active);
    let missed = SkipRange::one(SkipReason::MissedSkip, start() + SignedDuration::from_mins(15));
    assert_eq!(
        store.skips(record.id, None, 1000).await.unwrap(),
        [disabled(5, 10, 2), missed],
        "downtime begins where the pause ended"
    );
    world.assert_whole().await;
}

async fn the_last_word_about_a_pause_counts(store: &impl Store) {
    let mut world = paused(store, 600_000).await;
    let id = world.schedule("a/s").await.id;
    let until = Some(world.now + SignedDuration::from_mins(10));
    assert!(!store.pause(world.now, id, Some("maintenance"), until).await.unwrap(), "it is so already");
    world.advance(60_000);
    // A pause without an end takes the place of the one that has one.
    assert!(store.pause(world.now, id, None, None).await.unwrap());
    let record = world.schedule("a/s").await;
    assert_eq!(record.status, Status::Paused { reason: None, until: None });
    assert_eq!((record.status_since, record.token), (start(), None), "it goes on since it began");
    world.assert_whole().await;
    let until = start() + SignedDuration::from_mins(30);
    assert!(store.pause(world.now, id, None, Some(until)).await.unwrap());
    assert_eq!(world.schedule("a/s").await.token, Some(Token::resume(start(), until)));
    // A resume by hand takes the end away; a plan that was decided on it is not committed.
    world.advance(29 * 60_000);
    let due = store.due(world.now, None, 10).await.unwrap();
    let commit = world.decide(&due[0]);
    assert_eq!(store.resume(world.now, id, Resume::Skip).await.unwrap(), Some(6));
    assert_eq!(store.commit(world.now, &[commit]).await.unwrap(), [Committed::Lost]);
    world.plan_all().await;
    assert_eq!(world.schedule("a/s").await.token.unwrap().tick_at, start() + SignedDuration::from_mins(35));
    assert_eq!(store.resume(world.now, id, Resume::Skip).await.unwrap(), None);
    assert_eq!(store.skips(id, None, 1000).await.unwrap(), [disabled(5, 30, 6)]);
    world.assert_whole().await;
}

async fn a_pause_outlives_an_edit(store: &impl Store) {
    let mut world = paused(store, 30 * 60_000).await;
    let until = start() + SignedDuration::from_mins(30);
    world.advance(12 * 60_000);
    world.apply(&[agent("a", unlimited(), &[("s", cron("*/7 * * * *"))])]).await;
    let record = world.schedule("a/s").await;
    assert_eq!(record.token, Some(Token::resume(start(), until)), "and so does its end");
    assert_eq!(
        store.skips(record.id, None, 1000).await.unwrap(),
        [disabled(5, 10, 2)],
        "by the old timing so far"
    );
    world.assert_whole().await;
    let off = schedule(When::Cron("*/7 * * * *".into()), Options { enabled: false, ..Options::default() });
    world.apply(&[agent("a", unlimited(), &[("s", off)])]).await;
    world.advance(18 * 60_000);
    assert_eq!(world.plan_all().await, 0);
    let record = world.schedule("a/s").await;
    assert_eq!((record.status, record.token), (Status::Disabled, None), "a pause that ends enables nothing");
    assert_eq!(
        store.skips(record.id, None, 1000).await.unwrap(),
        [disabled(5, 10, 2), disabled(14, 28, 3)],
        "and by the new timing since"
    );
    world.assert_whole().await;
}

async fn an_edit_after_the_end_of_a_pause_fires_nothing_before_it(store: &impl Store) {
    let mut world = paused(store, 12 * 60_000).await;
    // Nobody has planned the end of the pause, nor what came after it.
    world.advance(21 * 60_000);
    world.apply(&[agent("a", unlimited(), &[("s", cron("* * * * *"))])]).await;
    assert_eq!(world.plan_all().await, 0);
    let record = world.schedule("a/s").await;
    assert_eq!((record.status, record.revision), (Status::Active, 2));
    assert_eq!(record.token.unwrap().tick_at, start() + SignedDuration::from_mins(22));
    let overdue = SkipRange { reason: SkipReason::Edited, ..disabled(15, 20, 2) };
    assert_eq!(store.skips(record.id, None, 1000).await.unwrap(), [disabled(5, 10, 2), overdue]);
    world.assert_whole().await;
}

async fn the_end_of_a_pause_waits_for_the_run(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", AgentDefinition::default(), &[("s", every("5m"))])]).await;
    world.plan_all().await;
    let claimed = world.claim(node, 1).await.remove(0);
    let id = world.schedule("a/s").await.id;
    let until = world.now + SignedDuration::from_mins(1);
    assert!(store.pause(world.now, id, None, Some(until)).await.unwrap());
    world.assert_whole().await;
    world.advance(120_000);
    assert_eq!(world.plan_all().await, 0);
    let record = world.schedule("a/s").await;
    assert_eq!((record.status, record.token, record.waits_for), (Status::Active, None, Some(claimed.run)));
    world.assert_whole().await;
    world.complete(&claimed).await;
    world.plan_all().await;
    let next = world.now + SignedDuration::from_mins(5);
    assert_eq!(world.schedule("a/s").await.token.unwrap().tick_at, next, "end + every");
}

async fn what_never_ticks_is_paused_too(store: &impl Store) {
    let mut world = World::new(store);
    world.apply(&fleet(1)).await;
    let id = world.schedule("free/hook").await.id;
    let until = world.now + SignedDuration::from_mins(1);
    assert!(store.pause(world.now, id, None, Some(until)).await.unwrap());
    world.advance(60_000);
    world.plan_all().await;
    let record = world.schedule("free/hook").await;
    assert_eq!((record.status, record.status_since, record.token), (Status::Active, until, None));
    world.assert_whole().await;
}
