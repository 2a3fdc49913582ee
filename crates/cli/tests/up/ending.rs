//! How it stops: what runs may end, what does not is ended, and nothing is lost.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::support::Site;

/// A long one that says when it starts, ends and is told to end, beside a quick one.
fn config(engine: &str, agent: &str) -> String {
    format!(
        r#"
engine: {{{engine}}}
agents:
  long:
    shell: 'trap "echo told $BELFRY_ATTEMPT >> side.log; exit 1" TERM; echo "start $BELFRY_ATTEMPT $$" >> side.log; while [ ! -e go ]; do sleep 0.05; done; sleep 1; echo "end $BELFRY_ATTEMPT" >> side.log'
    {agent}
    schedules: {{s: {{every: 1h}}}}
  quick:
    shell: 'echo "quick $(date +%s%3N)" >> side.log'
    schedules: {{q: {{every: 100ms, anchor: slot}}}}
"#
    )
}

fn millis() -> u128 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis()
}

#[test]
fn it_lets_what_runs_end_and_claims_no_more() {
    for (signal, site) in [(Signal::SIGTERM, Site::sqlite()), (Signal::SIGINT, Site::other())] {
        site.config(&config("shutdown_timeout: 20s", ""));
        let mut up = site.up();
        site.wait_for_line("start");
        site.wait_for_line("quick");
        let asked = millis();
        up.signal(signal);
        // It takes a second to end: ten more ticks of the quick one would come meanwhile.
        site.file("go", "");
        assert_eq!(up.ends().code(), Some(0), "{}", up.errors());
        let lines = site.side();
        assert!(lines.iter().any(|line| line[0] == "end"), "{lines:?}");
        assert!(lines.iter().all(|line| line[0] != "told"), "{lines:?}");
        let last =
            lines.iter().filter(|line| line[0] == "quick").map(|line| line[1].parse::<u128>().unwrap());
        let last = last.max().unwrap();
        assert!(last < asked + 700, "started {} ms after it was told to stop", last - asked);
        assert_eq!(up.seen.last().unwrap()["event"], "node_stopped");
        let run = &site.runs("long/s")[0];
        assert_eq!(run["state"], "completed", "{run}");
        assert!(site.json(&["nodes"])["items"].as_array().unwrap().is_empty());
    }
}

#[test]
fn a_private_directory_that_its_program_has_moved_is_gone_after_the_stop() {
    let site = Site::sqlite();
    site.config(
        r#"
agents:
  mover:
    shell: 'mv "$(dirname "$BELFRY_RESULT_FILE")" "$(dirname "$BELFRY_RESULT_FILE")-moved"; echo moved >> side.log'
    schedules: {s: {every: 1h}}
"#,
    );
    let mut up = site.up();
    site.wait_for_line("moved");
    up.signal(Signal::SIGTERM);
    assert_eq!(up.ends().code(), Some(0), "{}", up.errors());
    let left = std::fs::read_dir(site.state_file("run/attempts")).map_or(0, Iterator::count);
    assert_eq!(left, 0);
}

#[test]
fn what_does_not_end_in_time_goes_back_and_is_not_counted() {
    for (signal, site) in [(Signal::SIGTERM, Site::sqlite()), (Signal::SIGINT, Site::other())] {
        site.config(&config("shutdown_timeout: 1s", "retry: {max: 1, base: 100ms}"));
        let mut up = site.up();
        site.wait_for_line("start 1");
        let asked = Instant::now();
        up.signal(signal);
        assert_eq!(up.ends().code(), Some(6), "{}", up.errors());
        assert!(asked.elapsed() >= Duration::from_secs(1));
        assert!(up.errors().contains("1 still running when the time was up"), "{}", up.errors());
        site.wait_for_line("told 1");
        let run = &site.runs("long/s")[0];
        assert_eq!(run["state"], "pending", "{run}");
        assert_eq!(run["attempt"], 0, "{run}");
        site.file("go", "");
        let mut up = site.up();
        let finished = up.event_of("run_finished", "s");
        assert_eq!(finished["run_id"], run["id"]);
        assert_eq!((&finished["state"], &finished["attempt"]), (&"completed".into(), &1.into()));
        up.stop();
    }
}

#[test]
fn a_second_signal_ends_everything_at_once() {
    for (first, second, site) in
        [(Signal::SIGTERM, Signal::SIGTERM, Site::sqlite()), (Signal::SIGINT, Signal::SIGTERM, Site::other())]
    {
        site.config(
            r#"
engine: {shutdown_timeout: 5m}
agents:
  deaf:
    shell: 'trap "" TERM; echo "start $BELFRY_ATTEMPT $$" >> side.log; while :; do sleep 0.05; done'
    grace: 5m
    max_concurrent: 3
    schedules: {a: {every: 1h}, b: {every: 1h}, c: {every: 1h}}
"#,
        );
        let mut up = site.up();
        site.wait_for_side("three starts", |lines| lines.len() == 3);
        let asked = Instant::now();
        up.signal(first);
        up.signal(second);
        // Signals of one kind that come together are one.
        let again = up.ends_within(Duration::from_secs(2));
        let status = again.unwrap_or_else(|| {
            up.signal(second);
            up.ends()
        });
        assert_eq!(status.code(), Some(6), "{}", up.errors());
        assert!(up.errors().contains("3 still running when the time was up"), "{}", up.errors());
        assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
        assert_eq!(up.seen.last().unwrap()["event"], "node_stopped");
        for name in ["deaf/a", "deaf/b", "deaf/c"] {
            let run = &site.runs(name)[0];
            assert_eq!((&run["state"], &run["attempt"]), (&"pending".into(), &0.into()), "{run}");
        }
        assert!(site.side().iter().all(|line| !crate::support::lives(&line[2])));
    }
}

#[test]
fn what_may_not_start_twice_fails_by_a_shutdown() {
    for site in Site::each() {
        site.config(&config("shutdown_timeout: 100ms", "retry: {max: 0}"));
        let mut up = site.up();
        site.wait_for_line("start 1");
        up.signal(Signal::SIGTERM);
        assert_eq!(up.ends().code(), Some(6), "{}", up.errors());
        let run = &site.runs("long/s")[0];
        assert_eq!((&run["state"], &run["reason"]), (&"failed".into(), &"shutdown".into()), "{run}");
    }
}
