//! Every key that a file may have is read: a value other than its default shows in what the file loads to. A key that
//! nothing reads is refused as not available in this version.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;

use belfry_config::{Errors, Host, Loaded, load_text, schema};
use serde_json::Value;

fn load(text: &str) -> Result<Loaded, Errors> {
    let host = Host::new(&|_| None, "UTC");
    load_text(text, Path::new("/srv/belfry.yaml"), &host)
}

/// Where a key stands: a file around it, in which `KEY` is replaced by the key and its value.
const TOP: &str = "agents: {a: {shell: date}}\nKEY";
const AGENT: &str = "agents: {a: {shell: date, KEY}}";
const BARE_AGENT: &str = "agents: {a: {KEY}}";
const SCHEDULE: &str = "agents: {a: {shell: date, schedules: {s: {every: 5m, KEY}}}}";
const BARE_SCHEDULE: &str = "agents: {a: {shell: date, schedules: {s: {KEY}}}}";

/// Maps of the schema, and how a map with one key in it is written.
const MAPS: &[(&str, &str, &str)] = &[
    ("", TOP, "KEY"),
    ("/properties/engine", TOP, "engine: {KEY}"),
    ("/properties/retention", TOP, "retention: {KEY}"),
    ("/properties/log", TOP, "log: {KEY}"),
    ("/properties/api", TOP, "api: {KEY}"),
    ("/properties/lanes/additionalProperties/anyOf/0", TOP, "lanes: {x: {slots: 3, KEY}}"),
    ("/$defs/agent", AGENT, "KEY"),
    ("/$defs/agent/properties/retry", AGENT, "retry: {KEY}"),
    (
        "/$defs/agent/properties/retry/properties/budget/anyOf/1",
        AGENT,
        "retry: {budget: {max: 3, period: 1h, KEY}}",
    ),
    ("/$defs/agent/properties/breaker/anyOf/1", AGENT, "breaker: {threshold: 3, reset_after: 1h, KEY}"),
    (
        "/$defs/agent/properties/commands/additionalProperties/anyOf/0",
        AGENT,
        "commands: {c: {shell: y, KEY}}",
    ),
    ("/$defs/schedule", SCHEDULE, "KEY"),
    ("/$defs/schedule/properties/webhook", BARE_SCHEDULE, "webhook: {secret: text, KEY}"),
    ("/$defs/schedule/properties/chat", BARE_SCHEDULE, "chat: {KEY}"),
];

/// A value for each key that differs from its default, by the place of its map.
fn values() -> BTreeMap<&'static str, &'static str> {
    BTreeMap::from([
        (
            "",
            "store: sqlite:x.db | timezone: Europe/Vienna | listen: 127.0.0.1:1 | lanes: {x: 3} | include: [gone.yaml] | \
             engine: {lease: 5s} | retention: {runs: 1d} | log: {level: warn} | api: {rate: 5/s} | \
             defaults: {grace: 1s} | agents: {b: {shell: date}}",
        ),
        (
            "/properties/engine",
            "check_interval: 2s | poll_interval: 2s | heartbeat: 2s | orphan_check: 2s | dead_after: 5 | lease: 5s | \
             late_after: 7s | jitter_threshold: 5 | max_catch_up_jitter: 5s | shutdown_timeout: 5s | max_concurrent: 5 | \
             labels: [x]",
        ),
        (
            "/properties/retention",
            "runs: 1d | runs_per_schedule: 5 | failures: 1d | output: 1d | skips: 1d | heartbeats: 1d | snapshots: 1d | \
             retired: 1d | audit: 1d",
        ),
        ("/properties/log", "format: json | level: warn"),
        (
            "/properties/api",
            "allow_agents: true | open: true | open_metrics: true | trusted_proxies: [10.0.0.0/8] | allowed_hosts: [x] | \
             rate: 5/s | max_body: 2MiB",
        ),
        ("/properties/lanes/additionalProperties/anyOf/0", "slots: 4 | limit: 5 | queue_limit: 5"),
        (
            "/$defs/agent",
            "run: [date] | shell: time | commands: {c: [x]} | cwd: /x | env: {A: b} | env_pass: [A] | prompt: x | \
             payload: {a: 1} | stdin: prompt | timeout: 5m | grace: 1s | output: 2MiB | max_concurrent: 2 | \
             retry: {max: 1} | breaker: {threshold: 1, reset_after: 1m} | lane: main | needs: [x] | \
             schedules: {s: {every: 5m}}",
        ),
        (
            "/$defs/agent/properties/retry",
            "max: 1 | base: 1s | max_delay: 1m | no_retry_codes: [1] | ok_codes: [1] | budget: {max: 1, period: 1m}",
        ),
        ("/$defs/agent/properties/retry/properties/budget/anyOf/1", "max: 1 | period: 1m"),
        ("/$defs/agent/properties/breaker/anyOf/1", "threshold: 1 | reset_after: 1m"),
        ("/$defs/agent/properties/commands/additionalProperties/anyOf/0", "run: [x] | shell: x"),
        (
            "/$defs/schedule",
            "every: 7m | cron: 0 9 * * * | at: \"2099-01-01T00:00:00Z\" | after: 5m | webhook: {secret: none} | chat: {} | \
             enabled: false | timezone: Europe/Vienna | anchor: start | phase: 1s | jitter: 5s | \
             only_between: \"08:00-18:00\" | not_on: [sat] | dst_gap: skip | dst_fold: both | catch_up: run_all | \
             catch_up_limit: 5 | late_after: 7s | if_running: queue | overlap: agent | max_pending: 3 | command: x | \
             prompt: x | payload: {a: 1} | lane: main | priority: 3 | delete_after_run: true",
        ),
        ("/$defs/schedule/properties/webhook", "secret: none | secrets: [\"${T}\"] | github: true"),
        (
            "/$defs/schedule/properties/chat",
            "mode: followup | drop: new | cap: 5 | debounce: 1s | max_concurrent: 2 | max_bytes: 2MiB",
        ),
    ])
}

