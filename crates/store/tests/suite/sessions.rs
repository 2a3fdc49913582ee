//! Sessions and lanes: order, collapsing, stops, limits.

use belfry_core::edit::Resume;
use belfry_core::retry::Outcome;
use belfry_core::session::{Mode, RunUsage, Usage};
use belfry_core::{Reason, RunId, RunState};
use belfry_store::*;
use belfry_time::SignedDuration;
use serde_json::json;

use super::world::*;

/// All of them, each on a store of its own.
pub async fn all<S: Store>(fresh: &impl AsyncFn() -> S) {
    sessions_are_serial_and_apart(&fresh().await).await;
    rapid_messages_are_one_run(&fresh().await).await;
    a_run_holds_no_more_than_max_bytes(&fresh().await).await;
    a_sender_cannot_write_what_belfry_writes(&fresh().await).await;
    a_full_queue_drops_by_its_policy(&fresh().await).await;
    stops_end_what_they_say(&fresh().await).await;
    a_reset_begins_a_new_generation(&fresh().await).await;
    interrupts_and_throttles_hold(&fresh().await).await;
    an_interrupt_that_joins_an_open_run_waits_for_those_that_it_interrupts(&fresh().await).await;
    lanes_have_limits_and_can_be_cleared(&fresh().await).await;
    clearing_a_busy_lane_comes_to_an_end(&fresh().await).await;
    a_rescued_message_keeps_its_place(&fresh().await).await;
    a_chat_that_is_gone_or_paused_takes_nothing(&fresh().await).await;
}

fn talkers(value: serde_json::Value) -> Vec<AgentSpec> {
    vec![agent("bot", unlimited(), &[("talk", chat(value))])]
}

async fn a_run_holds_no_more_than_max_bytes<S: Store>(store: &S) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let chat = serde_json::json!({"debounce": "10s", "max_bytes": "64KiB", "max_concurrent": 50, "cap": 50});
    world.apply(&talkers(chat)).await;
    // 20 KiB fit three times with what stands around them; control characters take six bytes each in JSON.
    let texts: Vec<String> =
        (0..12).map(|n| if n < 9 { "x".repeat(20 << 10) } else { "\u{1}".repeat(20 << 10) }).collect();
    for text in &texts {
        assert!(matches!(world.send("bot/talk", "k", text, |_| ()).await, Sent::Taken { .. }));
    }
    world.send("bot/talk", "k", "a small one", |_| ()).await;
    world.advance(60_000);
    let claimed = world.claim(node, 50).await;
    let counts: Vec<usize> =
        claimed.iter().map(|claimed| read(claimed)["messages"].as_array().unwrap().len()).collect();
    assert_eq!(counts, [3, 3, 3, 1, 1, 1, 1], "what is larger alone has a run of its own");
    assert_eq!(read(&claimed[0])["text"], texts[..3].join("\n"), "given, not stored beside the messages");
    let run = store.run(claimed[0].run).await.unwrap().unwrap();
    assert_eq!(run.payload, read(&claimed[0]));
    world.complete(&claimed[0]).await;
    assert_eq!(store.run(claimed[0].run).await.unwrap().unwrap().payload, read(&claimed[0]));
    world.assert_whole().await;
}

/// The payload as an attempt gets it.
fn read(claimed: &Claimed) -> serde_json::Value {
    claimed.payload.read().unwrap()
}

fn run_of(sent: &Sent) -> RunId {
    match sent {
        Sent::Taken { run, .. } | Sent::Stale { run, .. } => *run,
        other => panic!("{other:?}"),
    }
}

async fn say<S: Store>(world: &mut World<'_, S>, key: &str, text: &str) -> RunId {
    run_of(&world.send("bot/talk", key, text, |_| {}).await)
}

async fn end_of<S: Store>(world: &World<'_, S>, run: RunId) -> (RunState, Option<Reason>) {
    let run = world.store.run(run).await.unwrap().unwrap();
    (run.state, run.reason)
}

