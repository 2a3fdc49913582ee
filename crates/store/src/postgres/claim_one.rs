//! Claiming one run by its id, for a node that is there for nothing else.

use belfry_core::gate::Pass;
use belfry_core::{RunId, ScheduleId};
use belfry_time::Timestamp;

use super::claim::{claimed, passes};
use super::connection::{Fault, Tx};
use super::lane::{Room, room};
use super::rows::get;
use crate::shapes::*;

/// Starts a run, also one that is parked, if its gates have room: the gates are locked first, counted in the next statement.
pub(super) async fn claim_one(
    tx: &mut Tx<'_>,
    now: Timestamp,
    claim: &Claim,
    run: RunId,
    unread: &[ScheduleId],
) -> Result<Vec<Claimed>, Fault> {
    // A node whose claims do not hold gets none; the lock keeps it from being fenced until we are done.
    let sql = "select q.lane, l.agent_gate, l.turn_gate, l.command_gate, l.whole_gate, l.alone_gate from nodes n cross join live l join queues q on q.id = l.queue_id \
               where n.id = $1 and not n.fenced and l.id = $2 and q.needs <@ $3 \
               and not l.schedule_id = any($4) for share of n";
    let found = tx.query(sql, &[&claim.node.0, &run.0, &claim.labels, &unread]).await?;
    let Some(row) = found.first() else { return Ok(Vec::new()) };
    let gates = passes(row)?;
    if !gates.is_empty() {
        let all: Vec<i64> = gates.iter().map(|(gate, _)| *gate).collect();
        let limits: Vec<i64> =
            gates.iter().filter(|(_, pass)| *pass != Pass::Beside).map(|(gate, _)| *gate).collect();
        let sql = "select id from gates where id = any($1) order by id for no key update";
        tx.query(sql, &[&all]).await?;
        let sql = "select 1 from gates g where g.id = any($1) and room_at(g) <= 0";
        if !tx.query(sql, &[&limits]).await?.is_empty() {
            return Ok(Vec::new());
        }
    }
    if let Room::Left(0) | Room::Busy = room(tx, get(row, "lane")?).await? {
        return Ok(Vec::new());
    }
    let sql = "update live set state = 2, parked_on = null, node_id = $1, attempt = attempt + 1, epoch = epoch + 1, \
               started_at = $2, rescue = case when rescue is not null then nextval('numbers') end where id = $3 and (state in (0, 3) or state = 1 and parked_on is not null) and not_before <= $2 returning *";
    let started = tx.query(sql, &[&claim.node.0, &now, &run.0]).await?;
    started.iter().map(|started| claimed(started, get(row, "lane")?)).collect()
}
