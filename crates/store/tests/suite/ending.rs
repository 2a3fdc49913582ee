//! Sentences about what the end of an attempt does beyond its run: the failure budget and the breaker of its agent.

use belfry_core::breaker::{Admits, State, TransitionReason};
use belfry_core::definition::{AnchorName, Breaker, Budget, IfRunning, Options, Retry, When};
use belfry_core::retry::Outcome;
use belfry_core::session::RunUsage;
use belfry_core::{AgentDefinition, Reason, RunState, ScheduleDefinition};
use belfry_store::*;
use belfry_time::SignedDuration;

use super::world::*;

const MINUTE: i64 = 60_000;

/// All of them, each on a store of its own.
pub async fn all<S: Store>(fresh: impl AsyncFn() -> S) {
    a_budget_that_is_used_up_holds_retries_and_what_waits(&fresh().await).await;
    what_a_budget_holds_starts_after_a_reset_or_a_success(&fresh().await).await;
    what_a_budget_holds_follows_edits_of_the_policy(&fresh().await).await;
    a_run_that_comes_back_is_held_like_a_retry(&fresh().await).await;
    a_plan_that_was_made_before_the_budget_was_used_up_does_not_hold(&fresh().await).await;
    removing_the_policy_clears_the_breaker(&fresh().await).await;
    a_run_that_waited_passes_its_breaker_alone_and_as_its_probe(&fresh().await).await;
    plans_of_one_commit_send_one_probe(&fresh().await, IfRunning::Allow).await;
    plans_of_one_commit_send_one_probe(&fresh().await, IfRunning::Cancel).await;
    a_breaker_remembers_its_last_changes(&fresh().await).await;
    what_attempts_say_that_they_used_stays_with_their_runs(&fresh().await).await;
}

fn minutely() -> ScheduleDefinition {
    let options = Options { anchor: AnchorName::Slot, if_running: IfRunning::Allow, ..Options::default() };
    schedule(When::Every("1m".into()), options)
}

fn thrifty(max: u32) -> AgentDefinition {
    AgentDefinition {
        budget: Some(Budget { max, period_ms: 600_000 }),
        retry: Retry { max: 6, ..Retry::default() },
        ..unlimited()
    }
}

/// An agent with two schedules, each with one run, of which the first has used up a budget of two failures.
async fn used_up<S: Store>(world: &mut World<'_, S>) -> (belfry_core::NodeId, Claimed) {
    let node = world.join(1).await;
    world.apply(&[agent("a", thrifty(2), &[("s", minutely()), ("t", minutely())])]).await;
    world.plan_all().await;
    world.advance(MINUTE);
    assert_eq!(world.plan_all().await, 2);
    let first = world.claim(node, 1).await.remove(0);
    assert_eq!(world.fail(&first).await, Finished::Pending);
    world.advance(3_000);
    // The other one waits in the same lane, but this one keeps its place.
    let again = world.claim(node, 1).await.remove(0);
    assert_eq!((again.run, again.attempt), (first.run, 2));
    assert_eq!(world.fail(&again).await, Finished::Pending);
    (node, again)
}

async fn what_attempts_say_that_they_used_stays_with_their_runs(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", minutely())])]).await;
    for _ in 0..4 {
        world.enqueue("a/s", None).await;
    }
    let claimed = world.claim(node, 9).await;
    let used = |n: usize| RunUsage { tokens: Some(n as u64), context_window: None, cost_usd: Some(0.5) };
    // All in one call: the second says nothing, the third is tried again, and the last is told with an old epoch.
    let finishes: Vec<Finish> = claimed
        .iter()
        .enumerate()
        .map(|(n, claimed)| {
            let outcome = match n {
                2 => Outcome::Failed { reason: Reason::ExitCode, retryable: true },
                _ => Outcome::Completed,
            };
            let finish = world.outcome(claimed, outcome);
            let epoch = finish.epoch - i32::from(n == 3);
            Finish { usage: (n != 1).then(|| used(n)), epoch, ..finish }
        })
        .collect();
    let completed = Finished::Ended(RunState::Completed);
    let answers = store.finish(world.now, &finishes).await.unwrap();
    assert_eq!(answers, [completed, completed, Finished::Pending, Finished::Stale]);
    for (n, claimed) in claimed.iter().enumerate() {
        let run = store.run(claimed.run).await.unwrap().unwrap();
        assert_eq!(run.usage, (n == 0).then(|| used(0)), "{n}");
    }
}

