//! A node that was fenced joins again before it takes work, and a node that stops waits for what it gives back.

use std::time::Duration;

use belfry::testing::{Ask, Driver, Effect, Input, Now, Phase};
use belfry::{NodeId, Options, SignedDuration, Timestamp};
use belfry_core::Trigger;
use belfry_core::input::StoredPayload;
use belfry_store::Renewed;

const SECOND: Duration = Duration::from_secs(1);

fn wall() -> Timestamp {
    "2026-03-02T12:00:00Z".parse().unwrap()
}

fn at(seconds: u32) -> Now {
    Now { wall: wall() + SignedDuration::from_secs(seconds.into()), mono: seconds * SECOND }
}

fn driver() -> Driver {
    driver_and_asked().0
}

/// A driver, and what it has asked for.
fn driver_and_asked() -> (Driver, Vec<Effect>) {
    let mut number = 1;
    let new_id = Box::new(move |_| {
        number += 1;
        uuid::Uuid::from_u128(number)
    });
    let lease = wall() + SignedDuration::from_secs(30);
    let mut driver = Driver::new(Options::default(), NodeId(uuid::Uuid::from_u128(1)), at(0), lease, new_id);
    // It is alone.
    let asked = driver.step(at(0), Input::Nodes(Ok(Vec::new())));
    (driver, asked)
}

fn joins(effects: &[Effect]) -> Vec<NodeId> {
    let join = |effect: &Effect| match effect {
        Effect::Join { node, .. } => Some(*node),
        _ => None,
    };
    effects.iter().filter_map(join).collect()
}

fn place(effects: &[Effect], is: impl Fn(&Effect) -> bool) -> Option<usize> {
    effects.iter().position(is)
}

fn unavailable<T>() -> Result<T, belfry_store::Error> {
    Err(belfry_store::Error::Unavailable { detail: "no answer".into(), ambiguous: true })
}

#[test]
fn a_fenced_node_claims_nothing_until_it_has_joined_and_its_keeper_knows_the_lease() {
    let mut driver = driver();
    driver.step(at(0), Input::Woken);
    driver.step(at(10), Input::Woken);
    driver.step(at(10), Input::Claimed { claimed: Ok(Vec::new()), held: Vec::new(), next: None });
    driver.step(at(10), Input::Claimed { claimed: Ok(Vec::new()), held: Vec::new(), next: None });
    let effects = driver
        .step(at(50), Input::Renewed { asked: 10 * SECOND, renewed: Ok(Renewed::Fenced), is_held: false });
    let first = joins(&effects);
    assert_eq!(first.len(), 1, "{effects:?}");
    let claims = |effect: &Effect| matches!(effect, Effect::Ask(Ask::Claim(_)));
    for second in [50, 51, 60] {
        assert!(place(&driver.step(at(second), Input::Hint), claims).is_none(), "it has not joined");
    }
    // The answer was lost: it tries again, as another node.
    driver.step(at(60), Input::Joined { asked: 50 * SECOND, joined: unavailable() });
    let effects = driver.step(at(65), Input::Woken);
    let second = joins(&effects);
    assert!(second.len() == 1 && second != first, "{effects:?}");
    let effects = driver.step(at(66), Input::Joined { asked: 65 * SECOND, joined: Ok(()) });
    let told =
        place(&effects, |effect| matches!(effect, Effect::TellKeeper { asked } if *asked == 65 * SECOND));
    let claimed = place(&effects, claims);
    assert!(told.is_some() && claimed.is_some() && told < claimed, "{effects:?}");
    assert_eq!(driver.node(), second[0]);
}

#[test]
fn a_join_that_took_longer_than_the_lease_gives_no_right_to_claim() {
    let mut driver = driver();
    driver.step(at(0), Input::Woken);
    driver.step(at(10), Input::Woken);
    driver.step(at(10), Input::Claimed { claimed: Ok(Vec::new()), held: Vec::new(), next: None });
    driver.step(at(10), Input::Claimed { claimed: Ok(Vec::new()), held: Vec::new(), next: None });
    driver.step(at(50), Input::Renewed { asked: 10 * SECOND, renewed: Ok(Renewed::Fenced), is_held: false });
    let effects = driver.step(at(85), Input::Joined { asked: 50 * SECOND, joined: Ok(()) });
    assert!(place(&effects, |effect| matches!(effect, Effect::Ask(Ask::Claim(_)))).is_none(), "{effects:?}");
    assert!(
        place(&effects, |effect| matches!(effect, Effect::Ask(Ask::Renew { .. }))).is_some(),
        "{effects:?}"
    );
}

