//! Who did what: no change is without its row, whatever happens to the server meanwhile.

use belfry_store::{Access, AnyStore, AuditEntry};
use serde_json::json;

use crate::client::{Api, CONFIG};
use crate::support::{Site, eventually};

/// The rows of a store that nobody serves, the first first.
fn rows(site: &Site) -> Vec<AuditEntry> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let found = runtime.block_on(async {
        let store = AnyStore::open(&site.store, false).await.unwrap();
        store.audits(None, 1000).await.unwrap().items
    });
    found.into_iter().rev().map(|(_, entry)| entry).collect()
}

#[test]
fn a_change_has_its_row_before_it_is_answered_also_where_the_server_is_killed() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = Api::start(&site);
        api.post("/api/v1/schedules/slow/quiet/pause", &json!({})).is(200);
        api.post("/api/v1/schedules/slow/nothing/pause", &json!({})).refused(404, "not_found");
        let run = "/api/v1/schedules/slow/quiet/run";
        let body = json!({"wait_ms": 60000}).to_string();
        let head = format!(
            "POST {run} HTTP/1.1\r\nhost: {}\r\n{}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            api.address,
            api.auth(),
            body.len()
        );
        let _waiting = api.raw(format!("{head}{body}").as_bytes());
        let under_way = eventually("a row that is under way", || {
            let audit = api.get("/api/v1/audit?limit=1").is(200);
            Some(audit["items"][0].clone()).filter(|row| row["action"] == "run_schedule")
        });
        assert!(under_way["status"].is_null() && under_way["target"] == run, "{under_way}");
        eventually("its run", || {
            let runs = api.get("/api/v1/runs?agent=slow").is(200);
            runs["items"].as_array().unwrap().first().cloned()
        });
        api.up.lock().unwrap().kill();
        let rows = rows(&site);
        let seen: Vec<_> = rows.iter().map(|row| (row.action.as_str(), row.status)).collect();
        assert_eq!(
            seen,
            [("pause_schedule", Some(200)), ("run_schedule", None)],
            "what was refused has none"
        );
    }
}

#[test]
fn what_a_command_does_without_a_server_has_a_row_too() {
    for site in Site::each() {
        site.config(CONFIG);
        let belfry = |arguments: &[&str], code| {
            let output = site.belfry(arguments);
            assert_eq!(output.status.code(), Some(code), "{arguments:?}: {output:?}");
        };
        belfry(&["apply"], 0);
        belfry(&["apply"], 0);
        belfry(&["add", "hello/x", "--every", "1h"], 0);
        belfry(&["add", "hello/x", "--every", "2h"], 2);
        belfry(&["set", "hello/x", "every=2h"], 0);
        belfry(&["set", "hello/x", "every=2h"], 0);
        belfry(&["pause", "hello/x"], 0);
        belfry(&["resume", "hello/x"], 0);
        belfry(&["run", "hello/x", "--no-start"], 0);
        belfry(&["rm", "hello/x"], 0);
        belfry(&["rm", "hello/x"], 3);
        belfry(&["lanes", "set", "cron", "3"], 0);
        belfry(&["token", "create", "--scope", "read"], 0);
        let rows = rows(&site);
        let seen: Vec<_> = rows.iter().map(|row| (row.action.as_str(), row.target.as_str())).collect();
        let wanted = [
            ("reload", "/api/v1/reload"),
            ("write_schedule", "/api/v1/schedules/hello/x/write"),
            ("write_schedule", "/api/v1/schedules/hello/x/write"),
            ("pause_schedule", "/api/v1/schedules/hello/x/pause"),
            ("resume_schedule", "/api/v1/schedules/hello/x/resume"),
            ("run_schedule", "/api/v1/schedules/hello/x/run"),
            ("remove_schedule", "/api/v1/schedules/hello/x"),
            ("change_lane", "/api/v1/lanes/cron"),
            ("create_token", "/api/v1/tokens"),
        ];
        assert_eq!(seen, wanted);
        let uid = nix::unistd::getuid();
        for row in rows {
            assert!(row.actor.starts_with("cli:") && row.actor.ends_with(&format!("({uid})")), "{row:?}");
            assert!(matches!(row.status, Some(200..=299)), "{row:?}");
            assert_eq!(row.peer, belfry::host());
        }
    }
}

