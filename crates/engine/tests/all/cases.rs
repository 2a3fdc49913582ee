//! Behaviour that users of other schedulers know, through the engine on every store.

use std::time::Duration;

use crate::support::{Does, World, at, on_each, stop};
use belfry::{AgentBuilder, AgentSpec, Engine, RunState, ScheduleOptions, When, chat};
use belfry_core::check::Status;
use belfry_core::definition::{AnchorName, CatchUp, IfRunning};
use belfry_store::Store;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

fn agent(when: When, options: ScheduleOptions) -> AgentSpec {
    AgentBuilder::new("a").schedule_with("s", when, options).build()
}

fn cron(text: &str) -> When {
    When::Cron(text.into())
}

fn every(text: &str) -> When {
    When::Every(text.into())
}

fn catch_up(policy: CatchUp) -> ScheduleOptions {
    ScheduleOptions { catch_up: Some(policy), ..ScheduleOptions::default() }
}

#[tokio::test]
async fn wall_clock_times_fire_when_they_come_and_never_for_what_was_before_them() {
    // What it is, how long the engine runs, and how often it fires.
    let table = [
        ("every minute, a minute", "* * * * *", MINUTE, 1),
        ("every minute, a second less", "* * * * *", 59 * SECOND, 0),
        ("a daily one, just after its time", "0 12 * * *", 30 * MINUTE, 0),
        ("an hourly one, an hour", "@hourly", 60 * MINUTE, 1),
        ("one for the next minute but one", "2 12 * * *", 90 * SECOND, 0),
        ("… and then", "2 12 * * *", 2 * MINUTE, 1),
    ];
    for (what, expression, time, expected) in table {
        on_each(async |world: World| {
            let engine = world.engine(&[agent(cron(expression), ScheduleOptions::default())]).await;
            world.pass(&engine, time, 10 * SECOND).await;
            assert_eq!(world.starts("a/s").len(), expected, "{what}");
            stop(&engine).await;
        })
        .await;
    }
}

#[tokio::test]
async fn downtime_is_made_up_for_by_policy() {
    // The policy, how long it was down, the runs it makes at once, and what it counts as missed.
    let slot = |catch_up| ScheduleOptions {
        catch_up: Some(catch_up),
        anchor: AnchorName::Slot,
        if_running: IfRunning::Allow,
        ..ScheduleOptions::default()
    };
    let table = [
        (
            "an hourly one that was down for two hours and eleven minutes, once",
            cron("@hourly"),
            catch_up(CatchUp::RunOnce),
            131,
            1,
            1,
        ),
        ("… not at all", cron("@hourly"), catch_up(CatchUp::Skip), 131, 0, 2),
        ("five minutes, twenty minutes down, once", every("5m"), slot(CatchUp::RunOnce), 23, 1, 3),
        ("five minutes, a thousand down, all", every("5m"), slot(CatchUp::RunAll), 1003, 100, 100),
        ("two hours from now, an hour down", When::After("2h".into()), ScheduleOptions::default(), 60, 0, 0),
        (
            "… three hours down: once, late or not",
            When::After("2h".into()),
            ScheduleOptions::default(),
            180,
            1,
            0,
        ),
    ];
    for (what, when, options, minutes, runs, missed) in table {
        let agents = [agent(when, options)];
        on_each(async |world: World| {
            let engine = world.engine(&agents).await;
            stop(&engine).await;
            let before = world.starts("a/s").len();
            world.clock.advance(minutes * MINUTE);
            let engine = world.engine(&agents).await;
            // Many runs at once are spread over half a minute.
            world.pass(&engine, 31 * SECOND, SECOND).await;
            assert_eq!(world.starts("a/s").len() - before, runs, "{what}");
            let record = engine.schedule_state("a/s").await.unwrap();
            let skips = world.store.skips(record.id, None, 100).await.unwrap();
            let counted: u64 = skips.iter().chain(&record.open_skip).map(|range| range.count).sum();
            assert_eq!(counted, missed, "{what}: {skips:?}");
            stop(&engine).await;
        })
        .await;
    }
}

