//! Rows that no version writes: each disturbs nothing else, and is named.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/pg.rs"]
mod pg;
mod suite;

use belfry_core::definition::{IfRunning, Options, Scope, When};
use belfry_core::rescue::Rescues;
use belfry_core::{NodeId, Reason, RunState};
use belfry_store::postgres::Postgres;
use belfry_store::sqlite::Sqlite;
use belfry_store::*;
use suite::world::{World, agent, cron, every, schedule, unlimited};

const MILLISECOND: belfry_time::SignedDuration = belfry_time::SignedDuration::from_millis(1);

/// A store in a file, and a way to write to it past Belfry.
struct File {
    folder: tempfile::TempDir,
    store: Sqlite,
}

impl File {
    fn new() -> File {
        let folder = tempfile::tempdir().unwrap();
        let store = Sqlite::open(&folder.path().join("belfry.db")).unwrap();
        File { folder, store }
    }

    fn sql(&self, text: &str) {
        let file = rusqlite::Connection::open(self.folder.path().join("belfry.db")).unwrap();
        file.execute_batch(text).unwrap();
    }
}

async fn client(url: &str) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute("set search_path = belfry").await.unwrap();
    client
}

async fn claim<S: Store>(world: &World<'_, S>, node: NodeId) -> Result<Vec<Claimed>, Error> {
    let lanes = vec![("cron".into(), 1), ("main".into(), 1)];
    let claim = Claim { node, lanes, labels: Vec::new(), only: None, rescues: Rescues::Any, total: u32::MAX };
    world.store.claim(world.now, &claim).await
}

/// One run that no claim can start: it is set aside and told of, all others start.
async fn others_start<S: Store>(store: &S, sql: impl AsyncFn(String)) {
    let limited = belfry_core::AgentDefinition { max_concurrent: Some(2), ..unlimited() };
    let each = Options::default();
    let queue = Options { if_running: IfRunning::Queue, ..Options::default() };
    let alone = Options { overlap: Scope::Agent, ..queue.clone() };
    for (first, (definition, options, poison)) in [
        (unlimited(), &each, "epoch = 2147483647"),
        (unlimited(), &each, "attempt = 9223372036854775807"),
        (limited.clone(), &each, "epoch = 2147483647"),
        // Those that come back wait in another state, from which the claim itself takes them.
        (unlimited(), &each, "epoch = 2147483647, state = 3"),
        (limited, &each, "attempt = 9223372036854775807, state = 3"),
        // Others wait behind it.
        (unlimited(), &queue, "epoch = 2147483647"),
        (unlimited(), &alone, "epoch = 2147483647"),
    ]
    .into_iter()
    .enumerate()
    {
        let mut world = World::new(store);
        world.ids_from(1_000 * (first as u128 + 1));
        let hourly = || schedule(When::Every("1h".into()), options.clone());
        world.apply(&[agent("a", definition, &[("s", hourly()), ("t", hourly())])]).await;
        let node = world.join(1).await;
        let (bad, _) = world.enqueue("a/s", None).await;
        let good = [world.enqueue("a/s", None).await.0, world.enqueue("a/t", None).await.0];
        sql(format!(
            "update live set {poison} where created_at = (select min(created_at) from live) and id = BAD"
        ))
        .await;
        let refused = claim(&world, node).await.unwrap_err();
        assert!(refused.is_refused() && refused.to_string().contains(&bad.to_string()), "{refused}");
        let mut started = Vec::new();
        for _ in 0..3 {
            for run in claim(&world, node).await.unwrap() {
                started.push(run.run);
                world.complete(&run).await;
            }
        }
        assert_eq!(started, good, "{poison}");
        let named = store.unreadable_rows().await.unwrap();
        assert!(named.iter().any(|row| row.contains(&bad.to_string())), "{named:?}");
        let record = store.run(bad).await.unwrap().unwrap();
        assert!(record.is_unstartable() && record.state == RunState::Pending, "{record:?}");
        assert_eq!(store.live_runs().await.unwrap().len(), 1);
        // It can be ended.
        store.cancel(world.now, bad, Reason::Requested).await.unwrap();
        assert!(store.live_runs().await.unwrap().is_empty());
        world.assert_whole().await;
    }
}

