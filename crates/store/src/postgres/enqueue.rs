//! New runs: the queues and gates they go to, and runs that are asked for from outside a plan.

use std::collections::HashMap;

use belfry_core::RunId;
use belfry_core::definition::Scope;
use belfry_time::Timestamp;

use super::connection::{Fault, Tx};
use super::rows::get;
use super::{Gate, Postgres, Queue};
use crate::Error;
use crate::shapes::*;

/// Where a new run goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    queue: i64,
    agent_gate: Option<i64>,
    turn_gate: Option<i64>,
}

/// The places of new runs, by run.
pub(super) type Places = HashMap<RunId, Place>;

impl Postgres {
    /// The queues and gates of new runs, which are made where there are none yet. They are never removed, so this needs
    /// no transaction.
    pub(super) async fn places(&self, tx: &mut Tx<'_>, runs: &[&NewRun]) -> Result<Places, Fault> {
        let mut places = Places::with_capacity(runs.len());
        for run in runs {
            let agent_gate = match run.gates.agent {
                true => Some(self.gate(tx, (0, run.agent, String::new())).await?),
                false => None,
            };
            let turn_gate = match run.gates.turn {
                Some(Scope::Schedule) => Some(self.gate(tx, (1, run.schedule, String::new())).await?),
                Some(Scope::Command) => Some(self.gate(tx, (2, run.agent, run.command.clone())).await?),
                Some(Scope::Agent) => Some(self.gate(tx, (3, run.agent, String::new())).await?),
                None => None,
            };
            let mut needs = run.needs.clone();
            needs.sort_unstable();
            needs.dedup();
            let gated = agent_gate.is_some() || turn_gate.is_some();
            let queue = self.queue(tx, Queue { lane: run.lane.clone(), needs, gated }).await?;
            places.insert(run.id, Place { queue, agent_gate, turn_gate });
        }
        Ok(places)
    }

    async fn gate(&self, tx: &mut Tx<'_>, gate: Gate) -> Result<i64, Fault> {
        if let Some(id) = self.cache.lock().gates.get(&gate) {
            return Ok(*id);
        }
        let cap = (gate.0 != 0).then_some(1_i64);
        let sql =
            "insert into gates (kind, key, command, cap) values ($1, $2, $3, $4) on conflict do nothing";
        tx.execute(sql, &[&gate.0, &gate.1, &gate.2, &cap]).await?;
        let sql = "select id from gates where kind = $1 and key = $2 and command = $3";
        let id = one(tx.query(sql, &[&gate.0, &gate.1, &gate.2]).await?)?;
        let mut cache = self.cache.lock();
        cache.bound();
        cache.gates.insert(gate, id);
        Ok(id)
    }

    async fn queue(&self, tx: &mut Tx<'_>, queue: Queue) -> Result<i64, Fault> {
        if let Some(id) = self.cache.lock().queues.get(&queue) {
            return Ok(*id);
        }
        let sql = "insert into queues (lane, needs, gated) values ($1, $2, $3) on conflict do nothing";
        tx.execute(sql, &[&queue.lane, &queue.needs, &queue.gated]).await?;
        let sql = "select id from queues where lane = $1 and needs = $2 and gated = $3";
        let id = one(tx.query(sql, &[&queue.lane, &queue.needs, &queue.gated]).await?)?;
        let mut cache = self.cache.lock();
        cache.bound();
        cache.queues.insert(queue, id);
        Ok(id)
    }
}

pub(super) async fn insert_runs(
    tx: &mut Tx<'_>,
    now: Timestamp,
    runs: &[&NewRun],
    places: &Places,
) -> Result<(), Fault> {
    if runs.is_empty() {
        return Ok(());
    }
    let place_of = |run: &&NewRun| {
        places.get(&run.id).copied().ok_or_else(|| Error::unexpected("a run without a place"))
    };
    let places: Vec<Place> = runs.iter().map(place_of).collect::<Result<_, Error>>()?;
    /// One column of all rows.
    macro_rules! column {
        ($run:ident => $value:expr) => {
            runs.iter().map(|$run| $value).collect::<Vec<_>>()
        };
    }
    let sql = "insert into live (state, created_at, id, queue_id, rank, not_before, schedule_id, tick_at, \
               agent_id, command, agent_gate, turn_gate, max_attempts, trigger, probe, prompt, payload, trace_id, lane) \
               select 0, $1::timestamptz, u.* from unnest($2::uuid[], $3::bigint[], \
               $4::integer[], $5::timestamptz[], $6::bigint[], $7::timestamptz[], $8::bigint[], $9::text[], \
               $10::bigint[], $11::bigint[], $12::bigint[], $13::smallint[], $14::boolean[], $15::text[], \
               $16::text[], $17::uuid[], $18::text[]) as u";
    tx.execute(
        sql,
        &[
            &now,
            &column!(run => run.id.0),
            &places.iter().map(|place| place.queue).collect::<Vec<_>>(),
            &column!(run => -i32::from(run.priority)),
            &column!(run => run.not_before),
            &column!(run => run.schedule),
            &column!(run => run.tick_at),
            &column!(run => run.agent),
            &column!(run => run.command.as_str()),
            &places.iter().map(|place| place.agent_gate).collect::<Vec<_>>(),
            &places.iter().map(|place| place.turn_gate).collect::<Vec<_>>(),
            &column!(run => i64::from(run.max_attempts)),
            &column!(run => run.trigger.code()),
            &column!(run => run.probe),
            &column!(run => run.prompt.as_deref()),
            &column!(run => run.payload.to_string()),
            &column!(run => run.trace_id),
            &column!(run => run.lane.as_str()),
        ],
    )
    .await?;
    Ok(())
}

