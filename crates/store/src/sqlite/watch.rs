//! Heartbeats and snapshots.

use belfry_time::Timestamp;
use rusqlite::params;

use super::source::to_json;
use super::{Sqlite, lossy, micros, node_bytes};
use crate::store::{Answer, Watch};
use crate::views::Page;
use crate::watch::*;

impl Watch for Sqlite {
    async fn beat(&self, snapshot: &Snapshot) -> Answer<bool> {
        let snapshot = snapshot.clone();
        self.write(move |verb| {
            let (at, node) = (micros(snapshot.at), node_bytes(snapshot.node));
            let seen = verb.execute(
                "update nodes set last_seen_at = max(last_seen_at, ?) where id = ? and not fenced",
                params![at, node],
            )?;
            if seen > 0 {
                verb.execute(
                    "insert into snapshots (at, node_id, snapshot) values (?, ?, ?)",
                    params![at, node, to_json(&snapshot)?],
                )?;
            }
            Ok(seen > 0)
        })
        .await
    }

    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        before: Option<i64>,
        limit: u32,
    ) -> Answer<Page<SnapshotRow, i64>> {
        let by_node = if filter.node.is_some() { "node_id = ?1" } else { "?1 is null" };
        let sql = format!(
            "select number, snapshot from snapshots where {by_node} and number < ?2 and at >= ?3
             order by number desc limit ?4"
        );
        let since = filter.since.map_or(i64::MIN, micros);
        let asked = (filter.node.map(node_bytes), before.unwrap_or(i64::MAX), since, i64::from(limit) + 1);
        let found = self
            .read(move |verb| {
                verb.rows(sql, asked, |row| Ok((row.get(0)?, lossy(row, 1)?.unwrap_or_default())))
            })
            .await?;
        Ok(Page::of_numbered(found, limit).read())
    }

    async fn prune_beats(
        &self,
        snapshots_before: Option<Timestamp>,
        nodes_before: Option<Timestamp>,
        batch: u32,
    ) -> Answer<u32> {
        self.write(move |verb| {
            let snapshots = verb.execute(
                "delete from snapshots where number in (select number from snapshots where at < ? order by at limit ?)",
                params![snapshots_before.map(micros), batch],
            )?;
            let nodes = verb.execute(
                "delete from nodes where id in
                   (select id from nodes where fenced and last_seen_at < ? order by id limit ?)",
                params![nodes_before.map(micros), batch],
            )?;
            Ok((snapshots + nodes) as u32)
        })
        .await
    }
}
