//! What nobody means well with: each gets a clean refusal, nothing is half written, and the server goes on.
//!
//! Hostile inputs by their numbers, and what shows each:
//! - 38, 40, 41 names that climb, break out or are none: `names_that_are_none`
//! - 39 names that differ by case or form: `names_that_look_alike`
//! - 42, 43 names of catalogs, and longer than a channel's may be: `names_of_other_things_are_names`
//! - 44 bodies without end: `bodies_without_end`
//! - 45, 46, 47 nesting, twice the same key, numbers and text that are none, what looks like code: `bodies_that_are_none`
//! - texts that a template language would choke on: `a_prompt_that_once_killed_…`, on one node and on four
//! - 48, 49 files: `files::files_that_are_none`
//! - 57, 58 heads, lengths and encodings: `requests_that_are_none`
//! - 60, 61 queries and ids: `queries_and_ids_that_are_none`
//! - 62 another site, another host: `security::another_site_and_another_name_are_refused`
//! - 63 webhooks: `hooks::what_is_late_or_wrong_is_refused_and_a_repeat_makes_no_second_run_also_after_a_restart`,
//!   `hooks::signatures_that_are_none`, `hooks::a_secret_that_the_server_lacks_opens_nothing`
//! - 64 tokens: `security::nothing_goes_without_a_token`, `requests_that_are_none`
//! - 65 those who say nothing, drip, or never read: `connections_that_say_nothing_are_borne`,
//!   `events::a_reader_that_does_not_read_hinders_nobody`, and with short limits `tests/slow.rs` of the server
//! - 66 one key, a thousand times at once: `schedules::one_key_makes_one_run_however_often_it_is_sent`

use std::io::{Read, Write};

use serde_json::{Value, json};

use crate::client::{Api, CONFIG, read};
use crate::support::Site;

fn quiet(site: &Site) -> Api {
    site.config(&CONFIG.replace("      often: {every: 200ms}\n", ""));
    Api::start(site)
}

/// Nothing was made, and it still works.
#[track_caller]
fn unharmed(api: &Api) {
    assert_eq!(api.get("/api/v1/schedules?limit=1000").is(200)["items"].as_array().unwrap().len(), 5);
    assert!(api.get("/api/v1/runs").is(200)["items"].as_array().unwrap().is_empty());
    api.get("/readyz").is(200);
}

fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

#[test]
fn names_that_are_none() {
    for site in Site::each() {
        let api = quiet(&site);
        let long = "a".repeat(10_000);
        let names = [
            "../../x",
            "a/b",
            long.as_str(),
            "",
            "é",
            "😀",
            "a\u{202e}b",
            "a\0b",
            "a\nb",
            "..",
            ".",
            " ",
            "a b",
            "-x",
            "jobs\"; DROP TABLE jobs;--",
            "name) VALUES (1);--",
            "%2e%2e",
            "\u{feff}x",
        ];
        for name in names {
            let body = json!({"agent": "hello", "schedule": name, "definition": {"every": "1h"}});
            let answer = api.post("/api/v1/schedules", &body);
            assert!([400, 422].contains(&answer.status), "{name:?}: {answer:?}");
            let place = format!("/api/v1/schedules/hello/{}", encoded(name));
            if !name.is_empty() && name.len() < 1000 {
                let answer = api.json("PUT", &place, &json!({"every": "1h"}));
                assert!([400, 404, 422].contains(&answer.status), "{name:?}: {answer:?}");
                let answer = api.get(&place);
                assert_eq!(answer.status, 404, "{name:?}: {answer:?}");
            }
            let answer = api.get(&format!("/api/v1/runs?agent={}&lane={}", encoded(name), encoded(name)));
            assert!([200, 400, 414, 422, 431].contains(&answer.status), "{name:?}: {answer:?}");
        }
        unharmed(&api);
        // What only looks strange is a name.
        for name in ["con", "__proto__", "0"] {
            let body =
                json!({"agent": "hello", "schedule": name, "definition": {"every": "1h", "enabled": false}});
            let status = api.post("/api/v1/schedules", &body).status;
            assert_eq!(status, if name.starts_with('_') { 422 } else { 201 }, "{name}");
        }
    }
}

#[test]
fn names_that_look_alike() {
    for site in Site::each() {
        let api = quiet(&site);
        for name in ["QUIET", "Quiet", "quieT"] {
            let body = json!({"agent": "hello", "schedule": name, "definition": {"every": "1h"}});
            api.post("/api/v1/schedules", &body).refused(409, "exists");
            let place = format!("/api/v1/schedules/hello/{name}");
            api.json("PUT", &place, &json!({"every": "1h"})).refused(409, "exists");
            let written = json!({"add": true, "pairs": [["every", "1h"]]});
            api.post(&format!("{place}/write"), &written).refused(409, "exists");
        }
        // One letter, composed and not.
        for name in ["caf\u{e9}", "cafe\u{301}"] {
            let body = json!({"agent": "hello", "schedule": name, "definition": {"every": "1h"}});
            let answer = api.post("/api/v1/schedules", &body);
            assert!([400, 422].contains(&answer.status), "{name:?}: {answer:?}");
        }
        unharmed(&api);
    }
}

