//! Requests from outside.

use belfry_core::breaker::Admits;
use belfry_core::definition::{IfRunning, Scope};
use belfry_core::{Facts, RunId, budget, hook};
use belfry_time::Timestamp;
use rusqlite::params;

use super::{Done, Sqlite, Verb, run_id};
use crate::hook::{Hooks, Knock, Knocked, made};
use crate::shapes::*;
use crate::storable::storable;
use crate::store::Answer;

impl Hooks for Sqlite {
    async fn knock(&self, now: Timestamp, knock: &Knock) -> Answer<Knocked> {
        let knock = storable(knock).into_owned();
        let answer = self.write(move |verb| verb.knock(now, &knock)).await;
        self.shared.hint.after(answer, made)
    }
}

impl Verb<'_> {
    fn knock(&self, now: Timestamp, knock: &Knock) -> Done<Knocked> {
        let (run, options) = (&knock.run, &knock.options);
        let (Some((status, _)), Some(definition)) =
            (self.status(run.schedule)?, self.agent_definition(run.agent)?)
        else {
            return Ok(Knocked::NotFound);
        };
        if let Some(answer) = self.repeat(now, knock)? {
            return Ok(answer);
        }
        let scope = self.live_in_scope(knock)?;
        let breaker = self.breaker_of(run.agent, &run.command)?;
        let used = self.budget_of(run.agent)?;
        let facts = Facts {
            live: scope.len() as u32,
            pending: scope.iter().filter(|(_, running)| !running).count() as u32,
            breaker: definition.breaker.as_ref().map_or(Admits::Yes, |policy| breaker.admits(policy, now)),
            budget_exhausted: definition
                .budget
                .as_ref()
                .is_some_and(|policy| budget::exhausted_until(used, policy, now).is_some()),
        };
        if let Some(reason) = hook::refusal(options, &status, &facts) {
            return Ok(Knocked::Refused(reason));
        }
        let probe = facts.breaker == Admits::Probe;
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
            let (next, transition) = breaker.probing(run.id, now);
            self.put_breaker(run.agent, &run.command, &next, transition)?;
        }
        let cancels = options.if_running == IfRunning::Cancel;
        Ok(Knocked::Made { cancel: scope.into_iter().filter(|_| cancels).map(|(run, _)| run).collect() })
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

    /// Live runs that the overlap policy looks at, and whether each is running.
    fn live_in_scope(&self, knock: &Knock) -> Done<Vec<(RunId, bool)>> {
        let (run, options) = (&knock.run, &knock.options);
        let map = |row: &rusqlite::Row<'_>| Ok((run_id(row.get(0)?), row.get::<_, i64>(1)? == 2));
        match options.overlap {
            Scope::Schedule => {
                let sql = "select id, state from live where schedule_id = ? order by id";
                self.rows(sql, [run.schedule], map)
            }
            Scope::Command => self.rows(
                "select id, state from live
                 where schedule_id in (select id from schedules where agent_id = ?) and command = ? order by id",
                params![run.agent, options.command],
                map,
            ),
            Scope::Agent => self.rows(
                "select id, state from live
                 where schedule_id in (select id from schedules where agent_id = ?) order by id",
                [run.agent],
                map,
            ),
        }
    }
}
