//! Where things are: the configuration file, the store, the state beside it; and who answers for the store.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use belfry::Engine;
use belfry_config::{Host, Loaded};
use belfry_server::{Inside, Limits, Told};
use belfry_store::sqlite::Sqlite;
use belfry_store::{AnyStore, STATE_FOLDER, secure, secure_folder};
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use nix::unistd::{Uid, User};
use tokio::sync::mpsc;

use crate::client::Client;
use crate::failure::Failure;
use crate::link::Link;
use crate::noted::caller;
use crate::output::host_zone;
use crate::reach::{self, Reach};
use crate::reading;
use crate::server_file::ServerFile;

/// Which files and which store.
#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub struct Place {
    /// The configuration file [default: belfry.yaml in the current folder]
    #[arg(short = 'c', long = "config", value_name = "FILE", global = true, env = "BELFRY_CONFIG", value_parser = any_path())]
    config: Option<PathBuf>,

    /// Talk to the server at this address rather than to the one on this host, if any: http://host:port
    #[arg(long, value_name = "URL", global = true, env = "BELFRY_SERVER")]
    server: Option<String>,

    /// The token for it [default: the local token, if the server runs in this folder]
    #[arg(long, value_name = "TOKEN", global = true, env = "BELFRY_TOKEN", hide_env_values = true)]
    token: Option<String>,
}

/// Also an empty one, see [`Place::without_empty`].
fn any_path() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

/// Names that are looked for in the current folder.
const NAMES: [&str; 2] = ["belfry.yaml", "belfry.yml"];
/// The name under which the files' agents are kept in the store.
pub const SOURCE: &str = "files";

/// What a command needs of a store that nobody serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// It must be there.
    Store,
    /// It is made where there are files.
    Files,
    /// The same; where the files have changed they are applied first, as `up` does when it starts.
    Run,
}

impl Place {
    /// A configuration file and its store, on this host.
    pub fn of_file(file: PathBuf) -> Place {
        Place { config: Some(file), server: None, token: None }
    }

    /// An option that is empty was not given: scripts often hand on variables that are not set.
    pub fn without_empty(self) -> Place {
        let given = |text: &String| !text.trim().is_empty();
        Place {
            config: self.config.filter(|path| !path.as_os_str().is_empty()),
            server: self.server.filter(given),
            token: self.token.filter(given),
        }
    }

    /// Who answers: the server that was named, the one that serves the store on this host, or else this process.
    pub async fn client(&self, need: Need) -> Result<Client, Failure> {
        if let Some(url) = &self.server {
            let mut link = Link::new(url, self.token.clone())?;
            // A file that cannot be read names no store; its folder may still have a server.
            let address = self.store_address().ok();
            if let Some(known) = ServerFile::of_named(&link, address.as_deref(), &self.file()) {
                known.introduce(&mut link);
                link.token = link.token.or(Some(known.token));
            }
            return Ok(Client::over(link));
        }
        let loaded = match store_variable() {
            Some(_) if need == Need::Store => Ok(None),
            _ => self.load_if_any(),
        };
        let (found, loaded) = match loaded {
            Ok(loaded) => (ServerFile::find(&self.address(loaded.as_ref()), &self.file()).await, loaded),
            // Whoever edits a file must be able to ask the server that runs on as it was.
            Err(wrong) => match ServerFile::beside(&self.file()).await {
                Some(link) => {
                    reading::remark(&format!(
                        "{} cannot be read; the server that runs answers",
                        self.file().display()
                    ));
                    (Some(link), None)
                }
                None => return Err(wrong),
            },
        };
        if let Some(mut link) = found {
            link.token = self.token.clone().or(link.token);
            return Ok(Client::over(link));
        }
        let address = self.address(loaded.as_ref());
        let is_made = need != Need::Store && loaded.is_some();
        let store = open(&address, is_made).await?;
        let reach = Reach::of(store, address, loaded).await?;
        if need == Need::Run {
            reach::apply_if_changed(&reach).await?;
        }
        let inside = self.inside(&reach).await?;
        Ok(Client::here(reach, inside))
    }

    /// The routes of a server, on a store that this process has opened.
    async fn inside(&self, reach: &Reach) -> Result<Inside, Failure> {
        let file = self.file();
        let settings = match &reach.loaded {
            Some(loaded) => loaded.settings.clone(),
            None => load_text("{}\n", &file)?.settings,
        };
        let engine = Engine::builder().store(Arc::clone(&reach.store)).options(reach.options()).build();
        engine.store_now().await?;
        // Nobody reads files again here.
        let (reload, _) = mpsc::channel(1);
        let told = Told {
            engine,
            settings,
            options: reach.options(),
            file: file.display().to_string(),
            reload,
            env: variable,
            version: env!("CARGO_PKG_VERSION"),
            limits: Limits::default(),
        };
        Ok(Inside::new(told, caller()))
    }

    /// Whether a server was named.
    pub fn names_server(&self) -> bool {
        self.server.is_some()
    }

