//! Notices when the clock of this process was set back.

use std::sync::atomic::{AtomicI64, Ordering};

use belfry_time::Timestamp;

/// Callers on several threads bring their instants out of order by less than this.
const OUT_OF_ORDER_MICROS: i64 = 50_000;

/// The instant of the last claim. A run that waits at a gate is not looked at again before somebody leaves that gate; what
/// held it there may no longer be due by a clock that was set back.
#[derive(Debug)]
pub(crate) struct LastClaim(AtomicI64);

impl LastClaim {
    pub(crate) fn none() -> LastClaim {
        LastClaim(AtomicI64::new(i64::MIN))
    }

    /// Whether the clock was set back between the last claim and this one.
    pub(crate) fn was_after(&self, now: Timestamp) -> bool {
        let now = now.as_microsecond();
        self.0.swap(now, Ordering::Relaxed) > now.saturating_add(OUT_OF_ORDER_MICROS)
    }
}
