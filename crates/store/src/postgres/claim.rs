//! Claiming: who may start, in order, within slots and gates.
//!
//! Runs without gates are taken with `skip locked`, in one round trip. Runs behind gates are decided on by whoever holds
//! the gates' locks: lock first, count in the next statement, start or park, commit. Nobody waits for a gate here; one
//! that is busy is asked again a little later.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use belfry_core::gate::{Admission, Candidate, admit};
use belfry_core::{RunId, ScheduleId};
use belfry_time::Timestamp;
use tokio_postgres::Row;
use uuid::Uuid;

use super::Postgres;
use super::connection::{Fault, Param, Tx};
use super::lane::{Room, room};
use super::rows::{get, small};
use crate::Error;
use crate::sabotage::Sabotage;
use crate::sessions::read_given;
use crate::shapes::*;
use crate::store::Answer;

/// A busy gate is asked again so often …
const BUSY_MAX: u32 = 60;
/// … at first at once, for its holder commits within a few round trips, …
const BUSY_AT_ONCE: u32 = 10;
/// … then after so long.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
/// Candidates behind gates that are looked at first, at least, and as many as there are slots …
const WINDOW_MIN: i64 = 32;
/// … and in further rounds; what is parked makes place for others.
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
    rescued: bool,
}

/// A lane under the locks of its gates.
#[derive(Default)]
struct Counted {
    /// Who waits without gates, if that was asked for.
    free: Vec<Waiting>,
    /// Who waits behind gates.
    waiting: Vec<Waiting>,
    /// The room of the gates that we hold.
    room: HashMap<i64, i64>,
}

/// What one transaction claimed.
struct Taken {
    claimed: Vec<Claimed>,
    /// A gate was somebody else's while slots were left.
    busy: bool,
}

/// Starts the runs in `$3`.
/// `state + 0` keeps the planner from going through all that are ready instead of to those that are named.
const START: &str = "update live set state = 2, node_id = $1, attempt = attempt + 1, epoch = epoch + 1, started_at = $2, \
    rescue = case when rescue is not null then nextval('numbers') end \
    where id = any($3) and state + 0 = 0 returning id, rank, not_before, epoch, attempt, max_attempts, agent_id, \
    schedule_id, command, trigger, tick_at, prompt, payload, trace_id, rescue, suspicions";

/// Starts who comes before all that wait behind gates, and names the lanes where slots are left for these.
const START_FREE: &str = "select id, rank, not_before, epoch, attempt, max_attempts, agent_id, schedule_id, command, \
    trigger, tick_at, prompt, payload, trace_id, null::bigint as rescue, 0::smallint as suspicions, place \
    from claim_free($1, $2, $3, $4, $5, $6, $7)";

/// Who waits in a lane, after locking gates, and the room of these.
const CANDIDATES: &str = "select id, rank, not_before, agent_gate, turn_gate, room, rescued from candidates($1, $2, $3, $4, $5, $6, $7, $8, $9)";

