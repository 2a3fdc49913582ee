//! Webhooks as a stranger meets them: what is refused before a byte of the body is read, and how much memory bodies
//! take.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use belfry::{AgentBuilder, Engine, When};
use belfry_server::Limits;
use hmac::{Hmac, KeyInit, Mac};
use serde_json::{Value, json};
use sha2::Sha256;
use site::{PATIENCE, Site};

mod site;

/// Memory for bodies.
const BODIES: usize = 256 << 10;

/// A route that reads a body and takes a token.
const RUN: &str = "/api/v1/schedules/a/h0/run";

/// A server with one webhook for each of these settings: `a/h0`, `a/h1` and so on. They do not come from a file, so
/// nothing has checked them.
fn site(hooks: &[Value]) -> Site {
    site_with("api: {rate: 1000000/s}", hooks)
}

fn site_with(settings: &str, hooks: &[Value]) -> Site {
    let mut agent = AgentBuilder::new("a");
    for (number, hook) in hooks.iter().enumerate() {
        agent = agent.schedule(format!("h{number}"), When::Webhook(hook.clone()));
    }
    let engine = Engine::builder().agents([agent.build()]).handler("a", async |_| Ok(())).build();
    let limits = Limits { body_within: PATIENCE, bodies_bytes_max: BODIES, ..Limits::default() };
    let site = Site::start(engine, settings, limits);
    site.runtime.block_on(site.engine.start()).unwrap();
    site
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// Headers that look right, over a signature that is not.
fn wrong_signature() -> String {
    format!("x-belfry-timestamp: {}\r\nx-belfry-signature: sha256={}\r\n", now(), "0".repeat(64))
}

/// The headers of a request that is signed with a secret.
fn signed(secret: &[u8], body: &[u8]) -> String {
    let at = now();
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).unwrap();
    mac.update(format!("{at}.").as_bytes());
    mac.update(body);
    let hex: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("x-belfry-timestamp: {at}\r\nx-belfry-signature: sha256={hex}\r\n")
}

/// The header with the local token.
fn token(site: &Site) -> String {
    format!("authorization: Bearer {}\r\n", site.server.local_token())
}

/// Sends the head of a request and so much of its body.
fn begin(site: &Site, path: &str, headers: &str, length: usize, body: &[u8]) -> TcpStream {
    let mut stream = site.ask("POST", path, &format!("{headers}content-length: {length}\r\n"));
    // The server may have refused by now.
    let _ = stream.write_all(body);
    stream
}

fn send(site: &Site, path: &str, headers: &str, body: &[u8]) -> String {
    answer(begin(site, path, headers, body.len(), body))
}

/// The status line, the head and the body of an answer.
fn answer(mut stream: TcpStream) -> String {
    let mut all = Vec::new();
    // A peer that is refused early may be cut off once it was answered.
    let _ = stream.read_to_end(&mut all);
    String::from_utf8_lossy(&all).into_owned()
}

/// Waits until bodies have taken so many bytes of the memory for such senders.
fn wait_for_taken(site: &Site, sender: &str, bytes: usize) {
    let line = format!("belfry_body_bytes{{sender=\"{sender}\"}} ");
    let began = Instant::now();
    loop {
        let text = answer(site.ask("GET", "/metrics", &token(site)));
        let taken = text.lines().find_map(|text| text.strip_prefix(&line)).expect("the gauge");
        if taken.parse::<usize>().unwrap() >= bytes {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "{sender}: {taken} of {bytes}");
    }
}

#[track_caller]
fn is(answer: &str, status: u16, code: &str) {
    assert!(
        answer.starts_with(&format!("HTTP/1.1 {status}")) && answer.contains(code),
        "{status} {code}: {answer}"
    );
}

#[test]
fn a_stored_secret_that_is_not_text_lets_nobody_in() {
    let hooks = [
        json!({"secret": 12345}),
        json!({"secret": true}),
        json!({"secret": null}),
        json!({"secret": ""}),
        json!({"secret": [1, 2]}),
        json!({"secret": ["${SET}", 5]}),
        json!({"secret": []}),
        json!({"secrets": []}),
        json!({"secret": "none", "secrets": ["${SET}"]}),
        json!({}),
        json!(null),
    ];
    let site = site(&hooks);
    for (number, hook) in hooks.iter().enumerate() {
        let path = format!("/hooks/a/h{number}");
        let signed = |secret: &[u8]| signed(secret, b"{}");
        for headers in [String::new(), signed(b""), signed(b"12345"), signed(b"a secret of sixteen")] {
            let answer = send(&site, &path, &headers, b"{}");
            assert!(answer.contains("503") && answer.contains("secret_wrong"), "{hook} {headers}: {answer}");
        }
    }
}

