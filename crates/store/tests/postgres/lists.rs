//! Lists stay quick however much there is: no page reads a large table from end to end.
//!
//! `BELFRY_LIST_SCHEDULES=100000 BELFRY_LIST_RUNS=10000000` is what it is meant for; the default is as much as it takes for
//! PostgreSQL to prefer an index. How long each page took is printed, and with `BELFRY_LIST_MS_MAX` judged.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use belfry_core::definition::When;
use belfry_core::{AgentDefinition, RunId, RunState, ScheduleDefinition};
use belfry_store::postgres::Postgres;
use belfry_store::{AgentSpec, Page, RunFilter, RunRecord, ScheduleFilter, StatusKind, Store};
use belfry_time::Timestamp;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::pg;

/// Tables that grow with what people have.
const LARGE: [&str; 4] = ["history", "schedules", "schedule_state", "timers"];

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute("set search_path = belfry").await.unwrap();
    client
}

fn agents(schedules: u64) -> Vec<AgentSpec> {
    const AGENTS: u64 = 100;
    let all = 0..AGENTS;
    all.map(|agent| AgentSpec {
        name: format!("agent{agent:03}"),
        definition: AgentDefinition::default(),
        schedules: (0..schedules / AGENTS)
            .map(|n| (format!("s{n:05}"), ScheduleDefinition::new(When::Cron("0 0 1 1 *".into()))))
            .collect(),
    })
    .collect()
}

/// Ended runs, each behind the one before it of its schedule.
const FILL: &str = "
    insert into history (id, seq, failed, ordinal, prev_run, schedule_id, agent_id, command, trigger, not_before, state, lane,
        attempt, max_attempts, epoch, payload, created_at, started_at, finished_at, session)
    select run_id(i), i, i % 50 = 0, i / $2, case when i >= $2 then run_id(i - $2) end, s.id, s.agent_id, 'poll', 0, at, 
        case when i % 50 = 0 then 3 else 2 end, 'cron', 1, 4, 1, '{}', at, at, at,
        case when i = 0 then 'rare' when i % 100 = 0 then 'often' end
    from generate_series($3::bigint, $4::bigint - 1) i
    join numbered s on s.place = i % $2
    cross join lateral (select '2026-01-01T00:00:00Z'::timestamptz + i * '1 millisecond'::interval) t (at)
    where $1";

async fn fill(client: &Client, schedules: u64, runs: u64) {
    client
        .batch_execute(
            "create function run_id(i bigint) returns uuid language sql immutable as $$
                select (lpad(to_hex(1767225600000 + i), 12, '0') || '70008000' || lpad(to_hex(i), 12, '0'))::uuid $$;
             create table numbered as
                select row_number() over (order by id) - 1 as place, id, agent_id from schedules;
             alter table numbered add primary key (place);
             analyze numbered",
        )
        .await
        .unwrap();
    const BATCH: u64 = 500_000;
    for from in (0..runs).step_by(BATCH as usize) {
        let to = (from + BATCH).min(runs);
        client.execute(FILL, &[&true, &(schedules as i64), &(from as i64), &(to as i64)]).await.unwrap();
    }
    let last = "update schedule_state s set last_other = run_id($1::bigint - $2 + n.place)
                from numbered n where n.id = s.schedule_id";
    client.execute(last, &[&(runs as i64), &(schedules as i64)]).await.unwrap();
    client.batch_execute("vacuum analyze").await.unwrap();
}

/// How often each large table was read from end to end, and by an index.
async fn scans(client: &Client) -> BTreeMap<String, (i64, i64)> {
    client.batch_execute("select pg_stat_clear_snapshot()").await.unwrap();
    let sql = "select relname::text, seq_scan, coalesce(idx_scan, 0) from pg_stat_user_tables where schemaname = 'belfry'";
    let rows = client.query(sql, &[]).await.unwrap();
    let all = rows.iter().map(|row| (row.get::<_, String>(0), (row.get(1), row.get(2))));
    all.filter(|(name, _)| LARGE.contains(&name.as_str())).collect()
}

struct Times(Vec<(String, Duration)>);

impl Times {
    /// The best of three: the first one fills caches.
    async fn take<T>(&mut self, what: &str, page: impl AsyncFn() -> T) -> T {
        let mut best = Duration::MAX;
        let mut last = None;
        for _ in 0..3 {
            let began = Instant::now();
            last = Some(page().await);
            best = best.min(began.elapsed());
        }
        println!("{:>8.1} ms  {what}", best.as_secs_f64() * 1000.0);
        self.0.push((what.to_owned(), best));
        last.unwrap()
    }
}