#[tokio::test]
async fn a_run_that_no_claim_can_start_stops_no_other_on_sqlite() {
    let file = File::new();
    let sql = async |text: String| file.sql(&text.replace("BAD", "(select min(id) from live)"));
    others_start(&file.store, sql).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_no_claim_can_start_stops_no_other_on_postgres() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let client = client(&url).await;
    let sql = async |text: String| {
        client
            .batch_execute(&text.replace("BAD", "(select id from live order by id limit 1)"))
            .await
            .unwrap();
    };
    Box::pin(others_start(&store, sql)).await;
}

#[tokio::test]
async fn a_schedule_that_is_deferred_and_has_a_token_fails_nobody_elses_verb() {
    let file = File::new();
    let mut world = World::new(&file.store);
    let daily = || cron("0 3 * * *");
    world.apply(&[agent("a", unlimited(), &[("s", daily()), ("t", daily())])]).await;
    world.plan_all().await;
    let node = world.join(1).await;
    file.sql("insert into deferred select schedule_id, 'cron', 1, 1, 0 from timers limit 1");
    let (run, _) = world.enqueue("a/t", None).await;
    let claimed = claim(&world, node).await.unwrap();
    assert!(claimed.iter().any(|claimed| claimed.run == run), "{claimed:?}");
    world.complete(&claimed[0]).await;
    assert!(!file.store.integrity().await.unwrap().is_empty(), "it is told of");
}

