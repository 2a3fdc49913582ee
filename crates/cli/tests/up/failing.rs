//! What happens when runs fail: retries wait longer each time, a breaker opens and lets one probe through.

use belfry_time::Timestamp;
use serde_json::Value;

use crate::support::{Site, eventually};

fn at(value: &Value) -> i64 {
    value.as_str().unwrap().parse::<Timestamp>().unwrap().as_millisecond()
}

#[test]
fn retries_wait_twice_as_long_each_time_give_or_take_a_quarter() {
    for site in Site::each() {
        site.config(
            r#"
agents:
  a:
    shell: 'echo "start $BELFRY_SCHEDULE $BELFRY_ATTEMPT $(date +%s%3N)" >> side.log; exit 7'
    max_concurrent: none
    retry: {max: 3, base: 200ms, max_delay: 700ms}
    schedules: {r: {every: 1h}, s: {every: 1h}, t: {every: 1h}, u: {every: 1h}}
  b:
    shell: 'echo "start $BELFRY_SCHEDULE $BELFRY_ATTEMPT $(date +%s%3N)" >> side.log; exit 78'
    schedules: {final: {every: 1h}}
"#,
        );
        let mut up = site.up();
        let is_end = |event: &Value| event["event"] == "run_finished";
        for _ in 0..5 {
            assert_eq!(up.wait_for("an end", is_end)["state"], "failed");
        }
        let mut spread = std::collections::BTreeSet::new();
        for schedule in ["r", "s", "t", "u"] {
            let starts: Vec<i64> = site
                .side()
                .iter()
                .filter(|line| line[1] == schedule)
                .map(|line| line[3].parse().unwrap())
                .collect();
            assert_eq!(starts.len(), 4, "{schedule}");
            let retried = up
                .seen
                .iter()
                .filter(|event| event["event"] == "run_retried" && event["schedule"] == schedule);
            for ((base, pair), event) in [200, 400, 700].iter().zip(starts.windows(2)).zip(retried) {
                let (waited, promised) =
                    (pair[1] - pair[0], at(&event["retry_at"]) - at(&event["timestamp"]));
                // The first process took its time as well; the machine may be busy.
                assert!(waited >= base * 3 / 4 && promised <= base * 5 / 4, "{waited} for {base}: {event}");
                assert!(waited <= base * 5 / 4 + 1500, "{waited} for {base}");
                assert!(pair[1] >= at(&event["retry_at"]), "{event}");
                spread.insert(promised);
            }
            let run = &site.runs(&format!("a/{schedule}"))[0];
            assert_eq!((&run["attempt"], &run["exit_code"]), (&4.into(), &7.into()), "{run}");
        }
        assert!(spread.len() > 6, "they differ: {spread:?}");
        assert_eq!(site.runs("b/final")[0]["attempt"], 1);
        up.stop();
    }
}

#[test]
fn a_breaker_opens_and_lets_one_probe_through() {
    for site in Site::each() {
        site.config(
            r#"
agents:
  a:
    shell: 'echo "start $BELFRY_RUN_ID" >> side.log; sleep 0.3; test -e well'
    max_concurrent: none
    retry: {max: 0}
    breaker: {threshold: 3, reset_after: 1s}
    schedules: {s: {every: 500ms, anchor: slot}}
"#,
        );
        let mut up = site.up();
        for _ in 0..3 {
            assert_eq!(up.event("run_finished")["state"], "failed");
        }
        let skipped = up.event("tick_skipped");
        assert_eq!(skipped["reason"], "circuit_open", "{skipped}");
        assert_eq!(site.side().len(), 3);
        let probe = up.event("run_started");
        let failed = up.event("run_finished");
        assert_eq!((&failed["run_id"], &failed["state"]), (&probe["run_id"], &"failed".into()));
        site.file("well", "");
        let second = up.event("run_started");
        assert!(at(&second["timestamp"]) >= at(&failed["timestamp"]) + 900, "{failed} {second}");
        assert_eq!(up.event("run_finished")["state"], "completed");
        assert_eq!(up.event("run_finished")["state"], "completed");
        let shown = eventually("a closed breaker", || {
            let shown = site.json(&["breaker", "show", "a"])["items"][0].clone();
            (shown["state"] == "closed").then_some(shown)
        });
        let history: Vec<String> = shown["history"]
            .as_array()
            .unwrap()
            .iter()
            .map(|each| format!("{} {} {}", each["from"], each["to"], each["reason"]).replace('"', ""))
            .collect();
        let expected = [
            "closed open failure_threshold",
            "open half_open cooldown_elapsed",
            "half_open open failure_threshold",
            "open half_open cooldown_elapsed",
            "half_open closed success",
        ];
        let mut oldest_first = history.clone();
        if oldest_first[0] != expected[0] {
            oldest_first.reverse();
        }
        assert_eq!(oldest_first, expected);
        up.stop();
    }
}