async fn a_budget_that_is_used_up_holds_retries_and_what_waits(store: &impl Store) {
    let mut world = World::new(store);
    let (node, failed) = used_up(&mut world).await;
    let until = world.now - SignedDuration::from_secs(3) + SignedDuration::from_mins(10);
    assert_eq!(store.next_start(world.now).await.unwrap(), Some(until));
    world.advance(5 * MINUTE);
    assert_eq!(world.claim(node, 9).await, []);
    // What is asked for by hand passes and counts, but its retry does not pass.
    let by_hand = world.enqueue("a/s", None).await.0;
    let claimed = world.claim(node, 9).await;
    assert_eq!(claimed.iter().map(|claimed| claimed.run).collect::<Vec<_>>(), [by_hand]);
    assert_eq!(world.fail(&claimed[0]).await, Finished::Pending);
    let used = store.agents().await.unwrap()[0].budget.unwrap();
    assert_eq!(used.failures, 3);
    world.advance(MINUTE);
    assert_eq!(world.claim(node, 9).await, []);
    world.now = until;
    let other = world.claim(node, 9).await;
    assert_eq!(other.len(), 1, "only the run that had not to wait for itself");
    assert_ne!(other[0].run, failed.run);
    // The retries follow, each after its own delay.
    let delay = store.next_start(world.now).await.unwrap().unwrap().duration_since(until);
    assert!((1_500..=5_000).contains(&delay.as_millis()), "{delay}");
    world.advance(10_000);
    let again = world.claim(node, 9).await;
    assert_eq!(
        again.iter().map(|run| run.attempt).collect::<Vec<_>>(),
        [3, 2],
        "in the order of their making"
    );
    world.assert_whole().await;
}

async fn what_a_budget_holds_starts_after_a_reset_or_a_success(store: &impl Store) {
    let mut world = World::new(store);
    let (node, failed) = used_up(&mut world).await;
    assert_eq!(world.claim(node, 9).await, []);
    assert!(store.reset_budget(world.now, failed.agent).await.unwrap());
    assert!(!store.reset_budget(world.now, failed.agent).await.unwrap());
    let claimed = world.claim(node, 9).await;
    assert_eq!(claimed.len(), 2, "the back-off is cleared as well");
    for claimed in &claimed {
        world.fail(claimed).await;
    }
    assert_eq!(world.claim(node, 9).await, []);
    world.enqueue("a/s", None).await;
    let by_hand = world.claim(node, 9).await.remove(0);
    world.complete(&by_hand).await;
    assert_eq!(store.agents().await.unwrap()[0].budget, None);
    assert_eq!(world.claim(node, 9).await.len(), 2);
    world.assert_whole().await;
}

async fn what_a_budget_holds_follows_edits_of_the_policy(store: &impl Store) {
    let mut world = World::new(store);
    let (node, _) = used_up(&mut world).await;
    let with = |definition| [agent("a", definition, &[("s", minutely()), ("t", minutely())])];
    world.apply(&with(thrifty(5))).await;
    let claimed = world.claim(node, 9).await;
    assert_eq!(claimed.len(), 2, "three more may fail");
    world.fail(&claimed[0]).await;
    world.apply(&with(thrifty(1))).await;
    world.fail(&claimed[1]).await;
    world.advance(MINUTE);
    assert_eq!(world.claim(node, 9).await, []);
    let none = AgentDefinition { budget: None, ..thrifty(1) };
    world.apply(&with(none)).await;
    assert_eq!(store.agents().await.unwrap()[0].budget, None);
    assert_eq!(world.claim(node, 9).await.len(), 2);
    world.assert_whole().await;
}

