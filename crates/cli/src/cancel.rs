//! `belfry cancel`: ends runs.

use std::time::{Duration, Instant};

use belfry::{RunId, RunState};
use belfry_core::Reason;
use belfry_store::{Cancelled, RunFilter, RunRecord, Store};
use belfry_time::parse_duration;
use clap::Args;
use serde::Serialize;

use crate::failure::{Failure, InOption};
use crate::noted::{Deed, noted};
use crate::output::Output;
use crate::place::Place;
use crate::reach::{self, Reach};
use crate::remote;

/// Live runs of one schedule that are read at once.
const PAGE: u32 = 1000;
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// End a run: one that waits ends at once, one that runs is told to
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry cancel 0198c0de-7a11-7000-8000-0123456789ab
  belfry cancel reporter/morning --wait
  belfry cancel reporter/morning --all

What runs gets TERM, its grace, then KILL; `cancelled` is said once all its processes are gone. --wait waits for that.")]
pub struct Cancel {
    /// A run, or a schedule whose live run is meant
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
            if let Some(client) = place.client()? {
                return remote::cancel(&client, &self.what, self.wait, output).await;
            }
            let reach = Reach::open(place).await?;
            let runs = self.meant(&reach).await?;
            let mut done = Vec::new();
            for run in &runs {
                done.extend(self.cancel(&reach, run).await?);
            }
            if self.wait {
                self.wait_for(&reach, &mut done, timeout).await?;
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

    async fn meant(&self, reach: &Reach) -> Result<Vec<RunRecord>, Failure> {
        if !self.what.contains('/') {
            return Ok(vec![reach.run(reach::run_id(&self.what)?).await?]);
        }
        let record = reach.schedule(&self.what).await?;
        let filter = RunFilter {
            schedule: Some(record.name.clone()),
            states: vec![RunState::Pending, RunState::Running],
            ..RunFilter::default()
        };
        let (mut runs, mut after) = (Vec::new(), None);
        loop {
            let page = reach.store.runs(&filter, after, PAGE).await?;
            runs.extend(page.items);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        match runs.len() {
            0 => {
                Err(Failure::NotFound(format!("{} has no live run: there is nothing to cancel", record.name)))
            }
            1 => Ok(runs),
            _ if self.all => Ok(runs),
            many => Err(Failure::Usage(format!(
                "{} has {many} live runs: --all cancels them all, or name one of {}",
                record.name,
                reach::list(runs.iter().map(|run| run.id.to_string()).collect())
            ))),
        }
    }

    async fn cancel(&self, reach: &Reach, run: &RunRecord) -> Result<Option<One>, Failure> {
        let cancel = reach.store.cancel(reach.now().await?, run.id, Reason::Requested);
        let deed = Deed::to("cancel_run", format_args!("runs/{}/cancel", run.id));
        let is_change = |cancelled: &Cancelled| matches!(cancelled, Cancelled::Ended | Cancelled::Told(_));
        let state = match noted(&reach.store, deed, cancel, is_change).await? {
            Cancelled::Ended | Cancelled::Before(RunState::Cancelled) => RunState::Cancelled,
            Cancelled::Told(_) => RunState::Running,
            // Of several, some may end by themselves meanwhile.
            Cancelled::Before(_) | Cancelled::NotFound if self.what.contains('/') => return Ok(None),
            Cancelled::Before(state) => {
                return Err(Failure::Usage(format!("run {} has ended already: it is {state}", run.id)));
            }
            Cancelled::NotFound => {
                return Err(Failure::NotFound(format!(
                    "there is no run {}, or it is no longer kept",
                    run.id
                )));
            }
        };
        Ok(Some(One { run_id: run.id, state }))
    }

    async fn wait_for(&self, reach: &Reach, done: &mut [One], timeout: Duration) -> Result<(), Failure> {
        let began = Instant::now();
        loop {
            let mut living = 0;
            for one in done.iter_mut().filter(|one| one.state.is_live()) {
                one.state = reach.run(one.run_id).await?.state;
                living += usize::from(one.state.is_live());
            }
            if living == 0 {
                return Ok(());
            }
            if began.elapsed() >= timeout {
                return Err(Failure::Timeout(format!(
                    "{living} told to end, and still there after {}; {}",
                    self.timeout,
                    match reach.server {
                        Some(_) => "its agent's `grace` may be longer",
                        None => "no server runs that could see to it: `belfry up` does",
                    }
                )));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}
