//! `belfry budget`: which agents have used something of their failure budget, and clearing one by hand.

use belfry::api::{Agent, List};
use belfry_time::{Timestamp, Zone};
use clap::{Args, Subcommand};
use hyper::Method;
use serde::Serialize;

use crate::client::{Client, encoded};
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::{Need, Place};
use crate::reading;
use crate::sheet::{Sheet, column};
use crate::words;

/// Show failure budgets, or clear them
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry budget
  belfry budget reset reporter")]
pub struct Budget {
    #[command(subcommand)]
    verb: Option<Verb>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the agents that have used something of their budget (the default)
    Ls,
    /// Clear the budget of an agent; what it holds may start at once
    Reset {
        /// Agent name
        agent: String,
    },
}

/// What an agent has used.
#[derive(Debug, Serialize)]
struct Used {
    agent: String,
    #[serde(flatten)]
    budget: belfry::api::Budget,
}

impl Budget {
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let zone = output.zone()?;
        reading::block_on(async {
            let client = place.client(Need::Store).await?;
            match &self.verb {
                None | Some(Verb::Ls) => {
                    let used = used(&client).await?;
                    match output.format {
                        Format::Table => list(&used, client.now(), &zone),
                        format => reading::print_items(format, used),
                    }
                }
                Some(Verb::Reset { agent }) => reset(&client, agent).await,
            }
        })
    }
}

async fn used(client: &Client) -> Result<Vec<Used>, Failure> {
    let agents = client.get::<List<Agent>>("/api/v1/agents").await?.items;
    let used = agents.into_iter().filter_map(|agent| {
        let budget = agent.budget?;
        Some(Used { agent: agent.agent, budget })
    });
    Ok(used.collect())
}

async fn reset(client: &Client, name: &str) -> Result<(), Failure> {
    let before = client.agent(name).await?;
    let path = format!("/api/v1/budgets/{}/reset", encoded(name));
    let _: Agent = client.send(Method::POST, &path, None, &[]).await?;
    let remark = match before.budget {
        Some(budget) => format!("{name} may fail {} again", words::count(budget.max as usize, "time")),
        None => format!("{name} has used nothing of its budget: nothing was changed"),
    };
    reading::remark(&remark);
    Ok(())
}

fn list(used: &[Used], now: Timestamp, zone: &Zone) -> Result<(), Failure> {
    if used.is_empty() {
        reading::remark("no agent has used anything of its failure budget");
        return Ok(());
    }
    let mut sheet =
        Sheet::new(&[column("AGENT").wraps(40), column("FAILURES"), column("SINCE"), column("CLEARED")]);
    for Used { agent, budget } in used {
        sheet.row(vec![
            agent.clone(),
            format!("{} of {}", budget.failures, budget.max),
            words::short(budget.period_start, now, zone),
            words::short(budget.resets_at, now, zone),
        ]);
    }
    reading::print_text(&sheet.render())
}
