//! Sentences about ticks that are overdue when a schedule is paused, disabled, edited or removed, and about clocks that
//! are set back: every tick has one result.

use belfry_core::check::Status;
use belfry_core::definition::{AnchorName, CatchUp, IfRunning, Options, When};
use belfry_core::edit::{self, Resume};
use belfry_core::{ScheduleDefinition, ScheduleId, SkipRange, SkipReason, Trigger};
use belfry_store::*;
use belfry_time::{SignedDuration, Timestamp};

use super::Random;
use super::world::*;

/// All of them, each on a store of its own.
pub async fn all<S: Store>(fresh: impl AsyncFn() -> S) {
    what_is_overdue_at_a_pause_is_skipped_by_its_end(&fresh().await).await;
    what_is_overdue_at_a_pause_is_caught_up_if_asked(&fresh().await).await;
    what_is_overdue_when_it_is_disabled_is_skipped(&fresh().await).await;
    what_is_overdue_at_an_edit_is_missed(&fresh().await).await;
    a_run_that_ends_in_a_pause_starts_the_clock(&fresh().await).await;
    a_plan_of_the_end_of_a_pause_knows_that_its_run_has_ended(&fresh().await).await;
    a_clock_that_is_set_back_fires_nothing_again(&fresh().await).await;
    two_edits_by_a_clock_that_is_behind_fire_nothing_again(&fresh().await).await;
    a_schedule_that_comes_back_by_a_clock_that_is_behind_fires_nothing_again(&fresh().await).await;
    an_edit_after_its_window_has_closed_does_not_wait_until_it_opens(&fresh().await).await;
    a_plan_that_is_not_stored_leaves_what_was_planned_before(&fresh().await).await;
    a_schedule_goes_on_from_now_if_asked(&fresh().await).await;
    a_tick_that_came_again_has_the_result_that_was_stored_last(&fresh().await).await;
    the_end_of_a_run_arms_nothing_before_its_tick(&fresh().await).await;
    a_one_shot_whose_time_has_passed_is_exhausted_at_once(&fresh().await).await;
    what_went_with_its_run_stays_away_while_its_file_is_the_same(&fresh().await).await;
    every_tick_has_one_result(&fresh().await, super::seed(), 300).await;
}

fn at(seconds: i64) -> Timestamp {
    start() + SignedDuration::from_secs(seconds)
}

fn range(reason: SkipReason, from: i64, to: i64, count: u64) -> SkipRange {
    SkipRange { reason, from: at(from), to: at(to), count }
}

fn slot(interval: &str, catch_up: CatchUp) -> ScheduleDefinition {
    let options = Options { anchor: AnchorName::Slot, catch_up: Some(catch_up), ..Options::default() };
    schedule(When::Every(interval.into()), options)
}

/// A schedule with ticks at 5, 10, … seconds, and nobody to plan them until 26.
async fn overdue<S: Store>(store: &S) -> (World<'_, S>, ScheduleId) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("s", slot("5s", CatchUp::RunAll))])]).await;
    world.plan_all().await;
    world.now = at(26);
    let id = world.schedule("a/s").await.id;
    (world, id)
}

async fn what_is_overdue_at_a_pause_is_skipped_by_its_end(store: &impl Store) {
    let (mut world, id) = overdue(store).await;
    assert!(store.pause(world.now, id, None, None).await.unwrap());
    assert_eq!(world.schedule("a/s").await.status_since, world.now);
    assert_eq!(store.tick(id, at(5)).await.unwrap(), TickFate::Open(range(SkipReason::Disabled, 5, 5, 1)));
    world.now = at(41);
    assert_eq!(world.plan_all().await, 0);
    assert_eq!(store.resume(world.now, id, Resume::Skip).await.unwrap(), Some(8));
    assert_eq!(store.skips(id, None, 10).await.unwrap(), [range(SkipReason::Disabled, 5, 40, 8)]);
    assert_eq!(world.plan_all().await, 0);
    assert_eq!(world.schedule("a/s").await.token.unwrap().tick_at, at(45));
    world.assert_whole().await;
}

