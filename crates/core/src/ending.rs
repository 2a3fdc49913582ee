//! The end of an attempt: what becomes of its run, of the breaker of its command, and of the failure budget of its agent.
//!
//! A store reads the facts under its locks, asks [`decide`] and writes what it says. What an attempt alone comes to is
//! decided before, in [`crate::retry`].

use belfry_time::{SignedDuration, Timestamp};

use crate::breaker::{Breaker, Transition};
use crate::broken::{self, Broken};
use crate::budget::{self, Budget};
use crate::definition;
use crate::model::{Reason, RunId, RunState, Trigger};
use crate::retry::Verdict;

/// A run whose attempt has ended, or that ends or comes back without one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// The run.
    pub run: RunId,
    /// What made it.
    pub trigger: Trigger,
    /// The number of its last attempt, from 1; 0 if it was never started.
    pub attempt: u32,
    /// What the attempt alone comes to.
    pub verdict: Verdict,
    /// Whether the attempt counts against the budget.
    pub failed: bool,
    /// Why it must not wait for another attempt: it is to be cancelled, or its session was reset.
    pub left_behind: Option<Reason>,
}

/// The policies of its agent, with what they have counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Books {
    /// The breaker of its command.
    pub breaker: Option<(definition::Breaker, Breaker)>,
    /// The failure budget, none where nothing is used of it.
    pub budget: Option<(definition::Budget, Option<Budget>)>,
}

/// What becomes of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// It has ended.
    End {
        /// A terminal state.
        state: RunState,
        /// Why, where the state does not say.
        reason: Option<Reason>,
    },
    /// It waits for its next attempt.
    Back {
        /// When that may start.
        at: Timestamp,
        /// Whether the attempt before counts.
        counted: bool,
    },
}

/// What becomes of the runs of the agent that wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    /// Nothing.
    Stay,
    /// The budget is used up: those that it holds start after this instant, see [`held_at`].
    Hold(Timestamp),
    /// The budget is cleared, and with it the back-off: they start now, but not before they are due.
    Free,
}

/// What to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ending {
    /// What becomes of the run.
    pub then: Then,
    /// The breaker, where it is another.
    pub breaker: Option<(Breaker, Option<Transition>)>,
    /// The budget, where another part of it is used.
    pub budget: Option<Option<Budget>>,
    /// What becomes of the agent's other runs.
    pub waiting: Waiting,
}

/// Decides what an end comes to.
pub fn decide(ended: &Ended, books: &Books, now: Timestamp) -> Ending {
    let verdict = match (ended.verdict, ended.left_behind) {
        (Verdict::Retry { .. } | Verdict::Return | Verdict::Wait { .. }, Some(reason)) => {
            Verdict::End { state: RunState::Cancelled, reason: Some(reason) }
        }
        (verdict, _) => verdict,
    };
    let is_retried = matches!(verdict, Verdict::Retry { .. });
    let succeeded = matches!(verdict, Verdict::End { state: RunState::Completed, .. });
    let (policy, before) = books.budget.unzip();
    let before = before.flatten();
    let after = match policy {
        Some(_) if is_retried && broken::is(Broken::BudgetIgnoresRetries) => before,
        Some(policy) if ended.failed => Some(budget::after_failure(before, &policy, now)),
        Some(_) if succeeded => None,
        _ => before,
    };
    let held_until = policy.and_then(|policy| budget::exhausted_until(after, &policy, now));
    let back = |at: Timestamp, counted: bool| {
        let attempts = ended.attempt.saturating_sub(u32::from(!counted));
        let held = held_until.filter(|_| holds(ended.trigger, attempts));
        Then::Back { at: held.map_or(at, |until| held_at(at, until, now)), counted }
    };
    let then = match verdict {
        Verdict::End { state, reason } => Then::End { state, reason },
        Verdict::Retry { at } => back(at, !broken::is(Broken::RetryNotCounted)),
        Verdict::Return => back(now, broken::is(Broken::GiveBackCounts)),
        Verdict::Wait { at } => back(at, false),
    };
    let breaker = books.breaker.and_then(|(policy, breaker)| match then {
        Then::End { state, .. } => {
            let (next, transition) = breaker.ended(&policy, ended.run, state, now);
            (next != breaker).then_some((next, transition))
        }
        Then::Back { .. } => None,
    });
    let waiting = match policy {
        Some(policy) => waiting((before, &policy), (after, &policy), now),
        None => Waiting::Stay,
    };
    Ending { then, breaker, budget: (after != before).then_some(after), waiting }
}

