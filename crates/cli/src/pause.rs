//! `belfry pause`: schedules stand still until somebody resumes them, or until a time.

use belfry_core::check::Status;
use belfry_store::{ScheduleRecord, Store};
use belfry_time::{Timestamp, Zone, parse_duration, parse_instant};
use clap::Args;
use serde::Serialize;

use crate::failure::{Failure, InOption};
use crate::noted::{Deed, noted};
use crate::output::Output;
use crate::place::Place;
use crate::reach::{self, Reach};
use crate::remote;

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
            if let Some(client) = place.client()? {
                let (until, reason) = (self.until(Timestamp::now(), &zone)?, self.reason.as_deref());
                return remote::pause(&client, &self.names, reason, until, &zone, output).await;
            }
            let reach = Reach::open(place).await?;
            let now = reach.now().await?;
            let until = self.until(now, &zone)?;
            let mut answer = Answer { paused: Vec::new(), until, unchanged: Vec::new() };
            let mut lines = Vec::new();
            for record in all_of(&reach, &self.names).await? {
                let pause = reach.store.pause(now, record.id, self.reason.as_deref(), until);
                let deed = Deed::to("pause_schedule", format_args!("schedules/{}/pause", record.name));
                let paused = noted(&reach.store, deed, pause, |paused| *paused).await?;
                let end = match until {
                    Some(until) => format!("until {}", crate::up::local(until, &zone)),
                    None => "until it is resumed".into(),
                };
                if paused {
                    lines.push(format!("{} paused {end}", record.name));
                    answer.paused.push(record.name);
                    continue;
                }
                let why = cannot(&record);
                // Of several, those that cannot be paused need not be.
                if self.names.len() == 1 && self.names[0] == record.name && !is_paused(&record) {
                    return Err(Failure::Usage(format!("{} cannot be paused: {why}", record.name)));
                }
                lines.push(format!("{} left as it is: {why}", record.name));
                answer.unchanged.push(record.name);
            }
            reach::answer(output, &answer, &lines.join("\n"))
        })
    }

    fn until(&self, now: Timestamp, zone: &Zone) -> Result<Option<Timestamp>, Failure> {
        let until = match (&self.until, &self.long) {
            (Some(text), _) => parse_instant(text, Some(zone)).in_option("--until")?,
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

/// The schedules that are meant, each once.
pub async fn all_of(reach: &Reach, names: &[String]) -> Result<Vec<ScheduleRecord>, Failure> {
    let mut records: Vec<ScheduleRecord> = Vec::new();
    for name in names {
        for record in reach.schedules(name).await? {
            if records.iter().all(|known| known.id != record.id) {
                records.push(record);
            }
        }
    }
    Ok(records)
}

fn is_paused(record: &ScheduleRecord) -> bool {
    matches!(record.status, Status::Paused { .. })
}

fn cannot(record: &ScheduleRecord) -> &'static str {
    match record.status {
        Status::Active => "it has changed meanwhile",
        Status::Paused { .. } => "it is paused like that already",
        Status::Disabled => "it is disabled, `enabled: false`",
        Status::Invalid { .. } => "it is invalid and does not tick",
        Status::Exhausted => "it has fired for the last time",
    }
}
