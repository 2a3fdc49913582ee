//! Text from outside on a terminal: whatever it holds, none of it is obeyed, in any command.

#![allow(clippy::unwrap_used)]

mod house;

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use belfry_core::display::is_unsafe;
use belfry_core::retry::Verdict;
use belfry_core::{NodeId, Reason, RunState};
use belfry_store::{Finish, Node, OutputChunk, Store, Stream};
use belfry_time::{SignedDuration, Timestamp};
use house::{House, claimed, whole};
use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use uuid::Uuid;

/// Far more than anything here takes, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// A clipboard (OSC 52), a colour of its own and hidden text (CSI), the eight-bit forms of the same, a device string, a
/// bell, a return, a backspace, a line separator, text that runs the other way, a space of no width.
const POISON: &str = "a\x1b]52;c;cHduZWQ=\x07b\x1b[35mc\x1b[8md\x1b[2Je\u{202e}f\rg\u{9b}31mh\u{9d}0;t\u{9c}i\x08j\u{2028}k\x1bP1$qm\x1b\\l\u{200b}m\u{2066}n\x7f";

/// What a command writes to a terminal.
fn on_a_terminal(house: &House, arguments: &[&str]) -> String {
    let size = Winsize { ws_row: 50, ws_col: 140, ws_xpixel: 0, ws_ypixel: 0 };
    let pty = openpty(Some(&size), None).unwrap();
    let mut command = house.command(arguments);
    command.env("TERM", "xterm-256color").env_remove("CI");
    let (out, err) = (Stdio::from(pty.slave.try_clone().unwrap()), Stdio::from(pty.slave));
    let mut child = command.stdout(out).stderr(err).spawn().unwrap();
    // Our ends of it must be gone, or the end is never seen.
    drop(command);
    let (mut seen, mut master, mut piece) = (Vec::new(), File::from(pty.master), [0; 4096]);
    // At the end a terminal fails to be read.
    while let Ok(read @ 1..) = master.read(&mut piece) {
        seen.extend_from_slice(&piece[..read]);
    }
    child.wait().unwrap();
    // A terminal writes a return before each line end.
    String::from_utf8(seen).unwrap().replace("\r\n", "\n")
}

/// Takes out our own colours, which are plain ones; `all` also those of a run's output.
fn without_colours(text: &str, all: bool) -> String {
    let mut rest = text;
    let mut plain = String::new();
    while let Some(at) = rest.find("\x1b[") {
        plain.push_str(&rest[..at]);
        let sequence = &rest[at + 2..];
        let end = sequence.find(|c: char| !c.is_ascii_digit() && c != ';').unwrap_or(sequence.len());
        let is_colour =
            sequence[end..].starts_with('m') && (all || !["35", "8", "31m"].contains(&&sequence[..end]));
        if is_colour {
            rest = &sequence[end + 1..];
        } else {
            plain.push('\x1b');
            rest = sequence;
        }
    }
    plain + rest
}

#[track_caller]
fn assert_tame(shown: &str, arguments: &[&str]) {
    let plain = without_colours(shown, arguments[0] == "logs");
    let wild = plain.chars().find(|c| is_unsafe(*c) && !"\n\t".contains(*c));
    assert_eq!(wild, None, "{arguments:?}: {plain:?}");
    assert!(!plain.contains("cHduZWQ=\x07"), "{arguments:?}: {plain:?}");
}

