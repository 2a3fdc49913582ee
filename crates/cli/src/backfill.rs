//! `belfry backfill`: runs for ticks of the past.
//!
//! A run that is made so carries its tick like any other: the attempt is told of it, `why` and `--missing` find it, and a tick
//! lives at most once. That is why only ticks behind the planner are made: what it has still to plan it will, and two runs
//! for one tick would meet.

use belfry::{Options, RunId};
use belfry_core::TokenKind;
use belfry_core::check::Status;
use belfry_store::{Enqueue, Enqueued, NewRun, ScheduleRecord, Store, TickFate};
use belfry_time::{Anchor, Every, Kind, SignedDuration, Tick, Timestamp, Timing, Zone, parse_instant};
use clap::Args;
use serde::Serialize;

use crate::failure::{Failure, InOption};
use crate::output::{Format, Output};
use crate::place::Place;
use crate::reach::{self, Reach};
use crate::words;

/// Ticks that are looked at, made or not.
const WALKED_MAX: usize = 100_000;
const MICROSECOND: SignedDuration = SignedDuration::from_micros(1);

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
            let timing = self.timing(&record)?;
            let zone = match &output.tz {
                Some(_) => output.zone()?,
                None => timing.zone().clone(),
            };
            let now = reach.now().await?;
            let (from, end) = self.span(&record, now, &zone)?;
            let mut answer = Answer { dry_run: self.dry_run, runs: Vec::new(), left_out: 0, more: 0 };
            let mut walked = from;
            for tick in ticks(&timing, from, end).take(WALKED_MAX) {
                if answer.runs.len() as u64 == self.limit {
                    break;
                }
                walked = tick.tick_at;
                match self.is_wanted(&reach, &record, tick.tick_at).await? {
                    true => answer.runs.push(One { tick_at: tick.tick_at, run_id: None }),
                    false => answer.left_out += 1,
                }
            }
            if walked > from || !answer.runs.is_empty() {
                answer.more = timing.count_between(walked, earlier(end));
            }
            if !self.dry_run {
                make(&reach, &record, &reach.options(), now, &mut answer).await?;
            }
            self.tell(&reach, output, &zone, &answer)
        })
    }

    fn timing(&self, record: &ScheduleRecord) -> Result<Timing, Failure> {
        let compiled = record.definition.compile(&record.name).map_err(|detail| {
            Failure::Usage(format!("{} is invalid and has no ticks: {detail}", record.name))
        })?;
        let timing = compiled.timing.ok_or_else(|| {
            Failure::Usage(format!("{} runs on request and has no ticks to make up for", record.name))
        })?;
        if self.missing && follows_runs(&timing) {
            return Err(Failure::Usage(format!(
                "{} counts from its runs, so no past tick of it is missing. Without --missing it is counted from --from; `anchor: slot` gives it a grid",
                record.name
            )));
        }
        Ok(match record.origin {
            Some(origin) => timing.with_origin(origin),
            None => timing,
        })
    }

    /// The instants that are meant, the end not included: never further than the planner is.
    fn span(
        &self,
        record: &ScheduleRecord,
        now: Timestamp,
        zone: &Zone,
    ) -> Result<(Timestamp, Timestamp), Failure> {
        let from = parse_instant(&self.from, Some(zone)).in_option("--from")?;
        let to = parse_instant(&self.to, Some(zone)).in_option("--to")?;
        if from >= to {
            return Err(Failure::Usage(format!(
                "--from must be before --to, got {} and {}",
                zone.rfc3339(from),
                zone.rfc3339(to)
            )));
        }
        let planned = planned_until(record, now);
        if from >= planned {
            return Err(Failure::Usage(format!(
                "nothing of {} is in the past from {} on: what comes after {} it plans by itself",
                record.name,
                zone.rfc3339(from),
                zone.rfc3339(planned)
            )));
        }
        if to > planned {
            reach::say(&format!("up to {}: what comes after it plans by itself", zone.rfc3339(planned)));
        }
        Ok((from, to.min(planned)))
    }

    async fn is_wanted(
        &self,
        reach: &Reach,
        record: &ScheduleRecord,
        tick_at: Timestamp,
    ) -> Result<bool, Failure> {
        Ok(match reach.store.tick(record.id, tick_at).await? {
            TickFate::Run(run) => !run.state.is_live() && !self.missing,
            TickFate::Skipped(_) | TickFate::Open(_) | TickFate::Unknown => true,
        })
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

async fn make(
    reach: &Reach,
    record: &ScheduleRecord,
    options: &Options,
    now: Timestamp,
    answer: &mut Answer,
) -> Result<(), Failure> {
    let template = belfry::prepare(&reach.store, options, now, &record.name).await?;
    let mut kept = Vec::new();
    for (place, one) in answer.runs.drain(..).enumerate() {
        // They start in the order of their ticks: that of their first instants, a microsecond apart.
        let behind = SignedDuration::from_micros(place as i64);
        let run = NewRun {
            id: belfry::new_run_id(now),
            tick_at: Some(one.tick_at),
            trigger: belfry_core::Trigger::Backfill,
            not_before: now.checked_add(behind).unwrap_or(now),
            ..template.clone()
        };
        let id = run.id;
        match reach.store.enqueue(now, &Enqueue { run, key: None }).await? {
            Enqueued::Made => kept.push(One { run_id: Some(id), ..one }),
            // Somebody else makes up for the same ticks.
            Enqueued::Repeat(_) | Enqueued::KeyReused(_) => answer.left_out += 1,
            Enqueued::NotFound => {
                return Err(Failure::NotFound(format!(
                    "{} is gone; {} were made before",
                    record.name,
                    words::count(kept.len(), "run")
                )));
            }
        }
    }
    answer.runs = kept;
    Ok(())
}

/// The first instant whose ticks are still the planner's. It only moves forward, but for a pause, which `resume --catch-up`
/// may take up where it began.
fn planned_until(record: &ScheduleRecord, now: Timestamp) -> Timestamp {
    let after = |at: Timestamp| at.checked_add(MICROSECOND).unwrap_or(at);
    let planned = match (&record.status, record.token) {
        (Status::Paused { .. }, _) => after(record.status_since),
        // The first tick of an interval is the instant at which it was first seen.
        (_, Some(token))
            if matches!(token.kind, TokenKind::Tick | TokenKind::First | TokenKind::Deferred) =>
        {
            token.tick_at
        }
        (_, Some(token)) => after(token.tick_at),
        (_, None) => record.deferred.as_ref().map_or(now, |deferred| deferred.tick_at),
    };
    planned.min(now)
}

/// Whether ticks count from runs rather than on a grid of their own.
fn follows_runs(timing: &Timing) -> bool {
    matches!(
        timing.kind(),
        Kind::Every { every: Every::Interval(_), anchor: Anchor::Completion | Anchor::Start }
    )
}

/// The ticks from an instant on, up to another that is not included.
fn ticks(timing: &Timing, from: Timestamp, end: Timestamp) -> impl Iterator<Item = Tick> {
    let first = if follows_runs(timing) { timing.first(from) } else { timing.next(earlier(from)) };
    let rest = first.map(|first| timing.ticks(first.tick_at)).into_iter().flatten();
    first.into_iter().chain(rest).take_while(move |tick| tick.tick_at < end)
}

fn earlier(at: Timestamp) -> Timestamp {
    at.checked_sub(MICROSECOND).unwrap_or(at)
}
