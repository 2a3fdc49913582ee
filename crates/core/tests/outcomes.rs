//! Retry, breaker, budget and the states of a run.

#![allow(clippy::unwrap_used)]

use belfry_core::breaker::{Admits, Breaker, State, TransitionReason};
use belfry_core::budget;
use belfry_core::definition::{Breaker as BreakerPolicy, Budget as BudgetPolicy, Retry};
use belfry_core::retry::{Outcome, Verdict, delay_ms, verdict};
use belfry_core::{Reason, RunId, RunState};
use belfry_time::{SignedDuration, Timestamp};

fn at(minute: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + minute * 60).unwrap()
}

fn run(n: u128) -> RunId {
    RunId(uuid::Uuid::from_u128(n))
}

const POLICY: BreakerPolicy = BreakerPolicy { threshold: 3, reset_after_ms: 30 * 60_000 };

#[test]
fn delays_double_up_to_the_longest_within_a_quarter() {
    let retry = Retry::default();
    assert_eq!(
        [0, 1, 2, 3, 4, 10].map(|n| delay_ms(&retry, n, 5_000)),
        [2_000, 4_000, 8_000, 16_000, 30_000, 30_000]
    );
    assert_eq!((delay_ms(&retry, 0, 0), delay_ms(&retry, 0, 10_000)), (1_500, 2_500));
    for n in [63, 64, 1_000_000, u32::MAX] {
        assert_eq!(delay_ms(&retry, n, 5_000), 30_000);
    }
    let huge = Retry { max: 1, base_ms: u64::MAX, max_delay_ms: u64::MAX };
    assert!(delay_ms(&huge, u32::MAX, 10_000) > 0);
}

#[test]
fn a_failed_attempt_is_retried_until_there_are_no_more() {
    let failed = Outcome::Failed { reason: Reason::ExitCode, retryable: true };
    let verdict = |outcome, attempt, max| verdict(outcome, run(7), attempt, max, &Retry::default(), at(0));
    for (attempt, delay) in [(1, 2_000.0), (2, 4_000.0), (3, 8_000.0)] {
        let Verdict::Retry { at: retry_at } = verdict(failed, attempt, 4) else { panic!() };
        let ratio = retry_at.duration_since(at(0)).as_millis() as f64 / delay;
        assert!((0.75..=1.25).contains(&ratio), "{ratio}");
        assert_eq!(verdict(failed, attempt, 4), verdict(failed, attempt, 4));
    }
    let end = |state, reason| Verdict::End { state, reason };
    assert_eq!(verdict(failed, 4, 4), end(RunState::Failed, Some(Reason::ExitCode)));
    assert_eq!(
        verdict(Outcome::Failed { reason: Reason::Timeout, retryable: false }, 1, 4),
        end(RunState::Failed, Some(Reason::Timeout))
    );
    assert_eq!(verdict(Outcome::Completed, 1, 4), end(RunState::Completed, None));
    assert_eq!(
        verdict(Outcome::Cancelled(Reason::Requested), 1, 4),
        end(RunState::Cancelled, Some(Reason::Requested))
    );
    assert_eq!(verdict(Outcome::Shutdown, 1, 4), Verdict::Return);
    assert_eq!(verdict(Outcome::Shutdown, 1, 1), end(RunState::Failed, Some(Reason::Shutdown)));
    for (attempt, max) in [(1, 1), (1, 4), (4, 4)] {
        assert_eq!(verdict(Outcome::NotStarted, attempt, max), Verdict::Return);
    }
}

#[test]
fn the_breaker_opens_on_the_third_failure_in_a_row() {
    let mut breaker = Breaker::default();
    for (n, state) in [
        RunState::Failed,
        RunState::Failed,
        RunState::Completed,
        RunState::Failed,
        RunState::Cancelled,
        RunState::Failed,
    ]
    .into_iter()
    .enumerate()
    {
        let (next, transition) = breaker.ended(&POLICY, run(n as u128), state, at(0));
        assert_eq!((next.state, transition), (State::Closed, None));
        breaker = next;
    }
    assert_eq!(breaker.failures, 2);
    let (open, transition) = breaker.ended(&POLICY, run(9), RunState::Failed, at(1));
    let transition = transition.unwrap();
    assert_eq!((open.state, open.failures, open.opened_at), (State::Open, 3, Some(at(1))));
    assert_eq!(
        (transition.from, transition.to, transition.failures, transition.reason),
        (State::Closed, State::Open, 3, TransitionReason::FailureThreshold)
    );
    assert_eq!((open.admits(&POLICY, at(30)), open.admits(&POLICY, at(31))), (Admits::No, Admits::Probe));
}

