//! Sentences about lists and records.

use belfry_core::definition::{Breaker, Budget, Options, Retry, When};
use belfry_core::retry::Outcome;
use belfry_core::{AgentDefinition, Reason, RunId, RunState};
use belfry_store::*;
use belfry_time::SignedDuration;
use serde_json::json;

use super::world::*;

/// All of them, each on a store of its own.
pub async fn all<S: Store>(fresh: impl AsyncFn() -> S) {
    schedules_are_listed_by_name_in_pages(&fresh().await).await;
    runs_are_listed_newest_first_live_and_ended(&fresh().await).await;
    a_run_keeps_its_facts_when_it_ends(&fresh().await).await;
    a_schedule_says_what_becomes_of_its_runs(&fresh().await).await;
    agents_and_breakers_are_listed(&fresh().await).await;
    what_is_due_is_read_in_order_behind_a_mark(&fresh().await).await;
}

/// All pages of a list of runs.
pub async fn all_runs(store: &impl Store, filter: &RunFilter, limit: u32) -> Vec<RunRecord> {
    let (mut runs, mut after) = (Vec::new(), None);
    loop {
        let page = store.runs(filter, after, limit).await.unwrap();
        assert!(page.items.len() <= limit as usize);
        runs.extend(page.items);
        match page.next {
            Some(next) => after = Some(next),
            None => return runs,
        }
    }
}

/// All pages of a list of schedules.
pub async fn all_schedules(store: &impl Store, filter: &ScheduleFilter, limit: u32) -> Vec<ScheduleRecord> {
    let (mut schedules, mut after) = (Vec::new(), None);
    loop {
        let page = store.schedules(filter, after.as_deref(), limit).await.unwrap();
        schedules.extend(page.items);
        match page.next {
            Some(next) => after = Some(next),
            None => return schedules,
        }
    }
}

async fn schedules_are_listed_by_name_in_pages(store: &impl Store) {
    let world = World::new(store);
    let off = schedule(When::Every("5m".into()), Options { enabled: false, ..Options::default() });
    world
        .apply(&[
            agent("a", unlimited(), &[("z", every("1m")), ("B", every("1m")), ("ä", every("1m"))]),
            agent("a-b", unlimited(), &[("s", off), ("bad", cron("0 0 30 2 *"))]),
            agent("a0", unlimited(), &[("s", every("1m"))]),
        ])
        .await;
    store.put_schedule(world.now, "a0", "api", &every("1m"), &Expect::Any).await.unwrap();
    let names = async |filter: ScheduleFilter| {
        let mut names = Vec::new();
        for limit in [1, 2, 100] {
            let found = all_schedules(store, &filter, limit).await;
            let found: Vec<String> = found.into_iter().map(|record| record.name).collect();
            assert!(names.is_empty() || names == found, "pages of {limit}");
            names = found;
        }
        names
    };
    let all = names(ScheduleFilter::default()).await;
    assert_eq!(all, ["a-b/bad", "a-b/s", "a/B", "a/z", "a/ä", "a0/api", "a0/s"], "in the order of bytes");
    let of = |agent: &str| ScheduleFilter { agent: Some(agent.into()), ..ScheduleFilter::default() };
    assert_eq!(names(of("a")).await, ["a/B", "a/z", "a/ä"]);
    assert_eq!(names(of("nobody")).await, Vec::<String>::new());
    let with = |status: &[StatusKind]| ScheduleFilter { status: status.into(), ..ScheduleFilter::default() };
    assert_eq!(names(with(&[StatusKind::Disabled])).await, ["a-b/s"]);
    assert_eq!(names(with(&[StatusKind::Disabled, StatusKind::Invalid])).await, ["a-b/bad", "a-b/s"]);
    let api = ScheduleFilter { source: Some(API.into()), ..ScheduleFilter::default() };
    assert_eq!(names(api).await, ["a0/api"]);
    let page = store.schedules(&of("a"), Some("a/B"), 1).await.unwrap();
    assert_eq!((page.items[0].name.as_str(), page.next.as_deref()), ("a/z", Some("a/z")));
    assert_eq!(page.items[0], world.schedule("a/z").await);
}

