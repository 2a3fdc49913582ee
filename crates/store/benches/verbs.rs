//! The bare throughput of the verbs, beside a loop written by hand on the same driver, in one run:
//!
//!     cargo bench -p belfry-store
//!
//! With `-- postgres` or `-- sqlite` only that one. `BELFRY_HISTORY=10000000` puts that many ended runs into the store first; `BELFRY_RUNS` and `BELFRY_SCHEDULES` change
//! how much is measured; `BELFRY_FSYNC=off` leaves the disk out on PostgreSQL.

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

use std::path::Path;
use std::time::{Duration, Instant};

use belfry_core::definition::{Options, When};
use belfry_core::rescue::Rescues;
use belfry_core::retry::Verdict;
use belfry_core::{AgentDefinition, NodeId, RunId, RunState, ScheduleDefinition, plan};
use belfry_store::postgres::Postgres;
use belfry_store::sqlite::Sqlite;
use belfry_store::*;
use belfry_time::{SignedDuration, Timestamp};
use uuid::Uuid;

#[path = "../tests/support/pg.rs"]
mod pg;

const BATCH: usize = 100;
const TURNS: usize = 10;

fn number(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (runs, schedules, history) =
        (number("BELFRY_RUNS", 20_000), number("BELFRY_SCHEDULES", 100_000), number("BELFRY_HISTORY", 0));
    println!("runs {runs}, schedules {schedules}, batch {BATCH}, history {history}");
    let only: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let wanted = |name: &str| only.is_empty() || only.iter().any(|word| word == name);
    runtime.block_on(async {
        if wanted("sqlite") {
            sqlite(runs, schedules, history).await;
        }
        if wanted("postgres") {
            postgres(runs, schedules, history).await;
        }
    });
}

async fn sqlite(runs: usize, schedules: usize, history: usize) {
    let folder = tempfile::tempdir().unwrap();
    let mut by_hand = ByHand::Sqlite(sqlite_by_hand(&folder.path().join("hand.db"), 2 * runs));
    let path = folder.path().join("belfry.db");
    let store = Sqlite::serve(&path).unwrap();
    if history > 0 {
        fill_sqlite(&path, history);
    }
    measure("sqlite", &store, &mut by_hand, runs, schedules).await;
}

async fn postgres(runs: usize, schedules: usize, history: usize) {
    // What is answered is on disk, on both sides, unless somebody wants to see the processor's part alone.
    pg::durable(std::env::var("BELFRY_FSYNC").as_deref() != Ok("off"));
    let (Some(by_hand_url), Some(url)) = (pg::fresh_database(), pg::fresh_database()) else { return };
    let mut by_hand = ByHand::Postgres(PostgresByHand::fill(&by_hand_url, 2 * runs).await);
    let store = Postgres::open(&url).await.unwrap();
    if history > 0 {
        fill_postgres(&url, history).await;
    }
    measure("postgres", &store, &mut by_hand, runs, schedules).await;
}

/// A loop written by hand.
enum ByHand {
    Sqlite(rusqlite::Connection),
    Postgres(PostgresByHand),
}

impl ByHand {
    async fn work_off(&mut self, runs: usize) -> Duration {
        match self {
            ByHand::Sqlite(connection) => sqlite_work_off(connection, runs),
            ByHand::Postgres(by_hand) => by_hand.work_off(runs).await,
        }
    }
}

/// Times both in turns, so that whatever else the machine does falls on both.
async fn compare<S: Store>(
    name: &str,
    what: &str,
    (store, node, now): (&S, NodeId, Timestamp),
    by_hand: &mut ByHand,
    runs: usize,
) {
    let (mut ours, mut theirs) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..TURNS {
        theirs += by_hand.work_off(runs / TURNS).await;
        ours += work_off(store, node, now, runs / TURNS).await;
    }
    let rate = |time: Duration| runs as f64 / time.as_secs_f64();
    println!("{name}: by hand            {:>9.0} runs/s", rate(theirs));
    let ratio = theirs.as_secs_f64() / ours.as_secs_f64();
    println!("{name}: {what:<18} {:>9.0} runs/s   {ratio:.2} of by hand", rate(ours));
}

fn start() -> Timestamp {
    "2026-03-02T12:00:00Z".parse().unwrap()
}

