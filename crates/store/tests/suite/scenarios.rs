//! Sentences about one client.

use belfry_core::check::Status;
use belfry_core::definition::{AnchorName, Breaker, IfRunning, Options, Retry, Scope, When};
use belfry_core::edit::Resume;
use belfry_core::retry::Outcome;
use belfry_core::{AgentDefinition, Reason, RunId, RunState, SkipRange, SkipReason, TokenKind, Trigger};
use belfry_store::*;
use belfry_time::SignedDuration;

use super::world::*;

/// All of them, each on a store of its own.
pub async fn all<S: Store>(fresh: impl AsyncFn() -> S) {
    Box::pin(own(&fresh)).await;
    Box::pin(super::cases::all(&fresh)).await;
    Box::pin(super::claiming::all(&fresh)).await;
    Box::pin(super::deferring::all(&fresh)).await;
    Box::pin(super::editing::all(&fresh)).await;
    Box::pin(super::ending::all(&fresh)).await;
    Box::pin(super::listing::all(&fresh)).await;
    Box::pin(super::overdue::all(&fresh)).await;
    Box::pin(super::pausing::all(&fresh)).await;
    Box::pin(super::why::all(&fresh)).await;
    Box::pin(super::nodes::all(&fresh)).await;
    Box::pin(super::sessions::all(&fresh)).await;
    Box::pin(super::pruning::all(&fresh)).await;
    Box::pin(super::refusing::all(&fresh)).await;
    Box::pin(super::returning::all(&fresh)).await;
}

/// Those of this file.
async fn own<S: Store>(fresh: impl AsyncFn() -> S) {
    many_requests_are_made_in_one_commit_and_in_order(&fresh().await).await;
    a_tick_is_planned_once_by_any_number_of_planners(&fresh().await).await;
    a_completion_anchored_schedule_waits_for_its_run(&fresh().await).await;
    a_manual_run_makes_a_plan_that_did_not_know_of_it_fail(&fresh().await).await;
    limits_hold_and_waiting_runs_start_in_order(&fresh().await).await;
    a_raised_limit_lets_waiting_runs_through(&fresh().await).await;
    the_new_run_waits_until_the_cancelled_one_is_gone(&fresh().await).await;
    a_stale_finish_changes_nothing(&fresh().await).await;
    a_retry_holds_no_slot_and_an_exhausted_run_fails(&fresh().await).await;
    a_lost_node_uses_up_attempts(&fresh().await).await;
    what_was_never_started_does_not_count(&fresh().await).await;
    a_run_of_one_attempt_that_was_refused_is_claimed_again(&fresh().await).await;
    cancelling_ends_what_waits_and_tells_what_runs(&fresh().await).await;
    a_key_makes_a_repeat_answer_with_the_first_run(&fresh().await).await;
    a_tick_that_is_asked_for_twice_lives_once(&fresh().await).await;
    a_repeated_backfill_does_not_spoil_a_plan(&fresh().await).await;
    a_key_for_a_tick_whose_run_lives_is_not_taken(&fresh().await).await;
    schedules_of_one_scope_take_turns(&fresh().await).await;
    one_run_is_claimed_by_its_id_past_those_that_wait_but_no_limit(&fresh().await).await;
    a_pause_is_not_downtime(&fresh().await).await;
    an_edit_fires_nothing_before_it_and_nothing_again(&fresh().await).await;
    what_left_the_source_is_retired_and_comes_back_new(&fresh().await).await;
    one_bad_schedule_disturbs_no_other(&fresh().await).await;
    a_breaker_admits_one_probe(&fresh().await).await;
    pruning_never_lets_a_tick_fire_again(&fresh().await).await;
    every_tick_has_one_result(&fresh().await).await;
}

async fn a_tick_is_planned_once_by_any_number_of_planners(store: &impl Store) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("s", cron("*/5 * * * *"))])]).await;
    world.plan_all().await;
    world.advance(5 * 60_000);
    let seen: Vec<Due> =
        [store.due(world.now, None, 10).await.unwrap(), store.due(world.now, None, 10).await.unwrap()]
            .concat();
    assert_eq!(seen.len(), 2, "both planners see the tick");
    let commits: Vec<Commit> = seen.iter().map(|due| world.decide(due)).collect();
    assert_eq!(store.commit(world.now, &commits).await.unwrap(), [Committed::Held, Committed::Lost]);
    assert_eq!(store.live_runs().await.unwrap().len(), 1);
    assert_eq!(world.plan_all().await, 0);
    world.assert_whole().await;
}

