//! Waiting for a run: for one that a server starts, or as the guest that runs it.

use std::time::Duration;

use belfry::{Engine, Options, RunId, RunState, StopOptions};
use belfry_core::Reason;
use belfry_runner::{KeeperHandle, KeeperOptions};
use belfry_store::{RunFilter, RunRecord, ScheduleRecord, Store};
use belfry_time::parse_duration;
use clap::Args;
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use crate::failure::{Failure, InOption};
use crate::logs::Writer;
use crate::output::{Format, Output};
use crate::place::{self, Place};
use crate::reach::{Reach, Server, answer, say};
use crate::remote::Wait;
use crate::words;

/// How often a run that is waited for is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Output that is read at once.
const OUTPUT_BYTES: u32 = 256 << 10;
/// How often a guest asks for its run while a limit holds it back.
const ASK_EVERY: Duration = Duration::from_millis(200);
/// Who waits longer than this for a start is told why.
const TELL_AFTER: Duration = Duration::from_secs(2);
/// Nobody waits longer than this.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 86_400);

/// What to do once the run is made.
#[derive(Debug, Args)]
pub struct Waiting {
    /// Wait for its end; the exit code is 0 if it completed and 1 if not
    #[arg(long)]
    wait: bool,

    /// As --wait, and show what it writes as it comes
    #[arg(long)]
    follow: bool,

    /// Wait no longer than this [default: as long as it takes]
    #[arg(long, value_name = "DURATION")]
    timeout: Option<String>,

    /// Where no server runs: leave it to the next `belfry up` rather than run it here
    #[arg(long, conflicts_with_all = ["wait", "follow", "timeout"])]
    no_start: bool,
}

#[derive(Serialize)]
struct Answer<'a> {
    run_id: RunId,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<RunState>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<Reason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

/// How waiting ended.
enum Waited {
    Ended(Box<RunRecord>),
    TimeIsUp,
    Interrupted,
}

impl Waiting {
    /// Looks for options that do not go together.
    pub fn check(&self, output: &Output) -> Result<(), Failure> {
        if self.follow && output.format != Format::Table {
            let words = "--follow writes what the run writes, which is no JSON; use --wait with -o json, or `belfry logs` afterwards";
            return Err(Failure::Usage(words.into()));
        }
        self.until().map(drop)
    }

    /// Whether its end is waited for.
    pub fn waits(&self) -> bool {
        self.wait || self.follow
    }

    /// How a run that a server makes is waited for.
    pub fn over(&self) -> Result<Wait, Failure> {
        if self.follow || self.no_start {
            return Err(Failure::Usage(
                "over --server there is --wait; `belfry logs` shows what it wrote".into(),
            ));
        }
        let until = self.until()?.map(Instant::into_std);
        Ok(if self.wait { Wait::Until(until) } else { Wait::No })
    }

    /// Whether this process would run it, were it made now.
    pub fn is_guest(&self, reach: &Reach) -> bool {
        reach.server.is_none() && !self.no_start
    }

    fn until(&self) -> Result<Option<Instant>, Failure> {
        let Some(text) = &self.timeout else { return Ok(None) };
        let time = parse_duration(text).in_option("--timeout")?;
        Ok(Some(Instant::now() + Duration::try_from(time).unwrap_or_default().min(LONGEST)))
    }

