//! What a file says beside its agents: typed, with every default filled in. Durations are milliseconds.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use belfry_core::DEFAULT_LANES;

use crate::context::Context;
use crate::file;
use crate::network::Network;
use crate::password::secrets;
use crate::problem::{Quoted, Severity};
use crate::tree::Node;
use crate::value;

/// How Belfry itself works.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Where everything is kept.
    pub store: StoreUrl,
    /// The zone of schedules that name none; an IANA name.
    pub timezone: String,
    /// Whether the files name that zone; else it is the host's.
    pub timezone_is_named: bool,
    /// Where the API listens.
    pub listen: SocketAddr,
    /// Pools of slots, those that are always there included.
    pub lanes: BTreeMap<String, Lane>,
    /// `engine`.
    pub engine: Engine,
    /// `retention`.
    pub retention: Retention,
    /// `log`.
    pub log: Log,
    /// `api`.
    pub api: Api,
}

impl Settings {
    /// Keys whose values differ in `next`, and that a node reads only when it starts.
    pub fn awaiting_start(&self, next: &Settings) -> Vec<&'static str> {
        let (engine, other) = (&self.engine, &next.engine);
        // The server reads how long the audit is kept each time.
        let retention = Retention { audit_ms: next.retention.audit_ms, ..self.retention.clone() };
        [
            ("store", self.store != next.store),
            ("listen", self.listen != next.listen),
            ("engine.check_interval", engine.check_interval_ms != other.check_interval_ms),
            ("engine.poll_interval", engine.poll_interval_ms != other.poll_interval_ms),
            ("engine.heartbeat", engine.heartbeat_ms != other.heartbeat_ms),
            ("engine.orphan_check", engine.orphan_check_ms != other.orphan_check_ms),
            ("engine.dead_after", engine.dead_after != other.dead_after),
            ("engine.lease", engine.lease_ms != other.lease_ms),
            ("engine.jitter_threshold", engine.jitter_threshold != other.jitter_threshold),
            ("engine.max_catch_up_jitter", engine.max_catch_up_jitter_ms != other.max_catch_up_jitter_ms),
            ("engine.shutdown_timeout", engine.shutdown_timeout_ms != other.shutdown_timeout_ms),
            ("engine.max_concurrent", engine.max_concurrent != other.max_concurrent),
            ("engine.labels", engine.labels != other.labels),
            ("retention", retention != next.retention),
            ("log", self.log != next.log),
        ]
        .into_iter()
        .filter_map(|(key, differs)| differs.then_some(key))
        .collect()
    }
}

/// The URL of a store. It may hold a password, so it is only shown without it.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreUrl(String);

impl StoreUrl {
    /// From what the user wrote.
    pub fn new(url: impl Into<String>) -> StoreUrl {
        StoreUrl(url.into())
    }

    /// As it is, for connecting.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// The path of an SQLite file.
    pub fn sqlite_path(&self) -> Option<&Path> {
        self.0.strip_prefix("sqlite:").map(Path::new)
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((scheme, rest)) = self.0.split_once("://") else { return f.write_str(&self.0) };
        write!(f, "{scheme}://")?;
        let mut shown = 0;
        for secret in secrets(rest) {
            write!(f, "{}***", &rest[shown..secret.start])?;
            shown = secret.end;
        }
        f.write_str(&rest[shown..])
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreUrl({self})")
    }
}

/// A pool of slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lane {
    /// Runs per node.
    pub slots: u32,
    /// Runs over all nodes; none is no limit.
    pub limit: Option<u32>,
    /// Waiting runs; none is no limit.
    pub queue_limit: Option<u32>,
    /// Runs on this node, where its environment says so.
    pub own_slots: Option<u32>,
}

/// `engine`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Engine {
    /// The planner's longest sleep without a listener.
    pub check_interval_ms: u64,
    /// The planner's longest sleep with a healthy listener.
    pub poll_interval_ms: u64,
    /// How often nodes and runs say that they live.
    pub heartbeat_ms: u64,
    /// How often orphans are looked for.
    pub orphan_check_ms: u64,
    /// Missed heartbeats that make a node dead.
    pub dead_after: u32,
    /// A node's right to its runs.
    pub lease_ms: u64,
    /// When ticks count as missed; filled into every schedule that does not say.
    pub late_after_ms: Option<u64>,
    /// More catch-up runs than this at once are spread.
    pub jitter_threshold: u32,
    /// Over how long.
    pub max_catch_up_jitter_ms: u64,
    /// How long a node waits for its runs when it ends.
    pub shutdown_timeout_ms: u64,
    /// Runs per node over all lanes; none is no limit.
    pub max_concurrent: Option<u32>,
    /// What the node offers.
    pub labels: Vec<String>,
}