#[tokio::test]
async fn no_page_of_a_list_reads_a_large_table_from_end_to_end() {
    let Some(url) = pg::fresh_database() else { return };
    let (schedules, runs) = (number("BELFRY_LIST_SCHEDULES", 5_000), number("BELFRY_LIST_RUNS", 100_000));
    let store = Postgres::open(&url).await.unwrap();
    let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    store.apply(now, "files", "d", &agents(schedules)).await.unwrap();
    // A new one: what is planned on an empty table stays so.
    drop(store);
    let client = connect(&url).await;
    fill(&client, schedules, runs).await;
    // Those who filled it have told what they did once they are gone.
    drop(client);
    let client = connect(&url).await;
    let before = scans(&client).await;
    let store = Postgres::open(&url).await.unwrap();
    let times = all_pages(&store, runs).await;
    drop(store);
    let store = Postgres::open(&url).await.unwrap();
    store.explained().take();
    all_pages(&store, runs).await;
    let plans = store.explained().take();
    for table in ["history", "schedules"] {
        assert!(
            plans.iter().any(|(_, plan)| plan.contains(&format!(" on {table}"))),
            "nobody has looked at {table}"
        );
    }
    for (sql, plan) in &plans {
        for table in LARGE {
            assert!(!plan.contains(&format!("Seq Scan on {table}")), "{sql}\n{plan}");
        }
    }
    drop(store);
    let began = Instant::now();
    let after = loop {
        let after = scans(&client).await;
        if after["history"].1 > before["history"].1 && after["schedules"].1 > before["schedules"].1 {
            break after;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "nothing was counted: {before:?} {after:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    for table in LARGE {
        assert_eq!(before[table].0, after[table].0, "{table} was read from end to end");
    }
    if let Ok(most) = std::env::var("BELFRY_LIST_MS_MAX") {
        let most = Duration::from_millis(most.parse().unwrap());
        for (what, time) in times.0 {
            assert!(time < most, "{what} took {time:?}");
        }
    }
}

async fn all_pages(store: &Postgres, runs: u64) -> Times {
    let mut times = Times(Vec::new());
    let none = ScheduleFilter::default();
    let of_agent = ScheduleFilter { agent: Some("agent050".into()), ..ScheduleFilter::default() };
    let paused = ScheduleFilter { status: vec![StatusKind::Active], ..ScheduleFilter::default() };
    for (what, filter, after) in [
        ("schedules, first page", &none, None),
        ("schedules, in the middle", &none, Some("agent050/s00000")),
        ("schedules of an agent", &of_agent, None),
        ("schedules that are active", &paused, None),
    ] {
        let page = times.take(what, async || store.schedules(filter, after, 100).await.unwrap()).await;
        assert!(!page.items.is_empty());
    }
    times.take("a schedule", async || store.schedule("agent050/s00007").await.unwrap().unwrap()).await;
    let filter = |agent: Option<&str>, schedule: Option<&str>, state: Option<RunState>| RunFilter {
        agent: agent.map(str::to_owned),
        schedule: schedule.map(str::to_owned),
        states: state.into_iter().collect(),
        ..RunFilter::default()
    };
    let middle = RunId(Uuid::from_u128(u128::from(1_767_225_600_000 + runs / 2) << 80));
    for (what, filter, after) in [
        ("runs, first page", filter(None, None, None), None),
        ("runs, in the middle", filter(None, None, None), Some(middle)),
        ("runs of an agent", filter(Some("agent050"), None, None), None),
        ("runs of a schedule", filter(None, Some("agent050/s00007"), None), None),
        ("runs that failed", filter(None, None, Some(RunState::Failed)), None),
        ("runs that are live", filter(None, None, Some(RunState::Running)), None),
    ] {
        let page: Page<RunRecord, RunId> =
            times.take(what, async || store.runs(&filter, after, 100).await.unwrap()).await;
        // A page looks at a bounded number of runs, and may find none among them.
        let may_go_on = page.next.is_some() || filter.states == [RunState::Running];
        assert!(!page.items.is_empty() || may_go_on, "{what}");
    }
    for (what, session) in [("runs of a session", "often"), ("runs of a session, one long ago", "rare")] {
        let filter = RunFilter { session: Some(session.into()), ..RunFilter::default() };
        let page = times.take(what, async || store.runs(&filter, None, 100).await.unwrap()).await;
        assert!(!page.items.is_empty(), "{what}");
    }
    times.take("a run", async || store.run(middle).await.unwrap()).await;
    times
}
