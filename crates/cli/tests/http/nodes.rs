//! Nodes over HTTP and the command line: which of them takes new work.

use serde_json::{Value, json};

use crate::client::{Api, CONFIG};
use crate::support::{Site, eventually};

const THIS: &str = "/api/v1/nodes/this/drain";

#[test]
fn a_node_that_drains_says_so_refuses_work_and_takes_it_again() {
    for site in Site::each() {
        site.config(&CONFIG.replace("often: {every: 200ms}", "yearly: {cron: \"0 0 1 1 *\"}"));
        let api = Api::start(&site);
        let run = api.post("/api/v1/schedules/slow/quiet/run", &json!({})).is(201);
        api.up.lock().unwrap().event_of("run_started", "quiet");
        let node = api.post(THIS, &json!({})).is(200);
        assert_eq!((&node["status"], &node["active"]), (&"draining".into(), &1.into()), "{node}");
        let told = api.up.lock().unwrap().event("node_draining");
        assert_eq!((&told["node"], &told["state"]), (&node["id"], &"draining".into()));
        assert_eq!(api.get("/api/v1/nodes").is(200)["items"][0], node);
        assert_eq!(site.json(&["nodes"])["items"][0]["status"], "draining");
        let ready = api.get("/readyz").is(503);
        let engine = &ready["checks"][0];
        assert_eq!((&engine["check"], &engine["ok"]), (&"engine".into(), &false.into()));
        assert!(engine["detail"].as_str().unwrap().contains("told to drain"), "{engine}");
        assert!(ready["checks"].as_array().unwrap()[1..].iter().all(|check| check["ok"] == true), "{ready}");
        // The command line shows the same reasons.
        let said = site.belfry(&["api", "/readyz"]);
        let printed: Value = serde_json::from_slice(&said.stdout).unwrap();
        assert_eq!((said.status.code(), &printed["checks"][0]), (Some(5), engine));
        let doctor = String::from_utf8(site.belfry(&["doctor", "-o", "jsonl"]).stdout).unwrap();
        let server = doctor.lines().find(|line| line.contains(r#""check":"server""#)).unwrap();
        assert!(server.contains("told to drain") && server.contains("warn"), "{doctor}");
        api.get("/healthz").is(200);
        let refused =
            api.post("/api/v1/schedules/hello/quiet/run", &json!({})).refused(503, "draining").to_string();
        assert!(refused.contains("nodes drain this --undo"), "{refused}");
        let why = api.get("/api/v1/schedules/hello/quiet/why").is(200);
        let no_node = why["checks"].as_array().unwrap().iter().find(|check| check["check"] == "no_node");
        assert_eq!(no_node.unwrap()["ok"], false, "{why}");

        site.file("go", "");
        let path = format!("/api/v1/runs/{}", run["id"].as_str().unwrap());
        eventually("its end", || (api.get(&path).is(200)["state"] == "completed").then_some(()));
        assert_eq!(api.get("/api/v1/nodes").is(200)["items"][0]["status"], "draining", "it stays");

        let said = site.belfry(&["nodes", "drain", "this", "--undo"]);
        assert!(said.status.success(), "{said:?}");
        assert!(String::from_utf8_lossy(&said.stdout).contains("takes new work again"), "{said:?}");
        let told = api.up.lock().unwrap().event("node_draining");
        assert_eq!(told["state"], "running");
        api.post("/api/v1/schedules/hello/quiet/run", &json!({"wait_ms": 20000})).is(201);
        api.get("/readyz").is(200);

        // Over --server it is that server, and one that drains ends by TERM as any other does.
        let server = format!("http://{}", api.address);
        let node = site.json(&["nodes", "drain", "this", "--server", &server]);
        assert_eq!(node["status"], "draining");
        api.up.lock().unwrap().stop();
    }
}

#[test]
fn who_is_not_there_is_not_found_and_a_body_is_read_strictly() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    for id in ["nobody", "0", "-1", "THIS", "00000000000000000000000000000001", "..%2F..%2Fx"] {
        api.post(&format!("/api/v1/nodes/{id}/drain"), &json!({})).refused(404, "not_found");
    }
    let unknown = "0198c0de-7a11-7000-8000-0123456789ab";
    let refused = api.post(&format!("/api/v1/nodes/{unknown}/drain"), &json!({})).refused(404, "not_found");
    assert!(refused["detail"].as_str().unwrap().contains(unknown));
    for body in [json!({"undo": "yes"}), json!({"redo": true}), json!({"undo": null})] {
        api.post(THIS, &body).refused(400, "bad_field");
    }
    let said = site.belfry(&["nodes", "drain", unknown]);
    assert_eq!(said.status.code(), Some(3), "{said:?}");
    let said = site.belfry(&["nodes", "drain", "nobody"]);
    assert_eq!(said.status.code(), Some(3), "{said:?}");
    assert_ne!(api.get("/api/v1/nodes").is(200)["items"][0]["status"], "draining", "nothing has changed");
}

#[test]
fn any_node_drains_any_other_but_no_dead_one() {
    let Some(site) = Site::postgres() else { return };
    site.config(&format!("engine: {{lease: 3s, orphan_check: 60s}}{CONFIG}"));
    let api = Api::start(&site);
    let mut other = site.up();
    let started = other.event("node_started");
    let id = started["node"].as_str().unwrap();
    let path = format!("/api/v1/nodes/{id}/drain");
    assert_eq!(api.post(&path, &json!({})).is(200)["status"], "draining");
    assert_eq!(other.event("node_draining")["state"], "draining");
    assert_eq!(api.get("/readyz").is(200)["ready"], true, "this one works on");
    api.post("/api/v1/schedules/hello/quiet/run", &json!({"wait_ms": 20000})).is(201);
    // Two run on this machine; this is the one whose file is found, the last that was started.
    assert_eq!(site.json(&["nodes", "drain", "this"])["id"], id);
    let node = site.json(&["nodes", "drain", id, "--undo"]);
    assert!(node["status"] != "draining", "{node}");
    assert_eq!(other.event("node_draining")["state"], "running");
    other.kill();
    let dead = eventually("its lease lapses", || {
        let answer = api.post(&path, &json!({}));
        (answer.status == 409).then_some(answer)
    });
    dead.refused(409, "node_dead");
}
