//! Gates: which a run has to pass, how they stand, and who is let through when they change.

use belfry_core::definition::{AgentDefinition, ScheduleDefinition, Scope, read_stored};
use belfry_core::gate::{Gates, Pass, Place, Scopes, Standing, turn};
use belfry_core::{AgentId, ScheduleId, Trigger};
use belfry_time::Timestamp;
use rusqlite::params;

use super::source::{GATE_AGENT, GATE_COMMAND, GATE_TURN, GATE_WHOLE};
use super::{Done, Verb, micros, number};

/// A place in the order of starting: rank, due_at, id.
pub(super) type Order = (i64, i64, [u8; 16]);

/// The gates of a run, by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct StoredGates {
    pub(super) agent: Option<i64>,
    pub(super) turn: Option<i64>,
    pub(super) command: Option<i64>,
    pub(super) whole: Option<i64>,
    /// The one of the two before that it wants for itself.
    pub(super) alone: Option<i64>,
}

impl StoredGates {
    /// From the columns `agent_gate, turn_gate, command_gate, whole_gate, alone_gate`, beginning at `first`.
    pub(super) fn read(row: &rusqlite::Row<'_>, first: usize) -> rusqlite::Result<StoredGates> {
        Ok(StoredGates {
            agent: row.get(first)?,
            turn: row.get(first + 1)?,
            command: row.get(first + 2)?,
            whole: row.get(first + 3)?,
            alone: row.get(first + 4)?,
        })
    }

    pub(super) fn all(&self) -> impl Iterator<Item = i64> + use<> {
        [self.agent, self.turn, self.command, self.whole].into_iter().flatten()
    }

    pub(super) fn is_gated(&self) -> bool {
        self.all().next().is_some()
    }

    /// With what each is to the run.
    pub(super) fn passes(&self) -> Vec<(i64, Pass)> {
        let pass = |gate| (gate, if self.alone == Some(gate) { Pass::Alone } else { Pass::Beside });
        let limit = self.agent.map(|gate| (gate, Pass::Limit));
        let turn = self.turn.map(|gate| (gate, Pass::Turn));
        [limit, turn, self.command.map(pass), self.whole.map(pass)].into_iter().flatten().collect()
    }
}

