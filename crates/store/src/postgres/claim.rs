//! Claiming: who may start, in order, within slots and gates.
//!
//! Runs without gates are taken with `skip locked`, in one round trip. Runs behind gates are decided on by whoever holds
//! the gates' locks: lock first, count in the next statement, start or park, commit. Nobody waits for a gate here; one
//! that is busy is asked again a little later.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use belfry_core::RunId;
use belfry_core::gate::{Admission, Candidate, Deal, Pass, Standing, admit, passed_over};
use belfry_core::input::StoredPayload;
use belfry_core::rescue::Rescues;
use belfry_time::Timestamp;
use tokio_postgres::Row;
use uuid::Uuid;

use super::Postgres;
use super::connection::{Fault, Param, Tx};
use super::defer::look_again;
use super::lane::{Room, room};
use super::rows::{get, small};
use crate::Error;
use crate::clock::{Clock, Shift};
use crate::sabotage::Sabotage;
use crate::sessions::read_trigger;
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

/// A place in the order of starting: rank, due_at, id.
type Order = (i32, Timestamp, Uuid);

/// A run that waits.
struct Waiting {
    order: Order,
    run: RunId,
    gates: Vec<(i64, Pass)>,
    rescued: bool,
    suspect: bool,
}

impl Waiting {
    /// The gate of the scope that it wants for itself.
    fn alone(&self) -> Option<i64> {
        self.gates.iter().find(|(_, pass)| *pass == Pass::Alone).map(|(gate, _)| *gate)
    }

    /// Its limit.
    fn limit(&self) -> Option<i64> {
        self.gates.iter().find(|(_, pass)| *pass == Pass::Limit).map(|(gate, _)| *gate)
    }
}

/// A lane under the locks of its gates.
#[derive(Default)]
struct Counted {
    /// Who waits without gates, if that was asked for.
    free: Vec<Waiting>,
    /// Who waits behind gates.
    waiting: Vec<Waiting>,
    /// How the gates stand that we hold.
    standings: HashMap<i64, Standing<Order>>,
    /// The first that are parked at limits with room, by gate.
    parked: HashMap<i64, Vec<Order>>,
}

impl Counted {
    /// Parked runs that are to be looked at before anybody starts. Beyond a full window nobody starts.
    fn passed_over(&self, is_full_window: bool) -> Vec<Uuid> {
        let end = self.waiting.iter().map(|run| run.order).max().filter(|_| is_full_window);
        let mut found = Vec::new();
        for (gate, parked) in &self.parked {
            let room = self.standings.get(gate).map_or(0, |standing| standing.room);
            let at_gate = self.waiting.iter().filter(|run| run.limit() == Some(*gate));
            let ready: Vec<Order> = at_gate.map(|run| run.order).collect();
            let before = |order: &Order| end.is_none_or(|end| *order < end);
            found.extend(passed_over(room, &ready, parked).into_iter().filter(before).map(|(.., run)| run));
        }
        found
    }
}

/// What one transaction claimed.
struct Taken {
    claimed: Vec<Claimed>,
    /// A gate was somebody else's while slots were left.
    busy: bool,
    /// A run has started alone, which leaves the gates standing differently.
    is_changed: bool,
    /// Runs whose rows somebody else holds.
    passed: Vec<Uuid>,
}

impl Taken {
    /// Which rescued run may still start, if these were allowed before.
    fn rescues(&self, before: Rescues) -> Rescues {
        match self.claimed.iter().any(|run| run.rescued) {
            true => Rescues::None,
            false => before,
        }
    }
}

/// Starts the runs in `$3`, but for those whose rows somebody else holds.
/// `state + 0` keeps the planner from going through all that are ready instead of to those that are named.
const START: &str = "update live set state = 2, node_id = $1, attempt = attempt + 1, epoch = epoch + 1, started_at = $2, \
    rescue = case when rescue is not null then nextval('numbers') end \
    where id = any(array(select id from live where id = any($3) and state + 0 = 0 for update skip locked)) \
    and state + 0 = 0 returning id, rank, due_at, epoch, attempt, max_attempts, agent_id, \
    schedule_id, command, trigger, tick_at, prompt, payload, trace_id, rescue, suspicions";

