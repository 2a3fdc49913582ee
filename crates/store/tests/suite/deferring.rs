//! Sentences about lanes that are full: whose ticks wait, and who goes first.

use belfry_core::definition::{AnchorName, Breaker, CatchUp, IfRunning, Options, When};
use belfry_core::edit::Resume;
use belfry_core::retry::Outcome;
use belfry_core::{AgentDefinition, Reason, SkipRange, SkipReason, TokenKind};
use belfry_store::*;
use belfry_time::{SignedDuration, Timestamp};

use super::world::*;

/// All of them, each on a store of its own.
pub async fn all<S: Store>(fresh: &impl AsyncFn() -> S) {
    a_full_lane_defers_ticks_and_arms_the_oldest_first(&fresh().await).await;
    a_tick_that_was_deferred_is_not_late(&fresh().await).await;
    a_tick_that_was_deferred_does_not_wait_for_a_clock_that_was_set_back(&fresh().await).await;
    a_deferred_tick_that_lies_ahead_of_the_clock_starts(&fresh().await).await;
    plans_that_reach_the_store_after_the_clock_was_set_back_do_not_wait_for_it(&fresh().await).await;
    after_the_clock_was_set_back_a_tick_that_was_deferred_comes_after_earlier_ones(&fresh().await).await;
    who_was_deferred_is_not_overtaken(&fresh().await).await;
    a_tick_whose_run_lives_already_is_deferred_like_any_other(&fresh().await).await;
    a_batch_that_has_room_is_made_whole(&fresh().await).await;
    whoever_leaves_makes_room(&fresh().await).await;
    a_limit_that_is_raised_or_gone_makes_room(&fresh().await).await;
    a_place_that_is_not_taken_goes_to_the_next(&fresh().await).await;
    what_takes_a_schedule_away_records_what_was_deferred(&fresh().await).await;
    a_schedule_that_changes_its_lane_waits_in_the_other(&fresh().await).await;
    runs_by_hand_wait_whatever_the_limit(&fresh().await).await;
    a_run_that_waits_for_its_retry_takes_no_place(&fresh().await).await;
    runs_that_wait_for_their_turn_behind_a_retry_take_no_place(&fresh().await).await;
    a_run_that_waits_for_its_turn_behind_a_retry_in_another_lane_takes_no_place(&fresh().await).await;
    messages_take_no_place(&fresh().await).await;
    runs_that_a_budget_holds_take_no_place(&fresh().await).await;
    a_run_that_was_asked_for_with_a_delay_takes_no_place(&fresh().await).await;
    a_run_whose_label_no_node_has_takes_no_place(&fresh().await).await;
    plans_of_many_kinds_share_one_limit(&fresh().await).await;
}

fn minute(minutes: i64) -> Timestamp {
    start() + SignedDuration::from_mins(minutes)
}

fn queue_full(from: i64, to: i64, count: u64) -> SkipRange {
    SkipRange { reason: SkipReason::QueueFull, from: minute(from), to: minute(to), count }
}

pub fn lane(queue_limit: Option<u32>) -> Option<LaneSettings> {
    Some(LaneSettings { slots: 30, limit: None, queue_limit })
}

/// Schedules `s0`, `s1` and so on that tick each minute, one second apart, from the next minute on.
async fn minutely(store: &impl Store, count: usize, queue_limit: u32) -> World<'_, impl Store> {
    let mut world = World::new(store);
    world.advance(30_000);
    let slot = |n: usize| {
        let options =
            Options { anchor: AnchorName::Slot, phase: Some(format!("{n}s")), ..Options::default() };
        schedule(When::Every("1m".into()), options)
    };
    let names: Vec<String> = (0..count).map(|n| format!("s{n}")).collect();
    // The last first, so that their numbers are no help.
    let schedules: Vec<_> =
        names.iter().enumerate().rev().map(|(n, name)| (name.as_str(), slot(n))).collect();
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    store.set_lane(world.now, "cron", lane(Some(queue_limit))).await.unwrap();
    world.plan_all().await;
    world
}

/// Names of the schedules that are deferred, and whether they are armed, the oldest first.
pub async fn deferred<S: Store>(world: &World<'_, S>) -> Vec<(String, bool)> {
    let all = world.store.schedules(&ScheduleFilter::default(), None, 100).await.unwrap().items;
    let mut found: Vec<_> = all
        .into_iter()
        .filter_map(|record| Some((record.deferred.clone()?.since, record.name.clone(), record)))
        .collect();
    found.sort_by_key(|(since, name, _)| (*since, name.clone()));
    let armed = |record: &ScheduleRecord| record.token.is_some_and(|token| token.kind == TokenKind::Deferred);
    found.into_iter().map(|(_, name, record)| (name, armed(&record))).collect()
}

fn waits(name: &str) -> (String, bool) {
    (name.to_owned(), false)
}

