//! Sentences about what a store cannot keep: it disturbs nothing else.

use belfry_core::check::Status;
use belfry_core::definition::{Options, When};
use belfry_core::edit::Resume;
use belfry_core::{AgentDefinition, Reason, RunState, Trigger};
use belfry_store::*;

use super::world::*;

pub async fn all<S: Store>(fresh: impl AsyncFn() -> S) {
    a_tick_whose_run_lives_is_not_made_again_and_planning_goes_on(&fresh().await).await;
    a_schedule_waits_for_the_run_that_its_tick_has_already(&fresh().await).await;
    a_plan_that_is_refused_makes_its_schedule_invalid_until_it_is_edited_or_resumed(&fresh().await).await;
    text_is_kept_without_nul_and_within_bounds(&fresh().await).await;
    a_name_that_cannot_be_kept_is_refused_by_name(&fresh().await).await;
}

/// Plans what is due as a node does: all in one batch, apart where that is refused.
async fn plan<S: Store>(world: &mut World<'_, S>) -> (Vec<Commit>, Written<Commit, Committed>) {
    let due = world.store.due(world.now, None, 100).await.unwrap();
    let commits: Vec<Commit> = due.iter().map(|due| world.decide(due)).collect();
    let refused = world.store.commit(world.now, &commits).await.unwrap_err();
    assert!(refused.is_refused() && !refused.is_retryable(), "{refused}");
    let written = commit_apart(world.store, world.now, &commits).await;
    assert!(written.error.is_none(), "{:?}", written.error);
    assert!(written.answers.iter().all(|answer| *answer == Some(Committed::Held)), "{:?}", written.answers);
    (commits, written)
}

/// Makes a run of a schedule's next tick before the planner does.
pub async fn plant<S: Store>(world: &mut World<'_, S>, name: &str) -> RunRecord {
    let record = world.schedule(name).await;
    let compiled = record.definition.compile(name).unwrap();
    let id = world.run_id();
    let run = NewRun {
        tick_at: Some(record.token.unwrap().tick_at),
        trigger: Trigger::Schedule,
        ..NewRun::by_hand(Defined::new(record.agent, record.id, &compiled, &unlimited()), id, world.now)
    };
    let made = world.store.enqueue(world.now, &Enqueue { run, key: None }).await.unwrap();
    assert_eq!(made, Enqueued::Made);
    world.store.run(id).await.unwrap().unwrap()
}

pub fn allow(when: &str) -> belfry_core::ScheduleDefinition {
    let if_running = belfry_core::definition::IfRunning::Allow;
    schedule(When::Cron(when.into()), Options { if_running, ..Options::default() })
}

async fn a_tick_whose_run_lives_is_not_made_again_and_planning_goes_on(store: &impl Store) {
    let mut world = World::new(store);
    let others: Vec<String> = (0..20).map(|n| format!("other{n}")).collect();
    let mut schedules: Vec<_> = others.iter().map(|name| (name.as_str(), allow("* * * * *"))).collect();
    schedules.insert(7, ("planted", allow("* * * * *")));
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    world.plan_all().await;
    let planted = plant(&mut world, "a/planted").await;
    world.advance(60_000);
    let (_, written) = plan(&mut world).await;
    assert_eq!(written.changed.len(), 1);
    let (_, instead) = &written.changed[0];
    assert!(instead.runs.is_empty() && instead.invalid.is_none(), "{instead:?}");
    let live = store.live_runs().await.unwrap();
    assert_eq!(live.len(), 21, "one of each tick");
    let record = world.schedule("a/planted").await;
    assert_eq!(record.status, Status::Active);
    assert!(
        record.token.unwrap().tick_at > planted.tick_at.unwrap(),
        "the tick has its run; the next is armed"
    );
    world.advance(60_000);
    assert_eq!(world.plan_all().await, 21, "all go on");
    world.assert_whole().await;
}

