//! `belfry backfill`: runs for ticks of the past.

use belfry::{Backfill as Request, RunId};
use belfry_time::{Timestamp, Zone, parse_instant};
use clap::Args;
use serde::Serialize;

use crate::failure::{Failure, InOption};
use crate::noted::{Deed, noted};
use crate::output::{Format, Output};
use crate::place::Place;
use crate::reach::{self, Reach};
use crate::words;

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

#[derive(Serialize)]
struct Answer {
    dry_run: bool,
    runs: Vec<One>,
    /// Ticks whose run lives, or with --missing has ended.
    left_out: u64,
    /// Ticks beyond the limit.
    more: u64,
}

#[derive(Serialize)]
struct One {
    tick_at: Timestamp,
    run_id: Option<RunId>,
}

impl Backfill {
    /// Makes them.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        reach::split(&self.name)?;
        reach::block_on(async {
            let reach = Reach::open_with_files(place).await?;
            let record = reach.schedule(&self.name).await?;
            let zone = match (&output.tz, belfry::api::timing_of(&record)) {
                (None, Some(timing)) => timing.zone().clone(),
                _ => output.zone()?,
            };
            let request = self.request(&zone)?;
            let now = reach.now().await?;
            let options = reach.options();
            let backfill = belfry::backfill(&reach.store, &options, now, &record, &request);
            let done = match self.dry_run {
                true => backfill.await?,
                false => {
                    let deed =
                        Deed::to("backfill_schedule", format_args!("schedules/{}/backfill", self.name));
                    noted(&reach.store, deed, backfill, |done| !done.runs.is_empty()).await?
                }
            };
            if let Some(planned) = done.cut_at {
                reach::say(&format!("up to {}: what comes after it plans by itself", zone.rfc3339(planned)));
            }
            let runs = done.runs.into_iter().map(|(tick_at, run_id)| One { tick_at, run_id }).collect();
            let answer = Answer { dry_run: self.dry_run, runs, left_out: done.left_out, more: done.more };
            self.tell(&reach, output, &zone, &answer)
        })
    }

    fn request(&self, zone: &Zone) -> Result<Request, Failure> {
        let from = parse_instant(&self.from, Some(zone)).in_option("--from")?;
        let to = parse_instant(&self.to, Some(zone)).in_option("--to")?;
        if from >= to {
            return Err(Failure::Usage(format!(
                "--from must be before --to, got {} and {}",
                zone.rfc3339(from),
                zone.rfc3339(to)
            )));
        }
        let limit = usize::try_from(self.limit).unwrap_or(usize::MAX);
        Ok(Request { from, to, missing: self.missing, dry_run: self.dry_run, limit, key: None })
    }

    fn tell(&self, reach: &Reach, output: &Output, zone: &Zone, answer: &Answer) -> Result<(), Failure> {
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
            let why = if self.missing { "have a run" } else { "have a run that lives" };
            last.push_str(&format!("; {} {why}", words::count(answer.left_out as usize, "tick")));
        }
        if answer.more > 0 {
            last.push_str(&format!(
                "; {} left: raise --limit, or go on from there",
                words::count(answer.more as usize, "more tick")
            ));
        }
        lines.push(last);
        reach::answer(output, answer, &lines.join("\n"))?;
        if !self.dry_run && count > 0 && reach.server.is_none() {
            reach::say("no server runs: they wait for the next `belfry up`");
        }
        Ok(())
    }
}
