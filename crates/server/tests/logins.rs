//! How long codes and logins are good, on a clock that is moved by hand.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use belfry::{Engine, ManualClock, Timestamp};
use belfry_config::{Host, load_text};
use belfry_server::{Limits, Server, Told};
use tokio::runtime::Runtime;

/// Far more than anything here takes, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
const MINUTE: Duration = Duration::from_secs(60);

struct Site {
    clock: ManualClock,
    server: Server,
    address: SocketAddr,
    _runtime: Runtime,
}

fn site() -> Site {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let nothing = |_: &str| None;
    let host = Host::new(&nothing, "UTC");
    let settings = load_text("listen: 127.0.0.1:0\n", Path::new("belfry.yaml"), &host).unwrap().settings;
    let clock = ManualClock::new("2026-01-05T12:00:00Z".parse::<Timestamp>().unwrap());
    let (reload, _) = tokio::sync::mpsc::channel(1);
    let told = Told {
        engine: Engine::builder().clock(clock.clone()).build(),
        settings,
        options: belfry::Options::default(),
        file: "belfry.yaml".into(),
        reload,
        env: |_| None,
        version: "0",
        limits: Limits::default(),
    };
    let server = runtime.block_on(Server::start(told)).unwrap();
    Site { clock, address: server.address(), server, _runtime: runtime }
}

impl Site {
    fn open(&self, method: &str, path: &str, header: &str, body: &str) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n{header}\r\n{body}",
            self.address,
            body.len()
        )
        .unwrap();
        BufReader::new(stream)
    }

    fn ask(&self, method: &str, path: &str, header: &str, body: &str) -> String {
        let mut answer = String::new();
        self.open(method, path, header, body).read_to_string(&mut answer).unwrap();
        answer
    }

    /// Uses the code of a link.
    fn log_in(&self, link: &str) -> String {
        let code = link.split_once('#').unwrap().1;
        self.ask("POST", "/login", "", &format!("{{\"code\": \"{code}\"}}"))
    }

    /// The cookie and the secret of a new login, as headers.
    fn logged_in(&self) -> [String; 2] {
        let answer = self.log_in(&self.server.login_link());
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let cookie = answer.lines().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap();
        let secret = answer.split_once("\"secret\":\"").unwrap().1.split('"').next().unwrap();
        let cookie = cookie.split(';').next().unwrap();
        [format!("cookie: {cookie}\r\n"), format!("authorization: Bearer {secret}\r\n")]
    }
}

#[test]
fn a_link_is_good_for_ten_minutes() {
    let site = site();
    let (late, used) = (site.server.login_link(), site.server.login_link());
    assert!(late.starts_with(&format!("http://{}/login#", site.address)), "{late}");
    site.clock.advance(10 * MINUTE - Duration::from_secs(1));
    assert!(site.log_in(&used).starts_with("HTTP/1.1 200"));
    site.clock.advance(Duration::from_secs(1));
    for link in [&late, &used] {
        let answer = site.log_in(link);
        assert!(answer.starts_with("HTTP/1.1 401") && answer.contains("code_wrong"), "{answer}");
    }
}

#[test]
fn a_login_is_good_for_twelve_hours_and_so_are_its_streams() {
    let site = site();
    let halves = site.logged_in();
    let streams = halves.each_ref().map(|header| {
        let mut stream = site.open("GET", "/api/v1/events", header, "");
        let mut line = String::new();
        // Its first breath: the stream has begun.
        while !line.starts_with(": ") {
            line.clear();
            assert!(stream.read_line(&mut line).unwrap() > 0);
        }
        stream
    });
    site.clock.advance(12 * 60 * MINUTE - Duration::from_secs(1));
    for header in &halves {
        assert!(site.ask("GET", "/api/v1/me", header, "").starts_with("HTTP/1.1 200"));
    }
    site.clock.advance(Duration::from_secs(1));
    let began = Instant::now();
    for header in &halves {
        let answer = site.ask("GET", "/api/v1/me", header, "");
        assert!(answer.starts_with("HTTP/1.1 401") && answer.contains("token_expired"), "{answer}");
    }
    for mut stream in streams {
        // Less than the time between two breaths of a stream that goes on.
        stream.get_ref().set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        stream.read_to_string(&mut String::new()).unwrap();
    }
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
}