const DROPPED: (RunState, Option<Reason>) = (RunState::Cancelled, Some(Reason::QueueDropped));
const STOPPED: (RunState, Option<Reason>) = (RunState::Cancelled, Some(Reason::Stopped));
const STALE: (RunState, Option<Reason>) = (RunState::Cancelled, Some(Reason::Stale));

async fn sessions_are_serial_and_apart<S: Store>(store: &S) {
    let mut world = World::new(store);
    world.apply(&talkers(json!({"debounce": "0s"}))).await;
    let node = world.join(1).await;
    let first = say(&mut world, "a", "one").await;
    let second = say(&mut world, "a", "two").await;
    let other = say(&mut world, "b", "one").await;
    let claimed = world.claim(node, 10).await;
    assert_eq!(claimed.iter().map(|claimed| claimed.run).collect::<Vec<_>>(), [first, other]);
    assert_eq!((claimed[0].lane.as_str(), claimed[0].session().as_deref()), ("main", Some("a")));
    assert_eq!(world.claim(node, 10).await, []);
    world.complete(&claimed[0]).await;
    let next = world.claim(node, 10).await;
    assert_eq!(next.iter().map(|claimed| claimed.run).collect::<Vec<_>>(), [second]);
    // Its retry keeps its place.
    let third = say(&mut world, "a", "three").await;
    world.fail(&next[0]).await;
    assert_eq!(world.claim(node, 10).await, []);
    world.advance(60_000);
    let again = world.claim(node, 10).await;
    assert_eq!(again.iter().map(|claimed| claimed.run).collect::<Vec<_>>(), [second]);
    world.complete(&again[0]).await;
    assert_eq!(world.claim(node, 10).await[0].run, third);
    world.assert_whole().await;
}

async fn rapid_messages_are_one_run<S: Store>(store: &S) {
    let mut world = World::new(store);
    world.apply(&talkers(json!({}))).await;
    let node = world.join(1).await;
    let first = say(&mut world, "a", "m0").await;
    for n in 1..5 {
        world.advance(100);
        assert_eq!(say(&mut world, "a", &format!("m{n}")).await, first);
    }
    assert_eq!(
        store.next_start(world.now).await.unwrap(),
        Some(world.now + SignedDuration::from_millis(800))
    );
    world.advance(799);
    assert_eq!(world.claim(node, 10).await, []);
    world.advance(1);
    let claimed = world.claim(node, 10).await;
    assert_eq!(claimed.len(), 1);
    assert_eq!(read(&claimed[0])["text"], "m0\nm1\nm2\nm3\nm4");
    let payload = read(&claimed[0]);
    let messages = payload["messages"].as_array().unwrap();
    let texts: Vec<_> =
        messages.iter().map(|m| (m["seq"].as_i64().unwrap(), m["text"].as_str().unwrap())).collect();
    assert_eq!(texts, [(1, "m0"), (2, "m1"), (3, "m2"), (4, "m3"), (5, "m4")]);
    assert_eq!(claimed[0].prompt, None, "no template is stored with a run");
    // Claiming closes it.
    assert_ne!(say(&mut world, "a", "m5").await, first);
}

async fn a_sender_cannot_write_what_belfry_writes<S: Store>(store: &S) {
    let mut world = World::new(store);
    world.apply(&talkers(json!({"debounce": "10s"}))).await;
    let node = world.join(1).await;
    let forged = json!({
        "messages": [{"seq": 0, "text": "forged", "received_at": "2020-01-01T00:00:00Z"}],
        "session": "somebody else",
        "text": "forged",
        "own": 1,
    });
    let came = world.now;
    let sent_at = came - SignedDuration::from_secs(5);
    let opened = world.send("bot/talk", "a", "first", |new| new.run.payload = forged.clone()).await;
    world.advance(1_500);
    let joined = world
        .send("bot/talk", "a", "second", |new| {
            new.run.payload = forged.clone();
            new.message.sent_at = Some(sent_at);
        })
        .await;
    assert_eq!(run_of(&joined), run_of(&opened));
    world.advance(60_000);
    let claimed = world.claim(node, 10).await;
    let later = came + SignedDuration::from_millis(1_500);
    let expected = json!({
        "messages": [
            {"seq": 1, "text": "first", "received_at": came.to_string()},
            {"seq": 2, "text": "second", "received_at": later.to_string(), "sent_at": sent_at.to_string()},
        ],
        "session": "a",
        "text": "first\nsecond",
        "own": 1,
    });
    assert_eq!(read(&claimed[0]), expected);
    assert_eq!(claimed[0].session().as_deref(), Some("a"));
    world.assert_whole().await;
}

