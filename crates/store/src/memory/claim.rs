//! Claiming: who may start, in order, within slots and gates.

use std::collections::HashMap;

use belfry_core::definition::Scope;
use belfry_core::gate::{Admission, Candidate, admit};
use belfry_core::{AgentId, NodeId, RunId, ScheduleId};
use belfry_time::Timestamp;

use super::{Live, State};
use crate::sessions::given;
use crate::shapes::*;

/// A gate, by what it limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Gate<'a> {
    Agent(AgentId),
    Schedule(ScheduleId),
    Command(AgentId, &'a str),
    AgentTurn(AgentId),
}

impl Live {
    fn gates(&self) -> Vec<Gate<'_>> {
        let new = &self.new;
        let turn = new.gates.turn.map(|scope| match scope {
            Scope::Schedule => Gate::Schedule(new.schedule),
            Scope::Command => Gate::Command(new.agent, &new.command),
            Scope::Agent => Gate::AgentTurn(new.agent),
        });
        new.gates.agent.then_some(Gate::Agent(new.agent)).into_iter().chain(turn).collect()
    }
}

impl State {
    pub(super) fn claim(&mut self, now: Timestamp, claim: &Claim) -> Vec<Claimed> {
        // A node whose claims do not hold gets none.
        if self.nodes.get(&claim.node).is_none_or(|node| node.fenced) {
            return Vec::new();
        }
        if let Some(run) = claim.only {
            return self.claim_one(now, claim, run).into_iter().collect();
        }
        let mut claimed = Vec::new();
        let mut rescues = usize::from(claim.rescue);
        for (lane, slots) in &claim.lanes {
            for run in self.admitted(now, lane, *slots, &claim.labels, &mut rescues) {
                claimed.extend(self.start(now, run, claim.node));
            }
        }
        claimed
    }

    fn claim_one(&mut self, now: Timestamp, claim: &Claim, run: RunId) -> Option<Claimed> {
        let live = self.live.get(&run)?;
        let served = live.new.needs.iter().all(|label| claim.labels.contains(label));
        let ready = live.running.is_none() && live.not_before <= now && self.has_turn(run, live);
        let has_room = |gate: &Gate<'_>| self.running_behind(*gate) < self.cap(*gate);
        let ready = ready && self.room_of_lane(&live.new.lane) > 0;
        if !served || !ready || !live.gates().iter().all(has_room) {
            return None;
        }
        self.start(now, run, claim.node)
    }

    fn admitted(
        &self,
        now: Timestamp,
        lane: &str,
        slots: u32,
        labels: &[String],
        rescues: &mut usize,
    ) -> Vec<RunId> {
        let serves =
            |live: &Live| live.new.lane == lane && live.new.needs.iter().all(|label| labels.contains(label));
        let slots = slots.min(self.room_of_lane(lane));
        let ready = |live: &Live| live.running.is_none() && live.not_before <= now;
        let mut waiting: Vec<(&RunId, &Live)> =
            self.live.iter().filter(|(_, live)| ready(live) && serves(live)).collect();
        waiting.retain(|(run, live)| self.has_turn(**run, live));
        waiting.sort_by_key(|(run, live)| (-i32::from(live.new.priority), live.not_before, **run));
        let candidates: Vec<_> = waiting
            .iter()
            .map(|(run, live)| Candidate { run: **run, gates: live.gates(), rescued: live.rescue.is_some() })
            .collect();
        let mut free: HashMap<Gate<'_>, i64> = HashMap::new();
        for gate in candidates.iter().flat_map(|candidate| &candidate.gates) {
            free.entry(*gate).or_insert_with(|| self.cap(*gate) - self.running_behind(*gate));
        }
        let admissions = admit(&candidates, &mut free, slots as usize, rescues);
        candidates
            .iter()
            .zip(admissions)
            .filter(|(_, admission)| *admission == Admission::Start)
            .map(|(candidate, _)| candidate.run)
            .collect()
    }

    fn cap(&self, gate: Gate<'_>) -> i64 {
        match gate {
            Gate::Agent(agent) => self
                .agents
                .get(&agent)
                .and_then(|agent| agent.definition.max_concurrent)
                .map_or(i64::MAX, i64::from),
            Gate::Schedule(_) | Gate::Command(..) | Gate::AgentTurn(_) => 1,
        }
    }

    fn running_behind(&self, gate: Gate<'_>) -> i64 {
        self.live.values().filter(|live| live.running.is_some() && live.gates().contains(&gate)).count()
            as i64
    }

    fn start(&mut self, now: Timestamp, run: RunId, node: NodeId) -> Option<Claimed> {
        let number = self.number();
        let live = self.live.get_mut(&run)?;
        live.rescue = live.rescue.map(|_| number);
        live.running = Some(node);
        live.attempt += 1;
        live.epoch += 1;
        live.started_at = Some(now);
        let new = &live.new;
        Some(Claimed {
            run,
            epoch: live.epoch,
            attempt: live.attempt,
            max_attempts: new.max_attempts,
            agent: new.agent,
            schedule: new.schedule,
            command: new.command.clone(),
            trigger: new.trigger,
            tick_at: new.tick_at,
            lane: new.lane.clone(),
            prompt: new.prompt.clone(),
            payload: given(new.trigger, new.payload.clone()),
            trace_id: new.trace_id,
            unreadable: None,
            rescued: live.rescue.is_some(),
            suspect: live.suspicions > 0,
        })
    }
}
