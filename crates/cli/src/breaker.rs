//! `belfry breaker`: which breakers have counted or opened, how they came there, and closing them by hand.

use std::collections::HashMap;

use belfry::AgentDefinition;
use belfry::api::Breaker as Shown;
use belfry_core::breaker::{State, TransitionReason};
use belfry_store::{BreakerEntry, Store};
use belfry_time::{Timestamp, Zone};
use clap::{Args, Subcommand};
use comfy_table::Color;

use crate::failure::Failure;
use crate::noted::{Deed, noted};
use crate::output::{Format, Output};
use crate::place::Place;
use crate::reading::{self, Reading};
use crate::sheet::{Sheet, column};
use crate::words;

/// Show breakers, or close them
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry breaker
  belfry breaker show reporter
  belfry breaker reset reporter poll")]
pub struct Breaker {
    #[command(subcommand)]
    verb: Option<Verb>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the breakers that have counted a failure or opened (the default)
    Ls,
    /// Show the breakers of an agent with their history
    Show {
        /// Whose, and of which command
        #[arg(value_name = "AGENT[/COMMAND]")]
        name: String,
    },
    /// Close the breakers of an agent, or that of one command
    Reset {
        /// Whose
        agent: String,
        /// Of which command [default: all of them]
        command: Option<String>,
    },
}

impl Breaker {
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let zone = output.zone()?;
        reading::block_on(async {
            let reading = Reading::open(place).await?;
            match &self.verb {
                None | Some(Verb::Ls) => {
                    let breakers = shown(&reading, None, None).await?;
                    match output.format {
                        Format::Table => list(&breakers, reading.now, &zone),
                        format => reading::print_items(format, breakers),
                    }
                }
                Some(Verb::Show { name }) => {
                    let (agent, command) = match name.split_once('/') {
                        Some((agent, command)) => (agent, Some(command)),
                        None => (name.as_str(), None),
                    };
                    reading.check_agent(agent).await?;
                    let breakers = shown(&reading, Some(agent), command).await?;
                    match output.format {
                        Format::Table => show(&breakers, name, reading.now, &zone),
                        format => reading::print_items(format, breakers),
                    }
                }
                Some(Verb::Reset { agent, command }) => reset(&reading, agent, command.as_deref()).await,
            }
        })
    }
}

async fn entries(
    reading: &Reading,
    agent: Option<&str>,
    command: Option<&str>,
) -> Result<Vec<BreakerEntry>, Failure> {
    let mut entries = reading.store.breakers().await?;
    entries.retain(|entry| {
        agent.is_none_or(|agent| entry.agent_name == agent)
            && command.is_none_or(|command| entry.command == command)
    });
    Ok(entries)
}

async fn shown(reading: &Reading, agent: Option<&str>, command: Option<&str>) -> Result<Vec<Shown>, Failure> {
    let agents = reading.store.agents().await?;
    let agents: HashMap<i64, AgentDefinition> =
        agents.into_iter().map(|agent| (agent.id, agent.definition)).collect();
    let mut breakers = Vec::new();
    for entry in entries(reading, agent, command).await? {
        let record = reading.store.breaker(entry.agent, &entry.command).await?;
        breakers.push(Shown::of(&entry, &record, agents.get(&entry.agent)));
    }
    Ok(breakers)
}

async fn reset(reading: &Reading, agent: &str, command: Option<&str>) -> Result<(), Failure> {
    reading.check_agent(agent).await?;
    let entries = entries(reading, Some(agent), command).await?;
    let mut closed = 0;
    for entry in &entries {
        let reset = reading.store.reset_breaker(reading.now, entry.agent, &entry.command);
        let deed = Deed::to("reset_breaker", format_args!("breakers/{agent}/{}/reset", entry.command));
        if noted(&reading.store, deed, reset, |reset| *reset).await? {
            closed += 1;
            reading::remark(&format!("{}/{} is closed", entry.agent_name, entry.command));
        }
    }
    if closed == 0 {
        let of = command.map_or(String::new(), |command| format!("/{command}"));
        reading::remark(&format!("{agent}{of} has no breaker to reset: nothing was changed"));
    }
    Ok(())
}

fn sheet_of(breakers: &[Shown], now: Timestamp, zone: &Zone) -> Sheet {
    let mut sheet = Sheet::new(&[
        column("BREAKER").wraps(40),
        column("STATE"),
        column("FAILURES").right(),
        column("OPENED").rank(2),
        column("PROBE").rank(1),
    ]);
    for breaker in breakers {
        let of = breaker.threshold.map_or(String::new(), |threshold| format!(" of {threshold}"));
        let probe = breaker.probe_at.map(|at| match at.duration_since(now) {
            time if time.is_positive() => format!("in {}", words::rough(time)),
            _ => "with the next tick".into(),
        });
        sheet.row(vec![
            format!("{}/{}", breaker.agent, breaker.command),
            state(breaker.state).into(),
            format!("{}{of}", breaker.failures),
            breaker.opened_at.map_or_else(String::new, |at| words::short(at, now, zone)),
            probe.unwrap_or_default(),
        ]);
        sheet.colour("STATE", colour(breaker.state));
    }
    sheet
}

fn list(breakers: &[Shown], now: Timestamp, zone: &Zone) -> Result<(), Failure> {
    if breakers.is_empty() {
        reading::remark("no breaker has counted a failure");
        return Ok(());
    }
    reading::print_text(&sheet_of(breakers, now, zone).render())
}

fn show(breakers: &[Shown], name: &str, now: Timestamp, zone: &Zone) -> Result<(), Failure> {
    if breakers.is_empty() {
        reading::remark(&format!("no breaker of {name} has counted a failure"));
        return Ok(());
    }
    for breaker in breakers {
        reading::print_text(&sheet_of(std::slice::from_ref(breaker), now, zone).render())?;
        let mut history = Sheet::new(&[
            column("WHEN"),
            column("FROM"),
            column("TO"),
            column("FAILURES").right(),
            column("REASON"),
            column("RUN").rank(1),
        ]);
        for change in &breaker.history {
            let reason = match change.reason {
                TransitionReason::FailureThreshold => "failure_threshold",
                TransitionReason::Success => "success",
                TransitionReason::CooldownElapsed => "cooldown_elapsed",
                TransitionReason::ManualReset => "manual_reset",
            };
            history.row(vec![
                words::short(change.at, now, zone),
                state(change.from).into(),
                state(change.to).into(),
                change.failures.to_string(),
                reason.into(),
                change.run_id.map_or_else(String::new, |run| run.to_string()),
            ]);
            history.colour("TO", colour(change.to));
        }
        if !breaker.history.is_empty() {
            reading::print_text(&format!("\n{}\n", history.render().trim_end()))?;
        }
    }
    Ok(())
}

fn state(state: State) -> &'static str {
    match state {
        State::Closed => "closed",
        State::Open => "open",
        State::HalfOpen => "half_open",
    }
}

fn colour(state: State) -> Option<Color> {
    Some(match state {
        State::Closed => Color::Green,
        State::Open => Color::Red,
        State::HalfOpen => Color::Yellow,
    })
}
