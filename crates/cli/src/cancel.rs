//! `belfry cancel`: ends runs.

use std::time::{Duration, Instant};

use belfry::api::Run;
use belfry::{RunId, RunState};
use belfry_time::parse_duration;
use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};

use crate::client::{Client, of_name, schedule_path};
use crate::failure::{Failure, InOption};
use crate::output::Output;
use crate::place::{Need, Place};
use crate::reach;

/// Runs that a message names before it says that there are others.
const NAMES_MAX: usize = 8;
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// End a run: one that waits ends at once, one that runs is told to
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry cancel 0198c0de-7a11-7000-8000-0123456789ab
  belfry cancel reporter/morning --wait
  belfry cancel reporter/morning --all

What runs gets TERM, its grace, then KILL; `cancelled` is said once all its processes are gone. --wait waits for that.")]
pub struct Cancel {
    /// A run, or a schedule whose live run is meant, also one that was removed during the run
    #[arg(value_name = "RUN|AGENT/SCHEDULE")]
    what: String,

    /// All live runs of the schedule
    #[arg(long)]
    all: bool,

    /// Wait until they are gone
    #[arg(long)]
    wait: bool,

    /// Wait no longer than this
    #[arg(long, value_name = "DURATION", default_value = "60s", requires = "wait")]
    timeout: String,
}

#[derive(Serialize)]
struct Answer {
    cancelled: Vec<One>,
}

#[derive(Serialize)]
struct One {
    run_id: RunId,
    /// `cancelled`, or `running` where its node was told.
    state: RunState,
}

impl Cancel {
    /// Cancels, and waits where that is wanted.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let timeout = parse_duration(&self.timeout).in_option("--timeout")?;
        let timeout = Duration::try_from(timeout).unwrap_or_default();
        if !self.what.contains('/') {
            reach::run_id(&self.what)?;
        }
        reach::block_on(async {
            let client = place.client(Need::Store).await?;
            let mut done = Vec::new();
            for run in self.meant(&client).await? {
                done.extend(self.cancel(&client, run).await?);
            }
            if self.wait {
                self.wait_for(&client, &mut done, timeout).await?;
            }
            let lines: Vec<_> = done
                .iter()
                .map(|one| match one.state {
                    RunState::Running => format!("{} is told to end", one.run_id),
                    state => format!("{} {state}", one.run_id),
                })
                .collect();
            reach::answer(output, &Answer { cancelled: done }, &lines.join("\n"))
        })
    }

    async fn meant(&self, client: &Client) -> Result<Vec<RunId>, Failure> {
        let name = &self.what;
        if !name.contains('/') {
            return Ok(vec![client.run(reach::run_id(name)?).await?.id]);
        }
        let schedule = schedule_path(name, "")?;
        let mut runs: Vec<RunId> = Vec::new();
        for state in [RunState::Running, RunState::Pending] {
            let path = format!("/api/v1/runs?{}&state={state}", of_name(name));
            runs.extend(client.list::<Run>(&path, usize::MAX).await?.iter().map(|run| run.id));
        }
        if runs.is_empty() {
            client.get::<Value>(&schedule).await?;
        }
        match runs.len() {
            0 => Err(Failure::NotFound(format!("{name} has no live run: there is nothing to cancel"))),
            1 => Ok(runs),
            _ if self.all => Ok(runs),
            many => {
                let few: Vec<String> = runs.iter().take(NAMES_MAX).map(ToString::to_string).collect();
                let more = if many > NAMES_MAX { " and others" } else { "" };
                Err(Failure::Usage(format!(
                    "{name} has {many} live runs: --all cancels them all, or name one of {}{more}",
                    few.join(", ")
                )))
            }
        }
    }

    async fn cancel(&self, client: &Client, run: RunId) -> Result<Option<One>, Failure> {
        match client.post::<Run>(&format!("/api/v1/runs/{run}/cancel"), &json!({})).await {
            Ok(run) => Ok(Some(One { run_id: run.id, state: run.state })),
            // Of several, some may end by themselves meanwhile.
            Err(Failure::Usage(_) | Failure::NotFound(_)) if self.what.contains('/') => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    async fn wait_for(&self, client: &Client, done: &mut [One], timeout: Duration) -> Result<(), Failure> {
        let began = Instant::now();
        loop {
            let mut living = 0;
            for one in done.iter_mut().filter(|one| one.state.is_live()) {
                one.state = client.run(one.run_id).await?.state;
                living += usize::from(one.state.is_live());
            }
            if living == 0 {
                return Ok(());
            }
            if began.elapsed() >= timeout {
                return Err(Failure::Timeout(format!(
                    "{living} told to end, and still there after {}; {}",
                    self.timeout,
                    match client.is_served() {
                        true => "its agent's `grace` may be longer",
                        false => "no server runs that could see to it: `belfry up` does",
                    }
                )));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}