fn armed(name: &str) -> (String, bool) {
    (name.to_owned(), true)
}

async fn a_full_lane_defers_ticks_and_arms_the_oldest_first(store: &impl Store) {
    let mut world = minutely(store, 5, 2).await;
    let node = world.join(1).await;
    for n in 0..5 {
        world.now = minute(1) + SignedDuration::from_secs(n);
        world.plan_all().await;
        world.assert_whole().await;
    }
    assert_eq!(store.counts().await.unwrap().pending, 2);
    assert_eq!(deferred(&world).await, [waits("a/s2"), waits("a/s3"), waits("a/s4")]);
    let record = world.schedule("a/s2").await;
    let since = minute(1) + SignedDuration::from_secs(2);
    let expected = Deferred { lane: "cron".into(), tick_at: since, since };
    assert_eq!((record.deferred, record.token), (Some(expected), None), "it has left the due index");
    assert_eq!(store.next_due().await.unwrap(), Some(minute(2)));
    // One that starts makes room for one.
    assert_eq!(world.claim(node, 1).await.len(), 1);
    assert_eq!(deferred(&world).await, [armed("a/s2"), waits("a/s3"), waits("a/s4")]);
    world.assert_whole().await;
    assert_eq!(store.next_due().await.unwrap(), Some(since), "and is due at once");
    assert_eq!(world.plan_all().await, 1);
    assert_eq!(deferred(&world).await, [waits("a/s3"), waits("a/s4")]);
    assert_eq!(world.claim(node, 2).await.len(), 2);
    assert_eq!(deferred(&world).await, [armed("a/s3"), armed("a/s4")]);
    assert_eq!(world.plan_all().await, 2);
    let names: Vec<String> = store.live_runs().await.unwrap().into_iter().map(|run| run.name).collect();
    assert_eq!(names, ["a/s0", "a/s1", "a/s2", "a/s3", "a/s4"], "in the order of their ticks");
    assert_eq!(deferred(&world).await, []);
    world.assert_whole().await;
}

async fn a_tick_that_was_deferred_is_not_late(store: &impl Store) {
    let mut world = minutely(store, 2, 1).await;
    let node = world.join(1).await;
    world.now = minute(1) + SignedDuration::from_secs(1);
    assert_eq!(world.plan_all().await, 1);
    // Nobody starts anything for an hour.
    world.now = minute(61) + SignedDuration::from_secs(30);
    world.plan_all().await;
    assert_eq!(deferred(&world).await, [waits("a/s1")]);
    world.claim(node, 1).await;
    assert_eq!(world.plan_all().await, 1);
    let run = store.live_runs().await.unwrap().into_iter().find(|run| run.name == "a/s1").unwrap();
    let tick_at = minute(1) + SignedDuration::from_secs(1);
    assert_eq!((run.tick_at, run.not_before), (Some(tick_at), tick_at));
    assert_eq!(run.trigger, belfry_core::Trigger::Schedule);
    let record = world.schedule("a/s1").await;
    let second = SignedDuration::from_secs(1);
    let left_out = queue_full(2, 61, 60);
    let left_out = SkipRange { from: left_out.from + second, to: left_out.to + second, ..left_out };
    assert_eq!((record.open_skip, record.deferred), (Some(left_out), None));
    assert_eq!(record.token.unwrap().tick_at, minute(62) + second);
    assert!(store.skips(record.id, None, 10).await.unwrap().is_empty());
    world.assert_whole().await;
}

async fn a_tick_that_was_deferred_does_not_wait_for_a_clock_that_was_set_back(store: &impl Store) {
    let mut world = minutely(store, 4, 1).await;
    let node = world.join(1).await;
    assert!(world.claim(node, 1).await.is_empty());
    world.now = minute(61) + SignedDuration::from_secs(5);
    world.plan_all().await;
    assert_eq!(deferred(&world).await, [waits("a/s1"), waits("a/s2"), waits("a/s3")]);
    assert_eq!(world.claim(node, 1).await.len(), 1);
    assert_eq!(deferred(&world).await, [armed("a/s1"), waits("a/s2"), waits("a/s3")]);
    // The lane has room, and the ticks lie ahead of the clock by 59 minutes.
    world.now = minute(2);
    for n in 1..4 {
        assert!(world.claim(node, 1).await.is_empty());
        assert_eq!(world.plan_all().await, 1, "a/s{n}");
        let claimed = world.claim(node, 1).await;
        let run = store.run(claimed[0].run).await.unwrap().unwrap();
        assert_eq!(run.name, format!("a/s{n}"), "in the order in which they were deferred");
        world.complete(&claimed[0]).await;
        world.assert_whole().await;
    }
    assert_eq!(deferred(&world).await, []);
}