async fn a_completion_anchored_schedule_waits_for_its_run(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", every("5m"))])]).await;
    assert_eq!(world.plan_all().await, 1, "due at once");
    assert!(world.schedule("a/s").await.token.is_none());
    let claimed = world.claim(node, 5).await;
    world.advance(10 * 60_000);
    assert_eq!(world.plan_all().await, 0, "nothing arms it but the end of the run");
    // A retry in back-off is not an end.
    assert_eq!(world.fail(&claimed[0]).await, Finished::Pending);
    assert!(world.schedule("a/s").await.token.is_none());
    world.advance(60_000);
    let claimed = world.claim(node, 5).await;
    assert_eq!(claimed[0].attempt, 2);
    world.complete(&claimed[0]).await;
    world.plan_all().await;
    let record = world.schedule("a/s").await;
    assert_eq!(record.token.unwrap().tick_at, world.now + SignedDuration::from_mins(5), "end + every");
    assert_eq!(
        (record.last.unwrap().state, record.streak, record.last_error),
        (RunState::Completed, 1, None)
    );
    // A cancel while pending is an end.
    world.advance(5 * 60_000);
    world.plan_all().await;
    let pending = store.live_runs().await.unwrap();
    assert_eq!(store.cancel(world.now, pending[0].id, Reason::Requested).await.unwrap(), Cancelled::Ended);
    assert!(world.schedule("a/s").await.token.is_some());
    world.assert_whole().await;
}

async fn a_manual_run_makes_a_plan_that_did_not_know_of_it_fail(store: &impl Store) {
    let mut world = World::new(store);
    world.apply(&fleet(1)).await;
    world.plan_all().await;
    world.advance(60_000);
    for name in ["fragile/cancel", "limited/agentwide"] {
        let due = store.due(world.now + SignedDuration::from_mins(3), None, 100).await.unwrap();
        let due = due.into_iter().find(|due| &*due.name == name).unwrap();
        let commit = world.decide(&due);
        world.enqueue(if name == "limited/agentwide" { "limited/slot" } else { name }, None).await;
        assert_eq!(store.commit(world.now, &[commit]).await.unwrap(), [Committed::Lost], "{name}");
        let again = store.due(world.now + SignedDuration::from_mins(3), None, 100).await.unwrap();
        let again = again.into_iter().find(|due| &*due.name == name).unwrap();
        assert!(again.live > due.live, "{name}: the run is counted");
    }
    world.assert_whole().await;
}

async fn limits_hold_and_waiting_runs_start_in_order(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let two = AgentDefinition { max_concurrent: Some(2), ..AgentDefinition::default() };
    let names = ["s1", "s2", "s3", "s4", "s5"];
    let schedules: Vec<_> = names.iter().map(|name| (*name, every("1h"))).collect();
    world.apply(&[agent("a", two, &schedules)]).await;
    assert_eq!(world.plan_all().await, 5);
    let order: Vec<_> = store.live_runs().await.unwrap().iter().map(|run| run.id).collect();
    let mut running = world.claim(node, 10).await;
    assert_eq!(running.len(), 2);
    assert!(world.claim(node, 10).await.is_empty(), "the limit is reached");
    let mut started: Vec<_> = running.iter().map(|claimed| claimed.run).collect();
    while let Some(claimed) = running.pop() {
        world.complete(&claimed).await;
        let next = world.claim(node, 10).await;
        assert!(next.len() + running.len() <= 2);
        started.extend(next.iter().map(|claimed| claimed.run));
        running.extend(next);
    }
    assert_eq!(started, order, "first come, first served");
    assert_eq!(store.counts().await.unwrap(), Counts { pending: 0, running: 0, ended: 5 });
    world.assert_whole().await;
}

async fn a_raised_limit_lets_waiting_runs_through(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let fleet = |max| {
        let schedules: Vec<_> = ["s1", "s2", "s3", "s4"].iter().map(|name| (*name, every("1h"))).collect();
        vec![agent("a", AgentDefinition { max_concurrent: max, ..AgentDefinition::default() }, &schedules)]
    };
    world.apply(&fleet(Some(1))).await;
    world.plan_all().await;
    assert_eq!(world.claim(node, 10).await.len(), 1);
    assert_eq!(world.claim(node, 10).await.len(), 0);
    world.apply(&fleet(Some(2))).await;
    assert_eq!(world.claim(node, 10).await.len(), 1);
    world.apply(&fleet(None)).await;
    assert_eq!(world.claim(node, 10).await.len(), 2);
    // Lowering it stops nothing.
    world.apply(&fleet(Some(1))).await;
    assert_eq!(store.counts().await.unwrap().running, 4);
}