/// `retention`. None is for ever.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retention {
    /// Completed and cancelled runs.
    pub runs_ms: Option<u64>,
    /// Runs of one schedule.
    pub runs_per_schedule: Option<u32>,
    /// Failed runs.
    pub failures_ms: Option<u64>,
    /// Output.
    pub output_ms: Option<u64>,
    /// Skipped and missed ticks.
    pub skips_ms: Option<u64>,
    /// Heartbeats.
    pub heartbeats_ms: Option<u64>,
    /// Snapshots of nodes.
    pub snapshots_ms: Option<u64>,
    /// Schedules and agents that are gone.
    pub retired_ms: Option<u64>,
    /// Who changed what.
    pub audit_ms: Option<u64>,
}

/// `log`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    /// How lines look.
    pub format: LogFormat,
    /// `error`, `warn`, `info`, `debug` or `trace`.
    pub level: String,
}

/// `log.format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, JSON lines otherwise.
    Auto,
    /// For people.
    Text,
    /// For machines.
    Json,
}

/// `api`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Api {
    /// Whether agents may be created over it.
    pub allow_agents: bool,
    /// Whether requests from this host need no token. Loopback only.
    pub open: bool,
    /// Whether `/metrics` needs no token.
    pub open_metrics: bool,
    /// Reverse proxies that may speak for others.
    pub trusted_proxies: Vec<Network>,
    /// Host names beside the loopback's.
    pub allowed_hosts: Vec<String>,
    /// Requests per client.
    pub rate: Rate,
    /// The largest body.
    pub max_body_bytes: u64,
}

/// So many in such a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// How many.
    pub max: u32,
    /// In how many milliseconds.
    pub per_ms: u64,
}

const DAY: u64 = 86_400_000;

impl Default for Settings {
    fn default() -> Settings {
        let lane = |slots| Lane { slots, limit: None, queue_limit: None, own_slots: None };
        Settings {
            store: StoreUrl::new("sqlite:.belfry/belfry.db"),
            timezone: "UTC".into(),
            timezone_is_named: false,
            listen: (Ipv4Addr::LOCALHOST, 7400).into(),
            lanes: DEFAULT_LANES.map(|(name, slots)| (name.to_owned(), lane(slots))).into(),
            engine: Engine {
                check_interval_ms: 1_000,
                poll_interval_ms: 30_000,
                heartbeat_ms: 60_000,
                orphan_check_ms: 300_000,
                dead_after: 2,
                lease_ms: 30_000,
                late_after_ms: None,
                jitter_threshold: 3,
                max_catch_up_jitter_ms: 30_000,
                shutdown_timeout_ms: 30_000,
                max_concurrent: None,
                labels: Vec::new(),
            },
            retention: Retention {
                runs_ms: Some(30 * DAY),
                runs_per_schedule: Some(200),
                failures_ms: Some(90 * DAY),
                output_ms: Some(7 * DAY),
                skips_ms: Some(30 * DAY),
                heartbeats_ms: Some(7 * DAY),
                snapshots_ms: Some(30 * DAY),
                retired_ms: Some(90 * DAY),
                audit_ms: Some(365 * DAY),
            },
            log: Log { format: LogFormat::Auto, level: "info".into() },
            api: Api {
                allow_agents: false,
                open: false,
                open_metrics: false,
                trusted_proxies: Vec::new(),
                allowed_hosts: Vec::new(),
                rate: Rate { max: 100, per_ms: 1_000 },
                max_body_bytes: 1 << 20,
            },
        }
    }
}

