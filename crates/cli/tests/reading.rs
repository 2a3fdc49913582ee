//! The commands that read a store, with the real binary, on a store in which an hour has passed.
//!
//! `cargo xtask golden` writes the golden files anew.

#![allow(clippy::unwrap_used)]

mod house;

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

use belfry_core::RunState;
use belfry_core::retry::Verdict;
use belfry_store::{Finish, Finished, OutputChunk, Store, Stream};
use belfry_time::Timestamp;
use house::{House, claimed, golden, masked, whole};
use serde_json::Value;

fn names(list: &Value) -> Vec<String> {
    let of =
        |item: &Value| format!("{}/{}", item["agent"].as_str().unwrap(), item["schedule"].as_str().unwrap());
    list["items"].as_array().unwrap().iter().map(of).collect()
}

#[test]
fn ls_shows_what_comes_next_and_what_does_not_run_at_the_end() {
    let house = House::after_an_hour();
    for width in ["80", "140"] {
        let output = house.command(&["ls"]).env("COLUMNS", width).output().unwrap();
        let said = house::Said::of(output);
        assert_eq!(said.code, 0, "{}", said.err);
        let lines: Vec<&str> = said.out.lines().collect();
        let header: Vec<&str> = lines[0].split_whitespace().collect();
        assert_eq!((header[0], header[1], *header.last().unwrap()), ("NEXT", "LEFT", "NAME"), "{}", said.out);
        assert_eq!(lines.len(), 10, "{}", said.out);
        assert!(lines.iter().all(|line| line.chars().count() <= width.parse().unwrap()), "{}", said.out);
        let ends: Vec<&str> = lines[6..].iter().map(|line| line.split("  ").next().unwrap().trim()).collect();
        assert_eq!(ends, ["on request", "paused", "paused", "invalid"], "{}", said.out);
        assert!(said.err.contains("9 schedules, times in UTC"), "{}", said.err);
    }
    assert_eq!(
        names(&house.json(&["ls", "reporter"])),
        ["reporter/fails", "reporter/morning", "reporter/pushed"]
    );
    let said = house.belfry(&["ls", "reportr"]);
    assert_eq!((said.code, said.out.as_str()), (3, ""));
    assert!(said.err.contains("did you mean reporter?"), "{}", said.err);
}

#[test]
fn ls_in_json_is_what_the_api_returns() {
    let house = House::after_an_hour();
    let list = house.json(&["ls"]);
    assert_eq!(list["next"], Value::Null);
    let grid = list["items"].as_array().unwrap().iter().find(|item| item["schedule"] == "grid").unwrap();
    assert_eq!(grid["kind"], "every");
    assert_eq!(grid["expression"], "1m");
    assert_eq!(grid["words"], "every 1m");
    assert_eq!(grid["status"], "active");
    assert_eq!(grid["next"]["tick_at"], "2026-01-05T13:01:00Z");
    assert_eq!(grid["streak"], 60);
    assert_eq!(grid["last"]["state"], "completed");
    assert_eq!(grid["last_fired_at"], "2026-01-05T13:00:00Z");
    assert_eq!((&grid["running"], &grid["pending"]), (&Value::from(0), &Value::from(0)));
    assert_eq!(grid["origin"], "files");
    let lines = house.belfry(&["ls", "-o", "jsonl"]).out;
    assert_eq!(lines.lines().count(), 9);
    assert!(lines.lines().all(|line| serde_json::from_str::<Value>(line).unwrap().is_object()));
}

#[test]
fn show_says_everything_in_words() {
    let house = House::after_an_hour();
    let said = house.belfry(&["show", "reporter/fails"]);
    assert_eq!(said.code, 0, "{}", said.err);
    for part in [
        "every 10m, UTC (every \"10m\")",
        "streak -3",
        "no paper",
        "run sh -c exit 3",
        "if_running skip · catch_up run_once · on a grid",
        "lane cron · 2 at once · timeout 1h · no retry · breaker after 2 failures for 30m",
        "files, revision 1",
        "circuit_open",
    ] {
        assert!(said.out.contains(part), "{part}:\n{}", said.out);
    }
    let paused = house.belfry(&["show", "hello/quiet"]).out;
    assert!(paused.contains("too noisy"), "{paused}");
    let invalid = house.belfry(&["show", "hello/bad"]).out;
    assert!(invalid.contains("Mars/Phobos"), "{invalid}");
    assert_eq!(house.json(&["show", "hello/bad"])["status"], "invalid");
}

