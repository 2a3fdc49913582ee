//! `belfry show`: everything about one schedule, in words.

use std::fmt::Write;

use belfry::api::{About, NextTick, Run, Schedule, ScheduleStatus};
use belfry::{Decision, RunId};
use belfry_core::SkipReason;
use belfry_time::{Timestamp, Zone};
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::client::{of_name, schedule_path};
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::{Need, Place};
use crate::reading;
use crate::runs;
use crate::sheet::{self, Sheet, column};
use crate::words;

/// Runs that are shown.
const LAST: usize = 5;

/// Show everything about a schedule
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry show reporter/morning
  belfry show reporter/morning --tz UTC
  belfry show reporter/morning -o json")]
pub struct Show {
    /// Which schedule
    #[arg(value_name = "AGENT/SCHEDULE")]
    name: String,
}

impl Show {
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        reading::block_on(async {
            let client = place.client(Need::Store).await?;
            let shown: Shown = client.get(&schedule_path(&self.name, "")?).await?;
            if output.format != Format::Table {
                return reading::print_item(output.format, &shown);
            }
            // In its own zone, unless another one is asked for.
            let zone = match (&output.tz, Zone::get(&shown.schedule.timezone)) {
                (None, Ok(zone)) => zone,
                _ => output.zone()?,
            };
            let next = match shown.schedule.next {
                Some(_) => client.get::<Next>(&schedule_path(&self.name, "/next?n=3")?).await?.ticks,
                None => Vec::new(),
            };
            let runs = format!("/api/v1/runs?{}", of_name(&self.name));
            let runs: Vec<Run> = client.list(&runs, LAST).await?;
            let now = client.now();
            let mut text = describe(&shown, &next, now, &zone);
            if !runs.is_empty() {
                text.push_str(&format!("\n{}", runs::sheet(&runs, now, &zone, false).render()));
            }
            if !shown.skips.is_empty() {
                text.push_str(&format!("\n{}", skips(&shown.skips, now, &zone).render()));
            }
            reading::print_text(&text)
        })
    }
}

/// A schedule with everything about it.
#[derive(Serialize, Deserialize)]
struct Shown {
    #[serde(flatten)]
    schedule: Schedule,
    definition: Map<String, Value>,
    #[serde(flatten)]
    about: About,
    skips: Vec<Skips>,
}

/// Ticks in a row that made no run.
#[derive(Serialize, Deserialize)]
struct Skips {
    from: Timestamp,
    to: Timestamp,
    count: u64,
    decision: Decision,
    reason: SkipReason,
    run_id: Option<RunId>,
}

/// Ticks to come.
#[derive(Deserialize)]
struct Next {
    ticks: Vec<NextTick>,
}

fn describe(shown: &Shown, next: &[NextTick], now: Timestamp, zone: &Zone) -> String {
    let Shown { schedule, about, .. } = shown;
    let mut lines = Lines { text: format!("{}\n", schedule.name()), last: "" };
    let expression =
        schedule.expression.as_deref().map_or(String::new(), |text| format!(" ({} {text:?})", schedule.kind));
    lines.add("when", format!("{}, {}{expression}", schedule.words, schedule.timezone));
    lines.add("status", status(schedule, now, zone));
    for tick in next {
        let jitter = if tick.due_at == tick.tick_at {
            String::new()
        } else {
            format!(", with jitter at {}", zone.local(tick.due_at).strftime("%H:%M:%S%.3f"))
        };
        let away = tick.due_at.duration_since(now);
        let away = match away.as_secs() {
            1.. => format!("in {}", words::rough(away)),
            0 => "now".into(),
            _ => format!("due {} ago", words::rough(-away)),
        };
        lines.add("next", format!("{}, {away}{jitter}", words::long(tick.tick_at, zone)));
    }
    if let Some(run) = about.waits_for {
        lines.add("next", format!("after the end of run {run}"));
    }
    lines.add("live", format!("{} running, {} pending", schedule.running, schedule.pending));
    if let Some(last) = &schedule.last {
        let ago = words::rough(now.duration_since(last.finished_at));
        lines.add("last", format!("{} {ago} ago, streak {:+}", last.state, schedule.streak));
    }
    if let Some(at) = schedule.last_success_at {
        lines.add("success", format!("{} ago", words::rough(now.duration_since(at))));
    }
    if let Some(error) = &schedule.last_error {
        lines.add("error", words::one_line(error, 300));
    }
    if let Some(at) = schedule.next_retry_at {
        lines.add("retry", format!("in {}", words::rough(at.duration_since(now))));
    }
    if let Some(budget) = &schedule.budget {
        let left = words::rough(budget.resets_at.duration_since(now));
        lines.add("budget", format!("{} of {} failures, cleared in {left}", budget.failures, budget.max));
    }
    lines.add("does", words::one_line(&about.does, 300));
    if let Some(prompt) = &about.prompt {
        lines.add("prompt", words::one_line(prompt, 300));
    }
    if let Some(payload) = shown.definition.get("payload") {
        lines.add("payload", words::one_line(&payload.to_string(), 300));
    }
    lines.add("policy", about.policy.clone());
    lines.add("limits", about.limits.clone());
    lines.add("from", format!("{}, revision {}", schedule.origin, schedule.revision));
    lines.text
}

/// Names on the left, once each.
struct Lines {
    text: String,
    last: &'static str,
}

impl Lines {
    fn add(&mut self, name: &'static str, value: String) {
        let shown = if name == self.last { "" } else { name };
        self.last = name;
        let room = sheet::width().map(|width| width.saturating_sub(11).max(20));
        let value = words::wrapped(&words::one_line(&value, usize::MAX), room).replace('\n', "\n           ");
        // Writing to a text does not fail.
        let _ = writeln!(self.text, "  {shown:<9}{value}");
    }
}

fn status(schedule: &Schedule, now: Timestamp, zone: &Zone) -> String {
    let since = format!("for {}", words::rough(now.duration_since(schedule.status_since)));
    let reason = schedule
        .reason
        .as_deref()
        .map_or(String::new(), |reason| format!(": {}", words::one_line(reason, 300)));
    let until = match (schedule.status, schedule.paused_until) {
        (ScheduleStatus::Paused, Some(until)) => format!(", until {}", words::long(until, zone)),
        _ => String::new(),
    };
    format!("{} {since}{until}{reason}", schedule.status.as_str())
}

fn skips(ranges: &[Skips], now: Timestamp, zone: &Zone) -> Sheet {
    let mut sheet = Sheet::new(&[
        column("SKIPPED"),
        column("TICKS").right(),
        column("FROM"),
        column("TO").rank(1),
        column("BECAUSE").rank(2).wraps(30),
    ]);
    for range in ranges {
        sheet.row(vec![
            range.reason.as_str().into(),
            range.count.to_string(),
            words::short(range.from, now, zone),
            words::short(range.to, now, zone),
            belfry::skip_words(range.reason).into(),
        ]);
    }
    sheet
}
