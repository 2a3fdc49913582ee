//! Sentences about what became of ticks.

use belfry_core::definition::{AnchorName, IfRunning, Options, When};
use belfry_core::{AgentDefinition, RunState, ScheduleDefinition, ScheduleId, SkipReason};
use belfry_store::*;
use belfry_time::{SignedDuration, Timestamp};

use super::world::*;

/// All of them, each on a store of its own.
pub async fn all<S: Store>(fresh: impl AsyncFn() -> S) {
    every_tick_tells_what_became_of_it(&fresh().await).await;
    old_definitions_are_kept_with_their_revision(&fresh().await).await;
    skips_are_listed_in_pages(&fresh().await).await;
    of_too_many_ticks_on_time_each_tells_what_became_of_it(&fresh().await).await;
    live_runs_stand_in_the_order_of_starting_and_nodes_name_their_limit(&fresh().await).await;
}

fn minute(minutes: i64) -> Timestamp {
    start() + SignedDuration::from_mins(minutes)
}

/// The fate of a tick in a word.
async fn fate(store: &impl Store, id: ScheduleId, minutes: i64) -> String {
    match store.tick(id, minute(minutes)).await.unwrap() {
        TickFate::Run(run) => {
            assert_eq!(run.tick_at, Some(minute(minutes)));
            run.state.to_string()
        }
        TickFate::Skipped(range) => {
            assert!(range.from <= minute(minutes) && minute(minutes) <= range.to);
            format!("{} of {}", range.reason, range.count)
        }
        TickFate::Open(range) => format!("{} of {} so far", range.reason, range.count),
        TickFate::Unknown => "unknown".into(),
    }
}

async fn every_tick_tells_what_became_of_it(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", AgentDefinition::default(), &[("s", cron("*/5 * * * *"))])]).await;
    world.plan_all().await;
    let id = world.schedule("a/s").await.id;
    let step = 5 * 60_000;
    // 5 completes, 10 fails, 15 runs on while 20 and 25 are skipped, 30 and 35 fall into downtime.
    for failed in [false, true] {
        world.advance(step);
        world.plan_all().await;
        let claimed = world.claim(node, 1).await.remove(0);
        let retryable = false;
        let reason = belfry_core::Reason::Error;
        let failed_for_good = belfry_core::retry::Outcome::Failed { reason, retryable };
        let outcome = if failed { failed_for_good } else { belfry_core::retry::Outcome::Completed };
        world.finish(&claimed, outcome).await;
    }
    world.advance(step);
    world.plan_all().await;
    let running = world.claim(node, 1).await.remove(0);
    for _ in 0..2 {
        world.advance(step);
        world.plan_all().await;
    }
    assert_eq!(fate(store, id, 20).await, "already_running of 2 so far");
    world.complete(&running).await;
    world.advance(3 * step);
    assert_eq!(fate(store, id, 30).await, "unknown", "nobody has planned it");
    world.plan_all().await;
    let fates = [
        (0, "unknown"),
        (5, "completed"),
        (10, "failed"),
        (15, "completed"),
        (20, "already_running of 2"),
        (25, "already_running of 2"),
        (30, "missed_skip of 2"),
        (35, "missed_skip of 2"),
        (40, "pending"),
        (45, "unknown"),
    ];
    for (minutes, expected) in fates {
        assert_eq!(fate(store, id, minutes).await, expected, "minute {minutes}");
    }
    // A pause that lasts is one open range, counted when it is looked at.
    store.pause(world.now, id, None, None).await.unwrap();
    world.advance(4 * step);
    assert_eq!(fate(store, id, 45).await, "disabled of 1 so far");
    assert_eq!(fate(store, id, 60).await, "disabled of 4 so far");
    assert_eq!(fate(store, id, 5).await, "completed");
    assert_eq!(store.tick(-1, world.now).await.unwrap(), TickFate::Unknown, "there is no such schedule");
    assert_eq!(store.run(running.run).await.unwrap().unwrap().state, RunState::Completed);
    let retention = retention(world.now, world.now, 100);
    store.prune(world.now, &retention).await.unwrap();
    assert_eq!(fate(store, id, 5).await, "unknown", "it was too long ago");
    assert_eq!(fate(store, id, 20).await, "unknown");
}

