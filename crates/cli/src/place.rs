//! Where things are: the configuration file, the store, the state beside it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use belfry_config::{Host, Loaded};
use belfry_store::AnyStore;
use clap::Args;

use crate::client::Client;
use crate::failure::Failure;
use crate::output::host_zone;

/// Which files and which store.
#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub struct Place {
    /// The configuration file [default: belfry.yaml in the current folder]
    #[arg(short = 'c', long = "config", value_name = "FILE", global = true, env = "BELFRY_CONFIG")]
    config: Option<PathBuf>,

    /// Talk to the server at this address rather than open the store: http://host:port
    #[arg(long, value_name = "URL", global = true, env = "BELFRY_SERVER")]
    server: Option<String>,

    /// The token for it
    #[arg(long, value_name = "TOKEN", global = true, env = "BELFRY_TOKEN", hide_env_values = true)]
    token: Option<String>,
}

/// Names that are looked for in the current folder.
const NAMES: [&str; 2] = ["belfry.yaml", "belfry.yml"];
/// The name under which the files' agents are kept in the store.
pub const SOURCE: &str = "files";

impl Place {
    /// The server that is to be talked to, where one is named.
    pub fn client(&self) -> Result<Option<Client>, Failure> {
        self.server.as_ref().map(|url| Client::new(url, self.token.clone())).transpose()
    }

    /// Refuses a server for what opens files and stores.
    pub fn refuse_server(&self, command: &str) -> Result<(), Failure> {
        match self.server {
            Some(_) => Err(Failure::Usage(format!(
                "`belfry {command}` works on files and stores, and not over --server; `belfry --help` lists the rest"
            ))),
            None => Ok(()),
        }
    }

    /// The configuration file that is meant, whether it is there or not.
    pub fn file(&self) -> PathBuf {
        match &self.config {
            Some(path) => path.clone(),
            None => {
                NAMES.iter().map(PathBuf::from).find(|path| path.exists()).unwrap_or_else(|| NAMES[0].into())
            }
        }
    }

    /// Reads the files.
    pub fn load(&self) -> Result<Loaded, Failure> {
        let path = self.file();
        if self.config.is_none() && !path.exists() {
            return Err(Failure::Usage(format!(
                "there is no {} in this folder. `belfry init` writes one, `-c FILE` names another, and `belfry up --demo` needs none",
                NAMES[0]
            )));
        }
        load(&path)
    }

    /// The address of the store: BELFRY_STORE, or what the files say, or the default beside where they would be.
    pub fn store_address(&self) -> Result<String, Failure> {
        if let Some(address) = variable("BELFRY_STORE") {
            return Ok(address);
        }
        if self.config.is_none() && !self.file().exists() {
            return Ok("sqlite:.belfry/belfry.db".into());
        }
        Ok(self.load()?.settings.store.expose().to_owned())
    }

    /// How long a node that lives may be silent, by the files where they can be read.
    pub fn silence_max(&self) -> Duration {
        let engine = self.load().map(|loaded| loaded.settings.engine).ok();
        let known = engine.map(|engine| belfry::Options {
            heartbeat: Duration::from_millis(engine.heartbeat_ms),
            dead_after: engine.dead_after,
            ..belfry::Options::default()
        });
        known.unwrap_or_default().silence_max()
    }

    /// Opens the store beside a server, if there is one. A file that is not there is not made.
    pub async fn open(&self) -> Result<AnyStore, Failure> {
        let address = self.store_address()?;
        if let Some(path) = address.strip_prefix("sqlite:")
            && !Path::new(path).exists()
        {
            return Err(Failure::NotFound(format!(
                "there is no store at {path} yet; `belfry up` makes it, `-c FILE` or BELFRY_STORE names another"
            )));
        }
        Ok(AnyStore::open(&address, false).await?)
    }
}

/// Reads one file and those it includes.
pub fn load(path: &Path) -> Result<Loaded, Failure> {
    let zone = host_zone();
    Ok(belfry_config::load(path, &Host::new(&variable, zone.name()))?)
}

/// Reads a configuration that is no file.
pub fn load_text(text: &str, path: &Path) -> Result<Loaded, Failure> {
    let zone = host_zone();
    Ok(belfry_config::load_text(text, path, &Host::new(&variable, zone.name()))?)
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The folder for what belongs to a node: beside the file of a store that is one, else beside the configuration.
pub fn state_dir(address: &str, config: &Path) -> PathBuf {
    let beside = match address.strip_prefix("sqlite:") {
        Some(path) => Path::new(path).parent().map(Path::to_owned),
        None => config.parent().map(|folder| folder.join(".belfry")),
    };
    beside.unwrap_or_else(|| PathBuf::from(".belfry")).join("run")
}
