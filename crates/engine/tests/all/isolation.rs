//! One thing that cannot be stored disturbs nothing else, and the store is well only when it can be written.

use std::time::Duration;

use crate::support::{Does, World, on_each, start, stop};
use belfry::testing::{Ask, Driver, Effect, Input, Now};
use belfry::{AgentBuilder, Engine, Options, ScheduleOptions, cron, every};
use belfry_core::definition::IfRunning;
use belfry_core::input::StoredPayload;
use belfry_core::rescue::Rescues;
use belfry_core::{NodeId, RunState, Trigger};
use belfry_store::{Claimed, Defined, Definitions, Enqueue, Marks, NewRun, Renewed, Store};

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test]
async fn a_tick_that_lives_already_stops_no_other_schedule() {
    let allow = ScheduleOptions { if_running: IfRunning::Allow, ..ScheduleOptions::default() };
    let agents = [
        AgentBuilder::new("a").schedule_with("planted", cron("* * * * *").unwrap(), allow).build(),
        AgentBuilder::new("b").schedule("other", every("3s").unwrap()).build(),
    ];
    on_each(async |world: World| {
        world.tell("a/planted", Does::Wait);
        let engine = world.engine(&agents).await;
        let mut events = engine.events();
        let record = engine.schedule_state("a/planted").await.unwrap();
        let compiled = record.definition.compile("a/planted").unwrap();
        let run = NewRun {
            tick_at: Some(record.token.unwrap().tick_at),
            trigger: Trigger::Schedule,
            ..NewRun::by_hand(
                Defined::new(record.agent, record.id, &compiled, &agents[0].definition),
                belfry::testing::new_run_id(engine.now()),
                engine.now(),
            )
        };
        let planted = run.id;
        world.store.enqueue(engine.now(), &Enqueue { run, key: None }).await.unwrap();
        engine.hint().await;
        world.pass(&engine, 90 * SECOND, SECOND).await;
        assert_eq!(world.starts("b/other").len(), 31, "every 3 s for 90 s, the first at once");
        let first: Vec<_> = world.starts("a/planted").into_iter().filter_map(|seen| seen.tick_at).collect();
        assert_eq!(first, [record.token.unwrap().tick_at], "the tick has one run");
        world.pass(&engine, 60 * SECOND, SECOND).await;
        assert_eq!(world.starts("a/planted").len(), 2, "the next tick has its own");
        let mut live = world.store.live_runs().await.unwrap();
        // The other schedule may have a run under way.
        live.retain(|run| run.name == "a/planted");
        assert!(
            live.iter().any(|run| run.id == planted) && live.len() == 2,
            "the next tick has made its run"
        );
        while let Ok(event) = events.try_recv() {
            assert_ne!(event.event, belfry::event::Name::StoreUnavailable, "{event:?}");
        }
        world.let_go.notify_waiters();
        world.does.lock().clear();
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn an_error_that_no_store_keeps_as_it_is_ends_its_run_and_no_other_waits() {
    let agents = [
        AgentBuilder::new("nul").schedule("s", cron("* * * * *").unwrap()).build(),
        AgentBuilder::new("fine").schedule("s", cron("* * * * *").unwrap()).build(),
    ];
    on_each(async |world: World| {
        let engine = Engine::builder()
            .store(world.store.clone())
            .clock(world.clock.clone())
            .options(Options { lease: 86_400 * SECOND, ..Options::default() })
            .agents(agents.to_vec())
            .handler("nul", |_| async { Err(format!("a\0b{}", "\0".repeat(1 << 20)).into()) })
            .handler("fine", |_| async { Ok(()) })
            .build();
        engine.start().await.unwrap();
        world.pass(&engine, 150 * SECOND, 5 * SECOND).await;
        let runs = world.runs().await;
        let fine = runs.iter().filter(|run| run.agent_name == "fine" && run.state == RunState::Completed);
        assert_eq!(fine.count(), 2);
        let failed: Vec<_> = runs.iter().filter(|run| run.agent_name == "nul").collect();
        assert!(failed.iter().any(|run| run.state == RunState::Failed), "{}", failed.len());
        let error = failed.iter().find_map(|run| run.error.as_ref()).unwrap();
        assert!(error.starts_with("a\u{FFFD}b") && error.chars().count() == 4_000, "{}", error.len());
        stop(&engine).await;
    })
    .await;
}

fn full<T>() -> Result<T, belfry_store::Error> {
    Err(belfry_store::Error::Full { place: "the disk".into() })
}

/// Names of the events among effects that tell of the store.
fn told(effects: &[Effect]) -> Vec<&'static str> {
    let name = |effect: &Effect| match effect {
        Effect::Note(event) => Some(event.event.as_str()),
        _ => None,
    };
    effects.iter().filter_map(name).filter(|name| name.starts_with("store_")).collect()
}

#[test]
fn only_writes_make_the_store_well_and_each_change_is_told_once() {
    let node = NodeId(uuid::Uuid::from_u128(1));
    let now = Now { wall: start(), mono: 60 * SECOND };
    let lease = start() + belfry::SignedDuration::from_secs(30);
    let new_id = Box::new(|_| uuid::Uuid::from_u128(2));
    let mut driver = Driver::new(Options::default(), node, now, lease, new_id);
    let renewed = || Input::Renewed {
        asked: now.mono,
        renewed: Ok(Renewed::Held { cancels: Vec::new(), live: Some(Vec::new()) }),
        is_held: false,
    };
    let due = || Input::Due { at: start(), due: Ok(Vec::new()), next: None };
    let claimed = |claimed| Input::Claimed { claimed, held: Vec::new(), next: None };
    driver.step(now, Input::Woken);
    assert!(driver.store_is_well());
    // What else it asks for at first is answered.
    let marks = || Input::Marks(Ok(Marks { cancels: Vec::new(), draining: None }));
    let lanes = |lanes, unreadable| Input::Lanes { lanes, own: Vec::new(), unreadable };
    for input in [lanes(Ok(Vec::new()), Ok(Vec::new())), marks(), Input::Pruned(Ok(Default::default()))] {
        driver.step(now, input);
    }
    // A claim cannot be written. Reads and the lease say nothing about claims.
    assert_eq!(told(&driver.step(now, claimed(full()))), ["store_unavailable"]);
    for input in [due(), renewed(), Input::Beaten(Ok(true)), Input::Nodes(Ok(Vec::new())), claimed(full())] {
        let effects = driver.step(now, input);
        assert!(told(&effects).is_empty() && !driver.store_is_well(), "{effects:?}");
    }
    assert_eq!(told(&driver.step(now, claimed(Ok(Vec::new())))), ["store_available"]);
    assert!(driver.store_is_well());
    // After a failed read the lease is renewed soon, and that tells.
    let effects = driver.step(now, Input::Due { at: start(), due: full(), next: None });
    assert_eq!(told(&effects), ["store_unavailable"]);
    assert!(driver.wait(now) <= SECOND, "it finds out soon");
    assert!(told(&driver.step(now, due())).is_empty() && !driver.store_is_well());
    let later = Now { mono: now.mono + SECOND, ..now };
    let effects = driver.step(later, Input::Woken);
    assert!(effects.iter().any(|effect| matches!(effect, Effect::Ask(Ask::Renew { .. }))), "{effects:?}");
    for input in [marks(), due(), claimed(Ok(Vec::new()))] {
        assert!(told(&driver.step(later, input)).is_empty());
    }
    assert_eq!(told(&driver.step(later, renewed())), ["store_available"]);
    // The answer to the claim that follows a renewal.
    driver.step(later, claimed(Ok(Vec::new())));
    // A store of which a part cannot be read is not well because its leases are.
    let reads: [(Input, Input); 4] = [
        (Input::Nodes(full()), Input::Nodes(Ok(Vec::new()))),
        (Input::Marks(full()), marks()),
        (lanes(full(), Ok(Vec::new())), lanes(Ok(Vec::new()), Ok(Vec::new()))),
        (lanes(Ok(Vec::new()), full()), lanes(Ok(Vec::new()), Ok(Vec::new()))),
    ];
    for (fails, succeeds) in reads {
        assert_eq!(told(&driver.step(later, fails)), ["store_unavailable"]);
        let effects = driver.step(later, renewed());
        assert!(told(&effects).is_empty() && !driver.store_is_well(), "{effects:?}");
        assert_eq!(told(&driver.step(later, succeeds)), ["store_available"]);
    }
}

#[test]
fn a_node_without_its_store_does_not_use_up_the_time_to_stop() {
    let replaced = || belfry_store::Error::Replaced { place: "belfry.db.lock".into() };
    for (error, gives_up) in [(replaced(), true), (full::<()>().unwrap_err(), false)] {
        let node = NodeId(uuid::Uuid::from_u128(1));
        let at = |mono| Now { wall: start(), mono };
        let lease = start() + belfry::SignedDuration::from_secs(30);
        let new_id = Box::new(|_| uuid::Uuid::from_u128(2));
        let mut driver = Driver::new(Options::default(), node, at(60 * SECOND), lease, new_id);
        driver.step(at(60 * SECOND), Input::Woken);
        driver.step(at(61 * SECOND), Input::Due { at: start(), due: Err(error), next: None });
        // A renewal is under way, and not answered.
        let effects = driver.step(at(62 * SECOND), Input::Woken);
        assert!(effects.iter().any(|effect| matches!(effect, Effect::Ask(Ask::Renew { .. }))), "{effects:?}");
        driver.step(at(62 * SECOND), Input::Stop { timeout: 30 * SECOND });
        let wait = driver.wait(at(62 * SECOND));
        let effects = driver.step(at(62 * SECOND + wait.min(SECOND)), Input::Woken);
        let stopped = effects.iter().any(|effect| matches!(effect, Effect::Stopped { .. }));
        assert_eq!(stopped, gives_up, "{effects:?}");
    }
}

#[tokio::test]
async fn a_schedule_that_this_version_cannot_read_is_not_run_by_hand() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("belfry.db");
    let store = belfry::AnyStore::open(&format!("sqlite:{}", path.display()), true).await.unwrap();
    let agents =
        ["new", "odd"].map(|name| AgentBuilder::new(name).schedule("s", cron("* * * * *").unwrap()).build());
    store.apply(start(), "files", "digest", &agents).await.unwrap();
    let file = rusqlite::Connection::open(&path).unwrap();
    file.execute("update schedules set format = 999 where name = 'new/s'", []).unwrap();
    file.execute("update agents set definition = '{\"shiny\": true}' where name = 'odd'", []).unwrap();
    for (name, words) in [
        ("new/s", "written by a newer version of Belfry"),
        ("odd/s", "cannot be read by this version of Belfry"),
    ] {
        let made = belfry::testing::prepare(&store, &Options::default(), start(), name).await;
        let error = made.unwrap_err().to_string();
        assert!(error.starts_with(&format!("{name}: ")) && error.contains(words), "{error}");
    }
}

#[tokio::test]
async fn a_run_that_cannot_be_read_ends_failed_and_is_never_started() {
    let store = belfry_store::memory::Memory::new();
    let agent = AgentBuilder::new("a").schedule("s", cron("* * * * *").unwrap()).build();
    store.apply(start(), "files", "digest", &[agent]).await.unwrap();
    let record = store.schedule("a/s").await.unwrap().unwrap();
    let definitions = store.definitions(&[record.id]).await.unwrap().remove(0);
    let run = belfry::testing::new_run_id(start());
    let claimed = belfry_store::Claimed {
        run,
        epoch: 1,
        attempt: 1,
        max_attempts: 4,
        agent: record.agent,
        schedule: record.id,
        command: "poll".into(),
        trigger: Trigger::Schedule,
        tick_at: Some(start()),
        lane: "cron".into(),
        prompt: None,
        rescued: false,
        suspect: false,
        payload: StoredPayload::new(Trigger::Manual, "{}"),
        trace_id: None,
        unreadable: Some("its stored trigger 99 is not known".into()),
    };
    let now = Now { wall: start(), mono: 60 * SECOND };
    let lease = start() + belfry::SignedDuration::from_secs(30);
    let new_id = Box::new(|_| uuid::Uuid::from_u128(2));
    let mut driver = Driver::new(Options::default(), NodeId(uuid::Uuid::from_u128(1)), now, lease, new_id);
    driver.step(now, Input::Woken);
    let effects = driver.step(
        now,
        Input::Claimed { claimed: Ok(vec![(claimed, definitions)]), held: Vec::new(), next: None },
    );
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Start { .. })), "{effects:?}");
    let ends = effects.iter().find_map(|effect| match effect {
        Effect::Ask(Ask::Finish(finishes)) => Some(finishes.clone()),
        _ => None,
    });
    let ends = ends.unwrap();
    assert_eq!((ends[0].run, ends[0].error.as_deref()), (run, Some("its stored trigger 99 is not known")));
    let written = belfry_store::Written {
        answers: vec![Some(belfry_store::Finished::Ended(RunState::Failed))],
        changed: Vec::new(),
        error: None,
    };
    let effects = driver.step(now, Input::Finished(written));
    let says = |effect: &Effect| {
        matches!(effect, Effect::Note(event) if event.event == belfry::event::Name::RunFinished
            && event.schedule.as_deref() == Some("s") && event.detail.is_some())
    };
    assert!(effects.iter().any(says), "{effects:?}");
}

