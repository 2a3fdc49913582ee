//! Why a schedule runs or does not.

use belfry_core::breaker::Admits;
use belfry_core::budget;
use belfry_core::check::{self, Check};
use belfry_core::plan::Standing;
use belfry_core::{Facts, RunId, Schedule};
use belfry_store::{AnyStore, ScheduleRecord, Store};
use belfry_time::Timestamp;
use serde::Serialize;

use crate::error::Error;

/// What became of an instant of a schedule, or would become of it now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// It made a run.
    Fired,
    /// It made none, for a reason.
    Skipped,
    /// It went by while nobody was there.
    Missed,
    /// Nothing yet.
    Waiting,
}

/// Why a schedule runs or does not, at an instant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Why {
    /// The agent.
    pub agent: String,
    /// Its schedule.
    pub schedule: String,
    /// The instant.
    pub at: Timestamp,
    /// What became of it.
    pub decision: Decision,
    /// The first check that is not ok, or why the tick made no run.
    pub reason: Option<String>,
    /// The run it made.
    pub run_id: Option<RunId>,
    /// Every check.
    pub checks: Vec<Check>,
    /// In a sentence.
    pub words: String,
}

struct Known {
    record: ScheduleRecord,
    schedule: Schedule,
    facts: Facts,
}

async fn known(store: &AnyStore, name: &str, now: Timestamp) -> Result<Option<Known>, Error> {
    let record = store.schedule(name).await?.ok_or_else(|| Error::NotFound { name: name.to_owned() })?;
    let Ok(schedule) = record.definition.compile(name) else { return Ok(None) };
    let definitions = store.definitions(&[record.id]).await?;
    let agent =
        definitions.into_iter().next().flatten().map(|found| found.agent_definition).unwrap_or_default();
    let breaker = match &agent.breaker {
        Some(policy) => {
            let command = &schedule.options().command;
            store.breaker(record.agent, command).await?.breaker.admits(policy, now)
        }
        None => Admits::Yes,
    };
    let budget_exhausted = agent
        .budget
        .as_ref()
        .is_some_and(|policy| budget::exhausted_until(record.budget, policy, now).is_some());
    let facts =
        Facts { live: record.running + record.pending, pending: record.pending, breaker, budget_exhausted };
    Ok(Some(Known { record, schedule, facts }))
}

/// Takes all checks of a schedule now.
pub(crate) async fn checks(store: &AnyStore, name: &str, now: Timestamp) -> Result<Vec<Check>, Error> {
    match known(store, name, now).await? {
        Some(known) => Ok(known.checks(now)),
        None => {
            let record =
                store.schedule(name).await?.ok_or_else(|| Error::NotFound { name: name.to_owned() })?;
            let detail = record.definition.compile(name).err().unwrap_or_default();
            Ok(vec![Check { check: "invalid", ok: false, detail }])
        }
    }
}

impl Known {
    fn checks(&self, now: Timestamp) -> Vec<Check> {
        let standing = self.record.token.map(|token| Standing {
            token,
            origin: self.record.origin,
            open_skip: self.record.open_skip,
        });
        check::checks(&self.schedule, &self.record.status, standing.as_ref(), &self.facts, now)
    }
}

/// Why a schedule does or does not run now.
pub async fn why(store: &AnyStore, name: &str, now: Timestamp) -> Result<Why, Error> {
    let (agent, schedule) = name.split_once('/').unwrap_or((name, ""));
    let checks = checks(store, name, now).await?;
    let failed = checks.iter().find(|check| !check.ok);
    let reason = failed.map(|check| check.check.to_owned());
    let words = match failed {
        Some(check) => format!("It does not run now: {}.", check.detail),
        None => "It is due and nothing stands in its way: it runs now.".into(),
    };
    Ok(Why {
        agent: agent.into(),
        schedule: schedule.into(),
        at: now,
        decision: Decision::Waiting,
        reason,
        run_id: None,
        checks,
        words,
    })
}
