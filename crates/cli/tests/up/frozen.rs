//! A node that is stopped in the middle of its work and goes on after its lease has ended.

use std::collections::{BTreeMap, BTreeSet};

use nix::sys::signal::Signal;

use crate::support::{Site, eventually, lives};

const CONFIG: &str = r#"
engine: {lease: 3s}
agents:
  a:
    shell: 'trap "" TERM; while [ ! -e go ]; do echo "beat $BELFRY_ATTEMPT $$" >> side.log; sleep 0.03; done; echo "end $BELFRY_ATTEMPT $$" >> side.log'
    retry: {max: 3, base: 100ms}
    schedules: {s: {every: 1h}}
  b:
    shell: 'echo "quick $BELFRY_RUN_ID $BELFRY_TICK_AT $BELFRY_ATTEMPT" >> side.log'
    schedules: {q: {every: 200ms, anchor: slot}}
"#;

/// One attempt after the other: nobody beats once a later one has. One run a tick, and each attempt of it once.
fn one_at_a_time(site: &Site) {
    let (mut newest, mut attempts, mut runs) = (0, BTreeSet::new(), BTreeMap::new());
    for line in site.side() {
        if line[0] == "quick" {
            assert!(attempts.insert((line[1].clone(), line[3].clone())), "{line:?} started twice");
            let run = runs.entry(line[2].clone()).or_insert_with(|| line[1].clone());
            assert_eq!(*run, line[1], "two runs of one tick");
            continue;
        }
        let attempt: u32 = line[1].parse().unwrap();
        assert!(attempt >= newest, "attempt {attempt} lives beside attempt {newest}");
        newest = attempt;
    }
}

#[test]
fn a_frozen_node_loses_its_children_before_another_starts_them_again() {
    let Some(site) = Site::postgres() else { return };
    site.config(CONFIG);
    let mut first = site.up();
    let started = first.event_of("run_started", "s");
    let old = site.wait_for_line("beat 1");
    first.signal(Signal::SIGSTOP);
    let mut second = site.up();
    // The children of the first are gone when those of the second are there.
    let anew = second.event_of("run_started", "s");
    assert_eq!((&anew["run_id"], &anew["attempt"]), (&started["run_id"], &2.into()));
    assert!(!lives(&old[2]));
    site.wait_for_line("beat 2");
    first.signal(Signal::SIGCONT);
    first.event("node_fenced");
    first.event("node_rejoined");
    // It takes part again, once the other is gone.
    site.file("go", "");
    assert_eq!(second.event_of("run_finished", "s")["state"], "completed");
    second.stop();
    first.event_of("run_started", "q");
    first.event_of("run_finished", "q");
    first.stop();
    let results = ["run_finished", "run_retried", "run_cancelled"];
    let of_old = first.seen.iter().filter(|event| event["run_id"] == started["run_id"]);
    let told: Vec<_> = of_old.filter(|event| results.iter().any(|name| event["event"] == *name)).collect();
    assert!(told.is_empty(), "{told:?}");
    let run = &site.runs("a/s")[0];
    assert_eq!((&run["state"], &run["attempt"]), (&"completed".into(), &2.into()), "{run}");
    one_at_a_time(&site);
}

#[test]
fn a_node_that_was_frozen_alone_goes_on() {
    for site in Site::each() {
        site.config(CONFIG);
        let mut up = site.up();
        let started = up.event_of("run_started", "s");
        let old = site.wait_for_line("beat 1");
        up.signal(Signal::SIGSTOP);
        eventually("the end of its children", || (!lives(&old[2])).then_some(()));
        up.signal(Signal::SIGCONT);
        site.wait_for_line("beat 2");
        up.event_of("run_finished", "q");
        site.file("go", "");
        let finished = up.event_of("run_finished", "s");
        assert_eq!((&finished["run_id"], &finished["state"]), (&started["run_id"], &"completed".into()));
        up.stop();
        one_at_a_time(&site);
    }
}

#[test]
fn a_keeper_that_is_killed_is_replaced_and_that_is_told() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let mut up = site.up();
    up.event_of("run_started", "q");
    let node = up.pid();
    let keeper = eventually("the keeper", || {
        let children =
            std::fs::read_to_string(format!("/proc/{node}/task/{node}/children")).unwrap_or_default();
        let others = std::fs::read_dir(format!("/proc/{node}/task")).unwrap().flatten();
        let of_threads = others.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
        let all = of_threads.chain([children]).collect::<Vec<_>>().join(" ");
        let is_keeper = |pid: &&str| {
            let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            command.split(|byte| *byte == 0).any(|word| word == b"keep")
        };
        all.split_whitespace().find(is_keeper).map(str::to_owned)
    });
    let pid = nix::unistd::Pid::from_raw(keeper.parse().unwrap());
    nix::sys::signal::kill(pid, Signal::SIGKILL).unwrap();
    let told = up.event("keeper_restarted");
    assert!(told["detail"].as_str().unwrap().contains("process"), "{told}");
    up.event_of("run_finished", "q");
    site.file("go", "");
    up.stop();
    let count = up.seen.iter().filter(|event| event["event"] == "keeper_restarted").count();
    assert_eq!(count, 1);
}
