//! What the planner does with all that is due at once, on every store.

use std::time::Duration;

use crate::support::{Does, World, on_each, start, stop};
use belfry::testing::{Ask, Driver, Effect, Input, Now};
use belfry::{AgentBuilder, AgentSpec, NodeId, Options, ScheduleOptions, SignedDuration, cron};
use belfry_core::Trigger;
use belfry_core::breaker::State;
use belfry_core::definition::{AnchorName, Breaker, CatchUp, IfRunning, Scope};
use belfry_store::{ScheduleFilter, Store};

const MINUTE: Duration = Duration::from_secs(60);

/// An agent with some schedules of one cron expression.
fn agent(name: &str, schedules: usize, expr: &str, options: &ScheduleOptions) -> AgentSpec {
    let mut agent = AgentBuilder::new(name);
    for n in 0..schedules {
        agent = agent.schedule_with(format!("s{n}"), cron(expr).unwrap(), options.clone());
    }
    agent.build()
}

#[tokio::test]
async fn schedules_with_one_time_and_one_scope_take_turns() {
    let options = ScheduleOptions { overlap: Scope::Agent, ..ScheduleOptions::default() };
    on_each(async |world: World| {
        let engine = world.engine(&[agent("a", 3, "*/5 * * * *", &options)]).await;
        world.pass(&engine, 40 * MINUTE, 5 * MINUTE).await;
        let ran: Vec<_> = world.seen.lock().iter().map(|seen| seen.name.clone()).collect();
        // A run that is over before the next schedule is planned is in nobody's way: then there are more.
        assert!(ran.len() >= 8, "{ran:?}");
        for name in ["a/s0", "a/s1", "a/s2"] {
            assert!(ran.iter().filter(|ran| *ran == name).count() >= 2, "{name} in {ran:?}");
        }
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn many_runs_that_are_caught_up_at_once_are_spread() {
    let options = ScheduleOptions { catch_up: Some(CatchUp::RunOnce), ..ScheduleOptions::default() };
    on_each(async |world: World| {
        let agents = [agent("a", 8, "0 * * * *", &options)];
        let engine = world.engine(&agents).await;
        stop(&engine).await;
        world.clock.advance(90 * MINUTE);
        let back_at = world.clock.now().wall;
        let engine = world.engine(&agents).await;
        let runs = world.runs().await;
        assert_eq!(runs.iter().filter(|run| run.trigger == Trigger::CatchUp).count(), 8);
        let mut starts: Vec<_> = runs.iter().map(|run| run.not_before.duration_since(back_at)).collect();
        starts.sort_unstable();
        starts.dedup();
        assert!(starts.len() > 4, "they are due at different instants: {starts:?}");
        assert!(starts.iter().all(|delay| delay.as_secs() <= 30), "{starts:?}");
        // Nothing of that is in the way of the next tick.
        world.pass(&engine, MINUTE, Duration::from_secs(1)).await;
        assert_eq!(world.seen.lock().len(), 8);
        world.pass(&engine, 29 * MINUTE, MINUTE).await;
        assert_eq!(world.seen.lock().len(), 16);
        stop(&engine).await;
    })
    .await;
}

/// A batch of missed ticks that one at a time can be caught up of.
fn batch(expr: &str, only_between: Option<&str>) -> AgentSpec {
    let options = ScheduleOptions {
        catch_up: Some(CatchUp::RunAll),
        only_between: only_between.map(str::to_owned),
        ..ScheduleOptions::default()
    };
    let builder = AgentBuilder::new("a").schedule_with("s0", cron(expr).unwrap(), options);
    let breaker = Breaker { threshold: 2, reset_after_ms: 10 * 60_000 };
    builder
        .define(|agent| {
            (agent.max_concurrent, agent.breaker) = (Some(1), Some(breaker));
            agent.retry.max = 0;
        })
        .build()
}

#[tokio::test]
async fn a_batch_that_is_caught_up_waits_for_its_breaker_and_sends_one_probe() {
    on_each(async |world: World| {
        let agents = [batch("0 * * * *", None)];
        let engine = world.engine(&agents).await;
        stop(&engine).await;
        world.clock.advance(6 * 60 * MINUTE + 15 * MINUTE);
        world.tell("a/s0", Does::Fail);
        let engine = world.engine(&agents).await;
        world.pass(&engine, MINUTE, Duration::from_secs(5)).await;
        assert_eq!(world.starts("a/s0").len(), 2, "the second failure opens the breaker");
        let why = engine.why("a/s0", None).await.unwrap();
        assert_eq!(why.reason.as_deref(), Some("circuit_open"), "{}", why.words);
        world.pass(&engine, 8 * MINUTE, Duration::from_secs(10)).await;
        assert_eq!(world.starts("a/s0").len(), 2, "it is open");
        world.pass(&engine, 5 * MINUTE, Duration::from_secs(10)).await;
        assert_eq!(world.starts("a/s0").len(), 3, "one probe, which opens it again");
        world.tell("a/s0", Does::Succeed);
        world.pass(&engine, 12 * MINUTE, Duration::from_secs(10)).await;
        assert_eq!(world.starts("a/s0").len(), 6, "a probe closes it, and the rest follows");
        let runs = world.runs().await;
        assert!(runs.iter().all(|run| run.attempt == 1), "waiting used up no attempt: {runs:#?}");
        let ticks: Vec<_> = world.starts("a/s0").iter().map(|seen| seen.tick_at).collect();
        assert!(ticks.is_sorted(), "{ticks:?}");
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_batch_that_is_caught_up_waits_while_its_window_is_closed() {
    on_each(async |world: World| {
        let agents = [batch("0,30 * * * *", Some("11:00-15:00"))];
        let engine = world.engine(&agents).await;
        stop(&engine).await;
        world.clock.advance(2 * 60 * MINUTE + 45 * MINUTE);
        world.tell("a/s0", Does::Wait);
        let engine = world.engine(&agents).await;
        world.pass(&engine, MINUTE, Duration::from_secs(5)).await;
        assert_eq!(world.starts("a/s0").len(), 1, "it is 14:46");
        world.pass(&engine, 20 * MINUTE, MINUTE).await;
        world.does.lock().clear();
        world.let_go.notify_waiters();
        world.pass(&engine, 60 * MINUTE, MINUTE).await;
        assert_eq!(world.starts("a/s0").len(), 1, "the window has closed");
        let why = engine.why("a/s0", None).await.unwrap();
        assert_eq!(why.reason.as_deref(), Some("outside_window"), "{}", why.words);
        world.pass(&engine, 18 * 60 * MINUTE, 30 * MINUTE).await;
        world.pass(&engine, 2 * 60 * MINUTE, MINUTE).await;
        assert!(world.starts("a/s0").len() >= 5, "{:?}", world.starts("a/s0"));
        let opens = crate::support::at("2026-03-03T11:00:00Z");
        assert!(world.starts("a/s0")[1..].iter().all(|seen| seen.at >= opens), "{:?}", world.starts("a/s0"));
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_batch_goes_on_soon_after_an_edit_opens_its_window() {
    on_each(async |world: World| {
        let engine = world.engine(&[batch("0 * * * *", Some("11:00-18:00"))]).await;
        stop(&engine).await;
        world.clock.advance(5 * 60 * MINUTE - MINUTE);
        world.tell("a/s0", Does::Wait);
        let engine = world.engine(&[batch("0 * * * *", Some("11:00-18:00"))]).await;
        world.pass(&engine, MINUTE, Duration::from_secs(5)).await;
        engine.set_agents(vec![batch("0 * * * *", Some("11:00-12:30"))]).await.unwrap();
        world.does.lock().clear();
        world.let_go.notify_waiters();
        world.pass(&engine, 5 * MINUTE, MINUTE).await;
        let before = world.starts("a/s0").len();
        let why = engine.why("a/s0", None).await.unwrap();
        assert_eq!(why.reason.as_deref(), Some("outside_window"), "{}", why.words);
        assert!(why.words.contains("its window opens, 2026-03-03 11:00:00"), "{}", why.words);
        engine.set_agents(vec![batch("0 * * * *", None)]).await.unwrap();
        world.pass(&engine, 2 * MINUTE, Duration::from_secs(10)).await;
        assert!(world.starts("a/s0").len() > before, "{:?}", world.starts("a/s0"));
        stop(&engine).await;
    })
    .await;
}

/// The probe of a half-open breaker waited for its turn behind a run that was held by that breaker, for ever.
#[tokio::test]
async fn a_probe_that_waits_behind_a_run_which_its_breaker_holds_gives_it_its_place() {
    let first =
        ScheduleOptions { catch_up: Some(CatchUp::RunOnce), priority: 5, ..ScheduleOptions::default() };
    let queue = ScheduleOptions {
        anchor: AnchorName::Slot,
        if_running: IfRunning::Queue,
        catch_up: Some(CatchUp::RunOnce),
        ..ScheduleOptions::default()
    };
    let builder = AgentBuilder::new("a").schedule_with("first", cron("0 * * * *").unwrap(), first);
    let builder = builder.schedule_with("queue", belfry::every("2s").unwrap(), queue);
    let agent = builder.define(|agent| {
        agent.breaker = Some(Breaker { threshold: 1, reset_after_ms: 3_000 });
        agent.retry.max = 0;
    });
    let agents = [agent.build()];
    on_each(async |world: World| {
        let engine = world.engine(&agents).await;
        stop(&engine).await;
        world.clock.advance(90 * MINUTE);
        world.tell("a/first", Does::Fail);
        let engine = world.engine(&agents).await;
        world.pass(&engine, MINUTE, Duration::from_secs(1)).await;
        let id = world.store.schedule("a/queue").await.unwrap().unwrap().agent;
        let breaker = world.store.breaker(id, "poll").await.unwrap();
        let changes: Vec<_> = breaker.history.iter().map(|change| change.to).collect();
        assert_eq!(changes, [State::Open, State::HalfOpen, State::Closed], "{breaker:?}");
        assert!(world.starts("a/queue").len() > 20, "{:?}", world.starts("a/queue"));
        stop(&engine).await;
    })
    .await;
}

/// A tick that waits for room behind its agent's limit passed its breaker when it was planned, and that opens meanwhile.
#[tokio::test]
async fn a_tick_that_waited_asks_its_breaker_again_when_it_starts() {
    let options = ScheduleOptions::default();
    let agent = AgentBuilder::new("a").schedule_with("s0", cron("0 * * * *").unwrap(), options.clone());
    let agent = agent.schedule_with("s1", cron("0 * * * *").unwrap(), options).define(|agent| {
        agent.breaker = Some(Breaker { threshold: 1, reset_after_ms: 10 * 60_000 });
        (agent.max_concurrent, agent.retry.max) = (Some(1), 0);
    });
    let agents = [agent.build()];
    on_each(async |world: World| {
        for name in ["a/s0", "a/s1"] {
            world.tell(name, Does::Fail);
        }
        let engine = world.engine(&agents).await;
        world.pass(&engine, 65 * MINUTE, MINUTE).await;
        let starts = |name| world.starts(name).len();
        assert_eq!(starts("a/s0") + starts("a/s1"), 1, "the other one is held");
        let waits = if starts("a/s0") == 0 { "a/s0" } else { "a/s1" };
        let why = engine.why(waits, None).await.unwrap();
        assert_eq!(why.reason.as_deref(), Some("circuit_open"), "{}", why.words);
        world.does.lock().clear();
        world.pass(&engine, 15 * MINUTE, MINUTE).await;
        assert_eq!(starts(waits), 1, "it is the probe");
        assert!(world.runs().await.iter().all(|run| run.attempt == 1), "waiting used up no attempt");
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn programs_with_names_of_their_own_leave_each_others_agents_alone() {
    on_each(async |world: World| {
        let engine = |source: &str, name: &str| {
            let options = ScheduleOptions::default();
            let builder = belfry::Engine::builder().store(world.store.clone()).clock(world.clock.clone());
            builder.source(source).agents([agent(name, 1, "0 * * * *", &options)]).build()
        };
        let (one, other) = (engine("one", "a"), engine("other", "b"));
        one.start().await.unwrap();
        other.start().await.unwrap();
        let names = async || {
            let page = world.store.schedules(&ScheduleFilter::default(), None, 10).await.unwrap();
            page.items.into_iter().map(|record| record.name).collect::<Vec<_>>()
        };
        assert_eq!(names().await, ["a/s0", "b/s0"]);
        // What a name no longer has is retired.
        one.set_agents(Vec::new()).await.unwrap();
        assert_eq!(names().await, ["b/s0"]);
        stop(&one).await;
        stop(&other).await;
    })
    .await;
}

/// A run that is stored by an earlier clock, and may start at an instant of a later one, would wait for that instant.
#[tokio::test]
async fn what_was_read_as_due_is_planned_and_stored_by_the_instant_of_the_read() {
    let store = belfry_store::memory::Memory::new();
    let agent = AgentBuilder::new("a").schedule("s", belfry::every("1h").unwrap()).build();
    store.apply(start(), "files", "digest", &[agent]).await.unwrap();
    let node = NodeId(uuid::Uuid::from_u128(1));
    let now = |wall, seconds| Now { wall, mono: Duration::from_secs(seconds) };
    let lease = start() + SignedDuration::from_secs(30);
    let new_id = Box::new(|_| uuid::Uuid::from_u128(2));
    let mut driver = Driver::new(Options::default(), node, now(start(), 0), lease, new_id);
    let asked = |effects: Vec<Effect>| {
        let commit = effects.into_iter().find_map(|effect| match effect {
            Effect::Ask(Ask::Commit { commits, at, .. }) => Some((commits, at)),
            _ => None,
        });
        commit.unwrap()
    };
    // The schedule is new: this finds its first tick.
    let due = store.due(start(), None, 10).await;
    let (commits, _) = asked(driver.step(now(start(), 0), Input::Due { at: start(), due, next: None }));
    store.commit(start(), &commits).await.unwrap();

    let read_at = start() + SignedDuration::from_secs(1);
    let due = store.due(read_at, None, 10).await;
    let back = now(start() - SignedDuration::from_hours(2), 1);
    let (commits, at) = asked(driver.step(back, Input::Due { at: read_at, due, next: None }));
    assert_eq!(at, read_at);
    assert_eq!(commits[0].runs[0].not_before, start());
}
