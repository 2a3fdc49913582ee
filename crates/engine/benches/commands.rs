//! What commands cost while few and while many runs wait, beside bare inserts, in one run:
//!
//!     cargo bench -p belfry --bench commands [-- sqlite | postgres]

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use belfry::{AgentBuilder, AnyStore, Engine, Resume, RunId, RunRequest, When};
use belfry_store::postgres::Postgres;
use belfry_store::{RunFilter, Store};

#[path = "../../store/tests/support/pg.rs"]
mod pg;

const CLIENTS: usize = 64;
const MANY: usize = 100_000;
/// Requests one by one.
const REQUESTS: usize = 12_800;
/// Single commands.
const SINGLE: usize = 50;

fn main() {
    let only: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let wanted = |name: &str| only.is_empty() || only.iter().any(|word| word == name);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        if wanted("sqlite") {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("belfry.db");
            let bulk = bare_sqlite(&folder.path().join("bare.db"));
            let store = AnyStore::open(&format!("sqlite:{}", path.display()), true).await.unwrap();
            measure("sqlite", store, None, bulk).await;
        }
        if wanted("postgres") {
            pg::durable(true);
            let (Some(bare), Some(url)) = (pg::fresh_database(), pg::fresh_database()) else { return };
            let (single, bulk) = bare_postgres(&bare).await;
            let store = AnyStore::Postgres(Postgres::open(&url).await.unwrap());
            measure("postgres", store, Some(single), bulk).await;
        }
    });
}

async fn measure(name: &str, store: AnyStore, bare_single: Option<f64>, bare_bulk: f64) {
    let agent = AgentBuilder::new("a").schedule("s", When::Cron("0 0 1 1 *".into()));
    let agent = agent.define(|agent| agent.max_concurrent = None).build();
    let engine = Engine::builder().store(Arc::new(store)).build();
    engine.set_agents(vec![agent]).await.unwrap();
    if let Some(bare) = bare_single {
        println!("{name}: bare inserts, each a transaction         {bare:>9.0}/s");
    }
    let few = one_by_one(&engine).await;
    println!("{name}: trigger, {CLIENTS} clients, few wait          {few:>9.0}/s{}", of(few, bare_single));
    let few_costs = costs(&engine).await;
    let began = Instant::now();
    let made = engine.trigger_many("a/s", (0..MANY).map(|_| RunRequest::default())).await.unwrap();
    let bulk = made.len() as f64 / began.elapsed().as_secs_f64();
    println!("{name}: bare inserts, a thousand a transaction   {bare_bulk:>9.0}/s");
    println!("{name}: trigger_many                             {bulk:>9.0}/s{}", of(bulk, Some(bare_bulk)));
    let many = one_by_one(&engine).await;
    println!(
        "{name}: trigger, {CLIENTS} clients, {MANY} wait       {many:>9.0}/s, {:.2} of before",
        many / few
    );
    for ((what, few), (_, many)) in few_costs.into_iter().zip(costs(&engine).await) {
        let ratio = many.as_secs_f64() / few.as_secs_f64();
        println!("{name}: {what:<20} {few:>12.2?}  while {MANY} wait {many:>12.2?}  {ratio:>7.2} times");
    }
}

fn of(rate: f64, bare: Option<f64>) -> String {
    bare.map_or(String::new(), |bare| format!(", {:.2} of bare", rate / bare))
}

async fn one_by_one(engine: &Engine) -> f64 {
    let began = Instant::now();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let engine = engine.clone();
            tokio::spawn(async move {
                for _ in 0..REQUESTS / CLIENTS {
                    engine.trigger("a/s", RunRequest::default()).await.unwrap();
                }
            })
        })
        .collect();
    for client in clients {
        client.await.unwrap();
    }
    REQUESTS as f64 / began.elapsed().as_secs_f64()
}