async fn a_deferred_tick_that_lies_ahead_of_the_clock_starts(store: &impl Store) {
    let mut world = minutely(store, 2, 1).await;
    let node = world.join(1).await;
    for minutes in 1..61 {
        world.now = minute(minutes) + SignedDuration::from_secs(5);
        world.plan_all().await;
        while let Some(claimed) = world.claim(node, 1).await.pop() {
            world.plan_all().await;
            world.complete(&claimed).await;
        }
    }
    world.now = minute(61) + SignedDuration::from_secs(5);
    world.plan_all().await;
    assert_eq!(deferred(&world).await, [waits("a/s1")]);
    world.now = minute(2);
    for name in ["a/s0", "a/s1"] {
        let claimed = world.claim(node, 9).await;
        let run = store.run(claimed[0].run).await.unwrap().unwrap();
        assert_eq!(
            (run.name.as_str(), run.tick_at > Some(minute(61) - SignedDuration::from_secs(1))),
            (name, true)
        );
        world.plan_all().await;
        world.assert_whole().await;
    }
}

async fn plans_that_reach_the_store_after_the_clock_was_set_back_do_not_wait_for_it(store: &impl Store) {
    let mut world = minutely(store, 2, 1).await;
    let node = world.join(1).await;
    world.now = minute(61) + SignedDuration::from_secs(5);
    let late = world.now;
    assert!(world.claim(node, 1).await.is_empty());
    let due = store.due(late, None, 10).await.unwrap();
    let commits: Vec<_> = due.iter().map(|due| world.decide(due)).collect();
    world.now = minute(2);
    assert!(world.claim(node, 1).await.is_empty(), "the store has noticed it");
    let mut answers = Vec::new();
    for commit in &commits {
        answers.extend(store.commit(late, std::slice::from_ref(commit)).await.unwrap());
    }
    assert_eq!(answers, [Committed::Held, Committed::Deferred]);
    assert_eq!(world.claim(node, 1).await.len(), 1);
    assert_eq!(deferred(&world).await, [armed("a/s1")]);
    assert_eq!(world.plan_all().await, 1, "it does not wait for the later clock");
    assert_eq!(world.claim(node, 1).await.len(), 1);
    world.assert_whole().await;
}

/// The run of a deferred tick gets its id by the clock that was set back: the smaller one.
async fn after_the_clock_was_set_back_a_tick_that_was_deferred_comes_after_earlier_ones(store: &impl Store) {
    let mut world = World::new(store);
    world.advance(30_000);
    let options = Options {
        anchor: AnchorName::Slot,
        if_running: IfRunning::Queue,
        max_pending: 5,
        catch_up: Some(CatchUp::Skip),
        ..Options::default()
    };
    world.apply(&[agent("a", unlimited(), &[("s", schedule(When::Every("1m".into()), options))])]).await;
    store.set_lane(world.now, "cron", lane(Some(1))).await.unwrap();
    let node = world.join(1).await;
    for minutes in 61..63 {
        world.now = minute(minutes) + SignedDuration::from_secs(5);
        world.plan_all().await;
    }
    assert_eq!(deferred(&world).await, [waits("a/s")]);
    world.now = minute(2);
    assert!(world.claim(node, 0).await.is_empty(), "the store has noticed it");
    store.set_lane(world.now, "cron", lane(None)).await.unwrap();
    let mut due = store.due(world.now, None, 1).await.unwrap();
    let mut commit = world.decide(&due.pop().unwrap());
    commit.runs[0].id = belfry_core::RunId(uuid::Uuid::from_u128(1));
    assert_eq!(store.commit(world.now, &[commit]).await.unwrap(), [Committed::Held]);
    for minutes in 61..63 {
        let claimed = world.claim(node, 1).await;
        let run = store.run(claimed[0].run).await.unwrap().unwrap();
        assert_eq!(run.tick_at, Some(minute(minutes)));
        world.complete(&claimed[0]).await;
    }
    world.assert_whole().await;
}

async fn who_was_deferred_is_not_overtaken(store: &impl Store) {
    let mut world = minutely(store, 3, 1).await;
    let node = world.join(1).await;
    world.now = minute(1) + SignedDuration::from_secs(1);
    assert_eq!(world.plan_all().await, 1);
    assert_eq!(deferred(&world).await, [waits("a/s1")]);
    // A planner has decided about the third before there was room for the second.
    world.now = minute(1) + SignedDuration::from_secs(2);
    let due = store.due(world.now, None, 10).await.unwrap();
    let late = world.decide(&due[0]);
    world.claim(node, 1).await;
    assert_eq!(deferred(&world).await, [armed("a/s1")]);
    assert_eq!(store.commit(world.now, &[late]).await.unwrap(), [Committed::Deferred]);
    assert_eq!(deferred(&world).await, [armed("a/s1"), waits("a/s2")]);
    // Runs by hand may take the place; then it waits again, since then.
    world.enqueue("a/s0", None).await;
    assert_eq!(world.plan_all().await, 0);
    assert_eq!(deferred(&world).await, [waits("a/s1"), waits("a/s2")]);
    world.assert_whole().await;
    world.claim(node, 1).await;
    assert_eq!((world.plan_all().await, deferred(&world).await), (1, vec![waits("a/s2")]));
    world.assert_whole().await;
}