#[test]
fn text_from_outside_does_nothing_to_a_terminal_in_any_command() {
    let house = House::after_an_hour();
    let run = house.block_on(async {
        let store = house.store().await;
        let now = whole(Timestamp::now());
        let grid = store.schedule("hello/grid").await.unwrap().unwrap();
        store.pause(now, grid.id, Some(POISON), None).await.unwrap();
        let node = Node {
            id: NodeId(Uuid::now_v7()),
            host: POISON.into(),
            pid: 1,
            labels: Vec::new(),
            started_at: now,
            lease_until: now + SignedDuration::from_hours(1),
            fenced: false,
            draining: false,
            last_seen_at: now,
            max_concurrent: None,
            process: Default::default(),
        };
        store.join(&node, None).await.unwrap();
        let (_, run) = claimed(&store).await;
        let piece = |seq, stream, text: &str| OutputChunk {
            seq,
            attempt: 1,
            stream,
            bytes: text.as_bytes().to_vec(),
        };
        let pieces =
            [piece(1, Stream::Out, POISON), piece(2, Stream::Err, POISON), piece(3, Stream::Note, POISON)];
        assert!(store.append_output(run.run, run.epoch, &pieces).await.unwrap());
        let finish = Finish {
            run: run.run,
            epoch: run.epoch,
            verdict: Verdict::End { state: RunState::Failed, reason: Some(Reason::ExitCode) },
            failed: true,
            exit_code: Some(1),
            error: Some(POISON.into()),
            summary: Some(POISON.into()),
            usage: None,
            arm: None,
        };
        store.finish(now, &[finish]).await.unwrap();
        run.run.to_string()
    });
    let poisoned = serde_json::json!({ "text": POISON }).to_string();
    let (prompt, payload) = (format!("prompt={POISON}"), format!("payload={poisoned}"));
    let changes: [&[&str]; 5] = [
        &["add", "hello/odd", "every=5m", &prompt, &payload],
        &["add", "hello/talk", "chat={}"],
        &["send", "hello/talk", "k\u{202e}\u{200b}y", POISON],
        &["token", "create", "--scope", "read", "--label", POISON],
        &["pause", "hello/odd", "--reason", POISON],
    ];
    for change in changes {
        assert_tame(&on_a_terminal(&house, change), change);
    }
    let shown = on_a_terminal(&house, &["why", "hello/grid"]);
    assert!(shown.contains("paused") && shown.contains("\x1b["), "with our own colours: {shown:?}");
    let lines = "quiet\nFORGED  yes\r\nFORGED: active";
    assert_eq!(house.belfry(&["pause", "hello/often", "--reason", lines]).code, 0);
    for arguments in [["why", "hello/often"], ["show", "hello/often"]] {
        let shown = without_colours(&on_a_terminal(&house, &arguments), true);
        let is_forged = shown.lines().any(|line| line.trim_start().starts_with("FORGED"));
        assert!(shown.contains("quiet FORGED") && !is_forged, "{arguments:?}: {shown}");
    }
    let reading: [&[&str]; 26] = [
        &["ls"],
        &["ls", "-o", "json"],
        &["ls", "-o", "jsonl"],
        &["show", "hello/grid"],
        &["show", "hello/odd"],
        &["show", "hello/odd", "-o", "json"],
        &["show", "hello/often"],
        &["show", "hello/often", "-o", "json"],
        &["why", "hello/grid"],
        &["why", "hello/grid", "-o", "json"],
        &["why", "hello/odd"],
        &["runs"],
        &["runs", "-o", "json"],
        &["logs", &run],
        &["logs", &run, "-o", "jsonl"],
        &["sessions"],
        &["sessions", "-o", "json"],
        &["lanes"],
        &["nodes"],
        &["nodes", "-o", "json"],
        &["breaker"],
        &["doctor"],
        &["token", "ls"],
        &["token", "ls", "-o", "json"],
        &["export"],
        &["next", "hello/odd"],
    ];
    for arguments in reading {
        let shown = on_a_terminal(&house, arguments);
        assert!(shown.len() > 10, "{arguments:?}: {shown:?}");
        assert_tame(&shown, arguments);
    }
    let missing = format!("hello/{POISON}");
    let flag = format!("--{POISON}");
    let wrong: [&[&str]; 10] = [
        &["show", &missing],
        &["why", "hello/grid", "--at", POISON],
        &["next", "--cron", POISON],
        &["logs", POISON],
        &["ls", POISON],
        &["add", "hello/new", "every=5m", &format!("timezone={POISON}")],
        // What is wrong with the arguments themselves.
        &[POISON],
        &["ls", &flag],
        &["ls", "-o", POISON],
        &["up", "--listen", POISON],
    ];
    for arguments in wrong {
        assert_tame(&on_a_terminal(&house, arguments), arguments);
    }
}

