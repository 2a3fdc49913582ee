//! How a command finds the server of a store by its `server.json`, and when it rather opens the store itself.

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Api, CONFIG};
use crate::remote::Said;
use crate::support::Site;

/// Whether a command went to the server: that stands on record, as who changed something last.
fn went_over(api: &Api, site: &Site) -> bool {
    for verb in ["pause", "resume"] {
        assert!(site.belfry(&[verb, "hello/quiet"]).status.success());
    }
    let last = api.get("/api/v1/audit?limit=1").is(200)["items"][0]["actor"].clone();
    assert!(last == "local" || last.as_str().is_some_and(|last| last.starts_with("cli:")), "{last}");
    last == "local"
}

#[test]
fn a_server_is_found_by_its_file() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = Api::start(&site);
        let file = site.state_file("server.json");
        let told: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let rewrite = |told: &Value| std::fs::write(&file, told.to_string()).unwrap();
        let changed = |key: &str, value: Value| {
            let mut told = told.clone();
            told[key] = value;
            rewrite(&told);
        };
        assert!(went_over(&api, &site), "it is found");
        let audit = api.get("/api/v1/audit").is(200);
        assert_eq!(audit["items"][0]["actor"], "local");
        // What is stale, or of another, is passed over quietly, and the store is opened.
        for (key, value) in [
            ("pid", json!(u32::MAX)),
            ("pid", json!(gone_pid())),
            ("url", json!("http://127.0.0.1:1")),
            ("url", json!("nonsense")),
            ("store", json!("sqlite:/elsewhere/belfry.db")),
            ("store", json!("postgres://ada@elsewhere/db")),
        ] {
            changed(key, value.clone());
            let began = Instant::now();
            let said = Said::of(site.belfry(&["ls"]));
            assert_eq!(said.code, 0, "{key} {value}: {}", said.err);
            assert_eq!(said.err.lines().count(), 2, "and nothing is said of it: {}", said.err);
            assert!(began.elapsed() < Duration::from_secs(5));
            assert!(!went_over(&api, &site), "{key} {value}");
        }
        rewrite(&json!({"url": 5}));
        assert!(!went_over(&api, &site), "garbage");
        rewrite(&told);
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(!went_over(&api, &site), "others may read it");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(went_over(&api, &site), "again");
        // Who edits the configuration still reaches it, and a token that is given is the one that counts.
        let good = std::fs::read_to_string(site.path("belfry.yaml")).unwrap();
        std::fs::write(site.path("belfry.yaml"), "agents: [").unwrap();
        if site.path(".belfry/server.json").exists() {
            let said = Said::of(site.belfry(&["ls"]));
            assert!(said.code == 0 && said.err.contains("the server that runs answers"), "{}", said.err);
        }
        std::fs::write(site.path("belfry.yaml"), good).unwrap();
        let said = Said::of(site.belfry(&["--token", "bf_00000000_0", "pause", "hello/quiet"]));
        assert_eq!(said.code, 4, "{}", said.err);
        // A server that answers is believed, also where it says no.
        changed("token", json!("bf_00000000_0"));
        let said = Said::of(site.belfry(&["ls"]));
        assert_eq!((said.code, said.out.as_str()), (4, ""), "{}", said.err);
        rewrite(&told);
        let empty = site.belfry_with(&["ls"], |command| {
            command
                .env("BELFRY_TOKEN", "")
                .env("BELFRY_SERVER", "")
                .env("BELFRY_CONFIG", "")
                .env("BELFRY_STORE", "");
        });
        assert!(empty.status.success(), "a variable that is empty is not set: {empty:?}");
        // Another store is another matter.
        let other = site.belfry_with(&["ls"], |command| {
            command.env("BELFRY_STORE", format!("sqlite:{}", site.path("other.db").display()));
        });
        assert_eq!(other.status.code(), Some(3), "there is none");
        // Killed, it leaves its file behind; the next command finds the store.
        api.up.lock().unwrap().kill();
        assert!(file.exists());
        assert_eq!(Said::of(site.belfry(&["ls"])).code, 0);
    }
}

/// The process of a command that has ended.
fn gone_pid() -> u32 {
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    child.id()
}