    /// Refuses a server for what opens files and stores.
    pub fn refuse_server(&self, command: &str) -> Result<(), Failure> {
        match self.server {
            Some(_) => Err(Failure::Usage(format!(
                "`belfry {command}` is about files and the store on this host, and does nothing over --server"
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
        self.load_if_any()?.ok_or_else(|| {
            Failure::Usage(format!(
                "there is no {} in this folder. `belfry init` writes one, `-c FILE` names another, and `belfry up --demo` needs none",
                NAMES[0]
            ))
        })
    }

    /// Reads the files, and warns of one-shots whose time has passed.
    pub fn load_to_check(&self) -> Result<Loaded, Failure> {
        let path = self.file();
        if self.config.is_none() && !path.exists() {
            return self.load();
        }
        let zone = host_zone();
        let host = Host { now: Some(belfry_time::Timestamp::now()), ..Host::new(&variable, zone.name()) };
        Ok(belfry_config::load(&path, &host)?)
    }

    /// Reads the files; none where there are none, and nobody has named one.
    fn load_if_any(&self) -> Result<Option<Loaded>, Failure> {
        let path = self.file();
        match self.config.is_none() && !path.exists() {
            true => Ok(None),
            false => load(&path).map(Some),
        }
    }

    /// The address of the store: BELFRY_STORE, or what the files say, or the default beside where they would be.
    pub fn store_address(&self) -> Result<String, Failure> {
        match store_variable() {
            Some(address) => Ok(address),
            None => Ok(self.address(self.load_if_any()?.as_ref())),
        }
    }

    fn address(&self, loaded: Option<&Loaded>) -> String {
        let written = || loaded.map(|loaded| loaded.settings.store.expose().to_owned());
        store_variable().or_else(written).unwrap_or_else(|| "sqlite:.belfry/belfry.db".into())
    }

    /// Opens the store beside a server, if there is one. A file that is not there is not made.
    pub async fn open(&self) -> Result<AnyStore, Failure> {
        open(&self.store_address()?, false).await
    }

    /// Opens the store with what the files say. It is made where it is not there.
    pub async fn open_with_files(&self) -> Result<Reach, Failure> {
        let loaded = self.load()?;
        let address = self.address(Some(&loaded));
        let store = open(&address, true).await?;
        Reach::of(store, address, Some(loaded)).await
    }
}

/// Opens a store beside a server, if there is one.
async fn open(address: &str, is_made: bool) -> Result<AnyStore, Failure> {
    let path = address.strip_prefix("sqlite:").map(Path::new);
    match path.map(|path| (path, path.try_exists())) {
        Some((path, Ok(false))) if !is_made => {
            return Err(Failure::NotFound(format!(
                "there is no store at {} yet; `belfry up` makes it, `-c FILE` or BELFRY_STORE names another",
                path.display()
            )));
        }
        Some((path, Err(error))) => return Err(closed(path, &error)),
        _ => {}
    }
    Ok(AnyStore::open(address, false).await?)
}

/// A store that may be there: this user cannot look.
fn closed(path: &Path, error: &std::io::Error) -> Failure {
    let folder = path.ancestors().skip(1).find_map(|folder| {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        Some((folder, folder.metadata().ok()?))
    });
    let store = path.display();
    let Some((folder, data)) = folder.filter(|_| error.kind() == std::io::ErrorKind::PermissionDenied) else {
        return Failure::Unreachable(format!("cannot look for the store {store}: {error}"));
    };
    let (ours, owner) = (Uid::effective(), Uid::from_raw(data.uid()));
    Failure::Denied(format!(
        "cannot read the folder {} of the store {store}: it belongs to {} (mode {:03o}), and this is {}. Run the command as \
         its owner, or ask the server with --server and --token",
        folder.display(),
        user(owner),
        data.mode() & 0o777,
        user(ours),
    ))
}

/// A user by name, as far as it has one, and number.
fn user(uid: Uid) -> String {
    match User::from_uid(uid) {
        Ok(Some(user)) => format!("user {} ({uid})", user.name),
        _ => format!("user {uid}"),
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

fn store_variable() -> Option<String> {
    variable("BELFRY_STORE").filter(|store| !store.is_empty())
}

/// The folder for what belongs to a node: beside the file of a store that is one, else beside the configuration.
pub fn state_dir(address: &str, config: &Path) -> PathBuf {
    let beside = match address.strip_prefix("sqlite:") {
        // By its own path, so that it has one folder whatever links lead to it.
        Some(path) => {
            let own = Path::new(path).canonicalize().unwrap_or_else(|_| PathBuf::from(path));
            own.parent().map(Path::to_owned)
        }
        None => config.parent().map(|folder| folder.join(STATE_FOLDER)),
    };
    beside.unwrap_or_else(|| PathBuf::from(STATE_FOLDER)).join("run")
}

/// Checks before a node starts that nobody else can reach or replace its state. Gives what is worth saying.
pub fn secure_state(address: &str, config: &Path) -> Result<Vec<String>, Failure> {
    let run = state_dir(address, config);
    let mut told = secure_folder(run.parent().unwrap_or(Path::new("")))?;
    for folder in [run.join("attempts"), run] {
        told.extend(secure(&folder)?);
    }
    if let Some(path) = address.strip_prefix("sqlite:") {
        let folder = Path::new(path).parent().filter(|folder| !folder.as_os_str().is_empty());
        if let Some(kind) = Sqlite::network_file_system(folder.unwrap_or(Path::new("."))) {
            told.push(format!(
                "warning: {path} lies on a network file system ({kind}), where the lock may not keep out a server of another \
                 machine; put the store on a local disk, or use PostgreSQL for several machines"
            ));
        }
    }
    Ok(told)
}
