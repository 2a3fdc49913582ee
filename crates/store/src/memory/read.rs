//! Reading, and removing what is old.

use belfry_core::{RunId, RunState, ScheduleId, Token, TokenKind};
use belfry_time::Timestamp;

use super::State;
use crate::sabotage::{Sabotage, Switch};
use crate::shapes::*;

impl State {
    pub(super) fn run(&self, run: RunId) -> Option<RunRecord> {
        self.live.get(&run).map(|live| self.record(run, live)).or_else(|| self.ended.get(&run).cloned())
    }

    pub(super) fn live_runs(&self) -> Vec<RunRecord> {
        let mut live: Vec<_> = self.live.iter().collect();
        live.sort_by_key(|(run, live)| (-i32::from(live.new.priority), live.not_before, **run));
        live.into_iter().map(|(run, live)| self.record(*run, live)).collect()
    }

    pub(super) fn ended_runs(&self, schedule: ScheduleId, limit: u32) -> Vec<RunRecord> {
        let ended = self.ended_order.iter().rev().filter_map(|run| self.ended.get(run));
        ended.filter(|run| run.schedule == schedule).take(limit as usize).cloned().collect()
    }

    pub(super) fn prune(&mut self, now: Timestamp, retention: &Retention, sabotage: &Switch) -> Pruned {
        let old = |run: &RunRecord| {
            let before =
                if run.state == RunState::Failed { retention.failures_before } else { retention.runs_before };
            run.finished_at.is_some_and(|finished| finished < before)
        };
        let batch = retention.batch as usize;
        let runs: Vec<RunId> = self
            .ended_order
            .iter()
            .filter(|run| self.ended.get(run).is_some_and(old))
            .take(batch)
            .copied()
            .collect();
        for run in &runs {
            if let Some(record) = self.ended.remove(run)
                && sabotage.is(Sabotage::PruneArms)
                && let Some(tick_at) = record.tick_at
            {
                self.set_token(
                    record.schedule,
                    Some(Token { kind: TokenKind::Tick, tick_at, due_at: tick_at }),
                );
            }
        }
        self.ended_order.retain(|run| self.ended.contains_key(run));
        let mut skips = 0;
        for ranges in self.skips.values_mut() {
            ranges.retain(|range| {
                let keep = range.to >= retention.skips_before || skips as usize >= batch;
                skips += u32::from(!keep);
                keep
            });
        }
        let before = self.keys.len();
        self.keys.retain(|_, (_, key)| key.expires_at > now);
        Pruned { runs: runs.len() as u32, skips, keys: (before - self.keys.len()) as u32 }
    }
}
