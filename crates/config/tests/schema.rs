//! The JSON Schema: it accepts what loads, refuses what does not, and its defaults are the defaults.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use belfry_config::{DEMO, Host, Loaded, STARTER, load_text, schema};
use serde_json::{Map, Value, json};

fn load(text: &str) -> Loaded {
    let host = Host::new(&|_| None, "UTC");
    load_text(text, Path::new("/srv/belfry.yaml"), &host).unwrap_or_else(|errors| panic!("{errors}\n{text}"))
}

/// As much of JSON Schema as ours uses, patterns left out.
fn accepts(root: &Value, schema: &Value, value: &Value) -> bool {
    if let Some(reference) = schema["$ref"].as_str() {
        return accepts(root, root.pointer(reference.trim_start_matches('#')).unwrap(), value);
    }
    let is = |name: &str| match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        name => panic!("{name}"),
    };
    let typed = match &schema["type"] {
        Value::String(name) => is(name),
        Value::Array(names) => names.iter().any(|name| is(name.as_str().unwrap())),
        _ => true,
    };
    let each = |key: &str| schema[key].as_array().cloned().unwrap_or_default();
    let listed = schema.get("enum").is_none_or(|values| values.as_array().unwrap().contains(value));
    let any = schema.get("anyOf").is_none() || each("anyOf").iter().any(|one| accepts(root, one, value));
    let one = schema.get("oneOf").is_none()
        || !value.is_object()
        || each("oneOf").iter().filter(|one| accepts(root, one, value)).count() == 1;
    let not = schema.get("not").is_none_or(|not| !value.is_object() || !accepts(root, not, value));
    let required =
        !value.is_object() || each("required").iter().all(|key| value.get(key.as_str().unwrap()).is_some());
    let items = schema.get("items").is_none_or(|items| {
        value.as_array().is_none_or(|values| values.iter().all(|value| accepts(root, items, value)))
    });
    let inside = value.as_object().is_none_or(|map| {
        map.iter().all(|(key, value)| match schema["properties"].get(key) {
            Some(property) => accepts(root, property, value),
            None => match schema.get("additionalProperties") {
                Some(Value::Bool(allowed)) => *allowed,
                Some(more) => accepts(root, more, value),
                None => true,
            },
        })
    });
    typed && listed && any && one && not && required && items && inside
}

fn allowed(value: &Value) -> bool {
    accepts(&schema(), &schema(), value)
}

/// The defaults of a map, all of them written out.
fn defaults(schema: &Value) -> Map<String, Value> {
    let properties = schema["properties"].as_object().unwrap();
    let written = properties.iter().filter_map(|(key, property)| {
        let mut default = property.get("default")?.clone();
        if default == json!({}) && property.get("properties").is_some() {
            default = Value::Object(defaults(property));
        }
        Some((key.clone(), default))
    });
    written.collect()
}

#[test]
fn every_default_can_be_written_out_and_changes_nothing() {
    let schema = schema();
    let mut file = defaults(&schema);
    let mut agent = defaults(&schema["$defs"]["agent"]);
    file["defaults"] = Value::Object(agent.clone());
    file["defaults"].as_object_mut().unwrap().remove("schedules");
    agent.insert("shell".into(), json!("date"));
    let schedule = |kind: &str, value: Value| {
        let mut schedule = defaults(&schema["$defs"]["schedule"]);
        schedule.insert(kind.into(), value);
        schedule.insert("catch_up".into(), json!(if kind == "cron" { "skip" } else { "run_once" }));
        schedule
    };
    let chat = defaults(&schema["$defs"]["schedule"]["properties"]["chat"]);
    agent.insert(
        "schedules".into(),
        json!({"e": schedule("every", json!("5m")), "c": schedule("cron", json!("0 9 * * *")), "t": schedule("chat", json!(chat))}),
    );
    file.insert("agents".into(), json!({"a": agent}));
    let file = Value::Object(file);
    assert!(allowed(&file));

    let mut written = load(&file.to_string());
    // The one thing that counts for having been written: that limit then bounds runs of sessions, too.
    assert!(std::mem::take(&mut written.agents[0].definition.limits_sessions));
    let short = load(
        "agents: {a: {shell: date, schedules: {e: {every: 5m, catch_up: run_once}, c: {cron: '0 9 * * *', catch_up: skip}, \
         t: {chat: {}, catch_up: run_once}}}}",
    );
    assert_eq!(written.settings, short.settings);
    assert_eq!(written.agents[0].definition, short.agents[0].definition);
    let sorted = |loaded: &Loaded| {
        let mut schedules = loaded.agents[0].schedules.clone();
        schedules.sort_by(|a, b| a.0.cmp(&b.0));
        schedules.truncate(2);
        schedules
    };
    assert_eq!(sorted(&written), sorted(&short));
    assert_eq!(written.invalid, []);
}

