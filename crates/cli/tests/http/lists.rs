//! What is read, and page by page.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::client::{Api, CONFIG};
use crate::support::{Site, eventually};

fn names(page: &Value) -> Vec<String> {
    let items = page["items"].as_array().unwrap();
    items
        .iter()
        .map(|item| format!("{}/{}", item["agent"].as_str().unwrap(), item["schedule"].as_str().unwrap()))
        .collect()
}

#[test]
fn lists_are_read_page_by_page_while_things_come_and_go() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = Api::start(&site);
        for n in 0..25 {
            let body =
                json!({"agent": "slow", "schedule": format!("s{n:02}"), "definition": {"cron": "0 0 1 1 *"}});
            api.post("/api/v1/schedules", &body).is(201);
        }
        let (mut seen, mut path) = (Vec::new(), "/api/v1/schedules?agent=slow&limit=10".to_owned());
        let mut round = 0;
        loop {
            let page = api.get(&path).is(200);
            seen.extend(names(&page));
            let Some(next) = page["next"].as_str() else { break };
            path = format!("/api/v1/schedules?agent=slow&limit=10&cursor={next}");
            // What was given may go, and what was passed may come.
            round += 1;
            let last = seen.last().unwrap().clone();
            if round == 1 {
                api.send("DELETE", &format!("/api/v1/schedules/{last}"), &[], b"").is(200);
                let body = json!({"agent": "slow", "schedule": "a-new-one", "definition": {"every": "1h"}});
                api.post("/api/v1/schedules", &body).is(201);
            }
        }
        assert_eq!(seen.len(), 27, "{seen:?}");
        assert_eq!(seen.iter().collect::<BTreeSet<_>>().len(), 27, "none twice");
        for _ in 0..5 {
            api.post("/api/v1/schedules/hello/quiet/run", &json!({"wait_ms": 20000})).is(201);
        }
        let (mut runs, mut path) =
            (BTreeSet::new(), "/api/v1/runs?agent=hello&schedule=quiet&limit=2".to_owned());
        loop {
            let page = api.get(&path).is(200);
            for run in page["items"].as_array().unwrap() {
                assert!(runs.insert(run["id"].as_str().unwrap().to_owned()), "none twice");
                assert_eq!((&run["state"], &run["trigger"]), (&json!("completed"), &json!("manual")));
            }
            let Some(next) = page["next"].as_str() else { break };
            path = format!("/api/v1/runs?agent=hello&schedule=quiet&limit=2&cursor={next}");
        }
        assert_eq!(runs.len(), 5);
    }
}

#[test]
fn the_answers_are_those_of_the_command_line() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    api.up.lock().unwrap().event_of("run_finished", "often");
    api.post("/api/v1/schedules/hello/often/pause", &json!({})).is(200);
    let api_answer = |path: &str| api.get(path).is(200);
    assert_eq!(api_answer("/api/v1/schedules/hello/quiet"), site.json(&["show", "hello/quiet"]));
    assert_eq!(api_answer("/api/v1/schedules?agent=slow"), site.json(&["ls", "slow"]));
    let (ours, theirs) = (api_answer("/api/v1/nodes"), site.json(&["nodes"]));
    assert_eq!(ours["items"][0]["id"], theirs["items"][0]["id"]);
    let next = api_answer("/api/v1/schedules/hello/quiet/next?n=3");
    let said = site.json(&["next", "hello/quiet", "-n", "3", "--tz", "Europe/London"]);
    assert_eq!(next["tz"], said["tz"]);
    let ticks = |answer: &Value| -> Vec<(Value, Value)> {
        let ticks = answer["ticks"].as_array().unwrap().iter();
        ticks.map(|tick| (tick["tick_at"].clone(), tick["due_at"].clone())).collect()
    };
    assert_eq!(ticks(&next), ticks(&said));
    let why = api_answer("/api/v1/schedules/hello/quiet/why");
    assert_eq!(why["reason"], "not_due");
    let ticks = api_answer("/api/v1/schedules/hello/often/ticks?limit=1");
    assert_eq!(ticks["items"][0]["decision"], "fired");
    assert_eq!(api_answer("/api/v1/agents")["items"].as_array().unwrap().len(), 2);
    assert_eq!(api_answer("/api/v1/agents/hello")["kind"], "shell");
    api.get("/api/v1/agents/nobody").refused(404, "not_found");
}

#[test]
fn ticks_that_were_left_out_are_listed_also_while_a_pause_lasts() {
    let site = Site::sqlite();
    site.config(
        "agents: {a: {shell: 'true', schedules: {s: {every: 100ms, anchor: slot}, later: {cron: '0 0 1 1 *'}}}}",
    );
    let api = Api::start(&site);
    api.post("/api/v1/schedules/a/s/pause", &json!({})).is(200);
    let skipped = |path: &str| -> Vec<Value> {
        let page = api.get(path).is(200);
        let items = page["items"].as_array().unwrap().iter();
        items.filter(|item| item["reason"] == "disabled").cloned().collect()
    };
    let path = "/api/v1/schedules/a/s/ticks?limit=1000";
    let open = eventually("two ticks are left out", || {
        skipped(path).pop().filter(|open| open["count"].as_u64() >= Some(2))
    });
    let shown = api.get("/api/v1/schedules/a/s").is(200);
    assert_eq!(
        (&shown["skips"][0]["reason"], &shown["skips"][0]["decision"]),
        (&json!("disabled"), &json!("skipped"))
    );
    let (first, later) = (&open["from"], open["to"].as_str().unwrap());
    let from_within = || skipped(&format!("/api/v1/schedules/a/s/ticks?from={later}&limit=1000"));
    assert_eq!(&from_within()[0]["from"], first, "a range that lasts and begins before");
    api.post("/api/v1/schedules/a/s/resume", &json!({})).is(200);
    assert_eq!(&from_within()[0]["from"], first, "a range that begins before");
    let first_page = api.get(&format!("/api/v1/schedules/a/s/ticks?from={later}&limit=1")).is(200);
    assert_eq!(&first_page["items"][0]["from"], first);
}

#[test]
fn a_node_says_whether_it_lives_and_can_work() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = Api::start(&site);
        assert_eq!(api.get("/healthz").is(200)["status"], "ok");
        let ready = api.get("/readyz").is(200);
        assert_eq!(ready["ready"], true, "{ready}");
        let run = api.post("/api/v1/schedules/hello/quiet/run", &json!({"wait_ms": 20000})).is(201);
        assert_eq!(run["state"], "completed");
        let metrics = api.get("/metrics");
        assert_eq!(metrics.status, 200);
        let text = String::from_utf8(metrics.body.clone()).unwrap();
        for name in [
            "belfry_runs_total{state=\"completed\"",
            "belfry_attempts_total{trigger=\"manual\"",
            "belfry_lateness_seconds_bucket",
            "belfry_duration_seconds_count",
            "belfry_store_up 1",
            "belfry_loop_lag_seconds",
            "belfry_http_requests_total{operation=\"run_schedule\",status=\"201\"} 1",
            "# EOF",
        ] {
            assert!(text.contains(name), "{name} is not in\n{text}");
        }
        assert!(metrics.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    }
}
