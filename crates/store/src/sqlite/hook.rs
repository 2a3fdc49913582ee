//! Requests from outside.

use belfry_core::check::Admitted;
use belfry_core::{Facts, Reason, RunId};
use belfry_time::Timestamp;

use super::{Done, Sqlite, Verb};
use crate::hook::{Knock, Knocked};
use crate::shapes::*;
use crate::storable::storable;
use crate::store::{Answer, Hooks, wakes};

impl Hooks for Sqlite {
    async fn knock(&self, now: Timestamp, knock: &Knock) -> Answer<Knocked> {
        let knock = storable(knock).into_owned();
        let answer = self.write(move |verb| verb.knock(now, &knock)).await;
        self.shared.last_claim.shown(now);
        self.shared.hint.after(answer, wakes::knock)
    }
}

impl Verb<'_> {
    fn knock(&self, now: Timestamp, knock: &Knock) -> Done<Knocked> {
        let run = &knock.run;
        let (Some((status, _)), Some(definition)) =
            (self.status(run.schedule)?, self.agent_definition(run.agent)?)
        else {
            return Ok(Knocked::NotFound);
        };
        if let Some(answer) = self.repeat(now, knock)? {
            return Ok(answer);
        }
        let scope = self.runs_in_scope(knock.overlap())?;
        let breaker = self.breaker_of(run.agent, &run.command)?;
        let used = self.budget_of(run.agent)?;
        let queued = scope.iter().map(|(_, is_queued)| *is_queued);
        let facts = Facts::of(&definition, queued, breaker, used, now);
        let Admitted { probe, cancel_live } = match knock.admit(&status, &facts) {
            Ok(admitted) => admitted,
            Err(reason) => return Ok(Knocked::Refused(reason)),
        };
        let cancelled: Vec<RunId> = scope.into_iter().filter(|_| cancel_live).map(|(run, _)| run).collect();
        for run in &cancelled {
            self.cancel(now, *run, Reason::Overlap)?;
        }
        let request = Enqueue { run: NewRun { probe, ..run.clone() }, key: None };
        match self.enqueue(now, &request)? {
            Enqueued::Made => {
                for key in knock.signed.iter().chain(&knock.keys) {
                    self.take_key(run.schedule, key, run.id)?;
                }
            }
            Enqueued::Repeat(first) | Enqueued::KeyReused(first) => return Ok(Knocked::Repeat(first)),
            Enqueued::NotFound => return Ok(Knocked::NotFound),
        }
        if probe {
            let (next, transition) = self.breaker_of(run.agent, &run.command)?.probing(run.id, now);
            self.put_breaker(run.agent, &run.command, &next, transition)?;
        }
        Ok(Knocked::Made { cancelled })
    }

    /// The answer to a request whose signed content or key is known.
    fn repeat(&self, now: Timestamp, knock: &Knock) -> Done<Option<Knocked>> {
        let schedule = knock.run.schedule;
        if let Some((first, _)) = self.first_with(now, schedule, knock.signed.as_ref())? {
            return Ok(Some(Knocked::Repeat(first)));
        }
        for key in &knock.keys {
            match self.first_with(now, schedule, Some(key))? {
                Some((first, true)) => {
                    if let Some(signed) = &knock.signed {
                        self.take_key(schedule, signed, first)?;
                    }
                    return Ok(Some(Knocked::Repeat(first)));
                }
                Some((first, false)) => return Ok(Some(Knocked::KeyReused(first))),
                None => {}
            }
        }
        Ok(None)
    }
}
