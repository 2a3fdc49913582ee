//! `why` on a store that an engine with a manual clock has filled: every tick has an answer.

use std::sync::Arc;
use std::time::Duration;

use belfry::api::{Schedule, ScheduleStatus, Why};
use belfry::{
    AgentBuilder, Decision, Engine, HandlerError, ManualClock, Options, Resume, RunRequest,
    ScheduleDefinition, ScheduleOptions, ScheduleRecord, SendOptions, StopOptions, Timestamp, When,
};
use belfry_core::definition::{AnchorName, Budget, CatchUp, IfRunning, Scope};
use belfry_store::{Expect, Store};
use tokio::sync::Semaphore;

const START: &str = "2026-03-02T12:00:00Z";

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

/// An engine whose runs of `gated` wait for a permit, and those of `broken` fail.
struct House {
    clock: ManualClock,
    engine: Engine,
    gate: Arc<Semaphore>,
}

impl House {
    async fn new(agents: Vec<AgentBuilder>) -> House {
        House::running_at_most(None, agents).await
    }

    async fn running_at_most(max_concurrent: Option<u32>, agents: Vec<AgentBuilder>) -> House {
        let clock = ManualClock::new(at(START));
        let gate = Arc::new(Semaphore::new(0));
        let lease = Duration::from_secs(86_400 * 365);
        let options = Options { lease, max_concurrent, ..Options::default() };
        let permits = gate.clone();
        let engine = Engine::builder()
            .clock(clock.clone())
            .options(options)
            .handler("plain", |_| async { Ok(()) })
            .handler("broken", |_| async { Err(HandlerError::from("no such thing")) })
            .handler("gated", move |_| {
                let permits = permits.clone();
                async move {
                    permits.acquire().await.unwrap().forget();
                    Ok(())
                }
            })
            .agents(agents.into_iter().map(AgentBuilder::build))
            .build();
        engine.start().await.unwrap();
        House { clock, engine, gate }
    }

    async fn pass(&self, seconds: u64) {
        self.engine.quiet().await;
        self.clock.advance(Duration::from_secs(seconds));
        self.engine.quiet().await;
    }

    /// Lets time pass while a run lives, and waits until a schedule stands as it should.
    async fn pass_until(&self, seconds: u64, name: &str, holds: impl Fn(&ScheduleRecord) -> bool) {
        self.clock.advance(Duration::from_secs(seconds));
        let wait = async {
            while !holds(&self.engine.schedule_state(name).await.unwrap()) {
                self.engine.hint().await;
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), wait).await.unwrap();
    }

    /// Makes runs by hand, the first of which is running before the others are made.
    async fn run_in_order(&self, names: &[&str]) -> Vec<String> {
        let mut runs = Vec::new();
        for name in names {
            let run = self.engine.trigger(name, RunRequest::default()).await.unwrap().run;
            runs.push(run.to_string());
            if runs.len() == 1 {
                self.pass_until(0, name, |record| record.running == 1).await;
            }
        }
        self.engine.hint().await;
        runs
    }

    async fn why(&self, name: &str) -> Why {
        belfry::testing::why(self.engine.store(), name, self.engine.now()).await.unwrap()
    }

    async fn why_at(&self, name: &str, instant: &str) -> Why {
        belfry::testing::why_at(self.engine.store(), name, at(instant), self.engine.now()).await.unwrap()
    }

    async fn end(self) {
        self.gate.add_permits(1000);
        self.engine.stop(StopOptions::default()).await.unwrap();
    }
}

fn cron(text: &str) -> When {
    When::Cron(text.into())
}

fn slot(agent: &str, options: ScheduleOptions) -> AgentBuilder {
    let options = ScheduleOptions { anchor: AnchorName::Slot, ..options };
    AgentBuilder::new(agent).schedule_with("s", When::Every("1m".into()), options)
}

fn reason(why: &Why) -> Option<&str> {
    why.reason.as_deref()
}

/// Makes a run of a schedule, and tells no engine.
async fn enqueue(store: &belfry::AnyStore, now: Timestamp, name: &str) {
    let (run, _) = belfry::testing::prepare(store, &Options::default(), now, name).await.unwrap();
    store.enqueue(now, &belfry_store::Enqueue { run, key: None }).await.unwrap();
}

