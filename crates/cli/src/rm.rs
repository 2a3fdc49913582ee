//! `belfry rm`: removes a schedule that no file owns.

use belfry_store::{Expect, Removed, Store};
use clap::Args;
use serde::Serialize;

use crate::failure::Failure;
use crate::keys::owned;
use crate::noted::{Deed, noted};
use crate::output::Output;
use crate::place::Place;
use crate::reach::{self, Reach};
use crate::remote;

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
            if let Some(client) = place.client()? {
                return remote::remove(&client, &self.name, output).await;
            }
            let reach = Reach::open(place).await?;
            let record = reach.schedule(&self.name).await?;
            let gone = reach.store.remove_schedule(reach.now().await?, record.id, &Expect::Any);
            let is_gone = |removed: &Removed| matches!(removed, Removed::Gone { .. });
            match noted(
                &reach.store,
                Deed::to("remove_schedule", format_args!("schedules/{}", self.name)),
                gone,
                is_gone,
            )
            .await?
            {
                Removed::OwnedBy(source) => Err(owned(&self.name, &source, place)),
                Removed::NotFound | Removed::Differs => {
                    Err(Failure::NotFound(format!("{} is gone already", self.name)))
                }
                Removed::Gone { cancelled } => {
                    let words = match cancelled {
                        0 => format!("{} removed", self.name),
                        _ => format!("{} removed; {cancelled} waiting runs ended", self.name),
                    };
                    reach::answer(
                        output,
                        &Answer { schedule: &self.name, result: "removed", cancelled },
                        &words,
                    )
                }
            }
        })
    }
}
