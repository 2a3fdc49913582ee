//! Heartbeats and snapshots.

use std::collections::BTreeMap;

use belfry_core::NodeId;
use belfry_time::Timestamp;

use super::Memory;
use crate::store::{Answer, Watch};
use crate::views::Page;
use crate::watch::*;

#[derive(Default)]
pub(super) struct Snapshots {
    kept: BTreeMap<i64, Snapshot>,
    last: i64,
}

impl Watch for Memory {
    async fn beat(&self, snapshot: &Snapshot) -> Answer<bool> {
        let mut state = self.state.lock();
        let Some(node) = state.nodes.get_mut(&snapshot.node).filter(|node| !node.fenced) else {
            return Ok(false);
        };
        node.last_seen_at = node.last_seen_at.max(snapshot.at);
        let mut snapshots = self.snapshots.lock();
        snapshots.last += 1;
        let number = snapshots.last;
        snapshots.kept.insert(number, snapshot.clone());
        Ok(true)
    }

    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        before: Option<i64>,
        limit: u32,
    ) -> Answer<Page<SnapshotRow, i64>> {
        let fits = |snapshot: &Snapshot| {
            filter.node.is_none_or(|node| node == snapshot.node)
                && filter.since.is_none_or(|since| snapshot.at >= since)
        };
        let snapshots = self.snapshots.lock();
        let found = snapshots.kept.range(..before.unwrap_or(i64::MAX)).rev();
        let found = found.filter(|(_, snapshot)| fits(snapshot)).take(limit as usize + 1);
        Ok(Page::of_numbered(found.map(|(number, snapshot)| (*number, snapshot.clone())).collect(), limit))
    }

    async fn prune_beats(
        &self,
        snapshots_before: Option<Timestamp>,
        nodes_before: Option<Timestamp>,
        batch: u32,
    ) -> Answer<u32> {
        let mut state = self.state.lock();
        let gone = state
            .nodes
            .values()
            .filter(|node| node.fenced && nodes_before.is_some_and(|before| node.last_seen_at < before));
        let gone: Vec<NodeId> = gone.map(|node| node.id).take(batch as usize).collect();
        gone.iter().for_each(|node| drop(state.nodes.remove(node)));
        let mut snapshots = self.snapshots.lock();
        let old = snapshots
            .kept
            .iter()
            .filter(|(_, snapshot)| snapshots_before.is_some_and(|before| snapshot.at < before));
        let old: Vec<i64> = old.map(|(number, _)| *number).take(batch as usize).collect();
        old.iter().for_each(|number| drop(snapshots.kept.remove(number)));
        Ok((gone.len() + old.len()) as u32)
    }
}
