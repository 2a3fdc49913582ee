//! Sentences about the order of starting, and about what runs wait for.

use belfry_core::definition::{IfRunning, Options, Scope, When};
use belfry_core::rescue::Rescues;
use belfry_core::retry::Outcome;
use belfry_core::{AgentDefinition, NodeId, RunId, ScheduleDefinition};
use belfry_store::*;
use belfry_time::SignedDuration;

use super::world::*;

/// All of them, each on a store of its own.
pub async fn all<S: Store>(fresh: impl AsyncFn() -> S) {
    a_run_that_queues_waits_for_whatever_runs_in_its_scope(&fresh().await).await;
    a_run_that_waits_for_its_own_turn_holds_nobody_in_its_scope(&fresh().await).await;
    a_run_that_cancels_starts_after_what_it_cancelled_whatever_made_that(&fresh().await).await;
    nobody_younger_starts_while_a_run_waits_to_be_alone(&fresh().await).await;
    a_run_waits_for_earlier_ones_of_its_schedule_and_not_for_others_that_only_wait(&fresh().await).await;
    runs_of_sessions_hold_nobody(&fresh().await).await;
    a_run_that_comes_back_keeps_its_place(&fresh().await).await;
    waiting_runs_follow_labels_and_lanes_of_the_newest_definition(&fresh().await).await;
    a_new_limit_holds_for_runs_that_wait_and_counts_those_that_run(&fresh().await).await;
    runs_that_an_edit_brings_under_a_limit_were_not_let_in_by_it(&fresh().await).await;
    a_new_overlap_holds_for_runs_that_wait_and_counts_those_that_run(&fresh().await).await;
    a_plan_that_was_made_before_an_edit_does_not_hold(&fresh().await).await;
    a_total_is_dealt_out_to_the_lanes_in_turn(&fresh().await).await;
    a_new_number_of_retries_holds_for_runs_that_exist(&fresh().await).await;
    a_clock_that_was_set_back_frees_who_waits_behind_a_run_that_is_not_due_by_it(&fresh().await).await;
    a_run_that_was_ready_by_a_later_clock_is_ready(&fresh().await).await;
    a_run_that_reaches_the_store_after_the_clock_was_set_back_does_not_wait_for_it(&fresh().await).await;
    a_run_that_has_come_back_keeps_its_place_when_the_clock_is_set_back(&fresh().await).await;
    a_run_that_was_put_off_by_a_later_clock_does_not_wait_for_it(&fresh().await).await;
    a_run_that_comes_back_before_a_claim_notices_the_clock_does_not_wait_for_it(&fresh().await).await;
    a_run_that_was_spread_keeps_its_place_when_the_clock_is_set_back(&fresh().await).await;
    a_run_that_comes_back_does_not_wait_for_a_clock_that_was_set_back(&fresh().await).await;
    a_late_claim_lets_nobody_overtake_behind_a_retry_that_is_not_due_by_it(&fresh().await).await;
    a_late_claim_lets_nobody_overtake_behind_a_higher_priority_that_is_not_due_by_it(&fresh().await).await;
    a_place_that_a_queued_run_leaves_at_a_limit_is_filled_before_a_run_starts_alone(&fresh().await).await;
    a_run_waits_by_its_own_command_whatever_its_schedule_has_now(&fresh().await).await;
}

fn by_hand(if_running: IfRunning, overlap: Scope, command: &str) -> ScheduleDefinition {
    let options = Options { if_running, overlap, command: command.into(), ..Options::default() };
    schedule(When::Webhook(serde_json::json!({})), options)
}

fn ids(claimed: &[Claimed]) -> Vec<RunId> {
    claimed.iter().map(|claimed| claimed.run).collect()
}

impl<S: Store> World<'_, S> {
    /// A run by hand, and a moment later.
    async fn next(&mut self, name: &str) -> RunId {
        self.advance(1);
        self.enqueue(name, None).await.0
    }

    /// A run that may start so long after it is made.
    async fn next_after(&mut self, name: &str, delay: SignedDuration) -> RunId {
        let (run, made) = self.enqueue_at(name, self.now + delay, None).await;
        assert_eq!(made, Enqueued::Made);
        run
    }
}

