//! Conversations through the engine on every store: order, collapsing, stops, lanes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::support::{World, on_each, stop};
use belfry::event::Name;
use belfry::{
    AgentBuilder, AgentSpec, Engine, Error, LaneSettings, Mode, Options, Reply, RunRequest, RunState,
    SendOptions, Sent, SessionVerb, StopOptions, Usage, chat,
};
use belfry_core::Reason;
use belfry_core::definition::Retry;
use belfry_store::{SessionFilter, Store};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;

const MS: Duration = Duration::from_millis(1);

/// What the bots do: each run goes on until the text it was given is let go of.
#[derive(Clone, Default)]
struct Bots {
    started: Arc<Mutex<Vec<String>>>,
    doors: Arc<Mutex<HashMap<String, Arc<Notify>>>>,
    /// Running now, and the most there ever were.
    running: Arc<Mutex<(u32, u32)>>,
    cancelled: Arc<Mutex<Vec<(String, uuid::Uuid)>>>,
}

impl Bots {
    fn door(&self, text: &str) -> Arc<Notify> {
        self.doors.lock().entry(text.to_owned()).or_default().clone()
    }

    /// Lets a run go on, also one that has not started yet.
    fn let_go(&self, text: &str) {
        self.door(text).notify_one();
    }

    fn started(&self) -> Vec<String> {
        self.started.lock().clone()
    }

    fn peak(&self) -> u32 {
        self.running.lock().1
    }

    async fn engine(&self, world: &World, policy: Value) -> Engine {
        self.engine_with(world, policy, |builder| builder).await
    }

    async fn engine_with(
        &self,
        world: &World,
        policy: Value,
        more: impl FnOnce(belfry::Builder) -> belfry::Builder,
    ) -> Engine {
        let bots = self.clone();
        let options = Options { lease: Duration::from_secs(86_400), ..Options::default() };
        let builder = Engine::builder()
            .store(world.store.clone())
            .clock(world.clock.clone())
            .options(options)
            .agents([bot(policy)])
            .handler("bot", move |run| {
                let bots = bots.clone();
                async move {
                    let text = run.payload()["text"].as_str().unwrap_or_default().to_owned();
                    bots.started.lock().push(text.clone());
                    {
                        let mut running = bots.running.lock();
                        running.0 += 1;
                        running.1 = running.1.max(running.0);
                    }
                    let door = bots.door(&text);
                    tokio::select! {
                        () = door.notified() => {}
                        () = run.cancelled() => {
                            // What belongs to the run stays readable.
                            bots.cancelled.lock().push((text.clone(), run.trace_id()));
                        }
                    }
                    bots.running.lock().0 -= 1;
                    if let Some(used) = text.strip_prefix("uses ") {
                        run.used(used.parse()?, 100);
                    }
                    if text.starts_with("fails") {
                        return Err("told to fail".into());
                    }
                    Ok(())
                }
            });
        let engine = more(builder).build();
        engine.start().await.unwrap();
        engine.idle().await;
        engine
    }
}

fn bot(policy: Value) -> AgentSpec {
    AgentBuilder::new("bot")
        .schedule("talk", chat(policy))
        .define(|agent| agent.retry = Retry { base_ms: 1000, ..Retry::default() })
        .build()
}

async fn say(engine: &Engine, key: &str, text: &str) -> Sent {
    say_with(engine, key, text, SendOptions::default()).await.unwrap()
}

async fn say_with(engine: &Engine, key: &str, text: &str, with: SendOptions) -> Result<Sent, Error> {
    let sent = engine.send(&format!("bot/talk:{key}"), text, with).await;
    engine.idle().await;
    sent
}

async fn end_of(engine: &Engine, sent: &Sent) -> (RunState, Option<Reason>) {
    let run = engine.run(sent.run().unwrap()).await.unwrap().unwrap();
    (run.state, run.reason)
}

async fn let_go(engine: &Engine, bots: &Bots, sent: &Sent, text: &str) {
    bots.let_go(text);
    engine.wait(sent.run().unwrap()).await.unwrap();
    engine.idle().await;
}

/// Ends all that still runs, so that the engine can stop.
async fn finish(engine: &Engine) {
    engine.stop(StopOptions { wait: false, timeout: Duration::ZERO }).await.unwrap();
}

