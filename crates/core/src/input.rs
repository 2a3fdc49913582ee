//! What an attempt is given: its prompt and its payload. What came with the run is fixed and is data; the rest comes from
//! the definitions as they are when the attempt starts.

use serde_json::Value;

use crate::definition::Options;
use crate::work::Work;

/// The prompt where nothing names one.
pub const DEFAULT_PROMPT: &str = "Execute your configured task.";

/// The prompt of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Used as it is: it came with the run.
    Text(String),
    /// A template: it comes from a definition.
    Template(String),
}

impl Prompt {
    /// The prompt of a run: its own, else the schedule's, else of a message its text, else the agent's, else
    /// [`DEFAULT_PROMPT`].
    pub fn of(own: Option<String>, options: &Options, message: Option<&str>, work: &Work) -> Prompt {
        if let Some(own) = own {
            Prompt::Text(own)
        } else if let Some(template) = &options.prompt {
            Prompt::Template(template.clone())
        } else if let Some(text) = message {
            Prompt::Text(text.to_owned())
        } else if let Some(template) = &work.prompt {
            Prompt::Template(template.clone())
        } else {
            Prompt::Text(DEFAULT_PROMPT.to_owned())
        }
    }
}

/// The payload of a run: its own keys over the schedule's over the agent's. A payload that is no object is used alone.
pub fn payload(own: Value, options: &Options, work: &Work) -> Value {
    let own = match own {
        Value::Null => Default::default(),
        Value::Object(own) => own,
        other => return other,
    };
    if options.payload.is_empty() && work.payload.is_empty() {
        return Value::Object(own);
    }
    let mut merged = work.payload.clone();
    merged.extend(options.payload.clone());
    merged.extend(own);
    Value::Object(merged)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_nearest_prompt_wins_and_what_came_with_a_run_is_no_template() {
        let text = |text: &str| Prompt::Text(text.into());
        let template = |text: &str| Prompt::Template(text.into());
        for (own, schedule, message, agent, expected) in [
            (Some("r"), Some("s"), Some("m"), Some("a"), text("r")),
            (None, Some("s"), Some("m"), Some("a"), template("s")),
            (None, None, Some("m"), Some("a"), text("m")),
            (None, None, None, Some("a"), template("a")),
            (None, None, None, None, text("Execute your configured task.")),
            (Some(""), Some("s"), None, None, text("")),
        ] {
            let options = Options { prompt: schedule.map(str::to_owned), ..Options::default() };
            let work = Work { prompt: agent.map(str::to_owned), ..Work::default() };
            assert_eq!(Prompt::of(own.map(str::to_owned), &options, message, &work), expected);
        }
    }

    #[test]
    fn payloads_are_merged_key_by_key() {
        let object = |value: Value| value.as_object().cloned().unwrap_or_default();
        let options = Options { payload: object(json!({"b": "s", "c": "s"})), ..Options::default() };
        let work = Work { payload: object(json!({"a": "a", "b": "a", "c": "a"})), ..Work::default() };
        let merged = payload(json!({"c": {"own": 1}}), &options, &work);
        assert_eq!(merged, json!({"a": "a", "b": "s", "c": {"own": 1}}));
        assert_eq!(payload(Value::Null, &Options::default(), &Work::default()), json!({}));
        assert_eq!(payload(json!([1]), &options, &work), json!([1]));
    }
}
