//! Schedules that come and go over HTTP, and what is done with them.

use serde_json::json;

use crate::client::{Api, CONFIG};
use crate::support::Site;

#[test]
fn a_schedule_is_made_changed_and_removed() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = Api::start(&site);
        let body = json!({"agent": "hello", "schedule": "x", "definition": {"cron": "0 9 * * *", "timezone": "Asia/Tokyo", "prompt": "p"}});
        let made = api.post("/api/v1/schedules", &body);
        assert_eq!(made.is(201)["timezone"], "Asia/Tokyo");
        assert_eq!(made.header("location"), Some("/api/v1/schedules/hello/x"));
        let first = made.header("etag").unwrap().to_owned();
        api.post("/api/v1/schedules", &body).refused(409, "exists");

        let place = "/api/v1/schedules/hello/x";
        let changed = api.json("PATCH", place, &json!({"cron": "0 10 * * *"}));
        let shown = changed.is(200);
        assert_eq!(
            (&shown["timezone"], &shown["revision"]),
            (&json!("Asia/Tokyo"), &json!(2)),
            "the zone stays"
        );
        assert_eq!(
            shown["definition"],
            json!({"cron": "0 10 * * *", "timezone": "Asia/Tokyo", "prompt": "p"})
        );
        let with = |tag: &str| format!("if-match: {tag}");
        let json_type = "content-type: application/json";
        let stale = api.send("PATCH", place, &[json_type, &with(&first)], br#"{"priority": 5}"#);
        stale.refused(412, "changed");
        let tag = changed.header("etag").unwrap();
        let (write, text) = (format!("{place}/write"), br#"{"text": "priority: 4"}"#);
        api.send("POST", &write, &[json_type, &with(&first)], text).refused(412, "changed");
        api.send("POST", &write, &[json_type, "if-none-match: *"], text).refused(412, "changed");
        let written = api.send("POST", &write, &[json_type, &with(tag)], text);
        assert_eq!(written.is(200)["definition"]["priority"], 4);
        let tag = written.header("etag").unwrap();
        api.send("PATCH", place, &[json_type, &with(tag)], br#"{"priority": 5}"#).is(200);
        assert_eq!(api.get(place).is(200)["definition"]["priority"], 5);

        let replaced = api.json("PUT", place, &json!({"every": "1h"})).is(200);
        assert_eq!(
            replaced["definition"],
            json!({"every": "1h", "timezone": "Europe/London"}),
            "the rest is gone"
        );
        api.send("PUT", place, &[json_type, "if-none-match: *"], br#"{"every": "2h"}"#)
            .refused(412, "changed");
        api.send("DELETE", place, &[&with(&first)], b"").refused(412, "changed");
        api.send("DELETE", place, &[], b"").is(200);
        api.get(place).refused(404, "not_found");
        api.send("DELETE", place, &[], b"").refused(404, "not_found");

        let audit = api.get("/api/v1/audit?limit=3").is(200);
        let actions: Vec<_> =
            audit["items"].as_array().unwrap().iter().map(|row| row["action"].clone()).collect();
        assert_eq!(actions, ["remove_schedule", "replace_schedule", "change_schedule"], "who did what");
    }
}

#[test]
fn what_is_wrong_names_the_field_and_the_way_out() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    let make = |definition: serde_json::Value| {
        api.post("/api/v1/schedules", &json!({"agent": "hello", "schedule": "x", "definition": definition}))
    };
    for (definition, field) in [
        (json!({"cron": "0 0 31 2 *"}), "cron"),
        (json!({"cron": "* * * *"}), "cron"),
        (json!({"every": "0s"}), "every"),
        (json!({"every": "1h", "timezone": "../../etc/passwd"}), "timezone"),
        (json!({"every": "1h", "only_between": "08:00-08:00"}), "only_between"),
        (json!({"every": "1h", "not_on": ["funday"]}), "not_on"),
        (json!({"every": "1h", "jitter": "2h"}), "jitter"),
        (json!({"evry": "1h"}), "evry"),
        (json!({"every": "1h", "cron": "0 9 * * *"}), "every"),
    ] {
        let problem = make(definition.clone()).refused(422, "invalid");
        assert_eq!(problem["field"], field, "{definition}: {problem}");
    }
    let problem = make(json!({"evry": "1h"})).refused(422, "invalid");
    assert_eq!(problem["way_out"], "did you mean `every`?");
    make(json!({"at": "2020-01-01T00:00:00Z"})).refused(422, "past");
    for secret in ["written out", "${SECRET:-written out}", "written out ${SECRET}"] {
        make(json!({"webhook": {"secret": secret}})).refused(422, "secret_written_out");
    }
    let nobody = json!({"agent": "nobody", "schedule": "x", "definition": {"every": "1h"}});
    api.post("/api/v1/schedules", &nobody).refused(404, "not_found");
    let alike = json!({"agent": "hello", "schedule": "QUIET", "definition": {"every": "1h"}});
    api.post("/api/v1/schedules", &alike).refused(409, "exists");
    assert_eq!(api.get("/api/v1/schedules?agent=hello").is(200)["items"].as_array().unwrap().len(), 4);
}

#[test]
fn what_a_file_owns_is_only_paused_and_run() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    let place = "/api/v1/schedules/hello/quiet";
    for answer in [
        api.json("PATCH", place, &json!({"cron": "0 1 * * *"})),
        api.json("PUT", place, &json!({"cron": "0 1 * * *"})),
        api.send("DELETE", place, &[], b""),
    ] {
        let problem = answer.refused(409, "owned_by_file");
        assert!(problem["detail"].as_str().unwrap().contains("belfry.yaml"), "{problem}");
    }
    let paused = api.post(&format!("{place}/pause"), &json!({"reason": "on holiday"})).is(200);
    assert_eq!((&paused["status"], &paused["reason"]), (&json!("paused"), &json!("on holiday")));
    api.post(&format!("{place}/pause"), &json!({"until": "2020-01-01T00:00:00Z"})).refused(422, "past");
    let until = api.post(&format!("{place}/pause"), &json!({"until": "2099-01-01T00:00:00Z"})).is(200);
    assert_eq!(until["paused_until"], "2099-01-01T00:00:00Z");
    let run =
        api.post(&format!("{place}/run"), &json!({"wait_ms": 20000, "payload": {"ref": "by hand"}})).is(201);
    assert_eq!(run["state"], "completed");
    let log = api.get(&format!("/api/v1/runs/{}/log", run["id"].as_str().unwrap())).is(200);
    assert_eq!(log["items"][0]["text"], "hello\nby hand");
    assert_eq!(api.send("POST", &format!("{place}/resume"), &[], b"").is(200)["status"], "active");
}