#[tokio::test]
async fn runs_of_a_session_are_serial_and_sessions_are_apart() {
    on_each(async |world: World| {
        let bots = Bots::default();
        let engine = bots.engine(&world, json!({"debounce": "0s"})).await;
        let (a, b) = (say(&engine, "x", "a").await, say(&engine, "x", "b").await);
        say(&engine, "y", "c").await;
        assert_eq!(bots.started(), ["a", "c"]);
        assert_eq!((engine.running("bot"), engine.running("other")), (2, 0));
        let_go(&engine, &bots, &a, "a").await;
        assert_eq!(bots.started(), ["a", "c", "b"]);
        let_go(&engine, &bots, &b, "b").await;
        let page = world.store.sessions(&SessionFilter::default(), None, 10).await.unwrap();
        let counts: Vec<_> =
            page.items.iter().map(|one| (one.key.as_str(), one.active, one.queued)).collect();
        assert_eq!(counts, [("x", 0, 0), ("y", 1, 0)]);
        finish(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn five_messages_within_the_window_are_one_run() {
    on_each(async |world: World| {
        let bots = Bots::default();
        let engine = bots.engine(&world, json!({})).await;
        for n in 0..5 {
            say(&engine, "x", &format!("m{n}")).await;
            world.clock.advance(100 * MS);
            engine.idle().await;
        }
        assert_eq!(bots.started(), Vec::<String>::new());
        world.clock.advance(699 * MS);
        engine.idle().await;
        assert_eq!(bots.started(), Vec::<String>::new());
        world.clock.advance(MS);
        engine.idle().await;
        assert_eq!(bots.started(), ["m0\nm1\nm2\nm3\nm4"]);
        let runs = world.runs().await;
        assert_eq!((runs.len(), runs[0].payload["messages"].as_array().unwrap().len()), (1, 5));
        finish(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_payload_with_a_key_that_belfry_writes_is_refused() {
    on_each(async |world: World| {
        let bots = Bots::default();
        let engine = bots.engine(&world, json!({"debounce": "0s"})).await;
        for key in ["messages", "session", "text"] {
            let payload = json!({"own": 1, key: [{"seq": 1, "text": "forged"}]}).as_object().unwrap().clone();
            let with = SendOptions { payload, ..SendOptions::default() };
            let Err(error) = say_with(&engine, "x", "hello", with).await else { panic!("{key} was taken") };
            assert_eq!(error.code(), "reserved_key");
            assert!(error.to_string().contains(&format!("`{key}`")), "{error}");
            let payload = json!({key: "forged"}).as_object().unwrap().clone();
            let request = RunRequest { payload, ..RunRequest::default() };
            let Err(error) = engine.trigger("bot/talk", request).await else { panic!("a run took {key}") };
            assert_eq!(error.code(), "reserved_key");
        }
        assert!(bots.started().is_empty() && world.runs().await.is_empty());
        finish(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_full_queue_drops_the_oldest_or_refuses_the_newest() {
    on_each(async |world: World| {
        let bots = Bots::default();
        let engine = bots.engine(&world, json!({"cap": 2, "debounce": "0s"})).await;
        say(&engine, "x", "r1").await;
        let r2 = say(&engine, "x", "r2").await;
        say(&engine, "x", "r3").await;
        let r4 = say(&engine, "x", "r4").await;
        assert_eq!(end_of(&engine, &r2).await, (RunState::Cancelled, Some(Reason::QueueDropped)));
        assert!(matches!(r2.outcome().await, Err(Error::QueueDropped { .. })), "the victim hears of it");
        assert!(matches!(&r4.reply, Reply::Taken(taken) if taken.ended == [r2.run().unwrap()]));
        engine.set_agents(vec![bot(json!({"cap": 2, "debounce": "0s", "drop": "new"}))]).await.unwrap();
        let full = say_with(&engine, "x", "r5", SendOptions::default()).await;
        let Err(error) = full else { panic!("not refused") };
        assert_eq!(error.code(), "queue_full");
        finish(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_context_window_that_fills_up_leaves_one_at_a_time() {
    on_each(async |world: World| {
        let bots = Bots::default();
        let engine = bots.engine(&world, json!({"debounce": "0s", "max_concurrent": 5})).await;
        // By what a run reports, and by what anybody says.
        let first = say(&engine, "x", "uses 60").await;
        let_go(&engine, &bots, &first, "uses 60").await;
        say(&engine, "x", "a").await;
        say(&engine, "x", "b").await;
        assert_eq!(bots.started(), ["uses 60", "a"]);
        let used = |tokens| SessionVerb::Use(Usage { tokens, context_window: 100 });
        engine.change_session("bot:x", used(59)).await.unwrap();
        engine.idle().await;
        assert_eq!(bots.started(), ["uses 60", "a", "b"]);
        finish(&engine).await;
        // By what the program knows.
        let bots = Bots::default();
        let usage = |session: &str| {
            (session == "bot/talk:y").then_some(Usage { tokens: 80_000, context_window: 100_000 })
        };
        let engine = bots
            .engine_with(&world, json!({"debounce": "0s", "max_concurrent": 5}), |b| b.usage(usage))
            .await;
        for (key, text) in [("y", "c"), ("y", "d"), ("z", "e"), ("z", "f")] {
            say(&engine, key, text).await;
        }
        // Of the first engine a and b went back to waiting, and start again.
        let mut started = bots.started();
        started.retain(|text| !["a", "b"].contains(&text.as_str()));
        assert_eq!(started, ["c", "e", "f"]);
        finish(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_reset_session_takes_new_messages_while_the_old_run_goes_on() {
    on_each(async |world: World| {
        let bots = Bots::default();
        let engine = bots.engine(&world, json!({"debounce": "0s"})).await;
        let r1 = say(&engine, "x", "r1").await;
        let queued = say(&engine, "x", "queued").await;
        engine.change_session("bot/talk:x", SessionVerb::Reset).await.unwrap();
        assert!(matches!(queued.outcome().await, Err(Error::Stale { .. })));
        let r2 = say(&engine, "x", "r2").await;
        assert_eq!(bots.started(), ["r1", "r2"]);
        let_go(&engine, &bots, &r1, "r1").await;
        let_go(&engine, &bots, &r2, "r2").await;
        assert_eq!(end_of(&engine, &r1).await.0, RunState::Completed);
        assert_eq!(end_of(&engine, &r2).await.0, RunState::Completed);
        let old = SendOptions { generation: Some(1), ..SendOptions::default() };
        let Err(error) = say_with(&engine, "x", "late", old).await else { panic!("not stale") };
        assert_eq!(error.code(), "stale");
        assert_eq!(engine.reset_sessions().await.unwrap(), 1);
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn stopall_ends_what_runs_and_all_that_waits() {
    on_each(async |world: World| {
        let bots = Bots::default();
        let engine = bots.engine(&world, json!({"debounce": "0s"})).await;
        let mut events = engine.events();
        let mut sent = Vec::new();
        for n in 0..10 {
            sent.push(say(&engine, "x", &format!("r{n}")).await);
        }
        // It passes the debouncer by, and is no message.
        let answer = say(&engine, "x", " /stopall ").await;
        let Reply::Stopped(done) = &answer.reply else { panic!("{:?}", answer.reply) };
        assert_eq!((done.told.len(), done.ended.len()), (1, 9));
        assert_eq!(answer.outcome().await.unwrap(), None);
        for one in &sent {
            let run = one.outcome().await.unwrap().unwrap();
            assert_eq!((run.state, run.reason), (RunState::Cancelled, Some(Reason::Stopped)));
            assert!(run.finished_at.is_some(), "its last record is written");
        }
        engine.quiet().await;
        assert_eq!(bots.started(), ["r0"], "nothing of it starts afterwards");
        let cancelled = bots.cancelled.lock().clone();
        assert_eq!(cancelled, [("r0".to_owned(), sent[0].run().unwrap().0)], "the trace is still known");
        // Whoever shows that something will come is told that nothing does: once for each run.
        let mut silenced = Vec::new();
        while let Ok(event) = events.try_recv() {
            if event.outbound.as_deref() == Some("") {
                assert_eq!((event.event, event.session.as_deref()), (Name::RunCancelled, Some("x")));
                silenced.push(event.run_id.unwrap());
            }
        }
        silenced.sort();
        assert_eq!(silenced, sent.iter().map(|one| one.run().unwrap()).collect::<Vec<_>>());
        // What was sent before the stop and comes later is stale.
        world.clock.advance(10 * MS);
        let late = SendOptions {
            sent_at: Some(crate::support::start() - belfry::SignedDuration::from_millis(1)),
            ..SendOptions::default()
        };
        assert!(matches!(say_with(&engine, "x", "late", late).await, Err(Error::Stale { .. })));
        let new = say(&engine, "x", "new").await;
        let_go(&engine, &bots, &new, "new").await;
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn stop_ends_the_oldest_and_others_go_on() {
    on_each(async |world: World| {
        let bots = Bots::default();
        let engine = bots.engine(&world, json!({"debounce": "0s", "max_concurrent": 2})).await;
        let r1 = say(&engine, "x", "r1").await;
        let r2 = say(&engine, "x", "r2").await;
        let r3 = say(&engine, "x", "r3").await;
        let answer = say(&engine, "x", "/stop").await;
        assert!(matches!(&answer.reply, Reply::Stopped(done) if done.told == [r1.run().unwrap()]));
        engine.wait(r1.run().unwrap()).await.unwrap();
        engine.idle().await;
        assert_eq!(bots.started(), ["r1", "r2", "r3"]);
        assert_eq!(end_of(&engine, &r1).await, (RunState::Cancelled, Some(Reason::Stopped)));
        let_go(&engine, &bots, &r2, "r2").await;
        let_go(&engine, &bots, &r3, "r3").await;
        let answer = say(&engine, "x", "/stop").await;
        assert!(
            matches!(&answer.reply, Reply::Stopped(done) if done.told.is_empty() && done.ended.is_empty())
        );
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn an_interrupt_starts_when_the_cancelled_run_is_gone() {
    on_each(async |world: World| {
        let bots = Bots::default();
        let engine = bots.engine(&world, json!({"debounce": "0s", "mode": "interrupt"})).await;
        let r1 = say(&engine, "x", "r1").await;
        let r2 = say(&engine, "x", "r2").await;
        engine.wait(r1.run().unwrap()).await.unwrap();
        engine.idle().await;
        assert_eq!(end_of(&engine, &r1).await, (RunState::Cancelled, Some(Reason::Interrupted)));
        assert_eq!((bots.started(), bots.peak()), (vec!["r1".into(), "r2".into()], 1));
        let queue = SendOptions { mode: Some(Mode::Queue), ..SendOptions::default() };
        say_with(&engine, "x", "r3", queue).await.unwrap();
        assert_eq!(bots.started().len(), 2, "this one only waits");
        let_go(&engine, &bots, &r2, "r2").await;
        assert_eq!(bots.started().len(), 3);
        finish(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_retry_keeps_its_place() {
    on_each(async |world: World| {
        let bots = Bots::default();
        let engine = bots.engine(&world, json!({"debounce": "0s"})).await;
        say(&engine, "x", "fails").await;
        say(&engine, "x", "next").await;
        bots.let_go("fails");
        while world.runs().await[0].state == RunState::Running {
            engine.idle().await;
            tokio::task::yield_now().await;
        }
        assert_eq!(bots.started(), ["fails"]);
        world.clock.advance(Duration::from_secs(2));
        engine.idle().await;
        assert_eq!(bots.started(), ["fails", "fails"]);
        finish(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_lane_holds_as_many_as_it_has_slots_and_order_is_kept() {
    on_each(async |world: World| {
        let bots = Bots::default();
        let engine = bots
            .engine_with(&world, json!({"debounce": "0s", "max_concurrent": 4}), |b| b.lane("narrow", 1))
            .await;
        let narrow = || SendOptions { lane: Some("narrow".into()), ..SendOptions::default() };
        let held = say_with(&engine, "held", "held", narrow()).await.unwrap();
        let a = say_with(&engine, "x", "a", narrow()).await.unwrap();
        let b = say_with(&engine, "x", "b", narrow()).await.unwrap();
        let c = say_with(&engine, "x", "c", narrow()).await.unwrap();
        // One that waits for the lane is stopped, and never runs.
        let stopped = say(&engine, "x", "/stop").await;
        assert!(matches!(&stopped.reply, Reply::Stopped(done) if done.ended == [a.run().unwrap()]));
        let_go(&engine, &bots, &held, "held").await;
        let_go(&engine, &bots, &b, "b").await;
        let_go(&engine, &bots, &c, "c").await;
        assert_eq!((bots.started(), bots.peak()), (vec!["held".into(), "b".into(), "c".into()], 1));
        // More slots at run time, without a restart.
        engine
            .set_lane("narrow", Some(LaneSettings { slots: 2, limit: None, queue_limit: None }))
            .await
            .unwrap();
        world.clock.advance(Duration::from_secs(1));
        engine.idle().await;
        let mut sent = Vec::new();
        for n in 0..10 {
            sent.push(say_with(&engine, &format!("s{n}"), &format!("t{n}"), narrow()).await.unwrap());
        }
        let lanes = engine.lanes().await.unwrap();
        let lane = lanes.iter().find(|lane| lane.name == "narrow").unwrap();
        assert_eq!((lane.active, lane.pending), (2, 8));
        for (n, one) in sent.iter().enumerate() {
            let_go(&engine, &bots, one, &format!("t{n}")).await;
        }
        assert_eq!(bots.peak(), 2);
        // A lane that nobody made.
        let with = SendOptions { lane: Some("nowhere".into()), ..SendOptions::default() };
        let sent = say_with(&engine, "x", "z", with).await.unwrap();
        let Reply::Taken(taken) = &sent.reply else { panic!("{:?}", sent.reply) };
        assert_eq!((taken.lane.as_str(), taken.unknown_lane.as_deref()), ("main", Some("nowhere")));
        finish(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn who_is_told_of_starts_hears_of_each_in_order_and_of_nothing_that_was_stopped() {
    on_each(async |world: World| {
        let bots = Bots::default();
        let heard: Arc<Mutex<Vec<String>>> = Arc::default();
        let tell = heard.clone();
        let engine = bots
            .engine_with(&world, json!({"debounce": "0s", "max_concurrent": 4}), |builder| {
                let text = |attempt: &belfry_runner::Attempt| {
                    attempt.payload.read().unwrap()["text"].as_str().unwrap().to_owned()
                };
                builder.lane("narrow", 1).on_trigger(move |attempt| tell.lock().push(text(attempt)))
            })
            .await;
        let narrow = || SendOptions { lane: Some("narrow".into()), ..SendOptions::default() };
        // Three wait for a lane that another session holds: told to stop, they are gone at once.
        let held = say_with(&engine, "held", "held", narrow()).await.unwrap();
        for verb in [SessionVerb::StopAll, SessionVerb::Reset] {
            let mut sent = Vec::new();
            for text in ["a", "b", "c"] {
                sent.push(say_with(&engine, "x", text, narrow()).await.unwrap());
            }
            assert_eq!(engine.change_session("bot:x", verb).await.unwrap().ended.len(), 3);
            for one in &sent {
                assert_eq!(end_of(&engine, one).await.0, RunState::Cancelled);
            }
        }
        let d = say_with(&engine, "x", "d", narrow()).await.unwrap();
        let e = say_with(&engine, "x", "e", narrow()).await.unwrap();
        let_go(&engine, &bots, &held, "held").await;
        let_go(&engine, &bots, &d, "d").await;
        let_go(&engine, &bots, &e, "e").await;
        assert_eq!(*heard.lock(), ["held", "d", "e"]);
        assert_eq!(bots.started(), ["held", "d", "e"]);
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_saturated_lane_delays_nobody_else_and_can_be_cleared() {
    on_each(async |world: World| {
        let bots = Bots::default();
        let engine = bots.engine_with(&world, json!({"debounce": "0s"}), |b| b.lane("slow", 1)).await;
        let mut waiting = Vec::new();
        for n in 0..501 {
            let slow = SendOptions { lane: Some("slow".into()), ..SendOptions::default() };
            waiting.push(engine.send(&format!("bot:s{n}"), &format!("w{n}"), slow).await.unwrap());
        }
        engine.idle().await;
        assert_eq!(bots.started(), ["w0"]);
        let other = say(&engine, "me", "hello").await;
        assert_eq!(bots.started(), ["w0", "hello"]);
        let_go(&engine, &bots, &other, "hello").await;
        assert_eq!(engine.clear_lane("slow").await.unwrap().len(), 500);
        let Err(error) = waiting[1].outcome().await else { panic!("not cleared") };
        assert_eq!(error.code(), "lane_cleared");
        bots.let_go("w0");
        engine.quiet().await;
        assert_eq!(bots.started().len(), 2);
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn an_engine_that_stops_takes_no_new_work() {
    on_each(async |world: World| {
        let bots = Bots::default();
        let engine = bots.engine(&world, json!({"debounce": "0s"})).await;
        say(&engine, "x", "r1").await;
        let stopping = engine.clone();
        let stopped = tokio::spawn(async move { stopping.stop(StopOptions::default()).await });
        while engine.status() == belfry::Status::Running {
            tokio::task::yield_now().await;
        }
        let refused = engine.send("bot:x", "r2", SendOptions::default()).await;
        let Err(error) = refused else { panic!("taken") };
        assert_eq!(error.code(), "draining");
        assert!(matches!(engine.trigger("bot/talk", Default::default()).await, Err(Error::Draining)));
        bots.let_go("r1");
        stopped.await.unwrap().unwrap();
    })
    .await;
}

#[tokio::test]
async fn mistakes_are_named() {
    let bots = Bots::default();
    on_each(async |world: World| {
        let engine = bots.engine(&world, json!({"debounce": "0s"})).await;
        let error = async |session: &str| {
            let Err(error) = engine.send(session, "x", SendOptions::default()).await else { panic!("taken") };
            error.to_string()
        };
        assert_eq!(error("bot/talk").await, "bot/talk names no session: write agent/schedule:key");
        assert_eq!(error("bot/walk:x").await, "there is no schedule bot/walk");
        assert_eq!(error("nobody:x").await, "agent nobody has no chat schedule");
        assert_eq!(error("bot:").await, "cannot run bot/talk: the key of a session is empty");
        assert!(error("bot:a\nb").await.contains("control character"));
        stop(&engine).await;
    })
    .await;
}
