//! `belfry sessions`: conversations, and beginning them anew.

use belfry::RunId;
use belfry::api::Session as Shown;
use belfry_time::{Timestamp, Zone};
use clap::{Args, Subcommand};
use hyper::Method;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::client::{of_name, schedule_path};
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::{Need, Place};
use crate::reach::{self, answer};
use crate::reading;
use crate::sheet::{Sheet, column};
use crate::stop::Session;
use crate::words;

/// List sessions, or begin one anew
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "Examples:
  belfry sessions
  belfry sessions helper/talk
  belfry sessions reset helper ada
  belfry sessions -o json")]
pub struct Sessions {
    /// Only those of an agent or of one chat
    #[arg(value_name = "AGENT[/SCHEDULE]")]
    name: Option<String>,

    #[command(subcommand)]
    verb: Option<Verb>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Begin a new generation: what waits ends, what runs goes on and is none of the session's business any more
    Reset(Session),
}

impl Sessions {
    /// Lists or resets.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        match &self.verb {
            Some(Verb::Reset(session)) => reach::block_on(async {
                let client = place.client(Need::Store).await?;
                let path = session.path(&client, "/reset").await?;
                let done: Reset = client.send(Method::POST, &path, None, &[]).await?;
                let ended = words::count(done.ended.len(), "waiting run");
                answer(output, &done, &format!("generation {}; {ended} ended", done.generation))
            }),
            None => self.list(place, output),
        }
    }

    fn list(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let zone = output.zone()?;
        reading::block_on(async {
            let client = place.client(Need::Store).await?;
            let query = self.name.as_ref().map_or(String::new(), |name| format!("?{}", of_name(name)));
            let shown: Vec<Shown> = client.list(&format!("/api/v1/sessions{query}"), usize::MAX).await?;
            if let (true, Some(name)) = (shown.is_empty(), &self.name) {
                match name.contains('/') {
                    true => drop(client.get::<Value>(&schedule_path(name, "")?).await?),
                    false => drop(client.agent(name).await?),
                }
            }
            match output.format {
                Format::Table => print(&shown, client.now(), &zone),
                format => reading::print_items(format, shown),
            }
        })
    }
}

/// What a reset did.
#[derive(Serialize, Deserialize)]
struct Reset {
    generation: i64,
    ended: Vec<RunId>,
}

fn print(sessions: &[Shown], now: Timestamp, zone: &Zone) -> Result<(), Failure> {
    if sessions.is_empty() {
        reading::remark("no sessions; `belfry send AGENT KEY TEXT` begins one");
        return Ok(());
    }
    let mut sheet = Sheet::new(&[
        column("SESSION").wraps(40),
        column("ACTIVE").right(),
        column("QUEUED").right(),
        column("AT ONCE").right().rank(2),
        column("GENERATION").right().rank(4),
        column("CONTEXT").right().rank(3),
        column("LAST").rank(1),
    ]);
    for session in sessions {
        let context = match (session.tokens, session.context_window) {
            (Some(tokens), Some(window)) if window > 0 => {
                format!("{} %", tokens.saturating_mul(100) / window)
            }
            _ => String::new(),
        };
        sheet.row(vec![
            format!("{}/{}:{}", session.agent, session.schedule, words::one_line(&session.key, 60)),
            session.active.to_string(),
            session.queued.to_string(),
            session.max_concurrent.to_string(),
            session.generation.to_string(),
            context,
            words::short(session.used_at, now, zone),
        ]);
    }
    reading::print_text(&sheet.render())
}