#[test]
fn a_file_does_nothing_to_a_terminal() {
    let right = house::CONFIG.replace("      bad: {cron: \"0 9 * * *\", timezone: Mars/Phobos}\n", "");
    let house = House::with_config(&right);
    assert_eq!(house.belfry(&["apply"]).code, 0);
    // YAML has words for such characters.
    let written = "\\e]52;c;cHduZWQ=\\a\\e[35m\\u202e\\x9b31m\\r\\b\\u2028\u{202e}\u{200b}";
    let odd = right.replace("Write the daily report.", &format!("Write {written}."));
    for (text, commands) in [
        (odd.clone(), [&["diff"][..], &["check"], &["apply"]]),
        (
            odd.replace("max_concurrent: 2", &format!("lane: \"x{written}\"")),
            [&["check"], &["diff"], &["apply"]],
        ),
        (
            odd.replace("max_concurrent: 2", &format!("\"y{written}\": 2")),
            [&["check"], &["diff"], &["apply"]],
        ),
        (odd.replace("Europe/London", &format!("\"{written}\"")), [&["check"], &["diff"], &["apply"]]),
        (format!("{odd}\n\u{9b}31m\u{202e}: [\n"), [&["check"], &["diff"], &["apply"]]),
    ] {
        std::fs::write(house.path("belfry.yaml"), text).unwrap();
        for arguments in commands {
            assert_tame(&on_a_terminal(&house, arguments), arguments);
        }
    }
}

#[test]
fn log_lines_hold_no_characters_that_turn_text_around() {
    let house = House::after_an_hour();
    assert_eq!(house.belfry(&["add", "hello/talk", "chat={}"]).code, 0);
    for format in ["text", "json"] {
        let log = house.path(format);
        let mut up = house
            .command(&["up", "--log-format", format])
            .stdout(File::create(&log).unwrap())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let seen = |word: &str| {
            let began = Instant::now();
            loop {
                let text = std::fs::read_to_string(&log).unwrap();
                if text.contains(word) {
                    return text;
                }
                assert!(began.elapsed() < PATIENCE, "no {word}: {text}");
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        seen(if format == "json" { "node_started" } else { "API at" });
        assert_eq!(house.belfry(&["send", "hello/talk", "k\u{202e}\u{2066}y", "hi"]).code, 0);
        let text = seen(if format == "json" { "\"session\":\"k\\u202e\\u2066y\"" } else { "hello/talk:k y" });
        let pid = Pid::from_raw(i32::try_from(up.id()).unwrap());
        kill(pid, Signal::SIGTERM).unwrap();
        up.wait().unwrap();
        assert!(!text.chars().any(|c| is_unsafe(c) && c != '\n'), "{text:?}");
    }
}

/// A command that has a terminal as its controlling terminal, in a session of its own; and the other end of that terminal.
fn with_a_terminal(house: &House, arguments: &[&str]) -> (Child, File) {
    let pty = openpty(None, None).unwrap();
    let belfry = house.command(arguments);
    let mut command = Command::new("setsid");
    command.arg("--ctty").arg(belfry.get_program()).args(belfry.get_args()).current_dir(house.folder.path());
    command.envs(belfry.get_envs().filter_map(|(name, value)| Some((name, value?)))).env("LC_ALL", "C");
    let slave = || Stdio::from(pty.slave.try_clone().unwrap());
    let child = command.stdin(slave()).stdout(slave()).stderr(slave()).spawn().unwrap();
    (child, File::from(pty.master))
}

fn text_in(house: &House, name: &str) -> String {
    let began = Instant::now();
    loop {
        match std::fs::read_to_string(house.path(name)) {
            Ok(text) if text.ends_with('\n') => return text,
            _ => assert!(began.elapsed() < PATIENCE, "no {name}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn wait_until_gone(house: &House, name: &str) {
    let stat = format!("/proc/{}/stat", text_in(house, name).trim());
    let began = Instant::now();
    while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
        assert!(began.elapsed() < PATIENCE, "{name} still lives");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_run_cannot_reach_the_terminal_and_is_ended_with_its_family() {
    let config = "agents: {t: {shell: exec sh family.sh, retry: {max: 0}, schedules: {s: {every: 1s}}}}\n";
    let script =
        "(echo owned > /dev/tty) 2> refused\nsleep 1000 &\necho $! > child\necho $$ > leader\nwait\n";
    for arguments in [&["run", "t/s"][..], &["up"]] {
        let house = House::with_config(config);
        std::fs::write(house.path("family.sh"), script).unwrap();
        let (mut belfry, mut terminal) = with_a_terminal(&house, arguments);
        text_in(&house, "leader");
        let refused = text_in(&house, "refused");
        assert!(refused.contains("No such device or address"), "{arguments:?}: {refused}");
        if arguments[0] == "run" {
            terminal.write_all(b"\x03").unwrap();
            assert_eq!(belfry.wait().unwrap().signal(), None, "a Ctrl-C is answered, not obeyed blindly");
        } else {
            belfry.kill().unwrap();
            belfry.wait().unwrap();
        }
        wait_until_gone(&house, "leader");
        wait_until_gone(&house, "child");
    }
}