fn refused<T>() -> Result<T, belfry_store::Error> {
    Err(belfry_store::Error::Refused { detail: "a constraint".into() })
}

/// How often the store's refusals are told among effects.
fn refusals(effects: &[Effect]) -> usize {
    let is_refusal = |effect: &&Effect| matches!(effect, Effect::Note(event) if event.event == belfry::event::Name::WriteRefused);
    effects.iter().filter(is_refusal).count()
}

#[test]
fn a_refusal_is_no_outage_and_is_told_once() {
    let node = NodeId(uuid::Uuid::from_u128(1));
    let mut now = Now { wall: start(), mono: 60 * SECOND };
    let lease = start() + belfry::SignedDuration::from_secs(30);
    let new_id = Box::new(|_| uuid::Uuid::from_u128(2));
    let mut driver = Driver::new(Options::default(), node, now, lease, new_id);
    driver.step(now, Input::Woken);
    driver.step(now, Input::Nodes(Ok(Vec::new())));
    let mut told_refusals = 0;
    let mut claims = 0;
    for _ in 0..50 {
        let effects = driver.step(now, Input::Claimed { claimed: refused(), held: Vec::new(), next: None });
        told_refusals += refusals(&effects);
        assert!(told(&effects).is_empty() && driver.store_is_well(), "{effects:?}");
        for _ in 0..10 {
            now = Now { mono: now.mono + SECOND / 10, ..now };
            let effects = driver.step(now, Input::Woken);
            if effects.iter().any(|effect| matches!(effect, Effect::Ask(Ask::Claim(_)))) {
                claims += 1;
                break;
            }
        }
    }
    assert_eq!(told_refusals, 1);
    assert!(claims < 30, "{claims} claims in a row of refusals");
    let due = driver.step(now, Input::Due { at: start(), due: Ok(Vec::new()), next: None });
    assert!(told(&due).is_empty() && driver.store_is_well());
}

