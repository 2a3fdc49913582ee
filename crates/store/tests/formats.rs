//! Definitions that this version cannot read: those of a newer version, and broken ones. Everything else goes on, and they
//! stay as they are.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/pg.rs"]
mod pg;
mod suite;

use belfry_core::AgentDefinition;
use belfry_core::check::Status;
use belfry_core::definition::{IfRunning, Options, Scope, When};
use belfry_store::postgres::Postgres;
use belfry_store::sqlite::Sqlite;
use belfry_store::*;
use suite::world::{World, agent, every, schedule, unlimited};

const NAMES: [&str; 5] = ["broken", "junk", "newer", "plain", "shiny"];

fn fleet() -> Vec<AgentSpec> {
    NAMES.map(|name| agent(name, unlimited(), &[("s", every("1h"))])).to_vec()
}

/// What a newer version writes, and what nobody should.
const WRITTEN_ELSEWHERE: [&str; 5] = [
    "update gates set cap = 7 where kind = 0",
    "update schedules set format = 999, definition = '{\"every\": \"1h\", \"shiny\": {}}' where name = 'shiny/s'",
    "update agents set format = 999 where name = 'newer'",
    "update agents set definition = '{\"shiny\": true}' where name = 'broken'",
    "update schedules set definition = 'not JSON' where name = 'junk/s'",
];

