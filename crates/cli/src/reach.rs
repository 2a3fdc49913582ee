//! How commands that change something reach the store: which one, who serves it, what time it is there.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use belfry::{AnyStore, Engine, GUEST, RunId, Timestamp};
use belfry_config::Loaded;
use belfry_store::sqlite::Sqlite;
use belfry_store::{Node, RunRecord, ScheduleFilter, ScheduleRecord, Store};
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::Place;

/// Schedules of one agent that are changed at once; more are read page by page.
const PAGE: u32 = 1000;
/// Names that a message lists before it says how many more there are.
const NAMES_MAX: usize = 8;

/// A store, and who serves it.
pub struct Reach {
    pub store: Arc<AnyStore>,
    /// Where it is, as it is written for connecting: it may hold a password.
    pub address: String,
    /// What the files say, where there are any and somebody asked for it.
    pub loaded: Option<Loaded>,
    pub server: Option<Server>,
}

/// Who plans and runs what is in a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Server {
    /// The process that holds an SQLite file.
    Process(u32),
    /// So many nodes with a lease.
    Nodes(usize),
}

impl Reach {
    /// A store that is there.
    pub async fn open(place: &Place) -> Result<Reach, Failure> {
        let address = place.store_address()?;
        let store = place.open().await?;
        Reach::of(store, address, None).await
    }

    /// A store together with what the files say. It is made where there are files and no store yet.
    pub async fn open_with_files(place: &Place) -> Result<Reach, Failure> {
        let loaded = match place.load() {
            Ok(loaded) => Some(loaded),
            // There is no file, and nobody has named one.
            Err(Failure::Usage(_)) => None,
            Err(other) => return Err(other),
        };
        match loaded {
            Some(loaded) => {
                let address = loaded.settings.store.expose().to_owned();
                let store = AnyStore::open(&address, false).await?;
                Reach::of(store, address, Some(loaded)).await
            }
            None => Reach::open(place).await,
        }
    }

    /// A store to run something from here. Where nobody serves it and the files have changed, they are applied first, as `up`
    /// does when it starts.
    pub async fn open_to_run(place: &Place) -> Result<Reach, Failure> {
        let reach = Reach::open_with_files(place).await?;
        let Some(loaded) = reach.loaded.as_ref().filter(|_| reach.server.is_none()) else { return Ok(reach) };
        for problem in &loaded.invalid {
            say(&problem.render(true));
        }
        let engine = Engine::builder().store(reach.store.clone()).build();
        if crate::up::apply(&engine, loaded).await? {
            say("config skew: the files differ from what the store has; `belfry apply` makes them the same");
        }
        Ok(reach)
    }

    async fn of(store: AnyStore, address: String, loaded: Option<Loaded>) -> Result<Reach, Failure> {
        let now = now(&store).await?;
        let server = match (&store, address.strip_prefix("sqlite:")) {
            (AnyStore::Sqlite(_), Some(path)) => Sqlite::server(Path::new(path)).map(Server::Process),
            _ => Some(serving(&store.nodes().await?, now)).filter(|nodes| *nodes > 0).map(Server::Nodes),
        };
        Ok(Reach { store: Arc::new(store), address, loaded, server })
    }

    /// What time it is, by the store's clock where it has one.
    pub async fn now(&self) -> Result<Timestamp, Failure> {
        now(&self.store).await
    }

    /// How runs are made here: which lanes there are.
    pub fn options(&self) -> belfry::Options {
        match &self.loaded {
            Some(loaded) => crate::up::options(&loaded.settings, &self.store),
            None => belfry::Options::default(),
        }
    }

    /// A schedule by its name, or what there is instead.
    pub async fn schedule(&self, name: &str) -> Result<ScheduleRecord, Failure> {
        let (agent, _) = split(name)?;
        match self.store.schedule(name).await? {
            Some(record) => Ok(record),
            None => Err(self.no_such(name, agent).await?),
        }
    }

