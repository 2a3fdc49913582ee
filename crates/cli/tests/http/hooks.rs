//! Webhooks: signed, in time, once; and within the rules of their schedule.

use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
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
fn what_is_late_or_wrong_is_refused_and_a_repeat_makes_no_second_run_also_after_a_restart() {
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
        assert_eq!(push(&api, "hello/pushed", SECRET, at, body).is(200), first);
        api.stop();
        let api = start(&site);
        assert_eq!(push(&api, "hello/pushed", SECRET, at, body).is(200), first);
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
    let first = send(&[timestamp.clone(), signed(&right)], body).is(202);
    // What counts is what was signed, not how the signature is written.
    let capitals = signed(&format!("sha256={}", good.to_uppercase()));
    assert_eq!(send(&[timestamp.clone(), capitals], body).is(200), first);
    let two = signed(&format!("{right},{wrong}"));
    assert_eq!(send(&[timestamp, two], body).is(200), first);
}

#[test]
fn two_secrets_are_good_while_one_follows_the_other() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = start(&site);
    push(&api, "hello/two", SECRET, now(), b"1").is(202);
    push(&api, "hello/two", "the old one", now(), b"2").is(202);
    push(&api, "hello/two", "a third", now(), b"3").refused(401, "signature_wrong");
}

#[test]
fn githubs_signature_counts_only_with_githubs_headers() {
    let site = Site::sqlite();
    site.config(CONFIG);
    let api = start(&site);
    let body = b"{\"zen\": 1}";
    let signature = format!("x-hub-signature-256: sha256={}", hmac("the old one", &[body]));
    let own = ["x-github-event: ping", "x-github-delivery: 72d3162e-cc78-11e3-81ab-4c9367dc0958"];
    let all = [signature.as_str(), own[0], own[1]];
    api.send("POST", "/hooks/hello/two", &all[..1], body).refused(401, "signature_missing");
    api.send("POST", "/hooks/hello/two", &all[..2], body).refused(401, "signature_missing");
    api.send("POST", "/hooks/hello/two", &all, b"{\"zen\": 2}").refused(401, "signature_wrong");
    let first = api.send("POST", "/hooks/hello/two", &all, body).is(202);
    assert_eq!(api.send("POST", "/hooks/hello/two", &all, body).is(200), first);
    // A signature of Belfry's form, however old, with what it signs as the body.
    let old = now() - 86_400;
    let content = [old.to_string().as_bytes(), b".", body].concat();
    let signature = format!("x-hub-signature-256: sha256={}", hmac(SECRET, &[&content]));
    api.send("POST", "/hooks/hello/two", &[&signature, own[0], own[1]], &content)
        .refused(401, "signature_wrong");
    let timestamp = format!("x-belfry-timestamp: {old}");
    api.send("POST", "/hooks/hello/two", &[&timestamp, &signature, own[0], own[1]], &content)
        .refused(401, "signature_mixed");
}

/// The headers of a request in the form of Standard Webhooks.
fn standard(secret: &[u8], id: &str, at: i64, body: &[u8]) -> [String; 3] {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).unwrap();
    mac.update(format!("{id}.{at}.").as_bytes());
    mac.update(body);
    let signature = BASE64.encode(mac.finalize().into_bytes());
    [
        format!("webhook-id: {id}"),
        format!("webhook-timestamp: {at}"),
        format!("webhook-signature: v1a,x v1,{signature}"),
    ]
}

#[test]
fn standard_webhooks_are_understood_and_their_id_collapses_repeats() {
    for site in Site::each() {
        site.config(CONFIG);
        let secret = b"twenty-four random bytes";
        let api = Api::start_with(&site, |command| {
            command
                .env("HOOK_SECRET", format!("whsec_{}", BASE64.encode(secret)))
                .env("HOOK_OLD", "the old one");
        });
        let send = |headers: [String; 3], body: &[u8]| {
            api.send("POST", "/hooks/hello/two", &headers.each_ref().map(String::as_str), body)
        };
        let (at, body) = (now(), b"{\"ref\": \"x\"}");
        send(standard(b"another secret", "msg_1", at, body), body).refused(401, "signature_wrong");
        send(standard(secret, "msg_1", at - 310, body), body).refused(401, "timestamp_late");
        let first = send(standard(secret, "msg_1", at, body), body).is(202);
        assert_eq!(send(standard(secret, "msg_1", at, body), body).is(200), first, "sent again");
        assert_eq!(
            send(standard(secret, "msg_1", at + 1, body), body).is(200),
            first,
            "tried again, signed anew"
        );
        send(standard(secret, "msg_1", at + 1, b"{}"), b"{}").refused(409, "key_reused");
        let second = send(standard(b"the old one", "msg_2", at, body), body).is(202);
        assert_ne!(first, second);
    }
}