async fn old_definitions_are_kept_with_their_revision(store: &impl Store) {
    let mut world = World::new(store);
    let before = world.now;
    world.advance(60_000);
    world.apply(&[agent("a", unlimited(), &[("s", every("1m"))])]).await;
    let first = world.now;
    world.advance(60_000);
    world.apply(&[agent("a", unlimited(), &[("s", every("2m"))])]).await;
    let second = world.now;
    let id = world.schedule("a/s").await.id;
    let just_before = second - SignedDuration::from_micros(1);
    let cases = [
        (before, None),
        (first, Some((1, every("1m")))),
        (just_before, Some((1, every("1m")))),
        (second, Some((2, every("2m")))),
        (second + SignedDuration::from_hours(9), Some((2, every("2m")))),
    ];
    for (at, expected) in cases {
        assert_eq!(store.revision_at(id, at).await.unwrap(), expected, "{at}");
    }
    assert_eq!(store.revision_at(-1, second).await.unwrap(), None);
    for minutes in 3..103 {
        world.advance(60_000);
        world.apply(&[agent("a", unlimited(), &[("s", every(&format!("{minutes}m")))])]).await;
    }
    let third = second + SignedDuration::from_mins(1);
    assert_eq!(
        store.revision_at(id, third - SignedDuration::from_micros(1)).await.unwrap(),
        None,
        "the last 100"
    );
    assert_eq!(store.revision_at(id, third).await.unwrap(), Some((3, every("3m"))));
    assert_eq!(store.revision_at(id, world.now).await.unwrap(), Some((102, every("102m"))));
}

async fn skips_are_listed_in_pages(store: &impl Store) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("s", cron("* * * * *"))])]).await;
    world.plan_all().await;
    let id = world.schedule("a/s").await.id;
    for _ in 0..5 {
        // Downtime, then a tick on time; the run does not outlive it.
        world.advance(10 * 60_000);
        world.plan_all().await;
        for run in store.live_runs().await.unwrap() {
            store.cancel(world.now, run.id, belfry_core::Reason::Requested).await.unwrap();
        }
    }
    let all = store.skips(id, None, 100).await.unwrap();
    assert_eq!(all.len(), 5);
    assert!(all.iter().all(|range| (range.reason, range.count) == (SkipReason::MissedSkip, 9)));
    let (mut paged, mut after) = (Vec::new(), None);
    loop {
        let page = store.skips(id, after, 2).await.unwrap();
        let Some(last) = page.last() else { break };
        after = Some(last.from);
        paged.extend(page);
    }
    assert_eq!(paged, all);
}

async fn of_too_many_ticks_on_time_each_tells_what_became_of_it(store: &impl Store) {
    let mut world = World::new(store);
    let options = Options {
        anchor: AnchorName::Slot,
        late_after_ms: Some(20 * 60_000),
        if_running: IfRunning::Allow,
        ..Options::default()
    };
    world.apply(&[agent("a", unlimited(), &[("s", schedule(When::Every("1s".into()), options))])]).await;
    world.plan_all().await;
    let id = world.schedule("a/s").await.id;
    // Half an hour without a node: 599 ticks are late, 1,201 on time.
    world.advance(30 * 60_000);
    assert_eq!(world.plan_all().await, 1_000);
    let fate = async |second: i64| {
        let at = start() + SignedDuration::from_secs(second);
        match store.tick(id, at).await.unwrap() {
            TickFate::Run(run) => run.trigger.to_string(),
            TickFate::Skipped(range) => format!("{} of {}", range.reason, range.count),
            other => format!("{other:?}"),
        }
    };
    let fates = [
        (1, "missed_run_once of 598"),
        (598, "missed_run_once of 598"),
        (599, "catch_up"),
        (600, "queue_full of 202"),
        (801, "queue_full of 202"),
        (802, "schedule"),
        (1800, "schedule"),
        (1801, "Unknown"),
    ];
    for (second, expected) in fates {
        assert_eq!(fate(second).await, expected, "second {second}");
    }
    world.assert_whole().await;
}

async fn live_runs_stand_in_the_order_of_starting_and_nodes_name_their_limit(store: &impl Store) {
    let mut world = World::new(store);
    world.join(1).await;
    let with = |priority| {
        let options = Options { priority, ..Options::default() };
        ScheduleDefinition { options, ..cron("0 0 1 1 *") }
    };
    let schedules = [("high", with(5)), ("low", with(-5)), ("plain", with(0))];
    world.apply(&[agent("a", AgentDefinition::default(), &schedules)]).await;
    for name in ["a/low", "a/plain", "a/high"] {
        world.enqueue(name, None).await;
        world.advance(1);
    }
    let live = store.live_runs().await.unwrap();
    let names: Vec<&str> = live.iter().map(|run| run.name.as_str()).collect();
    assert_eq!(names, ["a/high", "a/plain", "a/low"]);
    let limits: Vec<_> = store.nodes().await.unwrap().iter().map(|node| node.max_concurrent).collect();
    assert_eq!(limits, [Some(11)]);
}
