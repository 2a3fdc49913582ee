//! What happens, as it happens.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use crate::client::{Api, CONFIG};
use crate::support::{Site, eventually};

#[test]
fn every_change_is_told_and_who_comes_back_misses_nothing() {
    let site = Site::sqlite();
    site.config(&CONFIG.replace("      often: {every: 200ms}\n", ""));
    let api = Api::start(&site);
    let mut stream = api.listen("/api/v1/events", &[]);
    let body = json!({"agent": "hello", "schedule": "x", "definition": {"cron": "0 0 1 1 *"}});
    api.post("/api/v1/schedules", &body).is(201);
    let created = stream.next().unwrap();
    assert_eq!((created.event.as_str(), &created.data["schedule"]), ("schedule_created", &json!("x")));
    drop(stream);
    let place = "/api/v1/schedules/hello/x";
    api.json("PATCH", place, &json!({"cron": "0 1 1 1 *"})).is(200);
    api.send("POST", &format!("{place}/pause"), &[], b"").is(200);
    api.send("POST", &format!("{place}/resume"), &[], b"").is(200);
    let run = api.post(&format!("{place}/run"), &json!({"wait_ms": 20000})).is(201);
    api.send("DELETE", place, &[], b"").is(200);
    let mut stream = api.listen("/api/v1/events", &[&format!("last-event-id: {}", created.id)]);
    let mut names = Vec::new();
    while names.last().is_none_or(|last| last != "schedule_deleted") {
        names.push(stream.next().unwrap().event);
    }
    let wanted = [
        "schedule_updated",
        "schedule_paused",
        "schedule_resumed",
        "run_created",
        "run_started",
        "run_finished",
        "schedule_deleted",
    ];
    assert_eq!(names, wanted);
    let filter = format!("/api/v1/events?event=run_finished&run={}", run["id"].as_str().unwrap());
    let mut only = api.listen(&filter, &[&format!("last-event-id: {}", created.id)]);
    assert_eq!(only.next().unwrap().data["state"], "completed");
}

#[test]
fn an_edit_while_the_node_was_down_is_told_to_those_who_listen_after_its_start() {
    let site = Site::sqlite();
    let config = CONFIG.replace("      often: {every: 200ms}\n", "");
    site.config(&config);
    Api::start(&site).up.lock().unwrap().stop();
    // One edit is of a schedule, the other of an agent alone.
    let edited =
        config.replacen("0 0 1 1 *", "0 1 1 1 *", 1).replace("  slow:\n", "  slow:\n    max_concurrent: 7\n");
    site.config(&edited);
    let api = Api::start(&site);
    let mut stream = api.listen("/api/v1/events", &[]);
    api.send("POST", "/api/v1/schedules/hello/quiet/pause", &[], b"").is(200);
    let id = stream.wait_for("schedule_paused").id;
    let (life, _) = id.split_once('-').unwrap();
    let first = format!("last-event-id: {life}-0");
    let told = api.listen("/api/v1/events?event=config_loaded", &[&first]).next().unwrap();
    assert_eq!(told.data["detail"], "0 added, 1 changed, 0 retired; 1 agent changed", "{}", told.data);
}

#[test]
fn every_run_has_a_trace_also_one_of_a_tick_and_one_that_never_started() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = Api::start(&site);
        let mut stream = api.listen("/api/v1/events?schedule=often", &[]);
        // A claim may overtake the answer to the plan: the order of a run's first two events is open.
        let mut told: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let run = loop {
            let event = stream.next().unwrap();
            let Some(run) = event.data["run_id"].as_str() else { continue };
            assert_eq!(event.data["trace_id"], json!(run.replace('-', "")), "{}", event.event);
            let names = told.entry(run.to_owned()).or_default();
            names.insert(event.event);
            if ["tick_planned", "run_started", "run_finished"].iter().all(|name| names.contains(*name)) {
                break run.to_owned();
            }
        };
        let trace = json!(run.replace('-', ""));
        assert_eq!(api.get(&format!("/api/v1/runs/{run}")).is(200)["trace_id"], trace);
        // Its agent is busy: the second one waits, and is cancelled before it starts.
        let mut stream = api.listen("/api/v1/events?agent=slow", &[]);
        let header = "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let runs =
            [0, 1].map(|_| api.send("POST", "/api/v1/schedules/slow/quiet/run", &[header], b"").is(201));
        stream.wait_for("run_started");
        let place = format!("/api/v1/runs/{}/cancel", runs[1]["id"].as_str().unwrap());
        assert_eq!(api.send("POST", &place, &[], b"").is(200)["state"], "cancelled");
        let told = stream.wait_for("run_cancelled").data;
        assert_eq!((&told["run_id"], &told["reason"]), (&runs[1]["id"], &json!("requested")));
        assert_eq!(told["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736", "that of who asked for the run");
    }
}

#[test]
fn what_is_no_longer_known_is_a_gap() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    let refused = api.get("/api/v1/events?event=run_started,run_finish").refused(400, "bad_query");
    assert!(refused["detail"].as_str().unwrap().contains("did you mean `run_finished`?"), "{refused}");
    let mut stream = api.listen("/api/v1/events", &["last-event-id: 0123456789ab-17"]);
    assert_eq!(stream.next().unwrap().event, "gap", "of another life");
    assert!(stream.wait_for("run_finished").id.contains('-'), "and then it goes on");
}

#[test]
fn a_reader_that_does_not_read_hinders_nobody() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    let deaf: Vec<_> = (0..50).map(|_| api.listen("/api/v1/events", &[])).collect();
    let mut stream = api.listen("/api/v1/events?schedule=often", &[]);
    for _ in 0..10 {
        stream.wait_for("run_finished");
    }
    let text = || String::from_utf8(api.get("/metrics").body).unwrap();
    assert!(text().contains("belfry_event_readers 51"), "{}", text());
    drop(deaf);
    eventually("those who left are forgotten", || text().contains("belfry_event_readers 1\n").then_some(()));
}

#[test]
fn what_a_run_writes_is_followed_to_its_end() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = Api::start(&site);
        let run = api.post("/api/v1/schedules/slow/quiet/run", &json!({})).is(201);
        let path = format!("/api/v1/runs/{}/log", run["id"].as_str().unwrap());
        let mut log = api.listen(&format!("{path}?follow=true"), &[]);
        let first = log.wait_for("output");
        assert_eq!((&first.data["text"], &first.data["stream"]), (&json!("begun\n"), &json!("stdout")));
        site.file("go", "");
        assert_eq!(log.wait_for("output").data["text"], "done\n");
        assert_eq!(log.wait_for("end").data["state"], "completed");
        assert!(log.next().is_none(), "and ends");
        let mut rest = api.listen(&format!("{path}?follow=true"), &[&format!("last-event-id: {}", first.id)]);
        assert_eq!(rest.next().unwrap().data["text"], "done\n", "who comes back goes on behind what it saw");
        let page = api.get(&path).is(200);
        assert_eq!(page["items"].as_array().unwrap().len(), 2);
        let next = api.get(&format!("{path}?after={}", page["next"].as_str().unwrap())).is(200);
        assert!(next["items"].as_array().unwrap().is_empty());
    }
}
