//! Rows that somebody holds by hand: everything else goes on.

use std::time::{Duration, Instant};

use belfry_core::definition::{Breaker, IfRunning, Options, Retry, Scope, When};
use belfry_core::retry::Outcome;
use belfry_core::{AgentDefinition, Reason, RunId, RunState};
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
async fn a_held_run_is_passed_by() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let mut world = World::new(&store);
    let node = world.join(1).await;
    let one = || AgentDefinition { max_concurrent: Some(1), ..AgentDefinition::default() };
    let hourly = || schedule(When::Cron("0 0 1 1 *".into()), Options::default());
    world.apply(&["held", "next", "last"].map(|name| agent(name, one(), &[("s", hourly())]))).await;
    let mut runs = Vec::new();
    for name in ["held/s", "next/s", "last/s", "next/s"] {
        runs.push(world.enqueue(name, None).await.0);
        world.advance(1);
    }
    let held = hold(&url, &format!("select 1 from live where id = '{}' for update", runs[0])).await;
    let ids = |claimed: &[Claimed]| -> Vec<_> { claimed.iter().map(|run| run.run).collect() };
    let began = Instant::now();
    assert_eq!(ids(&world.claim(node, 1).await), [runs[1]], "there is one slot, and the first is held");
    assert_eq!(ids(&world.claim(node, 9).await), [runs[2]]);
    // One that would be parked.
    let other = hold(&url, &format!("select 1 from live where id = '{}' for update", runs[3])).await;
    assert_eq!(world.claim(node, 9).await, []);
    assert!(began.elapsed() < Duration::from_secs(1), "nothing is waited for: {:?}", began.elapsed());
    other.batch_execute("rollback").await.unwrap();
    // One behind it at the same limit.
    let behind = world.enqueue("held/s", None).await.0;
    assert_eq!(ids(&world.claim(node, 9).await), [behind]);
    held.batch_execute("rollback").await.unwrap();
    assert_eq!(world.claim(node, 9).await, []);
    let running = store.live_runs().await.unwrap();
    let of_limit = running.iter().filter(|run| run.agent_name == "held" && run.state == RunState::Running);
    assert_eq!(of_limit.count(), 1);
    world.assert_whole().await;
}

