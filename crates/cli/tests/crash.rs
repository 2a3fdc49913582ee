//! `belfry up`, killed at random moments again and again while schedules of every kind fire. What happened is read from a log
//! that only the children write, and compared with what the store says and with ticks counted independently.
//!
//! `BELFRY_KILLS=200` for more; the seed is printed, and `BELFRY_SEED` takes one.

#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use belfry_core::{RunState, Trigger};
use belfry_store::{AnyStore, Store};

mod outside;

use outside::{all_runs, number, pg};

const GRID_MS: i64 = 250;

/// Each child writes a line when it starts, some while it lives, and one when it ends.
fn config(store: &str) -> String {
    let line = r#"echo "$1 $BELFRY_SCHEDULE $BELFRY_TICK_AT $BELFRY_RUN_ID $BELFRY_ATTEMPT $$" >> side.log"#;
    format!(
        r#"
store: "{store}"
engine: {{lease: 3s}}
agents:
  free:
    shell: 'say() {{ {line}; }}; say start; for i in 1 2 3; do sleep 0.02; say beat; done; say end'
    max_concurrent: none
    retry: {{max: 20, base: 100ms}}
    schedules:
      every: {{every: 200ms}}
      start: {{every: 300ms, anchor: start}}
      slot: {{every: {GRID_MS}ms, anchor: slot}}
      queue: {{every: 400ms, anchor: slot, if_running: queue}}
      all: {{every: 1s, anchor: slot, catch_up: run_all}}
      allow: {{every: 500ms, anchor: slot, if_running: allow}}
      later: {{after: 1s}}
      cron: {{cron: "* * * * *"}}
  one:
    shell: 'say() {{ {line}; }}; say start; for i in 1 2 3; do sleep 0.02; say beat; done; say end'
    retry: {{max: 20, base: 100ms}}
    schedules:
      a: {{every: 300ms, anchor: slot}}
      b: {{every: 300ms, anchor: slot}}
"#
    )
}

fn up(folder: &Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_belfry"))
        .args(["up", "--log-format", "json"])
        .current_dir(folder)
        .env("BELFRY_LISTEN", "127.0.0.1:0")
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(folder.join("errors")).unwrap())
        .spawn()
        .unwrap()
}