/// Reads the settings of a main file that was checked; what is wrong there is left at its default. `base` is its folder.
pub(crate) fn read(root: &Node, base: &Path) -> Settings {
    let mut settings = Settings::default();
    let store = root.get("store").and_then(Node::text).unwrap_or(settings.store.expose()).to_owned();
    settings.store = match store.strip_prefix("sqlite:") {
        Some(path) => StoreUrl(format!("sqlite:{}", file::absolute(base, Path::new(path)).display())),
        None => StoreUrl(store),
    };
    if let Some(listen) = root.get("listen").and_then(Node::text).and_then(value::address) {
        settings.listen = listen;
    }
    for (name, node) in root.get("lanes").map(Node::entries).unwrap_or_default() {
        let lane = settings.lanes.entry(name.text.clone()).or_insert(Lane {
            slots: 0,
            limit: None,
            queue_limit: None,
            own_slots: None,
        });
        match node.text() {
            Some(_) => set(&mut lane.slots, number(node)),
            None => {
                set(&mut lane.slots, node.get("slots").and_then(number));
                set(&mut lane.limit, node.get("limit").map(number));
                set(&mut lane.queue_limit, node.get("queue_limit").map(number));
            }
        }
    }
    if let Some(engine) = root.get("engine") {
        read_engine(&mut settings.engine, engine);
    }
    if let Some(retention) = root.get("retention") {
        read_retention(&mut settings.retention, retention);
    }
    if let Some(log) = root.get("log") {
        read_log(&mut settings.log, log);
    }
    if let Some(api) = root.get("api") {
        read_api(&mut settings.api, api);
    }
    settings
}

fn read_engine(engine: &mut Engine, node: &Node) {
    let ms = |key| node.get(key).and_then(duration);
    set(&mut engine.check_interval_ms, ms("check_interval"));
    set(&mut engine.poll_interval_ms, ms("poll_interval"));
    set(&mut engine.heartbeat_ms, ms("heartbeat"));
    set(&mut engine.orphan_check_ms, ms("orphan_check"));
    set(&mut engine.dead_after, node.get("dead_after").and_then(number));
    set(&mut engine.lease_ms, ms("lease"));
    engine.late_after_ms = ms("late_after");
    set(&mut engine.jitter_threshold, node.get("jitter_threshold").and_then(number));
    set(&mut engine.max_catch_up_jitter_ms, ms("max_catch_up_jitter"));
    set(&mut engine.shutdown_timeout_ms, ms("shutdown_timeout"));
    engine.max_concurrent = node.get("max_concurrent").and_then(number);
    engine.labels = texts(node.get("labels"));
}

fn read_retention(retention: &mut Retention, node: &Node) {
    // A key that is there but no duration is `none`.
    let age = |key: &str| {
        let (_, node) = node.entry(key)?;
        Some(node.text().and_then(|text| value::years(text).or_else(|| value::duration_ms(text).ok())))
    };
    set(&mut retention.runs_ms, age("runs"));
    set(&mut retention.runs_per_schedule, node.entry("runs_per_schedule").map(|(_, node)| number(node)));
    set(&mut retention.failures_ms, age("failures"));
    set(&mut retention.output_ms, age("output"));
    set(&mut retention.skips_ms, age("skips"));
    set(&mut retention.heartbeats_ms, age("heartbeats"));
    set(&mut retention.snapshots_ms, age("snapshots"));
    set(&mut retention.retired_ms, age("retired"));
    set(&mut retention.audit_ms, age("audit"));
}

fn read_log(log: &mut Log, node: &Node) {
    log.format = match node.get("format").and_then(Node::text) {
        Some("text") => LogFormat::Text,
        Some("json") => LogFormat::Json,
        _ => LogFormat::Auto,
    };
    set(&mut log.level, node.get("level").and_then(Node::text).map(str::to_owned));
}

fn read_api(api: &mut Api, node: &Node) {
    let flag = |key| node.get(key).and_then(Node::text).and_then(value::flag);
    set(&mut api.allow_agents, flag("allow_agents"));
    set(&mut api.open, flag("open"));
    set(&mut api.open_metrics, flag("open_metrics"));
    api.trusted_proxies =
        texts(node.get("trusted_proxies")).iter().filter_map(|text| text.parse().ok()).collect();
    api.allowed_hosts = texts(node.get("allowed_hosts"));
    let rate = node.get("rate").and_then(Node::text).and_then(value::rate);
    set(&mut api.rate, rate.map(|(max, per_ms)| Rate { max, per_ms }));
    set(
        &mut api.max_body_bytes,
        node.get("max_body").and_then(Node::text).and_then(belfry_core::size::parse_size),
    );
}

/// Checks `api.open`: it is for loopback addresses alone, and worth a warning there.
pub(crate) fn check_open(context: &mut Context<'_>, root: &Node, settings: &Settings) {
    let key = root.get("api").and_then(|api| api.entry("open")).map(|(key, _)| key.span);
    let Some(span) = key.filter(|_| settings.api.open) else { return };
    if !settings.listen.ip().is_loopback() {
        let message = format!(
            "`api.open` is for loopback addresses only, and `listen` is {}, which others can reach",
            settings.listen
        );
        let help = "remove `open: true`, or listen on `127.0.0.1:7400`";
        context.report(Severity::Error, Some(span), message).help(help);
    } else if !settings.api.allowed_hosts.is_empty() {
        let message =
            "`api.open` and `api.allowed_hosts` exclude each other: a name means that others use the API";
        let help = "remove `open: true`; `belfry token create` makes tokens for the others";
        context.report(Severity::Error, Some(span), message).help(help);
    } else {
        let message =
            "`api.open` lets every user and every program on this host do everything, without a token";
        let help =
            "remove it: commands on this host find their own token, and `belfry open` prints a login link";
        context.report(Severity::Warning, Some(span), message).help(help);
    }
}

