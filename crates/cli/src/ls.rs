//! `belfry ls`: all schedules, the next first, as `systemctl list-timers` shows timers.

use belfry::api::{Schedule, ScheduleStatus};
use belfry_core::RunState;
use belfry_time::{Timestamp, Zone};
use clap::Args;
use comfy_table::Color;

use crate::client::encoded;
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::{Need, Place};
use crate::reading;
use crate::sheet::{self, Sheet, column};
use crate::words;

/// Terminals narrower than this show short times.
const WIDE: u16 = 120;

/// List schedules, the next first
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry ls
  belfry ls reporter
  belfry ls -o json | jq '.items[] | select(.status != \"active\")'

STREAK counts runs in a row that ended alike: successes above zero, failures below. Times are local unless --tz names a zone.")]
pub struct Ls {
    /// Only those of this agent
    agent: Option<String>,
}

impl Ls {
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let zone = output.zone()?;
        reading::block_on(async {
            let client = place.client(Need::Store).await?;
            let path = match &self.agent {
                Some(agent) => {
                    client.agent(agent).await?;
                    format!("/api/v1/schedules?agent={}", encoded(agent))
                }
                None => "/api/v1/schedules".to_owned(),
            };
            let schedules: Vec<Schedule> = client.list(&path, usize::MAX).await?;
            match output.format {
                Format::Table => print(schedules, client.now(), &zone),
                format => reading::print_items(format, schedules),
            }
        })
    }
}

fn print(mut schedules: Vec<Schedule>, now: Timestamp, zone: &Zone) -> Result<(), Failure> {
    if schedules.is_empty() {
        reading::remark("no schedules");
        return Ok(());
    }
    schedules
        .sort_by_key(|schedule| (place(schedule), schedule.next.map(|next| next.due_at), schedule.name()));
    let wide = sheet::width().is_none_or(|width| width >= WIDE);
    let time = |at: Timestamp| if wide { words::long(at, zone) } else { words::short(at, now, zone) };
    let mut sheet = Sheet::new(&[
        column("NEXT"),
        column("LEFT").right(),
        column("LAST").rank(4),
        column("PASSED").right().rank(1),
        column("RESULT"),
        column("STREAK").right().rank(2),
        column("LANE").rank(3),
        column("NAME").wraps(40),
    ]);
    for schedule in &schedules {
        let next = schedule.next.filter(|_| schedule.status == ScheduleStatus::Active);
        let fired = schedule.last.map(|last| last.tick_at.unwrap_or(last.finished_at));
        let result = result(schedule);
        sheet.row(vec![
            next.map_or_else(|| standing(schedule).into(), |next| time(next.due_at)),
            next.map_or_else(String::new, |next| left(now, next.due_at)),
            fired.map_or_else(String::new, time),
            fired.map_or_else(String::new, |fired| words::rough(now.duration_since(fired))),
            result.clone(),
            if schedule.streak == 0 { String::new() } else { format!("{:+}", schedule.streak) },
            schedule.lane.clone(),
            schedule.name(),
        ]);
        sheet.colour("RESULT", colour(&result));
        let faint = match schedule.status {
            ScheduleStatus::Active => None,
            ScheduleStatus::Invalid => Some(Color::Red),
            ScheduleStatus::Paused | ScheduleStatus::Exhausted => Some(Color::Yellow),
        };
        sheet.colour("NEXT", faint);
    }
    reading::print_text(&sheet.render())?;
    reading::remark(&format!("\n{}, times in {zone}", words::count(schedules.len(), "schedule")));
    Ok(())
}

/// Those that tick by themselves, then those that wait for something else, then those that do not run.
fn place(schedule: &Schedule) -> u8 {
    match (schedule.status, schedule.next) {
        (ScheduleStatus::Active, Some(_)) => 0,
        (ScheduleStatus::Active, None) if schedule.expression.is_some() => 1,
        (ScheduleStatus::Active, None) => 2,
        (ScheduleStatus::Paused, _) => 3,
        (ScheduleStatus::Invalid, _) => 4,
        (ScheduleStatus::Exhausted, _) => 5,
    }
}

/// What stands where the next tick would.
fn standing(schedule: &Schedule) -> &'static str {
    match (schedule.status, &schedule.expression) {
        (ScheduleStatus::Active, Some(_)) => "after its run",
        (ScheduleStatus::Active, None) => "on request",
        (status, _) => status.as_str(),
    }
}

fn left(now: Timestamp, due_at: Timestamp) -> String {
    match due_at.duration_since(now) {
        time if time.as_secs() == 0 => "now".into(),
        time if time.is_positive() => words::rough(time),
        // Nobody was there to plan it.
        time => format!("-{}", words::rough(-time)),
    }
}

/// How the last run ended, or that one lives, or that it waits for the clock.
fn result(schedule: &Schedule) -> String {
    if schedule.clock_back.is_some() && schedule.running + schedule.pending == 0 {
        return "waiting(clock_back)".into();
    }
    match (schedule.running, schedule.pending, schedule.last) {
        (1, ..) => "running".into(),
        (2.., ..) => format!("{} running", schedule.running),
        (0, 1.., _) if schedule.next_retry_at.is_some() => "retrying".into(),
        (0, 1.., _) => "pending".into(),
        (0, 0, Some(last)) => last.state.as_str().into(),
        (0, 0, None) => String::new(),
    }
}

/// The colour of a run's state.
pub fn colour(state: &str) -> Option<Color> {
    match state {
        "completed" => Some(Color::Green),
        "failed" => Some(Color::Red),
        "cancelled" | "retrying" => Some(Color::Yellow),
        "pending" => Some(Color::Blue),
        _ if state.ends_with("running") => Some(Color::Cyan),
        _ => None,
    }
}

/// The colour of a run's state.
pub fn state_colour(state: RunState) -> Option<Color> {
    colour(state.as_str())
}