#[test]
fn names_of_other_things_are_names() {
    for site in Site::each() {
        site.config(&format!(
            "{CONFIG}  bot:\n    shell: 'true'\n    schedules: {{talk: {{chat: {{debounce: 0s}}}}}}\n"
        ));
        let api = Api::start(&site);
        let long = "c".repeat(200);
        let count = || api.get("/api/v1/schedules?limit=1000").is(200)["items"].as_array().unwrap().len();
        let before = count();
        for name in ["pg_catalog", "information_schema", "sqlite_master"] {
            let body = json!({"agent": "hello", "schedule": name, "definition": {"cron": "0 0 1 1 *"}});
            assert_eq!(api.post("/api/v1/schedules", &body).is(201)["schedule"], name);
            let made =
                api.post(&format!("/api/v1/schedules/hello/{name}/run"), &json!({"wait_ms": 20000})).is(201);
            assert_eq!((&made["state"], &made["schedule"]), (&json!("completed"), &json!(name)));
            assert_eq!(
                api.json("PATCH", &format!("/api/v1/lanes/{name}"), &json!({"slots": 2})).is(200)["name"],
                name
            );
            assert_eq!(
                api.json("PATCH", &format!("/api/v1/lanes/{name}"), &json!({"reset": true})).status,
                204
            );
            let body = json!({"agent": name, "schedule": "x", "definition": {"every": "1h"}});
            api.post("/api/v1/schedules", &body).refused(404, "not_found");
            api.send("DELETE", &format!("/api/v1/schedules/hello/{name}"), &[], b"").is(200);
        }
        for body in [
            json!({"agent": "hello", "schedule": long, "definition": {"every": "1h"}}),
            json!({"agent": long, "schedule": "x", "definition": {"every": "1h"}}),
        ] {
            let answer = api.post("/api/v1/schedules", &body);
            assert!([400, 404, 422].contains(&answer.status), "{answer:?}");
        }
        api.json("PATCH", &format!("/api/v1/lanes/{long}"), &json!({"slots": 2})).refused(422, "bad_name");
        // The key of a session is the caller's own, up to a length.
        for key in ["pg_catalog", &long] {
            let path = format!("/api/v1/sessions/bot/talk/{key}");
            assert_eq!(api.post(&format!("{path}/messages"), &json!({"text": "x"})).is(202)["session"], key);
            assert_eq!(api.get(&path).is(200)["key"], key);
        }
        let path = format!("/api/v1/sessions/bot/talk/{}/messages", "c".repeat(300));
        api.post(&path, &json!({"text": "x"})).refused(404, "not_found");
        assert_eq!(count(), before);
        assert_eq!(api.get("/api/v1/sessions").is(200)["items"].as_array().unwrap().len(), 2);
        api.get("/readyz").is(200);
    }
}

