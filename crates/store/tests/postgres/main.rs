//! The store in PostgreSQL keeps the suite. The other files here are about what no other store has.

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

mod few;
mod held;
mod kills;
mod lists;
mod pairs;
#[path = "../support/pg.rs"]
mod pg;
mod smoke;
#[path = "../suite/mod.rs"]
mod suite;
mod tls;

use belfry_store::postgres::Postgres;
use belfry_store::{AnyStore, Store, Telling};
use uuid::Uuid;

/// A store in a new database; none where there is no PostgreSQL.
async fn fresh() -> Option<Postgres> {
    Some(Postgres::open(&pg::fresh_database()?).await.unwrap())
}

#[tokio::test]
async fn it_keeps_every_scenario() {
    if fresh().await.is_some() {
        suite::scenarios::all(async || fresh().await.unwrap()).await;
    }
}

#[tokio::test]
async fn it_keeps_the_rules_for_requests_from_outside() {
    if fresh().await.is_some() {
        suite::hooks::all(async || fresh().await.unwrap()).await;
    }
}

#[tokio::test]
async fn it_keeps_tokens_and_the_audit() {
    if fresh().await.is_some() {
        suite::tokens::all(async || fresh().await.unwrap()).await;
    }
}

#[tokio::test]
async fn what_one_tells_others_hear_in_order_while_somebody_listens() {
    let (Some(url), [one, other, third]) = (pg::fresh_database(), [1, 2, 3].map(Uuid::from_u128)) else {
        return;
    };
    let store = AnyStore::Postgres(Postgres::open(&url).await.unwrap());
    assert_eq!(store.listens(one).await.unwrap(), None);
    store.listen(other).await.unwrap();
    let since = store.listens(one).await.unwrap().unwrap();
    store.listen(other).await.unwrap();
    assert_eq!(store.listens(one).await.unwrap(), Some(since), "the mark goes on");
    assert_eq!(store.listens(other).await.unwrap(), None, "its own mark is for others");
    let telling = |teller, seq| Telling { teller, seq, lost: 0, lines: vec![format!("{seq} of {teller}")] };
    for (teller, seq) in [(one, 1), (third, 1), (other, 1), (one, 2)] {
        store.tell(&telling(teller, seq)).await.unwrap();
    }
    assert_eq!(store.told_so_far(other).await.unwrap().len(), 2);
    let heard = store.told(other, &[(one, 1)]).await.unwrap();
    assert_eq!(heard, [telling(one, 2), telling(third, 1)], "behind what was heard, and of who is new");
    assert_eq!(store.told(other, &[(one, 2), (third, 1)]).await.unwrap(), []);
    store.prune_told().await.unwrap();
    assert_eq!(store.told(other, &[]).await.unwrap().len(), 3, "it is not old yet");
}

#[tokio::test(flavor = "multi_thread")]
async fn it_keeps_heartbeats_and_snapshots() {
    if fresh().await.is_some() {
        suite::watching::all(async || fresh().await.unwrap()).await;
    }
}

