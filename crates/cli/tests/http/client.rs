//! A client of a few lines: it sends exactly what it is told to, also what no library would.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{PATIENCE, Site, Up, eventually};

/// A server, and how to reach it.
pub struct Api {
    pub up: Mutex<Up>,
    pub address: String,
    /// What lets its owner in.
    pub local: String,
}

/// An answer.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(':'));
        lines.into_iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    }

    /// It has this status; gives its JSON.
    #[track_caller]
    pub fn is(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{} {}", self.head, String::from_utf8_lossy(&self.body));
        if self.body.is_empty() { Value::Null } else { self.json() }
    }

    /// It is a problem of this status and code.
    #[track_caller]
    pub fn refused(&self, status: u16, code: &str) -> Value {
        let problem = self.is(status);
        assert_eq!(problem["code"], code, "{problem}");
        assert_eq!(self.header("content-type"), Some("application/problem+json"));
        assert_eq!(problem["status"], status);
        assert!(!problem["detail"].as_str().unwrap().is_empty());
        problem
    }
}

impl Api {
    pub fn start(site: &Site) -> Api {
        Api::start_with(site, |_| {})
    }

    pub fn start_with(site: &Site, change: impl FnOnce(&mut Command)) -> Api {
        let file = site.state_file("server.json");
        let _ = std::fs::remove_file(&file);
        let mut up = site.up_with(change);
        up.event("node_started");
        let told: Value =
            eventually("the server's file", || serde_json::from_slice(&std::fs::read(&file).ok()?).ok());
        let address = told["url"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned();
        Api { up: Mutex::new(up), address, local: told["token"].as_str().unwrap().to_owned() }
    }

    /// Ends the server in good order.
    pub fn stop(self) {
        self.up.into_inner().unwrap().stop();
    }

    /// Sends bytes, and gives back a connection to read from.
    pub fn raw(&self, bytes: &[u8]) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        // Who is refused early may close before it has read all.
        let _ = stream.write_all(bytes);
        BufReader::new(stream)
    }

    /// The header line that carries the local token.
    pub fn auth(&self) -> String {
        format!("authorization: Bearer {}", self.local)
    }

    /// A request with headers of its own, one a line, and with the local token unless they name another.
    #[track_caller]
    pub fn send(&self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> Answer {
        let auth = self.auth();
        let named = |header: &&str| header.to_ascii_lowercase().starts_with("authorization:");
        match headers.iter().any(named) {
            true => self.bare(method, path, headers, body),
            false => self.bare(method, path, &[headers, &[auth.as_str()]].concat(), body),
        }
    }

    /// A request with exactly these headers, and without any token of ours.
    #[track_caller]
    pub fn bare(&self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> Answer {
        let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
        if !headers.iter().any(|header| header.to_ascii_lowercase().starts_with("host:")) {
            head.push_str(&format!("host: {}\r\n", self.address));
        }
        for header in headers {
            head.push_str(&format!("{header}\r\n"));
        }
        if !body.is_empty() || ["POST", "PUT", "PATCH"].contains(&method) {
            head.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        head.push_str("\r\n");
        let mut reader = self.raw(&[head.as_bytes(), body].concat());
        read(&mut reader)
    }

    #[track_caller]
    pub fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], b"")
    }

    #[track_caller]
    pub fn json(&self, method: &str, path: &str, body: &Value) -> Answer {
        self.send(method, path, &["content-type: application/json"], body.to_string().as_bytes())
    }

    #[track_caller]
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.json("POST", path, body)
    }

    /// Opens a stream of events with the local token, once it has begun.
    pub fn listen(&self, path: &str, headers: &[&str]) -> Stream {
        self.listen_as(&self.auth(), path, headers)
    }

    /// The same, with another header instead of the local token.
    pub fn listen_as(&self, auth: &str, path: &str, headers: &[&str]) -> Stream {
        let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
        let head = format!(
            "GET {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n{auth}\r\n{headers}\r\n",
            self.address
        );
        let mut reader = self.raw(head.as_bytes());
        let head = read_head(&mut reader);
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert!(head.contains("text/event-stream"), "{head}");
        Stream(reader)
    }
}