async fn the_new_run_waits_until_the_cancelled_one_is_gone(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let cancel = schedule(
        When::Cron("* * * * *".into()),
        Options { if_running: IfRunning::Cancel, ..Options::default() },
    );
    world.apply(&[agent("a", unlimited(), &[("s", cancel)])]).await;
    world.plan_all().await;
    world.advance(60_000);
    world.plan_all().await;
    let old = world.claim(node, 5).await.remove(0);
    world.advance(60_000);
    world.plan_all().await;
    assert!(world.claim(node, 5).await.is_empty(), "the old one still runs");
    let Renewed::Held { cancels, .. } =
        store.renew(node, world.now + SignedDuration::from_secs(30)).await.unwrap()
    else {
        panic!()
    };
    assert_eq!(cancels, [(old.run, old.epoch, Reason::Overlap)]);
    world.advance(60_000);
    world.plan_all().await;
    assert_eq!(
        store.counts().await.unwrap().pending,
        1,
        "the newest tick has taken the place of the one that waited"
    );
    // A retry of what is to be cancelled is its end.
    assert_eq!(world.fail(&old).await, Finished::Ended(RunState::Cancelled));
    let new = world.claim(node, 5).await;
    assert_eq!((new.len(), new[0].tick_at), (1, Some(world.now)));
    world.assert_whole().await;
}

async fn a_stale_finish_changes_nothing(store: &impl Store) {
    let mut world = World::new(store);
    let (first, second) = (world.join(1).await, world.join(2).await);
    world.apply(&[agent("a", AgentDefinition::default(), &[("s", every("1h"))])]).await;
    world.plan_all().await;
    let stale = world.claim(first, 1).await.remove(0);
    let lease = store.nodes().await.unwrap().iter().find(|node| node.id == first).unwrap().lease_until;
    let rescued = store.fence(world.now, first, lease).await.unwrap().unwrap();
    assert_eq!(rescued.pending, [stale.run]);
    assert_eq!(world.complete(&stale).await, Finished::Stale);
    let fresh = world.claim(second, 1).await.remove(0);
    assert_eq!((fresh.run, fresh.epoch, fresh.attempt), (stale.run, stale.epoch + 1, 2));
    assert_eq!(world.complete(&stale).await, Finished::Stale);
    assert_eq!(store.run(stale.run).await.unwrap().unwrap().state, RunState::Running);
    assert_eq!(world.complete(&fresh).await, Finished::Ended(RunState::Completed));
    assert_eq!(world.complete(&fresh).await, Finished::Stale, "an end is not repeated");
    assert_eq!(store.renew(first, world.now + SignedDuration::from_secs(90)).await.unwrap(), Renewed::Fenced);
    assert!(world.claim(first, 5).await.is_empty(), "a fenced node claims nothing");
    world.assert_whole().await;
}

async fn a_retry_holds_no_slot_and_an_exhausted_run_fails(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let retry = AgentDefinition { retry: Retry { max: 1, ..Retry::default() }, ..AgentDefinition::default() };
    world.apply(&[agent("a", retry, &[("s1", every("1h")), ("s2", every("1h"))])]).await;
    world.plan_all().await;
    let first = world.claim(node, 5).await.remove(0);
    assert_eq!(world.fail(&first).await, Finished::Pending);
    let second = world.claim(node, 5).await;
    assert_eq!(second.len(), 1, "the slot is free while the first waits");
    assert_ne!(second[0].run, first.run);
    world.complete(&second[0]).await;
    assert!(world.claim(node, 5).await.is_empty(), "not before its time");
    world.advance(5_000);
    let again = world.claim(node, 5).await.remove(0);
    assert_eq!((again.run, again.attempt), (first.run, 2));
    assert_eq!(world.fail(&again).await, Finished::Ended(RunState::Failed));
    let record = store.run(first.run).await.unwrap().unwrap();
    assert_eq!(
        (record.reason, record.attempt, record.error.as_deref()),
        (Some(Reason::ExitCode), 2, Some("attempt 2 failed"))
    );
    assert_eq!(
        world.schedule("a/s1").await.last_error.or(world.schedule("a/s2").await.last_error).as_deref(),
        Some("attempt 2 failed")
    );
}

async fn a_lost_node_uses_up_attempts(store: &impl Store) {
    let mut world = World::new(store);
    let once = AgentDefinition { retry: Retry { max: 0, ..Retry::default() }, ..unlimited() };
    let twice = AgentDefinition { retry: Retry { max: 1, ..Retry::default() }, ..unlimited() };
    world
        .apply(&[agent("once", once, &[("s", every("1h"))]), agent("twice", twice, &[("s", every("1h"))])])
        .await;
    world.plan_all().await;
    for (n, pending, ended) in [(1, 1, 1), (2, 0, 1)] {
        let node = world.join(n).await;
        assert_eq!(world.claim(node, 5).await.len(), pending + ended);
        let lease = store.nodes().await.unwrap()[0].lease_until;
        assert_eq!(
            store.fence(world.now, node, lease - SignedDuration::from_secs(1)).await.unwrap(),
            None,
            "it was renewed meanwhile"
        );
        let rescued = store.fence(world.now, node, lease).await.unwrap().unwrap();
        assert_eq!((rescued.pending.len(), rescued.ended.len()), (pending, ended));
        assert!(rescued.ended.iter().all(|(_, state)| *state == RunState::Failed));
        assert_eq!(store.fence(world.now, node, lease).await.unwrap(), None);
    }
    let record = world.schedule("once/s").await;
    assert_eq!(record.last_error.as_deref(), Some(belfry_core::rescue::ORPHANED_ERROR));
    assert!(record.token.is_some(), "the end of the awaited run arms the schedule");
    world.assert_whole().await;
}

