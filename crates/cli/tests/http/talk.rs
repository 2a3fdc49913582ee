//! Conversations and lanes over HTTP.

use std::io::BufRead;

use serde_json::{Value, json};

use crate::client::Api;
use crate::support::{Site, eventually};

const TALK: &str = r#"
listen: 127.0.0.1:0
lanes: {main: 4, narrow: 1}
agents:
  bot:
    env: {PROMPT: "{{ prompt }}"}
    shell: 'echo "heard $PROMPT"; until [ -e go ]; do sleep 0.02; done; echo done'
    grace: 1s
    schedules:
      talk: {chat: {debounce: 0s, cap: 2, drop: new}}
      tick: {cron: "0 0 1 1 *"}
"#;

const ADA: &str = "/api/v1/sessions/bot/talk/ada";

fn say(api: &Api, text: &str) -> Value {
    api.post(&format!("{ADA}/messages"), &json!({"text": text})).is(202)
}

#[test]
fn messages_are_taken_refused_stopped_and_forgotten() {
    for site in Site::each() {
        site.config(TALK);
        let api = Api::start(&site);
        api.get(ADA).refused(404, "not_found");
        let first = say(&api, "one");
        assert_eq!(
            (&first["code"], &first["seq"], &first["joined"]),
            (&"taken".into(), &1.into(), &false.into())
        );
        api.up.lock().unwrap().event_of("run_started", "talk");
        say(&api, "two");
        say(&api, "three");
        let full = api.post(&format!("{ADA}/messages"), &json!({"text": "four"})).refused(409, "queue_full");
        assert!(full["detail"].as_str().unwrap().contains("bot/talk:ada is full"));
        let session = api.get(ADA).is(200);
        assert_eq!(
            (&session["active"], &session["queued"], &session["cap"]),
            (&1.into(), &2.into(), &2.into())
        );
        let runs = api.get("/api/v1/runs?session=ada").is(200);
        assert_eq!(runs["items"].as_array().unwrap().len(), 3);
        assert_eq!(runs["items"][0]["session"], "ada");

        let stopped = api.post(&format!("{ADA}/messages"), &json!({"text": "/stopall"})).is(202);
        assert_eq!((&stopped["code"], stopped["ended"].as_array().unwrap().len()), (&"stopped".into(), 2));
        let cancelled = api.up.lock().unwrap().event_of("run_cancelled", "talk");
        assert_eq!(cancelled["outbound"], "");
        eventually("it is gone", || (api.get(ADA).is(200)["active"] == 0).then_some(()));
        assert_eq!(api.post(&format!("{ADA}/stop"), &json!({})).is(200)["code"], "nothing_running");
        let late = json!({"text": "late", "sent_at": "2020-01-01T00:00:00Z"});
        api.post(&format!("{ADA}/messages"), &late).refused(409, "stale");

        let forged = json!({"text": "hi", "payload": {"messages": [{"seq": 1, "text": "forged"}]}});
        let refused = api.post(&format!("{ADA}/messages"), &forged).refused(422, "reserved_key");
        assert_eq!(refused["field"], "payload.messages");
        let run = "/api/v1/schedules/bot/talk/run";
        api.post(run, &json!({"payload": {"text": "forged"}})).refused(422, "reserved_key");

        let used = api.post(&format!("{ADA}/usage"), &json!({"tokens": 70, "context_window": 100})).is(200);
        assert_eq!((&used["tokens"], &used["max_concurrent"]), (&70.into(), &1.into()));
        let reset = api.post(&format!("{ADA}/reset"), &json!({})).is(200);
        assert_eq!((&reset["generation"], &reset["tokens"]), (&2.into(), &Value::Null));
        let old = json!({"text": "old", "generation": 1});
        api.post(&format!("{ADA}/messages"), &old).refused(409, "stale");

        // A repeat is the same run; with something else it is refused.
        site.file("go", "");
        let send = |text: &str| {
            let headers = ["content-type: application/json", "idempotency-key: k1"];
            api.send(
                "POST",
                &format!("{ADA}/messages"),
                &headers,
                json!({"text": text}).to_string().as_bytes(),
            )
        };
        let once = send("once").is(202);
        assert_eq!(send("once").is(202)["run_id"], once["run_id"]);
        send("twice").refused(409, "key_reused");
        let waited =
            api.post(&format!("{ADA}/messages"), &json!({"text": "and now", "wait_ms": 20000})).is(200);
        assert_eq!((&waited["state"], &waited["session"]), (&"completed".into(), &"ada".into()));

        let list = api.get("/api/v1/sessions?limit=1").is(200);
        assert_eq!(list["items"][0]["key"], "ada");
        let next = list["next"].as_str().unwrap();
        assert_eq!(api.get(&format!("/api/v1/sessions?cursor={next}")).is(200)["items"], json!([]));
        api.get("/api/v1/sessions?cursor=00").refused(422, "bad_cursor");
        api.get("/api/v1/sessions?schedule=talk").refused(422, "bad_query");

        for (path, body, status, code) in [
            ("/api/v1/sessions/bot/tick/ada/messages", json!({"text": "x"}), 404, "not_found"),
            ("/api/v1/sessions/bot/none/ada/messages", json!({"text": "x"}), 404, "not_found"),
            ("/api/v1/sessions/bot/talk/a%0Ab/messages", json!({"text": "x"}), 404, "not_found"),
            ("/api/v1/sessions/bot/talk/ada/messages", json!({}), 400, "bad_field"),
            (
                "/api/v1/sessions/bot/talk/ada/messages",
                json!({"text": "x", "mode": "loud"}),
                400,
                "bad_field",
            ),
            (
                "/api/v1/sessions/bot/talk/ada/messages",
                json!({"text": "x", "max_concurrent": 0}),
                400,
                "bad_field",
            ),
            ("/api/v1/sessions/bot/talk/ada/messages", json!({"text": "a\u{0}b"}), 400, "bad_json"),
            (
                "/api/v1/sessions/bot/talk/ada/usage",
                json!({"tokens": -1, "context_window": 1}),
                400,
                "bad_field",
            ),
        ] {
            let answer = api.post(path, &body);
            assert_eq!((answer.status, &answer.json()["code"]), (status, &code.into()), "{path} {body}");
        }
        api.stop();
    }
}

