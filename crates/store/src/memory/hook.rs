//! Requests from outside.

use belfry_core::check::Admitted;
use belfry_core::{Facts, Reason, RunId};
use belfry_time::Timestamp;

use super::{Memory, State};
use crate::hook::{Knock, Knocked};
use crate::shapes::*;
use crate::storable::storable;
use crate::store::{Answer, Hooks, wakes};

impl Hooks for Memory {
    async fn knock(&self, now: Timestamp, knock: &Knock) -> Answer<Knocked> {
        self.state.lock().last_claim.shown(now);
        let knocked = self.change(|state| state.knock(now, &storable(knock)));
        self.hint.after(Ok(knocked), wakes::knock)
    }
}

impl State {
    fn knock(&mut self, now: Timestamp, knock: &Knock) -> Knocked {
        let run = &knock.run;
        let Some(row) = self.schedules.get(&run.schedule).filter(|row| row.retired_at.is_none()) else {
            return Knocked::NotFound;
        };
        let status = row.record.status.clone();
        if let Some(answer) = self.repeat(now, knock) {
            return answer;
        }
        let scope: Vec<(RunId, bool)> =
            self.in_scope(knock.overlap()).map(|(run, live)| (run, live.is_queued())).collect();
        let definition =
            self.agents.get(&run.agent).map(|agent| agent.definition.clone()).unwrap_or_default();
        let breaker = self.breaker_of(run.agent, &run.command).breaker;
        let used = self.budgets.get(&run.agent).copied();
        let queued = scope.iter().map(|(_, is_queued)| *is_queued);
        let facts = Facts::of(&definition, queued, breaker, used, now);
        let Admitted { probe, cancel_live } = match knock.admit(&status, &facts) {
            Ok(admitted) => admitted,
            Err(reason) => return Knocked::Refused(reason),
        };
        let cancelled: Vec<RunId> = scope.into_iter().filter(|_| cancel_live).map(|(run, _)| run).collect();
        for run in &cancelled {
            self.cancel(now, *run, Reason::Overlap);
        }
        let request = Enqueue { run: NewRun { probe, ..run.clone() }, key: None };
        match self.enqueue(now, &request) {
            Enqueued::Made => {
                for key in knock.signed.iter().chain(&knock.keys) {
                    self.keys.insert((run.schedule, key.key.clone()), (run.id, key.clone()));
                }
            }
            Enqueued::Repeat(first) | Enqueued::KeyReused(first) => return Knocked::Repeat(first),
            Enqueued::NotFound => return Knocked::NotFound,
        }
        if probe {
            let breaker = self.breaker_of(run.agent, &run.command).breaker;
            self.put_breaker(run.agent, &run.command, breaker.probing(run.id, now));
        }
        Knocked::Made { cancelled }
    }

    /// The answer to a request whose signed content or key is known.
    fn repeat(&mut self, now: Timestamp, knock: &Knock) -> Option<Knocked> {
        let schedule = knock.run.schedule;
        let first_with = |key: &Key| {
            let (first, kept) = self.keys.get(&(schedule, key.key.clone()))?;
            (kept.expires_at > now).then_some((*first, kept.body_hash == key.body_hash))
        };
        if let Some((first, _)) = knock.signed.as_ref().and_then(first_with) {
            return Some(Knocked::Repeat(first));
        }
        let (first, is_same) = knock.keys.iter().find_map(first_with)?;
        if !is_same {
            return Some(Knocked::KeyReused(first));
        }
        if let Some(signed) = &knock.signed {
            self.keys.insert((schedule, signed.key.clone()), (first, signed.clone()));
        }
        Some(Knocked::Repeat(first))
    }
}
