//! Every transition is told by one event with all its names, on every store.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use belfry::event::{Name, Of, TRANSITIONS};
use belfry::testing::Options;
use belfry::{
    AgentBuilder, AgentSpec, Engine, Event, LaneSettings, NodeId, RunId, RunRequest, RunState,
    ScheduleOptions, SendOptions, SessionVerb, When, chat,
};
use belfry_core::Reason;
use belfry_core::rescue::Rescues;

use crate::support::{Does, World, on_each, start, stop};
use belfry_core::definition::{AnchorName, Breaker, CatchUp, Retry};
use belfry_store::{Claim, Expect, Node, Store};
use serde_json::json;
use tokio::sync::broadcast::Receiver;

const SECOND: Duration = Duration::from_secs(1);
/// Told by other tests: those of the command line, with a real keeper, and `a_failure_budget_bounds_retries_and_is_told`.
const ELSEWHERE: [Name; 2] = [Name::KeeperRestarted, Name::BudgetChanged];

/// What is told, in order, and what of the table has been seen.
struct Heard {
    events: Receiver<Arc<Event>>,
    seen: Vec<Arc<Event>>,
    /// How many of them were waited for.
    at: usize,
    walked: HashSet<Name>,
}

impl Heard {
    /// The next event of a name.
    async fn next(&mut self, name: Name) -> Arc<Event> {
        let found = async {
            loop {
                while let Some(event) = self.seen.get(self.at) {
                    self.at += 1;
                    if event.event == name {
                        return event.clone();
                    }
                }
                self.seen.push(self.events.recv().await.unwrap());
            }
        };
        let found = tokio::time::timeout(Duration::from_secs(20), found).await;
        let event = found.unwrap_or_else(|_| panic!("waited in vain for {name:?}: {:#?}", self.names()));
        self.walked.insert(name);
        event
    }

    fn names(&self) -> Vec<Name> {
        self.seen.iter().map(|event| event.event).collect()
    }

    /// How often something was told of a run.
    fn count(&mut self, run: RunId, names: &[Name]) -> usize {
        while let Ok(event) = self.events.try_recv() {
            self.seen.push(event);
        }
        self.seen.iter().filter(|event| event.run_id == Some(run) && names.contains(&event.event)).count()
    }

    fn ends(&mut self, run: RunId) -> usize {
        self.count(run, &[Name::RunFinished, Name::RunCancelled])
    }
}

/// An engine with a lease of 30 s: `a` does as it is told, `bot` is a chat.
fn engine_of(world: &World) -> Engine {
    let does = world.does.clone();
    let let_go = world.let_go.clone();
    Engine::builder()
        .store(world.store.clone())
        .clock(world.clock.clone())
        .options(Options { orphan_check: SECOND, poll_interval: 300 * SECOND, ..Options::default() })
        .agents(agents())
        .handler("bot", |_| async { Ok(()) })
        .handler("a", move |run| {
            let name = format!("{}/{}", run.agent(), run.schedule());
            let does = does.lock().get(&name).copied().unwrap_or(Does::Succeed);
            let let_go = let_go.clone();
            async move {
                match does {
                    Does::Succeed => Ok(()),
                    Does::Fail => Err("told to fail".into()),
                    Does::Wait => {
                        tokio::select! {
                            () = let_go.notified() => {}
                            () = run.cancelled() => {}
                        }
                        Ok(())
                    }
                }
            }
        })
        .build()
}

