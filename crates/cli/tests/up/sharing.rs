//! How runs share: overlap and limits, judged by what the children wrote.

use std::collections::BTreeMap;

use crate::support::{Site, Up};

/// A child that does not listen, with a grandchild that has left: with a closed output, or holding on to it.
fn stubborn(output: &str) -> String {
    format!(
        r#"#!/bin/sh
# Whoever was here before must be gone.
if [ -e side.log ]; then
    while read -r _ run pid; do
        [ "$run" != "$BELFRY_RUN_ID" ] && [ -e "/proc/$pid" ] && ! grep -q ' [ZX] ' "/proc/$pid/stat" && echo "alive $run $pid" >> side.log
    done < pids.log
fi
trap '' TERM INT HUP
echo "pid $BELFRY_RUN_ID $$" >> pids.log
echo "start $BELFRY_RUN_ID $$" >> side.log
(setsid sh -c 'trap "" TERM INT HUP; echo "pid $BELFRY_RUN_ID $$" >> pids.log; while :; do echo "beat $BELFRY_RUN_ID $$" >> side.log; sleep 0.03; done' {output} &)
while :; do echo "beat $BELFRY_RUN_ID $$" >> side.log; sleep 0.03; done
"#
    )
}

#[test]
fn a_cancelled_family_is_gone_before_the_next_one_starts() {
    for output in ["</dev/null >/dev/null 2>&1", "</dev/null"] {
        for site in Site::each() {
            site.file("child.sh", &stubborn(output));
            site.config(
                r#"
agents:
  a:
    run: ["sh", "child.sh"]
    grace: 200ms
    schedules:
      s: {every: 700ms, anchor: slot, if_running: cancel}
"#,
            );
            let mut up = site.up();
            for _ in 0..3 {
                up.event("run_cancelled");
            }
            let lines = site.wait_for_side("a fourth start", |lines| {
                lines.iter().filter(|line| line[0] == "start").count() >= 4
            });
            assert!(lines.iter().all(|line| line[0] != "alive"), "{lines:?}");
            let mut current = "";
            let mut families: BTreeMap<&str, std::collections::BTreeSet<&str>> = BTreeMap::new();
            for line in &lines {
                if line[0] == "start" {
                    current = &line[1];
                }
                assert_eq!(line[1], current, "{} outlived the start of {current}", line[1]);
                families.entry(current).or_default().insert(&line[2]);
            }
            let whole = families.values().filter(|pids| pids.len() == 2).count();
            assert!(whole >= 3, "grandchildren were there: {families:?}");
        }
    }
}

const FIVE: &str = r#"
agents:
  a:
    shell: 'echo "start $BELFRY_TICK_AT $BELFRY_SCHEDULE" >> side.log; sleep 0.2; echo "end $BELFRY_TICK_AT $BELFRY_SCHEDULE" >> side.log'
    max_concurrent: 2
    schedules:
      one: {every: 2s, anchor: slot}
      two: {every: 2s, anchor: slot}
      three: {every: 2s, anchor: slot}
      four: {every: 2s, anchor: slot}
      five: {every: 2s, anchor: slot}
"#;

/// Two ticks of five schedules: all run, never three at once.
fn two_at_once(site: &Site, nodes: &mut [Up]) {
    let lines =
        site.wait_for_side("ten ends", |lines| lines.iter().filter(|line| line[0] == "end").count() >= 10);
    let (mut running, mut most) = (0, 0);
    let mut ticks: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for line in &lines {
        match line[0].as_str() {
            "start" => {
                running += 1;
                ticks.entry(&line[1]).or_default().push(&line[2]);
            }
            _ => running -= 1,
        }
        most = most.max(running);
    }
    assert_eq!(most, 2, "{lines:?}");
    let (first, schedules) = ticks.iter_mut().next().unwrap();
    schedules.sort_unstable();
    assert_eq!(*schedules, ["five", "four", "one", "three", "two"], "at {first}");
    nodes.iter_mut().for_each(Up::stop);
}

#[test]
fn no_more_than_the_limit_run_at_once() {
    let site = Site::sqlite();
    site.config(FIVE);
    let mut up = site.up();
    up.event("node_started");
    two_at_once(&site, &mut [up]);
}

#[test]
fn no_more_than_the_limit_run_at_once_on_two_nodes() {
    let Some(site) = Site::postgres() else { return };
    site.config(FIVE);
    let mut nodes = [site.up(), site.up()];
    nodes.iter_mut().for_each(|node| drop(node.event("node_started")));
    two_at_once(&site, &mut nodes);
}