async fn a_tick_whose_run_lives_already_is_deferred_like_any_other(store: &impl Store) {
    let mut world = World::new(store);
    world.advance(30_000);
    world.apply(&[agent("a", unlimited(), &[("s0", super::refusing::allow("* * * * *"))])]).await;
    store.set_lane(world.now, "cron", lane(Some(1))).await.unwrap();
    world.plan_all().await;
    // It waits, and fills the lane.
    super::refusing::plant(&mut world, "a/s0").await;
    world.now = minute(1);
    let due = store.due(world.now, None, 10).await.unwrap();
    let commit = world.decide(&due[0]);
    assert_eq!(commit.runs.len(), 1);
    assert_eq!(store.commit(world.now, &[commit]).await.unwrap(), [Committed::Deferred]);
    assert_eq!(deferred(&world).await, [waits("a/s0")]);
    world.assert_whole().await;
}

async fn a_batch_that_has_room_is_made_whole(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let options = Options { catch_up: Some(CatchUp::RunAll), ..Options::default() };
    let all = schedule(When::Cron("* * * * *".into()), options);
    world.apply(&[agent("a", unlimited(), &[("all", all), ("one", cron("*/10 * * * *"))])]).await;
    store.set_lane(world.now, "cron", lane(Some(2))).await.unwrap();
    world.plan_all().await;
    world.now = minute(10);
    assert_eq!(world.plan_all().await, 9, "nine that were missed, and the tenth is left out while they live");
    assert_eq!(deferred(&world).await, [waits("a/one")]);
    assert_eq!(world.claim(node, 7).await.len(), 7);
    assert_eq!(deferred(&world).await, [waits("a/one")], "two wait still");
    assert_eq!(world.claim(node, 1).await.len(), 1);
    assert_eq!(deferred(&world).await, [armed("a/one")]);
    world.assert_whole().await;
}

async fn whoever_leaves_makes_room(store: &impl Store) {
    let mut world = minutely(store, 4, 1).await;
    for n in 0..4 {
        world.now = minute(1) + SignedDuration::from_secs(n);
        world.plan_all().await;
    }
    let first = store.live_runs().await.unwrap()[0].id;
    assert_eq!(store.cancel(world.now, first, Reason::Requested).await.unwrap(), Cancelled::Ended);
    assert_eq!(deferred(&world).await, [armed("a/s1"), waits("a/s2"), waits("a/s3")]);
    assert_eq!(world.plan_all().await, 1);
    assert_eq!(store.clear_lane(world.now, "cron").await.unwrap().len(), 1);
    assert_eq!(deferred(&world).await, [armed("a/s2"), waits("a/s3")]);
    assert_eq!(world.plan_all().await, 1);
    world.assert_whole().await;
    // What was retired takes its waiting run along.
    let kept = schedule(
        When::Every("1m".into()),
        Options { anchor: AnchorName::Slot, phase: Some("3s".into()), ..Options::default() },
    );
    world.apply(&[agent("a", unlimited(), &[("s3", kept)])]).await;
    assert_eq!(deferred(&world).await, [armed("a/s3")]);
    world.assert_whole().await;
}

async fn a_limit_that_is_raised_or_gone_makes_room(store: &impl Store) {
    let mut world = minutely(store, 5, 1).await;
    for n in 0..5 {
        world.now = minute(1) + SignedDuration::from_secs(n);
        world.plan_all().await;
    }
    store.set_lane(world.now, "cron", lane(Some(2))).await.unwrap();
    let after = deferred(&world).await;
    assert_eq!(after, [armed("a/s1"), waits("a/s2"), waits("a/s3"), waits("a/s4")]);
    world.assert_whole().await;
    // Lowering it ends nothing, but who has no place yet waits again.
    store.set_lane(world.now, "cron", lane(Some(1))).await.unwrap();
    assert_eq!((world.plan_all().await, deferred(&world).await[0].clone()), (0, waits("a/s1")));
    world.assert_whole().await;
    store.put_lanes(world.now, &[("cron".into(), lane(Some(2)).unwrap())]).await.unwrap();
    assert_eq!(deferred(&world).await[0], waits("a/s1"), "what was said counts");
    store.set_lane(world.now, "cron", None).await.unwrap();
    assert_eq!(deferred(&world).await[..2], [armed("a/s1"), waits("a/s2")]);
    store.put_lanes(world.now, &[]).await.unwrap();
    assert!(deferred(&world).await.iter().all(|(_, armed)| *armed));
    world.assert_whole().await;
    assert_eq!((world.plan_all().await, deferred(&world).await), (4, vec![]));
    world.assert_whole().await;
}