#[test]
fn a_stranger_does_not_learn_the_name_of_a_variable() {
    let site = site(&[json!({"secret": "${NOT}"})]);
    let token = format!("authorization: Bearer bf_0_{}\r\n", "0".repeat(64));
    for headers in [String::new(), wrong_signature(), token] {
        let answer = send(&site, "/hooks/a/h0", &headers, b"{}");
        assert!(answer.contains("secret_missing") && !answer.contains("NOT"), "{answer}");
    }
}

#[test]
fn a_request_that_cannot_be_right_is_answered_before_its_body_is_read() {
    let site = site(&[json!({"secret": "${SET}"}), json!({"secret": "${NOT}"}), json!({"secret": "none"})]);
    let late =
        format!("x-belfry-timestamp: {}\r\nx-belfry-signature: sha256={}\r\n", now() - 400, "0".repeat(64));
    let short = format!("x-belfry-timestamp: {}\r\nx-belfry-signature: sha256=00\r\n", now());
    let token = format!("authorization: Bearer bf_0_{}\r\n", "0".repeat(64));
    for (path, headers, length, status, code) in [
        ("/hooks/a/nobody", wrong_signature(), 100_000, 404, "not_found"),
        ("/hooks/nobody/h0", wrong_signature(), 100_000, 404, "not_found"),
        ("/hooks/a/h0", String::new(), 100_000, 401, "signature_missing"),
        ("/hooks/a/h0", late, 100_000, 401, "timestamp_late"),
        ("/hooks/a/h0", short, 100_000, 401, "signature_wrong"),
        ("/hooks/a/h0", wrong_signature(), 2 << 20, 413, "too_large"),
        ("/hooks/a/h1", wrong_signature(), 100_000, 503, "secret_missing"),
        ("/hooks/a/h2", token, 100_000, 401, "token_wrong"),
    ] {
        // Nothing of the body is sent: an answer that waited for it would be that it is too slow.
        is(&answer(begin(&site, path, &headers, length, b"")), status, code);
    }
}

#[test]
fn a_header_that_decides_something_is_there_once() {
    let site = site(&[json!({"secret": "${SET}"}), json!({"secret": "none"})]);
    let (signed, token) = (signed(b"a secret of sixteen", b"{}"), token(&site));
    let json = "content-type: application/json\r\n";
    for (method, path, headers, field) in [
        (
            "POST",
            "/hooks/a/h0",
            format!("{signed}idempotency-key: a\r\nIdempotency-Key: b\r\n"),
            "Idempotency-Key",
        ),
        (
            "POST",
            "/hooks/a/h0",
            format!("{signed}idempotency-key: a\r\nidempotency-key: a\r\n"),
            "Idempotency-Key",
        ),
        (
            "POST",
            RUN,
            format!("{token}{json}idempotency-key: a\r\nidempotency-key: b\r\n"),
            "Idempotency-Key",
        ),
        ("POST", RUN, format!("{token}{json}content-type: text/plain\r\n"), "Content-Type"),
        ("POST", "/login", format!("{json}content-type: text/plain\r\n"), "Content-Type"),
        (
            "POST",
            "/hooks/a/h0",
            format!("{signed}content-encoding: identity\r\ncontent-encoding: gzip\r\n"),
            "Content-Encoding",
        ),
        (
            "GET",
            "/api/v1/events",
            format!("{token}last-event-id: 1\r\nlast-event-id: 2\r\n"),
            "Last-Event-ID",
        ),
    ] {
        let mut stream = site.ask(method, path, &format!("{headers}content-length: 2\r\n"));
        let _ = stream.write_all(b"{}");
        let answer = answer(stream);
        is(&answer, 400, "header_twice");
        assert!(answer.contains(&format!("\"field\":\"{field}\"")), "{answer}");
    }
    for (headers, status) in [(format!("{token}{token}"), 401), ("host: localhost\r\n".to_owned(), 400)] {
        is(&send(&site, "/hooks/a/h1", &headers, b"{}"), status, "");
    }
    for name in ["x-belfry-timestamp", "x-belfry-signature"] {
        let line = signed.lines().find(|line| line.starts_with(name)).unwrap();
        is(&send(&site, "/hooks/a/h0", &format!("{signed}{line}\r\n"), b"{}"), 401, "once each");
    }
}

