//! Ticks that wait for room in their lane: `queue_limit`.

use belfry_core::{ScheduleId, Trigger};
use belfry_time::Timestamp;
use rusqlite::params;

use super::source::to_json;
use super::{Done, Verb, instant, micros, text};
use crate::shapes::*;

impl Verb<'_> {
    /// The lane that has no room for the runs of a plan, if it has none: as many wait there as may, or others that were
    /// deferred there have waited longer.
    pub(super) fn full_lane<'a>(&self, commit: &'a Commit) -> Done<Option<&'a str>> {
        let Some(lane) = commit.lane() else { return Ok(None) };
        let known = self.limits.borrow().get(lane).copied();
        let limit = match known {
            Some(limit) => limit,
            None => {
                let limit = self.queue_limit(lane)?;
                self.limits.borrow_mut().insert(lane.to_owned(), limit);
                limit
            }
        };
        let Some(limit) = limit else { return Ok(None) };
        let before: Option<i64> = self.row(
            "select case when exists (select 1 from deferred where lane = ?1 and schedule_id = ?2) then 0
                    else (select count(*) from deferred where lane = ?1) end",
            params![lane, commit.schedule],
            |row| row.get(0),
        )?;
        Ok((self.queued_in(lane)? + before.unwrap_or(0) >= limit).then_some(lane))
    }

    /// Keeps a tick whose token is consumed until there is room for it.
    pub(super) fn defer(&self, now: Timestamp, commit: &Commit, lane: &str) -> Done<()> {
        let Deferred { lane, tick_at, since } = commit.deferred(lane, now);
        // Where it waited in another lane, its place there is free.
        self.made_room.set(self.made_room.get() || commit.was_deferred());
        self.execute(
            "insert or replace into deferred (schedule_id, lane, tick_at, since, armed) values (?, ?, ?, ?, 0)",
            params![commit.schedule, lane, micros(tick_at), micros(since)],
        )
        .map(drop)
    }

    /// A tick that was deferred is planned, or will not be.
    pub(super) fn end_deferral(&self, id: ScheduleId) -> Done<()> {
        let ended = self.execute("delete from deferred where schedule_id = ?", [id])?;
        self.made_room.set(self.made_room.get() || ended > 0);
        Ok(())
    }

    /// Where a verb has made room, arms those that were deferred: in each lane the oldest first, as many as there is room
    /// for.
    pub(super) fn arm_deferred(&self) -> Done<()> {
        if !self.made_room.take() {
            return Ok(());
        }
        let lanes: Vec<String> =
            self.rows("select distinct lane from deferred where armed = 0", [], |row| text(row, 0))?;
        for lane in lanes {
            let room = match self.queue_limit(&lane)? {
                Some(limit) => {
                    let armed: Option<i64> = self.row(
                        "select count(*) from deferred where lane = ? and armed = 1",
                        [&lane],
                        |row| row.get(0),
                    )?;
                    (limit - self.queued_in(&lane)? - armed.unwrap_or(0)).max(0)
                }
                None => i64::MAX,
            };
            let oldest = self.rows(
                // One that has a token nevertheless, by a hand in the file, would fail the verb of somebody else.
                "select * from deferred d where lane = ? and armed = 0
                   and not exists (select 1 from timers t where t.schedule_id = d.schedule_id)
                 order by since, tick_at, schedule_id limit ?",
                params![lane, room],
                |row| Ok((row.get::<_, ScheduleId>("schedule_id")?, deferred_of(row)?)),
            )?;
            for (id, deferred) in oldest {
                self.arm(id, &deferred)?;
            }
        }
        Ok(())
    }

    /// Lets the planner take a tick that was deferred in a lane that is no longer that of its schedule.
    pub(super) fn arm_moved(&self, id: ScheduleId, lane: &str) -> Done<()> {
        let found = self.row(
            "select * from deferred where schedule_id = ? and armed = 0 and lane <> ?",
            params![id, lane],
            deferred_of,
        )?;
        found.map_or(Ok(()), |deferred| self.arm(id, &deferred))
    }

    fn arm(&self, id: ScheduleId, deferred: &Deferred) -> Done<()> {
        self.execute("update deferred set armed = 1 where schedule_id = ?", [id])?;
        self.add_token(id, deferred.token())?;
        self.armed.set(true);
        Ok(())
    }

    fn queue_limit(&self, lane: &str) -> Done<Option<i64>> {
        let limit = self.row(
            "select queue_limit from lanes where name = ? order by origin desc limit 1",
            [lane],
            |row| row.get::<_, Option<i64>>(0),
        )?;
        // No file or command sets one below zero; a row may have been changed by hand.
        Ok(limit.flatten().map(|limit| limit.max(0)))
    }

    /// How many runs take a place of a lane's `queue_limit`, as [`core::gate::queued_in`](belfry_core::gate::queued_in) says.
    pub(super) fn queued_in(&self, lane: &str) -> Done<i64> {
        let nodes = self.nodes()?;
        let is_served = |needs: &[String]| needs.is_empty() || nodes.iter().any(|node| node.serves(needs));
        let served = self.queues(None, is_served)?;
        // Each state has an index of its own, and so have turns.
        let queued = self.row(
            "with served as (select value as id from json_each(?1)),
             own as (select id from queues where lane = ?2 and id in (select id from served)),
             waiting as materialized (
               select turn_gate, rank, due_at, id, not_before, trigger, created_at
                 from live where state = 0 and queue_id in (select id from own)
               union all
               select turn_gate, rank, due_at, id, not_before, trigger, created_at
                 from live where state = 1 and queue_id in (select id from own)
               union all
               select turn_gate, rank, due_at, id, not_before, trigger, created_at
                 from live where state = 3 and queue_id in (select id from own)),
             -- Of each turn the first run that may wait for long.
             held as materialized (
               select l.turn_gate, l.rank, l.due_at, l.id, row_number() over
                   (partition by l.turn_gate order by l.rank, l.due_at, l.id) as place
               from live l where l.state <> 2 and l.turn_gate in (select turn_gate from waiting where turn_gate is not null)
                 and (l.not_before > l.due_at or (l.trigger = ?3 and l.due_at > l.created_at)
                   or l.queue_id not in (select id from served)))
             select count(*) from waiting w left join held h on h.turn_gate = w.turn_gate and h.place = 1
             where not (w.not_before > w.due_at or (w.trigger = ?3 and w.due_at > w.created_at)) and w.trigger <> ?4
               and (h.id is null or (w.rank, w.due_at, w.id) < (h.rank, h.due_at, h.id))",
            params![to_json(&served)?, lane, Trigger::Manual.code(), Trigger::Message.code()],
            |row| row.get(0),
        )?;
        Ok(queued.unwrap_or(0))
    }
}

fn deferred_of(row: &rusqlite::Row<'_>) -> rusqlite::Result<Deferred> {
    Ok(Deferred {
        lane: text(row, "lane")?,
        tick_at: instant(row, "tick_at")?,
        since: instant(row, "since")?,
    })
}
