//! `belfry sessions`: conversations, and beginning them anew.

use std::collections::HashMap;

use belfry::SessionVerb;
use belfry::api::Session as Shown;
use belfry_store::{SessionFilter, SessionRecord, Store};
use belfry_time::{Timestamp, Zone};
use clap::{Args, Subcommand};
use serde_json::json;

use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::Place;
use crate::reach::{self, Reach, answer};
use crate::reading::{self, Reading};
use crate::remote_talk;
use crate::sheet::{Sheet, column};
use crate::stop::Session;
use crate::words;

const PAGE: u32 = 500;

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
                if let Some(client) = place.client()? {
                    let session = remote_talk::reset(&client, session.names()).await?;
                    let generation = session.generation;
                    return answer(
                        output,
                        &json!({"generation": generation}),
                        &format!("generation {generation}"),
                    );
                }
                let reach = Reach::open(place).await?;
                let done = session.change(&reach, SessionVerb::Reset).await?;
                let words = format!(
                    "generation {}; {} ended",
                    done.generation,
                    words::count(done.ended.len(), "waiting run")
                );
                answer(output, &json!({"generation": done.generation, "ended": done.ended}), &words)
            }),
            None => self.list(place, output),
        }
    }

    fn list(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let zone = output.zone()?;
        reading::block_on(async {
            if let Some(client) = place.client()? {
                let shown = remote_talk::sessions(&client, self.name.as_deref()).await?;
                return match output.format {
                    Format::Table => print(&shown, Timestamp::now(), &zone),
                    format => reading::print_items(format, shown),
                };
            }
            let reading = Reading::open(place).await?;
            let is_schedule = self.name.as_ref().is_some_and(|name| name.contains('/'));
            let filter = SessionFilter {
                agent: self.name.clone().filter(|_| !is_schedule),
                schedule: self.name.clone().filter(|_| is_schedule),
                key: None,
            };
            let found = all(&reading, &filter).await?;
            if let (true, Some(name)) = (found.is_empty(), &self.name) {
                match is_schedule {
                    true => drop(reading.schedule(name).await?),
                    false => reading.check_agent(name).await?,
                }
            }
            let mut schedules = HashMap::new();
            for record in &found {
                if !schedules.contains_key(&record.name) {
                    schedules.insert(record.name.clone(), reading.store.schedule(&record.name).await?);
                }
            }
            let shown: Vec<Shown> = found
                .iter()
                .map(|record| Shown::of(record, schedules.get(&record.name).and_then(Option::as_ref)))
                .collect();
            match output.format {
                Format::Table => print(&shown, reading.now, &zone),
                format => reading::print_items(format, shown),
            }
        })
    }
}

async fn all(reading: &Reading, filter: &SessionFilter) -> Result<Vec<SessionRecord>, Failure> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let page = reading.store.sessions(filter, after, PAGE).await?;
        all.extend(page.items);
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(all),
        }
    }
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
