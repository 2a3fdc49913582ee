//! The real binary in a folder of its own, on either store: started, listened to, signalled, waited for.
//!
//! Nothing here sleeps to let something happen. It waits for a line: of what `up` prints, or of the side log that only the
//! children write. Every wait has an end, and says what it waited for.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::print_stderr)]

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

mod events;
#[path = "../../../store/tests/support/pg.rs"]
pub mod pg;

/// How long anything may take that is waited for: far more than it does, also on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A folder with a configuration, and a store.
pub struct Site {
    folder: TempDir,
    pub store: String,
}

impl Site {
    pub fn sqlite() -> Site {
        let folder = tempfile::tempdir().unwrap();
        let store = format!("sqlite:{}/belfry.db", folder.path().display());
        Site { folder, store }
    }

    /// A new database; nothing, with a loud word, where there is no PostgreSQL.
    pub fn postgres() -> Option<Site> {
        let url = pg::fresh_database()?;
        Some(Site { folder: tempfile::tempdir().unwrap(), store: as_address(&url) })
    }

    /// Another folder with the same store: for another node.
    pub fn beside(&self) -> Site {
        Site { folder: tempfile::tempdir().unwrap(), store: self.store.clone() }
    }

    /// One of each store that there is.
    pub fn each() -> impl Iterator<Item = Site> {
        std::iter::once(Some(Site::sqlite())).chain(std::iter::once_with(Site::postgres)).flatten()
    }

    /// The store that a test on one has not been on yet: PostgreSQL, where there is one.
    pub fn other() -> Site {
        Site::postgres().unwrap_or_else(Site::sqlite)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A file of the server's state: beside the file of a store, else beside the configuration.
    pub fn state_file(&self, name: &str) -> PathBuf {
        match self.store.starts_with("sqlite:") {
            true => self.path(name),
            false => self.path(".belfry").join(name),
        }
    }

    /// Writes the configuration, in one go as an editor does; the store is added to it.
    pub fn config(&self, text: &str) {
        self.raw_config(&format!("store: \"{}\"\n{text}", self.store));
    }

    /// The configuration as it is.
    pub fn raw_config(&self, text: &str) {
        self.file("belfry.yaml.new", text);
        std::fs::rename(self.path("belfry.yaml.new"), self.path("belfry.yaml")).unwrap();
    }

    pub fn file(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// The binary, in this folder.
    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_belfry"));
        self.settle(&mut command);
        command
    }

    pub fn up(&self) -> Up {
        self.up_with(|_| {})
    }

    /// With a word about how it is started.
    pub fn up_with(&self, change: impl FnOnce(&mut Command)) -> Up {
        let mut command = self.command();
        command.args(["up", "--log-format", "json"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        change(&mut command);
        Up::listen_to(command.spawn().unwrap())
    }

    /// A server that is started by a shell, after a line that changes what it inherits.
    pub fn up_after(&self, line: &str) -> Up {
        self.start_after(line, Path::new(env!("CARGO_BIN_EXE_belfry")), |_| {})
    }

    /// The same with another binary, and with a word about how it is started.
    pub fn start_after(&self, line: &str, binary: &Path, change: impl FnOnce(&mut Command)) -> Up {
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("{line}; exec \"$@\"")).arg("sh").arg(binary);
        command.args(["up", "--log-format", "json"]);
        self.settle(&mut command);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        change(&mut command);
        Up::listen_to(command.spawn().unwrap())
    }

    fn settle(&self, command: &mut Command) {
        command.current_dir(self.folder.path()).env_remove("BELFRY_STORE").env_remove("BELFRY_CONFIG");
        command.env("TZ", "UTC").env("BELFRY_LISTEN", "127.0.0.1:0").stdin(Stdio::null());
    }

    /// A command that ends.
    pub fn belfry(&self, arguments: &[&str]) -> Output {
        self.belfry_with(arguments, |_| {})
    }

    /// With a word about how it is started.
    pub fn belfry_with(&self, arguments: &[&str], change: impl FnOnce(&mut Command)) -> Output {
        let mut command = self.command();
        change(&mut command);
        let child = command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (pid, done) = (child.id(), channel::<()>());
        let (tell, told) = done;
        let watchdog = std::thread::spawn(move || {
            let late = told.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout);
            if late {
                let _ = kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGKILL);
            }
            late
        });
        let output = child.wait_with_output().unwrap();
        drop(tell);
        assert!(!watchdog.join().unwrap(), "{arguments:?} does not end");
        output
    }

    /// What a command prints as JSON.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let output = self.belfry(&[arguments, &["-o", "json"]].concat());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {} {errors}", output.status);
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// All runs of a schedule, newest first.
    pub fn runs(&self, schedule: &str) -> Vec<Value> {
        let runs = self.json(&["runs", schedule, "-n", "1000"]);
        runs["items"].as_array().unwrap().clone()
    }

    /// The side log: whole lines, as words.
    pub fn side(&self) -> Vec<Vec<String>> {
        let text = std::fs::read_to_string(self.path("side.log")).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| line.split(' ').map(str::to_owned).collect()).collect()
    }

    /// Waits until the side log is as it should be, and gives it.
    pub fn wait_for_side(&self, what: &str, is_so: impl Fn(&[Vec<String>]) -> bool) -> Vec<Vec<String>> {
        eventually(what, || Some(self.side()).filter(|lines| is_so(lines)))
    }

    /// Waits for a line that begins with these words.
    pub fn wait_for_line(&self, words: &str) -> Vec<String> {
        let begins = |line: &Vec<String>| {
            let line = line.join(" ");
            line == words || line.starts_with(&format!("{words} "))
        };
        let lines = self.wait_for_side(words, |lines| lines.iter().any(begins));
        lines.into_iter().find(begins).unwrap()
    }
}