    /// All schedules of an agent, or the one schedule that is named.
    pub async fn schedules(&self, name: &str) -> Result<Vec<ScheduleRecord>, Failure> {
        if name.contains('/') {
            return Ok(vec![self.schedule(name).await?]);
        }
        let filter = ScheduleFilter { agent: Some(name.to_owned()), ..ScheduleFilter::default() };
        let (mut all, mut after) = (Vec::new(), None::<String>);
        loop {
            let page = self.store.schedules(&filter, after.as_deref(), PAGE).await?;
            all.extend(page.items);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        if all.is_empty() {
            return Err(self.no_such(name, name).await?);
        }
        Ok(all)
    }

    async fn no_such(&self, name: &str, agent: &str) -> Result<Failure, Failure> {
        let filter = ScheduleFilter { agent: Some(agent.to_owned()), ..ScheduleFilter::default() };
        let page = self.store.schedules(&filter, None, NAMES_MAX as u32 + 1).await?;
        let what = if name.contains('/') { "schedule" } else { "agent with schedules called" };
        if !page.items.is_empty() {
            let names = page.items.into_iter().map(|record| record.name).collect();
            return Ok(Failure::NotFound(format!(
                "there is no {what} {name}; agent {agent} has {}",
                list(names)
            )));
        }
        let agents: Vec<_> = self.store.agents().await?.into_iter().map(|agent| agent.name).collect();
        if agents.is_empty() {
            return Ok(Failure::NotFound(format!(
                "there is no {what} {name}: the store knows no agents yet. `belfry apply` or `belfry up` brings those of the file in"
            )));
        }
        if agents.iter().any(|known| known == agent) {
            return Ok(Failure::NotFound(format!(
                "there is no {what} {name}: agent {agent} has no schedules"
            )));
        }
        Ok(Failure::NotFound(format!("there is no {what} {name}; there are the agents {}", list(agents))))
    }

    /// A run by its id.
    pub async fn run(&self, run: RunId) -> Result<RunRecord, Failure> {
        let found = self.store.run(run).await?;
        found.ok_or_else(|| Failure::NotFound(format!("there is no run {run}, or it is no longer kept")))
    }
}

/// Nodes that live and are there for others: guests are not.
pub fn living(nodes: &[Node], now: Timestamp) -> impl Iterator<Item = &Node> {
    let is_guest = |node: &Node| node.labels.iter().any(|label| label == GUEST);
    nodes.iter().filter(move |node| node.is_alive(now) && !is_guest(node))
}

/// How many nodes plan and run.
fn serving(nodes: &[Node], now: Timestamp) -> usize {
    living(nodes, now).filter(|node| !node.draining).count()
}

/// What time it is for a store.
pub async fn now(store: &AnyStore) -> Result<Timestamp, Failure> {
    let now = store.clock().await?.unwrap_or_else(Timestamp::now);
    // Stores keep microseconds.
    Ok(Timestamp::from_microsecond(now.as_microsecond()).unwrap_or(now))
}

/// The two parts of `agent/schedule`.
pub fn split(name: &str) -> Result<(&str, &str), Failure> {
    match name.split_once('/') {
        Some((agent, schedule)) if !agent.is_empty() && !schedule.is_empty() && !schedule.contains('/') => {
            Ok((agent, schedule))
        }
        _ => Err(Failure::Usage(format!(
            "{name:?} names no schedule; write AGENT/SCHEDULE, for example reporter/morning"
        ))),
    }
}

/// A run's id.
pub fn run_id(text: &str) -> Result<RunId, Failure> {
    let id = text.parse().map(RunId);
    id.map_err(|_| {
        Failure::Usage(format!(
            "{text:?} is no id of a run; they look like 0198c0de-7a11-7000-8000-0123456789ab, and `belfry runs` lists them"
        ))
    })
}

/// A few names of many.
pub fn list(mut names: Vec<String>) -> String {
    let more = names.len().saturating_sub(NAMES_MAX);
    names.truncate(NAMES_MAX);
    let more = if more > 0 { " and others" } else { "" };
    format!("{}{more}", names.join(", "))
}

/// Words for people, beside the data. Where standard error is closed there is nobody to tell.
pub fn say(text: &str) {
    let _ = writeln!(anstream::stderr(), "{text}");
}

/// The answer of a command: JSON where it is asked for, else words.
pub fn answer(output: &Output, json: &impl Serialize, words: &str) -> Result<(), Failure> {
    let mut out = anstream::stdout().lock();
    match output.format {
        Format::Table => writeln!(out, "{words}")?,
        Format::Json | Format::Jsonl => {
            serde_json::to_writer(&mut out, json)?;
            writeln!(out)?;
        }
    }
    Ok(out.flush()?)
}

/// Runs what waits to its end.
pub fn block_on<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(work)
}