#[test]
fn one_probe_decides() {
    let open = Breaker { state: State::Open, failures: 3, opened_at: Some(at(0)), probe: None };
    let (half, transition) = open.probing(run(1), at(40));
    assert_eq!(
        (half.state, transition.unwrap().reason),
        (State::HalfOpen, TransitionReason::CooldownElapsed)
    );
    assert_eq!(half.admits(&POLICY, at(100)), Admits::No);
    let (closed, transition) = half.ended(&POLICY, run(1), RunState::Completed, at(41));
    assert_eq!((closed, transition.unwrap().reason), (Breaker::default(), TransitionReason::Success));
    let (reopened, transition) = half.ended(&POLICY, run(1), RunState::Failed, at(41));
    assert_eq!(
        (reopened.state, reopened.opened_at, transition.unwrap().to),
        (State::Open, Some(at(41)), State::Open)
    );
    // Another run, a manual one, decides nothing; a cancelled probe makes room for the next.
    assert_eq!(half.ended(&POLICY, run(2), RunState::Completed, at(41)).0.state, State::HalfOpen);
    assert_eq!(
        half.ended(&POLICY, run(1), RunState::Cancelled, at(41)).0.admits(&POLICY, at(41)),
        Admits::Probe
    );
    let (reset, transition) = half.reset(at(50));
    assert_eq!((reset, transition.unwrap().reason), (Breaker::default(), TransitionReason::ManualReset));
}

#[test]
fn a_budget_counts_from_its_first_failure_and_starts_again() {
    let policy = BudgetPolicy { max: 2, period_ms: 60 * 60_000 };
    let first = budget::after_failure(None, &policy, at(0));
    assert_eq!(budget::exhausted_until(Some(first), &policy, at(1)), None);
    let second = budget::after_failure(Some(first), &policy, at(50));
    assert_eq!(budget::exhausted_until(Some(second), &policy, at(51)), Some(at(60)));
    assert_eq!(budget::exhausted_until(Some(second), &policy, at(60)), None);
    let third = budget::after_failure(Some(second), &policy, at(60));
    assert_eq!((third.period_start, third.failures), (at(60), 1));
    assert_eq!(budget::exhausted_until(None, &policy, at(0)), None);
    assert!(at(60).duration_since(at(0)) == SignedDuration::from_hours(1));
}

#[test]
fn a_clock_that_was_set_back_prolongs_neither_breaker_nor_budget() {
    let open = Breaker { state: State::Open, failures: 3, opened_at: Some(at(60)), probe: None };
    assert_eq!(open.admits(&POLICY, at(89)), Admits::No);
    assert_eq!(
        open.admits(&POLICY, at(59)),
        Admits::No,
        "clocks of several nodes differ by less than a minute"
    );
    assert_eq!(open.admits(&POLICY, at(50)), Admits::Probe, "nobody knows for how long it has been open");
    let policy = BudgetPolicy { max: 1, period_ms: 3_600_000 };
    let used = budget::after_failure(None, &policy, at(60));
    assert_eq!(budget::exhausted_until(Some(used), &policy, at(59)), Some(at(120)));
    assert_eq!(budget::exhausted_until(Some(used), &policy, at(50)), None);
    assert_eq!(
        budget::after_failure(Some(used), &policy, at(50)).period_start,
        at(50),
        "another period begins"
    );
}

#[test]
fn terminal_states_absorb() {
    let legal: Vec<_> = RunState::ALL
        .iter()
        .flat_map(|from| {
            RunState::ALL.iter().filter(|to| from.may_become(**to)).map(move |to| format!("{from} -> {to}"))
        })
        .collect();
    assert_eq!(
        legal,
        [
            "pending -> running",
            "pending -> cancelled",
            "running -> pending",
            "running -> completed",
            "running -> failed",
            "running -> cancelled"
        ]
    );
}
