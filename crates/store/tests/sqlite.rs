//! The store in SQLite keeps the suite.

#![allow(clippy::unwrap_used)]

mod suite;

use belfry_store::Store;
use belfry_store::sqlite::Sqlite;

/// A store in a folder that goes with it.
fn fresh(folder: &tempfile::TempDir) -> Sqlite {
    static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    Sqlite::open(&folder.path().join(format!("{number}.db"))).unwrap()
}

#[tokio::test]
async fn it_keeps_every_scenario() {
    let folder = tempfile::tempdir().unwrap();
    suite::scenarios::all(async || fresh(&folder)).await;
}

#[tokio::test]
async fn it_keeps_the_rules_for_requests_from_outside() {
    let folder = tempfile::tempdir().unwrap();
    suite::hooks::all(async || fresh(&folder)).await;
}

#[tokio::test]
async fn it_keeps_tokens_and_the_audit() {
    let folder = tempfile::tempdir().unwrap();
    suite::tokens::all(async || fresh(&folder)).await;
}

#[tokio::test]
async fn it_keeps_heartbeats_and_snapshots() {
    let folder = tempfile::tempdir().unwrap();
    suite::watching::all(async || fresh(&folder)).await;
}

#[tokio::test]
async fn it_gives_the_answers_of_the_store_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let seed = suite::seed();
    for round in 0..suite::rounds(6) {
        suite::random::equal_answers(&fresh(&folder), seed + round, 2_000).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_clients_break_no_limit_and_forget_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let found = suite::many::loose(fresh(&folder).into(), suite::seed(), suite::many::duration()).await;
    println!("{found:?}");
    assert!(found.is_clean() && found.claims > 100, "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_planners_let_no_more_wait_than_may_and_forget_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let seconds = std::time::Duration::from_secs(2);
    suite::many_deferred::bursts(fresh(&folder).into()).await;
    suite::many_deferred::many(fresh(&folder).into(), suite::seed(), seconds).await;
}

#[tokio::test]
async fn what_another_process_writes_is_noticed_within_a_second() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shared.db");
    let (ours, theirs) = (Sqlite::open(&path).unwrap(), Sqlite::open(&path).unwrap());
    // The first look cannot tell; after it nothing changes, and our own writes are not others'.
    suite::nodes::drain_hints(&ours).await;
    ours.changed().await;
    suite::world::World::new(&ours).join(1).await;
    let nothing = tokio::time::timeout(std::time::Duration::from_millis(2_500), ours.changed()).await;
    assert!(nothing.is_err());
    let began = std::time::Instant::now();
    suite::world::World::new(&theirs).apply(&suite::world::fleet(1)).await;
    ours.changed().await;
    assert!(began.elapsed() < std::time::Duration::from_secs(3), "{:?}", began.elapsed());
}

/// A constraint that only a test has: an end with this error is refused.
const REFUSE_ENDS: &str =
    "create trigger refuse before insert on history when new.error = 'bad' or new.summary = 'bad'
                           begin select raise(abort, 'bad text'); end";

#[tokio::test]
async fn an_end_that_is_refused_ends_its_run_and_disturbs_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("refusing.db");
    let store = Sqlite::open(&path).unwrap();
    rusqlite::Connection::open(&path).unwrap().execute_batch(REFUSE_ENDS).unwrap();
    suite::refusing::ends_that_are_refused(&store).await;
}

/// Refuses whatever is written about the timer of a schedule.
const REFUSE_TIMER: &str = "
    create trigger refuse_insert before insert on timers when new.schedule_id = SCHEDULE begin select raise(abort, 'no'); end;
    create trigger refuse_update before update on timers when new.schedule_id = SCHEDULE begin select raise(abort, 'no'); end;
    create trigger refuse_delete before delete on timers when old.schedule_id = SCHEDULE begin select raise(abort, 'no'); end";

#[tokio::test]
async fn a_plan_that_is_refused_in_every_form_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("refusing.db");
    let store = Sqlite::open(&path).unwrap();
    let other = rusqlite::Connection::open(&path).unwrap();
    let refuse = async |schedule: i64| {
        other.execute_batch(&REFUSE_TIMER.replace("SCHEDULE", &schedule.to_string())).unwrap();
    };
    suite::refusing::a_plan_that_is_refused_in_every_form(&store, refuse).await;
}

/// Makes the running runs of a schedule stand among those that have ended.
const DOUBLE: &str = "insert into history (id, place, ordinal, schedule_id, agent_id, command, trigger, lane, not_before, state, attempt,
        max_attempts, epoch, created_at, finished_at)
    select id, 1, 1, schedule_id, agent_id, command, trigger, 'cron', not_before, 3, attempt, max_attempts, epoch, created_at, 1
    from live where state = 2 and schedule_id = SCHEDULE";

#[tokio::test]
async fn a_run_that_lives_and_has_ended_holds_up_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("doubled.db");
    let store = Sqlite::open(&path).unwrap();
    let other = rusqlite::Connection::open(&path).unwrap();
    let double = async |schedule: i64| {
        assert_eq!(other.execute(&DOUBLE.replace("SCHEDULE", &schedule.to_string()), []).unwrap(), 1);
    };
    suite::refusing::runs_that_live_and_have_ended(&store, double).await;
}

