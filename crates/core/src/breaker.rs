//! The circuit breaker of an agent's command: closed, open, and one probe in between.

use belfry_time::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::broken::{self, Broken};
use crate::definition::Breaker as Policy;
use crate::edit::is_of_later_clock;
use crate::model::{RunId, RunState, Trigger};

/// Where a breaker stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Breaker {
    /// Its state.
    pub state: State,
    /// Consecutive failed runs.
    pub failures: u32,
    /// When it opened last; kept while it is not closed.
    pub opened_at: Option<Timestamp>,
    /// The one run that was let through while half open.
    pub probe: Option<RunId>,
}

/// `closed`, `open`, `half_open`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(as = BreakerState))]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Runs pass.
    #[default]
    Closed,
    /// No run passes.
    Open,
    /// One run has passed, and decides.
    HalfOpen,
}

impl State {
    /// The stable name.
    pub fn as_str(self) -> &'static str {
        match self {
            State::Closed => "closed",
            State::Open => "open",
            State::HalfOpen => "half_open",
        }
    }
}

/// A change of state, as history keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transition {
    /// When.
    pub at: Timestamp,
    /// Before.
    pub from: State,
    /// After.
    pub to: State,
    /// Consecutive failures at that moment.
    pub failures: u32,
    /// Why.
    pub reason: TransitionReason,
    /// The run that did it.
    pub run: Option<RunId>,
}

/// Why a breaker changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum TransitionReason {
    /// Too many failures in a row, or a failed probe.
    FailureThreshold,
    /// The probe succeeded.
    Success,
    /// It was open long enough for a probe.
    CooldownElapsed,
    /// A person closed it, or removed its policy.
    ManualReset,
}

impl TransitionReason {
    /// The stable name.
    pub fn as_str(self) -> &'static str {
        match self {
            TransitionReason::FailureThreshold => "failure_threshold",
            TransitionReason::Success => "success",
            TransitionReason::CooldownElapsed => "cooldown_elapsed",
            TransitionReason::ManualReset => "manual_reset",
        }
    }
}

/// Whether a breaker lets a run through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admits {
    /// It does.
    Yes,
    /// It does, as the one probe: committing it must move the breaker with [`Breaker::probing`].
    Probe,
    /// It does not.
    No,
}

/// Whether a breaker is asked again when an attempt of a run starts, from 1: at the first attempt of what ticks and webhooks made.
/// It may have opened while the run waited.
pub fn is_gated(trigger: Trigger, attempt: u32) -> bool {
    let is_by_hand = matches!(trigger, Trigger::Manual | Trigger::Message | Trigger::Backfill);
    attempt == 1 && !is_by_hand
}

impl Breaker {
    /// Whether a run may pass.
    pub fn admits(&self, policy: &Policy, now: Timestamp) -> Admits {
        match (self.state, self.probe) {
            (State::Closed, _) => Admits::Yes,
            (State::HalfOpen, Some(_)) => Admits::No,
            (State::HalfOpen, None) => Admits::Probe,
            (State::Open, _) if self.is_cool(policy, now) => Admits::Probe,
            (State::Open, _) => Admits::No,
        }
    }

    /// Whether everybody passes.
    pub fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    /// Whether an open breaker has been open for long enough. Nobody knows how long that was if the clock was set back since.
    fn is_cool(&self, policy: &Policy, now: Timestamp) -> bool {
        self.opened_at.is_none_or(|opened| now >= end(opened, policy) || is_of_later_clock(opened, now))
    }

    /// Whether a run that was made before may start now. The probe may. Another run takes the place of a probe that has not
    /// started: the probe may wait for its turn behind that run.
    pub fn admits_waiting(
        &self,
        policy: &Policy,
        run: RunId,
        now: Timestamp,
        has_started: impl FnOnce(RunId) -> bool,
    ) -> Admits {
        if self.probe == Some(run) {
            return Admits::Yes;
        }
        Breaker { probe: self.probe.filter(|probe| has_started(*probe)), ..*self }.admits(policy, now)
    }

    /// The breaker as it counts now: a probe that no longer lives is none, and another may go.
    pub fn with_probe_if(self, lives: impl FnOnce(RunId) -> bool) -> Breaker {
        let is_probe = |run: &RunId| lives(*run) || broken::is(Broken::ProbeNeverFreed);
        Breaker { probe: self.probe.filter(is_probe), ..self }
    }

    /// The breaker with a probe on its way.
    pub fn probing(&self, run: RunId, now: Timestamp) -> (Breaker, Option<Transition>) {
        let next = Breaker { state: State::HalfOpen, probe: Some(run), ..*self };
        (next, self.transition(next, now, TransitionReason::CooldownElapsed, Some(run)))
    }

    /// The breaker after a run has ended. Cancelled runs do not count.
    pub fn ended(
        &self,
        policy: &Policy,
        run: RunId,
        state: RunState,
        now: Timestamp,
    ) -> (Breaker, Option<Transition>) {
        let is_probe = self.state == State::HalfOpen && self.probe == Some(run);
        match state {
            RunState::Completed if self.state == State::Closed || is_probe => {
                let next = Breaker::default();
                (next, self.transition(next, now, TransitionReason::Success, Some(run)))
            }
            RunState::Failed => {
                let failures = self.failures.saturating_add(1);
                let opens = is_probe || (self.state == State::Closed && failures >= policy.threshold);
                let next = if opens {
                    Breaker { state: State::Open, failures, opened_at: Some(now), probe: None }
                } else {
                    Breaker { failures, ..*self }
                };
                (next, self.transition(next, now, TransitionReason::FailureThreshold, Some(run)))
            }
            // A probe that was cancelled told nothing: another may go.
            RunState::Cancelled if is_probe && !broken::is(Broken::ProbeNeverFreed) => {
                (Breaker { probe: None, ..*self }, None)
            }
            _ => (*self, None),
        }
    }

    /// The breaker after a person closed it or removed its policy.
    pub fn reset(&self, now: Timestamp) -> (Breaker, Option<Transition>) {
        let next = Breaker::default();
        (next, self.transition(next, now, TransitionReason::ManualReset, None))
    }

    fn transition(
        &self,
        next: Breaker,
        at: Timestamp,
        reason: TransitionReason,
        run: Option<RunId>,
    ) -> Option<Transition> {
        let failures = next.failures.max(self.failures);
        (self.state != next.state).then_some(Transition {
            at,
            from: self.state,
            to: next.state,
            failures,
            reason,
            run,
        })
    }
}

/// When a breaker that was opened at an instant lets a probe through.
fn end(opened: Timestamp, policy: &Policy) -> Timestamp {
    let reset_after = SignedDuration::from_millis(i64::try_from(policy.reset_after_ms).unwrap_or(i64::MAX));
    opened.saturating_add(reset_after).unwrap_or(Timestamp::MAX)
}