#[tokio::test]
async fn a_tick_that_made_a_run_names_it_and_how_it_ended() {
    let house = House::new(vec![slot("plain", ScheduleOptions::default())]).await;
    house.pass(60).await;
    house.pass(30).await;
    let why = house.why_at("plain/s", "2026-03-02T12:01:00Z").await;
    assert_eq!((why.decision, reason(&why)), (Decision::Fired, None));
    assert!(why.words.contains("12:01:00 UTC made run"), "{}", why.words);
    assert!(why.words.contains("completed"), "{}", why.words);
    let run = house.engine.run(why.run_id.unwrap()).await.unwrap().unwrap();
    assert_eq!(run.tick_at, Some(at("2026-03-02T12:01:00Z")));
    assert!(why.checks.iter().all(|check| check.ok));
    house.end().await;
}

#[tokio::test]
async fn a_run_that_failed_says_why() {
    let broken = slot("broken", ScheduleOptions::default()).define(|agent| agent.retry.max = 0);
    let house = House::new(vec![broken]).await;
    house.pass(60).await;
    let why = house.why_at("broken/s", "2026-03-02T12:01:00Z").await;
    assert_eq!((why.decision, reason(&why)), (Decision::Fired, Some("error")));
    assert!(why.words.contains("failed (error)") && why.words.contains("no such thing"), "{}", why.words);
    house.end().await;
}

#[tokio::test]
async fn an_instant_that_is_no_tick_names_those_around_it() {
    let house = House::new(vec![AgentBuilder::new("plain").schedule("s", cron("0 9 * * 1-5"))]).await;
    let why = house.why_at("plain/s", "2026-03-07T10:30:00Z").await;
    assert_eq!((why.decision, reason(&why)), (Decision::Waiting, Some("no_tick")));
    assert_eq!(why.tick_before, Some(at("2026-03-06T09:00:00Z")));
    assert_eq!(why.tick_after, Some(at("2026-03-09T09:00:00Z")));
    let why = house.why_at("plain/s", "2026-03-09T09:00:00Z").await;
    assert_eq!((why.decision, reason(&why)), (Decision::Waiting, Some("not_due")));
    let why = house.why_at("plain/s", "2026-03-01T09:00:00Z").await;
    assert!(why.words.contains("was not defined at"), "{}", why.words);
    house.end().await;
}

#[tokio::test]
async fn a_skipped_tick_names_the_range_it_is_in() {
    let house = House::new(vec![slot("gated", ScheduleOptions::default())]).await;
    house
        .pass_until(0, "gated/s", |record| {
            record.token.is_some_and(|token| token.tick_at == at("2026-03-02T12:01:00Z"))
        })
        .await;
    house.pass_until(60, "gated/s", |record| record.running == 1).await;
    for skips in 1..=3 {
        house
            .pass_until(60, "gated/s", |record| record.open_skip.is_some_and(|open| open.count == skips))
            .await;
    }
    let why = house.why_at("gated/s", "2026-03-02T12:03:00Z").await;
    assert_eq!((why.decision, reason(&why)), (Decision::Skipped, Some("already_running")));
    assert!(why.words.contains("one of 3 in a row so far"), "{}", why.words);
    let failed: Vec<&str> =
        why.checks.iter().filter(|check| !check.ok).map(|check| check.check.as_str()).collect();
    assert_eq!(failed, ["already_running"]);
    // The range is complete once a tick makes a run again.
    house.gate.add_permits(1);
    house.pass_until(0, "gated/s", |record| record.running == 0).await;
    house.pass_until(60, "gated/s", |record| record.running == 1).await;
    let why = house.why_at("gated/s", "2026-03-02T12:03:00Z").await;
    assert!(why.words.contains("one of 3 in a row, from"), "{}", why.words);
    house.end().await;
}

