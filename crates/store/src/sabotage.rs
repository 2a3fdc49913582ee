//! Ways to break a store on purpose. The conformance suite must notice each; a store is whole unless a test says so.

use std::sync::atomic::{AtomicU8, Ordering};

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Sabotage {
    /// Nothing.
    None = 0,
    /// A plan is committed although somebody else consumed its token.
    NoTokenCheck = 1,
    /// Running runs are counted before the gate is locked.
    CountBeforeLock = 2,
    /// A finish does not look at the epoch.
    FinishWithoutEpoch = 3,
    /// Parked runs are released outside the lock of their gate.
    ReleaseOutsideLock = 4,
    /// Pruning history arms ticks again.
    PruneArms = 5,
}

/// The switch of one store.
#[derive(Debug, Default)]
pub struct Switch(AtomicU8);

impl Switch {
    /// Breaks the store, or makes it whole.
    #[cfg(feature = "testing")]
    pub fn set(&self, sabotage: Sabotage) {
        self.0.store(sabotage as u8, Ordering::SeqCst);
    }

    /// Whether the store is broken in this way; never without the feature.
    pub(crate) fn is(&self, sabotage: Sabotage) -> bool {
        cfg!(feature = "testing") && self.0.load(Ordering::SeqCst) == sabotage as u8
    }
}