async fn a_full_queue_drops_by_its_policy<S: Store>(store: &S) {
    let mut world = World::new(store);
    world.apply(&talkers(json!({}))).await;
    let mut runs = Vec::new();
    for n in 0..11 {
        runs.push(say(&mut world, "a", &n.to_string()).await);
        world.advance(1_000);
    }
    assert_eq!(end_of(&world, runs[0]).await, DROPPED);
    assert_eq!(store.counts().await.unwrap().pending, 10);
    world.apply(&talkers(json!({"drop": "new", "cap": 2, "debounce": "0s"}))).await;
    for n in 0..2 {
        say(&mut world, "b", &n.to_string()).await;
    }
    assert_eq!(world.send("bot/talk", "b", "third", |_| {}).await, Sent::Full);
    let node = world.join(1).await;
    assert_eq!(world.claim(node, 10).await.len(), 2, "the one that runs is not counted");
    assert!(matches!(world.send("bot/talk", "b", "third", |_| {}).await, Sent::Taken { seq: 3, .. }));
    world.assert_whole().await;
}

async fn stops_end_what_they_say<S: Store>(store: &S) {
    let mut world = World::new(store);
    world.apply(&talkers(json!({"debounce": "0s"}))).await;
    let node = world.join(1).await;
    let nothing = SessionDone { generation: 1, ended: vec![], told: vec![] };
    assert_eq!(world.session("bot/talk", "a", SessionVerb::Stop).await, nothing);
    // One that waits for a slot of its lane.
    let waiting = say(&mut world, "a", "slow").await;
    let done = world.session("bot/talk", "a", SessionVerb::Stop).await;
    assert_eq!(done.ended, [waiting]);
    assert_eq!(end_of(&world, waiting).await, STOPPED);
    // One runs and nine wait.
    let mut runs = Vec::new();
    for n in 0..10 {
        world.advance(1);
        runs.push(say(&mut world, "a", &n.to_string()).await);
    }
    let claimed = world.claim(node, 10).await;
    assert_eq!(claimed.len(), 1);
    world.advance(5);
    let done = world.session("bot/talk", "a", SessionVerb::StopAll).await;
    assert_eq!((done.told, done.ended.as_slice()), (vec![runs[0]], &runs[1..]));
    assert_eq!(store.marks(node).await.unwrap().cancels, [(runs[0], claimed[0].epoch, Reason::Stopped)]);
    assert_eq!(world.claim(node, 10).await, []);
    // It fails and could be retried: not any more.
    assert_eq!(world.fail(&claimed[0]).await, Finished::Ended(RunState::Cancelled));
    for run in &runs {
        assert_eq!(end_of(&world, *run).await, STOPPED);
    }
    let (sent_at, cutoff) = (world.now, world.now);
    world.advance(10);
    let before = cutoff - SignedDuration::from_millis(1);
    let late = world.send("bot/talk", "a", "late", |new| new.message.sent_at = Some(before)).await;
    assert!(matches!(late, Sent::Stale { .. }));
    assert_eq!(end_of(&world, run_of(&late)).await, STALE);
    let new = world.send("bot/talk", "a", "new", |new| new.message.sent_at = Some(sent_at)).await;
    assert_eq!(world.claim(node, 10).await[0].run, run_of(&new));
    world.assert_whole().await;
}

