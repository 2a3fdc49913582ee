//! What is counted: from what the engine tells, from requests, and from a look at the store now and then. OpenMetrics.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU64};
use std::time::Duration;

use axum::http::StatusCode;
use belfry::Event;
use belfry::event::Name;
use belfry_core::RunState;
use belfry_store::{RunFilter, RunRecord};
use belfry_time::Timestamp;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::problem::Problem;
use crate::state::Shared;

/// Live runs that one look counts; more are not counted apart.
const LIVE_MAX: usize = 5000;
/// How often the store and the planner are looked at.
pub const PULSE: Duration = Duration::from_secs(5);

type Labels = Vec<(&'static str, String)>;
type Reals = Gauge<f64, AtomicU64>;

/// What is counted.
pub struct Meters {
    registry: Registry,
    runs: Family<Labels, Counter>,
    starts: Family<Labels, Counter>,
    retries: Counter,
    skips: Family<Labels, Counter>,
    tokens: Family<Labels, Counter>,
    cost: Family<Labels, Counter<f64, AtomicU64>>,
    leases_lost: Counter,
    rescues: Counter,
    lateness: Histogram,
    duration: Histogram,
    requests: Family<Labels, Counter>,
    request_seconds: Histogram,
    store_seconds: Histogram,
    loop_lag: Reals,
    live: Family<Labels, Gauge<i64, AtomicI64>>,
    oldest: Family<Labels, Reals>,
    listeners: Gauge<i64, AtomicI64>,
    bodies: Family<Labels, Gauge<i64, AtomicI64>>,
    store_up: Gauge<i64, AtomicI64>,
}

const FAST: [f64; 10] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0];
const SLOW: [f64; 12] = [0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0];

impl Meters {
    pub fn new() -> Meters {
        let mut meters = Meters {
            registry: Registry::with_prefix("belfry"),
            runs: Family::default(),
            starts: Family::default(),
            retries: Counter::default(),
            skips: Family::default(),
            tokens: Family::default(),
            cost: Family::default(),
            leases_lost: Counter::default(),
            rescues: Counter::default(),
            lateness: Histogram::new(FAST),
            duration: Histogram::new(SLOW),
            requests: Family::default(),
            request_seconds: Histogram::new(FAST),
            store_seconds: Histogram::new(FAST),
            loop_lag: Gauge::default(),
            live: Family::default(),
            oldest: Family::default(),
            listeners: Gauge::default(),
            bodies: Family::default(),
            store_up: Gauge::default(),
        };
        meters.store_up.set(1);
        meters.register();
        meters
    }

    fn register(&mut self) {
        let r = &mut self.registry;
        r.register("runs", "Runs that have ended on this node, by state and reason", self.runs.clone());
        r.register(
            "attempts",
            "Attempts that this node has started, by what made their run",
            self.starts.clone(),
        );
        r.register("retries", "Attempts that failed and are followed by another", self.retries.clone());
        r.register("skips", "Ticks that made no run, by reason", self.skips.clone());
        r.register("llm_tokens", "LLM tokens that ended runs say they used, by agent", self.tokens.clone());
        r.register("cost_usd", "What ended runs say they cost, by agent", self.cost.clone());
        r.register("leases_lost", "Nodes that were found gone", self.leases_lost.clone());
        r.register("rescues", "Runs that were taken from nodes that are gone", self.rescues.clone());
        r.register("lateness_seconds", "From when a run was due to its start", self.lateness.clone());
        r.register("duration_seconds", "How long the last attempt of a run took", self.duration.clone());
        r.register("http_requests", "Requests, by operation and status", self.requests.clone());
        r.register("http_request_seconds", "How long answers took to begin", self.request_seconds.clone());
        r.register(
            "store_seconds",
            "How long the store took to answer a small question",
            self.store_seconds.clone(),
        );
        r.register("store_up", "Whether the store answers and takes writes", self.store_up.clone());
        r.register("loop_lag_seconds", "Since the planner looked last", self.loop_lag.clone());
        r.register("live_runs", "Runs that wait or run now, by lane and state", self.live.clone());
        r.register(
            "oldest_pending_seconds",
            "Since the run was due that waits longest, by lane",
            self.oldest.clone(),
        );
        r.register("event_readers", "Who listens to events", self.listeners.clone());
        r.register(
            "body_bytes",
            "Memory that large request bodies have taken, by what is known of their senders",
            self.bodies.clone(),
        );
    }