#[test]
fn a_reply_is_streamed_as_it_is_written() {
    let site = Site::sqlite();
    site.config(TALK);
    let api = Api::start(&site);
    site.file("go", "");
    let body = json!({"text": "hello {{ 1 }}", "stream": true}).to_string();
    let head = format!(
        "POST {ADA}/messages HTTP/1.1\r\nhost: {}\r\n{}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        api.address,
        api.auth(),
        body.len()
    );
    let mut lines = api.raw(head.as_bytes()).lines();
    let mut told = Vec::new();
    while told.last().is_none_or(|(event, _): &(String, Value)| event != "end") {
        let line = lines.next().unwrap().unwrap();
        if let Some(event) = line.strip_prefix("event: ") {
            let data = lines.next().unwrap().unwrap();
            told.push((
                event.to_owned(),
                serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap(),
            ));
        }
    }
    assert_eq!((told[0].0.as_str(), &told[0].1["code"]), ("taken", &"taken".into()));
    let text: String = told
        .iter()
        .filter(|(event, _)| event == "output")
        .map(|(_, data)| data["text"].as_str().unwrap())
        .collect();
    assert_eq!(text, "heard hello {{ 1 }}\ndone\n");
    assert_eq!(told.last().unwrap().1["state"], "completed");
    api.stop();
}

#[test]
fn lanes_are_shown_changed_and_cleared() {
    for site in Site::each() {
        site.config(TALK);
        let api = Api::start(&site);
        let lane = |name: &str| {
            let lanes = api.get("/api/v1/lanes").is(200);
            lanes["items"].as_array().unwrap().iter().find(|lane| lane["name"] == name).cloned()
        };
        for n in 0..3 {
            let path = format!("/api/v1/sessions/bot/talk/n{n}/messages");
            api.post(&path, &json!({"text": "x", "lane": "narrow"})).is(202);
        }
        api.up.lock().unwrap().event_of("run_started", "talk");
        let narrow = lane("narrow").unwrap();
        assert_eq!(
            (&narrow["slots"], &narrow["active"], &narrow["pending"]),
            (&1.into(), &1.into(), &2.into())
        );
        let changed = api.json("PATCH", "/api/v1/lanes/narrow", &json!({"slots": 2, "limit": 5})).is(200);
        assert_eq!(
            (&changed["slots"], &changed["limit"], &changed["set"]),
            (&2.into(), &5.into(), &true.into())
        );
        api.up.lock().unwrap().event_of("run_started", "talk");
        let changed = api.json("PATCH", "/api/v1/lanes/narrow", &json!({"limit": null})).is(200);
        assert_eq!(
            (&changed["slots"], &changed["limit"]),
            (&2.into(), &Value::Null),
            "what is not named stays"
        );
        let cleared = api.post("/api/v1/lanes/narrow/clear", &json!({})).is(200);
        assert_eq!(cleared["ended"].as_array().unwrap().len(), 1);
        api.json("PATCH", "/api/v1/lanes/new", &json!({"slots": 3})).is(200);
        assert_eq!(lane("new").unwrap()["slots"], 3);
        let again = api.json("PATCH", "/api/v1/lanes/narrow", &json!({"reset": true})).is(200);
        assert_eq!((&again["slots"], &again["set"]), (&1.into(), &false.into()));
        api.json("PATCH", "/api/v1/lanes/none", &json!({"limit": 3})).refused(404, "not_found");
        api.json("PATCH", "/api/v1/lanes/narrow", &json!({"slots": 0})).refused(400, "bad_field");
        api.json("PATCH", "/api/v1/lanes/narrow", &json!({"slots": -5})).refused(400, "bad_field");
        api.json("PATCH", "/api/v1/lanes/a%20b", &json!({"slots": 5})).refused(422, "bad_name");
        api.post("/api/v1/lanes/none/clear", &json!({})).refused(404, "not_found");
        site.file("go", "");
        api.stop();
    }
}