async fn a_run_that_comes_back_is_held_like_a_retry(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", thrifty(1), &[("s", minutely()), ("t", minutely()), ("u", minutely())])]).await;
    world.plan_all().await;
    world.advance(MINUTE);
    assert_eq!(world.plan_all().await, 3);
    let claimed = world.claim(node, 9).await;
    world.fail(&claimed[0]).await;
    world.finish(&claimed[1], belfry_core::retry::Outcome::Shutdown).await;
    assert_eq!(world.claim(node, 9).await, [], "its node has shut down");
    let lease = store.nodes().await.unwrap()[0].lease_until;
    store.fence(world.now, node, lease).await.unwrap().unwrap();
    let node = world.join(2).await;
    assert_eq!(world.claim(node, 9).await, [], "its node has died");
    world.advance(10 * MINUTE);
    let back = world.claim(node, 9).await;
    assert_eq!(back.iter().map(|run| run.run).collect::<Vec<_>>(), [claimed[1].run, claimed[2].run]);
    world.assert_whole().await;
}

async fn a_plan_that_was_made_before_the_budget_was_used_up_does_not_hold(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", thrifty(1), &[("s", minutely())])]).await;
    world.plan_all().await;
    world.advance(MINUTE);
    world.plan_all().await;
    let claimed = world.claim(node, 9).await.remove(0);
    world.advance(MINUTE);
    let due = store.due(world.now, None, 9).await.unwrap();
    let commit = world.decide(&due[0]);
    assert_eq!(commit.runs.len(), 1);
    world.fail(&claimed).await;
    assert_eq!(store.commit(world.now, &[commit]).await.unwrap(), [Committed::Lost]);
    assert_eq!(world.plan_all().await, 0);
    world.assert_whole().await;
}

async fn a_run_that_waited_passes_its_breaker_alone_and_as_its_probe(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let breaker = Some(Breaker { threshold: 1, reset_after_ms: 60_000 });
    let definition = AgentDefinition { breaker, retry: Retry { max: 0, ..Retry::default() }, ..unlimited() };
    world.apply(&[agent("a", definition, &[("s", minutely())]), agent("b", unlimited(), &[])]).await;
    let id = world.schedule("a/s").await.agent;
    let (first, _) = world.enqueue("a/s", None).await;
    let runs = [world.enqueue("a/s", None).await.0, world.enqueue("a/s", None).await.0];
    let later = world.enqueue("a/s", None).await.0;
    let asks = async |now, run| store.pass_breaker(now, id, "poll", run).await.unwrap();
    assert_eq!(asks(world.now, runs[0]).await, Admits::Yes, "it is closed");
    let claimed = world.claim_only(node, first).await.remove(0);
    world.fail(&claimed).await;
    assert_eq!(asks(world.now, runs[0]).await, Admits::No);
    assert_eq!(store.tripped(&[(id, "poll".into()), (id, "sync".into())]).await.unwrap(), [true, false]);
    world.advance(60_000);
    let probe_of = async || {
        let record = store.breaker(id, "poll").await.unwrap();
        (record.breaker.state, record.breaker.probe)
    };
    // One that has not started may wait behind this run, and gives it its place.
    assert_eq!(asks(world.now, later).await, Admits::Probe);
    assert_eq!(probe_of().await, (State::HalfOpen, Some(later)));
    let probe = world.claim_only(node, runs[0]).await.remove(0);
    assert_eq!(asks(world.now, runs[0]).await, Admits::Probe);
    assert_eq!(asks(world.now, runs[1]).await, Admits::No, "one probe");
    assert_eq!(asks(world.now, later).await, Admits::No, "it is none any more");
    assert_eq!(asks(world.now, runs[0]).await, Admits::Yes, "it is the probe");
    assert_eq!(probe_of().await, (State::HalfOpen, Some(runs[0])));
    world.complete(&probe).await;
    assert_eq!(asks(world.now, runs[1]).await, Admits::Yes);
    assert_eq!(store.tripped(&[(id, "poll".into())]).await.unwrap(), [false]);
    world.assert_whole().await;
}

