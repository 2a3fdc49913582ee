//! `belfry up`: from files to work done on time.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use belfry::event::{Level, Name};
use belfry::{AnyStore, Clock, Engine, Event, LaneSettings, StopOptions};
use belfry::{Keep, Options};
use belfry_config::{Lane, Loaded, LogFormat, Settings};
use belfry_core::plan::Spread;
use belfry_runner::{KeeperHandle, KeeperOptions, Room};
use belfry_server::Reloaded;
use belfry_store::Applied;
use belfry_time::{SignedDuration, Timestamp, Zone};
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::content::{Content, Known, LastLoaded};
use crate::failure::Failure;
use crate::lines::Lines;
use crate::memory;
use crate::output::Output;
use crate::place::{self, Place, SOURCE};
use crate::reach;
use crate::server_file::ServerFile;
use crate::serving::{Scene, Serving};
use crate::skew::{self, Skew};
use crate::terminal;
use crate::words;

/// Run the scheduler: plan, run, and keep a reason for everything that did not run
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry up
  belfry up --demo
  belfry -c /etc/belfry/belfry.yaml up --log-format json

It runs in the foreground. SIGTERM or Ctrl-C lets what runs end, a second one ends it at once; SIGHUP, a changed file or
`belfry reload` reads the files again.")]
pub struct Up {
    /// Run a small example that needs no file; its state goes when it stops
    #[arg(long)]
    demo: bool,

    /// How to write what happens [default: text on a terminal, JSON lines otherwise]
    #[arg(long, value_name = "FORMAT", value_enum)]
    log_format: Option<LogChoice>,

    /// Where the API listens, instead of what the file says; port 0 is any that is free
    #[arg(long, value_name = "ADDRESS", env = "BELFRY_LISTEN")]
    listen: Option<SocketAddr>,

    /// Go by a clock that is wrong by so much; `doctor --torture` does
    #[arg(long, value_name = "DURATION", hide = true, allow_hyphen_values = true, conflicts_with = "demo")]
    clock_shift: Option<SignedDuration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum LogChoice {
    /// For people
    Text,
    /// One JSON object a line
    Json,
}

impl Up {
    /// Runs until it is told to stop.
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        let room = belfry_runner::become_node()?;
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(async {
            let demo = if self.demo {
                Some(tempfile::Builder::new().prefix("belfry-demo-").tempdir()?)
            } else {
                None
            };
            let file = demo.as_ref().map_or_else(|| place.file(), |folder| folder.path().join("belfry.yaml"));
            let before = Watched::only(&file);
            let loaded = match &demo {
                Some(_) => place::load_text(belfry_config::DEMO, &file)?,
                None => place.load()?,
            };
            self.serve(&file, loaded, before, room, output).await
        })
    }

