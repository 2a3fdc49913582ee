//! One thing that cannot be stored stops nothing else.

use belfry_core::Trigger;
use belfry_store::{AnyStore, Defined, Enqueue, Enqueued, NewRun, Store};
use belfry_time::{SignedDuration, Timestamp};
use serde_json::Value;

use crate::support::Site;

/// Makes a run of a tick to come, which lives when the planner comes to that tick.
async fn plant(store: &AnyStore, name: &str) -> Timestamp {
    let record = store.schedule(name).await.unwrap().unwrap();
    let compiled = record.definition.compile(name).unwrap();
    let definition = store.definitions(&[record.id]).await.unwrap().remove(0).unwrap().agent_definition;
    let tick_at = record.token.unwrap().tick_at + SignedDuration::from_secs(4);
    let later = Timestamp::now() + SignedDuration::from_hours(1);
    let id = belfry::testing::new_run_id(Timestamp::now());
    let run = NewRun {
        tick_at: Some(tick_at),
        trigger: Trigger::Schedule,
        ..NewRun::by_hand(Defined::new(record.agent, record.id, &compiled, &definition), id, later)
    };
    let made = store.enqueue(Timestamp::now(), &Enqueue { run, key: None }).await.unwrap();
    assert_eq!(made, Enqueued::Made);
    tick_at
}

#[test]
fn a_tick_whose_run_lives_already_stops_no_planning() {
    for site in Site::each() {
        site.config(
            r#"
agents:
  a: {shell: 'true', max_concurrent: none, schedules: {planted: {every: 2s, anchor: slot, if_running: allow}}}
  b: {shell: 'true', schedules: {other: {every: 500ms}}}
"#,
        );
        let mut up = site.up();
        up.event_of("run_finished", "planted");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let tick_at = runtime.block_on(async {
            let store = AnyStore::open(&site.store, false).await.unwrap();
            plant(&store, "a/planted").await
        });
        // The schedule goes on behind that tick, and so do the others.
        up.wait_for("a later tick", |event| {
            let tick = event["tick_at"].as_str().and_then(|tick| tick.parse::<Timestamp>().ok());
            event["event"] == "run_finished"
                && event["schedule"] == "planted"
                && tick.is_some_and(|tick| tick > tick_at)
        });
        for _ in 0..4 {
            up.event_of("run_finished", "other");
        }
        let told =
            |event: &&Value| ["store_unavailable", "tick_skipped"].iter().any(|name| event["event"] == *name);
        assert_eq!(up.heard().iter().find(told), None);
        up.stop();
    }
}