async fn a_run_that_queues_waits_for_whatever_runs_in_its_scope(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let skip = |command| by_hand(IfRunning::Skip, Scope::Schedule, command);
    world
        .apply(&[agent(
            "a",
            unlimited(),
            &[
                ("any", by_hand(IfRunning::Queue, Scope::Agent, "poll")),
                ("sync", by_hand(IfRunning::Queue, Scope::Command, "sync")),
                ("skip", skip("poll")),
                ("skip_sync", skip("sync")),
                ("allow", by_hand(IfRunning::Allow, Scope::Schedule, "other")),
            ],
        )])
        .await;
    let allow = world.next("a/allow").await;
    let running = world.claim(node, 9).await;
    assert_eq!(ids(&running), [allow]);
    let sync = world.next("a/sync").await;
    let started = world.claim(node, 9).await;
    assert_eq!(ids(&started), [sync], "another command does not matter to it");
    let any = world.next("a/any").await;
    assert!(world.claim(node, 9).await.is_empty(), "two others of the agent run");
    world.complete(&running[0]).await;
    assert!(world.claim(node, 9).await.is_empty(), "one still runs");
    world.complete(&started[0]).await;
    let claimed = world.claim(node, 9).await;
    assert_eq!(ids(&claimed), [any]);
    let other = world.next("a/skip_sync").await;
    assert_eq!(ids(&world.claim(node, 9).await), [other], "only starting alone was asked for");
    world.assert_whole().await;
}

async fn a_run_that_waits_for_its_own_turn_holds_nobody_in_its_scope(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let schedules = [
        ("sync", by_hand(IfRunning::Queue, Scope::Command, "sync")),
        ("old", by_hand(IfRunning::Queue, Scope::Command, "old")),
    ];
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    world.next("a/sync").await;
    let running = world.claim(node, 9).await;
    // A run by hand of the command that the schedule had before.
    let mut again = world.request_at("a/sync", world.now, None).await;
    again.run.command = "old".into();
    assert_eq!(store.enqueue(world.now, &again).await.unwrap(), Enqueued::Made);
    let younger = world.next("a/old").await;
    assert_eq!(ids(&world.claim(node, 9).await), [younger], "the older one waits for its turn anyway");
    world.complete(&running[0]).await;
    assert!(world.claim(node, 9).await.is_empty(), "now the younger one runs in its scope");
    world.assert_whole().await;
}

async fn a_run_that_cancels_starts_after_what_it_cancelled_whatever_made_that(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let cancel = schedule(
        When::Cron("* * * * *".into()),
        Options { if_running: IfRunning::Cancel, overlap: Scope::Agent, ..Options::default() },
    );
    let five = AgentDefinition { max_concurrent: Some(5), ..AgentDefinition::default() };
    let hand = by_hand(IfRunning::Skip, Scope::Schedule, "poll");
    world.apply(&[agent("a", five, &[("hand", hand), ("tick", cancel)])]).await;
    world.plan_all().await;
    world.next("a/hand").await;
    let old = world.claim(node, 9).await;
    assert_eq!(old.len(), 1);
    world.advance(60_000);
    assert_eq!(world.plan_all().await, 1);
    assert!(world.claim(node, 9).await.is_empty(), "what it cancelled is still there");
    world.finish(&old[0], Outcome::Cancelled(belfry_core::Reason::Overlap)).await;
    assert_eq!(world.claim(node, 9).await.len(), 1);
    world.assert_whole().await;
}

async fn nobody_younger_starts_while_a_run_waits_to_be_alone(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let main = Options { lane: Some("main".into()), if_running: IfRunning::Allow, ..Options::default() };
    world
        .apply(&[agent(
            "a",
            unlimited(),
            &[
                ("alone", by_hand(IfRunning::Queue, Scope::Agent, "poll")),
                ("second", by_hand(IfRunning::Queue, Scope::Agent, "poll")),
                ("allow", by_hand(IfRunning::Allow, Scope::Schedule, "poll")),
                ("main", schedule(When::Webhook(serde_json::json!({})), main)),
            ],
        )])
        .await;
    let first = world.next("a/allow").await;
    let running = world.claim(node, 9).await;
    assert_eq!(ids(&running), [first]);
    let alone = world.next("a/alone").await;
    let younger = [world.next("a/allow").await, world.next("a/main").await, world.next("a/allow").await];
    let second = world.next("a/second").await;
    let youngest = world.next("a/allow").await;
    for _ in 0..3 {
        assert!(world.claim(node, 9).await.is_empty(), "the run that waits to be alone is older than all");
    }
    world.complete(&running[0]).await;
    let claimed = world.claim(node, 9).await;
    assert_eq!(
        ids(&claimed),
        [alone, younger[0], younger[2], younger[1]],
        "up to the next that is to be alone"
    );
    for claimed in &claimed[..3] {
        world.complete(claimed).await;
    }
    assert!(world.claim(node, 9).await.is_empty());
    world.complete(&claimed[3]).await;
    assert_eq!(ids(&world.claim(node, 9).await), [second, youngest]);
    world.assert_whole().await;
}

