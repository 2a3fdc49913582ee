//! Webhooks: signed, in time, once; and within the rules of their schedule.

use std::time::{SystemTime, UNIX_EPOCH};

use hmac::{Hmac, KeyInit, Mac};
use serde_json::json;
use sha2::Sha256;

use crate::client::{Answer, Api, CONFIG};
use crate::support::{Site, eventually};

const SECRET: &str = "a secret of sixteen";

fn start(site: &Site) -> Api {
    Api::start_with(site, |command| {
        command.env("HOOK_SECRET", SECRET).env("HOOK_OLD", "the old one");
    })
}

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64
}

fn hmac(secret: &str, pieces: &[&[u8]]) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).unwrap();
    pieces.iter().for_each(|piece| mac.update(piece));
    mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn push(api: &Api, hook: &str, secret: &str, at: i64, body: &[u8]) -> Answer {
    let at = at.to_string();
    let signature = hmac(secret, &[at.as_bytes(), b".", body]);
    let headers = [format!("x-belfry-timestamp: {at}"), format!("x-belfry-signature: sha256={signature}")];
    api.send("POST", &format!("/hooks/{hook}"), &headers.each_ref().map(String::as_str), body)
}

#[test]
fn a_signed_request_makes_a_run_with_its_body_as_payload() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = start(&site);
        let answer = push(&api, "hello/pushed", SECRET, now(), br#"{"ref": "refs/heads/main"}"#).is(202);
        let id = answer["run_id"].as_str().unwrap();
        let mut log = api.listen(&format!("/api/v1/runs/{id}/log?follow=true"), &[]);
        assert_eq!(log.wait_for("output").data["text"], "hello\nrefs/heads/main");
        let run = log.wait_for("end").data;
        assert_eq!((&run["state"], &run["trigger"]), (&json!("completed"), &json!("webhook")));
    }
}

