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
    let mut hash = Sha256::new();
    let mut text = String::new();
    let mut agents: Vec<_> = agents.iter().collect();
    agents.sort_by_key(|agent| agent.name.as_str());
    for agent in agents {
        // `[name, definition, {schedules}]`, a piece at a time: as JSON they take ten times what they take here.
        let _ = write!(text, "[{},", json!(agent.name));
        canonical(&json!(agent.definition), &mut text);
        text.push_str(",{");
        let schedules: BTreeMap<_, _> =
            agent.schedules.iter().map(|(name, schedule)| (name, schedule)).collect();
        for (name, schedule) in schedules {
            let _ = write!(text, "{}:", json!(name));
            canonical(&json!(schedule), &mut text);
            text.push(',');
            hash.update(&text);
            text.clear();
        }
        text.push_str("},]\n");
        hash.update(&text);
        text.clear();
    }
    for (name, lane) in lanes {
        canonical(&json!([name, lane.slots, lane.limit, lane.queue_limit]), &mut text);
        text.push('\n');
    }
    hash.update(&text);
    hash.finalize().iter().fold(String::new(), |mut hex, byte| {
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

#[cfg(test)]
mod tests {
    use belfry_core::definition::{Options, When};
    use belfry_core::{AgentDefinition, ScheduleDefinition};

    use super::*;

    #[test]
    fn the_hash_is_that_of_everything_as_one_json_text() {
        let schedule =
            |every: &str| ScheduleDefinition { when: When::Every(every.into()), options: Options::default() };
        let agent = |name: &str, schedules: &[(&str, &str)]| AgentSpec {
            name: name.into(),
            definition: AgentDefinition::default(),
            schedules: schedules.iter().map(|(name, every)| ((*name).into(), schedule(every))).collect(),
        };
        let agents = [agent("b", &[("z", "1h"), ("y", "2h")]), agent("a", &[])];
        let mut text = String::new();
        for agent in [&agents[1], &agents[0]] {
            let schedules: serde_json::Map<_, _> =
                agent.schedules.iter().map(|(name, schedule)| (name.clone(), json!(schedule))).collect();
            canonical(&json!([agent.name, agent.definition, schedules]), &mut text);
            text.push('\n');
        }
        let whole: String = Sha256::digest(&text).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(of(&agents, &BTreeMap::new()), whole);
    }
}
