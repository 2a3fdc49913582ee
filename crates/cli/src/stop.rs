//! `belfry stop` and `belfry stopall`: what ends in a session.

use belfry::{SessionDone, SessionVerb};
use clap::Args;
use serde::Serialize;

use crate::failure::Failure;
use crate::noted::{Deed, noted};
use crate::output::Output;
use crate::place::Place;
use crate::reach::{self, Reach, answer};
use crate::remote_talk;

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

    /// Does something to the session.
    pub async fn change(&self, reach: &Reach, verb: SessionVerb) -> Result<SessionDone, Failure> {
        let (action, path) = match verb {
            SessionVerb::Stop => ("stop_session", "stop"),
            SessionVerb::StopAll => ("stop_all_of_session", "stopall"),
            SessionVerb::Reset => ("reset_session", "reset"),
            SessionVerb::Use(_) => ("measure_session", "usage"),
        };
        let deed = Deed::to(action, format_args!("sessions/{}/{}/{path}", self.target, self.key));
        let change = belfry::change_session(&reach.store, reach.now().await?, self.names(), verb);
        noted(&reach.store, deed, change, |_| true).await
    }

    fn stop(&self, place: &Place, output: &Output, verb: SessionVerb) -> Result<(), Failure> {
        reach::block_on(async {
            let done = match place.client()? {
                Some(client) => {
                    remote_talk::stop(&client, self.names(), verb == SessionVerb::StopAll).await?
                }
                None => self.change(&Reach::open(place).await?, verb).await?,
            };
            tell_stopped(&done, output)
        })
    }
}

impl Stop {
    /// Stops one.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        self.session.stop(place, output, SessionVerb::Stop)
    }
}

impl Stopall {
    /// Stops all.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        self.session.stop(place, output, SessionVerb::StopAll)
    }
}

#[derive(Serialize)]
struct Stopped<'a> {
    /// `stopped`, or `nothing_running`.
    code: &'static str,
    generation: i64,
    /// Runs that waited and have ended.
    ended: &'a [belfry::RunId],
    /// Runs that run and are told to end.
    told: &'a [belfry::RunId],
}

/// Says what a stop did.
pub fn tell_stopped(done: &SessionDone, output: &Output) -> Result<(), Failure> {
    let SessionDone { generation, ended, told } = done;
    let nothing = ended.is_empty() && told.is_empty();
    let code = if nothing { "nothing_running" } else { "stopped" };
    let mut words: Vec<String> = told.iter().map(|run| format!("{run} is told to end")).collect();
    words.extend(ended.iter().map(|run| format!("{run} is cancelled")));
    if nothing {
        words.push("nothing is running".into());
    }
    answer(output, &Stopped { code, generation: *generation, ended, told }, &words.join("\n"))
}