async fn runs_are_listed_newest_first_live_and_ended(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let other = AgentDefinition { lane: "main".into(), ..unlimited() };
    world
        .apply(&[
            agent("a", unlimited(), &[("s", cron("* * * * *"))]),
            agent("b", other, &[("s", cron("* * * * *"))]),
        ])
        .await;
    world.plan_all().await;
    for minute in 0..6 {
        world.advance(60_000);
        world.plan_all().await;
        for claimed in world.claim(node, 5).await {
            // Some of them outlive others that were made later.
            let retryable = false;
            match minute % 3 {
                0 => drop(world.complete(&claimed).await),
                1 => drop(world.finish(&claimed, Outcome::Failed { reason: Reason::Error, retryable }).await),
                _ => {}
            }
        }
        for run in store.live_runs().await.unwrap().iter().filter(|_| minute == 4) {
            store.cancel(world.now, run.id, Reason::Requested).await.unwrap();
        }
    }
    let everything = all_runs(store, &RunFilter::default(), 100).await;
    let ids: Vec<RunId> = everything.iter().map(|run| run.id).collect();
    let mut sorted = ids.clone();
    sorted.sort_by(|a, b| b.cmp(a));
    assert_eq!(ids, sorted, "the newest first");
    let counts = store.counts().await.unwrap();
    assert_eq!(everything.len() as u64, counts.pending + counts.running + counts.ended);
    let filters = [
        RunFilter::default(),
        RunFilter { agent: Some("a".into()), ..RunFilter::default() },
        RunFilter { schedule: Some("b/s".into()), ..RunFilter::default() },
        RunFilter { states: vec![RunState::Running, RunState::Pending], ..RunFilter::default() },
        RunFilter { states: vec![RunState::Failed], agent: Some("b".into()), ..RunFilter::default() },
        RunFilter { states: vec![RunState::Completed], schedule: Some("a/s".into()), ..RunFilter::default() },
        RunFilter { lane: Some("main".into()), ..RunFilter::default() },
        RunFilter { since: Some(start() + SignedDuration::from_mins(3)), ..RunFilter::default() },
        RunFilter { schedule: Some("a/none".into()), ..RunFilter::default() },
    ];
    // What is gone keeps its runs and its name.
    world.apply(&[agent("a", unlimited(), &[("s", cron("* * * * *"))])]).await;
    let everything = all_runs(store, &RunFilter::default(), 100).await;
    for filter in filters {
        let wanted = |run: &&RunRecord| {
            filter.agent.as_ref().is_none_or(|agent| *agent == run.agent_name)
                && filter.schedule.as_ref().is_none_or(|name| *name == run.name)
                && (filter.states.is_empty() || filter.states.contains(&run.state))
                && filter.lane.as_ref().is_none_or(|lane| *lane == run.lane)
                && filter.since.is_none_or(|since| run.created_at >= since)
        };
        let expected: Vec<RunRecord> = everything.iter().filter(wanted).cloned().collect();
        for limit in [1, 3, 100] {
            assert_eq!(all_runs(store, &filter, limit).await, expected, "{filter:?}, pages of {limit}");
        }
    }
}

async fn a_run_keeps_its_facts_when_it_ends(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let definition = schedule(
        When::Every("1h".into()),
        Options {
            prompt: Some("Handle {{ payload.a }}.".into()),
            payload: json!({"a": 0, "b": 0}).as_object().unwrap().clone(),
            ..Options::default()
        },
    );
    world.apply(&[agent("a", unlimited(), &[("s", definition), ("plain", every("1h"))])]).await;
    let record = world.schedule("a/s").await;
    let id = world.run_id();
    let trace_id = Some(uuid::Uuid::from_u128(77));
    let compiled = record.definition.compile("a/s").unwrap();
    let made = NewRun::by_hand(
        Defined::new(record.agent, record.id, &compiled, &AgentDefinition::default()),
        id,
        world.now,
    );
    assert_eq!((&made.prompt, &made.payload), (&None, &json!({})), "what definitions give stays theirs");
    let run = NewRun { trace_id, prompt: Some("Go.".into()), payload: json!({"a": [1, "ü"]}), ..made };
    store.enqueue(world.now, &Enqueue { run, key: None }).await.unwrap();
    let due_at = world.now;
    let first = world.claim(node, 1).await.remove(0);
    // Prompts and payloads may be long, and lists do not show them.
    let of_schedule = RunFilter { schedule: Some("a/s".into()), ..RunFilter::default() };
    let assert_lists_are_short = async || {
        let mut listed = store.runs(&RunFilter::default(), None, 10).await.unwrap().items;
        listed.extend(store.runs(&of_schedule, None, 10).await.unwrap().items);
        assert_eq!(listed.len(), 2);
        listed.extend(store.live_runs().await.unwrap());
        for run in listed {
            assert_eq!((run.id, run.prompt, run.payload), (id, None, json!({})));
        }
    };
    assert_lists_are_short().await;
    world.fail(&first).await;
    let waiting = store.run(id).await.unwrap().unwrap();
    assert!(waiting.not_before > due_at, "it waits for its next attempt");
    world.advance(10_000);
    let second = world.claim(node, 1).await.remove(0);
    world.complete(&second).await;
    assert_lists_are_short().await;
    let ended = store.run(id).await.unwrap().unwrap();
    for run in [&waiting, &ended] {
        assert_eq!((run.name.as_str(), run.agent_name.as_str()), ("a/s", "a"));
        assert_eq!((run.due_at, run.tick_at, run.trace_id), (due_at, None, trace_id));
        assert_eq!((run.prompt.as_deref(), &run.payload), (Some("Go."), &json!({"a": [1, "ü"]})));
    }
    let (plain, _) = world.enqueue("a/plain", None).await;
    store.cancel(world.now, plain, Reason::Requested).await.unwrap();
    let ended = store.run(plain).await.unwrap().unwrap();
    assert_eq!((ended.prompt, ended.payload), (None, json!({})));
}

