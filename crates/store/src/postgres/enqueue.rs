//! New runs: the queues and gates they go to, and runs that are asked for from outside a plan.

use std::collections::HashMap;

use belfry_core::definition::Scope;
use belfry_core::{AgentId, RunId, ScheduleId};
use belfry_time::Timestamp;
use uuid::Uuid;

use super::connection::{Fault, Param, Tx};
use super::rows::{get, sparse};
use super::{Gate, Postgres, Queue};
use crate::Error;
use crate::shapes::*;

/// Kinds of gates, as stored.
pub(super) const GATE_AGENT: i16 = 0;
pub(super) const GATE_TURN: i16 = 1;
pub(super) const GATE_COMMAND: i16 = 2;
pub(super) const GATE_WHOLE: i16 = 3;

/// The kind of gate at which a run takes its turn.
pub(super) fn turn_kind(gates: Gates) -> Option<i16> {
    gates.turn.map(|scope| match scope {
        Scope::Schedule => GATE_TURN,
        Scope::Command => GATE_COMMAND,
        Scope::Agent => GATE_WHOLE,
    })
}

/// Where a new run goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Place {
    queue: i64,
    agent_gate: Option<i64>,
    turn_gate: Option<i64>,
}

/// The places of new runs, by run.
pub(super) type Places = HashMap<RunId, Place>;

impl Postgres {
    /// The queues and gates of new runs, which are made where there are none yet. They are removed only with a
    /// schedule or an agent that was retired long ago and has no runs, so this needs no transaction.
    pub(super) async fn places(&self, tx: &mut Tx<'_>, runs: &[&NewRun]) -> Result<Places, Fault> {
        let mut places = Places::with_capacity(runs.len());
        let mut last: Option<(&NewRun, bool, i64)> = None;
        for run in runs {
            let agent_gate = match run.gates.agent {
                true => Some(self.gate(tx, (GATE_AGENT, run.agent, String::new())).await?),
                false => None,
            };
            let turn_gate = match run.gates.turn {
                Some(_) => Some(self.gate(tx, (GATE_TURN, run.schedule, String::new())).await?),
                None => None,
            };
            let gated = agent_gate.is_some() || turn_gate.is_some();
            let queue = match last {
                Some((other, was_gated, queue))
                    if was_gated == gated && other.lane == run.lane && other.needs == run.needs =>
                {
                    queue
                }
                _ => {
                    let mut needs = run.needs.clone();
                    needs.sort_unstable();
                    needs.dedup();
                    self.queue(tx, Queue { lane: run.lane.clone(), needs, gated }).await?
                }
            };
            last = Some((run, gated, queue));
            places.insert(run.id, Place { queue, agent_gate, turn_gate });
        }
        Ok(places)
    }

    pub(super) async fn enqueue_in(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        request: &Enqueue,
        place: (&Places, bool),
    ) -> Result<Enqueued, Fault> {
        tx.passes_locks();
        let answer = enqueue(tx, now, request, place).await?;
        self.move_edited(tx).await?;
        Ok(answer)
    }

    pub(super) async fn gate(&self, tx: &mut Tx<'_>, gate: Gate) -> Result<i64, Fault> {
        if let Some(id) = self.cache.lock().gates.get(&gate) {
            return Ok(*id);
        }
        let cap = (gate.0 != GATE_AGENT).then_some(1_i64);
        let sql =
            "insert into gates (kind, key, command, cap) values ($1, $2, $3, $4) on conflict do nothing";
        tx.execute(sql, &[&gate.0, &gate.1, &gate.2, &cap]).await?;
        let sql = "select id from gates where kind = $1 and key = $2 and command = $3";
        let id = one(tx.query(sql, &[&gate.0, &gate.1, &gate.2]).await?)?;
        self.cache.lock().gates.insert(gate, id, 0);
        Ok(id)
    }

    pub(super) async fn queue(&self, tx: &mut Tx<'_>, queue: Queue) -> Result<i64, Fault> {
        if let Some(id) = self.cache.lock().queues.get(&queue) {
            return Ok(*id);
        }
        let sql = "insert into queues (lane, needs, gated) values ($1, $2, $3) on conflict do nothing";
        tx.execute(sql, &[&queue.lane, &queue.needs, &queue.gated]).await?;
        let sql = "select id from queues where lane = $1 and needs = $2 and gated = $3";
        let id = one(tx.query(sql, &[&queue.lane, &queue.needs, &queue.gated]).await?)?;
        self.cache.lock().queues.insert(queue, id, 0);
        Ok(id)
    }
}

