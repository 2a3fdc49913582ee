//! Ticks that wait for room in their lane: `queue_limit`.

use std::collections::BTreeSet;

use belfry_core::ScheduleId;
use belfry_core::broken::{self, Broken};
use belfry_core::gate::{self, Waiting};
use belfry_time::Timestamp;

use super::State;
use crate::shapes::*;

impl State {
    /// The lane that has no room for the runs of a plan, if it has none: as many wait there as may, or others that were
    /// deferred there have waited longer.
    pub(super) fn full_lane<'a>(&self, commit: &'a Commit) -> Option<&'a str> {
        let lane = commit.lane()?;
        let limit = self.queue_limit(lane)? as usize;
        let before = match self.deferred_in(lane).any(|(id, _)| id == commit.schedule) {
            true => 0,
            false => self.deferred_in(lane).count(),
        };
        (self.queued_in(lane) + before >= limit).then_some(lane)
    }

    pub(super) fn defer(&mut self, now: Timestamp, commit: &Commit, lane: &str) {
        self.set_token(commit.schedule, None);
        self.deferred.insert(commit.schedule, commit.deferred(lane, now));
    }

    /// Arms those that were deferred, in each lane the oldest first, as many as there is room for. Says whether there were
    /// such.
    pub(super) fn arm_deferred(&mut self) -> bool {
        let lanes: BTreeSet<String> = self.deferred.values().map(|deferred| deferred.lane.clone()).collect();
        let mut armed = false;
        if broken::is(Broken::DeferredForgotten) {
            return armed;
        }
        for lane in lanes {
            let waits =
                |id: &ScheduleId| self.schedules.get(id).is_some_and(|row| row.record.token.is_none());
            let (mut oldest, ready): (Vec<_>, Vec<_>) =
                self.deferred_in(&lane).map(|(id, it)| (id, it.clone())).partition(|(id, _)| waits(id));
            oldest.sort_by_key(|(id, deferred)| deferred.place(*id));
            let room = match self.queue_limit(&lane) {
                Some(limit) => (limit as usize).saturating_sub(self.queued_in(&lane) + ready.len()),
                None => usize::MAX,
            };
            for (id, deferred) in oldest.into_iter().take(room) {
                armed = true;
                self.arm(id, deferred);
            }
        }
        armed
    }

    /// Lets the planner take a tick that was deferred.
    pub(super) fn arm(&mut self, id: ScheduleId, deferred: Deferred) {
        self.set_token(id, Some(deferred.token()));
        self.deferred.insert(id, deferred);
    }

    fn queue_limit(&self, lane: &str) -> Option<u32> {
        let row = self.lanes.get(lane)?;
        row.set.or(row.file)?.queue_limit
    }

    /// How many runs take a place of a lane's `queue_limit`.
    pub(super) fn queued_in(&self, lane: &str) -> usize {
        let is_served =
            |needs: &[String]| needs.is_empty() || self.nodes.values().any(|node| node.serves(needs));
        let waiting = self.live.values().filter(|live| live.running.is_none());
        let waiting = waiting.map(|live| Waiting {
            lane: &live.new.lane,
            trigger: live.new.trigger,
            created_at: live.created_at,
            due_at: live.new.not_before,
            not_before: live.not_before,
            is_served: is_served(&live.new.needs),
            turn: live.new.gates.turn.map(|_| live.new.schedule),
            order: live.order(),
        });
        gate::queued_in(lane, &waiting.collect::<Vec<_>>())
    }

    fn deferred_in(&self, lane: &str) -> impl Iterator<Item = (ScheduleId, &Deferred)> {
        self.deferred.iter().map(|(id, it)| (*id, it)).filter(move |(_, it)| it.lane == lane)
    }
}