#[test]
fn the_keys_of_the_contract_are_all_there() {
    let schema = schema();
    let keys = |pointer: &str| {
        let map = schema.pointer(pointer).unwrap()["properties"].as_object().unwrap();
        map.keys().cloned().collect::<Vec<_>>()
    };
    for (pointer, contract) in [
        ("", "store timezone listen lanes include engine retention log api rate_limits defaults agents"),
        (
            "/properties/engine",
            "check_interval poll_interval heartbeat orphan_check dead_after lease late_after jitter_threshold max_catch_up_jitter shutdown_timeout max_concurrent labels",
        ),
        (
            "/properties/retention",
            "runs runs_per_schedule failures output skips keys heartbeats snapshots retired audit",
        ),
        ("/properties/log", "format level file"),
        ("/properties/api", "allow_agents open open_metrics trusted_proxies allowed_hosts rate max_body"),
        (
            "/$defs/agent",
            "run shell http fetch max_concurrent timeout grace retry breaker lane output env env_pass cwd commands prompt payload stdin needs preset terminal resume_session hooks spend schedules",
        ),
        ("/$defs/agent/properties/retry", "max base max_delay no_retry_codes ok_codes budget"),
        (
            "/$defs/schedule",
            "every cron at after webhook chat enabled timezone anchor jitter only_between not_on dst_gap dst_fold catch_up catch_up_limit late_after phase if_running overlap max_pending command prompt payload lane priority work_source delete_after_run",
        ),
    ] {
        let mut expected: Vec<_> = contract.split(' ').map(str::to_owned).collect();
        let mut found = keys(pointer);
        expected.sort();
        found.sort();
        assert_eq!(found, expected, "{pointer}");
    }
}

#[test]
fn it_agrees_with_loading() {
    for good in [
        json!({}),
        json!({"lanes": {"main": 3, "night": {"slots": 1, "limit": "none"}}, "include": "x.yaml"}),
        json!({"agents": {"a": {"run": ["x"], "timeout": "none", "schedules": {"s": {"every": "5m", "not_on": [0, "sat"]}}}}}),
        json!({"agents": {"a": {"shell": "x", "breaker": {"threshold": 1, "reset_after": "1m"}, "commands": {"b": ["c"], "d": {"shell": "e"}}}}}),
    ] {
        assert!(allowed(&good), "{good}");
    }
    for bad in [
        json!({"agnets": {}}),
        json!({"agents": {"a": {"run": "x"}}}),
        json!({"agents": {"a": {"run": ["x"], "shell": "y"}}}),
        json!({"agents": {"a": {"shell": "x", "schedules": {"s": {}}}}}),
        json!({"agents": {"a": {"shell": "x", "schedules": {"s": {"every": "5m", "cron": "* * * * *"}}}}}),
        json!({"agents": {"a": {"shell": "x", "breaker": {"threshold": 1}}}}),
        json!({"agents": {"a": {"shell": "x", "fetch": {"url": "y"}}}}),
    ] {
        assert!(!allowed(&bad), "{bad}");
    }
    for text in [STARTER, DEMO] {
        load(text);
    }
}

#[test]
fn the_documentation_names_every_key() {
    let text = include_str!("../../../docs/configuration.md");
    fn walk(schema: &Value, text: &str) {
        for (key, property) in schema["properties"].as_object().into_iter().flatten() {
            assert!(text.contains(&format!("`{key}`")), "docs/configuration.md does not name `{key}`");
            walk(property, text);
        }
    }
    let schema = schema();
    walk(&schema, text);
    walk(&schema["$defs"]["agent"], text);
    walk(&schema["$defs"]["schedule"], text);
}