async fn a_reset_begins_a_new_generation<S: Store>(store: &S) {
    let mut world = World::new(store);
    world.apply(&talkers(json!({"debounce": "0s"}))).await;
    let node = world.join(1).await;
    let old = say(&mut world, "a", "old").await;
    let queued = say(&mut world, "a", "queued").await;
    let claimed = world.claim(node, 10).await;
    let done = world.session("bot/talk", "a", SessionVerb::Reset).await;
    assert_eq!(done, SessionDone { generation: 2, ended: vec![queued], told: vec![] });
    assert_eq!(end_of(&world, queued).await, STALE);
    // What runs is in nobody's way, and what it reports is nobody's business.
    let new = say(&mut world, "a", "new").await;
    let next = world.claim(node, 10).await;
    assert_eq!(next[0].run, new);
    let usage = Some(RunUsage { tokens: Some(99), context_window: Some(100), cost_usd: Some(0.25) });
    let report = |claimed: &Claimed, world: &World<'_, S>| Finish {
        usage,
        ..world.outcome(claimed, Outcome::Completed)
    };
    store.finish(world.now, &[report(&claimed[0], &world)]).await.unwrap();
    assert_eq!(end_of(&world, old).await, (RunState::Completed, None));
    let of = |key: &str| RunFilter { session: Some(key.into()), ..RunFilter::default() };
    let listed = store.runs(&of("a"), None, 10).await.unwrap().items;
    assert_eq!(listed.iter().map(|run| run.id).collect::<Vec<_>>(), [new, queued, old], "live and ended");
    assert_eq!(listed.iter().map(|run| run.usage).collect::<Vec<_>>(), [None, None, usage]);
    assert_eq!(store.run(old).await.unwrap().unwrap().usage, usage);
    assert!(listed.iter().all(|run| run.session() == Some("a") && run.payload == serde_json::json!({})));
    assert_eq!(store.runs(&of("b"), None, 10).await.unwrap().items, []);
    let named = RunFilter { schedule: Some("bot/talk".into()), ..of("a") };
    assert_eq!(store.runs(&named, None, 10).await.unwrap().items, listed);
    let page = store.sessions(&SessionFilter::default(), None, 10).await.unwrap();
    assert_eq!((page.items[0].session.usage, page.items[0].active), (None, 1));
    // A report of another attempt is not heard, also in the same batch.
    let stale = Finish {
        epoch: next[0].epoch + 1,
        usage: Some(RunUsage { tokens: Some(1), context_window: Some(2), cost_usd: None }),
        ..report(&next[0], &world)
    };
    let answers = store.finish(world.now, &[stale.clone(), report(&next[0], &world), stale]).await.unwrap();
    assert_eq!(answers, [Finished::Stale, Finished::Ended(RunState::Completed), Finished::Stale]);
    let page = store.sessions(&SessionFilter::default(), None, 10).await.unwrap();
    let of_session = usage.and_then(RunUsage::of_session);
    assert_eq!((page.items[0].session.usage, page.items[0].active), (of_session, 0));
    // One that is left behind and fails does not come back.
    say(&mut world, "a", "third").await;
    let third = world.claim(node, 10).await;
    world.session("bot/talk", "a", SessionVerb::Reset).await;
    assert_eq!(world.fail(&third[0]).await, Finished::Ended(RunState::Cancelled));
    assert_eq!(end_of(&world, third[0].run).await, STALE);
    let old = world.send("bot/talk", "a", "old news", |new| new.message.generation = Some(2)).await;
    assert!(matches!(old, Sent::Stale { generation: 3, .. }));
    world.assert_whole().await;
}

