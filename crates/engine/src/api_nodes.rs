//! Nodes, heartbeats and snapshots as the API and `-o json` show them.

use std::collections::BTreeMap;
use std::time::Duration;

use belfry_core::{NodeId, RunId, RunState};
use belfry_store::RunRecord;
use belfry_time::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::api::Run;

/// A node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Node {
    /// Random for each start.
    pub id: NodeId,
    /// Where.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// The version of Belfry that it runs, where it is known.
    pub version: Option<String>,
    /// Its labels.
    pub labels: Vec<String>,
    /// What it does, by its lease and its runs.
    pub status: NodeStatus,
    /// When it started.
    pub started_at: Timestamp,
    /// When its last heartbeat came.
    pub last_seen_at: Option<Timestamp>,
    /// Until when its claims hold.
    pub lease_until: Timestamp,
    /// How many runs it has.
    pub active: u32,
}

/// What a node does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum NodeStatus {
    /// It lives and has nothing to do.
    Idle,
    /// It lives and runs something.
    Busy,
    /// It lives, lets what it runs end, and takes nothing new.
    Draining,
    /// Its lease has lapsed, or its heartbeats have stopped.
    Dead,
}

impl NodeStatus {
    /// As it stands in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            NodeStatus::Idle => "idle",
            NodeStatus::Busy => "busy",
            NodeStatus::Draining => "draining",
            NodeStatus::Dead => "dead",
        }
    }
}

impl Node {
    /// A node with the runs that are live, at an instant; `silence_max` is how long one that lives may be silent.
    pub fn of(node: &belfry_store::Node, live: &[RunRecord], now: Timestamp, silence_max: Duration) -> Node {
        let active = live.iter().filter(|run| run.node == Some(node.id)).count();
        let status = match active {
            _ if is_dead(node, now, silence_max) => NodeStatus::Dead,
            _ if node.draining => NodeStatus::Draining,
            0 => NodeStatus::Idle,
            _ => NodeStatus::Busy,
        };
        Node {
            id: node.id,
            host: node.host.clone(),
            pid: node.pid,
            version: Some(node.process.version.clone()).filter(|version| !version.is_empty()),
            labels: node.labels.clone(),
            status,
            started_at: node.started_at,
            last_seen_at: Some(node.last_seen_at),
            lease_until: node.lease_until,
            active: active as u32,
        }
    }
}

/// By its lease, or because it was not heard of for too long.
fn is_dead(node: &belfry_store::Node, now: Timestamp, silence_max: Duration) -> bool {
    let silent = SignedDuration::try_from(silence_max).unwrap_or(SignedDuration::MAX);
    !node.is_alive(now) || now.duration_since(node.last_seen_at) > silent
}

/// That something lives, or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Heartbeat {
    /// When it was heard of last.
    pub at: Timestamp,
    /// Whether it is taken for alive.
    pub status: HeartbeatStatus,
}

/// Whether something lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum HeartbeatStatus {
    /// It does.
    Alive,
    /// Its node's lease has lapsed, or the heartbeats have stopped.
    Dead,
}

impl Run {
    /// With its heartbeat, where it runs: a node's heartbeat is that of all its runs.
    pub fn seen_by(mut self, nodes: &[belfry_store::Node], now: Timestamp, silence_max: Duration) -> Run {
        let node = nodes.iter().find(|node| Some(node.id) == self.node);
        self.heartbeat = node.filter(|_| self.state == RunState::Running).map(|node| Heartbeat {
            at: self.started_at.map_or(node.last_seen_at, |started| started.max(node.last_seen_at)),
            status: match is_dead(node, now, silence_max) {
                true => HeartbeatStatus::Dead,
                false => HeartbeatStatus::Alive,
            },
        });
        self
    }
}

/// What a node and its machine did at a heartbeat.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Snapshot {
    /// Whose.
    pub node: NodeId,
    /// When it was taken.
    pub at: Timestamp,
    /// Where.
    pub host: String,
    /// How much of the processors was busy since the one before, in percent; not known of the first, nor without /proc.
    pub cpu_percent: Option<f64>,
    /// The machine's memory.
    pub memory_total_bytes: Option<u64>,
    /// What is used of it, and could not be given to others.
    pub memory_used_bytes: Option<u64>,
    /// The load over one, five and fifteen minutes.
    pub load: Option<Vec<f64>>,
    /// Runs of this node, by lane.
    pub lanes: BTreeMap<String, u32>,
    /// These runs, at most 1000.
    pub runs: Vec<RunId>,
    /// Sessions that had a run here.
    pub sessions_active: u32,
    /// The names of tmux's sessions; null where there is no tmux.
    pub tmux_sessions: Option<Vec<String>>,
    /// What else the program said of itself.
    pub context: Map<String, Value>,
}

impl Snapshot {
    /// A snapshot as it is kept.
    pub fn of(kept: belfry_store::Snapshot) -> Snapshot {
        Snapshot {
            node: kept.node,
            at: kept.at,
            host: kept.host,
            cpu_percent: kept.cpu_percent,
            memory_total_bytes: kept.memory_total,
            memory_used_bytes: kept.memory_used,
            load: kept.load.map(Vec::from),
            lanes: kept.lanes,
            runs: kept.runs,
            sessions_active: kept.sessions,
            tmux_sessions: kept.tmux,
            context: kept.context,
        }
    }
}