async fn a_run_waits_for_earlier_ones_of_its_schedule_and_not_for_others_that_only_wait(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let queue = || by_hand(IfRunning::Queue, Scope::Agent, "poll");
    world.apply(&[agent("a", unlimited(), &[("one", queue()), ("two", queue())])]).await;
    let first = world.next("a/one").await;
    let claimed = world.claim(node, 9).await;
    world.fail(&claimed[0]).await;
    let next = world.next("a/one").await;
    let other = world.next("a/two").await;
    let claimed = world.claim(node, 9).await;
    assert_eq!(
        ids(&claimed),
        [other],
        "the first of a/one waits for its retry, which holds the next of a/one alone"
    );
    world.complete(&claimed[0]).await;
    assert!(world.claim(node, 9).await.is_empty());
    world.advance(60_000);
    let claimed = world.claim(node, 9).await;
    assert_eq!(ids(&claimed), [first]);
    world.complete(&claimed[0]).await;
    assert_eq!(ids(&world.claim(node, 9).await), [next]);
    world.assert_whole().await;
}

async fn runs_of_sessions_hold_nobody(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let talk = chat(serde_json::json!({"debounce": "0s"}));
    let queue = by_hand(IfRunning::Queue, Scope::Agent, "poll");
    world.apply(&[agent("a", unlimited(), &[("talk", talk), ("one", queue)])]).await;
    world.send("a/talk", "x", "hello", |_| {}).await;
    assert_eq!(world.claim(node, 9).await.len(), 1);
    let one = world.next("a/one").await;
    assert_eq!(ids(&world.claim(node, 9).await), [one]);
    world.send("a/talk", "y", "hello", |_| {}).await;
    assert_eq!(world.claim(node, 9).await.len(), 1);
    world.assert_whole().await;
}

async fn a_run_that_comes_back_keeps_its_place(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let one = AgentDefinition { max_concurrent: Some(1), ..AgentDefinition::default() };
    let queue = by_hand(IfRunning::Queue, Scope::Schedule, "poll");
    let allow = by_hand(IfRunning::Allow, Scope::Schedule, "poll");
    world.apply(&[agent("a", unlimited(), &[("queue", queue)]), agent("b", one, &[("allow", allow)])]).await;
    for name in ["a/queue", "b/allow"] {
        let runs = [world.next(name).await, world.next(name).await, world.next(name).await];
        let claimed = world.claim(node, 1).await;
        assert_eq!(ids(&claimed), runs[..1], "{name}");
        world.advance(1_000);
        world.finish(&claimed[0], Outcome::Shutdown).await;
        let claimed = world.claim(node, 1).await;
        assert_eq!(ids(&claimed), runs[..1], "{name}: back from a node that shut down");
        world.advance(1_000);
        let lease = store.nodes().await.unwrap()[0].lease_until;
        store.fence(world.now, node, lease).await.unwrap();
        world.join(1).await;
        let mut order = Vec::new();
        for _ in 0..3 {
            let claimed = world.claim(node, 9).await;
            order.extend(ids(&claimed));
            world.complete(&claimed[0]).await;
        }
        assert_eq!(order, runs, "{name}: back from a node that died");
    }
    world.assert_whole().await;
}

async fn waiting_runs_follow_labels_and_lanes_of_the_newest_definition(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let with = |needs: &[&str], lane: &str| AgentDefinition {
        needs: needs.iter().map(|label| (*label).to_owned()).collect(),
        lane: lane.into(),
        ..unlimited()
    };
    let queue = || by_hand(IfRunning::Queue, Scope::Schedule, "poll");
    let fleet = |definition, lane: Option<&str>| {
        let mut own = by_hand(IfRunning::Allow, Scope::Schedule, "poll");
        own.options.lane = lane.map(str::to_owned);
        [agent("a", definition, &[("queue", queue()), ("own", own)])]
    };
    world.apply(&fleet(with(&["typo"], "cron"), Some("elsewhere"))).await;
    let runs = [world.next("a/queue").await, world.next("a/own").await];
    assert!(world.claim(node, 9).await.is_empty());
    world.apply(&fleet(with(&["gpu"], "nowhere"), None)).await;
    assert!(world.claim(node, 9).await.is_empty(), "the lane is served by nobody");
    assert_eq!(store.run(runs[0]).await.unwrap().unwrap().lane, "nowhere");
    world.apply(&fleet(with(&["gpu"], "main"), Some("cron"))).await;
    let claimed = world.claim(node, 9).await;
    assert_eq!(ids(&claimed), [runs[1], runs[0]]);
    assert_eq!(claimed[1].lane, "main");
    world.apply(&fleet(with(&["gpu"], "cron"), None)).await;
    assert_eq!(store.run(runs[0]).await.unwrap().unwrap().lane, "cron", "it runs, and counts there");
    world.finish(&claimed[1], Outcome::Shutdown).await;
    assert_eq!(world.claim(node, 9).await[0].lane, "cron", "it came back, and waits there");
    world.assert_whole().await;
}