async fn measure<S: Store>(name: &str, store: &S, by_hand: &mut ByHand, runs: usize, schedules: usize) {
    let node = Node {
        id: NodeId(Uuid::from_u128(1)),
        host: "here".into(),
        pid: 1,
        labels: Vec::new(),
        started_at: start(),
        lease_until: start() + SignedDuration::from_hours(1000),
        fenced: false,
        draining: false,
        last_seen_at: start(),
        max_concurrent: None,
        process: Default::default(),
    };
    store.join(&node, None).await.unwrap();
    let minutely = |n: usize| {
        let options = Options { if_running: belfry_core::definition::IfRunning::Allow, ..Options::default() };
        (format!("s{n}"), ScheduleDefinition { when: When::Cron("*/5 * * * *".into()), options })
    };
    let agent = |name: &str, max_concurrent, n: usize| AgentSpec {
        name: name.into(),
        definition: AgentDefinition { max_concurrent, ..AgentDefinition::default() },
        schedules: (0..n).map(minutely).collect(),
    };
    let began = Instant::now();
    store
        .apply(start(), "files", "1", &[agent("free", None, schedules), agent("gated", Some(1_000), 1)])
        .await
        .unwrap();
    println!(
        "{name}: apply              {:>9.0} schedules/s",
        schedules as f64 / began.elapsed().as_secs_f64()
    );
    let mut ids = 0;
    plan_all(store, start(), &mut ids).await;
    let now = start() + SignedDuration::from_mins(5);
    let began = Instant::now();
    let planned = plan_all(store, now, &mut ids).await;
    println!("{name}: plan               {:>9.0} ticks/s", planned as f64 / began.elapsed().as_secs_f64());
    // What was planned makes the runs of the first measurement.
    compare(name, "claim + finish", (store, node.id, now), by_hand, runs.min(planned)).await;
    work_off(store, node.id, now, usize::MAX).await;
    let record = store.schedule("gated/s0").await.unwrap().unwrap();
    let compiled = record.definition.compile("gated/s0").unwrap();
    let definition = AgentDefinition { max_concurrent: Some(1_000), ..AgentDefinition::default() };
    for _ in 0..runs {
        ids += 1;
        let run = NewRun::by_hand(
            Defined::new(record.agent, record.id, &compiled, &definition),
            RunId(Uuid::from_u128(ids << 64)),
            now,
        );
        store.enqueue(now, &Enqueue { run, key: None }).await.unwrap();
    }
    compare(name, "behind a limit", (store, node.id, now), by_hand, runs).await;
}

/// Plans as a node does: what is due next is read while a batch is committed.
async fn plan_all<S: Store>(store: &S, now: Timestamp, ids: &mut u128) -> usize {
    const LIMIT: u32 = 1000;
    let mut planned = 0;
    let mut due = store.due(now, None, LIMIT).await.unwrap();
    while let Some(last) = due.last() {
        let mark = last.mark();
        let commits: Vec<Commit> = due
            .iter()
            .map(|due| {
                let schedule = due.compiled.clone().unwrap();
                due.commit(&schedule, plan(&schedule, &due.standing, &due.facts(now), now), || {
                    *ids += 1;
                    RunId(Uuid::from_u128(*ids << 64))
                })
            })
            .collect();
        let (committed, ahead) = tokio::join!(store.commit(now, &commits), store.due(now, Some(mark), LIMIT));
        planned += committed.unwrap().into_iter().filter(|committed| *committed == Committed::Held).count();
        due = ahead.unwrap();
    }
    planned
}

/// Claims and finishes as a node does: what has ended and what is claimed next go to the store together.
async fn work_off<S: Store>(store: &S, node: NodeId, now: Timestamp, runs: usize) -> Duration {
    let claim = Claim {
        node,
        lanes: vec![("cron".into(), BATCH as u32)],
        labels: Vec::new(),
        total: u32::MAX,
        only: None,
        rescues: Rescues::Any,
    };
    let began = Instant::now();
    let mut done = 0;
    let mut running: Vec<Claimed> = Vec::new();
    while done < runs {
        let finishes: Vec<Finish> = running.iter().map(completed).collect();
        let (finished, claimed) = tokio::join!(store.finish(now, &finishes), store.claim(now, &claim));
        done += finished.unwrap().len();
        running = claimed.unwrap();
        if running.is_empty() {
            break;
        }
    }
    let took = began.elapsed();
    let finishes: Vec<Finish> = running.iter().map(completed).collect();
    store.finish(now, &finishes).await.unwrap();
    took
}

