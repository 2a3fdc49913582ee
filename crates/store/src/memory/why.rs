//! What became of ticks, and what schedules were.

use belfry_core::edit::REVISIONS_KEPT;
use belfry_core::{ScheduleDefinition, ScheduleId, SkipRange};
use belfry_time::Timestamp;

use super::State;
use crate::shapes::RunRecord;
use crate::views::*;

impl State {
    pub(super) fn list_skips(&self, id: ScheduleId, after: Option<Timestamp>, limit: u32) -> Vec<SkipRange> {
        let of_lives = self.lives(id).into_iter().rev().filter_map(|id| self.skips.get(&id));
        let mut skips: Vec<SkipRange> = of_lives.flatten().copied().collect();
        skips.sort_by_key(|range| range.from);
        skips.retain(|range| after.is_none_or(|after| range.from > after));
        skips.truncate(limit as usize);
        skips
    }

    /// The schedule, and those of its name that were removed before it was made, the last first.
    fn lives(&self, id: ScheduleId) -> Vec<ScheduleId> {
        let Some(own) = self.schedules.get(&id) else { return vec![id] };
        let earlier = self.schedules.range(..id).rev().filter(|(_, row)| row.record.name == own.record.name);
        std::iter::once(id).chain(earlier.map(|(id, _)| *id)).collect()
    }

    pub(super) fn tick(&self, id: ScheduleId, tick_at: Timestamp) -> TickFate {
        if let Some(fate) = self.lives(id).into_iter().find_map(|id| self.result(id, tick_at)) {
            return fate;
        }
        let Some((found, _, compiled)) = self.found(id) else { return TickFate::Unknown };
        TickFate::of_state(&found, &compiled, tick_at)
    }

    /// The run or the complete range of a tick.
    fn result(&self, id: ScheduleId, tick_at: Timestamp) -> Option<TickFate> {
        let live =
            self.live.iter().find(|(_, live)| live.new.schedule == id && live.new.tick_at == Some(tick_at));
        let live = live.map(|(run, live)| self.record(*run, live));
        // A tick that was filled in later may have several: the last one made.
        let is_of_tick = |run: &&RunRecord| run.schedule == id && run.tick_at == Some(tick_at);
        let ended = || self.ended.values().rfind(is_of_tick).cloned();
        if let Some(run) = live.or_else(ended) {
            return Some(TickFate::Run(Box::new(run)));
        }
        let holds = |range: &&SkipRange| range.from <= tick_at && tick_at <= range.to;
        let skips = self.skips.get(&id).into_iter().flatten().filter(holds);
        skips.max_by_key(|range| range.from).map(|range| TickFate::Skipped(*range))
    }

    pub(super) fn add_revision(&mut self, now: Timestamp, id: ScheduleId) {
        let Some(row) = self.schedules.get(&id) else { return };
        let revision = (row.record.revision, now, row.record.definition.clone());
        let kept = self.revisions.entry(id).or_default();
        kept.push(revision);
        kept.drain(..kept.len().saturating_sub(REVISIONS_KEPT as usize));
    }

    pub(super) fn revision_at(&self, id: ScheduleId, at: Timestamp) -> Option<(i64, ScheduleDefinition)> {
        let revisions = self.revisions.get(&id)?.iter().rev();
        let found = revisions.into_iter().find(|(_, from, _)| *from <= at)?;
        Some((found.0, found.2.clone()))
    }
}
