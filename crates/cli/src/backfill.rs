//! `belfry backfill`: runs for ticks of the past.

use belfry::RunId;
use belfry::api::Schedule;
use belfry_time::{Timestamp, Zone};
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::client::{Client, schedule_path};
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::{Need, Place};
use crate::reach;
use crate::reading;
use crate::words;

/// Runs that are asked for at once.
const AT_ONCE: u64 = 1000;

/// Make runs for ticks of the past
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry backfill prices/poll --from 2026-03-01T00:00:00 --to 2026-03-02T00:00:00 --dry-run
  belfry backfill prices/poll --from 2026-03-01T00:00:00Z --to 2026-03-08T00:00:00Z --missing

They wait as pending runs in the order of their ticks, and count for limits and overlap; each is told its tick. A tick whose run
still lives is left out, and so is what the schedule has yet to plan by itself. The schedule, its prompt and its payload are those
of today.")]
pub struct Backfill {
    /// Which schedule
    #[arg(value_name = "AGENT/SCHEDULE")]
    name: String,

    /// The first instant: RFC 3339, or a date and time in the schedule's zone
    #[arg(long, value_name = "TIME")]
    from: String,

    /// The end, itself not included
    #[arg(long, value_name = "TIME")]
    to: String,

    /// Only ticks that made no run: skipped, missed, or never planned
    #[arg(long)]
    missing: bool,

    /// Show what would be made
    #[arg(long)]
    dry_run: bool,

    /// Make at most so many, the earliest
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    limit: u64,
}

#[derive(Default, Serialize, Deserialize)]
struct Answer {
    dry_run: bool,
    runs: Vec<One>,
    /// Ticks whose run lives, or with --missing has ended.
    left_out: u64,
    /// Ticks beyond the limit.
    more: u64,
    /// The first of them.
    next_from: Option<Timestamp>,
    /// Only up to here: what comes after, the schedule plans by itself.
    cut_at: Option<Timestamp>,
}

#[derive(Serialize, Deserialize)]
struct One {
    tick_at: Timestamp,
    run_id: Option<RunId>,
}

impl Answer {
    /// Joins what comes behind it.
    fn add(&mut self, part: Answer) {
        self.runs.extend(part.runs);
        self.left_out += part.left_out;
        (self.more, self.next_from, self.cut_at) = (part.more, part.next_from, part.cut_at);
    }
}

impl Backfill {
    /// Makes them.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        reach::split(&self.name)?;
        reach::block_on(async {
            let client = place.client(Need::Files).await?;
            let schedule: Schedule = client.get(&schedule_path(&self.name, "")?).await?;
            let zone = match (&output.tz, Zone::get(&schedule.timezone)) {
                (None, Ok(zone)) => zone,
                _ => output.zone()?,
            };
            let (from, to) = self.span(&zone)?;
            let mut all = Answer { dry_run: self.dry_run, next_from: Some(from), ..Answer::default() };
            let mut failed = None;
            // A server makes so many at once that it answers soon.
            while let Some(from) = all.next_from.filter(|_| (all.runs.len() as u64) < self.limit) {
                match self.part(&client, from, to, self.limit - all.runs.len() as u64).await {
                    Ok(part) => all.add(part),
                    Err(failure) => {
                        failed = Some(failure);
                        break;
                    }
                }
            }
            // What was made is told, also where the rest fails.
            if let Some(failure) = failed.take_if(|_| all.runs.is_empty()) {
                return Err(failure);
            }
            if let Some(planned) = all.cut_at {
                reach::say(&format!(
                    "up to {}: what comes after it plans by itself, or when it is resumed",
                    zone.rfc3339(planned)
                ));
            }
            let told = self.tell(&client, output, &zone, &all);
            failed.map_or(told, Err)
        })
    }

    async fn part(
        &self,
        client: &Client,
        from: Timestamp,
        to: Timestamp,
        most: u64,
    ) -> Result<Answer, Failure> {
        let body = json!({
            "from": from, "to": to, "missing": self.missing, "dry_run": self.dry_run, "limit": most.min(AT_ONCE),
        });
        client.post(&schedule_path(&self.name, "/backfill")?, &body).await
    }

    fn span(&self, zone: &Zone) -> Result<(Timestamp, Timestamp), Failure> {
        let from = reading::local(&self.from, "--from", zone)?;
        let to = reading::local(&self.to, "--to", zone)?;
        if from >= to {
            return Err(Failure::Usage(format!(
                "--from must be before --to, got {} and {}",
                zone.rfc3339(from),
                zone.rfc3339(to)
            )));
        }
        Ok((from, to))
    }

    fn tell(&self, client: &Client, output: &Output, zone: &Zone, answer: &Answer) -> Result<(), Failure> {
        let count = answer.runs.len();
        let (made, runs) = (if self.dry_run { "would make" } else { "made" }, words::count(count, "run"));
        let mut lines: Vec<String> = Vec::new();
        if self.dry_run && output.format == Format::Table {
            lines.extend(answer.runs.iter().map(|one| crate::up::local(one.tick_at, zone)));
        }
        let mut last = format!("{made} {runs} of {}", self.name);
        if let (Some(first), Some(newest)) = (answer.runs.first(), answer.runs.last()) {
            let (first, newest) =
                (crate::up::local(first.tick_at, zone), crate::up::local(newest.tick_at, zone));
            last.push_str(&format!(", from {first} to {newest}"));
        }
        if answer.left_out > 0 {
            let have = if answer.left_out == 1 { "has" } else { "have" };
            let run = if self.missing { "a run" } else { "a run that lives" };
            last.push_str(&format!("; {} {have} {run}", words::count(answer.left_out as usize, "tick")));
        }
        if let Some(next) = answer.next_from {
            let more = words::count(answer.more as usize, "more tick");
            last.push_str(&format!(
                "; {more} left: raise --limit, or go on with --from {}",
                zone.rfc3339(next)
            ));
        }
        lines.push(last);
        reach::answer(output, answer, &lines.join("\n"))?;
        if !self.dry_run && count > 0 && !client.is_served() {
            reach::say("no server runs: they wait for the next `belfry up`");
        }
        Ok(())
    }
}
