//! The store in PostgreSQL, where it differs from the others: many clients at once on a real server.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use belfry_core::definition::{IfRunning, Scope, When};
use belfry_core::rescue::Rescues;
use belfry_core::retry::Verdict;
use belfry_core::{AgentDefinition, NodeId, RunId, RunState, ScheduleDefinition};
use belfry_store::postgres::Postgres;
use belfry_store::sabotage::Sabotage;
use belfry_store::*;
use belfry_time::{SignedDuration, Timestamp};
use uuid::Uuid;

use crate::pg;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).unwrap()
}

fn spec(max_concurrent: Option<u32>) -> AgentSpec {
    let mut schedule = ScheduleDefinition::new(When::Cron("* * * * *".into()));
    schedule.options.if_running = IfRunning::Allow;
    AgentSpec {
        name: "owl".into(),
        definition: AgentDefinition { max_concurrent, ..AgentDefinition::default() },
        schedules: vec![("hourly".into(), schedule)],
    }
}

async fn joined(store: &Postgres) -> NodeId {
    let id = NodeId(Uuid::now_v7());
    let node = Node {
        id,
        host: "here".into(),
        pid: 1,
        labels: Vec::new(),
        started_at: at(0),
        lease_until: at(1_000),
        fenced: false,
        draining: false,
        last_seen_at: at(0),
        max_concurrent: None,
        process: Default::default(),
    };
    store.join(&node, None).await.unwrap();
    id
}

async fn enqueue(store: &Postgres, name: &str, definition: &AgentDefinition, runs: u32) -> Vec<RunId> {
    let record = store.schedule(name).await.unwrap().unwrap();
    let schedule = record.definition.compile(name).unwrap();
    let mut made = Vec::new();
    for _ in 0..runs {
        let id = RunId(Uuid::now_v7());
        let run = NewRun::by_hand(Defined::new(record.agent, record.id, &schedule, definition), id, at(0));
        assert_eq!(store.enqueue(at(0), &Enqueue { run, key: None }).await.unwrap(), Enqueued::Made);
        made.push(id);
    }
    made
}

fn claim(node: NodeId, slots: u32) -> Claim {
    Claim {
        node,
        lanes: vec![("cron".into(), slots)],
        total: u32::MAX,
        labels: Vec::new(),
        only: None,
        rescues: Rescues::Any,
    }
}