/// Starts who comes before all that wait behind gates, and names the lanes where slots are left for these. For a node that can
/// read all schedules.
const START_FREE: &str = "select id, rank, due_at, epoch, attempt, max_attempts, agent_id, schedule_id, command, \
    trigger, tick_at, prompt, payload, trace_id, null::bigint as rescue, 0::smallint as suspicions, place \
    from claim_free($1, $2, $3, $4, $5, $6, $7)";

/// Who waits in a lane, after locking gates, and the room of these.
const CANDIDATES: &str = "select id, rank, due_at, agent_gate, turn_gate, command_gate, whole_gate, alone_gate, room, rescued, \
    suspect, parked from candidates($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)";

/// The room of gates: cap less running; and who is the first there.
const ROOM: &str = "select g.id as gate, room_at(g) as room, f.* from gates g cross join lateral first_at(g, $1, '{}') f where kind < 4";

/// Un-parks what limits among the gates in `$1` have room for. Who asks holds their locks.
const UNPARK_LIMITS: &str =
    "select unpark(array(select g.id from gates g where g.id = any($1) and g.kind = 0))";

/// Un-parks the runs in `$1`, but for those whose rows somebody else holds.
const RELEASE: &str = "update live set state = 0, parked_on = null where state + 0 = 1 \
    and id = any(array(select id from live where id = any($1) and state + 0 = 1 for update skip locked))";

/// Un-parks, for each queue, as many runs as each gate in `$1` has room for by `$2`.
const RELEASE_ROOM: &str = "update live set state = 0, parked_on = null where state + 0 = 1 and id = any(array( \
    select w.id from unnest($1::bigint[], $2::bigint[]) as f (gate, room) \
    cross join (select id from queues where gated) q cross join lateral ( \
        select p.id from live p where p.state = 1 and p.parked_on = f.gate and p.queue_id = q.id \
        order by p.rank, p.due_at, p.id limit f.room for update skip locked \
    ) w))";

/// See [`Shift`]. Says whether a timer is due now that was not.
async fn shift(tx: &mut Tx<'_>, now: Timestamp, later: Timestamp) -> Result<bool, Fault> {
    let sql = "select greatest((select max(greatest(created_at, started_at, put_off_at)) from live), (select max(since) from deferred)) as at";
    let rows = tx.query(sql, &[]).await?;
    let last_told = rows.first().map_or(Ok(None), |row| get(row, "at"))?;
    let Some(shift) = Shift::of(now, later, last_told) else { return Ok(false) };
    let Shift { now, latest } = shift;
    look_again(tx).await?;
    let sql = "update timers set due_at = $1, version = nextval('numbers') \
               where due_at > $1 and schedule_id in (select schedule_id from deferred where armed)";
    let armed = tx.execute(sql, &[&now]).await?;
    tx.execute("update deferred set since = $1 where since > $1", &[&now]).await?;
    let sql = "update live set due_at = case when created_at > $1 then greatest($3, due_at - ($2 - $1)) else $3 end \
               where due_at >= $1 and (created_at > $1 or due_at <= $2)";
    tx.execute(sql, &[&now, &latest, &shift.due()]).await?;
    let sql = "update live set not_before = greatest($3, not_before - ($2 - $1)), put_off_at = $1 where state + 0 <> 2 \
               and coalesce(put_off_at, created_at) > $1 and not_before >= $1";
    tx.execute(sql, &[&now, &latest, &shift.due()]).await?;
    Ok(armed > 0)
}

