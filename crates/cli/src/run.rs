//! `belfry run`: a run by hand, beside the ticks.

use belfry::RunRequest;
use clap::Args;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use crate::failure::Failure;
use crate::noted::{Deed, noted};
use crate::output::Output;
use crate::place::Place;
use crate::reach::{self, Reach};
use crate::remote;
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

    /// The prompt, instead of the schedule's
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
        let request = RunRequest {
            prompt: self.prompt.clone(),
            payload: payload(self.payload.as_deref())?,
            key: self.key.clone(),
            trace_id: std::env::var("TRACEPARENT").ok().and_then(|text| trace_of(&text)),
        };
        reach::block_on(async {
            if let Some(client) = place.client()? {
                let body = json!({"prompt": request.prompt, "payload": request.payload});
                let wait = self.waiting.over()?;
                return remote::run(&client, &self.name, body, request.key.as_deref(), wait, output).await;
            }
            let reach = Reach::open_to_run(place).await?;
            let record = reach.schedule(&self.name).await?;
            self.waiting.check_labels(&reach, &record).await?;
            let now = reach.now().await?;
            let options = reach.options();
            let enqueue = belfry::enqueue(&reach.store, &options, now, &self.name, request);
            let deed = Deed::to("run_schedule", format_args!("schedules/{}/run", self.name));
            let run = noted(&reach.store, deed, enqueue, |_| true).await?;
            self.waiting.see_to(run, &reach, place, output).await
        })
    }
}

/// The trace that a caller has begun, as W3C writes it: `00-TRACE-SPAN-FLAGS`.
pub fn trace_of(text: &str) -> Option<Uuid> {
    let mut parts = text.trim().split('-');
    let (_version, trace) = (parts.next().filter(|version| version.len() == 2)?, parts.next()?);
    let is_whole = trace.len() == 32 && parts.next().is_some_and(|span| span.len() == 16);
    Uuid::try_parse(trace).ok().filter(|trace| is_whole && !trace.is_nil())
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
