//! Waiting for a run: for one that a server starts, or as the guest that runs it.

use std::time::Duration;

use belfry::api::{Run, Schedule};
use belfry::{Engine, Options, RunId, RunState, StopOptions};
use belfry_core::definition::handler_of;
use belfry_runner::{KeeperHandle, KeeperOptions};
use belfry_time::parse_duration;
use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use crate::client::{Client, of_name, schedule_path};
use crate::events::{Event, Events};
use crate::failure::{Failure, InOption};
use crate::logs::Writer;
use crate::output::{Format, Output};
use crate::place::{self, Place};
use crate::reach::{Reach, Server, answer, say};
use crate::words;

/// How often a run that is waited for is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
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
    reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

/// How waiting ended.
enum Waited {
    Ended(Box<Run>),
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

    /// Whether this process would run it, were it made now.
    fn is_guest(&self, client: &Client) -> bool {
        !client.is_served() && !self.no_start
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
        client: &Client,
        place: &Place,
        output: &Output,
    ) -> Result<(), Failure> {
        let only_id = Answer { run_id: run, state: None, reason: None, exit_code: None, error: None };
        let is_guest = self.is_guest(client);
        if !is_guest && !self.wait && !self.follow {
            answer(output, &only_id, &run.to_string())?;
            match client.server().await? {
                Some(Server::Process(holder)) => say(&format!("{holder} starts it")),
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
        let waited = match client.reach().filter(|_| is_guest) {
            Some(reach) if client.run(run).await?.state.is_live() => {
                self.as_guest(run, client, reach, place, output).await?
            }
            _ => self.look(run, client, self.until()?, self.writer(output)).await?,
        };
        let record = match waited {
            Waited::Ended(record) => *record,
            Waited::TimeIsUp | Waited::Interrupted => {
                let record = client.run(run).await?;
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
                    say(&format!("{} completed{}", record.name(), took(&record)));
                }
                Ok(())
            }
            _ => Err(Failure::Run(ending(&record))),
        }
    }

    fn print(&self, record: &Run, output: &Output) -> Result<(), Failure> {
        if output.format == Format::Table {
            return Ok(());
        }
        let json = Answer {
            run_id: record.id,
            state: Some(record.state),
            reason: record.reason.as_deref(),
            exit_code: record.exit_code,
            error: record.error.as_deref(),
        };
        answer(output, &json, "")
    }

    /// Where what the run writes is shown, if it is.
    fn writer(&self, output: &Output) -> Option<Writer> {
        self.follow.then(|| Writer::new(output))
    }

    /// Runs it here: joins as a node that is there for this run alone, and leaves.
    async fn as_guest(
        &self,
        run: RunId,
        client: &Client,
        reach: &Reach,
        place: &Place,
        output: &Output,
    ) -> Result<Waited, Failure> {
        belfry_runner::become_node()?;
        place::secure_state(&reach.address, &place.file())?.iter().for_each(|told| say(told));
        let options = Options { only: Some(run), poll_interval: ASK_EVERY, ..reach.options() };
        let keeper = KeeperHandle::spawn(KeeperOptions::for_lease(options.lease))
            .await
            .map_err(|error| Failure::Usage(format!("cannot start the keeper: {error}")))?;
        let engine = Engine::builder()
            .store(reach.store.clone())
            .options(options)
            .keeper(keeper)
            .state_dir(place::state_dir(&reach.address, &place.file()))
            .config(std::path::absolute(place.file())?)
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
            waited = self.look(run, client, until, self.writer(output)) => waited,
            () = asked() => Ok(Waited::Interrupted),
        };
        let mut at_once = false;
        if !matches!(waited, Ok(Waited::Ended(_))) {
            tokio::select! {
                withdrawn = self.withdraw(run, client, &engine) => drop(withdrawn),
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
    async fn withdraw(&self, run: RunId, client: &Client, engine: &Engine) -> Result<(), Failure> {
        client.post::<Value>(&format!("/api/v1/runs/{run}/cancel"), &json!({})).await?;
        engine.hint().await;
        self.look(run, client, None, None).await.map(drop)
    }

    /// Refuses a run that this process would have to run and cannot.
    pub async fn check_labels(&self, client: &Client, name: &str) -> Result<(), Failure> {
        let Some(reach) = client.reach().filter(|_| self.is_guest(client)) else { return Ok(()) };
        let schedule: Schedule = client.get(&schedule_path(name, "")?).await?;
        let needs = client.agent(&schedule.agent).await?.needs;
        let labels = reach.options().labels;
        match needs.iter().find(|label| !labels.contains(label)) {
            Some(label) if handler_of(label).is_some() => Err(Failure::Usage(format!(
                "{name} is a Rust handler of another program, and no node with it runs. Start that program; --no-start leaves the run to it"
            ))),
            Some(label) => Err(Failure::Usage(format!(
                "{name} needs a node with the label {label}, which this one has not, and no server runs. `engine: {{labels: [{label}]}}` gives it, --no-start leaves the run to a node that has it"
            ))),
            None => Ok(()),
        }
    }

    /// Looks at a run until it has ended, and shows what it writes where that is wanted.
    async fn look(
        &self,
        run: RunId,
        client: &Client,
        until: Option<Instant>,
        mut writer: Option<Writer>,
    ) -> Result<Waited, Failure> {
        let mut events = writer.as_ref().map(|_| Events::of(client, run));
        let (mut told, began) = (false, Instant::now());
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let event = tokio::select! {
                event = next(&mut events) => Some(event?),
                _ = look.tick() => None,
            };
            match (event, &mut writer) {
                (Some(Event::Output(piece)), Some(writer)) => {
                    writer.write(&piece)?;
                    writer.flush()?;
                    continue;
                }
                (Some(Event::End(record)), Some(writer)) => {
                    writer.finish()?;
                    return Ok(Waited::Ended(record));
                }
                _ => {}
            }
            let record = client.run(run).await?;
            // Where it is followed, its end comes behind all that it wrote.
            if !record.state.is_live() && events.is_none() {
                return Ok(Waited::Ended(Box::new(record)));
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(Waited::TimeIsUp);
            }
            let waits = record.state == RunState::Pending && record.attempt == 0;
            if waits && !told && began.elapsed() >= TELL_AFTER {
                told = true;
                say(&why_it_waits(client, &record).await?);
            }
        }
    }
}

/// The next event, where there are any.
async fn next(events: &mut Option<Events<'_>>) -> Result<Event, Failure> {
    match events {
        Some(events) => events.next().await,
        None => std::future::pending().await,
    }
}

/// Why a run has not started, in a sentence.
async fn why_it_waits(client: &Client, record: &Run) -> Result<String, Failure> {
    let path = format!("/api/v1/runs?{}&state=running", of_name(&record.agent));
    let running: Vec<Run> = client.list(&path, 100).await?;
    let max = client.agent(&record.agent).await?.max_concurrent;
    Ok(match (max, running.first()) {
        (Some(max), Some(first)) if running.len() >= max as usize => format!(
            "it waits: {} of agent {} run, which is its limit; one of them is {}",
            running.len(),
            record.agent,
            first.id
        ),
        (_, Some(first)) if first.schedule == record.schedule => {
            format!("it waits for its turn: run {} of {} runs", first.id, record.name())
        }
        _ => "it waits to be started".into(),
    })
}

/// How a run ended, in a sentence.
fn ending(record: &Run) -> String {
    let mut why = Vec::new();
    match (record.reason.as_deref(), record.exit_code) {
        (Some("exit_code"), Some(code)) => why.push(format!("exit code {code}")),
        (Some(reason), _) => why.push(reason.to_owned()),
        (None, _) => {}
    }
    let error = record.error.as_deref().map(|error| words::one_line(error, 200));
    why.extend(error.filter(|error| !error.is_empty()));
    let why = if why.is_empty() { String::new() } else { format!(": {}", why.join(", ")) };
    let attempts =
        if record.attempt > 1 { format!(" after {} attempts", record.attempt) } else { String::new() };
    format!(
        "{} {}{attempts}{why}. `belfry logs {}` shows what it wrote",
        record.name(),
        record.state,
        record.id
    )
}

fn took(record: &Run) -> String {
    record.took_ms.map_or(String::new(), |ms| format!(" in {}", words::span_ms(ms)))
}
