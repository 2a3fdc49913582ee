//! Claiming: who may start, in order, within slots and gates.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use belfry_core::broken::{self, Broken};
use belfry_core::definition::Options;
use belfry_core::gate::{self, Admission, Candidate, Deal, Gate, Pass, Scopes, Standing, admit, serves};
use belfry_core::input::StoredPayload;
use belfry_core::overlap::Overlap;
use belfry_core::rescue::Rescues;
use belfry_core::{AgentId, NodeId, RunId, Trigger};
use belfry_time::Timestamp;

use super::{Live, ScheduleRow, State};
use crate::clock::Shift;
use crate::shapes::*;

/// A place in the order of starting, fixed when the run is made.
type Order = (i32, Timestamp, RunId);

impl Live {
    pub(super) fn order(&self) -> Order {
        let at = if broken::is(Broken::QueueByRetry) { self.not_before } else { self.new.not_before };
        (-i32::from(self.new.priority), at, self.new.id)
    }

    /// Lets it wait until another instant, by a clock that shows `now`. If that was set back since it was put off last, it still
    /// waits by the later clock.
    pub(super) fn put_off(&mut self, now: Timestamp, not_before: Timestamp) {
        if self.not_before != not_before {
            (self.not_before, self.put_off_at) = (not_before, Some(now.max(self.waits_since())));
        }
    }

    /// When it was said until when it waits.
    fn waits_since(&self) -> Timestamp {
        self.put_off_at.unwrap_or(self.created_at)
    }

    fn waits(&self) -> bool {
        self.running.is_none()
    }

    /// See [`Overlap::is_queued`].
    pub(super) fn is_queued(&self) -> bool {
        Overlap::is_queued(!self.waits(), self.new.trigger)
    }

    /// As gates see it.
    fn at_gates(&self, now: Timestamp) -> gate::Live<'_, Order> {
        let new = &self.new;
        gate::Live {
            order: self.order(),
            agent: new.agent,
            schedule: new.schedule,
            command: &new.command,
            is_message: new.trigger == Trigger::Message,
            gates: new.gates,
            is_running: !self.waits(),
            is_due: new.not_before <= now,
            is_ready: self.not_before <= now,
        }
    }
}

impl State {
    pub(super) fn claim(&mut self, now: Timestamp, claim: &Claim) -> Vec<Claimed> {
        if claim.only.is_none()
            && let Some(later) = self.last_claim.clock_at(claim.node, now).may_be_back(now)
        {
            self.shift_waiting(now, later);
            self.last_claim.settled(now);
        }
        // A node whose claims do not hold gets none.
        let is_fenced = |node: &Node| node.fenced && !broken::is(Broken::FencedNodeClaims);
        if self.nodes.get(&claim.node).is_none_or(is_fenced) {
            return Vec::new();
        }
        if let Some(run) = claim.only {
            return self.claim_one(now, claim, run).into_iter().collect();
        }
        let mut claimed: Vec<Claimed> = Vec::new();
        let mut rescues = claim.rescues;
        let mut deal = Deal::new(claim.lanes.iter().map(|(_, slots)| *slots), claim.total);
        while let Some((at, mut slots)) = deal.next_lane() {
            let before = claimed.len();
            let mut is_changed = false;
            loop {
                let (runs, ask_again) =
                    self.admitted(now, &claim.lanes[at].0, slots, &claim.labels, &mut rescues);
                slots -= runs.len() as u32;
                for run in runs {
                    claimed.extend(self.start(now, run, claim.node));
                }
                is_changed |= ask_again;
                if !ask_again {
                    break;
                }
            }
            deal.started((claimed.len() - before) as u32);
            // A run that started alone leaves the gates standing differently.
            if is_changed {
                deal.ask_all_again();
            }
        }
        claimed.sort_by_key(|run| claim.lanes.iter().position(|(lane, _)| *lane == run.lane));
        claimed
    }

    /// See [`crate::clock::Clock::may_be_back`].
    fn shift_waiting(&mut self, now: Timestamp, later: Timestamp) {
        let told = |live: &Live| [Some(live.created_at), live.started_at, live.put_off_at];
        let deferred = self.deferred.values().map(|deferred| deferred.since);
        let last_told = self.live.values().flat_map(told).flatten().chain(deferred).max();
        let Some(shift) = Shift::of(now, later, last_told) else { return };
        for live in self.live.values_mut() {
            if live.waits() && live.waits_since() > now && !broken::is(Broken::RunByLaterClock) {
                let not_before = shift.of_later_clock(live.not_before);
                (live.not_before, live.put_off_at) = (not_before, Some(now));
            }
            live.new.not_before = match live.created_at > now {
                true => shift.of_later_clock(live.new.not_before),
                false => shift.of_this_clock(live.new.not_before),
            };
        }
        let is_ahead =
            |deferred: &Deferred| deferred.since > now && !broken::is(Broken::DeferredByLaterClock);
        let deferred = self.deferred.iter().filter(|(_, deferred)| is_ahead(deferred));
        for (id, deferred) in deferred.map(|(id, it)| (*id, it.clone())).collect::<Vec<_>>() {
            let deferred = Deferred { since: now, ..deferred };
            match self.schedules.get(&id).is_some_and(|row| row.record.token.is_some()) {
                true => self.arm(id, deferred),
                false => drop(self.deferred.insert(id, deferred)),
            }
        }
    }

