//! Descriptors: connections take none that runs need, and children get neither the node's limit nor what it inherited.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::Value;

use crate::support::{Site, Up, eventually};

/// Where a server listens.
fn address(site: &Site) -> String {
    let path = site.state_file("server.json");
    let told = eventually("server.json", || std::fs::read(&path).ok());
    let told: Value = serde_json::from_slice(&told).unwrap();
    told["url"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned()
}

/// The memory of a process, in bytes.
fn memory(up: &Up) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", up.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() << 10
}

fn health(address: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(stream, "GET /healthz HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn idle_connections_stop_no_run_and_cost_little() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    assert!(hard >= 2000, "this test needs 2000 descriptors, and may have {hard}");
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    for site in Site::each() {
        site.config(
            r#"
agents:
  a:
    shell: "true"
    max_concurrent: none
    retry: {max: 0}
    schedules:
      s: {every: 100ms, anchor: slot, if_running: allow}
"#,
        );
        let mut up = site.up_after("ulimit -n 1024");
        for _ in 0..5 {
            up.event("run_finished");
        }
        let address = address(&site);
        let before = memory(&up);
        let idle: Vec<TcpStream> = (0..1100).map(|_| TcpStream::connect(&address).unwrap()).collect();
        // Somebody who asks is answered, though all places are taken.
        assert!(health(&address).starts_with("HTTP/1.1 200"));
        up.heard();
        let open = std::fs::read_dir(format!("/proc/{}/fd", up.pid())).unwrap().count();
        assert!(open < 700, "{open} descriptors are open");
        for _ in 0..20 {
            let ended = up.event("run_finished");
            assert_eq!(ended["state"], "completed", "{ended}");
        }
        drop(idle);
        eventually("the connections to be gone", || {
            let open = std::fs::read_dir(format!("/proc/{}/fd", up.pid())).unwrap().count();
            (open < 100).then_some(())
        });
        let after = memory(&up);
        assert!(after < before + (64 << 20), "{before} bytes before, {after} after");
        up.stop();
        let failed =
            up.seen.iter().filter(|event| event["event"] == "run_finished" && event["state"] != "completed");
        assert_eq!(failed.count(), 0);
    }
}

#[test]
fn more_runs_than_descriptors_wait_and_none_fails() {
    let site = Site::sqlite();
    site.config(
        r#"
lanes: {cron: 500}
agents:
  a:
    shell: 'echo started >> side.log; while [ ! -e go ]; do sleep 0.1; done'
    max_concurrent: none
    retry: {max: 0}
    schedules:
      s: {every: 1h, if_running: allow}
"#,
    );
    let mut up = site.up_after("ulimit -n 128");
    address(&site);
    for _ in 0..30 {
        assert!(site.belfry(&["run", "a/s"]).status.success());
    }
    // At 128 descriptors there is room for no run beside the node and the connections but one; the rest waits for its end.
    site.wait_for_line("started");
    site.file("go", "");
    for _ in 0..31 {
        let ended = up.event("run_finished");
        assert_eq!(ended["state"], "completed", "{ended}");
    }
    up.stop();
}

#[test]
fn a_child_gets_the_limit_and_the_umask_that_the_node_was_started_with() {
    let site = Site::sqlite();
    site.config(
        r#"
agents:
  limits:
    shell: 'echo "limits $(ulimit -Sn) $(ulimit -Hn) $(umask)" >> side.log'
    schedules: {s: {every: 1h}}
  open:
    run: [ls, /proc/self/fd]
    schedules: {s: {after: 99h}}
"#,
    );
    let mut up =
        site.up_after("ulimit -n 2000; ulimit -Sn 300; umask 027; exec 7</dev/null; exec 9>/dev/null");
    assert_eq!(site.wait_for_line("limits")[1..], ["300", "2000", "0027"]);
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", up.pid())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert_eq!(line.split_whitespace().nth(3), Some("2000"), "the node may open more: {line}");
    // The fourth is the folder that `ls` reads.
    let listed = site.belfry(&["run", "open/s", "--follow"]);
    assert_eq!(String::from_utf8_lossy(&listed.stdout), "0\n1\n2\n3\n", "{listed:?}");
    up.stop();
    // A run without a server is no different.
    let mut command = std::process::Command::new("sh");
    command.arg("-c").arg("umask 027; exec 7</dev/null; exec \"$0\" run limits/s --wait");
    command.arg(env!("CARGO_BIN_EXE_belfry")).current_dir(site.path(""));
    assert!(command.status().unwrap().success());
    assert_eq!(site.side().last().unwrap()[3], "0027");
}