/// The mean time of each command.
async fn costs(engine: &Engine) -> Vec<(&'static str, Duration)> {
    let mut costs = Vec::new();
    let mut runs: Vec<RunId> = Vec::new();
    let began = Instant::now();
    for _ in 0..SINGLE {
        runs.push(engine.trigger("a/s", RunRequest::default()).await.unwrap().run);
    }
    costs.push(("trigger", began.elapsed()));
    let began = Instant::now();
    for run in &runs {
        engine.cancel(*run).await.unwrap();
    }
    costs.push(("cancel", began.elapsed()));
    let began = Instant::now();
    for run in &runs {
        engine.retry(*run, None, None).await.unwrap();
    }
    costs.push(("retry", began.elapsed()));
    let began = Instant::now();
    for _ in 0..SINGLE {
        engine.pause("a/s", None, None).await.unwrap();
        engine.resume("a/s", Resume::Skip).await.unwrap();
    }
    costs.push(("pause and resume", began.elapsed()));
    let began = Instant::now();
    for _ in 0..SINGLE {
        engine.why("a/s", None).await.unwrap();
    }
    costs.push(("why", began.elapsed()));
    let began = Instant::now();
    for _ in 0..SINGLE {
        engine.store().runs(&RunFilter::default(), None, 50).await.unwrap();
    }
    costs.push(("a page of runs", began.elapsed()));
    let began = Instant::now();
    for _ in 0..SINGLE {
        engine.store().schedules(&Default::default(), None, 50).await.unwrap();
    }
    costs.push(("a page of schedules", began.elapsed()));
    let began = Instant::now();
    for _ in 0..SINGLE {
        engine.lanes().await.unwrap();
    }
    costs.push(("lanes", began.elapsed()));
    costs.into_iter().map(|(what, time)| (what, time / SINGLE as u32)).collect()
}

const BARE: &str =
    "create table bare (id text primary key, schedule bigint, lane text, due_at bigint, payload text)";

/// Bulk inserts a second into a table of a file.
fn bare_sqlite(path: &std::path::Path) -> f64 {
    let connection = rusqlite::Connection::open(path).unwrap();
    connection
        .execute_batch(&format!("pragma journal_mode = wal; pragma synchronous = full; {BARE}"))
        .unwrap();
    let began = Instant::now();
    for thousand in 0..MANY / 1000 {
        connection.execute_batch("begin").unwrap();
        let mut insert =
            connection.prepare_cached("insert into bare values (?, 1, 'cron', 5, '{}')").unwrap();
        for n in 0..1000 {
            insert.execute([format!("{:032}", thousand * 1000 + n)]).unwrap();
        }
        connection.execute_batch("commit").unwrap();
    }
    MANY as f64 / began.elapsed().as_secs_f64()
}

/// Inserts a second into a table of a database: each in a transaction on eight connections, and a thousand at once on one.
async fn bare_postgres(url: &str) -> (f64, f64) {
    let connect = async || {
        let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    };
    let first = connect().await;
    first.batch_execute(BARE).await.unwrap();
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push(connect().await);
    }
    let began = Instant::now();
    let tasks: Vec<_> = clients
        .into_iter()
        .enumerate()
        .map(|(place, client)| {
            tokio::spawn(async move {
                let insert =
                    client.prepare("insert into bare values ($1, 1, 'cron', 5, '{}')").await.unwrap();
                for n in 0..REQUESTS / 8 {
                    client.execute(&insert, &[&format!("{place}-{n}")]).await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let single = REQUESTS as f64 / began.elapsed().as_secs_f64();
    let began = Instant::now();
    for thousand in 0..MANY / 1000 {
        let ids: Vec<String> = (0..1000).map(|n| format!("{:032}", thousand * 1000 + n)).collect();
        let sql = "insert into bare select id, 1, 'cron', 5, '{}' from unnest($1::text[]) as ids (id)";
        first.execute(sql, &[&ids]).await.unwrap();
    }
    (single, MANY as f64 / began.elapsed().as_secs_f64())
}