    /// Takes note of a request.
    pub fn request(&self, operation: &str, status: StatusCode, took: Duration) {
        let labels = vec![("operation", operation.to_owned()), ("status", status.as_u16().to_string())];
        self.requests.get_or_create(&labels).inc();
        self.request_seconds.observe(took.as_secs_f64());
    }

    /// Takes note of what happened.
    pub fn note(&self, event: &Event) {
        let reason = || event.reason.clone().unwrap_or_default();
        let count = event.count.unwrap_or(1);
        match event.event {
            Name::StoreUnavailable => {
                self.store_up.set(0);
            }
            Name::StoreAvailable => {
                self.store_up.set(1);
            }
            Name::RunFinished | Name::RunCancelled => {
                let state = event.state.unwrap_or("cancelled").to_owned();
                self.runs.get_or_create(&vec![("state", state), ("reason", reason())]).inc();
                if let (Some(usage), Some(agent)) = (event.usage, &event.agent) {
                    let agent = vec![("agent", agent.clone())];
                    self.tokens.get_or_create(&agent).inc_by(usage.tokens.unwrap_or(0));
                    self.cost.get_or_create(&agent).inc_by(usage.cost_usd.unwrap_or(0.0));
                }
                if let Some(took) = event.took_ms {
                    self.duration.observe(took as f64 / 1000.0);
                }
            }
            Name::RunStarted => {
                self.starts.get_or_create(&vec![("trigger", reason())]).inc();
                // A backfilled run is as late as it was meant to be.
                let is_timely = event.attempt == Some(1) && event.reason.as_deref() != Some("backfill");
                if let Some(lag) = event.lag_ms.filter(|_| is_timely) {
                    self.lateness.observe(lag as f64 / 1000.0);
                }
            }
            Name::RunRetried => {
                self.retries.inc();
            }
            Name::TickSkipped | Name::TickMissed => {
                self.skips.get_or_create(&vec![("reason", reason())]).inc_by(count);
            }
            Name::NodeFenced => {
                self.leases_lost.inc();
            }
            Name::RunRescued => {
                self.rescues.inc_by(count);
            }
            _ => {}
        }
    }
}

impl Shared {
    /// Looks at the store and the planner.
    pub async fn pulse(&self) {
        let began = std::time::Instant::now();
        if self.store().next_due().await.is_ok() {
            self.meters.store_seconds.observe(began.elapsed().as_secs_f64());
        }
        if let Some(at) = self.engine.state().last_check_at {
            let lag = self.now().duration_since(at).as_secs_f64();
            self.meters.loop_lag.set(lag.max(0.0));
        }
    }

    /// Everything that is counted, as OpenMetrics.
    pub async fn metrics(&self) -> Result<String, Problem> {
        self.count_live().await?;
        let readers = self.readers.listening();
        self.meters.listeners.set(readers as i64);
        for (sender, bytes) in self.bodies.taken() {
            self.meters.bodies.get_or_create(&vec![("sender", sender.to_owned())]).set(bytes as i64);
        }
        let mut text = String::new();
        encode(&mut text, &self.meters.registry).map_err(|error| Problem::internal(error.to_string()))?;
        Ok(text)
    }

    async fn count_live(&self) -> Result<(), Problem> {
        let filter = RunFilter { states: vec![RunState::Pending, RunState::Running], ..RunFilter::default() };
        let (mut live, mut after) = (Vec::new(), None);
        while live.len() < LIVE_MAX {
            let page = self.store().runs(&filter, after, 1000).await?;
            live.extend(page.items);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        let now = self.now();
        let (counts, oldest) = by_lane(&live, now);
        self.meters.live.clear();
        self.meters.oldest.clear();
        for ((lane, state), count) in counts {
            self.meters.live.get_or_create(&vec![("lane", lane), ("state", state.to_owned())]).set(count);
        }
        for (lane, seconds) in oldest {
            self.meters.oldest.get_or_create(&vec![("lane", lane)]).set(seconds);
        }
        Ok(())
    }
}

type Counts = BTreeMap<(String, &'static str), i64>;

/// How many wait and run in each lane, and for how long the first of them waits.
fn by_lane(live: &[RunRecord], now: Timestamp) -> (Counts, BTreeMap<String, f64>) {
    let (mut counts, mut oldest) = (Counts::new(), BTreeMap::new());
    for run in live {
        *counts.entry((run.lane.clone(), run.state.as_str())).or_default() += 1;
        if run.state == RunState::Pending {
            let waits = now.duration_since(run.due_at).as_secs_f64().max(0.0);
            let longest: &mut f64 = oldest.entry(run.lane.clone()).or_default();
            *longest = longest.max(waits);
        }
    }
    (counts, oldest)
}
