//! Claiming: who may start, in order, within slots and gates.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use belfry_core::gate::{Admission, Candidate, Deal, Pass, Standing, admit, passed_over, serves};
use belfry_core::input::StoredPayload;
use belfry_core::rescue::Rescues;
use belfry_core::{NodeId, RunId};
use belfry_time::Timestamp;
use rusqlite::params;

use super::gate::{Order, StoredGates};
use super::source::from_json;
use super::unread::{counter, own_id};
use super::{Done, Verb, bytes, lossy, maybe_id, maybe_instant, micros, node_bytes, number, run_id, text};
use crate::clock::{Clock, Shift};
use crate::sessions::read_trigger;
use crate::shapes::*;
use crate::unknown;

/// How many more runs are looked at where some are held back, because those behind them at their gates wait as well.
const HELD_BACK_MAX: usize = 1000;

/// Starts one run, also a parked one.
const START_ONE: &str = "update live set state = 2, parked_on = null, node_id = ?1, epoch = epoch + 1,
    attempt = attempt + 1, started_at = ?2,
    rescue = case when rescue is not null then (select rescues from nodes where id = ?1) end where id = ?3";

/// What is read of a ready run.
macro_rules! ready_columns {
    () => {
        "id, rank, due_at, epoch, attempt, max_attempts, agent_id, schedule_id, command, trigger, tick_at, prompt, payload,
         trace_id, rescue is not null, rescue is not null and suspicions > 0, agent_gate, turn_gate, command_gate, whole_gate, alone_gate"
    };
}

/// Where there may be more to claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Next {
    /// Nowhere.
    Nothing,
    /// In the same lane: behind those that were parked, or among those that parking has let through.
    ThisLane,
    /// In any lane: a run has started alone.
    AllLanes,
}

/// A ready run: its place in the order, its gates, and what its claim will say. The attempt is still the one before.
struct Ready {
    queue: i64,
    place: Order,
    gates: StoredGates,
    claimed: Claimed,
}

