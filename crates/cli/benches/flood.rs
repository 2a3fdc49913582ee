//! Floods of connections and bodies against the real binary with 1,024 descriptors: what they cost, and whether it comes
//! back.
//!
//! `cargo bench -p belfry-cli --bench flood` prints memory, answers, and how late ticks were. `BELFRY_ROUNDS` says how often
//! all floods come, `BELFRY_REST` how many seconds the server rests after each. With `BELFRY_FLOODS=0` nothing comes, for
//! comparison.

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::collections::BTreeMap;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use belfry::Timestamp;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

const CONFIG: &str = r#"
timezone: UTC
lanes: {cron: 4}
agents:
  ticker:
    run: ["true"]
    max_concurrent: none
    schedules:
      grid: {every: 1s, anchor: slot, if_running: allow}
      pushed: {webhook: {secret: "a secret that the senders do not know"}}
"#;

const CONNECTIONS: usize = 1_100;
const SENDERS: usize = 450;
const BODY_BYTES: usize = 1 << 20;
/// A server that keeps a connection open for longer does nothing with it.
const PATIENCE: Duration = Duration::from_secs(15);

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

struct Server {
    child: Child,
    address: Arc<str>,
    token: Arc<str>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    async fn start(folder: &std::path::Path) -> Server {
        fs::write(folder.join("belfry.yaml"), CONFIG).unwrap();
        let child = Command::new("sh")
            .args(["-c", "ulimit -n 1024 && exec \"$@\"", "sh", env!("CARGO_BIN_EXE_belfry")])
            .args(["up", "--log-format", "json", "--listen", "127.0.0.1:0"])
            .current_dir(folder)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let file = folder.join(".belfry/server.json");
        while !file.exists() {
            sleep(Duration::from_millis(20)).await;
        }
        let told: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
        let address = told["url"].as_str().unwrap().strip_prefix("http://").unwrap().into();
        Server { child, address, token: told["token"].as_str().unwrap().into() }
    }

    /// What it has in memory, in KiB.
    fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim_matches([' ', '\t', 'k', 'B']).parse().unwrap()
    }

    async fn get(&self, path: &str) -> Value {
        let mut stream = TcpStream::connect(&*self.address).await.unwrap();
        let head = format!(
            "GET {path} HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {}\r\nconnection: close\r\n\r\n",
            self.address, self.token
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        let body = answer.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4;
        serde_json::from_slice(&answer[body..]).unwrap()
    }
}

/// The head of a request with a long body.
fn head(name: &str, server: &Server) -> String {
    let (path, more) = match name {
        "an unknown hook" => ("/hooks/nobody/nothing", String::new()),
        "a known hook" => {
            let now = Timestamp::now().as_second();
            let signature = "0".repeat(64);
            let more = format!("x-belfry-timestamp: {now}\r\nx-belfry-signature: sha256={signature}\r\n");
            ("/hooks/ticker/pushed", more)
        }
        "a route without a token" => ("/api/v1/schedules/ticker/grid/run", String::new()),
        _ => ("/api/v1/schedules/ticker/grid/run", format!("authorization: Bearer {}\r\n", server.token)),
    };
    format!(
        "POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {BODY_BYTES}\r\n{more}\r\n",
        server.address
    )
}

/// Sends a body, and gives the status of the answer; 0 where there is none.
async fn send(address: Arc<str>, head: Arc<str>, body: Arc<[u8]>) -> u16 {
    let Ok(mut stream) = TcpStream::connect(&*address).await else { return 0 };
    let (mut read, mut write) = stream.split();
    let sending = async {
        write.write_all(head.as_bytes()).await?;
        for part in body.chunks(32 << 10) {
            write.write_all(part).await?;
            // All senders go on together.
            tokio::task::yield_now().await;
        }
        Ok::<_, std::io::Error>(())
    };
    let mut answer = [0; 64];
    let answering = async {
        let read = read.read(&mut answer).await.unwrap_or(0);
        std::str::from_utf8(&answer[..read]).ok()?.split(' ').nth(1)?.parse().ok()
    };
    let both = async {
        let (_, status) = tokio::join!(sending, answering);
        status
    };
    timeout(PATIENCE, both).await.ok().flatten().unwrap_or(0)
}