async fn a_schedule_waits_for_the_run_that_its_tick_has_already(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", every("5m"))])]).await;
    let mut due = store.due(world.now, None, 1).await.unwrap();
    let mut commit = world.decide(&due[0]);
    while commit.runs.is_empty() {
        store.commit(world.now, &[commit]).await.unwrap();
        due = store.due(world.now, None, 1).await.unwrap();
        commit = world.decide(&due[0]);
    }
    // It lives already: somebody has planned the tick and the token is there all the same.
    let record = world.schedule("a/s").await;
    let run = NewRun { id: world.run_id(), ..commit.runs[0].clone() };
    let planted = run.id;
    store.enqueue(world.now, &Enqueue { run, key: None }).await.unwrap();
    commit.version = store.due(world.now, None, 1).await.unwrap()[0].version;
    let written = commit_apart(store, world.now, &[commit]).await;
    assert_eq!(written.answers, [Some(Committed::Held)], "{:?}", written.error);
    assert_eq!(world.schedule("a/s").await.waits_for, Some(planted));
    assert_eq!(store.live_runs().await.unwrap().len(), 1);
    let claimed = world.claim(node, 5).await;
    world.complete(&claimed[0]).await;
    assert!(world.schedule("a/s").await.token.is_some(), "its end arms the schedule");
    assert_eq!(world.schedule("a/s").await.revision, record.revision);
    world.assert_whole().await;
}

async fn a_plan_that_is_refused_makes_its_schedule_invalid_until_it_is_edited_or_resumed(store: &impl Store) {
    let mut world = World::new(store);
    let schedules = [("bad", cron("* * * * *")), ("good", cron("* * * * *")), ("fine", cron("* * * * *"))];
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    world.plan_all().await;
    let (taken, _) = world.enqueue("a/fine", None).await;
    world.advance(60_000);
    let due = store.due(world.now, None, 100).await.unwrap();
    let mut commits: Vec<Commit> = due.iter().map(|due| world.decide(due)).collect();
    let culprit = due.iter().position(|due| &*due.name == "a/bad").unwrap();
    // A run whose id is taken cannot be stored.
    commits[culprit].runs[0].id = taken;
    let refused = store.commit(world.now, &commits).await.unwrap_err();
    assert!(refused.is_refused(), "{refused}");
    let written = commit_apart(store, world.now, &commits).await;
    assert!(written.error.is_none() && written.answers.iter().all(Option::is_some), "{written:?}");
    assert_eq!(written.changed.len(), 1);
    assert_eq!(written.changed[0].0, culprit);
    let record = world.schedule("a/bad").await;
    let Status::Invalid { reason } = &record.status else { panic!("{:?}", record.status) };
    assert!(reason.starts_with("its tick could not be stored: "), "{reason}");
    assert!(record.token.is_none() && record.deferred.is_none());
    assert!(world.schedule("a/good").await.token.is_some());
    assert_eq!(
        store.due(world.now, None, 100).await.unwrap().len(),
        0,
        "nothing is asked for again and again"
    );
    // An edit heals it, also one that keeps the timing.
    let edited = schedule(
        When::Cron("* * * * *".into()),
        Options { prompt: Some("again".into()), ..Options::default() },
    );
    world
        .apply(&[agent("a", unlimited(), &[("bad", edited), schedules[1].clone(), schedules[2].clone()])])
        .await;
    let healed = world.schedule("a/bad").await;
    assert_eq!((healed.status, healed.revision), (Status::Active, record.revision + 1));
    world.plan_all().await;
    world.advance(60_000);
    assert!(world.plan_all().await >= 1);
    let made = store.live_runs().await.unwrap().into_iter().filter(|run| run.name == "a/bad").count();
    assert_eq!(made, 1);
    // A resume heals it as well: what was refused once may be stored by now.
    for run in store.live_runs().await.unwrap().iter().filter(|run| run.name == "a/good") {
        store.cancel(world.now, run.id, Reason::Requested).await.unwrap();
    }
    world.advance(60_000);
    let due = store.due(world.now, None, 100).await.unwrap();
    let mut commits: Vec<Commit> = due.iter().map(|due| world.decide(due)).collect();
    let culprit = due.iter().position(|due| &*due.name == "a/good").unwrap();
    commits[culprit].runs[0].id = taken;
    commit_apart(store, world.now, &commits).await;
    let record = world.schedule("a/good").await;
    assert!(matches!(record.status, Status::Invalid { .. }), "{:?}", record.status);
    assert!(store.resume(world.now, record.id, Resume::Skip).await.unwrap().is_some());
    assert_eq!(world.schedule("a/good").await.status, Status::Active);
    world.plan_all().await;
    world.advance(60_000);
    assert!(world.plan_all().await >= 1);
    world.assert_whole().await;
}

