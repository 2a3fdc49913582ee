//! What leaves a source and is put back while a run of it lives.

use belfry_core::check::Status;
use belfry_core::definition::Options;
use belfry_core::{AgentDefinition, RunState, SkipReason};
use belfry_store::*;
use belfry_time::SignedDuration;
use serde_json::json;

use super::world::*;

/// All of them, each on a store of its own.
pub async fn all<S: Store>(fresh: &impl AsyncFn() -> S) {
    what_became_of_ticks_is_known_after_it_was_removed_and_put_back(&fresh().await).await;
    a_schedule_is_the_same_while_its_run_lives(&fresh().await).await;
    an_agent_keeps_its_limit_while_a_run_of_it_lives(&fresh().await).await;
    a_session_goes_on_one_at_a_time(&fresh().await).await;
    no_tick_fires_again_after_the_clock_was_set_back(&fresh().await).await;
    a_pause_lasts(&fresh().await).await;
    a_schedule_of_the_api_may_come_back_in_a_file(&fresh().await).await;
}

async fn a_schedule_is_the_same_while_its_run_lives(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let stays = ("stays", every("1h"));
    let with = [agent("a", unlimited(), &[("s", cron("* * * * *")), stays.clone()])];
    let without = [agent("a", unlimited(), &[stays])];
    world.apply(&with).await;
    world.plan_all().await;
    world.advance(60_000);
    world.plan_all().await;
    let claimed = world.claim(node, 5).await;
    let running = claimed.iter().find(|claimed| claimed.tick_at == Some(world.now)).unwrap();
    let old = world.schedule("a/s").await;
    assert_eq!(world.apply(&without).await.retired, 1);
    assert!(store.schedule("a/s").await.unwrap().is_none());
    world.advance(10 * 60_000 + 30_000);
    assert_eq!(world.plan_all().await, 0, "no tick while it is out");
    assert_eq!(world.apply(&with).await.added, 1);
    let back = world.schedule("a/s").await;
    assert_eq!((back.id, back.running, back.revision), (old.id, 1, 2));
    assert_eq!(world.plan_all().await, 0, "no tick of that time fires later");
    world.advance(60_000);
    assert_eq!(world.plan_all().await, 0);
    let skipped = world.schedule("a/s").await.open_skip.unwrap();
    assert_eq!((skipped.reason, skipped.count), (SkipReason::AlreadyRunning, 1));
    assert!(store.skips(old.id, None, 1000).await.unwrap().is_empty(), "it had no ticks while it was out");
    assert_eq!(world.complete(running).await, Finished::Ended(RunState::Completed));
    world.advance(60_000);
    assert_eq!(world.plan_all().await, 1);
    assert_eq!(world.schedule("a/s").await.last.unwrap().run, running.run);
    world.assert_whole().await;
}

async fn an_agent_keeps_its_limit_while_a_run_of_it_lives(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let fleet = |most| {
        let definition = AgentDefinition { max_concurrent: Some(most), ..AgentDefinition::default() };
        [agent("a", definition, &[("s", every("1h")), ("t", every("1h"))])]
    };
    world.apply(&fleet(1)).await;
    assert_eq!(world.plan_all().await, 2);
    let running = world.claim(node, 5).await.remove(0);
    let name = |id, own: &ScheduleRecord| if own.id == id { "a/s" } else { "a/t" };
    let (old, lives) = (world.schedule("a/s").await, running.schedule);
    let (lives, other) = match name(lives, &old) {
        "a/s" => ("a/s", "a/t"),
        _ => ("a/t", "a/s"),
    };
    let other_id = world.schedule(other).await.id;
    assert_eq!(world.apply(&[]).await.ended.len(), 1);
    assert!(store.agents().await.unwrap().is_empty());
    world.advance(1_000);
    world.apply(&fleet(1)).await;
    let (same, new) = (world.schedule(lives).await, world.schedule(other).await);
    assert_eq!((same.id, same.agent, new.agent), (running.schedule, old.agent, old.agent));
    assert_ne!(new.id, other_id, "nothing of it lives: it is new");
    let (by_hand, _) = world.enqueue(other, None).await;
    assert!(world.claim(node, 5).await.is_empty(), "the limit counts the run that lives");
    // Out and back with a higher limit.
    world.apply(&[]).await;
    world.apply(&fleet(2)).await;
    let (next, _) = world.enqueue(other, None).await;
    assert_eq!(world.claim(node, 5).await.iter().map(|claimed| claimed.run).collect::<Vec<_>>(), [next]);
    assert!(store.run(by_hand).await.unwrap().is_some_and(|run| run.state == RunState::Cancelled));
    world.assert_whole().await;
    // With nothing alive it is new.
    for run in store.live_runs().await.unwrap() {
        let claimed = Claimed { run: run.id, epoch: run.epoch, attempt: run.attempt, ..running.clone() };
        world.complete(&claimed).await;
    }
    world.apply(&[]).await;
    world.apply(&fleet(1)).await;
    assert_ne!(world.schedule(lives).await.agent, old.agent);
    world.assert_whole().await;
}

