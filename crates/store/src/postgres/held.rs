//! Which rows other transactions hold: found without waiting, by locking all that are free and passing the others by.

use std::collections::HashSet;

use belfry_core::{RunId, ScheduleId};
use uuid::Uuid;

use super::connection::{Fault, Tx};
use super::rows::get;

/// Agents that keep books, and their breakers, of which a row is held.
macro_rules! held_books {
    ($asked:literal) => {
        concat!(
            "booked as (select a.id from agents a where a.id in (select agent_id from ",
            $asked,
            ") and (a.policies or exists (select 1 from budgets b where b.agent_id = a.id))), \
             free_agents as (select id from agents where id in (select id from booked) \
                             for no key update skip locked), \
             free_breakers as (select agent_id, command from breakers where agent_id in (select id from booked) \
                               for no key update skip locked), \
             held_agents as (select id from booked where id not in (select id from free_agents) \
                 union select b.agent_id from breakers b where b.agent_id in (select id from booked) \
                 and (b.agent_id, b.command) not in (select agent_id, command from free_breakers)), \
             free_states as (select schedule_id from schedule_state \
                             where schedule_id in (select schedule_id from ",
            $asked,
            ") for no key update skip locked) "
        )
    };
}

/// The runs whose end another transaction would hold up.
pub(super) async fn runs(tx: &mut Tx<'_>, runs: &[RunId]) -> Result<HashSet<RunId>, Fault> {
    let sql = concat!(
        "with asked as (select l.id, l.agent_id, l.schedule_id, sr.session_id, \
                        array_remove(array[l.agent_gate, l.turn_gate, l.command_gate, l.whole_gate], null) as gates \
                        from live l left join session_runs sr on sr.run_id = l.id where l.id = any($1)), \
         free_runs as (select id from live where id = any($1) for update skip locked), \
         free_sessions as (select id from sessions where id in (select session_id from asked) \
                           for no key update skip locked), \
         free_gates as (select id from gates where id in (select unnest(gates) from asked) \
                        for no key update skip locked), ",
        held_books!("asked"),
        "select id from asked where id not in (select id from free_runs) \
         or agent_id in (select id from held_agents) \
         or schedule_id not in (select schedule_id from free_states) \
         or (session_id is not null and session_id not in (select id from free_sessions)) \
         or exists (select 1 from gates g where g.id = any(asked.gates) and g.id not in (select id from free_gates))"
    );
    tx.passes_locks();
    let ids: Vec<Uuid> = runs.iter().map(|run| run.0).collect();
    tx.query(sql, &[&ids]).await?.iter().map(|row| Ok(RunId(get(row, "id")?))).collect()
}

/// The schedules whose plan another transaction would hold up.
pub(super) async fn schedules(
    tx: &mut Tx<'_>,
    schedules: &[ScheduleId],
) -> Result<HashSet<ScheduleId>, Fault> {
    let sql = concat!(
        "with asked as (select id as schedule_id, agent_id from schedules where id = any($1)), ",
        held_books!("asked"),
        "select schedule_id from asked where agent_id in (select id from held_agents) \
         or schedule_id not in (select schedule_id from free_states)"
    );
    tx.passes_locks();
    tx.query(sql, &[&schedules]).await?.iter().map(|row| get(row, "schedule_id")).collect()
}
