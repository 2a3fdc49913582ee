//! Breakers and budgets: what agents with such policies keep books on. Their rows are locked before any run's.

use std::collections::{HashMap, HashSet};

use belfry_core::breaker::{Admits, Breaker, Transition};
use belfry_core::budget::Budget;
use belfry_core::definition::Budget as Policy;
use belfry_core::ending::{self, Ended, Ending, Then, Waiting};
use belfry_core::{AgentDefinition, AgentId, Facts, RunId};
use belfry_time::Timestamp;
use uuid::Uuid;

use super::Postgres;
use super::connection::{Fault, Tx};
use super::finish::{Change, read_agent};
use super::rows::{self, Live, get, small};
use crate::shapes::*;
use crate::unknown;

/// The breakers of agents, each with whether its probe lives.
pub(super) const BREAKERS: &str = "select b.*, exists (select 1 from live l where l.id = b.probe) as probe_lives \
    from breakers b where b.agent_id = any($1)";

/// Breakers and budgets of agents whose rows are locked.
#[derive(Default)]
pub(super) struct Books {
    agents: HashMap<AgentId, AgentDefinition>,
    breakers: HashMap<(AgentId, String), Breaker>,
    budgets: HashMap<AgentId, Budget>,
    touched_breakers: HashSet<(AgentId, String)>,
    touched_budgets: HashSet<AgentId>,
    log: Vec<(AgentId, String, Transition)>,
    moves: Vec<(AgentId, Waiting)>,
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
        for row in tx.query(BREAKERS, &[&ids]).await? {
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

    /// Decides about ends, one after the other, and keeps the books on them.
    pub(super) fn end_all(&mut self, now: Timestamp, changes: &[Change]) -> Vec<Then> {
        let mut thens: Vec<Then> = Vec::with_capacity(changes.len());
        for (place, change) in changes.iter().enumerate() {
            let live = &change.live;
            let ending = self.end(now, change);
            thens.push(ending.then);
            if ending.waiting == Waiting::Stay {
                continue;
            }
            self.moves.push((live.agent, ending.waiting));
            // Those that were decided on before wait as well.
            for (before, then) in changes[..place].iter().zip(&mut thens) {
                if before.live.agent == live.agent {
                    *then = moved(&before.live, *then, ending.waiting, now);
                }
            }
        }
        thens
    }

    fn end(&mut self, now: Timestamp, change: &Change) -> Ending {
        let live = &change.live;
        let place = (live.agent, live.command.clone());
        let breaker = self.breakers.get(&place).copied().unwrap_or_default();
        let policies = self.agents.get(&live.agent);
        let books = ending::Books {
            breaker: policies.and_then(|policies| Some((policies.breaker?, breaker))),
            budget: policies
                .and_then(|policies| Some((policies.budget?, self.budgets.get(&live.agent).copied()))),
        };
        let ended = Ended {
            run: live.id,
            trigger: live.trigger,
            attempt: small(live.attempt),
            verdict: change.verdict,
            failed: change.failed,
            left_behind: change.left_behind,
        };
        let ending = ending::decide(&ended, &books, now);
        if let Some(next) = ending.breaker {
            self.turn(place, next, breaker);
        }
        if let Some(used) = ending.budget {
            match used {
                Some(used) => drop(self.budgets.insert(live.agent, used)),
                None => drop(self.budgets.remove(&live.agent)),
            }
            self.touched_budgets.insert(live.agent);
        }
        ending
    }

    /// What is to become of runs that wait, by agent, in order.
    pub(super) fn moves(&mut self) -> Vec<(AgentId, Waiting)> {
        std::mem::take(&mut self.moves)
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

    /// What decides whether a request makes a run; for each live run in its scope whether `max_pending` counts it.
    pub(super) fn facts(
        &self,
        now: Timestamp,
        agent: AgentId,
        command: &str,
        scope: impl Iterator<Item = bool>,
    ) -> Facts {
        let without = AgentDefinition::default();
        let definition = self.agents.get(&agent).unwrap_or(&without);
        let breaker = self.breakers.get(&(agent, command.to_owned())).copied().unwrap_or_default();
        Facts::of(definition, scope, breaker, self.budgets.get(&agent).copied(), now)
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

/// What becomes of a run that was decided on to wait, when its agent's budget is used up or cleared afterwards.
fn moved(live: &Live, then: Then, waiting: Waiting, now: Timestamp) -> Then {
    let Then::Back { at, counted } = then else { return then };
    let attempts = small(live.attempt).saturating_sub(u32::from(!counted));
    let at = match waiting {
        Waiting::Hold(until) if ending::holds(live.trigger, attempts) => ending::held_at(at, until, now),
        Waiting::Free => at.min(now.max(live.due_at)),
        Waiting::Hold(_) | Waiting::Stay => at,
    };
    Then::Back { at, counted }
}

/// See [`crate::Store::pass_breaker`].
pub(super) async fn pass_breaker(
    tx: &mut Tx<'_>,
    now: Timestamp,
    (agent, command): (AgentId, &str),
    run: RunId,
) -> Result<Admits, Fault> {
    let mut books = Books::of_agents(tx, &[agent]).await?;
    let policy = books.agents.get(&agent).and_then(|definition| definition.breaker);
    let Some(policy) = policy else { return Ok(Admits::Yes) };
    let place = (agent, command.to_owned());
    let before = books.breakers.get(&place).copied().unwrap_or_default();
    let sql = "select 1 from live where id = $1 and (state + 0 = 2 or attempt > 0)";
    let started = match before.probe {
        Some(probe) => !tx.query(sql, &[&probe.0]).await?.is_empty(),
        None => false,
    };
    let admits = before.admits_waiting(&policy, run, now, |_| started);
    if admits == Admits::Probe {
        books.turn(place, before.probing(run, now), before);
        books.close(tx).await?;
    }
    Ok(admits)
}

/// See [`crate::Store::tripped`].
pub(super) async fn tripped(tx: &mut Tx<'_>, breakers: &[(AgentId, String)]) -> Result<Vec<bool>, Fault> {
    let agents: Vec<AgentId> = breakers.iter().map(|(agent, _)| *agent).collect();
    let mut found = HashSet::new();
    for row in tx.query(BREAKERS, &[&agents]).await? {
        if !breaker(&row)?.is_closed() {
            found.insert((get::<AgentId>(&row, "agent_id")?, get::<String>(&row, "command")?));
        }
    }
    Ok(breakers.iter().map(|place| found.contains(place)).collect())
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

/// Closes the breakers of agents that have no policy for them any more.
pub(super) async fn clear_breakers(tx: &mut Tx<'_>, now: Timestamp, agents: &[AgentId]) -> Result<(), Fault> {
    let mut books = Books::of_agents(tx, agents).await?;
    for (place, before) in books.breakers.clone() {
        books.turn(place, before.reset(now), before);
    }
    books.close(tx).await
}

impl Postgres {
    pub(super) async fn reset_budget_in(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        agent: AgentId,
    ) -> Result<bool, Fault> {
        Books::of_agents(tx, &[agent]).await?;
        let is_used = tx.execute("delete from budgets where agent_id = $1", &[&agent]).await? > 0;
        if is_used {
            self.move_waiting(tx, now, agent, Waiting::Free, &[]).await?;
        }
        Ok(is_used)
    }

    /// What an edit of an agent's policy does to its budget.
    pub(super) async fn redefine_budget(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        agent: AgentId,
        old: Option<&Policy>,
        new: Option<&Policy>,
    ) -> Result<(), Fault> {
        let mut books = Books::of_agents(tx, &[agent]).await?;
        let used = books.budgets.get(&agent).copied();
        let (left, waiting) = ending::redefine(used, old, new, now);
        if left != used {
            books.budgets.remove(&agent);
            books.touched_budgets.insert(agent);
            books.close(tx).await?;
        }
        self.move_waiting(tx, now, agent, waiting, &[]).await
    }
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
    let sql = "delete from breaker_log where agent_id = $1 and command = $2 and id <= \
               (select id from breaker_log where agent_id = $1 and command = $2 order by id desc limit 1 offset $3)";
    tx.execute(sql, &[&agent, &command, &(BREAKER_CHANGES_MAX as i64)]).await?;
    Ok(())
}

/// From a row of [`BREAKERS`].
pub(super) fn breaker(row: &tokio_postgres::Row) -> Result<Breaker, Fault> {
    // One that cannot be read counts from zero; the next end writes it anew.
    let Ok(state) = rows::breaker_state(get(row, "state")?) else { return Ok(Breaker::default()) };
    let breaker = Breaker {
        state,
        failures: small(get(row, "failures")?),
        // One that was opened at the end of time would never close.
        opened_at: get::<Option<Timestamp>>(row, "opened_at")?.filter(|at| *at < Timestamp::MAX),
        probe: get::<Option<Uuid>>(row, "probe")?.map(RunId),
    };
    let lives = get(row, "probe_lives")?;
    Ok(breaker.with_probe_if(|_| lives))
}

pub(super) fn budget(row: &tokio_postgres::Row) -> Result<Option<Budget>, Fault> {
    Ok(unknown::budget(get(row, "period_start")?, get(row, "failures")?))
}
