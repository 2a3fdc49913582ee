//! What every request finds: the engine, its store, and what the server was told about itself.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use belfry::api::Run;
use belfry::{Engine, Reader, Timestamp};
use belfry_config::{Api, Inherited, Settings};
use belfry_core::{AgentDefinition, RunId, RunState};
use belfry_store::{RunRecord, ScheduleRecord};
use parking_lot::RwLock;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot, watch};

use crate::audit;
use crate::bodies::Bodies;
use crate::codes::Codes;
use crate::limiter::Limiter;
use crate::limits::Limits;
use crate::meters::Meters;
use crate::problem::Problem;
use crate::readers::Readers;
use crate::ring::Ring;
use crate::tokens::Tokens;

/// Reads of many schedules at once. More of them would not be quicker: they wait for the same store.
const MANY_AT_ONCE: usize = 4;

/// How the files were read again.
pub type Reloaded = Result<String, String>;
/// Asks for that, and is told.
pub type Reload = oneshot::Sender<Reloaded>;

/// What a server is told at its start.
pub struct Told {
    /// What it speaks for.
    pub engine: Engine,
    /// What the files say.
    pub settings: Settings,
    /// How runs are made: which lanes there are.
    pub options: belfry::Options,
    /// The file that owns what came from files, as people name it.
    pub file: String,
    /// Reads the files again.
    pub reload: mpsc::Sender<Reload>,
    /// The environment, for the secrets of webhooks.
    pub env: fn(&str) -> Option<String>,
    /// The version of the binary.
    pub version: &'static str,
    /// What peers may take.
    pub limits: Limits,
}

/// What every request finds.
pub struct Shared {
    pub engine: Engine,
    pub options: belfry::Options,
    pub file: String,
    pub env: fn(&str) -> Option<String>,
    pub version: &'static str,
    pub limits: Limits,
    pub listen: SocketAddr,
    pub reload: mpsc::Sender<Reload>,
    /// Edits of schedules by this node, one after the other. Other nodes edit too: each edit says what it was decided on.
    pub edits: tokio::sync::Mutex<()>,
    /// Reads of many schedules at once: their definitions may be large.
    pub many: Semaphore,
    /// Whether the server is about to end: what streams, ends.
    pub ending: watch::Sender<bool>,
    pub meters: Meters,
    /// The token of commands on this host: `server.json` holds it, the store does not.
    pub local_token: String,
    pub tokens: Tokens,
    /// Codes for browser logins.
    pub codes: Codes,
    pub limiter: Limiter,
    pub bodies: Bodies,
    /// Wrong codes of each peer.
    pub wrong_codes: Limiter,
    pub readers: Readers,
    /// When it was last tried whether the store takes writes, and what came of it.
    pub probed: tokio::sync::Mutex<Option<(tokio::time::Instant, Result<(), String>)>>,
    /// Somebody has come to listen.
    pub came: Notify,
    pub ring: Ring,
    /// What describes the API.
    pub document: OnceLock<String>,
    settings: RwLock<Arc<Settings>>,
}

/// Waits until the server is about to end.
pub async fn ended(ending: &mut watch::Receiver<bool>) {
    // Where nobody can say so any more, it has.
    let _ = ending.wait_for(|ending| *ending).await;
}

impl Shared {
    pub fn new(told: Told, listen: SocketAddr) -> Shared {
        Shared {
            engine: told.engine,
            options: told.options,
            file: told.file,
            env: told.env,
            version: told.version,
            limits: told.limits,
            listen,
            reload: told.reload,
            edits: tokio::sync::Mutex::default(),
            many: Semaphore::new(MANY_AT_ONCE),
            ending: watch::Sender::new(false),
            meters: Meters::new(),
            local_token: crate::secret::random(),
            tokens: Tokens::default(),
            codes: Codes::default(),
            limiter: Limiter::default(),
            bodies: Bodies::new(told.limits.bodies_bytes_max),
            wrong_codes: Limiter::default(),
            readers: Readers::new(told.limits.connections_max),
            probed: tokio::sync::Mutex::default(),
            came: Notify::new(),
            ring: Ring::new(),
            document: OnceLock::new(),
            settings: RwLock::new(Arc::new(told.settings)),
        }
    }

    pub fn store(&self) -> &Reader {
        self.engine.reads()
    }

    /// What time it is for the store, which keeps microseconds.
    pub fn now(&self) -> Timestamp {
        let now = self.engine.now();
        Timestamp::from_microsecond(now.as_microsecond()).unwrap_or(now)
    }

    pub fn settings(&self) -> Arc<Settings> {
        self.settings.read().clone()
    }

    /// The files say something else now. Where it listens stays as it is.
    pub fn set_settings(&self, settings: Settings) {
        *self.settings.write() = Arc::new(settings);
        self.tokens.changes.send_replace(());
    }

    pub fn api(&self) -> Api {
        self.settings.read().api.clone()
    }

    /// A schedule, or what there is instead.
    pub async fn schedule(&self, name: &str) -> Result<ScheduleRecord, Problem> {
        match self.store().schedule(name).await? {
            Some(record) => Ok(record),
            None => Err(self.no_schedule(name).await?),
        }
    }

    /// What a schedule's agent is.
    pub async fn agent_of(&self, record: &ScheduleRecord) -> Result<AgentDefinition, Problem> {
        let found = self.store().definitions(&[record.id]).await?.into_iter().next().flatten();
        Ok(found.map(|found| (*found.agent_definition).clone()).unwrap_or_default())
    }

    /// Runs as they are shown, those that run with their heartbeat.
    pub async fn runs_of(&self, records: &[RunRecord]) -> Result<Vec<Run>, Problem> {
        let (now, silence_max) = (self.now(), self.options.silence_max());
        let nodes = match records.iter().any(|run| run.state == RunState::Running) {
            true => self.store().nodes().await?,
            false => Vec::new(),
        };
        Ok(records.iter().map(|run| Run::of(run).seen_by(&nodes, now, silence_max)).collect())
    }

    /// A run as it is shown. Its prompt and its payload, which may take a lot of memory, are not read.
    pub async fn run(&self, id: RunId) -> Result<RunRecord, Problem> {
        let run = self.store().runs_by_id(&[id]).await?.pop();
        run.ok_or_else(|| Problem::not_found(format!("there is no run {id}, or it is no longer kept")))
    }

    /// What a schedule takes over where it is silent.
    pub fn inherited(settings: &Settings) -> Inherited<'_> {
        Inherited {
            timezone: settings.timezone_is_named.then_some(settings.timezone.as_str()),
            host_timezone: &settings.timezone,
            late_after_ms: settings.engine.late_after_ms,
        }
    }

    /// Refuses new work while the node lets its work end.
    pub fn refuse_draining(&self) -> Result<(), Problem> {
        let problem = match self.engine.status() {
            belfry::Status::Draining => {
                Problem::unavailable("draining", "this node was told to drain: it takes no new work")
                    .way_out("ask another node, or let this one work again: `belfry nodes drain this --undo`")
            }
            belfry::Status::Stopping => {
                Problem::unavailable("draining", "this node is ending: it takes no new work")
            }
            _ => return Ok(()),
        };
        audit::made(false);
        Err(problem)
    }
}