/// New runs as columns: what each has of its own, and once what many have in common.
#[derive(Default)]
pub(super) struct Columns<'a> {
    pub(super) owners: Vec<i32>,
    pub(super) runs: Vec<Uuid>,
    pub(super) kinds: Vec<i32>,
    pub(super) schedules: Vec<ScheduleId>,
    pub(super) not_befores: Vec<Timestamp>,
    pub(super) tick_ats: Vec<Option<Timestamp>>,
    pub(super) trace_ids: Vec<Option<Uuid>>,
    pub(super) queues: Vec<i64>,
    pub(super) ranks: Vec<i32>,
    pub(super) agents: Vec<AgentId>,
    pub(super) commands: Vec<&'a str>,
    pub(super) agent_gates: Vec<Option<i64>>,
    pub(super) turn_gates: Vec<Option<i64>>,
    pub(super) max_attempts: Vec<i64>,
    pub(super) triggers: Vec<i16>,
    pub(super) probes: Vec<bool>,
    pub(super) prompts: Vec<Option<&'a str>>,
    pub(super) payloads: Vec<String>,
    pub(super) lanes: Vec<&'a str>,
    pub(super) turns: Vec<Option<i16>>,
    pub(super) own_lanes: Vec<bool>,
}

impl<'a> Columns<'a> {
    /// Of runs, each with the place of its plan.
    pub(super) fn new(runs: &[(i32, &'a NewRun)], places: &Places) -> Result<Columns<'a>, Fault> {
        let mut columns = Columns::default();
        let mut known = HashMap::new();
        let mut last: Option<(&NewRun, Place, i32)> = None;
        for (owner, run) in runs {
            let place = *places.get(&run.id).ok_or_else(|| Error::unexpected("a run without a place"))?;
            let kind = match last {
                // Most are like the one before them, which is quickly seen.
                Some((other, its_place, kind)) if its_place == place && is_alike(other, run) => kind,
                _ => {
                    let own =
                        (run.priority, run.agent, run.command.as_str(), run.max_attempts, run.trigger.code());
                    let rest = (run.probe, run.prompt.as_deref(), run.lane.as_str(), run.payload.to_string());
                    let rest = (rest, run.own_lane, turn_kind(run.gates));
                    *known.entry((place, own, rest)).or_insert_with(|| columns.add_kind(run, place))
                }
            };
            last = Some((run, place, kind));
            columns.owners.push(*owner);
            columns.runs.push(run.id.0);
            columns.kinds.push(kind);
            columns.schedules.push(run.schedule);
            columns.not_befores.push(run.not_before);
            columns.tick_ats.push(run.tick_at);
            columns.trace_ids.push(run.trace_id);
        }
        columns.trace_ids = sparse(columns.trace_ids);
        Ok(columns)
    }

    fn add_kind(&mut self, run: &'a NewRun, place: Place) -> i32 {
        self.queues.push(place.queue);
        self.ranks.push(-i32::from(run.priority));
        self.agents.push(run.agent);
        self.commands.push(&run.command);
        self.agent_gates.push(place.agent_gate);
        self.turn_gates.push(place.turn_gate);
        self.max_attempts.push(i64::from(run.max_attempts));
        self.triggers.push(run.trigger.code());
        self.probes.push(run.probe);
        self.prompts.push(run.prompt.as_deref());
        self.payloads.push(run.payload.to_string());
        self.lanes.push(&run.lane);
        self.turns.push(turn_kind(run.gates));
        self.own_lanes.push(run.own_lane);
        self.lanes.len() as i32
    }

    /// In the order in which the functions take them.
    pub(super) fn params(&self) -> [Param<'_>; 21] {
        [
            &self.owners,
            &self.runs,
            &self.kinds,
            &self.schedules,
            &self.not_befores,
            &self.tick_ats,
            &self.trace_ids,
            &self.queues,
            &self.ranks,
            &self.agents,
            &self.commands,
            &self.agent_gates,
            &self.turn_gates,
            &self.max_attempts,
            &self.triggers,
            &self.probes,
            &self.prompts,
            &self.payloads,
            &self.lanes,
            &self.turns,
            &self.own_lanes,
        ]
    }
}

/// Whether two runs are of one kind, where their places are the same.
fn is_alike(one: &NewRun, other: &NewRun) -> bool {
    one.agent == other.agent
        && one.priority == other.priority
        && one.command == other.command
        && one.max_attempts == other.max_attempts
        && one.trigger == other.trigger
        && one.probe == other.probe
        && one.prompt == other.prompt
        && one.lane == other.lane
        && one.own_lane == other.own_lane
        && one.gates == other.gates
        && one.payload == other.payload
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
    let runs: Vec<(i32, &NewRun)> = runs.iter().map(|run| (0, *run)).collect();
    let columns = Columns::new(&runs, places)?;
    let mut params: Vec<Param<'_>> = vec![&now];
    params.extend(columns.params());
    let sql = "select make_runs($1, null, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, \
               $19, $20, $21, $22)";
    tx.query(sql, &params).await?;
    Ok(())
}

pub(super) async fn enqueue(
    tx: &mut Tx<'_>,
    now: Timestamp,
    request: &Enqueue,
    (places, is_new_scope): (&Places, bool),
) -> Result<Enqueued, Fault> {
    let run = &request.run;
    // The live run of a tick goes before a key, which is then not taken.
    let (key, late_key) = match run.tick_at {
        None => (request.key.as_ref(), None),
        Some(_) => (None, request.key.as_ref()),
    };
    if let Some(key) = key
        && let Some(answer) = take_key(tx, now, run, key).await?
    {
        return Ok(answer);
    }
    // A plan that did not know of this run is not committed. A tick may have a run already: then nothing changes, and the
    // timer is only held.
    let is_touched = match run.tick_at {
        None => touch_token(tx, run.schedule).await?,
        Some(_) => {
            let sql = "select 1 from timers where schedule_id = $1 for no key update";
            tx.query(sql, &[&run.schedule]).await?;
            false
        }
    };
    // Held, so that nobody retires the schedule before the run is there to be ended with it; where it is for a tick, so that
    // nobody else asks for the same one.
    let sql = match run.tick_at {
        None => "select 1 from schedule_state where schedule_id = $1 and not retired for share",
        Some(_) => "select 1 from schedule_state where schedule_id = $1 and not retired for no key update",
    };
    if tx.query(sql, &[&run.schedule]).await?.is_empty() {
        // The key goes as well.
        if key.is_some() {
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
    if let Some(key) = late_key
        && let Some(answer) = take_key(tx, now, run, key).await?
    {
        return Ok(answer);
    }
    // A timer that was set meanwhile is seen only now: a transaction that sets one holds the state.
    if !is_touched {
        touch_token(tx, run.schedule).await?;
    }
    if !is_new_scope {
        insert_runs(tx, now, &[run], places).await?;
        return Ok(Enqueued::Made);
    }
    // Before anything of it is read: two who have read it would wait for each other.
    tx.execute("lock table scopes in access exclusive mode", &[]).await?;
    insert_runs(tx, now, &[run], places).await?;
    tx.edits(run.agent);
    Ok(Enqueued::Made)
}

/// Whether a run wants its command for itself, and that is no scope any more: its schedule had the command before.
pub(super) async fn is_new_scope(tx: &mut Tx<'_>, run: &NewRun) -> Result<bool, Fault> {
    if !run.wants_command() {
        return Ok(false);
    }
    let sql = "select 1 from scopes where agent_id = $1 and command = $2";
    Ok(tx.query(sql, &[&run.agent, &run.command]).await?.is_empty())
}

/// Gives the timer of a schedule another version; false where there is none.
async fn touch_token(tx: &mut Tx<'_>, schedule: ScheduleId) -> Result<bool, Fault> {
    let touched = tx.query("select touch_token($1) as is_touched", &[&schedule]).await?;
    touched.first().map_or(Ok(false), |row| get(row, "is_touched"))
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
    let first = first_with(tx, now, run.schedule, run.id.0, key).await?;
    Ok(first.map(|(first, is_same)| match is_same {
        true => Enqueued::Repeat(RunId(first)),
        false => Enqueued::KeyReused(RunId(first)),
    }))
}

/// Takes a key for a run, or gives the run that has it, and whether that was asked for with the same body.
pub(super) async fn first_with(
    tx: &mut Tx<'_>,
    now: Timestamp,
    schedule: ScheduleId,
    run: Uuid,
    key: &Key,
) -> Result<Option<(Uuid, bool)>, Fault> {
    let sql = "insert into idempotency (schedule_id, key, body_hash, run_id, expires_at) \
               values ($1, $2, $3, $4, $5) on conflict (schedule_id, key) do update \
               set body_hash = excluded.body_hash, run_id = excluded.run_id, expires_at = excluded.expires_at \
               where idempotency.expires_at <= $6";
    let params: &[Param<'_>] = &[&schedule, &key.key, &key.body_hash, &run, &key.expires_at, &now];
    if tx.execute(sql, params).await? > 0 {
        return Ok(None);
    }
    let sql = "select run_id, body_hash from idempotency where schedule_id = $1 and key = $2";
    let found = tx.query(sql, &[&schedule, &key.key]).await?;
    // It went away between the two statements.
    let row = found.first().ok_or(Fault::Again)?;
    Ok(Some((get(row, "run_id")?, get::<&[u8]>(row, "body_hash")? == key.body_hash)))
}

fn one(rows: Vec<tokio_postgres::Row>) -> Result<i64, Fault> {
    let row = rows.first().ok_or_else(|| Error::unexpected("a queue or gate that was just made is gone"))?;
    get(row, "id")
}