async fn what_was_never_started_does_not_count(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", AgentDefinition::default(), &[("s1", every("1h")), ("s2", every("1h"))])]).await;
    world.plan_all().await;
    let claimed = world.claim(node, 1).await.remove(0);
    assert!(world.claim(node, 1).await.is_empty());
    assert_eq!(store.give_back(world.now, node, &[(claimed.run, claimed.epoch)]).await.unwrap().len(), 1);
    assert_eq!(store.give_back(world.now, node, &[(claimed.run, claimed.epoch)]).await.unwrap(), []);
    let again = world.claim(node, 5).await;
    assert_eq!((again.len(), again[0].run, again[0].attempt, again[0].epoch), (1, claimed.run, 1, 2));
    assert_eq!(world.finish(&again[0], Outcome::Shutdown).await, Finished::Pending);
    assert_eq!(store.run(claimed.run).await.unwrap().unwrap().attempt, 0);
    let again = world.claim(node, 1).await.remove(0);
    assert_eq!(world.finish(&again, Outcome::NotStarted).await, Finished::Pending);
    assert_eq!(store.run(claimed.run).await.unwrap().unwrap().attempt, 0);
    world.assert_whole().await;
}

async fn a_run_of_one_attempt_that_was_refused_is_claimed_again(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let once = AgentDefinition { retry: Retry { max: 0, ..Retry::default() }, ..AgentDefinition::default() };
    world.apply(&[agent("a", once, &[("s", every("1h"))])]).await;
    world.plan_all().await;
    for epoch in 1..=3 {
        let claimed = world.claim(node, 1).await.remove(0);
        assert_eq!((claimed.attempt, claimed.max_attempts, claimed.epoch), (1, 1, epoch));
        assert_eq!(world.finish(&claimed, Outcome::NotStarted).await, Finished::Pending);
    }
    let claimed = world.claim(node, 1).await.remove(0);
    assert_eq!(world.finish(&claimed, Outcome::Completed).await, Finished::Ended(RunState::Completed));
    world.assert_whole().await;
}

async fn cancelling_ends_what_waits_and_tells_what_runs(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", AgentDefinition::default(), &[("s1", every("1h")), ("s2", every("1h"))])]).await;
    world.plan_all().await;
    let running = world.claim(node, 5).await.remove(0);
    let waiting =
        store.live_runs().await.unwrap().into_iter().find(|run| run.state == RunState::Pending).unwrap();
    assert_eq!(store.cancel(world.now, waiting.id, Reason::Requested).await.unwrap(), Cancelled::Ended);
    assert_eq!(
        store.cancel(world.now, waiting.id, Reason::Requested).await.unwrap(),
        Cancelled::Before(RunState::Cancelled)
    );
    assert_eq!(store.cancel(world.now, running.run, Reason::Requested).await.unwrap(), Cancelled::Told(node));
    assert_eq!(
        store.cancel(world.now, running.run, Reason::Stopped).await.unwrap(),
        Cancelled::Told(node),
        "the first reason stays"
    );
    let unknown = world.run_id();
    assert_eq!(store.cancel(world.now, unknown, Reason::Requested).await.unwrap(), Cancelled::NotFound);
    let lease = store.nodes().await.unwrap()[0].lease_until;
    let rescued = store.fence(world.now, node, lease).await.unwrap().unwrap();
    assert_eq!(rescued.ended, [(running.run, RunState::Cancelled)], "no new attempt after a cancel");
    assert_eq!(store.run(running.run).await.unwrap().unwrap().reason, Some(Reason::Requested));
}

async fn a_key_makes_a_repeat_answer_with_the_first_run(store: &impl Store) {
    let mut world = World::new(store);
    world.apply(&fleet(1)).await;
    let (first, answer) = world.enqueue("free/hook", Some(("k", 1))).await;
    assert_eq!(answer, Enqueued::Made);
    assert_eq!(world.enqueue("free/hook", Some(("k", 1))).await.1, Enqueued::Repeat(first));
    assert_eq!(world.enqueue("free/hook", Some(("k", 2))).await.1, Enqueued::KeyReused(first));
    assert_eq!(
        world.enqueue("free/allow", Some(("k", 2))).await.1,
        Enqueued::Made,
        "a key belongs to its schedule"
    );
    world.advance(25 * 3_600_000);
    assert_eq!(world.enqueue("free/hook", Some(("k", 2))).await.1, Enqueued::Made, "a key is kept for a day");
}

