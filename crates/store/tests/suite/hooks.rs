//! Sentences about requests from outside: they keep the rules of ticks.

use belfry_core::definition::{Breaker, Budget, IfRunning, Options, Retry, Scope, When};
use belfry_core::edit::Resume;
use belfry_core::{AgentDefinition, Reason, RunId, RunState, ScheduleDefinition, SkipReason, Trigger};
use belfry_store::*;
use belfry_time::SignedDuration;
use serde_json::json;

use super::world::*;

/// All of them, each on a store of its own.
pub async fn all<S: Store + Hooks>(fresh: impl AsyncFn() -> S) {
    one_lives_at_a_time_where_others_are_skipped(&fresh().await).await;
    a_queue_takes_as_many_as_it_may(&fresh().await).await;
    what_lives_is_cancelled_with_the_request(&fresh().await).await;
    a_repeat_and_a_refusal_cancel_nothing(&fresh().await).await;
    runs_of_sessions_do_not_count(&fresh().await).await;
    the_scope_may_be_the_whole_agent(&fresh().await).await;
    the_same_request_makes_one_run(&fresh().await).await;
    who_was_refused_may_come_again(&fresh().await).await;
    an_open_breaker_lets_one_probe_through(&fresh().await).await;
    a_budget_that_is_used_up_refuses(&fresh().await).await;
    many_at_once_make_one_run(&fresh().await).await;
    a_key_collapses_what_was_signed_anew(&fresh().await).await;
    what_was_signed_makes_one_run_whatever_its_keys(&fresh().await).await;
    a_key_with_another_body_is_refused(&fresh().await).await;
    repeats_at_once_make_one_run(&fresh().await).await;
}

fn hook(if_running: IfRunning, overlap: Scope) -> ScheduleDefinition {
    let options = Options { if_running, overlap, max_pending: 2, ..Options::default() };
    schedule(When::Webhook(json!({})), options)
}

pub async fn knock_of<S: Store>(world: &mut World<'_, S>, name: &str, key: Option<&str>) -> Knock {
    let record = world.schedule(name).await;
    let definitions = world.store.definitions(&[record.id]).await.unwrap().remove(0).unwrap();
    let compiled = record.definition.compile(name).unwrap();
    let agent = &definitions.agent_definition;
    let run =
        NewRun::by_hand(Defined::new(record.agent, record.id, &compiled, agent), world.run_id(), world.now);
    let expires_at = world.now + SignedDuration::from_hours(1);
    let key = key.map(|key| Key { key: key.into(), body_hash: vec![1], expires_at });
    let run = NewRun { trigger: Trigger::Webhook, ..run };
    Knock { run, signed: key, keys: Vec::new(), options: record.definition.options }
}

async fn knock<S: Store + Hooks>(
    world: &mut World<'_, S>,
    name: &str,
    key: Option<&str>,
) -> (RunId, Knocked) {
    let knock = knock_of(world, name, key).await;
    (knock.run.id, world.store.knock(world.now, &knock).await.unwrap())
}

/// A request with this signed content and these keys, each with the hash of a body.
async fn request<S: Store + Hooks>(
    world: &mut World<'_, S>,
    signed: Option<&str>,
    keys: &[(&str, u8)],
) -> (RunId, Knocked) {
    let knock = request_of(world, signed, keys).await;
    (knock.run.id, world.store.knock(world.now, &knock).await.unwrap())
}

async fn request_of<S: Store>(world: &mut World<'_, S>, signed: Option<&str>, keys: &[(&str, u8)]) -> Knock {
    let knock = knock_of(world, "a/h", signed).await;
    let expires_at = world.now + SignedDuration::from_hours(1);
    let key = |(key, body): &(&str, u8)| Key { key: (*key).into(), body_hash: vec![*body], expires_at };
    Knock { keys: keys.iter().map(key).collect(), ..knock }
}

fn made() -> Knocked {
    Knocked::Made { cancelled: vec![] }
}

async fn one_lives_at_a_time_where_others_are_skipped<S: Store + Hooks>(store: &S) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("h", hook(IfRunning::Skip, Scope::Schedule))])]).await;
    let (first, answer) = knock(&mut world, "a/h", None).await;
    assert_eq!(answer, made());
    assert_eq!(store.run(first).await.unwrap().unwrap().trigger, Trigger::Webhook);
    let busy = Knocked::Refused(SkipReason::AlreadyRunning);
    assert_eq!(knock(&mut world, "a/h", None).await.1, busy, "while it waits");
    let claimed = world.claim(node, 1).await.remove(0);
    assert_eq!(knock(&mut world, "a/h", None).await.1, busy, "while it runs");
    world.complete(&claimed).await;
    assert_eq!(knock(&mut world, "a/h", None).await.1, made(), "and no longer");
    assert_eq!(store.live_runs().await.unwrap().len(), 1, "those that were refused made nothing");
    world.assert_whole().await;
}