#[test]
fn next_of_a_schedule_is_exact() {
    let house = House::after_an_hour();
    let said = house.belfry(&["next", "hello/grid", "-n", "2", "-o", "json"]);
    assert_eq!(
        said.out,
        "{\"tz\":\"UTC\",\"ticks\":[{\"tick_at\":\"2026-01-05T13:01:00+00:00\",\"due_at\":\"2026-01-05T13:01:00+00:00\"},\
         {\"tick_at\":\"2026-01-05T13:02:00+00:00\",\"due_at\":\"2026-01-05T13:02:00+00:00\"}]}\n"
    );
    let said = house.belfry(&[
        "next",
        "reporter/morning",
        "--from",
        "2026-03-27T12:00:00Z",
        "-n",
        "1",
        "-o",
        "json",
    ]);
    assert_eq!(
        said.out,
        "{\"tz\":\"Europe/London\",\"ticks\":[{\"tick_at\":\"2026-03-30T09:00:00+01:00\",\"due_at\":\"2026-03-30T09:00:00+01:00\"}]}\n"
    );
    let said = house.belfry(&["next", "hello/quiet"]);
    assert_eq!((said.code, said.out.as_str()), (0, ""));
    assert!(said.err.contains("is paused until it is resumed"), "{}", said.err);
    assert_eq!(house.belfry(&["next", "hello/nobody"]).code, 3);
    assert_eq!(house.belfry(&["next", "reporter/pushed"]).code, 2);
    assert_eq!(house.belfry(&["next", "hello/grid", "--every", "5m"]).code, 2);
}

#[test]
fn why_answers_for_every_tick_that_is_remembered() {
    let house = House::after_an_hour();
    let asked = [
        ("hello/grid", "2026-01-05T12:30:00"),
        ("hello/grid", "2026-01-05T12:30:30"),
        ("hello/often", "2026-01-05T12:05:00"),
        ("hello/often", "2026-01-05T12:07:00"),
        ("hello/quiet", "2026-01-05T14:00:00Z"),
        ("hello/quiet", "2026-01-05T11:00:00Z"),
        ("hello/off", "2026-01-05T12:30:00"),
        ("hello/bad", "2026-01-05T12:30:00"),
        ("hello/later", "2099-01-01T00:00:30Z"),
        ("reporter/fails", "2026-01-05T12:10:00"),
        ("reporter/fails", "2026-01-05T12:40:00"),
        ("reporter/fails", "2026-01-05T12:41:00"),
        ("reporter/pushed", "2026-01-05T12:30:00"),
    ];
    let mut found = String::new();
    for (name, at) in asked {
        let said = house.belfry(&["why", name, "--at", at]);
        assert_eq!(said.code, 0, "{}", said.err);
        found.push_str(&format!("$ belfry why {name} --at {at}\n{}\n", masked(&said.out)));
    }
    golden("why.txt", &found);
    let json = house.json(&["why", "hello/grid", "--at", "2026-01-05T12:30:00Z"]);
    assert_eq!(
        (&json["decision"], &json["at"]),
        (&Value::from("fired"), &Value::from("2026-01-05T12:30:00Z"))
    );
    assert!(json["run_id"].is_string());
}

#[test]
fn why_now_names_the_first_check_that_is_not_ok() {
    let house = House::after_an_hour();
    for (name, reason) in [
        ("hello/quiet", "disabled"),
        ("hello/off", "disabled"),
        ("hello/bad", "invalid"),
        ("hello/grid", "no_node"),
        ("hello/later", "not_due"),
        ("reporter/pushed", "unsupported_type"),
    ] {
        let why = house.json(&["why", name]);
        assert_eq!(why["reason"], reason, "{name}: {why}");
        let failed = why["checks"].as_array().unwrap().iter().find(|check| check["ok"] == false).unwrap();
        assert_eq!(failed["check"], reason);
    }
    let said = house.belfry(&["why", "hello/quiet"]);
    assert!(
        said.out.starts_with("waiting (disabled): It does not run now: paused (too noisy)"),
        "{}",
        said.out
    );
}

