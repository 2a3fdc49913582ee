//! `belfry send`: a message for a session.

use std::io::Read;

use belfry::{Mode, Taken};
use clap::{Args, ValueEnum};
use hyper::Method;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::client::{Client, key_header};
use crate::failure::Failure;
use crate::output::Output;
use crate::place::{Need, Place};
use crate::reach::{self, answer, say};
use crate::reading;
use crate::run::payload;
use crate::stop::{session_path, tell_stopped};
use crate::wait::Waiting;

/// Send a message to a session of a chat
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry send helper ada \"What is on today?\" --follow
  belfry send helper/talk ada \"no, tomorrow\" --mode interrupt
  git log -1 | belfry send reviewer pr-42 -
  belfry send helper ada /stopall

Messages of a session run one after the other, in order; those that come close together are one run. Its payload has `text`,
`messages` and `session`; without a prompt of the schedule's own the text is the prompt. /stop and /stopall act as the commands
of that name. Where no server runs, the message waits for the next `belfry up`; with --wait or --follow this process runs it.")]
pub struct Send {
    /// Whose chat; the schedule may be left out where the agent has only one
    #[arg(value_name = "AGENT[/SCHEDULE]")]
    target: String,

    /// The key of the session: a person, a channel, a thread
    key: String,

    /// What to say; `-` reads it from standard input
    #[arg(allow_hyphen_values = true)]
    text: String,

    /// The pool of slots its run takes one from [default: the schedule's, else main]
    #[arg(long)]
    lane: Option<String>,

    /// What it does while a run lives [default: the schedule's way]
    #[arg(long, value_enum)]
    mode: Option<ModeChoice>,

    /// How many runs of the session may be running at once from now on
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_concurrent: Option<u32>,

    /// When it was sent: what is older than a stop of the session is stale
    #[arg(long, value_name = "TIME")]
    sent_at: Option<String>,

    /// The generation of the session that the sender knows: what is older than a reset is stale
    #[arg(long, value_name = "N")]
    generation: Option<i64>,

    /// A JSON object that goes along with the text
    #[arg(long, value_name = "JSON")]
    payload: Option<String>,

    /// Makes a repeat answer with the first run
    #[arg(long = "idempotency-key", value_name = "KEY")]
    idempotency: Option<String>,

    #[command(flatten)]
    waiting: Waiting,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ModeChoice {
    Queue,
    Followup,
    Interrupt,
}

impl From<ModeChoice> for Mode {
    fn from(choice: ModeChoice) -> Mode {
        match choice {
            ModeChoice::Queue => Mode::Queue,
            ModeChoice::Followup => Mode::Followup,
            ModeChoice::Interrupt => Mode::Interrupt,
        }
    }
}

impl Send {
    /// Sends, and waits for the run where that is wanted.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        self.waiting.check(output)?;
        let text = self.text()?;
        let sent_at =
            self.sent_at.as_ref().map(|text| reading::instant(text, "--sent-at", output)).transpose()?;
        let mut body = json!({"text": text, "payload": payload(self.payload.as_deref())?});
        let optional = [
            ("mode", json!(self.mode.map(Mode::from))),
            ("lane", json!(self.lane)),
            ("max_concurrent", json!(self.max_concurrent)),
            ("sent_at", json!(sent_at)),
            ("generation", json!(self.generation)),
        ];
        for (name, value) in optional.into_iter().filter(|(_, value)| !value.is_null()) {
            body[name] = value;
        }
        reach::block_on(async {
            let client = place.client(Need::Run).await?;
            let path = session_path(&client, (&self.target, &self.key), "/messages").await?;
            let key = key_header(self.idempotency.as_deref());
            let said: Value = client.send(Method::POST, &path, Some(&body), &key).await?;
            match said["code"].as_str() {
                Some("taken") => self.tell(&read(said)?, &client, place, output).await,
                _ => tell_stopped(&read(said)?, output),
            }
        })
    }

    fn text(&self) -> Result<String, Failure> {
        if self.text != "-" {
            return Ok(self.text.clone());
        }
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text)?;
        Ok(text.trim_end_matches('\n').to_owned())
    }

    async fn tell(
        &self,
        taken: &Taken,
        client: &Client,
        place: &Place,
        output: &Output,
    ) -> Result<(), Failure> {
        if self.waiting.waits() {
            say_lane(taken);
            return self.waiting.see_to(taken.run, client, place, output).await;
        }
        say_lane(taken);
        answer(output, taken, &taken.run.to_string())?;
        if taken.joined {
            say("it joins the messages before it, in one run");
        }
        if !client.is_served() {
            say("no server runs: it waits for the next `belfry up`");
        }
        Ok(())
    }
}

fn read<T: DeserializeOwned>(said: Value) -> Result<T, Failure> {
    serde_json::from_value(said)
        .map_err(|error| Failure::Unreachable(format!("the server answers what no Belfry does: {error}")))
}

fn say_lane(taken: &Taken) {
    if let Some(unknown) = &taken.unknown_lane {
        say(&format!(
            "there is no lane {unknown}: it goes to main. `belfry lanes set {unknown} 10` makes one"
        ));
    }
    if !taken.ended.is_empty() || !taken.told.is_empty() {
        say(&format!("{} ended for it, {} told to end", taken.ended.len(), taken.told.len()));
    }
}