    /// Sees to a run that was made: tells its id, and runs it or waits for it as far as that is wanted.
    pub async fn see_to(
        &self,
        run: RunId,
        reach: &Reach,
        place: &Place,
        output: &Output,
    ) -> Result<(), Failure> {
        let only_id = Answer { run_id: run, state: None, reason: None, exit_code: None, error: None };
        let is_guest = self.is_guest(reach);
        if !is_guest && !self.wait && !self.follow {
            answer(output, &only_id, &run.to_string())?;
            match reach.server {
                Some(Server::Process(pid)) => say(&format!("process {pid} starts it")),
                Some(Server::Nodes(1)) => say("one node runs, and starts it"),
                Some(Server::Nodes(count)) => say(&format!("{count} nodes run, and one of them starts it")),
                None => say("no server runs: it waits for the next `belfry up`"),
            }
            return Ok(());
        }
        // Said before anything can happen to it; standard output is the run's own where it is followed.
        if output.format == Format::Table {
            if self.follow {
                say(&format!("run {run}"));
            } else {
                // It is to run, whether somebody reads its id or not.
                let _ = answer(output, &only_id, &run.to_string());
            }
        }
        let waited = if is_guest && reach.run(run).await?.state.is_live() {
            self.as_guest(run, reach, place, output).await?
        } else {
            self.for_server(run, reach, output).await?
        };
        let record = match waited {
            Waited::Ended(record) => *record,
            Waited::TimeIsUp | Waited::Interrupted => {
                let record = reach.run(run).await?;
                if record.state.is_live() && matches!(waited, Waited::Interrupted) {
                    return Err(Failure::Run(format!("interrupted: run {run} goes back to waiting")));
                }
                if record.state.is_live() {
                    self.print(&record, output)?;
                    return Err(Failure::Timeout(format!(
                        "run {run} has not ended in time: it is {} and goes on. `belfry cancel {run}` ends it",
                        record.state
                    )));
                }
                let cancelled = matches!(waited, Waited::TimeIsUp) && record.state == RunState::Cancelled;
                if cancelled {
                    self.print(&record, output)?;
                    return Err(Failure::Timeout(format!(
                        "run {run} has not ended in time, and was cancelled"
                    )));
                }
                record
            }
        };
        self.print(&record, output)?;
        match record.state {
            RunState::Completed => {
                if output.format == Format::Table {
                    say(&format!("{} completed{}", record.name, took(&record)));
                }
                Ok(())
            }
            _ => Err(Failure::Run(ending(&record))),
        }
    }

    fn print(&self, record: &RunRecord, output: &Output) -> Result<(), Failure> {
        if output.format == Format::Table {
            return Ok(());
        }
        let json = Answer {
            run_id: record.id,
            state: Some(record.state),
            reason: record.reason,
            exit_code: record.exit_code,
            error: record.error.as_deref(),
        };
        answer(output, &json, "")
    }

    /// Where what the run writes is shown, if it is.
    fn writer(&self, output: &Output) -> Option<Writer> {
        self.follow.then(|| Writer::new(output))
    }

    /// Waits while others run it.
    async fn for_server(&self, run: RunId, reach: &Reach, output: &Output) -> Result<Waited, Failure> {
        self.look(run, reach, self.until()?, self.writer(output)).await
    }

    /// Runs it here: joins as a node that is there for this run alone, and leaves.
    async fn as_guest(
        &self,
        run: RunId,
        reach: &Reach,
        place: &Place,
        output: &Output,
    ) -> Result<Waited, Failure> {
        let options = Options { only: Some(run), poll_interval: ASK_EVERY, ..reach.options() };
        let keeper = KeeperHandle::spawn(KeeperOptions::for_lease(options.lease))
            .await
            .map_err(|error| Failure::Usage(format!("cannot start the keeper: {error}")))?;
        let engine = Engine::builder()
            .store(reach.store.clone())
            .options(options)
            .keeper(keeper)
            .state_dir(place::state_dir(&reach.address, &place.file()))
            .build();
        let until = self.until()?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut hang_up = signal(SignalKind::hangup())?;
        engine.start().await?;
        let mut asked = async || {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
                _ = hang_up.recv() => {}
            }
        };
        let waited = tokio::select! {
            waited = self.look(run, reach, until, self.writer(output)) => waited,
            () = asked() => Ok(Waited::Interrupted),
        };
        let mut at_once = false;
        if !matches!(waited, Ok(Waited::Ended(_))) {
            tokio::select! {
                withdrawn = self.withdraw(run, reach, &engine) => drop(withdrawn),
                () = asked() => at_once = true,
            }
        }
        // Whatever happened, nothing of it is left behind. Who is told to stop twice does not wait for any grace.
        let stop = || engine.stop(StopOptions { wait: false, timeout: Duration::ZERO });
        if !at_once {
            stop().await?;
            return waited;
        }
        tokio::select! {
            (first, second) = async { tokio::join!(stop(), stop()) } => first.and(second)?,
            // Where even that takes too long, the keeper ends what is left, and another node finds the run.
            () = asked() => {}
        }
        waited
    }

    /// Whoever asked for a run is gone or has seen enough: it is cancelled, and its processes end.
    async fn withdraw(&self, run: RunId, reach: &Reach, engine: &Engine) -> Result<(), Failure> {
        reach.store.cancel(reach.now().await?, run, Reason::Requested).await?;
        engine.hint().await;
        self.look(run, reach, None, None).await.map(drop)
    }

    /// Refuses a run that this process would have to run and cannot.
    pub async fn check_labels(&self, reach: &Reach, record: &ScheduleRecord) -> Result<(), Failure> {
        let definitions = reach.store.definitions(&[record.id]).await?.into_iter().next().flatten();
        let needs = definitions.map(|found| found.agent_definition.needs.clone()).unwrap_or_default();
        let labels = reach.options().labels;
        match needs.iter().find(|label| !labels.contains(label)) {
            Some(label) if self.is_guest(reach) => Err(Failure::Usage(format!(
                "{} needs a node with the label {label}, which this one has not, and no server runs. `engine: {{labels: [{label}]}}` gives it, --no-start leaves the run to a node that has it",
                record.name
            ))),
            _ => Ok(()),
        }
    }

    /// Looks at a run until it has ended, and shows what it writes where that is wanted.
    async fn look(
        &self,
        run: RunId,
        reach: &Reach,
        until: Option<Instant>,
        mut writer: Option<Writer>,
    ) -> Result<Waited, Failure> {
        let (mut after, mut told, began) = (None, false, Instant::now());
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            look.tick().await;
            // What a run wrote is there before its end is, so the end is looked at first.
            let record = reach.run(run).await?;
            if let Some(writer) = &mut writer {
                show(run, reach, &mut after, writer).await?;
            }
            if !record.state.is_live() {
                writer.iter_mut().try_for_each(Writer::finish)?;
                return Ok(Waited::Ended(Box::new(record)));
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(Waited::TimeIsUp);
            }
            let waits = record.state == RunState::Pending && record.attempt == 0;
            if waits && !told && began.elapsed() >= TELL_AFTER {
                told = true;
                say(&why_it_waits(reach, &record).await?);
            }
        }
    }
}

