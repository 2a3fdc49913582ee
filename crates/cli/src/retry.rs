//! `belfry retry`: what an ended run did, once more.

use belfry::api::Run;
use clap::Args;
use hyper::Method;

use crate::failure::Failure;
use crate::output::Output;
use crate::place::{Need, Place};
use crate::reach;
use crate::wait::Waiting;

/// Run again what has ended: a new run with the prompt and payload that came with it
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
            let client = place.client(Need::Run).await?;
            let old = client.run(old).await?;
            if old.state.is_live() {
                return Err(Failure::Usage(format!(
                    "run {} of {} is {} and has not ended: wait for it, or end it with `belfry cancel {}`",
                    old.id,
                    old.name(),
                    old.state,
                    old.id
                )));
            }
            if !client.is_served() {
                let gone = |failure| match failure {
                    Failure::NotFound(_) => {
                        Failure::NotFound(format!("{} is gone: its runs cannot be repeated", old.name()))
                    }
                    other => other,
                };
                self.waiting.check_labels(&client, &old.name()).await.map_err(gone)?;
            }
            let path = format!("/api/v1/runs/{}/retry", old.id);
            let made: Run = client.send(Method::POST, &path, None, &[]).await?;
            self.waiting.see_to(made.id, &client, place, output).await
        })
    }
}