#[tokio::test]
async fn ticks_that_nobody_planned_in_time_were_missed() {
    for (catch_up, expected) in [(CatchUp::Skip, "missed_skip"), (CatchUp::RunOnce, "missed_run_once")] {
        let options = ScheduleOptions { catch_up: Some(catch_up), ..ScheduleOptions::default() };
        let house = House::new(vec![slot("plain", options)]).await;
        house.pass(600).await;
        let why = house.why_at("plain/s", "2026-03-02T12:05:00Z").await;
        assert_eq!((why.decision, reason(&why)), (Decision::Missed, Some(expected)));
        house.end().await;
    }
}

#[tokio::test]
async fn ticks_from_before_a_schedule_was_removed_keep_their_answers() {
    let house = House::new(vec![AgentBuilder::new("plain")]).await;
    let store = house.engine.store().clone();
    let options = ScheduleOptions { anchor: AnchorName::Slot, ..ScheduleOptions::default() };
    let definition = ScheduleDefinition { when: When::Every("1m".into()), options };
    let put = async || {
        store.put_schedule(house.engine.now(), "plain", "s", &definition, &Expect::Any).await.unwrap();
    };
    put().await;
    let id = house.engine.schedule_state("plain/s").await.unwrap().id;
    house.pass(60).await;
    store.pause(house.engine.now(), id, None, None).await.unwrap();
    house.pass(180).await;
    store.resume(house.engine.now(), id, Resume::Skip).await.unwrap();
    house.pass(60).await;
    let instants = ["2026-03-02T12:01:00Z", "2026-03-02T12:03:00Z"];
    let before = [house.why_at("plain/s", instants[0]).await, house.why_at("plain/s", instants[1]).await];
    assert_eq!((before[0].decision, before[1].decision), (Decision::Fired, Decision::Skipped));
    house.engine.remove_schedule("plain/s", &Expect::Any).await.unwrap();
    house.pass(600).await;
    put().await;
    for (instant, before) in instants.into_iter().zip(before) {
        let after = house.why_at("plain/s", instant).await;
        assert_eq!((after.decision, after.words), (before.decision, before.words));
    }
    let why = house.why_at("plain/s", "2026-03-02T12:10:00Z").await;
    assert!(why.words.contains("was not defined at"), "{}", why.words);
    house.end().await;
}

#[tokio::test]
async fn a_pause_is_named_with_its_reason_while_it_lasts_and_after() {
    let house = House::new(vec![slot("plain", ScheduleOptions::default())]).await;
    let store = house.engine.store().clone();
    let id = store.schedule("plain/s").await.unwrap().unwrap().id;
    house.pass(30).await;
    store.pause(house.engine.now(), id, Some("too noisy"), None).await.unwrap();
    house.pass(300).await;
    let why = house.why_at("plain/s", "2026-03-02T12:03:00Z").await;
    assert_eq!((why.decision, reason(&why)), (Decision::Skipped, Some("disabled")));
    assert!(why.words.contains("paused (too noisy) since"), "{}", why.words);
    // Between two ticks there is nothing that was paused.
    let why = house.why_at("plain/s", "2026-03-02T12:03:30Z").await;
    assert_eq!(reason(&why), Some("no_tick"));
    let now = house.why("plain/s").await;
    assert_eq!(reason(&now), Some("disabled"));
    assert!(now.words.contains("too noisy"), "{}", now.words);
    let record = store.schedule("plain/s").await.unwrap().unwrap();
    let shown = Schedule::of(&record, &Default::default(), house.engine.now());
    assert_eq!((shown.status, shown.next), (ScheduleStatus::Paused, None));
    assert_eq!(shown.reason.as_deref(), Some("too noisy"));
    house.end().await;
}