    async fn serve(
        &self,
        file: &Path,
        loaded: Loaded,
        before: Watched,
        room: Room,
        output: &Output,
    ) -> Result<(), Failure> {
        let lines =
            Lines::new(self.is_json(&loaded.settings), output.zone()?, loaded.settings.log.level.as_str())?;
        let address = loaded.settings.store.expose().to_owned();
        for told in place::secure_state(&address, file)? {
            lines.say(&told);
        }
        let store = AnyStore::open(&address, true).await.map_err(|error| taken(error, &address, file))?;
        let store = Arc::new(store);
        let lease = Duration::from_millis(loaded.settings.engine.lease_ms);
        let keeper = KeeperHandle::spawn(KeeperOptions::for_lease(lease))
            .await
            .map_err(|error| Failure::Usage(format!("cannot start the keeper: {error}")))?;
        let mut asked = signals()?;
        let options = within(room, options(&loaded.settings, store.is_shared()));
        let mut builder = Engine::builder()
            .store(store.clone())
            .options(options.clone())
            .context(|| [("version".to_owned(), env!("CARGO_PKG_VERSION").into())].into_iter().collect())
            .keeper(keeper)
            .state_dir(place::state_dir(&address, file));
        if let Some(shift) = self.clock_shift {
            builder = builder.clock(Clock::shifted(shift));
        }
        // The example is no file.
        if !self.demo {
            builder = builder.config(std::path::absolute(file)?);
        }
        let engine = builder.build();
        let (mut events, told) = (engine.events(), engine.events());
        let last = LastLoaded::of(&place::state_dir(&address, file), file);
        let (content, _) = apply(&engine, &loaded, Some(&last)).await?;
        last.write(&loaded.digest)?;
        let mut serving = Serving::start(Scene {
            engine: &engine,
            events: told,
            loaded: &loaded,
            options,
            file,
            address: &address,
            listen: self.listen,
            connections_max: room.connections_max,
            any_port: self.demo,
        })
        .await?;
        greet(&lines, &engine, &loaded, output)?;
        if !lines.is_json() {
            lines.say(&format!("API at http://{}", serving.address()));
            // The link is for the person who looks at the terminal, not for a file or a log.
            if terminal::is_terminal() {
                lines.say(
                    "log in with this link, once and within ten minutes (`belfry open` prints another):",
                );
                lines.say(&format!("  {}", serving.login_link()));
            }
        }
        let skew = Skew::new(&engine);
        if content == Content::Skew {
            skew.tell();
        }
        engine.start().await?;
        let watching_skew = tokio::spawn(skew.clone().watch_loop(last.clone()));
        let giving_back = tokio::spawn(memory::give_back_loop());
        serving.announce()?;
        let mut watched = Watched::new(&loaded, &before);
        let home = Home { engine: &engine, file, last: &last, skew: &skew, started: &loaded.settings };
        let mut look = tokio::time::interval(LOOK_EVERY);
        let timeout = Duration::from_millis(loaded.settings.engine.shutdown_timeout_ms);
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Ok(event) => lines.event(&event),
                    Err(tokio::sync::broadcast::error::RecvError::Lagged(lost)) => {
                        let lines_lost = words::count(lost as usize, "line");
                        lines.say(&format!("lost {lines_lost}: more came than could be written"));
                    }
                    Err(tokio::sync::broadcast::error::RecvError::Closed) => break,
                },
                what = asked.recv() => match what {
                    Some(Asked::Reload) => watched = reload(&home, watched, &lines, &serving).await.0,
                    Some(Asked::Reset) => reset_sessions(&engine, &lines).await,
                    Some(Asked::Stop) | None => break,
                },
                _ = look.tick() => {
                    if watched.has_changed() {
                        watched = reload(&home, watched, &lines, &serving).await.0;
                    }
                }
                Some(tell) = serving.reloads.recv() => {
                    let (next, came) = reload(&home, watched, &lines, &serving).await;
                    watched = next;
                    // Whoever asked may have left.
                    let _ = tell.send(came);
                }
            }
        }
        watching_skew.abort();
        giving_back.abort();
        let stopped = stop(&engine, timeout, &mut asked, &mut events, &lines).await;
        serving.stop().await;
        stopped
    }

    fn is_json(&self, settings: &Settings) -> bool {
        match (self.log_format, settings.log.format) {
            (Some(choice), _) => choice == LogChoice::Json,
            (None, LogFormat::Json) => true,
            (None, LogFormat::Text) => false,
            (None, LogFormat::Auto) => !terminal::is_terminal(),
        }
    }
}

/// Applies files that were read, unless the rule of [`Content`] says otherwise. A guest has nothing that it loaded last.
pub async fn apply(
    engine: &Engine,
    loaded: &Loaded,
    last: Option<&LastLoaded>,
) -> Result<(Content, Applied), belfry::Error> {
    let store = engine.reads();
    let (stored, last) = (store.source_digest(SOURCE).await?, last.and_then(LastLoaded::read));
    let now = store.clock().await?.unwrap_or_else(Timestamp::now);
    let nodes = store.nodes().await?;
    // A file has one server.
    let has_others = store.is_shared() && reach::living(&nodes, now).any(|node| node.id != engine.node());
    let content = Content::of(Known {
        own: &loaded.digest,
        stored: stored.as_deref(),
        last: last.as_deref(),
        has_others,
    });
    let applied = match content {
        Content::Apply => take_over(engine, loaded).await?,
        Content::Same | Content::Skew => Applied::default(),
    };
    Ok((content, applied))
}

