//! Overlap: which live runs a schedule's `if_running` looks at, and in which order schedules that look at the same runs
//! have their turn.

use std::collections::HashMap;

use belfry_time::Timestamp;

use crate::broken::{self, Broken};
use crate::definition::{Options, Scope};
use crate::model::{AgentId, ScheduleId, Trigger};

/// The live runs that a schedule looks at. This is the only place that says which these are; the stores have the same rule
/// as one fragment of SQL each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overlap<'a> {
    /// `overlap`.
    pub scope: Scope,
    /// Its agent.
    pub agent: AgentId,
    /// The schedule.
    pub schedule: ScheduleId,
    /// Its command.
    pub command: &'a str,
}

impl<'a> Overlap<'a> {
    /// Of a schedule with these options.
    pub fn of(options: &'a Options, agent: AgentId, schedule: ScheduleId) -> Overlap<'a> {
        Overlap { scope: options.overlap, agent, schedule, command: &options.command }
    }

    /// Whether a live run is among them. Runs of sessions are not where the scope is wider than the schedule.
    pub fn includes(&self, agent: AgentId, schedule: ScheduleId, command: &str, trigger: Trigger) -> bool {
        let is_scheduled = trigger != Trigger::Message || broken::is(Broken::ScopeCountsSessions);
        let is_scheduled = agent == self.agent && is_scheduled;
        match self.scope {
            Scope::Schedule => schedule == self.schedule,
            Scope::Command => is_scheduled && command == self.command,
            Scope::Agent => is_scheduled,
        }
    }

    /// Whether a live run is one of those that `max_pending` counts: it waits, and is no missed tick that is caught up. These
    /// wait as a whole, and take no room from the ticks that come after them.
    pub fn is_queued(is_running: bool, trigger: Trigger) -> bool {
        !is_running && trigger != Trigger::CatchUp
    }

    /// What schedules that look at the same runs have in common; none where no other schedule does.
    fn shared(&self) -> Option<(AgentId, Option<&'a str>)> {
        match self.scope {
            Scope::Schedule => None,
            Scope::Command => Some((self.agent, Some(self.command))),
            Scope::Agent => Some((self.agent, None)),
        }
    }
}

/// The order in which schedules that are due in one pass are offered, as places: those that look at the same runs by their
/// last start, the longest ago first, so that each of them has its turn. All others keep their places.
pub fn turns(due: &[(Overlap<'_>, Option<Timestamp>)]) -> Vec<usize> {
    let mut places: HashMap<_, Vec<usize>> = HashMap::new();
    for (place, (overlap, _)) in due.iter().enumerate() {
        if let Some(shared) = overlap.shared() {
            places.entry(shared).or_default().push(place);
        }
    }
    let mut order: Vec<usize> = (0..due.len()).collect();
    for places in places.values() {
        let mut turns = places.clone();
        turns.sort_by_key(|place| due[*place].1);
        for (place, turn) in places.iter().zip(turns) {
            order[*place] = turn;
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_sessions_count_for_their_schedule_alone() {
        let of = |scope| Overlap { scope, agent: 1, schedule: 10, command: "poll" };
        // Agent, schedule, command and trigger of a live run; whether it counts for schedule, command and agent.
        let table = [
            (1, 10, "poll", Trigger::Schedule, [true, true, true]),
            (1, 11, "poll", Trigger::Manual, [false, true, true]),
            (1, 11, "sync", Trigger::Webhook, [false, false, true]),
            (1, 11, "poll", Trigger::Message, [false, false, false]),
            (1, 10, "poll", Trigger::Message, [true, false, false]),
            (2, 20, "poll", Trigger::Schedule, [false, false, false]),
        ];
        for (agent, schedule, command, trigger, expected) in table {
            let counts = [Scope::Schedule, Scope::Command, Scope::Agent]
                .map(|scope| of(scope).includes(agent, schedule, command, trigger));
            assert_eq!(counts, expected, "{agent} {schedule} {command} {trigger}");
        }
    }

    #[test]
    fn schedules_of_one_scope_take_turns_and_others_keep_their_places() {
        let at = |second| Some(Timestamp::from_second(second).unwrap());
        let of = |scope, agent, schedule, command| Overlap { scope, agent, schedule, command };
        let due = [
            (of(Scope::Agent, 1, 10, "a"), at(30)),
            (of(Scope::Schedule, 1, 11, "a"), at(90)),
            (of(Scope::Agent, 1, 12, "b"), at(10)),
            (of(Scope::Agent, 2, 20, "a"), at(40)),
            (of(Scope::Command, 1, 13, "a"), at(50)),
            (of(Scope::Agent, 1, 14, "a"), None),
            (of(Scope::Command, 1, 15, "a"), at(20)),
            (of(Scope::Schedule, 1, 16, "a"), at(1)),
        ];
        assert_eq!(turns(&due), [5, 1, 2, 3, 6, 0, 4, 7]);
    }
}
