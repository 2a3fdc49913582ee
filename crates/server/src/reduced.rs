//! What only those may read who may change schedules: the part of an error that names a directory or a variable of a
//! node's host, or tells what its store said. A route answers with everything; `guard.rs` replaces the body for others.

use axum::body::{Body, Bytes};
use axum::response::Response;
use belfry_core::text::{names_node, without_node};
use belfry_store::Scope;
use serde_json::Value;

/// The keys whose texts may quote the error or the summary of a run.
const KEYS: [&str; 5] = ["error", "last_error", "detail", "words", "summary"];

/// The body of a response for those who may not read everything; an extension of the response.
#[derive(Clone)]
pub struct Reduced(Bytes);

impl Reduced {
    /// None where there is nothing to leave out.
    pub fn of(json: &str) -> Option<Reduced> {
        reduced(json).map(|text| Reduced(text.into()))
    }
}

/// Gives an actor the body that is for it.
pub fn reduce(mut response: Response, scope: Scope) -> Response {
    match response.extensions_mut().remove::<Reduced>() {
        Some(Reduced(body)) if !may_read(scope) => response.map(|_| Body::from(body)),
        _ => response,
    }
}

/// Whether an actor may read errors as they are.
pub fn may_read(scope: Scope) -> bool {
    scope >= Scope::Manage
}

/// JSON without what is not for everybody; none where there is nothing to leave out.
pub fn reduced(json: &str) -> Option<String> {
    if !names_node(json) {
        return None;
    }
    // What is no JSON is nothing that is sent.
    let mut value: Value = serde_json::from_str(json).unwrap_or_default();
    walk(&mut value);
    Some(value.to_string())
}

/// Calls itself for what is inside, which `serde_json` has limited to 128 levels.
fn walk(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(walk),
        Value::Object(map) => {
            for (key, value) in map {
                match value {
                    Value::String(text) if KEYS.contains(&key.as_str()) => *text = without_node(text),
                    value => walk(value),
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use belfry_core::text::on_node;
    use serde_json::json;

    use super::*;

    #[test]
    fn errors_are_reduced_and_output_is_not() {
        let secret = format!("it does not exist{}", on_node("/srv/secret"));
        let shown = |error: &str| {
            let checks = json!([{"detail": error}]);
            json!({"items": [{"error": error, "summary": error, "text": secret, "n": 1}], "why": {"checks": checks}})
        };
        let all = shown(&secret);
        let some: Value = serde_json::from_str(&reduced(&all.to_string()).unwrap()).unwrap();
        assert_eq!(some, shown("it does not exist"));
        assert_eq!(reduced("{\"error\":\"plain\"}"), None);
    }
}
