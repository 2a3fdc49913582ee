//! Nodes and their leases: renewal, fencing, rescue.

use belfry_core::rescue::{Fate, Orphan, fate};
use belfry_core::retry::Verdict;
use belfry_core::{Epoch, NodeId, RunId, RunState};
use belfry_time::Timestamp;
use tokio_postgres::Row;
use uuid::Uuid;

use super::Postgres;
use super::connection::{Fault, Tx};
use super::finish::{Change, lock_running};
use super::rows::{self, Live, get};
use super::session::{left_behind, lines_of};
use crate::shapes::*;
use crate::unknown;

pub(super) async fn join(tx: &mut Tx<'_>, node: &Node, left: Option<NodeId>) -> Result<(), Fault> {
    let sql = "insert into nodes (id, host, pid, labels, started_at, lease_until, fenced, draining, last_seen_at, \
                   renewal, boot_id, pid_ns, process_start, state_dir, version, max_concurrent, lease_ms) \
               values ($1, $2, $3, $4, $5, $6, $7, coalesce((select draining from nodes where id = $17), $8), $9, \
                   nextval('numbers'), $10, $11, $12, $13, $14, $15, $16) \
               on conflict (id) do update set host = excluded.host, pid = excluded.pid, \
               labels = excluded.labels, started_at = excluded.started_at, \
               lease_until = excluded.lease_until, fenced = excluded.fenced, draining = excluded.draining, \
               last_seen_at = excluded.last_seen_at, renewal = excluded.renewal, boot_id = excluded.boot_id, \
               pid_ns = excluded.pid_ns, process_start = excluded.process_start, state_dir = excluded.state_dir, \
               version = excluded.version, max_concurrent = excluded.max_concurrent, lease_ms = excluded.lease_ms";
    let pid = i64::from(node.pid);
    let process_start = i64::try_from(node.process.start_time).unwrap_or(0);
    tx.execute(
        sql,
        &[
            &node.id.0,
            &node.host,
            &pid,
            &node.labels,
            &node.started_at,
            &node.lease_until,
            &node.fenced,
            &node.draining,
            &node.last_seen_at,
            &node.process.boot_id,
            &node.process.pid_ns,
            &process_start,
            &node.process.state_dir,
            &node.process.version,
            &node.max_concurrent.map(i64::from),
            &i64::try_from(node.process.lease_ms).unwrap_or(i64::MAX),
            &left.map(|left| left.0),
        ],
    )
    .await?;
    Ok(())
}

/// Renews a lease; `false` where it was fenced. It touches no other table: one that somebody locks must not end the lease.
pub(super) async fn renew(tx: &mut Tx<'_>, id: NodeId, lease_until: Timestamp) -> Result<bool, Fault> {
    let sql = "update nodes set lease_until = $2, renewal = nextval('numbers') \
               where id = $1 and not fenced returning 1";
    Ok(!tx.query(sql, &[&id.0, &lease_until]).await?.is_empty())
}

/// Lets this transaction wait only briefly for a lock. Renewals use the same connection and must not wait behind it.
async fn wait_briefly(tx: &mut Tx<'_>) -> Result<(), Fault> {
    tx.query("select set_config('lock_timeout', '500ms', true)", &[]).await.map(drop)
}

/// What runs under a node.
pub(super) async fn held(tx: &mut Tx<'_>, id: NodeId) -> Result<Renewed, Fault> {
    wait_briefly(tx).await?;
    let sql = "select id, epoch, cancel_reason from live where node_id = $1 and state = 2 order by id";
    let (mut cancels, mut live) = (Vec::new(), Vec::new());
    for row in tx.query(sql, &[&id.0]).await? {
        let (run, epoch) = (RunId(get(&row, "id")?), get::<Epoch>(&row, "epoch")?);
        live.push((run, epoch));
        if let Some(reason) = get::<Option<i16>>(&row, "cancel_reason")? {
            cancels.push((run, epoch, unknown::cancel_reason(reason)));
        }
    }
    Ok(Renewed::Held { cancels, live: Some(live) })
}

pub(super) async fn running_lanes(tx: &mut Tx<'_>, id: NodeId) -> Result<Vec<(RunId, String)>, Fault> {
    let sql = "select l.id, q.lane from live l join queues q on q.id = l.queue_id \
               where l.node_id = $1 and l.state = 2 order by l.id";
    let rows = tx.query(sql, &[&id.0]).await?;
    rows.iter().map(|row| Ok((RunId(get(row, "id")?), get(row, "lane")?))).collect()
}

pub(super) async fn marks(tx: &mut Tx<'_>, id: NodeId) -> Result<Marks, Fault> {
    wait_briefly(tx).await?;
    let sql = "select id, epoch, cancel_reason from live \
               where node_id = $1 and cancel_reason is not null and state + 0 = 2 order by id";
    let mark = |row: &Row| {
        Ok((RunId(get(row, "id")?), get(row, "epoch")?, unknown::cancel_reason(get(row, "cancel_reason")?)))
    };
    let cancels = tx.query(sql, &[&id.0]).await?.iter().map(mark).collect::<Result<_, Fault>>()?;
    let found = tx.query("select draining from nodes where id = $1", &[&id.0]).await?;
    let draining = found.first().map(|row| get(row, "draining")).transpose()?;
    Ok(Marks { cancels, draining })
}