#[test]
fn runs_are_listed_newest_first_and_filtered() {
    let house = House::after_an_hour();
    let runs = house.json(&["runs"]);
    assert_eq!(runs["items"].as_array().unwrap().len(), 20);
    let ids: Vec<&str> =
        runs["items"].as_array().unwrap().iter().map(|run| run["id"].as_str().unwrap()).collect();
    assert!(ids.is_sorted_by(|a, b| a > b), "{ids:?}");
    let failed = house.json(&["runs", "--state", "failed", "-n", "100"]);
    assert_eq!(failed["items"].as_array().unwrap().len(), 3);
    let since = house.json(&["runs", "hello/grid", "--since", "2026-01-05T12:55:00Z"]);
    assert_eq!(since["items"].as_array().unwrap().len(), 6);
    assert_eq!(names(&house.json(&["runs", "reporter", "-n", "1"])), ["reporter/fails"]);
    golden("runs.json", &masked(&house.belfry(&["runs", "reporter", "-n", "1", "-o", "json"]).out));
    let said = house.belfry(&["runs", "hello/later"]);
    assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (0, "", "no runs\n"));
    assert_eq!(house.belfry(&["runs", "hello/nobody"]).code, 3);
    assert_eq!(house.belfry(&["runs", "nobody"]).code, 3);
    assert_eq!(house.belfry(&["runs", "--since", "yesterday"]).code, 2);
    assert_eq!(house.belfry(&["runs", "--state", "odd"]).code, 2);
    assert_eq!(house.belfry(&["runs", "-n", "0"]).code, 2);
    let output = house.command(&["runs"]).env("COLUMNS", "80").output().unwrap();
    let said = house::Said::of(output);
    assert!(said.out.lines().all(|line| line.chars().count() <= 80), "{}", said.out);
}

#[test]
fn logs_go_to_the_streams_they_came_from() {
    let house = House::after_an_hour();
    let said = house.belfry(&["logs", "hello/grid"]);
    assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (0, "hello from grid\n", ""));
    let said = house.belfry(&["logs", "reporter/fails"]);
    assert_eq!(said.out, "trying\n");
    assert!(said.err.contains("failed (error)"), "{}", said.err);
    let run = house.json(&["runs", "hello/grid", "-n", "1"])["items"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(house.belfry(&["logs", &run]).out, "hello from grid\n");
    let piece: Value = serde_json::from_str(&house.belfry(&["logs", &run, "-o", "json"]).out).unwrap();
    assert_eq!(
        (&piece["stream"], &piece["text"]),
        (&Value::from("stdout"), &Value::from("hello from grid\n"))
    );
    assert_eq!(house.belfry(&["logs", "01a1df11-4771-7f74-85b9-43588e53d694"]).code, 3);
    assert_eq!(house.belfry(&["logs", "hello/nobody"]).code, 3);
    let said = house.belfry(&["logs", "hello/later"]);
    assert_eq!((said.code, said.err.as_str()), (3, "error: hello/later has not run yet\n"));
    assert_eq!(house.belfry(&["logs", "odd"]).code, 2);
}

