//! `belfry runs`: what has run, runs and waits, the newest first.

use belfry::api::Run;
use belfry_core::RunState;
use belfry_time::{Timestamp, Zone};
use clap::{Args, ValueEnum};

use crate::client::{Client, encoded, of_name, schedule_path};
use crate::failure::Failure;
use crate::ls::state_colour;
use crate::output::{Format, Output};
use crate::place::{Need, Place};
use crate::reading;
use crate::sheet::{Sheet, column};
use crate::words;

/// List runs, the newest first
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry runs
  belfry runs reporter/morning -n 5
  belfry runs reporter --state failed --since 2026-03-01T00:00:00
  belfry runs --state pending,running -o jsonl")]
pub struct Runs {
    /// Only those of this agent or schedule
    #[arg(value_name = "AGENT[/SCHEDULE]")]
    name: Option<String>,

    /// Only those in this state
    #[arg(long, value_name = "STATE", value_enum, value_delimiter = ',')]
    state: Vec<StateArg>,

    /// Only those in this lane
    #[arg(long, value_name = "LANE")]
    lane: Option<String>,

    /// Only those of a session with this key
    #[arg(long, value_name = "KEY")]
    session: Option<String>,

    /// Only those that were made then or later: RFC 3339, or a local date and time
    #[arg(long, value_name = "TIME")]
    since: Option<String>,

    /// How many
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    count: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum StateArg {
    Pending,
    Running,
    Completed,
    Failed,
    Cancelled,
}

impl From<StateArg> for RunState {
    fn from(state: StateArg) -> RunState {
        match state {
            StateArg::Pending => RunState::Pending,
            StateArg::Running => RunState::Running,
            StateArg::Completed => RunState::Completed,
            StateArg::Failed => RunState::Failed,
            StateArg::Cancelled => RunState::Cancelled,
        }
    }
}

impl Runs {
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let zone = output.zone()?;
        let since = self.since.as_ref().map(|text| reading::since(text, "--since", output)).transpose()?;
        reading::block_on(async {
            let client = place.client(Need::Store).await?;
            let found = self.find(&client, since).await?;
            if let (true, Some(name)) = (found.is_empty(), &self.name) {
                check_name(&client, name).await?;
            }
            match output.format {
                Format::Table => print(&found, client.now(), &zone),
                format => reading::print_items(format, found),
            }
        })
    }

    async fn find(&self, client: &Client, since: Option<Timestamp>) -> Result<Vec<Run>, Failure> {
        let mut query = String::new();
        query.extend(self.name.as_ref().map(|name| format!("&{}", of_name(name))));
        query.extend(self.lane.as_ref().map(|lane| format!("&lane={}", encoded(lane))));
        query.extend(self.session.as_ref().map(|session| format!("&session={}", encoded(session))));
        query.extend(since.map(|since| format!("&since={since}")));
        let count = self.count as usize;
        // A server takes one state a list; ids are in the order of their making.
        let states: Vec<String> =
            self.state.iter().map(|state| format!("&state={}", RunState::from(*state))).collect();
        let states = if states.is_empty() { vec![String::new()] } else { states };
        let mut all: Vec<Run> = Vec::new();
        for state in states {
            let query = format!("{query}{state}");
            let path = format!("/api/v1/runs?{}", query.trim_start_matches('&'));
            all.extend(client.list::<Run>(path.trim_end_matches('?'), count).await?);
        }
        all.sort_by_key(|run| std::cmp::Reverse(run.id));
        all.truncate(count);
        Ok(all)
    }
}

/// Nothing is found of what is not there. What is gone may have runs all the same.
pub async fn check_name(client: &Client, name: &str) -> Result<(), Failure> {
    let anything: Vec<Run> = client.list(&format!("/api/v1/runs?{}", of_name(name)), 1).await?;
    match (anything.is_empty(), name.contains('/')) {
        (false, _) => Ok(()),
        (true, true) => client.get::<serde_json::Value>(&schedule_path(name, "")?).await.map(drop),
        (true, false) => client.agent(name).await.map(drop),
    }
}

fn print(runs: &[Run], now: Timestamp, zone: &Zone) -> Result<(), Failure> {
    if runs.is_empty() {
        reading::remark("no runs");
        return Ok(());
    }
    reading::print_text(&sheet(runs, now, zone, true).render())
}

/// Runs as a table.
pub fn sheet(runs: &[Run], now: Timestamp, zone: &Zone, named: bool) -> Sheet {
    let name = if named { column("NAME").wraps(40) } else { column("NAME").rank(200) };
    let mut sheet = Sheet::new(&[
        column("RUN"),
        column("STATE"),
        column("WHEN"),
        column("TOOK").right(),
        column("TRY").rank(4),
        column("TRIGGER").rank(5),
        column("TICK").rank(6),
        name,
        column("DETAIL").rank(3).wraps(24),
    ]);
    for run in runs {
        let when = run.finished_at.or(run.started_at).unwrap_or(run.created_at);
        sheet.row(vec![
            run.id.to_string(),
            run.state.to_string(),
            words::short(when, now, zone),
            took(run, now),
            if run.attempt > 1 { format!("{}/{}", run.attempt, run.max_attempts) } else { String::new() },
            run.trigger.to_string(),
            run.tick_at.map_or_else(String::new, |tick| words::short(tick, now, zone)),
            match (named, &run.session) {
                (true, Some(session)) => format!("{}:{}", run.name(), words::one_line(session, 40)),
                (true, None) => run.name(),
                (false, _) => String::new(),
            },
            detail(run, now),
        ]);
        sheet.colour("STATE", state_colour(run.state));
    }
    sheet
}

/// How long a run took, or takes so far. Unknown if the clock was set back meanwhile.
fn took(run: &Run, now: Timestamp) -> String {
    let took_ms = match run.state {
        RunState::Pending => None,
        RunState::Running => {
            run.started_at.and_then(|from| now.duration_since(from).as_millis().try_into().ok())
        }
        RunState::Completed | RunState::Failed | RunState::Cancelled => run.took_ms,
    };
    took_ms.map_or_else(String::new, words::span_ms)
}

fn detail(run: &Run, now: Timestamp) -> String {
    let mut parts = Vec::new();
    if run.state == RunState::Pending && run.not_before > now {
        parts.push(format!("in {}", words::rough(run.not_before.duration_since(now))));
    }
    match (run.reason.as_deref(), run.exit_code) {
        (Some("exit_code"), Some(code)) => parts.push(format!("exit code {code}")),
        (Some(reason), _) => parts.push(reason.to_owned()),
        (None, _) => {}
    }
    let text = if run.state == RunState::Completed { &run.summary } else { &run.error };
    parts.extend(text.as_deref().map(|text| words::one_line(text, 60)).filter(|text| !parts.contains(text)));
    let used =
        |key: &str| run.usage.as_ref().and_then(|usage| usage.get(key)).filter(|value| !value.is_null());
    parts.extend(used("tokens").map(|tokens| format!("{tokens} LLM tokens")));
    parts.extend(used("cost_usd").map(|cost| format!("{cost} USD")));
    parts.join(" · ")
}
