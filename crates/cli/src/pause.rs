//! `belfry pause`: schedules stand still until somebody resumes them, or until a time.

use belfry::api::Schedule;
use belfry_time::{Timestamp, Zone, parse_duration};
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::client::{Client, of_name, schedule_path};
use crate::failure::{Failure, InOption};
use crate::output::Output;
use crate::place::{Need, Place};
use crate::reach;
use crate::reading;

/// Pause schedules: no tick makes a run until they are resumed
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry pause reporter/morning --reason \"maintenance\"
  belfry pause reporter prices/poll --for 2h
  belfry pause reporter/morning --until 2027-02-03T09:00:00+01:00

A pause survives restarts and reloads. What runs goes on, and a run by hand is still possible. An agent's name alone means all
its schedules. Another pause takes the place of the first.")]
pub struct Pause {
    /// Which schedules; an agent's name alone means all of its
    #[arg(value_name = "AGENT[/SCHEDULE]", required = true)]
    names: Vec<String>,

    /// Why, for whoever asks
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,

    /// Until this time: RFC 3339, or a local date and time
    #[arg(long, value_name = "TIME", conflicts_with = "for")]
    until: Option<String>,

    /// For so long
    #[arg(long = "for", id = "for", value_name = "DURATION")]
    long: Option<String>,
}

#[derive(Serialize)]
struct Answer {
    paused: Vec<String>,
    until: Option<Timestamp>,
    unchanged: Vec<String>,
}

impl Pause {
    /// Pauses them.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let zone = output.zone()?;
        reach::block_on(async {
            let client = place.client(Need::Store).await?;
            let schedules = all_of(&client, &self.names).await?;
            let until = self.until(client.now(), &zone)?;
            let end = match until {
                Some(until) => format!("until {}", crate::up::local(until, &zone)),
                None => "until it is resumed".into(),
            };
            let body = json!({"reason": self.reason, "until": until});
            let mut answer = Answer { paused: Vec::new(), until, unchanged: Vec::new() };
            let mut lines = Vec::new();
            for name in schedules {
                let why = match client.post::<Paused>(&schedule_path(&name, "/pause")?, &body).await {
                    Ok(Paused { changed: true }) => {
                        lines.push(format!("{name} paused {end}"));
                        answer.paused.push(name);
                        continue;
                    }
                    Ok(Paused { changed: false }) => "it is paused like that already".to_owned(),
                    // Of several, those that cannot be paused need not be.
                    Err(Failure::Usage(why)) if self.names != [name.as_str()] => why,
                    Err(other) => return Err(other),
                };
                let why = why.strip_prefix(&format!("{name} cannot be paused: ")).unwrap_or(&why);
                lines.push(format!("{name} left as it is: {why}"));
                answer.unchanged.push(name);
            }
            reach::answer(output, &answer, &lines.join("\n"))
        })
    }

    fn until(&self, now: Timestamp, zone: &Zone) -> Result<Option<Timestamp>, Failure> {
        let until = match (&self.until, &self.long) {
            (Some(text), _) => reading::local(text, "--until", zone)?,
            (None, Some(text)) => {
                let long = parse_duration(text).in_option("--for")?;
                now.checked_add(long)
                    .map_err(|_| Failure::Usage(format!("--for {text} is beyond all time")))?
            }
            (None, None) => return Ok(None),
        };
        if until <= now {
            return Err(Failure::Usage(format!(
                "a pause must end in the future: {} has passed, it is {}",
                zone.rfc3339(until),
                zone.rfc3339(now)
            )));
        }
        Ok(Some(until))
    }
}

/// What a pause did.
#[derive(Deserialize)]
struct Paused {
    changed: bool,
}

/// The schedules that are meant, each once.
pub async fn all_of(client: &Client, names: &[String]) -> Result<Vec<String>, Failure> {
    let mut all: Vec<String> = Vec::new();
    for name in names {
        let meant: Vec<Schedule> = if name.contains('/') {
            vec![client.get(&schedule_path(name, "")?).await?]
        } else {
            client.agent(name).await?;
            client.list(&format!("/api/v1/schedules?{}", of_name(name)), usize::MAX).await?
        };
        if meant.is_empty() {
            return Err(Failure::NotFound(format!("agent {name} has no schedules")));
        }
        for schedule in meant.iter().map(Schedule::name) {
            if !all.contains(&schedule) {
                all.push(schedule);
            }
        }
    }
    Ok(all)
}