async fn a_place_that_is_not_taken_goes_to_the_next(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let broken = AgentDefinition {
        breaker: Some(Breaker { threshold: 1, reset_after_ms: 3_600_000 }),
        retry: belfry_core::definition::Retry { max: 0, ..Default::default() },
        ..unlimited()
    };
    let allow = |n: usize| {
        let options = Options {
            anchor: AnchorName::Slot,
            phase: Some(format!("{n}s")),
            if_running: IfRunning::Allow,
            ..Options::default()
        };
        schedule(When::Every("1m".into()), options)
    };
    world.advance(30_000);
    world
        .apply(&[
            agent("a", broken, &[("s0", allow(0)), ("s1", allow(1))]),
            agent("b", unlimited(), &[("s2", allow(2)), ("s3", allow(3))]),
        ])
        .await;
    store.set_lane(world.now, "cron", lane(Some(1))).await.unwrap();
    world.plan_all().await;
    for n in 0..4 {
        world.now = minute(1) + SignedDuration::from_secs(n);
        world.plan_all().await;
    }
    assert_eq!(deferred(&world).await, [waits("a/s1"), waits("b/s2"), waits("b/s3")]);
    let claimed = world.claim(node, 1).await;
    assert_eq!(deferred(&world).await[..2], [armed("a/s1"), waits("b/s2")]);
    world.finish(&claimed[0], Outcome::Failed { reason: Reason::ExitCode, retryable: true }).await;
    // The breaker is open now: the second makes no run, and leaves its place.
    assert_eq!(world.plan_all().await, 1);
    let skipped = world.schedule("a/s1").await.open_skip.unwrap();
    assert_eq!((skipped.reason, skipped.count), (SkipReason::CircuitOpen, 1));
    assert_eq!(deferred(&world).await, [waits("b/s3")]);
    world.assert_whole().await;
    // So does one that is paused before it was planned.
    world.claim(node, 1).await;
    assert_eq!(deferred(&world).await, [armed("b/s3")]);
    world.now = minute(2) + SignedDuration::from_secs(2);
    world.plan_all().await;
    world.assert_whole().await;
    world.claim(node, 1).await;
    let armed_one = deferred(&world).await.into_iter().find(|(_, armed)| *armed).unwrap().0;
    let before = deferred(&world).await.len();
    let id = world.schedule(&armed_one).await.id;
    assert!(store.pause(world.now, id, None, None).await.unwrap());
    let after = deferred(&world).await;
    assert_eq!(after.len(), before - 1);
    assert!(after.first().is_none_or(|(_, armed)| *armed), "{after:?}");
    world.assert_whole().await;
}

async fn what_takes_a_schedule_away_records_what_was_deferred(store: &impl Store) {
    let mut world = World::new(store);
    let five = || cron("*/5 * * * *");
    let names = ["edited", "full", "kept", "off", "paused", "removed"];
    let schedules: Vec<_> = names.iter().map(|name| (*name, five())).collect();
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    store.set_lane(world.now, "cron", lane(Some(1))).await.unwrap();
    world.plan_all().await;
    world.now = minute(5);
    // The one that is not deferred takes the only place.
    for due in store.due(world.now, None, 10).await.unwrap().iter().filter(|due| &*due.name == "a/full") {
        let commit = world.decide(due);
        assert_eq!(store.commit(world.now, &[commit]).await.unwrap(), [Committed::Held]);
    }
    assert_eq!(world.plan_all().await, 0);
    assert_eq!(deferred(&world).await.len(), 5);
    world.now = minute(17);
    let record = async |name: &str| world.schedule(&format!("a/{name}")).await;
    let ids = [record("edited").await.id, record("off").await.id, record("paused").await.id];
    let (kept, removed) = (record("kept").await, record("removed").await.id);
    assert!(store.pause(world.now, ids[2], None, None).await.unwrap());
    let off = schedule(When::Cron("*/5 * * * *".into()), Options { enabled: false, ..Options::default() });
    // An edit that keeps the timing moves nothing.
    let urgent = schedule(When::Cron("*/5 * * * *".into()), Options { priority: 5, ..Options::default() });
    let edited = [
        ("edited", cron("*/7 * * * *")),
        ("full", five()),
        ("kept", urgent),
        ("off", off),
        ("paused", five()),
    ];
    world.apply(&[agent("a", unlimited(), &edited)]).await;
    for id in [ids[0], removed] {
        let edited = SkipRange { reason: SkipReason::Edited, ..queue_full(5, 15, 3) };
        assert_eq!(store.skips(id, None, 10).await.unwrap(), [edited]);
    }
    assert_eq!(deferred(&world).await, [waits("a/kept")]);
    assert_eq!(world.schedule("a/kept").await.deferred, kept.deferred);
    assert_eq!(world.schedule("a/edited").await.token.unwrap().tick_at, world.now);
    world.assert_whole().await;
    // To a pause, and to `enabled: false`, what was deferred belongs like all that is overdue.
    world.now = minute(27);
    for id in &ids[1..] {
        let disabled = SkipRange { reason: SkipReason::Disabled, ..queue_full(5, 25, 5) };
        assert_eq!(store.tick(*id, minute(25)).await.unwrap(), TickFate::Open(disabled));
        assert_eq!(store.skips(*id, None, 10).await.unwrap(), []);
    }
    assert_eq!(store.resume(world.now, ids[2], Resume::CatchUp).await.unwrap(), Some(0));
    world.plan_all().await;
    world.assert_whole().await;
}