#[tokio::test]
async fn rows_that_make_no_sense_stop_nobody() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let mut world = World::new(&store);
    let node = world.join(1).await;
    let one = || AgentDefinition { max_concurrent: Some(4), ..AgentDefinition::default() };
    let names: Vec<String> = (0..12).map(|n| format!("s{n}")).collect();
    let schedules: Vec<_> = names.iter().map(|name| (name.as_str(), every("1m"))).collect();
    let fleet = [agent("odd", one(), &schedules), agent("good", one(), &[("z", every("1m"))])];
    world.apply(&fleet).await;
    let sql = hold(&url, "commit").await;
    let run = async |text: &str| sql.batch_execute(text).await.unwrap();
    // An agent is gone, and the first pages of what is due are its schedules and timers of none.
    run("update agents set id = -id where name = 'odd'").await;
    run("insert into timers (due_at, schedule_id, kind, tick_at, version)
         select '2020-01-01Z', -n, 0, '2020-01-01Z', n from generate_series(1, 9) as n")
    .await;
    let due = store.due(world.now, None, 4).await.unwrap();
    assert_eq!(due.iter().map(|due| &*due.name).collect::<Vec<_>>(), ["good/z"]);
    run("delete from timers where schedule_id < 0; update agents set id = -id where name = 'odd'").await;
    // A limit below all numbers, while runs of its agent are running.
    assert!(store.unreadable().await.unwrap().is_empty(), "which also looks again at what was left out");
    world.plan_all().await;
    let running = world.claim(node, 50).await;
    assert_eq!(running.len(), 5);
    run("update gates set cap = -9223372036854775808 where kind = 0").await;
    assert_eq!(world.claim(node, 50).await, []);
    run("update gates set cap = 9223372036854775807 where kind = 0").await;
    for run in &running {
        world.complete(run).await;
    }
    assert_eq!(world.claim(node, 50).await.len(), 8);
    // Nodes whose labels are no list of texts.
    for (n, labels) in [(7, "array[null]::text[]"), (8, "array[array['a', 'b'], array['c', null]]")] {
        let columns = "host, pid, started_at, lease_until, fenced, draining, last_seen_at, max_concurrent, boot_id, pid_ns, \
                       process_start, state_dir, version, lease_ms, renewal";
        run(&format!(
            "insert into nodes (id, labels, {columns}) select '00000000-0000-0000-0000-00000000000{n}', {labels}, {columns} \
             from nodes limit 1"
        ))
        .await;
    }
    let labels: Vec<_> = store.nodes().await.unwrap().into_iter().map(|node| node.labels.join(" ")).collect();
    assert_eq!(labels.iter().filter(|labels| *labels == "a b c").count(), 1, "{labels:?}");
    assert_eq!(labels.len(), 3);
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
async fn held_rows_of_many_agents_stop_no_other_end_and_no_other_plan() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let mut world = World::new(&store);
    let node = world.join(1).await;
    let breaker = Some(Breaker { threshold: 5, reset_after_ms: 60_000 });
    let fragile = || AgentDefinition { breaker, ..unlimited() };
    let names: Vec<String> = (0..60).map(|n| format!("{}{n}", ["free", "held"][n % 2])).collect();
    let fleet: Vec<_> = names.iter().map(|name| agent(name, fragile(), &[("s", every("1m"))])).collect();
    world.apply(&fleet).await;
    let state = "select 1 from schedule_state where schedule_id in (select s.id from schedules s \
                 join agents a on a.id = s.agent_id where a.name like 'held%') for update";
    let held = hold(&url, state).await;
    let due = store.due(world.now, None, 100).await.unwrap();
    let commits: Vec<Commit> = due.iter().map(|due| world.decide(due)).collect();
    let written = commit_apart(&store, world.now, &commits).await;
    assert_eq!(written.answers.iter().filter(|answer| answer.is_none()).count(), 30, "{:?}", written.error);
    assert!(written.error.as_ref().is_some_and(Error::is_locked), "{:?}", written.error);
    held.batch_execute("rollback").await.unwrap();
    while store.due(world.now, None, 100).await.unwrap().len() < names.len() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    world.plan_all().await;
    let claimed = world.claim(node, 100).await;
    assert_eq!(claimed.len(), names.len());
    let ends: Vec<Finish> =
        claimed.iter().map(|claimed| world.outcome(claimed, Outcome::Completed)).collect();
    let held = hold(&url, "select 1 from agents where name like 'held%' for update").await;
    let is_held = async |run: RunId| {
        let name = store.run(run).await.unwrap().unwrap().name;
        name.starts_with("held")
    };
    let written = finish_apart(&store, world.now, &ends).await;
    for (end, answer) in ends.iter().zip(&written.answers) {
        assert_eq!(answer.is_none(), is_held(end.run).await, "{answer:?}");
    }
    assert!(written.error.as_ref().is_some_and(Error::is_locked), "{:?}", written.error);
    held.batch_execute("rollback").await.unwrap();
    let left: Vec<Finish> = ends
        .iter()
        .zip(&written.answers)
        .filter(|(_, answer)| answer.is_none())
        .map(|(end, _)| end.clone())
        .collect();
    let again = finish_apart(&store, world.now, &left).await;
    assert!(again.error.is_none() && again.answers.iter().all(Option::is_some), "{again:?}");
    world.assert_whole().await;
}

#[tokio::test]
async fn requests_for_a_held_schedule_leave_connections_to_others() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let mut world = World::new(&store);
    let queued = Options { if_running: IfRunning::Queue, ..Options::default() };
    world.apply(&[agent("a", unlimited(), &[("s", schedule(When::Every("1m".into()), queued))])]).await;
    let record = world.schedule("a/s").await;
    let compiled = record.definition.compile("a/s").unwrap();
    let definition = store.definitions(&[record.id]).await.unwrap().remove(0).unwrap().agent_definition;
    let rows = format!("select 1 from schedule_state where schedule_id = {} for update", record.id);
    let held = hold(&url, &rows).await;
    let now = world.now;
    let mut ids = (0..6).map(|_| world.run_id()).collect::<Vec<_>>().into_iter();
    let mut enqueue = || {
        let run = NewRun::by_hand(
            Defined::new(record.agent, record.id, &compiled, &definition),
            ids.next().unwrap(),
            now,
        );
        let request = Enqueue { run, key: None };
        async { store.enqueue(now, &{ request }).await }
    };
    let waiting = async { tokio::join!(enqueue(), enqueue(), enqueue(), enqueue(), enqueue(), enqueue()) };
    // It asks when all connections for requests are taken.
    let (answers, read) = tokio::join!(waiting, store.schedule("a/s"));
    read.unwrap();
    let locked = |answer: &Result<Enqueued, Error>| answer.as_ref().is_err_and(Error::is_retryable);
    let (a, b, c, d, e, f) = &answers;
    assert!([a, b, c, d, e, f].into_iter().all(locked), "{answers:?}");
    let pause = || store.pause(now, record.id, None, None);
    let waiting = async { tokio::join!(pause(), pause(), pause(), pause(), pause(), pause()) };
    let (answers, read) = tokio::join!(waiting, store.schedule("a/s"));
    read.unwrap();
    assert!(answers.0.is_err_and(|error| error.is_locked()));
    held.batch_execute("rollback").await.unwrap();
}