async fn text_is_kept_without_nul_and_within_bounds(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let talk = chat(serde_json::json!({"debounce": "0s"}));
    world.apply(&[agent("a", unlimited(), &[("s", every("5m")), ("talk", talk)])]).await;
    world.plan_all().await;
    let claimed = world.claim(node, 5).await;
    let outcome = belfry_core::retry::Outcome::Failed { reason: Reason::Error, retryable: false };
    let finish = Finish {
        error: Some("no\0way".into()),
        summary: Some("\0".repeat(1 << 20)),
        ..world.outcome(&claimed[0], outcome)
    };
    assert_eq!(store.finish(world.now, &[finish]).await.unwrap(), [Finished::Ended(RunState::Failed)]);
    let run = store.run(claimed[0].run).await.unwrap().unwrap();
    assert_eq!(run.error.as_deref(), Some("no\u{FFFD}way"));
    let summary = run.summary.unwrap();
    assert!(summary.ends_with('…') && summary.chars().count() == 4_000, "{}", summary.len());
    let record = world.schedule("a/s").await;
    assert_eq!(record.last_error.as_deref(), Some("no\u{FFFD}way"));
    assert!(store.pause(world.now, record.id, Some("for\0now"), None).await.unwrap());
    let status = world.schedule("a/s").await.status;
    assert_eq!(status, Status::Paused { reason: Some("for\u{FFFD}now".into()), until: None });
    world.send("a/talk", "k\0ey", "he\0llo", |new| new.run.payload = serde_json::json!({"x\0": "\0"})).await;
    let sessions = store.sessions(&SessionFilter::default(), None, 10).await.unwrap().items;
    assert_eq!((sessions[0].key.as_str(), sessions[0].queued), ("k\u{FFFD}ey", 1));
    world.session("a/talk", "k\0ey", SessionVerb::StopAll).await;
    let sessions = store.sessions(&SessionFilter::default(), None, 10).await.unwrap().items;
    assert_eq!((sessions.len(), sessions[0].queued), (1, 0));
    world.assert_whole().await;
}

async fn a_name_that_cannot_be_kept_is_refused_by_name(store: &impl Store) {
    let world = World::new(store);
    let long = "x".repeat(5_000);
    for (specs, name) in [
        (vec![agent("good", unlimited(), &[]), agent("b\0d", unlimited(), &[])], "\"b\u{FFFD}d\""),
        (vec![agent("a", unlimited(), &[("fine", every("1m")), ("s\0", every("1m"))])], "agent a: schedule"),
        (vec![agent(&long, AgentDefinition::default(), &[])], "1000 bytes"),
    ] {
        let error = store.apply(world.now, "files", "digest", &specs).await.unwrap_err();
        assert!(error.is_refused() && error.to_string().contains(name), "{error}");
    }
    assert!(store.agents().await.unwrap().is_empty(), "files are all or nothing");
}

