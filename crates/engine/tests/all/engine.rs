//! The engine on every store, with Rust handlers and a clock that is moved by hand.

use std::time::Duration;

use crate::support::{Does, World, at, on_each, stop};
use belfry::{AgentBuilder, AgentSpec, RunRequest, RunState, ScheduleOptions, Status, StopOptions, When};
use belfry_core::Reason;
use belfry_core::definition::{Breaker, Budget, CatchUp, IfRunning, Retry};
use belfry_store::Store;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);

fn every(text: &str) -> When {
    When::Every(text.into())
}

fn cron(text: &str) -> When {
    When::Cron(text.into())
}

fn agent(when: When) -> AgentSpec {
    AgentBuilder::new("a").schedule("s", when).build()
}

#[tokio::test]
async fn an_interval_fires_at_once_and_then_after_each_end() {
    on_each(async |world: World| {
        let engine = world.engine(&[agent(every("5m"))]).await;
        assert_eq!(engine.status(), Status::Running);
        assert_eq!(world.starts("a/s").len(), 1);
        for expected in 2..=4 {
            world.pass(&engine, 299 * SECOND, 299 * SECOND).await;
            assert_eq!(world.starts("a/s").len(), expected - 1);
            world.pass(&engine, SECOND, SECOND).await;
            assert_eq!(world.starts("a/s").len(), expected);
        }
        assert_eq!(engine.state().triggers, 4);
        stop(&engine).await;
        assert_eq!(engine.status(), Status::Stopped);
    })
    .await;
}