async fn many_requests_are_made_in_one_commit_and_in_order(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let schedules = [("s", cron("*/5 * * * *")), ("t", cron("*/5 * * * *")), ("gone", cron("*/5 * * * *"))];
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    let past = world.now - SignedDuration::from_hours(1);
    let live = world.past_request("a/s", past - SignedDuration::from_mins(5), None).await;
    assert_eq!(store.enqueue(world.now, &live).await.unwrap(), Enqueued::Made);
    let requests = [
        world.request_at("a/s", world.now, None).await,
        world.request_at("a/t", world.now, Some(("k", 1))).await,
        world.request_at("a/t", world.now, Some(("k", 1))).await,
        world.request_at("a/t", world.now, Some(("k", 2))).await,
        world.request_at("a/gone", world.now, Some(("k", 1))).await,
        world.past_request("a/s", past, Some(("past", 1))).await,
        world.past_request("a/s", past, None).await,
        world.past_request("a/s", past - SignedDuration::from_mins(5), Some(("late", 1))).await,
        world.request_at("a/s", world.now, None).await,
    ];
    let ids: Vec<RunId> = requests.iter().map(|request| request.run.id).collect();
    // A plan that does not know of them is not committed.
    world.advance(300_000);
    let due = store.due(world.now, None, 9).await.unwrap();
    let plans: Vec<Commit> = due.iter().map(|due| world.decide(due)).collect();
    world.apply(&[agent("a", unlimited(), &schedules[..2])]).await;
    let answers = store.enqueue_many(world.now, &requests).await.unwrap();
    let made = Enqueued::Made;
    let expected = [
        made,
        made,
        Enqueued::Repeat(ids[1]),
        Enqueued::KeyReused(ids[1]),
        Enqueued::NotFound,
        made,
        Enqueued::Repeat(ids[5]),
        Enqueued::Repeat(live.run.id),
        made,
    ];
    assert_eq!(answers, expected);
    assert_eq!(store.enqueue_many(world.now, &[]).await.unwrap(), []);
    assert!(store.commit(world.now, &plans).await.unwrap().iter().all(|one| *one == Committed::Lost));
    let mut claimed: Vec<RunId> = world.claim(node, 9).await.iter().map(|claimed| claimed.run).collect();
    claimed.sort_unstable();
    let mut expected = vec![live.run.id, ids[0], ids[1], ids[5], ids[8]];
    expected.sort_unstable();
    assert_eq!(claimed, expected);
    // The key of a tick whose run lived was not taken, nor that of a schedule that was gone.
    let late = world.request_at("a/s", world.now, Some(("late", 2))).await;
    assert_eq!(store.enqueue(world.now, &late).await.unwrap(), made);
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    assert_eq!(world.enqueue("a/gone", Some(("k", 2))).await.1, made);
    let names = store.schedule_ids(&["a/none", "a/t", "a/s"]).await.unwrap();
    assert_eq!(names[0], None);
    assert_eq!(names[1..], [Some(world.schedule("a/t").await.id), Some(world.schedule("a/s").await.id)]);
    world.assert_whole().await;
}

async fn a_tick_that_is_asked_for_twice_lives_once(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", cron("*/5 * * * *"))])]).await;
    let record = world.schedule("a/s").await;
    let compiled = record.definition.compile("a/s").unwrap();
    let tick_at = Some(world.now - SignedDuration::from_hours(1));
    let ask = async |world: &mut World<'_, _>| {
        let of = NewRun::by_hand(
            Defined::new(record.agent, record.id, &compiled, &unlimited()),
            world.run_id(),
            world.now,
        );
        let run = NewRun { tick_at, trigger: Trigger::Backfill, ..of };
        (run.id, store.enqueue(world.now, &Enqueue { run, key: None }).await.unwrap())
    };
    let (first, made) = ask(&mut world).await;
    assert_eq!(made, Enqueued::Made);
    assert_eq!(ask(&mut world).await.1, Enqueued::Repeat(first));
    let claimed = world.claim(node, 5).await.remove(0);
    assert_eq!((claimed.run, claimed.tick_at, claimed.trigger), (first, tick_at, Trigger::Backfill));
    world.complete(&claimed).await;
    assert_eq!(ask(&mut world).await.1, Enqueued::Made, "once it has ended it may be made again");
    world.assert_whole().await;
}

async fn a_repeated_backfill_does_not_spoil_a_plan(store: &impl Store) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("s", every("5m"))])]).await;
    let tick_at = world.now - SignedDuration::from_hours(1);
    let (first, _) = world.backfill("a/s", tick_at, None).await;
    let due = store.due(world.now, None, 9).await.unwrap();
    let commit = world.decide(&due[0]);
    assert_eq!(world.backfill("a/s", tick_at, None).await.1, Enqueued::Repeat(first));
    assert_eq!(store.commit(world.now, &[commit]).await.unwrap(), [Committed::Held]);
    world.assert_whole().await;
}