#[test]
fn bodies_that_are_none() {
    for site in Site::each() {
        let api = quiet(&site);
        let deep = format!("{{\"payload\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
        let many = format!("{{\"payload\": {}1{}}}", "{\"a\":".repeat(40), "}".repeat(40));
        let bodies: [(&[u8], &[u16]); 15] = [
            (b"{", &[400]),
            (b"[]", &[400]),
            (b"\"x\"", &[400]),
            (b"\xff\xfe{}", &[400]),
            (b"{}{}", &[400]),
            (deep.as_bytes(), &[400]),
            (many.as_bytes(), &[400]),
            (br#"{"prompt": "a", "prompt": "b"}"#, &[400]),
            (br#"{"payload": {"a": 1, "a": 2}}"#, &[400]),
            (br#"{"payload": {"a": 1e400}}"#, &[400]),
            (br#"{"payload": {"a": "\ud800"}}"#, &[400]),
            (br#"{"payload": {"a": "\u0000"}}"#, &[400]),
            (br#"{"payload": [1]}"#, &[400]),
            (br#"{"promt": "x"}"#, &[400]),
            (br#"{"wait_ms": -1}"#, &[400]),
        ];
        for (body, statuses) in bodies {
            let answer = api.send(
                "POST",
                "/api/v1/schedules/hello/quiet/run",
                &["content-type: application/json"],
                body,
            );
            let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
            assert!(statuses.contains(&answer.status), "{shown}: {answer:?}");
            assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        }
        let run = "/api/v1/schedules/hello/quiet/run";
        api.send("POST", run, &[], b"{}").refused(415, "not_json");
        api.send("POST", run, &["content-type: text/plain"], b"{}").refused(415, "not_json");
        let zipped = ["content-type: application/json", "content-encoding: gzip"];
        api.send("POST", run, &zipped, b"\x1f\x8b\x08").refused(415, "encoded_body");
        unharmed(&api);
        // What looks like a command is text.
        let body = json!({"wait_ms": 20000, "payload": {"$where": "1", "{{7*7}}": "${jndi:x}", "ref": "{{ 7*7 }}$(id)`id`"}});
        let made = api.post(run, &body).is(201);
        let log = api.get(&format!("/api/v1/runs/{}/log", made["id"].as_str().unwrap())).is(200);
        assert_eq!(log["items"][0]["text"], "hello\n{{ 7*7 }}$(id)`id`");
    }
}

/// Each is sent as the prompt of a run and inside its payload.
fn texts_that_once_killed() -> Vec<String> {
    vec![
        format!("{{{{ {}1 }}}}", "-".repeat(6000)),
        format!("{{{{ {}1{} }}}}", "(".repeat(5000), ")".repeat(5000)),
        format!("{{{{ {}1{} }}}}", "[".repeat(5000), "]".repeat(5000)),
        format!("{{% {}{} %}}", "if ".repeat(5000), "not ".repeat(5000)),
        "{% if payload %}".repeat(3000),
        "{% for i in range(99999999) %}{% for j in range(99999999) %}x{% endfor %}{% endfor %}".to_owned(),
        format!("{{{{ 'x' {} }}}}", "| indent(999999)".repeat(1000)),
        "{{ prompt }}{{".to_owned(),
    ]
}

/// Sends every such text to each node in turn: all are data, every run completes, and every node lives.
fn outlives_what_once_killed(nodes: &[Api]) {
    for (n, text) in texts_that_once_killed().iter().enumerate() {
        let node = &nodes[n % nodes.len()];
        for body in
            [json!({"prompt": text, "wait_ms": 20_000}), json!({"payload": {"ref": text}, "wait_ms": 20_000})]
        {
            let made = node.post("/api/v1/schedules/hello/quiet/run", &body).is(201);
            assert_eq!(made["state"], "completed", "{}: {made}", &text[..12]);
        }
    }
    for node in nodes {
        node.get("/readyz").is(200);
        let runs = node.get("/api/v1/runs?limit=1000").is(200);
        assert_eq!(runs["items"].as_array().unwrap().len(), 2 * texts_that_once_killed().len());
    }
}

#[test]
fn a_prompt_that_once_killed_a_node_is_data() {
    let site = Site::sqlite();
    outlives_what_once_killed(&[quiet(&site)]);
}

#[test]
fn a_prompt_that_once_killed_one_node_after_the_other_is_data_to_four() {
    let Some(first) = Site::postgres() else { return };
    let sites = [first.beside(), first.beside(), first.beside(), first];
    outlives_what_once_killed(&sites.each_ref().map(quiet));
}

#[test]
fn bodies_without_end() {
    let site = Site::sqlite();
    let api = quiet(&site);
    let head = |length: &str| {
        format!(
            "POST /api/v1/schedules/hello/quiet/run HTTP/1.1\r\nhost: {}\r\n{}\r\ncontent-type: application/json\r\n{length}\r\n\r\n",
            api.address,
            api.auth()
        )
    };
    let mut reader = api.raw(head("content-length: 104857600").as_bytes());
    read(&mut reader).refused(413, "too_large");
    let mut reader = api.raw(head("transfer-encoding: chunked").as_bytes());
    let chunk = [b"10000\r\n".as_slice(), &[b' '; 0x10000], b"\r\n"].concat();
    let mut sent = 0;
    while reader.get_mut().write_all(&chunk).is_ok() && sent < 64 << 20 {
        sent += chunk.len();
        if sent > 2 << 20 {
            break;
        }
    }
    read(&mut reader).refused(413, "too_large");
    let big = vec![b'x'; 3 << 20];
    api.send("POST", "/hooks/hello/pushed", &[], &big).refused(503, "secret_missing");
    unharmed(&api);
}

#[test]
fn requests_that_are_none() {
    let site = Site::sqlite();
    let api = quiet(&site);
    let host = format!("host: {}\r\n{}", api.address, api.auth());
    let long = "a".repeat(1 << 20);
    let heads = [
        format!("GET /healthz HTTP/1.1\r\n{host}\r\nx: {long}\r\n\r\n"),
        format!("GET /healthz HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {long}\r\n\r\n", api.address),
        format!("GET /{long} HTTP/1.1\r\n{host}\r\n\r\n"),
        format!("GET /healthz HTTP/1.1\r\n{host}\r\n{}\r\n", "x: 1\r\n".repeat(5000)),
        format!("GET /healthz HTTP/1.1\r\n{host}\r\nx: a\rb\r\n\r\n"),
        format!("GET /healthz HTTP/1.1\r\n{host}\r\nx : a\r\n\r\n"),
        "GET /healthz HTTP/1.1\r\n\r\n".to_owned(),
        "GARBAGE\r\n\r\n".to_owned(),
        format!(
            "POST /api/v1/reload HTTP/1.1\r\n{host}\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello"
        ),
        format!("POST /api/v1/reload HTTP/1.1\r\n{host}\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n"),
        format!("POST /api/v1/reload HTTP/1.1\r\n{host}\r\ncontent-length: -1\r\n\r\n"),
    ];
    for head in heads {
        let mut answer = Vec::new();
        // A connection that is cut has no answer, or half of one.
        let _ = api.raw(head.as_bytes()).read_to_end(&mut answer);
        let status = String::from_utf8_lossy(&answer).split(' ').nth(1).map(str::to_owned);
        let refused = status.as_deref().is_none_or(|status| status.starts_with('4'));
        assert!(refused, "{:?}: {status:?}", &head[..head.len().min(80)]);
    }
    // Both a length and chunks: whichever counts for others, the chunks count here and what follows is not read.
    let (length, chunked) = ("content-length: 4\r\n", "transfer-encoding: chunked\r\n");
    for both in [format!("{length}{chunked}"), format!("{chunked}{length}")] {
        let run = "POST /api/v1/schedules/hello/quiet/run HTTP/1.1";
        let second = format!("{run}\r\n{host}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        let smuggled = format!("{run}\r\n{host}\r\n{both}\r\n0\r\n\r\n{second}");
        let mut answer = String::new();
        let _ = api.raw(smuggled.as_bytes()).read_to_string(&mut answer);
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
        assert!(answer.to_lowercase().contains("connection: close"), "{answer}");
    }
    assert_eq!(api.get("/api/v1/runs").is(200)["items"].as_array().unwrap().len(), 2);
}

#[test]
fn queries_and_ids_that_are_none() {
    for site in Site::each() {
        let api = quiet(&site);
        for (query, statuses) in [
            ("limit=-1", [400, 400]),
            ("limit=0", [400, 400]),
            ("limit=1000000000000", [400, 400]),
            ("limit=1001", [400, 400]),
            ("limit=ten", [400, 400]),
            ("cursor=garbage", [422, 422]),
            ("cursor=7368656c6c6f2f707573686564210e", [422, 422]),
            ("sort=id;drop", [400, 400]),
            ("limit=1&limit=2", [400, 400]),
            ("agent=%00", [422, 422]),
            ("agent=%ff", [200, 400]),
        ] {
            for list in ["runs", "schedules"] {
                let answer = api.get(&format!("/api/v1/{list}?{query}"));
                assert!(statuses.contains(&answer.status), "{list}?{query}: {answer:?}");
            }
        }
        let big = (1_u128 << 63).to_string();
        for id in [
            "0",
            "-1",
            &big,
            "x",
            "..",
            "%00",
            "00000000-0000-0000-0000-000000000000",
            "{id}",
            "01A1DF9DF9CD70668FBC04414F4E5415",
        ] {
            for path in ["", "/log", "/cancel", "/retry"] {
                let method = if ["/cancel", "/retry"].contains(&path) { "POST" } else { "GET" };
                api.send(method, &format!("/api/v1/runs/{id}{path}"), &[], b"").refused(404, "not_found");
            }
        }
        unharmed(&api);
    }
}

#[test]
fn connections_that_say_nothing_are_borne() {
    let site = Site::sqlite();
    let api = quiet(&site);
    let mut idle: Vec<_> = (0..500).map(|_| api.raw(b"GET /healthz HT")).collect();
    idle.extend((0..500).map(|_| api.raw(b"")));
    for _ in 0..20 {
        assert_eq!(api.get("/healthz").status, 200);
    }
    drop(idle);
    unharmed(&api);
}

#[test]
fn one_who_answers_is_never_told_of_the_inside() {
    let site = Site::sqlite();
    let api = quiet(&site);
    let secrets: [&str; 2] = ["HOOK_SECRET=", &api.local];
    for path in [
        "/healthz",
        "/readyz",
        "/metrics",
        "/api/openapi.json",
        "/api/v1/schedules",
        "/api/v1/agents",
        "/nothing",
    ] {
        let answer = api.get(path);
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        assert!(secrets.iter().all(|secret| !text.contains(secret)), "{path}: {text}");
    }
    let shown: Value = api.get("/api/v1/schedules/hello/pushed").is(200);
    assert_eq!(
        shown["definition"]["webhook"]["secret"], "${HOOK_SECRET}",
        "the name, never what it stands for"
    );
}
