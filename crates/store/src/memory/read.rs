//! Reading, and removing what is old.

use std::ops::Bound;

use belfry_core::{AgentId, RunId, RunState, ScheduleId, Token, TokenKind};
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
        live.sort_by_key(|(_, live)| live.order());
        live.into_iter().map(|(run, live)| self.record(*run, live).listed()).collect()
    }

    pub(super) fn ended_runs(&self, schedule: ScheduleId, limit: u32) -> Vec<RunRecord> {
        let own = self.ended_order.iter().rev().filter(|(of, _)| *of == schedule);
        own.filter_map(|(_, run)| self.ended.get(run)).take(limit as usize).cloned().collect()
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
            .map(|(_, run)| *run)
            .filter(|run| self.ended.get(run).is_some_and(old))
            .take(batch)
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
        let (over, next) = self.prune_by_number(retention);
        if !runs.is_empty() || over > 0 {
            self.ended_order.retain(|(_, run)| self.ended.contains_key(run));
        }
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
        let keys = (before - self.keys.len()) as u32;
        let output = self.forget_output() + self.prune_output(retention);
        let sessions = self.prune_sessions(retention);
        let retired = self.prune_retired(retention);
        Pruned { runs: runs.len() as u32 + over, skips, keys, output, sessions, retired, next }
    }

    /// Removes retired schedules that nothing kept belongs to, then retired agents without schedules.
    fn prune_retired(&mut self, retention: &Retention) -> u32 {
        let is_old =
            |retired_at: Option<Timestamp>| retired_at.is_some_and(|at| at < retention.retired_before);
        let batch = retention.batch as usize;
        let is_needed = |id: ScheduleId| {
            self.live.values().any(|live| live.new.schedule == id)
                || self.ended.values().any(|run| run.schedule == id)
                || self.skips.get(&id).is_some_and(|ranges| !ranges.is_empty())
                || self.sessions.values().any(|session| session.schedule == id)
        };
        let schedules = self.schedules.iter().filter(|(id, row)| is_old(row.retired_at) && !is_needed(**id));
        let schedules: Vec<ScheduleId> = schedules.map(|(id, _)| *id).take(batch).collect();
        for id in &schedules {
            self.schedules.remove(id);
            self.revisions.remove(id);
            self.skips.remove(id);
        }
        let has_schedules = |id: AgentId| self.schedules.values().any(|row| row.record.agent == id);
        let agents =
            self.agents.iter().filter(|(id, agent)| is_old(agent.retired_at) && !has_schedules(**id));
        let agents: Vec<AgentId> = agents.map(|(id, _)| *id).take(batch).collect();
        for id in &agents {
            self.agents.remove(id);
            self.budgets.remove(id);
        }
        self.breakers.retain(|(agent, _), _| !agents.contains(agent));
        (schedules.len() + agents.len()) as u32
    }

    fn prune_by_number(&mut self, retention: &Retention) -> (u32, Option<RunId>) {
        let Some(keep) = retention.runs_per_schedule else { return (0, None) };
        let after = retention.after.map_or(Bound::Unbounded, Bound::Excluded);
        let walked: Vec<&RunRecord> = self
            .ended
            .range((after, Bound::Unbounded))
            .take(retention.batch as usize)
            .map(|(_, run)| run)
            .collect();
        let is_over = |run: &RunRecord| {
            let ended = self.schedules.get(&run.schedule).map_or([0, 0], |row| row.ended);
            let ended = ended[usize::from(run.state != RunState::Failed)];
            self.places.get(&run.id).is_some_and(|place| *place <= ended - i64::from(keep))
        };
        let over: Vec<RunId> = walked.iter().filter(|run| is_over(run)).map(|run| run.id).collect();
        let next = walked.last().filter(|_| walked.len() == retention.batch as usize).map(|run| run.id);
        self.ended.retain(|run, _| !over.contains(run));
        (over.len() as u32, next)
    }

    /// Removes the output of runs that are no longer known.
    fn forget_output(&mut self) -> u32 {
        let before = self.output.len();
        let State { output, live, ended, .. } = self;
        output.retain(|(run, _), _| live.contains_key(run) || ended.contains_key(run));
        (before - output.len()) as u32
    }

    fn prune_output(&mut self, retention: &Retention) -> u32 {
        let bound = RunId(Retention::first_id(retention.output_before));
        let old = self.output.range(..(bound, 0)).map(|(place, _)| *place);
        let old = old.filter(|(run, _)| !self.live.contains_key(run)).take(retention.batch as usize);
        let old: Vec<(RunId, u64)> = old.collect();
        self.output.retain(|place, _| !old.contains(place));
        old.len() as u32
    }
}