#[test]
fn wrong_requests_from_an_address_take_nothing_from_signed_ones() {
    const RATE: usize = 5;
    let hooks = [json!({"secret": "${SET}"}), json!({"secret": "${SET}"}), json!({"secret": "none"})];
    let site = site_with("api: {rate: 5/h}", &hooks);
    let right = |path: &str, number: usize| {
        let body = format!("{{\"number\": {number}}}");
        send(&site, path, &signed(b"a secret of sixteen", body.as_bytes()), body.as_bytes())
    };
    for _ in 0..2 * RATE {
        send(&site, "/hooks/a/h0", "", b"{}");
    }
    is(&send(&site, "/hooks/a/h0", "", b"{}"), 429, "too_many_requests");
    is(&send(&site, "/hooks/a/h2", "", b"{}"), 429, "too_many_requests");
    for number in 0..2 * RATE {
        is(&send(&site, "/hooks/a/h0", &wrong_signature(), b"{}"), 429, "too_many_requests");
        is(&send(&site, "/hooks/a/nobody", &wrong_signature(), b"{}"), 429, "too_many_requests");
        if number < RATE {
            is(&right("/hooks/a/h0", number), 202, "run_id");
        }
    }
    is(&right("/hooks/a/h0", RATE), 429, "too_many_requests");
    is(&right("/hooks/a/h1", RATE), 202, "run_id");
}

#[test]
fn a_known_sender_that_stalls_gives_its_room_to_the_next() {
    let site = site(&[json!({"secret": "none"})]);
    let large = vec![b'x'; 200 << 10];
    let token = token(&site);
    // Each announces 300 KiB and sends 200 KiB: there is no room for a second one beside it.
    for path in [RUN, "/hooks/a/h0"] {
        let stalled = begin(&site, path, &token, 300 << 10, &large);
        wait_for_taken(&site, "owner", large.len());
        is(&send(&site, RUN, &token, b"["), 415, "not_json");
        is(&send(&site, RUN, &token, &large), 415, "not_json");
        is(&answer(stalled), 408, "too_slow");
    }
}

#[test]
fn an_unknown_sender_that_stalls_gives_its_room_to_the_next() {
    let site = site(&[json!({"secret": "${SET}"})]);
    let large = vec![b'x'; 200 << 10];
    let stalled = begin(&site, "/hooks/a/h0", &wrong_signature(), 300 << 10, &large);
    // The first bytes of a body need no room.
    wait_for_taken(&site, "unknown", large.len() - (16 << 10));
    for _ in 0..2 {
        is(&send(&site, "/hooks/a/h0", &wrong_signature(), &large[..100 << 10]), 401, "signature_wrong");
    }
    is(&answer(stalled), 408, "too_slow");
}

#[test]
fn strangers_who_hold_and_renew_large_bodies_keep_nobody_out() {
    const ROUNDS: usize = 4;
    let site = site(&vec![json!({"secret": "${SET}"}); 2 * ROUNDS]);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    // All but the last bytes; then nothing until the server closes the connection.
                    let held = begin(&site, "/hooks/a/h0", &wrong_signature(), 60 << 10, &[b'x'; 59 << 10]);
                    held.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
                    answer(held);
                }
            });
        }
        let text = "y".repeat(100 << 10);
        let body = format!(r#"{{"prompt":"{text}"}}"#);
        let answers: Vec<(String, String)> = (0..ROUNDS)
            .map(|round| {
                let signed = signed(b"a secret of sixteen", body.as_bytes());
                let hook = send(&site, &format!("/hooks/a/h{round}"), &signed, body.as_bytes());
                let json = format!("{}content-type: application/json\r\n", token(&site));
                let run = format!("/api/v1/schedules/a/h{}/run", ROUNDS + round);
                (hook, send(&site, &run, &json, body.as_bytes()))
            })
            .collect();
        is_over.store(true, Ordering::Relaxed);
        for (hook, run) in answers {
            is(&hook, 202, "run_id");
            is(&run, 201, "state");
        }
    });
}