fn completed(claimed: &Claimed) -> Finish {
    Finish {
        run: claimed.run,
        epoch: claimed.epoch,
        verdict: Verdict::End { state: RunState::Completed, reason: None },
        failed: false,
        exit_code: Some(0),
        error: None,
        summary: None,
        usage: None,
        arm: None,
    }
}

/// The least that claims a batch and ends it with history kept, by hand: jobs in the order in which they are due; each end
/// fenced, and kept where it can be found again by its job and by its schedule. One table of jobs, one of history.
///
/// It does nothing else: no limits, lanes, labels or priorities, no leases, no retries, and a schedule knows nothing of how
/// its runs have ended.
fn sqlite_by_hand(path: &Path, runs: usize) -> rusqlite::Connection {
    let connection = rusqlite::Connection::open(path).unwrap();
    connection.pragma_update(None, "journal_mode", "wal").unwrap();
    connection.pragma_update(None, "synchronous", "full").unwrap();
    connection
        .execute_batch(
            "create table jobs (id blob primary key, state integer, node blob, epoch integer, attempt integer, schedule integer, tick_at integer,
                                due_at integer, command text, payload text, created_at integer, started_at integer) without rowid;
             create index jobs_ready on jobs (due_at, id) where state = 0;
             create table history (id blob primary key, schedule integer, tick_at integer, command text, state integer, attempt integer,
                                   exit_code integer, created_at integer, started_at integer, finished_at integer) without rowid;
             create index history_schedule on history (schedule, finished_at);",
        )
        .unwrap();
    connection.execute_batch("begin").unwrap();
    for n in 0..runs {
        let id = (((n as u128) + 1) << 64).to_be_bytes();
        let parameters = rusqlite::params![id, n as i64, 0i64, 0i64, "poll", "{}", 0i64];
        let insert = "insert into jobs (id, state, epoch, attempt, schedule, tick_at, due_at, command, payload, created_at)
                      values (?, 0, 0, 0, ?, ?, ?, ?, ?, ?)";
        connection.prepare_cached(insert).unwrap().execute(parameters).unwrap();
    }
    connection.execute_batch("commit").unwrap();
    connection
}

fn sqlite_work_off(connection: &rusqlite::Connection, runs: usize) -> Duration {
    let began = Instant::now();
    let mut done = 0;
    while done < runs {
        connection.execute_batch("begin immediate").unwrap();
        let mut statement = connection
            .prepare_cached(
                "update jobs set state = 2, node = x'01', epoch = epoch + 1, attempt = attempt + 1, started_at = 1
                 where id in (select id from jobs where state = 0 and due_at <= 1 order by due_at, id limit 100)
                 returning id, epoch, command, payload",
            )
            .unwrap();
        let claimed: Vec<[u8; 16]> =
            statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
        assert!(!claimed.is_empty(), "no jobs are left: BELFRY_RUNS is too small for the turns");
        connection.execute_batch("commit").unwrap();
        connection.execute_batch("begin immediate").unwrap();
        for id in &claimed {
            let insert = "insert into history (id, schedule, tick_at, command, state, attempt, exit_code, created_at, started_at, finished_at)
                          select id, schedule, tick_at, command, 1, attempt, 0, created_at, started_at, 2 from jobs where id = ? and epoch = 1";
            connection.prepare_cached(insert).unwrap().execute([id]).unwrap();
            connection
                .prepare_cached("delete from jobs where id = ? and epoch = 1")
                .unwrap()
                .execute([id])
                .unwrap();
        }
        connection.execute_batch("commit").unwrap();
        done += claimed.len();
    }
    began.elapsed()
}

