//! Claiming: who may start, in order, within slots and gates.
//!
//! Runs without gates are taken with `skip locked`. Runs behind gates are decided on by whoever holds the gates' locks:
//! lock first, count in the next statement, start or park, commit. Nobody waits for a gate here; one that is busy is
//! asked again a little later.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use belfry_core::gate::{Admission, Candidate, admit};
use belfry_core::{NodeId, RunId};
use belfry_time::Timestamp;
use tokio_postgres::Row;
use uuid::Uuid;

use super::connection::{Fault, Tx};
use super::rows::{self, get, small};
use super::{DEADLINE, Postgres};
use crate::Error;
use crate::sabotage::Sabotage;
use crate::shapes::*;
use crate::store::Answer;

/// A busy gate is asked again so often …
const BUSY_MAX: u32 = 50;
/// … after so long. Its holder commits within a few round trips.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
/// Candidates behind gates that are looked at in one round; what is parked makes place for others.
const WINDOW: i64 = 500;
/// Rounds in one transaction, so that a long queue does not hold its gates too long.
const ROUNDS_MAX: u32 = 16;

/// A place in the order of starting: rank, not before, id.
type Order = (i32, Timestamp, Uuid);

/// A run that waits.
struct Waiting {
    order: Order,
    run: RunId,
    gates: Vec<i64>,
}

/// What one transaction claimed.
struct Taken {
    claimed: Vec<Claimed>,
    /// A gate was somebody else's while slots were left.
    busy: bool,
}

/// Starts the runs in `$3`.
/// `state + 0` keeps the planner from going through all that are ready instead of to those that are named.
const START: &str = "update live set state = 2, node_id = $1, attempt = attempt + 1, epoch = epoch + 1, started_at = $2 \
    where id = any($3) and state + 0 = 0 returning *";

/// Starts the first ready runs of the queues in `$3`, at most `$4`.
const START_FIRST: &str = "update live set state = 2, node_id = $1, attempt = attempt + 1, epoch = epoch + 1, \
    started_at = $2 where id = any(array( \
        select c.id from unnest($3::bigint[]) as q (id) cross join lateral ( \
            select l.id, l.rank, l.not_before from live l \
            where l.state = 0 and l.queue_id = q.id and l.not_before <= $2 \
            order by l.rank, l.not_before, l.id limit $4 for update skip locked \
        ) c order by c.rank, c.not_before, c.id limit $4)) returning *";

/// The first ready runs of the queues in `$1`, at most `$3` of each.
const READY: &str = "select c.* from unnest($1::bigint[]) as q (id) cross join lateral ( \
        select l.id, l.rank, l.not_before, l.agent_gate, l.turn_gate from live l \
        where l.state = 0 and l.queue_id = q.id and l.not_before <= $2 \
        order by l.rank, l.not_before, l.id limit $3 \
    ) c order by c.rank, c.not_before, c.id limit $3";

/// The same, locked, leaving out what others have locked.
const READY_LOCKED: &str = "select c.* from unnest($1::bigint[]) as q (id) cross join lateral ( \
        select l.id, l.rank, l.not_before, l.agent_gate, l.turn_gate from live l \
        where l.state = 0 and l.queue_id = q.id and l.not_before <= $2 \
        order by l.rank, l.not_before, l.id limit $3 for update skip locked \
    ) c order by c.rank, c.not_before, c.id limit $3";

/// The room of gates: cap less running.
const ROOM: &str = "select g.id, coalesce(g.cap, 2147483647) \
        - (select count(*) from live r where r.state = 2 and r.agent_gate = g.id) \
        - (select count(*) from live r where r.state = 2 and r.turn_gate = g.id) as room \
    from gates g where g.id = any($1)";

/// Un-parks, for each queue, as many runs as each gate in `$1` has room for by `$2`.
const RELEASE_ROOM: &str = "update live set state = 0, parked_on = null where state + 0 = 1 and id = any(array( \
    select w.id from unnest($1::bigint[], $2::bigint[]) as f (gate, room) \
    cross join (select id from queues where gated) q cross join lateral ( \
        select p.id from live p where p.state = 1 and p.parked_on = f.gate and p.queue_id = q.id \
        order by p.rank, p.not_before, p.id limit f.room \
    ) w))";