/// How many rows tell of an action.
fn count(api: &Api, action: &str) -> usize {
    let rows = api.get("/api/v1/audit?limit=1000").is(200)["items"].as_array().unwrap().clone();
    rows.iter().filter(|row| row["action"] == action).count()
}

#[test]
fn what_changed_nothing_has_no_row() {
    for site in Site::each() {
        let config = CONFIG.replace("api: {", "api: {allow_agents: true, ");
        site.config(&config.replace("often: {every: 200ms}", "talk: {chat: {debounce: 0s}}"));
        let api = Api::start(&site);
        let (quiet, made) = ("/api/v1/schedules/hello/quiet", "/api/v1/schedules/hello/x");
        let ada = "/api/v1/sessions/hello/talk/ada";
        let keyed = |path: &str, body: &serde_json::Value| {
            let headers = ["content-type: application/json", "idempotency-key: once"];
            api.send("POST", path, &headers, body.to_string().as_bytes())
        };
        let schedule = json!({"agent": "hello", "schedule": "x", "definition": {"every": "1h"}});
        let agent = json!({"agent": "made", "definition": {"run": ["true"]}});
        let past = json!({"from": "2020-01-01T00:00:00Z", "to": "2021-06-01T00:00:00Z"});
        let mut dry = past.clone();
        dry["dry_run"] = true.into();
        // Each twice: the first time it changes something.
        for status in [201, 200] {
            keyed("/api/v1/schedules", &schedule).is(status);
            keyed("/api/v1/agents", &agent).is(status);
            keyed(&format!("{quiet}/run"), &json!({"wait_ms": 20000})).is(status);
            keyed(&format!("{ada}/messages"), &json!({"text": "hello", "wait_ms": 20000})).is(200);
            keyed(&format!("{quiet}/backfill"), &past).is(200);
            api.post(&format!("{quiet}/pause"), &json!({"reason": "so"})).is(200);
        }
        for (method, body) in [("PUT", json!({"every": "2h"})), ("PATCH", json!({"priority": 3}))] {
            for _ in 0..2 {
                api.json(method, made, &body).is(200);
            }
        }
        for _ in 0..2 {
            api.json("PUT", "/api/v1/agents/made", &json!({"run": ["false"]})).is(200);
            api.post(&format!("{quiet}/resume"), &json!({})).is(200);
        }
        // These change nothing at all.
        api.post(&format!("{quiet}/backfill"), &dry).is(200);
        assert_eq!(api.post(&format!("{ada}/stop"), &json!({})).is(200)["code"], "nothing_running");
        api.post("/api/v1/lanes/main/clear", &json!({})).is(200);
        // A node that drains takes nothing.
        let run = api.get("/api/v1/runs?agent=hello&limit=1").is(200)["items"][0]["id"].clone();
        api.post("/api/v1/nodes/this/drain", &json!({})).is(200);
        for path in [format!("{quiet}/run"), format!("/api/v1/runs/{}/retry", run.as_str().unwrap())] {
            api.post(&path, &json!({})).refused(503, "draining");
        }
        api.post(&format!("{quiet}/backfill"), &past).refused(503, "draining");
        api.post(&format!("{ada}/messages"), &json!({"text": "hello"})).refused(503, "draining");
        api.post("/api/v1/nodes/this/drain", &json!({})).is(200);

        for (action, rows) in [
            ("create_schedule", 1),
            ("create_agent", 1),
            ("run_schedule", 1),
            ("send_message", 1),
            ("backfill_schedule", 1),
            ("replace_schedule", 1),
            ("change_schedule", 1),
            ("replace_agent", 1),
            ("pause_schedule", 1),
            ("resume_schedule", 1),
            ("stop_session", 0),
            ("clear_lane", 0),
            ("retry_run", 0),
            ("drain_node", 1),
        ] {
            assert_eq!(count(&api, action), rows, "{action}");
        }
        // What it marks as stale is a change, also where nothing runs.
        assert_eq!(api.post(&format!("{ada}/stopall"), &json!({})).is(200)["code"], "nothing_running");
        assert_eq!(count(&api, "stop_all_of_session"), 1);
    }
}
