//! What becomes of the runs of a node that has died.
//!
//! What kills a node must not take the next one with it. A run that comes back from a dead node is *rescued*: a node starts
//! rescued runs one at a time (see [`crate::gate::admit`]). If that node dies as well, the rescued runs that it claimed since
//! its last renewal are *suspects*. A suspect is started alone: nothing else has started on that node for a moment
//! ([`watched_for`]), and nothing else starts until the suspect has ended, or has been watched for such a moment and the node
//! has renewed its lease since; then others have a turn before the next suspect. So at the third death one suspect is left, and
//! it is given up.
//!
//! Nodes also die for other reasons, and may do so again and again. So a node starts suspects only when it has lived for a
//! while ([`steady_after`]): then a death tells more of the suspect than of the node. It claims no rescued run when a renewal
//! is under way or comes within that moment, and keeps a slot for one meanwhile.

use std::time::Duration;

use crate::{Reason, RunState};

/// How long a node has lived when it starts a suspect, at most.
const STEADY_AFTER_MAX: Duration = Duration::from_secs(10);

/// How long a node with this lease has lived when it starts a suspect: as long as between two renewals, within a bound.
pub fn steady_after(lease: Duration) -> Duration {
    (lease / 3).min(STEADY_AFTER_MAX)
}

/// How long a suspect is watched after its start, at most.
const WATCHED_FOR_MAX: Duration = Duration::from_secs(2);

/// How long a node with this lease watches a suspect after its start, before it renews its lease and starts something else.
pub fn watched_for(lease: Duration) -> Duration {
    (lease / 6).min(WATCHED_FOR_MAX)
}

/// Which rescued runs a claim may start. It starts at most one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rescues {
    /// None: another rescued run has not started yet, or is watched.
    None,
    /// None yet, but one that is not a suspect in a moment: in each lane a slot is kept for the first of them, so that younger
    /// runs do not take all slots in that moment again and again.
    Soon,
    /// One that is not a suspect.
    Unsuspected,
    /// Any.
    Any,
}

impl Rescues {
    /// Whether a rescued run may start.
    pub fn allow(self, is_suspect: bool) -> bool {
        match self {
            Rescues::None | Rescues::Soon => false,
            Rescues::Unsuspected => !is_suspect,
            Rescues::Any => true,
        }
    }

    /// Whether a rescued run may start, or a slot is kept for it.
    pub fn reserve(self, is_suspect: bool) -> bool {
        self.allow(is_suspect) || self == Rescues::Soon && !is_suspect
    }
}

/// A run is given up when it is the suspect for this many deaths.
pub const SUSPICIONS_MAX: u32 = 2;

/// What is written as the error of a run that is given up.
pub const SUSPECT_ERROR: &str = "its node died right after starting it, twice; it is not started again";

/// What is written as the error of a run whose node died during its last attempt.
pub const ORPHANED_ERROR: &str = "its node died while it ran, and no attempt is left";

/// A run that was running under the dead node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Orphan<R> {
    /// The run.
    pub run: R,
    /// It must not wait for another attempt: it is to be cancelled, or its session was reset.
    pub cancel: Option<Reason>,
    /// The attempt that died.
    pub attempt: u32,
    /// Maximum number of attempts.
    pub max_attempts: u32,
    /// Of a rescued run: a number that grows with each claim of a rescued run and each renewal of the node.
    pub rescue: Option<i64>,
    /// How often it was the suspect before.
    pub suspicions: u32,
}

/// What becomes of an orphan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It ends.
    End {
        /// Failed or cancelled.
        state: RunState,
        /// Why.
        reason: Reason,
        /// In words; without, the error of an earlier attempt stays.
        error: Option<&'static str>,
    },
    /// It waits for its next attempt, as a rescued run.
    Back,
}

impl<R> Orphan<R> {
    /// Whether the node claimed it as a rescued run after its last renewal, which has this number.
    pub fn is_suspect(&self, renewal: i64) -> bool {
        self.rescue.is_some_and(|rescue| rescue > renewal)
    }

    /// How often it was the suspect, with this death of its node. A run that has outlived a renewal is suspect no longer.
    pub fn suspicions_after(&self, is_suspect: bool) -> u32 {
        if is_suspect { self.suspicions.saturating_add(1).min(SUSPICIONS_MAX) } else { 0 }
    }
}

/// What becomes of an orphan.
pub fn fate<R>(orphan: &Orphan<R>, is_suspect: bool) -> Fate {
    let failed = |error| Fate::End { state: RunState::Failed, reason: Reason::Orphaned, error };
    match orphan.cancel {
        Some(reason) => Fate::End { state: RunState::Cancelled, reason, error: None },
        None if is_suspect && orphan.suspicions + 1 >= SUSPICIONS_MAX => failed(Some(SUSPECT_ERROR)),
        None if orphan.attempt >= orphan.max_attempts => failed(Some(ORPHANED_ERROR)),
        None => Fate::Back,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orphan(run: u8, rescue: Option<i64>) -> Orphan<u8> {
        Orphan { run, cancel: None, attempt: 1, max_attempts: 20, rescue, suspicions: 0 }
    }

    #[test]
    fn rescued_runs_that_were_claimed_since_the_last_renewal_are_suspects() {
        let orphans = [orphan(1, Some(4)), orphan(2, Some(7)), orphan(3, Some(9)), orphan(4, None)];
        let suspects: Vec<u8> =
            orphans.iter().filter(|orphan| orphan.is_suspect(5)).map(|orphan| orphan.run).collect();
        assert_eq!(suspects, [2, 3]);
    }

    #[test]
    fn twice_suspect_is_failed_whatever_attempts_are_left() {
        let once = orphan(1, Some(1));
        let twice = Orphan { suspicions: 1, ..once };
        assert_eq!(fate(&once, true), Fate::Back);
        assert_eq!((once.suspicions_after(true), twice.suspicions_after(false)), (1, 0));
        assert_eq!(fate(&twice, false), Fate::Back);
        let given_up =
            Fate::End { state: RunState::Failed, reason: Reason::Orphaned, error: Some(SUSPECT_ERROR) };
        assert_eq!(fate(&twice, true), given_up);
    }

    #[test]
    fn others_come_back_while_they_have_attempts_and_were_not_cancelled() {
        let last = Orphan { attempt: 20, ..orphan(1, None) };
        let orphaned =
            Fate::End { state: RunState::Failed, reason: Reason::Orphaned, error: Some(ORPHANED_ERROR) };
        assert_eq!(fate(&last, false), orphaned);
        let cancelled = Orphan { cancel: Some(Reason::Requested), suspicions: 1, ..last };
        let end = Fate::End { state: RunState::Cancelled, reason: Reason::Requested, error: None };
        assert_eq!(fate(&cancelled, true), end);
    }
}