async fn a_session_goes_on_one_at_a_time(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let fleet = [agent("bot", unlimited(), &[("talk", chat(json!({"debounce": "0s"})))])];
    world.apply(&fleet).await;
    world.send("bot/talk", "k", "first", |_| ()).await;
    let first = world.claim(node, 5).await.remove(0);
    world.apply(&[]).await;
    world.advance(1_000);
    world.apply(&fleet).await;
    world.send("bot/talk", "k", "second", |_| ()).await;
    assert!(world.claim(node, 5).await.is_empty(), "the first one runs");
    world.complete(&first).await;
    assert_eq!(world.claim(node, 5).await.len(), 1);
    world.assert_whole().await;
}

async fn no_tick_fires_again_after_the_clock_was_set_back(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let many = Options { if_running: belfry_core::definition::IfRunning::Allow, ..Options::default() };
    let fleet = [agent(
        "a",
        unlimited(),
        &[("s", schedule(belfry_core::definition::When::Cron("* * * * *".into()), many))],
    )];
    world.apply(&fleet).await;
    world.plan_all().await;
    for _ in 0..3 {
        world.advance(60_000);
        assert_eq!(world.plan_all().await, 1);
    }
    let last = world.now;
    world.claim(node, 5).await;
    world.advance(-150_000);
    world.apply(&[]).await;
    world.apply(&fleet).await;
    for _ in 0..2 {
        world.advance(60_000);
        assert_eq!(world.plan_all().await, 0, "that one has fired");
    }
    world.advance(90_000);
    assert_eq!((world.plan_all().await, world.now), (1, last + SignedDuration::from_mins(1)));
    world.assert_whole().await;
}

async fn a_pause_lasts(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let fleet = [agent("a", unlimited(), &[("s", every("5m"))])];
    world.apply(&fleet).await;
    world.plan_all().await;
    let running = world.claim(node, 5).await.remove(0);
    let until = world.now + SignedDuration::from_mins(10);
    assert!(store.pause(world.now, running.schedule, Some("why"), Some(until)).await.unwrap());
    world.apply(&[]).await;
    world.advance(60_000);
    world.apply(&fleet).await;
    let paused = Status::Paused { reason: Some("why".into()), until: Some(until) };
    assert_eq!(world.schedule("a/s").await.status, paused);
    world.complete(&running).await;
    world.advance(20 * 60_000);
    assert_eq!(world.plan_all().await, 1, "the pause has ended");
    assert_eq!(world.schedule("a/s").await.status, Status::Active);
    world.assert_whole().await;
}

async fn a_schedule_of_the_api_may_come_back_in_a_file(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[])]).await;
    let put = store.put_schedule(world.now, "a", "s", &every("5m"), &Expect::Any).await.unwrap();
    let Put::Added(id) = put else { panic!("{put:?}") };
    world.plan_all().await;
    let running = world.claim(node, 5).await.remove(0);
    assert_eq!(
        store.remove_schedule(world.now, id, &Expect::Any).await.unwrap(),
        Removed::Gone { ended: vec![] }
    );
    let again = store.put_schedule(world.now, "a", "s", &every("5m"), &Expect::Absent).await.unwrap();
    assert_eq!(again, Put::Added(id));
    store.remove_schedule(world.now, id, &Expect::Any).await.unwrap();
    assert_eq!(world.apply(&[agent("a", unlimited(), &[("s", every("5m"))])]).await.added, 1);
    let back = world.schedule("a/s").await;
    assert_eq!((back.id, back.source.as_str(), back.running), (id, "files", 1));
    world.complete(&running).await;
    world.assert_whole().await;
}

async fn what_became_of_ticks_is_known_after_it_was_removed_and_put_back(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let fleet = [agent("a", unlimited(), &[("s", cron("* * * * *"))])];
    world.apply(&fleet).await;
    world.plan_all().await;
    world.advance(60_000);
    world.plan_all().await;
    let claimed = world.claim(node, 9).await;
    let fired = claimed[0].tick_at.unwrap();
    world.complete(&claimed[0]).await;
    // An hour without a planner: all ticks of it but the last are missed.
    world.advance(3_600_000);
    world.plan_all().await;
    for claimed in world.claim(node, 9).await {
        world.complete(&claimed).await;
    }
    let before = store.skips(world.schedule("a/s").await.id, None, 100).await.unwrap();
    assert!(!before.is_empty());
    world.apply(&[agent("a", unlimited(), &[])]).await;
    world.apply(&fleet).await;
    let again = world.schedule("a/s").await.id;
    assert!(matches!(store.tick(again, fired).await.unwrap(), TickFate::Run(_)));
    assert_eq!(store.tick(again, before[0].from).await.unwrap(), TickFate::Skipped(before[0]));
    assert_eq!(store.skips(again, None, 100).await.unwrap(), before);
}