async fn interrupts_and_throttles_hold<S: Store>(store: &S) {
    let mut world = World::new(store);
    world.apply(&talkers(json!({"debounce": "0s", "max_concurrent": 2}))).await;
    let node = world.join(1).await;
    for n in 0..3 {
        say(&mut world, "a", &n.to_string()).await;
        world.advance(1);
    }
    let claimed = world.claim(node, 10).await;
    assert_eq!(claimed.len(), 2);
    let sent = world.send("bot/talk", "a", "now", |new| new.message.mode = Some(Mode::Interrupt)).await;
    let Sent::Taken { run, told, ended, .. } = sent else { panic!("{sent:?}") };
    assert_eq!((told.len(), ended.len()), (2, 1));
    world.finish(&claimed[0], Outcome::Cancelled(Reason::Interrupted)).await;
    assert_eq!(world.claim(node, 10).await, [], "the other one is still there");
    world.finish(&claimed[1], Outcome::Cancelled(Reason::Interrupted)).await;
    let next = world.claim(node, 10).await;
    assert_eq!(next[0].run, run);
    // From here on one at a time, until there is room again.
    world.session("bot/talk", "a", SessionVerb::Use(Usage { tokens: 60, context_window: 100 })).await;
    let waits = say(&mut world, "a", "more").await;
    assert_eq!(world.claim(node, 10).await, []);
    world.session("bot/talk", "a", SessionVerb::Use(Usage { tokens: 10, context_window: 100 })).await;
    assert_eq!(world.claim(node, 10).await[0].run, waits);
}

async fn an_interrupt_that_joins_an_open_run_waits_for_those_that_it_interrupts<S: Store>(store: &S) {
    let mut world = World::new(store);
    world.apply(&talkers(json!({"debounce": "800ms", "max_concurrent": 2}))).await;
    let node = world.join(1).await;
    say(&mut world, "a", "first").await;
    world.advance(1_000);
    let first = world.claim(node, 10).await;
    let open = say(&mut world, "a", "second").await;
    let sent = world.send("bot/talk", "a", "now", |new| new.message.mode = Some(Mode::Interrupt)).await;
    let Sent::Taken { run, joined, told, .. } = sent else { panic!("{sent:?}") };
    assert_eq!((run, joined, told), (open, true, vec![first[0].run]));
    world.advance(1_000);
    assert_eq!(world.claim(node, 10).await, [], "the interrupted run is still there");
    world.finish(&first[0], Outcome::Cancelled(Reason::Interrupted)).await;
    assert_eq!(world.claim(node, 10).await[0].run, open);
    world.assert_whole().await;
}

async fn lanes_have_limits_and_can_be_cleared<S: Store>(store: &S) {
    let mut world = World::new(store);
    world.apply(&talkers(json!({"debounce": "0s"}))).await;
    let (one, two) = (world.join(1).await, world.join(2).await);
    let settings = |limit| LaneSettings { slots: 30, limit, queue_limit: None };
    store.put_lanes(world.now, &[("main".into(), settings(None))]).await.unwrap();
    store.set_lane(world.now, "main", Some(settings(Some(2)))).await.unwrap();
    for n in 0..6 {
        say(&mut world, &n.to_string(), "x").await;
        world.advance(1);
    }
    let first = world.claim(one, 1).await;
    let second = world.claim(two, 5).await;
    assert_eq!((first.len(), second.len(), world.claim(one, 5).await.len()), (1, 1, 0));
    let lanes = store.lanes(world.now).await.unwrap();
    let main = lanes.iter().find(|lane| lane.name == "main").unwrap();
    assert_eq!((main.active, main.pending, main.settings()), (2, 4, Some(settings(Some(2)))));
    assert_eq!(main.oldest_pending, Some(start() + SignedDuration::from_millis(2)));
    world.complete(&first[0]).await;
    assert_eq!(world.claim(two, 5).await.len(), 1);
    // Lowering ends nothing, and lets nothing start.
    store.set_lane(world.now, "main", Some(settings(Some(1)))).await.unwrap();
    world.complete(&second[0]).await;
    assert_eq!(world.claim(two, 5).await.len(), 0);
    let cleared = store.clear_lane(world.now, "main").await.unwrap();
    assert_eq!(cleared.len(), 3);
    for run in cleared {
        assert_eq!(end_of(&world, run).await, (RunState::Cancelled, Some(Reason::LaneCleared)));
    }
    store.set_lane(world.now, "main", None).await.unwrap();
    assert_eq!(store.lanes(world.now).await.unwrap()[0].set, None);
    say(&mut world, "9", "x").await;
    say(&mut world, "8", "x").await;
    assert_eq!(world.claim(two, 5).await.len(), 2, "without a limit again");
    world.assert_whole().await;
}