async fn a_schedule_says_what_becomes_of_its_runs(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let fragile = AgentDefinition {
        budget: Some(Budget { max: 3, period_ms: 3_600_000 }),
        retry: Retry { max: 1, ..Retry::default() },
        ..unlimited()
    };
    world.apply(&[agent("a", fragile, &[("s", cron("* * * * *"))])]).await;
    world.plan_all().await;
    let record = world.schedule("a/s").await;
    assert_eq!((record.last_fired_at, record.running, record.pending, record.budget), (None, 0, 0, None));
    world.advance(60_000);
    world.plan_all().await;
    let tick = world.now;
    let record = world.schedule("a/s").await;
    assert_eq!((record.last_fired_at, record.running, record.pending), (Some(tick), 0, 1), "it waits");
    let claimed = world.claim(node, 1).await.remove(0);
    world.advance(60_000);
    world.plan_all().await;
    let record = world.schedule("a/s").await;
    assert_eq!(
        (record.last_fired_at, record.running, record.pending),
        (Some(world.now), 1, 0),
        "the next tick was skipped"
    );
    assert_eq!(record.next_retry_at, None);
    world.fail(&claimed).await;
    let record = world.schedule("a/s").await;
    let waiting = store.run(claimed.run).await.unwrap().unwrap();
    assert_eq!((record.running, record.pending, record.next_retry_at), (0, 1, Some(waiting.not_before)));
    assert_eq!(record.budget.map(|budget| (budget.period_start, budget.failures)), Some((world.now, 1)));
    world.enqueue("a/s", None).await;
    world.advance(10_000);
    for claimed in world.claim(node, 5).await {
        world.complete(&claimed).await;
    }
    let record = world.schedule("a/s").await;
    assert_eq!((record.running, record.pending, record.next_retry_at, record.budget), (0, 0, None, None));
    assert_eq!(record.last_fired_at, Some(tick + SignedDuration::from_mins(1)), "a run by hand is no tick");
    world.advance(60_000);
    world.plan_all().await;
    let claimed = world.claim(node, 5).await.remove(0);
    world.complete(&claimed).await;
    assert_eq!(world.schedule("a/s").await.last_fired_at, claimed.tick_at);
}

async fn agents_and_breakers_are_listed(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let fragile = AgentDefinition {
        breaker: Some(Breaker { threshold: 1, reset_after_ms: 600_000 }),
        retry: Retry { max: 0, ..Retry::default() },
        ..unlimited()
    };
    let fleet =
        [agent("b", fragile.clone(), &[("s", every("1h"))]), agent("a", fragile, &[("s", every("1h"))])];
    world.apply(&fleet).await;
    let agents = store.agents().await.unwrap();
    let listed: Vec<_> = agents.iter().map(|agent| (agent.name.as_str(), &agent.definition)).collect();
    assert_eq!(listed, [("a", &fleet[1].definition), ("b", &fleet[0].definition)]);
    assert!(store.breakers().await.unwrap().is_empty());
    world.plan_all().await;
    for claimed in world.claim(node, 5).await {
        let outcome = Outcome::Failed { reason: Reason::Error, retryable: true };
        let b = claimed.agent == agents[1].id;
        world.finish(&claimed, if b { outcome } else { Outcome::Completed }).await;
    }
    let breakers = store.breakers().await.unwrap();
    assert_eq!(breakers.len(), 1, "only what has counted");
    assert_eq!((breakers[0].agent_name.as_str(), breakers[0].command.as_str()), ("b", "poll"));
    assert_eq!(breakers[0].breaker, store.breaker(agents[1].id, "poll").await.unwrap().breaker);
    world.apply(&fleet[1..]).await;
    assert!(store.breakers().await.unwrap().is_empty(), "it went with its agent");
    assert_eq!(store.agents().await.unwrap().len(), 1);
}

/// A batch is read while the one before it is committed: none is read twice, none is left out.
async fn what_is_due_is_read_in_order_behind_a_mark(store: &impl Store) {
    let mut world = World::new(store);
    let names: Vec<String> = (0..7).map(|n| format!("s{n}")).collect();
    let schedules: Vec<_> = names.iter().map(|name| (name.as_str(), cron("*/5 * * * *"))).collect();
    world
        .apply(&[agent("a", unlimited(), &schedules), agent("b", unlimited(), &[("s", cron("*/2 * * * *"))])])
        .await;
    world.plan_all().await;
    world.advance(5 * 60_000);
    let whole = store.due(world.now, None, 100).await.unwrap();
    assert_eq!(whole.len(), 8);
    assert_eq!(&*whole[0].name, "b/s", "it is due first");
    let mut read = store.due(world.now, None, 3).await.unwrap();
    while let Some(mark) = read.last().map(Due::mark) {
        let commits: Vec<Commit> =
            read[read.len().saturating_sub(3)..].iter().map(|due| world.decide(due)).collect();
        let behind = store.due(world.now, Some(mark), 3).await.unwrap();
        store.commit(world.now, &commits).await.unwrap();
        if behind.is_empty() {
            break;
        }
        read.extend(behind);
    }
    let names = |due: &[Due]| due.iter().map(|due| due.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&read), names(&whole));
    world.assert_whole().await;
}
