//! New runs: the queues and gates they go to, and runs that are asked for from outside a plan.

use std::collections::{BTreeSet, HashMap, HashSet};

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
        requests: &[Enqueue],
        places: (&Places, &HashSet<RunId>),
    ) -> Result<Vec<Enqueued>, Fault> {
        tx.passes_locks();
        let answers = enqueue(tx, now, requests, places).await?;
        self.move_edited(tx).await?;
        Ok(answers)
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

/// Schedules that are there, and stay until the transaction ends.
const THERE: &str = "select schedule_id from schedule_state where schedule_id = any($1) and not retired \
                     order by schedule_id for share";
/// The same where no other transaction may ask for their ticks meanwhile.
const THERE_ALONE: &str = "select schedule_id from schedule_state where schedule_id = any($1) and not retired \
                           order by schedule_id for no key update";

/// Makes runs, in order: those for ticks apart from others, which take their keys and locks in another order.
pub(super) async fn enqueue(
    tx: &mut Tx<'_>,
    now: Timestamp,
    requests: &[Enqueue],
    places: (&Places, &HashSet<RunId>),
) -> Result<Vec<Enqueued>, Fault> {
    let mut answers = Vec::with_capacity(requests.len());
    for alike in requests.chunk_by(|one, next| one.run.tick_at.is_some() == next.run.tick_at.is_some()) {
        answers.extend(enqueue_alike(tx, now, alike, places).await?);
    }
    Ok(answers)
}

/// Makes runs that are all for ticks, or none of them. What all of them need is locked before any is made: timers, then states of
/// schedules, each sorted.
async fn enqueue_alike(
    tx: &mut Tx<'_>,
    now: Timestamp,
    requests: &[Enqueue],
    (places, new_scopes): (&Places, &HashSet<RunId>),
) -> Result<Vec<Enqueued>, Fault> {
    let mut batch = Batch { requests, answers: vec![None; requests.len()] };
    let is_for_ticks = requests.iter().any(|request| request.run.tick_at.is_some());
    // The live run of a tick goes before a key, which is then not taken.
    if !is_for_ticks {
        batch.take_keys(tx, now).await?;
    }
    let schedules = batch.schedules();
    // A plan that did not know of these runs is not committed. A tick may have a run already: then nothing changes, and the
    // timer is only held.
    let touched = match is_for_ticks {
        false => touch_tokens(tx, &schedules).await?,
        true => {
            let sql =
                "select 1 from timers where schedule_id = any($1) order by schedule_id for no key update";
            tx.query(sql, &[&schedules]).await?;
            HashSet::new()
        }
    };
    // Held, so that nobody retires a schedule before its runs are there to be ended with it; where they are for ticks, so that
    // nobody else asks for the same ones.
    let there = tx.query(if is_for_ticks { THERE_ALONE } else { THERE }, &[&schedules]).await?;
    let there: HashSet<ScheduleId> =
        there.iter().map(|row| get(row, "schedule_id")).collect::<Result<_, Fault>>()?;
    batch.leave_out(tx, &there).await?;
    if is_for_ticks {
        batch.find_ticks(tx, now).await?;
    }
    let made: Vec<&NewRun> = batch.open().map(|(_, request)| &request.run).collect();
    // A timer that was set meanwhile is seen only now: a transaction that sets one holds the state.
    let mut untouched = batch.schedules();
    untouched.retain(|schedule| !touched.contains(schedule));
    touch_tokens(tx, &untouched).await?;
    let scoped: Vec<&&NewRun> = made.iter().filter(|run| new_scopes.contains(&run.id)).collect();
    if !scoped.is_empty() {
        // Before anything of it is read: two who have read it would wait for each other.
        tx.execute("lock table scopes in access exclusive mode", &[]).await?;
    }
    insert_runs(tx, now, &made, places).await?;
    scoped.iter().for_each(|run| tx.edits(run.agent));
    Ok(batch.answers.into_iter().map(|answer| answer.unwrap_or(Enqueued::Made)).collect())
}

/// Requests, each with its answer as soon as that is known. One without makes its run.
struct Batch<'a> {
    requests: &'a [Enqueue],
    answers: Vec<Option<Enqueued>>,
}

impl<'a> Batch<'a> {
    /// Requests without an answer, with their places.
    fn open(&self) -> impl Iterator<Item = (usize, &'a Enqueue)> {
        let requests = self.requests.iter().enumerate();
        requests.filter(|(place, _)| self.answers[*place].is_none())
    }