#[test]
fn a_key_collapses_repeats_and_what_was_signed_makes_one_run() {
    for site in Site::each() {
        site.config(CONFIG);
        let api = start(&site);
        let send = |at: i64, key: &str, body: &[u8]| {
            let signature = hmac(SECRET, &[at.to_string().as_bytes(), b".", body]);
            let mut headers =
                vec![format!("x-belfry-timestamp: {at}"), format!("x-belfry-signature: sha256={signature}")];
            if !key.is_empty() {
                headers.push(format!("idempotency-key: {key}"));
            }
            let headers: Vec<&str> = headers.iter().map(String::as_str).collect();
            api.send("POST", "/hooks/hello/two", &headers, body)
        };
        let at = now();
        let first = send(at, "k1", b"1").is(202);
        assert_eq!(send(at + 1, "k1", b"1").is(200), first, "the key alone");
        assert_eq!(send(at, "k2", b"1").is(200), first, "the content alone");
        assert_eq!(send(at + 1, "", b"1").is(200), first, "content of a repeat, without its key");
        send(at + 2, "k1", b"2").refused(409, "key_reused");
        send(at + 2, "no blanks", b"2").refused(400, "bad_key");
        // The key of another hook, and that of a run by hand, are others.
        let by_hand =
            api.send("POST", "/api/v1/schedules/hello/two/run", &["idempotency-key: k1"], b"").is(201);
        assert_ne!(by_hand["id"], first["run_id"]);
        // Many at once.
        let answers: Vec<Answer> = std::thread::scope(|scope| {
            let senders: Vec<_> = (0..8)
                .map(|number| {
                    let send = &send;
                    scope.spawn(
                        move || if number % 2 == 0 { send(at, "k9", b"9") } else { send(at + 1, "k9", b"9") },
                    )
                })
                .collect();
            senders.into_iter().map(|sender| sender.join().unwrap()).collect()
        });
        assert_eq!(answers.iter().filter(|answer| answer.status == 202).count(), 1, "{answers:?}");
        assert!(answers.iter().all(|answer| answer.json() == answers[0].json()), "{answers:?}");
    }
}

#[test]
fn a_webhook_that_has_no_secret_says_so_and_takes_a_token() {
    for site in Site::each() {
        site.config(&CONFIG.replace(
            "      often:",
            "      open: {webhook: {secret: none}, if_running: queue}\n      often:",
        ));
        let api = start(&site);
        let token = |scope: &str| {
            let made = site.json(&["token", "create", "--scope", scope]);
            format!("authorization: Bearer {}", made["token"].as_str().unwrap())
        };
        let (good, small) = (token("trigger"), token("read"));
        let send = |headers: &[&str], body: &[u8]| api.send("POST", "/hooks/hello/open", headers, body);
        send(&["authorization: Bearer bf_0_1"], b"1").refused(401, "token_wrong");
        send(&[&small], b"1").refused(403, "scope_too_small");
        let first = send(&[&good, "idempotency-key: a"], b"1").is(202);
        assert_eq!(send(&[&good, "idempotency-key: a"], b"1").is(200), first);
        send(&[&good, "idempotency-key: a"], b"2").refused(409, "key_reused");
        assert_ne!(send(&[&good], b"1").is(202), first, "without a key each makes a run");
        let audit = api.get("/api/v1/audit?limit=1").is(200)["items"][0].clone();
        let id = good.split('_').nth(1).unwrap();
        assert_eq!(
            (&audit["action"], &audit["actor"]),
            (&json!("hook"), &json!(id)),
            "the token that decided"
        );
    }
}

#[test]
fn a_secret_that_is_not_text_is_refused() {
    let site = Site::sqlite();
    for secret in ["12345", "true", "~", "\"\"", "[1, 2]", "[]", "{a: b}"] {
        site.config(&CONFIG.replace("\"${HOOK_SECRET}\"}}\n      two", &format!("{secret}}}}}\n      two")));
        let checked = site.belfry(&["check"]);
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert_eq!(checked.status.code(), Some(2), "{secret}: {said}");
        assert!(
            said.contains("belfry.yaml:") && said.contains("hello/pushed: ") && said.contains("help: "),
            "{said}"
        );
    }
    site.config(CONFIG);
    let api = start(&site);
    for webhook in [
        json!({"secret": 12345}),
        json!({"secret": true}),
        json!({"secret": null}),
        json!({"secret": ""}),
        json!({"secret": ["${A}", 5]}),
        json!({"secret": []}),
        json!({}),
        json!({"github": true}),
    ] {
        let body = json!({"agent": "hello", "schedule": "new", "definition": {"webhook": webhook}});
        let refused = api.post("/api/v1/schedules", &body).refused(422, "invalid");
        assert!(refused["detail"].as_str().unwrap().contains("secret"), "{refused}");
        assert!(!refused.to_string().contains("12345"), "{refused}");
    }
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
