//! What becomes of a request from outside: a run, or a reason why not. The same rules as for a tick, but nothing is missed
//! and nothing is counted.

use crate::breaker::Admits;
use crate::check::Status;
use crate::definition::{IfRunning, Options};
use crate::model::SkipReason;
use crate::plan::Facts;

/// Why a request makes no run; the first check that fails names it.
pub fn refusal(options: &Options, status: &Status, facts: &Facts) -> Option<SkipReason> {
    match status {
        Status::Active => {}
        Status::Paused { .. } | Status::Disabled => return Some(SkipReason::Disabled),
        Status::Invalid { .. } => return Some(SkipReason::Invalid),
        Status::Exhausted => return Some(SkipReason::Exhausted),
    }
    if facts.breaker == Admits::No {
        return Some(SkipReason::CircuitOpen);
    }
    if facts.budget_exhausted {
        return Some(SkipReason::BudgetExhausted);
    }
    match options.if_running {
        IfRunning::Skip if facts.live > 0 => Some(SkipReason::AlreadyRunning),
        IfRunning::Queue if facts.pending >= options.max_pending => Some(SkipReason::QueueFull),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_check_that_fails_names_the_reason() {
        let queue = |max_pending| Options { if_running: IfRunning::Queue, max_pending, ..Options::default() };
        let allow = Options { if_running: IfRunning::Allow, ..Options::default() };
        let busy = Facts { live: 1, pending: 1, ..Facts::CLEAR };
        let open = Facts { breaker: Admits::No, budget_exhausted: true, ..busy };
        let spent = Facts { budget_exhausted: true, ..busy };
        let paused = Status::Paused { reason: None, until: None };
        let table = [
            (Options::default(), Status::Active, Facts::CLEAR, None),
            (Options::default(), paused, open, Some(SkipReason::Disabled)),
            (Options::default(), Status::Invalid { reason: String::new() }, open, Some(SkipReason::Invalid)),
            (Options::default(), Status::Active, open, Some(SkipReason::CircuitOpen)),
            (Options::default(), Status::Active, spent, Some(SkipReason::BudgetExhausted)),
            (Options::default(), Status::Active, busy, Some(SkipReason::AlreadyRunning)),
            (queue(1), Status::Active, busy, Some(SkipReason::QueueFull)),
            (queue(2), Status::Active, busy, None),
            (allow, Status::Active, busy, None),
        ];
        for (options, status, facts, reason) in table {
            assert_eq!(refusal(&options, &status, &facts), reason, "{status:?} {facts:?}");
        }
    }
}
