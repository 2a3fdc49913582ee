//! Every route takes exactly the scope that its document says, and no route is without.

use serde_json::{Value, json};

use crate::client::{Api, CONFIG};
use crate::support::{Site, eventually};

const SCOPES: [&str; 4] = ["read", "trigger", "manage", "admin"];

/// What needs no token.
const OPEN: [&str; 9] = [
    "/",
    "/api/openapi.json",
    "/healthz",
    "/hooks/nobody/nobody",
    "/login",
    "/login",
    "/login.css",
    "/login.js",
    "/readyz",
];

/// Every operation of a document: method, path with names filled in, and its scope.
fn operations(document: &Value) -> Vec<(String, String, Option<usize>)> {
    let mut all = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let security =
                operation["security"].as_array().unwrap_or_else(|| panic!("{method} {path} says nothing"));
            assert_eq!(security.len(), 1, "{method} {path}");
            let scope = security[0].get("token").map(|scopes| {
                let scope = scopes[0].as_str().unwrap();
                SCOPES.iter().position(|known| *known == scope).unwrap_or_else(|| panic!("{scope}"))
            });
            let filled = path.split('/').map(|part| if part.starts_with('{') { "nobody" } else { part });
            all.push((method.to_uppercase(), filled.collect::<Vec<_>>().join("/"), scope));
        }
    }
    all
}

/// What a schedule's file says of the host is for those who may change schedules.
#[test]
fn readers_are_not_told_of_directories_and_variables() {
    let site = Site::sqlite();
    site.config(&format!(
        "{CONFIG}  gone:\n    shell: date\n    cwd: /no/such/SECRET-PLACE\n    retry: {{max: 0}}\n    \
         schedules: {{x: {{at: \"2090-01-01T00:00:00Z\"}}}}\n  \
         unset:\n    shell: date\n    env: {{KEY: \"${{SECRET_NAME}}\"}}\n    retry: {{max: 0}}\n    \
         schedules: {{x: {{at: \"2090-01-01T00:00:00Z\"}}}}\n"
    ));
    let api = Api::start(&site);
    let tokens = SCOPES.map(|scope| {
        let made = site.json(&["token", "create", "--scope", scope]);
        format!("authorization: Bearer {}", made["token"].as_str().unwrap())
    });
    eventually("all are known", || {
        (api.send("GET", "/api/v1/tokens", &[&tokens[3]], b"").status == 200).then_some(())
    });
    for (agent, secret, words) in [
        ("gone", "SECRET-PLACE", "its directory (cwd) does not exist"),
        ("unset", "SECRET_NAME", "env KEY: its variable is not set"),
    ] {
        let mut events = api.listen(&format!("/api/v1/events?agent={agent}"), &[]);
        let asked = json!({"wait_ms": 20_000});
        let run = api.post(&format!("/api/v1/schedules/{agent}/x/run"), &asked).is(201);
        assert!(run["error"].as_str().unwrap().contains(secret), "{run}");
        let told = events.wait_for("run_finished").data.to_string();
        assert!(told.contains(words) && !told.contains(secret), "{told}");
        let id = run["id"].as_str().unwrap();
        for (number, token) in tokens.iter().enumerate() {
            for path in [
                format!("/api/v1/runs/{id}"),
                format!("/api/v1/runs?agent={agent}"),
                format!("/api/v1/schedules/{agent}/x"),
                format!("/api/v1/schedules?agent={agent}"),
            ] {
                let answer = api.bare("GET", &path, &[token], b"").is(200).to_string();
                assert!(answer.contains(words), "{path}: {answer}");
                assert_eq!(answer.contains(secret), number >= 2, "{} {path}: {answer}", SCOPES[number]);
            }
            let log = format!("/api/v1/runs/{id}/log?follow=true");
            let end = api.listen_as(token, &log, &[]).wait_for("end").data.to_string();
            assert!(end.contains(words), "{end}");
            assert_eq!(end.contains(secret), number >= 2, "{} {end}", SCOPES[number]);
        }
    }
}

#[test]
fn each_route_takes_its_scope_and_no_less() {
    let site = Site::sqlite();
    // What is closed is closed to everybody: see `agents`.
    site.config(&CONFIG.replace("100000/s}", "100000/s, allow_agents: true}"));
    let api = Api::start(&site);
    let document = api.get("/api/openapi.json").is(200);
    let tokens = SCOPES.map(|scope| {
        let made = site.json(&["token", "create", "--scope", scope]);
        format!("authorization: Bearer {}", made["token"].as_str().unwrap())
    });
    let last = &tokens[3];
    eventually("all are known", || {
        (api.send("GET", "/api/v1/tokens", &[last], b"").status == 200).then_some(())
    });
    let definition = |token: &str| {
        api.send("GET", "/api/v1/agents/hello", &[token], b"").is(200)["definition"].is_object()
    };
    assert_eq!(
        tokens.each_ref().map(|token| definition(token)),
        [false, false, false, true],
        "what a file says"
    );
    let operations = operations(&document);
    assert!(operations.len() > 30, "{}", operations.len());
    let open: Vec<_> = operations.iter().filter(|one| one.2.is_none()).map(|one| one.1.as_str()).collect();
    assert_eq!(open, OPEN, "and no other");
    let mut checked = 0;
    for (method, path, needed) in &operations {
        // A stream never ends: its beginning is enough.
        let status = |headers: &[&str]| match path.as_str() {
            "/api/v1/events" => head_of(&api, method, path, headers),
            _ => api.bare(method, path, headers, b"").status,
        };
        let Some(needed) = needed else {
            assert!(![401, 403].contains(&status(&[])), "{method} {path} is open");
            continue;
        };
        for other in ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"] {
            assert_eq!(head_of(&api, other, path, &[]), 401, "{other} {path} without a token");
        }
        assert_eq!(status(&[]), 401, "{method} {path} without a token");
        assert_eq!(status(&["authorization: Bearer bf_00000000_0"]), 401, "{method} {path} with a wrong one");
        for (place, token) in tokens.iter().enumerate() {
            let status = status(&[token]);
            match place < *needed {
                true => assert_eq!(status, 403, "{method} {path} with {}", SCOPES[place]),
                false => assert!(
                    ![401, 403, 500].contains(&status),
                    "{method} {path} with {}: {status}",
                    SCOPES[place]
                ),
            }
            checked += 1;
        }
    }
    assert_eq!(checked, 4 * (operations.len() - open.len()));
    for (method, path) in
        [("GET", "/api/v1/nothing"), ("GET", "/nothing"), ("POST", "/healthz"), ("OPTIONS", "/login")]
    {
        api.bare(method, path, &[], b"").refused(401, "token_missing");
    }
    api.send("GET", "/api/v1/nothing", &[&tokens[0]], b"").refused(404, "not_found");
    api.send("PUT", "/api/v1/agents", &[&tokens[0]], b"").refused(405, "method_not_allowed");
}

/// The status of a response, whatever its body.
fn head_of(api: &Api, method: &str, path: &str, headers: &[&str]) -> u16 {
    use std::io::BufRead;
    let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    let head = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n{headers}\r\n", api.address);
    let mut line = String::new();
    api.raw(head.as_bytes()).read_line(&mut line).unwrap();
    line.split(' ').nth(1).unwrap().parse().unwrap()
}