#[tokio::test]
async fn it_gives_the_answers_of_the_store_in_memory() {
    let seed = suite::seed();
    for round in 0..suite::rounds(5) {
        let Some(store) = fresh().await else { return };
        suite::random::equal_answers(&store, seed + round, 1_000).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_clients_break_no_limit_and_forget_nobody() {
    let Some(store) = fresh().await else { return };
    let found = suite::many::loose(store.into(), suite::seed(), suite::many::duration()).await;
    println!("{found:?}");
    assert!(found.is_clean() && found.claims > 100, "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_planners_let_no_more_wait_than_may_and_forget_nobody() {
    let Some(store) = fresh().await else { return };
    suite::many_deferred::bursts(fresh().await.unwrap().into()).await;
    suite::many_deferred::many(store.into(), suite::seed(), suite::many::duration() / 2).await;
}

#[tokio::test]
async fn nodes_hear_of_each_others_work_also_after_a_lost_connection() {
    use suite::nodes::{drain_hints, hears};
    use suite::world::{World, fleet};
    let Some(url) = pg::fresh_database() else { return };
    let (ours, theirs) = (Postgres::open(&url).await.unwrap(), Postgres::open(&url).await.unwrap());
    let second = std::time::Duration::from_secs(1);
    // Until it listens.
    while tokio::time::timeout(2 * second, ours.changed()).await.is_ok() {}
    let mut world = World::new(&theirs);
    let began = std::time::Instant::now();
    world.apply(&fleet(1)).await;
    assert!(hears(&ours).await && began.elapsed() < second, "{:?}", began.elapsed());
    drain_hints(&ours).await;
    let began = std::time::Instant::now();
    assert!(world.plan_all().await > 0);
    assert!(hears(&ours).await && began.elapsed() < second, "{:?}", began.elapsed());
    drain_hints(&ours).await;
    drain_hints(&theirs).await;
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    let kill = "select pg_terminate_backend(pid) from pg_stat_activity \
                where datname = current_database() and pid <> pg_backend_pid()";
    client.batch_execute(kill).await.unwrap();
    // Who does not listen looks himself, and listens again soon.
    assert!(tokio::time::timeout(2 * second, ours.changed()).await.is_ok());
    while tokio::time::timeout(2 * second, ours.changed()).await.is_ok() {}
    let began = std::time::Instant::now();
    world.enqueue("free/hook", None).await;
    assert!(hears(&ours).await && began.elapsed() < second, "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_node_that_leaves_is_heard_of_although_its_process_ends() {
    use suite::nodes::hears;
    use suite::world::{World, fleet};
    let Some(url) = pg::fresh_database() else { return };
    let ours = Postgres::open(&url).await.unwrap();
    let second = std::time::Duration::from_secs(1);
    while tokio::time::timeout(2 * second, ours.changed()).await.is_ok() {}
    let theirs = std::thread::spawn(move || {
        // All that it has not done when its answer is there is dropped with it.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let theirs = runtime.block_on(Postgres::open(&url)).unwrap();
        runtime.block_on(async {
            let world = World::new(&theirs);
            world.apply(&fleet(1)).await;
            let node = world.join(1).await;
            tokio::time::sleep(2 * second).await;
            let lease = theirs.nodes().await.unwrap()[0].lease_until;
            assert!(theirs.fence(world.now, node, lease).await.unwrap().is_some());
        });
        runtime.shutdown_background();
    });
    tokio::time::sleep(second).await;
    suite::nodes::drain_hints(&ours).await;
    tokio::task::spawn_blocking(move || theirs.join()).await.unwrap().unwrap();
    let began = std::time::Instant::now();
    assert!(hears(&ours).await && began.elapsed() < second, "{:?}", began.elapsed());
}

/// A constraint that only a test has: an end with this error is refused.
const REFUSE_ENDS: &str =
    "alter table belfry.history add check (error <> 'bad'), add check (summary <> 'bad')";

#[tokio::test]
async fn an_end_that_is_refused_ends_its_run_and_disturbs_no_other() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    client.batch_execute(REFUSE_ENDS).await.unwrap();
    suite::refusing::ends_that_are_refused(&store).await;
}

/// Refuses whatever is written about the timer of a schedule.
const REFUSE_TIMER: &str = "
    create function refuse() returns trigger language plpgsql as
        $$ begin raise exception 'no' using errcode = 'check_violation'; end $$;
    create trigger refuse before insert or update on timers for each row when (new.schedule_id = SCHEDULE)
        execute function refuse();
    create trigger refuse_delete before delete on timers for each row when (old.schedule_id = SCHEDULE)
        execute function refuse()";

#[tokio::test]
async fn a_plan_that_is_refused_in_every_form_is_left_alone() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    client.batch_execute("set search_path = belfry").await.unwrap();
    let refuse = async |schedule: i64| {
        client.batch_execute(&REFUSE_TIMER.replace("SCHEDULE", &schedule.to_string())).await.unwrap();
    };
    suite::refusing::a_plan_that_is_refused_in_every_form(&store, refuse).await;
}

/// Makes the running runs of a schedule stand among those that have ended.
const DOUBLE: &str = "insert into history (id, seq, failed, ordinal, schedule_id, agent_id, command, trigger, lane, not_before,
        state, attempt, max_attempts, epoch, payload, created_at, finished_at)
    select id, 1, true, 1, schedule_id, agent_id, command, trigger, 'cron', not_before,
        3, attempt, max_attempts, epoch, '{}', created_at, created_at
    from live where state = 2 and schedule_id = $1";

#[tokio::test]
async fn a_run_that_lives_and_has_ended_holds_up_no_other() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    client.batch_execute("set search_path = belfry").await.unwrap();
    let double = async |schedule: i64| {
        assert_eq!(client.execute(DOUBLE, &[&schedule]).await.unwrap(), 1);
    };
    suite::refusing::runs_that_live_and_have_ended(&store, double).await;
}

