//! The store in memory keeps the suite.

#![allow(clippy::unwrap_used)]

mod suite;

use belfry_store::memory::Memory;

#[tokio::test]
async fn it_keeps_every_scenario() {
    suite::scenarios::all(async || Memory::new()).await;
}

#[tokio::test]
async fn it_keeps_the_rules_for_requests_from_outside() {
    suite::hooks::all(async || Memory::new()).await;
}

#[tokio::test]
async fn it_keeps_tokens_and_the_audit() {
    suite::tokens::all(async || Memory::new()).await;
}

#[tokio::test]
async fn it_keeps_heartbeats_and_snapshots() {
    suite::watching::all(async || Memory::new()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_clients_break_no_limit_and_forget_nobody() {
    let found =
        suite::many::loose(Memory::new().into(), suite::seed(), std::time::Duration::from_secs(2)).await;
    assert!(found.is_clean() && found.claims > 100, "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_planners_let_no_more_wait_than_may_and_forget_nobody() {
    let seconds = std::time::Duration::from_secs(1);
    suite::many_deferred::bursts(Memory::new().into()).await;
    suite::many_deferred::many(Memory::new().into(), suite::seed(), seconds).await;
}

#[test]
fn the_suite_notices_what_is_broken_on_purpose() {
    use belfry_store::sabotage::Sabotage;
    for sabotage in [Sabotage::NoTokenCheck, Sabotage::FinishWithoutEpoch, Sabotage::PruneArms] {
        let noticed = suite::fails(move || async move {
            let broken = async || {
                let store = Memory::new();
                store.sabotage.set(sabotage);
                store
            };
            suite::scenarios::all(broken).await;
        });
        assert!(noticed, "{sabotage:?} was not noticed");
    }
}