fn greet(lines: &Lines, engine: &Engine, loaded: &Loaded, output: &Output) -> Result<(), Failure> {
    for problem in loaded.invalid.iter().chain(&loaded.warnings) {
        lines.problem(problem);
    }
    if lines.is_json() {
        return Ok(());
    }
    let schedules: usize = loaded.agents.iter().map(|agent| agent.schedules.len()).sum();
    lines.say(&format!("state in {}", loaded.settings.store));
    lines.say(&format!(
        "{} with {} from {}",
        words::count(loaded.agents.len(), "agent"),
        words::count(schedules, "schedule"),
        files(loaded)
    ));
    let (now, zone) = (engine.now(), output.zone()?);
    for (tick, name) in next_ticks(loaded, now, 5) {
        lines.say(&format!("  next {}  {name}", local(tick, &zone)));
    }
    Ok(())
}

fn files(loaded: &Loaded) -> String {
    let names: Vec<_> = loaded.files.iter().map(|file| file.display().to_string()).collect();
    if names.is_empty() { "the example".into() } else { names.join(", ") }
}

/// The next ticks over all schedules of the files.
fn next_ticks(loaded: &Loaded, now: Timestamp, count: usize) -> Vec<(Timestamp, String)> {
    let mut ticks: Vec<(Timestamp, String)> = Vec::new();
    for agent in &loaded.agents {
        for (schedule, definition) in &agent.schedules {
            let name = format!("{}/{schedule}", agent.name);
            let timing = definition.compile(&name).ok().and_then(|compiled| compiled.timing);
            let enabled = definition.options.enabled;
            if let Some(tick) = timing.filter(|_| enabled).and_then(|timing| timing.first(now)) {
                ticks.push((tick.due_at, name));
            }
        }
    }
    ticks.sort();
    ticks.truncate(count);
    ticks
}

/// A time of day for people.
pub fn local(at: Timestamp, zone: &Zone) -> String {
    zone.local(at).strftime("%Y-%m-%d %H:%M:%S %Z").to_string()
}

/// Makes the store what the files say.
pub async fn take_over(engine: &Engine, loaded: &Loaded) -> Result<Applied, belfry::Error> {
    engine.put_lanes(&lanes_of(loaded)).await?;
    engine.apply(SOURCE, &loaded.digest, &loaded.agents).await
}

/// The lanes of the files.
fn lanes_of(loaded: &Loaded) -> Vec<(String, LaneSettings)> {
    let settings =
        |lane: &Lane| LaneSettings { slots: lane.slots, limit: lane.limit, queue_limit: lane.queue_limit };
    loaded.settings.lanes.iter().map(|(name, lane)| (name.clone(), settings(lane))).collect()
}

/// What a node that runs reads its files with.
struct Home<'a> {
    engine: &'a Engine,
    /// The main file.
    file: &'a Path,
    last: &'a LastLoaded,
    skew: &'a Skew,
    /// What the node was started with.
    started: &'a Settings,
}

/// Reads the files again, all or nothing. Gives what is to be watched from now on, and what came of it.
async fn reload(home: &Home<'_>, watched: Watched, lines: &Lines, serving: &Serving) -> (Watched, Reloaded) {
    let engine = home.engine;
    // Before they are read: what changes meanwhile is read again.
    let before = watched.seen();
    let rejected = |detail: String| {
        let event = Event::new(engine.now(), Level::Error, Name::ConfigRejected);
        engine.tell(Event { detail: Some(detail), ..event });
    };
    match place::load(home.file) {
        Ok(loaded) => {
            for problem in loaded.invalid.iter().chain(&loaded.warnings) {
                lines.problem(problem);
            }
            match apply(engine, &loaded, Some(home.last)).await {
                Ok((content, applied)) => {
                    let mut came = applied.words();
                    if content == Content::Skew {
                        home.skew.tell();
                        came = skew::WORDS.into();
                    }
                    // Only now: until then the files count as changed.
                    if let Err(error) = home.last.write(&loaded.digest) {
                        lines.say(&format!("cannot keep what was loaded last: {error}"));
                    }
                    for invalid in &loaded.invalid {
                        came.push_str(&format!("; invalid: {invalid}"));
                    }
                    let later = home.started.awaiting_start(&loaded.settings);
                    if !later.is_empty() {
                        let words = format!("takes effect at the next start: {}", later.join(", "));
                        lines.say(&words);
                        came.push_str(&format!("; {words}"));
                    }
                    let next = Watched::new(&loaded, &before);
                    serving.set_settings(loaded.settings);
                    (next, Ok(came))
                }
                Err(error) => {
                    // The files are not to blame, and still to be read: at the next look, and without saying so each time.
                    if !watched.told {
                        rejected(error.to_string());
                    }
                    let next =
                        Watched { told: true, seen: watched.paths.iter().map(|_| None).collect(), ..watched };
                    (next, Err(error.to_string()))
                }
            }
        }
        Err(Failure::Config(errors)) => {
            lines.errors(&errors);
            // Scope read sees events, and not the files.
            rejected(format!("nothing was changed: {}", errors.brief()));
            (before, Err(errors.to_string()))
        }
        Err(other) => {
            rejected(format!("nothing was changed: {other:?}"));
            (before, Err(format!("{other:?}")))
        }
    }
}

