//! That nodes live, and how their machines do: heartbeats and snapshots. Apart from the verbs of scheduling, which decide
//! by leases alone.

use std::collections::BTreeMap;

use belfry_core::{NodeId, RunId};
use belfry_time::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What a node says of itself and its machine at a heartbeat.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Who.
    pub node: NodeId,
    /// When.
    pub at: Timestamp,
    /// Where.
    pub host: String,
    /// How much of the machine's processors was busy since the last one, in percent.
    pub cpu_percent: Option<f64>,
    /// The machine's memory.
    pub memory_total: Option<u64>,
    /// What is used of it, and could not be given to others.
    pub memory_used: Option<u64>,
    /// The load over one, five and fifteen minutes.
    pub load: Option<[f64; 3]>,
    /// Runs of this node, by lane.
    pub lanes: BTreeMap<String, u32>,
    /// These runs: each of them lives.
    pub runs: Vec<RunId>,
    /// Sessions that have a run here.
    pub sessions: u32,
    /// Sessions of tmux on the machine; none where there is no tmux.
    pub tmux: Option<Vec<String>>,
    /// What else the program says.
    pub context: Map<String, Value>,
}

/// Which snapshots to list.
#[derive(Debug, Clone, Default)]
pub struct SnapshotFilter {
    /// Those of this node.
    pub node: Option<NodeId>,
    /// Those that were taken then or later.
    pub since: Option<Timestamp>,
}

/// A snapshot with its number, which grows.
pub type SnapshotRow = (i64, Snapshot);