#[test]
fn the_command_line_talks_to_a_server_in_the_same_words() {
    let site = Site::sqlite();
    site.config(TALK);
    let api = Api::start(&site);
    let url = format!("http://{}", api.address);
    // Elsewhere: no file and no store.
    let away = Site::sqlite();
    let over =
        |arguments: &[&str]| away.json(&[&["--server", &url, "--token", &api.local], arguments].concat());
    let first = over(&["send", "bot", "ada", "one"]);
    assert_eq!((&first["schedule"], &first["session"]), (&"bot/talk".into(), &"ada".into()));
    api.up.lock().unwrap().event_of("run_started", "talk");
    over(&["send", "bot/talk", "ada", "two", "--lane", "narrow", "--mode", "queue"]);
    let sessions = over(&["sessions", "bot"]);
    assert_eq!((&sessions["items"][0]["active"], &sessions["items"][0]["queued"]), (&1.into(), &1.into()));
    assert_eq!(over(&["sessions"]), site.json(&["sessions"]), "the same either way");
    assert_eq!(over(&["runs", "--session", "ada"])["items"].as_array().unwrap().len(), 2);
    assert_eq!(over(&["send", "bot", "ada", "/stopall"])["ended"].as_array().unwrap().len(), 1);
    api.up.lock().unwrap().event_of("run_cancelled", "talk");
    assert_eq!(over(&["stop", "bot", "ada"])["code"], "nothing_running");
    assert_eq!(over(&["sessions", "reset", "bot", "ada"])["generation"], 2);
    assert_eq!(over(&["lanes", "set", "narrow", "3", "--limit", "7"])["limit"], 7);
    assert_eq!(over(&["lanes", "clear", "narrow"])["ended"], json!([]));
    let lanes = over(&["lanes"]);
    assert_eq!(lanes, site.json(&["lanes"]), "the same either way");
    site.file("go", "");
    assert_eq!(over(&["send", "bot", "ada", "three", "--wait"])["state"], "completed");
    let refused = away.belfry(&["--server", &url, "--token", &api.local, "send", "nobody", "ada", "x"]);
    assert_eq!(refused.status.code(), Some(3));
    api.stop();
}

#[test]
fn a_message_whose_reply_cannot_be_streamed_is_not_taken() {
    let site = Site::sqlite();
    site.config(&format!("api: {{rate: 100000/s}}\n{TALK}"));
    let api = Api::start(&site);
    let run = say(&api, "one")["run_id"].as_str().unwrap().to_owned();
    api.up.lock().unwrap().event_of("run_started", "talk");
    let head = format!(
        "GET /api/v1/runs/{run}/log?follow=true HTTP/1.1\r\nhost: {}\r\n{}\r\n\r\n",
        api.address,
        api.auth()
    );
    let follow = || {
        let (mut reader, mut status) = (api.raw(head.as_bytes()), String::new());
        reader.read_line(&mut status).unwrap();
        status.starts_with("HTTP/1.1 200").then_some(reader).ok_or(status)
    };
    // As many as there may be.
    let mut followers = Vec::new();
    let refused = loop {
        match follow() {
            Ok(follower) => followers.push(follower),
            Err(status) => break status,
        }
    };
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    let body = json!({"text": "two", "stream": true});
    api.post(&format!("{ADA}/messages"), &body).refused(503, "too_many_readers");
    assert_eq!(api.get(ADA).is(200)["queued"], 0);
    say(&api, "two");
    assert_eq!(api.get(ADA).is(200)["queued"], 1);
}