#[tokio::test]
async fn ticks_that_count_from_runs_are_found_to_the_second() {
    let agent = AgentBuilder::new("gated").schedule("s", When::Every("5m".into()));
    let house = House::new(vec![agent]).await;
    // The first tick is at once and its run takes a minute and a half; the next one counts from its end.
    house.pass_until(0, "gated/s", |record| record.running == 1).await;
    house.clock.advance(Duration::from_millis(90_500));
    house.gate.add_permits(1);
    house.pass_until(0, "gated/s", |record| record.token.is_some()).await;
    house.pass_until(300, "gated/s", |record| record.running == 1).await;
    let why = house.why_at("gated/s", START).await;
    assert_eq!(why.decision, Decision::Fired);
    let why = house.why_at("gated/s", "2026-03-02T12:06:30Z").await;
    assert_eq!((why.decision, why.at), (Decision::Fired, at("2026-03-02T12:06:30.5Z")));
    let why = house.why_at("gated/s", "2026-03-02T12:01:00Z").await;
    assert_eq!(reason(&why), Some("no_tick"));
    assert!(why.words.contains("was running"), "{}", why.words);
    assert_eq!(why.tick_before, Some(at(START)));
    assert_eq!(why.tick_after, Some(at("2026-03-02T12:06:30.5Z")));
    let now = house.why("gated/s").await;
    assert!(now.words.contains("has been running"), "{}", now.words);
    house.end().await;
}

#[tokio::test]
async fn a_run_that_waits_says_for_what() {
    let limited = AgentBuilder::new("gated")
        .schedule("s", cron("0 0 * * *"))
        .schedule("t", cron("0 0 * * *"))
        .define(|agent| agent.max_concurrent = Some(1));
    let broken = AgentBuilder::new("broken").schedule("s", cron("0 0 * * *"));
    let labelled = AgentBuilder::new("plain")
        .schedule("s", cron("0 0 * * *"))
        .define(|agent| agent.needs = vec!["gpu".into()]);
    let house = House::new(vec![limited, broken, labelled]).await;
    house.engine.trigger("gated/s", RunRequest::default()).await.unwrap();
    house.pass_until(0, "gated/s", |record| record.running == 1).await;
    for name in ["gated/t", "broken/s", "plain/s"] {
        house.engine.trigger(name, RunRequest::default()).await.unwrap();
    }
    house.pass_until(0, "broken/s", |record| record.next_retry_at.is_some()).await;
    assert_eq!(house.why("gated/s").await.reason.as_deref(), Some("already_running"));
    let waits = house.why("gated/t").await;
    assert_eq!(reason(&waits), Some("at_capacity"));
    assert!(waits.words.contains("1 of 1 run of gated is running"), "{}", waits.words);
    let retries = house.why("broken/s").await;
    assert_eq!(reason(&retries), Some("not_due"));
    assert!(retries.words.contains("for attempt 2 of 4"), "{}", retries.words);
    let labels = house.why("plain/s").await;
    assert_eq!(reason(&labels), Some("no_node"));
    assert!(labels.words.contains("gpu"), "{}", labels.words);
    house.end().await;
}

#[tokio::test]
async fn a_run_that_should_have_started_says_so() {
    let house = House::new(vec![AgentBuilder::new("plain").schedule("s", cron("0 0 * * *"))]).await;
    house.engine.quiet().await;
    // Nobody tells the node.
    let (store, now) = (house.engine.store(), house.engine.now());
    enqueue(store, now, "plain/s").await;
    let soon = house.why("plain/s").await;
    assert!(soon.words.contains("waits for a free slot"), "{}", soon.words);
    let late =
        belfry::testing::why(store, "plain/s", now + belfry::SignedDuration::from_mins(2)).await.unwrap();
    assert!(late.words.contains("has been ready for 2m") && late.words.contains("doctor"), "{}", late.words);
    house.end().await;
}

#[tokio::test]
async fn old_ticks_are_judged_by_the_definition_of_their_time() {
    let house = House::new(vec![slot("plain", ScheduleOptions::default())]).await;
    for _ in 0..3 {
        house.pass(60).await;
    }
    house.pass(30).await;
    let hourly = AgentBuilder::new("plain").schedule("s", cron("0 * * * *")).build();
    house.engine.set_agents(vec![hourly]).await.unwrap();
    house.pass(60).await;
    let why = house.why_at("plain/s", "2026-03-02T12:02:00Z").await;
    assert_eq!(why.decision, Decision::Fired);
    let why = house.why_at("plain/s", "2026-03-02T12:04:00Z").await;
    assert_eq!(reason(&why), Some("no_tick"));
    assert_eq!(why.tick_after, Some(at("2026-03-02T13:00:00Z")));
    house.end().await;
}