impl Postgres {
    /// Claims, and asks again while a gate with free slots for it is somebody else's.
    pub(super) async fn claim_until_settled(&self, now: Timestamp, claim: &Claim) -> Answer<Vec<Claimed>> {
        let mut claimed = Vec::new();
        let mut claim = claim.clone();
        for _ in 0..BUSY_MAX {
            let taken = match transact!(self, |tx| self.claim_in(&mut tx, now, &claim).await) {
                Ok(taken) => taken,
                // What was claimed before must be told.
                Err(_) if !claimed.is_empty() => break,
                Err(error) => return Err(error),
            };
            for run in &taken.claimed {
                if let Some((_, slots)) =
                    claim.lanes.iter_mut().find(|(lane, slots)| *lane == run.lane && *slots > 0)
                {
                    *slots -= 1;
                }
            }
            claimed.extend(taken.claimed);
            if !taken.busy {
                break;
            }
            tokio::time::sleep(BUSY_PAUSE).await;
        }
        Ok(claimed)
    }

    async fn claim_in(&self, tx: &mut Tx<'_>, now: Timestamp, claim: &Claim) -> Result<Taken, Fault> {
        let mut taken = Taken { claimed: Vec::new(), busy: false };
        let lanes: Vec<&str> = claim.lanes.iter().map(|(lane, _)| lane.as_str()).collect();
        // A node whose claims do not hold gets none; the lock keeps it from being fenced until we are done.
        let sql = "select q.id, q.lane, q.gated from nodes n cross join queues q \
                   where n.id = $1 and not n.fenced and q.lane = any($2) and q.needs <@ $3 for share of n";
        let queues = tx.query(sql, &[&claim.node.0, &lanes, &claim.labels]).await?;
        let mut gates = HashSet::new();
        for (lane, slots) in claim.lanes.iter().filter(|(_, slots)| *slots > 0) {
            let (mut plain, mut gated) = (Vec::new(), Vec::new());
            for row in &queues {
                if get::<&str>(row, "lane")? == lane {
                    let ids = if get(row, "gated")? { &mut gated } else { &mut plain };
                    ids.push(get::<i64>(row, "id")?);
                }
            }
            let mut lane =
                Lane { name: lane, now, node: claim.node, slots: *slots, plain, gated, held: &mut gates };
            self.claim_lane(tx, &mut lane, &mut taken).await?;
        }
        Ok(taken)
    }

    async fn claim_lane(&self, tx: &mut Tx<'_>, lane: &mut Lane<'_>, taken: &mut Taken) -> Result<(), Fault> {
        let window = WINDOW.max(2 * i64::from(lane.slots));
        let mut waiting = lane.ready(tx, READY, &lane.gated, window).await?;
        if waiting.is_empty() {
            return lane.start_first(tx, taken).await;
        }
        let plain = lane.ready(tx, READY_LOCKED, &lane.plain, i64::from(lane.slots)).await?;
        let mut parked_any = false;
        let (mut starts, mut busy) = (Vec::new(), false);
        for round in 0..ROUNDS_MAX {
            let mut room = self.lock_and_count(tx, lane, &waiting).await?;
            // Others may have started some before we had the locks.
            waiting = lane.ready(tx, READY, &lane.gated, window).await?;
            let full_window = waiting.len() as i64 >= window;
            let decided = decide(&plain, &waiting, &mut room, lane.slots);
            starts = decided.starts;
            busy = decided.busy && starts.len() < lane.slots as usize;
            // Whoever parks the rest hides from the others that they have counted too early.
            if decided.parks.is_empty() || self.sabotage.is(Sabotage::CountBeforeLock) {
                break;
            }
            parked_any = true;
            park(tx, &decided.parks).await?;
            // Who was parked at one gate has made place at another: those who wait there have their say before anybody
            // starts. Twice as many each time, for what finds no room is only parked again.
            let (gates, places): (Vec<i64>, Vec<i64>) =
                decided.left_open.iter().map(|(gate, places)| (*gate, places << round)).unzip();
            let released =
                if gates.is_empty() { 0 } else { tx.execute(RELEASE_ROOM, &[&gates, &places]).await? };
            if released == 0 && !full_window {
                break;
            }
            waiting = lane.ready(tx, READY, &lane.gated, window).await?;
        }
        taken.busy |= busy;
        lane.start(tx, &starts, taken).await?;
        if parked_any {
            // Of what was parked, as much as there is room for after all that.
            let held: Vec<i64> = lane.held.iter().copied().collect();
            tx.execute(super::finish::RELEASE, &[&held]).await?;
        }
        Ok(())
    }

