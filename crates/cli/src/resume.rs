//! `belfry resume`: the end of a pause, by hand.

use belfry_core::check::Status;
use belfry_core::plan::left_out;
use belfry_core::{SkipRange, SkipReason};
use belfry_store::{ScheduleRecord, Store};
use belfry_time::Timestamp;
use clap::Args;
use serde::Serialize;

use crate::failure::Failure;
use crate::output::Output;
use crate::pause::all_of;
use crate::place::Place;
use crate::reach::{self, Reach};

/// Resume schedules that were paused: they tick from now on
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry resume reporter/morning
  belfry resume reporter
  belfry resume prices/poll --catch-up

What the pause left out is recorded as skipped. With --catch-up it counts as missed instead, and the schedule's `catch_up` says
what becomes of it.")]
pub struct Resume {
    /// Which schedules; an agent's name alone means all of its
    #[arg(value_name = "AGENT[/SCHEDULE]", required = true)]
    names: Vec<String>,

    /// Go on from where the pause began, as after downtime
    #[arg(long)]
    catch_up: bool,
}

#[derive(Serialize)]
struct Answer {
    resumed: Vec<One>,
    unchanged: Vec<String>,
}

#[derive(Serialize)]
struct One {
    schedule: String,
    /// Ticks that the pause left out.
    skipped: u64,
}

impl Resume {
    /// Resumes them.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let zone = output.zone()?;
        reach::block_on(async {
            let reach = Reach::open(place).await?;
            let now = reach.now().await?;
            let mut answer = Answer { resumed: Vec::new(), unchanged: Vec::new() };
            let mut lines = Vec::new();
            for record in all_of(&reach, &self.names).await? {
                if let Some(until) = ended_by_itself(&record, now) {
                    let until = crate::up::local(until, &zone);
                    lines.push(format!("{} left as it is: its pause has ended at {until}", record.name));
                    answer.unchanged.push(record.name);
                    continue;
                }
                let skipped = self.skipped(&record, now);
                if !reach.store.resume(now, record.id, self.catch_up, skipped).await? {
                    lines.push(format!("{} left as it is: it is not paused", record.name));
                    answer.unchanged.push(record.name);
                    continue;
                }
                let count = skipped.map_or(0, |range| range.count);
                lines.push(match (self.catch_up, count) {
                    (true, _) => format!("{} resumed from where the pause began", record.name),
                    (false, 0) => format!("{} resumed", record.name),
                    (false, count) => format!("{} resumed; the pause left out {count} ticks", record.name),
                });
                answer.resumed.push(One { schedule: record.name, skipped: count });
            }
            reach::answer(output, &answer, &lines.join("\n"))
        })
    }

    /// What the pause has left out, to be recorded; the same that the end of a pause by the clock records.
    fn skipped(&self, record: &ScheduleRecord, now: Timestamp) -> Option<SkipRange> {
        if self.catch_up || !matches!(record.status, Status::Paused { .. }) {
            return None;
        }
        let timing = record.definition.compile(&record.name).ok()?.timing?;
        let timing = match record.origin {
            Some(origin) => timing.with_origin(origin),
            None => timing,
        };
        left_out(&timing, SkipReason::Disabled, record.status_since, now)
    }
}

/// A pause whose end has come is over, also where nobody has planned since: what was due after it is not left out.
fn ended_by_itself(record: &ScheduleRecord, now: Timestamp) -> Option<Timestamp> {
    match record.status {
        Status::Paused { until, .. } => until.filter(|until| *until <= now),
        _ => None,
    }
}
