//! What a line of `up` looks like. Every test checks every line against this.

use std::collections::BTreeSet;

use serde_json::Value;

/// The stable names of events, and the keys that each may have besides `timestamp`, `level` and `event`.
const KEYS: [(&str, &str); 40] = [
    ("node_started", "node"),
    ("node_stopped", "node"),
    ("node_draining", "node state"),
    ("node_fenced", "node count detail"),
    ("node_rejoined", "node"),
    ("keeper_restarted", "node detail"),
    ("clock_stepped", "state detail"),
    ("config_loaded", "detail"),
    ("config_rejected", "detail"),
    ("config_skew", "state detail"),
    ("tick_planned", "agent schedule tick_at run_id trace_id"),
    ("tick_deferred", "agent schedule tick_at reason detail"),
    ("tick_skipped", "agent schedule tick_at reason count detail"),
    ("tick_missed", "agent schedule tick_at reason count"),
    ("run_created", "agent schedule session tick_at run_id trace_id reason"),
    ("run_started", "agent schedule session tick_at run_id attempt node trace_id reason lag_ms"),
    ("run_delayed", "agent schedule session tick_at run_id attempt node trace_id detail"),
    (
        "run_finished",
        "agent schedule session tick_at run_id attempt node trace_id state reason took_ms usage detail",
    ),
    (
        "run_retried",
        "agent schedule session tick_at run_id attempt node trace_id state reason took_ms retry_at usage detail",
    ),
    (
        "run_cancelled",
        "agent schedule session tick_at run_id attempt node trace_id state reason took_ms outbound usage detail",
    ),
    (
        "run_rescued",
        "agent schedule session tick_at run_id attempt node trace_id state reason took_ms detail",
    ),
    ("run_returned", "agent schedule session tick_at run_id attempt node trace_id state reason"),
    ("breaker_changed", "agent command run_id trace_id state reason count"),
    ("budget_changed", "agent run_id state reason count retry_at"),
    ("lane_changed", "node count detail"),
    ("session_stopped", "agent schedule session count"),
    ("session_reset", "agent schedule session count"),
    ("agent_created", "agent"),
    ("agent_updated", "agent"),
    ("agent_deleted", "agent"),
    ("schedule_created", "agent schedule"),
    ("schedule_updated", "agent schedule"),
    ("schedule_deleted", "agent schedule"),
    ("schedule_paused", "agent schedule"),
    ("schedule_resumed", "agent schedule"),
    ("schedule_unreadable", "agent schedule node detail"),
    ("row_unreadable", "node detail"),
    ("write_refused", "agent schedule run_id node detail"),
    ("store_unavailable", "detail"),
    ("store_available", ""),
];

/// Every line is an event with a known name and known keys.
pub fn check(event: &Value) {
    let Value::Object(keys) = event else { panic!("not a JSON object: {event}") };
    let name = event["event"].as_str().unwrap_or_else(|| panic!("without a name: {event}"));
    let Some((_, allowed)) = KEYS.iter().find(|(known, _)| *known == name) else {
        panic!("an unknown name: {event}")
    };
    let at = event["timestamp"].as_str().unwrap_or_else(|| panic!("without a time: {event}"));
    assert!(at.parse::<belfry_time::Timestamp>().is_ok(), "{event}");
    assert!(["error", "warn", "info", "debug"].contains(&event["level"].as_str().unwrap_or("")), "{event}");
    let known: BTreeSet<&str> =
        ["timestamp", "level", "event"].into_iter().chain(allowed.split(' ')).collect();
    let unknown: Vec<_> = keys.keys().filter(|key| !known.contains(key.as_str())).collect();
    assert!(unknown.is_empty(), "{unknown:?} in {event}");
}
