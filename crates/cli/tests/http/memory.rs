//! What stored documents cost a server whose clients do not need them.

use serde_json::{Value, json};

use crate::client::Api;
use crate::support::{Site, eventually};

/// Clients at once.
const CLIENTS: usize = 40;
/// What they may cost together: some of them are read or written at the same time, but not all.
const GROWTH_MAX: u64 = 160 << 20;

/// The most memory that a process has had, in bytes.
fn peak(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() << 10
}

/// Short as a text, and 100 times as long in memory.
fn document() -> Value {
    json!({"list": vec![json!({"a": 1}); 9_000]})
}

#[test]
fn who_waits_follows_or_ends_runs_does_not_read_their_payloads() {
    let site = Site::sqlite();
    site.config(
        "api: {rate: 100000/s}
agents:
  a:
    shell: 'sleep 60'
    max_concurrent: 1
    schedules: {s: {cron: '0 0 1 1 *', if_running: queue, max_pending: 1000}}
",
    );
    let api = Api::start(&site);
    let pid = api.up.lock().unwrap().pid();
    // All that one of them costs is there already.
    let first = api.post("/api/v1/schedules/a/s/run", &json!({"payload": document()})).is(201);
    let run = first["id"].as_str().unwrap().to_owned();
    let before = peak(pid);
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..CLIENTS)
            .map(|_| {
                let ask = json!({"payload": document(), "wait_ms": 1500});
                scope.spawn(|| api.post("/api/v1/schedules/a/s/run", &{ ask }).status)
            })
            .collect();
        // Some may find no place among those that wait: they are told.
        let statuses: Vec<_> = waiting.into_iter().map(|each| each.join().unwrap()).collect();
        assert!(statuses.iter().filter(|status| **status == 201).count() > 10, "{statuses:?}");
    });
    let waited = peak(pid);
    assert!(waited < before + GROWTH_MAX, "waiting took {} MiB", (waited - before) >> 20);
    let followed: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let head = format!(
                "GET /api/v1/runs/{run}/log?follow=true HTTP/1.1\r\nhost: {}\r\n{}\r\n\r\n",
                api.address,
                api.auth()
            );
            api.raw(head.as_bytes())
        })
        .collect();
    let live = || api.get("/api/v1/runs?state=pending&limit=1000").is(200)["items"].as_array().unwrap().len();
    assert!(live() > 10);
    api.post("/api/v1/lanes/cron/clear", &json!({})).is(200);
    eventually("the lane to be empty", || (live() == 0).then_some(()));
    drop(followed);
    let all = peak(pid);
    assert!(all < before + GROWTH_MAX, "following and ending took {} MiB", (all - waited) >> 20);
    api.post(&format!("/api/v1/runs/{run}/cancel"), &json!({})).is(200);
    api.stop();
}

#[test]
fn runs_that_start_together_read_their_payloads_a_few_at_a_time() {
    let site = Site::sqlite();
    site.config(
        "api: {rate: 100000/s}
lanes: {narrow: 1}
agents:
  a:
    shell: 'sleep 60'
    lane: narrow
    max_concurrent: 100
    grace: 1s
    schedules: {s: {cron: '0 0 1 1 *', if_running: allow}}
",
    );
    let api = Api::start(&site);
    let pid = api.up.lock().unwrap().pid();
    let runs: Vec<Value> = (0..=CLIENTS)
        .map(|_| api.post("/api/v1/schedules/a/s/run", &json!({"payload": document()})).is(201)["id"].clone())
        .collect();
    let before = peak(pid);
    let running =
        || api.get("/api/v1/runs?state=running&limit=1000").is(200)["items"].as_array().unwrap().len();
    eventually("the first to run", || (running() == 1).then_some(()));
    api.json("PATCH", "/api/v1/lanes/narrow", &json!({"slots": 100})).is(200);
    eventually("all to run", || (running() == CLIENTS + 1).then_some(()));
    let after = peak(pid);
    assert!(after < before + GROWTH_MAX, "their start took {} MiB", (after - before) >> 20);
    for run in &runs {
        api.post(&format!("/api/v1/runs/{}/cancel", run.as_str().unwrap()), &json!({})).is(200);
    }
    api.stop();
}

#[test]
fn lists_read_large_schedules_a_few_at_a_time() {
    let site = Site::sqlite();
    site.config("api: {rate: 100000/s}\nagents:\n  a: {shell: 'true'}\n");
    let api = Api::start(&site);
    let pid = api.up.lock().unwrap().pid();
    let large = "x".repeat(240_000);
    for n in 0..60 {
        let definition = json!({"every": "1h", "anchor": "slot", "payload": {"a": large}});
        let ask = json!({"agent": "a", "schedule": format!("s{n}"), "definition": definition});
        api.post("/api/v1/schedules", &ask).is(201);
    }
    let before = peak(pid);
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| api.get("/api/v1/schedules?limit=1000").is(200));
        }
    });
    let after = peak(pid);
    assert!(after < before + GROWTH_MAX, "the lists took {} MiB", (after - before) >> 20);
    api.stop();
}