/// Says which node has a store, as far as its file tells.
fn taken(error: belfry_store::Error, address: &str, file: &Path) -> Failure {
    use belfry_store::Error::{Held, InUse};
    match (&error, ServerFile::living(address, file)) {
        (InUse { .. } | Held { .. }, Some(ServerFile { pid, url, .. })) => Failure::Usage(format!(
            "{error}. A node still runs there: process {pid}, {url}; `kill {pid}` ends it in order"
        )),
        _ => error.into(),
    }
}

/// A store that does not answer now is heard of elsewhere.
async fn reset_sessions(engine: &Engine, lines: &Lines) {
    match engine.reset_sessions().await {
        Ok(count) => lines.say(&format!("{} reset", words::count(count as usize, "session"))),
        Err(error) => lines.say(&format!("sessions were not reset: {error}")),
    }
}

async fn stop(
    engine: &Engine,
    timeout: Duration,
    asked: &mut mpsc::Receiver<Asked>,
    events: &mut tokio::sync::broadcast::Receiver<Arc<Event>>,
    lines: &Lines,
) -> Result<(), Failure> {
    let running = engine.running_total();
    if running > 0 && !lines.is_json() {
        lines.say(&format!(
            "stopping: {running} still running, {} s left; again to end them at once",
            timeout.as_secs()
        ));
    }
    let first = engine.clone();
    let mut stopped = tokio::spawn(async move { first.stop(StopOptions { wait: true, timeout }).await });
    let result = loop {
        tokio::select! {
            event = events.recv() => if let Ok(event) = event { lines.event(&event) },
            Some(Asked::Stop) = asked.recv() => {
                let again = engine.clone();
                tokio::spawn(async move { again.stop(StopOptions { wait: false, timeout: Duration::ZERO }).await });
            }
            result = &mut stopped => break result,
        }
    };
    while let Ok(event) = events.try_recv() {
        lines.event(&event);
    }
    match result {
        Ok(result) => Ok(result?),
        Err(error) => Err(Failure::Usage(error.to_string())),
    }
}

/// The same with no more runs at once than there are descriptors for.
fn within(room: Room, options: Options) -> Options {
    let max = options.max_concurrent.map_or(room.runs_max, |max| max.min(room.runs_max));
    Options { max_concurrent: Some(max), ..options }
}

/// How the engine works, from the settings. Every field is named, so that the compiler points at one that nothing
/// reads.
pub fn options(settings: &Settings, is_shared: bool) -> Options {
    let ms = Duration::from_millis;
    let belfry_config::Engine {
        check_interval_ms,
        poll_interval_ms,
        heartbeat_ms,
        orphan_check_ms,
        dead_after,
        lease_ms,
        // It stands in each schedule.
        late_after_ms: _,
        jitter_threshold,
        max_catch_up_jitter_ms,
        // `Up` reads it when it is asked to end.
        shutdown_timeout_ms: _,
        max_concurrent,
        labels,
    } = &settings.engine;
    let belfry_config::Retention {
        runs_ms,
        runs_per_schedule,
        failures_ms,
        output_ms,
        skips_ms,
        heartbeats_ms,
        snapshots_ms,
        retired_ms,
        // The server prunes its audit.
        audit_ms: _,
    } = &settings.retention;
    let poll = if is_shared { poll_interval_ms } else { check_interval_ms };
    let file_lanes = settings.lanes.iter().map(|(name, lane)| (name.clone(), lane.slots)).collect();
    let own = settings.lanes.iter().filter_map(|(name, lane)| Some((name.clone(), lane.own_slots?)));
    Options {
        file_lanes,
        own_lanes: own.collect(),
        max_concurrent: *max_concurrent,
        labels: labels.clone(),
        check_interval: ms(*check_interval_ms),
        poll_interval: ms(*poll),
        lease: ms(*lease_ms),
        orphan_check: ms(*orphan_check_ms),
        heartbeat: ms(*heartbeat_ms),
        dead_after: *dead_after,
        spread: Spread {
            threshold: *jitter_threshold as usize,
            longest: SignedDuration::from_millis(*max_catch_up_jitter_ms as i64),
        },
        keep: Keep {
            runs: runs_ms.map(ms),
            failures: failures_ms.map(ms),
            runs_per_schedule: *runs_per_schedule,
            output: output_ms.map(ms),
            skips: skips_ms.map(ms),
            heartbeats: heartbeats_ms.map(ms),
            snapshots: snapshots_ms.map(ms),
            retired: retired_ms.map(ms),
        },
        ..Options::default()
    }
}