async fn clearing_a_busy_lane_comes_to_an_end<S: Store>(store: &S) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("s", every("1h"))])]).await;
    let mut waiting = Vec::new();
    for _ in 0..20 {
        waiting.push(world.enqueue("a/s", None).await.0);
    }
    let (now, lane) = (world.now, store.run(waiting[0]).await.unwrap().unwrap().lane);
    let feed = async {
        loop {
            world.enqueue("a/s", None).await;
            tokio::task::yield_now().await;
        }
    };
    let clear = tokio::time::timeout(std::time::Duration::from_secs(20), store.clear_lane(now, &lane));
    let cleared = tokio::select! {
        () = feed => unreachable!("it feeds for ever"),
        cleared = clear => cleared.expect("it ends").unwrap(),
    };
    assert!(waiting.iter().all(|run| cleared.contains(run)));
    world.assert_whole().await;
}

async fn a_rescued_message_keeps_its_place<S: Store>(store: &S) {
    let mut world = World::new(store);
    world.apply(&talkers(json!({"debounce": "0s"}))).await;
    let (one, two) = (world.join(1).await, world.join(2).await);
    let first = say(&mut world, "a", "1").await;
    let second = say(&mut world, "a", "2").await;
    assert_eq!(world.claim(one, 5).await[0].run, first);
    let lease = world.store.nodes().await.unwrap()[0].lease_until;
    store.fence(world.now, one, lease).await.unwrap().unwrap();
    let claimed = world.claim(two, 5).await;
    assert_eq!((claimed.len(), claimed[0].run, claimed[0].attempt), (1, first, 2));
    // Given back, it does as well.
    assert_eq!(store.give_back(world.now, two, &[(first, claimed[0].epoch)]).await.unwrap().len(), 1);
    let claimed = world.claim(two, 5).await;
    assert_eq!((claimed.len(), claimed[0].run), (1, first));
    // A run by its id alone does not pass the line by.
    assert_eq!(world.claim_only(two, second).await, []);
    world.complete(&claimed[0]).await;
    assert_eq!(world.claim_only(two, second).await.len(), 1);
}

async fn a_chat_that_is_gone_or_paused_takes_nothing<S: Store>(store: &S) {
    let mut world = World::new(store);
    world.apply(&talkers(json!({"debounce": "0s"}))).await;
    let id = world.schedule("bot/talk").await.id;
    let queued = say(&mut world, "a", "x").await;
    store.pause(world.now, id, Some("quiet"), None).await.unwrap();
    assert_eq!(world.send("bot/talk", "a", "y", |_| {}).await, Sent::Disabled);
    store.resume(world.now, id, Resume::Skip).await.unwrap();
    let compiled = chat(json!({})).compile("bot/talk").unwrap();
    let record = world.schedule("bot/talk").await;
    let run = NewRun::of_message(
        Defined::new(record.agent, id, &compiled, &unlimited()),
        world.run_id(),
        world.now,
        None,
    );
    world.apply(&[]).await;
    assert_eq!(end_of(&world, queued).await, (RunState::Cancelled, Some(Reason::AgentRemoved)));
    let message = NewMessage {
        run,
        session: "a".into(),
        text: "z".into(),
        message: Default::default(),
        policy: Default::default(),
        key: None,
    };
    assert_eq!(store.send(world.now, &message).await.unwrap(), Sent::NotFound);
    assert_eq!(store.session(world.now, id, "a", SessionVerb::Stop).await.unwrap(), None);
    world.assert_whole().await;
}