/// Server-sent events.
pub struct Stream(BufReader<TcpStream>);

/// One of them.
#[derive(Debug, Clone)]
pub struct Sent {
    pub id: String,
    pub event: String,
    pub data: Value,
}

impl Stream {
    /// The events of a response whose head is still to come.
    pub fn of(reader: BufReader<TcpStream>) -> Stream {
        Stream(reader)
    }

    /// How long it goes on from now, up to ten seconds.
    pub fn ends(mut self) -> Duration {
        const LONG: Duration = Duration::from_secs(10);
        let began = Instant::now();
        // Less than the time between two breaths of a stream that goes on.
        self.0.get_ref().set_read_timeout(Some(LONG / 2)).unwrap();
        while began.elapsed() < LONG && self.next().is_some() {}
        began.elapsed()
    }

    /// Reads to the end of a response in chunks.
    pub fn wait_for_last_chunk(&mut self) {
        let mut line = String::new();
        while line.trim_end() != "0" {
            line.clear();
            assert!(self.0.read_line(&mut line).unwrap() > 0, "the connection ended before the response did");
        }
    }

    /// The next event; none where the stream has ended.
    pub fn next(&mut self) -> Option<Sent> {
        let mut sent = Sent { id: String::new(), event: String::new(), data: Value::Null };
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).ok()? == 0 {
                return None;
            }
            let line = line.trim_end();
            match line.split_once(": ") {
                Some(("id", id)) => sent.id = id.to_owned(),
                Some(("event", event)) => sent.event = event.to_owned(),
                Some(("data", data)) => sent.data = serde_json::from_str(data).unwrap(),
                // Sizes of chunks, and breaths.
                _ if line.is_empty() && !sent.event.is_empty() => return Some(sent),
                _ => {}
            }
        }
    }

    /// The next event of this name.
    #[track_caller]
    pub fn wait_for(&mut self, event: &str) -> Sent {
        loop {
            match self.next() {
                Some(sent) if sent.event == event => return sent,
                Some(_) => {}
                None => panic!("the stream ended before {event}"),
            }
        }
    }
}

fn read_head(reader: &mut impl BufRead) -> String {
    let mut head = String::new();
    while let Ok(1..) = reader.read_line(&mut head) {
        if head.ends_with("\r\n\r\n") {
            break;
        }
    }
    head
}

/// Reads an answer to its end: the connection closes then.
#[track_caller]
pub fn read(reader: &mut BufReader<TcpStream>) -> Answer {
    let head = read_head(reader);
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.unwrap_or_else(|| panic!("no answer: {head:?}"));
    let mut body = Vec::new();
    let length = head.to_ascii_lowercase();
    let length = length.lines().find_map(|line| line.strip_prefix("content-length: ")?.trim().parse().ok());
    match length {
        Some(length) => {
            body.resize(length, 0);
            reader.read_exact(&mut body).unwrap();
        }
        None => drop(reader.read_to_end(&mut body)),
    }
    Answer { status, head, body }
}

/// A configuration that most tests are happy with.
pub const CONFIG: &str = r#"
timezone: Europe/London
api: {rate: 100000/s}
agents:
  hello:
    shell: 'echo hello; printf "%s" "$REF"'
    env: {REF: "{{ payload.ref }}"}
    payload: {ref: none}
    schedules:
      quiet: {cron: "0 0 1 1 *"}
      often: {every: 200ms}
      pushed: {webhook: {secret: "${HOOK_SECRET}"}}
      two: {webhook: {secret: ["${HOOK_SECRET}", "${HOOK_OLD}"], github: true}, if_running: queue}
  slow:
    shell: 'echo begun; while ! [ -e go ]; do sleep 0.02; done; echo done'
    schedules:
      quiet: {cron: "0 0 1 1 *"}
      pushed: {webhook: {secret: "${HOOK_SECRET}"}}
"#;