async fn a_new_limit_holds_for_runs_that_wait_and_counts_those_that_run(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let allow = || by_hand(IfRunning::Allow, Scope::Schedule, "poll");
    let with = |max_concurrent| {
        let definition = AgentDefinition { max_concurrent, ..AgentDefinition::default() };
        [agent("a", definition, &[("allow", allow())])]
    };
    world.apply(&with(None)).await;
    let runs = [world.next("a/allow").await, world.next("a/allow").await, world.next("a/allow").await];
    let running = world.claim(node, 1).await;
    assert_eq!(ids(&running), runs[..1]);
    world.apply(&with(Some(1))).await;
    assert!(world.claim(node, 9).await.is_empty(), "one runs already");
    world.complete(&running[0]).await;
    assert_eq!(ids(&world.claim(node, 9).await), runs[1..2]);
    assert!(world.claim(node, 9).await.is_empty());
    world.apply(&with(None)).await;
    assert_eq!(ids(&world.claim(node, 9).await), runs[2..]);
    world.assert_whole().await;
}

/// The integrity check compares the start of a run with the change of the limit: a clock that was set back in between makes
/// the runs that were there before look as if the limit had let them in.
async fn runs_that_an_edit_brings_under_a_limit_were_not_let_in_by_it(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let with = |max_concurrent| {
        let definition = AgentDefinition { max_concurrent, ..AgentDefinition::default() };
        [agent("a", definition, &[("allow", by_hand(IfRunning::Allow, Scope::Schedule, "poll"))])]
    };
    world.apply(&with(None)).await;
    world.next("a/allow").await;
    world.next("a/allow").await;
    assert_eq!(world.claim(node, 9).await.len(), 2);
    world.now -= SignedDuration::from_hours(1);
    world.apply(&with(Some(1))).await;
    world.assert_whole().await;
}

async fn a_new_overlap_holds_for_runs_that_wait_and_counts_those_that_run(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let with = |if_running| {
        let one = by_hand(if_running, Scope::Agent, "poll");
        [agent("a", unlimited(), &[("one", one), ("two", by_hand(IfRunning::Skip, Scope::Schedule, "poll"))])]
    };
    world.apply(&with(IfRunning::Allow)).await;
    world.next("a/two").await;
    let running = world.claim(node, 9).await;
    let one = world.next("a/one").await;
    world.apply(&with(IfRunning::Queue)).await;
    assert!(world.claim(node, 9).await.is_empty(), "another of its agent runs");
    world.complete(&running[0]).await;
    let running = world.claim(node, 9).await;
    assert_eq!(ids(&running), [one]);
    let next = [world.next("a/one").await, world.next("a/one").await];
    assert!(world.claim(node, 9).await.is_empty());
    world.apply(&with(IfRunning::Allow)).await;
    assert_eq!(ids(&world.claim(node, 9).await), next, "nothing holds them any more");
    world.assert_whole().await;
}

async fn a_total_is_dealt_out_to_the_lanes_in_turn(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let allow = || by_hand(IfRunning::Allow, Scope::Schedule, "poll");
    let main = AgentDefinition { lane: "main".into(), ..unlimited() };
    world.apply(&[agent("a", unlimited(), &[("s", allow())]), agent("b", main, &[("s", allow())])]).await;
    let runs = [world.next("a/s").await, world.next("a/s").await, world.next("a/s").await];
    assert_eq!(
        ids(&world.claim_in_total(node, 9, 1, Rescues::Any).await),
        runs[..1],
        "the other lane has nothing"
    );
    let other = [world.next("b/s").await, world.next("b/s").await, world.next("b/s").await];
    assert_eq!(ids(&world.claim_in_total(node, 9, 3, Rescues::Any).await), [runs[1], runs[2], other[0]]);
    assert!(world.claim_in_total(node, 9, 0, Rescues::Any).await.is_empty());
    assert_eq!(
        ids(&world.claim_in_total(node, 9, 5, Rescues::Any).await),
        other[1..],
        "and this one has all that is left"
    );
    world.assert_whole().await;
}