pub(crate) fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

/// A number; none for the word `none` too.
pub(crate) fn number<T: TryFrom<i64>>(node: &Node) -> Option<T> {
    value::whole(node.text()?).and_then(|number| number.try_into().ok())
}

/// A duration in milliseconds; none for a word too.
pub(crate) fn duration(node: &Node) -> Option<u64> {
    value::duration_ms(node.text()?).ok()
}

pub(crate) fn texts(node: Option<&Node>) -> Vec<String> {
    let items = node.map(Node::items).unwrap_or_default();
    items.iter().filter_map(|item| item.text().map(str::to_owned)).collect()
}

/// What the environment overrides: `BELFRY_STORE`, `BELFRY_LANE_<NAME>` and `BELFRY_MAX_CONCURRENT`.
pub(crate) fn overrides(context: &mut Context<'_>, settings: &mut Settings) {
    let env = context.env;
    if let Some(store) = env("BELFRY_STORE").filter(|store| !store.is_empty()) {
        settings.store = StoreUrl(store);
        if !value::is_store(settings.store.expose()) {
            let message = "`BELFRY_STORE` must be `sqlite:FILE` or `postgres://user@host/database`";
            context.report(Severity::Error, None, message);
        }
    }
    let mut wrong = Vec::new();
    for (name, lane) in &mut settings.lanes {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
        let variable = format!("BELFRY_LANE_{}", name.chars().map(plain).collect::<String>());
        let Some(text) = env(&variable).filter(|text| !text.is_empty()) else { continue };
        match value::whole(&text).filter(|slots| (1..=1_000_000).contains(slots)) {
            Some(slots) => lane.own_slots = Some(slots as u32),
            None => wrong.push((variable, "a whole number from 1 to 1000000", text)),
        }
    }
    if let Some(text) = env("BELFRY_MAX_CONCURRENT").filter(|text| !text.is_empty()) {
        match value::whole(&text).and_then(|number| u32::try_from(number).ok()).filter(|number| *number > 0) {
            Some(number) => settings.engine.max_concurrent = Some(number),
            None if text == "none" => settings.engine.max_concurrent = None,
            None => {
                let expected = "a whole number from 1 to 4294967295, or `none`";
                wrong.push(("BELFRY_MAX_CONCURRENT".into(), expected, text));
            }
        }
    }
    for (variable, expected, text) in wrong {
        let message = format!("`{variable}` must be {expected}, got {}", Quoted(&text));
        context.report(Severity::Error, None, message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_of_a_store_is_not_shown() {
        for (url, shown) in [
            ("sqlite:.belfry/belfry.db", "sqlite:.belfry/belfry.db"),
            ("postgres://me@host:5432/db?sslmode=require", "postgres://me@host:5432/db?sslmode=require"),
            ("postgres://me:p/w@d@host/db", "postgres://me:***@host/db"),
            ("postgres://host/db?user=u&password=x", "postgres://host/db?user=u&password=***"),
            ("postgres://host/db?PASSWORD=x?y&user=u", "postgres://host/db?PASSWORD=***&user=u"),
            ("postgres://host?%70assw%6Frd=x&a=%", "postgres://host?%70assw%6Frd=***&a=%"),
            (
                "postgres://u:p@h/d?sslpassword=x&password=y",
                "postgres://u:***@h/d?sslpassword=***&password=***",
            ),
            ("postgres://host?password=p@ss", "postgres://host?password=***"),
            ("postgres://host:1/db?password=p@ss&a=b", "postgres://host:***&a=b"),
            ("postgres://u:p&password=x@host/db", "postgres://u:***"),
            ("postgres://host/db?password&é%=1&password=", "postgres://host/db?password&é%=1&password=***"),
        ] {
            assert_eq!(StoreUrl::new(url).to_string(), shown);
            assert_eq!(format!("{:?}", StoreUrl::new(url)), format!("StoreUrl({shown})"));
        }
    }
}
