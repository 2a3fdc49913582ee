//! Peers that take their time: each is cut off at its limit, costs a bounded amount, and keeps nobody else out. The limits are
//! short here, so that nobody has to wait for them.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use belfry::event::{Level, Name};
use belfry::{Engine, Event};
use belfry_server::Limits;
use site::{PATIENCE, Site};

mod site;

/// What a slow peer gets.
const SHORT: Duration = Duration::from_millis(400);
/// How long a peer that drips waits between two bytes.
const DRIP: Duration = Duration::from_millis(20);

fn site() -> Site {
    site_with(Limits {
        head_within: SHORT,
        body_within: SHORT,
        write_within: SHORT,
        take_within: SHORT,
        ..Limits::default()
    })
}

fn site_with(limits: Limits) -> Site {
    Site::start(Engine::builder().build(), "api: {rate: 1000000/s, open: true}", limits)
}

/// What a well-behaved peer is answered.
fn get(site: &Site, path: &str) -> String {
    let mut answer = String::new();
    site.ask("GET", path, "").read_to_string(&mut answer).unwrap();
    answer
}

/// Sends a beginning, then one byte at a time until the server closes the connection. Gives the answer, and how long it
/// took.
fn drip(site: &Site, beginning: &str) -> (String, Duration) {
    let mut stream = site.connect();
    stream.set_read_timeout(Some(DRIP)).unwrap();
    stream.write_all(beginning.as_bytes()).unwrap();
    let (began, mut answer, mut piece) = (Instant::now(), Vec::new(), [0; 1024]);
    while began.elapsed() < PATIENCE {
        // A peer that was cut off may find that out when it writes.
        let _ = stream.write_all(b"x");
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(read) => answer.extend_from_slice(&piece[..read]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
    }
    (String::from_utf8_lossy(&answer).into_owned(), began.elapsed())
}

#[test]
fn a_head_that_drips_is_cut_off() {
    let site = site();
    for beginning in ["", "G", "GET /healthz HTTP/1.1\r\nx: "] {
        let (answer, took) = drip(&site, beginning);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
        assert!(took >= SHORT / 2 && took < PATIENCE / 2, "{beginning:?} took {took:?}");
    }
    assert!(get(&site, "/healthz").starts_with("HTTP/1.1 200"));
}

#[test]
fn a_body_that_drips_is_cut_off() {
    let site = site();
    for (path, length) in [
        ("/api/v1/schedules/a/b/run", "content-length: 100000"),
        ("/api/v1/schedules/a/b/run", "transfer-encoding: chunked"),
        ("/api/v1/tokens", "content-length: 100000"),
    ] {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n{length}\r\n\r\n",
            site.address
        );
        // A chunk that is announced as long, and then comes byte by byte.
        let beginning = if length.contains("chunked") { format!("{head}10000\r\n") } else { head };
        let (answer, took) = drip(&site, &beginning);
        assert!(
            answer.starts_with("HTTP/1.1 408") && answer.contains("too_slow"),
            "{path} {length}: {answer}"
        );
        assert!(took >= SHORT / 2 && took < PATIENCE / 2, "{path} {length} took {took:?}");
    }
}

#[test]
fn connections_that_say_nothing_are_let_go() {
    let site = site();
    let idle: Vec<TcpStream> = (0..300).map(|_| site.connect()).collect();
    for _ in 0..10 {
        assert!(get(&site, "/healthz").starts_with("HTTP/1.1 200"), "others come in");
    }
    for mut stream in idle {
        assert_eq!(stream.read(&mut [0; 16]).unwrap_or(0), 0, "it was cut off");
    }
}