impl Postgres {
    /// Claims, and asks again while a gate with free slots for it is somebody else's.
    pub(super) async fn claim_until_settled(&self, now: Timestamp, claim: &Claim) -> Answer<Vec<Claimed>> {
        let lanes_in_order = &claim.lanes;
        let clock = self.last_claim.clock_at(claim.node, now);
        if let Some(later) = clock.may_be_back(now) {
            let shifted = transact!(self, Work, |tx| shift(&mut tx, now, later).await);
            self.hint(shifted, |is_armed| *is_armed)?;
        }
        if clock == Clock::Back {
            let sql = "update live set state = 0, parked_on = null where state = 1 and parked_on is not null";
            transact!(self, Work, |tx| tx.execute(sql, &[]).await)?;
        }
        self.last_claim.settled(now);
        // Where gates were in the way the last time they will be again, and one question is enough.
        let is_limited =
            claim.total < claim.lanes.iter().fold(0, |all, (_, slots)| slots.saturating_add(all));
        let unread = self.unread.ids();
        let asks_gates = is_limited || !unread.is_empty() || self.gates_in_the_way.load(Ordering::Relaxed);
        let (mut claimed, lanes) = match asks_gates {
            true => (Vec::new(), claim.lanes.clone()),
            false => transact!(self, Work, |tx| claim_free(&mut tx, now, claim).await)?,
        };
        self.gates_in_the_way.store(false, Ordering::Relaxed);
        let mut claim = Claim { lanes, ..claim.clone() };
        let mut passed = HashSet::new();
        for tries in 0..BUSY_MAX {
            if claim.total == 0 || claim.lanes.iter().all(|(_, slots)| *slots == 0) {
                break;
            }
            let taken = match transact!(self, Work, |tx| self.claim_in(&mut tx, now, &claim, &passed).await) {
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
                claim.total = claim.total.saturating_sub(1);
            }
            claim.rescues = taken.rescues(claim.rescues);
            claimed.extend(taken.claimed);
            let is_passed = !taken.passed.is_empty();
            passed.extend(taken.passed);
            if !taken.busy && !is_passed {
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

    async fn claim_in(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        claim: &Claim,
        passed: &HashSet<Uuid>,
    ) -> Result<Taken, Fault> {
        let mut taken = Taken { claimed: Vec::new(), busy: false, is_changed: false, passed: Vec::new() };
        let mut gates = HashSet::new();
        let mut deal = Deal::new(claim.lanes.iter().map(|(_, slots)| *slots), claim.total);
        while let Some((at, slots)) = deal.next_lane() {
            let rescues = taken.rescues(claim.rescues);
            let (name, is_last) = (claim.lanes[at].0.as_str(), deal.is_last());
            let mut lane = Lane { name, now, claim, slots, rescues, is_last, held: &mut gates, passed };
            let before = taken.claimed.len();
            taken.is_changed = false;
            self.claim_lane(tx, &mut lane, &mut taken).await?;
            deal.started((taken.claimed.len() - before) as u32);
            // A run that started alone leaves the gates standing differently.
            if taken.is_changed {
                deal.ask_all_again();
            }
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
            let Some(counted) = self.lock_and_count(tx, lane, window, plain.is_none()).await? else {
                taken.busy = true;
                return Ok(());
            };
            let full_window = counted.waiting.len() as i64 >= window;
            let passed_over = counted.passed_over(full_window);
            let Counted { free, mut waiting, mut standings, .. } = counted;
            forget_gone_gates(tx, &mut waiting, &standings).await?;
            let free = plain.get_or_insert(free);
            if !passed_over.is_empty() {
                tx.execute(RELEASE, &[&passed_over]).await?;
                continue;
            }
            let slots = lane.slots as usize;
            if waiting.first().is_some_and(|first| {
                free.len() < slots || free.last().is_none_or(|last| first.order < last.order)
            }) {
                self.gates_in_the_way.store(true, Ordering::Relaxed);
            }
            let decided = decide(free, &waiting, &mut standings, lane.slots, lane.rescues);
            // Whoever parks the rest hides from the others that they have counted too early.
            if !decided.parks.is_empty() && !self.sabotage.is(Sabotage::CountBeforeLock) {
                parked_any = true;
                taken.passed.extend(park(tx, &decided.parks).await?);
                // Who was parked at one gate has made place at another: those who wait there have their say before anybody
                // starts. Twice as many each time, for what finds no room is only parked again.
                let (gates, places): (Vec<i64>, Vec<i64>) =
                    decided.left_open.iter().map(|(gate, places)| (*gate, places << round)).unzip();
                let released =
                    if gates.is_empty() { 0 } else { tx.execute(RELEASE_ROOM, &[&gates, &places]).await? };
                // Beyond a full window nobody comes before one that starts alone.
                let may_others_come = released > 0 || full_window && decided.alone.is_none();
                if may_others_come && round + 1 < ROUNDS_MAX {
                    window = WINDOW.max(2 * i64::from(lane.slots));
                    continue;
                }
            }
            starts = decided.starts;
            busy = decided.busy && starts.len() < lane.slots as usize;
            let Some(gate) = decided.alone else { break };
            // Those that waited behind it in its scope may go on, unless another run waits there to be alone.
            lane.start(tx, &starts, false, taken).await?;
            tx.query(super::finish::UNPARK, &[&[gate].as_slice()]).await?;
            lane.slots = lane.slots.saturating_sub(starts.len() as u32);
            lane.rescues = taken.rescues(lane.rescues);
            taken.is_changed = true;
            (plain, starts, busy) = (None, Vec::new(), false);
            if lane.slots == 0 {
                break;
            }
        }
        taken.busy |= busy;
        let commit = lane.is_last && !parked_any && !taken.is_changed && !tx.has_made_room();
        lane.start(tx, &starts, commit, taken).await?;
        if parked_any {
            // Of what was parked at limits, as much as there is room for after all that.
            let held: Vec<i64> = lane.held.iter().copied().collect();
            tx.query(UNPARK_LIMITS, &[&held]).await?;
        }
        Ok(())
    }

    /// Locks the gates of candidates, those that nobody else holds, and counts behind them in the next statement. `None`
    /// while the node is being fenced.
    async fn lock_and_count(
        &self,
        tx: &mut Tx<'_>,
        lane: &mut Lane<'_>,
        window: i64,
        with_plain: bool,
    ) -> Result<Option<Counted>, Fault> {
        let early = match self.sabotage.is(Sabotage::CountBeforeLock) {
            true => Some(count_all_and_lock(tx, lane.now).await?),
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
            &lane.rescues.reserve(false),
            &lane.rescues.reserve(true),
            &self.unread.ids(),
        ];
        let found = tx.query(CANDIDATES, params).await?;
        let (mut counted, mut seen) = (Counted::default(), HashSet::new());
        for row in &found {
            let agent: Option<i64> = get(row, "agent_gate")?;
            if let (Some(room), Some(gate)) = (get(row, "room")?, agent) {
                lane.held.insert(gate);
                counted.standings.insert(gate, Standing { room, first: first(row)? });
                continue;
            }
            let Some(run) = get::<Option<Uuid>>(row, "id")? else { return Ok(None) };
            if let (true, Some(gate)) = (get(row, "parked")?, agent) {
                counted.parked.entry(gate).or_default().push(order(row)?);
                continue;
            }
            // Those that were asked for besides may be among the first as well.
            if lane.passed.contains(&run) || !seen.insert(run) {
                continue;
            }
            let gates = passes(row)?;
            let list = if gates.is_empty() { &mut counted.free } else { &mut counted.waiting };
            let (rescued, suspect) = (get(row, "rescued")?, get(row, "suspect")?);
            list.push(Waiting { order: order(row)?, run: RunId(run), gates, rescued, suspect });
        }
        if let Some(standings) = early {
            counted.standings = standings;
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
    /// Which rescued run may start here.
    rescues: Rescues,
    /// None follows in this transaction.
    is_last: bool,
    /// Gates whose locks we hold, for whatever lane.
    held: &'a mut HashSet<i64>,
    /// Runs that are not looked at, because somebody else holds their rows.
    passed: &'a HashSet<Uuid>,
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
        let mut missing: HashSet<Uuid> = runs.iter().copied().collect();
        for row in &started {
            missing.remove(&get(row, "id")?);
        }
        taken.passed.extend(missing);
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
            &[
                &now,
                &claim.node.0,
                &lanes,
                &slots,
                &claim.labels,
                &claim.rescues.reserve(false),
                &claim.rescues.reserve(true),
            ],
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

/// Takes gates that are not there away from runs that wait behind them: somebody has changed the store by hand. A gate that is
/// there and not ours is held by somebody else.
async fn forget_gone_gates(
    tx: &mut Tx<'_>,
    waiting: &mut [Waiting],
    standings: &HashMap<i64, Standing<Order>>,
) -> Result<(), Fault> {
    let is_ours = |gate: &i64| standings.contains_key(gate);
    let gates = waiting.iter().flat_map(|run| run.gates.iter().map(|(gate, _)| *gate));
    let not_ours: Vec<i64> = gates.filter(|gate| !is_ours(gate)).collect();
    if not_ours.is_empty() {
        return Ok(());
    }
    let found = tx.query("select id from gates where id = any($1)", &[&not_ours]).await?;
    let there: HashSet<i64> = found.iter().map(|row| get(row, "id")).collect::<Result<_, Fault>>()?;
    for run in waiting {
        run.gates.retain(|(gate, _)| is_ours(gate) || there.contains(gate));
    }
    Ok(())
}

/// Counts behind all gates, and only then locks them: only for a store that is broken on purpose.
async fn count_all_and_lock(tx: &mut Tx<'_>, now: Timestamp) -> Result<HashMap<i64, Standing<Order>>, Fault> {
    let rooms = tx.query(ROOM, &[&now]).await?;
    tx.query("select 1 from gates order by id for no key update", &[]).await?;
    let standing =
        |row: &Row| Ok((get(row, "gate")?, Standing { room: get(row, "room")?, first: first(row)? }));
    rooms.iter().map(standing).collect()
}

/// What a round came to.
#[derive(Default)]
struct Decided {
    starts: Vec<Uuid>,
    /// The last of these starts alone in the scope of this gate, and nothing is decided about those after it.
    alone: Option<i64>,
    /// Which run waits behind which gate.
    parks: Vec<(Uuid, i64)>,
    /// Places at limits that had room for somebody who is parked elsewhere, or for whom nobody came.
    left_open: HashMap<i64, i64>,
    /// Somebody waits for a gate that is not ours.
    busy: bool,
}

/// Admits in the merged order of runs with and without gates.
fn decide(
    plain: &[Waiting],
    gated: &[Waiting],
    standings: &mut HashMap<i64, Standing<Order>>,
    slots: u32,
    mut rescues: Rescues,
) -> Decided {
    let mut all: Vec<&Waiting> = plain.iter().chain(gated).collect();
    all.sort_by_key(|run| run.order);
    let candidate = |run: &&Waiting| Candidate {
        order: run.order,
        gates: run.gates.clone(),
        rescued: run.rescued,
        suspect: run.suspect,
    };
    let candidates: Vec<Candidate<i64, Order>> = all.iter().map(candidate).collect();
    let limits: HashSet<i64> = all.iter().filter_map(|run| run.limit()).collect();
    let room = |standings: &HashMap<i64, Standing<Order>>| -> HashMap<i64, i64> {
        let of_limit = standings.iter().filter(|(gate, _)| limits.contains(gate));
        of_limit.map(|(gate, standing)| (*gate, standing.room)).collect()
    };
    let mut before = room(standings);
    let admissions = admit(&candidates, standings, slots as usize, &mut rescues);
    let left = room(standings).into_iter().filter(|(_, room)| *room > 0);
    let mut decided = Decided { left_open: left.collect(), ..Decided::default() };
    for (run, admission) in all.iter().zip(admissions) {
        let ours = run.gates.iter().all(|(gate, _)| standings.contains_key(gate));
        match admission {
            Admission::Start => {
                decided.starts.push(run.run.0);
                if let Some(limit) = run.limit() {
                    before.entry(limit).and_modify(|room| *room -= 1);
                }
                if run.alone().is_some() {
                    decided.alone = run.alone();
                    break;
                }
            }
            // Parking it makes place at its limit, which only the holder of that lock can give to another.
            Admission::Park(gate) if ours => {
                decided.parks.push((run.run.0, gate));
                let has_room = |limit: &i64| before.get(limit).is_some_and(|room| *room > 0);
                if let Some(limit) = run.limit().filter(has_room) {
                    *decided.left_open.entry(limit).or_default() += 1;
                }
            }
            Admission::Park(_) | Admission::Later => decided.busy |= !ours,
            Admission::NoSlot => {}
        }
    }
    decided
}

/// Parks runs at gates, and gives those that it could not, because somebody else holds their rows.
async fn park(tx: &mut Tx<'_>, parks: &[(Uuid, i64)]) -> Result<Vec<Uuid>, Fault> {
    let (mut runs, gates): (Vec<Uuid>, Vec<i64>) = parks.iter().copied().unzip();
    let sql = "update live set state = 1, parked_on = ($2::bigint[])[array_position($1::uuid[], id)] \
               where id = any(array(select id from live where id = any($1) and state + 0 = 0 for update skip locked)) \
               and state + 0 = 0 returning id";
    let mut parked = HashSet::new();
    for row in tx.query(sql, &[&runs, &gates]).await? {
        parked.insert(get::<Uuid>(&row, "id")?);
    }
    runs.retain(|run| !parked.contains(run));
    Ok(runs)
}

/// When the next run that is not due yet may start.
pub(super) async fn next_start(tx: &mut Tx<'_>, now: Timestamp) -> Result<Option<Timestamp>, Fault> {
    let found = tx.query("select next_start($1) as at", &[&now]).await?;
    found.first().map_or(Ok(None), |row| get(row, "at"))
}

fn order(row: &Row) -> Result<Order, Fault> {
    Ok((get(row, "rank")?, get(row, "due_at")?, get(row, "id")?))
}

/// Who waits at a gate before all others, if anybody does.
fn first(row: &Row) -> Result<Option<Order>, Fault> {
    get::<Option<Uuid>>(row, "id")?.map(|_| order(row)).transpose()
}

/// The gates of a run, with what they are to it.
pub(super) fn passes(row: &Row) -> Result<Vec<(i64, Pass)>, Fault> {
    let gate = |name| get::<Option<i64>>(row, name);
    let alone = gate("alone_gate")?;
    let scope = |gate| (gate, if alone == Some(gate) { Pass::Alone } else { Pass::Beside });
    let limit = gate("agent_gate")?.map(|gate| (gate, Pass::Limit));
    let turn = gate("turn_gate")?.map(|gate| (gate, Pass::Turn));
    let scopes = [gate("command_gate")?.map(scope), gate("whole_gate")?.map(scope)];
    Ok([limit, turn].into_iter().chain(scopes).flatten().collect())
}

pub(super) fn claimed(row: &Row, lane: &str) -> Result<Claimed, Fault> {
    let (trigger, unreadable) = read_trigger(get(row, "trigger")?);
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
        payload: StoredPayload::new(trigger, get::<&str>(row, "payload")?),
        trace_id: get(row, "trace_id")?,
        unreadable,
        rescued: get::<Option<i64>>(row, "rescue")?.is_some(),
        // What has come back otherwise since is a suspect no longer.
        suspect: get::<Option<i64>>(row, "rescue")?.is_some() && get::<i16>(row, "suspicions")? > 0,
    })
}