/// A schedule in a store, and claims of runs of it that end at once because they cannot be read.
async fn unreadable_claims() -> impl Fn(u128) -> (Claimed, Option<Definitions>) {
    let store = belfry_store::memory::Memory::new();
    let agent = AgentBuilder::new("a").schedule("s", cron("* * * * *").unwrap()).build();
    store.apply(start(), "files", "digest", &[agent]).await.unwrap();
    let record = store.schedule("a/s").await.unwrap().unwrap();
    let definitions = store.definitions(&[record.id]).await.unwrap().remove(0);
    move |n| {
        let claimed = Claimed {
            run: belfry_core::RunId(uuid::Uuid::from_u128(n)),
            epoch: 1,
            attempt: 1,
            max_attempts: 4,
            agent: record.agent,
            schedule: record.id,
            command: "poll".into(),
            trigger: Trigger::Schedule,
            tick_at: Some(start()),
            lane: "cron".into(),
            prompt: None,
            rescued: false,
            suspect: false,
            payload: StoredPayload::new(Trigger::Manual, "{}"),
            trace_id: None,
            unreadable: Some("its stored trigger 99 is not known".into()),
        };
        (claimed, definitions.clone())
    }
}

/// A driver whose lease lasts for the whole test, woken once, and the instant of that.
fn long_leased() -> (Driver, Now) {
    let now = Now { wall: start(), mono: 60 * SECOND };
    let lease = start() + belfry::SignedDuration::from_secs(3_600);
    let options = Options { lease: 3_600 * SECOND, ..Options::default() };
    let new_id = Box::new(|_| uuid::Uuid::from_u128(99));
    let mut driver = Driver::new(options, NodeId(uuid::Uuid::from_u128(1)), now, lease, new_id);
    driver.step(now, Input::Woken);
    (driver, now)
}

