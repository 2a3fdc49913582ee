//! Sentences from what other schedulers promise.

use belfry_core::check::Status;
use belfry_core::definition::{AnchorName, Options, When};
use belfry_core::edit::Resume;
use belfry_core::{AgentDefinition, RunState};
use belfry_store::*;
use belfry_time::{SignedDuration, Timestamp};

use super::world::*;

/// All of them, each on a store of its own.
pub async fn all<S: Store>(fresh: impl AsyncFn() -> S) {
    of_ten_that_are_due_two_start_where_three_of_five_run(&fresh().await).await;
    the_end_of_a_run_does_not_move_a_schedule_that_came_back_during_it(&fresh().await).await;
    a_resume_arms_from_now_and_a_second_one_moves_nothing(&fresh().await).await;
    a_run_by_hand_moves_no_schedule(&fresh().await).await;
    what_was_switched_off_fires_when_it_is_put_back(&fresh().await).await;
}

async fn of_ten_that_are_due_two_start_where_three_of_five_run(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let five = AgentDefinition { max_concurrent: Some(5), ..AgentDefinition::default() };
    let names: Vec<String> = (0..10).map(|n| format!("s{n}")).collect();
    let schedules: Vec<_> = names.iter().map(|name| (name.as_str(), every("1h"))).collect();
    world.apply(&[agent("a", five, &schedules)]).await;
    assert_eq!(world.plan_all().await, 10);
    assert_eq!(world.claim(node, 3).await.len(), 3);
    assert_eq!(world.claim(node, 10).await.len(), 2);
    assert_eq!(world.claim(node, 10).await.len(), 0, "the limit is reached");
    world.assert_whole().await;
}

async fn the_end_of_a_run_does_not_move_a_schedule_that_came_back_during_it(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[])]).await;
    let Put::Added(old) = store.put_schedule(world.now, "a", "s", &every("5m"), &Expect::Any).await.unwrap()
    else {
        panic!("it is new")
    };
    world.plan_all().await;
    let running = world.claim(node, 1).await.remove(0);
    assert_eq!(
        store.remove_schedule(world.now, old, &Expect::Any).await.unwrap(),
        Removed::Gone { ended: vec![] }
    );
    let Put::Added(new) = store.put_schedule(world.now, "a", "s", &every("7m"), &Expect::Any).await.unwrap()
    else {
        panic!("it comes back")
    };
    let before = world.schedule("a/s").await;
    assert_eq!(world.complete(&running).await, Finished::Ended(RunState::Completed));
    let after = world.schedule("a/s").await;
    assert_eq!((after.id, after.token), (new, before.token), "its timer is that of the new definition");
    world.plan_all().await;
    world.advance(7 * 60_000);
    assert_eq!(world.plan_all().await, 1, "and it fires at its own cadence");
    world.assert_whole().await;
}

async fn a_resume_arms_from_now_and_a_second_one_moves_nothing(store: &impl Store) {
    let mut world = World::new(store);
    world.now = "2026-03-28T11:00:00Z".parse().unwrap();
    let toronto = schedule(
        When::Cron("0 9 * * *".into()),
        Options { timezone: Some("America/Toronto".into()), ..Options::default() },
    );
    let minutely =
        schedule(When::Every("60s".into()), Options { anchor: AnchorName::Start, ..Options::default() });
    world.apply(&[agent("a", unlimited(), &[("minutely", minutely), ("nine", toronto)])]).await;
    world.plan_all().await;
    for (name, next) in [("a/minutely", "2026-03-28T12:01:00Z"), ("a/nine", "2026-03-28T13:00:00Z")] {
        world.now = "2026-03-28T11:00:00Z".parse().unwrap();
        let id = world.schedule(name).await.id;
        assert!(store.pause(world.now, id, None, None).await.unwrap());
        assert_eq!(world.schedule(name).await.token, None, "{name}");
        world.advance(3_600_000);
        assert!(store.resume(world.now, id, Resume::Skip).await.unwrap().is_some());
        world.plan_all().await;
        let token = world.schedule(name).await.token.unwrap();
        assert_eq!(token.tick_at, next.parse::<Timestamp>().unwrap(), "{name}");
        assert_eq!(store.resume(world.now, id, Resume::Skip).await.unwrap(), None, "{name} is not paused");
        assert_eq!(world.schedule(name).await.token, Some(token));
    }
    world.assert_whole().await;
}

async fn a_run_by_hand_moves_no_schedule(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let slot = schedule(When::Every("1m".into()), Options { anchor: AnchorName::Slot, ..Options::default() });
    world.apply(&[agent("a", unlimited(), &[("slot", slot), ("completion", every("1m"))])]).await;
    world.plan_all().await;
    for claimed in world.claim(node, 5).await {
        world.complete(&claimed).await;
    }
    world.plan_all().await;
    world.advance(30_000);
    for name in ["a/slot", "a/completion"] {
        let before = world.schedule(name).await;
        world.enqueue(name, None).await;
        let claimed = world.claim(node, 5).await.remove(0);
        world.complete(&claimed).await;
        let after = world.schedule(name).await;
        assert_eq!((after.token, after.waits_for), (before.token, before.waits_for), "{name}");
        assert_eq!(after.token.unwrap().due_at, start() + SignedDuration::from_mins(1), "{name}");
    }
    world.assert_whole().await;
}

async fn what_was_switched_off_fires_when_it_is_put_back(store: &impl Store) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[])]).await;
    let with = |enabled| schedule(When::Cron("* * * * *".into()), Options { enabled, ..Options::default() });
    store.put_schedule(world.now, "a", "s", &with(true), &Expect::Any).await.unwrap();
    world.plan_all().await;
    store.put_schedule(world.now, "a", "s", &with(false), &Expect::Any).await.unwrap();
    world.advance(10 * 60_000);
    assert_eq!((world.plan_all().await, world.schedule("a/s").await.status), (0, Status::Disabled));
    store.put_schedule(world.now, "a", "s", &with(true), &Expect::Any).await.unwrap();
    assert_eq!(world.plan_all().await, 0, "nothing that is past");
    world.advance(60_000);
    assert_eq!(world.plan_all().await, 1);
    world.assert_whole().await;
}
