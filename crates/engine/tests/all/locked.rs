//! Rows that another connection holds locked are passed by: everything else goes on meanwhile. On PostgreSQL alone.

use std::sync::Arc;
use std::time::Duration;

use belfry::{AgentBuilder, AnyStore, Engine, Options, ScheduleOptions, StopOptions, When};
use belfry_core::definition::AnchorName;
use belfry_store::postgres::Postgres;
use tokio::sync::mpsc;
use tokio_postgres::NoTls;

use crate::support::pg;

/// Schedules that are locked: more batches of them than a node plans in one pass.
const LOCKED: usize = 50;
const BATCH: u32 = 2;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schedules_behind_locked_timers_are_planned() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Arc::new(AnyStore::Postgres(Postgres::open(&url).await.unwrap()));
    let asking = Engine::builder().store(store.clone()).build();
    let options = || ScheduleOptions { anchor: AnchorName::Slot, ..ScheduleOptions::default() };
    let every_second = || When::Every("1s".into());
    let locked = (0..LOCKED).fold(AgentBuilder::new("locked"), |agent, n| {
        agent.schedule_with(format!("s{n}"), every_second(), options())
    });
    let free = AgentBuilder::new("free").schedule_with("s", every_second(), options());
    asking.set_agents(vec![locked.build(), free.build()]).await.unwrap();

    let (other, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    let lock = "begin; select 1 from belfry.timers where schedule_id in \
                (select id from belfry.schedules where name like 'locked/%') for update";
    other.batch_execute(lock).await.unwrap();

    let (send, mut ran) = mpsc::unbounded_channel();
    let tell = move |name: &'static str| {
        let send = send.clone();
        move |_| {
            let _ = send.send(name);
            async { Ok(()) }
        }
    };
    let engine = Engine::builder()
        .store(store)
        .options(Options { batch: BATCH, ..Options::default() })
        .handler("locked", tell("locked"))
        .handler("free", tell("free"))
        .build();
    engine.start().await.unwrap();
    let within = Duration::from_secs(20);
    for _ in 0..3 {
        let next = tokio::time::timeout(within, ran.recv()).await;
        assert_eq!(next.expect("what is not locked runs"), Some("free"));
    }
    other.batch_execute("rollback").await.unwrap();
    let unlocked = async { while ran.recv().await != Some("locked") {} };
    tokio::time::timeout(within, unlocked).await.expect("what was locked runs, too");
    engine.stop(StopOptions::default()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_state_of_one_schedule_stops_no_other() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Arc::new(AnyStore::Postgres(Postgres::open(&url).await.unwrap()));
    let asking = Engine::builder().store(store.clone()).build();
    // The plan of each tick and the end of each run write its state.
    let often = || When::Every("100ms".into());
    let agents = ["locked", "free"].map(|name| AgentBuilder::new(name).schedule("s", often()).build());
    asking.set_agents(agents.to_vec()).await.unwrap();
    let (send, mut ran) = mpsc::unbounded_channel();
    let tell = move |name: &'static str| {
        let send = send.clone();
        move |_| {
            let _ = send.send(name);
            async { Ok(()) }
        }
    };
    let engine = Engine::builder()
        .store(store)
        .handler("locked", tell("locked"))
        .handler("free", tell("free"))
        .build();
    let mut events = engine.events();
    engine.start().await.unwrap();
    let within = Duration::from_secs(20);
    let (other, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    let lock = "begin; select 1 from belfry.schedule_state where schedule_id in \
                (select id from belfry.schedules where name = 'locked/s') for update";
    other.batch_execute(lock).await.unwrap();
    let told = async {
        loop {
            let event = events.recv().await.unwrap();
            assert_ne!(event.event, belfry::event::Name::StoreUnavailable, "{event:?}");
            if event.event == belfry::event::Name::WriteRefused {
                return event;
            }
        }
    };
    let told = tokio::time::timeout(within, told).await.expect("it is told");
    assert_eq!(told.agent.as_deref(), Some("locked"), "{told:?}");
    while ran.try_recv().is_ok() {}
    for _ in 0..20 {
        let next = tokio::time::timeout(within, ran.recv()).await;
        assert_eq!(next.expect("what is not locked runs"), Some("free"));
    }
    other.batch_execute("rollback").await.unwrap();
    let unlocked = async { while ran.recv().await != Some("locked") {} };
    tokio::time::timeout(within, unlocked).await.expect("what was locked runs, too");
    engine.stop(StopOptions::default()).await.unwrap();
}