async fn what_is_overdue_at_a_pause_is_caught_up_if_asked(store: &impl Store) {
    let (mut world, id) = overdue(store).await;
    assert!(store.pause(world.now, id, None, None).await.unwrap());
    world.now = at(41);
    assert_eq!(store.resume(world.now, id, Resume::CatchUp).await.unwrap(), Some(0));
    assert_eq!(world.plan_all().await, 7, "the one on time meets them");
    let runs = store.live_runs().await.unwrap();
    assert_eq!(runs.iter().filter_map(|run| run.tick_at).min(), Some(at(5)));
    assert!(runs.iter().all(|run| run.trigger == Trigger::CatchUp));
    assert_eq!(store.skips(id, None, 10).await.unwrap(), [], "nothing else is recorded");
    world.assert_whole().await;
}

async fn what_is_overdue_when_it_is_disabled_is_skipped(store: &impl Store) {
    let (mut world, id) = overdue(store).await;
    let on = slot("5s", CatchUp::RunAll);
    let off = schedule(on.when.clone(), Options { enabled: false, ..on.options.clone() });
    world.apply(&[agent("a", unlimited(), &[("s", off)])]).await;
    assert_eq!(world.schedule("a/s").await.status, Status::Disabled);
    assert_eq!(store.tick(id, at(25)).await.unwrap(), TickFate::Open(range(SkipReason::Disabled, 5, 25, 5)));
    world.now = at(41);
    world.apply(&[agent("a", unlimited(), &[("s", on)])]).await;
    assert_eq!(store.skips(id, None, 10).await.unwrap(), [range(SkipReason::Disabled, 5, 40, 8)]);
    assert_eq!(world.plan_all().await, 0);
    world.assert_whole().await;
}

async fn what_is_overdue_at_an_edit_is_missed(store: &impl Store) {
    let (mut world, id) = overdue(store).await;
    world.apply(&[agent("a", unlimited(), &[("s", slot("7s", CatchUp::RunAll))])]).await;
    assert_eq!(store.skips(id, None, 10).await.unwrap(), [range(SkipReason::Edited, 5, 25, 5)]);
    assert_eq!(world.plan_all().await, 0, "only a backfill makes up for them");
    assert_eq!(world.schedule("a/s").await.revision, 2);
    // Three days of every 100 ms.
    world.apply(&[agent("a", unlimited(), &[("s", slot("100ms", CatchUp::RunAll))])]).await;
    world.plan_all().await;
    world.advance(3 * 24 * 3_600_000);
    world.apply(&[agent("a", unlimited(), &[("s", cron("0 * * * *"))])]).await;
    let missed = store.skips(id, Some(at(20)), 10).await.unwrap();
    assert_eq!((missed[0].count, missed[0].to), (3 * 24 * 3_600 * 10, world.now));
    // A removal is an edit.
    world.plan_all().await;
    world.advance(2 * 3_600_000);
    world.apply(&[]).await;
    let missed = store.skips(id, Some(at(30)), 10).await.unwrap();
    assert_eq!((missed.len(), missed[0].reason, missed[0].count), (1, SkipReason::Edited, 2));
    world.assert_whole().await;
}

async fn a_run_that_ends_in_a_pause_starts_the_clock(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", every("10s"))])]).await;
    world.plan_all().await;
    let id = world.schedule("a/s").await.id;
    let claimed = world.claim(node, 1).await.remove(0);
    assert!(store.pause(world.now, id, None, None).await.unwrap());
    world.now = at(60);
    assert_eq!(store.tick(id, at(30)).await.unwrap(), TickFate::Unknown, "its run lives: there is no tick");
    world.complete(&claimed).await;
    world.now = at(85);
    assert_eq!(store.resume(world.now, id, Resume::Skip).await.unwrap(), Some(2));
    assert_eq!(store.skips(id, None, 10).await.unwrap(), [range(SkipReason::Disabled, 70, 80, 2)]);
    world.assert_whole().await;
}

async fn a_plan_of_the_end_of_a_pause_knows_that_its_run_has_ended(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", every("10s"))])]).await;
    world.plan_all().await;
    let id = world.schedule("a/s").await.id;
    let claimed = world.claim(node, 1).await.remove(0);
    assert!(store.pause(world.now, id, None, Some(at(60))).await.unwrap());
    world.now = at(61);
    let due = store.due(world.now, None, 10).await.unwrap();
    let commit = world.decide(&due[0]);
    // The node that ran it has a clock that is late.
    world.now = at(35);
    world.complete(&claimed).await;
    world.now = at(61);
    assert_eq!(store.commit(world.now, &[commit]).await.unwrap(), [Committed::Lost]);
    world.plan_all().await;
    assert_eq!(store.skips(id, None, 10).await.unwrap(), [range(SkipReason::Disabled, 45, 55, 2)]);
    world.assert_whole().await;
}

