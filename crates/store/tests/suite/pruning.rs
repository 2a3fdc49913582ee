//! Sentences about what is kept, and how much of it.

use belfry_core::definition::{Breaker, IfRunning, Options, Retry, Scope, When};
use belfry_core::retry::Outcome;
use belfry_core::{AgentDefinition, Reason, RunId, RunState, ScheduleDefinition};
use belfry_store::*;
use belfry_time::SignedDuration;
use uuid::Uuid;

use super::world::*;

/// All of them, each on a store of its own.
pub async fn all<S: Store>(fresh: impl AsyncFn() -> S) {
    the_last_runs_of_each_kind_are_kept(&fresh().await).await;
    output_goes_by_age_and_never_that_of_a_live_run(&fresh().await).await;
    output_goes_with_its_run(&fresh().await).await;
    what_is_retired_is_kept_as_long_as_its_runs_are(&fresh().await).await;
}

async fn what_is_retired_is_kept_as_long_as_its_runs_are(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let queue = Options { if_running: IfRunning::Queue, overlap: Scope::Command, ..Options::default() };
    let fragile = AgentDefinition {
        max_concurrent: Some(1),
        breaker: Some(Breaker { threshold: 1, reset_after_ms: 600_000 }),
        retry: Retry { max: 0, ..Retry::default() },
        ..unlimited()
    };
    let yearly = || When::Cron("0 0 1 1 *".into());
    let s = ("s", schedule(yearly(), queue));
    let (t, u) = (("t", ScheduleDefinition::new(yearly())), ("u", ScheduleDefinition::new(yearly())));
    let kept = agent("a", fragile.clone(), std::slice::from_ref(&t));
    world.apply(&[agent("a", fragile, &[s.clone(), t]), agent("b", unlimited(), &[u])]).await;
    let (old, gone) = (world.schedule("a/s").await, world.schedule("b/u").await);
    let (run, _) = world.enqueue("a/s", None).await;
    let claimed = world.claim(node, 9).await;
    assert_eq!(claimed.len(), 1);
    world.apply(std::slice::from_ref(&kept)).await;
    let is_known = async |id| store.revision_at(id, world.now).await.unwrap().is_some();

    // Young enough.
    let keep = |before| Retention { retired_before: before, ..retention(start(), start(), 100) };
    assert_eq!(store.prune(world.now, &keep(world.now)).await.unwrap(), Pruned::default());
    // A run lives, and has ended since.
    let later = world.now + SignedDuration::from_secs(1);
    let pruned = store.prune(world.now, &keep(later)).await.unwrap();
    assert_eq!(pruned, Pruned { retired: 2, ..Pruned::default() }, "the other agent and its schedule");
    assert_eq!((is_known(gone.id).await, is_known(old.id).await), (false, true));
    world.fail(&claimed[0]).await;
    assert_eq!(store.prune(world.now, &keep(later)).await.unwrap(), Pruned::default());
    assert_eq!(store.run(run).await.unwrap().unwrap().name, "a/s");
    let pruned = store.prune(world.now, &retention(later, later, 100)).await.unwrap();
    assert_eq!((pruned.runs, pruned.retired, is_known(old.id).await), (1, 1, false));
    world.assert_whole().await;

    // What is there has all it needs, and what is gone can come again.
    assert_eq!(store.agents().await.unwrap().len(), 1);
    assert_eq!(store.breaker(old.agent, "poll").await.unwrap().history.len(), 1, "its agent is there");
    store.reset_breaker(world.now, old.agent, "poll").await.unwrap();
    world.apply(&[AgentSpec { schedules: vec![("s".into(), s.1)], ..kept }]).await;
    assert_ne!(world.schedule("a/s").await.id, old.id);
    world.enqueue("a/s", None).await;
    assert_eq!(world.claim(node, 9).await.len(), 1);
    world.apply(&[]).await;
    let claimed = world.claim(node, 9).await;
    assert_eq!(claimed, []);
    world.assert_whole().await;
}

async fn output_goes_with_its_run(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", cron("* * * * *"))])]).await;
    world.plan_all().await;
    let mut runs = Vec::new();
    for _ in 0..6 {
        world.advance(60_000);
        world.plan_all().await;
        for claimed in world.claim(node, 1).await {
            let seq = OutputChunk::first_seq(claimed.epoch);
            let chunk =
                |n| OutputChunk { seq: seq + n, attempt: 1, stream: Stream::Out, bytes: vec![b'x'; 10] };
            assert!(store.append_output(claimed.run, claimed.epoch, &[chunk(0), chunk(1)]).await.unwrap());
            world.complete(&claimed).await;
            runs.push(claimed.run);
        }
    }
    assert_eq!(runs.len(), 6);
    let left = async || {
        let mut left = 0;
        for run in &runs {
            left += store.output(*run, None, 1000).await.unwrap().len();
        }
        left
    };
    // By number: two of the six runs are kept.
    let young = belfry_time::Timestamp::UNIX_EPOCH;
    let keep =
        Retention { runs_per_schedule: Some(2), output_before: young, ..retention(start(), start(), 100) };
    let pruned = store.prune(world.now, &keep).await.unwrap();
    assert_eq!((pruned.runs, pruned.output, left().await), (4, 8, 4));
    // By age: none is.
    let later = world.now + SignedDuration::from_secs(1);
    let keep = Retention { output_before: young, ..retention(later, later, 100) };
    let pruned = store.prune(world.now, &keep).await.unwrap();
    assert_eq!((pruned.runs, pruned.output, left().await), (2, 4, 0));
}