#[test]
fn an_outage_is_told_once_however_late_a_call_fails() {
    let (mut driver, mut asked) = driver_and_asked();
    let told = |effects: &[Effect]| -> Vec<&'static str> {
        let names = effects.iter().filter_map(|effect| match effect {
            Effect::Note(event) => Some(event.event.as_str()),
            _ => None,
        });
        names.filter(|name| name.starts_with("store_")).collect()
    };
    let renewed = |asked: u32, renewed| Input::Renewed { asked: asked * SECOND, renewed, is_held: true };
    let held = || Ok(Renewed::Held { cancels: Vec::new(), live: Some(Vec::new()) });
    // What is due, a claim and a renewal are on their way. The renewal fails, and succeeds the next time.
    asked.extend(driver.step(at(10), Input::Woken));
    assert_eq!(told(&driver.step(at(11), renewed(10, unavailable()))), ["store_unavailable"]);
    driver.step(at(13), Input::Woken);
    assert_eq!(told(&driver.step(at(13), renewed(13, held()))), [""; 0]);
    assert!(!driver.store_is_well());
    // The claim fails as well, long after.
    let effects =
        driver.step(at(30), Input::Claimed { claimed: unavailable(), held: Vec::new(), next: None });
    assert_eq!(told(&effects), [""; 0]);
    // Then all are answered, the reads first.
    let answer = |effect: Effect, second: u32| match effect {
        Effect::Ask(Ask::Claim(_)) => {
            Some(Input::Claimed { claimed: Ok(Vec::new()), held: Vec::new(), next: None })
        }
        Effect::Ask(Ask::Due { .. }) => Some(Input::Due { at: wall(), due: Ok(Vec::new()), next: None }),
        Effect::Ask(Ask::Renew { .. }) => Some(renewed(second, held())),
        Effect::Ask(Ask::Marks(_)) => Some(Input::Marks(Ok(belfry_store::Marks::default()))),
        Effect::Ask(Ask::Lanes(_)) => {
            Some(Input::Lanes { lanes: Ok(Vec::new()), own: Vec::new(), unreadable: Ok(Vec::new()) })
        }
        Effect::Ask(Ask::Prune { .. }) => Some(Input::Pruned(Ok(belfry_store::Pruned::default()))),
        Effect::ReadNodes => Some(Input::Nodes(Ok(Vec::new()))),
        Effect::Beat(_) => Some(Input::Beaten(Ok(true))),
        _ => None,
    };
    let mut all = Vec::new();
    let is_read = |effect: &Effect| !matches!(effect, Effect::Ask(Ask::Claim(_) | Ask::Renew { .. }));
    let mut inputs: Vec<Input> =
        asked.into_iter().filter(is_read).filter_map(|effect| answer(effect, 31)).collect();
    for second in 31..60 {
        inputs.push(Input::Woken);
        while let Some(input) = inputs.pop() {
            let effects = driver.step(at(second), input);
            all.extend(told(&effects));
            inputs.extend(effects.into_iter().filter_map(|effect| answer(effect, second)));
        }
    }
    assert_eq!(all, ["store_available"]);
    assert!(driver.store_is_well());
}

#[test]
fn a_node_that_stops_waits_until_claimed_runs_are_given_back() {
    let mut driver = driver();
    driver.step(at(0), Input::Woken);
    driver.step(at(1), Input::Due { at: wall(), due: Ok(Vec::new()), next: None });
    driver.step(at(1), Input::Stop { timeout: SECOND });
    let claimed = belfry_store::Claimed {
        run: belfry::testing::new_run_id(wall()),
        epoch: 1,
        attempt: 1,
        max_attempts: 1,
        agent: 1,
        schedule: 1,
        command: "poll".into(),
        trigger: belfry_core::Trigger::Manual,
        tick_at: None,
        lane: "cron".into(),
        prompt: None,
        payload: StoredPayload::new(Trigger::Manual, "{}"),
        trace_id: None,
        unreadable: None,
        rescued: false,
        suspect: false,
    };
    let effects = driver
        .step(at(1), Input::Claimed { claimed: Ok(vec![(claimed, None)]), held: Vec::new(), next: None });
    assert!(
        place(&effects, |effect| matches!(effect, Effect::Ask(Ask::GiveBack(..)))).is_some(),
        "{effects:?}"
    );
    driver.step(at(2), Input::Woken);
    assert_ne!(driver.phase(), Phase::Stopped);
    driver.step(at(2), Input::GivenBack { given_back: Ok(Vec::new()), runs: Vec::new() });
    assert_eq!(driver.phase(), Phase::Stopped);
}

#[test]
fn a_node_claims_nothing_that_its_keeper_would_refuse() {
    let mut driver = driver();
    let asks_to_claim =
        |effects: &[Effect]| place(effects, |e| matches!(e, Effect::Ask(Ask::Claim(_)))).is_some();
    driver.step(at(0), Input::Woken);
    let nothing = || Input::Claimed { claimed: Ok(Vec::new()), held: Vec::new(), next: None };
    driver.step(at(1), nothing());
    assert!(asks_to_claim(&driver.step(at(19), Input::Hint)));
    driver.step(at(19), nothing());
    // The renewal has not been answered, and the keeper is about to end what runs.
    for second in [20, 22, 24, 29] {
        assert!(!asks_to_claim(&driver.step(at(second), Input::Hint)), "after {second} s");
    }
    let held = Renewed::Held { cancels: Vec::new(), live: None };
    assert!(asks_to_claim(
        &driver.step(at(30), Input::Renewed { asked: 29 * SECOND, renewed: Ok(held), is_held: false })
    ));
}

#[test]
fn what_runs_goes_on_while_nobody_can_take_over() {
    for is_held in [true, false] {
        let mut driver = driver();
        driver.step(at(0), Input::Woken);
        driver.step(at(1), Input::Claimed { claimed: Ok(Vec::new()), held: Vec::new(), next: None });
        for second in [10, 20, 30, 40] {
            driver.step(at(second), Input::Woken);
            let asked = second * SECOND;
            let effects = driver.step(at(second), Input::Renewed { asked, renewed: unavailable(), is_held });
            let told = place(
                &effects,
                |effect| matches!(effect, Effect::TellKeeper { asked: then } if *then == asked),
            );
            assert_eq!(told.is_some(), is_held, "{effects:?}");
        }
    }
}