/// Schedules of every kind that has ticks of its own, planned up to 120 s; then the clock is set back by a minute.
async fn set_back<S: Store>(store: &S) -> World<'_, S> {
    let mut world = World::new(store);
    let anchor = |anchor| schedule(When::Every("10s".into()), Options { anchor, ..Options::default() });
    let schedules = [
        ("slot", slot("10s", CatchUp::Skip)),
        ("start", anchor(AnchorName::Start)),
        ("cron", cron("* * * * *")),
        ("kept", slot("10s", CatchUp::Skip)),
    ];
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    world.plan_all().await;
    for second in (0..=120).step_by(10) {
        world.now = at(second);
        world.plan_all().await;
    }
    world.now = at(30);
    world
}

async fn a_clock_that_is_set_back_fires_nothing_again(store: &impl Store) {
    let mut world = set_back(store).await;
    let names = ["a/slot", "a/start", "a/cron"];
    let before: Vec<_> =
        [world.schedule(names[0]).await, world.schedule(names[1]).await, world.schedule(names[2]).await]
            .map(|record| record.token)
            .to_vec();
    for how in [Resume::Skip, Resume::CatchUp] {
        for (name, before) in names.iter().zip(&before) {
            let record = world.schedule(name).await;
            let schedule = record.definition.compile(name).unwrap();
            let goes_on = edit::clock_back(&record.found(), &schedule, world.now);
            assert_eq!(goes_on, before.map(|token| token.due_at), "{name} waits for the clock");
            assert!(store.pause(world.now, record.id, None, None).await.unwrap());
            world.advance(1_000);
            assert_eq!(store.resume(world.now, record.id, how).await.unwrap(), Some(0));
            assert_eq!(world.plan_all().await, 0, "{name}");
            assert_eq!(world.schedule(name).await.token, *before, "{name}");
        }
    }
    // Nor does an edit, or `enabled: false` and back.
    let off =
        schedule(When::Every("10s".into()), Options { enabled: false, ..slot("10s", CatchUp::Skip).options });
    for definition in [off, slot("10s", CatchUp::Skip), slot("1s", CatchUp::Skip)] {
        let schedules = [("slot", definition), ("kept", slot("10s", CatchUp::Skip))];
        world.apply(&[agent("a", unlimited(), &schedules)]).await;
        world.advance(1_000);
        assert_eq!(world.plan_all().await, 0);
    }
    let next = world.schedule("a/slot").await.token.unwrap().tick_at;
    assert!(next > at(120) && next <= at(130), "{next}");
    world.assert_whole().await;
}

async fn two_edits_by_a_clock_that_is_behind_fire_nothing_again(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let ten = slot("10s", CatchUp::RunAll);
    world.apply(&[agent("a", unlimited(), &[("s", ten.clone()), ("gone", ten.clone())])]).await;
    world.plan_all().await;
    world.now = at(21);
    assert_eq!(world.plan_all().await, 2, "the first tick of each makes a run, and the other is skipped");
    assert_eq!(world.claim(node, 2).await.len(), 2);
    // The second one has a timing in between that has no tick before the clock is set back.
    world.now = at(22);
    world.apply(&[agent("a", unlimited(), &[("s", ten.clone()), ("gone", cron("0 0 1 1 *"))])]).await;
    world.plan_all().await;
    world.now = at(1);
    for between in [slot("7s", CatchUp::RunAll), ten.clone(), slot("7s", CatchUp::RunAll), ten.clone()] {
        let gone = if between == ten { ten.clone() } else { cron("0 0 1 1 *") };
        world.apply(&[agent("a", unlimited(), &[("s", between), ("gone", gone)])]).await;
        world.plan_all().await;
        world.advance(1_000);
    }
    for name in ["a/s", "a/gone"] {
        let record = world.schedule(name).await;
        assert_eq!(record.token.unwrap().tick_at, at(30), "{name}");
        assert_eq!(record.planned_at, Some(at(20)), "{name}");
    }
    // Nor after a removal, while a run of it lives.
    world.apply(&[agent("a", unlimited(), &[])]).await;
    world.apply(&[agent("a", unlimited(), &[("s", ten.clone()), ("gone", ten)])]).await;
    world.now = at(29);
    assert_eq!(world.plan_all().await, 0);
    world.assert_whole().await;
}