fn agents() -> Vec<AgentSpec> {
    let grid = ScheduleOptions {
        anchor: AnchorName::Slot,
        catch_up: Some(CatchUp::Skip),
        ..ScheduleOptions::default()
    };
    let once = When::At("2026-03-02T12:00:05Z".into());
    let never = || When::Cron("0 0 29 2 *".into());
    vec![
        AgentBuilder::new("a")
            .schedule("once", once)
            .schedule("s", never())
            .schedule_with("grid", When::Every("10m".into()), grid.clone())
            .define(|agent| agent.retry = Retry { max: 1, base_ms: 1000, ..Retry::default() })
            .build(),
        // Nothing runs it, so that its runs wait.
        AgentBuilder::new("idle")
            .schedule("s", never())
            .schedule_with("grid", When::Every("10m".into()), grid)
            .define(|agent| {
                agent.needs = vec!["nothing".into()];
                agent.lane = "narrow".into();
                agent.max_concurrent = None;
                agent.retry = Retry { max: 0, ..Retry::default() };
                agent.breaker = Some(Breaker { threshold: 1, reset_after_ms: 3_600_000 });
            })
            .build(),
        AgentBuilder::new("bot").schedule("talk", chat(json!({"debounce": "1h"}))).build(),
    ]
}

/// A node that is not there, with a lease of 30 s.
async fn ghost(world: &World) -> NodeId {
    let now = world.clock.now().wall;
    let node = Node {
        id: NodeId(uuid::Uuid::from_u128(9)),
        host: "elsewhere".into(),
        pid: 1,
        labels: vec!["handler:idle".into(), "nothing".into()],
        started_at: now,
        lease_until: now + belfry::SignedDuration::from_secs(30),
        fenced: false,
        draining: false,
        last_seen_at: now,
        max_concurrent: None,
        process: belfry_store::NodeProcess::default(),
    };
    world.store.join(&node, None).await.unwrap();
    node.id
}

async fn claim(world: &World, node: NodeId) -> usize {
    let claim = Claim {
        total: u32::MAX,
        node,
        lanes: vec![("narrow".into(), 10)],
        labels: vec!["handler:idle".into(), "nothing".into()],
        only: None,
        rescues: Rescues::Any,
    };
    world.store.claim(world.clock.now().wall, &claim).await.unwrap().len()
}

#[tokio::test]
async fn every_transition_is_told_by_one_event() {
    on_each(async |world: World| {
        let engine = engine_of(&world);
        let mut heard = Heard { events: engine.events(), seen: Vec::new(), at: 0, walked: HashSet::new() };
        let narrow = LaneSettings { slots: 10, limit: None, queue_limit: Some(2) };
        engine.start().await.unwrap();
        heard.next(Name::NodeStarted).await;
        engine.set_lane("narrow", Some(narrow)).await.unwrap();

        // A run of a tick, from its making to its end.
        for _ in 0..6 {
            world.clock.advance(SECOND);
            engine.idle().await;
        }
        let run = heard.next(Name::TickPlanned).await.run_id.unwrap();
        assert_eq!(heard.next(Name::RunStarted).await.run_id, Some(run));
        assert_eq!(heard.next(Name::RunFinished).await.run_id, Some(run));

        // A run by hand that fails, and is tried again.
        world.tell("a/s", Does::Fail);
        let run = engine.trigger("a/s", RunRequest::default()).await.unwrap().run;
        let made = heard.next(Name::RunCreated).await;
        assert_eq!((made.run_id, made.schedule.as_deref()), (Some(run), Some("s")));
        assert_eq!(made.reason.as_deref(), Some("manual"));
        assert_eq!(heard.next(Name::RunRetried).await.run_id, Some(run));
        for _ in 0..3 {
            world.clock.advance(SECOND);
            engine.idle().await;
        }
        let end = heard.next(Name::RunFinished).await;
        assert_eq!((end.run_id, end.state), (Some(run), Some("failed")));
        assert_eq!(heard.ends(run), 1);

        the_end_of_a_lease(&world, &engine, &mut heard).await;
        what_people_end(&world, &engine, &mut heard).await;
        sessions(&engine, &mut heard).await;
        nodes(&world, &engine, &mut heard).await;

        stop(&engine).await;
        heard.next(Name::NodeStopped).await;
        for (of, what, name) in TRANSITIONS.iter().filter(|(_, _, name)| !ELSEWHERE.contains(name)) {
            assert!(heard.walked.contains(name), "{of:?} {what}");
        }
        // Each event of the table has one row, and the documentation has the same rows.
        let documents = include_str!("../../../../docs/http.md");
        for (of, what, name) in TRANSITIONS {
            assert_eq!(TRANSITIONS.iter().filter(|(_, _, each)| each == name).count(), 1, "{name:?}");
            let of = format!("{of:?}").to_lowercase();
            let row = format!("| {of} | {what} | `{}` |", name.as_str());
            assert!(documents.contains(&row), "{row}");
        }
        assert_eq!(TRANSITIONS.iter().filter(|(of, _, _)| *of == Of::Run).count(), 8);
    })
    .await;
}