/// For a store that refuses ends whose error or summary is `bad`.
pub async fn ends_that_are_refused(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let schedules: Vec<_> = ["s1", "s2", "s3", "s4", "s5", "s6"].map(|name| (name, every("1h"))).to_vec();
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    assert_eq!(world.plan_all().await, 6);
    let claimed = world.claim(node, 10).await;
    let done = belfry_core::retry::Outcome::Completed;
    let mut finishes: Vec<Finish> = claimed.iter().map(|claimed| world.outcome(claimed, done)).collect();
    finishes[1].error = Some("bad".into());
    finishes[4].summary = Some("bad".into());
    let refused = store.finish(world.now, &finishes).await.unwrap_err();
    assert!(refused.is_refused(), "{refused}");
    assert_eq!(store.live_runs().await.unwrap().len(), 6, "a verb that fails changes nothing");
    let written = finish_apart(store, world.now, &finishes).await;
    assert!(written.error.is_none(), "{:?}", written.error);
    assert!(written.answers.iter().all(|answer| *answer == Some(Finished::Ended(RunState::Completed))));
    assert_eq!(written.changed.iter().map(|(place, _)| *place).collect::<Vec<_>>(), [1, 4]);
    for (place, claimed) in claimed.iter().enumerate() {
        let run = store.run(claimed.run).await.unwrap().unwrap();
        assert_eq!(run.state, RunState::Completed);
        let told = run.error.is_some_and(|error| error.starts_with("could not be stored: "));
        assert_eq!(told, place == 1 || place == 4);
        assert_eq!(run.summary, None);
    }
    world.assert_whole().await;
}

/// For a store that can be told to refuse whatever is written about the timer of a schedule.
pub async fn a_plan_that_is_refused_in_every_form(store: &impl Store, refuse: impl AsyncFn(i64)) {
    let mut world = World::new(store);
    let schedules = [("bad", allow("* * * * *")), ("good", allow("* * * * *"))];
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    world.plan_all().await;
    let bad = world.schedule("a/bad").await.id;
    refuse(bad).await;
    for _ in 0..3 {
        world.advance(60_000);
        let due = store.due(world.now, None, 100).await.unwrap();
        let commits: Vec<Commit> = due.iter().map(|due| world.decide(due)).collect();
        let written = commit_apart(store, world.now, &commits).await;
        assert!(written.error.is_some_and(|error| error.is_of_content()));
        let is_bad = |commit: &Commit| commit.schedule == bad;
        for (commit, answer) in commits.iter().zip(&written.answers) {
            assert_eq!(*answer, (!is_bad(commit)).then_some(Committed::Held));
        }
        assert_eq!(store.due(world.now, None, 100).await.unwrap().len(), 0, "it is left alone");
        assert!(store.next_due().await.unwrap().unwrap() > world.now, "and nobody wakes up for it");
        // From time to time it is tried again.
        store.unreadable().await.unwrap();
        assert_eq!(store.due(world.now, None, 100).await.unwrap().len(), 1);
    }
    let good = store.live_runs().await.unwrap().into_iter().filter(|run| run.name == "a/good");
    assert_eq!(good.count(), 3);
}

/// For a store in which running runs can be made to stand among those that have ended as well.
pub async fn runs_that_live_and_have_ended(store: &impl Store, double: impl AsyncFn(i64)) {
    let mut world = World::new(store);
    let (one, two) = (world.join(1).await, world.join(2).await);
    let last = AgentDefinition {
        retry: belfry_core::definition::Retry { max: 0, ..Default::default() },
        ..unlimited()
    };
    let schedules: Vec<_> = ["s1", "s2", "s3", "s4", "s5"].map(|name| (name, every("1h"))).to_vec();
    world.apply(&[agent("a", last, &schedules)]).await;
    assert_eq!(world.plan_all().await, 5);
    let claimed = world.claim(one, 3).await;
    double(claimed[1].schedule).await;
    let lease = store.nodes().await.unwrap().iter().find(|node| node.id == one).unwrap().lease_until;
    let rescued = store.fence(world.now, one, lease).await.unwrap().unwrap();
    assert!(rescued.ended.iter().any(|(run, _)| *run == claimed[0].run), "{rescued:?}");
    for run in [&claimed[0], &claimed[2]] {
        assert_eq!(store.run(run.run).await.unwrap().unwrap().state, RunState::Failed);
    }
    assert_eq!(store.live_runs().await.unwrap().len(), 2, "none of the node's lives on");
    // The same with the end of an attempt, beside another.
    let claimed = world.claim(two, 5).await;
    double(claimed[0].schedule).await;
    let done = belfry_core::retry::Outcome::Completed;
    let finishes: Vec<Finish> = claimed.iter().map(|claimed| world.outcome(claimed, done)).collect();
    let written = finish_apart(store, world.now, &finishes).await;
    assert!(written.error.is_none() && written.changed.is_empty(), "{written:?}");
    assert_eq!(written.answers[1], Some(Finished::Ended(RunState::Completed)));
    assert_eq!(store.live_runs().await.unwrap().len(), 0);
}

