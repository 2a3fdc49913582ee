//! Why a schedule runs or does not: every check with its words, in the order in which the planner takes them.

use belfry_time::{Allowed, Timestamp};
use serde::Serialize;

use crate::breaker::Admits;
use crate::definition::{IfRunning, Schedule};
use crate::model::SkipReason;
use crate::plan::{Facts, Standing};

/// Where a schedule stands as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Status {
    /// It ticks.
    Active,
    /// A person paused it.
    Paused {
        /// Why.
        reason: Option<String>,
        /// Until when; else until somebody resumes it.
        until: Option<Timestamp>,
    },
    /// `enabled: false`.
    Disabled,
    /// Its definition is wrong.
    Invalid {
        /// What is wrong.
        reason: String,
    },
    /// It has fired for the last time.
    Exhausted,
}

/// One check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// The reason it would give.
    pub check: &'static str,
    /// Whether it passed.
    pub ok: bool,
    /// In words.
    pub detail: String,
}

/// Takes all checks of a schedule at an instant. The first that is not ok is the reason why nothing runs then.
pub fn checks(
    schedule: &Schedule,
    status: &Status,
    standing: Option<&Standing>,
    facts: &Facts,
    now: Timestamp,
) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut take = |check: &'static str, ok: bool, detail: String| checks.push(Check { check, ok, detail });
    let ticked = schedule.timing.is_some();
    take(
        "unsupported_type",
        ticked,
        if ticked { "it ticks by itself".into() } else { "it runs on request only".into() },
    );
    let (paused, words) = match status {
        Status::Paused { reason, until } => {
            let why = reason.as_ref().map_or(String::new(), |reason| format!(" ({reason})"));
            let until = until.map_or_else(|| "until it is resumed".into(), |until| format!("until {until}"));
            (true, format!("paused{why} {until}"))
        }
        Status::Disabled => (true, "enabled is false".into()),
        _ => (false, "it is enabled".into()),
    };
    take(SkipReason::Disabled.as_str(), !paused, words);
    match status {
        Status::Invalid { reason } => take(SkipReason::Invalid.as_str(), false, reason.clone()),
        _ => take(SkipReason::Invalid.as_str(), true, "its definition is right".into()),
    }
    let exhausted = *status == Status::Exhausted;
    let words = if exhausted { "it has fired for the last time" } else { "it has ticks to come" };
    take(SkipReason::Exhausted.as_str(), !exhausted, words.into());
    let allowed = schedule.timing.as_ref().map_or(Allowed::Yes, |timing| timing.allows(now));
    let window = schedule.timing.as_ref().map_or(String::new(), |timing| timing.window().describe());
    let window = if window.is_empty() { "any time is allowed".into() } else { window };
    take(SkipReason::OutsideDay.as_str(), allowed != Allowed::NotOnThatDay, window.clone());
    take(SkipReason::OutsideWindow.as_str(), allowed != Allowed::NotAtThatTime, window);
    let words = match facts.breaker {
        Admits::Yes => "the breaker is closed",
        Admits::Probe => "the breaker is open, and lets one probe through",
        Admits::No => "the breaker is open",
    };
    take(SkipReason::CircuitOpen.as_str(), facts.breaker != Admits::No, words.into());
    let words =
        if facts.budget_exhausted { "the failure budget is used up" } else { "the failure budget has room" };
    take(SkipReason::BudgetExhausted.as_str(), !facts.budget_exhausted, words.into());
    let options = schedule.options();
    let skips = options.if_running == IfRunning::Skip && facts.live > 0;
    take(
        SkipReason::AlreadyRunning.as_str(),
        !skips,
        format!("{} live, if_running is {:?}", facts.live, options.if_running).to_lowercase(),
    );
    let full = options.if_running == IfRunning::Queue && facts.pending >= options.max_pending;
    take(SkipReason::QueueFull.as_str(), !full, format!("{} of {} wait", facts.pending, options.max_pending));
    let due = standing.map(|standing| standing.token.due_at);
    let words = match due {
        Some(due) if due > now => format!("due at {due}"),
        Some(due) => format!("due since {due}"),
        None => "waits for its run to end".into(),
    };
    take("not_due", due.is_some_and(|due| due <= now), words);
    checks
}