#[tokio::test]
async fn a_schedule_that_is_not_there_is_not_found() {
    let house = House::new(vec![slot("plain", ScheduleOptions::default())]).await;
    let error = belfry::testing::why(house.engine.store(), "plain/x", house.engine.now()).await.unwrap_err();
    assert!(matches!(error, belfry::Error::NotFound { name } if name == "plain/x"));
    house.end().await;
}

#[tokio::test]
async fn of_more_ticks_on_time_than_one_plan_takes_each_says_what_became_of_it() {
    let options = ScheduleOptions {
        anchor: AnchorName::Slot,
        late_after_ms: Some(7_200_000),
        if_running: IfRunning::Allow,
        ..ScheduleOptions::default()
    };
    let agent = AgentBuilder::new("plain").schedule_with("s", When::Every("1s".into()), options);
    let house = House::new(vec![agent]).await;
    house.pass(30 * 60).await;
    for instant in ["2026-03-02T12:00:01Z", "2026-03-02T12:13:20Z"] {
        let why = house.why_at("plain/s", instant).await;
        assert_eq!((why.decision, reason(&why)), (Decision::Skipped, Some("queue_full")), "{instant}");
        assert!(why.words.contains("one of 800 in a row"), "{}", why.words);
        assert!(
            why.words.contains("from 2026-03-02 12:00:01 UTC to 2026-03-02 12:13:20 UTC"),
            "{}",
            why.words
        );
    }
    for instant in ["2026-03-02T12:13:21Z", "2026-03-02T12:30:00Z"] {
        let why = house.why_at("plain/s", instant).await;
        assert_eq!((why.decision, reason(&why)), (Decision::Fired, None), "{instant}");
    }
    house.end().await;
}

#[tokio::test]
async fn a_catch_up_that_its_window_forbids_names_the_instant_that_was_judged() {
    let options = ScheduleOptions {
        only_between: Some("12:00-12:10".into()),
        catch_up: Some(CatchUp::RunOnce),
        ..ScheduleOptions::default()
    };
    let house = House::new(vec![slot("plain", options)]).await;
    house.pass(3600).await;
    let why = house.why_at("plain/s", "2026-03-02T12:09:00Z").await;
    assert_eq!((why.decision, reason(&why)), (Decision::Skipped, Some("outside_window")));
    assert!(
        why.words.contains("the time at which it would have been caught up was not allowed"),
        "{}",
        why.words
    );
    let why = house.why_at("plain/s", "2026-03-02T12:05:00Z").await;
    assert_eq!((why.decision, reason(&why)), (Decision::Missed, Some("missed_run_once")));
    assert!(why.words.contains("only the newest missed tick is caught up"), "{}", why.words);
    house.end().await;
}

#[tokio::test]
async fn runs_of_sessions_stand_in_no_schedules_way() {
    let options = ScheduleOptions { overlap: Scope::Agent, ..ScheduleOptions::default() };
    let agent = AgentBuilder::new("gated")
        .schedule_with("s", cron("0 0 1 1 *"), options)
        .schedule("talk", When::Chat(serde_json::json!({"debounce": "0s"})));
    let house = House::new(vec![agent]).await;
    house.engine.send("gated/talk:ada", "hello", SendOptions::default()).await.unwrap();
    let of_others = |why: &Why| why.checks.iter().find(|check| check.check == "already_running").unwrap().ok;
    assert!(of_others(&house.why("gated/s").await));
    house.engine.trigger("gated/s", RunRequest::default()).await.unwrap();
    assert!(!of_others(&house.why("gated/s").await), "but a run by hand does");
    house.end().await;
}

fn is_ok(why: &Why, name: &str) -> bool {
    why.checks.iter().find(|check| check.check == name).unwrap().ok
}