/// What an edit of the policy does: what is used of the budget then, and what becomes of the runs that wait.
pub fn redefine(
    used: Option<Budget>,
    old: Option<&definition::Budget>,
    new: Option<&definition::Budget>,
    now: Timestamp,
) -> (Option<Budget>, Waiting) {
    match (old, new) {
        (Some(old), Some(new)) => (used, waiting((used, old), (used, new), now)),
        (_, None) if used.is_some() => (None, Waiting::Free),
        _ => (used, Waiting::Stay),
    }
}

fn waiting(
    (before, old): (Option<Budget>, &definition::Budget),
    (after, new): (Option<Budget>, &definition::Budget),
    now: Timestamp,
) -> Waiting {
    let was_held = budget::exhausted_until(before, old, now);
    match budget::exhausted_until(after, new, now) {
        Some(until) if was_held.is_none() => Waiting::Hold(until),
        None if was_held.is_some() || before.is_some() && after.is_none() => Waiting::Free,
        _ => Waiting::Stay,
    }
}

/// Whether an exhausted budget holds a waiting run that was started so often. What a person asks for passes once.
pub fn holds(trigger: Trigger, attempts: u32) -> bool {
    let is_by_hand = matches!(trigger, Trigger::Manual | Trigger::Message | Trigger::Backfill);
    attempts > 0 || !is_by_hand
}

/// When a run that could start at an instant may start if the budget holds it until another: so much later as it had to
/// wait anyway, so that retries do not start all at once.
pub fn held_at(at: Timestamp, until: Timestamp, now: Timestamp) -> Timestamp {
    let delay = at.duration_since(now).max(SignedDuration::ZERO);
    until.saturating_add(delay).unwrap_or(Timestamp::MAX)
}