#[tokio::test]
async fn a_row_that_cannot_be_read_disturbs_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("spoilt.db");
    let store = Sqlite::open(&path).unwrap();
    let other = rusqlite::Connection::open(&path).unwrap();
    let spoil = async |statement: String| other.execute_batch(&statement).unwrap();
    suite::refusing::rows_that_cannot_be_read(&store, spoil).await;
}

/// What a mistake may leave in columns; AGENT and SCHEDULE stand for the ids of `bad`.
const SPOILS: &[&str] = &[
    "update agents set breaker = 'nonsense' where id = AGENT",
    "update agents set budget = 'nonsense' where id = AGENT",
    "insert or replace into budgets values (AGENT, 0, -5)",
    "insert or replace into budgets values (AGENT, 9223372036854775807, 99999999999)",
    "insert or replace into breakers values (AGENT, '', 'nonsense')",
    "update timers set due_at = -9223372036854775808, tick_at = -9223372036854775808 where schedule_id = SCHEDULE",
    "update timers set tick_at = 9223372036854775807 where schedule_id = SCHEDULE",
    "update timers set kind = 99999999 where schedule_id = SCHEDULE",
    "update schedule_state set skip_reason = 77, skip_from = null where schedule_id = SCHEDULE",
    "update schedule_state set skip_reason = 1, skip_from = -9223372036854775808, skip_to = 9223372036854775807,
        skip_count = -5 where schedule_id = SCHEDULE",
    "update schedule_state set last_state = null, last_finished_at = null where schedule_id = SCHEDULE",
    "update schedule_state set status_since = 9223372036854775807, origin = 9223372036854775807 where schedule_id = SCHEDULE",
    "update live set attempt = -5, max_attempts = 99999999999 where schedule_id = SCHEDULE",
    "update live set trigger = 99999999 where schedule_id = SCHEDULE and state <> 2",
    "update live set not_before = -9223372036854775808, created_at = 9223372036854775807 where schedule_id = SCHEDULE",
    "update live set started_at = 9223372036854775807, due_at = -9223372036854775808 where schedule_id = SCHEDULE",
    "update live set agent_id = 99999 where schedule_id = SCHEDULE",
    "update live set schedule_id = 99999 where schedule_id = SCHEDULE and state = 2",
    "update live set schedule_id = 99999 where schedule_id = SCHEDULE and state <> 2",
    "update live set exit_code = 99999999999 where schedule_id = SCHEDULE",
    "update history set attempt = -5, finished_at = 9223372036854775807, exit_code = -99999999999",
    "update sessions set generation = -5, last_seq = -5, at_once = -5, max_concurrent = -3, tokens = -1
        where schedule_id in (select id from schedules where agent_id = AGENT)",
    "insert into lanes values ('weird', 1, -5, -7, 99999999999)",
    "insert into nodes (id, host, pid, labels, started_at, lease_until, fenced)
        values (randomblob(16), 'h', -1, 'nonsense', -9223372036854775808, 9223372036854775807, 0)",
];

#[tokio::test]
async fn a_column_that_cannot_be_read_disturbs_no_other() {
    for statement in SPOILS {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("spoilt.db");
        let store = Sqlite::open(&path).unwrap();
        let other = rusqlite::Connection::open(&path).unwrap();
        let spoil = async |statement: String| other.execute_batch(&statement).unwrap();
        println!("{statement}");
        suite::refusing::a_column_that_cannot_be_read(&store, statement, spoil).await;
    }
}

#[tokio::test]
async fn tokens_audit_and_snapshots_that_cannot_be_read_are_listed_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("spoilt.db");
    let store = Sqlite::open(&path).unwrap();
    let other = rusqlite::Connection::open(&path).unwrap();
    let spoil = async |statement: &'static str| other.execute_batch(statement).unwrap();
    let statements = [
        "update tokens set expires_at = 9223372036854775807 where id = 'spoilt'",
        "update audit set at = 9223372036854775807, status = 99999999 where actor = 'spoilt'",
        "update snapshots set snapshot = 'nonsense' where number = (select max(number) from snapshots)",
        "insert into lanes values ('weird', 1, -5, -7, 99999999999)",
        "update nodes set labels = 'nonsense'",
        "update schedule_state set origin = 9223372036854775807",
        "update agents set breaker = 'nonsense'",
    ];
    suite::refusing::tokens_and_beats_that_cannot_be_read(&store, spoil, &statements).await;
}

#[tokio::test]
async fn a_command_that_is_refused_fails_no_other_of_its_transaction() {
    let folder = tempfile::tempdir().unwrap();
    suite::refusing::many_at_once(&fresh(&folder)).await;
}

#[test]
fn the_suite_notices_what_is_broken_on_purpose() {
    use belfry_store::sabotage::Sabotage;
    for sabotage in [Sabotage::NoTokenCheck, Sabotage::FinishWithoutEpoch, Sabotage::PruneArms] {
        let noticed = suite::fails(move || async move {
            let folder = tempfile::tempdir().unwrap();
            let broken = async || {
                let store = fresh(&folder);
                store.sabotage().set(sabotage);
                store
            };
            suite::scenarios::all(broken).await;
        });
        assert!(noticed, "{sabotage:?} was not noticed");
    }
}
