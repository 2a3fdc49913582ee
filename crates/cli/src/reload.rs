//! `belfry reload`: the server reads its files again.

use std::time::{Duration, Instant};

use belfry::AnyStore;
use belfry_store::Store;
use belfry_time::parse_duration;
use clap::Args;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Serialize;

use crate::failure::{Failure, InOption};
use crate::output::Output;
use crate::place::{Place, SOURCE};
use crate::reach::{self, Reach, Server};
use crate::remote;

const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Tell the running server to read its files again
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry reload
  belfry -c /etc/belfry/belfry.yaml reload

A file that is wrong changes nothing, and is shown here. On PostgreSQL, where any node may run from any file, it does what
`belfry apply` does.")]
pub struct Reload {
    /// Wait no longer than this for the server to have done it
    #[arg(long, value_name = "DURATION", default_value = "10s")]
    timeout: String,
}

#[derive(Serialize)]
struct Answer {
    pid: u32,
}

impl Reload {
    /// Tells it, and waits until the store has what the files say.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let timeout = parse_duration(&self.timeout).in_option("--timeout")?;
        let timeout = Duration::try_from(timeout).unwrap_or_default();
        if let Some(client) = place.client()? {
            return reach::block_on(remote::reload(&client, output));
        }
        place.load()?;
        reach::block_on(async {
            let reach = Reach::open_with_files(place).await?;
            if let AnyStore::Postgres(_) = *reach.store {
                return crate::apply::apply(&reach, output).await;
            }
            let Some(Server::Process(pid)) = reach.server else {
                return Err(Failure::Unreachable(format!(
                    "no server runs on {}. `belfry up` starts one, and `belfry apply` brings the files into the store without one",
                    reach.address
                )));
            };
            let target = i32::try_from(pid).ok().filter(|pid| *pid > 0).map(Pid::from_raw);
            let told = target.ok_or(nix::errno::Errno::ESRCH).and_then(|pid| kill(pid, Signal::SIGHUP));
            told.map_err(|error| {
                Failure::Unreachable(format!("the server, process {pid}, cannot be told: {error}"))
            })?;
            self.wait_for(&reach, pid, timeout).await?;
            reach::answer(output, &Answer { pid }, &format!("process {pid} has read its files again"))
        })
    }

    async fn wait_for(&self, reach: &Reach, pid: u32, timeout: Duration) -> Result<(), Failure> {
        let Some(loaded) = &reach.loaded else { return Ok(()) };
        let began = Instant::now();
        while reach.store.source_digest(SOURCE).await?.as_deref() != Some(&loaded.digest) {
            if began.elapsed() >= timeout {
                return Err(Failure::Timeout(format!(
                    "process {pid} was told, but does not run from these files after {}: what it prints says why. Does it run from another file, or with another environment?",
                    self.timeout
                )));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }
}