/// What became of ends that were to be stored.
fn answer(answers: Vec<Option<belfry_store::Finished>>, error: Option<belfry_store::Error>) -> Input {
    Input::Finished(belfry_store::Written { answers, changed: Vec::new(), error })
}

/// Which rescued runs are asked for, if runs are asked for.
fn rescues(effects: &[Effect]) -> Option<Rescues> {
    effects.iter().find_map(|effect| match effect {
        Effect::Ask(Ask::Claim(claim)) => Some(claim.rescues),
        _ => None,
    })
}

#[test]
fn a_node_that_has_not_lived_for_long_asks_for_no_suspect() {
    let (mut driver, now) = long_leased();
    let effects = driver.step(now, Input::Nodes(Ok(Vec::new())));
    assert_eq!(rescues(&effects), Some(Rescues::Unsuspected));
    driver.step(now, Input::Claimed { claimed: Ok(Vec::new()), held: Vec::new(), next: None });
    // Then it asks without being told that there is something.
    let mut later = now;
    while later.mono < now.mono + 10 * SECOND {
        later = later_by(later, driver.wait(later));
        let effects = driver.step(later, Input::Woken);
        if let Some(asked) = rescues(&effects) {
            let is_steady = later.mono >= now.mono + 10 * SECOND;
            assert_eq!(asked, if is_steady { Rescues::Any } else { Rescues::Unsuspected });
            driver.step(later, Input::Claimed { claimed: Ok(Vec::new()), held: Vec::new(), next: None });
        }
    }
    assert_eq!(later.mono, now.mono + 10 * SECOND, "it wakes up for that");
}

