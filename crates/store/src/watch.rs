//! That nodes live, and how their machines do: heartbeats and snapshots. Apart from the verbs of scheduling, which decide
//! by leases alone.

use std::collections::BTreeMap;
use std::future::Future;

use belfry_core::{NodeId, RunId};
use belfry_time::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::any::{AnyStore, each};
use crate::store::Answer;
use crate::views::Page;

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

/// Heartbeats and snapshots. Every verb is one transaction, as those of [`Store`](crate::Store) are.
pub trait Watch: Send + Sync + 'static {
    /// Keeps a snapshot, and that its node and the runs in it lived then. `false` where the node is unknown or fenced, and
    /// nothing was kept. Crash: both, or neither.
    fn beat(&self, snapshot: &Snapshot) -> impl Future<Output = Answer<bool>> + Send;

    /// Snapshots, the last first, before a number.
    fn snapshots(
        &self,
        filter: &SnapshotFilter,
        before: Option<i64>,
        limit: u32,
    ) -> impl Future<Output = Answer<Page<SnapshotRow, i64>>> + Send;

    /// Removes snapshots that were taken before an instant, and nodes that were fenced and not heard of since another, at
    /// most a batch of each; none keeps them all. Says how many went. Crash: all of a call, or nothing of it.
    fn prune_beats(
        &self,
        snapshots_before: Option<Timestamp>,
        nodes_before: Option<Timestamp>,
        batch: u32,
    ) -> impl Future<Output = Answer<u32>> + Send;
}

impl Watch for AnyStore {
    async fn beat(&self, snapshot: &Snapshot) -> Answer<bool> {
        each!(self, store => store.beat(snapshot).await)
    }

    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        before: Option<i64>,
        limit: u32,
    ) -> Answer<Page<SnapshotRow, i64>> {
        each!(self, store => store.snapshots(filter, before, limit).await)
    }

    async fn prune_beats(
        &self,
        snapshots_before: Option<Timestamp>,
        nodes_before: Option<Timestamp>,
        batch: u32,
    ) -> Answer<u32> {
        each!(self, store => store.prune_beats(snapshots_before, nodes_before, batch).await)
    }
}
