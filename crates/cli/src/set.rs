//! `belfry set`: changes a schedule that no file owns.

use clap::Args;

use crate::failure::Failure;
use crate::keys::{Keys, write};
use crate::output::Output;
use crate::place::{Need, Place};
use crate::reach;

/// Change keys of a schedule that was made with `belfry add`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry set prices/fast every=10m
  belfry set reporter/friday --prompt \"Sum up the week, in three lines.\" not_on=fri
  belfry set reporter/friday prompt=null

Keys that are not written stay as they are; KEY=null goes back to the default. An edit that keeps the timing moves nothing; one
that changes it fires nothing before now, and nothing twice.")]
pub struct Set {
    /// Which
    #[arg(value_name = "AGENT/NAME")]
    name: String,

    #[command(flatten)]
    keys: Keys,
}

impl Set {
    /// Changes it.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        reach::split(&self.name)?;
        let body = self.keys.body(&self.name, false, output)?;
        reach::block_on(async {
            let client = place.client(Need::Files).await?;
            write(&client, &self.name, &body, output).await
        })
    }
}
