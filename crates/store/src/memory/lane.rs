//! Lanes: what they may hold, and what they do.

use std::collections::BTreeMap;

use belfry_core::broken::{self, Broken};
use belfry_core::{Reason, RunId, RunState};
use belfry_time::Timestamp;

use super::State;
use crate::sessions::*;

/// What a lane may hold: by the files, and by what was said since.
#[derive(Clone, Default)]
pub(super) struct LaneRow {
    pub(super) file: Option<LaneSettings>,
    pub(super) set: Option<LaneSettings>,
}

impl State {
    pub(super) fn put_lanes(&mut self, lanes: &[(String, LaneSettings)]) {
        self.lanes.values_mut().for_each(|row| row.file = None);
        for (name, settings) in lanes {
            self.lanes.entry(name.clone()).or_default().file = Some(*settings);
        }
    }

    pub(super) fn set_lane(&mut self, lane: &str, settings: Option<LaneSettings>) {
        self.lanes.entry(lane.to_owned()).or_default().set = settings;
    }

    pub(super) fn made_lanes(&self) -> Vec<LaneRecord> {
        let made = self.lanes.iter().filter(|(_, row)| row.file.is_some() || row.set.is_some());
        made.map(|(name, row)| LaneRecord { file: row.file, set: row.set, ..LaneRecord::blank(name) })
            .collect()
    }

    pub(super) fn list_lanes(&self, now: Timestamp) -> Vec<LaneRecord> {
        let made = self.made_lanes().into_iter().map(|lane| (lane.name.clone(), lane));
        let mut lanes: BTreeMap<String, LaneRecord> = made.collect();
        for live in self.live.values() {
            let name = &live.new.lane;
            let lane = lanes.entry(name.clone()).or_insert_with(|| LaneRecord::blank(name));
            if live.running.is_some() {
                lane.active += 1;
            } else if live.not_before <= now {
                lane.pending += 1;
                lane.oldest_pending =
                    Some(lane.oldest_pending.map_or(live.not_before, |at| at.min(live.not_before)));
            }
        }
        for lane in lanes.values_mut().filter(|lane| lane.is_queue_limited()) {
            lane.queued = Some(self.queued_in(&lane.name) as u32);
        }
        lanes.into_values().collect()
    }

    pub(super) fn clear_lane(&mut self, now: Timestamp, lane: &str) -> Vec<RunId> {
        let waiting = self.live.iter().filter(|(_, live)| live.running.is_none() && live.new.lane == lane);
        let waiting: Vec<RunId> = waiting.map(|(run, _)| *run).collect();
        for run in &waiting {
            self.end_now(now, *run, RunState::Cancelled, Some(Reason::LaneCleared));
        }
        waiting
    }

    /// How many more of a lane's runs may start, over all nodes.
    pub(super) fn room_of_lane(&self, lane: &str) -> u32 {
        let settings = self.lanes.get(lane).and_then(|row| row.set.or(row.file));
        let Some(limit) = settings.and_then(|settings| settings.limit) else { return u32::MAX };
        if broken::is(Broken::LaneLimitIgnored) {
            return limit;
        }
        let running = self.live.values().filter(|live| live.running.is_some() && live.new.lane == lane);
        limit.saturating_sub(running.count() as u32)
    }
}
