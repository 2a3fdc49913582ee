//! Nodes and their leases: renewal, fencing, rescue.

use belfry_core::rescue::{Fate, Orphan, fate};
use belfry_core::retry::Verdict;
use belfry_core::{Epoch, NodeId, RunId, RunState};
use belfry_time::Timestamp;
use rusqlite::params;

use super::source::{from_json, to_json};
use super::{Done, Verb, bytes, instant, maybe_number, micros, node_bytes, node_id, number, run_id, text};
use crate::shapes::*;
use crate::unknown;

impl Verb<'_> {
    pub(super) fn join(&self, node: &Node, left: Option<NodeId>) -> Done<()> {
        self.execute(
            "insert into nodes (id, host, pid, labels, started_at, lease_until, fenced, draining, last_seen_at,
                 boot_id, pid_ns, process_start, state_dir, version, max_concurrent, lease_ms)
             values (?1, ?2, ?3, ?4, ?5, ?6, ?7, coalesce((select draining from nodes where id = ?17), ?8), ?9,
                     ?10, ?11, ?12, ?13, ?14, ?15, ?16)
             on conflict (id) do update set host = excluded.host, pid = excluded.pid, labels = excluded.labels,
                 started_at = excluded.started_at, lease_until = excluded.lease_until, fenced = excluded.fenced,
                 draining = excluded.draining, last_seen_at = excluded.last_seen_at, renewal = rescues,
                 boot_id = excluded.boot_id, pid_ns = excluded.pid_ns, process_start = excluded.process_start,
                 state_dir = excluded.state_dir, version = excluded.version,
                 max_concurrent = excluded.max_concurrent, lease_ms = excluded.lease_ms",
            params![
                node_bytes(node.id),
                node.host,
                node.pid,
                to_json(&node.labels)?,
                micros(node.started_at),
                micros(node.lease_until),
                node.fenced,
                node.draining,
                micros(node.last_seen_at),
                node.process.boot_id,
                node.process.pid_ns,
                i64::try_from(node.process.start_time).unwrap_or(0),
                node.process.state_dir,
                node.process.version,
                node.max_concurrent,
                i64::try_from(node.process.lease_ms).unwrap_or(i64::MAX),
                left.map(node_bytes)
            ],
        )
        .map(drop)
    }

    /// Renews a lease; `false` where it was fenced.
    pub(super) fn renew(&self, id: NodeId, lease_until: Timestamp) -> Done<bool> {
        let renewed = self.execute(
            "update nodes set lease_until = ?, renewal = rescues where id = ? and not fenced",
            params![micros(lease_until), node_bytes(id)],
        )?;
        Ok(renewed > 0)
    }

    /// What runs under a node. It looks at all live runs, because an index by node would cost every start and every end
    /// more than this costs every few seconds: so it is for a reader, never for the writer.
    pub(super) fn held(&self, id: NodeId) -> Done<Renewed> {
        let own = self.rows(
            "select id, epoch, cancel_reason from live where state = 2 and node_id = ? order by id",
            [node_bytes(id)],
            |row| {
                Ok((
                    run_id(row.get(0)?),
                    number::<Epoch>(row, 1)?,
                    maybe_number(row, 2)?.map(unknown::cancel_reason),
                ))
            },
        )?;
        Ok(Renewed::Held {
            cancels: own.iter().filter_map(|(run, epoch, cancel)| Some((*run, *epoch, (*cancel)?))).collect(),
            live: Some(own.iter().map(|(run, epoch, _)| (*run, *epoch)).collect()),
        })
    }

    pub(super) fn marks(&self, id: NodeId) -> Done<Marks> {
        let marked = self.rows(
            "select id, epoch, cancel_reason from live where node_id = ? and cancel_reason is not null and state = 2 order by id",
            [node_bytes(id)],
            |row| Ok((run_id(row.get(0)?), number(row, 1)?, Some(unknown::cancel_reason(number(row, 2)?)))),
        )?;
        let draining =
            self.row("select draining from nodes where id = ?", [node_bytes(id)], |row| row.get(0))?;
        Ok(Marks {
            cancels: marked
                .into_iter()
                .filter_map(|(run, epoch, reason)| Some((run, epoch, reason?)))
                .collect(),
            draining,
        })
    }

    pub(super) fn drain(&self, now: Timestamp, id: NodeId, draining: bool) -> Done<Drained> {
        let found = self.row(
            "select not fenced and lease_until > ?, draining from nodes where id = ?",
            params![micros(now), node_bytes(id)],
            |row| Ok((row.get::<_, bool>(0)?, row.get::<_, bool>(1)?)),
        )?;
        Ok(match found {
            None => Drained::NotFound,
            Some((false, _)) => Drained::Dead,
            Some((true, before)) => {
                // Runs that only this node could take no longer have a place in their lanes.
                self.made_room.set(true);
                self.execute(
                    "update nodes set draining = ? where id = ?",
                    params![draining, node_bytes(id)],
                )?;
                Drained::Marked { is_news: before != draining }
            }
        })
    }

    pub(super) fn nodes(&self) -> Done<Vec<Node>> {
        let nodes =
            self.rows("select * from nodes where not fenced and length(id) = 16 order by id", [], |row| {
                let node = Node {
                    id: node_id(row.get("id")?),
                    host: text(row, "host")?,
                    pid: number(row, "pid")?,
                    labels: Vec::new(),
                    started_at: instant(row, "started_at")?,
                    lease_until: instant(row, "lease_until")?,
                    fenced: row.get("fenced")?,
                    draining: row.get("draining")?,
                    last_seen_at: instant(row, "last_seen_at")?,
                    max_concurrent: maybe_number(row, "max_concurrent")?,
                    process: NodeProcess {
                        boot_id: text(row, "boot_id")?,
                        pid_ns: text(row, "pid_ns")?,
                        start_time: number(row, "process_start")?,
                        state_dir: text(row, "state_dir")?,
                        version: text(row, "version")?,
                        lease_ms: number(row, "lease_ms")?,
                    },
                };
                Ok((node, text(row, "labels")?))
            })?;
        // Labels that cannot be read are none.
        Ok(nodes
            .into_iter()
            .map(|(node, labels)| Node { labels: from_json(&labels).unwrap_or_default(), ..node })
            .collect())
    }

    pub(super) fn fence(&self, now: Timestamp, id: NodeId, lease_seen: Timestamp) -> Done<Option<Rescued>> {
        let renewal = self.row(
            "update nodes set fenced = 1 where id = ? and not fenced and lease_until = ? returning renewal",
            params![node_bytes(id), micros(lease_seen)],
            |row| row.get::<_, i64>(0),
        )?;
        let Some(renewal) = renewal else { return Ok(None) };
        self.made_room.set(true);
        let orphans = self.rows(
            "select id, case when cancel_reason is null and trigger = 4
                        and not exists (select 1 from session_runs r where r.run_id = live.id) then 27 else cancel_reason end,
                    attempt, max_attempts, rescue, suspicions
             from live where state = 2 and node_id = ? order by id",
            [node_bytes(id)],
            |row| {
                Ok(Orphan {
                    run: run_id(row.get(0)?),
                    cancel: maybe_number(row, 1)?.map(unknown::cancel_reason),
                    attempt: number(row, 2)?,
                    max_attempts: number(row, 3)?,
                    rescue: row.get(4)?,
                    suspicions: number(row, 5)?,
                })
            },
        )?;
        let mut rescued = Rescued::default();
        for orphan in &orphans {
            let (run, is_suspect) = (orphan.run, orphan.is_suspect(renewal));
            rescued.suspects.extend(is_suspect.then_some(run));
            match fate(orphan, is_suspect) {
                Fate::End { state, reason, error } => {
                    if error.is_some() {
                        self.execute("update live set error = ? where id = ?", params![error, bytes(run)])?;
                    }
                    self.end(now, run, state, reason)?;
                    rescued.ended.push((run, state));
                }
                Fate::Back => {
                    self.come_back(now, run, Verdict::Retry { at: now })?;
                    self.execute(
                        "update live set rescue = 0, suspicions = ? where id = ?",
                        params![orphan.suspicions_after(is_suspect), bytes(run)],
                    )?;
                    rescued.pending.push(run);
                }
            }
        }
        Ok(Some(rescued))
    }

    pub(super) fn give_back(
        &self,
        now: Timestamp,
        node: NodeId,
        runs: &[(RunId, Epoch)],
    ) -> Done<Vec<(RunId, RunState)>> {
        let mut given_back = Vec::new();
        for (run, epoch) in runs {
            let cancel = self.row(
                "select case when cancel_reason is null and trigger = 4 and not exists (select 1 from session_runs r where r.run_id = live.id)
                    then 27 else cancel_reason end from live where id = ? and state = 2 and node_id = ? and epoch = ?",
                params![bytes(*run), node_bytes(node), epoch],
                |row| Ok(maybe_number(row, 0)?.map(unknown::cancel_reason)),
            )?;
            let Some(cancel) = cancel else { continue };
            given_back.push((*run, cancel.map_or(RunState::Pending, |_| RunState::Cancelled)));
            match cancel {
                Some(reason) => self.end(now, *run, RunState::Cancelled, reason)?,
                None => self.come_back(now, *run, Verdict::Return)?,
            }
        }
        Ok(given_back)
    }
}