#[test]
fn readers_leave_connections_for_others() {
    let site = site_with(Limits { connections_max: 8, ..Limits::default() });
    // Each says what it was answered, and stays.
    let mut readers = Vec::new();
    let statuses: Vec<String> = (0..8)
        .map(|_| {
            let (mut reader, mut status) =
                (BufReader::new(site.ask("GET", "/api/v1/events", "")), String::new());
            reader.read_line(&mut status).unwrap();
            readers.push(reader);
            status
        })
        .collect();
    assert!(statuses[..6].iter().all(|status| status.starts_with("HTTP/1.1 200")), "{statuses:?}");
    assert!(statuses[6..].iter().all(|status| status.starts_with("HTTP/1.1 503")), "{statuses:?}");
    for _ in 0..10 {
        assert!(get(&site, "/readyz").starts_with("HTTP/1.1"), "others come in");
        let refused = get(&site, "/api/v1/events").to_lowercase();
        assert!(refused.contains("too_many_readers") && refused.contains("retry-after: "), "{refused}");
    }
    // A reader that leaves makes room for another.
    readers.remove(0);
    let began = Instant::now();
    loop {
        let mut status = String::new();
        BufReader::new(site.ask("GET", "/api/v1/events", "")).read_line(&mut status).unwrap();
        if status.starts_with("HTTP/1.1 200") {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "{status}");
    }
}

#[test]
fn bodies_that_never_come_keep_nobody_out() {
    let site = site_with(Limits { connections_max: 8, body_within: PATIENCE, ..Limits::default() });
    let stalled: Vec<TcpStream> = (0..40)
        .map(|_| {
            let mut stream = site.connect();
            let (head, kind) = ("POST /api/v1/tokens HTTP/1.1\r\nhost: ", "content-type: application/json");
            let length = "content-length: 1000";
            write!(stream, "{head}{}\r\n{kind}\r\n{length}\r\n\r\n{{", site.address).unwrap();
            stream
        })
        .collect();
    let began = Instant::now();
    for _ in 0..10 {
        assert!(get(&site, "/healthz").starts_with("HTTP/1.1 200"), "others come in");
    }
    assert!(began.elapsed() < PATIENCE / 3, "they waited {:?}", began.elapsed());
    drop(stalled);
}

/// Memory of this process, in bytes.
fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() << 10
}

#[test]
fn readers_of_events_that_never_read_are_left_and_cost_little() {
    const READERS: usize = 100;
    const EVENTS: usize = 60_000;
    let site = site();
    let listen = |agent: &str| {
        let mut reader = BufReader::new(site.ask("GET", &format!("/api/v1/events{agent}"), ""));
        let mut line = String::new();
        // Its first breath: it listens.
        while !line.starts_with(": ") {
            line.clear();
            assert!(reader.read_line(&mut line).unwrap() > 0);
        }
        reader
    };
    let readers = || {
        let text = get(&site, "/metrics");
        let line = text.lines().find_map(|line| line.strip_prefix("belfry_event_readers "));
        line.unwrap().parse::<usize>().unwrap()
    };
    let deaf: Vec<_> = (0..READERS).map(|_| listen("")).collect();
    let mut other = listen("?agent=marked");
    assert_eq!(readers(), READERS + 1);
    let before = memory();
    let event = |agent: &str| Event {
        agent: Some(agent.to_owned()),
        detail: Some("x".repeat(2000)),
        ..Event::new(site.engine.now(), Level::Info, Name::RunStarted)
    };
    // Some hundred megabytes for each of them.
    site.runtime.block_on(async {
        for number in 0..EVENTS {
            site.engine.tell(event("flood"));
            if number % 500 == 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    });
    let began = Instant::now();
    while readers() > 1 {
        assert!(began.elapsed() < PATIENCE, "{} are still there", readers());
    }
    let grown = memory().saturating_sub(before);
    assert!(grown < 160 << 20, "{} MiB", grown >> 20);
    site.engine.tell(event("marked"));
    let mut line = String::new();
    while !line.contains("\"marked\"") {
        line.clear();
        assert!(other.read_line(&mut line).unwrap() > 0, "who reads goes on");
    }
    drop(deaf);
}
