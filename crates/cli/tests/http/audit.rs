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
            "POST {run} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            api.address,
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
