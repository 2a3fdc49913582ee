//! Requests from outside. The agent's row is locked first, so that those of one agent come one after the other; what lives is
//! counted in the next statement, which sees what the one before has made.

use std::sync::atomic::{AtomicBool, Ordering};

use belfry_core::breaker::Admits;
use belfry_core::definition::{IfRunning, Scope};
use belfry_core::{Facts, RunId, hook};
use belfry_time::Timestamp;

use super::Postgres;
use super::books::Books;
use super::connection::{Fault, Tx};
use super::enqueue::{Places, enqueue};
use super::rows::{self, get};
use crate::Error;
use crate::hook::{Hooks, Knock, Knocked, made};
use crate::shapes::*;
use crate::store::Answer;

impl Hooks for Postgres {
    async fn knock(&self, now: Timestamp, request: &Knock) -> Answer<Knocked> {
        let places = look!(self, |tx| self.places(&mut tx, &[&request.enqueue.run]).await)?;
        let answer = transact!(self, |tx| knock(&mut tx, now, request, &places).await);
        self.tell(answer, made).await
    }
}

async fn knock(tx: &mut Tx<'_>, now: Timestamp, knock: &Knock, places: &Places) -> Result<Knocked, Fault> {
    let (run, options) = (&knock.enqueue.run, &knock.options);
    let mut books = Books::of_agents(tx, &[run.agent]).await?;
    if let Some(key) = &knock.enqueue.key {
        let sql = "select run_id from idempotency where schedule_id = $1 and key = $2 and expires_at > $3";
        if let Some(row) = tx.query(sql, &[&run.schedule, &key.key, &now]).await?.first() {
            return Ok(Knocked::Repeat(RunId(get(row, "run_id")?)));
        }
    }
    let sql = "select * from schedule_state where schedule_id = $1 and not retired";
    let found = tx.query(sql, &[&run.schedule]).await?;
    let Some(status) = found.first().map(rows::status).transpose()? else { return Ok(Knocked::NotFound) };
    let scope = live_in_scope(tx, knock).await?;
    let facts = Facts {
        live: scope.len() as u32,
        pending: scope.iter().filter(|(_, running)| !running).count() as u32,
        breaker: books.admits(now, run.agent, &run.command),
        budget_exhausted: books.is_exhausted(now, run.agent),
    };
    if let Some(reason) = hook::refusal(options, &status, &facts) {
        return Ok(Knocked::Refused(reason));
    }
    let mut request = knock.enqueue.clone();
    request.run.probe = facts.breaker == Admits::Probe;
    match enqueue(tx, now, &request, places).await? {
        Enqueued::Made => {}
        Enqueued::Repeat(first) | Enqueued::KeyReused(first) => return Ok(Knocked::Repeat(first)),
        Enqueued::NotFound => return Ok(Knocked::NotFound),
    }
    if request.run.probe && !books.probe(now, &request.run) {
        return Err(Fault::Again);
    }
    books.close(tx).await?;
    let cancels = options.if_running == IfRunning::Cancel;
    Ok(Knocked::Made { cancel: scope.into_iter().filter(|_| cancels).map(|(run, _)| run).collect() })
}

/// Live runs that the overlap policy looks at, and whether each is running.
async fn live_in_scope(tx: &mut Tx<'_>, knock: &Knock) -> Result<Vec<(RunId, bool)>, Fault> {
    let (run, options) = (&knock.enqueue.run, &knock.options);
    let found = match options.overlap {
        Scope::Schedule => {
            let sql = "select id, state from live where schedule_id = $1 order by id";
            tx.query(sql, &[&run.schedule]).await?
        }
        Scope::Command => {
            let sql = "select id, state from live where schedule_id = any(array(select id from schedules \
                       where agent_id = $1)) and command = $2 order by id";
            tx.query(sql, &[&run.agent, &options.command]).await?
        }
        Scope::Agent => {
            let sql = "select id, state from live where schedule_id = any(array(select id from schedules \
                       where agent_id = $1)) order by id";
            tx.query(sql, &[&run.agent]).await?
        }
    };
    found.iter().map(|row| Ok((RunId(get(row, "id")?), get::<i16>(row, "state")? == 2))).collect()
}