#[test]
fn what_is_late_wrong_or_sent_again_is_refused_also_after_a_restart() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = start(&site);
        let (at, body) = (now(), br#"{"a": 1}"#);
        push(&api, "hello/pushed", "another secret", at, body).refused(401, "signature_wrong");
        push(&api, "hello/pushed", "", at, body).refused(401, "signature_wrong");
        push(&api, "hello/pushed", SECRET, at - 301, body).refused(401, "timestamp_late");
        push(&api, "hello/pushed", SECRET, at + 310, body).refused(401, "timestamp_late");
        api.send("POST", "/hooks/hello/pushed", &[], body).refused(401, "signature_missing");
        let signature = format!("x-hub-signature-256: sha256={}", hmac(SECRET, &[body]));
        api.send("POST", "/hooks/hello/pushed", &[&signature], body).refused(401, "signature_missing");
        // Signed over what is the same JSON, but other bytes.
        let other = hmac(SECRET, &[at.to_string().as_bytes(), b".", br#"{"a":1}"#]);
        let headers = [format!("x-belfry-timestamp: {at}"), format!("x-belfry-signature: sha256={other}")];
        let headers = headers.each_ref().map(String::as_str);
        api.send("POST", "/hooks/hello/pushed", &headers, body).refused(401, "signature_wrong");
        api.send("POST", "/hooks/hello/quiet", &headers, body).refused(404, "not_found");
        api.send("POST", "/hooks/hello/nobody", &headers, body).refused(404, "not_found");
        assert!(
            api.get("/api/v1/runs?agent=hello&schedule=pushed").is(200)["items"]
                .as_array()
                .unwrap()
                .is_empty()
        );

        let first = push(&api, "hello/pushed", SECRET, at, body).is(202);
        push(&api, "hello/pushed", SECRET, at, body).refused(409, "replayed");
        api.stop();
        let api = start(&site);
        let again = push(&api, "hello/pushed", SECRET, at, body).refused(409, "replayed");
        assert!(again["detail"].as_str().unwrap().contains(first["run_id"].as_str().unwrap()), "{again}");
    }
}

#[test]
fn signatures_that_are_none() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = start(&site);
    let (at, body) = (now().to_string(), br#"{"a": 1}"#);
    let good = hmac(SECRET, &[at.as_bytes(), b".", body]);
    let timestamp = format!("x-belfry-timestamp: {at}");
    let send = |headers: &[String], body: &[u8]| {
        let headers: Vec<&str> = headers.iter().map(String::as_str).collect();
        api.send("POST", "/hooks/hello/pushed", &headers, body)
    };
    let signed = |signature: &str| format!("x-belfry-signature: {signature}");
    for signature in [
        format!("sha256={good}00"),
        format!("sha256={}", &good[..62]),
        format!("sha1={good}"),
        good.clone(),
        String::new(),
        "sha256=".into(),
        format!("sha256={}", "é".repeat(32)),
    ] {
        let answer = send(&[timestamp.clone(), signed(&signature)], body);
        assert!([400, 401].contains(&answer.status), "{signature:?}: {answer:?}");
    }
    let right = format!("sha256={good}");
    // A second one, in front or behind, is no way to have two tries.
    let wrong = format!("sha256={}", "0".repeat(64));
    for two in [[&right, &wrong], [&wrong, &right]] {
        let answer = send(&[timestamp.clone(), signed(two[0]), signed(two[1])], body);
        assert!([400, 401].contains(&answer.status), "{two:?}: {answer:?}");
    }
    // What was signed, and something behind it.
    send(&[timestamp.clone(), signed(&right)], br#"{"a": 1} "#).refused(401, "signature_wrong");
    let later = format!("x-belfry-timestamp: {at}0");
    assert_eq!(send(&[later, signed(&right)], body).status, 401);
    let runs = api.get("/api/v1/runs?agent=hello&schedule=pushed").is(200);
    assert!(runs["items"].as_array().unwrap().is_empty());
    send(&[timestamp.clone(), signed(&right)], body).is(202);
    // The same in capitals is the same, and came before.
    let capitals = signed(&format!("sha256={}", good.to_uppercase()));
    send(&[timestamp, capitals], body).refused(409, "replayed");
}

#[test]
fn two_secrets_are_good_while_one_follows_the_other() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = start(&site);
    push(&api, "hello/two", SECRET, now(), b"1").is(202);
    push(&api, "hello/two", "the old one", now(), b"2").is(202);
    push(&api, "hello/two", "a third", now(), b"3").refused(401, "signature_wrong");
    let signature = format!("x-hub-signature-256: sha256={}", hmac("the old one", &[b"{\"zen\": 1}"]));
    api.send("POST", "/hooks/hello/two", &[&signature], b"{\"zen\": 1}").is(202);
    api.send("POST", "/hooks/hello/two", &[&signature], b"{\"zen\": 1}").refused(409, "replayed");
    api.send("POST", "/hooks/hello/two", &[&signature], b"{\"zen\": 2}").refused(401, "signature_wrong");
}

#[test]
fn the_rules_of_the_schedule_hold() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = start(&site);
        push(&api, "slow/pushed", SECRET, now(), b"1").is(202);
        push(&api, "slow/pushed", SECRET, now(), b"2").refused(409, "already_running");
        site.file("go", "");
        eventually("the first is done, and the second may come", || {
            (push(&api, "slow/pushed", SECRET, now(), b"2").status == 202).then_some(())
        });
        api.send("POST", "/api/v1/schedules/slow/pushed/pause", &[], b"").is(200);
        push(&api, "slow/pushed", SECRET, now(), b"3").refused(409, "disabled");
    }
}

#[test]
fn a_secret_that_the_server_lacks_opens_nothing() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = Api::start_with(&site, |command| {
        command.env("HOOK_SECRET", "").env_remove("HOOK_OLD");
    });
    push(&api, "hello/pushed", "", now(), b"1").refused(503, "secret_missing");
    push(&api, "hello/two", "", now(), b"1").refused(503, "secret_missing");
}