/// Reads what it writes until a number of runs have started, and then until `enough`; gives the rest to a thread that
/// reads on.
fn wait_for_starts(folder: &Path, child: &mut Child, starts: usize, mut enough: impl FnMut() -> bool) {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut seen = 0;
    while seen < starts || !enough() {
        let line = lines.next().unwrap_or_else(|| {
            let errors = std::fs::read_to_string(folder.join("errors")).unwrap_or_default();
            panic!("it ended before it was killed, {:?}: {errors}", child.wait())
        });
        let line = line.unwrap();
        seen += usize::from(line.contains(r#""event":"run_started""#));
    }
    std::thread::spawn(move || lines.for_each(drop));
}

fn kill_again_and_again(folder: &Path, store: &str) {
    let kills = number("BELFRY_KILLS", 6);
    let mut seed = number("BELFRY_SEED", u64::from(std::process::id()) << 20 ^ 0x9e37_79b9);
    eprintln!("seed {seed}, {kills} kills, store {store}");
    let mut draw = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    std::fs::write(folder.join("belfry.yaml"), config(store)).unwrap();
    for _ in 0..kills {
        let mut child = up(folder);
        wait_for_starts(folder, &mut child, draw(25) as usize, || true);
        // Not on the heels of a start alone: somewhere behind it.
        std::thread::sleep(Duration::from_micros(draw(60_000)));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    // A last life in peace, so that everything comes to its end: also the leases of those that were killed.
    let mut child = up(folder);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    wait_for_starts(folder, &mut child, 30, || runtime.block_on(is_alone(store)));
    let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    let ended = child.wait().unwrap();
    assert!(ended.success(), "{ended}");
}

/// Whether one node is left in the store.
async fn is_alone(address: &str) -> bool {
    let store = AnyStore::open(address, false).await.unwrap();
    store.nodes().await.unwrap().len() == 1
}

/// A line of the side log.
#[derive(Debug)]
struct Line {
    what: String,
    schedule: String,
    tick: String,
    run: String,
    attempt: u32,
}

fn side_log(folder: &Path) -> Vec<Line> {
    let text = std::fs::read_to_string(folder.join("side.log")).unwrap();
    let line = |line: &str| {
        let mut words = line.split(' ').map(str::to_owned);
        let mut word = || words.next().unwrap_or_else(|| panic!("half a line: {line:?}"));
        Line { what: word(), schedule: word(), tick: word(), run: word(), attempt: word().parse().unwrap() }
    };
    text.lines().map(line).collect()
}

/// By the children alone: no tick made two runs, no two attempts of a run at once.
fn check_side_log(lines: &[Line]) {
    let mut runs: BTreeMap<(&str, &str), BTreeSet<&str>> = BTreeMap::new();
    let mut newest: BTreeMap<&str, u32> = BTreeMap::new();
    for line in lines {
        runs.entry((&line.schedule, &line.tick)).or_default().insert(&line.run);
        let attempt = newest.entry(&line.run).or_insert(0);
        assert!(
            line.attempt >= *attempt,
            "attempt {} of {} lives beside attempt {attempt}",
            line.attempt,
            line.run
        );
        if line.what == "start" {
            assert!(line.attempt > *attempt, "attempt {attempt} of {} started twice", line.run);
        }
        *attempt = line.attempt;
    }
    // `a` and `b` of one agent have ticks at the same instants, hence the schedule's name in the key.
    let doubled: Vec<_> = runs.iter().filter(|(_, runs)| runs.len() > 1).collect();
    assert!(doubled.is_empty(), "ticks that made two runs: {doubled:?}");
}

/// Every tick of a grid is a run, a skip or a miss, and those are all.
async fn check_store(address: &str, lines: &[Line]) {
    let store = AnyStore::open(address, false).await.unwrap();
    assert_eq!(store.integrity().await.unwrap(), Vec::<String>::new());
    let runs = all_runs(&store).await;
    let ran: BTreeSet<&str> = lines.iter().map(|line| line.run.as_str()).collect();
    for run in &runs {
        let id = run.id.to_string();
        assert!(run.state != RunState::Running, "{} is stuck: {run:?}", run.name);
        if run.state == RunState::Completed {
            assert!(ran.contains(id.as_str()), "{} {id} never ran, and is said to be completed", run.name);
        }
    }
    let known: BTreeSet<String> = runs.iter().map(|run| run.id.to_string()).collect();
    assert!(ran.iter().all(|run| known.contains(*run)), "something ran that the store does not know");
    for name in ["free/slot", "free/queue", "free/all", "free/allow", "one/a", "one/b"] {
        let record = store.schedule(name).await.unwrap().unwrap();
        let every = match name {
            "free/slot" => GRID_MS,
            "free/queue" => 400,
            "free/all" => 1000,
            "free/allow" => 500,
            _ => 300,
        };
        let first = record.origin.unwrap();
        let next = record.token.unwrap().tick_at;
        let expected = (next.as_millisecond() - first.as_millisecond()) / every;
        let mut made: Vec<_> = runs
            .iter()
            .filter(|run| run.name == name && matches!(run.trigger, Trigger::Schedule | Trigger::CatchUp))
            .map(|run| run.tick_at.unwrap())
            .collect();
        made.sort();
        made.dedup();
        let skips = store.skips(record.id, None, 10_000).await.unwrap();
        let skipped: u64 = skips.iter().chain(&record.open_skip).map(|range| range.count).sum();
        assert_eq!(
            made.len() as i64 + skipped as i64,
            expected,
            "{name}: {} runs, {skipped} skipped or missed",
            made.len()
        );
    }
    let later = runs.iter().filter(|run| run.name == "free/later").count();
    assert_eq!(later, 1, "a one-shot fires once");
}

fn no_tick_is_lost_and_none_doubled(folder: &Path, address: &str) {
    let began = Instant::now();
    kill_again_and_again(folder, address);
    let lines = side_log(folder);
    check_side_log(&lines);
    tokio::runtime::Runtime::new().unwrap().block_on(check_store(address, &lines));
    eprintln!("{} lines by children in {:.0} s", lines.len(), began.elapsed().as_secs_f64());
}

#[test]
fn a_killed_server_loses_no_tick_and_doubles_none_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    let address = format!("sqlite:{}/belfry.db", folder.path().display());
    no_tick_is_lost_and_none_doubled(folder.path(), &address);
}

#[test]
fn a_killed_server_loses_no_tick_and_doubles_none_on_postgres() {
    let Some(url) = pg::fresh_database() else { return };
    let address = outside::as_address(&url);
    let folder = tempfile::tempdir().unwrap();
    no_tick_is_lost_and_none_doubled(folder.path(), &address);
}
