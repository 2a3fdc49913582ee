//! One hash over definitions, so that two nodes can tell whether they have the same.

use std::collections::BTreeMap;
use std::fmt::Write;

use belfry_core::AgentSpec;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::settings::Lane;

/// SHA-256, in hex, of the agents and lanes as JSON with sorted keys. Names are unique, so the order in the files does not
/// count. What the environment of one node says about a lane is no part of it.
pub(crate) fn of(agents: &[AgentSpec], lanes: &BTreeMap<String, Lane>) -> String {
    let mut agents: Vec<_> = agents
        .iter()
        .map(|agent| {
            let schedules: serde_json::Map<_, _> =
                agent.schedules.iter().map(|(name, schedule)| (name.clone(), json!(schedule))).collect();
            (agent.name.as_str(), json!([agent.name, agent.definition, schedules]))
        })
        .collect();
    agents.sort_by_key(|(name, _)| *name);
    let mut text = String::new();
    for (_, agent) in &agents {
        canonical(agent, &mut text);
        text.push('\n');
    }
    for (name, lane) in lanes {
        canonical(&json!([name, lane.slots, lane.limit, lane.queue_limit]), &mut text);
        text.push('\n');
    }
    Sha256::digest(text.as_bytes()).iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// Sorted here, and not left to the map: whether that is sorted depends on a feature that any crate may turn on.
fn canonical(value: &Value, out: &mut String) {
    match value {
        Value::Array(items) => {
            out.push('[');
            for item in items {
                canonical(item, out);
                out.push(',');
            }
            out.push(']');
        }
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            out.push('{');
            for (key, value) in entries {
                let _ = write!(out, "{}:", Value::String(key.clone()));
                canonical(value, out);
                out.push(',');
            }
            out.push('}');
        }
        scalar => {
            let _ = write!(out, "{scalar}");
        }
    }
}
