//! The HTTP side of `belfry up`: where it listens, and how other commands find it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use belfry::{Engine, Event};
use belfry_config::{Loaded, Settings};
use belfry_server::{Limits, Reload, Server, Told};
use tokio::sync::{broadcast, mpsc};

use crate::failure::Failure;
use crate::server_file::ServerFile;

/// Requests to read the files again that may wait; each is answered by the same reading.
const RELOADS_MAX: usize = 16;

/// A server that listens, and the file that says so.
pub struct Serving {
    server: Server,
    file: PathBuf,
    store: String,
    /// Requests to read the files again.
    pub reloads: mpsc::Receiver<Reload>,
}

/// What is served.
pub struct Scene<'a> {
    pub engine: &'a Engine,
    /// What is told to those who listen.
    pub events: broadcast::Receiver<Arc<Event>>,
    pub loaded: &'a Loaded,
    pub options: belfry::Options,
    /// The configuration.
    pub file: &'a Path,
    /// Where the store is.
    pub address: &'a str,
    /// Instead of what the files say.
    pub listen: Option<SocketAddr>,
    /// Connections at once.
    pub connections_max: usize,
    /// Another port will do where this one is taken.
    pub any_port: bool,
}

impl Serving {
    /// Listens. What cannot be is said with the way out.
    pub async fn start(scene: Scene<'_>) -> Result<Serving, Failure> {
        let file = ServerFile::path(scene.address, scene.file);
        ServerFile::check(&file)?;
        let listen = scene.listen.unwrap_or(scene.loaded.settings.listen);
        let (mut serving, mut error, mut events) = (None, None, Some(scene.events));
        for port in [Some(listen.port()), scene.any_port.then_some(0)].into_iter().flatten() {
            let (reload, reloads) = mpsc::channel(RELOADS_MAX);
            let mut settings = scene.loaded.settings.clone();
            settings.listen = SocketAddr::new(listen.ip(), port);
            let told = Told {
                engine: scene.engine.clone(),
                settings,
                options: scene.options.clone(),
                file: scene.file.display().to_string(),
                reload,
                env: |name| std::env::var(name).ok(),
                version: env!("CARGO_PKG_VERSION"),
                limits: Limits { connections_max: scene.connections_max, ..Limits::default() },
            };
            let events = events.take().unwrap_or_else(|| scene.engine.events());
            match Server::start(told, events).await {
                Ok(server) => {
                    serving = Some((server, reloads));
                    break;
                }
                Err(failed) => error = Some(failed),
            }
        }
        match (serving, error) {
            (Some((server, reloads)), _) => {
                Ok(Serving { server, file, store: ServerFile::store_of(scene.address), reloads })
            }
            (None, Some(error @ belfry_server::Error::Listen { .. })) => Err(Failure::Usage(format!(
                "{error}. Does another server run? `listen: 127.0.0.1:7401` in the file or `--listen` names another address"
            ))),
            (None, Some(error @ belfry_server::Error::Open { .. })) => Err(Failure::Usage(format!(
                "{error}. `belfry token create --scope admin` makes one; `listen: 127.0.0.1:7400` keeps others out"
            ))),
            (None, Some(error @ belfry_server::Error::OpenToAll { .. })) => Err(Failure::Usage(format!(
                "{error}. Remove `open: true` from the file, or listen on 127.0.0.1"
            ))),
            (None, error) => Err(Failure::Usage(error.map_or_else(String::new, |error| error.to_string()))),
        }
    }

    /// Lets other commands find it.
    pub fn announce(&self) -> Result<(), Failure> {
        let token = self.server.local_token().to_owned();
        let told = ServerFile::of_this_process(self.server.url(), token, self.store.clone());
        told.write(&self.file)
            .map_err(|error| Failure::Usage(format!("cannot write {}: {error}", self.file.display())))
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// A link that logs a browser in: once, within ten minutes.
    pub fn login_link(&self) -> String {
        self.server.login_link()
    }

    /// The files say something else now.
    pub fn set_settings(&self, settings: Settings) {
        self.server.set_settings(settings);
    }

    /// No longer there.
    pub async fn stop(self) {
        ServerFile::remove(&self.file);
        self.server.stop().await;
    }
}
