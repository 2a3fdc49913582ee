//! `belfry doctor` and `belfry store`: is everything as it should be?

use std::path::{Path, PathBuf};
use std::time::Duration;

use belfry::api::{Node, NodeStatus};
use belfry::{AnyStore, Reader};
use belfry_config::{Loaded, StoreUrl};
use belfry_core::check::Status;
use belfry_runner::{KeeperHandle, KeeperOptions};
use belfry_store::Stats;
use belfry_store::sqlite::Sqlite;
use belfry_time::Timestamp;
use clap::{Args, Subcommand};
use comfy_table::Color;
use serde::Serialize;

use crate::client::{Client, Readiness};
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::place::{Place, SOURCE};
use crate::reading::{self, Reading};
use crate::server_file::ServerFile;
use crate::sheet::{Sheet, column};
use crate::torture::{self, Torture};
use crate::words;

/// Clocks that differ by more than this are worth a word.
const CLOCKS_DIFFER: Duration = Duration::from_secs(1);
/// A log of changes larger than this says that something keeps it from being taken in.
const LOG_LARGE: u64 = 256 << 20;
/// So long a keeper may take to answer.
const KEEPER_WITHIN: Duration = Duration::from_secs(10);

/// Check files, store, nodes, clocks and processes
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  belfry doctor
  belfry doctor -o json
  belfry doctor --torture --minutes 10
  belfry doctor --torture --store postgres://localhost/empty --nodes 3

--torture tries this machine and a database out: it starts nodes on a store of their own, kills, stops and cuts them off,
edits their files, pauses their schedules and shifts their clocks, and then accounts for every tick.

Exit code 0 where nothing fails, warnings included; 1 where something does. Nothing is changed.")]
pub struct Doctor {
    /// Start nodes on an empty store, disturb them, and account for every tick
    #[arg(long)]
    torture: bool,

    /// The store for it: empty, and used by nobody else [default: an SQLite file that goes afterwards]
    #[arg(long, value_name = "URL", requires = "torture")]
    store: Option<String>,

    /// For how long
    #[arg(long, value_name = "NUMBER", default_value_t = 10, requires = "torture",
        value_parser = clap::value_parser!(u32).range(1..=1440))]
    minutes: u32,

    /// How many nodes [default: 3 on PostgreSQL, 1 on SQLite]
    #[arg(long, value_name = "NUMBER", requires = "torture", value_parser = clap::value_parser!(u32).range(1..=16))]
    nodes: Option<u32>,

    /// The order of the faults [default: any]
    #[arg(long, value_name = "NUMBER", requires = "torture")]
    seed: Option<u64>,

    /// What the nodes start
    #[arg(long, value_name = "FOLDER", hide = true)]
    torture_work: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Grade {
    Ok,
    Warn,
    Fail,
}

#[derive(Debug, Serialize)]
struct Finding {
    check: &'static str,
    status: Grade,
    detail: String,
}

#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, check: &'static str, status: Grade, detail: impl Into<String>) {
        self.0.push(Finding { check, status, detail: words::one_line(&detail.into(), 400) });
    }
}

impl Doctor {
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        if let Some(folder) = &self.torture_work {
            return torture::work(folder);
        }
        if self.torture {
            let is_shared = self.store.as_ref().is_some_and(|address| address.starts_with("postgres"));
            let torture = Torture {
                store: self.store.as_deref(),
                minutes: self.minutes,
                nodes: self.nodes.unwrap_or(if is_shared { 3 } else { 1 }),
                seed: self.seed.unwrap_or_else(|| fastrand::u64(0..1_000_000)),
            };
            return torture.run(output);
        }
        let findings = reading::block_on(async {
            let mut findings = Findings::default();
            let loaded = config(place, &mut findings);
            match place.open().await {
                Ok(store) => {
                    let address = place.store_address()?;
                    findings.add("store", Grade::Ok, format!("{} opens", StoreUrl::new(address.as_str())));
                    if let Err(failure) = look(store, loaded.as_ref(), &mut findings).await {
                        findings.add("store", Grade::Fail, said(&failure));
                    }
                }
                // A place where nothing has run yet is not ill.
                Err(Failure::NotFound(message)) => findings.add("store", Grade::Warn, message),
                Err(failure) => findings.add("store", Grade::Fail, said(&failure)),
            }
            if let Ok(address) = place.store_address() {
                server(place, &address, &mut findings).await;
            }
            keeper(&mut findings).await;
            Ok(findings.0)
        })?;
        let failed = findings.iter().filter(|finding| finding.status == Grade::Fail).count();
        match output.format {
            Format::Table => print(&findings)?,
            format => reading::print_items(format, findings)?,
        }
        match failed {
            0 => Ok(()),
            failed => Err(Failure::Run(format!("{} failed", words::count(failed, "check")))),
        }
    }
}