#[tokio::test]
async fn what_is_never_ticked_or_cannot_be_read_fires_nothing_and_stops_nobody() {
    let off = ScheduleOptions { enabled: false, ..ScheduleOptions::default() };
    let odd = AgentBuilder::new("a")
        .schedule("hook", When::Webhook(serde_json::json!({})))
        .schedule("talk", chat(serde_json::json!({})))
        .schedule_with("off", every("1s"), off)
        .schedule("wrong", cron("61 * * * *"))
        .schedule("never", cron("0 0 30 2 *"))
        .schedule("nothing", every(""))
        .schedule("mute", chat(serde_json::json!({"cap": 0})))
        .build();
    let agents =
        [AgentBuilder::new("empty").build(), odd, AgentBuilder::new("b").schedule("s", every("1m")).build()];
    on_each(async |world: World| {
        let engine = world.engine(&agents).await;
        world.pass(&engine, 5 * MINUTE, MINUTE).await;
        assert_eq!(world.seen.lock().iter().filter(|seen| seen.name.starts_with("a/")).count(), 0);
        assert_eq!(world.starts("b/s").len(), 6);
        assert!(engine.state().checks > 0);
        for name in ["a/wrong", "a/never", "a/nothing", "a/mute"] {
            let status = engine.schedule_state(name).await.unwrap().status;
            assert!(matches!(status, Status::Invalid { .. }), "{name}: {status:?}");
        }
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_failure_is_remembered_until_a_success() {
    on_each(async |world: World| {
        world.tell("a/s", Does::Fail);
        let mut agent = agent(every("5m"), ScheduleOptions::default());
        agent.definition.retry.max = 0;
        let engine = world.engine(&[agent]).await;
        let record = engine.schedule_state("a/s").await.unwrap();
        assert_eq!(record.last_error.as_deref(), Some("told to fail"));
        assert_eq!((record.last.unwrap().state, record.running, record.streak), (RunState::Failed, 0, -1));
        world.tell("a/s", Does::Succeed);
        world.pass(&engine, 5 * MINUTE, MINUTE).await;
        let record = engine.schedule_state("a/s").await.unwrap();
        assert_eq!((record.last_error, record.streak), (None, 1));
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn of_three_due_at_once_as_many_run_as_are_allowed() {
    for limit in [1, 2] {
        let mut three = AgentBuilder::new("a");
        for name in ["x", "y", "z"] {
            three = three.schedule(name, every("1h"));
        }
        let agents = [three.define(|agent| agent.max_concurrent = Some(limit)).build()];
        on_each(async |world: World| {
            ["a/x", "a/y", "a/z"].iter().for_each(|name| world.tell(name, Does::Wait));
            let engine = world.engine(&agents).await;
            let mut done = 0;
            while done < 3 {
                assert!(engine.running("a") <= limit as usize);
                done += engine.running("a");
                let mut events = engine.events();
                let ends = engine.running("a");
                world.let_go.notify_waiters();
                let mut ended = 0;
                while ended < ends {
                    ended +=
                        usize::from(events.recv().await.unwrap().event == belfry::event::Name::RunFinished);
                }
                engine.idle().await;
            }
            assert_eq!(world.seen.lock().len(), 3);
            stop(&engine).await;
        })
        .await;
    }
}

#[tokio::test]
async fn an_interval_shorter_than_the_next_look_fires_once_until_it_has_passed() {
    on_each(async |world: World| {
        let engine = world.engine(&[agent(every("1s"), ScheduleOptions::default())]).await;
        world.pass(&engine, Duration::from_millis(150), Duration::from_millis(30)).await;
        assert_eq!(world.starts("a/s").len(), 1);
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn whoever_is_told_of_starts_may_fail_and_nothing_else_does() {
    on_each(async |world: World| {
        let engine = Engine::builder()
            .store(world.store.clone())
            .clock(world.clock.clone())
            .agents([agent(every("1m"), ScheduleOptions::default())])
            .handler("a", |_| async { Ok(()) })
            .on_trigger(|_| panic!("told to"))
            .build();
        engine.start().await.unwrap();
        engine.quiet().await;
        for _ in 0..2 {
            world.clock.advance(MINUTE);
            engine.quiet().await;
        }
        let runs = world.runs().await;
        assert_eq!(runs.iter().filter(|run| run.state == RunState::Completed).count(), 3);
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn what_is_removed_and_comes_back_knows_nothing_of_its_former_life() {
    on_each(async |world: World| {
        let with = |names: &[&str]| {
            let agent = AgentBuilder::new("a");
            names.iter().fold(agent, |agent, name| agent.schedule(*name, every("1h"))).build()
        };
        let engine = world.engine(&[with(&["s", "other"])]).await;
        let other = engine.schedule_state("a/other").await.unwrap();
        let record = engine.schedule_state("a/s").await.unwrap();
        world.store.pause(engine.now(), record.id, Some("no more"), None).await.unwrap();
        engine.set_agents(vec![with(&["other"])]).await.unwrap();
        engine.quiet().await;
        assert!(engine.schedule_state("a/s").await.is_err());
        engine.set_agents(vec![with(&["s", "other"])]).await.unwrap();
        engine.quiet().await;
        let record = engine.schedule_state("a/s").await.unwrap();
        assert_eq!((record.status, world.starts("a/s").len()), (Status::Active, 2));
        assert_eq!(record.origin, Some(at("2026-03-02T12:00:00Z")));
        // Others are as they were.
        assert_eq!(engine.schedule_state("a/other").await.unwrap(), other);
        stop(&engine).await;
    })
    .await;
}
