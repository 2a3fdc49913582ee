//! A wall clock that is set while it works: nothing fires again, and a step forward is a downtime.
//!
//! It needs libfaketime, which shows `up` another time; its children see the true one. PostgreSQL has a clock of its own. Only with
//! `BELFRY_FAKETIME=1`: the library is not everywhere, and is slow to notice on a busy machine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use belfry_time::Timestamp;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{Site, Up};

const CONFIG: &str = r#"
engine: {lease: 3s, jitter_threshold: 100}
agents:
  a:
    shell: 'echo "$BELFRY_SCHEDULE $BELFRY_TICK_AT $BELFRY_RUN_ID" >> side.log'
    max_concurrent: none
    schedules:
      grid: {every: 200ms, anchor: slot, catch_up: skip}
      once: {every: 10m, anchor: slot, phase: PHASE, late_after: 1m, catch_up: run_once}
      all: {every: 10m, anchor: slot, phase: PHASE, late_after: 1m, catch_up: run_all, catch_up_limit: 4}
      shot: {after: 100ms}
"#;

fn library() -> Option<PathBuf> {
    std::env::var_os("BELFRY_FAKETIME")?;
    let folders = std::fs::read_dir("/usr/lib").ok()?.flatten().map(|entry| entry.path());
    folders.map(|folder| folder.join("faketime/libfaketime.so.1")).find(|library| library.exists())
}

/// `up` with a clock that can be set.
fn up(site: &Site) -> Option<Up> {
    let Some(library) = library() else {
        use std::io::Write;
        let words = "\nSKIPPED: this test needs BELFRY_FAKETIME=1 and libfaketime (Debian: faketime)\n";
        drop(std::io::stderr().write_all(words.as_bytes()));
        return None;
    };
    // Ticks far from any moment at which this test looks.
    let phase = (Timestamp::now().as_second() + 300) % 600;
    site.config(&CONFIG.replace("PHASE", &format!("{phase}s")));
    set(site, 0);
    Some(site.up_with(|command| fake(site, command, &library)))
}

fn fake(site: &Site, command: &mut Command, library: &Path) {
    command.env("LD_PRELOAD", library);
    command.env("FAKETIME_TIMESTAMP_FILE", site.path("time")).env("FAKETIME_NO_CACHE", "1");
    command.env("FAKETIME_DONT_FAKE_MONOTONIC", "1").env("FAKETIME_DONT_RESET", "1");
}

/// Seconds from the true time.
fn set(site: &Site, seconds: i64) {
    site.file("time.new", &format!("{seconds:+}\n"));
    std::fs::rename(site.path("time.new"), site.path("time")).unwrap();
}

fn at(value: &Value) -> Timestamp {
    value.as_str().unwrap().parse().unwrap()
}

/// A tick of the grid at least so far from the true time.
fn grid_at(up: &mut Up, seconds: i64) {
    up.wait_for("a tick of the grid by the new time", |event| {
        let is_grid = event["event"] == "run_started" && event["schedule"] == "grid";
        let off = || at(&event["tick_at"]).duration_since(Timestamp::now()).as_secs();
        is_grid && (off() - seconds).abs() < 60
    });
}

/// One run for each tick; it may have been tried again.
fn no_tick_twice(site: &Site) {
    let mut runs = std::collections::BTreeMap::new();
    for line in site.side() {
        let run = runs.entry((line[0].clone(), line[1].clone())).or_insert_with(|| line[2].clone());
        assert_eq!(*run, line[2], "two runs of one tick");
    }
    assert_eq!(site.side().iter().filter(|line| line[0] == "shot").count(), 1);
}

/// Runs, not attempts: one that a busy machine was too slow for is tried again.
fn count(site: &Site, schedule: &str) -> usize {
    let lines = site.side();
    let runs: std::collections::BTreeSet<_> =
        lines.iter().filter(|line| line[0] == schedule).map(|line| &line[2]).collect();
    runs.len()
}

#[test]
fn a_step_forward_is_a_downtime() {
    const HOUR: i64 = 3600;
    const YEAR: i64 = 365 * 24 * HOUR;
    let site = Site::sqlite();
    let Some(mut up) = up(&site) else { return };
    grid_at(&mut up, 0);
    site.wait_for_line("shot");
    for (step, missed) in [(HOUR, 6), (HOUR + YEAR, 365 * 24 * 6)] {
        let (once, all) = (count(&site, "once"), count(&site, "all"));
        set(&site, step);
        let caught_up = up.wait_for("the missed ticks of `all`", |event| {
            event["event"] == "tick_missed" && event["schedule"] == "all"
        });
        assert_eq!(caught_up["count"], missed - 4, "{caught_up}");
        grid_at(&mut up, step);
        site.wait_for_side("what was missed", |_| {
            count(&site, "once") > once && count(&site, "all") >= all + 4
        });
        assert_eq!((count(&site, "once"), count(&site, "all")), (once + 1, all + 4));
    }
    up.stop();
    no_tick_twice(&site);
    assert!(up.seen.iter().all(|event| event["event"] != "node_fenced"));
}

#[test]
fn a_step_back_fires_nothing_again_and_waits() {
    let site = Site::sqlite();
    let Some(mut up) = up(&site) else { return };
    grid_at(&mut up, 0);
    site.wait_for_line("shot");
    // Four seconds, so that the wait has an end.
    set(&site, -4);
    let stepped = Timestamp::now();
    let resumed = up.wait_for("a tick after the wait", |event| {
        event["event"] == "run_started" && event["schedule"] == "grid" && at(&event["tick_at"]) > stepped
    });
    assert!(Timestamp::now().duration_since(stepped).as_secs() >= 3, "{resumed}");
    // An hour: nothing happens but what was asked for by hand.
    set(&site, -3600);
    let before = count(&site, "grid");
    let asked = site.belfry_with(&["run", "a/once", "--wait"], |command| {
        fake(&site, command, &library().unwrap());
    });
    assert!(asked.status.success(), "{}", String::from_utf8_lossy(&asked.stderr));
    up.stop();
    // What was under way may have ended.
    assert!(count(&site, "grid") <= before + 2);
    no_tick_twice(&site);
    // The cursor stands an hour ahead, and outlives a restart.
    let next = at(&site.json(&["show", "a/grid"])["next"]["tick_at"]);
    assert!(next > stepped, "{next}");
}

#[test]
fn a_suspended_machine_is_a_downtime() {
    let site = Site::sqlite();
    let Some(mut up) = up(&site) else { return };
    grid_at(&mut up, 0);
    site.wait_for_line("shot");
    up.signal(Signal::SIGSTOP);
    set(&site, 3600);
    // Longer than the lease, as a suspended machine would be.
    std::thread::sleep(Duration::from_millis(3500));
    up.signal(Signal::SIGCONT);
    let missed = up.wait_for("the missed ticks of `all`", |event| {
        event["event"] == "tick_missed" && event["schedule"] == "all"
    });
    assert_eq!(missed["count"], 2, "{missed}");
    grid_at(&mut up, 3600);
    site.wait_for_side("what was missed", |_| count(&site, "once") == 1 && count(&site, "all") == 4);
    up.stop();
    no_tick_twice(&site);
}