fn said(failure: &Failure) -> String {
    match failure {
        Failure::Report(report) => report.clone(),
        Failure::Usage(message)
        | Failure::Unreachable(message)
        | Failure::Denied(message)
        | Failure::NotFound(message)
        | Failure::Run(message)
        | Failure::Timeout(message) => message.clone(),
        Failure::Store(error) => error.to_string(),
        Failure::Time(_, error) => error.to_string(),
        Failure::Io(error) => error.to_string(),
        Failure::Config(errors) => match errors.problems.len() {
            1 => errors.problems[0].message().to_owned(),
            number => format!("{number} problems; `belfry check` shows them"),
        },
    }
}

fn config(place: &Place, findings: &mut Findings) -> Option<Loaded> {
    let loaded = match place.load() {
        Ok(loaded) => loaded,
        Err(failure @ Failure::Config(_)) => {
            findings.add("config", Grade::Fail, said(&failure));
            return None;
        }
        // The store may be fed by others.
        Err(failure) => {
            findings.add("config", Grade::Warn, said(&failure));
            return None;
        }
    };
    let schedules = loaded.agents.iter().map(|agent| agent.schedules.len()).sum();
    let file = place.file();
    let (agents, schedules) =
        (words::count(loaded.agents.len(), "agent"), words::count(schedules, "schedule"));
    let (invalid, warnings) = (loaded.invalid.len(), loaded.warnings.len());
    let detail = format!("{} loads: {agents} with {schedules}", file.display());
    match (invalid, warnings) {
        (0, 0) => findings.add("config", Grade::Ok, detail),
        (0, _) => {
            let warnings = words::count(warnings, "warning");
            findings.add("config", Grade::Warn, format!("{detail}, {warnings}; `belfry check` shows more"));
        }
        _ => findings.add(
            "config",
            Grade::Warn,
            format!("{detail}, {invalid} invalid; `belfry check` shows more"),
        ),
    }
    Some(loaded)
}

async fn look(store: AnyStore, loaded: Option<&Loaded>, findings: &mut Findings) -> Result<(), Failure> {
    let reading = Reading::of(store).await?;
    clocks(&reading.store, findings).await?;
    let stats = reading.store.stats().await?;
    if let Some(version) = stats.schema_version {
        findings.add("schema", Grade::Ok, format!("version {version}"));
    }
    size(&stats, findings);
    let damage = reading.store.integrity().await?;
    match damage.first() {
        None => findings.add("integrity", Grade::Ok, "every promise among the rows holds"),
        Some(first) => {
            let more =
                if damage.len() > 1 { format!(", and {} more", damage.len() - 1) } else { String::new() };
            findings.add("integrity", Grade::Fail, format!("{first}{more}"));
        }
    }
    for row in reading.store.unreadable_rows().await? {
        findings.add("row", Grade::Warn, row);
    }
    for refusal in reading.store.refusals().await? {
        let of =
            refusal.run.map_or_else(|| refusal.name.clone(), |run| format!("{}, run {run}", refusal.name));
        findings.add("refused", Grade::Warn, format!("{of}: {}", refusal.words()));
    }
    nodes(&reading, loaded, findings).await?;
    skew(&reading, loaded, findings).await?;
    schedules(&reading, findings).await
}

/// The store's clock against the host's.
async fn clocks(store: &Reader, findings: &mut Findings) -> Result<(), Failure> {
    let before = Timestamp::now();
    let Some(there) = store.clock().await? else {
        findings.add("clock", Grade::Ok, "the store goes by the host's clock");
        return Ok(());
    };
    // It was read some time between the two.
    let after = Timestamp::now();
    let differ = if there < before {
        before.duration_since(there)
    } else {
        there.duration_since(after).max(belfry_time::SignedDuration::ZERO)
    };
    let grade = if differ.unsigned_abs() > CLOCKS_DIFFER { Grade::Warn } else { Grade::Ok };
    findings.add("clock", grade, format!("host and store differ by {}", words::span(differ)));
    Ok(())
}

fn size(stats: &Stats, findings: &mut Findings) {
    let Some(bytes) = stats.bytes else { return };
    let log = stats.log_bytes.unwrap_or(0);
    let beside = if log > 0 { format!(", {} in its log", size_words(log)) } else { String::new() };
    let grade = if log > LOG_LARGE { Grade::Warn } else { Grade::Ok };
    findings.add("size", grade, format!("{}{beside}", size_words(bytes)));
}