/// A limit whose row is gone is told of.
async fn a_gate_that_is_gone_is_told_of<S: Store>(store: &S, sql: impl AsyncFn(&'static str)) {
    let mut world = World::new(store);
    let limited = belfry_core::AgentDefinition { max_concurrent: Some(2), ..unlimited() };
    world.apply(&[agent("a", limited, &[("s", every("1h"))])]).await;
    world.enqueue("a/s", None).await;
    assert_eq!(store.integrity().await.unwrap(), Vec::<String>::new());
    sql("delete from gates where kind = 0").await;
    let told = store.integrity().await.unwrap();
    assert!(told.len() == 1 && told[0].contains("gone"), "{told:?}");
}

#[tokio::test]
async fn a_gate_that_is_gone_is_told_of_on_sqlite() {
    let file = File::new();
    a_gate_that_is_gone_is_told_of(&file.store, async |text| file.sql(text)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gate_that_is_gone_is_told_of_on_postgres() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let client = client(&url).await;
    a_gate_that_is_gone_is_told_of(&store, async |text| client.batch_execute(text).await.unwrap()).await;
}

/// A run that waits behind a gate that is gone holds up nobody else of its agent, and starts itself.
async fn a_gate_that_is_gone_is_no_limit<S: Store>(store: &S, sql: impl AsyncFn(String)) {
    for (first, column) in ["turn_gate", "command_gate", "whole_gate", "agent_gate"].into_iter().enumerate() {
        let mut world = World::new(store);
        world.ids_from(1_000 * (first as u128 + 1));
        let limited = belfry_core::AgentDefinition { max_concurrent: Some(2), ..unlimited() };
        let queue = Options { if_running: IfRunning::Queue, ..Options::default() };
        let queue = schedule(When::Every("1h".into()), queue);
        world.apply(&[agent("a", limited, &[("q", queue), ("go", every("1h"))])]).await;
        let node = world.join(1).await;
        let (odd, _) = world.enqueue("a/q", None).await;
        sql(format!("update live set {column} = 999999")).await;
        let (other, _) = world.enqueue("a/go", None).await;
        let mut started = Vec::new();
        for _ in 0..3 {
            for run in claim(&world, node).await.unwrap() {
                started.push(run.run);
                world.complete(&run).await;
            }
        }
        started.sort();
        assert_eq!(started, [odd, other], "{column}");
        assert!(store.live_runs().await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_gate_that_is_gone_is_no_limit_on_sqlite() {
    let file = File::new();
    a_gate_that_is_gone_is_no_limit(&file.store, async |text| file.sql(&text)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gate_that_is_gone_is_no_limit_on_postgres() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let client = client(&url).await;
    let sql = async |text: String| client.batch_execute(&text).await.unwrap();
    Box::pin(a_gate_that_is_gone_is_no_limit(&store, sql)).await;
}

/// A run whose node was removed by hand, or that has none, can be cancelled, and whoever waits for it goes on.
async fn a_run_without_a_node_can_be_ended<S: Store>(store: &S, sql: impl AsyncFn(&'static str)) {
    for (first, text) in ["delete from nodes", "update live set node_id = null"].into_iter().enumerate() {
        let mut world = World::new(store);
        world.ids_from(1_000 * (first as u128 + 1));
        let limited = belfry_core::AgentDefinition { max_concurrent: Some(1), ..unlimited() };
        world.apply(&[agent("a", limited, &[("s", every("1h")), ("t", every("1h"))])]).await;
        let node = world.join(1).await;
        let (run, _) = world.enqueue("a/s", None).await;
        assert_eq!(claim(&world, node).await.unwrap().len(), 1);
        let (next, _) = world.enqueue("a/t", None).await;
        assert_eq!(claim(&world, node).await.unwrap(), []);
        sql(text).await;
        let cancelled = store.cancel(world.now, run, Reason::Requested).await.unwrap();
        assert_eq!(cancelled, Cancelled::Ended, "{text}");
        assert_eq!(store.run(run).await.unwrap().unwrap().state, RunState::Cancelled);
        let node = world.join(2).await;
        let claimed = claim(&world, node).await.unwrap();
        assert_eq!(claimed.iter().map(|claimed| claimed.run).collect::<Vec<_>>(), [next]);
        world.complete(&claimed[0]).await;
        world.assert_whole().await;
    }
}

#[tokio::test]
async fn a_run_without_a_node_can_be_ended_on_sqlite() {
    let file = File::new();
    a_run_without_a_node_can_be_ended(&file.store, async |text| file.sql(text)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_without_a_node_can_be_ended_on_postgres() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let client = client(&url).await;
    let sql = async |text| client.batch_execute(text).await.unwrap();
    Box::pin(a_run_without_a_node_can_be_ended(&store, sql)).await;
}

#[tokio::test]
async fn an_id_of_a_wrong_length_hides_no_other_row() {
    let file = File::new();
    let store = &file.store;
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("s", every("1h")), ("t", every("1h"))])]).await;
    let node = world.join(1).await;
    world.join(2).await;
    let runs = [world.enqueue("a/s", None).await.0, world.enqueue("a/t", None).await.0];
    file.sql(
        "update live set trace_id = x'00' where id = (select min(id) from live);
         update nodes set id = x'0102' where id = (select max(id) from nodes);
         update schedule_state set last_run = x'01', waits_for = x'01', last_success_run = x'', last_other = x'05'
             where schedule_id = (select min(schedule_id) from schedule_state)",
    );
    assert_eq!(store.nodes().await.unwrap().len(), 1);
    let schedules = async || store.schedules(&ScheduleFilter::default(), None, 100).await.unwrap().items;
    assert_eq!(schedules().await.len(), 2);
    assert_eq!(store.live_runs().await.unwrap().len(), 2);
    let mut claimed = claim(&world, node).await.unwrap();
    claimed.extend(claim(&world, node).await.unwrap());
    let started: Vec<_> = claimed.iter().map(|run| (run.run, run.trace_id)).collect();
    assert_eq!(started, [(runs[0], None), (runs[1], None)], "a trace id is no reason not to start");
    file.sql("update live set node_id = x'01' where id = (select min(id) from live)");
    assert_eq!(store.runs(&RunFilter::default(), None, 10).await.unwrap().items.len(), 2);
    file.sql("update live set id = x'00ff' where id = (select min(id) from live)");
    for limit in [1, 10] {
        let listed = store.runs(&RunFilter::default(), None, limit).await.unwrap().items;
        assert_eq!(listed.iter().map(|run| run.id).collect::<Vec<_>>(), [runs[1]]);
    }
    assert_eq!(world.complete(&claimed[1]).await, Finished::Ended(RunState::Completed));
    assert_eq!(store.ended_runs(claimed[1].schedule, 10).await.unwrap().len(), 1);
    let named = store.unreadable_rows().await.unwrap().join("\n");
    for words in
        ["run 00ff: its stored id", "node 0102: its id has a wrong length", "schedule a/s: the stored id"]
    {
        assert!(named.contains(words), "{words}: {named}");
    }
}

/// One run whose id cannot be read hinders neither the end of another nor an edit nor the removal of old runs.
#[tokio::test]
async fn a_usage_that_is_not_utf_8_hides_no_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("belfry.db");
    let store = Sqlite::open(&path).unwrap();
    let mut world = World::new(&store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", every("1h"))])]).await;
    world.plan_all().await;
    for run in world.claim(node, 9).await {
        world.complete(&run).await;
    }
    let file = rusqlite::Connection::open(&path).unwrap();
    assert_eq!(file.execute("update history set usage = cast(x'fffe' as text)", []).unwrap(), 1);
    let runs = store.runs(&RunFilter::default(), None, 10).await.unwrap().items;
    assert_eq!((runs.len(), runs[0].usage.is_none()), (1, true));
}

#[tokio::test]
async fn an_id_of_a_wrong_length_holds_up_nobody_who_waits_for_a_turn() {
    for overlap in [Scope::Schedule, Scope::Agent] {
        let file = File::new();
        let mut world = World::new(&file.store);
        let options = Options { if_running: IfRunning::Queue, overlap, ..Options::default() };
        let queued = schedule(When::Every("1h".into()), options);
        let agents =
            [agent("a", unlimited(), &[("s", queued)]), agent("b", unlimited(), &[("t", every("1h"))])];
        world.apply(&agents).await;
        let node = world.join(1).await;
        let first = world.enqueue("a/s", None).await.0;
        let claimed = claim(&world, node).await.unwrap();
        assert_eq!(claimed[0].run, first);
        world.enqueue("a/s", None).await;
        let last = world.enqueue("a/s", None).await.0;
        // Both wait for their turn.
        assert!(claim(&world, node).await.unwrap().is_empty());
        file.sql("update live set id = x'010203' where id = (select min(id) from live where state <> 2)");
        world.complete(&claimed[0]).await;
        let other = world.enqueue("b/t", None).await.0;
        let mut started = Vec::new();
        for _ in 0..4 {
            // A claim may be refused once, when it meets the run.
            for run in claim(&world, node).await.unwrap_or_default() {
                started.push(run.run);
                world.complete(&run).await;
            }
        }
        started.sort_unstable();
        assert_eq!(started, [last, other], "{overlap:?}");
    }
}

#[tokio::test]
async fn an_id_of_a_wrong_length_hinders_no_end_and_no_edit() {
    use belfry_core::definition::Budget;
    let file = File::new();
    let store = &file.store;
    let mut world = World::new(store);
    let budget = Some(Budget { max: 1, period_ms: 3_600_000 });
    let definition = belfry_core::AgentDefinition { budget, max_concurrent: Some(1), ..unlimited() };
    let spec = |retries| {
        let mut definition = definition.clone();
        definition.retry.max = retries;
        [agent("a", definition, &[("s", every("1h"))])]
    };
    world.apply(&spec(1)).await;
    let node = world.join(1).await;
    world.enqueue("a/s", None).await;
    let (bad, _) = world.enqueue("a/s", None).await;
    let claimed = claim(&world, node).await.unwrap().remove(0);
    assert_ne!(claimed.run, bad);
    let long = "ff".repeat(1 << 20);
    file.sql(&format!("update live set id = x'{long}' where id = (select max(id) from live)"));
    assert_eq!(world.fail(&claimed).await, Finished::Pending);
    world.apply(&spec(5)).await;
    assert_eq!(store.run(claimed.run).await.unwrap().unwrap().max_attempts, 6);
    let named = store.unreadable_rows().await.unwrap().join("\n");
    assert!(named.contains(&format!("run {}: its stored id", "ff".repeat(16))), "{}", named.len());
    assert!(named.len() < 1_000, "{}", named.len());
}

#[tokio::test]
async fn a_schedule_without_an_agent_is_told_of() {
    let file = File::new();
    let world = World::new(&file.store);
    world.apply(&[agent("a", unlimited(), &[("s", every("1h"))])]).await;
    file.sql("pragma foreign_keys = off; update schedules set agent_id = 999");
    let named = file.store.unreadable_rows().await.unwrap();
    assert!(
        named.iter().any(|row| row.starts_with("schedule a/s: its agent 999 does not exist")),
        "{named:?}"
    );
}

#[tokio::test]
async fn a_name_that_is_not_utf_8_hides_no_other_schedule_and_stops_no_planning() {
    let file = File::new();
    let store = &file.store;
    let mut world = World::new(store);
    let schedules = ["a", "b", "c"].map(|name| (name, every("1h")));
    world.apply(&[agent("x", unlimited(), &schedules)]).await;
    file.sql("update schedules set name = cast(x'782f62ff' as text) where name = 'x/b'");
    for limit in [1, 2, 10] {
        let (mut names, mut after) = (Vec::new(), None::<String>);
        loop {
            let page = store.schedules(&ScheduleFilter::default(), after.as_deref(), limit).await.unwrap();
            names.extend(page.items.into_iter().map(|record| record.name));
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(names, ["x/a", "x/c"], "{limit}");
    }
    assert!(world.plan_all().await >= 2);
    let named = store.unreadable_rows().await.unwrap();
    assert!(named.iter().any(|row| row.starts_with(r"schedule x/b\xff: its name is not UTF-8")), "{named:?}");
    // Nor does a definition, or a format that is beyond all.
    file.sql(
        "update schedules set definition = cast(x'ff' as text) where name = 'x/a';
         update schedules set format = 5000000000 where name = 'x/c'",
    );
    let listed = store.schedules(&ScheduleFilter::default(), None, 10).await.unwrap().items;
    assert_eq!(listed.len(), 2);
    assert_eq!(store.unreadable().await.unwrap().len(), 1, "by its format");
    assert!(store.due(world.now, None, 10).await.is_ok());
}

/// A timer without a schedule keeps nobody awake.
async fn a_stray_timer_is_no_work<S: Store>(store: &S, sql: impl AsyncFn(&'static str)) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("s", every("1h")), ("removed", every("1h"))])]).await;
    world.apply(&[agent("a", unlimited(), &[("s", every("1h"))])]).await;
    world.plan_all().await;
    let before = store.next_due().await.unwrap();
    sql("999").await;
    assert_eq!(store.next_due().await.unwrap(), before);
    let named = store.unreadable_rows().await.unwrap();
    assert!(named.iter().any(|row| row.starts_with("a timer of schedule 999")), "{named:?}");
    // One of a schedule that was removed, which nobody plans.
    sql("(select id from schedules where retired_at is not null)").await;
    assert_eq!(store.next_due().await.unwrap(), before);
}

#[tokio::test]
async fn a_stray_timer_is_no_work_on_sqlite() {
    let file = File::new();
    let sql = async |schedule| {
        file.sql(&format!(
            "insert into timers (due_at, schedule_id, kind, tick_at, version) values (1, {schedule}, 0, 1, 1)"
        ));
    };
    a_stray_timer_is_no_work(&file.store, sql).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stray_timer_is_no_work_on_postgres() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let client = client(&url).await;
    let sql = async |schedule| {
        let stray = format!(
            "insert into timers (due_at, schedule_id, kind, tick_at, version) \
             values ('2001-01-01Z', {schedule}, 0, '2001-01-01Z', 1)"
        );
        client.batch_execute(&stray).await.unwrap();
    };
    a_stray_timer_is_no_work(&store, sql).await;
}

/// Ended runs of a schedule whose chain leads in a circle.
async fn a_circle_of_ended_runs_is_walked_once<S: Store>(store: &S, sql: impl AsyncFn()) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", unlimited(), &[("s", every("1m"))])]).await;
    for _ in 0..3 {
        world.plan_all().await;
        for claimed in world.claim(node, 9).await {
            world.complete(&claimed).await;
        }
        world.advance(60_000);
    }
    let id = world.schedule("a/s").await.id;
    let ended = store.ended_runs(id, 10).await.unwrap();
    sql().await;
    let asked = async {
        let last = ended[0].tick_at.unwrap();
        assert!(matches!(store.tick(id, last).await.unwrap(), TickFate::Run(_)));
        // One that nothing became of: the whole chain is looked at.
        assert!(!matches!(store.tick(id, last + MILLISECOND).await.unwrap(), TickFate::Run(_)));
        let filter = RunFilter { schedule: Some("a/s".into()), ..RunFilter::default() };
        assert!(store.runs(&filter, None, 10).await.unwrap().items.len() <= ended.len());
    };
    tokio::time::timeout(std::time::Duration::from_secs(20), asked).await.expect("an end");
}

#[tokio::test]
async fn a_circle_of_ended_runs_is_walked_once_on_sqlite() {
    let file = File::new();
    let sql = async || file.sql("update history set previous = id");
    a_circle_of_ended_runs_is_walked_once(&file.store, sql).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_circle_of_ended_runs_is_walked_once_on_postgres() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let client = client(&url).await;
    let sql = async || client.batch_execute("update history set prev_run = id").await.unwrap();
    a_circle_of_ended_runs_is_walked_once(&store, sql).await;
}

/// A plan and an end that are refused in every form are noted, for whoever asks, until they are stored.
async fn refusals_are_noted<S: Store>(store: &S, sql: impl AsyncFn(&'static str)) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("bad", every("1h")), ("good", every("1h"))])]).await;
    let node = world.join(1).await;
    let bad = world.schedule("a/bad").await;
    sql("PLAN").await;
    let due = store.due(world.now, None, 10).await.unwrap();
    let commits: Vec<Commit> = due.iter().map(|due| world.decide(due)).collect();
    let written = commit_apart(store, world.now, &commits).await;
    assert!(written.error.is_some(), "{written:?}");
    let refusals = store.refusals().await.unwrap();
    assert_eq!(refusals.len(), 1, "{refusals:?}");
    let Refusal { schedule, name, run, since, reason } = &refusals[0];
    assert_eq!((*schedule, name.as_str(), *run, *since), (bad.id, "a/bad", None, world.now));
    assert!(reason.contains("not today"), "{reason}");
    let words = refusals[0].words();
    assert!(words.contains("refuses its plans") && words.contains("not today"), "{words}");
    // It rests, and nobody is late for it.
    loop {
        let due = store.due(world.now, None, 10).await.unwrap();
        assert!(due.iter().all(|due| &*due.name != "a/bad"));
        let commits: Vec<Commit> = due.iter().map(|due| world.decide(due)).collect();
        if commits.is_empty() {
            break;
        }
        store.commit(world.now, &commits).await.unwrap();
    }
    let overdue = store.next_due().await.unwrap().is_some_and(|at| at <= world.now);
    assert!(!overdue, "it is not waited for");
    // It is stored once it can be, and is not told of any more.
    sql("MEND PLAN").await;
    let written = commit_apart(store, world.now, &commits).await;
    assert!(written.error.is_none() && written.answers.contains(&Some(Committed::Held)), "{written:?}");
    assert_eq!(store.refusals().await.unwrap(), []);
    // Its runs start all the same, and an end that is refused is noted as well.
    let (waiting, _) = world.enqueue("a/bad", None).await;
    let mut claimed = world.claim(node, 10).await;
    claimed.retain(|run| run.run == waiting);
    sql("END").await;
    let finish = world.outcome(&claimed[0], belfry_core::retry::Outcome::Completed);
    let written = finish_apart(store, world.now, &[finish]).await;
    assert_eq!(written.answers, [None], "{written:?}");
    let refusals = store.refusals().await.unwrap();
    assert_eq!(refusals.iter().map(|refusal| refusal.run).collect::<Vec<_>>(), [Some(waiting)]);
    assert!(refusals[0].words().contains("never ends"), "{refusals:?}");
    sql("MEND END").await;
    assert_eq!(world.complete(&claimed[0]).await, Finished::Ended(RunState::Completed));
    assert_eq!(store.refusals().await.unwrap(), []);
}

#[tokio::test]
async fn refusals_are_noted_on_sqlite() {
    let file = File::new();
    let bad = "(select id from schedules where name = 'a/bad')";
    let sql = async |what: &'static str| {
        file.sql(&match what {
            "PLAN" => format!(
                "create trigger plan before delete on timers when old.schedule_id = {bad}
                 begin select raise(abort, 'not today'); end"
            ),
            "END" => {
                "create trigger ended before insert on history begin select raise(abort, 'never ends'); end"
                    .into()
            }
            "MEND PLAN" => "drop trigger plan".to_owned(),
            _ => "drop trigger ended".to_owned(),
        });
    };
    refusals_are_noted(&file.store, sql).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_are_noted_on_postgres() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let client = client(&url).await;
    let sql = async |what: &'static str| {
        let bad = "(select id from belfry.schedules where name = 'a/bad')";
        let text = match what {
            "PLAN" => format!(
                "create function no_plan() returns trigger language plpgsql as $$ begin
                     if old.schedule_id = {bad} then raise exception 'not today'; end if; return old; end $$;
                 create trigger plan before delete on timers for each row execute function no_plan();"
            ),
            "END" => "create function no_end() returns trigger language plpgsql as $$ begin raise exception 'never ends'; end $$;
                      create trigger ended before insert on history for each row execute function no_end();"
                .to_owned(),
            "MEND PLAN" => "drop trigger plan on timers".to_owned(),
            _ => "drop trigger ended on history".to_owned(),
        };
        client.batch_execute(&text).await.unwrap();
    };
    Box::pin(refusals_are_noted(&store, sql)).await;
}

#[tokio::test]
async fn a_file_that_was_cut_off_takes_no_writes() {
    let file = File::new();
    let world = World::new(&file.store);
    world.apply(&[agent("a", unlimited(), &[("s", every("1h"))])]).await;
    file.store.probe().await.unwrap();
    file.sql("pragma wal_checkpoint(truncate)");
    file.store.probe().await.unwrap();
    file.sql("pragma wal_checkpoint(truncate)");
    let path = file.folder.path().join("belfry.db");
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(0).unwrap();
    let error = file.store.probe().await.unwrap_err();
    assert!(!error.is_of_content(), "{error}");
}

#[tokio::test]
async fn a_file_whose_table_is_gone_takes_no_writes() {
    let tables = {
        let file = File::new();
        let connection = rusqlite::Connection::open(file.folder.path().join("belfry.db")).unwrap();
        let mut names = connection
            .prepare("select name from sqlite_schema where type = 'table' and name not like 'sqlite%'")
            .unwrap();
        let names = names.query_map([], |row| row.get::<_, String>(0)).unwrap();
        names.map(Result::unwrap).collect::<Vec<_>>()
    };
    assert!(tables.len() > 20, "{tables:?}");
    for table in tables {
        let file = File::new();
        file.store.probe().await.unwrap();
        file.sql(&format!("alter table {table} rename to gone"));
        let error = file.store.probe().await.unwrap_err();
        assert!(!error.is_of_content() && error.to_string().contains(&table), "{table}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_must_not_be_written_to_takes_no_writes() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    store.probe().await.unwrap();
    let client = client(&url).await;
    let role = format!("belfry_limited_{}", std::process::id());
    let grant = format!(
        "create role {role} login; grant usage on schema belfry to {role};
         grant all on all tables in schema belfry to {role}; revoke insert on live from {role}"
    );
    client.batch_execute(&grant).await.unwrap();
    let user = url.split_whitespace().find(|part| part.starts_with("user=")).map(str::to_owned);
    if let Some(user) = user {
        let limited = Postgres::open(&url.replace(&user, &format!("user={role}"))).await.unwrap();
        let error = limited.probe().await.unwrap_err();
        assert!(error.is_retryable() && error.to_string().contains("live"), "{error}");
    }
    // What others do is told through two tables that no crash keeps: without them a node works all the same.
    let tables =
        "select relname::text from pg_class where relnamespace = 'belfry'::regnamespace and relkind = 'r'
                  and relpersistence = 'p'";
    let tables = client.query(tables, &[]).await.unwrap();
    assert!(tables.len() > 20);
    for table in tables.iter().map(|row| row.get::<_, String>(0)).filter(|table| table != "migrations") {
        client.batch_execute(&format!("alter table {table} rename to gone")).await.unwrap();
        let error = store.probe().await.unwrap_err();
        assert!(error.is_retryable() && error.to_string().contains(&table), "{table}: {error}");
        client.batch_execute(&format!("alter table gone rename to {table}")).await.unwrap();
    }
    store.probe().await.unwrap();
    let drop = format!("drop owned by {role}; drop role {role}");
    client.batch_execute(&drop).await.unwrap();
}