#[tokio::test]
async fn a_row_that_cannot_be_read_disturbs_no_other() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    client.batch_execute("set search_path = belfry").await.unwrap();
    let spoil = async |statement: String| client.batch_execute(&statement).await.unwrap();
    suite::refusing::rows_that_cannot_be_read(&store, spoil).await;
}

/// What a mistake may leave in columns; AGENT and SCHEDULE stand for the ids of `bad`.
const SPOILS: &[&str] = &[
    "insert into breakers values (AGENT, '', 77, -5) on conflict (agent_id, command) do update set state = 77",
    "insert into breakers values (AGENT, '', 1, 5, 'infinity')
        on conflict (agent_id, command) do update set state = 1, opened_at = 'infinity'",
    "update budgets set period_start = '-infinity', failures = 99999999999 where agent_id = AGENT",
    "update budgets set period_start = 'infinity', failures = 50 where agent_id = AGENT",
    "update budgets set failures = -5 where agent_id = AGENT",
    "update timers set due_at = '-infinity', tick_at = '-infinity' where schedule_id = SCHEDULE",
    "update timers set tick_at = 'infinity' where schedule_id = SCHEDULE",
    "update timers set tick_at = '20000-01-01' where schedule_id = SCHEDULE",
    "update timers set due_at = 'infinity' where schedule_id = SCHEDULE",
    "update schedule_state set skip_reason = 1, skip_from = '-infinity', skip_to = 'infinity', skip_count = -1
        where schedule_id = SCHEDULE",
    "update schedule_state set skip_reason = 1 where schedule_id = SCHEDULE",
    "update schedule_state set last_state = null, last_finished_at = null where schedule_id = SCHEDULE",
    "update schedule_state set last_state = 77, last_success_at = 'infinity', last_finished_at = '-infinity',
        status_since = 'infinity', origin = '20000-01-01' where schedule_id = SCHEDULE",
    "update live set schedule_id = 99999 where schedule_id = SCHEDULE and state = 2",
    "update live set schedule_id = 99999 where schedule_id = SCHEDULE and state <> 2",
    "update live set agent_id = 99999 where schedule_id = SCHEDULE",
    "update live set attempt = -5, max_attempts = 99999999999 where schedule_id = SCHEDULE",
    "update live set not_before = '-infinity', due_at = 'infinity' where schedule_id = SCHEDULE",
    "update live set started_at = 'infinity', created_at = '20000-01-01' where schedule_id = SCHEDULE",
    "update live set not_before = '20000-01-01' where schedule_id = SCHEDULE",
    "update history set finished_at = 'infinity', started_at = '-infinity', created_at = '20000-01-01'
        where agent_id = AGENT",
    "update history set agent_id = 99999, attempt = -5 where agent_id = AGENT",
    "update sessions set generation = -5, last_seq = -5, at_once = -5, max_concurrent = -3, tokens = -1,
        used_at = 'infinity' where schedule_id in (select id from schedules where agent_id = AGENT)",
    "insert into lanes values ('weird', 1, -5, -7, -9)",
    "insert into nodes (id, host, pid, labels, started_at, lease_until, fenced, renewal)
        values (gen_random_uuid(), 'h', -1, '{}', '-infinity', 'infinity', false, -1)",
];

#[tokio::test]
async fn a_column_that_cannot_be_read_disturbs_no_other() {
    for statement in SPOILS {
        let Some(url) = pg::fresh_database() else { return };
        let store = Postgres::open(&url).await.unwrap();
        let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(async move { drop(connection.await) });
        client.batch_execute("set search_path = belfry").await.unwrap();
        let spoil = async |statement: String| client.batch_execute(&statement).await.unwrap();
        println!("{statement}");
        suite::refusing::a_column_that_cannot_be_read(&store, statement, spoil).await;
    }
}

