//! How it starts: alone on its file, and with what is wrong with its configuration said.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::process::{Output, Stdio};

use nix::sys::signal::Signal;

use crate::support::{Site, eventually};

const BEATS: &str = r#"
agents:
  a:
    shell: 'echo "run $BELFRY_SCHEDULE $$" >> side.log'
    schedules:
      s: {every: 200ms, anchor: slot}
"#;

#[test]
fn a_second_server_on_the_file_is_refused_and_a_third_follows_a_killed_one() {
    let site = Site::sqlite();
    site.config(BEATS);
    let mut first = site.up();
    first.event("run_finished");
    let refused = site.belfry(&["up"]);
    assert_eq!(refused.status.code(), Some(2));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains(&first.pid().to_string()), "{said}");
    first.heard();
    first.event("run_finished");
    first.kill();
    let mut next = site.up();
    next.event("run_finished");
    next.stop();
}

/// The exit code and what was said.
fn refused(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(!said.contains("panicked"), "{said}");
    said
}

#[test]
fn a_file_that_is_wrong_is_refused_with_its_place() {
    for (text, line, words) in [
        ("agents:\n  a:\n\trun: [true]\n", 3, "tab"),
        ("agents:\n  a:\n    run: [true]\n    scedules: {}\n", 4, "schedules"),
        (
            "agents:\n  a:\n    run: [true]\n    schedules:\n      s: {cron: '* * * * *', every: 5m}\n",
            5,
            "every",
        ),
        ("agents:\n  a:\n    run: [true]\n    schedules:\n      s: {}\n", 5, "every"),
        ("agents:\n  a: {run: []}\n", 2, "run"),
        ("agents:\n  a:\n    run: [true]\n    env: {'A=B': x}\n", 4, "environment variable"),
    ] {
        let site = Site::sqlite();
        site.raw_config(text);
        let said = refused(&site.belfry(&["up", "--log-format", "json"]));
        assert!(said.contains(&format!("belfry.yaml:{line}")), "{said}");
        assert!(said.contains('^'), "{said}");
        assert!(said.contains(words), "{words}: {said}");
        assert!(said.len() < 4000, "{} bytes", said.len());
        assert!(!site.path(".belfry").exists(), "nothing was made");
    }
}

#[test]
fn what_is_no_file_is_refused() {
    let site = Site::sqlite();
    std::fs::create_dir(site.path("folder")).unwrap();
    nix::unistd::mkfifo(&site.path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::os::unix::fs::symlink("loop", site.path("loop")).unwrap();
    site.file("latin1.yaml", "");
    std::fs::write(site.path("latin1.yaml"), b"timezone: \"Europe/Z\xfcrich\"\n").unwrap();
    for name in ["missing.yaml", "folder", "pipe", "loop", "latin1.yaml"] {
        let said = refused(&site.belfry(&["-c", name, "up"]));
        assert!(said.contains(name), "{said}");
    }
    let said = refused(&site.belfry(&["up"]));
    assert!(said.contains("belfry init"), "{said}");
}

const AGENTS: &str = r#"
agents:
  good:
    shell: 'echo "run $BELFRY_SCHEDULE $$" >> side.log'
    schedules:
      lost: {every: 100ms, timezone: Mars/Phobos}
      never: {cron: "0 0 31 2 *"}
      fine: {every: 200ms, anchor: slot}
  missing: {run: ["belfry-no-such-program"], schedules: {s: {every: 1h}}}
  folder: {run: ["/tmp"], schedules: {s: {every: 1h}}}
  plain: {run: ["./plain.txt"], schedules: {s: {every: 1h}}}
  place: {run: ["true"], cwd: ./nowhere, schedules: {s: {every: 1h}}}
  secret: {run: ["true"], env: {TOKEN: "${TEST_NOT_SET}"}, schedules: {s: {every: 1h}}}
"#;

#[test]
fn a_bad_schedule_and_a_bad_command_disturb_no_other() {
    for site in Site::each() {
        site.file("plain.txt", "not a program");
        // A hundred thousand bytes of it are not an expression either.
        let long = "1,".repeat(50_000);
        site.config(&format!(
            "{AGENTS}\n  long: {{run: [\"true\"], schedules: {{s: {{cron: \"{long}\"}}}}}}\n"
        ));
        let mut up = site.up();
        for _ in 0..3 {
            up.event_of("run_started", "fine");
        }
        let failed = |agent: &str| {
            eventually(agent, || {
                let run = site.runs(&format!("{agent}/s")).pop()?;
                (run["state"] == "failed").then_some(run)
            })
        };
        for (agent, words) in [
            ("missing", "belfry-no-such-program"),
            ("folder", "/tmp"),
            ("plain", "plain.txt"),
            ("place", "nowhere"),
            ("secret", "TEST_NOT_SET"),
        ] {
            let run = failed(agent);
            assert_eq!(run["reason"], "spawn_failed", "{run}");
            assert!(run["error"].as_str().unwrap().contains(words), "{run}");
            assert_eq!(run["attempt"], 1, "{run}");
        }
        for (name, words) in [("good/lost", "Mars/Phobos"), ("good/never", "31"), ("long/s", "1024")] {
            let shown = site.json(&["show", name]);
            assert_eq!(shown["status"], "invalid", "{shown}");
            assert!(shown["reason"].as_str().unwrap().contains(words), "{shown}");
            assert!(site.runs(name).is_empty());
        }
        let said = up.errors();
        assert!(said.contains("Mars/Phobos") && said.len() < 4000, "{} bytes: {said}", said.len());
        up.event_of("run_started", "fine");
        up.signal(Signal::SIGTERM);
        assert_eq!(up.ends().code(), Some(0));
    }
}

#[test]
fn a_login_link_is_printed_on_a_terminal_and_nowhere_else() {
    let site = Site::sqlite();
    site.config(BEATS);
    let up = |out: Stdio, err: Stdio| {
        let mut command = site.command();
        command.args(["up", "--log-format", "text"]).stdout(out).stderr(err).spawn().unwrap()
    };
    // All that is said before its first run.
    let greeting = |from: &mut dyn Read| -> Vec<String> {
        let lines = BufReader::new(from).lines().map(Result::unwrap);
        lines.take_while(|line| !line.contains("a/s ")).collect()
    };
    let (mut terminal, other) = {
        let pair = nix::pty::openpty(None, None).unwrap();
        (File::from(pair.master), pair.slave)
    };
    let mut child = up(other.try_clone().unwrap().into(), other.into());
    let said = greeting(&mut terminal);
    let link = said.iter().find_map(|line| line.trim().split_once("/login#"));
    let (place, code) = link.unwrap_or_else(|| panic!("{said:?}"));
    assert!(place.starts_with("http://127.0.0.1:") && code.len() == 40, "{link:?}");
    child.kill().unwrap();
    child.wait().unwrap();

    let mut child = up(Stdio::piped(), Stdio::null());
    let said = greeting(child.stdout.as_mut().unwrap());
    assert!(said.iter().any(|line| line.starts_with("API at http://")), "{said:?}");
    assert!(!said.iter().any(|line| line.contains("login")), "{said:?}");
    child.kill().unwrap();
    child.wait().unwrap();
}
