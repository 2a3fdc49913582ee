//! A guest: a node that is there for one run alone.

use std::sync::Arc;
use std::time::Duration;

use belfry::{AgentBuilder, Engine, ManualClock, Options, RunRequest, StopOptions, Timestamp, When};
use parking_lot::Mutex;

fn start() -> Timestamp {
    "2026-03-02T12:00:00Z".parse().unwrap()
}

#[tokio::test]
async fn a_guest_runs_its_run_and_nothing_else() {
    let clock = ManualClock::new(start());
    let agent = AgentBuilder::new("a").schedule("s", When::Every("5m".into())).build();
    let store = Arc::new(belfry::AnyStore::Memory(belfry_store::memory::Memory::new()));
    let builder = || Engine::builder().store(store.clone()).clock(clock.clone());
    let asking = builder().build();
    asking.set_agents(vec![agent]).await.unwrap();
    let other = asking.trigger("a/s", RunRequest::default()).await.unwrap().run;
    let wanted = asking.trigger("a/s", RunRequest::default()).await.unwrap().run;
    let log: Arc<Mutex<Vec<String>>> = Arc::default();
    let kept = log.clone();
    let guest = builder()
        .options(Options { only: Some(wanted), lease: Duration::from_secs(3600), ..Options::default() })
        .handler("a", move |run| {
            let log = kept.clone();
            async move {
                log.lock().push(run.run().to_string());
                Ok(())
            }
        })
        .build();
    guest.start().await.unwrap();
    let mut looked = 0;
    while guest.run(wanted).await.unwrap().unwrap().state.is_live() {
        guest.hint().await;
        looked += 1;
        assert!(looked < 1_000_000, "it does not run");
    }
    guest.stop(StopOptions::default()).await.unwrap();
    assert_eq!(*log.lock(), [wanted.to_string()]);
    assert!(guest.run(other).await.unwrap().unwrap().state.is_live(), "it is for others");
    assert!(guest.schedule_state("a/s").await.unwrap().last_fired_at.is_none(), "and so are the ticks");
}

#[tokio::test]
async fn an_engine_that_is_started_twice_at_once_is_one_node() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}/belfry.db", folder.path().display());
    let store = std::sync::Arc::new(belfry::AnyStore::open(&url, true).await.unwrap());
    let engine = belfry::Engine::builder().store(store.clone()).build();
    let (one, other) = tokio::join!(engine.start(), engine.start());
    assert_eq!([one.is_ok(), other.is_ok()].iter().filter(|is_ok| **is_ok).count(), 1, "{one:?} {other:?}");
    assert_eq!(belfry_store::Store::nodes(&*store).await.unwrap().len(), 1);
    engine.stop(belfry::StopOptions::default()).await.unwrap();
}