#[tokio::test]
async fn nothing_starts_beside_a_suspect_until_it_was_watched() {
    let claims = unreadable_claims().await;
    let (mut driver, first) = long_leased();
    driver.step(first, Input::Nodes(Ok(Vec::new())));
    let now = later_by(first, 10 * SECOND);
    let readable = |n, suspect| {
        let (claimed, definitions) = claims(n);
        (Claimed { unreadable: None, rescued: suspect, suspect, ..claimed }, definitions)
    };
    let claimed = Ok(vec![readable(5, false), readable(6, true), readable(7, false)]);
    let effects = driver.step(now, Input::Claimed { claimed, held: Vec::new(), next: None });
    let id = |n| belfry_core::RunId(uuid::Uuid::from_u128(n));
    assert_eq!(started(&effects), [id(6)]);
    let given_back = effects.iter().any(
        |effect| matches!(effect, Effect::Ask(Ask::GiveBack(_, runs)) if *runs == [(id(5), 1), (id(7), 1)]),
    );
    assert!(given_back, "what was claimed with it waits again: {effects:?}");
    driver.step(now, Input::Started { run: id(6), epoch: 1 });
    let asked = driver.step(now, Input::GivenBack { given_back: Ok(Vec::new()), runs: Vec::new() });
    assert_eq!(rescues(&asked), None, "{asked:?}");
    // It is watched for two seconds; then the lease is renewed, long before that is due.
    let renews =
        |effects: &[Effect]| effects.iter().any(|effect| matches!(effect, Effect::Ask(Ask::Renew { .. })));
    let early = later_by(now, SECOND);
    let effects = driver.step(early, Input::Hint);
    assert!(!renews(&effects) && rescues(&effects).is_none(), "{effects:?}");
    let watched = later_by(now, 2 * SECOND);
    assert!(renews(&driver.step(watched, Input::Woken)));
    let held = Renewed::Held { cancels: Vec::new(), live: Some(vec![(id(6), 1)]) };
    let renewed = Input::Renewed { asked: watched.mono, renewed: Ok(held), is_held: false };
    assert_eq!(rescues(&driver.step(watched, renewed)), Some(Rescues::Unsuspected), "others have a turn");
    driver.step(watched, Input::Claimed { claimed: Ok(Vec::new()), held: Vec::new(), next: None });
    let mut later = watched;
    loop {
        later = later_by(later, driver.wait(later).max(Duration::from_millis(1)));
        match rescues(&driver.step(later, Input::Woken)) {
            Some(Rescues::Any) => break,
            Some(_) => drop(
                driver.step(later, Input::Claimed { claimed: Ok(Vec::new()), held: Vec::new(), next: None }),
            ),
            None => drop(
                driver.step(later, Input::Marks(Ok(Marks { cancels: Vec::new(), draining: Some(false) }))),
            ),
        }
    }
    assert_eq!(later.mono, watched.mono + 2 * SECOND, "then the next suspect");
}