#[tokio::test]
async fn runs_of_sessions_count_for_an_agents_limit_if_it_binds_them() {
    for binds in [false, true] {
        let agent = AgentBuilder::new("gated")
            .schedule("s", cron("0 0 1 1 *"))
            .schedule("talk", When::Chat(serde_json::json!({"debounce": "0s"})))
            .define(|agent| (agent.max_concurrent, agent.limits_sessions) = (Some(1), binds));
        let house = House::new(vec![agent]).await;
        house.engine.send("gated/talk:ada", "hello", SendOptions::default()).await.unwrap();
        house.pass_until(0, "gated/talk", |record| record.running == 1).await;
        assert_eq!(is_ok(&house.why("gated/s").await, "at_capacity"), !binds);
        assert_eq!(is_ok(&house.why("gated/talk").await, "at_capacity"), !binds);
        house.end().await;
    }
}

#[tokio::test]
async fn a_run_that_waits_to_be_alone_says_so_and_so_does_one_behind_it() {
    for (overlap, scope) in [(Scope::Command, "the command poll of gated"), (Scope::Agent, "the agent gated")]
    {
        let queue = ScheduleOptions { if_running: IfRunning::Queue, overlap, ..ScheduleOptions::default() };
        let agent = AgentBuilder::new("gated")
            .schedule("held", cron("0 0 1 1 *"))
            .schedule_with("alone", cron("0 0 1 1 *"), queue)
            .schedule("young", cron("0 0 1 1 *"));
        let house = House::new(vec![agent]).await;
        let runs = house.run_in_order(&["gated/held", "gated/alone", "gated/young"]).await;
        let alone = house.why("gated/alone").await;
        assert_eq!(reason(&alone), Some("already_running"));
        let words = format!("waits to run alone in {scope}: run {} is running there", runs[0]);
        assert!(alone.words.contains(&words), "{}", alone.words);
        let young = house.why("gated/young").await;
        assert_eq!(reason(&young), Some("already_running"));
        let words = format!("waits behind run {}, which waits to run alone in {scope}", runs[1]);
        assert!(young.words.contains(&words), "{}", young.words);
        house.end().await;
    }
}

#[tokio::test]
async fn a_turn_is_by_priority_and_a_full_node_is_named() {
    let with = |priority, command: &str| {
        let (if_running, overlap) = (IfRunning::Queue, Scope::Command);
        let command = command.into();
        ScheduleOptions { if_running, overlap, priority, command, ..ScheduleOptions::default() }
    };
    let agent = AgentBuilder::new("gated")
        .schedule_with("held", cron("0 0 1 1 *"), with(0, "hold"))
        .schedule_with("low", cron("0 0 1 1 *"), with(0, "poll"))
        .schedule_with("high", cron("0 0 1 1 *"), with(5, "poll"));
    let house = House::running_at_most(Some(1), vec![agent]).await;
    let runs = house.run_in_order(&["gated/held", "gated/low", "gated/high"]).await;
    let high = house.why("gated/high").await;
    assert_eq!(reason(&high), Some("at_capacity"));
    let words = "waits for its node: 1 of 1 run is running on it, its max_concurrent";
    assert!(high.words.contains(words), "{}", high.words);
    assert!(!is_ok(&high, "at_capacity"));
    let low = house.why("gated/low").await;
    assert_eq!(reason(&low), Some("already_running"));
    let words = format!("waits to run alone in the command poll of gated: run {} goes first", runs[2]);
    assert!(low.words.contains(&words), "{}", low.words);
    house.end().await;
}

#[tokio::test]
async fn a_retry_that_the_failure_budget_holds_says_until_when() {
    let broken = AgentBuilder::new("broken").schedule("s", cron("0 0 1 1 *")).define(|agent| {
        agent.budget = Some(Budget { max: 1, period_ms: 3_600_000 });
    });
    let house = House::new(vec![broken]).await;
    house.engine.trigger("broken/s", RunRequest::default()).await.unwrap();
    house.pass_until(0, "broken/s", |record| record.next_retry_at.is_some()).await;
    let why = house.why("broken/s").await;
    assert_eq!(reason(&why), Some("budget_exhausted"));
    assert!(why.words.contains("for attempt 2 of 4"), "{}", why.words);
    let words =
        "the failure budget of broken is used up until 2026-03-02 13:00:00 UTC; `belfry budget reset broken`";
    assert!(why.words.contains(words), "{}", why.words);
    assert!(why.checks.iter().any(|check| !check.ok && check.detail.contains(words)), "{:?}", why.checks);
    house.end().await;
}