/// A store whose definitions are written by others, opened before and after.
async fn holds<S: Store>(open: impl AsyncFn() -> S, sql: impl AsyncFn(&'static str) -> Vec<i64>) {
    let before = open().await;
    let mut world = World::new(&before);
    world.apply(&fleet()).await;
    for name in NAMES.into_iter().filter(|name| *name != "plain") {
        world.enqueue(&format!("{name}/s"), None).await;
    }
    drop(before);
    for change in WRITTEN_ELSEWHERE {
        sql(change).await;
    }
    let store = open().await;
    let mut world = World::new(&store);
    world.ids_from(1_000);
    let node = world.join(1).await;

    // What a newer version wrote is known without reading it, the rest is found on the way.
    let unreadable = async || -> Vec<String> {
        store.unreadable().await.unwrap().into_iter().map(|found| found.name).collect()
    };
    assert_eq!(unreadable().await, ["newer/s", "shiny/s"]);
    let due = async |now| -> Vec<String> {
        store.due(now, None, 10).await.unwrap().iter().map(|due| due.name.to_string()).collect()
    };
    assert_eq!(due(world.now).await, ["plain/s"], "the planner goes on with what it can read");
    assert_eq!(unreadable().await, ["broken/s", "junk/s", "newer/s", "shiny/s"]);
    let words: Vec<String> =
        store.unreadable().await.unwrap().iter().map(|found| found.why.to_string()).collect();
    assert!(words[0].contains("unknown field `shiny`"), "{words:?}");
    assert!(words[3].contains("written by a newer version of Belfry"), "{words:?}");
    assert_eq!(world.plan_all().await, 1);
    assert!(store.next_due().await.unwrap().is_none(), "and does not wait for the rest");

    let claimed = world.claim(node, 50).await;
    let names: Vec<String> = claimed.iter().map(|run| run.schedule).map(|id| id.to_string()).collect();
    let plain = world.schedule("plain/s").await.id.to_string();
    assert_eq!(names, [plain], "it claims only what it can read");
    for run in &claimed {
        world.complete(run).await;
    }

    let listed = store.schedules(&ScheduleFilter::default(), None, 100).await.unwrap().items;
    assert_eq!(listed.len(), NAMES.len(), "one that cannot be read takes no other from the list");
    for record in &listed {
        let is_read = record.name == "plain/s";
        assert_eq!(matches!(&record.status, Status::Invalid { .. }), !is_read, "{record:?}");
        assert_eq!(record.token.is_some(), is_read, "no next tick is shown: {record:?}");
        let alone = store.schedule(&record.name).await.unwrap().unwrap();
        assert_eq!((&alone.status, &alone.token), (&record.status, &record.token));
        let definitions = store.definitions(&[record.id]).await.unwrap().remove(0).unwrap();
        assert_eq!(definitions.unreadable.is_some(), !is_read, "{}", record.name);
    }
    let agents = store.agents().await.unwrap();
    let unread: Vec<&str> =
        agents.iter().filter(|agent| agent.unreadable.is_some()).map(|agent| agent.name.as_str()).collect();
    assert_eq!((agents.len(), unread), (NAMES.len(), vec!["broken", "newer"]));
    assert_eq!(sql("select count(*) from schedule_state where status <> 0").await, [0], "nothing is invalid");

    // The files of this version heal what is broken, and leave alone what a newer one wrote.
    world.apply(&fleet()).await;
    assert_eq!(sql("select count(*) from schedules where format = 999").await, [1]);
    assert_eq!(sql("select count(*) from agents where format = 999").await, [1]);
    assert_eq!(sql("select count(*) from gates where kind = 0 and cap = 7").await, [1], "and its limit");
    assert_eq!(unreadable().await, ["newer/s", "shiny/s"]);
    let mut names = due(world.now).await;
    names.sort();
    assert_eq!(names, ["broken/s", "junk/s", "plain/s"]);
    sql("update agents set format = 1 where name = 'newer'").await;
    assert_eq!(unreadable().await, ["shiny/s"]);
    assert!(due(world.now).await.contains(&"newer/s".to_owned()), "it is planned as soon as it can be read");
}

/// A run that waits and whose schedule cannot be read lets others pass, at a limit and in a scope that it wants for itself.
async fn others_pass<S: Store>(store: &S, sql: impl AsyncFn(&'static str) -> Vec<i64>) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let one = AgentDefinition { max_concurrent: Some(1), ..AgentDefinition::default() };
    let yearly = |if_running, overlap| {
        schedule(When::Cron("0 0 1 1 *".into()), Options { if_running, overlap, ..Options::default() })
    };
    let (free, alone) = (yearly(IfRunning::Allow, Scope::Schedule), yearly(IfRunning::Queue, Scope::Agent));
    let limited = agent("limited", one, &[("good", free.clone()), ("newer", free.clone())]);
    world.apply(&[limited, agent("scoped", unlimited(), &[("good", free), ("newer", alone)])]).await;
    for name in ["limited/good", "scoped/good"] {
        world.enqueue(name, None).await;
    }
    let running = world.claim(node, 50).await;
    assert_eq!(running.len(), 2);
    for name in ["limited/newer", "scoped/newer"] {
        world.enqueue(name, None).await;
    }
    world.advance(1);
    let waiting = [world.enqueue("limited/good", None).await.0, world.enqueue("scoped/good", None).await.0];
    assert_eq!(world.claim(node, 50).await, []);
    sql("update schedules set format = 999 where name like '%/newer'").await;
    assert_eq!(store.unreadable().await.unwrap().len(), 2);
    for run in &running {
        world.complete(run).await;
    }
    let claimed: Vec<_> = world.claim(node, 50).await.iter().map(|run| run.run).collect();
    assert_eq!(claimed, waiting);
}

#[tokio::test]
async fn an_older_node_leaves_newer_definitions_alone_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    let sql = async |path: &std::path::Path, text: &'static str| -> Vec<i64> {
        let file = rusqlite::Connection::open(path).unwrap();
        let mut statement = file.prepare(text).unwrap();
        statement.query_map([], |row| row.get(0)).unwrap().collect::<Result<_, _>>().unwrap()
    };
    let path = folder.path().join("belfry.db");
    holds(async || Sqlite::open(&path).unwrap(), async |text| sql(&path, text).await).await;
    let path = folder.path().join("other.db");
    others_pass(&Sqlite::open(&path).unwrap(), async |text| sql(&path, text).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_node_leaves_newer_definitions_alone_on_postgres() {
    let Some(url) = pg::fresh_database() else { return };
    let Some(other) = pg::fresh_database() else { return };
    let sql = async |url: &str, text: &'static str| -> Vec<i64> {
        let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        client.batch_execute("set search_path = belfry").await.unwrap();
        client.query(text, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
    };
    Box::pin(holds(async || Postgres::open(&url).await.unwrap(), async |text| sql(&url, text).await)).await;
    let store = Postgres::open(&other).await.unwrap();
    Box::pin(others_pass(&store, async |text| sql(&other, text).await)).await;
}