#[tokio::test]
async fn a_table_that_is_held_is_a_store_that_is_away() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let mut world = World::new(&store);
    let names: Vec<String> = (0..40).map(|n| format!("s{n}")).collect();
    let schedules: Vec<_> = names.iter().map(|name| (name.as_str(), every("1m"))).collect();
    world.apply(&[agent("a", unlimited(), &schedules)]).await;
    let held = hold(&url, "lock table schedule_state in share mode").await;
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

/// A store with an agent of which a run is running, and that run.
async fn with_a_running_run<'a>(store: &'a Postgres) -> (World<'a, Postgres>, RunId) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[]), agent("b", unlimited(), &[("s", every("1h"))])]).await;
    let put = store.put_schedule(world.now, "a", "s", &every("1h"), &Expect::Any).await.unwrap();
    assert!(matches!(put, Put::Added(_)));
    let run = world.enqueue("a/s", None).await.0;
    assert_eq!(world.claim(node, 9).await.len(), 1);
    (world, run)
}

#[tokio::test]
async fn an_edit_that_waits_for_a_held_run_stops_no_other_agent() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let (mut world, run) = with_a_running_run(&store).await;
    let held = hold(&url, &format!("select 1 from live where id = '{run}' for update")).await;
    let alone = Options { if_running: IfRunning::Queue, overlap: Scope::Agent, ..Options::default() };
    let edited = schedule(When::Every("1d".into()), alone);
    let now = world.now;
    let edit = async {
        let answer = store.put_schedule(now, "a", "new", &edited, &Expect::Any).await;
        (answer, Instant::now())
    };
    let others = async {
        for _ in 0..20 {
            world.enqueue("b/s", None).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Instant::now()
    };
    let ((answer, edited_at), others_at) = tokio::join!(edit, others);
    assert!(answer.is_err_and(|error| error.is_locked()), "it is told what it waits for");
    assert!(others_at < edited_at, "they did not wait for the edit");
    held.batch_execute("rollback").await.unwrap();
    let put = store.put_schedule(world.now, "a", "new", &edited, &Expect::Any).await.unwrap();
    assert!(matches!(put, Put::Added(_)));
    world.assert_whole().await;
}

/// The end of a run locks the run, and then the state of its schedule.
#[tokio::test]
async fn an_edit_takes_locks_in_the_order_of_an_end() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let (world, run) = with_a_running_run(&store).await;
    let id = world.schedule("a/s").await.id;
    let alone = Options { if_running: IfRunning::Queue, ..Options::default() };
    let edited = schedule(When::Every("1d".into()), alone);
    for is_removal in [false, true] {
        let end = hold(&url, &format!("select 1 from live where id = '{run}' for update")).await;
        let edit = async {
            match is_removal {
                false => drop(store.put_schedule(world.now, "a", "s", &edited, &Expect::Any).await.unwrap()),
                true => drop(store.remove_schedule(world.now, id, &Expect::Any).await.unwrap()),
            }
        };
        let goes_on = async {
            let sql = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
            while end.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let sql = "update schedule_state set fired_at = fired_at where schedule_id = ";
            end.batch_execute(&format!("{sql}{id}; commit")).await
        };
        let ((), ended) = tokio::join!(edit, goes_on);
        ended.expect("no deadlock");
    }
    assert!(store.schedule("a/s").await.unwrap().is_none());
    world.assert_whole().await;
}