async fn a_new_number_of_retries_holds_for_runs_that_exist(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let fleet = |max: u32| {
        let retry = belfry_core::definition::Retry { max, ..Default::default() };
        let definition = AgentDefinition { retry, ..unlimited() };
        [agent("a", definition, &[("s", by_hand(IfRunning::Allow, Scope::Schedule, "poll"))])]
    };
    world.apply(&fleet(5)).await;
    let (retried, waiting) = (world.next("a/s").await, world.next("a/s").await);
    let claimed = world.claim_only(node, retried).await;
    world.fail(&claimed[0]).await;
    world.apply(&fleet(0)).await;
    let max = async |run| store.run(run).await.unwrap().unwrap().max_attempts;
    assert_eq!((max(retried).await, max(waiting).await), (2, 1), "the retry that it waits for still comes");
    world.advance(60_000);
    let claimed = world.claim_only(node, retried).await;
    assert_eq!((claimed[0].attempt, claimed[0].max_attempts), (2, 2));
    world.apply(&fleet(3)).await;
    assert_eq!((max(retried).await, max(waiting).await), (4, 4));
    let claimed = world.claim_only(node, waiting).await;
    world.apply(&fleet(0)).await;
    assert_eq!(max(waiting).await, 1, "while its attempt runs");
    world.fail(&claimed[0]).await;
    assert_eq!(max(waiting).await, 2, "the attempt had begun with retries left");
    world.assert_whole().await;
}

async fn a_clock_that_was_set_back_frees_who_waits_behind_a_run_that_is_not_due_by_it(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let alone = by_hand(IfRunning::Queue, Scope::Agent, "poll");
    let beside = by_hand(IfRunning::Allow, Scope::Schedule, "poll");
    world.apply(&[agent("a", unlimited(), &[("alone", alone), ("beside", beside)])]).await;
    let retried = world.next("a/alone").await;
    let claimed = world.claim(node, 9).await;
    assert_eq!(ids(&claimed), [retried]);
    world.fail(&claimed[0]).await;
    let running = world.next("a/beside").await;
    assert_eq!(ids(&world.claim(node, 9).await), [running]);
    let younger = world.next("a/beside").await;
    world.advance(60_000);
    assert!(world.claim(node, 9).await.is_empty(), "the retry waits to be alone, the younger run behind it");
    world.advance(-60_000);
    assert_eq!(ids(&world.claim(node, 9).await), [younger], "by this clock the retry is not due yet");
    world.assert_whole().await;
}

async fn a_run_that_was_ready_by_a_later_clock_is_ready(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let one = AgentDefinition { max_concurrent: Some(1), ..AgentDefinition::default() };
    let by_hand = by_hand(IfRunning::Allow, Scope::Schedule, "poll");
    world.apply(&[agent("a", one, &[("s", by_hand), ("t", cron("* * * * *"))])]).await;
    world.plan_all().await;
    let first = world.next("a/s").await;
    let first_claimed = world.claim(node, 9).await;
    assert_eq!(ids(&first_claimed), [first]);
    world.advance(7_200_000);
    let second = world.next("a/s").await;
    world.advance(1_000);
    let third = world.next("a/s").await;
    assert!(world.claim(node, 9).await.is_empty(), "its agent is at its limit");
    world.advance(-7_200_000);
    world.complete(&first_claimed[0]).await;
    for run in [second, third] {
        let claimed = world.claim(node, 9).await;
        assert_eq!(ids(&claimed), [run], "in the order in which they were made");
        world.complete(&claimed[0]).await;
    }
    // It was due when it was planned, so it is due, also if its tick lies ahead now.
    world.advance(7_200_000);
    assert!(world.claim(node, 9).await.is_empty());
    world.plan_all().await;
    world.advance(-3_600_000);
    assert_eq!(world.claim(node, 9).await.len(), 1);
    world.assert_whole().await;
}