#[test]
fn one_key_makes_one_run_however_often_it_is_sent() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = Api::start(&site);
        let headers = ["content-type: application/json", "idempotency-key: release-42"];
        let (path, body) = ("/api/v1/schedules/slow/quiet/run", br#"{"payload": {"a": 1}}"#);
        let (count, connections) = (1024, 64);
        let (made, ids) = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..connections)
                .map(|_| {
                    scope.spawn(|| {
                        let answers =
                            (0..count / connections).map(|_| api.send("POST", path, &headers, body));
                        answers.map(|answer| (answer.status, answer.json()["id"].clone())).collect::<Vec<_>>()
                    })
                })
                .collect();
            let all: Vec<_> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
            let made = all.iter().filter(|(status, _)| *status == 201).count();
            let ids: std::collections::HashSet<_> = all.into_iter().map(|(_, id)| id.to_string()).collect();
            (made, ids)
        });
        assert_eq!((made, ids.len()), (1, 1), "{ids:?}");
        api.send("POST", path, &headers, br#"{"payload": {"a": 2}}"#).refused(409, "key_reused");
        assert_eq!(api.get("/api/v1/runs?agent=slow").is(200)["items"].as_array().unwrap().len(), 1);
    }
}

#[test]
fn a_key_that_made_a_schedule_makes_no_other() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = Api::start(&site);
        let make = |name: &str| {
            let body =
                json!({"agent": "hello", "schedule": name, "definition": {"every": "1h", "enabled": false}});
            let headers = ["content-type: application/json", "idempotency-key: s1"];
            api.send("POST", "/api/v1/schedules", &headers, body.to_string().as_bytes())
        };
        make("../x").refused(400, "bad_name");
        make("keyed1").is(201);
        make("keyed1").is(200);
        make("keyed2").refused(409, "key_reused");
        api.get("/api/v1/schedules/hello/keyed2").refused(404, "not_found");
        api.send("PATCH", "/api/v1/lanes/cron", &["content-type: application/json"], b"{}")
            .refused(422, "nothing_to_change");
    }
}

