//! Live runs that an overlap policy looks at: `core::overlap` as a condition on `live`.

use std::collections::HashMap;

use belfry_core::definition::Scope;
use belfry_core::overlap::Overlap;
use belfry_core::{AgentId, Reason, RunId, ScheduleId};
use belfry_time::Timestamp;
use uuid::Uuid;

use super::Postgres;
use super::connection::{Fault, Tx};
use super::finish::mark;
use super::rows::{get, small};

/// Live runs of schedules, or of agents without those of sessions, whose trigger is a message. Both look runs up by their
/// schedules.
macro_rules! of {
    (schedules) => {
        "schedule_id = any($1)"
    };
    (agents) => {
        "schedule_id = any(array(select id from schedules where agent_id = any($1))) and trigger <> 4"
    };
}

/// [`Overlap::is_queued`]: it is not running, and its trigger is not that of a catch-up.
macro_rules! queued {
    () => {
        "(state <> 2 and trigger <> 1)"
    };
}

/// Those that one policy looks at, in the order of their ids, and whether `max_pending` counts each.
pub(super) async fn in_scope(tx: &mut Tx<'_>, overlap: Overlap<'_>) -> Result<Vec<(RunId, bool)>, Fault> {
    let found = match overlap.scope {
        Scope::Schedule => {
            let sql = concat!(
                "select id, ",
                queued!(),
                " as is_queued from live where ",
                of!(schedules),
                " order by id"
            );
            tx.query(sql, &[&vec![overlap.schedule]]).await?
        }
        Scope::Command | Scope::Agent => {
            let sql = concat!(
                "select id, ",
                queued!(),
                " as is_queued from live where ",
                of!(agents),
                " and ($2::text is null or command = $2) order by id"
            );
            let command = (overlap.scope == Scope::Command).then_some(overlap.command);
            tx.query(sql, &[&vec![overlap.agent], &command]).await?
        }
    };
    found.iter().map(|row| Ok((RunId(get(row, "id")?), get(row, "is_queued")?))).collect()
}

impl Postgres {
    /// Cancels runs for one that takes their place: running ones are marked, waiting ones end.
    pub(super) async fn cancel_all(
        &self,
        tx: &mut Tx<'_>,
        now: Timestamp,
        runs: &[(RunId, bool)],
    ) -> Result<(), Fault> {
        let runs: Vec<Uuid> = runs.iter().map(|(run, _)| run.0).collect();
        mark(tx, &runs, Reason::Overlap).await?;
        self.end_waiting(tx, now, &runs, Reason::Overlap).await?;
        // Those that were claimed before we had their gates.
        mark(tx, &runs, Reason::Overlap).await?;
        Ok(())
    }
}

/// Live runs and those of them that `max_pending` counts, of many schedules at once.
#[derive(Default)]
pub(super) struct Lives {
    schedules: HashMap<ScheduleId, (u32, u32)>,
    commands: HashMap<AgentId, Vec<(String, u32, u32)>>,
}

impl Lives {
    /// Counts what these policies look at.
    pub(super) async fn count(tx: &mut Tx<'_>, overlaps: &[Overlap<'_>]) -> Result<Lives, Fault> {
        let mut lives = Lives::default();
        let (own, shared): (Vec<&Overlap<'_>>, Vec<&Overlap<'_>>) =
            overlaps.iter().partition(|overlap| overlap.scope == Scope::Schedule);
        if !own.is_empty() {
            let sql = concat!(
                "select schedule_id, count(*) as live, count(*) filter (where ",
                queued!(),
                ") as pending from live where ",
                of!(schedules),
                " group by schedule_id"
            );
            let schedules: Vec<ScheduleId> = own.iter().map(|overlap| overlap.schedule).collect();
            for row in tx.query(sql, &[&schedules]).await? {
                let counts = (small(get(&row, "live")?), small(get(&row, "pending")?));
                lives.schedules.insert(get(&row, "schedule_id")?, counts);
            }
        }
        if !shared.is_empty() {
            let sql = concat!(
                "select agent_id, command, count(*) as live, count(*) filter (where ",
                queued!(),
                ") as pending from live where ",
                of!(agents),
                " group by agent_id, command"
            );
            let mut agents: Vec<AgentId> = shared.iter().map(|overlap| overlap.agent).collect();
            agents.sort_unstable();
            agents.dedup();
            for row in tx.query(sql, &[&agents]).await? {
                let counts = (get(&row, "command")?, small(get(&row, "live")?), small(get(&row, "pending")?));
                lives.commands.entry(get(&row, "agent_id")?).or_default().push(counts);
            }
        }
        Ok(lives)
    }

    /// Those that one of the policies looks at.
    pub(super) fn of(&self, overlap: Overlap<'_>) -> (u32, u32) {
        if overlap.scope == Scope::Schedule {
            return self.schedules.get(&overlap.schedule).copied().unwrap_or_default();
        }
        let commands = self.commands.get(&overlap.agent).into_iter().flatten();
        commands
            .filter(|(command, ..)| overlap.scope == Scope::Agent || command == overlap.command)
            .fold((0, 0), |sum, (_, live, pending)| (sum.0 + live, sum.1 + pending))
    }
}

/// When the last ended run of each schedule was started, or ended where it never started, for schedules that share a
/// scope with others.
pub(super) async fn last_starts(
    tx: &mut Tx<'_>,
    overlaps: &[Overlap<'_>],
) -> Result<HashMap<ScheduleId, Timestamp>, Fault> {
    let shared = overlaps.iter().filter(|overlap| overlap.scope != Scope::Schedule);
    let shared: Vec<ScheduleId> = shared.map(|overlap| overlap.schedule).collect();
    if shared.is_empty() {
        return Ok(HashMap::new());
    }
    let sql = "select s.schedule_id, coalesce(h.started_at, h.finished_at) as last_start from schedule_state s \
               join history h on h.id = s.last_run where s.schedule_id = any($1)";
    let found = tx.query(sql, &[&shared]).await?;
    found.iter().map(|row| Ok((get(row, "schedule_id")?, get(row, "last_start")?))).collect()
}