/// Looks again and again until there is an answer.
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Whether a process lives: a zombie does not.
pub fn lives(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

/// A running `belfry up`. It is killed when it is let go of.
pub struct Up {
    child: Child,
    lines: Receiver<Value>,
    /// All that it has said and somebody has heard.
    pub seen: Vec<Value>,
    at: usize,
    errors: Arc<Mutex<String>>,
    /// Closed once standard error is.
    silence: Receiver<()>,
}

impl Up {
    fn listen_to(mut child: Child) -> Up {
        let (send, lines) = channel();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            let mut line = Vec::new();
            // A line that was cut by a kill is none.
            while out.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) && line.ends_with(b"\n") {
                let text = String::from_utf8_lossy(&line).into_owned();
                let value = serde_json::from_str(&text).unwrap_or(Value::String(text));
                if send.send(value).is_err() {
                    return;
                }
                line.clear();
            }
        });
        let errors = Arc::new(Mutex::new(String::new()));
        let (kept, mut from) = (errors.clone(), child.stderr.take().unwrap());
        let (speaks, silence) = channel();
        std::thread::spawn(move || {
            let _speaks = speaks;
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = from.read(&mut buffer) {
                kept.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..read]));
            }
        });
        Up { child, lines, seen: Vec::new(), at: 0, errors, silence }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.pid()).unwrap()), signal).unwrap();
    }

    /// What it wrote to standard error so far.
    pub fn errors(&self) -> String {
        self.errors.lock().unwrap().clone()
    }

    /// The next event after the last one that was waited for which is as it should be.
    pub fn wait_for(&mut self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let began = Instant::now();
        loop {
            while let Some(event) = self.seen.get(self.at) {
                self.at += 1;
                if is_so(event) {
                    return event.clone();
                }
            }
            match self.lines.recv_timeout(PATIENCE.saturating_sub(began.elapsed())) {
                Ok(event) => self.hear(event),
                Err(RecvTimeoutError::Timeout) => panic!("waited in vain for {what}: {}", self.told()),
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("it ended before {what}: {} {}", self.told(), self.errors())
                }
            }
        }
    }

    /// The next event of that name.
    pub fn event(&mut self, name: &str) -> Value {
        self.wait_for(name, |event| event["event"] == name)
    }

    /// The next event of that name about a schedule.
    pub fn event_of(&mut self, name: &str, schedule: &str) -> Value {
        self.wait_for(&format!("{name} of {schedule}"), |event| {
            event["event"] == name && event["schedule"] == schedule
        })
    }

    /// All that it has said up to now.
    pub fn heard(&mut self) -> &[Value] {
        while let Ok(event) = self.lines.try_recv() {
            self.hear(event);
        }
        &self.seen
    }

    /// Every line that it prints is an event as the others know it.
    fn hear(&mut self, event: Value) {
        events::check(&event);
        self.seen.push(event);
    }

    fn told(&self) -> String {
        let last = self.seen.len().saturating_sub(12);
        self.seen[last..].iter().map(|event| format!("\n{event}")).collect()
    }

    /// Its end, should it come in time.
    pub fn ends_within(&mut self, time: Duration) -> Option<ExitStatus> {
        let began = Instant::now();
        while began.elapsed() < time {
            if self.child.try_wait().unwrap().is_some() {
                return Some(self.ends());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        None
    }

    /// Waits for its end, and hears the rest.
    pub fn ends(&mut self) -> ExitStatus {
        let mut child = eventually("its end", || self.child.try_wait().unwrap());
        while let Ok(event) = self.lines.recv_timeout(PATIENCE) {
            self.hear(event);
        }
        let _ = self.silence.recv_timeout(PATIENCE);
        if let Some(status) = self.child.try_wait().unwrap() {
            child = status;
        }
        child
    }

    /// Lets what runs end; that is no failure.
    pub fn stop(&mut self) {
        self.signal(Signal::SIGTERM);
        let status = self.ends();
        assert_eq!(status.code(), Some(0), "{} {}", self.told(), self.errors());
    }

    /// As if the power went.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // The keeper ends the children.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `host=/folder user=… dbname=…` as an address.
pub fn as_address(url: &str) -> String {
    if url.starts_with("postgres") {
        return url.to_owned();
    }
    let part = |name: &str| {
        url.split(' ').filter_map(|word| word.strip_prefix(name)).next_back().unwrap_or_default().to_owned()
    };
    format!("postgres://{}@{}/{}", part("user="), part("host=").replace('/', "%2F"), part("dbname="))
}

/// A number from the environment, for longer versions of a test.
pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// A path as text.
pub fn text(path: &Path) -> String {
    path.display().to_string()
}

/// All runs of a store, page by page.
pub async fn all_runs(store: &belfry_store::AnyStore) -> Vec<belfry_store::RunRecord> {
    use belfry_store::Store;
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let page = store.runs(&belfry_store::RunFilter::default(), after, 500).await.unwrap();
        for listed in page.items {
            // With what lists leave out.
            all.extend(store.run(listed.id).await.unwrap());
        }
        match page.next {
            Some(next) => after = Some(next),
            None => return all,
        }
    }
}
