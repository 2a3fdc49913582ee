//! `belfry next` as its users meet it: the real binary, compared with golden files.
//!
//! `cargo xtask golden` writes the files anew.

#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

fn belfry(arguments: &[&str], input: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_belfry"))
        .args(arguments)
        .env("TZ", "Europe/Vienna")
        .env_remove("NO_COLOR")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    // A child that ends early closes its end; what it printed is what counts.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

/// What a command prints and how it ends, as one text.
fn transcript(arguments: &[&str], input: &str) -> String {
    let output = belfry(arguments, input.as_bytes());
    let shown: Vec<String> = arguments
        .iter()
        .map(
            |word| {
                if word.contains([' ', '*', '"', '@']) { format!("'{word}'") } else { (*word).to_owned() }
            },
        )
        .collect();
    let mut text = format!("$ belfry {}\n", shown.join(" "));
    text.push_str(&String::from_utf8(output.stdout).unwrap());
    let errors = String::from_utf8(output.stderr).unwrap();
    text.extend(errors.lines().map(|line| format!("! {line}\n")));
    if output.status.code() != Some(0) {
        text.push_str(&format!("exit code {}\n", output.status.code().unwrap()));
    }
    text + "\n"
}

fn golden(name: &str, found: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("BELFRY_GOLDEN").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, found).unwrap();
    }
    let expected =
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(found == expected, "{name} differs.\n--- expected\n{expected}\n--- found\n{found}");
}

fn golden_transcripts(name: &str, commands: &[&[&str]]) {
    let found: String = commands.iter().map(|arguments| transcript(arguments, "")).collect();
    golden(name, &found);
}

#[test]
fn tables_for_people() {
    golden_transcripts(
        "next-table.txt",
        &[
            &[
                "next",
                "--cron",
                "30 2 * * *",
                "--tz",
                "America/New_York",
                "--from",
                "2026-03-07T12:00:00Z",
                "-n",
                "3",
            ],
            &[
                "next",
                "--cron",
                "*/30 1 * * *",
                "--tz",
                "America/New_York",
                "--from",
                "2026-11-01T00:00:00-04:00",
            ],
            &["next", "--cron", "@weekly", "--from", "2026-03-28T12:00:00", "-n", "2"],
            &[
                "next",
                "--cron",
                "30 2 * * *",
                "--dst-gap",
                "skip",
                "--from",
                "2026-03-28T12:00:00",
                "-n",
                "1",
            ],
            &[
                "next",
                "--cron",
                "30 2 * * *",
                "--dst-fold",
                "both",
                "--from",
                "2026-10-25T00:00:00",
                "-n",
                "2",
            ],
            &[
                "next",
                "--every",
                "20m",
                "--only-between",
                "08:00-18:00",
                "--not-on",
                "sat,sun",
                "--from",
                "2026-03-06T17:30:00",
                "-n",
                "3",
            ],
            &[
                "next",
                "--every",
                "1h",
                "--anchor",
                "slot",
                "--phase",
                "15m",
                "--from",
                "2026-03-06T17:30:00",
                "-n",
                "2",
            ],
            &["next", "--every", "monthly", "--from", "2026-01-31T10:00:00", "-n", "3"],
            &["next", "--every", "daily", "--from", "2026-03-28T02:30:00", "-n", "2"],
            &[
                "next",
                "--every",
                "20m",
                "--jitter",
                "30s",
                "--name",
                "reporter/sweep",
                "--from",
                "2026-03-08T08:00:00Z",
                "-n",
                "3",
            ],
            &["next", "--at", "2027-02-03T09:00:00", "--from", "2026-01-01T00:00:00Z"],
            &["next", "--at", "2025-02-03T09:00:00Z", "--from", "2026-01-01T00:00:00Z"],
            &["next", "--after", "90s", "--from", "2026-01-01T00:00:00Z"],
        ],
    );
}

#[test]
fn documents_for_machines() {
    golden_transcripts(
        "next-json.txt",
        &[
            &[
                "next",
                "--cron",
                "30 2 * * *",
                "--tz",
                "America/New_York",
                "--from",
                "2026-03-07T12:00:00Z",
                "-n",
                "3",
                "-o",
                "json",
            ],
            &[
                "next",
                "--every",
                "1.5h",
                "--tz",
                "UTC",
                "--from",
                "2026-03-07T12:00:00.25Z",
                "-n",
                "2",
                "-o",
                "json",
            ],
            &["next", "--cron", "0 9 * * *", "--from", "2026-03-28T12:00:00Z", "-n", "2", "-o", "jsonl"],
            &["next", "--at", "2025-02-03T09:00:00Z", "--from", "2026-01-01T00:00:00Z", "-o", "json"],
            &[
                "next",
                "--every",
                "20m",
                "--jitter",
                "30s",
                "--name",
                "reporter/sweep",
                "--from",
                "2026-03-08T08:00:00Z",
                "-n",
                "2",
                "-o",
                "json",
            ],
        ],
    );
}

