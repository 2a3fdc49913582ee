//! The failure budget of an agent: at most so many failed attempts per period.

use belfry_time::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::definition::Budget as Policy;
use crate::edit::is_of_later_clock;

/// What is used of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Budget {
    /// The first failure since the last clear.
    pub period_start: Timestamp,
    /// Failed attempts since then.
    pub failures: u32,
}

/// When the agent may run again, if its budget is used up.
pub fn exhausted_until(budget: Option<Budget>, policy: &Policy, now: Timestamp) -> Option<Timestamp> {
    let budget = budget.filter(|budget| budget.failures >= policy.max && lasts(budget, policy, now))?;
    Some(end(&budget, policy))
}

/// The budget after a failed attempt.
pub fn after_failure(budget: Option<Budget>, policy: &Policy, now: Timestamp) -> Budget {
    match budget {
        Some(budget) if lasts(&budget, policy, now) => {
            Budget { failures: budget.failures.saturating_add(1), ..budget }
        }
        _ => Budget { period_start: now, failures: 1 },
    }
}

/// Whether the period of a budget has not ended. One that began by a clock that was set back since has.
pub fn lasts(budget: &Budget, policy: &Policy, now: Timestamp) -> bool {
    now < end(budget, policy) && !is_of_later_clock(budget.period_start, now)
}

/// When the period of a budget ends.
pub fn end(budget: &Budget, policy: &Policy) -> Timestamp {
    let period = SignedDuration::from_millis(i64::try_from(policy.period_ms).unwrap_or(i64::MAX));
    budget.period_start.saturating_add(period).unwrap_or(Timestamp::MAX)
}