async fn a_key_for_a_tick_whose_run_lives_is_not_taken(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", cron("*/5 * * * *"))])]).await;
    let (one, other) = (world.now - SignedDuration::from_hours(1), world.now - SignedDuration::from_hours(2));
    let (first, answer) = world.backfill("a/s", one, Some(("old", 1))).await;
    assert_eq!(answer, Enqueued::Made);
    for _ in 0..2 {
        assert_eq!(world.backfill("a/s", one, Some(("new", 1))).await.1, Enqueued::Repeat(first));
    }
    let claimed = world.claim(node, 5).await.remove(0);
    world.complete(&claimed).await;
    let (second, answer) = world.backfill("a/s", one, Some(("new", 1))).await;
    assert_eq!(answer, Enqueued::Made, "the key was free");
    // The run of the tick goes before that of the key.
    assert_eq!(world.backfill("a/s", one, Some(("old", 2))).await.1, Enqueued::Repeat(second));
    assert_eq!(world.backfill("a/s", other, Some(("old", 1))).await.1, Enqueued::Repeat(first));
    assert_eq!(world.backfill("a/s", other, Some(("old", 2))).await.1, Enqueued::KeyReused(first));
    assert_eq!(store.live_runs().await.unwrap().len(), 1);
    world.assert_whole().await;
}

async fn schedules_of_one_scope_take_turns(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let guarded = |scope| {
        let options = Options { overlap: scope, ..Options::default() };
        schedule(When::Cron("*/5 * * * *".into()), options)
    };
    let of_agent = ["a", "b", "c"].map(|name| (name, guarded(Scope::Agent)));
    world.apply(&[agent("guarded", unlimited(), &of_agent)]).await;
    world.plan_all().await;
    let mut ran = Vec::new();
    for _ in 0..9 {
        world.advance(5 * 60_000);
        assert_eq!(world.plan_all().await, 1, "one at a time");
        let claimed = world.claim(node, 5).await.remove(0);
        world.complete(&claimed).await;
        ran.push(store.run(claimed.run).await.unwrap().unwrap().name);
    }
    let turns = ["guarded/a", "guarded/b", "guarded/c"].repeat(3);
    assert_eq!(ran, turns);
    world.assert_whole().await;
}

async fn one_run_is_claimed_by_its_id_past_those_that_wait_but_no_limit(store: &impl Store) {
    let mut world = World::new(store);
    let (node, guest) = (world.join(1).await, world.join(2).await);
    let schedules = [("s1", every("1h")), ("s2", every("1h")), ("s3", every("1h"))];
    world.apply(&[agent("a", AgentDefinition::default(), &schedules)]).await;
    assert_eq!(world.plan_all().await, 3);
    let order: Vec<_> = store.live_runs().await.unwrap().iter().map(|run| run.id).collect();
    let first = world.claim_only(guest, order[2]).await.remove(0);
    assert_eq!((first.run, first.attempt, first.epoch), (order[2], 1, 1), "the last in the row");
    assert_eq!(first.lane, "cron");
    assert!(world.claim_only(guest, order[2]).await.is_empty(), "it runs already");
    assert!(world.claim_only(guest, order[1]).await.is_empty(), "the agent is at its limit");
    assert!(world.claim(node, 5).await.is_empty(), "for others as well");
    world.complete(&first).await;
    // Those that were parked meanwhile are served, too.
    let second = world.claim_only(guest, order[1]).await.remove(0);
    assert_eq!(second.run, order[1]);
    assert!(world.claim(node, 5).await.is_empty());
    world.complete(&second).await;
    let third = world.claim(node, 5).await.remove(0);
    assert_eq!(third.run, order[0]);
    world.complete(&third).await;
    assert!(world.claim_only(node_id(9), order[0]).await.is_empty());
    world.assert_whole().await;
}

async fn a_pause_is_not_downtime(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", cron("*/5 * * * *")), ("c", every("5m"))])]).await;
    world.plan_all().await;
    let running = world.claim(node, 5).await.remove(0);
    let (s, c) = (world.schedule("a/s").await.id, world.schedule("a/c").await.id);
    for id in [s, c] {
        assert!(store.pause(world.now, id, Some("maintenance"), None).await.unwrap());
        assert!(
            !store.pause(world.now, id, Some("maintenance"), None).await.unwrap(),
            "it is paused like that already"
        );
    }
    // A pause during a run survives its end.
    world.advance(60_000);
    world.complete(&running).await;
    let record = world.schedule("a/c").await;
    assert_eq!(
        (record.token, record.status),
        (None, Status::Paused { reason: Some("maintenance".into()), until: None })
    );
    world.advance(3 * 24 * 3_600_000);
    assert_eq!(world.plan_all().await, 0);
    let range = SkipRange {
        reason: SkipReason::Disabled,
        from: start() + SignedDuration::from_mins(5),
        to: world.now - SignedDuration::from_mins(1),
        count: 864,
    };
    assert_eq!(store.resume(world.now, s, Resume::Skip).await.unwrap(), Some(864));
    assert_eq!(store.resume(world.now, c, Resume::CatchUp).await.unwrap(), Some(0));
    assert_eq!(store.resume(world.now, c, Resume::CatchUp).await.unwrap(), None);
    assert_eq!(store.skips(s, None, 1000).await.unwrap(), [range]);
    assert_eq!(world.plan_all().await, 1, "only the one that was asked to catch up");
    assert!(world.schedule("a/s").await.token.unwrap().tick_at > world.now);
    world.assert_whole().await;
}