async fn the_last_runs_of_each_kind_are_kept(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let schedules = [("often", cron("* * * * *")), ("rarely", cron("*/10 * * * *"))];
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    world.plan_all().await;
    for minute in 1..=30 {
        world.advance(60_000);
        world.plan_all().await;
        for claimed in world.claim(node, 5).await {
            let failed = Outcome::Failed { reason: Reason::Error, retryable: false };
            world.finish(&claimed, if minute % 3 == 0 { failed } else { Outcome::Completed }).await;
        }
    }
    let (often, rarely) = (world.schedule("a/often").await.id, world.schedule("a/rarely").await.id);
    // In small steps, each of which goes on where the last one ended.
    let mut keep = Retention { runs_per_schedule: Some(4), ..retention(start(), start(), 7) };
    let (mut steps, mut gone) = (0, 0);
    loop {
        let pruned = store.prune(world.now, &keep).await.unwrap();
        (steps, gone) = (steps + 1, gone + pruned.runs);
        keep.after = pruned.next;
        if pruned.next.is_none() {
            break;
        }
        assert!(pruned.runs <= 7 && steps < 10);
    }
    assert_eq!((steps, gone), (5, 22), "33 runs were looked at");
    let kept = store.ended_runs(often, 100).await.unwrap();
    let of = |failed| kept.iter().filter(move |run| (run.state == RunState::Failed) == failed);
    let minutes = |run: &RunRecord| run.tick_at.unwrap().duration_since(start()).as_secs() / 60;
    assert_eq!(of(true).map(minutes).collect::<Vec<_>>(), [30, 27, 24, 21]);
    assert_eq!(of(false).map(minutes).collect::<Vec<_>>(), [29, 28, 26, 25]);
    assert_eq!(store.ended_runs(rarely, 100).await.unwrap().len(), 3, "nothing of one that has few");
    assert_eq!(store.prune(world.now, &keep).await.unwrap().runs, 0);
    assert_eq!(world.plan_all().await, 0, "no tick fires again");
    // Who keeps none keeps none.
    keep = Retention { runs_per_schedule: Some(0), ..retention(start(), start(), 100) };
    assert_eq!(store.prune(world.now, &keep).await.unwrap().runs, 11);
    assert_eq!(store.counts().await.unwrap().ended, 0);
    assert!(store.ended_runs(often, 100).await.unwrap().is_empty());
    world.assert_whole().await;
}

async fn output_goes_by_age_and_never_that_of_a_live_run(store: &impl Store) {
    let world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", every("1h"))])]).await;
    let record = world.schedule("a/s").await;
    let compiled = record.definition.compile("a/s").unwrap();
    let definition = unlimited();
    let mut claimed = Vec::new();
    for days in 0..3 {
        // Ids begin with the instant of their making.
        let at = world.now + SignedDuration::from_hours(24 * days);
        let id = RunId(Uuid::from_u128(
            (u128::from(at.as_millisecond().unsigned_abs()) << 80) + 0x7000 + days as u128,
        ));
        let run =
            NewRun::by_hand(Defined::new(record.agent, record.id, &compiled, &definition), id, world.now);
        store.enqueue(world.now, &Enqueue { run, key: None }).await.unwrap();
        claimed.extend(world.claim(node, 1).await);
    }
    for claimed in &claimed {
        for n in 0..3 {
            let seq = OutputChunk::first_seq(claimed.epoch) + n;
            let chunk = OutputChunk { seq, attempt: 1, stream: Stream::Out, bytes: vec![b'x'; 10] };
            assert!(store.append_output(claimed.run, claimed.epoch, &[chunk]).await.unwrap());
        }
    }
    world.complete(&claimed[1]).await;
    world.complete(&claimed[2]).await;
    let before = world.now + SignedDuration::from_hours(36);
    let keep = Retention { output_before: before, ..retention(start(), start(), 2) };
    assert_eq!(store.prune(world.now, &keep).await.unwrap().output, 2, "a batch at a time");
    assert_eq!(store.prune(world.now, &keep).await.unwrap().output, 1);
    assert_eq!(store.prune(world.now, &keep).await.unwrap().output, 0);
    let mut left = Vec::new();
    for claimed in &claimed {
        left.push(store.output(claimed.run, None, 1000).await.unwrap().len());
    }
    assert_eq!(left, [3, 0, 3], "that of the first, which runs, and of the last, which is young, stay");
    assert_eq!(store.counts().await.unwrap().ended, 2, "the runs stay");
}