/// For a store whose rows can be spoiled by statements of its own language.
pub async fn rows_that_cannot_be_read(store: &impl Store, spoil: impl AsyncFn(String)) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let talk = chat(serde_json::json!({"debounce": "0s"}));
    let schedules = [("s1", every("1h")), ("s2", every("1h")), ("s3", cron("* * * * *")), ("talk", talk)];
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    assert_eq!(world.plan_all().await, 2);
    for key in ["x", "y"] {
        world.send("a/talk", key, "hello", |_| ()).await;
    }
    let id = async |name: &str| world.schedule(name).await.id;
    let (s1, s3, talk) = (id("a/s1").await, id("a/s3").await, id("a/talk").await);
    // A payload that is no JSON: it is claimed, and its attempt finds that out; all else goes on.
    spoil(format!("update live set payload = '{{\"broken' where schedule_id in ({s1}, {talk})")).await;
    let runs = store.runs(&RunFilter::default(), None, 10).await.unwrap().items;
    let of_session = RunFilter { session: Some("x".into()), ..RunFilter::default() };
    assert_eq!((runs.len(), store.live_runs().await.unwrap().len()), (4, 4));
    let said =
        |run: &RunRecord| run.error.as_ref().is_some_and(|error| error.contains("payload cannot be read"));
    assert!(!runs.iter().any(said), "lists do not read payloads");
    let mut spoiled = 0;
    for run in &runs {
        spoiled += usize::from(said(&store.run(run.id).await.unwrap().unwrap()));
    }
    assert_eq!(spoiled, 3);
    // Whose session it is stands beside the payload.
    assert_eq!(store.runs(&of_session, None, 10).await.unwrap().items.len(), 1);
    let sessions = store.sessions(&SessionFilter::default(), None, 10).await.unwrap().items;
    assert_eq!(sessions.iter().map(|session| session.queued).collect::<Vec<_>>(), [1, 1]);
    world.send("a/talk", "x", "again", |_| ()).await;
    let claimed = world.claim(node, 10).await;
    let unreadable: Vec<bool> = claimed.iter().map(|claimed| claimed.payload.read().is_err()).collect();
    assert_eq!((unreadable.len(), unreadable.iter().filter(|unreadable| **unreadable).count()), (4, 3));
    for claimed in &claimed {
        assert_eq!(world.complete(claimed).await, Finished::Ended(RunState::Completed));
    }
    // Numbers that nobody knows.
    spoil("update history set reason = 99, trigger = 99".into()).await;
    assert_eq!(store.runs(&RunFilter::default(), None, 10).await.unwrap().items.len(), 5);
    assert!(store.run(claimed[0].run).await.unwrap().unwrap().error.is_some());
    assert_eq!(store.ended_runs(s1, 10).await.unwrap().len(), 1);
    // A timer of an unknown kind: the schedule says so, and all others are planned.
    world.advance(60 * 60_000);
    spoil(format!("update timers set kind = 99 where schedule_id = {s3}")).await;
    world.plan_all().await;
    let Status::Invalid { reason } = world.schedule("a/s3").await.status else { panic!("it is not invalid") };
    assert!(reason.contains("kind 99"), "{reason}");
    assert_eq!(world.claim(node, 10).await.len(), 3, "s1, s2 and the second message of x");
    spoil(format!("update schedule_state set status = 99 where schedule_id = {s3}")).await;
    let all = store.schedules(&ScheduleFilter::default(), None, 10).await.unwrap().items;
    assert!(all.len() >= 3, "{}", all.len());
    // What is to be cancelled is, whatever the reason.
    spoil("update live set cancel_reason = 99".into()).await;
    assert_eq!(store.marks(node).await.unwrap().cancels.len(), 3);
    let until = world.now + belfry_time::SignedDuration::from_secs(30);
    assert!(
        matches!(store.renew(node, until).await.unwrap(), Renewed::Held { cancels, .. } if cancels.len() == 3)
    );
}

