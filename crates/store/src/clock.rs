//! Notices when the clock of this process was set back.

use std::sync::atomic::{AtomicI64, Ordering};

use belfry_core::edit::CLOCK_BACK_MIN;
use belfry_time::Timestamp;

/// Callers on several threads bring their instants out of order by less than this.
const OUT_OF_ORDER_MICROS: i64 = 50_000;

/// The instant of the last claim. A run that waits at a gate is not looked at again before somebody leaves that gate; what
/// held it there may no longer be due by a clock that was set back. A run that was made before that, and has not started, is to
/// wait no longer than it would have: see [`Clock::may_be_back`].
#[derive(Debug)]
pub(crate) struct LastClaim(AtomicI64);

/// How the clock of a claim stands to that of the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clock {
    /// There was no claim before: it may have been set while this process did not run.
    Unknown,
    /// It was set back.
    Back,
    /// It went on.
    On,
}

impl Clock {
    /// If the clock may have been set back: the instant after which a run was made by a later clock, more than clocks of
    /// several nodes differ. Such runs that have not started, and whose tick, if they have one, does not lie ahead, wait from
    /// now on as long as they were to wait when they were made. A tick that lies ahead is waited for.
    pub(crate) fn may_be_back(self, now: Timestamp) -> Option<Timestamp> {
        (self != Clock::On).then(|| now.saturating_add(CLOCK_BACK_MIN).unwrap_or(now))
    }
}

impl Default for LastClaim {
    fn default() -> LastClaim {
        LastClaim(AtomicI64::new(i64::MIN))
    }
}

impl LastClaim {
    /// How the clock stands at a claim.
    pub(crate) fn clock_at(&self, now: Timestamp) -> Clock {
        let now = now.as_microsecond();
        match self.0.swap(now, Ordering::Relaxed) {
            i64::MIN => Clock::Unknown,
            last if last > now.saturating_add(OUT_OF_ORDER_MICROS) => Clock::Back,
            _ => Clock::On,
        }
    }
}
