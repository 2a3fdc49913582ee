//! Breakers and budgets: what agents with such policies keep books on. Their rows are locked before any run's.

use std::collections::{HashMap, HashSet};

use belfry_core::breaker::{Admits, Breaker, Transition};
use belfry_core::budget::{self, Budget};
use belfry_core::{AgentDefinition, AgentId, RunId, RunState};
use belfry_time::Timestamp;
use uuid::Uuid;

use super::connection::{Fault, Tx};
use super::finish::read_agent;
use super::rows::{self, Live, get, small};
use crate::shapes::*;
use crate::unknown;

/// Breakers and budgets of agents whose rows are locked.
#[derive(Default)]
pub(super) struct Books {
    agents: HashMap<AgentId, AgentDefinition>,
    breakers: HashMap<(AgentId, String), Breaker>,
    budgets: HashMap<AgentId, Budget>,
    touched_breakers: HashSet<(AgentId, String)>,
    touched_budgets: HashSet<AgentId>,
    log: Vec<(AgentId, String, Transition)>,
}

impl Books {
    /// Locks the agents of runs that have a breaker or a budget, and opens their books.
    pub(super) async fn of_runs(tx: &mut Tx<'_>, runs: &[Uuid]) -> Result<Books, Fault> {
        let sql = "select a.id, a.format, a.definition from agents a \
                   where a.id = any(array(select distinct agent_id from live where id = any($1))) \
                   and (a.policies or exists (select 1 from budgets b where b.agent_id = a.id)) \
                   order by a.id for no key update of a";
        let agents = tx.query(sql, &[&runs]).await?;
        Books::open(tx, agents).await
    }

    /// Locks agents and opens their books.
    pub(super) async fn of_agents(tx: &mut Tx<'_>, agents: &[AgentId]) -> Result<Books, Fault> {
        let sql =
            "select id, format, definition from agents where id = any($1) order by id for no key update";
        let agents = tx.query(sql, &[&agents]).await?;
        Books::open(tx, agents).await
    }

    async fn open(tx: &mut Tx<'_>, agents: Vec<tokio_postgres::Row>) -> Result<Books, Fault> {
        let mut books = Books::default();
        for row in &agents {
            // Of one that cannot be read the policies are not known, and nothing is counted.
            if let Ok(agent) = read_agent(row)? {
                books.agents.insert(get(row, "id")?, agent);
            }
        }
        if books.agents.is_empty() {
            return Ok(books);
        }
        let ids: Vec<AgentId> = books.agents.keys().copied().collect();
        for row in tx.query("select * from breakers where agent_id = any($1)", &[&ids]).await? {
            let place = (get(&row, "agent_id")?, get(&row, "command")?);
            books.breakers.insert(place, breaker(&row)?);
        }
        for row in tx.query("select * from budgets where agent_id = any($1)", &[&ids]).await? {
            if let Some(budget) = budget(&row)? {
                books.budgets.insert(get(&row, "agent_id")?, budget);
            }
        }
        Ok(books)
    }

    /// Reads again what somebody else in this transaction may have written.
    pub(super) async fn reopen(&mut self, tx: &mut Tx<'_>) -> Result<(), Fault> {
        let agents: Vec<AgentId> = self.agents.keys().copied().collect();
        *self = Books::of_agents(tx, &agents).await?;
        Ok(())
    }

    pub(super) fn spend(&mut self, now: Timestamp, agent: AgentId) {
        if let Some(policy) = self.agents.get(&agent).and_then(|definition| definition.budget) {
            let used = budget::after_failure(self.budgets.get(&agent).copied(), &policy, now);
            self.budgets.insert(agent, used);
            self.touched_budgets.insert(agent);
        }
    }

    pub(super) fn ended(&mut self, now: Timestamp, live: &Live, state: RunState) {
        if let Some(policy) = self.agents.get(&live.agent).and_then(|definition| definition.breaker) {
            let place = (live.agent, live.command.clone());
            let before = self.breakers.get(&place).copied().unwrap_or_default();
            self.turn(place, before.ended(&policy, live.id, state, now), before);
        }
        if state == RunState::Completed && self.budgets.remove(&live.agent).is_some() {
            self.touched_budgets.insert(live.agent);
        }
    }

    fn turn(&mut self, place: (AgentId, String), next: (Breaker, Option<Transition>), before: Breaker) {
        let (next, transition) = next;
        self.log.extend(transition.map(|transition| (place.0, place.1.clone(), transition)));
        if next != before {
            self.breakers.insert(place.clone(), next);
            self.touched_breakers.insert(place);
        }
    }

    /// Moves a breaker to half open for the probe that a plan makes; `false` if somebody else has the probe.
    pub(super) fn take_probe(&mut self, now: Timestamp, commit: &Commit) -> bool {
        commit.runs.iter().find(|run| run.probe).is_none_or(|run| self.probe(now, run))
    }

    /// The same for one run.
    pub(super) fn probe(&mut self, now: Timestamp, run: &NewRun) -> bool {
        let Some(policy) = self.agents.get(&run.agent).and_then(|definition| definition.breaker) else {
            return true;
        };
        let place = (run.agent, run.command.clone());
        let before = self.breakers.get(&place).copied().unwrap_or_default();
        if before.admits(&policy, now) != Admits::Probe {
            return false;
        }
        self.turn(place, before.probing(run.id, now), before);
        true
    }

