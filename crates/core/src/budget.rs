//! The failure budget of an agent: at most so many failed attempts per period.

use belfry_time::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::definition::Budget as Policy;

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
    let budget = budget.filter(|budget| budget.failures >= policy.max)?;
    Some(end(&budget, policy)).filter(|until| now < *until)
}

/// The budget after a failed attempt.
pub fn after_failure(budget: Option<Budget>, policy: &Policy, now: Timestamp) -> Budget {
    match budget {
        Some(budget) if now < end(&budget, policy) => {
            Budget { failures: budget.failures.saturating_add(1), ..budget }
        }
        _ => Budget { period_start: now, failures: 1 },
    }
}

fn end(budget: &Budget, policy: &Policy) -> Timestamp {
    let period = SignedDuration::from_millis(i64::try_from(policy.period_ms).unwrap_or(i64::MAX));
    budget.period_start.saturating_add(period).unwrap_or(Timestamp::MAX)
}