/// A column of the agent `bad` or its schedule is spoiled by a statement that names them: everything ends, the agent `good`
/// is planned and starts, and every list is answered.
pub async fn a_column_that_cannot_be_read(store: &impl Store, statement: &str, spoil: impl AsyncFn(String)) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let strict = AgentDefinition {
        breaker: Some(belfry_core::definition::Breaker { threshold: 50, reset_after_ms: 1_000 }),
        budget: Some(belfry_core::definition::Budget { max: 50, period_ms: 60_000 }),
        ..unlimited()
    };
    let talk = chat(serde_json::json!({"debounce": "0s"}));
    let schedules = [("s", allow("* * * * *")), ("talk", talk)];
    world.apply(&[agent("bad", strict, &schedules), agent("good", unlimited(), &schedules)]).await;
    world.plan_all().await;
    world.advance(60_000);
    for name in ["bad/talk", "good/talk"] {
        world.send(name, "k", "hello", |_| ()).await;
    }
    world.plan_all().await;
    world.enqueue("bad/s", None).await;
    // Some have ended, some run and some wait.
    let first = world.claim(node, 100).await;
    assert!(first.len() >= 5, "{}", first.len());
    let failed = belfry_core::retry::Outcome::Failed { reason: Reason::Error, retryable: false };
    let (ended, running) = first.split_at(2);
    for claimed in ended {
        let finish = world.outcome(claimed, failed);
        assert!(finish_apart(store, world.now, &[finish]).await.error.is_none());
    }
    world.enqueue("bad/s", None).await;
    let (bad, good) = (world.schedule("bad/s").await, world.schedule("good/s").await.id);
    spoil(statement.replace("SCHEDULE", &bad.id.to_string()).replace("AGENT", &bad.agent.to_string())).await;
    let outcomes = running.iter().enumerate().map(|(at, claimed)| {
        world.outcome(claimed, if at % 2 == 0 { failed } else { belfry_core::retry::Outcome::Completed })
    });
    let finishes: Vec<Finish> = outcomes.collect();
    let written = finish_apart(store, world.now, &finishes).await;
    assert!(written.error.is_none() && written.answers.iter().all(Option::is_some), "{written:?}");
    world.advance(60_000);
    let due = store.due(world.now, None, 100).await.unwrap();
    assert!(due.iter().any(|due| due.schedule == good), "good/s is not due");
    let commits: Vec<Commit> = due.iter().map(|due| world.decide(due)).collect();
    let written = commit_apart(store, world.now, &commits).await;
    assert!(written.error.is_none(), "{:?}", written.error);
    let again = store.due(world.now, None, 100).await.unwrap();
    assert!(again.is_empty(), "asked for again: {:?}", again.iter().map(|due| &due.name).collect::<Vec<_>>());
    store.next_due().await.unwrap();
    store.next_start(world.now).await.unwrap();
    let claimed = world.claim(node, 100).await;
    assert!(claimed.iter().any(|claimed| claimed.schedule == good), "good/s does not start");
    let finishes: Vec<Finish> = claimed.iter().map(|claimed| world.outcome(claimed, failed)).collect();
    let written = finish_apart(store, world.now, &finishes).await;
    assert!(written.error.is_none(), "{:?}", written.error);
    let until = world.now + belfry_time::SignedDuration::from_secs(30);
    store.renew(node, until).await.unwrap();
    every_list(store).await;
}

/// All that is listed.
async fn every_list(store: &impl Store) {
    let runs = store.runs(&RunFilter::default(), None, 1_000).await.unwrap().items;
    assert!(runs.iter().filter(|run| run.agent_name == "good").count() >= 3, "{}", runs.len());
    store.live_runs().await.unwrap();
    assert_eq!(store.schedules(&ScheduleFilter::default(), None, 100).await.unwrap().items.len(), 4);
    assert_eq!(store.agents().await.unwrap().len(), 2);
    store.breakers().await.unwrap();
    assert!(store.sessions(&SessionFilter::default(), None, 100).await.unwrap().items.len() >= 2);
    store.lane_settings().await.unwrap();
    assert!(!store.nodes().await.unwrap().is_empty());
}