pub(super) async fn drain(
    tx: &mut Tx<'_>,
    now: Timestamp,
    id: NodeId,
    draining: bool,
) -> Result<Drained, Fault> {
    let sql = "select not fenced and lease_until > $2 as alive, draining from nodes where id = $1 \
               for no key update";
    let found = tx.query(sql, &[&id.0, &now]).await?;
    let Some(row) = found.first() else { return Ok(Drained::NotFound) };
    if !get::<bool>(row, "alive")? {
        return Ok(Drained::Dead);
    }
    tx.execute("update nodes set draining = $2 where id = $1", &[&id.0, &draining]).await?;
    Ok(Drained::Marked { is_news: get::<bool>(row, "draining")? != draining })
}

pub(super) async fn nodes(tx: &mut Tx<'_>) -> Result<Vec<Node>, Fault> {
    let found = tx.query("select n.*, array(select u.label from unnest(n.labels) as u (label) where u.label is not null) as readable_labels \
         from nodes n where not n.fenced order by n.id", &[]).await?;
    found.iter().map(rows::node).collect()
}

impl Postgres {
    pub(super) async fn fence_in(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        id: NodeId,
        lease_seen: Timestamp,
    ) -> Result<Option<Rescued>, Fault> {
        // From here on no claim under this node can come to its end: claims hold its row.
        let sql = "update nodes set fenced = true where id = $1 and not fenced and lease_until = $2 \
                   returning renewal";
        let fenced = tx.query(sql, &[&id.0, &lease_seen]).await?;
        let Some(node) = fenced.first() else { return Ok(None) };
        let own = tx.query("select id from live where node_id = $1 and state = 2", &[&id.0]).await?;
        let own: Vec<Uuid> = own.iter().map(|row| get(row, "id")).collect::<Result<_, Fault>>()?;
        let (books, runs) = lock_running(tx, &own).await?;
        let lines = lines_of(tx, &runs).await?;
        let runs: Vec<Live> = runs.into_iter().filter(|live| live.node == Some(id)).collect();
        let orphan = |live: &Live| Orphan {
            run: live.id,
            cancel: left_behind(live, &lines),
            attempt: rows::small(live.attempt),
            max_attempts: rows::small(live.max_attempts),
            rescue: live.rescue,
            suspicions: live.suspicions,
        };
        let orphans: Vec<Orphan<RunId>> = runs.iter().map(orphan).collect();
        let renewal: i64 = get(node, "renewal")?;
        let mut rescued = Rescued::default();
        let (mut changes, mut suspicions) = (Vec::new(), Vec::new());
        for (mut live, orphan) in runs.into_iter().zip(&orphans) {
            let is_suspect = orphan.is_suspect(renewal);
            rescued.suspects.extend(is_suspect.then_some(live.id));
            match fate(orphan, is_suspect) {
                Fate::End { state, reason, error } => {
                    rescued.ended.push((live.id, state));
                    live.error = error.map(str::to_owned).or(live.error);
                    changes.push(Change::end(live, state, Some(reason)));
                }
                Fate::Back => {
                    rescued.pending.push(live.id);
                    suspicions.push(i16::try_from(orphan.suspicions_after(is_suspect)).unwrap_or(i16::MAX));
                    changes.push(Change::of(live, Verdict::Retry { at: now }));
                }
            }
        }
        self.settle(tx, now, books, changes).await?;
        let back: Vec<Uuid> = rescued.pending.iter().map(|run| run.0).collect();
        let sql = "update live l set rescue = 0, suspicions = u.suspicions \
                   from unnest($1::uuid[], $2::smallint[]) as u (id, suspicions) where l.id = u.id";
        tx.execute(sql, &[&back, &suspicions]).await?;
        Ok(Some(rescued))
    }

    pub(super) async fn give_back_in(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        node: NodeId,
        runs: &[(RunId, Epoch)],
    ) -> Result<Vec<(RunId, RunState)>, Fault> {
        let ids: Vec<Uuid> = runs.iter().map(|(run, _)| run.0).collect();
        let (books, found) = lock_running(tx, &ids).await?;
        let lines = lines_of(tx, &found).await?;
        let mut found: std::collections::HashMap<RunId, Live> =
            found.into_iter().map(|live| (live.id, live)).collect();
        let (mut changes, mut given_back) = (Vec::new(), Vec::new());
        for (run, epoch) in runs {
            let ours = |live: &Live| live.is_running() && live.node == Some(node) && live.epoch == *epoch;
            if !found.get(run).is_some_and(ours) {
                continue;
            }
            let Some(live) = found.remove(run) else { continue };
            let left_behind = left_behind(&live, &lines);
            given_back.push((*run, left_behind.map_or(RunState::Pending, |_| RunState::Cancelled)));
            match left_behind {
                Some(reason) => changes.push(Change::end(live, RunState::Cancelled, Some(reason))),
                None => changes.push(Change::of(live, Verdict::Return)),
            }
        }
        self.settle(tx, now, books, changes).await?;
        Ok(given_back)
    }
}
