//! Lanes: what they may hold, and what they do.

use std::collections::BTreeMap;

use belfry_core::{Reason, RunId};
use belfry_time::Timestamp;
use uuid::Uuid;

use super::Postgres;
use super::connection::{Fault, Tx};
use super::defer::look_again;
use super::rows::{get, small};
use crate::sessions::*;

const BY_FILE: i16 = 0;
const BY_WORD: i16 = 1;
/// Runs that are ended in one transaction where a lane is cleared.
const CLEARED_AT_ONCE: i64 = 500;

/// The room of a lane that has a limit on what runs, for whoever gets the lock of its gate; counted in the next statement.
/// The lock is also for lanes with a limit on what waits: who starts some of these makes room there.
pub(super) enum Room {
    /// It has no limit.
    Unlimited,
    /// So many more may start.
    Left(u32),
    /// Somebody else is at it.
    Busy,
}

pub(super) async fn room(tx: &mut Tx<'_>, lane: &str) -> Result<Room, Fault> {
    let sql = "select id from gates where kind = 4 and key = 0 and command = $1 \
               and coalesce(cap, queue_limit) is not null";
    if tx.query(sql, &[&lane]).await?.is_empty() {
        return Ok(Room::Unlimited);
    }
    let sql =
        "select id from gates where kind = 4 and key = 0 and command = $1 for no key update skip locked";
    if tx.query(sql, &[&lane]).await?.is_empty() {
        return Ok(Room::Busy);
    }
    let sql = "select case when cap is not null then \
               cap - (select count(*) from live where state = 2 and lane = $1) end as room, \
               queue_limit is not null as is_queued from gates where kind = 4 and key = 0 and command = $1";
    let found = tx.query(sql, &[&lane]).await?;
    if found.first().map_or(Ok(false), |row| get(row, "is_queued"))? {
        tx.makes_room(lane);
    }
    Ok(match found.first().map(|row| get::<Option<i64>>(row, "room")).transpose()?.flatten() {
        None => Room::Unlimited,
        Some(room) => Room::Left(small(room.max(0))),
    })
}

pub(super) async fn put_lanes(tx: &mut Tx<'_>, lanes: &[(String, LaneSettings)]) -> Result<(), Fault> {
    tx.query("select pg_advisory_xact_lock(7400, 1)", &[]).await?;
    tx.execute("delete from lanes where origin = $1", &[&BY_FILE]).await?;
    for (name, settings) in lanes {
        put_lane(tx, name, BY_FILE, settings).await?;
    }
    set_caps(tx).await
}

pub(super) async fn set_lane(
    tx: &mut Tx<'_>,
    lane: &str,
    settings: Option<LaneSettings>,
) -> Result<(), Fault> {
    tx.query("select pg_advisory_xact_lock(7400, 1)", &[]).await?;
    tx.execute("delete from lanes where name = $1 and origin = $2", &[&lane, &BY_WORD]).await?;
    if let Some(settings) = settings {
        put_lane(tx, lane, BY_WORD, &settings).await?;
    }
    set_caps(tx).await
}

async fn put_lane(tx: &mut Tx<'_>, lane: &str, origin: i16, settings: &LaneSettings) -> Result<(), Fault> {
    let sql = "insert into lanes (name, origin, slots, cap, queue_limit) values ($1, $2, $3, $4, $5) \
               on conflict (name, origin) do update set slots = excluded.slots, cap = excluded.cap, \
               queue_limit = excluded.queue_limit";
    let (slots, cap) = (i64::from(settings.slots), settings.limit.map(i64::from));
    tx.execute(sql, &[&lane, &origin, &slots, &cap, &settings.queue_limit.map(i64::from)]).await?;
    Ok(())
}

/// Makes the gates of lanes what the lanes say. Where more may wait than before, those that were deferred are armed.
async fn set_caps(tx: &mut Tx<'_>) -> Result<(), Fault> {
    tx.query("select 1 from gates where kind = 4 order by id for no key update", &[]).await?;
    let sql = "insert into gates (kind, key, command, cap, queue_limit) \
               select 4, 0, w.name, w.cap, w.queue_limit \
               from (select distinct on (name) name, cap, queue_limit from lanes order by name, origin desc) w \
               where coalesce(w.cap, w.queue_limit) is not null order by w.name \
               on conflict (kind, key, command) do update set cap = excluded.cap, queue_limit = excluded.queue_limit \
               where (gates.cap, gates.queue_limit) is distinct from (excluded.cap, excluded.queue_limit)";
    tx.execute(sql, &[]).await?;
    let sql = "update gates set cap = null, queue_limit = null \
               where kind = 4 and coalesce(cap, queue_limit) is not null and command not in \
               (select w.name from (select distinct on (name) name, cap, queue_limit from lanes order by name, origin desc) w \
                where coalesce(w.cap, w.queue_limit) is not null)";
    tx.execute(sql, &[]).await?;
    look_again(tx).await
}

