//! Heartbeats and snapshots.

use std::sync::atomic::{AtomicBool, Ordering};

use belfry_time::Timestamp;
use tokio_postgres::Row;
use uuid::Uuid;

use super::Postgres;
use super::connection::Fault;
use super::rows::get;
use crate::Error;
use crate::store::{Answer, Watch};
use crate::views::Page;
use crate::watch::*;

fn snapshot(row: &Row) -> Result<(i64, String), Fault> {
    Ok((get(row, "number")?, get(row, "snapshot")?))
}

impl Watch for Postgres {
    async fn beat(&self, snapshot: &Snapshot) -> Answer<bool> {
        let text = serde_json::to_string(snapshot).unwrap_or_default();
        transact!(self, Rescue, |tx| async {
            let sql =
                "update nodes set last_seen_at = greatest(last_seen_at, $2) where id = $1 and not fenced";
            if tx.execute(sql, &[&snapshot.node.0, &snapshot.at]).await? == 0 {
                return Ok(false);
            }
            let sql = "insert into snapshots (at, node_id, snapshot) values ($1, $2, $3)";
            tx.execute(sql, &[&snapshot.at, &snapshot.node.0, &text]).await?;
            Ok::<_, Fault>(true)
        }
        .await)
    }

    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        before: Option<i64>,
        limit: u32,
    ) -> Answer<Page<SnapshotRow, i64>> {
        let (before, more) = (before.unwrap_or(i64::MAX), i64::from(limit) + 1);
        let (node, since): (Option<Uuid>, _) = (filter.node.map(|node| node.0), filter.since);
        // Two texts, so that each has the plan that fits it.
        let sql = match node {
            Some(_) => {
                "select number, snapshot from snapshots where node_id = $1 and number < $2 \
                 and ($3::timestamptz is null or at >= $3) order by number desc limit $4"
            }
            None => {
                "select number, snapshot from snapshots where $1::uuid is null and number < $2 \
                 and ($3::timestamptz is null or at >= $3) order by number desc limit $4"
            }
        };
        let found = look!(self, |tx| async {
            let found = tx.query(sql, &[&node, &before, &since, &more]).await?;
            found.iter().map(snapshot).collect::<Result<Vec<_>, Fault>>()
        }
        .await)?;
        Ok(Page::of_numbered(found, limit).read())
    }

    async fn prune_beats(
        &self,
        snapshots_before: Option<Timestamp>,
        nodes_before: Option<Timestamp>,
        batch: u32,
    ) -> Answer<u32> {
        let batch = i64::from(batch);
        transact!(self, |tx| async {
            let sql = "delete from snapshots where number in \
                       (select number from snapshots where at < $1 order by at limit $2)";
            let snapshots = tx.execute(sql, &[&snapshots_before, &batch]).await?;
            let sql = "delete from nodes where id in \
                       (select id from nodes where fenced and last_seen_at < $1 order by id limit $2)";
            let nodes = tx.execute(sql, &[&nodes_before, &batch]).await?;
            Ok::<_, Fault>(u32::try_from(snapshots + nodes).unwrap_or(u32::MAX))
        }
        .await)
    }
}
