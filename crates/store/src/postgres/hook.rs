//! Requests from outside. The agent's row is locked first, so that those of one agent come one after the other; what lives is
//! counted in the next statement, which sees what the one before has made.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};

use belfry_core::check::Admitted;
use belfry_time::Timestamp;

use super::Postgres;
use super::books::Books;
use super::connection::{Fault, Tx};
use super::enqueue::{Places, enqueue};
use super::overlap::in_scope;
use super::rows;
use super::session::{first_with, take_key};
use crate::Error;
use crate::hook::{Knock, Knocked};
use crate::shapes::*;
use crate::storable::storable;
use crate::store::{Answer, Hooks, wakes};

impl Hooks for Postgres {
    async fn knock(&self, now: Timestamp, request: &Knock) -> Answer<Knocked> {
        let request = &*storable(request);
        let places = look!(self, |tx| self.places(&mut tx, &[&request.run]).await)?;
        let answer = transact!(self, |tx| self.knock_in(&mut tx, now, request, &places).await);
        self.last_claim.shown(now);
        self.tell(answer, wakes::knock).await
    }
}

impl Postgres {
    async fn knock_in(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        knock: &Knock,
        places: &Places,
    ) -> Result<Knocked, Fault> {
        tx.passes_locks();
        let run = &knock.run;
        let mut books = Books::of_agents(tx, &[run.agent]).await?;
        let sql = "select * from schedule_state where schedule_id = $1 and not retired";
        let found = tx.query(sql, &[&run.schedule]).await?;
        let Some(status) = found.first().map(rows::status).transpose()? else { return Ok(Knocked::NotFound) };
        if let Some(answer) = repeat(tx, now, knock).await? {
            return Ok(answer);
        }
        let scope = in_scope(tx, knock.overlap()).await?;
        let queued = scope.iter().map(|(_, is_queued)| *is_queued);
        let facts = books.facts(now, run.agent, &run.command, queued);
        let Admitted { probe, cancel_live } = match knock.admit(&status, &facts) {
            Ok(admitted) => admitted,
            Err(reason) => return Ok(Knocked::Refused(reason)),
        };
        if cancel_live {
            // Timers are locked before runs.
            tx.query("select touch_token($1)", &[&run.schedule]).await?;
            // An end may keep a breaker's books, which are open here.
            books.close(tx).await?;
            self.cancel_all(tx, now, &scope).await?;
            books.reopen(tx).await?;
        }
        let request = Enqueue { run: NewRun { probe, ..run.clone() }, key: None };
        let answers = enqueue(tx, now, std::slice::from_ref(&request), (places, &HashSet::new())).await?;
        match answers.first().copied().unwrap_or(Enqueued::NotFound) {
            Enqueued::Made => {
                for key in knock.signed.iter().chain(&knock.keys) {
                    take_key(tx, now, run.schedule, key, run.id).await?;
                }
            }
            Enqueued::Repeat(first) | Enqueued::KeyReused(first) => return Ok(Knocked::Repeat(first)),
            Enqueued::NotFound => return Ok(Knocked::NotFound),
        }
        if probe && !books.probe(now, &request.run) {
            return Err(Fault::Again);
        }
        books.close(tx).await?;
        Ok(Knocked::Made {
            cancelled: scope.into_iter().filter(|_| cancel_live).map(|(run, _)| run).collect(),
        })
    }
}

/// The answer to a request whose signed content or key is known. The agent's lock keeps other requests out meanwhile.
async fn repeat(tx: &mut Tx<'_>, now: Timestamp, knock: &Knock) -> Result<Option<Knocked>, Fault> {
    let schedule = knock.run.schedule;
    if let Some(signed) = &knock.signed
        && let Some((first, _)) = first_with(tx, now, schedule, signed).await?
    {
        return Ok(Some(Knocked::Repeat(first)));
    }
    for key in &knock.keys {
        match first_with(tx, now, schedule, key).await? {
            Some((first, true)) => {
                if let Some(signed) = &knock.signed {
                    take_key(tx, now, schedule, signed, first).await?;
                }
                return Ok(Some(Knocked::Repeat(first)));
            }
            Some((first, false)) => return Ok(Some(Knocked::KeyReused(first))),
            None => {}
        }
    }
    Ok(None)
}
