//! Rows that somebody holds by hand: everything else goes on.

use std::time::{Duration, Instant};

use belfry_core::definition::{Breaker, Retry};
use belfry_core::retry::Outcome;
use belfry_core::{AgentDefinition, Reason, RunState};
use belfry_store::postgres::Postgres;
use belfry_store::*;
use tokio_postgres::Client;

use crate::pg;
use crate::suite::world::*;

/// A connection that holds what a statement locks until it is rolled back.
async fn hold(url: &str, sql: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    client.batch_execute(&format!("set search_path = belfry; begin; {sql}")).await.unwrap();
    client
}

#[tokio::test]
async fn a_held_state_of_a_schedule_stops_no_other_plan() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let mut world = World::new(&store);
    let names: Vec<String> = (0..40).map(|n| format!("s{n}")).collect();
    let schedules: Vec<_> = names.iter().map(|name| (name.as_str(), every("1m"))).collect();
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    let id = world.schedule("a/s7").await.id;
    let held = hold(&url, &format!("select 1 from schedule_state where schedule_id = {id} for update")).await;
    let due = store.due(world.now, None, 100).await.unwrap();
    let commits: Vec<Commit> = due.iter().map(|due| world.decide(due)).collect();
    let began = Instant::now();
    let written = commit_apart(&store, world.now, &commits).await;
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    let missing: Vec<_> =
        commits.iter().zip(&written.answers).filter(|(_, answer)| answer.is_none()).collect();
    assert_eq!(missing.len(), 1, "{written:?}");
    assert_eq!(missing[0].0.schedule, id);
    let error = written.error.unwrap();
    assert!(error.is_locked() && error.is_retryable() && written.changed.is_empty(), "{error}");
    assert_eq!(world.plan_all().await, 39, "it rests, and the others go on");
    let refusals = store.refusals().await.unwrap();
    assert_eq!(refusals.iter().map(|refusal| &*refusal.name).collect::<Vec<_>>(), ["a/s7"]);
    held.batch_execute("rollback").await.unwrap();
    // It is tried again by itself.
    while store.due(world.now, None, 100).await.unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(world.plan_all().await, 1);
    assert!(store.refusals().await.unwrap().is_empty());
    world.assert_whole().await;
}

#[tokio::test]
async fn a_held_gate_with_many_runs_stops_no_other_start() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let mut world = World::new(&store);
    let node = world.join(1).await;
    let one = || AgentDefinition { max_concurrent: Some(1), ..AgentDefinition::default() };
    let names: Vec<String> = (0..40).map(|n| format!("s{n}")).collect();
    let schedules: Vec<_> = names.iter().map(|name| (name.as_str(), every("1m"))).collect();
    let few = [("a", every("1m")), ("b", every("1m"))];
    world.apply(&[agent("held", one(), &schedules)]).await;
    world.plan_all().await;
    world.advance(1);
    let fleet =
        [agent("held", one(), &schedules), agent("other", one(), &few), agent("free", unlimited(), &few)];
    world.apply(&fleet).await;
    world.plan_all().await;
    let gate = "select 1 from gates g join agents a on a.id = g.key and g.kind = 0 where a.name = 'held' for update of g";
    let held = hold(&url, gate).await;
    let names = async |claimed: &[Claimed]| -> Vec<String> {
        let mut names = Vec::new();
        for run in claimed {
            names.push(store.run(run.run).await.unwrap().unwrap().name);
        }
        names.sort();
        names
    };
    let claimed = world.claim(node, 9).await;
    assert_eq!(names(&claimed).await, ["free/a", "free/b", "other/a"]);
    held.batch_execute("rollback").await.unwrap();
    let claimed = world.claim(node, 9).await;
    assert_eq!(names(&claimed).await, ["held/s0"]);
    world.assert_whole().await;
}