#[tokio::test]
async fn a_chat_that_is_paused_says_so() {
    let chat = AgentBuilder::new("plain").schedule("talk", When::Chat(serde_json::json!({})));
    let house = House::new(vec![chat]).await;
    assert_eq!(reason(&house.why("plain/talk").await), Some("unsupported_type"));
    let (store, now) = (house.engine.store(), house.engine.now());
    let id = store.schedule("plain/talk").await.unwrap().unwrap().id;
    store.pause(now, id, Some("too loud"), None).await.unwrap();
    let why = house.why("plain/talk").await;
    assert_eq!(reason(&why), Some("disabled"));
    assert!(why.words.contains("paused (too loud) until it is resumed"), "{}", why.words);
    house.end().await;
}

#[tokio::test]
async fn a_one_shot_whose_time_had_passed_says_so() {
    let once = AgentBuilder::new("plain").schedule("s", When::At("2020-01-01T00:00:00Z".into()));
    let house = House::new(vec![once]).await;
    let passed = "its time had passed when it was first seen";
    let why = house.why("plain/s").await;
    assert_eq!(reason(&why), Some("exhausted"));
    assert!(why.words.contains(passed), "{}", why.words);
    let record = house.engine.schedule_state("plain/s").await.unwrap();
    let shown = Schedule::of(&record, &Default::default(), house.engine.now());
    assert_eq!((shown.status, shown.reason.as_deref()), (ScheduleStatus::Exhausted, Some(passed)));
    house.end().await;
}

#[tokio::test]
async fn a_one_shot_that_is_edited_after_the_clock_was_set_back_says_so() {
    let shot = |at: &str| AgentBuilder::new("plain").schedule("s", When::At(at.into()));
    let house = House::new(vec![shot("2026-03-02T12:05:00Z")]).await;
    house.pass(301).await;
    house.clock.step_to(at("2026-03-02T12:01:00Z"));
    let edited = shot("2026-03-02T12:03:00Z").build();
    let applied = house.engine.store().apply(house.engine.now(), "engine", "", &[edited]).await.unwrap();
    assert_eq!(applied.expired, 0, "its time has not passed");
    let why = house.why("plain/s").await;
    assert_eq!(reason(&why), Some("exhausted"));
    let words =
        "the clock was set back, and its time is not after the last planned tick, 2026-03-02T12:05:00Z";
    assert!(why.words.contains(words), "{}", why.words);
    let record = house.engine.schedule_state("plain/s").await.unwrap();
    let shown = Schedule::of(&record, &Default::default(), house.engine.now());
    assert!(shown.reason.as_deref().is_some_and(|reason| reason.contains(words)), "{:?}", shown.reason);
    let store = house.engine.store();
    let resumed =
        belfry::testing::resume(store.as_ref(), house.engine.now(), &record, belfry::Resume::FromNow).await;
    assert_eq!(resumed.unwrap(), belfry::Resumed::Now { skipped: 0 });
    let record = house.engine.schedule_state("plain/s").await.unwrap();
    assert_eq!(record.token.map(|token| token.tick_at), Some(at("2026-03-02T12:03:00Z")));
    house.end().await;
}

#[tokio::test]
async fn a_tick_that_was_overdue_at_a_pause_or_an_edit_says_so() {
    let house = House::new(vec![slot("plain", ScheduleOptions::default())]).await;
    let record = house.engine.schedule_state("plain/s").await.unwrap();
    // Nobody plans between the first tick and the pause.
    let store = house.engine.store();
    assert!(store.pause(at("2026-03-02T12:02:30Z"), record.id, None, None).await.unwrap());
    house.pass(300).await;
    let why = house.why_at("plain/s", "2026-03-02T12:01:00Z").await;
    assert_eq!((why.decision, reason(&why)), (Decision::Skipped, Some("disabled")));
    assert!(why.words.contains("paused"), "{}", why.words);
    let resumed = belfry::testing::resume(store.as_ref(), house.engine.now(), &record, belfry::Resume::Skip)
        .await
        .unwrap();
    assert_eq!(resumed, belfry::Resumed::Now { skipped: 5 });
    house.pass(1).await;
    let edited = AgentBuilder::new("plain").schedule("s", cron("0 * * * *")).build();
    store.apply(at("2026-03-02T12:07:30Z"), "engine", "", &[edited]).await.unwrap();
    house.pass(300).await;
    let why = house.why_at("plain/s", "2026-03-02T12:06:00Z").await;
    assert_eq!((why.decision, reason(&why)), (Decision::Missed, Some("edited")));
    assert!(why.words.contains("one of 2 in a row"), "{}", why.words);
    house.end().await;
}