/// Tokens, audit and snapshots with parts that cannot be read: all are listed, and named.
pub async fn tokens_and_beats_that_cannot_be_read<S: Store + Access + Watch>(
    store: &S,
    spoil: impl AsyncFn(&'static str),
    statements: &[&'static str],
) {
    let world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", every("1h"))])]).await;
    assert_eq!(store.unreadable_rows().await.unwrap(), Vec::<String>::new());
    for id in ["good", "spoilt"] {
        let token = TokenRecord {
            id: id.into(),
            hash: vec![7; 32],
            cookie_hash: None,
            scope: Scope::Admin,
            label: id.into(),
            created_at: world.now,
            expires_at: Some(world.now + belfry_time::SignedDuration::from_hours(1)),
            revoked_at: None,
        };
        assert_eq!(store.add_token(&token).await.unwrap(), AddedToken::Added);
        let entry = AuditEntry {
            at: world.now,
            actor: id.into(),
            action: "pause".into(),
            target: "a/s".into(),
            peer: "::1".into(),
            status: Some(200),
        };
        store.begin_audit(&entry).await.unwrap();
        assert!(store.beat(&super::watching::snapshot(&world, node)).await.unwrap());
    }
    for statement in statements {
        spoil(statement).await;
    }
    let tokens = store.tokens().await.unwrap();
    assert_eq!(tokens.len(), 2);
    let expired = |token: &TokenRecord| token.expires_at.is_some_and(|at| at <= world.now);
    assert!(
        !expired(&tokens[0]) && expired(&tokens[1]),
        "an expiry that cannot be read has passed: {tokens:?}"
    );
    assert_eq!(store.audits(None, 10).await.unwrap().items.len(), 2);
    let snapshots = store.snapshots(&SnapshotFilter::default(), None, 10).await.unwrap().items;
    assert_eq!(snapshots.len(), 1, "the other one is left out");
    let named = store.unreadable_rows().await.unwrap();
    for what in
        ["token spoilt", "of the audit", "snapshot ", "lane weird", "node ", "schedule a/s", "agent a"]
    {
        assert!(named.iter().any(|row| row.contains(what)), "{what}: {named:?}");
    }
    assert!(named.iter().all(|row| !row.contains("good")), "{named:?}");
}

/// Verbs that arrive together, some of which are refused.
pub async fn many_at_once(store: &impl Store) {
    let mut world = World::new(store);
    let names: Vec<String> = (0..40).map(|n| format!("s{n}")).collect();
    let schedules: Vec<_> = names.iter().map(|name| (name.as_str(), allow("* * * * *"))).collect();
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    world.plan_all().await;
    for n in [3, 4, 20] {
        plant(&mut world, &format!("a/s{n}")).await;
    }
    world.advance(60_000);
    let due = store.due(world.now, None, 100).await.unwrap();
    let commits: Vec<Commit> = due.iter().map(|due| world.decide(due)).collect();
    let refused = |due: &Due| ["a/s3", "a/s4", "a/s20"].contains(&&*due.name);
    let now = world.now;
    let work = commits.iter().map(|commit| store.commit(now, std::slice::from_ref(commit)));
    for (due, answer) in due.iter().zip(join_all(work).await) {
        match answer {
            Ok(committed) => assert!(committed == [Committed::Held] && !refused(due), "{}", due.name),
            Err(error) => assert!(error.is_refused() && refused(due), "{}: {error}", due.name),
        }
    }
    world.assert_whole().await;
}

/// Polls all of them until all are done, so that they reach the store together.
async fn join_all<T>(work: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut work: Vec<_> = work.map(Box::pin).collect();
    let mut done: Vec<Option<T>> = work.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (work, done) in work.iter_mut().zip(&mut done).filter(|(_, done)| done.is_none()) {
            if let std::task::Poll::Ready(answer) = work.as_mut().poll(context) {
                *done = Some(answer);
            }
        }
        if done.iter().all(Option::is_some) { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    done.into_iter().map(Option::unwrap).collect()
}