async fn a_queue_takes_as_many_as_it_may<S: Store + Hooks>(store: &S) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("h", hook(IfRunning::Queue, Scope::Schedule))])]).await;
    for _ in 0..2 {
        assert_eq!(knock(&mut world, "a/h", None).await.1, made());
    }
    assert_eq!(knock(&mut world, "a/h", None).await.1, Knocked::Refused(SkipReason::QueueFull));
}

async fn what_lives_is_cancelled_with_the_request<S: Store + Hooks>(store: &S) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let hooks =
        [("h", hook(IfRunning::Cancel, Scope::Agent)), ("other", hook(IfRunning::Allow, Scope::Schedule))];
    world.apply(&[agent("a", unlimited(), &hooks)]).await;
    let (running, _) = world.enqueue("a/other", None).await;
    let claimed = world.claim(node, 1).await.remove(0);
    let (waiting, _) = world.enqueue("a/other", None).await;
    let (run, answer) = knock(&mut world, "a/h", None).await;
    assert_eq!(answer, Knocked::Made { cancelled: vec![running, waiting] });
    // Nobody has to do anything more for that.
    assert_eq!(store.marks(node).await.unwrap().cancels, [(running, claimed.epoch, Reason::Overlap)]);
    let ended = store.run(waiting).await.unwrap().unwrap();
    assert_eq!((ended.state, ended.reason), (RunState::Cancelled, Some(Reason::Overlap)));
    assert_eq!(store.run(run).await.unwrap().unwrap().state, RunState::Pending);
    world.assert_whole().await;
}

async fn a_repeat_and_a_refusal_cancel_nothing<S: Store + Hooks>(store: &S) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("h", hook(IfRunning::Cancel, Scope::Schedule))])]).await;
    let (first, answer) = knock(&mut world, "a/h", Some("k")).await;
    assert_eq!(answer, made());
    assert_eq!(knock(&mut world, "a/h", Some("k")).await.1, Knocked::Repeat(first));
    let id = world.schedule("a/h").await.id;
    assert!(store.pause(world.now, id, None, None).await.unwrap());
    assert_eq!(knock(&mut world, "a/h", None).await.1, Knocked::Refused(SkipReason::Disabled));
    assert_eq!(store.run(first).await.unwrap().unwrap().state, RunState::Pending);
    world.assert_whole().await;
}

async fn runs_of_sessions_do_not_count<S: Store + Hooks>(store: &S) {
    let mut world = World::new(store);
    let by_command = hook(IfRunning::Skip, Scope::Command);
    let schedules = [
        ("talk", chat(json!({"debounce": "0s"}))),
        ("agent", hook(IfRunning::Skip, Scope::Agent)),
        ("command", by_command),
        ("cancel", hook(IfRunning::Cancel, Scope::Agent)),
    ];
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    let sent = world.send("a/talk", "ada", "hello", |_| {}).await;
    assert!(matches!(sent, Sent::Taken { .. }), "{sent:?}");
    let (first, answer) = knock(&mut world, "a/agent", None).await;
    assert_eq!(answer, made());
    store.cancel(world.now, first, Reason::Requested).await.unwrap();
    let (second, answer) = knock(&mut world, "a/command", None).await;
    assert_eq!(answer, made());
    store.cancel(world.now, second, Reason::Requested).await.unwrap();
    assert_eq!(knock(&mut world, "a/cancel", None).await.1, made(), "and are not cancelled");
    assert_eq!(store.live_runs().await.unwrap().len(), 2);
    world.assert_whole().await;
}

async fn the_scope_may_be_the_whole_agent<S: Store + Hooks>(store: &S) {
    let mut world = World::new(store);
    let hooks =
        [("h", hook(IfRunning::Skip, Scope::Agent)), ("other", hook(IfRunning::Allow, Scope::Schedule))];
    world.apply(&[agent("a", unlimited(), &hooks)]).await;
    world.enqueue("a/other", None).await;
    assert_eq!(knock(&mut world, "a/h", None).await.1, Knocked::Refused(SkipReason::AlreadyRunning));
    assert_eq!(knock(&mut world, "a/other", None).await.1, made(), "who allows others looks at none");
}