async fn nodes(reading: &Reading, loaded: Option<&Loaded>, findings: &mut Findings) -> Result<(), Failure> {
    let options = loaded.map(|loaded| crate::up::options(&loaded.settings, reading.store.is_shared()));
    let silence_max = options.unwrap_or_default().silence_max();
    let live = reading.store.live_runs().await?;
    let nodes = reading.store.nodes().await?;
    if nodes.is_empty() {
        findings.add("nodes", Grade::Warn, "no node is running; `belfry up` starts one");
    }
    for node in nodes.iter().map(|node| Node::of(node, &live, reading.now, silence_max)) {
        let lease = node.lease_until.duration_since(reading.now);
        let (who, active) = (format!("{} on {} (process {})", node.id, node.host, node.pid), node.active);
        match node.status {
            NodeStatus::Dead => {
                let ago = words::rough(-lease);
                let runs = words::count(active as usize, "run");
                findings.add(
                    "node",
                    Grade::Warn,
                    match lease.is_positive() {
                        true => format!("{who}: it is silent, with {runs}"),
                        false => format!("{who}: its lease lapsed {ago} ago, with {runs}"),
                    },
                );
            }
            NodeStatus::Draining => {
                let detail = format!(
                    "{who}: it drains, {active} running; `belfry nodes drain {} --undo` lets it work again",
                    node.id
                );
                findings.add("node", Grade::Warn, detail);
            }
            NodeStatus::Idle | NodeStatus::Busy => {
                let detail = format!("{who}: {active} running, lease for {}", words::rough(lease));
                findings.add("node", Grade::Ok, detail);
            }
        }
    }
    Ok(())
}

/// The files against what the nodes run from.
async fn skew(reading: &Reading, loaded: Option<&Loaded>, findings: &mut Findings) -> Result<(), Failure> {
    let known = reading.store.source_digest(SOURCE).await?;
    match (loaded, known) {
        (Some(loaded), Some(known)) if loaded.digest == known => {
            findings.add("applied", Grade::Ok, "the store holds what the files say");
        }
        (Some(_), Some(_)) => findings.add(
            "applied",
            Grade::Warn,
            "config skew: the files differ from what the store holds; `belfry diff` shows how, `belfry apply` ends it",
        ),
        (Some(_), None) => findings.add("applied", Grade::Warn, "no files have been applied to the store yet"),
        (None, _) => {}
    }
    Ok(())
}

async fn schedules(reading: &Reading, findings: &mut Findings) -> Result<(), Failure> {
    let schedules = reading.schedules(None).await?;
    let now = reading.now;
    let back: Vec<_> =
        schedules.iter().filter_map(|one| Some((one, belfry::clock_back(one, now)?))).collect();
    if let Some((first, at)) = back.iter().min_by_key(|(_, at)| *at) {
        let detail = format!(
            "{} for a clock that was set back, the first, {}, until {at}; `belfry resume --from-now` ends that",
            match back.len() {
                1 => "1 schedule waits".to_owned(),
                many => format!("{many} schedules wait"),
            },
            first.name
        );
        findings.add("schedules", Grade::Warn, detail);
    }
    let mut invalid = 0;
    for schedule in &schedules {
        if let Status::Invalid { reason } = &schedule.status {
            invalid += 1;
            findings.add("schedule", Grade::Warn, format!("{} is invalid: {reason}", schedule.name));
        }
    }
    if invalid == 0 {
        findings.add(
            "schedules",
            Grade::Ok,
            format!("{}, none invalid", words::count(schedules.len(), "schedule")),
        );
    }
    Ok(())
}

/// What the server of the store on this host says of itself.
async fn server(place: &Place, address: &str, findings: &mut Findings) {
    let holder = address.strip_prefix("sqlite:").and_then(|path| Sqlite::server(Path::new(path)));
    let Some(link) = ServerFile::find(address, &place.file()).await else {
        match holder {
            Some(holder) => findings.add(
                "server",
                Grade::Fail,
                format!(
                    "{holder} holds the store, and no server of this user answers for it; end it with `kill`, and \
                     `belfry up` starts another"
                ),
            ),
            None => findings.add("server", Grade::Warn, "none runs on this host; `belfry up` starts one"),
        }
        return;
    };
    let (authority, pid) = (link.authority.clone(), link.pid.unwrap_or_default());
    match Client::over(link).readiness().await {
        Ok(Readiness { ready: true, .. }) => {
            findings.add("server", Grade::Ok, format!("process {pid} at {authority} is ready"));
        }
        Ok(Readiness { checks, .. }) => {
            for check in checks.iter().filter(|check| !check.ok) {
                // A node that drains does as it was told.
                let grade = if check.check == "engine" { Grade::Warn } else { Grade::Fail };
                let detail = format!("process {pid} at {authority}: {}: {}", check.check, check.detail);
                findings.add("server", grade, detail);
            }
        }
        Err(failure) => findings.add("server", Grade::Fail, said(&failure)),
    }
}

