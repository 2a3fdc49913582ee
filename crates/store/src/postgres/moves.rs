//! Edits of limits, labels, lanes and overlap: the runs of an agent follow its newest definitions.

use std::collections::{BTreeMap, BTreeSet};

use belfry_core::definition::{Options, read_stored};
use belfry_core::gate::{Place, Scopes, turn};
use belfry_core::{AgentDefinition, AgentId, ScheduleDefinition, ScheduleId, Trigger};
use tokio_postgres::Row;
use uuid::Uuid;

use super::connection::{Fault, Param, Tx};
use super::enqueue::{GATE_AGENT, GATE_COMMAND, GATE_TURN, GATE_WHOLE, turn_kind};
use super::finish::lock_gates;
use super::rows::{get, small};
use super::{Postgres, Queue};

/// What of a run an edit may change.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Moved {
    run: Uuid,
    queue: i64,
    lane: String,
    /// Its limit, its turn, its command, its agent, and which of these two it wants for itself.
    gates: [Option<i64>; 5],
    max_attempts: i64,
}

impl Moved {
    fn gates(&self) -> impl Iterator<Item = i64> {
        self.gates.into_iter().flatten()
    }
}

impl Postgres {
    /// Moves the runs of agents whose definitions this transaction has changed to their new queues and gates. Those that run
    /// count there from now on, and wait there should they come back. No run is made meanwhile.
    pub(super) async fn move_edited(&self, tx: &mut Tx<'_>) -> Result<(), Fault> {
        let agents = tx.take_edited();
        if agents.is_empty() {
            return Ok(());
        }
        // Whoever makes runs of any agent waits for the table below.
        tx.waits_for_locks("2s").await?;
        // Who makes runs reads this table: all runs that were made by the old definitions are there after it.
        tx.execute("lock table scopes in access exclusive mode", &[]).await?;
        for agent in agents {
            let sql = "select definition, format from agents where id = $1";
            let found = tx.query(sql, &[&agent]).await?;
            let Some(row) = found.first() else { continue };
            let (format, text): (i32, &str) = (get(row, "format")?, get(row, "definition")?);
            // One that cannot be read changes nothing.
            let Ok(definition) = read_stored::<AgentDefinition>(format, text) else { continue };
            let schedules = schedules_of(tx, agent).await?;
            let scopes = self.put_scopes(tx, agent, &schedules).await?;
            self.move_runs(tx, agent, &definition, &schedules, &scopes).await?;
        }
        Ok(())
    }

    /// Gives the gates of the scopes by command, of the whole agent by ''.
    async fn put_scopes(
        &self,
        tx: &mut Tx<'_>,
        agent: AgentId,
        schedules: &BTreeMap<ScheduleId, (ScheduleDefinition, bool)>,
    ) -> Result<BTreeMap<String, i64>, Fault> {
        let own = schedules.iter().filter(|(_, (_, is_retired))| !is_retired);
        let own: BTreeMap<ScheduleId, &Options> =
            own.map(|(id, (definition, _))| (*id, &definition.options)).collect();
        let mut scopes = Scopes::of(own.values().copied());
        let ids: Vec<ScheduleId> =
            own.iter().filter(|(_, of)| turn(of).is_some()).map(|(id, _)| *id).collect();
        let sql =
            "select distinct schedule_id, command from live where schedule_id = any($1) and trigger <> $2";
        for row in tx.query(sql, &[&ids, &Trigger::Message.code()]).await? {
            if let Some(options) = own.get(&get(&row, "schedule_id")?) {
                scopes.add(options, get(&row, "command")?);
            }
        }
        let mut gates = BTreeMap::new();
        for command in scopes.commands {
            let gate = self.gate(tx, (GATE_COMMAND, agent, command.clone())).await?;
            gates.insert(command, gate);
        }
        if scopes.agent {
            gates.insert(String::new(), self.gate(tx, (GATE_WHOLE, agent, String::new())).await?);
        }
        tx.execute("delete from scopes where agent_id = $1", &[&agent]).await?;
        for (command, gate) in &gates {
            let sql = "insert into scopes (agent_id, command, gate_id) values ($1, $2, $3)";
            tx.execute(sql, &[&agent, command, gate]).await?;
        }
        Ok(gates)
    }

