//! What `up` prints, line by line.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::support::{Site, eventually};

/// The keys of every event that an ordinary day brings, as they are: a golden file, which `cargo xtask golden` writes anew.
#[test]
fn the_keys_of_events_are_kept() {
    let site = Site::sqlite();
    site.config(
        r#"
log: {level: debug}
engine: {jitter_threshold: 100, shutdown_timeout: 100ms}
agents:
  good: {run: ["true"], schedules: {s: {every: 200ms, anchor: slot}}}
  bad: {run: ["false"], retry: {max: 1, base: 100ms}, schedules: {s: {every: 1h}}}
  never: {run: ["belfry-no-such-program"], schedules: {s: {every: 1h}}}
  lost: {run: ["true"], schedules: {s: {every: 1h, timezone: Mars/Phobos}}}
  held: {run: ["sleep", "60"], schedules: {s: {every: 1h}}}
  busy: {run: ["sleep", "1"], schedules: {s: {every: 200ms, anchor: slot}, c: {every: 300ms, anchor: slot, if_running: cancel}}}
"#,
    );
    let mut up = site.up();
    for agent in ["bad", "busy"] {
        up.wait_for(&format!("an end of {agent}"), |event| {
            event["event"] == "run_finished" && event["agent"] == agent
        });
    }
    // One run is cancelled while it waits for its agent, and another while it is running.
    eventually("cancels of runs that wait and of runs that are running", || {
        let heard = up.heard();
        let is_told = |ran: bool| {
            heard.iter().any(|event| event["event"] == "run_cancelled" && event["took_ms"].is_null() != ran)
        };
        (is_told(false) && is_told(true)).then_some(())
    });
    up.kill();
    let mut again = site.up();
    again.event("node_fenced");
    again.signal(Signal::SIGSTOP);
    let stopped_at = Instant::now();
    eventually("ticks to be missed", || (stopped_at.elapsed() > Duration::from_secs(3)).then_some(()));
    again.signal(Signal::SIGCONT);
    again.event("tick_missed");
    site.raw_config("agents: [");
    again.event("config_rejected");
    eventually("what was taken over", || {
        again
            .heard()
            .iter()
            .any(|event| event["event"] == "run_started" && event["agent"] == "held")
            .then_some(())
    });
    again.signal(Signal::SIGTERM);
    assert_eq!(again.ends().code(), Some(6));
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    // Whether a run that the killed node had started is cancelled before its next attempt is a matter of milliseconds.
    let by_chance = |event: &&serde_json::Value| {
        event["event"] == "run_cancelled" && event["took_ms"].is_null() && !event["attempt"].is_null()
    };
    for event in up.heard().iter().chain(&again.seen).filter(|event| !by_chance(event)) {
        let keys: Vec<&str> = event.as_object().unwrap().keys().map(String::as_str).collect();
        let name = event["event"].as_str().unwrap().to_owned();
        found.entry(name).or_default().insert(keys.join(" "));
    }
    let found: String = found
        .iter()
        .map(|(name, shapes)| {
            let shapes: String = shapes.iter().map(|keys| format!("  {keys}\n")).collect();
            format!("{name}\n{shapes}")
        })
        .collect();
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/events.txt");
    if std::env::var_os("BELFRY_GOLDEN").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap_or_default(), found);
}

/// A disk that is full, and somebody who no longer reads.
#[test]
fn a_log_that_cannot_be_written_stops_no_work() {
    for is_full in [true, false] {
        let site = Site::sqlite();
        site.config("agents: {a: {shell: 'echo run >> side.log', schedules: {s: {every: 200ms}}}}");
        let mut command = site.command();
        command.args(["up", "--log-format", "json"]).stderr(Stdio::piped());
        match is_full {
            true => command.stdout(std::fs::File::create("/dev/full").unwrap()),
            false => command.stdout(Stdio::piped()),
        };
        let mut child = command.spawn().unwrap();
        drop(child.stdout.take());
        let ran = site.side().len();
        site.wait_for_side("runs without a log", |lines| lines.len() >= ran + 5);
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(errors.matches("a line cannot be written, and the work goes on").count(), 1, "{errors}");
    }
}

/// A reader that is there and does not read, as a terminal after Ctrl-S. It is also where errors go.
#[test]
fn a_log_that_nobody_reads_holds_up_neither_work_nor_signals() {
    let site = Site::sqlite();
    site.config("agents: {a: {shell: 'echo run >> side.log', schedules: {s: {every: 100ms}}}}");
    let (unread, write) = std::io::pipe().unwrap();
    // What a pipe holds is written full.
    let mut full = write.try_clone().unwrap();
    let filler = std::thread::spawn(move || {
        use std::io::Write;
        // It waits until nobody holds the other end.
        let _ = full.write_all(&vec![b' '; 4 << 20]);
    });
    let mut command = site.command();
    command.args(["up", "--log-format", "json"]).stdout(write.try_clone().unwrap()).stderr(write);
    let mut child = command.spawn().unwrap();
    drop(command);
    site.wait_for_side("runs without a reader", |lines| lines.len() >= 20);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    drop(unread);
    filler.join().unwrap();
}