    /// Locks the gates of candidates, those that nobody else holds, and counts behind them in the next statement.
    async fn lock_and_count(
        &self,
        tx: &mut Tx<'_>,
        lane: &mut Lane<'_>,
        waiting: &[Waiting],
    ) -> Result<HashMap<i64, i64>, Fault> {
        let needed: BTreeSet<i64> = waiting.iter().flat_map(|run| &run.gates).copied().collect();
        let missing: Vec<i64> = needed.iter().filter(|gate| !lane.held.contains(gate)).copied().collect();
        if self.sabotage.is(Sabotage::CountBeforeLock) {
            let needed: Vec<i64> = needed.into_iter().collect();
            let room = room(tx, &needed).await?;
            let sql = "select id from gates where id = any($1) order by id for no key update";
            tx.query(sql, &[&missing]).await?;
            lane.held.extend(missing);
            return Ok(room);
        }
        if !missing.is_empty() {
            let sql = "select id from gates where id = any($1) order by id for no key update skip locked";
            for row in tx.query(sql, &[&missing]).await? {
                lane.held.insert(get(&row, "id")?);
            }
        }
        let held: Vec<i64> = lane.held.iter().copied().collect();
        room(tx, &held).await
    }
}

/// A lane of a claiming node.
struct Lane<'a> {
    name: &'a str,
    now: Timestamp,
    node: NodeId,
    slots: u32,
    /// Queues without gates.
    plain: Vec<i64>,
    /// Queues with gates.
    gated: Vec<i64>,
    /// Gates whose locks we hold, for whatever lane.
    held: &'a mut HashSet<i64>,
}

impl Lane<'_> {
    async fn ready(
        &self,
        tx: &mut Tx<'_>,
        sql: &'static str,
        queues: &[i64],
        limit: i64,
    ) -> Result<Vec<Waiting>, Fault> {
        if queues.is_empty() {
            return Ok(Vec::new());
        }
        let found = tx.query(sql, &[&queues, &self.now, &limit]).await?;
        let waiting = |row: &Row| {
            let agent: Option<i64> = get(row, "agent_gate")?;
            Ok(Waiting {
                order: order(row)?,
                run: RunId(get(row, "id")?),
                gates: agent.into_iter().chain(get::<Option<i64>>(row, "turn_gate")?).collect(),
            })
        };
        found.iter().map(waiting).collect()
    }

    async fn start(&self, tx: &mut Tx<'_>, runs: &[Uuid], taken: &mut Taken) -> Result<(), Fault> {
        if runs.is_empty() {
            return Ok(());
        }
        let started = tx.query(START, &[&self.node.0, &self.now, &runs]).await?;
        self.take(started, taken)
    }

    async fn start_first(&self, tx: &mut Tx<'_>, taken: &mut Taken) -> Result<(), Fault> {
        if self.plain.is_empty() {
            return Ok(());
        }
        let slots = i64::from(self.slots);
        let started = tx.query(START_FIRST, &[&self.node.0, &self.now, &self.plain, &slots]).await?;
        self.take(started, taken)
    }

    fn take(&self, started: Vec<Row>, taken: &mut Taken) -> Result<(), Fault> {
        let mut started: Vec<(Order, Claimed)> = started
            .iter()
            .map(|row| Ok((order(row)?, claimed(row, self.name)?)))
            .collect::<Result<_, Fault>>()?;
        started.sort_by_key(|(order, _)| *order);
        taken.claimed.extend(started.into_iter().map(|(_, claimed)| claimed));
        Ok(())
    }
}

