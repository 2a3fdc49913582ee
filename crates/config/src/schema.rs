//! The keys as JSON Schema, for editors. Made from the same tables as the check of a file.

use serde_json::{Map, Value, json};

use crate::keys::{AGENT, Key, SCHEDULE, Shape, TOP};
use crate::tree::{self, Bounds};

/// JSON Schema (draft 2020-12) of a main file.
pub fn schema() -> Value {
    let mut root = map(TOP);
    root["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    root["title"] = json!("belfry.yaml");
    let mut agent = map(AGENT);
    agent["not"] = json!({"required": ["run", "shell"]});
    let mut schedule = map(SCHEDULE);
    let kinds = crate::keys::KINDS.iter().map(|kind| json!({"required": [kind]}));
    schedule["oneOf"] = kinds.collect();
    root["$defs"] = json!({"agent": agent, "schedule": schedule});
    root
}

fn map(keys: &[Key]) -> Value {
    let properties: Map<_, _> = keys.iter().map(|key| (key.name.to_owned(), property(key))).collect();
    let required: Vec<_> = keys.iter().filter(|key| key.required).map(|key| key.name).collect();
    let mut schema =
        json!({"type": ["object", "null"], "properties": properties, "additionalProperties": false});
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    schema
}

fn property(key: &Key) -> Value {
    let mut schema = shape(&key.shape);
    let default = tree::parse(0, key.default, Bounds::FRAGMENT)
        .0
        .and_then(|node| node.json().ok())
        .filter(|_| !key.default.is_empty());
    schema["description"] = json!(key.doc);
    if matches!(key.shape, Shape::NotYet) {
        schema["description"] = json!(format!("{} Not available in this version.", key.doc));
        schema["enum"] = json!([null, default.as_ref().unwrap_or(&json!("none"))]);
    }
    if let Some(default) = default {
        schema["default"] = default;
    }
    schema
}

fn shape(shape_: &Shape) -> Value {
    match shape_ {
        Shape::Text | Shape::Store | Shape::Path | Shape::Zone | Shape::Prompt | Shape::Shell => {
            json!({"type": "string"})
        }
        Shape::Timing(_) => json!({"type": ["string", "integer"]}),
        Shape::Words(words) => json!({"enum": words}),
        Shape::Flag => json!({"type": "boolean"}),
        Shape::Count { min, max } => json!({"type": "integer", "minimum": min, "maximum": max}),
        Shape::Duration { .. } => json!({"type": "string", "pattern": DURATION}),
        Shape::Age => json!({"type": "string", "pattern": AGE}),
        Shape::Size => json!({"type": ["string", "integer"]}),
        Shape::Rate => json!({"type": "string", "pattern": "^[0-9]+ */ *[smh]$"}),
        Shape::Address => json!({"type": "string", "pattern": ":[0-9]+$"}),
        Shape::Network => json!({"type": "string", "pattern": "^[0-9A-Fa-f:.]+(/[0-9]+)?$"}),
        Shape::Name => json!({"type": "string", "pattern": NAME}),
        Shape::EnvName => json!({"type": "string", "pattern": "^[^= ]+$"}),
        Shape::Argv => {
            json!({"type": "array", "minItems": 1, "items": {"type": ["string", "number", "boolean"]}})
        }
        Shape::Secrets => json!({"anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"type": "string", "minLength": 1}},
        ]}),
        Shape::Or(word, inner) => json!({"anyOf": [{"enum": [word, null]}, shape(inner)]}),
        Shape::MapOr(map, other) => json!({"anyOf": [shape(map), shape(other)]}),
        Shape::List(inner) => json!({"type": ["array", "null"], "items": shape(inner)}),
        Shape::OneOrMore(inner) => {
            json!({"anyOf": [{"type": ["array", "null"], "items": shape(inner)}, shape(inner)]})
        }
        Shape::Map(keys) if std::ptr::eq(*keys, AGENT) => json!({"$ref": "#/$defs/agent"}),
        Shape::Map(keys) if std::ptr::eq(*keys, SCHEDULE) => json!({"$ref": "#/$defs/schedule"}),
        Shape::Map(keys) => map(keys),
        Shape::Named(_, inner) => json!({
            "type": ["object", "null"],
            "propertyNames": {"pattern": NAME},
            "additionalProperties": shape(inner),
        }),
        Shape::Env => json!({
            "type": ["object", "null"],
            "additionalProperties": {"type": ["string", "number", "boolean"]},
        }),
        Shape::Object => json!({"type": ["object", "null"]}),
        // `property` says which value that is.
        Shape::NotYet => json!({}),
    }
}

const NAME: &str = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$";
const DURATION: &str = "^ *([0-9]+(\\.[0-9]+)? *([mM][sS]|[smhdwSMHDW]) *)+$";
const AGE: &str = "^ *(([0-9]+(\\.[0-9]+)? *([mM][sS]|[smhdwSMHDW]) *)+|[0-9]+[yY])$";
