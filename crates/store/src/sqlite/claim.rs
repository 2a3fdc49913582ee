//! Claiming: who may start, in order, within slots and gates.

use std::collections::{BTreeMap, HashMap};

use belfry_core::RunId;
use belfry_core::gate::{Admission, Candidate, admit};
use belfry_time::Timestamp;
use rusqlite::params;

use super::source::from_json;
use super::unread::{counter, own_id};
use super::{Done, Verb, bytes, lossy, maybe_id, micros, node_bytes, number, run_id, text};
use crate::sessions::read_given;
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
        "id, rank, not_before, agent_gate, turn_gate, epoch, attempt, max_attempts, agent_id, schedule_id, command,
         trigger, tick_at, prompt, payload, trace_id, rescue is not null, suspicions > 0"
    };
}

/// A ready run: its place in the order, its gates, and what its claim will say. The attempt is still the one before.
struct Ready {
    queue: i64,
    place: (i64, i64, [u8; 16]),
    gates: Vec<i64>,
    claimed: Claimed,
}

impl Verb<'_> {
    pub(super) fn claim(&self, now: Timestamp, claim: &Claim) -> Done<Vec<Claimed>> {
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
        let mut claimed = Vec::new();
        let mut rescues = usize::from(claim.rescue);
        for (lane, slots) in &claim.lanes {
            let queues = self.queues(lane, &claim.labels)?;
            let mut slots = (*slots).min(self.room_of_lane(lane)?) as usize;
            // Whoever meets a full gate is parked, and makes room for the next to be looked at.
            while slots > 0 {
                let ready = self.ready(now, &queues, lane, slots)?;
                let before = claimed.len();
                let look_again = self.admit(now, claim, ready, slots, &mut rescues, &mut claimed)?;
                slots -= claimed.len() - before;
                if !look_again {
                    break;
                }
            }
        }
        Ok(claimed)
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
                " from live where id = ? and (state = 0 or state = 1 and parked_on is not null) and not_before <= ?"
            ),
            params![bytes(run), micros(now)],
            |row| ready_of(row, queue, &lane),
        )?;
        let serves = needs.iter().all(|label| claim.labels.contains(label));
        let reads = |run: &Ready| self.shared.unread.why(run.claimed.schedule).is_none();
        let Some(ready) = ready.filter(|run| serves && reads(run)) else { return Ok(Vec::new()) };
        if self.room_of_lane(&lane)? == 0 {
            return Ok(Vec::new());
        }
        for gate in &ready.gates {
            if self.room(*gate)? <= 0 {
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
        let (mut place, mut earliest) = ((i64::MIN, i64::MIN), None::<i64>);
        loop {
            let next = self.row(
                "select queue_id, rank from live where state = 0 and (queue_id, rank) > (?, ?) order by queue_id, rank limit 1",
                params![place.0, place.1],
                |row| Ok((row.get(0)?, row.get(1)?)),
            )?;
            let Some(next) = next else { break };
            place = next;
            let first = self.row(
                "select not_before from live where state = 0 and queue_id = ? and rank = ? and not_before > ? order by not_before limit 1",
                params![place.0, place.1, micros(now)],
                |row| row.get::<_, i64>(0),
            )?;
            earliest = earliest.into_iter().chain(first).min();
        }
        Ok(earliest.and_then(|micros| Timestamp::from_microsecond(micros).ok()))
    }

    /// The queues of a lane that a node with these labels can serve.
    fn queues(&self, lane: &str, labels: &[String]) -> Done<Vec<i64>> {
        let all = self.rows("select id, needs from queues where lane = ? order by id", [lane], |row| {
            Ok((row.get(0)?, text(row, 1)?))
        })?;
        let mut served = Vec::new();
        for (id, needs) in all {
            // A queue that cannot be read is served by nobody.
            let Ok(needs) = from_json::<Vec<String>>(&needs) else { continue };
            if needs.iter().all(|label| labels.contains(label)) {
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
                      where queue_id = ? and state = 0 and rescue is not null and not_before <= ?
                        and schedule_id not in (select value from json_each(?))"
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
                    " from live where queue_id = ? and state = 0 and rescue is null and not_before <= ?
                        and schedule_id not in (select value from json_each(?)) order by rank, not_before, id limit ?"
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

    /// Starts and parks ready runs in order. Says whether there may be more to look at: behind those that were parked, or
    /// among those that parking has let through.
    fn admit(
        &self,
        now: Timestamp,
        claim: &Claim,
        ready: Vec<Ready>,
        slots: usize,
        rescues: &mut usize,
        claimed: &mut Vec<Claimed>,
    ) -> Done<bool> {
        let mut free: HashMap<i64, i64> = HashMap::new();
        for gate in ready.iter().flat_map(|run| &run.gates) {
            if !free.contains_key(gate) {
                free.insert(*gate, self.room(*gate)?);
            }
        }
        let candidates: Vec<_> = ready
            .iter()
            .map(|run| Candidate { run: (), gates: run.gates.clone(), rescued: run.claimed.rescued })
            .collect();
        let reads_all = self.shared.unread.ids().is_empty();
        let mut parked = false;
        let mut left = *rescues;
        let mut free_starts: BTreeMap<i64, (i64, i64, [u8; 16])> = BTreeMap::new();
        for (run, admission) in ready.into_iter().zip(admit(&candidates, &mut free, slots, &mut left)) {
            let id = bytes(run.claimed.run);
            match admission {
                Admission::Start => {
                    *rescues -= usize::from(run.claimed.rescued);
                    if run.gates.is_empty() && !run.claimed.rescued && reads_all {
                        free_starts.insert(run.queue, run.place);
                    } else {
                        self.start_one(now, claim, &run)?;
                    }
                    let Claimed { epoch, attempt, .. } = run.claimed;
                    claimed.push(Claimed { epoch: epoch + 1, attempt: attempt + 1, ..run.claimed });
                }
                Admission::Park(gate) => {
                    parked = true;
                    self.execute("update live set state = 1, parked_on = ? where id = ?", params![gate, id])?;
                    // It was the first at its other gates, where somebody waits behind it who need not.
                    let mut let_through = 0;
                    for other in run.gates.iter().filter(|other| **other != gate) {
                        let_through += self.release(*other)?;
                    }
                    if let_through > 0 {
                        break;
                    }
                }
                Admission::Later | Admission::NoSlot => {}
            }
        }
        // Nobody is passed by in a queue without gates: those that start are all up to the last of them. `or fail` spares a
        // journal of this statement alone: a verb that fails is taken back as a whole.
        for (queue, (rank, not_before, id)) in free_starts {
            self.execute(
                "update or fail live indexed by live_ready
                 set state = 2, node_id = ?, epoch = epoch + 1, attempt = attempt + 1, started_at = ?3
                 where queue_id = ?2 and state = 0 and rescue is null and not_before <= ?3 and (rank, not_before, id) <= (?4, ?5, ?6)",
                params![node_bytes(claim.node), queue, micros(now), rank, not_before, id],
            )?;
        }
        Ok(parked)
    }

    /// How many more may run behind a gate.
    pub(super) fn room(&self, gate: i64) -> Done<i64> {
        let room = self.row(
            "select cap, (select count(*) from live where state = 2 and agent_gate = ?1)
                       + (select count(*) from live where state = 2 and turn_gate = ?1) from gates where id = ?1",
            [gate],
            |row| Ok(row.get::<_, Option<i64>>(0)?.map_or(i64::MAX, |cap| cap - row.get::<_, i64>(1).unwrap_or(0))),
        )?;
        Ok(room.unwrap_or(i64::MAX))
    }

    /// Lets runs through that wait at a gate, as many of each queue as there is room for, the first first: nodes that
    /// serve one queue do not wait for those that serve another. Gives their number.
    pub(super) fn release(&self, gate: i64) -> Done<usize> {
        if self
            .row("select 1 from live where state = 1 and parked_on = ? limit 1", [gate], |_| Ok(()))?
            .is_none()
        {
            return Ok(0);
        }
        let room = self.room(gate)?;
        if room <= 0 {
            return Ok(0);
        }
        self.execute(
            "update live set state = 0, parked_on = null where id in
               (select id from (select id, row_number() over (partition by queue_id order by rank, not_before, id) as place
                                from live where state = 1 and parked_on = ?) where place <= ?)",
            params![gate, room],
        )
    }

    /// Lets runs through at all gates that this verb has made room at.
    pub(super) fn release_freed(&self) -> Done<()> {
        for gate in self.freed.take() {
            self.release(gate)?;
        }
        Ok(())
    }
}

fn ready_of(row: &rusqlite::Row<'_>, queue: i64, lane: &str) -> rusqlite::Result<Ready> {
    let id = own_id(row, 0)?;
    let (trigger, payload, unreadable) = read_given(number(row, 11)?, row.get_ref(14)?.as_bytes()?);
    let claimed = Claimed {
        run: run_id(id),
        epoch: counter(row, 5)?,
        attempt: counter(row, 6)?,
        max_attempts: number(row, 7)?,
        agent: row.get(8)?,
        schedule: row.get(9)?,
        command: lossy(row, 10)?.unwrap_or_default(),
        trigger,
        tick_at: row.get::<_, Option<i64>>(12)?.map(unknown::instant),
        lane: lane.to_owned(),
        prompt: lossy(row, 13)?,
        payload,
        trace_id: maybe_id(row, 15)?.map(uuid::Uuid::from_bytes),
        unreadable,
        rescued: row.get(16)?,
        suspect: row.get(17)?,
    };
    let gates = [row.get::<_, Option<i64>>(3)?, row.get(4)?];
    Ok(Ready {
        queue,
        place: (row.get(1)?, row.get(2)?, id),
        gates: gates.into_iter().flatten().collect(),
        claimed,
    })
}
