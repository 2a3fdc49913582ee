//! `belfry show`: everything about one schedule, in words.

use std::fmt::Write;

use belfry::AgentDefinition;
use belfry::api::{self, Schedule, ScheduleStatus};
use belfry_core::definition::{AnchorName, CatchUp, IfRunning, Scope};
use belfry_core::work::Action;
use belfry_store::{RunFilter, ScheduleRecord, Store};
use belfry_time::{SignedDuration, Timestamp, Zone, format_duration};
use clap::Args;

use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::Place;
use crate::reading::{self, Reading};
use crate::runs;
use crate::sheet::{self, Sheet, column};
use crate::words;

/// Runs and ranges of skips that are shown.
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
            let reading = Reading::open(place).await?;
            let record = reading.schedule(&self.name).await?;
            let agent = reading.agent_of(&record).await?;
            let schedule = Schedule::of(&record, &agent, reading.now);
            if output.format != Format::Table {
                return reading::print_item(output.format, &schedule);
            }
            // In its own zone, unless another one is asked for.
            let zone = match (&output.tz, Zone::get(&schedule.timezone)) {
                (None, Ok(zone)) => zone,
                _ => output.zone()?,
            };
            let text = describe(&record, &agent, &schedule, reading.now, &zone);
            reading::print_text(&text)?;
            print_runs(&reading, &record, &zone).await?;
            print_skips(&reading, &record, &zone).await
        })
    }
}

fn describe(
    record: &ScheduleRecord,
    agent: &AgentDefinition,
    schedule: &Schedule,
    now: Timestamp,
    zone: &Zone,
) -> String {
    let mut lines = Lines { text: format!("{}\n", schedule.name()), last: "" };
    let expression = schedule
        .expression
        .as_deref()
        .map_or(String::new(), |text| format!("  ({} {text:?})", schedule.kind));
    lines.add("when", format!("{}, {}{expression}", schedule.words, schedule.timezone));
    lines.add("status", status(schedule, now, zone));
    for tick in api::upcoming(record, 3) {
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
    if let Some(run) = record.waits_for {
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
    lines.add("does", does(record, agent));
    let prompt = record.definition.options.prompt.as_ref().or(agent.work.prompt.as_ref());
    if let Some(prompt) = prompt {
        lines.add("prompt", words::one_line(prompt, 300));
    }
    if !record.definition.options.payload.is_empty() {
        let payload = serde_json::to_string(&record.definition.options.payload).unwrap_or_default();
        lines.add("payload", words::one_line(&payload, 300));
    }
    lines.add("policy", policy(record));
    lines.add("limits", limits(schedule, agent));
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
        let value = words::wrapped(&value, room).replace('\n', "\n           ");
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

fn does(record: &ScheduleRecord, agent: &AgentDefinition) -> String {
    let command = &record.definition.options.command;
    let named = if command == "poll" { String::new() } else { format!(" (command {command})") };
    let what = match agent.work.action_of(command) {
        Action::Run(words) => format!("run {}", words.join(" ")),
        Action::Shell(line) => format!("shell {line}"),
        Action::Handler => "a Rust handler".into(),
    };
    words::one_line(&what, 300) + &named
}

fn policy(record: &ScheduleRecord) -> String {
    let options = &record.definition.options;
    let mut parts = Vec::new();
    let if_running = match options.if_running {
        IfRunning::Skip => "skip".to_owned(),
        IfRunning::Queue => format!("queue (at most {})", options.max_pending),
        IfRunning::Cancel => "cancel".into(),
        IfRunning::Allow => "allow".into(),
    };
    let scope = match options.overlap {
        Scope::Schedule => "",
        Scope::Command => " of any run of the command",
        Scope::Agent => " of any run of the agent",
    };
    parts.push(format!("if_running {if_running}{scope}"));
    if let Ok(compiled) = record.definition.compile(&record.name) {
        parts.push(match compiled.catch_up() {
            CatchUp::Skip => "catch_up skip".into(),
            CatchUp::RunOnce => "catch_up run_once".into(),
            CatchUp::RunAll => format!("catch_up run_all (at most {})", options.catch_up_limit),
        });
    }
    if matches!(record.definition.when, belfry::When::Every(_)) {
        parts.push(match options.anchor {
            AnchorName::Completion => "counted from the end of each run".into(),
            AnchorName::Start => "counted from each tick".into(),
            AnchorName::Slot => "on a grid".into(),
        });
    }
    parts.extend(options.jitter.as_ref().map(|jitter| format!("jitter {jitter}")));
    if options.delete_after_run {
        parts.push("deleted after its run".into());
    }
    parts.join(" · ")
}

fn limits(schedule: &Schedule, agent: &AgentDefinition) -> String {
    let ms = |ms: u64| format_duration(SignedDuration::from_millis(i64::try_from(ms).unwrap_or(i64::MAX)));
    let mut parts = vec![format!("lane {}", schedule.lane)];
    parts.push(agent.max_concurrent.map_or("any number at once".into(), |max| format!("{max} at once")));
    parts.push(
        agent.work.timeout_ms.map_or("no timeout".into(), |timeout| format!("timeout {}", ms(timeout))),
    );
    parts.push(match agent.retry.max {
        0 => "no retry".into(),
        1 => "1 retry".into(),
        max => format!("{max} retries"),
    });
    if let Some(breaker) = &agent.breaker {
        parts.push(format!(
            "breaker after {} failures for {}",
            breaker.threshold,
            ms(breaker.reset_after_ms)
        ));
    }
    if !agent.needs.is_empty() {
        parts.push(format!("needs {}", agent.needs.join(", ")));
    }
    parts.join(" · ")
}

async fn print_runs(reading: &Reading, record: &ScheduleRecord, zone: &Zone) -> Result<(), Failure> {
    let filter = RunFilter { schedule: Some(record.name.clone()), ..RunFilter::default() };
    let runs: Vec<_> = reading.runs(&filter, LAST).await?.iter().map(api::Run::of).collect();
    if runs.is_empty() {
        return Ok(());
    }
    reading::print_text(&format!("\n{}", runs::sheet(&runs, reading.now, zone, false).render()))
}

async fn print_skips(reading: &Reading, record: &ScheduleRecord, zone: &Zone) -> Result<(), Failure> {
    let mut ranges = reading.store.skips(record.id, None, 10_000).await?;
    ranges.extend(record.open_skip);
    if ranges.is_empty() {
        return Ok(());
    }
    let mut sheet = Sheet::new(&[
        column("SKIPPED"),
        column("TICKS").right(),
        column("FROM"),
        column("TO").rank(1),
        column("BECAUSE").rank(2).wraps(30),
    ]);
    for range in ranges.iter().rev().take(LAST) {
        sheet.row(vec![
            range.reason.as_str().into(),
            range.count.to_string(),
            words::short(range.from, reading.now, zone),
            words::short(range.to, reading.now, zone),
            belfry::skip_words(range.reason).into(),
        ]);
    }
    reading::print_text(&format!("\n{}", sheet.render()))
}