/// When a run that comes back may start again, if that is to be at an instant, and by which clock that is said. It was due
/// before it ran: if that lies ahead, the clock was set back since, and both are said by the clock of before, as all else of
/// the run is. The next claim moves all of it.
pub fn back_at(due_at: Timestamp, at: Timestamp, now: Timestamp) -> (Timestamp, Timestamp) {
    if broken::is(Broken::BackByThisClock) {
        return (at.max(due_at), now);
    }
    let ahead = due_at.duration_since(now).max(SignedDuration::ZERO);
    let not_before = at.saturating_add(ahead).unwrap_or(Timestamp::MAX);
    (not_before.max(due_at), now.max(due_at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::breaker::State;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + seconds).unwrap_or(Timestamp::MIN)
    }

    fn run() -> RunId {
        RunId(uuid::Uuid::from_u128(1))
    }

    fn failed(trigger: Trigger, attempt: u32, retry_at: Timestamp) -> Ended {
        let verdict = Verdict::Retry { at: retry_at };
        Ended { run: run(), trigger, attempt, verdict, failed: true, left_behind: None }
    }

    fn used(failures: u32) -> Books {
        let policy = definition::Budget { max: 2, period_ms: 60_000 };
        let used = (failures > 0).then_some(Budget { period_start: at(0), failures });
        Books { budget: Some((policy, used)), ..Books::default() }
    }

    #[test]
    fn the_failure_that_uses_up_the_budget_holds_what_waits_and_its_own_retry() {
        let ended = failed(Trigger::Schedule, 1, at(12));
        let first = decide(&ended, &used(0), at(10));
        assert_eq!(first.then, Then::Back { at: at(12), counted: true });
        assert_eq!(
            (first.budget, first.waiting),
            (Some(Some(Budget { period_start: at(10), failures: 1 })), Waiting::Stay)
        );
        let second = decide(&ended, &used(1), at(10));
        assert_eq!(
            second.then,
            Then::Back { at: at(62), counted: true },
            "the end of the period, and its own delay"
        );
        assert_eq!(second.waiting, Waiting::Hold(at(60)));
        let third = decide(&ended, &used(2), at(10));
        assert_eq!((third.then, third.waiting), (second.then, Waiting::Stay), "what waits is held already");
        let late = decide(&failed(Trigger::Schedule, 1, at(62)), &used(2), at(60));
        assert_eq!(late.then, Then::Back { at: at(62), counted: true }, "another period begins");
    }

    #[test]
    fn what_a_person_asks_for_passes_once() {
        for trigger in [Trigger::Manual, Trigger::Message, Trigger::Backfill] {
            assert!(!holds(trigger, 0) && holds(trigger, 1), "{trigger}");
        }
        for trigger in [Trigger::Schedule, Trigger::CatchUp, Trigger::Webhook] {
            assert!(holds(trigger, 0), "{trigger}");
        }
        let returned = Ended { verdict: Verdict::Return, failed: false, ..failed(Trigger::Manual, 1, at(0)) };
        let back = decide(&returned, &used(2), at(10)).then;
        assert_eq!(back, Then::Back { at: at(10), counted: false }, "it was never started");
        let retried = Ended { attempt: 2, ..returned };
        assert_eq!(decide(&retried, &used(2), at(10)).then, Then::Back { at: at(60), counted: false });
    }

    #[test]
    fn a_success_clears_the_budget_and_frees_what_waits() {
        let done = Verdict::End { state: RunState::Completed, reason: None };
        let ended = Ended { verdict: done, failed: false, ..failed(Trigger::Manual, 1, at(0)) };
        for failures in [1, 2] {
            let ending = decide(&ended, &used(failures), at(10));
            assert_eq!((ending.budget, ending.waiting), (Some(None), Waiting::Free));
        }
        let ending = decide(&ended, &used(0), at(10));
        assert_eq!((ending.budget, ending.waiting), (None, Waiting::Stay));
    }

    #[test]
    fn an_edit_of_the_policy_holds_and_frees() {
        let policy = |max| definition::Budget { max, period_ms: 60_000 };
        let used = Some(Budget { period_start: at(0), failures: 2 });
        let (low, high) = (policy(2), policy(9));
        assert_eq!(redefine(used, Some(&low), Some(&high), at(10)), (used, Waiting::Free));
        assert_eq!(redefine(used, Some(&high), Some(&low), at(10)), (used, Waiting::Hold(at(60))));
        assert_eq!(redefine(used, Some(&high), Some(&low), at(60)), (used, Waiting::Stay));
        assert_eq!(redefine(used, Some(&low), None, at(10)), (None, Waiting::Free));
        assert_eq!(redefine(None, Some(&low), None, at(10)), (None, Waiting::Stay));
        assert_eq!(redefine(None, None, Some(&low), at(10)), (None, Waiting::Stay));
    }

    #[test]
    fn who_is_left_behind_ends_cancelled_and_tells_no_breaker() {
        let policy = definition::Breaker { threshold: 1, reset_after_ms: 1_000 };
        let books = Books { breaker: Some((policy, Breaker::default())), ..used(0) };
        let ended = Ended { left_behind: Some(Reason::Requested), ..failed(Trigger::Schedule, 1, at(12)) };
        let ending = decide(&ended, &books, at(10));
        assert_eq!(ending.then, Then::End { state: RunState::Cancelled, reason: Some(Reason::Requested) });
        assert_eq!(ending.breaker, None);
        let last = Verdict::End { state: RunState::Failed, reason: Some(Reason::Error) };
        let ended = Ended { verdict: last, ..ended };
        let ending = decide(&ended, &books, at(10));
        assert_eq!(ending.then, Then::End { state: RunState::Failed, reason: Some(Reason::Error) });
        assert_eq!(ending.breaker.map(|(breaker, _)| breaker.state), Some(State::Open));
    }
}