fn done(run: &Claimed) -> Finish {
    Finish {
        run: run.run,
        epoch: run.epoch,
        verdict: Verdict::End { state: RunState::Completed, reason: None },
        failed: false,
        exit_code: Some(0),
        error: None,
        summary: None,
        usage: None,
        arm: None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_number_of_nodes_may_start_at_once_on_an_empty_database() {
    let Some(url) = pg::fresh_database() else { return };
    let opening: Vec<_> = (0..8)
        .map(|_| {
            let url = url.clone();
            tokio::spawn(async move { Postgres::open(&url).await.map(drop) })
        })
        .collect();
    for open in opening {
        open.await.unwrap().unwrap();
    }
    assert_eq!(Postgres::open(&url).await.unwrap().integrity().await.unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn a_newer_schema_and_a_foreign_one_are_left_alone() {
    let Some(url) = pg::fresh_database() else { return };
    drop(Postgres::open(&url).await.unwrap());
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute("insert into belfry.migrations values (99, 'later', now())").await.unwrap();
    assert!(matches!(Postgres::open(&url).await, Err(Error::Newer { found: 99, .. })));

    let Some(url) = pg::fresh_database() else { return };
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute("create schema belfry; create table belfry.bells (id int)").await.unwrap();
    assert!(matches!(Postgres::open(&url).await, Err(Error::Foreign { .. })));
    assert!(client.query("select * from belfry.migrations", &[]).await.is_err());
}

#[tokio::test]
async fn a_tick_is_planned_claimed_and_finished() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let agent = spec(Some(1));
    let applied = store.apply(at(0), "files", "1", std::slice::from_ref(&agent)).await.unwrap();
    assert_eq!((applied.added, store.source_digest("files").await.unwrap().as_deref()), (1, Some("1")));
    let node = joined(&store).await;
    let mut now = at(0);
    let mut planned = Vec::new();
    while planned.is_empty() {
        now = store.next_due().await.unwrap().unwrap().max(now);
        for due in store.due(now, None, 100).await.unwrap() {
            let schedule = due.compiled.clone().unwrap();
            let plan = belfry_core::plan(&schedule, &due.standing, &due.facts(now), now);
            let commit = due.commit(&schedule, plan, || RunId(Uuid::now_v7()));
            assert_eq!(store.commit(now, std::slice::from_ref(&commit)).await.unwrap(), [Committed::Held]);
            assert_eq!(
                store.commit(now, std::slice::from_ref(&commit)).await.unwrap(),
                [Committed::Lost],
                "its token is gone"
            );
            planned.extend(commit.runs);
        }
    }
    let claimed = store.claim(now, &claim(node, 5)).await.unwrap();
    assert_eq!(claimed.len(), 1);
    assert_eq!(claimed[0].run, planned[0].id);
    assert_eq!(store.counts().await.unwrap(), Counts { pending: 0, running: 1, ended: 0 });
    let finished = store.finish(now, &[done(&claimed[0]), done(&claimed[0])]).await.unwrap();
    assert_eq!(finished, [Finished::Ended(RunState::Completed), Finished::Stale]);
    let record = store.schedule("owl/hourly").await.unwrap().unwrap();
    assert_eq!(record.last.unwrap().run, planned[0].id);
    let ended = store.ended_runs(record.id, 10).await.unwrap();
    assert_eq!(ended.len(), 1);
    assert_eq!(store.run(planned[0].id).await.unwrap().unwrap(), ended[0]);
    assert_eq!(store.integrity().await.unwrap(), Vec::<String>::new());
}

/// Eight claimers at a gate, until nothing is left or nothing has moved for a while. Gives the most that were running at
/// once, and how many came to their end.
async fn crowd(url: &str, store: Arc<Postgres>, runs: u32, broken: Sabotage) -> (u32, u32) {
    store.sabotage.set(broken);
    let running = Arc::new(AtomicU32::new(0));
    let most = Arc::new(AtomicU32::new(0));
    let ended = Arc::new(AtomicU32::new(0));
    let over = Arc::new(AtomicBool::new(false));
    let mut claimers = Vec::new();
    for _ in 0..8 {
        let own = Postgres::open(url).await.unwrap();
        own.sabotage.set(broken);
        let node = joined(&own).await;
        let (running, most, ended, over) = (running.clone(), most.clone(), ended.clone(), over.clone());
        claimers.push(tokio::spawn(async move {
            while !over.load(Ordering::SeqCst) {
                let claimed = own.claim(at(1), &claim(node, 3)).await.unwrap();
                let more = claimed.len() as u32;
                most.fetch_max(running.fetch_add(more, Ordering::SeqCst) + more, Ordering::SeqCst);
                for run in &claimed {
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                    // Before the store knows, so that what is counted is never more than what runs.
                    running.fetch_sub(1, Ordering::SeqCst);
                    own.finish(at(1), &[done(run)]).await.unwrap();
                    ended.fetch_add(1, Ordering::SeqCst);
                }
            }
        }));
    }
    let (mut last, mut still) = (0, 0);
    while last < runs && still < 100 {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        let now = ended.load(Ordering::SeqCst);
        still = if now == last { still + 1 } else { 0 };
        last = now;
    }
    over.store(true, Ordering::SeqCst);
    for claimer in claimers {
        claimer.await.unwrap();
    }
    (most.load(Ordering::SeqCst), ended.load(Ordering::SeqCst))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gate_of_one_holds_against_eight_claimers_and_nobody_stays_parked() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Arc::new(Postgres::open(&url).await.unwrap());
    let agent = spec(Some(1));
    store.apply(at(0), "files", "1", std::slice::from_ref(&agent)).await.unwrap();
    enqueue(&store, "owl/hourly", &agent.definition, 150).await;
    let (most, ended) = crowd(&url, store.clone(), 150, Sabotage::None).await;
    assert_eq!((most, ended), (1, 150));
    assert_eq!(store.counts().await.unwrap(), Counts { pending: 0, running: 0, ended: 150 });
    assert_eq!(store.integrity().await.unwrap(), Vec::<String>::new());
    let schedule = store.schedule("owl/hourly").await.unwrap().unwrap().id;
    let ended: HashSet<RunId> =
        store.ended_runs(schedule, 1_000).await.unwrap().iter().map(|run| run.id).collect();
    assert_eq!(ended.len(), 150);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counting_before_the_lock_lets_too_many_through() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Arc::new(Postgres::open(&url).await.unwrap());
    let agent = spec(Some(1));
    store.apply(at(0), "files", "1", std::slice::from_ref(&agent)).await.unwrap();
    enqueue(&store, "owl/hourly", &agent.definition, 150).await;
    let (most, _) = crowd(&url, store.clone(), 150, Sabotage::CountBeforeLock).await;
    assert!(most > 1, "the sabotage must show");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releasing_outside_the_lock_leaves_runs_parked() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Arc::new(Postgres::open(&url).await.unwrap());
    let agent = spec(Some(1));
    store.apply(at(0), "files", "1", std::slice::from_ref(&agent)).await.unwrap();
    enqueue(&store, "owl/hourly", &agent.definition, 30).await;
    let (_, ended) = crowd(&url, store.clone(), 30, Sabotage::ReleaseOutsideLock).await;
    assert!(ended < 30, "the sabotage must show");
    assert_ne!(store.integrity().await.unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn a_raised_limit_releases_and_a_fenced_node_gets_nothing() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let mut agent = spec(Some(1));
    store.apply(at(0), "files", "1", std::slice::from_ref(&agent)).await.unwrap();
    let node = joined(&store).await;
    enqueue(&store, "owl/hourly", &agent.definition, 6).await;
    assert_eq!(store.claim(at(1), &claim(node, 9)).await.unwrap().len(), 1);
    assert_eq!(store.claim(at(1), &claim(node, 9)).await.unwrap().len(), 0);
    agent.definition.max_concurrent = Some(3);
    store.apply(at(2), "files", "2", std::slice::from_ref(&agent)).await.unwrap();
    assert_eq!(store.claim(at(3), &claim(node, 9)).await.unwrap().len(), 2);
    agent.definition.max_concurrent = None;
    store.apply(at(4), "files", "3", std::slice::from_ref(&agent)).await.unwrap();
    let taken = store.claim(at(5), &claim(node, 2)).await.unwrap();
    assert_eq!(taken.len(), 2);
    assert_eq!(
        store.give_back(at(5), node, &[(taken[0].run, taken[0].epoch), (taken[1].run, 99)]).await.unwrap(),
        [(taken[0].run, RunState::Pending)]
    );
    assert_eq!(store.integrity().await.unwrap(), Vec::<String>::new());
    assert_eq!(store.fence(at(6), node, at(1)).await.unwrap(), None, "its lease is another");
    let rescued = store.fence(at(6), node, at(1_000)).await.unwrap().unwrap();
    assert_eq!((rescued.pending.len(), rescued.ended.len()), (4, 0));
    assert_eq!(store.claim(at(7), &claim(node, 9)).await.unwrap(), []);
    assert_eq!(store.renew(node, at(2_000)).await.unwrap(), Renewed::Fenced);
    assert_eq!(store.integrity().await.unwrap(), Vec::<String>::new());
    let other = joined(&store).await;
    let later = at(7).checked_add(SignedDuration::from_secs(60)).unwrap();
    let claimed = [
        store.claim(later, &claim(other, 9)).await.unwrap(),
        store.claim(later, &claim(other, 9)).await.unwrap(),
    ];
    assert_eq!(claimed.map(|claimed| claimed.len()), [3, 1], "of those that were rescued one at a time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_behind_two_gates_all_come_to_their_end() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Arc::new(Postgres::open(&url).await.unwrap());
    let mut agent = spec(Some(2));
    agent.schedules[0].1.options.if_running = IfRunning::Queue;
    let mut sync = agent.schedules[0].clone();
    sync.0 = "sync".into();
    sync.1.options.command = "sync".into();
    sync.1.options.overlap = Scope::Command;
    agent.schedules.push(sync);
    let mut free = agent.schedules[0].clone();
    free.0 = "free".into();
    free.1.options.if_running = IfRunning::Allow;
    agent.schedules.push(free);
    store.apply(at(0), "files", "1", std::slice::from_ref(&agent)).await.unwrap();
    for _ in 0..10 {
        for name in ["owl/hourly", "owl/sync", "owl/free"] {
            enqueue(&store, name, &agent.definition, 4).await;
        }
    }
    let (most, ended) = crowd(&url, store.clone(), 120, Sabotage::None).await;
    assert!(most <= 2, "{most} were running at once");
    assert_eq!(ended, 120);
    assert_eq!(store.integrity().await.unwrap(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_tick_has_one_run_however_many_plan_it() {
    const SCHEDULES: usize = 60;
    const MINUTES: i64 = 5;
    let Some(url) = pg::fresh_database() else { return };
    let store = Arc::new(Postgres::open(&url).await.unwrap());
    let mut agent = spec(None);
    let schedule = agent.schedules[0].1.clone();
    agent.schedules = (0..SCHEDULES).map(|n| (format!("s{n}"), schedule.clone())).collect();
    store.apply(at(0), "files", "1", std::slice::from_ref(&agent)).await.unwrap();
    let minute = Arc::new(AtomicU32::new(0));
    let mut clients = Vec::new();
    for _ in 0..6 {
        let own = Postgres::open(&url).await.unwrap();
        let node = joined(&own).await;
        let minute = minute.clone();
        clients.push(tokio::spawn(async move {
            loop {
                let minutes = i64::from(minute.load(Ordering::SeqCst));
                let now = at(minutes * 60);
                let mut commits = Vec::new();
                for due in own.due(now, None, 40).await.unwrap() {
                    let schedule = due.compiled.clone().unwrap();
                    let plan = belfry_core::plan(&schedule, &due.standing, &due.facts(now), now);
                    commits.push(due.commit(&schedule, plan, || RunId(Uuid::now_v7())));
                }
                own.commit(now, &commits).await.unwrap();
                let claimed = own.claim(now, &claim(node, 20)).await.unwrap();
                let finishes: Vec<Finish> = claimed.iter().map(done).collect();
                let finished = own.finish(now, &finishes).await.unwrap();
                assert!(finished.iter().all(|finished| *finished == Finished::Ended(RunState::Completed)));
                if minutes > MINUTES {
                    return;
                }
                if commits.is_empty() && claimed.is_empty() && own.next_due().await.unwrap().unwrap() > now {
                    let (this, next) = (minutes as u32, minutes as u32 + 1);
                    let _ = minute.compare_exchange(this, next, Ordering::SeqCst, Ordering::SeqCst);
                }
            }
        }));
    }
    for client in clients {
        client.await.unwrap();
    }
    let node = joined(&store).await;
    let rest = store.claim(at(MINUTES * 60 + 60), &claim(node, 10_000)).await.unwrap();
    store.finish(at(MINUTES * 60 + 60), &rest.iter().map(done).collect::<Vec<_>>()).await.unwrap();
    for n in 0..SCHEDULES {
        let record = store.schedule(&format!("owl/s{n}")).await.unwrap().unwrap();
        let ended = store.ended_runs(record.id, 100).await.unwrap();
        let ticks: HashSet<Timestamp> = ended.iter().filter_map(|run| run.tick_at).collect();
        assert_eq!(ticks.len(), ended.len(), "a tick of s{n} has run twice");
        let planned = record.token.unwrap().tick_at.duration_since(at(0)).as_mins() - 1;
        assert_eq!(ended.len() as i64, planned, "s{n}");
    }
    assert_eq!(store.integrity().await.unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn a_lost_connection_is_replaced() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let agent = spec(Some(1));
    store.apply(at(0), "files", "1", std::slice::from_ref(&agent)).await.unwrap();
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    for _ in 0..3 {
        enqueue(&store, "owl/hourly", &agent.definition, 1).await;
        let sql = "select pg_terminate_backend(pid) from pg_stat_activity \
                   where datname = current_database() and pid <> pg_backend_pid()";
        client.batch_execute(sql).await.unwrap();
    }
    assert_eq!(store.counts().await.unwrap().pending, 3);
}

#[tokio::test]
async fn tending_clears_what_is_dead() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let agent = spec(None);
    store.apply(at(0), "files", "1", std::slice::from_ref(&agent)).await.unwrap();
    let node = joined(&store).await;
    enqueue(&store, "owl/hourly", &agent.definition, 600).await;
    let claimed = store.claim(at(1), &claim(node, 600)).await.unwrap();
    store.finish(at(1), &claimed.iter().map(done).collect::<Vec<_>>()).await.unwrap();
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let began = std::time::Instant::now();
    // The server learns of what is dead a little later.
    loop {
        store.tend().await.unwrap();
        let sql =
            "select vacuum_count from pg_stat_user_tables where schemaname = 'belfry' and relname = 'live'";
        if client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) > 0 {
            break;
        }
        assert!(began.elapsed() < std::time::Duration::from_secs(30), "nothing was cleared");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert_eq!(store.integrity().await.unwrap(), Vec::<String>::new());
}

/// A client outside the store.
async fn outside(url: &str) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// Waits until every connection for requests waits for a lock.
async fn until_requests_wait_for_a_lock(url: &str) {
    let client = outside(url).await;
    let waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' \
                   and application_name = 'belfry' and datname = current_database()";
    while client.query_one(waiting, &[]).await.unwrap().get::<_, i64>(0) < 3 {
        tokio::task::yield_now().await;
    }
}

/// How long a verb may take that waits for nobody.
const PROMPT: std::time::Duration = std::time::Duration::from_secs(3);

#[tokio::test(flavor = "multi_thread")]
async fn readers_that_wait_for_a_locked_table_delay_neither_renewal_nor_planning() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Arc::new(Postgres::open(&url).await.unwrap());
    store.apply(at(0), "files", "1", &[spec(None)]).await.unwrap();
    let (node, other) = (joined(&store).await, joined(&store).await);
    let schedule = store.schedule("owl/hourly").await.unwrap().unwrap().id;
    enqueue(&store, "owl/hourly", &AgentDefinition { max_concurrent: None, ..AgentDefinition::default() }, 2)
        .await;
    let locker = outside(&url).await;
    locker.batch_execute("begin; lock table belfry.breakers in access exclusive mode").await.unwrap();
    let polling: Vec<_> = (0..40)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move { while store.breakers().await.is_err() {} })
        })
        .collect();
    until_requests_wait_for_a_lock(&url).await;
    let own_loops = async {
        for seconds in 0..20 {
            let renewed = store.renew(node, at(1_000 + seconds)).await.unwrap();
            assert!(matches!(renewed, Renewed::Held { .. }));
            store.marks(node).await.unwrap();
            store.clock().await.unwrap();
        }
        joined(&store).await;
        let due = store.due(at(3_700), None, 10).await.unwrap();
        assert_eq!(due.len(), 1);
        store.next_due().await.unwrap();
        let claimed = store.claim(at(1), &claim(node, 10)).await.unwrap();
        assert_eq!(claimed.len(), 2);
        assert_eq!(store.definitions(&[schedule]).await.unwrap().len(), 1);
        let given = [(claimed[0].run, claimed[0].epoch)];
        assert_eq!(store.give_back(at(1), node, &given).await.unwrap().len(), 1);
        assert_eq!(store.claim(at(1), &claim(other, 10)).await.unwrap().len(), 1);
        let rescued = store.fence(at(2_000), other, at(1_000)).await.unwrap().unwrap();
        assert_eq!(rescued.pending.len(), 1);
        let ended = store.finish(at(1), &[done(&claimed[1])]).await.unwrap();
        assert_eq!(ended, [Finished::Ended(RunState::Completed)]);
    };
    tokio::time::timeout(PROMPT, own_loops).await.expect("the loops of a node wait for readers");
    locker.batch_execute("rollback").await.unwrap();
    for reader in polling {
        reader.await.unwrap();
    }
}

/// Every table but the one of the leases themselves may be locked for as long as it likes: also while this node claims, and
/// while it looks for cancelled runs on the connection that renews.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_table_delays_no_renewal() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Arc::new(Postgres::open(&url).await.unwrap());
    store.apply(at(0), "files", "1", &[spec(Some(2))]).await.unwrap();
    let node = joined(&store).await;
    let definition = AgentDefinition { max_concurrent: Some(2), ..AgentDefinition::default() };
    enqueue(&store, "owl/hourly", &definition, 2).await;
    let claimed = store.claim(at(1), &claim(node, 1)).await.unwrap();
    let own: Vec<_> = claimed.iter().map(|run| (run.run, run.epoch)).collect();
    assert_eq!(own.len(), 1);
    let held = |live| Renewed::Held { cancels: Vec::new(), live };
    assert_eq!(store.renew(node, at(1_000)).await.unwrap(), held(Some(own.clone())));
    let locker = outside(&url).await;
    for table in ["live", "session_runs"] {
        let lock = format!("begin; lock table belfry.{table} in access exclusive mode");
        locker.batch_execute(&lock).await.unwrap();
        let loops = [
            tokio::spawn({
                let store = store.clone();
                async move { drop(store.claim(at(1), &claim(node, 1)).await) }
            }),
            tokio::spawn({
                let store = store.clone();
                async move { while store.marks(node).await.is_err() {} }
            }),
        ];
        for seconds in 0..3 {
            let renewed = tokio::time::timeout(PROMPT, store.renew(node, at(1_000 + seconds))).await;
            let renewed = renewed.expect("a renewal waits for a locked table").unwrap();
            assert!(matches!(renewed, Renewed::Held { .. }), "{table}");
            assert_eq!(renewed == held(None), table == "live", "{table}: {renewed:?}");
        }
        locker.batch_execute("rollback").await.unwrap();
        for each in loops {
            each.await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_a_connection_is_refused_after_a_while() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Arc::new(Postgres::open(&url).await.unwrap());
    let locker = outside(&url).await;
    locker.batch_execute("begin; lock table belfry.agents in access exclusive mode").await.unwrap();
    let polling: Vec<_> = (0..3)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move { store.agents().await })
        })
        .collect();
    until_requests_wait_for_a_lock(&url).await;
    let refused = tokio::time::timeout(std::time::Duration::from_secs(15), store.agents()).await.unwrap();
    let words = refused.unwrap_err().to_string();
    assert!(words.contains("all 3 connections for requests were busy for 5 s"), "{words}");
    for reader in polling {
        drop(reader.await.unwrap());
    }
}