async fn the_same_request_makes_one_run<S: Store + Hooks>(store: &S) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("h", hook(IfRunning::Skip, Scope::Schedule))])]).await;
    let (first, answer) = knock(&mut world, "a/h", Some("k")).await;
    assert_eq!(answer, made());
    assert_eq!(knock(&mut world, "a/h", Some("k")).await.1, Knocked::Repeat(first), "while it lives");
    let claimed = world.claim(node, 1).await.remove(0);
    world.complete(&claimed).await;
    assert_eq!(knock(&mut world, "a/h", Some("k")).await.1, Knocked::Repeat(first), "and after");
    for _ in 0..2 {
        world.apply(&[]).await;
        world.apply(&[agent("a", unlimited(), &[("h", hook(IfRunning::Skip, Scope::Schedule))])]).await;
        let again = knock(&mut world, "a/h", Some("k")).await.1;
        assert_eq!(again, Knocked::Repeat(first), "also after it was removed and put back");
    }
    world.advance(2 * 3_600_000);
    assert_eq!(knock(&mut world, "a/h", Some("k")).await.1, made(), "until the key has expired");
}

async fn who_was_refused_may_come_again<S: Store + Hooks>(store: &S) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("h", hook(IfRunning::Skip, Scope::Schedule))])]).await;
    let id = world.schedule("a/h").await.id;
    assert!(store.pause(world.now, id, None, None).await.unwrap());
    assert_eq!(knock(&mut world, "a/h", Some("k")).await.1, Knocked::Refused(SkipReason::Disabled));
    assert!(store.resume(world.now, id, Resume::Skip).await.unwrap().is_some());
    assert_eq!(knock(&mut world, "a/h", Some("k")).await.1, made());
    world.apply(&[]).await;
    let record = store.definitions(&[id]).await.unwrap().remove(0).unwrap();
    let compiled = record.compiled.unwrap();
    let run = NewRun::by_hand(
        Defined::new(record.agent, id, &compiled, &record.agent_definition),
        world.run_id(),
        world.now,
    );
    let late = Knock { run, signed: None, keys: Vec::new(), options: compiled.options().clone() };
    assert_eq!(store.knock(world.now, &late).await.unwrap(), Knocked::NotFound, "what is gone is gone");
}

async fn an_open_breaker_lets_one_probe_through<S: Store + Hooks>(store: &S) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let fragile = AgentDefinition {
        breaker: Some(Breaker { threshold: 1, reset_after_ms: 60_000 }),
        retry: Retry { max: 0, ..Retry::default() },
        ..unlimited()
    };
    world.apply(&[agent("a", fragile, &[("h", hook(IfRunning::Allow, Scope::Schedule))])]).await;
    assert_eq!(knock(&mut world, "a/h", None).await.1, made());
    let claimed = world.claim(node, 1).await.remove(0);
    world.fail(&claimed).await;
    let open = Knocked::Refused(SkipReason::CircuitOpen);
    assert_eq!(knock(&mut world, "a/h", None).await.1, open);
    world.advance(60_000);
    let (probe, answer) = knock(&mut world, "a/h", None).await;
    assert_eq!(answer, made(), "the probe");
    assert_eq!(knock(&mut world, "a/h", None).await.1, open, "and nobody else");
    let agent = world.schedule("a/h").await.agent;
    assert_eq!(store.breaker(agent, "poll").await.unwrap().breaker.probe, Some(probe));
    let claimed = world.claim(node, 1).await.remove(0);
    assert_eq!(claimed.run, probe);
    world.complete(&claimed).await;
    assert_eq!(knock(&mut world, "a/h", None).await.1, made(), "its success closes the breaker");
    world.assert_whole().await;
}

async fn a_budget_that_is_used_up_refuses<S: Store + Hooks>(store: &S) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let thrifty = AgentDefinition {
        budget: Some(Budget { max: 1, period_ms: 60_000 }),
        retry: Retry { max: 0, ..Retry::default() },
        ..unlimited()
    };
    world.apply(&[agent("a", thrifty, &[("h", hook(IfRunning::Allow, Scope::Schedule))])]).await;
    assert_eq!(knock(&mut world, "a/h", None).await.1, made());
    let claimed = world.claim(node, 1).await.remove(0);
    world.fail(&claimed).await;
    assert_eq!(knock(&mut world, "a/h", None).await.1, Knocked::Refused(SkipReason::BudgetExhausted));
    world.advance(60_000);
    assert_eq!(knock(&mut world, "a/h", None).await.1, made(), "until the period is over");
}

async fn many_at_once_make_one_run<S: Store + Hooks>(store: &S) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("h", hook(IfRunning::Skip, Scope::Schedule))])]).await;
    let mut knocks = Vec::new();
    for _ in 0..8 {
        knocks.push(knock_of(&mut world, "a/h", None).await);
    }
    let now = world.now;
    let [a, b, c, d, e, f, g, h] = knocks.try_into().unwrap();
    let answers = tokio::join!(
        store.knock(now, &a),
        store.knock(now, &b),
        store.knock(now, &c),
        store.knock(now, &d),
        store.knock(now, &e),
        store.knock(now, &f),
        store.knock(now, &g),
        store.knock(now, &h),
    );
    let answers: [_; 8] = answers.into();
    let answers = answers.map(Result::unwrap);
    assert_eq!(answers.iter().filter(|answer| **answer == made()).count(), 1, "{answers:?}");
    assert_eq!(store.live_runs().await.unwrap().len(), 1);
}

