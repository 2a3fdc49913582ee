//! A system that is short of something: whoever asks is told. A process of its own, because it leaves itself no descriptors.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use belfry::event::Name;
use belfry::{AgentBuilder, Engine, RunRequest, When};
use belfry_core::RunState;
use belfry_core::work::Action;
use belfry_server::Limits;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::Value;
use site::{PATIENCE, Site};

mod site;

/// The status and the body of an answer, over a connection that stays open.
fn get(connection: &mut BufReader<TcpStream>, path: &str) -> (u16, Value) {
    let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    connection.get_mut().write_all(head.as_bytes()).unwrap();
    let (mut status, mut length) = (0, 0);
    for line in connection.lines().map_while(Result::ok).take_while(|line| !line.is_empty()) {
        if let Some(rest) = line.strip_prefix("HTTP/1.1 ") {
            status = rest[..3].parse().unwrap();
        }
        if let Some(rest) = line.strip_prefix("content-length: ") {
            length = rest.parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    connection.read_exact(&mut body).unwrap();
    (status, serde_json::from_slice(&body).unwrap())
}

#[test]
fn a_run_that_cannot_start_for_now_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let agent = AgentBuilder::new("a")
        .schedule("now", When::Webhook(serde_json::json!({"secret": "none"})))
        .define(|agent| agent.work.action = Action::Shell("true".into()));
    let engine = Engine::builder().agents([agent.build()]).state_dir(folder.path()).build();
    let site = Site::start(engine, "api: {rate: 1000000/s, open: true}", Limits::default());
    site.runtime.block_on(site.engine.start()).unwrap();
    let mut events = site.engine.events();
    let mut told = |name: Name| {
        let event = async {
            loop {
                let event = events.recv().await.unwrap();
                if event.event == name {
                    return event;
                }
            }
        };
        site.runtime.block_on(async { tokio::time::timeout(PATIENCE, event).await.unwrap() })
    };
    let mut connection = BufReader::new(site.connect());
    assert_eq!(get(&mut connection, "/readyz").0, 200);

    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 1, hard).unwrap();
    let run = site.runtime.block_on(site.engine.trigger("a/now", RunRequest::default())).unwrap().run;
    let delayed = told(Name::RunDelayed);
    assert_eq!((delayed.run_id, delayed.attempt), (Some(run), Some(1)));
    let detail = delayed.detail.clone().unwrap();
    assert!(detail.contains("Too many open files"), "{detail}");
    let (status, ready) = get(&mut connection, "/readyz");
    assert_eq!(status, 503, "{ready}");
    let starts = ready["checks"].as_array().unwrap().iter().find(|check| check["check"] == "starts").unwrap();
    assert_eq!(starts["ok"], false, "{ready}");
    assert!(!ready.to_string().contains(folder.path().to_str().unwrap()), "anybody may ask: {ready}");
    let (_, why) = get(&mut connection, "/api/v1/schedules/a/now/why");
    assert!(why["words"].as_str().unwrap().contains(&detail), "{why}");

    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    let finished = told(Name::RunFinished);
    assert_eq!((finished.run_id, finished.state), (Some(run), Some(RunState::Completed.as_str())));
    let (status, ready) = get(&mut connection, "/readyz");
    assert_eq!(status, 200, "{ready}");
}