/// The room of gates: cap less running.
const ROOM: &str = "select g.id, coalesce(g.cap, 2147483647) \
        - (select count(*) from live r where r.state = 2 and r.agent_gate = g.id) \
        - (select count(*) from live r where r.state = 2 and r.turn_gate = g.id) as room \
    from gates g";

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
        let lanes_in_order = &claim.lanes;
        // Where gates were in the way the last time they will be again, and one question is enough.
        let (mut claimed, lanes) = match self.gates_in_the_way.load(Ordering::Relaxed) {
            true => (Vec::new(), claim.lanes.clone()),
            false => transact!(self, Work, |tx| claim_free(&mut tx, now, claim, &self.unread.ids()).await)?,
        };
        self.gates_in_the_way.store(false, Ordering::Relaxed);
        let mut claim = Claim { lanes, ..claim.clone() };
        for tries in 0..BUSY_MAX {
            if claim.lanes.iter().all(|(_, slots)| *slots == 0) {
                break;
            }
            let taken = match transact!(self, Work, |tx| self.claim_in(&mut tx, now, &claim).await) {
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
            claim.rescue &= !taken.claimed.iter().any(|run| run.rescued);
            claimed.extend(taken.claimed);
            if !taken.busy {
                break;
            }
            match tries < BUSY_AT_ONCE {
                true => tokio::task::yield_now().await,
                false => tokio::time::sleep(BUSY_PAUSE).await,
            }
        }
        claimed.sort_by_key(|run| lanes_in_order.iter().position(|(lane, _)| *lane == run.lane));
        Ok(claimed)
    }

    async fn claim_in(&self, tx: &mut Tx<'_>, now: Timestamp, claim: &Claim) -> Result<Taken, Fault> {
        let mut taken = Taken { claimed: Vec::new(), busy: false };
        let mut gates = HashSet::new();
        let mut left = claim.lanes.iter().filter(|(_, slots)| *slots > 0).count();
        for (name, slots) in claim.lanes.iter().filter(|(_, slots)| *slots > 0) {
            left -= 1;
            let is_last = left == 0;
            let may_rescue = claim.rescue && !taken.claimed.iter().any(|run| run.rescued);
            let mut lane = Lane { name, now, claim, slots: *slots, may_rescue, is_last, held: &mut gates };
            self.claim_lane(tx, &mut lane, &mut taken).await?;
        }
        Ok(taken)
    }

    async fn claim_lane(&self, tx: &mut Tx<'_>, lane: &mut Lane<'_>, taken: &mut Taken) -> Result<(), Fault> {
        match room(tx, lane.name).await? {
            Room::Unlimited => {}
            Room::Left(room) => lane.slots = lane.slots.min(room),
            Room::Busy => {
                taken.busy = true;
                return Ok(());
            }
        }
        if lane.slots == 0 {
            return Ok(());
        }
        let mut window = WINDOW_MIN.max(i64::from(lane.slots));
        let mut plain = None;
        let mut parked_any = false;
        let (mut starts, mut busy) = (Vec::new(), false);
        for round in 0..ROUNDS_MAX {
            let Some(Counted { free, waiting, mut room }) =
                self.lock_and_count(tx, lane, window, plain.is_none()).await?
            else {
                taken.busy = true;
                return Ok(());
            };
            let plain = plain.get_or_insert(free);
            let slots = lane.slots as usize;
            if waiting.first().is_some_and(|first| {
                plain.len() < slots || plain.last().is_none_or(|last| first.order < last.order)
            }) {
                self.gates_in_the_way.store(true, Ordering::Relaxed);
            }
            let full_window = waiting.len() as i64 >= window;
            let decided = decide(plain, &waiting, &mut room, lane.slots, lane.may_rescue);
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
            window = WINDOW.max(2 * i64::from(lane.slots));
        }
        taken.busy |= busy;
        let commit = lane.is_last && !parked_any && !tx.has_made_room();
        lane.start(tx, &starts, commit, taken).await?;
        if parked_any {
            // Of what was parked, as much as there is room for after all that.
            let held: Vec<i64> = lane.held.iter().copied().collect();
            tx.query(super::finish::UNPARK, &[&held]).await?;
        }
        Ok(())
    }

    /// Locks the gates of candidates, those that nobody else holds, and counts behind them in the next statement. `None`
    /// where all are somebody else's.
    async fn lock_and_count(
        &self,
        tx: &mut Tx<'_>,
        lane: &mut Lane<'_>,
        window: i64,
        with_plain: bool,
    ) -> Result<Option<Counted>, Fault> {
        let early = match self.sabotage.is(Sabotage::CountBeforeLock) {
            true => Some(count_all_and_lock(tx).await?),
            false => None,
        };
        let held: Vec<i64> = lane.held.iter().copied().collect();
        let slots = if with_plain { i64::from(lane.slots) } else { 0 };
        let params: &[Param<'_>] = &[
            &lane.now,
            &lane.claim.node.0,
            &lane.name,
            &lane.claim.labels,
            &window,
            &slots,
            &held,
            &lane.may_rescue,
            &self.unread.ids(),
        ];
        let found = tx.query(CANDIDATES, params).await?;
        let mut counted = Counted::default();
        for row in &found {
            let agent: Option<i64> = get(row, "agent_gate")?;
            if let (Some(room), Some(gate)) = (get(row, "room")?, agent) {
                lane.held.insert(gate);
                counted.room.insert(gate, room);
                continue;
            }
            let Some(run) = get::<Option<Uuid>>(row, "id")? else { return Ok(None) };
            let gates: Vec<i64> = agent.into_iter().chain(get::<Option<i64>>(row, "turn_gate")?).collect();
            let list = if gates.is_empty() { &mut counted.free } else { &mut counted.waiting };
            list.push(Waiting { order: order(row)?, run: RunId(run), gates, rescued: get(row, "rescued")? });
        }
        if let Some(room) = early {
            counted.room = room;
        }
        Ok(Some(counted))
    }
}

/// A lane of a claiming node.
struct Lane<'a> {
    name: &'a str,
    now: Timestamp,
    claim: &'a Claim,
    slots: u32,
    /// One rescued run may start here.
    may_rescue: bool,
    /// None follows in this transaction.
    is_last: bool,
    /// Gates whose locks we hold, for whatever lane.
    held: &'a mut HashSet<i64>,
}

