//! What a node and its keeper say to each other: one JSON object per line.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::processes::ChildRecord;

/// From the node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ToKeeper {
    /// First of all, once.
    Hello(Margins),
    /// The lease is good until then, by [`now_ms`].
    Lease { until_ms: u64 },
    /// A child exists and waits to be told to go.
    Add { number: u64, record: ChildRecord },
    /// None of a child's processes lives.
    Remove { child_id: String },
    /// Asks for an answer, which comes after all that was said before.
    Ping { number: u64 },
}

/// From the keeper.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromKeeper {
    /// The answer to the hello.
    Ready,
    /// A child is known; or just an answer.
    Added { number: u64 },
    /// The lease is too short for a new child.
    Refused { number: u64 },
    /// A child is about to be ended, because the lease is.
    Ending { child_id: String },
}

/// When the keeper acts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Margins {
    pub term_before_ms: u64,
    pub kill_before_ms: u64,
    pub gone_grace_ms: u64,
}

/// Milliseconds on the clock that node and keeper share. It does not jump, and goes on while the machine sleeps, as the
/// lease does.
pub(super) fn now_ms() -> u64 {
    #[cfg(target_os = "linux")]
    let clock = nix::time::ClockId::CLOCK_BOOTTIME;
    #[cfg(not(target_os = "linux"))]
    let clock = nix::time::ClockId::CLOCK_MONOTONIC;
    let time = clock.now().map(Duration::from).unwrap_or_default();
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
