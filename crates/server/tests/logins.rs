//! How long codes and logins are good, on a clock that is moved by hand.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use belfry::{Engine, ManualClock, Timestamp};
use belfry_server::Limits;
use site::Site;

mod site;

const MINUTE: Duration = Duration::from_secs(60);

fn site() -> (Site, ManualClock) {
    let clock = ManualClock::new("2026-01-05T12:00:00Z".parse::<Timestamp>().unwrap());
    (Site::start(Engine::builder().clock(clock.clone()).build(), "", Limits::default()), clock)
}

fn open(site: &Site, method: &str, path: &str, header: &str, body: &str) -> BufReader<TcpStream> {
    let kind = format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len());
    let mut stream = site.ask(method, path, &format!("{kind}{header}"));
    stream.write_all(body.as_bytes()).unwrap();
    BufReader::new(stream)
}

fn ask(site: &Site, method: &str, path: &str, header: &str, body: &str) -> String {
    let mut answer = String::new();
    open(site, method, path, header, body).read_to_string(&mut answer).unwrap();
    answer
}

/// Uses the code of a link.
fn log_in(site: &Site, link: &str) -> String {
    let code = link.split_once('#').unwrap().1;
    ask(site, "POST", "/login", "", &format!("{{\"code\": \"{code}\"}}"))
}

/// The cookie and the secret of a new login, as headers.
fn logged_in(site: &Site) -> [String; 2] {
    let answer = log_in(site, &site.server.login_link());
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let cookie = answer.lines().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap();
    let secret = answer.split_once("\"secret\":\"").unwrap().1.split('"').next().unwrap();
    let cookie = cookie.split(';').next().unwrap();
    [format!("cookie: {cookie}\r\n"), format!("authorization: Bearer {secret}\r\n")]
}

#[test]
fn a_link_is_good_for_ten_minutes() {
    let (site, clock) = site();
    let (late, used) = (site.server.login_link(), site.server.login_link());
    assert!(late.starts_with(&format!("http://{}/login#", site.address)), "{late}");
    clock.advance(10 * MINUTE - Duration::from_secs(1));
    assert!(log_in(&site, &used).starts_with("HTTP/1.1 200"));
    clock.advance(Duration::from_secs(1));
    for link in [&late, &used] {
        let answer = log_in(&site, link);
        assert!(answer.starts_with("HTTP/1.1 401") && answer.contains("code_wrong"), "{answer}");
    }
}

#[test]
fn a_cookie_of_the_same_name_from_another_server_locks_nobody_out() {
    let (site, _) = site();
    let [cookie, _] = logged_in(&site);
    let other = format!("belfry_{}=other", site.address.port());
    let pair = cookie.trim_start_matches("cookie: ").trim_end();
    let many = vec![other.as_str(); 700].join("; ");
    let forty = vec![other.as_str(); 40].join("; ");
    for (headers, status) in [
        (format!("cookie: {forty}; {pair}\r\n"), 200),
        (format!("cookie: {other}; {pair}\r\n"), 200),
        (format!("cookie: {pair}; {other}\r\n"), 200),
        (format!("cookie: {other}\r\n{cookie}"), 200),
        (format!("cookie: {other}; {other}\r\n"), 401),
        (format!("cookie: {many}; {pair}\r\n"), 401),
    ] {
        let answer = ask(&site, "GET", "/api/v1/me", &headers, "");
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{headers}: {answer}");
    }
}

#[test]
fn strangers_behind_an_address_take_nothing_from_a_token_behind_it() {
    let site = Site::start(Engine::builder().build(), "api: {rate: 5/h}", Limits::default());
    let [_, secret] = logged_in(&site);
    let status = |header: &str| ask(&site, "GET", "/api/v1/agents", header, "")[9..12].to_owned();
    let strangers: Vec<String> = (0..5).map(|_| status("")).collect();
    assert_eq!(strangers, ["401", "401", "401", "401", "429"], "the login was the first request");
    let known: Vec<String> = (0..6).map(|_| status(&secret)).collect();
    assert_eq!(known, ["200", "200", "200", "200", "200", "429"]);
    assert_eq!(status("authorization: Bearer bf_0_0\r\n"), "429", "a wrong token counts for its address");
}

#[test]
fn a_login_is_good_for_twelve_hours_and_so_are_its_streams() {
    let (site, clock) = site();
    let halves = logged_in(&site);
    let streams = halves.each_ref().map(|header| {
        let mut stream = open(&site, "GET", "/api/v1/events", header, "");
        let mut line = String::new();
        // Its first breath: the stream has begun.
        while !line.starts_with(": ") {
            line.clear();
            assert!(stream.read_line(&mut line).unwrap() > 0);
        }
        stream
    });
    clock.advance(12 * 60 * MINUTE - Duration::from_secs(1));
    for header in &halves {
        assert!(ask(&site, "GET", "/api/v1/me", header, "").starts_with("HTTP/1.1 200"));
    }
    clock.advance(Duration::from_secs(1));
    let began = Instant::now();
    for header in &halves {
        let answer = ask(&site, "GET", "/api/v1/me", header, "");
        assert!(answer.starts_with("HTTP/1.1 401") && answer.contains("token_expired"), "{answer}");
    }
    for mut stream in streams {
        // Less than the time between two breaths of a stream that goes on.
        stream.get_ref().set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        stream.read_to_string(&mut String::new()).unwrap();
    }
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
}
