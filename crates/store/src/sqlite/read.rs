//! Reading, looking for damage, and removing what is old.

use belfry_core::{AgentId, RunId, RunState, ScheduleId};
use belfry_time::Timestamp;
use rusqlite::params;

use super::list::{ENDED, ended_list, live_list, live_query, record};
use super::source::{GATE_AGENT, GATE_COMMAND, GATE_TURN, GATE_WHOLE, from_json};
use super::{Done, Verb, bytes, maybe_id, maybe_instant, micros, run_id, text};
use crate::sabotage::Sabotage;
use crate::shapes::*;

impl Verb<'_> {
    pub(super) fn run(&self, run: RunId) -> Done<Option<RunRecord>> {
        let live = self.row(live_query("l.id = ?"), [bytes(run)], record)?;
        match live {
            Some(live) => Ok(Some(live)),
            None => self.row(format!("{ENDED} where h.id = ?"), [bytes(run)], record),
        }
    }

    pub(super) fn runs_by_id(&self, runs: &[RunId]) -> Done<Vec<RunRecord>> {
        let (live, ended) = (live_list("l.id = ?"), ended_list("id = ?"));
        let mut found = Vec::with_capacity(runs.len());
        for run in runs {
            let run = bytes(*run);
            found.extend(match self.row(live.clone(), [run], record)? {
                Some(live) => Some(live),
                None => self.row(ended.clone(), [run], record)?,
            });
        }
        Ok(found)
    }

    pub(super) fn live_runs(&self) -> Done<Vec<RunRecord>> {
        self.rows(live_list("true order by l.rank, l.due_at, l.id"), [], record)
    }

    /// Along the two chains of a schedule, the last first.
    pub(super) fn ended_runs(&self, schedule: ScheduleId, limit: u32) -> Done<Vec<RunRecord>> {
        let heads = self.row(
            "select last_failed, last_other from schedule_state where schedule_id = ?",
            [schedule],
            |row| Ok([maybe_id(row, 0)?, maybe_id(row, 1)?]),
        )?;
        let next = |id: Option<[u8; 16]>| match id {
            Some(id) => self.row(format!("{ENDED} where h.id = ?"), [id], |row| {
                Ok((row.get::<_, i64>("place")?, record(row)?, maybe_id(row, "previous")?))
            }),
            None => Ok(None),
        };
        let [failed, other] = heads.unwrap_or_default();
        let mut heads = [next(failed)?, next(other)?];
        let mut runs = Vec::new();
        while runs.len() < limit as usize {
            // The later of the two.
            let later = usize::from(
                heads[1].as_ref().map(|(place, ..)| *place) > heads[0].as_ref().map(|(place, ..)| *place),
            );
            let Some((_, run, previous)) = heads[later].take() else { break };
            runs.push(run);
            heads[later] = next(previous)?;
        }
        Ok(runs)
    }

    pub(super) fn breaker_record(&self, agent: AgentId, command: &str) -> Done<BreakerRecord> {
        let log = self.rows(
            "select transition from breaker_log where agent_id = ? and command = ? order by number",
            params![agent, command],
            |row| text(row, 0),
        )?;
        let history = log.iter().filter_map(|text| from_json(text).ok()).collect();
        Ok(BreakerRecord { breaker: self.breaker_of(agent, command)?, history })
    }

    pub(super) fn counts(&self) -> Done<Counts> {
        let counts = self.row(
            "select count(*) filter (where state <> 2), count(*) filter (where state = 2), (select count(*) from history) from live",
            [],
            |row| {
                let count = |column| row.get::<_, i64>(column).map(|count| count as u64);
                Ok(Counts { pending: count(0)?, running: count(1)?, ended: count(2)? })
            },
        )?;
        Ok(counts.unwrap_or_default())
    }

    pub(super) fn prune(&self, now: Timestamp, retention: &Retention) -> Done<Pruned> {
        // Ids begin with the instant of their making: what ended before an instant was made before it.
        let newest = retention.runs_before.max(retention.failures_before);
        let bound = Retention::first_id(newest).into_bytes();
        let old = self.rows(
            "select id, schedule_id, tick_at from history
             where id < ?1 and length(id) = 16 and finished_at < case state when ?2 then ?3 else ?4 end order by id limit ?5",
            params![
                bound,
                RunState::Failed.code(),
                micros(retention.failures_before),
                micros(retention.runs_before),
                retention.batch
            ],
            |row| {
                Ok((row.get::<_, [u8; 16]>(0)?, row.get::<_, ScheduleId>(1)?, maybe_instant(row, "tick_at")?))
            },
        )?;
        let mut output = 0;
        for (id, schedule, tick_at) in &old {
            output += self.forget(id)?;
            if self.shared.sabotage.is(Sabotage::PruneArms)
                && let Some(tick_at) = *tick_at
            {
                self.set_token(
                    *schedule,
                    Some(belfry_core::Token { kind: belfry_core::TokenKind::Tick, tick_at, due_at: tick_at }),
                )?;
            }
        }
        let skips = self.execute(
            "delete from skips where number in (select number from skips where to_tick < ? order by number limit ?)",
            params![micros(retention.skips_before), retention.batch],
        )?;
        let keys = self.execute("delete from idempotency where expires_at <= ?", [micros(now)])?;
        let (over, next) = self.prune_by_number(retention, &mut output)?;
        output += self.execute(
            "delete from output where (run_id, seq) in
               (select run_id, seq from output o where run_id < ? and not exists (select 1 from live l where l.id = o.run_id)
                order by run_id, seq limit ?)",
            params![Retention::first_id(retention.output_before).into_bytes(), retention.batch],
        )?;
        let sessions = self.execute(
            "delete from sessions where id in
               (select id from sessions x where used_at < ? and not exists (select 1 from session_runs r where r.session_id = x.id)
                and not exists (select 1 from live l where l.schedule_id = x.schedule_id and l.session = x.key)
                order by id limit ?)",
            params![micros(retention.runs_before), retention.batch],
        )?;
        let retired = self.prune_retired(retention)?;
        let (runs, sessions, skips) = (old.len() as u32 + over, sessions as u32, skips as u32);
        Ok(Pruned { runs, skips, keys: keys as u32, output: output as u32, sessions, retired, next })
    }

    /// Removes retired schedules that nothing kept belongs to, then retired agents without schedules. The heads of the two
    /// chains of ended runs are the last that pruning takes.
    fn prune_retired(&self, retention: &Retention) -> Done<u32> {
        let before = micros(retention.retired_before);
        let schedules = self.rows(
            "select s.id from schedules s join schedule_state st on st.schedule_id = s.id where s.retired_at < ?
               and not exists (select 1 from live l where l.schedule_id = s.id)
               and not exists (select 1 from history h where h.id in (st.last_failed, st.last_other))
               and not exists (select 1 from skips k where k.schedule_id = s.id)
               and not exists (select 1 from sessions x where x.schedule_id = s.id)
             order by s.id limit ?",
            params![before, retention.batch],
            |row| row.get::<_, ScheduleId>(0),
        )?;
        for id in &schedules {
            self.execute("delete from schedule_state where schedule_id = ?", [id])?;
            self.execute("delete from schedule_revisions where schedule_id = ?", [id])?;
            self.execute("delete from gates where kind = ? and key = ?", params![GATE_TURN, id.to_string()])?;
            self.execute("delete from schedules where id = ?", [id])?;
        }
        let agents = self.rows(
            "select id from agents a where retired_at < ?
               and not exists (select 1 from schedules s where s.agent_id = a.id) order by id limit ?",
            params![before, retention.batch],
            |row| row.get::<_, AgentId>(0),
        )?;
        for id in &agents {
            self.execute("delete from breakers where agent_id = ?", [id])?;
            self.execute("delete from breaker_log where agent_id = ?", [id])?;
            self.execute("delete from budgets where agent_id = ?", [id])?;
            self.execute("delete from scopes where agent_id = ?", [id])?;
            self.execute(
                "delete from gates where kind in (?1, ?2) and key = ?4 or kind = ?3 and key >= ?4 || ' ' and key < ?4 || '!'",
                params![GATE_AGENT, GATE_WHOLE, GATE_COMMAND, id.to_string()],
            )?;
            self.execute("delete from agents where id = ?", [id])?;
        }
        Ok((schedules.len() + agents.len()) as u32)
    }

    /// Removes an ended run with its output; gives how many chunks that had.
    fn forget(&self, id: &[u8; 16]) -> Done<usize> {
        self.execute("delete from history where id = ?", [id])?;
        self.execute("delete from output where run_id = ?", [id])
    }

    /// Walks on over a batch of ended runs, and removes those beyond the number that is kept of their schedule's. Adds to
    /// `output` how many chunks of output they had.
    fn prune_by_number(&self, retention: &Retention, output: &mut usize) -> Done<(u32, Option<RunId>)> {
        let Some(keep) = retention.runs_per_schedule else { return Ok((0, None)) };
        let walked = self.rows(
            "select h.id, h.ordinal <= case h.state when ?3 then st.ended_failed else st.ended - st.ended_failed end - ?4
             from (select id, schedule_id, state, ordinal from history where id > ?1 and length(id) = 16 order by id limit ?2) h
               left join schedule_state st on st.schedule_id = h.schedule_id order by h.id",
            params![retention.after.map_or([0; 16], bytes), retention.batch, RunState::Failed.code(), keep],
            |row| Ok((row.get::<_, [u8; 16]>(0)?, row.get::<_, Option<bool>>(1)?)),
        )?;
        let mut over = 0;
        for (id, _) in walked.iter().filter(|(_, is_over)| *is_over == Some(true)) {
            *output += self.forget(id)?;
            over += 1;
        }
        let next = walked.last().filter(|_| walked.len() == retention.batch as usize);
        Ok((over, next.map(|(id, _)| run_id(*id))))
    }

    pub(super) fn integrity(&self) -> Done<Vec<String>> {
        let mut found: Vec<String> = self
            .rows("pragma integrity_check(10)", [], |row| row.get::<_, String>(0))?
            .into_iter()
            .filter(|line| line != "ok")
            .collect();
        let promises = [
            (
                "rows of the audit that leave no number for the next, so that nothing can be changed",
                "select count(*) from audit where number = 9223372036854775807",
            ),
            (
                "gates of runs that are gone, so that they hold nobody back",
                "select count(*) from (select agent_gate as gate from live union all select turn_gate from live
                   union all select command_gate from live union all select whole_gate from live
                   union all select parked_on from live)
                 where gate is not null and gate not in (select id from gates)",
            ),
            (
                "gates that a run has which does not belong there",
                "select count(*) from live where alone_gate is not null and alone_gate not in (coalesce(command_gate, -1), coalesce(whole_gate, -1))",
            ),
            (
                "runs parked at a gate with room, and nobody let through before them",
                "select count(*) from live l join gates g on g.id = l.parked_on where l.state = 1 and g.kind = 0
                   and (g.cap is null or g.cap > (select count(*) from live where state = 2 and agent_gate = g.id))
                   and not exists (select 1 from live r where r.state = 0 and r.queue_id = l.queue_id and g.id = r.agent_gate)",
            ),
            (
                "runs parked at a turn that no other run of their schedule has",
                "select count(*) from live l join gates g on g.id = l.parked_on where l.state = 1 and g.kind = 1
                   and not exists (select 1 from live r where r.turn_gate = g.id and r.id <> l.id
                                   and (r.state = 2 or (r.rank, r.due_at, r.id) < (l.rank, l.due_at, l.id)))",
            ),
            (
                "runs parked at a scope where nothing runs and nothing waits to be alone before them",
                "select count(*) from live l join gates g on g.id = l.parked_on where l.state = 1 and g.kind > 1
                   and not exists (select 1 from live r where r.state = 2 and g.id in (r.command_gate, r.whole_gate))
                   and not exists (select 1 from live r where r.state <> 2 and r.alone_gate = g.id
                                   and (r.rank, r.due_at, r.id) < (l.rank, l.due_at, l.id))",
            ),
            (
                "parked runs without a gate and without a line",
                "select count(*) from live where state = 1 and parked_on is null and id not in (select run_id from session_runs)",
            ),
            (
                "sessions where nobody has a turn",
                "select count(*) from (select session_id, min(seq) as seq from session_runs group by session_id) f
                 join session_runs r on r.session_id = f.session_id and r.seq = f.seq
                 join live l on l.id = r.run_id where l.state = 1 and l.parked_on is null
                   and not exists (select 1 from session_runs o join live x on x.id = o.run_id where o.session_id = f.session_id and x.state = 2)",
            ),
            (
                "places in lines without a run",
                "select count(*) from session_runs where run_id not in (select id from live)",
            ),
            (
                "schedules that wait for a run that does not live",
                "select count(*) from schedule_state where waits_for is not null and waits_for not in (select id from live)",
            ),
            (
                "schedules that wait and have a token",
                "select count(*) from schedule_state st join timers t on t.schedule_id = st.schedule_id
                 where waits_for is not null and t.kind <> 3",
            ),
            (
                "schedules with a token that are not active, or with the end of a pause that are not paused",
                "select count(*) from schedule_state st join timers t on t.schedule_id = st.schedule_id
                 where st.status <> case t.kind when 3 then 1 else 0 end",
            ),
            (
                "pauses that nothing ends when they should",
                "select count(*) from schedule_state st join schedules s on s.id = st.schedule_id
                 where s.retired_at is null and st.status = 1 and st.status_until is not null
                   and not exists (select 1 from timers t where t.schedule_id = st.schedule_id and t.due_at = st.status_until)",
            ),
            (
                "active schedules that nothing arms",
                "select count(*) from schedule_state st join schedules s on s.id = st.schedule_id
                 where s.retired_at is null and st.status = 0 and waits_for is null and s.definition not like '{\"webhook\"%' and s.definition not like '{\"chat\"%'
                   and not exists (select 1 from timers t where t.schedule_id = st.schedule_id)
                   and not exists (select 1 from deferred d where d.schedule_id = st.schedule_id)",
            ),
            (
                "deferred schedules that wait for something else as well, or are no longer active",
                "select count(*) from deferred d join schedule_state st on st.schedule_id = d.schedule_id
                   join schedules s on s.id = d.schedule_id left join timers t on t.schedule_id = d.schedule_id
                 where s.retired_at is not null or st.status <> 0 or st.waits_for is not null
                   or t.kind is not case d.armed when 1 then 4 end",
            ),
            (
                "tokens of deferred ticks that nobody deferred",
                "select count(*) from timers where kind = 4 and schedule_id not in (select schedule_id from deferred)",
            ),
            (
                "schedules that are deferred in a lane with room",
                "select count(*) from deferred d where armed = 0 and coalesce(
                   (select queue_limit from lanes l where l.name = d.lane order by origin desc limit 1)
                     <= (select count(*) from deferred r where r.lane = d.lane and armed = 1)
                      + (select count(*) from live l join queues q on q.id = l.queue_id where q.lane = d.lane and l.state <> 2), 0) = 0",
            ),
            (
                "running runs without a node that holds its lease",
                "select count(*) from live where state = 2 and node_id not in (select id from nodes where not fenced)",
            ),
            ("runs that live and have ended", "select count(*) from live where id in (select id from history)"),
        ];
        for (words, sql) in promises {
            let count: i64 = self.row(sql, [], |row| row.get(0))?.unwrap_or(0);
            if count > 0 {
                found.push(format!("{count} {words}"));
            }
        }
        Ok(found)
    }
}
