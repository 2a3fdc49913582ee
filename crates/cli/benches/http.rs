//! Many readers of events, and many requests at a fixed rate, against the real binary: how long answers take.
//!
//! `cargo bench -p belfry-cli --bench http` prints the quantiles. Requests are sent when they are due, whatever has become
//! of those before, and an answer counts from when its request was due: a server that stalls is not spared.
//! `BELFRY_READERS`, `BELFRY_RATE` and `BELFRY_SECONDS` say how many.

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::Mutex;

const CONFIG: &str = r#"
timezone: UTC
api: {rate: 1000000/s, open: true}
lanes: {cron: 4}
agents:
  ticker:
    run: ["true"]
    max_concurrent: none
    schedules: {grid: {every: 1s, anchor: slot}}
  hooked:
    run: ["true"]
    max_concurrent: 1
    schedules: {quiet: {cron: "0 0 1 1 *"}}
"#;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::main]
async fn main() {
    let folder = tempfile::tempdir().unwrap();
    let store = std::env::var("BELFRY_BENCH_STORE").unwrap_or_else(|_| "sqlite:.belfry/belfry.db".into());
    std::fs::write(folder.path().join("belfry.yaml"), format!("store: \"{store}\"\n{CONFIG}")).unwrap();
    let server = Command::new(env!("CARGO_BIN_EXE_belfry"))
        .args(["up", "--log-format", "json", "--listen", "127.0.0.1:0"])
        .current_dir(folder.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let _server = Server(server);
    let file = folder.path().join(".belfry/server.json");
    while !file.exists() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let told: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let address: Arc<str> = told["url"].as_str().unwrap().strip_prefix("http://").unwrap().into();
    let (readers, rate, seconds) =
        (number("BELFRY_READERS", 1000), number("BELFRY_RATE", 2000), number("BELFRY_SECONDS", 20));
    let events = Arc::new(AtomicU64::new(0));
    for _ in 0..readers {
        let (address, events) = (address.clone(), events.clone());
        tokio::spawn(async move { listen(&address, &events).await });
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let times = load(&address, rate, seconds).await;
    report(&times, rate, seconds, events.load(Ordering::Relaxed));
    let late = get(&address, "/api/v1/runs?agent=ticker&limit=1000").await;
    lateness(&late, seconds);
}

async fn listen(address: &str, events: &AtomicU64) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("GET /api/v1/events HTTP/1.1\r\nhost: {address}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut lines = BufReader::new(stream).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        events.fetch_add(u64::from(line.starts_with("event:")), Ordering::Relaxed);
    }
}

/// Nine reads and a trigger, again and again.
const PATHS: [&str; 10] = [
    "GET /api/v1/schedules",
    "GET /api/v1/runs?limit=20",
    "GET /healthz",
    "GET /api/v1/schedules/ticker/grid",
    "GET /api/v1/schedules/ticker/grid/next",
    "GET /api/v1/agents",
    "GET /api/v1/runs?agent=ticker&limit=20",
    "GET /api/v1/schedules/ticker/grid/why",
    "GET /api/v1/breakers",
    "POST /api/v1/schedules/hooked/quiet/run",
];

async fn load(address: &Arc<str>, rate: u64, seconds: u64) -> Vec<(usize, u16, Duration)> {
    // Ten for each kind of request, so that none waits for a slower one before it.
    const CONNECTIONS: u64 = 100;
    let times = Arc::new(Mutex::new(Vec::new()));
    let began = Instant::now() + Duration::from_millis(100);
    let mut tasks = Vec::new();
    for place in 0..CONNECTIONS {
        let (address, times) = (address.clone(), times.clone());
        tasks.push(tokio::spawn(async move {
            let mut stream = BufReader::new(TcpStream::connect(&*address).await.unwrap());
            let mut own = Vec::new();
            for n in (place..rate * seconds).step_by(CONNECTIONS as usize) {
                let due = began + Duration::from_secs_f64(n as f64 / rate as f64);
                tokio::time::sleep_until(due.into()).await;
                let kind = (n % PATHS.len() as u64) as usize;
                let head = request(PATHS[kind], &address, n);
                stream.get_mut().write_all(head.as_bytes()).await.unwrap();
                let (status, _) = answer(&mut stream).await;
                own.push((kind, status, due.elapsed()));
            }
            times.lock().await.extend(own);
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let mut times = times.lock().await;
    std::mem::take(&mut *times)
}

fn request(path: &str, address: &str, n: u64) -> String {
    // Of ten triggers one is new, the others are repeats.
    let more = match path.starts_with("POST") {
        true => format!("idempotency-key: k{}\r\ncontent-length: 0\r\n", n / 100),
        false => String::new(),
    };
    format!("{path} HTTP/1.1\r\nhost: {address}\r\n{more}\r\n")
}

async fn answer(stream: &mut BufReader<TcpStream>) -> (u16, Vec<u8>) {
    let (mut status, mut length) = (0, 0);
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await.unwrap();
        let line = line.trim_end().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(rest) = line.strip_prefix("http/1.1 ") {
            status = rest[..3].parse().unwrap();
        }
        if let Some(rest) = line.strip_prefix("content-length: ") {
            length = rest.parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.unwrap();
    (status, body)
}

async fn get(address: &str, path: &str) -> Value {
    let mut stream = BufReader::new(TcpStream::connect(address).await.unwrap());
    stream.get_mut().write_all(request(&format!("GET {path}"), address, 0).as_bytes()).await.unwrap();
    serde_json::from_slice(&answer(&mut stream).await.1).unwrap()
}

fn quantiles(mut times: Vec<Duration>) -> String {
    times.sort();
    let at = |share: f64| times.get(((times.len() as f64 * share) as usize).min(times.len() - 1)).copied();
    let ms = |share: f64| at(share).map_or(0.0, |time| time.as_secs_f64() * 1000.0);
    format!(
        "p50 {:.1} ms, p90 {:.1} ms, p99 {:.1} ms, p99.9 {:.1} ms, max {:.1} ms",
        ms(0.5),
        ms(0.9),
        ms(0.99),
        ms(0.999),
        ms(1.0)
    )
}

fn report(times: &[(usize, u16, Duration)], rate: u64, seconds: u64, events: u64) {
    let bad = times.iter().filter(|(_, status, _)| *status >= 400).count();
    println!(
        "{} requests at {rate}/s for {seconds} s, {bad} refused; {events} events were read",
        times.len()
    );
    println!("all: {}", quantiles(times.iter().map(|(.., time)| *time).collect()));
    for (kind, path) in PATHS.iter().enumerate() {
        let own: Vec<_> = times.iter().filter(|(known, ..)| *known == kind).map(|(.., time)| *time).collect();
        println!("  {path}: {}", quantiles(own));
    }
}

/// Whether schedules stayed on time meanwhile.
fn lateness(runs: &Value, seconds: u64) {
    let instant =
        |run: &Value, key: &str| run[key].as_str().and_then(|text| text.parse::<belfry::Timestamp>().ok());
    let late: Vec<Duration> = runs["items"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|run| {
            let late = instant(run, "started_at")?.duration_since(instant(run, "due_at")?);
            Some(Duration::try_from(late).unwrap_or_default())
        })
        .collect();
    println!("{} ticks in {seconds} s and before, started late by {}", late.len(), quantiles(late));
}