#[tokio::test]
async fn a_schedule_that_waits_for_the_clock_says_until_when() {
    let house = House::new(vec![slot("plain", ScheduleOptions::default())]).await;
    for _ in 0..5 {
        house.pass(60).await;
    }
    let ran = house.engine.schedule_state("plain/s").await.unwrap().last_fired_at;
    assert_eq!(ran, Some(at("2026-03-02T12:05:00Z")));
    house.clock.step_to(at("2026-03-02T12:01:30Z"));
    house.engine.quiet().await;
    let why = house.why("plain/s").await;
    assert_eq!((why.decision, reason(&why)), (Decision::Waiting, Some("clock_back")));
    assert!(why.words.contains("it goes on at 2026-03-02 12:06:00 UTC"), "{}", why.words);
    let record = house.engine.schedule_state("plain/s").await.unwrap();
    let shown = Schedule::of(&record, &Default::default(), house.engine.now());
    assert_eq!(shown.clock_back, Some(at("2026-03-02T12:06:00Z")));
    let resume =
        |how| belfry::testing::resume(house.engine.store().as_ref(), house.engine.now(), &record, how);
    assert_eq!(resume(belfry::Resume::Skip).await.unwrap(), belfry::Resumed::NotPaused);
    let resumed = resume(belfry::Resume::FromNow).await.unwrap();
    assert_eq!(resumed, belfry::Resumed::Now { skipped: 0 });
    house.pass(1).await;
    assert_eq!(reason(&house.why("plain/s").await), Some("not_due"));
    house.end().await;
}

#[tokio::test]
async fn a_one_shot_whose_time_passed_in_a_pause_has_not_fired() {
    let shot = || When::At("2026-03-02T12:01:00Z".into());
    let agent = AgentBuilder::new("plain").schedule("paused", shot()).schedule("fires", shot());
    let house = House::new(vec![agent]).await;
    let id = house.engine.schedule_state("plain/paused").await.unwrap().id;
    house.engine.store().pause(house.engine.now(), id, None, None).await.unwrap();
    house.pass(120).await;
    house.engine.store().resume(house.engine.now(), id, belfry::Resume::Skip).await.unwrap();
    house.engine.hint().await;
    house.pass(1).await;
    let status = house.engine.schedule_state("plain/paused").await.unwrap().status;
    assert_eq!(status, belfry_core::check::Status::Exhausted);
    let detail = |why: Why| {
        let check = why.checks.into_iter().find(|check| check.check == "exhausted");
        check.unwrap().detail
    };
    let paused = detail(house.why("plain/paused").await);
    assert_eq!(paused, "its last tick has passed, and made no run");
    assert_eq!(detail(house.why("plain/fires").await), "it has fired for the last time");
    let why = house.why_at("plain/paused", "2026-03-02T12:01:00Z").await;
    assert_eq!((why.decision, why.reason.as_deref()), (Decision::Skipped, Some("disabled")));
    house.end().await;
}

#[tokio::test]
async fn a_run_that_was_made_before_the_clock_was_set_back_says_so() {
    let store = belfry::AnyStore::Memory(belfry_store::memory::Memory::new());
    let agent = AgentBuilder::new("a").schedule("s", When::Cron("0 0 1 1 *".into())).build();
    store.apply(at(START), "files", "digest", &[agent]).await.unwrap();
    enqueue(&store, at(START), "a/s").await;
    let why = belfry::testing::why(&store, "a/s", at("2026-03-02T10:00:00Z")).await.unwrap();
    let words = serde_json::to_string(&why).unwrap();
    assert!(words.contains("the clock was set back after it was made"), "{words}");
}