async fn room(tx: &mut Tx<'_>, gates: &[i64]) -> Result<HashMap<i64, i64>, Fault> {
    let rooms = tx.query(ROOM, &[&gates]).await?;
    rooms.iter().map(|row| Ok((get(row, "id")?, get(row, "room")?))).collect()
}

/// What a round came to.
#[derive(Default)]
struct Decided {
    starts: Vec<Uuid>,
    /// Which run waits behind which gate.
    parks: Vec<(Uuid, i64)>,
    /// Places at gates that had room for somebody who is parked elsewhere, or for whom nobody came.
    left_open: HashMap<i64, i64>,
    /// Somebody waits for a gate that is not ours.
    busy: bool,
}

/// Admits in the merged order of runs with and without gates.
fn decide(plain: &[Waiting], gated: &[Waiting], room: &mut HashMap<i64, i64>, slots: u32) -> Decided {
    let mut all: Vec<&Waiting> = plain.iter().chain(gated).collect();
    all.sort_by_key(|run| run.order);
    let candidates: Vec<Candidate<Uuid, i64>> =
        all.iter().map(|run| Candidate { run: run.run.0, gates: run.gates.clone() }).collect();
    let mut before = room.clone();
    let admissions = admit(&candidates, room, slots as usize);
    let left = room.iter().filter(|(_, room)| **room > 0).map(|(gate, room)| (*gate, *room));
    let mut decided = Decided { left_open: left.collect(), ..Decided::default() };
    for (candidate, admission) in candidates.iter().zip(admissions) {
        let ours = candidate.gates.iter().all(|gate| before.contains_key(gate));
        match admission {
            Admission::Start => {
                decided.starts.push(candidate.run);
                for gate in &candidate.gates {
                    before.entry(*gate).and_modify(|room| *room -= 1);
                }
            }
            // Parking it makes place at its other gate, which only the holder of that lock can give to another.
            Admission::Park(gate) if ours => {
                decided.parks.push((candidate.run, gate));
                for other in
                    candidate.gates.iter().filter(|other| before.get(other).is_some_and(|room| *room > 0))
                {
                    *decided.left_open.entry(*other).or_default() += 1;
                }
            }
            Admission::Park(_) | Admission::Later => decided.busy |= !ours,
            Admission::NoSlot => {}
        }
    }
    decided
}

async fn park(tx: &mut Tx<'_>, parks: &[(Uuid, i64)]) -> Result<(), Fault> {
    let (runs, gates): (Vec<Uuid>, Vec<i64>) = parks.iter().copied().unzip();
    let sql = "update live set state = 1, parked_on = ($2::bigint[])[array_position($1::uuid[], id)] \
               where id = any($1) and state + 0 = 0";
    tx.execute(sql, &[&runs, &gates]).await?;
    Ok(())
}

fn order(row: &Row) -> Result<Order, Fault> {
    Ok((get(row, "rank")?, get(row, "not_before")?, get(row, "id")?))
}

pub(super) fn claimed(row: &Row, lane: &str) -> Result<Claimed, Fault> {
    let payload: &str = get(row, "payload")?;
    Ok(Claimed {
        run: RunId(get(row, "id")?),
        epoch: get(row, "epoch")?,
        attempt: small(get(row, "attempt")?),
        max_attempts: small(get(row, "max_attempts")?),
        agent: get(row, "agent_id")?,
        schedule: get(row, "schedule_id")?,
        command: get(row, "command")?,
        trigger: rows::trigger(get(row, "trigger")?)?,
        tick_at: get(row, "tick_at")?,
        lane: lane.to_owned(),
        prompt: get(row, "prompt")?,
        payload: serde_json::from_str(payload)
            .map_err(|error| Error::unexpected(format!("a run's payload: {error}")))?,
        trace_id: get(row, "trace_id")?,
    })
}