#[tokio::test]
async fn a_ten_minute_run_on_five_minutes_starts_again_fifteen_minutes_after_its_start() {
    on_each(async |world: World| {
        world.tell("a/s", Does::Wait);
        let engine = world.engine(&[agent(every("5m"))]).await;
        world.pass(&engine, 10 * MINUTE, MINUTE).await;
        assert_eq!(world.starts("a/s").len(), 1);
        world.tell("a/s", Does::Succeed);
        world.let_go.notify_waiters();
        engine.quiet().await;
        world.pass(&engine, 5 * MINUTE - SECOND, MINUTE).await;
        assert_eq!(world.starts("a/s").len(), 1);
        world.pass(&engine, SECOND, SECOND).await;
        assert_eq!(world.starts("a/s")[1].at, at("2026-03-02T12:15:00Z"));
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn three_days_of_downtime_follow_the_catch_up_policy() {
    let mut agent = AgentBuilder::new("a");
    for (name, catch_up) in [("skip", CatchUp::Skip), ("once", CatchUp::RunOnce), ("all", CatchUp::RunAll)] {
        let options = ScheduleOptions {
            catch_up: Some(catch_up),
            if_running: IfRunning::Allow,
            ..ScheduleOptions::default()
        };
        agent = agent.schedule_with(name, cron("*/5 * * * *"), options);
    }
    let agents = [agent.build()];
    on_each(async |world: World| {
        let engine = world.engine(&agents).await;
        stop(&engine).await;
        // Three days and half a minute later; catch-up runs are spread over half a minute.
        world.clock.advance(3 * DAY + 30 * SECOND);
        let engine = world.engine(&agents).await;
        world.pass(&engine, 31 * SECOND, SECOND).await;
        let ticks = |name: &str| {
            let mut ticks: Vec<_> = world.starts(name).iter().map(|seen| seen.tick_at.unwrap()).collect();
            ticks.sort();
            ticks
        };
        // The newest tick is half a minute old: that is not late.
        let newest = at("2026-03-05T12:00:00Z");
        assert_eq!(ticks("a/skip"), [newest]);
        assert_eq!(ticks("a/once"), [at("2026-03-05T11:55:00Z"), newest]);
        let all = ticks("a/all");
        assert_eq!((all.len(), all[0]), (101, at("2026-03-05T03:40:00Z")));
        let missed = async |name: &str| {
            let record = engine.schedule_state(name).await.unwrap();
            let skips = world.store.skips(record.id, None, 100).await.unwrap();
            skips.iter().map(|range| range.count).sum::<u64>()
        };
        // 864 ticks have passed; each is a run or counted as missed.
        assert_eq!(missed("a/skip").await, 863);
        assert_eq!(missed("a/once").await, 862);
        assert_eq!(missed("a/all").await, 763);
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn more_than_a_batch_is_planned_once_each() {
    let names: Vec<String> = (0..1_200).map(|n| format!("s{n}")).collect();
    let all =
        names.iter().fold(AgentBuilder::new("a"), |agent, name| agent.schedule(name, cron("*/5 * * * *")));
    let all = all.build();
    on_each(async |world: World| {
        let engine = world.engine(std::slice::from_ref(&all)).await;
        world.pass(&engine, 10 * MINUTE, 5 * MINUTE).await;
        for name in &names {
            let starts = world.starts(&format!("a/{name}"));
            let ticks: Vec<_> = starts.iter().filter_map(|start| start.tick_at).collect();
            assert_eq!(ticks, [at("2026-03-02T12:05:00Z"), at("2026-03-02T12:10:00Z")], "{name}");
        }
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_manual_run_moves_no_schedule() {
    on_each(async |world: World| {
        let engine = world.engine(&[agent(cron("0 0 * * *"))]).await;
        let before = engine.schedule_state("a/s").await.unwrap().token;
        let run = engine.trigger("a/s", RunRequest::default()).await.unwrap().run;
        engine.quiet().await;
        assert_eq!(world.starts("a/s").len(), 1);
        assert_eq!(engine.run(run).await.unwrap().unwrap().state, RunState::Completed);
        assert_eq!(engine.schedule_state("a/s").await.unwrap().token, before);
        let keyed = RunRequest { key: Some("k".into()), ..RunRequest::default() };
        let first = engine.trigger("a/s", keyed.clone()).await.unwrap().run;
        assert_eq!(engine.trigger("a/s", keyed.clone()).await.unwrap().run, first);
        let other = RunRequest { prompt: Some("other".into()), ..keyed };
        assert!(matches!(engine.trigger("a/s", other).await, Err(belfry::Error::KeyReused { run, .. }) if run == first));
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_pause_of_three_days_lets_nothing_fire_on_resume() {
    on_each(async |world: World| {
        for when in [every("5m"), cron("*/5 * * * *")] {
            let engine = world.engine(&[agent(when)]).await;
            world.pass(&engine, 6 * MINUTE, MINUTE).await;
            let record = engine.schedule_state("a/s").await.unwrap();
            assert!(world.store.pause(engine.now(), record.id, Some("holiday"), None).await.unwrap());
            let before = world.starts("a/s").len();
            world.pass(&engine, 3 * DAY, 12 * HOUR).await;
            assert_eq!(world.starts("a/s").len(), before);
            assert!(
                world.store.resume(engine.now(), record.id, belfry::Resume::Skip).await.unwrap().is_some()
            );
            world.settle(&engine).await;
            assert_eq!(world.starts("a/s").len(), before);
            world.pass(&engine, 5 * MINUTE, MINUTE).await;
            assert_eq!(world.starts("a/s").len(), before + 1);
            engine.set_agents(Vec::new()).await.unwrap();
            stop(&engine).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_pause_during_a_run_survives_its_end_and_a_restart() {
    on_each(async |world: World| {
        world.tell("a/s", Does::Wait);
        let agents = [agent(every("5m"))];
        let engine = world.engine(&agents).await;
        let record = engine.schedule_state("a/s").await.unwrap();
        assert!(world.store.pause(engine.now(), record.id, None, None).await.unwrap());
        world.tell("a/s", Does::Succeed);
        world.let_go.notify_waiters();
        engine.quiet().await;
        world.pass(&engine, HOUR, MINUTE).await;
        stop(&engine).await;
        let engine = world.engine(&agents).await;
        world.pass(&engine, HOUR, MINUTE).await;
        assert_eq!(world.starts("a/s").len(), 1);
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn after_an_edit_nothing_fires_that_was_before_it_and_nothing_fires_again() {
    on_each(async |world: World| {
        let engine = world.engine(&[agent(cron("0 * * * *"))]).await;
        world.pass(&engine, HOUR + 30 * MINUTE, 10 * MINUTE).await;
        assert_eq!(world.starts("a/s").len(), 1);
        // 13:00 has fired and 13:20 was before the edit, at 13:30.
        engine.set_agents(vec![agent(cron("0,20 * * * *"))]).await.unwrap();
        world.settle(&engine).await;
        world.pass(&engine, 29 * MINUTE, MINUTE).await;
        assert_eq!(world.starts("a/s").len(), 1);
        world.pass(&engine, 21 * MINUTE, MINUTE).await;
        let ticks: Vec<_> = world.starts("a/s").iter().map(|seen| seen.tick_at.unwrap()).collect();
        assert_eq!(
            ticks,
            [at("2026-03-02T13:00:00Z"), at("2026-03-02T14:00:00Z"), at("2026-03-02T14:20:00Z")]
        );
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn of_five_due_schedules_two_run_at_once_and_all_in_turn() {
    let mut builder = AgentBuilder::new("a").define(|agent| agent.max_concurrent = Some(2));
    for n in 0..5 {
        builder = builder.schedule(format!("s{n}"), cron("0 13 * * *"));
    }
    let agents = [builder.build()];
    on_each(async |world: World| {
        (0..5).for_each(|n| world.tell(&format!("a/s{n}"), Does::Wait));
        let engine = world.engine(&agents).await;
        world.pass(&engine, HOUR, HOUR).await;
        let mut started = Vec::new();
        for expected in [2, 3, 4, 5, 5, 5] {
            engine.idle().await;
            started = world.seen.lock().iter().map(|seen| seen.name.clone()).collect();
            assert_eq!(started.len(), expected, "{started:?}");
            assert!(engine.running("a") <= 2);
            let ended = engine.events();
            world.let_go.notify_one();
            wait_for_end(ended).await;
        }
        let mut sorted = started.clone();
        sorted.sort();
        assert_eq!(started, sorted, "first come, first served");
        stop(&engine).await;
    })
    .await;
}

/// Waits until an attempt has ended, where one is left.
async fn wait_for_end(mut events: tokio::sync::broadcast::Receiver<std::sync::Arc<belfry::Event>>) {
    let ended = async {
        while let Ok(event) = events.recv().await {
            if event.event == belfry::event::Name::RunFinished {
                return;
            }
        }
    };
    // The sixth round has nobody left to wait for.
    let _ = tokio::time::timeout(Duration::from_millis(500), ended).await;
}

#[tokio::test]
async fn a_breaker_opens_on_the_third_failure_and_lets_one_probe_through() {
    let agents = [AgentBuilder::new("a")
        .schedule("s", cron("* * * * *"))
        .define(|agent| {
            agent.retry.max = 0;
            agent.breaker = Some(Breaker { threshold: 3, reset_after_ms: 600_000 });
        })
        .build()];
    on_each(async |world: World| {
        world.tell("a/s", Does::Fail);
        let engine = world.engine(&agents).await;
        let mut events = engine.events();
        world.pass(&engine, 12 * MINUTE, MINUTE).await;
        // 12:01, 12:02 and 12:03 fail; until 12:13 nothing.
        assert_eq!(world.starts("a/s").len(), 3);
        world.pass(&engine, MINUTE, MINUTE).await;
        assert_eq!(world.starts("a/s").len(), 4, "one probe");
        world.pass(&engine, 9 * MINUTE, MINUTE).await;
        assert_eq!(world.starts("a/s").len(), 4, "it failed, and the breaker is open again");
        world.tell("a/s", Does::Succeed);
        world.pass(&engine, 3 * MINUTE, MINUTE).await;
        assert_eq!(world.starts("a/s").len(), 7, "the second succeeded, and those after it run");
        let record = engine.schedule_state("a/s").await.unwrap();
        let breaker = world.store.breaker(record.agent, "poll").await.unwrap();
        let history: Vec<_> = breaker.history.iter().map(|change| format!("{:?}", change.to)).collect();
        assert_eq!(history, ["Open", "HalfOpen", "Open", "HalfOpen", "Closed"]);
        let mut told = Vec::new();
        while let Ok(event) = events.try_recv() {
            if event.event == belfry::event::Name::BreakerChanged {
                told.push(event.state.unwrap());
            }
        }
        assert_eq!(told, ["open", "half_open", "open", "half_open", "closed"]);
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn retries_come_after_two_four_and_eight_seconds_and_hold_no_slot() {
    let agents = [AgentBuilder::new("a")
        .schedule("bad", cron("0 13 * * *"))
        .schedule("good", every("1s"))
        .define(|agent| {
            agent.max_concurrent = Some(1);
            agent.retry = Retry::default();
        })
        .build()];
    on_each(async |world: World| {
        world.tell("a/bad", Does::Fail);
        let engine = world.engine(&agents).await;
        world.pass(&engine, HOUR, 10 * MINUTE).await;
        let before = world.starts("a/good").len();
        world.pass(&engine, 20 * SECOND, Duration::from_millis(50)).await;
        let bad = world.starts("a/bad");
        assert_eq!(bad.iter().map(|seen| seen.attempt).collect::<Vec<_>>(), [1, 2, 3, 4]);
        for (pair, expected) in bad.windows(2).zip([2.0, 4.0, 8.0]) {
            let delay = pair[1].at.duration_since(pair[0].at).as_secs_f64();
            assert!(
                (expected * 0.75..=expected * 1.25 + 0.05).contains(&delay),
                "{delay} instead of {expected}"
            );
        }
        assert!(world.starts("a/good").len() > before + 15, "others of the agent run meanwhile");
        let runs = world.runs().await;
        let failed: Vec<_> = runs.iter().filter(|run| run.state == RunState::Failed).collect();
        assert_eq!(failed.len(), 1);
        assert_eq!((failed[0].reason, failed[0].attempt), (Some(Reason::Error), 4));
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_failure_budget_blocks_and_resets_across_a_restart() {
    let agents = [AgentBuilder::new("a")
        .schedule("s", cron("* * * * *"))
        .define(|agent| {
            agent.retry.max = 0;
            agent.budget = Some(Budget { max: 2, period_ms: 3_600_000 });
        })
        .build()];
    on_each(async |world: World| {
        world.tell("a/s", Does::Fail);
        let engine = world.engine(&agents).await;
        world.pass(&engine, 10 * MINUTE, MINUTE).await;
        assert_eq!(world.starts("a/s").len(), 2);
        stop(&engine).await;
        let engine = world.engine(&agents).await;
        world.pass(&engine, 50 * MINUTE, MINUTE).await;
        assert_eq!(world.starts("a/s").len(), 2, "until 13:01, an hour after the first failure");
        let checks = engine.check("a/s").await.unwrap();
        assert!(checks.iter().any(|check| check.check == "budget_exhausted" && !check.ok), "{checks:?}");
        world.tell("a/s", Does::Succeed);
        world.pass(&engine, 3 * MINUTE, MINUTE).await;
        assert!(world.starts("a/s").len() > 2);
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_failure_budget_bounds_retries_and_is_told() {
    let agents = [AgentBuilder::new("a")
        .schedule("s", cron("0 13 * * *"))
        .define(|agent| {
            agent.retry.max = 6;
            agent.budget = Some(Budget { max: 2, period_ms: 600_000 });
        })
        .build()];
    on_each(async |world: World| {
        world.tell("a/s", Does::Fail);
        let engine = world.engine(&agents).await;
        let mut events = engine.events();
        world.pass(&engine, HOUR, HOUR).await;
        world.pass(&engine, 5 * MINUTE, SECOND).await;
        assert_eq!(world.starts("a/s").len(), 2, "a third attempt would be one too many");
        world.pass(&engine, 5 * MINUTE + 30 * SECOND, SECOND).await;
        assert_eq!(world.starts("a/s").len(), 4, "two more in the next period");
        let agent = engine.schedule_state("a/s").await.unwrap().agent;
        world.tell("a/s", Does::Succeed);
        assert!(world.store.reset_budget(engine.now(), agent).await.unwrap());
        world.settle(&engine).await;
        assert_eq!(world.starts("a/s").len(), 5, "at once after a reset");
        let mut told = Vec::new();
        while let Ok(event) = events.try_recv() {
            if event.event == belfry::event::Name::BudgetChanged {
                told.push(event.state.unwrap());
            }
        }
        assert_eq!(told, ["exhausted", "exhausted", "cleared"]);
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_clock_that_steps_refires_nothing_and_waits_or_catches_up() {
    on_each(async |world: World| {
        let agents = [AgentBuilder::new("a")
            .schedule("every", every("10m"))
            .schedule("cron", cron("*/10 * * * *"))
            .build()];
        let engine = world.engine(&agents).await;
        world.pass(&engine, 30 * MINUTE, MINUTE).await;
        let counts = |world: &World| (world.starts("a/every").len(), world.starts("a/cron").len());
        let before = counts(&world);
        // An hour back: nothing fires until the clock is where it was.
        world.clock.step_to(at("2026-03-02T11:30:00Z"));
        world.settle(&engine).await;
        world.pass(&engine, 59 * MINUTE, MINUTE).await;
        assert_eq!(counts(&world), before);
        world.pass(&engine, 11 * MINUTE, MINUTE).await;
        assert_eq!(counts(&world), (before.0 + 1, before.1 + 1));
        // An hour forward is an hour of downtime: the interval is simply due, cron times are gone.
        let before = counts(&world);
        let ahead = engine.now() + belfry::SignedDuration::from_mins(67);
        world.clock.step_to(ahead);
        world.settle(&engine).await;
        assert_eq!(counts(&world), (before.0 + 1, before.1));
        // A year forward as well.
        let before = counts(&world);
        let ahead = engine.now() + belfry::SignedDuration::from_hours(24 * 365);
        world.clock.step_to(ahead);
        world.settle(&engine).await;
        assert!(counts(&world).0 == before.0 + 1 && counts(&world).1 <= before.1 + 1);
        // No tick made two runs.
        let mut ticks: Vec<_> =
            world.seen.lock().iter().map(|seen| (seen.name.clone(), seen.tick_at)).collect();
        let all = ticks.len();
        ticks.sort();
        ticks.dedup();
        assert_eq!(ticks.len(), all);
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_new_run_waits_until_the_cancelled_one_is_gone() {
    let options = ScheduleOptions { if_running: IfRunning::Cancel, ..ScheduleOptions::default() };
    let agents = [AgentBuilder::new("a").schedule_with("s", cron("* * * * *"), options).build()];
    on_each(async |world: World| {
        world.tell("a/s", Does::Wait);
        let engine = world.engine(&agents).await;
        world.pass(&engine, MINUTE, MINUTE).await;
        assert_eq!(world.starts("a/s").len(), 1);
        let events = engine.events();
        world.pass(&engine, MINUTE, MINUTE).await;
        wait_for(events, belfry::event::Name::RunCancelled).await;
        engine.idle().await;
        assert_eq!(world.starts("a/s").len(), 2);
        let runs = world.runs().await;
        assert_eq!((runs[0].state, runs[0].reason), (RunState::Cancelled, Some(Reason::Overlap)));
        assert!(runs[1].started_at >= runs[0].finished_at);
        world.let_go.notify_waiters();
        engine.quiet().await;
        stop(&engine).await;
    })
    .await;
}

async fn wait_for(
    mut events: tokio::sync::broadcast::Receiver<std::sync::Arc<belfry::Event>>,
    name: belfry::event::Name,
) {
    while events.recv().await.unwrap().event != name {}
}

#[tokio::test]
async fn what_does_not_end_in_time_goes_back_and_loses_no_attempt() {
    on_each(async |world: World| {
        let agents = [AgentBuilder::new("a")
            .schedule("s", every("1h"))
            .define(|agent| agent.work.grace_ms = 50)
            .build()];
        world.tell("a/s", Does::Wait);
        let engine = world.engine(&agents).await;
        assert_eq!(engine.running_total(), 1);
        let stopping = {
            let engine = engine.clone();
            tokio::spawn(async move { engine.stop(StopOptions { wait: true, timeout: 5 * SECOND }).await })
        };
        while engine.status() != Status::Stopping {
            tokio::task::yield_now().await;
        }
        world.clock.advance(5 * SECOND);
        let stopped = stopping.await.unwrap();
        assert!(
            matches!(stopped, Err(belfry::Error::Shutdown { timed_out: true, running: 1 })),
            "{stopped:?}"
        );
        let run = world.runs().await.remove(0);
        assert_eq!((run.state, run.attempt), (RunState::Pending, 0));
        world.tell("a/s", Does::Succeed);
        let engine = world.engine(&agents).await;
        engine.quiet().await;
        assert_eq!(world.starts("a/s").len(), 2);
        assert_eq!(world.starts("a/s")[1].attempt, 1);
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_one_shot_fires_once_ever() {
    on_each(async |world: World| {
        let agents = [AgentBuilder::new("a")
            .schedule("at", When::At("2026-03-02T13:00:00Z".into()))
            .schedule("after", When::After("90m".into()))
            .schedule("past", When::At("2026-03-02T11:00:00Z".into()))
            .build()];
        let engine = world.engine(&agents).await;
        world.pass(&engine, HOUR, 30 * MINUTE).await;
        stop(&engine).await;
        let engine = world.engine(&agents).await;
        world.pass(&engine, 5 * HOUR, 30 * MINUTE).await;
        let names: Vec<_> = world.seen.lock().iter().map(|seen| seen.name.clone()).collect();
        assert_eq!(names, ["a/at", "a/after"]);
        for name in ["a/at", "a/after", "a/past"] {
            let record = engine.schedule_state(name).await.unwrap();
            assert_eq!(record.status, belfry_core::check::Status::Exhausted, "{name}");
        }
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn one_bad_schedule_disturbs_no_other_and_heals() {
    on_each(async |world: World| {
        let zoned =
            |zone: &str| ScheduleOptions { timezone: Some(zone.into()), ..ScheduleOptions::default() };
        let agents = |zone: &str| {
            vec![
                AgentBuilder::new("a")
                    .schedule_with("bad", cron("*/5 * * * *"), zoned(zone))
                    .schedule("good", cron("*/5 * * * *"))
                    .build(),
            ]
        };
        let engine = world.engine(&agents("Mars/Phobos")).await;
        world.pass(&engine, 10 * MINUTE, MINUTE).await;
        assert_eq!((world.starts("a/bad").len(), world.starts("a/good").len()), (0, 2));
        let status = engine.schedule_state("a/bad").await.unwrap().status;
        assert!(
            matches!(&status, belfry_core::check::Status::Invalid { reason } if reason.contains("Mars")),
            "{status:?}"
        );
        engine.set_agents(agents("Asia/Tokyo")).await.unwrap();
        world.settle(&engine).await;
        world.pass(&engine, 10 * MINUTE, MINUTE).await;
        assert_eq!((world.starts("a/bad").len(), world.starts("a/good").len()), (2, 4));
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn daylight_saving_passes_live() {
    let zoned =
        || ScheduleOptions { timezone: Some("America/New_York".into()), ..ScheduleOptions::default() };
    let agents = [AgentBuilder::new("a")
        .schedule_with("fixed", cron("30 1,2 * * *"), zoned())
        .schedule_with("wild", cron("*/30 * * * *"), zoned())
        .build()];
    on_each(async |world: World| {
        for (night, fixed, wild) in [
            // 02:30 is skipped, and fires at 03:00.
            ("2026-03-08T05:59:00Z", vec!["2026-03-08T06:30:00Z", "2026-03-08T07:00:00Z"], 8),
            // 01:30 comes twice, and fires the first time.
            ("2026-11-01T04:59:00Z", vec!["2026-11-01T05:30:00Z", "2026-11-01T07:30:00Z"], 8),
        ] {
            world.seen.lock().clear();
            world.clock.step_to(at(night));
            let engine = world.engine(&agents).await;
            world.pass(&engine, 4 * HOUR, MINUTE).await;
            let ticks = |name: &str| {
                world.starts(name).iter().map(|seen| seen.tick_at.unwrap().to_string()).collect::<Vec<_>>()
            };
            assert_eq!(ticks("a/fixed"), fixed);
            assert_eq!(ticks("a/wild").len(), wild);
            engine.set_agents(Vec::new()).await.unwrap();
            stop(&engine).await;
        }
    })
    .await;
}
