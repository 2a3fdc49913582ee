//! Rows that no node of this version writes: what is said of them, and that nothing else notices.

use serde_json::{Value, json};

use crate::client::{Api, CONFIG};
use crate::support::{Site, eventually};

/// Writes to the store past Belfry.
fn sql(site: &Site, text: &str) {
    if let Some(path) = site.store.strip_prefix("sqlite:") {
        return rusqlite::Connection::open(path).unwrap().execute_batch(text).unwrap();
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (client, connection) = tokio_postgres::connect(&site.store, tokio_postgres::NoTls).await.unwrap();
        let connection = tokio::spawn(connection);
        client.batch_execute("set search_path = belfry").await.unwrap();
        client.batch_execute(text).await.unwrap();
        drop(client);
        connection.await.unwrap().unwrap();
    });
}

/// It is refused as something that this version leaves alone.
#[track_caller]
fn is_left_alone(answer: &crate::client::Answer) {
    let problem = answer.refused(409, "unreadable");
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("written by a newer version of Belfry"), "{detail}");
    assert!(detail.contains("this version leaves it alone"), "{detail}");
}

#[test]
fn a_definition_of_a_newer_version_is_left_alone_and_can_be_removed() {
    for site in Site::each() {
        site.config(&CONFIG.replace("api: {", "api: {allow_agents: true, "));
        let api = Api::start(&site);
        let schedules = json!({
            "s": {"every": "1h"}, "t": {"every": "1h"}, "talk": {"chat": {}}, "hook": {"webhook": {"secret": "none"}},
        });
        let agent = json!({"agent": "new", "definition": {"shell": "true", "schedules": schedules}});
        api.post("/api/v1/agents", &agent).is(201);
        sql(
            &site,
            "update schedules set format = 999, definition = '{\"shiny\": 1}' where name like 'new/%'",
        );
        let schedule = "/api/v1/schedules/new/s";
        is_left_alone(&api.json("PATCH", schedule, &json!({"every": "2h"})));
        is_left_alone(&api.json("PUT", schedule, &json!({"every": "2h"})));
        for verb in ["pause", "resume", "run"] {
            is_left_alone(&api.post(&format!("{schedule}/{verb}"), &json!({})));
        }
        is_left_alone(&api.post("/api/v1/sessions/new/talk/k/messages", &json!({"text": "hello"})));
        is_left_alone(&api.post("/api/v1/sessions/new/talk/k/stop", &json!({})));
        is_left_alone(&api.post("/hooks/new/hook", &json!({})));
        let shown = api.get(schedule).is(200);
        assert_eq!(shown["definition"], json!({}), "nothing is made up: {shown}");
        // A node that has just claimed a run of it gives that back first.
        eventually("the reason", || {
            let why = api.get(&format!("{schedule}/why")).is(200).to_string();
            why.contains("written by a newer version of Belfry").then_some(())
        });
        eventually("the reason in words", || {
            let why = String::from_utf8(site.belfry(&["why", "new/s"]).stdout).unwrap();
            why.contains("written by a newer version of Belfry").then_some(())
        });
        let exported = site.belfry(&["export"]);
        let (text, told) =
            (String::from_utf8(exported.stdout).unwrap(), String::from_utf8(exported.stderr).unwrap());
        assert!(exported.status.success() && !text.contains("after:"), "{text}");
        assert!(told.contains("new/s is left out: written by a newer version of Belfry"), "{told}");
        // It is removed like any other, by the API and on the command line.
        api.send("DELETE", schedule, &[], b"").is(200);
        let removed = site.belfry(&["rm", "new/t"]);
        assert!(removed.status.success(), "{removed:?}");
        sql(&site, "update agents set format = 999 where name = 'new'");
        is_left_alone(&api.get("/api/v1/agents/new"));
        is_left_alone(&api.json("PUT", "/api/v1/agents/new", &json!({"shell": "false"})));
        let exported = site.belfry(&["export"]);
        assert!(!String::from_utf8(exported.stdout).unwrap().contains("new:"));
        api.send("DELETE", "/api/v1/agents/new", &[], b"").is(200);
        api.get("/api/v1/agents/new").refused(404, "not_found");
        api.stop();
    }
}

fn ready(api: &Api) -> Value {
    api.bare("GET", "/readyz", &[], b"").json()
}

#[test]
fn one_row_makes_no_node_unready_and_a_store_without_writes_does() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = Api::start(&site);
        eventually("ready", || ready(&api)["ready"].as_bool().filter(|ready| *ready));
        let is_file = site.store.starts_with("sqlite:");
        let long_ago = if is_file { "1" } else { "'2001-01-01Z'" };
        sql(
            &site,
            &format!(
                "insert into timers (due_at, schedule_id, kind, tick_at, version) values ({long_ago}, 999, 0, {long_ago}, 1)"
            ),
        );
        // A run that no claim can start, before all others.
        api.post("/api/v1/schedules/slow/quiet/run", &json!({})).is(201);
        let bad = api.post("/api/v1/schedules/slow/quiet/run", &json!({})).is(201)["id"]
            .as_str()
            .unwrap()
            .to_owned();
        let id = if is_file { format!("x'{}'", bad.replace('-', "")) } else { format!("'{bad}'") };
        sql(&site, &format!("update live set epoch = 2147483647 where id = {id}"));
        std::fs::write(site.path("go"), "").unwrap();
        api.up.lock().unwrap().wait_for("that it is told", |event| {
            event["event"] == "write_refused"
                && event["detail"].as_str().is_some_and(|words| words.contains(&bad))
        });
        let other = api.post("/api/v1/schedules/hello/quiet/run", &json!({"wait_ms": 20000})).is(201);
        assert_eq!(other["state"], "completed", "{other}");
        let answer = ready(&api);
        assert_eq!(answer["ready"], true, "{answer}");
        let why = site.belfry(&["why", "slow/quiet"]);
        let said = String::from_utf8(why.stdout).unwrap();
        assert!(said.contains("is never started: its stored epoch or attempt is out of range"), "{said}");
        let found = site.belfry(&["doctor", "-o", "json"]);
        let said = String::from_utf8(found.stdout).unwrap();
        assert!(said.contains(&bad) && said.contains("schedule 999"), "{said}");
        let ended = site.belfry(&["cancel", &bad]);
        assert!(ended.status.success(), "{ended:?}");
        // Nothing can be written: it is not ready, although it answers.
        sql(&site, "alter table history rename to gone");
        let answer = eventually("not ready", || Some(ready(&api)).filter(|answer| answer["ready"] == false));
        assert!(answer["checks"].to_string().contains("takes no writes"), "{answer}");
        sql(&site, "alter table gone rename to history");
        eventually("ready again", || ready(&api)["ready"].as_bool().filter(|ready| *ready));
        api.stop();
    }
}

#[test]
fn a_run_whose_payload_cannot_be_read_is_not_repeated_without_it() {
    for site in Site::each() {
        site.config("agents: {a: {shell: 'true', schedules: {s: {cron: '0 0 1 1 *'}}}}");
        let api = Api::start(&site);
        let made =
            api.post("/api/v1/schedules/a/s/run", &json!({"payload": {"x": 1}, "wait_ms": 20000})).is(201);
        let retry = format!("/api/v1/runs/{}/retry", made["id"].as_str().unwrap());
        api.send("POST", &retry, &[], b"").is(201);
        sql(&site, "update history set payload = '{bad'");
        api.send("POST", &retry, &[], b"").refused(409, "unreadable");
        api.stop();
    }
}