#[tokio::test]
async fn held_rows_of_one_agent_stop_no_other_end() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let mut world = World::new(&store);
    let node = world.join(1).await;
    let once = AgentDefinition { retry: Retry { max: 0, ..Retry::default() }, ..unlimited() };
    let breaker = Some(Breaker { threshold: 5, reset_after_ms: 60_000 });
    let fragile = AgentDefinition { breaker, ..once.clone() };
    let names: Vec<String> = (0..10).map(|n| format!("s{n}")).collect();
    let schedules: Vec<_> = names.iter().map(|name| (name.as_str(), every("1m"))).collect();
    world.apply(&[agent("a", once, &schedules), agent("f", fragile, &[("s", every("1m"))])]).await;
    world.plan_all().await;
    let first = world.claim(node, 50).await;
    let failed = Outcome::Failed { reason: Reason::ExitCode, retryable: true };
    let ends = |claimed: &[Claimed]| -> Vec<Finish> {
        claimed.iter().map(|claimed| world.outcome(claimed, failed)).collect()
    };
    let state = format!(
        "select 1 from schedule_state where schedule_id = {} for update",
        world.schedule("a/s3").await.id
    );
    let held = hold(&url, &state).await;
    let written = finish_apart(&store, world.now, &ends(&first)).await;
    let missing: Vec<_> = first.iter().zip(&written.answers).filter(|(_, answer)| answer.is_none()).collect();
    assert_eq!(missing.len(), 1, "{written:?}");
    assert!(written.error.as_ref().is_some_and(Error::is_locked));
    let left = missing[0].0.clone();
    held.batch_execute("rollback").await.unwrap();
    let again = finish_apart(&store, world.now, &ends(std::slice::from_ref(&left))).await;
    assert!(again.error.is_none() && again.answers[0].is_some(), "{again:?}");
    // The row of a breaker.
    world.advance(60_000);
    world.plan_all().await;
    let second = world.claim(node, 50).await;
    let held = hold(&url, "select 1 from breakers for update").await;
    let ends: Vec<Finish> = second.iter().map(|claimed| world.outcome(claimed, failed)).collect();
    let written = finish_apart(&store, world.now, &ends).await;
    let missing: Vec<_> =
        second.iter().zip(&written.answers).filter(|(_, answer)| answer.is_none()).collect();
    let own = world.schedule("f/s").await.id;
    assert_eq!(missing.iter().map(|(claimed, _)| claimed.schedule).collect::<Vec<_>>(), [own]);
    held.batch_execute("rollback").await.unwrap();
    let last = missing[0].0.clone();
    assert_eq!(world.fail(&last).await, Finished::Ended(RunState::Failed));
    world.assert_whole().await;
}

#[tokio::test]
async fn a_table_that_is_held_is_a_store_that_is_away() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let mut world = World::new(&store);
    let names: Vec<String> = (0..40).map(|n| format!("s{n}")).collect();
    let schedules: Vec<_> = names.iter().map(|name| (name.as_str(), every("1m"))).collect();
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    let held = hold(&url, "select 1 from schedule_state for update").await;
    let due = store.due(world.now, None, 100).await.unwrap();
    let commits: Vec<Commit> = due.iter().map(|due| world.decide(due)).collect();
    let written = commit_apart(&store, world.now, &commits).await;
    let error = written.error.unwrap();
    assert!(error.is_retryable() && !error.is_of_part(), "{error}");
    assert!(written.answers.iter().all(Option::is_none) && store.live_runs().await.unwrap().is_empty());
    held.batch_execute("rollback").await.unwrap();
}

/// Nothing is planned, started or ended meanwhile, so nothing is ready either.
#[tokio::test]
async fn a_store_with_a_table_that_is_held_as_a_whole_takes_no_writes() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    for table in ["sessions", "scopes", "history"] {
        store.probe().await.unwrap();
        let held = hold(&url, &format!("lock table {table} in access exclusive mode")).await;
        let error = store.probe().await.unwrap_err();
        assert!(error.is_retryable(), "{error}");
        held.batch_execute("rollback").await.unwrap();
    }
}