async fn an_edit_fires_nothing_before_it_and_nothing_again(store: &impl Store) {
    let mut world = World::new(store);
    let fleet = |expression: &str, enabled| {
        let definition = schedule(When::Cron(expression.into()), Options { enabled, ..Options::default() });
        [agent("a", unlimited(), &[("s", definition)])]
    };
    world.apply(&fleet("*/5 * * * *", true)).await;
    world.plan_all().await;
    world.advance(5 * 60_000);
    assert_eq!(world.plan_all().await, 1);
    assert_eq!(
        world.apply(&fleet("*/5 * * * *", true)).await,
        Applied::default(),
        "an edit that changes nothing"
    );
    assert_eq!(world.apply(&fleet("*/1 * * * *", true)).await.changed, 1);
    assert_eq!(world.plan_all().await, 0, "the tick that has fired does not fire again");
    let record = world.schedule("a/s").await;
    assert_eq!(
        (record.revision, record.token.unwrap().tick_at),
        (2, world.now + SignedDuration::from_mins(1))
    );
    world.apply(&fleet("*/1 * * * *", false)).await;
    world.advance(10 * 60_000);
    assert_eq!((world.plan_all().await, world.schedule("a/s").await.status), (0, Status::Disabled));
    world.apply(&fleet("*/1 * * * *", true)).await;
    let record = world.schedule("a/s").await;
    assert_eq!((record.revision, record.status), (2, Status::Active));
    let skips = store.skips(record.id, None, 1000).await.unwrap();
    assert_eq!(skips.last().map(|range| (range.reason, range.count)), Some((SkipReason::Disabled, 10)));
    assert_eq!(world.plan_all().await, 0);
}

async fn what_left_the_source_is_retired_and_comes_back_new(store: &impl Store) {
    let mut world = World::new(store);
    world.apply(&[agent("a", AgentDefinition::default(), &[("s", every("5m"))])]).await;
    world.plan_all().await;
    let run = store.live_runs().await.unwrap()[0].id;
    let old = world.schedule("a/s").await.id;
    let applied = world.apply(&[]).await;
    assert_eq!((applied.retired, applied.ended), (1, vec![run]));
    assert_eq!(store.run(run).await.unwrap().unwrap().reason, Some(Reason::AgentRemoved));
    assert!(store.schedule("a/s").await.unwrap().is_none());
    assert_eq!(store.ended_runs(old, 10).await.unwrap().len(), 1, "history stays");
    world.apply(&[agent("a", AgentDefinition::default(), &[("s", every("5m"))])]).await;
    let record = world.schedule("a/s").await;
    assert!(record.id != old && record.last.is_none(), "nothing stale comes back");
    assert_eq!(store.source_digest("files").await.unwrap().as_deref(), Some("digest"));
    world.assert_whole().await;
}

async fn one_bad_schedule_disturbs_no_other(store: &impl Store) {
    let mut world = World::new(store);
    let bad = schedule(
        When::Cron("0 9 * * *".into()),
        Options { timezone: Some("Mars/Phobos".into()), ..Options::default() },
    );
    world.apply(&[agent("a", unlimited(), &[("bad", bad), ("good", every("5m"))])]).await;
    assert_eq!(world.plan_all().await, 1);
    let record = world.schedule("a/bad").await;
    let Status::Invalid { reason } = record.status else { panic!("{record:?}") };
    assert!(reason.starts_with("Unknown time zone \"Mars/Phobos\""), "{reason}");
    world.apply(&[agent("a", unlimited(), &[("bad", cron("0 9 * * *")), ("good", every("5m"))])]).await;
    world.plan_all().await;
    let record = world.schedule("a/bad").await;
    assert_eq!(
        (record.status, record.token.map(|token| token.kind)),
        (Status::Active, Some(TokenKind::Tick)),
        "it heals when it is corrected"
    );
    world.assert_whole().await;
}