#[tokio::test]
async fn tokens_audit_and_snapshots_that_cannot_be_read_are_listed_and_named() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    client.batch_execute("set search_path = belfry").await.unwrap();
    let spoil = async |statement: &'static str| client.batch_execute(statement).await.unwrap();
    let statements = [
        "update tokens set expires_at = 'infinity' where id = 'spoilt'",
        "update audit set at = 'infinity', status = 99999999 where actor = 'spoilt'",
        "update snapshots set snapshot = 'nonsense' where number = (select max(number) from snapshots)",
        "insert into lanes values ('weird', 1, -5, -7, -9)",
        "update nodes set started_at = '-infinity'",
        "update schedule_state set origin = '20000-01-01'",
        "insert into budgets select id, 'infinity', -5 from agents",
    ];
    suite::refusing::tokens_and_beats_that_cannot_be_read(&store, spoil, &statements).await;
}

#[test]
fn the_suite_notices_what_is_broken_on_purpose() {
    use belfry_store::sabotage::Sabotage;
    if pg::fresh_database().is_none() {
        return;
    }
    for sabotage in [Sabotage::NoTokenCheck, Sabotage::FinishWithoutEpoch, Sabotage::PruneArms] {
        let noticed = suite::fails(move || async move {
            let broken = async || {
                let store = fresh().await.unwrap();
                store.sabotage.set(sabotage);
                store
            };
            suite::scenarios::all(broken).await;
        });
        assert!(noticed, "{sabotage:?} was not noticed");
    }
}

#[tokio::test]
async fn each_statement_has_a_new_snapshot_whatever_the_database_says() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    // A node can join only in a transaction of this level.
    let sql = "do $$ begin execute format('alter database %I set default_transaction_isolation = ''serializable''', \
                   current_database()); end $$; \
               create function belfry.only_read_committed() returns trigger language plpgsql as $$ begin \
                   if current_setting('transaction_isolation') <> 'read committed' then \
                       raise exception 'transaction of level %', current_setting('transaction_isolation'); end if; \
                   return new; end $$; \
               create trigger level before insert on belfry.nodes \
                   for each row execute function belfry.only_read_committed()";
    client.batch_execute(sql).await.unwrap();
    drop(store);
    let store = Postgres::open(&url).await.unwrap();
    suite::world::World::new(&store).join(1).await;
}

/// A plan that did not know of a run is not committed, also if its timer was set while the run was asked for.
#[tokio::test]
async fn a_run_that_is_asked_for_changes_a_timer_that_is_being_set() {
    let Some(url) = pg::fresh_database() else { return };
    let store = Postgres::open(&url).await.unwrap();
    let mut world = suite::world::World::new(&store);
    let every = suite::world::every("1h");
    world.apply(&[suite::world::agent("a", belfry_core::AgentDefinition::default(), &[("s", every)])]).await;
    let id = world.schedule("a/s").await.id;
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let version = async || -> i64 {
        let sql = "select version from belfry.timers where schedule_id = $1";
        client.query_one(sql, &[&id]).await.unwrap().get(0)
    };
    let before = version().await;
    let sql = format!(
        "create temp table kept as select * from belfry.timers where schedule_id = {id}; \
         delete from belfry.timers where schedule_id = {id}; begin; \
         update belfry.schedule_state set edition = edition where schedule_id = {id}; \
         insert into belfry.timers select * from kept"
    );
    client.batch_execute(&sql).await.unwrap();
    let set = async {
        let waits = "select count(*) from pg_stat_activity where datname = current_database() \
                     and wait_event_type = 'Lock'";
        while client.query_one(waits, &[]).await.unwrap().get::<_, i64>(0) == 0 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        client.batch_execute("commit").await.unwrap();
    };
    let ((_, made), ()) = tokio::join!(world.enqueue("a/s", None), set);
    assert_eq!(made, belfry_store::Enqueued::Made);
    assert_ne!(version().await, before, "whoever read the timer before must plan again");
}