/// Shows what a run has written behind a place.
async fn show(
    run: RunId,
    reach: &Reach,
    after: &mut Option<u64>,
    writer: &mut Writer,
) -> Result<(), Failure> {
    loop {
        let chunks = reach.store.output(run, *after, OUTPUT_BYTES).await?;
        let Some(last) = chunks.last() else { return Ok(writer.flush()?) };
        *after = Some(last.seq);
        chunks.iter().try_for_each(|chunk| writer.write(chunk))?;
    }
}

/// Why a run has not started, in a sentence.
async fn why_it_waits(reach: &Reach, record: &RunRecord) -> Result<String, Failure> {
    let filter = RunFilter {
        agent: Some(record.agent_name.clone()),
        states: vec![RunState::Running],
        ..RunFilter::default()
    };
    let running = reach.store.runs(&filter, None, 100).await?.items;
    let definitions = reach.store.definitions(&[record.schedule]).await?.into_iter().next().flatten();
    let max = definitions.and_then(|found| found.agent_definition.max_concurrent);
    Ok(match (max, running.first()) {
        (Some(max), Some(first)) if running.len() >= max as usize => format!(
            "it waits: {} of agent {} run, which is its limit; one of them is {}",
            running.len(),
            record.agent_name,
            first.id
        ),
        (_, Some(first)) if first.schedule == record.schedule => {
            format!("it waits for its turn: run {} of {} runs", first.id, record.name)
        }
        _ => "it waits to be started".into(),
    })
}

/// How a run ended, in a sentence.
fn ending(record: &RunRecord) -> String {
    let mut why = Vec::new();
    match (record.reason, record.exit_code) {
        (Some(Reason::ExitCode), Some(code)) => why.push(format!("exit code {code}")),
        (Some(reason), _) => why.push(reason.to_string()),
        (None, _) => {}
    }
    let error = record.error.as_deref().map(|error| words::one_line(error, 200));
    why.extend(error.filter(|error| !error.is_empty()));
    let why = if why.is_empty() { String::new() } else { format!(": {}", why.join(", ")) };
    let attempts =
        if record.attempt > 1 { format!(" after {} attempts", record.attempt) } else { String::new() };
    format!(
        "{} {}{attempts}{why}. `belfry logs {}` shows what it wrote",
        record.name, record.state, record.id
    )
}

fn took(record: &RunRecord) -> String {
    let (Some(from), Some(to)) = (record.started_at, record.finished_at) else { return String::new() };
    format!(" in {}", words::span(to.duration_since(from)))
}
