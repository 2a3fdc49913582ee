//! Lanes: what they may hold, and what they do.

use std::collections::BTreeMap;

use belfry_core::{Reason, RunId, RunState};
use belfry_time::Timestamp;
use rusqlite::params;

use super::{Done, Verb, maybe_instant, maybe_number, micros, number, run_id, text};
use crate::sessions::*;

const BY_FILE: i64 = 0;
const BY_WORD: i64 = 1;

impl Verb<'_> {
    pub(super) fn put_lanes(&self, lanes: &[(String, LaneSettings)]) -> Done<()> {
        self.made_room.set(true);
        self.execute("delete from lanes where origin = ?", [BY_FILE])?;
        lanes.iter().try_for_each(|(name, settings)| self.put_lane(name, BY_FILE, settings))
    }

    pub(super) fn set_lane(&self, lane: &str, settings: Option<LaneSettings>) -> Done<()> {
        self.made_room.set(true);
        match settings {
            Some(settings) => self.put_lane(lane, BY_WORD, &settings),
            None => self
                .execute("delete from lanes where name = ? and origin = ?", params![lane, BY_WORD])
                .map(drop),
        }
    }

    fn put_lane(&self, lane: &str, origin: i64, settings: &LaneSettings) -> Done<()> {
        self.execute(
            "insert or replace into lanes (name, origin, slots, cap, queue_limit) values (?, ?, ?, ?, ?)",
            params![lane, origin, settings.slots, settings.limit, settings.queue_limit],
        )
        .map(drop)
    }

    pub(super) fn made_lanes(&self) -> Done<BTreeMap<String, LaneRecord>> {
        let mut lanes: BTreeMap<String, LaneRecord> = BTreeMap::new();
        let made = self.rows("select * from lanes", [], |row| {
            let settings = LaneSettings {
                slots: number(row, "slots")?,
                limit: maybe_number(row, "cap")?,
                queue_limit: maybe_number(row, "queue_limit")?,
            };
            Ok((text(row, "name")?, row.get::<_, i64>("origin")?, settings))
        })?;
        for (name, origin, settings) in made {
            let lane = lanes.entry(name.clone()).or_insert_with(|| LaneRecord::blank(&name));
            *(if origin == BY_FILE { &mut lane.file } else { &mut lane.set }) = Some(settings);
        }
        Ok(lanes)
    }

    pub(super) fn lane_settings(&self) -> Done<Vec<LaneRecord>> {
        let mut lanes = self.made_lanes()?;
        let sql = "select distinct lane from queues q where exists (select 1 from live l where l.queue_id = q.id and l.state = 0)";
        for name in self.rows(sql, [], |row| text(row, 0))? {
            lanes.entry(name.clone()).or_insert_with(|| LaneRecord::blank(&name));
        }
        Ok(lanes.into_values().collect())
    }

    pub(super) fn list_lanes(&self, now: Timestamp) -> Done<Vec<LaneRecord>> {
        let mut lanes = self.made_lanes()?;
        let used = self.rows(
            "select q.lane, count(*) filter (where l.state = 2) as active,
                    count(*) filter (where l.state <> 2 and l.not_before <= ?1) as pending,
                    min(l.not_before) filter (where l.state <> 2 and l.not_before <= ?1) as oldest
             from live l join queues q on q.id = l.queue_id group by q.lane",
            [micros(now)],
            |row| {
                let oldest = maybe_instant(row, "oldest")?;
                Ok((text(row, "lane")?, row.get("active")?, row.get("pending")?, oldest))
            },
        )?;
        for (name, active, pending, oldest_pending) in used {
            let lane = lanes.entry(name.clone()).or_insert_with(|| LaneRecord::blank(&name));
            (lane.active, lane.pending, lane.oldest_pending) = (active, pending, oldest_pending);
        }
        for lane in lanes.values_mut().filter(|lane| lane.is_queue_limited()) {
            lane.queued = Some(u32::try_from(self.queued_in(&lane.name)?).unwrap_or(u32::MAX));
        }
        Ok(lanes.into_values().collect())
    }

    pub(super) fn clear_lane(&self, now: Timestamp, lane: &str) -> Done<Vec<RunId>> {
        let waiting = self.rows(
            "select l.id from live l join queues q on q.id = l.queue_id where q.lane = ? and l.state <> 2 order by l.id",
            [lane],
            |row| row.get(0).map(run_id),
        )?;
        for run in &waiting {
            self.end(now, *run, RunState::Cancelled, Reason::LaneCleared)?;
        }
        Ok(waiting)
    }

    /// How many more of a lane's runs may start, over all nodes.
    pub(super) fn room_of_lane(&self, lane: &str) -> Done<u32> {
        let limit =
            self.row("select cap from lanes where name = ? order by origin desc limit 1", [lane], |row| {
                maybe_number::<u32>(row, 0)
            })?;
        let Some(limit) = limit.flatten() else { return Ok(u32::MAX) };
        let running = self.row(
            "select count(*) from live where state = 2 and queue_id in (select id from queues where lane = ?)",
            [lane],
            |row| number::<u32>(row, 0),
        )?;
        Ok(limit.saturating_sub(running.unwrap_or(0)))
    }
}