/// How often it is looked whether files have changed.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// When a file was written, and how long it is. None: it cannot be looked at.
type Seen = Option<(SystemTime, u64)>;

/// Files that are looked at for changes.
struct Watched {
    paths: Vec<PathBuf>,
    /// As they were read.
    seen: Vec<Seen>,
    /// As they were at the last look.
    latest: Vec<Seen>,
    /// Whether it was said that they cannot be applied now.
    told: bool,
}

impl Watched {
    /// What was read, as it was before that.
    fn new(loaded: &Loaded, before: &Watched) -> Watched {
        let paths: Vec<PathBuf> = loaded.files.iter().chain(&loaded.folders).cloned().collect();
        let mut seen = look(&paths);
        for (path, seen) in paths.iter().zip(&mut seen) {
            if let Some(known) = before.paths.iter().position(|known| known == path) {
                *seen = before.seen[known];
            }
        }
        Watched { paths, seen, latest: Vec::new(), told: false }
    }

    /// A file of which nothing is known but its place.
    fn only(file: &Path) -> Watched {
        let paths = vec![std::path::absolute(file).unwrap_or_else(|_| file.to_owned())];
        Watched { seen: look(&paths), paths, latest: Vec::new(), told: false }
    }

    /// Whether they are others than those that were read, and the same as at the last look: nobody is writing them.
    fn has_changed(&mut self) -> bool {
        let now = look(&self.paths);
        let is_still = now == self.latest;
        self.latest = now;
        is_still && self.latest != self.seen
    }

    /// As it is now: what is wrong is told once.
    fn seen(&self) -> Watched {
        Watched { paths: self.paths.clone(), seen: look(&self.paths), latest: Vec::new(), told: false }
    }
}

fn look(paths: &[PathBuf]) -> Vec<Seen> {
    let of = |path: &PathBuf| path.metadata().and_then(|data| Ok((data.modified()?, data.len()))).ok();
    paths.iter().map(of).collect()
}

/// What the operator asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    Stop,
    Reload,
    /// All sessions begin anew.
    Reset,
}

/// Signals as they come; more than a few at once say nothing new.
fn signals() -> Result<mpsc::Receiver<Asked>, Failure> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    let mut user = signal(SignalKind::user_defined1())?;
    let (send, asked) = mpsc::channel(4);
    tokio::spawn(async move {
        loop {
            let asked = tokio::select! {
                _ = terminate.recv() => Asked::Stop,
                _ = interrupt.recv() => Asked::Stop,
                _ = hang_up.recv() => Asked::Reload,
                _ = user.recv() => Asked::Reset,
            };
            if send.send(asked).await.is_err() {
                return;
            }
        }
    });
    Ok(asked)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_file_that_is_being_written_has_not_changed_yet() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("belfry.yaml");
        std::fs::write(&file, "agents: {}").unwrap();
        let mut watched = Watched::only(&file);
        assert!(!watched.has_changed() && !watched.has_changed());
        std::fs::write(&file, "").unwrap();
        assert!(!watched.has_changed(), "somebody may be writing it");
        std::fs::write(&file, "agents: {a: ").unwrap();
        assert!(!watched.has_changed(), "somebody is writing it");
        assert!(watched.has_changed());
    }
}