    /// Takes their keys, or answers for the runs that have these.
    async fn take_keys(&mut self, tx: &mut Tx<'_>, now: Timestamp) -> Result<(), Fault> {
        let keyed =
            self.open().filter_map(|(place, request)| Some((place, &request.run, request.key.as_ref()?)));
        let mut keyed: Vec<(usize, &NewRun, &Key)> = keyed.collect();
        // Of several with one key the first takes it.
        keyed.sort_by_key(|(place, run, key)| (run.schedule, key.key.as_str(), *place));
        for (place, run, key) in keyed {
            self.answers[place] = take_key(tx, now, run, key).await?;
        }
        Ok(())
    }

    /// Schedules of requests without an answer, sorted.
    fn schedules(&self) -> Vec<ScheduleId> {
        let schedules: BTreeSet<ScheduleId> = self.open().map(|(_, request)| request.run.schedule).collect();
        schedules.into_iter().collect()
    }

    /// Answers for schedules that are gone. Keys that were taken for their runs go as well.
    async fn leave_out(&mut self, tx: &mut Tx<'_>, there: &HashSet<ScheduleId>) -> Result<(), Fault> {
        let gone = self.open().filter(|(_, request)| !there.contains(&request.run.schedule));
        let gone: Vec<(usize, &Enqueue)> = gone.collect();
        for (place, request) in gone {
            if request.key.is_some() {
                let sql = "delete from idempotency where schedule_id = $1 and run_id = $2";
                tx.execute(sql, &[&request.run.schedule, &request.run.id.0]).await?;
            }
            self.answers[place] = Some(Enqueued::NotFound);
        }
        Ok(())
    }

    /// Answers for ticks whose runs live; takes the keys of others, or answers for the runs that have these.
    async fn find_ticks(&mut self, tx: &mut Tx<'_>, now: Timestamp) -> Result<(), Fault> {
        let schedules = self.schedules();
        let ticks: Vec<Timestamp> = self.open().filter_map(|(_, request)| request.run.tick_at).collect();
        let sql =
            "select schedule_id, tick_at, id from live where schedule_id = any($1) and tick_at = any($2)";
        let mut lives: HashMap<(ScheduleId, Timestamp), RunId> = HashMap::new();
        for row in tx.query(sql, &[&schedules, &ticks]).await? {
            lives.insert((get(&row, "schedule_id")?, get(&row, "tick_at")?), RunId(get(&row, "id")?));
        }
        let asked: Vec<(usize, &Enqueue)> = self.open().collect();
        for (place, Enqueue { run, key }) in asked {
            let Some(tick_at) = run.tick_at else { continue };
            self.answers[place] = match (lives.get(&(run.schedule, tick_at)), key) {
                (Some(first), _) => Some(Enqueued::Repeat(*first)),
                (None, Some(key)) => take_key(tx, now, run, key).await?,
                (None, None) => None,
            };
            if self.answers[place].is_none() {
                lives.insert((run.schedule, tick_at), run.id);
            }
        }
        Ok(())
    }
}

/// Those runs that want their commands for themselves where these are no scopes any more: their schedules had the commands
/// before.
pub(super) async fn new_scopes(tx: &mut Tx<'_>, runs: &[&NewRun]) -> Result<HashSet<RunId>, Fault> {
    let wanting: Vec<&&NewRun> = runs.iter().filter(|run| run.wants_command()).collect();
    if wanting.is_empty() {
        return Ok(HashSet::new());
    }
    let agents: Vec<AgentId> = wanting.iter().map(|run| run.agent).collect();
    let mut known: HashSet<(AgentId, String)> = HashSet::new();
    for row in tx.query("select agent_id, command from scopes where agent_id = any($1)", &[&agents]).await? {
        known.insert((get(&row, "agent_id")?, get(&row, "command")?));
    }
    let is_new = |run: &&&&NewRun| !known.contains(&(run.agent, run.command.clone()));
    Ok(wanting.iter().filter(is_new).map(|run| run.id).collect())
}

/// Gives the timers of schedules another version; gives those that have one.
async fn touch_tokens(tx: &mut Tx<'_>, schedules: &[ScheduleId]) -> Result<HashSet<ScheduleId>, Fault> {
    if schedules.is_empty() {
        return Ok(HashSet::new());
    }
    let sql = "select w.id from (select unnest($1::bigint[]) as id order by 1) w where touch_token(w.id)";
    tx.query(sql, &[&schedules]).await?.iter().map(|row| get(row, "id")).collect()
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