/// A node dies with two runs: one has attempts left, one has none.
async fn the_end_of_a_lease(world: &World, engine: &Engine, heard: &mut Heard) {
    let node = ghost(world).await;
    let last = engine.trigger("idle/s", RunRequest::default()).await.unwrap().run;
    assert_eq!(claim(world, node).await, 1);
    for _ in 0..9 {
        world.clock.advance(10 * SECOND);
        engine.idle().await;
    }
    assert_eq!(heard.next(Name::NodeFenced).await.node, Some(node));
    let end = heard.next(Name::RunFinished).await;
    assert_eq!((end.run_id, end.state), (Some(last), Some("failed")));
    assert_eq!((end.agent.as_deref(), end.schedule.as_deref()), (Some("idle"), Some("s")));
    assert_eq!(end.reason.as_deref(), Some("orphaned"));
    assert!(end.detail.as_deref().unwrap().contains("node died"), "{end:?}");
    assert_eq!((end.attempt, end.node), (Some(1), Some(node)));
    assert!(end.trace_id.is_some());
    assert_eq!((heard.ends(last), heard.count(last, &[Name::RunRescued])), (1, 0));
    let record = engine.run(last).await.unwrap().unwrap();
    assert_eq!((record.state, record.reason), (RunState::Failed, Some(Reason::Orphaned)));
    assert_eq!(record.error, end.detail);
    // Its end has opened the breaker.
    let opened = heard.next(Name::BreakerChanged).await;
    assert_eq!((opened.agent.as_deref(), opened.command.as_deref()), (Some("idle"), Some("poll")));
    assert_eq!((opened.run_id, opened.state), (Some(last), Some("open")));
    assert_eq!(opened.trace_id, end.trace_id);

    let mut agents = agents();
    agents[1].definition.retry.max = 3;
    agents[1].definition.breaker = None;
    engine.set_agents(agents).await.unwrap();
    // Without its policy the breaker is closed.
    let closed = heard.next(Name::BreakerChanged).await;
    assert_eq!((closed.agent.as_deref(), closed.command.as_deref()), (Some("idle"), Some("poll")));
    assert_eq!((closed.state, closed.reason.as_deref()), (Some("closed"), Some("manual_reset")));
    let node = ghost_again(world).await;
    let run = engine.trigger("idle/s", RunRequest::default()).await.unwrap().run;
    assert_eq!(claim(world, node).await, 1);
    for _ in 0..9 {
        world.clock.advance(10 * SECOND);
        engine.idle().await;
    }
    let rescued = heard.next(Name::RunRescued).await;
    assert_eq!((rescued.run_id, rescued.state), (Some(run), Some("pending")));
    assert_eq!((rescued.agent.as_deref(), rescued.schedule.as_deref()), (Some("idle"), Some("s")));
    assert_eq!((rescued.reason.as_deref(), rescued.attempt), (Some("orphaned"), Some(1)));
    assert_eq!((heard.ends(run), heard.count(run, &[Name::RunRescued])), (0, 1));

    // The engine's own node has claimed it, and the answer was lost.
    let nodes = world.store.nodes().await.unwrap();
    let own = nodes.iter().find(|node| !node.fenced && node.host != "elsewhere").unwrap().id;
    assert_eq!(claim(world, own).await, 1);
    // Two renewals show it. Nothing else is asked meanwhile, for a claim that is under way may be the one.
    for _ in 0..3 {
        world.clock.advance(10 * SECOND);
        let until = world.clock.now().wall + belfry::SignedDuration::from_secs(30);
        let is_renewed = async || {
            let nodes = world.store.nodes().await.unwrap();
            nodes.iter().any(|node| node.id == own && node.lease_until >= until)
        };
        while !is_renewed().await {
            tokio::task::yield_now().await;
        }
    }
    let returned = heard.next(Name::RunReturned).await;
    assert_eq!((returned.run_id, returned.node), (Some(run), Some(own)));
    assert_eq!((returned.agent.as_deref(), returned.schedule.as_deref()), (Some("idle"), Some("s")));
    assert_eq!((returned.state, returned.attempt), (Some("pending"), Some(1)), "the claim does not count");
    assert_eq!(heard.count(run, &[Name::RunReturned]), 1);
}

