//! Lists, and records as they are listed.

use belfry_core::input::with_text;
use belfry_core::{RunId, RunState};

use super::{Live, ScheduleRow, State};
use crate::sessions::session_of;
use crate::shapes::*;
use crate::views::*;

impl State {
    pub(super) fn record(&self, id: RunId, live: &Live) -> RunRecord {
        let new = &live.new;
        RunRecord {
            id,
            agent: new.agent,
            agent_name: self.agents.get(&new.agent).map_or(String::new(), |agent| agent.name.clone()),
            schedule: new.schedule,
            name: self.schedules.get(&new.schedule).map_or(String::new(), |row| row.record.name.clone()),
            command: new.command.clone(),
            trigger: new.trigger,
            tick_at: new.tick_at,
            due_at: new.not_before,
            not_before: live.not_before,
            state: if live.running.is_some() { RunState::Running } else { RunState::Pending },
            reason: None,
            lane: new.lane.clone(),
            attempt: live.attempt,
            max_attempts: new.max_attempts,
            epoch: live.epoch,
            node: live.running,
            exit_code: live.exit_code,
            error: live.error.clone(),
            summary: None,
            usage: None,
            session: session_of(new.trigger, &new.payload).map(str::to_owned),
            prompt: new.prompt.clone(),
            payload: with_text(new.trigger, new.payload.clone()),
            trace_id: new.trace_id,
            created_at: live.created_at,
            started_at: live.started_at,
            finished_at: None,
        }
    }

    /// A schedule's record with what others know of it.
    pub(super) fn full(&self, row: &ScheduleRow) -> ScheduleRecord {
        let record = &row.record;
        let live: Vec<&Live> = self.live.values().filter(|live| live.new.schedule == record.id).collect();
        let skips = self.skips.get(&record.id).into_iter().flatten();
        let ticks = [
            row.fired_at,
            record.open_skip.map(|open| open.to),
            live.iter().filter_map(|live| live.new.tick_at).max(),
            skips.max_by_key(|range| range.from).map(|range| range.to),
        ];
        let retries = live.iter().filter(|live| live.running.is_none() && live.attempt > 0);
        let running = live.iter().filter(|live| live.running.is_some()).count();
        ScheduleRecord {
            agent_name: self.agents.get(&record.agent).map_or(String::new(), |agent| agent.name.clone()),
            last_fired_at: ticks.into_iter().flatten().max(),
            running: running as u32,
            deferred: self.deferred.get(&record.id).cloned(),
            pending: (live.len() - running) as u32,
            next_retry_at: retries.map(|live| live.not_before).min(),
            budget: self.budgets.get(&record.agent).copied(),
            ..record.clone()
        }
    }

    pub(super) fn list_schedules(
        &self,
        filter: &ScheduleFilter,
        after: Option<&str>,
        limit: u32,
    ) -> Page<ScheduleRecord, String> {
        let mut items: Vec<ScheduleRecord> = self
            .schedules
            .values()
            .filter(|row| {
                row.retired_at.is_none() && after.is_none_or(|after| row.record.name.as_str() > after)
            })
            .map(|row| self.full(row))
            .filter(|record| filter.takes(record))
            .collect();
        items.sort_by(|a, b| a.name.cmp(&b.name));
        items.truncate(limit as usize);
        let is_full = items.len() == limit as usize;
        let next = items.last().filter(|_| is_full).map(|last| last.name.clone());
        Page { items, next }
    }

    pub(super) fn list_runs(
        &self,
        filter: &RunFilter,
        after: Option<RunId>,
        limit: u32,
    ) -> Page<RunRecord, RunId> {
        let wanted = |run: &RunRecord| after.is_none_or(|after| run.id < after) && filter.takes(run);
        let live = self.live.iter().map(|(run, live)| self.record(*run, live)).filter(wanted);
        let ended = self.ended.values().filter(|run| wanted(run)).cloned();
        let (live, ended) = (live.map(RunRecord::listed).collect(), ended.map(RunRecord::listed).collect());
        Page::of_runs(filter, (live, None), (ended, None), limit)
    }

    pub(super) fn list_agents(&self) -> Vec<AgentRecord> {
        let mut agents: Vec<AgentRecord> = self
            .agents
            .iter()
            .filter(|(_, agent)| agent.retired_at.is_none())
            .map(|(id, agent)| AgentRecord {
                id: *id,
                name: agent.name.clone(),
                source: agent.source.clone(),
                revision: agent.revision,
                definition: (*agent.definition).clone(),
                unreadable: None,
                budget: self.budgets.get(id).copied(),
            })
            .collect();
        agents.sort_by(|a, b| a.name.cmp(&b.name));
        agents
    }

    pub(super) fn list_breakers(&self) -> Vec<BreakerEntry> {
        let mut breakers: Vec<BreakerEntry> = self
            .breakers
            .iter()
            .filter(|(_, record)| **record != BreakerRecord::default())
            .filter_map(|((id, command), _)| {
                let agent = self.agents.get(id).filter(|agent| agent.retired_at.is_none())?;
                let breaker = self.breaker_of(*id, command).breaker;
                let command = command.clone();
                Some(BreakerEntry { agent: *id, agent_name: agent.name.clone(), command, breaker })
            })
            .collect();
        breakers.sort_by(|a, b| (&a.agent_name, &a.command).cmp(&(&b.agent_name, &b.command)));
        breakers
    }
}