#[test]
fn logs_follow_a_run_to_its_end() {
    let house = House::after_an_hour();
    house.block_on(async {
        let store = house.store().await;
        let (_, run) = claimed(&store).await;
        let first = OutputChunk::first_seq(run.epoch);
        let piece = |n: u64, stream: Stream, text: &[u8]| OutputChunk {
            seq: first + n,
            attempt: run.attempt,
            stream,
            bytes: text.to_vec(),
        };
        let begin = [piece(0, Stream::Out, b"one\x1b[2J\n"), piece(1, Stream::Err, b"bad\xff\n")];
        assert!(store.append_output(run.run, run.epoch, &begin).await.unwrap());
        let mut child = house
            .command(&["logs", "hello/often", "-f"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = Vec::new();
        out.read_until(b'\n', &mut line).unwrap();
        // It is no terminal: everything is passed on as it is.
        assert_eq!(line, b"one\x1b[2J\n");
        let more = [piece(2, Stream::Out, b"two\n"), piece(3, Stream::Note, b"so much was cut")];
        assert!(store.append_output(run.run, run.epoch, &more).await.unwrap());
        let finish = Finish {
            run: run.run,
            epoch: run.epoch,
            verdict: Verdict::End { state: RunState::Completed, reason: None },
            failed: false,
            exit_code: Some(0),
            error: None,
            summary: None,
            usage: None,
            arm: None,
        };
        let ended = store.finish(whole(Timestamp::now()), &[finish]).await.unwrap();
        assert_eq!(ended, [Finished::Ended(RunState::Completed)]);
        let mut rest = String::new();
        out.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "two\n");
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        assert_eq!(output.stderr, b"bad\xff\n-- so much was cut\n");
    });
}

#[test]
fn breakers_are_shown_and_closed() {
    let house = House::after_an_hour();
    let listed = house.json(&["breaker"]);
    assert_eq!(listed["items"][0]["agent"], "reporter");
    golden("breaker.json", &masked(&house.belfry(&["breaker", "show", "reporter", "-o", "json"]).out));
    let table = house.belfry(&["breaker", "ls"]).out;
    assert!(table.lines().nth(1).unwrap().starts_with("reporter/poll"), "{table}");
    let said = house.belfry(&["breaker", "reset", "reporter"]);
    assert_eq!((said.code, said.err.as_str()), (0, "reporter/poll is closed\n"));
    let shown = house.json(&["breaker", "show", "reporter/poll"]);
    assert_eq!(shown["items"][0]["state"], "closed");
    let last = shown["items"][0]["history"].as_array().unwrap().last().unwrap().clone();
    assert_eq!(last["reason"], "manual_reset");
    let again = house.belfry(&["breaker", "reset", "reporter", "poll"]);
    assert!(again.err.contains("nothing was changed"), "{}", again.err);
    assert_eq!(house.belfry(&["breaker", "reset", "nobody"]).code, 3);
    assert_eq!(house.belfry(&["breaker", "show", "nobody"]).code, 3);
}

#[test]
fn nodes_are_listed_with_their_leases() {
    let house = House::after_an_hour();
    let said = house.belfry(&["nodes"]);
    assert_eq!((said.code, said.out.as_str()), (0, ""));
    assert!(said.err.contains("no node is running"), "{}", said.err);
    house.block_on(async { claimed(&house.store().await).await });
    let nodes = house.json(&["nodes"]);
    assert_eq!(
        (&nodes["items"][0]["status"], &nodes["items"][0]["active"]),
        (&Value::from("busy"), &Value::from(1))
    );
    assert!(house.belfry(&["nodes"]).out.lines().nth(1).unwrap().contains("busy"));
    let live = house.belfry(&["why", "hello/often"]).out;
    assert!(live.contains("has been running for"), "{live}");
}

#[test]
fn the_store_says_how_large_it_is() {
    let house = House::after_an_hour();
    let stats = house.json(&["store", "stats"]);
    assert_eq!(stats["schedules"], 9);
    assert_eq!(stats["runs_pending"], 0);
    assert!(stats["runs_ended"].as_u64().unwrap() > 70 && stats["bytes"].as_u64().unwrap() > 0);
    assert!(stats["schema_version"].as_i64().unwrap() >= 1);
    assert!(house.belfry(&["store", "stats"]).out.contains("9\n"));
    let said = house.belfry(&["store", "migrate"]);
    assert_eq!((said.code, said.out.as_str()), (0, ""));
    assert!(said.err.contains("the schema is at version"), "{}", said.err);
}

#[test]
fn the_doctor_says_what_is_wrong() {
    let house = House::after_an_hour();
    let findings = house.json(&["doctor"]);
    let status = |check: &str| {
        let items = findings["items"].as_array().unwrap().iter();
        items
            .clone()
            .find(|item| item["check"] == check)
            .map(|item| item["status"].as_str().unwrap().to_owned())
    };
    for (check, expected) in [
        ("config", "warn"),
        ("store", "ok"),
        ("integrity", "ok"),
        ("nodes", "warn"),
        ("applied", "ok"),
        ("schedule", "warn"),
        ("keeper", "ok"),
    ] {
        assert_eq!(status(check).as_deref(), Some(expected), "{check}: {findings}");
    }
    // Other files than those that were applied.
    let other = house::CONFIG.replace("every: 1m", "every: 2m");
    std::fs::write(house.path("belfry.yaml"), other).unwrap();
    let said = house.belfry(&["doctor"]);
    assert_eq!(said.code, 0);
    assert!(said.out.contains("config skew"), "{}", said.out);
    std::fs::write(house.path("belfry.yaml"), "agents: [").unwrap();
    let said = house.belfry(&["doctor"]);
    assert_eq!(said.code, 1);
    assert!(said.out.contains("fail") && said.err.contains("failed"), "{said:?}");
}

#[test]
fn budgets_are_shown_and_cleared() {
    let house = House::with_config(
        "agents:\n  poor:\n    shell: exit 3\n    retry: {max: 0, budget: {max: 2, period: 1d}}\n    \
         schedules: {s: {at: \"2099-01-01T00:00:00Z\"}}\n",
    );
    assert_eq!(house.belfry(&["run", "poor/s"]).code, 1);
    let listed = house.json(&["budget"]);
    let used = &listed["items"][0];
    assert_eq!((&used["agent"], &used["failures"], &used["max"]), (&"poor".into(), &1.into(), &2.into()));
    let table = house.belfry(&["budget", "ls"]).out;
    assert!(table.lines().nth(1).unwrap().contains("1 of 2"), "{table}");
    let said = house.belfry(&["budget", "reset", "poor"]);
    assert_eq!((said.code, said.err.as_str()), (0, "poor may fail 2 times again\n"));
    assert_eq!(house.json(&["budget"])["items"], serde_json::json!([]));
    let again = house.belfry(&["budget", "reset", "poor"]);
    assert!(again.err.contains("nothing was changed"), "{}", again.err);
    assert_eq!(house.belfry(&["budget", "reset", "nobody"]).code, 3);
}

#[test]
fn without_a_store_it_says_so_and_makes_none() {
    let house = House::with_config(house::CONFIG);
    for command in [
        &["ls"][..],
        &["show", "hello/grid"],
        &["next", "hello/grid"],
        &["why", "hello/grid"],
        &["runs"],
        &["logs", "hello/grid"],
        &["breaker"],
        &["token", "ls"],
        &["budget"],
        &["nodes"],
        &["store", "stats"],
        &["export"],
        &["diff"],
    ] {
        let said = house.belfry(command);
        assert_eq!((said.code, said.out.as_str()), (3, ""), "{command:?}: {}", said.err);
        assert!(said.err.contains("there is no store at"), "{command:?}: {}", said.err);
    }
    assert!(!house.path(".belfry").exists());
    assert_eq!(house.belfry(&["doctor"]).code, 0);
}

#[test]
fn what_is_not_there_is_not_found() {
    let house = House::after_an_hour();
    for command in [&["show", "hello/nobody"][..], &["why", "hello/nobody"], &["export", "nobody"]] {
        let said = house.belfry(command);
        assert_eq!((said.code, said.out.as_str()), (3, ""), "{command:?}: {}", said.err);
    }
    assert_eq!(house.belfry(&["show", "hello"]).code, 2);
    let said = house.belfry(&["why", "hello/grid", "--at", "noon"]);
    assert_eq!(said.code, 2);
    assert!(said.err.contains("--at: Invalid time \"noon\""), "{}", said.err);
    assert_eq!(house.belfry(&["ls", "--tz", "Mars/Phobos"]).code, 2);
}

#[test]
fn a_store_that_is_none_is_refused() {
    let house = House::with_config("store: sqlite:other.db\nagents: {}\n");
    std::fs::write(house.path("other.db"), "this is no database, but it is long enough to be looked at")
        .unwrap();
    let said = house.belfry(&["ls"]);
    assert_eq!(said.code, 5, "{}", said.err);
    assert_eq!(house.belfry(&["doctor"]).code, 1);
}

#[test]
fn an_empty_store_says_that_it_is_empty() {
    let house = House::with_config("agents: {}\n");
    std::fs::create_dir(house.path(".belfry")).unwrap();
    house.block_on(async { drop(house.store().await) });
    for (command, words) in [
        (&["ls"][..], "no schedules\n"),
        (&["runs"], "no runs\n"),
        (&["breaker"], "no breaker has counted a failure\n"),
        (&["budget"], "no agent has used anything of its failure budget\n"),
        (&["export"], "the store holds no agents\n"),
        (&["diff"], "no differences: the store holds what the files say\n"),
    ] {
        let said = house.belfry(command);
        assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (0, "", words), "{command:?}");
    }
    assert_eq!(house.json(&["ls"]), serde_json::json!({"items": [], "next": null}));
}