#[test]
fn many_commands_of_the_owner_are_not_counted() {
    let site = Site::sqlite();
    site.config(&CONFIG.replace("100000/s", "5/m"));
    let api = Api::start(&site);
    let codes: HashSet<_> = (0..12).map(|_| site.belfry(&["runs", "-n", "1"]).status.code()).collect();
    assert_eq!(codes, HashSet::from([Some(0)]));
    let statuses: Vec<u16> = (0..6).map(|_| api.bare("GET", "/api/openapi.json", &[], b"").status).collect();
    assert_eq!(statuses.last(), Some(&429), "others are: {statuses:?}");
}

#[test]
fn who_asks_too_often_waits_as_it_is_told() {
    let site = Site::sqlite();
    site.config(&CONFIG.replace("100000/s", "3/s"));
    let api = Api::start(&site);
    let made = site.json(&["token", "create", "--scope", "read"]);
    let server = format!("http://{}", api.address);
    for _ in 0..3 {
        let is_refused = (0..1000).any(|_| api.bare("GET", "/api/openapi.json", &[], b"").status == 429);
        assert!(is_refused, "there is something to wait for");
        let arguments = ["--server", &server, "--token", made["token"].as_str().unwrap(), "runs"];
        let said = Said::of(site.belfry(&arguments));
        assert_eq!(said.code, 0, "{}", said.err);
    }
}

/// A server that leaves its readers: what it answers to each request that it is sent, and then the connection ends.
fn one_that_leaves(answer: impl Fn(&str) -> (&'static str, String) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head).unwrap_or(0) > 0 {}
            let (kind, body) = answer(head.split(' ').nth(1).unwrap_or_default());
            let head = format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n");
            // Whoever has left needs no answer.
            let _ = reader.get_mut().write_all(format!("{head}{body}").as_bytes());
        }
    });
    address
}

#[test]
fn a_list_that_does_not_end_is_left() {
    let address = one_that_leaves(|path| {
        assert!(path.contains("/api/v1/"), "{path}");
        // Two cursors that lead to each other.
        let next = if path.contains("cursor=x") { "y" } else { "x" };
        ("application/json", json!({"items": [], "next": next}).to_string())
    });
    let server = format!("http://{address}");
    for command in [&["ls"][..], &["runs"], &["sessions"], &["api", "/api/v1/runs"]] {
        let said =
            Said::of(Site::sqlite().belfry(&[&["--server", &server, "--token", "t"], command].concat()));
        match command[0] {
            "api" => assert_eq!(said.code, 0, "one page as it is: {}", said.err),
            _ => {
                assert_eq!(said.code, 5, "{command:?}: {}", said.err);
                let expected = "the server's list does not end: the cursor \"x\" comes a second time";
                assert!(said.err.contains(expected), "{command:?}: {}", said.err);
            }
        }
    }
}

#[test]
fn a_reader_that_was_left_comes_back_and_misses_nothing() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start(&site);
    let run = api.post("/api/v1/schedules/hello/quiet/run", &json!({"wait_ms": 20000})).is(201);
    let id = run["id"].as_str().unwrap().to_owned();
    let address = one_that_leaves(move |path| {
        let piece = |seq: u64, text: &str| {
            let piece = json!({"seq": seq, "attempt": 1, "stream": "stdout", "text": text});
            format!("id: {seq}\nevent: output\ndata: {piece}\n\n")
        };
        let stream = "text/event-stream";
        match path.split_once("/log?follow=true") {
            None => ("application/json", run.to_string()),
            Some((_, "")) => (stream, piece(1, "one\n") + ": \n\nevent: output\ndata: {\"se"),
            Some((_, "&after=1")) => (stream, piece(2, "two\n")),
            Some(_) => (stream, piece(3, "three\n") + &format!("event: end\ndata: {run}\n\n")),
        }
    });
    let said = Said::of(site.belfry(&["--server", &format!("http://{address}"), "logs", "-f", &id]));
    assert_eq!((said.code, said.out.as_str()), (0, "one\ntwo\nthree\n"), "{}", said.err);
    let run = api.get(&format!("/api/v1/runs/{id}")).is(200);
    let address = one_that_leaves(move |path| match path.contains("/log") {
        false => ("application/json", run.to_string()),
        true => ("text/event-stream", String::new()),
    });
    let said = Said::of(site.belfry(&["--server", &format!("http://{address}"), "logs", "-f", &id]));
    assert_eq!(said.code, 5, "one that never says anything is given up: {}", said.err);
}
