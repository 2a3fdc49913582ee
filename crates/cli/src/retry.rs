//! `belfry retry`: what an ended run did, once more.

use belfry_store::{Enqueue, Enqueued, NewRun, Store};
use clap::Args;

use crate::failure::Failure;
use crate::noted::{Deed, noted};
use crate::output::Output;
use crate::place::Place;
use crate::reach::{self, Reach};
use crate::remote;
use crate::wait::Waiting;

/// Run again what has ended: a new run with the same prompt and payload
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry retry 0198c0de-7a11-7000-8000-0123456789ab
  belfry retry 0198c0de-7a11-7000-8000-0123456789ab --follow

The new run is one by hand: it counts for limits, moves no schedule, and its agent is the one of today.")]
pub struct Retry {
    /// The run that has ended
    #[arg(value_name = "RUN")]
    run: String,

    #[command(flatten)]
    waiting: Waiting,
}

impl Retry {
    /// Makes the new run, and sees to it as far as that is wanted.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let old = reach::run_id(&self.run)?;
        self.waiting.check(output)?;
        reach::block_on(async {
            if let Some(client) = place.client()? {
                return remote::retry(&client, old, self.waiting.over()?, output).await;
            }
            let reach = Reach::open_to_run(place).await?;
            let old = reach.run(old).await?;
            if old.state.is_live() {
                return Err(Failure::Usage(format!(
                    "run {} of {} is {} and has not ended: wait for it, or end it with `belfry cancel {}`",
                    old.id, old.name, old.state, old.id
                )));
            }
            let now = reach.now().await?;
            let gone = || Failure::NotFound(format!("{} is gone: its runs cannot be repeated", old.name));
            let record = reach.store.schedule(&old.name).await?.ok_or_else(gone)?;
            self.waiting.check_labels(&reach, &record).await?;
            let new = belfry::prepare(&reach.store, &reach.options(), now, &old.name).await?;
            let run = NewRun { command: old.command, prompt: old.prompt, payload: old.payload, ..new };
            let id = run.id;
            let enqueue = Enqueue { run, key: None };
            let deed = Deed::to("retry_run", format_args!("runs/{}/retry", old.id));
            let is_made = |made: &Enqueued| *made == Enqueued::Made;
            match noted(&reach.store, deed, reach.store.enqueue(now, &enqueue), is_made).await? {
                Enqueued::NotFound => Err(gone()),
                Enqueued::Made | Enqueued::Repeat(_) | Enqueued::KeyReused(_) => {
                    self.waiting.see_to(id, &reach, place, output).await
                }
            }
        })
    }
}
