//! `belfry resume`: the end of a pause, by hand.

use belfry::Resumed;
use clap::Args;
use serde::Serialize;

use crate::failure::Failure;
use crate::noted::{Deed, noted};
use crate::output::Output;
use crate::pause::all_of;
use crate::place::Place;
use crate::reach::{self, Reach};
use crate::remote;

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
            if let Some(client) = place.client()? {
                return remote::resume(&client, &self.names, self.catch_up, output).await;
            }
            let reach = Reach::open(place).await?;
            let now = reach.now().await?;
            let mut answer = Answer { resumed: Vec::new(), unchanged: Vec::new() };
            let mut lines = Vec::new();
            for record in all_of(&reach, &self.names).await? {
                let resume = belfry::resume(&reach.store, now, &record, self.catch_up);
                let deed = Deed::to("resume_schedule", format_args!("schedules/{}/resume", record.name));
                let is_now = |resumed: &Resumed| matches!(resumed, Resumed::Now { .. });
                let count = match noted(&reach.store, deed, resume, is_now).await? {
                    Resumed::Now { skipped } => skipped,
                    Resumed::Before(until) => {
                        let until = crate::up::local(until, &zone);
                        lines.push(format!("{} left as it is: its pause has ended at {until}", record.name));
                        answer.unchanged.push(record.name);
                        continue;
                    }
                    Resumed::NotPaused => {
                        lines.push(format!("{} left as it is: it is not paused", record.name));
                        answer.unchanged.push(record.name);
                        continue;
                    }
                };
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
}
