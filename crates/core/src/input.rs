//! What an attempt is given: its prompt and its payload. What came with the run is fixed and is data; the rest comes from
//! the definitions as they are when the attempt starts.

use serde::Deserialize;
use serde_json::Value;

use crate::definition::{Options, ScheduleDefinition, When};
use crate::model::Trigger;
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
    fn of(own: Option<String>, options: &Options, message: Option<&str>, work: &Work) -> Prompt {
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

/// The payload that came with a run, as it is stored. It is read when an attempt starts: as values it takes up to thirty times
/// the memory of its text, and many attempts may wait for their start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredPayload {
    trigger: Trigger,
    json: Vec<u8>,
}

impl StoredPayload {
    /// That of a run with this trigger.
    pub fn new(trigger: Trigger, json: impl Into<Vec<u8>>) -> StoredPayload {
        StoredPayload { trigger, json: json.into() }
    }

    /// Its values as attempts and readers get them, or why there are none.
    pub fn read(&self) -> Result<Value, String> {
        let stored = serde_json::from_slice(&self.json);
        let stored = stored.map_err(|error| format!("its stored payload cannot be read: {error}"))?;
        Ok(with_text(self.trigger, stored))
    }

    /// The key of the session of a run that a message made.
    pub fn session(&self) -> Option<String> {
        #[derive(Deserialize)]
        struct OfMessages {
            session: String,
        }
        let is_of_messages = self.trigger == Trigger::Message;
        is_of_messages
            .then(|| serde_json::from_slice::<OfMessages>(&self.json).ok())
            .flatten()
            .map(|it| it.session)
    }
}

/// A stored payload as attempts and readers get it. That of messages has `text` as well, all of them joined; it is not stored
/// beside them.
pub fn with_text(trigger: Trigger, mut payload: Value) -> Value {
    if trigger == Trigger::Message
        && let Value::Object(map) = &mut payload
        && let Some(Value::Array(messages)) = map.get("messages")
    {
        let texts: Vec<&str> = messages.iter().filter_map(|message| message.get("text")?.as_str()).collect();
        let text = texts.join("\n");
        map.insert("text".into(), text.into());
    }
    payload
}

/// What an attempt is given.
#[derive(Debug, Clone, PartialEq)]
pub struct Given {
    /// Not yet filled in.
    pub prompt: Prompt,
    /// Merged. Never a template.
    pub payload: Value,
}

impl Given {
    /// What an attempt of a run is given, by what came with the run and by the definitions.
    pub fn of(prompt: Option<&str>, payload: Value, schedule: &ScheduleDefinition, work: &Work) -> Given {
        let said = payload.get("text").and_then(Value::as_str);
        let message = said.filter(|_| matches!(schedule.when, When::Chat(_)));
        let prompt = Prompt::of(prompt.map(str::to_owned), &schedule.options, message, work);
        Given { prompt, payload: merged(payload, &schedule.options, work) }
    }
}

/// The payload of a run: its own keys over the schedule's over the agent's. A payload that is no object is used alone.
fn merged(own: Value, options: &Options, work: &Work) -> Value {
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
        let merged = super::merged(json!({"c": {"own": 1}}), &options, &work);
        assert_eq!(merged, json!({"a": "a", "b": "s", "c": {"own": 1}}));
        assert_eq!(super::merged(Value::Null, &Options::default(), &Work::default()), json!({}));
        assert_eq!(super::merged(json!([1]), &options, &work), json!([1]));
    }
}