async fn a_breaker_admits_one_probe(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let fragile = AgentDefinition {
        breaker: Some(Breaker { threshold: 2, reset_after_ms: 600_000 }),
        retry: Retry { max: 0, ..Retry::default() },
        ..unlimited()
    };
    let minutely = |anchor| {
        schedule(
            When::Every("1m".into()),
            Options { anchor, if_running: IfRunning::Allow, ..Options::default() },
        )
    };
    world
        .apply(&[agent(
            "a",
            fragile,
            &[("s1", minutely(AnchorName::Slot)), ("s2", minutely(AnchorName::Slot))],
        )])
        .await;
    world.plan_all().await;
    world.advance(60_000);
    assert_eq!(world.plan_all().await, 2);
    for claimed in world.claim(node, 5).await {
        assert_eq!(world.fail(&claimed).await, Finished::Ended(RunState::Failed));
    }
    let id = world.schedule("a/s1").await.agent;
    assert_eq!(store.breaker(id, "poll").await.unwrap().history.len(), 1);
    world.advance(60_000);
    assert_eq!(world.plan_all().await, 0);
    assert_eq!(world.schedule("a/s1").await.open_skip.unwrap().reason, SkipReason::CircuitOpen);
    world.advance(600_000);
    // Both schedules are due and both planners have seen the open breaker.
    let due = store.due(world.now, None, 10).await.unwrap();
    let commits: Vec<Commit> = due.iter().map(|due| world.decide(due)).collect();
    assert_eq!(store.commit(world.now, &commits).await.unwrap(), [Committed::Held, Committed::Lost]);
    assert_eq!(world.plan_all().await, 0);
    let probe = world.claim(node, 5).await;
    assert_eq!(probe.len(), 1, "one probe cluster-wide");
    world.complete(&probe[0]).await;
    let record = store.breaker(id, "poll").await.unwrap();
    assert_eq!((record.breaker.failures, record.history.len()), (0, 3));
    assert!(!store.reset_breaker(world.now, id, "poll").await.unwrap(), "it is closed already");
    world.assert_whole().await;
}

async fn pruning_never_lets_a_tick_fire_again(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", cron("* * * * *"))])]).await;
    world.plan_all().await;
    for n in 0..6 {
        world.advance(60_000);
        assert_eq!(world.plan_all().await, 1);
        let claimed = world.claim(node, 1).await.remove(0);
        let retryable = false;
        let outcome = if n % 3 == 0 {
            Outcome::Failed { reason: Reason::Error, retryable }
        } else {
            Outcome::Completed
        };
        world.finish(&claimed, outcome).await;
    }
    let id = world.schedule("a/s").await.id;
    let prune = |failures_before| retention(world.now, failures_before, 2);
    assert_eq!(store.prune(world.now, &prune(start())).await.unwrap().runs, 2, "a batch at a time");
    assert_eq!(store.prune(world.now, &prune(start())).await.unwrap().runs, 1);
    let left: Vec<_> = store.ended_runs(id, 10).await.unwrap().iter().map(|run| run.state).collect();
    assert_eq!(left, [RunState::Completed, RunState::Failed, RunState::Failed], "failures stay longer");
    while store.prune(world.now, &prune(world.now)).await.unwrap().runs > 0 {}
    assert_eq!(store.ended_runs(id, 10).await.unwrap().len(), 1, "what has just ended stays");
    assert_eq!(world.plan_all().await, 0, "no tick fires again");
    world.advance(60_000);
    assert_eq!(world.plan_all().await, 1);
    world.assert_whole().await;
}

async fn every_tick_has_one_result(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let scopes = [Scope::Schedule, Scope::Command, Scope::Agent];
    let schedules: Vec<_> = scopes
        .iter()
        .zip(["s1", "s2", "s3"])
        .map(|(overlap, name)| {
            (
                name,
                schedule(When::Cron("* * * * *".into()), Options { overlap: *overlap, ..Options::default() }),
            )
        })
        .collect();
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    world.plan_all().await;
    let mut running: Vec<Claimed> = Vec::new();
    for minute in 1..=60i64 {
        // Downtime now and then.
        world.advance(60_000);
        if minute % 7 < 3 {
            continue;
        }
        world.plan_all().await;
        running.extend(world.claim(node, 5).await);
        if minute % 3 == 0 && !running.is_empty() {
            let claimed = running.remove(0);
            world.complete(&claimed).await;
        }
    }
    world.plan_all().await;
    for name in ["a/s1", "a/s2", "a/s3"] {
        let record = world.schedule(name).await;
        let live =
            store.live_runs().await.unwrap().iter().filter(|run| run.schedule == record.id).count() as u64;
        let ended = store.ended_runs(record.id, 1000).await.unwrap().len() as u64;
        let skipped: u64 = store
            .skips(record.id, None, 1000)
            .await
            .unwrap()
            .iter()
            .chain(&record.open_skip)
            .map(|range| range.count)
            .sum();
        assert_eq!(
            live + ended + skipped,
            60,
            "{name}: {live} live, {ended} ended, {skipped} skipped or missed"
        );
    }
    world.assert_whole().await;
}