async fn ghost_again(world: &World) -> NodeId {
    let now = world.clock.now().wall;
    let node = ghost(world).await;
    world.store.renew(node, now + belfry::SignedDuration::from_secs(30)).await.unwrap();
    node
}

/// Lanes, schedules and agents that go, with the runs that wait for them; ticks that make no run.
async fn what_people_end(world: &World, engine: &Engine, heard: &mut Heard) {
    let waits = engine.trigger("idle/s", RunRequest::default()).await.unwrap().run;
    let cleared = engine.clear_lane("narrow").await.unwrap();
    assert!(cleared.contains(&waits));
    heard.next(Name::LaneChanged).await;
    for run in cleared {
        assert_eq!(heard.ends(run), 1, "{run}");
    }
    let end = heard.seen.iter().find(|event| event.run_id == Some(waits) && event.state == Some("cancelled"));
    let end = end.unwrap();
    assert_eq!((end.reason.as_deref(), end.agent.as_deref()), (Some("lane_cleared"), Some("idle")));

    // Two wait, and there is a node for them, so that the lane is full when the grid is due.
    let two = [
        engine.trigger("idle/s", RunRequest::default()).await.unwrap().run,
        engine.trigger("idle/s", RunRequest::default()).await.unwrap().run,
    ];
    let node = ghost_again(world).await;
    while world.clock.now().wall < start() + belfry::SignedDuration::from_mins(10) {
        let until = world.clock.now().wall + belfry::SignedDuration::from_secs(30);
        world.store.renew(node, until).await.unwrap();
        world.clock.advance(10 * SECOND);
        engine.idle().await;
    }
    let deferred = heard.next(Name::TickDeferred).await;
    assert_eq!((deferred.agent.as_deref(), deferred.reason.as_deref()), (Some("idle"), Some("lane_full")));
    assert!(deferred.tick_at.is_some());

    // One schedule goes by hand, the others with their agent.
    let added = engine.put_schedule("bot/api", &cron_definition(), &Expect::Any).await.unwrap();
    assert!(matches!(added, belfry_store::Put::Added(_)), "{added:?}");
    let paused = engine.trigger("bot/api", RunRequest::default()).await;
    drop(paused);
    engine.remove_schedule("bot/api", &Expect::Any).await.unwrap();
    let mut agents = agents();
    agents.remove(1);
    engine.set_agents(agents).await.unwrap();
    for run in two {
        assert_eq!(heard.ends(run), 1, "{run}");
        let end =
            heard.seen.iter().find(|event| event.run_id == Some(run) && event.event == Name::RunCancelled);
        assert_eq!(end.unwrap().reason.as_deref(), Some("agent_removed"));
    }
    heard.walked.insert(Name::RunCancelled);

    // A tick that meets a run of its schedule, and ticks that go by while the clock is set forward.
    world.tell("a/grid", Does::Wait);
    let run = engine.trigger("a/grid", RunRequest::default()).await.unwrap().run;
    while world.clock.now().wall < start() + belfry::SignedDuration::from_mins(20) {
        world.clock.advance(10 * SECOND);
        engine.idle().await;
    }
    let skipped = heard.next(Name::TickSkipped).await;
    assert_eq!(
        (skipped.schedule.as_deref(), skipped.reason.as_deref()),
        (Some("grid"), Some("already_running"))
    );
    world.tell("a/grid", Does::Succeed);
    world.let_go.notify_waiters();
    engine.quiet().await;
    assert_eq!(heard.ends(run), 1);
    world.clock.step_to(start() + belfry::SignedDuration::from_mins(57));
    engine.idle().await;
    let stepped = heard.next(Name::ClockStepped).await;
    assert_eq!(stepped.state, Some("forward"));
    let missed = heard.next(Name::TickMissed).await;
    assert_eq!(missed.reason.as_deref(), Some("missed_skip"));
}