async fn flood(name: &'static str, server: &Server) -> BTreeMap<u16, usize> {
    let mut statuses = BTreeMap::new();
    if name == "idle connections" {
        let mut idle = Vec::new();
        for _ in 0..CONNECTIONS {
            idle.extend(timeout(Duration::from_secs(1), TcpStream::connect(&*server.address)).await);
        }
        sleep(Duration::from_secs(10)).await;
        return statuses;
    }
    let (head, body): (Arc<str>, Arc<[u8]>) = (
        head(name, server).into(),
        format!("{{\"nothing\": \"{}\"}}", "x".repeat(BODY_BYTES - 15)).into_bytes().into(),
    );
    let sent: Vec<_> = (0..SENDERS)
        .map(|_| tokio::spawn(send(server.address.clone(), head.clone(), body.clone())))
        .collect();
    for sent in sent {
        *statuses.entry(sent.await.unwrap()).or_default() += 1;
    }
    statuses
}

/// The most that it takes meanwhile, in KiB.
async fn peak<T>(server: &Server, work: impl Future<Output = T>) -> (u64, T) {
    let most = AtomicU64::new(0);
    let watching = async {
        loop {
            most.fetch_max(server.memory(), Ordering::Relaxed);
            sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        () = watching => unreachable!(),
        result = work => (most.load(Ordering::Relaxed), result),
    }
}

#[tokio::main]
async fn main() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let rest = Duration::from_secs(number("BELFRY_REST", 5));
    let is_flooded = number("BELFRY_FLOODS", 1) > 0;
    sleep(Duration::from_secs(10)).await;
    let idle = server.memory();
    let mib = |kib: u64| kib as f64 / 1024.0;
    println!("{:28} {:5.1} MiB", "before", mib(idle));
    let names = [
        "idle connections",
        "an unknown hook",
        "a known hook",
        "a route without a token",
        "a route with a token",
    ];
    for name in (0..number("BELFRY_ROUNDS", 1)).flat_map(|_| names) {
        let (most, statuses) = match is_flooded {
            true => peak(&server, flood(name, &server)).await,
            false => (server.memory(), BTreeMap::new()),
        };
        sleep(rest).await;
        println!(
            "{name:28} {:5.1} MiB at most, {:5.1} MiB after; answers {statuses:?}",
            mib(most),
            mib(server.memory())
        );
    }
    sleep(4 * rest).await;
    let after = server.memory();
    println!("{:28} {:5.1} MiB: {:+.1}", "after", mib(after), mib(after) - mib(idle));
    ticks(&server).await;
}

/// Whether every tick made a run that completed, and how late.
async fn ticks(server: &Server) {
    let runs = server.get("/api/v1/runs?agent=ticker&limit=1000").await;
    let instant = |run: &Value, key: &str| run[key].as_str().and_then(|text| text.parse::<Timestamp>().ok());
    let mut late: Vec<(Timestamp, i64)> = runs["items"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|run| Some((instant(run, "tick_at")?, instant(run, "started_at")?)))
        .map(|(tick, started)| (tick, started.as_millisecond() - tick.as_millisecond()))
        .collect();
    late.sort();
    let missing: i64 = late.windows(2).map(|pair| pair[1].0.as_second() - pair[0].0.as_second() - 1).sum();
    let failed = runs["items"].as_array().unwrap().iter().filter(|run| run["state"] == "failed").count();
    let latest = late.iter().map(|(_, late)| *late).max().unwrap_or(0);
    println!("{} ticks, {missing} missing, {failed} runs failed, at most {latest} ms late", late.len());
}