#[tokio::test]
async fn a_suspect_waits_until_what_started_before_it_was_watched() {
    let claims = unreadable_claims().await;
    let (mut driver, first) = long_leased();
    driver.step(first, Input::Nodes(Ok(Vec::new())));
    let now = later_by(first, 10 * SECOND);
    let readable = |n, suspect| {
        let (claimed, definitions) = claims(n);
        (Claimed { unreadable: None, rescued: suspect, suspect, ..claimed }, definitions)
    };
    let answer = |runs| Input::Claimed { claimed: Ok(runs), held: Vec::new(), next: None };
    let id = |n| belfry_core::RunId(uuid::Uuid::from_u128(n));
    let effects = driver.step(now, answer(vec![readable(5, false)]));
    assert_eq!((started(&effects), rescues(&effects)), (vec![id(5)], Some(Rescues::Any)));
    // It may be the one that ends this node: the suspect is not started beside it, and neither is anything else.
    let soon = later_by(now, SECOND);
    let effects = driver.step(soon, answer(vec![readable(6, true), readable(7, false)]));
    assert!(started(&effects).is_empty(), "{effects:?}");
    let all = [(id(6), 1), (id(7), 1)];
    let given_back = |effect: &Effect| matches!(effect, Effect::Ask(Ask::GiveBack(_, runs)) if *runs == all);
    assert!(effects.iter().any(given_back), "{effects:?}");
    let given_back = Input::GivenBack { given_back: Ok(Vec::new()), runs: Vec::new() };
    assert_eq!(
        rescues(&driver.step(soon, given_back)),
        None,
        "others would come before the suspect again and again"
    );
    assert_eq!(rescues(&driver.step(soon, Input::Hint)), None);
    let mut later = soon;
    let effects = loop {
        later = later_by(later, driver.wait(later).max(Duration::from_millis(1)));
        let effects = driver.step(later, Input::Woken);
        if rescues(&effects).is_some() {
            break effects;
        }
        driver.step(later, Input::Marks(Ok(Marks { cancels: Vec::new(), draining: Some(false) })));
    };
    assert_eq!((later.mono, rescues(&effects)), (now.mono + 2 * SECOND, Some(Rescues::Any)));
    let effects = driver.step(later, answer(vec![readable(6, true), readable(7, false)]));
    assert_eq!(started(&effects), [id(6)]);
}