    async fn move_runs(
        &self,
        tx: &mut Tx<'_>,
        agent: AgentId,
        definition: &AgentDefinition,
        schedules: &BTreeMap<ScheduleId, (ScheduleDefinition, bool)>,
        scopes: &BTreeMap<String, i64>,
    ) -> Result<(), Fault> {
        let ids: Vec<ScheduleId> = schedules.keys().copied().collect();
        // Those that run are locked already, but for those that have started since. They cannot be waited for: their ends may wait
        // for this edit.
        let sql =
            "select 1 from live where schedule_id = any($1) and state = 2 order by id for update nowait";
        tx.query(sql, &[&ids]).await.map_err(|fault| if fault.is_locked() { Fault::Again } else { fault })?;
        let sql = "select id, schedule_id, command, trigger, own_lane, queue_id, lane, agent_gate, turn_gate, command_gate, \
                   whole_gate, alone_gate, attempt, max_attempts, state = 2 as is_running from live where schedule_id = any($1) order by id";
        let (mut moved, mut gates) = (Vec::new(), BTreeSet::new());
        for row in tx.query(sql, &[&ids]).await? {
            let schedule: ScheduleId = get(&row, "schedule_id")?;
            let Some((of, _)) = schedules.get(&schedule) else { continue };
            let old = read(&row)?;
            let new = self.place(tx, (agent, definition), (schedule, of), scopes, &row).await?;
            if new != old {
                gates.extend(old.gates().chain(new.gates()));
                tx.makes_room(&old.lane);
                tx.makes_room(&new.lane);
                moved.push(new);
            }
        }
        let gates: Vec<i64> = gates.into_iter().collect();
        lock_gates(tx, &gates).await?;
        for run in moved {
            let sql = "update live set agent_gate = $2, turn_gate = $3, command_gate = $4, whole_gate = $5, alone_gate = $6, \
                       queue_id = $7, lane = $8, max_attempts = $9, \
                       state = case when state + 0 = 1 and parked_on is not null then 0 else state end, parked_on = null \
                       where id = $1";
            let [limit, turn, command, whole, alone] = run.gates;
            let gates: [Param<'_>; 5] = [&limit, &turn, &command, &whole, &alone];
            let rest: [Param<'_>; 3] = [&run.queue, &run.lane, &run.max_attempts];
            tx.execute(sql, &[&[&run.run as Param<'_>], &gates[..], &rest[..]].concat()).await?;
        }
        // Those that run here now were not let in by this gate.
        let sql = "update gates set cap_at = last_start(id) where id = any($1) and kind = $2";
        tx.execute(sql, &[&gates, &GATE_AGENT]).await?;
        self.release(tx, &gates).await?;
        // What waits for room in a lane that is no longer its own is planned again at once.
        let lanes: Vec<String> =
            schedules.values().map(|(of, _)| Place::of(definition, &of.options, false).lane).collect();
        let sql = "with moved as (update deferred d set armed = true \
                   from unnest($1::bigint[], $2::text[]) as n (schedule_id, lane) \
                   where d.schedule_id = n.schedule_id and d.lane <> n.lane and not d.armed \
                   returning d.since, d.schedule_id, d.tick_at) \
                   insert into timers (due_at, schedule_id, kind, tick_at, version) \
                   select since, schedule_id, 4, tick_at, nextval('numbers') from moved";
        tx.execute(sql, &[&ids, &lanes]).await?;
        Ok(())
    }

    async fn place(
        &self,
        tx: &mut Tx<'_>,
        (agent, definition): (AgentId, &AgentDefinition),
        (schedule, of): (ScheduleId, &ScheduleDefinition),
        scopes: &BTreeMap<String, i64>,
        row: &Row,
    ) -> Result<Moved, Fault> {
        let is_message = get::<i16>(row, "trigger")? == Trigger::Message.code();
        let place = Place::of(definition, &of.options, is_message);
        let limit = match place.gates.agent {
            true => Some(self.gate(tx, (GATE_AGENT, agent, String::new())).await?),
            false => None,
        };
        let turn = match place.gates.turn {
            Some(_) => Some(self.gate(tx, (GATE_TURN, schedule, String::new())).await?),
            None => None,
        };
        let scope = |command: &str| scopes.get(command).copied().filter(|_| !is_message);
        let (command, whole) = (scope(get(row, "command")?), scope(""));
        let alone = match turn_kind(place.gates) {
            Some(GATE_COMMAND) => command,
            Some(GATE_WHOLE) => whole,
            _ => None,
        };
        let gates = [limit, turn, command, whole, alone];
        let used = small(get(row, "attempt")?);
        let max_attempts = i64::from(place.attempts(used, get(row, "is_running")?));
        let lane = if get(row, "own_lane")? { get(row, "lane")? } else { place.lane };
        let mut needs = place.needs;
        needs.sort_unstable();
        needs.dedup();
        let gated = gates.iter().any(Option::is_some);
        let queue = self.queue(tx, Queue { lane: lane.clone(), needs, gated }).await?;
        Ok(Moved { run: get(row, "id")?, queue, lane, gates, max_attempts })
    }
}

fn read(row: &Row) -> Result<Moved, Fault> {
    let gate = |name| get::<Option<i64>>(row, name);
    let limits = (gate("agent_gate")?, gate("turn_gate")?);
    let scopes = (gate("command_gate")?, gate("whole_gate")?, gate("alone_gate")?);
    let gates = [limits.0, limits.1, scopes.0, scopes.1, scopes.2];
    let max_attempts = get(row, "max_attempts")?;
    Ok(Moved {
        run: get(row, "id")?,
        queue: get(row, "queue_id")?,
        lane: get(row, "lane")?,
        gates,
        max_attempts,
    })
}

/// The schedules of an agent, and whether they are retired; of these only those of which a run still lives.
async fn schedules_of(
    tx: &mut Tx<'_>,
    agent: AgentId,
) -> Result<BTreeMap<ScheduleId, (ScheduleDefinition, bool)>, Fault> {
    let sql = "select id, definition, format, retired_at is not null as is_retired from schedules s where agent_id = $1 \
               and (retired_at is null or exists (select 1 from live l where l.schedule_id = s.id))";
    let mut schedules = BTreeMap::new();
    for row in tx.query(sql, &[&agent]).await? {
        let (format, text): (i32, &str) = (get(&row, "format")?, get(&row, "definition")?);
        if let Ok(definition) = read_stored(format, text) {
            schedules.insert(get(&row, "id")?, (definition, get(&row, "is_retired")?));
        }
    }
    Ok(schedules)
}