/// Whether the process that ends a node's children can be started.
async fn keeper(findings: &mut Findings) {
    match tokio::time::timeout(KEEPER_WITHIN, KeeperHandle::spawn(KeeperOptions::default())).await {
        Ok(Ok(_)) => findings.add("keeper", Grade::Ok, "it starts and answers"),
        Ok(Err(error)) => findings.add("keeper", Grade::Fail, error.to_string()),
        Err(_) => findings.add("keeper", Grade::Fail, "it does not answer"),
    }
}

fn print(findings: &[Finding]) -> Result<(), Failure> {
    let mut sheet = Sheet::new(&[column("STATUS"), column("CHECK"), column("DETAIL").wraps(30)]);
    for finding in findings {
        let (word, colour) = match finding.status {
            Grade::Ok => ("ok", Color::Green),
            Grade::Warn => ("warn", Color::Yellow),
            Grade::Fail => ("fail", Color::Red),
        };
        sheet.row(vec![word.into(), finding.check.into(), finding.detail.clone()]);
        sheet.colour("STATUS", Some(colour));
    }
    reading::print_text(&sheet.render())
}

/// About the store as such
#[derive(Debug, Args)]
#[command(
    name = "store",
    after_help = "Examples:
  belfry store stats
  belfry store migrate"
)]
pub struct StoreCommand {
    #[command(subcommand)]
    verb: StoreVerb,
}

#[derive(Debug, Subcommand)]
enum StoreVerb {
    /// Show how much is in the store, and how large it is
    Stats,
    /// Bring the store's schema to this version of Belfry; every command does that when it opens it
    Migrate,
}

#[derive(Serialize)]
struct StatsOut {
    store: String,
    schema_version: Option<i64>,
    bytes: Option<u64>,
    log_bytes: Option<u64>,
    agents: usize,
    schedules: usize,
    nodes: usize,
    runs_pending: u64,
    runs_running: u64,
    runs_ended: u64,
}

impl StoreCommand {
    pub fn run(&self, place: &Place, output: &Output) -> Result<(), Failure> {
        reading::block_on(async {
            let reading = Reading::open(place).await?;
            let stats = reading.store.stats().await?;
            match self.verb {
                StoreVerb::Migrate => {
                    let version = stats.schema_version.map_or("none".into(), |version| version.to_string());
                    reading::remark(&format!("the schema is at version {version}"));
                    Ok(())
                }
                StoreVerb::Stats => {
                    let counts = reading.store.counts().await?;
                    let out = StatsOut {
                        store: StoreUrl::new(place.store_address()?).to_string(),
                        schema_version: stats.schema_version,
                        bytes: stats.bytes,
                        log_bytes: stats.log_bytes,
                        agents: reading.store.agents().await?.len(),
                        schedules: reading.schedules(None).await?.len(),
                        nodes: reading.store.nodes().await?.len(),
                        runs_pending: counts.pending,
                        runs_running: counts.running,
                        runs_ended: counts.ended,
                    };
                    match output.format {
                        Format::Table => print_stats(&out),
                        format => reading::print_item(format, &out),
                    }
                }
            }
        })
    }
}

fn print_stats(stats: &StatsOut) -> Result<(), Failure> {
    let mut lines = vec![("store", stats.store.clone())];
    lines.extend(stats.schema_version.map(|version| ("schema", format!("version {version}"))));
    lines.extend(stats.bytes.map(|bytes| ("size", size_words(bytes))));
    lines.extend(stats.log_bytes.map(|bytes| ("log", size_words(bytes))));
    lines.push(("agents", stats.agents.to_string()));
    lines.push(("schedules", stats.schedules.to_string()));
    lines.push(("nodes", stats.nodes.to_string()));
    let runs =
        format!("{} pending, {} running, {} ended", stats.runs_pending, stats.runs_running, stats.runs_ended);
    lines.push(("runs", runs));
    let text: String = lines.iter().map(|(name, value)| format!("{name:<11}{value}\n")).collect();
    reading::print_text(&text)
}

/// `812 B`, `4.1 MiB`.
fn size_words(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut size = bytes as f64 / 1024.0;
    let mut unit = UNITS[0];
    for next in &UNITS[1..] {
        if size < 1024.0 {
            break;
        }
        size /= 1024.0;
        unit = next;
    }
    format!("{size:.1} {unit}")
}