async fn a_run_that_reaches_the_store_after_the_clock_was_set_back_does_not_wait_for_it(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world
        .apply(&[agent("a", unlimited(), &[("s", by_hand(IfRunning::Allow, Scope::Schedule, "poll"))])])
        .await;
    for step in [7_200_000, -7_200_000] {
        world.advance(step);
        assert!(world.claim(node, 9).await.is_empty());
    }
    // The store has noticed it. This run was asked for by the later clock.
    world.advance(7_200_000);
    let late = world.next("a/s").await;
    world.advance(-7_200_000);
    assert_eq!(ids(&world.claim(node, 9).await), [late]);
    world.assert_whole().await;
}

async fn a_run_that_has_come_back_keeps_its_place_when_the_clock_is_set_back(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let queue = by_hand(IfRunning::Queue, Scope::Schedule, "poll");
    world.apply(&[agent("a", unlimited(), &[("s", queue)])]).await;
    assert!(world.claim(node, 9).await.is_empty());
    world.advance(7_200_000);
    let retried = world.next("a/s").await;
    let claimed = world.claim(node, 9).await;
    assert_eq!(ids(&claimed), [retried]);
    let younger = world.next("a/s").await;
    world.fail(&claimed[0]).await;
    assert!(world.claim(node, 9).await.is_empty(), "the younger one waits behind the retry");
    world.advance(-3_600_000);
    assert!(world.claim(node, 9).await.is_empty(), "also by this clock");
    // The second time, what waits is due by the clock of the first.
    world.advance(-3_600_000);
    let claimed = world.claim(node, 9).await;
    assert_eq!(ids(&claimed), [retried]);
    world.complete(&claimed[0]).await;
    assert_eq!(ids(&world.claim(node, 9).await), [younger]);
    world.assert_whole().await;
}

async fn a_run_that_comes_back_does_not_wait_for_a_clock_that_was_set_back(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let hand = || by_hand(IfRunning::Allow, Scope::Schedule, "poll");
    world
        .apply(&[agent("a", unlimited(), &[("s", hand())]), agent("b", unlimited(), &[("s", hand())])])
        .await;
    let old = world.next("a/s").await;
    assert!(world.claim_only(node, old).await[0].attempt == 1);
    world.advance(7_200_000);
    let retried = world.next("b/s").await;
    let claimed = world.claim(node, 9).await;
    world.fail(&claimed[0]).await;
    assert!(world.claim(node, 9).await.is_empty(), "it waits for its retry");
    world.advance(-3_600_000);
    // A rescue by the clock as it is now.
    let lease = world.store.nodes().await.unwrap()[0].lease_until;
    assert_eq!(world.store.fence(world.now, node, lease).await.unwrap().unwrap().pending, [old]);
    let node = world.join(2).await;
    assert_eq!(ids(&world.claim(node, 9).await), [old]);
    world.advance(30_000);
    assert_eq!(ids(&world.claim(node, 9).await), [retried], "its delay is what it was");
    world.assert_whole().await;
}

async fn a_run_that_was_put_off_by_a_later_clock_does_not_wait_for_it(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world
        .apply(&[agent("a", unlimited(), &[("s", by_hand(IfRunning::Allow, Scope::Schedule, "poll"))])])
        .await;
    let run = world.next("a/s").await;
    let claimed = world.claim(node, 9).await;
    // Its attempt ends two hours later, and the clock goes back by one.
    world.advance(7_200_000);
    world.fail(&claimed[0]).await;
    world.advance(-3_600_000);
    assert!(world.claim(node, 9).await.is_empty(), "it waits for its retry");
    world.advance(30_000);
    assert_eq!(ids(&world.claim(node, 9).await), [run]);
    world.assert_whole().await;
}

/// A node that starts fences those before it, and claims then.
async fn a_run_that_comes_back_before_a_claim_notices_the_clock_does_not_wait_for_it(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let by_hand = || by_hand(IfRunning::Allow, Scope::Schedule, "poll");
    world.apply(&["a", "b"].map(|name| agent(name, unlimited(), &[("s", by_hand())]))).await;
    let (rescued, failed) = (world.next("a/s").await, world.next("b/s").await);
    let claimed = world.claim(node, 9).await;
    assert_eq!(claimed.len(), 2);
    world.advance(-3_600_000);
    world.fail(claimed.iter().find(|claimed| claimed.run == failed).unwrap()).await;
    let lease = world.store.nodes().await.unwrap()[0].lease_until;
    assert_eq!(world.store.fence(world.now, node, lease).await.unwrap().unwrap().pending, [rescued]);
    let node = world.join(2).await;
    world.advance(100);
    assert_eq!(ids(&world.claim(node, 9).await), [rescued], "the other waits for its retry");
    world.advance(30_000);
    assert_eq!(ids(&world.claim(node, 9).await), [failed]);
    world.assert_whole().await;
}