async fn a_schedule_that_changes_its_lane_waits_in_the_other(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let in_lane = |lane: &str| {
        let options = Options { lane: Some(lane.into()), ..Options::default() };
        schedule(When::Cron("*/5 * * * *".into()), options)
    };
    let fleet = |moves: &str| {
        let schedules = [
            ("first", in_lane("cron")),
            ("moves", in_lane(moves)),
            ("other", in_lane("main")),
            ("stays", in_lane("cron")),
        ];
        [agent("a", unlimited(), &schedules)]
    };
    world.apply(&fleet("cron")).await;
    for name in ["cron", "main"] {
        store.set_lane(world.now, name, lane(Some(1))).await.unwrap();
    }
    world.plan_all().await;
    world.now = minute(5);
    assert_eq!(world.plan_all().await, 2);
    assert_eq!(deferred(&world).await, [waits("a/moves"), waits("a/stays")]);
    world.apply(&fleet("main")).await;
    assert_eq!(deferred(&world).await, [armed("a/moves"), waits("a/stays")], "it is planned again at once");
    assert_eq!(world.plan_all().await, 0, "the other lane is full, too");
    let record = world.schedule("a/moves").await;
    let expected = Deferred { lane: "main".into(), tick_at: minute(5), since: minute(5) };
    assert_eq!((record.deferred, record.token), (Some(expected), None));
    let first = store.live_runs().await.unwrap().into_iter().find(|run| run.name == "a/first").unwrap().id;
    assert_eq!(world.claim_only(node, first).await.len(), 1);
    assert_eq!(world.plan_all().await, 1, "the place in the first lane goes to the next");
    assert_eq!(deferred(&world).await, [waits("a/moves")]);
    world.apply(&fleet("free")).await;
    assert_eq!(world.plan_all().await, 1, "a lane without a limit has room");
    assert!(deferred(&world).await.is_empty());
    world.assert_whole().await;
}

async fn runs_by_hand_wait_whatever_the_limit(store: &impl Store) {
    let mut world = minutely(store, 2, 1).await;
    for _ in 0..3 {
        assert_eq!(world.enqueue("a/s0", None).await.1, Enqueued::Made);
    }
    world.now = minute(1) + SignedDuration::from_secs(1);
    assert_eq!(world.plan_all().await, 0, "a tick that a run by hand stands in the way of is no run anyway");
    assert_eq!(deferred(&world).await, [waits("a/s1")]);
    assert_eq!(world.enqueue("a/s1", None).await.1, Enqueued::Made);
    assert_eq!(deferred(&world).await, [waits("a/s1")], "it moves no schedule");
    world.assert_whole().await;
}

/// Two agents with a schedule each that ticks every minute, `a` a second before `b`, in a lane where one may wait.
async fn pair(store: &impl Store, a: AgentDefinition) -> World<'_, impl Store> {
    let mut world = World::new(store);
    world.advance(30_000);
    let slot = |phase: &str| {
        let options = Options {
            anchor: AnchorName::Slot,
            phase: Some(phase.into()),
            if_running: IfRunning::Allow,
            ..Options::default()
        };
        schedule(When::Every("1m".into()), options)
    };
    let (first, second) = ([("s", slot("0s"))], [("s", slot("1s"))]);
    world.apply(&[agent("a", a, &first), agent("b", unlimited(), &second)]).await;
    store.set_lane(world.now, "cron", lane(Some(1))).await.unwrap();
    world.plan_all().await;
    world
}

async fn queued(world: &World<'_, impl Store>) -> Option<u32> {
    let lanes = world.store.lanes(world.now).await.unwrap();
    lanes.into_iter().find(|lane| lane.name == "cron").unwrap().queued
}

