//! The HTTP side of `belfry up`: where it listens, and how other commands find it.

use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use belfry::Engine;
use belfry_config::{Loaded, Settings};
use belfry_server::{Reload, Server, Told};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::failure::Failure;

/// Beside the store: whoever may read it may do what the server's owner may.
const FILE: &str = "server.json";
/// Requests to read the files again that may wait; each is answered by the same reading.
const RELOADS_MAX: usize = 16;

/// A server that listens, and the file that says so.
pub struct Serving {
    server: Server,
    file: PathBuf,
    /// Requests to read the files again.
    pub reloads: mpsc::Receiver<Reload>,
}

/// What other commands need to talk to a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerFile {
    /// Where it listens.
    pub url: String,
    /// Its process.
    pub pid: u32,
    /// What it lets commands of its owner in with, while it lives.
    pub token: String,
}

/// What is served.
pub struct Scene<'a> {
    pub engine: &'a Engine,
    pub loaded: &'a Loaded,
    pub options: belfry::Options,
    /// The configuration.
    pub file: &'a Path,
    /// Where the state is.
    pub folder: &'a Path,
    /// Instead of what the files say.
    pub listen: Option<SocketAddr>,
    /// Another port will do where this one is taken.
    pub any_port: bool,
}

impl Serving {
    /// Listens. What cannot be is said with the way out.
    pub async fn start(scene: Scene<'_>) -> Result<Serving, Failure> {
        let listen = scene.listen.unwrap_or(scene.loaded.settings.listen);
        let (mut serving, mut error) = (None, None);
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
            };
            match Server::start(told).await {
                Ok(server) => {
                    serving = Some((server, reloads));
                    break;
                }
                Err(failed) => error = Some(failed),
            }
        }
        match (serving, error) {
            (Some((server, reloads)), _) => Ok(Serving { server, file: scene.folder.join(FILE), reloads }),
            (None, Some(error @ belfry_server::Error::Listen { .. })) => Err(Failure::Usage(format!(
                "{error}. Does another server run? `listen: 127.0.0.1:7401` in the file or `--listen` names another address"
            ))),
            (None, Some(error @ belfry_server::Error::Open { .. })) => Err(Failure::Usage(format!(
                "{error}. `belfry token create --scope admin` makes one; `listen: 127.0.0.1:7400` keeps others out"
            ))),
            (None, error) => Err(Failure::Usage(error.map_or_else(String::new, |error| error.to_string()))),
        }
    }

    /// Lets other commands find it.
    pub fn announce(&self) -> Result<(), Failure> {
        let told = ServerFile {
            url: format!("http://{}", self.server.address()),
            pid: std::process::id(),
            token: self.server.local_token().to_owned(),
        };
        // Whole or not at all, and never readable by others.
        let fresh = self.file.with_extension(format!("json.{}", told.pid));
        let write = || -> std::io::Result<()> {
            if let Some(folder) = fresh.parent() {
                std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
            }
            let _ = std::fs::remove_file(&fresh);
            let mut file = std::fs::File::options().write(true).create_new(true).mode(0o600).open(&fresh)?;
            serde_json::to_writer(&mut file, &told)?;
            file.write_all(b"\n")?;
            std::fs::rename(&fresh, &self.file)
        };
        write().map_err(|error| Failure::Usage(format!("cannot write {}: {error}", self.file.display())))
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// The files say something else now.
    pub fn set_settings(&self, settings: Settings) {
        self.server.set_settings(settings);
    }

    /// No longer there.
    pub async fn stop(self) {
        let ours =
            std::fs::read(&self.file).ok().and_then(|text| serde_json::from_slice::<ServerFile>(&text).ok());
        if ours.is_some_and(|told| told.pid == std::process::id()) {
            let _ = std::fs::remove_file(&self.file);
        }
        self.server.stop().await;
    }
}