#[test]
fn a_run_is_cancelled_and_repeated() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    let run = api.post("/api/v1/schedules/slow/quiet/run", &json!({})).is(201);
    let place = format!("/api/v1/runs/{}", run["id"].as_str().unwrap());
    api.send("POST", &format!("{place}/retry"), &[], b"").refused(409, "not_ended");
    let cancelled = api.post(&format!("{place}/cancel"), &json!({"wait_ms": 20000})).is(200);
    assert_eq!((&cancelled["state"], &cancelled["reason"]), (&json!("cancelled"), &json!("requested")));
    api.send("POST", &format!("{place}/cancel"), &[], b"").is(200);
    site.file("go", "");
    let again = api.send("POST", &format!("{place}/retry"), &["idempotency-key: r"], b"").is(201);
    let repeat = api.send("POST", &format!("{place}/retry"), &["idempotency-key: r"], b"").is(200);
    assert_eq!(again["id"], repeat["id"]);
    let mut log = api.listen(&format!("/api/v1/runs/{}/log?follow=true", again["id"].as_str().unwrap()), &[]);
    assert_eq!(log.wait_for("end").data["state"], "completed");
    let done = format!("/api/v1/runs/{}/cancel", again["id"].as_str().unwrap());
    api.send("POST", &done, &[], b"").refused(409, "ended");
}

#[test]
fn ticks_of_the_past_are_made_up_for_once() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    let place = "/api/v1/schedules/hello/quiet/backfill";
    let body = json!({"from": "2020-01-01T00:00:00Z", "to": "2023-01-01T00:00:01Z", "dry_run": true});
    let shown = api.post(place, &body).is(200);
    assert_eq!(shown["runs"].as_array().unwrap().len(), 4, "{shown}");
    assert!(shown["runs"][0]["run_id"].is_null());
    let body = br#"{"from": "2020-01-01T00:00:00Z", "to": "2023-01-01T00:00:01Z", "limit": 2}"#;
    let headers = ["content-type: application/json", "idempotency-key: b"];
    let made = api.send("POST", place, &headers, body).is(200);
    assert_eq!((made["runs"].as_array().unwrap().len(), &made["more"]), (2, &json!(2)));
    let repeat = api.send("POST", place, &headers, body).is(200);
    assert_eq!(made["runs"], repeat["runs"], "the same runs");
    let body = json!({"from": "2099-01-01T00:00:00Z", "to": "2099-01-02T00:00:00Z"});
    api.post(place, &body).refused(422, "backfill");
}

#[test]
fn the_files_are_read_again_on_request() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    site.config(&format!("{CONFIG}      more: {{every: 1h}}\n"));
    api.send("POST", "/api/v1/reload", &[], b"").is(200);
    api.get("/api/v1/schedules/slow/more").is(200);
    site.config("agents: {hello: {shel: x}}");
    let problem = api.send("POST", "/api/v1/reload", &[], b"").refused(409, "config_rejected");
    assert!(problem["detail"].as_str().unwrap().contains("shel"), "{problem}");
    api.get("/api/v1/schedules/slow/more").is(200);
}