async fn a_schedule_that_comes_back_by_a_clock_that_is_behind_fires_nothing_again(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let ten = slot("10s", CatchUp::RunAll);
    let with = [agent("a", unlimited(), &[("s", ten.clone())])];
    world.apply(&with).await;
    world.plan_all().await;
    world.now = at(21);
    world.plan_all().await;
    for claimed in world.claim(node, 9).await {
        world.complete(&claimed).await;
    }
    world.now = at(2);
    for _ in 0..3 {
        world.apply(&[agent("a", unlimited(), &[])]).await;
        world.advance(1_000);
        world.apply(&with).await;
        world.plan_all().await;
    }
    let record = world.schedule("a/s").await;
    assert_eq!((record.token.unwrap().tick_at, record.planned_at), (at(30), Some(at(20))));
    // By a clock that has gone on it is new.
    world.now = at(41);
    world.apply(&[agent("a", unlimited(), &[])]).await;
    world.apply(&with).await;
    world.plan_all().await;
    let record = world.schedule("a/s").await;
    assert_eq!((record.token.unwrap().tick_at, record.planned_at), (at(50), None));
    world.assert_whole().await;
}

async fn an_edit_after_its_window_has_closed_does_not_wait_until_it_opens(store: &impl Store) {
    let mut world = World::new(store);
    let options = Options {
        anchor: AnchorName::Start,
        if_running: IfRunning::Allow,
        only_between: Some("00:00-00:01".into()),
        ..Options::default()
    };
    world.now = start() + SignedDuration::from_hours(24);
    let midnight = Timestamp::from_second(world.now.as_second().div_euclid(86_400) * 86_400).unwrap();
    world.now = midnight + SignedDuration::from_secs(1);
    let within = schedule(When::Every("20s".into()), options);
    world.apply(&[agent("a", unlimited(), &[("s", within)])]).await;
    for second in [1, 21, 41] {
        world.now = midnight + SignedDuration::from_secs(second);
        world.plan_all().await;
    }
    let record = world.schedule("a/s").await;
    assert_eq!(record.token.unwrap().tick_at, midnight + SignedDuration::from_hours(24));
    world.now = midnight + SignedDuration::from_secs(15);
    world.apply(&[agent("a", unlimited(), &[("s", slot("7s", CatchUp::RunAll))])]).await;
    world.plan_all().await;
    let next = world.schedule("a/s").await.token.unwrap().tick_at;
    let last = midnight + SignedDuration::from_secs(41);
    assert!(next > last && next <= last + SignedDuration::from_secs(7), "{next} after {last}");
    world.assert_whole().await;
}

async fn a_plan_that_is_not_stored_leaves_what_was_planned_before(store: &impl Store) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("s", cron("0 0 1 1 *"))])]).await;
    world.plan_all().await;
    let id = world.schedule("a/s").await.id;
    // The end of a pause leaves the cursor shortly before a tick that is far ahead.
    assert!(store.pause(world.now, id, None, None).await.unwrap());
    assert_eq!(store.resume(world.now, id, Resume::Skip).await.unwrap(), Some(0));
    let due = store.due(world.now, None, 1).await.unwrap();
    let commit = due[0].invalid("it cannot be read");
    assert_eq!(store.commit(world.now, &[commit]).await.unwrap(), [Committed::Held]);
    world.apply(&[agent("a", unlimited(), &[("s", slot("10s", CatchUp::RunAll))])]).await;
    world.plan_all().await;
    assert_eq!(world.schedule("a/s").await.token.unwrap().tick_at, at(10));
    world.assert_whole().await;
}

