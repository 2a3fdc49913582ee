//! `belfry breaker`: which breakers have counted or opened, how they came there, and closing them by hand.

use belfry::api::{Breaker as Shown, List};
use belfry_core::breaker::{State, TransitionReason};
use belfry_time::{Timestamp, Zone};
use clap::{Args, Subcommand};
use comfy_table::Color;
use hyper::Method;

use crate::client::{Client, encoded};
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::{Need, Place};
use crate::reading;
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
            let client = place.client(Need::Store).await?;
            match &self.verb {
                None | Some(Verb::Ls) => {
                    let breakers = shown(&client, None, None).await?;
                    match output.format {
                        Format::Table => list(&breakers, client.now(), &zone),
                        format => reading::print_items(format, breakers),
                    }
                }
                Some(Verb::Show { name }) => {
                    let (agent, command) = match name.split_once('/') {
                        Some((agent, command)) => (agent, Some(command)),
                        None => (name.as_str(), None),
                    };
                    client.agent(agent).await?;
                    let breakers = shown(&client, Some(agent), command).await?;
                    match output.format {
                        Format::Table => show(&breakers, name, client.now(), &zone),
                        format => reading::print_items(format, breakers),
                    }
                }
                Some(Verb::Reset { agent, command }) => reset(&client, agent, command.as_deref()).await,
            }
        })
    }
}

async fn shown(client: &Client, agent: Option<&str>, command: Option<&str>) -> Result<Vec<Shown>, Failure> {
    let mut breakers = client.get::<List<Shown>>("/api/v1/breakers").await?.items;
    breakers.retain(|breaker| {
        agent.is_none_or(|agent| breaker.agent == agent)
            && command.is_none_or(|command| breaker.command == command)
    });
    Ok(breakers)
}

async fn reset(client: &Client, agent: &str, command: Option<&str>) -> Result<(), Failure> {
    client.agent(agent).await?;
    let mut closed = 0;
    for breaker in shown(client, Some(agent), command).await? {
        let (agent, command) = (&breaker.agent, &breaker.command);
        let path = format!("/api/v1/breakers/{}/{}/reset", encoded(agent), encoded(command));
        let after: Shown = client.send(Method::POST, &path, None, &[]).await?;
        if (after.failures, after.history.len()) != (breaker.failures, breaker.history.len()) {
            closed += 1;
            reading::remark(&format!("{agent}/{command} is closed"));
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