impl Verb<'_> {
    /// The gates of a run by its own definitions and by what other schedules of its agent want for themselves.
    pub(super) fn gates_of(
        &self,
        agent: AgentId,
        schedule: ScheduleId,
        command: &str,
        gates: Gates,
        trigger: Trigger,
    ) -> Done<StoredGates> {
        let mut stored = StoredGates::default();
        if gates.agent {
            stored.agent = Some(self.gate(GATE_AGENT, &agent.to_string())?);
        }
        if gates.turn.is_some() {
            stored.turn = Some(self.gate(GATE_TURN, &schedule.to_string())?);
        }
        if trigger != Trigger::Message && self.has_scopes()? {
            let scope = |command: &str| {
                self.row(
                    "select gate_id from scopes where agent_id = ? and command = ?",
                    params![agent, command],
                    |row| row.get(0),
                )
            };
            stored.command = scope(command)?;
            stored.whole = scope("")?;
            stored.alone = match gates.turn {
                Some(Scope::Command) => stored.command,
                Some(Scope::Agent) => stored.whole,
                Some(Scope::Schedule) | None => None,
            };
        }
        Ok(stored)
    }

    /// Whether any schedule wants more than its own runs for itself; asked once per verb.
    fn has_scopes(&self) -> Done<bool> {
        if let Some(known) = self.scopes.get() {
            return Ok(known);
        }
        let found = self.row("select 1 from scopes limit 1", [], |_| Ok(()))?.is_some();
        self.scopes.set(Some(found));
        Ok(found)
    }

    /// How a gate stands for those to whom it is this.
    pub(super) fn standing(&self, now: Timestamp, gate: i64, pass: Pass) -> Done<Standing<Order>> {
        let place = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
        let first = match pass {
            Pass::Limit => None,
            Pass::Turn => self.row(
                "select rank, due_at, id from live where turn_gate = ? and state <> 2 and due_at <= ? and length(id) = 16
                 order by rank, due_at, id limit 1",
                params![gate, micros(now)],
                place,
            )?,
            Pass::Alone | Pass::Beside => self.row(
                "select rank, due_at, id from live l where alone_gate = ?1 and state <> 2 and due_at <= ?2 and not_before <= ?2
                   and length(id) = 16 and schedule_id not in (select value from json_each(?3))
                   and not exists (select 1 from live e where e.turn_gate = l.turn_gate and e.state <> 2 and e.due_at <= ?2
                                   and length(e.id) = 16 and (e.rank, e.due_at, e.id) < (l.rank, l.due_at, l.id))
                   and not exists (select 1 from live e where e.turn_gate = l.turn_gate and e.state = 2)
                 order by rank, due_at, id limit 1",
                params![gate, micros(now), self.unread_ids()?],
                place,
            )?,
        };
        Ok(Standing { room: self.room(gate)?, first })
    }

    /// How many more may run behind a gate.
    pub(super) fn room(&self, gate: i64) -> Done<i64> {
        let room = self.row(
            "select cap, case kind
                       when 0 then (select count(*) from live where state = 2 and agent_gate = ?1)
                       when 1 then (select count(*) from live where state = 2 and turn_gate = ?1)
                       when 2 then (select count(*) from live where state = 2 and command_gate = ?1)
                       else (select count(*) from live where state = 2 and whole_gate = ?1) end
             from gates where id = ?1",
            [gate],
            |row| {
                Ok(row
                    .get::<_, Option<i64>>(0)?
                    .map_or(i64::MAX, |cap| cap - row.get::<_, i64>(1).unwrap_or(0)))
            },
        )?;
        Ok(room.unwrap_or(i64::MAX))
    }

    /// Lets runs through that wait at a gate, and gives their number. At a limit as many of each queue as there is room for,
    /// the first first: nodes that serve one queue do not wait for those that serve another. At a turn the first of all. At a
    /// scope all of them, for what holds them is looked at by the next claim: only the first of each schedule waits to be alone,
    /// and others wait there only while such a run does.
    pub(super) fn release(&self, gate: i64) -> Done<usize> {
        if !self.has_parked(gate)? {
            return Ok(0);
        }
        let kind = self.row("select kind from gates where id = ?", [gate], |row| row.get::<_, i64>(0))?;
        let kind = kind.unwrap_or(GATE_WHOLE);
        if kind >= GATE_COMMAND {
            let sql = "update live set state = 0, parked_on = null where state = 1 and parked_on = ?";
            return self.execute(sql, [gate]);
        }
        let room = self.room(gate)?;
        if room <= 0 {
            return Ok(0);
        }
        if kind == GATE_TURN {
            return self.execute(
                "update live set state = 0, parked_on = null where id =
                   (select id from live where state = 1 and parked_on = ? order by rank, due_at, id limit 1)",
                [gate],
            );
        }
        self.execute(
            "update live set state = 0, parked_on = null where id in
               (select id from (select id, row_number() over (partition by queue_id order by rank, due_at, id) as place
                                from live where state = 1 and parked_on = ?) where place <= ?)",
            params![gate, room],
        )
    }

    /// Whether a run is parked at a gate.
    pub(super) fn has_parked(&self, gate: i64) -> Done<bool> {
        let sql = "select 1 from live where state = 1 and parked_on = ? limit 1";
        Ok(self.row(sql, [gate], |_| Ok(()))?.is_some())
    }

    /// Lets runs through at all gates that this verb has made room at.
    pub(super) fn release_freed(&self) -> Done<()> {
        for gate in self.freed.take() {
            self.release(gate)?;
        }
        Ok(())
    }

    /// Moves the runs of agents whose definitions this verb has changed to their new queues and gates. Those that run count
    /// there from now on, and wait there should they come back.
    pub(super) fn move_edited(&self) -> Done<()> {
        for agent in self.edited.take() {
            let definition =
                self.row("select definition, format from agents where id = ?", [agent], |row| {
                    Ok((row.get::<_, String>(0)?, row.get::<_, i32>(1)?))
                })?;
            // One that cannot be read changes nothing.
            let Some((text, format)) = definition else { continue };
            let Ok(definition) = read_stored::<AgentDefinition>(format, &text) else { continue };
            let schedules = self.schedules_of(agent)?;
            let own = schedules.iter().filter(|(_, _, is_retired)| !is_retired);
            let mut scopes = Scopes::of(own.clone().map(|(_, definition, _)| &definition.options));
            for (schedule, definition, _) in
                own.filter(|(_, definition, _)| turn(&definition.options).is_some())
            {
                let commands = self.rows(
                    "select distinct command from live where schedule_id = ? and trigger <> ?",
                    params![schedule, Trigger::Message.code()],
                    |row| row.get::<_, String>(0),
                )?;
                commands.iter().for_each(|command| scopes.add(&definition.options, command));
            }
            self.put_scopes(agent, &scopes)?;
            for (schedule, of, _) in &schedules {
                self.move_runs(agent, *schedule, &definition, of)?;
                self.arm_moved(*schedule, &Place::of(&definition, &of.options, false).lane)?;
            }
        }
        Ok(())
    }

    /// The schedules of an agent, and whether they are retired; of these only those of which a run still lives.
    fn schedules_of(&self, agent: AgentId) -> Done<Vec<(ScheduleId, ScheduleDefinition, bool)>> {
        let found = self.rows(
            "select id, definition, format, retired_at is not null from schedules s where agent_id = ?
               and (retired_at is null or exists (select 1 from live l where l.schedule_id = s.id))",
            [agent],
            |row| Ok(((row.get(0)?, row.get(3)?), row.get::<_, String>(1)?, row.get::<_, i32>(2)?)),
        )?;
        let read = |((id, is_retired), text, format): ((_, bool), String, i32)| {
            Some((id, read_stored(format, &text).ok()?, is_retired))
        };
        Ok(found.into_iter().filter_map(read).collect())
    }

    fn put_scopes(&self, agent: AgentId, scopes: &Scopes) -> Done<()> {
        self.scopes.set(None);
        self.execute("delete from scopes where agent_id = ?", [agent])?;
        let add = |command: &str, gate: i64| {
            let sql = "insert into scopes (agent_id, command, gate_id) values (?, ?, ?)";
            self.execute(sql, params![agent, command, gate]).map(drop)
        };
        for command in &scopes.commands {
            add(command, self.gate(GATE_COMMAND, &format!("{agent} {command}"))?)?;
        }
        if scopes.agent {
            add("", self.gate(GATE_WHOLE, &agent.to_string())?)?;
        }
        Ok(())
    }

    fn move_runs(
        &self,
        agent: AgentId,
        schedule: ScheduleId,
        definition: &AgentDefinition,
        of: &ScheduleDefinition,
    ) -> Done<()> {
        let runs = self.rows(
            "select l.id, l.command, l.trigger, l.own_lane, l.queue_id, q.lane, l.agent_gate, l.turn_gate, l.command_gate,
                    l.whole_gate, l.alone_gate, l.attempt, l.max_attempts, l.state = 2
             from live l join queues q on q.id = l.queue_id where l.schedule_id = ? and length(l.id) = 16",
            [schedule],
            |row| {
                let command: String = row.get(1)?;
                let (trigger, own_lane): (i16, bool) = (number(row, 2)?, row.get(3)?);
                let (queue, lane): (i64, String) = (row.get(4)?, row.get(5)?);
                let run = row.get::<_, [u8; 16]>(0)?;
                let attempts: (u32, u32, bool) = (number(row, 11)?, number(row, 12)?, row.get(13)?);
                Ok((run, command, trigger, own_lane.then_some(lane), queue, StoredGates::read(row, 6)?, attempts))
            },
        )?;
        for (run, command, trigger, own_lane, queue, old, (attempt, max_attempts, is_running)) in runs {
            let trigger = Trigger::from_code(trigger).unwrap_or(Trigger::Manual);
            let place = Place::of(definition, &of.options, trigger == Trigger::Message);
            let gates = self.gates_of(agent, schedule, &command, place.gates, trigger)?;
            let attempts = place.attempts(attempt, is_running);
            let new_queue = self.queue(&own_lane.unwrap_or(place.lane), &place.needs, gates.is_gated())?;
            if (gates, new_queue, attempts) == (old, queue, max_attempts) {
                continue;
            }
            self.made_room.set(true);
            self.execute(
                "update live set queue_id = ?, agent_gate = ?, turn_gate = ?, command_gate = ?, whole_gate = ?, alone_gate = ?,
                     max_attempts = ?, state = case when state = 1 and parked_on is not null then 0 else state end, parked_on = null where id = ?",
                params![new_queue, gates.agent, gates.turn, gates.command, gates.whole, gates.alone, attempts, run],
            )?;
            self.freed.borrow_mut().extend(old.all().chain(gates.all()));
        }
        Ok(())
    }
}