pub(super) async fn enqueue(
    tx: &mut Tx<'_>,
    now: Timestamp,
    request: &Enqueue,
    places: &Places,
) -> Result<Enqueued, Fault> {
    let run = &request.run;
    if let Some(key) = &request.key
        && let Some(answer) = take_key(tx, now, run, key).await?
    {
        return Ok(answer);
    }
    // A plan that did not know of this run is not committed.
    let sql = "update timers set version = nextval('numbers') where schedule_id = $1";
    tx.execute(sql, &[&run.schedule]).await?;
    // Held, so that nobody retires the schedule before the run is there to be ended with it; where it is for a tick, so that
    // nobody else asks for the same one.
    let sql = match run.tick_at {
        None => "select 1 from schedule_state where schedule_id = $1 and not retired for share",
        Some(_) => "select 1 from schedule_state where schedule_id = $1 and not retired for no key update",
    };
    if tx.query(sql, &[&run.schedule]).await?.is_empty() {
        // The key goes as well.
        if request.key.is_some() {
            let sql = "delete from idempotency where schedule_id = $1 and run_id = $2";
            tx.execute(sql, &[&run.schedule, &run.id.0]).await?;
        }
        return Ok(Enqueued::NotFound);
    }
    if let Some(tick_at) = run.tick_at {
        let sql = "select id from live where schedule_id = $1 and tick_at = $2";
        if let Some(row) = tx.query(sql, &[&run.schedule, &tick_at]).await?.first() {
            return Ok(Enqueued::Repeat(RunId(get(row, "id")?)));
        }
    }
    insert_runs(tx, now, &[run], places).await?;
    Ok(Enqueued::Made)
}

/// Takes an idempotency key, or answers for the run that has it.
async fn take_key(
    tx: &mut Tx<'_>,
    now: Timestamp,
    run: &NewRun,
    key: &Key,
) -> Result<Option<Enqueued>, Fault> {
    let sql = "select 1 from schedule_state where schedule_id = $1 and not retired";
    if tx.query(sql, &[&run.schedule]).await?.is_empty() {
        return Ok(Some(Enqueued::NotFound));
    }
    let sql = "insert into idempotency (schedule_id, key, body_hash, run_id, expires_at) \
               values ($1, $2, $3, $4, $5) on conflict (schedule_id, key) do update \
               set body_hash = excluded.body_hash, run_id = excluded.run_id, expires_at = excluded.expires_at \
               where idempotency.expires_at <= $6";
    let params: &[super::connection::Param<'_>] =
        &[&run.schedule, &key.key, &key.body_hash, &run.id.0, &key.expires_at, &now];
    if tx.execute(sql, params).await? > 0 {
        return Ok(None);
    }
    let sql = "select run_id, body_hash from idempotency where schedule_id = $1 and key = $2";
    let found = tx.query(sql, &[&run.schedule, &key.key]).await?;
    // It went away between the two statements.
    let row = found.first().ok_or(Fault::Again)?;
    let first = RunId(get(row, "run_id")?);
    Ok(Some(match get::<&[u8]>(row, "body_hash")? == key.body_hash {
        true => Enqueued::Repeat(first),
        false => Enqueued::KeyReused(first),
    }))
}

fn one(rows: Vec<tokio_postgres::Row>) -> Result<i64, Fault> {
    let row = rows.first().ok_or_else(|| Error::unexpected("a queue or gate that was just made is gone"))?;
    get(row, "id")
}
