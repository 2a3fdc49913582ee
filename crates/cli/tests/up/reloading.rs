//! Files that change while it runs.

use std::time::{Duration, Instant};

use belfry_time::Timestamp;
use nix::sys::signal::Signal;

use crate::support::{Site, Up, eventually};

fn agent(schedules: &str) -> String {
    format!(
        r#"
agents:
  a:
    shell: 'echo "$BELFRY_SCHEDULE $BELFRY_TICK_AT" >> side.log'
    max_concurrent: none
    schedules:
      steady: {{every: 200ms, anchor: slot}}
      {schedules}
"#
    )
}

/// The ways to make it read its files again.
#[derive(Debug, Clone, Copy)]
enum Way {
    Signal,
    Change,
    Command,
}

impl Way {
    fn take(self, site: &Site, up: &Up) {
        match self {
            Way::Signal => up.signal(Signal::SIGHUP),
            Way::Change => {}
            Way::Command => {
                let told = site.belfry(&["reload"]);
                assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
            }
        }
    }
}

#[test]
fn an_edit_takes_effect_within_a_second_and_fires_nothing_from_before() {
    for (way, site) in [
        (Way::Signal, Site::sqlite()),
        (Way::Change, Site::other()),
        (Way::Command, Site::sqlite()),
        (Way::Command, Site::other()),
    ] {
        site.config(&agent("moved: {every: 6h, anchor: slot}\n      planned: {cron: \"0 3 29 2 *\"}"));
        let mut up = site.up();
        up.event_of("run_finished", "steady");
        let edited = Timestamp::now();
        site.config(&agent("moved: {every: 300ms, anchor: slot}\n      planned: {cron: \"0 4 29 2 *\"}"));
        way.take(&site, &up);
        up.event_of("run_started", "moved");
        let took = Timestamp::now().duration_since(edited);
        // A second to see it, 300 ms to the tick; the machine may be busy.
        assert!(took.as_millis() < 3000, "{way:?}: {took:?}");
        let shown = site.json(&["show", "a/planned"]);
        assert!(shown["next"]["tick_at"].as_str().unwrap().contains("-02-29T04:00"), "{shown}");
        up.event_of("run_finished", "moved");
        let first = site.wait_for_line("moved");
        assert!(first[1].parse::<Timestamp>().unwrap() > edited, "{first:?}");
        // An edit that keeps the timing moves nothing: the steady one has a tick each 200 ms, before and after.
        up.event_of("run_finished", "steady");
        up.stop();
        let ticks: Vec<i64> = site
            .side()
            .iter()
            .filter(|line| line[0] == "steady")
            .map(|line| line[1].parse::<Timestamp>().unwrap().as_millisecond())
            .collect();
        let mut sorted = ticks.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), ticks.len(), "a tick ran twice");
        let loaded = up.seen.iter().filter(|event| event["event"] == "config_loaded").count();
        assert_eq!(loaded, 2, "{way:?}");
    }
}