async fn made_lanes(tx: &mut Tx<'_>) -> Result<BTreeMap<String, LaneRecord>, Fault> {
    let mut lanes: BTreeMap<String, LaneRecord> = BTreeMap::new();
    for row in tx.query("select * from lanes", &[]).await? {
        let settings = LaneSettings {
            slots: small(get(&row, "slots")?),
            limit: get::<Option<i64>>(&row, "cap")?.map(small),
            queue_limit: get::<Option<i64>>(&row, "queue_limit")?.map(small),
        };
        let name: &str = get(&row, "name")?;
        let lane = lanes.entry(name.to_owned()).or_insert_with(|| LaneRecord::blank(name));
        *(if get::<i16>(&row, "origin")? == BY_FILE { &mut lane.file } else { &mut lane.set }) =
            Some(settings);
    }
    Ok(lanes)
}

pub(super) async fn lane_settings(tx: &mut Tx<'_>) -> Result<Vec<LaneRecord>, Fault> {
    let mut lanes = made_lanes(tx).await?;
    let sql = "select distinct lane from queues q \
               where exists (select 1 from live l where l.queue_id = q.id and l.state = 0)";
    for row in tx.query(sql, &[]).await? {
        let name: &str = get(&row, "lane")?;
        lanes.entry(name.to_owned()).or_insert_with(|| LaneRecord::blank(name));
    }
    Ok(lanes.into_values().collect())
}

pub(super) async fn lanes(tx: &mut Tx<'_>, now: Timestamp) -> Result<Vec<LaneRecord>, Fault> {
    let mut lanes = made_lanes(tx).await?;
    let sql = "select lane, count(*) filter (where state = 2) as active, \
                   count(*) filter (where state <> 2 and not_before <= $1) as pending, \
                   min(not_before) filter (where state <> 2 and not_before <= $1) as oldest from live group by lane";
    for row in tx.query(sql, &[&now]).await? {
        let name: &str = get(&row, "lane")?;
        let lane = lanes.entry(name.to_owned()).or_insert_with(|| LaneRecord::blank(name));
        (lane.active, lane.pending) = (small(get(&row, "active")?), small(get(&row, "pending")?));
        lane.oldest_pending = get(&row, "oldest")?;
    }
    for lane in lanes.values_mut().filter(|lane| lane.is_queue_limited()) {
        let rows = tx.query("select queued_in($1) as queued", &[&lane.name]).await?;
        lane.queued = rows.first().map(|row| get(row, "queued").map(small)).transpose()?;
    }
    Ok(lanes.into_values().collect())
}

/// The largest id of the runs that wait in a lane.
pub(super) async fn last_waiting(tx: &mut Tx<'_>, lane: &str) -> Result<Option<Uuid>, Fault> {
    let sql = "select id from live where lane = $1 and state <> 2 order by id desc limit 1";
    tx.query(sql, &[&lane]).await?.first().map(|row| get(row, "id")).transpose()
}

impl Postgres {
    /// Ends some of the runs that wait in a lane, with an id behind `after` and up to `last`. Gives those that have
    /// ended, and the id to go on behind; none where none is left. A run that starts meanwhile is left alone.
    pub(super) async fn clear_some(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        lane: &str,
        (after, last): (Uuid, Uuid),
    ) -> Result<(Vec<RunId>, Option<Uuid>), Fault> {
        let sql = "select id from live where lane = $1 and state <> 2 and id > $2 and id <= $3 order by id limit $4";
        let found = tx.query(sql, &[&lane, &after, &last, &CLEARED_AT_ONCE]).await?;
        let runs: Vec<Uuid> = found.iter().map(|row| get(row, "id")).collect::<Result<_, Fault>>()?;
        let ended = self.end_waiting(tx, now, &runs, Reason::LaneCleared).await?;
        Ok((ended, runs.last().copied()))
    }
}