async fn a_run_that_waits_for_its_retry_takes_no_place(store: &impl Store) {
    let mut world = pair(store, unlimited()).await;
    let node = world.join(1).await;
    world.now = minute(1);
    assert_eq!((world.plan_all().await, queued(&world).await), (1, Some(1)));
    let claimed = world.claim(node, 1).await;
    world.finish(&claimed[0], Outcome::Failed { reason: Reason::ExitCode, retryable: true }).await;
    assert_eq!((store.counts().await.unwrap().pending, queued(&world).await), (1, Some(0)));
    world.now = minute(1) + SignedDuration::from_secs(1);
    assert_eq!((world.plan_all().await, deferred(&world).await), (1, vec![]));
    // Also once its time has come: it had its place.
    world.now = minute(1) + SignedDuration::from_secs(50);
    assert_eq!(world.claim(node, 1).await.len(), 1);
    assert_eq!(queued(&world).await, Some(1));
    world.assert_whole().await;
}

async fn runs_that_wait_for_their_turn_behind_a_retry_take_no_place(store: &impl Store) {
    let mut world = World::new(store);
    world.advance(30_000);
    let slot = |phase: &str, if_running| {
        let options =
            Options { anchor: AnchorName::Slot, phase: Some(phase.into()), if_running, ..Options::default() };
        schedule(When::Every("1m".into()), options)
    };
    let first = [("s", slot("0s", IfRunning::Queue))];
    let second = [("s", slot("1s", IfRunning::Allow))];
    world.apply(&[agent("a", unlimited(), &first), agent("b", unlimited(), &second)]).await;
    store.set_lane(world.now, "cron", lane(Some(1))).await.unwrap();
    world.plan_all().await;
    let node = world.join(1).await;
    world.now = minute(1);
    world.plan_all().await;
    let running = world.claim(node, 1).await;
    world.now = minute(1) + SignedDuration::from_secs(1);
    world.plan_all().await;
    assert_eq!(world.claim(node, 1).await.len(), 1);
    // The second tick waits behind the first, which runs: it starts as soon as that ends.
    world.now = minute(2) + SignedDuration::from_secs(1);
    world.plan_all().await;
    assert_eq!((queued(&world).await, deferred(&world).await), (Some(1), vec![waits("b/s")]));
    assert!(world.claim(node, 1).await.is_empty());
    world.finish(&running[0], Outcome::Failed { reason: Reason::ExitCode, retryable: true }).await;
    assert_eq!((queued(&world).await, deferred(&world).await), (Some(0), vec![armed("b/s")]));
    world.assert_whole().await;
    assert_eq!(world.plan_all().await, 1);
    world.assert_whole().await;
}

async fn a_run_that_waits_for_its_turn_behind_a_retry_in_another_lane_takes_no_place(store: &impl Store) {
    let mut world = World::new(store);
    world.advance(30_000);
    let slot = |phase: &str, if_running| {
        let options =
            Options { anchor: AnchorName::Slot, phase: Some(phase.into()), if_running, ..Options::default() };
        schedule(When::Every("1m".into()), options)
    };
    let first = [("s", slot("0s", IfRunning::Queue))];
    let second = [("s", slot("1s", IfRunning::Allow))];
    world.apply(&[agent("a", unlimited(), &first), agent("b", unlimited(), &second)]).await;
    store.set_lane(world.now, "cron", lane(Some(1))).await.unwrap();
    world.plan_all().await;
    let node = world.join(1).await;
    let elsewhere = world.enqueue_in("a/s", "main").await;
    let running = world.claim_only(node, elsewhere).await;
    world.now = minute(1) + SignedDuration::from_secs(1);
    world.plan_all().await;
    assert_eq!((queued(&world).await, deferred(&world).await), (Some(1), vec![waits("b/s")]));
    world.finish(&running[0], Outcome::Failed { reason: Reason::ExitCode, retryable: true }).await;
    assert_eq!((queued(&world).await, deferred(&world).await), (Some(0), vec![armed("b/s")]));
    world.assert_whole().await;
    assert_eq!((world.plan_all().await, deferred(&world).await), (1, vec![]));
    // The retry starts: the run that waits for its turn takes a place again.
    world.now = minute(1) + SignedDuration::from_secs(30);
    assert_eq!(world.claim_only(node, elsewhere).await.len(), 1);
    assert_eq!(queued(&world).await, Some(2));
    world.assert_whole().await;
}

async fn messages_take_no_place(store: &impl Store) {
    let mut world = World::new(store);
    world.advance(30_000);
    let in_lane = Options { lane: Some("cron".into()), ..Options::default() };
    let chat = schedule(When::Chat(serde_json::json!({"debounce": "1h"})), in_lane);
    let options = Options { anchor: AnchorName::Slot, if_running: IfRunning::Allow, ..Options::default() };
    let ticks = schedule(When::Every("1m".into()), options);
    world.apply(&[agent("a", unlimited(), &[("talk", chat), ("s", ticks)])]).await;
    store.set_lane(world.now, "cron", lane(Some(1))).await.unwrap();
    world.plan_all().await;
    world.send("a/talk", "ada", "hello", |_| {}).await;
    assert_eq!((store.counts().await.unwrap().pending, queued(&world).await), (1, Some(0)));
    world.now = minute(1);
    assert_eq!((world.plan_all().await, deferred(&world).await), (1, vec![]));
    world.assert_whole().await;
}