async fn a_run_that_was_spread_keeps_its_place_when_the_clock_is_set_back(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let queue = by_hand(IfRunning::Queue, Scope::Schedule, "poll");
    world.apply(&[agent("a", unlimited(), &[("s", queue)])]).await;
    let running = at_its_limit(&mut world, node, "a/s").await;
    world.advance(7_200_000);
    let spread = world.next_after("a/s", SignedDuration::from_secs(30)).await;
    world.advance(60_000);
    let younger = world.next("a/s").await;
    assert!(world.claim(node, 9).await.is_empty(), "one is running");
    world.advance(-7_000_000);
    world.complete(&running).await;
    for run in [spread, younger] {
        let claimed = world.claim(node, 9).await;
        assert_eq!(ids(&claimed), [run]);
        world.complete(&claimed[0]).await;
    }
    world.assert_whole().await;
}

/// An agent with one place, which is taken; and the run that has it.
async fn at_its_limit<S: Store>(world: &mut World<'_, S>, node: NodeId, schedule: &str) -> Claimed {
    let running = world.next(schedule).await;
    let mut claimed = world.claim(node, 9).await;
    assert_eq!(ids(&claimed), [running]);
    claimed.remove(0)
}

/// The place at a limit is given to the first that waits there. A claim whose instant was read a moment before, by which that
/// run is not due yet, gives the place to the next, and not to one that has just come.
async fn a_late_claim_lets_nobody_overtake_behind_a_retry_that_is_not_due_by_it(store: &impl Store) {
    let mut world = World::new(store);
    let nodes = [world.join(1).await, world.join(2).await];
    let one = AgentDefinition { max_concurrent: Some(1), ..AgentDefinition::default() };
    let by_hand = by_hand(IfRunning::Allow, Scope::Schedule, "poll");
    world.apply(&[agent("a", one, &[("s", by_hand)])]).await;
    let failing = at_its_limit(&mut world, nodes[0], "a/s").await;
    world.fail(&failing).await;
    let running = at_its_limit(&mut world, nodes[0], "a/s").await;
    let waiting = [world.next("a/s").await, world.next("a/s").await];
    let retried = store.run(failing.run).await.unwrap().unwrap();
    world.now = retried.not_before;
    assert!(
        world.claim(nodes[0], 9).await.is_empty(),
        "all three wait at the limit, the retry before the others"
    );
    world.advance(-20);
    let young = world.next("a/s").await;
    world.complete(&running).await;
    let mut claimed = world.claim(nodes[1], 9).await;
    assert_eq!(ids(&claimed), [waiting[0]], "the retry is not due by this clock, and the next is");
    world.advance(20);
    for next in [failing.run, waiting[1], young] {
        world.complete(&claimed[0]).await;
        claimed = world.claim(nodes[0], 9).await;
        assert_eq!(ids(&claimed), [next]);
    }
    world.assert_whole().await;
}

async fn a_late_claim_lets_nobody_overtake_behind_a_higher_priority_that_is_not_due_by_it(
    store: &impl Store,
) {
    let mut world = World::new(store);
    let nodes = [world.join(1).await, world.join(2).await];
    let one = AgentDefinition { max_concurrent: Some(1), ..AgentDefinition::default() };
    let by_hand =
        |priority| schedule(When::Webhook(serde_json::json!({})), Options { priority, ..Options::default() });
    world.apply(&[agent("a", one, &[("low", by_hand(0)), ("high", by_hand(5))])]).await;
    let running = at_its_limit(&mut world, nodes[0], "a/low").await;
    let waiting = world.next("a/low").await;
    world.advance(20);
    let high = world.next("a/high").await;
    assert!(world.claim(nodes[0], 9).await.is_empty(), "both wait at the limit");
    world.advance(-10);
    let young = world.next("a/low").await;
    world.complete(&running).await;
    let mut claimed = world.claim(nodes[1], 9).await;
    assert_eq!(ids(&claimed), [waiting], "the higher priority is not due by this clock, and the next is");
    world.advance(20);
    for next in [high, young] {
        world.complete(&claimed[0]).await;
        claimed = world.claim(nodes[0], 9).await;
        assert_eq!(ids(&claimed), [next]);
    }
    world.assert_whole().await;
}