fn fill_sqlite(path: &Path, rows: usize) {
    let began = Instant::now();
    let connection = rusqlite::Connection::open(path).unwrap();
    connection.busy_timeout(Duration::from_secs(60)).unwrap();
    connection
        .execute_batch(&format!(
            "insert into history (id, place, ordinal, schedule_id, tick_at, agent_id, command, trigger, lane, not_before, state, attempt, max_attempts, epoch,
                                  created_at, finished_at)
             with recursive n(i) as (select 1 union all select i + 1 from n where i < {rows})
             select cast(printf('%016d', i) as blob), i, i, i % 100000, i, 1, 'poll', 0, 'cron', 0, 2, 1, 4, 1, 0, i from n"
        ))
        .unwrap();
    // What filling it has left to do is none of what is measured.
    connection.query_row("pragma wal_checkpoint(truncate)", [], |_| Ok(())).unwrap();
    println!("sqlite: {rows} rows of history in {:.0} s", began.elapsed().as_secs_f64());
}

async fn connect(url: &str) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// The same as [`sqlite_by_hand`], with what PostgreSQL is good at: whole batches in one statement, and jobs taken past what
/// others have locked. It claims and ends in turn on one connection, as such a loop does.
struct PostgresByHand {
    client: tokio_postgres::Client,
    claim: tokio_postgres::Statement,
    finish: tokio_postgres::Statement,
}

impl PostgresByHand {
    async fn fill(url: &str, runs: usize) -> PostgresByHand {
        let client = connect(url).await;
        client
            .batch_execute(&format!(
                "create table jobs (id uuid primary key, state smallint not null, node uuid, epoch int not null, attempt int not null,
                                    schedule bigint, tick_at timestamptz, due_at timestamptz not null, command text, payload text,
                                    created_at timestamptz, started_at timestamptz) with (fillfactor = 80);
                 create index jobs_ready on jobs (due_at, id) where state = 0;
                 create table history (id uuid primary key, schedule bigint, tick_at timestamptz, command text, state smallint, attempt int,
                                       exit_code int, created_at timestamptz, started_at timestamptz, finished_at timestamptz);
                 create index history_schedule on history (schedule, finished_at);
                 insert into jobs select lpad(to_hex(n), 32, '0')::uuid, 0, null, 0, 0, n, now(), now(), 'poll', '{{}}', now(), null
                     from generate_series(1, {runs}) n;
                 analyze jobs"
            ))
            .await
            .unwrap();
        let claim = "update jobs set state = 2, node = $1, epoch = epoch + 1, attempt = attempt + 1, started_at = now() where id = any(array(
                     select id from jobs where state = 0 and due_at <= now() order by due_at, id limit 100 for update skip locked))
                     returning id, epoch, command, payload";
        let claim = client.prepare(claim).await.unwrap();
        let finish = "with ended as (delete from jobs where id = any($1) and epoch = 1 returning *) insert into history
                      select id, schedule, tick_at, command, 2, attempt, 0, created_at, started_at, now() from ended";
        let finish = client.prepare(finish).await.unwrap();
        PostgresByHand { client, claim, finish }
    }

    async fn work_off(&self, runs: usize) -> Duration {
        let began = Instant::now();
        let mut done = 0;
        while done < runs {
            let claimed = self.client.query(&self.claim, &[&Uuid::from_u128(1)]).await.unwrap();
            let ids: Vec<Uuid> = claimed.iter().map(|row| row.get(0)).collect();
            assert!(!ids.is_empty(), "no jobs are left: BELFRY_RUNS is too small for the turns");
            done += self.client.execute(&self.finish, &[&ids]).await.unwrap() as usize;
        }
        began.elapsed()
    }
}

async fn fill_postgres(url: &str, rows: usize) {
    let began = Instant::now();
    let fill = "insert into belfry.history (seq, finished_at, id, failed, ordinal, schedule_id, agent_id, command, trigger, lane, not_before, state, attempt,
                                            max_attempts, epoch, payload, created_at)
                select n, '2000-01-01'::timestamptz + n * interval '1 s', lpad(to_hex(n), 32, '0')::uuid, false, n, n % 100000, 1, 'poll', 0, 'cron', now(), 2,
                       1, 4, 1, '{}', now() from generate_series(1, $1::bigint) n";
    let client = connect(url).await;
    client.execute(fill, &[&(rows as i64)]).await.unwrap();
    // What filling it has left to do is none of what is measured.
    client.batch_execute("vacuum analyze belfry.history").await.unwrap();
    client.batch_execute("checkpoint").await.unwrap();
    println!("postgres: {rows} rows of history in {:.0} s", began.elapsed().as_secs_f64());
}