async fn a_key_collapses_what_was_signed_anew<S: Store + Hooks>(store: &S) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("h", hook(IfRunning::Allow, Scope::Schedule))])]).await;
    let (first, answer) = request(&mut world, Some("s1"), &[("k", 1), ("id", 1)]).await;
    assert_eq!(answer, made());
    let again = Knocked::Repeat(first);
    assert_eq!(request(&mut world, Some("s2"), &[("k", 1)]).await.1, again, "one key");
    assert_eq!(request(&mut world, Some("s3"), &[("other", 1), ("id", 1)]).await.1, again, "the other key");
    assert_eq!(request(&mut world, None, &[("k", 1)]).await.1, again, "not signed");
    assert_eq!(request(&mut world, Some("s2"), &[]).await.1, again, "signed anew, and sent without its key");
    assert_eq!(request(&mut world, Some("s3"), &[("new", 1)]).await.1, again);
    assert_eq!(
        request(&mut world, Some("s4"), &[("new", 1)]).await.1,
        made(),
        "a key of a repeat is not kept"
    );
    assert_eq!(store.live_runs().await.unwrap().len(), 2);
}

async fn what_was_signed_makes_one_run_whatever_its_keys<S: Store + Hooks>(store: &S) {
    let mut world = World::new(store);
    let hooks =
        [("h", hook(IfRunning::Allow, Scope::Schedule)), ("other", hook(IfRunning::Allow, Scope::Schedule))];
    world.apply(&[agent("a", unlimited(), &hooks)]).await;
    let (first, answer) = request(&mut world, Some("s"), &[("k", 1)]).await;
    assert_eq!(answer, made());
    for keys in [&[][..], &[("k", 1)], &[("k", 2)], &[("new", 1)], &[("new", 2), ("newer", 3)]] {
        assert_eq!(request(&mut world, Some("s"), keys).await.1, Knocked::Repeat(first), "{keys:?}");
    }
    assert_eq!(knock(&mut world, "a/other", Some("s")).await.1, made(), "each hook for itself");
    world.advance(2 * 3_600_000);
    assert_eq!(request(&mut world, Some("s"), &[("k", 2)]).await.1, made(), "until the keys have expired");
}

async fn a_key_with_another_body_is_refused<S: Store + Hooks>(store: &S) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("h", hook(IfRunning::Allow, Scope::Schedule))])]).await;
    let (first, answer) = request(&mut world, Some("s1"), &[("k", 1)]).await;
    assert_eq!(answer, made());
    let reused = Knocked::KeyReused(first);
    assert_eq!(request(&mut world, Some("s2"), &[("k", 2)]).await.1, reused);
    assert_eq!(request(&mut world, None, &[("k", 2)]).await.1, reused);
    assert_eq!(request(&mut world, Some("s2"), &[]).await.1, made(), "it was refused, so it may come again");
    assert_eq!(store.live_runs().await.unwrap().len(), 2);
}

async fn repeats_at_once_make_one_run<S: Store + Hooks>(store: &S) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("h", hook(IfRunning::Allow, Scope::Schedule))])]).await;
    let a = request_of(&mut world, Some("s1"), &[("k", 1)]).await;
    let b = request_of(&mut world, Some("s1"), &[]).await;
    let c = request_of(&mut world, Some("s2"), &[("k", 1)]).await;
    let d = request_of(&mut world, None, &[("k", 1)]).await;
    let e = request_of(&mut world, Some("s1"), &[("k", 1)]).await;
    let now = world.now;
    // The first makes the run that ties the content to the key; then all come at once.
    let first = a.run.id;
    assert_eq!(store.knock(now, &a).await.unwrap(), made());
    let answers =
        tokio::join!(store.knock(now, &b), store.knock(now, &c), store.knock(now, &d), store.knock(now, &e));
    let answers: [_; 4] = answers.into();
    assert_eq!(answers.map(Result::unwrap), [(); 4].map(|()| Knocked::Repeat(first)));
    let f = request_of(&mut world, Some("t"), &[("l", 1)]).await;
    let g = request_of(&mut world, Some("t"), &[("l", 1)]).await;
    let h = request_of(&mut world, Some("u"), &[("l", 1)]).await;
    let answers = tokio::join!(store.knock(now, &f), store.knock(now, &g), store.knock(now, &h));
    let answers: [_; 3] = answers.into();
    let answers = answers.map(Result::unwrap);
    assert_eq!(answers.iter().filter(|answer| **answer == made()).count(), 1, "{answers:?}");
    assert_eq!(store.live_runs().await.unwrap().len(), 2);
}
