//! `belfry add`: a schedule that no file owns.

use clap::Args;

use crate::client::Client;
use crate::failure::Failure;
use crate::keys::{Keys, write};
use crate::output::Output;
use crate::place::{Need, Place};
use crate::reach;

/// Add a schedule to an agent, beside those of the files
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry add reporter/friday --cron \"0 16 * * 5\" --tz Europe/London --prompt \"Sum up the week.\"
  belfry add prices/fast every=5m jitter=10% if_running=queue
  belfry add reporter/launch --at 2027-02-03T09:00:00+01:00 delete_after_run=true
  belfry add reporter/friday --file friday.yaml

The keys are those of a file, and so are the messages. A reload does not touch it; `belfry set` changes it, `belfry rm` removes
it.")]
pub struct Add {
    /// Its name
    #[arg(value_name = "AGENT/NAME")]
    name: String,

    #[command(flatten)]
    keys: Keys,
}

impl Add {
    /// Adds it.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let (agent, _) = reach::split(&self.name)?;
        let body = self.keys.body(&self.name, true, output)?;
        reach::block_on(async {
            let client = place.client(Need::Files).await?;
            match write(&client, &self.name, &body, output).await {
                // Whoever has just written it into the file wonders.
                Err(Failure::NotFound(_)) if is_in_files(&client, agent) => Err(Failure::NotFound(format!(
                    "agent {agent} is in the file but not in the store yet: `belfry apply` brings it in"
                ))),
                other => other,
            }
        })
    }
}

fn is_in_files(client: &Client, agent: &str) -> bool {
    let loaded = client.reach().and_then(|reach| reach.loaded.as_ref());
    loaded.is_some_and(|loaded| loaded.agents.iter().any(|known| known.name == agent))
}