    /// Whether the breaker of an agent's command lets a run through.
    pub(super) fn admits(&self, now: Timestamp, agent: AgentId, command: &str) -> Admits {
        let Some(policy) = self.agents.get(&agent).and_then(|definition| definition.breaker) else {
            return Admits::Yes;
        };
        let place = (agent, command.to_owned());
        self.breakers.get(&place).copied().unwrap_or_default().admits(&policy, now)
    }

    /// Whether an agent's failure budget is used up.
    pub(super) fn is_exhausted(&self, now: Timestamp, agent: AgentId) -> bool {
        let policy = self.agents.get(&agent).and_then(|definition| definition.budget);
        let used = self.budgets.get(&agent).copied();
        policy.is_some_and(|policy| budget::exhausted_until(used, &policy, now).is_some())
    }

    /// Writes what has changed.
    pub(super) async fn close(&mut self, tx: &mut Tx<'_>) -> Result<(), Fault> {
        for (agent, command) in self.touched_breakers.drain() {
            let next = self.breakers.get(&(agent, command.clone())).copied().unwrap_or_default();
            write_breaker(tx, agent, &command, &next).await?;
        }
        for (agent, command, transition) in self.log.drain(..) {
            write_transition(tx, agent, &command, &transition).await?;
        }
        for agent in self.touched_budgets.drain() {
            match self.budgets.get(&agent) {
                None => tx.execute("delete from budgets where agent_id = $1", &[&agent]).await?,
                Some(budget) => {
                    let sql = "insert into budgets (agent_id, period_start, failures) values ($1, $2, $3) \
                               on conflict (agent_id) do update set period_start = excluded.period_start, \
                               failures = excluded.failures";
                    tx.execute(sql, &[&agent, &budget.period_start, &i64::from(budget.failures)]).await?
                }
            };
        }
        Ok(())
    }
}

pub(super) async fn reset_breaker(
    tx: &mut Tx<'_>,
    now: Timestamp,
    agent: AgentId,
    command: &str,
) -> Result<bool, Fault> {
    let mut books = Books::of_agents(tx, &[agent]).await?;
    let place = (agent, command.to_owned());
    let Some(before) = books.breakers.get(&place).copied() else { return Ok(false) };
    let next = before.reset(now);
    let changed = next.1.is_some();
    books.turn(place, next, before);
    books.close(tx).await?;
    Ok(changed)
}

pub(super) async fn reset_budget(tx: &mut Tx<'_>, agent: AgentId) -> Result<bool, Fault> {
    Books::of_agents(tx, &[agent]).await?;
    Ok(tx.execute("delete from budgets where agent_id = $1", &[&agent]).await? > 0)
}

async fn write_breaker(
    tx: &mut Tx<'_>,
    agent: AgentId,
    command: &str,
    breaker: &Breaker,
) -> Result<(), Fault> {
    let sql = "insert into breakers (agent_id, command, state, failures, opened_at, probe) \
               values ($1, $2, $3, $4, $5, $6) on conflict (agent_id, command) do update set \
               state = excluded.state, failures = excluded.failures, opened_at = excluded.opened_at, \
               probe = excluded.probe";
    let state = rows::breaker_code(breaker.state);
    let failures = i64::from(breaker.failures);
    let probe = breaker.probe.map(|run| run.0);
    tx.execute(sql, &[&agent, &command, &state, &failures, &breaker.opened_at, &probe]).await?;
    Ok(())
}

async fn write_transition(
    tx: &mut Tx<'_>,
    agent: AgentId,
    command: &str,
    transition: &Transition,
) -> Result<(), Fault> {
    let sql = "insert into breaker_log (agent_id, command, at, from_state, to_state, failures, reason, run_id) \
               values ($1, $2, $3, $4, $5, $6, $7, $8)";
    tx.execute(
        sql,
        &[
            &agent,
            &command,
            &transition.at,
            &rows::breaker_code(transition.from),
            &rows::breaker_code(transition.to),
            &i64::from(transition.failures),
            &rows::transition_code(transition.reason),
            &transition.run.map(|run| run.0),
        ],
    )
    .await?;
    Ok(())
}

pub(super) fn breaker(row: &tokio_postgres::Row) -> Result<Breaker, Fault> {
    // One that cannot be read counts from zero; the next end writes it anew.
    let Ok(state) = rows::breaker_state(get(row, "state")?) else { return Ok(Breaker::default()) };
    Ok(Breaker {
        state,
        failures: small(get(row, "failures")?),
        // One that was opened at the end of time would never close.
        opened_at: get::<Option<Timestamp>>(row, "opened_at")?.filter(|at| *at < Timestamp::MAX),
        probe: get::<Option<Uuid>>(row, "probe")?.map(RunId),
    })
}

pub(super) fn budget(row: &tokio_postgres::Row) -> Result<Option<Budget>, Fault> {
    Ok(unknown::budget(get(row, "period_start")?, get(row, "failures")?))
}