impl Verb<'_> {
    pub(super) fn claim(&self, now: Timestamp, claim: &Claim) -> Done<Vec<Claimed>> {
        if claim.only.is_none() {
            self.look_at_clock(claim.node, now)?;
        }
        // A node whose claims do not hold gets none.
        if self
            .row("select 1 from nodes where id = ? and not fenced", [node_bytes(claim.node)], |_| Ok(()))?
            .is_none()
        {
            return Ok(Vec::new());
        }
        if let Some(run) = claim.only {
            return self.claim_one(now, claim, run);
        }
        self.execute("update live set state = 0 where state = 3 and not_before <= ?", [micros(now)])?;
        let mut claimed: Vec<Claimed> = Vec::new();
        let mut rescues = claim.rescues;
        let mut deal = Deal::new(claim.lanes.iter().map(|(_, slots)| *slots), claim.total);
        while let Some((at, slots)) = deal.next_lane() {
            let lane = &claim.lanes[at].0;
            let before = claimed.len();
            let mut is_changed = false;
            let queues = self.queues(Some(lane), |needs| serves(&claim.labels, needs))?;
            let most = before + slots.min(self.room_of_lane(lane)?) as usize;
            // A run that a gate holds is parked, and makes room for the next to be looked at.
            while claimed.len() < most {
                let free = most - claimed.len();
                let ready = self.ready(now, &queues, lane, free)?;
                if self.release_passed_over(now, &queues, &ready, free)? > 0 {
                    continue;
                }
                let next = self.admit(now, claim, ready, free, &mut rescues, &mut claimed)?;
                is_changed |= next == Next::AllLanes;
                if next == Next::Nothing {
                    break;
                }
            }
            deal.started((claimed.len() - before) as u32);
            // A run that started alone leaves the gates standing differently.
            if is_changed {
                deal.ask_all_again();
            }
        }
        claimed.sort_by_key(|run| claim.lanes.iter().position(|(lane, _)| *lane == run.lane));
        Ok(claimed)
    }

    /// Lets nothing wait for a clock that was set back.
    fn look_at_clock(&self, node: NodeId, now: Timestamp) -> Done<()> {
        let clock = self.shared.last_claim.clock_at(node, now);
        if let Some(later) = clock.may_be_back(now) {
            let last_told = self.row(
                "select max(at) as at from (
                     select max(created_at, coalesce(started_at, created_at), coalesce(put_off_at, created_at)) as at from live
                     union all select since from deferred)",
                [],
                |row| maybe_instant(row, "at"),
            )?;
            if let Some(shift) = Shift::of(now, later, last_told.flatten()) {
                let Shift { now, latest } = shift;
                let asked = [micros(now), micros(latest), micros(shift.due())];
                self.made_room.set(true);
                self.execute(
                    "update live set due_at = case when created_at > ?1 then max(?3, due_at - (?2 - ?1)) else ?3 end
                     where due_at >= ?1 and (created_at > ?1 or due_at <= ?2)",
                    asked,
                )?;
                self.execute(
                    "update live set not_before = max(?3, not_before - (?2 - ?1)), put_off_at = ?1 where state <> 2
                       and coalesce(put_off_at, created_at) > ?1 and not_before >= ?1",
                    asked,
                )?;
                let armed = self.execute(
                    "update timers set due_at = ?1, version = random()
                     where due_at > ?1 and schedule_id in (select schedule_id from deferred where armed = 1)",
                    [micros(now)],
                )?;
                self.armed.set(self.armed.get() || armed > 0);
                self.execute("update deferred set since = ?1 where since > ?1", [micros(now)])?;
            }
        }
        if clock == Clock::Back {
            self.execute(
                "update live set state = 0, parked_on = null where state = 1 and parked_on is not null",
                [],
            )?;
        }
        Ok(())
    }

    /// Starts one run, also one that is parked, if its gates have room.
    fn claim_one(&self, now: Timestamp, claim: &Claim, run: RunId) -> Done<Vec<Claimed>> {
        let place = self.row(
            "select q.id, q.lane, q.needs from live l join queues q on q.id = l.queue_id where l.id = ?",
            [bytes(run)],
            |row| Ok((row.get::<_, i64>(0)?, text(row, 1)?, text(row, 2)?)),
        )?;
        let Some((queue, lane, needs)) = place else { return Ok(Vec::new()) };
        let needs: Vec<String> = from_json(&needs)?;
        let ready = self.row(
            concat!(
                "select ",
                ready_columns!(),
                " from live where id = ? and (state in (0, 3) or state = 1 and parked_on is not null) and not_before <= ?"
            ),
            params![bytes(run), micros(now)],
            |row| ready_of(row, queue, &lane),
        )?;
        let is_served = serves(&claim.labels, &needs);
        let reads = |run: &Ready| self.shared.unread.why(run.claimed.schedule).is_none();
        let Some(ready) = ready.filter(|run| is_served && reads(run)) else { return Ok(Vec::new()) };
        if self.room_of_lane(&lane)? == 0 {
            return Ok(Vec::new());
        }
        for (gate, pass) in ready.gates.passes() {
            if pass != Pass::Beside && self.room(gate)? <= 0 {
                return Ok(Vec::new());
            }
        }
        self.start_one(now, claim, &ready)?;
        let Claimed { epoch, attempt, .. } = ready.claimed;
        Ok(vec![Claimed { epoch: epoch + 1, attempt: attempt + 1, ..ready.claimed }])
    }

    fn start_one(&self, now: Timestamp, claim: &Claim, run: &Ready) -> Done<()> {
        let node = node_bytes(claim.node);
        if run.claimed.rescued {
            self.execute("update nodes set rescues = rescues + 1 where id = ?", [node])?;
        }
        self.execute(START_ONE, params![node, micros(now), bytes(run.claimed.run)]).map(drop)
    }

    /// When the next run that is not due yet may start. Queue by queue and rank by rank, so that those that are due are not
    /// walked over.
    pub(super) fn next_start(&self, now: Timestamp) -> Done<Option<Timestamp>> {
        let mut earliest = self.row(
            "select not_before from live where state = 3 and not_before > ? order by not_before limit 1",
            [micros(now)],
            |row| row.get::<_, i64>(0),
        )?;
        let mut place = (i64::MIN, i64::MIN);
        loop {
            let next = self.row(
                "select queue_id, rank from live where state = 0 and (queue_id, rank) > (?, ?) order by queue_id, rank limit 1",
                params![place.0, place.1],
                |row| Ok((row.get(0)?, row.get(1)?)),
            )?;
            let Some(next) = next else { break };
            place = next;
            let first = self.row(
                "select due_at from live where state = 0 and queue_id = ? and rank = ? and due_at > ? order by due_at limit 1",
                params![place.0, place.1, micros(now)],
                |row| row.get::<_, i64>(0),
            )?;
            earliest = earliest.into_iter().chain(first).min();
        }
        Ok(earliest.and_then(|micros| Timestamp::from_microsecond(micros).ok()))
    }

    /// The queues of a lane whose labels suit.
    pub(super) fn queues(&self, lane: Option<&str>, suits: impl Fn(&[String]) -> bool) -> Done<Vec<i64>> {
        let sql = "select id, needs from queues where ?1 is null or lane = ?1 order by id";
        let all = self.rows(sql, [lane], |row| Ok((row.get(0)?, text(row, 1)?)))?;
        let mut served = Vec::new();
        for (id, needs) in all {
            // A queue that cannot be read is served by nobody.
            let Ok(needs) = from_json::<Vec<String>>(&needs) else { continue };
            if suits(&needs) {
                served.push(id);
            }
        }
        Ok(served)
    }

    /// The first ready runs of some queues and all that are rescued, in order.
    fn ready(&self, now: Timestamp, queues: &[i64], lane: &str, limit: usize) -> Done<Vec<Ready>> {
        let unread = self.unread_ids()?;
        let mut rescued = Vec::new();
        for queue in queues {
            rescued.extend(self.rows(
                concat!(
                    "select ",
                    ready_columns!(),
                    " from live indexed by live_rescued
                      where queue_id = ?1 and state = 0 and rescue is not null and due_at <= ?2 and not_before <= ?2
                        and schedule_id not in (select value from json_each(?3))"
                ),
                params![queue, micros(now), unread],
                |row| ready_of(row, *queue, lane),
            )?);
        }
        let limit = if rescued.is_empty() { limit } else { limit + HELD_BACK_MAX };
        let mut ready = Vec::new();
        for queue in queues {
            ready.extend(self.rows(
                concat!(
                    "select ",
                    ready_columns!(),
                    " from live where queue_id = ?1 and state = 0 and rescue is null and due_at <= ?2 and not_before <= ?2
                        and schedule_id not in (select value from json_each(?3)) order by rank, due_at, id limit ?4"
                ),
                params![queue, micros(now), unread, limit as i64],
                |row| ready_of(row, *queue, lane),
            )?);
        }
        ready.sort_by_key(|run| run.place);
        ready.truncate(limit);
        if !rescued.is_empty() {
            ready.append(&mut rescued);
            ready.sort_by_key(|run| run.place);
        }
        Ok(ready)
    }

    /// Lets parked runs through that are to be looked at before any of these starts at their limits, and gives their number.
    /// Behind the last of these nobody starts if there may be more.
    fn release_passed_over(
        &self,
        now: Timestamp,
        queues: &[i64],
        ready: &[Ready],
        limit: usize,
    ) -> Done<usize> {
        let end = ready.last().map(|run| run.place).filter(|_| ready.len() >= limit);
        let mut gates: BTreeSet<i64> = ready.iter().filter_map(|run| run.gates.agent).collect();
        // The place may have been given to a run that this version cannot read, and that keeps it.
        if !self.shared.unread.ids().is_empty() {
            gates.extend(self.rows(
                "select distinct agent_gate from live where state = 0 and agent_gate is not null
                   and schedule_id in (select value from json_each(?))",
                [self.unread_ids()?],
                |row| row.get::<_, i64>(0),
            )?);
        }
        let mut released = 0;
        for gate in gates {
            if !self.has_parked(gate)? {
                continue;
            }
            let room = self.room(gate)?;
            let mut parked = Vec::new();
            for queue in queues.iter().filter(|_| room > 0) {
                parked.extend(self.rows(
                    "select rank, due_at, id from live where state = 1 and parked_on = ?1 and queue_id = ?2
                       and due_at <= ?3 and not_before <= ?3 and schedule_id not in (select value from json_each(?4))
                     order by rank, due_at, id limit ?5",
                    params![gate, queue, micros(now), self.unread_ids()?, room],
                    |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
                )?);
            }
            let at_gate = ready.iter().filter(|run| run.gates.agent == Some(gate));
            let places: Vec<Order> = at_gate.map(|run| run.place).collect();
            for place in passed_over(room, &places, &parked) {
                if end.is_none_or(|end| place < end) {
                    let sql = "update live set state = 0, parked_on = null where id = ?";
                    released += self.execute(sql, [place.2])?;
                }
            }
        }
        Ok(released)
    }

    /// Starts and parks ready runs in order, and says where there may be more to look at.
    fn admit(
        &self,
        now: Timestamp,
        claim: &Claim,
        ready: Vec<Ready>,
        slots: usize,
        rescues: &mut Rescues,
        claimed: &mut Vec<Claimed>,
    ) -> Done<Next> {
        let candidates: Vec<_> = ready
            .iter()
            .map(|run| Candidate {
                order: run.place,
                gates: run.gates.passes(),
                rescued: run.claimed.rescued,
                suspect: run.claimed.suspect,
            })
            .collect();
        let mut standings: HashMap<i64, Standing<Order>> = HashMap::new();
        for (gate, pass) in candidates.iter().flat_map(|candidate| &candidate.gates) {
            if !standings.contains_key(gate) {
                standings.insert(*gate, self.standing(now, *gate, *pass)?);
            }
        }
        let reads_all = self.shared.unread.ids().is_empty();
        let mut next = Next::Nothing;
        let mut left = *rescues;
        let mut free_starts: BTreeMap<i64, Order> = BTreeMap::new();
        for (run, admission) in ready.into_iter().zip(admit(&candidates, &mut standings, slots, &mut left)) {
            let id = bytes(run.claimed.run);
            match admission {
                Admission::Start => {
                    if run.claimed.rescued {
                        *rescues = Rescues::None;
                    }
                    if !run.gates.is_gated() && !run.claimed.rescued && reads_all {
                        free_starts.insert(run.queue, run.place);
                    } else {
                        self.start_one(now, claim, &run)?;
                    }
                    // Those that waited behind it in its scope may go on, unless another run waits there to be alone.
                    if let Some(gate) = run.gates.alone {
                        self.release(gate)?;
                        next = Next::AllLanes;
                    }
                    let Claimed { epoch, attempt, .. } = run.claimed;
                    claimed.push(Claimed { epoch: epoch + 1, attempt: attempt + 1, ..run.claimed });
                }
                Admission::Park(gate) => {
                    next = next.max(Next::ThisLane);
                    self.execute("update live set state = 1, parked_on = ? where id = ?", params![gate, id])?;
                    // It was the first at its limit, where somebody waits behind it who need not.
                    let limit = run.gates.agent.filter(|limit| *limit != gate);
                    if limit.map_or(Ok(0), |limit| self.release(limit))? > 0 {
                        break;
                    }
                }
                Admission::Later | Admission::NoSlot => {}
            }
        }
        // Nobody is passed by in a queue without gates: those that start are all up to the last of them. `or fail` spares a
        // journal of this statement alone: a verb that fails is taken back as a whole.
        for (queue, (rank, due_at, id)) in free_starts {
            self.execute(
                "update or fail live indexed by live_ready
                 set state = 2, node_id = ?, epoch = epoch + 1, attempt = attempt + 1, started_at = ?3
                 where queue_id = ?2 and state = 0 and rescue is null and due_at <= ?3 and not_before <= ?3
                   and (rank, due_at, id) <= (?4, ?5, ?6)",
                params![node_bytes(claim.node), queue, micros(now), rank, due_at, id],
            )?;
        }
        Ok(next)
    }
}

fn ready_of(row: &rusqlite::Row<'_>, queue: i64, lane: &str) -> rusqlite::Result<Ready> {
    let id = own_id(row, 0)?;
    let (trigger, unreadable) = read_trigger(number(row, 9)?);
    let claimed = Claimed {
        run: run_id(id),
        epoch: counter(row, 3)?,
        attempt: counter(row, 4)?,
        max_attempts: number(row, 5)?,
        agent: row.get(6)?,
        schedule: row.get(7)?,
        command: lossy(row, 8)?.unwrap_or_default(),
        trigger,
        tick_at: row.get::<_, Option<i64>>(10)?.map(unknown::instant),
        lane: lane.to_owned(),
        prompt: lossy(row, 11)?,
        payload: StoredPayload::new(trigger, row.get_ref(12)?.as_bytes()?),
        trace_id: maybe_id(row, 13)?.map(uuid::Uuid::from_bytes),
        unreadable,
        rescued: row.get(14)?,
        suspect: row.get(15)?,
    };
    Ok(Ready { queue, place: (row.get(1)?, row.get(2)?, id), gates: StoredGates::read(row, 16)?, claimed })
}