#[test]
fn a_touched_file_of_one_node_does_not_take_back_what_another_node_applied() {
    let Some(one) = Site::postgres() else { return };
    let two = one.beside();
    let old = agent("");
    one.config(&old);
    two.config(&old);
    let mut nodes = [one.up(), two.up()];
    nodes.iter_mut().for_each(|node| drop(node.event("node_started")));
    two.config(&agent("new: {cron: \"0 3 29 2 *\"}"));
    nodes[1].event("config_loaded");
    let name = "a/new";
    eventually("the schedule", || one.belfry(&["show", name]).status.success().then_some(()));
    // The first node finds by itself that its files are not what the store holds any more.
    assert_eq!(nodes[0].event("config_skew")["state"], "began");
    // Neither a touch nor a signal nor a command applies the old file of the first node.
    one.config(&old);
    let skew = nodes[0].event("config_skew");
    assert!(skew["detail"].as_str().unwrap().contains("belfry apply"), "{skew}");
    nodes[0].signal(Signal::SIGHUP);
    nodes[0].event("config_skew");
    let refused = one.belfry(&["reload"]);
    assert!(!refused.status.success(), "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("config skew"), "{refused:?}");
    nodes[0].event("config_skew");
    assert!(one.belfry(&["show", name]).status.success());
    // Nor does a start.
    nodes[0].stop();
    nodes[0] = one.up();
    nodes[0].event("config_skew");
    assert!(one.belfry(&["show", name]).status.success());
    // An edit does, also while the node is down.
    nodes[0].stop();
    one.config(&agent("third: {every: 200ms, anchor: slot}"));
    nodes[0] = one.up();
    nodes[0].event("config_loaded");
    eventually("its end", || (!one.belfry(&["show", name]).status.success()).then_some(()));
    // And `apply` always does.
    assert!(two.belfry(&["apply"]).status.success());
    eventually("its return", || one.belfry(&["show", name]).status.success().then_some(()));
    assert_eq!(nodes[0].event("config_skew")["state"], "began");
    assert!(one.belfry(&["apply"]).status.success());
    assert_eq!(nodes[0].event("config_skew")["state"], "ended");
    nodes.iter_mut().for_each(Up::stop);
}

#[test]
fn a_node_that_never_loaded_its_files_leaves_those_of_the_others_alone() {
    let Some(one) = Site::postgres() else { return };
    let two = one.beside();
    one.config(&agent(""));
    two.config(&agent("other: {every: 1h}"));
    let mut first = one.up();
    first.event("node_started");
    let mut second = two.up();
    second.event("config_skew");
    second.event("node_started");
    assert!(!one.belfry(&["show", "a/other"]).status.success());
    // The last node applies its files, because nobody else runs from the store.
    first.stop();
    second.signal(Signal::SIGHUP);
    second.event("config_loaded");
    assert!(one.belfry(&["show", "a/other"]).status.success());
    second.stop();
}

#[test]
fn an_edit_while_it_starts_is_not_lost() {
    for moment in [0, 10, 20, 40] {
        let site = Site::sqlite();
        site.config(&agent(""));
        let mut up = site.up();
        // Not to wait for anything: some moment of its start.
        std::thread::sleep(Duration::from_millis(moment));
        site.config(&agent("more: {every: 200ms, anchor: slot}"));
        up.event_of("run_finished", "more");
    }
}

#[test]
fn a_broken_file_changes_nothing_and_is_told_once() {
    for way in [Way::Signal, Way::Change] {
        for (broken, line, words) in [
            ("agents:\n  a:\n\tshell: true\n", 3, "not YAML"),
            ("agents:\n  a: {shell: 'true', scedules: {}}\n", 2, "unknown key `scedules`"),
        ] {
            let site = Site::sqlite();
            site.config(&agent(""));
            let mut up = site.up();
            up.event_of("run_finished", "steady");
            site.raw_config(broken);
            way.take(&site, &up);
            let rejected = up.event("config_rejected");
            let detail = rejected["detail"].as_str().unwrap();
            assert!(detail.contains(&format!("belfry.yaml:{line}")) && detail.contains(words), "{detail}");
            eventually("the line underlined", || up.errors().contains('^').then_some(()));
            // Looked at every second: seven ticks are longer than that.
            for _ in 0..7 {
                up.event_of("run_finished", "steady");
            }
            let refused = site.belfry(&["reload"]);
            assert_eq!(refused.status.code(), Some(2));
            site.config(&agent("more: {every: 200ms, anchor: slot}"));
            up.event_of("run_finished", "more");
            up.stop();
            let told = up.seen.iter().filter(|event| event["event"] == "config_rejected").count();
            assert_eq!(told, 1, "{way:?} {broken:?}");
        }
    }
}

#[test]
fn an_empty_file_removes_nothing() {
    let site = Site::sqlite();
    site.config(&agent(""));
    let mut up = site.up();
    up.event_of("run_finished", "steady");
    site.raw_config("# nothing yet\n");
    up.event("config_rejected");
    up.event_of("run_finished", "steady");
    let told = site.belfry(&["check"]);
    assert_eq!(told.status.code(), Some(2));
    let words = String::from_utf8_lossy(&told.stderr);
    assert!(
        words.contains("the file is empty, or has only comments") && words.contains("agents: {}"),
        "{words}"
    );
    up.stop();
}

#[test]
fn settings_that_wait_for_the_next_start_are_named() {
    let site = Site::sqlite();
    site.config(&agent("other: {every: 200ms, anchor: slot}"));
    let mut up = site.up();
    up.event_of("run_finished", "other");
    let changed = "listen: 127.0.0.1:7499\nengine: {lease: 45s, labels: [gpu]}\nretention: {runs: 3d}\n";
    site.config(&format!("{changed}{}", agent("more: {every: 200ms, anchor: slot}")));
    up.event_of("run_finished", "more");
    let said = site.belfry(&["reload"]);
    let words = String::from_utf8_lossy(&said.stdout).into_owned();
    let wanted = "takes effect at the next start: listen, engine.lease, engine.labels, retention";
    assert!(said.status.success() && words.contains(wanted), "{said:?}");
    up.stop();
}

#[test]
fn a_single_bad_schedule_is_invalid_alone_and_heals() {
    let site = Site::sqlite();
    site.config(&agent("other: {every: 200ms, anchor: slot}"));
    let mut up = site.up();
    up.event_of("run_finished", "other");
    site.config(&agent("other: {every: 200ms, anchor: slot, timezone: Mars/Phobos}"));
    up.event("config_loaded");
    assert_eq!(site.json(&["show", "a/other"])["status"], "invalid");
    let said = site.belfry(&["reload"]);
    let words = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(
        said.status.success() && words.contains("invalid: ") && words.contains("Mars/Phobos"),
        "{said:?}"
    );
    up.event_of("run_finished", "steady");
    site.config(&agent("other: {every: 200ms, anchor: slot}"));
    up.event("config_loaded");
    assert_eq!(site.json(&["show", "a/other"])["status"], "active");
    up.event_of("run_finished", "other");
    up.stop();
}

#[test]
fn what_left_the_file_is_retired_and_its_waiting_runs_end() {
    for site in Site::each() {
        let leaving = r#"
  leaving:
    shell: 'echo "start $$" >> side.log; while [ ! -e go ]; do sleep 0.05; done'
    schedules: {s: {every: 1h}}
"#;
        site.config(&format!("{}{leaving}", agent("")));
        let mut up = site.up();
        site.wait_for_line("start");
        let waiting = site.belfry(&["run", "leaving/s", "-o", "json"]);
        assert!(waiting.status.success(), "{}", String::from_utf8_lossy(&waiting.stderr));
        let runs = site.runs("leaving/s");
        let waiting = runs.iter().find(|run| run["state"] == "pending").unwrap()["id"].clone();
        site.config(&agent(""));
        up.event("config_loaded");
        let of_waiting = || {
            let runs = site.json(&["runs", "-n", "1000"]);
            runs["items"].as_array().unwrap().iter().find(|run| run["id"] == waiting).cloned()
        };
        let ended =
            eventually("the end of what waited", || of_waiting().filter(|run| run["state"] == "cancelled"));
        assert_eq!(ended["reason"], "agent_removed", "{ended}");
        // What runs may end, and is kept.
        site.file("go", "");
        let finished = up.event_of("run_finished", "s");
        assert_eq!((&finished["agent"], &finished["state"]), (&"leaving".into(), &"completed".into()));
        let began = Instant::now();
        up.event_of("run_finished", "steady");
        assert!(began.elapsed() < Duration::from_secs(5));
        up.stop();
    }
}

#[test]
fn diff_leaves_out_a_one_shot_that_went_with_its_run() {
    let site = Site::sqlite();
    let once = "agents: {a: {run: [\"true\"], schedules: {once: {after: 100ms, delete_after_run: true}}}}\n";
    site.config(once);
    let mut up = site.up();
    up.event_of("run_finished", "once");
    up.stop();
    let same = site.belfry(&["diff"]);
    assert!(String::from_utf8_lossy(&same.stderr).contains("no differences"), "{same:?}");
    assert!(same.stdout.is_empty(), "{same:?}");
    site.config(&once.replace("100ms", "200ms"));
    let other = site.belfry(&["diff"]);
    assert_eq!(
        String::from_utf8_lossy(&other.stdout),
        "+ a/once\n",
        "another definition is another schedule"
    );
}
