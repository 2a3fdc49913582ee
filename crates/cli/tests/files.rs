//! The commands about files and about the binary itself, with the real binary.

#![allow(clippy::unwrap_used)]

mod house;

use house::{House, golden, masked};
use serde_json::Value;

#[test]
fn init_writes_a_file_that_is_right_and_never_over_another() {
    let house = House::empty();
    let said = house.belfry(&["init"]);
    assert_eq!((said.code, said.out.as_str()), (0, ""), "{}", said.err);
    let said = house.belfry(&["check"]);
    assert_eq!(
        (said.code, said.out.as_str()),
        (0, "belfry.yaml is right: 1 agent with 1 schedule\n"),
        "{}",
        said.err
    );
    std::fs::write(house.path("belfry.yaml"), "agents: {}\n").unwrap();
    let said = house.belfry(&["init"]);
    assert_eq!(said.code, 2);
    assert!(said.err.contains("was left as it is"), "{}", said.err);
    assert_eq!(std::fs::read_to_string(house.path("belfry.yaml")).unwrap(), "agents: {}\n");
    assert_eq!(house.belfry(&["init", "--force"]).code, 0);
    assert_eq!(std::fs::read_to_string(house.path("belfry.yaml")).unwrap(), belfry_config::STARTER);
    assert_eq!(house.belfry(&["-c", "no/such/folder/belfry.yaml", "init"]).code, 2);
}

#[test]
fn check_shows_every_problem() {
    let house = House::with_config("agents:\n  a:\n    shel: x\n    schedules: {s: {every: 5x}}\n");
    let said = house.belfry(&["check"]);
    assert_eq!((said.code, said.out.as_str()), (2, ""));
    golden("check-errors.txt", &said.err);
    let said = house.belfry(&["check", "-o", "json"]);
    assert_eq!(said.code, 2);
    let checked: Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!(checked["ok"], false);
    let lines: Vec<u64> = checked["problems"]
        .as_array()
        .unwrap()
        .iter()
        .map(|problem| problem["line"].as_u64().unwrap())
        .collect();
    assert_eq!(lines, [2, 3, 4]);
}

#[test]
fn one_schedule_that_is_invalid_is_enough_for_check() {
    let house = House::with_config(house::CONFIG);
    let said = house.belfry(&["check"]);
    assert_eq!(said.code, 2);
    assert!(said.err.contains("Mars/Phobos"), "{}", said.err);
    let house = House::with_config(
        "agents:\n  a:\n    shell: x\n    lane: nowhere\n    schedules: {s: {every: 5m}}\n",
    );
    let said = house.belfry(&["check"]);
    assert_eq!(
        (said.code, said.out.as_str()),
        (0, "belfry.yaml is right: 1 agent with 1 schedule, 1 warning\n")
    );
    assert!(said.err.contains("nowhere"), "{}", said.err);
    let house = House::empty();
    let said = house.belfry(&["check"]);
    assert_eq!(said.code, 2);
    assert!(said.err.contains("`belfry init` writes one"), "{}", said.err);
}

#[test]
fn the_schema_is_json() {
    let house = House::empty();
    let said = house.belfry(&["config", "schema"]);
    assert_eq!(said.code, 0);
    let schema: Value = serde_json::from_str(&said.out).unwrap();
    assert!(schema["properties"]["agents"].is_object());
}

#[test]
fn what_is_exported_loads_again() {
    let house = House::after_an_hour();
    let said = house.belfry(&["export"]);
    assert_eq!(said.code, 0, "{}", said.err);
    golden("export.yaml", &said.out);
    let other = House::with_config(&said.out);
    // The one that is invalid stays so.
    assert!(other.belfry(&["check"]).err.contains("Mars/Phobos"));
    std::fs::write(house.path("belfry.yaml"), &said.out).unwrap();
    let diff = house.belfry(&["diff"]);
    assert_eq!((diff.code, diff.out.as_str()), (0, ""), "{}", diff.err);
    let one = house.belfry(&["export", "reporter"]).out;
    assert!(one.contains("reporter:") && !one.contains("hello:"), "{one}");
}

#[test]
fn diff_says_what_applying_would_change() {
    let house = House::after_an_hour();
    let said = house.belfry(&["diff"]);
    assert_eq!((said.code, said.out.as_str()), (0, ""), "{}", said.err);
    let changed = house::CONFIG
        .replace("grid: {every: 1m, anchor: slot}", "grid: {every: 2m, anchor: slot, jitter: 5s}")
        .replace("      later: {at: \"2099-01-01T00:00:00Z\"}\n", "")
        .replace("max_concurrent: 2", "max_concurrent: 3")
        + "  fresh: {shell: echo hi, schedules: {a: {every: 5m}}}\n";
    std::fs::write(house.path("belfry.yaml"), changed).unwrap();
    let said = house.belfry(&["diff"]);
    assert_eq!(said.code, 0);
    golden("diff.txt", &format!("{}{}", said.out, said.err));
    let list = house.json(&["diff"]);
    assert_eq!(list["items"][0]["name"], "hello/grid");
    assert_eq!(list["items"][0]["change"], "changed");
    std::fs::write(house.path("belfry.yaml"), "agents: [").unwrap();
    assert_eq!(house.belfry(&["diff"]).code, 2);
}

#[test]
fn completions_know_the_commands() {
    let house = House::empty();
    for shell in ["bash", "zsh", "fish"] {
        let said = house.belfry(&["completions", shell]);
        assert_eq!(said.code, 0);
        for command in ["doctor", "logs", "why"] {
            assert!(said.out.contains(command), "{shell}: {command}");
        }
    }
    assert_eq!(house.belfry(&["completions", "csh"]).code, 2);
}

#[test]
fn the_version_is_told() {
    let house = House::empty();
    let said = house.belfry(&["version"]);
    assert!(said.out.starts_with(&format!("belfry {} (", env!("CARGO_PKG_VERSION"))), "{}", said.out);
    assert_eq!(house.json(&["version"])["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(
        masked("a 01a1df11-4771-7f74-85b9-43588e53d694 b"),
        "a xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx b"
    );
}

#[test]
fn every_command_has_examples() {
    let house = House::empty();
    for command in [
        "ls",
        "show",
        "next",
        "why",
        "runs",
        "logs",
        "breaker",
        "budget",
        "nodes",
        "doctor",
        "store",
        "completions",
        "version",
        "init",
        "check",
        "config",
        "export",
        "diff",
    ] {
        let said = house.belfry(&[command, "--help"]);
        assert_eq!(said.code, 0);
        assert!(said.out.contains("Examples:"), "{command}");
    }
}
