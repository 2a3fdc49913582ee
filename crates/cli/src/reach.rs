//! A store that this process has opened: where it is, who serves it, what time it is there; and what commands say.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use belfry::{AnyStore, Engine, GUEST, Reader, RunId, Timestamp};
use belfry_config::Loaded;
use belfry_store::sqlite::Sqlite;
use belfry_store::{Holder, Node};
use serde::Serialize;

use crate::content::Content;
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::terminal::{self, Layout};
use crate::words;

/// A store, and who serves it.
pub struct Reach {
    /// For an engine.
    pub store: Arc<AnyStore>,
    pub reads: Reader,
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
    Process(Holder),
    /// So many nodes with a lease.
    Nodes(usize),
}

impl Reach {
    pub async fn of(store: AnyStore, address: String, loaded: Option<Loaded>) -> Result<Reach, Failure> {
        let store = Arc::new(store);
        let reads = Reader::of(&store);
        let now = now(&reads).await?;
        let server = match (&*store, address.strip_prefix("sqlite:")) {
            (AnyStore::Sqlite(_), Some(path)) => Sqlite::server(Path::new(path)).map(Server::Process),
            _ => Some(serving(&reads.nodes().await?, now)).filter(|nodes| *nodes > 0).map(Server::Nodes),
        };
        Ok(Reach { store, reads, address, loaded, server })
    }

    /// How runs are made here: which lanes there are.
    pub fn options(&self) -> belfry::Options {
        match &self.loaded {
            Some(loaded) => crate::up::options(&loaded.settings, self.store.is_shared()),
            None => belfry::Options::default(),
        }
    }
}

/// Where nobody serves a store and the files have changed, they are applied.
pub async fn apply_if_changed(reach: &Reach) -> Result<(), Failure> {
    let Some(loaded) = reach.loaded.as_ref().filter(|_| reach.server.is_none()) else { return Ok(()) };
    for problem in &loaded.invalid {
        crate::reading::show_problem(problem);
    }
    let engine = Engine::builder().store(reach.store.clone()).build();
    let (content, _) = crate::up::apply(&engine, loaded, None).await?;
    if content == Content::Skew {
        say("config skew: the files differ from what the store has; `belfry apply` makes them the same");
    }
    Ok(())
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
pub async fn now(store: &Reader) -> Result<Timestamp, Failure> {
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

/// Words for people, beside the data. Where standard error is closed there is nobody to tell.
pub fn say(text: &str) {
    let _ = writeln!(terminal::stderr(), "{}", words::harmless(text));
}

/// The answer of a command: JSON where it is asked for, else words.
pub fn answer(output: &Output, json: &impl Serialize, text: &str) -> Result<(), Failure> {
    match output.format {
        Format::Table => writeln!(terminal::stdout(), "{}", words::harmless(text))?,
        Format::Json | Format::Jsonl => terminal::json(Layout::Line, [json])?,
    }
    Ok(())
}

/// Runs what waits to its end.
pub fn block_on<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(work)
}