/// Runs of which an attempt is started.
fn started(effects: &[Effect]) -> Vec<belfry_core::RunId> {
    let run = |effect: &Effect| match effect {
        Effect::Start { attempt, .. } => Some(attempt.run),
        _ => None,
    };
    effects.iter().filter_map(run).collect()
}

fn later_by(now: Now, wait: Duration) -> Now {
    let wall = now.wall + belfry::SignedDuration::try_from(wait).unwrap();
    Now { wall, mono: now.mono + wait }
}

#[tokio::test]
async fn a_rescued_run_holds_back_the_next_until_its_end_is_stored() {
    let claims = unreadable_claims().await;
    let (mut driver, now) = long_leased();
    driver.step(now, Input::Nodes(Ok(Vec::new())));
    let (claimed, definitions) = claims(5);
    let claimed = Claimed { rescued: true, ..claimed };
    let effects = driver.step(
        now,
        Input::Claimed { claimed: Ok(vec![(claimed, definitions)]), held: Vec::new(), next: None },
    );
    let held = "it has ended here, and the store does not know";
    assert_eq!(rescues(&effects), Some(Rescues::None), "{held}: {effects:?}");
    driver.step(now, answer(vec![Some(belfry_store::Finished::Ended(RunState::Failed))], None));
    let effects = driver.step(now, Input::Claimed { claimed: Ok(Vec::new()), held: Vec::new(), next: None });
    assert_eq!(rescues(&effects), Some(Rescues::Unsuspected), "{effects:?}");
    // One whose end is refused holds back nobody.
    let (claimed, definitions) = claims(6);
    let claimed = Claimed { rescued: true, ..claimed };
    driver.step(
        now,
        Input::Claimed { claimed: Ok(vec![(claimed, definitions)]), held: Vec::new(), next: None },
    );
    driver.step(now, answer(vec![None], refused::<()>().err()));
    driver.step(now, Input::Claimed { claimed: Ok(Vec::new()), held: Vec::new(), next: None });
    let effects = driver.step(now, Input::Hint);
    assert_eq!(rescues(&effects), Some(Rescues::Unsuspected), "{effects:?}");
}

/// Seed 56: the answer to a claim came when its node had been fenced and had joined again. What others had taken over and
/// ended ran once more.
#[tokio::test]
async fn a_claim_from_before_a_node_was_fenced_starts_nothing() {
    let claims = unreadable_claims().await;
    let (mut driver, now) = long_leased();
    let asks = |effects: &[Effect], is: fn(&Ask) -> bool| {
        effects.iter().any(|effect| matches!(effect, Effect::Ask(ask) if is(ask)))
    };
    let claiming = driver.step(now, Input::Nodes(Ok(Vec::new())));
    assert!(asks(&claiming, |ask| matches!(ask, Ask::Claim(_))), "{claiming:?}");
    driver.step(now, Input::Renewed { asked: now.mono, renewed: Ok(Renewed::Fenced), is_held: false });
    driver.step(now, Input::Joined { asked: now.mono, joined: Ok(()) });
    let effects =
        driver.step(now, Input::Claimed { claimed: Ok(vec![claims(5)]), held: Vec::new(), next: None });
    let ends = |effects: &[Effect]| asks(effects, |ask| matches!(ask, Ask::Finish(_)));
    assert!(!ends(&effects), "{effects:?}");
    assert!(asks(&effects, |ask| matches!(ask, Ask::Claim(_))), "it asks again: {effects:?}");
    assert!(ends(
        &driver.step(now, Input::Claimed { claimed: Ok(vec![claims(6)]), held: Vec::new(), next: None })
    ));
}

