//! A folder with a configuration, and the real binary in it.

#![allow(dead_code, clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

/// Nothing here takes this long; whoever waits longer waits for ever.
const LONGEST: Duration = Duration::from_secs(60);

/// A folder with a `belfry.yaml`.
pub struct Site {
    folder: TempDir,
}

/// What a command said and how it ended.
#[derive(Debug)]
pub struct Said {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Site {
    pub fn new(config: &str) -> Site {
        let site = Site { folder: tempfile::tempdir().unwrap() };
        site.write("belfry.yaml", config);
        site
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path().join(name), text).unwrap();
    }

    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path().join(name)).unwrap_or_default()
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_belfry"));
        command.args(arguments).current_dir(self.path()).env("TZ", "Europe/Vienna").stdin(Stdio::null());
        // Any port that is free: tests run beside each other.
        command.env("BELFRY_LISTEN", "127.0.0.1:0");
        for name in ["BELFRY_STORE", "BELFRY_CONFIG", "NO_COLOR", "TRACEPARENT"] {
            command.env_remove(name);
        }
        command
    }

    /// Runs a command to its end.
    pub fn run(&self, arguments: &[&str]) -> Said {
        said(self.command(arguments).output().unwrap())
    }

    /// Runs a command that is to succeed, and gives what it printed.
    #[track_caller]
    pub fn ok(&self, arguments: &[&str]) -> String {
        let said = self.run(arguments);
        assert_eq!(said.code, 0, "belfry {}: {said:?}", arguments.join(" "));
        said.out.trim_end().to_owned()
    }

    /// Runs a command that is to succeed, and gives its JSON.
    #[track_caller]
    pub fn json(&self, arguments: &[&str]) -> Value {
        let all = [arguments, &["-o", "json"]].concat();
        let out = self.ok(&all);
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"))
    }

    /// Runs a command that is to fail, with this code and these words.
    #[track_caller]
    pub fn refused(&self, arguments: &[&str], code: i32, words: &str) {
        let said = self.run(arguments);
        assert_eq!(said.code, code, "belfry {}: {said:?}", arguments.join(" "));
        assert!(said.err.contains(words), "{words:?} is not in {}", said.err);
    }

    pub fn start(&self, arguments: &[&str]) -> Running {
        let mut child =
            self.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        Running { child, out: pass_on(out), err: pass_on(err) }
    }

    /// A server, once it has started.
    pub fn up(&self) -> Running {
        let server = self.start(&["up", "--log-format", "json"]);
        server.wait_for("node_started");
        server
    }
}

pub fn said(output: Output) -> Said {
    Said {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8_lossy(&output.stdout).into_owned(),
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// A process with what it writes, line by line. It is ended when the test ends.
pub struct Running {
    pub child: Child,
    out: Receiver<String>,
    err: Receiver<String>,
}

impl Running {
    /// The next line of standard output that holds some words.
    #[track_caller]
    pub fn wait_for(&self, words: &str) -> String {
        wait_in(&self.out, words)
    }

    /// The next line of standard error that holds some words.
    #[track_caller]
    pub fn wait_for_error(&self, words: &str) -> String {
        wait_in(&self.err, words)
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        nix::sys::signal::kill(pid, signal).unwrap();
    }

    /// Waits for its end, and gives its code.
    #[track_caller]
    pub fn end(mut self) -> i32 {
        loop {
            match self.out.recv_timeout(LONGEST) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("it does not end"),
            }
        }
        self.child.wait().unwrap().code().unwrap_or(-1)
    }

    /// Ends it in good order.
    pub fn stop(self) -> i32 {
        self.signal(nix::sys::signal::Signal::SIGTERM);
        self.end()
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[track_caller]
fn wait_in(lines: &Receiver<String>, words: &str) -> String {
    let mut seen = Vec::new();
    loop {
        match lines.recv_timeout(LONGEST) {
            Ok(line) if line.contains(words) => return line,
            Ok(line) => seen.push(line),
            Err(_) => panic!("{words:?} did not come, but:\n{}", seen.join("\n")),
        }
    }
}

fn pass_on(from: impl Read + Send + 'static) -> Receiver<String> {
    let (send, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                return;
            }
        }
    });
    lines
}

/// Opens the site's store and asks it something.
pub fn ask<T>(address: &str, question: impl AsyncFnOnce(belfry_store::AnyStore) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async { question(belfry_store::AnyStore::open(address, false).await.unwrap()).await })
}

impl Site {
    /// Asks the store in the site's folder.
    pub fn store<T>(&self, question: impl AsyncFnOnce(belfry_store::AnyStore) -> T) -> T {
        ask(&format!("sqlite:{}", self.path().join(".belfry/belfry.db").display()), question)
    }
}
