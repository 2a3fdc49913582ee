//! A PostgreSQL for tests: the one that `DATABASE_URL` names, or a throw-away server of this test process.
//!
//! The server has no port, its folder is short and reachable by another user, and a watchdog ends it and removes the
//! folder however this process dies. Fetching PostgreSQL where there is none is left to `cargo xtask`.

// Each test file uses a part of it.
#![allow(dead_code)]

use std::fs;
use std::io::{self, Write};
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// `nobody`: PostgreSQL refuses to run as root.
const NOBODY: u32 = 65534;

/// Tests start from nothing anyway, and many servers share a machine.
const CARELESS: [&str; 8] = [
    "-c",
    "fsync=off",
    "-c",
    "synchronous_commit=off",
    "-c",
    "full_page_writes=off",
    "-c",
    "shared_buffers=64MB",
];

static SERVER: OnceLock<Result<Server, String>> = OnceLock::new();
static DURABLE: AtomicBool = AtomicBool::new(false);
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Where to connect, without a database.
struct Server {
    url: String,
    /// The watchdog reads from this; it ends when we do.
    _watchdog: Option<ChildStdin>,
    _process: Option<Child>,
}

/// Whether the server of this process, which is started with its first database, writes to disk what it answers for.
pub fn durable(durable: bool) {
    DURABLE.store(durable, Ordering::SeqCst);
}

/// A connection string to a new, empty database. `None`, with a loud word, where there is no PostgreSQL; under `CI=true`
/// that is a failure.
pub fn fresh_database() -> Option<String> {
    let server = match SERVER.get_or_init(Server::start) {
        Ok(server) => server,
        Err(reason) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "no PostgreSQL: {reason}");
            // Written past the capture of the test harness.
            let words = format!("\nSKIPPED: this test needs PostgreSQL, and {reason}\n");
            drop(io::stderr().write_all(words.as_bytes()));
            return None;
        }
    };
    let name = format!("belfry_test_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::SeqCst));
    execute(&server.url, &format!("create database {name}")).expect("a new database");
    Some(with_database(&server.url, &name))
}

impl Server {
    fn start() -> Result<Server, String> {
        for name in ["DATABASE_URL", "TEST_DATABASE_URL"] {
            if let Ok(url) = std::env::var(name)
                && !url.is_empty()
            {
                drop_leftovers(&url)?;
                return Ok(Server { url, _watchdog: None, _process: None });
            }
        }
        let bin = find().ok_or(
            "neither DATABASE_URL is set nor are initdb and postgres found in PG_BIN, PATH or /usr/lib/postgresql",
        )?;
        start(&bin).map_err(|error| format!("{} did not start: {error}", bin.display()))
    }
}

fn start(bin: &Path) -> io::Result<Server> {
    let own = Own::new(bin, &format!("pgt-{}", std::process::id()), DURABLE.load(Ordering::SeqCst))?;
    let url = own.url();
    Ok(Server { url, _watchdog: Some(own.watchdog), _process: Some(own.process) })
}

/// A server of this test process alone.
pub struct Own {
    bin: PathBuf,
    folder: PathBuf,
    is_durable: bool,
    more: Vec<String>,
    watchdog: ChildStdin,
    process: Child,
}

impl Own {
    /// A durable server that a test may kill; `None`, with a loud word, where there is no PostgreSQL to be started.
    pub fn fresh() -> Option<Own> {
        let Some(bin) = find() else {
            drop(io::stderr().write_all(b"\nSKIPPED: this test needs the programs of PostgreSQL\n"));
            return None;
        };
        let number = NUMBER.fetch_add(1, Ordering::SeqCst);
        Some(Own::new(&bin, &format!("pgo-{}-{number}", std::process::id()), true).expect("a server"))
    }

    pub fn url(&self) -> String {
        format!("host={} user=postgres dbname=postgres", self.folder.display())
    }

    /// A new database whose tables are in a folder of their own.
    pub fn database_at(&self, folder: &Path) -> String {
        fs::create_dir_all(folder).expect("a folder");
        if is_root() {
            chown(folder, Some(NOBODY), Some(NOBODY)).expect("a folder for the server");
        }
        let sql = format!("create tablespace elsewhere location '{}'", folder.display());
        execute(&self.url(), &sql).expect("a tablespace");
        execute(&self.url(), "create database elsewhere tablespace elsewhere").expect("a database");
        with_database(&self.url(), "elsewhere")
    }

    /// Starts it again, open to connections over the network of this machine, at the answered port, which are encrypted.
    pub fn restart_with_tls(&mut self, certificate: &str, key: &str) -> u16 {
        for (name, text) in [("server.crt", certificate), ("server.key", key)] {
            let path = self.folder.join("data").join(name);
            fs::write(&path, text).expect("a file of the server");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("a private file");
            if is_root() {
                chown(&path, Some(NOBODY), Some(NOBODY)).expect("a file of the server");
            }
        }
        let rules = "local all all trust\nhostssl all all 127.0.0.1/32 trust\n";
        fs::write(self.folder.join("data/pg_hba.conf"), rules).expect("who may connect");
        let free = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port");
        // The socket keeps its name; what is said last counts.
        let link = self.folder.join(".s.PGSQL.5432");
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(format!(".s.PGSQL.{}", free.port()), &link).expect("the usual name");
        let port = format!("port={}", free.port());
        let more = ["-c", "listen_addresses=127.0.0.1", "-c", &port, "-c", "ssl=on"];
        self.more = more.map(str::to_owned).to_vec();
        self.kill_and_restart();
        free.port()
    }