/// On PostgreSQL the second plan sent a probe, too, if the first one cancelled a run.
async fn plans_of_one_commit_send_one_probe(store: &impl Store, if_running: IfRunning) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let breaker = Some(Breaker { threshold: 1, reset_after_ms: 60_000 });
    let definition = AgentDefinition { breaker, retry: Retry { max: 0, ..Retry::default() }, ..unlimited() };
    let options = Options { anchor: AnchorName::Slot, if_running, ..Options::default() };
    let first = schedule(When::Every("1m".into()), options);
    world.apply(&[agent("a", definition, &[("s", first), ("t", minutely())])]).await;
    world.plan_all().await;
    let (run, _) = world.enqueue("a/t", None).await;
    let claimed = world.claim_only(node, run).await.remove(0);
    world.fail(&claimed).await;
    world.enqueue("a/s", None).await;
    world.advance(2 * MINUTE);
    let due = store.due(world.now, None, 10).await.unwrap();
    let mut commits: Vec<_> = due.iter().map(|due| world.decide(due)).collect();
    commits.sort_by_key(|commit| !commit.cancel_live);
    assert_eq!(commits.iter().filter(|commit| commit.runs.iter().any(|run| run.probe)).count(), 2);
    assert_eq!(commits[0].cancel_live, if_running == IfRunning::Cancel);
    assert_eq!(store.commit(world.now, &commits).await.unwrap(), [Committed::Held, Committed::Lost]);
    let probe = commits[0].runs.iter().find(|run| run.probe).map(|run| run.id);
    let record = store.breaker(commits[0].agent, "poll").await.unwrap();
    assert_eq!((record.breaker.state, record.breaker.probe), (State::HalfOpen, probe));
    world.assert_whole().await;
}

async fn a_breaker_remembers_its_last_changes(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let breaker = Some(Breaker { threshold: 1, reset_after_ms: 60_000 });
    let definition = AgentDefinition { breaker, retry: Retry { max: 0, ..Retry::default() }, ..unlimited() };
    world.apply(&[agent("a", definition, &[("s", minutely())])]).await;
    let id = world.schedule("a/s").await.agent;
    for _ in 0..55 {
        let (run, _) = world.enqueue("a/s", None).await;
        let claimed = world.claim_only(node, run).await.remove(0);
        world.fail(&claimed).await;
        assert!(store.reset_breaker(world.now, id, "poll").await.unwrap());
        world.advance(1_000);
    }
    let history = store.breaker(id, "poll").await.unwrap().history;
    assert_eq!(history.len(), 100, "of 110");
    assert_eq!(history.last().unwrap().at, world.now - SignedDuration::from_secs(1));
    world.assert_whole().await;
}

async fn removing_the_policy_clears_the_breaker(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let with = |breaker| {
        let definition =
            AgentDefinition { breaker, retry: Retry { max: 0, ..Retry::default() }, ..unlimited() };
        [agent("a", definition, &[("s", minutely())])]
    };
    let policy = Some(Breaker { threshold: 1, reset_after_ms: 60_000 });
    world.apply(&with(policy)).await;
    world.plan_all().await;
    world.advance(MINUTE);
    world.plan_all().await;
    let claimed = world.claim(node, 9).await.remove(0);
    world.fail(&claimed).await;
    world.advance(2 * MINUTE);
    assert_eq!(world.plan_all().await, 1);
    let probe = world.claim(node, 9).await.remove(0);
    let record = store.breaker(probe.agent, "poll").await.unwrap();
    assert_eq!((record.breaker.state, record.breaker.probe), (State::HalfOpen, Some(probe.run)));
    world.apply(&with(None)).await;
    world.fail(&probe).await;
    world.apply(&with(policy)).await;
    let record = store.breaker(probe.agent, "poll").await.unwrap();
    assert_eq!(record.breaker, belfry_core::breaker::Breaker::default());
    let last = record.history.last().unwrap();
    assert_eq!((last.to, last.reason), (State::Closed, TransitionReason::ManualReset));
    world.advance(MINUTE);
    assert_eq!(world.plan_all().await, 1, "it is closed");
    world.assert_whole().await;
}
