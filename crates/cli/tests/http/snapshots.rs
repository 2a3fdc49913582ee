//! Heartbeats and snapshots over HTTP and the command line.

use serde_json::json;

use crate::client::{Api, CONFIG};
use crate::support::{Site, eventually};

const ALL: &str = "/api/v1/snapshots";

#[test]
fn snapshots_are_taken_listed_and_filtered() {
    for site in Site::each() {
        site.config(&format!(
            "engine: {{heartbeat: 500ms}}{}",
            CONFIG.replace("often: {every: 200ms}", "yearly: {cron: \"0 0 1 1 *\"}")
        ));
        let api = Api::start(&site);
        let run = api.post("/api/v1/schedules/slow/quiet/run", &json!({})).is(201);
        api.up.lock().unwrap().event_of("run_started", "quiet");
        let last = eventually("one that has the run", || {
            let page = api.get(&format!("{ALL}?limit=1")).is(200);
            page["items"].get(0).filter(|one| one["runs"][0] == run["id"]).cloned()
        });
        assert_eq!(last["lanes"], json!({"cron": 1}));
        assert_eq!(last["sessions_active"], 0);
        assert_eq!(last["context"]["version"], api.get("/healthz").is(200)["version"]);
        assert!(last["memory_used_bytes"].as_u64() < last["memory_total_bytes"].as_u64(), "{last}");
        assert_eq!(last["load"].as_array().unwrap().len(), 3);
        let node = api.get("/api/v1/nodes").is(200)["items"][0].clone();
        assert_eq!((&last["node"], &last["host"]), (&node["id"], &node["host"]));
        assert!(node["last_seen_at"].as_str() >= last["at"].as_str(), "{node}");
        let shown = api.get(&format!("/api/v1/runs/{}", run["id"].as_str().unwrap())).is(200);
        assert_eq!(shown["heartbeat"]["status"], "alive", "{shown}");
        assert!(shown["heartbeat"]["at"].as_str() >= last["at"].as_str(), "{shown}");
        let listed = site.json(&["runs", "--state", "running"]);
        assert_eq!(listed["items"][0]["heartbeat"]["status"], "alive", "{listed}");

        // Pages follow each other, whatever comes meanwhile.
        let since = last["at"].as_str().unwrap();
        let (first, rest) = eventually("three", || {
            let first = api.get(&format!("{ALL}?limit=2&node=this")).is(200);
            let cursor = first["next"].as_str()?;
            let rest = api.get(&format!("{ALL}?limit=100&node=this&cursor={cursor}")).is(200);
            (!rest["items"].as_array().unwrap().is_empty()).then(|| (first.clone(), rest))
        });
        let times: Vec<_> = [&first, &rest]
            .into_iter()
            .flat_map(|page| page["items"].as_array().unwrap())
            .map(|one| one["at"].as_str().unwrap().to_owned())
            .collect();
        assert!(times.is_sorted_by(|a, b| a > b), "{times:?}");
        let lately = api.get(&format!("{ALL}?since={since}")).is(200);
        let lately = lately["items"].as_array().unwrap();
        assert!(!lately.is_empty() && lately.iter().all(|one| one["at"].as_str() >= Some(since)));
        let nobody = "0198c0de-7a11-7000-8000-0123456789ab";
        assert_eq!(api.get(&format!("{ALL}?node={nobody}")).is(200), json!({"items": [], "next": null}));

        let printed = site.json(&["nodes", "snapshots", "--since", since]);
        assert!(printed["items"].as_array().unwrap().contains(&last), "as the API says");
        let server = format!("http://{}", api.address);
        let remote = site.json(&["nodes", "snapshots", "this", "--since", since, "--server", &server]);
        assert!(remote["items"].as_array().unwrap().contains(&last));
        let table = site.belfry(&["nodes", "snapshots", "-n", "1"]);
        let table = String::from_utf8_lossy(&table.stdout).into_owned();
        assert!(table.contains("MEMORY") && table.lines().count() == 2, "{table}");
        site.file("go", "");
    }
}

#[test]
fn what_is_asked_for_wrongly_is_refused() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    for (query, status, code) in [
        ("node=nobody", 422, "bad_query"),
        ("node=", 422, "bad_query"),
        ("since=yesterday", 400, "bad_query"),
        ("limit=0", 400, "bad_limit"),
        ("limit=-1", 400, "bad_query"),
        ("cursor=garbage", 422, "bad_cursor"),
        ("sort=id;drop", 400, "bad_query"),
    ] {
        api.get(&format!("{ALL}?{query}")).refused(status, code);
    }
    assert_eq!(site.belfry(&["nodes", "snapshots", "nobody"]).status.code(), Some(2));
}