    /// Kills it as a lost machine would, without a word to anybody, and starts it again.
    pub fn kill_and_restart(&mut self) {
        self.process.kill().expect("a kill");
        self.process.wait().expect("its end");
        let began = Instant::now();
        // Its children end when they notice, and nobody starts before.
        while let Err(error) = self.restart() {
            assert!(began.elapsed() < Duration::from_secs(60), "{error}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn restart(&mut self) -> io::Result<()> {
        self.process = launch(&self.bin, &self.folder, self.is_durable, &self.more)?;
        Ok(())
    }

    fn new(bin: &Path, name: &str, is_durable: bool) -> io::Result<Own> {
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder)?;
        if is_root() {
            chown(&folder, Some(NOBODY), Some(NOBODY))?;
        }
        // Before the first file is written: whoever is killed in the middle leaves nothing behind either.
        let watchdog = watch(&folder)?;
        let made = command(bin, "initdb", &folder)
            .arg("-D")
            .arg(folder.join("data"))
            .args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"])
            .output()?;
        if !made.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&made.stderr).into_owned()));
        }
        let process = launch(bin, &folder, is_durable, &[])?;
        Ok(Own { bin: bin.to_owned(), folder, is_durable, more: Vec::new(), watchdog, process })
    }
}

fn command(bin: &Path, program: &str, folder: &Path) -> Command {
    let mut command = Command::new(bin.join(program));
    command.env_clear().env("LC_ALL", "C").current_dir(folder).stdin(Stdio::null()).process_group(0);
    if is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command
}

/// Starts a server, and waits until it answers.
fn launch(bin: &Path, folder: &Path, is_durable: bool, more: &[String]) -> io::Result<Child> {
    let log = fs::File::create(folder.join("log"))?;
    let mut process = command(bin, "postgres", folder)
        .arg("-D")
        .arg(folder.join("data"))
        .args(["-c", "listen_addresses=", "-c", &format!("unix_socket_directories={}", folder.display())])
        .args(if is_durable { &[][..] } else { &CARELESS[..] })
        .args(["-c", "max_connections=200", "-c", "deadlock_timeout=200ms"])
        .args(more)
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()?;
    let url = format!("host={} user=postgres dbname=postgres", folder.display());
    let began = Instant::now();
    while UnixStream::connect(folder.join(".s.PGSQL.5432")).is_err() || execute(&url, "select 1").is_err() {
        if process.try_wait()?.is_some() || began.elapsed() > Duration::from_secs(60) {
            let log = fs::read_to_string(folder.join("log")).unwrap_or_default();
            return Err(io::Error::other(log));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(process)
}

/// Ends the server and removes its folder when our end of the pipe is closed, which any death does.
fn watch(folder: &Path) -> io::Result<ChildStdin> {
    let script = r#"read _
        pid=$(head -n 1 "$0/data/postmaster.pid" 2>/dev/null)
        if [ -n "$pid" ]; then
            kill -QUIT "$pid" 2>/dev/null
            while kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
        fi
        rm -rf "$0"; sleep 1; rm -rf "$0""#;
    let mut watchdog = Command::new("sh")
        .arg("-c")
        .arg(script)
        .arg(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()?;
    watchdog.stdin.take().ok_or_else(|| io::Error::other("no pipe to the watchdog"))
}

/// The folder of `initdb` and `postgres`. Distributions link only some tools, so links are followed.
fn find() -> Option<PathBuf> {
    let named = std::env::var_os("PG_BIN").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path)
        .filter_map(|folder| folder.join("initdb").canonicalize().ok()?.parent().map(Path::to_path_buf));
    let mut packaged: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let entry = entry.ok()?;
            Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin")))
        })
        .collect();
    packaged.sort();
    let packaged = packaged.into_iter().rev().map(|(_, bin)| bin);
    let other = ["/opt/homebrew/opt/postgresql/bin", "/usr/local/opt/postgresql/bin"].map(PathBuf::from);
    let is_whole = |bin: &PathBuf| bin.join("initdb").exists() && bin.join("postgres").exists();
    named.into_iter().chain(in_path).chain(packaged).chain(other).find(is_whole)
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

/// The same server with another database.
fn with_database(url: &str, name: &str) -> String {
    if !url.contains("://") {
        return format!("{url} dbname={name}");
    }
    let (address, query) = url.split_once('?').map_or((url, None), |(address, query)| (address, Some(query)));
    let host = address.find("://").map_or(0, |at| at + 3);
    let end = address[host..].find('/').map_or(address.len(), |at| host + at);
    let query = query.map_or(String::new(), |query| format!("?{query}"));
    format!("{}/{name}{query}", &address[..end])
}

/// Removes databases of test processes that are gone.
fn drop_leftovers(url: &str) -> Result<(), String> {
    let names = execute(url, "select datname::text from pg_database where datname like 'belfry\\_test\\_%'")?;
    for name in names {
        let pid = name.split('_').nth(2).unwrap_or_default();
        let is_alive = pid.parse::<u32>().is_ok() && Path::new("/proc").join(pid).exists();
        if !is_alive {
            // Another test process may be at it too.
            drop(execute(url, &format!("drop database if exists {name}")));
        }
    }
    Ok(())
}

/// Runs a statement on a connection of its own and gives the first column, from wherever we are called.
fn execute(url: &str, sql: &str) -> Result<Vec<String>, String> {
    let (url, sql) = (url.to_owned(), sql.to_owned());
    let work = async move {
        let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
        tokio::spawn(async move { drop(connection.await) });
        let rows = client.simple_query(&sql).await?;
        let first = |message: &tokio_postgres::SimpleQueryMessage| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
            _ => None,
        };
        Ok::<_, tokio_postgres::Error>(rows.iter().filter_map(first).collect())
    };
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.map_err(|error| error.to_string())?.block_on(work).map_err(|error| format!("{error:?}"))
    });
    thread.join().map_err(|_| "the thread of a statement panicked".to_owned())?
}
