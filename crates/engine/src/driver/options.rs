//! How a node works.

use belfry_core::DEFAULT_LANES;

use super::*;

/// How a node works.
#[derive(Debug, Clone)]
pub struct Options {
    /// Slots by lane, unless the store says otherwise. Runs of a lane that nobody made go to `main`.
    pub lanes: BTreeMap<String, u32>,
    /// Slots by lane as the files say when the node starts. Once the store was read, what that says of the files holds.
    pub file_lanes: BTreeMap<String, u32>,
    /// Slots by lane that are this node's own: they count for more than what the files say, for less than what is said at
    /// run time.
    pub own_lanes: BTreeMap<String, u32>,
    /// Runs at once over all lanes.
    pub max_concurrent: Option<u32>,
    /// Labels of this node.
    pub labels: Vec<String>,
    /// How often the clock is looked at, at least.
    pub check_interval: Duration,
    /// How often the store is asked although no hint came.
    pub poll_interval: Duration,
    /// How long claims hold without renewal.
    pub lease: Duration,
    /// How often gone nodes are looked for.
    pub orphan_check: Duration,
    /// How often it says that it lives.
    pub heartbeat: Duration,
    /// A node that has missed so many is taken for dead by whoever looks; only its lease gives its runs to others.
    pub dead_after: u32,
    /// How catch-up runs are spread.
    pub spread: Spread,
    /// How long ended things are kept.
    pub keep: Keep,
    /// How long it waits after a call to the store has failed; each further failure doubles it, five times at most.
    pub backoff: Duration,
    /// How often marks (cancels, drain) are read while something runs.
    pub marks_every: Duration,
    /// How often the settings of lanes are read although no hint came.
    pub lanes_every: Duration,
    /// How often it looks for what is older than its retention.
    pub prune_every: Duration,
    /// Due schedules that are planned at once.
    pub batch: u32,
    /// Plans, claims and looks after others; a short-lived node does none of that but what it is told.
    pub serves: bool,
    /// A guest: a node that is there for this run alone. It plans nothing and claims nothing else, but it does look for
    /// nodes that are gone: they may hold the limit that its run waits at.
    pub only: Option<RunId>,
}

/// The label by which a guest is known among the nodes. No agent can need it: it is no name.
pub const GUEST: &str = "(guest)";

/// How long ended things are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keep {
    /// Runs.
    pub runs: Option<Duration>,
    /// Failed runs.
    pub failures: Option<Duration>,
    /// Of a schedule's runs that failed so many, and as many of the others.
    pub runs_per_schedule: Option<u32>,
    /// What runs have written.
    pub output: Option<Duration>,
    /// Skips and misses.
    pub skips: Option<Duration>,
    /// The last heartbeat of nodes that are gone.
    pub heartbeats: Option<Duration>,
    /// Snapshots of nodes.
    pub snapshots: Option<Duration>,
    /// Schedules and agents that are gone.
    pub retired: Option<Duration>,
}

impl Default for Options {
    fn default() -> Options {
        let day = Duration::from_secs(86_400);
        Options {
            lanes: default_lanes(),
            file_lanes: BTreeMap::new(),
            own_lanes: BTreeMap::new(),
            max_concurrent: None,
            labels: Vec::new(),
            check_interval: Duration::from_secs(1),
            poll_interval: Duration::from_secs(1),
            lease: Duration::from_secs(30),
            orphan_check: Duration::from_secs(10),
            heartbeat: Duration::from_secs(60),
            dead_after: 2,
            spread: Spread::default(),
            keep: Keep {
                runs: Some(30 * day),
                failures: Some(90 * day),
                runs_per_schedule: Some(200),
                output: Some(7 * day),
                skips: Some(30 * day),
                heartbeats: Some(7 * day),
                snapshots: Some(30 * day),
                retired: Some(90 * day),
            },
            backoff: Duration::from_millis(100),
            marks_every: Duration::from_secs(1),
            lanes_every: Duration::from_secs(30),
            prune_every: Duration::from_secs(60),
            batch: 500,
            serves: true,
            only: None,
        }
    }
}

impl Options {
    /// Who was not heard of for longer is taken for dead: so many heartbeats, and half of one for the way.
    pub fn silence_max(&self) -> Duration {
        self.heartbeat.saturating_mul(self.dead_after) + self.heartbeat / 2
    }
}

/// The lanes that are always there, with their slots.
pub fn default_lanes() -> BTreeMap<String, u32> {
    DEFAULT_LANES.into_iter().map(|(lane, slots)| (lane.into(), slots)).collect()
}