async fn a_schedule_goes_on_from_now_if_asked(store: &impl Store) {
    let mut world = set_back(store).await;
    let id = world.schedule("a/slot").await.id;
    assert_eq!(store.resume(world.now, id, Resume::Skip).await.unwrap(), None, "it is not paused");
    assert_eq!(store.resume(world.now, id, Resume::FromNow).await.unwrap(), Some(0));
    world.plan_all().await;
    assert_eq!(world.schedule("a/slot").await.token.unwrap().tick_at, at(40));
    assert_eq!(store.resume(world.now, id, Resume::FromNow).await.unwrap(), None, "it does not wait");
    // Also out of a pause.
    let id = world.schedule("a/start").await.id;
    assert!(store.pause(world.now, id, None, None).await.unwrap());
    assert_eq!(store.resume(world.now, id, Resume::FromNow).await.unwrap(), Some(0));
    world.plan_all().await;
    assert_eq!(world.schedule("a/start").await.token.unwrap().tick_at, at(40));
    assert_eq!(world.schedule("a/kept").await.token.unwrap().tick_at, at(130));
    world.assert_whole().await;
}

/// Seed 723138709 of the random comparison: SQLite gave the older of two ranges that begin with the same tick.
async fn a_tick_that_came_again_has_the_result_that_was_stored_last(store: &impl Store) {
    let mut world = set_back(store).await;
    let id = world.schedule("a/slot").await.id;
    world.now = at(15);
    assert_eq!(store.resume(world.now, id, Resume::FromNow).await.unwrap(), Some(0));
    let before = TickFate::Skipped(range(SkipReason::AlreadyRunning, 20, 120, 11));
    assert_eq!(store.tick(id, at(50)).await.unwrap(), before);
    world.plan_all().await;
    world.now = at(200);
    world.plan_all().await;
    let last = TickFate::Skipped(range(SkipReason::MissedSkip, 20, 190, 18));
    assert_eq!(store.tick(id, at(50)).await.unwrap(), last);
    world.assert_whole().await;
}

async fn the_end_of_a_run_arms_nothing_before_its_tick(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", every("10s"))])]).await;
    world.now = at(100);
    world.plan_all().await;
    let last = store.live_runs().await.unwrap().iter().filter_map(|run| run.tick_at).max().unwrap();
    let claimed = world.claim(node, 1).await.remove(0);
    world.now = at(40);
    world.complete(&claimed).await;
    assert_eq!(world.plan_all().await, 0);
    let next = world.schedule("a/s").await.token.unwrap().tick_at;
    assert!(next > last && next > at(90), "{next} after {last}");
}

async fn a_one_shot_whose_time_has_passed_is_exhausted_at_once(store: &impl Store) {
    let mut world = World::new(store);
    let past = ScheduleDefinition::new(When::At("2020-01-01T00:00:00Z".into()));
    let soon = ScheduleDefinition::new(When::After("90s".into()));
    let applied = world.apply(&[agent("a", unlimited(), &[("past", past), ("soon", soon)])]).await;
    assert_eq!((applied.added, applied.expired), (2, 1));
    let record = world.schedule("a/past").await;
    assert_eq!((&record.status, record.token, record.origin), (&Status::Exhausted, None, None));
    assert_eq!(store.next_due().await.unwrap(), Some(at(90)));
    world.now = at(90);
    assert_eq!(world.plan_all().await, 1);
    world.assert_whole().await;
}