async fn a_place_that_a_queued_run_leaves_at_a_limit_is_filled_before_a_run_starts_alone(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let two = AgentDefinition { max_concurrent: Some(2), ..AgentDefinition::default() };
    let free = by_hand(IfRunning::Allow, Scope::Schedule, "poll");
    let queued = by_hand(IfRunning::Queue, Scope::Schedule, "poll");
    let alone = by_hand(IfRunning::Queue, Scope::Agent, "poll");
    let limited = agent("a", two, &[("free", free), ("queued", queued)]);
    world.apply(&[limited, agent("b", unlimited(), &[("alone", alone)])]).await;
    let running = [world.next("a/free").await, world.next("a/free").await];
    let running_now = world.claim(node, 9).await;
    assert_eq!(ids(&running_now), running);
    let first = world.next("a/queued").await;
    for _ in 0..2 {
        world.next("a/queued").await;
    }
    let free = world.next("a/free").await;
    assert!(world.claim(node, 9).await.is_empty(), "all four wait at the limit");
    // The first three are released, of which two have to wait for the first and leave a place to the last.
    for run in &running_now {
        world.complete(run).await;
    }
    let last = world.next("b/alone").await;
    assert_eq!(ids(&world.claim(node, 2).await), [first, free]);
    assert_eq!(ids(&world.claim(node, 9).await), [last]);
    world.assert_whole().await;
}

async fn a_plan_that_was_made_before_an_edit_does_not_hold(store: &impl Store) {
    let mut world = World::new(store);
    let with = |lane: &str| {
        [agent("a", AgentDefinition { lane: lane.into(), ..unlimited() }, &[("tick", every("1m"))])]
    };
    world.apply(&with("cron")).await;
    let due = store.due(world.now, None, 9).await.unwrap();
    let commit = world.decide(&due[0]);
    world.apply(&with("main")).await;
    assert_eq!(store.commit(world.now, &[commit]).await.unwrap(), [Committed::Lost]);
    world.plan_all().await;
    let lanes: Vec<String> = store.live_runs().await.unwrap().into_iter().map(|run| run.lane).collect();
    assert_eq!(lanes, ["main"]);
    world.now += SignedDuration::from_mins(1);
    world.assert_whole().await;
}

async fn a_run_waits_by_its_own_command_whatever_its_schedule_has_now(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let yearly = || When::Cron("0 0 1 1 *".into());
    let fleet = |command: &str| {
        let command = command.to_owned();
        let queue =
            Options { if_running: IfRunning::Queue, overlap: Scope::Command, command, ..Options::default() };
        let allow = Options { if_running: IfRunning::Allow, command: "old".into(), ..Options::default() };
        [agent(
            "a",
            unlimited(),
            &[("alone", schedule(yearly(), queue)), ("beside", schedule(yearly(), allow))],
        )]
    };
    world.apply(&fleet("old")).await;
    world.enqueue("a/beside", None).await;
    let beside = world.claim(node, 9).await.remove(0);
    let (waiting, _) = world.enqueue("a/alone", None).await;
    assert_eq!(world.claim(node, 9).await, []);
    // One that waits when the command is changed.
    world.apply(&fleet("new")).await;
    assert_eq!(world.claim(node, 9).await, [], "the command that it has is running");
    world.complete(&beside).await;
    let claimed = world.claim(node, 9).await.remove(0);
    assert_eq!((claimed.run, claimed.command.as_str()), (waiting, "old"));
    world.complete(&claimed).await;

    // One that is made after the change, as a retry by hand is.
    world.apply(&fleet("newer")).await;
    world.enqueue("a/beside", None).await;
    let beside = world.claim(node, 9).await.remove(0);
    let record = world.schedule("a/alone").await;
    let compiled = record.definition.compile("a/alone").unwrap();
    let run = NewRun::by_hand(
        Defined::new(record.agent, record.id, &compiled, &unlimited()),
        world.run_id(),
        world.now,
    );
    let run = NewRun { command: "old".into(), ..run };
    let retried = run.id;
    store.enqueue(world.now, &Enqueue { run, key: None }).await.unwrap();
    world.enqueue("a/beside", None).await;
    assert_eq!(world.claim(node, 9).await, [], "neither it nor what came after it");
    world.complete(&beside).await;
    let claimed = world.claim(node, 1).await;
    assert_eq!(claimed.iter().map(|claimed| claimed.run).collect::<Vec<_>>(), [retried]);
    world.complete(&claimed[0]).await;
    assert_eq!(world.claim(node, 9).await.len(), 1);
    world.assert_whole().await;
}