#[test]
fn refusals_that_teach() {
    golden_transcripts(
        "next-errors.txt",
        &[
            &["next"],
            &["next", "--cron", "0 25 * * *"],
            &["next", "--cron", "* * *"],
            &["next", "--cron", "@every 5x"],
            &["next", "--cron", "0 0 30 2 *"],
            &["next", "--cron", "0 3 * * *", "--only-between", "08:00-18:00"],
            &["next", "--every", "5"],
            &["next", "--every", "-5m"],
            &["next", "--every", "1h5x"],
            &["next", "--every", "5m", "--jitter", "5m"],
            &["next", "--every", "5m", "--phase", "1m"],
            &["next", "--every", "5m", "--tz", "europe/vienna"],
            &["next", "--every", "5m", "--from", "yesterday"],
            &["next", "--every", "5m", "--not-on", "sat,funday"],
            &["next", "--every", "5m", "--only-between", "8-9"],
            &["next", "--every", "5m", "--jitter", "-5s"],
            &["next", "--cron", "0 9 * * *", "--anchor", "slot"],
            &["next", "--at", "2027-01-01T00:00:00Z", "--phase", "xyz"],
            &["next", "--every", "daily", "--dst-gap", "skip"],
            &["next", "--every", "5m", "--name", "a/b"],
            &["next", "--at", "9999-12-31T23:59:59Z"],
            &["next", "--every", "daily", "--anchor", "slot", "--only-between", "08:00-09:00"],
            &["next", "--jsonl", "--dst-gap", "skip"],
            &["next", "--cron", "* * * * *", "-n", "0"],
            &["next", "--cron", "* * * * *", "--every", "5m"],
        ],
    );
}

#[test]
fn help_shows_examples() {
    golden_transcripts("help.txt", &[&["--help"], &["next", "--help"]]);
}

const LINES: &str = r#"{"expr":"*/5 * * * *","tz":"UTC","from":"2026-01-01T00:00:00Z","n":2}
{"expr":"30 2 * * *","tz":"America/New_York","from":"2026-03-07T12:00:00Z","n":3}
{"every":"1h30m","tz":"Asia/Kolkata","from":"2026-01-01T00:00:00Z","n":2}
{"every":"daily","tz":"America/New_York","from":"2026-03-07T02:30:00-05:00","n":2}
{"expr":"@daily","tz":"UTC","from":"2026-01-01T00:00:00Z"}
{"cron":"0 0 L * *","timezone":"UTC","from":"2026-01-01T00:00:00","n":1,"id":"mine"}

not json
[]
null
{}
{"expr":"* * * * *","every":"5m"}
{"expr":"0 25 * * *","tz":"UTC"}
{"every":"5","tz":"UTC"}
{"expr":"* * * * *","tz":"Mars/Phobos"}
{"expr":"* * * * *","from":"yesterday"}
{"expr":"* * * * *","n":0}
{"expr":"* * * * *","n":1000000000000}
{"expr":"* * * * *","n":-1}
{"expr":5}
{"expr":"0 0 29 2 *","tz":"UTC","from":"2096-03-01T00:00:00Z","n":1}
"#;

#[test]
fn a_line_in_is_a_line_out() {
    let found = transcript(&["next", "--jsonl"], LINES);
    golden("next-jsonl.txt", &found);
    assert_eq!(LINES.lines().count(), found.lines().count() - 2);
}

#[test]
fn hostile_lines_do_not_stop_the_next_one() {
    let mut input = Vec::new();
    input.extend_from_slice(b"\xff\xfe\x00\n");
    input.extend_from_slice(&b"[".repeat(100_000));
    input.push(b'\n');
    input.extend_from_slice(&b"x".repeat(10_000_000));
    input.push(b'\n');
    input.extend_from_slice(b"{\"expr\":\"\\ud800\"}\r\n");
    // The last line has no end.
    input.extend_from_slice(
        b"{\"expr\":\"@hourly\",\"tz\":\"UTC\",\"from\":\"2026-01-01T00:00:00Z\",\"n\":1}",
    );
    let output = belfry(&["next", "--jsonl"], &input);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 5, "{text}");
    assert!(lines[..4].iter().all(|line| line.starts_with("{\"error\":\"")), "{text}");
    assert_eq!(lines[4], "{\"next\":[\"2026-01-01T01:00:00+00:00\"]}");
}

#[test]
fn an_answer_comes_before_the_next_question() {
    use std::io::{BufRead, BufReader};
    let mut child = Command::new(env!("CARGO_BIN_EXE_belfry"))
        .args(["next", "--jsonl"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    for hour in 0..3 {
        writeln!(stdin, r#"{{"expr":"0 * * * *","tz":"UTC","from":"2026-01-01T0{hour}:30:00Z","n":1}}"#)
            .unwrap();
        let mut answer = String::new();
        stdout.read_line(&mut answer).unwrap();
        assert_eq!(answer, format!("{{\"next\":[\"2026-01-01T0{}:00:00+00:00\"]}}\n", hour + 1));
    }
    drop(stdin);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_belfry"))
        .args(["next", "--cron", "* * * * *", "-n", "10000", "-o", "jsonl"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
}