fn cron_definition() -> belfry::ScheduleDefinition {
    let spec = AgentBuilder::new("x").schedule("s", When::Cron("0 0 29 2 *".into())).build();
    spec.schedules[0].1.clone()
}

async fn sessions(engine: &Engine, heard: &mut Heard) {
    let send = async |text: &str| {
        engine.send("bot/talk:ada", text, SendOptions::default()).await.unwrap().run().unwrap()
    };
    let run = send("hello").await;
    let made = heard.next(Name::RunCreated).await;
    assert_eq!((made.run_id, made.session.as_deref()), (Some(run), Some("ada")));
    assert_eq!(send("more").await, run, "it joins the open run");
    assert_eq!(heard.count(run, &[Name::RunCreated]), 1);
    engine.change_session("bot/talk:ada", SessionVerb::StopAll).await.unwrap();
    let end = heard.next(Name::RunCancelled).await;
    assert_eq!((end.run_id, end.reason.as_deref()), (Some(run), Some("stopped")));
    assert_eq!((end.outbound.as_deref(), end.session.as_deref()), (Some(""), Some("ada")));
    heard.next(Name::SessionStopped).await;
    assert_eq!(heard.ends(run), 1);

    // A reset says what the record says; by hand, and of all sessions.
    for all in [false, true] {
        let run = send("again").await;
        match all {
            true => drop(engine.reset_sessions().await.unwrap()),
            false => drop(engine.change_session("bot/talk:ada", SessionVerb::Reset).await.unwrap()),
        }
        let end = heard.next(Name::RunCancelled).await;
        let record = engine.run(run).await.unwrap().unwrap();
        assert_eq!((end.run_id, end.reason.as_deref()), (Some(run), Some("stale")));
        assert_eq!(record.reason, Some(Reason::Stale));
        assert_eq!(heard.next(Name::SessionReset).await.session.as_deref(), Some("ada"));
        assert_eq!(heard.ends(run), 1);
    }
    let old = SendOptions { generation: Some(0), ..SendOptions::default() };
    let refused = engine.send("bot/talk:ada", "late", old).await.err().unwrap();
    let belfry::Error::Stale { run, .. } = refused else { panic!("{refused}") };
    heard.next(Name::RunCancelled).await;
    assert_eq!((heard.count(run, &[Name::RunCreated]), heard.ends(run)), (1, 1));
}

async fn nodes(world: &World, engine: &Engine, heard: &mut Heard) {
    // Its lease is renewed by the clock that was set.
    world.clock.advance(11 * SECOND);
    engine.idle().await;
    let before = engine.node();
    engine.drain(before, true).await.unwrap();
    assert_eq!(heard.next(Name::NodeDraining).await.state, Some("draining"));
    engine.drain(before, false).await.unwrap();
    heard.next(Name::NodeDraining).await;
    let nodes = world.store.nodes().await.unwrap();
    let lease = nodes.iter().find(|node| node.id == before).unwrap().lease_until;
    world.store.fence(world.clock.now().wall, before, lease).await.unwrap().unwrap();
    for _ in 0..3 {
        world.clock.advance(10 * SECOND);
        engine.idle().await;
    }
    let joined = heard.next(Name::NodeRejoined).await;
    assert!(joined.node.is_some() && joined.node != Some(before), "{joined:?}");
    assert_eq!(engine.node(), joined.node.unwrap());
}