#[tokio::test]
async fn an_end_that_is_refused_in_every_form_is_set_aside_and_others_are_stored() {
    let claimed = unreadable_claims().await;
    let (mut driver, mut now) = long_leased();
    let ends = |effects: &[Effect]| {
        effects.iter().find_map(|effect| match effect {
            Effect::Ask(Ask::Finish(ends)) => {
                Some(ends.iter().map(|end| end.run.0.as_u128()).collect::<Vec<_>>())
            }
            _ => None,
        })
    };
    let effects = driver.step(
        now,
        Input::Claimed { claimed: Ok(vec![claimed(5), claimed(6)]), held: Vec::new(), next: None },
    );
    assert_eq!(ends(&effects), Some(vec![5, 6]));
    let ended = Some(belfry_store::Finished::Ended(RunState::Failed));
    let effects = driver.step(now, answer(vec![None, ended], refused::<()>().err()));
    assert_eq!((refusals(&effects), told(&effects).len()), (1, 0), "{effects:?}");
    assert!(driver.store_is_well() && ends(&effects).is_none());
    // Nothing is asked again and again, and the end of another run is stored at once.
    assert!(driver.wait(now) > SECOND / 2, "{:?}", driver.wait(now));
    driver.step(now, Input::Claimed { claimed: Ok(Vec::new()), held: Vec::new(), next: None });
    let effects =
        driver.step(now, Input::Claimed { claimed: Ok(vec![claimed(7)]), held: Vec::new(), next: None });
    assert_eq!(ends(&effects), Some(vec![7]));
    driver.step(now, answer(vec![ended], None));
    // Later it is tried again, and not told again.
    now = Now { mono: now.mono + 31 * SECOND, ..now };
    let effects = driver.step(now, Input::Woken);
    assert_eq!(ends(&effects), Some(vec![5]));
    let effects = driver.step(now, answer(vec![None], refused::<()>().err()));
    assert_eq!(refusals(&effects), 0);
    // It keeps no node from stopping.
    driver.step(now, Input::Due { at: start(), due: Ok(Vec::new()), next: None });
    let effects = driver.step(now, Input::Stop { timeout: SECOND });
    let stops =
        |effects: &[Effect]| effects.iter().any(|effect| matches!(effect, Effect::Stopped { overrun: 0 }));
    let claimed = driver.step(now, Input::Claimed { claimed: Ok(Vec::new()), held: Vec::new(), next: None });
    let asked = now.mono;
    let renewed = belfry_store::Renewed::Held { cancels: Vec::new(), live: Some(Vec::new()) };
    let renewed = driver.step(now, Input::Renewed { asked, renewed: Ok(renewed), is_held: false });
    assert!(stops(&effects) || stops(&claimed) || stops(&renewed), "{:?}", driver.phase());
}

#[test]
fn a_row_that_cannot_be_read_is_told_of_once() {
    let node = NodeId(uuid::Uuid::from_u128(1));
    let now = Now { wall: start(), mono: 60 * SECOND };
    let lease = start() + belfry::SignedDuration::from_secs(30);
    let mut driver =
        Driver::new(Options::default(), node, now, lease, Box::new(|_| uuid::Uuid::from_u128(2)));
    let asks = |effects: &[Effect]| {
        effects.iter().filter(|effect| matches!(effect, Effect::Ask(Ask::UnreadableRows))).count()
    };
    assert_eq!(asks(&driver.step(now, Input::Woken)), 1, "it looks when it starts");
    let mut tell = |rows: &[&str]| -> Vec<String> {
        let rows = rows.iter().map(|row| (*row).to_owned()).collect();
        let effects = driver.step(now, Input::UnreadableRows(Ok(rows)));
        let said = |effect: Effect| match effect {
            Effect::Note(event) if event.event == belfry::event::Name::RowUnreadable => event.detail,
            _ => None,
        };
        effects.into_iter().filter_map(said).collect()
    };
    assert_eq!(tell(&["lane a", "token b"]), ["lane a", "token b"]);
    assert_eq!(tell(&["lane a", "token b", "node c"]), ["node c"]);
    assert_eq!(tell(&["token b"]), Vec::<String>::new());
    assert_eq!(tell(&["lane a"]), ["lane a"], "it was mended and is broken again");
}