/// A file with one key more. A key that is there once and written again takes the place of the first.
fn with(file: &str, map: &str, key: &str, value: Option<&str>) -> String {
    let Some(value) = value else { return without(&file.replace("KEY", &without(map))) };
    let is_kind = ["every", "cron", "at", "after", "webhook", "chat"].contains(&key) && map == "KEY";
    let file = match (file, key) {
        (SCHEDULE, _) if is_kind => BARE_SCHEDULE,
        (AGENT, "run" | "shell") if map == "KEY" => BARE_AGENT,
        (TOP, "agents") => "KEY",
        _ => file,
    };
    // A command has one of the two.
    let map = if map.starts_with("commands") && key == "run" { "commands: {c: {KEY}}" } else { map };
    // The key's own value stands in for the one that the map has for the others.
    let parts: Vec<&str> = map.split(", ").collect();
    let own: Vec<String> = parts
        .iter()
        .map(|part| match part.rsplit_once('{') {
            Some((before, inner)) if inner.starts_with(&format!("{key}:")) && part.len() > key.len() => {
                format!("{before}{{")
            }
            _ => (*part).to_owned(),
        })
        .filter(|part| !part.starts_with(&format!("{key}:")))
        .collect();
    let map = own.join(", ").replace("{, ", "{");
    file.replace("KEY", &map.replace("KEY", value))
}

fn without(text: &str) -> String {
    text.replace(", KEY", "").replace("KEY", "")
}

#[test]
fn every_key_that_is_accepted_shows_in_what_is_loaded() {
    let (schema, values) = (schema(), values());
    for (pointer, file, map) in MAPS {
        let known = schema.pointer(pointer).unwrap_or_else(|| panic!("there is no {pointer}"));
        let samples: BTreeMap<&str, &str> = values[pointer]
            .split(" | ")
            .map(|pair| (pair.trim().split_once(':').unwrap().0, pair.trim()))
            .collect();
        for (key, property) in known["properties"].as_object().unwrap() {
            let is_to_come =
                property["description"].as_str().unwrap().contains("Not available in this version");
            let Some(sample) = samples.get(key.as_str()) else {
                assert!(is_to_come, "{pointer}: what shows that `{key}` is read?");
                continue;
            };
            assert!(!is_to_come, "{pointer}: `{key}` is read, and said not to be");
            let text = with(file, map, key, Some(sample));
            let before = load(&with(file, map, key, None))
                .unwrap_or_else(|errors| panic!("{pointer} {key}: {errors}"));
            match load(&text) {
                Ok(loaded) => {
                    let differs = loaded.settings != before.settings || loaded.agents != before.agents;
                    assert!(differs, "{pointer}: nothing reads `{sample}`\n{text}");
                }
                // It was looked for, and is not there.
                Err(errors) => {
                    assert!(errors.to_string().contains("gone.yaml"), "{pointer}: {errors}\n{text}")
                }
            }
        }
        let known = known["properties"].as_object().unwrap();
        let unknown: Vec<_> = samples.keys().filter(|key| !known.contains_key(**key)).collect();
        assert!(unknown.is_empty(), "{pointer}: no longer keys: {unknown:?}");
    }
}

/// Maps that the test above does not look into would be a hole in it.
#[test]
fn every_map_of_the_schema_is_looked_into() {
    fn walk(schema: &Value, pointer: &str, found: &mut Vec<String>) {
        if schema.get("properties").is_some() {
            found.push(pointer.to_owned());
        }
        match schema {
            Value::Object(map) => {
                map.iter().for_each(|(key, inner)| walk(inner, &format!("{pointer}/{key}"), found));
            }
            Value::Array(items) => {
                let items = items.iter().enumerate();
                items.for_each(|(at, inner)| walk(inner, &format!("{pointer}/{at}"), found));
            }
            _ => {}
        }
    }
    let mut found = Vec::new();
    walk(&schema(), "", &mut found);
    let known: Vec<_> = MAPS.iter().map(|(pointer, ..)| (*pointer).to_owned()).collect();
    found.retain(|pointer| !known.contains(pointer));
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn what_nothing_reads_is_refused() {
    for text in [
        "log: {file: x.log}",
        "retention: {keys: 1h}",
        "retention: {keys: none}",
        "rate_limits: {a.example: {max: 1, per: 1s}}",
    ] {
        let said = load(text).unwrap_err().to_string();
        assert!(
            said.contains("is not available in this version") && said.contains("help: remove `"),
            "{text}: {said}"
        );
    }
    for text in ["log: {file: none}", "retention: {keys: 24h}", "rate_limits: {}", "log: {file: }"] {
        load(text).unwrap_or_else(|errors| panic!("{text}: {errors}"));
    }
}