async fn runs_that_a_budget_holds_take_no_place(store: &impl Store) {
    let budget = Some(belfry_core::definition::Budget { max: 1, period_ms: 86_400_000 });
    let mut world = pair(store, AgentDefinition { budget, ..unlimited() }).await;
    let node = world.join(1).await;
    world.now = minute(1);
    world.plan_all().await;
    let claimed = world.claim(node, 1).await;
    world.now = minute(1) + SignedDuration::from_secs(1);
    world.plan_all().await;
    assert_eq!(world.claim(node, 1).await.len(), 1);
    // The second tick of `a` waits, and fills the lane.
    world.now = minute(2);
    assert_eq!((world.plan_all().await, queued(&world).await), (1, Some(1)));
    world.now = minute(2) + SignedDuration::from_secs(1);
    world.plan_all().await;
    assert_eq!(deferred(&world).await, [waits("b/s")]);
    world.finish(&claimed[0], Outcome::Failed { reason: Reason::ExitCode, retryable: true }).await;
    assert_eq!(deferred(&world).await, [armed("b/s")], "what is held for a day makes room");
    assert_eq!((world.plan_all().await, queued(&world).await), (1, Some(1)));
    world.assert_whole().await;
    let agent = store.agents().await.unwrap().into_iter().find(|agent| agent.name == "a").unwrap().id;
    assert!(store.reset_budget(world.now, agent).await.unwrap());
    world.assert_whole().await;
}

async fn a_run_that_was_asked_for_with_a_delay_takes_no_place(store: &impl Store) {
    let mut world = pair(store, unlimited()).await;
    let later = world.now + SignedDuration::from_hours(1);
    assert_eq!(world.enqueue_at("a/s", later, None).await.1, Enqueued::Made);
    assert_eq!(queued(&world).await, Some(0));
    world.now = minute(1);
    assert_eq!((world.plan_all().await, deferred(&world).await), (1, vec![]));
    world.assert_whole().await;
}

async fn a_run_whose_label_no_node_has_takes_no_place(store: &impl Store) {
    let mut world = pair(store, AgentDefinition { needs: vec!["gpu".into()], ..unlimited() }).await;
    world.now = minute(1) + SignedDuration::from_secs(1);
    assert_eq!((world.plan_all().await, queued(&world).await), (2, Some(1)));
    let node = world.join(1).await;
    assert_eq!(queued(&world).await, Some(2), "now somebody could take both");
    let claimed = world.claim(node, 2).await;
    assert_eq!(claimed.len(), 2);
    store.renew(node, minute(3)).await.unwrap();
    world.now = minute(2) + SignedDuration::from_secs(1);
    assert_eq!((world.plan_all().await, deferred(&world).await), (1, vec![waits("b/s")]));
    assert_eq!(store.drain(world.now, node, true).await.unwrap(), Drained::Marked { is_news: true });
    assert_eq!(deferred(&world).await, [armed("b/s")], "nobody takes the other");
    world.assert_whole().await;
    assert_eq!(store.drain(world.now, node, false).await.unwrap(), Drained::Marked { is_news: true });
    assert_eq!((world.plan_all().await, deferred(&world).await), (0, vec![waits("b/s")]));
    let lease = store.nodes().await.unwrap()[0].lease_until;
    assert!(store.fence(world.now, node, lease).await.unwrap().is_some());
    assert_eq!(deferred(&world).await, [armed("b/s")]);
    assert_eq!(world.plan_all().await, 1);
    world.assert_whole().await;
}

async fn plans_of_many_kinds_share_one_limit(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&fleet(1)).await;
    for name in ["cron", "main"] {
        store.set_lane(world.now, name, lane(Some(2))).await.unwrap();
    }
    for round in 0..40 {
        let due = store.due(world.now, None, 50).await.unwrap();
        let commits: Vec<Commit> = due.iter().map(|due| world.decide(due)).collect();
        let answers = store.commit(world.now, &commits).await.unwrap();
        assert_eq!(answers.len(), commits.len());
        let live = store.live_runs().await.unwrap();
        for lane in ["cron", "main"] {
            let waiting = live.iter().filter(|run| run.lane == lane && run.node.is_none()).count();
            assert!(waiting <= 7, "round {round}: {waiting} wait in {lane}");
        }
        world.assert_whole().await;
        for claimed in world.claim(node, 1).await {
            world.complete(&claimed).await;
        }
        world.assert_whole().await;
        world.advance(20_000);
    }
}