    fn claim_one(&mut self, now: Timestamp, claim: &Claim, run: RunId) -> Option<Claimed> {
        let live = self.live.get(&run)?;
        let scopes = self.scopes(&BTreeSet::from([live.new.agent]));
        let served = serves(&claim.labels, &live.new.needs);
        let ready = live.waits() && live.not_before <= now && self.has_turn(run, live);
        let all = self.all_at_gates(now);
        let own = scopes_of(&scopes, live.new.agent);
        let has_room = |(gate, pass): (Gate<'_>, Pass)| {
            pass == Pass::Beside || Standing::of(gate, self.cap(gate), &all, own).room > 0
        };
        let ready = ready && self.room_of_lane(&live.new.lane) > 0;
        if !served || !ready || !live.at_gates(now).passes(own).all(has_room) {
            return None;
        }
        self.start(now, run, claim.node)
    }

    /// Those that start in a lane, and whether the gates stand differently with the last of them.
    fn admitted(
        &self,
        now: Timestamp,
        lane: &str,
        slots: u32,
        labels: &[String],
        rescues: &mut Rescues,
    ) -> (Vec<RunId>, bool) {
        let serves = |live: &Live| live.new.lane == lane && serves(labels, &live.new.needs);
        let slots = slots.min(self.room_of_lane(lane));
        let ready = |live: &Live| live.waits() && live.not_before <= now;
        let mut waiting: Vec<(&RunId, &Live)> =
            self.live.iter().filter(|(_, live)| ready(live) && serves(live)).collect();
        waiting.retain(|(run, live)| self.has_turn(**run, live));
        if waiting.is_empty() {
            return (Vec::new(), false);
        }
        waiting.sort_by_key(|(_, live)| live.order());
        let agents: BTreeSet<AgentId> = waiting.iter().map(|(_, live)| live.new.agent).collect();
        let (scopes, all) = (self.scopes(&agents), self.all_at_gates(now));
        let mut candidates = Vec::with_capacity(waiting.len());
        let mut standings: HashMap<Gate<'_>, Standing<Order>> = HashMap::new();
        for (_, live) in &waiting {
            let own = scopes_of(&scopes, live.new.agent);
            let gates: Vec<_> = live.at_gates(now).passes(own).collect();
            for (gate, _) in &gates {
                let stands = || Standing::of(*gate, self.cap(*gate), &all, own);
                standings.entry(*gate).or_insert_with(stands);
            }
            let (rescued, suspect) = (live.rescue.is_some(), live.suspicions > 0);
            candidates.push(Candidate { order: live.order(), gates, rescued, suspect });
        }
        let admissions = admit(&candidates, &mut standings, slots as usize, rescues);
        let started =
            candidates.iter().zip(&admissions).filter(|(_, admission)| **admission == Admission::Start);
        let is_changed = started.clone().any(|(candidate, _)| candidate.is_alone());
        (started.map(|(candidate, _)| candidate.order.2).collect(), is_changed)
    }

    /// The scopes of some agents, as their schedules are now, and by the commands of their runs.
    fn scopes(&self, agents: &BTreeSet<AgentId>) -> BTreeMap<AgentId, Scopes> {
        let mut options: BTreeMap<AgentId, Vec<&Options>> = BTreeMap::new();
        let is_asked = |row: &&ScheduleRow| row.retired_at.is_none() && agents.contains(&row.record.agent);
        for row in self.schedules.values().filter(is_asked) {
            options.entry(row.record.agent).or_default().push(&row.record.definition.options);
        }
        let mut scopes: BTreeMap<AgentId, Scopes> =
            options.into_iter().map(|(agent, options)| (agent, Scopes::of(options))).collect();
        for new in self.live.values().map(|live| &live.new).filter(|new| new.trigger != Trigger::Message) {
            let row = self.schedules.get(&new.schedule).filter(|row| row.retired_at.is_none());
            if let (Some(row), Some(scopes)) = (row, scopes.get_mut(&new.agent)) {
                scopes.add(&row.record.definition.options, &new.command);
            }
        }
        scopes
    }

    fn cap(&self, gate: Gate<'_>) -> i64 {
        match gate {
            Gate::Agent(agent) => self
                .agents
                .get(&agent)
                .and_then(|agent| agent.definition.max_concurrent)
                .map_or(i64::MAX, |max| i64::from(max) + i64::from(broken::is(Broken::LimitOneTooMany))),
            _ if broken::is(Broken::TurnIgnored) => i64::MAX,
            Gate::Schedule(_) | Gate::Command(..) | Gate::WholeAgent(_) => 1,
        }
    }

    fn all_at_gates(&self, now: Timestamp) -> Vec<gate::Live<'_, Order>> {
        self.live.values().map(|live| live.at_gates(now)).collect()
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
            payload: StoredPayload::new(new.trigger, new.payload.to_string()),
            trace_id: new.trace_id,
            unreadable: None,
            rescued: live.rescue.is_some(),
            suspect: live.rescue.is_some() && live.suspicions > 0,
        })
    }
}

/// An agent without schedules has none.
fn scopes_of(scopes: &BTreeMap<AgentId, Scopes>, agent: AgentId) -> &Scopes {
    const NONE: &Scopes = &Scopes { agent: false, commands: std::collections::BTreeSet::new() };
    scopes.get(&agent).unwrap_or(NONE)
}
