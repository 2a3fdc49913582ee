//! `belfry stop` and `belfry stopall`: what ends in a session.

use belfry::RunId;
use belfry::api::Schedule;
use clap::Args;
use hyper::Method;
use serde::{Deserialize, Serialize};

use crate::client::{Client, encoded};
use crate::failure::Failure;
use crate::output::Output;
use crate::place::{Need, Place};
use crate::reach::{self, answer};

/// Cancel the oldest run of a session; others go on
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry stop helper ada
  belfry stop helper/talk ada -o json")]
pub struct Stop {
    #[command(flatten)]
    session: Session,
}

/// Cancel all that runs in a session, and end all that waits
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry stopall helper ada

What was sent before and arrives later is stale, and never runs.")]
pub struct Stopall {
    #[command(flatten)]
    session: Session,
}

/// A session of a chat.
#[derive(Debug, Args)]
pub struct Session {
    /// Whose chat; the schedule may be left out where the agent has only one
    #[arg(value_name = "AGENT[/SCHEDULE]")]
    target: String,

    /// The key of the session
    key: String,
}

impl Session {
    /// Its chat and its key.
    pub fn names(&self) -> (&str, &str) {
        (&self.target, &self.key)
    }

    /// Its path, or that of something of it.
    pub async fn path(&self, client: &Client, rest: &str) -> Result<String, Failure> {
        session_path(client, self.names(), rest).await
    }

    fn stop(&self, place: &Place, output: &Output, verb: &str) -> Result<(), Failure> {
        reach::block_on(async {
            let client = place.client(Need::Store).await?;
            let path = self.path(&client, verb).await?;
            let done: Done = client.send(Method::POST, &path, None, &[]).await?;
            tell_stopped(&done, output)
        })
    }
}

/// The path of a session; the schedule may be left out where the agent has one chat.
pub async fn session_path(
    client: &Client,
    (target, key): (&str, &str),
    rest: &str,
) -> Result<String, Failure> {
    if key.is_empty() {
        return Err(Failure::Usage("the key of a session is empty".into()));
    }
    let target = match target.contains('/') {
        true => target.to_owned(),
        false => only_chat(client, target).await?,
    };
    let (agent, schedule) = reach::split(&target)?;
    Ok(format!("/api/v1/sessions/{}/{}/{}{rest}", encoded(agent), encoded(schedule), encoded(key)))
}

async fn only_chat(client: &Client, agent: &str) -> Result<String, Failure> {
    let path = format!("/api/v1/schedules?agent={}", encoded(agent));
    let mut all: Vec<Schedule> = client.list(&path, usize::MAX).await?;
    all.retain(|schedule| schedule.kind == "chat");
    match all.as_slice() {
        [chat] => Ok(chat.name()),
        [] => {
            client.agent(agent).await?;
            Err(Failure::NotFound(format!("agent {agent} has no chat schedule")))
        }
        several => {
            let names: Vec<String> = several.iter().map(Schedule::name).collect();
            let words = format!("agent {agent} has several chats: say which, {}", names.join(" or "));
            Err(Failure::Usage(words))
        }
    }
}

impl Stop {
    /// Stops one.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        self.session.stop(place, output, "/stop")
    }
}

impl Stopall {
    /// Stops all.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        self.session.stop(place, output, "/stopall")
    }
}

/// What a stop did.
#[derive(Serialize, Deserialize)]
pub struct Done {
    /// `stopped`, or `nothing_running`.
    code: String,
    generation: i64,
    /// Runs that waited and have ended.
    ended: Vec<RunId>,
    /// Runs that run and are told to end.
    told: Vec<RunId>,
}

/// Says what a stop did.
pub fn tell_stopped(done: &Done, output: &Output) -> Result<(), Failure> {
    let mut words: Vec<String> = done.told.iter().map(|run| format!("{run} is told to end")).collect();
    words.extend(done.ended.iter().map(|run| format!("{run} is cancelled")));
    if words.is_empty() {
        words.push("nothing is running".into());
    }
    answer(output, done, &words.join("\n"))
}
