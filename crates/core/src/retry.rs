//! What follows an attempt that did not succeed.

use belfry_time::{SignedDuration, Timestamp};

use crate::definition::Retry;
use crate::model::{Reason, RunId, RunState};

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It succeeded.
    Completed,
    /// It failed; some failures are known to be for good.
    Failed {
        /// Why.
        reason: Reason,
        /// Whether another attempt could help.
        retryable: bool,
    },
    /// It was ended on request.
    Cancelled(Reason),
    /// Its node is shutting down; the attempt does not count.
    Shutdown,
    /// Its program was never executed, and the run is not to blame; the attempt does not count.
    NotStarted,
}

/// What becomes of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It has ended.
    End {
        /// A terminal state.
        state: RunState,
        /// Why, where the state does not say.
        reason: Option<Reason>,
    },
    /// It waits for its next attempt, and holds no slot meanwhile.
    Retry {
        /// When that may start.
        at: Timestamp,
    },
    /// It goes back to where it was before the claim; the attempt does not count.
    Return,
    /// The same, and it starts at an instant at the earliest: its window is closed, or its breaker open.
    Wait {
        /// When it is looked at again.
        at: Timestamp,
    },
}

/// Decides what becomes of a run whose attempt number `attempt` (from 1) of `max_attempts` has ended.
pub fn verdict(
    outcome: Outcome,
    run: RunId,
    attempt: u32,
    max_attempts: u32,
    retry: &Retry,
    now: Timestamp,
) -> Verdict {
    match outcome {
        Outcome::Completed => Verdict::End { state: RunState::Completed, reason: None },
        Outcome::Cancelled(reason) => Verdict::End { state: RunState::Cancelled, reason: Some(reason) },
        // `max_attempts` is 1, and that attempt has started.
        Outcome::Shutdown if max_attempts <= 1 => {
            Verdict::End { state: RunState::Failed, reason: Some(Reason::Shutdown) }
        }
        Outcome::Shutdown | Outcome::NotStarted => Verdict::Return,
        Outcome::Failed { retryable: true, .. } if attempt < max_attempts => {
            let delay =
                SignedDuration::from_millis(
                    delay_ms(retry, attempt.saturating_sub(1), spread(run, attempt)) as i64
                );
            match now.checked_add(delay) {
                Ok(at) => Verdict::Retry { at },
                Err(_) => Verdict::End { state: RunState::Failed, reason: Some(Reason::Error) },
            }
        }
        Outcome::Failed { reason, .. } => Verdict::End { state: RunState::Failed, reason: Some(reason) },
    }
}

/// The delay before retry `n` (from 0): base × 2ⁿ, at most the longest, ± 25 %. `spread` is 0 to 10,000.
pub fn delay_ms(retry: &Retry, n: u32, spread: u32) -> u64 {
    let factor = 1u64.checked_shl(n.min(63)).unwrap_or(u64::MAX);
    let delay = retry.base_ms.saturating_mul(factor).min(retry.max_delay_ms).min(u64::MAX / 20_000);
    delay * (7_500 + u64::from(spread.min(10_000)) / 2) / 10_000
}

/// A number from 0 to 10,000 that is the same for the same attempt.
fn spread(run: RunId, attempt: u32) -> u32 {
    let mut x = run.0.as_u128() as u64 ^ (u64::from(attempt) << 32);
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    (((x >> 32) * 10_001) >> 32) as u32
}