impl Lane<'_> {
    async fn start(
        &self,
        tx: &mut Tx<'_>,
        runs: &[Uuid],
        commit: bool,
        taken: &mut Taken,
    ) -> Result<(), Fault> {
        if runs.is_empty() {
            return Ok(());
        }
        let params: &[Param<'_>] = &[&self.claim.node.0, &self.now, &runs];
        let started = match commit {
            true => tx.query_and_commit(START, params).await?,
            false => tx.query(START, params).await?,
        };
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

/// Starts who comes before all that wait behind gates; gives the lanes with slots that are left for these.
async fn claim_free(
    tx: &mut Tx<'_>,
    now: Timestamp,
    claim: &Claim,
    unread: &[ScheduleId],
) -> Result<(Vec<Claimed>, Vec<(String, u32)>), Fault> {
    let (lanes, slots): (Vec<&str>, Vec<i64>) = claim
        .lanes
        .iter()
        .filter(|(_, slots)| *slots > 0)
        .map(|(lane, slots)| (lane.as_str(), i64::from(*slots)))
        .unzip();
    let found = tx
        .query_and_commit(
            START_FREE,
            &[&now, &claim.node.0, &lanes, &slots, &claim.labels, &claim.rescue, &unread],
        )
        .await?;
    let (mut started, mut gated) = (Vec::with_capacity(found.len()), Vec::new());
    for row in &found {
        let place: i32 = get(row, "place")?;
        let at = usize::try_from(place - 1).unwrap_or(usize::MAX);
        let lane = lanes.get(at).ok_or_else(|| Error::unexpected("a run of a lane that nobody asked for"))?;
        match get::<Option<Uuid>>(row, "id")? {
            Some(_) => started.push(((place, order(row)?), claimed(row, lane)?)),
            None => gated.push(((*lane).to_owned(), small(get(row, "attempt")?))),
        }
    }
    started.sort_by_key(|(order, _)| *order);
    Ok((started.into_iter().map(|(_, claimed)| claimed).collect(), gated))
}

/// Counts behind all gates, and only then locks them: only for a store that is broken on purpose.
async fn count_all_and_lock(tx: &mut Tx<'_>) -> Result<HashMap<i64, i64>, Fault> {
    let rooms = tx.query(ROOM, &[]).await?;
    tx.query("select 1 from gates order by id for no key update", &[]).await?;
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
fn decide(
    plain: &[Waiting],
    gated: &[Waiting],
    room: &mut HashMap<i64, i64>,
    slots: u32,
    may_rescue: bool,
) -> Decided {
    let mut all: Vec<&Waiting> = plain.iter().chain(gated).collect();
    all.sort_by_key(|run| run.order);
    let candidate =
        |run: &&Waiting| Candidate { run: run.run.0, gates: run.gates.clone(), rescued: run.rescued };
    let candidates: Vec<Candidate<Uuid, i64>> = all.iter().map(candidate).collect();
    let mut before = room.clone();
    let admissions = admit(&candidates, room, slots as usize, &mut usize::from(may_rescue));
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

/// When the next run that is not due yet may start.
pub(super) async fn next_start(tx: &mut Tx<'_>, now: Timestamp) -> Result<Option<Timestamp>, Fault> {
    let found = tx.query("select next_start($1) as at", &[&now]).await?;
    found.first().map_or(Ok(None), |row| get(row, "at"))
}

fn order(row: &Row) -> Result<Order, Fault> {
    Ok((get(row, "rank")?, get(row, "not_before")?, get(row, "id")?))
}

pub(super) fn claimed(row: &Row, lane: &str) -> Result<Claimed, Fault> {
    let (trigger, payload, unreadable) =
        read_given(get(row, "trigger")?, get::<&str>(row, "payload")?.as_bytes());
    Ok(Claimed {
        run: RunId(get(row, "id")?),
        epoch: get(row, "epoch")?,
        attempt: small(get(row, "attempt")?),
        max_attempts: small(get(row, "max_attempts")?),
        agent: get(row, "agent_id")?,
        schedule: get(row, "schedule_id")?,
        command: get(row, "command")?,
        trigger,
        tick_at: get(row, "tick_at")?,
        lane: lane.to_owned(),
        prompt: get(row, "prompt")?,
        payload,
        trace_id: get(row, "trace_id")?,
        unreadable,
        rescued: get::<Option<i64>>(row, "rescue")?.is_some(),
        suspect: get::<i16>(row, "suspicions")? > 0,
    })
}
