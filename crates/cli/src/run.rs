//! `belfry run`: a run by hand, beside the ticks.

use belfry::api;
use clap::Args;
use hyper::Method;
use serde_json::{Map, Value, json};

use crate::client::{key_header, schedule_path};
use crate::failure::Failure;
use crate::output::Output;
use crate::place::{Need, Place};
use crate::reach;
use crate::wait::Waiting;

/// Run a schedule now, beside its ticks
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry run reporter/morning
  belfry run reporter/morning --follow --prompt \"Only the headlines.\"
  belfry run prices/poll --payload '{\"full\": true}' --wait --timeout 10m
  belfry run deploy/once --key release-42 -o json

It counts for limits and overlap, and moves no schedule. Where a server runs, that starts it within a second; where none runs,
this process does, waits for the end and leaves: Ctrl-C then cancels the run. The same --key within 24 hours answers with the
first run. A TRACEPARENT in the environment becomes the run's trace.")]
pub struct Run {
    /// Which schedule
    #[arg(value_name = "AGENT/SCHEDULE")]
    name: String,

    /// The prompt, instead of the schedule's; used as it is, not a template
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,

    /// A JSON object, merged over the schedule's payload key by key
    #[arg(long, value_name = "JSON")]
    payload: Option<String>,

    /// Makes a repeat answer with the first run
    #[arg(long, value_name = "KEY")]
    key: Option<String>,

    #[command(flatten)]
    waiting: Waiting,
}

impl Run {
    /// Makes the run, and sees to it as far as that is wanted.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        reach::split(&self.name)?;
        self.waiting.check(output)?;
        let payload = payload(self.payload.as_deref())?;
        reach::block_on(async {
            let client = place.client(Need::Run).await?;
            self.waiting.check_labels(&client, &self.name).await?;
            let body = json!({"prompt": self.prompt, "payload": payload});
            let (path, key) = (schedule_path(&self.name, "/run")?, key_header(self.key.as_deref()));
            let made: api::Run = client.send(Method::POST, &path, Some(&body), &key).await?;
            self.waiting.see_to(made.id, &client, place, output).await
        })
    }
}

/// An object from the command line.
pub fn payload(text: Option<&str>) -> Result<Map<String, Value>, Failure> {
    let Some(text) = text else { return Ok(Map::new()) };
    match serde_json::from_str(text) {
        Ok(Value::Object(payload)) => Ok(payload),
        Ok(other) => Err(Failure::Usage(format!(
            "--payload must be a JSON object such as {{\"full\": true}}, got {}",
            kind(&other)
        ))),
        Err(error) => Err(Failure::Usage(format!(
            "--payload is not JSON: {error}. Write an object such as '{{\"full\": true}}', in single quotes for the shell"
        ))),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