/// Random pauses, resumes, edits, disables, enables and downtime of schedules on a grid: each of their ticks that has
/// passed has one result, and ranges count exactly.
async fn every_tick_has_one_result(store: &impl Store, seed: u64, count: usize) {
    let mut random = Random(seed);
    let mut world = World::new(store);
    let timings = [slot("10s", CatchUp::RunAll), slot("15s", CatchUp::Skip), cron("* * * * *")];
    let mut definition = timings[0].clone();
    let apply = async |world: &World<'_, _>, definition: &ScheduleDefinition| {
        world.apply(&[agent("a", unlimited(), &[("s", definition.clone())])]).await;
    };
    apply(&world, &definition).await;
    let node = world.join(1).await;
    let id = world.schedule("a/s").await.id;
    store
        .set_lane(world.now, "cron", Some(LaneSettings { slots: 5, limit: None, queue_limit: Some(3) }))
        .await
        .unwrap();
    let mut ticks = Vec::new();
    let (mut since, mut timing) = (world.now, definition.timing("a/s").unwrap().unwrap());
    for _ in 0..count {
        match random.below(12) {
            0 => {
                let until = random.chance(50).then(|| world.now + SignedDuration::from_secs(40));
                store.pause(world.now, id, None, until).await.unwrap();
            }
            1 | 2 => {
                let how = if random.chance(50) { Resume::Skip } else { Resume::CatchUp };
                store.resume(world.now, id, how).await.unwrap();
            }
            3 => {
                definition.options.enabled = !definition.options.enabled;
                apply(&world, &definition).await;
            }
            4 => {
                let enabled = definition.options.enabled;
                definition = timings[random.below(timings.len())].clone();
                definition.options.enabled = enabled;
                let before = world.schedule("a/s").await.revision;
                apply(&world, &definition).await;
                if world.schedule("a/s").await.revision != before {
                    ticks.extend(timing.ticks_between(since, world.now, 10_000).map(|tick| tick.tick_at));
                    (since, timing) = (world.now, definition.timing("a/s").unwrap().unwrap());
                }
            }
            5 | 6 => {
                for claimed in world.claim(node, random.below(4) as u32).await {
                    world.complete(&claimed).await;
                }
            }
            7..=9 => drop(world.plan_all().await),
            _ => world.advance([300, 7_000, 26_000, 300_000][random.below(4)]),
        }
    }
    // Nothing is left to be planned.
    if !definition.options.enabled {
        definition.options.enabled = true;
        apply(&world, &definition).await;
    }
    store.set_lane(world.now, "cron", None).await.unwrap();
    store.resume(world.now, id, Resume::Skip).await.unwrap();
    world.plan_all().await;
    ticks.extend(timing.ticks_between(since, world.now, 10_000).map(|tick| tick.tick_at));
    let record = world.schedule("a/s").await;
    let mut ranges = store.skips(id, None, 100_000).await.unwrap();
    ranges.extend(record.open_skip);
    let runs: Vec<Timestamp> = store
        .live_runs()
        .await
        .unwrap()
        .iter()
        .chain(&store.ended_runs(id, 100_000).await.unwrap())
        .filter_map(|run| run.tick_at)
        .collect();
    let counted = runs.len() as u64 + ranges.iter().map(|range| range.count).sum::<u64>();
    for tick in &ticks {
        let made = runs.iter().filter(|run| *run == tick).count();
        let left_out: Vec<_> =
            ranges.iter().filter(|range| range.from <= *tick && *tick <= range.to).collect();
        // A range that joins equal skips may reach over a run between them.
        assert!(
            made == 1 || made == 0 && left_out.len() == 1,
            "seed {seed}: {tick} has {made} runs, {left_out:?}"
        );
    }
    assert_eq!(counted, ticks.len() as u64, "seed {seed}: {ranges:?}");
    world.assert_whole().await;
}

async fn what_went_with_its_run_stays_away_while_its_file_is_the_same(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let once = |when| schedule(when, Options { delete_after_run: true, ..Options::default() });
    let after = |delay: &str| once(When::After(delay.into()));
    let fleet = |priority, after: ScheduleDefinition| {
        let other = schedule(When::Cron("0 0 * * *".into()), Options { priority, ..Options::default() });
        let at = once(When::At("2026-03-02T12:00:05Z".into()));
        [agent("a", unlimited(), &[("after", after), ("at", at), ("other", other)])]
    };
    world.apply(&fleet(0, after("5s"))).await;
    world.now = at(5);
    assert_eq!(world.plan_all().await, 2);
    for claimed in world.claim(node, 5).await {
        world.complete(&claimed).await;
    }
    assert!(
        store.schedule("a/after").await.unwrap().is_none() && store.schedule("a/at").await.unwrap().is_none()
    );
    // Another schedule of the file changes, and history is pruned.
    world.now = at(60);
    store.prune(world.now, &retention(world.now, world.now, 100)).await.unwrap();
    for _ in 0..2 {
        let applied = world.apply(&fleet(3, after("5s"))).await;
        assert_eq!((applied.added, applied.retired, applied.expired), (0, 0, 0));
        assert!(store.schedule("a/after").await.unwrap().is_none());
        assert!(store.schedule("a/at").await.unwrap().is_none());
    }
    // It is another once its definition is, or once the file did not name it for a while.
    assert_eq!(world.apply(&fleet(3, after("6s"))).await.added, 1);
    assert_eq!(world.apply(&[]).await.retired, 2);
    let applied = world.apply(&fleet(3, after("5s"))).await;
    assert_eq!((applied.added, applied.expired), (3, 1));
    world.assert_whole().await;
}
