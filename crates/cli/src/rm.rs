//! `belfry rm`: removes a schedule that no file owns.

use clap::Args;
use hyper::Method;
use serde::{Deserialize, Serialize};

use crate::client::schedule_path;
use crate::failure::Failure;
use crate::output::Output;
use crate::place::{Need, Place};
use crate::reach;

/// Remove a schedule that was made with `belfry add`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry rm reporter/friday

Its runs that wait end cancelled, those that run go on, and its history stays.")]
pub struct Rm {
    /// Which
    #[arg(value_name = "AGENT/NAME")]
    name: String,
}

#[derive(Serialize)]
struct Answer<'a> {
    schedule: &'a str,
    result: &'static str,
    cancelled: u32,
}

impl Rm {
    /// Removes it.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        reach::split(&self.name)?;
        reach::block_on(async {
            let client = place.client(Need::Store).await?;
            let path = schedule_path(&self.name, "")?;
            let Gone { cancelled } = client.send(Method::DELETE, &path, None, &[]).await?;
            let words = match cancelled {
                0 => format!("{} removed", self.name),
                _ => format!(
                    "{} removed; {} ended",
                    self.name,
                    crate::words::count(cancelled as usize, "waiting run")
                ),
            };
            let answer = Answer { schedule: &self.name, result: "removed", cancelled };
            reach::answer(output, &answer, &words)
        })
    }
}

/// What went.
#[derive(Deserialize)]
struct Gone {
    cancelled: u32,
}
